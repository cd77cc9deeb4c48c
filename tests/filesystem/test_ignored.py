"""What is ignored is what git ignores, and what common tools generate; checked against git."""

from __future__ import annotations

import os
import struct
import subprocess
import time
from pathlib import Path

import pytest
from trees import put, run_git

from weakincentives.filesystem.ignored import IgnoredFiles

pytest.importorskip("pathspec")

FILES = (
    "src/app.py", "src/build/out.o", "src/.env", ".env", "notes.log", "keep.log", "a b/x.tmp",
    "dist/bundle.js", "dist/other.js", "deep/dist/x", "mine.user", "local/secret",
    "caf\u00e9/x.tmp",
)  # fmt: skip


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home, root = tmp_path / "home", tmp_path / "repository"
    put(home / "my ignores", "*.user\n")
    put(home / ".gitconfig", '[user]\n\tname = x\n[core]\n\texcludesFile = "~/my ignores"\n')
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    root.mkdir()
    run_git(root, "init", "--quiet", "--template=")
    for path in FILES:
        put(root / path, "x\n")
    put(root / ".gitignore", "*.log\n!keep.log\ndist/\n.env\n*.tmp\n")
    put(root / "src/.gitignore", "build\n!.env\n")
    put(root / ".git/info/exclude", "/local/\n")
    run_git(root, "add", "--force", "dist/bundle.js", "src/app.py")
    return root


def ignored_by_git(root: Path) -> set[str]:
    command = ["git", "ls-files", "--exclude-standard", "--ignored", "--others", "-z"]
    done = subprocess.run(command, cwd=root, capture_output=True, check=True, text=True)
    return set(done.stdout.split("\0")) - {""}


@pytest.mark.parametrize("version", ["2", "3", "4"])
def test_the_same_files_are_ignored_as_by_git(repository: Path, version: str):
    if version == "3":  # it needs an extended flag
        run_git(repository, "add", "--intent-to-add", "keep.log")
    else:
        run_git(repository, "update-index", "--index-version", version)
    ignored = IgnoredFiles(repository)

    found = {path for path in FILES if ignored(path)}

    assert found == ignored_by_git(repository)
    assert "dist/bundle.js" not in found, "it is tracked"
    assert "mine.user" in found, "by the user's own rules"


def test_a_workspace_inside_a_repository_and_a_worktree_have_its_rules(
    repository: Path, tmp_path: Path
):
    inside = IgnoredFiles(repository / "src")
    assert [path for path in ("app.py", "build/out.o", ".env", "x.log") if inside(path)] == [
        "build/out.o", "x.log"
    ]  # fmt: skip
    assert inside.top("build/out.o") == "build"

    run_git(repository, "commit", "--quiet", "--message=x")
    run_git(repository, "worktree", "add", "--quiet", str(tmp_path / "tree"))
    worktree = IgnoredFiles(tmp_path / "tree")
    assert not worktree("dist/bundle.js"), "it is tracked there, too"


def test_generated_files_are_ignored_where_there_is_no_repository(tmp_path: Path):
    ignored = IgnoredFiles(tmp_path)
    paths = [f"src/__pycache__/{n}.pyc" for n in range(200)]
    paths += ["node_modules/a/b.js", "node_modules/c.js", ".DS_Store", "src/app.py", "build/x"]

    assert ignored.summary(paths) == (
        "+ 203 ignored files (src/__pycache__, node_modules, .DS_Store)"
    )
    assert ignored.summary(["src/app.py", "."]) == ""
    assert ignored.summary([".coverage"]) == "+ 1 ignored file (.coverage)"


def test_rules_cannot_hide_themselves(tmp_path: Path):
    put(tmp_path / ".gitignore", "*\n")

    ignored = IgnoredFiles(tmp_path)

    assert ignored("evil.py")
    assert not ignored(".gitignore")


@pytest.mark.parametrize("planted", ["link", "pipe", "directory", "index"])
def test_planted_rules_do_no_harm(tmp_path: Path, planted: str):
    (tmp_path / ".git").mkdir()
    rules = tmp_path / ".gitignore"
    if planted == "link":  # git does not follow it, either
        put(tmp_path / "elsewhere", "*\n")
        rules.symlink_to("elsewhere")
    elif planted == "pipe":
        os.mkfifo(rules)
    elif planted == "directory":
        rules.mkdir()
    else:
        put(tmp_path / ".git/index", b"DIRC\0\0\0\4\xff\xff\xff\xff" + b"\x80" * 500)

    ignored = IgnoredFiles(tmp_path)

    assert not ignored("app.py")
    assert ignored("x.pyc")


@pytest.mark.heavy
def test_a_deep_path_is_no_problem(tmp_path: Path):
    assert IgnoredFiles(tmp_path)("a/" * 2000 + "x.pyc")


@pytest.mark.parametrize("line", ["!", "a\\", "[z-a]"])
def test_a_line_that_is_no_rule_is_skipped(repository: Path, line: str):
    put(repository / ".gitignore", f"*.log\n{line}\n*.tmp\n")
    ignored = IgnoredFiles(repository)

    assert {path for path in FILES if ignored(path)} == ignored_by_git(repository)


@pytest.mark.parametrize(
    ("rule", "path"),
    [
        ("*a" * 12 + "*b", "a" * 200),
        ("*[a]" * 12 + "*b", "a" * 200),
        ("**/a/" * 12 + "b", "a/" * 200 + "c"),
        ("a/**/" * 12 + "b", "a/" * 200 + "c"),
        ("a**" * 12 + "/b", "a" * 200),
    ],
)
def test_a_rule_does_not_take_forever(tmp_path: Path, rule: str, path: str):
    put(tmp_path / ".gitignore", f"{rule}\n*.log\n")
    began = time.process_time()  # whatever else the machine does

    assert not IgnoredFiles(tmp_path)(path)
    assert IgnoredFiles(tmp_path)("x.log")
    assert time.process_time() - began < 20


def _entry(name: bytes) -> bytes:
    return bytes(62) + name + b"\0"


@pytest.mark.parametrize(
    "entries",
    [
        [_entry(b"\xff" * 400_000)],  # a number without end
        [_entry(b"\0" + b"x" * 1000) for _ in range(2000)],  # each name is longer: 2 GB
    ],
)
def test_a_planted_index_costs_neither_time_nor_memory(tmp_path: Path, entries: list[bytes]):
    put(tmp_path / ".git/index", "")
    head = struct.pack(">4sII", b"DIRC", 4, len(entries))
    (tmp_path / ".git/index").write_bytes(head + b"".join(entries))
    put(tmp_path / ".gitignore", "*.log\n")
    began = time.process_time()

    assert IgnoredFiles(tmp_path)("x.log")
    assert time.process_time() - began < 1.0


def test_a_planted_name_of_the_repository_is_no_error(tmp_path: Path):
    put(tmp_path / ".git", "gitdir: a\0b\n")
    put(tmp_path / ".gitignore", "*.log\n")

    assert IgnoredFiles(tmp_path)("x.log")
