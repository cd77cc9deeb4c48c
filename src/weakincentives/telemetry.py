"""OpenTelemetry: a span for every run, model turn and tool call, by the GenAI conventions.

Off until ``instrument`` is called, then on for the whole process. Text of users, models and tools
is left out of the spans unless ``content=True``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine, Generator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar, cast

from weakincentives.core.budget import NO_TOKENS, TokenUsage
from weakincentives.errors import MissingExtra, VisibilityExpansionRequired
from weakincentives.runtime.conversation import (
    ContextCompacted,
    Message,
    ModelRequest,
    ModelTurn,
    PromptResponse,
    Retrying,
    RunEvent,
    SentBack,
    ToolProgress,
)
from weakincentives.serde import dump
from weakincentives.session import events
from weakincentives.session.events import ToolInvoked

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span, Tracer, TracerProvider

    from weakincentives.prompt.tool import ToolContext
    from weakincentives.runtime.run import Model
    from weakincentives.runtime.transactions import Transaction

__all__ = ["Telemetry", "instrument"]

T = TypeVar("T")

_FINISH_REASONS = {
    "end_turn": "stop",
    "tool_use": "tool_call",
    "max_tokens": "length",
    "refusal": "content_filter",
}
"""Our stop reasons in the terms of the conventions."""
_ROLES = {"user": "user", "model": "assistant", "tool": "tool"}


def instrument(
    *, tracer_provider: TracerProvider | None = None, content: bool = False
) -> Callable[[], None]:
    """Trace runs, turns and tool calls from now on; returns how to stop.

    Calling it again replaces the earlier setup.

    Args:
        tracer_provider: Where spans go; OpenTelemetry's global provider by default.
        content: Include prompts, messages, arguments and results.
    """
    try:
        from opentelemetry.trace import get_tracer
    except ImportError as error:
        raise MissingExtra("otel", "opentelemetry-api") from error
    from weakincentives import __version__

    tracer = get_tracer("weakincentives", __version__, tracer_provider)
    telemetry = events.telemetry = Telemetry(tracer, content=content)

    def uninstrument() -> None:
        if events.telemetry is telemetry:
            events.telemetry = None

    return uninstrument


class Telemetry:
    """Runs things inside spans."""

    def __init__(self, tracer: Tracer, *, content: bool) -> None:
        self._tracer = tracer
        self._content = content
        # The context inside each call in progress. Threads that its handler starts do not inherit
        # it, but the calls they make belong below it.
        self._inside: dict[str, Context] = {}

    async def run(
        self,
        context: ToolContext,
        run: Callable[..., Coroutine[Any, Any, PromptResponse[Any]]],
        *args: Any,
    ) -> PromptResponse[Any]:
        """Run a prompt to its end."""
        prompt, ids = context.prompt, context.run_context
        assert prompt is not None
        assert ids is not None
        agent = prompt.template.name
        attributes = {
            **_model_attributes(context),
            "gen_ai.agent.name": agent,
            "gen_ai.agent.id": ids.agent_id,
            "wink.run.id": ids.run_id,
            "wink.loop.id": ids.loop_id,
            "wink.prompt.ns": prompt.ns,
            "wink.prompt.key": prompt.key,
        }
        with self._span("invoke_agent", agent, attributes) as span:
            response: PromptResponse[Any] | None = None
            try:
                response = await run(*args)
                span.set_attribute("gen_ai.response.finish_reasons", _finish_reasons(response))
                return response
            except BaseException as error:
                response = getattr(error, "response", None)
                raise
            finally:
                if response is not None:
                    counts = {"wink.turns": response.turns, "wink.calls": response.calls}
                    _note(span, {**_usage(response.usage), **counts})

    def trace_id(self) -> str:
        """Return the id of the current trace, or an empty string."""
        from opentelemetry.trace import get_current_span

        found = get_current_span().get_span_context()
        return f"{found.trace_id:032x}" if found.is_valid else ""

    async def turn(
        self,
        context: ToolContext,
        ask: Callable[[ModelRequest], Coroutine[Any, Any, ModelTurn]],
        request: ModelRequest,
    ) -> ModelTurn:
        """Ask the model for one turn, retries included."""
        model = _model_attributes(context)
        attributes = {
            **model,
            "gen_ai.output.type": "text" if request.output_type is None else "json",
            "wink.attempts": 1,
        }
        with self._span("chat", model["gen_ai.request.model"], attributes) as span:
            shows_content = self._content and span.is_recording()
            if shows_content:
                _note(span, _request_content(request))
            turn = await ask(request)
            finish_reasons = _finish_reasons(turn)
            found = {
                "gen_ai.response.model": turn.model,
                "gen_ai.response.finish_reasons": finish_reasons,
                **_usage(turn.usage),
            }
            _note(span, found)
            if shows_content:
                said = Message(role="model", text=turn.text, tool_calls=turn.tool_calls)
                message = {**_message(said), "finish_reason": finish_reasons[0]}
                _note(span, {"gen_ai.output.messages": _as_json([message])})
            return turn

    def note(self, event: RunEvent) -> None:
        """Note an event of a run in the current span; turns and calls have spans of their own."""
        from opentelemetry.trace import get_current_span

        span = get_current_span()
        match event:
            case Retrying(error, wait, attempt):
                span.set_attribute("wink.attempts", attempt)
                span.add_event("wink.retry", {"error.type": error.code, "wink.retry.wait": wait})
            case ToolProgress(_, message, done, total):
                said = message if self._content else None
                found = {"wink.progress": done, "wink.progress.total": total, "message": said}
                span.add_event("wink.progress", _present(found))
            case ContextCompacted():
                sizes = {"before": event.tokens_before, "after": event.tokens_after}
                found = {f"wink.tokens.{name}": size for name, size in sizes.items()}
                summary = {"summary": event.summary if self._content else None}
                span.add_event("wink.context_compacted", _present({**found, **summary}))
            case SentBack(reason):
                found = {"reason": reason if self._content else None}
                span.add_event("wink.sent_back", _present(found))
            case _:
                pass

    async def tool_call(
        self,
        run: Callable[[Transaction], Coroutine[Any, Any, T]],
        transaction: Transaction,
    ) -> T:
        """Run one call; its outcome is read from its record."""
        from opentelemetry.context import get_current

        call = transaction.call
        offer = transaction.around.offers.get(call.name)
        tool = None if offer is None else offer.tool
        attributes = {
            "gen_ai.tool.name": str(call.name),
            "gen_ai.tool.call.id": call.id,
            "gen_ai.tool.type": "function",
            "gen_ai.tool.description": "" if tool is None else tool.description,
            "gen_ai.conversation.id": transaction.base.session_id,
            "wink.reach": None if tool is None else tool.reach,
        }

        def note_record(span: Span) -> None:
            # Newest first: the records of nested calls come before its own.
            for record in reversed(transaction.recorded):
                if isinstance(record, ToolInvoked) and record.call_id == call.id:
                    self._note_record(span, record, bool(offer and offer.policies))
                    return

        around = self._around(transaction.parent)
        with self._span("execute_tool", str(call.name), attributes, around, note_record):
            self._inside[call.id] = get_current()
            try:
                return await run(transaction)
            finally:
                self._inside.pop(call.id, None)

    def _around(self, parent: Transaction | None) -> Context | None:
        """Return the context of the outer call, for a call from a thread of its handler."""
        from opentelemetry.trace import INVALID_SPAN, get_current_span

        if parent is None or get_current_span() is not INVALID_SPAN:
            return None
        return self._inside.get(parent.call.id)

    @contextmanager
    def _span(
        self,
        operation: str,
        what: str,
        attributes: Mapping[str, Any],
        context: Context | None = None,
        at_end: Callable[[Span], None] | None = None,
    ) -> Generator[Span]:
        """Open a span; an exception is noted in it by its type."""
        from opentelemetry.trace import SpanKind

        with self._tracer.start_as_current_span(
            f"{operation} {what}".rstrip(),
            context,
            SpanKind.CLIENT if operation == "chat" else SpanKind.INTERNAL,
            _present({"gen_ai.operation.name": operation, **attributes}),
            # Messages of exceptions are content.
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            try:
                yield span
            except BaseException as error:
                if not isinstance(error, VisibilityExpansionRequired):
                    self._note_failure(span, type(error).__name__, error)
                raise
            finally:
                if at_end is not None:
                    at_end(span)

    def _note_failure(self, span: Span, kind: str, why: object) -> None:
        from opentelemetry.trace import StatusCode

        span.set_attribute("error.type", kind)
        span.set_status(StatusCode.ERROR, str(why) if self._content else None)

    def _note_record(self, span: Span, record: ToolInvoked, has_policies: bool) -> None:
        if not span.is_recording():
            return
        result, metadata = record.result, record.result.metadata
        ended = "rolled back" if record.ran else "denied" if record.denied_by else "refused"
        found: dict[str, Any] = {
            "wink.outcome": "committed" if record.success else ended,
            "wink.attempts": metadata.attempts,
            "wink.undone": metadata.undone,
            "wink.not_undone": metadata.not_undone,
            "wink.degraded": metadata.degraded,
            "wink.taken": record.attempts,
            "wink.conflicts": record.conflicts,
            "wink.policy.notes": record.notes,
        }
        if record.denied_by:
            found["wink.policy.decision"] = "denied"
            found["wink.policy.name"] = record.denied_by
            found["wink.policy.reason"] = result.message
        elif record.ran and has_policies:
            found["wink.policy.decision"] = "allowed"
        if self._content:
            found["gen_ai.tool.call.arguments"] = _as_json(record.params)
            found["gen_ai.tool.call.result"] = result.render()
        _note(span, found)
        failure = result.failure
        if failure is not None and failure.code != "VISIBILITY_EXPANSION":
            self._note_failure(span, failure.code, result.message)


def _model_attributes(context: ToolContext) -> dict[str, str]:
    adapter = cast("Model | None", context.adapter)
    return {
        "gen_ai.provider.name": "" if adapter is None else adapter.name,
        "gen_ai.request.model": "" if adapter is None else adapter.model,
        "gen_ai.conversation.id": context.session.session_id,
    }


def _finish_reasons(answer: ModelTurn | PromptResponse[Any]) -> tuple[str]:
    return (_FINISH_REASONS.get(answer.stop_reason, answer.stop_reason),)


def _usage(usage: TokenUsage) -> dict[str, int]:
    if usage == NO_TOKENS:
        return {}  # not counted
    return {
        "gen_ai.usage.input_tokens": usage.input_tokens,
        "gen_ai.usage.output_tokens": usage.output_tokens,
    }


def _note(span: Span, attributes: Mapping[str, Any]) -> None:
    span.set_attributes(_present(attributes))


def _present(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if value not in (None, "", ())}


# Content, in the format of the conventions


def _request_content(request: ModelRequest) -> dict[str, str]:
    return {
        "gen_ai.system_instructions": _as_json([_text(request.prompt.text)]),
        "gen_ai.input.messages": _as_json([_message(each) for each in request.messages]),
        "gen_ai.tool.definitions": _as_json(
            [{"type": "function", **tool.definition()} for tool in request.prompt.tools]
        ),
    }


def _message(message: Message) -> dict[str, object]:
    parts: list[Mapping[str, object]] = []
    if message.role == "tool":
        answer = {"id": message.call_id, "response": message.text}
        parts.append({"type": "tool_call_response", **answer})
    elif message.text:
        parts.append(_text(message.text))
    for call in message.tool_calls:
        wanted = {"id": call.id, "name": call.name, "arguments": call.params}
        parts.append({"type": "tool_call", **wanted})
    return {"role": _ROLES[message.role], "parts": parts}


def _text(text: str) -> dict[str, object]:
    return {"type": "text", "content": text}


def _as_json(value: object) -> str:
    try:
        return json.dumps(dump(value))
    except (TypeError, ValueError):
        return repr(value)
