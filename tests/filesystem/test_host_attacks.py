"""Nothing gets out of a workspace on disk, and nothing planted in it makes an operation hang."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from trees import look

from chance import HEAVY, STRIDE
from weakincentives.errors import FilesystemError, MergeConflict, PathEscapesRoot, WinkError
from weakincentives.filesystem import HostFilesystem, tree

pytestmark = pytest.mark.sampled


SECRET = "SECRET: nobody in the workspace may read this\n"


@pytest.fixture(autouse=True)
def no_hanging() -> Iterator[None]:
    """An operation that waits for a FIFO ends here instead of never."""

    def give_up(number: int, frame: object) -> None:
        raise TimeoutError("the operation hangs")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(params=["openat2", "walk"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways of opening a path below the root."""
    if request.param == "walk":
        monkeypatch.setattr(tree, "_find_openat2", lambda: None)
    elif tree._find_openat2() is None:
        pytest.skip("this system has no openat2")
    return request.param


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Path]:
    """A directory beside the workspace, which must be afterwards what it was before."""
    place = tmp_path / "outside"
    (place / "sub").mkdir(parents=True)
    (place / "file.txt").write_text(SECRET)
    (place / "sub/deep.txt").write_text(SECRET)
    (place / "sub/tool").write_text(SECRET)
    (place / "sub/tool").chmod(0o755)
    before = look(place)
    yield place
    assert look(place) == before, "something outside was changed"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    place = tmp_path / "work"
    (place / "dir/sub").mkdir(parents=True)
    (place / "file.txt").write_text("inside\n")
    (place / "dir/file.txt").write_text("inside\n")
    (place / "dir/sub/deep.txt").write_text("inside\n")
    return place


@pytest.fixture
def fs(way: str, root: Path, outside: Path) -> Iterator[HostFilesystem]:
    with HostFilesystem(root) as filesystem:
        yield filesystem


Operation = Callable[[HostFilesystem, str], object]

READS: dict[str, Operation] = {
    "read": lambda fs, path: fs.read(path),
    "read_bytes": lambda fs, path: fs.read_bytes(path),
    "copy from": lambda fs, path: fs.copy(path, "copied"),
    "grep": lambda fs, path: fs.grep("SECRET", path),
}
WRITES: dict[str, Operation] = {
    "write": lambda fs, path: fs.write(path, "changed"),
    "write_bytes": lambda fs, path: fs.write_bytes(path, b"changed"),
    "append": lambda fs, path: fs.append(path, "changed"),
    "set_readonly": lambda fs, path: fs.set_readonly(path),
}
LOOKS: dict[str, Operation] = {
    "stat": lambda fs, path: fs.stat(path),
    "exists": lambda fs, path: fs.exists(path),
    "is_readonly": lambda fs, path: fs.is_readonly(path),
}
PLACES: dict[str, Operation] = {
    "mkdir": lambda fs, path: fs.mkdir(path),
    "move to": lambda fs, path: fs.move("file.txt", path, overwrite=True),
    "copy to": lambda fs, path: fs.copy("file.txt", path, overwrite=True),
}
ENTRIES: dict[str, Operation] = {
    "delete": lambda fs, path: fs.delete(path, recursive=True),
    "move from": lambda fs, path: fs.move(path, "moved"),
}
LISTS: dict[str, Operation] = {
    "list": lambda fs, path: fs.list(path),
    "glob": lambda fs, path: fs.glob("**/*", path),
}
ALL = READS | WRITES | LOOKS | PLACES | ENTRIES | LISTS


def each(*groups: dict[str, Operation]) -> pytest.MarkDecorator:
    operations = {name: operation for group in groups for name, operation in group.items()}
    return pytest.mark.parametrize("operation", operations.values(), ids=list(operations))


# Paths that say where they go


OUTSIDE = [
    "..",
    "../outside/file.txt",
    "dir/../../outside/file.txt",
    "./dir/.././../outside/sub",
    "/etc/passwd",
    "//etc/passwd",
    "/workspace/../outside/file.txt",
    "/workspacex/file.txt",
    "/proc/self/root/etc/passwd",
    "/proc/self/cwd",
    "/dev/fd/0",
]


@each(ALL)
def test_a_path_that_says_it_leaves_the_root_is_refused(fs: HostFilesystem, operation: Operation):
    for path in OUTSIDE:
        with pytest.raises(PathEscapesRoot):
            operation(fs, path)


