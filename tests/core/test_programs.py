"""No program that an agent can have written runs outside of a sandbox."""

from __future__ import annotations

import ast
import asyncio
import logging
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import rpds

from installed import Installed
from weakincentives import __version__
from weakincentives.core.programs import (
    agents_can_write,
    find_program,
    missing_program,
    open_link,
    safe_environment,
    safe_path,
    script_in_reach,
)
from weakincentives.core.state import python
from weakincentives.errors import FilesystemError, McpServerError, ResourceError
from weakincentives.filesystem import HostFilesystem
from weakincentives.filesystem.checkout import clean_commit

SOURCE = Path(__file__).parents[2] / "src" / "weakincentives"

pytestmark = pytest.mark.skipif(os.name != "posix", reason="needs POSIX modes and links")


@pytest.fixture(autouse=True)
def _state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def plant(path: Path, text: str = '#!/bin/sh\n: > "$0.was-run"\nexit 1\n') -> Path:
    """Write a program that notes that it was run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def was_run(place: Path) -> bool:
    return any(place.rglob("*.was-run"))


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    root = tmp_path / "work"
    root.mkdir()
    HostFilesystem(root).close()  # a run of the past: nothing is open now
    return root


@pytest.fixture
def trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of programs of the user, last in ``PATH``."""
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    return plant(tmp_path / "bin/tool").parent


# Where a program is found


def in_a_workspace(root: Path, place: Path) -> Path:
    return plant(root / "bin/tool").parent


def in_its_environment(root: Path, place: Path) -> Path:
    (root / ".venv").mkdir()
    (root / ".venv/pyvenv.cfg").write_text("home = /usr/bin\n")
    return plant(root / ".venv/bin/tool").parent


def behind_a_link(root: Path, place: Path) -> Path:
    (place / "mine").mkdir()
    (place / "mine/tool").symlink_to(plant(root / "bin/tool"))
    return place / "mine"


def behind_a_link_to_its_directory(root: Path, place: Path) -> Path:
    (place / "mine").symlink_to(plant(root / "bin/tool").parent)
    return place / "mine"


def behind_a_link_in_a_workspace(root: Path, place: Path) -> Path:
    """The agent can make it lead elsewhere at any time."""
    plant(place / "elsewhere/tool")
    (root / "bin").symlink_to(place / "elsewhere")
    return root / "bin"


def behind_links_through_a_workspace(root: Path, place: Path) -> Path:
    plant(place / "elsewhere/tool")
    (root / "bin").symlink_to(place / "elsewhere")
    (place / "mine").symlink_to("work/x/../bin")
    (root / "x").mkdir()
    return place / "mine"


def in_another_environment_of_a_project(root: Path, place: Path) -> Path:
    (place / "other/.venv").mkdir(parents=True)
    (place / "other/.venv/pyvenv.cfg").write_text("home = /usr/bin\n")
    return plant(place / "other/.venv/bin/tool").parent


def in_node_modules(root: Path, place: Path) -> Path:
    (place / "other").mkdir()
    (place / "other/package.json").write_text("{}")
    return plant(place / "other/node_modules/.bin/tool").parent


def where_everybody_can_write(root: Path, place: Path) -> Path:
    folder = plant(place / "open/tool").parent
    folder.chmod(0o777)
    return folder


def below_where_everybody_can_write(root: Path, place: Path) -> Path:
    folder = plant(place / "open/bin/tool").parent
    folder.parent.chmod(0o777)
    return folder


def that_everybody_can_write(root: Path, place: Path) -> Path:
    plant(place / "open/tool").chmod(0o777)
    return place / "open"


def run_by_an_interpreter_in_a_workspace(root: Path, place: Path) -> Path:
    python = plant(root / ".venv/bin/python")
    return plant(place / "open/tool", f"#!{python} -u\n").parent


def run_by_an_interpreter_of_the_current_directory(root: Path, place: Path) -> Path:
    return plant(place / "open/tool", "#!bin/python\n").parent


