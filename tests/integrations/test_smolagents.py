"""smolagents: cells of a CodeAgent are transactions, and calls of a ToolCallingAgent are ours."""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import cases
import pytest
from cases import Ask, Case, Driver, Job, Outcome, Turn, all_cases, require

require("smolagents")

# ruff: noqa: E402
import smolagents
from smolagents import CodeAgent, tool
from smolagents.agents import ActionStep, FinalAnswerStep, ToolOutput
from smolagents.models import (
    ChatMessage,
    ChatMessageToolCall,
    ChatMessageToolCallFunction,
    MessageRole,
    get_tool_json_schema,
)
from smolagents.monitoring import LogLevel

import weakincentives as wink
from weakincentives import ToolContext, ToolRegistry
from weakincentives.integrations import adopt
from weakincentives.integrations.smolagents import WinkExecutor, WinkToolCallingAgent
from weakincentives.prompt import AnyPolicy, Approval, ApprovalPolicy, ApprovalRequest

QUIET: dict[str, Any] = {"verbosity_level": LogLevel.OFF}


class Script(smolagents.Model):
    """Says what it is told to, and remembers what it was shown."""

    def __init__(self, *says: ChatMessage) -> None:
        super().__init__()
        self.says = list(says)
        self.shown: list[list[ChatMessage]] = []

    def generate(self, messages: list[ChatMessage], **_: Any) -> ChatMessage:
        self.shown.append(messages)
        return self.says.pop(0)


def cell(code: str) -> ChatMessage:
    return ChatMessage(role=MessageRole.ASSISTANT, content=f"<code>\n{code}\n</code>")


def calls(*asks: Ask) -> ChatMessage:
    made = [
        ChatMessageToolCall(
            ChatMessageToolCallFunction(ask.arguments, ask.tool), ask.id, "function"
        )
        for ask in asks
    ]
    return ChatMessage(role=MessageRole.ASSISTANT, content="", tool_calls=made)


def own_tool(function: Callable[..., Any]) -> smolagents.Tool:
    return tool(function)


class Smolagents(Driver):
    """What both agents share."""

    def run(self, job: Job) -> Outcome:
        done = Outcome()
        asks = [ask for turn in job.turns if not isinstance(turn, str) for ask in turn]
        policies = [_answered(each, job, asks, done) for each in job.policies]
        agent = self.agent(job, policies, done)
        try:
            with _interrupted_when(job.cancel_when), agent:
                given = {ask.id: ask.arguments for ask in asks}
                for step in agent.run("the task", stream=True, additional_args=given):
                    self.note(step, done)
                    if isinstance(step, FinalAnswerStep):
                        done.text = str(step.output)
        except BaseException as error:
            done.error = error
        return done

    def agent(self, job: Job, policies: Sequence[AnyPolicy], done: Outcome) -> Any:
        raise NotImplementedError

    def note(self, step: object, done: Outcome) -> None:
        raise NotImplementedError


def _answered(policy: Any, job: Job, asks: list[Ask], done: Outcome) -> Any:
    """Return a policy that asks a person while the call waits: there is no other way."""
    if not isinstance(policy, ApprovalPolicy):
        return policy

    def ask(request: ApprovalRequest) -> Approval:
        this = next(
            a for a in asks if (a.tool, a.arguments) == (request.tool_name, request.arguments)
        )
        asks.remove(this)
        done.questions[this.id] = request.describe(10_000)
        answer = job.answers[this.id].given()
        return Approval(answer.approved, answer.by, answer.reason, answer.arguments)

    return replace(policy, ask=ask)


@contextmanager
def _interrupted_when(event: threading.Event | None) -> Iterator[None]:
    """Press Ctrl-C once the event is set: the only way to stop a call under way."""
    over = threading.Event()

    def press() -> None:
        assert event is not None
        while not over.is_set():
            if event.wait(0.01):
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
                return

    if event is not None:
        threading.Thread(target=press, daemon=True).start()
    try:
        yield
    finally:
        over.set()


_NO_PAUSE = "smolagents cannot pause an agent: a person is asked while the call waits."
_NOT_STORED = "smolagents cannot store an agent and continue it."
_ONE_CALL = "smolagents cannot cancel one call."


