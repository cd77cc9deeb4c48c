"""The files of a workspace as the page has them: names, texts, patches, and versions as edits."""

from __future__ import annotations

import contextlib
import json
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

from weakincentives.core.text import size_of
from weakincentives.debugger.records import Json
from weakincentives.errors import WinkError
from weakincentives.filesystem.diffs import (
    Effort,
    FileChange,
    change_between,
    line_edits,
    lines_of,
)
from weakincentives.filesystem.entry import Entry
from weakincentives.filesystem.ignored import IgnoredFiles
from weakincentives.filesystem.layers import Disk, Look
from weakincentives.filesystem.paths import Parts
from weakincentives.filesystem.reserved import Reserved
from weakincentives.filesystem.scratch import TEMPORARY
from weakincentives.filesystem.store import checked_parts
from weakincentives.filesystem.tree import Tree
from weakincentives.filesystem.versions import BranchVersions, CommitSteps, FileStep, Versions

MAX_TEXT = 2 << 20
"""Bytes; the text of a larger file is not shown."""
MAX_PATCHES = 1 << 20
"""Characters of the patches of one call."""
MAX_PATCH = 64 << 10
"""Characters of the patch of one file."""
_OUTSIDE = "outside wink"

Content = tuple[Entry | None, Callable[[], bytes]]
"""What is at a path, and a function that reads it, which may raise OSError."""


