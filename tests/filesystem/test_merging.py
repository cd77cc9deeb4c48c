"""Three-way merges of a branch into its workspace: path by path, all or nothing.

What a merge must lead to is decided here from the three states alone; what it did lead to is read
with ``os``.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from trees import look, put

from weakincentives.errors import MergeConflict
from weakincentives.filesystem import Branch, HostFilesystem, changes, swap, tree
from weakincentives.filesystem.merging import Merge

pytestmark = pytest.mark.sampled

NOTHING, FILE, OTHER, DIRECTORY, LINK = "nothing", "file", "other file", "directory", "link"
STATES = (NOTHING, FILE, OTHER, DIRECTORY, LINK)


class Work:
    """A workspace, a branch of it, and the ways in which someone may change it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.fs = HostFilesystem(root)
        self.branch = self.fs.branch("b")

    def close(self) -> None:
        self.branch.close()
        self.fs.close()

    def reopen(self) -> None:
        """Close everything and open it again, as a restarted process does."""
        self.close()
        self.fs = HostFilesystem(self.root)
        self.branch = Branch.open(self.root, "b")

    def conflicts(self, **how: object) -> list[str]:
        """Merge; the paths that conflict, in which case nothing may have changed."""
        before, calls = look(self.root), self.fs.history()
        try:
            self.branch.merge_into(self.fs, **how)  # pyright: ignore[reportArgumentType]
        except MergeConflict as conflict:
            assert look(self.root) == before, "half merged"
            assert self.fs.history() == calls
            return list(conflict.paths)
        return []


@pytest.fixture
def work(tmp_path: Path) -> Iterator[Work]:
    made = begin(tmp_path, {})
    yield made
    made.close()


def begin(base: Path, files: dict[str, str | bytes]) -> Work:
    root = base / "work"
    root.mkdir()
    for path, content in files.items():
        put(root / path, content)
    return Work(root)


# Every combination of what is at a path before, in the branch and in the directory


def by_hand(root: Path, path: str, state: str) -> None:
    """Let a person, who knows nothing of us, put this at a free path."""
    match state:
        case "file" | "other file":
            put(root / path, f"{state}\n")
        case "directory":
            put(root / path / "inner", "inner\n")
        case "link":
            (root / path).symlink_to("elsewhere")
        case _:
            pass


def through(fs: HostFilesystem, path: str, now: str, state: str, spare: str) -> None:
    """Put this at a path through the API; ``spare`` is a link to use."""
    if now == state:
        return
    if now != NOTHING:
        fs.delete(path, recursive=True)
    match state:
        case "file" | "other file":
            fs.write(path, f"{state}\n")
        case "directory":
            fs.write(f"{path}/inner", "inner\n")
        case "link":
            fs.move(spare, path)
        case _:
            pass


def state_of(place: Path) -> str:
    if place.is_symlink():
        return LINK if os.readlink(place) == "elsewhere" else "another link"
    if place.is_dir():
        inner = place / "inner"
        whole = os.listdir(place) == ["inner"] and inner.read_text() == "inner\n"
        return DIRECTORY if whole else "another directory"
    return place.read_text().strip() if place.exists() else NOTHING


@pytest.mark.parametrize("who", ["a call", "a person"])
@pytest.mark.parametrize(("before", "ours"), list(itertools.product(STATES, STATES)))
def test_every_combination_is_merged_or_refused(
    tmp_path: Path, before: str, ours: str, who: str
) -> None:
    cases = itertools.product(STATES, [None, "branch", "workspace"])
    for number, (theirs, prefer) in enumerate(cases):
        if prefer is not None and not before != ours != theirs != before:
            continue  # nothing to prefer
        root = tmp_path / str(number)
        root.mkdir()
        by_hand(root, "p", before)
        for spare in ("spare 1", "spare 2"):
            (root / spare).symlink_to("elsewhere")
        put(root / "p2", "p2")  # sorts after what is below p
        with contextlib.closing(Work(root)) as work:
            through(work.branch, "p", before, ours, "spare 1")
            if who == "a call":
                through(work.fs, "p", before, theirs, "spare 2")
            elif before != theirs:
                with contextlib.suppress(FileNotFoundError):
                    (root / "p").rename(root / "gone")
                by_hand(root, "p", theirs)
            check(work, before, ours, theirs, prefer)


