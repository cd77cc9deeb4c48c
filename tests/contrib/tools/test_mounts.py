from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from file_agent import put
from hypothesis import given, settings
from hypothesis import strategies as st

from weakincentives.contrib.tools import HostMount, VfsConfig, VfsToolsSection
from weakincentives.errors import MissingExtra, PathEscapesRoot

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


def mounted(folder: Path, **options: Any) -> VfsToolsSection:
    return VfsToolsSection(config=VfsConfig(mounts=[HostMount(host_path=folder, **options)]))


def taken(section: VfsToolsSection) -> tuple[str, ...]:
    assert section.filesystem is not None
    return section.filesystem.glob("**/*")


def test_a_host_directory_is_copied_and_never_changed(tmp_path: Path):
    put(tmp_path, {"a.txt": "a", "b/c.bin": b"\0\xff", "b/.hidden": "h"})

    section = mounted(tmp_path)
    assert section.filesystem is not None
    section.filesystem.write("a.txt", "changed")

    assert taken(section) == ("a.txt", "b/.hidden", "b/c.bin")
    assert section.filesystem.read_bytes("b/c.bin") == b"\0\xff"
    assert (tmp_path / "a.txt").read_text() == "a"
    assert section.left_out == ()


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, ["a.py", "docs/b.md", "docs/c.py", "src/d/e.py"]),
        ({"include": ["*.py"]}, ["a.py", "docs/c.py", "src/d/e.py"]),
        ({"include": ["src/**/*.py", "docs/*.md"]}, ["docs/b.md", "src/d/e.py"]),
        ({"include": ["docs"]}, ["docs/b.md", "docs/c.py"]),
        ({"exclude": ["docs"]}, [".git/config", "a.py", "src/d/e.py"]),
        ({"exclude": ["src/**", "*.md", ".git"]}, ["a.py", "docs/c.py"]),
        ({"include": ["docs"], "exclude": ["*.py"]}, ["docs/b.md"]),
    ],
)
def test_patterns_say_what_is_taken(tmp_path: Path, options: dict[str, Any], names: list[str]):
    """One without a slash holds at any depth; one that matches a directory takes all in it."""
    files = ["a.py", "docs/b.md", "docs/c.py", "src/d/e.py", ".git/config"]
    put(tmp_path, dict.fromkeys(files, "x"))

    assert taken(mounted(tmp_path, **options)) == tuple(names)


def test_several_mounts_go_where_they_are_told_to_and_files_on_top(tmp_path: Path):
    one, two = put(tmp_path / "one", {"a": "1", "b": "1"}), put(tmp_path / "two", {"a": "2"})
    (one / "b").chmod(0o444)
    mounts = [HostMount(host_path=one), HostMount(host_path=two, path="/workspace/x/y")]

    section = VfsToolsSection(config=VfsConfig(mounts=mounts, files={"b": "top", "c": b"top"}))

    assert section.filesystem is not None
    assert {path: section.filesystem.read(path) for path in taken(section)} == {
        "a": "1",
        "b": "top",
        "c": "top",
        "x/y/a": "2",
    }


def test_a_file_that_may_only_be_read_stays_so(tmp_path: Path):
    put(tmp_path, {"a": "a"})
    (tmp_path / "a").chmod(0o444)

    section = mounted(tmp_path)

    assert section.filesystem is not None
    assert section.filesystem.is_readonly("a")


def test_what_is_too_much_is_left_out_and_said(tmp_path: Path):
    put(tmp_path, {"a": "x" * 5, "b": "x" * 50, "c": "x" * 5, "d": "x" * 5})

    section = mounted(tmp_path, max_file_bytes=20, max_bytes=12)

    assert taken(section) == ("a", "c")
    assert [(each.path, each.reason) for each in section.left_out] == [
        ("b", "too large"),
        ("d", "over the limit of the mount"),
    ]
    assert section.body(None, None).endswith(
        "Files that are not in the workspace:\n- over the limit of the mount: d\n- too large: b"
    )
    assert taken(mounted(tmp_path, max_files=1)) == ("a",)


def test_the_model_is_told_how_much_was_ignored_and_no_names(tmp_path: Path):
    put(
        tmp_path,
        {".gitignore": ".env\n", ".env": "KEY=1", "a": "", **{f"big{n}": "x" for n in range(12)}},
    )

    text = mounted(tmp_path, max_file_bytes=0, gitignore=True).body(None, None)

    assert "- ignored by .gitignore: 1" in text
    assert ".env" not in text
    assert "big0, big1, big10, big11, big2, big3, big4, big5, big6 and 3 more" in text


def test_links_are_followed_as_long_as_they_stay_inside(tmp_path: Path):
    folder = put(tmp_path / "in", {"a": "a", "d/b": "b"})
    put(tmp_path / "out", {"secret": "s"})
    for name, target in [
        ("to_a", "a"),
        ("to_d", "d"),
        ("out", "../out/secret"),
        ("outdir", tmp_path / "out"),
        ("loop", "loop"),
        ("nowhere", "x"),
    ]:
        os.symlink(target, folder / name)
    os.mkfifo(folder / "pipe")
    os.mknod(folder / "odd\udcff")

    section = mounted(folder)

    assert taken(section) == ("a", "d/b", "to_a")
    assert sorted((each.path, each.reason) for each in section.left_out) == [
        ("loop", "not readable"),
        ("nowhere", "not a regular file"),
        ("odd\udcff", "not readable"),
        ("out", "not readable"),
        ("outdir", "not readable"),
        ("pipe", "not a regular file"),
        ("to_d", "not a regular file"),
    ]
    section.body(None, None).encode()  # a name that is not text does not get into the prompt


