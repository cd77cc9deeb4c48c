"""An open branch: a private view of a workspace that outlives its process."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from weakincentives.core.call import ToolCall, call_under_way
from weakincentives.core.clock import SYSTEM_CLOCK, Clock
from weakincentives.core.text import letters
from weakincentives.errors import (
    FilesystemError,
    SnapshotExpired,
    WinkError,
)
from weakincentives.filesystem.base import Reads, worded
from weakincentives.filesystem.branch_log import (
    NAME,
    BranchBase,
    BranchCommit,
    BranchInfo,
    Log,
    base_of,
    branch_named,
    changed_between,
    changed_by,
    file_time,
    make_store,
    next_layer,
    next_point,
    point_now,
    points_of,
)
from weakincentives.filesystem.changes import ChangedMeanwhile, Changes
from weakincentives.filesystem.diffs import diff_text, file_changes
from weakincentives.filesystem.disk import HostFilesystem, PrivateView
from weakincentives.filesystem.entry import Entry
from weakincentives.filesystem.history import BRANCHES, Committed
from weakincentives.filesystem.layers import (
    Changed,
    Disk,
    Layer,
    Look,
    Node,
    names_of,
    node_at,
    walk,
    xattrs_at,
)
from weakincentives.filesystem.merging import Merge, Prefer, has_content
from weakincentives.filesystem.overlay import Step as OverlayStep
from weakincentives.filesystem.paths import DEFAULT_ROOT, Parts
from weakincentives.filesystem.redo import MakeRedo, Redo, keep, pack, unpack
from weakincentives.filesystem.staging import Staging, State, Step, is_same, numbers
from weakincentives.filesystem.store import (
    Limits,
    Objects,
    Store,
    store_of,
)
from weakincentives.filesystem.tree import Held, remove_tree, xattrs_of
from weakincentives.filesystem.workspace import Place, Workspace

R = TypeVar("R")

_KEPT = 1 << 20
"""Bytes; of a larger file the previous content is not kept, so that it cannot be text-merged."""
_ATTEMPTS = 3
"""How often a merge is planned, if others change the same files at that very moment."""
_KEPT_BELOW = 1000
"""Files in a directory that is moved or removed whose content is kept; others are only noted."""


class _BranchWorkspace(Workspace):
    """The state shared by a branch and its views; it never changes the directory."""

    def __init__(self, root: Path, store: Store, base: BranchBase, **options: Any) -> None:
        self.base = base
        self.points: list[Layer] = []
        """The state before the first commit, and after each."""
        super().__init__(root, store, limits=Limits(size=0), disk=base, **options)

    def use(self, base: BranchBase) -> None:
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
            self._log = Log(info.path, store.note)
            if not self._log.path.exists():
                if of is not None:
                    _copy_contents(of, info)
                self._log.create(info if fill is None else fill(info))
                # Now the history knows what the base needs: see Past.needed_by.
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
        self._branched = workspace
        self._look = self._edit = self._staging = Staging(workspace.disk, store)
        self._begin(info)

    def _begin(self, info: BranchInfo) -> None:
        """Show the commits of a branch over its base."""
        self.info = info
        self._began_ns = int(info.began * 1e9) + 1000  # as exact as a float is
        self._was: dict[Parts, Entry | None] = {}
        self._whole: set[Parts] = set()
        """The paths among them of which it noted everything below."""
        self._logged: set[Parts] = set()
        """What it read before its last commit."""
        self._note_commits(info.commits)
        self._reads = Reads(touched=set(self._logged))
        self._branched.points = points_of(self._branched.disk, info.commits)
        self._staging.base = self._branched.disk
        self._staging.state = State(self._branched.points[-1])

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
            store: The store of the workspace; in the state directory by default.
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
                self._check_assembled(self._staging.state)
                self._commit(self._staging.state.steps, call, undoes, redo)
            return result
        except BaseException:
            self._staging.state = before
            raise

    def take(self, steps: Sequence[OverlayStep], call: ToolCall) -> None:
        """Commit the changes of a command that were dropped elsewhere: see ``run``."""
        with self._lock:
            self.check_writable("take")
            self._atomically(lambda: self._apply(steps), call)

    def _commit(
        self,
        steps: Sequence[Step],
        call: ToolCall | None,
        undoes: Sequence[str],
        redo: MakeRedo | None,
    ) -> None:
        serial = len(self.info.commits) + 1
        was = dict(self._seen(steps))  # first: to store what is moved reads it
        stored = tuple(self._all_stored(steps))
        commit = BranchCommit(
            serial=serial,
            call_id=call.id if call else f"undo_{serial}" if undoes else f"direct_{serial}",
            tool="" if call is None else call.name,
            time=self._clock.time(),
            paths=changed_by(stored),
            undoes=tuple(undoes),
            steps=stored,
            was=was,
            reads=frozenset(self._reads.touched - self._logged if self._reads else ()),
            redo=redo and pack(redo(), self._log.objects, safe=self._branched.store.safe),
        )
        self._log.append(commit)
        self.info = replace(self.info, commits=(*self.info.commits, commit))
        self._note_commits([commit])
        points = self._branched.points
        points.append(next_point(points, commit, self._branched.disk))
        self._staging.state = State(points[-1])

    def _check_assembled(self, state: State) -> None:
        """Raise ProtectedPath if a commit makes a git repository out of parts."""
        paths = self.reserved.may_assemble({each for step in state.steps for each in step.changed})
        points = self._branched.points
        self.reserved.check_assembled(
            paths, points[-1], state.layer, lambda: [(each, sys.maxsize) for each in points]
        )

    def _note_commits(self, commits: Iterable[BranchCommit]) -> None:
        """Note what commits read, and what they saw before they changed it."""
        for commit in commits:
            self._logged |= commit.reads
            self._whole.update(*map(_wholes, commit.steps))
            for parts, entry in commit.was.items():
                self._was.setdefault(parts, entry)

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
            # A digest from the history of the workspace says nothing of the branch's objects.
            digest = node.digest
            if digest is None or digest not in objects:
                digest = objects.add(layer.read(step.parts))
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
        back = Step("back", (), content=place.serial)
        self._staging.state = State(layer, (*self._staging.state.steps, back, *steps))

    def fork(self) -> HostFilesystem:
        with self._workspace.lock, self._lock:
            return _BranchView(self, self._staging.layer)

    # History

    def _check_has_history(self) -> None:
        pass

    def history(self) -> tuple[Committed, ...]:
        return self.info.commits

    def newest_first(self) -> Iterator[Committed]:
        return reversed(self.info.commits)

    @property
    def holds_redo(self) -> bool:
        return True

    def redo_of(self, call: Committed) -> Redo | None:
        return unpack(self.info.commits[call.serial - 1].redo, self._log.objects)

    def at(self, number: int) -> Look:
        """Return the files after so many commits of the branch."""
        return self._branched.points[number]

    def diff(self, call_id: str) -> str:
        serial = self._serial_of(call_id)
        before, after = self._branched.points[serial - 1 : serial + 1]
        return diff_text(file_changes(changed_between(before, after), before, after))

    def _changed_here(self) -> tuple[list[Parts], Look, Look]:
        points = self._branched.points
        return changed_between(points[0], points[-1]), points[0], points[-1]

    def _serials_of(self, calls: Sequence[str | Committed]) -> list[int]:
        known = {each.call_id: each.serial for each in self.info.commits}
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
            changes.expected = plan.seen
            steps = [step for commit in self.info.commits for step in commit.steps]
            if plan.diverged or not self._can_repeat(steps, plan):
                plan.apply(changes)
            elif plan.paths:  # as it was done: moves stay moves, and hard links stay linked
                staging = Staging(self._staging.base, changes.store)
                staging.state = State(self._staging.layer, tuple(steps))
                staging.replay(changes, _never)
            changes.check_displaced()
            return plan.paths

        call = ToolCall("merge", {"branch": self.name}, f"merge_{self.name}_{os.urandom(3).hex()}")
        for _ in range(_ATTEMPTS - 1):
            with contextlib.suppress(ChangedMeanwhile):  # plan again, with what is there by now
                return self._merged(files, act, call)
        return self._merged(files, act, call)

    def _merged(
        self, files: HostFilesystem, act: Callable[[Changes], tuple[str, ...]], call: ToolCall
    ) -> tuple[str, ...]:
        try:
            return files.transact(act, call)
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
        with contextlib.closing(base_of(self.root, self._based_on_now())) as now:
            yield self.plan(now, strict=strict, prefer=prefer)

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

        The changes of the branch stay, merged with those of others: see :meth:`merge_into`.
        ``tell`` gets the plan, with its conflicts, before anything is done.
        """
        info = self._based_on_now()
        with contextlib.closing(base_of(self.root, info)) as base:
            plan = self.plan(base, strict=strict, prefer=prefer)
            plan.check()
            if tell is not None:
                tell(plan)
            repeated = points_of(base, self.info.commits)[-1]
            steps = tuple(self._stored(step, repeated) for step in plan.steps(repeated))
            was = {parts: self._now(base, parts) for parts in self._was}
            self._check_rebased(base, repeated, steps)
        serial = len(self.info.commits) + 1
        commit = BranchCommit(
            serial=serial,
            call_id=f"rebase_{serial}",
            tool="rebase",
            time=self._clock.time(),
            paths=changed_by(steps),
            steps=steps,
            was=was,
        )
        own = [replace(each, was={}, reads=frozenset()) for each in self.info.commits]
        self._begin_anew(replace(info, commits=(*own, commit)))
        return commit.paths

    def _check_rebased(self, base: Look, repeated: Layer, steps: Iterable[Step]) -> None:
        """Raise ProtectedPath if the branch would complete a git repository where it is moved."""
        layer = repeated
        for step in steps:
            layer = next_layer(layer, step, (), base)
        paths = self.reserved.may_assemble(changed_between(Layer(base), layer))
        self.reserved.check_assembled(paths, base, layer, tuple)

    def _now(self, base: Look, parts: Parts) -> Entry | None:
        node = node_at(base, parts)
        return None if node is None else self._kept(base, parts, node)

    def _begin_anew(self, info: BranchInfo) -> None:
        workspace = self._branched
        base = base_of(self.root, info)
        for commit in self.info.commits if not info.commits else ():
            keep(self.store, unpack(commit.redo, self._log.objects))
        self._log.create(info)
        workspace.base.close()
        workspace.use(base)
        self._begin(info)


def _wholes(step: Step) -> set[Parts]:
    """Return the changed paths that stand for everything below them."""
    return set() if step.method in ("set_attributes", "make_directory") else step.changed


class _BranchView(PrivateView):
    """A call's view of a branch."""

    def __init__(self, branch: Branch, state: Layer) -> None:
        super().__init__(branch, state, None)
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
    main = store_of(root, store)
    make_store(root, main)
    name = name or _free_name(main)
    if not NAME.fullmatch(name):
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


def _free_name(main: Path) -> str:
    while True:
        name = letters(os.urandom(3))
        if not (main / BRANCHES / name).exists():
            return name
