"""Tools made of tools: in sequence, in parallel, or one branch of several.

A composed tool is a tool like any other, and its call is one transaction. Its members are nested
calls, each with its own checks, effects and record; the composed tool has none of its own.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from textwrap import indent
from typing import Any, cast
from weakref import WeakKeyDictionary

from weakincentives.core.call import ToolCall, call_under_way
from weakincentives.errors import ToolDefinitionError
from weakincentives.prompt.prompt import OfferedTool, RenderedPrompt
from weakincentives.prompt.signatures import is_async
from weakincentives.prompt.tool import Reach, Tool, ToolContext, Writes
from weakincentives.runtime.tool_call import (
    aexecute_tool,
    aexecute_tools,
    execute_tool,
    execute_tools,
    step_by_hand,
)
from weakincentives.serde import dump
from weakincentives.tool_result import ToolError, ToolResult

AnyTool = Tool[Any, Any]
AnyResult = ToolResult[Any]
Schema = dict[str, Any]
Transform = Callable[[Any, AnyTool], object]
"""Called with the value of a success and the next tool; returns that tool's arguments."""
Condition = Callable[[AnyResult, ToolContext], object]

_MAX_NAME = 64
# From the nearest to the farthest. Unstated may reach outside.
_REACHES: tuple[Reach | None, ...] = ("read", "reversible", None, "compensable", "irreversible")
_WRITES: tuple[Writes, ...] = ("api", "command", "external")


# What a composed call gives


@dataclass(frozen=True, slots=True)
class SequenceOutput:
    """The results of a sequence, in order; tools that were not reached are left out."""

    results: tuple[AnyResult, ...]
    kept: bool = True
    """Whether the changes of the tools that succeeded are committed."""

    def render(self) -> str:
        return "\n".join(
            _shown(f"{number}. {result.metadata.tool_name}", result, self.kept)
            for number, result in enumerate(self.results, start=1)
        )


@dataclass(frozen=True, slots=True)
class ParallelOutput:
    """The result of each tool, by its key; without a mapping, that is the tool's name."""

    results: Mapping[str, AnyResult]
    kept: bool = True
    """Whether the changes of the tools that succeeded are committed."""
    not_run: tuple[str, ...] = ()
    """The keys of tools that did not run because of ``stop_on_error``."""

    def render(self) -> str:
        lines = [_shown(f"- {key}", result, self.kept) for key, result in self.results.items()]
        return "\n".join([*lines, *(f"- {key}: not run" for key in self.not_run)])


@dataclass(frozen=True, slots=True)
class ConditionalOutput:
    """The results of the branch that matched, in order."""

    branch: int | None
    """Counted from zero; None for the fallback."""
    results: tuple[AnyResult, ...]

    @property
    def result(self) -> AnyResult:
        return self.results[-1]

    def render(self) -> str:
        # The last one's message is the composed result's own.
        return replace(self.result, message="").render()


def _shown(label: str, result: AnyResult, kept: bool) -> str:
    if not result.success:
        state = "failed" if result.failure is None else f"failed ({result.failure.code})"
    else:
        state = "done" if kept else "done, then rolled back as far as possible"
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

    It takes the first one's parameters; each later one gets those of these arguments that its own
    parameters name, or what ``transform_output(value, next_tool)`` makes of the value before. All
    of them run, unless ``stop_on_error``. If one fails, the whole is rolled back; with
    ``keep_partial`` what succeeded is committed, and the call succeeds if anything did.
    """
    members = _members("sequence", tools)
    if transform_output is None:
        _check_arguments("sequence", members)
    else:
        _check_plain("transform_output", transform_output)

    async def work(params: Any, run: _Run) -> ToolResult[SequenceOutput]:
        results: list[AnyResult] = []
        arguments = given = params
        for number, tool in enumerate(members):
            if number:
                if transform_output is not None and results[-1].success:
                    arguments = given = transform_output(results[-1].value, tool)
                else:
                    given = _named_by(tool, arguments)
            results.append(await run.call(tool, given, number))
            if stop_on_error and not results[-1].success:
                break

        def output(kept: bool) -> SequenceOutput:
            return SequenceOutput(tuple(results), kept)

        return _answer(results, len(members), output, stop_on_error, keep_partial)

    return _composed(
        f"sequence:{'→'.join(map(_title, members))}",
        members,
        work,
        name=name or _cut("-".join(["sequence", *(tool.name for tool in members)])),
        description=description or f"Sequential execution of {len(members)} tools",
        result_type=SequenceOutput,
        longest=_total(members),
        **_parameters_of(members[0]),
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
    """Return a tool that runs tools concurrently, as far as they may.

    The rules are those for the calls of one turn (see ``execute_tools``): the outcome is that of
    running one after the other. Each gets those of the arguments that its parameters name. With a
    mapping, results come under its keys; a tool that is in it twice takes its arguments under its
    key. ``stop_on_error`` starts no more once one has failed. If one fails, the whole is rolled
    back; with ``keep_partial`` what succeeded is committed, and the call succeeds if anything did.
    A ``timeout`` rolls back the whole in any case.
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
        name=name or _cut("-".join(["parallel", *(tool.name for tool in members)])),
        description=description or f"Parallel execution of {len(members)} tools",
        result_type=ParallelOutput,
        params_type=dict,
        input_schema=_union_of(by_key),
        timeout=timeout,
        longest=_longest(by_key, max_concurrency),
    )


