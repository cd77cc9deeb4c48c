"""`wink run` and `wink resume`, as a person and as a machine use them."""

from __future__ import annotations

import base64
import io
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from commands import Done, Wink, approve
from terminal import WINK, Terminal, environment
from tests.adapters.wire import WireServer

from weakincentives.adapters import calls, says
from weakincentives.cli.config import load_settings
from weakincentives.cli.trust import trust_of
from weakincentives.cli.workbench import load_types
from weakincentives.contrib.tools import find_sandbox
from weakincentives.errors import SandboxUnavailable
from weakincentives.filesystem import HostFilesystem
from weakincentives.runtime import SavedSession
from weakincentives.runtime.calls import runs_of

BROKEN = "def total(prices):\n    return sum(prices[1:])\n"
FIX = [
    {
        "say": "I look at it first.",
        "call": [
            {"setup_plan": {"objective": "Fix it", "steps": ["Look", "Fix the sum"]}},
            {"read_file": {"path": "calc.py"}},
        ],
        "usage": {"input_tokens": 100, "output_tokens": 20},
    },
    {
        "call": [
            {"edit_file": {"path": "calc.py", "old_string": "nosuch", "new_string": ""}},
            {"write_file": {"path": ".env", "content": "x"}},
            {"edit_file": {"path": "calc.py", "old_string": "[1:]", "new_string": ""}},
            {"update_step": {"step": 1, "status": "done"}},
            {"update_step": {"step": 2, "status": "done"}},
        ],
        "usage": {"input_tokens": 200, "output_tokens": 30},
    },
    {"say": "It adds all prices now.", "usage": {"input_tokens": 300, "output_tokens": 10}},
]
LONG = [
    {"say": "I begin.", "call": [{"write_file": {"path": "one.txt", "content": "1\n"}}]},
    {"call": [{"shell_execute": {"command": "echo 2 > two.txt; cat WAITING"}}]},
    {"call": [{"write_file": {"path": "three.txt", "content": "3\n"}}]},
    "All done.",
]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    project = tmp_path / "project"
    project.mkdir()
    (project / "calc.py").write_text(BROKEN)
    return project


def script(project: Path, turns: list[Any], name: str = "script.json") -> str:
    """Write a script beside the project and return the model that plays it.

    A command that reads WAITING waits until something is written there.
    """
    path = project.parent / name
    path.write_text(json.dumps(turns).replace("WAITING", str(project.parent / "waiting")))
    return f"scripted:{path}"


def files_of(project: Path) -> dict[str, tuple[object, ...]]:
    """Return all that a rollback has to bring back."""
    found: dict[str, tuple[object, ...]] = {}
    for path in [project, *project.rglob("*")]:
        status = path.lstat()
        content = path.read_bytes() if path.is_file() else None
        found[str(path.relative_to(project))] = (status.st_mode, status.st_mtime_ns, content)
    return found


SANDBOX = ("--sandbox", "none")
"""The quickest; what a sandbox keeps in is tested with the sandboxes."""


class Runs:
    """Runs scripts on the project, in this process: the output goes to no terminal."""

    def __init__(self, project: Path, wink: Wink) -> None:
        self.project = project
        self.wink = wink

    def __call__(self, turns: list[Any], *flags: str) -> Done:
        model = script(self.project, turns)
        return self.wink("run", "fix it", "-w", str(self.project), "-m", model, *SANDBOX, *flags)

    def resume(self, *arguments: str) -> Done:
        return self.wink("resume", *arguments, "-w", str(self.project))


