"""Best of N: several attempts at a task, each on a branch; a judge decides which is merged."""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, cast

from weakincentives.core.clock import SYSTEM_CLOCK
from weakincentives.core.logs import get_logger
from weakincentives.core.text import harmless
from weakincentives.errors import ViewClosed, WinkError
from weakincentives.filesystem import (
    Branch,
    CommandResult,
    FileChange,
    HostFilesystem,
    drop_branch,
)
from weakincentives.filesystem.ignored import IgnoredFiles
from weakincentives.filesystem.store import location_of

R = TypeVar("R")

_logger = get_logger(__name__)

_WAIT = 60.0
"""Seconds to wait, with a winner to merge, for another process that has the workspace open."""
_LONGEST = 500
"""Characters of a judge's last line."""
_INTERRUPTED = "the attempts were interrupted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a judge says about an attempt."""

    passed: bool
    score: float | None = None
    """Higher is better."""
    reason: str = ""

    def __post_init__(self) -> None:
        if self.score is not None and not math.isfinite(self.score):
            raise ValueError(f"a score must be a finite number, got {self.score}")


@dataclass(frozen=True, kw_only=True)  # no slots: see PromptResponse
class Attempt(Generic[R]):
    """One attempt, and what became of it."""

    number: int
    """From 1, in the order given."""
    branch: str
    """The name of its branch."""
    result: R | None = None
    """What it returned."""
    changes: tuple[FileChange, ...] = ()
    """What it changed; ignored and generated files are only named, and have no lines."""
    verdict: Verdict | None = None
    error: str = ""
    """Why there is no verdict: the attempt or its judge failed."""
    cost_usd: float | None = None
    seconds: float = 0.0
    """How long the attempt took, without its judge."""

    @property
    def passed(self) -> bool:
        return self.verdict is not None and self.verdict.passed

    @property
    def lines(self) -> int:
        """How many lines it added and removed."""
        return sum(each.added + each.removed for each in self.changes)

    @property
    def rank(self) -> tuple[bool, bool, float, int, float, int]:
        """What attempts are sorted by, the best first."""
        score = None if self.verdict is None else self.verdict.score
        return (
            not self.passed,
            self.verdict is None,
            math.inf if score is None else -score,
            self.lines,
            math.inf if self.cost_usd is None else self.cost_usd,
            self.number,
        )


@dataclass(frozen=True, kw_only=True)
class BestOf(Generic[R]):
    """All attempts, the best first, and what was merged."""

    attempts: tuple[Attempt[R], ...]
    merged: tuple[str, ...] | None = None
    """The paths that the winner changed in the workspace; None if nothing was merged."""
    problem: str = ""
    """Why the winner could not be merged, such as a conflict; it is still a branch."""

    @property
    def winner(self) -> Attempt[R] | None:
        """The best attempt that passed."""
        return self.attempts[0] if self.attempts and self.attempts[0].passed else None


Judge = Callable[[HostFilesystem, Attempt[R]], Verdict]
"""Judges an attempt. The filesystem is a private view of the branch: the judge may change it, and
nothing of that is kept."""


class RunsCommands(Protocol):
    """``HostFilesystem.run``, or the ``run`` of a sandbox."""

    def __call__(
        self, files: HostFilesystem, argv: Sequence[str] | str, /, *, timeout: float | None
    ) -> CommandResult: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandJudge:
    """Runs a command on the files of an attempt, which passes if the command exits with 0.

    If the last line of its output is a number, or a JSON object with a ``score``, that is the
    score. The command runs code of the attempt: an attempt that may change the tests decides
    about itself.
    """

    command: Sequence[str] | str
    timeout: float = 600.0
    """Seconds; a command that takes longer is killed, and the attempt fails."""
    run: RunsCommands = HostFilesystem.run
    """By default not in a sandbox."""

    def __call__(self, files: HostFilesystem, attempt: Attempt[Any]) -> Verdict:
        done = self.run(files, self.command, timeout=self.timeout)
        reason = _last_line(done.stdout) or _last_line(done.stderr)
        if done.timed_out:
            reason = f"the judge took longer than {self.timeout:g} s"
        elif done.stopped is not None:
            reason = f"the judge was killed: {done.stopped}"
        score = score_in(done.stdout)
        return Verdict(
            passed=done.returncode == 0 and not done.timed_out and done.stopped is None,
            score=score,
            reason=reason or f"exit code {done.returncode}",
        )


def _last_line(output: str) -> str:
    return harmless(output.rstrip().rpartition("\n")[2].strip()[:_LONGEST])


