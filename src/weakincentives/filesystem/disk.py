"""A filesystem over a real directory: every call's changes can be kept, or undone exactly."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

from weakincentives.call import ToolCall, call_under_way, current_view
from weakincentives.clock import SYSTEM_CLOCK, Clock
from weakincentives.errors import (
    FilesystemError,
    MergeConflict,
    ProtectedPath,
    ReadOnlyView,
    SnapshotExpired,
    ViewClosed,
    WinkError,
)
from weakincentives.filesystem.base import BaseFilesystem, Reads, reading, worded
from weakincentives.filesystem.changes import Changes
from weakincentives.filesystem.commands import (
    DEFAULT_OUTPUT_LIMIT,
    Command,
    CommandResult,
    Watch,
    apply_steps,
    run_over,
    run_plainly,
)
from weakincentives.filesystem.diffs import FileChange, all_changed, file_changes
from weakincentives.filesystem.history import DEFAULT_LIMIT, Committed
from weakincentives.filesystem.layers import Layer, Look, Node, names_of
from weakincentives.filesystem.overlay import Layers, Step
from weakincentives.filesystem.patterns import PathPatterns
from weakincentives.filesystem.protocol import (
    BARRED,
    DEFAULT_ROOT,
    FileStat,
    Parts,
    join_path,
    shown,
    split_root,
)
from weakincentives.filesystem.scratch import TEMPORARY
from weakincentives.filesystem.staging import Edit, Staging, State
from weakincentives.filesystem.store import Store
from weakincentives.filesystem.tree import supported
from weakincentives.filesystem.undo import diff_of, go_back, undo_calls
from weakincentives.filesystem.workspace import Place, Workspace
from weakincentives.gate import Gate
from weakincentives.locks import undisturbed

R = TypeVar("R")
T = TypeVar("T")

# What a change fails with when the way to it is not as it was.
_NOT_AS_IT_WAS = BARRED | {errno.ENOENT, errno.EEXIST, errno.ENOTEMPTY, errno.EISDIR}


class HostFilesystem(BaseFilesystem[Node, Look]):
    """A :class:`~weakincentives.filesystem.Filesystem` over a real directory.

    Whatever a call changes is journalled beside the directory before it is made, so it can be
    undone exactly: also after the process was killed, when the directory is opened again. One
    process at a time can have a directory open.

    Args:
        root: The directory.
        prefix: The virtual prefix below which absolute paths are understood.
        store: Where to keep what undoing takes; beside the directory by default.
        durability: ``"fast"`` survives a killed process, ``"safe"`` also a loss of power.
        wait: Seconds to wait for another process that has the directory open.
        history_limit: Bytes to keep at most so that committed calls can be undone.
        unprotected: Globs of paths that may be changed although their names protect them, such as
            ``".git/config"``: see :doc:`security`. One without a slash is a name at any depth.
    """

    _edit: Edit
    """Where changes are made, while a transaction is open."""

    journalled = True

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        prefix: str = DEFAULT_ROOT,
        store: str | os.PathLike[str] | None = None,
        durability: Literal["fast", "safe"] = "fast",
        wait: float = 0.0,
        history_limit: int = DEFAULT_LIMIT,
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
        self._prefix = split_root(prefix)
        self.read_only: str | None = None
        self.call: ToolCall | None = None
        """The call that a view belongs to; it names what is committed in the history."""
        self._sealed = None
        self._reads = None
        self._lock = threading.RLock()
        self._parent: HostFilesystem | None = None
        self._ended = False
        """Whether a view was merged or discarded."""
        path = None if store is None else Path(store)
        opened = Store(Path(root), path=path, wait=wait, safe=durability == "safe")
        self._workspace = workspace = Workspace(
            Path(root), opened, limit=history_limit, clock=clock, unprotected=unprotected
        )
        self._read_lock = workspace.lock
        self._look = workspace.disk
        self.root = workspace.tree.path
        """The directory, as the system names it."""
        self.store = workspace.store.path
        """Where what undoing takes is kept."""
        self.reserved = workspace.reserved
        """What in the directory no call may change."""
        self.recovered: tuple[str, ...] = workspace.recovered
        """What opening the directory found and could not put back, a sentence each."""

    @property
    def gate(self) -> Gate:
        """Held by the call that works in place; others wait for it."""
        return self._workspace.gate

    def close(self) -> None:
        """Undo what is open, and let others have the directory. May be called again."""
        workspace = self._workspace
        if not workspace.closing.alive:
            return
        with workspace.lock:
            if workspace.in_place is not None and workspace.store.pid == os.getpid():
                workspace.roll_back(workspace.in_place)
            workspace.history.journal.close()
            workspace.closing()

    def __enter__(self) -> HostFilesystem:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Looking

    @property
    def shows_disk(self) -> bool:
        """Whether what it shows is the directory as it is: a program that reads it sees the same.

        A private view shows the directory as it was, and what the view has changed.
        """
        return current_view(self)._reads is None

    @reading
    def unnamed(self, path: str = ".") -> tuple[str, ...]:
        """Return the names in a directory that are not UTF-8, escaped: no path can name them."""
        where = self._directory(self._parts(path))
        names = (os.fsencode(name) for name, _ in self._look.nodes(where) if not _is_text(name))
        return tuple(sorted(ascii(name.decode("latin-1"))[1:-1] for name in names))

    def behind_links(self, patterns: Sequence[str]) -> frozenset[Parts]:
        """Return what paths that match some patterns lead to through links, below the root.

        It is looked for once: a call that may not change such paths cannot make more of them.
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
        pending: list[Parts] = [()]
        while pending:
            here = pending.pop()
            with contextlib.suppress(OSError):
                for name, kind in disk.kinds(here):
                    parts = (*here, name)
                    if kind == "link" and patterns.match("/".join(parts)):
                        named.append(parts)
                    elif kind == "directory" and patterns.any_depth:
                        pending.append(parts)
        found: set[Parts] = set()
        for parts in named:
            links: set[Parts] = set()
            with contextlib.suppress(FilesystemError, OSError):  # it leads outside, or nowhere
                where = tree.resolve(parts, seen=links)
                if links:
                    found.add(where)
            found |= links
        return frozenset(found)

    def _stat(self, path: str, node: Node) -> FileStat:
        return FileStat(
            path=path,
            kind=node.kind,
            size=node.size if node.kind == "file" else 0,
            modified=node.mtime_ns / 1e9,
            readonly=node.readonly,
        )

    def _below_root(self, target: str) -> list[str] | None:
        return self._workspace.tree.below_root(target)

    def _shown(self, entries: list[tuple[str, T]]) -> list[tuple[str, T]]:
        return [each for each in entries if not each[0].startswith(TEMPORARY) and _is_text(each[0])]

    def _holds_readonly(self, where: Parts) -> bool:
        pending = [where]
        while pending:
            directory = pending.pop()
            for name, inner in self._look.nodes(directory):
                if inner.readonly:
                    return True
                if inner.kind == "directory":
                    pending.append((*directory, name))
        return False

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

    def _check_writable(self, operation: str, args: tuple[object, ...] = ()) -> None:
        sealed, workspace = self._why_sealed(), self._workspace
        if sealed is not None or self.read_only is not None:
            self._check_open(operation, args, sealed)
        if workspace.store.pid != os.getpid():
            raise ViewClosed("this filesystem belongs to the process that opened it")
        if not workspace.closing.alive:
            raise ViewClosed("this filesystem was closed")

    def _why_sealed(self) -> str | None:
        """Return why this takes no more changes, or None."""
        return self._sealed

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
                f"{shown(join_path(where))} cannot be marked: its filesystem does not keep"
                " permissions"
            )

    def _change(self, do: Callable[[], R], operation: str, args: tuple[object, ...] = ()) -> R:
        workspace = self._workspace
        with workspace.turn(), workspace.lock, self._lock, undisturbed():
            self._check_writable(operation, args)
            return do() if operation == "restore" else self._in_transaction(do, None)

    def _in_transaction(self, do: Callable[[], R], call: ToolCall | None) -> R:
        with self._workspace.transaction(call) as self._edit:
            try:
                return do()
            finally:
                del self._edit

    def _whole(self, do: Callable[[], R], *, anew: bool = True) -> R:
        """Make a change of a view as a whole, or not at all; here it is a transaction itself.

        Without ``anew``, what this view itself has put at a path is not kept when it is replaced:
        only for a change that puts one thing at one path.
        """
        return do()

    def _replay(self, staging: Staging, call: ToolCall | None) -> None:
        """Make the changes of a private view here, all of them or none."""
        self._in_transaction(lambda: staging.replay(self._edit, self._go_to), call)

    def _go_to(self, place: object) -> None:
        """Make everything as it was at a place, as a part of the open transaction."""
        assert isinstance(place, Place)
        assert isinstance(self._edit, Changes)
        go_back(self._edit, self._workspace.history, place.serial)

    # Taking part in a transaction. A view overrides what its parent asks of it.

    def _check_merge(self, parent: HostFilesystem) -> None:
        """Raise MergeConflict if something this view depends on has changed since the fork."""

    def _merge_into(self, parent: HostFilesystem) -> None:
        raise NotImplementedError

    def _undo_all(self) -> tuple[str, ...]:
        raise NotImplementedError

    def _await_programs(self) -> None:
        """Return when no command changes the directory itself any more."""

    def snapshot_here(self) -> object:
        with self._lock:
            return self._workspace.place()

    def restore_here(self, token: object) -> None:
        with self._workspace.lock, self._lock:
            self._restore(token)

    def _restore(self, token: object) -> None:
        place = self._own_place(token)
        if place.expired:
            raise SnapshotExpired("an older snapshot was restored since this one was taken")
        for other in self._workspace.places:
            other.expired = other.expired or other.serial > place.serial
        self._go_back(place.serial)

    def _own_place(self, token: object) -> Place:
        if not isinstance(token, Place) or token.workspace is not self._workspace:
            raise ValueError("the token is not a snapshot of this filesystem")
        return token

    def fork(self) -> HostFilesystem:
        """Return a private view: it starts as this is now, and neither sees the other's changes.

        What it writes is kept beside the directory until it is merged. A view of a call that works
        in place ends with it: once that call has ended, or what it had done until the fork was
        undone, the view raises ``ViewClosed``, also on reading.
        """
        workspace = self._workspace
        with workspace.lock, self._lock:
            return _PrivateView(self, workspace.forked(), workspace.place())

    def fork_in_place(self) -> HostFilesystem:
        """Return a view that changes the directory itself, journalled; within one, a savepoint.

        There is one at a time: hold ``gate`` while it is open.
        """
        with self._workspace.lock:
            return _ViewInPlace(self)

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
            except OSError as error:
                if isinstance(error, WinkError):
                    raise
                raise worded(error, "kept") from error

    def discard(self, view: HostFilesystem) -> tuple[str, ...]:
        """Undo what a view changed. May be called again.

        Returns a sentence for each thing that could not be put back; normally there is none.
        """
        self._check_own(view)
        view.seal("this view was discarded")
        view._await_programs()
        with self._workspace.lock, view._lock:
            if view._ended:
                return ()
            left = view._undo_all()
            # Last: one that was interrupted is to be called again.
            view._ended = True
            return left

    def _check_own(self, view: HostFilesystem) -> None:
        if view._parent is not self:
            raise ValueError("only a view that was forked from this filesystem can be merged")

    @property
    def written(self) -> frozenset[str]:
        """The paths a private view has changed, directories standing for all below."""
        return frozenset()

    def changed_here(self) -> tuple[str, ...]:
        """Return every path that this view has changed since it was forked, sorted.

        Of a directory that came, went or was moved, all that is in it; of a file with several
        names, all of them. What costs is what was changed: only a file with several names that is
        changed in place is looked for everywhere.
        """
        with self._workspace.lock, self._lock:
            return tuple(map(join_path, self._changed_here()[0]))

    def diff_here(self) -> tuple[FileChange, ...]:
        """Return what this view has changed since it was forked, file by file."""
        with self._workspace.lock, self._lock:
            return tuple(file_changes(*self._changed_here()))

    def _changed_here(self) -> tuple[list[Parts], Look, Look]:
        """Return what was changed, and how to look at it as it was before and as it is now."""
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
    ) -> CommandResult:
        """Run a command in the directory; what it changes is kept or undone with the call.

        The command sees the files as the call sees them. Over an overlay (Linux), nobody sees what
        it changes before it has ended; elsewhere what it changed is found by looking. When it is
        killed, by a timeout for one, the directory is as if it had never run. Processes that it
        leaves behind are killed.

        This is not a sandbox: a command can read and change whatever this process can, and what
        it does outside of the directory is not undone.

        Args:
            argv: The program and its arguments; one string is run by ``sh -c``.
            cwd: Where to start it.
            env: All of its environment; this process's own by default.
            stdin: What it can read; nothing by default.
            timeout: Seconds after which it is killed.
            output_limit: Bytes of each of its outputs to keep; the middle of more is left out.
            check: Raise :class:`~weakincentives.errors.CommandFailed` when it does not end well;
                then what it changed is not kept.
            watch: Asked again and again while the command runs; what it returns is why the command
                is killed then, as by a timeout.
        """
        command = Command.of(
            argv, env=env, stdin=stdin, timeout=timeout, limit=output_limit, watch=watch
        )
        return current_view(self)._run(command, cwd, check)

    def _run(self, command: Command, cwd: str, check: bool) -> CommandResult:
        with self._workspace.turn():
            view = self.fork_in_place()
            try:
                result = view._run(command, cwd, check)
            except BaseException:
                self.discard(view)
                raise
            self.merge(view)
            return result

    def expect_external(self) -> None:
        """Expect other programs to change the directory until this view is merged or discarded.

        What they change is then found, and kept or undone with the call.
        """
        raise ValueError("only a call that works in place can start programs of its own")

    # What was committed

    def history(self) -> tuple[Committed, ...]:
        """Return the calls that changed files and can be undone, oldest first."""
        workspace = self._workspace
        with workspace.lock:
            history = workspace.history
            return tuple(delta.committed for delta in history.readable(history.serials()))

    def diff(self, call_id: str) -> str:
        """Return what a call changed, as a unified diff."""
        workspace = self._workspace
        with workspace.lock:
            return diff_of(workspace.history, [self._serial_of(call_id)], workspace.disk)

    def changed_since(self, token: object) -> tuple[str, ...]:
        """Return the paths that were changed by what was committed since a snapshot, sorted.

        A directory that was moved stands for all that is in it.
        """
        serial, history = self._own_place(token).serial, self._workspace.history
        with self._workspace.lock:
            deltas = history.readable(history.after(serial))
            return tuple(sorted({path for delta in deltas for path in delta.committed.paths}))

    def revert_to(self, call_id: str) -> tuple[str, ...]:
        """Go back to how things were right after a call: what came later is undone.

        What someone else has changed since is left alone, and kept as it would be in the store.
        That is itself a change that the history has, so it can be undone. Returns a sentence for
        each thing that was left alone.
        """
        self._check_has_history()
        with self._workspace.lock, self._lock:
            self._check_writable("revert_to", (call_id,))
            return self._whole(partial(self._go_back, self._serial_of(call_id)))

    def undo(self, *call_ids: str, force: bool = False) -> tuple[str, ...]:
        """Take back what some calls changed, and nothing else: all of it, or nothing.

        That is itself a change that the history has, so it can be undone, too. Returns a sentence
        for each thing that is not as it was before the calls: a directory that holds more by now.

        Raises:
            UndoRefused: Something is not as these calls left it. ``force`` replaces it; what it
                was is then kept in the history.
        """
        self._check_has_history()
        workspace = self._workspace
        with workspace.lock, self._lock:
            self._check_writable("undo", call_ids)
            serials = [self._serial_of(call_id) for call_id in call_ids]
            if not serials:
                return ()

            def act(changes: Changes) -> tuple[str, ...]:
                return undo_calls(changes, workspace.history, serials, force=force)

            return self._whole(partial(self._take_back, act, call_ids))

    def _check_has_history(self) -> None:
        """Raise ValueError if committed calls cannot be undone here."""

    def _serial_of(self, call_id: str) -> int:
        history = self._workspace.history
        for delta in history.readable(reversed(history.serials())):
            if delta.committed.call_id == call_id:
                return delta.committed.serial
        raise LookupError(f"the history has no call {call_id!r}")

    def _go_back(self, serial: int) -> tuple[str, ...]:
        history = self._workspace.history
        undoes = [delta.committed.call_id for delta in history.readable(history.after(serial))]
        return self._take_back(lambda changes: go_back(changes, history, serial), undoes)

    def _take_back(
        self, act: Callable[[Changes], tuple[str, ...]], undoes: Sequence[str]
    ) -> tuple[str, ...]:
        """Undo what earlier calls changed, as a change that the history has."""
        with self._workspace.transaction(call_under_way(), undoes) as changes:
            return act(changes)


