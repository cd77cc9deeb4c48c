"""A real PostgreSQL server in a temporary directory, for tests that need one."""

from __future__ import annotations

import os
import pwd
import random
import shutil
import socket
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

PATIENCE = 300
"""Seconds that a server may take to start or stop on a loaded machine."""


def _program(name: str) -> str | None:
    versions = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return shutil.which(name, path=os.pathsep.join([*map(str, versions), os.environ["PATH"]]))


class Postgres:
    """A server of its own; PostgreSQL refuses to run as root, so root starts it as another user."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = _free_port()
        self._data = folder / "data"
        self._user = "postgres" if os.geteuid() == 0 else pwd.getpwuid(os.geteuid()).pw_name
        if os.geteuid() == 0:
            shutil.chown(folder, self._user)
        self._run("initdb", "-D", str(self._data), "-A", "trust", "-U", "postgres", "--no-sync")

    def start(self) -> None:
        """Start the server and wait until it answers."""
        options = f"-p {self.port} -k {self.folder} -h 127.0.0.1 -c max_connections=200"
        log = str(self.folder / "log")
        self._run("pg_ctl", "-D", str(self._data), "-l", log, "-o", options, "-w", "start")

    def stop(self, mode: str = "immediate") -> None:
        """Stop it: ``immediate`` is like a crash, ``fast`` ends connections first."""
        self._run("pg_ctl", "-D", str(self._data), "-m", mode, "-w", "stop")

    def restart(self, mode: str = "immediate") -> None:
        self.stop(mode)
        self.start()

    def url(self, name: str = "postgres") -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/{name}"

    def new_database(self) -> str:
        """Create an empty database and return its URL."""
        name = f"test_{uuid.uuid4().hex[:12]}"
        self._run("createdb", "-h", "127.0.0.1", "-p", str(self.port), "-U", "postgres", name)
        return self.url(name)

    def _run(self, name: str, *arguments: str) -> None:
        program = _program(name)
        assert program is not None
        as_user = ["runuser", "-u", self._user, "--"] if os.geteuid() == 0 else []
        done = subprocess.run(
            [*as_user, program, *arguments],
            cwd=self.folder,
            env={**os.environ, "PGCTLTIMEOUT": str(PATIENCE)},
            stdout=subprocess.PIPE if name != "pg_ctl" else subprocess.DEVNULL,
            stderr=subprocess.STDOUT if name != "pg_ctl" else subprocess.DEVNULL,
            timeout=2 * PATIENCE,
            check=False,
        )
        assert done.returncode == 0, f"{name}: {done.stdout!r} {self._log()}"

    def _log(self) -> str:
        log = self.folder / "log"
        return log.read_text(errors="replace")[-2000:] if log.exists() else ""


def _free_port() -> int:
    """Return a port that no connection gets by itself, as those above do, while it is free."""
    while True:
        port = random.SystemRandom().randrange(15_000, 32_000)
        with suppress(OSError), socket.socket() as found:
            found.bind(("127.0.0.1", port))
            return port


def _has_name() -> bool:
    with suppress(KeyError):
        return bool(pwd.getpwuid(os.geteuid()))
    return False


@contextmanager
def started_postgres() -> Iterator[Postgres]:
    """Yield a server, or skip the test where PostgreSQL is not installed."""
    if _program("initdb") is None:
        pytest.skip("PostgreSQL is not installed: apt-get install postgresql")
    if not _has_name():
        pytest.skip("PostgreSQL does not run as a user without a name")
    folder = Path(tempfile.mkdtemp(prefix="wink-postgres-"))
    folder.chmod(0o755)
    server = Postgres(folder)
    server.start()
    try:
        yield server
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)
