"""What goes wrong around a workspace: a clear failure, a full rollback, and nothing is lost."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
from trees import Seen, look
from trees import elsewhere as another_filesystem

from chance import STRIDE
from weakincentives.errors import FilesystemError, MergeConflict, WinkError
from weakincentives.filesystem import HostFilesystem
from weakincentives.filesystem.store import location_of

pytestmark = pytest.mark.sampled

"""Every system call may fail; a quick run tries each third."""

ROOT = os.geteuid() == 0 if hasattr(os, "geteuid") else False


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return fill(tmp_path / "work")


def fill(place: Path) -> Path:
    """A small tree with something of everything, and with times long ago."""
    (place / "dir/sub").mkdir(parents=True)
    (place / "hollow").mkdir()
    for name in ("a.txt", "b.txt", "dir/c.txt", "dir/sub/d.txt", "one"):
        (place / name).write_text(f"{name} as it was\n")
    (place / "b.txt").chmod(0o755)
    os.link(place / "one", place / "dir/two")
    (place / "link").symlink_to("dir/c.txt")
    for number, path in enumerate(sorted(place.rglob("*"), reverse=True)):
        os.utime(path, ns=(0, 1_000_000_000_000_000_123 + number), follow_symlinks=False)
    os.utime(place, ns=(0, 1_000_000_000_000_000_000))
    return place


Change = Callable[[HostFilesystem], object]

CHANGES: dict[str, Change] = {
    "write a new file": lambda fs: fs.write("dir/new.txt", "new" * 1000),
    "write into new directories": lambda fs: fs.write("x/y/z/new.txt", "new"),
    "write over a file": lambda fs: fs.write("b.txt", "over" * 1000),
    "write a hard-linked file": lambda fs: fs.write("one", "both" * 1000),
    "append": lambda fs: fs.append("dir/c.txt", "more" * 1000),
    "append to a hard-linked file": lambda fs: fs.append("dir/two", "more" * 1000),
    "write through a link": lambda fs: fs.write("link", "through"),
    "make directories": lambda fs: fs.mkdir("x/y/z"),
    "delete a file": lambda fs: fs.delete("b.txt"),
    "delete a tree": lambda fs: fs.delete("dir", recursive=True),
    "delete a link": lambda fs: fs.delete("link"),
    "move a file": lambda fs: fs.move("a.txt", "x/a.txt"),
    "move over a file": lambda fs: fs.move("a.txt", "b.txt", overwrite=True),
    "move a directory": lambda fs: fs.move("dir", "x/dir"),
    "move over a directory": lambda fs: fs.move("dir/sub", "hollow", overwrite=True),
    "copy a file": lambda fs: fs.copy("b.txt", "x/copied"),
    "copy over a file": lambda fs: fs.copy("b.txt", "a.txt", overwrite=True),
    "copy a directory": lambda fs: fs.copy("dir", "x/copied"),
    "mark as read-only": lambda fs: fs.set_readonly("a.txt"),
}


FEW = ("write into new directories", "write a hard-linked file", "delete a tree")


def each_change(*, always: Iterable[str] = CHANGES) -> pytest.MarkDecorator:
    """Each of the changes; those that are not to be tried every time are heavy."""
    return pytest.mark.parametrize(
        "change",
        [
            pytest.param(change, id=name, marks=[] if name in always else [pytest.mark.heavy])
            for name, change in CHANGES.items()
        ],
    )


# Any system call that fails


class Failing:
    """Makes the n-th system call fail, and with ``on`` all later ones of some kinds too."""

    NAMES = (
        *("chmod", "chown", "fchmod", "fdatasync", "fsync", "ftruncate", "link", "mkdir", "open"),
        *("pwrite", "remove", "rename", "replace", "rmdir", "setxattr", "symlink", "unlink"),
        *("utime", "write"),
    )
    TAKING_SPACE = ("link", "mkdir", "open", "pwrite", "symlink", "write")

    def __init__(self, patch: pytest.MonkeyPatch, names: tuple[str, ...] = NAMES) -> None:
        self.called = 0
        self.failed = False
        self._at: int | None = None
        self._error = errno.EIO
        self._stays = False
        for name in names:
            original = getattr(os, name, None)
            if original is not None:
                patch.setattr(os, name, self._failing(name, original))

    def start(self, at: int, error: int, *, stays: bool = False) -> None:
        self._at, self._error, self._stays = at, error, stays

    def stop(self) -> None:
        self._at = None

    def _failing(self, name: str, original: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            if self._at is None or (name == "open" and not int(str(args[1])) & os.O_CREAT):
                return original(*args, **kwargs)
            self.called += 1
            if self.called == self._at or (self._stays and self.called > self._at):
                self.failed = True
                raise OSError(self._error, os.strerror(self._error))
            return original(*args, **kwargs)

        # A check such as `os.link in os.supports_dir_fd` must come out as before.
        for capable in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks):
            if original in capable:
                capable.add(call)
        return call


@pytest.mark.parametrize("disk", ["fails once", "is full"])
@each_change()
def test_an_operation_that_fails_anywhere_has_no_effect_and_the_call_is_rolled_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Change, disk: str
):
    """Its first system call fails, then its second, ...; on a full disk every later one too."""
    full = disk == "is full"
    for instant in range(1, 300, STRIDE):
        root = fill(tmp_path / str(instant) / "work")
        before = look(root)
        with monkeypatch.context() as patch, HostFilesystem(root) as fs:
            failing = Failing(patch, Failing.TAKING_SPACE if full else Failing.NAMES)
            view = fs.fork_in_place()
            view.write("earlier.txt", "written before")
            earlier = look(root)
            failing.start(instant, errno.ENOSPC if full else errno.EIO, stays=full)
            failed = None
            try:
                change(view)
            except FilesystemError as error:
                failed = error
            if not full:
                failing.stop()
            if failed is not None:
                assert os.strerror(errno.ENOSPC if full else errno.EIO) in str(failed)
                assert contents(look(root)) == contents(earlier), f"half done at {instant}"
            assert fs.discard(view) == ()
            assert look(root) == before, f"not rolled back after a failure at {instant}"
            assert fs.read("a.txt") == "a.txt as it was\n"
        with HostFilesystem(root):
            pass
        assert look(root) == before
        if not failing.failed:
            assert instant > 1, "nothing was counted"
            return
    pytest.fail("more than 300 system calls")


def refusal(attempt: Callable[[], object]) -> str | None:
    """Return what the library says against it; None if it was done."""
    try:
        attempt()
    except WinkError as error:
        return str(error)
    return None


def without_links(seen: dict[str, Seen]) -> dict[str, Seen]:
    return {path: entry._replace(links=0) for path, entry in seen.items()}


def contents(seen: dict[str, Seen]) -> dict[str, Seen]:
    """What is there, whenever it was made."""
    return {path: entry._replace(modified=0) for path, entry in seen.items()}


@pytest.mark.parametrize("private", [True, False], ids=["private view", "in place"])
@pytest.mark.parametrize("disk", ["fails once", "is full"])
@each_change()
def test_a_commit_that_fails_anywhere_is_whole_or_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Change, disk: str, private: bool
):
    full = disk == "is full"
    for instant in range(1, 300, STRIDE):
        root = fill(tmp_path / str(instant) / "work")
        before = look(root)
        with monkeypatch.context() as patch, HostFilesystem(root) as fs:
            failing = Failing(patch, Failing.TAKING_SPACE if full else Failing.NAMES)
            view = fs.fork() if private else fs.fork_in_place()
            change(view)
            failing.start(instant, errno.ENOSPC if full else errno.EIO, stays=full)
            kept = True
            try:
                fs.merge(view)
            except WinkError:
                kept = False
                fs.discard(view)
            failing.stop()
            after = look(root)
        if not kept:
            assert after == before, f"half committed at {instant}"
        with HostFilesystem(root) as fs:
            # How many names a file has in the store is nobody's business.
            assert without_links(look(root)) == without_links(after), f"not kept at {instant}"
            assert len(fs.history()) == int(kept)
        if not failing.failed:
            assert kept
            return
    pytest.fail("more than 300 system calls")


@each_change()
def test_a_rollback_that_fails_anywhere_is_finished_when_the_workspace_is_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Change
):
    for instant in range(1, 300, STRIDE):
        root = fill(tmp_path / str(instant) / "work")
        before = look(root)
        with monkeypatch.context() as patch, HostFilesystem(root) as fs:
            failing = Failing(patch)
            view = fs.fork_in_place()
            change(view)
            failing.start(instant, errno.EIO, stays=True)
            try:
                told = fs.discard(view)
            except (WinkError, OSError) as error:
                told = (str(error),)
            failing.stop()
            if look(root) != before:
                assert told, f"a failure at {instant} was not told"
        with HostFilesystem(root):
            pass
        assert look(root) == before, f"not finished after a failure at {instant}"
        if not failing.failed:
            return
    pytest.fail("more than 300 system calls")


def test_a_rollback_that_is_not_finished_is_not_forgotten_by_later_operations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """What programs changed in the failed call is undone after a kill, too."""
    for instant in range(1, 300):
        root = fill(tmp_path / str(instant) / "work")
        before = look(root)
        child = os.fork()
        if not child:
            try:
                fail_to_roll_back(root, monkeypatch, instant)
            finally:
                os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(child, 0)
        with HostFilesystem(root):
            pass
        assert contents(look(root)) == contents(before), f"not undone after a failure at {instant}"
        if not (root.parent / "failed").exists():
            return
    pytest.fail("more than 300 system calls")


def fail_to_roll_back(root: Path, patch: pytest.MonkeyPatch, instant: int) -> None:
    fs = HostFilesystem(root)
    failing = Failing(patch, ("chmod", "fchmod", "pwrite", "rename", "replace", "utime"))
    with fs.gate:
        view = fs.fork_in_place()
        view.write("a.txt", "by the call")
        view.expect_external()
        (root / "b.txt").write_text("by a program")
        (root / "new").write_text("by a program")
        view.write("one", "by the call")
        failing.start(instant, errno.EIO, stays=True)
        refusal(lambda: fs.discard(view))
    if failing.failed:
        (root.parent / "failed").touch()
    refusal(lambda: fs.mkdir("dir"))  # is there already


# A disk that is really full


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of two megabytes."""
    yield from mounted(tmp_path / "small", "-t", "tmpfs", "-o", "size=2m,nr_inodes=200", "tmpfs")


