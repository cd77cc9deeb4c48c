"""Our own code and state, and what root reads back, are out of reach of commands in a sandbox."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import tempfile
from pathlib import Path

import pytest

from installed import Installed
from weakincentives.contrib.tools.sandbox.engines import Sandbox, SandboxedCommand, find_sandbox
from weakincentives.contrib.tools.sandbox.limits import SandboxLimits, SandboxWatch
from weakincentives.errors import SandboxUnavailable
from weakincentives.filesystem import HostFilesystem
from weakincentives.filesystem.commands import Running

ENGINES = [
    pytest.param("podman", marks=pytest.mark.heavy),
    pytest.param("bubblewrap", marks=pytest.mark.heavy),
    "namespaces",
]
PATIENCE = 600


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    try:
        find_sandbox(request.param)
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    return request.param


@pytest.fixture
def ours(tmp_path: Path) -> Installed:
    return Installed(tmp_path)


ATTACKS = """
import weakincentives.filesystem.commands as commands
from weakincentives.contrib.tools.sandbox.engines import find_sandbox
engine, overlay = json.loads(os.environ["HOW"])
if not overlay:
    commands.find_way = lambda *_: "none here"
sandbox = find_sandbox(engine)
(root / "linked").symlink_to("tools/.venv")
text = (root / launcher).read_text()
env = "tools/.venv"
attacks = [
    f"echo evil >> {launcher}",
    f"echo evil > {launcher}",
    f"echo evil > /workspace/{launcher}",
    f"echo evil > {root}/{launcher}",
    f"rm {launcher}",
    f"mv {launcher} {launcher}.old",
    f"cd linked/lib && echo evil > evil.pth",
    f"echo evil > {place}/../sitecustomize.py",
    f"mkdir -p {place}/contrib/tools/__pycache__; echo > {place}/contrib/tools/__pycache__/x.pyc",
    f"echo home=/workspace > {env}/pyvenv.cfg",
    f"rm {env}/bin/python",
    f"ln -sf /workspace/evil {env}/bin/python",
    f"mv {env} elsewhere",
    "mv tools elsewhere && mkdir -p tools/.venv",
    f"ln {launcher} twin && echo evil >> twin",
    f"mount --bind /tmp {env} && touch {env}/evil",
    f"umount {env}; echo evil >> {launcher}",
    f"chmod 777 {launcher}",
    f"touch -d 2001-01-01 {launcher}",
    f"truncate -s 0 {launcher}",
]
with HostFilesystem(root) as fs:
    for attack in attacks:
        try:
            done = sandbox.run(fs, f"touch mark; {attack}", timeout=600)
        except ProtectedPath:
            done = None
        if done is not None and done.ok and not attack.startswith(("umount", "mkdir -p")):
            raise SystemExit(f"possible: {attack}: {done}")
        assert (root / launcher).read_text() == text, attack
        assert not list(root.rglob("evil*")) and not list(root.rglob("sitecustomize.py")), attack
        assert (root / env / "bin/python").resolve() == Path(sys.executable).resolve(), attack
    fine = sandbox.run(fs, f"cat {launcher}; echo fine > tools/mine.py", timeout=600)
    assert fine.ok and fine.stdout == text, fine
    print((root / "tools/mine.py").read_text())
"""


@pytest.mark.heavy
@pytest.mark.parametrize("overlay", [True, False])
def test_our_own_code_in_the_workspace_is_read_only(ours: Installed, engine: str, overlay: bool):
    assert ours.run(ATTACKS, HOW=json.dumps([engine, overlay])) == "fine\n\n"


def test_the_state_directory_cannot_be_read(ours: Installed, engine: str):
    """It has the key that seals what we act upon later."""
    state = ours.root / "home/.state"
    said = ours.run(
        """
from weakincentives.contrib.tools.sandbox.engines import find_sandbox
from weakincentives.core.state import Seals
Seals("test")
sandbox = find_sandbox(os.environ["HOW"])
with HostFilesystem(root, store=root.parent / "store") as fs:
    script = "cd home/.state; ls -A wink; cat wink/key; cp -r wink copied; ls -A copied"
    script += "; cat /workspace/home/.state/wink/key"
    done = sandbox.run(fs, script, timeout=600)
    written = sandbox.run(fs, "echo mine > home/.state/wink/key", timeout=600)
    removed = sandbox.run(fs, "rm -rf home/.state || mv home other", timeout=600)
