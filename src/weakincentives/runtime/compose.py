"""Tools made of tools: one after the other, beside each other, or one branch of several.

A composed tool is a tool like any other, and its call is one transaction. Its members are nested
calls, each with its own checks, effects and record; the composed tool has none of its own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from textwrap import indent
from typing import Any, cast
from weakref import WeakKeyDictionary

from weakincentives.call import ToolCall, call_under_way
from weakincentives.errors import ToolDefinitionError
from weakincentives.prompt.prompt import Offer, RenderedPrompt
from weakincentives.prompt.signatures import is_async
from weakincentives.prompt.tool import Reach, Tool, ToolContext, Writes
from weakincentives.prompt.tool_result import ToolError, ToolResult
from weakincentives.runtime.tool_call import (
    aexecute_tool,
    aexecute_tools,
    execute_tool,
    execute_tools,
    step_by_hand,
)
from weakincentives.serde import dump

AnyTool = Tool[Any, Any]
AnyResult = ToolResult[Any]
Schema = dict[str, Any]
Transform = Callable[[Any, AnyTool], object]
"""Called with the value of a success and the next tool; returns that tool's arguments."""
Condition = Callable[[AnyResult, ToolContext], object]

_MAX_NAME = 64
# From the nearest to the farthest. Unstated is not known to stay inside.
_REACHES: tuple[Reach | None, ...] = ("read", "reversible", None, "compensable", "irreversible")
_WRITES: tuple[Writes, ...] = ("api", "command", "external")


# What a composed call gives


@dataclass(frozen=True, slots=True)
class SequenceOutput:
    """What each tool of a sequence answered, in order; those that were not reached are left out."""

    results: tuple[AnyResult, ...]
    kept: bool = True
    """Whether the changes of those that succeeded are kept."""

    @property
    def failed(self) -> tuple[AnyResult, ...]:
        return tuple(result for result in self.results if not result.success)

    def render(self) -> str:
        return "\n".join(
            _shown(f"{number}. {result.metadata.tool_name}", result, self.kept)
            for number, result in enumerate(self.results, start=1)
        )


@dataclass(frozen=True, slots=True)
class ParallelOutput:
    """What each tool answered, by its key; without a key of its own, that is the tool's name."""

    results: Mapping[str, AnyResult]
    kept: bool = True
    """Whether the changes of those that succeeded are kept."""
    not_run: tuple[str, ...] = ()
    """The keys of those that ``stop_on_error`` kept from running."""

    @property
    def failed(self) -> Mapping[str, AnyResult]:
        return {key: result for key, result in self.results.items() if not result.success}

    def render(self) -> str:
        lines = [_shown(f"- {key}", result, self.kept) for key, result in self.results.items()]
        return "\n".join([*lines, *(f"- {key}: not run" for key in self.not_run)])


@dataclass(frozen=True, slots=True)
class ConditionalOutput:
    """What the tools of the branch that was taken answered, in order."""

    branch: int | None
    """Counted from zero; None for the fallback."""
    results: tuple[AnyResult, ...]

    @property
    def result(self) -> AnyResult:
        """The last answer: that of the branch."""
        return self.results[-1]

    def render(self) -> str:
        # The last one's message is the composed result's own.
        return replace(self.result, message="").render()


def _shown(label: str, result: AnyResult, kept: bool) -> str:
    if not result.success:
        state = "failed" if result.failure is None else f"failed ({result.failure.code})"
    else:
        state = "done" if kept else "done, then rolled back as far as it can be"
    text = result.render()
    return f"{label}: {state}\n{indent(text, '   ')}" if text else f"{label}: {state}"


# The three ways


