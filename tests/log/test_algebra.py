"""The functions over operations, compared with whole copies of a tree."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from hypothesis import given
from hypothesis import strategies as st
from states import (
    Files,
    Manifests,
    Present,
    applied,
    below,
    changes_between,
    is_directory,
    nodes,
    remove,
    shown,
    with_groups,
)

from weakincentives.log import (
    Change,
    Entry,
    Known,
    Operation,
    Parts,
    SessionDelta,
    SliceChange,
    compose,
    conflicts,
    invert,
    inverted,
    merge,
    state_at,
)

PATHS: list[Parts] = [
    ("a",), ("b",), ("d",), ("d", "a"), ("d", "b"), ("d", "e"), ("d", "e", "a"), ("f",), ("f", "a"),
    ("c",), ("d", "c"),
]  # fmt: skip


# A tree, and what calls do to it


class History:
    """A tree after each of some calls, and the changes of each as a detector would report them."""

    numbers = itertools.count(1)
    """For texts, times and hard links: each is used once."""

    def __init__(self, manifests: Manifests, files: Files) -> None:
        self.manifests = manifests
        self.states: list[Files] = [files]
        self.changes: list[tuple[Change, ...]] = []

    @property
    def now(self) -> Files:
        return self.states[-1]

    def call(self, steps: Iterable[Sequence[int]], *, whole: bool) -> None:
        files = dict(self.now)
        for kind, one, other in steps:
            self._step(files, kind, PATHS[one], PATHS[other])
        files = with_groups(files)
        self.changes.append(tuple(changes_between(self.now, files, self.manifests, whole=whole)))
        self.states.append(files)

    def _step(self, files: Files, kind: int, path: Parts, other: Parts) -> None:
        number = next(self.numbers)
        if not is_directory(files, path[:-1]):
            return
        match kind % 8:
            case 0 | 1:
                remove(files, path)
                files[path] = Entry("file", 0o644, mtime_ns=number, content=f"text {number}")
            case 2:
                remove(files, path)
            case 3:
                remove(files, path)
                files[path] = Entry("directory", 0o755, mtime_ns=number)
            case 4 if path in files:
                files[path] = files[path]._replace(mode=0o700, mtime_ns=number)
            case 5:
                remove(files, path)
                files[path] = Entry("link", mtime_ns=number, content=f"to {number}")
            case 6 if self._can_move(files, path, other):
                remove(files, other)
                for each in [path, *below(files, path)]:
                    files[(*other, *each[len(path) :])] = files.pop(each)
            case 7 if self._can_move(files, path, other) and files[path].kind == "file":
                remove(files, other)
                group = files[path].group or number
                files[path] = files[other] = files[path]._replace(group=group)
            case _:
                pass

    def _can_move(self, files: Files, path: Parts, other: Parts) -> bool:
        free = is_directory(files, other[:-1]) and other[: len(path)] != path
        return path in files and free and path[: len(other)] != other


step = st.tuples(st.integers(0, 7), st.integers(0, 10), st.integers(0, 10))
calls = st.lists(st.tuples(st.lists(step, min_size=1, max_size=4), st.booleans()), max_size=6)
Calls = list[tuple[list[tuple[int, int, int]], bool]]


BEGINNING: Files = {
    path: Entry("directory", 0o755)
    if path in (("d",), ("d", "e"), ("f",))
    else Entry("file", 0o644, content="/".join(path))
    for path in PATHS[:-2]
}


def history_of(made: Calls) -> History:
    history = History(Manifests(), BEGINNING)
    for steps, whole in made:
        history.call(steps, whole=whole)
    return history


# Composing and inverting


@given(made=calls, start=st.integers(0, 7), length=st.integers(0, 7))
def test_composed_calls_lead_from_the_first_state_to_the_last(
    made: Calls, start: int, length: int
) -> None:
    history = history_of(made)
    start = min(start, len(made))
    end = min(start + length, len(made))

    composed = compose(history.changes[start:end], history.manifests)

    found = applied(composed, history.states[start], history.manifests)
    assert shown(found) == shown(history.states[end])


@given(made=calls, start=st.integers(0, 7))
def test_inverted_changes_lead_back(made: Calls, start: int) -> None:
    history = history_of(made)
    start = min(start, len(made))
    composed = compose(history.changes[start:], history.manifests)

    found = applied(inverted(composed), history.now, history.manifests)

    assert shown(found) == shown(history.states[start])


@given(made=calls)
def test_calls_and_their_inverses_compose_to_nothing_but_links(made: Calls) -> None:
    history = history_of(made)
    back = [inverted(changes) for changes in reversed(history.changes)]

    composed = compose([*history.changes, *back], history.manifests)

    assert shown(applied(composed, history.states[0], history.manifests)) == shown(
        history.states[0]
    )
    assert all(change.before is not None and change.before.group for change in composed)


def test_a_change_names_where_a_twice_moved_file_came_from() -> None:
    file = Entry("file", content="text")
    first = (Change(("a",), file, None), Change(("b",), None, file, ("a",)))
    second = (Change(("b",), file, None), Change(("c",), None, file, ("b",)))

    composed = compose([first, second], Manifests())

    assert composed == (Change(("a",), file, None), Change(("c",), None, file, ("a",)))
    assert inverted(composed) == (Change(("a",), None, file, ("c",)), Change(("c",), file, None))


def test_undoing_an_operation_inverts_state_slices_and_keeps_what_was_logged() -> None:
    operation = Operation(
        id="x",
        number=4,
        parent=3,
        session=SessionDelta((SliceChange("Plan", "[1]", "[2]"),), (("ToolInvoked", "{}"),)),
    )

    undo = invert(operation, number=8, parent=7)

    assert (undo.number, undo.parent, undo.undoes) == (8, 7, (4,))
    assert undo.session == SessionDelta((SliceChange("Plan", "[2]", "[1]"),))


# Looking up a past state


@given(made=calls)
def test_every_path_is_known_at_every_point_of_the_history(made: Calls) -> None:
    history = history_of(made)
    operations = [
        Operation(id=f"{number}", number=number, parent=number - 1, changes=changes)
        for number, changes in enumerate(history.changes, 1)
    ]
    for number, files in enumerate(history.states):
        line, later = operations[:number][::-1], operations[number:]
        found: dict[Parts, Entry | None] = {}
        for path in PATHS:
            known = state_at(path, line, later, history.manifests)
            found[path] = history.now.get(path) if known is None else known.entry
        assert nodes(found) == nodes({path: files.get(path) for path in PATHS})


def test_a_path_that_no_operation_changed_is_left_to_the_directory() -> None:
    other = Operation(id="x", number=1, parent=0, changes=(Change(("a",), None, Entry("file")),))

    assert state_at(("b",), [other], [], Manifests()) is None
    assert state_at(("a",), [], [other], Manifests()) == Known(None)


# Conflicts


@given(made=calls, edits=st.lists(step, max_size=3))
def test_a_conflict_is_a_path_that_differs_from_what_the_calls_left(
    made: Calls, edits: list[tuple[int, int, int]]
) -> None:
    history = history_of(made)
    composed = compose(history.changes, history.manifests)
    touched = {change.path for change in changes_between(
        history.states[0], history.now, history.manifests, whole=False
    )}  # fmt: skip
    left = history.now
    history.call(edits, whole=False)

    found = set(conflicts(composed, Present(history.now), history.manifests))

    differ = {p for p in {*left, *history.now} if not same(left.get(p), history.now.get(p))}
    assert touched & differ <= found <= differ


def same(one: Entry | None, other: Entry | None) -> bool:
    return one is other if one is None or other is None else one.is_equivalent(other)


def test_a_file_added_to_a_directory_that_a_call_made_is_a_conflict() -> None:
    made = (Change(("d",), None, Entry("directory", 0o755)),)
    now = {("d",): Entry("directory", 0o755), ("d", "mine"): Entry("file", 0o644, content="x")}

    assert conflicts(made, Present(now), Manifests()) == (("d", "mine"),)


def test_times_owners_and_attributes_are_no_conflict() -> None:
    left = Entry("file", 0o644, content="x", mtime_ns=1)
    now = left._replace(mtime_ns=2, uid=7, gid=7, xattrs=(("user.x", b"1"),))

    assert conflicts([Change(("a",), None, left)], Present({("a",): now}), Manifests()) == ()
    changed = now._replace(mode=0o600)
    assert conflicts([Change(("a",), None, left)], Present({("a",): changed}), Manifests())


# Merging


@given(base=calls, ours=calls, theirs=calls)
def test_a_merge_has_what_either_side_changed_or_names_the_path(
    base: Calls, ours: Calls, theirs: Calls
) -> None:
    began = history_of(base)
    mine = History(began.manifests, began.now)
    other = History(began.manifests, began.now)
    for side, made in ((mine, ours), (other, theirs)):
        for steps, whole in made:
            side.call(steps, whole=whole)

    merged = merge(
        compose(mine.changes, began.manifests),
        compose(other.changes, began.manifests),
        began.manifests,
    )

    expected, clashes = three_way(began.now, mine.now, other.now)
    assert bool(merged.conflicts) == bool(clashes)
    if not clashes:
        found = applied(merged.changes, mine.now, began.manifests)
        assert {path: (e.kind, e.mode, e.content) for path, e in found.items()} == expected


def three_way(base: Files, ours: Files, theirs: Files) -> tuple[dict[Parts, object], set[Parts]]:
    """Merge whole trees path by path; a path whose parent is no directory is a conflict."""
    found: dict[Parts, object] = {}
    clashes: set[Parts] = set()
    for path in {*base, *ours, *theirs}:
        was, our, their = (
            None if (e := files.get(path)) is None else (e.kind, e.mode, e.content)
            for files in (base, ours, theirs)
        )
        if our != was and their != was and our != their:
            clashes.add(path)
        chosen = their if our == was else our
        if chosen is not None:
            found[path] = chosen
    for path in found:
        parent = found.get(path[:-1]) if len(path) > 1 else ("directory",)
        if not isinstance(parent, tuple) or parent[0] != "directory":
            clashes.add(path)
    return found, clashes
