"""The debugger's page in Chromium, by mouse and by keyboard."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from chromium import Tab, chromium, needs_browser, opened, served
from many_calls import make_run

import weakincentives as wink
from weakincentives.core.budget import TokenUsage
from weakincentives.core.call import ToolCall
from weakincentives.debugger import export_run
from weakincentives.filesystem import Branch, HostFilesystem, branches_of
from weakincentives.runtime import ToolRegistry, open_run
from weakincentives.runtime.calls import Run, runs_of
from weakincentives.runtime.conversation import Message

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = needs_browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def expect():
    """Playwright's assertions, which wait; imported only where it is installed."""
    from playwright.sync_api import expect

    expect.set_options(timeout=30_000)
    return expect


# Runs to look at


@dataclass(frozen=True)
class Total:
    """What the agent believes."""

    value: int
    note: str = "ok"


@dataclass(frozen=True)
class Remark:
    text: str


@wink.tool(reach="reversible")
def write(path: str, text: str, *, context: wink.ToolContext) -> str:
    """Write a file."""
    context.filesystem.write(path, text)
    return f"Wrote {path}"


@wink.tool(reach="reversible")
def put(path: str, line: int, text: str, *, context: wink.ToolContext) -> str:
    """Replace a line of a file."""
    lines = context.filesystem.read(path).splitlines(keepends=True)
    lines[line] = f"{text}\n"
    context.filesystem.write(path, "".join(lines))
    return f"Changed {path}"


@wink.tool(reach="read")
def look(path: str, *, context: wink.ToolContext) -> str:
    """Return a file."""
    return context.filesystem.read(path)


@wink.tool(reach="reversible")
def spoil(path: str, *, context: wink.ToolContext) -> str:
    """Write a file, and fail."""
    context.filesystem.write(path, "")
    raise ValueError(f"{path} must not be empty")


@wink.tool(reach="reversible")
def believe(value: int, note: str = "ok", *, context: wink.ToolContext) -> str:
    """Set the total."""
    context.session[Total].seed(Total(value, note))
    return "Believed"


class Recording:
    """A run in progress: each turn is recorded as it happens."""

    def __init__(self, workspace: Path, title: str, **options: Any) -> None:
        self._open = ExitStack()
        files = self._open.enter_context(HostFilesystem(workspace, shared=True))
        saved = self._open.enter_context(open_run(files, title))
        self.run = Run(saved.path)
        self._session = saved.session
        self._tools = self._open.enter_context(
            ToolRegistry(
                [write, put, look, spoil, believe],
                workspace=files,
                session=saved.session,
                **options,
            )
        )
        self._say(Message(role="user", text=title, is_first=True, conversation="c"))
        self.calls = 0

    def __enter__(self) -> Recording:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def _say(self, message: Message) -> None:
        self._session.dispatch(message)

    def turn(self, text: str, *calls: tuple[str, dict[str, Any]]) -> None:
        """Let the model say something and make calls, one after the other."""
        numbers = range(self.calls + 1, self.calls + len(calls) + 1)
        wanted = [
            ToolCall(name, given, f"c{n}") for n, (name, given) in zip(numbers, calls, strict=True)
        ]
        usage = TokenUsage(input_tokens=1200, output_tokens=80)
        self._say(
            Message(
                role="model", text=text, tool_calls=tuple(wanted), conversation="c", usage=usage
            )
        )
        for call in wanted:
            result = self._tools.execute(call.name, call.params, call_id=call.id)
            self._say(Message(role="tool", call_id=call.id, text=result.render(), conversation="c"))
        self.calls += len(calls)


def numbered(count: int) -> str:
    return "".join(f"value_{n} = {n}\n" for n in range(count))


FILES = [f"src/m{n}.py" for n in range(8)]
BROKEN = 137


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, str]]:
    """200 calls on 8 files, one of which breaks src/m3.py; and that file after each call."""
    workspace = tmp_path_factory.mktemp("long")
    pick = random.Random(3)
    (workspace / "src").mkdir()
    for name in FILES:
        (workspace / name).write_text(numbered(30))
    states: dict[int, str] = {}
    with Recording(workspace, "Tidy up the constants") as run:
        for n in range(1, 201):
            name, line = pick.choice(FILES), pick.randrange(20)
            if n == BROKEN:
                text = "The total looks odd, so I set it to -1 for now."
                run.turn(text, ("put", {"path": "src/m3.py", "line": 25, "text": "TOTAL = -1"}))
            elif n % 20 == 0:
                run.turn("I try something.", ("spoil", {"path": name}))
            elif n % 7 == 0:
                run.turn("Let me see.", ("look", {"path": name}))
            elif n % 11 == 0:
                run.turn("I believe it.", ("believe", {"value": n}))
            else:
                given = {"path": name, "line": line, "text": f"value_{line} = {n}"}
                run.turn(f"Step {n} it is.", ("put", given))
            states[n] = (workspace / "src/m3.py").read_text()
    return workspace, states


