"""A branch on disk: its log, its base, and its files after each commit. Reading takes no lock.

The log has a head and one line for each commit: the steps that lead there, the digests of the
contents, and what was at the changed paths before. The contents are in the branch's own store. So a
branch costs its difference, and a kill loses at most the commit in progress.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import threading
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from weakincentives.core import locks
from weakincentives.core.clock import SYSTEM_CLOCK
from weakincentives.core.state import no_links
from weakincentives.errors import HistoryDamaged, NoSuchBranch, WorkspaceLocked
from weakincentives.filesystem.diffs import (
    Detail,
    Effort,
    FileChange,
    all_changed,
    file_changes,
)
from weakincentives.filesystem.disk import HostFilesystem
from weakincentives.filesystem.entry import Entry
from weakincentives.filesystem.history import BRANCHES, Committed, Past, append_line
from weakincentives.filesystem.layers import Changed, Cover, Disk, Layer, Look, Node, node_at
from weakincentives.filesystem.paths import Parts, join_path
from weakincentives.filesystem.reserved import Reserved
from weakincentives.filesystem.staging import Step
from weakincentives.filesystem.states import DirectoryAt, FilesAt
from weakincentives.filesystem.store import (
    DirectoryLock,
    Note,
    Objects,
    checked_parts,
    store_of,
    write_whole,
)
from weakincentives.filesystem.tree import Held, Tree
from weakincentives.filesystem.undo import CallChanges

_VERSION = 1
_SEALS = "branch"
NAME = re.compile("[a-z0-9][a-z0-9._-]{0,63}")
_FOR_RECOVERY = 10.0
"""Seconds to wait for another process that recovers the workspace."""
_WHOLE = ("tx", "directory.lock", "open")
"""What a complete store has beside its note, which is written first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchCommit(Committed):
    """A commit on a branch; serials count from 1."""

    size: int = 0
    steps: tuple[Step, ...] = field(repr=False, compare=False)
    was: Mapping[Parts, Entry | None] = field(repr=False, compare=False)
    """What the branch saw at the changed paths before it first changed them."""
    reads: frozenset[Parts] = field(default=frozenset(), repr=False, compare=False)
    redo: Mapping[str, Any] | None = field(default=None, repr=False, compare=False)
    """What it holds for the session of the call, as JSON values."""

    @property
    def back_to(self) -> int | None:
        """The number of commits whose state it has returned to, if it did nothing else."""
        if len(self.steps) == 1 and self.steps[0].method == "back":
            return self.steps[0].content
        return None

    @property
    def digests(self) -> set[str]:
        """The contents that it needs."""
        entries = (*(step.node for step in self.steps), *self.was.values())
        return {each.digest for each in entries if each is not None and each.digest is not None}