def sequence(
    tools: Sequence[AnyTool],
    *,
    stop_on_error: bool = False,
    transform_output: Transform | None = None,
    keep_partial: bool = False,
    name: str | None = None,
    description: str | None = None,
) -> Tool[Any, SequenceOutput]:
    """Return a tool that runs tools one after the other.

    It takes the first one's parameters; each later one is given those of these arguments that its
    own parameters name, or what ``transform_output(value, next_tool)`` makes of the value before.
    All of them run, unless ``stop_on_error``. If one fails, the whole is rolled back;
    with ``keep_partial`` what succeeded is kept, and the call succeeds if anything did.
    """
    members = _members("sequence", tools)
    first = members[0]
    if transform_output is None:
        _check_given(f"sequence of {_names(members)}", first, members[1:])
    else:
        _check_plain("transform_output", transform_output)

    async def work(params: Any, run: _Run) -> ToolResult[SequenceOutput]:
        results: list[AnyResult] = []
        arguments = given = params
        for number, tool in enumerate(members):
            result = await run.call(tool, given, number)
            results.append(result)
            if number + 1 == len(members) or (stop_on_error and not result.success):
                break
            following = members[number + 1]
            if transform_output is not None and result.success:
                arguments = given = transform_output(result.value, following)
            else:
                given = _named_by(following, arguments)

        def output(kept: bool) -> SequenceOutput:
            return SequenceOutput(tuple(results), kept)

        return _answer(results, len(members), output, stop_on_error, keep_partial)

    return _composed(
        f"sequence:{'→'.join(map(_title, members))}",
        members,
        work,
        name=name or _wire_name("sequence", members),
        description=description
        or f"Sequential execution of {len(members)} tools: {_names(members)}",
        result_type=SequenceOutput,
        timeout=_sum_of_timeouts(members),
        **_parameters_of(first),
    )


def parallel(
    tools: Sequence[AnyTool] | Mapping[str, AnyTool],
    *,
    max_concurrency: int | None = None,
    stop_on_error: bool = False,
    timeout: float | None = None,
    keep_partial: bool = False,
    name: str | None = None,
    description: str | None = None,
) -> Tool[Any, ParallelOutput]:
    """Return a tool that runs tools beside each other, as far as they may.

    They may like the calls of one turn: see ``execute_tools``; the others run alone, and the
    outcome is that of running one after the other. Each is given those of the arguments that its
    parameters name. With a mapping, results come under its keys; a tool that is in it twice takes
    its arguments under its key. ``stop_on_error`` starts no more once one has failed. If one
    fails, the whole is rolled back; with ``keep_partial`` what succeeded is kept, and the call
    succeeds if anything did. A ``timeout`` rolls back the whole in any case.
    """
    by_key = _keyed(tools)
    members = tuple(by_key.values())
    if max_concurrency is not None and max_concurrency < 1:
        raise ToolDefinitionError(f"max_concurrency must be at least 1, got {max_concurrency}")
    batches = _batches(by_key, max_concurrency) if stop_on_error else [list(by_key)]

    async def work(params: Any, run: _Run) -> ToolResult[ParallelOutput]:
        results: dict[str, AnyResult] = {}
        for batch in batches:
            calls = [(by_key[key], _given_to(key, by_key, params)) for key in batch]
            answers = await run.together(calls, len(results), max_concurrency)
            results.update(zip(batch, map(_settled, answers), strict=True))
            if stop_on_error and not all(answer.success for answer in answers):
                break

        def output(kept: bool) -> ParallelOutput:
            not_run = tuple(key for key in by_key if key not in results)
            return ParallelOutput(dict(results), kept, not_run)

        return _answer(list(results.values()), len(by_key), output, stop_on_error, keep_partial)

    return _composed(
        f"parallel:{'+'.join(map(_title, members))}",
        members,
        work,
        name=name or _wire_name("parallel", members),
        description=description or f"Parallel execution of {len(members)} tools: {_names(members)}",
        result_type=ParallelOutput,
        params_type=dict,
        input_schema=_union_of(by_key),
        timeout=timeout if timeout is not None else _sum_of_timeouts(members),
    )


def _settled(result: AnyResult) -> AnyResult:
    """Return a member's answer; one that raised failed to execute, as the Protocol says."""
    failure = result.failure
    if failure is None or failure.code != "INTERNAL_ERROR":
        return result
    return replace(result, failure=replace(failure, code="EXECUTION_FAILED"))