@pytest.fixture
def tab(long: tuple[Path, dict[int, str]], browser: Browser) -> Iterator[Tab]:
    with served(long[0]) as link, opened(browser, link) as tab:
        tab.open_run("Tidy up the constants")
        yield tab


# Looking


def test_the_call_that_broke_a_file_is_found_with_the_mouse(tab: Tab, expect: Any):
    tab.tab("Files")
    tab.find("searchbox", "Find a file").fill("m3")
    tab.find("treeitem", "m3.py").click()
    tab.lines.filter(has_text="TOTAL = -1").click()

    expect(tab.blame).to_contain_text(f"Line 26 was written by call {BROKEN}, put")
    expect(tab.blame).to_contain_text("The total looks odd")
    tab.blame.get_by_role("button", name=f"call {BROKEN}, put").click()
    expect(tab.call).to_have_text(f"#{BROKEN} put src/m3.py")
    changes = tab.find("group", "Changes in src/m3.py")
    expect(changes).to_contain_text("TOTAL = -1")
    expect(changes).to_contain_text("value_25 = 25")
    expect(tab.chosen).to_have_attribute("id", f"call-{BROKEN}")


def test_the_call_that_broke_a_file_is_found_with_the_keyboard(tab: Tab, expect: Any):
    tab.keys("/")
    expect(tab.find("searchbox", "Search this run")).to_be_focused()
    tab.page.keyboard.type("TOTAL = -1")
    expect(tab.page.locator(".hit-head", has_text="src/m3.py")).to_have_count(1)
    while not tab.page.locator(".hit:focus .hit-head", has_text="src/m3.py").count():
        tab.keys("Tab")
    tab.keys("Enter")
    expect(tab.blame).to_contain_text(f"Line 26 was written by call {BROKEN}, put")
    tab.page.locator(".lines").focus()
    tab.keys("Enter")

    expect(tab.call).to_have_text(f"#{BROKEN} put src/m3.py")


def test_a_file_is_shown_as_it_was_at_any_call(
    tab: Tab, long: tuple[Path, dict[int, str]], expect: Any
):
    """By slider, by keys and by the buttons."""
    _, states = long
    scrubber = tab.find("slider", "Scrub along the run")
    tab.keys("2")
    tab.find("searchbox", "Find a file").fill("m3")
    tab.find("treeitem", "m3.py").click()
    where = tab.page.locator(".file-head .facts")

    def check(number: int) -> None:
        expect(where).to_contain_text(f"after call {number}")
        for n in (0, 19, 25):
            line = states[number].splitlines()[n]
            expect(tab.page.locator(f"#line-{n + 1} .text")).to_have_text(line)

    check(200)
    scrubber.fill("136")
    check(137)
    scrubber.focus()
    tab.keys("ArrowLeft")
    check(136)
    tab.keys("Home")
    check(1)
    tab.page.locator(".timeline").focus()
    tab.keys("j", "j", "j", "k")
    check(3)
    tab.find("button", "Next call").click()
    check(4)
    tab.keys("b")
    expect(where).to_contain_text("before call 4")
    tab.keys("G", "[")
    touched = [n for n in range(2, 201) if states[n] != states[n - 1]]
    check(touched[-1] if touched[-1] != 200 else touched[-2])


def test_the_address_carries_the_place_so_back_and_forward_work(tab: Tab, expect: Any):
    tab.tab("Files")
    tab.tab("Session")
    tab.page.go_back()
    expect(tab.find("tab", "Files")).to_have_attribute("aria-selected", "true")
    tab.page.go_forward()
    expect(tab.find("tab", "Session")).to_have_attribute("aria-selected", "true")
    tab.keys("h")
    expect(tab.heading("Runs")).to_be_visible()
    tab.page.go_back()
    expect(tab.find("tab", "Session")).to_have_attribute("aria-selected", "true")


