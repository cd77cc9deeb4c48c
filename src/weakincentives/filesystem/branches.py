"""Branches: a point in the history of a workspace and what differs from it, kept on disk.

A branch is a private view that outlives its process. Each commit appends one line to its log: the
steps that lead there, the digests of the contents, and what was at the changed paths before. The
contents are in the branch's own store. So a branch costs its difference, a kill loses at most the
commit in progress, and reading a branch reads its log.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

from weakincentives import locks
from weakincentives.call import ToolCall, call_under_way
from weakincentives.clock import SYSTEM_CLOCK, Clock
from weakincentives.errors import (
    FilesystemError,
    HistoryDamaged,
    NoSuchBranch,
    SnapshotExpired,
    WinkError,
    WorkspaceLocked,
)
from weakincentives.filesystem.base import Reads, worded
from weakincentives.filesystem.changes import Changes
from weakincentives.filesystem.diffs import Detail, FileChange, all_changed, file_changes
from weakincentives.filesystem.disk import HostFilesystem, PrivateView
from weakincentives.filesystem.entry import Entry
from weakincentives.filesystem.history import BRANCHES, Committed, Past, append_line
from weakincentives.filesystem.journal import JOURNAL
from weakincentives.filesystem.layers import (
    Changed,
    Cover,
    Disk,
    Layer,
    Look,
    Node,
    names_of,
    walk,
    xattrs_at,
)
from weakincentives.filesystem.merging import Merge, Prefer, has_content, node_at
from weakincentives.filesystem.paths import DEFAULT_ROOT, Parts, join_path
from weakincentives.filesystem.redo import MakeRedo, Redo, keep, pack, unpack
from weakincentives.filesystem.staging import Staging, State, Step, is_same, numbers
from weakincentives.filesystem.states import DirectoryAt
from weakincentives.filesystem.store import (
    DirectoryLock,
    Limits,
    Note,
    Objects,
    Store,
    checked_parts,
    location_of,
    write_whole,
)
from weakincentives.filesystem.tree import Held, Tree, remove_tree, xattrs_of
from weakincentives.filesystem.workspace import Place, Workspace
from weakincentives.state import no_links
from weakincentives.text import letters

R = TypeVar("R")

_VERSION = 1
_SEALS = "branch"
_NAME = re.compile("[a-z0-9][a-z0-9._-]{0,63}")
_FOR_RECOVERY = 10.0
"""Seconds to wait for another process that does it."""
_WHOLE = ("tx", "directory.lock", "open")
"""What a store has beside its note, which is there first."""
_KEPT = 1 << 20
"""Bytes; of a larger file the previous content is not kept, so that it cannot be text-merged."""
_KEPT_BELOW = 1000
"""Files in a directory that is moved or removed whose content is kept; others are only noted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchCommit:
    """A commit on a branch."""

    call_id: str
    tool: str
    time: float
    steps: tuple[Step, ...]
    was: Mapping[Parts, Entry | None]
    """What the branch saw at the changed paths before it first changed them."""
    reads: frozenset[Parts] = frozenset()
    undoes: tuple[str, ...] = ()
    redo: Mapping[str, Any] | None = None
    """What it holds for the session of the call, as JSON values."""

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(sorted({join_path(each) for step in self.steps for each in step.changed}))

    @property
    def back_to(self) -> int | None:
        """The number of commits whose state it has returned to, if it did nothing else."""
        if len(self.steps) == 1 and self.steps[0].method == "back":
            return cast("_Point", self.steps[0].content).serial
        return None

    @property
    def digests(self) -> set[str]:
        """The contents that it needs."""
        entries = (*(step.node for step in self.steps), *self.was.values())
        return {each.digest for each in entries if each is not None and each.digest is not None}


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
    def calls(self) -> tuple[Committed, ...]:
        """Its commits as entries of a history; serials count from 1."""
        return tuple(
            Committed(
                serial=number,
                call_id=each.call_id,
                tool=each.tool,
                time=each.time,
                paths=each.paths,
                size=0,
                undoes=each.undoes,
            )
            for number, each in enumerate(self.commits, 1)
        )

    @property
    def is_in_use(self) -> bool:
        """Whether a process, or this one, has it open."""
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


