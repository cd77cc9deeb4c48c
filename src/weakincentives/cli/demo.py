"""`wink demo`: an agent repairs a small project, and each of its calls is explained."""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, cast

import typer

from weakincentives.cli.common import Misuse, diff_style, examples, open_workspace
from weakincentives.core.text import counted
from weakincentives.errors import SandboxUnavailable

if TYPE_CHECKING:
    from weakincentives.cli.view import CallEnded, Event
    from weakincentives.contrib.tools import Sandbox
    from weakincentives.contrib.tools.sandbox.engines import SandboxChoice

_DATA = Path(__file__).with_name("demo_project")
_TASK = "A test of this project fails. Repair the program, and leave the tests as they are."

Contents: TypeAlias = Mapping[str, tuple[int, bytes]]
"""The mode and bytes of every file, by path."""


@examples(
    "wink demo                        # in a new temporary directory, which is not deleted",
    "wink demo --into ~/till          # somewhere else",
    "wink demo --model openai:NAME    # a real model on the same project",
    "wink demo --disaster             # a coding agent deletes what git does not have; one undo",
    more='On a project of yours: wink run "what to do" --workspace DIR',
)
def demo(
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL", help="A real model, such as openai:NAME, instead of a script."
        ),
    ] = None,
    into: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="A new directory for the project; default: temporary."),
    ] = None,
    disaster: Annotated[
        bool,
        typer.Option("--disaster", help="Instead: an accident of a coding agent, and its undo."),
    ] = False,
) -> int:
    """Watch an agent repair a small project, without a key.

    It plans, is denied a change to the tests, makes a mistake that is rolled back, and repairs the
    program. Then each call is explained.
    """
    from weakincentives.cli.agent import AgentRun
    from weakincentives.cli.config import load_settings

    if disaster and model is not None:
        raise Misuse("--disaster is played by a script: it takes no --model")
    project = _fresh_copy(into)
    try:
        if disaster:
            from weakincentives.cli.disaster import play

            return play(project)
        asked = load_settings(project).sandbox.engine
        box = _sandbox(asked) or (_sandbox("none") if model is None else None)
        flags: dict[str, Any] = {
            "model": model or f"scripted:{_DATA / 'script.json'}",
            "sandbox": box and box.name,
        }
        witness = _Witness(project, model or "a script", _notes(model, box, asked))
        settings = load_settings(project, **flags)
        run = AgentRun(settings=settings, flags=flags, message=_TASK, watch=witness.hear)
        code = run.perform()
    except Misuse:
        if into is None:
            shutil.rmtree(project.parent)
        raise
    if code in (0, 1):  # not when it was interrupted
        _explain(witness)
    return code


def _fresh_copy(into: Path | None) -> Path:
    """Return a new directory that holds the project."""
    source = _DATA / "till"
    if into is None:
        project = Path(tempfile.mkdtemp(prefix="wink-demo-")) / source.name
    else:
        project = into.expanduser().absolute()
    try:
        project.mkdir(parents=True, exist_ok=True)
        if any(project.iterdir()):
            raise Misuse(f"{project} is not empty; name a new directory")
        for path in source.rglob("*"):
            if path.is_file() and path.suffix != ".pyc":  # pip compiles sources it installs
                copy = project / path.relative_to(source)
                copy.parent.mkdir(exist_ok=True)
                copy.write_bytes(path.read_bytes())
    except OSError as error:
        raise Misuse(f"{project} cannot hold the project: {error.strerror}") from error
    return project


def _contents(project: Path) -> Contents:
    files = (path for path in sorted(project.rglob("*")) if path.is_file())
    return {
        str(path.relative_to(project)): (path.stat().st_mode, path.read_bytes()) for path in files
    }


def _sandbox(choice: str) -> Sandbox | None:
    from weakincentives.contrib.tools import find_sandbox

    try:
        return find_sandbox(cast("SandboxChoice", choice))
    except SandboxUnavailable:
        return None


def _notes(model: str | None, box: Sandbox | None, asked: str) -> tuple[str, ...]:
    notes = [
        "Each call of the agent is committed or rolled back as a whole.",
        "The directory is a fresh copy of a small project. Its tests are protected: see wink.toml.",
    ]
    if model is None:
        notes.append("A script plays the model, so no key and no network are needed.")
    if box is None:
        notes.append("No sandbox works here, so commands are refused: see `wink doctor`.")
    elif box.name != "none":
        notes.append(f"Commands run in a sandbox: {box.name}.")
    elif asked != "none":
        notes.append(
            "No sandbox works here: see `wink doctor`. The commands of this demo are harmless; "
            "those of a real model would be refused."
        )
    return tuple(notes)


