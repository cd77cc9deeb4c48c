"""What the page does: through the functions of the actions, and through the server's routes."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from weakincentives.cli.entry import main
from weakincentives.core.clock import SYSTEM_CLOCK
from weakincentives.core.serving import listen, serve_app
from weakincentives.debugger import Views, actions
from weakincentives.debugger.records import NotFound
from weakincentives.debugger.server import Actions, Debugger
from weakincentives.errors import AnswerRefused, UndoRefused, WinkError
from weakincentives.filesystem import Branch, HostFilesystem, branches_of
from weakincentives.prompt.approval import ApprovalRequest
from weakincentives.runtime import Calls, SavedSession
from weakincentives.runtime.calls import Run, runs_of
from weakincentives.runtime.stores.database import Database
from weakincentives.runtime.stores.runs import Runs

WRITES = [{"write_file": {"path": f"{name}.txt", "content": f"{name}\n"}} for name in "abc"]
TURNS: list[Any] = [{"call": WRITES[:2]}, {"say": "Now:", "call": WRITES[2:]}, {"say": "Done."}]
WINK = (sys.executable, "-m", "weakincentives.cli")


@pytest.fixture(autouse=True)
def _state(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
    for name in [each for each in os.environ if each.startswith(("WINK_", "OPENAI_"))]:
        monkeypatch.delenv(name)


class Project:
    """A directory, and the run of a script on it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.script = path.parent / "script.json"
        self.script.write_text(json.dumps(TURNS))
        self.run: Run

    def command(self, *flags: str) -> list[str]:
        model, where = f"scripted:{self.script}", str(self.path)
        return ["run", "write", "-w", where, "-m", model, "--sandbox", "none", "-q", *flags]

    def perform(self, *flags: str) -> Run:
        """Let the agent run to its end."""
        before = runs_of(self.path)
        with pytest.raises(SystemExit) as ended:
            main(self.command(*flags))
        assert not ended.value.code
        (run,) = (each for each in runs_of(self.path) if each not in before)
        return run

    @property
    def files(self) -> dict[str, str]:
        return {each.name: each.read_text() for each in sorted(self.path.iterdir())}

    def on_branch(self, name: str) -> dict[str, str]:
        with Branch.open(self.path, name) as branch:
            return {path: branch.read(path) for path in sorted(branch.glob("*"))}

    def ended(self, run_id: str) -> Run:
        """Return a run once it has ended."""
        (run,) = (each for each in runs_of(self.path) if each.id == run_id)
        until(lambda: Run(run.path).has_ended and not SavedSession.is_in_use(run.path))
        return Run(run.path)

    def act(self, action: Callable[[Path, str, Any], Any], **body: Any) -> Any:
        return action(self.path, self.run.id, body)

    @property
    def views(self) -> Views:
        return Views(self.path, approvals=lambda: actions.approvals(self.path))


def until(done: Callable[[], Any]) -> Any:
    late = SYSTEM_CLOCK.monotonic() + 240
    while not (value := done()):
        assert SYSTEM_CLOCK.monotonic() < late, "it did not happen"
        threading.Event().wait(0.02)
    return value


@pytest.fixture
def project(tmp_path: Path) -> Project:
    path = tmp_path / "project"
    path.mkdir()
    project = Project(path)
    project.run = project.perform()
    return project


def kinds(changes: list[Any]) -> list[tuple[str, str, int, int]]:
    return [(each["path"], each["kind"], each["added"], each["removed"]) for each in changes]


# Undo


def test_a_call_is_undone_after_a_look_at_what_that_changes(project: Project):
    shown = project.act(actions.undo, call=2, dryRun=True)
    assert project.files.keys() == {"a.txt", "b.txt", "c.txt"}
    done = project.act(actions.undo, call=2)

    assert kinds(shown["changes"]) == [("b.txt", "deleted", 0, 1)]
    assert "-b\n" in shown["changes"][0]["patch"]
    assert shown["undone"] == done["undone"] == [f"{project.run.mark}/2"]
    assert project.files.keys() == {"a.txt", "c.txt"}


def test_a_whole_run_is_undone(project: Project):
    assert len(project.act(actions.undo)["undone"]) == 3
    assert project.files == {}
    with pytest.raises(actions.Refused, match="already undone"):
        project.act(actions.undo)


def test_what_someone_has_changed_since_is_only_replaced_by_force(project: Project):
    (project.path / "b.txt").write_text("mine\n")

    for dry_run in (True, False):
        with pytest.raises(UndoRefused, match=r"b\.txt"):
            project.act(actions.undo, call=2, dryRun=dry_run)
    assert project.files["b.txt"] == "mine\n"
    project.act(actions.undo, call=2, force=True)

    assert "b.txt" not in project.files


