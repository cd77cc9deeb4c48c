"""Calls of clients that cannot ask their user wait in a database, and are answered elsewhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_elicitation import ERAS, A, Mode, User, said, use

from weakincentives.contrib.tools import file_tools
from weakincentives.filesystem import Filesystem, MemoryFilesystem
from weakincentives.mcp import AskElsewhere, McpServer
from weakincentives.prompt import ApprovalPolicy, MarkdownSection, Prompt, PromptTemplate
from weakincentives.runtime import ToolInvoked
from weakincentives.runtime.stores.database import Database
from weakincentives.runtime.stores.runs import Runs

B = {**A, "path": "b.txt"}


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    database = Database(f"sqlite:///{tmp_path / 'runs.db'}")
    yield Runs(database)
    database.close()


def server_of(runs: Runs, files: Filesystem, *names: str) -> McpServer:
    ask = AskElsewhere(lambda: runs)
    policies = [
        ApprovalPolicy(ask=ask, reaches={"reversible"}, name=name)
        for name in names or ("approval",)
    ]
    section = MarkdownSection(title="Files", tools=file_tools(), policies=policies)
    template = PromptTemplate(sections=[section], resources={Filesystem: files})
    return McpServer(Prompt(template), undo=False)


def answer(runs: Runs, *, approved: bool = True, **said: Any) -> None:
    """Answer the oldest question, as ``wink approve`` does."""
    asked = runs.pending()[0]
    runs.answer(asked.id, approved=approved, digest=asked.digest, **said)


@ERAS
def test_a_call_waits_until_a_person_answers_and_is_then_made_once(runs: Runs, mode: Mode):
    files = MemoryFilesystem()
    server = server_of(runs, files)

    (first,) = use(server, None, mode, A)
    assert first.is_error
    assert "it waits for an answer (`wink approve " in said(first)
    assert first.meta["weakincentives/failure"]["code"] == "SUSPENDED"
    assert not files.exists("a.txt")
    (asked,) = runs.pending()
    assert "+one" in asked.request.preview.diff
    (again,) = use(server, None, mode, A)
    assert said(again) == said(first)
    assert len(runs.pending()) == 1

    answer(runs, by="Ada")
    done, once_more = use(server, None, mode, A, B)

    assert not done.is_error
    assert files.read("a.txt") == "one\n"
    assert once_more.is_error  # it is another call
    records = server.session[ToolInvoked].all()
    assert [(each.suspended, each.success) for each in records] == [
        (True, False), (True, False), (False, True), (True, False),
    ]  # fmt: skip
    assert records[2].notes == ("approval: approved by Ada",)


def test_an_answer_counts_once(runs: Runs):
    files = MemoryFilesystem()
    server = server_of(runs, files)
    use(server, None, "auto", A)
    answer(runs)
    use(server, None, "auto", A)
    files.delete("a.txt")  # so that the same is asked again

    (again,) = use(server, None, "auto", A)

    assert "waits for an answer" in said(again)
    assert len(runs.pending()) == 1
    assert not files.exists("a.txt")


def test_a_denial_has_its_reason(runs: Runs):
    files = MemoryFilesystem()
    server = server_of(runs, files)
    use(server, None, "auto", A)
    answer(runs, approved=False, reason="use b.txt", by="Ada")

    (done,) = use(server, None, "auto", A)

    assert said(done) == "Call to 'write_file' was not approved by Ada: use b.txt"
    assert runs.pending() == []
    assert not files.exists("a.txt")


def test_edited_arguments_are_those_that_run(runs: Runs):
    files = MemoryFilesystem()
    server = server_of(runs, files)
    use(server, None, "auto", A)
    answer(runs, arguments=B)

    (done,) = use(server, None, "auto", A)

    assert "The user edited the arguments of 'write_file'" in said(done)
    assert files.glob("**/*") == ("b.txt",)


def test_an_answer_is_for_the_file_that_was_shown(runs: Runs):
    files = MemoryFilesystem()
    files.write("a.txt", "one\n")
    edit = {"tool": "edit_file", "path": "a.txt", "old_string": "one", "new_string": "two"}
    server = server_of(runs, files)
    use(server, None, "auto", edit)
    answer(runs)
    files.write("a.txt", "one\nand more\n")

    (done,) = use(server, None, "auto", edit)

    assert "waits for an answer" in said(done)
    assert files.read("a.txt") == "one\nand more\n"
    (asked,) = runs.pending()
    assert "and more" in asked.request.preview.diff


def test_each_policy_gets_its_answer(runs: Runs):
    files = MemoryFilesystem()
    server = server_of(runs, files, "first", "second")
    use(server, None, "auto", A)
    answer(runs)
    (half,) = use(server, None, "auto", A)
    assert "waits for an answer" in said(half)
    answer(runs)

    (done,) = use(server, None, "auto", A)

    assert not done.is_error, said(done)
    assert runs.pending() == []


def test_no_worker_takes_what_stands_for_a_session(runs: Runs):
    use(server_of(runs, MemoryFilesystem()), None, "auto", A)
    answer(runs)

    assert runs.to_enqueue() == []
    assert [each.status for each in runs.list()] == ["running"]


def test_a_session_that_is_cancelled_in_the_database_asks_no_more(runs: Runs):
    server = server_of(runs, MemoryFilesystem())
    use(server, None, "auto", A)
    runs.cancel(runs.list()[0].id)
    assert runs.pending() == []

    (done,) = use(server, None, "auto", A)

    assert "the session was cancelled in the database" in said(done)
    assert runs.pending() == []


@ERAS
def test_a_client_that_can_ask_its_user_does(runs: Runs, mode: Mode):
    files = MemoryFilesystem()

    (done,) = use(server_of(runs, files), User({"answer": "yes"}), mode, A)

    assert not done.is_error
    assert runs.list() == []


def test_a_database_that_cannot_be_used_denies(tmp_path: Path):
    def none() -> Runs:
        raise OSError("no database")

    ask = AskElsewhere(none)
    policy = ApprovalPolicy(ask=ask)
    section = MarkdownSection(title="Files", tools=file_tools(), policies=[policy])
    files = MemoryFilesystem()
    template = PromptTemplate(sections=[section], resources={Filesystem: files})

    (done,) = use(McpServer(Prompt(template), undo=False), None, "auto", A)

    assert "asking failed: OSError('no database')" in said(done)


@pytest.mark.heavy
def test_wink_mcp_waits_for_wink_approve_also_after_a_restart(tmp_path: Path):
    pytest.importorskip("typer")
    workspace = tmp_path / "project"
    workspace.mkdir()
    (workspace / "wink.toml").write_text('ask = ["write_file"]\n')
    database = f"sqlite:///{tmp_path / 'runs.db'}"
    env = {**os.environ, "WINK_DATABASE": database}
    wink = [sys.executable, "-m", "weakincentives.cli"]

    def call() -> str:
        from program import Program

        with Program(workspace, specs=(), env=env) as program:
            text = program.begin().call("write_file", path="a.txt", content="one\n")
            assert program.end()[0] == 0
        return text

    assert "waits for an answer" in call()
    shown = subprocess.run(
        [*wink, "approve", "-w", str(workspace), "--json"], env=env, capture_output=True, text=True
    )
    assert json.loads(shown.stdout)["tool"] == "write_file"
    subprocess.run([*wink, "approve", "-w", str(workspace), "--yes"], env=env, check=True)
    assert not (workspace / "a.txt").exists()

    assert "Wrote a.txt" in call()

    assert (workspace / "a.txt").read_text() == "one\n"
    listed = subprocess.run(
        [*wink, "ps", "--all", "--json"], env=env, capture_output=True, text=True
    )
    assert json.loads(listed.stdout)["status"] == "done"
