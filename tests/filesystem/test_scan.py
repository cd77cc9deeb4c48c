"""Programs that change files themselves: what they did is undone exactly, whatever happens.

An external call is one of a tool with ``writes="external"``; a command where no overlay can be
mounted works the same way.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trees import ON_DISK, elsewhere, has_xattrs, look, put

from ordinary_user import OrdinaryUser
from weakincentives.errors import FilesystemError
from weakincentives.filesystem import HostFilesystem, overlay
from weakincentives.filesystem.scan import Noted
from weakincentives.filesystem.store import location_of

pytestmark = pytest.mark.skipif(os.name != "posix", reason="a real directory needs POSIX calls")

ROOT = hasattr(os, "geteuid") and os.geteuid() == 0


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "work"
    put(root / "a.txt", "a\n")
    put(root / "dir/b.txt", "b\n", 0o640)
    put(root / "dir/sub/c.txt", "c\n")
    put(root / "large.bin", bytes(range(256)) * 4096)
    (root / "link").symlink_to("a.txt")
    os.link(root / "a.txt", root / "twin")
    return root


@contextlib.contextmanager
def external_call(fs: HostFilesystem) -> Iterator[HostFilesystem]:
    """A call in which other programs change files, and that fails."""
    with fs.gate:
        view = fs.fork_in_place()
        view.expect_external()
        yield view
        assert fs.discard(view) == ()


def kept_call(fs: HostFilesystem, script: str) -> str:
    """Run a program in a call that succeeds; returns the call's name in the history."""
    with fs.gate:
        view = fs.fork_in_place()
        view.expect_external()
        shell(fs.root, script)
        fs.merge(view)
    return fs.history()[-1].call_id


def shell(directory: Path, script: str) -> None:
    subprocess.run(["sh", "-ec", script], cwd=directory, check=True)


def size_of(store: Path) -> int:
    """Return the bytes that a directory takes on the disk."""
    return sum(path.lstat().st_blocks * 512 for path in store.rglob("*"))


# The store


def test_failed_calls_leave_nothing_behind(root: Path):
    with HostFilesystem(root, history_limit=1 << 20) as fs:
        with external_call(fs):
            pass
        least = size_of(fs.store)
        for number in range(10):
            with external_call(fs):
                put(root / "new.bin", os.urandom(2 << 20))
                put(root / "large.bin", os.urandom(1 << 20))
                put(root / "dir/b.txt", os.urandom(100_000 + number))
        assert size_of(fs.store) < least + (3 << 20)


def test_what_kept_calls_replaced_counts_for_the_limit_of_the_history(root: Path):
    with HostFilesystem(root, history_limit=4 << 20) as fs:
        for number in range(8):
            kept_call(fs, f"head -c 2000000 /dev/urandom > large.bin; echo {number} > a.txt")
        assert size_of(fs.store / "objects") <= 4 << 20
        assert 1 <= len(fs.history()) < 8


@pytest.mark.heavy
def test_a_file_with_holes_keeps_them_in_the_store_and_when_it_comes_back(root: Path):
    sparse = root / "sparse.img"
    with open(sparse, "wb") as file:
        file.truncate(256 << 20)
        file.seek(100 << 20)
        file.write(b"in the middle")
    before = look(root)
    with HostFilesystem(root) as fs:
        with external_call(fs):
            assert size_of(fs.store) < 16 << 20
            with open(sparse, "r+b") as file:
                file.write(b"over the beginning")
        assert sparse.stat().st_blocks * 512 < 1 << 20
        assert look(root) == before
        with external_call(fs):
            sparse.unlink()
        assert sparse.stat().st_blocks * 512 < 1 << 20
        assert size_of(fs.store) < 16 << 20
    assert look(root) == before


