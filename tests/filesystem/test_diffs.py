"""Diffs take a bounded time, whatever was changed, and git applies them all the same."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from trees import ON_DISK, has_xattrs, look, remove_empty_directories

from weakincentives.filesystem import FileChange, HostFilesystem, WorkspaceHistory
from weakincentives.filesystem.diffs import Effort, hunks

HEADER = "diff --git a/f b/f\n--- a/f\n+++ b/f\n"


def check_with_git(old: bytes, new: bytes, patch: bytes) -> None:
    """Let git make the one text of the other, and back."""
    with tempfile.TemporaryDirectory() as above:
        file = Path(above, "f")
        file.write_bytes(old)
        for options, expected in (([], new), (["--reverse"], old)):
            done = subprocess.run(
                ["git", "apply", "--unsafe-paths", "--whitespace=nowarn", *options, "-"],
                cwd=above, input=patch, capture_output=True, check=False,
                env={**os.environ, "GIT_CEILING_DIRECTORIES": str(Path(above).parent)},
            )  # fmt: skip
            assert done.returncode == 0, (done.stderr, patch[:2000])
            assert file.read_bytes() == expected


def lines_of(text: str) -> list[str]:
    return text.splitlines(keepends=True)


TEXTS = st.lists(st.sampled_from(["a", "b", "c", "", "ab"]), max_size=30).map("\n".join)


@given(TEXTS, TEXTS, st.sampled_from([0, 10, 100, 100_000]))
@settings(max_examples=60, deadline=None)
def test_git_applies_the_hunks_however_little_effort_there_was(old: str, new: str, steps: int):
    found = "".join(hunks(lines_of(old), lines_of(new), Effort(steps)))

    assert bool(found) is (old != new)
    if found and old and new:
        check_with_git(old.encode(), new.encode(), (HEADER + found).encode())


@given(TEXTS, st.lists(st.integers(0, 30), max_size=3))
def test_a_small_edit_is_told_as_such(text: str, places: list[int]):
    """Lines that stay are not told as gone and come."""
    old = lines_of(text)
    new = list(old)
    for place in places:
        new.insert(min(place, len(new)), "new\n")

    marks = [line[0] for line in hunks(old, new, Effort())]

    if text.endswith("\n") or not places:
        assert marks.count("+") == len(places)
        assert "-" not in marks


random_lines = random.Random(7)
BIG: dict[str, tuple[Callable[[int], str], Callable[[int], str]]] = {
    "rewritten": (lambda n: f"old line number {n} of the file\n", lambda n: f"new {n * 7}\n"),
    "indented": (lambda n: f"x = {n % 50}\n", lambda n: f"    x = {n % 50}\n"),
    "of two kinds of lines": (
        lambda n: random_lines.choice("ab") + "\n",
        lambda n: random_lines.choice("ab") + "\n",
    ),
    "of one line over and over": (lambda n: "x\n", lambda n: "x\n" if n % 2 else "y\n"),
    "shuffled": (lambda n: f"{n}\n", lambda n: f"{n * 7919 % 100_003}\n"),
}


@pytest.mark.heavy
@pytest.mark.parametrize("kind", BIG)
def test_a_rewritten_megabyte_takes_bounded_effort(kind: str, tmp_path: Path):
    """In the number of steps, not in seconds; the rest is linear. And git applies it."""
    before, after = BIG[kind]
    texts = ["".join(map(each, range(100_000)))[: 878 * 1024] for each in (before, after)]
    effort = Effort()
    list(hunks(lines_of(texts[0]), lines_of(texts[1]), effort))
    assert effort.left > -5000  # it stops within one round

    (tmp_path / "f").write_text(texts[0])
    with HostFilesystem(tmp_path) as files:
        view = files.fork()
        view.write("f", texts[1])
        (change,) = view.diff_here()
    check_with_git(texts[0].encode(), texts[1].encode(), change.text.encode())


# Every kind of file, against real git


def git_apply(directory: Path, patch: str, *options: str, repository: bool = False) -> None:
    """Apply a patch with nobody's settings, inside a repository or outside any."""
    env = {
        "PATH": os.environ["PATH"],
        "HOME": os.devnull,
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_SYSTEM": os.devnull,
        "GIT_CEILING_DIRECTORIES": str(directory.parent),
    }
    if repository and not (directory / ".git").exists():
        subprocess.run(
            ["git", "init", "--quiet", "--template="], cwd=directory, env=env, check=True
        )
    done = subprocess.run(
        ["git", "apply", "--whitespace=nowarn", *options, "-"],
        cwd=directory, input=patch.encode(errors="surrogateescape"),
        capture_output=True, check=False, env=env,
    )  # fmt: skip
    assert done.returncode == 0, (done.stderr, patch)