def in_a_directory_that_commands_can_change(root: Path, place: Path) -> Path:
    folder = plant(place / "cache/tool").parent
    agents_can_write(folder)
    return folder


def run_by_env_with_an_interpreter_in_a_workspace(root: Path, place: Path) -> Path:
    return plant(place / "open/tool", f"#!/usr/bin/env -S {plant(root / 'python')} -u\n").parent


def in_a_directory_that_commands_of_another_process_could_change(root: Path, place: Path) -> Path:
    program = """
import sys
from weakincentives.core.programs import agents_can_write
agents_can_write(sys.argv[1])
"""
    folder = plant(place / "cache/tool").parent
    subprocess.run(python(program, str(folder)), check=True)
    return folder


def in_a_workspace_with_its_store_elsewhere(root: Path, place: Path) -> Path:
    program = """
import sys
from weakincentives.filesystem import HostFilesystem
HostFilesystem(sys.argv[1], store=sys.argv[2]).close()
"""
    folder = plant(place / "far/tool").parent
    subprocess.run(python(program, str(folder), str(place / "store")), check=True)
    return folder


PLACES: list[Callable[[Path, Path], Path]] = [
    in_a_workspace,
    in_its_environment,
    behind_a_link,
    behind_a_link_to_its_directory,
    behind_a_link_in_a_workspace,
    behind_links_through_a_workspace,
    in_another_environment_of_a_project,
    in_node_modules,
    where_everybody_can_write,
    below_where_everybody_can_write,
    that_everybody_can_write,
    run_by_an_interpreter_in_a_workspace,
    run_by_an_interpreter_of_the_current_directory,
    run_by_env_with_an_interpreter_in_a_workspace,
    in_a_directory_that_commands_can_change,
    in_a_directory_that_commands_of_another_process_could_change,
    in_a_workspace_with_its_store_elsewhere,
]


@pytest.mark.parametrize("planted", PLACES, ids=lambda each: each.__name__)
def test_a_program_that_an_agent_can_write_is_passed_over(
    workspace: Path, tmp_path: Path, trusted: Path, caplog: pytest.LogCaptureFixture, planted
):
    """The next one of that name is used; without one, a line says why and what to do."""
    folder = planted(workspace, tmp_path)
    path = f"{folder}:{trusted}"

    with caplog.at_level(logging.WARNING):
        assert find_program("tool", path) == str(trusted / "tool")

    assert f"{folder}/tool is not used: " in caplog.text
    assert find_program("tool", str(folder)) is None
    why = missing_program("tool", str(folder))
    assert why.startswith(f"{folder}/tool is not used: ")
    assert why.endswith("Install tool elsewhere")
    assert find_program(f"{folder}/tool") is None


def test_a_script_is_passed_over_if_env_finds_its_interpreter_in_a_workspace(
    workspace: Path, tmp_path: Path, trusted: Path
):
    folder = plant(tmp_path / "mine/tool", "#!/usr/bin/env -S A=1 snake -u\n").parent
    (folder / "snake").symlink_to(plant(workspace / "snake"))

    assert find_program("tool", f"{folder}:{trusted}") == str(trusted / "tool")
    assert f"{folder}/snake" in missing_program("tool", str(folder))
    plant(trusted / "snake")
    assert find_program("tool", f"{trusted}:{folder}") == str(trusted / "tool")


