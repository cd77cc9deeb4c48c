"""A filesystem over a real directory: every call is committed, or undone exactly."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

from weakincentives.core.call import ToolCall, call_under_way, current_view
from weakincentives.core.clock import SYSTEM_CLOCK, Clock
from weakincentives.core.gate import Gate, Lease
from weakincentives.core.locks import defer_interrupts
from weakincentives.errors import (
    FilesystemError,
    MergeConflict,
    ProtectedPath,
    ReadOnlyView,
    SnapshotExpired,
    WinkError,
)
from weakincentives.filesystem.base import Reads, kind_at, worded
from weakincentives.filesystem.changes import Changes
from weakincentives.filesystem.commands import (
    DEFAULT_OUTPUT_LIMIT,
    Command,
    CommandResult,
    Salvage,
    Start,
    Watch,
    run_over,
    run_plainly,
)
from weakincentives.filesystem.diffs import Detail, FileChange, all_changed, file_changes
from weakincentives.filesystem.history import Committed
from weakincentives.filesystem.journal import Record
from weakincentives.filesystem.layers import (
    Changed,
    Layer,
    Look,
    Node,
    OnDisk,
    Present,
    names_of,
    walk,
    walk_kinds,
)
from weakincentives.filesystem.overlay import Overlay, Started, Step, copied_steps, find_way
from weakincentives.filesystem.paths import (
    BARRED,
    DEFAULT_ROOT,
    Parts,
    join_path,
    shown,
    split_root,
)
from weakincentives.filesystem.patterns import PathPatterns
from weakincentives.filesystem.prune import Pruned, prune
from weakincentives.filesystem.redo import MakeRedo, Redo
from weakincentives.filesystem.scan import Noted
from weakincentives.filesystem.staging import Edit, Staging, State
from weakincentives.filesystem.store import HISTORY_LIMITS, Limits, Store
from weakincentives.filesystem.tree import Near, Tree, supported
from weakincentives.filesystem.undo import diff_of, go_back, undo_calls
from weakincentives.filesystem.workspace import Place, Reading, Workspace

if TYPE_CHECKING:
    from weakincentives.filesystem.branches import Branch

R = TypeVar("R")

# Errors of a replayed change whose path has changed.
_NOT_AS_IT_WAS = BARRED | {errno.ENOENT, errno.EEXIST, errno.ENOTEMPTY, errno.EISDIR}


_TICK_NS = 20_000_000
"""How far the times of files may be behind the clock."""


class HostFilesystem(OnDisk):
    """A :class:`~weakincentives.filesystem.Filesystem` over a real directory.

    Every change of a call is journalled first, so it can be undone exactly: also after the process
    was killed, when the directory is opened again.

    One process at a time can have a directory open, or any number with ``shared=True``: then calls
    of all of them run one after the other, and between its calls each sees what the others have
    committed. A process holds the directory for the time of a call, or of the concurrent calls of a
    turn, and others wait.

    Args:
        root: The directory.
        prefix: The virtual prefix of absolute paths.
        store: Where to keep journal and history; in the user's state directory by default.
        durability: ``"fast"`` survives a killed process, ``"safe"`` also a loss of power.
        wait: Seconds to wait for another process. By default there is no wait, except with
            ``shared`` for the calls of others that share the directory: ten minutes for each.
        shared: Whether other processes may have the directory open, too, and work on it between the
            calls of this one.
        history_limit: Maximum size of the history, in bytes; or its size, count and age.
        unprotected: Globs of paths that may be changed although their names protect them, such as
            ``".git/config"``: see :doc:`security`. One without a slash is a name at any depth.
    """

    _edit: Edit
    """Where changes are made while a transaction is open."""

    journalled = True
    _redo: MakeRedo | None = None

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        prefix: str = DEFAULT_ROOT,
        store: str | os.PathLike[str] | None = None,
        durability: Literal["fast", "safe"] = "fast",
        wait: float | None = None,
        shared: bool = False,
        history_limit: int | Limits = HISTORY_LIMITS,
        clock: Clock = SYSTEM_CLOCK,
        unprotected: Sequence[str] = (),
    ) -> None:
        if not supported():
            raise NotImplementedError(
                "HostFilesystem needs a POSIX system: this one has no calls relative to directory"
                " descriptors. Use MemoryFilesystem"
            )
        if durability not in ("fast", "safe"):
            raise ValueError(f'durability must be "fast" or "safe", got {durability!r}')
        if not os.path.isdir(root):
            raise NotADirectoryError(errno.ENOTDIR, "not a directory", os.fspath(root))
        path = None if store is None else Path(store)
        opened = Store(Path(root), path=path, wait=wait, safe=durability == "safe", shared=shared)
        limits = Limits(size=history_limit) if isinstance(history_limit, int) else history_limit
        workspace = Workspace(
            Path(root), opened, limits=limits, clock=clock, unprotected=unprotected
        )
        self._set_up(workspace, prefix)

    def _set_up(self, workspace: Workspace, prefix: str) -> None:
        self._prefix = split_root(prefix)
        self.read_only: str | None = None
        self.call: ToolCall | None = None
        """The call that a view belongs to, for the history."""
        self._sealed = None
        self._reads = None
        self._lock = threading.RLock()
        self._parent: HostFilesystem | None = None
        self._ended = False
        """Whether a view was merged or discarded."""
        self._workspace = workspace
        self._real = workspace.tree.spellings
        self._read_lock = workspace.lock
        self._look = workspace.disk
        self.root = workspace.tree.path
        """The directory, as the system names it."""
        self.store = workspace.store.path
        """Where journal and history are kept."""
        self.reserved = workspace.reserved
        """What in the directory no call may change."""
        self.recovered: tuple[str, ...] = workspace.recovered
        """A sentence for each thing that recovery could not restore."""

    def __repr__(self) -> str:
        kind = "HostFilesystem" if self._parent is None else "view of HostFilesystem"
        return f"<{kind} {self.root}>"

    @property
    def gate(self) -> Gate:
        """Held by the call that works in place; others wait."""
        return self._workspace.gate

    @property
    def others(self) -> tuple[int, ...]:
        """The ids of other processes that have the directory open now."""
        return self._workspace.store.others()

    def close(self) -> None:
        """Undo the open transaction, and release the directory. May be called again."""
        workspace = self._workspace
        if not workspace.closing.alive:
            return
        with workspace.lock:
            store = workspace.store
            if workspace.in_place is not None and store.pid == os.getpid() and store.lock.is_held:
                workspace.roll_back(workspace.in_place)
            if workspace.store.pid == os.getpid():
                workspace.history.compress_new()
            workspace.history.close()
            workspace.closing()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_changing_files(self) -> bool:
        return self._lock._is_owned()  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownVariableType]

    # Reading

    @property
    def shows_disk(self) -> bool:
        """Whether this shows the directory as it is, as other programs see it.

        A private view shows the directory as it was, and the view's own changes.
        """
        return current_view(self)._reads is None

    def behind_links(self, patterns: Sequence[str]) -> frozenset[Parts]:
        """Return the targets, below the root, of links at paths that match some patterns.

        The answer is cached: a call that may not change such paths cannot add to them.
        """
        workspace = self._workspace
        with workspace.lock:
            found = workspace.links.get(patterns)
            if found is None:
                found = workspace.links[patterns] = self._links_behind(PathPatterns(patterns))
            return found

    def _links_behind(self, patterns: PathPatterns) -> frozenset[Parts]:
        tree, disk = self._workspace.tree, self._workspace.disk
        named = list(patterns.literals)
        if patterns.any_depth:
            for parts, kind in walk_kinds(disk, ()):
                if kind == "link" and patterns.match("/".join(parts)):
                    named.append(parts)
        found: set[Parts] = set()
        for parts in named:
            links: set[Parts] = set()
            with contextlib.suppress(FilesystemError, OSError):  # outside the root, or dangling
                where = tree.resolve(parts, seen=links)
                if links:
                    found.add(where)
            found |= links
        return frozenset(found)

    def _below_root(self, target: str) -> list[str] | None:
        return self._workspace.tree.below_root(target)

    def _holds_readonly(self, where: Parts) -> bool:
        return any(node.readonly for _, node in walk(self._look, [where]))

    # What no call may change

    def _check_put(self, where: Parts, node: Node | None, *, directory: bool = False) -> None:
        self.reserved.check(where, self._look, directory=directory)
        if node is not None and node.links > 1 and node.file is not None:
            # A change of a file with several names shows under all of them.
            for name in names_of(self._look, {node.file}, [()]):
                self.reserved.check(name, self._look)

    def _check_gone(self, where: Parts) -> None:
        self.reserved.check_tree(where, self._look)

    def _check_moved(self, origin: Parts, target: Parts, *, copied: bool) -> None:
        if copied:
            self.reserved.check_copied(origin)
        self.reserved.check_moved(origin, target, self._look)

    def check_writable(self, operation: str) -> None:
        if self._sealed is not None or self.read_only is not None:
            super().check_writable(operation)
        self._workspace.check_held()

    # Changing

    def _write(self, where: Parts, data: bytes) -> None:
        self._edit.write(where, data)

    def _make_directory(self, where: Parts) -> None:
        self._edit.make_directory(where)

    def _remove(self, where: Parts) -> None:
        self._edit.remove(where)

    def _rename(self, origin: Parts, target: Parts) -> None:
        self._edit.rename(origin, target)

    def _copy(self, origin: Parts, target: Parts) -> None:
        self._edit.copy(origin, target)

    def _mark(self, where: Parts, node: Node, readonly: bool) -> None:
        mode = node.mode & ~0o222 if readonly else node.mode | 0o200
        if mode == node.mode:
            return
        self._edit.set_attributes(where, mode=mode)
        now = self._look.node(where)
        if now is not None and now.readonly != readonly:
            raise FilesystemError(
                f"{shown(join_path(where))} cannot be marked: its filesystem has no permissions"
            )

    def _change(self, do: Callable[[], R], operation: str) -> R:
        workspace = self._workspace
        with workspace.turn(), workspace.lock, self._lock, defer_interrupts():
            self.check_writable(operation)
            return do() if operation == "restore" else self._atomically(do)

    def _atomically(
        self,
        do: Callable[[], R],
        call: ToolCall | None = None,
        undoes: Sequence[str] = (),
        redo: MakeRedo | None = None,
    ) -> R:
        """Make several changes as a whole, or not at all; outside of views, a transaction."""
        workspace = self._workspace
        self._edit = changes = workspace.begin_in_place()
        try:
            result = do()
            workspace.commit(changes, call, undoes, redo)
        except BaseException:
            workspace.roll_back(changes)
            raise
        finally:
            del self._edit
        return result

    def _go_to(self, place: Place) -> None:
        """Undo what was committed since a snapshot, as a part of the open transaction."""
        go_back(self._open_changes, self._workspace.history, place.serial)

    @property
    def _open_changes(self) -> Changes:
        assert isinstance(self._edit, Changes)
        return self._edit

    # Taking part in a transaction. A view implements what its parent asks of it.

    def _check_merge(self, parent: HostFilesystem) -> None:
        """Raise MergeConflict if something in the read set has changed since the fork."""

    def _merge_into(self, parent: HostFilesystem) -> None:
        raise NotImplementedError

    def _undo_all(self) -> tuple[str, ...]:
        raise NotImplementedError

    def _await_programs(self) -> None:
        """Return when no command changes the directory itself any more."""

    def snapshot_here(self) -> object:
        with self._workspace.lock, self._lock:
            return self._workspace.place()

    def restore_here(self, token: object) -> None:
        with self._workspace.alone(), self._workspace.lock, self._lock:
            self._restore(token)

    def _restore(self, token: object) -> None:
        place = self._own_place(token)
        if place.expired:
            raise SnapshotExpired("an older snapshot was restored since this one was taken")
        history = self._workspace.history
        if not history.own.issuperset(range(place.serial + 1, history.last + 1)):
            raise SnapshotExpired(
                "other processes have changed the directory since this snapshot was taken, and"
                " restoring it would undo that, too: undo your own calls with `undo`"
            )
        for other in self._workspace.places:
            other.expired = other.expired or other.serial > place.serial
        self._go_back(place.serial)

    def _own_place(self, token: object) -> Place:
        if not isinstance(token, Place) or token.workspace is not self._workspace:
            raise ValueError("the token is not a snapshot of this filesystem")
        return token

    def fork(self) -> HostFilesystem:
        """Return a private view: it starts as this is now, and neither sees the other's changes.

        Its changes are stored in the state directory until it is merged. A view of a call that
        works in place ends with that call, or when what the call did before the fork is undone:
        then reading, too, raises ``ViewClosed``.
        """
        workspace = self._workspace
        with workspace.lock, self._lock:
            return PrivateView(self, workspace.forked(), workspace.place())

    def fork_in_place(self) -> HostFilesystem:
        """Return a view that changes the directory itself, journalled; within one, a savepoint.

        There is one at a time: hold ``gate`` while it is open.
        """
        with self._workspace.lock:
            return _ViewInPlace(self)

    def fork_to_read(self, lease: Lease) -> HostFilesystem:
        assert isinstance(lease, Reading)
        return _ReadingView(self, lease)

    def check_conflicts(self, view: HostFilesystem) -> None:
        self._check_own(view)
        with self._workspace.lock, self._lock, view._lock:
            view._check_merge(self)

    def merge(self, view: HostFilesystem) -> None:
        self._check_own(view)
        with self._workspace.lock, self._lock, view._lock:
            if view._ended:
                raise ValueError("the view was merged or discarded before")
            try:
                view._merge_into(self)
            except WinkError:
                raise
            except OSError as error:
                raise worded(error, "committed") from error

    @property
    def holds_redo(self) -> bool:
        history = self._workspace.history
        return history.limits.size > 0 or history.oldest_needed() is not None

    def commit_with(self, redo: MakeRedo) -> None:
        self._redo = redo

    def discard(self, view: HostFilesystem) -> tuple[str, ...]:
        """Undo what a view changed; returns a sentence for each thing that could not be undone.

        May be called again.
        """
        self._check_own(view)
        view.seal("this view was discarded")
        view._await_programs()
        with view._alone(), self._workspace.lock, view._lock:
            if view._ended:
                return ()
            left = view._undo_all()
            # Last: an interrupted discard is repeated.
            view._ended = True
            return left

    def _alone(self) -> contextlib.AbstractContextManager[object]:
        """Return a block in which changes can be undone."""
        return self._workspace.alone()

    def _check_own(self, view: HostFilesystem) -> None:
        if view._parent is not self:
            raise ValueError("only a view that was forked from this filesystem can be merged")

    def changed_here(self) -> tuple[str, ...]:
        """Return every path that this view has changed since it was forked, sorted.

        Of a directory that was added, deleted or moved, everything in it; of a file with several
        names, all of them.
        """
        with self._workspace.lock, self._lock:
            return tuple(map(join_path, self._changed_here()[0]))

    def diff_here(self, detail: Detail | None = None) -> tuple[FileChange, ...]:
        """Return what this view has changed since it was forked, file by file.

        Paths for which ``detail`` returns false are only named.
        """
        with self._workspace.lock, self._lock:
            return tuple(file_changes(*self._changed_here(), detail=detail))

    def replaced_here(
        self, among: Callable[[str], bool], *, meanwhile: bool = False
    ) -> list[tuple[str, bytes]]:
        with self._workspace.lock, self._lock:
            if meanwhile and not self._has_replaced_new():
                return []
            changed, before, _ = self._changed_here()
            named = [(join_path(parts), parts) for parts in changed]
            found = [(path, before.node(parts), parts) for path, parts in named if among(path)]
            return [
                (path, before.read(parts))
                for path, node, parts in found
                if node is not None and node.kind == "file"
            ]

    def _has_replaced_new(self) -> bool:
        """Whether this view may have replaced a file that changed after the view was forked."""
        return True

    def _changed_here(self) -> tuple[list[Parts], Look, Look]:
        """Return the changed paths, and a look at the state before and at the present state."""
        return [], self._look, self._look

    # Commands

    def run(
        self,
        argv: Sequence[str] | str,
        *,
        cwd: str = ".",
        env: Mapping[str, str] | None = None,
        stdin: bytes | str | None = None,
        timeout: float | None = None,
        output_limit: int = DEFAULT_OUTPUT_LIMIT,
        check: bool = False,
        watch: Watch | None = None,
        start: Start | None = None,
        attached: bool = False,
        salvage: Salvage | None = None,
    ) -> CommandResult:
        """Run a command in the directory; its changes are committed or undone with the call.

        The command sees the files as the call sees them. Over an overlay (Linux), its changes
        become visible when it has ended; elsewhere a scan finds them. If it is killed, for example
        by a timeout, the directory is as if it had never run. Processes that it leaves behind are
        killed.

        This is not a sandbox: a command can read and change whatever this process can, and what
        it does outside the directory is not undone.

        Args:
            argv: The program and its arguments; one string is run by ``sh -c``.
            cwd: Where to start it.
            env: Its whole environment; this process's own by default.
            stdin: Its input; empty by default.
            timeout: Seconds after which it is killed.
            output_limit: Maximum bytes of each output stream; the middle of more is left out.
            check: Raise :class:`~weakincentives.errors.CommandFailed` and drop its changes unless
                it ends with exit code 0.
            watch: Called repeatedly while the command runs; it returns why to kill the command,
                or None.
            start: Starts the command, in place of this process: sandboxes use it.
            attached: Give it this process's own input and output, and so the terminal; ``stdin``
                and ``output_limit`` then mean nothing. Without an overlay, processes that it leaves
                behind are not killed.
            salvage: Called with the changes of a command that failed or was killed, when they are
                dropped: ``Branch.take`` makes them on a branch. Without an overlay it is not
                called, and they are there until the call is rolled back: see ``copied_changes``.
        """
        command = Command.of(
            argv,
            env=env,
            stdin=stdin,
            timeout=timeout,
            output_limit=output_limit,
            check=check,
            watch=watch,
            start=start,
            attached=attached,
            salvage=salvage,
        )
        return current_view(self)._run(command, cwd)

    def program(
        self, argv: Sequence[str], *, cwd: str = ".", env: Mapping[str, str] | None = None
    ) -> contextlib.AbstractContextManager[Started]:
        """Run a program on the directory itself, with our input and output, during the block.

        It works across calls: what it changes belongs to the call that expects it, see
        ``expect_external``. If it still runs at the end of the block, it is killed.
        """
        directory = self.root.joinpath(*self._directory(self._parts(cwd)))
        command = Command.of(argv, directory=directory, env=env)
        workspace = self._workspace
        return workspace.commands.attached(command, workspace.store, self.root)

    def _run(self, command: Command, cwd: str) -> CommandResult:
        with self._workspace.turn():
            view = self.fork_in_place()
            try:
                result = view._run(command, cwd)
            except BaseException:
                self.discard(view)
                raise
            self.merge(view)
            return result

    def expect_external(self, noted: Noted | None = None) -> None:
        """Expect other programs to change the directory until this view is merged or discarded.

        Their changes are then found, and committed or undone with the call. With ``noted``, so is
        what they have changed since ``note_files``, as far as it says.
        """
        raise ValueError("only a call that works in place can start programs of its own")

    def copied_changes(self) -> contextlib.AbstractContextManager[list[Step]]:
        """Copy what this view has changed, for the block: ``Branch.take`` makes it on a branch."""
        raise ValueError("only a call that works in place can copy its changes")

    def note_files(self) -> None:
        """Note how all files are, also for a later process: see ``expect_external``.

        What calls commit until ``forget_note`` is taken out of the noted state.
        """
        workspace = self._workspace
        with workspace.turn(), workspace.lock:
            self.check_writable("note_files")
            workspace.note()

    def forget_note(self) -> None:
        """Forget the noted state: no program is at work any more whose changes count."""
        with self._workspace.lock:
            self._workspace.external.forget_note()

    def is_changed_since_noted(self, noted: Noted) -> bool:
        """Tell whether other programs have changed something since ``note_files``."""
        workspace = self._workspace
        with workspace.turn(), workspace.lock:
            if workspace.external.noted_at() is None:
                return False
            workspace.take_out_commits()
            found = workspace.external.manifest.changed(workspace.tree)
            return any(map(noted.covers, found))

    def external_changes(self) -> object:
        """Return what other programs have changed in this call, as a value that equals another
        one if nothing has changed in between; it is false if nothing was changed.
        """
        workspace = self._workspace
        with workspace.lock, self._lock:
            return workspace.external.manifest.state_of_changes(workspace.tree)

    # History

    def history(self) -> tuple[Committed, ...]:
        """Return the calls that changed files and can be undone, oldest first."""
        workspace = self._workspace
        with workspace.lock:
            history = workspace.seen_anew()
            return tuple(history.calls(history.serials()))

    def newest_first(self) -> Iterator[Committed]:
        """Yield the calls of ``history``, newest first; costs those consumed."""
        history = self._workspace.history
        with self._workspace.lock:
            history.refresh()
            return history.calls(history.after(0))

    def redo_of(self, call: Committed) -> Redo | None:
        """Return what a call's record holds for its session; None for nothing."""
        return self._workspace.history.redo(call.serial)

    def diff(self, call_id: str) -> str:
        """Return what a call changed, as a patch for ``git apply``.

        Lines at its start that begin with ``#`` say what a patch cannot have.
        """
        workspace = self._workspace
        with workspace.lock:
            history = workspace.seen_anew()
            return diff_of(history, [self._serial_of(call_id)], workspace.tree)

    def changed_since(self, token: object) -> tuple[str, ...]:
        """Return the paths that calls have changed since a snapshot, sorted.

        A directory that was moved stands for everything in it.
        """
        serial = self._own_place(token).serial
        with self._workspace.lock:
            history = self._workspace.seen_anew()
            calls = history.calls(history.after(serial))
            return tuple(sorted({path for call in calls for path in call.paths}))

    def revert_to(self, call_id: str) -> tuple[str, ...]:
        """Undo every call after this one; that is itself a call in the history.

        What someone else has changed since is left alone, and what would have replaced it is put
        into the store. Returns a sentence for each such path.
        """
        self._check_has_history()
        with self._turn(), self._workspace.lock, self._lock:
            self.check_writable("revert_to")
            return self._go_back(self._serial_of(call_id))

    def undo(
        self,
        *calls: str | Committed,
        force: bool = False,
        leave_edits: bool = False,
        call: ToolCall | None = None,
    ) -> tuple[str, ...]:
        """Undo some calls and nothing else, all of them or none; that is itself in the history.

        What someone has put into a directory that a call removed, replaced or moved away is left
        alone, and the rest comes back around it. Returns a sentence for each thing that is not as
        it was before the calls, such as that, or a directory that now holds other files, too.

        Args:
            calls: Their ids, or entries of the history: an id stands for its newest entry.
            force: Replace what has changed since; what it was is then in the history.
            leave_edits: Leave files alone that someone other than a call has changed since; what
                would have replaced them is put into the store.
            call: The call that undoes them, for the history.

        Raises:
            UndoRefused: Kind, mode, content or link text of a path has changed since these calls.
        """
        self._check_has_history()
        workspace = self._workspace
        with self._turn(), workspace.lock, self._lock:
            self.check_writable("undo")
            serials = self._serials_of(calls)
            if not serials:
                return ()

            def act() -> tuple[str, ...]:
                return undo_calls(
                    self._open_changes,
                    workspace.history,
                    serials,
                    force=force,
                    leave_edits=leave_edits,
                )

            undoes = [each if isinstance(each, str) else each.call_id for each in calls]
            return self._atomically(act, call or call_under_way(), undoes)

    def transact(self, act: Callable[[Changes], R], call: ToolCall) -> R:
        """Make changes in one transaction: that of the call under way, or one of their own."""
        self._check_has_history()
        workspace = self._workspace
        with self._turn(), workspace.lock, self._lock:
            self.check_writable(call.name)

            used: list[Changes] = []

            def act_and_check() -> R:
                changes = self._open_changes
                used.append(changes)
                count = len(changes.records)
                result = act(changes)
                # As a whole: what is put there was checked under the rules of a branch, if at all.
                workspace.check_found(changes.records[count:])
                return result

            try:
                return self._atomically(act_and_check, call_under_way() or call)
            finally:
                for each in used:  # only now: a rollback spares what others do meanwhile
                    each.expected = None

    def branch(self, name: str = "", **options: Any) -> Branch:
        """Make a branch of this directory: see :class:`~weakincentives.filesystem.Branch`."""
        from weakincentives.filesystem.branches import Branch

        options.setdefault("prefix", f"/{join_path(self._prefix)}")
        options.setdefault("unprotected", self.reserved.unprotected)
        return Branch.create(self.root, name, store=self.store, **options)

    def _turn(self) -> contextlib.AbstractContextManager[None]:
        """Return a block that begins when no call works in place; a call's own view is inside."""
        return self._workspace.turn()

    def prune(self, limits: Limits, *, left_too: bool = False) -> Pruned:
        """Remove the oldest calls beyond some limits and unused contents; compress the others.

        With ``left_too``, also remove old content that could not be restored once.
        """
        self._check_has_history()
        workspace = self._workspace
        with workspace.turn(), workspace.lock, self._lock:
            self.check_writable("prune")
            return prune(workspace.history, workspace.external, limits, left_too=left_too)

    def _check_has_history(self) -> None:
        """Raise ValueError in a private view."""

    def _serial_of(self, call_id: str) -> int:
        return self._serials_of([call_id])[0]

    def _serials_of(self, calls: Sequence[str | Committed]) -> list[int]:
        """Return the newest serial of each call."""
        history = self._workspace.history
        found = {each: history.newest_of(each) for each in calls if isinstance(each, str)}
        return [found[each] if isinstance(each, str) else each.serial for each in calls]

    def _go_back(self, serial: int) -> tuple[str, ...]:
        history = self._workspace.history
        undoes = [call.call_id for call in history.calls(history.after(serial))]

        def act() -> tuple[str, ...]:
            return go_back(self._open_changes, history, serial)

        return self._atomically(act, call_under_way(), undoes)


