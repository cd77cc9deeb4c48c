"""Commands on a real directory, and programs that others start: kept or undone as a whole."""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from trees import Seen, elsewhere, has_xattrs, look, make_repository, put, run_git

from ordinary_user import OrdinaryUser
from waiting import is_readable
from weakincentives.core.state import Seals
from weakincentives.errors import (
    CommandFailed,
    FilesystemError,
    MergeConflict,
    ReadOnlyView,
    ViewClosed,
)
from weakincentives.filesystem import HostFilesystem, commands, overlay
from weakincentives.filesystem.disk import engines
from weakincentives.filesystem.pack import Pack
from weakincentives.filesystem.scan import Manifest
from weakincentives.filesystem.tree import Tree
from weakincentives.testing import FakeClock

pytestmark = [
    pytest.mark.sampled,
    pytest.mark.skipif(os.name != "posix", reason="a real directory needs POSIX calls"),
]

ENGINES = ("overlay", "scan")


def _build(root: Path) -> None:
    put(root / "src" / "app.py", "print( 'hi' )\n")
    put(root / "src" / "lib" / "util.py", "x=1\n")
    put(root / ".env", "SECRET=1\n", 0o600)
    put(root / "node_modules" / "left-pad" / "index.js", "module.exports = 1\n")
    put(root / "data.bin", bytes(range(256)) * 40)
    put(root / "run.sh", "#!/bin/sh\n", 0o755)
    put(root / "one", "linked\n")
    os.link(root / "one", root / "two")
    os.symlink("one", root / "link")
    os.symlink("nowhere", root / "dangling")
    (root / "empty").mkdir()
    os.mkfifo(root / "pipe", 0o640)
    for path in sorted(root.rglob("*"), reverse=True):
        os.utime(path, ns=(1, 1_600_000_000_123_456_789), follow_symlinks=False)
    if has_xattrs(root):
        os.setxattr(root / "data.bin", "user.wink", b"kept")
    os.utime(root, ns=(1, 1_600_000_000_123_456_789))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "work, space:1"
    root.mkdir()
    _build(root)
    return root


@pytest.fixture
def open_fs() -> Iterator[Callable[[Path], HostFilesystem]]:
    """Open filesystems that are closed at the end."""
    opened: list[HostFilesystem] = []

    def open_one(root: Path) -> HostFilesystem:
        opened.append(HostFilesystem(root))
        return opened[-1]

    yield open_one
    for fs in opened:
        fs.close()


@pytest.fixture(params=ENGINES)
def fs(
    request: pytest.FixtureRequest,
    root: Path,
    open_fs: Callable[[Path], HostFilesystem],
    monkeypatch: pytest.MonkeyPatch,
) -> HostFilesystem:
    """A filesystem whose commands run over an overlay, and one that has to look for changes."""
    if request.param == "scan":
        _without_overlays(monkeypatch)
    fs = open_fs(root)
    if request.param == "overlay":
        _needs_overlays(fs)
    return fs


@pytest.fixture
def over(root: Path, open_fs: Callable[[Path], HostFilesystem]) -> HostFilesystem:
    """A filesystem whose commands run over an overlay."""
    fs = open_fs(root)
    _needs_overlays(fs)
    return fs


def _without_overlays(monkeypatch: pytest.MonkeyPatch) -> None:
    # As on a system where the programs that mount an overlay are not installed.
    monkeypatch.setattr(overlay, "SYSTEM_PATH", "/nowhere")


def _needs_overlays(fs: HostFilesystem) -> None:
    way = overlay.find_way(fs.root, fs.store)
    if isinstance(way, str):
        pytest.skip(way)


def _without_times_of_directories(seen: dict[str, Seen]) -> dict[str, Seen]:
    return {
        path: one._replace(modified=0) if one.kind == "directory" else one
        for path, one in seen.items()
    }


# The files with several names are changed as such only by these.
SEVERAL_NAMES = ("in place", "link again", "relink", "unlink", "part", "anew")

