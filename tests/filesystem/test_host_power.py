"""``durability="safe"``: what a call that has returned changed is there after a loss of power.

A disk in a file, which is copied at the instant when the call returns: all that the kernel has not
written to it by then is lost. The copy is mounted, and has to hold everything.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from trees import look, put

from weakincentives.errors import CommandFailed
from weakincentives.filesystem import HostFilesystem
from weakincentives.filesystem.disk import engines

ROOT = hasattr(os, "geteuid") and os.geteuid() == 0 and sys.platform == "linux"

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.skipif(not ROOT, reason="only root can mount filesystems"),
]


def _tool(*arguments: object) -> str:
    done = subprocess.run([*map(str, arguments)], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"not possible here: {done.stderr.strip()}")
    return done.stdout.strip()


@contextlib.contextmanager
def mounted(disk: Path, place: Path, *, with_state: bool = True) -> Iterator[Path]:
    """Mount a disk that is a file, without a cache between the two.

    The state directory is on it, too, or else on another disk, which keeps its power.
    """
    device = _tool("losetup", "--find", "--show", "--direct-io=on", disk)
    try:
        place.mkdir()
        _tool("mount", device, place)
        with pytest.MonkeyPatch.context() as patch:
            if with_state:
                patch.setenv("XDG_STATE_HOME", str(place / "state"))
            try:
                yield place
            finally:
                subprocess.run(["umount", place], check=True)
    finally:
        subprocess.run(["losetup", "--detach", device], check=True)


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    disk = tmp_path / "disk"
    with open(disk, "wb") as file:
        file.truncate(64 << 20)
    _tool("mkfs.ext4", "-q", "-F", disk)
    return disk


def build(root: Path) -> None:
    put(root / "a.txt", "a as it was\n" * 100)
    put(root / "b.txt", "b as it was\n" * 100, 0o755)
    put(root / "dir/c.txt", "c as it was\n" * 100)
    put(root / "dir/sub/d.txt", "d as it was\n" * 100)
    put(root / "one", "one\n")
    os.link(root / "one", root / "dir/two")


Work = Callable[[HostFilesystem], object]


def _private(fs: HostFilesystem) -> None:
    view = fs.fork()
    view.run("echo private >>a.txt; mkdir new; cp b.txt new/b.txt", check=True)
    view.copy("dir", "new/dir")
    fs.merge(view)


def _external(fs: HostFilesystem) -> None:
    view = fs.fork_in_place()
    view.expect_external()
    put(Path(fs.root) / "made/outside.txt", "external\n" * 100)
    (Path(fs.root) / "a.txt").write_text("external\n")
    fs.merge(view)


def _copied_then_moved(fs: HostFilesystem) -> None:
    view = fs.fork_in_place()
    view.copy("dir", "x")
    view.copy("b.txt", "x/e.txt")
    view.move("x", "y")
    fs.merge(view)


def _undone(fs: HostFilesystem) -> None:
    fs.run("echo x >>a.txt; rm -r dir", check=True)
    fs.undo(fs.history()[-1].call_id)


def _rolled_back(fs: HostFilesystem) -> None:
    view = fs.fork_in_place()
    view.write("one", "in place")
    view.copy("b.txt", "a.txt", overwrite=True)
    view.delete("dir", recursive=True)
    fs.discard(view)


def _failed_external(fs: HostFilesystem) -> None:
    view = fs.fork_in_place()
    view.expect_external()
    (Path(fs.root) / "a.txt").write_text("external\n")
    (Path(fs.root) / "b.txt").unlink()
    fs.discard(view)


def _many(fs: HostFilesystem) -> None:
    fs.run("for i in $(seq 100); do echo $i >many-$i; done", check=True)


WORK: dict[str, Work] = {
    "write": lambda fs: fs.write("dir/c.txt", "written\n" * 100),
    "append": lambda fs: fs.append("a.txt", "appended\n" * 100),
    "write in place": lambda fs: fs.write("one", "written\n" * 100),
    "move": lambda fs: fs.move("dir", "x/moved"),
    "copy": lambda fs: fs.copy("b.txt", "x/copied"),
    "copy over": lambda fs: fs.copy("b.txt", "a.txt", overwrite=True),
    "copy a directory": lambda fs: fs.copy("dir", "x/copied"),
    "copy, then move": _copied_then_moved,
    "read-only": lambda fs: fs.set_readonly("a.txt"),
    "command": lambda fs: fs.run("echo x >new; echo y >>a.txt; mv b.txt dir/b", check=True),
    "command in place": lambda fs: fs.run("echo y >>one; rm a.txt", check=True),
    "command that makes many": _many,
    "private view": _private,
    "external": _external,
    "undo": _undone,
    "rollback": _rolled_back,
    "rollback of external": _failed_external,
}


@pytest.mark.parametrize("with_state", [True, False], ids=["", "state elsewhere"])
@pytest.mark.parametrize("work", WORK.values(), ids=WORK)
def test_what_a_call_changed_is_there_after_a_loss_of_power(
    disk: Path, tmp_path: Path, work: Work, with_state: bool
) -> None:
    copy = tmp_path / "copy"
    with mounted(disk, tmp_path / "live", with_state=with_state) as live:
        build(live / "work")
        with HostFilesystem(live / "work", durability="safe") as fs:
            assert engines(fs)[1].engine == "overlay"
            os.sync()
            work(fs)
            copy_disk(disk, copy)
            expected = look(live / "work")
    with mounted(copy, tmp_path / "after", with_state=with_state) as after:
        with HostFilesystem(after / "work") as fs:
            assert fs.recovered == ()
        assert look(after / "work") == expected


def copy_disk(disk: Path, copy: Path) -> None:
    subprocess.run(
        ["dd", f"if={disk}", f"of={copy}", "iflag=direct", "bs=1M", "conv=sparse", "status=none"],
        check=True,
    )


def test_a_failed_command_is_undone_after_a_loss_of_power_in_the_middle(
    disk: Path, tmp_path: Path
) -> None:
    """What was replaced is on the disk before the first change is."""
    copies: list[Path] = []
    with mounted(disk, tmp_path / "live") as live:
        build(live / "work")
        expected = look(live / "work")
        with HostFilesystem(live / "work", durability="safe") as fs:
            os.sync()
            view = fs.fork_in_place()
            for number, change in enumerate(
                (
                    lambda: view.write("a.txt", "changed"),
                    lambda: view.copy("b.txt", "dir/c.txt", overwrite=True),
                    lambda: view.write("one", "in place"),
                    lambda: view.delete("dir", recursive=True),
                    lambda: view.run("echo x >>b.txt; mkdir dir; echo y >dir/y", check=True),
                )
            ):
                change()
                copies.append(tmp_path / f"copy-{number}")
                copy_disk(disk, copies[-1])
            with pytest.raises(CommandFailed):
                view.run("rm a.txt; false", check=True)
            fs.discard(view)
    for copy in copies:
        with mounted(copy, tmp_path / f"after-{copy.name}") as after:
            with HostFilesystem(after / "work") as fs:
                assert fs.recovered == ()
            assert look(after / "work") == expected