@pytest.fixture
def run(project: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Runs:
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    monkeypatch.chdir(project.parent)
    return Runs(project, Wink(capfd, project))


# Without a terminal


def test_progress_is_told_in_plain_lines_and_the_answer_is_the_output(project: Path, run: Runs):
    done = run(FIX, "--policy", "protect=.env")

    assert (done.code, done.out) == (0, "It adds all prices now.\n")
    assert "\x1b" not in done.err
    lines = done.err.splitlines()
    assert lines[1] == "> fix it"
    assert lines[2] == "Commands run without a sandbox: they can do everything you can."
    told = [line for line in _without_times(lines[3:]) if line[:2].strip() and line[:5] != "plan:"]
    assert told == [
        "I look at it first.",
        "✓ setup_plan Fix it",
        "✓ read_file calc.py",
        "✗ edit_file rolled back calc.py",
        "⊘ write_file denied .env",
        "✓ edit_file calc.py +1 -1",
        "✓ update_step 1 done",
        "✓ update_step 2 done",
        "done: 3 turns, 7 calls, 1 rolled back, 1 denied, 1 file changed, 660 tokens,",
    ]
    assert "  Cannot change .env: it is protected. Leave it as it is" in lines
    assert "plan: 2 of 2 done" in lines
    assert "  ✓ 2. Fix the sum" in lines
    assert (project / "calc.py").read_text() == "def total(prices):\n    return sum(prices)\n"
    assert not (project / ".env").exists()


def _without_times(lines: list[str]) -> list[str]:
    words = (line.rpartition(" ") for line in lines)
    return [
        before if last.endswith("s") and last[:1].isdigit() else f"{before}{space}{last}"
        for before, space, last in words
    ]


def test_json_tells_the_same_for_machines(project: Path, run: Runs):
    done = run(FIX, "--json", "--policy", "protect=.env")

    assert done.err == ""
    told = [json.loads(line) for line in done.out.splitlines()]
    first, last = told[0], told[-1]
    assert (first["type"], first["task"], first["dry_run"]) == ("run_started", "fix it", False)
    assert [run.id for run in runs_of(project)] == [first["run"]]
    ended = [each for each in told if each["type"] == "tool_ended"]
    assert [(each["tool"], each["outcome"], each["rolled_back"]) for each in ended[1:5]] == [
        ("read_file", "ok", False),
        ("edit_file", "rolled back", True),
        ("write_file", "denied", False),
        ("edit_file", "committed", False),
    ]
    assert ended[4]["files"] == [{"path": "calc.py", "added": 1, "removed": 1, "ignored": False}]
    assert ended[3]["denied_by"] == "protected_paths"
    plans = [each for each in told if each["type"] == "plan"]
    assert [step["status"] for step in plans[-1]["steps"]] == ["done", "done"]
    assert last["type"] == "result"
    assert (last["outcome"], last["text"]) == ("done", "It adds all prices now.")
    assert (last["input_tokens"], last["output_tokens"], last["cost_usd"]) == (600, 60, None)
    assert last["files"] == [{"path": "calc.py", "added": 1, "removed": 1, "ignored": False}]


def test_quiet_prints_the_answer_only(project: Path, run: Runs):
    done = run(FIX, "--quiet")

    assert (done.out, done.err) == ("It adds all prices now.\n", "")


def test_the_task_can_come_from_standard_input(
    project: Path, run: Runs, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(project)
    monkeypatch.setattr("sys.stdin", io.StringIO("say\nhello"))

    done = run.wink("run", "-", "-m", script(project, ["Hello."]), *SANDBOX, "--json")

    told = [json.loads(line) for line in done.out.splitlines()]
    assert (told[0]["task"], told[0]["workspace"]) == ("say\nhello", str(project))


@pytest.mark.heavy
@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-"])
def test_a_stream_that_is_closed_is_as_one_that_nobody_reads(project: Path, closed: str):
    turns = [{"call": [{"write_file": {"path": "a.txt", "content": "a"}}]}, "Done."]
    run = shlex.join([*WINK, "run", "x", "-m", script(project, turns), *SANDBOX])

    done = subprocess.run(
        ["sh", "-c", f"{run} {closed}"], cwd=project, env=environment(), capture_output=True
    )

    assert (done.returncode, (project / "a.txt").read_text()) == (0, "a")
    assert b"Traceback" not in done.stderr


def test_a_run_that_fails_says_why_and_how_to_go_on(project: Path, run: Runs):
    done = run(FIX, "--max-turns", "1")

    [kept] = runs_of(project)
    assert done.code == 1
    assert done.out == ""
    assert done.err.splitlines()[-2:] == [
        "The model had 1 turns, all that the run allows",
        f"Resume with: wink resume {kept.id} -w {project}",
    ]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--max-tokens", "50"], "Used 120 total tokens; the budget is 50"),
        (["--max-cost", "0.001", "--price", "10/10"], "Spent $0.0012; the budget is $0.001"),
        (["--time-limit", "0.000001"], "deadline"),
    ],
)
def test_limits_hold(run: Runs, flags: list[str], said: str):
    done = run(FIX, *flags)

    assert done.code == 1
    assert said in done.err.lower() or said in done.err


def test_a_limit_in_money_needs_a_price(project: Path, run: Runs):
    done = run(FIX, "--max-cost", "1")

    assert done.code == 2
    assert "max_cost cannot be checked: the price of scripted:" in done.err
    assert "give --price INPUT/OUTPUT" in done.err
    assert runs_of(project) == ()


def test_a_limit_in_money_counts_all_of_a_run_that_is_resumed(run: Runs):
    limits = ["--price", "10/10", "--max-cost", "0.003"]
    assert run(FIX, *limits).code == 1

    again = run.resume()
    more = run.resume("--max-cost", "1")

    assert again.code == 1
    assert "\nSpent $0.0035; the budget is $0.003\n" in again.err
    assert "edit_file" not in again.err, "open calls stay open"
    assert (more.code, more.out) == (0, "It adds all prices now.\n")


def test_the_cost_is_shown_where_the_price_is_set(run: Runs):
    done = run(FIX, "--price", "10/10")

    assert ", 660 tokens, $0.0066, " in done.err