# Each leaves every time that it sets at a fixed value, so that two runs give the same.
SCRIPTS = {
    "write": "printf new > fresh; printf more >> src/app.py; touch -d @1000 fresh src/app.py",
    "formatter": "sed -i 's/( /(/; s/ )/)/' src/app.py; touch -d @1000 src/app.py",
    "move": "mv src/lib lib; mv data.bin src/moved.bin; mv run.sh .env",
    "link": "ln data.bin third; ln -s src here; touch -h -d @1000 here third",
    "in place": "printf again >> two; touch -d @1000 one",
    "link again": "ln one three; rm two",
    "relink": "rm one; ln two one; rm link; ln -s two link; touch -h -d @1000 link",
    "remove": "rm -rf node_modules empty dangling pipe",
    "unlink": "rm one",
    "part": "printf other > x; mv x two; printf more >> one; touch -d @1000 one two",
    "anew": "rm one two; printf other > one; touch -d @1000 one",
    "again": "rm -rf src; mkdir src; printf y > src/y; touch -d @1000 src/y",
    "kinds": "rm data.bin; mkdir -p data.bin/in; rm -rf src; printf f > src; touch -d @1000 src",
    "pipes": "mkfifo -m 600 other; rm pipe; mkdir pipe; touch -d @1000 other",
    "modes": "chmod 700 src; chmod 400 data.bin; chmod u-w,g+w run.sh",
    "times": "touch -d '2001-02-03 04:05:06.789' data.bin src; touch -h -d @5 link",
    "deep": "mkdir -p a/b/c; printf 1 > a/b/c/d; chmod 500 a/b/c; chmod 711 a; touch -d @9 a/b/c/d",
    "names": "printf 1 > 'with space'; printf 2 > 'líne\nbreak'; touch -d @9 with* l*ne*",
    "temporary": "printf x > t; rm t; mkdir u; rmdir u",
    "python": f"""{shlex.quote(sys.executable)} - <<'END'
import os
open('made.txt', 'w').write('by python')
os.utime('made.txt', (7, 7))
os.truncate('data.bin', 10)
os.utime('data.bin', (8, 8))
os.rename('src/app.py', 'src/main.py')
END""",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_command_that_is_kept_leaves_what_a_plain_run_leaves(
    fs: HostFilesystem, root: Path, tmp_path: Path, name: str
):
    if name in SEVERAL_NAMES and os.geteuid() and fs.run("true").engine == "overlay":
        pytest.skip("without root, an overlay cannot tell which names are one file")
    plain = tmp_path / "plain"
    plain.mkdir()
    _build(plain)
    subprocess.run(["sh", "-ec", SCRIPTS[name]], cwd=plain, check=True)

    with fs.gate:
        view = fs.fork_in_place()
        result = view.run(["sh", "-ec", SCRIPTS[name]])
        fs.merge(view)

    assert (result.returncode, result.stderr, result.kept) == (0, "", True)
    assert _without_times_of_directories(look(root)) == _without_times_of_directories(look(plain))


@pytest.mark.parametrize("name", [*SEVERAL_NAMES, "link", "move", "again"])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_command_leaves_the_same_with_the_store_on_another_filesystem(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str, name: str
):
    """Kept or rolled back, also what was written before it, and what it links stays linked."""
    if engine == "scan":
        _without_overlays(monkeypatch)
    plain = tmp_path / "plain"
    plain.mkdir()
    _build(plain)
    put(plain / "one", "written\n")
    os.utime(plain / "one", (7, 7))
    subprocess.run(["sh", "-ec", SCRIPTS[name]], cwd=plain, check=True)
    before = look(root)
    with elsewhere(tmp_path) as place, HostFilesystem(root, store=place / "store") as fs, fs.gate:
        if engine == "overlay":
            _needs_overlays(fs)
            if os.geteuid():
                pytest.skip("without root, an overlay cannot tell which names are one file")
        for end in (fs.discard, fs.merge):
            view = fs.fork_in_place()
            view.write("one", "written\n")
            os.utime(root / "one", (7, 7))
            assert view.run(["sh", "-ec", SCRIPTS[name]]).engine == engine
            assert not end(view)
            assert end is not fs.discard or look(root) == before

    assert _without_times_of_directories(look(root)) == _without_times_of_directories(look(plain))


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_command_that_is_rolled_back_leaves_no_trace(fs: HostFilesystem, root: Path, name: str):
    before = look(root)
    with fs.gate:
        view = fs.fork_in_place()
        assert view.run(["sh", "-ec", SCRIPTS[name]]).ok

        assert fs.discard(view) == ()

    assert look(root) == before
    assert fs.history() == ()


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_committed_command_can_be_reverted(fs: HostFilesystem, root: Path, name: str):
    fs.write("start", "here")
    before = look(root)
    fs.run(["sh", "-c", SCRIPTS[name]])

    assert fs.revert_to(fs.history()[0].call_id) == ()

    assert look(root) == before


def test_a_command_sees_and_changes_what_the_call_has_written(fs: HostFilesystem, root: Path):
    """A file written through the API, then rewritten by a formatter, is rolled back exactly."""
    before = look(root)
    with fs.gate:
        view = fs.fork_in_place()
        view.write("src/app.py", "print( 'new' )\n")
        view.write("src/more.py", "print( 'more' )\n")
        view.delete("src/lib", recursive=True)
        result = view.run("cat src/app.py; ls src; sed -i 's/( /(/; s/ )/)/' src/*.py")

        assert result.stdout == "print( 'new' )\napp.py\nmore.py\n"
        assert view.read("src/app.py") == "print('new')\n"
        assert view.read("src/more.py") == "print('more')\n"
        fs.discard(view)

    assert look(root) == before


def test_a_savepoint_takes_back_only_what_came_after(fs: HostFilesystem, root: Path):
    with fs.gate:
        view = fs.fork_in_place()
        view.run("printf 1 > first")
        between = look(root)
        inner = view.fork_in_place()
        inner.run("printf 2 > second; rm first; rm -r src")
        view.discard(inner)
        assert look(root) == between
        token = view.snapshot()
        view.run("printf 3 > third; mv src gone")
        view.restore(token)
        assert look(root) == between
        fs.merge(view)

    assert look(root) == between


def test_a_users_repository_and_its_staged_changes_are_left_as_they_are(
    tmp_path: Path, open_fs: Callable[[Path], HostFilesystem]
):
    root = tmp_path / "workspace"
    make_repository(root)
    _build(root)
    fs = open_fs(root)
    staged = run_git(root, "diff", "--cached")
    before = look(root)
    with fs.gate:
        view = fs.fork_in_place()
        view.run("rm -rf node_modules .env src; printf x > tracked.py; mkdir -p new/empty")
        fs.discard(view)

    assert "staged" in staged
    assert look(root) == before
    assert run_git(root, "diff", "--cached") == staged


def test_outside_of_calls_a_command_is_committed_by_itself(fs: HostFilesystem, root: Path):
    result = fs.run("printf x > made; exit 3")

    assert (result.returncode, result.ok, result.kept) == (3, False, True)
    assert (root / "made").read_text() == "x"
    assert [committed.paths for committed in fs.history()] == [("made",)]


def test_a_command_that_changes_nothing_leaves_no_history(fs: HostFilesystem, root: Path):
    before = look(root)

    fs.run(["sh", "-c", "cat src/app.py; : >> data.bin; chmod 755 run.sh"])

    assert look(root) == before
    assert fs.history() == ()


def test_arguments_environment_input_and_directory_reach_the_command(fs: HostFilesystem):
    script = 'printf "%s|" "$@"; printf "%s|" "$A" "$HOME"; cat; pwd'
    env = {"PATH": os.environ["PATH"], "A": "a b", "odd.name": "1"}
    result = fs.run(["sh", "-c", script, "-", "x y", "*"], env=env, stdin="in\n", cwd="src/lib")

    assert result.stdout == f"x y|*|a b||in\n{fs.root}/src/lib\n"
    assert "odd.name=1\n" in fs.run(["env"], env=env).stdout
    assert fs.run("cat", cwd="/workspace/src").stdout == ""


def test_the_environment_is_this_processs_own_by_default(
    fs: HostFilesystem, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("WINK_TEST", "inherited")

    assert fs.run(["sh", "-c", "echo $WINK_TEST"]).stdout == "inherited\n"


def test_names_of_shell_builtins_are_programs(fs: HostFilesystem):
    assert fs.run(["echo", "exit", "3"]).stdout == "exit 3\n"
    assert fs.run(["false"]).returncode == 1


def test_a_program_that_is_not_there_is_reported_as_by_a_shell(fs: HostFilesystem):
    result = fs.run(["no-such-program"], env={"PATH": "/usr/bin:/bin"})

    assert result.returncode == 127
    assert "no-such-program" in result.stderr


@pytest.mark.parametrize(
    ("argv", "cwd"),
    [([], "."), ([""], "."), (["a\0b"], "."), (["true"], "nowhere"), (["true"], "one")],
)
def test_what_cannot_be_run_is_refused(fs: HostFilesystem, argv: list[str], cwd: str):
    with pytest.raises(FilesystemError):
        fs.run(argv, cwd=cwd)


def test_output_that_is_too_long_loses_its_middle(fs: HostFilesystem):
    result = fs.run("printf start; head -c 300000 /dev/zero | tr '\\0' x; printf end; printf e >&2",
                    output_limit=1000)  # fmt: skip

    assert result.stdout_truncated
    assert not result.stderr_truncated
    assert result.stdout.startswith("startx")
    assert result.stdout.endswith("xend")
    assert "299008 bytes left out" in result.stdout
    assert result.stderr == "e"


def test_output_that_is_not_text_is_still_shown(fs: HostFilesystem):
    assert fs.run(["printf", r"a\377b"]).stdout == "a\N{REPLACEMENT CHARACTER}b"


def test_a_timeout_throws_away_what_the_command_changed(
    fs: HostFilesystem, root: Path, monkeypatch: pytest.MonkeyPatch
):
    before = look(root)
    started, clock = root.parent / "started", FakeClock()
    monkeypatch.setattr(commands, "SYSTEM_CLOCK", clock)

    def let_time_pass(_: object) -> None:
        if started.exists():
            clock.advance(1)

    script = f"printf half > fresh; rm -r src; echo said; : > '{started}'; sleep 600"
    result = fs.run(script, timeout=0.5, watch=let_time_pass)

    assert (result.timed_out, result.kept, result.returncode) == (True, False, 137)
    assert result.stdout == "said\n"
    assert look(root) == before
    assert fs.history() == ()


def test_a_killed_command_throws_away_what_it_changed(fs: HostFilesystem, root: Path):
    before = look(root)

    result = fs.run(["sh", "-c", "printf half > fresh; kill -KILL $$"])

    assert (result.timed_out, result.kept, result.returncode) == (False, False, 137)
    assert look(root) == before


def test_a_command_that_had_to_succeed_leaves_nothing_when_it_fails(fs: HostFilesystem, root: Path):
    before = look(root)

    with pytest.raises(CommandFailed, match=r"(?s)ended with 3.*wrong") as failed:
        fs.run("printf half > fresh; echo wrong >&2; exit 3", check=True)

    assert failed.value.result.stderr == "wrong\n"
    assert look(root) == before
    assert fs.run("printf whole > fresh", check=True).ok


def test_processes_left_behind_are_killed(fs: HostFilesystem, root: Path, tmp_path: Path):
    """They hold its output open, and write on; neither holds up nor outlives the command."""
    alive = tmp_path / "alive"
    os.mkfifo(alive)
    reading = os.open(alive, os.O_RDONLY | os.O_NONBLOCK)
    script = f'exec 3>"{alive}"; (while :; do date > late; sleep 0.01; done) & echo started'
    try:
        result = fs.run(script)
        # The pipe ends when nobody can write to it any more.
        os.set_blocking(reading, True)
        assert os.read(reading, 1) == b""
    finally:
        os.close(reading)

    assert result.stdout == "started\n"
    after = look(root)
    assert fs.run("true").ok
    assert look(root) == after


def test_an_interrupt_kills_the_command_and_undoes_it(fs: HostFilesystem, root: Path):
    before = look(root)
    started = fs.root.parent / "started"
    script = f"printf half > fresh; : > '{started}'; sleep 600"

    def interrupt() -> None:
        while not started.exists():
            pass
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        fs.run(script)
    thread.join()

    assert look(root) == before
    assert fs.run("true").ok


def test_sealing_the_view_ends_the_command(fs: HostFilesystem, root: Path):
    """A call that timed out is over at once; what its command was doing is thrown away."""
    before = look(root)
    started = fs.root.parent / "started"
    with fs.gate:
        view = fs.fork_in_place()

        def seal() -> None:
            while not started.exists():
                pass
            view.seal("the call has ended")

        thread = threading.Thread(target=seal)
        thread.start()
        with pytest.raises(ViewClosed, match="the call has ended"):
            view.run(f"printf half > fresh; : > '{started}'; sleep 600")
        thread.join()
        fs.discard(view)

    assert look(root) == before


@pytest.mark.parametrize("nested", [False, True])
def test_what_a_command_does_that_was_given_up_is_undone_when_the_view_is_discarded(
    fs: HostFilesystem, root: Path, nested: bool
):
    """It is in the middle of its work, in the thread of a handler that nobody waits for."""
    before = look(root)
    started = fs.root.parent / "started"
    script = f"i=0; while :; do i=$((i+1)); echo x > new$i; : > '{started}'; done"
    refused = threading.Event()
    with fs.gate:
        view = fs.fork_in_place()
        inner = view.fork_in_place() if nested else view

        def run() -> None:
            with pytest.raises(ViewClosed):
                inner.run(script)
            refused.set()

        thread = threading.Thread(target=run)
        thread.start()
        while not started.exists():
            pass
        assert fs.discard(view) == ()
        assert look(root) == before
    thread.join()

    assert refused.is_set()
    assert look(root) == before
    assert fs.run("true").ok


# Views


def test_a_private_views_command_sees_its_changes_and_nobody_elses(
    over: HostFilesystem, root: Path
):
    before = look(root)
    view = over.fork()
    view.write("src/app.py", "mine\n")
    view.write("new/deep/file", "new\n")
    view.delete("node_modules", recursive=True)
    view.move("src/lib", "lib")
    over.write("later", "not seen by the view")

    result = view.run("cat src/app.py new/deep/file lib/util.py; ls; printf x > made; rm -r new")

    assert result.stdout.startswith("mine\nnew\nx=1\n")
    names = result.stdout.split()[3:]
    assert "node_modules" not in names
    assert "later" not in names
    assert view.read("made") == "x"
    assert not view.exists("new")
    over.delete("later")
    assert _without_times_of_directories(look(root)) == _without_times_of_directories(before)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_private_views_command_is_merged_as_if_it_had_run_in_place(
    over: HostFilesystem, root: Path, tmp_path: Path, name: str
):
    if name in SEVERAL_NAMES and os.geteuid():
        pytest.skip("without root, an overlay cannot tell which names are one file")
    plain = tmp_path / "plain"
    plain.mkdir()
    _build(plain)
    subprocess.run(["sh", "-ec", SCRIPTS[name]], cwd=plain, check=True)
    before = look(root)
    view = over.fork()

    assert view.run(["sh", "-ec", SCRIPTS[name]]).ok
    assert look(root) == before
    over.merge(view)
    del view

    assert _without_times_of_directories(look(root)) == _without_times_of_directories(look(plain))


def test_commands_of_two_private_views_run_at_the_same_time(over: HostFilesystem, root: Path):
    """Each waits for a file that the other's command makes outside: neither waits its turn."""
    one, two = over.fork(), over.fork()
    outside = root.parent
    results: dict[str, str] = {}

    def run(view: HostFilesystem, mine: str, other: str) -> None:
        wait = f": > '{outside}/{mine}'; while [ ! -e '{outside}/{other}' ]; do :; done"
        results[mine] = view.run(f"printf {mine} > made; {wait}; cat made", timeout=600).stdout

    threads = [
        threading.Thread(target=run, args=(one, "first", "second")),
        threading.Thread(target=run, args=(two, "second", "first")),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert results == {"first": "first", "second": "second"}
    assert not (root / "made").exists()
    over.merge(one)
    with pytest.raises(MergeConflict):
        over.merge(two)  # nobody knows what its command has read
    assert (root / "made").read_text() == "first"


def test_the_directory_does_not_change_under_a_command(over: HostFilesystem, root: Path):
    """What is committed meanwhile waits for the command of a private view."""
    view = over.fork()
    outside = root.parent
    script = f": > '{outside}/started'; while [ ! -e '{outside}/go' ]; do :; done; cat one"
    results: list[str] = []
    running = threading.Thread(target=lambda: results.append(view.run(script, timeout=600).stdout))
    running.start()
    while not (outside / "started").exists():
        pass
    writing = threading.Thread(target=over.write, args=("one", "committed\n"))
    writing.start()
    (outside / "go").touch()
    running.join()
    writing.join()

    assert results == ["linked\n"]
    assert (root / "one").read_text() == "committed\n"


def test_a_private_view_without_overlays_is_refused(
    root: Path, open_fs: Callable[[Path], HostFilesystem], monkeypatch: pytest.MonkeyPatch
):
    _without_overlays(monkeypatch)
    view = open_fs(root).fork()

    with pytest.raises(FilesystemError, match="needs an overlay"):
        view.run("true")


def test_a_call_that_may_only_read_can_run_what_changes_nothing(over: HostFilesystem, root: Path):
    before = look(root)
    with over.gate:
        view = over.fork_in_place()
        view.read_only = "this tool only reads"

        assert view.run(["cat", "one"]).stdout == "linked\n"
        with pytest.raises(ReadOnlyView, match="only reads"):
            view.run("printf x > one")
        over.discard(view)

    assert look(root) == before


# Engines


def test_what_is_used_and_why_can_be_asked(
    root: Path,
    open_fs: Callable[[Path], HostFilesystem],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    _without_overlays(monkeypatch)
    fs = open_fs(root)
    with caplog.at_level(logging.WARNING, "weakincentives.filesystem"):
        results = [fs.run("true"), fs.run("true")]

    (use,) = [use for use in engines(fs) if use.writes == "command"]
    assert use.engine == "scan"
    assert "unshare" in use.reason
    assert {result.engine for result in results} == {"scan"}
    assert {result.engine_reason for result in results} == {use.reason}
    assert sum("without an overlay" in record.message for record in caplog.records) == 1


def test_over_an_overlay_there_is_no_reason_to_give(over: HostFilesystem):
    result = over.run("true")

    assert (result.engine, result.engine_reason) == ("overlay", None)
    assert [use.engine for use in engines(over)] == ["journal", "overlay", "scan"]


def test_over_an_overlay_nothing_changes_for_this_process(over: HostFilesystem, root: Path):
    """Its mounts, its working directory and what it sees of the files are its own."""
    started, go = over.root.parent / "started", over.root.parent / "go"
    script = f"printf x > fresh; : > '{started}'; until [ -e '{go}' ]; do sleep 0.01; done"

    def around() -> tuple[object, ...]:
        # Other programs of this machine may mount something meanwhile, but not here.
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
        return os.getcwd(), [line for line in mounts if over.root.parent.name in line], look(root)

    before = around()
    thread = threading.Thread(target=over.run, args=(script,))
    thread.start()
    try:
        while not started.exists():
            pass
        during = around()
    finally:
        go.touch()
        thread.join()

    assert during == before
    assert over.read("fresh") == "x"


def test_nothing_is_left_of_a_command_once_the_filesystem_is_closed(over: HostFilesystem):
    for _ in range(3):
        over.run("printf x > fresh; mkdir -p a/b")
    over.close()

    assert list((over.store / "open").iterdir()) == []


def test_a_command_that_is_killed_while_it_starts_is_killed_nonetheless(tmp_path: Path):
    workspace, store = tmp_path / "work", tmp_path / "store"
    workspace.mkdir()
    store.mkdir()
    way = overlay.find_way(workspace, store)
    if isinstance(way, str):
        pytest.skip(way)
    for attempt in range(30):
        layers = overlay.Overlay(store / str(attempt), workspace, way)
        layers.prepare(b"")
        process = layers.start(["sleep", "1000"], directory=workspace)
        process.kill()
        try:
            process.popen.wait(timeout=300)
        finally:
            process.end()


@pytest.mark.parametrize("what", ["comes", "goes"])
def test_a_directory_that_somebody_is_at_work_in_is_removed_all_the_same(
    tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
):
    """As a command is whose caller was killed, until it is killed itself."""
    place = tmp_path / "place"
    (place / "inner").mkdir(parents=True)
    for name in ("one", "two"):
        (place / "inner" / name).touch()
    moments = iter([True])
    name = "rmdir" if what == "comes" else "unlink"
    remove = getattr(os, name)

    def remove_meanwhile(*args: Any, **kwargs: Any) -> None:
        if next(moments, False):
            if what == "comes":
                (place / "inner" / "three").touch()
            else:
                remove(*args, **kwargs)
        remove(*args, **kwargs)

    monkeypatch.setattr(os, name, remove_meanwhile)
    overlay.remove_tree(place)

    assert next(moments, None) is None
    assert not place.exists()


@pytest.mark.parametrize("delay", [0.0, 0.02, 0.04, 0.08])
def test_a_filesystem_can_be_closed_while_a_command_that_was_given_up_ends(
    over: HostFilesystem, delay: float
):
    ended = threading.Event()

    def give_up_soon() -> None:
        with contextlib.suppress(FilesystemError, OSError):
            over.run("sleep 100", watch=lambda _: "given up")
        ended.set()

    thread = threading.Thread(target=give_up_soon)
    thread.start()
    ended.wait(delay)
    over.close()
    thread.join()

    assert not list((over.store / "open").glob("*/commands/*"))


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="root mounts")
def test_a_filesystem_mounted_inside_is_not_hidden(over: HostFilesystem, root: Path):
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", root / "empty"], check=True)
    try:
        (root / "empty" / "inside").write_text("seen")
        result = over.run("cat empty/inside; printf x > empty/made")

        assert result.stdout == "seen"
        assert result.engine == "scan"
        assert "mounted inside" in (result.engine_reason or "")
    finally:
        subprocess.run(["umount", root / "empty"], check=True)


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="root makes devices")
def test_a_device_is_refused_and_nothing_is_kept(over: HostFilesystem, root: Path):
    before = look(root)

    with pytest.raises(FilesystemError, match="a device at dev"):
        over.run("printf x > fresh; mknod dev c 1 3")

    assert look(root) == before


# Other programs


@pytest.mark.parametrize("name", SCRIPTS)
def test_what_another_program_changed_is_undone_with_the_call(
    over: HostFilesystem, root: Path, name: str
):
    before = look(root)
    with over.gate:
        view = over.fork_in_place()
        view.write("mine", "through the API")
        view.expect_external()
        subprocess.run(["sh", "-ec", SCRIPTS[name]], cwd=root, check=True)
        view.write("mine", "again")
        subprocess.run(["sh", "-c", "printf more >> mine; mkdir -p deep/er"], cwd=root, check=True)
        view.move("deep", "deeper")

        assert over.discard(view) == ()

    assert look(root) == before


def test_what_another_program_changed_is_in_the_history(over: HostFilesystem, root: Path):
    over.write("start", "here")
    before = look(root)
    with over.gate:
        view = over.fork_in_place()
        view.expect_external()
        subprocess.run(["sh", "-c", "printf x > made; rm -r src"], cwd=root, check=True)
        over.merge(view)
    after = look(root)

    (_, committed) = over.history()
    assert {"made", "src"} <= set(committed.paths)
    assert "+x" in over.diff(committed.call_id)
    assert over.revert_to(over.history()[0].call_id) == ()
    assert look(root) == before
    assert over.revert_to(committed.call_id) == ()
    assert _without_times_of_directories(look(root)) == _without_times_of_directories(after)


def test_only_a_call_that_works_in_place_can_start_programs_of_its_own(over: HostFilesystem):
    for fs in (over, over.fork()):
        with pytest.raises(ValueError, match="in place"):
            fs.expect_external()


@pytest.mark.parametrize("watch", [True, False])
def test_a_manifest_finds_what_changed_and_nothing_else(root: Path, tmp_path: Path, watch: bool):
    tree = Tree(root)
    manifest = Manifest(Pack(tmp_path / "scan", Seals("test")), watch=watch)
    manifest.refresh(tree)
    assert manifest.changes(tree) == []

    # The same size and time, through another name, by a rename, and in a directory that is new.
    script = (
        "printf LINKED > two; touch -d @1600000000.123456789 two; mv src moved; mkdir n; : > n/x"
    )
    subprocess.run(["sh", "-ec", script], cwd=root, check=True)
    found = {"/".join(one.path): one.before for one in manifest.changes(tree)}

    assert found.keys() == {
        "", "one", "two", "src", "src/app.py", "src/lib", "src/lib/util.py",
        "moved", "moved/app.py", "moved/lib", "moved/lib/util.py", "n", "n/x",
    }  # fmt: skip
    assert found["moved"] is None
    assert found["one"] is not None
    assert found["one"].size == len(b"linked\n")
    manifest.refresh(tree)
    assert manifest.changes(tree) == []
    manifest.close()

    again = Manifest(Pack(tmp_path / "scan", Seals("test")), watch=watch)
    assert again.changes(tree) == []
    again.close()
    tree.close()


# Killed

KILLED = """
import os, sys, subprocess
from weakincentives.filesystem import HostFilesystem, overlay
how, root, started = sys.argv[1:]
if how == "scan":
    overlay.SYSTEM_PATH = "/nowhere"
fs = HostFilesystem(root)
view = fs.fork_in_place()
view.write("mine", "half")
script = "printf half > fresh; rm -r src; mv one uno; printf x >> data.bin;"
script += f": > '{started}'; sleep 600"
if how == "external":
    view.expect_external()
    subprocess.run(["sh", "-c", script.removesuffix("sleep 600")], cwd=root)
    sys.stdin.read()
view.run(script)
"""


@pytest.mark.heavy
@pytest.mark.parametrize("how", ["overlay", "scan", "external"])
def test_a_process_killed_during_a_command_leaves_nothing_behind(
    root: Path, open_fs: Callable[[Path], HostFilesystem], how: str
):
    before = look(root)
    started = root.parent / "started"
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED, how, root, started], stdin=subprocess.PIPE
    )
    while not started.exists():
        assert child.poll() is None
    child.kill()
    child.communicate()

    fs = open_fs(root)

    assert look(root) == before
    assert fs.run("cat one").stdout == "linked\n"
    assert look(root) == before


