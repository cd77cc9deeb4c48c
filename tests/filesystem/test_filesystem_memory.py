"""What the memory filesystem does, and what it refuses."""

from __future__ import annotations

import gc
import threading
import tracemalloc

import pytest

from weakincentives.clock import FakeClock
from weakincentives.errors import (
    AlreadyExists,
    BinaryFile,
    FilesystemError,
    NoSuchFile,
    NotADirectory,
    NotAFile,
    ReadOnlyFile,
    ToolValidationError,
)
from weakincentives.filesystem import FileStat, Filesystem, GrepMatch, MemoryFilesystem


@pytest.fixture
def clock():
    return FakeClock(start=100.0)


@pytest.fixture
def fs(clock):
    return MemoryFilesystem(
        {
            "README.md": "# Title\n",
            "src/app.py": "import os\nprint('hi')\n",
            "src/util/text.py": "import re\n",
            "logo.png": b"\x89PNG\xff",
        },
        clock=clock,
    )


def everything(fs):
    return {path: fs.read_bytes(path) for path in fs.glob("**")}


def test_it_is_a_filesystem():
    fs: Filesystem = MemoryFilesystem()

    assert fs.list() == ()


# Making one


def test_names_alone_make_empty_files():
    fs = MemoryFilesystem(["a.txt", "b/c.txt"])

    assert everything(fs) == {"a.txt": b"", "b/c.txt": b""}


def test_single_name_is_not_taken_for_its_letters():
    with pytest.raises(TypeError, match="list"):
        MemoryFilesystem("a.txt")
    with pytest.raises(TypeError, match="list"):
        MemoryFilesystem(["a.txt"], readonly="a.txt")


def test_files_that_cannot_both_be_there_are_refused():
    with pytest.raises(NotADirectory):
        MemoryFilesystem({"a": "x", "a/b": "y"})


def test_readonly_names_must_be_files():
    with pytest.raises(NoSuchFile):
        MemoryFilesystem(readonly=["missing"])
    with pytest.raises(NotAFile):
        MemoryFilesystem(["a/b"], readonly=["a"])


# Text and bytes


def test_text_is_stored_exactly():
    fs = MemoryFilesystem()

    fs.write("a.txt", "\ufeffone\r\ntwo\rthrée\n")

    assert fs.read("a.txt") == "\ufeffone\r\ntwo\rthrée\n"
    assert fs.read_bytes("a.txt") == "\ufeffone\r\ntwo\rthrée\n".encode()


def test_write_replaces_and_makes_directories():
    fs = MemoryFilesystem({"a/b.txt": "a long text"})

    fs.write("a/b.txt", "short")
    fs.write("x/y/z.txt", "new")

    assert fs.read("a/b.txt") == "short"
    assert fs.read("x/y/z.txt") == "new"


def test_append_adds_at_the_end_and_makes_the_file():
    fs = MemoryFilesystem()

    fs.append("log/a.txt", "one\n")
    fs.append("log/a.txt", "two\n")

    assert fs.read("log/a.txt") == "one\ntwo\n"


def test_binary_file_is_refused_as_text_and_given_as_bytes(fs):
    with pytest.raises(BinaryFile, match=r"logo\.png.*read_bytes"):
        fs.read("logo.png")

    assert fs.read_bytes("logo.png") == b"\x89PNG\xff"


def test_text_that_is_not_unicode_is_refused(fs):
    before = everything(fs)

    for change in (fs.write, fs.append):
        with pytest.raises(FilesystemError, match=r"README\.md.*surrogate"):
            change("README.md", "half \ud800")

    assert everything(fs) == before


def test_buffer_changed_afterwards_does_not_change_the_file():
    fs, buffer = MemoryFilesystem(), bytearray(b"abc")

    fs.write_bytes("a", buffer)
    buffer[0] = 0

    assert fs.read_bytes("a") == b"abc"
    with pytest.raises(TypeError):
        fs.write_bytes("a", 3)


@pytest.mark.parametrize("operation", ["read", "read_bytes", "stat", "list", "delete"])
def test_missing_file_is_named_with_what_to_do(fs, operation):
    with pytest.raises(NoSuchFile, match=r"config\.json.*List") as refusal:
        getattr(fs, operation)("./config.json")
    assert isinstance(refusal.value, FileNotFoundError)
    assert isinstance(refusal.value, ToolValidationError)