class _View(HostFilesystem):
    """A view of a filesystem on disk: a call's own, until it is merged or discarded."""

    def __init__(self, parent: HostFilesystem) -> None:
        self.__dict__.update(parent.__dict__)
        self.read_only = self._sealed = None
        self._lock = threading.RLock()
        self._parent = parent
        self._ended = False
        self.call = call_under_way() or parent.call

    def _change(self, do: Callable[[], R], operation: str, args: tuple[object, ...] = ()) -> R:
        with self._lock, undisturbed():
            self._check_writable(operation, args)
            return self._whole(do, anew=False)

    def _replay(self, staging: Staging, call: ToolCall | None) -> None:
        self._whole(lambda: staging.replay(self._edit, self._go_to))

    # Commands

    _can_scan = False
    """Whether a command may change the directory itself."""

    def _run(self, command: Command, cwd: str, check: bool) -> CommandResult:
        workspace = self._workspace
        with workspace.lock, self._lock:
            if self._is_given_up() or self.read_only is None:
                self._check_writable("run")
            where = self._directory(self._parts(cwd))
            command = replace(command, directory=self.root.joinpath(*where))
            way = workspace.commands.way(self.root)
            if isinstance(way, str) and (not self._can_scan or self.read_only is not None):
                raise FilesystemError(
                    "A command that runs beside others, or may change nothing, needs an overlay:"
                    f" {way}. Run it in a call of its own"
                )
            layers = None if isinstance(way, str) else workspace.commands.begin(way, self.root)
        if isinstance(way, str) or layers is None:
            return self._run_scanned(command, str(way), check)
        try:
            return self._run_over(command, layers, check)
        finally:
            workspace.commands.end(layers)

    def _run_scanned(self, command: Command, reason: str, check: bool) -> CommandResult:
        raise NotImplementedError

    def _run_over(self, command: Command, layers: Layers, check: bool) -> CommandResult:
        """Run a command over an overlay, and make what it changed this view's changes."""
        tree = self._workspace.tree
        try:
            layers.prepare(command.stdin)
            self._cover(layers)
            ran = run_over(layers, command, self._is_given_up)
            steps = layers.steps(tree) if ran.is_kept(check) else []
            if steps and self.read_only is not None:
                raise ReadOnlyView(self.read_only)
            if steps or self._is_given_up():
                # It may take its time, and undoes itself when it is interrupted.
                with self._lock:
                    self._check_writable("run")
                    self._whole(partial(apply_steps, steps, self._edit, self._check_step))
        except ProtectedPath as error:
            raise ProtectedPath(f"{error}. Nothing that the command changed was kept") from error
        except OSError as error:
            if isinstance(error, WinkError):
                raise
            raise FilesystemError(
                f"What the command changed could not be kept: {error.strerror}"
            ) from error
        return ran.result("overlay", None, check=check)

    def _cover(self, layers: Layers) -> None:
        """Let a command see what this view shows."""

    def _check_step(self, step: Step) -> bool:
        """Raise if what a command did is a change that no call may make; False if it is none."""
        reserved, look, parts = self.reserved, self._look, step.parts
        if step.action == "remove":
            reserved.check_tree(parts, look)
            return True
        if step.action == "move" and step.source is not None and reserved.problem(parts, look):
            tree, place = step.source
            status = tree.status(place)
            if (
                status is not None
                and stat.S_ISREG(status.st_mode)
                and reserved.is_rewritten_as_it_was(
                    parts, look, tree.read(place)[0], stat.S_IMODE(status.st_mode)
                )
            ):
                return False
        node = look.node(parts) if step.action in ("attributes", "rewrite") else None
        is_directory = step.action == "directory" or (node is not None and node.kind == "directory")
        self._check_put(parts, node, directory=is_directory)
        return True

    def _is_given_up(self) -> bool:
        return self._why_sealed() is not None