@pytest.mark.parametrize("damage", ["flipped", "cut"])
def test_a_damaged_list_of_what_is_there_is_made_again_before_a_call(root: Path, damage: str):
    with HostFilesystem(root) as fs, external_call(fs):
        pass
    (index,) = (fs.store / "scan").glob("index-*")
    data = bytearray(index.read_bytes())
    if damage == "flipped":
        data[len(data) // 2] ^= 1
    index.write_bytes(data if damage == "flipped" else data[: len(data) // 2])
    before = look(root)
    with HostFilesystem(root) as fs, external_call(fs):
        shell(root, "rm -r dir; echo x > a.txt")
    assert look(root) == before


def test_a_damaged_list_is_never_applied_to_the_directory(root: Path):
    die_in_external_call(root, "rm large.bin; echo changed > dir/b.txt")
    (index,) = (location_of(root) / "scan").glob("index-*")
    data = bytearray(index.read_bytes())
    data[len(data) // 2] ^= 1
    index.write_bytes(data)
    left = look(root)
    with HostFilesystem(root) as fs:
        assert any("damaged" in sentence for sentence in fs.recovered)
        assert look(root) == left
        with external_call(fs):
            shell(root, "rm -r dir")
        assert look(root) == left


def test_a_damaged_content_is_told_and_not_put_back(root: Path):
    with HostFilesystem(root) as fs:
        with fs.gate:
            view = fs.fork_in_place()
            view.expect_external()
            (pack,) = (fs.store / "scan").glob("pack-*")
            data = pack.read_bytes()
            pack.write_bytes(data.replace(b"b\n", b"X\n"))
            shell(root, "echo changed > dir/b.txt; rm dir/sub/c.txt")
            (sentence,) = fs.discard(view)
        assert "dir/b.txt could not be restored (its saved content is damaged)" in sentence
        before = look(root)
        with external_call(fs):
            shell(root, "echo changed > a.txt")
        assert look(root) == before
    HostFilesystem(root).close()
    assert (root / "dir/b.txt").read_text() == "changed\n"
    assert (root / "dir/sub/c.txt").read_text() == "c\n"


@pytest.mark.parametrize("script", ["rm large.bin", "echo changed > large.bin"])
def test_a_large_content_that_lost_its_end_is_told_and_not_put_back(root: Path, script: str):
    with HostFilesystem(root) as fs, fs.gate:
        view = fs.fork_in_place()
        view.expect_external()
        (large,) = (fs.store / "scan").glob("o*")
        os.truncate(large, 100_000)
        shell(root, f"{script}; echo changed > dir/b.txt")
        left = look(root).get("large.bin")
        (sentence,) = fs.discard(view)
    assert "large.bin could not be restored (its saved content is damaged)" in sentence
    assert look(root).get("large.bin") == left
    assert (root / "dir/b.txt").read_text() == "b\n"


def die_in_external_call(root: Path, script: str, store: Path | None = None) -> None:
    program = """
import os, signal, subprocess, sys
from weakincentives.filesystem import HostFilesystem
fs = HostFilesystem(sys.argv[1], store=sys.argv[3])
view = fs.fork_in_place()
view.expect_external()
subprocess.run(["sh", "-ec", sys.argv[2]], cwd=sys.argv[1], check=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, root, script, store or location_of(root)],
        capture_output=True,
    )
    assert done.returncode == -9, done.stderr.decode()


# Faults


def test_an_undo_that_is_interrupted_is_finished_and_takes_nothing_for_a_change(
    root: Path, monkeypatch: pytest.MonkeyPatch
):
    """At each rename, link and removal in turn."""
    before = look(root)
    script = "echo x > a.txt; mv dir elsewhere; echo new > new; rm large.bin; chmod 600 twin"
    for name in ("rename", "unlink", "utime", "ftruncate", "mkdir", "link"):
        for at in range(1, 40):
            with HostFilesystem(root) as fs, fs.gate:
                view = fs.fork_in_place()
                view.expect_external()
                shell(root, script)
                interrupt = Interrupt(getattr(os, name), at)
                with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
                    patch.setattr(os, name, interrupt)
                    fs.discard(view)
                fs.discard(view)
                assert look(root) == before, f"interrupted at {name} {at}"
            if interrupt.left > 0:
                break
            assert look(root) == before


class Interrupt:
    """A function of the system that is interrupted at one of the times it is called."""

    def __init__(self, real: Callable[..., object], at: int) -> None:
        self._real = real
        self.left = at

    def __call__(self, *args: object, **kwargs: object) -> object:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt
        return self._real(*args, **kwargs)


@pytest.fixture
def small() -> Iterator[Path]:
    """A disk of 24 MiB of its own."""
    if not ROOT or not shutil.which("mkfs.ext4"):
        pytest.skip("only root can mount a disk")
    with tempfile.TemporaryDirectory(prefix="wink-test-") as above:
        image, place = Path(above, "image"), Path(above, "disk")
        with open(image, "wb") as file:
            file.truncate(24 << 20)
        subprocess.run(["mkfs.ext4", "-q", "-m0", image], check=True)
        place.mkdir()
        done = subprocess.run(["mount", "-o", "loop", image, place], capture_output=True)
        if done.returncode:
            pytest.skip(f"no disk can be mounted here: {done.stderr.decode().strip()}")
        try:
            yield place
        finally:
            subprocess.run(["umount", "-l", place], check=True)


def plant(root: Path) -> None:
    for number in range(200):
        put(root / f"d{number % 10}/f{number}", os.urandom(3000))
    for number in range(3):
        put(root / f"large{number}", os.urandom(1 << 20))
    put(root / "twice", os.urandom(300_000))
    os.link(root / "twice", root.parent / "outside")


def use_up(place: Path) -> None:
    with contextlib.suppress(OSError), open(place / "filler", "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


@pytest.mark.parametrize(
    "script", ["rm -r work/*", "for f in work/*/* work/l*; do echo > $f; done"]
)
def test_a_call_on_a_disk_that_others_fill_up_is_undone(small: Path, script: str):
    """Also all that was deleted comes back: its space was taken before."""
    root = small / "work"
    plant(root)
    before = look(root)
    with HostFilesystem(root, store=small / "store") as fs:
        with external_call(fs):
            shell(small, script)
            use_up(small)
        assert look(root) == before
        (small / "filler").unlink()
        with external_call(fs):
            shell(small, "rm -r work/*")
        assert look(root) == before


def test_a_killed_call_on_a_full_disk_is_undone(small: Path):
    root = small / "work"
    plant(root)
    before = look(root)
    die_in_external_call(root, "rm -r d* large*; echo x > new", small / "store")
    use_up(small)
    with HostFilesystem(root, store=small / "store"):
        assert look(root) == before


def test_a_call_for_whose_undo_there_is_no_space_is_refused_before_it_begins(small: Path):
    root = small / "work"
    plant(root)
    before = look(root)
    with HostFilesystem(root, store=small / "store") as fs:
        use_up(small)
        view = fs.fork_in_place()
        with pytest.raises((OSError, FilesystemError), match="space"):
            view.expect_external()
        assert fs.discard(view) == ()
        assert look(root) == before
        (small / "filler").unlink()
        with external_call(fs):
            shell(root, "rm -r *")
        assert look(root) == before


def test_a_handler_that_uses_up_all_descriptors_is_undone(root: Path):
    before = look(root)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened: list[int] = []
    with HostFilesystem(root) as fs:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/dev/fd")) + 60, limits[1]))
            with external_call(fs):
                shell(root, "rm -r dir; echo x > a.txt; echo new > new")
                with contextlib.suppress(OSError):
                    while True:
                        opened.append(os.open(os.devnull, os.O_RDONLY))
            assert look_when_possible(opened, limits, root) == before
        finally:
            look_when_possible(opened, limits, root)
        with external_call(fs):
            shell(root, "rm -r dir")
    assert look(root) == before


def look_when_possible(opened: list[int], limits: tuple[int, int], root: Path):
    while opened:
        os.close(opened.pop())
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    return look(root)


def test_what_cannot_even_be_looked_for_is_undone_before_the_next_call(
    root: Path, monkeypatch: pytest.MonkeyPatch
):
    before = look(root)
    with HostFilesystem(root) as fs:
        with fs.gate:
            view = fs.fork_in_place()
            view.expect_external()
            shell(root, "rm -r dir; echo x > a.txt; echo new > new")
            with monkeypatch.context() as patch:
                patch.setattr(os, "scandir", fails)
                (root / "made").mkdir()
                (sentence,) = fs.discard(view)
        assert "retried" in sentence
        with external_call(fs):
            assert look(root) == before
        fs.write("after", "it works")
    (root / "after").unlink()
    assert {k: v for k, v in look(root).items() if k != "."} == {
        k: v for k, v in before.items() if k != "."
    }


def fails(*_: object) -> object:
    raise OSError(24, os.strerror(24))


# Hard links to names elsewhere


@pytest.mark.parametrize(
    "script",
    [
        "echo in place > shared",
        "rm shared",
        "sed -i s/both/neither/ shared",
        "mv shared moved; echo changed > moved",
        "echo in place > shared; rm shared",
        "echo in place > shared; echo another > other; mv other shared",
    ],
)
def test_a_file_with_a_name_outside_is_the_same_file_again(root: Path, script: str):
    put(root / "shared", "both names\n")
    outside = root.parent / "outside"
    os.link(root / "shared", outside)
    before = look(root)
    with HostFilesystem(root) as fs, external_call(fs):
        shell(root, script)
    assert look(root) == before
    assert outside.read_text() == "both names\n"
    assert outside.samefile(root / "shared")


# A store on another filesystem: what a transaction keeps in the workspace can be destroyed there


@pytest.mark.parametrize(
    "harm",
    ["rm -rf .wink-*", "for f in .wink-*/*; do echo gone > $f || rm -r $f; done 2>/dev/null"],
)
@pytest.mark.parametrize("how", ["external", "command"])
def test_a_program_cannot_destroy_what_undoing_takes(
    root: Path, monkeypatch: pytest.MonkeyPatch, harm: str, how: str
):
    monkeypatch.setattr(overlay, "SYSTEM_PATH", "/nowhere")
    before = look(root)
    with elsewhere(root) as place, HostFilesystem(root, store=place / "store") as fs, fs.gate:
        view = fs.fork_in_place()
        view.write("dir/b.txt", "through the API")
        view.write("a.txt", "both names")
        view.delete("dir/sub", recursive=True)
        view.move("large.bin", "moved.bin")
        if how == "external":
            view.expect_external()
            shell(root, harm + "; echo x > dir/b.txt")
        else:
            view.run(["sh", "-c", harm + "; echo x > dir/b.txt"])
        view.write("after", "one more")
        assert fs.discard(view) == ()
        assert look(root) == before


# Whatever programs do

NAMES = (
    "a.txt",
    "twin",
    "dir",
    "dir/b.txt",
    "dir/sub",
    "dir/sub/c.txt",
    "large.bin",
    "new",
    "link",
)
paths = st.sampled_from(NAMES)
mutations = st.one_of(
    st.tuples(st.just("write"), paths, st.binary(max_size=20)),
    st.tuples(st.just("forge"), paths),
    st.tuples(st.just("rename"), paths, paths),
    st.tuples(st.just("chmod"), paths, st.sampled_from([0o600, 0o444, 0o700])),
    st.tuples(st.just("link"), paths, paths),
    st.tuples(st.just("symlink"), paths, paths),
    st.tuples(st.just("xattr"), paths, st.binary(max_size=5)),
    st.tuples(st.just("hole"), paths),
    st.tuples(st.just("remove"), paths),
    st.tuples(st.just("mkdir"), paths),
    st.tuples(st.just("nested"), paths),
    st.tuples(st.just("touch"), paths),
)


def mutate(root: Path, kind: str, name: str, *rest: object) -> None:
    """Change something as a program would; what the system refuses is not done."""
    path = root / name
    with contextlib.suppress(OSError):
        _MUTATIONS[kind](root, path, *rest)


def _forge(_: Path, path: Path) -> None:
    status = path.stat()
    data = bytes(byte ^ 1 for byte in path.read_bytes())
    with open(path, "r+b") as file:
        file.write(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def _hole(_: Path, path: Path) -> None:
    with open(path, "r+b") as file:
        file.truncate(0)
        file.truncate(3 << 20)


def _remove(_: Path, path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _nested(_: Path, path: Path) -> None:
    (path / "x/y/z").mkdir(parents=True)
    (path / "x/file").write_text("deep")


_MUTATIONS: dict[str, Callable[..., object]] = {
    "write": lambda _, path, data: path.write_bytes(data),
    "forge": _forge,
    "rename": lambda root, path, to: path.rename(root / to),
    "chmod": lambda _, path, mode: path.chmod(mode),
    "link": lambda root, path, to: os.link(path, root / to, follow_symlinks=False),
    "symlink": lambda _, path, to: path.symlink_to(to),
    "xattr": lambda _, path, value: os.setxattr(path, "user.x", value),
    "hole": _hole,
    "remove": _remove,
    "mkdir": lambda _, path: path.mkdir(),
    "nested": _nested,
    "touch": lambda _, path: os.utime(path, (1, 1)),
}


@ON_DISK
@given(st.lists(st.lists(mutations, min_size=1, max_size=6), min_size=1, max_size=3))
def test_whatever_programs_did_is_undone_exactly(calls: list[list[tuple[str, ...]]]):
    with tempfile.TemporaryDirectory(prefix="wink-test-") as above:
        root = Path(above, "work")
        put(root / "a.txt", "a\n")
        put(root / "dir/b.txt", "b\n", 0o640)
        put(root / "dir/sub/c.txt", "c\n")
        put(root / "large.bin", bytes(range(256)) * 1100)
        (root / "link").symlink_to("a.txt")
        os.link(root / "a.txt", root / "twin")
        if has_xattrs(Path(above)):
            os.setxattr(root / "dir/b.txt", "user.note", b"keep me")
        before = look(root)
        with HostFilesystem(root) as fs:
            for steps in calls:
                with external_call(fs):
                    for step in steps:
                        mutate(root, *step)
                assert look(root) == before


@pytest.mark.parametrize("mode", ["600", "000"])
def test_what_is_in_a_directory_that_its_owner_cannot_enter_is_undone(
    ordinary_user: OrdinaryUser, home: Path, mode: str
):
    """As after `chmod -R 644 .`; root enters everything."""
    program = """
import sys
from pathlib import Path
from weakincentives.filesystem import HostFilesystem
root = Path(sys.argv[1])
(root / "dir").mkdir(parents=True)
(root / "dir/b.txt").write_text("as it was")
with HostFilesystem(root) as fs, fs.gate:
    view = fs.fork_in_place()
    view.expect_external()
    (root / "dir/b.txt").write_text("changed")
    (root / "dir").chmod(int(sys.argv[2], 8))
    told = fs.discard(view)
print(told, oct((root / "dir").stat().st_mode), (root / "dir/b.txt").read_text())
"""
    done = ordinary_user.run("-c", program, str(home / "work"), mode, home=home)

    assert done.stdout == "() 0o40755 as it was\n", done.stderr


# Taking back a call that was kept


@pytest.fixture
def fs(root: Path) -> Iterator[HostFilesystem]:
    with HostFilesystem(root) as fs:
        yield fs


@pytest.mark.parametrize("force", [False, True])
def test_undo_leaves_what_a_person_put_into_a_directory_that_a_program_made(
    fs: HostFilesystem, root: Path, force: bool
):
    call_id = kept_call(fs, "mkdir -p out/sub; echo x > out/x; echo y > out/sub/y")
    put(root / "out/mine", "a person's")
    told = fs.undo(call_id, force=force)
    assert list((root / "out").rglob("*")) == [root / "out/mine"]
    assert any("out/mine" in sentence for sentence in told)


def test_undo_leaves_a_persons_file_in_a_directory_that_took_the_place_of_a_file(
    fs: HostFilesystem, root: Path
):
    call_id = kept_call(fs, "rm dir/b.txt; mkdir dir/b.txt; echo x > dir/b.txt/x")
    put(root / "dir/b.txt/mine", "a person's")
    told = fs.undo(call_id)
    assert (root / "dir/b.txt/mine").read_text() == "a person's"
    assert not (root / "dir/b.txt/x").exists()
    assert any("dir/b.txt/mine" in sentence for sentence in told)


def test_reverting_leaves_what_a_person_put_into_a_directory_that_a_program_made(
    fs: HostFilesystem, root: Path
):
    fs.write("first", "call")
    first = fs.history()[-1].call_id
    kept_call(fs, "mkdir -p out; echo x > out/x")
    put(root / "out/mine", "a person's")
    told = fs.revert_to(first)
    assert (root / "out/mine").read_text() == "a person's"
    assert not (root / "out/x").exists()
    assert any("out/mine" in sentence for sentence in told)


# What was noted before


def adopted(fs: HostFilesystem, noted: Noted) -> tuple[str, ...]:
    """Commit what has changed since the files were noted; returns the paths."""
    with fs.gate:
        view = fs.fork_in_place()
        view.expect_external(noted)
        changed = view.changed_here()
        fs.merge(view)
    return changed


def test_changes_since_files_were_noted_belong_to_a_call_of_a_later_process(root: Path):
    with HostFilesystem(root) as fs:
        fs.note_files()
    before = look(root)
    shell(root, "echo new > a.txt; rm -r dir; mkdir more; echo m > more/m; rm link")

    with HostFilesystem(root) as fs:
        adopted(fs, Noted())
        fs.undo(fs.history()[-1].call_id)

    assert look(root) == before


def test_of_one_path_only_its_change_belongs_to_the_call(root: Path):
    with HostFilesystem(root) as fs:
        fs.note_files()
    shell(root, "mkdir -p new/er; echo n > new/er/n.txt; echo by someone else > dir/b.txt")

    with HostFilesystem(root) as fs:
        assert adopted(fs, Noted(("new", "er", "n.txt"))) == ("new", "new/er", "new/er/n.txt")
        fs.undo(fs.history()[-1].call_id)

    assert not (root / "new").exists()
    assert (root / "dir/b.txt").read_text() == "by someone else\n"


def test_where_nothing_was_noted_no_file_is_taken_for_new(root: Path):
    with HostFilesystem(root) as fs:
        assert adopted(fs, Noted()) == ()
        assert fs.history() == ()


def test_a_killed_call_that_adopts_changes_is_rolled_back_to_what_was_noted(root: Path):
    with HostFilesystem(root) as fs:
        fs.note_files()
    before = look(root)
    shell(root, "echo new > a.txt; rm dir/b.txt")
    script = (
        "import os, sys\n"
        "from weakincentives.filesystem import HostFilesystem\n"
        "from weakincentives.filesystem.scan import Noted\n"
        "fs = HostFilesystem(sys.argv[1])\n"
        "fs.gate.__enter__()\n"
        "fs.fork_in_place().expect_external(Noted())\n"
        "os._exit(0)\n"
    )
    subprocess.run([sys.executable, "-c", script, str(root)], check=True)

    with HostFilesystem(root) as fs:
        assert fs.recovered == ()

    assert look(root) == before
