"""Runs `wink` in this process, and makes runs to look at, without a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from weakincentives.adapters import ScriptedAdapter
from weakincentives.adapters.scripted import Turn
from weakincentives.cli.config import load_settings
from weakincentives.cli.entry import main
from weakincentives.cli.trust import trust_of
from weakincentives.cli.workbench import open_workbench
from weakincentives.runtime import SavedSession, Session
from weakincentives.runtime.calls import Run, new_run


class Done(NamedTuple):
    """How a command ended, and what it printed."""

    code: int
    out: str
    err: str


def approve(workspace: Path) -> None:
    """Approve what a directory's settings name, as `wink policy trust --yes` does."""
    settings = load_settings(workspace)
    trust = trust_of(settings.workspace)
    trust.approve(trust.missing(settings))


class Wink:
    """``wink("log", "-n", "3")`` in a directory."""

    def __init__(self, capfd: pytest.CaptureFixture[str], directory: Path) -> None:
        self._capfd = capfd
        self.directory = directory

    def __call__(self, *arguments: str) -> Done:
        self._capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(list(arguments))
        out, err = self._capfd.readouterr()
        return Done(int(ended.value.code or 0), out, err)


def make_run(
    workspace: Path, turns: Sequence[Turn], task: str = "a task", kind: str = "run"
) -> Run:
    """Run a script on a workspace, as `wink run` does, and return its file."""
    with run_open(workspace, turns, task, kind) as run:
        return run


@contextmanager
def run_open(
    workspace: Path, turns: Sequence[Turn], task: str = "a task", kind: str = "run"
) -> Iterator[Run]:
    """The same, with the workspace still in use in the block."""
    settings = load_settings(workspace, suites=["files"])
    with open_workbench(settings, Session()) as workbench:
        run = new_run(workbench.filesystem.store)
        about = {"kind": kind, "task": task}
        with SavedSession.create(run.path, workbench.session, about=about):
            ScriptedAdapter(turns).evaluate(workbench.prompt, workbench.session, message=task)
            yield run


def resume_run(workspace: Path, run: Run, turns: Sequence[Turn]) -> None:
    """Continue a run, as `wink resume` does, or as `wink mcp` continues its session."""
    settings = load_settings(workspace, suites=["files"])
    with (
        SavedSession.open(run.path) as saved,
        open_workbench(settings, saved.session) as workbench,
    ):
        if saved.about["kind"] == "mcp":
            saved.mark_resumed()
        ScriptedAdapter(turns).evaluate(
            workbench.prompt, saved.session, message="go on", resume=True
        )
