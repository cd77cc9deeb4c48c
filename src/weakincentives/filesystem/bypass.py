"""Notices changes that a handler makes with plain file operations below an open workspace.

Such changes are not journalled: a failed call does not undo them, and the history does not have
them. An audit hook sees ``open``, ``os``, ``shutil`` and ``pathlib``. It sees no other process, no
extension module that opens files itself, and no write to a file that was open before the call.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

from weakincentives.core.call import transaction_under_way
from weakincentives.core.clock import SYSTEM_CLOCK
from weakincentives.core.logs import get_logger
from weakincentives.filesystem.paths import shown

_logger = get_logger(__name__)

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_FOLLOWED = ((0, None, True),)
_CHANGES: dict[str, tuple[tuple[int, int | None, bool], ...]] = {
    "open": _FOLLOWED,
    "os.chflags": _FOLLOWED,
    "os.chmod": ((0, 2, True),),
    "os.chown": ((0, 3, True),),
    "os.link": ((1, 3, False),),
    "os.mkdir": ((0, 2, False),),
    "os.remove": ((0, 1, False),),
    "os.removexattr": _FOLLOWED,
    "os.rename": ((0, 2, False), (1, 3, False)),
    "os.rmdir": ((0, 1, False),),
    "os.setxattr": _FOLLOWED,
    "os.symlink": ((1, 2, False),),
    "os.truncate": _FOLLOWED,
    "os.utime": ((0, 3, True),),
}
"""By audit event: where it has a path and its directory descriptor, and if it follows a link."""
_THREADS = frozenset({"_thread.start_new_thread", "_thread.start_joinable_thread"})
_OWN = tuple(f"weakincentives.{name}." for name in ("filesystem", "contrib", "cli", "mcp"))
_TICK = 0.02
"""A file that is changed twice within this time may have the same times after both."""
_MAX_PATHS = 1000
_MAX_NAMED = 5

_lock = threading.Lock()
_watched: tuple[Watched, ...] = ()
_is_installed = False
_warned: set[str] = set()
under_way: set[object] = set()
"""The calls that have begun and not ended, on Python 3.11 and where there is a workspace."""

State = tuple[int, ...] | None
"""What tells one state of a path from another; None for nothing."""


class Watched:
    """An open workspace; close it when the workspace is closed."""

    def __init__(self, root: Path, store: Path) -> None:
        global _watched, _is_installed
        self.root, self.store = f"{root}/", f"{store}/"
        with _lock:
            _watched = (*_watched, self)
            if not _is_installed:  # it cannot be removed
                _is_installed = True
                sys.addaudithook(_hook)

    def close(self) -> None:
        global _watched
        with _lock:
            _watched = tuple(each for each in _watched if each is not self)


class Bypassed:
    """The paths that a call has changed with plain file operations, as they were before."""

    def __init__(self) -> None:
        self._before: dict[tuple[str, str], State] = {}

    def note(self, root: str, path: str) -> None:
        if len(self._before) < _MAX_PATHS and (root, path) not in self._before:
            before = _state(path)
            if before is not None and SYSTEM_CLOCK.time() - before[0] / 1e9 < _TICK:
                before = ()  # it could be changed without a trace
            self._before[root, path] = before

    def named(self) -> str:
        """Return the paths that are not as they were, as text; empty if there are none."""
        names = [
            shown(path[len(root) :] or ".")
            for (root, path), before in sorted(self._before.items())
            if before != _state(path)
        ]
        more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
        return ", ".join(names[:_MAX_NAMED]) + more


def warn_once(tool_name: str, named: str) -> None:
    """Tell the developer, the first time that a tool does it."""
    if tool_name not in _warned:
        _warned.add(tool_name)
        _logger.warning(
            "tool %s changed %s with plain file operations: that is not undone when a call fails, "
            'and not in the history. Use context.filesystem, or declare writes="external"',
            shown(tool_name),
            named,
        )


def _hook(event: str, args: tuple[Any, ...]) -> None:
    # An error here would be raised by the operation, and any program may raise these events with
    # other arguments. It is not logged: what logs may be what opens the file.
    try:
        places = _CHANGES.get(event)
        if places is None:
            if event in _THREADS and _watched:
                _mark_thread(args[0])
        elif _watched and (event != "open" or args[2] & _WRITES):
            _notice(args, places, transaction_under_way.get() or _transaction_of_thread())
    except Exception:
        pass


def _mark_thread(function: Any) -> None:
    """Note which call starts a thread: it does not inherit the context."""
    transaction = transaction_under_way.get()
    thread = getattr(function, "__self__", None)
    if transaction is not None and isinstance(thread, threading.Thread):
        vars(thread)["_wink_transaction"] = weakref.ref(transaction)


def _transaction_of_thread() -> Any:
    """Return the transaction of the call that has started this thread, or None."""
    if sys.version_info >= (3, 12):
        mark = vars(threading.current_thread()).get("_wink_transaction")
        return None if mark is None else mark()
    # No event tells that a thread starts: it is the only call's if it is younger than the call.
    calls: Any = tuple(under_way)
    transaction = next((each for each in calls if under_way.issubset(each.lineage)), None)
    if transaction is None:
        return None
    status = Path(f"/proc/self/task/{threading.get_native_id()}/stat").read_text()
    began = int(status.rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    age = float(Path("/proc/uptime").read_text().split()[0]) - began
    took = transaction.clock.monotonic() - transaction.started
    return transaction if age <= took + _TICK else None


def _notice(args: tuple[Any, ...], places: Any, transaction: Any) -> None:
    if transaction is None:
        return
    for _, _, view in transaction.forks:
        if view.is_changing_files:
            return
    if _is_own(sys._getframe(2)):  # pyright: ignore[reportPrivateUsage]
        return
    lineage = transaction.lineage
    if any(each.tool is not None and each.tool.writes == "external" for each in lineage):
        return  # a scan finds what changes
    for index, fd_index, follows in places:
        path = _path(args[index], -1 if fd_index is None else args[fd_index], follows)
        for watched in _watched:
            root = watched.root
            if not f"{path}/".startswith(root) or path.startswith(watched.store):
                continue
            if transaction.settled:
                named = shown(path[len(root) :])
                warn_once(transaction.call.name, f"{named} (after its call had ended)")
                continue
            for each in lineage:
                if not any(view.covers(path) for _, _, view in each.forks):
                    if each.bypassed is None:
                        each.bypassed = Bypassed()
                    each.bypassed.note(root, path)


def _is_own(frame: Any) -> bool:
    """Whether WINK itself, or an import that writes byte code, makes a change."""
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith("weakincentives."):
            return name.startswith(_OWN)
        if name == "importlib._bootstrap_external":
            return True
        frame = frame.f_back
    return False


def _path(given: Any, fd: int, follows: bool) -> str:
    """Return the path of an operation without links, except for one that it works on itself."""
    if isinstance(given, int):
        return os.readlink(f"/proc/self/fd/{given}")
    path = os.fsdecode(given)
    if fd >= 0 and not os.path.isabs(path):
        path = os.path.join(os.readlink(f"/proc/self/fd/{fd}"), path)
    if follows:
        return os.path.realpath(path)
    above, name = os.path.split(path.rstrip("/"))
    return os.path.join(os.path.realpath(above), name)


def _state(path: str) -> State:
    try:
        found = os.lstat(path)
    except OSError:
        return None
    times = (found.st_ctime_ns, found.st_mtime_ns)
    return (*times, found.st_ino, found.st_size, found.st_mode, found.st_uid, found.st_gid)
