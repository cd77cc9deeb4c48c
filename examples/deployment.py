"""A release that is rolled back when its smoke test fails, then fixed, deployed and announced.

What is outside, the cluster, is a real HTTP server on this machine. Run it with
`.venv/bin/python examples/deployment.py`.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import weakincentives as wink
from weakincentives.adapters import RunConfig, ScriptedAdapter, Turn, calls
from weakincentives.prompt import (
    Effect,
    EveryCalls,
    NotificationEffect,
    SequentialDependencyPolicy,
    ToolResult,
)
from weakincentives.runtime import EventBus, ToolInvoked

# Outside: a cluster that runs the newest release it was given, and the cache in front of it.


class ClusterServer(BaseHTTPRequestHandler):
    releases: ClassVar[dict[str, dict[str, object]]] = {}  # by name, the newest last
    has_run: ClassVar[list[object]] = []

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.releases[self.path] = json.loads(body)
        self.reply(201, f"{self.live()['version']} is live")

    def do_DELETE(self) -> None:
        self.releases.pop(self.path, None)  # one that never arrived is gone, too
        self.reply(200, f"{self.live()['version']} is live")

    def do_GET(self) -> None:
        live = self.live()
        if live["workers"]:
            self.reply(200, f"{live['version']} answers")
        else:
            self.reply(503, "no workers")

    def do_POST(self) -> None:
        self.reply(504, "no answer from the cache")  # it may have been purged all the same

    def live(self) -> dict[str, object]:
        newest = list(self.releases.values())[-1]
        if newest["version"] != self.has_run[-1]:
            self.has_run.append(newest["version"])
        return newest

    def reply(self, status: int, text: str) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        pass  # the example prints what matters


@dataclass(frozen=True)
class Cluster:
    """The way to it, as a resource that tools ask for."""

    port: int

    def ask(self, method: str, path: str, body: str | None = None) -> str:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, body)
            response = connection.getresponse()
            text = response.read().decode()
        finally:
            connection.close()
        if response.status >= 400:
            raise ConnectionError(f"{response.status}: {text}")
        return text


@contextmanager
def running_cluster() -> Generator[Cluster]:
    ClusterServer.releases = {"/releases/first": {"version": "1.0", "workers": 4}}
    ClusterServer.has_run = ["1.0"]
    server = ThreadingHTTPServer(("127.0.0.1", 0), ClusterServer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield Cluster(server.server_port)
    finally:
        server.shutdown()
        server.server_close()


# The tools. What each changes here is undone when it fails; how far each reaches, it says.


@wink.tool(reach="reversible")
def configure(workers: int, *, context: wink.ToolContext) -> str:
    """Set how many workers serve the shop."""
    context.filesystem.write("shop.json", json.dumps({"version": "1.1", "workers": workers}))
    return f"{workers} workers"


@wink.tool(reach="reversible")
def build(*, context: wink.ToolContext) -> str:
    """Build the release."""
    context.filesystem.write("dist/release.json", context.filesystem.read("shop.json"))
    return "Built dist/release.json"


@wink.tool(reach="read")
def run_tests(*, context: wink.ToolContext) -> str:
    """Test the release before anybody sees it."""
    release = json.loads(context.filesystem.read("dist/release.json"))
    if release["version"] == "1.0":
        raise ValueError("version 1.0 is out already")
    return "1 passed"


def take_back(context: wink.ToolContext) -> None:
    """The compensation: called when deploy fails, however far it came."""
    context.resources.get(Cluster).ask("DELETE", f"/releases/{context.idempotency_key}")


@wink.tool(
    reach="compensable",
    effects=[Effect(description="go back", apply=lambda: None, rollback=take_back)],
)
def deploy(*, context: wink.ToolContext) -> str:
    """Put the release into production, and try it there."""
    cluster = context.resources.get(Cluster)
    context.filesystem.write("deployed.txt", context.idempotency_key)
    # The key is the same however often the call is tried: the cluster cannot run it twice.
    release = context.filesystem.read("dist/release.json")
    cluster.ask("PUT", f"/releases/{context.idempotency_key}", release)
    try:
        return cluster.ask("GET", "/health")
    except ConnectionError as error:
        raise ValueError(f"The smoke test failed with {error}") from error


@wink.tool(reach="irreversible")
def purge_cache(*, context: wink.ToolContext) -> ToolResult[str]:
    """Make visitors see the new release at once."""
    try:
        return ToolResult.ok(context.resources.get(Cluster).ask("POST", "/purge"))
    except ConnectionError as error:
        return ToolResult.error(f"The cache could not be purged: {error}")


def announced(result: ToolResult[str]) -> str | None:
    return result.value


@wink.tool(
    reach="reversible",
    # Words cannot be taken back, so they leave after the commit, when nothing can fail any more.
    effects=[NotificationEffect(event="release:announced", payload=announced)],
)
def announce(text: str, *, context: wink.ToolContext) -> str:
    """Tell everybody what is new."""
    context.filesystem.append("news.md", f"{text}\n")
    live = context.resources.get(Cluster).ask("GET", "/health").split()[0]
    if live not in text:
        raise ValueError(f"Say which version it is: {live} is live")
    return text


# What the model is told after a call that failed: what is as it was, and what may not be.


class WhatIsLeft:
    name = "what_is_left"
    trigger = EveryCalls(1)

    def feedback(self, context: wink.ToolContext) -> str | None:
        record = context.session[ToolInvoked].latest()
        if record is None or record.success or not record.ran:
            return None
        known = record.result.metadata
        undone = f"Undone: {', '.join(known.undone)}."
        left = "; ".join(known.not_undone)
        return f"{undone} Not undone: {left}." if left else f"{undone} Nothing is left of it."


SCRIPT: list[Turn] = [
    calls("deploy"),  # not built, not tested: denied
    calls("build", "run_tests"),
    calls("deploy"),  # the tests did not see that it has no workers: taken back
    calls(("announce", {"text": "The new shop is here"})),  # nothing is deployed: denied
    calls(("configure", {"workers": 4}), "build", "run_tests", "deploy"),
    calls("purge_cache"),  # nobody knows whether it was: the model is told so
    calls(("announce", {"text": "The new shop is here"})),  # which one? Nobody hears of it
    calls(("announce", {"text": "Shop 1.1 is here"})),
    "Shop 1.1 is live and announced. Somebody should look whether the cache was purged.",
]


def main() -> None:
    bus = EventBus()
    heard: list[object] = []
    bus.subscribe("release:announced", lambda event, text: heard.append(text))
    order = {
        "run_tests": {"build"},
        "deploy": {"build", "run_tests"},
        "purge_cache": {"deploy"},
        "announce": {"deploy"},
    }
    section = wink.MarkdownSection(
        title="Release",
        template="Bring version 1.1 of the shop into production and announce it.",
        tools=[configure, build, run_tests, deploy, purge_cache, announce],
        policies=[SequentialDependencyPolicy(dependencies=order)],
    )
    files = wink.MemoryFilesystem({"shop.json": '{"version": "1.1", "workers": 0}'})
    session = wink.Session()

    with running_cluster() as cluster:
        prompt = wink.Prompt(wink.PromptTemplate(sections=[section])).bind(
            resources={wink.Filesystem: files, Cluster: cluster, EventBus: bus}
        )
        model = ScriptedAdapter(SCRIPT)
        answer = model.evaluate(prompt, session, config=RunConfig(feedback=[WhatIsLeft()]))

    assert model.last_request is not None
    told = [message.text for message in model.last_request.messages if message.role == "tool"]
    for record, text in zip(session[ToolInvoked].all(), told, strict=True):
        print(f"{'ok' if record.success else '--'} {record.tool_name:<12}", end="")
        print("\n               ".join(line for line in text.splitlines() if line))
    print(f"\n{answer.text}")
    print(f"The cluster has run: {', '.join(map(str, ClusterServer.has_run))}")
    print(f"Everybody heard: {heard}")


if __name__ == "__main__":
    main()