def score_in(output: str) -> float | None:
    """Return the score in the last line of a judge's output, if it has one."""
    try:
        value = json.loads(output.rstrip().rpartition("\n")[2], parse_int=float)
    except (ValueError, RecursionError):  # anything may be printed there
        return None
    if isinstance(value, dict):
        value = cast("dict[str, object]", value).get("score")
    return value if isinstance(value, float) and math.isfinite(value) else None


def best_of(
    workspace: HostFilesystem | str | os.PathLike[str],
    attempts: Sequence[Callable[[Branch], R]],
    judge: Judge[R] | Sequence[str] | str,
    *,
    jobs: int = 4,
    merge: bool = True,
    name: str = "",
    cost: Callable[[R], float | None] = lambda result: None,
    on_end: Callable[[Attempt[R]], object] = lambda attempt: None,
    on_interrupt: Callable[[], object] = lambda: None,
    **options: Any,
) -> BestOf[R]:
    """Make attempts in parallel, each on a branch of the workspace; merge the best that passes.

    All begin with the workspace as it is now. The best is the one with the highest score, then with
    the fewest changed lines, then the cheapest, then the first. Its branch is dropped once it is
    merged; the others remain as branches. If none passes, or the best conflicts with what others
    have changed in the workspace meanwhile, nothing is merged and all branches remain.

    An attempt that raises, and one whose judge raises, has failed; the others go on. Ctrl-C stops
    all: attempts in progress can no longer change their branches, and their commands are killed.

    Args:
        attempts: Each works on its branch and returns anything. One that has another process work
            on the branch closes it first.
        judge: A function, or a command that is run by :class:`CommandJudge`.
        jobs: How many attempts are made, or judged, at the same time.
        merge: Whether to merge the winner.
        name: The branches are called NAME-1, NAME-2 and so on; some letters by default.
        cost: Returns what an attempt has cost, in US dollars, from what it returned.
        on_end: Called with each attempt once it is judged, one at a time.
        on_interrupt: Called to stop what the attempts have started themselves.
        options: Of every branch, such as ``about`` and ``unprotected``.

    >>> from weakincentives.runtime import best_of
    >>> def attempt(branch):
    ...     branch.write("a.txt", "done\\n")
    >>> found = best_of(directory, [attempt, attempt], "grep done a.txt")  # doctest: +SKIP
    >>> found.winner.number, found.merged  # doctest: +SKIP
    (1, ('a.txt',))
    """
    if not attempts:
        raise ValueError("there must be at least one attempt")
    if jobs < 1:
        raise ValueError(f"jobs must be positive, got {jobs}")
    contest = _Contest(
        workspace=workspace,
        judge=judge if callable(judge) else CommandJudge(command=judge),
        cost=cost,
        on_end=on_end,
        on_interrupt=on_interrupt,
        options=options,
    )
    branches = contest.branches(len(attempts), name or os.urandom(2).hex())
    made = contest.hold(list(zip(attempts, branches, strict=True)), jobs)
    found = BestOf(attempts=tuple(sorted(made, key=lambda each: each.rank)))
    return contest.merge(found) if merge else found


