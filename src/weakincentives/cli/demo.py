"""`wink demo`: an agent repairs a small project, and you see what became of each of its calls."""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from weakincentives.cli.common import Misuse, diff_style, examples, open_workspace

if TYPE_CHECKING:
    from rich.text import Text

    from weakincentives.cli.view import CallEnded, Event
    from weakincentives.contrib.tools import Sandbox
    from weakincentives.contrib.tools.sandbox.engines import SandboxChoice

_DATA = Path(__file__).with_name("demo_project")
_SCRIPT = _DATA / "script.json"
_TASK = "A test of this project fails. Repair the program, and leave the tests as they are."
_EXAMPLE = examples(
    "wink demo                        # in a new temporary directory, which stays",
    "wink demo --into ~/till          # somewhere else",
    "wink demo --model openai:NAME    # a real model on the same project",
    more='On a project of yours: wink run "what to do" --workspace DIR',
)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("demo", epilog=_EXAMPLE)(_demo)


def _demo(
    model: Annotated[
        str | None,
        typer.Option(help="Let a real model do it, such as openai:NAME; else one plays a script."),
    ] = None,
    into: Annotated[
        Path | None, typer.Option(help="A new directory for the project; else a temporary one.")
    ] = None,
) -> int:
    """Watch an agent repair a small project: no key, no network, in a few seconds.

    It plans, is denied a change to the tests, goes wrong, is rolled back, and repairs the program.
    Then you are told what became of each call, and where to look next.
    """
    from weakincentives.cli.config import load_settings
    from weakincentives.cli.run import AgentRun

    project = _fresh_copy(into)
    try:
        asked = load_settings(project).sandbox
        box = _sandbox(asked) or (_sandbox("none") if model is None else None)
        flags: dict[str, Any] = {
            "model": model or f"scripted:{_SCRIPT}",
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
    if code in (0, 1):  # one who has stopped it is told how to go on, and wants no more
        _Report(witness, box if model is None else None).print()
    return code


# The project


def _fresh_copy(into: Path | None) -> Path:
    """Return a directory with the project in it, which was not there before."""
    source = _DATA / "till"
    if into is None:
        project = Path(tempfile.mkdtemp(prefix="wink-demo-")) / source.name
    else:
        project = into.expanduser().absolute()
    try:
        project.mkdir(parents=True, exist_ok=True)
        if any(project.iterdir()):
            raise Misuse(f"{project} is not empty; name a directory that is not there yet")
        for path in source.rglob("*"):
            # pip leaves byte code of the sources where it installs them.
            if path.is_file() and path.suffix != ".pyc":
                copy = project / path.relative_to(source)
                copy.parent.mkdir(exist_ok=True)
                copy.write_bytes(path.read_bytes())
    except OSError as error:
        raise Misuse(f"{project} cannot hold the project: {error.strerror}") from error
    return project


def _contents(project: Path) -> dict[str, tuple[int, bytes]]:
    """Return the mode and the bytes of every file, by its path."""
    files = (path for path in sorted(project.rglob("*")) if path.is_file())
    return {
        str(path.relative_to(project)): (path.stat().st_mode, path.read_bytes()) for path in files
    }


# What is used


def _sandbox(choice: str) -> Sandbox | None:
    """Return what commands run in, or None where that does not work."""
    from weakincentives.contrib.tools import find_sandbox
    from weakincentives.errors import SandboxUnavailable

    try:
        return find_sandbox(cast("SandboxChoice", choice))
    except SandboxUnavailable:
        return None


def _notes(model: str | None, box: Sandbox | None, asked: str) -> tuple[str, ...]:
    """Return what to know before it begins."""
    notes = [
        "Each call of the agent is kept as a whole, or undone as a whole.",
        "The directory is a fresh copy of a small project. Its tests are protected: see wink.toml.",
    ]
    if model is None:
        notes.append("A script plays the model, so that no key and no network is needed.")
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


# What became of the calls


@dataclass(frozen=True, slots=True)
class _Seen:
    """A call, and the project before and after it."""

    call: CallEnded
    before: Mapping[str, tuple[int, bytes]]
    after: Mapping[str, tuple[int, bytes]]


@dataclass(slots=True)
class _Witness:
    """Looks at the project after every call: from outside, as a person would."""

    project: Path
    model: str
    notes: tuple[str, ...]
    run: str = ""
    seen: list[_Seen] = field(default_factory=list[_Seen])
    first: Mapping[str, tuple[int, bytes]] = field(init=False)

    def __post_init__(self) -> None:
        self.first = _contents(self.project)

    def hear(self, event: Event) -> Event:
        from weakincentives.cli.view import CallEnded, RunStarted

        if isinstance(event, RunStarted):
            self.run = event.run
            return replace(event, model=self.model, notes=(*self.notes, *event.notes))
        if isinstance(event, CallEnded):
            before = self.seen[-1].after if self.seen else self.first
            self.seen.append(_Seen(event, before, _contents(self.project)))
        return event


# The report


class _Report:
    """Tells what happened, call by call, on standard output."""

    def __init__(self, witness: _Witness, box: Sandbox | None) -> None:
        from rich.console import Console

        from weakincentives.cli.view import Words, is_utf8

        self._project = witness.project
        self._run = witness.run
        self._seen = witness.seen
        self._box = box
        self._words = Words(is_utf8(sys.stdout))
        self._console = Console(highlight=False, markup=False, emoji=False)

    def print(self) -> None:
        # What the library logs from here on is not about the run.
        logging.getLogger("weakincentives").addHandler(logging.NullHandler())
        self._line("\nWhat became of each call", "bold")
        with open_workspace(self._project) as files:
            for number, each in enumerate(self._seen, 1):
                self._call(number, each)
                if each.call.files:
                    self._diff(files.diff(each.call.record.call_id))
        self._sum()
        self._next()

    def _call(self, number: int, each: _Seen) -> None:
        from rich.text import Text

        first, *reasons = self._words.lines(each.call)
        self._line(Text.assemble((f"{number:>3} ", "dim"), first), cut=True)
        for reason in reasons:
            self._detail(reason.plain.strip())
        if denied_by := each.call.record.denied_by:
            what = "all it did was undone" if each.call.rolled_back else "nothing was run"
            self._detail(f"denied by the policy {denied_by}: {what}")
        if each.call.rolled_back and each.before == each.after:
            count = len(each.after)
            self._detail(f"compared: all {count} files are as they were, byte for byte", "green")
            left = self._left_behind(each)
            if left:
                self._detail(f"without a transaction it leaves {_listed(left)}", "bold")

    def _left_behind(self, each: _Seen) -> list[str]:
        """Return what a command that was rolled back does to a copy that nobody looks after."""
        from weakincentives.filesystem import HostFilesystem

        command = each.call.arguments.get("command") if self._box else None
        if self._box is None or not isinstance(command, str):
            return []
        with tempfile.TemporaryDirectory(prefix="wink-demo-") as folder:
            copy = Path(folder) / self._project.name
            for name, (_, content) in each.before.items():
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                (copy / name).write_bytes(content)
            with HostFilesystem(copy) as files:
                self._box.run(files, f"({command}) || true")
            after = _contents(copy)
        return [
            f"{name} {'changed' if name in after else 'gone'}"
            for name, (_, content) in each.before.items()
            if name not in after or after[name][1] != content
        ] + [f"{name} new" for name in after if name not in each.before]

    def _diff(self, diff: str) -> None:
        for line in self._words.text(diff, lines=True).rstrip("\n").split("\n"):
            if not line.startswith("diff --git "):
                self._detail(line, diff_style(line))

    def _sum(self) -> None:
        """Compare the project with what it was in the beginning."""
        if not self._seen:
            return
        first, last = self._seen[0].before, self._seen[-1].after
        changed = [name for name in {**first, **last} if first.get(name) != last.get(name)]
        kept = sum(each.call.outcome == "committed" for each in self._seen)
        rolled_back = sum(each.call.rolled_back for each in self._seen)
        refused = len(self._seen) - kept - rolled_back
        but = f" but {_listed(changed)}" if changed else ""
        self._line(
            f"\n{kept} calls were kept, {rolled_back} rolled back and {refused} refused. "
            f"Of {len(first)} files, all{but} are as they were."
        )

    def _next(self) -> None:
        """Print commands that work when they are pasted, from anywhere."""
        wink, run = _how_to_call(), self._run.rpartition("-")[2]
        undone = [n for n, each in enumerate(self._seen, 1) if each.call.rolled_back]
        kept = [n for n, each in enumerate(self._seen, 1) if each.call.files]
        self._line("\nThe project stays there. Look around:", "bold")
        commands = [f"cd {shlex.quote(str(self._project))}", f"{wink} log"]
        commands += [f"{wink} show {run}/{n}" for n in undone[-1:]]
        for number in kept[-1:]:
            commands += [f"{wink} diff {run}/{number}", f"{wink} undo {run}/{number}"]
        for command in commands:
            self._console.print(f"  {command}", soft_wrap=True)
        self._line("A real model on the same project, or on one of yours:", "bold")
        self._console.print(f"  {wink} demo --model openai:NAME", soft_wrap=True)
        self._console.print(f'  {wink} run "what to do" -w DIR --model openai:NAME', soft_wrap=True)

    # Lines

    def _detail(self, text: str, style: str = "dim") -> None:
        from rich.padding import Padding
        from rich.text import Text

        if self._console.is_terminal:
            line = Text(text, style=style, overflow="fold")
            self._console.print(Padding(line, (0, 0, 0, 5), expand=False))
        else:
            self._line(f"     {text}")

    def _line(self, line: str | Text, style: str = "", *, cut: bool = False) -> None:
        if self._console.is_terminal:
            overflow = "ellipsis" if self._words.is_utf8 else "crop"
            self._console.print(line, style=style, no_wrap=cut, overflow=overflow if cut else None)
        else:  # a file or a pipe has no width
            self._console.print(line, style=style, soft_wrap=True)


def _listed(names: Sequence[str]) -> str:
    *others, last = names or [""]
    return f"{', '.join(others)} and {last}" if others else last


def _how_to_call() -> str:
    """Return what to type, in any directory, to call `wink` as it was called just now."""
    called = Path(sys.argv[0])
    if called.name != "wink" or not called.exists():
        return f"{shlex.quote(sys.executable)} -P -m weakincentives.cli"
    found = shutil.which("wink")
    is_found = found is not None and os.path.samefile(found, called)
    return "wink" if is_found else shlex.quote(str(called.absolute()))