class ToolCalling(Smolagents):
    """An agent that calls tools as JSON."""

    name = "smolagents"
    limits: ClassVar = {
        "an_own_tool_that_pauses_the_agent_is_suspended": _NO_PAUSE,
        "a_pending_call_is_suspended": _NO_PAUSE,
        "resuming_runs_nothing_twice": _NOT_STORED,
        "cancelling_one_call_leaves_the_others": _ONE_CALL,
        "cancelling_the_run_rolls_back_an_own_tool": "smolagents has no async tools.",
    }

    def agent(self, job: Job, policies: Sequence[AnyPolicy], done: Outcome) -> Any:
        agent = WinkToolCallingAgent(
            [*job.tools, *map(own_tool, job.own)],
            Script(*(_said(turn) for turn in job.turns)),
            workspace=job.workspace,
            policies=policies,
            run=job.run or None,
            **QUIET,
        )
        for each in agent.tools.values():
            shown = get_tool_json_schema(each)["function"]
            done.tools[each.name] = {
                "description": shown["description"],
                "schema": shown["parameters"],
            }
        return agent

    def note(self, step: object, done: Outcome) -> None:
        if isinstance(step, ToolOutput) and not step.is_final_answer:
            done.answers[step.id] = step.observation
        if isinstance(step, ActionStep) and step.error is not None:
            for call in step.tool_calls or ():
                if done.answers.get(call.id, "failed").endswith("see the error"):
                    done.answers[call.id] = str(step.error)


def _said(turn: Turn) -> ChatMessage:
    if isinstance(turn, str):
        return calls(Ask("end", "final_answer", {"answer": turn}))
    return calls(*turn)


@pytest.mark.parametrize("case", all_cases(), ids=str)
def test_case(case: Case, tmp_path: Path) -> None:
    case.run(ToolCalling, tmp_path)


class InCells(Smolagents):
    """An agent that writes code: the calls of a turn are made in one cell."""

    name = "smolagents (code)"
    limits: ClassVar = {
        **ToolCalling.limits,
        "parallel_reads_overlap": "Code calls tools one after the other.",
        "repeating_a_run_runs_nothing_twice": "A code cell has no id.",
    }

    def agent(self, job: Job, policies: Sequence[AnyPolicy], done: Outcome) -> Any:
        executor = WinkExecutor(
            job.workspace, tools=job.tools, policies=policies, run=job.run or None
        )
        model = Script(*(cell(_code(turn)) for turn in job.turns))
        tools = [*executor.tools, *map(own_tool, job.own)]
        for each in tools:
            prompt = each.to_code_prompt()
            done.tools[each.name] = {"description": prompt, "schema": prompt}
        return CodeAgent(tools, model, executor=executor, **QUIET)

    def note(self, step: object, done: Outcome) -> None:
        if not isinstance(step, ActionStep) or step.code_action is None:
            return
        for call_id, answer in re.findall(r"<(\w+): (.*?)>\n", step.observations or "", re.DOTALL):
            done.answers[call_id] = answer
        if step.error is not None:
            for call_id in re.findall(r"<(\w+): ", step.code_action):
                done.answers[call_id] = str(step.error)


def _code(turn: Turn) -> str:
    if isinstance(turn, str):
        return f"final_answer({turn!r})"
    lines: list[str] = []
    for ask in turn:
        # The arguments are not in the code: a policy that looks for a word would find it there.
        call = f"print('<{ask.id}: ' + {ask.tool}(**{ask.id}) + '>')"
        if len(turn) > 1:
            caught = f"except Exception as error:\n    print('<{ask.id}: ' + str(error) + '>')"
            call = f"try:\n    {call}\n{caught}"
        lines.append(call)
    return "\n".join(lines)


@pytest.mark.parametrize("case", all_cases(), ids=str)
def test_case_in_cells(case: Case, tmp_path: Path) -> None:
    case.run(InCells, tmp_path)


# Cells


@wink.tool(reach="reversible")
def put(path: str, text: str, *, context: ToolContext) -> str:
    """Write a file."""
    context.filesystem.write(path, text)
    return f"put {path}"


