from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from file_agent import Agent, agent_on
from hypothesis import assume, given
from hypothesis import strategies as st

import weakincentives as wink
from weakincentives.contrib.tools import FileLimits, file_tools
from weakincentives.contrib.tools.file_values import GrepFilesParams
from weakincentives.runtime import ToolInvoked, ToolRegistry, sequence
from weakincentives.testing import make_context, make_vfs

FILES: Mapping[str, str | bytes] = {
    "README.md": "# App\n\nRun it.\n",
    "src/app.py": "import os\n\n\ndef main():\n    print(os.name)\n",
    "src/util/text.py": "def upper(text):\n    return text.upper()\n",
    "logo.png": b"\x89PNG\r\n\x1a\n\0\0\0",
}

TOOLS = file_tools()

Open = Callable[..., Agent]


@pytest.fixture(params=["memory", "disk"])
def open_agent(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Open]:
    """Opens an agent over given files, once in memory and once on disk."""
    with ExitStack() as stack:

        def open_agent(files: Mapping[str, str | bytes] = FILES, **options: Any) -> Agent:
            return stack.enter_context(agent_on(request.param, tmp_path, files, **options))

        yield open_agent


@pytest.fixture
def agent(open_agent: Open) -> Agent:
    return open_agent()


def contents(agent: Agent) -> dict[str, bytes]:
    return {path: agent.files.read_bytes(path) for path in agent.files.glob("**/*")}


# Listing


def test_a_directory_is_listed_with_sizes(agent: Agent):
    result = agent.call("list_directory")

    assert result.render() == (
        "The workspace has 3 entries\nREADME.md (15 bytes)\nlogo.png (11 bytes)\nsrc/"
    )
    assert agent.call("list_directory", path="/workspace/src").render() == (
        "src has 2 entries\napp.py (43 bytes)\nutil/"
    )


@pytest.mark.skipif(os.name != "posix", reason="names are bytes")
def test_names_that_are_not_utf_8_are_shown_escaped(tmp_path: Path):
    with agent_on("disk", tmp_path, {"a.txt": "a", "sub/b.txt": "b"}) as agent:
        for name in (b"caf\xe9.txt", b"\xff", b"sub/\xe9\n"):
            Path(os.fsdecode(os.fsencode(tmp_path / "work") + b"/" + name)).write_text("x")

        assert agent.call("list_directory").render() == (
            "The workspace has 2 entries\na.txt (1 byte)\nsub/\n"
            "[Not listed, because their names are not UTF-8: \\xff, caf\\xe9.txt. "
            "A command can rename them]"
        )
        assert "not UTF-8: \\xe9\\n." in agent.call("list_directory", path="sub").render()


def test_a_long_directory_comes_in_parts(open_agent: Open):
    agent = open_agent({f"{n}.txt": "" for n in range(5)})

    first = agent.call("list_directory", limit=2)
    last = agent.call("list_directory", offset=4)

    assert first.render().endswith("[1 to 2 of 5. Call again with offset=2 for more]")
    assert last.render().endswith("4.txt (0 bytes)\n[5 to 5 of 5]")
    assert "There are only 5" in agent.call("list_directory", offset=9).render()


def test_a_list_is_never_longer_than_the_limit(open_agent: Open):
    agent = open_agent({f"{n}.txt": "" for n in range(5)}, limits=FileLimits(max_entries=3))

    for tool, arguments in [
        ("list_directory", {}),
        ("glob_files", {"pattern": "*.txt"}),
        ("search_files", {"query": "txt"}),
    ]:
        result = agent.call(tool, **arguments, limit=4)
        assert "[1 to 3 of 5. Call again with offset=3 for more]" in result.render(), tool


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no/such", "Directory not found: no/such"),
        ("README.md", "README.md is a file, not a directory"),
        ("../..", "../.. is outside the root"),
    ],
)
def test_what_is_no_directory_is_said(agent: Agent, path: str, message: str):
    result = agent.call("list_directory", path=path)

    assert not result.success
    assert result.message.startswith(message)


# Reading


def test_a_file_is_read_with_line_numbers(agent: Agent):
    result = agent.call("read_file", path="./src/app.py")

    assert result.render() == (
        "src/app.py: lines 1 to 5 of 5\n"
        "     1\timport os\n     2\t\n     3\t\n     4\tdef main():\n     5\t    print(os.name)"
    )


