"""LangChain and LangGraph: the shared cases, and what is special about resuming from checkpoints."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NoReturn
from uuid import uuid4

import pytest
from cases import Answer, Case, Driver, Job, Outcome, all_cases, require, run_on_loop

require("langchain")

from langchain.agents import create_agent  # noqa: E402
from langchain_core.language_models.chat_models import BaseChatModel  # noqa: E402
from langchain_core.messages import AIMessage, ToolMessage  # noqa: E402
from langchain_core.outputs import ChatGeneration, ChatResult  # noqa: E402
from langchain_core.tools import tool as their_tool  # noqa: E402
from langchain_core.utils.function_calling import convert_to_openai_tool  # noqa: E402
from langgraph.checkpoint.memory import InMemorySaver  # noqa: E402
from langgraph.types import Command, interrupt  # noqa: E402

from weakincentives.integrations.langchain import WinkMiddleware  # noqa: E402


class Scripted(BaseChatModel):
    """Says its turns one after the other, by how often it has spoken in the conversation."""

    turns: Sequence[Any]
    shown: dict[str, dict[str, Any]] = {}

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def bind_tools(self, tools: Sequence[Any], **_: Any) -> Any:
        for each in map(convert_to_openai_tool, tools):
            found = each["function"]
            self.shown[found["name"]] = {
                "description": found["description"],
                "schema": found["parameters"],
            }
        return self

    def _generate(self, messages: Any, *_: Any, **__: Any) -> ChatResult:
        spoken = sum(isinstance(each, AIMessage) for each in messages)
        turn = self.turns[spoken]
        if isinstance(turn, str):
            said = AIMessage(turn)
        else:
            calls = [{"id": e.id, "name": e.tool, "args": e.arguments} for e in turn]
            said = AIMessage("", tool_calls=calls)
        return ChatResult(generations=[ChatGeneration(message=said)])


def stored(saver: InMemorySaver) -> bytes:
    """Return what a checkpointer holds, for another process."""
    storage = {t: {ns: dict(c) for ns, c in by.items()} for t, by in saver.storage.items()}
    return pickle.dumps((storage, dict(saver.writes), dict(saver.blobs)))


def restored(state: bytes) -> InMemorySaver:
    saver = InMemorySaver()
    storage, writes, blobs = pickle.loads(state)
    for thread, by in storage.items():
        for ns, checkpoints in by.items():
            saver.storage[thread][ns].update(checkpoints)
    saver.writes.update(writes)
    saver.blobs.update(blobs)
    return saver


class LangChain(Driver):
    name: ClassVar[str] = "LangChain"
    limits: ClassVar[Mapping[str, str]] = {
        "cancelling_one_call_leaves_the_others": (
            "LangGraph cancels a whole run, never one call of it"
        ),
    }

    def run(self, job: Job) -> Outcome:
        start = {"messages": [("user", "go")]}
        return self._run(job, InMemorySaver(), str(uuid4()), start)

    def resume(self, job: Job, state: Any) -> Outcome:
        saver, thread, turns, waiting = state
        answers = Command(resume=_resume(waiting, job.answers))
        return self._run(job, restored(saver), thread, answers, turns)

    def suspend(self) -> NoReturn:
        interrupt("what now?")
        raise AssertionError("not resumed")

    def _run(
        self, job: Job, saver: InMemorySaver, thread: str, start: Any, earlier: Any = ()
    ) -> Outcome:
        done = Outcome()
        model = Scripted(turns=[*earlier, *job.turns])
        done.tools = model.shown
        config: Any = {
            "configurable": {"thread_id": thread},
            "max_concurrency": 16,
            "recursion_limit": 200,
        }
        with WinkMiddleware(
            job.workspace, tools=job.tools, policies=job.policies, run=job.run or None
        ) as wink:
            own = [their_tool(each) for each in job.own]
            agent: Any = create_agent(model, own, middleware=[wink], checkpointer=saver)
            try:
                while True:
                    state = self.invoke(agent, start, config, job)
                    waiting = state.get("__interrupt__", ())
                    for each in waiting:
                        if isinstance(each.value, dict):
                            done.questions[each.value["tool_call_id"]] = each.value["description"]
                    answers = _resume(waiting, job.answers)
                    if not answers:
                        break
                    start = Command(resume=answers)
            except BaseException as error:
                done.error = error
                state = agent.get_state(config).values
                waiting = ()
        for each in state.get("messages", ()):
            if isinstance(each, ToolMessage):
                done.answers[each.tool_call_id] = each.text
            elif isinstance(each, AIMessage) and not each.tool_calls:
                done.text = each.text
        spoken = sum(isinstance(each, AIMessage) for each in state.get("messages", ()))
        done.state = (stored(saver), thread, model.turns[:spoken], waiting)
        return done

    def invoke(self, agent: Any, start: Any, config: Any, job: Job) -> Any:
        return run_on_loop(agent.ainvoke(start, config), job.cancel_when)


class LangChainSync(LangChain):
    limits: ClassVar[Mapping[str, str]] = {
        **LangChain.limits,
        "cancelling_the_run_rolls_back_the_open_call": "threads",
        "the_next_run_works_after_a_cancelled_one": "threads",
    }

    def invoke(self, agent: Any, start: Any, config: Any, job: Job) -> Any:
        return agent.invoke(start, config)


def _resume(waiting: Any, answers: Mapping[str, Answer]) -> dict[str, Any]:
    """Return the answers to what waits, by the interrupt's id."""
    found: dict[str, Any] = {}
    for each in waiting:
        call = each.value["tool_call_id"] if isinstance(each.value, dict) else ""
        if call not in answers:
            continue
        answer = answers[call].given()
        decision: dict[str, Any] = {"type": "approve", "by": answer.by}
        if not answer.approved:
            decision = {"type": "reject", "by": answer.by, "message": answer.reason}
        elif answer.arguments is not None:
            action = {"name": each.value["name"], "args": answer.arguments}
            decision = {"type": "edit", "by": answer.by, "edited_action": action}
        found[each.id] = decision
    return found


@pytest.mark.parametrize("case", all_cases(), ids=str)
def test_case(case: Case, tmp_path: Path) -> None:
    case.run(LangChain, tmp_path)


@pytest.mark.parametrize("case", all_cases(), ids=str)
def test_case_without_an_event_loop(case: Case, tmp_path: Path) -> None:
    case.run(LangChainSync, tmp_path)
