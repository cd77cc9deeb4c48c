"""``PodmanSandboxSection``: file tools, a shell and Python, in a sandbox with limits."""

from __future__ import annotations

import json
import os
import tempfile
import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, Unpack

from pydantic import Field

from weakincentives.contrib.tools.asteval import Evaluation
from weakincentives.contrib.tools.file_values import FileLimits, check_positive
from weakincentives.contrib.tools.files import file_tools
from weakincentives.contrib.tools.sandbox.engines import Sandbox, find_sandbox
from weakincentives.contrib.tools.sandbox.environment import WORKSPACE, ProjectEnvironment
from weakincentives.contrib.tools.sandbox.limits import SandboxLimits, binary_size
from weakincentives.contrib.tools.sandbox.settings import SandboxChoice, SandboxSettings
from weakincentives.contrib.tools.suite import (
    MountedFile,
    WorkspaceConfig,
    WorkspaceSection,
    suite_tool,
)
from weakincentives.errors import SandboxUnavailable, ToolValidationError
from weakincentives.filesystem import CommandResult, HostFilesystem
from weakincentives.filesystem.overlay import remove_tree
from weakincentives.prompt.approval import CallPreview, plain_words
from weakincentives.prompt.policies import ReadBeforeWritePolicy
from weakincentives.prompt.section import SectionOptions
from weakincentives.prompt.tool import Tool, ToolContext, ToolExample
from weakincentives.retry import TIMEOUT
from weakincentives.tool_result import ToolError, ToolResult

if TYPE_CHECKING:
    from weakincentives.session.session import Session

