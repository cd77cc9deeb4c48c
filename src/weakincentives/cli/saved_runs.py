"""The saved session of a run: opened, with its inbox and the flags that it was started with."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from weakincentives.cli.common import Misuse
from weakincentives.errors import SessionInUse

if TYPE_CHECKING:
    from weakincentives.cli.config import Settings
    from weakincentives.runtime import SavedSession
    from weakincentives.runtime.calls import Run

KIND = "run"
"""Marks the saved sessions of runs."""


@contextmanager
def open_session(run: Run, settings: Settings) -> Generator[SavedSession]:
    """Open the saved session of a run for the block; raise Misuse if the run is in progress."""
    from weakincentives.cli.workbench import load_types
    from weakincentives.runtime import SavedSession

    load_types(settings)
    try:
        saved = SavedSession.open(run.path)
    except SessionInUse as error:
        raise Misuse(f"{run.id} is running in another process") from error
    with saved:
        yield saved


def inbox_of(session: Path) -> Path:
    """Return the inbox of a run; ``session`` is its file."""
    return session.with_suffix(".inbox")


def with_flags_of(earlier: Run, given: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the flags of a run with those given now, and the rules that only the run has."""
    flags = dict(cast("Mapping[str, Any]", earlier.data.about.get("flags", {})))
    stored = [each for each in flags.get("policy", ()) if each not in given.get("policy", ())]
    flags["sandbox"] = flags.get("sandbox") or []
    for name in {"policy", "ask", "sandbox"} & given.keys():  # rules add up, each once
        given[name] = list(dict.fromkeys([*flags.get(name, ()), *given[name]]))
    return flags | given, stored