@dataclass(frozen=True, slots=True)
class ConditionalBranch:
    """Tools that run if ``condition(result, context)`` holds for what the first one answers.

    A branch without tools never matches.
    """

    condition: Condition
    tools: Sequence[AnyTool]

    def __post_init__(self) -> None:
        _check_plain("condition", self.condition)
        object.__setattr__(self, "tools", _members("a branch", self.tools, may_be_empty=True))


def conditional(
    branches: Sequence[ConditionalBranch],
    fallback: Sequence[AnyTool] | None = None,
    *,
    name: str | None = None,
    description: str | None = None,
) -> Tool[Any, ConditionalOutput]:
    """Return a tool that takes the first branch whose condition holds.

    A branch's first tool runs, and the condition is asked about its result, a failure included. A
    branch that does not match is rolled back before the next is tried. The answer is that of the
    last tool; the first failure after the match ends the branch. Without a match and a fallback
    the call fails with ``NO_BRANCH_MATCHED``; a branch without tools is skipped. It takes the
    parameters of the first tool there is; each other one is given those of these arguments that
    its own parameters name.
    """
    chosen = _branches(branches)
    last = _members("fallback", fallback) if fallback else ()
    members = (*(tool for branch in chosen for tool in branch.tools), *last)
    title = f"conditional:{len(chosen)}branches"
    if members:
        _check_given(title, members[0], members[1:])
    named = name or f"conditional-{len(chosen)}branches"
    attempts = [
        (number, _attempt(named, number, branch), branch)
        for number, branch in enumerate(chosen)
        if branch.tools
    ]

    async def work(params: Any, run: _Run) -> ToolResult[ConditionalOutput]:
        left_behind: list[str] = []
        for number, attempt, branch in attempts:
            result = await run.call(attempt, _as_dict(params), number, branch.tools)
            if result.failure is not _NOT_MATCHED:
                return _taken(number, result, left_behind)
            left_behind += _left_behind_by(branch.tools[0], result)
        if not last:
            message = "No conditional branch matched and no fallback provided"
            return ToolResult.error(message, code="NO_BRANCH_MATCHED", recoverable=False)
        results = await run.chain(last, params, len(chosen))
        return _taken(None, _as_answer(results), left_behind)

    return _composed(
        title,
        members,
        work,
        name=named,
        description=description or "Conditional tool execution based on runtime conditions",
        result_type=ConditionalOutput,
        timeout=_sum_of_timeouts(members),
        **(_parameters_of(members[0]) if members else {"params_type": None}),
    )


class ToolComposer:
    """The three ways to compose tools, under the Protocol's name for them."""

    sequence = staticmethod(sequence)
    parallel = staticmethod(parallel)
    conditional = staticmethod(conditional)


# A branch: a call of its own, so that it can be rolled back as a whole

_NOT_MATCHED = ToolError("BRANCH_NOT_MATCHED", "The branch's condition does not hold")


@dataclass(frozen=True, slots=True)
class _BranchOutput:
    results: tuple[AnyResult, ...]


def _attempt(composed: str, number: int, branch: ConditionalBranch) -> AnyTool:
    """Return a tool that runs a branch and fails if it does not match."""
    first, *rest = branch.tools

    async def work(params: Any, run: _Run) -> AnyResult:
        result = await run.call(first, _named_by(first, params), 0)
        if not branch.condition(result, run.context):
            return ToolResult(
                f"Branch {number + 1} does not match", success=False, failure=_NOT_MATCHED
            )
        return _as_answer([result, *await run.chain(rest, params, 1)])

    return _composed(
        f"{composed}: branch {number + 1}",
        tuple(branch.tools),
        work,
        name=_cut(f"{composed}-branch-{number + 1}"),
        description=f"Branch {number + 1} of {composed}",
        result_type=_BranchOutput,
        params_type=dict,
        input_schema={"type": "object"},
        # Only the first tool may have run when it is rolled back: what that left behind is said
        # by the composed call.
        reach=None,
    )