def test_directory_is_not_a_file(fs):
    for attempt in (
        lambda: fs.read("src"),
        lambda: fs.read_bytes("src"),
        lambda: fs.write("src", "x"),
        lambda: fs.append("src", "x"),
        lambda: fs.write(".", "x"),
        lambda: fs.set_readonly("src"),
    ):
        with pytest.raises(NotAFile, match="is a directory"):
            attempt()


def test_file_is_not_a_directory(fs):
    for attempt in (
        lambda: fs.list("README.md"),
        lambda: fs.glob("*", "README.md"),
        lambda: fs.mkdir("README.md"),
        lambda: fs.mkdir("README.md/x"),
        lambda: fs.read("README.md/x"),
        lambda: fs.write("README.md/x/y", "z"),
        lambda: fs.copy("src", "README.md/src"),
        lambda: fs.move("README.md", "README.md/x"),
    ):
        with pytest.raises(NotADirectory, match=r"README\.md is a file"):
            attempt()
    assert not fs.exists("README.md/x")


# Looking


def test_stat_tells_kind_size_time_and_mark(fs, clock):
    clock.advance(5)
    fs.write("src/new.py", "é")
    fs.set_readonly("src/new.py")

    assert fs.stat("/workspace/src/new.py") == FileStat(
        path="src/new.py", kind="file", size=2, modified=105.0, readonly=True
    )
    assert fs.stat("src") == FileStat(
        path="src", kind="directory", size=0, modified=105.0, readonly=False
    )
    assert fs.stat(".").path == "."


def test_directory_is_modified_when_an_entry_comes_or_goes(fs, clock):
    clock.advance(5)
    fs.write("src/app.py", "changed")
    assert fs.stat("src").modified == 100.0

    fs.write("src/deep/er/x", "")
    assert fs.stat("src").modified == 105.0
    assert fs.stat(".").modified == 100.0

    clock.advance(5)
    fs.delete("src/util", recursive=True)
    assert fs.stat("src").modified == 110.0


def test_list_gives_the_entries_sorted(fs):
    assert [(e.path, e.kind) for e in fs.list()] == [
        ("README.md", "file"),
        ("logo.png", "file"),
        ("src", "directory"),
    ]
    assert [e.path for e in fs.list("src")] == ["src/app.py", "src/util"]


@pytest.mark.parametrize(
    ("pattern", "path", "found"),
    [
        ("*", ".", ("README.md", "logo.png")),
        ("*.py", ".", ()),
        ("**/*.py", ".", ("src/app.py", "src/util/text.py")),
        ("**/*", "src", ("src/app.py", "src/util/text.py")),
        ("**", ".", ("README.md", "logo.png", "src/app.py", "src/util/text.py")),
        ("src/**", ".", ("src/app.py", "src/util/text.py")),
        ("src/**/text.py", ".", ("src/util/text.py",)),
        ("src/util/**/text.py", ".", ("src/util/text.py",)),
        ("**/util/**", ".", ("src/util/text.py",)),
        ("**/**/app.py", ".", ("src/app.py",)),
        ("README.md/**", ".", ()),
        ("src/*", ".", ("src/app.py",)),
        ("src", ".", ()),
        ("./src/a??.py", ".", ("src/app.py",)),
        ("[A-Z]*", ".", ("README.md",)),
        ("[!A-Z]*", ".", ("logo.png",)),
        ("[", ".", ()),
        ("", ".", ()),
        ("readme.md", ".", ()),
        ("/workspace/src/*.py", ".", ("src/app.py",)),
        ("/workspace/**/*.py", "src/util", ("src/util/text.py",)),
        ("/workspace/*.md", "src", ()),
    ],
)
def test_glob(fs, pattern, path, found):
    assert fs.glob(pattern, path) == found


def test_glob_takes_special_characters_in_names_as_they_are():
    fs = MemoryFilesystem(["a.b", "axb", "a\nb", ".env", "a\\b", "d[1]/x"])

    assert fs.glob("a.b") == ("a.b",)
    assert fs.glob("a?b") == ("a\nb", "a.b", "a\\b", "axb")
    assert fs.glob("*env") == (".env",)
    assert fs.glob("a\\b") == ("a\\b",)
    assert fs.glob("d[[]1]/*") == ("d[1]/x",)


def test_glob_sorts_by_path():
    assert MemoryFilesystem(["a/x", "a-b"]).glob("**") == ("a-b", "a/x")


def test_pattern_cannot_climb(fs):
    with pytest.raises(FilesystemError, match=r"'\.\.'"):
        fs.glob("../*")


