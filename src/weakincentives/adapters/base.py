"""The contract of an adapter: one method that puts a request into a provider's format, and back.

Adapters translate; they never execute. What happens between two turns is the same for all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from weakincentives.runtime.conversation import ModelRequest, ModelTurn, PromptResponse
from weakincentives.runtime.evaluation import Run

if TYPE_CHECKING:
    from typing import Unpack

    from weakincentives.prompt.prompt import Prompt
    from weakincentives.prompt.tool import Tool
    from weakincentives.prompt.tool_result import ToolResult
    from weakincentives.runtime.evaluation import Model, RunOptions
    from weakincentives.runtime.session import Session

OutT = TypeVar("OutT")


class Adapter(ABC):
    """Asks a model. A subclass gives ``complete``; the rest follows."""

    name: str = "adapter"
    """How records and telemetry name it."""
    needs_loop: bool = True
    """Whether ``complete`` waits for something; one that never does is run without a loop."""

    provider_tools: Sequence[Tool[Any, Any]] = ()
    """Tools that the provider runs itself, each with a handler that waits until it has."""

    def begin_run(self) -> Model:
        """Return what is asked in one run: this adapter, unless a run has a state of its own."""
        return self

    async def end_run(self) -> None:  # noqa: B027  # most have nothing to end
        """Told, of what ``begin_run`` returned, that the run is over."""

    @abstractmethod
    async def complete(self, request: ModelRequest) -> ModelTurn:
        """Ask the model for one turn.

        What the provider does wrong is raised as a ProviderError; only that is tried again.
        """

    def evaluate(
        self,
        prompt: Prompt[OutT],
        session: Session,
        *,
        message: str | None = None,
        resume: bool = False,
        **options: Unpack[RunOptions],
    ) -> PromptResponse[OutT]:
        """Run the prompt to its end and return the model's answer.

        Args:
            prompt: What to do, and with which tools.
            session: Where state, records and the conversation are kept.
            message: The user's words beside the prompt.
            resume: Go on with the session's last conversation. Calls that it left open are
                answered first; those on record are not run again.
            options: Limits, and who is told what; see ``RunOptions``.
        """
        return Run(self.begin_run(), prompt, session, **options).evaluate(message, resume=resume)

    async def aevaluate(
        self,
        prompt: Prompt[OutT],
        session: Session,
        *,
        message: str | None = None,
        resume: bool = False,
        **options: Unpack[RunOptions],
    ) -> PromptResponse[OutT]:
        """Run the prompt to its end on the caller's event loop."""
        run = Run(self.begin_run(), prompt, session, **options)
        return await run.aevaluate(message, resume=resume)

    def step(
        self,
        prompt: Prompt[OutT],
        session: Session,
        *,
        tool_results: Sequence[ToolResult[Any]] | None = None,
        message: str | None = None,
        **options: Unpack[RunOptions],
    ) -> PromptResponse[OutT]:
        """Take one turn of the model and return it; its calls are for you to run.

        Without ``tool_results`` a conversation begins; with them the session's last one goes on.
        """
        return Run(self.begin_run(), prompt, session, **options).step(tool_results, message)

    async def astep(
        self,
        prompt: Prompt[OutT],
        session: Session,
        *,
        tool_results: Sequence[ToolResult[Any]] | None = None,
        message: str | None = None,
        **options: Unpack[RunOptions],
    ) -> PromptResponse[OutT]:
        """Take one turn of the model on the caller's event loop."""
        return await Run(self.begin_run(), prompt, session, **options).astep(tool_results, message)
