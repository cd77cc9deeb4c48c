"""smolagents: one code cell is one transaction, and the tools that it calls are nested calls.

    executor = WinkExecutor(workspace=".")
    agent = CodeAgent(tools=executor.tools, model=model, executor=executor)

A cell that raises is rolled back whole: files, session, and the variables of the interpreter. For
agents that call tools as JSON there is ``WinkToolCallingAgent``.
"""

# smolagents has annotations, but does not say so.
# pyright: reportMissingTypeStubs=false

from __future__ import annotations

import asyncio
import copy
import json
import keyword
import re
import threading
from collections.abc import Callable, Coroutine, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import Context, ContextVar, copy_context
from dataclasses import fields, is_dataclass
from functools import partial
from types import ModuleType, NoneType
from typing import Any, NoReturn, TypeVar, Unpack, cast
from weakref import WeakKeyDictionary

from weakincentives.core.call import transaction_under_way
from weakincentives.core.clock import SYSTEM_CLOCK
from weakincentives.core.loops import ends_within, in_thread, run_blocking
from weakincentives.errors import (
    MissingExtra,
    Suspended,
    ToolTimeout,
    ToolValidationError,
    WinkError,
)
from weakincentives.integrations.bridge import (
    AnyResult,
    AnyTool,
    Bridge,
    BridgeOptions,
    Closes,
    OwnWork,
    RunName,
    Workspace,
    adopted,
)
from weakincentives.prompt.approval import ApprovalPolicy
from weakincentives.prompt.context import ToolContext
from weakincentives.prompt.policies import AnyPolicy
from weakincentives.prompt.tool import Reach, Tool
from weakincentives.tool_result import ToolResult

try:
    from smolagents import AgentError, LocalPythonExecutor, Model, MultiStepAgent, ToolCallingAgent
    from smolagents import Tool as TheirTool
    from smolagents.default_tools import FinalAnswerTool
    from smolagents.local_python_executor import CodeOutput, InterpreterError
    from smolagents.memory import ActionStep, ToolCall
    from smolagents.models import ChatMessage
    from smolagents.utils import (
        AgentExecutionError,
        AgentToolCallError,
        AgentToolExecutionError,
        truncate_content,
    )
except ImportError as error:
    raise MissingExtra("smolagents", "smolagents") from error

T = TypeVar("T")
Schema = dict[str, Any]

_CELL = "python_interpreter"
"""The name of a cell in the record; smolagents calls it that, too."""
_STOP_SECONDS = 5.0
"""How long nested calls may take to end when their cell is stopped."""
_JSON_TYPES: dict[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    NoneType: "null",
}


# Our tools in their agents


class Answer(str):
    """What one of our tools answers: the text for the model, and ``value`` for code."""

    value: Any = None