def test_a_workspace_is_known_wherever_it_is_mounted(tmp_path: Path):
    """A container may have the same directory in two places."""
    program = """
import os, subprocess, sys
from weakincentives.filesystem import HostFilesystem
from weakincentives.core.programs import find_program
HostFilesystem("work").close()
subprocess.run(["mount", "--bind", "work", "mnt"], check=True)
print(find_program("tool", os.path.abspath("mnt/bin")))
"""
    (tmp_path / "mnt").mkdir()
    plant(tmp_path / "work/bin/tool")

    done = subprocess.run(
        ["unshare", "--mount", "--map-root-user", sys.executable, "-P", "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )

    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"no namespaces here: {done.stderr}")
    assert done.stdout == "None\n", done.stderr


@pytest.mark.parametrize("entry", ["", ".", "bin", "../work/bin"])
def test_the_current_directory_is_never_searched(
    workspace: Path, trusted: Path, monkeypatch: pytest.MonkeyPatch, entry: str
):
    plant(workspace / "bin/tool")
    plant(workspace / "tool")
    monkeypatch.chdir(workspace)

    assert find_program("tool", f"{entry}:{trusted}") == str(trusted / "tool")
    assert find_program("tool", entry) is None
    assert find_program("bin/tool", "") is None
    assert "Give the full path" in missing_program("bin/tool")
    assert safe_path(f"{entry}:{trusted}") == str(trusted)


def test_the_active_environment_is_a_projects(
    tmp_path: Path, trusted: Path, monkeypatch: pytest.MonkeyPatch
):
    """Whatever it is called, and wherever it is: its programs are not for us."""
    folder = plant(tmp_path / "envs/shop/bin/tool").parent
    assert find_program("tool", str(folder)) is not None

    monkeypatch.setenv("VIRTUAL_ENV", str(folder.parent))

    assert find_program("tool", f"{folder}:{trusted}") == str(trusted / "tool")


def test_our_own_environment_is_used_even_in_a_workspace():
    """It is protected there: no call can change it. What is beside it can be changed."""
    program = """
import sys
from pathlib import Path
from weakincentives.core.programs import agents_can_write, find_program, reach_of_agents
place = Path(sys.prefix)
agents_can_write(place.parent)
print(find_program("python", f"{place}/bin"), reach_of_agents(f"{place.parent}/bin"))
"""

    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )

    above = Path(sys.prefix).parent
    assert done.stdout == f"{sys.prefix}/bin/python agents can write to {above}\n"


def test_our_own_environment_comes_last(trusted: Path):
    """A project may have had a directory of that name when we were installed there."""
    program = """
import os, sys
from weakincentives.core.programs import find_program, safe_path
print(find_program("tool"), safe_path(), bool(find_program("python")))
"""
    with tempfile.TemporaryDirectory() as place:
        own = Path(place, ".venv")
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(own)], check=True)
        plant(own / "bin/tool")
        [packages] = own.glob("lib/python*/site-packages")
        lists = [str(SOURCE.parent), *filter(os.path.isdir, sys.path)]
        (packages / "others.pth").write_text("\n".join(lists))
        done = subprocess.run(
            [str(own / "bin/python"), "-c", program],
            env={**os.environ, "PATH": f"{own}/bin:{trusted}"},
            capture_output=True,
            text=True,
            check=True,
        )

    assert done.stdout == f"{trusted}/tool {trusted} True\n"


def test_a_program_that_is_not_there_is_not_installed(tmp_path: Path):
    assert find_program("no-such-tool") is None
    assert missing_program("no-such-tool") == "no-such-tool is not installed"
    assert missing_program("/nowhere/tool") == "there is no program /nowhere/tool"