def test_grep_gives_path_line_number_and_line(fs):
    assert fs.grep(r"^import \w+$") == (
        GrepMatch(path="src/app.py", line_number=1, line="import os"),
        GrepMatch(path="src/util/text.py", line_number=1, line="import re"),
    )
    assert [m.path for m in fs.grep("import", "src/util")] == ["src/util/text.py"]
    assert [m.line_number for m in fs.grep("print", "src/app.py")] == [2]
    assert fs.grep("import", glob="*.md") == ()
    assert len(fs.grep("import", limit=1)) == 1
    assert fs.grep("import", limit=0) == ()


def test_grep_counts_lines_as_editors_do():
    fs = MemoryFilesystem({"a": "one\r\ntwo\x0cstill two\u2028and\nthree", "empty": ""})

    assert [(m.line_number, m.line) for m in fs.grep("one$|three")] == [(1, "one"), (3, "three")]
    assert fs.grep("^$") == ()
    assert len(fs.grep("")) == 3


def test_grep_leaves_binary_files_out(fs):
    fs.write_bytes("data.bin", b"import\0")

    assert fs.grep("PNG|import\0") == ()


def test_wrong_expression_is_explained(fs):
    with pytest.raises(FilesystemError, match=r"Not a valid regular expression: \(oops"):
        fs.grep("(oops")


def test_search_looks_at_file_names_in_any_case(fs):
    fs.write("src/README.txt", "")

    assert fs.search("readme") == ("README.md", "src/README.txt")
    assert fs.search("APP") == ("src/app.py",)
    assert fs.search("src") == ()
    assert fs.search("e", limit=2) == ("README.md", "src/README.txt")


def test_negative_limit_is_refused(fs):
    with pytest.raises(FilesystemError, match="limit"):
        fs.search("a", limit=-1)
    with pytest.raises(FilesystemError, match="limit"):
        fs.grep("a", limit=-1)


# Directories, moving, copying, deleting


def test_mkdir_makes_parents_and_may_be_repeated(fs):
    fs.mkdir("a/b")
    fs.write("a/b/c", "x")
    fs.mkdir("a/b")
    fs.mkdir(".")

    assert fs.read("a/b/c") == "x"


def test_move_takes_a_directory_with_all_that_is_in_it(fs):
    fs.move("src", "lib/python")

    assert not fs.exists("src")
    assert fs.glob("lib/**") == ("lib/python/app.py", "lib/python/util/text.py")


def test_copy_is_independent_of_the_original(fs, clock):
    clock.advance(9)
    fs.copy("src", "backup")
    fs.write("backup/app.py", "changed")

    assert fs.read("src/app.py").startswith("import os")
    assert fs.stat("backup/util/text.py").modified == 100.0


@pytest.mark.parametrize("operation", ["move", "copy"])
def test_existing_destination_needs_overwrite(fs, operation):
    transfer = getattr(fs, operation)
    before = everything(fs)

    with pytest.raises(AlreadyExists, match=r"logo\.png exists.*overwrite"):
        transfer("README.md", "logo.png")
    assert everything(fs) == before

    transfer("README.md", "logo.png", overwrite=True)
    assert fs.read("logo.png") == "# Title\n"
    assert fs.exists("README.md") == (operation == "copy")


@pytest.mark.parametrize("operation", ["move", "copy"])
def test_overwrite_replaces_like_with_like(fs, operation):
    transfer = getattr(fs, operation)

    with pytest.raises(NotAFile):
        transfer("README.md", "src", overwrite=True)
    with pytest.raises(NotADirectory):
        transfer("src", "README.md", overwrite=True)

    fs.write("other/old.txt", "x")
    transfer("src", "other", overwrite=True)
    assert fs.glob("other/**") == ("other/app.py", "other/util/text.py")


@pytest.mark.parametrize("operation", ["move", "copy"])
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(
    ("source", "destination"),
    [("src", "src/inner"), ("src", "src/util"), (".", "a"), (".", "."), ("src/util", ".")],
)
def test_nothing_goes_into_itself_or_replaces_what_holds_it(
    fs, operation, overwrite, source, destination
):
    before = everything(fs)

    with pytest.raises(FilesystemError):
        getattr(fs, operation)(source, destination, overwrite=overwrite)

    assert everything(fs) == before


@pytest.mark.parametrize("operation", ["move", "copy"])
def test_replacing_a_file_by_itself_keeps_it(fs, operation):
    before = everything(fs)

    getattr(fs, operation)("src", "src", overwrite=True)

    assert everything(fs) == before


