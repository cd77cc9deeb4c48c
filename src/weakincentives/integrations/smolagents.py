"""smolagents: one code cell is one transaction, and the tools that it calls are nested calls.

    executor = WinkExecutor(workspace=".")
    agent = CodeAgent(tools=executor.tools, model=model, executor=executor)

A cell that raises is rolled back whole: files, session, and the variables of the interpreter. For
agents that call tools as JSON there is ``WinkToolCallingAgent``.
"""

from __future__ import annotations

import asyncio
import copy
import json
import keyword
import re
import threading
import time
from collections.abc import Callable, Coroutine, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from dataclasses import fields, is_dataclass
from functools import partial
from types import ModuleType
from typing import Any, NoReturn, Self, cast
from weakref import WeakKeyDictionary

from weakincentives.call import transaction_under_way
from weakincentives.errors import MissingExtra, Suspended, ToolTimeout, ToolValidationError
from weakincentives.integrations.bridge import Bridge, RunName, Workspace, wire_name
from weakincentives.loops import ends_within, in_thread, run_blocking
from weakincentives.prompt.approval import ApprovalPolicy
from weakincentives.prompt.policies import AnyPolicy
from weakincentives.prompt.tool import Tool, ToolContext
from weakincentives.tool_result import ToolResult

try:
    import smolagents
    from smolagents import AgentError, LocalPythonExecutor, Model, ToolCallingAgent
    from smolagents.default_tools import FinalAnswerTool
    from smolagents.local_python_executor import CodeOutput, InterpreterError
    from smolagents.memory import ActionStep, ToolCall
    from smolagents.models import ChatMessage
    from smolagents.utils import AgentToolCallError, AgentToolExecutionError, truncate_content
except ImportError as error:
    raise MissingExtra("smolagents", "smolagents") from error

AnyTool = Tool[Any, Any]
AnyResult = ToolResult[Any]
Schema = dict[str, Any]

_CELL = "python_interpreter"
"""The name of a cell in the record; smolagents calls it that, too."""
_POLL_SECONDS = 0.05
_STOP_SECONDS = 5.0


# Our tools in their agents


class Answer(str):
    """What one of our tools answers: the text for the model, and ``value`` for code."""

    value: Any = None