def test_gitignore_files_are_honoured_where_they_stand(tmp_path: Path):
    put(
        tmp_path,
        {
            ".gitignore": "*.log\n/build/\n!keep.log\n",
            "a.log": "",
            "keep.log": "",
            "build/x": "",
            "src/build/y": "",
            "src/.gitignore": "!a.log\nz\n",
            "src/a.log": "",
            "src/z": "",
            "z": "",
        },
    )

    section = mounted(tmp_path)

    assert taken(section) == (
        ".gitignore",
        "keep.log",
        "src/.gitignore",
        "src/a.log",
        "src/build/y",
        "z",
    )
    assert [each.path for each in section.left_out] == ["a.log", "build/", "src/z"]
    assert "a.log" in taken(mounted(tmp_path, gitignore=False))


RULES = st.lists(
    st.sampled_from(
        ["a", "a/", "/a", "*.x", "!a", "!b.x", "a/b", "a/*", "!a/b.x", "**/c", "a/**", "[ab]",
         "# a", r"\#", "a ", "?.x", "/*", "!/a/", "c/**/a", "*"]
    ),
    max_size=4,
).map(lambda rules: "\n".join(rules) + "\n")  # fmt: skip
PATHS = st.lists(st.sampled_from(["a", "b.x", "c", "#", "d.x"]), min_size=1, max_size=3).map(
    "/".join
)


@needs_git
# Each example starts programs.
@settings(max_examples=settings.default.max_examples // 3)
@given(paths=st.sets(PATHS, max_size=8), rules=RULES, inner=RULES)
def test_what_git_ignores_is_ignored(
    tmp_path_factory: pytest.TempPathFactory, paths: set[str], rules: str, inner: str
):
    """Compared with what git itself lists as files it would add."""
    folder = tmp_path_factory.mktemp("ignored")
    # A path cannot be both a file and a directory.
    files = {p for p in paths if not any(other.startswith(f"{p}/") for other in paths)}
    put(folder, {**dict.fromkeys(files, "x"), ".gitignore": rules})
    if (folder / "a").is_dir():
        put(folder, {"a/.gitignore": inner})
    environment = {**os.environ, "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null"}
    run: dict[str, Any] = {"cwd": folder, "env": environment, "check": True, "capture_output": True}
    subprocess.run(["git", "init", "-q"], **run)
    listed = subprocess.run(["git", "ls-files", "-zco", "--exclude-standard"], **run).stdout

    assert taken(mounted(folder)) == tuple(sorted(filter(None, listed.decode().split("\0"))))


def test_without_pathspec_it_is_said_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    put(tmp_path, {".gitignore": "a\n"})
    monkeypatch.setitem(sys.modules, "pathspec", None)

    with pytest.raises(
        MissingExtra, match=r"pathspec is not installed; run: .*pip install .*\[files\]"
    ):
        mounted(tmp_path)
    assert taken(mounted(tmp_path, gitignore=False)) == (".gitignore",)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"include": "*.py"}, TypeError),
        ({"exclude": ".git"}, TypeError),
        ({"max_files": -1}, ValueError),
    ],
)
def test_a_mount_that_makes_no_sense_is_refused(
    tmp_path: Path, options: dict[str, Any], error: type[Exception]
):
    with pytest.raises(error):
        HostMount(host_path=tmp_path, **options)


@pytest.mark.parametrize("path", ["../x", "/etc"])
def test_a_mount_outside_the_workspace_is_refused(tmp_path: Path, path: str):
    with pytest.raises(PathEscapesRoot):
        mounted(tmp_path, path=path)


def test_a_mount_of_what_is_no_directory_is_refused(tmp_path: Path):
    with pytest.raises(NotADirectoryError, match="missing"):
        mounted(tmp_path / "missing")


def test_a_byte_order_mark_is_not_part_of_the_first_rule(tmp_path: Path):
    put(tmp_path, {".gitignore": "\ufeffout\n", "out/a.py": "", "b.py": ""})

    assert taken(mounted(tmp_path)) == (".gitignore", "b.py")


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ("*\n!b.x\n", ("b.x/b.x",)),
        ("*\n!*/\n!*.x\n", ("b.x/b.x",)),
        ("b.x/**\n!b.x/b.x\n", (".gitignore", "b.x/b.x")),
        ("b.x/\n!b.x\n", (".gitignore", "b.x/a", "b.x/b.x")),
        ("!b.x\nb.x/\n", (".gitignore",)),
    ],
)
def test_the_last_rule_about_a_directory_decides(
    tmp_path: Path, rules: str, expected: tuple[str, ...]
):
    put(tmp_path, {"b.x/b.x": "", "b.x/a": "", ".gitignore": rules})

    assert taken(mounted(tmp_path)) == expected