def _settled(result: AnyResult) -> AnyResult:
    """Return a member's result; one that raised failed to execute, as the Protocol says."""
    failure = result.failure
    if failure is None or failure.code != "INTERNAL_ERROR":
        return result
    raised = failure.message.removeprefix("Internal error: ")
    failed = replace(failure, code="EXECUTION_FAILED", message=raised)
    return replace(result, failure=failed)


@dataclass(frozen=True, slots=True)
class ConditionalBranch:
    """Tools that run if ``condition(result, context)`` holds for the first one's result.

    A branch without tools never matches.
    """

    condition: Condition
    tools: Sequence[AnyTool]

    def __post_init__(self) -> None:
        _check_plain("condition", self.condition)
        object.__setattr__(self, "tools", _members("a branch", self.tools) if self.tools else ())


def conditional(
    branches: Sequence[ConditionalBranch],
    fallback: Sequence[AnyTool] | None = None,
    *,
    name: str | None = None,
    description: str | None = None,
) -> Tool[Any, ConditionalOutput]:
    """Return a tool that takes the first branch whose condition holds.

    A branch's first tool runs, and the condition is asked about its result, a failure included. A
    branch that does not match is rolled back before the next is tried. The result is that of the
    last tool; the first failure after the match ends the branch. Without a match and a fallback
    the call fails with ``NO_BRANCH_MATCHED``; a branch without tools is skipped. It takes the
    parameters of the first tool; each other one gets those of these arguments that its own
    parameters name.
    """
    chosen = tuple(branches)
    given = cast("tuple[object, ...]", chosen)
    if not given or not all(isinstance(each, ConditionalBranch) for each in given):
        raise ToolDefinitionError("conditional needs at least one ConditionalBranch, and only such")
    last = _members("fallback", fallback) if fallback else ()
    members = (*(tool for branch in chosen for tool in branch.tools), *last)
    named = name or f"conditional-{len(chosen)}branches"
    _check_arguments(named, members)
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
                return _noting(result, left_behind)
            found = list(result.metadata.not_undone)
            if branch.tools[0].reach in ("compensable", "irreversible"):
                first = branch.tools[0].name
                found.append(f"what '{first}' did outside the session, files and resources")
            if found:
                left_behind.append(f"{result.message}; not undone: {'; '.join(found)}")
        if not last:
            message = "No conditional branch matched and no fallback provided"
            return ToolResult.error(message, code="NO_BRANCH_MATCHED", recoverable=False)
        results = await run.chain(last, params, len(chosen))
        return _noting(_branch_result(None, results), left_behind)

    return _composed(
        f"conditional:{len(chosen)}branches",
        members,
        work,
        name=named,
        description=description or "Conditional tool execution based on runtime conditions",
        result_type=ConditionalOutput,
        longest=_longest_path([branch.tools for _, _, branch in attempts], last),
        **(_parameters_of(members[0]) if members else {"params_type": None}),
    )


class ToolComposer:
    """The three ways to compose tools, under the Protocol's name for them."""

    sequence = staticmethod(sequence)
    parallel = staticmethod(parallel)
    conditional = staticmethod(conditional)


# A branch: a call of its own, so that it can be rolled back as a whole

_NOT_MATCHED = ToolError("BRANCH_NOT_MATCHED", "The branch's condition does not hold")


