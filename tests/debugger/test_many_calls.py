"""Long runs: everything is there, and every wrong value is blamed on the call that wrote it."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
from many_calls import edit, make_run
from page import Page, blame, lines_of, text_at, texts_of

from weakincentives.debugger import Views
from weakincentives.filesystem import HostFilesystem
from weakincentives.runtime import SavedSession, ToolRegistry
from weakincentives.runtime.calls import Calls, begin_run


def check(workspace: Path, calls: int, files: int, looked_at: int) -> None:
    run = make_run(workspace, calls=calls, files=files)
    page, history = Page(Views(workspace), run.id), Calls(workspace)
    view = page()

    assert [row["n"] for row in view["calls"]] == list(range(1, calls + 1))
    assert len(view["turns"]) == calls // 4
    assert len(page("tree")["paths"]) == files
    own = {call.number: call for call in history.of_run(run)}
    changing = [row for row in view["calls"] if row["files"]]
    for row in random.Random(1).sample(changing, looked_at):
        ((path, _, _),) = next(c for c in view["commits"] if c["call"] == row["n"])["files"]
        expected = history.files_at(own[row["n"]]).read(path)
        assert page("file", serial=row["after"], path=path)["text"] == expected
        assert text_at(page("versions", path=path), row["after"]) == expected


def test_a_long_run_is_complete(tmp_path: Path) -> None:
    check(tmp_path / "project", calls=200, files=40, looked_at=10)


@pytest.mark.heavy
def test_a_run_of_ten_thousand_calls_is_complete(tmp_path: Path) -> None:
    check(tmp_path / "project", calls=10_000, files=5_000, looked_at=20)


def test_a_look_at_a_live_run_costs_what_is_new(tmp_path: Path) -> None:
    """After one more call, the page asks for it: however many calls there were before."""
    short, long = (calls_of_a_look(tmp_path / str(calls), calls) for calls in (40, 400))

    assert long < 2 * short


def calls_of_a_look(workspace: Path, calls: int) -> int:
    """Return how many functions are called to show one new call."""
    run = make_run(workspace, calls=calls, files=20)
    page, made = Page(Views(workspace), run.id), 0
    page()
    with SavedSession.open(run.path) as saved:
        tools = ToolRegistry([edit], workspace=workspace, session=saved.session)
        assert tools.execute("edit", {"path": "src/p0/m0.py", "line": 1, "text": "new"}).success

        def count(frame: object, event: str, arg: object) -> None:
            nonlocal made
            made += event == "call"

        sys.setprofile(count)
        try:
            news = page(after=calls)
        finally:
            sys.setprofile(None)
    assert [row["n"] for row in news["calls"]] == [calls + 1]
    return made


def test_planted_bugs_are_blamed_on_the_call_that_wrote_them(tmp_path: Path) -> None:
    """In each of 20 files, one of 50 calls writes a wrong value; others change lines around it."""
    pick = random.Random(7)
    with HostFilesystem(tmp_path) as files, begin_run(files.store, {"kind": "hosted"}) as saved:
        for number in range(20):
            files.write(f"f{number}", "".join(f"line {n}\n" for n in range(12)))
        tools = ToolRegistry([edit], workspace=files, session=saved.session)
        planted: dict[str, int] = {}
        bugs = dict(enumerate(pick.sample(range(50), 20)))
        by_call = {call: f"f{file}" for file, call in bugs.items()}
        for call in range(50):
            path, line, text = f"f{pick.randrange(20)}", pick.randrange(6), f"value {call}"
            if call in by_call:
                path, line, text = by_call[call], 6 + pick.randrange(6), "WRONG"
                planted[path] = call + 1
            result = tools.execute("edit", {"path": path, "line": line, "text": text})
            assert result.success
        page = Page(Views(tmp_path), saved.path.stem)
        found = {path: wrong_line(page, path) for path in planted}

    assert found == planted


def wrong_line(page: Page, path: str) -> int:
    versions = page("versions", path=path)
    (*_, (_, text, _)) = texts_of(versions)
    (step,) = (
        step
        for line, step in zip(lines_of(text or ""), blame(versions), strict=True)
        if line == "WRONG\n"
    )
    assert step is not None
    return step["call"]
