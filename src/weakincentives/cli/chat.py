"""`wink chat`: a conversation with an agent on a real directory."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from weakincentives.adapters import Adapter, MessageReceived, RunOptions
from weakincentives.cli.agent import AgentRun
from weakincentives.cli.common import Misuse, echo, hint, say, shortened
from weakincentives.cli.history import show_diff
from weakincentives.cli.models import budget_of, open_model, price_of, tracker_of
from weakincentives.cli.signals import Stop
from weakincentives.cli.view import Outcome, open_view
from weakincentives.contrib.tools import Plan
from weakincentives.core.budget import BudgetTracker
from weakincentives.core.state import state_directory
from weakincentives.errors import SessionError, UndoRefused, WinkError
from weakincentives.filesystem import Committed, HostFilesystem
from weakincentives.runtime import Inbox, PromptExecuted, UserMessage
from weakincentives.runtime.conversation import last_conversation
from weakincentives.runtime.forks import absolute
from weakincentives.runtime.merge import rebased
from weakincentives.runtime.saved import not_undone

_UNDONE = "\n\n(I have undone your changes to these files: "


@dataclass(kw_only=True)
class Chat(AgentRun):
    """A conversation: each message of the user is a run on the same session."""

    merges = False
    patience = 2.0

    _files: HostFilesystem = field(init=False)
    _input: _Typed | _Lines = field(init=False)
    _adapter: Adapter = field(init=False)
    _models: ExitStack = field(init=False, default_factory=ExitStack)
    _recorder: ExitStack = field(init=False)
    """Closes the session's file, which the first message creates."""
    _inbox: Inbox | None = field(init=False, default=None)
    _later: list[str] = field(init=False, default_factory=list[str])
    """Commands, and messages that came too late, typed while the model worked."""
    _notes: list[str] = field(init=False, default_factory=list[str])
    """What the user did to the files; the model is told with the next message."""
    _cost: float | None = field(init=False, default=None)
    _tracker: BudgetTracker | None = field(init=False, default=None)
    """Counts the tokens of the whole chat."""

    def _perform(self, stop: Stop) -> Outcome:
        settings = self.settings
        is_terminal = sys.stdin.isatty() and sys.stdout.isatty() and not self.as_json
        is_terminal = is_terminal and os.environ.get("TERM") != "dumb"
        self._input = _Typed(tuple(self._commands)) if is_terminal else _Lines()
        with (
            self._models,
            self._open_files() as files,
            self._resumed() as saved,
            open_view(as_json=self.as_json, quiet=self.quiet) as self._view,
        ):
            self._view.close()  # until there is a message
            if is_terminal:
                self._view.on_line = self._queue
                self._view.on_end = partial(self._later.append, "/quit")
            self._files = files
            with self._open_workbench(files, saved), ExitStack() as self._recorder:
                self._use_model(settings.model, 0 if self.earlier is None else self.earlier.turns)
                super()._start()
                if saved is not None:
                    self._recorder.enter_context(self._recording(saved))
                    self._recap()
                elif is_terminal:
                    echo("Enter sends a message, Alt-Enter begins a line; /help, Ctrl-D quits.")
                outcome = self._talk(stop)
                self._leave_branch()
                if is_terminal and self._has_begun:
                    echo(f"To continue: wink chat --resume {self._run_file.mark}")
                return outcome

    def _leave_branch(self) -> None:
        if self._branch is not None:
            self._is_merged = not self._branch.has_changes
            if not self._is_merged:
                name = self._branch.name
                say(
                    f"the changes are on the branch {name}; to merge them: wink branch merge {name}"
                )

    def _talk(self, stop: Stop) -> Outcome:
        has_failed = is_leaving = False
        while stop.by == signal.SIGINT:
            try:
                stop.at, stop.is_over = None, False
                if is_leaving:  # here, where one more Ctrl-C quits already
                    say("Ctrl-C again quits, and so does Ctrl-D")
                said = self._later.pop(0) if self._later else self._input.read()
                is_leaving = False
                if said is None or said.strip() in ("/quit", "/exit"):
                    return "failed" if has_failed and not self._input.is_terminal else "done"
                if _is_command(said):
                    self._obey(*said.split())
                elif said.strip():
                    outcome = self._answer(said, stop)
                    has_failed |= outcome == "failed"
                    if outcome == "interrupted" and not self._input.is_terminal:
                        break
            except KeyboardInterrupt:  # not in a turn
                if not self._input.is_terminal:
                    break
                if is_leaving:
                    return "done"
                is_leaving = stop.by == signal.SIGINT
        return "interrupted"

    # A message

    def _answer(self, said: str, stop: Stop) -> Outcome:
        """Let the model work on a message."""
        self.message = said
        if not self._has_begun:
            self._recorder.enter_context(self._recording(None))
        try:
            self._view.begin()
            if not self._input.is_terminal:
                self._show(MessageReceived(said))
            self.message = "".join([said, *self._notes])
            self._work(self._adapter, stop)
            self._show_result()
        finally:
            self._view.close()
        result = self._view.totals
        if result.turns:  # the model has read them
            self._notes.clear()
        if result.cost_usd is not None:
            self._cost = (self._cost or 0.0) + result.cost_usd
        for text in self._view.queued:
            say(f"sent with your next message: {shortened(text, 60)}")
        self._input.draft, self._view.typed = self._view.typed, ""
        if self._input.is_terminal:
            echo("")
        return result.outcome

    @property
    def _has_begun(self) -> bool:
        return hasattr(self, "_saved")

    def _queue(self, line: str) -> bool:
        """Send a line that was typed while the model works; tell whether it is on its way."""
        with suppress(SessionError, OSError):  # the model has just finished, or the disk is full
            if self._inbox is not None and not _is_command(line):
                self._inbox.send(line)
                return True
        self._later.append(line)
        return False

    def _start(self) -> None:
        """Say nothing: the chat has begun."""

    def _whole_task(self) -> str:
        return self.message or ""

    def _options(self, adapter: Adapter) -> RunOptions:
        options = super()._options(adapter)
        config = options.get("config")
        assert config is not None
        self._inbox = options.get("inbox")
        # The model may stop with a question to the user.
        options["config"] = replace(config, completion=None)
        # Of an interrupted turn: the user has something else to say.
        options["cancel_open_calls"] = True
        return options

    def _budget_tracker(self, adapter: Adapter) -> BudgetTracker | None:
        return self._tracker

    def _recap(self) -> None:
        """Show where a resumed conversation stands."""
        self._view.plan = self._plan_now()
        messages = last_conversation(self._saved.session)
        for role, prefix in (("user", "> "), ("model", "")):
            text = next((m.text for m in reversed(messages) if m.role == role and m.text), "")
            if text and not self.quiet:
                echo(prefix + text, err=True)

    # Commands

    @property
    def _commands(self) -> Mapping[str, tuple[Callable[..., object], str]]:
        return {
            "/diff": (self._diff, "what the last message changed; /diff 2: message 2; /diff all"),
            "/undo": (self._undo, "undo the files of the last message; /undo 2: of message 2"),
            "/rewind": (self._rewind, "list the messages; /rewind 2: go back to before message 2"),
            "/merge": (self._merge_branch, "on a branch: merge the changes into the directory"),
            "/plan": (self._plan, "show the plan"),
            "/model": (self._model, "show the model; /model NAME: use another"),
            "/cost": (self._show_cost, "show the tokens so far, and the price if it is known"),
            "/help": (self._help, "show this"),
            "/quit": (self._help, "quit, as Ctrl-D does; wink chat --resume continues"),
        }

    def _obey(self, name: str, *arguments: str) -> None:
        if name not in self._commands:
            near = hint(name, self._commands, "/help lists the commands")
            say(f"unknown command {name}; {near} A space before it makes it a message.")
            return
        command, _ = self._commands[name]
        try:
            command(*arguments)
        except UndoRefused as error:
            say("nothing was changed: these files have changed since: " + ", ".join(error.paths))
            say(f"to replace them: {' '.join([name, *arguments, '--force'])}; history keeps them")
        except (Misuse, WinkError, OSError, LookupError) as error:
            say(str(error.args[0] if isinstance(error, LookupError) and error.args else error))
        except TypeError:
            say(f"wrong arguments; {name}: {self._commands[name][1]}")

    def _help(self) -> None:
        for name, (_, text) in self._commands.items():
            echo(f"  {name:<8} {text}")
        echo(
            "  While the model works, a line you type is sent to it. Ctrl-C stops the turn,"
            " Ctrl-D quits after it."
        )

    def _messages(self) -> list[UserMessage]:
        return self._saved.user_messages() if self._has_begun else []

    def _numbered(self, given: str) -> UserMessage:
        messages = self._messages()
        if not (given.isdecimal() and 1 <= int(given) <= len(messages)):
            raise Misuse(f"there is no message {given}; there are {len(messages)}: see /rewind")
        return messages[int(given) - 1]

    def _live(self) -> dict[str, Committed]:
        """Return the calls that changed files and are not undone, by id."""
        history = self._files.history()
        live = not_undone(history)
        return {each.call_id: each for each in history if each.call_id in live}

    def _diff(self, which: str = "") -> None:
        messages = self._messages()
        if which != "all":
            messages = [self._numbered(which)] if which else messages[-1:]
        changed = _of(messages, self._live())
        if changed:
            where = "" if self._branch is None else self._branch.name
            show_diff(self.settings.workspace, changed, where)
        else:
            echo("No files were changed.")

    def _undo(self, *arguments: str) -> None:
        force, rest = _forced(arguments)
        live = self._live()
        messages = [self._numbered(*rest)] if rest else self._messages()[::-1]
        changed = next(filter(None, (_of([each], live) for each in messages)), None)
        if changed is None:
            echo("Nothing to undo: no files were changed, or it is already undone.")
            return
        notes = self._files.undo(*(each.call_id for each in reversed(changed)), force=force)
        say(*notes)
        echo(f"Undone: {shortened(_paths(changed), 200)}")
        where = "" if self._branch is None else f"{self._branch.name}/"
        echo(f"To redo it after the chat: wink undo {where}{self._files.history()[-1].call_id}")
        self._notes.append(f"{_UNDONE}{shortened(_paths(changed), 2000)})")

    def _rewind(self, *arguments: str) -> None:
        force, rest = _forced(arguments)
        messages = self._messages()
        if not rest:
            for number, message in enumerate(messages, 1):
                echo(f"  {number:>3}  {shortened(message.text, 70)}")
            echo("/rewind N goes back to before message N: the files, the plan, the conversation.")
            return
        target = self._numbered(*rest)
        changed = _of(messages[int(rest[0]) - 1 :], self._live())
        say(*self._saved.rewind(int(rest[0]), self._files, force=force))
        self._view.plan = self._plan_now()
        undone = f" Undone: {shortened(_paths(changed), 200)}" if changed else ""
        echo(f"Back before message {rest[0]}.{undone}")
        self._notes.clear()
        self._input.draft = target.text.partition(_UNDONE)[0]

    def _merge_branch(self) -> None:
        branch = self._branch
        if branch is None:
            raise Misuse("this chat works on the directory itself; there is nothing to merge")
        if not self._has_begun or not branch.has_changes:
            echo("Nothing to merge.")
            return
        if problem := self._merge(branch):
            self._notes.append(f"\n\n({rebased(branch)})")
            say(f"{problem}; the model is told with your next message, then /merge again")
        else:
            branch.begin_anew()
            echo(f"Merged into {self.settings.workspace}.")

    def _plan_now(self) -> Plan | None:
        return self._workbench.session[Plan].latest()

    def _plan(self) -> None:
        plan = self._plan_now()
        echo("There is no plan." if plan is None else self._view.plan_text(plan))

    def _model(self, name: str = "") -> None:
        if name:
            self._use_model(absolute(name))
        echo(f"model: {self.settings.model}")

    def _use_model(self, name: str | None, turns: int = 0) -> None:
        settings = self.settings.model_copy(update={"model": name})
        with ExitStack() as opened:
            model = open_model(name, turns=turns, temperature=settings.temperature)
            adapter = opened.enter_context(model)
            budget = budget_of(settings, adapter)
            self._models.close()
            self._models.enter_context(opened.pop_all())
        self.settings, self._adapter = settings, adapter
        self._view.price = price_of(settings, adapter)
        if budget is not None:
            if self._tracker is None:
                self._tracker = tracker_of(settings, adapter, self._workbench.session)
            else:
                self._tracker.budget = budget

    def _show_cost(self) -> None:
        used = [each.usage for each in self._workbench.session[PromptExecuted]]
        read, written = (sum(getattr(u, f"{k}_tokens") for u in used) for k in ("input", "output"))
        price = "price unknown" if self._cost is None else f"${self._cost:.4f} since it was opened"
        echo(f"{read:,} tokens read, {written:,} written; {price}")


