"""What objects look like where they are printed, and in a notebook."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import weakincentives as wink
from weakincentives.adapters import OpenAIAdapter, ScriptedAdapter
from weakincentives.filesystem import HostFilesystem, MemoryFilesystem
from weakincentives.prompt import MarkdownSection, Prompt, PromptTemplate


@wink.tool(reach="reversible")
def write(path: str, text: str, *, context: wink.ToolContext) -> str:
    """Write a file."""
    context.filesystem.write(path, text)
    if "fail" in text:
        raise ValueError("no <b>bold</b> text")
    return f"Wrote {path}"


def test_a_result_is_shown_with_its_diff(tmp_path: Path):
    (tmp_path / "a.txt").write_text("one\n")
    with wink.ToolRegistry([write], workspace=tmp_path) as tools:
        done = tools.execute("write", {"path": "a.txt", "text": "<two>\n"})

        page = done._repr_html_()
        assert "<b>write</b>" in page
        assert "success" in page
        assert "Wrote a.txt" in page
        assert ">-one</span>" in page
        assert ">+&lt;two&gt;</span>" in page
        assert done.diff == tools.workspace.diff(done.call_id)
    assert "success" in done._repr_html_()  # also when the directory is closed


def test_a_failed_result_says_what_was_rolled_back_and_nothing_in_it_acts(tmp_path: Path):
    with wink.ToolRegistry([write], workspace=tmp_path) as tools:
        failed = tools.execute("write", {"path": "a.txt", "text": "fail"})

    page = failed._repr_html_()
    assert "failed (VALIDATION_FAILED)" in page
    assert "Rolled back: " in page
    assert "no &lt;b&gt;bold&lt;/b&gt; text" in page
    assert failed.diff == ""


def test_a_result_that_belongs_to_no_workspace_has_no_diff():
    assert wink.ToolResult.ok("x", "done").diff == ""
    assert "done" in wink.ToolResult.ok("x", "done")._repr_html_()


def test_a_result_says_what_differs_from_a_plain_success():
    assert repr(wink.ToolResult.ok(3, "Three")) == "ToolResult('Three', value=3)"
    failed = wink.ToolResult.error("no", code="DENIED")
    assert repr(failed) == "ToolResult('no', success=False, code='DENIED')"


def test_the_rest_say_what_they_are(tmp_path: Path):
    @dataclass(frozen=True)
    class Step:
        name: str

    session = wink.Session(session_id="0123456789abcdef")
    assert repr(session) == "<Session 0123456789abcdef>"
    session[Step].append(Step("a"))
    assert repr(session) == "<Session 0123456789abcdef: Step: 1>"
    section = MarkdownSection(title="Writing", tools=[write])
    assert repr(section) == "<MarkdownSection 'writing', tools: write>"
    template = PromptTemplate(ns="docs", key="writer", sections=[section])
    assert repr(template) == "<PromptTemplate docs/writer: writing>"
    assert repr(Prompt(template)) == "<Prompt of <PromptTemplate docs/writer: writing>>"
    assert repr(MemoryFilesystem({"b/c": "", "a.txt": ""})) == "<MemoryFilesystem: a.txt, b>"
    many = MemoryFilesystem([f"f{n}" for n in range(10)])
    assert repr(many).endswith("f7 and 2 more>")
    with HostFilesystem(tmp_path) as files:
        assert repr(files) == f"<HostFilesystem {tmp_path}>"
        assert repr(files.fork_in_place()) == f"<view of HostFilesystem {tmp_path}>"
    assert repr(ScriptedAdapter(["x"])) == "<ScriptedAdapter>"
    assert repr(OpenAIAdapter(model="m", api_key="secret")) == "<OpenAIAdapter m>"