def test_problems_are_stepped_through_and_say_what_was_undone(tab: Tab, expect: Any):
    tab.keys("g", "n")
    expect(tab.call).to_contain_text("#20 spoil")
    details = tab.find("article", "Call 20")
    expect(details).to_contain_text("rolled back")
    expect(details).to_contain_text("must not be empty")
    expect(details.get_by_role("heading", name="Undone")).to_be_visible()
    tab.keys("n")
    expect(tab.call).to_contain_text("#40 spoil")
    tab.keys("p")
    expect(tab.call).to_contain_text("#20 spoil")


def test_validation_errors_stand_where_they_belong(tmp_path: Path, browser: Browser, expect: Any):
    with Recording(tmp_path, "A wrong call") as run:
        run.turn("I am careless.", ("put", {"path": "a.py", "line": "third"}))
    with served(tmp_path) as link, opened(browser, link) as tab:
        tab.open_run("A wrong call")
        arguments = tab.find("region", "Arguments")
        expect(arguments.locator("dt.wrong")).to_have_text(["line", "text"])
        expect(arguments.locator("dt.wrong + dd").first).to_contain_text("third")
        expect(arguments.locator("dt.wrong + dd").last).to_contain_text("missing")
        expect(tab.call.locator("xpath=..")).to_contain_text("refused")


def test_calls_are_filtered_by_tool_outcome_and_path(tab: Tab, expect: Any):
    shown = tab.page.locator(".timeline [role=option]")
    tab.find("combobox", "Tool").select_option("believe")
    expect(shown.first).to_contain_text("believe")
    expect(shown.filter(has_text="put")).to_have_count(0)
    tab.find("combobox", "Tool").select_option("")
    tab.find("combobox", "Outcome").select_option("rolled back")
    expect(shown).to_have_count(10)
    tab.find("combobox", "Outcome").select_option("")
    tab.keys("Escape")
    tab.page.locator(".timeline").focus()
    tab.keys("f")
    tab.page.keyboard.type("m3.py")
    expect(shown.filter(has_text="src/m4.py")).to_have_count(0)
    tab.find("button", "Clear the filter").click()
    expect(shown.first).to_have_attribute("aria-setsize", "200")


def test_a_slice_value_is_blamed_on_the_call_that_wrote_it(tab: Tab, expect: Any):
    tab.keys("3")
    tab.find("button", "Total").click()
    line = tab.lines.filter(has_text='"value": 198')
    line.click()
    expect(tab.blame).to_contain_text("This value was written by call 198, believe")
    expect(tab.blame).to_contain_text("I believe it.")
    tab.lines.filter(has_text='"note": "ok"').click()
    expect(tab.blame).to_contain_text("written by call 11, believe")


def test_two_calls_are_compared_side_by_side(tab: Tab, expect: Any):
    tab.find("slider", "Scrub along the run").fill("135")
    tab.keys("c")
    panel = tab.find("article", "Compare")
    expect(panel).to_contain_text("The files are the same.")
    tab.keys("j")
    row = panel.get_by_role("button", name="src/m3.py")
    expect(row).to_contain_text("differs")
    row.click()
    expect(panel.locator(".merge .cm-merge-a")).to_contain_text("TOTAL = -1")
    expect(panel.locator(".merge .cm-merge-b")).to_contain_text("value_25 = 25")


def test_the_changes_of_a_call_come_first_in_colours_with_what_differs_in_a_line(
    tmp_path: Path, browser: Browser, expect: Any
):
    (tmp_path / "a.py").write_text("def total(prices):\n    return sum(prices)\n")
    with Recording(tmp_path, "Round it") as run:
        given = {"path": "a.py", "line": 1, "text": "    return round(sum(prices), 2)"}
        run.turn("Rounded.", ("put", given))
    with served(tmp_path) as link, opened(browser, link) as tab:
        tab.open_run("Round it")
        sections = tab.find("article", "Call 1").locator("section h3")
        expect(sections.first).to_contain_text("Files")
        diff = tab.find("group", "Changes in a.py")
        expect(diff.locator(".added .within")).to_have_text(["round", "(", ", ", "2", ")"])
        expect(diff.locator(".tone-keyword").first).to_have_text("def")
        tab.find("button", "Side by side").click()
        expect(tab.page.locator(".merge .cm-merge-b")).to_contain_text("round")
        color = "e => getComputedStyle(e.querySelector('.cm-merge-b .cm-line span')).color"
        root = tab.page.locator(".merge .cm-mergeView")
        assert root.evaluate(color) != root.evaluate("e => getComputedStyle(e).color")
        tab.tab("Files")
        expect(tab.lines.locator(".tone-keyword").first).to_have_text("def")