def test_a_part_of_a_file_is_read_and_the_rest_is_announced(agent: Agent):
    result = agent.call("read_file", path="src/app.py", offset=3, limit=1)

    assert result.render() == (
        "src/app.py: lines 4 to 4 of 5\n     4\tdef main():\n"
        "[1 more line. Call read_file with offset=4 to continue]"
    )


def test_an_offset_after_the_end_is_an_error(agent: Agent):
    result = agent.call("read_file", path="README.md", offset=3)

    assert not result.success
    assert result.message.startswith("README.md has 3 lines, so offset=3 is after its end")


def test_a_very_long_line_is_cut_and_can_be_seen_in_parts(open_agent: Open):
    agent = open_agent(
        {"a.js": "short\n" + "abcdefgh" * 3 + "\n"}, limits=FileLimits(max_line_chars=10)
    )

    first = agent.call("read_file", path="a.js")
    more = agent.call("read_file", path="a.js", offset=1, limit=1, column=20)

    assert first.value.lines == ("short", "abcdefghab")
    assert first.value.notice == (
        "Line 2 has 24 characters and is truncated. Call read_file with offset=1, limit=1 and "
        "column=10 for more of it"
    )
    assert more.value.lines == ("efgh",)
    assert more.value.notice == ""


@given(
    text=st.text(st.sampled_from("ab\n\r\té\u2028\x0c😀"), max_size=200),
    max_lines=st.integers(1, 7),
    max_chars=st.integers(1, 40),
)
def test_a_file_read_part_by_part_is_the_whole_file(text: str, max_lines: int, max_chars: int):
    """Following the notices leads through every line, once."""
    limits = FileLimits(max_lines=max_lines, max_chars=max_chars)
    tools = ToolRegistry(
        file_tools(limits=limits), resources={wink.Filesystem: make_vfs({"a": text})}
    )
    lines: list[str] = []
    more = bool(text)
    while more:
        value = tools.execute("read_file", {"path": "a", "offset": len(lines)}).value
        assert value.first_line == len(lines) + 1
        lines += value.lines
        more = f"Call read_file with offset={len(lines)}" in value.notice

    expected = text.removesuffix("\n").split("\n") if text else []
    assert lines == [line.removesuffix("\r") for line in expected]


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("logo.png", b"\x89PNG\0", "5 bytes of image/png, which are not shown"),
        ("a.txt", "Größe".encode("latin-1"), "5 bytes of text/plain"),
        ("a.txt", "Größe".encode("utf-16"), "12 bytes of text/plain"),
        ("data", b"\xff" * 20_000, "20 kB of unknown type"),
    ],
)
def test_what_is_not_text_is_described(open_agent: Open, name: str, data: bytes, said: str):
    result = open_agent({name: data}).call("read_file", path=name)

    assert result.success
    assert result.message.startswith(f"{name} is not UTF-8 text but ")
    assert said in result.message
    assert f"They begin with {data[:4].hex(' ')}" in result.message
    assert len(result.render()) < 200


PNG = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"


@pytest.mark.parametrize(
    ("data", "kind", "what"),
    [
        (PNG, "image/png", "a picture"),
        (b"\xff\xd8\xff\xe0JFIF", "image/jpeg", "a picture"),
        (b"GIF89a\1\0\1\0\x80", "image/gif", "a picture"),
        (b"RIFF\x1a\0\0\0WEBPVP8L\xff", "image/webp", "a picture"),
        (b"%PDF-1.4\n%%EOF\n", "application/pdf", "a PDF"),
    ],
)
def test_a_picture_is_shown_whatever_its_name_and_counts_as_read(
    open_agent: Open, data: bytes, kind: str, what: str
):
    agent = open_agent({"a.txt": data})

    result = agent.call("read_file", path="a.txt")

    assert result.render() == f"a.txt is {what}:\n[{kind}, {len(data)} bytes: a.txt]"
    assert [(each.data, each.media_type) for each in result.media] == [(data, kind)]
    assert agent.call("write_file", path="a.txt", content="new\n").success


def test_a_picture_that_is_too_large_is_described(open_agent: Open):
    agent = open_agent({"a.png": PNG + bytes(30)}, limits=FileLimits(max_picture_bytes=40))

    result = agent.call("read_file", path="a.png")

    assert result.media == ()
    assert result.render() == (
        "a.png is a picture, image/png, and with 46 bytes too large to show: the limit is "
        "40 bytes. Make a smaller copy and read that"
    )


