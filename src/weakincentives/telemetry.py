"""OpenTelemetry: a span for every run, model turn and tool call, by the GenAI conventions.

Off until ``instrument`` is called, and then on for the whole process. What users, models and
tools wrote stays out of the spans unless it is asked for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar

from weakincentives import events
from weakincentives.budget import NO_TOKENS, TokenUsage
from weakincentives.errors import MissingExtra, ProviderError, VisibilityExpansionRequired
from weakincentives.events import ToolInvoked
from weakincentives.runtime.conversation import Message, ModelRequest, ModelTurn, PromptResponse
from weakincentives.serde import dump

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span, SpanKind, Tracer, TracerProvider

    from weakincentives.call import ToolCall
    from weakincentives.prompt.tool import ToolContext
    from weakincentives.runtime.transactions import Transaction

__all__ = ["Telemetry", "instrument"]

T = TypeVar("T")

_FINISH_REASONS = {
    "end_turn": "stop",
    "tool_use": "tool_call",
    "max_tokens": "length",
    "refusal": "content_filter",
}
"""Our stop reasons in the words of the conventions."""
_ROLES = {"user": "user", "model": "assistant", "tool": "tool"}


def instrument(
    *, tracer_provider: TracerProvider | None = None, content: bool = False
) -> Callable[[], None]:
    """Trace runs, turns and tool calls from now on; returns how to stop.

    Calling it again replaces what was set up before.

    Args:
        tracer_provider: Where spans go; OpenTelemetry's global one by default.
        content: Put prompts, messages, arguments and results into the spans as well.
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
    """Puts a span around what it is given to run."""

    def __init__(self, tracer: Tracer, *, content: bool) -> None:
        self._tracer = tracer
        self._content = content
        # What surrounds the handler of each call under way: threads that it starts do not inherit
        # it, and calls they make belong there all the same.
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
        agent = prompt.template.name
        attributes = {
            **_of_the_model(context),
            "gen_ai.agent.name": agent,
            "gen_ai.agent.id": "" if ids is None else ids.agent_id,
            "wink.run.id": "" if ids is None else ids.run_id,
            "wink.loop.id": "" if ids is None else ids.loop_id,
            "wink.prompt.ns": prompt.ns,
            "wink.prompt.key": prompt.key,
        }
        with self._span("invoke_agent", agent, attributes) as span:
            try:
                response = await run(*args)
            except BaseException as error:
                self._note_error(span, error)
                _note_response(span, getattr(error, "response", None))
                raise
            _note_response(span, response)
            finish_reason = _finish_reason(response.stop_reason)
            span.set_attribute("gen_ai.response.finish_reasons", (finish_reason,))
            return response

    def trace_id(self) -> str:
        """Return the id of the trace that is recorded here, or nothing."""
        from opentelemetry.trace import get_current_span

        found = get_current_span().get_span_context()
        return f"{found.trace_id:032x}" if found.is_valid else ""

    async def turn(
        self,
        context: ToolContext,
        ask: Callable[[ModelRequest], Coroutine[Any, Any, ModelTurn]],
        request: ModelRequest,
    ) -> ModelTurn:
        """Ask the model for one turn, as often as it takes."""
        from opentelemetry.trace import SpanKind

        model = _of_the_model(context)
        attributes = {
            **model,
            "gen_ai.output.type": "text" if request.output_type is None else "json",
            "wink.attempts": 1,
        }
        name = model["gen_ai.request.model"]
        with self._span("chat", name, attributes, kind=SpanKind.CLIENT) as span:
            if self._content and span.is_recording():
                _note(span, _request_content(request))
            try:
                turn = await ask(request)
            except BaseException as error:
                self._note_error(span, error)
                raise
            finish_reason = _finish_reason(turn.stop_reason)
            _note(
                span,
                {
                    "gen_ai.response.model": turn.model,
                    "gen_ai.response.finish_reasons": (finish_reason,),
                    **_usage(turn.usage),
                },
            )
            if self._content and span.is_recording():
                said = Message(role="model", text=turn.text, tool_calls=turn.tool_calls)
                message = {**_message(said), "finish_reason": finish_reason}
                _note(span, {"gen_ai.output.messages": _as_json([message])})
            return turn

    def asked_again(self, attempts: int, error: ProviderError, wait: float) -> None:
        """Note in the span of the turn under way that the provider failed and is asked again."""
        from opentelemetry.trace import get_current_span

        span = get_current_span()
        span.set_attribute("wink.attempts", attempts)
        span.add_event("wink.retry", {"error.type": error.code, "wink.retry.wait": wait})

    async def tool_call(
        self,
        run: Callable[[Transaction], Coroutine[Any, Any, T]],
        transaction: Transaction,
    ) -> T:
        """Run one call; what it came to is read from its record."""
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
        around = self._around(transaction.parent)
        with self._span("execute_tool", str(call.name), attributes, context=around) as span:
            self._inside[call.id] = get_current()
            try:
                return await run(transaction)
            except BaseException as error:
                self._note_error(span, error)
                raise
            finally:
                self._inside.pop(call.id, None)
                record = _record_of(call, transaction.recorded)
                if record is not None and span.is_recording():
                    self._note_record(span, record, bool(offer and offer.policies))

    def _around(self, parent: Transaction | None) -> Context | None:
        """Return what a call belongs to where that cannot be seen: in a thread of a handler."""
        from opentelemetry.trace import INVALID_SPAN, get_current_span

        if parent is None or get_current_span() is not INVALID_SPAN:
            return None
        return self._inside.get(parent.call.id)

    def _span(
        self,
        operation: str,
        what: str,
        attributes: Mapping[str, Any],
        *,
        kind: SpanKind | None = None,
        context: Context | None = None,
    ) -> AbstractContextManager[Span]:
        from opentelemetry.trace import SpanKind

        return self._tracer.start_as_current_span(
            f"{operation} {what}".rstrip(),
            context,
            kind or SpanKind.INTERNAL,
            _present({"gen_ai.operation.name": operation, **attributes}),
            # Messages of exceptions repeat what was written: they are content.
            record_exception=False,
            set_status_on_exception=False,
        )

    def _note_error(self, span: Span, error: BaseException) -> None:
        if not isinstance(error, VisibilityExpansionRequired):
            self._note_failure(span, type(error).__name__, error)

    def _note_failure(self, span: Span, kind: str, why: object) -> None:
        from opentelemetry.trace import StatusCode

        span.set_attribute("error.type", kind)
        span.set_status(StatusCode.ERROR, str(why) if self._content else None)

    def _note_record(self, span: Span, record: ToolInvoked, has_policies: bool) -> None:
        result, metadata = record.result, record.result.metadata
        _note(
            span,
            {
                "wink.outcome": _outcome(record),
                "wink.attempts": metadata.attempts,
                "wink.undone": metadata.undone,
                "wink.not_undone": metadata.not_undone,
                "wink.degraded": metadata.degraded,
                "wink.taken": record.attempts,
                "wink.conflicts": record.conflicts,
                "wink.policy.notes": record.notes,
            },
        )
        if record.denied_by:
            _note(
                span,
                {
                    "wink.policy.decision": "denied",
                    "wink.policy.name": record.denied_by,
                    "wink.policy.reason": result.message,
                },
            )
        elif record.ran and has_policies:
            _note(span, {"wink.policy.decision": "allowed"})
        failure = result.failure
        if failure is not None and failure.code != "VISIBILITY_EXPANSION":
            self._note_failure(span, failure.code, result.message)
        if self._content:
            _note(
                span,
                {
                    "gen_ai.tool.call.arguments": _as_json(record.params),
                    "gen_ai.tool.call.result": result.render(),
                },
            )


