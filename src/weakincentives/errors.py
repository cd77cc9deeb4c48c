"""Every exception the library raises, in one tree.

WinkError
├── ToolValidationError              the model must act: its values are not accepted
│   ├── CommandFailed                  a command that had to succeed failed
│   ├── InvalidPattern                 a pattern cannot be searched for (also a ValueError)
│   ├── PageNotRead                    a web page could not be read
│   └── FilesystemError                a file operation is not possible
│       ├── PathEscapesRoot              (also a PermissionError)
│       ├── NoSuchFile                   (also a FileNotFoundError)
│       ├── AlreadyExists                (also a FileExistsError)
│       ├── NotAFile                     (also an IsADirectoryError)
│       ├── NotADirectory                (also a NotADirectoryError)
│       ├── ReadOnlyFile                 (also a PermissionError)
│       ├── ProtectedPath                no call may change it (also a PermissionError)
│       └── BinaryFile                   (also a ValueError)
├── Refusal                          the call was not admitted; nothing ran
│   ├── InvalidArguments
│   ├── PolicyDenied
│   └── OutcomeOnRecord                it reaches outside, and is on record already
├── ProtocolError                    the request itself fails in the caller's protocol
├── ToolTimeout                      the handler exceeded the tool's timeout
├── ToolFailed                       the value of a failed call was asked for, with unwrap()
├── ContractError                    @require or @ensure does not hold (also an AssertionError)
├── ParseError                       data does not fit a type (also a ValueError)
├── ToolDefinitionError              the developer must act: a tool is declared wrongly
├── ViewClosed                       a write through the view of a call that has ended
├── ReadOnlyView                     a write from a tool whose reach is "read"
├── MergeConflict                    a view's read or write set was changed by another call
├── NoSuchBranch                     a workspace has no branch of this name
├── NoSuchRun                        a database has no run of this name, or several
├── RunAlreadyEnded                  a run has ended: it can no longer be changed
├── WorkspaceLocked                  another process has the directory open
├── StateUnavailable                 the operator must act: no private directory for state
├── StoreRefused                     a store of another user, or a damaged one
├── LogUnavailable                   the operator must act: a log cannot be read or written
├── StaleHead                        another operation was appended first
├── HistoryDamaged                   the record of a committed call cannot be read
│   └── ContentDamaged                 stored content is damaged (also an OSError)
├── UndoRefused                      paths to be undone have changed since
├── RowUndoRefused                   a rule of the database forbids undoing its rows
├── QueryError                       a statement over runs is wrong, or takes too long
├── ExportRefused                    a run cannot be exported to this file, or at this size
├── SandboxUnavailable               the operator must act: no sandbox works here
├── McpServerError                   an MCP server cannot be started or reached, or has ended
├── DatabaseUnavailable              the operator must act: a database cannot be reached
├── StorageUnavailable               the operator must act: object storage fails, or is full
├── ObjectMissing                    object storage does not have an object (also a LookupError)
├── MissingExtra                     the operator must install something (also an ImportError)
├── PromptError
│   ├── PromptValidationError          a template is invalid
│   ├── PromptRenderError              a template cannot be rendered with these parameters
│   ├── OutputParseError               the model must act: its answer does not fit
│   ├── NoOutput                       the output of a run that has none was asked for
│   ├── PromptOverrideError            an override cannot be read, written or applied
│   │   └── StaleOverride                the original text has changed
│   └── PromptEvaluationError          the run cannot continue; raised through every caller
│       ├── DeadlineExceededError
│       ├── BudgetExceededError
│       ├── TurnLimitExceeded
│       ├── CallLimitExceeded
│       ├── TaskNotCompleted             the model stops before the task is done
│       ├── ReplayDiverged               a replayed run differs from its recording
│       └── ProviderError                the model's provider failed
│           ├── ProviderThrottled          too many requests
│           ├── ProviderUnavailable        it cannot be reached, or the connection broke
│           ├── ProviderRejected           the operator must act: key, model name, request
│           │   └── ContextOverflow           the request does not fit into the context window
│           └── MalformedResponse          its answer does not match its interface
├── Suspended                        not a failure: the call waits for someone outside, then resumes
│   └── ApprovalNeeded                 a person must approve the call first
├── VisibilityExpansionRequired      not a failure: the prompt must be rendered again
├── SessionError
│   ├── AnswerRefused                  an approval came too late, or for something else
│   ├── ReducerError                   a reducer raised; its event changed nothing
│   ├── LeaseLost                      another process has taken over the session
│   ├── SessionInUse                   another process has it open
│   ├── SnapshotError                  a snapshot cannot be written or read
│   └── SnapshotExpired                an older snapshot has been restored
└── ResourceError
    ├── UnboundResource
    ├── CircularDependency
    └── ProviderFailed
"""

