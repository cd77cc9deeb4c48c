"""Checkers tell whether the task is done, and what is missing; in doubt it is not done."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from weakincentives.prompt import ToolContext
from weakincentives.prompt.completion import (
    AllOf,
    AnyOf,
    CompletionResult,
    Custom,
    FilesExist,
    PlanDone,
    check_completion,
)
from weakincentives.runtime import Session
from weakincentives.testing import make_context, make_context_with_files, make_session, make_vfs


@dataclass(frozen=True)
class Plan:
    done: tuple[str, ...] = ()
    left: tuple[str, ...] = ()


DONE = CompletionResult(True)
yes = Custom(lambda _: True)
no = Custom(lambda _: False, reason="Not yet")
late = Custom(lambda _: False, reason="Too late")
broken = Custom(lambda _: 1 / 0 > 0)


def test_files_exist_names_those_that_are_missing():
    context = make_context_with_files({"a.txt": "", "docs/b.txt": ""})
    checker = FilesExist(["c.txt", "a.txt", "docs", "../../etc/passwd"])

    assert FilesExist(["a.txt", "/workspace/docs/b.txt"]).check(context) == DONE
    assert checker.check(context) == CompletionResult(
        False, "Missing files: c.txt, docs, ../../etc/passwd"
    )


def test_a_long_list_is_cut():
    checker = FilesExist([f"{n}.txt" for n in range(12)])

    reason = checker.check(make_context()).reason

    assert reason.endswith("8.txt, 9.txt and 2 more")


def test_a_file_that_comes_is_seen():
    files = make_vfs()
    context = make_context(fs=files)
    checker = FilesExist(["a.txt"])
    assert not checker.check(context).done

    files.write("a.txt", "")

    assert checker.check(context).done


def planned(*plans: Plan) -> ToolContext:
    session: Session = make_session()
    session[Plan].seed(plans)
    return make_context(session=session)


def test_a_plan_is_done_when_no_step_is_left():
    checker = PlanDone(Plan, lambda plan: plan.left)

    assert checker.check(planned()).reason == "There is no Plan yet"
    assert checker.check(planned(Plan(left=("test", "ship")))) == CompletionResult(
        False, "Unfinished steps: test; ship"
    )
    assert checker.check(planned(Plan(left=("test",)), Plan(done=("test",)))) == DONE


def test_a_custom_function_says_it_with_a_bool_or_a_result():
    context = make_context()

    assert yes.check(context) == DONE
    assert no.check(context) == CompletionResult(False, "Not yet")
    assert Custom(lambda _: CompletionResult(False, "Red")).check(context).reason == "Red"


def test_all_of_gives_every_reason():
    context = make_context()

    assert AllOf(yes, yes).check(context) == DONE
    assert AllOf(no, yes, late).check(context) == CompletionResult(False, "Not yet; Too late")


def test_any_of_is_content_with_one():
    context = make_context()

    assert AnyOf(no, yes, broken).check(context) == DONE
    assert AnyOf(no, late).check(context) == CompletionResult(False, "Not yet or Too late")


def test_combinations_nest():
    checker = AllOf(AnyOf(no, yes), AnyOf(late, FilesExist(["a.txt"])))

    assert checker.check(make_context_with_files(["a.txt"])).done
    assert checker.check(make_context()).reason == "Too late or Missing files: a.txt"


def test_a_checker_that_raises_is_not_done(caplog: pytest.LogCaptureFixture):
    result = check_completion(broken, make_context())

    assert result == CompletionResult(False, "Custom could not be checked: division by zero")
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize("combined", [AllOf(yes, broken), AnyOf(broken, no), AllOf(AnyOf(broken))])
def test_a_part_that_raises_is_not_done(combined: Any):
    result = combined.check(make_context())

    assert not result.done
    assert "Custom could not be checked: division by zero" in result.reason


def test_files_cannot_be_checked_without_a_filesystem():
    result = check_completion(FilesExist(["a.txt"]), ToolContext(session=make_session()))

    assert not result.done
    assert "Filesystem" in result.reason


@pytest.mark.parametrize("answer", [None, "yes", 1])
def test_an_answer_that_makes_no_sense_is_not_done(answer: Any):
    class Odd:
        def check(self, context: ToolContext) -> Any:
            return answer

    assert not check_completion(Odd(), make_context()).done
    assert not check_completion(Custom(lambda _: answer), make_context()).done


@pytest.mark.parametrize("make", [AllOf, AnyOf, lambda: FilesExist(())])
def test_nothing_to_check_is_refused(make: Callable[[], object]):
    with pytest.raises(ValueError, match="at least one"):
        make()


def test_one_path_as_a_string_is_refused():
    with pytest.raises(TypeError, match="got a string"):
        FilesExist("a.txt")


def test_a_combination_shows_what_it_is_made_of():
    assert repr(AllOf(FilesExist(["a"]))) == "AllOf(FilesExist(paths=('a',)))"