def tracked(root: Path) -> dict[str, tuple[object, ...]]:
    """Look at what git knows: files, links, and whether a file is executable."""
    return {
        path: (seen.kind, seen.kind == "file" and bool(seen.mode & 0o100), seen.content)
        for path, seen in look(root).items()
        if seen.kind in ("file", "symlink") and not path.startswith(".git/")
    }


@contextlib.contextmanager
def program(fs: HostFilesystem) -> Iterator[Path]:
    """A committed call in which another program changes files."""
    with fs.gate:
        view = fs.fork_in_place()
        view.expect_external()
        yield fs.root
        fs.merge(view)


def changes_of_all(
    fs: HostFilesystem, *, reverse: bool = False, raw: bool = False
) -> tuple[FileChange, ...]:
    history = WorkspaceHistory(fs.root, store=fs.store)
    return history.diff(history.calls(), reverse=reverse, raw=raw)


ODD_NAMES = st.sampled_from(
    [b"a", b"b b", b"c/d", b"c/e/f", b"c", b'q"uote', b"new\nline", b"caf\xe9", b"caf\xc3\xa9",
     b"tab\tbed", b"back\\slash", b"\x1b[31m", b" edge ", b"-dash", b"diff --git a b", b"b/a"]
)  # fmt: skip
ODD_CONTENTS = st.one_of(
    st.sampled_from(
        [b"", b"x", b"x\n", b"x\r\ny\r\n", b"\r", b"caf\xe9\n", b"\0", b"a\0b" * 40, b"\xff\xfe\n",
         b"--- a/x\n+++ b/x\n", b"diff --git a/x b/x\n", b"a\nb\nc\nd\ne\nf\n" * 3, b"\x0c\x85\n",
         bytes(range(256)) * 5]
    ),
    st.binary(max_size=200),
)  # fmt: skip
STEPS = st.one_of(
    st.tuples(st.just("write"), ODD_NAMES, ODD_CONTENTS, st.sampled_from([0o644, 0o755, 0o600])),
    st.tuples(st.just("write"), ODD_NAMES, ODD_CONTENTS, st.just(0o644)),
    # Not to itself: git looks through a link that becomes a directory, and fails at a loop.
    st.tuples(
        st.just("link"), ODD_NAMES, st.sampled_from([b"x", b"no where", b"caf\xe9", b"../x", b"b"])
    ),
    st.tuples(st.just("mkdir"), ODD_NAMES),
    st.tuples(st.just("chmod"), ODD_NAMES, st.sampled_from([0o644, 0o755])),
    st.tuples(st.just("remove"), ODD_NAMES),
    st.tuples(st.just("rename"), ODD_NAMES, ODD_NAMES),
)


def remove(path: bytes) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    elif os.path.lexists(path):
        os.unlink(path)


def make_room(root: bytes, name: bytes) -> bytes:
    """Return a free path; whatever is in the way is removed."""
    above = root
    for part in name.split(b"/")[:-1]:
        above += b"/" + part
        if not os.path.isdir(above) or os.path.islink(above):
            remove(above)
            os.mkdir(above)
    remove(root + b"/" + name)
    return root + b"/" + name


def perform(directory: Path, steps: list[tuple[object, ...]]) -> None:
    root = os.fsencode(directory)
    for step in steps:
        match step:
            case "write", bytes(name), bytes(content), int(mode):
                path = root + b"/" + name
                if not os.path.isfile(path) or os.path.islink(path):
                    path = make_room(root, name)
                with open(path, "wb") as file:
                    file.write(content)
                os.chmod(path, mode)
            case "link", bytes(name), bytes(target):
                os.symlink(target, make_room(root, name))
            case "mkdir", bytes(name):
                os.mkdir(make_room(root, name))
            case "chmod", bytes(name), int(mode) if os.path.isfile(root + b"/" + name):
                os.chmod(root + b"/" + name, mode)
            case "remove", bytes(name):
                with contextlib.suppress(NotADirectoryError):
                    remove(root + b"/" + name)
            case "rename", bytes(name), bytes(new) if not (new + b"/").startswith(name + b"/"):
                held = root + b".held"
                if os.path.lexists(root + b"/" + name):
                    os.rename(root + b"/" + name, held)
                    os.rename(held, make_room(root, new))
            case _:
                pass