def changed_by(steps: Iterable[Step]) -> tuple[str, ...]:
    """Return the paths that some steps change, sorted."""
    return tuple(sorted({join_path(each) for step in steps for each in step.changed}))


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchInfo:
    """A branch as its log describes it; reading it takes no lock."""

    name: str
    base: int
    """The serial, in the history of the workspace, of the last call before it."""
    began: float
    moment: int = 0
    """When its base was, in nanoseconds since the epoch; 0 for the end of the call."""
    about: Mapping[str, Any] = field(default_factory=dict[str, Any])
    commits: tuple[BranchCommit, ...] = ()
    path: Path = Path()

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths that it changed, sorted."""
        return tuple(sorted({path for each in self.commits for path in each.paths}))

    @property
    def is_in_use(self) -> bool:
        """Whether any process has it open."""
        try:
            with Held(os.open(self.path / "lock", os.O_RDWR | os.O_NOFOLLOW)) as fd:
                return locks.is_taken(fd)
        except FileNotFoundError:
            return False

    @property
    def size(self) -> int:
        """The bytes that it takes on disk."""
        return sum(each.lstat().st_size for each in self.path.rglob("*") if each.is_file())


# The log


class Log:
    """The file of a branch: a head, and one line for each commit."""

    def __init__(self, folder: Path, note: Note) -> None:
        self.path = folder / "log"
        self.objects = Objects(folder / "objects")
        self._folder = folder
        self._seals = note.seals(_SEALS)
        self._size = 0
        self._device = _device_of(note.path)

    def create(self, info: BranchInfo) -> None:
        """Write the whole log."""
        head = {
            "wink_branch": _VERSION,
            "base": info.base,
            "began": info.began,
            "moment": info.moment,
            "about": dict(info.about),
        }
        lines = b""
        for text in (json.dumps(head).encode(), *map(_encoded, info.commits)):
            lines += self._seals.sealed(text, len(lines)) + b"\n"
        write_whole(self.path, lines, safe=False)
        self._size = len(lines)

    def append(self, commit: BranchCommit) -> None:
        line = self._seals.sealed(_encoded(commit), self._size)
        if os.path.getsize(self.path) != self._size:
            os.truncate(self.path, self._size)  # a line that a kill or a full disk cut short
        append_line(self.path, line)
        self._size += len(line) + 1

    def read(self) -> BranchInfo:
        """Return what is in the log; a last line that a kill cut short is left out.

        Raises:
            HistoryDamaged: It is damaged, or was not written by this user.
        """
        with open(self.path, "rb", opener=no_links) as file:
            lines = file.read().split(b"\n")[:-1]
        texts: list[Any] = []
        place = 0
        for line in lines:
            text = self._seals.unsealed(line, place)
            if text is None:
                raise HistoryDamaged(
                    f"The log of the branch {self._folder.name!r} is damaged ({self.path})"
                )
            texts.append(json.loads(text))
            place += len(line) + 1
        if not texts or texts[0].get("wink_branch") != _VERSION:
            raise HistoryDamaged(f"{self.path} is not the log of a branch")
        self._size = place
        try:
            commits = tuple(
                decoded_commit(serial, values, self.objects, self._device)
                for serial, values in enumerate(texts[1:], 1)
            )
        except (LookupError, TypeError, ValueError) as error:
            raise HistoryDamaged(f"{self.path} has an invalid record: {error}") from error
        head = texts[0]
        return BranchInfo(
            name=self._folder.name,
            base=head["base"],
            began=head["began"],
            moment=head["moment"],
            about=head["about"],
            commits=commits,
            path=self._folder,
        )


def _device_of(path: str) -> int:
    with contextlib.suppress(OSError):
        return os.stat(path).st_dev
    return 0


def _encoded(commit: BranchCommit) -> bytes:
    return json.dumps(commit_values(commit), separators=(",", ":")).encode()


def commit_values(commit: BranchCommit) -> dict[str, Any]:
    """Return a commit as JSON values; contents only as digests."""
    steps = [
        (
            step.method,
            "/".join(step.parts),
            None if step.target is None else "/".join(step.target),
            None if step.node is None else step.node.encode(),
            _attributes(step.content) if step.method == "set_attributes" else None,
            step.moment,
            step.content if step.method == "back" else 0,
        )
        for step in commit.steps
    ]
    values: dict[str, Any] = {
        "call": commit.call_id,
        "tool": commit.tool,
        "time": commit.time,
        "steps": steps,
        "was": [("/".join(parts), each and each.encode()) for parts, each in commit.was.items()],
        "reads": sorted("/".join(parts) for parts in commit.reads),
        "undoes": commit.undoes,
    }
    if commit.redo is not None:
        values["redo"] = commit.redo
    return values


def _attributes(given: Mapping[str, Any]) -> dict[str, Any]:
    xattrs = given.get("xattrs")
    shown = None if xattrs is None else [(name, value.hex()) for name, value in xattrs]
    return {**given, "xattrs": shown}


def decoded_commit(
    serial: int, values: Mapping[str, Any], objects: Objects, device: int
) -> BranchCommit:
    """Return the commit of :func:`commit_values`; raises ValueError if they are malformed."""
    steps = tuple(_step(each, objects, device) for each in values["steps"])
    return BranchCommit(
        serial=serial,
        call_id=str(values["call"]),
        tool=str(values["tool"]),
        time=float(values["time"]),
        paths=changed_by(steps),
        undoes=tuple(map(str, values["undoes"])),
        steps=steps,
        was={checked_parts(path): each and Entry.decode(each) for path, each in values["was"]},
        reads=frozenset(map(checked_parts, values["reads"])),
        redo=values.get("redo"),
    )


def _step(values: Sequence[Any], objects: Objects, device: int) -> Step:
    method, path, target, entry, attributes, moment, serial = values
    if method not in _METHODS:
        raise ValueError(f"unknown step {method!r}")
    node = None if entry is None else Entry.decode(entry)
    if method == "write" and node is not None and node.ino > 0:  # under all names it has on disk
        node = node._replace(device=device)
    content: Any = None
    if method == "set_attributes":
        xattrs = attributes["xattrs"]
        pairs = None if xattrs is None else tuple((n, bytes.fromhex(v)) for n, v in xattrs)
        content = {**attributes, "xattrs": pairs}
    elif method == "back":
        content = int(serial)
    elif node is not None and node.digest is not None:
        content = partial(objects.read, node.digest)
    where = None if target is None else checked_parts(target)
    return Step(method, checked_parts(path), where, content, node, int(moment))


_METHODS = frozenset(
    {"write", "put_file", "make_directory", "remove", "rename", "copy", "add_name",
     "set_attributes", "back", "base"}
)  # fmt: skip


# The state after each commit


def points_of(disk: Look, commits: Iterable[BranchCommit]) -> list[Layer]:
    """Return the state before the first commit, and after each."""
    points = [Layer(disk)]
    for commit in commits:
        points.append(next_point(points, commit, disk))
    return points


def next_point(points: Sequence[Layer], commit: BranchCommit, disk: Look) -> Layer:
    """Return the state after a commit, given those before it."""
    layer = points[-1]
    for step in commit.steps:
        layer = next_layer(layer, step, points, disk)
    return layer


def next_layer(layer: Layer, given: Step, points: Sequence[Layer], disk: Look) -> Layer:
    """Return the state after a step."""
    step = _on_linked(given, layer)
    if step.method == "back":
        return points[int(step.content)]
    if step.method == "base":
        return layer.take(step.parts, disk)
    layer = step.applied(layer)
    if step.target is not None and step.node is not None:
        layer = layer.put(step.target, Cover(step.node, step.content))
    return layer


def _on_linked(step: Step, layer: Layer) -> Step:
    """Return a write to a hard-linked file as one to the file that the layer has there.

    Inode numbers differ on every machine, and those of copies each time a branch is opened.
    """
    node = step.node
    if step.method != "write" or node is None or node.links < 2:
        return step
    there = node_at(layer, step.parts)
    if there is None or there.kind != "file" or there.links < 2:
        return step
    return step._replace(node=node._replace(ino=there.ino, device=there.device))


def changed_between(before: Layer, after: Layer) -> list[Parts]:
    differing = before.differing(after)
    return all_changed(differing.paths, differing.paths, differing.files, before, after)


# The base: a point in the history of the workspace


class BranchBase(DirectoryAt):
    """The state that a branch begins with. It knows which of its files the branch has read."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._read: dict[Parts, tuple[int, bytes]] = {}
        """The change times and digests of files that were read."""
        self.all_read_ns = 0
        """When a command last saw everything."""

    def read(self, parts: Parts) -> bytes:
        with self.steady():
            node, data = self.node(parts), super().read(parts)
        self._read[parts] = 0 if node is None else node.ctime_ns, _digest(data)
        return data

    def was_seen(self, parts: Parts, node: Node) -> bool:
        """Whether a file was read as it is now."""
        if node.ctime_ns <= self.all_read_ns:
            return True
        ctime_ns, digest = self._read.get(parts, (-1, b""))
        if ctime_ns in (-1, node.ctime_ns):
            return ctime_ns == node.ctime_ns
        # The rollback of a killed call may have put it back as it was.
        return node.kind == "file" and _digest(super().read(parts)) == digest


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def base_of(root: Path, info: BranchInfo) -> BranchBase:
    """Return the base of a branch."""
    main = info.path.parent.parent
    past, recover = _past_in(main), partial(_recover_killed, root, main)
    moment = info.moment or None
    return BranchBase(main, past, Disk(Tree(root)), info.base, recover=recover, moment=moment)