class Stage:
    """A workspace, and an agent that runs the given cells there."""

    def __init__(self, workspace: Path) -> None:
        self.workspace = workspace
        workspace.mkdir()
        (workspace / "old.txt").write_text("old")

    def play(self, *cells: str, own: Sequence[Any] = (), **options: Any) -> CodeAgent:
        """Run cells; the last one must give the final answer."""
        agents = {"managed_agents": options.pop("managed_agents", None)}
        executor = options.pop("executor", None)
        if executor is None:
            executor = WinkExecutor(self.workspace, tools=[put], **options)
        agent = CodeAgent(
            [*executor.tools, *own], Script(*map(cell, cells)), executor=executor, **agents, **QUIET
        )
        self.agent = agent
        self.answer = agent.run("the task")
        self.steps = [each for each in agent.memory.steps if isinstance(each, ActionStep)]
        return agent

    def files(self) -> dict[str, str]:
        paths = self.workspace.rglob("*")
        return {
            str(each.relative_to(self.workspace)): each.read_text()
            for each in sorted(paths)
            if each.is_file()
        }

    def records(self, tool: str = "") -> list[dict[str, Any]]:
        return cases.Stage(InCells, self.workspace).records(tool)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    made = Stage(tmp_path / "project")
    yield made
    made.agent.cleanup()


def test_a_cell_that_raises_is_rolled_back_whole(stage: Stage):
    """Files of finished nested calls, new, changed, deleted and mutated variables, functions."""
    stage.play(
        "numbers = [1]\nshared = {'numbers': numbers}\ngone = 1\ndef twice(x): return 2 * x",
        "put('new.txt', 'new')\nput('old.txt', 'changed')\nprint('so far')\n"
        "numbers.append(2)\nshared['more'] = 3\ndel gone\nfresh = 4\n"
        "def twice(x): return 'no'\nraise ValueError('too bad')",
        "final_answer([numbers, shared, shared['numbers'] is numbers, gone, twice(4)])",
    )

    assert stage.answer == [[1], {"numbers": [1]}, True, 1, 8]
    assert "fresh" not in stage.agent.python_executor.state
    assert stage.files() == {"old.txt": "old"}
    failed = stage.steps[1]
    assert "too bad" in str(failed.error)
    assert "rolled back: files and variables are as they were before it" in str(failed.error)
    assert failed.observations == "Execution logs:\nso far\n"


def test_tools_called_in_a_cell_are_nested_calls(stage: Stage):
    stage.play("put('a.txt', 'a')\nput('b.txt', 'b')", "final_answer('done')")

    whole, _ = stage.records("python_interpreter")
    assert [each["nested_in"] for each in stage.records("put")] == [whole["call"]] * 2
    assert [each["path"] for each in whole["files"]] == ["a.txt", "b.txt"]


def test_a_cell_that_catches_the_failure_of_a_tool_goes_on(stage: Stage):
    stage.play(
        "put('a.txt', 'a')\ntry:\n    put('../out.txt', 'x')\n"
        "except Exception as error:\n    print('caught', error)\nput('b.txt', 'b')",
        "final_answer('done')",
    )

    assert "caught" in stage.steps[0].observations
    assert stage.files() == {"a.txt": "a", "b.txt": "b", "old.txt": "old"}


def test_functions_of_earlier_cells_see_restored_variables(stage: Stage):
    stage.play(
        "seen = []\ndef note(x):\n    seen.append(x)\n    return list(seen)",
        "note(1)\nraise ValueError()",
        "final_answer(note(2))",
    )

    assert stage.answer == [2]


def test_values_that_cannot_be_copied_are_named(stage: Stage):
    stage.play(
        "numbers = [1]\ncounter = (n for n in range(9))\nimport math",
        "next(counter)\nnumbers.append(2)\nraise ValueError()",
        "final_answer([next(counter), numbers, math.floor(1.5)])",
    )

    assert stage.answer == [1, [1], 1]
    assert "may have changed inside these values stays: counter" in str(stage.steps[1].error)


def test_without_copies_only_bindings_are_restored(stage: Stage):
    stage.play(
        "numbers = [1]\nx = 1",
        "numbers.append(2)\nx = 2\nraise ValueError()",
        "final_answer([numbers, x])",
        copy_values=False,
    )

    assert stage.answer == [[1, 2], 1]


