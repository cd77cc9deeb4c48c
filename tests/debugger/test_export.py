from __future__ import annotations

import base64
import gzip
import hashlib
import json
import os
import random
import re
import shutil
import textwrap
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from scripted import scripted_run

import weakincentives as wink
from weakincentives.adapters import calls
from weakincentives.debugger import Views, export_run
from weakincentives.debugger.export import STATIC, Page
from weakincentives.errors import ExportRefused
from weakincentives.filesystem.diffs import lines_of
from weakincentives.filesystem.store import location_of
from weakincentives.runtime.calls import Run

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
SECRET = "qz7-horse-battery-x"
TURNS = [
    calls(("setup_plan", {"objective": "Set the port", "steps": ["read", "edit"]})),
    calls(("read_file", {"path": "app.py"}), text="First I read it."),
    calls(
        ("edit_file", {"path": "app.py", "old_string": "80", "new_string": "8080"}),
        ("edit_file", {"path": "app.py", "old_string": "no such", "new_string": "x"}),
        text="Now the port.",
    ),
    calls(("write_file", {"path": "notes/new.txt", "content": "new\n"}), ("nosuch", {})),
    calls(("move_file", {"source": "old.md", "destination": "b.md"})),
    calls(("edit_file", {"path": "app.py", "old_string": "'a'", "new_string": "'b'"})),
    "Done.",
]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    project = tmp_path / "project"
    project.mkdir()
    (project / "app.py").write_text("host = 'a'\nport = 80\nend = True\n")
    (project / "old.md").write_text("text\n")
    (project / "other.txt").write_text("nobody changes it\n")
    return project


