"""Imports `wink`, then forks a process for each request; see ``forked.py``, which starts this."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import json
import os
import pkgutil
import socket
import sys
import termios
from collections.abc import Sequence
from typing import Any

from weakincentives.cli import __main__
from weakincentives.cli.entry import main
from weakincentives.cli.workbench import suite_tools

PACKAGES = ("cli", "cli.hooks", "contrib.tools", "filesystem", "prompt", "runtime")
OTHERS = (
    "email.parser",
    "pathspec.gitignore",
    "prompt_toolkit.shortcuts",
    "rich.live",
    "rich.markdown",
    "rich.syntax",
    "typer._adapters",
    "typer._click.decorators",
    "weakincentives.adapters.catalog",
    "weakincentives.adapters.local",
    "weakincentives.adapters.scripted",
    "weakincentives.integrations.bridge",
)


def import_all() -> None:
    names = list(OTHERS)
    for package in PACKAGES:
        path = importlib.import_module(f"weakincentives.{package}").__path__
        names += [each.name for each in pkgutil.iter_modules(path, f"weakincentives.{package}.")]
    for name in names:
        with contextlib.suppress(ModuleNotFoundError):  # what an optional module needs
            importlib.import_module(name)
    suite_tools()  # whose schemas are made once for each process


def serve(requests: socket.socket) -> None:
    """Return in each process that is to be `wink`; the server itself ends with its tests."""
    while True:
        request, descriptors, _, _ = socket.recv_fds(requests, 1 << 20, 4)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:  # those that have told how theirs ended
                pass
        if not request:
            os._exit(0)
        if os.fork() == 0:
            requests.close()
            *streams, status = descriptors
            if forked := os.fork():
                for stream in streams:
                    os.close(stream)
                tell_how_it_ends(forked, status)
            os.close(status)
            become(json.loads(request), streams)
            return
        for descriptor in descriptors:
            os.close(descriptor)


def tell_how_it_ends(process: int, status: int) -> None:
    with contextlib.suppress(BrokenPipeError):
        os.write(status, b"%d\n" % process)
        _, ended = os.waitpid(process, 0)
        os.write(status, b"%d\n" % os.waitstatus_to_exitcode(ended))
    os._exit(0)


def become(request: dict[str, Any], streams: Sequence[int]) -> None:
    """Set all up that `python -m weakincentives.cli` finds when it is started."""
    if request["terminal"]:
        os.setsid()
        fcntl.ioctl(streams[0], termios.TIOCSCTTY, 0)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    for stream in set(streams):
        os.close(stream)
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False, buffering=1 if os.isatty(1) else -1)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", closefd=False, buffering=1)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    sys.path[0] = request["cwd"]
    sys.modules["__main__"] = __main__  # help names the program as it was started
    sys.argv = [__main__.__file__, *request["arguments"]]


if __name__ == "__main__":
    import_all()
    gc.freeze()
    with socket.socket(fileno=int(sys.argv[1])) as requests:
        serve(requests)
    main()
