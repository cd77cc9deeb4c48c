"""The database of durable runs: how a command finds it, and what is wrong with it in one line.

Its URL may contain a password. It comes from a flag, a variable or the user's own settings, never
from the workspace: an agent could name another one there. It is stored in no run, shown without the
password, and withheld from commands.
"""

from __future__ import annotations

import os
import platform
import re
import tomllib
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from weakincentives.cli.common import Misuse, hint
from weakincentives.core.state import state_directory, state_path
from weakincentives.errors import (
    MissingExtra,
    NoSuchRun,
    RunAlreadyEnded,
    StorageUnavailable,
)

if TYPE_CHECKING:
    from weakincentives.durable.objects import CollectableObjects
    from weakincentives.runtime.stores.database import Database
    from weakincentives.runtime.stores.runs import Runs

SETTINGS = "settings.toml"
"""In the user's state directory, which agents cannot see."""
_KEYS = ("database", "objects", "machine")
_PATIENCE = 5.0
"""Seconds that a command tries to reach a database; a worker is more patient."""
_NETWORKS = ("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "fuse.sshfs", "lustre")


def setting(name: str, given: str | None) -> str:
    """Return a flag's value, or that of the variable or the user's settings; empty if none."""
    return given or os.environ.get(f"WINK_{name.upper()}") or _user_settings().get(name, "")


def machine_name(given: str | None) -> str:
    """Return the name of this machine: runs on a directory here are for workers of that name."""
    name = setting("machine", given) or platform.node() or "localhost"
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
        raise Misuse(f"--machine: letters, digits, dots and dashes, got {ascii(name)[:60]}")
    return name


def objects_url(given: str | None) -> str:
    """Return the URL of the object storage; by default a table of the database."""
    url = setting("objects", given)
    if url in ("", "database", "database:"):
        return "database:"
    return url if "://" in url else str(Path(url.removeprefix("dir:")).expanduser().absolute())


def open_storage(url: str, database: Database) -> CollectableObjects:
    """Return the object storage; raise Misuse if it cannot be one."""
    from weakincentives.durable.objects import open_objects

    try:
        return open_objects(url, database)
    except (ValueError, MissingExtra, StorageUnavailable) as error:
        raise Misuse(f"--objects: {error}") from error


def cache_directory() -> Path:
    """Return a directory for copies of what is stored elsewhere; only this user can read it.

    Not in the state directory, which is hidden from the agents that work on the copies.
    """
    named = os.environ.get("XDG_CACHE_HOME", "")
    place = (Path(named) if os.path.isabs(named) else Path.home() / ".cache") / "wink"
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    return place


def database_url(given: str | None) -> str:
    """Return the URL of the database; by default that of a file of this user."""
    return setting("database", given) or f"sqlite:///{_default_file()}"


def is_named(given: str | None) -> bool:
    """Whether there is a database to look at: a named one, or the default one in use."""
    if setting("database", given):
        return True
    return (state_path() / _DEFAULT).exists()


@contextmanager
def open_database(given: str | None, *, must_exist: bool = False) -> Generator[Database]:
    """Yield the database; raise Misuse if it cannot be a database of runs."""
    from weakincentives.runtime.stores.database import Database

    url = database_url(given)
    try:
        database = Database(url)
    except ValueError as error:
        raise Misuse(f"--database: {error}") from error
    if not database.is_postgres:
        _check_file(file_of(url), must_exist=must_exist)
    try:
        yield database
    except MissingExtra as error:
        raise Misuse(str(error)) from error
    finally:
        database.close()


@contextmanager
def open_runs(given: str | None, *, must_exist: bool = False) -> Generator[Runs]:
    """Yield the runs of a database; wrong names of runs become Misuse."""
    from weakincentives.runtime.stores.runs import Runs

    with open_database(given, must_exist=must_exist) as database:
        try:
            yield Runs(database, patience=_PATIENCE)
        except (NoSuchRun, RunAlreadyEnded) as error:
            raise Misuse(str(error)) from error


def file_of(url: str) -> Path | None:
    """Return the file of an SQLite database."""
    scheme, _, rest = url.partition("://")
    return Path(unquote(rest[1:])).absolute() if scheme == "sqlite" else None


def check_outside(database: Database, workspace: Path) -> None:
    """Raise Misuse if an agent could reach the database's file through its workspace."""
    file = file_of(database.url)
    if file is not None and file.resolve().is_relative_to(workspace):
        raise Misuse(
            f"{file} is in the workspace, where an agent could change it; put it elsewhere"
        )


_DEFAULT = "runs.db"


def _default_file() -> Path:
    return state_directory() / _DEFAULT


def _check_file(file: Path | None, *, must_exist: bool) -> None:
    assert file is not None
    if not file.parent.is_dir():
        raise Misuse(f"--database: there is no directory {file.parent}")
    if must_exist and not file.exists():
        raise Misuse(f'no runs yet: there is no {file}; begin with: wink submit "..."')
    if (kind := _filesystem_of(file.parent)) in _NETWORKS:
        raise Misuse(
            f"{file} is on a network filesystem ({kind}), where SQLite's locks do not hold; use "
            "a file on a local disk, or PostgreSQL"
        )


def _filesystem_of(path: Path, mounts: Path = Path("/proc/self/mounts")) -> str:
    """Return the kind of filesystem that a directory is on, if the system tells."""
    best, kind = "", ""
    with suppress(OSError):
        for line in mounts.read_text("utf-8", "replace").splitlines():
            place = line.split(" ")[1].replace("\\040", " ")
            if path.resolve().is_relative_to(place) and len(place) >= len(best):
                best, kind = place, line.split(" ")[2]
    return kind


def _user_settings() -> dict[str, str]:
    path = state_path() / SETTINGS
    try:
        found: dict[str, Any] = tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise Misuse(f"cannot read {path}: {error}") from error
    for name, value in found.items():
        if name not in _KEYS:
            near = hint(name, _KEYS, f"the keys are {', '.join(_KEYS)}")
            raise Misuse(f"{path}: unknown key {ascii(name)[1:-1]}; {near}")
        if not isinstance(value, str):
            raise Misuse(f"{path}: {name} must be a string")
    return found
