"""Undo goes path by path: what no one else has touched comes back, and the rest is named.

Every case runs on a disk and in memory (tmpfs, where a directory that is made again has another
inode), and for changes through the API, by commands and by other programs.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from trees import look, put

from weakincentives.core.call import ToolCall
from weakincentives.errors import UndoRefused
from weakincentives.filesystem import HostFilesystem, WorkspaceHistory

# `make test` runs some of the cases.
pytestmark = pytest.mark.sampled

PLACES = {"disk": None, "tmpfs": "/dev/shm"}

Act = Callable[[HostFilesystem, Path], object]


@pytest.fixture(params=PLACES)
def root(request: pytest.FixtureRequest) -> Iterator[Path]:
    place = PLACES[request.param]
    if place is not None and not os.access(place, os.W_OK):
        pytest.skip(f"no {place} here")
    with tempfile.TemporaryDirectory(prefix="wink-test-", dir=place) as above:
        root = Path(above, "project")
        for number in range(4):
            put(root / f"src/f{number}", f"{number}\n")
        put(root / "src/deep/er/f", "deep\n", 0o600)
        (root / "src/deep/link").symlink_to("er/f")
        (root / "src/hollow").mkdir()
        put(root / "lib/one", "one\n")
        put(root / "lib/deep/two", "two\n")
        put(root / "notes", "hello\n")
        yield root


@pytest.fixture
def fs(root: Path) -> Iterator[HostFilesystem]:
    with HostFilesystem(root) as fs:
        yield fs


def call(fs: HostFilesystem, call_id: str, work: Callable[[HostFilesystem], object]) -> None:
    """Make a call that is committed."""
    view = fs.fork_in_place()
    view.call = ToolCall("edit", {}, call_id)
    work(view)
    fs.merge(view)


def sh(root: Path, script: str) -> None:
    subprocess.run(["sh", "-ec", script], cwd=root, check=True)


def by_command(script: str) -> Act:
    return lambda view, root: view.run(script)


def by_program(script: str) -> Act:
    def act(view: HostFilesystem, root: Path) -> None:
        view.expect_external()
        sh(root, script)

    return act


def ways(script: str, api: Callable[[HostFilesystem], object]) -> list[object]:
    return [
        pytest.param(lambda view, root: api(view), id="api"),
        pytest.param(by_command(script), id="command"),
        pytest.param(by_program(script), id="program"),
    ]


def contents(root: Path) -> dict[str, tuple[object, ...]]:
    found = look(root)
    return {path: (seen.kind, seen.mode, seen.content) for path, seen in found.items()}


def links(root: Path) -> set[frozenset[str]]:
    """Return the groups of names that are one file."""
    return {seen.names for seen in look(root).values() if len(seen.names) > 1}


def named(told: tuple[str, ...], *paths: str) -> bool:
    return all(any(path in sentence for sentence in told) for path in paths)


# One re-created file


REMOVED = ways("rm -rf src", lambda view: view.delete("src", recursive=True))
BACK = ["undo", "rewind", "revert"]


def go_back(fs: HostFilesystem, way: str, *calls: str) -> tuple[str, ...]:
    if way == "undo":
        return fs.undo(*calls)
    if way == "rewind":
        return fs.undo(*calls, leave_edits=True)
    return fs.revert_to("c0")


@pytest.mark.parametrize("way", BACK)
@pytest.mark.parametrize("remove", REMOVED)
def test_a_file_that_was_re_created_costs_no_other_file(
    fs: HostFilesystem, root: Path, remove: Act, way: str
):
    call(fs, "c0", lambda view: view.write("first", "x"))
    before = contents(root)
    call(fs, "c1", lambda view: remove(view, root))
    put(root / "src/f1", "a person's")
    put(root / "src/deep/er/mine", "also a person's")

    told = go_back(fs, way, "c1")

    now = contents(root)
    assert now.pop("src/f1")[2] == b"a person's"
    assert now.pop("src/deep/er/mine")[2] == b"also a person's"
    del before["src/f1"]
    assert now == before
    assert len(told) == 1
    assert "src/f1" in told[0]
    place = told[0].rpartition(" is in ")[2]
    assert Path(place).read_text() == "1\n"


@pytest.mark.parametrize("remove", REMOVED)
def test_what_was_left_is_undone_once_it_is_out_of_the_way(
    fs: HostFilesystem, root: Path, remove: Act
):
    before = contents(root)
    call(fs, "c1", lambda view: remove(view, root))
    put(root / "src/f1", "a person's")
    assert fs.undo("c1") != ()

    (root / "src/f1").unlink()
    assert fs.undo("c1") == ()

    assert contents(root) == before


@pytest.mark.parametrize("remove", REMOVED)
def test_force_replaces_what_was_re_created_and_that_can_be_undone(
    fs: HostFilesystem, root: Path, remove: Act
):
    before = contents(root)
    call(fs, "c1", lambda view: remove(view, root))
    put(root / "src/f1", "a person's")
    put(root / "src/hollow", "a file now")
    theirs = contents(root)

    assert fs.undo("c1", force=True) == ()
    assert contents(root) == before

    assert fs.undo(fs.history()[-1].call_id) == ()
    assert contents(root) == theirs


@pytest.mark.parametrize("remove", REMOVED)
def test_the_same_files_made_again_leave_nothing_to_name(
    fs: HostFilesystem, root: Path, remove: Act
):
    before = contents(root)
    copy = root.with_name("copy")
    shutil.copytree(root / "src", copy, symlinks=True)
    call(fs, "c1", lambda view: remove(view, root))
    (root / "src/deep").mkdir(parents=True)
    shutil.copy(copy / "f2", root / "src/f2")
    os.symlink("er/f", root / "src/deep/link")

    assert fs.undo("c1") == ()
    assert contents(root) == before


@pytest.mark.parametrize("way", BACK[1:])
@pytest.mark.parametrize("remove", REMOVED)
def test_a_file_in_the_place_of_a_removed_directory_stays(
    fs: HostFilesystem, root: Path, remove: Act, way: str
):
    call(fs, "c0", lambda view: view.write("first", "x"))
    call(fs, "c1", lambda view: (remove(view, root), view.write("notes", "changed")))
    put(root / "src", "a person's file")

    with pytest.raises(UndoRefused) as refused:
        fs.undo("c1")
    assert "src" in refused.value.paths
    told = go_back(fs, way, "c1")

    assert (root / "src").read_text() == "a person's file"
    assert (root / "notes").read_text() == "hello\n"
    assert named(told, "src")


# A directory that replaced another

REPLACED = ways("rm -rf src && cp -r lib src", lambda view: view.copy("lib", "src", overwrite=True))
MOVED = ways("rm -rf src && mv lib src", lambda view: view.move("lib", "src", overwrite=True))


@pytest.mark.parametrize("way", BACK)
@pytest.mark.parametrize("remove", REMOVED)
def test_a_file_made_again_is_not_lost_if_an_earlier_call_had_removed_it(
    fs: HostFilesystem, root: Path, remove: Act, way: str, request: pytest.FixtureRequest
):
    call(fs, "c0", lambda view: view.write("first", "x"))
    before = contents(root)
    call(fs, "c1", lambda view: view.delete("src/f1"))
    call(fs, "c2", lambda view: remove(view, root))
    put(root / "src/f1", "a person's")

    # What a program removed is known file by file, and so is the edit.
    is_refused = way == "undo" and "program" in request.node.name
    if is_refused:
        with pytest.raises(UndoRefused):
            fs.undo("c1", "c2")
    told = go_back(fs, "rewind" if is_refused else way, "c1", "c2")

    now = contents(root)
    assert now.pop("src/f1")[2] == b"a person's"
    del before["src/f1"]
    assert now == before
    assert named(told, "src/f1")


@pytest.mark.parametrize("way", BACK)
@pytest.mark.parametrize("replace", [*REPLACED, *MOVED])
def test_an_edit_in_a_directory_that_replaced_another_costs_no_other_file(
    fs: HostFilesystem, root: Path, replace: Act, way: str, request: pytest.FixtureRequest
):
    call(fs, "c0", lambda view: view.write("first", "x"))
    before = contents(root)
    call(fs, "c1", lambda view: replace(view, root))
    put(root / "src/mine", "a person's")
    put(root / "src/f0", "a person's f0")

    # A program that replaced a directory has changed what is in it: more is not known.
    is_refused = way == "undo" and "program" in request.node.name
    if is_refused:
        with pytest.raises(UndoRefused):
            fs.undo("c1")
    told = go_back(fs, "rewind" if is_refused else way, "c1")

    now = contents(root)
    theirs = {path: str(seen[2]) for path, seen in now.items() if "person" in str(seen[2])}
    assert len(theirs) == 2, "nothing of the person's is lost"
    expected = {path: seen for path, seen in before.items() if path not in theirs}
    assert {path: seen for path, seen in now.items() if path not in theirs} == expected
    if "src/f0" in theirs:  # else it went back with the directory that it was put into
        assert named(told, "src/f0")


@pytest.mark.parametrize("way", BACK)
@pytest.mark.parametrize("moved", MOVED)
def test_a_file_made_where_a_directory_was_costs_nothing_of_what_that_replaced(
    fs: HostFilesystem, root: Path, moved: Act, way: str
):
    put(root / "src/deep/two", "another\n")
    call(fs, "c0", lambda view: view.write("first", "x"))
    before = contents(root)
    call(fs, "c1", lambda view: moved(view, root))
    put(root / "lib/deep/two", "a person's")

    told = go_back(fs, way, "c1")

    now = contents(root)
    assert now.pop("lib/deep/two")[2] == b"a person's"
    del before["lib/deep/two"]
    assert now == before
    assert named(told, "lib/deep/two")
    place = next(each for each in told if "lib/deep/two" in each).rpartition(" is in ")[2]
    assert Path(place).read_text() == "two\n"


@pytest.mark.parametrize("moved", MOVED)
def test_force_restores_what_a_moved_directory_had_replaced_though_it_is_gone(
    fs: HostFilesystem, root: Path, moved: Act
):
    before = contents(root)
    call(fs, "c1", lambda view: moved(view, root))
    shutil.rmtree(root / "src")

    told = fs.undo("c1", force=True)

    now = contents(root)
    assert {p: s for p, s in now.items() if p.startswith("src")} == {
        p: s for p, s in before.items() if p.startswith("src")
    }
    assert now == before or named(told, "lib")


MOVED_AWAY = ways("mv src old", lambda view: view.move("src", "old"))


@pytest.mark.parametrize("way", BACK)
@pytest.mark.parametrize("move", MOVED_AWAY)
def test_a_directory_that_was_moved_away_comes_back_around_what_was_re_created(
    fs: HostFilesystem, root: Path, move: Act, way: str
):
    call(fs, "c0", lambda view: view.write("first", "x"))
    before = contents(root)
    call(fs, "c1", lambda view: move(view, root))
    put(root / "src/f1", "a person's")

    told = go_back(fs, way, "c1")

    now = contents(root)
    assert now.pop("src/f1")[2] == b"a person's"
    del before["src/f1"]
    kept = {path for path in now if path == "old" or path.startswith("old/")}
    assert kept <= {"old", "old/f1"}
    assert {path: seen for path, seen in now.items() if path not in kept} == before
    assert named(told, "src/f1")


@pytest.mark.parametrize("way", BACK)
def test_an_edit_of_what_a_call_wrote_and_then_moved_stays(
    fs: HostFilesystem, root: Path, way: str
):
    call(fs, "c0", lambda view: view.write("first", "x"))
    before = contents(root)
    call(fs, "c1", lambda view: (view.write("src/f1", "an agent's"), view.move("src", "old")))
    put(root / "old/f1", "a person's")

    told = go_back(fs, way, "c1")

    now = contents(root)
    assert now.pop("src/f1")[2] == b"a person's"
    del before["src/f1"]
    assert now == before
    assert named(told, "src/f1")


# No false "changed by someone else"


def touched(root: Path) -> None:
    for path in root.rglob("*"):
        os.utime(path, (1, 1), follow_symlinks=False)


def rewritten(root: Path) -> None:
    """As `git stash; git stash pop` and `git apply -R; git apply` do."""
    for path in root.rglob("*"):
        if path.is_file() and not path.is_symlink():
            data, mode = path.read_bytes(), path.stat().st_mode
            path.unlink()
            path.write_bytes(data)
            path.chmod(mode)


def made_again(root: Path) -> None:
    """Every directory and file is another one, with the same bytes and modes."""
    copy = root.with_name("again")
    shutil.copytree(root, copy, symlinks=True)
    for each in list(root.iterdir()):
        shutil.rmtree(each) if each.is_dir() and not each.is_symlink() else each.unlink()
    for each in list(copy.iterdir()):
        shutil.move(each, root / each.name)


def with_an_attribute(root: Path) -> None:
    for path in root.rglob("*"):
        if not path.is_symlink():
            try:
                os.setxattr(path, "user.note", b"a person's")
            except OSError:
                pytest.skip("no extended attributes here")


def with_another_owner(root: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    for path in root.rglob("*"):
        os.chown(path, 65534, 65534, follow_symlinks=False)


def with_a_failed_program(root: Path) -> None:
    """A program fails after it has removed everything; its rollback makes directories again."""
    with HostFilesystem(root) as fs:
        view = fs.fork_in_place()
        view.expect_external()
        sh(root, "rm -rf *")
        fs.discard(view)


CHANGED = ways(
    "printf new > notes; mkdir made; printf x > made/x; rm -rf lib; mv src old; chmod 700 old/deep",
    lambda view: (
        view.write("notes", "new"),
        view.write("made/x", "x"),
        view.delete("lib", recursive=True),
        view.move("src", "old"),
        view.write("old/f1", "1, changed"),
    ),
)


@pytest.mark.parametrize(
    "person", [touched, rewritten, made_again, with_an_attribute, with_another_owner]
)
@pytest.mark.parametrize("change", CHANGED)
def test_the_same_bytes_and_modes_are_no_conflict(
    fs: HostFilesystem, root: Path, change: Act, person: Callable[[Path], None]
):
    before = contents(root)
    call(fs, "c1", lambda view: change(view, root))
    person(root)

    assert WorkspaceHistory(root).changed_since(fs.history()) == {}
    assert fs.undo("c1") == ()
    assert contents(root) == before


@pytest.mark.parametrize("change", CHANGED)
def test_a_program_that_failed_since_is_no_conflict(root: Path, change: Act):
    before = contents(root)
    with HostFilesystem(root) as fs:
        call(fs, "c1", lambda view: change(view, root))
    with_a_failed_program(root)
    with HostFilesystem(root) as fs:
        assert fs.undo("c1") == ()
    assert contents(root) == before


@pytest.mark.parametrize("change", [*CHANGED, *MOVED, *MOVED_AWAY, *REMOVED])
def test_undo_redo_and_undo(fs: HostFilesystem, root: Path, change: Act):
    before = contents(root)
    call(fs, "c1", lambda view: change(view, root))
    after = contents(root)

    for number in range(4):
        assert fs.undo(fs.history()[-1].call_id) == ()
        assert contents(root) == (after if number % 2 else before)


@pytest.mark.parametrize("change", CHANGED)
def test_calls_are_undone_one_by_one_through_directories_that_came_back(
    fs: HostFilesystem, root: Path, change: Act
):
    before = contents(root)
    call(fs, "c1", lambda view: change(view, root))
    call(fs, "c2", lambda view: view.delete("old", recursive=True))
    call(fs, "c3", lambda view: view.delete("made", recursive=True))

    assert fs.undo("c3") == fs.undo("c2") == fs.undo("c1") == ()
    assert contents(root) == before


@pytest.mark.parametrize("change", CHANGED)
def test_other_permissions_are_a_conflict(fs: HostFilesystem, root: Path, change: Act):
    call(fs, "c1", lambda view: change(view, root))
    (root / "notes").chmod(0o600)

    with pytest.raises(UndoRefused) as refused:
        fs.undo("c1")
    assert refused.value.paths == {"notes": ()}


# Hard links


@pytest.mark.parametrize(
    "change",
    [
        *ways("rm one", lambda view: view.delete("one")),
        pytest.param(by_command("sed -i s/l/L/ one"), id="sed by a command"),
        pytest.param(by_program("sed -i s/l/L/ one"), id="sed by a program"),
        pytest.param(by_command("sed -i s/l/L/ one; rm two"), id="both by a command"),
        pytest.param(by_program("sed -i s/l/L/ one; rm two"), id="both by a program"),
        *ways("rm one two", lambda view: (view.delete("one"), view.delete("two"))),
        *ways("rm -rf inner", lambda view: view.delete("inner", recursive=True)),
        *ways("mv one moved", lambda view: view.move("one", "moved")),
        *ways(
            "rm -rf inner one",
            lambda view: (view.delete("inner", recursive=True), view.delete("one")),
        ),
        *ways("echo more >> one", lambda view: view.append("one", "more")),
    ],
)
def test_hard_links_are_linked_again(fs: HostFilesystem, root: Path, change: Act):
    put(root / "one", "hello\n")
    os.link(root / "one", root / "two")
    put(root / "inner/a", "inner\n")
    os.link(root / "inner/a", root / "inner/b")
    os.link(root / "one", root / "inner/three")
    before, linked = contents(root), links(root)
    call(fs, "c1", lambda view: change(view, root))

    assert fs.undo("c1") == ()

    assert contents(root) == before
    assert links(root) == linked


def test_hard_links_are_linked_again_when_calls_are_undone_one_by_one(
    fs: HostFilesystem, root: Path
):
    os.link(root / "notes", root / "two")
    linked = links(root)
    call(fs, "c1", lambda view: view.delete("notes"))
    call(fs, "c2", lambda view: view.delete("two"))

    assert fs.undo("c2") == fs.undo("c1") == ()

    assert links(root) == linked


def test_a_file_that_was_changed_through_its_other_name_is_not_joined(
    fs: HostFilesystem, root: Path
):
    os.link(root / "notes", root / "two")
    call(fs, "c1", lambda view: view.delete("notes"))
    (root / "two").write_text("a person's")

    assert fs.undo("c1") == ()

    assert (root / "notes").read_text() == "hello\n"
    assert (root / "two").read_text() == "a person's"
