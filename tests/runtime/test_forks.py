"""Forked runs: continued from a call, or with a call made again in another way."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from run_world import Note, Work, opened, spoken, texts_of

import weakincentives as wink
from weakincentives.adapters import ModelRequest, ScriptedAdapter, calls
from weakincentives.core.media import Media
from weakincentives.errors import FilesystemError
from weakincentives.filesystem import Branch, branches_of
from weakincentives.runtime import Change, SavedSession, ToolInvoked, fork_call, rerun_call
from weakincentives.runtime.at import NOT_MADE
from weakincentives.runtime.calls import Run, runs_of
from weakincentives.runtime.conversation import Message
from weakincentives.runtime.forks import asked_arguments, fork_run


def test_a_forked_run_continues_from_the_call_and_the_other_is_as_it_was(tmp_path: Path):
    with opened(tmp_path) as work:
        work.write("a1", "b1", "c1")
        work.write("a2")
        forked = fork_run(work.run, work.call(2), about={"branch": "try"})
        first, number = work.run, len(work.saved.session[ToolInvoked])
    with opened(tmp_path, forked) as work:
        talk, notes = work.talk, work.notes
        seen = work.say("go on", ("write", {"name": "d", "text": "d1"}))
        assert [each.number for each in work.run.calls()] == [3]
        assert texts_of(work.at(3).files) == {"a": "a2", "b": "b1", "c": "c1", "d": "d1"}

    answers = [("tool", "Wrote a"), ("tool", "Wrote b"), ("tool", NOT_MADE)]
    assert talk == [("user", "write"), ("model", ""), *answers]
    assert spoken(seen) == [*talk, ("user", "go on")]
    assert notes == ("a1", "b1")
    about = forked.data.about
    assert about["forked_from"] == f"{first.id}/2"
    assert about["branch"] == "try"
    with opened(tmp_path, first) as work:
        assert (len(work.saved.session[ToolInvoked]), work.notes) == (number, (*notes, "c1", "a2"))


def test_a_fork_from_before_the_first_call_asks_the_model_again(tmp_path: Path):
    with opened(tmp_path) as work:
        work.write("a1")
        forked = fork_run(work.run, work.call(1), before=True)
    with opened(tmp_path, forked) as work:
        assert (work.talk, work.notes) == ([("user", "write")], ())
        assert spoken(work.say(None)) == [("user", "write")]


def test_the_calls_of_a_forked_run_are_listed_once(tmp_path: Path):
    with opened(tmp_path) as work:
        work.write("a1", "b1")
        fork_run(work.run, work.call(2))

        assert [each.number for each in work.calls.latest(None)] == [1, 2]


def test_a_fork_of_a_fork_can_be_looked_at(tmp_path: Path):
    with opened(tmp_path) as work:
        work.write("a1")
        first = fork_run(work.run, work.call(1))
    with opened(tmp_path, first) as work:
        work.write("a2")
        second = fork_run(work.run, work.call(2))
    with opened(tmp_path, second) as work:
        work.write("a3")
        assert [each.number for each in work.run.calls()] == [3]
        assert [each.text for each in work.at(3, before=True).session[Note]] == ["a1", "a2"]


def test_pictures_go_with_a_fork_and_stay_when_the_other_run_is_removed(tmp_path: Path):
    picture = Media(bytes(range(256)) * 20, media_type="image/png")
    with opened(tmp_path) as work:
        work.say(["look at this", picture], ("look", {}))  # pyright: ignore
        run, forked = work.run, fork_run(work.run, work.call(1))
    for path in sorted(run.path.with_suffix(".media").iterdir()):
        path.unlink()
    run.path.unlink()

    with opened(tmp_path, forked) as work:
        first = next(iter(work.saved.session[Message]))
        assert first.media[0].data == picture.data


def test_a_session_that_was_forked_has_seals_of_its_own(tmp_path: Path):
    with opened(tmp_path) as work:
        work.write("a1", "b1")
        forked = fork_run(work.run, work.call(2))
        mixed = work.run.path.read_bytes().split(b"\n")[-2]
    with open(forked.path, "ab") as file:
        file.write(mixed + b"\n")

    with pytest.raises(Exception, match="damaged"):
        SavedSession.open(forked.path)


# A turn that stays


def wanted(*texts: str) -> list[tuple[str, dict[str, Any]]]:
    return [("write", {"name": text[0], "text": text}) for text in texts]


def test_a_call_is_made_again_with_other_arguments_and_the_calls_before_it_are_not(
    tmp_path: Path,
):
    with opened(tmp_path) as work:
        work.write("a1", "b1", "c1")
        edited = {"name": "b", "text": "other"}
        forked = fork_run(work.run, work.call(2), turn="open", arguments=edited)
        ids = [each.call_id for each in work.run.calls()]
    with opened(tmp_path, forked) as work:
        assert work.notes == ("a1",)
        seen = work.say(None, resume=True)
        made = work.run.calls()

    answers = [("tool", "Wrote a"), ("tool", "Wrote b"), ("tool", "Wrote c")]
    assert spoken(seen) == [("user", "write"), ("model", ""), *answers]
    assert [each.params for each in seen[1].tool_calls] == [
        {"name": "a", "text": "a1"},
        edited,
        {"name": "c", "text": "c1"},
    ]
    assert [(each.number, each.arguments) for each in made] == [
        (2, edited),
        (3, {"name": "c", "text": "c1"}),
    ]
    assert not {each.call_id for each in made} & set(ids[1:])


def test_an_edited_turn_has_nothing_that_the_provider_said_of_the_other(tmp_path: Path):
    turn = calls(*wanted("a1", "b1"), wire={"chat": {"signature": "of a1"}})
    with opened(tmp_path) as work:
        ScriptedAdapter([turn, "Done."]).evaluate(work.prompt, work.saved.session, message="go")
        edited = fork_run(work.run, work.call(1), turn="open", arguments={"name": "a"})
        same = fork_run(work.run, work.call(1), turn="open")

    assert [model_message(each).wire for each in (edited, same)] == [None, turn.wire]


def model_message(run: Run) -> Message:
    with SavedSession.open(run.path) as saved:
        return next(each for each in saved.session[Message] if each.role == "model")


def test_a_rerun_can_be_looked_at_and_made_again(tmp_path: Path):
    """As if the model had asked for the edited call from the start."""
    with opened(tmp_path) as work:
        work.write("a1", "b1", "c1")
        arguments = {"name": "b", "text": "x"}
        first = fork_run(work.run, work.call(2), turn="open", arguments=arguments)
    with opened(tmp_path, first) as work:
        work.say(None, resume=True)
        assert asked_arguments(work.call(2)) == arguments
        assert [each.text for each in work.at(2, before=True).session[Note]] == ["a1"]
        assert work.run.turns == 2
        arguments = {"name": "b", "text": "y"}
        second = fork_run(work.run, work.call(2), turn="open", arguments=arguments)
    with opened(tmp_path, second) as work:
        work.say(None, resume=True)
        assert work.notes == ("a1", "y", "c1")


def test_a_turn_that_is_asked_for_again_was_never_there(tmp_path: Path):
    with opened(tmp_path) as work:
        work.write("a1")
        work.write("b1", "c1")
        forked = fork_run(work.run, work.call(3), turn="again")
        before = work.run.turns
    with opened(tmp_path, forked) as work:
        assert work.run.turns == before - 2
        assert work.notes == ("a1",)
        seen = work.say(None, resume=True)

    assert spoken(seen)[-2:] == [("model", "Done."), ("user", "write")]


def test_the_outermost_call_of_a_nested_one_is_made_again(tmp_path: Path):
    with opened(tmp_path) as work:
        work.say("go", ("around", {"text": "1"}))
        nested = work.call(1)
        assert nested.outer is not None
        assert asked_arguments(nested) == {"text": "1"}
        forked = fork_run(work.run, nested, turn="open", arguments={"text": "2"})
    with opened(tmp_path, forked) as work:
        work.say(None, resume=True)
        assert [each.tool for each in work.run.calls()] == ["write", "around"]
        assert work.disk == {"outer": "2", "b": "2"}


def test_calls_that_ran_at_the_same_time_are_open_from_the_chosen_one_on(tmp_path: Path):
    with opened(tmp_path) as work:
        work.say("go", *(("note", {"text": text}) for text in "123"))
        forked = fork_run(work.run, work.call(2), turn="open", arguments={"text": "x"})
    with opened(tmp_path, forked) as work:
        assert work.notes == ("1",)
        seen = work.say(None, resume=True)
        assert work.notes == ("1", "x", "3")

    assert [text for role, text in spoken(seen) if role == "tool"] == [
        "Noted 1",
        "Noted x",
        "Noted 3",
    ]


def test_a_rerun_of_a_run_that_has_finished_before_has_not(tmp_path: Path):
    """The end of the first part is on record, and the last message is the model's."""
    with opened(tmp_path) as work:
        work.write("a1")
        work.write("b1")
        assert work.run.has_ended
        forked = fork_run(work.run, work.call(2), turn="open")

    assert not forked.has_ended