def test_a_file_that_is_too_large_is_not_read(open_agent: Open):
    agent = open_agent({"big.txt": "x" * 101}, limits=FileLimits(max_file_bytes=100))

    for tool, arguments in [
        ("read_file", {}),
        ("edit_file", {"old_string": "x", "new_string": ""}),
    ]:
        result = agent.call(tool, path="big.txt", **arguments)
        assert not result.success
    assert "big.txt has 101 bytes; files of up to 100 bytes can be read" in (
        agent.call("read_file", path="big.txt").message
    )


def test_an_empty_file_is_said_to_be_empty(open_agent: Open):
    assert open_agent({"a": ""}).call("read_file", path="a").render() == "a is empty"


def test_a_missing_file_is_looked_for_elsewhere(agent: Agent):
    result = agent.call("read_file", path="lib/app.py")

    assert result.message == (
        "File not found: lib/app.py\nUse list_directory to see available files\n"
        "Files with a similar name: src/app.py"
    )


def test_a_directory_is_not_read_as_a_file(agent: Agent):
    assert agent.call("read_file", path="src").message == (
        "src is a directory\nUse list_directory to see what is in it"
    )


def test_lines_that_end_in_crlf_are_shown_without(open_agent: Open):
    result = open_agent({"a.bat": "one\r\ntwo\r\n"}).call("read_file", path="a.bat")

    assert result.value.lines == ("one", "two")
    assert result.message == "a.bat: lines 1 to 2 of 2; lines end in CRLF"


# Writing


def test_a_new_file_is_written_with_its_directories(agent: Agent):
    result = agent.call("write_file", path="docs/new/a.md", content="é\nb")

    assert result.render() == "Wrote docs/new/a.md: 4 bytes, 2 lines"
    assert agent.files.read("docs/new/a.md") == "é\nb"


@pytest.mark.parametrize("asked", [{}, {"overwrite": True}])
def test_a_file_that_exists_is_written_once_it_was_read(agent: Agent, asked: dict[str, bool]):
    new = {"path": "README.md", "content": "new", **asked}

    assert agent.call("write_file", **new).message == (
        "Cannot write to README.md without reading it first"
    )
    assert agent.files.read("README.md") == FILES["README.md"]
    agent.call("read_file", path="/workspace/README.md")
    assert agent.call("write_file", **new).render() == "Replaced README.md: 3 bytes, 1 line"
    assert agent.files.read("README.md") == "new"


def test_a_directory_is_not_overwritten(agent: Agent):
    result = agent.call("write_file", path="src", content="", overwrite=True)

    assert not result.success
    assert agent.files.exists("src/app.py")


# Editing


def edit(agent: Agent, path: str, old: str, new: str, **options: object) -> wink.ToolResult[Any]:
    agent.call("read_file", path=path)
    return agent.call("edit_file", path=path, old_string=old, new_string=new, **options)


def test_an_edit_replaces_one_text_and_shows_it(agent: Agent):
    result = edit(agent, "src/app.py", "print(os.name)", "print(os.sep)\n    return 0")

    assert agent.files.read("src/app.py") == (
        "import os\n\n\ndef main():\n    print(os.sep)\n    return 0\n"
    )
    assert result.render() == (
        "Edited src/app.py: 1 replacement\n"
        "     2\t\n     3\t\n     4\tdef main():\n     5\t    print(os.sep)\n     6\t    return 0"
    )


def test_a_file_that_was_not_read_is_not_edited(agent: Agent):
    result = agent.call("edit_file", path="README.md", old_string="App", new_string="Tool")

    assert result.message == "Cannot write to README.md without reading it first"


def test_an_ambiguous_edit_says_how_often_and_where(agent: Agent):
    result = edit(agent, "src/util/text.py", "upper", "lower")

    assert result.message == (
        "old_string was found 2 times in src/util/text.py, at lines 1, 2\n"
        "Give more of the text around the one you mean, or set replace_all=true"
    )
    assert agent.files.read("src/util/text.py") == FILES["src/util/text.py"]
    assert (
        edit(agent, "src/util/text.py", "upper", "lower", replace_all=True).value.replacements == 2
    )
    assert agent.files.read("src/util/text.py") == str(FILES["src/util/text.py"]).replace(
        "upper", "lower"
    )