def test_the_list_of_runs_says_what_each_came_to(tmp_path: Path, browser: Browser, expect: Any):
    (tmp_path / "a.py").write_text("a\nb\n")
    with Recording(tmp_path, "Some work") as run:
        run.turn("One.", ("put", {"path": "a.py", "line": 0, "text": "x"}))
        run.turn("Two.", ("write", {"path": "b.py", "text": "b"}), ("spoil", {"path": "b.py"}))
    with served(tmp_path) as link, opened(browser, link) as tab:
        expect(tab.page.locator(".run-result")).to_have_text(
            "files +1 added ~1 changed1 rolled back"
        )


def test_an_address_of_a_run_that_is_gone_leads_back_to_the_list(
    long: tuple[Path, dict[int, str]], browser: Browser, expect: Any
):
    with served(long[0]) as link, opened(browser, link) as tab:
        tab.heading("Runs").wait_for()
        tab.go("run=nosuch")
        expect(tab.find("alert")).to_have_text("there is no run nosuch")
        tab.problems.clear()  # the browser's own note of the answer
        tab.find("link", "All runs of this directory").click()
        expect(tab.heading("Runs")).to_be_visible()


def test_a_comparison_begins_with_another_try_of_the_task_or_the_other_end_of_the_run(
    tmp_path: Path, browser: Browser, expect: Any
):
    for text in ("first", "second"):
        with Recording(tmp_path, "Twice") as run:
            call = ("write", {"path": "a.py", "text": f"{text}\n"})
            run.turn(text, call, ("write", {"path": f"{text}.py", "text": ""}))
            last = run.run.mark
    with Recording(tmp_path, "Alone") as run:
        run.turn(
            "x", ("write", {"path": "c.py", "text": "c\n"}), ("write", {"path": "d", "text": ""})
        )
    with served(tmp_path) as link, opened(browser, link) as tab:
        tab.open_run("Alone")
        tab.tab("Compare")
        files = tab.find("region", "Files that differ").locator("li")
        expect(files).to_have_count(2)  # against before its first call
        tab.keys("g")
        expect(files).to_have_count(1)  # against its last
        tab.keys("h")
        tab.page.get_by_role("link").filter(has_text="Twice").last.click()
        tab.tab("Compare")
        expect(tab.find("combobox", "Run of B")).to_have_value(re.compile(f"-{last}$"))


def test_no_key_is_lost_however_fast_they_come(tab: Tab, expect: Any):
    tab.keys("g", *"jjjjjjjj", "e")
    expect(tab.find("dialog", "Edit call 9, put, and rerun")).to_be_visible()
    tab.keys("Escape", "r")
    expect(tab.find("dialog", "Rewind to call 9, put")).to_be_visible()
    tab.keys("Escape", "j", "k", "k", "2", "3", "1", "?")
    expect(tab.find("dialog", "Keys")).to_be_visible()
    tab.keys("Escape")
    expect(tab.call).to_contain_text("#8 ")


def test_the_keys_are_listed(tab: Tab, expect: Any):
    tab.keys("?")
    dialog = tab.find("dialog", "Keys")
    for text in ("Next call", "Search", "Edit this call and rerun", "Light or dark", "All runs"):
        expect(dialog.get_by_text(text, exact=True)).to_be_visible()
    tab.keys("Escape")
    expect(dialog).to_have_count(0)


def test_it_is_light_or_dark_as_the_system_says_until_chosen(tab: Tab, expect: Any):
    page, ground = tab.page, "() => getComputedStyle(document.body).backgroundColor"
    page.emulate_media(color_scheme="light")
    light = page.evaluate(ground)
    page.emulate_media(color_scheme="dark")
    dark = page.evaluate(ground)
    assert light != dark
    tab.keys("t")
    assert page.evaluate(ground) == light
    page.reload()
    tab.call.wait_for()
    assert page.evaluate(ground) == light


PANELS = ("Call", "Files", "Session", "Prompt", "Search", "Compare")


