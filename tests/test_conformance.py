"""The cases that every adapter is run against: a right one passes, a wrong one is named."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from unittest import SkipTest

import pytest

from weakincentives.adapters import ModelRequest, ModelTurn, ScriptedAdapter
from weakincentives.errors import MalformedResponse, ProviderError
from weakincentives.testing import AdapterCase, Asked, Played, Served, adapter_cases

CASES = adapter_cases()


class Watched(ScriptedAdapter):
    """A scripted model that notes what it was asked."""

    def __init__(self, turns: Sequence[Played]) -> None:
        super().__init__(turns)
        self.asked: list[Asked] = []

    async def complete(self, request: ModelRequest) -> ModelTurn:
        self.asked.append(
            Asked(
                system=request.prompt.text,
                messages=list(request.messages),
                tools=[tool.name for tool in request.prompt.tools],
            )
        )
        return await super().complete(request)


def watched(turns: Sequence[Played]) -> Served:
    adapter = Watched(turns)
    return Served(adapter, lambda: adapter.asked)


class Waiting(ScriptedAdapter):
    """A scripted model behind a wait, as those on a network are."""

    needs_loop = True

    async def complete(self, request: ModelRequest) -> ModelTurn:
        try:
            return await super().complete(request)
        except ProviderError as error:
            if error.code != "TIMEOUT":
                raise
        import asyncio

        await asyncio.Event().wait()
        raise AssertionError("nobody sets it")


@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "streaming"])
@pytest.mark.parametrize("make_adapter", [watched, Waiting])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_an_adapter_that_is_right_passes(
    case: AdapterCase, make_adapter: Callable[..., Served], streaming: bool
):
    case.check(make_adapter, streaming=streaming)


def test_every_case_has_a_name_of_its_own_and_says_what_it_promises():
    assert len({case.name for case in CASES}) == len(CASES) > 30
    assert all(case.text.endswith(".") and "\n" not in case.text for case in CASES)


# Adapters that are wrong


class DropsACall(ScriptedAdapter):
    async def complete(self, request: ModelRequest) -> ModelTurn:
        turn = await super().complete(request)
        return replace(turn, tool_calls=turn.tool_calls[:1])


class ReordersCalls(ScriptedAdapter):
    async def complete(self, request: ModelRequest) -> ModelTurn:
        turn = await super().complete(request)
        return replace(turn, tool_calls=turn.tool_calls[::-1])


class ReordersAnswers(Watched):
    """Puts the answers of a turn into its provider's format in another order."""

    async def complete(self, request: ModelRequest) -> ModelTurn:
        answers = [m for m in request.messages if m.role == "tool"][::-1]
        messages = [answers.pop(0) if m.role == "tool" else m for m in request.messages]
        return await super().complete(replace(request, messages=messages))


class TrimsAnswers(Watched):
    async def complete(self, request: ModelRequest) -> ModelTurn:
        messages = [replace(m, text=m.text.strip()) for m in request.messages]
        return await super().complete(replace(request, messages=messages))


class SwallowsErrors(ScriptedAdapter):
    async def complete(self, request: ModelRequest) -> ModelTurn:
        try:
            return await super().complete(request)
        except ProviderError:
            return ModelTurn()


class TakesAnythingForAnAnswer(ScriptedAdapter):
    async def complete(self, request: ModelRequest) -> ModelTurn:
        try:
            return await super().complete(request)
        except MalformedResponse as error:
            return ModelTurn(text=str(error))


class RaisesItsOwnErrors(ScriptedAdapter):
    async def complete(self, request: ModelRequest) -> ModelTurn:
        try:
            return await super().complete(request)
        except ProviderError as error:
            raise ConnectionError(str(error)) from error


class ForgetsToWait(ScriptedAdapter):
    async def complete(self, request: ModelRequest) -> ModelTurn:
        try:
            return await super().complete(request)
        except ProviderError as error:
            error.retry_after = None
            raise


class OffersEverythingOnce(Watched):
    """Keeps the tools of its first request."""

    first: ModelRequest | None = None

    async def complete(self, request: ModelRequest) -> ModelTurn:
        self.first = self.first or request
        return await super().complete(replace(request, prompt=self.first.prompt))


class ForgetsWhatItCost(ScriptedAdapter):
    async def complete(self, request: ModelRequest) -> ModelTurn:
        turn = await super().complete(request)
        return ModelTurn(text=turn.text, tool_calls=turn.tool_calls, stop_reason=turn.stop_reason)


class SaysItTwice(ScriptedAdapter):
    async def complete(self, request: ModelRequest) -> ModelTurn:
        turn = await super().complete(request)
        if request.on_text is not None:
            request.on_text(turn.text)
        return turn


class AlwaysEndsWell(ScriptedAdapter):
    async def complete(self, request: ModelRequest) -> ModelTurn:
        return replace(await super().complete(request), stop_reason="end_turn")


class CannotBeCancelled(Waiting):
    async def complete(self, request: ModelRequest) -> ModelTurn:
        import asyncio

        try:
            return await super().complete(request)
        except asyncio.CancelledError:
            return ModelTurn(text="What did you say?")


WRONG: dict[type[ScriptedAdapter], set[str]] = {
    DropsACall: {"several calls in one turn", "the same call ids again"},
    ReordersCalls: {"several calls in one turn"},
    ReordersAnswers: {"several calls in one turn"},
    TrimsAnswers: {"odd text in an answer"},
    SwallowsErrors: {"rejected", "throttled", "provider error", "malformed response"},
    TakesAnythingForAnAnswer: {"malformed response", "never a whole response"},
    RaisesItsOwnErrors: {"rejected", "throttled", "cut off in the middle"},
    ForgetsToWait: {"throttled"},
    OffersEverythingOnce: {"progressive disclosure"},
    ForgetsWhatItCost: {"plain text", "budget exceeded"},
    SaysItTwice: {"streamed text"},
    AlwaysEndsWell: {"cut off at the token limit", "refusal"},
    CannotBeCancelled: {"cancelled while the model is waited for"},
}


@pytest.mark.parametrize("wrong", WRONG, ids=lambda kind: kind.__name__)
def test_an_adapter_that_is_wrong_is_named_by_the_cases_that_are_about_it(
    wrong: type[ScriptedAdapter],
):
    def make(turns: Sequence[Played]) -> ScriptedAdapter | Served:
        adapter = wrong(turns)
        return Served(adapter, lambda: adapter.asked) if isinstance(adapter, Watched) else adapter

    failed = _failing(make)

    assert WRONG[wrong] <= set(failed)
    assert all(text.startswith(f"{name}: ") for name, text in failed.items())


def test_an_adapter_that_is_wrong_in_one_thing_passes_the_other_cases():
    assert set(_failing(ForgetsToWait)) == {"throttled"}
    assert "the retry came after 1 s" in _failing(ForgetsToWait)["throttled"]


def test_a_case_that_a_format_cannot_express_is_skipped():
    def make(turns: Sequence[Played]) -> ScriptedAdapter:
        raise SkipTest("there are no calls in this format")

    with pytest.raises(SkipTest, match="no calls"):
        CASES[0].check(make)


def _failing(make: Callable[..., ScriptedAdapter | Served]) -> dict[str, str]:
    """Return what is wrong, by the name of the case."""
    failed: dict[str, str] = {}
    for case in CASES:
        try:
            case.check(make)
        except AssertionError as error:
            failed[case.name] = str(error)
        except SkipTest:
            pass
    return failed