def test_places_that_share_characters_are_ambiguous(open_agent: Open):
    """There are two ways to take 'aa' in 'aaa'."""
    agent = open_agent({"a": "aaa"})

    assert "found 2 times" in edit(agent, "a", "aa", "b").message
    assert edit(agent, "a", "aa", "b", replace_all=True).value.replacements == 1
    assert agent.files.read("a") == "ba"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("", "x", "old_string is empty"),
        ("import os", "import os", "are the same"),
        ("not there", "x", "old_string was not found in src/app.py\nRead the file again"),
        ("def main():\n  print", "x", "Line 4 is similar to its first line: 'def main():'"),
    ],
)
def test_an_edit_that_cannot_be_made_says_why(agent: Agent, old: str, new: str, said: str):
    result = edit(agent, "src/app.py", old, new)

    assert not result.success
    assert said in result.message
    assert agent.files.read("src/app.py") == FILES["src/app.py"]


def test_what_is_not_text_is_not_edited(agent: Agent):
    result = edit(agent, "logo.png", "PNG", "GIF")

    assert result.message.endswith("It cannot be edited")
    assert agent.files.read_bytes("logo.png") == FILES["logo.png"]


def test_an_edit_in_a_crlf_file_keeps_its_line_ends(open_agent: Open):
    agent = open_agent({"a.bat": "one\r\ntwo\r\nthree"})

    assert edit(agent, "a.bat", "one\ntwo", "1\n2\n2b").success
    assert agent.files.read("a.bat") == "1\r\n2\r\n2b\r\nthree"
    assert edit(agent, "a.bat", "2\r\n2b", "2").success
    assert agent.files.read("a.bat") == "1\r\n2\r\nthree"


def test_an_edit_of_a_real_file_keeps_its_mode(tmp_path: Path):
    with agent_on("disk", tmp_path, {"run.sh": "echo 1\n"}) as agent:
        (tmp_path / "work" / "run.sh").chmod(0o755)
        assert edit(agent, "run.sh", "1", "2").success
    assert (tmp_path / "work" / "run.sh").stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "work" / "run.sh").read_text() == "echo 2\n"


def test_a_link_that_leads_out_is_shown_as_one_and_not_searched(tmp_path: Path):
    with agent_on("disk", tmp_path, {"a": "a"}) as agent:
        os.symlink("/etc/hostname", tmp_path / "work" / "out")
        os.mkfifo(tmp_path / "work" / "pipe")
        assert agent.call("list_directory").render() == (
            "The workspace has 3 entries\na (1 byte)\n"
            "out (a broken link, or a link out of the workspace)\n"
            "pipe (not a regular file)"
        )
        for path in ("out", "pipe"):
            result = agent.call("grep_files", pattern=".", path=path)
            assert not result.success, path


def test_names_stay_on_one_line(open_agent: Open):
    agent = open_agent({"a\nb": "x"})

    for tool, arguments in [
        ("list_directory", {}),
        ("glob_files", {"pattern": "*"}),
        ("grep_files", {"pattern": "x"}),
    ]:
        assert r"'a\nb'" in agent.call(tool, **arguments).render(), tool


TEXTS = st.text(st.sampled_from("ab \n\ré😀\ufeff"), max_size=40)


@given(before=TEXTS, old=st.text("ab\n\ré", min_size=1, max_size=4), new=TEXTS, after=TEXTS)
def test_an_edit_changes_the_text_it_names_and_no_other_byte(
    before: str, old: str, new: str, after: str
):
    """Where lines end in CRLF throughout, a newline in the new text is one, too."""
    assume(not (before.endswith("\r") and old.startswith("\n")))  # half of such an end
    text = before + old + after
    files = make_vfs({"a": text})
    tools = ToolRegistry(TOOLS, resources={wink.Filesystem: files})

    result = tools.execute("edit_file", {"path": "a", "old_string": old, "new_string": new})

    left = files.read_bytes("a").decode()
    if not result.success:
        assert left == text
        assert old == new or text.find(old) != text.rfind(old) or "\r\n" in text
        return
    assert left.startswith(before)
    assert left.endswith(after)
    middle = left[len(before) : len(left) - len(after)]
    if "\r" not in text:
        assert middle == new
        back = tools.execute("edit_file", {"path": "a", "old_string": middle, "new_string": old})
        assert not back.success or files.read("a") == text
    else:
        assert middle.replace("\r\n", "\n") == new.replace("\r\n", "\n")