def test_a_cell_that_takes_too_long_is_abandoned_and_changes_nothing_any_more(stage: Stage):
    waiting, over = threading.Event(), threading.Event()
    late: list[str] = []

    @tool
    def publish(text: str) -> str:
        """Publish.

        Args:
            text: What.
        """
        late.append(text)
        return text

    def wait() -> None:
        waiting.wait(240)

    def ended() -> None:
        over.set()

    stage.play(
        "x = 1",
        "put('new.txt', 'new')\nx = 2\nwait()\ntry:\n    publish('late')\nfinally:\n    ended()",
        "final_answer(x)",
        own=[publish],
        timeout_seconds=3,
        additional_functions={"wait": wait, "ended": ended},
    )
    waiting.set()

    assert stage.answer == 1
    assert "exceeded the maximum execution time of 3 seconds" in str(stage.steps[1].error)
    # The abandoned code ends with its next operation: it does not even get to its `finally`.
    assert not over.wait(0.5)
    assert late == []
    assert stage.files() == {"old.txt": "old"}
    assert stage.agent.python_executor.state["x"] == 1


def test_the_time_of_a_tool_is_not_the_time_of_the_cell(stage: Stage):
    """A person may take long to answer, and a managed agent to work."""
    slept = threading.Event()

    @tool
    def rest() -> str:
        """Rest for longer than a cell may take."""
        slept.wait(4.0)
        return "rested"

    stage.play("final_answer(rest())", own=[rest], timeout_seconds=3)

    assert stage.answer == "rested"


def test_threads_of_a_cell_call_tools_in_its_transaction(stage: Stage):
    threads = "from concurrent.futures import ThreadPoolExecutor\n"
    in_pool = "with ThreadPoolExecutor(8) as pool:\n    print(list(pool.map(write, range(8))))"
    stage.play(
        f"{threads}def write(n): return put(f'{{n}}.txt', 'x')\n{in_pool}",
        f"def write(n):\n    put(f'more{{n}}.txt', 'x')\n    return 1 // (n - 5)\n{in_pool}",
        "final_answer('done')",
        additional_authorized_imports=["concurrent.futures"],
    )

    assert stage.files() == {**{f"{n}.txt": "x" for n in range(8)}, "old.txt": "old"}
    whole = stage.records("python_interpreter")[0]
    assert [each["nested_in"] for each in stage.records("put")].count(whole["call"]) == 8


def test_a_thread_that_outlives_its_cell_calls_nothing_any_more(stage: Stage):
    go, over = threading.Event(), threading.Event()
    errors: list[str] = []

    def start(function: Callable[[], Any]) -> None:
        def run() -> None:
            go.wait(30)
            try:
                function()
            except Exception as error:
                errors.append(str(error))
            over.set()

        threading.Thread(target=run, daemon=True).start()

    stage.play(
        "def write(): return put('late.txt', 'late')\nstart(write)",
        "final_answer('done')",
        additional_functions={"start": start},
    )
    go.set()

    assert over.wait(30)
    assert errors == ["put was called after its cell had ended"]
    assert stage.files() == {"old.txt": "old"}


def test_what_code_writes_by_itself_is_rolled_back(stage: Stage):
    root = str(stage.workspace)
    stage.play(
        f"import os\nos.chdir({root!r})\nwith open('kept.txt', 'w') as file:\n"
        "    file.write('kept')",
        "os.remove('kept.txt')\nwith open('old.txt', 'w') as file:\n    file.write('changed')\n"
        "os.makedirs('deep/er')\nraise ValueError()",
        "final_answer('done')",
        additional_authorized_imports=["os"],
        additional_functions={"open": open},
    )

    assert stage.files() == {"kept.txt": "kept", "old.txt": "old"}
    assert not (stage.workspace / "deep").exists()


@pytest.fixture(autouse=True)
def _same_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)  # cells may go elsewhere


