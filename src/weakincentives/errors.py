"""Every exception the library raises, in one tree.

WinkError
├── ToolValidationError              the model must act: its values are not acceptable
│   ├── CommandFailed                  a command that had to succeed did not
│   ├── InvalidPattern                 not a pattern to search for (also a ValueError)
│   ├── PageNotRead                    a web page could not be had
│   └── FilesystemError                a path or file operation that cannot be done
│       ├── PathEscapesRoot              (also a PermissionError)
│       ├── NoSuchFile                   (also a FileNotFoundError)
│       ├── AlreadyExists                (also a FileExistsError)
│       ├── NotAFile                     (also an IsADirectoryError)
│       ├── NotADirectory                (also a NotADirectoryError)
│       ├── ReadOnlyFile                 (also a PermissionError)
│       ├── ProtectedPath                no call may change it (also a PermissionError)
│       └── BinaryFile                   (also a ValueError)
├── Refusal                          the call was not admitted; nothing ran
│   ├── ToolNotFound
│   ├── InvalidArguments
│   ├── PolicyDenied
│   ├── PreconditionFailed
│   └── OutcomeOnRecord                it reaches outside, and was taken before
├── ToolTimeout                      the handler took longer than its tool allows
├── ContractError                    @require or @ensure does not hold (also an AssertionError)
├── ParseError                       data does not fit a type (also a ValueError)
├── ToolDefinitionError              the developer must act: a tool is declared wrongly
├── ViewClosed                       a write through a call's view after that call ended
├── ReadOnlyView                     a write from a tool whose reach is "read"
├── MergeConflict                    what a view read or wrote was changed by another
├── WorkspaceLocked                  another process has the directory open
├── StateUnavailable                 the operator must act: no private place for the user's state
├── StoreRefused                     a store that this user did not write, or that is damaged
├── HistoryDamaged                   the record of a committed call cannot be read
│   └── ContentDamaged                 what was kept is not what it was (also an OSError)
├── UndoRefused                      what would be undone was changed by others since
├── SandboxUnavailable               the operator must act: nothing can shut a command in
├── McpServerError                   an MCP server cannot be started or reached, or ended
├── MissingExtra                     the operator must install something (also an ImportError)
├── PromptError
│   ├── PromptValidationError          a template is wrong as it stands
│   ├── PromptRenderError              a template cannot be rendered with these parameters
│   ├── OutputParseError               the model must act: its answer does not fit
│   ├── PromptOverrideError            an override cannot be read, written or applied
│   │   └── StaleOverride                what it replaces has changed since
│   └── PromptEvaluationError          the run cannot go on; raised through every caller
│       ├── DeadlineExceededError
│       ├── BudgetExceededError
│       ├── TurnLimitExceeded
│       ├── CallLimitExceeded
│       ├── TaskNotCompleted             the model stops, and the task is not done
│       ├── ReplayDiverged               a replayed run does not do what was recorded
│       └── ProviderError                what serves the model failed
│           ├── ProviderThrottled          it was asked too often
│           ├── ProviderUnavailable        it cannot be reached, or broke off
│           ├── ProviderRejected           the operator must act: key, model name, request
│           └── MalformedResponse          it answered with something else
├── Suspended                        not a failure: the call waits for somebody, and is made again
├── VisibilityExpansionRequired      not a failure: the prompt must be rendered again
├── SessionError
│   ├── ReducerError                   a reducer raised; its event changed nothing
│   ├── SessionInUse                   its file is open in another process
│   ├── SnapshotError                  a snapshot cannot be written or read
│   └── SnapshotExpired                an older snapshot was restored since
└── ResourceError
    ├── UnboundResource
    ├── CircularDependency
    └── ProviderFailed
"""

from __future__ import annotations

from abc import ABCMeta
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any


def _listed(message: object, problems: Iterable[str]) -> str:
    return "\n".join([str(message), *(f"  {problem}" for problem in problems)])