def test_the_environment_names_no_code_that_an_agent_can_write(workspace: Path, trusted: Path):
    library = f"{workspace}/lib"
    agent = trusted / "agent"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(agent))
    agent.chmod(0o777)
    given = {
        "SSH_AUTH_SOCK": str(agent),
        "PATH": f"{workspace}/bin::.:{trusted}",
        "PYTHONPATH": f"{workspace}:src:{trusted}",
        "LD_LIBRARY_PATH": f"{library}:/usr/lib",
        "LD_PRELOAD": f"{library}/x.so",
        "NODE_OPTIONS": f"--require {library}/x.js",
        "PYTHONSTARTUP": f"{library}/x.py",
        "RIPGREP_CONFIG_PATH": f"{library}/rg",
        "GIT_EXTERNAL_DIFF": f"{library}/diff",
        "GIT_SSH_COMMAND": f"{library}/ssh",
        "PAGER": f"{library}/pager",
        "BASH_ENV": f"{library}/rc",
        "OPENSSL_CONF": f"{library}/openssl.cnf",
        "QT_PLUGIN_PATH": f"/usr/lib/qt:{library}",
        "PLAYWRIGHT_BROWSERS_PATH": f"{workspace}/.browsers",
        "DISPLAY": ":0",
        "EDITOR": f"{plant(workspace / 'bin/edit')} -w",
        "VISUAL": f"{trusted}/tool -w",
        "HOME": "/home/you",
    }

    assert safe_environment(given) == {
        "PATH": str(trusted),
        "PYTHONPATH": str(trusted),
        "LD_LIBRARY_PATH": "/usr/lib",
        "VISUAL": f"{trusted}/tool -w",
        "DISPLAY": ":0",
        "SSH_AUTH_SOCK": str(agent),
        "HOME": "/home/you",
    }


# Who starts programs


@pytest.fixture
def active(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The programs of the workspace's environment, which come first."""
    folder = workspace / ".venv/bin"
    folder.mkdir(parents=True)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_a_planted_git_does_not_merge_lines(workspace: Path, active: Path):
    plant(active / "git")
    (workspace / "a").write_text("".join(f"{n}\n" for n in range(20)))
    with HostFilesystem(workspace) as files:
        branch = files.branch("b")
        branch.write("a", branch.read("a").replace("2\n", "two\n", 1))
        (workspace / "a").write_text(files.read("a").replace("18\n", "many\n"))
        branch.merge_into(files)
        merged = files.read("a")
        branch.close()

    assert "two\n" in merged
    assert "many\n" in merged
    assert not was_run(workspace)


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_a_planted_git_does_not_read_a_repository(workspace: Path, active: Path):
    plant(active / "git")
    with pytest.raises(FilesystemError, match="not a git checkout"):
        clean_commit(workspace)

    assert not was_run(workspace)


def test_a_command_needs_no_program_that_is_planted(workspace: Path, active: Path, tmp_path: Path):
    """Neither when we find out how to run it, nor around it."""
    was_run = tmp_path / "was-run"  # what it writes to the workspace may be discarded
    planted = plant(active / "planted", f'#!/bin/sh\necho "$0" >>{was_run}\nexit 1\n')
    for name in {*os.listdir("/bin"), *os.listdir("/usr/bin")} - {planted.name}:
        (active / name).symlink_to(planted)

    with HostFilesystem(workspace) as files:
        assert files.run(["/bin/sh", "-c", "echo yes >a"]).ok
        assert files.read("a") == "yes\n"

    assert not was_run.exists()


OTHERS = {
    "openai": "weakincentives.adapters.OpenAIAdapter('m', api_key='k')",
    "anthropic": "weakincentives.adapters.AnthropicAdapter('m', api_key='k')",
    "litellm": "weakincentives.adapters.LiteLLMAdapter('openai/m', api_key='k')",
    "dbos": "weakincentives.durable.DbosEngine('sqlite:///runs.db').pending()",  # not launched
}
"""What loads a package of others."""


@pytest.mark.parametrize(
    "package",
    [pytest.param(n, marks=pytest.mark.heavy) if n == "litellm" else n for n in OTHERS],
)
def test_nor_do_packages_of_others_start_one(
    workspace: Path, active: Path, tmp_path: Path, package: str
):
    """The standard library asks `uname` and `file` what it runs on."""
    pytest.importorskip(package)
    was_run = tmp_path / "was-run"
    for name in ("uname", "file", "ldconfig", "gcc", "cc", "ld", "objdump"):
        plant(active / name, f'#!/bin/sh\necho "$0" >>{was_run}\nexit 1\n')
    program = f"""
import contextlib, platform, sys, weakincentives.adapters, weakincentives.durable
with contextlib.suppress(Exception):
    {OTHERS[package]}
assert "{package}" in sys.modules
platform.platform()
"""

    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True)

    assert not was_run.exists(), was_run.read_text()


