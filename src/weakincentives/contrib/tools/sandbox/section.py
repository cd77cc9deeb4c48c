"""``PodmanSandboxSection``: the file tools, a shell and Python, in a sandbox with limits."""

from __future__ import annotations

import json
import os
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Unpack

from pydantic import Field

from weakincentives.contrib.tools.asteval import Evaluation
from weakincentives.contrib.tools.files import FileLimits, file_tools
from weakincentives.contrib.tools.mounts import HostMount, LeftOut, left_out_text, read_mount
from weakincentives.contrib.tools.sandbox.engines import (
    INSIDE,
    Sandbox,
    SandboxChoice,
    find_sandbox,
)
from weakincentives.contrib.tools.sandbox.limits import SandboxLimits, in_words
from weakincentives.errors import SandboxUnavailable, ToolValidationError
from weakincentives.filesystem import CommandResult, Filesystem, HostFilesystem
from weakincentives.filesystem.overlay import remove_tree
from weakincentives.filesystem.protocol import DEFAULT_ROOT, split_path, split_root
from weakincentives.prompt.policies import ReadBeforeWritePolicy
from weakincentives.prompt.section import Section, SectionOptions
from weakincentives.prompt.tool import Tool, ToolContext, ToolExample
from weakincentives.prompt.tool_result import ToolError, ToolResult
from weakincentives.resources import Binding, ResourceRegistry
from weakincentives.retry import TIMEOUT

if TYPE_CHECKING:
    from weakincentives.runtime.session import Session

_GRACE = 30.0
"""Seconds that a call may take longer than its command: to start it, and to keep what it did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodmanSandboxConfig:
    """Which files commands work on, what shuts them in, and what they may use.

    Without ``workspace`` and ``filesystem`` they work on a directory of the section's own: empty,
    or filled from ``mounts`` and then from ``files``, and removed when that is closed.
    """

    workspace: str | os.PathLike[str] | None = None
    """A host directory to work on directly: every change is made there, and can be undone."""
    filesystem: HostFilesystem | None = None
    """One that you have opened, and close."""
    files: Mapping[str, str | bytes] = field(default_factory=dict[str, "str | bytes"])
    """Content by path."""
    mounts: Sequence[HostMount] = ()
    """Host directories to copy files from."""
    sandbox: SandboxChoice = "auto"
    """``"auto"`` is the first that works of podman, bubblewrap and namespaces of our own.
    ``"none"`` runs commands without any: they can do what this process can."""
    image: str | None = None
    """An image of podman's to run commands in; the host's programs, read-only, without one."""
    read_only_paths: Sequence[str | os.PathLike[str]] = ()
    """Host directories that commands can read besides the host's programs, under the same name."""
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    """What every command finds in its environment. Of this process's own it gets nothing."""
    limits: SandboxLimits = field(default_factory=SandboxLimits)
    timeout: float = 120.0
    """Seconds that a command may take when the model says nothing else."""
    max_timeout: float = 600.0
    """Seconds that the model may ask for."""
    output_limit: int = 20_000
    """Bytes of each output that the model is given; the middle of more is left out."""
    file_limits: FileLimits = field(default_factory=FileLimits)

    def __post_init__(self) -> None:
        own = bool(self.files or self.mounts)
        if sum([own, self.workspace is not None, self.filesystem is not None]) > 1:
            raise ValueError(
                "files come from a directory of the section's own (files=, mounts=), from one of "
                "yours (workspace=) or from a filesystem (filesystem=): give one of the three"
            )
        if not 0 < self.timeout <= self.max_timeout:
            raise ValueError(
                f"timeout must be positive and not above max_timeout, got {self.timeout} and "
                f"{self.max_timeout}"
            )
        if self.output_limit < 1:
            raise ValueError(f"output_limit must be positive, got {self.output_limit}")


# What a model gives and gets


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
    """What the command reads from its input."""
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
    """What a command said, and what became of its changes."""

    exit_code: int
    """128 and the signal's number for a command that was killed."""
    stdout: str = ""
    stderr: str = ""
    kept: bool = True
    """Whether what it changed in the workspace was kept."""

    def render(self) -> str:
        stderr = f"[stderr]\n{self.stderr}" if self.stderr else ""
        return "\n".join(part.rstrip("\n") for part in (self.stdout, stderr) if part)


