"""The debugger's page in a real browser, and its server in a process of its own."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
needs_browser = [
    pytest.mark.heavy,
    pytest.mark.skipif(
        CHROMIUM is None or any(find_spec(name) is None for name in ("playwright", "starlette")),
        reason="needs Chromium and the extras 'web' and 'debug'",
    ),
]
_SERVER = """
import sys
from pathlib import Path
from weakincentives.debugger import serve
serve(Path(sys.argv[1]), on_ready=lambda link: print(link, flush=True))
"""
# What the page's own policy refused, and how far things jumped without anybody touching them.
_WATCH = """
window.refused = [];
addEventListener("securitypolicyviolation", (e) => window.refused.push(e.violatedDirective));
window.jumps = 0;
new PerformanceObserver((list) => {
  for (const each of list.getEntries()) if (!each.hadRecentInput) window.jumps += each.value;
}).observe({ type: "layout-shift", buffered: true });
"""


@contextmanager
def chromium() -> Generator[Browser]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        flags = ["quic", "background-networking", "component-update", "sync"]
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM,
            args=["--no-sandbox", "--no-first-run", *(f"--disable-{each}" for each in flags)],
        )
        yield browser
        browser.close()


@contextmanager
def served(workspace: Path) -> Generator[str]:
    """Serve the debugger of a directory; gives the link."""
    with subprocess.Popen(
        [sys.executable, "-c", _SERVER, str(workspace)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


class Tab:
    """A page of the debugger, and what a person does there."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.problems: list[str] = []
        """Errors, dialogs, and requests to other servers."""
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("dialog", self._dismiss)
        page.on("request", self._note)
        page.on("console", lambda m: m.type == "error" and self.problems.append(m.text))
        page.add_init_script(_WATCH)

    def _dismiss(self, dialog: Any) -> None:
        self.problems.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def _note(self, request: Any) -> None:
        if not request.url.startswith(("http://127.0.0.1:", "data:", "file:")):
            self.problems.append(f"request: {request.url}")

    def check(self) -> None:
        """Nothing went wrong, and the page asked for nothing that its policy refuses."""
        refused = self.page.evaluate("() => window.refused")
        assert (self.problems, refused) == ([], []), (self.problems, refused)

    def keys(self, *names: str) -> None:
        for name in names:
            self.page.keyboard.press(name)

    def find(self, role: Any, name: str | None = None, **more: Any) -> Locator:
        return self.page.get_by_role(role, name=name, **more)

    def tab(self, name: str) -> None:
        self.find("tab", name).click()

    def go(self, address: str) -> None:
        self.page.evaluate("(address) => { location.hash = address }", address)

    def open_run(self, title: str) -> None:
        self.page.get_by_role("link").filter(has_text=title).first.click()
        self.heading(title).wait_for()

    def heading(self, text: str) -> Locator:
        return self.page.get_by_role("heading").filter(has_text=text).first

    @property
    def call(self) -> Locator:
        """The details of the chosen call."""
        return self.page.locator(".call-head h2")

    @property
    def chosen(self) -> Locator:
        """The chosen call in the timeline."""
        return self.page.locator(".timeline [aria-selected=true]")

    @property
    def lines(self) -> Locator:
        """The lines of the open file or slice that are in sight."""
        return self.page.locator(".lines .line .text")

    @property
    def blame(self) -> Locator:
        return self.page.get_by_role("complementary", name="Blame")


@contextmanager
def opened(browser: Browser, link: str, **options: Any) -> Generator[Tab]:
    """Open a link; afterwards nothing may have gone wrong."""
    with browser.new_context(**{"viewport": {"width": 1280, "height": 800}} | options) as context:
        context.set_default_timeout(60_000)  # a shared machine stalls
        tab = Tab(context.new_page())
        tab.page.goto(link)
        if link.startswith("http"):  # it leads to the page
            tab.page.locator("#app").wait_for(state="attached")
        yield tab
        tab.check()
