"""Approvals of a run in progress, answered by another process.

Each open request is a directory beside the file of the run's session, with two sealed files: the
request, and its answer. An answer appears whole, and only if there is none yet, so the first one
counts, whether it comes from here or from elsewhere. The run adds one itself before it removes the
request: after that it can no longer be answered. A waiting run holds a lock on its request, so a
request that a killed run has left is never shown.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import tempfile
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from weakincentives.core import locks
from weakincentives.core.call import new_id
from weakincentives.core.clock import SYSTEM_CLOCK
from weakincentives.core.logs import get_logger
from weakincentives.core.state import Seals, no_links
from weakincentives.errors import AnswerRefused, SnapshotError
from weakincentives.filesystem.tree import remove_path
from weakincentives.prompt.approval import Approval, ApprovalRequest, answering_user
from weakincentives.runtime.calls import Run, runs_of
from weakincentives.serde import freeze, thaw

_logger = get_logger(__name__)

POLL = 0.1
"""Seconds between two looks for an answer."""
_REQUEST, _ANSWER = "request", "answer"
_ID = re.compile("[0-9a-f]{32}")
_WITHDRAWN = Approval(False, reason="the question was withdrawn")


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingApproval:
    """An unanswered request of a run in progress."""

    run: Run
    id: str
    """Of the request: each is asked once."""
    request: ApprovalRequest
    since: float
    """When it was asked, in unix seconds."""

    @property
    def digest(self) -> str:
        """Identifies what was shown: an answer is for exactly that."""
        return self.request.digest

    @property
    def is_open(self) -> bool:
        """Whether the run still waits for an answer."""
        folder = _folder_of(self.run) / self.id
        return _is_waiting(folder) and not (folder / _ANSWER).exists()


class ApprovalDesk:
    """The requests of one run, which other processes can answer.

    ``ask`` is for ``ApprovalPolicy``: it waits for ``wink approve``, ``wink debug`` or
    ``answer_approval``. To ask here as well, use ``asking``.

    Args:
        session: The file of the run's session, such as ``SavedSession.path``.
    """

    def __init__(self, session: str | Path) -> None:
        self._folder = _folder_of(Run(Path(session)))

    async def ask(self, request: ApprovalRequest) -> Approval:
        """Wait for an answer from elsewhere."""
        with self.asking(request) as question:
            while not question.is_answered:
                await asyncio.sleep(POLL)
            return question.settle()

    @contextmanager
    def asking(self, request: ApprovalRequest) -> Generator[Question]:
        """Publish a request for the block; it cannot be answered afterwards."""
        question = Question(self._folder / new_id(), request)
        _open.add(question.folder)
        try:
            self._tidy()
            question.publish()
            yield question
        finally:
            question.close()
            _open.discard(question.folder)

    def _tidy(self) -> None:
        """Remove what a killed process has left: a run is in one process at a time."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name in os.listdir(self._folder):
            if self._folder / name not in _open and _ID.fullmatch(name):
                remove_path(self._folder / name)


_open: set[Path] = set()
"""The requests of this process."""


class Question:
    """A published request. The first answer counts."""

    def __init__(self, folder: Path, request: ApprovalRequest) -> None:
        self.folder = folder
        # What the process of the run does with an edited call stays there.
        self._request = replace(request, revise=None)
        self._settled: Approval | None = None
        self._fd = -1

    def publish(self) -> None:
        data = {"at": SYSTEM_CLOCK.time(), "request": freeze(self._request)}
        self.folder.mkdir(mode=0o700)
        sealed = _seals(self.folder).sealed(json.dumps(data).encode())
        with _added(self.folder / _REQUEST, sealed) as fd:
            locks.take(fd)
            self._fd = os.dup(fd)  # the lock is that of both
            locks.keep_from_forks(self._fd)

    @property
    def is_answered(self) -> bool:
        """Whether there is an answer: from now on it is the only one."""
        return self._settled is not None or (self.folder / _ANSWER).exists()

    def settle(self, own: Approval = _WITHDRAWN) -> Approval:
        """Answer the request from here, unless that was done elsewhere; return what counts."""
        if self._settled is None:
            try:
                with _added(self.folder / _ANSWER, b""):  # only keeps other answers out
                    pass
                self._settled = own
            except FileExistsError:
                self._settled = self._elsewhere()
        return self._settled

    def _elsewhere(self) -> Approval:
        seals = _seals(self.folder, self._request.digest)
        data = seals.unsealed(_read(self.folder / _ANSWER))
        if data is None:
            _logger.error("the answer in %s is damaged or not ours: it counts as no", self.folder)
            return Approval(False, reason="the answer was invalid")
        values: Any = json.loads(data)
        return Approval(
            values["approved"] is True,
            str(values["by"]),
            str(values["reason"]),
            arguments=values["arguments"],
        )

    def close(self) -> None:
        """Withdraw the request."""
        with suppress(OSError):
            if self._settled is None and self.settle() is not _WITHDRAWN:
                _logger.warning("an answer for %s came too late", self._request.tool_name)
        with suppress(FileNotFoundError):
            # First under another name: once its answer is removed, there must be no place for one.
            gone = self.folder.with_name(f"{self.folder.name}-closed")
            os.rename(self.folder, gone)
            remove_path(gone)
        if self._fd >= 0:
            locks.close(self._fd)


