"""Approval: a policy that asks a person before a tool runs. No answer means denied."""

from __future__ import annotations

import hashlib
import inspect
import json
import re
import shlex
from collections.abc import Awaitable, Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, cast, get_args

from weakincentives.core.logs import get_logger
from weakincentives.core.text import harmless, visible
from weakincentives.errors import (
    ApprovalNeeded,
    InvalidArguments,
    Suspended,
    ToolValidationError,
)
from weakincentives.filesystem.patterns import GlobPattern
from weakincentives.prompt import refusals
from weakincentives.prompt.context import ToolContext
from weakincentives.prompt.policies import ALLOWED, PolicyDecision, tool_names
from weakincentives.prompt.signatures import is_async
from weakincentives.prompt.tool import Reach, Tool
from weakincentives.serde import dump
from weakincentives.session.slices import SlicePolicy, slice_policy

if TYPE_CHECKING:
    pass

_logger = get_logger(__name__)


REACHES = {
    "read": "changes nothing",
    "reversible": "can be undone",
    "compensable": "reaches outside the directory, and compensates for that if it fails",
    "irreversible": "reaches outside the directory, and cannot be undone",
    "unstated": "may reach outside the directory, and is undone only as far as possible",
}
"""The reaches of tools, in words."""

_PREVIEW_SECONDS = 10.0
_CHANGED = "what it works on has changed since. Look at it again, then retry"


@dataclass(frozen=True, slots=True, kw_only=True)
class CallPreview:
    """What a call would do: returned by a tool's ``preview``, which must not change anything.

    A preview that raises ToolValidationError says that the call would fail: then nothing is asked.
    """

    diff: str = ""
    """How files would change, in ``git diff`` format."""
    in_diff: tuple[str, ...] = ()
    """The arguments that the diff shows in full."""
    facts: Mapping[str, str] = field(default_factory=dict[str, str])
    """What the call can reach, by name: ``{"network": "none"}``."""
    paths: tuple[str, ...] = ()
    """The paths that the call changes, with links followed. Rules for paths look at them."""
    command: tuple[str, ...] = ()
    """The words of a command that is nothing but words. Rules for commands look at them."""
    script: str = ""
    """The argument that is a command for a shell: it is shown as one."""
    state: str = ""
    """Differs whenever what the preview is based on differs: a digest of the files, for example."""


_NO_PREVIEW = CallPreview()


@dataclass(frozen=True, slots=True, kw_only=True)
class ApprovalRequest:
    """A call that waits for a person's approval, with everything they need to decide."""

    tool_name: str
    description: str
    arguments: Mapping[str, Any]
    reach: Reach | None
    call_id: str
    session_id: str
    preview: CallPreview = _NO_PREVIEW
    defaults: tuple[str, ...] = ()
    """The arguments that have their default value. A question can leave them out."""
    policy_name: str = ""
    """Which policy asks: a call may need several approvals."""
    revise: Callable[[Mapping[str, Any]], ApprovalRequest] | None = field(
        default=None, repr=False, compare=False
    )
    """Returns the request for other arguments; raises InvalidArguments. To show an edited call
    before it is approved."""

    @property
    def question(self) -> str:
        """The question in words."""
        return f"{self.tool_name} wants to run; it {REACHES[self.reach or 'unstated']}."

    def describe(self, most: int) -> str:
        """Return everything in plain text of at most about ``most`` characters.

        No line begins with text from a model, which could imitate the question.
        """
        preview = self.preview
        lines = [self.question]
        if preview.diff:
            text = visible(preview.diff.replace("\\", "\\\\")).rstrip("\n")
            lines += ["The change:", *(f"  | {line}" for line in text.split("\n"))]
        named = {n: v for n, v in self.arguments.items() if n not in self.defaults}
        lines += ["Arguments:"] if named else ["No arguments."]
        for name, value in named.items():
            if preview.script and name == preview.script and isinstance(value, str):
                command = visible(value.replace("\\", "\\\\")).split("\n")
                lines += [f"  | $ {command[0]}", *(f"  |   {line}" for line in command[1:])]
                continue
            shown = json.dumps(value, ensure_ascii=False, default=repr)
            shown = "in the change" if name in preview.in_diff else visible(shown)
            lines.append(f"  | {visible(json.dumps(name, ensure_ascii=False))[1:-1]}: {shown}")
        lines += ["What it can reach:"] if preview.facts else []
        lines += [f"  | {harmless(f'{name}: {text}')}" for name, text in preview.facts.items()]
        text = "\n".join(lines)
        if len(text) <= most:
            return text
        return (
            f"{text[:most]}\nNOT EVERYTHING IS SHOWN: {len(text) - most:,} characters are hidden."
        )

    @property
    def digest(self) -> str:
        """Differs whenever the tool, its description, the arguments or the preview differ."""
        tool = [self.tool_name, self.description, self.reach]
        shown = {"tool": tool, "arguments": self.arguments, "preview": asdict(self.preview)}
        return hashlib.sha256(_json(shown).encode()).hexdigest()

    def shows_the_same_as(self, other: ApprovalRequest) -> bool:
        """Whether an answer to this request is one to the other, too."""
        return self.policy_name == other.policy_name and self.digest == other.digest

    # For a prompt on a terminal: everything on one line, invisible characters escaped.
    def __str__(self) -> str:
        shown = ", ".join(f"{_name(name)}={value!r}" for name, value in self.arguments.items())
        return visible(f"{self.tool_name}({shown})")


