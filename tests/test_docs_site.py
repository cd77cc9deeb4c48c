"""The documentation site builds, holds every public name and page, and fetches nothing."""

from __future__ import annotations

import base64
import gzip
import importlib
import importlib.util
import json
import os
import pkgutil
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer.main

import weakincentives
from weakincentives.cli.entry import main, make_app

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in DOCS.rglob("*.md"))
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
PATIENCE = 240_000
"""Milliseconds for what is sure to come: the machine may be busy."""
OUTSIDE = ["CHANGELOG.md", "benchmarks/README.md"]

PUBLIC = [
    "weakincentives.adapters",
    "weakincentives.core.budget",
    "weakincentives.core.clock",
    "weakincentives.contrib.databases",
    "weakincentives.contrib.tools",
    "weakincentives.dbc",
    "weakincentives.core.deadlines",
    "weakincentives.debugger",
    "weakincentives.durable",
    "weakincentives.errors",
    "weakincentives.filesystem",
    "weakincentives.integrations",
    "weakincentives.log",
    "weakincentives.mcp",
    "weakincentives.prompt",
    "weakincentives.resources",
    "weakincentives.retry",
    "weakincentives.runtime",
    "weakincentives.runtime.stores",
    "weakincentives.serde",
    "weakincentives.telemetry",
    "weakincentives.testing",
]


# Building it takes as long as 1,000 tests; what the pages say and link to is tested without it.
@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built with every warning an error."""
    built = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(built)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return built


def html(site: Path, page: str) -> str:
    return (site / page).read_text()


# The site


@pytest.mark.heavy
@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_in_the_api_reference(site: Path, name: str):
    module = importlib.import_module(name)
    ids = {
        found
        for page in site.glob("api/*.html")
        for found in re.findall(r'id="(weakincentives[^"]*)"', page.read_text())
    }

    missing = [each for each in module.__all__ if not _places(name, each) & ids]

    assert missing == [], f"no docstring, or hidden by a module of the same name, in {name}"


def test_the_api_reference_is_readable_as_markdown_without_the_site():
    """With the signatures and docstrings of every public name."""
    done = subprocess.run(
        [sys.executable, str(DOCS / "api_markdown.py")], capture_output=True, text=True, check=True
    )
    pages = dict(re.findall(r"(?ms)^# (weakincentives[\w.]*)\n(.*?)(?=^# weak|\Z)", done.stdout))

    for name in PUBLIC:
        exported = importlib.import_module(name).__all__
        missing = [each for each in exported if f"\n## {each}\n" not in pages[name]]
        assert missing == [], name
    assert "def execute(statement: str, parameters: Parameters = (), /) -> Rows" in done.stdout
    assert "Run one statement in the call's transaction and return its rows." in done.stdout


def _places(package: str, name: str) -> set[str]:
    """Return where the reference may have a name: in its package, or where it is defined."""
    defined = getattr(getattr(importlib.import_module(package), name), "__module__", package)
    return {f"{package}.{name}", f"{defined}.{name}"}


@pytest.mark.heavy
def test_the_names_of_the_root_lead_to_where_they_are_described(site: Path):
    linked = re.findall(
        r'href="[\w/.]*#weakincentives[\w.]*"><code>(\w+)<', html(site, "api/index.html")
    )

    assert set(linked) >= set(weakincentives.__all__)


def test_every_package_has_a_page_in_the_api_reference():
    packages = [
        module.name
        for module in pkgutil.walk_packages(weakincentives.__path__, "weakincentives.")
        if module.ispkg
    ]

    assert {name for name in packages if importlib.import_module(name).__all__} <= set(PUBLIC)


@pytest.mark.heavy
def test_nothing_is_fetched_from_elsewhere(site: Path):
    fetched = [
        (page.name, found)
        for page in site.rglob("*.html")
        for found in re.findall(
            r'<(?:script|img|iframe|link|source)\b[^>]*(?:src|href)="((?:https?:)?//[^"]*)"',
            page.read_text(),
        )
    ]
    styled = [
        path.name
        for path in site.rglob("*.css")
        if re.search(r"url\(['\"]?https?:", path.read_text())
    ]

    assert (fetched, styled) == ([], [])


@pytest.mark.heavy
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_the_search_works_on_pages_opened_from_the_disk(site: Path):
    from playwright.sync_api import sync_playwright

    asked: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox"], timeout=PATIENCE
        )
        page = browser.new_page()
        page.set_default_timeout(PATIENCE)
        page.on("request", lambda request: asked.append(request.url))
        page.goto((site / "api" / "prompt.html").as_uri())
        page.click("input[name=query]")
        page.keyboard.type("fencing")
        # What is found changes with every letter.
        found = page.locator(".md-search-result__list", has_text="Timeouts and fencing")
        found.wait_for()
        browser.close()

    assert [url for url in asked if not url.startswith(("file:", "data:", "about:"))] == []


@pytest.mark.heavy
def test_the_recorded_run_names_no_path_of_the_repository(site: Path):
    """Which would be a path of the machine that built the site, as the model's name was."""
    found = re.search(r'id="wink-data">(.*?)</script>', html(site, "recorded_run.html"), re.DOTALL)
    assert found is not None
    blocks = json.loads(found[1])["blocks"]
    told = b"".join(gzip.decompress(base64.b64decode(block)) for block in blocks).decode()

    assert "scripted:demo.json" in told
    assert str(ROOT) not in told


