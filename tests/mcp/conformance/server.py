"""The tools, resources and prompts that the conformance suite asks for, made with our public names.

As a program it serves them over HTTP and prints its port: the suite sends no token, so what it
talks to is a proxy in front, which adds one and passes everything else on as it came.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
from dataclasses import dataclass
from typing import Annotated, Any

import httpx2
import uvicorn
from starlette.requests import Request
from starlette.responses import StreamingResponse

import weakincentives as wink
from weakincentives.core.media import Media
from weakincentives.mcp import McpPrompt, McpResource, McpServer, end_stream
from weakincentives.mcp.http import PATH, listen, serve
from weakincentives.prompt import (
    MarkdownSection,
    NotAnswered,
    SectionVisibility,
    Tool,
    ToolContext,
    ToolResult,
    set_visibility,
)
from weakincentives.runtime import Session

PICTURE = Media(
    bytes.fromhex(
        "89504e470d0a1a0a0000000d49484452000000010000000108020000009077"
        "53de0000000c4944415408d763f8cfc0000003010100c9fe92ef0000000049454e44ae426082"
    ),
    "image/png",
)
SOUND = Media(b"RIFF\x24\x00\x00\x00WAVEfmt \x10\x00\x00\x00" + bytes(24), "audio/wav")
Read = wink.tool(reach="read")


@dataclass(frozen=True)
class Name:
    name: str


@dataclass(frozen=True)
class Confirmation:
    ok: bool


@dataclass(frozen=True)
class Colour:
    color: str


# Tools


@Read
def test_simple_text() -> str:
    """Return a text."""
    return "This is a simple text response for testing."


@Read
def test_image_content() -> Media:
    """Return a picture."""
    return PICTURE


@Read
def test_audio_content() -> Media:
    """Return a sound."""
    return SOUND


def text_file(uri: str, text: str, kind: str = "text/plain") -> Media:
    return Media(text.encode(), kind, uri=uri)


def _embedded(params: None, *, context: ToolContext) -> ToolResult[Any]:
    uri = "test://embedded-resource"
    return ToolResult.ok(text_file(uri, "This is an embedded resource content."))


def _several(params: None, *, context: ToolContext) -> ToolResult[Any]:
    uri, text = "test://mixed-content-resource", '{"test":"data","value":123}'
    parts = [PICTURE, text_file(uri, text, "application/json")]
    return ToolResult.ok(parts, "Multiple content types test:")


NOTHING = {"type": "object", "properties": {}}
EMBEDDED = Tool.from_schema("test_embedded_resource", "Return a file.", NOTHING, _embedded)
SEVERAL = Tool.from_schema("test_multiple_content_types", "Return several.", NOTHING, _several)


@Read
async def test_tool_with_logging(*, context: ToolContext) -> str:
    """Log while it works."""
    for line in ("Tool execution started", "Tool processing data", "Tool execution completed"):
        context.log(line)
        await asyncio.sleep(0.05)
    return "Logged three lines"


@Read
def test_logging_tool(*, context: ToolContext) -> str:
    """Log a line."""
    context.log("a line", level="warning")
    return "Logged a line"


@Read
def test_error_handling() -> str:
    """Fail."""
    raise ValueError("This tool intentionally returns an error for testing")


@Read
async def test_tool_with_progress(*, context: ToolContext) -> str:
    """Report how far it is."""
    for done in (0, 50, 100):
        context.report("", done=done, total=100)
        await asyncio.sleep(0.05)
    return "Done"


@Read
async def test_sampling(prompt: str, *, context: ToolContext) -> str:
    """Ask the client's model."""
    answer = await context.sample(prompt, max_tokens=100)
    return f"LLM response: {answer.text}"


async def _asked(context: ToolContext, message: str, form: Any) -> str:
    try:
        content = await context.ask(message, form)
    except NotAnswered as error:
        return f"action={error.action}"
    return f"action=accept, content={dict(content)}"