def test_settings_stand_in_the_directory(
    project: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    model = script(project, FIX)
    (project / "wink.toml").write_text(
        f'model = "{model}"\nsuites = ["files", "planning"]\n[policy]\nprotect = [".env"]\n'
    )
    monkeypatch.chdir(project)

    done = Wink(capfd, project)("run", "fix it", "--quiet")

    assert (done.code, done.out) == (0, "It adds all prices now.\n")


def test_a_directory_in_use_is_named_with_who_has_it(
    project: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("weakincentives.runtime.undo.PATIENCE", 0.1)  # it will not end
    with HostFilesystem(project):
        model = script(project, ["Hi."])
        done = Wink(capfd, project)("run", "x", "-w", str(project), "-m", model, "--in-place")

    assert done.code == 2
    assert done.err == (
        f"wink: {project} is in use by process {os.getpid()}: wait for it to end, or stop it\n"
    )
    assert runs_of(project) == ()


def test_a_run_that_could_not_begin_leaves_nothing_behind(
    project: Path, capfd: pytest.CaptureFixture[str]
):
    model = script(project, ["Hi."])

    done = Wink(capfd, project)("run", "x", "-w", str(project), "-m", model, "--ask", "shell")

    assert (done.code, done.out) == (2, "")
    assert (
        "ask: unknown tool 'shell': the rule would never apply; did you mean shell_execute?"
        in done.err
    )
    assert runs_of(project) == ()


def test_what_the_library_logs_goes_into_a_file_beside_the_session(project: Path, run: Runs):
    failing = (
        "import weakincentives as wink\n@wink.tool\ndef fail() -> str:\n"
        "    '''Fail.'''\n    raise OSError('no such luck')\n"
    )
    (project / "mine.py").write_text(failing)
    (project / "wink.toml").write_text('sections = ["mine.py:fail"]\n')
    approve(project)

    done = run([{"call": ["fail"]}, "It failed."])

    assert done.code == 0
    assert "Traceback" not in done.err
    [kept] = runs_of(project)
    assert "no such luck" in kept.path.with_suffix(".log").read_text()


def test_a_server_that_speaks_openais_format_is_asked(
    project: Path, run: Runs, monkeypatch: pytest.MonkeyPatch
):
    with WireServer() as server:
        fix = ("write_file", {"path": "new.txt", "content": "new\n", "overwrite": False})
        played = server.play(calls(fix), says("Written."))
        keys = {"OPENAI_BASE_URL": played.base_url, "OPENAI_API_KEY": "sk-loopback-0123456789"}
        for name, value in keys.items():
            monkeypatch.setenv(name, value)
        model = "openai:some-model"
        done = run.wink("run", "write it", "-w", str(project), "-m", model, *SANDBOX)

    assert done.out == "Written.\n"
    assert (project / "new.txt").read_text() == "new\n"
    assert "✓ write_file new.txt +1" in done.err


def test_a_model_sees_attached_pictures_and_those_that_it_reads(
    project: Path, run: Runs, monkeypatch: pytest.MonkeyPatch
):
    (project / "logo.png").write_bytes(picture := b"\x89PNG\r\n\x1a\n" + bytes(2000))
    (project.parent / "screen.gif").write_bytes(b"GIF89a\1\0")
    with WireServer() as server:
        played = server.play(calls(("read_file", {"path": "logo.png"})), says("Seen."))
        monkeypatch.setenv("OPENAI_BASE_URL", played.base_url)
        monkeypatch.setenv("OPENAI_API_KEY", "sk-loopback-0123456789")
        options = ("-w", str(project), "-m", "openai:some-model", *SANDBOX, "-q")
        done = run.wink("run", "what is it?", *options, "--attach", "screen.gif")
        missing = run.wink("run", "what?", *options, "--attach", "none.gif")

    assert (done.out, played.problems) == ("Seen.\n", [])
    _, user, _, answer, shown = played.bodies[-1]["messages"]
    assert user["content"][1]["image_url"]["url"] == "data:image/gif;base64,R0lGODlhAQA="
    assert answer["content"].startswith("logo.png is a picture:\n[image/png, 2 kB: logo.png]")
    sent = shown["content"][1]["image_url"]["url"].partition(",")[2]
    assert base64.b64decode(sent) == picture
    assert missing.code == 2
    assert "--attach: [Errno 2] No such file or directory: 'none.gif'" in missing.err

    (call,) = runs_of(project)[0].calls()
    assert call.shown.startswith("logo.png is a picture:\n[image/png, 2 kB: logo.png]")


# A dry run


def test_a_dry_run_changes_nothing_and_shows_what_it_would_have(project: Path, run: Runs):
    before = files_of(project)

    done = run(FIX, "--dry-run", "--policy", "protect=.env")

    assert done.code == 0
    assert files_of(project) == before
    assert "-    return sum(prices[1:])\n+    return sum(prices)\n" in done.out
    assert done.out.endswith("It adds all prices now.\n")
    assert "Dry run: everything was rolled back" in done.err


def test_a_dry_run_covers_commands(project: Path, run: Runs):
    try:
        find_sandbox("namespaces")
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    (project / "kept").mkdir()
    (project / "kept/a").write_text("a")
    before = files_of(project)
    command = (
        "rm -r kept; mkdir new; echo b > new/b; chmod 600 calc.py; touch -d 2001-01-01 calc.py"
    )
    turns = [{"call": [{"shell_execute": {"command": command}}]}, "Done."]

    done = run(turns, "--dry-run", "--sandbox", "namespaces")

    assert "✓ shell_execute rm -r kept" in done.err
    assert "+b\n" in done.out
    assert files_of(project) == before


def test_a_dry_run_refuses_what_could_not_be_undone(project: Path, run: Runs):
    turns = [{"call": [{"shell_execute": {"command": "touch ../outside"}}]}, "Denied."]

    done = run(turns, "--dry-run")

    assert "This is a dry run, and the effects of 'shell_execute' outside" in done.err
    assert not (project.parent / "outside").exists()


def test_a_dry_run_that_is_killed_is_undone_by_the_next_command(project: Path, run: Runs):
    before = files_of(project)
    turns = [*FIX[:2], {"call": [{"shell_execute": {"command": "x"}}]}, *LONG]
    flags = ("--dry-run", "--ask", "update_step")
    with Terminal(
        [*WINK, "run", "x", "-w", str(project), "-m", script(project, turns), *SANDBOX, *flags],
        cwd=project.parent,
    ) as terminal:
        terminal.wait_for("[y/n/r/e/a/?]?")
        assert files_of(project) != before
        terminal.process.kill()
        terminal.end()

    done = run(["Hello."])

    assert done.code == 0
    assert files_of(project) == before


def test_a_dry_run_cannot_be_resumed(project: Path, run: Runs):
    run(FIX, "--dry-run", "--max-turns", "1")
    [kept] = runs_of(project)

    done = run.resume(kept.id)

    assert done.code == 2
    assert "cannot be resumed: it is a dry run" in done.err


# On a terminal


def terminal_run(project: Path, turns: list[Any], *flags: str, **options: Any) -> Terminal:
    return Terminal(
        [
            *WINK,
            "run",
            "fix it",
            "-w",
            str(project),
            "-m",
            script(project, turns),
            *SANDBOX,
            *flags,
        ],
        cwd=project.parent,
        **options,
    )


def test_a_person_sees_the_plan_the_calls_and_what_came_of_them(project: Path):
    turns = [*FIX[:1], {"call": [{"shell_execute": {"command": "cat WAITING"}}]}, *FIX[1:]]
    os.mkfifo(project.parent / "waiting")
    with terminal_run(project, turns, "--policy", "protect=.env") as terminal:
        terminal.wait_for("shell_execute cat")
        under_way = terminal.wait_for("Ctrl-C stops")  # the last of what is drawn
        (project.parent / "waiting").write_text("go\n")
        assert terminal.end() == 0
        seen = terminal.text

    assert "2 calls, 120 tokens" in under_way
    assert "I look at it first." in under_way
    lines = _without_times(seen.splitlines())
    assert any(line.startswith("✓ shell_execute cat") for line in lines)
    assert "  · 1. Look" in under_way.splitlines()
    assert "✗ edit_file rolled back calc.py" in lines
    assert "⊘ write_file denied .env" in lines
    assert "✓ edit_file calc.py +1 -1" in lines
    assert "  ✓ 2. Fix the sum" in lines
    assert lines[-1] == "It adds all prices now."
    assert "Ctrl-C stops" not in seen  # what was live is gone
    assert terminal.raw.endswith(b"\x1b[?25h") or b"\x1b[?25h" in terminal.raw  # the cursor


def test_what_is_live_never_erases_a_line_above_it(project: Path):
    """The live lines are drawn by a thread of their own, while calls of any number end."""
    turns: list[Any] = []
    for n in range(40):
        calls = [{"write_file": {"path": f"{n}-{m}.txt", "content": "x"}} for m in range(1 + n % 7)]
        turns.append({"say": f"turn {n}", "call": calls})
    with terminal_run(project, [*turns, "Done."], "--max-turns", "99", rows=50) as terminal:
        assert terminal.end() == 0
        lines = terminal.text.splitlines()

    wanted = [f" {n}-{m}.txt" for n in range(40) for m in range(1 + n % 7)]
    called = [line for line in lines if line.startswith("✓ write_file")]
    assert [each for each in wanted if not any(each in line for line in called)] == []
    assert [n for n in range(40) if f"turn {n}" not in lines] == []


def test_on_a_narrow_terminal_a_call_is_still_one_line(project: Path):
    with terminal_run(project, FIX, columns=20) as terminal:
        assert terminal.end() == 0
        lines = terminal.text.splitlines()

    assert sum(line.startswith(("✓ ", "✗ ", "⊘ ")) for line in lines) == 7
    assert sum(line.startswith("✗ edit_file rolled") for line in lines) == 1
    assert all(len(line) <= 20 for line in lines)


@pytest.mark.heavy
@pytest.mark.skipif(
    not sys.prefix.isascii() or not __file__.isascii(),
    reason="under LC_ALL=C Python cannot start from a path that is not ASCII",
)
def test_without_utf8_signs_become_words(project: Path):
    with terminal_run(project, FIX, env={"LC_ALL": "C"}) as terminal:
        assert terminal.end() == 0

    assert "failed edit_file rolled back calc.py" in terminal.text
    assert terminal.raw.isascii()


@pytest.mark.parametrize("env", [{"TERM": "dumb"}, {"NO_COLOR": "1"}])
def test_colours_can_be_switched_off(project: Path, env: dict[str, str]):
    with terminal_run(project, FIX, env=env) as terminal:
        assert terminal.end() == 0

    assert b"\x1b[32m" not in terminal.raw
    assert "✓ edit_file calc.py +1 -1" in terminal.text


def test_escape_sequences_of_others_never_reach_the_terminal(project: Path):
    wild = "\x1b[2J\x1b]0;title\x07wild"
    turns = [
        {
            "say": wild,
            "call": [
                {"write_file": {"path": f"{wild}.txt", "content": wild}},
                {"shell_execute": {"command": "printf '\\033[2Jwild\\n'; exit 3"}},
                {"setup_plan": {"objective": wild, "steps": [wild]}},
                {"update_step": {"step": 1, "status": "done"}},
            ],
        },
        wild,
    ]
    with terminal_run(project, turns) as terminal:
        assert terminal.end() == 0

    assert "\\x1b[2J\\x1b]0;title\\x07wild" in terminal.text
    assert b"\x1b[2J" not in terminal.raw
    assert b"\x07" not in terminal.raw


# Approval


ASKED = "yes, no, no with a reason, edit, always [y/n/r/e/a/?]?"
VIEW_ALL = "yes, no, no with a reason, edit, always, view all [y/n/r/e/a/v/?]?"


def test_a_person_is_asked_and_their_word_holds(project: Path):
    write = [{"write_file": {"path": f"{name}.txt", "content": "new\n"}} for name in "abc"]
    turns = [{"call": write}, "Done."]
    with terminal_run(project, turns, "--ask", "write_file") as terminal:
        asked = terminal.wait_for(VIEW_ALL)
        terminal.send("what?\n")
        terminal.wait_for(f"what?\n{VIEW_ALL}")
        terminal.send("y\nand more that was pasted\n")
        terminal.wait_for(f"Several lines came at once. Type one line.\n{VIEW_ALL}")
        terminal.send("r\n")
        terminal.wait_for("Reason, for the model:")
        terminal.send("write b.txt first\n")
        # To its end: what is typed before the question is asked is no answer.
        terminal.wait_for(f"    | +++ b/b.txt\n    | @@ -0,0 +1 @@\n    | +new\n{VIEW_ALL}")
        terminal.send("a\n")
        terminal.wait_for("all calls of write_file, some paths, back [t/p/b]?")
        terminal.send("p\n")
        terminal.wait_for("Paths, as a glob [b.txt]:")
        terminal.send("?.txt\n")
        terminal.wait_for("    | write_file ?.txt\n")
        terminal.wait_for("for this session only, back [s/o/b]?")
        terminal.send("o\n")
        assert terminal.end() == 0

    assert "write_file wants to run; it can be undone." in asked
    assert "    | +++ b/a.txt\n    | @@ -0,0 +1 @@\n    | +new\n" in asked
    assert b"\x1b[32m    | +new" in terminal.raw
    assert "Call to 'write_file' was not approved by" in terminal.text
    assert ": write b.txt first" in terminal.text  # the model reads it
    assert "+++ b/c.txt" not in terminal.text  # always
    assert sorted(path.name for path in project.glob("*.txt")) == ["b.txt", "c.txt"]


def test_a_person_edits_a_call_in_their_editor_and_saves_a_rule(project: Path):
    editor = project.parent / "editor.py"
    editor.write_text(
        "import os, sys\n"
        "assert os.isatty(1) and os.tcgetpgrp(0) == os.getpgrp()\n"  # Ctrl-C reaches it alone
        "text = open(sys.argv[1]).read()\n"
        "open(sys.argv[1], 'w').write(text.replace('one', '2') + '\\n')\n"
    )
    commands = ("echo one > a", "echo 3", "echo 4; rm calc.py")
    turns = [{"call": [{"shell_execute": {"command": each}} for each in commands]}, "Done."]
    env = {"EDITOR": f"{sys.executable} {editor}", "VISUAL": ""}
    with terminal_run(project, turns, "--ask", "shell_execute", env=env) as terminal:
        terminal.wait_for(ASKED)
        terminal.send("e\n")
        terminal.wait_for("Which argument (command, cwd, env, stdin, timeout)?")
        terminal.send("command\n")
        asked = terminal.wait_for(ASKED, times=2)
        terminal.send("y\n")
        terminal.wait_for(ASKED, times=3)
        terminal.send("a\n")
        terminal.wait_for("all calls of shell_execute, some commands, back [t/c/b]?")
        terminal.send("c\n")
        terminal.wait_for("Commands that begin with [echo 3]:")
        terminal.send("echo\n")
        terminal.wait_for("    | shell_execute echo\n")
        terminal.wait_for("save to wink.toml, for this session only, back [s/o/b]?")
        terminal.send("s\n")
        terminal.wait_for(ASKED, times=4)  # the rule does not cover shell syntax
        terminal.send("n\n")
        assert terminal.end() == 0

    assert "  $ echo 2 > a\n" in asked
    assert "  what it can reach:\n    | sandbox: none: it can do everything that you can; " in asked
    assert "✓ shell_execute echo 2 > a" in terminal.text  # what ran
    assert (project / "a").read_text() == "2\n"
    assert (project / "wink.toml").read_text() == (
        '[[approve]]\ntool = "shell_execute"\ncommand = ["echo"]\n'
    )
    assert trust_of(project).missing(load_settings(project)) == []  # it is approved with the rule


def test_everything_that_is_asked_about_is_shown_and_nothing_of_it_hides(project: Path):
    """Lines stay lines, padding is counted, what cannot be seen is spelled out."""
    command = f"echo hi{' ' * 3000}; rm -rf x\n# yes, no, always [y/n/a]? \u202e\u3164 \\"
    turns = [{"call": [{"shell_execute": {"command": command}}]}, "Done."]
    with terminal_run(project, turns, "--ask", "shell_execute") as terminal:
        asked = terminal.wait_for(f"\n{ASKED}")
        terminal.send("n\n")
        assert terminal.end() == 0

    assert "  $ (2 lines):\n" in asked
    assert "    | echo hi\\s{3000}; rm -rf x\n" in asked
    assert "    | # yes, no, always [y/n/a]? \\u202e\\u3164 \\\\\n" in asked


def test_what_is_left_out_is_said_and_can_be_seen_before_the_answer(project: Path):
    content = "".join(f"line {n}\n" for n in range(1, 401))
    turns = [{"call": [{"write_file": {"path": "a.txt", "content": content}}]}, "Done."]
    with terminal_run(project, turns, "--ask", "write_file") as terminal:
        asked = terminal.wait_for(VIEW_ALL)
        terminal.send("v\n")
        everything = terminal.wait_for(f"\n{ASKED}")
        terminal.send("y\n")
        assert terminal.end() == 0

    assert "    ... 390 lines (" in asked
    assert (
        f"NOT EVERYTHING IS SHOWN: 390 of 404 lines are hidden; v shows all.\n{VIEW_ALL}" in asked
    )
    assert "line 200" not in asked
    assert all(f"    | +line {n}\n" in everything for n in range(1, 401))
    assert all(f"    | line {n}\n" in everything for n in range(1, 401))
    assert (project / "a.txt").read_text() == content


def test_the_names_of_arguments_cannot_act_on_the_terminal(project: Path):
    """Where a schema is open, a model makes them up."""
    (project.parent / "mine.py").write_text(
        "import weakincentives as wink\n"
        "tools = wink.Tool.from_schema('open', 'Takes anything.', {'type': 'object'},\n"
        "    lambda params, *, context: wink.ToolResult.ok(None, 'ran'))\n"
    )
    (project / "wink.toml").write_text(f'sections = ["{project.parent}/mine.py:tools"]\n')
    approve(project)
    arguments = {"a\x1b[2J\nyes": False, "ok": "", "b\u202e": None, "c" * 150: "\x1b[2J"}
    turns = [{"call": [{"open": arguments}]}, "Done."]
    with terminal_run(project, turns, "--ask", "open") as terminal:
        asked = terminal.wait_for("[y/n/r/e/a/?]?")
        terminal.send("n\n")
        assert terminal.end() == 0

    assert '  "a\\u001b[2J\\nyes": false\n  ok: ""\n  "b\\u202e": null\n  (a long name):\n' in asked
    assert '  (its value): "\\u001b[2J"\n' in asked
    assert b"\x1b[2J" not in terminal.raw
    assert "\u202e".encode() not in terminal.raw


def test_no_answer_is_a_no(project: Path):
    """Ctrl-D; what comes next stands below the question."""
    turns = [{"call": [{"write_file": {"path": "a.txt", "content": ""}}]}, "Done."]
    with terminal_run(project, turns, "--ask", "write_file") as terminal:
        terminal.wait_for(VIEW_ALL)
        terminal.send("\x04")
        assert terminal.end() == 0

    assert "\n⊘ write_file denied a.txt" in terminal.text
    assert "was not approved: the question was not answered" in terminal.text


def test_ctrl_c_at_a_question_stops_the_run(project: Path):
    turns = [{"call": [{"write_file": {"path": "a.txt", "content": ""}}]}, "Done."]
    with terminal_run(project, turns, "--ask", "write_file") as terminal:
        terminal.wait_for(VIEW_ALL)
        terminal.interrupt()
        assert terminal.end() == 130

    assert "\n✗ write_file a.txt" in terminal.text
    assert "'write_file' was interrupted before it ran" in terminal.text
    assert not (project / "a.txt").exists()


def test_without_a_terminal_what_needs_approval_is_denied(project: Path, run: Runs):
    turns = [{"call": [{"write_file": {"path": "a.txt", "content": ""}}]}, "Done."]

    denied = run(turns, "--ask", "write_file")
    approved = run(turns, "--ask", "write_file", "--yes")

    assert "was not approved: there is no terminal to ask at" in denied.err
    assert "✓ write_file a.txt" in approved.err


# Stopping, and going on


@pytest.fixture
def long_run(project: Path) -> str:
    os.mkfifo(project.parent / "waiting")
    return script(project, LONG)


@contextmanager
def waiting_command(project: Path) -> Iterator[None]:
    """Begin when the command reads from the pipe: its name is shown before its call begins."""
    opened = -1
    while opened < 0:
        with suppress(OSError):  # until someone reads
            opened = os.open(project.parent / "waiting", os.O_WRONLY | os.O_NONBLOCK)
    try:
        yield
    finally:
        os.close(opened)


def let_go_on(project: Path) -> None:
    """Let the command that waits find something, when it is made again."""
    waiting = project.parent / "waiting"
    waiting.unlink()
    waiting.write_text("")


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGINT, 130),
        (signal.SIGTERM, 143),
        (signal.SIGHUP, 129),
        (signal.SIGKILL, -9),
    ],
)
def test_a_run_that_was_stopped_goes_on_where_it_was(
    project: Path, run: Runs, long_run: str, number: signal.Signals, code: int
):
    with Terminal(
        [*WINK, "run", "long", "-w", str(project), "-m", long_run, *SANDBOX], cwd=project.parent
    ) as terminal:
        terminal.wait_for("shell_execute echo 2")
        with waiting_command(project):
            if number is signal.SIGINT:
                terminal.interrupt()
            else:
                terminal.process.send_signal(number)
            assert terminal.end() == code
        seen = terminal.text
    [kept] = runs_of(project)
    if number is not signal.SIGKILL:
        # In one piece, however wide the terminal is: it is there to be copied.
        assert f"Resume with: wink resume {kept.id} -w {project}".encode() in terminal.raw
        assert "✗ shell_execute rolled back echo 2" in seen
    assert sorted(path.name for path in project.glob("*.txt")) == ["one.txt"]

    let_go_on(project)

    done = run.resume()

    assert (done.code, done.out) == (0, "All done.\n")
    assert f"resumed {kept.id}" in done.err
    # The call under way is on record as interrupted; after a kill it is not, and is made again.
    made_again = number is signal.SIGKILL
    assert (project / "two.txt").exists() is made_again
    assert (project / "one.txt").exists()
    assert (project / "three.txt").exists()