def _as_answer(results: Sequence[AnyResult]) -> ToolResult[_BranchOutput]:
    last = results[-1]
    return ToolResult(
        last.message,
        _BranchOutput(tuple(results)),
        success=last.success,
        exclude_value_from_context=last.exclude_value_from_context,
        failure=last.failure,
    )


def _taken(
    number: int | None, result: AnyResult, left_behind: Sequence[str]
) -> ToolResult[ConditionalOutput]:
    """Return a branch's answer as that of the whole."""
    value: object = result.value
    output = ConditionalOutput(number, value.results) if isinstance(value, _BranchOutput) else None
    message = "\n".join([part for part in (result.message, *left_behind) if part])
    return ToolResult(
        message,
        output,
        success=result.success,
        exclude_value_from_context=result.exclude_value_from_context,
        failure=result.failure,
    )


def _left_behind_by(tool: AnyTool, result: AnyResult) -> list[str]:
    """Return what a branch that did not match could not take back, in sentences."""
    found = list(result.metadata.not_undone)
    if tool.reach in ("compensable", "irreversible"):
        found.append(f"what '{tool.name}' did outside the session, files and resources")
    return [f"{result.message}; not undone: {'; '.join(found)}"] if found else []


def _branches(branches: Iterable[ConditionalBranch]) -> tuple[ConditionalBranch, ...]:
    chosen = tuple(branches)
    if not chosen:
        raise ToolDefinitionError("conditional needs at least one branch")
    for branch in cast("tuple[object, ...]", chosen):
        if not isinstance(branch, ConditionalBranch):
            raise ToolDefinitionError(
                f"conditional takes ConditionalBranch(condition, tools), got {branch!r}"
            )
    return chosen


# Running members


@dataclass(slots=True)
class _Run:
    """One call of a composed tool, and how it calls its members."""

    context: ToolContext
    handler: object
    on_loop: bool
    call_id: str = field(init=False)
    offers: Mapping[str, Offer] = field(init=False)
    own: Offer | None = field(init=False)

    def __post_init__(self) -> None:
        call = call_under_way()
        rendered = self.context.rendering
        self.offers = {} if rendered is None else rendered.offers
        own = None if call is None else self.offers.get(call.name)
        is_own = own is not None and own.tool.handler is self.handler
        self.own = own if is_own else None
        self.call_id = "" if call is None else call.id

    async def call(
        self, tool: AnyTool, arguments: object, number: int, members: Sequence[AnyTool] = ()
    ) -> AnyResult:
        """Run one member, or a branch with its members.

        A branch was admitted with the whole, so no policy is asked about it.
        """
        offers = {each.name: self._offer(each) for each in members}
        offers[tool.name] = Offer.of(tool) if members else self._offer(tool)
        call, context = self._request(tool, arguments, number), self._offering(offers)
        if not self.on_loop:
            return execute_tool(call, context=context)
        return await aexecute_tool(call, context=context)

    async def chain(self, tools: Iterable[AnyTool], arguments: Any, start: int) -> list[AnyResult]:
        """Run members one after the other, up to the first that fails."""
        results: list[AnyResult] = []
        for number, tool in enumerate(tools, start):
            results.append(await self.call(tool, _named_by(tool, arguments), number))
            if not results[-1].success:
                break
        return results

    async def together(
        self,
        members: Sequence[tuple[AnyTool, object]],
        start: int,
        max_concurrency: int | None,
    ) -> tuple[AnyResult, ...]:
        """Run members as the calls of one turn."""
        context = self._offering({tool.name: self._offer(tool) for tool, _ in members})
        calls = [
            self._request(tool, arguments, number)
            for number, (tool, arguments) in enumerate(members, start)
        ]
        if not self.on_loop:
            return execute_tools(calls, context=context, max_concurrency=max_concurrency)
        return await aexecute_tools(calls, context=context, max_concurrency=max_concurrency)

    def _request(self, tool: AnyTool, arguments: object, number: int) -> ToolCall:
        if not self.call_id:
            return ToolCall(tool.name, arguments)
        # The same when the composed call is taken again: what must not happen twice knows by it.
        return ToolCall(tool.name, arguments, id=f"{self.call_id}.{number + 1}")

    def _offer(self, tool: AnyTool) -> Offer:
        """Return a member as it is offered, or under the rules of the tool it is part of."""
        offered = self.offers.get(tool.name)
        if offered is not None and offered.tool is tool:
            return offered
        if self.own is None:
            return Offer.of(tool)
        return Offer.of(tool, self.own.rules, self.own.listeners)

    def _offering(self, more: Mapping[str, Offer]) -> ToolContext:
        rendered = self.context.rendering or RenderedPrompt("", ())
        offering = replace(rendered, offers={**self.offers, **more})
        return self.context.having(rendered_prompt=offering)


