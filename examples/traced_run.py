"""A run with a call that is denied and one that is rolled back, as a trace on the console.

Run it with `.venv/bin/python examples/traced_run.py`. It needs `wink-runtime[otel]` and the
package `opentelemetry-sdk`; put the exporter of your backend in the place of the console's.
"""

from __future__ import annotations

from collections.abc import Sequence

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor

import weakincentives as wink
from weakincentives.adapters import ScriptedAdapter, calls, says
from weakincentives.core.budget import TokenUsage
from weakincentives.filesystem import Filesystem, MemoryFilesystem
from weakincentives.prompt import ReadBeforeWritePolicy
from weakincentives.telemetry import instrument


@wink.tool(reach="read")
def read_file(path: str, *, context: wink.ToolContext) -> str:
    """Read a file."""
    return context.filesystem.read(path)


@wink.tool(reach="reversible")
def write_file(path: str, text: str, *, context: wink.ToolContext) -> str:
    """Write a file."""
    context.filesystem.write(path, text)
    return f"wrote {path}"


@wink.tool(reach="reversible")
def publish(*, context: wink.ToolContext) -> str:
    """Publish the plan."""
    context.filesystem.write("published.txt", context.filesystem.read("plan.txt"))
    raise ValueError("the plan has no date")


def line(span: ReadableSpan) -> str:
    """Return one line for a span; the console shows each when it ends, so a run comes last."""
    found = span.attributes or {}
    words = [str(found.get("wink.outcome", ""))]
    if "wink.turns" in found:
        words.append(f"{found['wink.turns']!s} turns")
    if "gen_ai.usage.input_tokens" in found:
        words.append(f"{found['gen_ai.usage.input_tokens']!s} tokens in")
    words.append(str(found.get("wink.policy.reason", "")))
    undone = found.get("wink.undone")
    if isinstance(undone, Sequence):
        words += map(str, undone)
    return f"{span.name:<25} {', '.join(filter(None, words))}\n"


def main() -> None:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(ConsoleSpanExporter(formatter=line)))
    instrument(tracer_provider=provider)

    section = wink.MarkdownSection(
        title="Files",
        template="Keep the plan up to date.",
        tools=[read_file, write_file, publish],
        policies=[ReadBeforeWritePolicy()],
    )
    prompt = wink.Prompt(wink.PromptTemplate(name="editor", sections=[section])).bind(
        resources={Filesystem: MemoryFilesystem({"plan.txt": "Rest."})}
    )
    write = ("write_file", {"path": "plan.txt", "text": "Work."})
    used = TokenUsage(input_tokens=120, output_tokens=9)
    model = ScriptedAdapter(
        [
            calls(write, usage=used),
            calls(("read_file", {"path": "plan.txt"}), write, usage=used),
            calls("publish", usage=used),
            says("The plan is up to date, but not published.", usage=used),
        ]
    )
    model.evaluate(prompt, wink.Session())


if __name__ == "__main__":
    main()