def test_a_run_whose_file_is_damaged_is_not_resumed_and_it_is_said_why(project: Path, run: Runs):
    run(FIX)
    [kept] = runs_of(project)
    data = kept.path.read_bytes()
    kept.path.write_bytes(data[:-40] + b"~" + data[-39:])
    before = sorted(os.listdir(project))

    for arguments in ([kept.id, "and then?"], ["and then?"]):
        done = run.resume(*arguments)

        assert (done.code, done.out) == (2, "")
        assert "cannot be resumed" in done.err
        assert f"{kept.path} is damaged" in done.err
    assert sorted(os.listdir(project)) == before


def test_a_run_whose_terminal_is_closed_stops_at_a_clean_point(
    project: Path, run: Runs, long_run: str
):
    terminal = Terminal(
        [*WINK, "run", "long", "-w", str(project), "-m", long_run, *SANDBOX], cwd=project.parent
    )
    with terminal:
        terminal.wait_for("shell_execute echo 2")
        with waiting_command(project):
            terminal.hang_up()
            assert terminal.end() == 129

    log = run.wink("log", "-w", str(project))

    assert "rolled back" in log.out
    assert run.resume().out == "All done.\n"


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_run_that_is_stopped_before_it_begins_leaves_nothing_behind(
    project: Path, number: signal.Signals, code: int
):
    (project / "mine.py").write_text(
        "import time\nfrom pathlib import Path\n"
        "(Path(__file__).parents[1] / 'at_work').touch()\ntime.sleep(600)\n"
    )
    (project / "wink.toml").write_text('sections = ["mine.py:tools"]\n')
    approve(project)
    with terminal_run(project, ["Hello."]) as terminal:
        wait_for_sign(project, "at_work", terminal)
        terminal.process.send_signal(number)
        assert terminal.end() == code, terminal.text

    assert "wink: interrupted" in terminal.text
    assert runs_of(project) == ()