def mounted(place: Path, *options: str) -> Iterator[Path]:
    if not ROOT or sys.platform != "linux":
        pytest.skip("only root can mount a filesystem, on Linux")
    place.mkdir()
    done = subprocess.run(["mount", *options, place], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"cannot mount here: {done.stderr}")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def use_up(place: Path) -> None:
    """Leave not one byte of space."""
    with contextlib.suppress(OSError), (place / "filler").open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            with contextlib.suppress(OSError):
                while file.write(bytes(size)):
                    pass


def use_up_names(place: Path) -> None:
    """Leave space for bytes, and for not one more file."""
    with contextlib.suppress(OSError):
        for number in range(10_000):
            (place / f"filler{number}").touch()


@pytest.mark.parametrize("filled", [use_up, use_up_names], ids=["bytes", "inodes"])
@each_change()
def test_a_call_on_a_disk_that_fills_up_is_rolled_back(
    small: Path, change: Change, filled: Callable[[Path], None]
):
    root = fill(small / "work")
    before = look(root)
    with HostFilesystem(root) as fs:
        view = fs.fork_in_place()
        view.write("b.txt", "written while there was space")
        view.delete("dir/sub", recursive=True)
        view.append("one", "more")
        filled(small)
        so_far = look(root)
        told = refusal(lambda: change(view))
        if told and "No such file" not in told:
            assert os.strerror(errno.ENOSPC) in told
            assert contents(look(root)) == contents(so_far)
        assert fs.discard(view) == ()
        assert look(root) == before