@dataclass(frozen=True, slots=True, eq=False)
class _Mark:
    """A savepoint in a call that works in place."""

    changes: Changes
    mark: int


class _ViewInPlace(_View):
    """A view that changes the directory itself, journalled; or a savepoint within one."""

    _can_scan = True

    def __init__(self, parent: HostFilesystem, changes: Changes | None = None) -> None:
        super().__init__(parent)
        self._savepoint = None if changes is None else changes.mark()
        """Where this view begins; None for the whole transaction."""
        self._undoes: tuple[str, ...] = ()
        """The calls that this view has undone."""
        # Last: what it begins is to be ended through this view.
        self._edit = self._changes = changes or parent._workspace.begin_in_place()

    def _whole(self, do: Callable[[], R], *, anew: bool = True) -> R:
        workspace, changes = self._workspace, self._changes
        if anew or workspace.private:
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

    def _why_sealed(self) -> str | None:
        # A call that was given up may be in the middle of one that is nested in it.
        view = self
        while view._sealed is None and isinstance(view._parent, _ViewInPlace):
            view = view._parent
        return view._sealed

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
        return view

    def _merge_into(self, parent: HostFilesystem) -> None:
        """Keep what was changed in place; the outermost view's changes are committed."""
        if isinstance(parent, _ViewInPlace):
            parent._undoes += self._undoes
        else:
            self._workspace.commit(self._changes, self.call, self._undoes)
        self._ended = True
        self.seal("this view was merged")

    def _await_programs(self) -> None:
        self._workspace.commands.wait_in_place()  # an abandoned call may run one: it is killed

    def _undo_all(self) -> tuple[str, ...]:
        workspace, changes = self._workspace, self._changes
        if workspace.in_place is not changes:
            return ()  # it has ended, with all that was nested in it
        if self._savepoint is None:
            return workspace.roll_back(changes)
        with workspace.undoing(changes):
            return changes.undo_to(self._savepoint)

    def _changed_here(self) -> tuple[list[Parts], Look, Look]:
        self._workspace.settle(self._changes)
        return self._workspace.changed_by(self._changes.since(self._savepoint))

    def _take_back(
        self, act: Callable[[Changes], tuple[str, ...]], undoes: Sequence[str]
    ) -> tuple[str, ...]:
        told = act(self._changes)
        self._undoes += tuple(undoes)
        return told

    def _run_scanned(self, command: Command, reason: str, check: bool) -> CommandResult:
        """Run a command on the directory itself, and find what it changed."""
        workspace, changes = self._workspace, self._changes
        with contextlib.ExitStack() as under_way:
            with workspace.lock, self._lock:
                self._check_writable("run")
                under_way.enter_context(workspace.commands.in_place())
                workspace.expect_programs(changes)
            index = len(changes.records)
            try:
                ran = run_plainly(command, workspace.store, self._is_given_up)
                with self._lock:
                    workspace.settle(changes)
                    if ran.is_kept(check):
                        self._check_writable("run")
                        workspace.check_found(changes.records[index:])
                        workspace.note_changes(changes, index)
                        return ran.result("scan", reason, check=check)
            except BaseException:
                self._undo_scanned(index)
                raise
            self._undo_scanned(index)
        if self._is_given_up():
            self._check_writable("run")
        return ran.result("scan", reason, check=check)

    def _undo_scanned(self, index: int) -> None:
        with self._lock, self._workspace.external.undoing(self._changes):
            self._changes.undo_since(index)

    def expect_external(self) -> None:
        with self._workspace.lock, self._lock:
            self._check_writable("expect_external")
            self._workspace.expect_programs(self._changes)