class WinkTool(TheirTool):
    """One of our tools, for an agent of smolagents. It returns an ``Answer``."""

    skip_forward_signature_validation = True
    output_type = "string"

    def __init__(self, tool: AnyTool, bridge: Bridge) -> None:
        self.tool, self.bridge = tool, bridge
        self.name = re.sub(r"\W", "_", tool.name)
        if not self.name.isidentifier() or keyword.iskeyword(self.name):
            self.name = f"tool_{self.name}"
        self.description = tool.text()
        schema = tool.parameters
        nodes: Schema = _inlined(schema.get("properties", {}), schema.get("$defs", {}))
        required = schema.get("required", ())
        self._never_null = {
            name for name, node in nodes.items() if {"any", "null"}.isdisjoint(_kinds(node))
        }
        self.inputs = {name: _input(node, name in required) for name, node in nodes.items()}
        cast("Any", super()).__init__()

    def forward(self, *args: Any, **kwargs: Any) -> Answer:
        arguments = self.arguments(_named(self.inputs, args, kwargs))
        result = _call(self.bridge, self.tool, arguments)
        answer = self.answer(result)
        if not result.success:
            raise ToolValidationError(answer)
        return answer

    def arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return arguments for our tool: "nullable" only means that one may be left out."""
        return {k: v for k, v in given.items() if v is not None or k not in self._never_null}

    def answer(self, result: AnyResult) -> Answer:
        """Return what the model is told of a call."""
        answer = Answer(result.render(self.tool.max_result_chars))
        answer.value = result.value
        return answer

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


def _input(node: Schema, is_required: bool) -> Schema:
    """Return a JSON schema in the format of smolagents."""
    shown = {key: each for key, each in node.items() if key not in ("anyOf", "oneOf")}
    branches = [each for each in _branches(node) if each is not node and each.keys() - {"type"}]
    if len(branches) == 1:
        shown = {**branches[0], **shown}
    elif branches:  # there is no place for alternatives but in words
        words = f"One of: {json.dumps(branches, ensure_ascii=False)}"
        shown["description"] = f"{shown.get('description', '')} {words}".strip()
    kinds = [kind for kind in _kinds(node) if kind != "null"] or ["null"]
    if "number" in kinds and len(kinds) > 1:
        kinds.append("integer")  # smolagents counts it among numbers only where these stand alone
    shown["type"] = "any" if "any" in kinds else kinds[0] if len(kinds) == 1 else kinds
    shown.setdefault("description", "")
    if not is_required or "null" in _kinds(node):
        shown["nullable"] = True
    return shown


def _described(node: Schema) -> str:
    """Return a description with what a prompt for code has no other place for."""
    rest = {k: v for k, v in node.items() if k not in ("type", "description", "nullable", "title")}
    optional = "Optional." if node.get("nullable") else ""
    more = json.dumps(rest, ensure_ascii=False) if rest else ""
    return " ".join(filter(None, (node["description"], optional, more)))


def _branches(node: Schema) -> list[Schema]:
    return node.get("anyOf") or node.get("oneOf") or [node]


def _kinds(node: Schema) -> list[str]:
    """Return the JSON types that a schema names, each once."""
    found: list[str] = []
    for each in _branches(node):
        if "type" not in each and "enum" in each:
            choices: list[object] = each["enum"]
            found += (_JSON_TYPES.get(type(value), "any") for value in choices)
        else:
            kind = each.get("type", "any")
            found += kind if isinstance(kind, list) else [kind]
    return list(dict.fromkeys(found))


def _inlined(node: Any, definitions: Schema, inside: tuple[str, ...] = ()) -> Any:
    """Return a schema with its references inlined; a recursive one becomes any object."""
    if isinstance(node, list):
        return [_inlined(each, definitions, inside) for each in cast("list[Any]", node)]
    if not isinstance(node, dict):
        return node
    whole = {k: _inlined(v, definitions, inside) for k, v in cast("Schema", node).items()}
    name = str(whole.get("$ref", "")).removeprefix("#/$defs/")
    if name not in definitions:
        return whole
    del whole["$ref"]
    if name in inside:
        return {"type": "object", **whole}
    return {**_inlined(definitions[name], definitions, (*inside, name)), **whole}


def _named(inputs: Mapping[str, Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Schema:
    """Return arguments by name; a tool of smolagents also takes them all as one dict."""
    if len(args) == 1 and not kwargs and isinstance(args[0], dict):
        given = cast("Schema", args[0])
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

    def run(params: Schema, *, context: ToolContext) -> AnyResult:
        try:
            return ToolResult.ok(_recordable(tool(**params)))
        except Exception as error:
            _raise_understood(error)

    inputs = cast("dict[str, Schema]", tool.inputs)
    schema = {
        "type": "object",
        "properties": {name: _json_schema(node) for name, node in inputs.items()},
        "required": [name for name, node in inputs.items() if not node.get("nullable")],
        "additionalProperties": False,
    }
    return adopted(tool.name, tool.description, schema, run, **options)


def _json_schema(node: Schema) -> Schema:
    shown = {key: each for key, each in node.items() if key != "nullable"}
    kinds = _kinds({"type": node["type"]})
    if {"any", "image", "audio"}.intersection(kinds):
        del shown["type"]
    elif node.get("nullable"):
        shown["type"] = [*kinds, "null"]
    return shown


def _raise_understood(error: Exception) -> NoReturn:
    """Raise an exception of a smolagents tool, worded for the model."""
    if isinstance(error, (Suspended, ToolValidationError)):
        raise error
    text = str(error) if isinstance(error, AgentError) else f"{type(error).__name__}: {error}"
    raise ToolValidationError(text) from error


def _recordable(value: Any) -> Any:
    """Return a value for the record: plain data as it is, anything else as text."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Mapping):
        given = cast("Mapping[Any, Any]", value)
        return {str(key): _recordable(each) for key, each in given.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_recordable(each) for each in cast("Iterable[Any]", value)]
    return str(value) if isinstance(value, str) else truncate_content(str(value), 1000)


