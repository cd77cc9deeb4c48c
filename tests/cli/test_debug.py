"""`wink debug`, `export` and `query`, as a person uses them."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.cookiejar import CookieJar
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import HTTPCookieProcessor, OpenerDirector, Request, build_opener

import pytest
from commands import Wink, make_run
from terminal import WINK, Terminal
from test_history import TURNS, project, wink  # noqa: F401  # fixtures

from weakincentives.runtime.calls import Run


@pytest.fixture
def run(project: Path) -> Run:  # noqa: F811
    return make_run(project, TURNS, "fix the sum")


# debug


@contextmanager
def debugging(
    directory: Path, *arguments: str, **env: str
) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Run `wink debug`; gives the link that it prints, and the process."""
    argv = [*WINK, "debug", *arguments]
    with subprocess.Popen(
        argv, cwd=directory, env={**os.environ, **env}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip(), process
        finally:
            process.kill()


def browser() -> OpenerDirector:
    """A client that keeps cookies, and uses no proxy."""
    return build_opener(HTTPCookieProcessor(CookieJar()))


def refused(client: OpenerDirector, request: str | Request) -> tuple[int, str]:
    with pytest.raises(HTTPError) as raised:
        client.open(request)
    with raised.value as answer:
        return answer.code, answer.read().decode()


def test_the_printed_link_opens_the_page_of_the_run_once(project: Path, run: Run):  # noqa: F811
    client = browser()
    with debugging(project, run.mark, "--no-open") as (link, process):
        base = link.partition("?")[0]
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/[\w-]{20,}/\?token=[\w-]{40,}", link)

        assert refused(browser(), base)[0] == 401
        with client.open(link) as page:
            assert f"url=./#run={run.id}" in page.read().decode()
        with client.open(base) as page:
            assert b'<div id="app">' in page.read()
        with client.open(f"{base}api/workspace") as answer:
            (found,) = json.load(answer)["runs"]
        with client.open(f"{base}app.js") as script:
            assert script.headers["Content-Type"].startswith("text/javascript")
        code, told = refused(browser(), link)
        foreign = Request(f"{base}api/workspace", headers={"Host": "example.org"})

        assert (found["id"], found["calls"], found["title"]) == (run.id, 7, "fix the sum")
        assert code == 401
        assert "<code>wink debug --link</code> prints a new one" in told
        assert refused(client, foreign)[0] == 403
        process.send_signal(signal.SIGINT)
        _, told = process.communicate()
    assert process.returncode == 0
    assert told.splitlines() == [
        "wink: open this link in a browser on this machine; it works once",
        "wink: Ctrl-C ends it",
    ]


def test_another_link_opens_the_page_in_another_browser(
    project: Path,  # noqa: F811
    run: Run,
    wink: Wink,  # noqa: F811
):
    with debugging(project, "--no-open") as (link, process):
        more = wink("debug", run.mark, "--link")
        assert (more.code, more.err) == (0, "")
        other = more.out.strip()
        assert other != link
        for each in (link, other):
            client = browser()
            with client.open(each) as page:
                text = page.read().decode()
            assert f'url=./#run={run.id if each == other else ""}"' in text
            with client.open(f"{each.partition('?')[0]}api/workspace") as answer:
                assert answer.status == 200
        assert refused(browser(), other)[0] == 401
        assert refused(browser(), f"{other[:-1]}{'0' if other[-1] != '0' else '1'}")[0] == 401
        process.kill()
        process.wait()
    assert "no debugger is running" in wink("debug", "--link").err


@pytest.mark.heavy
def test_it_takes_the_named_port_and_refuses_one_that_is_taken(project: Path):  # noqa: F811
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = subprocess.run(
            [*WINK, "debug", "--no-open", "--port", str(port)],
            cwd=project, capture_output=True, text=True, check=False,
        )  # fmt: skip
    with debugging(project, "--no-open", "--port", str(port)) as (link, _):
        assert link.startswith(f"http://127.0.0.1:{port}/")

    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(rf"wink: cannot listen on port {port}: .*; choose another\n", done.stderr)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("env", "opens"),
    [
        ({"DISPLAY": ":0", "SSH_CONNECTION": "", "SSH_TTY": ""}, True),
        ({"DISPLAY": "", "WAYLAND_DISPLAY": "", "SSH_CONNECTION": "", "SSH_TTY": ""}, False),
        ({"DISPLAY": ":0", "SSH_CONNECTION": "10.0.0.1 1 10.0.0.2 22"}, False),
    ],
)
def test_it_opens_the_browser_of_who_sits_before_the_screen(
    project: Path,  # noqa: F811
    tmp_path: Path,
    env: dict[str, str],
    opens: bool,
):
    asked = tmp_path / "asked"
    program = tmp_path / "browser"
    program.write_text(f'#!/bin/sh\nprintf %s "$1" > {asked}.new\nmv {asked}.new {asked}\n')
    program.chmod(0o755)

    with debugging(project, **env, BROWSER=f"{program} %s") as (link, process):
        assert process.stderr is not None
        told = process.stderr.readline()

    assert told == (
        "wink: Ctrl-C ends it\n"
        if opens
        else "wink: open this link in a browser on this machine; it works once\n"
    )
    assert (asked.read_text() if asked.exists() else None) == (link if opens else None)


