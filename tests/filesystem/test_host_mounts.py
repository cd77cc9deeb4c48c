"""Workspaces on odd filesystems: mounted in several places, in layers, or without hard links.

Mounting takes root. What is mounted is unmounted at the end of each test.
"""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from test_host_faults import CHANGES, Change, fill
from trees import look

from weakincentives.errors import CommandFailed, FilesystemError
from weakincentives.filesystem import HostFilesystem

ROOT = hasattr(os, "geteuid") and os.geteuid() == 0 and sys.platform == "linux"

needs_root = pytest.mark.skipif(not ROOT, reason="only root can mount filesystems")

Mount = Callable[..., Path]


@pytest.fixture
def mount() -> Iterator[Mount]:
    """Mount something with these arguments of ``mount``, the last being where."""
    done: list[Path] = []

    def one(*arguments: object, program: str = "mount") -> Path:
        command = [program, *map(str, arguments)]
        said = subprocess.run(command, capture_output=True, text=True, check=False)
        if said.returncode:
            pytest.skip(f"not possible here: {said.stderr.strip()}")
        done.append(Path(str(arguments[-1])))
        return done[-1]

    yield one
    failed = [
        place
        for place in reversed(done)
        if subprocess.run(["umount", "--lazy", place], check=False).returncode
    ]
    assert not failed, "what was mounted there is elsewhere"


