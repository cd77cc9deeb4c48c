"""Workspaces that move: a base in object storage or git, and a branch as lines of text.

A :class:`Base` is the directory that a branch differs from: a stored tree, or a commit in a git
repository. :func:`materialize` creates it on any machine. The commits of a branch travel as lines,
one for each, and their contents through object storage: :class:`BranchUpload` sends what is new,
:func:`unpack_branch` makes a branch of it elsewhere.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import marshal
import os
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import starmap
from pathlib import Path
from typing import Any, Literal

from weakincentives.core.state import no_links
from weakincentives.errors import AlreadyExists, FilesystemError, HistoryDamaged, WinkError
from weakincentives.filesystem.branch_log import (
    BranchCommit,
    BranchInfo,
    base_of,
    changed_between,
    commit_values,
    decoded_commit,
    file_time,
    make_store,
    next_layer,
    points_of,
    steady_point,
)
from weakincentives.filesystem.branches import Branch, new_branch
from weakincentives.filesystem.checkout import check_out, clean_commit
from weakincentives.filesystem.entry import (
    Entry,
    checked_digest,
    new_file,
)
from weakincentives.filesystem.ignored import IgnoredFiles
from weakincentives.filesystem.layers import Layer, Look
from weakincentives.filesystem.merging import node_at
from weakincentives.filesystem.new_tree import NewTree, new_directory
from weakincentives.filesystem.paths import Parts, join_path, shown
from weakincentives.filesystem.reserved import Reserved
from weakincentives.filesystem.scratch import TEMPORARY
from weakincentives.filesystem.staging import Step, numbers
from weakincentives.filesystem.store import (
    Note,
    Objects,
    checked_parts,
    location_of,
    store_of,
    write_whole,
)
from weakincentives.filesystem.transfer import (
    ObjectStorage,
    Packer,
    Piece,
    Pieces,
    decoded_pieces,
    fetch_contents,
    fetch_object,
    upload_contents,
    zero_fill,
)
from weakincentives.filesystem.tree import (
    Held,
    Tree,
    set_xattrs,
    sync_all,
    without_privileges,
    xattrs_of,
)

__all__ = [
    "Base",
    "BranchUpload",
    "ObjectStorage",
    "git_base",
    "line_keys",
    "materialize",
    "store_tree",
    "stored_keys",
    "unpack_branch",
]

_VERSION = 1
_CACHE = "stored-tree"
_TRIES = 5
"""Attempts to read a file that changes meanwhile."""
_OWN = -1
"""Stands for the user who has the workspace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """The directory that a branch differs from."""

    kind: Literal["tree", "git"]
    tree: str = ""
    """The key of a stored tree."""
    repository: str = ""
    """The path or URL of a git repository."""
    commit: str = ""
    serial: int | None = None
    """Where it comes from: the last call in the history of that workspace, and when it was."""
    moment: int = 0

    def encode(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {name: value for name, value in asdict(self).items() if value not in ("", None)}

    @classmethod
    def decode(cls, values: Mapping[str, Any]) -> Base:
        """Return the base of :meth:`encode`; raises ValueError if it is malformed."""
        try:
            found = cls(**values)
        except TypeError as error:
            raise ValueError(f"malformed base: {error}") from None
        is_known = {type(found.serial or 0), type(found.moment)} == {int}
        if found.kind not in ("tree", "git") or not is_known:
            raise ValueError(f"malformed base: {dict(values)!r}")
        return found


# Storing a tree


def store_tree(
    directory: str | os.PathLike[str],
    objects: ObjectStorage,
    *,
    gitignore: bool = False,
    store: str | os.PathLike[str] | None = None,
) -> Base:
    """Store a directory as it is now, and return it as a base. Only what changed is sent.

    Everything travels but sockets, devices, and files of ours that may not be read. The owner of
    a file travels unless it is the user who stores it. Calls of agents wait meanwhile, except the
    first time, when most is sent before they have to.

    Args:
        directory: The workspace.
        objects: Where to store it.
        gitignore: Leave out what git ignores, and what common tools generate.
        store: The store of the workspace; in the state directory by default.
    """
    root = Path(os.path.realpath(directory))
    main = store_of(root, store)
    note = make_store(root, main)
    ignored = IgnoredFiles(root) if gitignore else None
    with contextlib.closing(_Scan(root, main, note, objects, ignored)) as scan:
        if not scan.known:
            scan.run()
        with steady_point(root, main) as (serial, moment):
            key = scan.run()
        scan.save()
    return Base(kind="tree", tree=key, serial=serial, moment=moment)


class _Scan:
    """Reads a directory and sends what storage lacks."""

    def __init__(
        self,
        root: Path,
        main: Path,
        note: Note,
        objects: ObjectStorage,
        ignored: Callable[[str], bool] | None,
    ) -> None:
        self._tree = Tree(root)
        self._path = main / _CACHE
        self._main = main
        self._seals = note.seals(_CACHE)
        self._objects = objects
        self._ignored = ignored
        self._hidden = set(Reserved(root, store=main).hidden)
        self.known = self._load()
        """What each path had when it was stored; valid while its change time is the same."""

    def close(self) -> None:
        self._tree.close()

    def run(self) -> str:
        """Store the directory as it is now; returns the key of the tree."""
        began_ns = file_time(self._main)
        packer = Packer(self._objects)
        keys = {piece.key for _, pieces in self.known.values() for piece in pieces}
        gone = self._objects.missing(keys) if keys else set[str]()
        found: list[tuple[Parts, Entry, Sequence[Piece]]] = []
        for parts, status in self._walk():
            entry, pieces = self._entry(parts, status, packer, gone)
            if entry is not None:
                found.append((parts, entry, pieces))
        packer.flush()
        rows = [(parts, entry, packer.placed(pieces)) for parts, entry, pieces in found]
        # A later change at the same time would go unnoticed.
        is_settled = (row for row in rows if row[1].ctime_ns < began_ns)
        self.known = {parts: (entry, pieces) for parts, entry, pieces in is_settled}
        return _store_manifest(self._objects, rows)

    def _walk(self) -> Iterator[tuple[Parts, os.stat_result]]:
        """Yield everything that travels, sorted."""
        found: list[tuple[Parts, os.stat_result]] = []
        status = self._tree.status(())
        assert status is not None
        pending: list[tuple[Parts, os.stat_result]] = [((), status)]
        while pending:
            parts, status = pending.pop()
            found.append((parts, status))
            if stat.S_ISDIR(status.st_mode):
                pending += [
                    ((*parts, name), inner)
                    for name, inner in self._tree.scan(parts)
                    if not name.startswith(TEMPORARY) and (*parts, name) not in self._hidden
                ]
        found.sort(key=lambda each: each[0])
        return iter(found if self._ignored is None else self._without_ignored(found))

    def _without_ignored(
        self, found: list[tuple[Parts, os.stat_result]]
    ) -> list[tuple[Parts, os.stat_result]]:
        assert self._ignored is not None
        ignored = {parts for parts, _ in found if parts and self._ignored("/".join(parts))}
        # A tracked file is not ignored, whatever its directory is.
        kept = {
            parts[:depth]
            for parts, status in found
            if parts not in ignored and not stat.S_ISDIR(status.st_mode)
            for depth in range(len(parts))
        }
        return [each for each in found if each[0] not in ignored or each[0] in kept]

    def _entry(
        self, parts: Parts, status: os.stat_result, packer: Packer, gone: set[str]
    ) -> tuple[Entry | None, Sequence[Piece]]:
        entry = Entry.of(status)
        if entry.kind == "link":
            return entry._replace(target=self._tree.link_target(parts)), ()
        if entry.kind == "other":
            return (entry if entry.pipe else None), ()
        known, pieces = self.known.get(parts, (None, ()))
        if (
            known is not None
            and (known.ino, known.ctime_ns) == (entry.ino, entry.ctime_ns)
            and not any(piece.key in gone for piece in pieces)
        ):
            return entry._replace(xattrs=known.xattrs, digest=known.digest), pieces
        return self._read(parts, packer)

    def _read(self, parts: Parts, packer: Packer) -> tuple[Entry | None, Sequence[Piece]]:
        for _ in range(_TRIES):
            try:
                opened = Held(self._tree.open_file(parts))
            except FileNotFoundError:
                return None, ()
            except PermissionError:
                raise FilesystemError(
                    f"{shown(join_path(parts))} cannot be read, so the directory cannot be stored"
                ) from None
            with opened as fd:
                entry = Entry.of(os.fstat(fd))._replace(xattrs=xattrs_of(fd))
                if entry.kind != "file":
                    return entry, ()
                digest, pieces = packer.add(fd)
                if os.fstat(fd).st_ctime_ns == entry.ctime_ns:
                    size = sum(piece.size for piece in pieces)
                    return entry._replace(digest=digest, size=size), pieces
        raise FilesystemError(f"{shown(join_path(parts))} keeps changing while it is stored")

    # What is known from the last time

    def _load(self) -> dict[Parts, tuple[Entry, Pieces]]:
        with (
            contextlib.suppress(FileNotFoundError),
            open(self._path, "rb", opener=no_links) as file,
        ):
            data = self._seals.unsealed(file.read())
            if data is not None:  # with a valid seal, marshal data is our own
                return {
                    parts: (
                        Entry("file", ino=ino, ctime_ns=ctime_ns, xattrs=xattrs, digest=digest),
                        tuple(starmap(Piece, pieces)),
                    )
                    for parts, ino, ctime_ns, xattrs, digest, pieces in marshal.loads(data)
                }
        return {}

    def save(self) -> None:
        """Remember what is stored, so that the next time only changes are read."""
        rows = [
            (parts, each.ino, each.ctime_ns, each.xattrs, each.digest, [*map(tuple, pieces)])
            for parts, (each, pieces) in self.known.items()
        ]
        write_whole(self._path, self._seals.sealed(marshal.dumps(rows, 4)), safe=False)


# The manifest: groups of entries, so that a change makes one group another


def _store_manifest(objects: ObjectStorage, rows: Sequence[tuple[Parts, Entry, Pieces]]) -> str:
    names: dict[int, int] = {}
    for _, entry, _ in rows:
        if entry.links > 1 and not entry.is_directory:
            names[entry.ino] = names.get(entry.ino, 0) + 1
    packer, groups, group = Packer(objects), list[Piece](), list[bytes]()
    size = 0

    def end_group() -> None:
        nonlocal size
        if group:
            groups.append(packer.add_alone(b"[" + b",\n".join(group) + b"]"))
            group.clear()
            size = 0

    for parts, entry, pieces in rows:
        line = json.dumps(_row(parts, entry, pieces, names), separators=(",", ":")).encode()
        # By its name, not by number: what is added elsewhere leaves other groups as they are.
        if not zlib.crc32(os.fsencode("/".join(parts))) % _GROUP or size + len(line) > _GROUP_SIZE:
            end_group()
        group.append(line)
        size += len(line) + 2
    end_group()
    keys = [piece.key for piece in packer.placed(groups)]
    return packer.add_alone(json.dumps({"wink_tree": _VERSION, "groups": keys}).encode()).key


_GROUP = 512
"""Entries in a group, on average."""
_GROUP_SIZE = 3 << 20


def _row(parts: Parts, entry: Entry, pieces: Pieces, names: Mapping[int, int]) -> list[Any]:
    count = names.get(entry.ino, 1) if entry.links > 1 and not entry.is_directory else 1
    # The number tells which names belong together; alone it means nothing.
    kept = _without_machine_facts(_portable(entry))._replace(
        ino=entry.ino if count > 1 else 0,
        links=count,
        ctime_ns=0,
        size=0 if entry.is_directory else entry.size,
    )
    return ["/".join(parts), kept.encode(), pieces]


def _portable(entry: Entry) -> Entry:
    """Return an entry whose owner is relative to the user."""
    return entry._replace(
        uid=_OWN if entry.uid == os.geteuid() else entry.uid,
        gid=_OWN if entry.gid == os.getegid() else entry.gid,
    )


def _local(entry: Entry) -> Entry:
    return entry._replace(
        uid=os.geteuid() if entry.uid == _OWN else entry.uid,
        gid=os.getegid() if entry.gid == _OWN else entry.gid,
    )


def _manifest(objects: ObjectStorage, key: str) -> Iterator[tuple[Parts, Entry, Pieces]]:
    """Yield the entries of a stored tree.

    Raises:
        HistoryDamaged: It is not one.
    """
    try:
        top = json.loads(fetch_object(objects, key))
        if top["wink_tree"] != _VERSION:
            raise ValueError("of another version")
        for group in top["groups"]:
            for path, values, pieces in json.loads(fetch_object(objects, str(group))):
                entry, places = _local(Entry.decode(values)), decoded_pieces(pieces)
                size = sum(piece.size for piece in places)
                if size != (entry.size if entry.kind == "file" else 0):
                    raise ValueError(f"the size of {path!r} is wrong")
                yield checked_parts(path), entry, places
    except (LookupError, TypeError, ValueError) as error:
        if isinstance(error, WinkError):
            raise
        raise HistoryDamaged(f"the stored tree {key} is invalid: {error}") from error


def stored_keys(objects: ObjectStorage, base: Base) -> set[str]:
    """Return the keys of all objects that a base needs."""
    if base.kind != "tree":
        return set()
    top = json.loads(fetch_object(objects, base.tree))
    found = {base.tree, *map(str, top["groups"])}
    return found.union(piece.key for _, _, at in _manifest(objects, base.tree) for piece in at)


# Git


def git_base(directory: str | os.PathLike[str], *, repository: str = "") -> Base:
    """Return the commit that is checked out in a directory as a base.

    Files that git ignores do not belong to it, nor does the ``.git`` directory.

    Args:
        directory: The top of a checkout.
        repository: Where others find the repository: a path or URL; the directory by default.

    Raises:
        FilesystemError: Something differs from the commit, or it has submodules.
    """
    root = Path(os.path.realpath(directory))
    main = location_of(root)
    make_store(root, main)
    with steady_point(root, main) as (serial, moment):
        commit = clean_commit(root)
    where = repository or str(root)
    return Base(kind="git", repository=where, commit=commit, serial=serial, moment=moment)


# Materializing


def materialize(
    base: Base,
    directory: str | os.PathLike[str],
    objects: ObjectStorage,
    *,
    safe: bool = False,
) -> Path:
    """Create the directory of a base: complete, or not at all; returns its path.

    Programs do not get more privileges by being moved: files lose setuid and setgid bits and
    capabilities. Nothing in a git repository runs: no hooks, filters or other settings of it.

    Args:
        base: From :func:`store_tree` or :func:`git_base`.
        directory: Must not exist, or be empty.
        objects: Where a stored tree is.
        safe: Sync to disk, so that it is also complete after a power loss.

    Raises:
        AlreadyExists: There is something in the directory.
        HistoryDamaged: The stored tree, or a content in it, is damaged.
    """
    target = Path(os.path.realpath(directory))
    _check_free(target)
    with new_directory(target) as (staged, fd):
        if base.kind == "git":
            check_out(base.repository, base.commit, staged)
        else:
            with contextlib.closing(_Making(staged, objects)) as making:
                making.make(base.tree)
        if safe:
            sync_all(fd)
        _check_free(target)  # renaming would replace a file, or a link
        try:
            os.rename(staged, target)
        except OSError:
            _check_free(target)
            raise
    return target


def _check_free(target: Path) -> None:
    if os.path.lexists(target) and (not target.is_dir() or os.listdir(target)):
        raise AlreadyExists(f"{target} exists already: choose a new directory")


class _Making:
    """Creates the files of a stored tree in an empty directory that only this user can reach."""

    def __init__(self, root: Path, objects: ObjectStorage) -> None:
        self._tree = Tree(root)
        self._objects = objects
        self._files: dict[Parts, tuple[Entry, Pieces]] = {}

    def close(self) -> None:
        self._tree.close()

    def make(self, key: str) -> None:
        new = NewTree(self._tree)
        try:
            for parts, entry, pieces in _manifest(self._objects, key):
                made = _without_machine_facts(entry)
                if not new.add(parts, made):
                    if entry.kind != "file" or parts in self._files:
                        raise HistoryDamaged(f"the stored tree has no file at {join_path(parts)!r}")
                    self._files[parts] = made, pieces
            wanted = {parts: pieces for parts, (_, pieces) in self._files.items()}
            fetch_contents(self._objects, wanted, self._write)
            new.finish()
        except OSError as error:
            if isinstance(error, HistoryDamaged) or error.errno not in _INVALID:
                raise
            raise HistoryDamaged(f"the stored tree {key} is invalid: {error}") from error

    def _write(self, parts: Parts, chunks: Iterator[bytes]) -> None:
        entry, _ = self._files[parts]
        with self._tree.parent(parts) as above, new_file(above, parts[-1] if parts else ".") as fd:
            if zero_fill(fd, chunks) != entry.digest:
                raise HistoryDamaged(f"the stored content of {join_path(parts)!r} is damaged")
            if (entry.uid, entry.gid) != (os.geteuid(), os.getegid()):
                with contextlib.suppress(PermissionError):
                    os.fchown(fd, entry.uid, entry.gid)
            if entry.xattrs:
                set_xattrs(fd, entry.xattrs)
            os.fchmod(fd, entry.mode)
            os.utime(fd, ns=(entry.mtime_ns, entry.mtime_ns))


_INVALID = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ELOOP, errno.EINVAL)
"""Errors that an invalid manifest leads to."""


