"""Brings what lies beside docs/ into the site, mends the links between the two, and shows examples.

Links are written so that they lead somewhere on a page that shows the repository's files. What the
site has a page for is linked there; what it has not (source files) keeps its words without a link.
"""

from __future__ import annotations

import os
import posixpath
import re
import shutil
import subprocess
import sys
import tempfile
from html import escape
from pathlib import Path
from typing import Any

from markdown import Extension, Markdown
from markdown.preprocessors import Preprocessor
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from typer import Context
from typer.main import get_command

from weakincentives import __version__
from weakincentives.cli.entry import SECTIONS, make_app
from weakincentives.contrib.tools import find_sandbox
from weakincentives.errors import SandboxUnavailable

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "src" / "weakincentives" / "cli" / "demo_project"
PAGES = {
    "CHANGELOG.md": "changelog.md",
    "benchmarks/README.md": "benchmarks.md",
}
"""Pages of the site that are written elsewhere in the repository, and how they are called here."""
PICTURES = ["benchmarks/growth.svg", "benchmarks/disk.svg"]

WIDTH = 88
"""Characters of a line of help."""
RECORDED = "recorded_run.html"
"""A run to click through: what the demo does, as `wink export` writes it."""
COMMANDS = "commands.md"
"""All commands, as `--help` describes them."""

FENCED = re.compile(r"(^```.*?^```[^\n]*$)", re.MULTILINE | re.DOTALL)
NAMED = re.compile(r"\]\(([\w/]+\.md)\)")
TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
HEAD = re.compile(r"<th(?:\s[^>]*)?>(.*?)</th>", re.DOTALL)
ALERT = re.compile(r"^> \[!(NOTE|TIP|WARNING)\]\n((?:>.*(?:\n|$))+)", re.MULTILINE)
INSTALL = re.compile(r"<!-- install: [^>]* -->(.*?)<!-- end of install -->", re.DOTALL)
LINK = re.compile(r"\[([^\]\n]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")


def on_config(config: MkDocsConfig) -> None:
    """Show the examples in docstrings as code, and the version at the foot of each page."""
    config.markdown_extensions.append(Doctests())
    config.copyright = f"WINK {__version__} · Apache-2.0"


class Doctests(Extension):
    """Without it, Markdown takes `>>>` for a quotation in a quotation in a quotation."""

    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802  # Markdown's own name
        md.preprocessors.register(_FenceDoctests(md), "doctests", 35)  # before fences are read


class _FenceDoctests(Preprocessor):
    def run(self, lines: list[str]) -> list[str]:
        text = re.sub(r"(?m)^>>> (?:.+\n?)+", _fenced, "\n".join(lines))
        return text.split("\n")


def _fenced(example: re.Match[str]) -> str:
    return f"```pycon\n{example.group().rstrip()}\n```\n"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages and pictures from outside of docs/, and llms.txt in two lengths."""
    for source, name in PAGES.items():
        files.append(File.generated(config, name, content=(ROOT / source).read_text()))
    for picture in PICTURES:
        name = posixpath.basename(picture)
        files.append(File.generated(config, name, content=(ROOT / picture).read_text()))
    index = (ROOT / "llms.txt").read_text()
    short = NAMED.sub(lambda link: f"]({_on_site(link.group(1))[:-3]}.html)", index)
    whole = [index, *((ROOT / name).read_text() for name in NAMED.findall(index))]
    files.append(File.generated(config, RECORDED, content=_recorded_run()))
    files.append(File.generated(config, COMMANDS, content=_commands()))
    files.append(File.generated(config, "llms.txt", content=short))
    files.append(File.generated(config, "llms-full.txt", content="\n\n---\n\n".join(whole)))
    return files


def _recorded_run() -> bytes:
    wink = [sys.executable, "-P", "-m", "weakincentives.cli"]
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "XDG_STATE_HOME": f"{folder}/state"}
        # By its name in the folder: the page shows the model, and the default is an absolute path.
        shutil.copy(DEMO / "script.json", f"{folder}/demo.json")
        model = ["--model", "scripted:demo.json"]
        try:
            find_sandbox()
        except SandboxUnavailable:
            env["WINK_SANDBOX"] = "none"  # as the demo does for its own script
        for words in (["demo", "--into", "till", *model], ["export", "-w", "till", "-o", RECORDED]):
            subprocess.run([*wink, *words], cwd=folder, env=env, check=True, capture_output=True)
        return Path(folder, RECORDED).read_bytes()


def _commands() -> str:
    program: Any = get_command(make_app())
    parts = [
        "# Commands",
        "As `wink COMMAND --help` prints them; `wink setup` installs them as manual pages.",
    ]
    for section, names in SECTIONS.items():
        parts.append(f"## {section}")
        for name in names:
            group, _, word = name.partition(" ")
            command = program.commands.get(name) or program.commands[group].commands[word]
            context = Context(command, info_name=f"wink {name}", max_content_width=WIDTH)
            parts.append(f"### wink {name}\n\n```text\n{context.get_help().rstrip()}\n```")
    return "\n\n".join([*parts, ""])


def on_post_build(config: MkDocsConfig) -> None:
    """Remove the page for wrong addresses: nothing shows it without a server."""
    Path(config.site_dir, "404.html").unlink(missing_ok=True)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return the page with the links that lead out of docs/ put right."""
    here = page.file.src_uri
    source = next((source for source, name in PAGES.items() if name == here), f"docs/{here}")
    markdown = INSTALL.sub(lambda _: _install(), markdown)
    markdown = ALERT.sub(_admonition, markdown)
    parts = FENCED.split(markdown)
    parts[::2] = [LINK.sub(lambda link: _mended(link, source, here), part) for part in parts[::2]]
    return "".join(parts)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return the page with the head of its column in each cell: a phone shows rows as cards."""
    return TABLE.sub(lambda table: _labelled(table.group()), html)


def _labelled(table: str) -> str:
    heads = [escape(re.sub(r"<[^>]+>", "", each)) for each in HEAD.findall(table)]
    if len(heads) < 3:
        return table
    rows = [_row(each, heads) for each in re.split(r"(?=<tr>)", table)]
    return "".join(rows).replace("<table>", '<table data-cards="">', 1)


def _row(row: str, heads: list[str]) -> str:
    labels = iter(heads)
    return re.sub(r"<td(?=[ >])", lambda _: f'<td data-label="{next(labels, "")}"', row)


def _admonition(alert: re.Match[str]) -> str:
    """Return a note of GitHub's as one of the site's."""
    kind, text = alert.groups()
    lines = [f"    {line[1:].strip()}".rstrip() for line in text.splitlines()]
    return "\n".join([f"!!! {kind.lower()}", "", *lines, ""])


def _install() -> str:
    """Return how to install it: that is written once, in the README."""
    found = INSTALL.search((ROOT / "README.md").read_text())
    assert found is not None
    return found.group(1).strip()


def _mended(link: re.Match[str], source: str, here: str) -> str:
    text, href, anchor = link.group(1), link.group(2), link.group(3) or ""
    target = posixpath.normpath(posixpath.join(posixpath.dirname(source), href))
    if not (ROOT / target).is_file():
        return link.group()
    if not target.startswith("docs/") and target not in PICTURES and target not in PAGES:
        return text
    to = posixpath.relpath(_on_site(target), posixpath.dirname(here) or ".")
    return f"[{text}]({to}{anchor})"


def _on_site(path: str) -> str:
    """Return where a file of the repository lies in the site."""
    if path in PICTURES:
        return posixpath.basename(path)
    return PAGES.get(path, path.removeprefix("docs/"))