def test_a_file_larger_than_the_disk_is_refused_and_leaves_no_trace(small: Path):
    root = fill(small / "work")
    before = look(root)
    with HostFilesystem(root) as fs:
        free = shutil.disk_usage(small).free
        for path in ("new.bin", "b.txt", "one"):
            with pytest.raises(FilesystemError, match="space"):
                fs.write_bytes(path, bytes(3 << 20))
            assert look(root) == before
        # What was staged for it is gone too.
        assert shutil.disk_usage(small).free >= free - 100_000
        fs.write("new.txt", "small enough")


@pytest.mark.heavy
@each_change(always=FEW)
def test_a_full_disk_does_not_keep_a_killed_call_from_being_undone(small: Path, change: Change):
    root = fill(small / "work")
    before = look(root)
    name = next(name for name, other in CHANGES.items() if other is change)
    run_and_kill(root, f"test_host_faults.CHANGES[{name!r}](view)")
    use_up(small)
    with HostFilesystem(root):
        assert look(root) == before


def run_and_kill(root: Path, statements: str, *, store: Path | None = None) -> None:
    """Do something in a call of another process, which dies before the call ends."""
    program = f"""
import os, signal, sys
sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parents[1])]!r}
import test_host_faults
from weakincentives.filesystem import HostFilesystem

fs = HostFilesystem({str(root)!r}, store={None if store is None else str(store)!r})
view = fs.fork_in_place()
{statements}
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr


def test_a_private_view_on_a_full_disk_is_refused_and_the_rest_goes_on(small: Path):
    root = fill(small / "work")
    before = look(root)
    with HostFilesystem(root, store=small / "store") as fs:
        view = fs.fork()
        view.write("dir/c.txt", "staged while there was space")
        use_up(small)
        with pytest.raises(FilesystemError, match="space"):
            view.write_bytes("new.bin", bytes(100_000))
        try:
            fs.merge(view)
        except FilesystemError:
            assert look(root) == before
        else:
            assert fs.read("dir/c.txt") == "staged while there was space"


def test_a_command_on_a_full_disk_fails_and_is_rolled_back(small: Path):
    root = fill(small / "work")
    before = look(root)
    with HostFilesystem(root) as fs:
        view = fs.fork_in_place()
        script = "echo changed > a.txt; rm -r dir; head -c 3000000 /dev/zero > big.bin"
        try:
            done = view.run(["sh", "-c", script])
        except FilesystemError:
            pass
        else:
            assert done.returncode != 0
        fs.discard(view)
        assert look(root) == before


# Things that may not be changed


@pytest.fixture
def unprivileged(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory of a user whom permissions hold for; root becomes such a user meanwhile."""
    if not ROOT:
        place = Path(tempfile.mkdtemp(prefix="wink-test-"))
        yield place
        for directory, names, _ in os.walk(place):  # each before it is entered
            for name in names:
                os.chmod(os.path.join(directory, name), 0o700)
        shutil.rmtree(place)
        return
    from ordinary_user import NOBODY, place_for_others  # a child imports this module, too

    with place_for_others() as place, place_for_others() as state:
        monkeypatch.setenv("XDG_STATE_HOME", str(state))
        try:
            os.setegid(NOBODY)
            os.seteuid(NOBODY)
            yield place
        finally:
            os.seteuid(0)
            os.setegid(0)


