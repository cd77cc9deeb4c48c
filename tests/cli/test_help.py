"""`wink --help`, `wink` alone, and `wink setup`."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from commands import make_run
from terminal import WINK, environment
from test_history import TURNS, Wink, project, wink  # noqa: F401  # fixtures
from typer.main import get_command

from weakincentives.cli.entry import SECTIONS, make_app
from weakincentives.cli.setup import manual_pages


def summaries() -> dict[str, str]:
    """Return the first sentence of the help of every command."""
    found: dict[str, str] = {}
    for name, command in getattr(get_command(make_app()), "commands").items():  # noqa: B009
        found[name] = command.get_short_help_str(1000)
        for word, inner in getattr(command, "commands", {}).items():
            found[f"{name} {word}"] = inner.get_short_help_str(1000)
    return found


def test_a_summary_is_a_short_sentence_that_begins_with_a_verb():
    for name, summary in summaries().items():
        assert summary.endswith("."), name
        assert "..." not in summary, name
        assert len(summary.removesuffix(".")) <= 60, (name, summary)
        assert re.match(r"[A-Z][a-z]+,? ", summary), (name, summary)


@pytest.mark.parametrize("columns", ["40", "80", "200"])
def test_the_help_has_every_command_in_its_section_with_its_whole_summary(columns: str):
    done = subprocess.run(
        [*WINK, "--help"], env=environment({"COLUMNS": columns, "TERMINAL_WIDTH": columns}),
        capture_output=True, text=True, check=True,
    )  # fmt: skip

    text = " ".join(done.stdout.split())
    for section, names in SECTIONS.items():
        assert f"{section}:" in text
        for name in {each.split()[0] for each in names}:
            assert f"{name} {summaries()[name]}" in text
    assert "..." not in text.replace("[ARGS]...", "")


def test_the_help_names_no_page_that_only_a_clone_has():
    for command in getattr(get_command(make_app()), "commands").values():  # noqa: B009
        for each in (command, *getattr(command, "commands", {}).values()):
            assert "In the documentation" not in f"{each.help} {each.epilog}"


# wink alone


def test_alone_it_says_how_to_begin(wink: Wink, project: Path):  # noqa: F811
    done = wink()

    assert (done.code, done.err) == (0, "")
    assert f"Nothing is recorded in {project} yet." in done.out
    for command in ("wink hook install ", "wink exec -- ", "wink demo", "wink doctor"):
        assert command in done.out


def test_alone_it_says_what_happened_and_what_comes_next(wink: Wink, project: Path):  # noqa: F811
    run = make_run(project, TURNS, task="Fix the sum")

    done = wink()

    assert (done.code, done.err) == (0, "")
    assert f"{project}: 1 run recorded." in done.out
    assert re.search(rf"The last: {run.mark}, .*, Fix the sum \(7 calls\)", done.out)
    for command in ("wink log", "wink diff", "wink undo", "wink debug"):
        assert f"  {command} " in done.out


# wink setup


@pytest.fixture
def home(tmp_path: Path) -> Path:
    place = tmp_path / "home"
    place.mkdir()
    return place


def set_up(home: Path, *words: str, shell: str = "/bin/bash") -> subprocess.CompletedProcess[str]:
    env = environment({"HOME": str(home), "SHELL": shell, "PATH": "/usr/bin:/bin"})
    env.pop("XDG_DATA_HOME", None)
    return subprocess.run(
        [*WINK, "setup", *words], env=env, cwd=home, capture_output=True, text=True, check=False
    )


def test_one_command_installs_completion_and_manual_pages(home: Path):
    done = set_up(home)

    assert (done.returncode, done.stderr) == (0, "")
    assert "_WINK_COMPLETE" in (home / ".bash_completions" / "wink.sh").read_text()
    pages = home / ".local" / "share" / "man" / "man1"
    assert {path.name for path in pages.iterdir()} == {name for name, _ in manual_pages()}
    assert {"wink.1", "wink-undo.1", "wink-branch-merge.1"} <= {p.name for p in pages.iterdir()}
    again = set_up(home)
    assert again.returncode == 0
    assert (home / ".bashrc").read_text().count("bash_completions") == 1


@pytest.mark.parametrize(
    ("shell", "file"), [("zsh", ".zfunc/_wink"), ("fish", ".config/fish/completions/wink.fish")]
)
def test_each_shell_has_its_own_completion(home: Path, shell: str, file: str):
    assert set_up(home, "--shell", shell).returncode == 0
    assert "wink" in (home / file).read_text()


def test_a_shell_that_is_not_known_is_said_in_one_line(home: Path):
    done = set_up(home, shell="/bin/tcsh")

    assert done.returncode == 2
    assert done.stderr == "wink: no completion for the shell 'tcsh'; use --shell bash|zsh|fish\n"


@pytest.mark.skipif(shutil.which("man") is None, reason="needs man")
@pytest.mark.heavy
def test_man_shows_the_pages_without_complaint(tmp_path: Path):
    for name, text in manual_pages():
        (tmp_path / name).write_text(text)
        shown = subprocess.run(
            ["man", "--warnings", "-l", str(tmp_path / name)],
            env={**os.environ, "MANWIDTH": "80", "PAGER": "cat", "MANPAGER": "cat"},
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert shown.stderr == ""
        assert "SYNOPSIS" in shown.stdout


def test_a_page_has_what_the_help_says():
    pages = dict(manual_pages())

    text = pages["wink-undo.1"].replace("\\-", "-")
    for part in (".SH SYNOPSIS", "RUN|CALL", "--dry-run", ".SH EXAMPLES", "wink undo --last"):
        assert part in text
    assert ".SS See and undo" in pages["wink.1"]