def check(work: Work, before: str, ours: str, theirs: str, prefer: str | None) -> None:
    diverged = before != ours != theirs != before
    as_was, calls = look(work.root), len(work.fs.history())
    conflicts = work.conflicts(prefer=prefer)
    if diverged and prefer is None:
        assert any(path.startswith("p") for path in conflicts)
        return
    assert not conflicts, (before, ours, theirs, prefer)
    wanted = theirs if before == ours or (diverged and prefer == "workspace") else ours
    assert state_of(work.root / "p") == wanted, (before, ours, theirs, prefer)
    if wanted == theirs:
        assert state_of(work.root / "p") == theirs
    merged, made = look(work.root), work.fs.history()[calls:]
    assert len(made) <= 1, "a merge is one entry in the history"
    work.branch.merge_into(work.fs, prefer=prefer)  # pyright: ignore[reportArgumentType]
    assert look(work.root) == merged, "merging twice changed something"
    assert len(work.fs.history()) == calls + len(made)
    if made:
        assert made[0].tool == "merge"
        assert not work.fs.undo(made[0].call_id)
        assert look(work.root) == as_was, (before, ours, theirs, prefer)


# Text

TEXT = "".join(f"line {number}\n" for number in range(1, 10))


def changed(*lines: int, by: str) -> str:
    """The text with some lines changed by someone."""
    return "".join(
        f"{by}\n" if number in lines else line
        for number, line in enumerate(TEXT.splitlines(keepends=True), 1)
    )


def test_lines_changed_by_both_in_different_places_are_merged(work: Work) -> None:
    put(work.root / "t", TEXT)
    work.branch.begin_anew()
    work.branch.write("t", changed(2, by="branch"))
    put(work.root / "t", changed(8, by="person"))

    assert not work.conflicts()

    both = changed(2, by="branch").replace("line 8", "person")
    assert (work.root / "t").read_text() == both
    calls = work.fs.history()
    assert work.branch.merge_into(work.fs) == ()
    assert work.fs.history() == calls, "merging twice made an entry"


@pytest.mark.parametrize("theirs", [changed(2, by="person"), changed(3, by="person"), "", "\0"])
def test_lines_changed_by_both_in_the_same_place_conflict(work: Work, theirs: str) -> None:
    put(work.root / "t", TEXT)
    work.branch.begin_anew()
    work.branch.write("t", changed(2, by="branch"))
    put(work.root / "t", theirs)

    assert work.conflicts() == ["t"]


def test_a_merged_text_keeps_hard_links_attributes_and_permissions(work: Work) -> None:
    put(work.root / "t", TEXT, 0o640)
    os.link(work.root / "t", work.root / "name")
    with contextlib.suppress(OSError):
        os.setxattr(work.root / "t", "user.note", b"mine")
    work.branch.begin_anew()
    work.branch.write("t", changed(2, by="branch"))
    with (work.root / "t").open("r+") as file:
        file.write(changed(8, by="line p"))
    kept = look(work.root)["t"]

    assert not work.conflicts()

    now = look(work.root)["t"]
    assert (now.names, now.xattrs, now.mode) == (kept.names, kept.xattrs, kept.mode)
    assert "branch" in str(now.content)


def test_a_big_file_that_both_changed_is_a_conflict(work: Work) -> None:
    """Also if size and time are as before, and the branch was closed in between."""
    big = bytes(3 << 20)
    put(work.root / "big", big)
    work.branch.begin_anew()
    work.branch.write_bytes("big", big + b"branch")
    work.reopen()
    before = os.stat(work.root / "big")
    put(work.root / "big", b"p" + big[1:])
    os.utime(work.root / "big", ns=(before.st_atime_ns, before.st_mtime_ns))

    assert work.conflicts() == ["big"]


