"""Trees of any depth: deeper than Python's stack, and than any path the system takes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from weakincentives.errors import CommandFailed
from weakincentives.filesystem import HostFilesystem, overlay

pytestmark = pytest.mark.skipif(os.name != "posix", reason="a real directory needs POSIX calls")

# Deeper than Python's stack (1,000), and longer than a path may be (4,096 bytes).
DEPTH = 1200
NAME = "nested"
DEEP = f"{NAME}/" * DEPTH

NEST = [
    sys.executable,
    "-c",
    "import os, sys\n"
    f"for _ in range({DEPTH}): os.mkdir({NAME!r}); os.chdir({NAME!r})\n"
    "open('file', 'w').write('deep\\n'); os.symlink('nowhere', 'link')\n"
    "sys.exit(int(sys.argv[1]))",
]


def nest(place: Path, depth: int = DEPTH) -> None:
    """Make nested directories ``nested/nested/...`` with a file and a link in the innermost one."""
    fd = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
    for _ in range(depth):
        os.mkdir(NAME, dir_fd=fd)
        below = os.open(NAME, os.O_RDONLY | os.O_DIRECTORY, dir_fd=fd)
        os.close(fd)
        fd = below
    file = os.open("file", os.O_WRONLY | os.O_CREAT, 0o640, dir_fd=fd)
    os.write(file, b"deep\n")
    os.close(file)
    os.symlink("nowhere", "link", dir_fd=fd)
    os.close(fd)


def depth_of(place: Path) -> tuple[int, str | None]:
    """Return how many directories are nested, and what the innermost file holds."""
    fd, depth = os.open(place, os.O_RDONLY | os.O_DIRECTORY), 0
    try:
        while True:
            try:
                below = os.open(NAME, os.O_RDONLY | os.O_DIRECTORY, dir_fd=fd)
            except FileNotFoundError:
                break
            os.close(fd)
            fd, depth = below, depth + 1
        try:
            file = os.open("file", os.O_RDONLY, dir_fd=fd)
        except FileNotFoundError:
            return depth, None
        try:
            return depth, os.read(file, 100).decode()
        finally:
            os.close(file)
    finally:
        os.close(fd)


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    root = tmp_path / "work"
    root.mkdir()
    (root / "a").write_text("a\n")
    yield root
    # Whatever a failed test has left: pytest's own cleaning up takes the whole test run down.
    left = list(tmp_path.iterdir())
    subprocess.run(["chmod", "-R", "u+rwX", *left], check=True)  # an overlay's own directory
    subprocess.run(["rm", "-rf", *left], check=True)


def needs_overlay(fs: HostFilesystem) -> None:
    way = overlay.find_way(fs.root, fs.store)
    if isinstance(way, str):
        pytest.skip(f"no overlay here: {way}")


def test_a_failing_command_that_nests_directories_leaves_nothing_behind(root: Path) -> None:
    with HostFilesystem(root) as fs:
        needs_overlay(fs)
        for _ in range(2):
            with pytest.raises(CommandFailed, match="ended with 3"):
                fs.run([*NEST, "3"], check=True)
        left = fs.store / "open"

    assert os.listdir(left) == []
    assert sorted(os.listdir(root)) == ["a"]


def test_what_a_killed_process_left_nested_does_not_keep_a_directory_from_being_opened(
    root: Path,
) -> None:
    with HostFilesystem(root) as fs:
        left = fs.store / "open" / "0123"
    left.mkdir(parents=True)
    nest(left)

    with HostFilesystem(root) as fs:
        assert fs.run("cat a").stdout == "a\n"
        assert not left.exists()


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs root")
def test_what_cannot_be_removed_does_not_keep_commands_from_running(
    root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A mount in the way is never emptied; it is only said that it is there."""
    with HostFilesystem(root) as fs:
        left = fs.store / "open" / "0123"
    left.mkdir(parents=True)
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "precious").write_text("mine")
    subprocess.run(["mount", "--bind", kept, left], check=True)
    try:
        with HostFilesystem(root) as fs:
            assert fs.run("cat a").stdout == "a\n"
    finally:
        subprocess.run(["umount", left], check=True)

    assert (kept / "precious").read_text() == "mine"
    assert "could not be removed" in caplog.text