_GRACE = 30.0
"""Seconds that a call may take besides its command: to start it, and to commit its changes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodmanSandboxConfig(WorkspaceConfig):
    """Which files commands work on, what confines them, and what they may use.

    Without ``workspace`` and ``filesystem`` they work on a directory of the section's own: empty,
    or filled from ``mounts`` and then from ``files``, and removed when that is closed.
    """

    filesystem: HostFilesystem | None = None
    """A filesystem that you have opened, and close."""
    sandbox: SandboxChoice | SandboxSettings = "auto"
    """All settings of the sandbox; or its name, and the settings that follow here."""
    image: str | None = None
    read_only_paths: Sequence[str | os.PathLike[str]] = ()
    """More host directories that commands can read, at the same path."""
    network: Sequence[str] = ()
    """Hosts that commands can reach through a filtering proxy: ``name``, ``*.name`` or an address,
    each with an optional ``:port``. None by default."""
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    """Variables of every command. Those of this process are not passed on."""
    limits: SandboxLimits = field(default_factory=SandboxLimits)
    timeout: float = 120.0
    max_timeout: float = 600.0
    output_limit: int = 20_000
    """Bytes of stdout and of stderr that the model gets; the middle of more is left out."""
    file_limits: FileLimits = field(default_factory=FileLimits)

    def __post_init__(self) -> None:
        WorkspaceConfig.__post_init__(self)
        if not 0 < self.timeout <= self.max_timeout:
            raise ValueError(
                f"timeout must be positive and not above max_timeout, got {self.timeout} and "
                f"{self.max_timeout}"
            )
        check_positive(self)
        if self.settings is not self.sandbox:  # which checks the others
            return
        for each in fields(self):
            default = each.default if each.default_factory is MISSING else each.default_factory()
            if each.name in _SETTINGS and getattr(self, each.name) != default:
                raise ValueError(f"{each.name} is a part of SandboxSettings: give it there")

    @property
    def settings(self) -> SandboxSettings:
        """All settings of the sandbox."""
        if isinstance(self.sandbox, SandboxSettings):
            return self.sandbox
        return SandboxSettings(
            engine=self.sandbox,
            image=self.image,
            read=tuple(os.path.abspath(each) for each in self.read_only_paths),
            env=tuple(f"{name}={value}" for name, value in self.env.items()),
            network=tuple(self.network),
            limits=self.limits,
            timeout=self.timeout,
            max_timeout=self.max_timeout,
        )


_SETTINGS = ("image", "read_only_paths", "network", "env", "limits", "timeout", "max_timeout")


# Parameters and results


Seconds = Annotated[float, Field(gt=0)]


@dataclass(frozen=True, slots=True)
class ShellExecuteParams:
    command: str | tuple[str, ...]
    """A command for the shell, or a program and its arguments as a list."""
    cwd: str = "."
    """Directory to start in."""
    env: dict[str, str] = field(default_factory=dict[str, str])
    """Environment variables to add."""
    stdin: str = ""
    """Input of the command."""
    timeout: Seconds | None = None
    """Seconds after which it is killed."""


@dataclass(frozen=True, slots=True)
class EvaluatePythonParams:
    code: str
    """Python code. The value of its last expression is the result."""
    timeout: Seconds | None = None
    """Seconds after which it is killed."""


@dataclass(frozen=True, slots=True)
class CommandOutput:
    """The output of a command, and whether its changes were committed."""

    exit_code: int
    """128 plus the number of the signal for a killed command."""
    stdout: str = ""
    stderr: str = ""
    kept: bool = True
    """Whether its changes to the workspace were committed."""

    @classmethod
    def of(cls, done: CommandResult) -> CommandOutput:
        return cls(done.returncode, done.stdout, done.stderr, done.kept)

    def render(self) -> str:
        stderr = f"[stderr]\n{self.stderr}" if self.stderr else ""
        return "\n".join(part.rstrip("\n") for part in (self.stdout, stderr) if part)


_Params: TypeAlias = ShellExecuteParams | EvaluatePythonParams


class PodmanSandboxSection(WorkspaceSection):
    """File tools, ``shell_execute`` and ``evaluate_python`` with their guidance and workspace.

    It takes a session as the other suites do, and stores nothing in it. The changes of a command
    are part of the call: committed when it exits with 0, else undone. The section says in the
    prompt which sandbox is used. Where none works the file tools do, and commands are refused. A
    model must read an existing file before it writes to it with the file tools; pass ``policies``
    to have other rules.
    """

    def __init__(
        self,
        *,
        session: Session | None = None,
        config: PodmanSandboxConfig | None = None,
        **options: Unpack[SectionOptions[None]],
    ) -> None:
        self.config = config = config or PodmanSandboxConfig()
        self._settings = config.settings
        # The path of a directory of its own tells nothing, and changes with every run.
        self._is_own = config.workspace is None and config.filesystem is None
        self._directory = Path(os.path.realpath(config.workspace or "."))
        self.close: Callable[[], object] = lambda: None
        """Remove the directory if it is the section's own; so does the end of the program."""
        options.setdefault("title", "Sandbox")
        options.setdefault("policies", (ReadBeforeWritePolicy(),))
        tools = (*file_tools(limits=config.file_limits), *self._command_tools())
        super().__init__(config, tools, self._own_workspace, **options)

    def _own_workspace(self, files: Mapping[str, MountedFile]) -> HostFilesystem:
        root = Path(tempfile.mkdtemp(prefix="wink-"), "workspace")
        root.mkdir()
        for file in files.values():
            path = root / file.path
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(file.data)
            if file.readonly:
                path.chmod(0o444)
        filesystem = HostFilesystem(root)
        self.close = weakref.finalize(self, _remove, filesystem)
        return filesystem

    @property
    def sandbox(self) -> Sandbox:
        """The sandbox of the commands, found on first use; raises SandboxUnavailable."""
        if isinstance(self._found, SandboxUnavailable):
            raise SandboxUnavailable(str(self._found))
        return self._found

    @cached_property
    def _found(self) -> Sandbox | SandboxUnavailable:
        try:
            return find_sandbox(self._settings)
        except SandboxUnavailable as error:
            return error

    def body(self, params: None, session: Session | None) -> str:
        try:
            commands = _guidance(self.sandbox, self._environment())
        except (SandboxUnavailable, ValueError, OSError) as error:
            commands = f"Commands cannot be run: {error}"
        return self.with_left_out(_FILES, commands)

    def _environment(self) -> ProjectEnvironment:
        files = self.filesystem
        if isinstance(files, HostFilesystem):
            found = self.sandbox.environment(files.root, files.store)
        else:
            found = self.sandbox.environment(self._directory)
        if self._is_own and self.sandbox.name != "none":
            return replace(found, places=(WORKSPACE,))
        return found

    # The tools

    def _command_tools(self) -> Iterator[Tool[Any, Any]]:
        # A command that reaches outside cannot be undone there.
        settings = self._settings
        outside = settings.engine == "none" or settings.network != "off" or settings.write
        reach = None if outside else "reversible"
        timeout = settings.max_timeout + _GRACE
        for handler, examples in ((self._shell_execute, (_EXAMPLE,)), (self._evaluate_python, ())):
            yield suite_tool(
                handler,
                reach=reach,
                writes="command",
                timeout=timeout,
                examples=examples,
                preview=self._preview,
            )

    def _preview(self, params: _Params, *, context: ToolContext) -> CallPreview:
        """Return what a command can reach, and its words if it is nothing but words."""
        words: tuple[str, ...] = ()
        names = {each.partition("=")[0] for each in self._settings.env}
        if isinstance(params, ShellExecuteParams):
            names |= set(params.env)
            command = params.command
            # Elsewhere, or with other input, the same words may do something else.
            if params.cwd == "." and not params.env and not params.stdin:
                words = plain_words(command) if isinstance(command, str) else command
        facts = _facts(self._usable(), names, self._seconds(params))
        script = "command" if isinstance(params, ShellExecuteParams) else ""
        return CallPreview(facts=facts, command=words, script=script)

    def _shell_execute(
        self, params: ShellExecuteParams, *, context: ToolContext
    ) -> ToolResult[CommandOutput]:
        """Run a command in the sandbox, on the files of the workspace. The changes of a command
        that fails are undone.
        """
        done = self._run(
            params, params.command, context, cwd=params.cwd, env=params.env, stdin=params.stdin
        )
        output = CommandOutput.of(done)
        if done.ok:
            return ToolResult.ok(output, "The command exited with code 0.")
        return self._failed("The command", params, done, output)

    def _evaluate_python(
        self, params: EvaluatePythonParams, *, context: ToolContext
    ) -> ToolResult[Evaluation]:
        """Run Python code in the sandbox, on the files of the workspace. The changes of code that
        fails are undone.
        """
        mark = f"\n{os.urandom(16).hex()}:"
        most = self.config.output_limit // 4
        done = self._run(
            params,
            [self._usable().python, "-c", _DRIVER],
            context,
            env={"PYTHONDONTWRITEBYTECODE": "1"},
            stdin=json.dumps({"code": params.code, "mark": mark, "most": most}),
        )
        stdout, _, value = done.stdout.partition(mark)
        if done.ok:
            return ToolResult.ok(Evaluation(value, stdout), done.stderr.strip())
        failed = self._failed("The code", params, done, None)
        failed.message = f"{failed.message}\n{CommandOutput.of(done).render()}".rstrip()
        return failed

    def _run(
        self,
        params: _Params,
        argv: Sequence[str] | str,
        context: ToolContext,
        *,
        env: Mapping[str, str],
        stdin: str,
        cwd: str = ".",
    ) -> CommandResult:
        files = context.filesystem
        if not isinstance(files, HostFilesystem):
            raise ToolValidationError(
                f"Commands need a workspace in a directory, not a {type(files).__name__}"
            )
        with _reporting(context, self._seconds(params)):
            return self._usable().run(
                files,
                argv,
                cwd=cwd,
                env=env,
                stdin=stdin,
                timeout=self._seconds(params),
                output_limit=self.config.output_limit,
                real_path=not self._is_own,
            )

    def _usable(self) -> Sandbox:
        try:
            return self.sandbox
        except SandboxUnavailable as error:
            raise ToolValidationError(str(error)) from error

    def _seconds(self, params: _Params) -> float:
        return min(params.timeout or self._settings.timeout, self._settings.max_timeout)

    def _failed(
        self, what: str, params: _Params, done: CommandResult, value: CommandOutput | None
    ) -> ToolResult[Any]:
        if done.timed_out:
            how = f"was killed: it took longer than {self._seconds(params):g} s"
        elif done.stopped is not None:
            how = f"was killed: {done.stopped}"
        else:
            how = f"exited with code {done.returncode}"
        where = " to the workspace" if self._settings.write else ""
        message = f"{what} {how}. Its changes{where} were undone."
        code = TIMEOUT if done.timed_out else "COMMAND_FAILED"
        return ToolResult(message, value, success=False, failure=ToolError(code, message))