@Read
async def test_elicitation(message: str, *, context: ToolContext) -> str:
    """Ask the client's user."""
    fields = {
        "username": {"type": "string", "description": "User's response"},
        "email": {"type": "string", "description": "User's email address"},
    }
    form = {"type": "object", "properties": fields, "required": ["username", "email"]}
    return f"User response: {await _asked(context, message, form)}"


@Read
async def test_elicitation_sep1034_defaults(*, context: ToolContext) -> str:
    """Ask with defaults."""
    statuses = ["active", "inactive", "pending"]
    fields = {
        "name": {"type": "string", "default": "John Doe"},
        "age": {"type": "integer", "default": 30},
        "score": {"type": "number", "default": 95.5},
        "status": {"type": "string", "enum": statuses, "default": "active"},
        "verified": {"type": "boolean", "default": True},
    }
    form = {"type": "object", "properties": fields, "required": []}
    return f"Elicitation completed: {await _asked(context, 'Who are you?', form)}"


def _titled(prefix: str, what: str) -> list[dict[str, str]]:
    words = ("First", "Second", "Third")
    return [
        {"const": f"{prefix}{number}", "title": f"{word} {what}"}
        for number, word in enumerate(words, 1)
    ]


@Read
async def test_elicitation_sep1330_enums(*, context: ToolContext) -> str:
    """Ask for choices."""
    options = ["option1", "option2", "option3"]
    names = ["Option One", "Option Two", "Option Three"]
    old = {"type": "string", "enum": ["opt1", "opt2", "opt3"], "enumNames": names}
    fields = {
        "untitledSingle": {"type": "string", "enum": options},
        "titledSingle": {"type": "string", "oneOf": _titled("value", "Option")},
        "legacyEnum": old,
        "untitledMulti": {"type": "array", "items": {"type": "string", "enum": options}},
        "titledMulti": {"type": "array", "items": {"anyOf": _titled("value", "Choice")}},
    }
    form = {"type": "object", "properties": fields, "required": []}
    return f"Elicitation completed: {await _asked(context, 'Choose', form)}"


@Read
async def test_reconnection() -> str:
    """Let the client come back for the answer."""
    await asyncio.sleep(0.1)
    await end_stream()
    await asyncio.sleep(0.3)
    return "Reconnected"


# The newest revision: what a tool asks is its answer


@Read
async def test_input_required_result_elicitation(*, context: ToolContext) -> str:
    """Ask for a name."""
    return f"Hello, {(await context.ask('What is your name?', Name, key='user_name')).name}!"


@Read
async def test_input_required_result_sampling(*, context: ToolContext) -> str:
    """Ask a model."""
    question = "What is the capital of France?"
    return (await context.sample(question, max_tokens=100, key="capital_question")).text


@Read
async def test_input_required_result_list_roots(*, context: ToolContext) -> str:
    """Ask for folders."""
    return ", ".join(each.uri for each in await context.roots(key="client_roots"))


@Read
async def test_input_required_result_request_state(*, context: ToolContext) -> str:
    """Ask for a confirmation."""
    answer = await context.ask("Please confirm", Confirmation, key="confirm")
    return f"state-ok: {answer.ok}"


test_input_required_result_tampered_state = Tool.from_schema(
    "test_input_required_result_tampered_state",
    "Ask for a confirmation.",
    NOTHING,
    test_input_required_result_request_state.handler,  # type: ignore[arg-type]
)


@Read
async def test_input_required_result_multiple_inputs(*, context: ToolContext) -> str:
    """Ask for everything at once."""
    name, greeting, roots = await asyncio.gather(
        context.ask("What is your name?", Name, key="user_name"),
        context.sample("Generate a greeting", max_tokens=50, key="greeting"),
        context.roots(key="client_roots"),
    )
    return f"{greeting.text} {name.name} from {len(roots)} roots"


@Read
async def test_input_required_result_multi_round(*, context: ToolContext) -> str:
    """Ask twice."""
    name = await context.ask("Step 1: What is your name?", Name, key="step1")
    colour = await context.ask("Step 2: What is your favorite color?", Colour, key="step2")
    return f"{name.name} likes {colour.color}"