def test_what_cannot_be_swept_is_told_and_the_rest_is_swept(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever goes wrong with one, the thread that removes them goes on."""
    discard, swept = overlay.Overlay.discard, list[overlay.Overlay]()

    def fail_twice(layers: overlay.Overlay) -> None:
        swept.append(layers)
        if len(swept) <= 2:
            raise RecursionError("too deep")
        discard(layers)

    with HostFilesystem(root) as fs:
        needs_overlay(fs)
        monkeypatch.setattr(overlay.Overlay, "empty", lambda _: False)  # not to be used again
        monkeypatch.setattr(overlay.Overlay, "discard", fail_twice)
        for _ in range(3):
            fs.run("true")
        left = fs.store / "open"

    assert len(list(left.glob("*/commands/*"))) == 2
    assert caplog.text.count("could not be removed: too deep") == 2


@pytest.mark.heavy
def test_a_command_that_nests_directories_is_kept_exactly(root: Path) -> None:
    with HostFilesystem(root) as fs:
        needs_overlay(fs)
        done = fs.run([*NEST, "0"], check=True)
        assert done.engine == "overlay"
        assert depth_of(root) == (DEPTH, "deep\n")

        assert fs.undo(fs.history()[-1].call_id) == ()

        assert sorted(os.listdir(root)) == ["a"]


Change = Callable[[HostFilesystem], object]

CHANGES: dict[str, Change] = {
    "delete": lambda fs: fs.delete(NAME, recursive=True),
    "move": lambda fs: fs.move(NAME, "moved"),
    "copy": lambda fs: fs.copy(NAME, "copied"),
    "write deep down": lambda fs: fs.write(f"{NAME}/" * 500 + "new", "new"),
    "command": lambda fs: fs.run("echo x >a; rm -r nested", check=True),
}


@pytest.mark.heavy
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_nested_directories_are_changed_and_put_back(root: Path, change: Change) -> None:
    nest(root)
    with HostFilesystem(root) as fs:
        needs_overlay(fs)
        view = fs.fork_in_place()
        change(view)
        assert fs.discard(view) == ()
        assert depth_of(root) == (DEPTH, "deep\n")
        assert sorted(os.listdir(root)) == ["a", NAME]

        change(fs)
        assert fs.undo(fs.history()[-1].call_id) == ()

        assert depth_of(root) == (DEPTH, "deep\n")
        assert sorted(os.listdir(root)) == ["a", NAME]


@pytest.mark.heavy
def test_nested_directories_are_read_like_any_other(root: Path) -> None:
    nest(root)
    with HostFilesystem(root) as fs:
        assert [one.path for one in fs.list(f"{NAME}/" * 500)] == [f"{NAME}/" * 500 + NAME]
        assert fs.glob("**/file") == (f"{DEEP}file",)
        assert [match.path for match in fs.grep("deep")] == [f"{DEEP}file"]
        assert fs.search("FILE") == (f"{DEEP}file",)
        fs.move(NAME, "moved")
        assert "rename from nested" in fs.diff(fs.history()[-1].call_id)


@pytest.mark.heavy
def test_a_private_view_runs_a_command_over_nested_directories_of_its_own(root: Path) -> None:
    with HostFilesystem(root) as fs:
        needs_overlay(fs)
        view = fs.fork()
        view.write("d/" * DEPTH + "file", "deep\n")
        assert view.run("find d -name file", check=True).stdout == "d/" * DEPTH + "file\n"
        view.run("echo more >>a; rm -r d/d/d", check=True)
        assert view.exists("d/d")
        assert not view.exists("d/d/d")
        fs.merge(view)

    assert os.listdir(root / "d/d") == []
    assert (root / "a").read_text() == "a\nmore\n"


def test_what_an_external_program_nested_is_found_and_undone(root: Path) -> None:
    with HostFilesystem(root) as fs:
        view = fs.fork_in_place()
        view.expect_external()
        nest(root)
        (root / "a").write_text("changed")
        fs.discard(view)

    assert sorted(os.listdir(root)) == ["a"]
    assert (root / "a").read_text() == "a\n"
