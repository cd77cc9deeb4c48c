from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import weakincentives as wink
from weakincentives.adapters import Adapter, ScriptedAdapter
from weakincentives.adapters.scripted import calls, says
from weakincentives.core.budget import Budget, TokenUsage
from weakincentives.mcp import McpToolsSection
from weakincentives.prompt import ApprovalPolicy, Prompt, PromptTemplate
from weakincentives.prompt.approval import Approval, ApprovalRequest
from weakincentives.runtime.conversation import ModelRequest, ModelTurn
from weakincentives.session.session import Session

pytest.importorskip("mcp")
from mcp import types
from mcp.server.mcpserver import Context, MCPServer

RAW = Path(__file__).with_name("raw_server.py")
BOOKING: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "title": "City", "description": "Where to"},
        "seats": {"type": "integer", "default": 2, "minimum": 1},
        "meal": {"type": "string", "enum": ["fish", "pasta"], "default": "pasta"},
    },
    "required": ["city"],
}
SHORTEN: dict[str, Any] = {
    "messages": [{"role": "user", "content": {"type": "text", "text": "Shorten: a long text"}}],
    "systemPrompt": "You shorten.",
    "maxTokens": 100,
}

Ask = Callable[..., Any]


def newer() -> object:
    """Return a server that asks with its answer: the call is repeated with what it asked for."""
    server = MCPServer("travel", log_level="ERROR")

    @server.tool()
    async def ask(
        ctx: Context, method: str, params: dict[str, Any]
    ) -> types.CallToolResult | types.InputRequiredResult:
        """Ask the client for something, and tell what it said."""
        if not ctx.input_responses:
            return types.InputRequiredResult.model_validate(
                {
                    "resultType": "input_required",
                    "inputRequests": {"it": {"method": method, "params": params}},
                }
            )
        said = ctx.input_responses["it"].model_dump(by_alias=True, exclude_none=True, mode="json")
        text = types.TextContent(text=json.dumps(said))
        return types.CallToolResult(content=[text])

    return server


def older() -> object:
    """Return a server that asks with a request of its own, while the call waits."""
    return [sys.executable, "-S", str(RAW)]


@pytest.fixture(params=[newer, older])
def server(request: pytest.FixtureRequest) -> object:
    return request.param()


@pytest.fixture
def asked(server: object) -> Iterator[Ask]:
    opened: list[Any] = []

    def made(method: str, params: dict[str, Any], **options: Any) -> Any:
        section = McpToolsSection(server=server, **options)
        tools = wink.ToolRegistry.from_section(section)
        opened.extend((tools, section))
        result = tools.execute("ask", {"method": method, "params": params})
        return json.loads(result.render()) if result.success else result.message

    yield made
    for each in opened:
        each.close()


def elicited(asked: Ask, ask: object, schema: dict[str, Any] = BOOKING, **options: Any) -> Any:
    form = {"mode": "form", "message": "Where\nto?", "requestedSchema": schema}
    return asked("elicitation/create", form, ask=ask, **options)


# The user


def test_a_question_of_a_server_is_answered_by_who_approves_calls(asked: Ask):
    seen: list[ApprovalRequest] = []

    async def person(request: ApprovalRequest) -> Approval:
        seen.append(request)
        return Approval(True, "me", arguments={"city": "Rome", "seats": 3})

    answer = elicited(asked, person)

    assert answer["action"] == "accept"
    # What they left out has the server's default.
    assert answer["content"] == {"city": "Rome", "seats": 3, "meal": "pasta"}
    (request,) = seen
    assert request.question.endswith(r'asks during ask: "Where\nto?"')
    assert request.arguments == {"city": None, "seats": 2, "meal": "pasta"}
    assert "  | city: City; Where to; string" in request.describe(10_000)
    assert "  | meal: one of fish, pasta" in request.describe(10_000)
    assert request.revise is not None
    assert request.revise({"city": "Oslo"}).arguments == {"city": "Oslo"}
    with pytest.raises(wink.errors.InvalidArguments, match="seats"):
        request.revise({"city": "Oslo", "seats": 0})


@pytest.mark.parametrize(
    ("answer", "action"),
    [
        (False, "decline"),
        (Approval(False, "me", "none of their business"), "decline"),
        (True, "cancel"),  # the city is missing
        (Approval(True, "me", arguments={"city": "Rome", "seats": 0}), "cancel"),
    ],
)
def test_a_server_gets_no_answer_that_does_not_fit(asked: Ask, answer: object, action: str):
    assert elicited(asked, lambda request: answer)["action"] == action


def test_a_page_is_shown_with_its_address_before_the_user_agrees_to_it(asked: Ask):
    seen: list[str] = []

    def person(request: ApprovalRequest) -> bool:
        seen.append(request.describe(1_000))
        return True

    page = {"mode": "url", "message": "Pay", "url": "https://pay.example.com/7"}
    page |= {"elicitationId": "7"}
    answer = asked("elicitation/create", page, ask=person)

    assert answer["action"] == "accept"
    assert "content" not in answer
    assert "opens: https://pay.example.com/7" in seen[0]