def test_a_final_answer_commits_its_cell_unless_the_cell_fails_after_it(stage: Stage):
    stage.play(
        "put('no.txt', 'x')\ntry:\n    final_answer('early')\nfinally:\n    raise ValueError()",
        "put('yes.txt', 'x')\nfinal_answer('now')\nput('never.txt', 'x')",
    )

    assert stage.answer == "now"
    assert stage.files() == {"old.txt": "old", "yes.txt": "x"}


def test_a_tool_of_smolagents_returns_and_raises_in_a_cell_what_it_does_alone(stage: Stage):
    class Odd(Exception):
        pass

    @tool
    def pair(first: object, second: int = 2) -> object:
        """Make a pair.

        Args:
            first: Anything.
            second: A number.
        """
        if second < 0:
            raise Odd("negative")
        return (first, second)

    stage.play(
        "made = pair({1, 2})",
        "try:\n    pair(1, second=-1)\nexcept Exception as error:\n    kind = type(error)",
        "final_answer([made, kind])",
        own=[pair],
    )

    assert stage.answer == [({1, 2}, 2), Odd]
    assert [each["outcome"] for each in stage.records("pair")] == ["ok", "rolled back"]


def test_a_person_can_edit_the_call_of_a_tool_of_smolagents(stage: Stage):
    @tool
    def label(thing: object, text: str) -> object:
        """Label something.

        Args:
            thing: What.
            text: The label.
        """
        return (thing, text)

    def ask(request: ApprovalRequest) -> Approval:
        return Approval(True, "ann", arguments={**request.arguments, "text": "better"})

    stage.play(
        "final_answer(label(range(3), 'good'))",
        own=[label],
        policies=[ApprovalPolicy(ask=ask, tools={"label"})],
    )

    assert stage.answer == (range(3), "better")


def test_the_reach_of_a_tool_of_smolagents_can_be_stated(stage: Stage):
    asked: list[str] = []

    @tool
    def publish(title: str) -> str:
        """Publish a page.

        Args:
            title: Which page.
        """
        return f"published {title}"

    def ask(request: ApprovalRequest) -> bool:
        asked.append(request.question)
        return True

    stage.play(
        "publish('draft')\nraise ValueError()",
        "final_answer('done')",
        own=[publish],
        reaches={"publish": "irreversible"},
        policies=[ApprovalPolicy(ask=ask, reaches={"irreversible"})],
    )

    (question,) = asked
    assert "cannot be undone" in question
    assert "Not undone: what 'publish' did outside" in str(stage.steps[0].error)


def test_our_answers_are_text_with_a_value(stage: Stage):
    executor = WinkExecutor(stage.workspace)

    stage.play(
        "put = write_file('new.txt', 'one\\ntwo\\n')\nread = read_file('new.txt')",
        "final_answer([read.value.lines, 'new.txt' in read])",
        executor=executor,
    )

    assert stage.answer == [("one", "two"), True]
    prompt = next(each for each in executor.tools if each.name == "read_file").to_code_prompt()
    assert "its attribute `value` has the fields path, lines" in prompt
    assert "offset: Lines to skip. Optional." in prompt or "Optional." in prompt


def test_an_interrupt_rolls_the_cell_back_and_the_next_run_works(stage: Stage):
    waiting = threading.Event()

    def wait() -> None:
        waiting.set()
        threading.Event().wait(30)

    agent = stage.play("x = 1\nfinal_answer('done')", additional_functions={"wait": wait})
    agent.model.says += [cell("put('half.txt', 'half')\nx = 2\nwait()"), cell("final_answer(x)")]
    with _interrupted_when(waiting), pytest.raises(KeyboardInterrupt):
        agent.run("the task")

    assert stage.files() == {"old.txt": "old"}
    assert agent.run("the task", reset=False) == 1


