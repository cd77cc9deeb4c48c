"""The tables of runs: what many processes do at once happens once, and nothing gets lost."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from postgres import Postgres
from weakincentives.errors import AnswerRefused, NoSuchRun, RunAlreadyEnded, StoreRefused
from weakincentives.prompt.approval import ApprovalRequest, CallPreview
from weakincentives.runtime.stores.database import Database
from weakincentives.runtime.stores.runs import DurableRun, Runs, WaitingApproval


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.heavy)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'runs.db'}"
    server: Postgres = request.getfixturevalue("postgres")
    return server.new_database()


@pytest.fixture
def runs(url: str) -> Iterator[Runs]:
    database = Database(url)
    yield Runs(database)
    database.close()


def asked(
    call_id: str = "call-1", text: str = "hello", policy: str = "approval"
) -> ApprovalRequest:
    return ApprovalRequest(
        tool_name="send_mail",
        description="Sends a mail.",
        arguments={"text": text},
        reach="irreversible",
        call_id=call_id,
        session_id="session",
        preview=CallPreview(facts={"network": "mail.example"}),
        policy_name=policy,
    )


def waiting(runs: Runs, *requests: ApprovalRequest) -> tuple[DurableRun, list[WaitingApproval]]:
    """A run whose first sitting has ended with these requests."""
    run = runs.submit("a task", about={})
    assert runs.begin(run.id, 1, "worker-1")
    for request in requests or (asked(),):
        runs.ask(run.id, request)
    assert runs.end(run.id, 1, "waiting", "send_mail")
    return runs.find(run.id), runs.pending(run.id)


# Runs


def test_a_submitted_run_is_queued_and_to_be_enqueued(runs: Runs) -> None:
    run = runs.submit("fix it", about={"model": "m", "n": [1]}, machine="here", partition="/w")

    assert (run.status, run.sitting, run.machine, run.partition) == ("queued", 1, "here", "/w")
    assert run.about == {"model": "m", "n": [1]}
    assert run.workflow == f"{run.id}/1"
    assert runs.find(run.id) == run
    assert runs.to_enqueue() == [run]


def test_a_branch_gets_the_mark_of_the_run_for_a_name(runs: Runs) -> None:
    run = runs.submit("a", about={"branch": "-"})

    assert run.about == {"branch": run.mark}
    assert runs.submit("a", about={"branch": "parser"}).about == {"branch": "parser"}


def test_an_enqueued_run_is_not_listed_again_until_its_next_sitting(runs: Runs) -> None:
    """Polling must stay cheap when many runs wait in the queue."""
    run, (request,) = waiting(runs)
    runs.mark_enqueued(replace(run, sitting=1))
    assert runs.to_enqueue() == []

    after = runs.answer(request.id, approved=True, digest=request.digest)

    assert runs.to_enqueue() == [after]
    runs.mark_enqueued(replace(after, sitting=1))  # a late note about the sitting before
    assert runs.to_enqueue() == [after]


def test_a_submission_with_a_key_happens_once(runs: Runs) -> None:
    first = runs.submit("a", about={}, key="request-7")

    assert runs.submit("a", about={}, key="request-7") == first
    assert len(runs.list()) == 1


def test_a_run_is_found_by_id_prefix_or_mark(runs: Runs) -> None:
    run = runs.submit("a", about={})

    assert runs.find(run.id[:8]) == runs.find(run.mark) == runs.find(run.id) == run


def test_a_name_that_fits_no_run_or_several_is_refused(runs: Runs) -> None:
    with pytest.raises(NoSuchRun, match="no run 'zzz' in"):
        runs.find("zzz")
    with pytest.raises(NoSuchRun, match="no run ''"):
        runs.find("")
    first, _ = runs.submit("a", about={}), runs.submit("b", about={})
    with pytest.raises(NoSuchRun, match=r"matches several runs: .*; use a longer prefix"):
        runs.find(first.id[:6])


def test_runs_are_listed_oldest_first_and_by_status(runs: Runs) -> None:
    made: list[DurableRun] = []
    for number in range(4):
        made.append(runs.submit(str(number), about={}))
        time.sleep(0.005)  # SQLite's clock has milliseconds
    runs.begin(made[1].id, 1, "w")
    runs.end(made[1].id, 1, "done", "the answer")

    assert [each.task for each in runs.list()] == ["0", "1", "2", "3"]
    assert [each.task for each in runs.list(limit=2)] == ["2", "3"]
    assert [each.detail for each in runs.list(status="done")] == ["the answer"]
    assert [each.task for each in runs.list(status=["done", "queued"], limit=3)] == ["1", "2", "3"]
    assert runs.count() == {"queued": 3, "done": 1}


def test_text_that_a_database_refuses_is_stored_without_it(runs: Runs) -> None:
    """An answer comes from a model: it may have any character."""
    run = runs.submit("a\0b", about={})
    runs.begin(run.id, 1, "w")

    runs.end(run.id, 1, "done", "half \ud800 of \0 a pair")

    assert runs.find(run.id).task == "a\ufffdb"
    assert runs.find(run.id).detail == "half ? of \ufffd a pair"


def test_only_the_current_sitting_changes_a_run(runs: Runs) -> None:
    run, (request,) = waiting(runs)
    runs.answer(request.id, approved=True, digest=request.digest)

    assert not runs.begin(run.id, 1, "late")
    assert runs.end(run.id, 1, "failed", "late") is None
    assert runs.find(run.id).status == "queued"
    assert runs.begin(run.id, 2, "worker-2")
    assert runs.find(run.id).worker == "worker-2"


def test_a_run_that_has_ended_stays_as_it_is(runs: Runs) -> None:
    run = runs.submit("a", about={})
    runs.begin(run.id, 1, "w")
    runs.end(run.id, 1, "done", "yes")

    assert not runs.begin(run.id, 1, "w")
    assert runs.end(run.id, 1, "failed", "no") is None
    assert (runs.find(run.id).status, runs.find(run.id).detail) == ("done", "yes")


def test_a_sitting_cannot_end_as_running(runs: Runs) -> None:
    with pytest.raises(ValueError, match="cannot end as running"):
        runs.end("a", 1, "running")


# Cancelling


def test_a_cancelled_run_is_not_taken_and_its_end_not_noted(runs: Runs) -> None:
    run = runs.submit("a", about={})
    runs.begin(run.id, 1, "w")

    assert runs.cancel(run.id).status == "cancelled"

    assert runs.is_cancelled(run.id)
    assert runs.end(run.id, 1, "done", "too late") is None
    assert not runs.begin(run.id, 1, "w")
    assert runs.cancel(run.id).status == "cancelled"  # again: nothing to do


def test_cancelling_withdraws_what_the_run_asks(runs: Runs) -> None:
    run, (request,) = waiting(runs)

    runs.cancel(run.id)

    assert runs.pending() == []
    with pytest.raises(AnswerRefused, match="no longer waits"):
        runs.answer(request.id, approved=True, digest=request.digest)
    runs.ask(run.id, asked("call-2"))  # its worker does not know yet
    assert runs.pending() == []


def test_a_run_that_has_ended_cannot_be_cancelled(runs: Runs) -> None:
    run = runs.submit("a", about={})
    runs.end(run.id, 1, "failed", "no model")

    with pytest.raises(RunAlreadyEnded, match="has ended: it is failed"):
        runs.cancel(run.id)
    with pytest.raises(NoSuchRun):
        runs.cancel("nothing")
    assert not runs.is_cancelled(run.id)
    assert not runs.is_cancelled("nothing")


# Approvals


def test_a_request_comes_back_as_it_was_asked(runs: Runs) -> None:
    _, (request,) = waiting(runs, replace(asked(), revise=lambda arguments: asked()))

    assert request.request == asked()
    assert request.digest == asked().digest


def test_the_same_request_is_stored_once(runs: Runs) -> None:
    """A step that an engine repeats asks again."""
    run, (request,) = waiting(runs, asked(), asked())

    assert [each.id for each in runs.pending()] == [request.id]
    assert runs.ask(run.id, asked()) == request.id
    assert runs.answered(run.id, "call-1", request.digest) is None


def test_an_answer_queues_the_next_sitting(runs: Runs) -> None:
    run, (request,) = waiting(runs)

    after = runs.answer(
        request.id, approved=True, digest=request.digest, arguments={"text": "hi"}, by="anna"
    )

    assert (after.status, after.sitting, after.workflow) == ("queued", 2, f"{run.id}/2")
    found = runs.answered(run.id, "call-1", request.digest)
    assert found is not None
    assert (found.approved, found.by, found.arguments) == (True, "anna", {"text": "hi"})
    assert runs.pending() == []


def test_a_denial_carries_its_reason(runs: Runs) -> None:
    run, (request,) = waiting(runs)

    runs.answer(request.id, approved=False, digest=request.digest, reason="not today")

    found = runs.answered(run.id, "call-1", request.digest, "approval")
    assert found is not None
    assert (found.approved, found.reason, bool(found.by)) == (False, "not today", True)


def test_the_first_answer_counts(runs: Runs) -> None:
    run, (request,) = waiting(runs)
    runs.answer(request.id, approved=False, digest=request.digest)

    with pytest.raises(AnswerRefused, match="somebody else has answered"):
        runs.answer(request.id, approved=True, digest=request.digest)

    assert runs.find(run.id).sitting == 2


def test_an_answer_for_something_else_is_refused(runs: Runs) -> None:
    run, (request,) = waiting(runs)

    with pytest.raises(AnswerRefused, match="not what is asked now"):
        runs.answer(request.id, approved=True, digest=asked(text="other").digest)
    with pytest.raises(AnswerRefused, match="no approval 'nothing'"):
        runs.answer("nothing", approved=True, digest=request.digest)

    assert runs.find(run.id).status == "waiting"


def test_a_call_that_is_asked_about_anew_replaces_its_request(runs: Runs) -> None:
    """The files have changed since: the old answer would be for something else."""
    _, (now,) = waiting(runs, asked(), asked(text="other"))

    assert now.request.arguments == {"text": "other"}


def test_two_policies_ask_about_one_call(runs: Runs) -> None:
    run, requests = waiting(runs, asked(), asked(policy="second"))
    assert len(requests) == 2
    second = next(each for each in requests if each.request.policy_name == "second")

    runs.answer(second.id, approved=True, digest=second.digest)

    assert runs.answered(run.id, "call-1", second.digest, "second") is not None
    assert runs.answered(run.id, "call-1", second.digest, "approval") is None


def test_an_answer_before_the_sitting_has_ended_queues_the_run_at_its_end(runs: Runs) -> None:
    """Somebody is quicker than the worker: it says "waiting" for what is answered already."""
    run = runs.submit("a", about={})
    runs.begin(run.id, 1, "w")
    runs.ask(run.id, asked())
    (request,) = runs.pending()

    assert runs.answer(request.id, approved=True, digest=request.digest).status == "running"
    after = runs.end(run.id, 1, "waiting", "send_mail")

    assert after is not None
    assert (after.status, after.sitting) == ("queued", 2)


def test_a_sitting_that_used_an_answer_waits_for_the_next_one(runs: Runs) -> None:
    run, (first, second) = waiting(runs, asked("call-1"), asked("call-2"))
    runs.answer(first.id, approved=True, digest=first.digest)
    runs.begin(run.id, 2, "w")
    runs.ask(run.id, asked("call-2"))

    after = runs.end(run.id, 2, "waiting", "send_mail")

    assert after is not None
    assert (after.status, after.sitting) == ("waiting", 2)
    assert runs.answer(second.id, approved=True, digest=second.digest).sitting == 3


def test_a_run_that_fails_withdraws_what_it_asks(runs: Runs) -> None:
    run = runs.submit("a", about={})
    runs.begin(run.id, 1, "w")
    runs.ask(run.id, asked())

    runs.end(run.id, 1, "failed", "no model")

    assert runs.pending() == []


# Workers


def test_a_worker_that_does_not_report_is_dead(runs: Runs) -> None:
    runs.beat("worker-1", "machine-1")
    runs.beat("worker-1", "machine-1")

    assert [(each.name, each.machine) for each in runs.workers()] == [("worker-1", "machine-1")]
    runs.leave("worker-1")
    assert runs.workers() == []


# Versions


def test_tables_of_a_newer_version_are_refused(runs: Runs) -> None:
    with runs.database.transaction() as transaction:
        transaction.execute("UPDATE wink_tables SET version = 99")

    with pytest.raises(StoreRefused, match="newer version of wink"):
        Runs(runs.database)


# Many processes at once


def at_once(url: str, code: str, processes: int = 4) -> list[str]:
    """Run code in several processes that begin at the same moment; returns what they print."""
    head = f"""
        import sys
        from weakincentives.runtime.stores.runs import Runs
        from weakincentives.errors import WinkError
        from weakincentives.runtime.stores.database import Database
        number = int(sys.argv[1])
        database = Database({url!r})
        print("ready", flush=True)
        sys.stdin.readline()
        """
    text = textwrap.dedent(head) + textwrap.dedent(code)
    started = [
        subprocess.Popen(
            [sys.executable, "-c", text, str(number)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for number in range(processes)
    ]  # fmt: skip
    for each in started:
        assert each.stdout is not None
        assert each.stdout.readline() == "ready\n"
    for each in started:
        assert each.stdin is not None
        each.stdin.write("\n")
        each.stdin.flush()
    lines: list[str] = []
    for each in started:
        out, _ = each.communicate(timeout=120)
        assert each.returncode == 0
        lines += out.splitlines()
    return lines


@pytest.mark.heavy
def test_many_processes_create_the_tables(url: str) -> None:
    assert at_once(url, "print(Runs(database).count())") == ["{}"] * 4


@pytest.mark.heavy
def test_many_processes_submit(url: str) -> None:
    ids = at_once(
        url,
        """
        runs = Runs(database)
        for each in range(10):
            print(runs.submit("a", about={}).id)
            print(runs.submit("b", about={}, key=f"key {each}").id)
            runs.beat(f"worker {number}", "m")
        """,
    )

    database = Database(url)
    runs = Runs(database)
    assert len(set(ids)) == 4 * 10 + 10
    assert runs.count() == {"queued": 50}
    assert len({each.mark for each in runs.list()}) == 50
    assert len(runs.workers()) == 4
    database.close()


@pytest.mark.heavy
def test_of_many_answers_one_counts_and_the_run_is_queued_once(url: str) -> None:
    database = Database(url)
    runs = Runs(database)
    requests = [waiting(runs)[1][0] for _ in range(10)]
    known = json.dumps([(each.id, each.digest) for each in requests])

    lines = at_once(
        url,
        f"""
        runs = Runs(database)
        for name, digest in {known}:
            try:
                runs.answer(name, approved=bool(number % 2), digest=digest, by=str(number))
                print(name, number)
            except WinkError as error:
                print(error)
        """,
    )

    counted = dict(line.split() for line in lines if len(line.split()) == 2)
    assert lines.count("somebody else has answered this") == 3 * 10
    for each in requests:
        run = runs.find(each.run)
        assert (run.status, run.sitting) == ("queued", 2)
        found = runs.answered(each.run, "call-1", each.digest)
        assert found is not None
        assert found.by == counted[each.id]
    database.close()


def test_answers_that_race_with_the_end_of_the_sitting_are_never_lost(url: str) -> None:
    """Whichever comes first, the run is queued for its next sitting, once."""
    database = Database(url)
    runs = Runs(database)
    made: list[tuple[str, str, str]] = []
    for _ in range(20):
        run = runs.submit("a", about={})
        runs.begin(run.id, 1, "w")
        runs.ask(run.id, asked())
        (request,) = runs.pending(run.id)
        made.append((run.id, request.id, request.digest))

    at_once(
        url,
        f"""
        runs = Runs(database)
        for run, name, digest in {json.dumps(made)}:
            if number:
                runs.answer(name, approved=True, digest=digest)
            else:
                runs.end(run, 1, "waiting")
        """,
        processes=2,
    )

    for name, _, _ in made:
        run = runs.find(name)
        assert (run.status, run.sitting) == ("queued", 2)
    assert len(runs.to_enqueue()) == 20
    database.close()


def test_a_process_killed_between_the_answer_and_the_queue_loses_nothing(url: str) -> None:
    """What it should have enqueued is found by whoever looks next."""
    database = Database(url)
    runs = Runs(database)
    _, (request,) = waiting(runs)
    runs.mark_enqueued(runs.find(request.run))
    code = f"""
    import os, signal
    from weakincentives.runtime.stores.runs import Runs
    from weakincentives.runtime.stores.database import Database
    runs = Runs(Database({url!r}))
    runs.answer({request.id!r}, approved=True, digest={request.digest!r})
    runs.submit("another", about={{}})
    os.kill(os.getpid(), signal.SIGKILL)
    """

    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=False, timeout=60)

    assert done.returncode == -9
    assert [(each.task, each.sitting) for each in runs.to_enqueue()] == [
        ("a task", 2),
        ("another", 1),
    ]
    database.close()


@pytest.mark.heavy
def test_listing_and_polling_read_few_rows_of_100_000_runs(runs: Runs) -> None:
    """What a worker asks for every second uses an index, and so does `wink ps`."""
    now = "2026111"
    row = "('{0}-{1:06d}', 'm{1}', 'k{1}', 't', '{2}', '{{}}', '', '', 1, 1, {1}, {1}, '', '')"
    with runs.database.transaction() as transaction:
        for begin in range(0, 100_000, 5_000):
            rows = ", ".join(
                row.format(now, number, "queued" if number % 10 else "done")
                for number in range(begin, begin + 5_000)
            )
            transaction.execute(f"INSERT INTO wink_runs VALUES {rows}")
        if runs.database.is_postgres:
            transaction.execute("ANALYZE wink_runs")
    run = runs.submit("new", about={})

    assert runs.to_enqueue() == [run]
    assert runs.find(run.mark) == run
    assert len(runs.list(status="done", limit=20)) == 20
    for query in (
        "SELECT id FROM wink_runs WHERE status = 'queued' AND enqueued < sitting"
        " ORDER BY updated_at LIMIT 100",
        "SELECT id FROM wink_runs WHERE status = 'done' ORDER BY submitted_at DESC, id DESC"
        " LIMIT 20",
        "SELECT id FROM wink_runs WHERE id >= '2027' AND id < '2028' ORDER BY id LIMIT 4",
    ):
        assert "wink_runs_" in plan_of(runs, query) or "autoindex" in plan_of(runs, query)


def plan_of(runs: Runs, query: str) -> str:
    explain = "EXPLAIN" if runs.database.is_postgres else "EXPLAIN QUERY PLAN"
    with runs.database.transaction() as transaction:
        plan = str(transaction.execute(f"{explain} {query}"))
    assert "Seq Scan" not in plan
    assert "SCAN wink_runs'" not in plan
    return plan
