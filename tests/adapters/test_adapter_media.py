"""Pictures and files reach a model in the form of its provider, or in words."""

from __future__ import annotations

import base64
import json
import os
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wire import Raw, WireServer

import weakincentives as wink
from messages_server import serving
from weakincentives import Media
from weakincentives.adapters import (
    ClaudeAgentSDKAdapter,
    LiteLLMAdapter,
    Message,
    ModelRequest,
    OpenAIAdapter,
    ScriptedAdapter,
    calls,
    record,
    replay,
    says,
)
from weakincentives.adapters.media import MediaFilter, mcp_block
from weakincentives.core.call import ToolCall
from weakincentives.errors import ProviderRejected, ReplayDiverged
from weakincentives.prompt import ToolResult

KEY = "sk-loopback-0123456789"
EXAMPLE = Path(__file__).parents[2] / "examples" / "draw_and_look.py"


def png(side: int = 8) -> bytes:
    """Return a real picture."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        crc = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + crc

    rows = b"".join(b"\0" + bytes((x * 7 + y * 13) % 256 for x in range(side)) for y in range(side))
    head = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    parts = chunk(b"IHDR", head), chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


PLOT = Media(png(), name="plot.png")
PHOTO = Media(png(9), name="photo.png")
SOUND = Media(b"RIFF\x04\0\0\0WAVE", name="beep.wav")
REPORT = Media(b"%PDF-1.4\n%\xfb\xff\xfe%EOF\n", name="report.pdf")
B64 = base64.b64encode(PLOT.data).decode()


@dataclass(frozen=True)
class Chart:
    title: str
    pictures: tuple[Media, ...]

    def render(self) -> str:
        return f"A chart of {self.title}"


@wink.tool(reach="read")
def plot() -> Media:
    """Draw a plot."""
    return PLOT


@wink.tool(reach="read")
def chart() -> Chart:
    """Draw a chart."""
    return Chart("sales", (PLOT, PHOTO))


@wink.tool(reach="read")
def broken() -> ToolResult[Media]:
    """Draw, and fail."""
    return ToolResult("It failed", PLOT, success=False)


@wink.tool(reach="read")
def speak() -> list[Media]:
    """Return sound and a report."""
    return [SOUND, REPORT]


@pytest.fixture(scope="module")
def server() -> Iterator[WireServer]:
    with WireServer() as server:
        yield server


def prompt_with(*tools: Any, **options: Any) -> wink.Prompt[Any]:
    section = wink.MarkdownSection(title="Task", template="Draw.", tools=tools, **options)
    return wink.Prompt(wink.PromptTemplate(sections=[section]))


def chat(base_url: str, **options: Any) -> Any:
    return OpenAIAdapter("m", base_url=base_url, api_key=KEY, **options)


def responses(base_url: str, **options: Any) -> Any:
    return OpenAIAdapter("m", api="responses", base_url=base_url, api_key=KEY, **options)


def litellm(base_url: str, **options: Any) -> Any:
    return LiteLLMAdapter("openai/m", base_url=base_url, api_key=KEY, **options)


its_own = [
    pytest.mark.heavy,
    pytest.mark.skipif(find_spec("litellm") is None, reason="litellm is not installed"),
    pytest.mark.filterwarnings("ignore:Item .* on TypedDict class"),
    pytest.mark.filterwarnings("ignore:Accessing the 'model_"),
    pytest.mark.filterwarnings("ignore:Pydantic serializer warnings"),
]
chats = pytest.mark.parametrize("make", [chat, pytest.param(litellm, marks=its_own)])
TWO = calls(ToolCall("plot", {}, "c1"), ToolCall("chart", {}, "c2"))


@chats
def test_chat_completions_get_the_media_of_tools_in_a_message_after_the_answers(
    server: WireServer, make: Callable[..., Any]
):
    script = server.play(TWO, says("Nice."), says("Yes."))
    prompt, session = prompt_with(plot, chart), wink.Session()

    make(script.base_url).evaluate(prompt, session, message=["Compare with", PHOTO, "please."])

    assert script.problems == []
    _, user, _, first, second, media = script.bodies[-1]["messages"]
    text = {"type": "text", "text": f"Compare with\n{PHOTO.render()}\nplease."}
    assert user == {"role": "user", "content": [text, image(PHOTO)]}
    assert first["content"] == "[image/png, 137 bytes: plot.png]"
    assert second["content"] == "A chart of sales"
    assert media["role"] == "user"
    assert media["content"] == [
        {"type": "text", "text": "What plot returned (call c1):"},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{B64}"}},
        {"type": "text", "text": "What chart returned (call c2):"},
        image(PLOT),
        image(PHOTO),
    ]


def image(media: Media) -> dict[str, Any]:
    data = base64.b64encode(media.data).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


@chats
def test_chat_completions_have_sound_and_pdfs(server: WireServer, make: Callable[..., Any]):
    script = server.play(calls(ToolCall("speak", {}, "c1")), says("Heard."))

    make(script.base_url).evaluate(prompt_with(speak), wink.Session())

    assert script.problems == []
    _, sound, report = script.bodies[-1]["messages"][-1]["content"]
    assert base64.b64decode(sound["input_audio"]["data"]) == SOUND.data
    assert sound["input_audio"]["format"] == "wav"
    assert report["file"]["filename"] == "report.pdf"
    assert base64.b64decode(report["file"]["file_data"].partition(",")[2]) == REPORT.data


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
def test_responses_have_media_in_the_output_of_a_call(server: WireServer, streams: bool):
    script = server.play(TWO, says("Nice."))

    responses(script.base_url).evaluate(
        prompt_with(plot, chart),
        wink.Session(),
        message=[PHOTO, REPORT, SOUND],
        on_event=(lambda event: None) if streams else None,
    )

    assert script.problems == []
    user, *_, first, second = script.bodies[-1]["input"]
    words, picture, report = user["content"]
    assert words["text"].endswith(
        "[audio/wav, 12 bytes: beep.wav] is not shown: you cannot be given audio/wav here."
    )
    assert base64.b64decode(picture["image_url"].partition(",")[2]) == PHOTO.data
    assert report["type"], report["filename"] == ("input_file", "report.pdf")
    assert base64.b64decode(report["file_data"].partition(",")[2]) == REPORT.data
    assert first["output"] == [
        {"type": "input_text", "text": PLOT.render()},
        {"type": "input_image", "image_url": f"data:image/png;base64,{B64}", "detail": "auto"},
    ]
    assert [part["type"] for part in second["output"]] == [
        "input_text",
        "input_image",
        "input_image",
    ]


def test_the_media_of_a_section_are_in_the_first_message_while_it_is_open(server: WireServer):
    script = server.play(calls(ToolCall("plot", {}, "c1")), says("Done."))
    prompt = prompt_with(plot, media=[PHOTO])

    chat(script.base_url).evaluate(prompt, wink.Session())

    for body in script.bodies:
        system, user, *_ = body["messages"]
        assert system["content"].endswith(f"Draw.\n\n{PHOTO.render()}")
        assert user["content"] == [{"type": "text", "text": "Begin."}, image(PHOTO)]


def test_the_media_of_a_failed_call_are_not_sent(server: WireServer):
    script = server.play(calls(ToolCall("broken", {}, "c1")), says("Sorry."))

    chat(script.base_url).evaluate(prompt_with(broken), wink.Session())

    assert [each["role"] for each in script.bodies[-1]["messages"]][-1] == "tool"
    assert B64 not in json.dumps(script.bodies)


def test_a_text_file_goes_as_text_everywhere(server: WireServer):
    script = server.play(says("Read."))
    table = Media(b"a,b\n1,2\n", "text/csv", "table.csv")

    chat(script.base_url).evaluate(prompt_with(), wink.Session(), message=["Sum", table])

    shown = "[text/csv, 8 bytes: table.csv]"
    assert script.bodies[0]["messages"][1]["content"] == f"Sum\n{shown}\n\n{shown}\na,b\n1,2\n"


def test_the_example_draws_looks_and_corrects(server: WireServer, tmp_path: Path):
    drawn = [
        calls(ToolCall("draw_bars", {"heights": [3, 5, 40], "scale": n}, f"c{n}")) for n in (9, 2)
    ]
    script = server.play(*drawn, says("The last is the tallest."))
    (tmp_path / "sketch.png").write_bytes(PHOTO.data)

    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "Compare", "sketch.png"],
        cwd=tmp_path,
        env={**os.environ, "OPENAI_BASE_URL": script.base_url, "OPENAI_API_KEY": KEY},
        capture_output=True,
        text=True,
    )

    assert (done.stdout, done.stderr) == ("The last is the tallest.\n", "")
    assert script.problems == []
    chart = Media((tmp_path / "chart.png").read_bytes(), "image/png")
    assert script.bodies[-1]["messages"][-1]["content"][-1] == image(chart)
    assert script.bodies[0]["messages"][1]["content"][1] == image(PHOTO)


def test_of_more_than_a_request_can_hold_the_newest_are_shown_and_the_prompts_own(
    server: WireServer,
):
    made = iter([Media(png(n), name=f"{n}.png") for n in range(10, 70)])

    @wink.tool(reach="read")
    def snap() -> Media:
        """Take a picture."""
        return next(made)

    turns = [calls(*[ToolCall("snap", {}, f"c{n}-{k}") for k in range(10)]) for n in range(6)]
    script = server.play(*turns, says("Done."))

    chat(script.base_url).evaluate(prompt_with(snap, media=[PHOTO]), wink.Session())

    assert script.problems == []
    body = json.dumps(script.bodies[-1])
    shown = [n for n in range(10, 70) if Media(png(n)).base64 in body]
    assert PHOTO.base64 in body
    assert shown == list(range(21, 70))
    assert (
        "20.png] is not shown: the request would be too large. Ask for it again to see it." in body
    )


pieces = st.builds(
    lambda kind, size, n: Media(bytes([n]) * size, kind, f"{n}.x"),
    st.sampled_from(["image/png", "application/pdf", "text/csv", "x/y"]),
    st.sampled_from([1, 10, 7_000_000]),
    st.integers(0, 255),
)
conversations = st.lists(
    st.builds(
        lambda role, media: Message(role=role, text="t", media=tuple(media)),
        st.sampled_from(["user", "tool", "model"]),
        st.lists(pieces, max_size=3),
    ),
    max_size=6,
)


@given(conversations, st.lists(pieces.filter(lambda each: len(each.data) < 99), max_size=2))
@settings(max_examples=60, deadline=None)
def test_each_medium_is_either_sent_in_order_or_named_and_a_request_has_a_limit(
    messages: list[Message], own: list[Media]
):
    first = Message(role="user", text="Begin.")
    rendered = replace(prompt_with().render(), media=tuple(own))
    request = ModelRequest(prompt=rendered, messages=[first, *messages])

    fitted = MediaFilter(["image/*", "application/pdf"]).fitted(request).messages

    given = [(*own, *first.media), *(each.media for each in messages)]
    assert [each.role for each in fitted] == ["user", *(each.role for each in messages)]
    total = 0
    for message, media in zip(fitted, given, strict=True):
        if message.role == "model":
            assert message.media == media
            continue
        total += sum(len(each.data) for each in message.media)
        left = [each for each in media if not any(each is one for one in message.media)]
        assert list(message.media) == [m for m in media if any(m is one for one in message.media)]
        assert all(each.render() in message.text for each in left)
        assert all(each.media_type in ("image/png", "application/pdf") for each in message.media)
    assert total <= 20_000_000
    taken = [each for each in own if each.media_type in ("image/png", "application/pdf")]
    assert list(fitted[0].media) == taken


# A model that cannot see


def refusal(text: str, status: int = 400) -> Raw:
    error = {"message": text, "type": "invalid_request_error", "code": None, "param": None}
    return Raw(json.dumps({"error": error}).encode(), status)


@pytest.mark.parametrize(
    "refused",
    [
        refusal("m is not a multimodal model"),
        refusal("image input is not supported - hint: you may need the mmproj", 500),
        refusal("No endpoints found that support image input", 404),
    ],
    ids=["400", "500", "404"],
)
def test_a_model_that_cannot_see_is_told_in_words_and_asked_so_from_then_on(
    server: WireServer, refused: Raw
):
    script = server.play(refused, calls(ToolCall("plot", {}, "c1")), says("I see nothing."))
    adapter = chat(script.base_url)

    answer = adapter.evaluate(prompt_with(plot), wink.Session(), message=["Look:", PHOTO])

    words = "is not shown: you cannot be given image/png here."
    assert answer.text == "I see nothing."
    assert len(script.bodies) == 3, "one request was repeated, and none after that"
    assert B64 not in json.dumps(script.bodies[1:])
    _, user, _, tool = script.bodies[-1]["messages"]
    assert user["content"].endswith(f"{PHOTO.render()} {words}")
    assert tool["content"].endswith(f"{PLOT.render()} {words}")


def test_a_rejection_for_another_reason_is_raised_and_not_remembered(server: WireServer):
    script = server.play(refusal("too long"), refusal("too long"), says("A picture."))
    adapter = chat(script.base_url)

    with pytest.raises(ProviderRejected, match="too long"):
        adapter.evaluate(prompt_with(), wink.Session(), message=PLOT)
    adapter.evaluate(prompt_with(), wink.Session(), message=PLOT)

    assert B64 in json.dumps(script.bodies[-1])


def test_one_rejected_picture_does_not_blind_a_model_that_can_see(server: WireServer):
    script = server.play(
        calls(ToolCall("plot", {}, "c1")),
        calls(ToolCall("chart", {}, "c2")),
        refusal("the image data you provided does not represent a valid image"),
        says("One of them."),
    )

    chat(script.base_url).evaluate(prompt_with(plot, chart), wink.Session())

    *_, plots, _, answer, charts = script.bodies[-1]["messages"]
    assert plots["content"][1:] == charts["content"][1:] == [image(PLOT)]
    assert "photo.png] is not shown" in answer["content"]


def test_a_wrong_key_is_not_blamed_on_the_pictures(server: WireServer):
    script = server.play(refusal("wrong key", 401))

    with pytest.raises(ProviderRejected, match="wrong key"):
        chat(script.base_url).evaluate(prompt_with(), wink.Session(), message=PLOT)

    assert len(script.bodies) == 1


def test_the_media_types_of_a_model_can_be_stated(server: WireServer):
    script = server.play(says("Heard."))

    chat(script.base_url, media=["audio/*"]).evaluate(
        prompt_with(), wink.Session(), message=[PLOT, SOUND]
    )

    words, sound = script.bodies[0]["messages"][1]["content"]
    assert "plot.png] is not shown" in words["text"]
    assert sound["type"] == "input_audio"


@pytest.mark.heavy
@pytest.mark.skipif(find_spec("litellm") is None, reason="litellm is not installed")
@pytest.mark.parametrize(("model", "sees"), [("openai/gpt-4o", True), ("gpt-3.5-turbo", False)])
def test_litellm_knows_which_models_see(server: WireServer, model: str, sees: bool):
    script = server.play(says("Hm."))

    LiteLLMAdapter(model, base_url=script.base_url, api_key=KEY).evaluate(
        prompt_with(), wink.Session(), message=PLOT
    )

    assert (B64 in json.dumps(script.bodies)) is sees


# What a model makes


def test_a_picture_that_the_model_made_is_recorded_once_and_sent_back(server: WireServer):
    item = {"type": "image_generation_call", "id": "ig_1", "status": "completed", "result": B64}
    said = {"type": "message", "role": "assistant", "id": "m_1", "status": "completed"}
    said |= {"content": [{"type": "output_text", "text": "Here.", "annotations": []}]}
    answer = {"id": "r", "object": "response", "model": "m", "status": "completed"}
    drawn = Raw(json.dumps({**answer, "output": [item, said]}).encode())
    script, session = server.play(drawn, says("Thanks.")), wink.Session()
    adapter = responses(script.base_url)

    first = adapter.evaluate(prompt_with(), session, message="Draw.")
    adapter.evaluate(prompt_with(), session, message="Again?", resume=True)

    assert first.media == (Media(PLOT.data, "image/png"),)
    assert B64 not in json.dumps([each.wire for each in session[Message].all()])
    assert script.bodies[-1]["input"][1] == item
    assert script.problems == []


def test_sound_and_pictures_of_chat_completions_are_recorded(server: WireServer):
    sound = base64.b64encode(SOUND.data).decode()
    message = {
        "role": "assistant",
        "content": None,
        "audio": {"id": "a1", "data": sound, "expires_at": 1, "transcript": "Beep."},
        "images": [{"type": "image_url", "image_url": {"url": PLOT.data_url}}],
    }
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    made = {"id": "c", "object": "chat.completion", "model": "m", "created": 1, "choices": [choice]}
    script, session = server.play(Raw(json.dumps(made).encode())), wink.Session()

    answer = chat(script.base_url).evaluate(prompt_with(), session)

    assert answer.text == "Beep."
    assert [each.data for each in answer.media] == [PLOT.data, SOUND.data]
    assert session[Message].latest().wire["chat"] == {"audio": {"id": "a1"}}


# Recordings


def test_a_recorded_run_with_media_is_replayed_and_compared(tmp_path: Path):
    made = [PLOT, PHOTO]

    @wink.tool(reach="read")
    def draw() -> Media:
        """Draw."""
        return made[0]

    path, prompt = tmp_path / "run.jsonl", prompt_with(draw)
    script = [calls("draw"), says("Seen.", media=(REPORT,))]
    record(ScriptedAdapter(script), path).evaluate(prompt, wink.Session(), message=["Go", PLOT])

    again = replay(path, strict=True).evaluate(prompt, wink.Session(), message=["Go", PLOT])
    assert again.media == (REPORT,)

    made.pop(0)
    with pytest.raises(ReplayDiverged, match="media"):
        replay(path, strict=True).evaluate(prompt, wink.Session(), message=["Go", PLOT])


# Claude


@pytest.mark.heavy
@pytest.mark.skipif(find_spec("claude_agent_sdk") is None, reason="claude-agent-sdk is missing")
def test_claude_gets_pictures_and_documents_as_blocks():
    turns = [calls(("plot", {})), calls(("speak", {})), says("Seen.")]
    with serving(turns) as server:
        adapter = ClaudeAgentSDKAdapter(model="claude-sonnet-5", env=server.environment)
        adapter.evaluate(prompt_with(plot, speak), wink.Session(), message=["Look:", PHOTO, REPORT])

    def block(kind: str, media: Media) -> dict[str, Any]:
        source = {"type": "base64", "media_type": media.media_type, "data": media.base64}
        return {"type": kind, "source": source}

    said = server.requests[0]["messages"][0]["content"]
    assert said[1:3] == [block("image", PHOTO), block("document", REPORT)]
    drawn, spoken = server.tool_results()
    assert drawn["content"][:2] == [
        {"type": "text", "text": PLOT.render()},
        block("image", PLOT),
    ]
    (words,) = spoken["content"]  # the program shows no other files of tools
    for each in (SOUND, REPORT):
        assert f"{each.render()} is not shown: you cannot be given" in words["text"]


@pytest.mark.heavy
@pytest.mark.skipif(find_spec("claude_agent_sdk") is None, reason="claude-agent-sdk is missing")
def test_claude_gets_the_pictures_of_a_resumed_conversation():
    session, prompt = wink.Session(), prompt_with(plot)
    ScriptedAdapter([calls("plot"), says("Seen.")]).evaluate(prompt, session)
    with serving([says("A plot.")]) as server:
        adapter = ClaudeAgentSDKAdapter(model="claude-sonnet-5", env=server.environment)
        adapter.evaluate(prompt, session, message=["And this?", PHOTO], resume=True)

    content = server.requests[0]["messages"][0]["content"]
    found = [each["source"]["data"] for each in content if each["type"] == "image"]
    assert found == [PLOT.base64, PHOTO.base64]


def test_a_name_that_is_not_unicode_reaches_an_mcp_client():
    block = mcp_block(Media(b"%PDF-", name="\udc80.pdf"))

    assert block["resource"]["uri"].endswith("/%3F.pdf")