def test_an_interrupt_rolls_back_a_tool_of_smolagents(stage: Stage):
    """In a cell, and as a call of its own. Its thread goes on: Python cannot stop it."""
    waiting, over = threading.Event(), threading.Event()
    place = stage.workspace / "half.txt"

    @tool
    def scribble() -> str:
        """Write half of a file, then wait."""
        place.write_text("half")
        waiting.set()
        over.wait(30)
        return "never seen"

    with _interrupted_when(waiting), pytest.raises(KeyboardInterrupt):
        stage.play("scribble()", own=[scribble])
    waiting.clear()
    in_cell = stage.files()
    model = Script(calls(Ask("c1", "scribble")))
    agent = WinkToolCallingAgent([scribble], model, workspace=stage.workspace, **QUIET)
    with _interrupted_when(waiting), pytest.raises(KeyboardInterrupt):
        agent.run("the task")
    over.set()

    assert in_cell == stage.files() == {"old.txt": "old"}
    outcomes = [(each["tool"], each["outcome"]) for each in stage.records()]
    assert outcomes == [
        ("python_interpreter", "rolled back"),
        ("scribble", "rolled back"),
        ("scribble", "rolled back"),
    ]


def test_after_a_run_others_may_work_in_the_workspace(stage: Stage):
    stage.play("put('a.txt', 'a')", "final_answer('done')")
    shown = cases.Stage(InCells, stage.workspace)

    shown.wink("undo")
    assert stage.files() == {"old.txt": "old"}

    model = Script(calls(Ask("c1", "put", {"path": "b.txt", "text": "b"})), _said("done"))
    agent = WinkToolCallingAgent([put], model, workspace=stage.workspace, **QUIET)
    agent.run("the task")
    shown.wink("undo")
    assert stage.files() == {"old.txt": "old"}


def test_variables_stay_from_run_to_run(stage: Stage):
    agent = stage.play("x = 1\nfinal_answer('done')")
    agent.model.says += [cell("x = 2\nraise ValueError()"), cell("final_answer(x + y)")]

    assert agent.run("the task", additional_args={"y": 10}) == 11


def test_the_workspace_may_depend_on_what_the_agent_is_given(tmp_path: Path):
    executor = WinkExecutor(lambda given: given["project"], tools=[put])
    agent = CodeAgent(
        executor.tools,
        Script(cell("final_answer(put('a.txt', 'a'))"), cell("final_answer(put('b.txt', 'b'))")),
        executor=executor,
        **QUIET,
    )
    with agent:
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
            agent.run("the task", additional_args={"project": tmp_path / name})

    assert sorted(str(each.relative_to(tmp_path)) for each in tmp_path.rglob("*.txt")) == [
        "one/a.txt",
        "two/b.txt",
    ]


# Managed agents


def _helper(executor: WinkExecutor, *cells: str) -> CodeAgent:
    return CodeAgent(
        executor.tools,
        Script(*map(cell, cells)),
        executor=executor,
        name="helper",
        description="It helps.",
        **QUIET,
    )


def test_a_managed_agent_is_rolled_back_with_the_cell_that_called_it(stage: Stage):
    executor = WinkExecutor(stage.workspace, tools=[put])
    helper = _helper(
        WinkExecutor(bridge=executor.bridge),
        "put('one.txt', '1')\nfinal_answer('one')",
        "put('no.txt', '2')\nraise ValueError()",
        "put('two.txt', '2')\nfinal_answer('two')",
    )

    stage.play(
        "print(helper('the first'))",
        "helper('the second')\nraise ValueError('not good enough')",
        "final_answer('done')",
        executor=executor,
        managed_agents=[helper],
    )

    assert stage.files() == {"old.txt": "old", "one.txt": "1"}
    outer, inner = stage.records("python_interpreter")[:2]
    assert stage.records("put")[0]["nested_in"] == inner["call"]
    assert inner["nested_in"] == stage.records("helper")[0]["call"]
    assert stage.records("helper")[0]["nested_in"] == outer["call"]


def test_calls_of_a_managed_agent_made_in_parallel_lose_no_update(stage: Stage):
    executor = WinkExecutor(stage.workspace, tools=[put])
    (stage.workspace / "total.txt").write_text("0")

    @wink.tool(reach="reversible")
    def add(*, context: ToolContext) -> str:
        """Add one."""
        files = context.filesystem
        files.write("total.txt", str(int(files.read("total.txt")) + 1))
        return "added"

    helper = WinkToolCallingAgent(
        [add],
        Script(calls(*(Ask(f"c{n}", "add") for n in range(8))), _said("done")),
        bridge=executor.bridge,
        name="helper",
        description="It helps.",
        **QUIET,
    )
    stage.play("helper('add')\nfinal_answer('done')", executor=executor, managed_agents=[helper])

    assert stage.files()["total.txt"] == "8"