from __future__ import annotations

from abc import ABCMeta
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any


def _listed(message: object, problems: Iterable[str]) -> str:
    return "\n".join([str(message), *(f"  {problem}" for problem in problems)])


class WinkError(Exception):
    """Base of everything this library raises on purpose."""


class ToolValidationError(WinkError):
    """Raise it in a handler: the model gets the message as it stands."""


class CommandFailed(ToolValidationError):
    """A command that had to succeed failed; ``result`` has its output. It was rolled back."""

    def __init__(self, message: str, result: object) -> None:
        super().__init__(message)
        self.result = result


class PageNotRead(ToolValidationError):
    """A web page could not be read; ``code`` says whether a retry may help."""

    def __init__(self, message: str, *, code: str = "SCRAPE_FAILED") -> None:
        super().__init__(message)
        self.code = code


class InvalidPattern(ToolValidationError, ValueError):
    """A regular expression that is invalid, or that might take too long."""


class FilesystemError(ToolValidationError):
    """A file operation is not possible; worded for the model."""


class PathEscapesRoot(FilesystemError, PermissionError):
    """The path leads outside the filesystem's root."""


class NoSuchFile(FilesystemError, FileNotFoundError):
    """There is nothing at the path."""


class AlreadyExists(FilesystemError, FileExistsError):
    """There is something at the path already."""


class NotAFile(FilesystemError, IsADirectoryError):
    """A file was needed; the path is a directory."""


class NotADirectory(FilesystemError, NotADirectoryError):
    """A directory was needed; the path, or a part of it, is a file."""


class ProtectedPath(FilesystemError, PermissionError):
    """The path decides what runs outside of calls, so no call may change it."""


class ReadOnlyFile(FilesystemError, PermissionError):
    """The file may be read but not changed."""


class BinaryFile(FilesystemError, ValueError):
    """The file is not UTF-8 text."""


class Refusal(WinkError):
    """The call was not admitted: nothing ran and nothing was changed."""

    code = "REFUSED"

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        recoverable: bool = True,
        policy: str = "",
        suggestions: Sequence[str] = (),
        problem: str = "",
    ) -> None:
        super().__init__(message)
        self.code = code or type(self).code
        self.problem = problem or message
        """What is wrong, in the Protocol's words, for programs; the message is for the model."""
        self.recoverable = recoverable
        """Whether the same call may be admitted later."""
        self.policy = policy
        self.suggestions = tuple(suggestions)


class InvalidArguments(Refusal):
    """The arguments do not fit the tool's parameters."""

    code = "INVALID_ARGUMENTS"


class PolicyDenied(Refusal):
    """A policy does not allow the call now; ``policy`` is its name."""

    code = "POLICY_DENIED"


class OutcomeOnRecord(Refusal):
    """A call that reaches outside does not run twice under one id; ``code`` says how it ended."""


class ProtocolError(WinkError):
    """Raise it in a handler: the call is undone, and its caller's protocol reports an error.

    Over MCP that is a JSON-RPC error with this code and data, instead of a result. Anywhere else it
    is a failed call like any other.
    """

    def __init__(self, message: str, *, code: int, data: object = None) -> None:
        super().__init__(message)
        self.code = code
        self.data = data


class ToolTimeout(WinkError):
    """The handler exceeded the tool's timeout."""


class ToolFailed(WinkError):
    """``result.unwrap()`` of a failed call; ``result`` has all about it."""

    def __init__(self, result: Any) -> None:
        super().__init__(result.message)
        self.result = result


class Suspended(WinkError, metaclass=ABCMeta):
    """Not a failure: the call waits until someone outside has acted, then resumes.

    The call is rolled back, recorded as suspended, and the exception passes through to the caller.
    Raise it yourself, or register the control-flow exceptions of a framework:
    ``Suspended.register(GraphInterrupt)``.
    """


class ApprovalNeeded(Suspended):
    """A person must approve the call first; ``request`` is an ``ApprovalRequest``.

    Ask them, then make the same call again with ``approval=``.
    """

    def __init__(self, request: Any) -> None:
        super().__init__(f"{request.tool_name} needs approval")
        self.request = request


class ContractError(WinkError, AssertionError):
    """A ``@require`` or ``@ensure`` condition does not hold."""


class ParseError(WinkError, ValueError):
    """Data does not fit a type; ``details`` has one entry per problem, keyed by its path."""

    def __init__(self, message: str, details: Mapping[str, str]) -> None:
        super().__init__(message)
        self.details = dict(details)

    @property
    def problems(self) -> list[str]:
        """A sentence for each detail, with its path."""
        return [f"{path or '(top level)'}: {text}" for path, text in self.details.items()]

    def __str__(self) -> str:
        return _listed(self.args[0], self.problems)