class _Work(OwnWork):
    """One call of a smolagents tool, with its real arguments."""

    def __init__(self, run: Callable[[Schema | None], Any], given: Mapping[str, Any]) -> None:
        super().__init__(self._run_edited)
        self._run, self._given = run, given
        self.shown: Schema = _recordable(given)
        """The arguments as they are on record."""

    def _run_edited(self, params: Schema) -> Any:
        """Run the tool. Arguments that a person has edited replace the real ones."""
        edited = None
        if params != self.shown:
            edited = {k: self._given[k] if self.shown.get(k) == v else v for k, v in params.items()}
        return self._run(edited)

    def failed(self, error: Exception) -> AnyResult:
        _raise_understood(error)

    def recorded(self, value: Any) -> AnyResult:
        return ToolResult.ok(truncate_content(str(value)))

    def answer(self, result: AnyResult) -> Any:
        if not result.success:
            raise ToolValidationError(result.render())
        return result.render()


def _needs_cover(tool: object) -> bool:
    return not isinstance(tool, WinkTool) and type(tool) is not FinalAnswerTool


def _covering(bridge: Bridge, tool: Any, work: _Work, reach: Reach | None) -> AnyTool:
    """Return a smolagents tool or managed agent as ours. Arguments are not checked."""
    is_ours = hasattr(getattr(tool, "python_executor", tool), "bridge")  # an agent with our calls
    options: Schema = {"writes": "api"} if is_ours else {}
    return bridge.covering(
        tool.name,
        tool.description,
        work.sync_handler,
        reach=reach,
        concurrent=reach == "read",
        **options,
    )


# Cells