print(json.dumps([done.stdout, written.ok, removed.ok]))
""",
        XDG_STATE_HOME=str(state),
        HOW=engine,
    )

    assert json.loads(said) == ["", False, False]
    assert (state / "wink/key").stat().st_size == 32


@pytest.mark.heavy
def test_programs_of_ours_are_started_from_what_was_read_before(tmp_path: Path, ours: Installed):
    """Whatever becomes of their files, and of what Python loads when it starts."""
    mark = tmp_path / "mark"
    ours.run(
        """
from weakincentives.contrib.tools import AstevalSection
from weakincentives.contrib.tools.sandbox.engines import find_sandbox
from weakincentives.mcp.server_process import _launched
import subprocess
package = root / place
sandbox = find_sandbox("namespaces")
registry = weakincentives.ToolRegistry.from_section(AstevalSection(), workspace=root)
evil = f"open({os.environ['MARK']!r}, 'w').close()"
# As if somebody had got past all that protects them.
for name in ("contrib/tools/sandbox/launcher.py", "contrib/tools/_asteval_child.py",
             "mcp/server_launcher.py", "../sitecustomize.py", "../usercustomize.py"):
    (package / name).write_text(evil)
(package.parent / "evil.pth").write_text("import os; " + evil)
os.environ["PYTHONPATH"] = str(package.parent)
(root.parent / "other").mkdir()
with HostFilesystem(root.parent / "other") as fs:
    assert sandbox.run(fs, "true", timeout=600).ok
with registry:
    done = registry.execute("evaluate_python", {"code": "1 + 1"})
    assert done.success, done
launched = subprocess.run(_launched(["true"]), env=os.environ, start_new_session=True)
assert launched.returncode == 0
""",
        MARK=str(mark),
    )

    assert not mark.exists()


def test_our_code_is_not_changed_through_another_name_of_a_file(tmp_path: Path, ours: Installed):
    """As uv installs packages: a file is the same in all environments."""
    (tmp_path / "work").mkdir()
    names = ["__init__.py", "errors.py", "contrib/tools/sandbox/launcher.py"]
    for number, name in enumerate(names):
        os.link(ours.package / name, tmp_path / f"work/{number}.py")
    before = [(ours.package / name).read_bytes() for name in names]

    ours.run(
        """
from weakincentives.contrib.tools.sandbox.engines import find_sandbox
sandbox = find_sandbox("namespaces")
with HostFilesystem(os.environ["WORK"]) as fs:
    assert sandbox.run(fs, "echo evil >> 0.py", timeout=600).ok
    fs.write("1.py", "evil")
    branch = fs.branch("b")
    branch.write("2.py", "evil")
    branch.merge_into(fs)
    branch.close()
""",
        WORK=str(tmp_path / "work"),
    )

    assert [(ours.package / name).read_bytes() for name in names] == before
    for number in range(3):
        assert "evil" in (tmp_path / f"work/{number}.py").read_text()


# Root at work on another user's directory


def test_nobody_but_root_can_write_what_root_reads_back(engine: str):
    if os.geteuid() != 0:
        pytest.skip("only root can work for others")
    sandbox = find_sandbox(engine)  # type: ignore[arg-type]
    with tempfile.TemporaryDirectory() as place:
        os.chown(place, 12345, 12345)
        command = SandboxedCommand(
            argv=["true"],
            workspace=Path(place),
            env={"SECRET": "hunter2"},
            limits=SandboxLimits(),
        )
        with sandbox.engine.wrapped(command):
            kit = sandbox.engine.kit.place  # type: ignore[attr-defined]
            found = [kit, *kit.rglob("*")]
            writable = {
                path.name
                for path in found
                if not path.is_symlink()
                and (path.lstat().st_uid != 0 or path.lstat().st_mode & 0o022)
                and not path.lstat().st_mode & stat.S_ISVTX
            }
            readable = [
                path
                for path in found
                if path.is_file()
                and b"hunter2" in path.read_bytes()
                and path.stat().st_mode & 0o077
            ]

    assert writable <= {"env"}  # which the command's own shell reads, inside of the sandbox
    assert readable == []


RACE = """
import os, sys, time
# The owner of the workspace, waiting for the place where root keeps what it reads back.
until = time.monotonic() + float(sys.argv[1])
tried = 0
while time.monotonic() < until:
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = open(f"/proc/{pid}/cmdline", "rb").read().split(b"\\0")
        except OSError:
            continue
        for word in words:
            if b"/wink-" in word and word.startswith(b"/") and word.count(b"/") >= 3:
                place = os.fsdecode(word).rpartition("/")[0]
                for name in ("plan", "options", "containers.conf"):
                    tried += 1
                    try:
                        os.symlink("/etc/passwd", f"{place}/x")
                        os.rename(f"{place}/x", f"{place}/{name}")
                        print("replaced", place, name)
                        sys.exit(1)
                    except OSError:
                        pass