class ToolDefinitionError(WinkError, TypeError, ValueError):
    """A tool, example or handler is declared wrongly."""


class ViewClosed(WinkError, RuntimeError):
    """The call this view belongs to has ended; the write was refused."""


class ReadOnlyView(WinkError, PermissionError):
    """A tool whose reach is "read" tried to write."""


class MergeConflict(WinkError):
    """A view cannot be merged; ``paths`` names the paths that others changed."""

    def __init__(self, message: str, paths: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.paths = tuple(paths)


class NoSuchBranch(WinkError, LookupError):
    """A workspace has no branch of this name."""


class NoSuchRun(WinkError, LookupError):
    """A database has no run of this name, or several."""


class RunAlreadyEnded(WinkError):
    """A run has ended: it can no longer be changed."""


class SandboxUnavailable(WinkError):
    """No sandbox works here; the message gives the reason for each."""


class McpServerError(WinkError):
    """An MCP server cannot be used; ``code`` says why, like the code of a tool's error."""

    def __init__(self, message: str, *, code: str = "SERVER_ERROR") -> None:
        super().__init__(message)
        self.code = code


class DatabaseUnavailable(WinkError):
    """A database cannot be reached, or the connection to it was lost."""


class StorageUnavailable(WinkError):
    """Object storage cannot be reached, refuses access, or is full."""


class ObjectMissing(WinkError, LookupError):
    """Object storage does not have an object: it was removed, or never stored there."""


class MissingExtra(WinkError, ImportError):
    """An optional dependency is not installed."""

    def __init__(self, extra: str, package: str) -> None:
        super().__init__(f"{package} is not installed; run: {install_command(extra)}")


def install_command(extra: str) -> str:
    """Return the command that installs an extra: from the clone or file that this came from."""
    import json
    import shlex
    from importlib.metadata import PackageNotFoundError, distribution

    source = "wink-runtime"
    note: dict[str, Any] = {}
    with suppress(PackageNotFoundError, ValueError):
        note = json.loads(distribution(source).read_text("direct_url.json") or "{}")
    url = str(note.get("url", ""))
    if url.startswith("file://"):
        from urllib.parse import unquote, urlsplit

        about: dict[str, Any] = note.get("dir_info", {})
        editable = "--editable " if about.get("editable") else ""
        return f"pip install {editable}{shlex.quote(f'{unquote(urlsplit(url).path)}[{extra}]')}"
    return f"pip install '{source}[{extra}]'"


class QueryError(WinkError):
    """A statement over runs is wrong, not a SELECT, or takes too long; the message says which."""


class ExportRefused(WinkError):
    """The page of a run cannot be written: the file exists, or its size limit is too small."""


class WorkspaceLocked(WinkError):
    """Another process has the directory open; ``pid`` is that process, if known."""

    def __init__(self, message: str, pid: int | None = None) -> None:
        super().__init__(message)
        self.pid = pid


class StateUnavailable(WinkError):
    """There is no private directory for the user's state; the message says what to set."""


class StoreRefused(WinkError):
    """A store is not owned by this user, or is damaged; nothing in it is used."""


class LogUnavailable(WinkError):
    """The database of a log cannot be opened, read or written: nothing is changed until it can."""


class LogDamaged(LogUnavailable):
    """SQLite calls the database of a log malformed: it is set aside, and never written again."""


class StaleHead(WinkError):
    """An operation was made on a head that another one has replaced."""


class HistoryDamaged(WinkError):
    """The record of a committed call cannot be read: it is neither shown nor undone."""


class ContentDamaged(HistoryDamaged, OSError):
    """Stored content is damaged: it is neither shown nor restored."""

    def __str__(self) -> str:
        return f"{self.filename} is damaged: it is neither shown nor restored"


class UndoRefused(WinkError):
    """The changes of calls cannot be undone: their paths have changed since.

    ``paths`` maps each path to the calls that changed it since; to none if someone else did.
    """

    def __init__(self, paths: Mapping[str, Sequence[str]]) -> None:
        named = ", ".join(sorted(paths)[:5]) + (", ..." if len(paths) > 5 else "")
        super().__init__(f"Nothing was undone: these paths have changed since: {named}")
        self.paths = paths


class RowUndoRefused(WinkError):
    """The rows of calls cannot be undone: a foreign key or another rule forbids it."""


class PromptError(WinkError):
    """Base of the errors of prompts."""


class PromptValidationError(PromptError):
    """The template is invalid: duplicate names, bad keys, bad examples."""


class PromptRenderError(PromptError):
    """The template cannot be rendered with these parameters."""


class PromptOverrideError(PromptError):
    """Overrides cannot be read, written or applied; ``problems`` has a sentence for each."""

    def __init__(self, message: str, problems: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.problems = tuple(problems)

    def __str__(self) -> str:
        return _listed(self.args[0], self.problems)


class StaleOverride(PromptOverrideError):
    """The original text has changed since the override was written."""


class NoOutput(PromptError):
    """``response.unwrap()`` without an output; ``response`` is the run's."""

    def __init__(self, message: str, response: Any) -> None:
        super().__init__(message)
        self.response = response


class OutputParseError(PromptError):
    """A model's answer does not fit the output type; worded for the model, to try again.

    ``raw`` is the whole answer; ``details`` has one entry per problem, keyed by its path.
    """

    def __init__(self, message: str, *, raw: str, details: Mapping[str, str]) -> None:
        super().__init__(message)
        self.raw = raw
        self.details = dict(details)

    def __str__(self) -> str:
        return str(ParseError(self.args[0], self.details))


class PromptEvaluationError(PromptError):
    """The run cannot continue. Never turned into a result: raised through every caller.

    Earlier commits stay.
    """

    response: Any = None
    """The ``PromptResponse`` of the run so far, or None."""


class DeadlineExceededError(PromptEvaluationError):
    """The run's deadline has passed."""


class BudgetExceededError(PromptEvaluationError):
    """The run's token budget is used up."""


class TurnLimitExceeded(PromptEvaluationError):
    """The model has used all turns of the run."""


class CallLimitExceeded(PromptEvaluationError):
    """The model has used all tool calls of the run."""


class TaskNotCompleted(PromptEvaluationError):
    """The model was told why the task is not done, and stopped again without a call."""


class ReplayDiverged(PromptEvaluationError):
    """A strictly replayed run differs from its recording; ``divergence`` says where."""

    def __init__(self, divergence: Any) -> None:
        super().__init__(f"The run differs from its recording: {divergence}")
        self.divergence = divergence


class ProviderError(PromptEvaluationError):
    """The model's provider failed; ``code`` says how, like the code of a tool's error."""

    code = "PROVIDER_ERROR"
    recoverable = False
    """Whether the same request may succeed later."""
    status: int | None = None
    """The HTTP status, if there is one."""

    def __init__(
        self, message: str, *, code: str | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.code = code or type(self).code
        self.retry_after = retry_after
        """Seconds that the provider asks to wait."""


class ProviderThrottled(ProviderError):
    """Too many requests; ``retry_after`` is the wait that the provider asks for."""

    code = "RATE_LIMIT"
    recoverable = True


class ProviderUnavailable(ProviderError):
    """The provider cannot be reached, failed, or broke the connection."""

    code = "SERVER_ERROR"
    recoverable = True


class ProviderRejected(ProviderError):
    """The provider refuses the request: a wrong key, an unknown model, a bad schema."""

    code = "REJECTED"


class ContextOverflow(ProviderRejected):
    """The request does not fit into the model's context window."""

    code = "CONTEXT_OVERFLOW"

    def __init__(
        self, message: str, *, limit: int | None = None, tokens: int | None = None, **options: Any
    ) -> None:
        super().__init__(message, **options)
        self.limit = limit
        """The size of the window in tokens, if the provider tells it."""
        self.tokens = tokens
        """The size of the request in tokens, if the provider tells it."""


class MalformedResponse(ProviderError):
    """The provider's answer does not match its interface."""

    code = "SERVER_ERROR"
    recoverable = True


class VisibilityExpansionRequired(WinkError):
    """A section was opened: render the prompt again and continue."""

    def __init__(self, message: str = "", *, section_keys: Sequence[str] = ()) -> None:
        super().__init__(message or f"Open sections: {', '.join(section_keys)}")
        self.section_keys = tuple(section_keys)


class SessionError(WinkError):
    """Base of the errors of sessions."""


class AnswerRefused(SessionError):
    """An answer to an approval request came too late, or for something else than what is asked."""


class ReducerError(SessionError):
    """A reducer raised; the event was applied to no slice."""


class LeaseLost(SessionError):
    """Another process has taken over the session; nothing of this one is saved any more."""


class SessionInUse(SessionError):
    """Another process has the session open."""


class SnapshotError(SessionError):
    """A snapshot cannot be written or read."""


class SnapshotExpired(SessionError):
    """An older snapshot has been restored, or the call that took this one was rolled back."""


class ResourceError(WinkError):
    """Base of the errors of resources."""


class UnboundResource(ResourceError, LookupError):
    """Nothing is bound for the requested type."""


class CircularDependency(ResourceError):
    """Providers need each other; the message prints the chain."""


class ProviderFailed(ResourceError):
    """A provider or ``post_construct`` raised; the message prints the chain."""


if not TYPE_CHECKING:  # for a type checker, what begins with no underscore is public anyway
    __all__ = sorted(
        name
        for name, each in globals().items()
        if isinstance(each, type) and issubclass(each, WinkError)
    )