class _View(HostFilesystem):
    """A view of a filesystem on disk: a call's own, until it is merged or discarded."""

    def __init__(self, parent: HostFilesystem) -> None:
        self.__dict__.update(parent.__dict__)
        self.read_only = self._sealed = None
        self._lock = threading.RLock()
        self._parent = parent
        self._ended = False
        self.call = call_under_way() or parent.call

    def _change(self, do: Callable[[], R], operation: str) -> R:
        with self._lock, defer_interrupts():
            self.check_writable(operation)
            return self._step(do)

    def _step(self, do: Callable[[], R]) -> R:
        """Make a change that puts one thing at one path, as a whole or not at all.

        What this view itself has put there before is not saved.
        """
        raise NotImplementedError

    def _atomically(
        self,
        do: Callable[[], R],
        call: ToolCall | None = None,
        undoes: Sequence[str] = (),
        redo: MakeRedo | None = None,
    ) -> R:
        return self._step(do)

    @property
    def holds_redo(self) -> bool:
        return False  # what is merged into a view is not committed yet

    def _turn(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def _is_sealed(self) -> bool:
        return self._sealed is not None

    # Commands

    def _run(self, command: Command, cwd: str) -> CommandResult:
        workspace = self._workspace
        with workspace.lock, self._lock:
            if self._is_sealed() or self.read_only is None:
                self.check_writable("run")
            where = self._directory(self._parts(cwd))
            command = replace(command, directory=self.root.joinpath(*where))
            identity = self._identity()
            way = workspace.commands.way(self.root)
            overlay = None
            if not isinstance(way, str):
                overlay = workspace.commands.begin(way, self.root, identity)
        if overlay is None:
            return self._run_scanned(command, str(way))
        try:
            return self._run_over(command, overlay)
        finally:
            workspace.commands.end(overlay)

    def _identity(self) -> tuple[int, int]:
        """Return device and inode of the directory; raise if its path leads to another one now.

        A command would see that one, and its changes would be made in this one.
        """
        own = os.fstat(self._workspace.tree.fd)
        with contextlib.suppress(OSError):  # else whoever starts the command says why it cannot
            if not os.path.samestat(own, os.stat(self.root)):
                raise FilesystemError(
                    f"{shown(str(self.root))} is another directory now: open it again to run"
                    " commands"
                )
        return own.st_dev, own.st_ino

    def _run_scanned(self, command: Command, reason: str) -> CommandResult:
        """Run a command on the directory itself, and find what it changed."""
        raise FilesystemError(
            f"A concurrent or read-only command needs an overlay: {reason}. Run it in a call of"
            " its own"
        )

    def _run_over(self, command: Command, overlay: Overlay) -> CommandResult:
        """Run a command over an overlay, and make its changes this view's changes."""
        try:
            with self._workspace.steady():
                overlay.prepare(command.stdin)
                self._cover(overlay)
                began_ns = self._workspace.now_ns()
                try:
                    result = run_over(overlay, command, self._is_sealed)
                except BaseException:
                    self._salvage(command, overlay)
                    raise
                steps = overlay.steps(self._workspace.tree) if result.kept else []
                if not result.kept:
                    self._salvage(command, overlay)
                if command.attached:
                    result = replace(result, others=self._changed_outside(began_ns))
            if steps and self.read_only is not None:
                raise ReadOnlyView(self.read_only)
            if steps or self._is_sealed():
                # Interrupts pass: it may take long, and undoes itself when it is interrupted.
                with self._lock:
                    self.check_writable("run")
                    self._check_meanwhile(steps, began_ns)
                    self._atomically(partial(self._apply, steps))
        except ProtectedPath as error:
            raise ProtectedPath(f"{error}. All changes of the command are undone") from error
        except WinkError:
            raise
        except OSError as error:
            raise FilesystemError(
                f"The command's changes could not be committed: {error.strerror}"
            ) from error
        return result

    def _salvage(self, command: Command, overlay: Overlay) -> None:
        """Hand over the changes of a command that are dropped."""
        if command.salvage is not None and overlay.started:
            steps = overlay.steps(self._workspace.tree)
            if steps:
                command.salvage(steps)

    def _changed_outside(self, began_ns: int) -> tuple[str, ...]:
        """Return what has changed in the directory itself since a command began.

        Of a directory whose entries came or went, only its own name is known.
        """
        found = walk(self._workspace.disk, [()])
        return tuple(
            f"{join_path(parts)}/" if node.is_directory else join_path(parts)
            for parts, node in found
            if node.ctime_ns > began_ns
        )

    def _cover(self, overlay: Overlay) -> None:
        """Let a command see what this view shows."""

    def _check_meanwhile(self, steps: Sequence[Step], began_ns: int) -> None:
        """Raise MergeConflict if someone changed, during a command, a file that it changed."""

    def _changed_meanwhile(
        self, tops: Iterable[Parts], began_ns: int, is_ours: Callable[[Parts, Node], bool]
    ) -> list[str]:
        """Return the files at and below some paths that others have changed since a time."""
        return sorted(
            join_path(parts)
            for parts, node in walk(self._workspace.disk, tops)
            if node.kind != "directory" and node.ctime_ns > began_ns and not is_ours(parts, node)
        )

    def _apply(self, steps: Sequence[Step]) -> None:
        for step in steps:
            if self._check_step(step):
                step.do(self._edit)

    def _check_step(self, step: Step) -> bool:
        """Raise if a step is a change that no call may make; False if it changes nothing."""
        reserved, look, parts = self.reserved, self._look, step.parts
        if step.action == "remove":
            reserved.check_tree(parts, look)
            return True
        if step.source is not None and reserved.is_rewritten_as_it_was(parts, look, *step.source):
            return False
        node = look.node(parts) if step.action in ("attributes", "rewrite") else None
        is_directory = step.action == "directory" or (node is not None and node.kind == "directory")
        self._check_put(parts, node, directory=is_directory)
        return True


@dataclass(frozen=True, slots=True, eq=False)
class _Mark:
    """A savepoint in a call that works in place."""

    changes: Changes
    mark: int


class _ViewInPlace(_View):
    """A view that changes the directory itself, journalled; or a savepoint within one."""

    def __init__(self, parent: HostFilesystem, changes: Changes | None = None) -> None:
        super().__init__(parent)
        self._savepoint = None if changes is None else changes.mark()
        """Where this view begins; None for the whole transaction."""
        self._undoes: tuple[str, ...] = ()
        """The calls that this view has undone."""
        self._nested: list[_ViewInPlace] = []
        self._began_ns = int(SYSTEM_CLOCK.time() * 1e9) - _TICK_NS
        # Last: the transaction that begins here must end through this view.
        self._edit = self._changes = changes or parent._workspace.begin_in_place()

    def _atomically(
        self,
        do: Callable[[], R],
        call: ToolCall | None = None,
        undoes: Sequence[str] = (),
        redo: MakeRedo | None = None,
    ) -> R:
        self._changes.save_anew()
        result = self._step(do)
        self._undoes += tuple(undoes)
        return result

    def _step(self, do: Callable[[], R]) -> R:
        workspace, changes = self._workspace, self._changes
        if workspace.private:
            changes.save_anew()
        if workspace.expects_programs:
            workspace.settle(changes)
        index = len(changes.records)
        try:
            result = do()
        except BaseException:
            with workspace.external.undoing(changes):
                changes.undo_since(index)
            raise
        if workspace.expects_programs or workspace.private:
            workspace.changed(changes, index)
        return result

    def seal(self, reason: str) -> None:
        # An abandoned call may be in the middle of one that is nested in it.
        with self._lock:
            super().seal(reason)
            for view in self._nested:
                view.seal(reason)

    def snapshot_here(self) -> object:
        with self._lock:
            self._workspace.settle(self._changes)
            return _Mark(self._changes, self._changes.mark())

    def _restore(self, token: object) -> None:
        if isinstance(token, _Mark) and token.changes is self._changes:
            with self._workspace.undoing(token.changes):
                token.changes.undo_to(token.mark)
        else:
            super()._restore(token)

    def fork_in_place(self) -> HostFilesystem:
        with self._workspace.lock:
            self._workspace.settle(self._changes)
            view = _ViewInPlace(self, self._changes)
            view._lock = self._lock  # sealing one waits for a change within the other
            self._nested.append(view)
            view._sealed = self._sealed
        return view

    def _merge_into(self, parent: HostFilesystem) -> None:
        """End a nested view, or commit the outermost one."""
        if isinstance(parent, _ViewInPlace):
            parent._undoes += self._undoes
        else:
            self._workspace.commit(self._changes, self.call, self._undoes, self._redo)
        self._ended = True
        self.seal("this view was merged")

    def _await_programs(self) -> None:
        self._workspace.commands.wait("scan")  # an abandoned call may run one: it is killed

    def _undo_all(self) -> tuple[str, ...]:
        workspace, changes = self._workspace, self._changes
        if workspace.in_place is not changes:
            return ()  # it has ended, with everything nested in it
        if self._savepoint is None:
            return workspace.roll_back(changes)
        with workspace.undoing(changes):
            return changes.undo_to(self._savepoint)

    def _changed_here(self) -> tuple[list[Parts], Look, Look]:
        self._workspace.settle(self._changes)
        return self._workspace.changed_by(self._changes.since(self._savepoint))

    def _has_replaced_new(self) -> bool:
        # Of a directory, a file in it may have changed.
        found = (record.before for record in self._changes.since(self._savepoint))
        return any(b and (b.is_directory or b.ctime_ns > self._began_ns) for b in found)

    def covers(self, path: str) -> bool:
        root = f"{self.root}/"
        if not path.startswith(root):
            return False
        parts = tuple(path.removeprefix(root).split("/"))
        return _have_changed(self._changes.since(self._savepoint), parts)

    def _check_meanwhile(self, steps: Sequence[Step], began_ns: int) -> None:
        removed = [step.parts for step in steps if step.action == "remove"]
        put = [step.parts for step in steps if step.action not in ("remove", "directory")]
        with contextlib.closing(Near(self._workspace.tree)) as near:
            files = [parts for parts in put if _has_file(near, parts)]

        def is_ours(parts: Parts, node: Node) -> bool:  # made in another thread of the call
            return _have_changed(self._changes.records, parts)

        names = self._changed_meanwhile((*removed, *files), began_ns, is_ours)
        if names:
            raise MergeConflict(
                f"Someone else changed {_some(names)} while the command ran, and so did the "
                "command. All changes of the command are undone. Read it again, then retry",
                names,
            )

    def _run_scanned(self, command: Command, reason: str) -> CommandResult:
        if self.read_only is not None:
            return super()._run_scanned(command, reason)
        workspace, changes, kept = self._workspace, self._changes, False
        with contextlib.ExitStack() as under_way:
            with workspace.lock, self._lock:
                self.check_writable("run")
                under_way.enter_context(workspace.commands.in_place())
                workspace.expect_programs(changes)
            index = len(changes.records)
            try:
                result = run_plainly(command, workspace.store, self._is_sealed, reason)
                with self._lock:
                    workspace.settle(changes)
                    if result.kept or self._is_sealed():
                        self.check_writable("run")
                        workspace.check_found(changes.records[index:])
                        workspace.note_changes(changes, index)
                        kept = True
                return result
            finally:
                if not kept and command.salvage is None:
                    with self._lock, workspace.external.undoing(changes):
                        changes.undo_since(index)

    @contextlib.contextmanager
    def copied_changes(self) -> Generator[list[Step]]:
        workspace, changes = self._workspace, self._changes
        with tempfile.TemporaryDirectory(dir=workspace.store.path, prefix="salvage-") as place:
            with workspace.lock, self._lock:
                workspace.settle(changes)
                paths, before, _ = workspace.changed_by(changes.since(self._savepoint))
                copies = Tree(Path(place))
                steps = list(copied_steps(paths, before, workspace.tree, copies))
            with contextlib.closing(copies):
                yield steps

    def expect_external(self, noted: Noted | None = None) -> None:
        with self._workspace.lock, self._lock:
            self.check_writable("expect_external")
            self._workspace.expect_programs(self._changes, noted)


@dataclass(frozen=True, slots=True, eq=False)
class _Staged:
    """The state of a private view."""

    staging: Staging
    state: State
    place: Place | None
    """The snapshot it was forked from; None for a view of a private view."""


class PrivateView(_View):
    """A view whose changes are invisible to others until it is merged."""

    def __init__(self, parent: HostFilesystem, base: Look, place: Place | None) -> None:
        workspace = parent._workspace
        super().__init__(parent)
        self._look = self._edit = self._staging = Staging(base, workspace.store)
        self._reads = Reads()
        self._place = place
        self._began_ns = workspace.now_ns() if place is not None else 0
        """When it was forked; 0 for a view of a view, which is checked when that is merged."""
        workspace.private.add(self)

    def _step(self, do: Callable[[], R]) -> R:
        state = self._staging.state
        try:
            return do()
        except BaseException:
            self._staging.state = state
            raise

    def snapshot_here(self) -> object:
        with self._lock:
            return _Staged(self._staging, self._staging.state, self._place)

    def _restore(self, token: object) -> None:
        if isinstance(token, _Staged):
            if token.staging is self._staging:
                self._staging.state = token.state
                return
            # Of another view: its parent's state, and its changes.
            place, state = self._own_place(token.place), token.state
        else:
            place, state = self._own_place(token), None
            if place.expired:
                raise SnapshotExpired("an older snapshot was restored since this one was taken")
        self._note(())
        self._go_to(place, state)

    def _go_to(self, place: Place, state: State | None = None) -> None:
        self._staging.go_to(place, state or State(Layer(self._workspace.at(place))))

    def fork(self) -> HostFilesystem:
        with self._workspace.lock, self._lock:
            return PrivateView(self, self._staging.layer, None)

    def fork_in_place(self) -> HostFilesystem:
        return self.fork()  # it is not on disk: a call nested in one on a branch gets another

    def _check_merge(self, parent: HostFilesystem) -> None:
        onto = parent._staging.layer if isinstance(parent, PrivateView) else None
        if self._reads is not None:
            self._staging.check_conflicts(self._reads, onto, parent._look)

    def _merge_into(self, parent: HostFilesystem) -> None:
        staging = self._staging
        self._check_merge(parent)
        if staging.changed:
            parent.check_writable("merge")
        if parent._reads is not None and self._reads is not None:
            parent._reads.include(self._reads)
        if not staging.changed:
            return
        if self._reads is not None and self._began_ns:
            self._check_people(self._reads.touched)
        if self._sealed is not None:
            # Its call has ended, so the state before the commit, which is costly, is not needed.
            self._workspace.private.discard(self)
        try:
            parent._atomically(
                lambda: staging.replay(parent._edit, parent._go_to), self.call, (), self._redo
            )
        except BaseException as error:
            self._workspace.private.add(self)
            if isinstance(error, WinkError) or not isinstance(error, OSError):
                raise
            if error.errno in _NOT_AS_IT_WAS:
                raise MergeConflict(f"Changed by someone else in the meantime: {error}") from error
            raise worded(error, "changed") from error

    def _check_people(self, touched: AbstractSet[Parts]) -> None:
        """Raise MergeConflict if a file that was read or changed here was changed on disk, too."""
        disk, written = self._workspace.disk, self._staging.written
        tops = [each for each in touched if each in written or kind_at(disk, each) != "directory"]
        ours = self._changed_by_calls()

        def is_ours(parts: Parts, node: Node) -> bool:  # compared with what the view has read
            return node.file in ours.files or any(
                parts[:depth] in ours.paths for depth in range(len(parts) + 1)
            )

        names = self._changed_meanwhile(tops, self._began_ns, is_ours)
        if names:
            raise MergeConflict(f"Changed by someone else in the meantime: {_some(names)}", names)

    def _changed_by_calls(self) -> Changed:
        """Return what other calls have changed since the fork."""
        base = self._staging.base
        return base.changed() if isinstance(base, Present) else Changed(set(), set())

    def _undo_all(self) -> tuple[str, ...]:
        self._workspace.private.discard(self)
        self._staging.drop()
        return ()

    def _changed_here(self) -> tuple[list[Parts], Look, Look]:
        staging = self._staging
        files = set(staging.layer.files)
        changed = all_changed(staging.written, staging.wholes, files, staging.base, staging)
        return changed, staging.base, staging

    def _check_has_history(self) -> None:
        raise ValueError("a private view has no history of its own")

    def _cover(self, overlay: Overlay) -> None:
        self._note(())  # the command may read anything
        overlay.cover(self._staging, self._staging.covered, self._workspace.tree)


class _ReadingView(PrivateView):
    """A view of the directory as it is, for a call beside the one that has it to itself."""

    def __init__(self, parent: HostFilesystem, reading: Reading) -> None:
        super().__init__(parent, reading.present, None)
        self._reads = None  # nobody changes what it reads
        self._reading = reading

    def _run(self, command: Command, cwd: str) -> CommandResult:
        with self._reading.kept():
            return super()._run(command, cwd)

    def _alone(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()  # it has changed nothing

    def _check_has_history(self) -> None:
        """It has that of the directory."""


def _has_file(near: Near, parts: Parts) -> bool:
    """Whether there is something at a path besides a directory."""
    with contextlib.suppress(OSError):
        status = near.status(parts)
        return status is not None and not stat.S_ISDIR(status.st_mode)
    return False


def _have_changed(records: Iterable[Record], parts: Parts) -> bool:
    """Whether records have changed a path, or a directory around it as a whole."""
    return any(
        parts == own or (record.is_whole and parts[: len(own)] == own)
        for record in records
        for own in record.paths
    )


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(map(shown, names[:5])) + more


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineUse:
    """Which engine undoes the changes of tools with one kind of ``writes``, and why."""

    writes: Literal["api", "command", "external"]
    engine: Literal["journal", "overlay", "scan"]
    reason: str


def engines(fs: HostFilesystem) -> tuple[EngineUse, ...]:
    """Return the engine for each kind of ``writes`` on this workspace."""
    way = find_way(fs.root, fs.store)
    if isinstance(way, str):
        engine, why = "scan", way
    else:
        engine, why = "overlay", "in a user namespace" if way.owner else "mounted by root"
    return (
        EngineUse(writes="api", engine="journal", reason="every change is journalled first"),
        EngineUse(writes="command", engine=engine, reason=why),
        EngineUse(writes="external", engine="scan", reason="changes are found by comparing files"),
    )
