"""Zygotes: the start of a command is cheap, nothing is left of it, no command sees another."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from random import Random

import pytest

from chance import THOROUGH
from stepping import traced
from weakincentives.contrib.tools import (
    Sandbox,
    SandboxLimits,
    SandboxSettings,
    find_sandbox,
)
from weakincentives.contrib.tools.sandbox.engines import SandboxedCommand
from weakincentives.contrib.tools.sandbox.limits import cgroup_mounts, descendants, sweep_cgroups
from weakincentives.errors import FilesystemError, SandboxUnavailable
from weakincentives.filesystem import CommandResult, HostFilesystem
from weakincentives.filesystem.overlay import Overlay, Started

PATIENCE = 600


def offspring() -> set[int]:
    return set(descendants(os.getpid())) - {os.getpid()}


def cgroups_of(pid: int) -> list[Path]:
    """Return the cgroups of a zygote: as root it has some."""
    names = {line.rpartition("/")[2] for line in Path(f"/proc/{pid}/cgroup").read_text().split()}
    ours = {name for name in names if name.startswith("wink-")}
    assert len(ours) == (os.geteuid() == 0)
    return [place / name for place, _ in cgroup_mounts() for name in ours]


def are_gone(paths: list[Path]) -> bool:
    return not any(path.exists() for path in paths)


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


class Box:
    def __init__(self, sandbox: Sandbox, files: HostFilesystem, zygote: int) -> None:
        self.sandbox = sandbox
        self.files = files
        self.zygote = zygote

    def run(self, command: str, **options: object) -> CommandResult:
        options.setdefault("timeout", PATIENCE)
        return self.sandbox.run(self.files, command, **options)  # type: ignore[arg-type]


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Box]:
    before = offspring()
    try:
        sandbox = find_sandbox("namespaces")
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    # The answer comes before the namespaces of the trial are torn down.
    until(lambda: len(offspring() - before) == 1)
    [zygote] = offspring() - before
    (tmp_path / "work").mkdir()
    with HostFilesystem(tmp_path / "work") as files:
        files.run("true")  # finds out whether overlays work
        yield Box(sandbox, files, zygote)


def test_commands_one_after_the_other_need_no_new_process_and_cgroup(box: Box):
    before, groups = offspring(), cgroups_of(box.zygote)
    assert box.run("true").ok
    open_files = len(os.listdir("/proc/self/fd"))

    for number in range(3):
        assert box.run(f"echo {number} >>a.txt").ok
    assert not box.run("echo no >>a.txt; false").ok

    # The next sandbox is armed: two processes.
    until(lambda: len(offspring() - before) == 2)
    assert before < offspring()
    assert cgroups_of(box.zygote) == groups
    until(lambda: len(os.listdir("/proc/self/fd")) <= open_files)
    assert box.files.read("a.txt") == "0\n1\n2\n"


def test_commands_run_at_the_same_time(box: Box):
    first, second = box.files.fork(), box.files.fork()
    thread = threading.Thread(target=box.sandbox.run, args=(first, "sleep 1000"))
    thread.start()
    until(lambda: len(descendants(box.zygote)) >= 4)

    done = box.sandbox.run(second, "echo second >a.txt", timeout=PATIENCE)
    still_running = thread.is_alive()
    os.kill(descendants(box.zygote)[-1], signal.SIGKILL)
    thread.join()
    box.files.discard(first)
    box.files.merge(second)

    assert (done.ok, still_running) == (True, True)
    assert box.files.read("a.txt") == "second\n"


def test_a_zygote_that_was_killed_while_it_waited_is_replaced(box: Box):
    os.kill(box.zygote, signal.SIGKILL)

    assert box.run("echo x >a.txt").ok
    assert box.files.read("a.txt") == "x\n"
    assert box.zygote not in offspring()


def test_a_zygote_that_cannot_start_a_command_is_reported():
    """The limit leaves no room for more than the zygote itself."""
    if os.geteuid() != 0:
        pytest.skip("only root has a cgroup")
    with pytest.raises(SandboxUnavailable, match="the launcher of commands has ended"):
        find_sandbox("namespaces", limits=SandboxLimits(processes=1))


def test_a_zygote_that_is_killed_takes_its_command_along(box: Box):
    def kill() -> None:
        until(lambda: len(descendants(box.zygote)) >= 4)
        family.extend(descendants(box.zygote))
        os.kill(box.zygote, signal.SIGKILL)

    family: list[int] = []
    thread = threading.Thread(target=kill)
    thread.start()
    done = box.run("echo x >a.txt; sleep 1000")
    thread.join()

    assert (done.returncode, done.kept) == (128 + signal.SIGKILL, False)
    until(lambda: are_gone([Path(f"/proc/{pid}") for pid in family]))
    assert box.files.glob("*") == ()
    assert box.run("true").ok


def test_a_command_that_timed_out_leaves_neither_process_nor_cgroup(box: Box):
    before, groups = offspring() - {box.zygote}, cgroups_of(box.zygote)

    done = box.run("trap '' TERM; sleep 1000 & setsid sleep 1000", timeout=0.5)

    assert done.timed_out
    assert offspring() <= before  # what an earlier test has left may end meanwhile
    assert box.run("true").ok
    until(lambda: sweep_cgroups() and are_gone(groups))


def test_what_an_earlier_command_was_given_cannot_be_read(box: Box):
    """It may still be in the memory of the zygote, which process 1 is a copy of."""
    for attempt in ("cat /proc/1/maps", "head -c 1 /proc/1/mem", "cat /proc/1/environ"):
        done = box.run(attempt)

        assert not done.stdout
        assert "Permission denied" in done.stderr


def test_a_command_has_the_umask_and_the_signals_of_any_other_subprocess(box: Box):
    """Compared with a bare one: whoever starts the tests may ignore signals of their own."""
    command = "umask; grep SigIgn /proc/self/status"
    before = os.umask(0o027)
    try:
        bare = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True)
        done = box.run(command)
    finally:
        os.umask(before)

    own = 0b11 << 31  # 32 and 33 belong to the C library, which handles them in some processes only
    (mask, _, ignored), (bare_mask, _, bare_ignored) = done.stdout.split(), bare.stdout.split()
    assert mask == bare_mask == "0027"
    assert int(ignored, 16) & ~own == int(bare_ignored, 16) & ~own


SCRIPT = """
import os, sys, threading
from weakincentives.contrib.tools import find_sandbox
from weakincentives.contrib.tools.sandbox.limits import sweep_cgroups
from weakincentives.filesystem import HostFilesystem
sandbox = find_sandbox("namespaces")
files = HostFilesystem(sys.argv[1])
def run(command):
    return sandbox.run(files, command, timeout=600)