# Permissions


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_permissions_merge_like_content(work: Work, kind: str) -> None:
    for name in ("ours", "theirs", "both"):
        put(work.root / name if kind == "file" else work.root / name / "inner", TEXT)
        (work.root / name).chmod(0o755)
    work.branch.begin_anew()
    work.branch.run(["chmod", "700", "ours", "both"])
    (work.root / "theirs").chmod(0o750)
    (work.root / "both").chmod(0o711)

    assert work.conflicts() == ["both"]
    assert not work.conflicts(prefer="branch")
    modes = {name: seen.mode for name, seen in look(work.root).items()}
    assert [modes[name] for name in ("ours", "theirs", "both")] == [0o700, 0o750, 0o700]


def test_a_changed_permission_and_a_changed_content_come_together(work: Work) -> None:
    put(work.root / "run.sh", TEXT)
    work.branch.begin_anew()
    work.branch.run(["chmod", "755", "run.sh"])
    put(work.root / "run.sh", changed(1, by="person"))

    assert not work.conflicts()

    seen = look(work.root)["run.sh"]
    assert (seen.mode, seen.content) == (0o755, changed(1, by="person").encode())


# Directories


def test_what_a_person_adds_to_a_directory_that_the_branch_makes_stays(work: Work) -> None:
    work.branch.write("new/ours", "ours")
    put(work.root / "new/theirs", "theirs")

    assert not work.conflicts()
    assert sorted(os.listdir(work.root / "new")) == ["ours", "theirs"]


@pytest.mark.parametrize("who", ["a call", "a person"])
@pytest.mark.parametrize("instead", ["removes it", "puts a file there", "moves it"])
def test_what_others_add_to_a_directory_that_the_branch_takes_away_is_a_conflict(
    work: Work, instead: str, who: str
) -> None:
    put(work.root / "d/f", "f")
    work.branch.begin_anew()
    if instead == "moves it":
        work.branch.move("d", "e")
    else:
        work.branch.delete("d", recursive=True)
    if instead == "puts a file there":
        work.branch.write("d", "a file")
    if who == "a call":
        work.fs.write("d/new", "new")
    else:
        put(work.root / "d/new", "new")

    assert work.conflicts() == ["d/new"]
    assert not work.conflicts(prefer="workspace")
    assert (work.root / "d/new").read_text() == "new"


def test_a_file_where_the_branch_has_a_directory_is_a_conflict(work: Work) -> None:
    put(work.root / "d/f", "f")
    work.branch.begin_anew()
    work.branch.write("d/new", "new")
    (work.root / "d").rename(work.root / "gone")
    put(work.root / "d", "a file now")

    assert work.conflicts() == ["d/new"]
    assert not work.conflicts(prefer="branch")
    assert (work.root / "d/new").read_text() == "new"


def test_a_directory_that_others_removed_is_made_again_for_a_new_file(work: Work) -> None:
    put(work.root / "d/f", "f")
    work.branch.begin_anew()
    work.branch.write("d/new", "new")
    work.fs.delete("d", recursive=True)

    assert not work.conflicts()
    assert os.listdir(work.root / "d") == ["new"]


def test_an_edit_in_a_large_directory_that_the_branch_removes_is_a_conflict(work: Work) -> None:
    """Above a thousand files their contents are not kept; that they changed is noticed."""
    for number in range(1200):
        put(work.root / f"d/{number}", "same size")
    work.branch.begin_anew()
    work.branch.delete("d", recursive=True)
    work.reopen()
    for number in (0, 599, 1199):
        put(work.root / f"d/{number}", "SAME SIZE")

    assert work.conflicts() == ["d/0", "d/1199", "d/599"]


# Moves, copies and links


def test_a_move_on_the_branch_is_a_move_in_the_workspace(work: Work) -> None:
    put(work.root / "d/f", "f")
    os.link(work.root / "d/f", work.root / "d/g")
    with contextlib.suppress(OSError):
        os.setxattr(work.root / "d/f", "user.note", b"mine")
    work.branch.begin_anew()
    before = look(work.root)
    work.branch.move("d", "e")

    assert not work.conflicts()

    now = look(work.root)
    assert now["e/f"].names == {"e/f", "e/g"}
    assert now["e/f"]._replace(names=frozenset()) == before["d/f"]._replace(names=frozenset())