@pytest.mark.heavy
@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="root can be someone else")
def test_it_works_for_any_user(ordinary_user: OrdinaryUser, home: Path):
    """The tests of this module, once more, as a user that may do nothing special."""
    arguments = ["-q", "-p", "no:cacheprovider", "-p", "no:randomly", f"--basetemp={home}/t"]
    module = str(Path(__file__).relative_to(Path(__file__).parents[2]))
    # Who runs it makes a difference to an overlay above all.
    arguments += [module] if os.environ.get("WINK_HEAVY") else ["-k", "not scan", module]

    done = ordinary_user.run("-m", "pytest", *arguments, home=home, cwd=ordinary_user.clone)

    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert " passed" in done.stdout


# A process that is killed while a command of its runs

CALLER = """
import sys
from weakincentives.filesystem import HostFilesystem, overlay

overlay.SYSTEM_PATH = "/nowhere"
fs = HostFilesystem(sys.argv[1])
view = fs.fork_in_place()
view.run(["sh", "-c", sys.argv[2]])
"""


def test_a_command_without_an_overlay_dies_with_the_process_that_started_it(
    root: Path, tmp_path: Path
):
    """And so does what it started; by the time the directory is open again, all of them are."""
    fifo = tmp_path / "alive"
    os.mkfifo(fifo)
    busy = f"exec >'{fifo}'; (while :; do date > made; rm made; done) & echo started; wait"
    before = look(root)
    alive = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    try:
        process = subprocess.Popen([sys.executable, "-c", CALLER, root, busy])
        assert is_readable(alive, 60)
        assert os.read(alive, 8) == b"started\n"
        process.kill()
        process.wait()
        with HostFilesystem(root) as fs:
            assert all("is now in" in line for line in fs.recovered)

        assert os.read(alive, 8) == b""  # nobody is left who could write
    finally:
        os.close(alive)
    assert look(root) == before


