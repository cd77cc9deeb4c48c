"""The contract of an adapter: one method that translates a request, and its answer.

Adapters never execute tools. What happens between two turns is the same for all of them.
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
    from weakincentives.runtime.evaluation import Model, RunOptions
    from weakincentives.session import Session
    from weakincentives.tool_result import ToolResult

OutT = TypeVar("OutT")


class Adapter(ABC):
    """Asks a model. A subclass implements ``complete``."""

    name: str = "adapter"
    """The name in records and telemetry."""
    needs_loop: bool = True
    """Whether ``complete`` waits for anything; otherwise it runs without an event loop."""

    provider_tools: Sequence[Tool[Any, Any]] = ()
    """Tools that the provider runs itself; each handler waits until the provider has."""

    def begin_run(self) -> Model:
        """Return the model for one run: this adapter, unless a run has its own state."""
        return self

    async def end_run(self) -> None:  # noqa: B027  # optional
        """Release what ``begin_run`` acquired; called at the end of the run."""

    @abstractmethod
    async def complete(self, request: ModelRequest) -> ModelTurn:
        """Ask the model for one turn.

        Raise a failure of the provider as a ProviderError; only that is retried.
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
            prompt: The task and its tools.
            session: Holds state, records and the conversation.
            message: The user's message, in addition to the prompt.
            resume: Continue the session's last conversation. Open calls are answered first;
                recorded calls do not run again.
            options: Limits and listeners; see ``RunOptions``.
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
        """Take one turn of the model and return it; you run its calls.

        Without ``tool_results`` a conversation begins; with them the last one continues.
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
