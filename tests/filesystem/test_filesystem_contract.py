"""What every filesystem does, and what it refuses."""

from __future__ import annotations

import threading

import pytest

from weakincentives.errors import (
    AlreadyExists,
    BinaryFile,
    FilesystemError,
    NoSuchFile,
    NotADirectory,
    NotAFile,
    PathEscapesRoot,
    ReadOnlyFile,
    ToolValidationError,
)
from weakincentives.filesystem import Filesystem, GrepMatch


@pytest.fixture
def fs(make):
    return make(
        {
            "README.md": "# Title\n",
            "src/app.py": "import os\nprint('hi')\n",
            "src/util/text.py": "import re\n",
            "logo.png": b"\x89PNG\xff",
        }
    )


def everything(fs):
    return {path: fs.read_bytes(path) for path in fs.glob("**")}


def test_it_is_a_filesystem(make):
    fs: Filesystem = make()

    assert fs.list() == ()


# Text and bytes


def test_text_is_stored_exactly(make):
    fs = make()

    fs.write("a.txt", "\ufeffone\r\ntwo\rthrée\n")

    assert fs.read("a.txt") == "\ufeffone\r\ntwo\rthrée\n"
    assert fs.read_bytes("a.txt") == "\ufeffone\r\ntwo\rthrée\n".encode()


def test_write_replaces_and_makes_directories(make):
    fs = make({"a/b.txt": "a long text"})

    fs.write("a/b.txt", "short")
    fs.write("x/y/z.txt", "new")

    assert fs.read("a/b.txt") == "short"
    assert fs.read("x/y/z.txt") == "new"


def test_append_adds_at_the_end_and_makes_the_file(make):
    fs = make()

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


def test_buffer_changed_afterwards_does_not_change_the_file(make):
    fs, buffer = make(), bytearray(b"abc")

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


