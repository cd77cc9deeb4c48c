"""The program that the kill tests kill: seeded calls on a real directory, each reported when done.

What each call must lead to is worked out beforehand by a small model of a tree, which knows nothing
of the product: a filesystem that is wrong cannot agree with itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import shlex
import shutil
import signal
import stat
import subprocess
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

from weakincentives.errors import FilesystemError
from weakincentives.filesystem import HostFilesystem, Limits

# The model: what a tree holds, by path. The root is "".


@dataclass(frozen=True, slots=True)
class Node:
    """A file, directory or symlink; two paths with one identity are hard links."""

    identity: int
    kind: str
    mode: int
    content: bytes = b""
    """A file's bytes, or where a symlink leads."""
    version: int = 0
    """Which call changed it last: a version keeps its modification time, wherever it goes."""


Tree = dict[str, Node]


@dataclass(frozen=True, slots=True)
class Step:
    """One change, said in a way that the API, a shell and plain system calls can all do."""

    kind: str
    path: str = ""
    other: str = ""
    data: bytes = b""
    mode: int = 0
    inner: tuple[Step, ...] = ()


@dataclass(frozen=True, slots=True)
class Call:
    """Steps that are kept or undone together."""

    engine: str
    steps: tuple[Step, ...]
    kept: bool


@dataclass(frozen=True, slots=True)
class Seen:
    """What is really at a path."""

    kind: str
    mode: int
    digest: str
    group: tuple[str, ...]
    """All paths of this inode."""
    modified: int


def apply(tree: Tree, step: Step, version: int) -> Tree:
    """Return the tree after one step that is known to be possible."""
    tree = dict(tree)
    _APPLY[step.kind](tree, step, version)
    return tree


def _apply_write(tree: Tree, step: Step, version: int) -> None:
    path = follow(tree, step.path)
    _make_parents(tree, path, version)
    _touch(tree, parent(path), version)
    old = tree.get(path)
    if old is None:
        tree[path] = Node(_new(), "file", 0o644, step.data, version)
    else:
        _change(tree, old, content=step.data, version=version)


def _apply_append(tree: Tree, step: Step, version: int) -> None:
    path = follow(tree, step.path)
    old = tree[path].content if path in tree else b""
    _apply_write(tree, replace(step, data=old + step.data), version)


def _apply_mkdir(tree: Tree, step: Step, version: int) -> None:
    _make_parents(tree, f"{step.path}/x", version)


def _apply_delete(tree: Tree, step: Step, version: int) -> None:
    for path in [step.path, *below(tree, step.path)]:
        del tree[path]
    _touch(tree, parent(step.path), version)


def _apply_move(tree: Tree, step: Step, version: int) -> None:
    moved = {path: tree[path] for path in [step.path, *below(tree, step.path)]}
    _apply_delete(tree, step, version)
    if step.other in tree:
        _apply_delete(tree, Step("delete", step.other), version)
    _make_parents(tree, step.other, version)
    _touch(tree, parent(step.other), version)
    for path, node in moved.items():
        tree[step.other + path[len(step.path) :]] = node
    if tree[step.other].kind == "directory":  # its ".." has changed; some note that as a change
        _touch(tree, step.other, version)


def _apply_copy(tree: Tree, step: Step, version: int) -> None:
    _make_parents(tree, step.other, version)
    _touch(tree, parent(step.other), version)
    tree[step.other] = replace(tree[step.path], identity=_new(), version=version)


def _apply_symlink(tree: Tree, step: Step, version: int) -> None:
    _touch(tree, parent(step.path), version)
    tree[step.path] = Node(_new(), "symlink", 0o777, step.data, version)


def _apply_link(tree: Tree, step: Step, version: int) -> None:
    # What a command did is put in place as a whole file: that is a change of its directory, too.
    _touch(tree, parent(step.path), version)
    _touch(tree, parent(step.other), version)
    tree[step.other] = tree[step.path]


