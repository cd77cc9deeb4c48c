"""The state at every call: files, session and conversation equal those of a model, at any time."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from run_world import Note, Tried, Work, opened, spoken, texts_of

from stored import damage_contents
from weakincentives.errors import FilesystemError, ReadOnlyView, UndoRefused
from weakincentives.filesystem import HostFilesystem
from weakincentives.runtime import ToolInvoked
from weakincentives.runtime.at import NOT_MADE
from weakincentives.runtime.calls import Calls
from weakincentives.runtime.rewind import rewind_run


@pytest.fixture
def work(tmp_path: Path) -> Iterator[Work]:
    with opened(tmp_path) as work:
        yield work


# A model of what a run does


@dataclass
class Moment:
    """What there is at one moment."""

    files: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    tried: tuple[str, ...] = ()
    records: int = 0
    talk: list[tuple[str, str]] = field(default_factory=list)

    def copy(self, **changed: Any) -> Moment:
        fields = {"files": dict(self.files), "talk": list(self.talk)}
        return Moment(**{**vars(self), **fields, **changed})


class Model:
    """The state now, and before and after each call by number."""

    def __init__(self) -> None:
        self.now = Moment()
        self.before: dict[int, Moment] = {}
        self.after: dict[int, Moment] = {}

    def say(self, message: str, wanted: list[tuple[str, dict[str, Any]]]) -> None:
        now = self.now
        now.talk.append(("user", message))
        silent, said = list(now.talk), [*now.talk, ("model", "")]
        for place, (tool, arguments) in enumerate(wanted):
            before = now.copy(talk=list(said) if place else silent)
            answer = self.apply(now, tool, arguments)
            said.append(("tool", answer))
            nested = tool == "around"
            now.records += 1 + nested
            numbers = [now.records - 1, now.records] if nested else [now.records]
            for number in numbers:
                self.before[number], self.after[number] = before, now.copy(talk=list(said))
        now.talk = [*(said if wanted else silent), ("model", "Done.")]

    def apply(self, now: Moment, tool: str, given: dict[str, Any]) -> str:
        text, name = given.get("text", ""), given.get("name", "")
        if tool == "write":
            now.files[name] = text
        elif tool == "note":
            now.files[f"notes/{text}"] = text
        elif tool == "around":
            now.files |= {"outer": text, "b": text}
        elif tool == "delete":
            now.files.pop(name, None)
        elif tool == "move" and name in now.files and name != given["to"]:
            now.files[given["to"]] = now.files.pop(name)
        if tool in ("write", "around", "fail"):
            now.tried += (text,)
        if tool in ("write", "around", "note"):
            now.notes += (text,)
        verbs = {"write": f"Wrote {name}", "note": f"Noted {text}", "delete": f"Deleted {name}"}
        others = {"move": f"Moved {name}", "look": "Looked", "around": f"Around {text}"}
        return {**verbs, **others, "fail": f"Failed {text}"}[tool]

    def rewind(self, number: int, before: bool, siblings: int) -> None:
        target = (self.before if before else self.after)[number]
        start = self.now.copy()
        self.now = target.copy(tried=start.tried, records=start.records + 1)
        if target.talk and target.talk[-1][0] == "tool":
            self.now.talk += [("tool", NOT_MADE)] * siblings
        self.before[start.records + 1], self.after[start.records + 1] = start, self.now.copy()


def is_at(work: Work, number: int, before: bool, expected: Moment) -> None:
    state = work.at(number, before=before)
    assert texts_of(state.files) == expected.files
    assert tuple(each.text for each in state.session[Note]) == expected.notes
    assert tuple(each.text for each in state.session[Tried]) == expected.tried
    assert len(state.session[ToolInvoked]) == expected.records
    said = [(role, "" if text.startswith("Failed") else text) for role, text in expected.talk]
    found = spoken(state.conversation)
    assert [(r, "" if t.startswith("Failed") else t) for r, t in found] == said


_TEXT = st.sampled_from(["1", "2", "3"])
_NAME = st.sampled_from(["a", "b", "c/d"])
_CALL = st.one_of(
    st.tuples(st.just("write"), st.fixed_dictionaries({"name": _NAME, "text": _TEXT})),
    st.tuples(st.just("note"), st.fixed_dictionaries({"text": _TEXT})),
    st.tuples(st.just("delete"), st.fixed_dictionaries({"name": _NAME})),
    st.tuples(st.just("move"), st.fixed_dictionaries({"name": _NAME, "to": _NAME})),
    st.tuples(st.just("fail"), st.fixed_dictionaries({"text": _TEXT})),
    st.tuples(st.just("around"), st.fixed_dictionaries({"text": _TEXT})),
    st.tuples(st.just("look"), st.just({})),
)
_STEP = st.one_of(
    st.lists(_CALL, max_size=5),
    st.lists(_CALL, max_size=5),
    st.tuples(st.integers(1, 12), st.booleans()),  # rewind
    st.integers(1, 12),  # undo the files of this call
    st.just("reopen"),
)


@settings(max_examples=500 if os.environ.get("WINK_HEAVY") else 25, deadline=None)
@given(st.lists(_STEP, max_size=7))
def test_the_state_at_every_call_equals_a_model(steps: list[Any]):
    model = Model()
    turns: dict[int, int] = {}  # by number, how many calls of its turn come after it
    with TemporaryDirectory() as folder:
        rest, done = iter([*steps, "reopen"]), False
        while not done:
            with opened(Path(folder)) as work:
                for step in rest:
                    if step == "reopen":
                        break
                    perform(work, model, turns, step)
                    assert work.disk == model.now.files
                    assert tuple(n.text for n in work.saved.session[Note]) == model.now.notes
                else:
                    done = True
        with opened(Path(folder)) as work:
            for number in model.after:
                is_at(work, number, True, model.before[number])
                is_at(work, number, False, model.after[number])


def perform(work: Work, model: Model, turns: dict[int, int], step: Any) -> None:
    if isinstance(step, list):
        message, first = f"message {len(model.after)}", model.now.records
        work.say(message, *step)
        model.say(message, step)
        number = first
        for place, (tool, _) in enumerate(step):
            for _ in range(1 + (tool == "around")):
                number += 1
                turns[number] = len(step) - place - 1
    elif isinstance(step, tuple):
        number, before = step
        if number in model.after:
            siblings = turns.get(number, -1) + before if number in turns else 0
            rewind_run(work.saved, work.files, number, before=before)
            model.rewind(number, before, siblings)
    elif step in model.after:
        committed = work.call(step).committed
        if committed is not None and committed.call_id in {
            each.call_id for each in work.files.history()
        }:
            try:
                work.files.undo(committed)
            except UndoRefused:
                return
            model.now.files = work.disk


# Looking


def test_looking_changes_nothing_and_what_it_returns_cannot_be_changed(work: Work):
    work.write("a1", "b1")
    work.write("a2")
    state = work.at(1)

    with pytest.raises(ReadOnlyView):
        state.files.write("a", "x")
    with pytest.raises(ReadOnlyView):
        state.session.dispatch(Note("x"))

    assert (texts_of(state.files), work.disk) == ({"a": "a1"}, {"a": "a2", "b": "b1"})


def test_two_moments_are_compared_in_both_directions(work: Work):
    work.write("a1", "b1", "a2")

    first, last = work.at(1).files, work.at(3).files

    assert [each.path for each in first.diff(last)] == ["a", "b"]
    assert "-a1" in first.diff(last)[0].text
    assert "+a1" in last.diff(first)[0].text
    assert first.diff(work.at(1).files) == ()


def test_a_call_that_changed_no_files_has_its_place_among_those_of_other_runs(tmp_path: Path):
    with opened(tmp_path) as one:
        one.say("look", ("look", {}))
    with opened(tmp_path, new=True) as two:
        two.write("a1")
    with opened(tmp_path, one.run) as one:
        one.say("look again", ("look", {}))
    with opened(tmp_path, new=True) as three:
        three.write("a2")
    with opened(tmp_path, one.run) as one:
        assert texts_of(one.at(1).files) == {}
        assert texts_of(one.at(2, before=True).files) == texts_of(one.at(2).files) == {"a": "a1"}


def test_a_nested_call_has_the_state_of_the_call_around_it(work: Work):
    work.write("a1")
    work.say("nested", ("around", {"text": "n"}))

    for number in (2, 3):
        assert texts_of(work.at(number, before=True).files) == {"a": "a1"}
        assert texts_of(work.at(number).files) == {"a": "a1", "b": "n", "outer": "n"}
        assert [each.text for each in work.at(number).session[Note]] == ["a1", "n"]


def test_a_change_outside_of_runs_has_files_and_an_empty_session(work: Work):
    work.files.write("direct", "d")
    work.files.write("direct", "e")
    (first,) = (each for each in work.calls.changed() if each.call_id == "direct_1")

    state = work.calls.at(first)

    assert texts_of(state.files) == {"direct": "d"}
    assert (state.session[Note].all(), state.conversation) == ((), ())


def test_what_the_history_has_forgotten_is_refused(tmp_path: Path):
    root = tmp_path / "project"
    root.mkdir()
    with HostFilesystem(root, history_limit=2) as files:
        for text in ("1", "2", "3"):
            files.write("a", text)
        calls = Calls(root)
        oldest = calls.changed()[0]

        with pytest.raises(LookupError, match="no longer"):
            calls.history.files_at(oldest.committed.serial - 2)  # pyright: ignore


def test_what_was_done_to_the_session_between_calls_belongs_to_neither(work: Work):
    work.write("a1")
    work.saved.session[Note].append(Note("by the program"))
    work.write("b1")

    notes = [each.text for each in work.at(2, before=True).session[Note]]

    assert [each.text for each in work.at(1).session[Note]] == ["a1"]
    assert notes == ["a1", "by the program"]


# Exporting


def test_an_export_has_exactly_the_files_of_then(work: Work, tmp_path: Path):
    root = work.files.root
    (root / "empty").mkdir()
    (root / "link").symlink_to("nowhere")
    (root / "run.sh").write_text("#!/bin/sh\n")
    (root / "run.sh").chmod(0o751)
    os.link(root / "run.sh", root / "same.sh")
    odd = os.fsencode(root) + b"/odd\n\xff"
    with open(odd, "wb") as file:
        file.write(b"\xff\0")
    os.utime(root / "run.sh", ns=(10**18, 10**18 + 7))
    work.write("a1", "b1")
    kept = (root / "b").stat().st_mtime_ns
    work.say("remove", ("delete", {"name": "b"}), ("write", {"name": "a", "text": "a2"}))

    work.at(2).files.export(tmp_path / "then")

    then = tmp_path / "then"
    assert ((then / "a").read_text(), (then / "b").read_text()) == ("a1", "b1")
    assert (then / "b").stat().st_mtime_ns == kept
    assert list((then / "empty").iterdir()) == []
    assert os.readlink(then / "link") == "nowhere"
    copied = (then / "run.sh").stat()
    assert (stat.S_IMODE(copied.st_mode), copied.st_mtime_ns) == (0o751, 10**18 + 7)
    assert copied.st_ino == (then / "same.sh").stat().st_ino
    with open(os.fsencode(then) + b"/odd\n\xff", "rb") as file:
        assert file.read() == b"\xff\0"
    assert sorted(os.listdir(os.fsencode(then))) == sorted(
        [b"a", b"b", b"empty", b"link", b"run.sh", b"same.sh", b"odd\n\xff"]
    )


def test_an_export_keeps_extended_attributes(work: Work, tmp_path: Path):
    work.write("a1", "b1")
    try:
        os.setxattr(work.files.root / "a", "user.note", b"mine")
    except OSError:
        pytest.skip("no extended attributes here")
    work.at(2).files.export(tmp_path / "then")

    assert os.getxattr(tmp_path / "then/a", "user.note") == b"mine"


def test_an_export_fills_an_empty_directory_and_refuses_any_other(work: Work, tmp_path: Path):
    work.write("a1")
    files = work.at(1).files
    (tmp_path / "empty").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine").write_text("mine")

    files.export(tmp_path / "empty")
    with pytest.raises(FilesystemError, match="not empty"):
        files.export(tmp_path / "full")
    with pytest.raises(FilesystemError, match="in the workspace"):
        files.export(work.files.root / "here")

    assert [each.name for each in (tmp_path / "empty").iterdir()] == ["a"]
    assert [each.name for each in (tmp_path / "full").iterdir()] == ["mine"]
    assert sorted(each.name for each in work.files.root.iterdir()) == ["a"]


def test_an_export_that_fails_leaves_nothing(work: Work, tmp_path: Path):
    work.write("a1", "a2")
    files = work.at(1).files
    damage_contents(work.files.store)

    with pytest.raises(Exception, match="damaged"):
        files.export(tmp_path / "out" / "then")

    assert list((tmp_path / "out").iterdir()) == []