@Read
async def test_input_required_result_capabilities(*, context: ToolContext) -> str:
    """Ask whoever can be asked."""
    assert context.caller is not None
    said = []
    if context.caller.can_ask:
        said.append((await context.ask("What is your name?", Name)).name)
    if context.caller.can_sample:
        said.append((await context.sample("Say hello")).text)
    return " ".join(said)


@Read
async def test_missing_capability(*, context: ToolContext) -> str:
    """Ask a model, whether or not there is one."""
    return (await context.sample("Say hello")).text


@Read
async def test_streaming_elicitation(*, context: ToolContext) -> str:
    """Report, and ask."""
    context.report("asking", done=1, total=2)
    return (await context.ask("What is your name?", Name)).name


@dataclass(frozen=True)
class Extra:
    """There is one more section."""


@wink.tool(reach="reversible")
def test_trigger_tool_change(*, context: ToolContext) -> str:
    """Offer other tools."""
    shown, hidden = SectionVisibility.FULL, SectionVisibility.SUMMARY
    now = context.rendering is not None and "more" in context.rendering.summarized
    set_visibility(context.session, "more", shown if now else hidden)
    return "Changed"


@wink.tool(reach="reversible")
def test_trigger_prompt_change(*, context: ToolContext) -> str:
    """Offer other prompts."""
    shown = context.session[Extra].latest() is None
    context.session[Extra].seed([Extra()] if shown else [])
    return "Changed"


@Read
def test_more() -> str:
    """Be offered now and then."""
    return "more"


@Read
def test_header(region: Annotated[str, "Where."]) -> str:
    """Take an argument that is in a header, too."""
    return region


HEADER = Tool.from_schema(
    "test_custom_header",
    "Take an argument that is in a header, too.",
    {
        "type": "object",
        "properties": {"region": {"type": "string", "x-mcp-header": "Region"}},
        "required": ["region"],
    },
    lambda params, *, context: ToolResult.ok(params["region"]),
    reach="read",
)
SCHEMA = Tool.from_schema(
    "json_schema_2020_12_tool",
    "Take arguments with a schema of every kind.",
    {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "$defs": {
            "address": {
                "$anchor": "addressDef",
                "type": "object",
                "properties": {"street": {"type": "string"}, "city": {"type": "string"}},
            }
        },
        "properties": {
            "name": {"type": "string"},
            "address": {"$ref": "#/$defs/address"},
            "contactMethod": {"type": "string", "enum": ["phone", "email"]},
            "phone": {"type": "string"},
            "email": {"type": "string"},
        },
        "allOf": [{"anyOf": [{"required": ["phone"]}, {"required": ["email"]}]}],
        "if": {"properties": {"contactMethod": {"const": "phone"}}, "required": ["contactMethod"]},
        "then": {"required": ["phone"]},
        "else": {"required": ["email"]},
        "additionalProperties": False,
    },
    lambda params, *, context: ToolResult.ok(params),
    reach="read",
)


# Resources and prompts


@Read
def static_text() -> str:
    """A text."""
    return "This is the content of the static text resource."


@Read
def static_binary() -> Media:
    """A picture."""
    return PICTURE


@Read
def template_data(id: str) -> str:  # noqa: A002
    """Data by its id."""
    return f'{{"id":"{id}","templateTest":true,"data":"Data for ID: {id}"}}'


@Read
def watched() -> str:
    """A resource to subscribe to."""
    return "watched"


RESOURCES = [
    McpResource(uri="test://static-text", tool=static_text),
    McpResource(uri="test://static-binary", tool=static_binary, mime_type="image/png"),
    McpResource(uri="test://template/{id}/data", tool=template_data, mime_type="application/json"),
    McpResource(uri="test://watched-resource", tool=watched),
]


@Read
def test_simple_prompt() -> str:
    """A prompt."""
    return "This is a simple prompt for testing."