class WinkExecutor(LocalPythonExecutor):
    """Runs each code cell of a ``CodeAgent`` as one transaction.

    Tools and managed agents that the code calls are nested calls, with their own policies and
    records. A cell that raises is rolled back: files, session and variables. Of variables, these
    cannot be restored: values that cannot be copied (the model is told which), attributes of
    classes and modules, and objects that something outside the interpreter refers to.

    Args:
        workspace: The directory, or a function of the variables that the agent was given
            (``additional_args``).
        bridge: That of another executor, for an agent that it manages. Its cells are then nested
            in the cell that calls it.
        additional_authorized_imports: As for ``LocalPythonExecutor``. With these or with functions,
            code can write files by itself, too.
        timeout_seconds: The time that a cell may take; time in tools does not count.
        copy_values: Whether the values of variables are copied before each cell. Without it, a
            cell that fails restores the variables, but not what it changed inside their values.
        options: Those of ``Bridge``; next to ``bridge``, only ``reaches`` has an effect. A policy
            that asks a person needs ``ask``.
    """

    state: _Variables  # pyright: ignore[reportIncompatibleVariableOverride]
    custom_tools: dict[str, Any]

    def __init__(
        self,
        workspace: Workspace | None = ".",
        *,
        bridge: Bridge | None = None,
        additional_authorized_imports: Sequence[str] = (),
        additional_functions: Mapping[str, Callable[..., Any]] | None = None,
        max_print_outputs_length: int | None = None,
        timeout_seconds: float | None = 30.0,
        copy_values: bool = True,
        **options: Unpack[BridgeOptions],
    ) -> None:
        self.bridge = bridge or Bridge(workspace, **options)
        _check_policies(self.bridge)
        cast("Any", super()).__init__(
            list(additional_authorized_imports),
            max_print_outputs_length,
            dict(additional_functions or {}),
            timeout_seconds=None,  # theirs loses the context, and waits for the code all the same
        )
        self.tools: list[TheirTool] = [WinkTool(tool, self.bridge) for tool in self.bridge.tools]
        """Ours, for ``CodeAgent(tools=...)``."""
        self.state = _Variables(self.state)
        self._seconds = timeout_seconds
        self._copies = copy_values
        self._reaches = options.get("reaches") or {}
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
            concurrent=False,  # tools in it may have to work in place
        )

    def send_variables(self, variables: dict[str, Any]) -> None:
        self._given = variables
        super().send_variables(variables)

    def send_tools(self, tools: Mapping[str, Any]) -> None:
        called: Any = {name: self._callable(name, tool) for name, tool in tools.items()}
        super().send_tools(called)

    def _callable(self, name: str, tool: Any) -> Callable[..., Any]:
        """Return what code calls by the name of a tool."""
        run: Callable[..., Any] = tool
        if _needs_cover(tool):
            run = partial(self._covered, tool, self._reaches.get(name))

        def call(*args: Any, **kwargs: Any) -> object:
            cell, here = self._cell, _cell_here.get()
            if cell is None or here not in (None, cell):
                raise InterpreterError(f"{name} was called after its cell had ended")
            if here is None:  # in a thread that the code has started
                return cell.context.copy().run(call, *args, **kwargs)
            with cell.in_tool(tool):
                return run(*args, **kwargs)

        call.__name__ = name
        return call

    def _covered(self, tool: Any, reach: Reach | None, /, *args: Any, **kwargs: Any) -> Any:
        def run(edited: Mapping[str, Any] | None) -> Any:
            return tool(*args, **kwargs) if edited is None else tool(**edited)

        work = _Work(run, _named(getattr(tool, "inputs", {}), args, kwargs))
        cover = _covering(self.bridge, tool, work, reach)
        return work.outcome(_call(self.bridge, cover, work.shown))

    def __call__(self, code_action: str) -> CodeOutput:
        _check_outer(self.bridge, self._given)
        state = self.state
        saved = _Saved(state, self.custom_tools, self._copies)
        self._cell = state.cell = cell = _Cell(self.bridge, self._seconds)
        goes_on = False
        try:
            result = _call(self.bridge, self._tool, {"code": code_action}, self._given)
            if not result.success or cell.output is None:
                goes_on = True
                raise InterpreterError(_why(result, saved.uncopied))
            goes_on = not cell.output.is_final_answer
            return cell.output
        except BaseException:
            saved.restore(state, self.custom_tools)
            raise
        finally:
            cell.is_over = True
            self._cell = state.cell = None
            if not goes_on and transaction_under_way.get() is None:
                self.bridge.release()  # others may work in the workspace until the next run

    async def _run(self, params: dict[str, Any], *, context: ToolContext) -> AnyResult:
        cell = self._cell
        assert cell is not None
        code = partial(super().__call__, params["code"])
        work = in_thread(partial(cell.run, code))
        try:
            while not await ends_within(cell.seconds_left(), work):
                if cell.is_late():
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


def _check_outer(bridge: Bridge, given: Any) -> None:
    """Refuse to wait for a cell that waits for us."""
    cell = _cell_here.get()
    if cell is None or cell.bridge is bridge:
        return
    if not (cell.bridge.has_directory and bridge.has_directory):
        return
    if cell.bridge.registry().workspace is bridge.registry(given).workspace:
        raise WinkError(
            "an agent that is managed by another one, in the same workspace, needs the bridge of "
            "that one: bridge=executor.bridge"
        )