def test_the_real_path_of_the_workspace_names_its_files_and_nothing_outside(
    fs: HostFilesystem, root: Path
):
    """Absolute paths are understood below the virtual prefix and the real path of the root only."""
    assert fs.read(f"{root}/file.txt") == fs.read("file.txt")
    (root.parent / "beside.txt").write_text("secret")
    (root.parent / "alias").symlink_to(root)
    for path in (
        f"{root}/../beside.txt",
        f"{root}/dir/../../beside.txt",
        f"{root.parent}/beside.txt",
        f"{root}2/file.txt",
        f"{root.parent}/alias/file.txt",
        f"/..{root}/file.txt",
        f"/workspace{root}/../../beside.txt",
        "/etc/passwd",
    ):
        with pytest.raises(FilesystemError):
            fs.read(path)


@each(ALL)
def test_a_path_that_no_file_can_have_is_refused(fs: HostFilesystem, operation: Operation):
    too_long = "/".join(["d" * 200] * 25)
    for path in ("a\0b", "dir/\0", "\ud800.txt", "dir/\udcff", "x" * 256, too_long):
        with pytest.raises(FilesystemError):
            operation(fs, path)


def test_the_longest_name_works_and_is_rolled_back(fs: HostFilesystem, root: Path):
    before = look(root)
    view = fs.fork_in_place()
    view.write("n" * 255, "x")
    view.write("ü" * 127, "y")
    assert view.read("n" * 255) == "x"
    fs.discard(view)

    assert look(root) == before


def test_a_path_longer_than_the_system_takes_is_refused_or_works_but_never_half(
    fs: HostFilesystem, root: Path
):
    """Within our own limit, but with the workspace's own path in front beyond the system's."""
    path = "/".join(["d" * 199] * 20)
    before = look(root)
    view = fs.fork_in_place()
    try:
        view.write(path, "deep")
    except FilesystemError:
        pass
    else:
        assert view.read(path) == "deep"
    fs.discard(view)

    assert look(root) == before


@pytest.mark.parametrize(
    "name", ["-rf", "a\nb", " ", "…", "*", "$(touch x)", "'", "~", "%s", "{0}"]
)
def test_an_odd_name_is_only_a_name(fs: HostFilesystem, root: Path, name: str):
    fs.write(f"odd/{name}", "x")

    assert os.listdir(root / "odd") == [name]
    assert [entry.path for entry in fs.list("odd")] == [f"odd/{name}"]
    fs.delete(f"odd/{name}")
    assert os.listdir(root / "odd") == []


def test_a_name_that_is_not_unicode_is_left_in_peace(fs: HostFilesystem, root: Path):
    """It cannot be named through the API, and survives everything that goes on around it."""
    place = os.path.join(os.fsencode(root), b"dir", b"\xff\xfe.txt")
    with open(place, "wb") as file:
        file.write(b"not unicode")
    before = look(root)
    fs.list("dir"), fs.glob("**/*"), fs.grep("unicode"), fs.search("txt")
    view = fs.fork_in_place()
    view.delete("dir", recursive=True)
    assert not os.path.exists(place)
    fs.discard(view)
    assert look(root) == before
    view = fs.fork_in_place()
    view.copy("dir", "copied")
    view.move("dir", "moved")
    fs.discard(view)

    assert look(root) == before


def test_names_that_differ_by_case_or_form_are_different_files(fs: HostFilesystem, root: Path):
    names = ["case", "CASE", "Case", "caf\u00e9", "cafe\u0301"]
    for name in names:
        (root / name).write_text(name)
    if len(os.listdir(root)) < len(names) + 2:
        pytest.skip("this filesystem takes names that differ by case for one")
    view = fs.fork_in_place()
    view.write("CASE", "changed")
    view.delete("cafe\u0301")
    assert view.read("case") == "case"
    assert view.read("caf\u00e9") == "caf\u00e9"
    fs.discard(view)

    assert [(root / name).read_text() for name in names] == names


# Symlinks that were there before


@pytest.fixture(
    params=["absolute", "relative", "chain", "climbs from below", "through the filesystem's root"]
)
def out(request: pytest.FixtureRequest, root: Path, outside: Path) -> str:
    """A symlink in the workspace that leads to the directory outside."""
    link = root / "out"
    match request.param:
        case "absolute":
            link.symlink_to(outside)
        case "relative":
            link.symlink_to("../outside")
        case "chain":
            (root / "dir/first").symlink_to("../second")
            (root / "second").symlink_to(outside)
            link.symlink_to("dir/first")
        case "climbs from below":
            (root / "dir/sub/up").symlink_to("../../..")
            link.symlink_to("dir/sub/up/outside")
        case _:
            (root / "slash").symlink_to("/")
            link.symlink_to(f"slash{outside}")
    return "out"


