"""What all integrations share: the calls of another framework's agent, run as ours."""

from __future__ import annotations

import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

from weakincentives.call import transaction_under_way
from weakincentives.clock import SYSTEM_CLOCK
from weakincentives.errors import WinkError
from weakincentives.events import ToolInvoked
from weakincentives.filesystem import HostFilesystem
from weakincentives.loops import run_blocking
from weakincentives.prompt.approval import ApprovalAsked
from weakincentives.prompt.policies import AnyPolicy, ReadBeforeWritePolicy
from weakincentives.prompt.tool import Tool
from weakincentives.runtime.calls import open_run
from weakincentives.runtime.registry import ToolRegistry
from weakincentives.runtime.window import read_result_tool
from weakincentives.tool_result import ToolResult

if TYPE_CHECKING:
    from weakincentives.prompt.approval import Approval
    from weakincentives.runtime.hosted import Admission, OpenCall
    from weakincentives.runtime.saved import SavedSession

T = TypeVar("T", "HostFilesystem", "SavedSession")
AnyTool = Tool[Any, Any]
AnyResult = ToolResult[Any]
Workspace = str | os.PathLike[str] | Callable[[Any], "str | os.PathLike[str]"]
"""A directory, or a function that returns one for the framework's run context."""
RunName = str | Callable[[Any], "str | None"] | None
"""The name of a run to continue, or a function that returns one for the framework's run context."""

_Place = tuple[Path, str]
"""A directory, and the name of a run there."""

_FRAMEWORKS = {
    "agents": "openai_agents",
    "claude_agent_sdk": "claude",
    "google": "google_adk",
    "langchain": "langchain",
    "langchain_core": "langchain",
    "langgraph": "langchain",
    "pydantic_ai": "pydantic_ai",
    "smolagents": "smolagents",
}
"""Our module for a framework, by the package that its tools are from."""


def adopt(tool: object, **options: Any) -> AnyTool:
    """Return a tool of another framework as one of ours: its schema, rolled back on failure.

    The options are those of ``Tool.from_schema``; say ``reach`` and ``writes`` where you know them.
    """
    if isinstance(tool, Tool):
        return cast("AnyTool", tool).replace(**options)
    for base in type(tool).__mro__:
        module = _FRAMEWORKS.get(base.__module__.partition(".")[0])
        if module is not None:
            home: Any = import_module(f"weakincentives.integrations.{module}")
            return home.adopt(tool, **options)
    raise TypeError(
        f"{tool!r} is not a tool of a framework we know; use @tool or Tool.from_schema for it"
    )


def wire_name(name: str) -> str:
    """Return a foreign tool's name in the form that our names have."""
    return re.sub(r"[^a-z0-9_-]", "_", name.lower())[:64] or "tool"


def own_tool(name: str, description: str, handler: Any, **options: Any) -> AnyTool:
    """Return one of the framework's own tools as ours, for a call whose arguments it has validated.

    Quicker than ``Tool.from_schema``, which compiles the schema: this can be made for each call.
    """
    options.setdefault("max_result_chars", None)
    return Tool(
        name=wire_name(name),
        description=description.strip() or name,
        handler=handler,
        params_type=dict,
        result_type=Any,
        strict=False,
        **options,
    )


@dataclass(frozen=True, slots=True)
class _Opened:
    """A run on a workspace."""

    registry: ToolRegistry
    mark: str
    """The short name of the run."""
    closing: ExitStack

    def id_of(self, call_id: str | None) -> str | None:
        """Return our id of a call: frameworks' ids are unique in a run, ours in the workspace."""
        return None if call_id is None else f"{self.mark}:{call_id}"