@pytest.mark.parametrize("width", [400, 1280])
def test_every_control_has_a_name_and_nothing_is_wider_than_the_window(
    long: tuple[Path, dict[int, str]], browser: Browser, width: int
):
    nameless = """() => [...document.querySelectorAll("button, input, select, textarea, a, [role]")]
        .filter((e) => !["presentation", "status", "alert"].includes(e.getAttribute("role")))
        .filter((e) => !(e.ariaLabel || e.getAttribute("aria-labelledby") || e.textContent.trim()
                         || e.closest("label") || e.title))
        .map((e) => e.outerHTML)"""
    size = {"viewport": {"width": width, "height": 860}}
    with served(long[0]) as link, opened(browser, link, **size) as tab:
        tab.open_run("Tidy up the constants")
        for panel in PANELS:
            tab.tab(panel)
            tab.page.locator(f".panel-body.is-{NAMES[panel]}").wait_for()
            assert tab.page.evaluate(nameless) == []
            wide = tab.page.evaluate("() => document.documentElement.scrollWidth")
            assert wide <= width, panel


NAMES = {
    "Call": "call",
    "Files": "files",
    "Session": "state",
    "Prompt": "prompt",
    "Search": "search",
    "Compare": "compare",
}


def test_nothing_jumps_while_a_person_steps_through_the_calls(tab: Tab, expect: Any):
    tab.call.wait_for()
    before = tab.page.evaluate("() => window.jumps")
    for _ in range(20):
        tab.keys("k")
    expect(tab.call).to_contain_text("#180")
    tab.keys("2")
    tab.lines.first.wait_for()
    for _ in range(10):
        tab.keys("k")
    expect(tab.page.locator(".file-head .facts")).to_contain_text("call 170")

    assert tab.page.evaluate("() => window.jumps") - before < 0.01


# Many runs, and long ones


def plant(workspace: Path, seed: int) -> int:
    """Make a run of 50 calls, one of which writes a wrong value that stays; returns its number.

    Every fourth is in the session, the others in a file, whose lines move.
    """
    pick = random.Random(seed)
    wrong, path = pick.randrange(5, 45), workspace / "config.py"
    path.write_text(numbered(30))
    with Recording(workspace, f"Bug number {seed}.") as run:
        for n in range(1, 51):
            lines = path.read_text().splitlines(keepends=True)
            others = [at for at, line in enumerate(lines) if "limit" not in line]
            given: dict[str, Any] = {"path": "config.py"}
            if seed % 4 == 3:
                note = "wrong" if n >= wrong else f"note {n}"
                call = "believe", {"value": n, "note": note}
            elif n == wrong:
                call = "put", given | {"line": pick.choice(others), "text": "limit = 99999"}
            elif n % 9 == 0:
                moved = [f"# {n}\n", *lines, "# the end\n"]
                call = "write", given | {"text": "".join(moved)}
            else:
                call = "put", given | {"line": pick.choice(others), "text": f"value = {n}"}
            run.turn(f"Turn {n}.", call)
    return wrong


def test_blame_names_the_call_that_planted_each_of_20_bugs(
    tmp_path: Path, browser: Browser, expect: Any
):
    planted = [plant(tmp_path, seed) for seed in range(20)]

    blamed: list[int] = []
    with served(tmp_path) as link, opened(browser, link) as tab:
        for seed in range(20):
            tab.go("")
            tab.open_run(f"Bug number {seed}.")
            tab.tab("Session" if seed % 4 == 3 else "Files")
            found = '"note": "wrong"' if seed % 4 == 3 else "limit = 99999"
            tab.lines.filter(has_text=found).click()
            tab.blame.get_by_role("button", name="call").click()
            number = int(tab.call.inner_text().split()[0].removeprefix("#"))
            expect(tab.find("region", "The model said")).to_contain_text(f"Turn {number}.")
            blamed.append(number)

    assert blamed == planted


def test_a_run_of_10000_calls_opens_and_scrolls(
    tmp_path: Path, browser: Browser, expect: Any, record_property: Any
):
    make_run(tmp_path, calls=10_000, files=5_000)
    with served(tmp_path) as link, opened(browser, link) as tab:
        tab.page.get_by_role("link").filter(has_text="Improve it").wait_for()
        tab.page.get_by_role("link").filter(has_text="Improve it").click()
        tab.chosen.wait_for()
        took = (
            """() => performance.now() - performance.getEntriesByType("navigation")[0].startTime"""
        )
        tab.page.reload()
        tab.chosen.wait_for()
        record_property("opens_in_ms", round(tab.page.evaluate(took)))
        tab.find("slider", "Scrub along the run").fill("4999")
        expect(tab.call).to_contain_text("#5000")
        drawn = tab.page.locator(".timeline [role=option]").count()
        assert drawn < 100
        tab.keys("g")
        expect(tab.call).to_contain_text("#1 ")
        tab.tab("Files")
        tab.lines.first.wait_for()


