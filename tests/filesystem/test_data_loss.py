"""What other tools have lost for their users when they went back: here it all comes back exactly.

Each case is done on a branch that is merged and undone, and by a call that is undone or rewound.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from trees import Seen, look, make_repository, plant, put, run_git

from weakincentives.filesystem import HostFilesystem

pytestmark = pytest.mark.skipif(
    os.name != "posix" or shutil.which("git") is None, reason="needs POSIX calls, and git"
)

OWN = ("config", "hooks", ".git")
"""What the user lets calls change."""

CASES = {
    "untracked and ignored files": "rm .env caf*; echo other > node_modules/pkg/index.js",
    "files that git would not add": "rm -r hollow; rm pipe; mkfifo d/pipe; mkdir -p new/empty",
    "modification times": "touch -d @1000000 a d/a; echo more >> b; touch d/empty",
    "the staged index": "cd repo && echo more >> tracked.py && git add tracked.py",
    "the staged index and a commit": "cd repo && echo more >> tracked.py && git -c user.name=a"
    " -c user.email=a@b commit -qam more && git checkout -q -b other",
    "deletions by commands": "rm -rf d e; git -C repo clean -qfdx",
    "deletion of everything": "rm -rf -- * 2>/dev/null; true",
    "permissions": "chmod 600 d/run.sh; chmod 755 a; chmod 700 hollow; chmod -R a-w bystander",
    "links": "ln -sf d/run.sh to_a; rm to_d; mkdir to_d; ln twin another; ln -s nowhere broken",
    "nested repositories": "rm -rf repo",
    "a moved nested repository": "mv repo d/repo",
    "kinds exchanged": "rm a; mkdir a; echo x > a/x; rm -r d; echo a file > d; rm e/shared",
}


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    above = tmp_path_factory.mktemp("planted")
    repository = above / "repository"
    make_repository(repository)
    put(repository / "staged.py", "staged = True\n")
    run_git(repository, "add", "staged.py")
    (above / "tree").mkdir()
    plant(above / "tree", repository)
    return above / "tree"


@pytest.fixture
def root(planted: Path, tmp_path: Path) -> Path:
    # All of it, with hard links and times.
    subprocess.run(["cp", "-a", f"{planted}/.", tmp_path], check=True)
    return tmp_path / "workspace"


@pytest.mark.parametrize("case", CASES)
def test_a_merged_branch_is_undone_exactly(root: Path, case: str) -> None:
    before = look(root)
    with (
        HostFilesystem(root, unprotected=OWN) as fs,
        contextlib.closing(fs.branch("b", unprotected=OWN)) as branch,
    ):
        result = branch.run(["sh", "-c", CASES[case]])
        assert result.returncode == 0, result.stderr
        assert look(root) == before, "a branch changed the directory"
        branch.merge_into(fs)
        merged = look(root)
        assert merged != before
        untouched = {
            p for p in before if not any(p == q or p.startswith(f"{q}/") for q in branch.info.paths)
        }
        kept = {p for p in untouched if before[p].kind != "directory"}
        now, then = without_links(merged), without_links(before)
        assert {path: now[path] for path in kept} == {path: then[path] for path in kept}
        assert not fs.undo(fs.history()[-1].call_id)
    assert inside(look(root)) == inside(before)


@pytest.mark.parametrize("way", ["undo", "rewind"])
@pytest.mark.parametrize("case", CASES)
def test_a_call_is_undone_exactly(root: Path, case: str, way: str) -> None:
    with HostFilesystem(root, unprotected=OWN) as fs:
        fs.write("first", "first")
        before = look(root)
        result = fs.run(["sh", "-c", CASES[case]])
        assert result.returncode == 0, result.stderr
        assert look(root) != before
        first, call = fs.history()
        told = fs.undo(call.call_id) if way == "undo" else fs.revert_to(first.call_id)
        assert not told
    assert inside(look(root)) == inside(before)


@pytest.mark.parametrize("case", CASES)
def test_a_branch_of_an_earlier_call_has_everything(root: Path, case: str) -> None:
    with HostFilesystem(root, unprotected=OWN) as fs:
        fs.write("first", "first")
        before = look(root)
        fs.run(["sh", "-c", CASES[case]])
        changed = look(root)
        with contextlib.closing(fs.branch("b", at=1, unprotected=OWN)) as branch:
            copy = root.parent / "copy"
            result = branch.run(["cp", "-a", ".", str(copy)])
            assert result.returncode == 0, result.stderr
    assert look(root) == changed
    assert of_files(without_links(look(copy))) == of_files(without_links(before))


@pytest.mark.heavy
def test_a_huge_directory_comes_back(tmp_path: Path) -> None:
    root = tmp_path / "work"
    for number in range(20_000):
        put(root / f"node_modules/p{number % 200}/f{number}.js", f"{number}\n")
    before = look(root)
    with (
        HostFilesystem(root, unprotected=OWN) as fs,
        contextlib.closing(fs.branch("b", unprotected=OWN)) as branch,
    ):
        branch.run("rm -rf node_modules; echo done > done")
        branch.merge_into(fs)
        assert not (root / "node_modules").exists()
        assert not fs.undo(fs.history()[-1].call_id)
        assert look(root) == before
        fs.run("rm -rf node_modules")
        assert not fs.undo(fs.history()[-1].call_id)
    assert look(root) == before


def inside(found: dict[str, Seen]) -> dict[str, Seen]:
    """Leave out names outside of the workspace: only a rollback restores hard links to these."""
    return {p: seen._replace(links=0) for p, seen in found.items()}


def without_links(found: dict[str, Seen]) -> dict[str, Seen]:
    return {p: seen._replace(links=0, names=frozenset()) for p, seen in found.items()}


def of_files(found: dict[str, Seen]) -> dict[str, Seen]:
    """Leave out the times of directories, which an earlier state does not have."""
    return {
        path: seen._replace(modified=0) if seen.kind == "directory" else seen
        for path, seen in found.items()
    }


def test_an_edit_in_a_directory_that_an_undo_brought_back_stays(tmp_path: Path) -> None:
    """To rewind that undo takes the directory away again, but not with the edit in it."""
    root = tmp_path / "work"
    root.mkdir()
    with HostFilesystem(root) as fs:
        fs.write("d/e/f", "by a call")
        fs.undo(fs.history()[-1].call_id)
        gone = fs.history()[-1].call_id
        fs.undo(gone)
        put(root / "d/e/f", "by a person")
        told = fs.revert_to(gone)

    assert (root / "d/e/f").read_text() == "by a person"
    assert "d/e/f" in told[0]