CHILD = """
import os, signal, sys
from test_host_faults import CHANGES
from weakincentives.filesystem import HostFilesystem

def dying(original):
    def call(*args, **kwargs):
        global left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)
    return call

view = HostFilesystem(sys.argv[1]).fork_in_place()
left = int(sys.argv[3])
for name in ("rename", "rmdir", "mkdir", "link", "unlink", "ftruncate", "open", "utime"):
    setattr(os, name, dying(getattr(os, name)))
CHANGES[sys.argv[2]](view)
print("changed", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def kill_in_the_middle(root: Path, change: str, at: int = 0) -> bool:
    """Have another process make a change in a call, and be killed before the call ends.

    With ``at``, before that one of its system calls that change something. Returns whether the
    change was made.
    """
    here = str(Path(__file__).parent)
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(root), change, str(at)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([here, *filter(None, sys.path)])},
        stdout=subprocess.PIPE,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    return done.stdout == b"changed\n"


# The same disk, mounted inside the workspace


@pytest.fixture
def bound(tmp_path: Path, mount: Mount) -> Path:
    """A workspace whose ``dir`` is a mount of another directory of the same disk."""
    root = fill(tmp_path / "work")
    other = tmp_path / "other"
    shutil.copytree(root / "dir", other, symlinks=True)
    os.utime(other, ns=(0, 1_000_000_000_000_000_321))
    mount("--bind", other, root / "dir")
    assert os.stat(root).st_dev == os.stat(root / "dir").st_dev
    return root


@needs_root
def test_a_failed_command_is_rolled_back_in_a_mount_of_the_same_disk(bound: Path) -> None:
    before = look(bound)
    with HostFilesystem(bound) as fs:
        for _ in range(2):
            with pytest.raises(CommandFailed):
                fs.run("echo x >>a.txt; echo x >>dir/c.txt; rm dir/sub/d.txt; false", check=True)
            assert look(bound) == before
    with HostFilesystem(bound) as fs:
        assert fs.recovered == ()
    assert look(bound) == before


@needs_root
def test_a_workspace_that_is_mounted_elsewhere_keeps_its_history(
    tmp_path: Path, mount: Mount
) -> None:
    """The disk is the same, and yet nothing can be renamed from one to the other."""
    other, root = fill(tmp_path / "other"), tmp_path / "work"
    root.mkdir()
    before = look(other)
    with HostFilesystem(other) as fs:
        fs.write("a.txt", "changed")
    mount("--bind", other, root)
    with HostFilesystem(root) as fs:
        assert fs.undo(fs.history()[-1].call_id) == ()
        assert look(root) == before
        for change in ("write over a file", "delete a tree", "move over a file"):
            CHANGES[change](fs)
            assert fs.undo(fs.history()[-1].call_id) == ()
            assert look(root) == before


# What is in the mount itself; the mount point cannot be moved or removed.
IN_A_MOUNT: dict[str, Change] = {
    "write": lambda fs: fs.write("dir/c.txt", "changed"),
    "write something new": lambda fs: fs.write("dir/x/y", "new"),
    "delete": lambda fs: fs.delete("dir/c.txt"),
    "delete a directory": lambda fs: fs.delete("dir/sub", recursive=True),
    "move": lambda fs: fs.move("dir/c.txt", "dir/sub/e.txt"),
    "move out": lambda fs: fs.move("dir/c.txt", "c.txt"),
    "move in": lambda fs: fs.move("a.txt", "dir/c.txt", overwrite=True),
    "move a directory out": lambda fs: fs.move("dir/sub", "hollow", overwrite=True),
    "move a directory in": lambda fs: fs.move("hollow", "dir/hollow"),
    "copy in": lambda fs: fs.copy("a.txt", "dir/c.txt", overwrite=True),
    "read-only": lambda fs: fs.set_readonly("dir/c.txt"),
}


@needs_root
@pytest.mark.parametrize("change", IN_A_MOUNT.values(), ids=IN_A_MOUNT)
def test_a_change_in_a_mount_of_the_same_disk_is_undone_exactly(
    bound: Path, change: Change
) -> None:
    before = look(bound)
    with HostFilesystem(bound) as fs:
        view = fs.fork_in_place()
        change(view)
        assert look(bound) != before
        assert fs.discard(view) == ()
        assert look(bound) == before

        change(fs)
        assert fs.undo(fs.history()[-1].call_id) == ()
        assert contents(bound) == contents_in(before)


@pytest.mark.heavy
@needs_root
def test_a_kill_in_a_mount_of_the_same_disk_is_recovered(bound: Path) -> None:
    before = look(bound)
    for change in ("append", "copy over a file", "write a hard-linked file"):
        kill_in_the_middle(bound, change)
        with HostFilesystem(bound) as fs:
            assert fs.recovered == ()
        assert look(bound) == before


@needs_root
def test_a_directory_with_a_mount_in_it_is_neither_moved_nor_deleted(
    bound: Path, tmp_path: Path, mount: Mount
) -> None:
    """What is mounted would go along, to a place where it is removed some day."""
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "mine").write_text("mine")
    mount("--bind", precious, bound / "hollow")
    (bound / "above").mkdir()
    (bound / "above/inner").mkdir()
    mount("--bind", precious, bound / "above/inner")
    with HostFilesystem(bound) as fs:
        with pytest.raises(FilesystemError, match="another filesystem is mounted in it at"):
            fs.delete("above", recursive=True)
        with pytest.raises(FilesystemError, match="another filesystem is mounted in it at"):
            fs.move("above", "below")
        with pytest.raises(FilesystemError):
            fs.delete("hollow", recursive=True)
    assert (precious / "mine").read_text() == "mine"


def contents(root: Path) -> dict[str, object]:
    """All that going back over a kept call brings back: names that went are files of their own."""
    return contents_in(look(root))


def contents_in(seen: dict[str, object]) -> dict[str, object]:
    return {path: one._replace(links=0, names=frozenset()) for path, one in seen.items()}  # type: ignore[attr-defined]


# Layers, as in a container's image


@pytest.fixture
def layered(tmp_path: Path, mount: Mount) -> Path:
    """A workspace in an overlay, all of it from the lower layer."""
    fill(tmp_path / "lower/work")
    for name in ("upper", "inner", "merged"):
        (tmp_path / name).mkdir()
    options = f"lowerdir={tmp_path}/lower,upperdir={tmp_path}/upper,workdir={tmp_path}/inner"
    mount("-t", "overlay", "overlay", "-o", f"{options},redirect_dir=off", tmp_path / "merged")
    root = tmp_path / "merged/work"
    with pytest.raises(OSError, match="cross-device"):
        os.rename(root / "dir", root / "renamed")
    return root


@needs_root
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_of_what_comes_from_a_lower_layer_is_undone(layered: Path, change: Change) -> None:
    before = look(layered)
    with HostFilesystem(layered) as fs:
        view = fs.fork_in_place()
        change(view)
        assert look(layered) != before
        assert fs.discard(view) == ()
        # A file that is changed gets an inode of its own: that is what such a layer is about.
        assert contents(layered) == contents_in(before)

        change(fs)
        assert fs.undo(fs.history()[-1].call_id) == ()
        assert contents(layered) == contents_in(before)


@pytest.mark.heavy
@needs_root
@pytest.mark.parametrize("change", ["delete a tree", "move a directory", "move over a directory"])
def test_a_kill_while_a_lower_layers_directory_goes_is_recovered(
    layered: Path, change: str
) -> None:
    before = look(layered)
    kill_in_the_middle(layered, change)
    with HostFilesystem(layered) as fs:
        assert fs.recovered == ()
    assert contents(layered) == contents_in(before)


@needs_root
@pytest.mark.heavy
@pytest.mark.parametrize("change", ["delete a tree", "move a directory"])
def test_a_kill_at_any_instant_on_a_lower_layer_is_recovered(layered: Path, change: str) -> None:
    before = contents(layered)
    _kill_at_every_call(layered, change, lambda: contents(layered) == before)


@needs_root
def test_a_command_on_a_lower_layer_is_rolled_back(layered: Path) -> None:
    before = look(layered)
    with HostFilesystem(layered) as fs, pytest.raises(CommandFailed):
        fs.run("rm -r dir; echo x >a.txt; false", check=True)
    assert contents(layered) == contents_in(before)


# Without hard links, exchange, modes or symbolic links


@pytest.fixture
def exfat(tmp_path: Path, mount: Mount) -> Iterator[Callable[[], Path]]:
    """Gives a workspace on an exFAT disk; called again, the disk is mounted anew."""
    if shutil.which("mkfs.exfat") is None or shutil.which("mount.exfat-fuse") is None:
        pytest.skip("needs exfatprogs and exfat-fuse")
    disk, place = tmp_path / "disk", tmp_path / "mounted"
    with open(disk, "wb") as file:
        file.truncate(16 << 20)
    subprocess.run(["mkfs.exfat", disk], check=True, stdout=subprocess.DEVNULL)
    place.mkdir()
    device = _device(disk)

    def mounted() -> Path:
        if place.is_mount():
            subprocess.run(["umount", place], check=True)
            subprocess.run(["mount.exfat-fuse", device, place], check=True)
        else:
            mount(device, place, program="mount.exfat-fuse")
        return place / "work"

    root = mounted()
    for name in ("a.txt", "b.txt", "dir/c.txt", "dir/sub/d.txt", "hollow/e.txt"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{name} as it was\n")
    with pytest.raises(OSError, match="not permitted"):
        os.link(root / "a.txt", root / "linked")
    yield mounted
    subprocess.run(["losetup", "--detach", device], check=True)


def _device(disk: Path) -> str:
    found = subprocess.run(
        ["losetup", "--find", "--show", disk], capture_output=True, text=True, check=False
    )
    if found.returncode:
        pytest.skip(f"no loop device: {found.stderr.strip()}")
    return found.stdout.strip()


WITHOUT_LINKS = [name for name in CHANGES if "link" not in name and "read-only" not in name]


@needs_root
@pytest.mark.parametrize("change", WITHOUT_LINKS)
def test_nothing_is_lost_on_a_filesystem_without_hard_links(
    exfat: Callable[[], Path], change: str
) -> None:
    root = exfat()
    before = look(root)
    with HostFilesystem(root) as fs:
        view = fs.fork_in_place()
        CHANGES[change](view)
        assert look(root) != before
        assert fs.discard(view) == ()
        assert look(root) == before

        CHANGES[change](fs)
        assert fs.undo(fs.history()[-1].call_id) == ()
        assert look(root) == before


@pytest.mark.heavy
@needs_root
@pytest.mark.parametrize("anew", [False, True], ids=["mounted", "mounted anew"])
@pytest.mark.parametrize("change", WITHOUT_LINKS)
def test_a_kill_on_a_filesystem_without_hard_links_is_recovered(
    exfat: Callable[[], Path], change: str, anew: bool
) -> None:
    root = exfat()
    before = look(root)
    kill_in_the_middle(root, change)
    root = exfat() if anew else root
    with HostFilesystem(root) as fs:
        recovered = fs.recovered
    if anew and change == "copy a directory" and recovered:
        # Directories are told by their inodes, and those are others now unless the mount happens to
        # give the same ones: it is left, and told.
        assert "x/copied was changed by someone else since" in recovered[0]
        shutil.rmtree(root / "x")
        os.utime(root, ns=(0, before["."].modified))
    else:
        assert recovered == ()
    assert look(root) == before


def _kill_at_every_call(root: Path, change: str, is_back: Callable[[], bool]) -> None:
    for at in range(1, 200):
        made = kill_in_the_middle(root, change, at)
        with HostFilesystem(root) as fs:
            assert fs.recovered == ()
        assert is_back(), f"killed at call {at}"
        if made:
            return
    pytest.fail("the change takes more calls than expected")


@needs_root
@pytest.mark.heavy
@pytest.mark.parametrize(
    "change", ["write over a file", "move over a file", "copy over a file", "delete a tree"]
)
def test_a_kill_at_any_instant_without_hard_links_is_recovered(
    exfat: Callable[[], Path], change: str
) -> None:
    root = exfat()
    before = look(root)
    _kill_at_every_call(root, change, lambda: look(root) == before)


@needs_root
def test_a_file_is_not_said_to_be_read_only_where_the_filesystem_has_no_modes(
    exfat: Callable[[], Path],
) -> None:
    with HostFilesystem(exfat()) as fs:
        with pytest.raises(FilesystemError, match="its filesystem has no permissions"):
            fs.set_readonly("a.txt")
        assert not fs.is_readonly("a.txt")


@needs_root
def test_a_failed_command_is_rolled_back_without_hard_links(exfat: Callable[[], Path]) -> None:
    root = exfat()
    before = look(root)
    with HostFilesystem(root) as fs, pytest.raises(CommandFailed):
        fs.run("echo x >>a.txt; rm -r dir; mv b.txt c.txt; false", check=True)
    assert look(root) == before


# Files of somebody else, of which an ordinary user gets no second name


@pytest.mark.skipif(not ROOT, reason="only root can make files of two owners")
@pytest.mark.parametrize(
    "change", ["write over a file", "move over a file", "copy over a file", "delete a file"]
)
@pytest.mark.parametrize("killed", [False, True], ids=["failed", "killed"])
def test_somebody_elses_file_comes_back(
    change: str, killed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if Path("/proc/sys/fs/protected_hardlinks").read_text().strip() != "1":
        pytest.skip("hard links are not protected here")
    above = Path(tempfile.mkdtemp(prefix="wink-test-"))
    try:
        root = fill(above / "work")
        monkeypatch.setenv("XDG_STATE_HOME", str(above / "state"))
        for path in (above, root, *root.rglob("*")):
            os.chown(path, 65534, 65534, follow_symlinks=False)
        for name in ("a.txt", "b.txt"):
            os.chown(root / name, 0, 0)
            (root / name).chmod(0o644)
        before = look(root)
        os.setegid(65534)
        os.seteuid(65534)
        try:
            if killed:
                _in_a_child(lambda: _change_and_die(root, change))
                with HostFilesystem(root) as fs:
                    assert fs.recovered == ()
            else:
                with HostFilesystem(root) as fs:
                    view = fs.fork_in_place()
                    CHANGES[change](view)
                    assert look(root) != before
                    assert fs.discard(view) == ()
        finally:
            os.seteuid(0)
            os.setegid(0)
        assert look(root) == before
    finally:
        shutil.rmtree(above)


def _change_and_die(root: Path, change: str) -> None:
    CHANGES[change](HostFilesystem(root).fork_in_place())
    os.kill(os.getpid(), signal.SIGKILL)


def _in_a_child(action: Callable[[], None]) -> None:
    child = os.fork()
    if child == 0:
        try:
            action()
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL


# Privileges of files


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return fill(tmp_path / "work")


@pytest.mark.parametrize("mode", [0o4755, 0o2755, 0o6755])
@pytest.mark.parametrize("name", ["a.txt", "one"], ids=["a file", "a hard-linked file"])
@pytest.mark.parametrize("private", [False, True], ids=["in place", "private"])
def test_a_rewritten_program_acts_for_nobody_until_that_is_undone(
    root: Path, mode: int, name: str, private: bool
) -> None:
    (root / name).chmod(mode)
    before = look(root)
    with HostFilesystem(root) as fs:
        view = fs.fork_in_place()
        view.write(name, "#!/bin/sh\n")
        view.append(name, "id\n")
        assert stat.S_IMODE(os.stat(root / name).st_mode) == 0o755
        assert fs.discard(view) == ()
        assert look(root) == before

        if private:
            inner = fs.fork()
            inner.write(name, "#!/bin/sh\n")
            fs.merge(inner)
        else:
            fs.write(name, "#!/bin/sh\n")
        assert stat.S_IMODE(os.stat(root / name).st_mode) == 0o755
        assert fs.undo(fs.history()[-1].call_id) == ()
        assert stat.S_IMODE(os.stat(root / name).st_mode) == mode


@needs_root
def test_a_rewritten_program_loses_its_capabilities_until_that_is_undone(root: Path) -> None:
    # Version 2, cap_net_raw, permitted and effective.
    value = bytes.fromhex("0100000200200000000000000000000000000000")
    os.setxattr(root / "a.txt", "security.capability", value)
    before = look(root)
    with HostFilesystem(root) as fs:
        view = fs.fork_in_place()
        view.write("a.txt", "changed")
        assert "security.capability" not in os.listxattr(root / "a.txt")
        assert fs.discard(view) == ()
    assert look(root) == before