# Finding


def test_files_are_found_by_pattern(agent: Agent):
    assert agent.call("glob_files", pattern="**/*.py").render() == (
        "Found 2 files matching '**/*.py'\nsrc/app.py\nsrc/util/text.py"
    )
    assert agent.call("glob_files", pattern="*.py", path="src").value.paths == ("src/app.py",)


def test_a_pattern_for_one_directory_only_is_pointed_out(agent: Agent):
    assert agent.call("glob_files", pattern="*.py").render() == (
        "No files match '*.py'\n"
        "Try a wider pattern: '**/' looks in all directories, and braces have no meaning"
    )


def test_files_are_found_by_name(agent: Agent):
    assert agent.call("search_files", query="TEXT").render() == (
        "Found 1 file matching 'TEXT'\nsrc/util/text.py"
    )
    assert agent.call("search_files", query="*.txt").message == (
        "No files match '*.txt'\nTry glob_files for pattern matching or grep_files for text search"
    )


def test_lines_are_found_by_content(agent: Agent):
    assert agent.call("grep_files", pattern=r"^def \w+\(").render() == (
        "Found 2 matching lines in 2 files\n"
        "src/app.py:4: def main():\nsrc/util/text.py:1: def upper(text):"
    )


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ({"pattern": "APP"}, []),
        ({"pattern": "APP", "ignore_case": True}, ["README.md:1"]),
        ({"pattern": "def", "glob": "*.md"}, []),
        ({"pattern": "def", "glob": "text.*"}, ["src/util/text.py:1"]),
        ({"pattern": "def", "glob": "src/*.py"}, ["src/app.py:4"]),
        ({"pattern": "def", "path": "src/util"}, ["src/util/text.py:1"]),
        ({"pattern": "def", "path": "src/app.py"}, ["src/app.py:4"]),
        ({"pattern": "PNG"}, []),
    ],
)
def test_a_search_can_be_narrowed(agent: Agent, arguments: dict[str, Any], found: list[str]):
    result = agent.call("grep_files", **arguments)

    assert result.success
    assert [f"{each.path}:{each.line_number}" for each in result.value.matches] == found


def test_nothing_found_says_where_it_was_looked_for(agent: Agent):
    assert agent.call("grep_files", pattern="nowhere", glob="*.py").message == (
        "No lines match 'nowhere' in 2 files\n"
        "Try a shorter pattern, ignore_case=true, or another path or glob"
    )


def test_many_lines_come_in_parts(open_agent: Open):
    agent = open_agent({"a": "x\n" * 5, "b": "x\n" * 5})

    first = agent.call("grep_files", pattern="x", limit=4)
    last = agent.call("grep_files", pattern="x", limit=4, offset=8)
    after = agent.call("grep_files", pattern="x", offset=10)

    assert first.value.notice == "There are more. Call grep_files with offset=4 to continue"
    assert [(m.path, m.line_number) for m in last.value.matches] == [("b", 4), ("b", 5)]
    assert last.value.notice == ""
    assert after.message.startswith("No more lines match ")


def test_long_lines_and_long_answers_are_cut(open_agent: Open):
    agent = open_agent({"a": f"{'x' * 2000}\n" * 9}, limits=FileLimits(max_chars=1200))

    result = agent.call("grep_files", pattern="x")

    assert len(result.value.matches) == 2
    assert result.value.matches[0].line.endswith("x... (1500 more characters)")
    assert "offset=2" in result.value.notice


def test_large_files_are_not_searched_and_named(open_agent: Open):
    agent = open_agent({"a": "x" * 11, "b": "x"}, limits=FileLimits(max_file_bytes=10))

    result = agent.call("grep_files", pattern="x")

    assert [match.path for match in result.value.matches] == ["b"]
    assert result.value.notice == "Not searched, larger than 10 bytes: a"