def _attempt(composed: str, number: int, branch: ConditionalBranch) -> AnyTool:
    """Return a tool that runs a branch and fails if it does not match."""
    first, *others = branch.tools

    async def work(params: Any, run: _Run) -> AnyResult:
        result = await run.call(first, _named_by(first, params), 0)
        if not branch.condition(result, run.context):
            message = f"Branch {number + 1} does not match"
            return ToolResult(message, success=False, failure=_NOT_MATCHED)
        return _branch_result(number, [result, *await run.chain(others, params, 1)])

    return _composed(
        f"{composed}: branch {number + 1}",
        tuple(branch.tools),
        work,
        name=_cut(f"{composed}-branch-{number + 1}"),
        description=f"Branch {number + 1} of {composed}",
        result_type=ConditionalOutput,
        longest=_total(branch.tools),
        params_type=dict,
        input_schema={"type": "object"},
        # Only the first tool may have run when it is rolled back: the composed call reports what
        # that left behind.
        reach=None,
    )


def _branch_result(number: int | None, results: Sequence[AnyResult]) -> AnyResult:
    return replace(results[-1], value=ConditionalOutput(number, tuple(results)))


def _noting(result: AnyResult, left_behind: Iterable[str]) -> AnyResult:
    """Return a result whose message says what could not be undone of earlier branches."""
    return replace(result, message="\n".join(filter(None, (result.message, *left_behind))))


# Running members


class _Run:
    """One call of a composed tool, and how it calls its members."""

    def __init__(self, context: ToolContext, handler: object, on_loop: bool) -> None:
        self.context = context
        self._on_loop = on_loop
        self._rendered = context.rendering or RenderedPrompt("", ())
        call = call_under_way()
        self._call_id = "" if call is None else call.id
        own = None if call is None else self._rendered.offers.get(call.name)
        self._own = own if own is not None and own.tool.handler is handler else None

    async def call(
        self, tool: AnyTool, arguments: object, number: int, members: Sequence[AnyTool] = ()
    ) -> AnyResult:
        """Run one member, or a branch with its members.

        A branch was admitted with the whole, so no policy is asked about it.
        """
        offers = {each.name: self._offer(each) for each in members}
        offers[tool.name] = OfferedTool.of(tool) if members else self._offer(tool)
        call, context = self._request(tool, arguments, number), self._offering(offers)
        if not self._on_loop:
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
        if not self._on_loop:
            return execute_tools(calls, context=context, max_concurrency=max_concurrency)
        return await aexecute_tools(calls, context=context, max_concurrency=max_concurrency)

    def _request(self, tool: AnyTool, arguments: object, number: int) -> ToolCall:
        if not self._call_id:
            return ToolCall(tool.name, arguments)
        # The same id in every run of the composed call: the ledger goes by it.
        return ToolCall(tool.name, arguments, id=f"{self._call_id}.{number + 1}")

    def _offer(self, tool: AnyTool) -> OfferedTool:
        """Return a member as it is offered, or under the rules of the tool it is part of."""
        offered = self._rendered.offers.get(tool.name)
        if offered is not None and offered.tool is tool:
            return offered
        own = self._own
        return (
            OfferedTool.of(tool) if own is None else OfferedTool.of(tool, own.rules, own.listeners)
        )

    def _offering(self, more: Mapping[str, OfferedTool]) -> ToolContext:
        rendered = replace(self._rendered, offers={**self._rendered.offers, **more})
        return self.context.having(rendered_prompt=rendered)


Work = Callable[[Any, _Run], Coroutine[Any, Any, AnyResult]]


def _handler_of(work: Work, members: Sequence[AnyTool]) -> Any:
    """Return a handler; an async one if any member may have to be waited for."""
    offers = [OfferedTool.of(tool) for tool in members]
    some_run_together = sum(offer.may_run_concurrently for offer in offers) > 1
    if any(offer.needs_loop for offer in offers) or some_run_together:

        async def on_loop(params: Any, *, context: ToolContext) -> AnyResult:
            return await work(params, _Run(context, on_loop, True))

        made: Any = on_loop
    else:

        def here(params: Any, *, context: ToolContext) -> AnyResult:
            return step_by_hand(work, params, _Run(context, here, False))

        made = here
    made.composed_of = members  # whether it may run concurrently depends on all of them
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
    first_lines = [each.message.partition("\n")[0] for each in failed]
    names = [each.metadata.tool_name for each in failed]
    reasons = "; ".join(f"{name} ({line})" for name, line in zip(names, first_lines, strict=True))
    if keep_partial and done:
        return ToolResult.ok(output(True), f"{done} of {total} tools succeeded; failed: {reasons}")
    message = f"{len(failed)} of {total} tools failed: {reasons}"
    if done:
        message += "\nWhat the others changed in session and files was rolled back."
    failures = [each.failure for each in failed if each.failure is not None]
    if stop_on_error:  # as the Protocol says, the answer is the member's
        failure = failures[0]
    else:
        suggestions = tuple(dict.fromkeys(text for each in failures for text in each.suggestions))
        is_recoverable = all(each.recoverable for each in failures)
        failure = ToolError("EXECUTION_FAILED", message, is_recoverable, suggestions)
    return ToolResult(message, output(False), success=False, failure=failure)