def _without_machine_facts(entry: Entry) -> Entry:
    """Return an entry as it may be made on another machine: without privileges of programs."""
    kept = tuple(each for each in entry.xattrs if each[0].startswith(_XATTRS))
    mode = (without_privileges(entry.mode) if entry.kind == "file" else entry.mode) & 0o7777
    if (kept, mode) == (entry.xattrs, entry.mode):
        return entry
    return entry._replace(xattrs=kept, mode=mode)


_XATTRS = ("user.", "system.posix_acl_")
"""The others are about a machine: labels, capabilities, overlays."""


# Branches that move


class BranchUpload:
    """Sends what a branch has committed: contents to object storage, the rest as lines of text.

    Store the lines of :meth:`pending` in order, then call :meth:`saved`. What was sent is not sent
    again; after a failure or a kill, :meth:`pending` returns what is not saved yet.

    Args:
        branch: The branch.
        objects: Where contents go.
        saved: How many of its commits are saved already: all, for one from ``unpack_branch``.
    """

    def __init__(self, branch: Branch, objects: ObjectStorage, *, saved: int = 0) -> None:
        self._branch = branch
        self._objects = objects
        self._saved = saved
        self._lines: list[str] = []
        self._placed: dict[str, Pieces] = {}
        """Where contents are that were sent."""
        self._base = branch.info.base, branch.info.moment

    def pending(self) -> list[str]:
        """Send the contents of commits that are not saved; returns a line for each commit.

        Raises:
            FilesystemError: The branch was rebased: its lines do not apply to the stored base.
            StorageUnavailable: Something could not be sent; the next call tries again.
        """
        info = self._branch.info
        if (info.base, info.moment) != self._base or len(info.commits) < self._saved:
            raise FilesystemError(
                f"The branch {info.name!r} was rebased, so its base is another one: store that,"
                " and begin a new upload"
            )
        new = info.commits[self._saved + len(self._lines) :]
        if new:
            digests = set[str]().union(*(each.digests for each in new)) - self._placed.keys()
            packer = Packer(self._objects)
            self._placed |= upload_contents(packer, self._branch.contents, digests)
            self._lines += [self._line(each) for each in new]
        return list(self._lines)

    def saved(self, count: int) -> None:
        """Note that the first lines of :meth:`pending` are stored."""
        self._saved += count
        del self._lines[:count]

    def _line(self, commit: BranchCommit) -> str:
        places = {digest: self._placed[digest] for digest in sorted(commit.digests)}
        values = {**commit_values(_sent(commit)), "contents": places}
        return json.dumps(values, separators=(",", ":"))


