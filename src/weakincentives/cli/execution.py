"""Runs any program as one transaction on a directory: what `wink exec` does.

It must start quickly. So what takes long to load is only loaded where the directory has settings.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import sys
import threading
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from weakincentives.cli.common import (
    FILE_NAME,
    INSIDE,
    Misuse,
    existing_directory,
    open_workspace,
    say,
    shortened,
)
from weakincentives.core.clock import SYSTEM_CLOCK
from weakincentives.core.state import WITHHELD
from weakincentives.core.text import harmless
from weakincentives.errors import CommandFailed, WinkError

if TYPE_CHECKING:
    from weakincentives.cli.coding_agents import CodingAgent
    from weakincentives.cli.config import Settings
    from weakincentives.filesystem import HostFilesystem
    from weakincentives.filesystem.commands import CommandResult
    from weakincentives.filesystem.overlay import Started, Step
    from weakincentives.prompt import Prompt, Tool, ToolContext
    from weakincentives.prompt.approval import Approval, ApprovalRequest
    from weakincentives.runtime import SavedSession, Session
    from weakincentives.tool_result import ToolResult

QUIET = 1.0
"""Seconds without a change that make a moment quiet."""
_LOOK = 0.25
"""Seconds between looks for changes."""
_ASKED = 60.0
"""Seconds that a program may take to show its help."""
_MOST_FILES = 5
_MOST_KEPT = 10
"""How many such branches there are."""


def execute(
    command: Sequence[str],
    workspace: Path = Path(),
    *,
    asks: bool = False,
    is_approved: bool = False,
    checkpoint: float | None = None,
    title: str = "",
    policy: Sequence[str] | None = None,
) -> int:
    """Run a program; return its exit code, or 1 if its changes were refused.

    Args:
        asks: Whether a person decides at the end, having seen the diff.
        is_approved: Whether they have decided to commit already.
        checkpoint: Seconds between commits of what changed so far.
        title: What `wink log` shows; by default the command.
        policy: More rules, as text.
    """
    from weakincentives.cli.coding_agents import agent_in, check_is_inside
    from weakincentives.runtime.calls import begin_run

    if asks and checkpoint is not None:
        raise Misuse("--ask and --checkpoint exclude each other: a checkpoint is committed at once")
    asks = asks and not is_approved
    if asks and not all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr)):
        raise Misuse("--ask needs a terminal to ask at; add --yes to commit without asking")
    workspace = existing_directory(workspace)
    refused = _cannot_start(command[0], workspace)
    if refused is not None:
        say(refused[1])
        return refused[0]
    settings = _settings(workspace, policy)
    words = [os.fsencode(word).decode(errors="backslashreplace") for word in command]
    about = {"kind": "exec", "title": title or shlex.join(words)}
    agent = agent_in(command)
    if agent is not None:
        check_is_inside(command, *agent)
    # With checkpoints the program works on while one is committed, so others are locked out.
    alone, rules = checkpoint is not None, settings.policy.unprotect if settings else ()
    with open_workspace(workspace, unprotected=rules, alone=alone) as files:
        say(*files.recovered)
        with begin_run(files.store, about) as run, ExitStack() as at_end, _Signals() as signals:
            program = _Program(command, files, signals, at_end, asks, checkpoint)
            program.agent = agent
            program.branch = f"exec-{run.mark}"
            try:
                return _run(program, settings, run, words)
            except KeyboardInterrupt:
                say(f"stopped: its changes are rolled back{program.how_to_restore}")
                return 128 + (signals.stopped_by or signal.SIGINT)


def _cannot_start(name: str, workspace: Path) -> tuple[int, str] | None:
    """Return why a program cannot be started, after the exit code that shells have for it."""
    if not name:
        raise Misuse("name a program: wink exec -- COMMAND")
    here = Path.cwd()
    place = (here if here.is_relative_to(workspace) else workspace) / name
    if "/" not in name:
        if shutil.which(name) is None:
            return 127, f"there is no program {name!r} on the PATH"
    elif not os.path.lexists(place):
        return 127, f"there is no program {name!r}"
    elif not os.access(place, os.X_OK) or place.is_dir():
        return 126, f"{name} cannot be executed"
    return None


def _settings(workspace: Path, policy: Sequence[str] | None) -> Settings | None:
    """Return the settings of a directory; None if it has none, nor the environment."""
    others = (INSIDE, "WINK_HOOK_IDLE")
    is_set = any(each.startswith("WINK_") and each not in others for each in os.environ)
    if not policy and not is_set and not os.path.lexists(workspace / FILE_NAME):
        return None
    from weakincentives.cli.config import load_settings

    # Only the rules of the settings count, not the tools.
    return load_settings(workspace, suites=[], sections=[], policy=policy)


@contextmanager
def _prompt(
    settings: Settings | None, session: Session, files: HostFilesystem, tool: Tool[Any, Any]
) -> Generator[Prompt[Any]]:
    """Yield a prompt with one tool, under the rules of the directory."""
    if settings is not None:
        from weakincentives.cli.workbench import open_workbench

        with open_workbench(
            settings, session, files=files, tools=[tool], ask=_approved
        ) as workbench:
            yield workbench.prompt
        return
    from weakincentives.filesystem import Filesystem
    from weakincentives.prompt import (
        MarkdownSection,
        Prompt,
        PromptTemplate,
        ProtectedPathsPolicy,
    )
    from weakincentives.prompt.policies import attach

    template = PromptTemplate(
        ns="wink",
        key="workbench",
        name="Workbench",
        sections=[MarkdownSection(title="Programs", tools=[tool])],
        policies=[
            each.for_any_tool() for each in attach([ProtectedPathsPolicy((f"/{FILE_NAME}",))])
        ],
        resources={Filesystem: files},
    )
    prompt: Prompt[Any] = Prompt(template)
    with prompt.resources:
        yield prompt


def _run(program: _Program, settings: Settings | None, run: SavedSession, words: list[str]) -> int:
    """Run the program as a call, or as one call for each checkpoint; return the exit code."""
    from weakincentives.core.call import ToolCall
    from weakincentives.integrations.bridge import own_tool
    from weakincentives.runtime import execute_tool

    tool = own_tool(
        "exec",
        "Run a program on the directory.",
        program.run if program.seconds is None else program.until_checkpoint,
        writes="command" if program.seconds is None else "external",
    )
    with _prompt(settings, run.session, program.files, tool) as prompt:
        number = 0
        while True:
            number += 1
            result = execute_tool(
                ToolCall("exec", {"command": words}), session=run.session, prompt=prompt
            )
            program.keep_copies()
            _tell(program, result, f"{run.mark}/{number}", is_first=number == 1)
            if not result.success:
                return program.code or 1
            if program.has_ended:
                return program.code


def _tell(program: _Program, result: ToolResult[Any], name: str, *, is_first: bool) -> None:
    """Say how a call ended."""
    if program.others:
        say(
            f"another process changed {_named(program.others)} while {program.name} ran: that is"
            " not recorded, and `wink undo` does not undo it"
        )
    if not result.success:
        until = "" if is_first else "; the checkpoints before it stay, and `wink undo` undoes them"
        say(f"{name} rolled back: {result.message}{until}{program.how_to_restore}")
        return
    code = f" ({result.message})" if result.message else ""
    paths = program.changed
    if not paths:
        text = "no files changed" if program.has_ended and is_first else "nothing more changed"
        say(f"{text}{code}")
        return
    what = "committed" if program.has_ended else "checkpoint"
    say(f"{name} {what}{code}: {_named(paths)}; to undo it: wink undo {name}")


def _named(paths: Sequence[str]) -> str:
    more = f" and {len(paths) - _MOST_FILES} more" if len(paths) > _MOST_FILES else ""
    return ", ".join(map(harmless, paths[:_MOST_FILES])) + more


def _approved(request: ApprovalRequest) -> Approval:
    """Answer for the person: they gave the command themselves."""
    from weakincentives.prompt.approval import Approval

    return Approval(True, by="wink exec")


class _Program:
    """The program, as the handler of its calls."""

    def __init__(
        self,
        command: Sequence[str],
        files: HostFilesystem,
        signals: _Signals,
        at_end: ExitStack,
        asks: bool,
        seconds: float | None,
    ) -> None:
        self.files = files
        self.seconds = seconds
        self.code = 0
        """Its exit code, once it has ended."""
        self.has_ended = False
        self.changed: tuple[str, ...] = ()
        """What the last call changed."""
        self.others: tuple[str, ...] = ()
        """What other processes have changed in the directory meanwhile."""
        self.name = shortened(os.path.basename(command[0]), 40)
        self.agent: tuple[int, CodingAgent] | None = None
        """Where a coding agent is in the command: it is committed whatever its exit code."""
        self.branch = ""
        """Where changes are kept that are rolled back."""
        self.how_to_restore = ""
        self._copies: Sequence[Step] = ()
        self._command = command
        self._signals = signals
        self._at_end = at_end
        self._asks = asks
        self._started: Started | None = None
        passed = {name: value for name, value in os.environ.items() if name not in WITHHELD}
        self._env = {**passed, INSIDE: str(files.root)}
        here = Path.cwd()
        self._directory = (
            str(here.relative_to(files.root)) if here.is_relative_to(files.root) else "."
        )

    def run(self, params: object, *, context: ToolContext) -> ToolResult[None]:
        """Run it from its start to its end."""
        from weakincentives.tool_result import ToolResult

        files = cast("HostFilesystem", context.filesystem)
        self.has_ended = True
        self._keep_inside(files)
        try:
            with self._signals.left_to_program(), _terminal_kept():
                result = files.run(
                    self._command,
                    cwd=self._directory,
                    env=self._env,
                    check=self.agent is None,
                    attached=True,
                    salvage=self._keep,
                )
        except CommandFailed as error:
            result = cast("CommandResult", error.result)
        self.code, self.others = result.returncode, result.others
        if not result.kept:
            if result.engine == "scan":
                self._copies = self._at_end.enter_context(files.copied_changes())
            return self._failed(result.returncode)
        self.changed = files.changed_here()
        if self._asks and self.changed and not self._person_commits(files):
            self._copies = self._at_end.enter_context(files.copied_changes())
            return ToolResult.error("you did not commit it")
        return ToolResult.ok(message=self._exited if self.code else "")

    def until_checkpoint(self, params: object, *, context: ToolContext) -> ToolResult[None]:
        """Start it, or let it go on, until it ends or a checkpoint is due at a quiet moment."""
        from weakincentives.tool_result import ToolResult

        files = cast("HostFilesystem", context.filesystem)
        if self._started is None:
            self._keep_inside(files)
            self._at_end.enter_context(_terminal_kept())
            starting = files.program(self._command, cwd=self._directory, env=self._env)
            self._started = self._at_end.enter_context(starting)
        try:
            with self._signals.left_to_program():
                self._wait(files, self._started)
        except BaseException:
            self._started.end()  # first: it must not write after the rollback
            raise
        code = self._started.returncode
        self.has_ended = code is not None
        self.code = 0 if code is None else code if code >= 0 else 128 - code
        if self.code and self.agent is None:
            self._copies = self._at_end.enter_context(files.copied_changes())
            return self._failed(self.code)
        self.changed = files.changed_here()
        return ToolResult.ok(message=self._exited if self.code else "")

    def _keep_inside(self, files: HostFilesystem) -> None:
        """Have a coding agent work in its own process, not in a daemon."""
        if self.agent is None:
            return
        place, agent = self.agent
        self._env |= agent.environment
        if not agent.option or agent.option in self._command:
            return
        head, rest = self._command[: place + 1], self._command[place + 1 :]
        view = files.fork_in_place()  # whatever it does now is dropped
        try:
            asked = view.run([*head, "--help"], env=self._env, timeout=_ASKED)
        finally:
            files.discard(view)
        if agent.option in asked.stdout:
            self._command = [*head, agent.option, *rest]

    def _wait(self, files: HostFilesystem, started: Started) -> None:
        assert self.seconds is not None
        clock, pause = SYSTEM_CLOCK.monotonic, threading.Event()
        due, seen, since = clock() + self.seconds, None, 0.0
        while started.poll() is None:
            pause.wait(_LOOK)
            if clock() < due:
                continue
            found = files.external_changes()
            if found != seen:
                seen, since = found, clock()
            elif found and clock() - since >= QUIET:
                return

    def _failed(self, code: int) -> ToolResult[None]:
        from weakincentives.tool_result import ToolResult

        self.code = code
        return ToolResult.error(self._exited)

    @property
    def _exited(self) -> str:
        return f"{self.name} exited with code {self.code}"

    def keep_copies(self) -> None:
        """Keep the changes of a call that was rolled back, unless that has been done."""
        if self._copies:
            self._keep(self._copies)
            self._copies = ()

    def _keep(self, steps: Sequence[Step]) -> None:
        """Keep changes that are rolled back on a branch; the program's failure is what counts."""
        from weakincentives.core.call import ToolCall
        from weakincentives.runtime.calls import ROLLED_BACK

        about = {ROLLED_BACK: SYSTEM_CLOCK.time()}
        try:
            _drop_old(self.files)
            with self.files.branch(self.branch, about=about) as branch:
                branch.take(steps, ToolCall("exec", {"command": self._command}, self.branch))
        except (WinkError, OSError) as error:
            self.how_to_restore = f"; it could not be kept: {error}"
            return
        self.how_to_restore = f"; to bring it back: wink branch merge {self.branch}"

    def _person_commits(self, files: HostFilesystem) -> bool:
        from weakincentives.cli.history import show_changes
        from weakincentives.cli.question import choose

        show_changes(files.root, files.diff_here)
        count = f"{len(self.changed):,} {'file' if len(self.changed) == 1 else 'files'}"
        question = [f"The program has ended, and changed {count}."]
        with suppress(EOFError):
            return choose(question, {"c": "commit", "r": "roll back"}) == "c"
        return False


