"""`wink run --attempts N`: several runs at the same task, each on a branch; the best is merged."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import IO, Any, NoReturn, cast

import typer

from weakincentives.cli import entry
from weakincentives.cli.common import Misuse, echo, say, shortened, table
from weakincentives.cli.config import Settings
from weakincentives.cli.signals import stopping
from weakincentives.cli.trust import trust_of
from weakincentives.cli.view import Outcome
from weakincentives.contrib.tools import find_sandbox
from weakincentives.core.state import python
from weakincentives.core.text import counted
from weakincentives.errors import SandboxUnavailable, WinkError
from weakincentives.filesystem import Branch, branches_of
from weakincentives.runtime import Attempt, BestOf, CommandJudge, best_of

_PATIENCE = 0.3
"""Seconds during which another signal does not stop it at once."""
_LIMITS = {"max_turns", "max_tokens", "max_cost", "time_limit"}
_NONE_PASSED = "no attempt passed, so nothing was merged"


@dataclass(kw_only=True)
class Attempts:
    """Attempts at a task, each a `wink run` of its own in a process of its own."""

    settings: Settings
    flags: Mapping[str, Any]
    """The options of every run."""
    more: Sequence[str]
    """More options of every run, as they are written."""
    task: str
    judge: str
    count: int
    models: Sequence[str] = ()
    """The attempts use these in turn."""
    temperatures: Sequence[float] = ()
    """Also used in turn."""
    name: str = ""
    jobs: int = 4
    merge: bool = True
    as_json: bool = False
    quiet: bool = False

    _alive: IO[bytes] = field(init=False)
    _lifeline: IO[bytes] = field(init=False)
    """The other end of a pipe: the runs stop when we close it, or are killed."""
    _results: dict[int, dict[str, Any]] = field(
        init=False, default_factory=dict[int, "dict[str, Any]"]
    )
    """What the runs said at their end, by the number of the attempt."""

    def perform(self) -> int:
        """Make the attempts, show how they ended, and return the exit code."""
        trust_of(self.settings.workspace).admit(self.settings)
        judge = self._command_judge()
        self.name = self.name or os.urandom(2).hex()
        self._show_start()
        ends = os.pipe()
        with (
            open(ends[0], "rb") as self._alive,
            open(ends[1], "wb") as self._lifeline,
            stopping(_PATIENCE) as stop,
        ):
            try:
                found = best_of(
                    self.settings.workspace,
                    [partial(self._run, number) for number in range(1, self.count + 1)],
                    judge,
                    jobs=self.jobs,
                    merge=self.merge,
                    name=self.name,
                    cost=lambda result: result["cost_usd"],
                    on_end=self._show_attempt,
                    on_interrupt=self._lifeline.close,
                    about={"task": self.task},
                    unprotected=self.settings.policy.unprotect,
                )
            except KeyboardInterrupt:
                self._show_interrupted()
                return stop.exit_code
            stop.is_over = True
        self._show(found)
        return 0 if found.winner is not None and not found.problem else 1

    def _command_judge(self) -> CommandJudge:
        """Return a judge that runs its command as the agents run theirs."""
        sandbox = self.settings.sandbox
        try:
            found = find_sandbox(sandbox)
        except SandboxUnavailable as error:
            raise Misuse(f"the judge needs a sandbox: {error}") from error
        return CommandJudge(command=self.judge, timeout=sandbox.max_timeout, run=found.run)

    # The runs

    def _run(self, number: int, branch: Branch) -> dict[str, Any]:
        """Run the agent on a branch, in another process; return its result."""
        branch.close()  # the other process opens it
        with tempfile.TemporaryFile() as errors:
            process = self._started(number, branch.name, errors)
            try:
                result = self._heard(process)
            finally:
                process.wait()
            errors.seek(0)
            said = errors.read().decode(errors="replace").strip().rpartition("\n")[2]
        self._results[number] = result
        if result.get("outcome") != "done":
            reason = result.get("error") or said.removeprefix("wink: ")
            raise WinkError(reason or f"the run ended with exit code {process.returncode}")
        return result

    def _started(self, number: int, branch: str, errors: IO[bytes]) -> subprocess.Popen[bytes]:
        alive = self._alive.fileno()
        return subprocess.Popen(
            python(_PROGRAM, str(alive), *self._words(number, branch)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            pass_fds=[alive],
            start_new_session=True,  # Ctrl-C is for us to handle
        )

    def _flags(self, number: int) -> dict[str, Any]:
        flags = dict(self.flags)
        if self.models:
            flags["model"] = self.models[(number - 1) % len(self.models)]
        if self.temperatures:
            flags["temperature"] = self.temperatures[(number - 1) % len(self.temperatures)]
        return flags

    def _words(self, number: int, branch: str) -> list[str]:
        words = ["run", "-", f"--workspace={self.settings.workspace}", f"--branch={branch}"]
        for name, value in self._flags(number).items():
            values = cast("list[object]", value) if isinstance(value, list) else [value]
            words += [f"--{name.replace('_', '-')}={each}" for each in values]
        return [*words, *self.more, "--no-merge", "--json"]

    def _heard(self, process: subprocess.Popen[bytes]) -> dict[str, Any]:
        """Send the task, and return the last event of the run; empty if there is none."""
        assert process.stdin is not None
        assert process.stdout is not None
        with process.stdout:
            with suppress(BrokenPipeError), process.stdin as stdin:  # it may refuse its options
                stdin.write(self.task.encode(errors="backslashreplace"))
            result: dict[str, Any] = {}
            for line in process.stdout:
                event = json.loads(line)
                if event["type"] == "result":
                    result = event
        return result

    # What is shown

    def _show_start(self) -> None:
        if self.settings.ask and "--yes" not in self.more:
            say("attempts cannot ask: calls that need approval are denied; --yes approves them")
        most = f", {self.jobs} at a time" if self.jobs < self.count else ""
        limits = "; limits hold for each" if self.flags.keys() & _LIMITS else ""
        names = f"{self.name}-1" + (f" to {self.name}-{self.count}" if self.count > 1 else "")
        self._say(f"{counted(self.count, 'attempt')} on the branches {names}{most}{limits}")

    def _say(self, text: str) -> None:
        if not self.as_json and not self.quiet:
            echo(text, err=True)

    def _show_attempt(self, attempt: Attempt[dict[str, Any]]) -> None:
        fields = self._fields(attempt)
        if self.as_json:
            _print_json("attempt", fields)
        reason = shortened(str(fields["reason"]), 160)
        self._say(f"attempt {attempt.number} {fields['verdict']}: {reason}")

    def _fields(self, attempt: Attempt[dict[str, Any]]) -> dict[str, Any]:
        verdict, flags = attempt.verdict, self._flags(attempt.number)
        said = self._results.get(attempt.number, {})
        names = ("run", "turns", "input_tokens", "output_tokens", "cost_usd", "text")
        return {
            "attempt": attempt.number,
            "branch": attempt.branch,
            "model": flags.get("model", self.settings.model),
            "temperature": flags.get("temperature", self.settings.temperature),
            "verdict": "error" if verdict is None else "passed" if verdict.passed else "failed",
            "score": None if verdict is None else verdict.score,
            "reason": attempt.error if verdict is None else verdict.reason,
            "files": [
                {"path": each.path, "added": each.added, "removed": each.removed}
                for each in attempt.changes
            ],
            **{name: said.get(name) for name in names},
            "seconds": attempt.seconds,
        }

    def _show(self, found: BestOf[dict[str, Any]]) -> None:
        winner = found.winner
        left = [each for each in found.attempts if each is not winner or found.merged is None]
        text = "" if winner is None or winner.result is None else str(winner.result["text"])
        if self.as_json:
            self._show_result(
                "done" if winner is not None and not found.problem else "failed",
                [each.branch for each in left],
                winner=None if winner is None else winner.branch,
                merged=found.merged,
                problem=found.problem,
                text=text,
            )
            return
        if not self.quiet:
            rows = [self._row(self._fields(each)) for each in found.attempts]
            echo("\n".join(table([self._columns, *rows])))
            echo("\n".join(_summary(found, left)), err=True)
        elif found.problem or winner is None:
            say(found.problem or _NONE_PASSED)
        if text:
            echo(text)

    def _show_interrupted(self) -> None:
        names = {f"{self.name}-{number}" for number in range(1, self.count + 1)}
        left = [each.name for each in branches_of(self.settings.workspace) if each.name in names]
        if self.as_json:
            self._show_result("interrupted", left)
        say(f"interrupted; {_what_next(left)}" if left else "interrupted")

    def _show_result(self, outcome: Outcome, branches: list[str], **fields: object) -> None:
        empty = {"winner": None, "merged": None, "problem": "", "text": ""}
        _print_json("result", {"outcome": outcome, "branches": branches, **empty, **fields})

    @property
    def _columns(self) -> list[str]:
        columns = ["branch", "verdict", "score", "files", "lines", "tokens", "cost", "time"]
        columns += ["model"] if self.models else []
        return columns + (["temperature"] if self.temperatures else [])

    def _row(self, fields: Mapping[str, Any]) -> list[str]:
        files, score, cost = fields["files"], fields["score"], fields["cost_usd"]
        tokens = (fields["input_tokens"] or 0) + (fields["output_tokens"] or 0)
        row = [
            fields["branch"],
            fields["verdict"],
            "" if score is None else f"{score:g}",
            str(len(files)),
            f"+{sum(each['added'] for each in files)} -{sum(each['removed'] for each in files)}",
            f"{tokens:,}",
            "" if cost is None else f"${cost:.4f}",
            f"{fields['seconds']:.1f}s",
        ]
        row += [shortened(str(fields["model"]), 40)] if self.models else []
        return row + ([f"{fields['temperature']:g}"] if self.temperatures else [])


_PROGRAM = "from weakincentives.cli.attempts import main; main()"


def main() -> NoReturn:
    """Run `wink`, as long as the process lives that has the other end of a pipe.

    The arguments of the process are the pipe's descriptor and those of `wink`.
    """
    alive = int(sys.argv.pop(1))
    os.set_inheritable(alive, False)

    def watch() -> None:
        os.read(alive, 1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()
    entry.main()


def _summary(found: BestOf[Any], left: Sequence[Attempt[Any]]) -> Iterator[str]:
    """Yield what was merged, and what to do with the rest."""
    winner = found.winner
    if winner is None:
        yield _NONE_PASSED
    elif found.problem:
        yield f"{winner.branch} is the best, but was not merged: {found.problem}"
    elif found.merged is None:
        yield f"{winner.branch} is the best; to merge it: wink branch merge {winner.branch}"
    else:
        paths = counted(len(found.merged), "path")
        yield f"merged {winner.branch}: {paths} changed; to undo it: wink undo --last"
    if left:
        yield _what_next([each.branch for each in left])


def _what_next(branches: Sequence[str]) -> str:
    names, one = ", ".join(branches), branches[0]
    verb = "remains" if len(branches) == 1 else "remain"
    return (
        f"{names} {verb}: see `wink branch diff {one}`, `wink branch merge {one}` and"
        f" `wink branch drop {one}`"
    )


def _print_json(kind: str, fields: Mapping[str, object]) -> None:
    typer.echo(json.dumps({"type": kind, **fields}))
