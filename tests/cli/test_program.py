"""`wink exec`: any program as one transaction, also one that uses the terminal."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from real_agents import PROGRAMS
from terminal import WINK, Terminal, environment, wink

from ordinary_user import NOBODY, OrdinaryUser


@pytest.fixture
def project(tmp_path: Path) -> Path:
    place = tmp_path / "project"
    place.mkdir()
    (place / "a.txt").write_text("one\n")
    return place


def calls(project: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in wink("log", "--json", cwd=project).stdout.splitlines()]


def changed(call: dict[str, Any]) -> list[str]:
    return [each["path"] for each in call["files"]]


def sh(project: Path, script: str, *options: str, stdin: str = "") -> Any:
    return wink("exec", *options, "--", "sh", "-c", script, cwd=project, stdin=stdin)


def started_with(engine: str) -> list[str]:
    """Return how to start `wink`, with ``scan`` so that it finds no overlay."""
    start = [sys.executable, "-c", "from weakincentives.cli.entry import main; main()"]
    if engine == "scan":
        start[2] = (
            "from weakincentives.filesystem import commands\n"
            f"commands.find_way = lambda *_: 'none here'\n{start[2]}"
        )
    return start


def test_a_program_that_succeeds_is_one_committed_call(project: Path):
    done = sh(project, "echo two >> a.txt; echo new > b.txt; cat", stdin="its own input")

    assert (done.returncode, done.stdout) == (0, "its own input")
    assert "committed: a.txt, b.txt" in done.stderr
    [call] = calls(project)
    assert (call["tool"], call["outcome"], changed(call)) == (
        "exec", "committed", ["a.txt", "b.txt"],
    )  # fmt: skip
    assert call["arguments"]["command"][:2] == ["sh", "-c"]
    assert wink("undo", cwd=project).returncode == 0
    assert (project / "a.txt").read_text() == "one\n"
    assert not (project / "b.txt").exists()


def test_a_program_that_fails_is_rolled_back_and_its_exit_code_is_ours(project: Path):
    done = sh(project, "echo two >> a.txt; mkdir d; exit 7")

    assert done.returncode == 7
    assert "rolled back: sh exited with code 7" in done.stderr
    assert (project / "a.txt").read_text() == "one\n"
    assert not (project / "d").exists()
    assert [call["outcome"] for call in calls(project)] == ["rolled back"]


def test_the_words_after_the_program_are_the_program_s(project: Path):
    done = wink("exec", "ls", "--help", cwd=project)

    assert "Usage: ls" in done.stdout


@pytest.mark.parametrize(
    ("name", "code", "said"),
    [
        ("no-such-program", 127, "there is no program 'no-such-program' on the PATH"),
        ("./no-such-program", 127, "there is no program './no-such-program'"),
        ("./a.txt", 126, "./a.txt cannot be executed"),
        ("", 2, "name a program: wink exec -- COMMAND"),
    ],
)
def test_what_cannot_be_started_is_one_line_and_not_recorded(
    project: Path, name: str, code: int, said: str
):
    done = wink("exec", "--", name, cwd=project)

    assert (done.returncode, done.stderr) == (code, f"wink: {said}\n")
    assert calls(project) == []


def test_a_name_that_is_no_text_reaches_the_program_and_the_record(project: Path):
    odd = os.fsdecode(b"new\nline-\xff")
    done = wink("exec", "--", "touch", odd, cwd=project)

    assert done.returncode == 0
    assert (project / odd).exists()
    assert calls(project)[0]["arguments"]["command"] == ["touch", "new\nline-\\xff"]


def test_protected_paths_hold_for_a_program(project: Path):
    (project / ".env").write_text("SECRET=1\n")
    (project / "wink.toml").write_text('[policy]\nprotect = [".env"]\n')

    done = sh(project, "echo two >> a.txt; echo x > .env")

    assert done.returncode == 1
    assert "protected" in done.stderr
    assert (project / ".env").read_text() == "SECRET=1\n"
    assert (project / "a.txt").read_text() == "one\n"


def test_it_starts_in_the_directory_of_the_person(project: Path):
    (project / "sub").mkdir()

    done = wink("exec", "-w", "..", "--", "touch", "here", cwd=project / "sub")

    assert done.returncode == 0
    assert (project / "sub" / "here").exists()


def test_what_a_program_leaves_behind_is_killed(project: Path):
    done = sh(project, "(while :; do date > late; done) >/dev/null 2>&1 & echo two >> a.txt")

    assert done.returncode == 0
    (project / "late").unlink(missing_ok=True)
    assert wink("exec", "--", "true", cwd=project).returncode == 0
    assert not (project / "late").exists()


@pytest.mark.parametrize("options", [(), ("--checkpoint", "1000")])
def test_a_killed_wink_takes_the_program_with_it_and_the_next_open_rolls_back(
    project: Path, options: tuple[str, ...]
):
    script = "echo two >> a.txt; echo ready; exec sleep 1000"
    process = subprocess.Popen(
        [*WINK, "exec", *options, "--", "sh", "-c", script],
        cwd=project, env=environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    process.kill()
    process.wait()
    assert process.stdout.read() == b""  # nobody of the program is left
    process.stdout.close()

    assert wink("exec", "--", "true", cwd=project).returncode == 0
    assert (project / "a.txt").read_text() == "one\n"


@pytest.mark.parametrize("options", [(), ("--checkpoint", "1000")])
def test_sigterm_ends_the_program_and_rolls_it_back(project: Path, options: tuple[str, ...]):
    script = "echo two >> a.txt; echo ready; exec sleep 1000"
    with subprocess.Popen(
        [*WINK, "exec", *options, "--", "sh", "-c", script],
        cwd=project, env=environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM

    assert (project / "a.txt").read_text() == "one\n"
    assert [call["outcome"] for call in calls(project)] == ["rolled back"]
    if not options:
        [name] = [
            line.split()[0] for line in wink("branch", "list", cwd=project).stdout.splitlines()
        ][1:]
        assert wink("branch", "merge", name, cwd=project).returncode == 0
        assert (project / "a.txt").read_text() == "one\ntwo\n"


@pytest.mark.parametrize("engine", ["overlay", "scan"])
def test_without_an_overlay_the_outcome_is_the_same(project: Path, engine: str):
    start = started_with(engine)
    for script, code in (("cat > b.txt", 0), ("rm b.txt; exit 4", 4)):
        done = subprocess.run(
            [*start, "exec", "--", "sh", "-c", script],
            cwd=project, env=environment(), input="typed\n", text=True, check=False,
        )  # fmt: skip
        assert done.returncode == code
        assert (project / "b.txt").read_text() == "typed\n"
    assert [call["outcome"] for call in calls(project)] == ["committed", "rolled back"]


@pytest.mark.heavy
@pytest.mark.parametrize("options", [[], ["--checkpoint", "1000"]])
def test_a_user_without_rights_gets_the_same(ordinary_user: OrdinaryUser, options: list[str]):
    with tempfile.TemporaryDirectory(dir="/tmp") as home:
        project = Path(home, "project")
        project.mkdir()
        for each in (Path(home), project):
            os.chown(each, NOBODY, NOBODY)

        def run(script: str) -> subprocess.CompletedProcess[str]:
            argv = ["-m", "weakincentives.cli", "exec", *options, "--", "sh", "-c", script]
            return ordinary_user.run(*argv, home=Path(home), cwd=project, stdin="typed")

        assert run("cat > b.txt; id -u").stdout == f"{NOBODY}\n"
        assert (project / "b.txt").read_text() == "typed"
        assert run("rm b.txt; exit 3").returncode == 3
        assert (project / "b.txt").read_text() == "typed"


# Coding agents


def program(place: Path, name: str, script: str) -> Path:
    """Make a program that is called like a coding agent."""
    place.mkdir(exist_ok=True)
    made = place / name
    made.write_text(f"#!/bin/sh\n{script}\n")
    made.chmod(0o755)
    return made


@pytest.mark.parametrize("options", [(), ("--checkpoint", "1000")])
def test_an_agent_is_committed_whatever_its_exit_code(
    project: Path, tmp_path: Path, options: tuple[str, ...]
):
    agent = program(tmp_path / "bin", "codex", "echo two >> a.txt; rm -f b.txt; exit 130")

    done = wink("exec", *options, "--", str(agent), cwd=project)

    assert done.returncode == 130
    assert "committed (codex exited with code 130): a.txt" in done.stderr
    assert [call["outcome"] for call in calls(project)] == ["committed"]
    assert wink("undo", cwd=project).returncode == 0
    assert (project / "a.txt").read_text() == "one\n"


@pytest.mark.parametrize("command", ["npx -y @openai/codex@latest x", "env A=1 codex x"])
def test_an_agent_is_known_behind_what_starts_it(project: Path, tmp_path: Path, command: str):
    for name in ("npx", "codex"):
        program(tmp_path / "bin", name, "echo two >> a.txt; exit 3")
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"

    done = wink("exec", "--", *command.split(), cwd=project, env={"PATH": path})

    assert done.returncode == 3
    assert "committed" in done.stderr


def test_an_agent_with_a_daemon_is_told_to_work_without(project: Path, tmp_path: Path):
    help_text = 'case "$*" in *--help*) echo "  --no-daemon"; exit;; esac'
    given = 'printf "%s|" "$@" > "given-$(basename "$0")"; echo $CLINE_SESSION_BACKEND_MODE'
    for name in ("codex", "cline"):
        agent = program(tmp_path / "bin", name, f"{help_text}\n{given} >> given-{name}")
        assert wink("exec", "--", str(agent), "resume", "--last", cwd=project).returncode == 0
    agent = program(tmp_path / "old", "codex", given)
    (project / "given-codex").rename(project / "given-new")
    assert wink("exec", "--", str(agent), "x", cwd=project).returncode == 0

    assert (project / "given-new").read_text() == "--no-daemon|resume|--last|\n"
    assert (project / "given-cline").read_text() == "resume|--last|local\n"
    assert (project / "given-codex").read_text() == "x|"


@pytest.mark.parametrize("words", ["claude --bg x", "claude x --background", "cline -z x"])
def test_an_agent_that_is_told_to_work_in_a_daemon_is_refused(
    project: Path, tmp_path: Path, words: str
):
    for name in ("claude", "cline"):
        program(tmp_path / "bin", name, "echo two >> a.txt")
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"

    done = wink("exec", "--", *words.split(), cwd=project, env={"PATH": path})

    assert (done.returncode, "daemon" in done.stderr) == (2, True)
    assert (project / "a.txt").read_text() == "one\n"


def test_what_another_process_changes_meanwhile_is_said_and_not_committed(project: Path):
    (project / "src").mkdir()
    (project / "src" / "b.txt").write_text("b\n")
    script = "echo ready; read _"
    with Terminal([*WINK, "exec", "--", "sh", "-c", script], cwd=project) as terminal:
        terminal.wait_for("ready")
        (project / "a.txt").write_text("by a daemon\n")
        shutil.rmtree(project / "src")
        terminal.send("\n")
        assert terminal.end() == 0
        said = " ".join(terminal.text.split())

    assert "another process changed ./, a.txt while sh ran: that is not recorded" in said
    assert "no files changed" in said
    assert [changed(call) for call in calls(project)] == [[]]


class Responses(BaseHTTPRequestHandler):
    """Speaks the Responses API with streaming: one command for the shell, then the end."""

    protocol_version = "HTTP/1.1"
    script = ""

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # as it is inherited
        pass

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        item: dict[str, Any] = {"type": "message", "id": "m1", "role": "assistant"}
        item["content"] = [{"type": "output_text", "text": "Done."}]
        script, type(self).script = self.script, ""
        if script:
            arguments = json.dumps({"cmd": script})
            item = {"type": "function_call", "id": "f1", "call_id": "c1", "arguments": arguments}
            item["name"] = "exec_command"
        usage = {"input_tokens": 1, "output_tokens": 1, "total_tokens": 2}
        events: list[dict[str, Any]] = [
            {"type": "response.created", "response": {"id": "r1"}},
            {"type": "response.output_item.done", "item": item},
            {"type": "response.completed", "response": {"id": "r1", "usage": usage}},
        ]
        text = "".join(f"event: {e['type']}\ndata: {json.dumps(e)}\n\n" for e in events).encode()
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


@pytest.mark.heavy
@pytest.mark.parametrize("is_interrupted", [False, True])
def test_the_real_codex_is_one_call_however_it_ends(
    project: Path, tmp_path: Path, is_interrupted: bool
):
    path = f"{PROGRAMS}:{os.environ['PATH']}"
    if shutil.which("codex", path=path) is None:
        pytest.skip("there is no codex: make agents")
    (project / "src").mkdir()
    (project / "src" / "a.py").write_text("a\n")
    began = tmp_path / "began"
    os.mkfifo(began)
    Responses.script = "rm -r src; echo new > new.txt"
    if is_interrupted:
        Responses.script += f"; echo > {began}; sleep 30"
    server = ThreadingHTTPServer(("127.0.0.1", 0), Responses)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    home = tmp_path / "home"
    home.mkdir()
    (home / "config.toml").write_text(
        'model = "gpt-5.5"\nmodel_provider = "loop"\n[model_providers.loop]\nname = "loop"\n'
        f'base_url = "http://127.0.0.1:{server.server_address[1]}/v1"\nwire_api = "responses"\n'
        "requires_openai_auth = false\n"
    )
    argv = ["codex", "exec", "--skip-git-repo-check"]
    argv += ["--dangerously-bypass-approvals-and-sandbox", "go"]
    env = {"CODEX_HOME": str(home), "HOME": str(home), "PATH": path}  # no profile of ours
    with Terminal([*WINK, "exec", "--", *argv], cwd=project, env=env) as terminal:
        if is_interrupted:
            began.read_bytes()
            assert sorted(os.listdir(project)) == [
                "a.txt",
                "src",
            ]  # nothing before the commit: it works inside
            terminal.interrupt()
        code = terminal.end()
    server.shutdown()
    server.server_close()

    assert (code != 0) == is_interrupted, terminal.text
    [call] = calls(project)
    assert (call["outcome"], changed(call)) == ("committed", ["new.txt", "src/a.py"]), terminal.text
    assert wink("undo", cwd=project).returncode == 0
    assert sorted(os.listdir(project)) == ["a.txt", "src"]
    assert (project / "src" / "a.py").read_text() == "a\n"


@pytest.mark.parametrize("engine", ["overlay", "scan", "checkpoint"])
def test_a_changed_time_of_the_directory_alone_is_no_commit(project: Path, engine: str):
    options = ["--checkpoint", "1000"] if engine == "checkpoint" else []
    done = subprocess.run(
        [*started_with(engine), "exec", *options, "--", "sh", "-c", "touch new; rm new"],
        cwd=project, env=environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip

    assert (done.returncode, "no files changed" in done.stderr) == (0, True), done.stderr
    assert [call["outcome"] for call in calls(project)] == ["ok"]


# What a rollback drops


@pytest.mark.parametrize("engine", ["overlay", "scan", "checkpoint"])
def test_what_a_failed_program_changed_can_be_brought_back(project: Path, engine: str):
    (project / "old").mkdir()
    (project / "old" / "b.txt").write_text("b\n")
    start = started_with(engine)
    options = ["--checkpoint", "1000"] if engine == "checkpoint" else []
    script = (
        "echo two >> a.txt; rm -r old; mkdir -p new/deep; echo c > new/deep/c;"
        " chmod 755 new/deep/c; ln -s a.txt link; exit 7"
    )
    done = subprocess.run(
        [*start, "exec", *options, "--", "sh", "-c", script],
        cwd=project, env=environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip

    assert done.returncode == 7
    assert sorted(os.listdir(project)) == ["a.txt", "old"]
    assert (project / "a.txt").read_text() == "one\n"
    command = done.stderr.partition("to bring it back: wink ")[2].split()
    assert wink(*command, cwd=project).returncode == 0
    assert sorted(os.listdir(project)) == ["a.txt", "link", "new"]
    assert (project / "a.txt").read_text() == "one\ntwo\n"
    assert (project / "new" / "deep" / "c").stat().st_mode & 0o777 == 0o755
    assert os.readlink(project / "link") == "a.txt"


def test_what_a_person_did_not_commit_can_be_brought_back(project: Path):
    argv = [*WINK, "exec", "--ask", "--", "sh", "-c", "echo two >> a.txt"]
    with Terminal(argv, cwd=project) as terminal:
        terminal.wait_for("[c/r]?")
        terminal.send("r\n")
        assert terminal.end() == 1
        said = " ".join(terminal.text.split())

    assert (project / "a.txt").read_text() == "one\n"
    name = said.partition("wink branch merge ")[2].split()[0]
    assert wink("branch", "merge", name, cwd=project).returncode == 0
    assert (project / "a.txt").read_text() == "one\ntwo\n"


def test_a_failed_program_that_changed_nothing_leaves_no_branch(project: Path):
    done = sh(project, "exit 7")

    assert "bring it back" not in done.stderr
    assert "no branches" in wink("branch", "list", cwd=project).stderr


@pytest.mark.heavy
def test_only_the_last_rolled_back_programs_are_kept(project: Path):
    for number in range(12):
        assert sh(project, f"echo {number} > a.txt; exit 1").returncode == 1

    assert len(wink("branch", "list", cwd=project).stdout.splitlines()) == 1 + 10


# Asking, and terminals


def test_asking_needs_a_terminal_before_anything_runs(project: Path):
    refused = sh(project, "echo two >> a.txt", "--ask")

    assert refused.returncode == 2
    assert "--yes" in refused.stderr
    assert (project / "a.txt").read_text() == "one\n"
    assert sh(project, "echo two >> a.txt", "--ask", "--yes").returncode == 0
    assert (project / "a.txt").read_text() == "one\ntwo\n"
    both = sh(project, "true", "--ask", "--checkpoint", "5")
    assert (both.returncode, "exclude each other" in both.stderr) == (2, True)


@pytest.mark.parametrize(
    ("answer", "text"), [("c", "one\ntwo\n"), ("r", "one\n"), ("\x04", "one\n")]
)
def test_a_person_sees_the_diff_and_decides(project: Path, answer: str, text: str):
    argv = [*WINK, "exec", "--ask", "--", "sh", "-c", "echo two >> a.txt"]
    with Terminal(argv, cwd=project) as terminal:
        terminal.wait_for("[c/r]?")
        assert "+two" in terminal.text
        terminal.send(answer if answer == "\x04" else f"{answer}\n")
        assert terminal.end() == (0 if answer == "c" else 1)

    assert (project / "a.txt").read_text() == text


def test_an_interactive_shell_works_with_its_jobs_and_ctrl_c(project: Path):
    argv = [*WINK, "exec", "--", "bash", "--norc", "-i"]
    with Terminal(argv, cwd=project, env={"PS1": "inside> "}) as terminal:
        terminal.wait_for("inside>")
        # The job says that it has begun: before that, Ctrl-C reaches the shell, which ignores it.
        terminal.send("sh -c 'echo job has be\"\"gun; exec sleep 1000'\n")
        terminal.wait_for("job has begun")
        terminal.interrupt()
        terminal.wait_for("inside>", times=2)
        terminal.send("sleep 1000 & jobs; tty; echo two >> a.txt; echo said $((40 + 2))\n")
        terminal.wait_for("said 42")
        assert "Running" in terminal.text
        assert "/dev/" in terminal.text
        assert (project / "a.txt").read_text() == "one\n"  # nothing before the commit
        terminal.send("exit 0\n")
        assert terminal.end() == 0

    assert (project / "a.txt").read_text() == "one\ntwo\n"


def test_ctrl_c_reaches_the_program_which_decides(project: Path):
    script = "trap 'echo two >> a.txt; exit 0' INT; echo ready; while :; do sleep 0.1; done"
    with Terminal([*WINK, "exec", "--", "sh", "-c", script], cwd=project) as terminal:
        terminal.wait_for("ready")
        terminal.interrupt()
        terminal.wait_for("committed: a.txt")
        assert terminal.end() == 0


def test_ctrl_z_stops_it_and_fg_continues_it(project: Path):
    script = "echo ready; read line; echo $line >> a.txt"
    started = f"{' '.join(WINK)} exec -- sh -c '{script}'\n"
    with Terminal(["bash", "--norc", "-i"], cwd=project, env={"PS1": "outside> "}) as terminal:
        terminal.wait_for("outside>")
        terminal.send(started)
        terminal.wait_for("\nready")
        terminal.send("\x1a")
        terminal.wait_for("Stopped")
        terminal.send("fg\n")
        terminal.send("typed\n")
        terminal.wait_for("committed: a.txt")
        terminal.send("exit\n")
        terminal.end()

    assert (project / "a.txt").read_text() == "one\ntyped\n"


def test_an_editor_works(project: Path):
    argv = [*WINK, "exec", "--", "vim", "-u", "NONE", "-i", "NONE", "-n", "a.txt"]
    with Terminal(argv, cwd=project, env={"TERM": "vt100"}) as terminal:
        terminal.wait_for("a.txt")
        terminal.send("otwo\x1b:wq\r")
        terminal.wait_for("committed: a.txt")
        assert terminal.end() == 0

    assert (project / "a.txt").read_text() == "one\ntwo\n"


# Checkpoints


def test_quiet_moments_are_checkpoints_and_a_failure_goes_back_to_the_last(project: Path):
    # Each change is one system call: a moment between two could be a quiet one.
    (project / "made").mkdir()
    (project / "made" / "c2").write_text("2\n")
    argv = [*WINK, "exec", "--checkpoint", "1", "--"]
    script = "ln -s x c1; read _; mv made d; read _; echo 3 > c3; exit 5"
    with Terminal([*argv, "sh", "-c", script], cwd=project) as terminal:
        terminal.wait_for("checkpoint: c1")
        terminal.send("\n")
        terminal.wait_for("checkpoint: d")
        terminal.send("\n")
        assert terminal.end() == 5
        assert "the checkpoints before it stay" in " ".join(terminal.text.split())

    found = calls(project)
    assert [call["outcome"] for call in found] == ["committed", "committed", "rolled back"]
    assert [changed(call) for call in found[:2]] == [["c1"], ["d/c2"]]
    assert not (project / "c3").exists()
    assert wink("undo", found[0]["call"], cwd=project).returncode == 0
    assert sorted(os.listdir(project)) == ["a.txt", "d"]


def test_a_protected_path_ends_a_program_with_checkpoints(project: Path):
    (project / "wink.toml").write_text('[policy]\nprotect = [".env"]\n')
    script = "echo 1 > .env; exec sleep 1000"

    done = sh(project, script, "--checkpoint", "1")

    assert done.returncode == 1
    assert "protected" in done.stderr
    assert not (project / ".env").exists()
