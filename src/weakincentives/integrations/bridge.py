"""What all integrations share: the calls of another framework's agent, run as ours.

A module for a framework, the host, only translates: its tools and results to ours and back, and its
way of asking a person. Opening the workspace and the run, call ids, recorded answers, covering the
host's own tools and adopting them are here.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import import_module
from inspect import isawaitable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypedDict, TypeVar, Unpack, cast

from weakincentives.contrib.databases import known_databases
from weakincentives.core.call import transaction_under_way
from weakincentives.core.clock import SYSTEM_CLOCK
from weakincentives.core.loops import run_blocking
from weakincentives.errors import ToolDefinitionError, WinkError
from weakincentives.filesystem import HostFilesystem
from weakincentives.prompt.approval import ApprovalAsked
from weakincentives.prompt.policies import (
    RUNTIME_TOOLS,
    AnyPolicy,
    ReadBeforeWritePolicy,
    attach,
    names_of,
    refuse_misspelt_tools,
    refuse_shared_names,
)
from weakincentives.prompt.section import MarkdownSection, Section
from weakincentives.prompt.tool import Reach, Tool
from weakincentives.resources import ResourceRegistry
from weakincentives.retry import TIMEOUT
from weakincentives.runtime.calls import open_run
from weakincentives.runtime.registry import ToolRegistry
from weakincentives.runtime.tool_call import step_by_hand
from weakincentives.runtime.window import read_result_tool
from weakincentives.session.events import ToolInvoked
from weakincentives.session.session import Session
from weakincentives.tool_result import ToolResult

if TYPE_CHECKING:
    from weakincentives.contrib.tools import CommandOutput, SandboxSettings
    from weakincentives.contrib.tools.sandbox.settings import SandboxChoice
    from weakincentives.prompt.approval import Approval
    from weakincentives.prompt.context import ToolContext
    from weakincentives.runtime.hosted import Admission, OpenCall
    from weakincentives.runtime.saved import SavedSession

T = TypeVar("T", "HostFilesystem", "SavedSession")
AnyTool = Tool[Any, Any]
AnyResult = ToolResult[Any]
Workspace = str | os.PathLike[str] | Callable[[Any], "str | os.PathLike[str]"]
"""A directory, or a function that returns one for the framework's run context."""
RunName = str | Callable[[Any], "str | None"] | None
"""The name of a run to continue, or a function that returns one for the framework's run context."""

MAX_SHOWN = 20_000
"""Characters of an approval request that a person is shown."""

_Place = tuple[Path | None, str]
"""A directory, if there is one, and the name of a run there."""

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


class BridgeOptions(TypedDict, total=False):
    """The options of a bridge that integrations take as well: see ``Bridge``."""

    tools: Iterable[object] | None
    policies: Iterable[AnyPolicy]
    title: str
    run: RunName
    reaches: Mapping[str, Reach] | None
    registry: ToolRegistry | None
    sections: Iterable[Section[Any]]
    resources: Mapping[type[Any], Any] | ResourceRegistry | None
    session: Session | None


class CallOptions(TypedDict, total=False):
    """What the host knows about a call."""

    call_id: str | None
    """The host's id of the call. A call that is on record under its id returns its recorded answer
    and runs nothing."""
    context: object
    """The host's run context."""
    approval: Approval | None
    """What a person has decided."""