"""


def script(rest: str, root: Path) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", SCRIPT + rest, str(root)]
    return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("busy", [False, True])
def test_nothing_is_left_when_the_program_is_killed(box: Box, tmp_path: Path, busy: bool):
    (tmp_path / "other").mkdir()
    rest = "run('true'); print('ready', flush=True); " + (
        "run('sleep 1000')" if busy else "input()"
    )
    with script(rest, tmp_path / "other") as program:
        assert program.stdout is not None
        program.stdout.readline()
        until(lambda: len(descendants(program.pid)) >= (5 if busy else 2))
        family = descendants(program.pid)
        groups = cgroups_of(family[1])
        program.kill()

    until(lambda: are_gone([Path(f"/proc/{pid}") for pid in family]))
    assert are_gone(groups)


CROWD = """
def work(number):
    for turn in range(3):
        own = f"{sys.argv[2]}-{number}"
        done = run(f"echo {own}-{turn} >>all.txt; echo {turn} >>{own}")
        assert done.ok and done.kept, done
threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
for each in threads:
    each.start()
for each in threads:
    each.join()
files.close()
"""


def test_threads_of_two_programs_run_commands_on_one_workspace(box: Box, tmp_path: Path):
    root = tmp_path / "other"
    root.mkdir()
    shared = SCRIPT.replace("(sys.argv[1])", "(sys.argv[1], shared=True)")
    words = [sys.executable, "-c", shared + CROWD, str(root)]
    programs = [
        subprocess.Popen([*words, name], stderr=subprocess.PIPE, text=True) for name in "ab"
    ]
    said = [program.communicate()[1] for program in programs]

    assert said == ["", ""]
    names = [f"{name}-{number}" for name in "ab" for number in range(8)]
    lines = (root / "all.txt").read_text().splitlines()
    assert sorted(lines) == [f"{name}-{turn}" for name in names for turn in range(3)]
    assert [(root / name).read_text() for name in names] == ["0\n1\n2\n"] * 16
    with HostFilesystem(root) as files:
        assert not list(files.store.glob("commands/*"))


def test_a_forked_child_leaves_the_zygotes_to_its_parent(box: Box, tmp_path: Path):
    rest = """