def test_a_moved_file_keeps_its_attributes_also_when_others_changed_something(work: Work) -> None:
    put(work.root / "f", "f", 0o640)
    put(work.root / "t", TEXT)
    with contextlib.suppress(OSError):
        os.setxattr(work.root / "f", "user.note", b"mine")
    os.utime(work.root / "f", ns=(10**18, 10**18))
    work.branch.begin_anew()
    before = look(work.root)["f"]
    work.branch.move("f", "g")
    work.branch.write("t", changed(1, by="branch"))
    put(work.root / "t", changed(9, by="person"))

    assert not work.conflicts()
    assert look(work.root)["g"]._replace(names=before.names) == before


def test_a_copy_has_what_the_branch_copied(work: Work) -> None:
    """Not what someone has put at its origin since."""
    put(work.root / "a", "old")
    work.branch.begin_anew()
    work.branch.copy("a", "b")
    work.fs.write("a", "new")

    assert not work.conflicts()
    assert ((work.root / "a").read_text(), (work.root / "b").read_text()) == ("new", "old")


@pytest.mark.parametrize("rebased", [True, False])
@pytest.mark.parametrize("how", ["move", "copy", "delete"])
def test_what_the_branch_moved_copied_or_deleted_may_be_deleted_by_others(
    work: Work, how: str, rebased: bool
) -> None:
    put(work.root / "a", "old")
    work.branch.begin_anew()
    getattr(work.branch, how)("a", *(["b"] if how != "delete" else []))
    work.branch.write("c", "new")
    work.fs.delete("a")
    if rebased:
        work.branch.rebase()
    kept = {} if how == "delete" else {"b": "old"}

    assert not work.conflicts()
    assert {each.name: each.read_text() for each in work.root.iterdir()} == {"c": "new", **kept}


def test_a_moved_file_that_others_changed_is_a_conflict(work: Work) -> None:
    put(work.root / "a", "old")
    work.branch.begin_anew()
    work.branch.move("a", "b")
    put(work.root / "a", "new")

    assert work.conflicts() == ["a"]


# Edits of a person


@pytest.mark.parametrize("how", ["write", "delete", "move away", "move over"])
def test_an_edit_that_the_branch_has_not_seen_is_never_replaced(work: Work, how: str) -> None:
    """Also if it came before the branch changed the file, which no call ever touched."""
    for name in ("f", "other"):
        put(work.root / name, "as it was")
    work.branch.begin_anew()
    put(work.root / "f", "by a person")
    match how:
        case "write":
            work.branch.write("f", "by the branch")
        case "delete":
            work.branch.delete("f")
        case "move away":
            work.branch.move("f", "g")
        case _:
            work.branch.move("other", "f", overwrite=True)

    assert work.conflicts() == ["f"]
    work.reopen()
    assert work.conflicts() == ["f"]


@pytest.mark.parametrize("how", ["read", "append", "command", "call"])
def test_an_edit_that_the_branch_has_seen_may_be_changed(work: Work, how: str) -> None:
    put(work.root / "f", "as it was\n")
    work.branch.begin_anew()
    put(work.root / "f", "by a person\n")
    match how:
        case "read":
            work.branch.write("f", work.branch.read("f") + "more\n")
        case "append":
            work.branch.append("f", "more\n")
        case "command":
            work.branch.run("echo more >> f")
        case _:
            view = work.branch.fork()
            view.write("f", view.read("f") + "more\n")
            work.branch.merge(view)

    assert not work.conflicts()
    assert (work.root / "f").read_text() == "by a person\nmore\n"


def test_an_edit_between_reading_and_writing_of_a_call_is_a_conflict_of_that_call(
    work: Work,
) -> None:
    put(work.root / "f", "as it was\n")
    work.branch.begin_anew()
    view = work.branch.fork()
    text = view.read("f")
    put(work.root / "f", "by a person\n")
    view.write("f", text + "more\n")

    with pytest.raises(MergeConflict):
        work.branch.merge(view)


def test_an_edit_between_two_calls_is_not_replaced_by_the_second(work: Work) -> None:
    put(work.root / "f", "as it was\n")
    work.branch.begin_anew()
    text = work.branch.read("f")
    put(work.root / "f", "by a person\n")
    work.branch.write("f", text + "more\n")

    assert work.conflicts() == ["f"]