def _why(result: AnyResult, uncopied: Sequence[str]) -> str:
    """Return what the model is told of a cell that failed."""
    lines = [result.render()]
    if result.metadata.undone:
        lines.append("The cell was rolled back: files and variables are as they were before it.")
        lines += (f"Not undone: {each}" for each in result.metadata.not_undone)
        if uncopied:
            names = ", ".join(uncopied)
            lines.append(f"What the cell may have changed inside these values stays: {names}")
    return "\n".join(lines)


class _Cell:
    """A running cell."""

    context: Context
    """Where its code runs; for threads that it starts."""
    output: CodeOutput | None = None
    is_over = False

    def __init__(self, bridge: Bridge, seconds: float | None) -> None:
        self.bridge = bridge
        self._until = None if seconds is None else SYSTEM_CLOCK.monotonic() + seconds
        self._lock = threading.Lock()
        self._calls: set[asyncio.Task[Any]] = set()
        self._inside: list[Any] = []
        """The tools and managed agents at work. Meanwhile, the time of the code does not pass."""
        self._since = 0.0

    def run(self, code: Callable[[], CodeOutput]) -> CodeOutput:
        _cell_here.set(self)
        self.context = copy_context()
        return code()

    @contextmanager
    def in_tool(self, tool: Any) -> Generator[None]:
        with self._lock:
            if not self._inside:
                self._since = SYSTEM_CLOCK.monotonic()
            self._inside.append(tool)
        try:
            yield
        finally:
            with self._lock:
                self._inside.remove(tool)
                if not self._inside and self._until is not None:
                    self._until += SYSTEM_CLOCK.monotonic() - self._since

    def seconds_left(self) -> float | None:
        """Return how long to wait before the next look; None for ever."""
        return None if self._until is None else max(self._until - SYSTEM_CLOCK.monotonic(), 0.05)

    def is_late(self) -> bool:
        with self._lock:
            return not self._inside and (self._until or 0.0) <= SYSTEM_CLOCK.monotonic()

    async def calling(self, call: Coroutine[Any, Any, T]) -> T:
        """Make nested calls, which end with the cell."""
        task = cast("asyncio.Task[Any]", asyncio.current_task())
        self._calls.add(task)
        try:
            return await call
        finally:
            self._calls.discard(task)

    async def stop(self) -> None:
        """Cancel the nested calls under way, and wait: they must be on record before the cell."""
        self.is_over = True
        for each in tuple(self._inside):
            if isinstance(each, MultiStepAgent):
                each.interrupt()
        for task in tuple(self._calls):
            task.get_loop().call_soon_threadsafe(task.cancel)
        until = SYSTEM_CLOCK.monotonic() + _STOP_SECONDS
        while self._calls and SYSTEM_CLOCK.monotonic() < until:
            await asyncio.sleep(0.01)


_cell_here: ContextVar[_Cell | None] = ContextVar("wink_smolagents_cell", default=None)