class Closes:
    """Something to close, or to use in a ``with`` block."""

    def close(self) -> None:
        """Release the workspace for good."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# The host's tools as ours


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


def adopted(
    name: str, description: str, schema: Mapping[str, Any], handler: Any, **options: Any
) -> AnyTool:
    """Return a tool with a foreign name. Unless it only reads, a scan finds what it changes."""
    options.setdefault("writes", "api" if options.get("reach") == "read" else "external")
    return Tool.from_schema(
        wire_name(name), description.strip() or name, schema, handler, **options
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
        checked=False,
        **options,
    )


async def runs_elsewhere(params: Any, *, context: ToolContext) -> AnyResult:
    """Stand in for the handler of a tool whose calls bring their own, or that the host runs."""
    raise NotImplementedError("the host runs this tool")


_NOTHING: Any = object()


class OwnWork:
    """The work of one of the host's own tools, inside a call of ours.

    Its value or exception goes back to the host unchanged, unless the call did not run or was
    rolled back afterwards: then the host gets ``answer``.
    """

    def __init__(self, work: Callable[[Any], Any]) -> None:
        self._work = work
        self.value: Any = _NOTHING
        self.error: Exception | None = None

    async def handler(self, params: Any, *, context: ToolContext) -> AnyResult:
        """Do the work, as the handler of a tool."""
        self.value, self.error = _NOTHING, None  # a call that conflicts is run again
        try:
            value = self._work(params)
            self.value = await value if isawaitable(value) else value
        except Exception as error:
            self.error = error
            return self.failed(error)
        return self.recorded(self.value)

    def sync_handler(self, params: Any, *, context: ToolContext) -> AnyResult:
        """Do the work without an event loop: it must not await anything."""
        return step_by_hand(partial(self.handler, params, context=context))

    def failed(self, error: Exception) -> AnyResult:
        """Return what goes on record of an exception, or raise it."""
        raise error

    def recorded(self, value: Any) -> AnyResult:
        """Return what goes on record of a value; a failure rolls the call back."""
        return ToolResult.ok(str(value))

    def answer(self, result: AnyResult) -> Any:
        """Return what the host is told instead of a value."""
        return result.render()

    @property
    def has_value(self) -> bool:
        return self.value is not _NOTHING

    def outcome(self, result: AnyResult) -> Any:
        """Return what the tool returned, or raise what it raised."""
        if self.error is not None and (result.success or not self.has_value):
            raise self.error
        return self.value if self.has_value and result.success else self.answer(result)


# Our sandbox as the host's shell


def shell_tool(sandbox: SandboxChoice | SandboxSettings) -> AnyTool:
    """Return ``shell_execute``, which runs a command on the workspace in our sandbox."""
    from weakincentives.contrib.tools import PodmanSandboxConfig, PodmanSandboxSection

    # Only the tool is used: its files are those of the call.
    section = PodmanSandboxSection(config=PodmanSandboxConfig(workspace=".", sandbox=sandbox))
    return next(each for each in section.tools if each.name == "shell_execute")


def command_output(result: AnyResult) -> tuple[CommandOutput | None, bool]:
    """Return a command's output, with what became of its changes if it failed, and whether it
    timed out. There is none if the call was refused, or is on record in another process.
    """
    from weakincentives.contrib.tools import CommandOutput

    value = result.value
    timed_out = result.failure is not None and result.failure.code == TIMEOUT
    if not isinstance(value, CommandOutput):
        return None, timed_out
    said = "" if result.success else result.message
    stderr = "\n".join(part for part in (value.stderr.rstrip("\n"), said) if part)
    return CommandOutput(value.exit_code, value.stdout, stderr, value.kept), timed_out


# Runs and their calls


class _Run:
    """A run on a workspace, and what needs it."""

    registry: ToolRegistry
    """Set when it is opened, like the two below."""
    mark: str
    """The short name of the run."""
    closing: ExitStack

    def __init__(self) -> None:
        self.is_open = False
        self.users = 0
        """Blocks and calls that need it."""
        self.is_ending = False
        """Close it as soon as nothing needs it."""
        self.idle_since = 0.0

    def id_of(self, call_id: str | None) -> str | None:
        """Return our id of a call: frameworks' ids are unique in a run, ours in the workspace."""
        return None if call_id is None else f"{self.mark}:{call_id}"

    def options(self, about: CallOptions) -> dict[str, Any]:
        """Return the options of a call for the registry."""
        call_id, approval = self.id_of(about.get("call_id")), about.get("approval")
        return {"call_id": call_id, "once": True, "approval": approval}

    def close(self) -> None:
        self.is_ending = False
        if self.is_open:
            self.is_open = False
            self.closing.close()