# Reads


def test_a_strict_merge_refuses_what_was_read_and_changed_since(work: Work) -> None:
    for name in ("by call", "by person", "same"):
        put(work.root / name, name)
    work.branch.begin_anew()
    for name in ("by call", "by person", "same", "missing"):
        work.branch.exists(name)
    work.branch.write("out", "".join(work.branch.read(n) for n in ("by call", "by person", "same")))
    work.fs.write("by call", "changed")
    put(work.root / "by person", "changed")
    put(work.root / "missing", "there now")

    assert work.conflicts(strict=True) == ["by call", "by person", "missing"]
    work.reopen()
    assert work.conflicts(strict=True) == ["by call", "by person", "missing"]
    work.branch.rebase()
    assert not work.conflicts(strict=True)


# Rebasing


def test_a_rebase_keeps_the_changes_of_both(work: Work) -> None:
    for name in ("t", "mine", "gone", "origin"):
        put(work.root / name, TEXT)
    work.branch.begin_anew()
    work.branch.write("t", changed(2, by="branch"))
    work.branch.write("mine", "mine")
    work.branch.copy("origin", "copy")
    work.branch.move("gone", "moved")
    work.fs.write("t", changed(8, by="call"))
    work.fs.write("origin", "another")
    work.fs.write("new", "new")

    assert work.branch.rebase() == ("t",)

    both = changed(2, by="branch").replace("line 8", "call")
    expected = {"t": both, "mine": "mine", "copy": TEXT, "origin": "another", "moved": TEXT}
    for _ in range(2):
        assert {name: work.branch.read(name) for name in expected} == expected
        assert work.branch.read("new") == "new"
        assert not work.branch.exists("gone")
        work.reopen()
    assert not work.conflicts()
    assert {name: (work.root / name).read_text() for name in expected} == expected
    assert not (work.root / "gone").exists()


def test_a_rebase_with_conflicts_changes_nothing(work: Work) -> None:
    put(work.root / "f", "old")
    work.branch.begin_anew()
    work.branch.write("f", "branch")
    work.branch.write("g", "branch")
    work.fs.write("f", "call")
    before = work.branch.info

    with pytest.raises(MergeConflict):
        work.branch.rebase()

    assert work.branch.info == before
    assert (work.branch.read("f"), work.branch.read("g")) == ("branch", "branch")
    assert work.branch.rebase(prefer="workspace") == ("f",)
    assert (work.branch.read("f"), work.branch.read("g")) == ("call", "branch")


def test_a_rebase_after_going_back_keeps_what_is_there_now(work: Work) -> None:
    put(work.root / "f", "old")
    work.branch.begin_anew()
    work.branch.write("f", "first")
    work.branch.write("g", "second")
    work.branch.undo(work.branch.history()[-1].call_id)
    work.fs.write("h", "call")
    work.branch.rebase()

    assert work.branch.read("f") == "first"
    assert not work.branch.exists("g")
    assert work.branch.read("h") == "call"


# The history


def test_a_merge_is_one_call_and_undo_restores_exactly(work: Work) -> None:
    for name in ("a", "b", "d/c"):
        put(work.root / name, name)
    before = look(work.root)
    work.branch.begin_anew()
    work.branch.write("a", "branch")
    work.branch.move("d", "e")
    work.branch.delete("b")
    work.branch.run("mkdir empty && ln -s a link && mkfifo pipe")
    merged = work.branch.merge_into(work.fs)

    assert set(merged) >= {"a", "b", "d/c", "e/c", "empty", "link", "pipe"}
    (call,) = work.fs.history()
    assert call.tool == "merge"
    assert not work.fs.undo(call.call_id)
    assert look(work.root) == before


def test_a_merge_within_a_call_is_undone_with_it(work: Work) -> None:
    put(work.root / "f", "old")
    work.branch.begin_anew()
    work.branch.write("f", "branch")
    before = look(work.root)
    with work.fs.gate:
        view = work.fs.fork_in_place()
        work.branch.merge_into(view)
        assert view.read("f") == "branch"
        work.fs.discard(view)

    assert look(work.root) == before
    assert not work.conflicts()
    assert (work.root / "f").read_text() == "branch"


