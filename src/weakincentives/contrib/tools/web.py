"""``web:scrape``: what is on a web page, as a real browser shows it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from weakincentives.contrib.tools.browser import Browser
from weakincentives.errors import PageNotRead
from weakincentives.prompt.contracts import (
    MemoryEffect,
    PermissionPrecondition,
    ResourcePrecondition,
)
from weakincentives.prompt.tool import Tool, ToolContext
from weakincentives.prompt.tool_result import ToolResult
from weakincentives.retry import RetryPolicies, RetryPolicy

_CACHED_PAGES = 100


@dataclass(frozen=True, slots=True)
class ScrapeParams:
    url: Annotated[str, Field(pattern="^https?://")]
    """URL to scrape."""
    selector: str | None = None
    """CSS selector for content extraction: the text of the first element that matches. Without
    one, the HTML of the whole page."""
    wait_for: Annotated[float, Field(ge=0, le=20)] = 0.0
    """Seconds to wait before scraping, for pages that go on loading."""


@dataclass(frozen=True, slots=True)
class ScrapedPage:
    """A page's content, cut to a length that fits a model's context."""

    url: str
    """The URL that was asked for."""
    content: str
    timestamp: float
    final_url: str = ""
    """Where redirects led."""
    title: str = ""
    total_chars: int = 0
    """How long the content is uncut."""
    refused: tuple[str, ...] = ()
    """What the page wanted to load and was not allowed to."""

    @property
    def is_cut(self) -> bool:
        return self.total_chars > len(self.content)

    def render(self) -> str:
        if not self.is_cut:
            return self.content
        return (
            f"{self.content}\n[Cut: these are the first {len(self.content)} of "
            f"{self.total_chars} characters. Use a selector to get a part.]"
        )


def web_scrape_tool(
    *,
    max_content: int = 100_000,
    timeout: float = 30.0,
    retry: RetryPolicy = RetryPolicies.STANDARD,
) -> Tool[ScrapeParams, ScrapedPage]:
    """Return the tool ``scrape``, for the namespace ``web``.

    It needs a ``Browser`` and the permission ``web:scrape``; what it finds is put into the
    short-term memory, where there is one. Its reach is ``reversible``: outside it only reads.

    Args:
        max_content: Characters of a page that the model is given.
    """

    async def handler(params: ScrapeParams, *, context: ToolContext) -> ToolResult[ScrapedPage]:
        browser = context.resources.get(Browser)
        try:
            page = await browser.read(
                params.url, selector=params.selector, wait_for=params.wait_for, timeout=timeout
            )
        except PageNotRead as error:
            return ToolResult.error(
                str(error),
                code=error.code,
                suggestions=("Check URL validity", "Verify page accessibility"),
            )
        scraped = ScrapedPage(
            url=params.url,
            content=page.content[:max_content],
            timestamp=context.session.clock.time(),
            final_url=page.url,
            title=page.title,
            total_chars=len(page.content),
            refused=page.refused,
        )
        return ToolResult.ok(scraped, _summary(scraped))

    return Tool[ScrapeParams, ScrapedPage](
        name="scrape",
        description="Extract content from a web page",
        handler=handler,
        reach="reversible",
        timeout=timeout,
        retry=retry,
        preconditions=[
            ResourcePrecondition(
                description="Browser must be available", resource="browser", check=_has_browser
            ),
            PermissionPrecondition(
                description="Web scraping must be allowed", permission="web:scrape"
            ),
        ],
        effects=[
            MemoryEffect(
                description="Cache scraped content",
                scope="short-term",
                operation="update",
                key="web:cache",
                apply=_cache,
            )
        ],
    )


async def _has_browser(context: ToolContext) -> bool:
    browser = context.resources.find(Browser)
    if browser is None:
        raise LookupError("no Browser is bound: resources={Browser: Binding(Browser, ...)}")
    return await asyncio.to_thread(browser.is_available)  # the first time it starts a program


def _summary(page: ScrapedPage) -> str:
    moved = "" if page.final_url == page.url else f", which led to {page.final_url}"
    left_out = f" Left out: {'; '.join(page.refused)}." if page.refused else ""
    return f"Scraped {page.url}{moved}.{left_out}"


def _cache(context: ToolContext, result: ToolResult[ScrapedPage]) -> None:
    page = result.value
    if context.memory is None or page is None:
        return
    entry = {"content": page.content, "timestamp": page.timestamp}

    def add(cached: dict[str, Any]) -> dict[str, Any]:
        # The newest last, and not without end.
        others = [(url, old) for url, old in cached.items() if url != page.url]
        return dict([*others[1 - _CACHED_PAGES :], (page.url, entry)])

    context.memory.update("short-term", "web:cache", add, default={})


scrape = web_scrape_tool()
"""The tool with its defaults."""