def make_store(root: Path, main: Path) -> Note:
    """Make the store of a workspace, unless it is there, and return the note in it.

    One that a kill has left half made is completed; processes that do so at once wait.
    """
    note = Note.read(main)
    if note is None or not all((main / each).exists() for each in _WHOLE):
        HostFilesystem(root, store=main, shared=True, wait=_FOR_RECOVERY).close()
        note = Note.read(main)
    assert note is not None
    return note


def point_now(root: Path, main: Path) -> tuple[int, int]:
    """Return the newest serial of a workspace that holds no uncommitted changes, and the time."""
    with steady_point(root, main) as point:
        return point


@contextlib.contextmanager
def steady_point(root: Path, main: Path) -> Generator[tuple[int, int]]:
    """Keep calls from changing a workspace in the block; yields its newest serial, and the time."""
    _recover_killed(root, main)
    lock = DirectoryLock(main)
    try:
        with lock.reading():
            yield _past_in(main).last, file_time(main)
    finally:
        lock.close()


def _past_in(main: Path) -> Past:
    Note.read(main)  # refuses a store that somebody else has planted
    return Past(main)


def file_time(main: Path) -> int:
    """Return the time by the clock of the filesystem, in nanoseconds."""
    os.utime(main / "tx")
    return os.stat(main / "tx").st_ctime_ns


