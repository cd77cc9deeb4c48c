"""`wink chat`: a person at a terminal, and messages from a pipe."""

from __future__ import annotations

import io
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import Done, Wink, approve
from terminal import WINK, Terminal, wink
from tests.adapters.wire import WireServer

from weakincentives.adapters import calls, says
from weakincentives.errors import ProviderUnavailable
from weakincentives.runtime.calls import runs_of

BROKEN = "def total(prices):\n    return sum(prices[1:])\n"
READ = {"call": [{"read_file": {"path": "calc.py"}}]}
FIX = {
    "call": [
        {"setup_plan": {"objective": "Fix it", "steps": ["Fix the sum"]}},
        {"edit_file": {"path": "calc.py", "old_string": "[1:]", "new_string": ""}},
    ],
    "usage": {"input_tokens": 200, "output_tokens": 30},
}
WAIT = {"call": [{"shell_execute": {"command": "echo half > half.txt; cat WAITING"}}]}
NEVER = {"write_file": {"path": "never.txt", "content": "never"}}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    project = tmp_path / "project"
    project.mkdir()
    (project / "calc.py").write_text(BROKEN)
    os.mkfifo(tmp_path / "waiting")
    return project


def script(project: Path, turns: list[Any], name: str = "script.json") -> str:
    path = project.parent / name
    path.write_text(json.dumps(turns).replace("WAITING", str(project.parent / "waiting")))
    return f"scripted:{path}"


def chatting(project: Path, turns: list[Any], *flags: str, **size: int) -> Terminal:
    argv = [*WINK, "chat", "-m", script(project, turns), "--sandbox", "none", *flags]
    return Terminal(argv, cwd=project, env=dict(os.environ), **size)


Piped = Callable[..., Done]


