"""``evaluate_python``: expressions and small scripts over the workspace, in a process of their own.

Scripts have escaped from such interpreters before. So the protection is not the interpreter but its
process, which can open, connect, start and signal nothing, whatever runs in it.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Unpack, cast

from weakincentives.contrib.tools._asteval_child import Channel
from weakincentives.contrib.tools.file_values import check_positive
from weakincentives.contrib.tools.sandbox import byte_code
from weakincentives.contrib.tools.sandbox.seccomp import computing_program, seccomp_number
from weakincentives.core.clock import SYSTEM_CLOCK
from weakincentives.core.state import program, source_of
from weakincentives.errors import FilesystemError, MissingExtra, ParseError
from weakincentives.prompt.policies import ReadBeforeWritePolicy
from weakincentives.prompt.section import MarkdownSection, SectionOptions
from weakincentives.prompt.tool import Tool, ToolContext
from weakincentives.retry import TIMEOUT
from weakincentives.serde import parse
from weakincentives.tool_result import ToolResult

_CHILD = source_of(__file__, "_asteval_child.py")

MODULES = (
    "base64", "bisect", "calendar", "collections", "copy", "csv", "datetime", "decimal", "difflib",
    "fractions", "functools", "hashlib", "heapq", "html", "itertools", "json", "math", "operator",
    "random", "re", "statistics", "string", "textwrap", "time", "unicodedata", "zlib",
)  # fmt: skip
"""What scripts may import."""

_START_SECONDS = 60.0
"""For Python to start, also on a busy machine."""

_LOOK_SECONDS = 0.05
"""How often to check whether the call was cancelled."""

_TEMPLATE = """
Use `{tool}` to compute, and to {purpose} many files at once. It runs a subset of
Python: no classes, `yield`, decorators, `global`, `*` before a value or `str.format`; functions,
comprehensions, f-strings, `with` and `try` work. The last expression is the value. Variables are
not shared between calls.

- Files of the workspace: `read_file(path)`, `write_file(path, content)`, `open(path, mode)`,
  `list_directory(path)` gives `(path, kind, size)`, `glob_files("**/*.py")`, `file_exists(path)`,
  `delete_file(path)`. There are no other files, no network and no programs.
- `import` works for: {modules}.
- {writing}
- It may take {timeout:g} seconds.
"""

_WRITING = "The changes of a script that fails are undone."
_READING = "Files cannot be changed: writing and deleting are refused."


@dataclass(frozen=True, slots=True, kw_only=True)
class AstevalConfig:
    """What a script may use, and how much."""

    timeout: float = 10.0
    """Seconds; then it is killed."""
    memory_bytes: int = 512 << 20
    output_limit: int = 20_000
    """Characters of its output, and of its value, that the model gets."""
    file_bytes: int = 16 << 20
    """Total bytes of files that it may read, and that it may write."""
    file_operations: int = 10_000
    numpy: bool = False
    """Offer numpy, which must be installed; scripts then start more slowly."""
    read_only: bool = False
    """Scripts cannot change files."""
    tool_name: str = "evaluate_python"
    """Use another name with a ``PodmanSandboxSection``, which has a tool of this name."""
    isolation: Literal["seccomp", "none"] = "seccomp"
    """``"none"`` relies on limits and the interpreter's own rules, which have known holes."""

    def __post_init__(self) -> None:
        check_positive(self)
        if self.isolation not in ("seccomp", "none"):
            raise ValueError(f"isolation must be 'seccomp' or 'none', got {self.isolation!r}")

    @property
    def modules(self) -> frozenset[str]:
        """What scripts may import."""
        numpy = frozenset({"numpy"} if self.numpy else ())
        # Modules bypass the rules of the interpreter, the only ones without isolation.
        return numpy | frozenset(MODULES if self.isolation == "seccomp" else ())


@dataclass(frozen=True, slots=True)
class AstevalParams:
    code: str
    """An expression or a small script. The value of its last expression is the result."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The result of a script."""

    value: str
    """The ``repr`` of the last expression's value; empty for None."""
    stdout: str = ""

    def render(self) -> str:
        parts = (self.stdout.rstrip("\n"), f"=> {self.value}" if self.value else "")
        return "\n".join(part for part in parts if part)