def test_a_call_that_no_model_asked_for_is_not_made_again(tmp_path: Path):
    with opened(tmp_path) as work:
        wink.execute_tool(
            wink.ToolCall("write", {"name": "a", "text": "1"}),
            session=work.saved.session,
            prompt=work.prompt,
        )

        with pytest.raises(LookupError, match="no model asked for"):
            fork_run(work.run, work.call(1), turn="open")


# On branches


@pytest.fixture
def work(tmp_path: Path) -> Iterator[Work]:
    about = {"kind": "run", "flags": {"policy": ["deny=x"]}}
    with opened(tmp_path, about=about, shared=True) as work:
        yield work


def test_a_rerun_has_the_files_before_the_call_and_leaves_the_directory_alone(work: Work):
    work.write("a1", "b1", "c1")

    made = rerun_call(work.calls, work.call(2), Change(arguments={"name": "x", "text": "y"}))

    with Branch.open(work.files.root, made.branch) as branch:
        assert branch.read("a") == "a1"
        assert not branch.exists("b")
    assert work.disk == {"a": "a1", "b": "b1", "c": "c1"}
    assert made.run is not None
    about = made.run.data.about
    assert (about["branch"], about["no_merge"]) == (made.branch, True)
    assert about["forked_from"] == f"{work.run.id}/2"