# Live


def test_a_run_in_progress_appears_as_it_happens(tmp_path: Path, browser: Browser, expect: Any):
    (tmp_path / "a.py").write_text(numbered(5))
    with (
        Recording(tmp_path, "The first task") as first,
        served(tmp_path) as link,
        opened(browser, link) as tab,
    ):
        first.turn("I begin.", ("put", {"path": "a.py", "line": 1, "text": "one"}))
        tab.open_run("The first task")
        expect(tab.call).to_have_text("#1 put a.py")
        expect(tab.page.locator(".run-head .state")).to_have_text("running")
        first.turn("I go on.", ("put", {"path": "a.py", "line": 2, "text": "two"}))
        expect(tab.call).to_have_text("#2 put a.py")  # it follows
        expect(tab.page.locator("#news")).to_have_text("Call 2, put, committed")
        tab.keys("2")
        expect(tab.lines.nth(2)).to_have_text("two")
        first.turn("And on.", ("put", {"path": "a.py", "line": 2, "text": "three"}))
        expect(tab.lines.nth(2)).to_have_text("three")
        tab.keys("1", "k")
        expect(tab.call).to_have_text("#2 put a.py")
        with Recording(tmp_path, "The second task") as second:
            second.turn("Me too.", ("look", {"path": "a.py"}))
            other = tab.find("navigation", "Debugger").get_by_role("link", name="1 call, live")
            expect(other).to_be_visible()
            first.turn("Still here.", ("look", {"path": "a.py"}))
            expect(tab.page.locator(".timeline #call-4")).to_be_visible()
            expect(tab.call).to_have_text("#2 put a.py")  # it stays where the person looks
            other.click()
            expect(tab.call).to_have_text("#1 look a.py")
        expect(tab.page.locator(".run-head .state")).not_to_have_text("running")


# Acting


WRITES = [{"write_file": {"path": f"{name}.txt", "content": f"{name}\n"}} for name in "abc"]
TURNS: list[Any] = [
    {"say": "First these.", "call": WRITES[:2]},
    {"say": "And now:", "call": WRITES[2:]},
    {"say": "Done."},
]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    project = tmp_path / "project"
    project.mkdir()
    (tmp_path / "script.json").write_text(json.dumps(TURNS))
    return project


def wink_run(project: Path, *more: str) -> subprocess.Popen[bytes]:
    """Let a script write three files, as `wink run` does."""
    command = [sys.executable, "-m", "weakincentives.cli", "run", "Write three files", "-q"]
    script = f"scripted:{project.parent / 'script.json'}"
    return subprocess.Popen(
        [*command, "-w", str(project), "-m", script, "--sandbox", "none", *more],
        stdin=subprocess.DEVNULL,
    )


@pytest.fixture
def written(project: Path, browser: Browser) -> Iterator[Tab]:
    """The page of a run that has written a.txt, b.txt and c.txt."""
    with wink_run(project) as run:
        assert run.wait() == 0
    with served(project) as link, opened(browser, link) as tab:
        tab.open_run("Write three files")
        yield tab


def on_branch(project: Path) -> dict[str, str]:
    [info] = branches_of(project)
    with Branch.open(project, info.name, wait=30) as branch:
        return {path: branch.read(path) for path in sorted(branch.glob("*"))}


def test_a_call_is_undone_after_a_look_at_what_would_change(
    written: Tab, project: Path, expect: Any
):
    written.page.locator("#call-2").click()
    expect(written.call).to_contain_text("#2")
    written.find("button", "Undo").click()
    dialog = written.find("dialog", "Undo call 2, write_file")
    expect(dialog.get_by_role("group", name="Changes in b.txt")).to_contain_text("b")
    assert (project / "b.txt").exists()
    dialog.get_by_role("button", name="Undo the call").click()
    expect(dialog).to_have_count(0)

    assert not (project / "b.txt").exists()
    expect(written.page.locator("#call-2")).to_contain_text("undone")