Work = Callable[[Any, _Run], Coroutine[Any, Any, AnyResult]]


def _handler_of(work: Work, members: Sequence[AnyTool]) -> Any:
    """Return a handler; an async one if any member may have to be waited for."""
    offers = [Offer.of(tool) for tool in members]
    some_run_beside = sum(offer.may_run_beside for offer in offers) > 1
    if any(offer.needs_loop for offer in offers) or some_run_beside:

        async def on_loop(params: Any, *, context: ToolContext) -> AnyResult:
            return await work(params, _Run(context, on_loop, True))

        made: Any = on_loop
    else:

        def here(params: Any, *, context: ToolContext) -> AnyResult:
            return step_by_hand(work, params, _Run(context, here, False))

        made = here
    made.composed_of = members  # whether it may run beside others depends on all of them
    return made


def _answer(
    results: Sequence[AnyResult],
    total: int,
    output: Callable[[bool], Any],
    stop_on_error: bool,
    keep_partial: bool,
) -> AnyResult:
    failed = [result for result in results if not result.success]
    done = len(results) - len(failed)
    if not failed:
        return ToolResult.ok(output(True), f"All {total} tools succeeded")
    if keep_partial and done:
        reasons = "; ".join(map(_reason, failed))
        return ToolResult.ok(output(True), f"{done} of {total} tools succeeded; failed: {reasons}")
    failures = [result.failure or ToolError("EXECUTION_FAILED", "") for result in failed]
    message = f"{len(failed)} of {total} tools failed: {'; '.join(map(_reason, failed))}"
    if done:
        message += "\nNothing that the others changed in session or files is kept."
    failure = ToolError(
        failures[0].code if stop_on_error else "EXECUTION_FAILED",
        message,
        all(failure.recoverable for failure in failures),
        tuple(dict.fromkeys(text for failure in failures for text in failure.suggestions)),
    )
    return ToolResult(message, output(False), success=False, failure=failure)


def _reason(result: AnyResult) -> str:
    first_line = result.message.partition("\n")[0]
    return f"{result.metadata.tool_name} ({first_line})"


# What a composed tool is


def _composed(
    title: str, members: Sequence[AnyTool], work: Work, *, name: str, **options: Any
) -> AnyTool:
    options.setdefault("reach", max((t.reach for t in members), key=_REACHES.index, default=None))
    return Tool(
        name=name,
        title=title,
        handler=_handler_of(work, members),
        writes=cast("Writes", max((t.writes for t in members), key=_WRITES.index, default="api")),
        concurrent=True,  # as far as its members may: the offer asks them
        strict=False,
        **options,
    )


def _wire_name(kind: str, members: Iterable[AnyTool]) -> str:
    return _cut("-".join([kind, *(tool.name for tool in members)]))


def _cut(name: str) -> str:
    """Return a name that providers take; what is cut off still makes a difference."""
    if len(name) <= _MAX_NAME:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return f"{name[: _MAX_NAME - 9]}-{digest}"


def _title(tool: AnyTool) -> str:
    """Return what the Protocol calls a tool."""
    return tool.title if hasattr(tool.handler, "composed_of") else tool.name


def _names(tools: Iterable[AnyTool]) -> str:
    return ", ".join(tool.name for tool in tools)


def _sum_of_timeouts(members: Sequence[AnyTool]) -> float | None:
    """Return what members take at most if each has a limit and no second try.

    For parallel ones as well: those that may not run beside others wait for each other.
    """
    limits = [tool.timeout for tool in members if tool.retry is None and tool.timeout is not None]
    return sum(limits) if limits and len(limits) == len(members) else None


