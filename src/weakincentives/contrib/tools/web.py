"""``web:scrape``: the content of a web page, from a headless browser.

The browser is a resource: one for many calls, with a clean profile for each.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Collection, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from weakincentives.contrib.tools.outbound import (
    OutboundProxy,
    OutboundRules,
    Resolve,
    system_resolve,
)
from weakincentives.core.programs import (
    find_program,
    missing_program,
    reach_of_agents,
    safe_environment,
    script_in_reach,
)
from weakincentives.errors import MissingExtra, PageNotRead, ResourceError
from weakincentives.prompt.contracts import (
    MemoryEffect,
    PermissionPrecondition,
    ResourcePrecondition,
)
from weakincentives.prompt.tool import Tool, ToolContext
from weakincentives.retry import (
    NETWORK,
    RATE_LIMIT,
    SERVER_ERROR,
    TIMEOUT,
    RetryPolicies,
    RetryPolicy,
)
from weakincentives.tool_result import ToolResult

if TYPE_CHECKING:
    from playwright import async_api

_PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_HOW_TO_INSTALL = "Install the system's chromium, or run `playwright install chromium`"
_ARGUMENTS = (
    # Only the proxy resolves names.
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    "--dns-prefetch-disable",
    # UDP would bypass the proxy.
    "--disable-quic",
    "--webrtc-ip-handling-policy=disable_non_proxied_udp",
    "--force-webrtc-ip-handling-policy",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A page that was read."""

    url: str
    """After redirects."""
    title: str
    status: int
    content: str
    """The text of the selected element; without a selector the page as HTML."""
    refused: tuple[str, ...] = ()
    """Connections of the page that were refused, each with the reason."""


class Browser:
    """A headless Chromium, driven by Playwright (the extra ``web``). Bind it as a resource.

    It starts on first use, and again after a crash. Pages reach public addresses only,
    whatever they redirect to or load: see ``allow_hosts`` and ``allow_private``.

    Args:
        allow_hosts: Hosts that may be reached at any address: names or addresses, with ``:port``
            or without.
        allow_private: Let pages reach every address, including this machine.
        executable: The browser program; by default the system's Chromium, or else Playwright's.
        resolve: How to resolve names; by default with the system's resolver.
        max_bytes: Bytes that one page may load.
    """

    def __init__(
        self,
        *,
        allow_hosts: Collection[str] = (),
        allow_private: bool = False,
        executable: str | None = None,
        resolve: Resolve = system_resolve,
        max_bytes: int = 50_000_000,
    ) -> None:
        self._rules = OutboundRules(
            allow_hosts=allow_hosts, allow_private=allow_private, resolve=resolve
        )
        self._executable = executable
        self._max_bytes = max_bytes
        # A loop of its own: calls come from many loops, and Playwright's objects belong to one.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._closed = False
        # Used only on that loop.
        self._starting = asyncio.Lock()
        self._playwright: async_api.Playwright | None = None
        self._browser: async_api.Browser | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        """Those that read pages."""

    def is_available(self) -> bool:
        """Tell whether it can be used: False once it is closed.

        Raises:
            MissingExtra: Playwright is not installed.
            ResourceError: The browser program does not exist. Without one on the system,
                Playwright's own is looked for when the first page is read.
        """
        _check_installed()
        if self._executable is not None and find_program(self._executable) is None:
            raise ResourceError(f"{missing_program(self._executable)}. {_HOW_TO_INSTALL}")
        return not self._closed

    async def read(
        self,
        url: str,
        *,
        selector: str | None = None,
        wait_for: float = 0.0,
        timeout: float = 30.0,
    ) -> Page:
        """Return the page at a URL; raises PageNotRead with the reason.

        Args:
            selector: A CSS selector; the text of the first element that matches is returned.
            wait_for: Seconds to wait after the page has loaded.
            timeout: Seconds for each step.
        """
        _check_installed()
        work = self._submit(self._read(url, selector, wait_for, timeout))
        return await asyncio.wrap_future(work)

    def close(self) -> None:
        """Close the browser; pages that are being read fail."""
        with self._lock:
            self._closed = True
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
        if loop is None or thread is None:
            return
        ended = asyncio.run_coroutine_threadsafe(self._shut_down(), loop)
        try:
            ended.result(timeout=120)
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join(timeout=60)
            if not thread.is_alive():
                loop.close()

    def _submit(self, work: Coroutine[Any, Any, Page]) -> Any:
        with self._lock:
            if self._closed:
                work.close()
                raise ResourceError("the browser is closed")
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                # A daemon thread: an endless page must not keep the process alive.
                self._thread = threading.Thread(
                    target=self._loop.run_forever, name="wink-browser", daemon=True
                )
                self._thread.start()
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    # On the browser's loop

    async def _read(self, url: str, selector: str | None, wait_for: float, timeout: float) -> Page:
        from playwright import async_api

        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        proxy = OutboundProxy(self._rules, max_bytes=self._max_bytes)
        context: async_api.BrowserContext | None = None
        browser = await self._started()
        try:
            context = await browser.new_context(
                # Loopback would bypass the proxy by default.
                proxy={"server": await proxy.open(), "bypass": "<-loopback>"},
                accept_downloads=False,
                service_workers="block",
            )
            context.set_default_timeout(timeout * 1000)
            page = await context.new_page()
            context.on("page", _dismiss)
            reading = asyncio.create_task(_content(page, proxy, url, selector, wait_for))
            proxy.when_full = reading.cancel
            try:
                return await reading
            except asyncio.CancelledError:
                if not proxy.is_full:  # the call was cancelled, or the browser is closing
                    raise
                raise _too_much(url, proxy) from None
            finally:
                reading.cancel()
        except async_api.TimeoutError as error:
            raise PageNotRead(f"{url} took longer than {timeout:g} s", code=TIMEOUT) from error
        except async_api.Error as error:
            if not browser.is_connected():
                # Worth a retry: the browser is started again.
                raise PageNotRead("The browser crashed", code=SERVER_ERROR) from error
            raise _not_read(url, proxy, error) from error
        finally:
            if context is not None:
                with suppress(async_api.Error):  # it may have crashed, or be closing already
                    await context.close()
            await proxy.close()

    async def _started(self) -> async_api.Browser:
        async with self._starting:
            if self._browser is not None and self._browser.is_connected():
                return self._browser
            from playwright import async_api

            if self._playwright is None:
                if why := _planted_driver():
                    raise PageNotRead(why)
                self._playwright = await async_api.async_playwright().start()
            try:
                self._browser = await self._playwright.chromium.launch(
                    executable_path=_program(self._executable, self._playwright),
                    env={**safe_environment()},
                    args=_ARGUMENTS,
                    # Root cannot use Chromium's sandbox.
                    chromium_sandbox=not (hasattr(os, "geteuid") and os.geteuid() == 0),
                )
            except async_api.Error as error:
                raise PageNotRead(
                    f"The browser did not start: {_first_line(error)}. {_HOW_TO_INSTALL}"
                ) from error
            return self._browser

    async def _shut_down(self) -> None:
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=10)
        if self._browser is not None:
            with suppress(Exception):  # it may have crashed
                await self._browser.close()
        if self._playwright is not None:
            await self._playwright.stop()
        await asyncio.get_running_loop().shutdown_default_executor()