# Rewind


def test_a_run_is_rewound_and_the_rewind_undone(project: Project):
    shown = project.act(actions.rewind, call=3, before=True, dryRun=True)
    assert kinds(shown["changes"]) == [("c.txt", "deleted", 0, 1)]
    done = project.act(actions.rewind, call=3, before=True)
    assert project.files.keys() == {"a.txt", "b.txt"}
    assert done["number"] == 4

    undone = project.act(actions.undo, call=4)

    assert undone["undone"] == [f"{project.run.mark}/4"]
    assert project.files.keys() == {"a.txt", "b.txt", "c.txt"}
    with pytest.raises(actions.Refused, match="made calls since"):
        project.act(actions.undo, call=4)


def test_only_the_conversation_is_rewound(project: Project):
    done = project.act(actions.rewind, call=1, parts="conversation")

    assert (done["number"], project.files.keys()) == (4, {"a.txt", "b.txt", "c.txt"})
    assert not Run(project.run.path).has_ended


def test_a_run_in_progress_is_not_rewound(project: Project):
    with SavedSession.open(project.run.path), pytest.raises(WinkError, match="in use"):
        project.act(actions.rewind, call=1)


# Fork


def test_a_fork_has_the_files_of_then(project: Project):
    made = project.act(actions.fork, call=2, before=True, name="other")

    assert made["branch"] == "other"
    assert project.on_branch("other") == {"a.txt": "a\n"}
    assert [each.id for each in runs_of(project.path) if each != project.run] == [made["run"]]
    with pytest.raises(WinkError, match="other"):
        project.act(actions.fork, call=2, name="other")


# Rerun


@pytest.mark.heavy
def test_an_edited_call_is_made_in_another_process_and_the_page_sees_both_worlds(project: Project):
    made = project.act(actions.rerun, call=2, arguments={"path": "x.txt", "content": "$5\n"})
    run = project.ended(made["run"])

    assert project.files.keys() == {"a.txt", "b.txt", "c.txt"}
    assert project.on_branch(made["branch"]) == {"a.txt": "a\n", "x.txt": "$5\n", "c.txt": "c\n"}
    assert [(each.number, each.outcome) for each in Calls(project.path).of_run(run)] == [
        (2, "committed"),
        (3, "committed"),
    ]
    views = project.views
    shown = views.get(f"runs/{run.id}", {})
    assert shown["run"]["forkedFrom"] == f"{project.run.id}/2"
    assert [each["n"] for each in shown["turns"]] == [1, 2, 3]
    compared = views.get("compare", {"a": f"{project.run.id}/2", "b": f"{run.id}/2"})
    assert sorted(map(tuple, compared["files"])) == [("b.txt", "only a"), ("x.txt", "only b")]


@pytest.mark.heavy
def test_the_other_process_runs_nothing_that_an_agent_wrote(
    project: Project, monkeypatch: pytest.MonkeyPatch
):
    planted = project.path / "weakincentives"
    planted.mkdir()
    (planted / "__init__.py").write_text("raise SystemExit('planted')\n")
    monkeypatch.chdir(project.path)

    made = project.act(actions.rerun, call=3)

    assert project.ended(made["run"]).has_ended


@pytest.mark.heavy
def test_a_large_argument_fits(project: Project):
    """A command line has no room for it."""
    content = "a line of text\n" * 50_000
    made = project.act(actions.rerun, call=3, arguments={"path": "big.txt", "content": content})
    project.ended(made["run"])

    assert project.on_branch(made["branch"])["big.txt"] == content


@pytest.mark.heavy
def test_rules_and_messages_reach_the_run(project: Project):
    made = project.act(actions.rerun, call=2, policies=["protect=b.txt"], message="--go on")
    run = project.ended(made["run"])

    assert project.on_branch(made["branch"]).keys() == {"a.txt", "c.txt"}
    first = Calls(project.path).of_run(run)[0]
    assert first.outcome == "denied"
    assert "--go on" in run.path.read_text("utf-8", "replace")


@pytest.mark.heavy
def test_another_section_asks_the_model_again(project: Project):
    made = project.act(actions.rerun, call=3, sections={"your-work": "Be brief, for $5."})
    run = project.ended(made["run"])

    assert [each.number for each in run.calls()] == [3]
    prompts = project.views.get(f"runs/{run.id}/prompts", {})["prompts"]
    assert "Be brief, for $5." in prompts[-1]["text"]