def test_a_signal_that_reaches_another_thread_stops_a_run_that_waits(project: Path):
    """It does not interrupt what the main thread waits for; nor does one just before the wait."""
    (project / "mine.py").write_text(
        "import signal, threading, time\n"
        "def send():\n"
        "    time.sleep(0.3)\n"
        "    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)\n"
        "threading.Thread(target=send).start()\n"
        "time.sleep(600)\n"
    )
    (project / "wink.toml").write_text('sections = ["mine.py:tools"]\n')
    approve(project)
    with terminal_run(project, ["Hello."]) as terminal:
        assert terminal.end() == 143, terminal.text

    assert "wink: interrupted" in terminal.text
    assert runs_of(project) == ()


def test_two_signals_at_once_are_one(project: Path, long_run: str):
    """As `timeout` and `make` pass one on twice: the second does not cut the clean end short."""
    with Terminal(
        [*WINK, "run", "long", "-w", str(project), "-m", long_run, *SANDBOX], cwd=project.parent
    ) as terminal:
        terminal.wait_for("shell_execute echo 2")
        # While it is stopped, so that however busy the machine is, they come together.
        for number in (signal.SIGSTOP, signal.SIGINT, signal.SIGTERM, signal.SIGCONT):
            terminal.process.send_signal(number)
        assert terminal.end() in (130, 143), terminal.text  # which one is first, nobody can say

    assert b"Resume with: wink resume" in terminal.raw
    assert sorted(path.name for path in project.glob("*.txt")) == ["one.txt"]


