"""LangChain and LangGraph: the shared cases, and what is special about checkpoints."""

# ruff: noqa: E402  # where the framework is missing, nothing of it can be imported

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, NoReturn
from uuid import uuid4

import pytest
from cases import (
    PATIENCE,
    Answer,
    Ask,
    Case,
    Driver,
    Job,
    Outcome,
    Turn,
    all_cases,
    require,
    run_invoice_desk,
    run_on_loop,
)

require("langchain")

from langchain.agents import create_agent
from langchain.agents.middleware import (
    HumanInTheLoopMiddleware,
    ShellToolMiddleware,
    ToolRetryMiddleware,
)
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.tools import InjectedToolCallId, ToolException
from langchain_core.tools import tool as their_tool
from langchain_core.utils.function_calling import convert_to_openai_tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import InjectedState, ToolNode, ToolRuntime
from langgraph.types import Command, interrupt
from pydantic import Field, ValidationError

from weakincentives import ToolContext, ToolRegistry, tool
from weakincentives.errors import ToolDefinitionError, WinkError
from weakincentives.integrations import adopt
from weakincentives.integrations.langchain import WinkMiddleware
from weakincentives.prompt import ApprovalPolicy
from weakincentives.session.events import ToolInvoked


class Scripted(BaseChatModel):
    """Says its turns one after the other, by how often it has spoken in the conversation."""

    turns: Sequence[Any]
    shown: dict[str, dict[str, Any]] = Field(default_factory=dict)

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


_IN_THREADS = "`invoke` runs calls in threads, which cannot be cancelled; `ainvoke` can be"