def test_directory_that_is_not_empty_needs_recursive(fs):
    with pytest.raises(FilesystemError, match=r"src is not empty.*recursive"):
        fs.delete("src")
    assert fs.exists("src/app.py")

    fs.delete("src", recursive=True)
    assert not fs.exists("src")

    fs.mkdir("empty")
    fs.delete("empty")
    assert not fs.exists("empty")


def test_deleting_the_last_file_keeps_its_directory():
    fs = MemoryFilesystem(["a/b"])

    fs.delete("a/b")

    assert fs.stat("a").kind == "directory"


def test_root_cannot_be_deleted(fs):
    with pytest.raises(FilesystemError, match="root"):
        fs.delete("/workspace", recursive=True)


# Read-only files


def test_readonly_file_can_be_read_and_copied_but_not_changed():
    fs = MemoryFilesystem({"d/spec.md": "x", "d/free": "y"}, readonly=["d/spec.md"])

    assert fs.is_readonly("d/spec.md")
    assert not fs.is_readonly("d/free")
    assert not fs.is_readonly("d")
    assert not fs.is_readonly("missing")
    assert not fs.is_readonly("d/free/x")
    for attempt in (
        lambda: fs.write("d/spec.md", ""),
        lambda: fs.append("d/spec.md", "more"),
        lambda: fs.delete("d/spec.md"),
        lambda: fs.delete("d", recursive=True),
        lambda: fs.move("d/spec.md", "e"),
        lambda: fs.move("d", "e"),
        lambda: fs.move("d/free", "d/spec.md", overwrite=True),
    ):
        with pytest.raises(ReadOnlyFile, match=r"d(/spec\.md)? is read-only"):
            attempt()
    fs.copy("d", "e")
    assert fs.is_readonly("e/spec.md")
    assert everything(fs) == {"d/spec.md": b"x", "d/free": b"y"} | {
        "e/spec.md": b"x",
        "e/free": b"y",
    }


def test_readonly_mark_can_be_taken_away(clock):
    fs = MemoryFilesystem({"d/a": "x"}, readonly=["d/a"], clock=clock)
    clock.advance(1)

    fs.set_readonly("d/a", False)

    assert fs.stat("d/a").modified == 100.0
    fs.move("d", "e")
    fs.delete("e", recursive=True)


# Snapshots


def test_restore_brings_back_exactly_what_was(fs, clock):
    fs.mkdir("empty")
    before, token = [fs.list(), fs.list("src"), everything(fs)], fs.snapshot()
    clock.advance(7)

    fs.write("src/app.py", "broken")
    fs.delete("empty")
    fs.move("README.md", "src/README.md")
    fs.set_readonly("logo.png")
    after = fs.snapshot()
    fs.restore(token)
    assert [fs.list(), fs.list("src"), everything(fs)] == before

    fs.restore(after)
    assert fs.read("src/app.py") == "broken"


def test_token_of_another_filesystem_is_refused(fs):
    for token in (MemoryFilesystem().snapshot(), None, "token"):
        with pytest.raises(ValueError, match="snapshot"):
            fs.restore(token)


def test_dropped_snapshot_frees_what_only_it_held():
    fs = MemoryFilesystem()
    tracemalloc.start()
    try:
        fs.write_bytes("big", bytes(5_000_000))
        token = fs.snapshot()
        fs.delete("big")
        held, _ = tracemalloc.get_traced_memory()
        assert held > 4_000_000

        del token
        gc.collect()
        freed, _ = tracemalloc.get_traced_memory()
        assert freed < 1_000_000
    finally:
        tracemalloc.stop()


def test_thousands_of_nested_directories_do_no_harm():
    fs, deep = MemoryFilesystem(), "/".join(["a"] * 2000)
    fs.write(f"{deep}/x", "")
    for _ in range(5):
        fs.move("a", "b")
        fs.mkdir(deep)
        fs.move("b", f"{deep}/b")
    assert len(fs.search("x")) == 1

    fs.delete("a", recursive=True)

    assert fs.list() == ()


# Threads


def test_threads_that_append_lose_nothing():
    fs = MemoryFilesystem()
    start = threading.Event()

    def work(number):
        start.wait()
        for turn in range(5):
            fs.append("log.txt", f"{number}.{turn}\n")
            fs.write(f"out/{number}/{turn}", "x")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(200)]
    for thread in threads:
        thread.start()
    start.set()
    for thread in threads:
        thread.join()

    expected = sorted(f"{number}.{turn}" for number in range(200) for turn in range(5))
    assert sorted(fs.read("log.txt").split()) == expected
    assert len(fs.glob("out/**")) == 1000