# What happened


@dataclass(slots=True)
class _Witness:
    """Reads the whole project after every call."""

    project: Path
    model: str
    notes: tuple[str, ...]
    run: str = ""
    calls: list[CallEnded] = field(default_factory=list["CallEnded"])
    contents: list[Contents] = field(default_factory=list[Contents])
    """Before the first call, and after each."""

    def hear(self, event: Event) -> Event:
        from weakincentives.cli.view import CallEnded, RunStarted

        if isinstance(event, RunStarted):
            self.run = event.run
            self.contents.append(_contents(self.project))
            return replace(event, model=self.model, notes=(*self.notes, *event.notes))
        if isinstance(event, CallEnded):
            self.calls.append(event)
            self.contents.append(_contents(self.project))
        return event


def _explain(witness: _Witness) -> None:
    """Print a timeline of the calls with their diffs, and commands to try next."""
    from rich.console import Console
    from rich.text import Text

    from weakincentives.cli.view import Words, is_utf8

    words = Words(is_utf8(sys.stdout))
    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)

    def detail(text: str, style: str = "dim") -> None:
        console.print(Text(f"     {text}", style=style))

    # Whatever the library logs now is not about the run.
    logging.getLogger("weakincentives").addHandler(logging.NullHandler())
    console.print("\nWhat happened in each call", style="bold")
    with open_workspace(witness.project) as files:
        for number, call in enumerate(witness.calls, 1):
            first, *reasons = words.lines(call)
            console.print(Text.assemble((f"{number:>3} ", "dim"), first))
            for reason in reasons:
                detail(reason.plain.strip())
            if denied_by := call.record.denied_by:
                what = "it was rolled back" if call.rolled_back else "nothing was run"
                detail(f"denied by the policy {denied_by}: {what}")
            before, after = witness.contents[number - 1 : number + 1]
            if call.rolled_back and before == after:
                detail(f"compared: all {len(after)} files are unchanged, byte for byte", "green")
            diff = files.diff(call.record.call_id) if call.files else ""
            for line in words.text(diff, lines=True).splitlines():
                if not line.startswith("diff --git "):
                    detail(line, diff_style(line))
    if witness.calls:
        console.print(f"\n{_summary(witness)}")
    console.print("\nThe project is still there. Have a look:", style="bold")
    for command in _commands(witness):
        console.print(f"  {command}")
    wink = _how_to_call()
    console.print("A real model on the same project, or on one of yours:", style="bold")
    console.print(f"  {wink} demo --model openai:NAME")
    console.print(f'  {wink} run "what to do" -w DIR --model openai:NAME')


def _summary(witness: _Witness) -> str:
    first, last = witness.contents[0], witness.contents[-1]
    changed = [name for name in {**first, **last} if first.get(name) != last.get(name)]
    outcomes = Counter(call.outcome for call in witness.calls)
    return (
        f"{counted(len(witness.calls), 'call')}: "
        f"{', '.join(f'{count} {outcome}' for outcome, count in outcomes.items())}. "
        f"{len(changed)} of {len(first)} files changed{': ' if changed else ''}"
        f"{', '.join(changed)}."
    )


def _commands(witness: _Witness) -> list[str]:
    """Return commands that work when they are pasted, from anywhere."""
    wink, run = _how_to_call(), witness.run.rpartition("-")[2]
    numbered = list(enumerate(witness.calls, 1))
    commands = [f"cd {shlex.quote(str(witness.project))}", f"{wink} log"]
    commands += [f"{wink} show {run}/{n}" for n, call in numbered if call.rolled_back][-1:]
    for number in [n for n, call in numbered if call.files][-1:]:
        commands += [f"{wink} diff {run}/{number}", f"{wink} undo {run}/{number}"]
    return commands


def _how_to_call() -> str:
    """Return the command that calls this `wink` from any directory."""
    called = Path(sys.argv[0])
    if called.name != "wink" or not called.exists():
        return f"{shlex.quote(sys.executable)} -P -m weakincentives.cli"
    found = shutil.which("wink")
    is_found = found is not None and os.path.samefile(found, called)
    return "wink" if is_found else shlex.quote(str(called.absolute()))