class AstevalSection(MarkdownSection[Any]):
    """The tool ``evaluate_python`` with its guidance. Needs the extra ``asteval``, and a
    :class:`~weakincentives.filesystem.Filesystem` among the resources.
    """

    def __init__(
        self, *, config: AstevalConfig | None = None, **options: Unpack[SectionOptions[Any]]
    ) -> None:
        self.config = config = config or AstevalConfig()
        packages = ("asteval", "numpy") if config.numpy else ("asteval",)
        tool = _tool(config, [_library_path(each) for each in packages])
        options.setdefault("title", "Python evaluation")
        options["tools"] = (tool, *options.get("tools", ()))
        template = _TEMPLATE.format(
            tool=config.tool_name,
            purpose="read" if config.read_only else "read or change",
            writing=_READING if config.read_only else _WRITING,
            modules=", ".join(sorted(config.modules)) or "nothing",
            timeout=config.timeout,
        )
        super().__init__(template=template, **options)


def _library_path(package: str) -> str:
    """Return where a package is: the process of a script finds no other packages."""
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise MissingExtra("asteval", package)
    return str(Path(spec.origin).parents[1])


def _tool(config: AstevalConfig, path: list[str]) -> Tool[AstevalParams, Evaluation]:
    def evaluate(params: AstevalParams, *, context: ToolContext) -> ToolResult[Evaluation]:
        try:
            outcome = _run(params.code, config, path, context)
        except _Stopped as ended:
            return ToolResult.error(str(ended), code=ended.code, recoverable=ended.recoverable)
        return outcome.result(params.code, config.output_limit)

    return Tool[AstevalParams, Evaluation](
        name=config.tool_name,
        description="Evaluate a Python expression or a small script over the workspace.",
        handler=evaluate,
        reach="read" if config.read_only else "reversible",
        concurrent=True,
    )


class _Stopped(Exception):
    """The script was stopped before it finished."""

    def __init__(self, message: str, *, code: str, recoverable: bool = True) -> None:
        super().__init__(message)
        self.code = code
        self.recoverable = recoverable


def _malformed() -> _Stopped:
    # Only a script that controls the interpreter gets here.
    return _Stopped("The script broke the interpreter and was stopped", code="SCRIPT_ENDED")


def _refusal(reason: str) -> _Stopped:
    return _Stopped(
        f"Python cannot be evaluated here: {reason}, so scripts cannot be confined. "
        "AstevalConfig(isolation='none') allows it on POSIX systems",
        code="NO_ISOLATION",
        recoverable=False,
    )


# The process


def _run(code: str, config: AstevalConfig, path: list[str], context: ToolContext) -> _Outcome:
    """Evaluate a script in a process of its own, which is killed afterwards."""
    argv = program(byte_code(_CHILD), json.dumps(_options(code, config, path)))
    deadline = context.deadline
    seconds = config.timeout if deadline is None else min(config.timeout, deadline.remaining())
    bridge = _Bridge(context, config)
    # Up to twelve bytes per character, in the output, the value and the error.
    largest = 36 * config.output_limit + (1 << 16)
    with _process(argv) as (process, ours):
        channel = _Channel(ours, lambda: context.signal.cancelled, largest)
        _start(process, channel)
        try:
            channel.limit(seconds)
            channel.send({"code": code})
            while "operation" in (message := channel.receive()):
                bridge.answer(message, channel)
            return _Outcome.of(message)
        except TimeoutError:
            raise _Stopped(
                f"The script took longer than {seconds:g} s and was stopped. Do less at once",
                code=TIMEOUT,
            ) from None
        except ConnectionError:
            ended = _end(process)
            why = f"signal {-ended}" if ended < 0 else f"exit code {ended}"
            raise _Stopped(
                f"The script broke the interpreter ({why}). It may use too much memory or CPU "
                "time, or recurse too deeply",
                code="SCRIPT_ENDED",
            ) from None