def test_a_planted_mcp_server_is_not_started(workspace: Path, active: Path, tmp_path: Path):
    """Neither by its name, nor as the script of an interpreter, nor from the current directory."""
    pytest.importorskip("mcp")
    from weakincentives.mcp import McpToolsSection, StdioServer

    server, script = plant(active / "server"), plant(workspace / "server.py")
    for command, said in (
        (["server"], f"{server} is not used: agents can write to {workspace}"),
        ([str(server)], f"{server} is not used: agents can write to {workspace}"),
        ([sys.executable, str(script)], f"{script} is not run: agents can write to {workspace}"),
        (["env", str(server)], f"{server} is not run: agents can write to {workspace}"),
        (["sh", "--rcfile=" + str(script)], f"{script} is not run: agents can write to"),
        (["env", "--directory", str(workspace)], f"{workspace} is not run: agents can write to"),
        (["sh", "-e", str(script)], f"{script} is not run: agents can write to {workspace}"),
    ):
        with pytest.raises(McpServerError, match=re.escape(said)):
            McpToolsSection(server=command).__enter__()
    runner = plant(tmp_path / "elsewhere/npx")
    for directory, said in ((workspace, "npx first looks for code in"), (tmp_path, "ended")):
        with pytest.raises(McpServerError, match=said):
            McpToolsSection(server=StdioServer(str(runner), cwd=directory)).__enter__()
    relative = StdioServer("./.venv/bin/server", cwd=workspace)
    with pytest.raises(McpServerError, match="agents can write to"):
        McpToolsSection(server=relative).__enter__()
    assert not was_run(workspace)


@pytest.mark.parametrize(
    "command",
    [
        *("timeout 9 python3 WORK/server.py", "python3 WORK", "python3 -m runpy WORK/server.py"),
        *("node WORK/pkg", "node -r WORK/pkg /x.js", "node --import file://WORK/x.mjs /x.js"),
        *("uv run WORK/server.py", "uv run --with WORK x", "uvx WORK", "uvx --from file://WORK x"),
        *(
            "uvx --from 'pkg @ file://WORK' x",
            "npx WORK/pkg",
            "npx -y tsx WORK/x.ts",
            "npx -p WORK x",
        ),
        *("mcp run WORK/server.py:app", "uvicorn --app-dir WORK server:app", "perl -IWORK /x.pl"),
        *(
            "java -jar WORK/x.jar",
            "java -cp WORK Main",
            "cargo run --manifest-path WORK/Cargo.toml",
        ),
        *("go run WORK", "make -f WORK/Makefile", "docker compose -f WORK/compose.yml up"),
        *("sh -c 'exec python3 WORK/server.py'", "bash -lc 'cd WORK && exec ./server.py'"),
        *("yarn --cwd WORK start", "pipx run --spec WORK x"),
    ],
)
def test_nor_is_what_an_agent_can_write_run_in_other_ways(workspace: Path, command: str):
    for name in ("server.py", "x.mjs", "x.ts", "x.jar", "Cargo.toml", "Makefile", "compose.yml"):
        plant(workspace / name).chmod(0o644)
    plant(workspace / "pkg/index.js")
    program, *arguments = shlex.split(command.replace("WORK", str(workspace)))

    assert "agents can write to" in (script_in_reach(f"/usr/bin/{program}", arguments, "/") or "")


@pytest.mark.parametrize(
    "command",
    [
        *("npx -y @modelcontextprotocol/server-filesystem WORK", "npx -y -p pkg tool WORK"),
        *("uvx mcp-server-git --repository WORK", "uvx --from pkg serve WORK"),
        *("python3 -m mcp_server_git --repository WORK", "node /x.js WORK", "server WORK"),
        *("sqlite-server --db WORK/data.db", "docker run -v WORK:/data image"),
        "sh -c 'exec server --root WORK'",
    ],
)
def test_a_server_may_work_on_a_workspace(workspace: Path, command: str):
    (workspace / "data.db").touch()
    program, *arguments = shlex.split(command.replace("WORK", str(workspace)))

    assert script_in_reach(f"/usr/bin/{program}", arguments, "/") is None


