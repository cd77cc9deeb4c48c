from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from importlib.util import find_spec
from pathlib import Path

import pytest
from pages import Site, answer, redirect

from weakincentives.contrib.tools import Browser, scrape, web_scrape_tool
from weakincentives.contrib.tools.web import ScrapedPage
from weakincentives.errors import install_command
from weakincentives.prompt import ToolResult
from weakincentives.resources import Binding
from weakincentives.retry import RetryPolicies
from weakincentives.runtime import MemoryManager, Permissions, ToolInvoked, ToolRegistry

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
needs_browser = [
    pytest.mark.heavy,
    pytest.mark.skipif(
        CHROMIUM is None or find_spec("playwright") is None,
        reason="needs Chromium and the extra 'web'",
    ),
]


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site()
    yield site
    site.close()


@pytest.fixture
def private() -> Iterator[Site]:
    """A site that no page may reach."""
    site = Site()
    site.pages["/"] = "<p id=secret>secret</p>"
    yield site
    site.close()


class Agent:
    """A registry that may scrape, and may reach the hosts it is told."""

    def __init__(self, browser: Browser, *, tool=scrape, permission: str = "web:scrape") -> None:
        self.permissions = Permissions()
        self.memory = MemoryManager()
        self.tools = ToolRegistry(
            resources={
                Browser: Binding(Browser, lambda r: browser),
                MemoryManager: self.memory,
                Permissions: self.permissions,
            }
        )
        self.tools.register(tool, namespace="web")
        self.permissions.grant(permission, session=self.tools.session)

    def scrape(self, url: str, **arguments: object) -> ToolResult:
        return self.tools.execute("web:scrape", {"url": url, **arguments})


@pytest.fixture
def agent(site: Site) -> Iterator[Agent]:
    agent = Agent(Browser(allow_hosts={site.host}), tool=web_scrape_tool(retry=RetryPolicies.NONE))
    yield agent
    agent.tools.close()


# Without a browser

UNTRIED = web_scrape_tool(retry=RetryPolicies.NONE)


def test_the_parameters_are_those_of_the_protocol():
    properties = scrape.parameters["properties"]

    assert scrape.parameters["required"] == ["url"]
    assert properties["url"]["pattern"] == "^https?://"
    assert set(properties) == {"url", "selector", "wait_for"}
    assert (scrape.timeout, scrape.retry) == (30.0, RetryPolicies.STANDARD)


@pytest.mark.parametrize("url", ["file:///etc/passwd", "data:text/html,x", "ftp://a/", "about:x"])
def test_only_http_is_taken(url: str):
    result = Agent(Browser()).scrape(url)

    assert result.failure.code == "INVALID_ARGUMENTS"
    assert "^https?://" in result.message


def test_a_missing_extra_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "playwright", None)

    result = Agent(Browser()).scrape("http://example.com/")

    assert result.failure.code == "PRECONDITION_FAILED"
    assert install_command("web") in result.message
    assert result.failure.suggestions == ("Browser must be available",)


@pytest.mark.skipif(find_spec("playwright") is None, reason="needs the extra 'web'")
def test_a_browser_program_that_does_not_exist_is_not_available():
    """Known before anything is run, with the reason and what to do."""
    agent = Agent(Browser(executable="/nowhere/chromium"))

    result = agent.scrape("http://127.0.0.1/")

    assert result.failure is not None
    assert result.failure.code == "PRECONDITION_FAILED"
    assert "Browser must be available" in result.message
    assert "there is no program /nowhere/chromium" in result.message


@pytest.mark.skipif(find_spec("playwright") is None, reason="needs the extra 'web'")
def test_a_browser_that_does_not_start_is_a_failure_with_the_reason():
    agent = Agent(Browser(executable=shutil.which("false")), tool=UNTRIED)

    result = agent.scrape("http://127.0.0.1/")
    agent.tools.close()

    assert result.failure is not None
    assert "The browser did not start" in result.message
    assert "playwright install chromium" in result.message


def test_the_cache_keeps_the_newest_hundred_pages():
    agent = Agent(Browser())
    for number in [*range(101), 50]:
        page = ScrapedPage(url=f"http://x/{number}", content=str(number), timestamp=0.0)
        agent.tools.apply_effects("web:scrape", ToolResult.ok(page))

    cached = agent.memory.read("short-term", "web:cache")

    assert len(cached) == 100
    assert "http://x/0" not in cached
    assert list(cached)[-2:] == ["http://x/100", "http://x/50"]