class WinkTool(smolagents.Tool):
    """One of our tools, for an agent of smolagents. It returns an ``Answer``."""

    skip_forward_signature_validation = True
    output_type = "string"

    def __init__(self, tool: AnyTool, bridge: Bridge) -> None:
        self.tool, self.bridge = tool, bridge
        self.name = re.sub(r"\W", "_", tool.name)
        if not self.name.isidentifier() or keyword.iskeyword(self.name):
            self.name = f"tool_{self.name}"
        self.description = tool.text()
        self.inputs, self._never_null = _inputs(tool.parameters)
        super().__init__()

    def forward(self, *args: Any, **kwargs: Any) -> Answer:
        arguments = self.arguments(_named(self.inputs, args, kwargs))
        result = _call(self.bridge, self.tool, arguments)
        if not result.success:
            raise ToolValidationError(self.text(result))
        return self.answer(result)

    def to_code_prompt(self) -> str:
        """Return what the model reads in the prompt of a ``CodeAgent``."""
        shown = copy.copy(self)
        shown.inputs = {
            name: {**node, "description": _described(node)} for name, node in self.inputs.items()
        }
        if is_dataclass(self.tool.result_type):
            names = ", ".join(each.name for each in fields(self.tool.result_type))
            shown.description += f"\n\nReturns text; its attribute `value` has the fields {names}."
        return super(WinkTool, shown).to_code_prompt()

    def arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return arguments for our tool: "nullable" only means that one may be left out."""
        return {k: v for k, v in given.items() if v is not None or k not in self._never_null}

    def text(self, result: AnyResult) -> str:
        """Return the result of a call as the model must see it."""
        return result.render(self.tool.max_result_chars)

    def answer(self, result: AnyResult) -> Answer:
        """Return what a successful call answers."""
        answer = Answer(self.text(result))
        answer.value = result.value
        return answer


def _inputs(schema: Schema) -> tuple[dict[str, Schema], frozenset[str]]:
    """Return the format of smolagents for a JSON schema, and what it wrongly lets be null."""
    inputs: dict[str, Schema] = {}
    never_null: set[str] = set()
    for name, node in schema.get("properties", {}).items():
        shown: Schema = _without_references(node, schema.get("$defs", {}))
        branches = shown.pop("anyOf", None) or shown.pop("oneOf", None) or [shown]
        kinds = list(dict.fromkeys(kind for branch in branches for kind in _kinds(branch)))
        named = [kind for kind in kinds if kind != "null"]
        if "number" in named and len(named) > 1:
            named.append("integer")  # which is a number only where that stands alone
        if len(branches) > 1:
            rich = [each for each in branches if each.keys() - {"type"}]
            if len(rich) == 1:
                shown = {**rich[0], **shown}
            elif rich:  # there is no place for alternatives but in words
                words = f"One of: {json.dumps(branches, ensure_ascii=False)}"
                shown["description"] = f"{shown.get('description', '')} {words}".strip()
        shown["type"] = "any" if "any" in named else named[0] if len(named) == 1 else named
        shown.setdefault("description", "")
        if name not in schema.get("required", ()):
            shown["nullable"] = True
            if "null" not in kinds:
                never_null.add(name)
        elif "null" in kinds:
            shown["nullable"] = True
        inputs[name] = shown
    return inputs, frozenset(never_null)


def _described(node: Schema) -> str:
    """Return a description with what a prompt for code has no other place for."""
    rest = {k: v for k, v in node.items() if k not in ("type", "description", "nullable", "title")}
    more = [json.dumps(rest, ensure_ascii=False)] if rest else []
    optional = ["Optional."] if node.get("nullable") else []
    return " ".join([*filter(None, [node["description"]]), *optional, *more])


def _kinds(node: Schema) -> list[str]:
    kind = node.get("type", "any")
    return cast("list[str]", kind) if isinstance(kind, list) else [kind]


def _without_references(
    node: Any, definitions: Mapping[str, Any], inside: tuple[str, ...] = ()
) -> Any:
    """Return a schema with every reference replaced; one that leads back to itself is any object."""
    if isinstance(node, list):
        items = cast("list[Any]", node)
        return [_without_references(each, definitions, inside) for each in items]
    if not isinstance(node, dict):
        return node
    whole = cast("Schema", node)
    name = str(whole.get("$ref", "")).removeprefix("#/$defs/")
    if name in definitions:
        rest = {key: each for key, each in whole.items() if key != "$ref"}
        if name in inside:
            return {"type": "object", **rest}
        found = _without_references(definitions[name], definitions, (*inside, name))
        return {**found, **rest}
    return {key: _without_references(each, definitions, inside) for key, each in whole.items()}


def _named(
    inputs: Mapping[str, Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return arguments by name; a tool of smolagents also takes them all as one dict."""
    if len(args) == 1 and not kwargs and isinstance(args[0], dict):
        given = cast("dict[str, Any]", args[0])
        if given.keys() <= inputs.keys():
            return given
    names = [*inputs, *(f"argument_{n}" for n in range(len(inputs), len(args)))]
    return {**dict(zip(names, args, strict=False)), **kwargs}


# Their tools as ours


def adopt(tool: Any, **options: Any) -> AnyTool:
    """Return a ``Tool`` or ``@tool`` of smolagents as one of ours.

    It is taken to write files by itself: say ``writes="api"`` if it does not.
    """
    if isinstance(tool, WinkTool):
        return tool.tool.replace(**options) if options else tool.tool

    def run(params: dict[str, Any], *, context: ToolContext) -> AnyResult:
        return ToolResult.ok(_recordable(_understood(partial(tool, **params))))

    inputs = cast("dict[str, Schema]", tool.inputs)
    schema = {
        "type": "object",
        "properties": {name: _schema(node) for name, node in inputs.items()},
        "required": [name for name, node in inputs.items() if not node.get("nullable")],
        "additionalProperties": False,
    }
    return Tool.from_schema(
        wire_name(tool.name), tool.description, schema, run, **{"writes": "external", **options}
    )