def test_ctrl_c_in_a_terminal_ends_it_without_a_word(project: Path):  # noqa: F811
    with Terminal([*WINK, "debug", "--no-open"], cwd=project) as terminal:
        terminal.wait_for("Ctrl-C ends it")
        terminal.interrupt()
        assert terminal.end() == 0

    assert "Traceback" not in terminal.text


def test_a_run_that_does_not_exist_is_named(wink: Wink):  # noqa: F811
    done = wink("debug", "nosuch")

    assert done.code == 2
    assert "no run 'nosuch'" in done.err


def test_without_the_extra_one_line_says_what_to_install(project: Path):  # noqa: F811
    program = (
        "import sys; sys.modules['starlette'] = None; sys.argv = ['wink', 'debug', '--no-open'];"
        "from weakincentives.cli.entry import main; main()"
    )

    done = subprocess.run(
        [sys.executable, "-c", program], cwd=project, capture_output=True, text=True, check=False
    )

    assert done.returncode == 2
    assert re.fullmatch(r"wink: starlette is not installed; run: .*pip install .+\n", done.stderr)


# export


def test_a_run_is_written_to_one_file(wink: Wink, run: Run, tmp_path: Path):  # noqa: F811
    target = tmp_path / "run.html"

    done = wink("export", run.mark, "-o", str(target))
    again = wink("export", run.mark, "-o", str(target))
    forced = wink("export", run.mark, "-o", str(target), "--force", "--changed-only")

    assert (done.code, done.err) == (0, "")
    shown = r".*run\.html: \d+(\.\d)? kB, 7 calls, 2 changed files and 1 that it did not change\n"
    assert re.fullmatch(shown, done.out)
    assert (again.code, again.err) == (
        1, f"wink: {target} exists; name another file, or use --force\n"
    )  # fmt: skip
    assert forced.out.endswith(" kB, 7 calls, 2 changed files\n")


def test_what_does_not_fit_is_refused(wink: Wink, run: Run, tmp_path: Path):  # noqa: F811
    done = wink("export", run.mark, "-o", str(tmp_path / "run.html"), "--max-size", "0.1")

    assert done.code == 1
    assert done.err == (
        f"wink: not even a list of the calls of {run.id} fits into 100 kB; use a larger "
        "--max-size\n"
    )
    assert not (tmp_path / "run.html").exists()


# query


def test_a_table_for_people_has_a_line_for_each_row(wink: Wink, run: Run):  # noqa: F811
    done = wink("query", run.mark, "select n, tool, outcome from calls where n > 2 and n < 6")

    assert done == (
        0,
        "n  tool        outcome\n"
        "-  ----------  -----------\n"
        "3  write_file  denied\n"
        "4  edit_file   committed\n"
        "5  edit_file   rolled back\n",
        "",
    )


def test_json_has_an_object_a_line_and_csv_is_exact(wink: Wink, run: Run):  # noqa: F811
    sql = "select path, patch, null as empty, x'00ff' as bytes, 9e999 as big from changes"

    found = [json.loads(line) for line in wink("query", sql, "--json").out.splitlines()]
    table = list(csv.reader(wink("query", "all", sql, "--csv").out.splitlines(True)))

    assert [each["path"] for each in found] == ["src/calc.py", "new.txt"]
    assert (found[0]["empty"], found[0]["bytes"], found[0]["big"]) == (None, "00ff", None)
    assert "+    return a + b\n" in found[0]["patch"]
    assert table[0] == ["path", "patch", "empty", "bytes", "big"]
    assert table[1][:2] == ["src/calc.py", found[0]["patch"]]


def test_text_from_outside_cannot_control_the_terminal(wink: Wink, run: Run):  # noqa: F811
    sql = "select char(27) || '[2J' || char(10) || 'x' as \"a\x1b[2Jb\", 'y' as c"

    for options in ([], ["--json"]):
        assert "\x1b" not in wink("query", sql, *options).out
    assert "\\x1b[2J x  y\n" in wink("query", sql).out


def test_more_rows_than_asked_for_are_told(wink: Wink, run: Run):  # noqa: F811
    done = wink("query", "select n from calls", "--limit", "2")

    assert done.out.splitlines()[2:] == ["1", "2"]
    assert done.err == "wink: these are the first 2 rows; --limit shows more\n"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["select tol from calls"], "no such column: tol; did you mean tool? calls has run, n, "),
        (["delete from calls"], "only reading is allowed: one SELECT over calls, changes and"),
        ([], 'name a statement, such as "select * from calls"; --schema prints the tables'),
        (["nosuch", "select 1"], "no run 'nosuch'"),
        (
            ["with recursive t(n) as (select 1 union all select n + 1 from t) select max(n) from t",
             "--timeout", "0.2"],
            "the statement takes more than 0.2 seconds",
        ),
    ],
)  # fmt: skip
def test_a_mistake_is_told_in_one_line(
    wink: Wink,  # noqa: F811
    run: Run,
    arguments: list[str],
    told: str,
):
    done = wink("query", *arguments)

    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"wink: {told}")
    assert done.err.count("\n") == 1


def test_the_schema_is_printed_without_a_run(wink: Wink):  # noqa: F811
    shown = wink("query", "--schema").out

    assert re.findall(r"^CREATE TABLE (\w+) \($", shown, re.MULTILINE) == [
        "calls", "changes", "events"
    ]  # fmt: skip