def test_without_arguments_and_rules_the_files_are_those_before_the_turn(work: Work):
    work.write("a1")
    work.write("b1", "c1")

    made = rerun_call(work.calls, work.call(3), Change(sections={"work": "Other."}))

    with Branch.open(work.files.root, made.branch) as branch:
        assert branch.exists("a")
        assert not branch.exists("b")


def test_rules_model_and_sections_are_known_when_the_run_is_resumed(work: Work):
    work.write("a1")
    change = Change(
        policies=["protect=src", "rules.toml"],
        model="scripted:s.json",
        sections={"work": "Other."},
    )

    made = rerun_call(work.calls, work.call(1), change, name="other")

    assert made.run is not None
    about: Any = made.run.data.about
    here = Path.cwd()
    assert about["flags"]["policy"] == ["deny=x", "protect=src", str(here / "rules.toml")]
    assert about["flags"]["model"] == about["model"] == f"scripted:{here / 's.json'}"
    assert about["sections"] == {"work": "Other."}
    assert made.branch == "other"


@pytest.mark.parametrize(
    ("change", "turn"),
    [
        (Change(), "open"),
        (Change(arguments={}), "open"),
        (Change(policies=["deny=x"]), "open"),
        (Change(policies=["deny=x"], sections={"a": "b"}), "open"),
        (Change(sections={"a": "b"}), "again"),
        (Change(model="local"), "again"),
        (Change(message="and then?"), "again"),
    ],
)
def test_the_model_is_asked_again_for_what_only_it_sees(change: Change, turn: str):
    assert change.turn == turn


@pytest.mark.parametrize("about", [{"kind": "chat"}, {"kind": "run", "dry_run": True}])
def test_calls_of_other_kinds_of_runs_are_not_made_again(tmp_path: Path, about: dict[str, object]):
    with opened(tmp_path, about=about) as work:
        work.write("a1")

        with pytest.raises(ValueError, match="cannot be rerun"):
            rerun_call(work.calls, work.call(1), Change())


def test_a_fork_that_fails_leaves_neither_a_branch_nor_a_run(work: Work):
    work.write("a1")
    Branch.create(work.files.root, "taken").close()

    with pytest.raises(FilesystemError):
        rerun_call(work.calls, work.call(1), Change(), name="taken")
    with pytest.raises(LookupError):  # this call was made by nobody
        wink.execute_tool(wink.ToolCall("look"), session=work.saved.session, prompt=work.prompt)
        rerun_call(work.calls, work.call(2), Change())

    assert [each.name for each in branches_of(work.files.root)] == ["taken"]
    assert runs_of(work.files.root) == (work.run,)


def test_a_discarded_fork_is_gone(work: Work):
    work.write("a1")

    fork_call(work.calls, work.call(1)).discard()

    assert branches_of(work.files.root) == ()
    assert runs_of(work.files.root) == (work.run,)


def test_a_turn_that_began_in_another_run_is_asked_for_there(work: Work, tmp_path: Path):
    work.write("a1", "b1")
    made = rerun_call(work.calls, work.call(2), Change(arguments={"name": "x", "text": "y"}))
    assert made.run is not None
    with opened(tmp_path, made.run, shared=True) as forked:
        forked.say(None, resume=True)

        with pytest.raises(LookupError, match=f"began in {work.run.id}/2"):
            rerun_call(forked.calls, forked.call(2), Change(message="again"))


def test_a_scripted_model_continues_at_the_right_turn(work: Work, tmp_path: Path):
    """A turn that stays counts as taken; one that is asked for again does not."""
    script = tmp_path / "script.json"
    turns = [{"call": [{"write": {"name": "a", "text": "1"}}]}, {"say": "two"}]
    script.write_text(json.dumps(turns))
    model = ScriptedAdapter.from_file(script)
    model.evaluate(work.prompt, work.saved.session, message="go")
    kept = fork_run(work.run, work.call(1), turn="open")
    again = fork_run(work.run, work.call(1), turn="again")

    assert (kept.turns, again.turns) == (1, 0)
    seen: list[ModelRequest] = []
    for run in (kept, again):
        with opened(tmp_path, run, shared=True) as forked:
            model = ScriptedAdapter.from_file(script, skip=run.turns)
            model.evaluate(forked.prompt, forked.saved.session, resume=True)
            assert model.last_request is not None
            seen.append(model.last_request)
            assert [each.tool for each in forked.run.calls()] == ["write"]
    assert spoken(seen[0].messages) == spoken(seen[1].messages)