class Parsed(HTMLParser):
    """The elements of a page, and the text of its scripts and styles."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.styles: list[str] = []
        self._open = ""
        self.feed(page.read_text("utf-8"))
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._open = tag
        if tag in ("script", "style"):
            (self.scripts if tag == "script" else self.styles).append("")

    def handle_endtag(self, tag: str) -> None:
        self._open = ""

    def handle_data(self, data: str) -> None:
        if self._open == "script":
            self.scripts[-1] += data
        elif self._open == "style":
            self.styles[-1] += data

    @property
    def data(self) -> Any:
        return json.loads(self.scripts[0])

    @property
    def policy(self) -> str:
        (found,) = [attrs["content"] for tag, attrs in self.elements if attrs.get("http-equiv")]
        return str(found)


def blocks(page: Path) -> list[dict[str, Any]]:
    packed = Parsed(page).data["blocks"]
    return [json.loads(gzip.decompress(base64.b64decode(each))) for each in packed]


def values(page: Path) -> dict[str, Any]:
    """What the page finds by its index."""
    found, index = blocks(page), Parsed(page).data["index"]
    return {key: found[n][key] for key, n in index.items()}


def lines_at_end(versions: dict[str, Any]) -> list[str] | None:
    """The last version of a file, as the page makes it."""
    base = versions["base"]
    lines = None if base is None else lines_of(base)
    for step in versions["steps"]:
        if step["edits"] is None:
            lines = None
            continue
        old, new, at = lines or [], list[str](), 0
        for start, removed, added in step["edits"]:
            new += old[at:start] + added
            at = start + removed
        lines = new + old[at:]
    return lines


def without_errors(view: dict[str, Any]) -> dict[str, Any]:
    """A long error is cut; the export cuts it at a word."""
    rows = view.get("calls", [])
    return view | {"calls": [each | {"error": ""} for each in rows], "error": ""}


# What is in it


def test_every_answer_that_the_page_asks_for_is_embedded(project: Path, tmp_path: Path):
    run = scripted_run(project, TURNS)

    done = export_run(project, run, tmp_path / "run.html")

    found, views = values(done.path), Views(project, writable=False)
    assert Parsed(done.path).data["run"] == run.id
    start = f"runs/{run.id}"
    assert without_errors(found[start]) == without_errors(json.loads(json.dumps(views.run(run.id))))
    assert found[f"{start}/tree"] == views.tree(run.id)
    assert found[f"{start}/prompts"] == json.loads(json.dumps(views.prompts(run.id)))
    for number in range(1, 9):
        assert without_errors(found[f"{start}/calls/{number}"]) == without_errors(
            json.loads(json.dumps(views.call(run.id, number)))
        )
    for path in ("app.py", "notes/new.txt", "b.md", "old.md", "other.txt"):
        key = f"{start}/versions?path={path.replace('/', '%2F')}"
        assert found[key] == json.loads(json.dumps(views.versions(run.id, path)))
    for each in views.run(run.id)["slices"]:
        (key,) = [k for k in found if unquote(k) == f"{start}/slices?key={each['key']}"]
        assert found[key] == json.loads(json.dumps(views.slices(run.id, each["key"])))
    assert found["workspace"]["path"] == ""
    assert (done.calls, done.changed, done.note) == (8, 4, "")
    assert done.size == done.path.stat().st_size
    assert lines_at_end(found[f"{start}/versions?path=app.py"]) == [
        "host = 'b'\n", "port = 8080\n", "end = True\n"
    ]  # fmt: skip


def test_files_that_the_run_did_not_change_can_be_left_out(project: Path, tmp_path: Path):
    run = scripted_run(project, TURNS)

    done = export_run(project, run, tmp_path / "run.html", changed_only=True)

    assert done.unchanged == 0
    assert "nobody changes it" not in json.dumps(values(done.path))


def test_a_run_in_progress_can_be_exported(project: Path, tmp_path: Path):
    @wink.tool(reach="read")
    def export(*, context: wink.ToolContext) -> str:
        """Export the run that makes this call."""
        (path,) = (location_of(project) / "runs").glob("*.jsonl")
        return str(export_run(project, Run(path), tmp_path / "run.html").calls)

    scripted_run(project, [*TURNS[:2], calls(("export", {})), "Done."], tools=[export])

    assert len([key for key in values(tmp_path / "run.html") if "/calls/" in key]) == 2


def test_numbers_that_json_does_not_have_are_texts(project: Path, tmp_path: Path):
    @wink.tool(reach="read")
    def measure(*, context: wink.ToolContext) -> list[float]:
        """Return odd numbers."""
        return [float("nan"), float("inf"), 1.5]

    run = scripted_run(project, [calls(("measure", {})), "Done."], tools=[measure])

    page = export_run(project, run, tmp_path / "run.html").path

    def refuse(number: str) -> None:
        raise AssertionError(f"{number} is no JSON")

    for each in Parsed(page).data["blocks"]:
        json.loads(gzip.decompress(base64.b64decode(each)), parse_constant=refuse)
    assert values(page)[f"runs/{run.id}/calls/1"]["value"][2] == 1.5


def test_two_exports_of_one_run_are_equal(project: Path, tmp_path: Path):
    run = scripted_run(project, TURNS)

    one, two = (export_run(project, run, tmp_path / name).path for name in ("1.html", "2.html"))

    assert one.read_bytes() == two.read_bytes()


# Hostile content

HOSTILE = "</script><script>window.hacked=1</script><!--<img src=x onerror=hacked=1>\u2028\u2029"


def hostile_run(project: Path) -> Run:
    name = "<img src=x onerror=hacked=1>.txt"
    (project / name).write_text(HOSTILE)
    (project / os.fsdecode(b"not-\xff-utf8.txt")).write_text("x")

    @wink.tool(reach="reversible")
    def echo(text: str, *, context: wink.ToolContext) -> str:
        """Return a text."""
        context.filesystem.write(name, f"{text}\n{text}\n")
        return text

    turns = [
        calls(("echo", {"text": HOSTILE}), (HOSTILE, {HOSTILE: HOSTILE}), text=HOSTILE),
        HOSTILE,
    ]
    return scripted_run(project, turns, message=HOSTILE, tools=[echo])


def test_hostile_content_cannot_leave_its_element(project: Path, tmp_path: Path):
    run = hostile_run(project)

    page = export_run(project, run, tmp_path / "run.html").path

    parsed = Parsed(page)
    tags = [tag for tag, _ in parsed.elements]
    assert sorted(set(tags)) == [
        "body", "div", "head", "html", "link", "meta", "noscript", "script", "style", "title"
    ]  # fmt: skip
    assert tags.count("script") == 3
    assert "hacked=" not in page.read_text("utf-8")  # the data are packed
    assert not re.search("[<>\u2028\u2029]", parsed.scripts[0])
    assert HOSTILE in json.dumps(values(page), ensure_ascii=False)


def test_only_the_script_and_the_style_of_the_page_may_run(project: Path, tmp_path: Path):
    page = Parsed(export_run(project, scripted_run(project, TURNS), tmp_path / "run.html").path)

    def named(text: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    (style,) = page.styles
    assert page.policy == (
        f"default-src 'none'; script-src {named(page.scripts[1])}; style-src {named(style)}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    assert "unsafe" not in page.policy
    asked = [attrs[name] for _, attrs in page.elements for name in ("src", "href") if name in attrs]
    assert asked == ["data:,"]
    assert [attrs.get("type") for tag, attrs in page.elements if tag == "script"] == [
        "application/json", "module", "text/plain"
    ]  # fmt: skip


def test_a_script_that_names_its_own_end_is_inlined_whole(project: Path, tmp_path: Path):
    static = tmp_path / "static"
    shutil.copytree(STATIC, static)
    (static / "app.js").write_text('const end = "</Script><!--"; const x = 1;\n')
    run = scripted_run(project, ["Done."])

    page = Parsed(export_run(project, run, tmp_path / "run.html", static=static).path)

    assert page.scripts[1] == 'const end = "<\\/Script><\\!--"; const x = 1;\n'


def test_a_folder_without_the_page_is_refused(project: Path, tmp_path: Path):
    static = tmp_path / "static"
    shutil.copytree(STATIC, static)
    (static / "index.html").write_text("<html><head></head><body></body></html>")

    with pytest.raises(ExportRefused, match="does not have the page"):
        export_run(project, scripted_run(project, ["Done."]), tmp_path / "x.html", static=static)


@pytest.mark.heavy
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_a_browser_shows_hostile_content_as_text_and_asks_for_nothing(
    project: Path, tmp_path: Path
):
    from playwright.sync_api import sync_playwright

    run = hostile_run(project)
    page_file = export_run(project, run, tmp_path / "run.html").path
    asked, problems = list[str](), list[str]()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_context(offline=True).new_page()
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda said: problems.append(said.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto(page_file.as_uri())
        page.get_by_text("window.hacked=1").first.wait_for()
        hacked = page.evaluate("window.hacked")
        browser.close()

    assert hacked is None
    assert [url for url in asked if not url.startswith("data:")] == [page_file.as_uri()]
    assert problems == []


# Secrets


def test_a_secret_is_nowhere_in_the_file(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("SHOP_API_KEY", SECRET)
    (project / ".env").write_text(f"KEY={SECRET}\n")
    (project / f"{SECRET}.txt").write_text(f"a\n{SECRET}\nb\n")

    @wink.tool(reach="reversible")
    def login(key: str, *, context: wink.ToolContext) -> dict[str, str]:
        """Write the key to several places."""
        context.filesystem.write("app.py", f"key = '{key}'\nport = 80\n")
        context.filesystem.write(f"{SECRET}.txt", f"a\nb\n{key}\n")
        return {key: f"logged in with {key}"}

    text = "x" * 390 + f" {SECRET} and more"  # lists cut it in the middle of the secret
    turns = [
        calls(("setup_plan", {"objective": SECRET, "steps": [SECRET]})),
        calls(("login", {"key": SECRET}), ("nosuch", {"a": "y" * 60 + SECRET}), text=text),
        calls(("read_file", {"path": "app.py"}), ("read_file", {"path": f"no/{SECRET}"})),
        f"I used {SECRET}",
    ]
    run = scripted_run(project, turns, message=text, tools=[login])

    page = export_run(project, run, tmp_path / "run.html").path

    found = values(page)
    everything = page.read_text("utf-8") + json.dumps(found) + unquote(" ".join(found))
    assert SECRET not in everything
    assert SECRET[:6] not in everything
    assert "(the key)" in everything
    versions = found[f"runs/{run.id}/versions?path=(the%20key).txt"]
    assert lines_at_end(versions) == ["a\n", "b\n", "(the key)\n"]


@pytest.mark.parametrize(
    "secret",
    [
        "ghp_0123456789abcdefghijABCDEFGHIJ012345",
        "sk-proj-0123456789abcdefghijABCDEFGHIJ",
        "AKIAIOSFODNN7EXAMPLE",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.c2lnbmF0dXJl",
    ],
)
def test_what_looks_like_a_key_is_not_exported(project: Path, tmp_path: Path, secret: str):
    edit = {"path": "app.py", "old_string": "80", "new_string": f"80  # {secret}"}
    turns = [TURNS[1], calls(("edit_file", edit), text=f"With {secret}"), "Done."]

    page = export_run(project, scripted_run(project, turns), tmp_path / "run.html").path

    assert secret not in json.dumps(values(page))


def test_a_private_key_is_replaced_without_moving_other_lines(project: Path, tmp_path: Path):
    key = "-----BEGIN PRIVATE KEY-----\nMIIB\nVgIB\n-----END PRIVATE KEY-----\n"
    turns = [calls(("write_file", {"path": "k.pem", "content": f"a\n{key}b\n"})), "Done."]
    run = scripted_run(project, turns)

    found = values(export_run(project, run, tmp_path / "run.html").path)

    assert "MIIB" not in json.dumps(found)
    lines = lines_at_end(found[f"runs/{run.id}/versions?path=k.pem"])
    assert lines is not None
    assert (len(lines), lines[0], lines[-1]) == (6, "a\n", "b\n")


@pytest.mark.parametrize("changed_only", [False, True])
def test_no_part_of_a_private_key_is_exported(project: Path, tmp_path: Path, changed_only: bool):
    """Not as numbered lines, not in a diff, and not a part of a line."""
    start = bytes.fromhex("308204bd020100300d06092a864886f70d0101010500048204a7")
    data = base64.b64encode(start + random.Random(32).randbytes(1190)).decode()
    lines = textwrap.wrap(data, 64)
    key = "\n".join(["-----BEGIN PRIVATE KEY-----", *lines, "-----END PRIVATE KEY-----", ""])
    image = base64.b64encode(random.Random(33).randbytes(3000)).decode()
    (project / "k.pem").write_text(f"the key\n{key}")
    (project / "logo.txt").write_text(image)
    edit = {"path": "k.pem", "old_string": lines[9][:20], "new_string": "AAAA"}
    turns = [
        calls(("read_file", {"path": "k.pem"}), ("read_file", {"path": "logo.txt"})),
        calls(("read_file", {"path": "k.pem", "offset": 5, "limit": 4}), ("edit_file", edit)),
        calls(("grep_files", {"pattern": re.escape(lines[7][:8])})),
        f"It contains {lines[12][10:40]}, I think.",
    ]
    run = scripted_run(project, turns)

    page = export_run(project, run, tmp_path / "run.html", changed_only=changed_only).path

    found = json.dumps(values(page))
    parts = (data[at : at + 16] for at in range(64, len(data) - 16))
    assert [part for part in parts if part in found] == []
    assert image[:1000] in found  # a long line is cut when it is read
    versions = values(page)[f"runs/{run.id}/versions?path=k.pem"]
    shown = lines_at_end(versions)
    assert shown is not None
    assert (len(shown), shown[0]) == (len(lines) + 3, "the key\n")


# Sizes


def test_the_largest_values_are_left_out_and_the_place_says_so(project: Path, tmp_path: Path):
    noise = {n: "".join(hashlib.sha256(f"{n}{i}".encode()).hexdigest() + "\n" for i in range(size))
             for n, size in enumerate((1000, 1500, 700))}  # fmt: skip
    (project / "unchanged.txt").write_text(noise[0])
    turns = [
        calls(*(("write_file", {"path": f"{n}.txt", "content": noise[n]}) for n in (0, 1, 2))),
        "Done.",
    ]
    run = scripted_run(project, turns)
    whole = export_run(project, run, tmp_path / "whole.html")

    some = export_run(project, run, tmp_path / "some.html", max_size=whole.size - 60_000)
    page = Page.of(STATIC)
    room = len(page.start) + len(page.end) + 80_000
    less = export_run(project, run, tmp_path / "less.html", max_size=room)

    start = f"runs/{run.id}"
    assert whole.note == ""
    assert some.size <= whole.size - 60_000
    assert some.note == Parsed(some.path).data["note"]
    assert some.note == "4 unchanged files; 1 changed file"
    assert less.size <= room
    found = values(some.path)
    assert f"{start}/versions?path=unchanged.txt" not in found
    left_out = found[f"{start}/versions?path=1.txt"]
    assert (left_out["base"], left_out["note"]) == (None, "left out of this export")
    assert [(step["edits"], step["note"]) for step in left_out["steps"]] == [
        (None, "left out of this export")
    ]
    assert lines_at_end(found[f"{start}/versions?path=2.txt"]) == lines_of(noise[2])
    assert "call" in less.note
    call = values(less.path)[f"{start}/calls/2"]  # the largest
    assert call["arguments"] == "left out of this export"
    assert call["notes"] == ["the details of this call are left out of this export"]


def test_a_long_text_is_cut_with_a_note(project: Path, tmp_path: Path):
    @wink.tool(reach="read")
    def long(*, context: wink.ToolContext) -> str:
        """Return much."""
        return "x" * 150_000

    run = scripted_run(project, [calls(("long", {})), "Done."], tools=[long])

    done = export_run(project, run, tmp_path / "run.html")

    call = values(done.path)[f"runs/{run.id}/calls/1"]
    assert "of more than 100,000 characters: only their beginning" in done.note
    assert call["value"].endswith("\n… 50000 more characters left out of this export")


def test_a_run_that_cannot_fit_is_refused_and_leaves_nothing(project: Path, tmp_path: Path):
    run, target = scripted_run(project, TURNS), tmp_path / "out" / "run.html"
    target.parent.mkdir()

    with pytest.raises(ExportRefused, match=r"not even a list of the calls .* --max-size"):
        export_run(project, run, target, max_size=50_000)

    assert list(target.parent.iterdir()) == []


# The file


def test_an_existing_file_is_kept_unless_it_is_to_be_replaced(project: Path, tmp_path: Path):
    run, target = scripted_run(project, TURNS), tmp_path / "out" / "run.html"
    target.parent.mkdir()
    target.write_text("mine")

    with pytest.raises(ExportRefused, match="exists; name another file, or use --force"):
        export_run(project, run, target)
    with pytest.raises(ExportRefused, match="not even a list"):
        export_run(project, run, target, force=True, max_size=1)
    assert target.read_text() == "mine"

    export_run(project, run, target, force=True)
    assert Parsed(target).data["version"] == 1
    assert list(target.parent.iterdir()) == [target]
    assert target.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("force", [False, True])
def test_a_directory_is_never_replaced(project: Path, tmp_path: Path, force: bool):
    with pytest.raises(ExportRefused, match="is a directory; name a file"):
        export_run(project, scripted_run(project, ["Done."]), tmp_path, force=force)