def _planted_driver() -> str | None:
    """Return why Playwright's driver is not started: it takes its Node from our environment."""
    node = os.environ.get("PLAYWRIGHT_NODEJS_PATH")
    if node and find_program(node) is None:
        return f"PLAYWRIGHT_NODEJS_PATH: {missing_program(node)}"
    options = os.environ.get("NODE_OPTIONS", "").split()
    why = script_in_reach("node", options, os.getcwd())
    return None if why is None else f"NODE_OPTIONS: {why}"


def _program(executable: str | None, playwright: async_api.Playwright) -> str | None:
    """Return the browser to start; None for Playwright's own."""
    if executable is not None:
        found = find_program(executable)
        if found is None:
            raise PageNotRead(f"{missing_program(executable)}. {_HOW_TO_INSTALL}")
        return found
    found = next(filter(None, map(find_program, _PROGRAMS)), None)
    own = playwright.chromium.executable_path
    if found is None and (why := reach_of_agents(own)):
        raise PageNotRead(f"{own} is not used: {why}. {_HOW_TO_INSTALL}")
    return found


async def _content(
    page: async_api.Page, proxy: OutboundProxy, url: str, selector: str | None, wait_for: float
) -> Page:
    response = await page.goto(url)
    status = 0 if response is None else response.status
    if status >= 400:
        code = RATE_LIMIT if status == 429 else SERVER_ERROR if status >= 500 else "SCRAPE_FAILED"
        raise PageNotRead(f"{page.url} answered with status {status}", code=code)
    if wait_for:
        await page.wait_for_timeout(wait_for * 1000)
    if selector is None:
        content = await page.content()
    else:
        element = await page.query_selector(f"css={selector}")
        if element is None:
            raise PageNotRead(f"No element of {page.url} matches the selector {selector!r}")
        content = await element.text_content() or ""
    if not page.url.startswith(("http://", "https://")):
        raise PageNotRead(f"{url} leads to {page.url}, which is not allowed")
    title = await page.title()
    return Page(
        url=page.url, title=title, status=status, content=content, refused=tuple(proxy.refused)
    )