def _drop_old(files: HostFilesystem) -> None:
    """Remove the oldest branches with what was rolled back: each needs the history since."""
    from weakincentives.filesystem import branches_of, drop_branch
    from weakincentives.runtime.calls import ROLLED_BACK

    kept = [
        each for each in branches_of(files.root, store=files.store) if ROLLED_BACK in each.about
    ]
    for each in kept[: max(0, len(kept) - _MOST_KEPT + 1)]:
        with suppress(WinkError):  # in use
            drop_branch(files.root, each.name, store=files.store)


class _Signals:
    """Leaves Ctrl-C to the program while it runs; SIGTERM and a hangup end it together with us."""

    def __init__(self) -> None:
        self.stopped_by = 0
        self._is_left = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Signals:
        handlers = {
            signal.SIGINT: self._interrupt,
            signal.SIGQUIT: self._interrupt,
            signal.SIGTERM: self._stop,
            signal.SIGHUP: self._stop,
        }
        for number, handler in handlers.items():
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup, or in the background
                self._before[number] = signal.signal(number, handler)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def left_to_program(self) -> Generator[None]:
        self._is_left = True
        try:
            yield
        finally:
            self._is_left = False

    def _interrupt(self, number: int, frame: object) -> None:
        if self.stopped_by or not self._is_left:
            raise KeyboardInterrupt

    def _stop(self, number: int, frame: object) -> None:
        self.stopped_by = number
        signal.raise_signal(signal.SIGINT)  # which is held back in critical sections


@contextmanager
def _terminal_kept() -> Generator[None]:
    """Leave the terminal as it was: its settings, and who is in front of it."""
    if not (sys.stdin.isatty() and os.tcgetpgrp(0) == os.getpgrp()):
        yield  # there is none, or it is not ours
        return
    import termios

    settings = termios.tcgetattr(0)
    try:
        yield
    finally:
        # A program that ran jobs may have put itself in front; only a process that blocks this
        # signal may take it back.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
        try:
            with suppress(OSError, termios.error):  # the terminal was closed
                os.tcsetpgrp(0, os.getpgrp())
                termios.tcsetattr(0, termios.TCSADRAIN, settings)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
