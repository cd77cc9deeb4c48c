"""The contract of an adapter: one method that translates a request, and its answer.

Adapters never execute tools. What happens between two turns is the same for all of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from weakincentives.runtime.conversation import ModelRequest, ModelTurn, PromptResponse
from weakincentives.runtime.run import Run

if TYPE_CHECKING:
    from typing import Unpack

    from weakincentives.core.budget import TokenPrice
    from weakincentives.core.media import Content
    from weakincentives.prompt.prompt import Prompt
    from weakincentives.prompt.tool import Tool
    from weakincentives.runtime.conversation import RunEvent
    from weakincentives.runtime.run import Model, RunOptions
    from weakincentives.runtime.stream import RunStream
    from weakincentives.session.session import Session
    from weakincentives.tool_result import ToolResult

OutT = TypeVar("OutT")


class Adapter(ABC):
    """Asks a model. A subclass implements ``complete``."""

    name: str = "adapter"
    """The name in records and telemetry."""
    model: str = ""
    """The provider's name for the model; empty if the provider chooses."""
    needs_loop: bool = True
    """Whether ``complete`` waits for anything; otherwise it runs without an event loop."""

    asks_provider: bool = True
    """Whether it asks a real model: ``testing.no_model_requests`` refuses that."""
    manages_context: bool = False
    """Whether the provider shortens a long conversation itself."""

    provider_tools: Sequence[Tool[Any, Any]] = ()
    """Tools that the provider runs itself; each handler waits until the provider has."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"

    async def context_window(self) -> int | None:
        """Return how many tokens a request may have, answer included; None if it is unknown."""
        return None

    def price(self) -> TokenPrice | None:
        """Return the price of the model; None if it is unknown."""
        return None

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
        message: Content | None = None,
        **options: Unpack[RunOptions],
    ) -> PromptResponse[OutT]:
        """Run the prompt to its end and return the model's answer.

        A second call with the same prompt and session continues the conversation.

        Args:
            prompt: The task and its tools.
            session: Holds state, records and the conversation.
            message: The user's message, in addition to the prompt: a text, or a list of texts
                and ``Media``.
            options: ``resume``, limits and listeners; see ``RunOptions``.
        """
        return Run(self.begin_run(), prompt, session, **options).evaluate(message)

    async def aevaluate(
        self,
        prompt: Prompt[OutT],
        session: Session,
        *,
        message: Content | None = None,
        **options: Unpack[RunOptions],
    ) -> PromptResponse[OutT]:
        """Run the prompt to its end on the caller's event loop."""
        return await Run(self.begin_run(), prompt, session, **options).aevaluate(message)

    def stream(
        self,
        prompt: Prompt[OutT],
        session: Session,
        *,
        message: Content | None = None,
        **options: Unpack[RunOptions],
    ) -> RunStream[OutT]:
        """Run the prompt and yield its events: ``async for event in adapter.stream(...)``.

        A plain ``for`` works, too. Stopping early cancels the run and rolls back the call under
        way. The stream's ``response`` is the model's answer.
        """
        from weakincentives.runtime.stream import RunStream

        listener = options.get("on_event")

        def start(put: Callable[[RunEvent], object]) -> Coroutine[Any, Any, PromptResponse[OutT]]:
            def hear(event: RunEvent) -> None:
                put(event)
                if listener is not None:
                    listener(event)

            options["on_event"] = hear
            return self.aevaluate(prompt, session, message=message, **options)

        return RunStream(start)

    def step(
        self,
        prompt: Prompt[OutT],
        session: Session,
        *,
        tool_results: Sequence[ToolResult[Any]] | None = None,
        message: Content | None = None,
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
        message: Content | None = None,
        **options: Unpack[RunOptions],
    ) -> PromptResponse[OutT]:
        """Take one turn of the model on the caller's event loop."""
        return await Run(self.begin_run(), prompt, session, **options).astep(tool_results, message)
