"""A process that has `wink` loaded, and forks for each event: the next events cost little.

It keeps nothing of any event: each is handled in a process of its own, with the environment, the
directory and the streams of the agent's hook. So settings and approvals are read again each time.
It ends when it is idle, when the code has changed, or when it is no longer the one at its address.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import os
import select
import signal
import socket
import struct
import sys
from pathlib import Path

from weakincentives.cli.common import INSIDE
from weakincentives.cli.hooks import client
from weakincentives.core.state import our_code, state_directory

IDLE = "WINK_HOOK_IDLE"
"""The variable with the seconds without an event after which it ends; with 0 it does not start."""
_IDLE = 900.0
_MOST = 1 << 22
"""Bytes that an event's environment may have."""
_NEEDED = (
    "asyncio",
    "difflib",
    "weakincentives.cli.common",
    "pydantic.type_adapter",
    "weakincentives.cli.coding_agents",
    "weakincentives.cli.config",
    "weakincentives.cli.hooks.program",
    "weakincentives.cli.trust",
    "weakincentives.cli.workbench",
    "weakincentives.filesystem",
    "weakincentives.integrations.bridge",
    "weakincentives.prompt.feedback",
    "weakincentives.runtime.calls",
    "weakincentives.runtime.hosted",
    "weakincentives.runtime.recovery",
)
"""What handling an event imports."""


def start() -> None:
    """Leave a process behind that takes the next events, unless there is one.

    To be called before anything of an event was handled: it is inherited.
    """
    path, idle = client.address(dict(os.environb)), _idle()
    if path is None or idle <= 0 or os.environ.get(INSIDE) or not hasattr(socket, "SCM_RIGHTS"):
        return
    place = state_directory() / "hooks"
    place.mkdir(mode=0o700, exist_ok=True)
    if place / Path(os.fsdecode(path)).name != Path(os.fsdecode(path)):
        return  # the client would look elsewhere
    lock = os.open(os.fsdecode(path) + ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # there is one
        os.close(lock)
        return
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        os.close(lock)  # the child has it
        os.waitpid(child, 0)
        return
    try:
        if os.fork() == 0:
            _become_resident(os.fsdecode(path), lock, idle)
    finally:
        os._exit(0)


def _become_resident(path: str, lock: int, idle: float) -> None:
    os.setsid()
    os.chdir("/")
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):  # the agent waits until nobody has its pipes
        os.dup2(nowhere, number)
    os.closerange(3, lock)
    os.closerange(lock + 1, os.sysconf("SC_OPEN_MAX"))
    for name in _NEEDED:
        importlib.import_module(name)
    from weakincentives.cli.workbench import suite_tools

    suite_tools()  # which is kept: it takes longer than all the rest of an event
    our_code()
    code = _code()
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        before = os.umask(0o177)
        listening.bind(path)
        os.umask(before)
        own = os.stat(path).st_ino
        listening.listen(64)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children leave nothing behind
        gc.collect()
        gc.freeze()
        while select.select([listening], [], [], idle)[0]:
            connection, _ = listening.accept()
            with connection:
                is_current = _code() == code and _inode(path) == own
                if is_current and _is_like_us(connection) and os.fork() == 0:
                    listening.close()
                    _handle(connection)
            if not is_current:
                break
        if _inode(path) == own:
            os.unlink(path)


def _idle() -> float:
    try:
        return float(os.environ.get(IDLE) or _IDLE)
    except ValueError:
        return _IDLE


def _inode(path: str) -> int:
    try:
        return os.stat(path).st_ino
    except OSError:
        return 0


def _code() -> int:
    """Return what changes if our loaded code does."""
    files = (getattr(each, "__file__", None) for each in tuple(sys.modules.values()))
    found = 0
    for file in files:
        if file and "weakincentives" in file:
            with contextlib.suppress(OSError):
                found ^= hash((file, os.stat(file).st_mtime_ns))
    return found


def _is_like_us(connection: socket.socket) -> bool:
    """Tell whether a client is a process of this user that sees the same files."""
    if not hasattr(socket, "SO_PEERCRED"):
        return True  # only this user can enter the directory of the socket
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    process, user, _ = struct.unpack("3i", data)
    if user != os.geteuid():
        return False
    try:
        theirs = [os.readlink(f"/proc/{process}/{each}") for each in _VIEW]
    except OSError:  # it is gone, or in a namespace that hides it
        return False
    return theirs == [os.readlink(f"/proc/self/{each}") for each in _VIEW]


_VIEW = ("ns/mnt", "ns/user", "root")


def _handle(connection: socket.socket) -> None:
    """Be the hook that a client stands for."""
    code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        connection.settimeout(10)
        size, streams, _, _ = socket.recv_fds(connection, 4, 3)
        data = b""
        left = int.from_bytes(size, "big")
        if len(streams) != 3 or left > _MOST:
            return
        while len(data) < left:
            more = connection.recv(left - len(data))
            if not more:
                return
            data += more
        version, directory, arguments, *environment = data.split(b"\0")
        if version != client.VERSION:
            return
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        os.chdir(directory)
        os.environb.clear()
        os.environb.update(dict(each.split(b"=", 1) for each in environment if b"=" in each))
        for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
            setattr(sys, name, open(number, mode, closefd=False, errors="backslashreplace"))  # noqa: SIM115
        connection.sendall(b"+")
        from weakincentives.cli.entry import main

        try:
            main(["hook", "run", *map(os.fsdecode, arguments.split(b"\1"))])
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 1
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException as error:  # or the server would go on in this process
        with contextlib.suppress(Exception):
            os.write(2, f"wink: {error}\n".encode())
    finally:
        with contextlib.suppress(OSError):
            connection.sendall(bytes([code & 255]))
        os._exit(0)