def test_a_managed_agent_with_a_bridge_of_its_own_is_told_what_it_needs(stage: Stage):
    executor = WinkExecutor(stage.workspace, tools=[put])
    other = WinkExecutor(stage.workspace, tools=[put])
    helper = _helper(other, "put('a.txt', 'a')", "gave up")
    helper.max_steps = 1

    stage.play("helper('it')\nfinal_answer('done')", executor=executor, managed_agents=[helper])
    other.cleanup()

    first = next(each for each in helper.memory.steps if isinstance(each, ActionStep))
    assert "needs the bridge of that one: bridge=executor.bridge" in str(first.error)


def test_an_interrupt_stops_a_managed_agent(stage: Stage):
    executor = WinkExecutor(stage.workspace, tools=[put])
    asked, go_on = threading.Event(), threading.Event()
    over: list[str] = []

    class Slow(Script):
        def generate(self, messages: list[ChatMessage], **_: Any) -> ChatMessage:
            asked.set()
            go_on.wait(30)
            over.append("said")
            return super().generate(messages)

    helper = _helper(WinkExecutor(bridge=executor.bridge))
    helper.model = Slow(*[cell("put('late.txt', 'late')")] * 9)
    with _interrupted_when(asked), pytest.raises(KeyboardInterrupt):
        stage.play("put('a.txt', 'a')\nhelper('it')", executor=executor, managed_agents=[helper])
    go_on.set()
    for _ in range(300):
        if helper.memory.steps and isinstance(helper.memory.steps[-1], ActionStep):
            break
        threading.Event().wait(0.01)

    assert over == ["said"]
    assert stage.files() == {"old.txt": "old"}


# Agents that call tools as JSON


def test_a_failed_call_does_not_hide_the_answers_of_the_others(tmp_path: Path):
    @tool
    def fail(text: str) -> str:
        """Fail.

        Args:
            text: Why.
        """
        raise ValueError(text)

    model = Script(
        calls(
            Ask("c1", "put", {"path": "a.txt", "text": "a"}),
            Ask("c2", "fail", {"text": "too bad"}),
            Ask("c3", "put", {"path": "b.txt"}),
            Ask("c4", "nothing"),
        ),
        _said("done"),
    )
    with WinkToolCallingAgent([put, fail], model, workspace=tmp_path, **QUIET) as agent:
        agent.run("the task")

    told = "\n".join(part["text"] for each in model.shown[-1] for part in each.content)
    assert "put a.txt" in told
    assert "Error executing tool 'fail'" in told
    assert "too bad" in told
    assert "Required field is missing" in told
    assert "Unknown tool nothing" in told
    step = next(each for each in agent.memory.steps if isinstance(each, ActionStep))
    assert isinstance(step.error, smolagents.AgentError)
    assert [each.name for each in step.tool_calls] == ["put", "fail", "put", "nothing"]


def test_a_model_that_counts_its_calls_anew_in_every_step_is_understood(tmp_path: Path):
    one = Ask("0", "put", {"path": "a.txt", "text": "a"})
    model = Script(calls(one), calls(one), _said("done"))
    with WinkToolCallingAgent([put], model, workspace=tmp_path, **QUIET) as agent:
        agent.run("the task")

    assert len(cases.Stage(ToolCalling, tmp_path).records("put")) == 2


def test_tools_of_smolagents_that_only_read_run_at_the_same_time(tmp_path: Path):
    meeting = threading.Barrier(3)

    @tool
    def meet(name: str) -> str:
        """Wait for the others.

        Args:
            name: Who comes.
        """
        meeting.wait(30)
        return f"met {name}"

    model = Script(calls(*(Ask(f"c{n}", "meet", {"name": f"n{n}"}) for n in range(3))), _said(""))
    reaches: Any = {"meet": "read"}
    with WinkToolCallingAgent([meet], model, workspace=tmp_path, reaches=reaches, **QUIET) as agent:
        agent.run("the task")

    step = next(each for each in agent.memory.steps if isinstance(each, ActionStep))
    assert step.observations == "met n0\nmet n1\nmet n2"