REFUSALS = [
    (
        NoSuchFile,
        "No such file or directory: no/file. List its directory to see what is there",
        [
            lambda fs: fs.read("no/file"),
            lambda fs: fs.read_bytes("./no/file"),
            lambda fs: fs.stat("no/file"),
            lambda fs: fs.list("no/file"),
            lambda fs: fs.glob("*", "no/file"),
            lambda fs: fs.grep("x", "no/file"),
            lambda fs: fs.delete("no/file"),
            lambda fs: fs.move("no/file", "a"),
            lambda fs: fs.copy("no/file", "a"),
            lambda fs: fs.set_readonly("no/file"),
        ],
    ),
    (
        NotAFile,
        "src is a directory. Give the path of a file",
        [
            lambda fs: fs.read("src"),
            lambda fs: fs.read_bytes("src/"),
            lambda fs: fs.write("src", "x"),
            lambda fs: fs.write_bytes("src", b"x"),
            lambda fs: fs.append("src", "x"),
            lambda fs: fs.set_readonly("src"),
            lambda fs: fs.move("README.md", "src", overwrite=True),
            lambda fs: fs.copy("README.md", "src", overwrite=True),
        ],
    ),
    (
        NotADirectory,
        "README.md is a file, not a directory. Give the path of a directory",
        [
            lambda fs: fs.read("README.md/x"),
            lambda fs: fs.stat("README.md/x/y"),
            lambda fs: fs.list("README.md"),
            lambda fs: fs.glob("*", "README.md"),
            lambda fs: fs.mkdir("README.md"),
            lambda fs: fs.mkdir("README.md/x"),
            lambda fs: fs.write("README.md/x/y", "z"),
            lambda fs: fs.append("README.md/x", "z"),
            lambda fs: fs.delete("README.md/x"),
            lambda fs: fs.copy("src", "README.md/src"),
            lambda fs: fs.move("src", "README.md/src", overwrite=True),
            lambda fs: fs.move("src", "README.md", overwrite=True),
            lambda fs: fs.copy("src", "README.md", overwrite=True),
        ],
    ),
    (
        ReadOnlyFile,
        "spec/locked is read-only. Leave it as it is, or work on another file",
        [
            lambda fs: fs.write("spec/locked", ""),
            lambda fs: fs.write_bytes("spec/locked", b""),
            lambda fs: fs.append("spec/locked", ""),
            lambda fs: fs.delete("spec/locked"),
            lambda fs: fs.move("spec/locked", "a"),
            lambda fs: fs.move("README.md", "spec/locked", overwrite=True),
            lambda fs: fs.copy("README.md", "spec/locked", overwrite=True),
        ],
    ),
    (
        ReadOnlyFile,
        "A file in spec is read-only. Leave it as it is, or work on another file",
        [
            lambda fs: fs.delete("spec", recursive=True),
            lambda fs: fs.move("spec", "a"),
            lambda fs: fs.move("src", "spec", overwrite=True),
            lambda fs: fs.copy("src", "spec", overwrite=True),
        ],
    ),
    (
        AlreadyExists,
        "logo.png exists. Pass overwrite=True to replace it",
        [
            lambda fs: fs.move("README.md", "logo.png"),
            lambda fs: fs.copy("README.md", "logo.png"),
            lambda fs: fs.move("src", "logo.png"),
            lambda fs: fs.move("logo.png", "logo.png"),
        ],
    ),
    (
        BinaryFile,
        "Not a UTF-8 text file: logo.png. Use read_bytes to get its bytes",
        [lambda fs: fs.read("logo.png")],
    ),
    (
        PathEscapesRoot,
        "../a is outside the root. Use a relative path, or one below /workspace",
        [
            lambda fs: fs.read("../a"),
            lambda fs: fs.write("../a", ""),
            lambda fs: fs.exists("../a"),
            lambda fs: fs.is_readonly("../a"),
            lambda fs: fs.stat("../a"),
            lambda fs: fs.list("../a"),
            lambda fs: fs.glob("*", "../a"),
            lambda fs: fs.grep("x", "../a"),
            lambda fs: fs.mkdir("../a"),
            lambda fs: fs.move("src", "../a"),
            lambda fs: fs.copy("../a", "src"),
            lambda fs: fs.delete("../a"),
            lambda fs: fs.normalize("../a"),
        ],
    ),
    (
        FilesystemError,
        "src is not empty. Pass recursive=True to delete it with all that is in it",
        [lambda fs: fs.delete("src")],
    ),
    (
        FilesystemError,
        "The root directory cannot be deleted. Delete what is in it",
        [lambda fs: fs.delete("."), lambda fs: fs.delete("/workspace", recursive=True)],
    ),
    (
        FilesystemError,
        "The root directory cannot be moved or copied. Name what is in it",
        [lambda fs: fs.move(".", "a"), lambda fs: fs.copy(".", "src", overwrite=True)],
    ),
    (
        FilesystemError,
        "src cannot be put into itself, at src/util/x",
        [lambda fs: fs.move("src", "src/util/x"), lambda fs: fs.copy("src", "src/util/x")],
    ),
    (
        FilesystemError,
        "src cannot be replaced by src/util, which is in it",
        [
            lambda fs: fs.move("src/util", "src", overwrite=True),
            lambda fs: fs.copy("src/util", "src", overwrite=True),
        ],
    ),
]


@pytest.mark.parametrize(("error", "text", "attempts"), REFUSALS, ids=[r[1] for r in REFUSALS])
def test_refusals_read_the_same_everywhere_and_change_nothing(fs, error, text, attempts):
    fs.write("spec/locked", "x")
    fs.set_readonly("spec/locked")
    before = everything(fs), fs.list(), fs.list("src"), fs.list("spec")

    for attempt in attempts:
        with pytest.raises(FilesystemError) as refusal:
            attempt(fs)
        assert (type(refusal.value), str(refusal.value)) == (error, text)

    assert (everything(fs), fs.list(), fs.list("src"), fs.list("spec")) == before


# Looking