class LangChainSync(LangChain):
    name: ClassVar[str] = "LangChain, sync"
    limits: ClassVar[Mapping[str, str]] = {
        **LangChain.limits,
        "cancelling_the_run_rolls_back_an_own_tool": _IN_THREADS,
        "cancelling_the_run_rolls_back_the_open_call": _IN_THREADS,
        "the_next_run_works_after_a_cancelled_one": _IN_THREADS,
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


# What is special


@dataclass
class Scene:
    """A workspace, and agents in it, run with or without an event loop."""

    place: Path
    is_async: bool
    wink: WinkMiddleware | None = None
    agent: Any = None

    def middleware(self, **options: Any) -> WinkMiddleware:
        self.wink = WinkMiddleware(self.place, **{"tools": [], **options})
        return self.wink

    def create(
        self, *turns: Turn, own: Sequence[Any] = (), around: Sequence[Any] = (), **options: Any
    ) -> None:
        wink = self.middleware(**options)
        model = Scripted(turns=[*turns, "done"])
        self.agent = create_agent(
            model, own, middleware=[*around, wink], checkpointer=InMemorySaver()
        )

    def invoke(self, start: Any = "go", thread: str = "a thread") -> dict[str, Any]:
        if start == "go":
            start = {"messages": [("user", "go")]}
        config = {"configurable": {"thread_id": thread}}
        if self.is_async:
            return asyncio.run(self.agent.ainvoke(start, config))
        return self.agent.invoke(start, config)

    def resume(self, answer: Any, thread: str = "a thread") -> dict[str, Any]:
        return self.invoke(Command(resume=answer), thread)

    def records(self, thread: str = "a thread") -> list[tuple[str, bool]]:
        """Return the tool of each call on record, and whether it was a success."""
        assert self.wink is not None
        found = next(
            each.registry.session[ToolInvoked].all()
            for (_, key), each in self.wink._bridge._runs.items()
            if key == thread
        )
        return [(each.tool_name, each.success) for each in found if not each.suspended]

    def files(self) -> list[str]:
        return sorted(str(each.relative_to(self.place)) for each in self.place.rglob("*"))


@pytest.fixture(params=["async", "sync"])
def scene(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Scene]:
    place = tmp_path / "project"
    place.mkdir()
    scene = Scene(place, request.param == "async")
    yield scene
    if scene.wink is not None:
        scene.wink.close()


def told(state: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Return what the model was told, by call id."""
    messages = [each for each in state["messages"] if isinstance(each, ToolMessage)]
    return {each.tool_call_id: (each.status, str(each.text)) for each in messages}


@tool(reach="reversible")
def save(path: str, text: str, *, context: ToolContext) -> str:
    """Write a file."""
    context.filesystem.write(path, text)
    return f"saved {path}"


def _save(call: str, path: str, text: str = "x") -> Ask:
    return Ask(call, "save", {"path": path, "text": text})


def counting() -> tuple[list[int], Any]:
    """Return a tool that counts its runs, and its count."""
    runs = [0]

    @tool(reach="irreversible")
    def count() -> str:
        """Count."""
        runs[0] += 1
        return f"run {runs[0]}"

    return runs, count


def test_a_model_that_repeats_its_ids_runs_every_call(scene: Scene) -> None:
    """Calls of different steps, or of one step, are told apart though their ids are the same."""
    runs, count = counting()
    again = [Ask("c", "count")]
    scene.create(again, again, [*again, *again], tools=[count])

    scene.invoke()

    assert runs == [4]


def test_a_thread_goes_on_in_the_same_run(scene: Scene) -> None:
    """The next message of a conversation adds to its run; another thread has its own."""
    scene.create([_save("c", "one")], "and?", [_save("c", "two")], tools=[save])

    scene.invoke()
    scene.invoke()
    scene.invoke(thread="another")

    assert scene.records() == [("save", True)] * 2
    assert scene.records("another") == [("save", True)]


def test_another_process_resumes_a_thread(tmp_path: Path) -> None:
    """Killed while it waits for an answer, a run goes on elsewhere; nothing is repeated."""
    place = tmp_path / "project"
    place.mkdir()

    asked, answered = (
        subprocess.run(
            [sys.executable, __file__, step, str(place), str(tmp_path / "state")],
            capture_output=True,
            text=True,
        )
        for step in ("begin", "resume")
    )

    assert (asked.returncode, answered.returncode) == (9, 0), asked.stderr + answered.stderr
    assert "note.txt" in asked.stdout
    assert answered.stdout.splitlines() == ["sent", "saved note.txt", "done"]
    assert (place / "sent.txt").read_text() == "hello\n"
    assert (place / "note.txt").read_text() == "new"


def _in_a_process(step: str, place: Path, state: Path) -> None:
    @their_tool
    def send(text: str) -> str:
        """Send a message."""
        with (place / "sent.txt").open("a") as file:
            file.write(f"{text}\n")
        return "sent"

    wink = WinkMiddleware(place, tools=[save], policies=[ApprovalPolicy(tools={"save"})])
    turns = [[Ask("c1", "send", {"text": "hello"})], [_save("c2", "note.txt", "new")], "done"]
    saver = restored(state.read_bytes()) if step == "resume" else InMemorySaver()
    agent: Any = create_agent(Scripted(turns=turns), [send], middleware=[wink], checkpointer=saver)
    config = {"configurable": {"thread_id": "a thread"}}
    if step == "begin":
        found = agent.invoke({"messages": [("user", "go")]}, config)
        sys.stdout.write(found["__interrupt__"][0].value["description"])
        sys.stdout.flush()
        state.write_bytes(stored(saver))
        os._exit(9)  # nothing is closed
    with wink:
        for each in agent.invoke(Command(resume=True), config)["messages"][1:]:
            if each.text:
                sys.stdout.write(f"{each.text}\n")


def in_one_node(scene: Scene, *calls: Ask, own: Sequence[Any] = (), **options: Any) -> Any:
    """Run calls in a plain tool node, all in one task, and return its state."""
    wink = scene.middleware(**options)
    node = ToolNode(
        [*wink.tools, *own],
        wrap_tool_call=wink.wrap_tool_call,
        awrap_tool_call=wink.awrap_tool_call,
    )
    graph = StateGraph(MessagesState)
    graph.add_node("tools", node)
    graph.add_edge(START, "tools")
    graph.add_edge("tools", END)
    scene.agent = graph.compile(checkpointer=InMemorySaver())
    made = [{"id": each.id, "name": each.tool, "args": each.arguments} for each in calls]
    return scene.invoke({"messages": [AIMessage("", tool_calls=made)]})


def test_siblings_of_an_interrupted_call_are_not_run_again(scene: Scene) -> None:
    """A tool node runs all its calls again when one resumes; those on record do not run."""
    runs, count = counting()
    own_runs = [0]

    @their_tool
    def remember(text: str, tool_call_id: Annotated[str, InjectedToolCallId]) -> Any:
        """Remember something."""
        own_runs[0] += 1
        return Command(update={"messages": [ToolMessage("noted", tool_call_id=tool_call_id)]})

    @their_tool(response_format="content_and_artifact")
    def draw(text: str) -> Any:
        """Draw something."""
        own_runs[0] += 1
        return "a drawing", {"pixels": [1, 2]}

    in_one_node(
        scene,
        Ask("c1", "count"),
        Ask("c2", "remember", {"text": "x"}),
        Ask("c3", "draw", {"text": "x"}),
        _save("c4", "note.txt"),
        own=[remember, draw],
        tools=[count, save],
        policies=[ApprovalPolicy(tools={"save"})],
    )
    state = scene.resume(True)

    assert (runs, own_runs) == ([1], [2])
    assert told(state) == {
        "c1": ("success", "run 1"),
        "c2": ("success", "noted"),
        "c3": ("success", "a drawing"),
        "c4": ("success", "saved note.txt"),
    }
    drawn = next(m for m in state["messages"] if getattr(m, "tool_call_id", "") == "c3")
    assert drawn.artifact == {"pixels": [1, 2]}


def test_one_call_of_a_node_asks_a_person(scene: Scene) -> None:
    """LangGraph does not tell answers for one node apart: a second question is not asked."""
    calls = [_save("c1", "one.txt"), _save("c2", "two.txt")]

    state = in_one_node(scene, *calls, tools=[save], policies=[ApprovalPolicy()])
    (asked,) = state["__interrupt__"]
    answers = told(scene.resume(True))

    shown = asked.value["tool_call_id"]
    (other,) = answers.keys() - {shown}
    assert answers[shown][0] == "success"
    assert "make this call again, alone" in answers[other][1]
    assert scene.files() == [asked.value["args"]["path"]]


def test_parallel_calls_are_asked_about_one_by_one(scene: Scene) -> None:
    """In an agent every call has a node of its own: each can be answered when it suits."""
    calls = [_save("c1", "one.txt"), _save("c2", "two.txt"), _save("c3", "three.txt")]
    scene.create(calls, tools=[save], policies=[ApprovalPolicy()])

    waiting = {e.value["tool_call_id"]: e.id for e in scene.invoke()["__interrupt__"]}
    state = scene.resume({waiting["c2"]: {"type": "approve"}})
    assert {e.value["tool_call_id"] for e in state["__interrupt__"]} == {"c1", "c3"}
    assert scene.files() == ["two.txt"]
    no = {"type": "reject", "message": "not this one"}
    state = scene.resume({waiting["c1"]: no, waiting["c3"]: {"type": "approve"}})

    assert scene.files() == ["three.txt", "two.txt"]
    assert "not this one" in told(state)["c1"][1]


def test_the_question_is_that_of_langchains_own_review(scene: Scene) -> None:
    """A client made for LangChain's per-call review shows ours, with the change in words."""
    (scene.place / "note.txt").write_text("old words\n")
    change = Ask("c1", "write_file", {"path": "note.txt", "content": "new words\n"})
    look = Ask("c0", "read_file", {"path": "note.txt"})
    scene.create([look], [change], tools=None, policies=[ApprovalPolicy(tools={"write_file"})])

    (asked,) = scene.invoke()["__interrupt__"]

    value = asked.value
    assert (value["type"], value["tool_call_id"]) == ("tool_approval", "c1")
    assert (value["name"], value["args"]["path"]) == ("write_file", "note.txt")
    assert "-old words" in value["description"]
    assert "+new words" in value["description"]
    assert asked.response_schema["properties"]["type"]["enum"] == ["approve", "edit", "reject"]


@pytest.mark.parametrize(
    "answer",
    [
        "yes",
        {"type": "respond", "message": "it is done"},
        {"type": "edit"},
        {"type": "edit", "edited_action": {"name": "other", "args": {}}},
        {"type": "edit", "edited_action": {"name": "save", "args": {"path": 1}}},
        {"decisions": [{"type": "approve"}, {"type": "approve"}]},
    ],
)
def test_an_invalid_answer_can_be_given_again(scene: Scene, answer: Any) -> None:
    """It neither approves nor denies: the question stays."""
    scene.create([_save("c1", "a.txt")], tools=[save], policies=[ApprovalPolicy()])
    scene.invoke()

    with pytest.raises(ValidationError):
        scene.resume(answer)
    assert scene.files() == []
    edited = {"name": "save", "args": {"path": "b.txt", "text": "x"}}
    state = scene.resume({"decisions": [{"type": "edit", "edited_action": edited}]})

    assert scene.files() == ["b.txt"]
    assert "b.txt" in told(state)["c1"][1]


def test_a_tool_that_asks_is_approved_first(scene: Scene) -> None:
    """The answers to our question and to the tool's own questions are not mixed up."""

    @their_tool
    def ask_user(question: str) -> str:
        """Ask the user."""
        (scene.place / "draft.txt").write_text(question)
        first = interrupt({"question": question})
        second = interrupt({"question": f"{first}, really?"})
        return f"{first}, {second}"

    call = Ask("c1", "ask_user", {"question": "which?"})
    scene.create([call], own=[ask_user], policies=[ApprovalPolicy()])

    (asked,) = scene.invoke()["__interrupt__"]
    assert asked.value["type"] == "tool_approval"
    for answer, question in ((True, "which?"), ("blue", "blue, really?")):
        (asked,) = scene.resume(answer)["__interrupt__"]
        assert asked.value == {"question": question}
        assert scene.files() == []
    state = scene.resume("yes")

    assert told(state)["c1"] == ("success", "blue, yes")
    assert scene.files() == ["draft.txt"]


def test_a_call_whose_exception_ended_the_run_runs_again(scene: Scene) -> None:
    """The model was told nothing, so resuming runs it again; what had finished is not repeated."""
    is_broken = [True]

    @their_tool
    def build(target: str) -> str:
        """Build."""
        (scene.place / "out.txt").write_text(target)
        if is_broken[0]:
            raise OSError("disk full")
        return "built"

    build_it = Ask("c2", "build", {"target": "site"})
    scene.create([_save("c1", "a.txt"), build_it], own=[build], tools=[save])

    with pytest.raises(OSError, match="disk full"):
        scene.invoke()
    assert not (scene.place / "out.txt").exists()
    is_broken[0] = False
    state = scene.invoke(None)

    assert told(state) == {"c1": ("success", "saved a.txt"), "c2": ("success", "built")}
    assert scene.files() == ["a.txt", "out.txt"]
    assert [each for each in scene.records() if each[0] == "build"] == [
        ("build", False),
        ("build", True),
    ]


def test_what_may_have_reached_outside_is_not_done_again(scene: Scene) -> None:
    """A tool that is irreversible, and raised, does not run when its node resumes."""
    sent = [0]

    @their_tool
    def send(text: str) -> str:
        """Send a message."""
        sent[0] += 1
        raise OSError("no answer")

    call = Ask("c1", "send", {"text": "hello"})
    scene.create([call], own=[send], reaches={"send": "irreversible"})

    with pytest.raises(OSError, match="no answer"):
        scene.invoke()
    state = scene.invoke(None)

    assert sent == [1]
    assert told(state)["c1"][0] == "error"
    assert "no answer" in told(state)["c1"][1]


def test_every_retry_of_langchain_is_a_transaction(scene: Scene) -> None:
    """A retry starts from the files before the failed attempt."""
    runs = [0]

    @their_tool
    def build(target: str) -> str:
        """Build."""
        runs[0] += 1
        (scene.place / f"out{runs[0]}.txt").write_text(target)
        if runs[0] < 3:
            raise OSError("disk full")
        return "built"

    retry = ToolRetryMiddleware(max_retries=3, initial_delay=0, jitter=False)
    scene.create([Ask("c1", "build", {"target": "site"})], own=[build], around=[retry])

    assert told(scene.invoke())["c1"] == ("success", "built")
    assert scene.files() == ["out3.txt"]
    assert scene.records() == [("build", False), ("build", False), ("build", True)]


def test_an_error_that_the_tool_handles_is_rolled_back(scene: Scene) -> None:
    """LangChain's error messages go to the model, which also reads that nothing is left."""

    @their_tool
    def build(target: str) -> str:
        """Build."""
        (scene.place / "out.txt").write_text(target)
        raise ToolException("no such target")

    build.handle_tool_error = True
    wrong = Ask("c2", "build", {"goal": 1})
    scene.create([Ask("c1", "build", {"target": "site"})], [wrong], own=[build])

    answers = told(scene.invoke())

    assert answers["c1"][0] == answers["c2"][0] == "error"
    assert "no such target" in answers["c1"][1]
    assert "undone" in answers["c1"][1]
    assert "target: Field required" in answers["c2"][1]
    assert scene.files() == []
    assert scene.records() == [("build", False)] * 2


# LangChain leaves the pipes of its shell open.
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
def test_the_shell_of_langchain_is_rolled_back(scene: Scene) -> None:
    """A failed command leaves the files as they were; the shell keeps directory and variables."""
    (scene.place / "keep.txt").write_text("keep")
    bad = "mkdir sub; cd sub; X=1; echo new > new.txt; rm ../keep.txt; false"
    good = "echo $X > ../x.txt"
    scene.create(
        [Ask("c1", "shell", {"command": bad})],
        [Ask("c2", "shell", {"command": good})],
        around=[ShellToolMiddleware(workspace_root=scene.place)],
    )

    answers = told(scene.invoke())

    assert answers["c1"][0] == "error"
    assert "undone" in answers["c1"][1]
    assert scene.files() == ["keep.txt", "x.txt"]
    assert (scene.place / "x.txt").read_text() == "1\n"
    assert scene.records() == [("shell", False), ("shell", True)]
    scene.agent = None
    gc.collect()  # its shell, while the warning is ignored


def test_what_a_tool_gives_its_agent_comes_back_unchanged(scene: Scene) -> None:
    """Commands, artifacts and content blocks are not touched."""
    blocks = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]

    @their_tool
    def show(text: str, runtime: ToolRuntime, state: Annotated[dict, InjectedState]) -> Any:
        """Show something."""
        assert len(state["messages"]) == 2
        message = ToolMessage(blocks, tool_call_id=runtime.tool_call_id or "", artifact=runs)
        return Command(update={"messages": [message]})

    runs = [1, 2, 3]
    scene.create([Ask("c1", "show", {"text": "x"})], own=[show])

    found = scene.invoke()["messages"][2]

    assert (found.content, found.artifact) == (blocks, runs)


@pytest.mark.parametrize("is_named", [True, False])
def test_an_agent_that_a_tool_runs_makes_calls_of_its_own(scene: Scene, is_named: bool) -> None:
    """They stay when it pauses, and are not made again; a tool that is not named is an error."""
    wink = scene.middleware(
        tools=[save], policies=[ApprovalPolicy()], agents={"delegate"} if is_named else ()
    )
    inner_turns: list[Turn] = [[_save("i1", "one.txt")], [_save("i2", "two.txt")], "delegated"]
    inner: Any = create_agent(Scripted(turns=inner_turns), middleware=[wink])
    start = {"messages": [("user", "go")]}

    @their_tool
    async def delegate_async(task: str) -> str:
        """Give a task to another agent."""
        return (await inner.ainvoke(start))["messages"][-1].text

    @their_tool
    def delegate_sync(task: str) -> str:
        """Give a task to another agent."""
        return inner.invoke(start)["messages"][-1].text

    delegate = delegate_async if scene.is_async else delegate_sync
    delegate.name = "delegate"
    turns: list[Turn] = [[Ask("c1", "delegate", {"task": "t"})], "done"]
    scene.agent = create_agent(
        Scripted(turns=turns), [delegate], middleware=[wink], checkpointer=InMemorySaver()
    )

    state, asked = scene.invoke(), []
    if not is_named:
        with pytest.raises(WinkError, match=r"agents=\{'delegate'\}"):
            scene.resume(True)
        return
    while waiting := state.get("__interrupt__"):
        asked.append(waiting[0].value["tool_call_id"])
        state = scene.resume(True)

    assert asked == ["c1", "i1", "i2"]
    assert told(state)["c1"] == ("success", "delegated")
    assert scene.files() == ["one.txt", "two.txt"]
    assert scene.records() == [("delegate", True), ("save", True), ("save", True)]


def test_agents_of_one_process_share_a_thread(scene: Scene) -> None:
    """Two agents, each with a middleware of its own, continue one run."""
    for path in ("one.txt", "two.txt"):
        first = scene.wink
        scene.create([_save("c1", path)], tools=[save])
        scene.invoke()
    assert first is not None

    assert scene.files() == ["one.txt", "two.txt"]
    assert scene.records() == [("save", True)] * 2
    first.close()
    scene.create([_save("c1", "three.txt")], tools=[save])
    scene.invoke()
    assert scene.records() == [("save", True)] * 3


def test_the_directory_is_free_while_the_agent_is_idle(tmp_path: Path) -> None:
    """Another process can work on it, though the middleware is not closed; then the agent can."""
    place = tmp_path / "project"
    place.mkdir()
    scene = Scene(place, is_async=False)
    scene.create([_save("c1", "a.txt")], "and?", [_save("c2", "b.txt")], tools=[save])
    scene.invoke()
    undo = [sys.executable, "-m", "weakincentives.cli", "undo", "--workspace", str(place)]

    latest = time.monotonic() + PATIENCE
    while (done := subprocess.run(undo, capture_output=True, text=True)).returncode:
        assert time.monotonic() < latest, done.stderr

    assert scene.files() == []
    assert told(scene.invoke())["c2"] == ("success", "saved b.txt")
    assert scene.files() == ["b.txt"]
    assert scene.wink is not None
    scene.wink.close()


def test_a_handover_to_another_agent_is_committed(scene: Scene) -> None:
    """A tool that ends its agent, and names the next one, has done its work."""

    @their_tool
    def hand_over(runtime: ToolRuntime) -> Any:
        """Let the other agent continue."""
        (scene.place / "notes.txt").write_text("x")
        answer = ToolMessage("handed over", tool_call_id=runtime.tool_call_id or "")
        messages = [*runtime.state["messages"], answer]
        return Command(goto="second", graph=Command.PARENT, update={"messages": messages})

    wink = scene.middleware(tools=[save])
    first: list[Turn] = [[Ask("c1", "hand_over")], "never said"]
    second: list[Turn] = ["never said", [_save("c2", "a.txt")], "done"]
    graph = StateGraph(MessagesState)
    agents = (("first", first, [hand_over]), ("second", second, []))
    for name, turns, own in agents:
        graph.add_node(name, create_agent(Scripted(turns=turns), own, middleware=[wink]))
    graph.add_edge(START, "first")
    scene.agent = graph.compile(checkpointer=InMemorySaver())

    state = scene.invoke()

    assert told(state) == {"c1": ("success", "handed over"), "c2": ("success", "saved a.txt")}
    assert scene.files() == ["a.txt", "notes.txt"]
    assert scene.records() == [("hand_over", True), ("save", True)]


@pytest.mark.parametrize("mode", ["batched", "per_call"])
def test_langchains_own_review_may_come_first(scene: Scene, mode: Any) -> None:
    """Both ask, and each gets its own answer; what is edited there is what we ask about."""
    review = HumanInTheLoopMiddleware({"save": True}, interrupt_mode=mode)
    scene.create([_save("c1", "a.txt")], around=[review], tools=[save], policies=[ApprovalPolicy()])
    edited = {"name": "save", "args": {"path": "b.txt", "text": "x"}}
    edit = {"type": "edit", "edited_action": edited}

    scene.invoke()
    (asked,) = scene.resume({"decisions": [edit]} if mode == "batched" else edit)["__interrupt__"]
    assert (asked.value["tool_call_id"], asked.value["args"]) == ("c1", edited["args"])
    scene.resume(True)

    assert scene.files() == ["b.txt"]


def test_the_context_of_a_run_names_the_workspace(scene: Scene) -> None:
    """One agent serves several directories."""
    for name in ("ann", "bob"):
        (scene.place / name).mkdir()
    wink = scene.wink = WinkMiddleware(lambda run: scene.place / run.context["user"], tools=[save])
    agent: Any = create_agent(
        Scripted(turns=[[_save("c1", "a.txt")], "done"]), middleware=[wink], context_schema=dict
    )

    for name in ("ann", "bob"):
        start = {"messages": [("user", "go")]}
        if scene.is_async:
            asyncio.run(agent.ainvoke(start, context={"user": name}))
        else:
            agent.invoke(start, context={"user": name})

    assert [(scene.place / name / "a.txt").read_text() for name in ("ann", "bob")] == ["x", "x"]


def test_progress_is_streamed(scene: Scene) -> None:
    """Events of tools, ours and the agent's own, reach whoever streams the run."""

    @their_tool
    def work(amount: int, runtime: ToolRuntime) -> str:
        """Work."""
        runtime.stream_writer({"done": amount})
        return "worked"

    scene.create([_save("c1", "a.txt"), Ask("c2", "work", {"amount": 3})], own=[work], tools=[save])
    config = {"configurable": {"thread_id": "a thread"}}
    start: Any = {"messages": [("user", "go")]}
    modes = ["custom", "tools"]

    async def streamed() -> list[Any]:
        return [each async for each in scene.agent.astream(start, config, stream_mode=modes)]

    if scene.is_async:
        events = asyncio.run(streamed())
    else:
        events = list(scene.agent.stream(start, config, stream_mode=modes))

    assert ("custom", {"done": 3}) in events
    told_of = [(e["event"], e["tool_call_id"]) for mode, e in events if mode == "tools"]
    assert set(told_of) == {
        (event, call) for event in ("tool-started", "tool-finished") for call in ("c1", "c2")
    }


def test_a_cancelled_tool_in_a_thread_is_undone_when_it_ends(tmp_path: Path) -> None:
    """A thread cannot be stopped: what it does before it ends is rolled back, too."""
    place = tmp_path / "project"
    place.mkdir()
    scene = Scene(place, is_async=True)
    started, go_on = threading.Event(), threading.Event()

    @their_tool
    def work(amount: int) -> str:
        """Work."""
        (place / "early.txt").write_text("x")
        started.set()
        assert go_on.wait(PATIENCE)
        (place / "late.txt").write_text("x")
        return "worked"

    scene.create([Ask("c1", "work", {"amount": 3})], own=[work])

    async def cancelled() -> None:
        config = {"configurable": {"thread_id": "a thread"}}
        run = asyncio.ensure_future(scene.agent.ainvoke({"messages": [("user", "go")]}, config))
        while not started.is_set():
            await asyncio.sleep(0.005)
        run.cancel()
        await asyncio.sleep(0.005)
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await run

    asyncio.run(cancelled())
    assert scene.files() == []
    assert scene.records() == [("work", False)]
    assert told(scene.invoke(None))["c1"] == ("success", "worked")
    assert scene.files() == ["early.txt", "late.txt"]
    assert scene.wink is not None
    scene.wink.close()


def test_our_tools_can_be_called_without_a_graph(tmp_path: Path) -> None:
    """As any of LangChain's tools; arguments may have names that LangChain uses itself."""

    @tool
    def configure(config: str, runtime: str, run_manager: str) -> str:
        """Configure."""
        return f"{config} {runtime} {run_manager}"

    arguments = {"config": "a", "runtime": "b", "run_manager": "c"}
    with WinkMiddleware(tmp_path, tools=[configure]) as wink:
        offered = wink.tools[0]
        assert offered.invoke(arguments) == "a b c"
        agent: Any = create_agent(
            Scripted(turns=[[Ask("c1", "configure", arguments)], "done"]), middleware=[wink]
        )
        state = agent.invoke({"messages": [("user", "go")]})

    assert told(state)["c1"] == ("success", "a b c")


# LangChain's tools as ours


def _adopted(made: Any, place: Path, arguments: dict[str, Any]) -> Any:
    with ToolRegistry([adopt(made)], workspace=place) as tools:
        return tools.execute(made.name.lower(), arguments)


@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize("handled", [True, False])
def test_an_adopted_tool_reports_errors_its_own_way(
    tmp_path: Path, is_async: bool, handled: bool
) -> None:
    """A ToolException is a failed call, also if the tool turns it into a message itself."""

    def act(amount: int) -> str:
        """Act."""
        (tmp_path / "half.txt").write_text("x")
        raise ToolException("out of stock")

    async def act_async(amount: int) -> str:
        """Act."""
        return act(amount)

    made = their_tool("Act")(act_async if is_async else act)
    made.handle_tool_error = handled

    result = _adopted(made, tmp_path, {"amount": 1})

    assert (result.success, result.message) == (False, "out of stock")
    assert not (tmp_path / "half.txt").exists()


def test_an_adopted_tool_keeps_its_schema(tmp_path: Path) -> None:
    """Arguments are checked by it, all at once; the id of the call is injected."""

    @their_tool
    def label(text: str, size: int, call: Annotated[str, InjectedToolCallId]) -> str:
        """Make a label."""
        return f"{text} {size} {bool(call)}"

    assert _adopted(label, tmp_path, {"text": "a", "size": 2}).value == "a 2 True"
    refused = _adopted(label, tmp_path, {"text": 1, "size": "2"}).message
    assert "text" in refused
    assert "size" in refused


def _injected() -> list[Callable[..., Any]]:
    def with_state(text: str, state: Annotated[dict, InjectedState]) -> str:
        """Read the state."""
        return text

    def with_runtime(text: str, runtime: ToolRuntime) -> str:
        """Read the runtime."""
        return text

    return [with_state, with_runtime]


@pytest.mark.parametrize("function", _injected())
def test_a_tool_that_needs_a_graph_is_not_adopted(function: Callable[..., Any]) -> None:
    """The error names the argument that only a graph can inject."""
    with pytest.raises(ToolDefinitionError, match=r"only a graph can inject (state|runtime)"):
        adopt(their_tool(function))


def test_an_adopted_tool_cannot_change_the_state_of_a_graph(tmp_path: Path) -> None:
    """A Command needs a graph; the call fails, and says so."""

    @their_tool
    def jump(to: str) -> Any:
        """Go somewhere else."""
        (tmp_path / "half.txt").write_text("x")
        return Command(goto=to)

    result = _adopted(jump, tmp_path, {"to": "end"})

    assert "only a graph can apply" in result.message
    assert not (tmp_path / "half.txt").exists()


def test_the_invoice_desk_runs_unchanged_inside_an_agent() -> None:
    run_invoice_desk("langchain")


if __name__ == "__main__":
    _in_a_process(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