def _sent(commit: BranchCommit) -> BranchCommit:
    """Return a commit without what only this machine can use: inodes, and times of its disk."""
    steps = [
        step._replace(
            node=None if step.node is None else _sent_entry(step.node),
            content=_owned(step.content, _portable) if _sets_owner(step) else step.content,
        )
        for step in commit.steps
    ]
    was = {parts: None if each is None else _sent_entry(each) for parts, each in commit.was.items()}
    return replace(commit, steps=tuple(steps), was=was)


def _sent_entry(entry: Entry) -> Entry:
    # Negative numbers are those of a branch: they tell which names are one file.
    return _portable(entry)._replace(
        ino=entry.ino if entry.ino < 0 else min(entry.ino, 1), ctime_ns=min(entry.ctime_ns, 1)
    )


def _sets_owner(step: Step) -> bool:
    return step.method == "set_attributes" and step.content.get("uid") is not None


def _owned(given: Mapping[str, Any], change: Callable[[Entry], Entry]) -> dict[str, Any]:
    entry = change(Entry("file", uid=given["uid"], gid=given["gid"]))
    return {**given, "uid": entry.uid, "gid": entry.gid}


def unpack_branch(
    directory: str | os.PathLike[str],
    name: str,
    lines: Sequence[str],
    objects: ObjectStorage,
    *,
    serial: int | None = None,
    moment: int = 0,
    about: Mapping[str, Any] | None = None,
    store: str | os.PathLike[str] | None = None,
    **options: Any,
) -> Branch:
    """Make a branch with the commits of another, and return it open.

    A kill leaves no branch, or all of it. To continue with uploads, begin with
    ``BranchUpload(branch, objects, saved=len(lines))``.

    Args:
        directory: The materialized base; or the workspace that the base comes from.
        name: The name of the new branch.
        lines: Those of :meth:`BranchUpload.pending`, of all commits.
        objects: Where the contents are.
        serial: Where the base is in the history of the workspace: ``serial`` and ``moment`` of the
            :class:`Base`, or ``base`` and ``moment`` of the branch's info. The workspace as it is
            now by default.
        moment: When that was.
        about: What to note in its log, as JSON values.
        store: The store of the workspace; in the state directory by default.

    Raises:
        HistoryDamaged: The lines, or contents, are damaged.
        ObjectMissing: Storage does not have a content.
    """
    root = Path(os.path.realpath(directory))
    info = new_branch(root, name, at=serial, moment=moment, about=about, store=store)
    reserved = Reserved(
        root, store=info.path.parent.parent, unprotected=options.get("unprotected", ())
    )
    fill = partial(_filled, root, lines, objects, reserved)
    return Branch(root, info, fill=fill, **options)