# Defining a composed tool


def _composed(
    title: str,
    members: Sequence[AnyTool],
    work: Work,
    *,
    name: str,
    longest: float | None,
    timeout: float | None = None,
    **options: Any,
) -> AnyTool:
    handler = _handler_of(work, members)
    handler.longest = longest
    options.setdefault("reach", max((t.reach for t in members), key=_REACHES.index, default=None))
    return Tool(
        name=name,
        title=title,
        handler=handler,
        writes=cast("Writes", max((t.writes for t in members), key=_WRITES.index, default="api")),
        concurrent=True,  # as far as its members may: the offer asks them
        checked=False,
        timeout=longest if timeout is None else timeout,
        **options,
    )


# How long a composed call may take: as long as its members may, if each has a limit


def _limit(tool: AnyTool) -> float | None:
    """Return how long a member may take, with all its retries; None if it has no limit."""
    if tool.timeout is None:
        return None
    retry = tool.retry
    waits = () if retry is None else retry.delays(lambda: 1.0)
    return tool.timeout * (1 if retry is None else 1 + retry.max_retries) + sum(waits)


def _total(tools: Iterable[AnyTool]) -> float | None:
    """Return how long tools may take one after the other."""
    limits = [_limit(tool) for tool in tools]
    known = [limit for limit in limits if limit is not None]
    return sum(known) if limits and len(known) == len(limits) else None


def _longest(by_key: Mapping[str, AnyTool], max_concurrency: int | None) -> float | None:
    """Return how long the members of a parallel tool may take.

    That is the longest of them, unless they have to wait for each other.
    """
    most = max_concurrency or len(by_key)
    total = _total(by_key.values())
    if total is None:
        return None
    groups = [[by_key[key] for key in keys] for keys in _batches(by_key, None)]
    return sum(
        max(map(_within, group)) if len(group) <= most else sum(map(_within, group))
        for group in groups
    )


def _longest_path(branches: Sequence[Sequence[AnyTool]], last: Sequence[AnyTool]) -> float | None:
    """Return how long the longest way through branches may take: the first tools of those that do
    not match have run before.
    """
    if _total([tool for branch in (*branches, last) for tool in branch]) is None:
        return None
    firsts = [_within(branch[0]) for branch in branches]
    ways = [*branches, last] if last else branches
    return max(sum(firsts[:number]) + sum(map(_within, way)) for number, way in enumerate(ways))


def _within(tool: AnyTool) -> float:
    return _limit(tool) or 0.0


def _cut(name: str) -> str:
    """Return a name of at most 64 characters, still unique."""
    if len(name) <= _MAX_NAME:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return f"{name[: _MAX_NAME - 9]}-{digest}"


def _title(tool: AnyTool) -> str:
    return tool.title if hasattr(tool.handler, "composed_of") else tool.name


def _members(kind: str, tools: Iterable[AnyTool]) -> tuple[AnyTool, ...]:
    """Return the tools of a list; refuse what cannot be composed."""
    members = tuple(tools)
    if not members:
        raise ToolDefinitionError(f"{kind} needs at least one tool")
    by_name: dict[str, AnyTool] = {}
    for tool in members:
        if not isinstance(cast("object", tool), Tool) or tool.handler is None:
            raise ToolDefinitionError(f"{kind} takes tools that have a handler, got {tool!r}")
        if by_name.setdefault(tool.name, tool) is not tool:
            raise ToolDefinitionError(
                f"{kind} has two different tools called {tool.name!r}; rename one: "
                "tool.replace(name=...)"
            )
    return members


def _check_plain(what: str, function: object) -> None:
    # The coroutine of an async one would count as true.
    if not callable(function) or is_async(function):
        raise ToolDefinitionError(f"{what} must be a plain function, got {function!r}")


def _keyed(tools: Sequence[AnyTool] | Mapping[str, AnyTool]) -> dict[str, AnyTool]:
    """Return members by key: a mapping's own, or their names."""
    if isinstance(tools, Mapping):
        by_key = dict(tools)
        _members("parallel", by_key.values())
        return by_key
    members = _members("parallel", tools)
    by_key = {tool.name: tool for tool in members}
    if len(by_key) < len(members):
        raise ToolDefinitionError(
            "parallel has a tool twice; give the tools as a mapping, with a key for each"
        )
    return by_key