run("echo parent >>a.txt")
child = os.fork()
if child == 0:
    with HostFilesystem(sys.argv[1] + "-of-child") as own:
        assert sandbox.run(own, "echo child >>a.txt", timeout=600).ok
    assert sweep_cgroups(patience=1.0)  # it does not wait for those of its parent
    sys.exit(0)  # with everything that is done at exit
assert os.waitpid(child, 0)[1] == 0
assert run("echo parent >>a.txt").ok
files.close()
"""
    (tmp_path / "other").mkdir()
    (tmp_path / "other-of-child").mkdir()
    with script(rest, tmp_path / "other") as program:
        program.communicate()

    assert program.returncode == 0
    assert (tmp_path / "other/a.txt").read_text() == "parent\nparent\n"
    assert (tmp_path / "other-of-child/a.txt").read_text() == "child\n"


# Whoever is killed, at whatever step


def children(pid: int) -> list[int]:
    """Return the processes that a process has started, the oldest first."""
    try:
        return sorted(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    except FileNotFoundError:
        return []


def only(pids: list[int]) -> int:
    assert len(pids) == 1
    return pids[0]


STEPS = """
from weakincentives.errors import WinkError
def attempt(command):
    try:
        return run(command)
    except (WinkError, OSError):
        return None  # the zygote was killed while it started
for _ in range(3):
    assert run("true").ok
print("ready", flush=True)
"""


@contextlib.contextmanager
def ended(program: subprocess.Popen[str]) -> Iterator[None]:
    """Kill a program at the end, whatever has happened: otherwise it would be waited for."""
    try:
        yield
    finally:
        program.kill()


def mounted(own: Path) -> set[str]:
    """Return what is mounted, without what other tests mount in directories of their own."""
    found = Path("/proc/self/mountinfo").read_text().splitlines()
    return {line for line in found if "/pytest-of-" not in line or str(own) in line}


def remains(root: Path, families: list[int], groups: list[Path], mounts: set[str]) -> None:
    """Check that nothing is left of a program that has ended."""
    until(lambda: are_gone([Path(f"/proc/{pid}") for pid in families]))
    until(lambda: are_gone(groups))
    assert not mounted(root.parent) - mounts
    with HostFilesystem(root) as files:  # removes what a killed program has left
        assert files.read("a.txt") == "yes\n"
        store = files.store
    assert not list(store.glob("open/*"))
    assert not list(store.glob("probe-*"))


VICTIMS = {
    "client": lambda program, zygote, running, armed: program,
    "zygote": lambda program, zygote, running, armed: zygote,
    "first process": lambda program, zygote, running, armed: running,
    "process 1": lambda program, zygote, running, armed: only(children(running)),
    "command": lambda program, zygote, running, armed: only(children(only(children(running)))),
    "armed first process": lambda program, zygote, running, armed: armed,
    "armed process 1": lambda program, zygote, running, armed: only(children(armed)),
}


@pytest.mark.parametrize("victim", VICTIMS)
def test_whoever_is_killed_while_a_command_runs_nothing_is_left(
    box: Box, tmp_path: Path, victim: str
):
    root, mounts = tmp_path / "other", mounted(tmp_path)
    root.mkdir()
    (root / "a.txt").write_text("yes\n")
    rest = (
        STEPS
        + """
done = attempt("echo no >a.txt; sleep 1000")
assert not done.ok and not done.kept
assert run("true").ok
files.close()
"""
    )
    with script(rest, root) as program, ended(program):
        assert program.stdout is not None
        program.stdout.readline()
        until(lambda: "sleep" in [name_of(pid) for pid in descendants(program.pid)])
        zygote = only([pid for pid in children(program.pid) if "python" in name_of(pid)])
        until(lambda: len(children(zygote)) == 2)
        running, armed = sorted(
            children(zygote), key=lambda pid: "sleep" not in map(name_of, descendants(pid))
        )
        until(lambda: children(armed))
        command = only(children(only(children(running))))
        family, groups = descendants(program.pid), cgroups_of(zygote)
        os.kill(VICTIMS[victim](program.pid, zygote, running, armed), signal.SIGKILL)
        if "armed" in victim:
            until(lambda: has_ended(armed))  # else the last command might still be given to it
            os.kill(command, signal.SIGKILL)
        program.wait(PATIENCE)

    assert (program.returncode == 0) == (victim != "client")
    remains(root, family, groups, mounts)


def name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.mark.heavy
def test_nothing_is_left_after_kills_at_random_moments(box: Box, tmp_path: Path):
    root, mounts = tmp_path / "other", mounted(tmp_path)
    root.mkdir()
    (root / "a.txt").write_text("yes\n")
    rest = (
        STEPS
        + """