def test_without_the_permission_nothing_is_asked_for(site: Site):
    agent = Agent(Browser(allow_private=True), permission="web:other")

    result = agent.scrape(site.url())

    assert result.failure.code == "PRECONDITION_FAILED"
    assert "Web scraping must be allowed" in result.failure.suggestions
    assert site.asked == []


# With a real one


class TestScraping:
    pytestmark = needs_browser

    def test_a_page_comes_as_its_scripts_left_it(self, agent: Agent, site: Site):
        site.pages["/"] = "<title>T</title><script>document.write('<b>made ' + 1 + '</b>')</script>"

        result = agent.scrape(site.url())

        assert result.success, result.message
        assert "<b>made 1</b>" in result.value.content
        assert (result.value.url, result.value.title) == (site.url(), "T")
        assert result.render().startswith(f"Scraped {site.url()}.")
        [record] = agent.tools.session[ToolInvoked].all()
        assert record.tool_name == "web__scrape"

    def test_a_selector_gives_the_text_of_the_first_match(self, agent: Agent, site: Site):
        site.pages["/"] = "<p class=x>one <i>two</i></p><p class=x>three</p>"

        assert agent.scrape(site.url(), selector="p.x").value.content == "one two"
        missed = agent.scrape(site.url(), selector="table")
        assert missed.failure.code == "SCRAPE_FAILED"
        assert missed.failure.recoverable
        assert missed.failure.suggestions == ("Check URL validity", "Verify page accessibility")
        assert "'table'" in missed.message

    def test_waiting_lets_a_page_go_on(self, agent: Agent, site: Site):
        site.pages["/"] = (
            "<p>early</p><script>setTimeout(() => {document.querySelector('p').textContent = "
            "'late'}, 100)</script>"
        )

        assert agent.scrape(site.url(), selector="p", wait_for=3).value.content == "late"

    def test_what_was_scraped_is_cached_and_what_failed_is_not(self, agent: Agent, site: Site):
        site.pages["/"] = "<p>one</p>"
        agent.scrape(site.url(), selector="p")
        agent.scrape(site.url("/missing"))

        cached = agent.memory.read("short-term", "web:cache")
        assert list(cached) == [site.url()]
        assert cached[site.url()]["content"] == "one"

    def test_a_long_page_is_cut_and_says_so(self, site: Site):
        site.pages["/"] = f"<p>{'x' * 5000}</p>"
        agent = Agent(Browser(allow_hosts={site.host}), tool=web_scrape_tool(max_content=1000))
        with agent.tools:
            result = agent.scrape(site.url(), selector="p")

        assert result.value.content == "x" * 1000
        assert "first 1000 of 5000 characters" in result.render()

    @pytest.mark.parametrize(
        ("status", "code"), [(404, "SCRAPE_FAILED"), (429, "RATE_LIMIT"), (503, "SERVER_ERROR")]
    )
    def test_an_error_page_is_a_failure(self, agent: Agent, site: Site, status: int, code: str):
        site.pages["/"] = lambda request: answer(request, "sorry", status)

        result = agent.scrape(site.url())

        assert result.failure.code == code
        assert f"status {status}" in result.message

    def test_what_passes_is_tried_again(self, site: Site):
        def unsteady(request: BaseHTTPRequestHandler) -> None:
            answer(request, "<p>here</p>", 503 if len(site.asked) < 2 else 200)

        site.pages["/"] = unsteady
        agent = Agent(Browser(allow_hosts={site.host}))
        with agent.tools:
            result = agent.scrape(site.url(), selector="p")

        assert result.value.content == "here"
        assert result.metadata.attempts == 2

    def test_nobody_there_is_a_network_failure(self, site: Site):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        agent = Agent(
            Browser(allow_hosts={"127.0.0.1"}), tool=web_scrape_tool(retry=RetryPolicies.NONE)
        )
        with agent.tools:
            result = agent.scrape(f"http://127.0.0.1:{port}/")

        assert result.failure.code == "NETWORK"

    def test_a_page_that_never_ends_times_out_and_the_next_call_works(self, site: Site):
        site.pages["/"] = "<script>while (true) {}</script>"
        site.pages["/good"] = "<p>good</p>"
        browser = Browser(allow_hosts={site.host})
        agent = Agent(browser, tool=web_scrape_tool(timeout=3, retry=RetryPolicies.NONE))
        patient = Agent(browser, tool=web_scrape_tool(timeout=240, retry=RetryPolicies.NONE))
        with agent.tools, patient.tools:
            assert agent.scrape(site.url()).failure.code == "TIMEOUT"
            assert patient.scrape(site.url("/good"), selector="p").value.content == "good"

    def test_one_browser_serves_calls_beside_each_other(self, agent: Agent, site: Site):
        """Each with a profile of its own: no cookie goes from one to another."""
        for name in "abcd":
            site.pages[f"/{name}"] = (
                f"<p></p><script>document.cookie = 'seen={name}'; "
                "document.querySelector('p').textContent = document.cookie</script>"
            )
        calls = [("web:scrape", {"url": site.url(f"/{n}"), "selector": "p"}) for n in "abcd"]

        results = agent.tools.execute_tools(calls)

        assert [r.value.content for r in results] == [f"seen={n}" for n in "abcd"]
        assert len(agent.memory.read("short-term", "web:cache")) == 4

    def test_a_browser_that_crashed_is_started_again(self, site: Site):
        site.pages["/"] = "<p>here</p>"
        agent = Agent(Browser(allow_hosts={site.host}))
        with agent.tools:
            assert agent.scrape(site.url()).success
            [browser] = _chromiums()
            os.kill(browser, signal.SIGKILL)

            assert agent.scrape(site.url(), selector="p").value.content == "here"
            assert _chromiums() not in ([], [browser])

    def test_closing_the_registry_ends_the_browser(self, agent: Agent, site: Site):
        site.pages["/"] = "<p>here</p>"
        agent.scrape(site.url())
        assert _chromiums()

        agent.tools.close()

        assert not _chromiums()