def _of_the_model(context: ToolContext) -> dict[str, str]:
    adapter = context.adapter
    return {
        "gen_ai.provider.name": getattr(adapter, "name", ""),
        "gen_ai.request.model": getattr(adapter, "model", None) or "",
        "gen_ai.conversation.id": context.session.session_id,
    }


def _record_of(call: ToolCall, recorded: Sequence[object]) -> ToolInvoked | None:
    # The last: those of calls that are nested in it stand before its own.
    for record in reversed(recorded):
        if isinstance(record, ToolInvoked) and record.call_id == call.id:
            return record
    return None


def _outcome(record: ToolInvoked) -> str:
    if record.success:
        return "committed"
    return "rolled_back" if record.ran else "refused"


def _finish_reason(stop_reason: str) -> str:
    return _FINISH_REASONS.get(stop_reason, stop_reason)


def _note_response(span: Span, response: PromptResponse[Any] | None) -> None:
    if response is not None:
        _note(
            span,
            {
                **_usage(response.usage),
                "wink.turns": response.turns,
                "wink.calls": response.calls,
            },
        )


def _usage(usage: TokenUsage) -> dict[str, int]:
    if usage == NO_TOKENS:
        return {}  # nobody counted
    return {
        "gen_ai.usage.input_tokens": usage.input_tokens,
        "gen_ai.usage.output_tokens": usage.output_tokens,
    }


def _note(span: Span, attributes: Mapping[str, Any]) -> None:
    span.set_attributes(_present(attributes))


def _present(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if value not in (None, "", ())}


# Content, in the form that the conventions give it


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