def test_stat_tells_kind_size_and_mark(fs):
    fs.write("src/new.py", "é")
    fs.set_readonly("src/new.py")

    file, directory = fs.stat("/workspace/src/new.py"), fs.stat("src")

    assert (file.path, file.kind, file.size, file.readonly) == ("src/new.py", "file", 2, True)
    assert (directory.path, directory.kind, directory.size) == ("src", "directory", 0)
    assert not directory.readonly
    assert fs.stat(".").path == "."


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


def test_glob_takes_special_characters_in_names_as_they_are(make):
    fs = make(["a.b", "axb", "a\nb", ".env", "a\\b", "d[1]/x"])

    assert fs.glob("a.b") == ("a.b",)
    assert fs.glob("a?b") == ("a\nb", "a.b", "a\\b", "axb")
    assert fs.glob("*env") == (".env",)
    assert fs.glob("a\\b") == ("a\\b",)
    assert fs.glob("d[[]1]/*") == ("d[1]/x",)


def test_glob_sorts_by_path(make):
    assert make(["a/x", "a-b"]).glob("**") == ("a-b", "a/x")


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


def test_grep_counts_lines_as_editors_do(make):
    fs = make({"a": "one\r\ntwo\x0cstill two\u2028and\nthree", "empty": ""})

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


def test_copy_is_independent_of_the_original(fs):
    fs.copy("src", "backup")
    fs.write("backup/app.py", "changed")

    assert fs.read("src/app.py").startswith("import os")
    assert fs.stat("backup/util/text.py").modified == fs.stat("src/util/text.py").modified


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


def test_deleting_the_last_file_keeps_its_directory(make):
    fs = make(["a/b"])

    fs.delete("a/b")

    assert fs.stat("a").kind == "directory"


def test_root_cannot_be_deleted(fs):
    with pytest.raises(FilesystemError, match="root"):
        fs.delete("/workspace", recursive=True)


# Read-only files


def test_readonly_file_can_be_read_and_copied_but_not_changed(make):
    fs = make({"d/spec.md": "x", "d/free": "y"}, readonly=["d/spec.md"])

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


def test_readonly_mark_can_be_taken_away(make):
    fs = make({"d/a": "x"}, readonly=["d/a"])
    before = fs.stat("d/a").modified

    fs.set_readonly("d/a", False)

    assert fs.stat("d/a").modified == before
    assert not fs.is_readonly("d/a")
    fs.move("d", "e")
    fs.delete("e", recursive=True)


# Snapshots


def test_restore_brings_back_exactly_what_was(fs):
    fs.mkdir("empty")
    before, token = [fs.list(), fs.list("src"), everything(fs)], fs.snapshot()

    fs.write("src/app.py", "broken")
    fs.delete("empty")
    fs.move("README.md", "src/README.md")
    fs.set_readonly("logo.png")
    fs.restore(token)

    assert [fs.list(), fs.list("src"), everything(fs)] == before


def test_snapshot_can_be_restored_again(fs):
    before, token = everything(fs), fs.snapshot()
    for content in ("one", "two"):
        fs.write("new/file", content)
        fs.delete("src", recursive=True)
        fs.restore(token)
        assert everything(fs) == before


def test_snapshots_nest(fs):
    outer = fs.snapshot()
    fs.write("a", "1")
    inner = fs.snapshot()
    fs.write("a", "2")

    fs.restore(inner)
    assert fs.read("a") == "1"

    fs.restore(outer)
    assert not fs.exists("a")


def test_token_of_another_filesystem_is_refused(make, fs):
    for token in (make().snapshot(), None, "token"):
        with pytest.raises(ValueError, match="snapshot"):
            fs.restore(token)


# Threads


def test_threads_that_append_lose_nothing(make, kind):
    fs, count = make(), 200 if kind == "memory" else 20
    start = threading.Event()

    def work(number):
        start.wait()
        for turn in range(5):
            fs.append("log.txt", f"{number}.{turn}\n")
            fs.write(f"out/{number}/{turn}", "x")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    start.set()
    for thread in threads:
        thread.join()

    expected = sorted(f"{number}.{turn}" for number in range(count) for turn in range(5))
    assert sorted(fs.read("log.txt").split()) == expected
    assert len(fs.glob("out/**")) == 5 * count