def test_a_directory_without_write_permission_stops_the_operation_and_no_more(unprivileged: Path):
    root = fill(unprivileged / "work")
    (root / "dir").chmod(0o555)
    before = look(root)
    with HostFilesystem(root) as fs:
        view = fs.fork_in_place()
        view.write("a.txt", "written before")
        for change in (
            lambda: view.write("dir/new.txt", "x"),
            lambda: view.delete("dir/c.txt"),
            lambda: view.mkdir("dir/new"),
            lambda: view.move("a.txt", "dir/a.txt"),
            lambda: view.move("dir/c.txt", "c.txt"),
            lambda: view.copy("a.txt", "dir/a.txt"),
            lambda: view.move("dir/sub", "sub"),
        ):
            so_far = look(root)
            with pytest.raises(FilesystemError, match="ermission"):
                change()
            assert contents(look(root)) == contents(so_far)
        assert fs.discard(view) == ()
        assert look(root) == before


@pytest.mark.parametrize(
    "change",
    [
        lambda view: view.delete("dir", recursive=True),
        lambda view: view.move("dir", "elsewhere"),
        lambda view: view.write("dir/c.txt", "over"),
        lambda view: view.write("dir/two", "over"),
        lambda view: view.copy("dir", "copied"),
    ],
    ids=["delete", "move", "write over", "write a hard-linked file", "copy"],
)
def test_a_directory_without_write_permission_is_as_it_was_after_a_rollback(
    unprivileged: Path, change: Change
):
    """Whether the system lets it be moved, or its files be changed in place, or not."""
    root = fill(unprivileged / "work")
    (root / "dir").chmod(0o555)
    (root / "dir/sub").chmod(0o500)
    before = look(root)
    with HostFilesystem(root) as fs:
        view = fs.fork_in_place()
        with contextlib.suppress(FilesystemError):
            change(view)
        assert fs.discard(view) == ()
        assert look(root) == before
        with contextlib.suppress(FilesystemError):
            change(fs)
    with HostFilesystem(root) as fs:
        assert not fs.recovered