class _Log:
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
        lines = b""
        for text in (_head(info), *map(_encoded, info.commits)):
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
            commits = tuple(decoded_commit(each, self.objects, self._device) for each in texts[1:])
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


def _head(info: BranchInfo) -> bytes:
    values = {"wink_branch": _VERSION, "base": info.base, "began": info.began}
    return json.dumps(values | {"moment": info.moment, "about": dict(info.about)}).encode()


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
            step.content.serial if step.method == "back" else 0,
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


def decoded_commit(values: Mapping[str, Any], objects: Objects, device: int) -> BranchCommit:
    """Return the commit of :func:`commit_values`; raises ValueError if they are malformed."""
    return BranchCommit(
        call_id=str(values["call"]),
        tool=str(values["tool"]),
        time=float(values["time"]),
        steps=tuple(_step(each, objects, device) for each in values["steps"]),
        was={checked_parts(path): each and Entry.decode(each) for path, each in values["was"]},
        reads=frozenset(map(checked_parts, values["reads"])),
        undoes=tuple(map(str, values["undoes"])),
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
        content = _Point(int(serial))
    elif node is not None and node.digest is not None:
        content = partial(objects.read, node.digest)
    where = None if target is None else checked_parts(target)
    return Step(method, checked_parts(path), where, content, node, int(moment))


_METHODS = frozenset(
    {"write", "put_file", "make_directory", "remove", "rename", "copy", "add_name",
     "set_attributes", "back", "base"}
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Point:
    """The number of commits that precede a state of a branch."""

    serial: int


def add_points(points: list[Layer], commits: Iterable[BranchCommit], disk: Look) -> None:
    """Append the state after each commit to the states before it."""
    layer = points[-1]
    for commit in commits:
        for step in commit.steps:
            layer = next_layer(layer, step, points, disk)
        points.append(layer)


def next_layer(layer: Layer, given: Step, points: Sequence[Layer], disk: Look) -> Layer:
    """Return the state after a step."""
    step = _on_linked(given, layer)
    if step.method == "back":
        return points[cast("_Point", step.content).serial]
    if step.method == "base":
        return layer.take(step.parts, disk)
    layer = step.applied(layer)
    if step.target is not None and step.node is not None:
        layer = layer.put(step.target, Cover(step.node, step.content))
    return layer


def step_is_possible(step: Step, before: int) -> bool:
    """Tell whether a step can follow so many commits: it returns to none that comes later."""
    return step.method != "back" or 0 <= cast("_Point", step.content).serial <= before


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


# An open branch


class _Base(DirectoryAt):
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


class _BranchWorkspace(Workspace):
    """The state shared by a branch and its views; it never changes the directory."""

    def __init__(self, root: Path, store: Store, base: _Base, **options: Any) -> None:
        self.base = base
        self.points: list[Layer] = []
        """The state before the first commit, and after each."""
        super().__init__(root, store, limits=Limits(size=0), disk=base, **options)

    def use(self, base: _Base) -> None:
        """Let the branch begin at another state."""
        self.base = base
        self.disk = self.reserved.without_hidden(base)

    @contextlib.contextmanager
    def steady(self) -> Generator[None]:
        with self.base.steady():
            began_ns = self.now_ns()
            yield
            self.base.all_read_ns = began_ns

    def place(self) -> Place:
        return Place(len(self.points) - 1, self)

    def at(self, place: Place) -> Look:
        return self.points[place.serial]


class Branch(PrivateView):
    """A branch of a workspace: a filesystem of its own that starts as the workspace was.

    Use it wherever a filesystem can be used. Every call on it, and every direct change, is a commit
    that survives a kill. The workspace changes only when the branch is merged.

    ``Branch.create`` and ``Branch.open`` make one; one process at a time can have it open.
    """

    def __init__(
        self,
        root: Path,
        info: BranchInfo,
        *,
        of: BranchInfo | None = None,
        fill: Callable[[BranchInfo], BranchInfo] | None = None,
        prefix: str = DEFAULT_ROOT,
        wait: float | None = None,
        clock: Clock = SYSTEM_CLOCK,
        unprotected: Sequence[str] = (),
    ) -> None:
        store = Store(root, path=info.path, wait=wait)
        with contextlib.ExitStack() as opened:
            opened.callback(store.close)
            self._log = _Log(info.path, store.note)
            if not self._log.path.exists():
                if of is not None:
                    _copy_contents(of, info)
                self._log.create(info if fill is None else fill(info))
                # Now the history knows what the base needs: see the references of Past.
                now_ns = int(clock.time() * 1e9)
                os.utime(info.path.parent, ns=(now_ns, now_ns))
            info = self._log.read()
            base = base_of(root, info)
            opened.callback(base.close)
            workspace = _BranchWorkspace(root, store, base, clock=clock, unprotected=unprotected)
            opened.pop_all()
        self._set_up(workspace, prefix)
        self.store = info.path.parent.parent  # that of the workspace, for runs and sandboxes
        self._clock = clock
        self._place = None
        self._begin(info)
        self._look = self._edit = self._staging = Staging(workspace.disk, store)
        self._branched = workspace
        self._show(info.commits)

    def _begin(self, info: BranchInfo) -> None:
        self.info = info
        self._began_ns = int(info.began * 1e9) + 1000  # as exact as a float is
        self._was: dict[Parts, Entry | None] = {}
        self._whole: set[Parts] = set()
        """The paths among them of which it noted everything below."""
        self._logged: set[Parts] = set()
        """What it read before its last commit."""
        self._note_commits(info.commits)
        self._reads = Reads(touched=set(self._logged))

    # Making, opening

    @classmethod
    def create(
        cls,
        root: str | os.PathLike[str],
        name: str = "",
        *,
        at: int | None = None,
        of: BranchInfo | None = None,
        commits: int | None = None,
        about: Mapping[str, Any] | None = None,
        store: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> Branch:
        """Make a branch of a workspace as it is now, or as it was after a call.

        Args:
            root: The workspace.
            name: Lower-case letters, digits, dots and dashes; by default some letters.
            at: The serial of the call in the history.
            of: Another branch: the new one begins as that is.
            commits: How many of its commits the new one has; all by default.
            about: What to note in its log, as JSON values.
            store: The store of the workspace; beside it by default.
        """
        root = Path(os.path.realpath(root))
        info = new_branch(root, name, at=at, about=about, store=store)
        if of is not None:
            # What a commit holds for the session of a run stays with that run.
            kept = tuple(replace(each, redo=None) for each in of.commits[:commits])
            info = replace(info, base=of.base, began=of.began, moment=of.moment, commits=kept)
        return cls(root, info, of=of, **options)

    @classmethod
    def open(
        cls,
        root: str | os.PathLike[str],
        name: str,
        *,
        store: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> Branch:
        """Open a branch.

        Raises:
            NoSuchBranch: There is none of this name.
            WorkspaceLocked: Another process has it open.
        """
        root = Path(os.path.realpath(root))
        return cls(root, branch_named(root, name, store=store), **options)

    def close(self) -> None:
        self._branched.base.close()
        super().close()

    @property
    def name(self) -> str:
        return self.info.name

    @property
    def state(self) -> Layer:
        """Its files as they are now."""
        return self._staging.layer

    @property
    def contents(self) -> Objects:
        """The contents that its commits need."""
        return self._log.objects

    @property
    def seen(self) -> Mapping[Parts, Entry | None]:
        """What it saw at paths before it first changed them."""
        return self._was

    # Committing

    def _step(self, do: Callable[[], R]) -> R:
        return self._atomically(do, call_under_way())

    def _atomically(
        self,
        do: Callable[[], R],
        call: ToolCall | None = None,
        undoes: Sequence[str] = (),
        redo: MakeRedo | None = None,
    ) -> R:
        before = self._staging.state
        try:
            result = do()
            if self._staging.state.steps:
                self._commit(self._staging.state.steps, call, undoes, redo)
            return result
        except BaseException:
            self._staging.state = before
            raise

    def _commit(
        self,
        steps: Sequence[Step],
        call: ToolCall | None,
        undoes: Sequence[str],
        redo: MakeRedo | None,
    ) -> None:
        number = len(self.info.commits) + 1
        was = dict(self._seen(steps))  # first: to store what is moved reads it
        commit = BranchCommit(
            call_id=call.id if call else f"undo_{number}" if undoes else f"direct_{number}",
            tool="" if call is None else call.name,
            time=self._clock.time(),
            steps=tuple(self._all_stored(steps)),
            was=was,
            reads=frozenset(self._reads.touched - self._logged if self._reads else ()),
            undoes=tuple(undoes),
        )
        if redo is not None:
            record = pack(redo(), self._log.objects, safe=self._branched.store.safe)
            commit = replace(commit, redo=record.get("redo"))
        self._log.append(commit)
        self.info = replace(self.info, commits=(*self.info.commits, commit))
        self._note_commits([commit])
        self._show([commit])

    def _note_commits(self, commits: Iterable[BranchCommit]) -> None:
        """Note what commits read, and what they saw before they changed it."""
        for commit in commits:
            self._logged |= commit.reads
            self._whole.update(*map(_wholes, commit.steps))
            for parts, entry in commit.was.items():
                self._was.setdefault(parts, entry)

    def _show(self, commits: Iterable[BranchCommit]) -> None:
        """Let the branch show some more commits."""
        points = self._branched.points
        if not points:
            points.append(Layer(self._branched.disk))
        add_points(points, commits, self._branched.disk)
        self._staging.state = State(points[-1])

    def _all_stored(self, steps: Iterable[Step]) -> Iterator[Step]:
        layer = self._branched.points[-1]
        placed: dict[int, Parts] = {}
        for given in steps:
            step = given
            if step.method == "put_file" and step.node is not None and step.node.links > 1:
                # What a command hard-linked stays linked.
                first = placed.setdefault(step.node.ino, step.parts)
                if first != step.parts:
                    step = Step("add_name", first, step.parts, moment=step.moment)
            yield self._stored(step, layer)
            if step.method != "back":
                layer = step.applied(layer)

    def _stored(self, step: Step, layer: Layer) -> Step:
        """Return a step whose content is in the branch's store; ``layer`` is the state before."""
        objects, node = self._log.objects, step.node
        if step.method in ("rename", "copy"):
            # What is moved stays as it is, whatever a person does with the original.
            node = layer.node(step.parts)
            if node is None or node.kind != "file" or node.links > 1 or node.size > _KEPT:
                return step
            digest = node.digest or objects.add(layer.read(step.parts))
            node = node._replace(digest=digest, xattrs=xattrs_at(layer, step.parts))
            return step._replace(content=partial(objects.read, digest), node=node)
        if node is None or step.method not in ("write", "put_file"):
            return step
        if step.method == "write":
            data = step.content.read_bytes() if isinstance(step.content, Path) else step.content
            node = node._replace(digest=objects.add(data), ctime_ns=0)
        elif node.kind == "file" and node.digest is None:
            with Held(os.open(step.content, os.O_RDONLY | os.O_NOFOLLOW)) as fd:
                # Its inode is free soon, and may then be another file's.
                ino = next(numbers)
                node = node._replace(
                    xattrs=xattrs_of(fd), digest=objects.add(fd), ino=ino, device=0
                )
        if node.digest is None:
            return step._replace(content=None, node=node)
        return step._replace(content=partial(objects.read, node.digest), node=node)

    def _seen(self, steps: Iterable[Step]) -> Iterator[tuple[Parts, Entry | None]]:
        """Yield what was at the changed paths, and keep the contents of files."""
        base, known = self._branched.disk, self._was
        changed = set[Parts]().union(*(step.changed for step in steps))
        wholes = set[Parts]().union(*map(_wholes, steps))
        # Directories that are made on the way.
        above = {parts[:depth] for parts in changed for depth in range(1, len(parts))}
        nodes = {parts: node_at(base, parts) for parts in sorted(above | changed)}
        linked = {n.file for n in nodes.values() if n and n.file is not None and n.links > 1}
        for parts, node in nodes.items():
            if node is None and parts not in known:
                yield parts, None
        found = [(parts, nodes[parts]) for parts in changed - wholes]
        found += walk(base, sorted(wholes))
        names = names_of(base, linked, [()]) if linked else set[Parts]()
        found += [(name, base.node(name)) for name in sorted(names)]
        for number, (parts, node) in enumerate(found):
            if node is not None and parts not in known:
                yield parts, self._noted(base, parts, node, kept=number < _KEPT_BELOW)

    def _noted(self, base: Look, parts: Parts, node: Node, *, kept: bool) -> Entry:
        is_new = node.kind != "directory" and node.ctime_ns > self._began_ns
        if is_new and not self._branched.base.was_seen(parts, node):
            # Someone changed it after the fork, and the branch has not read it since: whatever the
            # branch does there must not replace it.
            return node._replace(ino=0, ctime_ns=0)
        return self._kept(base, parts, node) if kept else node

    def _kept(self, base: Look, parts: Parts, node: Node) -> Entry:
        if node.kind == "link":
            with contextlib.suppress(OSError):
                return node._replace(target=base.link_target(parts))
        if node.kind == "file" and node.size <= _KEPT:
            with contextlib.suppress(OSError):
                return node._replace(digest=self._log.objects.add(base.read(parts)))
        return node

    # Snapshots

    def snapshot_here(self) -> object:
        with self._lock:
            return self._workspace.place()

    def _restore(self, token: object) -> None:
        place = self._own_place(token)
        if place.expired:
            raise SnapshotExpired("an older snapshot was restored since this one was taken")
        if place.serial != len(self._branched.points) - 1:
            self._atomically(partial(self._go_to, place), call_under_way())

    def _go_to(self, place: Place, state: State | None = None) -> None:
        layer = self._branched.points[place.serial] if state is None else state.layer
        steps = () if state is None else state.steps
        back = Step("back", (), content=_Point(place.serial))
        self._staging.state = State(layer, (*self._staging.state.steps, back, *steps))

    def fork(self) -> HostFilesystem:
        with self._workspace.lock, self._lock:
            return _BranchView(self)

    def fork_in_place(self) -> HostFilesystem:
        return self.fork()

    # History

    def _check_has_history(self) -> None:
        pass

    def history(self) -> tuple[Committed, ...]:
        return self.info.calls

    def newest_first(self) -> Iterator[Committed]:
        return reversed(self.info.calls)

    @property
    def holds_redo(self) -> bool:
        return True

    def redo_of(self, call: Committed) -> Redo | None:
        return _redo_of(self.info.commits[call.serial - 1], self._log.objects)

    def at(self, number: int) -> Look:
        """Return the files after so many commits of the branch."""
        return self._branched.points[number]

    def diff(self, call_id: str) -> str:
        from weakincentives.filesystem.diffs import diff_text

        return diff_text(self.changes_of(self._serial_of(call_id)))

    def changes_of(self, number: int, detail: Detail | None = None) -> tuple[FileChange, ...]:
        """Return what a commit changed, file by file."""
        before, after = self._branched.points[number - 1 : number + 1]
        return tuple(file_changes(changed_between(before, after), before, after, detail=detail))

    def _changed_here(self) -> tuple[list[Parts], Look, Look]:
        points = self._branched.points
        return changed_between(points[0], points[-1]), points[0], points[-1]

    def _serials_of(self, calls: Sequence[str | Committed]) -> list[int]:
        known = {each.call_id: number for number, each in enumerate(self.info.commits, 1)}
        for each in calls:
            if isinstance(each, str) and each not in known:
                raise LookupError(f"the branch {self.name!r} has no call {each!r}")
        return [known[each] if isinstance(each, str) else each.serial for each in calls]

    def _go_back(self, serial: int, call: ToolCall | None = None) -> tuple[str, ...]:
        """Return to the state after so many commits; that is itself a commit."""
        undoes = [each.call_id for each in self.info.commits[serial:]]
        self._return_to(serial, call or call_under_way(), undoes)
        return ()

    def _return_to(self, serial: int, call: ToolCall | None, undoes: Sequence[str]) -> None:
        self._atomically(partial(self._go_to, Place(serial, self._workspace)), call, undoes)

    def undo(
        self,
        *calls: str | Committed,
        force: bool = False,
        leave_edits: bool = False,
        call: ToolCall | None = None,
    ) -> tuple[str, ...]:
        """Undo the newest calls of the branch; that is itself a commit.

        Raises:
            FilesystemError: They are not the newest of those that are not undone.
        """
        if not calls:
            return ()
        with self._workspace.lock, self._lock:
            self.check_writable("undo")
            serial = self._serial_before(self._serials_of(calls))
            undoes = [each if isinstance(each, str) else each.call_id for each in calls]
            self._return_to(serial, call or call_under_way(), undoes)
            return ()

    def _serial_before(self, serials: Sequence[int]) -> int:
        """Return the commit whose state is the present one without some commits."""
        left, here = set(serials), len(self.info.commits)
        while left:
            commit = self.info.commits[here - 1]
            if here in left:
                left.remove(here)
                here -= 1
            elif commit.back_to is not None:  # an undo: what it has undone does not count
                here = commit.back_to
            else:
                raise FilesystemError(
                    "Only the newest calls of a branch can be undone: undo"
                    f" {commit.call_id}{f' ({commit.tool})' if commit.tool else ''} first, or too"
                )
        return here

    # Merging

    @property
    def has_changes(self) -> bool:
        points = self._branched.points
        differing = points[0].differing(points[-1])
        return bool(differing.paths or differing.files)

    def plan(self, theirs: Look, *, strict: bool = False, prefer: Prefer | None = None) -> Merge:
        """Return what merging into a directory would change, and which paths conflict.

        ``strict`` counts files that the branch read and others have changed since as conflicts.
        """
        paths, base, ours = self._changed_here()
        reads = self._reads.touched - {()} if strict and self._reads is not None else ()
        return Merge(
            base=base,
            ours=ours,
            theirs=theirs,
            was=self._was,
            wholes=self._whole,
            objects=self._log.objects,
            prefer=prefer,
            since_ns=self._began_ns,
        ).plan(paths, reads)

    def merge_into(
        self, files: HostFilesystem, *, strict: bool = False, prefer: Prefer | None = None
    ) -> tuple[str, ...]:
        """Merge everything into the workspace, in one transaction; returns the changed paths.

        Lines that others changed elsewhere in the same file are kept. The branch stays as it is
        until ``begin_anew``; to merge it again changes nothing.

        Args:
            files: The workspace, or a call's view of it.
            strict: Files that the branch read and others have changed since are conflicts.
            prefer: Whose version of a conflicting path to take.

        Raises:
            MergeConflict: Both changed the same places; nothing is merged.
        """

        def act(changes: Changes) -> tuple[str, ...]:
            plan = self.plan(Disk(changes.tree), strict=strict, prefer=prefer)
            plan.check()
            steps = [step for commit in self.info.commits for step in commit.steps]
            if plan.diverged or not self._can_repeat(steps, plan):
                plan.apply(changes)
            elif plan.paths:  # as it was done: moves stay moves, and hard links stay linked
                staging = Staging(self._staging.base, changes.store)
                staging.state = State(self._staging.layer, tuple(steps))
                staging.replay(changes, _never)
            return plan.paths

        name = f"merge_{self.name}_{os.urandom(3).hex()}"
        try:
            return files.transact(act, ToolCall("merge", {"branch": self.name}, name))
        except OSError as error:
            if isinstance(error, WinkError):
                raise
            raise worded(error, "merged") from error

    def _can_repeat(self, steps: Iterable[Step], plan: Merge) -> bool:
        """Whether the same steps lead to the same files in the directory."""
        layer = Layer(plan.theirs)
        for step in steps:
            if step.method in ("back", "base") or not self._can_do(step, layer, plan):
                return False
            layer = step.applied(layer)
        return True

    def _can_do(self, step: Step, layer: Layer, plan: Merge) -> bool:
        """Whether a step finds in the directory what it changes, removes, moves or copies."""
        if step.method in ("write", "put_file", "make_directory"):
            return True
        if node_at(layer, step.parts) is None:  # the base of a rebased branch may not have it
            return False
        if step.method not in ("rename", "copy"):
            return True
        if step.node is not None:
            return has_content(layer, step.parts, step.node)
        return is_same(plan.base, plan.theirs, step.parts)

    @contextlib.contextmanager
    def merging(self, *, strict: bool = False, prefer: Prefer | None = None) -> Generator[Merge]:
        """Yield what merging into the workspace as it is now would change; it changes nothing."""
        now = base_of(self.root, self._based_on_now())
        try:
            yield self.plan(now, strict=strict, prefer=prefer)
        finally:
            now.close()

    def _based_on_now(self) -> BranchInfo:
        serial, now_ns = point_now(self.root, self.info.path.parent.parent)
        return replace(self.info, base=serial, began=now_ns / 1e9, moment=now_ns)

    def begin_anew(self) -> None:
        """Begin again from the workspace as it is now, without changes.

        For a branch that was merged: what it has changed since would be lost.
        """
        self._begin_anew(replace(self._based_on_now(), commits=()))

    def rebase(
        self,
        *,
        strict: bool = False,
        prefer: Prefer | None = None,
        tell: Callable[[Merge], None] | None = None,
    ) -> tuple[str, ...]:
        """Move the branch to the workspace as it is now; returns the paths others had changed too.

        The changes of the branch stay, merged with those of others.

        Args:
            strict: Files that the branch read and others have changed since are conflicts.
            prefer: Whose version of a conflicting path to take.
            tell: Is told the conflicts, and what was changed there, before anything is done.

        Raises:
            MergeConflict: Both changed the same places; nothing is rebased.
        """
        info = self._based_on_now()
        base = base_of(self.root, info)
        try:
            plan = self.plan(base, strict=strict, prefer=prefer)
            plan.check()
            if tell is not None:
                tell(plan)
            repeated = self._repeated(base)
            steps = tuple(self._stored(step, repeated) for step in plan.steps(repeated))
            was = {parts: self._now(base, parts) for parts in self._was}
        finally:
            base.close()
        commit = BranchCommit(
            call_id=f"rebase_{len(self.info.commits) + 1}",
            tool="rebase",
            time=self._clock.time(),
            steps=steps,
            was=was,
        )
        own = [replace(each, was={}, reads=frozenset()) for each in self.info.commits]
        self._begin_anew(replace(info, commits=(*own, commit)))
        return commit.paths

    def _repeated(self, base: Look) -> Layer:
        """Return what the branch's commits lead to from another state."""
        points = [Layer(base)]
        add_points(points, self.info.commits, base)
        return points[-1]

    def _now(self, base: Look, parts: Parts) -> Entry | None:
        node = node_at(base, parts)
        return None if node is None else self._kept(base, parts, node)

    def _begin_anew(self, info: BranchInfo) -> None:
        workspace = self._branched
        base = base_of(self.root, info)
        for commit in self.info.commits if not info.commits else ():
            keep(self.store, _redo_of(commit, self._log.objects))
        self._log.create(info)
        workspace.base.close()
        workspace.use(base)
        self._begin(info)
        self._staging.base = workspace.disk
        workspace.points.clear()
        self._show(info.commits)


def _redo_of(commit: BranchCommit, objects: Objects) -> Redo | None:
    return None if commit.redo is None else unpack({"redo": commit.redo}, objects)


def _wholes(step: Step) -> set[Parts]:
    """Return the changed paths that stand for everything below them."""
    return set() if step.method in ("set_attributes", "make_directory") else step.changed


class _BranchView(PrivateView):
    """A call's view of a branch."""

    def __init__(self, branch: Branch) -> None:
        super().__init__(branch, branch.state, None)
        self._branch = branch
        self._began_ns = self._workspace.now_ns()

    def _changed_by_calls(self) -> Changed:
        # What someone does there is found when the branch is merged.
        return Changed(set(self._branch.seen), set())


_DROPPED = ".dropped-"
"""Begins the name of a branch that is being removed. No branch can have such a name."""


def _copy_contents(branch: BranchInfo, other: BranchInfo) -> None:
    """Copy the contents that the commits of another branch need."""
    source, target = Objects(branch.path / "objects"), Objects(other.path / "objects")
    for digest in set[str]().union(*(each.digests for each in other.commits)):
        with Held(source.open(digest)) as fd:
            target.add(fd)


def _never(place: object) -> None:
    raise AssertionError("a branch that went back is not replayed")


def branches_of(
    root: str | os.PathLike[str], *, store: str | os.PathLike[str] | None = None
) -> tuple[BranchInfo, ...]:
    """Return the branches of a workspace, oldest first. Takes no lock."""
    main = location_of(Path(root)) if store is None else Path(os.path.realpath(store))
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
    main = location_of(Path(root)) if store is None else Path(os.path.realpath(store))
    folder = main / BRANCHES / name
    if _NAME.fullmatch(name):
        with contextlib.suppress(FileNotFoundError):
            note = Note.read(folder)
            if note is not None:
                return _Log(folder, note).read()
    raise NoSuchBranch(f"there is no branch {name!r}")


def drop_branch(
    root: str | os.PathLike[str], name: str, *, store: str | os.PathLike[str] | None = None
) -> None:
    """Remove a branch and everything that only it holds.

    Raises:
        WorkspaceLocked: A process has it open.
    """
    info = branch_named(root, name, store=store)
    opened = Store(Path(root), path=info.path)  # takes its lock
    try:
        # Away first: a half-removed branch must not be found.
        gone = info.path.with_name(f"{_DROPPED}{name}-{os.urandom(4).hex()}")
        os.rename(info.path, gone)
    finally:
        opened.close()
    for each in info.path.parent.glob(f"{_DROPPED}*"):  # also what a kill has left
        remove_tree(each)


def new_branch(
    root: Path,
    name: str = "",
    *,
    at: int | None = None,
    moment: int = 0,
    about: Mapping[str, Any] | None = None,
    store: str | os.PathLike[str] | None = None,
) -> BranchInfo:
    """Return a branch to be made, and make sure that there is a store for it.

    It begins with the workspace as it is now, or after the call ``at`` and at a moment after it.
    """
    main = location_of(root) if store is None else Path(os.path.realpath(store))
    make_store(root, main)
    name = name or _free_name(main)
    if not _NAME.fullmatch(name):
        raise FilesystemError(
            f"{name!r} cannot be the name of a branch: use lower-case letters, digits, dots"
            " and dashes"
        )
    folder = main / BRANCHES / name
    if (folder / "log").exists():  # without one, a kill has cut its making short
        raise FilesystemError(f"There is already a branch {name!r}")
    at, moment = point_now(root, main) if at is None else (at, moment)
    folder.parent.mkdir(mode=0o700, exist_ok=True)
    return BranchInfo(
        name=name,
        base=at,
        began=(moment or file_time(main)) / 1e9,
        moment=moment,
        about=dict(about or {}),
        path=folder,
    )


def base_of(root: Path, info: BranchInfo) -> _Base:
    """Return the base of a branch."""
    main = info.path.parent.parent
    note = Note.read(main)
    assert note is not None
    past, recover = Past(main, note.seals(JOURNAL)), partial(recover_killed, root, main)
    moment = info.moment or None
    return _Base(main, past, Disk(Tree(root)), info.base, recover=recover, moment=moment)


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
    recover_killed(root, main)
    note = Note.read(main)
    assert note is not None
    lock = DirectoryLock(main)
    try:
        with lock.reading():
            serial = last_serial(main, note)
    finally:
        lock.close()
    return serial, file_time(main)


def last_serial(main: Path, note: Note) -> int:
    """Return the newest serial in the history of a workspace."""
    return Past(main, note.seals(JOURNAL)).last


def file_time(main: Path) -> int:
    """Return the time as files have it, in nanoseconds: one that changes later has a later one."""
    os.utime(main / "tx")
    return os.stat(main / "tx").st_ctime_ns


def recover_killed(root: Path, main: Path) -> None:
    """Roll back the call of a killed process, if it left one, or wait for the process that does."""
    until, pause = SYSTEM_CLOCK.monotonic() + _FOR_RECOVERY, threading.Event()
    with contextlib.suppress(FileNotFoundError):
        while os.stat(main / "tx" / "journal").st_size and SYSTEM_CLOCK.monotonic() < until:
            with Held(os.open(main / "lock", os.O_RDWR | os.O_NOFOLLOW)) as fd:
                is_held = locks.is_taken(fd)
            if is_held:
                pause.wait(0.002)
            else:
                with contextlib.suppress(WorkspaceLocked):  # by one that was faster
                    HostFilesystem(root, store=main, shared=True, wait=0).close()


def _free_name(main: Path) -> str:
    while True:
        name = letters(os.urandom(3))
        if not (main / BRANCHES / name).exists():
            return name