import time
while not os.path.exists(sys.argv[1] + "-enough"):
    done = attempt("echo maybe >b.txt; rm b.txt")
    assert done is None or done.ok == done.kept
attempt("true")  # the last kill may have hit what it is given to
assert run("true").ok
print("end", flush=True)
time.sleep(1000)
"""
    )
    families, groups = set[int](), set[Path]()
    random = Random(38)
    with script(rest, root) as program, ended(program):
        assert program.stdout is not None
        program.stdout.readline()
        for _ in range(60):
            time.sleep(random.uniform(0, 0.05))
            family = descendants(program.pid)[1:]
            families.update(family)
            for pid in family[:1]:
                with contextlib.suppress(OSError, AssertionError):
                    groups.update(cgroups_of(pid))
            if family:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(random.choice(family), signal.SIGKILL)
        Path(f"{root}-enough").touch()
        assert program.stdout.readline() == "end\n"

    remains(root, sorted(families), sorted(groups), mounts)


KILLS = 10_000 if THOROUGH else 50
"""At how many of its steps a process is killed at most; they are spread evenly."""
CLIENT_KILLS = KILLS // 4
TRIES = 20
"""How often a step is tried at most until the sandbox that was armed is the one that is used."""

STEPWISE = """
def answer():
    for line in sys.stdin:
        done = attempt(f"echo {line.strip()} >>b.txt")
        print(done is not None and done.ok, flush=True)
