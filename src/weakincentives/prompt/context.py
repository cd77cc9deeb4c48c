"""What a handler, policy or check is given: the session, resources, limits, and who calls."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar, cast, overload

from weakincentives.core.budget import BudgetTracker
from weakincentives.core.call import CancellationToken, RunContext
from weakincentives.core.deadlines import check_deadline
from weakincentives.core.logs import get_logger
from weakincentives.filesystem import Filesystem
from weakincentives.prompt.caller import NOBODY
from weakincentives.resources import Resolver, ResourceRegistry, as_resolver

if TYPE_CHECKING:
    from weakincentives.core.deadlines import Deadline, Heartbeat
    from weakincentives.prompt.approval import Approval
    from weakincentives.prompt.caller import Caller, LogLevel, Root, Sample, SampleMessage
    from weakincentives.prompt.prompt import OfferedTool, Prompt, RenderedPrompt
    from weakincentives.session.memory import MemoryManager
    from weakincentives.session.session import Session

T = TypeVar("T")

_logger = get_logger("weakincentives.tools")


class _Memory:
    """Finds ``context.memory`` on first use, so that none is built needlessly.

    In a call it is the call's view, whether the memory was given or is bound as a resource.
    """

    def __get__(self, context: ToolContext | None, owner: object = None) -> MemoryManager | None:
        if context is None:
            return None
        fields = context.__dict__
        # One for each context, also where every look makes a new one (Scope.PROTOTYPE). Of
        # another call's resources it is another call's memory.
        resources, found = fields.get("_memory_found", (None, None))
        if resources is not context.resources:
            found = self._find(context)
            fields["_memory_found"] = context.resources, found
        return found

    def __set__(self, context: ToolContext, given: MemoryManager | None) -> None:
        context.__dict__["given_memory"] = None if given is cast("Any", self) else given

    def _find(self, context: ToolContext) -> MemoryManager | None:
        given = context.given_memory
        if given is not None:
            view = getattr(context.resources, "view", None)
            return given if view is None else view(given)
        # To bind one, a program must have imported it.
        module = sys.modules.get("weakincentives.session.memory")
        return None if module is None else context.resources.find(module.MemoryManager)


# No slots: ``having`` sets all fields of a copy in one step.
@dataclass(frozen=True)
class ToolContext:
    """What a handler, policy or check may use: the session, resources, limits, and who calls.

    In a call the runtime hands out one whose session and resources are bound to that call. Tests
    build one with ``ToolContext(session=session, resources={Filesystem: fs})``.
    """

    session: Session
    prompt: Prompt[Any] | None = None
    rendered_prompt: RenderedPrompt | None = None
    adapter: object | None = None
    deadline: Deadline | None = None
    budget_tracker: BudgetTracker | None = None
    """Taken from the resources when not given."""
    resources: Resolver = cast("Resolver", None)  # noqa: RUF009  # made in __post_init__
    """An open resource context; a ResourceRegistry or a plain mapping is opened."""
    heartbeat: Heartbeat | None = None
    run_context: RunContext | None = None
    call_id: str = ""
    memory: MemoryManager | None = field(
        default=cast("MemoryManager | None", _Memory()), repr=False, compare=False
    )
    """Taken from the resources when not given; in a call, the call's own view of it."""
    config: Mapping[str, object] = field(default_factory=dict[str, object])
    """Settings for tools. In a call, ``config["tool_name"]`` is the name of the tool."""
    signal: CancellationToken = field(default_factory=CancellationToken)
    """Set when the call is abandoned."""
    degraded: tuple[str, ...] = ()
    """Failed preconditions that are not critical."""
    on_report: Callable[[str, str, float | None, float | None], object] | None = field(
        default=None, repr=False, compare=False
    )
    """Receives the progress that tools report: call id, message, done, total."""
    debug: bool = False
    """Whether a handler's exception is raised to the caller, once the call is undone."""
    caller: Caller | None = field(default=None, repr=False, compare=False)
    """Who made the call, as far as its handler can turn to them."""
    approval: Approval | None = field(default=None, init=False, repr=False, compare=False)
    """What a person has decided about this call elsewhere, before it was made."""

    if TYPE_CHECKING:
        # Says what dataclasses cannot: resources are taken in more forms than they are given.
        def __init__(
            self,
            session: Session,
            prompt: Prompt[Any] | None = None,
            rendered_prompt: RenderedPrompt | None = None,
            adapter: object | None = None,
            deadline: Deadline | None = None,
            budget_tracker: BudgetTracker | None = None,
            resources: Resolver | ResourceRegistry | Mapping[type[Any], Any] | None = None,
            heartbeat: Heartbeat | None = None,
            run_context: RunContext | None = None,
            call_id: str = "",
            memory: MemoryManager | None = None,
            config: Mapping[str, object] = ...,
            signal: CancellationToken = ...,
            degraded: tuple[str, ...] = (),
            on_report: Callable[[str, str, float | None, float | None], object] | None = None,
            debug: bool = False,
            caller: Caller | None = None,
        ) -> None: ...

    def __post_init__(self) -> None:
        resources = self.resources
        if resources is None and self.prompt is not None:  # pyright: ignore[reportUnnecessaryComparison]
            resources = self.prompt.resources
        check_deadline(self.deadline)
        object.__setattr__(self, "resources", as_resolver(resources))
        if self.budget_tracker is None:
            object.__setattr__(self, "budget_tracker", self.resources.find(BudgetTracker))

    def having(self, **fields: Any) -> ToolContext:
        """Return this context with other values for some fields.

        Unlike ``dataclasses.replace`` it looks at no other field, and so builds no memory.
        """
        changed = object.__new__(type(self))
        changed.__dict__.update(self.__dict__, **fields)
        return changed

    @property
    def given_memory(self) -> MemoryManager | None:
        """The memory that was passed in; None if it is bound as a resource, or if there is none."""
        return self.__dict__["given_memory"]

    @property
    def rendering(self) -> RenderedPrompt | None:
        """The rendering that the model was shown: its tools are those a call can name."""
        if self.rendered_prompt is not None:
            return self.rendered_prompt
        # The session's own first: the prompt may have been rendered for another one since.
        if self.prompt is None or self.session.prompt is self.prompt:
            return self.session.rendered
        return self.prompt.rendered

    @property
    def offers(self) -> Mapping[str, OfferedTool]:
        """The tools that a call in this context can name."""
        rendered = self.rendered_prompt or self.rendering
        return {} if rendered is None else rendered.offers

    @property
    def filesystem(self) -> Filesystem:
        """The Filesystem resource."""
        return self.resources.get(Filesystem)

    @property
    def session_id(self) -> str:
        return self.session.session_id

    @property
    def idempotency_key(self) -> str:
        """The same for every attempt of a call, also after a restart: for services that take one.

        It is the call's id, so ids that you choose yourself must be unique.
        """
        return self.call_id

    @property
    def loop_id(self) -> str:
        return "" if self.run_context is None else self.run_context.loop_id

    @property
    def agent_id(self) -> str:
        return "" if self.run_context is None else self.run_context.agent_id

    @property
    def trace_id(self) -> str:
        return "" if self.run_context is None else self.run_context.trace_id

    def beat(self) -> None:
        """Say that a long operation is alive."""
        if self.heartbeat is not None:
            self.heartbeat.beat()

    def report(
        self, message: str, *, done: float | None = None, total: float | None = None
    ) -> None:
        """Report the progress of a long operation to the caller, at once.

        Unlike a result it is not rolled back and not recorded. A call that has ended reports
        nothing.
        """
        if self.signal.cancelled:
            return
        if self.on_report is not None:
            self.on_report(self.call_id, message, done, total)
        self.beat()

    def log(self, message: object, *, level: LogLevel = "info") -> None:
        """Log something for the caller, at once; where there is none, for the program.

        Unlike a result it is not rolled back and not recorded, and a model does not see it.
        """
        if self.signal.cancelled:
            return
        if self.caller is None:
            _logger.log(_LEVELS[level], "%s", message)
        else:
            self.caller.log(level, message, str(self.config.get("tool_name") or ""))

    @overload
    async def ask(self, question: str, form: type[T], *, key: str = "") -> T: ...
    @overload
    async def ask(
        self, question: str, form: Mapping[str, Any], *, key: str = ""
    ) -> Mapping[str, Any]: ...
    async def ask(
        self, question: str, form: type[Any] | Mapping[str, Any], *, key: str = ""
    ) -> Any:
        """Ask the caller's user to fill in a form, and return it filled in.

        A caller may have to make the call again with the answer: then it is rolled back, and runs
        from its start, where the same question has its answer at once.

        Args:
            form: A dataclass of texts, numbers, booleans and choices (``Literal``), or a schema.
            key: What an MCP client calls the question.

        Raises:
            NotAnswered: The user declined, or there is no one to ask.
        """
        from weakincentives.prompt.forms import read_form, schema_of_form

        answer = await (self.caller or NOBODY).ask(question, schema_of_form(form), key)
        return read_form(form, answer)

    async def sample(
        self,
        messages: str | Sequence[SampleMessage],
        *,
        max_tokens: int = 1000,
        system: str = "",
        temperature: float | None = None,
        stop_sequences: Sequence[str] = (),
        key: str = "",
    ) -> Sample:
        """Let the caller's model answer; it may take another, or ask its user first."""
        from weakincentives.prompt.caller import SampleRequest

        request = SampleRequest(
            messages=(("user", messages),) if isinstance(messages, str) else tuple(messages),
            max_tokens=max_tokens,
            system=system,
            temperature=temperature,
            stop_sequences=tuple(stop_sequences),
        )
        return await (self.caller or NOBODY).sample(request, key)

    async def roots(self, *, key: str = "") -> tuple[Root, ...]:
        """Return the folders that the caller works in."""
        return await (self.caller or NOBODY).roots(key)


_LEVELS: Mapping[LogLevel, int] = {
    "debug": 10,
    "info": 20,
    "notice": 20,
    "warning": 30,
    "error": 40,
    "critical": 50,
    "alert": 50,
    "emergency": 50,
}