@pytest.mark.heavy
def test_a_run_that_does_not_start_says_why_and_leaves_nothing(project: Project):
    problems: list[tuple[dict[str, Any], str]] = [
        ({"model": "openai:gpt"}, "OPENAI_API_KEY"),
        ({"sections": {"nosuch": "text"}}, "no section 'nosuch'"),
        ({"policies": ["nonsense"]}, "expected NAME=VALUE"),
    ]
    for body, said in problems:
        with pytest.raises(actions.Refused, match="the run did not start") as refused:
            project.act(actions.rerun, call=2, **body)
        assert said in str(refused.value)
    assert (runs_of(project.path), branches_of(project.path)) == ((project.run,), ())


def test_a_dry_run_cannot_be_rerun(project: Project):
    project.run = project.perform("--dry-run")

    with pytest.raises(actions.Refused, match="dry run"):
        project.act(actions.rerun, call=1)


# Wrong use


def test_a_wrong_body_is_told_apart_from_a_refusal(project: Project):
    wrong: list[tuple[Any, dict[str, Any]]] = [
        (actions.undo, {"call": "2"}),
        (actions.undo, {"call": True}),
        (actions.undo, {"force": 1}),
        (actions.rewind, {}),
        (actions.rewind, {"call": 1, "parts": "half"}),
        (actions.fork, {"call": 1, "name": 5}),
        (actions.rerun, {"call": 1, "arguments": []}),
        (actions.rerun, {"call": 1, "policies": "deny=x"}),
        (actions.rerun, {"call": 1, "policies": [1]}),
        (actions.rerun, {"call": 1, "sections": {"a": None}}),
        (actions.approve, {"approved": True}),
        (actions.approve, {"approved": 1, "digest": ""}),
    ]
    for action, body in wrong:
        with pytest.raises(ValueError, match=r"expected|missing"):
            project.act(action, **body)


def test_what_there_is_not_is_not_found(project: Project):
    with pytest.raises(NotFound):
        project.act(actions.undo, call=9)
    with pytest.raises(NotFound):
        actions.fork(project.path, "nosuch", {"call": 1})


# Approvals


@pytest.fixture
def waiting(tmp_path: Path) -> Iterator[Project]:
    """A run that waits for its first approval."""
    path = tmp_path / "project"
    path.mkdir()
    project = Project(path)
    argv = [*WINK, *project.command("--ask", "write_file", "--ask-elsewhere")]
    child = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        until(lambda: actions.approvals(path))
        (project.run,) = runs_of(path)
        yield project
    finally:
        child.kill()
        child.wait()


def asked(project: Project, path: str) -> Any:
    def found() -> Any:
        every = actions.approvals(project.path)
        return next((each for each in every if each["arguments"]["path"] == path), None)

    return until(found)


def test_approvals_are_answered_from_the_page(waiting: Project):
    first = asked(waiting, "a.txt")
    assert (first["run"], first["tool"], first["reach"]) == (
        waiting.run.id,
        "write_file",
        "reversible",
    )
    assert "+a" in first["shown"]
    assert waiting.views.get("workspace", {})["approvals"] == [first]
    with pytest.raises(AnswerRefused):
        actions.approve(waiting.path, first["id"], {"approved": True, "digest": "other"})

    answer = {"approved": True, "digest": first["digest"]}
    assert actions.approve(waiting.path, first["id"], answer) == {}
    second = asked(waiting, "b.txt")
    with pytest.raises(actions.Refused, match="no longer waits"):
        actions.approve(waiting.path, first["id"], answer)
    edited = {"path": "x.txt", "content": "x\n"}
    answer = {"approved": True, "digest": second["digest"], "arguments": edited}
    actions.approve(waiting.path, second["id"], answer)
    third = asked(waiting, "c.txt")
    answer = {"approved": False, "digest": third["digest"], "reason": "enough"}
    actions.approve(waiting.path, third["id"], answer)

    waiting.ended(waiting.run.id)
    assert waiting.files == {"a.txt": "a\n", "x.txt": "x\n"}
    assert "enough" in Calls(waiting.path).of_run(waiting.run)[2].shown


def test_a_rerun_asks_the_page(project: Project):
    (project.path / "wink.toml").write_text('ask = ["write_file"]\n')

    made = project.act(actions.rerun, call=3, arguments={"path": "y.txt", "content": ""})
    asks = asked(project, "y.txt")
    assert asks["run"] == made["run"]
    answer = {"approved": True, "digest": asks["digest"]}
    actions.approve(project.path, asks["id"], answer)

    project.ended(made["run"])
    assert "y.txt" in project.on_branch(made["branch"])


# Through the server