_DRIVER = """
import ast, json, sys, traceback

def run(code):
    tree, names = ast.parse(code, "<code>"), {"__name__": "__main__"}
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "<code>", "exec"), names)
    if last is not None:
        return eval(compile(ast.Expression(last.value), "<code>", "eval"), names)

request = json.load(sys.stdin)
try:
    value = run(request["code"])
except Exception as error:
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != "<code>":
        trace = trace.tb_next
    traceback.print_exception(error.with_traceback(trace))
    sys.exit(1)
shown, most = "" if value is None else repr(value), request["most"]
if len(shown) > most:
    shown = f"{shown[:most]}... ({len(shown)} characters)"
sys.stdout.write(request["mark"] + shown)
"""
# Runs in the sandbox: the value of the last expression is written after a mark. The traceback of an
# error is shown without the frames of this program.


def _remove(filesystem: HostFilesystem) -> None:
    filesystem.close()
    remove_tree(filesystem.root.parent)  # whatever modes a command has set there


# What commands can reach


def _facts(sandbox: Sandbox, names: Iterable[str], seconds: float) -> dict[str, str]:
    """Return what a command can reach, for the person who approves it."""
    settings, limits = sandbox.settings, sandbox.limits
    confined = sandbox.name != "none"
    network = "none" if settings.network == "off" else f"only {', '.join(settings.network)}"
    writes = "the workspace (undone if it fails), and an empty /tmp"
    if settings.write:
        writes = f"{writes}; never undone: {', '.join(settings.write)}"
    return {
        "sandbox": sandbox.name if confined else "none: it can do everything that you can",
        "network": network if confined else "all",
        "writes": writes if confined else "all",
        "environment": ", ".join(sorted(names)) or "no variables of yours",
        "limits": f"{seconds:g} s, {binary_size(limits.memory)} of memory, "
        f"{limits.processes} processes, {binary_size(limits.disk)} of disk",
    }