@each(ALL)
def test_a_symlink_on_the_way_that_leads_outside_is_refused(
    fs: HostFilesystem, operation: Operation, out: str
):
    for path in (f"{out}/file.txt", f"{out}/sub/deep.txt", f"{out}/new.txt", f"{out}/a/b/c"):
        with pytest.raises(PathEscapesRoot):
            operation(fs, path)


@each(READS, WRITES, LISTS, {"stat": LOOKS["stat"]})
def test_a_symlink_at_the_end_that_leads_outside_is_refused(
    fs: HostFilesystem, operation: Operation, root: Path, outside: Path, out: str
):
    (root / "file_out").symlink_to(outside / "file.txt")
    (root / "new_out").symlink_to(outside / "not there yet")
    for path in (out, "file_out", "new_out"):
        if operation is LOOKS["stat"]:
            assert fs.stat(path).kind == "link"
            continue
        with pytest.raises(FilesystemError):
            operation(fs, path)


@each(ENTRIES)
def test_deleting_or_moving_a_symlink_that_leads_outside_is_about_the_link(
    fs: HostFilesystem, operation: Operation, root: Path, out: str
):
    target = os.readlink(root / out)
    before = look(root)
    view = fs.fork_in_place()
    operation(view, out)
    assert not os.path.lexists(root / out)
    if (root / "moved").is_symlink():
        assert os.readlink(root / "moved") == target
    fs.discard(view)

    assert look(root) == before


def test_what_is_found_by_looking_around_never_comes_from_outside(
    fs: HostFilesystem, root: Path, outside: Path, out: str
):
    (root / "dir/file_out").symlink_to(outside / "file.txt")

    assert fs.grep("SECRET") == ()
    assert fs.search("tool") == ()
    assert fs.search("file_out") == ()
    assert fs.glob("**/deep.txt") == ("dir/sub/deep.txt",)
    assert fs.glob("out/**") == ()
    assert fs.glob("dir/file_out") == ()


def test_a_copied_directory_keeps_its_symlinks_as_they_are(
    fs: HostFilesystem, root: Path, outside: Path
):
    (root / "dir/out").symlink_to(outside)
    (root / "dir/file_out").symlink_to(outside / "file.txt")
    fs.copy("dir", "copied")

    assert os.readlink(root / "copied/out") == str(outside)
    assert os.readlink(root / "copied/file_out") == str(outside / "file.txt")


@pytest.mark.parametrize(
    "target", ["/proc/self/root", "/proc/self/cwd", "/proc/self/fd", "/dev", "/"]
)
def test_a_magic_link_is_refused(fs: HostFilesystem, root: Path, target: str):
    (root / "magic").symlink_to(target)
    for path in ("magic", "magic/etc/passwd", "magic/0", "magic/fd/0"):
        with pytest.raises(FilesystemError):
            fs.read(path)
        with pytest.raises(FilesystemError):
            fs.write(path, "changed")


def test_a_link_to_an_open_file_of_this_process_is_refused(
    fs: HostFilesystem, root: Path, outside: Path
):
    with (outside / "file.txt").open() as file:
        (root / "magic").symlink_to(f"/proc/self/fd/{file.fileno()}")
        with pytest.raises(FilesystemError):
            fs.read("magic")


@each(ALL)
def test_links_that_go_round_in_a_circle_are_refused(
    fs: HostFilesystem, operation: Operation, root: Path
):
    (root / "loop").symlink_to("loop")
    (root / "ping").symlink_to("pong")
    (root / "pong").symlink_to("ping")
    for path in ("loop/file.txt", "ping/file.txt", "ping/x/y"):
        with pytest.raises(FilesystemError):
            operation(fs, path)


def test_links_that_stay_inside_are_followed(fs: HostFilesystem, root: Path):
    (root / "relative").symlink_to("dir/file.txt")
    (root / "climbing").symlink_to("dir/sub/../../dir")
    (root / "absolute").symlink_to(root / "dir")

    assert fs.read("relative") == "inside\n"
    assert fs.read("climbing/file.txt") == "inside\n"
    assert fs.read("absolute/file.txt") == "inside\n"
    fs.write("climbing/sub/deep.txt", "changed")
    assert (root / "dir/sub/deep.txt").read_text() == "changed"


