"""A small world for the runtime's tests: a workspace, a plan, and tools that do and undo."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from weakincentives.filesystem import Filesystem, MemoryFilesystem
from weakincentives.prompt import (
    MarkdownSection,
    Prompt,
    PromptTemplate,
    Tool,
    ToolContext,
    ToolResult,
)
from weakincentives.runtime import Session, SlicePolicy, ToolCall, ToolInvoked, execute_tool
from weakincentives.runtime import slice_policy as declare
from weakincentives.session.slices import Slice


@dataclass(frozen=True, slots=True)
class Plan:
    """A STATE slice with one value."""

    steps: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class AddStep:
    step: str


@declare(SlicePolicy.LOG)
@dataclass(frozen=True, slots=True)
class Noted:
    """A LOG slice: what a handler wants remembered whatever happens."""

    text: str


@dataclass(frozen=True, slots=True)
class Nothing:
    pass


@dataclass(frozen=True, slots=True)
class Step:
    name: str


@dataclass(slots=True)
class Counter:
    """A user's resource that can only be snapshotted, so it is changed in place."""

    value: int = 0

    def snapshot(self) -> int:
        return self.value

    def restore(self, token: int) -> None:
        self.value = token


def add_step(plans: Slice[Plan], event: AddStep) -> Slice[Plan]:
    plan = plans.latest() or Plan()
    return plans.replace(replace(plan, steps=(*plan.steps, event.step)))


Body = Callable[[Step, ToolContext], Any]


def changing_everything(params: Step, context: ToolContext) -> None:
    """What a busy handler does before it ends, well or badly."""
    context.session.dispatch(AddStep(params.name))
    context.session.dispatch(Noted(params.name))
    context.filesystem.write(f"{params.name}.txt", "written")
    context.filesystem.append("journal.txt", f"{params.name}\n")
    context.resources.get(Counter).value += 1


def make_tool(name: str, body: Body, gives: Any = None, **options: Any) -> Tool[Step, Any]:
    """A tool whose handler changes everything, then does what ``body`` does."""

    def handler(params: Step, *, context: ToolContext) -> ToolResult[Any]:
        changing_everything(params, context)
        answer = body(params, context)
        return answer if isinstance(answer, ToolResult) else ToolResult.ok(None, message="done")

    return Tool[Step, gives](name=name, description=f"Does {name}.", handler=handler, **options)


def raising(error: BaseException) -> Body:
    def body(params: Step, context: ToolContext) -> None:
        raise error

    return body


@dataclass(slots=True)
class World:
    """A session, a filesystem and a counter behind one prompt."""

    tools: list[Tool[Any, Any]] = field(default_factory=list)
    policies: list[Any] = field(default_factory=list)
    session: Session = field(default_factory=Session)
    fs: MemoryFilesystem = field(default_factory=MemoryFilesystem)
    counter: Counter = field(default_factory=Counter)
    resources: dict[type, Any] = field(default_factory=dict)
    prompt: Prompt[Any] = field(init=False)

    def __post_init__(self) -> None:
        self.session[Plan].register(AddStep, add_step)
        section = MarkdownSection(title="Work", tools=self.tools, policies=self.policies)
        self.prompt = Prompt(PromptTemplate(sections=[section])).bind(
            resources={Filesystem: self.fs, Counter: self.counter, **self.resources}
        )
        self.prompt.render(self.session)

    def call(self, tool: str, name: str = "a", **more: Any) -> ToolResult[Any]:
        return execute_tool(ToolCall(tool, {"name": name, **more}), session=self.session)

    def state(self) -> tuple[Any, ...]:
        """All that a transaction covers."""
        plan = self.session[Plan].latest() or Plan()
        files = {path: self.fs.read(path) for path in self.fs.glob("**/*")}
        return plan, files, self.counter.value

    @property
    def records(self) -> tuple[ToolInvoked, ...]:
        return self.session[ToolInvoked].all()
