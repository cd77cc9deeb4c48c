"""Completion in a shell: bash is really asked; zsh and fish get their scripts."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from commands import make_run
from terminal import Terminal
from test_history import TURNS, project  # noqa: F401  # fixtures

from weakincentives.cli.entry import main
from weakincentives.filesystem import Branch
from weakincentives.runtime.stores.database import Database
from weakincentives.runtime.stores.runs import Runs

BEGIN = 'eval "$(wink --show-completion bash)"'
ASK = """
COMP_WORDS=({words})
COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 ))
_wink_completion wink
echo "${{COMPREPLY[*]}}"
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """The command, where a shell finds it."""
    path = tmp_path / "bin" / "wink"
    path.parent.mkdir()
    # Named as it is installed: the shell's script asks it by this name.
    code = "import sys; from weakincentives.cli.entry import main; sys.argv[0] = 'wink'; main()"
    # Not named in the first line: that takes no path with a space.
    path.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -c {shlex.quote(code)} "$@"\n')
    path.chmod(0o755)
    return path


def environment(program: Path, shell: str = "/bin/bash") -> dict[str, str]:
    return {
        **os.environ,
        "PATH": f"{program.parent}:{os.environ['PATH']}",
        "SHELL": shell,
        # Typer asks which shell it runs in, and a test runner is none.
        "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1",
    }


def offered(program: Path, directory: Path, *lines: str) -> list[list[str]]:
    """Return what bash offers for the last word of each line."""
    questions = (ASK.format(words=f"wink {line}") for line in lines)
    done = subprocess.run(
        ["bash", "--norc", "-c", "\n".join([BEGIN, *questions])],
        cwd=directory, env=environment(program), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    return [answer.split() for answer in done.stdout.split("\n")[:-1]]


pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")


@pytest.mark.heavy
def test_bash_completes_commands_and_values(program: Path, project: Path):  # noqa: F811
    run = make_run(project, TURNS)
    expected = {
        "do": ["doctor"],
        "log --wor": ["--workspace"],
        "log 2": [run.id],
        "mcp --suites files,p": ["files,planning", "files,python"],
    }

    assert dict(zip(expected, offered(program, project, *expected), strict=True)) == expected


@pytest.mark.heavy
def test_values_of_every_kind_are_completed(
    project: Path,  # noqa: F811
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    """Asked as the shell's script does, in this process."""
    run = make_run(project, TURNS)
    Branch.create(project, "parser").close()
    url = f"sqlite:///{tmp_path / 'runs.db'}"
    database = Database(url)
    durable = Runs(database).submit("a", about={})
    database.close()
    monkeypatch.setenv("WINK_DATABASE", url)
    monkeypatch.chdir(project)
    monkeypatch.setattr(sys, "argv", ["wink"])
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))  # not `python -m pytest`
    monkeypatch.setenv("_WINK_COMPLETE", "complete_bash")
    expected = {
        "resume 2": [run.id],
        f"show {run.mark}/4": [f"{run.mark}/4"],
        f"undo --to {run.mark}/4": [f"{run.mark}/4"],
        f"rerun {run.mark}/4": [f"{run.mark}/4"],
        "approve 2": [run.id, durable.id],
        "tools edit": ["edit_file"],
        "policy check shell": ["shell_execute"],
        "run x --model openai": ["openai:", "openai-responses:"],
        "run x --branch pa": ["parser"],
        "branch me": ["merge"],
        "debug 2": [run.id],
        "export 2": [run.id],
        "query al": ["all"],
        "branch drop pa": ["parser"],
        "sub": ["submit"],
        "work": ["worker"],
        f"cancel {durable.id[:4]}": [durable.id],
        f"fetch {durable.id[:4]}": [durable.id],
    }

    def completed(line: str) -> list[str]:
        monkeypatch.setenv("COMP_WORDS", f"wink {line}")
        monkeypatch.setenv("COMP_CWORD", str(len(line.split())))
        with pytest.raises(SystemExit):
            main([])
        return capfd.readouterr().out.split()

    assert {line: completed(line) for line in expected} == expected


@pytest.mark.heavy
def test_the_workspace_that_was_named_is_the_one_that_is_looked_at(
    program: Path,
    project: Path,  # noqa: F811
):
    run = make_run(project, TURNS)
    lines = ["log -w project ''", "log -w nosuch ''", "show -w nosuch ''"]

    assert offered(program, project.parent, *lines) == [[run.id], [], []]


def test_a_person_presses_tab(program: Path, project: Path):  # noqa: F811
    """In a real shell on a real terminal, which is found without being named."""
    shell = ["bash", "--norc", "--noprofile", "-i"]
    path = f"{program.parent}:{os.environ['PATH']}"
    with Terminal(shell, cwd=project, env={"PATH": path}) as terminal:
        terminal.send('PS1="> "; eval "$(wink --show-completion)"; echo re""ady\n')
        terminal.wait_for("ready")
        terminal.send("wink doc\t")
        terminal.wait_for("wink doctor")


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("shell", "mark"),
    [("bash", "complete -o default"), ("zsh", "#compdef wink"), ("fish", "complete")],
)
def test_each_shell_has_its_script(program: Path, project: Path, shell: str, mark: str):  # noqa: F811
    done = subprocess.run(
        ["wink", "--show-completion", shell],
        cwd=project, env=environment(program), capture_output=True, text=True, check=True,
    )  # fmt: skip

    assert mark in done.stdout
