from __future__ import annotations

import base64
from collections.abc import Iterator

import pytest

from weakincentives import Filesystem, MemoryFilesystem, ToolResult
from weakincentives.contrib.tools import write
from weakincentives.retry import RetryPolicies
from weakincentives.runtime import EventBus, Permissions, ToolRegistry, sequence
from weakincentives.testing import FakeClock, make_session


class Agent:
    """A registry that may write files, and what was told on its bus."""

    def __init__(self) -> None:
        self.files = MemoryFilesystem({"old.txt": "old"})
        self.bus = EventBus()
        self.heard: list[tuple[str, object]] = []
        self.bus.subscribe("file:*", lambda event, payload: self.heard.append((event, payload)))
        self.permissions = Permissions()
        self.tools = ToolRegistry(
            session=make_session(clock=FakeClock(start=50.0)),
            resources={
                Filesystem: self.files,
                EventBus: self.bus,
                Permissions: self.permissions,
            },
        )
        self.tools.register(write, namespace="file")
        self.permissions.grant("file:*", session=self.tools.session)

    def write(self, path: str, content: str, **options: object) -> ToolResult:
        return self.tools.execute("file:write", {"path": path, "content": content, **options})


@pytest.fixture
def agent() -> Iterator[Agent]:
    agent = Agent()
    with agent.tools:
        yield agent


def test_a_file_is_written_and_others_are_told(agent: Agent):
    result = agent.write("/workspace/a.txt", "äh")

    assert result.message == "Wrote 3 bytes to a.txt"
    assert (result.value.path, result.value.bytes_written) == ("a.txt", 3)
    assert agent.files.read("a.txt") == "äh"
    told = {"path": "a.txt", "action": "write", "timestamp": 50.0}
    assert agent.heard == [("file:changed", told)]


def test_bytes_come_as_base64(agent: Agent):
    data = bytes(range(256))

    result = agent.write("a.bin", base64.b64encode(data).decode(), encoding="base64")

    assert result.value.bytes_written == 256
    assert agent.files.read_bytes("a.bin") == data


def test_a_file_that_exists_is_left_alone_unless_it_may_be_overwritten(agent: Agent):
    refused = agent.write("old.txt", "new")

    assert refused.failure.code == "FILE_EXISTS"
    assert refused.message == "File 'old.txt' already exists"
    assert refused.failure.recoverable
    assert refused.failure.suggestions == ("Set overwrite: true", "Choose different path")
    assert agent.files.read("old.txt") == "old"
    assert agent.heard == []
    assert agent.write("old.txt", "new", overwrite=True).success
    assert agent.files.read("old.txt") == "new"


@pytest.mark.parametrize(
    ("path", "content", "options"),
    [
        ("../out.txt", "x", {}),
        ("a.txt", "ä", {"encoding": "ascii"}),
        ("a.txt", "not base64!", {"encoding": "base64"}),
        ("a.txt", "abc", {"encoding": "base64"}),
        ("old.txt/below", "x", {}),
    ],
)
def test_what_cannot_be_written_is_said(agent: Agent, path: str, content: str, options: dict):
    result = agent.write(path, content, **options)

    assert result.failure.code == "WRITE_FAILED"
    assert not result.failure.recoverable
    assert result.metadata.attempts == 1
    assert agent.files.glob("**/*") == ("old.txt",)


def test_an_encoding_that_is_not_offered_is_refused(agent: Agent):
    result = agent.write("a.txt", "x", encoding="utf-16")

    assert result.failure.code == "INVALID_ARGUMENTS"
    assert "base64" in result.message


def test_without_the_permission_nothing_is_written(agent: Agent):
    agent.permissions.revoke("file:*", session=agent.tools.session)

    result = agent.write("a.txt", "x")

    assert result.failure.code == "PRECONDITION_FAILED"
    assert result.failure.suggestions == ("File write permission required",)
    assert not agent.files.exists("a.txt")


def test_what_is_rolled_back_is_not_told(agent: Agent):
    """The second write fails, so the first has not happened, and nobody hears of it."""
    both = sequence([write, write], stop_on_error=True, transform_output=lambda *_: FAILING)
    agent.tools.register(both)

    result = agent.tools.execute(both.name, {"path": "a.txt", "content": "x"})

    assert not result.success
    assert not agent.files.exists("a.txt")
    assert agent.heard == []


FAILING = {"path": "old.txt", "content": "x"}


def test_it_is_declared_as_in_the_protocol():
    assert (write.timeout, write.retry, write.reach) == (10.0, RetryPolicies.QUICK, "reversible")
    assert write.parameters["required"] == ["path", "content"]
    assert write.parameters["properties"]["encoding"]["enum"] == ["utf-8", "ascii", "base64"]