def _filled(
    root: Path, lines: Sequence[str], objects: ObjectStorage, reserved: Reserved, info: BranchInfo
) -> BranchInfo:
    """Fetch the contents of a branch to be made; returns it with its commits."""
    contents = Objects(info.path / "objects")
    commits, places = _decoded_lines(lines, contents)
    wanted = {digest: pieces for digest, pieces in places.items() if digest not in contents}
    fetch_contents(
        objects, wanted, lambda digest, chunks: contents.add_chunks(chunks, expected=digest)
    )
    with contextlib.closing(base_of(root, info)) as base:
        look = reserved.without_hidden(base)
        filled = replace(info, commits=tuple(_received(look, commits)))
        points = points_of(look, filled.commits)
        paths = reserved.may_assemble(changed_between(points[0], points[-1]))
        reserved.check_assembled(paths, points[0], points[-1], tuple)
        return filled


def _decoded_lines(
    lines: Iterable[str], contents: Objects
) -> tuple[list[BranchCommit], dict[str, Pieces]]:
    """Return the commits in some lines, and where their contents are stored."""
    try:
        values = [json.loads(line) for line in lines]
        commits = [decoded_commit(n, each, contents, 0) for n, each in enumerate(values, 1)]
        places = {
            checked_digest(digest): decoded_pieces(pieces)
            for each in values
            for digest, pieces in each["contents"].items()
        }
        for commit in commits:
            if not commit.digests <= places.keys():
                raise ValueError("a content has no place")
            back = (step.content for step in commit.steps if step.method == "back")
            if not all(0 <= serial < commit.serial for serial in back):
                raise ValueError("it returns to a later state")
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise HistoryDamaged(f"the lines of a branch are invalid: {error}") from error
    return commits, places