# Edits of a person in the very moment of the merge


def save_in_place(path: Path, text: str) -> None:
    path.write_text(text)


def save_by_rename(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    staged = path.with_name("a new version")
    staged.write_text(text)
    staged.rename(path)


def save_with_the_old_time(path: Path, text: str) -> None:
    """As within one tick of the clock: size and time tell nothing."""
    old = path.stat()
    with path.open("r+b") as file:
        file.write(text.encode().ljust(old.st_size)[: old.st_size])
    os.utime(path, ns=(old.st_atime_ns, old.st_mtime_ns))


SAVES = [save_in_place, save_by_rename, save_with_the_old_time]


def at_the_moment(
    monkeypatch: pytest.MonkeyPatch, where: str, act: Callable[[], object], times: int = 1
) -> None:
    """Let a person act right after a merge was planned, or right before a file is replaced."""
    left = [None] * times

    def act_once() -> None:
        if left:
            left.pop()
            act()

    if where == "planned":
        check = Merge.check

        def planned(merge: Merge) -> None:
            check(merge)
            act_once()

        monkeypatch.setattr(Merge, "check", planned)
        return
    exchange = tree.exchange

    def replaced(one: int, name: str, other: int, place: str) -> bool:
        if not name.startswith("n") or not place.startswith("n"):  # no trial of the filesystem
            act_once()
        return exchange(one, name, other, place)

    for module in (changes, swap):
        monkeypatch.setattr(module, "exchange", replaced)


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("where", ["planned", "replaced"])
@pytest.mark.parametrize("diverged", [False, True])
def test_a_save_in_the_moment_of_a_merge_is_a_conflict(
    work: Work,
    monkeypatch: pytest.MonkeyPatch,
    save: Callable[[Path, str], None],
    where: str,
    diverged: bool,
) -> None:
    for name in ("a", "f", "g"):
        put(work.root / name, TEXT)
    work.branch.begin_anew()
    work.branch.write("a", "by the branch")
    work.branch.write("f", "by the branch")
    work.branch.write("g", changed(1, by="branch"))
    if diverged:
        put(work.root / "g", changed(9, by="person"))
    at_the_moment(monkeypatch, where, lambda: save(work.root / "f", "by a person"))

    with pytest.raises(MergeConflict) as conflict:
        work.branch.merge_into(work.fs)

    assert conflict.value.paths == ("f",)
    assert (work.root / "f").read_text().startswith("by a person")
    assert (work.root / "a").read_text() == TEXT
    assert work.fs.history() == ()


@pytest.mark.parametrize("save", SAVES[:2])
def test_nor_is_it_replaced_where_files_cannot_be_swapped(
    work: Work, monkeypatch: pytest.MonkeyPatch, save: Callable[[Path, str], None]
) -> None:
    """Some filesystems cannot exchange two names: there the old file is moved away first."""
    for name in ("a", "f"):
        put(work.root / name, "as it was")
    work.branch.begin_anew()
    for name in ("a", "f", "new"):
        work.branch.write(name, "by the branch")
    for module in (changes, swap):
        monkeypatch.setattr(module, "exchange", lambda *_: False)
    at_the_moment(monkeypatch, "planned", lambda: save(work.root / "f", "by a person"))

    with pytest.raises(MergeConflict):
        work.branch.merge_into(work.fs)

    texts = {each.name: each.read_text() for each in work.root.iterdir()}
    assert texts == {"a": "as it was", "f": "by a person"}


def test_other_lines_that_a_person_saves_in_that_moment_are_merged(
    work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(work.root / "f", TEXT)
    work.branch.begin_anew()
    work.branch.write("f", changed(1, by="branch"))
    at_the_moment(monkeypatch, "replaced", lambda: put(work.root / "f", changed(9, by="person")))

    assert set(work.branch.merge_into(work.fs)) == {"f"}

    text = (work.root / "f").read_text()
    assert "branch" in text
    assert "person" in text


def test_a_person_who_saves_at_every_attempt_wins(
    work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(work.root / "f", TEXT)
    work.branch.begin_anew()
    work.branch.write("f", changed(1, by="branch"))
    saved = iter(range(100))

    def save() -> None:
        put(work.root / "f", changed(9, by=f"person {next(saved)}"))

    at_the_moment(monkeypatch, "planned", save, 100)

    with pytest.raises(MergeConflict, match="Changed by someone else in the meantime: f"):
        work.branch.merge_into(work.fs)
    assert (work.root / "f").read_text() == changed(9, by=f"person {next(saved) - 1}")


def test_of_two_saves_in_that_moment_the_newer_stays_and_the_older_is_set_aside(
    work: Work, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    put(work.root / "f", "as it was")
    work.branch.begin_anew()
    work.branch.write("f", "by the branch")
    saves = iter(["first", "second"])
    at_the_moment(monkeypatch, "replaced", lambda: save_in_place(work.root / "f", next(saves)), 2)

    with pytest.raises(MergeConflict):
        work.branch.merge_into(work.fs)

    assert (work.root / "f").read_text() == "second"
    (left,) = (work.fs.store / "left").iterdir()
    assert left.read_text() == "first"
    assert f"more than once during a merge; an earlier version is in {left}" in caplog.text


@pytest.mark.parametrize(
    ("deed", "edited"),
    [
        ("create", "new"),
        ("create below", "n/new"),
        ("delete", "f"),
        ("delete d", "d/x"),
        ("delete d", "d/new"),
        ("move", "f"),
        ("move", "moved"),
        ("move d", "moved"),
        ("replace", "d/new"),
        ("command", "f"),
    ],
)
@pytest.mark.parametrize("save", SAVES[:2])
def test_whatever_a_branch_does_there(
    work: Work,
    monkeypatch: pytest.MonkeyPatch,
    save: Callable[[Path, str], None],
    deed: str,
    edited: str,
) -> None:
    for name in ("f", "d/x", "d/y"):
        put(work.root / name, "as it was")
    work.branch.begin_anew()
    match deed:
        case "create":
            work.branch.write("new", "by the branch")
        case "create below":
            work.branch.write("n/new", "by the branch")
        case "delete":
            work.branch.delete("f")
        case "delete d":
            work.branch.delete("d", recursive=True)
        case "move":
            work.branch.move("f", "moved")
        case "move d":
            work.branch.move("d", "moved")
        case "replace":
            work.branch.delete("d", recursive=True)
            work.branch.write("d", "a file now")
        case _:
            work.branch.run("echo by the branch > f; rm -r d; echo new > d")
    work.branch.write("other", "by the branch")

    def edit() -> None:
        (work.root / edited).parent.mkdir(exist_ok=True)
        save(work.root / edited, "by a person")

    at_the_moment(monkeypatch, "planned", edit)

    with pytest.raises(MergeConflict):
        work.branch.merge_into(work.fs)

    assert (work.root / edited).read_text() == "by a person"
    assert not (work.root / "other").exists()
    names = {"f": "as it was", "d/x": "as it was", "d/y": "as it was"}
    for name, text in names.items():
        if name != edited:
            assert (work.root / name).read_text() == text


def test_what_is_saved_over_a_half_done_merge_stays_when_the_merge_is_undone(
    work: Work, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    put(work.root / "a", "as it was")
    put(work.root / "b", "as it was")
    work.branch.begin_anew()
    for name in ("a", "b", "new"):
        work.branch.write(name, "by the branch")
    done: list[str] = []
    exchange = changes.exchange

    def replaced(one: int, name: str, other: int, place: str) -> bool:
        if place == "b" and not done:
            done.append(place)
            save_in_place(work.root / "a", "over the merge")
            save_in_place(work.root / "b", "by a person")
        return exchange(one, name, other, place)

    monkeypatch.setattr(changes, "exchange", replaced)

    with pytest.raises(MergeConflict):
        work.branch.merge_into(work.fs)

    assert (work.root / "a").read_text() == "over the merge"
    assert (work.root / "b").read_text() == "by a person"
    assert not (work.root / "new").exists()
    assert "a was changed by someone else during the merge and is left unchanged" in caplog.text
    (left,) = (work.fs.store / "left").iterdir()
    assert left.read_text() == "as it was"