class PodmanSandboxSection(Section[None]):
    """File tools, ``shell_execute`` and ``evaluate_python`` with their guidance and workspace.

    It takes a session as the other suites do, and keeps nothing in it.
    What a command changes is part of the call: kept when it ends with 0, else undone. The section
    says in the prompt which sandbox is used. Where none works the file tools do, and commands are
    refused. A model must read a file that exists before it writes to it with the file tools; pass
    ``policies`` to have other rules.
    """

    def __init__(
        self,
        *,
        session: Session | None = None,
        config: PodmanSandboxConfig | None = None,
        **options: Unpack[SectionOptions[None]],
    ) -> None:
        self.config = config = config or PodmanSandboxConfig()
        self.filesystem: HostFilesystem | None = config.filesystem
        """What the tools work on; None for a directory, which each prompt opens and closes."""
        self.left_out: tuple[LeftOut, ...] = ()
        """What the mounts did not bring, and why."""
        self._remove_own: Callable[[], object] = lambda: None
        if self.filesystem is None and config.workspace is None:
            self.filesystem, self.left_out = _own_workspace(config)
            self._remove_own = weakref.finalize(self, _remove, self.filesystem)
        options.setdefault("title", "Sandbox")
        options.setdefault("policies", (ReadBeforeWritePolicy(),))
        tools = (*file_tools(limits=config.file_limits), *self._command_tools())
        options["tools"] = (*tools, *options.get("tools", ()))
        bound: dict[type[Any], Any] = {Filesystem: self.filesystem or _opening(config.workspace)}
        options["resources"] = ResourceRegistry.build(bound).merge(options.get("resources") or {})
        super().__init__(**options)

    @property
    def sandbox(self) -> Sandbox:
        """What commands are run in, found when first asked for; raises SandboxUnavailable."""
        if isinstance(self._found, SandboxUnavailable):
            raise SandboxUnavailable(str(self._found))
        return self._found

    @cached_property
    def _found(self) -> Sandbox | SandboxUnavailable:
        config = self.config
        try:
            return find_sandbox(
                config.sandbox,
                limits=config.limits,
                image=config.image,
                read_only=config.read_only_paths,
            )
        except SandboxUnavailable as error:
            return error

    def close(self) -> None:
        """Remove the directory if it is the section's own; so does the end of the program."""
        self._remove_own()

    def body(self, params: None, session: Session | None) -> str:
        try:
            commands = _guidance(self.sandbox, self.config)
        except SandboxUnavailable as error:
            commands = f"Commands cannot be run: {error}"
        return "\n\n".join(filter(None, [_FILES, commands, left_out_text(self.left_out)]))

    # The tools

    def _command_tools(self) -> tuple[Tool[Any, Any], ...]:
        options: dict[str, Any] = {
            # An unconfined command reaches outside, and that cannot be undone.
            "reach": None if self.config.sandbox == "none" else "reversible",
            "writes": "command",
            "timeout": self.config.max_timeout + _GRACE,
        }
        return (
            Tool[ShellExecuteParams, CommandOutput](
                name="shell_execute",
                description="Run a command in the sandbox, on the files of the workspace. "
                "What a command that fails has changed is undone.",
                handler=self._shell_execute,
                examples=(_EXAMPLE,),
                **options,
            ),
            Tool[EvaluatePythonParams, Evaluation](
                name="evaluate_python",
                description="Run Python code in the sandbox, on the files of the workspace. "
                "What code that fails has changed is undone.",
                handler=self._evaluate_python,
                **options,
            ),
        )

    def _shell_execute(
        self, params: ShellExecuteParams, *, context: ToolContext
    ) -> ToolResult[CommandOutput]:
        done = self._run(
            self._usable(),
            params.command,
            context,
            params.timeout,
            cwd=params.cwd,
            env=params.env,
            stdin=params.stdin,
        )
        output = CommandOutput(done.returncode, done.stdout, done.stderr, done.kept)
        if done.ok:
            return ToolResult.ok(output, "The command ended with exit code 0.")
        return _failed(self._why("The command", done, params.timeout), done, output)

    def _evaluate_python(
        self, params: EvaluatePythonParams, *, context: ToolContext
    ) -> ToolResult[Evaluation]:
        sandbox = self._usable()
        mark = f"\n{os.urandom(16).hex()}:"
        most = self.config.output_limit // 4
        done = self._run(
            sandbox,
            [sandbox.python, "-c", _DRIVER],
            context,
            params.timeout,
            env={"PYTHONDONTWRITEBYTECODE": "1"},
            stdin=json.dumps({"code": params.code, "mark": mark, "most": most}),
        )
        stdout, _, value = done.stdout.partition(mark)
        if done.ok:
            return ToolResult.ok(Evaluation(value, stdout), done.stderr.strip())
        output = CommandOutput(done.returncode, done.stdout, done.stderr, done.kept).render()
        failed = _failed(self._why("The code", done, params.timeout), done, None)
        failed.message = f"{failed.message}\n{output}".rstrip()
        return failed

    def _run(
        self,
        sandbox: Sandbox,
        argv: Sequence[str] | str,
        context: ToolContext,
        timeout: float | None,
        *,
        env: Mapping[str, str],
        stdin: str,
        cwd: str = ".",
    ) -> CommandResult:
        files, config = context.filesystem, self.config
        if not isinstance(files, HostFilesystem):
            raise ToolValidationError(
                f"Commands need files in a directory, and these are in a {type(files).__name__}"
            )
        return sandbox.run(
            files,
            argv,
            cwd=cwd,
            env={**config.env, **env},
            stdin=stdin,
            timeout=self._timeout(timeout),
            output_limit=config.output_limit,
        )

    def _usable(self) -> Sandbox:
        try:
            return self.sandbox
        except SandboxUnavailable as error:
            raise ToolValidationError(str(error)) from error

    def _timeout(self, asked: float | None) -> float:
        return self.config.timeout if asked is None else min(asked, self.config.max_timeout)

    def _why(self, what: str, done: CommandResult, timeout: float | None) -> str:
        """Return what the model is told about a command whose changes are undone."""
        if done.timed_out:
            how = f"was killed: it took longer than {self._timeout(timeout):g} s"
        elif done.stopped is not None:
            how = f"was killed: {done.stopped}"
        else:
            how = f"ended with exit code {done.returncode}"
        return f"{what} {how}. Nothing that it changed was kept."