async def _dismiss(popup: async_api.Page) -> None:
    from playwright import async_api

    with suppress(async_api.Error):  # its page may be closed already
        await popup.close()


def _not_read(url: str, proxy: OutboundProxy, error: Exception) -> PageNotRead:
    """Return the meaning of a browser error, with the reasons that the proxy recorded."""
    text = _first_line(error)
    if proxy.is_full:
        return _too_much(url, proxy)
    if "ERR_SOCKS" in text and proxy.refused:
        return PageNotRead(f"{url} was not read: {proxy.refused[-1]}")
    if "ERR_SOCKS" in text and proxy.failed:
        return PageNotRead(f"{url} was not read: {proxy.failed[-1]}", code=NETWORK)
    if "Download is starting" in text:
        return PageNotRead(f"{url} is a download, not a page")
    is_network = "net::ERR_CONNECTION" in text or "net::ERR_EMPTY_RESPONSE" in text
    return PageNotRead(
        f"{url} was not read: {text}", code=NETWORK if is_network else "SCRAPE_FAILED"
    )


def _too_much(url: str, proxy: OutboundProxy) -> PageNotRead:
    return PageNotRead(f"{url} loads more than {proxy.max_bytes} bytes")


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _check_installed() -> None:
    if find_spec("playwright") is None:
        raise MissingExtra("web", "playwright")


# The tool


_CACHED_PAGES = 100


@dataclass(frozen=True, slots=True)
class ScrapeParams:
    url: Annotated[str, Field(pattern="^https?://")]
    """URL to scrape."""
    selector: str | None = None
    """CSS selector for content extraction: the text of the first element that matches. Without
    one, the HTML of the whole page."""
    wait_for: Annotated[float, Field(ge=0, le=20)] = 0.0
    """Seconds to wait before scraping, for pages that load late."""


@dataclass(frozen=True, slots=True)
class ScrapedPage:
    """The content of a page, truncated to fit the context of a model."""

    url: str
    """The requested URL."""
    content: str
    timestamp: float
    final_url: str = ""
    """Where redirects led."""
    title: str = ""
    total_chars: int = 0
    """Characters before truncation."""
    refused: tuple[str, ...] = ()
    """Connections of the page that were refused, each with the reason."""

    @property
    def is_cut(self) -> bool:
        return self.total_chars > len(self.content)

    def render(self) -> str:
        if not self.is_cut:
            return self.content
        return (
            f"{self.content}\n[Truncated: the first {len(self.content)} of "
            f"{self.total_chars} characters. Use a selector to get a part.]"
        )


def web_scrape_tool(
    *,
    max_content: int = 100_000,
    timeout: float = 30.0,
    retry: RetryPolicy = RetryPolicies.STANDARD,
) -> Tool[ScrapeParams, ScrapedPage]:
    """Return the tool ``scrape``, for the namespace ``web``.

    It needs a ``Browser`` and the permission ``web:scrape``. The page is cached in the short-term
    memory, if there is one. Its reach is ``reversible``: it only reads from outside.

    Args:
        max_content: Characters of a page that the model gets.
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
                operation="write",
                key="web:cache",
                apply=_cache,
                rollback=_uncache,
            )
        ],
    )


def _has_browser(context: ToolContext) -> bool:
    browser = context.resources.find(Browser)
    if browser is None:
        raise LookupError("no Browser is bound: resources={Browser: Binding(Browser, ...)}")
    return browser.is_available()


def _summary(page: ScrapedPage) -> str:
    moved = "" if page.final_url == page.url else f", which led to {page.final_url}"
    left_out = f" Refused: {'; '.join(page.refused)}." if page.refused else ""
    return f"Scraped {page.url}{moved}.{left_out}"


def _cache(context: ToolContext, result: ToolResult[ScrapedPage]) -> None:
    page = result.value
    if context.memory is None or page is None:
        return
    entry = {"content": page.content, "timestamp": page.timestamp}

    def add(cached: dict[str, Any]) -> dict[str, Any]:
        # The newest last, and a limited number.
        others = [(url, old) for url, old in cached.items() if url != page.url]
        return dict([*others[1 - _CACHED_PAGES :], (page.url, entry)])

    context.memory.update("short-term", "web:cache", add, default={})


def _uncache(context: ToolContext) -> None:
    """Remove the newest entry: the one that the call has added."""
    if context.memory is not None:
        context.memory.update(
            "short-term", "web:cache", lambda cached: dict([*cached.items()][:-1]), default={}
        )


scrape = web_scrape_tool()
"""The tool with its defaults."""
