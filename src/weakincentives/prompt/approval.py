"""Approval: a policy that asks a person before a tool runs. No answer means denied."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, cast

from weakincentives.errors import Suspended
from weakincentives.logs import get_logger
from weakincentives.prompt.context import ToolContext
from weakincentives.prompt.policies import ALLOWED, PolicyDecision
from weakincentives.prompt.signatures import is_async
from weakincentives.prompt.tool import Reach, Tool
from weakincentives.serde import dump
from weakincentives.text import visible

if TYPE_CHECKING:
    from weakincentives.tool_result import ToolResult

_logger = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ApprovalRequest:
    """A call that waits for a person's approval."""

    tool_name: str
    description: str
    arguments: Mapping[str, Any]
    reach: Reach | None
    call_id: str
    session_id: str

    # For a prompt on a terminal: everything on one line, invisible characters escaped.
    def __str__(self) -> str:
        shown = ", ".join(f"{_name(name)}={value!r}" for name, value in self.arguments.items())
        return visible(f"{self.tool_name}({shown})")


def _name(name: str) -> str:
    return name if name.isidentifier() else repr(name)


@dataclass(frozen=True, slots=True)
class Approval:
    """A person's answer."""

    approved: bool
    by: str = ""
    reason: str = ""
    """For the model, when it was denied."""


Ask = Callable[[ApprovalRequest], "bool | Approval | Awaitable[bool | Approval]"]


@dataclass(frozen=True, kw_only=True)
class ApprovalPolicy:
    """Asks a person before a call runs. The answer is noted in the call's record.

    It covers the tools of these names and those of these reaches; without either, all tools.
    ``when`` narrows that to calls for which it is true. A late or invalid answer denies the call,
    and so does an ``ask`` that raises.

    >>> policy = ApprovalPolicy(ask=lambda request: input(f"{request}? ") == "y",
    ...                         reaches={"irreversible"})
    """

    ask: Ask
    """Plain or async; a plain one runs in a thread, so that it may wait for a person."""
    tools: AbstractSet[str] = frozenset()
    reaches: AbstractSet[Reach | None] = frozenset()
    """None means tools without a stated reach."""
    when: Callable[[Tool[Any, Any], Any, ToolContext], bool] | None = None
    timeout: float | None = 300.0
    """Seconds to wait for the answer."""
    name: str = "approval"
    asks_a_person: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if isinstance(self.tools, str) or isinstance(self.reaches, str):
            raise TypeError("tools and reaches take sets of names, got a string")
        if self.timeout is not None and not self.timeout > 0:
            raise ValueError(f"timeout must be positive seconds, got {self.timeout!r}")

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
        arguments = cast("Mapping[str, Any]", dump(params) or {})
        request = ApprovalRequest(
            tool_name=tool.name,
            description=tool.description,
            arguments=arguments,
            reach=tool.reach,
            call_id=context.call_id,
            session_id=context.session_id,
        )
        return _decision(request, await self._answer(request))

    def on_result(
        self, tool: Tool[Any, Any], params: Any, result: ToolResult[Any], *, context: ToolContext
    ) -> None:
        """Remember nothing: every call needs its own approval."""

    async def _answer(self, request: ApprovalRequest) -> Approval:
        try:
            answer = await asyncio.wait_for(self._asked(request), self.timeout)
        except TimeoutError:
            return Approval(False, reason=f"no answer within {self.timeout:g} s")
        except Exception as error:
            if isinstance(error, Suspended):  # the answer comes later
                raise
            _logger.exception("asking for approval of %s failed", request.tool_name)
            return Approval(False, reason=f"asking failed: {error!r}")
        if isinstance(answer, Approval):
            return answer
        if isinstance(answer, bool):
            return Approval(answer)
        _logger.error("an approval must be a bool or an Approval, got %r", answer)
        return Approval(False, reason="the answer was invalid")

    async def _asked(self, request: ApprovalRequest) -> object:
        from weakincentives.loops import in_thread

        if is_async(self.ask):
            answer = self.ask(request)
        else:
            answer = await in_thread(lambda: self.ask(request))
        return await answer if inspect.isawaitable(answer) else answer


def _decision(request: ApprovalRequest, answer: Approval) -> PolicyDecision:
    by = f" by {answer.by}" if answer.by else ""
    because = f": {answer.reason}" if answer.reason else ""
    if answer.approved is True:
        return PolicyDecision(allowed=True, note=f"approved{by}{because}")
    note = f"not approved{by}{because}"
    return PolicyDecision(
        allowed=False, reason=f"Call to '{request.tool_name}' was {note}", note=note
    )