def _options(code: str, config: AstevalConfig, path: list[str]) -> dict[str, object]:
    """Return the options of the process; raise where scripts cannot be confined."""
    seccomp = None
    if config.isolation == "seccomp":
        if sys.platform != "linux":
            raise _refusal(f"there is no seccomp on {sys.platform}")
        rules = computing_program()
        if rules is None:
            raise _refusal(f"the system calls of {os.uname().machine} are not known")
        seccomp = seccomp_number(), rules.hex()
    if os.name != "posix":
        raise _refusal("there are no limits on processes")
    return {
        "memory": config.memory_bytes,
        # Wall time stops a script first, unless our process has ended.
        "cpu": int(config.timeout) + 2,
        "path": path,
        # Only those that are named: loading all takes as long as starting Python.
        "modules": sorted(config.modules.intersection(re.findall(r"\w+", code))),
        "numpy": config.numpy,
        "output": config.output_limit,
        "seccomp": seccomp,
    }


@contextmanager
def _process(argv: Sequence[str]) -> Generator[tuple[subprocess.Popen[bytes], socket.socket]]:
    """Give a process and a socket to it; it is killed at the end."""
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            process = subprocess.Popen(
                argv,
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                # More threads of numpy would only compete for the CPU time of the limit.
                env={"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
        try:
            yield process, ours
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> int:
    if process.returncode is None:  # its process id is still its own
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


def _start(process: subprocess.Popen[bytes], channel: _Channel) -> None:
    """Wait until the process has dropped its rights; raise if it could not."""
    channel.limit(_START_SECONDS)
    try:
        hello = channel.receive()
    except (ConnectionError, TimeoutError):
        hello: dict[str, object] = {"failed": f"it ended with {_end(process)}"}
    if "refused" in hello:
        raise _refusal(str(hello["refused"]))
    if "failed" in hello:
        raise _Stopped(
            f"The process of the script cannot be started: {hello['failed']}",
            code="NOT_STARTED",
            recoverable=False,
        )


class _Channel(Channel):
    """Our end of the channel: messages of the process are limited in time and size."""

    def __init__(self, ours: socket.socket, stopped: Callable[[], bool], largest: int) -> None:
        super().__init__(partial(self._waiting, ours.recv), partial(self._waiting, ours.send))
        self._socket = ours
        self._stopped = stopped
        self._largest = largest
        self._until = 0.0

    def limit(self, seconds: float) -> None:
        """Raise TimeoutError when this time has passed from now."""
        self._socket.settimeout(_LOOK_SECONDS)
        self._until = SYSTEM_CLOCK.monotonic() + seconds

    def receive(self) -> dict[str, object]:
        try:
            message: object = json.loads(self.receive_bytes(self._largest))
        except (ValueError, OverflowError, RecursionError):
            raise _malformed() from None
        if not isinstance(message, dict):
            raise _malformed()
        return cast("dict[str, object]", message)

    def _waiting(self, operation: Callable[[Any], Any], argument: object) -> Any:
        while True:
            if self._stopped():
                raise _Stopped("The call was cancelled", code="CANCELLED")
            if SYSTEM_CLOCK.monotonic() >= self._until:
                # A message that came in time counts, even if we are late.
                self._socket.setblocking(False)
            try:
                return operation(argument)
            except BlockingIOError:
                raise TimeoutError from None
            except TimeoutError:
                pass  # the process may neither read nor write until the time is up


# The files


class _Bridge:
    """Serves the file requests of a script, through the view of the call."""

    def __init__(self, context: ToolContext, config: AstevalConfig) -> None:
        self._context = context
        self._files = context.filesystem
        self._rules = _file_rules(context)
        self._limit = config.file_bytes
        self._left = {"read": config.file_bytes, "write": config.file_bytes}
        self._operations_left = config.file_operations
        self._operations: dict[str, Callable[..., object]] = {
            "read": self._read,
            "write": self._write,
            "list": self._list,
            "glob": self._files.glob,
            "exists": self._files.exists,
            "delete": self._files.delete,
        }

    def answer(self, message: dict[str, object], channel: _Channel) -> None:
        """Answer a request; raise if it is malformed."""
        self._operations_left -= 1
        if self._operations_left < 0:
            raise _Stopped(
                "The script made too many file operations and was stopped", code="LIMIT_EXCEEDED"
            )
        operation, path = str(message.get("operation")), message.get("argument")
        if operation not in self._operations or not isinstance(path, str):
            raise _malformed()
        content = [self._content(path, channel)] if operation == "write" else []
        try:
            value = self._operations[operation](path, *content)
        except FilesystemError as error:
            channel.send({"error": str(error), "kind": _builtin_kind(error)})
            return
        if isinstance(value, bytes):
            channel.send({})
            channel.send_bytes(value)
        else:
            channel.send({"value": value})

    def _content(self, path: str, channel: _Channel) -> bytes:
        try:
            return channel.receive_bytes(self._limit)
        except OverflowError:
            raise _Stopped(
                f"The script was stopped: it may write {self._limit} bytes, and {path} is larger",
                code="LIMIT_EXCEEDED",
            ) from None

    def _read(self, path: str) -> bytes:
        self._use("read", self._files.stat(path).size, path)
        content = self._files.read_bytes(path)
        self._note(path)
        return content

    def _write(self, path: str, content: bytes) -> None:
        self._use("write", len(content), path)
        for policy, tool in self._rules:
            decision = policy.check(tool, {policy.path_field: path}, context=self._context)
            if not decision.allowed:
                raise FilesystemError(decision.reason)
        self._files.write_bytes(path, content)
        self._note(path)

    def _list(self, path: str) -> list[tuple[str, str, int]]:
        return [(entry.path, entry.kind, entry.size) for entry in self._files.list(path)]

    def _use(self, what: str, size: int, path: str) -> None:
        if size > self._left[what]:
            raise FilesystemError(
                f"Cannot {what} {path}: it has {size} bytes, and the script may {what} "
                f"{self._left[what]} more"
            )
        self._left[what] -= size

    def _note(self, path: str) -> None:
        """Tell the policies that the agent knows a file."""
        for policy, tool in self._rules:
            policy.on_result(
                tool, {policy.path_field: path}, ToolResult.ok(), context=self._context
            )


def _file_rules(context: ToolContext) -> list[tuple[ReadBeforeWritePolicy, Tool[Any, Any]]]:
    """Return the policies on unread files, each with a tool it governs: they hold for scripts."""
    rendering = context.rendering
    found: dict[int, tuple[ReadBeforeWritePolicy, Tool[Any, Any]]] = {}
    for offer in () if rendering is None else rendering.offers.values():
        for policy in (attached.policy for attached in offer.policies):
            if isinstance(policy, ReadBeforeWritePolicy) and offer.tool.name in policy.write_tools:
                found[id(policy)] = policy, offer.tool
    return list(found.values())


def _builtin_kind(error: FilesystemError) -> str:
    """Return the built-in exception as which a script can catch an error."""
    kinds = (each for each in type(error).__mro__ if each.__module__ == "builtins")
    kind = next(kinds, Exception)
    return "OSError" if kind is Exception else kind.__name__


# The outcome


@dataclass(frozen=True, slots=True)
class _Failure:
    type: str
    message: str
    line: int | None


@dataclass(frozen=True, slots=True)
class _Outcome:
    """The answer of the process. A script that controls the process can forge it."""

    value: str
    value_chars: int
    stdout: str
    stdout_chars: int
    error: _Failure | None = None

    @classmethod
    def of(cls, message: dict[str, object]) -> _Outcome:
        # Lone surrogates cannot be sent to a model.
        text = json.dumps(message, ensure_ascii=False).encode(errors="replace")
        try:
            return parse(cls, json.loads(text))
        except ParseError:
            raise _malformed() from None

    def result(self, code: str, limit: int) -> ToolResult[Evaluation]:
        stdout = _cut(self.stdout, self.stdout_chars, limit)
        if self.error is None:
            value = _cut(self.value, self.value_chars, limit)
            return ToolResult.ok(Evaluation(value, stdout))
        text, line = self.error.message, self.error.line
        message = f"{self.error.type[:100]}: {_cut(text, len(text), limit)}"
        lines = code.split("\n")
        if line is not None and 1 <= line <= len(lines):
            message = f"Line {line}: {message}\n{line} | {lines[line - 1][:200]}"
        if stdout:
            message += f"\nOutput before that:\n{stdout}"
        return ToolResult.error(message, code="SCRIPT_FAILED")


def _cut(text: str, length: int, limit: int) -> str:
    if length <= limit and len(text) <= limit:
        return text
    return f"{text[:limit]}\n[Truncated: the first {limit} of {max(length, len(text))} characters]"