def test_pictures_fetch_nothing():
    pictures = [*DOCS.rglob("*.svg"), *(ROOT / "benchmarks").glob("*.svg")]

    assert pictures
    for picture in pictures:
        assert not re.search(r"(?:href=|url\()['\"]?https?:", picture.read_text()), picture.name


# What was measured


@pytest.fixture(scope="module")
def results() -> dict:
    return json.loads((ROOT / "benchmarks" / "results.json").read_text())


@pytest.fixture(scope="module")
def drawing() -> ModuleType:
    """The script that draws the pictures of performance."""
    spec = importlib.util.spec_from_file_location("draw_performance", DOCS / "draw_performance.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pictures_and_table_of_performance_show_what_was_measured(drawing, results):
    """`make bench` writes them."""
    page = (DOCS / "performance.md").read_text()

    assert {path.name: path.read_text() for path in (DOCS / "plots").iterdir()} == drawing.plots(
        results
    )
    assert page == drawing.with_table(page, results)


def test_the_readme_compares_what_was_measured(drawing, results):
    """`make bench` writes them."""
    readme = (ROOT / "README.md").read_text()

    assert readme == drawing.with_comparison(readme, results)


def test_the_readme_shows_what_is_left_of_each_accident():
    """`benchmarks/disasters/run.py` writes the results and the table."""
    script = ROOT / "benchmarks" / "disasters" / "run.py"
    told = subprocess.run(
        [sys.executable, str(script), "--print"], capture_output=True, text=True, check=True
    )

    assert told.stdout.startswith("| accident | WINK")
    assert told.stdout in (ROOT / "README.md").read_text()


def test_the_readme_has_a_row_for_each_measured_comparison(drawing, results):
    """Without one, its figures would silently stay as they are."""
    other = json.loads(json.dumps(results))
    for row in other["ours"]["disk"]["rows"]:
        for each in ("roll_back", "commit"):
            if each in row:
                row[each]["wall_p10"] *= 10
    for entry in (*other["peers"].values(), *other["ours"].values()):
        for row in entry.get("rows", ()):
            for figure in ("cpu", "over_bare"):
                if figure in row:
                    row[figure] *= 10
    readme = (ROOT / "README.md").read_text()

    changed = drawing.with_comparison(readme, other)

    lines = zip(readme.splitlines(), changed.splitlines(), strict=True)
    assert sum(old != new for old, new in lines) == 3


# Links


@pytest.mark.parametrize("page", ["README.md", *OUTSIDE, "llms.txt", *PAGES])
def test_links_lead_to_files_of_the_repository(page: str):
    """On a page that shows the files as they are; that the site's links work, its build checks."""
    text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    links = re.findall(r"\]\(([^)\s#]+)(?:#[^)]*)?\)", re.sub(r"`[^`\n]*`", "", text))

    broken = [
        link
        for link in links
        if ":" not in link and not (ROOT / page).parent.joinpath(link).exists()
    ]

    assert broken == []


# llms.txt


def test_llms_txt_names_every_page_and_no_other():
    named = re.findall(
        r"^- \[[^\]]+\]\(([^)]+)\): \S", (ROOT / "llms.txt").read_text(), re.MULTILINE
    )

    assert sorted(named) == sorted([*PAGES, *OUTSIDE])


def test_llms_txt_names_every_extra_and_no_other():
    line = next(each for each in (ROOT / "llms.txt").read_text().splitlines() if "Extras: " in each)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    own = set(extras["optional-dependencies"]) - {"dev", "tests", "vendors"}

    assert set(re.findall(r"`([a-z-]+)`", line.partition("Extras: ")[2])) == own


def test_how_to_install_it_is_written_once():
    pages = ["README.md", "llms.txt", *PAGES]
    found = [page for page in pages if "-m venv" in (ROOT / page).read_text()]

    assert found == ["README.md"]


def test_llms_txt_starts_as_the_home_page_does():
    """The home page's example is run with the others."""
    blocks = [
        re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
        for page in ("llms.txt", "docs/index.md")
    ]

    assert len(blocks[0]) == 1
    assert blocks[0] == blocks[1]


@pytest.mark.heavy
def test_the_site_serves_both_maps_with_links_that_work_there(site: Path):
    named = re.findall(r"^- \[[^\]]+\]\(([^)]+)\)", html(site, "llms.txt"), re.MULTILINE)

    assert len(named) == len(PAGES) + len(OUTSIDE)
    assert [name for name in named if not (site / name).is_file()] == []
    assert all((ROOT / page).read_text() in html(site, "llms-full.txt") for page in PAGES)


# Evidence

NAMED_TEST = re.compile(r"`([\w/]+\.py)::(\w+)`")


def section_of(page: str, title: str) -> str:
    """The text below a heading, up to the next of its level."""
    text = (DOCS / page).read_text()
    return re.split(r"^## ", text.split(f"\n## {title}\n")[1], flags=re.MULTILINE)[0]


def test_every_test_that_is_named_exists():
    named = set(NAMED_TEST.findall((DOCS / "evidence.md").read_text()))

    missing = [
        f"{file}::{name}"
        for file, name in sorted(named)
        if not (ROOT / "tests" / file).is_file()
        or not re.search(
            rf"^ *(?:async def|def|class) {name}\b|^{name} = ",
            (ROOT / "tests" / file).read_text(),
            re.MULTILINE,
        )
    ]

    assert named
    assert missing == []


def test_tests_are_named_on_one_page():
    pages = [page for page in DOCS.rglob("*.md") if NAMED_TEST.search(page.read_text())]

    assert pages == [DOCS / "evidence.md"]


@pytest.mark.parametrize(
    ("page", "title", "proofs"),
    [
        ("guarantees.md", "What is guaranteed", "Guarantees"),
        ("security.md", "Threats", "Threats"),
    ],
)
def test_every_promise_names_the_tests_that_prove_it(page: str, title: str, proofs: str):
    """One row with its number, one point on the page of evidence with the tests of that number."""
    table = section_of(page, title)
    rows = re.findall(r"^\| (\d+) \|", table, re.MULTILINE)
    points = re.split(r"^(\d+)\. ", section_of("evidence.md", proofs), flags=re.MULTILINE)[1:]

    assert rows == [str(n) for n in range(1, len(rows) + 1)]
    assert len(re.findall(r"^\|", table, re.MULTILINE)) == len(rows) + 2, "a row without a number"
    assert points[::2] == rows
    assert all(NAMED_TEST.search(point) for point in points[1::2])


def test_every_section_about_the_disk_names_the_tests_that_prove_it():
    titles = re.findall(r"^## (.+)$", (DOCS / "disk.md").read_text(), re.MULTILINE)
    proofs = section_of("evidence.md", "Files on disk")
    points = re.split(r"^- ([^:`]+): ", proofs, flags=re.MULTILINE)

    assert points[1::2] == [*titles, "Limits"]
    assert all(NAMED_TEST.search(point) for point in points[2::2])


# Commands


def commands() -> Iterator[tuple[str, str]]:
    """Every `wink …` in a shell block of README.md, llms.txt and the pages."""
    for page in ["README.md", "llms.txt", *PAGES]:
        text = (ROOT / page).read_text()
        for block in re.findall(
            r"^```(?:sh|console|bash)\n(.*?)^```", text, re.MULTILINE | re.DOTALL
        ):
            for line in block.replace("\\\n", " ").splitlines():
                if found := re.match(r"(?:\$ )?(?:[A-Z_]+=\S+ )*(wink\b.*)", line):
                    yield page, found.group(1)


@pytest.mark.parametrize(("page", "line"), list(commands()))
def test_a_command_that_is_shown_can_be_given(page: str, line: str):
    """Its name, its flags and their values are what the command line takes; nothing is run."""
    words = shlex.split(re.split(r" [|>&]|;", line)[0], comments=True)[1:]
    command = typer.main.get_command(make_app())
    if not words or {flag for option in command.params for flag in option.opts} & set(words):
        return  # it acts while it is read: --install-completion would write to the user's files
    context = command.make_context("wink", words)
    while hasattr(command, "resolve_command"):
        rest = [*context._protected_args, *context.args]
        assert rest, f"{page}: {line} names no command"
        name, command, rest = command.resolve_command(context, rest)
        context = command.make_context(name, rest, parent=context)


def helps() -> Iterator[tuple[str, str]]:
    """Every command with its help."""
    waiting: list[tuple[str, Any]] = [("wink", typer.main.get_command(make_app()))]
    while waiting:
        name, command = waiting.pop()
        with command.make_context(name, [], resilient_parsing=True) as context:
            yield name, command.get_usage(context) + command.get_help(context)
            yield name, str(command.epilog or "")
        waiting += [
            (f"{name} {sub}", each) for sub, each in getattr(command, "commands", {}).items()
        ]


@pytest.mark.parametrize(("name", "text"), list(helps()))
def test_help_names_pages_by_their_titles(name: str, text: str):
    """Who has installed a wheel has no docs/; the titles are the headings of the site."""
    titles = [
        title
        for page in PAGES
        for title in re.findall(r"^##? (.+)$", (ROOT / page).read_text(), re.MULTILINE)
    ]
    told = " ".join(text.partition("In the documentation:")[2].split())  # help wraps lines
    named = re.findall(r'"([^"]+)"', told)

    assert re.findall(r"\S+\.md\b", text) == []
    assert set(named) <= set(titles)
    assert named or "In the documentation" not in text
    assert "[[" not in text, f"{name}: what is optional has one pair of brackets"


@pytest.mark.parametrize("page", ["README.md", "docs/index.md", "docs/tutorial.md"])
def test_examples_that_work_as_intended_print_no_traceback(page: str):
    """A newcomer who pastes them sees what they print, and nothing on standard error."""
    opening, closing = r"(?:```python|<!--- invisible-code-block: python)", r"(?:```|-->)"
    blocks = re.findall(
        rf"^{opening}\n(.*?)^{closing}", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL
    )

    done = subprocess.run(
        [sys.executable, "-c", "\n".join(blocks)], capture_output=True, text=True, check=False
    )

    assert (done.returncode, done.stderr) == (0, "")


def test_an_agent_of_wink_goes_as_the_readme_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Its commands on a directory, one after the other, with a script in place of the model."""
    project = tmp_path / "my-project"
    project.mkdir()
    (project / "app.py").write_text("port = 80\n")
    edit = {"path": "app.py", "old_string": "80", "new_string": "8080"}
    script = [{"call": [{"read_file": {"path": "app.py"}}]}, {"call": [{"edit_file": edit}]}]
    (tmp_path / "script.json").write_text(json.dumps([*script, {"say": "Done."}]))
    monkeypatch.chdir(project)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WINK_SUITES", "files")
    readme = (ROOT / "README.md").read_text()
    section = readme.split("## Let WINK run the agent")[1].split("**Best of N**")[0]

    seen = []
    stdin = open(os.devnull)  # noqa: SIM115  # the chat has nothing to say
    monkeypatch.setattr("sys.stdin", stdin)
    for line in re.findall(r"^wink (?!demo|doctor|mcp|debug).*", section, re.MULTILINE):
        words = line.replace("openai:gpt-5-mini", f"scripted:{tmp_path / 'script.json'}")
        with pytest.raises(SystemExit) as end:
            main(shlex.split(words, comments=True)[1:])
        shown = "+port = 8080" in capsys.readouterr().out
        seen.append((line.split()[1], end.value.code, shown, (project / "app.py").read_text()))

    before, after = "port = 80\n", "port = 8080\n"
    assert seen == [
        ("run", 0, True, before),  # --dry-run
        ("run", 0, False, after),
        ("log", 0, False, after),
        ("diff", 0, True, after),
        ("undo", 0, False, before),
        ("chat", 0, False, before),
    ]
    stdin.close()