class Bridge(Closes):
    """Runs the calls of another framework's agent as ours.

    It opens the workspace and begins a run with the first call; `wink log` shows it. Close it, or
    use it in a ``with`` block, to release the workspace. Calls may come from any thread or event
    loop; those that are started together run concurrently as far as they may.

    Args:
        workspace: The directory, or a function of the framework's run context. None for an
            application that works on no directory.
        tools: What the agent is offered: our tools, or the framework's; by default the file tools.
        policies: They govern every call, those of the framework's own tools included. A misspelt
            name of a tool that is known here is refused.
        title: What `wink log` shows for the run.
        run: Names the run, so that another process continues it; may be a function of the
            framework's run context. By default each bridge begins a run of its own.
        reaches: How far the framework's own tools reach, by name: ``{"search": "read"}``. Those
            that read run concurrently. Of the others, one at a time: a scan finds what it changes.
        registry: An application's registry, which stays its owner's to close: its tools, policies,
            resources and session, instead of all the above but ``title`` and ``reaches``.
        sections: Sections whose tools, policies and resources the agent gets.
        resources: What tools ask for.
        session: The session of all calls; with a directory each run has one of its own.
        idle: Seconds after its last call until a run is closed; the next call reopens it. For
            frameworks that do not tell when their agent ends. Its runs need names.
    """

    def __init__(
        self,
        workspace: Workspace | None = ".",
        *,
        tools: Iterable[object] | None = None,
        policies: Iterable[AnyPolicy] = (),
        title: str = "",
        run: RunName = None,
        reaches: Mapping[str, Reach] | None = None,
        idle: float | None = None,
        registry: ToolRegistry | None = None,
        sections: Iterable[Section[Any]] = (),
        resources: Mapping[type[Any], Any] | ResourceRegistry | None = None,
        session: Session | None = None,
    ) -> None:
        self._sections, self._resources, self._session = tuple(sections), resources, session
        self._registry = registry
        policies = tuple(policies)
        if registry is not None:
            if tools is not None or policies or self._sections or resources or session:
                raise TypeError(
                    "a registry has tools, policies, resources and a session: leave out the others"
                )
            workspace, tools, policies = None, registry.list(), registry.policies
        elif session is not None and workspace is not None:
            raise TypeError(
                "each run on a directory has a session of its own: give workspace=None, or leave "
                "out session"
            )
        elif tools is None and (workspace is None or self._sections):
            tools = ()
        # Now: the working directory may be another one later.
        self._workspace = (
            workspace if workspace is None or callable(workspace) else Path(workspace).resolve()
        )
        self._title = title
        self._run = run
        self.reaches: Mapping[str, Reach] = reaches or {}
        self.policies: tuple[AnyPolicy, ...] = tuple(policies)
        if tools is None:
            from weakincentives.contrib.tools import file_tools

            self.tools: tuple[AnyTool, ...] = file_tools()
            self.policies = (ReadBeforeWritePolicy(), *self.policies)
        else:
            self.tools = tuple(adopt(tool) for tool in tools)
        self._own = self.tools
        offered = self._in_sections()
        self.tools = (*self.tools, *(tool for tool in offered if tool.handler is not None))
        if any(tool.max_result_chars for tool in self.tools):
            rest = read_result_tool()
            if all(tool.name != rest.name for tool in self.tools):
                self.tools, self._own = (*self.tools, rest), (*self._own, rest)
        attached = attach(self.policies)
        known = names_of(self.tools) | RUNTIME_TOOLS | {*self.reaches}
        refuse_misspelt_tools(attached, known, ToolDefinitionError)
        refuse_shared_names(attached, ToolDefinitionError)
        # The framework may have tools of its own, which are known when they are called.
        self._attached = tuple(policy.for_any_tool() for policy in attached)
        self._lock = threading.Lock()
        self._runs: dict[_Place, _Run] = {}
        self._sessions: dict[str, Session] = {}
        """Without a directory: the sessions of the runs, by name."""
        self._closed = False
        self._idle = idle
        self._watch: threading.Thread | None = None

    def covering(
        self, name: str, description: str | None, handler: Any = runs_elsewhere, **options: Any
    ) -> AnyTool:
        """Return one of the host's own tools as ours. It may be made for each call."""
        reach = options.setdefault("reach", self.reaches.get(name))
        options.setdefault("writes", "api" if reach == "read" else "external")
        return own_tool(name, description or "", handler, **options)

    # Calls

    async def acall(
        self, tool: str | AnyTool, arguments: object = None, **about: Unpack[CallOptions]
    ) -> AnyResult:
        """Run a call, or return its recorded answer if its id is on record."""
        with self._running(about.get("context")) as run:
            return await run.registry.aexecute(tool, arguments, **run.options(about))

    def call(
        self, tool: str | AnyTool, arguments: object = None, **about: Unpack[CallOptions]
    ) -> AnyResult:
        """Run one call from sync code. Calls of several threads run concurrently, too."""
        return run_blocking(lambda: self.acall(tool, arguments, **about))

    async def aadmit(
        self, tool: str | AnyTool, arguments: object = None, **about: Unpack[CallOptions]
    ) -> Admission:
        """Check whether a call may run: refused, needs approval, or ready."""
        with self._running(about.get("context")) as run:
            return await run.registry.aadmit(tool, arguments, **run.options(about))

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

    def begin(
        self, tool: str | AnyTool, arguments: object = None, **about: Unpack[CallOptions]
    ) -> OpenCall:
        """Return a call whose work the framework does itself: see ``OpenCall``."""
        run = self._opened(self._place(about.get("context")))
        return run.registry.begin(tool, arguments, **run.options(about))

    def asked(self, context: object = None) -> list[tuple[str, Approval | None]]:
        """Return the calls that people were asked about, oldest first, and their answers."""
        asked = self.registry(context).session[ApprovalAsked].all()
        return [(each.call_id.partition(":")[2], each.answer) for each in asked]

    # The runs it has open

    def _in_sections(self) -> tuple[AnyTool, ...]:
        """Return the tools of the sections and of all below them."""
        found: list[AnyTool] = []
        left = [*self._sections]
        while left:
            section = left.pop(0)
            found += section.tools
            left = [*section.children, *left]
        return tuple(found)

    @property
    def has_directory(self) -> bool:
        """Whether it works on a directory."""
        return self._workspace is not None

    def directory(self, context: object = None) -> Path:
        """Return the directory that a run context is about."""
        workspace = self._workspace
        if workspace is None:
            raise WinkError("this integration works on no directory: give workspace=...")
        return Path(workspace(context)).resolve() if callable(workspace) else workspace

    def registry(self, context: object = None) -> ToolRegistry:
        """Return the tools, session and workspace of a run; opens it if need be."""
        return self._opened(self._place(context)).registry

    @contextmanager
    def held(self, context: object = None) -> Generator[None]:
        """Close the run at the end of the block, unless another such block needs it.

        For frameworks that tell when their agent begins and ends: between its runs, others can work
        on the directory, `wink undo` for example.
        """
        with self._used(self._place(context)) as run:
            try:
                yield
            finally:
                run.is_ending = True

    def release(self) -> None:
        """Close all runs once no call is under way; the next call opens its run again."""
        for place in (*self._runs,):
            with self._used(place) as run:
                run.is_ending = True

    @contextmanager
    def _running(self, context: object) -> Generator[_Run]:
        """Keep a run open for a call."""
        place = self._place(context)
        with self._used(place):
            yield self._opened(place)

    @contextmanager
    def _used(self, place: _Place) -> Generator[_Run]:
        with self._lock:
            run = self._runs.setdefault(place, _Run())
            run.users += 1
        try:
            yield run
        finally:
            with self._lock:  # also while it closes: the same run may be opened again at once
                run.users -= 1
                if not run.users and run.is_ending:
                    run.close()
                    self._runs.pop(place, None)
                elif not run.users and self._idle is not None:
                    run.idle_since = SYSTEM_CLOCK.monotonic()
                    if self._watch is None:
                        self._watch = threading.Thread(
                            target=self._close_idle, args=[self._idle], daemon=True
                        )
                        self._watch.start()

    def _close_idle(self, seconds: float) -> None:
        """Close runs as they become idle, until all that are left are in use."""
        never = threading.Event()
        pause: float | None = seconds
        while pause is not None:
            never.wait(pause)
            with self._lock:
                now, pause = SYSTEM_CLOCK.monotonic(), None
                for place, run in [*self._runs.items()]:
                    left = run.idle_since + seconds - now
                    if not run.users and left <= 0:
                        run.close()
                        del self._runs[place]
                    elif not run.users:
                        pause = left if pause is None else min(pause, left)
                if pause is None:
                    self._watch = None

    def _place(self, context: object) -> _Place:
        """Return the directory and the name of the run that a run context is about."""
        under_way = transaction_under_way.get()
        if under_way is not None:
            # An agent that a tool runs: its calls are part of that tool's call.
            session = under_way.lineage[0].around.context.session
            for place, run in self._runs.copy().items():
                if run.is_open and run.registry.session is session:
                    return place
        name = self._run
        directory = self.directory(context) if self.has_directory else None
        return directory, (name(context) if callable(name) else name) or ""

    def _opened(self, place: _Place) -> _Run:
        with self._lock:
            if self._closed:
                raise WinkError("this integration is closed; make a new one")
            run = self._runs.setdefault(place, _Run())
            if not run.is_open:
                self._open(run, *place)
            return run

    def _open(self, run: _Run, root: Path | None, key: str) -> None:
        if root is None:
            self._open_without_directory(run, key)
            return
        with ExitStack() as closing:
            files = closing.enter_context(
                _shared_by(root, lambda: HostFilesystem(root, shared=True))
            )
            # A run without a name is not shared.
            named = (files.store, key or object())
            saved = closing.enter_context(_shared_by(named, lambda: self._run_on(files, key)))
            run.registry = closing.enter_context(self._made(files, saved.session))
            run.mark, run.closing = saved.mark, closing.pop_all()
            run.idle_since, run.is_open = SYSTEM_CLOCK.monotonic(), True

    def _open_without_directory(self, run: _Run, key: str) -> None:
        run.closing = ExitStack()
        if self._registry is not None:
            run.registry = self._registry
        else:
            session = self._sessions.setdefault(key, self._session or Session())
            run.registry = run.closing.enter_context(self._made(None, session))
        run.mark = key or "run"
        run.idle_since, run.is_open = SYSTEM_CLOCK.monotonic(), True

    def _made(self, files: HostFilesystem | None, session: Session) -> ToolRegistry:
        """Return the tools, policies and resources of a run."""
        if not self._sections:
            return ToolRegistry(
                self._own,
                workspace=files,
                resources=self._resources,
                session=session,
                policies=self._attached,
            )
        above = MarkdownSection(
            title=self._title or "Tools", tools=self._own, children=self._sections
        )
        return ToolRegistry.from_section(
            above,
            workspace=files,  # type: ignore[arg-type]
            resources=self._resources,
            session=session,
            policies=self._attached,
        )

    def _run_on(self, files: HostFilesystem, key: str) -> SavedSession:
        """Begin a run, or continue the one of that name."""
        kinds = (kind for tool in self.tools for kind in (tool.params_type, tool.result_type))
        types = [kind for kind in kinds if isinstance(kind, type)]
        with ExitStack() as closing:
            run = closing.enter_context(open_run(files, self._title, key=key, types=types))
            run.recover(files, databases=known_databases(files.root))
            if len(run.session[ToolInvoked]):
                run.mark_resumed()
            closing.pop_all()
            return run

    def close(self) -> None:
        """Release the workspace and end the run; calls are refused from now on."""
        with self._lock:
            self._closed = True
            runs, self._runs = self._runs, {}
        with ExitStack() as all_runs:
            for run in runs.values():
                all_runs.callback(run.close)


_shared: dict[object, tuple[Any, int]] = {}
"""What several agents of this process have open, and how many."""
_sharing = threading.Lock()


@contextmanager
def _shared_by(key: object, begin: Callable[[], T]) -> Generator[T]:
    """Yield the object open under a key; the last user closes it."""
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