@contextmanager
def served(project: Project) -> Generator[Callable[[str, Any], tuple[int, Any]]]:
    """Serve the project, and yield what sends a request of the page."""
    ready, parts = threading.Event(), dict[str, Any]()
    listening = listen()
    port = listening.getsockname()[1]

    async def serve() -> None:
        debugger = Debugger(project.views, port=port, actions=Actions.ours())
        serving = serve_app(debugger.app, listening, on_stop=debugger.stop)
        task = asyncio.ensure_future(serving)
        link = debugger.links.new().partition("?")[2]
        parts.update(loop=asyncio.get_running_loop(), task=task, link=link, at=debugger.place)
        ready.set()
        await asyncio.wait([task])

    def work() -> None:
        try:
            asyncio.run(serve())
        finally:
            ready.set()  # also if it failed: the test must not wait for it

    thread = threading.Thread(target=work)
    thread.start()
    ready.wait()
    connection = HTTPConnection("127.0.0.1", port, timeout=240)
    connection.request("GET", f"{parts['at']}/?{parts['link']}")
    response = connection.getresponse()
    response.read()
    headers = {
        "Cookie": response.headers["Set-Cookie"].partition(";")[0],
        "Origin": f"http://127.0.0.1:{port}",
        "Content-Type": "application/json",
    }

    def post(path: str, body: Any) -> tuple[int, Any]:
        connection.request("POST", f"{parts['at']}/api/{path}", json.dumps(body), headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read())

    try:
        yield post
    finally:
        connection.close()
        parts["loop"].call_soon_threadsafe(parts["task"].cancel)
        thread.join()
        listening.close()


def test_the_routes_lead_to_the_actions(project: Project):
    run = f"runs/{project.run.id}"
    with served(project) as post:
        assert post(f"{run}/undo", {"call": 2, "dryRun": True})[0] == 200
        assert post(f"{run}/fork", {"call": 2, "name": "f"})[1]["branch"] == "f"
        code, made = post(f"{run}/rerun", {"call": 3, "arguments": {"path": "y", "content": ""}})
        assert code == 200
        project.ended(made["run"])
        assert post(f"{run}/rewind", {"call": 2})[0] == 200
        refused = [
            post(f"{run}/undo", {"call": 3}),
            post(f"{run}/rerun", {"call": 2, "model": "openai:gpt"}),
            post("approvals/nosuch", {"approved": True, "digest": ""}),
        ]
        wrong = post(f"{run}/undo", {"call": "x"})
        missing = post(f"{run}/undo", {"call": 99})

    assert [code for code, _ in refused] == [409, 409, 409]
    assert "OPENAI_API_KEY" in refused[1][1]["error"]
    assert (wrong[0], missing[0]) == (400, 404)
    assert project.on_branch(made["branch"]).keys() == {"a.txt", "b.txt", "y"}
    with HostFilesystem(project.path) as files:
        assert not files.exists("c.txt")


def test_an_approval_is_answered_through_its_route(waiting: Project):
    first = asked(waiting, "a.txt")
    with served(waiting) as post:
        answer = {"approved": True, "digest": first["digest"]}
        assert post(f"approvals/{first['id']}", answer) == (200, {})
        assert post(f"approvals/{first['id']}", answer)[0] == 409


def test_approvals_that_wait_in_a_database_are_answered_from_the_page(
    project: Project, tmp_path: Path
):
    """Their runs may be on any machine, and no worker needs to be running."""
    database = Database(f"sqlite:///{tmp_path / 'runs.db'}")
    runs = Runs(database)
    run = runs.submit("a task", about={})
    request = ApprovalRequest(
        tool_name="send_mail",
        description="Sends a mail.",
        arguments={"text": "hello"},
        reach="irreversible",
        call_id="c1",
        session_id="s",
    )
    runs.begin(run.id, 1, "w")
    runs.ask(run.id, request)
    runs.end(run.id, 1, "waiting")
    ours = Actions.ours(runs)

    (asked,) = ours.approvals(project.path)
    assert (asked["run"], asked["tool"], asked["reach"]) == (run.id, "send_mail", "irreversible")
    answer = {"approved": True, "digest": asked["digest"], "arguments": {"text": "hi"}}
    approve = ours.posts["approve"]
    assert approve(project.path, asked["id"], answer) == {}

    with pytest.raises(AnswerRefused, match="somebody else"):
        approve(project.path, asked["id"], answer)
    assert ours.approvals(project.path) == []
    assert runs.find(run.id).status == "queued"
    given = runs.answered(run.id, "c1", asked["digest"])
    assert given is not None
    assert given.arguments == {"text": "hi"}
    database.close()


def test_the_page_works_while_the_database_does_not(project: Project, tmp_path: Path):
    database = Database(f"sqlite:///{tmp_path / 'folder' / 'runs.db'}")
    (tmp_path / "folder").mkdir()
    runs = Runs(database, patience=0)
    database.close()
    (tmp_path / "folder" / "runs.db").unlink()
    (tmp_path / "folder").rename(tmp_path / "gone")

    assert actions.approvals(project.path, runs) == []