"""


class Stepped:
    """A program that runs one command for each line, while its processes are traced."""

    def __init__(self, program: subprocess.Popen[str]) -> None:
        self._program = program
        self.lines: list[str] = []
        """The lines whose commands have ended well."""
        self.families = set[int]()
        self.groups = set[Path]()
        self.number = 0

    def run(self) -> bool:
        """Run a command; tell whether it has ended well."""
        stdin, stdout = self._program.stdin, self._program.stdout
        assert stdin is not None
        assert stdout is not None
        self.number += 1
        stdin.write(f"{self.number}\n")
        stdin.flush()
        done = stdout.readline() == "True\n"
        if done:
            self.lines.append(f"{self.number}\n")
        return done

    def sandboxes(self) -> list[int]:
        """Return the first processes of all sandboxes."""
        zygotes = children(self._program.pid)
        return [pid for zygote in zygotes for pid in children(zygote) if not has_ended(pid)]

    def arm(self) -> dict[str, int]:
        """Return the processes that wait for the next command, once they do.

        None is armed for the first command of a zygote, or after somebody has mounted something.
        """
        while True:
            assert self.run()
            until(lambda: all(map(waits, self.sandboxes())))
            for zygote in children(self._program.pid):
                for first in filter(waits, children(zygote)):
                    process_1 = only(children(first))
                    self.families.update((zygote, first, process_1))
                    self.groups.update(cgroups_of(zygote))
                    return {"zygote": zygote, "first process": first, "process 1": process_1}


def rests(before: Mapping[str, int]) -> bool:
    """Whether nothing is left of a command, and the next sandbox is armed, if one is."""
    zygote, first = before["zygote"], before["first process"]
    if has_ended(zygote):
        return True
    return not Path(f"/proc/{first}").exists() and all(
        waits(pid) for pid in children(zygote) if not has_ended(pid)
    )


def waits(first: int) -> bool:
    """Whether process 1 of a sandbox waits for its command."""
    try:
        wchan = [Path(f"/proc/{pid}/wchan").read_text() for pid in children(first)]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return len(wchan) == 1 and "unix_stream" in wchan[0]


@pytest.mark.heavy
@pytest.mark.parametrize(
    "victim",
    ["zygote", "first process", "process 1", "armed first process", "armed process 1"],
)
def test_nothing_is_left_after_a_kill_at_each_system_call(box: Box, tmp_path: Path, victim: str):
    if os.geteuid() != 0:
        pytest.skip("only root can trace what is in a sandbox")
    root, mounts = tmp_path / "other", mounted(tmp_path)
    root.mkdir()
    (root / "a.txt").write_text("yes\n")
    with script(STEPS + STEPWISE + "answer()\nfiles.close()\n", root) as program, ended(program):
        assert program.stdout is not None
        program.stdout.readline()
        stepped = Stepped(program)
        # An armed sandbox is replaced when anyone mounts something: then this one did nothing.
        for _ in range(TRIES):
            before = stepped.arm()
            with traced(before) as tracer:
                is_done = stepped.run()
                until(lambda before=before: rests(before))
            if is_done and tracer.steps.get(victim):
                break
        steps, tried, hit = tracer.steps[victim], 0, 0
        every = max(1, steps // KILLS)
        for step in range(1, steps + 1, every):
            tried += 1
            for _ in range(TRIES):
                before = stepped.arm()
                with traced(before, victim, step) as tracer:
                    stepped.run()
                    until(lambda tracer=tracer, before=before: tracer.has_killed or rests(before))
                if tracer.killed is not None or tracer.steps.get(victim):
                    break
            if tracer.killed is not None:
                hit += 1
                stepped.families.add(tracer.killed)
                until(lambda pid=tracer.killed: has_ended(pid))
                # What it had started ends a moment later, and what waited for it.
                until(lambda: all(map(waits, stepped.sandboxes())))
        assert hit > tried * 0.9
        assert any(stepped.run() for _ in range(TRIES))
        assert (root / "b.txt").read_text() == "".join(stepped.lines)
        assert program.stdin is not None
        program.stdin.close()
        program.wait(PATIENCE)

    assert program.returncode == 0
    remains(root, sorted(stepped.families), sorted(stepped.groups), mounts)


@pytest.mark.heavy
def test_nothing_is_left_after_a_kill_of_the_client_at_its_system_calls(box: Box, tmp_path: Path):
    if os.geteuid() != 0:
        pytest.skip("only root can trace another program everywhere")
    root, mounts = tmp_path / "other", mounted(tmp_path)
    root.mkdir()
    (root / "a.txt").write_text("yes\n")
    steps, every, kept, hit = 0, 1, "", 0
    for number in range(CLIENT_KILLS + 1):
        step = number * every
        with script(STEPS + STEPWISE + "answer()\n", root) as program, ended(program):
            assert program.stdout is not None
            program.stdout.readline()
            stepped = Stepped(program)
            stepped.arm()
            with traced({"client": program.pid}, "client" if step else "", step) as tracer:
                stepped.run()
            family = [program.pid, *stepped.families]
        remains(root, family, sorted(stepped.groups), mounts)
        now = (root / "b.txt").read_text()
        kept += "".join(stepped.lines)
        assert now in (kept, f"{kept}{stepped.number}\n")
        kept = now
        if not number:
            steps = tracer.steps["client"]
            every = max(1, steps // CLIENT_KILLS)
        elif step > steps:
            break
        hit += tracer.killed is not None  # it makes fewer system calls where it waits less

    assert hit > min(CLIENT_KILLS, steps) // 3


def test_a_changed_system_is_seen_by_the_next_command(tmp_path: Path):
    """A sandbox that was armed before shows files that have been replaced, or a mount."""
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "version").write_text("1\n")
    (tmp_path / "work").mkdir()
    try:
        sandbox = find_sandbox("namespaces", read_only=[tools, tools / "version"])
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    with HostFilesystem(tmp_path / "work") as files:

        def said() -> str:
            done = sandbox.run(files, f"cat {tools}/version", timeout=PATIENCE)
            return done.stdout + done.stderr

        assert [said() for _ in range(3)] == ["1\n"] * 3
        (tmp_path / "new").write_text("2\n")
        (tmp_path / "new").replace(tools / "version")
        assert [said() for _ in range(3)] == ["2\n"] * 3
        tools.rename(tmp_path / "old")
        tools.mkdir()
        (tools / "version").write_text("3\n")
        assert [said() for _ in range(3)] == ["3\n"] * 3
        (tools / "version").write_text("4\n")
        assert said() == "4\n"


IN_OWN_ETC = """
import os, sys
from pathlib import Path
from weakincentives.contrib.tools import find_sandbox
from weakincentives.filesystem import HostFilesystem
etc = Path("/etc/os-release")
assert os.path.ismount("/etc")  # ours, not that of the machine
files = HostFilesystem(sys.argv[1])
sandbox = find_sandbox("namespaces")
def said(command):
    done = sandbox.run(files, command, timeout=600)
    return done.stdout + done.stderr