def test_directories_of_tools_are_left_out_unless_they_are_named(open_agent: Open):
    agent = open_agent({"node_modules/x/a.js": "x", "b/.git/c": "x", "d.js": "x"})
    notice = (
        "2 files in .git, node_modules left out: glob_files and grep_files look there when path or "
        "pattern name it"
    )

    for tool, arguments in [
        ("glob_files", {"pattern": "**/*"}),
        ("grep_files", {"pattern": "x"}),
    ]:
        result = agent.call(tool, **arguments)
        assert notice in result.render(), tool
        assert "a.js" not in result.render(), tool
        assert "a.js" in agent.call(tool, **arguments, path="node_modules").render(), tool
    assert agent.call("glob_files", pattern="node_modules/**/*.js").value.paths == (
        "node_modules/x/a.js",
    )
    assert agent.call("search_files", query="a.js").value.paths == ()


@pytest.mark.parametrize(
    "pattern", ["(", "a{", "(?=x)", r"(a)\1", "x\ny", "x" * 1001, r"(a{100}){100}"]
)
def test_a_pattern_that_cannot_be_taken_is_an_answer_for_the_model(agent: Agent, pattern: str):
    result = agent.call("grep_files", pattern=pattern)

    assert not result.success
    assert "pattern" in result.message
    assert "Internal error" not in result.message


def test_no_pattern_takes_forever(open_agent: Open):
    """Python's own expressions would not come back from this one."""
    agent = open_agent({"a": "a" * 5000 + "!"})

    assert agent.call("grep_files", pattern="(a+)+$").value.matches == ()


def test_a_search_that_nobody_waits_for_ends():
    context = make_context(fs=make_vfs({"a": "x"}))
    grep_files = next(tool for tool in file_tools() if tool.name == "grep_files")
    assert grep_files.handler is not None
    context.signal.cancel()

    result: Any = grep_files.handler(GrepFilesParams("x"), context=context)

    assert result.value.matches == ()


# Moving, copying, deleting


def test_files_and_directories_are_moved_and_copied(agent: Agent):
    assert agent.call("move_file", source="src", destination="lib/src").render() == (
        "Moved src to lib/src"
    )
    assert agent.call("copy_file", source="lib/src/app.py", destination="app.py").render() == (
        "Copied lib/src/app.py to app.py"
    )
    assert agent.files.read("app.py") == agent.files.read("lib/src/app.py") == FILES["src/app.py"]
    assert not agent.files.exists("src")


@pytest.mark.parametrize("tool", ["move_file", "copy_file"])
def test_what_is_at_the_destination_is_replaced_only_when_that_is_asked_for(
    agent: Agent, tool: str
):
    places = {"source": "README.md", "destination": "logo.png"}

    assert "overwrite" in agent.call(tool, **places).message
    assert agent.files.read_bytes("logo.png") == FILES["logo.png"]
    agent.call("read_file", path="logo.png")
    assert agent.call(tool, **places, overwrite=True).success
    assert agent.files.read("logo.png") == FILES["README.md"]


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [
        ("move_file", {"source": "app.py", "destination": "x"}),
        ("copy_file", {"source": "app.py", "destination": "x"}),
        ("delete_file", {"path": "app.py"}),
        ("grep_files", {"pattern": "x", "path": "app.py"}),
    ],
)
def test_a_path_that_is_not_there_is_answered_with_where_it_may_be(
    agent: Agent, tool: str, arguments: dict[str, str]
):
    result = agent.call(tool, **arguments)

    assert result.message.startswith("File not found: app.py\n")
    assert result.message.endswith("src/app.py")


def test_a_directory_with_something_in_it_is_deleted_only_when_that_is_asked_for(agent: Agent):
    assert "recursive" in agent.call("delete_file", path="src").message
    assert agent.files.exists("src/app.py")
    result = agent.call("delete_file", path="src", recursive=True)
    assert result.render() == "Deleted src with 2 files in it"
    assert agent.call("delete_file", path="logo.png").render() == "Deleted logo.png"
    assert tuple(contents(agent)) == ("README.md",)


# All of them


def test_every_tool_says_how_far_it_reaches_and_may_run_concurrently_others():
    reaches = {tool.name: tool.reach for tool in file_tools()}

    assert reaches == {
        "list_directory": "read",
        "read_file": "read",
        "glob_files": "read",
        "grep_files": "read",
        "search_files": "read",
        "write_file": "reversible",
        "edit_file": "reversible",
        "move_file": "reversible",
        "copy_file": "reversible",
        "delete_file": "reversible",
    }
    assert all(tool.concurrent for tool in file_tools())
    assert [tool.name for tool in file_tools(read_only=True)] == list(reaches)[:5]


