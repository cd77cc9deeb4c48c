"""Processes that move workspaces and are killed over it."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
from collections.abc import Iterable
from pathlib import Path

from killed_child import Death

from weakincentives.durable import LocalObjects
from weakincentives.filesystem import (
    Base,
    Branch,
    BranchUpload,
    drop_branch,
    materialize,
    store_tree,
    unpack_branch,
)


class DyingObjects(LocalObjects):
    """Kills the process at its n-th use, in whatever thread."""

    def __init__(self, directory: Path, instant: int) -> None:
        super().__init__(directory)
        self._left = instant
        self._counting = threading.Lock()

    def _count(self) -> None:
        with self._counting:
            self._left -= 1
            if not self._left:
                os.kill(os.getpid(), signal.SIGKILL)

    def put(self, key: str, data: bytes) -> None:
        self._count()
        super().put(key, data)
        self._count()

    def get(self, key: str) -> bytes:
        self._count()
        return super().get(key)


def move_and_die(place: Path, seed: int) -> None:
    """Do what is left of a move, and die at a random instant, or be done."""
    draw = random.Random(seed)
    if draw.random() < 0.5:
        Death(draw.randint(1, 400), torn=draw.random() < 0.5).arm()
        objects = LocalObjects(place / "objects")
    else:
        objects = DyingObjects(place / "objects", draw.randint(1, 60))
    move(place, objects)


def move(place: Path, objects: LocalObjects) -> None:
    """Store a tree, work on it elsewhere, and unpack the branch at a third place."""
    base = _decided(place / "base", lambda: store_tree(place / "workspace", objects).tree)
    there = place / "there" / "workspace"
    if not there.exists():
        materialize(Base(kind="tree", tree=base), there, objects)
    lines = place / "lines"
    if not lines.exists():
        _work(there, lines, objects)
    last = place / "last" / "workspace"
    if not last.exists():
        materialize(Base(kind="tree", tree=base), last, objects)
    try:
        Branch.open(last, "moved").close()
    except LookupError:
        unpack_branch(last, "moved", _saved(lines), objects).close()


def _decided(path: Path, decide: object) -> str:
    if not path.exists():
        _write(path, decide())  # type: ignore[operator]
    return path.read_text()


def _work(there: Path, lines: Path, objects: LocalObjects) -> None:
    """Change some files on a branch, and save what is sent after each change."""
    sent = lines.with_name("sending")
    sent.touch()
    known = _saved(sent)
    with contextlib.suppress(LookupError):  # a branch is never continued: only what was saved
        drop_branch(there, "work")
    branch = unpack_branch(there, "work", known, objects)
    upload = BranchUpload(branch, objects, saved=len(known))
    for number in range(len(branch.history()), 6):
        branch.write(f"made/{number}", f"text {number}\n" * 1000)
        known += upload.pending()
        _write(sent, "".join(f"{line}\n" for line in known))
        upload.saved(1)
    branch.close()
    os.rename(sent, lines)


def _saved(path: Path) -> list[str]:
    return path.read_text().splitlines()


def _write(path: Path, text: str) -> None:
    """Replace a file as a database would: all of it, or nothing."""
    staged = path.with_name(f"{path.name}.staged")
    staged.write_text(text)
    os.rename(staged, path)


def keys(objects: Iterable[tuple[str, float]]) -> set[str]:
    return {key for key, _ in objects}