def link(target):
    etc.with_name("next").symlink_to(target)
    etc.with_name("next").replace(etc)
link(sys.argv[2])
assert [said("cat /etc/os-release") for _ in range(3)] == ["one"] * 3
link(sys.argv[3])
assert [said("cat /etc/os-release") for _ in range(2)] == ["two"] * 2
etc.unlink()
assert said("test -e /etc/os-release || echo none") == "none\\n"
etc.write_text("three")
assert said("cat /etc/os-release") == "three"
middle = Path(sys.argv[1]).with_name("links") / "middle"
middle.parent.mkdir()
middle.symlink_to(sys.argv[2])
link(middle)
assert [said("cat /etc/os-release") for _ in range(3)] == ["one"] * 3
middle.with_name("later").symlink_to(sys.argv[3])
middle.with_name("later").replace(middle)
assert [said("cat /etc/os-release") for _ in range(2)] == ["two"] * 2
certificates = Path("/etc/pki/tls/certs")
if not certificates.exists():
    certificates.parent.mkdir(parents=True, exist_ok=True)
    look = "test -e /etc/pki/tls/certs || echo none"
    assert [said(look) for _ in range(3)] == ["none\\n"] * 3
    certificates.mkdir()
    assert said(look) == ""
files.close()
print("end")
"""


def test_a_part_of_etc_that_becomes_another_or_goes_is_seen(tmp_path: Path):
    """A link that leads elsewhere: `timedatectl set-timezone` makes one."""
    if os.geteuid() != 0:
        pytest.skip("only root can give a program an /etc of its own")
    names = "upper", "work", "project"
    upper, work, project = (tmp_path / name for name in names)
    for each in (upper, work, project):
        each.mkdir()
    (tmp_path / "one").write_text("one")
    (tmp_path / "two").write_text("two")
    overlay = f"lowerdir=/etc,upperdir={upper},workdir={work}"
    mount = f'mount -t overlay -o {overlay} etc /etc || exit 77; exec "$@"'
    words = [
        sys.executable,
        "-c",
        IN_OWN_ETC,
        str(project),
        *(f"{tmp_path}/{n}" for n in ("one", "two")),
    ]
    apart = ["unshare", "--mount", "--propagation", "private", "sh", "-c", mount, "sh"]

    done = subprocess.run([*apart, *words], capture_output=True, text=True)

    if done.returncode == 77 or "SandboxUnavailable" in done.stderr:
        pytest.skip(done.stderr)
    assert done.stdout == "end\n", done.stderr


ON_A_SMALL_DISK = """
import sys
from pathlib import Path
from weakincentives.contrib.tools import find_sandbox
from weakincentives.errors import FilesystemError
from weakincentives.filesystem import HostFilesystem
disk = Path(sys.argv[1])
(disk / "work").mkdir()
(disk / "store").mkdir()
sandbox = find_sandbox("namespaces")
flood = "dd if=/dev/zero of=flood bs=1M 2>/dev/null; echo no >a.txt; "
with HostFilesystem(disk / "work", store=disk / "store") as files:
    files.write("a.txt", "yes")
    for number in range(4):
        for run in (sandbox.run, HostFilesystem.run):
            for how in ("true", "false"):
                try:
                    assert not run(files, flood + how, timeout=600).kept
                except FilesystemError as error:
                    assert "No space left" in str(error), error
                files.write("b.txt", f"{number}")
                assert files.read("a.txt") == "yes" and files.glob("*") == ("a.txt", "b.txt")