@wink.tool(reach="reversible")
def work_and_fail(*, context: wink.ToolContext) -> str:
    """Use every tool that changes something, then fail."""
    for name, arguments in [
        ("read_file", {"path": "README.md"}),
        ("write_file", {"path": "new/a.txt", "content": "a"}),
        ("edit_file", {"path": "README.md", "old_string": "App", "new_string": "Tool"}),
        ("move_file", {"source": "src/util", "destination": "util"}),
        ("copy_file", {"source": "logo.png", "destination": "util/logo.png"}),
        ("delete_file", {"path": "src", "recursive": True}),
    ]:
        result = wink.execute_tool(wink.ToolCall(name, arguments), context=context)
        assert result.success, result.message
    raise ValueError("on purpose")


def test_work_that_fails_in_the_middle_leaves_nothing_behind(open_agent: Open):
    agent = open_agent(tools=(work_and_fail,))
    before = contents(agent)

    result = agent.call("work_and_fail")

    assert result.message == "on purpose"
    assert "Filesystem" in result.metadata.undone
    assert contents(agent) == before
    assert not agent.files.exists("new")
    # What was read in vain is not known, either.
    denied = agent.call("edit_file", path="README.md", old_string="App", new_string="Tool")
    assert denied.message == "Cannot write to README.md without reading it first"
    assert [call.tool_name for call in agent.session[ToolInvoked].all()][-2:] == [
        "work_and_fail",
        "edit_file",
    ]


def test_a_sequence_of_edits_is_one_change(open_agent: Open):
    """The second edit fails, so the first has not happened."""
    edit_file = next(tool for tool in file_tools() if tool.name == "edit_file")
    both = sequence(
        [edit_file, edit_file],
        stop_on_error=True,
        transform_output=lambda *_: {"path": "README.md", "old_string": "gone", "new_string": "x"},
    )
    agent = open_agent(tools=(both,))
    agent.call("read_file", path="README.md")

    result = agent.call(both.name, path="README.md", old_string="App", new_string="Tool")

    assert not result.success
    assert agent.files.read("README.md") == FILES["README.md"]


def test_calls_of_one_turn_come_out_as_if_one_after_the_other(agent: Agent):
    results = agent.turn(
        ("read_file", {"path": "README.md"}),
        ("write_file", {"path": "a.txt", "content": "one two"}),
        ("edit_file", {"path": "a.txt", "old_string": "one", "new_string": "1"}),
        ("edit_file", {"path": "a.txt", "old_string": "two", "new_string": "2"}),
        ("edit_file", {"path": "README.md", "old_string": "App", "new_string": "Tool"}),
        ("grep_files", {"pattern": "1 2|Tool"}),
        ("delete_file", {"path": "no-such-file"}),
    )

    assert [result.success for result in results] == [True] * 6 + [False]
    assert agent.files.read("a.txt") == "1 2"
    assert [match.path for match in results[5].value.matches] == ["README.md", "a.txt"]


PATHS = st.one_of(
    st.text(max_size=20),
    st.lists(
        st.sampled_from(["..", ".", "", "out", "in", "a.txt", "workspace", "~", "etc", "\\"]),
        max_size=6,
    ).map("/".join),
    st.lists(st.sampled_from(["..", "out", "a.txt", "secret.txt"]), max_size=5).map(
        lambda parts: "/" + "/".join(parts)
    ),
)


@given(path=PATHS, other=PATHS)
def test_no_path_leads_out(tmp_path_factory: pytest.TempPathFactory, path: str, other: str):
    """There is a link out of the workspace, and files beside it."""
    folder = tmp_path_factory.mktemp("confined")
    outside = folder / "outside"
    outside.mkdir()
    (outside / "secret.txt").write_text("secret")
    with agent_on("disk", folder, {"a.txt": "mine"}, policies=()) as agent:
        os.symlink(outside, folder / "work" / "out")
        os.symlink(outside / "secret.txt", folder / "work" / "in")
        answers = [
            agent.call("read_file", path=path),
            agent.call("grep_files", pattern="secret", path=path),
            agent.call("list_directory", path=path),
            agent.call("write_file", path=path, content="x", overwrite=True),
            agent.call("edit_file", path=path, old_string="secret", new_string="x"),
            agent.call("copy_file", source=path, destination=other, overwrite=True),
            agent.call("move_file", source=other, destination=path, overwrite=True),
            agent.call("delete_file", path=path, recursive=True),
        ]

    assert all("Internal error" not in answer.message for answer in answers)
    assert {each.name for each in outside.iterdir()} == {"secret.txt"}
    assert (outside / "secret.txt").read_text() == "secret"
    assert not any("secret" in getattr(answer.value, "lines", ()) for answer in answers)
    assert not any(getattr(answer.value, "matches", ()) for answer in answers)
    beside = {each.name for each in folder.iterdir() if not each.name.startswith(".")}
    assert beside <= {"outside", "work"}