@dataclass(kw_only=True)
class _Contest(Generic[R]):
    """The attempts while they are made and judged."""

    workspace: HostFilesystem | str | os.PathLike[str]
    judge: Judge[R]
    cost: Callable[[R], float | None]
    on_end: Callable[[Attempt[R]], object]
    on_interrupt: Callable[[], object]
    options: dict[str, Any]
    """Of every branch."""

    _lock: threading.Lock = field(init=False, default_factory=threading.Lock)
    _in_use: set[HostFilesystem] = field(init=False, default_factory=set[HostFilesystem])
    """What attempts and judges work on now."""
    _is_stopped: bool = field(init=False, default=False)
    _ending: threading.Lock = field(init=False, default_factory=threading.Lock)
    """Held while ``on_end`` is called."""

    def __post_init__(self) -> None:
        about: Mapping[str, Any] = self.options.pop("about", None) or {}
        self._about = dict(about)
        if isinstance(self.workspace, HostFilesystem):
            self._root, self._store = self.workspace.root, self.workspace.store
        else:
            self._root = Path(os.path.realpath(self.workspace))
            self._store = location_of(self._root)

    def branches(self, count: int, name: str) -> list[Branch]:
        """Make the branches, all of the same state."""
        made: list[Branch] = []
        try:
            for number in range(1, count + 1):
                made.append(
                    Branch.create(
                        self._root,
                        f"{name}-{number}",
                        at=made[0].info.base if made else None,
                        about={**self._about, "attempt": number, "attempts": count},
                        store=self._store,
                        **self.options,
                    )
                )
        except BaseException:
            for each in made:
                each.close()
                drop_branch(self._root, each.name, store=self._store)
            raise
        return made

    def hold(
        self, given: Sequence[tuple[Callable[[Branch], R], Branch]], jobs: int
    ) -> list[Attempt[R]]:
        """Make and judge all attempts."""
        with ThreadPoolExecutor(jobs, thread_name_prefix="wink-attempt") as pool:
            made: list[Future[Attempt[R]]] = []
            try:
                for number, (act, branch) in enumerate(given, 1):
                    made.append(pool.submit(self._make, number, act, branch))
                wait(made, return_when=FIRST_EXCEPTION)
                return [each.result() for each in made]
            except BaseException:
                self._stop(made)
                raise
            finally:
                pool.shutdown()
                for _, branch in given:  # also of those that were not begun
                    branch.close()

    def _stop(self, made: Iterable[Future[Attempt[R]]]) -> None:
        for each in made:
            each.cancel()
        with self._lock:
            self._is_stopped = True
            in_use = list(self._in_use)
        for each in in_use:
            each.seal(_INTERRUPTED)  # which kills its commands
        self.on_interrupt()

    @contextlib.contextmanager
    def _using(self, files: HostFilesystem) -> Generator[None]:
        with self._lock:
            if self._is_stopped:
                raise ViewClosed(_INTERRUPTED)
            self._in_use.add(files)
        try:
            yield
        finally:
            with self._lock:
                self._in_use.discard(files)

    # One attempt

    def _make(self, number: int, act: Callable[[Branch], R], branch: Branch) -> Attempt[R]:
        attempt = Attempt[R](number=number, branch=branch.name)
        began = SYSTEM_CLOCK.monotonic()
        attempt = _tried(attempt, lambda: self._work(attempt, act, branch))
        attempt = replace(attempt, seconds=SYSTEM_CLOCK.monotonic() - began)
        attempt = _tried(attempt, lambda: self._look(attempt))
        with self._ending:
            self.on_end(attempt)
        return attempt

    def _work(self, attempt: Attempt[R], act: Callable[[Branch], R], branch: Branch) -> Attempt[R]:
        with branch, self._using(branch):
            result = act(branch)
        return replace(attempt, result=result, cost_usd=self.cost(result))

    def _look(self, attempt: Attempt[R]) -> Attempt[R]:
        """Note what an attempt changed, and judge it if it has not failed."""
        with self._opened(attempt) as branch:
            ignored = IgnoredFiles(self._root)
            attempt = replace(attempt, changes=branch.diff_here(lambda path: not ignored(path)))
            if not attempt.error:
                attempt = _tried(attempt, lambda: self._judge(attempt, branch))
        return attempt

    def _judge(self, attempt: Attempt[R], branch: Branch) -> Attempt[R]:
        view = branch.fork()
        try:
            with self._using(view):
                verdict = self.judge(view, attempt)
        finally:
            branch.discard(view)
        if not isinstance(verdict, Verdict):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"the judge must return a Verdict, not {verdict!r}")
        return replace(attempt, verdict=verdict)

    def _opened(self, attempt: Attempt[R]) -> Branch:
        return Branch.open(self._root, attempt.branch, store=self._store, **self.options)

    # The end

    def merge(self, found: BestOf[R]) -> BestOf[R]:
        """Merge the winner."""
        winner = found.winner
        if winner is None:
            return found
        try:
            with self._opened_workspace() as files, self._opened(winner) as branch:
                found = replace(found, merged=branch.merge_into(files, strict=True))
            drop_branch(self._root, winner.branch, store=self._store)
        except (WinkError, OSError) as error:
            return replace(found, problem=str(error))
        return found

    @contextlib.contextmanager
    def _opened_workspace(self) -> Generator[HostFilesystem]:
        if isinstance(self.workspace, HostFilesystem):
            yield self.workspace
            return
        unprotected = self.options.get("unprotected", ())
        with HostFilesystem(self._root, wait=_WAIT, unprotected=unprotected) as files:
            yield files


def _tried(attempt: Attempt[R], act: Callable[[], Attempt[R]]) -> Attempt[R]:
    """Return the attempt that ``act`` returns, or else the attempt with the reason why not."""
    try:
        return act()
    except (Exception, SystemExit) as error:  # it ends this attempt, not all of them
        is_ours = isinstance(error, WinkError)
        if not is_ours:
            _logger.exception("Attempt %d failed", attempt.number)
        reason = str(error) if is_ours else f"{type(error).__name__}: {error}"
        return replace(attempt, error=attempt.error or harmless(reason))
