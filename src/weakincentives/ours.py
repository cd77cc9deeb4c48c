"""What is ours on this machine, and so out of an agent's reach: one place says what that is.

An agent that could change our code, the interpreter, or what the interpreter loads, would run
outside of every sandbox with the next call. So wherever these lie inside a workspace, nothing may
change them; and the state directory, which has the key of all seals, may not even be read.
"""

from __future__ import annotations

import os
import site
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from weakincentives.errors import StateUnavailable
from weakincentives.state import state_directory

__all__ = ["our_code", "our_environment", "our_secrets", "program", "source_of"]

_PACKAGE = os.path.dirname(os.path.abspath(__file__))


@cache
def our_code() -> tuple[Path, ...]:
    """Return the files and directories that hold our code, resolved; some may not exist.

    The package (also of an editable install) and what the interpreter loads with it: its standard
    library, our dependencies with every ``.pth`` file, and modules of the user's own.
    """
    paths = sysconfig.get_paths()
    found = {_PACKAGE, *site.getsitepackages(), os.path.join(sys.prefix, "pyvenv.cfg")}
    found |= {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib", "scripts")}
    if user := site.getusersitepackages():
        found.add(user)
    if sys.executable:
        found.add(sys.executable)
    return _resolved(found)


@cache
def our_environment() -> tuple[Path, ...]:
    """Return the directories that Python is installed in, with all else that they hold."""
    return _resolved({sys.prefix, sys.exec_prefix, sys.base_prefix})


def _resolved(paths: set[str]) -> tuple[Path, ...]:
    absolute = {os.path.abspath(each) for each in paths}
    links = {link for path in absolute for link in _links_to(path)}
    return tuple(sorted(Path(each) for each in links | set(map(os.path.realpath, absolute))))


def _links_to(path: str) -> Iterator[str]:
    """Yield the links on the way to a path: who replaces one decides what is found behind it."""
    while path != (above := os.path.dirname(path)):
        if os.path.islink(path):
            yield os.path.join(os.path.realpath(above), os.path.basename(path))
        path = above


def our_secrets() -> tuple[Path, ...]:
    """Return what an agent may not even read: the user's state directory."""
    with suppress(StateUnavailable):
        return (state_directory().resolve(),)
    return ()


def source_of(module_file: str, name: str) -> str:
    """Return the text of a program that lies beside a module.

    It is to be read when the module is imported, before any agent is at work, and handed to the
    interpreter as text: so nobody can put another program in its place.
    """
    return Path(module_file).with_name(name).read_text(encoding="utf-8")


def program(source: str, *arguments: str) -> Sequence[str]:
    """Return how to run a program of ours: with the standard library, and nothing else.

    Isolated (no variables, no user's modules), without ``site`` (no ``.pth`` files), and without
    writing byte code. The interpreter behind the links: one in a virtual environment would first
    read there where its library is.
    """
    interpreter = os.path.realpath(sys.executable)
    return [interpreter, "-I", "-S", "-B", "-c", source, *arguments]