def _recover_killed(root: Path, main: Path) -> None:
    """Roll back the call of a killed process, if it left one, or wait for the process that does."""
    until, pause = SYSTEM_CLOCK.monotonic() + _FOR_RECOVERY, threading.Event()
    with contextlib.suppress(FileNotFoundError):
        while os.stat(main / "tx" / "journal").st_size and SYSTEM_CLOCK.monotonic() < until:
            with Held(os.open(main / "lock", os.O_RDWR | os.O_NOFOLLOW)) as fd:
                is_held = locks.is_taken(fd)
            if is_held:
                pause.wait(0.002)
            else:
                with contextlib.suppress(WorkspaceLocked):  # another process was faster
                    HostFilesystem(root, store=main, shared=True, wait=0).close()


# The branches of a workspace


def branches_of(
    root: str | os.PathLike[str], *, store: str | os.PathLike[str] | None = None
) -> tuple[BranchInfo, ...]:
    """Return the branches of a workspace, oldest first. Takes no lock."""
    main = store_of(root, store)
    Note.read(main)
    found: list[BranchInfo] = []
    with contextlib.suppress(FileNotFoundError):
        for name in sorted(os.listdir(main / BRANCHES)):
            with contextlib.suppress(FileNotFoundError, NoSuchBranch):
                found.append(branch_named(root, name, store=main))
    return tuple(sorted(found, key=lambda each: each.began))


def branch_named(
    root: str | os.PathLike[str], name: str, *, store: str | os.PathLike[str] | None = None
) -> BranchInfo:
    """Return a branch of a workspace; raises NoSuchBranch if there is none of this name."""
    folder = store_of(root, store) / BRANCHES / name
    if NAME.fullmatch(name):
        with contextlib.suppress(FileNotFoundError):
            note = Note.read(folder)
            if note is not None:
                return Log(folder, note).read()
    raise NoSuchBranch(f"there is no branch {name!r}")


