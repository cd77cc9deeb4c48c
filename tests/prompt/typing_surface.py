"""What a type checker makes of our surface. Checked by ``test_typing_surface``, never run.

An ignore comment stands where a mistake must be found: one that is not needed is an error itself.
"""

# pyright: strict, reportUnnecessaryTypeIgnoreComment=true

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self, assert_type

from weakincentives.dbc import require
from weakincentives.filesystem import Filesystem, MemoryFilesystem
from weakincentives.prompt import (
    AnyPolicy,
    MarkdownSection,
    PolicyDecision,
    Prompt,
    PromptTemplate,
    ProtectedPathsPolicy,
    QuotaPolicy,
    RateLimitPolicy,
    ReadBeforeWritePolicy,
    Section,
    SequentialDependencyPolicy,
    Tool,
    ToolContext,
    ToolExample,
    ToolPolicy,
    ToolResult,
    tool,
)
from weakincentives.resources import Forkable, ResourceRegistry, Snapshotable
from weakincentives.runtime import Session, ToolRegistry


@dataclass(frozen=True)
class Query:
    text: str


@dataclass(frozen=True)
class Found:
    count: int


@dataclass(frozen=True)
class FoundMore(Found):
    more: int = 0


def search(params: Query, *, context: ToolContext) -> ToolResult[Found]:
    if not params.text:
        return ToolResult.error("Say what to search for")
    assert_type(context.filesystem, Filesystem)
    assert_type(context.resources.get(MemoryFilesystem), MemoryFilesystem)
    assert_type(context.resources.find(MemoryFilesystem), MemoryFilesystem | None)
    return ToolResult.ok(Found(1), message="Found one")


async def search_later(params: Query, *, context: ToolContext) -> ToolResult[FoundMore]:
    return ToolResult.ok(FoundMore(1))


def has_text(params: Query) -> bool:
    return bool(params.text)


@require(has_text, "text cannot be empty")
def careful_search(params: Query, *, context: ToolContext) -> ToolResult[Found]:
    return ToolResult(message="", value=Found(1), exclude_value_from_context=True)


def ping(params: None, *, context: ToolContext) -> ToolResult[None]:
    return ToolResult.ok(message="pong")


def raw(params: dict[str, Any], *, context: ToolContext) -> ToolResult[str]:
    return ToolResult.ok("raw")


# Results know their value

assert_type(ToolResult.ok(Found(1)), ToolResult[Found])
assert_type(ToolResult.ok(Found(1), "one").value, Found | None)
assert_type(ToolResult.ok(), ToolResult[None])
wider: ToolResult[Found] = ToolResult.ok(FoundMore(1))

# Tools know their types

search_tool = Tool[Query, Found](
    name="search",
    description="Search.",
    handler=search,
    examples=(ToolExample(description="One", input=Query("x"), output=Found(1)),),
)
assert_type(search_tool, Tool[Query, Found])
assert_type(search_tool.parse({"text": "x"}), Query)
assert_type(search_tool(Query("x")), ToolResult[Found])
assert_type(search_tool(text="x").value, Found | None)
assert_type(search_tool.replace(description="Look."), Tool[Query, Found])

assert_type(Tool(name="search", description="Search.", handler=search), Tool[Query, Found])
Tool[Query, Found](name="later", description="Search.", handler=search_later)
Tool[Query, Found](name="careful", description="Search.", handler=careful_search)
Tool[None, None](name="ping", description="Ping.", handler=ping)
Tool[Query, Found](name="remote", description="Search.", handler=None)
assert_type(Tool.from_schema("raw", "Raw.", {"type": "object"}, raw), Tool[dict[str, Any], str])

Tool[Found, Found](
    name="a",
    description="b",
    handler=search,  # type: ignore  # takes a Query
)
Tool[Query, Query](
    name="a",
    description="b",
    handler=search,  # type: ignore  # gives a Found
)
Tool[Query, FoundMore](
    name="a",
    description="b",
    handler=search,  # type: ignore  # gives too little
)
Tool[Query, Found](
    name="a",
    description="b",
    handler=search,
    reach="far",  # type: ignore
)


@tool
def shout(text: str) -> str:
    """Say it loud."""
    return text.upper()


@tool(reach="read", timeout=1.0)
async def whisper(text: str, *, context: ToolContext) -> ToolResult[str]:
    """Say it quietly."""
    return ToolResult.ok(text.lower())


assert_type(shout("a"), ToolResult[str])
assert_type(shout(text="a").value, str | None)
assert_type(shout({"text": "a"}, context=ToolContext(Session())).value, str | None)
assert_type(whisper("a", context=ToolContext(Session())), ToolResult[str])
assert_type(whisper({"text": "a"}), ToolResult[str])
assert_type(shout.replace(name="yell")("a").value, str | None)

shout(txt="a")  # type: ignore[call-overload]
shout(3)  # type: ignore[call-overload]
shout()  # type: ignore[call-overload]
shout("a").value.upper()  # type: ignore[union-attr]  # None if the call failed
shout("a").upper()  # type: ignore[attr-defined]  # a result is not its value
whisper(context=ToolContext(Session()))  # type: ignore[call-overload]
tool(reach="far")  # type: ignore[call-overload]


@tool
async def count(texts: list[str], ctx: ToolContext | None = None) -> int:
    """Count."""
    inner = await whisper.acall(texts[0], context=ToolContext(Session()))
    assert_type(inner.value, str | None)
    assert_type(await count.acall(texts), ToolResult[int])
    await count.acall(text=texts)  # type: ignore[call-overload]
    return len(texts)


@tool
def clear() -> None:
    """Clear."""


@tool(name="find")
def find_one(params: Query, *, context: ToolContext) -> ToolResult[Found]:
    """Find."""
    return search(params, context=context)