def _apply_chmod(tree: Tree, step: Step, version: int) -> None:
    _touch(tree, parent(step.path), version)
    _change(tree, tree[step.path], mode=step.mode)


def _apply_savepoint(tree: Tree, step: Step, version: int) -> None:
    if step.kind == "keep":
        for inner in step.inner:
            _APPLY[inner.kind](tree, inner, version)


_APPLY: dict[str, Callable[[Tree, Step, int], None]] = {
    "write": _apply_write,
    "append": _apply_append,
    "mkdir": _apply_mkdir,
    "delete": _apply_delete,
    "move": _apply_move,
    "copy": _apply_copy,
    "symlink": _apply_symlink,
    "link": _apply_link,
    "chmod": _apply_chmod,
    "keep": _apply_savepoint,
    "undo": _apply_savepoint,
}

_last_identity = 0


def _new() -> int:
    global _last_identity
    _last_identity += 1
    return _last_identity


def _change(tree: Tree, old: Node, **changes: Any) -> None:
    for path, node in tree.items():
        if node.identity == old.identity:
            tree[path] = replace(node, **changes)


def _touch(tree: Tree, path: str, version: int) -> None:
    _change(tree, tree[path], version=version)


def _make_parents(tree: Tree, path: str, version: int) -> None:
    missing: list[str] = []
    while (path := parent(path)) not in tree:
        missing.append(path)
    for name in reversed(missing):
        _touch(tree, parent(name), version)
        tree[name] = Node(_new(), "directory", 0o755, version=version)


def parent(path: str) -> str:
    return path.rpartition("/")[0]


def below(tree: Tree, path: str) -> list[str]:
    return [other for other in tree if other.startswith(f"{path}/")]


def follow(tree: Tree, path: str) -> str:
    """Return the path of what a symlink to a file in the tree leads to."""
    if path in tree and tree[path].kind == "symlink":
        return os.path.normpath(os.path.join(parent(path), os.fsdecode(tree[path].content)))
    return path


def names(tree: Tree, node: Node) -> int:
    return sum(other.identity == node.identity for other in tree.values())


# The plan