def test_a_planted_module_is_not_the_mcp_server(
    workspace: Path, active: Path, monkeypatch: pytest.MonkeyPatch
):
    """Python looks for modules in the directory that it is started in."""
    pytest.importorskip("mcp")
    from weakincentives.mcp import McpToolsSection

    (workspace / "server.py").write_text("open('module.was-run', 'w')\n")
    monkeypatch.chdir(workspace)

    with pytest.raises(McpServerError, match="No module named server"):
        McpToolsSection(server=[sys.executable, "-m", "server"]).__enter__()
    assert not was_run(workspace)


def test_the_browser_is_not_a_planted_one(workspace: Path, active: Path):
    pytest.importorskip("playwright")
    from weakincentives.contrib.tools.web import Browser

    planted = plant(active / "chromium")

    with pytest.raises(ResourceError, match=f"{planted} is not used: agents can write to"):
        Browser(executable=str(planted)).is_available()


@pytest.mark.parametrize("variable", ["PLAYWRIGHT_NODEJS_PATH", "NODE_OPTIONS"])
def test_nor_is_its_driver(workspace: Path, monkeypatch: pytest.MonkeyPatch, variable: str):
    pytest.importorskip("playwright")
    from weakincentives.contrib.tools.web import Browser, PageNotRead

    planted = plant(workspace / "node.js")
    named = str(planted) if variable == "PLAYWRIGHT_NODEJS_PATH" else f"--require={planted}"
    monkeypatch.setenv(variable, named)

    async def read() -> object:
        return await Browser().read("http://127.0.0.1:1/")

    with pytest.raises(PageNotRead, match=f"{variable}: {planted} is not .*agents can write to"):
        asyncio.run(read())
    assert not was_run(workspace)


def sign_in(link: str) -> bool:
    pytest.importorskip("mcp")
    from weakincentives.mcp.oauth import open_in_browser

    open_in_browser(link)
    return True


@pytest.mark.parametrize("opens", [open_link, sign_in])
def test_a_page_is_not_opened_by_a_planted_program(
    workspace: Path,
    active: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    opens: Callable[[str], bool],
):
    """What the desktop calls a browser is looked up in ``PATH``."""
    for name in ("xdg-open", "x-www-browser", "firefox", "chromium", "google-chrome", "w3m"):
        plant(active / name)
    link = tmp_path / "opened"
    browser = plant(tmp_path / "bin/browser", f'#!/bin/sh\necho "$1" >>{link}\n')
    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.setenv("BROWSER", f"{active}/firefox")
    opens("http://127.0.0.1:1/")
    monkeypatch.setenv("BROWSER", str(browser))

    assert opens("http://127.0.0.1:1/")
    for other in ("file:///etc/passwd", "ms-settings:x", "--help", "javascript:alert(1)"):
        opens(other)  # a server of others may say where to sign in
    assert link.read_text() == "http://127.0.0.1:1/\n"
    assert not was_run(workspace)


def test_runs_that_we_start_load_no_planted_module(workspace: Path):
    """``PYTHONPATH`` names the workspace's sources, as in many projects."""
    for name in ("encodings", "weakincentives", "re", "sitecustomize"):
        plant(workspace / f"src/{name}/__init__.py", "open('/dev/stdout', 'w').write('planted')")
    program = "from weakincentives.cli.entry import main; main()"

    done = subprocess.run(
        [*python(program), "--version"],
        env={**os.environ, "PYTHONPATH": str(workspace / "src")},
        cwd=workspace / "src",
        capture_output=True,
        text=True,
        check=True,
    )

    assert done.stdout == f"wink {__version__}\n"


