"""Wrong use of the command line: one line that says what to do, whatever is wrong."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from commands import make_run
from test_history import TURNS, Wink, project, wink  # noqa: F401  # fixtures

from weakincentives.adapters import calls
from weakincentives.filesystem import Branch

WRONG = [
    # a command, an option, a number of arguments that does not exist
    ("nosuch", "wink --help"),
    ("--nosuch", "wink --help"),
    ("log --nosuch", "wink log --help"),
    ("log one two", "wink log --help"),
    ("branch nosuch", "wink branch --help"),
    ("branch merge", "wink branch merge --help"),
    ("branch merge a --nosuch", "wink branch merge --help"),
    ("policy nosuch", "wink policy --help"),
    ("run", "TASK"),
    ("rewind", "CALL"),
    ("rerun", "CALL"),
    ("show", "CALL"),
    ("cancel", "RUN"),
    ("fetch", "RUN"),
    # values
    ("log -n many", "wink log --help"),
    ("log -n -1", "wink log --help"),
    ("debug --port 99999", "wink debug --help"),
    ("gc --keep huge", "use 50M or 1GiB"),
    ("gc --older-than -3", "wink gc --help"),
    ("export --max-size 0", "wink export --help"),
    ("setup --shell tcsh", "wink setup --help"),
    ("exec --checkpoint never -- true", "wink exec --help"),
    # directories
    ("log -w nosuch", "cannot open the directory nosuch"),
    ("diff -w nosuch", "cannot open the directory nosuch"),
    ("undo -w notes.txt", "notes.txt: Not a directory"),
    ("doctor -w nosuch --adopt-store", "cannot open the directory nosuch"),
    ("tools -w nosuch", "nosuch"),
    ("export -w nosuch", "cannot open the directory nosuch"),
    ("gc -w nosuch", "cannot open the directory nosuch"),
    # runs and calls
    ("log zzz", "the newest is"),
    ("log 2", "matches 2 runs"),
    ("diff zzz", "no run or call 'zzz'"),
    ("undo zzz", "`wink log` lists the calls"),
    ("undo 99", "which has only 7 calls"),
    ("undo --to zzz", "`wink log` lists the calls"),
    ("undo --to 1", "changed no files"),
    ("show zzz", "no call 'zzz'"),
    ("show zzz/1", "no run 'zzz'"),
    ("show 99", "which has only 7 calls"),
    ("rewind 99", "which has only 7 calls"),
    ("rerun 99", "which has only 7 calls"),
    ("export zzz", "the newest is"),
    ("query zzz select+1", "the newest is"),
    ("debug zzz", "the newest is"),
    ("resume zzz", "the newest is"),
    ("chat zzz", "wink chat --resume zzz"),
    ("approve zzz", "the newest is"),
    ("fork zzz", "no call 'zzz'"),
    ("branch diff zzz", "no branch 'zzz'"),
    ("branch drop zzz", "`wink branch list` lists them"),
    # together
    ("undo 1 --last", "name only one of"),
    ("undo --last --to 1", "name only one of"),
    ("diff 1 --last", "name only one of"),
    ("rewind 1 --files-only --conversation-only", "name only one of"),
    ("show 1 --before", "--before needs a path"),
    ("fork --before", "--before needs a CALL"),
    ("run x --attempts 2", "--attempts needs --judge"),
    ("run x --judge true", "need --attempts"),
    ("run x --in-place --no-merge", "name only one of"),
    ("approve --yes --deny no", "name only one of"),
    ("query select+1 --json --csv", "name only one of"),
    # texts
    ("send", "give a message"),
    ("send hello", "no run is in progress"),
    ("send use+pytest k3f", 'wink send k3f "..."'),
    ("query", "--schema"),
    ("query drop+table+calls", "SELECT"),
    ("query select+*+from+nosuch", "nosuch"),
    ("run +", "the task is empty"),
    ("resume", "there is no run to resume"),
    # what the settings would have to allow
    ("run x --model nosuch:a", "openai"),
    ("run x --policy nonsense", "nonsense"),
    ("tools edit_fil", "edit_file"),
    ("policy check edit_file {", "not JSON"),
    ("policy check edit_file {}", "invalid arguments"),
    # what else people try
    ("Log", "did you mean 'log'?"),
    ("help log", "wink --help"),
    ("undo -1", "wink undo --help"),
    ("undo 1 2", "unexpected argument: 2; see: wink undo --help"),
    ("diff 1 2 3", "unexpected arguments: 2 3; see: wink diff --help"),
    ("undo --to", "wink undo --help"),
    ("setup --shell", "wink setup --help"),
    ("diff --stat", "wink diff --help"),
    ("debug --host 0.0.0.0", "wink debug --help"),
    ("hook install", "AGENT"),
    ("hook install clade", "did you mean claude?"),
    ("hook install aider", "wink exec -- aider"),
    ("hook install codex --plugin", "run: wink hook install codex"),
    ("hook run", "AGENT"),
    ("exec", "COMMAND"),
    ("exec -w nosuch -- true", "cannot open the directory nosuch"),
    ("exec --ask -- true", "add --yes"),
    ("exec --checkpoint 0 -- true", "wink exec --help"),
    ("mcp install emacs", "claude-desktop"),
    ("mcp inspect", "SERVER"),
    ("export -o nosuch/run.html", "there is no directory nosuch"),
    ("policy trust nosuch.py", "there is no file nosuch.py"),
    ("query ;", "write a SELECT"),
    ("branch checkout parser", "DIR"),
    ("gc --keep -5M", "use 50M or 1GiB"),
    ("run x --model gpt-5", "use one of openai:NAME"),
    ("run x --model scripted:nosuch.json", "cannot read the script"),
    ("fetch zz", "begin with: wink submit"),
]
"""Words (a ``+`` stands for a space), and a part of the line."""


@pytest.mark.parametrize(("words", "part"), WRONG)
def test_wrong_use_is_one_line_that_says_what_to_do(
    wink: Wink,  # noqa: F811
    project: Path,  # noqa: F811
    words: str,
    part: str,
):
    make_run(project, ["Done."], kind="mcp")
    make_run(project, TURNS, kind="mcp")

    done = wink(*(word.replace("+", " ") for word in words.split()))

    assert (done.code, done.out) == (2, "")
    assert part in done.err
    assert re.fullmatch(r"wink: .+\n", done.err)
    assert "Traceback" not in done.err
    assert not re.search(r"\b1 \w+s\b(?! \w+s)", done.err)  # 1 calls


def test_there_are_sixty_of_them():
    assert len(WRONG) >= 60


def test_one_and_many_are_counted_rightly(wink: Wink, project: Path):  # noqa: F811
    make_run(project, [calls(("list_files", {})), "Done."])

    assert "which has only 1 call\n" in wink("show", "9").err
    assert "1 run" in wink().out
    make_run(project, TURNS)
    assert "which has only 7 calls\n" in wink("show", "9").err
    assert "2 runs" in wink().out


# The same words in the same order


def test_a_short_number_is_a_call_and_never_the_beginning_of_a_run(
    wink: Wink,  # noqa: F811
    project: Path,  # noqa: F811
):
    run = make_run(project, TURNS)

    assert wink("undo", "2026").code == 2
    assert wink("undo", run.id[:8]).code == 0


def test_a_run_comes_before_a_message_and_both_can_be_left_out(
    wink: Wink,  # noqa: F811
    project: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    run = make_run(project, TURNS)

    assert "is not in progress" in wink("send", run.mark, "hello").err
    assert "no run is in progress" in wink("send", "hello").err
    assert wink("query", "select 1 as one").out == wink("query", run.mark, "select 1 as one").out
    monkeypatch.chdir(tmp_path)
    assert wink("export", "-w", str(project)).code == 0
    assert (tmp_path / f"{run.id}.html").stat().st_size > 0


SHOWS = [
    "log", "show 3", "diff", "undo --dry-run", "undo", "rewind 3 --dry-run", "tools", "doctor",
    "policy check", 'policy check read_file {"path":"notes.txt"}',
    "gc --dry-run", "branch list", "branch diff parser", "branch merge parser", "export", "approve",
    "query select+1",
]  # fmt: skip


@pytest.mark.parametrize("words", SHOWS)
def test_whatever_shows_something_shows_it_as_json(
    wink: Wink,  # noqa: F811
    project: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: str,
):
    make_run(project, TURNS)
    Branch.create(project, "parser").close()
    monkeypatch.chdir(tmp_path)

    done = wink(*(word.replace("+", " ") for word in words.split()), "-w", str(project), "--json")

    assert done.code in (0, 1)
    assert all(isinstance(json.loads(line), dict) for line in done.out.splitlines())
    if words not in ("approve", "branch diff parser"):
        assert done.out