def test_questions_go_to_the_approvals_of_the_prompt(server: object):
    """``ask="approvals"``: whoever approves the calls is also asked by the server."""

    def person(request: ApprovalRequest) -> Approval:
        return Approval(True, "me", arguments={"city": "Bonn"})

    with McpToolsSection(server=server, ask="approvals") as section:
        form = {"mode": "form", "message": "Where?", "requestedSchema": BOOKING}
        wanted = ("ask", {"method": "elicitation/create", "params": form})

        def run(*policies: Any) -> str:
            governed = Prompt(PromptTemplate(sections=[section], policies=policies))
            session = Session()
            model = ScriptedAdapter([calls(wanted), "Done."])
            model.evaluate(governed, session)
            return session[wink.runtime.ToolInvoked].latest().result.render()

        answered = json.loads(run(ApprovalPolicy(ask=person, reaches={"irreversible"})))
        assert answered == {"action": "accept", "content": {"city": "Bonn", **DEFAULTS}}
        assert json.loads(run())["action"] == "cancel"  # there is no one to ask


DEFAULTS = {"seats": 2, "meal": "pasta"}


@pytest.mark.heavy
def test_the_time_of_a_call_stops_while_a_person_is_asked(asked: Ask):
    def slow(request: ApprovalRequest) -> Approval:
        time.sleep(9)
        return Approval(True, "me", arguments={"city": "Rome"})

    assert elicited(asked, slow, timeout=8)["action"] == "accept"


def test_a_person_is_not_asked_without_end():
    server = MCPServer("travel", log_level="ERROR")

    @server.tool()
    async def nag(ctx: Context) -> types.CallToolResult | types.InputRequiredResult:
        """Ask the same again and again."""
        answers = ctx.input_responses or {}
        if any(each.action == "cancel" for each in answers.values()):
            return types.CallToolResult(content=[types.TextContent(text="gave up")])
        nothing = {"type": "object", "properties": {}}
        form = {"mode": "form", "message": "Sure?", "requestedSchema": nothing}
        asked = {f"it{n}": {"method": "elicitation/create", "params": form} for n in range(7)}
        return types.InputRequiredResult.model_validate(
            {"resultType": "input_required", "inputRequests": asked}
        )

    seen: list[ApprovalRequest] = []

    def person(request: ApprovalRequest) -> bool:
        seen.append(request)
        return True

    with (
        McpToolsSection(server=server, ask=person) as section,
        wink.ToolRegistry.from_section(section) as tools,
    ):
        results = [tools.execute("nag", {}).render() for _ in range(2)]

    assert results == ["gave up", "gave up"]
    assert len(seen) == 2 * 20


# A model


def test_a_server_asks_the_model_that_it_is_given(asked: Ask):
    requests: list[ModelRequest] = []

    def shorten(request: ModelRequest) -> ModelTurn:
        requests.append(request)
        return says("Short.", model="tiny")

    model = ScriptedAdapter([shorten])

    answer = asked("sampling/createMessage", SHORTEN, model=model)

    assert answer["content"] == {"type": "text", "text": "Short."}
    assert (answer["role"], answer["model"], answer["stopReason"]) == (
        "assistant",
        "tiny",
        "endTurn",
    )
    (request,) = requests
    assert request.prompt.text == "You shorten."
    assert [(each.role, each.text) for each in request.messages] == [
        ("user", "Shorten: a long text")
    ]


def test_what_the_model_is_asked_is_approved_first_where_a_person_is_asked(asked: Ask):
    seen: list[str] = []

    def person(request: ApprovalRequest) -> bool:
        seen.append(request.describe(1_000))
        return False

    model: Adapter = ScriptedAdapter(["Short."])
    answer = asked("sampling/createMessage", SHORTEN, model=model, ask=person)

    assert "The user declined" in str(answer)
    assert "Shorten: a long text" in seen[0]


def test_the_model_of_the_run_counts_in_its_budget(server: object):
    wanted = ("ask", {"method": "sampling/createMessage", "params": SHORTEN})
    script = [
        calls(wanted, usage=TokenUsage(input_tokens=10, output_tokens=1)),
        says("Short.", usage=TokenUsage(input_tokens=20, output_tokens=2)),
        says("Done.", usage=TokenUsage(input_tokens=30, output_tokens=3)),
    ]
    with McpToolsSection(server=server, model="run") as section:
        session, model = Session(), ScriptedAdapter(script)
        prompt = Prompt(PromptTemplate(sections=[section]))
        response = model.evaluate(prompt, session, budget=Budget(max_total_tokens=1_000))
    assert response.text == "Done."
    said = session[wink.runtime.ToolInvoked].latest().result.render()
    assert json.loads(said)["content"]["text"] == "Short."


# Directories, and what is not offered


def test_a_server_is_told_the_directories_that_it_may_work_in(asked: Ask, tmp_path: Path):
    answer = asked("roots/list", {}, roots=[tmp_path])
    assert answer["roots"] == [{"uri": tmp_path.as_uri(), "name": tmp_path.name}]
    with pytest.raises(TypeError, match="a list of directories"):
        McpToolsSection(server=older(), roots=str(tmp_path))


@pytest.mark.parametrize(
    ("method", "params"),
    [
        ("elicitation/create", {"mode": "form", "message": "?", "requestedSchema": BOOKING}),
        ("sampling/createMessage", SHORTEN),
        ("roots/list", {}),
    ],
)
def test_what_was_not_stated_is_not_offered(asked: Ask, method: str, params: dict[str, Any]):
    assert "not supported" in str(asked(method, params))