def _batches(by_key: Mapping[str, AnyTool], size: int | None) -> list[list[str]]:
    """Return the keys of tools that start together; all others are alone."""
    batches: list[list[str]] = []
    joins = False
    for key, tool in by_key.items():
        may_join = OfferedTool.of(tool).may_run_concurrently
        if may_join and joins and (size is None or len(batches[-1]) < size):
            batches[-1].append(key)
        else:
            batches.append([key])
        joins = may_join
    return batches


# Which of the arguments each member gets, and the schema of them all

_COMBINED = ("$ref", "allOf", "anyOf", "oneOf")
_ANNOTATIONS = ("description", "title", "default", "examples")

_parameter_names: WeakKeyDictionary[AnyTool, frozenset[str]] = WeakKeyDictionary()


def _parameters_of(tool: AnyTool) -> dict[str, Any]:
    return {
        "params_type": tool.params_type,
        "input_schema": tool.input_schema,
        "parameter_descriptions": tool.parameter_descriptions,
    }


def _properties(tool: AnyTool) -> dict[str, Any]:
    schema = tool.parameters
    if any(word in schema for word in _COMBINED):
        raise ToolDefinitionError(
            f"tool {tool.name!r} cannot be composed: its schema must list its parameters as "
            "'properties' at the top, and nowhere else"
        )
    return schema.get("properties") or {}


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


def _is_repeated(tool: AnyTool, by_key: Mapping[str, AnyTool]) -> bool:
    return sum(other is tool for other in by_key.values()) > 1


def _check_arguments(where: str, members: Sequence[AnyTool]) -> None:
    """Refuse a member that could never be called with the first one's arguments."""
    known = _properties(members[0]) if len(members) > 1 else {}
    for tool in members[1:]:
        _properties(tool)
        missing = [name for name in tool.parameters.get("required", ()) if name not in known]
        if missing:
            raise ToolDefinitionError(
                f"{where}: {tool.name!r} needs {', '.join(missing)}, which the parameters of "
                f"{members[0].name!r} do not have; "
                "rename one of them, or give a sequence transform_output=..."
            )


def _union_of(by_key: Mapping[str, AnyTool]) -> Schema:
    """Return one schema for the arguments of all members of a parallel tool."""
    properties: dict[str, Any] = {}
    required: dict[str, None] = {}
    definitions: dict[str, Any] = {}
    for key, tool in by_key.items():
        _properties(tool)
        schema = _with_shared_definitions(key, tool.parameters, definitions)
        needed: list[str] = schema.get("required", [])
        found: dict[str, Any] = schema.get("properties") or {}
        if _is_repeated(tool, by_key):
            found, needed = {key: schema}, [key] if needed else []
        for name, each in found.items():
            properties[name] = (
                _shared(key, name, properties[name], each) if name in properties else each
            )
        required.update(dict.fromkeys(needed))
    union: Schema = {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }
    return {**union, "$defs": definitions} if definitions else union


def _shared(key: str, name: str, first: Any, second: Any) -> Any:
    """Return the schema of a parameter that two members have."""
    rules, other_rules = _rules(first), _rules(second)
    if rules != other_rules:
        raise ToolDefinitionError(
            f"parallel: {key!r} and a tool before it both have the parameter {name!r}, but not "
            f"the same: {json.dumps(rules)} and {json.dumps(other_rules)}; rename it in one of them"
        )
    if rules is first or first.get("default") == second.get("default"):
        return first
    # Each uses its own default when it is left out.
    return {k: v for k, v in cast("Schema", first).items() if k != "default"}


def _rules(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    return {k: v for k, v in cast("Schema", schema).items() if k not in _ANNOTATIONS}


def _with_shared_definitions(key: str, schema: Schema, definitions: dict[str, Any]) -> Schema:
    """Move a schema's definitions to those of all, under new names where they differ."""
    own: dict[str, Any] = schema.pop("$defs", {})
    if any(definitions.get(name, found) != found for name, found in own.items()):
        suffix = f"-{key}"
        own = {f"{name}{suffix}": found for name, found in own.items()}
        text = json.dumps([schema, own])
        ending = json.dumps(suffix)[1:-1]
        text = re.sub(r'"#/\$defs/[^"/]+', lambda match: f"{match[0]}{ending}", text)
        schema, own = json.loads(text)
    definitions.update(own)
    return schema