def _name(name: str) -> str:
    return name if name.isidentifier() else repr(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class ApprovalRule:
    """Calls to approve without asking: of a tool, on some paths, or with some commands.

    >>> rules = ApprovalRule(tool="write_file", path="docs/**"), ApprovalRule(
    ...     tool="shell_execute", command=("python", "-m", "pytest")
    ... )
    """

    tool: str
    path: str = ""
    """A glob from the root, such as ``docs/**``: everything that the call changes must match.

    Not only a directory that it is in: ``*.md`` is never ``notes.md/run.py``.
    """
    command: tuple[str, ...] = ()
    """The first words of the command. A command with shell syntax is never covered."""

    def __post_init__(self) -> None:
        if not self.tool or (self.path and self.command):
            raise ValueError("a rule names a tool, and either a path or a command or neither")
        if isinstance(self.command, str):
            raise TypeError(f"command takes the words of a command, got {self.command!r}")
        if self.path:
            self._glob()  # raises for an invalid one

    def covers(self, request: ApprovalRequest) -> bool:
        """Whether a call is approved by this rule."""
        if request.tool_name != self.tool:
            return False
        preview = request.preview
        if self.path:
            glob = self._glob()
            return bool(preview.paths) and all(map(glob.covers, preview.paths))
        if self.command:
            return preview.command[: len(self.command)] == self.command
        return True

    def _glob(self) -> GlobPattern:
        path = self.path.removeprefix("/")
        return GlobPattern(f"{path}**" if path.endswith("/") else path)

    def __str__(self) -> str:
        return visible(" ".join(filter(None, (self.tool, self.path, shlex.join(self.command)))))


def plain_words(command: str) -> tuple[str, ...]:
    """Return the words of a shell command; none if it has any syntax but words and quotes."""
    if not command.isprintable() or _SHELL_SYNTAX.search(command):
        return ()
    try:
        return tuple(shlex.split(command))
    except ValueError:  # an open quote
        return ()


# Also inside quotes, where most of it means nothing: then a person is asked once more.
_SHELL_SYNTAX = re.compile(r"[;&|<>(){}$`\\!#~]")


@dataclass(frozen=True, slots=True)
class Approval:
    """A person's answer."""

    approved: bool
    by: str = ""
    reason: str = ""
    """For the model, when it was denied."""
    arguments: Mapping[str, Any] | None = None
    """Run the call with these arguments instead. All policies check them like the model's."""
    always: ApprovalRule | None = None
    """Approve such calls without asking for the rest of the session. It must cover this call."""


def answering_user() -> str:
    """Return who answers an approval by default: this user."""
    import getpass

    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "another process"


@slice_policy(SlicePolicy.LOG)
@dataclass(frozen=True, slots=True)
class StandingApproval:
    """The answer "always": it holds for the rest of the session, also after a resume."""

    policy_name: str
    rule: ApprovalRule
    by: str = ""
    reach: Reach | None = None
    """Of the tool as it was shown; the answer does not hold for another one."""


@slice_policy(SlicePolicy.LOG)
@dataclass(frozen=True, slots=True)
class ApprovalAsked:
    """A request that was handed out as ``ApprovalNeeded``, or the answer to it."""

    call_id: str
    policy_name: str
    shown: str
    """The digest of the request."""
    answer: Approval | None = None


Ask = Callable[[ApprovalRequest], "bool | Approval | Awaitable[bool | Approval]"]


@dataclass(frozen=True, kw_only=True)
class ApprovalPolicy:
    """Asks a person before a call runs. The answer is noted in the call's record.

    It covers the tools of these names and those of these reaches; without either, all tools.
    ``when`` narrows that to calls for which it is true. A late or invalid answer denies the call,
    and so does an ``ask`` that raises. An approval is for exactly the tool, the arguments and the
    files that were shown: if those change meanwhile, the call is refused.

    >>> policy = ApprovalPolicy(ask=lambda request: input(f"{request}? ") == "y",
    ...                         reaches={"irreversible"})
    """

    ask: Ask | None = None
    """Plain or async; a plain one runs in a thread, so that it may wait for a person. None suspends
    the call with ``ApprovalNeeded``: the caller asks, and makes the call again with
    ``approval=``."""
    tools: AbstractSet[str] = frozenset()
    reaches: AbstractSet[Reach | None] = frozenset()
    """None means tools without a stated reach."""
    when: Callable[[Tool[Any, Any], Any, ToolContext], bool] | None = None
    timeout: float | None = 300.0
    """Seconds to wait for the answer."""
    approved: Sequence[ApprovalRule] = ()
    """Calls that need no question."""
    name: str = "approval"
    asks_a_person: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if isinstance(self.reaches, str):
            raise TypeError("reaches must be a set of reaches, got a string")
        known = (*get_args(Reach), None)
        for reach in self.reaches:
            if reach not in known:
                raise ValueError(
                    f"unknown reach {reach!r}: the policy would never apply; "
                    f"expected one of {', '.join(map(repr, known))}"
                )
        object.__setattr__(self, "tools", tool_names("tools", self.tools))
        if self.timeout is not None and not self.timeout > 0:
            raise ValueError(f"timeout must be positive seconds, got {self.timeout!r}")

    @property
    def governs(self) -> AbstractSet[str]:
        return self.tools

    @property
    def refers_to(self) -> AbstractSet[str]:
        return frozenset(rule.tool for rule in self.approved)

    def applies_to(self, tool: Tool[Any, Any]) -> bool:
        """Whether calls of this tool may need approval."""
        if not self.tools and not self.reaches:
            return True
        return tool.name in self.tools or tool.reach in self.reaches

    async def check(
        self, tool: Tool[Any, Any], params: Any, *, context: ToolContext
    ) -> PolicyDecision:
        if not self.applies_to(tool):
            return ALLOWED
        if self.when is not None and not self.when(tool, params, context):
            return ALLOWED
        shown: list[ApprovalRequest] = []

        def request_for(params: Any) -> ApprovalRequest:
            return replace(_request(tool, params, context), policy_name=self.name, revise=revise)

        def revise(arguments: Mapping[str, Any]) -> ApprovalRequest:
            shown.append(request_for(tool.parse(arguments)))
            return shown[-1]

        try:
            request = await _in_time(tool, lambda: request_for(params))
        except ToolValidationError as error:
            return PolicyDecision.deny(str(error))  # as the call itself would say
        shown.append(request)
        standing = self._standing(request, context)
        if standing is not None:
            return PolicyDecision(allowed=True, note=standing)
        if self.ask is None or context.approval is not None:
            answer = self._from_outside(request, context)
        else:
            answer = await answer_to(self.ask, request, self.timeout)
        if answer.approved is not True:
            return _decision(request, answer)
        try:
            chosen = params if answer.arguments is None else tool.parse(answer.arguments)
            now = await _in_time(tool, lambda: request_for(chosen))
        except (InvalidArguments, ToolValidationError) as error:
            return _decision(request, replace(answer, approved=False, reason=str(error)))
        seen = next((each for each in reversed(shown) if _same(each, now)), None)
        if seen is not None and seen.preview != now.preview:
            return _decision(request, Approval(False, answer.by, _CHANGED))
        if answer.always is not None:
            if not answer.always.covers(now):
                _logger.error("the rule %s does not cover the call it was given for", answer.always)
                return _decision(request, Approval(False, reason="the answer was invalid"))
            rule = StandingApproval(self.name, answer.always, answer.by, now.reach)
            context.session[StandingApproval].append(rule)
        return _decision(request, answer, None if _same(request, now) else now.arguments)

    def _from_outside(self, request: ApprovalRequest, context: ToolContext) -> Approval:
        """Return the answer that a person gave outside the call; suspend the call without one.

        An answer is for the request that was shown last; another policy gets one of its own.
        """
        session, given, shown = context.session, context.approval, request.digest
        asked = [e for e in session[ApprovalAsked].newest_first() if e.call_id == request.call_id]
        record = session.record_of(request.call_id)
        if record is not None and not record.suspended:
            asked = []  # those were for an earlier call of this id
        mine = next((each for each in asked if each.policy_name == self.name), None)
        pending = mine if mine is not None and mine is asked[0] and mine.answer is None else None
        if given is not None and (pending is not None or not asked):
            if pending is not None and pending.shown != shown and given.approved is True:
                given = Approval(False, given.by, _CHANGED)
            session[ApprovalAsked].append(ApprovalAsked(request.call_id, self.name, shown, given))
            return given
        if mine is not None and mine.answer is not None and mine.shown == shown:
            return mine.answer
        session[ApprovalAsked].append(ApprovalAsked(request.call_id, self.name, shown))
        raise ApprovalNeeded(request)

    def _standing(self, request: ApprovalRequest, context: ToolContext) -> str | None:
        """Return the note of a rule that approves the call, or None."""
        for rule in self.approved:
            if rule.covers(request):
                return f"approved by the rule: {rule}"
        for each in context.session[StandingApproval].all():
            is_same = (each.policy_name, each.reach) == (self.name, request.reach)
            if is_same and each.rule.covers(request):
                by = f" by {each.by}" if each.by else ""
                return f"approved{by} for the session: {each.rule}"
        return None


async def answer_to(ask: Ask, request: ApprovalRequest, timeout: float | None) -> Approval:
    """Ask a person; a late or invalid answer, and an ``ask`` that raises, is a denial."""
    try:
        import asyncio  # here and below: it takes 30 ms, and most commands need no loop

        answer = await asyncio.wait_for(_asked(ask, request), timeout)
    except Exception as error:
        if isinstance(error, Suspended):  # the answer comes later
            raise
        if isinstance(error, TimeoutError) and timeout is not None:
            return Approval(False, reason=f"no answer within {timeout:g} s")
        _logger.exception("asking for approval of %s failed", request.tool_name)
        return Approval(False, reason=f"asking failed: {error!r}")
    if isinstance(answer, Approval):
        return answer
    if isinstance(answer, bool):
        return Approval(answer)
    _logger.error("an approval must be a bool or an Approval, got %r", answer)
    return Approval(False, reason="the answer was invalid")


async def _asked(ask: Ask, request: ApprovalRequest) -> object:
    from weakincentives.core.loops import in_thread

    answer = ask(request) if is_async(ask) else await in_thread(lambda: ask(request))
    return await answer if inspect.isawaitable(answer) else answer


def _request(tool: Tool[Any, Any], params: Any, context: ToolContext) -> ApprovalRequest:
    preview = _NO_PREVIEW
    if tool.preview is not None:
        try:
            preview = tool.preview(params, context=context)
            if not isinstance(cast("object", preview), CallPreview):
                raise TypeError(f"a preview must be a CallPreview, got {preview!r}")
        except ToolValidationError:
            raise
        except Exception as error:
            _logger.exception("the preview of %s failed", tool.name)
            preview = CallPreview(facts={"preview": f"failed: {error!r}"})
    arguments = cast("Mapping[str, Any]", dump(params) or {})
    return ApprovalRequest(
        tool_name=tool.name,
        description=tool.description,
        arguments=arguments,
        defaults=_defaults(tool, arguments),
        reach=tool.reach,
        call_id=context.call_id,
        session_id=context.session_id,
        preview=preview,
    )


def _defaults(tool: Tool[Any, Any], arguments: Mapping[str, Any]) -> tuple[str, ...]:
    known: dict[str, Any] = {
        name: each["default"]
        for name, each in tool.parameters.get("properties", {}).items()
        if "default" in each
    }
    if is_dataclass(tool.params_type):  # a schema does not have what a factory makes
        known |= {
            each.name: dump(each.default_factory())
            for each in fields(tool.params_type)
            if each.default_factory is not MISSING
        }
    return tuple(
        name
        for name, value in arguments.items()
        if name in known and _json({"": value}) == _json({"": known[name]})
    )


async def _in_time(tool: Tool[Any, Any], request: Callable[[], ApprovalRequest]) -> ApprovalRequest:
    """Return a request, with its preview made in a thread, for a limited time."""
    from weakincentives.core.loops import in_thread

    if tool.preview is None:
        return request()
    try:
        import asyncio

        return await asyncio.wait_for(in_thread(request), _PREVIEW_SECONDS)
    except TimeoutError:
        raise ToolValidationError(
            f"Nobody could be asked about '{tool.name}': its preview took longer than "
            f"{_PREVIEW_SECONDS:g} s"
        ) from None


def _same(one: ApprovalRequest, other: ApprovalRequest) -> bool:
    """Whether both have the same arguments. As JSON: for Python, 1 equals True."""
    return _json(one.arguments) == _json(other.arguments)


def _json(arguments: Mapping[str, Any]) -> str:
    return json.dumps(arguments, sort_keys=True, default=repr)


def _decision(
    request: ApprovalRequest, answer: Approval, edited: Mapping[str, Any] | None = None
) -> PolicyDecision:
    if answer.approved is True:
        by = f" by {answer.by}" if answer.by else ""
        because = f": {answer.reason}" if answer.reason else ""
        always = f", always: {answer.always}" if answer.always is not None else ""
        note = f"approved{by}{always}{because}"
        return PolicyDecision(allowed=True, note=note, arguments=edited)
    note = refusals.not_approved(answer.by, answer.reason)
    reason = refusals.by_person(request.tool_name, answer.by, answer.reason)
    return PolicyDecision(allowed=False, reason=reason, note=note)