def _is_command(said: str) -> bool:
    return bool(re.match(r"/[a-z]+(\s|$)", said))


def _of(messages: Iterable[UserMessage], live: Mapping[str, Committed]) -> list[Committed]:
    """Return what is live of the calls for messages, oldest first."""
    return [live[call] for message in messages for call in message.calls if call in live]


def _paths(changed: Iterable[Committed]) -> str:
    return ", ".join(sorted({path for each in changed for path in each.paths}))


def _forced(arguments: Sequence[str]) -> tuple[bool, list[str]]:
    return "--force" in arguments, [each for each in arguments if each != "--force"]


# Input


class _Lines:
    """Messages from a pipe: one per line; a line that ends with a backslash continues."""

    is_terminal = False
    draft = ""

    def read(self) -> str | None:
        """Return the next message; None at the end."""
        lines: list[str] = []
        while line := sys.stdin.readline():
            lines.append(line.removesuffix("\n"))
            if not lines[-1].endswith("\\"):
                break
            lines[-1] = lines[-1][:-1]
        return "\n".join(lines) if lines else None


class _Typed:
    """Messages that a person types, with history."""

    is_terminal = True

    def __init__(self, commands: Sequence[str]) -> None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.completion import WordCompleter
        from prompt_toolkit.history import FileHistory

        path = state_directory() / "chat_history"
        flags = os.O_WRONLY | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
        os.close(os.open(path, flags, 0o600))
        self.draft = ""
        """What stands in the next prompt."""
        self._session: Any = PromptSession(
            history=FileHistory(str(path)),
            multiline=True,
            prompt_continuation="  ",
            key_bindings=_bindings(),
            completer=WordCompleter(list(commands), sentence=True),
            complete_while_typing=False,
        )

    def read(self) -> str | None:
        """Return the next message; None at the end."""
        draft, self.draft = self.draft, ""
        wakeup = signal.set_wakeup_fd(-1)  # the prompt's event loop uses it, and resets it
        try:
            return self._session.prompt("> ", default=draft)
        except EOFError:
            return None
        finally:
            signal.set_wakeup_fd(wakeup)


def _bindings() -> Any:
    """Enter sends; Alt-Enter, or Enter after a backslash, begins a line."""
    from prompt_toolkit.key_binding import KeyBindings

    bindings = KeyBindings()

    @bindings.add("enter")
    def _(event: Any) -> None:
        buffer = event.current_buffer
        if buffer.document.char_before_cursor == "\\":
            buffer.delete_before_cursor()
            buffer.newline(copy_margin=False)
        else:
            buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    def _(event: Any) -> None:
        event.current_buffer.newline(copy_margin=False)

    return bindings