@pytest.fixture
def piped(
    project: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Piped:
    """Chat in this process, with messages from a pipe."""
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    monkeypatch.chdir(project)

    def chat(messages: str, *flags: str) -> Done:
        monkeypatch.setattr("sys.stdin", io.StringIO(messages))
        return Wink(capfd, project)("chat", *flags)

    return chat


def texts_of(project: Path, role: str) -> list[str]:
    messages = runs_of(project)[-1].data.log["weakincentives.runtime.conversation:Message"]
    fields = [each["fields"] for each in messages]
    return [each["text"] for each in fields if each["role"] == role and each["text"]]


# At a terminal


def test_talk_approve_interrupt_send_undo_and_rewind(project: Path, state: Path):
    """One chat from its first message to Ctrl-D, as a person would have it."""
    stopped = {"call": [*WAIT["call"], NEVER]}
    refused = [{"call": [NEVER]}, "Then not."]
    turns = [
        READ,
        FIX,
        "Fixed \x1b[31mit.",
        *refused,
        stopped,
        "I stop.",
        WAIT,
        "Noted.",
        "As before.",
    ]
    with chatting(project, turns, "--ask", "write_file") as terminal:
        terminal.wait_for("Ctrl-D quits.")
        terminal.type("fix the sum\x1b\rin calc.py\r")  # Alt-Enter between them
        terminal.wait_for(r"Fixed \x1b[31mit.")  # spelled out
        assert "sum(prices)" in (project / "calc.py").read_text()
        terminal.type("/diff\r")
        terminal.wait_for("+    return sum(prices)")
        terminal.type("/plan\r/cost\r")
        terminal.wait_for("1. Fix the sum")
        terminal.wait_for("200 tokens read, 30 written")

        terminal.type("write it\r")
        terminal.wait_for("no with a reason")
        terminal.send("r\r")
        terminal.wait_for("Reason, for the model:")
        terminal.send("that file is mine\r")
        terminal.wait_for("Then not.")
        assert "that file is mine" in texts_of(project, "tool")[-1]

        terminal.type("now wait\r")
        terminal.wait_for("shell_execute echo half")
        with open(project.parent / "waiting", "w"):  # the command reads: it has written half.txt
            terminal.interrupt()
            terminal.wait_for("interrupted: 1 turn")
        terminal.type("never mind\r")
        terminal.wait_for("I stop.")
        assert [path.name for path in project.iterdir()] == ["calc.py"]

        terminal.type("wait again\r")
        with open(project.parent / "waiting", "w"):
            terminal.send("use pytes\x7fst\r")
            terminal.wait_for("queued: use pytest")
        terminal.wait_for("Noted.")

        terminal.type("/undo 1\r")
        terminal.wait_for("Undone: calc.py")
        assert (project / "calc.py").read_text() == BROKEN
        terminal.type("/rewind\r")
        terminal.wait_for("  5  wait again")
        terminal.type("/rewind 3\r")
        terminal.wait_for("Back before message 3.")
        terminal.type(" please\r")  # after the old message, which stands in the prompt
        terminal.wait_for("As before.")
        terminal.type("\x04")
        assert terminal.end() == 0
        assert f"To continue: wink chat --resume {runs_of(project)[0].mark}" in terminal.text

    assert texts_of(project, "user")[-1] == "now wait please"
    assert (state / "wink" / "chat_history").stat().st_mode & 0o777 == 0o600
    assert "+fix the sum\n+in calc.py\n" in (state / "wink" / "chat_history").read_text()


def test_a_chat_waits_for_input_and_ctrl_c_quits_it_the_second_time(project: Path):
    with chatting(project, ["Hello."]) as terminal:
        terminal.wait_for("Ctrl-D quits.")
        assert runs_of(project) == ()  # nothing was said
        terminal.type("hi\r")
        terminal.wait_for("Hello.")
        (run,) = runs_of(project)
        refused = wink("send", run.mark, "x", cwd=project, env=dict(os.environ))
        assert (refused.returncode, "waits for input" in refused.stderr) == (2, True)
        terminal.type("half a message")
        terminal.wait_for("half a message")
        terminal.interrupt()
        terminal.wait_for("Ctrl-C again quits")
        terminal.interrupt()
        assert terminal.end() == 0


@pytest.mark.heavy
def test_a_killed_chat_continues_where_it_was(project: Path):
    """What was answered is there; the call of the killed turn is rolled back, and is not re-run."""
    turns = [READ, FIX, "Fixed.", WAIT, "I see."]
    with chatting(project, turns) as terminal:
        terminal.wait_for("Ctrl-D quits.")
        terminal.type("fix it\r")
        terminal.wait_for("Fixed.")
        terminal.type("wait\r")
        with open(project.parent / "waiting", "w"):
            terminal.process.kill()
            terminal.end()
    with Terminal([*WINK, "chat", "--resume"], cwd=project, env=dict(os.environ)) as terminal:
        terminal.wait_for("resumed ")
        terminal.wait_for("> wait")
        terminal.type("go on\r")
        terminal.wait_for("I see.")
        terminal.type("/quit\r")
        assert terminal.end() == 0

    assert [path.name for path in project.iterdir()] == ["calc.py"]
    assert texts_of(project, "user") == ["fix it", "wait", "go on"]
    assert texts_of(project, "tool")[-1].startswith("The turn was interrupted before this call ran")


@pytest.mark.heavy
def test_a_model_that_does_not_answer_is_interrupted(project: Path):
    """With a server on loopback; the next message continues the conversation."""
    silence = ProviderUnavailable("no answer", code="TIMEOUT")
    with WireServer() as server:
        played = server.play(silence, calls("list_directory"), says("Here I am."), says("Bye."))
        keys = {"OPENAI_BASE_URL": played.base_url, "OPENAI_API_KEY": "sk-loopback-0123456789"}
        argv = [*WINK, "chat", "-m", "openai:some-model", "--sandbox", "none"]
        with Terminal(argv, cwd=project, env={**os.environ, **keys}) as terminal:
            terminal.wait_for("Ctrl-D quits.")
            terminal.type("hello?\r")
            terminal.wait_for("turn 1: thinking")
            while not played.bodies:  # the server's thread fills it
                time.sleep(0.01)
            terminal.interrupt()
            terminal.wait_for("interrupted: 1 turn")
            terminal.type("are you there?\r")
            terminal.wait_for("Here I am.")
            terminal.type("bye\r")
            terminal.wait_for("Bye.")
            terminal.type("\x04")
            assert terminal.end() == 0
        asked = played.asked()[-1].messages

    texts = [message.text for message in asked if message.role != "tool"]
    assert texts == ["hello?", "are you there?", "", "Here I am.", "bye"]


def test_ctrl_d_while_the_model_works_quits_after_the_turn(project: Path):
    with chatting(project, [WAIT, "Noted."]) as terminal:
        terminal.wait_for("Ctrl-D quits.")
        terminal.type("wait\r")
        terminal.wait_for("shell_execute")
        with open(project.parent / "waiting", "w"):
            terminal.send("\x04x")
            terminal.wait_for("> x")  # so it has read both keys
        assert terminal.end() == 0

    assert "Noted." in terminal.text


def test_a_signal_that_reaches_another_thread_interrupts_a_turn_that_waits(project: Path):
    """In the second turn, too: the prompt between them listens for signals itself."""
    (project / "mine.py").write_text(
        "import signal, threading, time\nimport weakincentives as wink\n"
        "def send():\n"
        "    time.sleep(0.3)\n"
        "    signal.pthread_kill(threading.get_ident(), signal.SIGINT)\n"
        "@wink.tool(reach='reversible')\n"
        "def wait(*, context: wink.ToolContext) -> str:\n    '''Wait.'''\n"
        "    threading.Thread(target=send).start()\n"
        "    time.sleep(600)\n"
    )
    (project / "wink.toml").write_text('sections = ["mine.py:wait"]\n')
    approve(project)
    with chatting(project, [{"call": ["wait"]}, {"call": ["wait"]}]) as terminal:
        terminal.wait_for("Ctrl-D quits.")
        for number in (1, 2):
            terminal.type("wait\r")
            terminal.wait_for("interrupted: 1 turn", times=number)
        terminal.type("\x04")
        assert terminal.end() == 0


# Without a terminal


def test_each_line_of_a_pipe_is_a_message_or_a_command(project: Path, piped: Piped):
    model = script(project, [READ, FIX, "Fixed.", "Both lines."])
    done = piped("fix it\n\n/diff\nmore\\\nlines\n", "-m", model, "--sandbox", "none")

    assert done.code == 0, done.err
    assert done.out.splitlines()[0] == "Fixed."
    assert "+    return sum(prices)" in done.out
    assert done.out.splitlines()[-1] == "Both lines."
    assert texts_of(project, "user") == ["fix it", "more\nlines"]


def test_a_failed_message_is_told_by_the_exit_code_and_the_next_is_answered(
    project: Path, piped: Piped
):
    other = script(project, ["Hello."], "other.json")
    messages = f"hello\n/model {other}\nagain\n/model nosuch\n/nosuch\n/undo 9\n/diff a b\n"

    done = piped(messages, "-m", script(project, []), "--sandbox", "none")

    assert (done.code, done.out.splitlines()) == (1, [f"model: {other}", "Hello."])
    for said in (
        "the script has 0 turns",
        "unknown model 'nosuch'",
        "unknown command /nosuch; /help lists the commands",
        "there is no message 9; there are 2",
        "wrong arguments; /diff: ",
    ):
        assert said in done.err


def test_files_that_a_person_has_changed_are_left_alone(project: Path, piped: Piped):
    model = script(project, [READ, FIX, "Fixed."])
    piped("fix it\n", "-m", model, "--sandbox", "none")
    (project / "calc.py").write_text("mine\n")

    done = piped("/undo\n/rewind 1\n", "--resume")

    assert (project / "calc.py").read_text() == "mine\n"
    assert "these files have changed since: calc.py" in done.err
    assert "to replace them: /rewind 1 --force" in done.err
    piped("/rewind 1 --force\n", "--resume")
    assert (project / "calc.py").read_text() == BROKEN


def test_the_model_is_told_what_was_undone(project: Path, piped: Piped):
    model = script(project, [READ, FIX, "Fixed.", "I see."])

    piped("fix it\n/undo\nwhy?\n", "-m", model, "--sandbox", "none")

    told = "why?\n\n(I have undone your changes to these files: calc.py)"
    assert texts_of(project, "user")[-1] == told


def test_a_run_is_continued_as_a_chat_and_a_chat_as_a_run(
    project: Path, piped: Piped, capfd: pytest.CaptureFixture[str]
):
    command = Wink(capfd, project)
    model = script(project, ["One.", "Two.", "Three."])
    one = command("run", "1", "-m", model, "--sandbox", "none", "-w", str(project))
    two = piped("2\n", "--resume", "--quiet")
    (run,) = runs_of(project)
    three = command("resume", run.mark, "3", "-w", str(project))

    assert (one.out, two.out, three.out) == ("One.\n", "Two.\n", "Three.\n")
    assert texts_of(project, "user") == ["1", "2", "3"]


def test_a_task_that_was_rewound_is_not_sent_again(
    project: Path, piped: Piped, capfd: pytest.CaptureFixture[str]
):
    piped("1\n/rewind 1\n", "-m", script(project, ["One."]), "--sandbox", "none")
    (run,) = runs_of(project)
    model = script(project, ["One.", "Two."], "more.json")
    done = Wink(capfd, project)("resume", run.mark, "2", "-m", model, "-w", str(project))

    assert done.out == "Two.\n"
    assert texts_of(project, "user") == ["1", "2"]


def test_a_message_from_a_pipe_need_not_be_utf_8(
    project: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9 \xc3\xa9\n"), "utf-8"))
    model = script(project, ["One."])
    done = Wink(capfd, project)("chat", "-m", model, "--sandbox", "none", "-w", str(project))

    assert done.out == "One.\n"
    assert texts_of(project, "user") == ["caf\\xe9 é"]


def test_json_for_programs(project: Path, piped: Piped):
    model = script(project, ["One.", "Two."])

    done = piped("a\nb\n", "-m", model, "--json")

    told = [json.loads(line) for line in done.out.splitlines()]
    kinds = [each["type"] for each in told]
    assert kinds == ["run_started", *["message", "turn_started", "turn_ended", "result"] * 2]
    assert [each["text"] for each in told if each["type"] == "result"] == ["One.", "Two."]


def test_a_run_is_named_only_to_resume_it(piped: Piped):
    done = piped("", "k3f")

    assert (done.code, "wink chat --resume k3f" in done.err) == (2, True)