TREES = st.lists(STEPS, max_size=8)


@given(TREES, st.lists(TREES, min_size=1, max_size=3), st.booleans(), st.booleans())
@example(
    before=[("write", b"c/d", b"x\n", 0o644), ("link", b"a", b"c"), ("write", b"b b", b"", 0o755)],
    calls=[[("link", b"c", b"b"), ("write", b"a", b"\0", 0o755), ("write", b"b b/x", b"y", 0o644)]],
    repository=True,
    raw=False,
)
@example(
    before=[],
    calls=[[("write", b" edge /d", b"", 0o644), ("write", b" edge /x y", b"\0", 0o644)]],
    repository=False,
    raw=False,
)
@example(
    before=[],
    calls=[
        [("write", b"c/d", b"", 0o644)],
        [("write", b"c", b"", 0o644)],
        [("write", b"c/e/f", b"", 0o644)],
    ],
    repository=False,
    raw=False,
)
@settings(ON_DISK, deadline=None)
def test_git_applies_any_run_and_reverses_it(
    before: list[tuple[object, ...]],
    calls: list[list[tuple[object, ...]]],
    repository: bool,
    raw: bool,
):
    with tempfile.TemporaryDirectory() as above:
        root, copy = Path(above, "root"), Path(above, "copy")
        root.mkdir()
        perform(root, before)
        shutil.copytree(root, copy, symlinks=True)
        remove_empty_directories(copy)  # git knows nothing of them, and does not remove them
        old = tracked(root)
        with HostFilesystem(root) as fs:
            for steps in calls:
                with program(fs) as directory:
                    perform(directory, steps)
            changes = changes_of_all(fs, raw=raw) if fs.history() else ()
            backwards = changes_of_all(fs, reverse=True) if fs.history() else ()
        new = tracked(root)
        assert all(each.is_complete for each in changes)
        patch = "".join(each.text for each in changes)
        assert bool(patch) is (old != new)
        if not patch:
            return
        assert raw or patch.encode(), "it can be printed"
        git_apply(copy, patch, repository=repository)
        assert tracked(copy) == new
        git_apply(copy, patch, "--reverse", repository=repository)
        assert tracked(copy) == old
        # The reverse diff is what `wink undo --dry-run` shows.
        remove_empty_directories(root)
        git_apply(root, "".join(each.text for each in backwards), repository=repository)
        assert tracked(root) == old


def changes_by(root: Path, work: Callable[[Path], object]) -> list[tuple[str, str]]:
    """Return the path and note of each change by a program."""
    with HostFilesystem(root) as fs:
        with program(fs) as directory:
            work(directory)
        return [(each.path, each.note) for each in changes_of_all(fs)]


def test_what_git_has_no_words_for_is_told_outside_of_the_patch(tmp_path: Path):
    root = tmp_path / "root"
    (root / "gone/deep").mkdir(parents=True)
    (root / "secret").write_text("x\n")

    def work(directory: Path) -> None:
        (directory / "new/deep").mkdir(parents=True)
        shutil.rmtree(directory / "gone")
        os.mkfifo(directory / "pipe")
        (directory / "secret").chmod(0o600)
        (directory / "full").mkdir()
        (directory / "full/file").write_text("x\n")

    (root / "secret").chmod(0o644)
    assert changes_by(root, work) == [
        ("full/file", ""),
        ("gone/deep", "empty directory deleted"),
        ("new/deep", "new empty directory"),
        ("pipe", "nothing became a named pipe"),
        ("secret", "permissions 0644 became 0600"),
    ]


def test_changed_attributes_are_told_and_unchanged_ones_are_not(tmp_path: Path):
    root = tmp_path / "root"
    root.mkdir()
    if not has_xattrs(tmp_path):
        pytest.skip("no extended attributes here")
    for name in ("changed", "kept"):
        (root / name).write_text("x\n")
        os.setxattr(root / name, "user.note", b"1")

    def work(directory: Path) -> None:
        os.setxattr(directory / "changed", "user.note", b"2")
        (directory / "kept").write_text("y\n")

    assert changes_by(root, work) == [("changed", "extended attributes changed"), ("kept", "")]


def test_a_file_that_is_too_large_is_named_and_not_in_the_patch(tmp_path: Path):
    root = tmp_path / "root"
    root.mkdir()
    (root / "big").touch()
    with HostFilesystem(root) as fs:
        with program(fs) as directory:
            os.truncate(directory / "big", 2 << 30)  # a hole: it takes no room
            (directory / "small").write_text("x\n")
        big, small = changes_of_all(fs)

    assert (big.text, big.is_complete) == ("", False)
    assert big.note == "too large for a diff: a file of 0 bytes became a file of 2147483648 bytes"
    assert small.is_complete
    assert small.text


