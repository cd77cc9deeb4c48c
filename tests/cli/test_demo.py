"""`wink demo`, as a newcomer runs it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import pytest
from terminal import WINK, Terminal, wink

from weakincentives.contrib.tools import find_sandbox
from weakincentives.errors import SandboxUnavailable
from weakincentives.filesystem import HostFilesystem

ROOT = Path(__file__).parents[2]
DATA = ROOT / "src" / "weakincentives" / "cli" / "demo_project"
QUICK = {"WINK_SANDBOX": "none"}
"""For tests that are not about commands."""


@dataclass(frozen=True)
class Demo:
    project: Path
    told: str
    """What it printed while it went on."""
    shown: str
    """What it printed in the end."""
    after: dict[str, bytes]
    is_repaired: bool
    env: dict[str, str]
    """Whose state it has: that of another user knows nothing of the store."""


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    folder = tmp_path_factory.mktemp("demo")
    env = {**os.environ, "XDG_STATE_HOME": str(tmp_path_factory.mktemp("demo-state"))}
    done = wink("demo", "--into", "till", cwd=folder, env=env)
    assert done.returncode == 0, done.stderr
    project = folder / "till"
    # At once: a test pastes what it ends with, and that takes the repair back.
    return Demo(project, done.stderr, done.stdout, contents(project), is_repaired(project), env)


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def is_repaired(project: Path) -> bool:
    command = [sys.executable, "-B", "-m", "unittest", "-q"]
    return subprocess.run(command, cwd=project, capture_output=True, check=False).returncode == 0


# The story


def test_it_repairs_the_program_and_leaves_everything_else_as_it_was(demo: Demo):
    before, after = contents(DATA / "till"), demo.after
    changed = {name for name in {**before, **after} if before.get(name) != after.get(name)}

    assert changed == {"till.py"}
    assert demo.is_repaired
    assert not is_repaired(DATA / "till")
    assert "1 committed. 1 of 7 files changed: till.py.\n" in demo.shown


def test_it_says_what_it_used_before_it_begins(demo: Demo):
    assert "A script plays the model, so no key and no network are needed.\n" in demo.told
    assert re.search(r"^(Commands run in a sandbox: \w+\.|No sandbox works here)", demo.told, re.M)


def test_the_timeline_has_every_call_with_its_outcome_and_its_diff(demo: Demo):
    timeline = demo.shown.split("What happened in each call\n")[1]
    calls = re.findall(r"^ {1,2}(\d+) (\S+) (\w+)", timeline, re.M)

    assert [(sign, tool) for _, sign, tool in calls] == [
        ("✓", "setup_plan"),
        ("✗", "shell_execute"),
        ("✓", "read_file"),
        ("✓", "read_file"),
        ("✓", "update_step"),
        ("⊘", "edit_file"),
        ("✗", "shell_execute"),
        ("✓", "edit_file"),
        ("✓", "update_step"),
        ("✓", "shell_execute"),
        ("✓", "update_step"),
    ]
    assert "Cannot change test_till.py: it is protected." in timeline
    assert "denied by the policy protected_paths: nothing was run\n" in timeline
    assert timeline.count("compared: all 7 files are unchanged, byte for byte\n") == 2
    assert "     +    share, left = divmod(amount, people)\n" in timeline


def test_the_commands_it_ends_with_work_when_they_are_pasted(demo: Demo):
    pasted = demo.shown.split("Have a look:\n")[1].split("A real model")[0]

    done = subprocess.run(
        ["sh", "-e", "-c", pasted],
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
        env=demo.env,
    )

    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "rolled back" in done.stdout  # of the log, and of the call
    assert "+    share, left = divmod(amount, people)\n" in done.stdout
    assert contents(demo.project) == contents(DATA / "till")  # the last of them is an undo


# An accident


def test_an_accident_is_undone_that_git_could_not_undo(tmp_path: Path):
    done = wink("demo", "--disaster", "--into", "till", cwd=tmp_path)
    project = tmp_path / "till"
    log = wink("log", "--json", cwd=project).stdout.splitlines()
    call = json.loads(log[0])

    assert done.returncode == 0, done.stderr
    assert "Gone: .env, draft.md, node_modules/print, node_modules/printer/index.js" in done.stdout
    assert "Back to the last commit: till.py" in done.stdout
    assert "as before the accident" in done.stdout
    assert call["tool"] == "bash"
    assert {"till.py", "draft.md", ".env"} <= {file["path"] for file in call["files"]}
    assert (project / ".env").read_text() == "TILL_KEY=the-only-copy\n"
    assert (project / ".env").stat().st_mode & 0o777 == 0o600
    assert "DISCOUNTS" in (project / "till.py").read_text()
    assert os.readlink(project / "node_modules" / "print") == "printer/index.js"


# Where it runs


def test_on_a_terminal_one_sees_the_plan_and_how_it_ended(tmp_path: Path):
    with Terminal([*WINK, "demo", "--into", "till"], cwd=tmp_path, env=QUICK) as terminal:
        assert terminal.end() == 0

    assert "plan: 3 of 3 done" in terminal.text  # what is drawn on the way is there for a moment
    assert "Have a look:" in terminal.text
    assert "A test of this project fails." in terminal.text
    assert "11 calls: 7 ok, 2 rolled back, 1 denied, 1 committed." in terminal.text
    assert is_repaired(tmp_path / "till")


def test_it_can_be_stopped_and_taken_up_again(tmp_path: Path):
    script = tmp_path / "model.json"
    slow = {"shell_execute": {"command": "rm -r receipts && sleep 100"}}
    script.write_text(json.dumps([{"call": [slow]}, "Done."]))
    command = [*WINK, "demo", "--model", f"scripted:{script}", "--into", "till"]

    with Terminal(command, cwd=tmp_path, env=QUICK) as terminal:
        terminal.wait_for("rm -r receipts")
        terminal.interrupt()
        assert terminal.end() == 130, terminal.text

    assert contents(tmp_path / "till") == contents(DATA / "till")
    assert "What happened in each call" not in terminal.text
    (run,) = re.findall(r"Resume with: wink resume (\S+) ", terminal.text)
    done = wink("resume", run, "-w", "till", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "Done.\n"), done.stderr


@pytest.mark.heavy
def test_it_works_where_no_sandbox_does(tmp_path: Path):
    """In a sandbox of ours: no other can be made there, no overlay be mounted, and no root be."""
    try:
        box = find_sandbox("namespaces", read_only=[ROOT, sys.prefix, sys.base_prefix])
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    (tmp_path / "work").mkdir()
    command = [sys.executable, "-m", "weakincentives.cli", "demo", "--into", "/workspace/till"]
    # The demo has its settings in this workspace.
    with HostFilesystem(tmp_path / "work", unprotected=["wink.toml"]) as files:
        done = box.run(files, command, env={"PYTHONDONTWRITEBYTECODE": "1"}, timeout=600)

    assert done.ok, done.stderr
    assert "No sandbox works here: see `wink doctor`." in done.stderr
    assert "11 calls: 7 ok, 2 rolled back, 1 denied, 1 committed." in done.stdout
    assert is_repaired(tmp_path / "work" / "till")


def test_a_model_of_ones_own_works_on_the_same_project(tmp_path: Path):
    script = tmp_path / "model.json"
    script.write_text(json.dumps([{"call": [{"read_file": {"path": "till.py"}}]}, "Done."]))

    done = wink("demo", "--model", f"scripted:{script}", "--into", "till", cwd=tmp_path, env=QUICK)

    assert done.returncode == 0, done.stderr
    assert f"with scripted:{script}" in done.stderr
    assert "  1 ✓ read_file till.py" in done.stdout
    assert "0 of 7 files changed." in done.stdout


# Wrong use


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--into", "full"], "full is not empty; name a new directory"),
        (["--into", "full/file"], "cannot hold the project: File exists"),
        (["--model", "nope"], "unknown model 'nope'"),
        (["--disaster", "--model", "nope"], "takes no --model"),
    ],
)
def test_wrong_use_is_told_in_one_line(arguments: list[str], said: str, tmp_path: Path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    (tmp_path / "temporary").mkdir()

    done = wink("demo", *arguments, cwd=tmp_path, env={"TMPDIR": str(tmp_path / "temporary")})

    assert done.returncode == 2
    assert (done.stdout, len(done.stderr.splitlines())) == ("", 1)
    assert said in done.stderr
    assert list((tmp_path / "temporary").iterdir()) == []


# The picture in the README


def test_the_picture_shows_what_the_demo_prints(demo: Demo):
    drawn = " ".join(words_of(ROOT / "docs" / "demo.svg"))
    timeline = demo.shown.split("What happened in each call\n")[1].split("The project is still")[0]
    lines = [" ".join(without_times(line).split()) for line in timeline.splitlines()]

    assert len(lines) > 30
    for line in lines:
        assert line in drawn, "run `make picture`"


def words_of(picture: Path) -> list[str]:
    """Return the lines of a picture: what stands at the same height, in order."""
    lines: dict[str, str] = {}
    for text in ElementTree.parse(picture).iter("{http://www.w3.org/2000/svg}text"):
        lines[text.attrib["y"]] = lines.get(text.attrib["y"], "") + (text.text or "")
    return [" ".join(without_times(line.replace("\xa0", " ")).split()) for line in lines.values()]


def without_times(line: str) -> str:
    return re.sub(r" \d+\.\ds$", "", line.rstrip())