def test_a_run_is_rewound_by_keyboard(written: Tab, project: Path, expect: Any):
    written.keys("g")
    expect(written.call).to_contain_text("#1")
    written.keys("r")
    dialog = written.find("dialog", "Rewind to call 1, write_file")
    expect(dialog.get_by_role("group", name="Changes in c.txt")).to_be_visible()
    expect(dialog.get_by_role("button", name="Rewind")).to_be_enabled()
    while not dialog.locator("button:focus", has_text="Rewind").count():
        written.keys("Tab")
    written.keys("Enter")
    expect(dialog).to_have_count(0)

    assert sorted(each.name for each in project.iterdir()) == ["a.txt"]


def test_a_run_is_forked_at_a_call(written: Tab, project: Path, expect: Any):
    written.page.locator("#call-2").click()
    expect(written.call).to_contain_text("#2")
    written.keys("o")
    dialog = written.find("dialog", "Fork at call 2, write_file")
    expect(dialog.get_by_label("Name")).to_be_focused()
    written.page.keyboard.type("other")
    dialog.get_by_role("button", name="Fork", exact=True).click()
    expect(written.page.locator(".run-head")).to_contain_text("branch other")

    assert on_branch(project) == {"a.txt": "a\n", "b.txt": "b\n"}
    assert (project / "c.txt").exists()


def test_a_call_is_edited_and_rerun_and_the_page_shows_how_the_worlds_differ(
    written: Tab, project: Path, expect: Any
):
    written.page.locator("#call-2").click()
    expect(written.call).to_contain_text("#2")
    written.keys("e")
    dialog = written.find("dialog", "Edit call 2, write_file, and rerun")
    editor = dialog.get_by_label("Arguments (JSON)")
    expect(editor).to_be_focused()
    editor.fill("{")
    expect(dialog.get_by_role("button", name="Run again")).to_be_disabled()
    editor.fill('{"path": "x.txt", "content": "other\\n"}')
    dialog.get_by_role("button", name="Run again").click()
    expect(written.page.locator(".run-head .state")).to_have_text("finished")
    panel = written.find("article", "Compare")
    expect(panel.get_by_role("button", name="x.txt")).to_contain_text("only in A")
    expect(panel.get_by_role("button", name="b.txt")).to_contain_text("only in B")
    expect(panel).to_contain_text("Calls 1 to 1 are the same.")

    assert on_branch(project) == {"a.txt": "a\n", "c.txt": "c\n", "x.txt": "other\n"}
    assert (project / "b.txt").exists()


def test_calls_of_a_live_run_are_approved_and_denied(project: Path, browser: Browser, expect: Any):
    with (
        served(project) as link,
        opened(browser, link) as tab,
        wink_run(project, "--ask", "write_file", "--ask-elsewhere") as run,
    ):
        tab.find("button", "Approvals 1").click()
        dialog = tab.find("dialog", "Approvals")
        request = dialog.get_by_role("article")
        expect(request).to_contain_text("a.txt")
        assert not (project / "a.txt").exists()
        request.get_by_role("button", name="Approve").click()
        expect(request).to_contain_text("b.txt")
        assert (project / "a.txt").exists()
        request.get_by_label("Reason").fill("not today")
        request.get_by_role("button", name="Deny").click()
        expect(request).to_contain_text("c.txt")
        request.get_by_role("button", name="Approve").focus()
        tab.keys("Enter")
        expect(dialog).to_contain_text("Nothing waits for an approval.")
        tab.keys("Escape")
        assert run.wait() == 0
        tab.open_run("Write three files")
        tab.page.locator("#call-2").click()
        expect(tab.find("article", "Call 2")).to_contain_text("denied")
        expect(tab.find("article", "Call 2")).to_contain_text("not today")

    assert sorted(each.name for each in project.iterdir()) == ["a.txt", "c.txt"]


# Hostile names, texts and contents

BAIT = (
    "<img src=x onerror=\"window.ran='img'\">",
    "</script><script>window.ran='script'</script>",
    "<svg/onload=window.ran='svg'>",
    "javascript:window.ran='link'",
    "{{constructor.constructor('window.ran=1')()}}",
    "\u202egnp.exe",
    "__proto__",
)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
    workspace = tmp_path_factory.mktemp("hostile")
    bait = "\n".join(BAIT)
    with Recording(workspace, BAIT[1] + BAIT[0]) as run:
        for text in BAIT:
            name = f"{text.replace('/', '_')}.txt"
            run.turn(
                f"{bait}\n[x](javascript:window.ran='said')",
                ("write", {"path": name, "text": bait}),
                ("write", {"path": f"{name}/x", "text": bait, text: bait}),
                ("look", {"path": name}),
                ("believe", {"value": 1, "note": bait}),
            )
    return workspace, run.run


