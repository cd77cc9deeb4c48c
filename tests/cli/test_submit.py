"""`wink submit`, `ps` and `cancel`, and how every command finds the database of runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import Wink
from terminal import WINK, Terminal, environment

from weakincentives.cli.database import _filesystem_of  # pyright: ignore[reportPrivateUsage]
from weakincentives.errors import install_command
from weakincentives.prompt.approval import ApprovalRequest, CallPreview
from weakincentives.runtime.stores.database import Database
from weakincentives.runtime.stores.runs import Runs

SCRIPT = [{"say": "Done."}]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    project = tmp_path / "project"
    project.mkdir()
    (tmp_path / "script.json").write_text(json.dumps(SCRIPT))
    return project


@pytest.fixture
def wink(project: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Wink:
    monkeypatch.chdir(project)
    monkeypatch.setenv("WINK_MACHINE", "here")
    monkeypatch.setenv("WINK_MODEL", f"scripted:{project.parent / 'script.json'}")
    return Wink(capfd, project)


@pytest.fixture
def runs(state: Path) -> Iterator[Runs]:
    """What the commands use if no database is named."""
    (state / "wink").mkdir(mode=0o700, exist_ok=True)
    database = Database(f"sqlite:///{state / 'wink' / 'runs.db'}")
    yield Runs(database)
    database.close()


def asking(runs: Runs, run_id: str) -> str:
    """Let a run wait for a person; returns the id of the request."""
    request = ApprovalRequest(
        tool_name="send_mail",
        description="Sends a mail.",
        arguments={"text": "hello"},
        reach="irreversible",
        call_id="c1",
        session_id="s",
        preview=CallPreview(facts={"network": "mail.example"}),
        policy_name="approval",
    )
    runs.begin(run_id, 1, "w")
    name = runs.ask(run_id, request)
    runs.end(run_id, 1, "waiting", "send_mail")
    return name


# submit


def test_a_submitted_run_has_the_flags_and_the_place(wink: Wink, runs: Runs, project: Path) -> None:
    done = wink(
        "submit", "tidy up", "--ask", "write_file", "--max-turns", "7", "--policy", "deny=x*"
    )

    assert done.code == 0
    run = runs.find(done.out.strip())
    assert (run.status, run.task, run.machine) == ("queued", "tidy up", "here")
    assert run.partition == f"here:{project}"
    assert run.about["flags"] == {
        "model": f"scripted:{project.parent / 'script.json'}",
        "ask": ["write_file"],
        "max_turns": 7,
        "policy": ["deny=x*"],
    }
    assert run.about["from"] == {"workspace": str(project), "machine": "here"}
    assert run.about["no_merge"] is False
    assert "no worker is running on here; start one: wink worker" in done.err


def test_runs_on_branches_of_their_own_may_run_at_once(wink: Wink, runs: Runs) -> None:
    """The others of a workspace run one at a time, since each is merged at its end."""
    for flags in (["--no-merge"], ["--branch", "parser"]):
        run = runs.find(wink("submit", "a", *flags).out.strip())
        assert (run.partition, run.about["no_merge"]) == ("", True)


def test_the_task_comes_from_standard_input(project: Path, state: Path) -> None:
    done = subprocess.run(
        [*WINK, "submit", "-", "-m", f"scripted:{project.parent / 'script.json'}", "--json"],
        input="from a pipe\n", capture_output=True, text=True, check=True, cwd=project,
    )  # fmt: skip

    assert json.loads(done.stdout)["task"] == "from a pipe\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([" "], "the task is empty"),
        (["a", "--anywhere", "--git", "x"], "name only one of --anywhere and --git"),
        (["a", "-m", "nosuch:x"], "unknown model"),
        (["a", "-m", "scripted:/nosuch.json"], "cannot read the script"),
        (["a", "-w", "nosuch"], "cannot open the directory"),
        (["a", "--machine", "a b"], "--machine: letters, digits"),
    ],
)
def test_a_run_that_no_worker_could_perform_is_not_queued(
    wink: Wink, runs: Runs, arguments: list[str], said: str
) -> None:
    done = wink("submit", *arguments)

    assert done.code == 2
    assert said in done.err
    assert runs.list() == []


def test_code_that_a_flag_names_is_approved_for_the_worker(
    wink: Wink, runs: Runs, project: Path
) -> None:
    """The worker gets the flags as data; it loads what the user named, as it was then."""
    (project / "rules.py").write_text("class Rule:\n    name = 'r'\n    def check(self): ...\n")

    assert wink("submit", "a", "--policy", "rules.py:Rule").code == 0

    from weakincentives.cli.config import load_settings
    from weakincentives.cli.hosting import stored_flags
    from weakincentives.cli.trust import trust_of

    settings = load_settings(project, **stored_flags(runs.list()[0].about["flags"]))
    assert trust_of(project).missing(settings) == []
    (project / "rules.py").write_text("import os\n")
    assert [each.name for each in trust_of(project).missing(settings)] == ["rules.py"]


# ps and cancel


def test_ps_lists_what_has_not_ended(wink: Wink, runs: Runs) -> None:
    first, second, third = (runs.submit(f"task {n}", about={}, machine="here") for n in range(3))
    runs.end(first.id, 1, "done", "yes")
    asking(runs, second.id)
    runs.begin(third.id, 1, "worker-1")
    runs.beat("worker-1", "here")

    done = wink("ps")

    assert done.out.splitlines()[0].split() == ["RUN", "STATUS", "SINCE", "WHERE", "TASK"]
    shown = [line.split()[:2] for line in done.out.splitlines()[1:]]
    assert sorted(shown) == sorted([[second.mark, "waiting"], [third.mark, "running"]])
    assert "(send_mail)" in done.out
    assert done.err.splitlines() == [
        "1 worker; 1 done",
        "1 run waiting for an approval: wink approve",
    ]
    listed = [json.loads(line) for line in wink("ps", "--all", "--json").out.splitlines()]
    assert sorted(each["status"] for each in listed) == ["done", "running", "waiting"]


def test_a_run_is_cancelled_once(wink: Wink, runs: Runs) -> None:
    run = runs.submit("a", about={})

    assert wink("cancel", run.mark).err == f"wink: cancelled: {run.id}\n"
    assert runs.find(run.id).status == "cancelled"
    ended = runs.submit("b", about={})
    runs.end(ended.id, 1, "done", "")
    done = wink("cancel", ended.id)
    assert (done.code, done.err) == (2, f"wink: {ended.id} has ended: it is done\n")
    assert "no run 'zzz' in sqlite:" in wink("cancel", "zzz").err


# approve


def test_an_approval_is_answered_while_no_worker_runs(wink: Wink, runs: Runs) -> None:
    run = runs.submit("a", about={})
    name = asking(runs, run.id)
    (listed,) = map(json.loads, wink("approve", "--json").out.splitlines())

    done = wink("approve", run.mark, "--yes")

    assert (listed["run"], listed["id"], listed["tool"]) == (run.id, name, "send_mail")
    assert "send_mail wants to run; it reaches outside" in done.err
    assert "approved: send_mail" in done.err
    assert (runs.find(run.id).status, runs.find(run.id).sitting) == ("queued", 2)
    again = wink("approve")
    assert again.code == 2
    assert "or the database" in again.err


def test_a_person_answers_at_a_terminal_unless_somebody_was_quicker(
    runs: Runs, project: Path
) -> None:
    first, second = (runs.submit("a", about={}) for _ in range(2))
    for each in (first, second):
        asking(runs, each.id)
    with Terminal([*WINK, "approve", first.mark], cwd=project) as terminal:
        terminal.wait_for("[y/n/r")
        terminal.send("n\n")
        assert terminal.end() == 0
    with Terminal([*WINK, "approve", second.mark], cwd=project) as terminal:
        terminal.wait_for("[y/n/r")
        (request,) = runs.pending(second.id)
        runs.answer(request.id, approved=True, digest=request.digest)
        terminal.wait_for("the run no longer waits for it")
        assert terminal.end() == 1

    answer = runs.answered(first.id, "c1", request.digest)
    assert answer is not None
    assert not answer.approved


def test_of_several_runs_that_wait_one_must_be_named(wink: Wink, runs: Runs) -> None:
    for _ in range(2):
        asking(runs, runs.submit("a", about={}).id)

    done = wink("approve", "--yes")

    assert done.code == 2
    assert "several runs wait for an approval" in done.err


# Which database


def test_the_database_is_named_by_flag_variable_or_settings_of_the_user(
    wink: Wink, tmp_path: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("flag", "variable", "settings"):
        database = Database(f"sqlite:///{tmp_path / name}.db")
        Runs(database).submit(name, about={})
        database.close()

    def seen(*arguments: str) -> str:
        return json.loads(wink("ps", "--json", *arguments).out)["task"]

    (state / "wink").mkdir(mode=0o700, exist_ok=True)
    (state / "wink" / "settings.toml").write_text(f'database = "sqlite:///{tmp_path}/settings.db"')
    assert seen() == "settings"
    monkeypatch.setenv("WINK_DATABASE", f"sqlite:///{tmp_path}/variable.db")
    assert seen() == "variable"
    assert seen("--database", f"sqlite:///{tmp_path}/flag.db") == "flag"


def test_a_workspace_cannot_name_the_database(wink: Wink, project: Path) -> None:
    """An agent could write it there, and answer its own questions elsewhere."""
    (project / "wink.toml").write_text('database = "sqlite:////tmp/other.db"')

    done = wink("submit", "a")

    assert done.code == 2
    assert "wink.toml: unknown key database" in done.err


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("mysql://x/y", "expected sqlite:///FILE or postgresql://"),
        ("sqlite:////nosuch/x.db", "there is no directory /nosuch"),
        ("sqlite:////tmp/nosuch-wink.db", "no runs yet: there is no /tmp/nosuch-wink.db"),
    ],
)
def test_a_database_that_cannot_be_one_is_said(wink: Wink, url: str, said: str) -> None:
    done = wink("ps", "--database", url)

    assert done.code == 2
    assert said in done.err


def test_a_database_in_the_workspace_is_refused(wink: Wink, project: Path) -> None:
    done = wink("submit", "a", "--database", f"sqlite:///{project}/runs.db")

    assert done.code == 2
    assert "where an agent could change it" in done.err


def test_a_database_on_a_network_filesystem_is_recognized(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(f"/dev/a / ext4 rw 0 0\nserver:/x {tmp_path} nfs4 rw 0 0\n")

    assert _filesystem_of(tmp_path, mounts) == "nfs4"
    assert _filesystem_of(Path("/"), mounts) == "ext4"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("databas = 'x'", "unknown key databas; did you mean database?"),
        ("database = 7", "database must be a string"),
        ("= =", "cannot read"),
    ],
)
def test_wrong_settings_of_the_user_are_said(wink: Wink, state: Path, text: str, said: str) -> None:
    (state / "wink").mkdir(mode=0o700, exist_ok=True)
    (state / "wink" / "settings.toml").write_text(text)

    done = wink("ps")

    assert done.code == 2
    assert said in done.err


def test_a_database_that_cannot_be_reached_is_one_line_without_its_password(
    wink: Wink, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("psycopg")
    monkeypatch.setattr("weakincentives.cli.database._PATIENCE", 0.0)

    done = wink("ps", "--database", "postgresql://anna:topsecret@127.0.0.1:1/wink")

    assert done.code == 1
    assert done.err.startswith("wink: postgresql://anna@127.0.0.1:1/wink cannot be reached: ")
    assert done.err.count("\n") == 1
    assert "topsecret" not in done.err


def test_the_missing_extra_is_one_line(project: Path) -> None:
    """As for a user who has not installed it."""
    code = (
        "import sys; sys.modules['psycopg'] = None\n"
        "from weakincentives.cli.entry import main; main()"
    )

    done = subprocess.run(
        [sys.executable, "-c", code, "ps", "--database", "postgresql://a@h/b"],
        capture_output=True, text=True, check=False, cwd=project, env=environment(),
    )  # fmt: skip

    assert done.returncode == 2
    assert done.stderr == f"wink: psycopg is not installed; run: {install_command('durable')}\n"


def test_commands_of_agents_never_get_the_url(wink: Wink, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even if somebody wants to pass it on; nor does a program that `wink exec` runs."""
    monkeypatch.setenv("WINK_DATABASE", "postgresql://anna:topsecret@h/wink")

    asked = wink("run", "a", "--sandbox", "env=WINK_DATABASE")
    shown = wink("exec", "--", sys.executable, "-c", "import os; print(os.environ)")

    assert asked.code == 2
    assert "WINK_DATABASE is for WINK alone" in asked.err
    assert shown.code == 0
    assert "topsecret" not in shown.out
    assert os.environ["WINK_DATABASE"]