# What the overlay knows of files with several names, and leaves on them


def _linked(root: Path, tmp_path: Path) -> Path:
    """Make a file with two names in the workspace and one outside of it."""
    put(root / "deep/first", "line\n", 0o640)
    os.link(root / "deep/first", root / "second")
    os.link(root / "second", tmp_path / "outside")
    return tmp_path / "outside"


NAMES_GO = {
    "removed": "echo x >>deep/first; rm deep/first",
    "removed with its directory": "echo x >>deep/first; rm -r deep",
    "replaced": "echo x >>deep/first; echo other >new; mv new deep/first",
    "both removed": "echo x >>deep/first; rm deep/first second",
    "mode": "echo x >>second; chmod 600 second; rm second",
}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's overlay keeps hard links together")
@pytest.mark.parametrize("private", [False, True], ids=["in place", "private"])
@pytest.mark.parametrize("command", NAMES_GO.values(), ids=NAMES_GO)
def test_what_is_written_under_a_name_that_goes_stays_under_the_others(
    root: Path,
    tmp_path: Path,
    open_fs: Callable[[Path], HostFilesystem],
    command: str,
    private: bool,
):
    outside = _linked(root, tmp_path)
    before = look(root)
    expected = tmp_path / "expected"
    subprocess.run(["cp", "-a", root, expected], check=True)
    subprocess.run(command, shell=True, cwd=expected, check=True)
    fs = open_fs(root)
    _needs_overlays(fs)

    view = fs.fork_in_place()
    view.run(command, check=True)
    assert outside.read_text() == "line\nx\n"
    assert fs.discard(view) == ()
    assert look(root) == before
    assert outside.read_text() == "line\n"

    view = fs.fork() if private else fs.fork_in_place()
    view.run(command, check=True)
    fs.merge(view)
    after = {path: (one.kind, one.mode, one.content) for path, one in look(root).items()}
    assert after == {path: (s.kind, s.mode, s.content) for path, s in look(expected).items()}
    assert outside.read_text() == "line\nx\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's overlay leaves such attributes")
def test_nothing_of_the_overlay_stays_on_what_a_command_has_moved(
    root: Path, open_fs: Callable[[Path], HostFilesystem]
):
    put(root / "moved/inner/file", "x")
    os.symlink("file", root / "moved/inner/link")
    fs = open_fs(root)
    _needs_overlays(fs)
    fs.run(
        "mv link renamed; mv pipe sub-pipe; mv moved elsewhere || true; touch -h dangling;"
        " chmod 700 empty; mv run.sh ran.sh; echo x >>data.bin; ln dangling again",
        check=True,
    )
    assert (root / "renamed").is_symlink()
    for path in [root, *root.rglob("*")]:
        names = os.listxattr(path, follow_symlinks=False)
        assert [name for name in names if "overlay" in name] == [], path