def test_the_store_cannot_be_reached(fs: HostFilesystem, root: Path, tmp_path: Path):
    fs.write("file.txt", "changed")
    (root / "store").symlink_to(fs.store)

    with pytest.raises(PathEscapesRoot):
        fs.read(f"../{os.path.relpath(fs.store, root.parent)}/lock")
    with pytest.raises(PathEscapesRoot):
        fs.read("store/lock")


@pytest.mark.parametrize("place", [".", "dir", "dir/new", "link"])
def test_a_store_inside_the_workspace_is_refused(root: Path, tmp_path: Path, place: str):
    (tmp_path / "link").symlink_to(root / "dir")
    store = tmp_path / "link/store" if place == "link" else root / place

    before = look(root)
    with pytest.raises((WinkError, ValueError), match="store"):
        HostFilesystem(root, store=store)
    assert look(root) == before


def test_a_workspace_that_is_moved_away_and_replaced_is_still_the_one_that_was_opened(
    fs: HostFilesystem, root: Path, outside: Path, tmp_path: Path
):
    root.rename(tmp_path / "elsewhere")
    root.symlink_to(outside)
    with contextlib.suppress(WinkError):  # to refuse is as good
        fs.write("file.txt", "changed")
        assert fs.read("dir/file.txt") == "inside\n"


# Symlinks that come during an operation


class Swap:
    """Puts a symlink to the outside where a directory was, and puts the directory back."""

    def __init__(self, root: Path, outside: Path) -> None:
        self.directory = root / "dir"
        self.hidden = root.parent / "hidden"
        self.outside = outside
        # As they are before a test counts the calls of them.
        self._rename, self._symlink, self._unlink = os.rename, os.symlink, os.unlink

    def out(self) -> None:
        with contextlib.suppress(OSError):  # the operation may have moved or deleted it
            self._rename(self.directory, self.hidden)
            self._symlink(self.outside, self.directory)

    def back(self) -> None:
        with contextlib.suppress(OSError):
            if self.directory.is_symlink():
                self._unlink(self.directory)
            if self.hidden.exists() and not self.directory.exists():
                self._rename(self.hidden, self.directory)


RACES: dict[str, Operation] = {
    "read": lambda fs, _: fs.read("dir/file.txt"),
    "read deep": lambda fs, _: fs.read("dir/sub/deep.txt"),
    "write over": lambda fs, _: fs.write("dir/file.txt", "changed"),
    "write new": lambda fs, _: fs.write("dir/new.txt", "new"),
    "write deep": lambda fs, _: fs.write("dir/sub/a/b.txt", "new"),
    "append": lambda fs, _: fs.append("dir/sub/deep.txt", "more"),
    "set_readonly": lambda fs, _: fs.set_readonly("dir/sub/tool"),
    "mkdir": lambda fs, _: fs.mkdir("dir/sub/x/y"),
    "delete": lambda fs, _: fs.delete("dir/file.txt"),
    "delete below": lambda fs, _: fs.delete("dir/sub", recursive=True),
    "delete whole": lambda fs, _: fs.delete("dir", recursive=True),
    "move out": lambda fs, _: fs.move("dir/file.txt", "moved"),
    "move in": lambda fs, _: fs.move("file.txt", "dir/moved"),
    "move over": lambda fs, _: fs.move("file.txt", "dir/file.txt", overwrite=True),
    "move below": lambda fs, _: fs.move("dir/sub", "moved"),
    "move whole": lambda fs, _: fs.move("dir", "moved"),
    "copy out": lambda fs, _: fs.copy("dir", "copied"),
    "copy in": lambda fs, _: fs.copy("file.txt", "dir/copied"),
    "list": lambda fs, _: fs.list("dir/sub"),
    "stat": lambda fs, _: fs.stat("dir/sub/tool"),
    "glob": lambda fs, _: fs.glob("**/*"),
    "grep": lambda fs, _: fs.grep("SECRET|inside"),
}