def _schema(node: Schema) -> Schema:
    shown = {key: each for key, each in node.items() if key != "nullable"}
    kinds = [kind for kind in _kinds(node) if kind not in ("any", "image", "audio")]
    if len(kinds) < len(_kinds(node)):
        del shown["type"]
    elif node.get("nullable"):
        shown["type"] = [*kinds, "null"]
    return shown


def _understood(run: Callable[[], Any]) -> Any:
    """Run a tool of theirs: its exceptions are how it tells the model what is wrong."""
    try:
        return run()
    except Exception as error:
        if isinstance(error, (Suspended, ToolValidationError)):
            raise
        text = str(error) if isinstance(error, AgentError) else f"{type(error).__name__}: {error}"
        raise ToolValidationError(text) from error


def _recordable(value: Any) -> Any:
    """Return a value for the record: plain data as it is, anything else as text."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, Mapping):
        given = cast("Mapping[Any, Any]", value)
        return {str(key): _recordable(each) for key, each in given.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_recordable(each) for each in cast("Iterable[Any]", value)]
    return truncate_content(str(value), 1000)


class _Work:
    """One call of a tool of theirs: its real arguments, and what comes of it."""

    def __init__(
        self, run: Callable[[Mapping[str, Any] | None], Any], given: Mapping[str, Any]
    ) -> None:
        self._run, self._given = run, given
        self.shown = cast("dict[str, Any]", _recordable(given))
        """The arguments as they are on record."""
        self._ran = False
        self._value: Any = None
        self._error: Exception | None = None

    def handle(self, params: Mapping[str, Any]) -> AnyResult:
        """Run the tool; if a person has edited its arguments, with those."""
        edited = None
        if params != self.shown:
            same = {k for k, v in params.items() if k in self.shown and self.shown[k] == v}
            edited = {k: self._given[k] if k in same else v for k, v in params.items()}
        self._ran = True
        _understood(partial(self._try, edited))
        return ToolResult.ok(truncate_content(str(self._value)))

    def _try(self, edited: Mapping[str, Any] | None) -> None:
        try:
            self._value = self._run(edited)
        except Exception as error:
            self._error = error
            raise

    def outcome(self, result: AnyResult) -> Any:
        """Return or raise what the tool itself returned or raised."""
        if not result.success:
            raise self._error or ToolValidationError(result.render())
        return self._value if self._ran else result.render()


_work: ContextVar[_Work] = ContextVar("wink_smolagents_work")


def _handle(params: dict[str, Any], *, context: ToolContext) -> AnyResult:
    return _work.get().handle(params)


def _covering(tool: Any) -> AnyTool:
    """Return what a tool, or managed agent, of theirs is on record as. It checks no arguments."""
    return Tool.from_schema(
        wire_name(tool.name),
        tool.description or tool.name,
        {"type": "object"},
        _handle,
        writes="external",
    )


# Cells


class WinkExecutor(LocalPythonExecutor):
    """Runs each code cell of a ``CodeAgent`` as one transaction.

    Tools and managed agents that the code calls are nested calls, with their own policies and
    records. A cell that raises is rolled back: files, session and variables. What cannot be
    restored of variables: values that cannot be copied (the model is told which), attributes of
    classes and modules, and objects that something outside the interpreter refers to.

    Args:
        workspace: The directory, or a function of the variables that the agent was given
            (``additional_args``).
        tools: Ours, to be given to the agent as ``executor.tools``; by default the file tools.
        policies: They govern cells and every call in them. One that asks a person needs ``ask``.
        title: What `wink log` shows for the run.
        run: Names the run, so that another process continues it.
        bridge: In place of all these: that of another executor, so that a managed agent works in
            the same run. Its cells are then nested in the cell that calls it.
        additional_authorized_imports: As for ``LocalPythonExecutor``. With these or with functions,
            code can write files by itself, and the workspace is scanned after each cell.
        timeout_seconds: The time that a cell may take; time in tools does not count.
        copy_values: Whether values of variables are copied before each cell. Without it, a rolled
            back cell restores which variables there are, but not changes to mutable values.
    """

    def __init__(
        self,
        workspace: Workspace = ".",
        *,
        tools: Iterable[object] | None = None,
        policies: Iterable[AnyPolicy] = (),
        title: str = "",
        run: RunName = None,
        bridge: Bridge | None = None,
        additional_authorized_imports: Sequence[str] = (),
        additional_functions: Mapping[str, Callable[..., Any]] | None = None,
        max_print_outputs_length: int | None = None,
        timeout_seconds: float | None = 30.0,
        copy_values: bool = True,
    ) -> None:
        self.bridge = bridge or Bridge(
            workspace, tools=tools, policies=policies, title=title, run=run
        )
        _check_policies(self.bridge)
        super().__init__(
            list(additional_authorized_imports),
            max_print_outputs_length,
            dict(additional_functions or {}),
            timeout_seconds=None,  # theirs runs the code outside of our context, and waits for it
        )
        self.tools: list[smolagents.Tool] = [
            WinkTool(tool, self.bridge) for tool in self.bridge.tools
        ]
        """Ours, for ``CodeAgent(tools=...)``."""
        self.state = _Variables(self.state)
        self._seconds = timeout_seconds
        self._copies = copy_values
        self._given: Mapping[str, Any] = {}
        self._cell: _Cell | None = None
        writes_files = bool(additional_authorized_imports or additional_functions)
        self._tool: AnyTool = Tool.from_schema(
            _CELL,
            "Run Python code. The tools that it calls are calls of their own.",
            {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
            self._run,
            writes="external" if writes_files else "api",
            reach=None if writes_files else "reversible",
        )

    def send_variables(self, variables: dict[str, Any]) -> None:
        self._given = variables
        super().send_variables(variables)

    def send_tools(self, tools: Mapping[str, Any]) -> None:
        super().send_tools({name: self._callable(name, tool) for name, tool in tools.items()})

    def _callable(self, name: str, tool: Any) -> Callable[..., Any]:
        """Return what code calls by the name of a tool."""
        is_ours = isinstance(tool, WinkTool) or type(tool) is FinalAnswerTool
        cover = None if is_ours else _covering(tool)

        def call(*args: Any, **kwargs: Any) -> Any:
            cell = self._cell
            here = _cell_here.get()
            if cell is None or here not in (None, cell):
                raise InterpreterError(f"{name} was called after its cell had ended")
            if here is None:  # in a thread that the code has started
                return cell.context.copy().run(call, *args, **kwargs)
            with cell.limit.paused():
                if cover is None:
                    return tool(*args, **kwargs)
                return self._covered(tool, cover, args, kwargs)

        call.__name__ = name
        return call

    def _covered(self, tool: Any, cover: AnyTool, args: Any, kwargs: Any) -> Any:
        def run(edited: Mapping[str, Any] | None) -> Any:
            return tool(*args, **kwargs) if edited is None else tool(**edited)

        work = _Work(run, _named(getattr(tool, "inputs", {}), args, kwargs))
        _work.set(work)
        return work.outcome(_call(self.bridge, cover, work.shown))

    def __call__(self, code_action: str) -> CodeOutput:
        state = cast("_Variables", self.state)
        saved = _Saved(state, self.custom_tools, self._copies)
        self._cell = state.cell = cell = _Cell(self._given, self._seconds)
        try:
            result = _call(self.bridge, self._tool, {"code": code_action}, self._given)
            if not result.success or cell.output is None:
                raise InterpreterError(_why(result, saved.uncopied))
            return cell.output
        except BaseException:
            saved.restore(state, self.custom_tools)
            raise
        finally:
            self._cell = state.cell = None

    async def _run(self, params: dict[str, Any], *, context: ToolContext) -> AnyResult:
        cell = self._cell
        assert cell is not None
        work = in_thread(partial(cell.run, partial(super().__call__, params["code"])))
        try:
            while not await ends_within(cell.limit.left(), work):
                if cell.limit.is_over():
                    raise ToolTimeout(
                        f"Code execution exceeded the maximum execution time of {self._seconds:g} "
                        "seconds"
                    )
        except BaseException:
            work.cancel()
            await cell.stop()
            raise
        output = cell.output = work.result()
        return ToolResult.ok(f"{output.logs}{truncate_content(str(output.output))}")

    def cleanup(self) -> None:
        """Release the workspace; ``CodeAgent.cleanup`` calls it."""
        self.bridge.close()


def _check_policies(bridge: Bridge) -> None:
    if any(isinstance(each, ApprovalPolicy) and each.ask is None for each in bridge.policies):
        raise TypeError(
            "smolagents cannot pause an agent until a person answers: give ApprovalPolicy an "
            "`ask` function"
        )


def _why(result: AnyResult, uncopied: Sequence[str]) -> str:
    """Return what the model is told of a cell that failed."""
    lines = [result.render()]
    if result.metadata.undone:
        lines.append("The cell was rolled back: files and variables are as they were before it.")
        lines += (f"Not undone: {each}" for each in result.metadata.not_undone)
        if uncopied:
            lines.append(f"Not undone: changes inside the values of {', '.join(uncopied)}")
    return "\n".join(lines)


class _Cell:
    """One cell on its way."""

    context: Context
    """Where its code runs; for threads that it starts."""
    output: CodeOutput | None = None

    def __init__(self, variables: Mapping[str, Any], seconds: float | None) -> None:
        self.variables = variables
        """What the agent was given."""
        self.limit = _Limit(seconds)
        self._calls: set[asyncio.Task[Any]] = set()

    def run(self, code: Callable[[], CodeOutput]) -> CodeOutput:
        _cell_here.set(self)
        self.context = copy_context()
        return code()

    async def calling(self, call: Coroutine[Any, Any, AnyResult]) -> AnyResult:
        """Run a nested call, so that it ends with the cell."""
        task = cast("asyncio.Task[Any]", asyncio.current_task())
        self._calls.add(task)
        try:
            return await call
        finally:
            self._calls.discard(task)

    async def stop(self) -> None:
        """Cancel the nested calls under way, and wait: they must be on record before the cell."""
        for task in tuple(self._calls):
            task.get_loop().call_soon_threadsafe(task.cancel)
        until = time.monotonic() + _STOP_SECONDS
        while self._calls and time.monotonic() < until:
            await asyncio.sleep(0.01)


_cell_here: ContextVar[_Cell | None] = ContextVar("wink_smolagents_cell", default=None)


class _Limit:
    """The time that code may take. It stops while a tool works, which has a limit of its own."""

    def __init__(self, seconds: float | None) -> None:
        self._until = None if seconds is None else time.monotonic() + seconds
        self._lock = threading.Lock()
        self._inside = 0
        self._since = 0.0

    @contextmanager
    def paused(self) -> Iterator[None]:
        with self._lock:
            if not self._inside:
                self._since = time.monotonic()
            self._inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if not self._inside and self._until is not None:
                    self._until += time.monotonic() - self._since

    def left(self) -> float | None:
        """Return how long to wait before the next look; None for ever."""
        if self._until is None:
            return None
        return max(self._until - time.monotonic(), _POLL_SECONDS)

    def is_over(self) -> bool:
        with self._lock:
            return not self._inside and self._until is not None and time.monotonic() >= self._until


class _Variables(dict[str, Any]):
    """The variables of the interpreter. Only the cell under way may change them.

    So a cell that was abandoned after its timeout changes nothing any more; it ends with its next
    operation, before which the interpreter calls ``setdefault``.
    """

    def __init__(self, variables: Mapping[str, Any]) -> None:
        super().__init__(variables)
        self.cell: _Cell | None = None
        self.lock = threading.RLock()

    def _check(self) -> None:
        if _cell_here.get() is not self.cell:
            raise InterpreterError("the cell has ended")

    def __setitem__(self, name: str, value: Any) -> None:
        with self.lock:
            self._check()
            super().__setitem__(name, value)

    def __delitem__(self, name: str) -> None:
        with self.lock:
            self._check()
            super().__delitem__(name)

    def setdefault(self, name: str, default: Any = None) -> Any:
        self._check()
        return super().setdefault(name, default)


class _Saved:
    """The variables and functions before a cell."""

    def __init__(self, state: _Variables, functions: dict[str, Any], deep: bool) -> None:
        self._functions = dict(functions)
        self._variables = dict(state)
        self.uncopied: tuple[str, ...] = ()
        """Variables whose values cannot be copied."""
        if deep:
            self._copy_values()

    def _copy_values(self) -> None:
        modules = {
            id(each): each for each in self._variables.values() if isinstance(each, ModuleType)
        }
        try:
            self._variables = copy.deepcopy(self._variables, dict(modules))
            return
        except Exception:
            pass  # find out which one it is
        memo: dict[int, Any] = dict(modules)
        for name, value in self._variables.items():
            tried = dict(memo)  # a copy that fails leaves parts behind
            try:
                self._variables[name] = copy.deepcopy(value, tried)
                memo = tried
            except Exception:
                self.uncopied += (name,)

    def restore(self, state: _Variables, functions: dict[str, Any]) -> None:
        """Restore in place: functions of earlier cells refer to these very objects."""
        with state.lock:
            state.cell = None
            printed = state.get("_print_outputs")  # the model reads it
            state.clear()
            state.update(self._variables)
            if printed is not None:
                state.update(_print_outputs=printed)
        functions.clear()
        functions.update(self._functions)


def _call(bridge: Bridge, tool: AnyTool, arguments: object, variables: Any = None) -> AnyResult:
    """Make a call from the code of a cell, or the call of a cell itself."""
    cell = _cell_here.get()
    with _one_at_a_time():
        if cell is None:
            return bridge.call(tool, arguments, context=variables)
        context = cell.variables if variables is None else variables
        return run_blocking(lambda: cell.calling(bridge.acall(tool, arguments, context=context)))


_nested: WeakKeyDictionary[Any, threading.Lock] = WeakKeyDictionary()
_guard = threading.Lock()


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Let threads that one call has started make their own calls one after the other.

    A call that is nested in no other waits for its turn anyway.
    """
    parent = transaction_under_way.get()
    if parent is None:
        yield
        return
    with _guard:
        lock = _nested.setdefault(parent, threading.Lock())
    with lock:
        yield