def test_a_path_without_detail_is_named_and_a_move_out_of_sight_is_a_deletion(tmp_path: Path):
    root = tmp_path / "root"
    root.mkdir()
    (root / "a").write_text("x\n")
    with HostFilesystem(root) as fs:
        with program(fs) as directory:
            (directory / "a").rename(directory / "hidden")
        history = WorkspaceHistory(root)
        a, hidden = history.diff(history.calls(), detail=lambda path: path != "hidden")

    assert "deleted file mode 100644" in a.text
    assert (hidden.path, hidden.text, hidden.origin) == ("hidden", "", "")


# What a person did afterwards


def replace_by_a_file(path: Path) -> None:
    shutil.rmtree(path)
    path.write_text("a person's")


def replace_by_a_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "mine").write_text("a person's")


LATER: dict[str, tuple[Callable[[HostFilesystem], object], Callable[[Path], object]]] = {
    "edits it": (lambda fs: fs.write("a", "new\n"), lambda p: (p / "a").write_text("a person's")),
    "deletes it": (lambda fs: fs.write("a", "new\n"), lambda p: (p / "a").unlink()),
    "deletes a new file": (lambda fs: fs.write("b", "new\n"), lambda p: (p / "b").unlink()),
    "puts a directory there": (
        lambda fs: fs.write("a", "new\n"),
        lambda p: replace_by_a_directory(p / "a"),
    ),
    "removes its directory": (
        lambda fs: fs.write("d/x", "new\n"),
        lambda p: shutil.rmtree(p / "d"),
    ),
    "puts a file above it": (
        lambda fs: fs.write("d/x", "new\n"),
        lambda p: replace_by_a_file(p / "d"),
    ),
    "makes it again": (lambda fs: fs.delete("a"), lambda p: (p / "a").write_text("a person's")),
    "edits a moved one": (
        lambda fs: fs.move("a", "b"),
        lambda p: (p / "b").write_text("a person's"),
    ),
    "deletes a moved one": (lambda fs: fs.move("a", "b"), lambda p: (p / "b").unlink()),
    "deletes a moved one with its directory": (
        lambda fs: fs.move("a", "new/b"),
        lambda p: shutil.rmtree(p / "new"),
    ),
    "changes its mode": (lambda fs: fs.run("chmod 755 a"), lambda p: (p / "a").chmod(0o600)),
    "changes what a command left": (
        lambda fs: fs.run("echo new > a; ln -sfn d link; mkdir q; echo 1 > q/1"),
        lambda p: (
            (p / "a").write_text("a person's"),
            (p / "link").unlink(),
            shutil.rmtree(p / "q"),
        ),
    ),
}


@pytest.mark.parametrize("what", LATER)
def test_a_diff_shows_what_a_call_changed_whatever_a_person_does_there_later(
    tmp_path: Path, what: str
):
    root = tmp_path / "project"
    (root / "d").mkdir(parents=True)
    (root / "a").write_text("old\n")
    (root / "d/x").write_text("old\n")
    (root / "link").symlink_to("a")
    work, later = LATER[what]
    with HostFilesystem(root) as fs:
        work(fs)
        history = WorkspaceHistory(root)
        before = [history.diff(history.calls(), reverse=each) for each in (False, True)]

        later(root)

        history = WorkspaceHistory(root)
        assert [history.diff(history.calls(), reverse=each) for each in (False, True)] == before
        assert all(each.is_complete for two in before for each in two)
        (changes,) = WorkspaceHistory(root).changes()
        assert changes.files == before[0]


def test_a_diff_says_that_it_lacks_what_is_not_stored(tmp_path: Path):
    """Too large to be kept as the call left it; or moved as a whole directory, and gone since."""
    root = tmp_path / "project"
    (root / "d").mkdir(parents=True)
    (root / "d/x").write_text("x")
    with HostFilesystem(root) as fs:
        fs.write("large", "x\n" * (1 << 20))
        fs.move("d", "moved")
    (root / "large").write_text("a person's")
    shutil.rmtree(root / "moved")

    history = WorkspaceHistory(root)
    told = {each.path: (each.is_complete, each.note) for each in history.diff(history.calls())}
    note = "and changed since by somebody else"
    assert told == {"large": (False, f"created, {note}"), "moved/x": (False, f"moved, {note}")}