class Interruption:
    """Does something just before the n-th system call from ``start`` on."""

    NAMES = (
        *("chmod", "chown", "fchmod", "fstat", "getxattr", "link", "listdir", "listxattr"),
        *("lstat", "mkdir", "open", "readlink", "remove", "rename", "replace", "rmdir", "scandir"),
        *("setxattr", "stat", "symlink", "unlink", "utime"),
    )

    def __init__(self, patch: pytest.MonkeyPatch, then: Callable[[], None]) -> None:
        self.called: list[str] = []
        self._at: int | None = None
        self._then = then
        for name in self.NAMES:
            original = getattr(os, name, None)
            if original is not None:
                patch.setattr(os, name, self._counted(name, original))
        opener = tree._find_openat2()
        if opener is not None:
            counted = self._counted("openat2", opener)
            patch.setattr(tree, "_find_openat2", lambda: counted)

    def start(self, at: int) -> None:
        self._at = at

    def _counted(self, name: str, original: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            if self._at is not None:
                self.called.append(name)
                if len(self.called) == self._at:
                    self._then()
            return original(*args, **kwargs)

        # A check such as `os.link in os.supports_dir_fd` must come out as before.
        for capable in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks):
            if original in capable:
                capable.add(call)
        return call


def attempt(fs: HostFilesystem, operation: Operation, ending: str) -> object:
    """Do it in a call that is kept or not; a refusal counts as a result, other errors do not."""
    view = fs.fork() if ending == "private" else fs.fork_in_place()
    try:
        result = operation(view, "")
    except FilesystemError as error:
        result = error
    try:
        if ending == "rolled back":
            fs.discard(view)
        else:
            fs.merge(view)
    except (FilesystemError, MergeConflict) as error:
        fs.discard(view)  # as the pipeline does with a call that cannot be committed
        return result, error
    return result


@pytest.fixture(
    params=[
        "rolled back",
        pytest.param("kept", marks=pytest.mark.heavy),
        pytest.param("private", marks=pytest.mark.heavy),
    ]
)
def ending(request: pytest.FixtureRequest) -> str:
    return request.param


def fill(place: Path) -> None:
    (place / "dir/sub").mkdir(parents=True)
    for name in ("file.txt", "dir/file.txt", "dir/sub/deep.txt", "dir/sub/tool"):
        (place / name).write_text("inside\n")


@each(RACES)
def test_a_directory_swapped_for_a_symlink_at_any_instant_is_never_followed(
    way: str,
    tmp_path: Path,
    outside: Path,
    monkeypatch: pytest.MonkeyPatch,
    operation: Operation,
    ending: str,
):
    """The swap comes before the first system call of the operation, then before the second, ..."""
    before = look(outside)
    for instant in range(1, 500, STRIDE):
        base = tmp_path / str(instant)
        fill(base / "work")
        swap = Swap(base / "work", outside)
        with monkeypatch.context() as patch:
            interruption = Interruption(patch, swap.out)
            fs = HostFilesystem(base / "work")
            interruption.start(instant)
            result = attempt(fs, operation, ending)
        called = interruption.called
        assert "SECRET" not in repr(result)
        assert look(outside) == before, f"outside was changed by a swap at {instant}: {called}"
        fs.close()
        swap.back()
        assert not any(SECRET.encode() == path.read_bytes() for path in files(base))
        if len(called) < instant:
            assert instant > 1, "nothing was counted"
            return
    pytest.fail("more than 500 system calls")


def files(base: Path) -> Iterator[Path]:
    """Every regular file of workspace and store; links are not followed."""
    for above, _, names in os.walk(base):
        for name in names:
            path = Path(above, name)
            if stat.S_ISREG(path.lstat().st_mode):
                yield path


@each(RACES)
def test_a_thread_that_swaps_a_directory_for_a_symlink_gets_nothing_out(
    way: str, tmp_path: Path, outside: Path, operation: Operation
):
    fill(tmp_path / "work")
    swap = Swap(tmp_path / "work", outside)
    over = threading.Event()

    def keep_swapping() -> None:
        while not over.is_set():
            swap.out()
            swap.back()

    with HostFilesystem(tmp_path / "work") as fs:
        attacker = threading.Thread(target=keep_swapping)
        attacker.start()
        try:
            for number in range(90 if HEAVY else 30):
                ending = ("kept", "rolled back", "private")[number % 3]
                assert "SECRET" not in repr(attempt(fs, operation, ending))
        finally:
            over.set()
            attacker.join()
    assert not any(SECRET.encode() == path.read_bytes() for path in files(tmp_path / "work"))


def test_a_symlink_planted_before_a_private_view_is_merged_is_not_followed(
    fs: HostFilesystem, root: Path, outside: Path
):
    view = fs.fork()
    view.write("dir/file.txt", "changed")
    view.write("dir/new/new.txt", "new")
    Swap(root, outside).out()
    with pytest.raises((FilesystemError, MergeConflict)):
        fs.merge(view)