def test_a_final_answer_beside_other_calls_runs_none_of_them(tmp_path: Path):
    model = Script(
        calls(Ask("c1", "put", {"path": "a.txt", "text": "a"}), Ask("c2", "final_answer")),
        _said("done"),
    )
    with WinkToolCallingAgent([put], model, workspace=tmp_path, **QUIET) as agent:
        assert agent.run("the task") == "done"

    assert list(tmp_path.iterdir()) == []


def test_calls_of_one_step_with_the_same_id_all_run(tmp_path: Path):
    asks = [Ask("", "put", {"path": f"{n}.txt", "text": "x"}) for n in range(3)]
    model = Script(calls(*asks), _said("done"))
    with WinkToolCallingAgent([put], model, workspace=tmp_path, **QUIET) as agent:
        agent.run("the task")

    assert len(list(tmp_path.iterdir())) == 3


def test_our_tools_work_in_their_own_agent(tmp_path: Path):
    """It checks arguments itself, one at a time; the rest is as in ours."""
    model = Script(
        calls(Ask("c1", "put", {"path": "a.txt", "text": "a"})),
        calls(Ask("c2", "put", {"path": 1, "text": 2})),
        calls(Ask("c3", "put", {"path": "../b.txt", "text": "b"})),
        _said("done"),
    )
    executor = WinkExecutor(tmp_path, tools=[put])
    agent = smolagents.ToolCallingAgent(executor.tools, model, **QUIET)

    agent.run("the task")
    executor.cleanup()

    errors = [str(each.error) for each in agent.memory.steps if isinstance(each, ActionStep)]
    assert "should be 'string'" in errors[1]
    assert "outside" in errors[2]
    assert [each.name for each in tmp_path.iterdir()] == ["a.txt"]


def test_an_approval_that_nobody_could_give_is_refused_at_once(tmp_path: Path):
    with pytest.raises(TypeError, match="give ApprovalPolicy an `ask` function"):
        WinkExecutor(tmp_path, policies=[ApprovalPolicy()])
    with pytest.raises(TypeError, match="give ApprovalPolicy an `ask` function"):
        WinkToolCallingAgent([], Script(), workspace=tmp_path, policies=[ApprovalPolicy()])


# Tools


def test_a_tool_of_smolagents_can_be_adopted(tmp_path: Path):
    @tool
    def shout(text: str, times: int = 2) -> str:
        """Shout.

        Args:
            text: What.
            times: How often.
        """
        (tmp_path / "heard.txt").write_text("half")
        if times > 9:
            raise RuntimeError("too loud")
        return text.upper() * times

    with ToolRegistry([adopt(shout)], workspace=tmp_path) as tools:
        loud = tools.execute("shout", {"text": "a", "times": 10})
        assert list(tmp_path.iterdir()) == []
        wrong = tools.execute("shout", {"text": 1, "tims": 3})
        right = tools.execute("shout", {"text": "a"})

    assert loud.message == "RuntimeError: too loud"
    assert "text" in wrong.message
    assert "tims" in wrong.message
    assert right.value == "AA"
    assert adopt(shout, reach="read", writes="api").reach == "read"


def test_every_parameter_has_a_form_that_smolagents_takes(tmp_path: Path):
    @wink.tool(reach="read")
    def try_out(
        plain: int,
        choice: str | int | None,
        numbers: list[float] | None = None,
        anything: Any = 1,
        nested: dict[str, list[int]] | str = "",
    ) -> str:
        """Try out types."""
        return f"{plain} {choice} {numbers} {anything} {nested}"

    executor = WinkExecutor(tmp_path, tools=[try_out])
    made = executor.tools[0]  # the other one reads the rest of long results

    types = {name: (node["type"], node.get("nullable")) for name, node in made.inputs.items()}
    assert types == {
        "plain": ("integer", None),
        "choice": (["string", "integer"], True),
        "numbers": ("array", True),
        "anything": ("any", True),
        "nested": (["object", "string"], True),
    }
    assert made.inputs["numbers"]["items"] == {"type": "number"}
    assert made(1, None, anything=None, nested=None) == "1 None None None "
    executor.cleanup()
