"""Messages to a run in progress: each is delivered exactly once, whatever happens to the run."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import weakincentives as wink
from weakincentives.adapters import (
    Message,
    MessageReceived,
    ModelRequest,
    RunConfig,
    RunEvent,
    ScriptedAdapter,
    calls,
)
from weakincentives.errors import SessionError, TurnLimitExceeded
from weakincentives.prompt import MarkdownSection, Prompt, PromptTemplate
from weakincentives.runtime import Inbox, SavedSession, Session

_CHILD = """
import sys
from pathlib import Path
from weakincentives.runtime import Inbox
inbox = Inbox(Path(sys.argv[1]))
inbox.open()
inbox.send("accepted")
print("ready", flush=True)
sys.stdin.read()
"""


@wink.tool(reach="reversible")
def look() -> str:
    """Look."""
    return "seen"


def prompt() -> Prompt[Any]:
    return Prompt(PromptTemplate(sections=[MarkdownSection(title="Work", tools=[look])]))


def user_texts(session: Session) -> list[str]:
    return [message.text for message in session[Message] if message.role == "user"]


@pytest.fixture
def inbox(tmp_path: Path) -> Inbox:
    return Inbox(tmp_path / "runs" / "run.inbox")


def test_a_message_reaches_the_next_turn(inbox: Inbox):
    """Sent by another object, as by another process, after a call and after the last answer."""
    session, events = Session(), list[RunEvent]()

    def sending(text: str, answer: Any) -> Any:
        def turn(request: ModelRequest) -> Any:
            Inbox(inbox.path).send(text)
            return answer

        return turn

    turns = [sending("Use pytest.", calls("look")), sending("And lint.", "Done."), "All done."]
    response = ScriptedAdapter(turns).evaluate(
        prompt(), session, message="Test it.", inbox=inbox, on_event=events.append
    )

    assert response.text == "All done."
    assert [message.text for message in session[Message]] == [
        "Test it.",
        "",
        "seen",
        "Use pytest.",
        "Done.",
        "And lint.",
        "All done.",
    ]
    received = [event.text for event in events if isinstance(event, MessageReceived)]
    assert received == ["Use pytest.", "And lint."]


def test_a_run_that_has_not_begun_or_has_ended_accepts_no_message(inbox: Inbox):
    with pytest.raises(SessionError, match="no run is in progress"):
        inbox.send("Too early.")
    ScriptedAdapter(["Done."]).evaluate(prompt(), Session(), inbox=inbox)

    with pytest.raises(SessionError, match="no run is in progress"):
        Inbox(inbox.path).send("Too late.")


def test_a_failed_run_leaves_its_messages_to_the_next(inbox: Inbox):
    session = Session()

    def late(request: ModelRequest) -> Any:
        inbox.send("Stop.")
        return calls("look")

    with pytest.raises(TurnLimitExceeded):
        ScriptedAdapter([calls("look"), late]).evaluate(
            prompt(), session, inbox=inbox, config=RunConfig(max_turns=2)
        )
    ScriptedAdapter(["Stopped."]).evaluate(prompt(), session, inbox=Inbox(inbox.path))
    ScriptedAdapter(["Yes."]).evaluate(prompt(), session, inbox=inbox, message="Sure?")

    assert user_texts(session) == ["Begin.", "Stop.", "Sure?"]


def test_two_runs_cannot_accept_the_same_messages(inbox: Inbox):
    def meanwhile(request: ModelRequest) -> str:
        for other in (inbox, Inbox(inbox.path)):
            with pytest.raises(SessionError, match="another run accepts"):
                ScriptedAdapter(["No."]).evaluate(prompt(), Session(), inbox=other)
        inbox.send("Still open.")
        return "Done."

    session = Session()
    ScriptedAdapter([meanwhile, "Really."]).evaluate(prompt(), session, inbox=inbox)

    assert user_texts(session) == ["Begin.", "Still open."]


def test_a_message_survives_the_kill_of_the_run(inbox: Inbox, tmp_path: Path):
    """Delivered by the next run, and not again by the one after it in yet another process."""
    argv = [sys.executable, "-c", _CHILD, str(inbox.path)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        Inbox(inbox.path).send("from here")
        child.kill()

    with pytest.raises(SessionError, match="no run is in progress"):
        inbox.send("too late")
    path = tmp_path / "run.jsonl"
    with SavedSession.create(path, Session()) as saved:
        ScriptedAdapter(["Ok."]).evaluate(prompt(), saved.session, inbox=inbox)
    for _ in range(2):
        with SavedSession.open(path) as saved:
            again = Inbox(inbox.path)
            ScriptedAdapter(["Ok."]).evaluate(prompt(), saved.session, inbox=again, message="On.")
            texts = user_texts(saved.session)

            typed = [message.text for message in saved.user_messages()]

    assert texts == ["Begin.", "accepted", "from here", "On.", "On."]
    assert typed == ["Begin.", "On.", "On."]  # the others belong to the message before them


def test_lines_that_are_torn_or_not_ours_are_ignored(inbox: Inbox):
    session = Session()

    def tampered(request: ModelRequest) -> str:
        inbox.send("One.")
        with inbox.path.open("ab") as file:
            file.write(b'{"id": "x", "text": "planted"}\n{"id": "y", "te')  # and a torn line
        Inbox(inbox.path).send("Two.")
        with inbox.path.open("ab") as file:
            file.write(b"torn")
        return "Done."

    ScriptedAdapter([tampered, "Ok."]).evaluate(prompt(), session, inbox=inbox)

    assert user_texts(session) == ["Begin.", "One.", "Two."]


@settings(max_examples=10, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["call", "answer"]), st.lists(st.text(max_size=20), max_size=3)),
        min_size=1,
        max_size=6,
    )
)
def test_every_accepted_message_is_delivered_once_and_in_order(
    tmp_path_factory: pytest.TempPathFactory, script: list[tuple[str, list[str]]]
):
    """From another thread, at any turn; those that are refused were sent too late."""
    inbox, session = Inbox(tmp_path_factory.mktemp("inbox") / "run.inbox"), Session()
    accepted: list[str] = []

    def turn(kind: str, texts: list[str]) -> Any:
        def sending() -> None:
            for text in texts:
                Inbox(inbox.path).send(text)
                accepted.append(text)

        def play(request: ModelRequest) -> Any:
            thread = threading.Thread(target=sending)
            thread.start()
            thread.join()
            return calls("look") if kind == "call" else "Done."

        return play

    ScriptedAdapter([*(turn(*each) for each in script), *["Done."] * 9]).evaluate(
        prompt(), session, inbox=inbox
    )

    assert user_texts(session)[1:] == accepted