def test_nor_does_a_hook_that_records_the_event_itself(workspace: Path):
    (workspace / "src").mkdir()
    for name in ("encodings", "weakincentives", "re", "sitecustomize"):
        plant(workspace / f"src/{name}/__init__.py", "open('/dev/stdout', 'w').write('planted')")
    client = SOURCE / "cli/hooks/client.py"

    done = subprocess.run(
        [sys.executable, "-I", "-S", str(client), "claude"],
        env={**os.environ, "PYTHONPATH": str(workspace / "src"), "WINK_HOOK_IDLE": "0"},
        cwd=workspace / "src",
        input="no event",
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.stdout == ""
    assert "expected an event of Claude Code" in done.stderr


def test_a_planted_module_does_not_stand_in_for_one_that_is_not_installed(tmp_path: Path):
    """The project is installed beside us to be edited: its sources are on the path."""
    ours = Installed(tmp_path)
    (ours.packages / "others.pth").unlink()
    for each in Path(rpds.__file__).parent.parent.iterdir():
        if not each.name.startswith(("starlette", "__pycache__")) and each.suffix != ".pth":
            (ours.packages / each.name).symlink_to(each)
    (ours.packages / "project.pth").write_text(f"{ours.root}/src\n")
    plant(ours.root / "src/starlette.py", f"open({str(tmp_path / 'was-run')!r}, 'w')\n")
    with HostFilesystem(ours.root):
        pass

    done = subprocess.run(
        [ours.environment / "bin/python", "-m", "weakincentives.cli", "debug", "--no-open"],
        cwd=ours.root,
        capture_output=True,
        text=True,
    )

    assert "starlette is not installed" in done.stderr
    assert not (tmp_path / "was-run").exists()


# Review habit


_LOOKS_UP = {
    *("shutil.which", "os.system", "os.popen", "os.startfile", "asyncio.create_subprocess_shell"),
    *("subprocess.getoutput", "subprocess.getstatusoutput", "os.posix_spawnp"),
    *(
        f"os.{how}{arguments}p{env}"
        for how in ("exec", "spawn")
        for arguments in "lv"
        for env in ("", "e")
    ),
}
_STARTS = {"run", "Popen", "call", "check_call", "check_output", "create_subprocess_exec"}
_ALLOWED = {
    "cli/demo.py": {"shutil.which"},  # only prints how to call us
    "cli/start.py": {"shutil.which"},  # only says which agents there are
    "cli/execution.py": {"shutil.which"},  # only says that there is no such program
    "errors.py": {"shutil.which"},  # only says how to install
    "cli/setup.py": {"shutil.which"},  # puts manual pages beside it
    "mcp/server_launcher.py": {"os.posix_spawnp"},  # gets the path that was found
}


def _lookups(tree: ast.AST) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = {each.name for each in node.names} | {getattr(node, "module", "")}
            found |= names & {"webbrowser", "pty", "distutils", "which"}
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found |= {f"{node.value.id}.{node.attr}"} & _LOOKS_UP
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if node.func.attr not in _STARTS or not isinstance(node.func.value, ast.Name):
            continue
        if node.func.value.id not in ("subprocess", "asyncio"):
            continue
        first = node.args[0] if node.args else None
        if isinstance(first, ast.List) and first.elts:
            first = first.elts[0]
        if isinstance(first, ast.Constant | ast.JoinedStr):
            found.add(f"{ast.unparse(node.func)}({ast.unparse(first)})")
        found |= {"shell=True" for each in node.keywords if each.arg == "shell"}
    return found


def test_programs_are_looked_up_in_one_place():
    """Whatever starts a program passes it the path that ``find_program`` has returned."""
    found = {
        str(path.relative_to(SOURCE)): names
        for path in SOURCE.rglob("*.py")
        if (names := _lookups(ast.parse(path.read_text()))) and "demo_project" not in path.parts
    }

    assert {path: names - _ALLOWED.get(path, set()) for path, names in found.items()} == {
        path: set() for path in found
    }