def test_a_second_ctrl_c_ends_it_at_once(project: Path):
    """Also where something does not let itself be stopped."""
    (project / "mine.py").write_text(
        "import time\nfrom pathlib import Path\nimport weakincentives as wink\n"
        "signs = Path(__file__).parents[1]\n@wink.tool(reach='reversible')\n"
        "def stubborn(*, context: wink.ToolContext) -> str:\n    '''Go on and on.'''\n"
        "    context.filesystem.write('half.txt', 'half')\n"
        "    while True:\n"
        "        try:\n            (signs / 'at_work').touch()\n            time.sleep(600)\n"
        "        except KeyboardInterrupt:\n            (signs / 'not_yet').touch()\n"
    )
    (project / "wink.toml").write_text('sections = ["mine.py:stubborn"]\nsandbox = "none"\n')
    approve(project)
    model = script(project, [{"call": ["stubborn"]}, "Done."])
    with Terminal([*WINK, "run", "x", "-w", str(project), "-m", model], cwd=project) as terminal:
        wait_for_sign(project, "at_work", terminal)
        assert (project / "half.txt").exists()
        terminal.interrupt()
        wait_for_sign(project, "not_yet", terminal)
        # A signal that comes twice at once, as some programs pass it on, counts once.
        time.sleep(0.4)
        terminal.interrupt()
        assert terminal.end() == 130
        assert "stopped at once; the next wink command rolls back the current call" in terminal.text

    with HostFilesystem(project):
        assert not (project / "half.txt").exists()