print("tried", tried)
"""


@pytest.mark.heavy
def test_the_owner_of_a_workspace_cannot_replace_what_root_reads(engine: str):
    if os.geteuid() != 0:
        pytest.skip("only root can work for others")
    sandbox = find_sandbox(engine)  # type: ignore[arg-type]
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o755)
        root = Path(place, "work")
        root.mkdir()
        os.chown(root, 12345, 12345)
        racer = subprocess.Popen(
            ["/usr/bin/python3", "-c", RACE, "6"],
            user=12345,
            group=12345,
            extra_groups=[],
            cwd="/",
            stdout=subprocess.PIPE,
            text=True,
        )
        with HostFilesystem(root) as files:
            while racer.poll() is None:
                assert sandbox.run(files, "id -u", timeout=PATIENCE).stdout == "1000\n"
        said = racer.communicate()[0]

    assert racer.returncode == 0, said


# How many files


def small(engine: str, files: int) -> Sandbox:
    limits = SandboxLimits(files=files)
    return find_sandbox(engine, limits=limits)  # type: ignore[arg-type]


@pytest.mark.heavy
@pytest.mark.parametrize("overlay", [True, False])
def test_a_command_makes_so_many_files_and_no_more(
    engine: str, overlay: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    if not overlay:
        monkeypatch.setattr("weakincentives.filesystem.commands.find_way", lambda *_: "none here")
    (tmp_path / "work").mkdir()
    # Without an overlay, what others make meanwhile counts as well: other tests, for example.
    most = 500 if overlay else 20_000
    sandbox = small(engine, most)
    many = "i=0; while [ $i -lt {} ]; do i=$((i+1)); : > $i; done"
    with HostFilesystem(tmp_path / "work") as files:
        fine = sandbox.run(files, many.format(300), timeout=PATIENCE)
        quick = sandbox.run(files, "mkdir d; cd d; " + many.format(most * 5 // 4), timeout=PATIENCE)
        endless = sandbox.run(files, "mkdir e; cd e; " + many.format(10**9), timeout=PATIENCE)
        fewer = sandbox.run(files, "rm -f *", timeout=PATIENCE)

    assert fine.ok
    assert quick.stopped == endless.stopped == f"it created or changed more than {most:,} files"
    assert (quick.kept, endless.kept, fewer.ok) == (False, False, True)
    assert list((tmp_path / "work").iterdir()) == []


def test_files_that_others_make_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Only what is in the command's own layer does; and where nobody counts, that is looked at."""
    from weakincentives.contrib.tools.sandbox import limits as sandbox_limits

    free: int | None = 10_000
    monkeypatch.setattr(sandbox_limits, "_free_files", lambda place: free)
    layer = tmp_path / "layer"
    layer.mkdir()
    limits = SandboxLimits(files=10)
    last = Running(os.getpid(), layer, ended=True)

    watch = SandboxWatch(limits, places=[tmp_path], processes=False)
    free = 5_000
    assert watch(last) is None
    for number in range(11):
        (layer / str(number)).touch()
    assert watch(last) == "it created or changed more than 10 files"

    free = 20_000  # other programs have deleted more files than the command created
    assert watch(last) == "it created or changed more than 10 files"

    free = None
    watch = SandboxWatch(limits, places=[tmp_path], processes=False)
    assert watch(last) == "it created or changed more than 10 files"
    (layer / "0").unlink()
    assert watch(last) is None


def test_the_number_of_files_is_a_limit_like_the_others():
    assert SandboxLimits().files == 50_000
    with pytest.raises(ValueError, match="files must be positive"):
        SandboxLimits(files=0)