@Read
def test_prompt_with_arguments(
    arg1: Annotated[str, "First test argument"], arg2: Annotated[str, "Second test argument"]
) -> str:
    """A prompt with arguments."""
    return f"Prompt with arguments: arg1='{arg1}', arg2='{arg2}'"


def _with_file(params: dict[str, Any], *, context: ToolContext) -> ToolResult[Any]:
    file = text_file(params["resourceUri"], "Embedded resource content for testing.")
    return ToolResult.ok([file, "Please process the embedded resource above."])


WITH_FILE = Tool.from_schema(
    "test_prompt_with_embedded_resource",
    "A prompt with a file.",
    {
        "type": "object",
        "properties": {"resourceUri": {"type": "string", "description": "The file"}},
        "required": ["resourceUri"],
    },
    _with_file,
    reach="read",
)


def _with_picture(params: None, *, context: ToolContext) -> ToolResult[Any]:
    return ToolResult.ok([PICTURE, "Please analyze the image above."])


WITH_PICTURE = Tool.from_schema(
    "test_prompt_with_image", "A prompt with a picture.", NOTHING, _with_picture, reach="read"
)


@Read
async def test_input_required_result_prompt(*, context: ToolContext) -> str:
    """A prompt that asks first."""

    @dataclass(frozen=True)
    class Context:
        context: str

    question = "What context should the prompt use?"
    return (await context.ask(question, Context, key="user_context")).context


def complete_place(value: str, others: Any) -> list[str]:
    return ["paris", "park", "party"]


PROMPTS = [
    McpPrompt(tool=test_prompt_with_arguments, complete={"arg1": complete_place}),
    *(test_simple_prompt, WITH_FILE, WITH_PICTURE, test_input_required_result_prompt),
]

OTHERS = {test_more, test_header, static_text, static_binary, template_data, watched}
OTHERS |= {test_simple_prompt, test_prompt_with_arguments, test_input_required_result_prompt}
TOOLS = [each for each in list(globals().values()) if isinstance(each, Tool)]
TOOLS = [each for each in TOOLS if each not in {*OTHERS, WITH_FILE, WITH_PICTURE}]


def _has_extra(params: object, session: Session) -> bool:
    return session[Extra].latest() is not None


def made() -> McpServer:
    sections = [
        MarkdownSection(title="Everything", tools=TOOLS),
        MarkdownSection(
            title="More",
            tools=[test_more],
            summary="More tools.",
            visibility=SectionVisibility.SUMMARY,
        ),
        MarkdownSection(title="Extra", template="One more.", enabled=_has_extra),
    ]
    return McpServer(sections, name="everything", resources=RESOURCES, prompts=PROMPTS)


# The proxy

_OWN = {"connection", "content-length", "transfer-encoding", "date", "server"}


class Proxy:
    def __init__(self, url: str, token: str) -> None:
        self._url, self._token = url, token
        self._client = httpx2.AsyncClient(timeout=None)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        request = Request(scope, receive)
        headers = [
            (name, value) for name, value in request.headers.raw if name.decode() not in _OWN
        ]
        headers.append((b"authorization", f"Bearer {self._token}".encode()))
        body = await request.body()
        sent = self._client.build_request(request.method, self._url, headers=headers, content=body)
        answer = await self._client.send(sent, stream=True)
        kept = {name: value for name, value in answer.headers.items() if name not in _OWN}
        response = StreamingResponse(answer.aiter_raw(), answer.status_code, kept)
        try:
            await response(scope, receive, send)
        finally:
            await answer.aclose()


async def main() -> None:
    token = secrets.token_hex()
    with made() as server, listen() as behind, listen() as before:
        serving = asyncio.ensure_future(serve(server, behind, token))
        proxy = Proxy(f"http://127.0.0.1:{behind.getsockname()[1]}{PATH}", token)
        config = uvicorn.Config(proxy, log_level="error", lifespan="off", interface="asgi3")
        sys.stdout.write(f"{before.getsockname()[1]}\n")
        sys.stdout.flush()
        await asyncio.gather(serving, uvicorn.Server(config).serve([before]))


if __name__ == "__main__":
    asyncio.run(main())
