"""Branches: private, kept on disk, and unchanged whatever happens to the workspace."""

from __future__ import annotations

import contextlib
import multiprocessing.forkserver
import os
import shutil
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import branch_child
import pytest
from branch_child import processes
from killed_child import Death
from trees import elsewhere, has_xattrs, look, put

from chance import STRIDE
from ordinary_user import OrdinaryUser
from weakincentives.core import locks
from weakincentives.errors import (
    CommandFailed,
    ContentDamaged,
    FilesystemError,
    HistoryDamaged,
    NoSuchBranch,
    ProtectedPath,
    ReadOnlyView,
    SnapshotExpired,
    StoreRefused,
    WorkspaceLocked,
)
from weakincentives.filesystem import (
    Branch,
    Filesystem,
    HostFilesystem,
    Limits,
    branches_of,
    drop_branch,
)
from weakincentives.filesystem.store import location_of
from weakincentives.prompt import MarkdownSection, Prompt, PromptTemplate, Tool, ToolResult
from weakincentives.runtime import Session, ToolCall, execute_tools

pytestmark = pytest.mark.skipif(os.name != "posix", reason="a real directory needs POSIX calls")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "work"
    put(root / "a", "a\n" * 5)
    put(root / "b", "b\n", 0o755)
    put(root / "d/c", "c\n")
    put(root / "one", "one\n")
    put(root / "plain", "plain\n")
    os.link(root / "one", root / "d/two")
    (root / "empty").mkdir()
    (root / "to_a").symlink_to("a")
    return root


@pytest.fixture
def fs(root: Path) -> Iterator[HostFilesystem]:
    with HostFilesystem(root) as opened:
        yield opened


@pytest.fixture
def branch(fs: HostFilesystem) -> Iterator[Branch]:
    with contextlib.closing(fs.branch("b")) as made:
        yield made


def shown(branch: HostFilesystem) -> dict[str, object]:
    """Everything that a branch shows through its API."""
    found: dict[str, object] = {}
    pending = ["."]
    while pending:
        for each in branch.list(pending.pop()):
            if each.kind == "directory":
                pending.append(each.path)
            found[each.path] = branch.read_bytes(each.path) if each.kind == "file" else each.kind
    return found


def again(branch: Branch) -> Branch:
    """The branch as another process would find it."""
    branch.close()
    return Branch.open(branch.root, branch.name)


# Neither sees the other


def test_the_workspace_does_not_change_before_a_merge(root: Path, branch: Branch) -> None:
    before = look(root)
    branch.write("a", "branch")
    branch.delete("d", recursive=True)
    branch.move("b", "new/b")
    branch.run("echo made > made")

    assert look(root) == before


def test_the_branch_keeps_its_base_when_calls_change_the_workspace(
    root: Path, fs: HostFilesystem, branch: Branch
) -> None:
    before = shown(branch)
    fs.write("a", "call")
    assert shown(branch) == before
    fs.delete("d", recursive=True)
    fs.move("b", "d")
    fs.run("rm to_a; mkdir to_a; mv one to_a; rmdir empty; echo > empty")
    assert shown(branch) == before
    fs.undo(*[call.call_id for call in fs.history()[-2:]])
    assert shown(branch) == before
    assert shown(again(branch)) == before


def test_the_branch_keeps_its_base_when_several_calls_move_the_same_file(
    root: Path, fs: HostFilesystem, branch: Branch
) -> None:
    """It looks for the first time when all of them are done."""
    fs.move("a", "e/c")
    fs.write("a", "another")
    fs.move("e", "d", overwrite=True)

    assert branch.read("a") == "a\n" * 5
    assert "another" not in shown(branch).values()
    assert not branch.exists("e")


@pytest.mark.parametrize("deed", ["copy", "move"])
def test_a_file_that_a_call_has_replaced_since_can_be_copied_and_moved_on_the_branch(
    root: Path, fs: HostFilesystem, branch: Branch, deed: str
) -> None:
    """Its content is in the history of the workspace, and may be removed from there."""
    fs.write("a", "call")
    getattr(branch, deed)("a", "copied")
    assert branch.read("copied") == "a\n" * 5
    assert again(branch).read("copied") == "a\n" * 5