def test_what_may_not_be_read_is_told_and_does_not_stop_the_rest(unprivileged: Path):
    root = fill(unprivileged / "work")
    (root / "a.txt").chmod(0)
    (root / "dir/sub").chmod(0)
    with HostFilesystem(root) as fs:
        with pytest.raises(FilesystemError, match="ermission"):
            fs.read("a.txt")
        with pytest.raises(FilesystemError):
            fs.read("dir/sub/d.txt")
        assert "b.txt" in fs.glob("**/*")
        assert "b.txt" in [match.path for match in fs.grep("as it was")]
        view = fs.fork_in_place()
        view.write("b.txt", "changed")
        assert fs.discard(view) == ()
        assert (root / "b.txt").read_text() == "b.txt as it was\n"


@pytest.mark.skipif(not ROOT, reason="only root can make files of two owners")
def test_a_file_of_another_owner_is_theirs_again_after_a_rollback(unprivileged: Path):
    root = fill(unprivileged / "work")
    os.seteuid(0)
    for name in ("b.txt", "dir/c.txt", "one"):
        os.chown(root / name, 0, 0)
    os.seteuid(os.stat(root).st_uid)
    before = look(root)
    with HostFilesystem(root) as fs:
        view = fs.fork_in_place()
        for change in (
            lambda: view.write("b.txt", "over"),
            lambda: view.write("one", "over"),
            lambda: view.delete("dir", recursive=True),
        ):
            with contextlib.suppress(FilesystemError):
                change()
        assert fs.discard(view) == ()
        assert look(root) == before


