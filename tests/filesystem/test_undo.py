"""Taking back just some calls, and the diffs of calls: also for those who only look."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_filesystem_model import APPLY, outcome
from trees import ON_DISK, look, remove_empty_directories

from weakincentives.core.call import ToolCall
from weakincentives.errors import UndoRefused
from weakincentives.filesystem import HostFilesystem, Limits, WorkspaceHistory


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "project"
    (root / "src").mkdir(parents=True)
    (root / "src/app.py").write_text("one\ntwo\nthree\n")
    (root / "notes").write_text("hello\n")
    return root


@pytest.fixture
def fs(root: Path) -> Iterator[HostFilesystem]:
    with HostFilesystem(root) as fs:
        yield fs


def call(fs: HostFilesystem, call_id: str, work: Callable[[HostFilesystem], object]) -> None:
    """Make a call that is kept."""
    view = fs.fork_in_place()
    view.call = ToolCall("edit", {}, call_id)
    work(view)
    fs.merge(view)


def write(fs: HostFilesystem, call_id: str, **files: str) -> None:
    def work(view: HostFilesystem) -> None:
        for path, content in files.items():
            view.write(path, content)

    call(fs, call_id, work)


def texts(root: Path) -> dict[str, str]:
    files = (path for path in sorted(root.rglob("*")) if path.is_file())
    return {str(path.relative_to(root)): path.read_bytes().decode() for path in files}


def contents(root: Path) -> dict[str, tuple[object, ...]]:
    return {path: (seen.kind, seen.mode, seen.content) for path, seen in look(root).items()}


# Undoing


def test_the_last_call_is_undone_exactly(fs: HostFilesystem, root: Path):
    before = look(root)

    def work(view: HostFilesystem) -> None:
        view.write("src/app.py", "x")
        view.write("new/deep/file", "x")
        view.move("notes", "src/notes")

    call(fs, "c1", work)

    assert fs.undo("c1") == ()
    assert look(root) == before


def test_one_call_is_undone_and_later_ones_stay(fs: HostFilesystem, root: Path):
    write(fs, "c1", a="1", b="1")
    write(fs, "c2", c="2")
    fs.undo("c1")

    assert texts(root) == {"c": "2", "notes": "hello\n", "src/app.py": "one\ntwo\nthree\n"}


def test_a_call_is_not_undone_from_under_a_later_one(fs: HostFilesystem, root: Path):
    write(fs, "c1", a="1", b="1")
    write(fs, "c2", a="2")
    before = look(root)

    with pytest.raises(UndoRefused) as refused:
        fs.undo("c1")
    assert refused.value.paths == {"a": ("c2",)}
    assert look(root) == before

    assert fs.undo("c1", "c2") == ()
    assert "a" not in texts(root)


def test_what_a_person_changed_since_is_not_lost(fs: HostFilesystem, root: Path):
    write(fs, "c1", notes="by the agent", b="1")
    (root / "notes").write_text("by a person")
    before = look(root)

    with pytest.raises(UndoRefused, match="notes") as refused:
        fs.undo("c1")
    assert refused.value.paths == {"notes": ()}
    assert look(root) == before


def test_permissions_that_a_person_changed_since_are_not_lost(fs: HostFilesystem, root: Path):
    write(fs, "c1", notes="by the agent")
    write(fs, "c2", notes="by the agent, again")
    (root / "notes").chmod(0o600)
    before = look(root)

    for undoing in (["c2"], ["c1", "c2"]):
        with pytest.raises(UndoRefused) as refused:
            fs.undo(*undoing)
        assert refused.value.paths == {"notes": ()}
        assert look(root) == before

    (root / "notes").chmod(0o644)
    fs.undo("c1", "c2")
    assert (root / "notes").read_text() == "hello\n"


def test_permissions_that_a_call_changed_are_undone_with_it(fs: HostFilesystem, root: Path):
    before = contents(root)
    write(fs, "c1", notes="by the agent")
    call(fs, "c2", lambda view: view.set_readonly("notes", True))

    with pytest.raises(UndoRefused) as refused:
        fs.undo("c1")
    assert refused.value.paths == {"notes": ("c2",)}

    fs.undo("c1", "c2")
    assert contents(root) == before


def test_a_person_who_changed_something_last_is_the_one_in_the_way(fs: HostFilesystem, root: Path):
    write(fs, "c1", notes="1")
    write(fs, "c2", notes="2 and more")
    (root / "notes").write_text("by a person")

    assert WorkspaceHistory(root).changed_since(fs.history()[:1]) == {"notes": ()}


@pytest.mark.parametrize(
    "change",
    [
        lambda root: (root / "notes").unlink(),
        lambda root: (root / "notes").chmod(0o600),
        lambda root: os.replace(root / "notes", root / "elsewhere"),
        lambda root: ((root / "notes").unlink(), (root / "notes").mkdir()),
        lambda root: ((root / "notes").unlink(), (root / "notes").symlink_to("src")),
        lambda root: (root / "old/app.py").write_text("edited"),
        lambda root: (root / "src").write_text("in the way"),
        lambda root: shutil.rmtree(root / "old"),
        lambda root: shutil.rmtree(root / "made"),
        lambda root: (shutil.rmtree(root / "made"), (root / "made").write_text("a file now")),
    ],
)
def test_whatever_a_person_did_is_refused_or_kept_and_can_be_had_again(
    fs: HostFilesystem, root: Path, change: Callable[[Path], object]
):
    def work(view: HostFilesystem) -> None:
        view.write("notes", "by the agent")
        view.write("made/file", "x")
        view.move("src", "old")

    call(fs, "c1", work)
    change(root)
    before = contents(root)
    if WorkspaceHistory(root).changed_since(fs.history()):
        with pytest.raises(UndoRefused):
            fs.undo("c1")
        assert contents(root) == before

    told = fs.undo("c1", force=True)
    assert (root / "notes").read_text() == "hello\n"
    assert not (root / "made/file").exists()
    assert (root / "src").is_dir() or "src" in told[0] or "old" in told[0]

    fs.undo(fs.history()[-1].call_id)
    assert contents(root) == before


def test_an_undo_can_be_undone_and_the_history_says_what_was(fs: HostFilesystem, root: Path):
    write(fs, "c1", notes="1")
    after = texts(root)
    fs.undo("c1")
    undo = fs.history()[-1]

    assert undo.undoes == ("c1",)
    fs.undo(undo.call_id)
    assert texts(root) == after
    assert fs.history()[-1].undoes == (undo.call_id,)


def test_a_directory_that_holds_more_by_now_stays(fs: HostFilesystem, root: Path):
    write(fs, "c1", **{"docs/a": "1"})
    write(fs, "c2", **{"docs/b": "2"})

    (told,) = fs.undo("c1")

    assert "docs holds something" in told
    assert texts(root)["docs/b"] == "2"
    assert "docs/a" not in texts(root)


def test_calls_are_undone_one_after_the_other_also_through_a_directory_that_came_back(
    fs: HostFilesystem, root: Path
):
    """The directory that an undo makes again stands for the one that the call before made."""
    before = texts(root)
    write(fs, "c1", **{"docs/deep/a": "1"})
    call(fs, "c2", lambda view: view.delete("docs", recursive=True))

    fs.undo("c2")
    assert WorkspaceHistory(root).changed_since(fs.history()[:1]) == {}
    assert fs.undo("c1") == ()

    assert texts(root) == before
    assert not (root / "docs").exists()


def test_a_directory_that_a_later_call_made_is_not_taken_for_one_that_came_back(
    fs: HostFilesystem, root: Path
):
    write(fs, "c1", **{"docs/a": "1"})
    call(fs, "c2", lambda view: view.move("docs", "old"))
    write(fs, "c3", **{"docs/b": "3"})
    call(fs, "c4", lambda view: view.delete("docs", recursive=True))
    fs.undo("c4")

    with pytest.raises(UndoRefused) as refused:
        fs.undo("c1")
    assert refused.value.paths == {"docs/a": ("undo_5", "c4", "c3", "c2")}


@pytest.mark.parametrize(
    ("path", "content"), [("src/mine", "new"), ("src/app.py", "edited"), ("src/app.py", None)]
)
def test_what_a_person_did_in_a_directory_that_came_back_is_not_lost(
    fs: HostFilesystem, root: Path, path: str, content: str | None
):
    """An undo puts a directory back as a whole; to undo that removes the rest of it, or nothing."""
    call(fs, "c1", lambda view: view.delete("src", recursive=True))
    fs.undo("c1")
    undo = fs.history()[-1].call_id
    (root / path).unlink(missing_ok=True)
    if content is not None:
        (root / path).write_text(content)
    before = texts(root)

    with pytest.raises(UndoRefused) as refused:
        fs.undo(undo)
    assert refused.value.paths == {path: ()}
    assert texts(root) == before

    fs.undo(undo, force=True)
    assert not (root / "src").exists()
    fs.undo(fs.history()[-1].call_id)
    assert texts(root) == before

    told = fs.revert_to("c1")
    assert [path in sentence for sentence in told] == [True] * (content is not None)
    kept = {} if content is None else {path: content}
    assert texts(root) == {"notes": "hello\n", **kept}


def test_what_a_person_put_into_a_new_directory_is_not_told_as_the_calls(
    fs: HostFilesystem, root: Path
):
    write(fs, "c1", **{"docs/a": "1"})
    (root / "docs/mine").write_text("x")

    (changes,) = WorkspaceHistory(root).changes()
    assert [each.path for each in changes.files] == ["docs/a"]


@pytest.mark.parametrize("later", ["by a person", None])
def test_a_diff_never_shows_what_a_person_did_since(
    fs: HostFilesystem, root: Path, later: str | None
):
    write(fs, "c1", notes="by the agent", other="1")
    if later is None:
        (root / "notes").unlink()
    else:
        (root / "notes").write_text(later)

    (changes,) = WorkspaceHistory(root).changes()
    told = [(each.path, each.note, each.is_complete) for each in changes.files]
    assert told == [("notes", "", True), ("other", "", True)]
    text = fs.diff("c1")
    assert "person" not in text
    assert "+by the agent\n" in text

    write(fs, "c2", notes="by the agent, again")
    assert "person" not in fs.diff("c1")


def test_a_diff_of_a_directory_that_was_replaced_shows_what_went_and_what_came(
    fs: HostFilesystem, root: Path
):
    def work(view: HostFilesystem) -> None:
        view.write("staged/new.py", "new\n")
        view.copy("staged", "src", overwrite=True)

    call(fs, "c1", work)
    (root / "src/mine").write_text("a person's")

    (changes,) = WorkspaceHistory(root).changes()
    assert [each.path for each in changes.files] == [
        "src/app.py", "src/new.py", "staged/new.py",
    ]  # fmt: skip
    assert "person" not in fs.diff("c1")


def test_a_call_that_the_history_does_not_have_is_a_lookup_error(fs: HostFilesystem):
    with pytest.raises(LookupError, match="c9"):
        fs.undo("c9")


# Looking without a lock


def test_a_workspace_that_is_open_elsewhere_can_be_looked_at(fs: HostFilesystem, root: Path):
    write(fs, "c1", a="1\n")
    write(fs, "c2", a="1\n2\n", notes="bye\n")

    history = WorkspaceHistory(root)

    assert [each.call_id for each in history.calls()] == ["c1", "c2"]
    newest = next(iter(history.changes()))
    assert newest.call.call_id == "c2"
    assert [(f.path, f.added, f.removed) for f in newest.files] == [("a", 1, 0), ("notes", 1, 1)]


def test_looking_makes_nothing(tmp_path: Path):
    root = tmp_path / "project"
    root.mkdir()

    assert WorkspaceHistory(root).calls() == ()
    assert os.listdir(tmp_path) == ["project"]


def test_calls_that_are_forgotten_while_somebody_looks_are_left_out(fs: HostFilesystem, root: Path):
    for n in range(3):
        write(fs, f"c{n}", a=str(n))
    history = WorkspaceHistory(root)
    changes = history.changes()
    next(changes)
    fs.prune(Limits(count=1, newest=0))

    assert list(changes) == []
    assert [each.call_id for each in history.calls()] == ["c2"]


def test_a_content_that_was_forgotten_is_said_to_be(fs: HostFilesystem, root: Path):
    write(fs, "c1", notes="new\n")
    shutil.rmtree(WorkspaceHistory(root).store / "objects")

    (change,) = next(WorkspaceHistory(root).changes()).files

    assert change.note == "changed; the previous version is not saved, now a file of 4 bytes"
    assert (change.text, change.is_complete) == ("", False)


# Diffs


def diff(fs: HostFilesystem, work: Callable[[HostFilesystem], object]) -> str:
    call(fs, "c1", work)
    return fs.diff("c1")


def test_a_diff_knows_lines_as_git_does(fs: HostFilesystem):
    shown = diff(fs, lambda view: view.write("src/app.py", "one\n2\nthree\x0cx"))

    assert shown == (
        "diff --git a/src/app.py b/src/app.py\n--- a/src/app.py\n+++ b/src/app.py\n"
        "@@ -1,3 +1,3 @@\n one\n-two\n-three\n+2\n+three\x0cx\n\\ No newline at end of file\n"
    )


def test_a_file_that_moved_is_told_as_moved(fs: HostFilesystem):
    shown = diff(fs, lambda view: view.move("src", "lib"))

    assert "rename from src/app.py\nrename to lib/app.py\n" in shown
    assert "\n-" not in shown


def test_a_move_that_came_later_does_not_show(fs: HostFilesystem):
    write(fs, "c1", notes="1\n")
    call(fs, "c2", lambda view: view.move("notes", "moved"))

    assert "+1" in fs.diff("c1")
    assert "+++ b/notes" in fs.diff("c1")


def test_what_is_not_text_is_a_binary_patch(fs: HostFilesystem):
    shown = diff(fs, lambda view: view.write_bytes("notes", b"\xff\0"))

    assert "\nGIT binary patch\nliteral 2\n" in shown


NAMES = ["a", "b b", "c/d", 'q"uote', "new\nline", "café", "tab\tbed", "back\\slash", "c/e/f"]
CONTENT = st.sampled_from(["", "x", "x\n", "x\ny\n", "é\n", "a\nb\nc\n" * 5, "\r\n", "\x85\n"])
OPERATIONS = st.one_of(
    st.tuples(st.just("write_bytes"), st.sampled_from(NAMES), CONTENT.map(str.encode)),
    st.tuples(st.just("delete"), st.sampled_from([*NAMES, "c", "c/e"]), st.just(True)),
    st.tuples(
        st.just("move"),
        st.sampled_from([*NAMES, "c"]),
        st.sampled_from([*NAMES, "g"]),
        st.just(True),
    ),
    st.tuples(st.just("copy"), st.sampled_from(NAMES), st.sampled_from(NAMES), st.just(True)),
)
CALLS = st.lists(st.lists(OPERATIONS, min_size=1, max_size=4), min_size=1, max_size=4)


def play(fs: HostFilesystem, steps: list[tuple[object, ...]], call_id: str) -> None:
    call(fs, call_id, lambda view: [outcome(view, step) for step in steps if step[0] in APPLY])


A_FILE_BECOMES_A_DIRECTORY = [
    [("write_bytes", "a", b"x"), ("write_bytes", "c/e/f", b"y")],
    [("move", "a", "b b", True), ("move", "c", "a", True)],
]
A_DIRECTORY_BECOMES_A_FILE = [
    [("write_bytes", "c/e/f", b"y"), ("move", "c", "a", True)],
    [("delete", "a", True), ("write_bytes", "a", b"x")],
]


@given(CALLS)
@example(A_FILE_BECOMES_A_DIRECTORY)
@example(A_DIRECTORY_BECOMES_A_FILE)
@settings(ON_DISK, deadline=None)
def test_git_applies_the_diff_of_a_call_and_takes_it_back(calls: list[list[tuple[object, ...]]]):
    with tempfile.TemporaryDirectory() as above:
        root, copy = Path(above, "root"), Path(above, "copy")
        root.mkdir()
        with HostFilesystem(root) as fs:
            for n, steps in enumerate(calls[:-1]):
                play(fs, steps, f"c{n}")
            shutil.copytree(root, copy)
            remove_empty_directories(copy)  # git does not know of them
            before = texts(copy)
            play(fs, calls[-1], "last")
            if all(each.call_id != "last" for each in fs.history()):
                return
            patch = fs.diff("last").encode()
        if b"diff --git" not in patch:
            return
        for options, expected in (([], texts(root)), (["--reverse"], before)):
            done = subprocess.run(
                ["git", "apply", "--unsafe-paths", "--whitespace=nowarn", *options, "-"],
                cwd=copy, input=patch, capture_output=True, check=False,
                env={**os.environ, "GIT_CEILING_DIRECTORIES": above},
            )  # fmt: skip
            assert done.returncode == 0, (done.stderr, patch)
            assert texts(copy) == expected


@given(CALLS, st.data())
@settings(ON_DISK, deadline=None)
def test_an_undo_is_refused_or_can_be_undone(
    calls: list[list[tuple[object, ...]]], data: st.DataObject
):
    with tempfile.TemporaryDirectory() as above, HostFilesystem(above) as fs:
        root = Path(above)
        for n, steps in enumerate(calls):
            play(fs, steps, f"c{n}")
        ids = [each.call_id for each in fs.history()]
        if not ids:
            return
        now = contents(root)
        try:
            fs.undo(*data.draw(st.lists(st.sampled_from(ids), min_size=1, unique=True)))
        except UndoRefused:
            pass
        else:
            if len(fs.history()) > len(ids):
                fs.undo(fs.history()[-1].call_id)
        assert contents(root) == now


@given(CALLS, st.data())
@settings(ON_DISK, deadline=None)
def test_of_calls_up_to_the_last_nothing_is_left(
    calls: list[list[tuple[object, ...]]], data: st.DataObject
):
    with tempfile.TemporaryDirectory() as above, HostFilesystem(above) as fs:
        states = [contents(Path(above))]
        for n, steps in enumerate(calls):
            play(fs, steps, f"c{n}")
            if len(fs.history()) == len(states):
                states.append(contents(Path(above)))
        ids = [each.call_id for each in fs.history()]
        first = data.draw(st.integers(0, len(ids)))

        assert fs.undo(*data.draw(st.permutations(ids[first:]))) == ()
        assert contents(Path(above)) == states[first]


# What a person did that leaves size and time as they were


def in_place(path: Path) -> None:
    """As some editors do, and ``rsync -t --inplace``."""
    status = path.stat()
    path.write_text(path.read_text().swapcase())
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def by_another_file(path: Path) -> None:
    """As ``cp -p`` and ``rsync -t`` do."""
    status = path.stat()
    new = path.with_name("staged")
    new.write_text(path.read_text().swapcase())
    new.chmod(status.st_mode & 0o777)
    os.utime(new, ns=(status.st_atime_ns, status.st_mtime_ns))
    new.rename(path)


PERSONS = [in_place, by_another_file]


def by_the_api(fs: HostFilesystem, root: Path) -> None:
    write(fs, "c1", **{"src/app.py": "by the agent"})


def by_a_command(fs: HostFilesystem, root: Path) -> None:
    call(fs, "c1", lambda view: view.run("printf 'by the agent' > src/app.py"))


def by_a_copy(fs: HostFilesystem, root: Path) -> None:
    def work(view: HostFilesystem) -> None:
        view.write("staging/app.py", "by the agent")
        view.copy("staging", "src", overwrite=True)

    call(fs, "c1", work)


def by_a_program(fs: HostFilesystem, root: Path) -> None:
    def work(view: HostFilesystem) -> None:
        view.expect_external()
        (root / "src/app.py").write_text("by the agent")

    call(fs, "c1", work)


AGENTS = [by_the_api, by_a_command, by_a_copy, by_a_program]


@pytest.mark.parametrize("person", PERSONS)
@pytest.mark.parametrize("agent", AGENTS)
def test_a_change_that_leaves_size_and_time_as_they_were_is_not_lost(
    fs: HostFilesystem,
    root: Path,
    agent: Callable[[HostFilesystem, Path], None],
    person: Callable[[Path], None],
):
    agent(fs, root)
    person(root / "src/app.py")
    before = look(root)
    if agent is by_a_copy:  # a directory that replaced another: the rest comes back
        assert "src/app.py" in fs.undo("c1")[0]
        assert look(root)["src/app.py"] == before["src/app.py"]
        return
    with pytest.raises(UndoRefused) as refused:
        fs.undo("c1")
    assert "src/app.py" in refused.value.paths
    assert look(root) == before


@pytest.mark.parametrize("person", PERSONS)
def test_such_a_change_between_two_calls_is_not_lost(
    fs: HostFilesystem, root: Path, person: Callable[[Path], None]
):
    by_the_api(fs, root)
    person(root / "src/app.py")
    before = look(root)
    write(fs, "c2", **{"src/app.py": "once more"})
    assert fs.undo("c2") == ()
    assert look(root)["src/app.py"].content == before["src/app.py"].content
    with pytest.raises(UndoRefused):
        fs.undo("c1")
    write(fs, "c3", **{"src/app.py": "and again"})
    with pytest.raises(UndoRefused):
        fs.undo("c1", "c3")
    told = fs.revert_to(fs.history()[0].call_id)
    assert told == ()


@pytest.mark.parametrize("agent", AGENTS)
def test_a_call_that_failed_in_between_is_no_obstacle(
    fs: HostFilesystem, root: Path, agent: Callable[[HostFilesystem, Path], None]
):
    before = look(root)
    agent(fs, root)
    for _ in range(2):
        view = fs.fork_in_place()
        view.write("src/app.py", "fails")
        view.set_readonly("src/app.py")
        fs.discard(view)
    fs.undo("c1")
    assert look(root)["src/app.py"].content == before["src/app.py"].content


def test_calls_that_moved_a_file_over_another_are_undone_after_an_undo(
    fs: HostFilesystem, root: Path
):
    (root / "a").write_text("a\n")
    os.chmod(root / "notes", 0o600)
    before, start = look(root), fs.snapshot()
    write(fs, "c1", a="")
    call(fs, "c2", lambda view: view.move("notes", "a", overwrite=True))

    fs.restore(start)
    assert look(root) == before
    write(fs, "c3", a="")
    fs.restore(start)
    assert look(root) == before
