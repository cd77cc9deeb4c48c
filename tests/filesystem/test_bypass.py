"""Changes of the workspace by plain file operations are reported: they are not undone."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from weakincentives.filesystem import HostFilesystem
from weakincentives.prompt import ToolContext, ToolResult, tool
from weakincentives.retry import RetryPolicy
from weakincentives.runtime import ToolInvoked, ToolRegistry

SUFFIX = ", changed with plain file operations"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "project"
    (root / "src").mkdir(parents=True)
    (root / "a.txt").write_text("a")
    (root / "b.txt").write_text("b")
    (root / "src" / "x.txt").write_text("x")
    past = time.time() - 60
    for each in (root, *root.rglob("*")):
        os.utime(each, (past, past))
    time.sleep(0.03)  # a file that was changed right before could be changed without a trace
    return root


def failing(root: Path, act: Callable[[ToolContext], object], **options: Any) -> ToolResult[Any]:
    """Run an action in a call that then fails."""

    @tool(name="act", **options)
    def act_and_fail(context: ToolContext) -> str:
        """Act, then fail."""
        act(context)
        raise ValueError("failed")

    with ToolRegistry([act_and_fail], workspace=root) as tools:
        return tools.execute("act", {})


def not_undone(result: ToolResult[Any]) -> str:
    """Return the paths that a result names, as the model and programs read them."""
    assert not result.success
    if not result.metadata.not_undone:
        assert result.message == "failed"
        return ""
    (sentence,) = result.metadata.not_undone
    assert result.message == f"failed\nNot undone: {sentence}"
    assert sentence.endswith(SUFFIX)
    return sentence.removesuffix(SUFFIX)


def in_directory(root: Path, act: Callable[[], object]) -> None:
    before = os.getcwd()
    os.chdir(root)
    try:
        act()
    finally:
        os.chdir(before)


def through_link(root: Path) -> None:
    link = root.parent / "link"
    link.symlink_to(root / "src")
    (link / "y.txt").write_text("y")


def with_descriptor(root: Path) -> None:
    above = os.open(root / "src", os.O_RDONLY)
    try:
        os.rename("x.txt", "y.txt", src_dir_fd=above, dst_dir_fd=above)
        os.truncate(os.open(root / "a.txt", os.O_RDWR), 0)
    finally:
        os.close(above)


def in_thread(root: Path) -> None:
    thread = threading.Thread(target=(root / "y.txt").write_text, args=("y",))
    thread.start()
    thread.join()


def in_pool(root: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda name: (root / name).write_text("y"), ["y.txt", "z.txt"]))


def append(root: Path) -> None:
    with open(root / "a.txt", "a") as file:
        file.write("more")


def many(root: Path) -> None:
    for number in range(8):
        (root / f"{number}.txt").touch()


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "open": (lambda root: open(root / "a.txt", "w").close(), "a.txt"),
    "append": (append, "a.txt"),
    "os.open": (lambda root: os.close(os.open(root / "y", os.O_CREAT | os.O_WRONLY)), "y"),
    "pathlib": (lambda root: (root / "src" / "y.txt").write_bytes(b"y"), "src/y.txt"),
    "bytes": (lambda root: os.unlink(os.fsencode(root / "a.txt")), "a.txt"),
    "directory": (lambda root: (root / "new").mkdir(), "new"),
    "links": (lambda root: os.symlink("nowhere", root / "l"), "l"),
    "hard link": (lambda root: os.link(root / "a.txt", root / "l"), "l"),
    "mode": (lambda root: os.chmod(root / "a.txt", 0o600), "a.txt"),
    "time": (lambda root: os.utime(root / "a.txt", (1, 1)), "a.txt"),
    "truncate": (lambda root: os.truncate(root / "a.txt", 0), "a.txt"),
    "copy": (lambda root: shutil.copytree(root / "src", root / "copy"), "copy, copy/x.txt"),
    "move": (lambda root: shutil.move(root / "a.txt", root / "y.txt"), "a.txt, y.txt"),
    "rmtree": (lambda root: shutil.rmtree(root / "src"), "src, src/x.txt"),
    "cwd": (lambda root: in_directory(root, lambda: Path("y.txt").touch()), "y.txt"),
    "a link from outside": (through_link, "src/y.txt"),
    "descriptors": (with_descriptor, "a.txt, src/x.txt, src/y.txt"),
    "a thread": (in_thread, "y.txt"),
    "a pool": (in_pool, "y.txt, z.txt"),
    "many": (many, "0.txt, 1.txt, 2.txt, 3.txt, 4.txt and 3 more"),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_failed_call_names_what_plain_operations_have_changed(kind: str, root: Path):
    act, names = CHANGES[kind]

    assert not_undone(failing(root, lambda context: act(root))) == names


def attempted(root: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        (root / "none" / "y.txt").write_text("")
    with pytest.raises(OSError, match="Is a directory"):
        (root / "src").write_text("")


UNCHANGED: dict[str, Callable[[Path], object]] = {
    "reading": lambda root: [(root / "a.txt").read_text(), os.listdir(root), os.stat(root)],
    "a temporary file": lambda root: [(root / "t").touch(), (root / "t").unlink()],
    "an error": attempted,
    "elsewhere": lambda root: (root.parent / "elsewhere.txt").write_text("y"),
    "a directory with a longer name": lambda root: Path(f"{root}2").mkdir(),
    "opened and not written": lambda root: open(root / "a.txt", "r+").close(),
}


@pytest.mark.parametrize("kind", UNCHANGED)
def test_reading_and_what_leaves_no_change_is_not_reported(kind: str, root: Path):
    assert not_undone(failing(root, lambda context: UNCHANGED[kind](root))) == ""


def test_changes_through_the_filesystem_are_never_reported(root: Path):
    def act(context: ToolContext) -> None:
        files = context.filesystem
        files.write("a.txt", "1")
        files.append("new/deep/c.txt", "2")
        files.move("src", "lib")
        files.copy("lib", "src")
        files.set_readonly("b.txt")
        files.delete("lib", recursive=True)
        assert isinstance(files, HostFilesystem)
        files.run("echo 3 > d.txt; rm b.txt")

    assert not_undone(failing(root, act)) == ""
    assert (root / "b.txt").read_text() == "b"


def test_a_path_that_the_call_has_changed_before_is_undone_with_it(root: Path):
    def act(context: ToolContext) -> None:
        context.filesystem.write("a.txt", "1")
        (root / "a.txt").write_text("2")

    assert not_undone(failing(root, act)) == ""
    assert (root / "a.txt").read_text() == "a"


def test_a_path_that_the_call_changes_later_is_restored_to_what_it_found(root: Path):
    def act(context: ToolContext) -> None:
        (root / "a.txt").write_text("2")
        context.filesystem.write("a.txt", "1")

    assert not_undone(failing(root, act)) == "a.txt"
    assert (root / "a.txt").read_text() == "2"


def test_a_tool_that_declares_external_writes_has_them_undone(root: Path):
    def act(context: ToolContext) -> None:
        (root / "a.txt").write_text("2")

    assert not_undone(failing(root, act, writes="external")) == ""
    assert (root / "a.txt").read_text() == "a"


def test_every_attempt_counts(root: Path):
    names = iter(("1.txt", "2.txt"))
    retry = RetryPolicy(max_retries=1, retryable_errors=("VALIDATION_FAILED",))
    again = {"reach": "reversible", "retry": retry}

    result = failing(root, lambda context: (root / next(names)).touch(), **again)

    assert result.metadata.attempts == 2
    assert not_undone(result) == "1.txt, 2.txt"


def test_a_call_reports_what_calls_nested_in_it_have_changed(root: Path):
    @tool
    def inner(context: ToolContext) -> None:
        """Succeed."""
        (root / "y.txt").touch()

    def act(context: ToolContext) -> None:
        assert inner(context=context).success

    assert not_undone(failing(root, act)) == "y.txt"


def test_an_async_handler_and_the_threads_it_awaits_are_noticed(root: Path):
    @tool
    async def later() -> None:
        """Fail."""
        (root / "y.txt").touch()
        await asyncio.to_thread((root / "z.txt").touch)
        raise ValueError("failed")

    with ToolRegistry([later], workspace=root) as tools:
        assert not_undone(tools.execute("later", {})) == "y.txt, z.txt"


def test_a_success_is_noted_in_its_record_and_logged_once_for_each_tool(
    root: Path, caplog: pytest.LogCaptureFixture
):
    @tool
    def save_report(text: str) -> str:
        """Save a report."""
        (root / "report.txt").write_text(text)
        return "saved"

    with ToolRegistry([save_report], workspace=root) as tools:
        assert tools.execute("save_report", {"text": "1"}).render() == "saved"
        assert tools.execute("save_report", {"text": "2"}).metadata.not_undone == ()
        notes = [each.notes for each in tools.session[ToolInvoked].all()]
        assert tools.workspace.history() == ()

    said = "changed with plain file operations, so not in the history: report.txt"
    assert notes == [(said,), (said,)]
    (warning,) = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert warning.getMessage() == (
        "tool save_report changed report.txt with plain file operations: that is not undone when a "
        'call fails, and not in the history. Use context.filesystem, or declare writes="external"'
    )


def test_a_handler_that_goes_on_after_its_timeout_is_logged(
    root: Path, caplog: pytest.LogCaptureFixture
):
    ended, written = threading.Event(), threading.Event()

    @tool(timeout=0.05)
    def slow_writer() -> None:
        """Write late."""
        ended.wait(30)
        (root / "late.txt").touch()
        written.set()

    with ToolRegistry([slow_writer], workspace=root) as tools:
        assert tools.execute("slow_writer", {}).failure is not None
        ended.set()
        assert written.wait(30)

    assert "late.txt (after its call had ended)" in caplog.text


def test_nothing_is_noticed_outside_of_calls_or_without_a_workspace(
    root: Path, caplog: pytest.LogCaptureFixture
):
    @tool
    def plain_writer() -> None:
        """Write."""
        (root / "y.txt").write_text("y")

    with HostFilesystem(root):
        (root / "z.txt").touch()
    assert plain_writer().success

    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    "event",
    [("open", "x"), ("open", "x", "r", None), ("os.remove",), ("_thread.start_new_thread",)],
)
def test_an_event_with_other_arguments_raises_nothing(root: Path, event: tuple[Any, ...]):
    """Any program may raise such events: its operation must not fail because of us."""
    with HostFilesystem(root):
        sys.audit(*event)