def _members(kind: str, tools: object, *, may_be_empty: bool = False) -> tuple[AnyTool, ...]:
    """Return the tools of a list, or say what is wrong with it."""
    if isinstance(tools, Tool) or not isinstance(tools, Iterable):
        raise ToolDefinitionError(f"{kind} takes a list of tools, got {tools!r}")
    members = tuple(cast("Iterable[AnyTool]", tools))
    if not members and not may_be_empty:
        raise ToolDefinitionError(f"{kind} needs at least one tool")
    by_name: dict[str, AnyTool] = {}
    for tool in members:
        _check_member(kind, tool)
        if by_name.setdefault(tool.name, tool) is not tool:
            raise ToolDefinitionError(
                f"{kind} has two different tools called {tool.name!r}; give one another name: "
                "tool.replace(name=...)"
            )
    return members


def _check_member(kind: str, tool: object) -> None:
    if not isinstance(tool, Tool):
        raise ToolDefinitionError(
            f"{kind} takes tools, got {tool!r}; make one with Tool[Params, Result](...) or @tool"
        )
    if cast("AnyTool", tool).handler is None:
        raise ToolDefinitionError(
            f"{kind} cannot run tool {tool.name!r}: it has no handler, the provider runs it"
        )


def _check_plain(what: str, function: object) -> None:
    if not callable(function) or is_async(function):
        raise ToolDefinitionError(f"{what} must be a plain function, got {function!r}")


def _keyed(tools: object) -> dict[str, AnyTool]:
    """Return members by key: a mapping's own, or their names."""
    if isinstance(tools, Mapping):
        by_key = dict(cast("Mapping[str, AnyTool]", tools))
        for key in cast("dict[object, AnyTool]", by_key):
            if not isinstance(key, str) or not key:
                raise ToolDefinitionError(f"the keys of parallel must be names, got {key!r}")
        _members("parallel", by_key.values())
        return by_key
    members = _members("parallel", tools)
    if len(set(members)) < len(members):
        twice = next(tool for tool in members if members.count(tool) > 1)
        raise ToolDefinitionError(
            f"parallel has {twice.name!r} twice; give the tools as a mapping, so that each has a "
            "key of its own"
        )
    return {tool.name: tool for tool in members}


def _batches(by_key: Mapping[str, AnyTool], size: int | None) -> list[list[str]]:
    """Return the keys of those that start together; all others are alone."""
    batches: list[list[str]] = []
    was_beside = False
    for key, tool in by_key.items():
        is_beside = Offer.of(tool).may_run_beside
        if is_beside and was_beside and (size is None or len(batches[-1]) < size):
            batches[-1].append(key)
        else:
            batches.append([key])
        was_beside = is_beside
    return batches


def _parameters_of(tool: AnyTool) -> dict[str, Any]:
    return {
        "params_type": tool.params_type,
        "input_schema": tool.input_schema,
        "parameter_descriptions": tool.parameter_descriptions,
    }


# Which of the arguments each member gets, and the schema of them all

_COMBINED = ("$ref", "allOf", "anyOf", "oneOf")
_REMARKS = ("description", "title", "default", "examples")
"""What a schema says besides what fits it."""
_REFERENCE = "#/$defs/"

_parameter_names: WeakKeyDictionary[AnyTool, frozenset[str]] = WeakKeyDictionary()


def _as_dict(params: object) -> dict[str, Any]:
    """Return parameters as the arguments they were made from."""
    return {} if params is None else cast("dict[str, Any]", dump(params))


def _named_by(tool: AnyTool, arguments: object) -> dict[str, Any]:
    """Return those of the arguments that a tool's parameters name."""
    names = _parameter_names.get(tool)
    if names is None:
        names = _parameter_names[tool] = frozenset(_properties(tool))
    return {name: value for name, value in _as_dict(arguments).items() if name in names}