def fill(tag: str, size: int) -> bytes:
    """Return bytes that a shell can make too: the tag, line after line."""
    line = f"{tag}\n".encode()
    return (line * (size // len(line) + 1))[:size]


_FILES = {
    "README.md": 0o644,
    ".env": 0o600,
    "src/app.py": 0o755,
    "src/util.py": 0o640,
    "src/pkg/mod.py": 0o644,
    "src/pkg/dätä ü.bin": 0o644,
    "node_modules/x/index.js": 0o664,
    "links/one": 0o644,
    "locked.txt": 0o444,
}
_SYMLINKS = {
    "links/to_app": "../src/app.py",
    "links/dangling": "nowhere",
    "links/directory": "../src",
    "links/loop": "loop",
}


def first_tree() -> Tree:
    """Return what a workspace holds before the first call."""
    tree: Tree = {"": Node(_new(), "directory", 0o755)}
    for path, mode in _FILES.items():
        _apply_write(tree, Step("write", path, data=fill(path, len(path) * 7)), 0)
        tree[path] = replace(tree[path], mode=mode)
    _apply_write(tree, Step("write", "big.bin", data=fill("big", 300_000)), 0)
    _apply_write(tree, Step("write", "empty"), 0)
    for name in ("hollow", "src/hollow"):
        tree[name] = Node(_new(), "directory", 0o700)
    for path, target in _SYMLINKS.items():
        _apply_symlink(tree, Step("symlink", path, data=target.encode()), 0)
    for other in ("links/two", "three"):
        tree[other] = tree["links/one"]
    return tree


def build(root: Path, tree: Tree) -> None:
    """Make a directory hold what the model says, with times long ago."""
    made: dict[int, Path] = {}
    for path, node in sorted(tree.items()):
        place = root / path
        if node.kind == "directory":
            place.mkdir(exist_ok=not path, parents=True)
            place.chmod(node.mode)
        elif node.kind == "symlink":
            place.symlink_to(os.fsdecode(node.content))
        elif node.identity in made:
            os.link(made[node.identity], place)
        else:
            place.write_bytes(node.content)
            place.chmod(node.mode)
            made[node.identity] = place
    for path, node in sorted(tree.items(), reverse=True):
        moment = 1_000_000_000_123_456_789 + node.identity * 1_000_000_007
        os.utime(root / path, ns=(moment, moment), follow_symlinks=False)


def plan(seed: int, count: int, engines: Sequence[str]) -> tuple[list[Call], list[Tree]]:
    """Return the calls that a seed stands for, and the trees before the first and after each."""
    global _last_identity
    _last_identity = 0
    dice = random.Random(seed)
    calls, trees = list[Call](), [first_tree()]
    for number in range(1, count + 1):
        engine = dice.choice(engines)
        alone = engine == "direct"
        steps, after = _steps(dice, trees[-1], engine, number, 1 if alone else dice.randint(1, 4))
        kept = alone or dice.random() < 0.7
        calls.append(Call(engine, steps, kept))
        trees.append(after if kept else trees[-1])
    return calls, trees


def _steps(
    dice: random.Random, tree: Tree, engine: str, version: int, count: int, *, nested: bool = False
) -> tuple[tuple[Step, ...], Tree]:
    steps: list[Step] = []
    while len(steps) < count:
        step: Step | None
        if engine == "api" and not nested and dice.random() < 0.2:
            inner, _ = _steps(dice, tree, engine, version, dice.randint(1, 3), nested=True)
            step = Step(dice.choice(["keep", "undo"]), inner=inner)
        else:
            step = _step(dice, tree, engine, f"{version}.{len(steps)}")
        if step is not None:
            steps.append(step)
            tree = apply(tree, step, version)
    return tuple(steps), tree


_THROUGH_API = ["write", "write", "write", "append", "mkdir", "delete", "move", "over", "copy"]
_BY_OTHERS = [*_THROUGH_API, "symlink", "link", "chmod"]


def _step(dice: random.Random, tree: Tree, engine: str, tag: str) -> Step | None:
    """Return a step that is possible on this tree, or None if the dice fell badly."""
    through_api = engine in ("api", "view", "direct")
    kind = dice.choice(_THROUGH_API if through_api else _BY_OTHERS)
    if len(tree) > 60:
        kind = "delete"
    # An overlay copies a file up by one name; what its other names then see is another test's.
    single = engine == "command"
    files = [
        path
        for path, node in sorted(tree.items())
        if node.kind == "file"
        and not (through_api and not node.mode & 0o200)
        and not (single and names(tree, node) > 1)
    ]
    directories = [path for path, node in sorted(tree.items()) if node.kind == "directory"]
    movable = [
        path
        for path in sorted(tree)
        if path
        and not any(
            tree[p].kind == "file"
            and (
                (through_api and not tree[p].mode & 0o200) or (single and names(tree, tree[p]) > 1)
            )
            for p in [path, *below(tree, path)]
        )
    ]
    deletable = [path for path in sorted(tree) if path and (path in movable or not through_api)]
    free = _free_path(dice, directories, tree)
    data = fill(tag, dice.choice([0, 1, 20, 20, 400, 5_000, 150_000]))
    if free is None:
        return None
    if not files or not movable:
        return Step("write", free, data=data)
    if kind == "write":
        links = [
            path
            for path in ("links/to_app",)
            if path in tree and follow(tree, path) in files and tree[path].kind == "symlink"
        ]
        return Step("write", dice.choice([free, *dice.sample(files, 1), *links]), data=data)
    if kind == "append":
        return Step("append", dice.choice(files), data=data)
    if kind == "mkdir":
        return Step("mkdir", free)
    if kind == "delete":
        return Step("delete", dice.choice(deletable)) if deletable else None
    if kind == "move":
        path = dice.choice(movable)
        return None if free.startswith(f"{path}/") else Step("move", path, free)
    if kind == "over":
        return _over(dice, tree, files, movable)
    if kind == "copy":
        return Step("copy", dice.choice(files), free)
    if parent(free) not in tree:
        return None
    if kind == "symlink":
        target = dice.choice(["nowhere", "../" + dice.choice(files), dice.choice(files)])
        return Step("symlink", free, data=target.encode())
    if kind == "link":
        return Step("link", dice.choice(files), free)
    return Step("chmod", dice.choice(files), mode=dice.choice([0o600, 0o644, 0o755, 0o664, 0o444]))


def _over(dice: random.Random, tree: Tree, files: list[str], movable: list[str]) -> Step | None:
    """Move a file onto a file, or a directory onto a directory."""
    if dice.random() < 0.7:
        source, target = dice.choice(files), dice.choice(files)
        same = tree[source].identity == tree[target].identity
        return None if same else Step("move", source, target)
    directories = [path for path in movable if tree[path].kind == "directory"]
    if len(directories) < 2:
        return None
    source, target = dice.sample(directories, 2)
    if source.startswith(f"{target}/") or target.startswith(f"{source}/"):
        return None
    return Step("move", source, target)


def _free_path(dice: random.Random, directories: list[str], tree: Tree) -> str | None:
    for _ in range(20):
        name = dice.choice(["new", "n w", "ñew", ".new", "deep/er/new", "a-b"])
        name = f"{name}{dice.randint(0, 99)}"
        place = dice.choice(directories)
        path = f"{place}/{name}" if place else name
        barred = any(path.startswith(f"{p}/") for p in tree if p not in directories)
        if path not in tree and not barred:
            return path
    return None


# Doing it


def perform(fs: HostFilesystem, call: Call, life: int = -1) -> None:
    """Make one call on a workspace and keep or undo it, as the runtime would."""
    _PERFORM[call.engine](fs, call, life)


def _perform_direct(fs: HostFilesystem, call: Call, life: int) -> None:
    """Every operation is a call of its own: there is one, and it is kept."""
    for step in call.steps:
        through_api(fs, step)


def _perform_api(fs: HostFilesystem, call: Call, life: int) -> None:
    with fs.gate:
        view = fs.fork_in_place()
        for step in call.steps:
            through_api(view, step)
        _end(fs, view, call)


def _perform_view(fs: HostFilesystem, call: Call, life: int) -> None:
    view = fs.fork()
    for step in call.steps:
        through_api(view, step)
    if call.kept:
        with fs.gate:
            fs.merge(view)


def _perform_command(fs: HostFilesystem, call: Call, life: int) -> None:
    with fs.gate:
        view = fs.fork_in_place()
        result = view.run(["sh", "-c", script(call.steps)])
        assert result.returncode == 0, result
        _end(fs, view, call)


def _perform_external(fs: HostFilesystem, call: Call, life: int) -> None:
    with fs.gate:
        view = fs.fork_in_place()
        view.expect_external()
        root = Path(fs.root)
        if len(call.steps) % 2:
            command = ["sh", "-c", script(call.steps)]
            subprocess.run(command, check=True, cwd=root, pass_fds=[life] if life >= 0 else [])
        else:
            for step in call.steps:
                by_hand(root, step)
        _end(fs, view, call)


def _perform_revert(fs: HostFilesystem, call: Call, life: int) -> None:
    """Go back to how the first call that is remembered left things."""
    with fs.gate:
        left = fs.revert_to(fs.history()[0].call_id)
        assert not left, left


_PERFORM: dict[str, Callable[[HostFilesystem, Call, int], None]] = {
    "direct": _perform_direct,
    "api": _perform_api,
    "view": _perform_view,
    "command": _perform_command,
    "external": _perform_external,
    "revert": _perform_revert,
}


def _end(fs: HostFilesystem, view: HostFilesystem, call: Call) -> None:
    if call.kept:
        fs.merge(view)
    else:
        left = fs.discard(view)
        assert not left, left


def through_api(fs: HostFilesystem, step: Step) -> None:
    match step.kind:
        case "write":
            fs.write_bytes(step.path, step.data)
        case "append":
            fs.append(step.path, step.data.decode())
        case "mkdir":
            fs.mkdir(step.path)
        case "delete":
            fs.delete(step.path, recursive=True)
        case "move":
            fs.move(step.path, step.other, overwrite=True)
        case "copy":
            fs.copy(step.path, step.other)
        case _:
            inner = fs.fork_in_place()
            for nested in step.inner:
                through_api(inner, nested)
            if step.kind == "keep":
                fs.merge(inner)
            else:
                fs.discard(inner)


def script(steps: tuple[Step, ...]) -> str:
    """Return what a shell must do; it works in the workspace."""
    return "\n".join(["set -e", *(" && ".join(_shell(step)) for step in steps)])


def _shell(step: Step) -> Iterator[str]:
    path, other = shlex.quote(f"./{step.path}"), shlex.quote(f"./{step.other}")
    if step.kind in ("write", "append", "move", "copy"):
        yield f"mkdir -p {shlex.quote('./' + parent(step.other or step.path))}"
    match step.kind:
        case "write" | "append":
            arrow = ">" if step.kind == "write" else ">>"
            tag = step.data.split(b"\n")[0].decode()
            size = len(step.data)
            yield f"{{ yes {shlex.quote(tag)} | head -c {size}; }} {arrow} {path}"
        case "mkdir":
            yield f"mkdir -p {path}"
        case "delete":
            yield f"rm -rf {path}"
        case "move":
            yield f"{{ test ! -d {other} || test -L {other} || rm -rf {other}; }}"
            yield f"mv -fT {path} {other}"
        case "copy":
            yield f"cp -p {path} {other}"
        case "symlink":
            yield f"ln -s {shlex.quote(os.fsdecode(step.data))} {path}"
        case "link":
            yield f"ln -P {path} {other}"
        case _:
            yield f"chmod {step.mode:o} {path}"


def by_hand(root: Path, step: Step) -> None:
    path, other = root / step.path, root / step.other
    if step.kind in ("write", "append", "move", "copy"):
        (other if step.other else path).parent.mkdir(parents=True, exist_ok=True)
    match step.kind:
        case "write":
            path.write_bytes(step.data)
        case "append":
            with path.open("ab") as file:
                file.write(step.data)
        case "mkdir":
            path.mkdir(parents=True, exist_ok=True)
        case "delete" if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        case "delete":
            path.unlink()
        case "move":
            if other.is_dir() and not other.is_symlink():
                shutil.rmtree(other)
            path.rename(other)
        case "copy":
            shutil.copy2(path, other)
        case "symlink":
            path.symlink_to(os.fsdecode(step.data))
        case "link":
            os.link(path, other, follow_symlinks=False)
        case _:
            path.chmod(step.mode)


# Looking


def look(root: Path) -> dict[str, Seen]:
    """Return what is really in a directory, by path; the root is ""."""
    found: dict[str, os.stat_result] = {}
    pending = [""]
    while pending:
        path = pending.pop()
        status = os.lstat(root / path)
        found[path] = status
        if stat.S_ISDIR(status.st_mode):
            pending += [f"{path}/{name}" if path else name for name in os.listdir(root / path)]
    groups: dict[int, list[str]] = {}
    for path, status in sorted(found.items()):
        groups.setdefault(status.st_ino, []).append(path)
    return {path: _seen(root / path, status, groups) for path, status in found.items()}


def _seen(place: Path, status: os.stat_result, groups: dict[int, list[str]]) -> Seen:
    mode = stat.S_IMODE(status.st_mode)
    group, modified = tuple(groups[status.st_ino]), status.st_mtime_ns
    if stat.S_ISDIR(status.st_mode):
        return Seen("directory", mode, "", group, modified)
    if stat.S_ISLNK(status.st_mode):
        return Seen("symlink", mode, digest(os.fsencode(os.readlink(place))), group, modified)
    assert stat.S_ISREG(status.st_mode), place
    return Seen("file", mode, digest(place.read_bytes()), group, modified)


def digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=12).hexdigest()


# Dying


_CHANGING = (
    *("chmod", "chown", "copy_file_range", "fchmod", "fchown", "fdatasync", "fsync", "ftruncate"),
    *("lchown", "link", "mkdir", "open", "posix_fallocate", "pwrite", "remove", "removexattr"),
    *("rename", "replace", "rmdir", "sendfile", "setxattr", "symlink", "truncate", "unlink"),
    *("utime", "write"),
)
TEARABLE = ("pwrite", "write")


class Death:
    """Kills this process at its n-th call of a system call that changes files.

    With ``torn`` a write is cut in half first; with ``of``, only these system calls count. A
    process that does not get that far lives on, and ``names`` says what it called.
    """

    def __init__(self, at: int = 0, *, torn: bool = False, of: Sequence[str] = _CHANGING) -> None:
        self.at = at
        self.torn = torn
        self.of = tuple(of)
        self.names: list[str] = []

    def __repr__(self) -> str:
        return f"Death({self.at}, torn={self.torn})"

    def arm(self) -> None:
        for name in self.of:
            if hasattr(os, name):
                setattr(os, name, self._counted(name, getattr(os, name)))

    def _counted(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            if name == "open" and not args[1] & (os.O_CREAT | os.O_TRUNC):
                return original(*args, **kwargs)
            if threading.current_thread() is not threading.main_thread():
                # What is swept up in the background comes when it comes: counted, no step would
                # be the same twice.
                return original(*args, **kwargs)
            self.names.append(name)
            if len(self.names) == self.at:
                if self.torn and name in TEARABLE:
                    half = bytes(args[1])[: len(args[1]) // 2]
                    original(args[0], half, *args[2:])
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        # A capability check such as `os.link in os.supports_dir_fd` must come out as before.
        for capable in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks):
            if original in capable:
                capable.add(counted)
        return counted


# What runs in the process that is killed. Each says what it did through a pipe.


@dataclass(frozen=True, slots=True)
class Orders:
    """What the child is to do."""

    root: Path
    store: Path | None = None
    calls: Sequence[Call] = ()
    done: int = 0
    death: Death | None = None
    death_at_work: bool = False
    """Count only after the workspace has been opened."""
    durability: Literal["fast", "safe"] = "fast"


def work(orders: Orders, reports: Connection, life: Connection) -> None:
    """Open the workspace, which repairs it, and make the calls that are not done yet."""
    # The killer ends this process with all that it has started.
    os.setpgid(0, 0)
    os.umask(0o022)
    death = orders.death or Death()
    try:
        if not orders.death_at_work:
            death.arm()
        fs = HostFilesystem(orders.root, store=orders.store, durability=orders.durability)
        if orders.death_at_work:
            death.arm()
        reports.send((orders.done, None))
        for number, call in enumerate(orders.calls[orders.done :], orders.done + 1):
            perform(fs, call, life.fileno())
            reports.send((number, look(orders.root)))
        fs.close()
        reports.send(("done", death.names))
    except Exception:
        reports.send(("failed", traceback.format_exc()))


def prune(root: Path, limits: Limits, death: Death) -> None:
    """Open the workspace and prune its store; exits with the number of steps, if that is small."""
    death.arm()
    with HostFilesystem(root) as fs:
        fs.prune(limits)
    os._exit(min(len(death.names), 255))


def write(root: Path, limits: Limits, path: str, data: bytes, death: Death) -> None:
    """Open the workspace and write a file, after which the history is trimmed to some limits."""
    death.arm()
    with (
        HostFilesystem(root, history_limit=limits) as fs,
        contextlib.suppress(FilesystemError),  # a directory is in the way
    ):
        fs.write_bytes(path, data)


def wink(root: Path, arguments: Sequence[str], death: Death) -> None:
    """Run a command of `wink` in a directory, and print nothing."""
    from weakincentives.cli.entry import main

    os.chdir(root)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    death.arm()
    main(list(arguments))