# For other processes


def pending_approvals(workspace: Path) -> tuple[PendingApproval, ...]:
    """Return what the runs in progress on a workspace ask, oldest first. Takes no lock."""
    found = (each for run in runs_of(workspace) for each in _pending(run))
    return tuple(sorted(found, key=lambda each: each.since))


def answer_approval(
    pending: PendingApproval,
    *,
    approved: bool,
    digest: str | None = None,
    reason: str = "",
    arguments: Mapping[str, Any] | None = None,
    by: str = "",
) -> None:
    """Answer a request of another process.

    Args:
        digest: Of what was shown; by default that of ``pending``.
        reason: For the model, if it is not approved.
        arguments: Make the call with these instead; the policies check them, too.
        by: Who answers; by default this user.

    Raises:
        AnswerRefused: It was answered already, the run no longer waits, or it was not what was
            shown.
    """
    if digest is not None and digest != pending.digest:
        raise AnswerRefused("this is not what is asked now; look at it again")
    values = {
        "approved": approved,
        "by": by or answering_user(),
        "reason": reason,
        "arguments": None if arguments is None else dict(arguments),
    }
    folder = _folder_of(pending.run) / pending.id
    sealed = _seals(folder, pending.digest).sealed(json.dumps(values).encode())
    try:
        if not _is_waiting(folder):
            raise FileNotFoundError
        with _added(folder / _ANSWER, sealed):
            pass
    except FileExistsError:
        raise AnswerRefused("somebody else has answered this") from None
    except FileNotFoundError:
        raise AnswerRefused("the run no longer waits for this answer") from None


def _pending(run: Run) -> Iterator[PendingApproval]:
    folder = _folder_of(run)
    try:
        names = [each for each in os.listdir(folder) if _ID.fullmatch(each)]
    except OSError:
        return
    for name in names:
        with suppress(OSError, SnapshotError, ValueError):
            data = _seals(folder / name).unsealed(_read(folder / name / _REQUEST))
            if data is None:
                continue
            values: Any = json.loads(data)
            request: ApprovalRequest = thaw(values["request"])
            found = PendingApproval(run=run, id=name, request=request, since=float(values["at"]))
            if found.is_open:
                yield found


def _is_waiting(folder: Path) -> bool:
    """Whether a process waits for the answer to a request."""
    try:
        with open(folder / _REQUEST, "rb+", opener=no_links) as file:
            return locks.is_taken(file.fileno())
    except OSError:
        return False


# Files


def _folder_of(run: Run) -> Path:
    return run.path.with_suffix(".approvals")


def _seals(folder: Path, digest: str = "") -> Seals:
    """Return the seals of a request, or of the answer to what a digest identifies."""
    return Seals(f"approval {folder.parent.name} {folder.name} {digest}")


@contextmanager
def _added(path: Path, data: bytes) -> Generator[int]:
    """Create a file as a whole after the block, which gets its descriptor.

    Raises:
        FileExistsError: It is there.
    """
    fd, staged = tempfile.mkstemp(dir=path.parent.parent)
    try:
        with open(fd, "wb") as file:
            file.write(data)
            file.flush()
            yield fd
            os.link(staged, path)
    finally:
        os.unlink(staged)


def _read(path: Path) -> bytes:
    with open(path, "rb", opener=no_links) as file:
        return file.read()