class Bridge:
    """Runs the calls of another framework's agent as ours.

    It opens the workspace and begins a run with the first call; `wink log` shows it. Close it, or
    use it in a ``with`` block, to release the workspace. Calls may come from any thread or event
    loop; those that are started together run concurrently as far as they may.

    Args:
        workspace: The directory, or a function of the framework's run context.
        tools: What the agent is offered: our tools, or the framework's; by default the file tools.
        policies: They govern every call, those of the framework's own tools included.
        title: What `wink log` shows for the run.
        run: Names the run, so that another process continues it; may be a function of the
            framework's run context. By default each bridge begins a run of its own.
        idle: Close a run so many seconds after its last call; the next one opens it again. For
            frameworks that do not tell when their agent ends. Its runs need names.
    """

    def __init__(
        self,
        workspace: Workspace = ".",
        *,
        tools: Iterable[object] | None = None,
        policies: Iterable[AnyPolicy] = (),
        title: str = "",
        run: RunName = None,
        idle: float | None = None,
    ) -> None:
        # Now: the working directory may be another one later.
        self._workspace = workspace if callable(workspace) else Path(workspace).resolve()
        self._title = title
        self._run = run
        self.policies: tuple[AnyPolicy, ...] = tuple(policies)
        if tools is None:
            from weakincentives.contrib.tools import file_tools

            self.tools: tuple[AnyTool, ...] = file_tools()
            self.policies = (ReadBeforeWritePolicy(), *self.policies)
        else:
            self.tools = tuple(adopt(tool) for tool in tools)
        if any(tool.max_result_chars for tool in self.tools):
            rest = read_result_tool()
            if all(tool.name != rest.name for tool in self.tools):
                self.tools = (*self.tools, rest)
        self._lock = threading.Lock()
        self._open: dict[_Place, _Opened] = {}
        self._users = Counter[_Place]()
        """Blocks and calls that need a run."""
        self._ending: set[_Place] = set()
        """Runs to close when nothing needs them."""
        self._closed = False
        self._idle = idle
        self._since: dict[_Place, float] = {}
        """When the last call of a run ended."""
        self._watch: threading.Thread | None = None

    # Calls. ``context`` is the framework's run context; ``call_id`` its id of the call.

    async def acall(
        self,
        tool: str | AnyTool,
        arguments: object = None,
        *,
        call_id: str | None = None,
        context: object = None,
        approval: Approval | None = None,
    ) -> AnyResult:
        """Run one call; one that is on record under its id returns its recorded answer."""
        with self._running(context) as run:
            return await run.registry.aexecute(
                tool, arguments, call_id=run.id_of(call_id), once=True, approval=approval
            )

    def call(
        self,
        tool: str | AnyTool,
        arguments: object = None,
        *,
        call_id: str | None = None,
        context: object = None,
        approval: Approval | None = None,
    ) -> AnyResult:
        """Run one call from sync code. Calls of several threads run concurrently, too."""
        return run_blocking(
            lambda: self.acall(tool, arguments, call_id=call_id, context=context, approval=approval)
        )

    async def aadmit(
        self,
        tool: str | AnyTool,
        arguments: object = None,
        *,
        call_id: str | None = None,
        context: object = None,
        approval: Approval | None = None,
    ) -> Admission:
        """Check whether a call may run: refused, needs approval, or ready."""
        with self._running(context) as run:
            return await run.registry.aadmit(
                tool, arguments, call_id=run.id_of(call_id), once=True, approval=approval
            )

    def admit(
        self,
        tool: str | AnyTool,
        arguments: object = None,
        *,
        call_id: str | None = None,
        context: object = None,
        approval: Approval | None = None,
    ) -> Admission:
        """Check from sync code whether a call may run."""
        return run_blocking(
            lambda: self.aadmit(
                tool, arguments, call_id=call_id, context=context, approval=approval
            )
        )

    async def arefuse(
        self,
        tool: str | AnyTool,
        arguments: object,
        reason: str,
        *,
        by: str = "",
        call_id: str | None = None,
        context: object = None,
    ) -> AnyResult:
        """Record that a person denied a call, and return the answer for the model."""
        with self._running(context) as run:
            return await run.registry.arefuse(
                tool, arguments, reason, by=by, call_id=run.id_of(call_id)
            )

    def refuse(
        self,
        tool: str | AnyTool,
        arguments: object,
        reason: str,
        *,
        by: str = "",
        call_id: str | None = None,
        context: object = None,
    ) -> AnyResult:
        """Record from sync code that a person denied a call."""
        return run_blocking(
            lambda: self.arefuse(tool, arguments, reason, by=by, call_id=call_id, context=context)
        )

    def has_asked(self, call_id: str, *, context: object = None) -> bool:
        """Whether one of our policies waits for an answer about a call."""
        run = self._opened(self._place(context))
        asked = run.registry.session[ApprovalAsked].newest_first()
        latest = next((each for each in asked if each.call_id == run.id_of(call_id)), None)
        return latest is not None and latest.answer is None

    def begin(
        self,
        tool: str | AnyTool,
        arguments: object = None,
        *,
        call_id: str | None = None,
        context: object = None,
        approval: Approval | None = None,
    ) -> OpenCall:
        """Return a call whose work the framework does itself: see ``OpenCall``."""
        run = self._opened(self._place(context))
        return run.registry.begin(
            tool, arguments, call_id=run.id_of(call_id), once=True, approval=approval
        )

    # The runs it has open

    def registry(self, context: object = None) -> ToolRegistry:
        """Return the tools, session and workspace of a run; opens it if need be."""
        return self._opened(self._place(context)).registry

    @contextmanager
    def held(self, context: object = None) -> Generator[None]:
        """Close the run at the end of the block, unless another such block needs it.

        For frameworks that tell when their agent begins and ends: between its runs, others can work
        on the directory, `wink undo` for example.
        """
        place = self._place(context)
        with self._used(place):
            try:
                yield
            finally:
                self._ending.add(place)

    def release(self) -> None:
        """Close all runs once no call is under way; the next call opens its run again."""
        for place in (*self._open,):
            with self._used(place):
                self._ending.add(place)

    @contextmanager
    def _running(self, context: object) -> Generator[_Opened]:
        """Keep a run open for a call."""
        place = self._place(context)
        with self._used(place):
            yield self._opened(place)

    @contextmanager
    def _used(self, place: _Place) -> Generator[None]:
        with self._lock:
            self._users[place] += 1
        try:
            yield
        finally:
            with self._lock:
                self._users[place] -= 1
                if not self._users[place]:
                    del self._users[place]
                    if place in self._ending:
                        self._close_run(place)
                    elif self._idle is not None:
                        self._since[place] = SYSTEM_CLOCK.monotonic()
                        if self._watch is None:
                            watch = threading.Thread(target=self._close_idle, args=[self._idle])
                            watch.daemon = True
                            self._watch = watch
                            watch.start()

    def _close_run(self, place: _Place) -> None:
        # With the lock held: the same run may be opened again at once.
        self._ending.discard(place)
        ended = self._open.pop(place, None)
        if ended is not None:
            ended.closing.close()

    def _close_idle(self, seconds: float) -> None:
        """Close runs as they become idle, until none is left."""
        never = threading.Event()
        pause: float | None = seconds
        while pause is not None:
            never.wait(pause)
            with self._lock:
                now = SYSTEM_CLOCK.monotonic()
                for place in [p for p, at in self._since.items() if now - at >= seconds]:
                    del self._since[place]  # one in use comes back
                    if not self._users[place]:
                        self._close_run(place)
                pause = min((at + seconds - now for at in self._since.values()), default=None)
                if pause is None:
                    self._watch = None

    def _place(self, context: object) -> _Place:
        """Return the directory and the name of the run that a run context is about."""
        under_way = transaction_under_way.get()
        if under_way is not None:
            # An agent that a tool runs: its calls are part of that tool's call.
            session = under_way.lineage[0].around.context.session
            for place, each in self._open.copy().items():
                if each.registry.session is session:
                    return place
        workspace, name = self._workspace, self._run
        root = Path(workspace(context)).resolve() if callable(workspace) else workspace
        return root, (name(context) if callable(name) else name) or ""

    def _opened(self, place: _Place) -> _Opened:
        with self._lock:
            if self._closed:
                raise WinkError("this integration is closed; make a new one")
            found = self._open.get(place)
            if found is None:
                found = self._open[place] = self._opening(*place)
            return found

    def _opening(self, root: Path, key: str) -> _Opened:
        with ExitStack() as closing:
            files = closing.enter_context(
                _shared_by(root, lambda: HostFilesystem(root, shared=True))
            )
            # A run without a name is nobody else's.
            named = (files.store, key or object())
            run = closing.enter_context(_shared_by(named, lambda: self._run_on(files, key)))
            registry = closing.enter_context(
                ToolRegistry(
                    self.tools, workspace=files, session=run.session, policies=self.policies
                )
            )
            return _Opened(registry, run.mark, closing.pop_all())

    def _run_on(self, files: HostFilesystem, key: str) -> SavedSession:
        """Begin a run, or continue the one of that name."""
        kinds = (kind for tool in self.tools for kind in (tool.params_type, tool.result_type))
        types = [kind for kind in kinds if isinstance(kind, type)]
        with ExitStack() as closing:
            run = closing.enter_context(open_run(files, self._title, key=key, types=types))
            run.recover(files)
            if len(run.session[ToolInvoked]):
                run.mark_resumed()
            closing.pop_all()
            return run

    def close(self) -> None:
        """Release the workspace and end the run; calls are refused from now on."""
        with self._lock:
            self._closed = True
            opened, self._open = self._open, {}
        with ExitStack() as all_runs:
            for each in opened.values():
                all_runs.enter_context(each.closing)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


_shared: dict[object, tuple[Any, int]] = {}
"""What several agents of this process have open, and how many."""
_sharing = threading.Lock()


@contextmanager
def _shared_by(key: object, begin: Callable[[], T]) -> Generator[T]:
    """Yield what is open under a key; the last one that uses it closes it."""
    with _sharing:
        opened, users = _shared.get(key) or (begin(), 0)
        _shared[key] = opened, users + 1
    try:
        yield opened
    finally:
        with _sharing:
            _, users = _shared.pop(key)
            if users > 1:
                _shared[key] = opened, users - 1
            else:
                opened.close()