class WinkError(Exception):
    """Base of everything this library raises on purpose."""


class ToolValidationError(WinkError):
    """Raise it in a handler: the model gets the message as it stands."""


class CommandFailed(ToolValidationError):
    """A command that had to succeed did not; ``result`` has what it said. Nothing was kept."""

    def __init__(self, message: str, result: object) -> None:
        super().__init__(message)
        self.result = result


class PageNotRead(ToolValidationError):
    """A web page could not be had; ``code`` says whether another try may help."""

    def __init__(self, message: str, *, code: str = "SCRAPE_FAILED") -> None:
        super().__init__(message)
        self.code = code


class InvalidPattern(ToolValidationError, ValueError):
    """A regular expression that is wrong, or that might take too long."""


class FilesystemError(ToolValidationError):
    """A file operation that cannot be done; worded for the model."""


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
    recoverable = True
    """Whether the same call may be admitted later, or with other arguments."""

    def __init__(self, message: str, *, suggestions: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.suggestions = tuple(suggestions)


class ToolNotFound(Refusal):
    """No tool of that name is offered."""

    code = "TOOL_NOT_FOUND"
    recoverable = False


class InvalidArguments(Refusal):
    """The arguments do not fit the tool's parameters."""

    code = "INVALID_ARGUMENTS"


class PolicyDenied(Refusal):
    """A policy does not allow the call now; ``policy`` is its name."""

    code = "POLICY_DENIED"

    def __init__(self, message: str, *, policy: str = "", suggestions: Sequence[str] = ()) -> None:
        super().__init__(message, suggestions=suggestions)
        self.policy = policy


class PreconditionFailed(Refusal):
    """Something that must hold before the tool runs does not."""

    code = "PRECONDITION_FAILED"


class OutcomeOnRecord(Refusal):
    """A call that reaches outside is not run twice under one id; ``code`` says how it ended."""

    def __init__(self, message: str, *, code: str, suggestions: Sequence[str] = ()) -> None:
        super().__init__(message, suggestions=suggestions)
        self.code = code


class ToolTimeout(WinkError):
    """The handler took longer than its tool allows."""


class Suspended(WinkError, metaclass=ABCMeta):
    """Not a failure: the call cannot go on before somebody outside has acted, and is made again.

    The call is rolled back and recorded as suspended, and the exception passes through to the
    caller unchanged. Raise it yourself, or have it stand for the control-flow exceptions of a
    framework: ``Suspended.register(GraphInterrupt)``.
    """


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
    """A tool whose reach is "read" tried to change something."""


class MergeConflict(WinkError):
    """A view cannot be merged; ``paths`` names what changed under it."""

    def __init__(self, message: str, paths: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.paths = tuple(paths)


class SandboxUnavailable(WinkError):
    """No sandbox works here; the message has the reason for each."""


class McpServerError(WinkError):
    """An MCP server cannot be used; ``code`` says how it failed, as a tool's error code does."""

    def __init__(self, message: str, *, code: str = "SERVER_ERROR") -> None:
        super().__init__(message)
        self.code = code


class MissingExtra(WinkError, ImportError):
    """Something that is not part of the core is not installed."""

    def __init__(self, extra: str, package: str) -> None:
        super().__init__(f"{package} is not installed: run `pip install 'wink-runtime[{extra}]'`")


class WorkspaceLocked(WinkError):
    """Another filesystem has the directory open; ``pid`` is the process, where it is known."""

    def __init__(self, message: str, pid: int | None = None) -> None:
        super().__init__(message)
        self.pid = pid


class StateUnavailable(WinkError):
    """There is no private directory for the user's own state; the message says what to set."""


class StoreRefused(WinkError):
    """A store was not written by this user, or is damaged; nothing in it is acted upon."""


class HistoryDamaged(WinkError):
    """What a committed call changed cannot be read: it is neither shown nor undone."""


class ContentDamaged(HistoryDamaged, OSError):
    """A content that was kept is not what it was: it is neither shown nor put back."""

    def __str__(self) -> str:
        return f"{self.filename} is damaged: what was kept there is neither shown nor put back"


class UndoRefused(WinkError):
    """What calls changed cannot be taken back: it is not as they left it.

    ``paths`` has, for each path, the other calls that have changed it since; none of them where
    somebody else has.
    """

    def __init__(self, paths: Mapping[str, Sequence[str]]) -> None:
        told = ", ".join(sorted(paths)[:5]) + (", ..." if len(paths) > 5 else "")
        super().__init__(f"Changed since by others, so nothing was undone: {told}")
        self.paths = paths


class PromptError(WinkError):
    """Base of everything that is wrong with a prompt."""


class PromptValidationError(PromptError):
    """The template is wrong as it stands: duplicate names, bad keys, bad examples."""


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
    """What an override replaces has changed since it was written."""


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
    """The run cannot go on. Never turned into a result: raised through every caller.

    What was committed before stays. ``response`` has how far the run came, once it ends a run.
    """

    response: Any = None
    """A ``PromptResponse``, or None."""


class DeadlineExceededError(PromptEvaluationError):
    """The run's deadline has passed."""


class BudgetExceededError(PromptEvaluationError):
    """The run's token budget is used up."""


class TurnLimitExceeded(PromptEvaluationError):
    """The model had all the turns that the run allows."""


class CallLimitExceeded(PromptEvaluationError):
    """The model asked for more tool calls than the run allows."""


class TaskNotCompleted(PromptEvaluationError):
    """The model stopped, was sent back with the reason, and stopped again without doing more."""


class ReplayDiverged(PromptEvaluationError):
    """A run that is replayed strictly does not do what was recorded; ``divergence`` says where."""

    def __init__(self, divergence: Any) -> None:
        super().__init__(f"The run differs from its recording: {divergence}")
        self.divergence = divergence


class ProviderError(PromptEvaluationError):
    """What serves the model failed; ``code`` says how, as a tool's error code does."""

    code = "PROVIDER_ERROR"
    recoverable = False
    """Whether the same request may succeed later."""

    def __init__(
        self, message: str, *, code: str | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.code = code or type(self).code
        self.retry_after = retry_after
        """Seconds that the provider asks to wait."""


class ProviderThrottled(ProviderError):
    """The provider was asked too often; ``retry_after`` has what it says of waiting."""

    code = "RATE_LIMIT"
    recoverable = True


class ProviderUnavailable(ProviderError):
    """The provider cannot be reached, failed, or broke off in the middle of its answer."""

    code = "SERVER_ERROR"
    recoverable = True


class ProviderRejected(ProviderError):
    """The provider does not take the request: a wrong key, an unknown model, a bad schema."""

    code = "REJECTED"


class MalformedResponse(ProviderError):
    """The provider's answer is not what its interface promises."""

    code = "SERVER_ERROR"
    recoverable = True


class VisibilityExpansionRequired(WinkError):
    """A section was opened: render the prompt again and go on."""

    def __init__(self, message: str = "", *, section_keys: Sequence[str] = ()) -> None:
        super().__init__(message or f"Open sections: {', '.join(section_keys)}")
        self.section_keys = tuple(section_keys)


class SessionError(WinkError):
    """Base of everything that is wrong with a session."""


class ReducerError(SessionError):
    """A reducer raised; the event was not applied to any slice."""


class SessionInUse(SessionError):
    """The file that a session is kept in is open elsewhere; one at a time may go on with it."""


class SnapshotError(SessionError):
    """A snapshot cannot be written, read or used here."""


class SnapshotExpired(SessionError):
    """An older snapshot was restored since, or the call that took this one was not kept."""


class ResourceError(WinkError):
    """Base of everything that is wrong with resources."""


class UnboundResource(ResourceError, LookupError):
    """Nothing is bound for the type asked for."""


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
