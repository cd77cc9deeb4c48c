"""A headless browser as a resource: one for many calls, with a clean profile for each."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import threading
from collections.abc import Collection, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from weakincentives.contrib.tools.outbound import Door, OutboundRules, Resolve, system_resolve
from weakincentives.errors import MissingExtra, PageNotRead, ResourceError
from weakincentives.logs import get_logger
from weakincentives.retry import NETWORK, RATE_LIMIT, SERVER_ERROR, TIMEOUT

if TYPE_CHECKING:
    from playwright import async_api

T = TypeVar("T")

_logger = get_logger(__name__)

_PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_DOWNLOADS = (".cache/ms-playwright", "Library/Caches/ms-playwright", "AppData/Local/ms-playwright")
_START_SECONDS = 20
_HOW_TO_INSTALL = "Install the system's chromium, or run `playwright install chromium`"
_ARGUMENTS = (
    # Names are for the proxy to resolve: what tries to get around it finds nothing.
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    "--dns-prefetch-disable",
    # UDP does not go through a proxy, so there is none.
    "--disable-quic",
    "--webrtc-ip-handling-policy=disable_non_proxied_udp",
    "--force-webrtc-ip-handling-policy",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """What was found at a URL."""

    url: str
    """Where it was found in the end, after redirects."""
    title: str
    status: int
    content: str
    """The text of the element that was selected; without a selector the page as HTML."""
    refused: tuple[str, ...] = ()
    """What the page wanted to load and was not allowed to, in sentences."""


class Browser:
    """A headless Chromium, driven by Playwright (the extra ``web``). Bind it as a resource.

    It starts when it is first used, and again after a crash. Pages reach public addresses only,
    whatever they redirect to, load or name: see ``allow_hosts`` and ``allow_private``.

    Args:
        allow_hosts: Hosts that may be reached although their address is not public: names or
            addresses, with ``:port`` or without.
        allow_private: Let pages reach every address, this machine's own included.
        executable: The browser program; without it the system's Chromium, or else Playwright's.
        resolve: How names become addresses; the system's way if not given.
        max_bytes: How much one page may load.
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
        self._starts = False
        """Whether the program is known to start."""
        # A loop of its own: calls come from many, and what Playwright makes belongs to one.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._closed = False
        # Only touched on that loop.
        self._starting = asyncio.Lock()
        self._playwright: async_api.Playwright | None = None
        self._browser: async_api.Browser | None = None

    def is_available(self) -> bool:
        """Tell whether it can be used: False once it is closed, else True.

        Raises:
            MissingExtra: Playwright is not installed.
            ResourceError: There is no browser program, or it does not start. That is tried with
                ``--version``, until it has worked once.
        """
        _check_installed()
        if not self._starts and not self._closed:
            _check_starts(self._executable or _system_program() or _downloaded_program())
            self._starts = True
        return not self._closed

    async def read(
        self,
        url: str,
        *,
        selector: str | None = None,
        wait_for: float = 0.0,
        timeout: float = 30.0,
    ) -> Page:
        """Return what is at a URL; raises PageNotRead with the reason when that fails.

        Args:
            selector: A CSS selector; the text of the first element that matches is returned.
            wait_for: Seconds to wait after the page has loaded.
            timeout: Seconds for each step.
        """
        _check_installed()
        work = self._submit(self._read(url, selector, wait_for, timeout))
        return await asyncio.wrap_future(work)

    def close(self) -> None:
        """End the browser and all pages; they fail."""
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

    def _submit(self, work: Coroutine[Any, Any, T]) -> Any:
        with self._lock:
            if self._closed:
                work.close()
                raise ResourceError("the browser is closed")
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                # A daemon: a page that never ends must not keep the process alive.
                self._thread = threading.Thread(
                    target=self._loop.run_forever, name="wink-browser", daemon=True
                )
                self._thread.start()
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    # On the browser's loop

    async def _read(self, url: str, selector: str | None, wait_for: float, timeout: float) -> Page:
        from playwright import async_api

        browser = await self._started()
        door = Door(self._rules, max_bytes=self._max_bytes)
        context: async_api.BrowserContext | None = None
        try:
            context = await browser.new_context(
                # Loopback is not to go around the proxy, as it would by default.
                proxy={"server": await door.open(), "bypass": "<-loopback>"},
                accept_downloads=False,
                service_workers="block",
            )
            context.set_default_timeout(timeout * 1000)
            page = await context.new_page()
            context.on("page", _dismiss)
            reading = asyncio.create_task(_content(page, door, url, selector, wait_for))
            door.when_full = reading.cancel
            return await _ended(reading, door, url)
        except async_api.TimeoutError as error:
            raise PageNotRead(f"{url} took longer than {timeout:g} s", code=TIMEOUT) from error
        except async_api.Error as error:
            if not browser.is_connected():
                # Worth another try: it is started again.
                raise PageNotRead("The browser crashed", code=SERVER_ERROR) from error
            raise _not_read(url, door, error) from error
        finally:
            if context is not None:
                with suppress(async_api.Error):  # it may have crashed, or be closing already
                    await context.close()
            await door.close()

    async def _started(self) -> async_api.Browser:
        async with self._starting:
            if self._browser is not None and self._browser.is_connected():
                return self._browser
            from playwright import async_api

            if self._playwright is None:
                self._playwright = await async_api.async_playwright().start()
            try:
                self._browser = await self._playwright.chromium.launch(
                    executable_path=self._executable or _system_program(),
                    args=_ARGUMENTS,
                    # Root cannot use Chromium's sandbox.
                    chromium_sandbox=not _is_root(),
                )
            except async_api.Error as error:
                raise PageNotRead(
                    f"The browser did not start: {_first_line(error)}. {_HOW_TO_INSTALL}"
                ) from error
            return self._browser

    async def _shut_down(self) -> None:
        me = asyncio.current_task()
        pages = {task for task in asyncio.all_tasks() if task is not me and _is_ours(task)}
        for task in pages:
            task.cancel()
        if pages:
            await asyncio.wait(pages, timeout=10)
        if self._browser is not None:
            with suppress(Exception):  # it may have crashed
                await self._browser.close()
        if self._playwright is not None:
            await self._playwright.stop()
        await asyncio.get_running_loop().shutdown_default_executor()