def _given_to(key: str, by_key: Mapping[str, AnyTool], arguments: dict[str, Any]) -> dict[str, Any]:
    """Return a parallel member's arguments; those of a tool that comes twice are under its key."""
    tool = by_key[key]
    return arguments.get(key, {}) if _is_repeated(tool, by_key) else _named_by(tool, arguments)


def _check_given(where: str, first: AnyTool, others: Iterable[AnyTool]) -> None:
    """Refuse a member that could never be called with the first one's arguments."""
    others = tuple(others)
    known = _properties(first) if others else {}
    for tool in others:
        _properties(tool)
        missing = [name for name in tool.parameters.get("required", ()) if name not in known]
        if missing:
            raise ToolDefinitionError(
                f"{where}: {tool.name!r} needs {', '.join(missing)}, which the parameters of "
                f"{first.name!r} do not have; "
                "rename one of them, or give a sequence transform_output=..."
            )


def _union_of(by_key: Mapping[str, AnyTool]) -> Schema:
    """Return one schema for the arguments of all members of a parallel tool."""
    properties: dict[str, Any] = {}
    owners: dict[str, str] = {}
    required: dict[str, None] = {}
    definitions: dict[str, Any] = {}
    for key, tool in by_key.items():
        offered = _properties(tool)
        schema = _with_shared_definitions(key, tool.parameters, definitions)
        needed: list[str] = schema.get("required", [])
        if _is_repeated(tool, by_key):
            needed = [key] if needed else []
            offered = {key: schema}
        else:
            offered = {name: schema["properties"][name] for name in offered}
        for name, found in offered.items():
            owner = owners.setdefault(name, key)
            if owner != key:
                found = _shared(name, (owner, properties[name]), (key, found))
            properties[name] = found
        required.update(dict.fromkeys(needed))
    union: Schema = {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }
    return {**union, "$defs": definitions} if definitions else union


def _properties(tool: AnyTool) -> dict[str, Any]:
    schema = tool.parameters
    if any(word in schema for word in _COMBINED):
        raise ToolDefinitionError(
            f"the parameters of tool {tool.name!r} cannot be told from those of others: "
            "its schema must list them as 'properties' at the top, and nowhere else"
        )
    return schema.get("properties") or {}


def _is_repeated(tool: AnyTool, by_key: Mapping[str, AnyTool]) -> bool:
    return sum(other is tool for other in by_key.values()) > 1


def _shared(name: str, one: tuple[str, Any], other: tuple[str, Any]) -> Any:
    """Return the schema of a parameter that two members have."""
    (key, first), (other_key, second) = one, other
    rules, other_rules = _rules(first), _rules(second)
    if rules != other_rules:
        raise ToolDefinitionError(
            f"parallel: {key!r} and {other_key!r} both have the parameter {name!r}, but not the "
            f"same: {json.dumps(rules)} and {json.dumps(other_rules)}; rename it in one of them"
        )
    if rules is first or first.get("default") == second.get("default"):
        return first
    # Each has its own when it is left out.
    return {k: v for k, v in cast("Schema", first).items() if k != "default"}


def _rules(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    return {k: v for k, v in cast("Schema", schema).items() if k not in _REMARKS}


def _with_shared_definitions(key: str, schema: Schema, definitions: dict[str, Any]) -> Schema:
    """Move a schema's definitions to those of all; one that is not the same gets another name."""
    own: dict[str, Any] = schema.pop("$defs", {})
    names = {
        name: name if definitions.get(name, found) == found else f"{name}-{key}"
        for name, found in own.items()
    }
    for name, found in own.items():
        definitions[names[name]] = _renamed(found, names)
    return cast("Schema", _renamed(schema, names))


def _renamed(node: Any, names: Mapping[str, str]) -> Any:
    if isinstance(node, dict):
        return {k: _renamed(v, names) for k, v in cast("Schema", node).items()}
    if isinstance(node, list):
        return [_renamed(each, names) for each in cast("list[Any]", node)]
    if isinstance(node, str) and node.startswith(_REFERENCE):
        name = node.removeprefix(_REFERENCE)
        return f"{_REFERENCE}{names.get(name, name)}"
    return node