def test_a_byte_order_mark_is_told_and_not_shown(open_agent: Open):
    agent = open_agent({"a.py": b"\xef\xbb\xbfimport os\n"})

    assert agent.call("read_file", path="a.py").render() == (
        "a.py: lines 1 to 1 of 1; begins with a byte order mark\n     1\timport os"
    )
    assert agent.call("grep_files", pattern="^import").value.matches[0].line == "import os"
    assert agent.call("edit_file", path="a.py", old_string="os", new_string="re").success
    assert agent.files.read_bytes("a.py") == b"\xef\xbb\xbfimport re\n"


def test_lines_that_end_in_different_ways_are_told(open_agent: Open):
    """A model cannot see which; one line at a time, it need not."""
    agent = open_agent({"a.txt": b"one\r\ntwo\nthree\n"})

    read = agent.call("read_file", path="a.txt")
    failed = agent.call("edit_file", path="a.txt", old_string="one\ntwo", new_string="x")

    assert read.message == "a.txt: lines 1 to 3 of 3; some lines end in CRLF"
    assert failed.message.endswith("only some lines end in CRLF, change one line at a time")
    assert agent.call("edit_file", path="a.txt", old_string="one", new_string="1").success
    assert agent.files.read_bytes("a.txt") == b"1\r\ntwo\nthree\n"


def test_a_name_with_newlines_stays_on_one_line(open_agent: Open):
    """What somebody put into a name must not look like an answer of the tool."""
    name = "a\nb: lines 1 to 9"
    agent = open_agent({name: "x\n", "d\ne/f": "", "g\nh": b"\0"})

    messages = [
        agent.call("read_file", path=name).message,
        agent.call("edit_file", path=name, old_string="x", new_string="y").message,
        agent.call("read_file", path=name, offset=9).message,
        agent.call("edit_file", path=name, old_string="z", new_string="y").message.split("\n")[0],
        agent.call("write_file", path=name, content="", overwrite=True).message,
        agent.call("read_file", path=name).message,
        agent.call("list_directory", path="d\ne").message,
        agent.call("copy_file", source=name, destination="i\nj").message,
        agent.call("read_file", path="g\nh").message,
        agent.call("delete_file", path=name).message,
    ]

    assert all("\\n" in message and "\n" not in message for message in messages), messages


def test_the_root_is_called_by_its_name_where_a_file_is_wanted(agent: Agent):
    assert agent.call("read_file", path="").message.startswith(". is a directory\n")


def test_braces_in_a_pattern_are_explained_where_nothing_is_found(open_agent: Open):
    agent = open_agent({"a.ts": "x\n", "b.tsx": "x\n", "{c}": "x\n"})

    globbed = agent.call("glob_files", pattern="*.{ts,tsx}")
    grepped = agent.call("grep_files", pattern="x", glob="*.{ts,tsx}")

    assert "braces have no meaning" in globbed.message
    assert grepped.message.startswith("No lines match 'x' in 0 files\n")
    assert agent.call("glob_files", pattern="{c}").value.paths == ("{c}",)


def test_tools_work_on_any_filesystem_of_a_context():
    context = make_context(fs=make_vfs({"a.txt": "a"}))
    read_file = file_tools()[1]

    assert read_file(path="a.txt", context=context).value.lines == ("a",)


@pytest.mark.parametrize("limit", ["max_lines", "max_chars", "max_entries", "max_file_bytes"])
def test_a_limit_that_lets_nothing_through_is_refused(limit: str):
    with pytest.raises(ValueError, match=limit):
        FileLimits(**{limit: 0})