@dataclass(frozen=True, slots=True, eq=False)
class _Staged:
    """The state of a private view."""

    staging: Staging
    state: State
    place: Place | None
    """What it was forked from; None for a view within a view."""


class _PrivateView(_View):
    """A view whose changes nobody sees until it is merged."""

    def __init__(self, parent: HostFilesystem, base: Look, place: Place | None) -> None:
        workspace = parent._workspace
        super().__init__(parent)
        self._look = self._edit = self._staging = Staging(base, workspace.store)
        self._reads = Reads()
        self._place = place
        workspace.private.add(self)

    def _whole(self, do: Callable[[], R], *, anew: bool = True) -> R:
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
            # Of another view: what that one began with, and what it did.
            place, state = self._own_place(token.place), token.state
        else:
            place, state = self._own_place(token), None
            if place.expired:
                raise SnapshotExpired("an older snapshot was restored since this one was taken")
        self._note(())
        self._go_to(place, state)

    def _go_to(self, place: object, state: State | None = None) -> None:
        assert isinstance(place, Place)
        self._staging.go_to(place, state or State(Layer(self._workspace.at(place))))

    def fork(self) -> HostFilesystem:
        with self._workspace.lock, self._lock:
            return _PrivateView(self, self._staging.layer, None)

    def fork_in_place(self) -> HostFilesystem:
        raise ValueError("a private view cannot be worked on in place")

    def _check_merge(self, parent: HostFilesystem) -> None:
        onto = parent._staging.layer if isinstance(parent, _PrivateView) else None
        if self._reads is not None:
            self._staging.check_conflicts(self._reads, onto, parent._look)

    def _merge_into(self, parent: HostFilesystem) -> None:
        staging = self._staging
        self._check_merge(parent)
        if staging.changed:
            parent._check_writable("merge")
        if parent._reads is not None and self._reads is not None:
            parent._reads.include(self._reads)
        if not staging.changed:
            return
        try:
            parent._replay(staging, self.call)
        except OSError as error:
            if isinstance(error, WinkError):
                raise
            if error.errno in _NOT_AS_IT_WAS:
                raise MergeConflict(f"Changed by someone else in the meantime: {error}") from error
            raise worded(error, "changed") from error

    def _undo_all(self) -> tuple[str, ...]:
        self._workspace.private.discard(self)
        self._staging.drop()
        return ()

    @property
    def written(self) -> frozenset[str]:
        return frozenset(map(join_path, self._staging.written))

    def _changed_here(self) -> tuple[list[Parts], Look, Look]:
        staging = self._staging
        files = set(staging.layer.files)
        changed = all_changed(staging.written, staging.wholes, files, staging.base, staging)
        return changed, staging.base, staging

    def _check_has_history(self) -> None:
        raise ValueError("a private view has no history of its own")

    def _cover(self, layers: Layers) -> None:
        self._note(())  # nobody knows what the command reads
        layers.cover(self._staging, self._staging.covered, self._workspace.tree)


def _is_text(name: str) -> bool:
    return name.isascii() or not any("\ud800" <= character <= "\udfff" for character in name)