assert_type(count(["a"]).value, int | None)
assert_type(clear(), ToolResult[None])
assert_type(find_one(Query("x"), context=ToolContext(Session())).value, Found | None)
tools: list[Tool[Any, Any]] = [shout, whisper, count, clear, find_one]

# Contexts take resources in every form, and give a resolver

session = Session()
resources: Mapping[type[Any], Any] = {Filesystem: MemoryFilesystem()}
ToolContext(session=session)
ToolContext(session=session, resources={Filesystem: MemoryFilesystem()})
ToolContext(session=session, resources=resources)
ToolContext(session=session, resources=ResourceRegistry.build(resources))
ToolContext(session=session, resources=ResourceRegistry.build(resources).open())
ToolContext(session=session, resources=7)  # type: ignore

# Policies of our own, sections, prompts


class Closed:
    name = "closed"

    def check(
        self, tool: Tool[Any, Any], params: object, *, context: ToolContext
    ) -> PolicyDecision:
        return PolicyDecision.deny("Closed")

    def on_result(
        self,
        tool: Tool[Any, Any],
        params: object,
        result: ToolResult[Any],
        *,
        context: ToolContext,
    ) -> None:
        return None


policies: list[ToolPolicy] = [
    Closed(),
    ReadBeforeWritePolicy(),
    SequentialDependencyPolicy(dependencies={"deploy": frozenset({"test"})}),
]


class Small:
    def check(self, tool_name: str, params: object, context: ToolContext) -> str | None:
        return "Closed"


class Later:
    async def check(
        self, tool: Tool[Any, Any], params: object, *, context: ToolContext
    ) -> PolicyDecision:
        return PolicyDecision.allow()


class NoPolicy:
    def check(self, tool_name: str) -> str | None:
        return None


def all_policies(more: AnyPolicy) -> list[AnyPolicy]:
    return [more, Closed(), Small(), Later(), QuotaPolicy(3), RateLimitPolicy(3)]


MarkdownSection(title="A", policies=[*all_policies(Small()), ProtectedPathsPolicy([".env"])])
PromptTemplate(policies=[Small(), Later()])
ToolRegistry(policies=[Small()])
MarkdownSection(title="A", policies=[NoPolicy()])  # type: ignore[list-item]
MarkdownSection(title="A", policies=[QuotaPolicy])  # type: ignore[list-item]  # not an instance
MarkdownSection(title="A", policies=["deny"])  # type: ignore[list-item]
PromptTemplate(policies=[search])  # type: ignore[list-item]
ToolRegistry(policies=[NoPolicy()])  # type: ignore[list-item]


class Suite(Section[Query]):
    def body(self, params: Query, session: Session | None) -> str:
        return params.text


guidance = MarkdownSection(title="Guidance", template="Be kind.", tools=[search_tool, shout])
asking = MarkdownSection[Query](
    title="Asking", template="Look for $text.", policies=[*policies, QuotaPolicy(3)]
)
assert_type(asking, MarkdownSection[Query])
MarkdownSection(titel="Guidance")  # type: ignore

template = PromptTemplate[Found](sections=[guidance, asking, Suite(title="Suite")])
assert_type(template, PromptTemplate[Found])
prompt = Prompt(template).bind(Query("x"), resources=resources)
assert_type(prompt, Prompt[Found])
assert_type(prompt.render(session).tools, tuple[Tool[Any, Any], ...])
ToolContext(session=session, prompt=prompt, resources=prompt.resources)
with prompt.resources as opened:
    assert_type(opened.get(Filesystem), Filesystem)
plain = Prompt(PromptTemplate(sections=[guidance]))


# Resources that take part in transactions


class Drawer:
    """One that knows nothing of us."""

    def snapshot(self) -> int:
        return 0

    def restore(self, token: int) -> None: ...

    def fork(self) -> Drawer:
        return Drawer()

    def merge(self, view: Drawer) -> None: ...

    def discard(self, view: Drawer) -> None: ...


class Inheriting(Forkable):
    """One that inherits ``discard``."""

    def snapshot(self) -> int:
        return 0

    def restore(self, token: int, /) -> None: ...

    def fork(self) -> Self:
        return self

    def merge(self, view: Self, /) -> None: ...


class NoMerge(Forkable):
    def snapshot(self) -> int:
        return 0

    def restore(self, token: int, /) -> None: ...

    def fork(self) -> Self:
        return self


class MergesNothing(Drawer):
    def merge(self) -> None: ...  # type: ignore[override]


class MergesText(Drawer):
    def merge(self, view: str) -> None: ...  # type: ignore[override]


class DiscardsLater(Drawer):
    async def discard(self, view: Drawer) -> None: ...  # type: ignore[override]


class ForksText(Drawer):
    def fork(self) -> str:  # type: ignore[override]
        return ""


class OnlySnapshots:
    def snapshot(self) -> int:
        return 0

    def restore(self, token: int) -> None: ...


def gives_views(*resources: Forkable) -> None: ...


def is_restored(*resources: Snapshotable) -> None: ...


gives_views(Drawer(), Inheriting())
is_restored(OnlySnapshots(), Drawer(), Inheriting())
assert_type(Inheriting().fork(), Inheriting)
Inheriting().discard(Inheriting())
gives_views(OnlySnapshots())  # type: ignore[arg-type]
gives_views(MergesNothing())  # type: ignore[arg-type]
gives_views(MergesText())  # type: ignore[arg-type]
gives_views(DiscardsLater())  # type: ignore[arg-type]
gives_views(ForksText())  # type: ignore[arg-type]
NoMerge()  # type: ignore[abstract]
is_restored(object())  # type: ignore[arg-type]