def _failed(message: str, done: CommandResult, value: Any) -> ToolResult[Any]:
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
# Runs in the sandbox: the value of the last expression is written behind a mark. The traceback of
# an error is shown without the frames of this program.


# The workspace


def _own_workspace(config: PodmanSandboxConfig) -> tuple[HostFilesystem, tuple[LeftOut, ...]]:
    """Return a new directory with what the configuration asks for."""
    place = Path(tempfile.mkdtemp(prefix="wink-"))
    root = place / "workspace"
    root.mkdir()
    left_out: list[LeftOut] = []
    for mount in config.mounts:
        files, missing = read_mount(mount, DEFAULT_ROOT)
        for file in files:
            path = _put(root, file.path, file.data)
            if file.readonly:
                path.chmod(0o444)
        left_out += missing
    for name, content in config.files.items():
        _put(root, name, content.encode() if isinstance(content, str) else content)
    return HostFilesystem(root), tuple(left_out)


def _put(root: Path, name: str, data: bytes) -> Path:
    path = root.joinpath(*split_path(name, split_root(DEFAULT_ROOT)))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)  # a mount may have brought one that is read-only
    path.write_bytes(data)
    return path


def _remove(filesystem: HostFilesystem) -> None:
    filesystem.close()
    remove_tree(filesystem.root.parent)  # whatever modes a command has left there


def _opening(workspace: str | os.PathLike[str] | None) -> Binding[Any]:
    """Return how to open the directory that is worked on directly."""
    assert workspace is not None
    directory = os.path.abspath(workspace)  # not where the process is by then

    def opened(_: object) -> Filesystem:
        return HostFilesystem(directory)

    return Binding(Filesystem, opened)


# What the model is told


def _guidance(sandbox: Sandbox, config: PodmanSandboxConfig) -> str:
    unused = [f"{name} is not used: {reason}." for name, reason in sandbox.passed_over]
    limits = sandbox.limits
    if sandbox.name == "none":
        place, network = str(config.workspace or "the directory of the workspace"), ""
    else:
        place = INSIDE
        network = (
            f"There is no network. Only {INSIDE} and /tmp can be written to, and /tmp is empty "
            "for every command. "
        )
    return _COMMANDS.format(
        sandbox=" ".join([_IN[sandbox.name].format(image=config.image), *unused]),
        place=place,
        network=network,
        memory=in_words(limits.memory),
        processes=limits.processes,
        disk=in_words(limits.disk),
        timeout=f"{config.timeout:g}",
        max_timeout=f"{config.max_timeout:g}",
    )


_IN = {
    "podman": "Commands run in a container (podman).",
    "bubblewrap": "Commands run in a sandbox (bubblewrap).",
    "namespaces": "Commands run in a sandbox (namespaces of their own).",
    "none": "Commands run without a sandbox: they can reach everything, so be careful.",
}

_FILES = """\
Read, find and change files of the workspace with the file tools. Read a file before you change \
it: writing to one that exists and was not read is refused."""

_COMMANDS = """\
Run programs with `shell_execute` and Python code with `evaluate_python`. {sandbox}

- The workspace is {place} for commands, and they start there. {network}
- A command that ends with another exit code than 0 has changed nothing: all that it did to the \
workspace is undone. To keep it all the same, let the command end with 0: `command || true`.
- When a command ends, everything that it started in the background is ended, too.
- Each command may use {memory} of memory, {processes} processes and {disk} of disk, and take \
{timeout} s; ask for up to {max_timeout} s with `timeout`."""

_EXAMPLE = ToolExample(
    description="Run the tests of one module",
    input=ShellExecuteParams(command="python3 -m unittest tests.test_parser"),
    output=CommandOutput(exit_code=0, stderr="Ran 4 tests in 0.002s\n\nOK\n"),
)