def _guidance(sandbox: Sandbox, project: ProjectEnvironment) -> str:
    settings, limits = sandbox.settings, sandbox.limits
    notes = [f"{name} is not used: {reason}." for name, reason in sandbox.passed_over]
    here, *others = project.places
    start = f"Commands start in {here}, the workspace."
    start += "".join(f" {each} is the same directory." for each in others)
    if sandbox.name != "none":
        start += f" {_network(settings.network)} Only the workspace and /tmp are writable,"
        start += " and /tmp is empty for every command."
    for each in project.writable:
        start += f" {each} is writable as well, and changes there are never undone."
    found = ", ".join(f"{each.name} ({each.source})" for each in project.toolchains)
    return _COMMANDS.format(
        sandbox=" ".join([sandbox.engine.told, *notes]),
        start=start,
        tools=f"\n- The project's own tools are in PATH: {found}." if found else "",
        memory=binary_size(limits.memory),
        processes=limits.processes,
        disk=binary_size(limits.disk),
        timeout=f"{min(settings.timeout, settings.max_timeout):g}",
        max_timeout=f"{settings.max_timeout:g}",
    )


def _network(hosts: Sequence[str]) -> str:
    if hosts == "off":
        return "There is no network."
    return (
        f"Of the network, only {', '.join(hosts)} can be reached, through the proxy that the usual "
        "variables name (https_proxy)."
    )


_FILES = """\
Read, find and change files of the workspace with the file tools. Read a file before you change \
it: writing to an existing file that was not read is refused."""

_COMMANDS = """\
Run programs with `shell_execute` and Python code with `evaluate_python`. {sandbox}

- {start}{tools}
- The changes of a command that exits with a code other than 0 are undone. To commit them anyway, \
let it exit with 0: `command || true`.
- When a command ends, its background processes are killed.
- Each command may use {memory} of memory, {processes} processes, {disk} of disk and {timeout} s; \
ask for up to {max_timeout} s with `timeout`."""

_EXAMPLE = ToolExample(
    description="Run the tests of one module",
    input=ShellExecuteParams(command="python3 -m unittest tests.test_parser"),
    output=CommandOutput(exit_code=0, stderr="Ran 4 tests in 0.002s\n\nOK\n"),
)


@contextmanager
def _reporting(context: ToolContext, limit: float) -> Generator[None]:
    """Report every second how long a command has run, of the time it may take."""
    if context.on_report is None:
        yield
        return
    ended = threading.Event()

    def report() -> None:
        seconds = 0
        while not ended.wait(1.0):
            seconds += 1
            context.report(f"running for {seconds} s", done=seconds, total=limit)

    thread = threading.Thread(target=report, name="wink-command-reports", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