class BranchHistory:
    """The commits of a branch, as :class:`WorkspaceHistory` shows those of the workspace.

    It takes no lock and changes nothing. Close it after use.
    """

    def __init__(self, root: str | os.PathLike[str], info: BranchInfo) -> None:
        self.info = info
        path = Path(os.path.realpath(root))
        self._tree = Tree(path)
        self._base = base_of(path, info)
        disk = Reserved(path, store=info.path.parent.parent).without_hidden(self._base)
        self.points = points_of(disk, info.commits)

    def close(self) -> None:
        self._base.close()
        self._tree.close()

    def __enter__(self) -> BranchHistory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def calls(self) -> tuple[Committed, ...]:
        """Return the calls, oldest first."""
        return self.info.commits

    def newest_first(self) -> Iterator[Committed]:
        return reversed(self.info.commits)

    def changes(self, detail: Detail | None = None) -> Iterator[CallChanges]:
        """Yield what each call changed, newest first."""
        for call in self.newest_first():
            yield CallChanges(call, self.diff([call], detail=detail))

    def diff(
        self,
        calls: Iterable[Committed],
        *,
        reverse: bool = False,
        detail: Detail | None = None,
        raw: bool = False,
    ) -> tuple[FileChange, ...]:
        """Return what some calls, and those between them, changed together; or the reverse."""
        serials = {call.serial for call in calls}
        ends = [min(serials) - 1, max(serials)]
        if reverse:
            ends.reverse()
        return self.diff_between(ends[0], ends[1], detail=detail, raw=raw)

    def diff_between(
        self, one: int, other: int, *, detail: Detail | None = None, raw: bool = False
    ) -> tuple[FileChange, ...]:
        """Return what differs after one commit from after another, ordered by path."""
        before, after = self.points[one], self.points[other]
        paths = changed_between(before, after)
        return tuple(file_changes(paths, before, after, detail=detail, effort=Effort(raw=raw)))

    def changed_since(self, calls: Iterable[Committed]) -> dict[str, tuple[str, ...]]:
        """Return nothing: only its own calls change a branch."""
        return {}

    def obstacles(self, calls: Iterable[Committed]) -> dict[str, tuple[str, ...]]:
        """Return nothing, as ``changed_since``."""
        return {}

    def files_at(self, serial: int) -> FilesAt:
        """Return the files after so many commits."""
        return FilesAt(self, serial, self.points[serial], self._tree)

    @property
    def files(self) -> FilesAt:
        """The files as they are now."""
        return self.files_at(len(self.info.commits))

    # Compared with the workspace, or another branch

    def diff_from_workspace(self, *, detail: Detail | None = None) -> tuple[FileChange, ...]:
        """Return what differs here from the workspace as it is now."""
        return self._diff_from(Disk(self._tree), self._changed(), detail)

    def diff_from(
        self, other: BranchHistory, *, detail: Detail | None = None
    ) -> tuple[FileChange, ...]:
        """Return what differs here from another branch."""
        here, there = self._changed(), other._changed()
        changed = Changed(here.paths | there.paths, here.files | there.files)
        return self._diff_from(other.points[-1], changed, detail)

    def _diff_from(
        self, other: Look, changed: Changed, detail: Detail | None
    ) -> tuple[FileChange, ...]:
        here = self.points[-1]
        paths = all_changed(changed.paths, changed.paths, changed.files, other, here)
        return tuple(file_changes(paths, other, here, detail=detail, effort=Effort(raw=True)))

    def _changed(self) -> Changed:
        """Return where the branch may differ from the workspace."""
        own, since = self.points[0].differing(self.points[-1]), self._base.changed()
        return Changed(own.paths | since.paths, own.files | since.files)
