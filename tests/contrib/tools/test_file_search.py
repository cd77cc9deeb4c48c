"""ripgrep only rules files out: what is found is the same with it, without it, and in memory."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest
from file_agent import Agent, agent_on, put
from hypothesis import given, settings
from hypothesis import strategies as st

from weakincentives.contrib.tools import FileLimits, file_search
from weakincentives.contrib.tools.file_search import pattern_matcher, required_text
from weakincentives.contrib.tools.file_values import LinesFound
from weakincentives.errors import InvalidPattern
from weakincentives.filesystem import HostFilesystem

needs_ripgrep = pytest.mark.skipif(
    shutil.which("rg") is None, reason="ripgrep is not installed: apt-get install ripgrep"
)


def answer(agent: Agent, **arguments: Any) -> LinesFound:
    result = agent.call("grep_files", **arguments)
    assert result.success, result.message
    return result.value


def found(agent: Agent, **arguments: Any) -> list[tuple[str, int, str]]:
    matches = answer(agent, **arguments).matches
    return [(match.path, match.line_number, match.line) for match in matches]


@pytest.fixture(autouse=True)
def _ask_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask about a few files, too: they are quicker to read, and quicker to test with."""
    monkeypatch.setattr(file_search, "RIPGREP_MIN_FILES", 1)


@pytest.fixture
def no_ripgrep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))


# The text that every match contains


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("import os", "import os"),
        (r"def \w+_test\(self", "_test(self"),
        (r"^\s*return None$", "return None"),
        (r"a\.b", "a.b"),
        ("colou?r", "colo"),
        ("ab*cde", "cde"),
        ("ab+c", "ab"),
        ("ab+?c", "ab"),
        ("ab+*c", "a"),
        ("ab{0,2}cde", "cde"),
        ("x[0-9]{3}abc", "abc"),
        (r"[^\]]end", "end"),
        ("[]]end", "end"),
        ("before(group)?after", "before"),
        ("foo|bar", ""),
        ("(?i)foo", ""),
        (r"\x41bc", ""),
        (r"\p{Lu}bc", ""),
        (r"\bfoo\b", "foo"),
        (r"ab\<cde", "ab"),
        ("[a[bc]]d", ""),
        ("", ""),
    ],
)
def test_the_text_that_every_match_contains(pattern: str, text: str):
    assert required_text(pattern) == text


def test_where_case_is_ignored_only_plain_letters_count():
    assert required_text("straße", ignore_case=True) == "stra"
    assert required_text("straße") == "straße"


ATOMS = st.one_of(
    st.text("abk.-é\u212a \\", max_size=3).map(
        lambda text: "".join(f"\\{c}" if c in ".-\\" else c for c in text)
    ),
    st.sampled_from([".", r"\w", r"\s", r"\b", "^", "$", "[ab]", "[^a]", "[]a]", r"[\]b]", "{"]),
    st.sampled_from(
        ["(ab)", "(a|b)", "(?:ab)", "(?i)", "(?i:ab)", "(?x)", "|", r"\x61", r"\u{61}"]
    ),
)
QUANTIFIED = st.tuples(
    ATOMS,
    st.sampled_from(
        ["", "", "", "?", "*", "+", "*?", "+?", "+*", "+{0}", "{2}", "{0}", "{0,1}", "{1,}"]
    ),
).map("".join)
PATTERNS = st.lists(QUANTIFIED, max_size=5).map("".join)
LETTERS = "abABkK\u212a.-éÉ \\#{}"
LINES = st.text(LETTERS, max_size=6)


@given(pattern=PATTERNS, before=LINES, after=LINES, ignore_case=st.booleans())
def test_no_line_that_matches_lacks_that_text(
    pattern: str, before: str, after: str, ignore_case: bool
):
    """Tried on lines that have the letters of the pattern in them, so that many match."""
    line = before + "".join(each for each in pattern if each in LETTERS) + after
    try:
        is_match = pattern_matcher(pattern, ignore_case=ignore_case)
    except InvalidPattern:
        return
    text = required_text(pattern, ignore_case=ignore_case)

    escaped = "".join(c if c.isalnum() or not c.isascii() else f"\\x{ord(c):02x}" for c in text)
    assert pattern_matcher(escaped, ignore_case=ignore_case)(line) or not is_match(line)


# The same results

