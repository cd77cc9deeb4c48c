"""The views have every file and value at every call, exactly, whatever happened to the run."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from page import Page, blame, paths_at, text_at, texts_of, value_at
from run_world import TYPES, Note, Work, opened
from run_world import texts_of as texts_of_files

import weakincentives as wink
from weakincentives.debugger import Views
from weakincentives.debugger.records import NotFound
from weakincentives.filesystem import Branch, HostFilesystem
from weakincentives.filesystem.branches import drop_branch
from weakincentives.runtime import SavedSession, ToolRegistry
from weakincentives.runtime.calls import Run, begin_run, open_run
from weakincentives.runtime.forks import fork_run
from weakincentives.runtime.rewind import rewind_run
from weakincentives.serde.exact import freeze, plain

NOTES = "run_world:Note"


@pytest.fixture
def work(tmp_path: Path) -> Iterator[Work]:
    with opened(tmp_path) as work:
        yield work


def page_of(work: Work, run_id: str | None = None) -> Page:
    return Page(Views(work.files.root), run_id or work.run.id)


def mixed(work: Work) -> None:
    """Let a run write, move, delete, fail, nest and take notes at the same time."""
    (work.files.root / "old").write_text("from before\n")
    work.write("a1", "b1", "a2")
    work.say(
        "move",
        ("move", {"name": "a", "to": "dir/c"}),
        ("fail", {"text": "x"}),
        ("delete", {"name": "b"}),
        ("around", {"text": "nested"}),
    )
    work.say("notes", *(("note", {"text": text}) for text in "pqr"))
    work.say("look", ("look", {}), ("write", {"name": "dir/c", "text": "c2\nmore\n"}))


# The same as the library says


def test_the_page_derives_the_files_at_every_call(work: Work) -> None:
    """Base, commits and versions give the same files as ``Calls.at``, before and after a call."""
    mixed(work)
    page = page_of(work)

    for row in page()["calls"]:
        for before in (True, False):
            expected = texts_of_files(work.at(row["n"], before=before).files)
            assert page.world(row["n"], before=before) == expected
            serial = row["before" if before else "after"]
            for path, text in expected.items():
                shown = page("file", serial=serial, path=path)
                assert (shown["exists"], shown["text"]) == (True, text)


def test_the_page_derives_the_values_of_slices_at_every_call(work: Work) -> None:
    mixed(work)
    page = page_of(work)
    history = page("slices", key=NOTES)

    for row in page()["calls"]:
        for before in (True, False):
            session = work.at(row["n"], before=before).session
            expected = [plain(freeze(each)) for each in session[Note].all()]
            assert value_at(history, row["nestedIn"] or row["n"], before=before) == expected


def test_a_call_shows_the_slices_that_it_changed(work: Work) -> None:
    work.write("a1", "b2")

    call = page_of(work)("calls/2")

    changed = {each["name"]: each for each in call["state"]}
    assert call["slices"] == list(changed)
    assert changed["Note"]["before"] == [{"text": "a1"}]
    assert changed["Note"]["after"] == [{"text": "a1"}, {"text": "b2"}]
    assert changed["Tried"] == {
        "name": "Tried", "key": "run_world:Tried", "log": True,
        "before": [], "after": [{"text": "b2"}],
    }  # fmt: skip


def test_a_rewind_shows_the_values_that_it_restored(work: Work) -> None:
    work.write("a1", "b2")
    rewind_run(work.saved, work.files, 1)

    page = page_of(work)

    assert page()["calls"][-1]["tool"] == "wink rewind"
    (changed,) = [each for each in page("calls/3")["state"] if each["name"] == "Note"]
    assert (changed["before"], changed["after"]) == (
        [{"text": "a1"}, {"text": "b2"}],
        [{"text": "a1"}],
    )
    assert value_at(page("slices", key=NOTES), 3) == [{"text": "a1"}]


@settings(max_examples=15)
@given(st.data())
def test_places_are_those_of_the_library(data: st.DataObject) -> None:
    """Whoever else works on the directory: other runs, people, undone calls."""
    with TemporaryDirectory() as place, opened(Path(place)) as work:
        for number in range(data.draw(st.integers(1, 6))):
            what = data.draw(st.sampled_from(["write", "look", "fail", "person", "other", "undo"]))
            match what:
                case "write":
                    work.write(f"a{number}", f"b{number}")
                case "look":
                    work.say("look", ("look", {}))
                case "fail":
                    work.say("fail", ("fail", {"text": "x"}))
                case "person":
                    (work.files.root / "p").write_text(str(number))
                case "other":
                    with open_run(work.files, f"run {number}") as run:
                        tools = ToolRegistry([], workspace=work.files, session=run.session)
                        tools.execute(run_world_tool("write"), {"name": "o", "text": str(number)})
                case _:
                    history = work.files.history()
                    if history and not history[-1].undoes:
                        work.files.undo(history[-1].call_id, force=True)
        page = page_of(work)
        calls = work.calls
        for call in calls.of_run(work.run):
            row = page.views.call(work.run.id, call.number)
            assert row["outcome"] == call.outcome
            assert row["before"] == calls.place_of(call, before=True)[1]
            assert row["after"] == calls.place_of(call)[1]


def run_world_tool(name: str) -> Any:
    import run_world

    return getattr(run_world, name)


# Versions

TEXTS = st.one_of(
    st.just(b""),
    st.lists(st.sampled_from(["a", "b", "same", "", "é"]), max_size=8).flatmap(
        lambda lines: st.sampled_from(["\n", "\r\n"]).flatmap(
            lambda end: st.sampled_from([end, ""]).map(
                lambda last: (end.join(lines) + last).encode()
            )
        )
    ),
    st.just(b"\0binary"),
    st.just(b"\xff not UTF-8"),
)
NAMES = st.sampled_from(["a", "b", "dir/c", "dir/d", "other/c"])
STEPS = st.one_of(
    st.tuples(st.just("write"), NAMES, TEXTS),
    # Not below directories that are moved: nobody knows when it came there.
    st.tuples(st.just("person"), st.sampled_from(["a", "b"]), TEXTS),
    st.tuples(st.just("delete"), NAMES, st.none()),
    st.tuples(st.just("move"), NAMES, NAMES),
    st.tuples(st.just("move"), st.just("dir"), st.just("other/dir")),
    st.tuples(st.just("move"), st.just("other"), st.just("dir")),
    st.tuples(st.just("delete"), st.just("dir"), st.none()),
)


def do(files: HostFilesystem, step: tuple[str, str, Any]) -> None:
    what, name, more = step
    if what == "write" and not (files.exists(name) and files.stat(name).kind == "directory"):
        files.write_bytes(name, more)
    elif what == "delete" and files.exists(name):
        files.delete(name, recursive=True)
    elif what == "move" and files.exists(name) and not f"{more}/".startswith(f"{name}/"):
        files.move(name, more, overwrite=True)


def as_text(data: bytes | None) -> str | None:
    try:
        return None if data is None or b"\0" in data else data.decode()
    except UnicodeDecodeError:
        return None


@settings(max_examples=max(15, settings.default.max_examples * 6 // 10))
@given(
    st.dictionaries(st.sampled_from(["a", "dir/c", "other/x"]), TEXTS, max_size=3),
    st.lists(STEPS, max_size=8),
    st.booleans(),
)
def test_versions_reproduce_every_text_exactly(
    first: dict[str, bytes], steps: list[Any], on_branch: bool
) -> None:
    """Whatever the line ends; across deletions, moves of files and directories, edits by people."""
    with TemporaryDirectory() as place:
        root = Path(place, "project")
        root.mkdir()
        for name, data in first.items():
            (root / name).parent.mkdir(exist_ok=True)
            (root / name).write_bytes(data)
        with HostFilesystem(root) as main:
            opened_files = Branch.create(root, "work") if on_branch else main
            with opened_files as files:
                about = {"branch": "work"} if on_branch else {}
                with begin_run(main.store, {"kind": "hosted", **about}) as saved:
                    left = made_changes(files, saved, root, steps, on_branch)
                    page = Page(Views(root), saved.path.stem)
                    check(page, left)


def made_changes(
    files: Any, saved: SavedSession, root: Path, steps: list[Any], on_branch: bool
) -> list[dict[str, bytes]]:
    """Make each change in a call of its own; return the files that each call left."""

    @wink.tool(reach="reversible")
    def change(number: int, *, context: wink.ToolContext) -> str:
        """Change a file."""
        do(context.filesystem, steps[number])  # type: ignore[arg-type]
        return "Changed"

    def now() -> dict[str, bytes]:
        return {path: files.read_bytes(path) for path in files.glob("**/*")}

    tools = ToolRegistry([change], workspace=files, session=saved.session)
    left = [now()]
    for number, step in enumerate(steps):
        if step[0] == "person":
            path = root / step[1]
            blocked = any(each.is_file() for each in path.parents)
            if not on_branch and not path.is_dir() and not blocked:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(step[2])
            continue
        before = now()
        tools.execute("change", {"number": number})
        after, state = now(), dict(left[-1])
        for path in {*before, *after}:
            if before.get(path) == after.get(path):
                continue
            state.pop(path, None)
            if path in after:
                state[path] = after[path]
        left.append(state)
    return left


def check(page: Page, left: list[dict[str, bytes]]) -> None:
    view, tree = page(), page("tree")
    assert len(view["calls"]) == len(left) - 1
    for row, state in zip(view["calls"], left[1:], strict=True):
        # When a person wrote what no call had changed yet is not known.
        files = [
            f for each in view["commits"] if each["serial"] <= row["after"] for f in each["files"]
        ]
        touched = {path for path, _, _ in files} | {origin for _, _, origin in files if origin}
        assert paths_at(tree, view["commits"], row["after"]) & touched == state.keys() & touched
        for path in state.keys() & touched:
            shown = page("file", serial=row["after"], path=path)
            assert shown["text"] == as_text(state[path])
            versions = page("versions", path=path)
            assert text_at(versions, row["after"]) == as_text(state[path])


def test_every_line_is_blamed_on_the_call_that_wrote_it(work: Work) -> None:
    """Across a move, and with an edit by a person in between, which no call is blamed for."""
    (work.files.root / "a").write_text("old 1\nold 2\n")
    work.say("1", ("write", {"name": "a", "text": "old 1\nfirst\nold 2\n"}))
    work.say("2", ("move", {"name": "a", "to": "b"}))
    (work.files.root / "b").write_text("old 1\nfirst\nold 2\nby hand\n")
    work.say("3", ("write", {"name": "b", "text": "old 1\nfirst\nlast\nby hand\n"}))

    versions = page_of(work)("versions", path="b")

    by = [step and (step["call"], step["name"]) for step in blame(versions)]
    mark = work.run.mark
    assert by == [None, (1, f"{mark}/1"), (3, f"{mark}/3"), (None, "outside wink")]


def test_a_file_that_was_deleted_and_written_again_has_both_lives(work: Work) -> None:
    work.write("a1")
    work.say("delete", ("delete", {"name": "a"}))
    work.write("a2")

    versions = page_of(work)("versions", path="a")

    assert [text for _, text, _ in texts_of(versions)] == [None, "a1", None, "a2"]


# Calls


def test_a_call_shows_what_happened(work: Work) -> None:
    work.say("go", ("write", {"name": "a", "text": "one\n"}))

    call = page_of(work)("calls/1")

    assert call["outcome"] == "committed"
    assert call["arguments"] == {"name": "a", "text": "one\n"}
    assert call["result"] == "Wrote a"
    assert call["canUndo"] is True
    (change,) = call["changes"]
    assert (change["path"], change["kind"], change["added"]) == ("a", "added", 1)
    assert change["patch"].endswith("@@ -0,0 +1 @@\n+one\n")


def test_wrong_arguments_are_shown_in_place(work: Work) -> None:
    work.say("go", ("write", {"name": 7}))

    call = page_of(work)("calls/1")

    assert call["outcome"] == "refused"
    assert call["arguments"] == {"name": 7}
    assert call["problems"].keys() == {"name", "text"}


def test_a_failed_call_shows_what_was_undone(work: Work) -> None:
    work.say("go", ("fail", {"text": "x"}))

    call = page_of(work)("calls/1")

    assert (call["outcome"], call["error"]) == ("rolled back", "Failed x")
    assert call["failure"]["message"] == "Failed x"
    assert "session" in call["undone"]
    assert call["changes"] == []
    assert [each["name"] for each in call["state"]] == ["Tried"]  # a LOG keeps what was tried


def test_a_denied_call_names_the_policy(tmp_path: Path) -> None:
    class Never:
        name = "never"

        def check(self, tool: Any, params: Any, *, context: Any) -> Any:
            return wink.PolicyDecision.deny("Never")

        def on_result(self, *given: Any, **options: Any) -> None: ...

    with opened(tmp_path) as work, begin_run(work.files.store, {"kind": "hosted"}) as saved:
        write = run_world_tool("write")
        tools = ToolRegistry(
            [write], workspace=work.files, session=saved.session, policies=[Never()]
        )
        tools.execute("write", {"name": "a", "text": "x"})
        call = page_of(work, saved.path.stem)("calls/1")

    assert call["outcome"] == "denied"
    assert call["policies"][-1] == {"name": "never", "answer": "denied", "note": ""}


def test_nested_calls_belong_to_the_call_around_them(work: Work) -> None:
    work.say("go", ("around", {"text": "x"}))

    page = page_of(work)
    inner, outer = page()["calls"]

    assert (inner["tool"], inner["nestedIn"], inner["files"]) == ("write", outer["n"], 0)
    assert (outer["nestedIn"], outer["files"]) == (None, 2)
    assert inner["turn"] == outer["turn"] == 1
    assert (inner["before"], inner["after"]) == (outer["before"], outer["after"])


def test_concurrent_calls_are_in_different_lanes(tmp_path: Path) -> None:
    together = threading.Barrier(2, timeout=60)

    @wink.tool(reach="read", concurrent=True)
    def meet(*, context: wink.ToolContext) -> str:
        """Wait for the other call."""
        together.wait()
        time.sleep(0.01)  # longer than two clocks may differ
        return "Met"

    with opened(tmp_path) as work, begin_run(work.files.store, {"kind": "hosted"}) as saved:
        tools = ToolRegistry([meet], workspace=work.files, session=saved.session)
        tools.execute_tools([("meet", {}), ("meet", {})])
        tools.execute_tools([("meet", {}), ("meet", {})])
        rows = page_of(work, saved.path.stem)()["calls"]

    assert [sorted(row["lane"] for row in rows[n : n + 2]) for n in (0, 2)] == [[0, 1], [0, 1]]


def test_turns_have_the_text_of_user_and_model(work: Work) -> None:
    work.say("Please write", ("write", {"name": "a", "text": "x"}), ("look", {}))

    turns = page_of(work)()["turns"]

    assert [(turn["user"], turn["text"], turn["calls"]) for turn in turns] == [
        ("Please write", "", [1, 2]),
        ("", "Done.", []),
    ]


def test_prompts_are_shown_as_they_were_rendered(work: Work) -> None:
    work.write("a1")

    (prompt,) = page_of(work)("prompts")["prompts"]

    assert "Work" in prompt["text"]
    assert prompt["turn"] == 1
    assert [each["path"] for each in prompt["sections"]] == ["work"]
    assert prompt["text"].endswith(prompt["sections"][0]["text"])
    assert set(prompt["tools"]) >= {"write", "look"}


def test_only_what_is_new_is_sent_again(work: Work) -> None:
    work.write("a1", "b1")
    page = page_of(work)
    before = page()
    work.write("c1")

    news = page(after=2)

    assert [row["n"] for row in before["calls"]] == [1, 2]
    assert [row["n"] for row in news["calls"]] == [3]
    assert [turn["calls"] for turn in news["turns"]] == [[], [3], []]
    assert [commit["call"] for commit in news["commits"]] == [3]
    whole = page()
    assert whole["calls"] == before["calls"] + news["calls"]
    assert whole["commits"] == before["commits"] + news["commits"]


def test_what_the_server_keeps_encoded_follows_every_change(tmp_path: Path) -> None:
    with opened(tmp_path) as work:
        views, path = Views(work.files.root), f"runs/{work.run.id}"

        def check() -> None:
            fresh = Views(work.files.root).get(path)
            assert json.loads(views.get_json(path)) == fresh
            assert views.get(path) == fresh

        work.write("a1", "b1")
        check()
        work.say("only words")
        check()
        work.files.undo(work.call(1).call_id)
        check()
        work.files.write("direct", "by the library")
        work.write("c1")
        check()
    check()  # it is closed: its file is as before


# Other runs, branches, people


def test_commits_of_others_have_their_names(work: Work) -> None:
    work.write("a1")
    with open_run(work.files, "another") as other:
        tools = ToolRegistry([], workspace=work.files, session=other.session)
        tools.execute(run_world_tool("write"), {"name": "b", "text": "other"})
        work.files.write("direct", "by the library")
        work.write("a2")
        commits = page_of(work)()["commits"]

    mark = work.run.mark
    assert [(each["name"], each["call"]) for each in commits] == [
        (f"{mark}/1", 1),
        (f"{other.mark}/1", None),
        ("direct_3", None),
        (f"{mark}/2", 2),
    ]


def test_an_undone_call_is_shown_as_undone(work: Work) -> None:
    work.write("a1", "b1")
    work.files.undo(work.call(1).call_id)

    page = page_of(work)

    assert [row["outcome"] for row in page()["calls"]] == ["undone", "committed"]
    assert page("calls/1")["canUndo"] is False
    assert page.world(2) == {"a": "a1", "b": "b1"}


def test_a_run_on_a_branch_has_the_files_of_the_branch(work: Work) -> None:
    (work.files.root / "a").write_text("main\n")
    with Branch.create(work.files.root, "try") as branch:
        about = {"kind": "hosted", "branch": "try"}
        with begin_run(work.files.store, about) as saved:
            tools = ToolRegistry([], workspace=branch, session=saved.session)
            write = run_world_tool("write")
            tools.execute(write, {"name": "a", "text": "main\nbranch\n"})
            tools.execute(write, {"name": "new", "text": "new\n"})
            page = page_of(work, saved.path.stem)
            worlds = page.world(1), page.world(2)
            (summary,) = page.views.get("workspace")["branches"]

    assert worlds[0] == {"a": "main\nbranch\n"}
    assert worlds[1] == {"a": "main\nbranch\n", "new": "new\n"}
    assert page("versions", path="a")["steps"][0]["edits"] == [[1, 0, ["branch\n"]]]
    assert (summary["name"], summary["run"], summary["commits"]) == ("try", saved.path.stem, 2)
    assert (work.files.root / "a").read_text() == "main\n"


@pytest.mark.parametrize("is_open", [False, True], ids=["closed", "open"])
def test_a_run_whose_branch_is_gone_says_so(work: Work, is_open: bool) -> None:
    with (
        Branch.create(work.files.root, "try") as branch,
        begin_run(work.files.store, {"kind": "hosted", "branch": "try"}) as saved,
    ):
        tools = ToolRegistry([], workspace=branch, session=saved.session)
        tools.execute(run_world_tool("write"), {"name": "a", "text": "x"})
    page = page_of(work, saved.path.stem)
    if is_open:
        assert page()["note"] == ""
    drop_branch(work.files.root, "try")

    view = page()

    assert "branch try, which is gone" in view["note"]
    assert [(row["before"], row["after"]) for row in view["calls"]] == [(-1, -1)]


def test_a_forked_run_shows_its_own_calls_and_what_it_inherited(work: Work) -> None:
    work.write("a1")
    work.write("a2")
    forked = fork_run(work.run, work.call(1))

    with SavedSession.open(forked.path, types=TYPES) as saved:
        tools = ToolRegistry([], workspace=work.files, session=saved.session)
        tools.execute(run_world_tool("write"), {"name": "b", "text": "b1"})
        page = page_of(work, forked.id)
        view = page()

    assert view["run"]["forkedFrom"] == f"{work.run.id}/1"
    assert [row["n"] for row in view["calls"]] == [2]
    assert value_at(page("slices", key=NOTES), 2, before=True) == [{"text": "a1"}]


def test_a_dry_run_is_marked(tmp_path: Path) -> None:
    with opened(tmp_path) as work, begin_run(work.files.store, {"dry_run": True}) as saved:
        tools = ToolRegistry([], workspace=work.files.fork(), session=saved.session)
        tools.execute(run_world_tool("look"), {})
        page = page_of(work, saved.path.stem)
        view = page()

    assert view["run"]["dry"] is True
    assert [row["outcome"] for row in view["calls"]] == ["dry run"]


def test_two_calls_are_compared(work: Work) -> None:
    work.write("a1", "b1")
    work.say("change", ("write", {"name": "a", "text": "a2"}), ("delete", {"name": "b"}))
    page, run = page_of(work), work.run.id

    found = page.views.get("compare", {"a": f"{run}/2", "b": f"{run}/4"})

    assert found["files"] == [("a", "differs"), ("b", "only a")]
    (notes,) = [each for each in found["slices"] if each["key"] == NOTES]
    assert (len(notes["a"]), len(notes["b"])) == (2, 3)
    same = page.views.get("compare", {"a": f"{run}/1", "b": f"{run}/2", "before_b": "1"})
    assert same == {"files": [], "slices": [], "truncated": False}


def test_a_branch_is_compared_with_the_directory(work: Work) -> None:
    work.write("a1", "b1")
    with (
        Branch.create(work.files.root, "try") as branch,
        begin_run(work.files.store, {"kind": "hosted", "branch": "try"}) as saved,
    ):
        tools = ToolRegistry([], workspace=branch, session=saved.session)
        tools.execute(run_world_tool("write"), {"name": "b", "text": "b2"})
        work.write("c1")
        pair = {"a": f"{work.run.id}/3", "b": f"{saved.path.stem}/1"}
        found = Views(work.files.root).get("compare", pair)

    assert found["files"] == [("b", "differs"), ("c", "only a")]


# A run in progress, and damage


def test_a_run_is_running_until_it_is_closed(tmp_path: Path) -> None:
    with opened(tmp_path) as work:
        work.write("a1")
        views = Views(work.files.root)
        (during,) = views.get("workspace")["runs"]
    (after,) = views.get("workspace")["runs"]

    assert (during["state"], after["state"]) == ("running", "finished")
    assert (during["turns"], during["calls"]) == (2, 1)


def test_a_run_that_has_ended_says_what_it_came_to(tmp_path: Path) -> None:
    with opened(tmp_path) as work:
        (work.files.root / "old").write_text("from before\n")
        work.write("a1", "b1", "a2")
        work.say("change", ("write", {"name": "old", "text": "now"}))
        work.say("end", ("delete", {"name": "b"}), ("fail", {"text": "x"}))
        views = Views(work.files.root)
        (during,) = views.get("workspace")["runs"]
    (after,) = views.get("workspace")["runs"]

    assert during["result"] is None
    assert after["result"] == {
        "files": {"added": 1, "changed": 1},  # b came and went
        "outcomes": {"rolled back": 1},
        "exit": None,
    }


def test_a_line_that_is_being_written_is_left_out(work: Work) -> None:
    work.write("a1", "b1")
    whole = work.saved.path.read_bytes()
    page = page_of(work)
    *_, last = whole.rstrip(b"\n").split(b"\n")
    cut = whole[: -len(last) // 2]
    work.saved.path.write_bytes(cut)

    assert page()["run"]["damage"] is None
    work.saved.path.write_bytes(whole)
    assert [row["n"] for row in page()["calls"]] == [1, 2]


def test_a_damaged_run_is_shown_up_to_the_damage(work: Work) -> None:
    work.write("a1")
    size = work.saved.path.stat().st_size
    work.write("b1")
    data = bytearray(work.saved.path.read_bytes())
    data[size + 100] ^= 1
    work.saved.path.write_bytes(data)

    page = page_of(work)
    view = page()

    assert [row["n"] for row in view["calls"]] == [1]
    assert "is damaged or not ours" in view["run"]["damage"]
    assert page("calls/1")["result"] == "Wrote a"
    (listed,) = page.views.get("workspace")["runs"]
    assert listed["damage"] == view["run"]["damage"]


def test_a_file_that_is_no_run_is_listed_with_the_reason(work: Work) -> None:
    (work.files.store / "runs" / "20260101-000000-abc.jsonl").write_text("nonsense\n")

    listed = {run["mark"]: run for run in Views(work.files.root).get("workspace")["runs"]}

    assert "does not carry your seal" in listed["abc"]["damage"]


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_what_someone_has_planted_as_a_run_is_not_read(work: Work, kind: str) -> None:
    planted = work.files.store / "runs" / "20260101-000000-abc.jsonl"
    if kind == "link":
        planted.symlink_to("/dev/zero")  # it never ends
    else:
        os.mkfifo(planted)  # nobody ever writes to it

    listed = {run["mark"]: run for run in Views(work.files.root).get("workspace")["runs"]}

    assert listed["abc"]["damage"]


def test_a_message_that_only_begins_like_json_is_shown(tmp_path: Path) -> None:
    deep = '{"details": ' + "[" * 5_000

    @wink.tool(reach="reversible")
    def refuse(*, context: wink.ToolContext) -> str:
        """Say something odd."""
        raise ValueError(deep)

    with open_run(tmp_path) as saved:
        with ToolRegistry([refuse], workspace=tmp_path, session=saved.session) as tools:
            tools.execute("refuse", {})
        call = Views(tmp_path).call(Run(saved.path).id, 1)

    assert (call["message"], call["problems"]) == (deep, {})


def test_a_history_that_was_trimmed_is_not_made_up(tmp_path: Path) -> None:
    from weakincentives.filesystem.store import Limits

    with opened(tmp_path) as work:
        work.write("a1", "a2", "a3", "a4")
        work.files.prune(Limits(count=2, newest=1))
        page = page_of(work)
        view = page()

    assert "no longer goes back" in view["note"]
    assert [(row["before"], row["after"]) for row in view["calls"]] == [
        (-1, -1), (-1, -1), (2, 3), (3, 4),
    ]  # fmt: skip
    assert page.world(3) == {"a": "a3"}


# Hostile names and paths


@pytest.mark.parametrize(
    "path", ["../secret", "/etc/passwd", "a/../../b", "a//b", "", "./a", "a\0"]
)
def test_paths_lead_nowhere_else(work: Work, path: str) -> None:
    work.write("a1")
    page = page_of(work)

    for name in ("file", "versions"):
        with pytest.raises(ValueError, match="path"):
            page(name, serial=1, path=path)


def test_links_are_not_followed(work: Work, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    (work.files.root / "link").symlink_to(tmp_path / "secret")
    (work.files.root / "up").symlink_to(tmp_path)
    work.write("a1")
    page = page_of(work)

    assert page("file", serial=1, path="link")["text"] is None
    assert page("file", serial=1, path="up/secret")["exists"] is False


@pytest.mark.parametrize("name", ["<script>alert(1)</script>", "new\nline", '"quoted"&', "é\u2028"])
def test_hostile_names_are_data(work: Work, name: str) -> None:
    work.say("go", ("write", {"name": name.replace("/", "_"), "text": "x"}))
    name = name.replace("/", "_")
    page = page_of(work)

    assert page.world(1) == {name: "x"}
    assert page("calls/1")["changes"][0]["path"] == name


def test_names_that_are_not_utf_8_can_be_asked_for(work: Work) -> None:
    raw = os.fsencode(work.files.root) + b"/\xff\xfe"
    Path(os.fsdecode(raw)).write_text("old")
    work.write("a1")
    page = page_of(work)

    (path,) = set(page("tree")["paths"])
    path.encode()  # a browser can send it back
    assert page("file", serial=0, path=path)["text"] == "old"


@pytest.mark.parametrize("path", ["nothing", "runs/none", "runs/../x", "runs/.", "runs"])
def test_what_is_not_there_is_not_found(work: Work, path: str) -> None:
    with pytest.raises(NotFound):
        Views(work.files.root).get(path)


def test_everything_is_json(work: Work) -> None:
    mixed(work)
    page = page_of(work)
    view = page()

    for path in ("tree", "prompts", *(f"calls/{row['n']}" for row in view["calls"])):
        assert json.loads(json.dumps(page(path), allow_nan=False))