def test_a_workspace_whose_parent_takes_no_store_keeps_it_among_the_users_things(
    unprivileged: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_STATE_HOME", str(unprivileged / "state"))
    (unprivileged / "locked").mkdir()
    (unprivileged / "state").mkdir()
    root = fill(unprivileged / "locked/work")
    (unprivileged / "locked").chmod(0o555)
    before = look(root)
    with HostFilesystem(root) as fs:
        view = fs.fork_in_place()
        view.write("a.txt", "changed")
        view.delete("dir", recursive=True)
        fs.discard(view)
        assert look(root) == before
    assert os.listdir(unprivileged / "state/wink")
    assert os.listdir(unprivileged / "locked") == ["work"]


def test_no_place_for_a_store_is_told_when_the_workspace_is_opened(
    unprivileged: Path, monkeypatch: pytest.MonkeyPatch
):
    (unprivileged / "locked").mkdir()
    root = fill(unprivileged / "locked/work")
    (unprivileged / "locked").chmod(0o555)
    monkeypatch.setenv("XDG_STATE_HOME", str(unprivileged / "locked"))
    with pytest.raises((WinkError, OSError), match="locked"):
        HostFilesystem(root)


# A disk that may not be changed


@pytest.fixture
def readonly(tmp_path: Path) -> Iterator[Path]:
    """A filesystem that can be made read-only and back, with a workspace on it."""
    for place in mounted(tmp_path / "mounted", "-t", "tmpfs", "tmpfs"):
        fill(place / "work")
        yield place
        remount(place, "rw")


def remount(place: Path, how: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{how}", place], check=True)


def test_a_read_only_disk_can_be_read(
    readonly: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    remount(readonly, "ro")
    before = look(readonly / "work")
    with HostFilesystem(readonly / "work") as fs:
        assert fs.read("a.txt") == "a.txt as it was\n"
        for name in ("write a new file", "make directories", "copy a file"):
            view = fs.fork_in_place()
            with pytest.raises(FilesystemError, match=os.strerror(errno.EROFS)):
                CHANGES[name](view)
            assert fs.discard(view) == ()
        view = fs.fork()
        view.write("a.txt", "staged elsewhere")
        with pytest.raises(FilesystemError, match=os.strerror(errno.EROFS)):
            fs.merge(view)
    assert look(readonly / "work") == before


@each_change()
def test_a_change_that_fails_on_a_read_only_disk_leaves_nothing_to_undo(
    readonly: Path, tmp_path: Path, change: Change
):
    root, store = readonly / "work", tmp_path / "store"
    before = look(root)
    remount(readonly, "ro")
    with HostFilesystem(root, store=store) as fs:
        with pytest.raises(FilesystemError, match=os.strerror(errno.EROFS)):
            change(fs)
        view = fs.fork_in_place()
        with pytest.raises(FilesystemError, match=os.strerror(errno.EROFS)):
            change(view)
        assert fs.discard(view) == ()
    with HostFilesystem(root, store=store) as fs:
        assert fs.recovered == ()
    assert look(root) == before


# A store on another filesystem


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Path]:
    """A directory on another filesystem than the workspace's."""
    with another_filesystem(tmp_path) as place:
        yield place


@each_change()
def test_a_call_is_kept_or_rolled_back_with_the_store_on_another_filesystem(
    tmp_path: Path, elsewhere: Path, change: Change
):
    root, beside = fill(tmp_path / "work"), fill(tmp_path / "beside")
    before = look(root)
    with HostFilesystem(beside) as fs:
        change(fs)
    with HostFilesystem(root, store=elsewhere / "store") as fs:
        view = fs.fork_in_place()
        change(view)
        assert fs.discard(view) == ()
        assert look(root) == before
        view = fs.fork()
        change(view)
        assert look(root) == before
        fs.merge(view)
    assert contents(look(root)) == contents(look(beside))


@pytest.mark.heavy
@each_change(always=FEW)
def test_a_killed_call_is_undone_with_the_store_on_another_filesystem(
    tmp_path: Path, elsewhere: Path, change: Change
):
    root = fill(tmp_path / "work")
    before = look(root)
    name = next(name for name, other in CHANGES.items() if other is change)
    store = elsewhere / "store"
    run_and_kill(root, f"test_host_faults.CHANGES[{name!r}](view)", store=store)
    with HostFilesystem(root, store=store):
        assert look(root) == before


def test_with_the_store_elsewhere_a_root_without_write_permission_is_no_obstacle(
    unprivileged: Path,
):
    """What a call replaces waits on the workspace's filesystem, as far up as that is allowed."""
    root = fill(unprivileged / "work")
    root.chmod(0o555)
    before = look(root)
    with (
        another_filesystem(unprivileged) as place,
        HostFilesystem(root, store=place / "store") as fs,
    ):
        view = fs.fork_in_place()
        view.write("dir/c.txt", "changed")
        view.delete("dir/sub", recursive=True)
        assert fs.discard(view) == ()
        assert look(root) == before
        fs.write("dir/c.txt", "changed")
    assert not list(root.rglob(".wink*"))


# A store or workspace that is not what it was


@pytest.mark.parametrize(
    "make", [lambda p: None, lambda p: p.write_text("x")], ids=["none", "file"]
)
def test_a_workspace_that_is_no_directory_is_refused_by_name(
    tmp_path: Path, make: Callable[[Path], object]
):
    make(tmp_path / "work")
    before = sorted(os.listdir(tmp_path))
    with pytest.raises((WinkError, OSError, ValueError), match="work"):
        HostFilesystem(tmp_path / "work")
    assert sorted(os.listdir(tmp_path)) == before, "a store was made for nothing"


def test_a_workspace_that_is_deleted_meanwhile_is_told(root: Path):
    with HostFilesystem(root) as fs:
        fs.write("a.txt", "changed")
        shutil.rmtree(root)
        with pytest.raises(FilesystemError):
            fs.read("a.txt")
        with pytest.raises(FilesystemError):
            fs.write("new.txt", "x")


def store_of(root: Path) -> Path:
    return location_of(root)


def test_a_store_that_is_deleted_between_calls_costs_the_history_only(root: Path):
    with HostFilesystem(root) as fs:
        fs.write("a.txt", "changed")
        shutil.rmtree(store_of(root))
        view = fs.fork_in_place()
        with contextlib.suppress(FilesystemError):
            view.write("b.txt", "changed")
        fs.discard(view)
    assert (root / "a.txt").read_text() == "changed"
    assert (root / "b.txt").read_text() == "b.txt as it was\n"
    with HostFilesystem(root) as fs:
        fs.write("b.txt", "changed")
        assert fs.read("b.txt") == "changed"


def test_a_store_that_is_deleted_during_a_call_is_told_and_makes_nothing_worse(root: Path):
    with HostFilesystem(root) as fs:
        view = fs.fork_in_place()
        view.write("a.txt", "changed")
        shutil.rmtree(store_of(root))
        try:
            told = fs.discard(view)
        except WinkError as error:
            told = (str(error),)
        if (root / "a.txt").read_text() != "a.txt as it was\n":
            assert any("a.txt" in line for line in told)
    untouched = look(root)
    with HostFilesystem(root) as fs:
        assert look(root) == untouched
        fs.write("a.txt", "goes on")


# A journal that is not as it was written


def journal_of(root: Path) -> Path:
    (journal,) = (path for path in store_of(root).rglob("journal") if path.is_file())
    return journal


KILLED = """
view.write("a.txt", "changed")
view.delete("dir", recursive=True)
view.write("x/new.txt", "new")
view.append("one", "more")
"""


@pytest.mark.heavy
@pytest.mark.parametrize("cut", [0.0, 0.01, 0.5, 0.99, None])
def test_a_record_that_was_on_its_way_when_the_process_died_counts_for_nothing(
    root: Path, cut: float | None
):
    """Its change had not been made yet. What comes after a loss of power may be zeros, too."""
    before = look(root)
    run_and_kill(root, KILLED)
    journal = journal_of(root)
    last = journal.read_bytes().rstrip(b"\n").rpartition(b"\n")[2]
    with journal.open("ab") as file:
        file.write(bytes(300) if cut is None else last[: int(len(last) * cut)])
    with HostFilesystem(root):
        assert look(root) == before


@pytest.mark.heavy
@pytest.mark.parametrize("place", [0.0, 0.4, 0.8])
@pytest.mark.parametrize("damage", [b"\n", b"~~~~~~~~"])
def test_a_damaged_journal_is_told_and_loses_nothing(root: Path, place: float, damage: bytes):
    """No kill does this, a bad disk may: what was in the workspace is there or in the store."""
    originals = {path.read_bytes() for path in regular_files(root)}
    run_and_kill(root, KILLED)
    journal = journal_of(root)
    data = bytearray(journal.read_bytes())
    start = int(len(data) * place) + 2
    data[start : start + len(damage)] = damage
    journal.write_bytes(data)
    told = refusal(lambda: assert_told(root))
    assert not told or str(store_of(root)) in told
    kept = {path.read_bytes() for path in (*regular_files(root), *regular_files(store_of(root)))}
    assert originals <= kept


def assert_told(root: Path) -> None:
    with HostFilesystem(root) as fs:
        assert fs.recovered


def regular_files(place: Path) -> Iterator[Path]:
    return (path for path in place.rglob("*") if path.is_file() and not path.is_symlink())


# History that must not grow for ever


def test_history_stays_within_its_limit_and_forgets_the_oldest(root: Path):
    with HostFilesystem(root, history_limit=200_000) as fs:
        for number in range(40):
            fs.write_bytes("a.txt", os.urandom(20_000) + bytes([number]))
        remembered = fs.history()
        assert 0 < len(remembered) < 41
    size = sum(path.stat().st_size for path in regular_files(store_of(root)))
    assert size < 400_000
    with HostFilesystem(root, history_limit=200_000) as fs:
        before = (root / "a.txt").read_bytes()
        fs.write("a.txt", "last")
        fs.revert_to(remembered[-1].call_id)
        assert (root / "a.txt").read_bytes() == before


def test_a_call_larger_than_the_whole_history_is_kept_and_rolled_back_all_the_same(root: Path):
    before = look(root)
    with HostFilesystem(root, history_limit=1) as fs:
        view = fs.fork_in_place()
        view.write_bytes("a.txt", bytes(100_000))
        view.delete("dir", recursive=True)
        assert fs.discard(view) == ()
        assert look(root) == before
        fs.write_bytes("a.txt", bytes(100_000))
        fs.write_bytes("a.txt", bytes(200_000))
        assert fs.read_bytes("a.txt") == bytes(200_000)
    with HostFilesystem(root, history_limit=0) as fs:
        fs.write("a.txt", "still works")
        assert fs.history() == ()


# Someone else changes files


def somewhere_in_the_store(root: Path, text: str) -> bool:
    return any(path.read_bytes() == text.encode() for path in regular_files(store_of(root)))


def test_what_someone_changed_after_a_kill_is_left_alone_and_ours_is_kept(root: Path):
    before = look(root)
    run_and_kill(root, KILLED)
    (root / "a.txt").write_text("someone else's")
    with HostFilesystem(root) as fs:
        told = " ".join(fs.recovered)
        assert (root / "a.txt").read_text() == "someone else's"
        assert "a.txt" in told
        assert "dir" not in told
        assert somewhere_in_the_store(root, "a.txt as it was\n")
    after = look(root)
    del before["a.txt"], after["a.txt"]
    assert after == before, "the rest is undone as if nobody had interfered"


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("interfere", "path"),
    [
        (lambda root: (root / "a.txt").unlink(), "a.txt"),
        (lambda root: replace_with_directory(root / "a.txt"), "a.txt"),
        (lambda root: replace_with_link(root / "a.txt"), "a.txt"),
        (lambda root: (root / "dir").mkdir(), "dir"),
        (lambda root: (root / "dir").write_text("someone else's"), "dir"),
        (lambda root: (root / "x/new.txt").write_text("someone else's"), "x/new.txt"),
    ],
    ids=["deleted", "now a directory", "now a link", "made again", "now a file", "edited"],
)
def test_what_someone_did_to_a_path_after_a_kill_stays(
    root: Path, interfere: Callable[[Path], object], path: str
):
    run_and_kill(root, KILLED)
    interfere(root)
    theirs = {name: seen for name, seen in look(root).items() if name.split("/")[0] == path}
    contents_before = {b"a.txt as it was\n", b"dir/c.txt as it was\n", b"dir/sub/d.txt as it was\n"}
    with HostFilesystem(root) as fs:
        assert path in " ".join(fs.recovered)
    seen = look(root)
    assert {name: entry for name, entry in theirs.items() if seen.get(name) != entry} == {}
    everywhere = (*regular_files(root), *regular_files(store_of(root)))
    assert contents_before <= {file.read_bytes() for file in everywhere}


def replace_with_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def replace_with_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("b.txt")


def test_what_someone_put_into_a_directory_of_a_killed_call_is_set_aside_by_name(root: Path):
    before = look(root)
    run_and_kill(root, KILLED)
    (root / "x/theirs.txt").write_text("someone else's")
    with HostFilesystem(root) as fs:
        assert "x/theirs.txt" in " ".join(fs.recovered)
        kept = (root / "x/theirs.txt").exists()
        assert kept or somewhere_in_the_store(root, "someone else's")
    if not kept:
        assert look(root) == before


def test_untouched_paths_that_someone_changed_are_no_business_of_a_recovery(root: Path):
    run_and_kill(root, KILLED)
    (root / "b.txt").write_text("someone else's")
    (root / "theirs").mkdir()
    with HostFilesystem(root) as fs:
        assert not fs.recovered
    assert (root / "b.txt").read_text() == "someone else's"
    assert (root / "theirs").is_dir()


def test_going_back_leaves_alone_what_someone_changed_since(root: Path):
    with HostFilesystem(root) as fs:
        token = fs.snapshot()
        fs.write("a.txt", "ours")
        fs.write("b.txt", "ours")
        fs.delete("dir", recursive=True)
        (root / "a.txt").write_text("someone else's")
        fs.restore(token)
        assert (root / "a.txt").read_text() == "someone else's"
        assert (root / "b.txt").read_text() == "b.txt as it was\n"
        assert (root / "dir/sub/d.txt").read_text() == "dir/sub/d.txt as it was\n"
        assert somewhere_in_the_store(root, "a.txt as it was\n")


def test_reverting_leaves_alone_what_someone_changed_since_and_names_it(root: Path):
    with HostFilesystem(root) as fs:
        fs.write("b.txt", "first")
        first = fs.history()[-1].call_id
        fs.write("a.txt", "ours")
        fs.write("b.txt", "second")
        (root / "a.txt").write_text("someone else's")
        told = fs.revert_to(first)
        assert (root / "a.txt").read_text() == "someone else's"
        assert (root / "b.txt").read_text() == "first"
        assert "a.txt" in " ".join(told)
        assert somewhere_in_the_store(root, "a.txt as it was\n")


def test_a_conflict_is_no_drift(root: Path):
    """A private view that was overtaken by someone else's write is refused, not merged over it."""
    with HostFilesystem(root) as fs:
        view = fs.fork()
        view.write("a.txt", view.read("a.txt") + "more")
        fs.write("a.txt", "meanwhile")
        with pytest.raises(MergeConflict):
            fs.merge(view)
        assert fs.read("a.txt") == "meanwhile"
