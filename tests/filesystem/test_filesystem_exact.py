"""A call that fails leaves a real directory exactly as it was, and the user's git with it.

Everything goes through the pipeline: a tool is called, its handler changes files and then fails.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from trees import look, make_repository, plant, put, run_git

from weakincentives.filesystem import Filesystem, HostFilesystem
from weakincentives.prompt import Tool, ToolContext, ToolResult
from weakincentives.runtime import Session

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")


@dataclass(frozen=True, slots=True)
class Nothing:
    pass


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    directory = tmp_path_factory.mktemp("template") / "repo"
    make_repository(directory)
    return directory


@pytest.fixture
def root(tmp_path, repository):
    """A user's repository with staged, unstaged, ignored and untracked things in it."""
    plant(tmp_path, repository)
    root = tmp_path / "workspace"
    run_git(root, "init", "--quiet", "--template=", "--initial-branch=main")
    run_git(root, "add", "a", "b", "d/a", ".gitignore")
    run_git(root, "commit", "--quiet", "--message=first")
    put(root / "a", "staged\n")
    run_git(root, "add", "a", "d/run.sh")
    put(root / "a", "staged, then changed\n")
    return root


@pytest.fixture
def host(root):
    with HostFilesystem(root) as host:
        yield host


def call(host, work, reach=None) -> ToolResult[Any]:
    """Call a tool that works on the directory."""

    def handler(params: Nothing, *, context: ToolContext) -> ToolResult[None]:
        answer = work(context.filesystem, context)
        return answer if isinstance(answer, ToolResult) else ToolResult.ok(None, message="done")

    tool = Tool[Nothing, None](name="work", description="Works.", handler=handler, reach=reach)
    return tool(Nothing(), context=ToolContext(session=Session(), resources={Filesystem: host}))


def git_says(root: Path) -> tuple[str, ...]:
    """What the user's git, and the repository inside, say about the state of things."""
    return tuple(
        run_git(directory, *command)
        for directory in (root, root / "repo")
        for command in (
            ("status", "--porcelain=v2", "--ignored", "--untracked-files=all"),
            ("diff", "--cached"),
            ("diff",),
            ("stash", "list"),
            ("for-each-ref",),
        )
    )


def change_ignored_file(fs):
    fs.append(".env", "MORE=1\n")


def delete_ignored_directory(fs):
    fs.delete("node_modules", recursive=True)


def replace_ignored_directory(fs):
    fs.delete("node_modules", recursive=True)
    fs.write("node_modules/pkg/index.js", "module.exports = 2\n")
    fs.write("node_modules/other/index.js", "")


def delete_empty_directories(fs):
    fs.delete("d/empty")
    fs.delete("hollow", recursive=True)


def fill_empty_directories(fs):
    fs.write("d/empty/x", "")
    fs.write("hollow/er/deep/er/x", "")


def change_staged_file(fs):
    fs.write("a", "by the agent\n")


def change_the_index_itself(fs):
    fs.write_bytes(".git/index", b"garbage")
    fs.delete(".git/HEAD")
    fs.write("repo/.git/index", "garbage")


def change_file_with_two_names(fs):
    fs.write("twin", "changed through one name\n")
    fs.delete("d/twin")


def change_file_shared_with_outside(fs):
    fs.append("e/shared", "more")
    fs.move("e/shared", "elsewhere")


def change_modes(fs):
    fs.set_readonly("d/run.sh")
    fs.set_readonly("locked/file", False)
    fs.write("locked/file", "no longer locked")


def move_things_about(fs):
    fs.move("d", "new/d")
    fs.move("a", "b", overwrite=True)
    fs.move("new/d/run.sh", "a")
    fs.copy("e", "d")


def change_file_and_directory_places(fs):
    fs.delete("a")
    fs.write("a/x/y", "now a directory")
    fs.delete("hollow", recursive=True)
    fs.write("hollow", "now a file")


def change_symlinks(fs):
    fs.delete("to_d")
    fs.write("to_d/x", "now a directory")
    fs.move("dangling", "led")
    fs.write("to_a", "through a link")


def change_many(fs):
    for number in range(200):
        fs.write(f"new/{number % 10}/{number}", "x" * number)
    fs.delete("new/3", recursive=True)


def change_strange_names(fs):
    fs.write("caf\u00e9", "x")
    fs.delete("cafe\u0301")
    fs.delete("\U0001f389 party", recursive=True)


