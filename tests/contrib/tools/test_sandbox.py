"""Every sandbox against the same list of attacks, and what becomes of a command's changes."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import tempfile
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from ordinary_user import OrdinaryUser, place_for_others
from weakincentives.contrib.tools import Sandbox, SandboxLimits, SandboxSettings, find_sandbox
from weakincentives.contrib.tools.sandbox.engines import (
    SystemFiles,
)
from weakincentives.contrib.tools.sandbox.limits import SandboxWatch, cgroup_mounts, sweep_cgroups
from weakincentives.contrib.tools.sandbox.seccomp import (
    REFUSED,
    container_profile,
    filter_program,
)
from weakincentives.errors import FilesystemError, SandboxUnavailable, ToolValidationError
from weakincentives.filesystem import CommandResult, HostFilesystem
from weakincentives.filesystem.commands import Running

MIB = 1 << 20
LIMITS = SandboxLimits(memory=256 * MIB, processes=48, disk=32 * MIB, scratch=8 * MIB)
ENGINES = [
    pytest.param("podman", marks=pytest.mark.heavy),
    pytest.param("bubblewrap", marks=pytest.mark.heavy),
    "namespaces",
]
PATIENCE = 600
"""Seconds for a command that is not about time: the machine may be busy, or stand still."""


@cache
def found(engine: str) -> Sandbox | str:
    try:
        return find_sandbox(engine, limits=LIMITS)  # type: ignore[arg-type]  # a name from the list
    except SandboxUnavailable as error:
        return str(error)


class Box:
    """A workspace, and a sandbox to run commands on it."""

    def __init__(self, sandbox: Sandbox, files: HostFilesystem) -> None:
        self.sandbox = sandbox
        self.files = files
        self.root = files.root

    def run(self, command: str | list[str], **options: object) -> CommandResult:
        options.setdefault("timeout", PATIENCE)
        return self.sandbox.run(self.files, command, **options)  # type: ignore[arg-type]

    def python(self, code: str, *args: object, **options: object) -> CommandResult:
        words = [self.sandbox.python, "-c", textwrap.dedent(code), *map(str, args)]
        return self.run(words, **options)

    def said(self, code: str, *args: object, **options: object) -> object:
        """Return what the code gives as the last line of its output, in JSON."""
        done = self.python(code, *args, **options)
        assert done.ok, done.stderr
        return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(params=ENGINES)
def box(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Box]:
    sandbox = found(request.param)
    if isinstance(sandbox, str):
        pytest.skip(sandbox)
    (tmp_path / "work").mkdir()
    with HostFilesystem(tmp_path / "work") as files:
        files.write("a.txt", "as it was\n")
        yield Box(sandbox, files)


def contents(root: Path) -> dict[str, bytes]:
    files = (path for path in root.rglob("*") if path.is_file())
    return {str(path.relative_to(root)): path.read_bytes() for path in files}


# What it is for


def test_what_a_command_that_ends_well_changed_is_kept(box: Box):
    done = box.run("cat a.txt; mkdir d; echo new >d/b.txt; rm a.txt")

    assert (done.returncode, done.stdout, done.kept) == (0, "as it was\n", True)
    assert contents(box.root) == {"d/b.txt": b"new\n"}
    assert os.stat(box.root / "d/b.txt").st_uid == os.stat(box.root).st_uid


def test_a_python_that_is_not_the_systems_is_found_by_its_name(box: Box):
    """As find_sandbox makes it where the system has no python3."""
    elsewhere = replace(box.sandbox, python="/somewhere/else/bin/python3.11")

    ours = elsewhere.run(box.files, "echo $PATH").stdout.strip()
    usual = box.run("echo $PATH").stdout.strip()

    assert ours == f"{usual}:/somewhere/else/bin"


def test_what_a_command_that_fails_changed_is_not_kept(box: Box):
    done = box.run("echo new >b.txt; rm a.txt; echo why >&2; exit 3")

    assert (done.returncode, done.stderr, done.kept) == (3, "why\n", False)
    assert contents(box.root) == {"a.txt": b"as it was\n"}


def test_a_command_that_takes_too_long_has_never_run(box: Box):
    done = box.run("echo new >b.txt; sleep 1000", timeout=1)

    assert done.timed_out
    assert not done.kept
    assert contents(box.root) == {"a.txt": b"as it was\n"}


def test_a_command_gets_its_input_directory_arguments_and_environment(box: Box):
    box.files.mkdir("sub dir")
    code = """
        import json, os, sys
        env = {name: os.environ[name] for name in ("ONE", "TWO")}
        print(json.dumps([sys.stdin.read(), os.getcwd(), sys.argv[1:], env]))
        """
    env = {"ONE": "it's\na $(line) \\ `x`", "TWO": ""}

    said = box.said(code, "a b", "$x'\"", cwd="/workspace/sub dir", env=env, stdin="given")

    assert said == ["given", f"{box.root}/sub dir", ["a b", "$x'\""], env]


def test_the_result_names_the_command_and_not_what_it_was_wrapped_in(box: Box):
    assert box.run(["echo", "hello"]).argv == ("echo", "hello")
    assert box.run("echo hello").argv == ("sh", "-c", "echo hello")


def test_a_program_that_is_not_there_ends_with_127(box: Box):
    done = box.run(["no-such-program"])

    assert done.returncode == 127
    assert "no-such-program" in done.stderr


def test_a_command_killed_by_a_signal_is_not_kept(box: Box):
    done = box.run("echo new >b.txt; kill -KILL $$")

    assert done.returncode == 128 + signal.SIGKILL
    assert contents(box.root) == {"a.txt": b"as it was\n"}


def test_programs_reach_themselves_over_the_loopback_device(box: Box):
    code = """
        import socket
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname()).close()
        print("true")
        """

    assert box.said(code) is True


def test_the_workspace_may_have_any_name(box: Box, tmp_path: Path):
    odd = tmp_path / 'odd, name: "it\'s" $x\n\\'
    odd.mkdir()
    with HostFilesystem(odd) as files:
        done = box.sandbox.run(files, "echo new >b.txt", timeout=PATIENCE)

    assert done.ok, done.stderr
    assert contents(odd) == {"b.txt": b"new\n"}


@pytest.mark.parametrize("env", [{"A B": "x"}, {"A=B": "x"}, {"": "x"}, {"A": "x\0y"}])
def test_an_environment_that_cannot_be_is_refused_in_words(box: Box, env: dict[str, str]):
    with pytest.raises(ToolValidationError, match="variable"):
        box.run("true", env=env)


def test_a_directory_outside_of_the_workspace_is_refused(box: Box):
    with pytest.raises(FilesystemError):
        box.run("true", cwd="..")


# The red team. Reading, writing


def test_host_files_cannot_be_read(box: Box, tmp_path: Path):
    (tmp_path / "secret").write_text("top secret")
    code = """
        import glob, json, os, sys
        places = [*sys.argv[1:], "/etc/shadow", "/home", "/sys/kernel/debug"]
        for root in glob.glob("/proc/*/root") + glob.glob("/proc/*/cwd"):
            places += [root + sys.argv[1], root + "/.." * 20 + sys.argv[1]]
        seen = []
        for place in places:
            try:
                if os.listdir(place) if os.path.isdir(place) else open(place).read(1):
                    seen.append(place)
            except OSError:
                pass
        print(json.dumps(seen))
        """

    said = box.said(code, tmp_path / "secret", box.files.store, Path(__file__))

    assert said == []
    assert box.run(["ls", "-A", str(tmp_path)]).stdout == "work\n"


def test_a_link_out_of_the_workspace_leads_nowhere(box: Box, tmp_path: Path):
    (tmp_path / "secret").write_text("top secret")
    (tmp_path / "outside").mkdir()
    (box.root / "file").symlink_to(tmp_path / "secret")
    (box.root / "up").symlink_to("../secret")

    assert box.run("cat file up").stdout == ""
    assert box.run(["ln", "-s", str(tmp_path / "outside"), "directory"]).ok
    assert not box.run("echo x >directory/planted").ok
    with pytest.raises(FilesystemError):
        box.files.write("directory/planted", "x")
    assert list((tmp_path / "outside").iterdir()) == []


def test_nothing_outside_of_the_workspace_can_be_written(box: Box, tmp_path: Path):
    code = """
        import json, os, sys
        places = ["/", "/usr", "/usr/bin", "/etc", "/bin", "/var", "/dev", "/proc", "/run", "/sys"]
        written = []
        for place in [*places, *sys.argv[1:]]:
            try:
                open(place + "/planted", "w").close()
                written.append(place)
            except OSError:
                pass
        for path in ["/etc/passwd", "/bin/sh", "/usr/bin/env", "/etc/ld.so.cache"]:
            try:
                open(path, "r+").close()
                written.append(path)
            except OSError:
                pass
        print(json.dumps(written))
        """

    # Its own path may be in /tmp, where a command can write for as long as it runs.
    assert set(box.said(code, tmp_path, "/workspace/..")) <= {str(tmp_path)}  # type: ignore[call-overload]
    assert {path.name for path in tmp_path.iterdir()} == {"work"}


def test_what_a_command_leaves_in_tmp_is_gone(box: Box):
    assert box.run("echo x >/tmp/left; echo x >/dev/shm/left; cat /tmp/left").stdout == "x\n"

    assert "left" not in box.run("ls -A /tmp /dev/shm").stdout.split()


# Network


@contextmanager
def listening(kind: int, address: object, family: int = socket.AF_INET) -> Iterator[socket.socket]:
    with socket.socket(family, kind) as server:
        server.bind(address)  # type: ignore[arg-type]  # of the family
        if kind == socket.SOCK_STREAM:
            server.listen()
        server.setblocking(False)
        yield server


def test_no_service_of_the_host_can_be_reached(box: Box):
    name = f"\0wink-{os.getpid()}"
    code = """
        import json, socket, sys
        tcp, udp, name = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
        reached = []
        def attempt(what, family, kind, address):
            try:
                with socket.socket(family, kind) as client:
                    client.settimeout(2)
                    client.connect(address)
                    client.send(b"x")
                    reached.append(what)
            except OSError:
                pass
        attempt("tcp", socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", tcp))
        attempt("abstract", socket.AF_UNIX, socket.SOCK_STREAM, "\\0" + name)
        attempt("raw", socket.AF_INET, socket.SOCK_RAW, ("127.0.0.1", 0))
        attempt("elsewhere", socket.AF_INET, socket.SOCK_DGRAM, ("192.0.2.1", 9))
        attempt("udp", socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", udp))
        devices = [name for _, name in socket.if_nameindex()]
        print(json.dumps([[each for each in reached if each != "udp"], devices]))
        """
    with ExitStack() as stack:
        tcp = stack.enter_context(listening(socket.SOCK_STREAM, ("127.0.0.1", 0)))
        udp = stack.enter_context(listening(socket.SOCK_DGRAM, ("127.0.0.1", 0)))
        abstract = stack.enter_context(listening(socket.SOCK_STREAM, name, socket.AF_UNIX))

        said = box.said(code, tcp.getsockname()[1], udp.getsockname()[1], name[1:])

        # A datagram to nobody leaves without an error: what matters is that none came.
        assert said == [[], ["lo"]]
        for server in (tcp, abstract):
            with pytest.raises(BlockingIOError):
                server.accept()
        with pytest.raises(BlockingIOError):
            udp.recv(10)


def test_sockets_that_no_namespace_holds_cannot_be_made(box: Box):
    """From a virtual machine, one of them leads to its host."""
    code = """
        import json, socket
        made = []
        for family in range(50):
            for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET):
                try:
                    socket.socket(family, kind).close()
                except OSError:
                    continue
                made.append(family)
        print(json.dumps(sorted(set(made))))
        """
    usual = {socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK}

    made = set(box.said(code))  # type: ignore[call-overload]  # a list

    assert {socket.AF_UNIX, socket.AF_INET} <= made <= usual


def test_a_socket_in_the_workspace_leads_to_nobody(box: Box, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(box.root)
    code = """
        import json, socket
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            print(json.dumps(client.connect_ex("door") == 0))
        """
    with listening(socket.SOCK_STREAM, "door", socket.AF_UNIX):
        assert box.said(code) is False


# Using things up


def test_a_fork_bomb_comes_to_an_end(box: Box):
    code = """
        import json, os, time
        count = 0
        try:
            while count < 2000:
                if os.fork() == 0:
                    time.sleep(1000)
                count += 1
        except OSError:
            pass
        print(json.dumps(count))
        """

    said = box.said(code)

    assert isinstance(said, int)
    assert 10 < said < LIMITS.processes


def test_a_fork_bomb_that_spreads_is_killed_in_time(box: Box):
    done = box.run("echo new >b.txt; f() { f | f & f; }; f", timeout=5)

    assert not done.kept
    assert contents(box.root) == {"a.txt": b"as it was\n"}
    assert box.run("true").ok


def test_a_memory_bomb_is_stopped(box: Box):
    done = box.python("x = bytearray(1 << 30); print(len(x))")

    assert not done.ok
    assert done.stdout == ""


def test_many_small_memory_bombs_are_stopped(box: Box):
    """Each alone is well below the limit."""
    code = """
        import os, sys, time
        for _ in range(8):
            if os.fork() == 0:
                x = bytearray(100 << 20)
                time.sleep(1000)
        sys.exit(os.wait()[1] != 0)
        """

    done = box.python(code)

    assert not done.kept
    assert not done.timed_out


@pytest.mark.parametrize("place", ["/tmp", "/dev/shm"])
def test_what_is_not_of_the_workspace_is_small(box: Box, place: str):
    done = box.run(f"head -c {16 * MIB} /dev/zero >{place}/big; stat -c %s {place}/big")

    assert int(done.stdout) <= LIMITS.scratch


def test_a_file_that_grows_too_large_is_refused(box: Box):
    done = box.run(f"head -c {64 * MIB} /dev/zero >big")

    assert not done.ok
    assert contents(box.root) == {"a.txt": b"as it was\n"}


@pytest.mark.heavy
def test_a_disk_flood_deep_down_is_stopped(box: Box):
    nest = "for _ in range(1200): os.mkdir('nested'); os.chdir('nested')"
    flood = "[open(f'{n}', 'wb').write(bytes(1 << 20)) for n in range(4096)]"

    done = box.python(f"import os\n{nest}\n{flood}")

    assert done.stopped == "it wrote more than 32 MiB to the disk"
    assert not done.kept


@pytest.mark.heavy
def test_a_disk_flood_is_stopped(box: Box):
    flood = "n=0; while :; do n=$((n+1)); head -c 4194304 /dev/zero >big-$n || exit; done"

    done = box.run(flood)

    assert done.stopped == "it wrote more than 32 MiB to the disk"
    assert not done.kept
    assert contents(box.root) == {"a.txt": b"as it was\n"}


def test_an_output_flood_is_cut(box: Box):
    done = box.run(f"yes | head -c {64 * MIB}; echo end", output_limit=10_000)

    assert done.ok
    assert done.stdout_truncated
    assert len(done.stdout) < 11_000
    assert done.stdout.endswith("end\n")


@pytest.mark.heavy
def test_an_endless_processor_hog_is_killed(box: Box):
    limits = SandboxLimits(memory=256 * MIB, cpu_seconds=1)
    settings = SandboxSettings(limits=limits)
    sandbox = Sandbox(engine=box.sandbox.engine, settings=settings, python=box.sandbox.python)

    done = sandbox.run(box.files, "while :; do :; done", timeout=PATIENCE)

    assert not done.ok
    assert not done.timed_out


def test_the_result_names_the_limit_that_was_hit(box: Box):
    memory = "x = bytearray(1 << 30)"
    forks = "for i in $(seq 99); do sleep 1 & done; wait; exit 4"

    grown = box.run(f"exec head -c {64 * MIB} /dev/zero >big")

    assert grown.stopped == "a file grew to more than 32 MiB"
    if os.geteuid() != 0 or box.sandbox.name == "podman":
        return  # no cgroup counts, or nobody but podman sees it
    assert box.python(memory).stopped == "it used more than 256 MiB of memory"
    assert "limit: it used more than 256 MiB" in box.run(f"python3 -c '{memory}'; exit 3").stderr
    assert "limit: it tried to start more than 48 processes" in box.run(forks).stderr
    assert box.run("true; exit 3").stderr == ""


def processes_with(mark: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if mark in line:
            found.append(line)
    return found


@pytest.mark.parametrize("start", ["sleep {} &", "setsid sleep {} >/dev/null 2>&1 &"])
def test_nothing_is_left_running(box: Box, start: str):
    mark = f"100000.{os.getpid()}"

    done = box.run(f"{start.format(mark)} (trap '' TERM HUP INT; sleep {mark} & ) ; echo done")

    assert done.stdout == "done\n"
    assert processes_with(mark) == []


# Other processes, the kernel


@pytest.fixture
def victim() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "1000"]) as process:
        yield process
        process.kill()


def test_signals_do_not_reach_the_host(box: Box, victim: subprocess.Popen[bytes]):
    code = """
        import os, signal, sys
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        for pid in (int(sys.argv[1]), int(sys.argv[2]), -1):
            try:
                os.kill(pid, signal.SIGTERM)
            except OSError:
                pass
        """
    box.python(code, victim.pid, os.getpid())

    assert victim.poll() is None


def test_processes_of_the_host_are_neither_seen_nor_traced(
    box: Box, victim: subprocess.Popen[bytes]
):
    code = """
        import ctypes, json, os, sys
        pid = int(sys.argv[1])
        libc = ctypes.CDLL(None)
        attached = libc.ptrace(16, pid, 0, 0) == 0
        pids = [name for name in os.listdir("/proc") if name.isdigit()]
        print(json.dumps([attached, len(pids) < 10, [p for p in pids if p == str(pid)]]))
        """
    # A number that nothing in there has.
    assert victim.pid > 100

    assert box.said(code, victim.pid) == [False, True, []]


def test_nothing_can_be_mounted_and_no_namespace_made(box: Box):
    code = """
        import ctypes, json
        libc = ctypes.CDLL(None)
        done = [
            libc.mount(b"none", b"/tmp", b"tmpfs", 0, None),
            libc.mount(b"/workspace", b"/tmp", None, 4096, None),
            libc.mount(None, b"/usr", None, 4096 | 32, None),
            libc.umount2(b"/usr", 2),
            libc.unshare(0x10000000),
            libc.unshare(0x20000),
            libc.chroot(b"/tmp"),
            libc.sethostname(b"x", 1),
        ]
        print(json.dumps(done))
        """

    assert box.said(code) == [-1] * 8


def test_no_user_namespace_comes_with_a_new_process(box: Box):
    code = """
        import ctypes, json, os, platform
        libc = ctypes.CDLL(None, use_errno=True)
        number = {"x86_64": 56, "aarch64": 220}[platform.machine()]
        child = libc.syscall(number, 0x10000000 | 17, 0, 0, 0, 0)
        if child == 0:
            os._exit(0)
        print(json.dumps(child))
        """

    assert box.said(code) == -1


def test_devices_can_neither_be_made_nor_found(box: Box):
    code = """
        import json, os, stat
        made = []
        for place in ("/workspace/device", "/tmp/device", "/dev/device"):
            for kind in (stat.S_IFCHR, stat.S_IFBLK):
                try:
                    os.mknod(place, kind | 0o600, os.makedev(1, 1))
                    made.append(place)
                except OSError:
                    pass
        usual = {"null", "zero", "full", "random", "urandom", "tty", "console", "ptmx"}
        modes = {e.name: e.stat(follow_symlinks=False).st_mode for e in os.scandir("/dev")}
        devices = {name for name, mode in modes.items() if stat.S_ISCHR(mode) or stat.S_ISBLK(mode)}
        print(json.dumps([made, sorted(devices - usual)]))
        """

    assert box.said(code) == [[], []]


def test_rights_are_gone_for_good(box: Box):
    """No capability, and none to be had from a program with the set-user-id bit."""
    program = box.root / "cat"
    program.write_bytes(Path("/bin/cat").read_bytes())
    program.chmod(0o4755)

    status = dict(
        line.split(":\t", 1)
        for line in box.run(["./cat", "/proc/self/status"]).stdout.splitlines()
        if ":\t" in line
    )

    assert {status[name].strip("0") for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")} == {""}
    assert status["NoNewPrivs"] == "1"
    assert status["Seccomp"] == "2"
    assert set(status["Uid"].split()) == {"1000"}


def test_no_program_is_left_that_gives_rights_away(box: Box):
    """One with a set-user-id bit would make whoever starts it outside the workspace's owner."""
    code = """
        import json, os, stat
        made = []
        open("plain", "w").close()
        def attempt(name, function, *args):
            try:
                function(*args)
                made.append(name)
            except OSError:
                pass
        attempt("chmod", os.chmod, "plain", 0o4755)
        attempt("setgid", os.chmod, "plain", 0o2755)
        attempt("open", os.open, "opened", os.O_CREAT | os.O_WRONLY, 0o4755)
        attempt("fchmod", os.fchmod, os.open("plain", os.O_RDONLY), 0o6755)
        attempt("mknod", os.mknod, "noded", stat.S_IFREG | 0o4755)
        os.chmod("plain", 0o751)
        os.mkdir("directory", 0o755)
        modes = [oct(os.stat(name).st_mode & 0o7777) for name in os.listdir(".")]
        print(json.dumps([made, sorted(modes)]))
        """

    assert box.said(code) == [[], ["0o644", "0o751", "0o755"]]
    assert box.run("cp -p /bin/cat own; install -m 4755 /bin/cat own; ls -l own").ok
    modes = [path.lstat().st_mode for path in box.root.rglob("*")]
    assert [mode for mode in modes if mode & 0o6000] == []


def test_the_environment_of_this_process_stays_here(box: Box, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WINK_SECRET", "hunter2-in-the-environment")
    code = """
        import glob, json, os
        seen = "\\n".join(f"{name}={value}" for name, value in os.environ.items()).encode()
        for path in glob.glob("/proc/*/environ") + glob.glob("/proc/*/cmdline"):
            try:
                seen += open(path, "rb").read()
            except OSError:
                pass
        print(json.dumps([b"in-the-" + b"environment" in seen, sorted(os.environ)]))
        """

    hidden, names = box.said(code)  # type: ignore[misc]  # a pair, by the code

    assert hidden is False
    usual = {"HOME", "HOSTNAME", "LANG", "LC_CTYPE", "PATH", "PWD", "TERM", "SHLVL"}
    assert set(names) <= usual | set(box.sandbox.environment(box.root).env)


def test_the_environment_of_a_command_is_its_own_affair(box: Box, tmp_path: Path):
    """What it is given does not reach the programs that shut it in."""
    program = box.root / "bin"
    program.mkdir()
    for name in ("sh", "bwrap", "prlimit", "setpriv", "podman", "runc", "conmon", "python", "env"):
        (program / name).write_text(f"#!/bin/sh\necho caught >{tmp_path}/{name}\n")
        (program / name).chmod(0o755)
    (box.root / "rc").write_text(f"echo caught >{tmp_path}/rc\n")
    for root in (str(box.root), "/workspace"):
        env = {"PATH": f"{root}/bin", "ENV": f"{root}/rc", "BASH_ENV": f"{root}/rc"}

        done = box.run(["/bin/cat", "a.txt"], env={**env, "LD_PRELOAD": f"{root}/no.so"})

        assert done.stderr.count("LD_PRELOAD") == 1  # for cat, and for nothing before it

    assert {path.name for path in tmp_path.iterdir()} == {"work"}


def test_a_command_has_no_descriptors_but_its_own(box: Box):
    code = "import json, os; print(json.dumps(sorted(map(int, os.listdir('/proc/self/fd')))[:3]))"
    with (box.root.parent / "open").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        count = box.said("import json, os; print(json.dumps(len(os.listdir('/proc/self/fd'))))")

    assert box.said(code) == [0, 1, 2]
    assert count == 4  # and the one that lists them


def test_the_kernel_cannot_be_set_up_otherwise(box: Box):
    places = [
        "/proc/sys/kernel/core_pattern",
        "/proc/sys/kernel/hostname",
        "/proc/sys/vm/drop_caches",
        "/proc/sysrq-trigger",
        "/sys/kernel/mm/transparent_hugepage/enabled",
        "/sys/fs/cgroup/cgroup.procs",
        "/sys/fs/cgroup/pids/cgroup.procs",
        "/sys/power/state",
    ]
    code = """
        import json, sys
        done = []
        for place in sys.argv[1:]:
            try:
                with open(place, "r+b", buffering=0) as file:
                    file.write(file.read(100) or b"x")
                done.append(place)
            except OSError:
                pass
        for place in ("/proc/kcore", "/proc/kmsg", "/proc/keys"):
            try:
                if open(place, "rb").read(10):
                    done.append(place)
            except OSError:
                pass
        print(json.dumps(done))
        """

    assert box.said(code, *places) == []


IN_PROC = """
    import json, os
    found = []
    for folder in ("/proc", *(each.path for each in os.scandir("/proc") if each.is_dir())):
        if folder[6:].isdigit() or os.path.islink(folder):
            continue
        for name in os.listdir(folder):
            path = os.path.join(folder, name)
            if os.path.islink(path) or os.path.isdir(path) or os.path.samefile(path, "/dev/null"):
                continue
            secret = folder == "/proc" and not os.stat(path).st_mode & 0o004
            for mode in (os.O_WRONLY, *([os.O_RDONLY] if secret else [])):
                try:
                    os.close(os.open(path, mode | os.O_NONBLOCK))
                    found.append(path)
                except OSError:
                    pass
    print(json.dumps(found))
    """


def test_root_has_no_more_rights_in_proc_than_others(box: Box):
    """To the kernel, a command on root's files is one of root's processes."""
    assert box.said(IN_PROC) == []


def test_what_proc_has_is_covered_when_a_command_starts(box: Box):
    """A driver that is loaded later brings entries of its own."""
    if os.geteuid() != 0:
        pytest.skip("only root can hide what is in /proc")
    kits: list[SystemFiles] = []
    thread = threading.Thread(target=lambda: kits.append(_made_without_proc()))
    thread.start()
    thread.join()
    sandbox = replace(box.sandbox, engine=type(box.sandbox.engine)(kits[0]))

    assert Box(sandbox, box.files).said(IN_PROC) == []


def _made_without_proc() -> SystemFiles:
    """Make the files of the engines while this thread, and it alone, sees nothing in /proc."""
    libc = ctypes.CDLL(None, use_errno=True)
    private, new_mounts = 0x4_0000 | 0x4000, 0x2_0000
    assert libc.unshare(new_mounts) == 0
    assert libc.mount(b"none", b"/", None, private, None) == 0
    assert libc.mount(b"tmpfs", b"/proc", b"tmpfs", 0, None) == 0
    return SystemFiles()


KEYS = {"x86_64": (248, 250), "aarch64": (217, 219)}


def test_the_keys_of_this_process_stay_here(box: Box):
    numbers = KEYS.get(os.uname().machine)
    if numbers is None:
        pytest.skip(f"the numbers of the calls are not known for {os.uname().machine}")
    add_key, keyctl = numbers
    libc = ctypes.CDLL(None, use_errno=True)
    mine = libc.syscall(add_key, b"user", b"wink-secret", b"hunter2", 7, -3)
    if mine < 0:
        pytest.skip(f"there are no keyrings here: {os.strerror(ctypes.get_errno())}")
    code = """
        import ctypes, json, sys
        libc = ctypes.CDLL(None)
        buffer = ctypes.create_string_buffer(100)
        keyctl, key = int(sys.argv[1]), int(sys.argv[2])
        found = libc.syscall(keyctl, 10, -3, b"user", b"wink-secret", 0)
        read = [libc.syscall(keyctl, 11, each, buffer, 100) for each in (key, found)]
        print(json.dumps([found >= 0, max(read) >= 0, buffer.value.decode()]))
        """
    try:
        assert box.said(code, keyctl, mine) == [False, False, ""]
    finally:
        libc.syscall(keyctl, 3, mine)


# Nothing is left of it


def test_nothing_is_left_of_a_command_that_was_killed(box: Box, monkeypatch: pytest.MonkeyPatch):
    from weakincentives.contrib.tools.sandbox import engines, limits

    name = f"wink-test-{os.getpid()}"
    for module in (engines, limits):
        monkeypatch.setattr(module, "new_name", lambda: name)
    places = [box.sandbox.engine.kit.place, Path("/run/runc"), Path("/run/crun")]  # type: ignore[attr-defined]
    before = [sorted(place.glob("*")) for place in places]

    assert box.run("sleep 1000", timeout=1).timed_out

    assert [sorted(place.glob("*")) for place in places] == before
    assert sweep_cgroups(patience=240)
    assert [place for place, _ in cgroup_mounts() if (place / name).exists()] == []


@pytest.mark.heavy
def test_it_is_the_same_where_there_is_no_overlay(box: Box, monkeypatch: pytest.MonkeyPatch):
    """Commands work on the directory itself then, and what they changed is found by looking."""
    monkeypatch.setattr(
        "weakincentives.filesystem.commands.find_way", lambda *_: "there shall be none"
    )
    mark = f"200000.{os.getpid()}"

    kept = box.run("echo two >>a.txt; touch b.txt")
    failed = box.run("rm a.txt; echo three >c.txt; false")
    left = box.run(f"setsid sleep {mark} >/dev/null 2>&1 & echo done")
    late = box.run("rm a.txt; sleep 1000", timeout=2)
    flood = box.run("while :; do head -c 9999999 /dev/zero >big-$(date +%N); done")

    assert [each.engine for each in (kept, failed)] == ["scan", "scan"]
    assert (kept.ok, failed.kept, late.timed_out) == (True, False, True)
    assert left.stdout == "done\n"
    assert processes_with(mark) == []
    assert flood.stopped == "it wrote more than 32 MiB to the disk"
    assert contents(box.root) == {"a.txt": b"as it was\ntwo\n", "b.txt": b""}


def test_root_does_not_stay_root_where_others_own_the_files(box: Box, tmp_path: Path):
    if os.geteuid() != 0:
        pytest.skip("only root can give files to others")
    with place_for_others() as place:
        root = place / "work"
        root.mkdir()
        os.chown(root, 12345, 23456)
        with HostFilesystem(root) as files:
            done = box.sandbox.run(files, "echo new >b.txt", timeout=PATIENCE)
            assert done.ok, done.stderr
        status = os.stat(root / "b.txt")

    assert (status.st_uid, status.st_gid) == (12345, 23456)


@pytest.mark.parametrize("engine", ENGINES)
def test_what_only_the_caller_can_enter_is_no_obstacle(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A umask of 077, and a directory for temporary files below one that is the caller's alone.

    What is made for the command can be read there; what the command makes has that umask.
    """
    tmp_path.chmod(0o700)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = os.umask(0o077)
    try:
        sandbox = found(engine)
        if isinstance(sandbox, str):
            pytest.skip(sandbox)
        with place_for_others() if os.geteuid() == 0 else tempfile.TemporaryDirectory() as place:
            with HostFilesystem(place) as files:
                done = sandbox.run(files, "cat /etc/passwd; ls /etc >b.txt", timeout=PATIENCE)
            assert done.ok, done.stderr
            mode = os.stat(Path(place, "b.txt")).st_mode
    finally:
        os.umask(before)

    assert "user:x:1000" in done.stdout
    assert mode & 0o777 == (0o644 if engine == "podman" else 0o600)  # podman sets its own


# Which one


def test_the_first_that_works_is_taken_and_the_others_have_reasons(
    monkeypatch: pytest.MonkeyPatch,
):
    from weakincentives.contrib.tools.sandbox import engines

    for engine in ("bubblewrap", "namespaces"):
        if isinstance(found(engine), str):
            pytest.skip(f"{engine} does not work here")

    first = find_sandbox()
    monkeypatch.setattr(engines, "filter_program", lambda: None)
    second = find_sandbox()

    assert (first.name, first.passed_over) == ("namespaces", ())
    assert second.name == "bubblewrap"
    machine = os.uname().machine
    reason = f"it has no filter of system calls for {machine}"
    assert second.passed_over == (("namespaces", reason),)


def test_none_is_taken_only_if_asked_for_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    from weakincentives.contrib.tools.sandbox import engines

    monkeypatch.setattr(engines.sys, "platform", "plan9")

    with pytest.raises(SandboxUnavailable) as refusal:
        find_sandbox()
    unconfined = find_sandbox("none")

    assert "sandboxes need Linux, this is plan9" in str(refusal.value)
    assert unconfined.name == "none"


def test_without_a_sandbox_a_command_is_still_undone_and_its_environment_clean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("WINK_SECRET", "hunter2")
    with HostFilesystem(tmp_path) as files:
        box = Box(find_sandbox("none", limits=LIMITS), files)

        assert box.run('echo "$WINK_SECRET" >kept').ok
        assert not box.run("echo x >undone; false").kept
        flood = box.run("while :; do echo x; head -c 9999999 /dev/zero >big-$(date +%N); done")
        bomb = box.python("x = bytearray(1 << 30); import time; time.sleep(9999)")
        forks = box.run("for i in $(seq 99); do sleep 1000 & done; wait")

    assert forks.stopped == "it started more than 48 processes"
    assert contents(tmp_path) == {"kept": b"\n"}
    assert flood.stopped == "it wrote more than 32 MiB to the disk"
    assert bomb.stopped == "it used more than 256 MiB of memory"


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="sandbox must be one of"):
        find_sandbox("docker")  # type: ignore[arg-type]  # that is the point
    with pytest.raises(ValueError, match="an image needs podman"):
        find_sandbox("bubblewrap", image="mine")
    with pytest.raises(FileNotFoundError, match="no-such-directory"):
        find_sandbox(read_only=["/no-such-directory"])
    with pytest.raises(ValueError, match="memory must be positive"):
        SandboxLimits(memory=0)


@pytest.mark.parametrize("memory", [None, "512 MiB"])
def test_a_limit_that_is_no_number_is_refused_where_it_is_set(memory: object):
    with pytest.raises(TypeError):
        SandboxLimits(memory=memory)  # type: ignore[arg-type]  # pyright: ignore


def test_root_is_refused_where_nothing_would_limit_it(monkeypatch: pytest.MonkeyPatch):
    from weakincentives.contrib.tools.sandbox import limits as sandbox_limits

    if os.geteuid() != 0:
        pytest.skip("others are limited without a cgroup")
    monkeypatch.setattr(sandbox_limits, "cgroup_mounts", lambda: iter(()))

    with pytest.raises(SandboxUnavailable, match="namespaces: root can be limited only by cgroups"):
        find_sandbox("namespaces")


def test_the_filter_knows_its_machines():
    programs = {name: filter_program(name) for name in ("x86_64", "aarch64", "vax")}

    assert programs["vax"] is None
    assert programs["x86_64"] != programs["aarch64"]
    assert {len(each or b"") % 8 for each in programs.values()} == {0}


def test_a_container_is_allowed_less_than_podman_would(tmp_path: Path):
    given = {
        "defaultAction": "SCMP_ACT_ERRNO",
        "syscalls": [
            {"names": ["mount", "read", "clone", "chmod", "socket"], "action": "SCMP_ACT_ALLOW"},
            {"names": ["keyctl"], "action": "SCMP_ACT_ALLOW"},
        ],
    }
    (tmp_path / "given.json").write_text(json.dumps(given))

    rules = json.loads(container_profile([tmp_path / "given.json"]))["syscalls"]

    assert rules[0] == {"names": ["read"], "action": "SCMP_ACT_ALLOW"}
    assert rules[1]["names"] == sorted(REFUSED)
    assert rules[1]["action"] == "SCMP_ACT_ERRNO"
    unconditional = [rule for rule in rules if rule["action"] == "SCMP_ACT_ALLOW"][1:]
    assert all(rule["args"] for rule in unconditional)
    assert container_profile([tmp_path / "none.json"]) == ""


@pytest.mark.parametrize("engine", ENGINES)
def test_directories_can_be_shown_read_only(engine: str, tmp_path: Path):
    if isinstance(found(engine), str):
        pytest.skip(f"{engine} does not work here")
    (tmp_path / "work").mkdir()
    (tmp_path / "shown").mkdir()
    (tmp_path / "shown" / "a").write_text("shown")
    sandbox = find_sandbox(engine, read_only=[tmp_path / "shown"])  # type: ignore[arg-type]
    with HostFilesystem(tmp_path / "work") as files:
        shown = sandbox.run(files, ["cat", str(tmp_path / "shown" / "a")], timeout=PATIENCE)
        written = sandbox.run(files, ["touch", str(tmp_path / "shown" / "b")], timeout=PATIENCE)

    assert shown.stdout == "shown"
    assert not written.ok


def test_a_disk_that_others_fill_is_not_held_against_a_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Only what is in its layer counts, unless half of what was free is gone."""
    from weakincentives.contrib.tools.sandbox import limits as sandbox_limits

    free = 1000 * MIB
    monkeypatch.setattr(sandbox_limits, "_free", lambda place: free)
    monkeypatch.setattr(sandbox_limits, "LOOK", 0.0)
    monkeypatch.setattr(sandbox_limits, "REST", 0.0)
    watch = SandboxWatch(LIMITS, places=[tmp_path], processes=False)
    running = Running(os.getpid(), tmp_path)

    free = 600 * MIB
    assert watch(running) is None
    free = 400 * MIB
    assert watch(running) == "it wrote more than 32 MiB to the disk"


@pytest.mark.parametrize("reported", [True, False])
def test_nor_is_it_where_there_is_no_overlay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reported: bool
):
    """Only what has changed in the workspace since the command began counts there."""
    from weakincentives.contrib.tools.sandbox import limits as sandbox_limits

    free = 1000 * MIB
    monkeypatch.setattr(sandbox_limits, "_free", lambda place: free if reported else None)
    monkeypatch.setattr(sandbox_limits, "LOOK", 0.0)
    monkeypatch.setattr(sandbox_limits, "REST", 0.0)
    monkeypatch.setattr(sandbox_limits, "COARSE", 0.0)
    (tmp_path / "before").write_bytes(b"x" * 3 * MIB)
    while time.time() <= (tmp_path / "before").stat().st_ctime:
        time.sleep(0.01)
    limits = replace(LIMITS, disk=2 * MIB)
    watch = SandboxWatch(limits, places=[tmp_path], processes=False, workspace=tmp_path)
    running = Running(os.getpid(), None)

    free = 600 * MIB
    assert watch(running) is None
    (tmp_path / "new").write_bytes(b"x" * 3 * MIB)
    assert watch(running) == "it wrote more than 2 MiB to the disk"
    (tmp_path / "new").unlink()
    assert watch(running) is None


# An ordinary user


CHILD = '''
import json, sys
from weakincentives.contrib.tools.sandbox.engines import find_sandbox
from weakincentives.contrib.tools.sandbox.limits import SandboxLimits
from weakincentives.filesystem import HostFilesystem

limits = SandboxLimits(memory=128 << 20, processes=32, disk=16 << 20, scratch=8 << 20)
sandbox = find_sandbox(sys.argv[1], limits=limits)
forks = """
import os, time
count = 0
try:
    while count < 500:
        if os.fork() == 0:
            time.sleep(9999)
        count += 1
except OSError:
    print(count)
"""
bombs = """
import os, time
for _ in range(8):
    if os.fork() == 0:
        x = bytearray(60 << 20)
        break
time.sleep(9999)
"""
with HostFilesystem(sys.argv[2]) as files:
    def run(*words):
        done = sandbox.run(files, list(words) if len(words) > 1 else words[0], timeout=600)
        return [done.returncode, done.stdout, done.stopped, done.kept]
    print(json.dumps([
        run("id -u; echo new >b.txt"),
        run("echo new >c.txt; false"),
        run("cat /etc/shadow " + sys.argv[3]),
        run(sandbox.python, "-c", forks),
        run(sandbox.python, "-c", bombs),
        run("n=0; while :; do n=$((n+1)); head -c 4000000 /dev/zero >$n; done"),
    ]))
'''


@pytest.mark.heavy
@pytest.mark.parametrize("engine", ["bubblewrap", "namespaces"])
def test_an_ordinary_user_has_the_same(engine: str, ordinary_user: OrdinaryUser):
    if isinstance(found(engine), str):
        pytest.skip(f"needs {engine}")
    with place_for_others(4321) as home:
        root = home / "work"
        root.mkdir()
        (home / "secret").write_text("top secret")
        for path in (root, home / "secret"):
            os.chown(path, 4321, 4321)
        done = ordinary_user.run(
            "-c", CHILD, engine, str(root), str(home / "secret"),
            home=home, cwd=home, uid=4321, env={"PATH": os.environ["PATH"]},
        )  # fmt: skip
        kept = contents(root)

    assert done.returncode == 0, done.stderr
    first, failed, secret, forks, bombs, flood = json.loads(done.stdout)
    assert first == [0, "1000\n", None, True]
    assert failed == [1, "", None, False]
    assert secret[1] == ""
    assert 5 < int(forks[1]) < 32
    assert bombs[2] == "it used more than 128 MiB of memory"
    assert flood[2] == "it wrote more than 16 MiB to the disk"
    assert kept == {"b.txt": b"new\n"}