def wait_for_sign(project: Path, name: str, terminal: Terminal) -> None:
    while not (project.parent / name).exists():
        assert terminal.process.poll() is None, terminal.text
        time.sleep(0.01)


def test_a_run_that_ended_goes_on_with_a_message(project: Path, run: Runs):
    run(["First.", {"call": [{"read_file": {"path": "calc.py"}}]}, "Second."])
    [kept] = runs_of(project)

    without = run.resume()
    with_one = run.resume("and then?")

    assert without.code == 2
    assert without.err == (
        f'wink: {kept.id} has finished; give a message to continue: wink resume {kept.id} "..."\n'
    )
    assert (with_one.code, with_one.out) == (0, "Second.\n")
    assert "> and then?" in with_one.err


def test_the_rules_of_a_run_hold_when_it_is_resumed(project: Path, run: Runs):
    turns = [*FIX[:1], {"call": [{"write_file": {"path": ".env", "content": ""}}]}, "Denied."]
    run(turns, "--max-turns", "1", "--policy", "protect=.env")
    steps = {"step": 1, "status": "done"}, {"step": 2, "status": "done"}
    turns[1]["call"] += [{"update_step": step} for step in steps]
    script(project, turns)

    done = run.resume("--max-turns", "9")

    assert done.out == "Denied.\n"
    assert "Cannot change .env: it is protected" in done.err
    assert not (project / ".env").exists()