class TestWhatPagesMayReach:
    pytestmark = needs_browser

    @pytest.mark.parametrize(
        "host", ["127.0.0.1", "localhost", "127.1", "0x7f000001", "2130706433", "0.0.0.0"]
    )
    def test_this_machine_is_refused_unless_it_is_allowed(self, private: Site, host: str):
        agent = Agent(Browser())
        with agent.tools:
            result = agent.scrape(private.url(host=host))

        assert result.failure.code == "SCRAPE_FAILED"
        assert "is not a public address and is not allowed" in result.message
        assert private.asked == []

    @pytest.mark.parametrize("host", ["[::1]", "[::ffff:127.0.0.1]", "169.254.169.254", "10.0.0.1"])
    def test_other_inner_addresses_are_refused(self, private: Site, host: str):
        agent = Agent(Browser())
        with agent.tools:
            result = agent.scrape(private.url(host=host))

        assert "is not a public address and is not allowed" in result.message

    def test_everything_is_reached_when_that_is_asked_for(self, private: Site):
        agent = Agent(Browser(allow_private=True))
        with agent.tools:
            assert agent.scrape(private.url(), selector="#secret").value.content == "secret"

    def test_a_redirect_leads_to_no_address_that_is_not_allowed(
        self, agent: Agent, site: Site, private: Site
    ):
        site.pages["/"] = redirect(site.url("/second"))
        site.pages["/second"] = redirect(private.url())

        result = agent.scrape(site.url())

        assert not result.success
        assert private.host in result.message
        assert (site.asked, private.asked) == (["/", "/second"], [])

    def test_a_script_cannot_lead_there_either(self, agent: Agent, site: Site, private: Site):
        site.pages["/"] = f"<p>here</p><script>location = {private.url()!r}</script>"

        agent.scrape(site.url(), wait_for=0.5)

        assert "/" in site.asked
        assert private.asked == []

    def test_subresources_are_left_out_and_named(self, agent: Agent, site: Site, private: Site):
        url, socket_url = private.url(), private.url().replace("http", "ws")
        site.pages["/"] = (
            f"<p>here</p><img src={url}><iframe src={url}></iframe><script src={url}></script>"
            f"<link rel=stylesheet href={url}><link rel=preconnect href={url}>"
            f"<script>fetch({url!r}).catch(() => 0); new WebSocket({socket_url!r});"
            f"new Worker({site.url('/worker.js')!r}); navigator.sendBeacon({url!r}, 'x');"
            "</script>"
        )
        site.pages["/worker.js"] = lambda request: answer(
            request, f"fetch({url!r}, {{mode: 'no-cors'}})", Content_Type="text/javascript"
        )

        result = agent.scrape(site.url(), selector="p", wait_for=1)

        assert result.value.content == "here"
        assert private.host in result.value.refused[0]
        assert f"Refused: {private.host}" in result.message
        assert private.asked == []

    def test_a_name_that_is_at_an_inner_address_is_refused(self, private: Site):
        """Whatever a name server says: what counts is where the connection would go."""

        async def resolve(host: str, port: int) -> list[str]:
            return ["127.0.0.1"]

        agent = Agent(Browser(resolve=resolve))
        with agent.tools:
            result = agent.scrape(private.url(host="harmless.example"))

        assert "harmless.example:" in result.message
        assert "is at 127.0.0.1" in result.message
        assert private.asked == []

    def test_a_name_server_that_changes_its_mind_gains_nothing(self, private: Site):
        """Asked once for a connection: what it said is what was looked at and connected to."""
        asked: list[str] = []

        async def resolve(host: str, port: int) -> list[str]:
            asked.append(host)
            # The first is public in form and unreachable here; later ones are this machine's.
            return ["192.0.1.1" if len(asked) == 1 else "127.0.0.1"]

        agent = Agent(Browser(resolve=resolve), tool=web_scrape_tool(timeout=15))
        with agent.tools:
            results = [agent.scrape(private.url(host="flip.example")) for _ in range(2)]

        assert not any(result.success for result in results)
        assert private.asked == []

    def test_an_allowed_host_is_allowed_at_its_port_only(self, site: Site, private: Site):
        async def resolve(host: str, port: int) -> list[str]:
            return ["127.0.0.1"]

        site.pages["/"] = "<p>here</p>"
        agent = Agent(Browser(allow_hosts={f"intranet.example:{site.port}"}, resolve=resolve))
        with agent.tools:
            here = agent.scrape(site.url(host="Intranet.example"), selector="p")
            there = agent.scrape(private.url(host="intranet.example"))

        assert here.success, here.message
        assert not there.success
        assert private.asked == []

    def test_no_datagram_gets_out(self, agent: Agent, site: Site):
        """WebRTC would go around a proxy."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stun:
            stun.bind(("127.0.0.1", 0))
            stun.setblocking(False)
            server = f"stun:127.0.0.1:{stun.getsockname()[1]}"
            site.pages["/"] = (
                f"<p>no</p><script>const c = new RTCPeerConnection({{iceServers: [{{urls: "
                f"{server!r}}}]}}); c.createDataChannel('x'); c.createOffer().then(o => "
                "c.setLocalDescription(o)).then(() => {document.querySelector('p').textContent = "
                "'tried'})</script>"
            )
            result = agent.scrape(site.url(), selector="p", wait_for=4)

            assert result.value.content == "tried"
            with pytest.raises(BlockingIOError):
                stun.recv(100)

    def test_a_download_is_no_page(self, agent: Agent, site: Site):
        site.pages["/"] = lambda request: answer(
            request, "data", Content_Disposition="attachment; filename=x.bin"
        )

        result = agent.scrape(site.url())

        assert result.failure.code == "SCRAPE_FAILED"
        assert "is a download" in result.message

    def test_popups_and_other_schemes_lead_nowhere(
        self, agent: Agent, site: Site, private: Site, tmp_path: Path
    ):
        (tmp_path / "x.html").write_text("<p>file</p>")
        site.pages["/to-file"] = redirect((tmp_path / "x.html").as_uri())
        site.pages["/"] = (
            f"<p>here</p><script>window.open({private.url()!r});"
            f"setTimeout(() => {{location = 'data:text/html,<p>data</p>'}}, 50)</script>"
        )

        assert agent.scrape(site.url("/to-file")).failure.code == "SCRAPE_FAILED"
        assert agent.scrape(site.url(), selector="p", wait_for=0.5).value.content == "here"
        assert private.asked == []

    def test_a_page_loads_only_so_much(self, site: Site):
        site.pages["/"] = "x" * 300_000
        agent = Agent(Browser(allow_hosts={site.host}, max_bytes=100_000))
        with agent.tools:
            result = agent.scrape(site.url())

        assert result.failure.code == "SCRAPE_FAILED"
        assert "more than 100000 bytes" in result.message


def _chromiums() -> list[int]:
    """The browsers that were started below this process: their own processes, not their helpers."""
    parents: dict[int, int] = {}
    names: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                pid = int(entry.name)
                parents[pid] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                names[pid] = (entry / "cmdline").read_text().replace("\0", " ")
            except (OSError, ValueError):
                continue

    def is_below(pid: int) -> bool:
        while pid in parents:
            pid = parents[pid]
            if pid == os.getpid():
                return True
        return False

    return [
        pid
        for pid, name in names.items()
        if "--remote-debugging-pipe" in name and "--type=" not in name and is_below(pid)
    ]
