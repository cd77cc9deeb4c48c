"""Best of N: attempts on branches, a judge, and one winner that is merged."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from weakincentives.adapters import ScriptedAdapter, calls
from weakincentives.contrib.tools import VfsConfig, VfsToolsSection
from weakincentives.core.budget import TokenPrice, TokenUsage
from weakincentives.errors import FilesystemError
from weakincentives.filesystem import Branch, HostFilesystem, branches_of
from weakincentives.filesystem.overlay import find_way
from weakincentives.prompt import Prompt, PromptTemplate
from weakincentives.runtime import Attempt, CommandJudge, Session, Verdict, best_of
from weakincentives.runtime.attempts import score_in
from weakincentives.runtime.conversation import PromptResponse

pytestmark = pytest.mark.skipif(os.name != "posix", reason="a real directory needs POSIX calls")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    project = tmp_path / "project"
    project.mkdir()
    (project / "calc.py").write_text("def total(prices):\n    return sum(prices[1:])\n")
    (project / "test_calc.py").write_text(
        "from calc import total\n\ndef test_total():\n    assert total([1, 2]) == 3\n"
    )
    return project


@pytest.fixture
def commands(project: Path) -> None:
    """Skip where commands cannot run on a branch."""
    way = find_way(project, project.parent)
    if isinstance(way, str):
        pytest.skip(way)


def writes(text: str, path: str = "out.txt") -> Callable[[Branch], str]:
    def attempt(branch: Branch) -> str:
        branch.write(path, text)
        return text

    return attempt


def says_done(files: HostFilesystem, attempt: Attempt[str]) -> Verdict:
    return Verdict(passed="done" in files.read("out.txt"))


def names_of(project: Path) -> list[str]:
    return [each.name for each in branches_of(project)]


PYTEST = f"{sys.executable} -m pytest -q -p no:cacheprovider"


@pytest.mark.heavy
def test_the_attempt_whose_tests_pass_is_merged_and_the_others_remain(
    project: Path, commands: None
):
    def fixes(new: str) -> Callable[[Branch], PromptResponse]:
        def attempt(branch: Branch) -> PromptResponse:
            edit = {"path": "calc.py", "old_string": "[1:]", "new_string": new}
            turns = [
                calls(("read_file", {"path": "calc.py"})),
                calls(("edit_file", edit), usage=TokenUsage(input_tokens=10)),
                "Fixed.",
            ]
            section = VfsToolsSection(config=VfsConfig(filesystem=branch))
            prompt = Prompt(PromptTemplate(sections=[section]))
            with prompt.resources:
                return ScriptedAdapter(turns).evaluate(prompt, Session())

        return attempt

    price = TokenPrice(input=1, output=2)
    found = best_of(
        project,
        [fixes("[2:]"), fixes(""), fixes("[:1]")],
        PYTEST,
        name="try",
        cost=lambda response: price.of(response.usage),
    )

    assert found.winner is not None
    assert (found.winner.branch, found.winner.cost_usd) == ("try-2", 10 / 1e6)
    assert found.winner.verdict is not None
    assert found.winner.verdict.reason.startswith("1 passed")
    assert found.merged == ("calc.py",)
    assert "sum(prices)" in (project / "calc.py").read_text()
    assert names_of(project) == ["try-1", "try-3"]
    assert [each.passed for each in found.attempts] == [True, False, False]
    with HostFilesystem(project) as files:
        files.undo(files.history()[-1].call_id)
    assert "sum(prices[1:])" in (project / "calc.py").read_text()


def test_the_best_has_the_highest_score_then_the_fewest_lines_then_the_lowest_cost(project: Path):
    scores = {"a\nb\n": 2.0, "a\n": 2.0, "b\n": 2.0, "c\n": 1.0, "d\n": 9.0}

    def judge(files: HostFilesystem, attempt: Attempt[str]) -> Verdict:
        text = files.read("out.txt")
        return Verdict(passed=text != "d\n", score=scores[text])

    costs = {"a\n": 0.3, "b\n": 0.2}
    found = best_of(project, [writes(text) for text in scores], judge, cost=costs.get)

    assert [each.number for each in found.attempts] == [3, 2, 1, 4, 5]


def test_without_a_pass_nothing_is_merged_and_all_branches_remain(project: Path):
    found = best_of(project, [writes("no"), writes("never")], says_done, name="try")

    assert (found.winner, found.merged, found.problem) == (None, None, "")
    assert names_of(project) == ["try-1", "try-2"]
    assert not (project / "out.txt").exists()


def test_an_attempt_that_raises_and_a_judge_that_raises_end_only_themselves(project: Path):
    def broken(branch: Branch) -> str:
        branch.write("half.txt", "half")
        sys.exit("no\x1b[2J model")

    def judge(files: HostFilesystem, attempt: Attempt[str]) -> Verdict:
        if attempt.result == "odd":
            return True  # type: ignore[return-value]
        if attempt.result == "worse":
            return Verdict(passed=True, score=float("nan"))
        return says_done(files, attempt)

    attempts = [broken, writes("odd"), writes("worse"), writes("done")]
    found = best_of(project, attempts, judge, name="try")

    by_number = {each.number: each for each in found.attempts}
    assert found.winner is by_number[4]
    assert by_number[1].error == "SystemExit: no\\x1b[2J model"
    assert [each.path for each in by_number[1].changes] == ["half.txt"]
    assert by_number[2].error == "TypeError: the judge must return a Verdict, not True"
    assert by_number[3].error == "ValueError: a score must be a finite number, got nan"
    assert names_of(project) == ["try-1", "try-2", "try-3"]


def test_what_the_judge_changes_is_not_kept(project: Path, commands: None):
    judge = "cat out.txt && echo judged >> out.txt && touch junk"

    found = best_of(project, [writes("done\n")], judge)

    assert found.merged == ("out.txt",)
    assert (project / "out.txt").read_text() == "done\n"
    assert not (project / "junk").exists()


def test_a_judge_that_takes_too_long_is_killed_and_its_attempt_fails(project: Path, commands: None):
    judge = CommandJudge(command="mkfifo wait && cat wait", timeout=0.2)

    found = best_of(project, [writes("x")], judge)

    assert found.winner is None
    verdict = found.attempts[0].verdict
    assert verdict is not None
    assert verdict.reason == "the judge took longer than 0.2 s"


def test_a_judge_that_cannot_be_started_fails_the_attempt_with_the_reason(
    project: Path, commands: None
):
    missing = best_of(project, [writes("x")], ["/no/such/judge"]).attempts[0]
    impossible = best_of(project, [writes("x")], ["a\0b"]).attempts[0]

    assert missing.verdict is not None
    assert not missing.passed
    # Who says it is another program for root than for an ordinary user.
    assert re.search(
        "/no/such/judge: (not found|No such file or directory)$", missing.verdict.reason
    )
    assert impossible.error == "A command cannot contain a NUL character"


def test_a_command_s_score_decides(project: Path, commands: None):
    found = best_of(project, [writes("3\n"), writes('{"score": 5.5}\n')], "cat out.txt")

    assert found.winner is not None
    assert found.winner.verdict == Verdict(passed=True, score=5.5, reason='{"score": 5.5}')


@pytest.mark.parametrize(
    ("output", "score"),
    [
        ("tests\n0.75\n\n", 0.75),
        ("-3", -3.0),
        ('{"score": 2, "more": []}', 2.0),
        ("3 passed in 0.1s", None),
        ("", None),
        ("true", None),
        ("NaN", None),
        ("1" + "0" * 400, None),
        ('{"score": "high"}', None),
        ("[" * 100_000, None),
    ],
)
def test_a_score_is_a_number_in_the_last_line(output: str, score: float | None):
    assert score_in(output) == score


def test_all_attempts_begin_with_the_same_files_whatever_is_merged_meanwhile(project: Path):
    with HostFilesystem(project) as files:

        def first(branch: Branch) -> str:
            files.write("new.txt", "by someone else")
            branch.write("out.txt", "done")
            return ""

        def second(branch: Branch) -> str:
            assert not branch.exists("new.txt")
            branch.write("out.txt", "done, with more\nlines\n")
            return ""

        found = best_of(files, [first, second], says_done, jobs=1)

        assert [each.passed for each in found.attempts] == [True, True]
        assert files.read("new.txt") == "by someone else"
        assert files.read("out.txt") == "done"


def test_a_winner_that_conflicts_is_not_merged_and_stays_a_branch(project: Path):
    with HostFilesystem(project) as files:

        def attempt(branch: Branch) -> str:
            branch.write("calc.py", "done\n")
            branch.write("out.txt", "done\n")
            files.write("calc.py", "a person's\n")
            return ""

        found = best_of(files, [attempt], says_done, name="try")

        assert found.winner is not None
        assert found.merged is None
        assert "calc.py" in found.problem
        assert files.read("calc.py") == "a person's\n"
        assert not files.exists("out.txt")
    assert names_of(project) == ["try-1"]


def test_a_winner_is_not_merged_when_that_is_not_wanted(project: Path):
    found = best_of(project, [writes("done")], says_done, merge=False, name="try")

    assert found.winner is not None
    assert found.merged is None
    assert names_of(project) == ["try-1"]


def test_at_most_so_many_attempts_are_made_at_once(project: Path):
    running: set[int] = set()
    most: list[int] = []
    both = threading.Barrier(2)

    def attempt(branch: Branch) -> str:
        running.add(threading.get_ident())
        most.append(len(running))
        both.wait(60)
        running.discard(threading.get_ident())
        branch.write("out.txt", "done")
        return ""

    heard: list[int] = []
    found = best_of(
        project,
        [attempt] * 4,
        says_done,
        jobs=2,
        on_end=lambda each: heard.append(each.number),
    )

    assert all(each.passed for each in found.attempts), found.attempts
    assert max(most) == 2
    assert sorted(heard) == [1, 2, 3, 4]


def test_a_name_that_is_taken_is_refused_before_anything_and_leaves_nothing(project: Path):
    Branch.create(project, "try-2").close()

    with pytest.raises(FilesystemError, match="already a branch 'try-2'"):
        best_of(project, [writes("done")] * 3, says_done, name="try")

    assert names_of(project) == ["try-2"]


def test_ctrl_c_stops_all_and_the_branches_stay(project: Path, commands: None):
    """An attempt in progress cannot change its branch any more, and a judge's command is killed."""
    interrupted = threading.Event()
    judging = project.parent / "judging"
    os.mkfifo(judging)
    refused: list[Exception] = []

    def works(branch: Branch) -> str:
        branch.write("out.txt", "before")
        with open(judging, "rb") as file:  # the judge of the other has begun
            file.read(1)
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupted.wait(60)
        try:
            branch.write("out.txt", "after")
        except Exception as error:
            refused.append(error)
            raise
        return ""

    judge = CommandJudge(command=f"echo x > {judging}; mkfifo wait && cat wait", timeout=600)
    attempts = [writes("done"), works, writes("not begun")]

    with pytest.raises(KeyboardInterrupt):
        best_of(project, attempts, judge, jobs=2, name="try", on_interrupt=interrupted.set)

    assert [str(error) for error in refused] == ["the attempts were interrupted"]
    assert names_of(project) == ["try-1", "try-2", "try-3"]
    with Branch.open(project, "try-2") as branch:
        assert branch.read("out.txt") == "before"
    assert not (project / "out.txt").exists()


def test_files_that_git_ignores_count_no_lines(project: Path):
    def attempt(branch: Branch) -> str:
        branch.write("__pycache__/calc.pyc", "generated\n" * 100)
        branch.write("out.txt", "done\n")
        return ""

    found = best_of(project, [attempt], says_done)

    assert found.attempts[0].lines == 1
    assert found.merged == ("__pycache__", "__pycache__/calc.pyc", "out.txt")
