"""Three-way merges: what a branch changed, applied to a directory that has changed since."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from weakincentives.core.clock import SYSTEM_CLOCK
from weakincentives.core.programs import SYSTEM_PATH, find_program
from weakincentives.errors import MergeConflict
from weakincentives.filesystem.changes import Changes
from weakincentives.filesystem.diffs import FileChange, file_changes
from weakincentives.filesystem.entry import Entry, apply_entry, create, new_file
from weakincentives.filesystem.layers import Forward, Look, Node, node_at, walk, xattrs_at
from weakincentives.filesystem.paths import Parts, join_path, outermost, shown
from weakincentives.filesystem.staging import Step
from weakincentives.filesystem.store import Objects
from weakincentives.filesystem.swap import Seen
from weakincentives.filesystem.tree import write_all

Prefer = Literal["branch", "workspace"]
"""Whose version of a conflicting path is taken."""

_MOST_TEXT = 4 << 20
"""Bytes; a larger file is never merged line by line."""
_PATIENCE = 30.0
_TICK_NS = 2_000_000_000
"""Within this, two changes of a file may have the same time on some filesystems."""


class _Side:
    """What is at a path: in the branch, in the directory, or before both."""

    def __init__(
        self, node: Node | None, look: Look | None, parts: Parts, data: bytes | None = None
    ):
        self.node = node
        self._look = look
        """None if the content is not known."""
        self._parts = parts
        self._data = data
        self.is_fresh = False
        """Whether it was changed when it was looked at: then its status proves nothing."""

    @property
    def kind(self) -> str | None:
        return None if self.node is None else self.node.kind

    @property
    def mode(self) -> int:
        return 0 if self.node is None else self.node.mode

    @property
    def is_known(self) -> bool:
        """Whether the content can be told."""
        digest = None if self.node is None else self.node.digest
        return self._look is not None or self._data is not None or digest is not None

    @property
    def data(self) -> bytes:
        """A file's content or a link's text; raises OSError if it is gone."""
        if self._data is None:
            if self._look is None:
                raise FileNotFoundError(errno.ENOENT, "not kept", join_path(self._parts))
            if self.kind == "link":
                self._data = os.fsencode(self._look.link_target(self._parts))
            else:
                self._data = self._look.read(self._parts)
        return self._data

    @property
    def digest(self) -> str:
        known = None if self.node is None else self.node.digest
        return known or hashlib.sha256(self.data).hexdigest()

    def is_like(self, other: _Side) -> bool:
        """Compare kind, content and permissions."""
        if self.node is None or other.node is None:
            return self.node is other.node
        if (self.kind, self.mode) != (other.kind, other.mode) and self.kind != "link":
            return False
        return self.has_content_of(other)

    def has_content_of(self, other: _Side) -> bool:
        """Compare contents; an unknown one differs, unless it is the very same file."""
        if self.node is None or other.node is None or self.kind != other.kind:
            return self.node is other.node
        if self.kind not in ("file", "link"):
            return True
        known = self.node.ctime_ns and self.node.ino == other.node.ino
        is_fresh = self.is_fresh or other.is_fresh
        if known and self.node.ctime_ns == other.node.ctime_ns and not is_fresh:
            return True
        if self.kind == "file" and self.node.size != other.node.size:
            return False
        return self.is_known and other.is_known and self.digest == other.digest


class _Put(NamedTuple):
    """An entry to put into the directory."""

    parts: Parts
    node: Entry
    data: bytes | None = None
    """The content of a merged file; other files have the branch's."""


class _Before(Forward):
    """What a branch saw at paths before it first changed them."""

    def __init__(self, base: Look, was: Mapping[Parts, Entry | None], objects: Objects) -> None:
        self.look = base
        self._was = was
        self._objects = objects

    def node(self, parts: Parts) -> Node | None:
        return self._was[parts] if parts in self._was else self.look.node(parts)

    def read(self, parts: Parts) -> bytes:
        seen = self._was.get(parts)
        if seen is None or seen.digest is None:
            return self.look.read(parts)
        return self._objects.read(seen.digest)

    def link_target(self, parts: Parts) -> str:
        seen = self._was.get(parts)
        return self.look.link_target(parts) if seen is None else seen.target or ""


