"""Every version of every file: what each commit found and left."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from stored import damage
from weakincentives.filesystem import HostFilesystem, WorkspaceHistory
from weakincentives.filesystem.versions import WorkspaceVersions


@pytest.fixture
def files(tmp_path: Path) -> Iterator[HostFilesystem]:
    (tmp_path / "project").mkdir()
    with HostFilesystem(tmp_path / "project") as files:
        yield files


def versions_of(files: HostFilesystem) -> WorkspaceVersions:
    versions = WorkspaceVersions(WorkspaceHistory(files.root))
    versions.refresh()
    return versions


def steps_of(versions: WorkspaceVersions) -> list[list[tuple[str, str, bool, bool]]]:
    return [
        [
            ("/".join(s.parts), "/".join(s.origin or ()), s.before is not None, s.after is not None)
            for s in commit.steps
        ]
        for commit in versions.commits
    ]


def test_files_in_a_moved_directory_are_moved_with_it(files: HostFilesystem) -> None:
    files.write("dir/c", "x")
    files.move("dir", "other/dir")
    files.move("other", "dir")

    assert steps_of(versions_of(files)) == [
        [("dir/c", "", False, True)],
        [("other/dir/c", "dir/c", True, True)],
        [("dir/dir/c", "other/dir/c", True, True)],
    ]


def test_what_was_in_a_directory_does_not_come_back(files: HostFilesystem) -> None:
    """A later directory of the same name has only its own files."""
    files.write("dir/c", "x")
    files.delete("dir", recursive=True)
    files.write("dir/d", "y")

    assert WorkspaceHistory(files.root).files_at(3).glob("**/*") == ("dir/d",)


def test_a_removed_directory_gives_its_files_back(files: HostFilesystem) -> None:
    (files.root / "dir/deep").mkdir(parents=True)
    (files.root / "dir/deep/a").write_text("by hand")
    files.delete("dir", recursive=True)

    versions = versions_of(files)
    ((commit, step),) = versions.touching(("dir", "deep", "a"))

    assert step.after is None
    assert versions.before(commit, step) == b"by hand"


def test_a_rewrite_with_the_same_content_is_no_step(files: HostFilesystem) -> None:
    files.write("a", "same")
    files.write("a", "same")
    os.chmod(files.root / "a", 0o600)

    assert steps_of(versions_of(files)) == [[("a", "", False, True)], []]


def test_only_new_commits_are_read_again(files: HostFilesystem) -> None:
    files.write("a", "1")
    versions = versions_of(files)
    first = versions.commits[0]
    files.write("a", "2")

    versions.refresh()

    assert versions.commits[0] is first
    assert [commit.call.serial for commit in versions.commits] == [1, 2]
    assert [versions.after(*each) for each in versions.touching(("a",))] == [b"1", b"2"]


def test_a_damaged_commit_is_left_out(files: HostFilesystem) -> None:
    files.write("a", "1")
    files.write("b", "2")
    damage(files.store, 1)

    assert [commit.call.serial for commit in versions_of(files).commits] == [2]


@pytest.mark.parametrize("deleted", ["a", "b"])
def test_an_export_links_names_of_which_one_was_deleted_later(
    files: HostFilesystem, tmp_path: Path, deleted: str
) -> None:
    (files.root / "a").write_text("one file")
    os.link(files.root / "a", files.root / "b")
    files.write("c", "x")
    files.delete(deleted)

    WorkspaceHistory(files.root).files_at(1).export(tmp_path / "then")

    assert (tmp_path / "then/a").samefile(tmp_path / "then/b")