print("end")
"""


def test_a_command_that_fills_the_disk_leaves_room_for_what_comes_next(tmp_path: Path):
    """What it wrote is gone when its result is there, though layers are emptied afterwards."""
    if os.geteuid() != 0:
        pytest.skip("only root can give a program a disk of its own")
    mount = 'mount -t tmpfs -o size=24m none "$1" || exit 77; exec "$2" -c "$3" "$1"'
    words = ["sh", "-c", mount, "sh", str(tmp_path), sys.executable, ON_A_SMALL_DISK]
    apart = ["unshare", "--mount", "--propagation", "private"]

    done = subprocess.run([*apart, *words], capture_output=True, text=True)

    if done.returncode == 77 or "SandboxUnavailable" in done.stderr:
        pytest.skip(done.stderr)
    assert done.stdout == "end\n", done.stderr


WITHOUT_FSOPEN = """
import ctypes, errno, struct, sys
from weakincentives.contrib.tools import find_sandbox
from weakincentives.filesystem import HostFilesystem
REFUSE = 0x50000 | errno.ENOSYS
code = b"".join([
    struct.pack("HBBI", 0x20, 0, 0, 0),  # load the number
    struct.pack("HBBI", 0x15, 0, 1, 430),  # fsopen, everywhere
    struct.pack("HBBI", 0x06, 0, 0, REFUSE),
    struct.pack("HBBI", 0x06, 0, 0, 0x7FFF0000),
])
buffer = ctypes.create_string_buffer(code, len(code))
program = struct.pack("@HP", len(code) // 8, ctypes.addressof(buffer))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, program) == 0
sandbox = find_sandbox()
reasons = dict(sandbox.passed_over)
assert "fsopen" in reasons["namespaces"], reasons
with HostFilesystem(sys.argv[1]) as files:
    assert sandbox.run(files, "echo yes >a.txt", timeout=600).ok
    assert files.read("a.txt") == "yes\\n"
print("end")
"""


def test_another_sandbox_is_used_where_the_calls_for_overlays_are_missing(box: Box, tmp_path: Path):
    """As in a container whose own filter does not know them."""
    try:
        find_sandbox("bubblewrap")
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    (tmp_path / "other").mkdir()
    words = [sys.executable, "-c", WITHOUT_FSOPEN, str(tmp_path / "other")]

    done = subprocess.run(words, capture_output=True, text=True)

    assert done.stdout == "end\n", done.stderr


def test_a_signal_to_process_1_does_not_end_a_command(box: Box):
    done = box.run("for each in INT TERM HUP QUIT KILL STOP USR1; do kill -$each 1; done; echo yes")

    assert (done.stdout, done.ok) == ("yes\n", True)


FLAGS = """python3 -c "
import fcntl, os
fd = os.open('.', os.O_RDONLY)
flags = fcntl.ioctl(fd, 0x80086601, bytes(8))
print(flags[0] & 0x40)
{}
" """


def test_flags_of_a_directory_do_not_reach_a_later_command(box: Box):
    """Its layers are used again, and files that are made in them inherit their flags."""
    no_dump = "fcntl.ioctl(fd, 0x40086602, bytes([flags[0] | 0x40]) + flags[1:])"
    done = box.run(FLAGS.format(no_dump))
    if not done.ok:
        pytest.skip(done.stderr)

    for _ in range(10):
        time.sleep(0.05)  # meanwhile the layers are emptied
        assert box.run(FLAGS.format("")).stdout == "0\n"


KEEPER = """
import os, socket, sys
keeper = socket.socket(socket.AF_UNIX)
keeper.connect(sys.argv[1])
socket.send_fds(keeper, [b"x"], [os.open(".", os.O_RDONLY)])
"""


@pytest.mark.parametrize("sandboxed", [True, False])
def test_a_layer_that_another_program_still_holds_is_not_used_again(
    box: Box, tmp_path: Path, sandboxed: bool
):
    """Without a sandbox a command can reach anybody; in one, whoever listens in what it sees."""
    shared = tmp_path / "shared"
    shared.mkdir()
    sandbox = find_sandbox(SandboxSettings(engine="namespaces", write=(str(shared),)))
    (box.files.root / "keeper.py").write_text(KEEPER)

    def run(*words: str) -> CommandResult:
        if sandboxed:
            return sandbox.run(box.files, words, timeout=PATIENCE)
        return box.files.run(words, timeout=PATIENCE)

    with socket.socket(socket.AF_UNIX) as keeper:
        keeper.bind(str(shared / "keeper"))
        keeper.listen()
        for number in range(3):
            assert run("python3", "keeper.py", str(shared / "keeper")).ok
            with keeper.accept()[0] as connection:
                [kept] = socket.recv_fds(connection, 1, 1)[1]
            try:
                for turn in range(10):
                    with contextlib.suppress(FileNotFoundError):
                        os.close(os.open(f"evil{turn}", os.O_CREAT | os.O_WRONLY, dir_fd=kept))
                    assert run("touch", f"good{number}").ok
            finally:
                os.close(kept)

    assert box.files.glob("*") == ("good0", "good1", "good2", "keeper.py")


@pytest.mark.parametrize(
    "bomb",
    [
        "python3 -c 'import os\nwhile True: os.fork()'",
        "while :; do sleep 100 & done",
        "dd if=/dev/zero of=/dev/null bs=100M count=1",
    ],
)
def test_a_command_that_uses_up_its_limits_leaves_the_next_one_alone(
    box: Box, tmp_path: Path, bomb: str
):
    """It runs while the next sandbox is armed, which is below the same limits."""
    sandbox = find_sandbox("namespaces", limits=SandboxLimits(processes=8, memory=64 << 20))
    for _ in range(20):
        sandbox.run(box.files, f"({bomb}) 2>/dev/null; true", timeout=PATIENCE)
        done = sandbox.run(box.files, "echo yes", timeout=PATIENCE)

        assert (done.stdout, done.stderr, done.ok) == ("yes\n", "", True)


MARKS = """
echo own >/tmp/left
echo own >/dev/shm/left
umask 077
ulimit -n 10
export OWN=1
python3 - <<'END'
import ctypes, os, socket
libc = ctypes.CDLL(None)
libc.shmget(77, 4096, 0o1666)
libc.semget(77, 1, 0o1666)
libc.msgget(77, 0o1666)
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
os.setpriority(os.PRIO_PROCESS, 1, 19)
libc.prlimit(1, 7, (ctypes.c_ulong * 2)(5, 5), None)
END
(setsid sh -c 'while :; do echo own >>late; done' &) 2>/dev/null
kill -9 -1; kill -9 $$
"""

SEEN = """
cat /tmp/left /dev/shm/left late 2>/dev/null
cat /proc/sysvipc/* | grep -v key
umask; ulimit -n; echo "$OWN"; nproc; cut -d' ' -f19 /proc/1/stat
set -- /proc/[0-9]*; echo $#
"""


def test_nothing_of_a_command_reaches_the_next_one(box: Box):
    """The next sandbox is armed while it runs, and uses the layers of an earlier one."""
    before = [box.run(SEEN).stdout for _ in range(3)]
    assert len(set(before)) == 1

    for _ in range(10):
        assert not box.run(MARKS).kept
        assert box.run(MARKS.replace("kill", "true")).ok
        if box.files.exists("late"):  # else it was killed before
            box.files.delete("late")
        seen = box.run(SEEN)

        assert seen.stdout == before[0]
        assert box.files.glob("*") == ()


@pytest.mark.parametrize("moment", ["before", "while it starts"])
def test_no_command_sees_what_replaces_the_workspace(box: Box, tmp_path: Path, moment: str):
    """Its changes would be made in the directory that was opened."""
    root, secret = box.files.root, tmp_path / "secret"
    secret.mkdir()
    (secret / "key").write_text("secret")
    assert box.run("true").ok
    assert box.run("true").ok

    def replace() -> None:
        root.rename(tmp_path / "moved")
        root.symlink_to(secret)

    command = SandboxedCommand(
        argv=["cat", "key"], workspace=root, limits=box.sandbox.limits, cwd="/workspace"
    )
    with box.sandbox.engine.wrapped(command) as launch:
        assert launch.start is not None

        def start(overlay: Overlay | None, stdin: bytes, inherited: Sequence[int]) -> Started:
            if moment != "before":
                replace()
            assert launch.start is not None
            return launch.start(overlay, stdin, inherited)

        if moment == "before":
            replace()
            with pytest.raises(FilesystemError, match="is another directory now"):
                box.files.run(launch.argv, env=launch.env, start=start)
            return
        done = box.files.run(launch.argv, env=launch.env, start=start)
    root.unlink()
    (tmp_path / "moved").rename(root)

    assert (done.returncode, done.stdout) == (125, "")
    assert "not the directory any more" in done.stderr
    assert box.run("true").ok