def line_keys(lines: Iterable[str]) -> set[str]:
    """Return the keys of all objects that the lines of a branch need."""
    found = (json.loads(line)["contents"].values() for line in lines)
    return {key for contents in found for pieces in contents for key, _, _ in pieces}


def _received(base: Look, commits: Iterable[BranchCommit]) -> Iterator[BranchCommit]:
    """Yield commits with what this machine knows of the files they are about."""
    points = [Layer(base)]
    for commit in commits:
        layer, steps = points[-1], list[Step]()
        for given in commit.steps:
            step = _received_step(given, layer)
            steps.append(step)
            layer = next_layer(layer, step, points, base)
        was = {
            parts: None if each is None else _received_entry(base, parts, _local(each))
            for parts, each in commit.was.items()
        }
        points.append(layer)
        yield replace(commit, steps=tuple(steps), was=was)


def _received_step(step: Step, layer: Layer) -> Step:
    if _sets_owner(step):
        return step._replace(content=_owned(step.content, _local))
    if step.node is None:
        return step
    node = _local(step.node)
    there = node_at(layer, step.parts) if step.method == "write" else None
    if there is not None and there.kind == "file" and there.links > 1:
        node = node._replace(ino=there.ino, device=there.device, links=there.links)
    elif node.ino >= 0:
        node = node._replace(ino=next(numbers), links=1)
    return step._replace(node=node)


def _received_entry(base: Look, parts: Parts, entry: Entry) -> Entry:
    """Return what a branch saw at a path as it is known here, if it is the same."""
    unknown = entry._replace(ino=0, ctime_ns=0)
    there = node_at(base, parts) if entry.ino or entry.ctime_ns else None
    if there is None or there.kind != entry.kind or not _is_same_mode(there, entry):
        return unknown
    if entry.kind == "link":
        same = base.link_target(parts) == entry.target
    elif entry.kind == "file":
        same = there.size == entry.size and _is_same_file(base, parts, there, entry)
    else:
        same = True
    return there._replace(digest=entry.digest, target=entry.target) if same else unknown


def _is_same_mode(there: Entry, entry: Entry) -> bool:
    if there.kind != "file":
        return there.mode == entry.mode
    return without_privileges(there.mode) == without_privileges(entry.mode)  # they do not travel


def _is_same_file(base: Look, parts: Parts, there: Entry, entry: Entry) -> bool:
    if there.mtime_ns == entry.mtime_ns or entry.digest is None:
        return there.mtime_ns == entry.mtime_ns
    try:
        return hashlib.sha256(base.read(parts)).hexdigest() == entry.digest
    except OSError:
        return False