def visit_everything(tab: Tab, expect: Any) -> None:
    """Open every panel at every call, and every file and slice."""
    tab.call.wait_for()
    total = int(tab.page.locator(".strip-where").inner_text().split()[-1])
    tab.keys("g")
    for number in range(1, total + 1):
        expect(tab.call).to_contain_text(f"#{number} ")
        tab.find("region", "Result, as the model saw it").wait_for()
        beside = tab.find("button", "Side by side")
        if beside.count():
            beside.first.click()
            tab.page.locator(".merge .cm-content").first.wait_for()
        tab.keys("j")
    tab.keys("2")
    files = tab.page.locator(".tree-row.file")
    files.first.wait_for()
    for number in range(files.count()):
        files.nth(number).click()
        tab.lines.first.click()
        tab.blame.wait_for()
    tab.keys("3")
    tab.lines.first.click()
    tab.blame.wait_for()
    tab.keys("4", "/")
    tab.page.keyboard.type("window.ran")
    tab.page.locator(".hit").first.wait_for()
    tab.page.locator(".timeline").focus()
    tab.keys("6")
    tab.page.locator(".differing button").first.click()
    tab.page.locator(".merge .cm-content").first.wait_for()


def test_hostile_names_texts_and_contents_run_nothing_in_the_page(
    hostile: tuple[Path, Run], browser: Browser, expect: Any
):
    with served(hostile[0]) as link, opened(browser, link) as tab:
        tab.page.get_by_role("link").filter(has_text="window.ran").first.click()
        visit_everything(tab, expect)

        assert tab.page.evaluate("() => window.ran") is None
        assert tab.page.locator("#app img, #app script, #app a[href^=javascript]").count() == 0


# Exports


def test_an_export_opens_from_disk_and_makes_no_request(
    long: tuple[Path, dict[int, str]], tmp_path: Path, browser: Browser, expect: Any
):
    workspace, states = long
    export_run(workspace, run_of(workspace), tmp_path / "run.html")
    requests: list[str] = []
    with opened(browser, "about:blank", offline=True) as tab:
        tab.page.on("request", lambda request: requests.append(request.url))
        tab.page.goto((tmp_path / "run.html").as_uri())
        tab.heading("Tidy up the constants").wait_for()
        expect(tab.page.get_by_role("group", name="Actions at this call")).to_have_count(0)
        expect(tab.find("button", "Approvals")).to_have_count(0)
        tab.tab("Files")
        tab.find("searchbox", "Find a file").fill("m3")
        tab.find("treeitem", "m3.py").click()
        tab.find("slider", "Scrub along the run").fill("99")
        expect(tab.page.locator("#line-1 .text")).to_have_text(states[100].splitlines()[0])
        tab.find("slider", "Scrub along the run").fill("199")
        tab.lines.filter(has_text="TOTAL = -1").click()
        expect(tab.blame).to_contain_text(f"call {BROKEN}, put")
        tab.keys("3")
        expect(tab.lines.filter(has_text='"value": 198')).to_be_visible()
        tab.keys("/")
        tab.page.keyboard.type("TOTAL = -1")
        expect(tab.page.locator(".hit-head", has_text="src/m3.py")).to_have_count(1)
        tab.page.locator(".timeline").focus()
        tab.find("slider", "Scrub along the run").fill("135")
        tab.keys("c", "j")
        row = tab.find("article", "Compare").get_by_role("button", name="src/m3.py")
        row.click()
        expect(tab.page.locator(".merge .cm-merge-a")).to_contain_text("TOTAL = -1")

    assert requests == [(tmp_path / "run.html").as_uri()]


def test_hostile_names_texts_and_contents_run_nothing_in_an_export(
    hostile: tuple[Path, Run], tmp_path: Path, browser: Browser, expect: Any
):
    workspace, run = hostile
    export_run(workspace, run, tmp_path / "run.html")
    with opened(browser, (tmp_path / "run.html").as_uri(), offline=True) as tab:
        visit_everything(tab, expect)

        assert tab.page.evaluate("() => window.ran") is None


def run_of(workspace: Path) -> Run:
    return runs_of(workspace)[-1]
