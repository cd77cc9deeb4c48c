"""Sandboxes: commands run on a workspace, and can see, change and use up nothing else.

A sandbox is a way to wrap a command. It is run by the workspace's own ``HostFilesystem.run``, so
rollback, private views and the history hold for it as for every command.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Literal, cast, get_args

from weakincentives.contrib.tools.sandbox_engines import (
    CLEAN,
    INSIDE,
    Bubblewrap,
    EngineName,
    Kit,
    Namespaces,
    Order,
    Podman,
    SandboxEngine,
    Unconfined,
    is_missing,
)
from weakincentives.contrib.tools.sandbox_limits import SandboxLimits, SandboxWatch
from weakincentives.errors import CommandFailed, SandboxUnavailable, ToolValidationError
from weakincentives.filesystem.commands import DEFAULT_OUTPUT_LIMIT, Command, CommandResult
from weakincentives.filesystem.protocol import Parts

if TYPE_CHECKING:
    from weakincentives.filesystem.disk import HostFilesystem

__all__ = ["Sandbox", "SandboxChoice", "find_sandbox"]

SandboxChoice = Literal["auto", "podman", "bubblewrap", "namespaces", "none"]

TRIAL = 60.0
"""Seconds that the first command may take; podman can be slow on a busy machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sandbox:
    """Runs commands on a workspace; made by :func:`find_sandbox`."""

    engine: SandboxEngine
    limits: SandboxLimits
    python: str
    """The Python that commands find."""
    passed_over: tuple[tuple[EngineName, str], ...] = ()
    """The engines that come before this one, and why they are not used."""

    @property
    def name(self) -> EngineName:
        return self.engine.name

    def run(
        self,
        fs: HostFilesystem,
        argv: Sequence[str] | str,
        *,
        cwd: str = ".",
        env: Mapping[str, str] | None = None,
        stdin: bytes | str | None = None,
        timeout: float | None = None,
        output_limit: int = DEFAULT_OUTPUT_LIMIT,
    ) -> CommandResult:
        """Run a command on the workspace; what it changed is kept only if it ended well.

        Args:
            argv: The program and its arguments; one string is run by ``sh -c``.
            cwd: Where to start it, as the filesystem calls it.
            env: What it finds in its environment besides the bare minimum.
            stdin: What it can read; nothing by default.
            timeout: Seconds after which it is killed.
            output_limit: Bytes of each of its outputs to keep; the middle of more is left out.
        """
        command = Command.of(
            argv, env=None, stdin=stdin, timeout=timeout, limit=output_limit, watch=None
        )
        inside = str(PurePosixPath(INSIDE, fs.normalize(cwd)))
        order = Order(
            argv=command.argv,
            workspace=fs.root,
            cwd=inside,
            env={**CLEAN, **self._path(), "PWD": inside, **_checked(env or {})},
            owner=_owner(fs.root),
            limits=self.limits,
            read_only=_present(fs, fs.reserved.trees),
            hidden=_present(fs, fs.reserved.hidden),
        )
        with self.engine.wrapped(order) as wrapped:
            watch = SandboxWatch(self.limits, places=(fs.store, fs.root), processes=wrapped.watched)
            try:
                result = fs.run(
                    wrapped.argv,
                    cwd=cwd,
                    env=wrapped.env,
                    stdin=command.stdin,
                    timeout=timeout,
                    output_limit=output_limit,
                    check=True,
                    watch=watch,
                )
            except CommandFailed as error:
                result = cast("CommandResult", error.result)
        return replace(result, argv=command.argv)

    def _path(self) -> Mapping[str, str]:
        """Let commands find a Python of ours by its name, where the system has none."""
        place = os.path.dirname(self.python)
        return {"PATH": f"{CLEAN['PATH']}:{place}"} if place else {}

    def problem(self) -> str | None:
        """Return why no command can be run here, if so: what comes of trying."""
        missing = self.engine.missing()
        return missing if missing is not None else self._try()

    def _try(self) -> str | None:
        with tempfile.TemporaryDirectory(prefix="wink-") as folder:
            # It works if the command can write there, and cannot see it by its own name.
            order = Order(
                argv=["/bin/sh", "-c", 'test -w . && test ! -e "$0"', folder],
                workspace=Path(folder),
                cwd=INSIDE,
                env=CLEAN,
                owner=_owner(Path(folder)),
                limits=self.limits,
            )
            try:
                with self.engine.wrapped(order) as wrapped:
                    tried = subprocess.run(
                        wrapped.argv, env=wrapped.env, capture_output=True, timeout=TRIAL
                    )
            except (OSError, subprocess.TimeoutExpired, SandboxUnavailable) as error:
                return str(error)
        if tried.returncode == 0:
            return None
        said = tried.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        return said or f"a first command ended with {tried.returncode}"