def _blocking(start: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Make calls from sync code; in a cell, they belong to it."""
    cell = _cell_here.get()
    return run_blocking(start if cell is None else lambda: cell.calling(start()))


def _call(bridge: Bridge, tool: AnyTool, arguments: object, given: Any = None) -> AnyResult:
    """Make a call from the code of a cell, or the call of a cell itself."""
    with _one_at_a_time():
        if _cell_here.get() is not None:
            registry = bridge.registry(given)
            offer = registry.context().offers.get(tool.name)
            if offer is not None and offer.tool is tool and not offer.needs_loop:
                return registry.execute(tool, arguments)  # here: a tenth of the cost
        return _blocking(lambda: bridge.acall(tool, arguments, context=given))


_nested: WeakKeyDictionary[Any, threading.Lock] = WeakKeyDictionary()
_guard = threading.Lock()


@contextmanager
def _one_at_a_time() -> Generator[None]:
    """Let threads that one call has started make their own calls one after the other.

    A call that is nested in no other waits for its turn anyway.
    """
    parent, cell = transaction_under_way.get(), _cell_here.get()
    if parent is None:
        yield
        return
    if cell is not None and cell.is_over:
        raise InterpreterError("the cell has ended")
    with _guard:
        lock = _nested.setdefault(parent, threading.Lock())
    with lock:
        yield


# Variables


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


class WinkToolCallingAgent(Closes, ToolCallingAgent):
    """A ``ToolCallingAgent`` whose calls are ours: those of a step are one turn, in call order.

    ``tools`` may be ours or those of smolagents; all of them are covered. Managed agents are not:
    their own calls are, where they use one of our classes. When one of several calls fails, the
    model is told of all.

    Args:
        workspace: The directory, or a function of the agent's ``state`` (``additional_args``).
        policies: They govern every call. One that asks a person needs ``ask``.
        title: What `wink log` shows for the run.
        run: Names the run, so that another process continues it.
        bridge: In place of all these: that of another agent or executor.
        reaches: How far tools of smolagents reach, by name: ``{"search": "read"}``. Unstated, they
            run one at a time, and the workspace is scanned for what they write.
    """

    tools: dict[str, Any]

    def __init__(
        self,
        tools: Sequence[object],
        model: Model,
        *,
        workspace: Workspace | None = ".",
        policies: Iterable[AnyPolicy] = (),
        title: str = "",
        run: RunName = None,
        bridge: Bridge | None = None,
        reaches: Mapping[str, Reach] | None = None,
        **options: Any,
    ) -> None:
        ours = [cast("AnyTool", each) for each in tools if isinstance(each, Tool)]
        self.bridge = bridge or Bridge(
            workspace, tools=ours, policies=policies, title=title, run=run
        )
        _check_policies(self.bridge)
        self._reaches: Mapping[str, Reach] = reaches or {}
        self._settled: dict[str, Settle] = {}
        self._failed: dict[str, AgentError] | None = None
        self._used: set[str] = set()
        offered: list[Any] = [
            WinkTool(cast("AnyTool", each), self.bridge) if isinstance(each, Tool) else each
            for each in tools
        ]
        cast("Any", super()).__init__(tools=offered, model=model, **options)

    def run(self, task: str, stream: bool = False, *args: Any, **options: Any) -> Any:
        """Run the agent. Afterwards, others may work in the workspace until the next run."""
        run = partial(cast("Any", super()).run, task, stream, *args, **options)
        given: Schema = {**self.state, **(options.get("additional_args") or {})}
        if stream:
            return self._streamed(run, given)
        with self._held(given):
            return run()

    def _streamed(self, run: Callable[[], Any], given: Schema) -> Generator[Any]:
        with self._held(given):
            yield from run()

    def _held(self, given: Schema) -> AbstractContextManager[None]:
        # The calls of a managed agent may be part of the cell that calls it.
        is_nested = transaction_under_way.get() is not None
        return nullcontext() if is_nested else self.bridge.held(given)

    def process_tool_calls(
        self, chat_message: ChatMessage, memory_step: ActionStep
    ) -> Generator[Any]:
        made = chat_message.tool_calls or []
        if len(made) > 1 and any(each.function.name == "final_answer" for each in made):
            # smolagents says so, too, but only when the others have run, and hides their answers.
            raise AgentExecutionError(
                "final_answer must be the only tool call of its step: nothing was run", self.logger
            )
        for number, each in enumerate(made):
            if any(each.id == earlier.id for earlier in made[:number]):
                each.id = f"{each.id}_{number}"  # else smolagents drops the earlier one
        calls: dict[str, Any] = {each.id: each.function for each in made}
        for call_id, function in calls.items():
            if isinstance(function.arguments or {}, dict):
                function.arguments = _Arguments(function.arguments or {}, call_id)
        waiting = len(made)
        failed = self._failed = dict[str, AgentError]()
        try:
            for event in super().process_tool_calls(chat_message, memory_step):
                yield event
                waiting -= isinstance(event, ToolCall)
                if isinstance(event, ToolCall) and not waiting:
                    # Here, not in the threads that come now: this one can be interrupted.
                    self._settled = _blocking(partial(self._together, calls))
        finally:
            self._failed = None
        if failed:
            texts = [str(failed[each]) for each in calls if each in failed]
            raise AgentToolExecutionError("\n".join(texts), self.logger)

    async def _together(self, calls: Mapping[str, Any]) -> dict[str, Settle]:
        _check_outer(self.bridge, self.state)
        starts = {
            call_id: self._settle(function.name, function.arguments)
            for call_id, function in calls.items()
            if self._is_covered(function.name) and isinstance(function.arguments, _Arguments)
        }
        if transaction_under_way.get() is not None:  # nested calls share what they change
            return {call_id: await start for call_id, start in starts.items()}
        return dict(zip(starts, await asyncio.gather(*starts.values()), strict=True))

    def _is_covered(self, name: str) -> bool:
        tool = self.tools.get(name)
        return isinstance(tool, WinkTool) or (tool is not None and _needs_cover(tool))

    async def _settle(self, name: str, arguments: Mapping[str, Any]) -> Settle:
        """Make a call; whatever comes of it, the other calls of the step go on."""
        call_id = getattr(arguments, "call_id", None)
        if call_id in self._used:
            call_id = None  # some models restart their ids with every step
        elif call_id is not None:
            self._used.add(call_id)
        call = self._ours if isinstance(self.tools[name], WinkTool) else self._theirs
        try:
            return await call(name, arguments, call_id)
        except Exception as error:
            return partial(_raise, ToolValidationError(str(error)))

    async def _ours(self, name: str, arguments: Mapping[str, Any], call_id: str | None) -> Settle:
        tool = cast("WinkTool", self.tools[name])
        given: Any = self._substitute_state_variables(dict(arguments))
        given = tool.arguments(given)
        result = await tool.bridge.acall(tool.tool, given, call_id=call_id, context=self.state)
        if result.success:
            return lambda: tool.answer(result)
        is_invalid = result.failure is not None and result.failure.code == "INVALID_ARGUMENTS"
        kind = AgentToolCallError if is_invalid else AgentToolExecutionError
        return partial(_raise, kind(tool.answer(result), self.logger))

    async def _theirs(self, name: str, arguments: Mapping[str, Any], call_id: str | None) -> Settle:
        execute = super().execute_tool_call
        work = _Work(lambda edited: execute(name, dict(edited or arguments)), arguments)
        cover = _covering(self.bridge, self.tools[name], work, self._reaches.get(name))
        result = await self.bridge.acall(cover, work.shown, call_id=call_id, context=self.state)
        return partial(work.outcome, result)

    def execute_tool_call(self, tool_name: str, arguments: Any) -> Any:
        call_id = getattr(arguments, "call_id", "")
        settle = self._settled.pop(call_id, None)
        if settle is None and self._is_covered(tool_name):
            given = arguments
            if not isinstance(given, dict):
                given = _named(self.tools[tool_name].inputs, (arguments,), {})
            settle = _blocking(lambda: self._settle(tool_name, cast("Any", given)))
        try:
            return super().execute_tool_call(tool_name, arguments) if settle is None else settle()
        except ToolValidationError as error:  # it did not run
            failure: AgentError = AgentToolExecutionError(str(error), self.logger)
        except AgentError as error:
            failure = error
        if self._failed is None:
            raise failure
        # Raised here, it would hide this call, and the answers of the others, from the model.
        self._failed[call_id] = failure
        return f"{tool_name} failed: see the error"

    def cleanup(self) -> None:
        """Release the workspace."""
        self.bridge.close()

    close = cleanup


def _raise(error: Exception) -> NoReturn:
    raise error