@pytest.mark.parametrize(
    "deeds",
    [
        [("copy", "d", "e/f"), ("delete", "e/f")],
        [("write", "e/f", "new"), ("move", "d", "e")],
        [("mkdir", "e"), ("delete", "e")],
        [("copy", "d", "e"), ("write", "e/c", "new"), ("move", "e", "d")],
    ],
)
def test_what_the_branch_itself_made_and_replaced_is_no_conflict(
    root: Path, fs: HostFilesystem, branch: Branch, deeds: list[tuple[str, ...]]
) -> None:
    for name, *arguments in deeds:
        given = {"delete": {"recursive": True}, "move": {"overwrite": True}}.get(name, {})
        getattr(branch, name)(*arguments, **given)
    expected = shown(branch)

    branch.merge_into(fs)

    assert shown(fs) == expected


def test_two_commits_within_one_tick_of_the_clock_do_not_show(
    fs: HostFilesystem, branch: Branch
) -> None:
    fs.write("new", "first")
    assert not branch.exists("new")
    fs.write("a", "second")

    assert branch.read("a") == "a\n" * 5


def test_an_open_branch_keeps_its_base_however_many_calls_there_are(
    fs: HostFilesystem, branch: Branch
) -> None:
    before = shown(branch)
    for number in range(600):
        fs.write("a" if number % 2 else f"n{number % 7}", f"{number}")
        if number % 29 == 0:
            assert branch.read("a") == "a\n" * 5
    assert shown(branch) == before
    branch.write("b", "branch")
    assert branch.merge_into(fs) == ("b",)


def test_the_branch_keeps_its_base_when_another_process_changes_the_workspace(root: Path) -> None:
    program = "import sys; from weakincentives.filesystem import HostFilesystem as Host\n"
    program += "with Host(sys.argv[1]) as fs: fs.write('a', 'x'); fs.delete('b'); fs.move('d', 'e')"
    with contextlib.closing(Branch.create(root)) as branch:
        branch.write("mine", "mine")
        before = shown(branch)
        python(program, root)
        assert shown(branch) == before
        python(program.replace("'d', 'e'", "'e', 'd'").replace("'b'", "'one'"), root)
        assert shown(branch) == before
    assert not (root / "b").exists()