def test_a_symlink_planted_before_a_rollback_is_not_followed(
    fs: HostFilesystem, root: Path, outside: Path
):
    view = fs.fork_in_place()
    view.write("dir/file.txt", "changed")
    view.delete("dir/sub", recursive=True)
    Swap(root, outside).out()
    fs.discard(view)


def test_a_symlink_planted_before_going_back_is_not_followed(
    fs: HostFilesystem, root: Path, outside: Path
):
    token = fs.snapshot()
    fs.write("dir/file.txt", "changed")
    fs.delete("dir/sub", recursive=True)
    Swap(root, outside).out()
    fs.restore(token)


# What is neither file nor directory


def make_fifo(place: Path) -> None:
    os.mkfifo(place)


def make_socket(place: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        # By a short name: a socket's path is limited to about 100 bytes.
        above = os.open(place.parent, os.O_RDONLY)
        try:
            server.bind(f"/proc/self/fd/{above}/{place.name}")
        finally:
            os.close(above)


def make_device(place: Path) -> None:
    try:
        os.mknod(place, stat.S_IFCHR | 0o666, os.makedev(1, 5))  # /dev/zero never ends
    except PermissionError:
        pytest.skip("only root can make a device")


@pytest.fixture(params=[make_fifo, make_socket, make_device], ids=["FIFO", "socket", "device"])
def special(request: pytest.FixtureRequest, root: Path) -> str:
    request.param(root / "dir/special")
    return "dir/special"


@each(READS, WRITES, LISTS)
def test_what_is_no_regular_file_is_refused_and_does_not_hang(
    fs: HostFilesystem, special: str, operation: Operation
):
    with pytest.raises(FilesystemError):
        operation(fs, special)


def test_what_is_no_regular_file_is_seen_but_not_read(fs: HostFilesystem, special: str, root: Path):
    assert fs.exists(special)
    assert fs.stat(special).kind == "other"
    assert special in [entry.path for entry in fs.list("dir")]
    assert special not in fs.glob("**/*")
    assert fs.search("special") == ()
    assert {match.path for match in fs.grep("")} == {
        "file.txt",
        "dir/file.txt",
        "dir/sub/deep.txt",
    }


@pytest.mark.parametrize(
    "operation",
    [
        lambda view: view.delete("dir/special"),
        lambda view: view.delete("dir", recursive=True),
        lambda view: view.move("dir/special", "moved"),
        lambda view: view.move("dir", "moved"),
        lambda view: view.move("file.txt", "dir/special", overwrite=True),
        lambda view: view.copy("dir", "copied"),
    ],
    ids=["delete", "delete above", "move", "move above", "move over", "copy above"],
)
def test_what_is_no_regular_file_comes_back_when_a_call_is_rolled_back(
    fs: HostFilesystem, root: Path, special: str, operation: Callable[[HostFilesystem], None]
):
    before = os.lstat(root / special)
    view = fs.fork_in_place()
    with contextlib.suppress(FilesystemError):  # to refuse is as good
        operation(view)
    fs.discard(view)

    after = os.lstat(root / special)
    assert (after.st_mode, after.st_ino, after.st_rdev, after.st_mtime_ns) == (
        before.st_mode,
        before.st_ino,
        before.st_rdev,
        before.st_mtime_ns,
    )


# Hard links: another name of a file outside is no path that leads out


def test_a_rollback_puts_back_a_file_that_has_another_name_outside(
    way: str, root: Path, tmp_path: Path
):
    (tmp_path / "other name").write_text("as it was")
    os.utime(tmp_path / "other name", (1_000_000_000, 1_000_000_000))
    os.link(tmp_path / "other name", root / "linked")
    before = os.stat(tmp_path / "other name")
    with HostFilesystem(root) as fs:
        for change in (
            lambda view: view.write("linked", "changed, and longer than it was"),
            lambda view: view.append("linked", " and more"),
            lambda view: view.delete("linked"),
            lambda view: view.move("file.txt", "linked", overwrite=True),
        ):
            view = fs.fork_in_place()
            change(view)
            fs.discard(view)

            after = os.stat(tmp_path / "other name")
            assert (tmp_path / "other name").read_text() == "as it was"
            assert (after.st_ino, after.st_mtime_ns, after.st_nlink) == (
                before.st_ino,
                before.st_mtime_ns,
                before.st_nlink,
            )
            assert os.path.samefile(root / "linked", tmp_path / "other name")