@dataclass(slots=True, kw_only=True)
class Merge:
    """A merge of a branch into a directory, planned before anything changes."""

    base: Look
    ours: Look
    """The branch."""
    theirs: Look
    """The directory as it is now."""
    was: Mapping[Parts, Entry | None]
    """What the branch saw at paths before it first changed them."""
    wholes: AbstractSet[Parts] = frozenset()
    """The paths with everything below them in ``was``."""
    objects: Objects
    """The contents of ``was``."""
    prefer: Prefer | None = None
    since_ns: int = 0
    """When the branch began."""
    conflicts: dict[Parts, str] = field(default_factory=dict[Parts, str])
    """Why a path cannot be merged; with a preference, where it decides."""
    diverged: bool = False
    """Whether the directory has changed at paths that the branch changed."""
    seen: dict[Parts, Seen] = field(default_factory=dict[Parts, Seen])
    """What was in the directory where the merge may replace something."""
    _planned_ns: int = 0
    _theirs: list[Parts] = field(default_factory=list[Parts])
    """Where the directory's version is taken."""
    _removed: set[Parts] = field(default_factory=set[Parts])
    _put: dict[Parts, _Put] = field(default_factory=dict[Parts, _Put])

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths that merging changes, sorted."""
        return tuple(sorted(map(join_path, {*self._removed, *self._put})))

    def plan(self, paths: Iterable[Parts], reads: Iterable[Parts] = ()) -> Merge:
        """Decide about each path that the branch changed, and check those that it read."""
        self._planned_ns = int(SYSTEM_CLOCK.time() * 1e9)
        known = set(paths)
        for parts in sorted(known):
            self._decide(parts)
        self._check_added()
        self._check_above()
        for parts in set(reads) - known:
            self._check_read(parts)
        self.diverged = self.diverged or bool(self.conflicts)
        if self.prefer == "workspace":
            self._leave_conflicts()
        return self

    def check(self) -> None:
        """Raise MergeConflict if there are conflicts, and no preference."""
        if self.conflicts and self.prefer is None:
            paths = sorted(self.conflicts)
            told = "; ".join(f"{shown(join_path(p))} {self.conflicts[p]}" for p in paths[:5])
            more = f"; and {len(paths) - 5} more" if len(paths) > 5 else ""
            raise MergeConflict(
                f"The branch cannot be merged: {told}{more}", [join_path(p) for p in paths]
            )

    def _side(self, look: Look, parts: Parts) -> _Side:
        return _Side(node_at(look, parts), look, parts)

    def _before(self, parts: Parts) -> _Side:
        if parts not in self.was:
            # The base also shows what a person added later.
            above = [parts[:depth] for depth in range(1, len(parts))]
            if any(each in self.wholes or self.was.get(each, _UNKNOWN) is None for each in above):
                return _Side(None, None, parts)
            return self._side(self.base, parts)
        entry = self.was[parts]
        data = None
        if entry is not None and entry.kind == "link":
            data = os.fsencode(entry.target or "")
        elif entry is not None and entry.digest is not None:
            with contextlib.suppress(OSError):
                data = self.objects.read(entry.digest)
        side = _Side(entry, None, parts, data)
        # The branch has looked at it since it began, not before.
        is_late = entry is not None and entry.ctime_ns > self.since_ns - _TICK_NS
        side.is_fresh = data is not None and is_late
        return side

    def conflicting_changes(self) -> tuple[list[FileChange], list[FileChange]]:
        """Return what the branch and what others have changed at the conflicting paths."""
        paths, before = sorted(self.conflicts), _Before(self.base, self.was, self.objects)
        return file_changes(paths, before, self.ours), file_changes(paths, before, self.theirs)

    def _decide(self, parts: Parts) -> None:
        before = self._before(parts)
        ours, theirs = self._side(self.ours, parts), self._side(self.theirs, parts)
        self._see(parts, theirs)
        is_changed = not theirs.is_like(before)
        self.diverged = self.diverged or is_changed
        if ours.is_like(before):
            if is_changed:
                self._theirs.append(parts)
        elif not is_changed:
            self._take(parts, ours, theirs)
        elif ours.is_like(theirs):
            pass
        elif ours.kind == theirs.kind == "directory":
            self._merge_directories(parts, before, ours, theirs)
        elif ours.kind == theirs.kind == before.kind == "file":
            self._merge_files(parts, before, ours, theirs)
        else:
            self._conflict(parts, _difference(before, ours, theirs), ours, theirs)

    def _see(self, parts: Parts, theirs: _Side) -> None:
        """Note what is at a path now; the content, too, if it may change without another time."""
        node, digest = theirs.node, None
        if node is not None and node.kind == "file":
            changed = max(node.mtime_ns, node.ctime_ns)
            if abs(self._planned_ns - changed) < _TICK_NS:
                with contextlib.suppress(OSError):
                    digest = hashlib.sha256(theirs.data).hexdigest()
        self.seen[parts] = Seen(node, digest)

    def _conflict(self, parts: Parts, why: str, ours: _Side, theirs: _Side) -> None:
        self.conflicts[parts] = why
        self._take(parts, ours, theirs)

    def _take(self, parts: Parts, ours: _Side, theirs: _Side) -> None:
        if ours.node is not None:
            self._put[parts] = _Put(parts, ours.node)
        elif theirs.node is not None:
            self._removed.add(parts)

    def _merge_directories(self, parts: Parts, before: _Side, ours: _Side, theirs: _Side) -> None:
        if before.kind != "directory" or ours.mode == before.mode:
            return
        if theirs.mode != before.mode:
            self._conflict(parts, _MODES, ours, theirs)
        else:
            self._take(parts, ours, theirs)

    def _merge_files(self, parts: Parts, before: _Side, ours: _Side, theirs: _Side) -> None:
        assert theirs.node is not None
        if ours.mode != theirs.mode and before.mode not in (ours.mode, theirs.mode):
            self._conflict(parts, _MODES, ours, theirs)
            return
        mode = theirs.mode if ours.mode == before.mode else ours.mode
        data = self._merged(before, ours, theirs)
        if data is None:
            why = "was changed in the same places by the branch and by others"
            self._conflict(parts, why, ours, theirs)
        elif (mode, data) != (theirs.mode, theirs.data):
            self._put[parts] = _Put(parts, theirs.node._replace(mode=mode, size=len(data)), data)

    def _merged(self, before: _Side, ours: _Side, theirs: _Side) -> bytes | None:
        try:
            if ours.has_content_of(before) or ours.has_content_of(theirs):
                return theirs.data
            if theirs.has_content_of(before):
                return ours.data
            return merged_text(before.data, ours.data, theirs.data)
        except OSError:
            return None

    def _check_added(self) -> None:
        """Find what others added where the branch has no directory any more."""
        tops = {put.parts for put in self._put.values() if put.node.kind != "directory"}
        for parts in outermost(tops | self._removed):
            for inner, node in walk(self.theirs, [parts]):
                self.seen.setdefault(inner, Seen(node))
                if inner not in self._removed and inner not in self._put:
                    self.conflicts[inner] = "was added in a directory that the branch removes"

    def _check_above(self) -> None:
        """Find where others have no directory for what the branch puts there."""
        checked: dict[Parts, bool] = {(): True}
        for parts in sorted(self._put):
            for depth in range(1, len(parts)):
                above = parts[:depth]
                if above not in checked:
                    node = node_at(self.theirs, above)
                    self.seen.setdefault(above, Seen(node))
                    is_free = node is None or node.kind == "directory" or above in self._removed
                    checked[above] = is_free or above in self._put
                if not checked[above]:
                    self.conflicts[parts] = f"is below {shown(join_path(above))}, a file now"
                    break

    def _check_read(self, parts: Parts) -> None:
        before, now = self._before(parts), self._side(self.theirs, parts)
        # A later change by a person shows in the base, too.
        is_new = before.node is not None and before.node.ctime_ns > self.since_ns > 0
        if before.kind != "directory" and (is_new or not now.has_content_of(before)):
            self.conflicts[parts] = "was read by the branch and has changed since"

    def _leave_conflicts(self) -> None:
        """Leave conflicting paths as they are in the directory, with what is around them."""
        for parts in list(self.conflicts):
            self._theirs.append(parts)
            above = [parts[:depth] for depth in range(1, len(parts))]
            for place in above:
                put = self._put.get(place)
                if place in self._removed or (put is not None and put.node.kind != "directory"):
                    self._leave(place)
            self._leave(parts)
            sides = self._side(self.ours, parts), self._side(self.theirs, parts)
            if any(side.kind != "directory" for side in sides):
                for place in [*self._put, *self._removed]:
                    if place[: len(parts)] == parts:
                        self._leave(place)

    def _leave(self, parts: Parts) -> None:
        self._put.pop(parts, None)
        self._removed.discard(parts)

    # Moving a branch onto the directory

    def steps(self, replayed: Look) -> list[Step]:
        """Return what a branch has to change after its steps were repeated over the directory."""
        now = int(SYSTEM_CLOCK.time() * 1e9)
        found = [Step("base", parts) for parts in sorted(self._theirs)]
        removed = outermost(self._removed)
        found += [Step("remove", each) for each in removed if node_at(replayed, each) is not None]
        for parts, node, data in sorted(self._put.values()):
            ours = _Side(node, self.ours, parts, data)
            if not ours.is_like(self._side(replayed, parts)):
                found += self._rewritten(parts, node, ours, now)
        return found

    def _rewritten(self, parts: Parts, node: Entry, ours: _Side, now: int) -> Iterator[Step]:
        if node.kind == "directory":
            yield Step("make_directory", parts, moment=now)
            yield Step("set_attributes", parts, content={"mode": node.mode})
        elif node.kind == "link":
            target = os.fsdecode(ours.data)
            yield Step("put_file", parts, None, None, node._replace(target=target), now)
        elif node.kind == "file":
            fresh = node._replace(
                device=0, links=1, digest=None, xattrs=xattrs_at(self.ours, parts)
            )
            yield Step("write", parts, None, ours.data, fresh, now)

    # Applying

    def apply(self, changes: Changes) -> None:
        """Make the planned changes, as a part of an open transaction."""
        # First of all: what the branch shows may be what is about to be replaced.
        staged = [(put, self._staged(changes, put)) for put in sorted(self._put.values())]
        for parts in outermost(self._removed):
            changes.remove(parts)
        for put, place in staged:
            self._clear(changes, put)
            self._make(changes, put, place)

    def _clear(self, changes: Changes, put: _Put) -> None:
        """Remove what keeps an entry from its place."""
        for depth in range(1, len(put.parts) + 1):
            status = changes.tree.status(put.parts[:depth])
            wanted = put.node.kind if depth == len(put.parts) else "directory"
            if status is None:
                return
            if "directory" in (wanted, kind := Entry.of(status).kind) and kind != wanted:
                changes.remove(put.parts[:depth])
                return

    def _make(self, changes: Changes, put: _Put, place: Path | bytes | None) -> None:
        parts, node, _ = put
        if isinstance(place, Path):
            changes.put_file(parts, place)
            return
        if isinstance(place, bytes):
            if self._is_separated(put):
                changes.remove(parts)  # writing would change the other names, too
            changes.write(parts, place)
        else:
            changes.make_directory(parts)
        status = changes.tree.status(parts)
        if status is not None and Entry.of(status).mode != node.mode:
            changes.set_attributes(parts, mode=node.mode)

    def _is_separated(self, put: _Put) -> bool:
        """Tell whether a name of a hard-linked file is that of a file of its own in the branch."""
        was = node_at(self.base, put.parts)
        is_linked = was is not None and was.kind == "file" and was.links > 1
        return is_linked and put.data is None and put.node.links < 2

    def _staged(self, changes: Changes, put: _Put) -> Path | bytes | None:
        """Return the text to write, or a file, link or pipe in the store; None for a directory."""
        parts, node, data = put
        if node.kind == "directory":
            return None
        if data is not None or (node.kind == "file" and not node.ctime_ns):
            return self.ours.read(parts) if data is None else data
        store = changes.store
        place = store.tx / store.fresh()
        if node.kind == "file":
            with new_file(None, place) as fd:
                write_all(fd, self.ours.read(parts))
            node = node._replace(xattrs=xattrs_at(self.ours, parts))
        else:
            target = self.ours.link_target(parts) if node.kind == "link" else None
            create(store.tx_fd, place.name, node._replace(target=target))
        owned = node if node.ctime_ns else node._replace(uid=os.geteuid(), gid=os.getegid())
        apply_entry(store.tree, (place.name,), owned)
        return place


_UNKNOWN = Entry("other")
_MODES = "has other permissions in the branch than others gave it"


def has_content(look: Look, parts: Parts, entry: Entry) -> bool:
    """Whether there is a file with the content of an entry at a path."""
    return _Side(node_at(look, parts), look, parts).has_content_of(_Side(entry, None, parts))


def _difference(before: _Side, ours: _Side, theirs: _Side) -> str:
    if ours.node is None:
        return "was deleted by the branch and changed by others"
    if theirs.node is None:
        return "was changed by the branch and deleted by others"
    if before.node is None:
        return "was added by the branch and by others, with different content"
    if ours.kind == theirs.kind:
        return "was changed in the same places by the branch and by others"
    return f"is a {ours.kind} in the branch and a {theirs.kind} in the directory"


def merged_text(before: bytes, ours: bytes, theirs: bytes) -> bytes | None:
    """Return a text with both changes; None if they overlap, or it is not text.

    That is done by ``git merge-file``; without git there is no merging of lines.
    """
    git = find_program("git")
    texts = (ours, before, theirs)
    if git is None or any(b"\0" in each or len(each) > _MOST_TEXT for each in texts):
        return None
    with tempfile.TemporaryDirectory(prefix="wink-merge-") as folder:
        names = ["ours", "before", "theirs"]
        for name, text in zip(names, texts, strict=True):
            Path(folder, name).write_bytes(text)
        try:
            done = subprocess.run(
                [git, "merge-file", "-p", "-q", *names],
                cwd=folder,
                env={"PATH": SYSTEM_PATH, "HOME": folder, "GIT_CONFIG_NOSYSTEM": "1"},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_PATIENCE,
                check=False,
            )
        except (OSError, subprocess.SubprocessError):
            return None
    return done.stdout if done.returncode == 0 else None