def test_the_sandbox_of_a_run_stays_when_it_is_resumed(project: Path, run: Runs):
    """Settings add up; a name given later wins."""
    turns = [*FIX[:1], {"call": [{"shell_execute": {"command": "echo $A$B"}}]}, "Shown."]
    run(turns, "--max-turns", "1", "--sandbox", "env=A=kept-", "--sandbox", "env=B=old")
    script(project, turns)

    done = run.resume("--max-turns", "9", "--sandbox", "env=B=new", "--json")

    assert "kept-new" in done.out


def test_a_run_under_way_is_not_taken_up_twice(project: Path, run: Runs):
    run(FIX, "--max-turns", "1")
    [kept] = runs_of(project)
    load_types(load_settings(project))

    with SavedSession.open(kept.path):
        done = run.resume()

    assert done.code == 2
    assert done.err == f"wink: {kept.id} is running in another process\n"


# Help


@pytest.mark.parametrize("group", ["policy", "branch", "hook"])
def test_a_group_without_a_command_shows_its_help(run: Runs, group: str):
    done = run.wink(group)

    assert (done.code, done.err) == (2, "")
    assert done.out.startswith("Usage: ")
    assert "\nCommands:\n" in done.out


def test_help_teaches(run: Runs, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "120")

    done = run.wink("run", "--help")

    assert done.code == 0
    for wanted in ("--dry-run", "protect=GLOB", 'wink run "fix the failing test"'):
        assert wanted in done.out


# Messages to a run in progress


def test_a_message_reaches_a_run_in_progress_even_if_it_is_killed_first(project: Path, run: Runs):
    os.mkfifo(project.parent / "waiting")
    waiting = {"call": [{"shell_execute": {"command": "cat WAITING"}}]}
    model = script(project, [waiting, "Noted.", "Done."])
    argv = [*WINK, "run", "x", "-w", str(project), "-m", model, *SANDBOX]

    def sent(*arguments: str) -> Done:
        return run.wink("send", *arguments, "-w", str(project))

    refused = sent("too early")
    assert (refused.code, "no run is in progress" in refused.err) == (2, True)
    with subprocess.Popen(argv, env=environment(dict(os.environ)), stderr=subprocess.PIPE) as child:
        assert child.stderr is not None
        while b"> x" not in child.stderr.readline():
            pass
        with open(project.parent / "waiting", "w"):  # the command reads
            done = sent("use pytest")
            child.kill()
    (earlier,) = runs_of(project)
    assert (done.code, done.err) == (0, f"sent to {earlier.id}\n")

    late = sent(earlier.mark, "too late")
    assert (late.code, f"{earlier.id} is not in progress" in late.err) == (2, True)
    (project.parent / "waiting").unlink()
    (project.parent / "waiting").write_text("go")
    resumed = run.resume()
    again = run.resume(earlier.id, "and now?")

    assert (resumed.code, again.code) == (0, 0), again.err
    assert "> use pytest" in resumed.err
    texts = [
        each["fields"]["text"]
        for each in runs_of(project)[0].data.log["weakincentives.runtime.conversation:Message"]
        if each["fields"]["role"] == "user"
    ]
    assert texts == ["x", "use pytest", "and now?"]