def to_json(value: Any) -> str:
    """Return JSON for the page: all ASCII, because a text may have half a surrogate pair.

    Numbers that JSON does not have, such as infinity, are texts.
    """
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value), separators=(",", ":"))


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in cast("dict[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in cast("Sequence[Any]", value)]
    return value


class World(NamedTuple):
    """The files after a commit."""

    versions: Versions
    serial: int


# Names of files. JSON and URLs are Unicode; a name that is not UTF-8 has lone surrogates in Python,
# which go through as characters for private use.

_PRIVATE = 0x10_0000
_TO_WIRE = {code: code + _PRIVATE for code in range(0xDC80, 0xDD00)}
_FROM_WIRE = {wire: code for code, wire in _TO_WIRE.items()}


def to_wire(path: str) -> str:
    """Return a path as the page has it."""
    return path if path.isascii() else path.translate(_TO_WIRE)


def from_wire(path: str) -> Parts:
    """Return the path that the page has; raises ValueError if it leads out of the workspace."""
    try:
        parts = checked_parts(path.translate(_FROM_WIRE))
    except ValueError as error:
        raise ValueError(f"{path!r} is not a path in the workspace") from error
    return parts


def wire_path(parts: Parts) -> str:
    return to_wire("/".join(parts))


# Files


def _no_content() -> bytes:
    raise FileNotFoundError("there is no file")


def kind_of(step: FileStep) -> str:
    if step.after is None:
        return "deleted"
    return "added" if step.before is None or step.origin is not None else "changed"


def text_of(entry: Entry | None, read: Callable[[], bytes]) -> tuple[str | None, str]:
    """Return the text of a file, or None; and what to know about it."""
    if entry is None:
        return None, ""
    if entry.kind == "link":
        return None, f"a symbolic link to {entry.target}" if entry.target else "a symbolic link"
    if entry.kind != "file":
        return None, "not a regular file"
    if entry.size > MAX_TEXT:
        return None, f"too large to show: {size_of(entry.size)}"
    try:
        return _decoded(read())
    except (OSError, LookupError, WinkError) as error:
        return None, f"not known: {getattr(error, 'strerror', None) or error}"


def _decoded(data: bytes) -> tuple[str | None, str]:
    if b"\0" not in data:
        with contextlib.suppress(UnicodeDecodeError):
            return data.decode(), ""
    return None, f"binary, {size_of(len(data))}"


def _bytes_of(
    read: Callable[[CommitSteps, FileStep], bytes], commit: CommitSteps, step: FileStep
) -> bytes | None:
    try:
        return read(commit, step)
    except (OSError, LookupError, WinkError):  # unknown, or there was no file
        return None


def change_kind(change: FileChange) -> str:
    """Return whether a file was added, changed or deleted; a moved file is added."""
    head = change.text.split("\n@@", 1)[0]
    if "\ndeleted file mode" in head:
        return "deleted"
    return "added" if change.origin or "\nnew file mode" in head else "changed"


def change_json(change: FileChange, kind: str) -> Json:
    """Return the change of one file as the page has it; a long patch is cut."""
    patch, note = "" if change.is_binary else change.text, change.note
    if len(patch) > MAX_PATCH:
        patch = patch[: patch.rindex("\n", 0, MAX_PATCH) + 1]
        more = f"only the first {patch.count(chr(10))} lines of the diff are shown"
        note = f"{note}; {more}" if note else more
    return {
        "path": to_wire(change.path),
        "origin": to_wire(change.origin),
        "kind": kind,
        "added": change.added,
        "removed": change.removed,
        "binary": change.is_binary,
        "note": note,
        "patch": patch,
    }


def _difference(one: Content, two: Content) -> str:
    if one[0] is None or two[0] is None:
        return "" if one[0] is two[0] else "only b" if one[0] is None else "only a"
    a, b = one[0], two[0]
    if (a.kind, a.size) != (b.kind, b.size):
        return "differs"
    if None not in (a.digest, b.digest):
        return "" if a.digest == b.digest else "differs"
    try:
        return "" if one[1]() == two[1]() else "differs"
    except (OSError, LookupError, WinkError):
        return "differs"


_Link = tuple[CommitSteps, FileStep, Parts]


def chain_of(versions: Versions, parts: Parts, base: int, top: int) -> list[_Link]:
    """Return what commits did to a file, oldest first, and its path at that time.

    The history of a file that was moved to a new path continues there.
    """
    found: list[_Link] = []
    while True:
        own = [
            (commit, step, parts)
            for commit, step in versions.touching(parts)
            if base < commit.call.serial <= top
        ]
        found[:0] = own
        if not own or own[0][1].parts != parts or own[0][1].origin is None:
            return found
        top, parts = own[0][0].call.serial - 1, own[0][1].origin


class VersionSteps:
    """Makes the steps of a file's versions: each as edits of the one before it."""

    def __init__(self, versions: Versions, base: str | None, digest: str | None) -> None:
        self.found: list[Json] = []
        self._versions = versions
        self._text = base
        self._digest = digest

    def add(
        self, commit: CommitSteps, step: FileStep, here: Parts, call: int | None, name: str
    ) -> None:
        serial, effort = commit.call.serial, Effort()
        about: Json = {"serial": serial, "call": call, "name": name, "path": wire_path(here)}
        if step.parts != here:
            self._put(about, None, f"moved to {wire_path(step.parts)}", effort)
            return
        arrives = step.origin is not None and not self._follows(here)
        if not arrives and not (step.before and step.before.digest == self._digest is not None):
            before, note = text_of(step.before, lambda: self._versions.before(commit, step))
            if before != self._text and self._is_known(before, note):
                outside = about | {"call": None, "name": _OUTSIDE}
                self._put(outside, before, note, effort)
        after, note = text_of(step.after, lambda: self._versions.after(commit, step))
        self._digest = None if step.after is None else step.after.digest
        if step.origin is not None and not note:
            note = f"moved from {wire_path(step.origin)}"
        self._put(about, after, note, effort)

    def _follows(self, here: Parts) -> bool:
        """Whether the versions so far belong to the file that this step moves here."""
        return not self.found or self.found[-1]["path"] != wire_path(here)

    def _is_known(self, before: str | None, note: str) -> bool:
        return before is not None or not note or self._text is None

    def _put(self, about: Json, text: str | None, note: str, effort: Effort) -> None:
        edits = None
        if text is not None:
            old = lines_of(self._text or "")
            edits = [list(each) for each in line_edits(old, lines_of(text), effort)]
        self._text = text
        if text is None:
            self._digest = None
        self.found.append(about | {"edits": edits, "note": note})


class Contents:
    """The files of a workspace after any commit of its histories.

    Args:
        main: Returns the history of the directory.
    """

    def __init__(self, workspace: Path, store: Path, main: Callable[[], Versions]) -> None:
        self._workspace = workspace
        self._main = main
        reserved = Reserved(workspace, store=store)
        self._present: Look = reserved.without_hidden(Disk(Tree(workspace)))
        self._ignored = IgnoredFiles(workspace)

    def at(self, world: World, parts: Parts) -> Content:
        """Return what is at a path, and a function that reads it, which may raise OSError."""
        versions, serial = world
        touching = versions.touching(parts)
        place = bisect_right(touching, serial, key=lambda each: each[0].call.serial)
        if place:
            commit, step = touching[place - 1]
            if step.parts == parts:
                return step.after, lambda: versions.after(commit, step)
            return None, _no_content
        if touching:
            commit, step = touching[0]
            if step.found_at == parts:
                return step.before, lambda: versions.before(commit, step)
            return None, _no_content  # it came from elsewhere
        if isinstance(versions, BranchVersions):
            return self.at(World(self._main(), versions.info.base), parts)
        return self._now(parts)

    def paths_at(self, world: World) -> set[Parts]:
        """Return the files of a world; ignored ones only if a commit changed them."""
        versions, serial = world
        if not isinstance(versions, BranchVersions):
            return versions.paths_at(serial, self._walk())
        paths = self._main().paths_at(versions.info.base, self._walk())
        for commit in versions.commits[:serial]:
            paths.difference_update(each.found_at for each in commit.steps if each.before)
            paths.update(each.parts for each in commit.steps if each.after)
        return paths

    def changes(self, versions: Versions, commit: CommitSteps) -> list[Json]:
        """Return what a commit changed, with patches."""
        ignored, effort, left = self._ignored, Effort(raw=False), MAX_PATCHES
        found: list[Json] = []
        for step in commit.steps:
            path, origin = "/".join(step.parts), "/".join(step.origin or ())
            if left <= 0 or ignored(path):
                note = "ignored by git" if left > 0 else "too much has changed to show it all"
                diff = FileChange(path=path, origin=origin, note=note)
            else:
                old = step.before, _bytes_of(versions.before, commit, step)
                new = step.after, _bytes_of(versions.after, commit, step)
                diff = change_between(step.parts, old, new, origin=step.origin, effort=effort)
            found.append(change_json(diff, kind_of(step)))
            left -= len(found[-1]["patch"])
        return found

    def differing(self, a: World, b: World) -> Iterable[tuple[str, str]]:
        """Yield the paths that differ between two worlds, and how."""
        for parts in sorted(self._candidates(a, b)):
            if kind := _difference(self.at(a, parts), self.at(b, parts)):
                yield wire_path(parts), kind

    def _candidates(self, a: World, b: World) -> set[Parts]:
        """Return the paths that commits changed between two worlds."""
        commits: list[CommitSteps] = []
        versions, serials = a.versions, [a.serial, b.serial]
        if a.versions is not b.versions:
            versions = self._main()
            for place, each in enumerate((a, b)):
                if isinstance(each.versions, BranchVersions):
                    commits += each.versions.commits[: each.serial]
                    serials[place] = each.versions.info.base
        between = versions.since(min(serials))
        commits += [each for each in between if each.call.serial <= max(serials)]
        return {parts for each in commits for step in each.steps for parts in step.paths}

    def _now(self, parts: Parts) -> Content:
        try:
            node = self._present.node(parts)
            if node is not None and node.kind == "link":
                node = node._replace(target=self._present.link_target(parts))
        except OSError:
            return None, _no_content
        if node is None or node.is_directory:
            return None, _no_content
        return node, lambda: self._present.read(parts)

    def _walk(self) -> Iterable[Parts]:
        """Yield the files that are there now, without ignored ones."""
        ignored = self._ignored = IgnoredFiles(self._workspace)
        pending: list[Parts] = [()]
        while pending:
            above = pending.pop()
            with contextlib.suppress(OSError):
                for name, kind in self._present.kinds(above):
                    parts = (*above, name)
                    if name == ".git" or name.startswith(TEMPORARY) or ignored("/".join(parts)):
                        continue
                    if kind == "directory":
                        pending.append(parts)
                    else:
                        yield parts