NAMES = st.sampled_from(["a.txt", ".hidden", "b/c.py", "b/.d/e", "node/f.js", "build/g", "h i.md"])
DATA = st.one_of(
    st.text("ab \n\r#éK\u212a", max_size=30).map(str.encode),
    st.binary(max_size=20),
    st.just(b"ab\0ab\nab"),
    st.just("ab é".encode("utf-16")),
    st.just("ab é\n".encode("latin-1")),
    st.just(b"\xef\xbb\xbfab\n"),
)


@needs_ripgrep
# Each example starts programs.
@settings(max_examples=settings.default.max_examples // 3)
@given(
    files=st.dictionaries(NAMES, DATA, max_size=6),
    ignored=st.sampled_from(["", "*.txt\nbuild/\n", "*\n"]),
    pattern=st.sampled_from(
        ["ab", "a", "^ab", "ab$", "a.b", "é", "k", "b #", r"\bab\b", "a+b", "x"]
    ),
    ignore_case=st.booleans(),
    where=st.sampled_from([".", "b", "link"]),
    limit=st.integers(1, 5),
    max_bytes=st.sampled_from([10, 1000]),
)
def test_with_ripgrep_the_same_is_found(
    tmp_path_factory: pytest.TempPathFactory,
    files: dict[str, bytes],
    ignored: str,
    pattern: str,
    ignore_case: bool,
    where: str,
    limit: int,
    max_bytes: int,
):
    """Also in hidden and ignored files, behind links, and in files that are not text."""
    files = {**files, "b/always.txt": b"ab", ".gitignore": ignored.encode(), ".ignore": b"b/\n"}
    folder = tmp_path_factory.mktemp("grep")
    asked = {"pattern": pattern, "ignore_case": ignore_case, "path": where, "limit": limit}
    limits = FileLimits(max_file_bytes=max_bytes)
    with (
        agent_on("disk", folder, files, limits=limits) as agent,
        pytest.MonkeyPatch.context() as patch,
    ):
        (folder / "work" / ".git").mkdir()
        (folder / "secret").write_text("ab\n")
        for link, target in [("link", "b"), ("z", "b/always.txt"), ("y", "../secret"), ("x", "x")]:
            os.symlink(target, folder / "work" / link)
        with_it = answer(agent, **asked)
        all_of_them = found(agent, **{**asked, "limit": 1000})
        patch.setenv("PATH", str(folder))
        assert answer(agent, **asked) == with_it
        assert found(agent, **{**asked, "limit": 1000}) == all_of_them
        if not ignore_case and max_bytes == 1000:
            plain = agent.files.grep(pattern, where)
            assert [(m.path, m.line_number, m.line) for m in plain] == all_of_them
    assert len(with_it.matches) == min(limit, len(all_of_them))
    if where == ".":
        with agent_on("memory", folder, {**files, "z": b"ab"}, limits=limits) as agent:
            assert answer(agent, **asked) == with_it


@needs_ripgrep
@pytest.mark.parametrize("path", [".", "b"])
def test_files_with_unusual_names_are_found(tmp_path: Path, path: str):
    names = ["b/new\nline", "b/-e", "b/*", "b/é", "b/ ", "b/'\"", "b/c:d"]
    with agent_on("disk", tmp_path, dict.fromkeys(names, "ab")) as agent:
        assert [name for name, _, _ in found(agent, pattern="ab", path=path)] == sorted(names)


# When it is asked


@pytest.fixture
def blind_ripgrep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program that claims to find nothing, and notes how it was called."""
    program = (
        put(tmp_path / "bin", {"rg": '#!/bin/sh\nprintf "%s\\n" "$@" > "$0.log"\nexit 1\n'}) / "rg"
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return program.with_suffix(".log")


def test_it_is_asked_about_a_directory_that_is_seen_as_it_is(tmp_path: Path, blind_ripgrep: Path):
    with agent_on("disk", tmp_path, {"a.txt": "abc", "b/c.txt": "abc"}) as agent:
        assert found(agent, pattern="abc") == []
        assert found(agent, pattern="abc", path="a.txt") != []  # one file is read at once
        told = blind_ripgrep.read_text().splitlines()
        assert told[-2:] == ["--", str((tmp_path / "work").resolve())]
        assert found(agent, pattern="abc|b") != []  # no text that every match contains


def test_the_workspace_does_not_choose_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The ``rg`` of a version manager runs what a file in the current directory names."""
    shim = put(tmp_path / "bin", {"rg": '#!/bin/sh\nexec "$(cat .tool-versions)"\n'}) / "rg"
    shim.chmod(0o755)
    monkeypatch.setenv("PATH", f"{shim.parent}:{os.environ['PATH']}")
    planted = tmp_path / "work/planted"
    script = '#!/bin/sh\n: > "$0.was-run"\nexit 1\n'
    files = {"a.txt": "abc", "planted": script, ".tool-versions": str(planted)}

    with agent_on("disk", tmp_path, files) as agent:
        planted.chmod(0o755)
        monkeypatch.chdir(tmp_path / "work")
        assert found(agent, pattern="abc") == [("a.txt", 1, "abc")]

    assert not Path(f"{planted}.was-run").exists()


def test_it_is_not_asked_about_a_few_files(
    tmp_path: Path, blind_ripgrep: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(file_search, "RIPGREP_MIN_FILES", 3)
    with agent_on("disk", tmp_path, {"a.txt": "abc", "b.txt": "abc"}) as agent:
        assert len(found(agent, pattern="abc")) == 2
        agent.call("write_file", path="c.txt", content="abc")
        assert found(agent, pattern="abc") == []


def test_it_is_not_asked_about_files_in_memory(tmp_path: Path, blind_ripgrep: Path):
    with agent_on("memory", tmp_path, {"a.txt": "abc"}) as agent:
        assert found(agent, pattern="abc") != []
    assert not blind_ripgrep.exists()


def test_it_is_not_asked_when_a_call_sees_what_is_not_on_disk(tmp_path: Path, blind_ripgrep: Path):
    """Calls of one turn have views of their own: what they write is not in the directory yet."""
    with agent_on("disk", tmp_path, {"a.txt": "abc"}) as agent:
        results = agent.turn(
            ("write_file", {"path": "b.txt", "content": "abc"}), ("grep_files", {"pattern": "abc"})
        )
    assert [match.path for match in results[1].value.matches] == ["a.txt", "b.txt"]


@pytest.mark.parametrize("link", [False, True])
def test_a_program_in_the_workspace_is_never_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, link: bool
):
    """A model that writes files must not get to run them."""
    script = '#!/bin/sh\n: > "$0.was-run"\nexit 1\n'
    with agent_on("disk", tmp_path, {"a.txt": "abc", "bin/rg": script}) as agent:
        program = tmp_path / "work" / "bin" / "rg"
        program.chmod(0o755)
        folder = program.parent
        if link:
            folder = tmp_path / "elsewhere"
            folder.mkdir()
            os.symlink(program, folder / "rg")
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        assert found(agent, pattern="abc") == [("a.txt", 1, "abc")]
        monkeypatch.chdir(tmp_path / "work")
        monkeypatch.setenv("PATH", "bin")
        assert found(agent, pattern="abc") == [("a.txt", 1, "abc")]
    assert not list(tmp_path.glob("**/*.was-run"))


@pytest.mark.parametrize("script", ["#!/bin/sh\nexit 2\n", "#!/no/such/interpreter\n"])
def test_where_it_fails_all_files_are_searched(tmp_path: Path, blind_ripgrep: Path, script: str):
    blind_ripgrep.with_suffix("").write_text(script)
    with agent_on("disk", tmp_path, {"a.txt": "abc"}) as agent:
        assert found(agent, pattern="abc") == [("a.txt", 1, "abc")]


@pytest.mark.usefixtures("no_ripgrep")
def test_it_need_not_be_installed(tmp_path: Path):
    with agent_on("disk", tmp_path, {"a.txt": "abc"}) as agent:
        assert found(agent, pattern="abc") == [("a.txt", 1, "abc")]


def test_a_filesystem_says_whether_programs_see_the_same(tmp_path: Path):
    put(tmp_path / "work", {"a": ""})
    with HostFilesystem(tmp_path / "work") as files:
        assert files.shows_disk
        assert not files.fork().shows_disk
        with files.gate:
            view = files.fork_in_place()
            assert view.shows_disk
            files.discard(view)


def test_a_match_in_another_encoding_is_told(tmp_path: Path):
    files = {"old.txt": "un café\n".encode("latin-1"), "new.txt": "thé\n", "x.bin": b"un\0\xff"}
    with agent_on("memory", tmp_path, files) as agent:
        found = agent.call("grep_files", pattern="^un")
        other = agent.call("grep_files", pattern="th")

    assert found.render().endswith("[Not shown, as it is not UTF-8 text: old.txt]")
    assert found.value.matches == ()
    assert other.value.notice == ""