# Agents that call tools as JSON


class _Arguments(dict[str, Any]):
    """The arguments of a call, with its id, which smolagents does not pass on."""

    def __init__(self, arguments: Mapping[str, Any], call_id: str) -> None:
        super().__init__(arguments)
        self.call_id = call_id

    def __bool__(self) -> bool:
        return True  # else smolagents replaces it with a plain dict


Settle = Callable[[], Any]
"""Returns what a call returned, or raises what it raised."""


class WinkToolCallingAgent(ToolCallingAgent):
    """A ``ToolCallingAgent`` whose calls are ours: all of a step are one turn, in call order.

    ``tools`` may be ours or those of smolagents; all of them are covered. Managed agents are not:
    their own calls are, where they use one of our classes. When one of several calls fails, the
    model is told of all.

    Args:
        workspace: The directory, or a function of the agent's ``state`` (``additional_args``).
        policies: They govern every call. One that asks a person needs ``ask``.
        title: What `wink log` shows for the run.
        run: Names the run, so that another process continues it.
        bridge: In place of all these: that of another agent or executor.
    """

    def __init__(
        self,
        tools: Sequence[object],
        model: Model,
        *,
        workspace: Workspace = ".",
        policies: Iterable[AnyPolicy] = (),
        title: str = "",
        run: RunName = None,
        bridge: Bridge | None = None,
        **options: Any,
    ) -> None:
        ours = [each for each in tools if isinstance(each, Tool)]
        self.bridge = bridge or Bridge(
            workspace, tools=ours, policies=policies, title=title, run=run
        )
        _check_policies(self.bridge)
        self._covers: dict[str, AnyTool] = {}
        self._settled: dict[str, Settle] = {}
        self._failed: dict[str, AgentError] | None = None
        self._used: set[str] = set()
        theirs = [WinkTool(each, self.bridge) if isinstance(each, Tool) else each for each in tools]
        super().__init__(tools=cast("list[smolagents.Tool]", theirs), model=model, **options)

    def process_tool_calls(
        self, chat_message: ChatMessage, memory_step: ActionStep
    ) -> Generator[Any, None, None]:
        calls = {each.id: each.function for each in chat_message.tool_calls or ()}
        for call_id, function in calls.items():
            given: Any = function.arguments or {}
            if isinstance(given, dict):
                function.arguments = _Arguments(cast("dict[str, Any]", given), call_id)
        waiting = len(chat_message.tool_calls or ())
        failed = self._failed = dict[str, AgentError]()
        for event in super().process_tool_calls(chat_message, memory_step):
            yield event
            if isinstance(event, ToolCall):
                waiting -= 1
                if not waiting:
                    # Here, not in the threads that come now: this one can be interrupted.
                    self._settled = run_blocking(partial(self._together, calls))
        if failed:
            texts = [str(failed[each]) for each in calls if each in failed]
            raise AgentToolExecutionError("\n".join(texts), self.logger)

    async def _together(self, calls: Mapping[str, Any]) -> dict[str, Settle]:
        starts = {
            call_id: self._acall(function.name, function.arguments)
            for call_id, function in calls.items()
            if isinstance(function.arguments, dict) and self._is_covered(function.name)
        }
        if transaction_under_way.get() is not None:  # nested calls share what they change
            return {call_id: await start for call_id, start in starts.items()}
        return dict(zip(starts, await asyncio.gather(*starts.values()), strict=True))

    def _is_covered(self, name: str) -> bool:
        return name in self.tools and type(self.tools[name]) is not FinalAnswerTool

    async def _acall(self, name: str, arguments: Mapping[str, Any]) -> Settle:
        tool, call_id = self.tools[name], getattr(arguments, "call_id", None)
        if call_id in self._used:
            call_id = None  # some models begin to count anew with every step
        elif call_id is not None:
            self._used.add(call_id)
        try:
            if isinstance(tool, WinkTool):
                given = tool.arguments(
                    cast("Any", self)._substitute_state_variables(dict(arguments))
                )
                result = await tool.bridge.acall(
                    tool.tool, given, call_id=call_id, context=self.state
                )
                return partial(self._answer, tool, result)
            if name not in self._covers:
                self._covers[name] = _covering(tool)
            run = super().execute_tool_call
            work = _Work(
                lambda edited: run(name, dict(arguments if edited is None else edited)), arguments
            )
            _work.set(work)
            result = await self.bridge.acall(
                self._covers[name], work.shown, call_id=call_id, context=self.state
            )
            return partial(work.outcome, result)
        except Exception as error:
            return partial(self._fail, AgentToolExecutionError, str(error))

    def _answer(self, tool: WinkTool, result: AnyResult) -> Answer:
        if result.success:
            return tool.answer(result)
        is_invalid = result.failure is not None and result.failure.code == "INVALID_ARGUMENTS"
        self._fail(AgentToolCallError if is_invalid else AgentToolExecutionError, tool.text(result))

    def execute_tool_call(self, tool_name: str, arguments: Any) -> Any:
        call_id = getattr(arguments, "call_id", "")
        settle = self._settled.pop(call_id, None)
        try:
            if settle is None and self._is_covered(tool_name):
                given = _named(self.tools[tool_name].inputs, (arguments,), {})
                settle = run_blocking(lambda: self._acall(tool_name, given))
            return super().execute_tool_call(tool_name, arguments) if settle is None else settle()
        except ToolValidationError as error:  # one of theirs did not run
            failure: AgentError = AgentToolExecutionError(str(error), self.logger)
        except AgentError as error:
            failure = error
        if self._failed is None:
            raise failure
        # Raised here, it would hide this call and the answers of the others from the model.
        self._failed[call_id] = failure
        return f"{tool_name} failed: see the error"

    def _fail(self, kind: Callable[..., AgentError], text: str) -> NoReturn:
        raise kind(text, self.logger)

    def cleanup(self) -> None:
        """Release the workspace."""
        self.bridge.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cleanup()