WORK = [
    *(change_ignored_file, delete_ignored_directory, replace_ignored_directory),
    *(delete_empty_directories, fill_empty_directories, change_staged_file),
    *(change_the_index_itself, change_file_with_two_names, change_file_shared_with_outside),
    *(change_modes, move_things_about, change_file_and_directory_places, change_symlinks),
    *(change_many, change_strange_names),
]


@pytest.mark.parametrize("work", WORK, ids=lambda work: work.__name__)
def test_call_that_raises_leaves_everything_as_it_was(host, root, work):
    said = git_says(root)  # first: git may bring its index up to date
    before = without_store(look(root.parent))

    def work_and_raise(fs, context):
        work(fs)
        assert without_store(look(root.parent)) != before
        raise ValueError("the last line of the handler")

    result = call(host, work_and_raise)

    assert result.message == "the last line of the handler"
    assert without_store(look(root.parent)) == before
    assert git_says(root) == said


@pytest.mark.parametrize("work", WORK, ids=lambda work: work.__name__)
def test_failed_call_after_a_kept_one_goes_back_to_the_kept_one(host, root, work):
    assert call(host, lambda fs, context: work(fs)).success
    kept = without_store(look(root.parent))

    def change_all_files(fs, context):
        for path in fs.glob("**/*"):
            if not fs.is_readonly(path):
                fs.delete(path)
        return ToolResult.error("a failure that is not an exception")

    assert not call(host, change_all_files).success
    assert without_store(look(root.parent)) == kept


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_interrupted_call_leaves_everything_as_it_was(host, root, error):
    before = without_store(look(root.parent))

    def work(fs, context):
        move_things_about(fs)
        raise error

    with pytest.raises(error):
        call(host, work)

    assert without_store(look(root.parent)) == before


FORMATTERS = {
    "in place": "open(sys.argv[1], 'a').write('# formatted')",
    "by rename": (
        "import os; new = sys.argv[1] + '.new'; open(new, 'w').write('# formatted');"
        " os.rename(new, sys.argv[1])"
    ),
    "with another mode": "import os; os.chmod(sys.argv[1], 0o700)",
    "deleting it": "import os; os.unlink(sys.argv[1])",
}


@pytest.mark.parametrize("how", FORMATTERS)
@pytest.mark.parametrize("path", ["a", "new/file.py", "d/twin"])
def test_what_a_formatter_does_to_a_written_file_is_rolled_back_with_it(host, root, path, how):
    before = without_store(look(root.parent))

    def work(fs, context):
        fs.write(path, "written = 1\n")
        subprocess.run(
            [sys.executable, "-S", "-c", f"import sys; {FORMATTERS[how]}", root / path], check=True
        )
        raise ValueError("after the formatter")

    call(host, work)

    assert without_store(look(root.parent)) == before


def test_call_that_only_reads_leaves_no_trace(host, root):
    before = look(root.parent)

    def work(fs, context):
        assert fs.read("a") == "staged, then changed\n"
        assert fs.grep("TOKEN")
        assert len(fs.list()) > 10
        raise ValueError("nothing to undo")

    call(host, work)

    assert look(root.parent) == before


def test_call_within_a_call_can_fail_alone(host, root):
    def outer(fs, context):
        fs.write("a", "outer")
        half = without_store(look(root.parent))
        inner = Tool[Nothing, None](name="inner", description="Fails.", handler=failing)
        assert not inner(Nothing(), context=context).success
        assert without_store(look(root.parent)) == half
        fs.append("a", " and on")

    def failing(params: Nothing, *, context: ToolContext) -> ToolResult[None]:
        context.filesystem.write("a", "inner")
        context.filesystem.delete("node_modules", recursive=True)
        move_things_about(context.filesystem)
        raise ValueError("inner")

    assert call(host, outer).success
    assert (root / "a").read_text() == "outer and on"
    assert (root / "node_modules/pkg/index.js").exists()


def test_call_within_a_call_goes_with_it(host, root):
    before = without_store(look(root.parent))

    def outer(fs, context):
        change_modes(fs)
        inner = Tool[Nothing, None](name="inner", description="Works.", handler=working)
        assert inner(Nothing(), context=context).success
        assert (root / "new/d").is_dir()
        raise ValueError("outer")

    def working(params: Nothing, *, context: ToolContext) -> ToolResult[None]:
        move_things_about(context.filesystem)
        return ToolResult.ok(None)

    call(host, outer)

    assert without_store(look(root.parent)) == before


def without_store(seen):
    """What is below a directory, without the store that a workspace has beside it.

    The store comes as an entry of its parent directory, whose time therefore is not compared.
    """
    return {
        path: it for path, it in seen.items() if path != "." and not path.startswith(".workspace.")
    }