async def _ended(reading: asyncio.Task[Page], door: Door, url: str) -> Page:
    try:
        return await reading
    except asyncio.CancelledError:
        if not door.is_full:  # nobody waits for it any more
            raise
        raise _too_much(url, door) from None
    finally:
        reading.cancel()


async def _content(
    page: async_api.Page, door: Door, url: str, selector: str | None, wait_for: float
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
        raise PageNotRead(f"{url} leads to {page.url}, which is not read")
    refused = tuple(dict.fromkeys(door.refused))
    return Page(
        url=page.url, title=await page.title(), status=status, content=content, refused=refused
    )


async def _dismiss(popup: async_api.Page) -> None:
    from playwright import async_api

    with suppress(async_api.Error):  # the page it belongs to may be gone
        await popup.close()


def _not_read(url: str, door: Door, error: Exception) -> PageNotRead:
    """Return what a browser's error means, by what the door knows about it."""
    text = _first_line(error)
    if door.is_full:
        return _too_much(url, door)
    if "ERR_SOCKS" in text and door.refused:
        return PageNotRead(f"{url} was not read: {door.refused[-1]}")
    if "ERR_SOCKS" in text and door.failed:
        return PageNotRead(f"{url} was not read: {door.failed[-1]}", code=NETWORK)
    if "Download is starting" in text:
        return PageNotRead(f"{url} is a download, not a page")
    is_network = "net::ERR_CONNECTION" in text or "net::ERR_EMPTY_RESPONSE" in text
    return PageNotRead(
        f"{url} was not read: {text}", code=NETWORK if is_network else "SCRAPE_FAILED"
    )


def _too_much(url: str, door: Door) -> PageNotRead:
    return PageNotRead(f"{url} loads more than {door.max_bytes} bytes")


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _system_program() -> str | None:
    found = (shutil.which(name) for name in _PROGRAMS)
    return next((path for path in found if path is not None), None)


def _downloaded_program() -> str | None:
    """Return the newest Chromium that ``playwright install`` has put where Playwright looks."""
    folder = os.environ.get("PLAYWRIGHT_BROWSERS_PATH")
    places = [Path(folder)] if folder else [Path.home() / each for each in _DOWNLOADS]
    found = [
        program
        for place in places
        for name in ("chrome", "chrome-headless-shell", "headless_shell", "Chromium", "chrome.exe")
        for program in place.glob(f"chromium*/**/{name}")
        if program.is_file()
    ]
    return str(max(found, key=lambda program: program.stat().st_mtime)) if found else None


def _check_installed() -> None:
    if find_spec("playwright") is None:
        raise MissingExtra("web", "playwright")


def _check_starts(program: str | None) -> None:
    if program is None:
        raise ResourceError(f"no browser program is installed. {_HOW_TO_INSTALL}")
    try:
        subprocess.run(
            [program, "--version"],
            check=True,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_START_SECONDS,
        )
    except FileNotFoundError as error:
        raise ResourceError(f"there is no program {program}. {_HOW_TO_INSTALL}") from error
    except (OSError, subprocess.SubprocessError) as error:
        raise ResourceError(f"{program} does not start: {error}") from error


def _is_root() -> bool:
    return hasattr(os, "geteuid") and os.geteuid() == 0


def _is_ours(task: asyncio.Task[Any]) -> bool:
    """Whether it reads a page; Playwright's own tasks are ended by stopping Playwright."""
    coroutine = task.get_coro()
    return getattr(coroutine, "__qualname__", "").startswith("Browser._read")