def python(program: str, *arguments: str | Path) -> None:
    """Run a program in another process."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", program, *arguments], env=env, check=True)


def test_a_branch_begins_at_any_earlier_call(root: Path, fs: HostFilesystem) -> None:
    states = [shown(fs)]
    for number in range(4):
        fs.write("a", f"{number}")
        fs.move("d" if number % 2 == 0 else "e", "e" if number % 2 == 0 else "d")
        states += [{}, shown(fs)]
    for number in range(0, 9, 2):
        with contextlib.closing(Branch.create(root, f"b{number}", at=number)) as branch:
            assert shown(branch) == states[number], number
            branch.write("a", "!")
            assert shown(branch) == {**states[number], "a": b"!", "to_a": b"!"}


@pytest.mark.parametrize("count", [1, 1001])
def test_what_a_call_left_is_found_however_many_paths_it_has(
    root: Path, fs: HostFilesystem, count: int
) -> None:
    view = fs.fork()
    view.write("a", "first\n")
    for number in range(count):
        view.write(f"n{number}", "")
    fs.merge(view)
    fs.write("b", "second\n")
    for path in ("a", "b"):
        put(root / path, "a person\n")
        os.utime(root / path, ns=(2 * 10**18, 2 * 10**18))  # later than the calls

    with contextlib.closing(Branch.create(root, at=2)) as branch:
        assert (branch.read("a"), branch.read("b")) == ("first\n", "second\n")


def test_an_edit_within_the_tick_of_the_clock_before_a_branch_shows(
    root: Path, fs: HostFilesystem, branch: Branch
) -> None:
    fs.write("a", "call")
    put(root / "a", "person")
    for _ in range(20):  # the low digits of a time are never the same
        branch.begin_anew()
        now_ns = (fs.store / "tx").stat().st_ctime_ns
        os.utime(root / "a", ns=(now_ns, now_ns))

        assert branch.read("a") == "person"


def test_branches_do_not_see_each_other(fs: HostFilesystem) -> None:
    with contextlib.closing(fs.branch("x")) as one, contextlib.closing(fs.branch("y")) as two:
        one.write("a", "one")
        two.write("a", "two")

        assert (one.read("a"), two.read("a"), fs.read("a")) == ("one", "two", "a\n" * 5)


# What a branch keeps


def test_everything_is_there_again_after_a_restart(
    root: Path, fs: HostFilesystem, branch: Branch
) -> None:
    branch.write("a", "branch")
    branch.write("d/two", "through a hard link")
    branch.move("d", "e")
    branch.copy("e", "f")
    branch.delete("b")
    branch.mkdir("x/y")
    branch.set_readonly("a")
    branch.run("ln -s a link; mkfifo pipe; ln plain name; chmod 751 x; touch -d @1000000 x/y")
    branch.write_bytes("big", os.urandom(3 << 20))
    before, history = shown(branch), branch.history()
    assert before["one"] == b"through a hard link"

    branch = again(branch)

    assert shown(branch) == before
    assert branch.history() == history
    assert branch.is_readonly("a")
    branch.merge_into(fs)
    assert shown(fs) == before
    seen = look(root)
    assert seen["name"].names == {"plain", "name"}
    assert seen["one"].names == {"one", "e/two"}
    assert seen["x"].mode == 0o751
    assert seen["x/y"].modified == 1000000 * 10**9
    assert stat.S_ISFIFO(os.lstat(root / "pipe").st_mode)
    branch.close()


def test_attributes_of_files_arrive_with_a_merge(root: Path, fs: HostFilesystem) -> None:
    if not has_xattrs(root.parent):
        pytest.skip("no extended attributes here")
    os.setxattr(root / "a", "user.note", b"mine")
    branch = fs.branch()
    branch.append("a", "more")
    branch.run(["python3", "-c", "import os; open('n', 'w'); os.setxattr('n', 'user.x', b'y')"])
    branch = again(branch)
    branch.merge_into(fs)
    branch.close()

    seen = look(root)
    assert (seen["a"].xattrs, seen["n"].xattrs) == ((("user.note", b"mine"),), (("user.x", b"y"),))


def test_names_that_are_not_text_survive(root: Path, fs: HostFilesystem) -> None:
    odd = os.fsdecode(b"odd \xff\n name")
    put(root / odd / "x", "x")
    branch = fs.branch()
    branch.run(["sh", "-c", "mv odd* moved; printf new > \"$(printf 'new \\377\\n')\""])
    branch = again(branch)
    branch.merge_into(fs)
    branch.close()

    names = set(os.listdir(os.fsencode(root)))
    assert b"new \xff" in names
    assert (root / "moved/x").read_text() == "x"


def test_each_change_is_in_the_history_of_the_branch_only(
    fs: HostFilesystem, branch: Branch
) -> None:
    branch.write("a", "first")
    branch.write("a", "second")
    assert [call.paths for call in branch.history()] == [("a",), ("a",)]
    assert "+second" in branch.diff("direct_2")
    assert fs.history() == ()
    branch.undo("direct_2")
    assert branch.read("a") == "first"
    branch.undo("undo_3")
    assert branch.read("a") == "second"
    with pytest.raises(FilesystemError, match="newest"):
        branch.undo("direct_1")
    branch.revert_to("direct_1")
    assert again(branch).read("a") == "first"


def test_a_snapshot_of_a_branch_is_restored(branch: Branch) -> None:
    branch.write("a", "first")
    token = branch.snapshot()
    branch.write("a", "second")
    branch.delete("d", recursive=True)
    branch.restore(token)

    assert (branch.read("a"), branch.read("d/c")) == ("first", "c\n")
    with contextlib.suppress(SnapshotExpired):
        branch.restore(token)
    assert branch.read("a") == "first"
    assert again(branch).read("a") == "first"


def test_a_long_history_costs_what_was_done(fs: HostFilesystem) -> None:
    """Not the square of it: what was read is noted once."""
    with contextlib.closing(fs.branch()) as branch:
        sizes: list[int] = []
        for number in range(60):
            branch.read("a")
            branch.write(f"f{number}", "x")
            sizes.append((branch.info.path / "log").stat().st_size)

        first, last = sizes[9] - sizes[4], sizes[59] - sizes[54]
        assert last < first * 1.5


# Names


@pytest.mark.parametrize("name", ["../x", "a/b", ".", "..", "", "A", "x" * 65, "a\n", ".x", "-x"])
def test_odd_names_are_refused(root: Path, fs: HostFilesystem, name: str) -> None:
    if name:
        with pytest.raises(FilesystemError, match="cannot be the name"):
            fs.branch(name)
    with pytest.raises(NoSuchBranch):
        Branch.open(root, name)
    with pytest.raises(NoSuchBranch):
        drop_branch(root, name)


def test_a_name_is_taken_until_the_branch_is_dropped(root: Path, fs: HostFilesystem) -> None:
    branch = fs.branch("x")
    branch.write("a", "kept")
    with pytest.raises(FilesystemError, match="already"):
        fs.branch("x")
    with pytest.raises(WorkspaceLocked):
        drop_branch(root, "x")
    branch.close()
    with pytest.raises(FilesystemError, match="already"):
        fs.branch("x")
    drop_branch(root, "x")

    assert branches_of(root) == ()
    assert os.listdir(fs.store / "branches") == []
    fs.branch("x").close()


def test_branches_are_listed_oldest_first_without_a_lock(root: Path, fs: HostFilesystem) -> None:
    opened = [fs.branch(name, about={"n": name}) for name in ("z", "y", "x")]
    opened[1].write("a", "changed")

    found = branches_of(root)

    assert [each.name for each in found] == ["z", "y", "x"]
    assert [each.about["n"] for each in found] == ["z", "y", "x"]
    assert [each.paths for each in found] == [(), ("a",), ()]
    assert all(each.is_in_use for each in found)
    for each in opened:
        each.close()
    assert not any(each.is_in_use for each in branches_of(root))


def test_one_process_at_a_time_has_a_branch_open(root: Path, branch: Branch) -> None:
    program = (
        "import sys; from weakincentives.filesystem import Branch; Branch.open(sys.argv[1],'b')"
    )
    path = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", program, root],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )

    assert "WorkspaceLocked" in done.stderr
    with pytest.raises(WorkspaceLocked):
        Branch.open(root, "b")


def test_the_base_stays_if_the_history_was_trimmed_while_the_branch_was_made(root: Path) -> None:
    with HostFilesystem(root, history_limit=Limits(count=2)) as fs:
        (fs.store / "branches" / "b").mkdir(parents=True)  # by a process that was killed over it
        for number in range(5):
            fs.write("a", f"{number}")
        with contextlib.closing(fs.branch("b")) as branch:
            for number in range(5):
                fs.write("a", f"later {number}")

            assert branch.read("a") == "4"
            assert again(branch).read("a") == "4"


# Damage


@pytest.mark.parametrize("cut", [1, 20, 200])
def test_a_last_line_that_was_cut_short_is_left_out(root: Path, branch: Branch, cut: int) -> None:
    branch.write("a", "first")
    branch.write("a", "second")
    branch.close()
    log = branch.info.path / "log"
    os.truncate(log, log.stat().st_size - cut)

    with contextlib.closing(Branch.open(root, "b")) as opened:
        assert opened.read("a") == "first"
        opened.write("a", "third")
    with contextlib.closing(Branch.open(root, "b")) as opened:
        assert opened.read("a") == "third"


@pytest.mark.parametrize("damage", ["one byte", "a line gone", "lines exchanged", "no head"])
def test_a_damaged_log_is_refused(root: Path, branch: Branch, damage: str) -> None:
    for text in ("first", "second", "third"):
        branch.write("a", text)
    branch.close()
    log = branch.info.path / "log"
    lines = log.read_bytes().splitlines(keepends=True)
    if damage == "one byte":
        lines[1] = lines[1].replace(b'"write"', b'"wride"')
    elif damage == "a line gone":
        del lines[1]
    elif damage == "lines exchanged":
        lines[1], lines[2] = lines[2], lines[1]
    else:
        del lines[:]
    log.write_bytes(b"".join(lines))

    with pytest.raises(HistoryDamaged, match="log"):
        Branch.open(root, "b")


def test_a_planted_branch_is_refused(root: Path, branch: Branch, tmp_path: Path) -> None:
    branch.write("a", "mine")
    branch.close()
    folder = branch.info.path
    shutil.copytree(folder, folder.with_name("copy"))
    with contextlib.closing(Branch.open(root, "copy")) as copied:  # as good as the first
        assert copied.read("a") == "mine"
    (folder / "root").write_text("planted")
    with pytest.raises(StoreRefused):
        Branch.open(root, "b")
    shutil.rmtree(folder)
    folder.symlink_to(tmp_path)
    with pytest.raises(StoreRefused):
        Branch.open(root, "b")


def test_damaged_content_is_told_and_never_merged(
    root: Path, fs: HostFilesystem, branch: Branch
) -> None:
    branch.write("new", "content")
    for object_file in (branch.info.path / "objects").rglob("*"):
        if object_file.is_file():
            object_file.write_text("damaged")
    before = look(root)

    with pytest.raises(ContentDamaged):
        branch.merge_into(fs)
    assert look(root) == before


# Rules hold on a branch, too


def test_what_no_call_may_change_is_protected_on_a_branch(root: Path, fs: HostFilesystem) -> None:
    put(root / ".git/config", "[core]\n")
    with contextlib.closing(fs.branch()) as branch:
        with pytest.raises(ProtectedPath):
            branch.write(".git/config", "[core]\nhooksPath = x\n")
        with pytest.raises(ProtectedPath):
            branch.run("echo hooksPath = x >> .git/config")
        assert branch.history() == ()


def test_a_read_only_branch_is_not_written(branch: Branch) -> None:
    branch.read_only = "look, do not touch"
    with pytest.raises(ReadOnlyView):
        branch.write("a", "x")
    with pytest.raises(ReadOnlyView):
        branch.run("echo x > a")
    assert branch.run("cat a").stdout == "a\n" * 5


def test_a_command_sees_the_branch_and_its_changes_are_the_branch_s(
    root: Path, fs: HostFilesystem, branch: Branch
) -> None:
    before = look(root)
    branch.write("new", "new\n")
    branch.delete("b")
    fs.write("a", "call")
    result = branch.run("cat a new; ls; rm -r d; echo more >> new")

    assert result.stdout.startswith("a\n" * 5 + "new\n")
    assert "b\n" not in result.stdout
    assert (branch.read("new"), branch.exists("d")) == ("new\nmore\n", False)
    assert look(root)["d/c"] == before["d/c"]
    assert again(branch).read("new") == "new\nmore\n"


def test_a_failed_command_leaves_no_trace(branch: Branch) -> None:
    before = shown(branch)
    with pytest.raises(CommandFailed):
        branch.run("echo x > a; rm -r d; exit 3", check=True)
    assert shown(branch) == before
    assert branch.history() == ()


# Calls


@dataclass(frozen=True)
class Params:
    path: str


def turn(files: Filesystem, reach: Any, paths: list[str]) -> list[bool]:
    """Let concurrent calls of one turn append to files, failing on the path "fail"."""

    async def append(params: Params, *, context: Any) -> ToolResult[None]:
        if reach == "read":
            context.filesystem.read(params.path)
            return ToolResult.ok(None, message="read")
        old = context.filesystem.read(params.path) if context.filesystem.exists(params.path) else ""
        context.filesystem.write(params.path, f"{old}+")
        if params.path == "fail":
            return ToolResult.error("failed")
        return ToolResult.ok(None, message="done")

    tool = Tool[Params, None](
        name="append", description="Add.", handler=append, reach=reach, concurrent=True
    )
    session = Session()
    prompt = Prompt(PromptTemplate(sections=[MarkdownSection(title="Work", tools=[tool])]))
    prompt.bind(resources={Filesystem: files}).render(session)
    calls = [ToolCall("append", {"path": path}, f"call_{n}") for n, path in enumerate(paths)]
    return [result.success for result in execute_tools(calls, session=session)]


@pytest.mark.parametrize("reach", ["reversible", None, "irreversible"])
def test_the_calls_of_a_turn_come_out_as_one_after_the_other(
    root: Path, branch: Branch, reach: str | None
) -> None:
    before = look(root)
    paths = ["x", "x", "y", "fail", "x"]

    assert turn(branch, reach, paths) == [True, True, True, False, True]

    assert (branch.read("x"), branch.read("y")) == ("+++", "+")
    assert not branch.exists("fail")
    assert [call.call_id for call in branch.history()] == ["call_0", "call_1", "call_2", "call_4"]
    assert {call.tool for call in branch.history()} == {"append"}
    assert look(root) == before
    assert again(branch).read("x") == "+++"


def test_calls_that_only_read_are_no_commits(branch: Branch) -> None:
    assert turn(branch, "read", ["a", "a"]) == [True, True]
    assert branch.history() == ()


# A disk without space


def test_a_change_on_a_full_disk_leaves_the_branch_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = tmp_path / "small"
    small.mkdir()
    monkeypatch.setenv("XDG_STATE_HOME", str(small / "state"))
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(small)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only root can mount a filesystem")
    try:
        root = small / "work"
        put(root / "a", "a\n")
        with HostFilesystem(root) as fs, contextlib.closing(fs.branch("b")) as branch:
            branch.write("a", "kept\n")
            with pytest.raises(FilesystemError):
                branch.write_bytes("big", os.urandom(4 << 20))
            filler = small / "filler"
            with contextlib.suppress(OSError):
                filler.write_bytes(bytes(4 << 20))
            with pytest.raises(FilesystemError):
                branch.write("another", "x" * 9000)
            with pytest.raises(FilesystemError):
                branch.merge_into(fs)
            assert fs.read("a") == "a\n"
            filler.unlink()
            assert again(branch).read("a") == "kept\n"
    finally:
        subprocess.run(["umount", "-l", small], check=True)


def test_a_branch_works_with_the_store_on_another_filesystem(root: Path, tmp_path: Path) -> None:
    with elsewhere(tmp_path) as place, HostFilesystem(root, store=place / "store") as fs:
        branch = fs.branch("b")
        branch.move("d", "e")
        branch.run("echo more >> a")
        branch.close()
        with contextlib.closing(Branch.open(root, "b", store=place / "store")) as branch:
            branch.merge_into(fs)
        assert (fs.read("e/c"), fs.read("a")) == ("c\n", "a\n" * 5 + "more\n")


# Kills


@pytest.fixture(scope="module")
def forkserver() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        multiprocessing.forkserver.ensure_running()


def attempt(deed: str, root: Path, death: Death) -> bool:
    """Let a process do something; False if it was killed over it."""
    receiving, sending = processes.Pipe(duplex=False)
    process = processes.Process(target=branch_child.do, args=(deed, root, death, sending))
    process.start()
    sending.close()
    try:
        told = receiving.recv()
    except EOFError:
        told = None
    process.join()
    receiving.close()
    assert told in (None, "done"), told
    return told == "done"


def state(root: Path) -> tuple[object, ...]:
    """All that a deed may change, as the next process finds it."""
    with HostFilesystem(root) as fs:
        assert not fs.recovered
        files, calls = shown(fs), len(fs.history())
    found: list[object] = []
    for info in branches_of(root):
        with contextlib.closing(Branch.open(root, info.name)) as branch:
            found.append((info.name, info.base, len(info.commits), shown(branch)))
    return files, calls, found


def prepare(place: Path) -> Path:
    root = place / "work"
    shutil.rmtree(place, ignore_errors=True)
    shutil.rmtree(location_of(root), ignore_errors=True)
    for path in ("a", "b", "d/c", "one"):
        put(root / path, f"{path}\n")
    os.link(root / "one", root / "d/two")
    with HostFilesystem(root) as fs, contextlib.closing(fs.branch("b")) as branch:
        branch.write("d/c", "branch\n")
        branch.move("b", "moved")
        fs.write("new", "call\n")
    return root


@pytest.mark.parametrize(
    "deed",
    [
        pytest.param(deed, marks=[] if deed in ("create", "a call", "merge") else pytest.mark.heavy)
        for deed in branch_child.DEEDS
    ],
)
def test_a_kill_at_any_instant_leaves_all_or_nothing(
    tmp_path: Path, deed: str, forkserver: None
) -> None:
    before = state(prepare(tmp_path / "p"))
    assert attempt(deed, tmp_path / "p/work", Death())
    after = state(tmp_path / "p/work")
    instants = 0
    for instant in range(1, 1000, STRIDE):
        root = prepare(tmp_path / "p")
        if attempt(deed, root, Death(instant, torn=instant % 2 == 0)):
            break
        instants += 1
        assert state(root) in (before, after), instant
        # And it can be done, or is done already.
        if state(root) == before and deed != "open":
            assert attempt(deed, root, Death())
            assert state(root) == after, instant
    assert instants


def test_a_branch_waits_for_the_process_that_rolls_a_killed_call_back(
    tmp_path: Path, forkserver: None
) -> None:
    root = prepare(tmp_path / "p")
    journal = location_of(root) / "tx/journal"
    with contextlib.closing(Branch.create(root, "other", at=0)) as branch:
        before = shown(branch)
        for instant in range(1, 100):
            assert not attempt("merge", root, Death(instant))
            if journal.exists() and journal.stat().st_size:
                break
        holding = os.open(location_of(root) / "lock", os.O_RDWR)
        locks.take(holding)
        threading.Timer(0.2, os.close, [holding]).start()

        assert shown(branch) == before
    assert journal.stat().st_size == 0


@pytest.mark.heavy
@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="root can be someone else")
def test_it_works_for_any_user(ordinary_user: OrdinaryUser, home: Path) -> None:
    """The tests of this module, once more, as a user that may do nothing special."""
    arguments = ["-q", "-p", "no:cacheprovider", "-p", "no:randomly", f"--basetemp={home}/t"]
    module = str(Path(__file__).relative_to(Path(__file__).parents[2]))
    done = ordinary_user.run("-m", "pytest", *arguments, module, home=home, cwd=ordinary_user.clone)

    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert " passed" in done.stdout


def test_a_branch_has_the_prefix_and_the_rules_of_its_workspace(root: Path) -> None:
    (root / ".git").mkdir()
    (root / ".git/HEAD").write_text("ref: refs/heads/main\n")
    (root / ".git/config").write_text("")
    rules = [".git/config"]
    with (
        HostFilesystem(root, prefix="/project", unprotected=rules) as fs,
        fs.branch("b") as branch,
    ):
        branch.write("/project/.git/config", "changed")
        assert branch.read(".git/config") == "changed"


@pytest.mark.parametrize("went_back", [False, True])
def test_names_of_one_file_that_a_branch_separates_are_two_files_after_the_merge(
    tmp_path: Path, went_back: bool
) -> None:
    root = tmp_path / "w"
    root.mkdir()
    (root / "one").write_text("shared")
    os.link(root / "one", root / "two")
    branch = Branch.create(root, "b")
    if went_back:  # then the merge does not repeat the steps
        branch.write("new", "text")
        branch.undo(branch.history()[-1].call_id)
    branch.delete("two")
    branch.write("two", "its own")
    branch.write("one", "changed")

    with HostFilesystem(root) as fs:
        branch.merge_into(fs)

    branch.close()
    assert (root / "one").read_text() == "changed"
    assert (root / "two").read_text() == "its own"


def test_copied_hard_links_stay_linked_when_a_branch_is_opened_again(tmp_path: Path) -> None:
    root = tmp_path / "w"
    (root / "d").mkdir(parents=True)
    (root / "d/one").write_text("shared")
    os.link(root / "d/one", root / "d/two")
    branch = Branch.create(root, "b")
    branch.copy("d", "e")
    branch.write("e/one", "changed")
    branch.close()

    branch = Branch.open(root, "b")
    shown = [branch.read(path) for path in ("e/one", "e/two", "d/one", "d/two")]
    branch.close()

    assert shown == ["changed", "changed", "shared", "shared"]


@pytest.mark.parametrize("cut", ["tx", "directory.lock", "open"])
def test_a_branch_begins_on_a_store_that_a_kill_has_left_half_made(tmp_path: Path, cut: str):
    root = tmp_path / "work"
    root.mkdir()
    HostFilesystem(root).close()
    store = location_of(root)
    made = ["tx", "directory.lock", "open"]
    for each in made[made.index(cut) :]:
        path = store / each
        path.rmdir() if path.is_dir() else path.unlink()

    with Branch.create(root, "first") as branch:
        branch.write("a.txt", "a")
        assert branch.read("a.txt") == "a"