def _present(fs: HostFilesystem, trees: Iterable[Parts]) -> list[str]:
    """Return what is protected and can be mounted over itself: nobody mounts on links."""
    paths = ["/".join(parts) for parts in trees if parts]
    return [
        path
        for path in paths
        if os.path.exists(fs.root / path) and not (fs.root / path).is_symlink()
    ]


def _checked(env: Mapping[str, str]) -> Mapping[str, str]:
    for name in env:
        if not (name.isascii() and name.isidentifier()):
            raise ToolValidationError(
                f"{name!r} cannot be the name of a variable: use letters, digits and underscores"
            )
        if "\0" in env[name]:
            raise ToolValidationError(f"the variable {name} cannot contain a NUL character")
    return env


def _owner(workspace: Path) -> tuple[int, int]:
    """Return who the command is outside: root does not stay root where others own the files."""
    if os.geteuid() != 0:
        return os.geteuid(), os.getegid()
    status = os.stat(workspace)
    return status.st_uid, status.st_gid


def find_sandbox(
    choice: SandboxChoice = "auto",
    *,
    limits: SandboxLimits | None = None,
    image: str | None = None,
    read_only: Sequence[str | os.PathLike[str]] = (),
) -> Sandbox:
    """Return the first sandbox that works here: podman, bubblewrap, then namespaces of our own.

    Raises SandboxUnavailable, with the reason for each, where none does.

    Args:
        choice: One of them by its name; ``"none"`` runs commands without any.
        image: An image of podman's to run commands in; the host's programs without one.
        read_only: Directories of the host that commands can read besides its programs.
    """
    if choice not in get_args(SandboxChoice):
        raise ValueError(f"sandbox must be one of {get_args(SandboxChoice)}, got {choice!r}")
    if image is not None and choice not in ("auto", "podman"):
        raise ValueError(f"an image needs podman, but the sandbox is {choice!r}")
    for path in read_only:
        if not os.path.exists(path):
            raise FileNotFoundError(errno.ENOENT, "nothing to show in the sandbox", str(path))
    if choice != "none" and sys.platform != "linux":
        raise _unavailable(f"they need Linux, this is {sys.platform}")
    python = "python3"
    if image is None and is_missing(python):
        python, read_only = os.path.realpath(sys.executable), (*read_only, sys.base_prefix)
    passed_over: list[tuple[EngineName, str]] = []
    for engine in _engines(choice, image, read_only):
        sandbox = Sandbox(
            engine=engine,
            limits=limits or SandboxLimits(),
            python=python,
            passed_over=tuple(passed_over),
        )
        problem = None if choice == "none" else sandbox.problem()
        if problem is None:
            return sandbox
        passed_over.append((engine.name, problem))
    raise _unavailable("; ".join(f"{name}: {reason}" for name, reason in passed_over))


def _unavailable(reason: str) -> SandboxUnavailable:
    return SandboxUnavailable(
        f"No sandbox works here, so no command is run ({reason}). "
        "sandbox='none' would run them without one"
    )


def _engines(
    choice: SandboxChoice, image: str | None, read_only: Sequence[str | os.PathLike[str]]
) -> list[SandboxEngine]:
    """Return those that may be used, the best first."""
    if choice == "none":
        return [Unconfined()]
    kit = Kit(read_only)
    podman = Podman(kit, image)
    if image is not None:
        return [podman]
    engines: list[SandboxEngine] = [podman, Bubblewrap(kit), Namespaces(kit)]
    return [each for each in engines if choice in ("auto", each.name)]
