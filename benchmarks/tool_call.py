"""One call through the whole pipeline, beside a bare call of the same handler.

Six-field parameters given as a dict, two policies on the section, a bound filesystem, one
subscriber, a dataclass result. "Earlier calls" are made for real, in the same session.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from timing import Samples, emit, is_quick
from weakincentives.filesystem import Filesystem, MemoryFilesystem
from weakincentives.prompt import (
    MarkdownSection,
    Prompt,
    PromptTemplate,
    ReadBeforeWritePolicy,
    SequentialDependencyPolicy,
    Tool,
    ToolContext,
    ToolResult,
)
from weakincentives.runtime import Session, ToolCall, ToolInvoked, append_all, execute_tool

CALLS = 20
"""Calls in a batch."""


@dataclass(frozen=True, slots=True)
class Params:
    path: str
    limit: int = 10
    recursive: bool = False
    ratio: float = 0.5
    kinds: tuple[str, ...] = ()
    note: str | None = None


@dataclass(frozen=True, slots=True)
class Found:
    count: int

    def render(self) -> str:
        return f"{self.count} found"


@dataclass(frozen=True, slots=True)
class Seen:
    count: int


ARGUMENTS = {
    "path": "a.txt",
    "limit": 3,
    "recursive": True,
    "ratio": 1.5,
    "kinds": ["py"],
    "note": "x",
}


def plain(params: Params, *, context: ToolContext) -> ToolResult[Found]:
    return ToolResult.ok(Found(params.limit), message="done")


def writing(params: Params, *, context: ToolContext) -> ToolResult[Found]:
    context.filesystem.write(params.path, "new text")
    return ToolResult.ok(Found(params.limit), message="done")


def failing(params: Params, *, context: ToolContext) -> ToolResult[Found]:
    context.filesystem.write(params.path, "new text")
    context.session.dispatch(Seen(params.limit))
    raise ValueError("no")


def reading(params: Params, *, context: ToolContext) -> ToolResult[Found]:
    return ToolResult.ok(Found(len(context.filesystem.read(params.path))), message="done")


TOOLS = {
    "plain": Tool[Params, Found](name="look_up", description="Do nothing.", handler=plain),
    "kept": Tool[Params, Found](name="keep", description="Do nothing.", handler=plain),
    "writing": Tool[Params, Found](name="write_file", description="Write.", handler=writing),
    "failing": Tool[Params, Found](name="fail", description="Write and fail.", handler=failing),
    "reading": Tool[Params, Found](
        name="read_file", description="Read.", handler=reading, reach="read"
    ),
}


class Desk:
    """A session that has seen some calls, and one operation on it."""

    def __init__(self, kind: str, earlier: int) -> None:
        self.session = Session()
        if kind == "kept":
            self.session[Found].register(Found, append_all)
        self.prompt = Prompt(
            PromptTemplate(
                sections=[
                    MarkdownSection(
                        title="Files",
                        template="Work on the files.",
                        tools=list(TOOLS.values()),
                        policies=[
                            SequentialDependencyPolicy(
                                dependencies={"write_file": frozenset({"read_file"})}
                            ),
                            ReadBeforeWritePolicy(),
                        ],
                    )
                ]
            )
        ).bind(resources={Filesystem: MemoryFilesystem({"a.txt": "old text"})})
        rendered = self.prompt.render(self.session)
        self.context = ToolContext(
            session=self.session,
            prompt=self.prompt,
            rendered_prompt=rendered,
            resources=self.prompt.resources,
        )
        self.subscriber_heard = 0
        self.session.dispatcher.subscribe(ToolInvoked, self.hear)
        self.name = TOOLS[kind].name
        execute_tool(ToolCall("read_file", ARGUMENTS), context=self.context)
        assert self.call().success == (kind != "failing")
        for _ in range(earlier):
            self.call()

    def hear(self, event: ToolInvoked) -> None:
        self.subscriber_heard += 1

    def call(self) -> ToolResult[Found]:
        return execute_tool(ToolCall(self.name, ARGUMENTS), context=self.context)


def bare_call(kind: str) -> Callable[[], object]:
    """Return a call of the handler alone, on a session and files of its own."""
    tool = TOOLS[kind]
    handler, params = tool.handler, tool.parse(ARGUMENTS)
    context = ToolContext(
        session=Session(), resources={Filesystem: MemoryFilesystem({"a.txt": "old text"})}
    )

    def failing_call() -> None:
        with suppress(ValueError):
            handler(params, context=context)

    return failing_call if kind == "failing" else lambda: handler(params, context=context)


def measure(kind: str, earlier: int, batches: int) -> None:
    """Time calls after so many earlier ones; a session is left once it has grown by a tenth."""
    tool = TOOLS[kind]
    bare, parsed, piped = Samples(), Samples(), Samples()
    history_cpu = 0.0
    while len(piped.cpu) < batches:
        started = time.process_time()
        desk = Desk(kind, earlier)
        history_cpu = time.process_time() - started
        alone = bare_call(kind)
        for _ in range(min(batches, max(1, earlier // 10 // CALLS))):
            bare.batch(alone, CALLS * 10)
            parsed.batch(lambda: tool.parse(ARGUMENTS), CALLS)
            piped.batch(desk.call, CALLS)
        assert desk.subscriber_heard == len(desk.session[ToolInvoked])
    call, alone_figures = piped.figures(), bare.figures()
    emit(
        f"call {kind}",
        earlier=earlier,
        call=call,
        bare=alone_figures,
        parse=parsed.figures(),
        over_bare=round(call["cpu"] - alone_figures["cpu"], 3),
        over_bare_wall=round(call["wall"] - alone_figures["wall"], 3),
        ratio=round(call["cpu"] / alone_figures["cpu"], 1),
        # All earlier calls with every garbage collection among them, not only the median batch.
        history_mean=round(history_cpu / earlier * 1e6, 3) if earlier else None,
    )


if __name__ == "__main__":
    quick = is_quick()
    for earlier in (0, 1_000, 10_000) if quick else (0, 1_000, 10_000, 100_000):
        measure("plain", earlier, 30 if quick else 200)
    for kind in ("kept", "writing", "failing", "reading"):
        for earlier in (0,) if quick else (0, 10_000):
            measure(kind, earlier, 30 if quick else 200)
