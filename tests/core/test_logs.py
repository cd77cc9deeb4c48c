"""Every line that is written during a call carries that call's id."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from weakincentives import Tool, ToolContext, ToolResult
from weakincentives.core.call import RunContext
from weakincentives.core.logs import CallFilter, Redaction, configure_logging, get_logger
from weakincentives.runtime import Session

ours = get_logger("tests.ours")
theirs = logging.getLogger("tests.theirs")


@dataclass(frozen=True)
class Params:
    word: str = "hello"


def write(word: str) -> None:
    ours.warning("ours says %s", word)
    theirs.warning("theirs says %s", word)


def handler(params: Params, *, context: ToolContext) -> ToolResult[None]:
    write(params.word)
    return ToolResult.ok()


async def async_handler(params: Params, *, context: ToolContext) -> ToolResult[None]:
    write(params.word)
    return ToolResult.ok()


def tool(handler: Callable[..., Any], **options: Any) -> Tool[Params, None]:
    return Tool[Params, None](name="talk", description="Talk.", handler=handler, **options)


@pytest.fixture(autouse=True)
def _quiet_root() -> Iterator[None]:
    """Leave the root logger as it was."""
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    yield
    for handler in root.handlers[:]:
        if handler not in before:
            root.removeHandler(handler)
    root.setLevel(level)


@pytest.fixture
def stream() -> io.StringIO:
    return io.StringIO()


def json_lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [
        line
        for line in map(json.loads, stream.getvalue().splitlines())
        if line["logger"].startswith("tests.")
    ]


@pytest.mark.parametrize(
    "talk",
    [tool(handler), tool(handler, timeout=600.0), tool(async_handler)],
    ids=["sync", "in a thread", "async"],
)
def test_lines_of_any_logger_carry_the_call_as_json(
    talk: Tool[Params, None], stream: io.StringIO
) -> None:
    configure_logging(as_json=True, stream=stream)
    session = Session(session_id="s1")
    context = ToolContext(session=session, run_context=RunContext(run_id="r1"))

    result = talk(Params("Grüße\n"), context=context)

    first, second = json_lines(stream)
    assert first["message"] == "ours says Grüße\n"
    assert second["message"] == "theirs says Grüße\n"
    for line in (first, second):
        assert line["call_id"] == result.call_id
        assert line["tool"] == "talk"
        assert line["session_id"] == "s1"
        assert line["run_id"] == "r1"
        assert line["level"] == "WARNING"
        assert isinstance(line["time"], float)


def test_lines_of_any_logger_carry_the_call_as_text(stream: io.StringIO) -> None:
    configure_logging(stream=stream)

    write("before")
    result = tool(handler)(Params("during"), context=ToolContext(session=Session()))

    lines = stream.getvalue().splitlines()
    assert [line.split(": ", 1)[1] for line in lines] == [
        "ours says before",
        "theirs says before",
        f"[talk {result.call_id}] ours says during",
        f"[talk {result.call_id}] theirs says during",
    ]


def test_a_nested_call_has_its_own_id(stream: io.StringIO) -> None:
    nested: list[str] = []

    def outer(params: Params, *, context: ToolContext) -> ToolResult[None]:
        write("outer")
        nested.append(tool(handler)(Params("inner"), context=context).call_id)
        write("outer again")
        return ToolResult.ok()

    configure_logging(as_json=True, stream=stream)

    result = tool(outer)(Params(), context=ToolContext(session=Session()))

    ids = [line["call_id"] for line in json_lines(stream)]
    assert ids == [result.call_id] * 2 + nested * 2 + [result.call_id] * 2
    assert nested != [result.call_id]


def test_what_the_runtime_says_about_a_call_carries_its_id(stream: io.StringIO) -> None:
    def fails(params: Params, *, context: ToolContext) -> ToolResult[None]:
        raise RuntimeError("broken")

    configure_logging(as_json=True, stream=stream)

    result = tool(fails)(Params(), context=ToolContext(session=Session()))

    [line] = [json.loads(text) for text in stream.getvalue().splitlines()]
    assert line["call_id"] == result.call_id
    assert "RuntimeError: broken" in line["exception"]


def test_outside_calls_the_fields_are_empty(caplog: pytest.LogCaptureFixture) -> None:
    ours.warning("hello")

    [record] = caplog.records
    fields = record.__dict__
    assert [fields[name] for name in ("call_id", "tool", "session_id", "run_id")] == [""] * 4


def test_the_filter_gives_the_fields_to_any_handler() -> None:
    stream = io.StringIO()
    handler_of_mine = logging.StreamHandler(stream)
    handler_of_mine.addFilter(CallFilter())
    handler_of_mine.setFormatter(logging.Formatter("%(call_id)s|%(tool)s|%(message)s"))
    theirs.addHandler(handler_of_mine)
    try:
        theirs.warning("outside")
        result = tool(handler)(Params("inside"), context=ToolContext(session=Session()))
    finally:
        theirs.removeHandler(handler_of_mine)

    assert stream.getvalue().splitlines() == [
        "||outside",
        f"{result.call_id}|talk|theirs says inside",
    ]


class TestJsonLines:
    def test_what_the_caller_adds_is_in_the_line(self, stream: io.StringIO) -> None:
        configure_logging(as_json=True, stream=stream)

        ours.warning("hello", extra={"path": "a.txt", "size": 3, "by": object, "tool": "mine"})

        [line] = json_lines(stream)
        assert line["path"] == "a.txt"
        assert line["size"] == 3
        assert line["by"] == "<class 'object'>"
        assert line["tool"] == "mine"
        assert "call_id" not in line

    def test_errors_and_stacks_are_in_the_line(self, stream: io.StringIO) -> None:
        configure_logging(as_json=True, stream=stream)
        try:
            raise ValueError("broken")
        except ValueError:
            ours.exception("it failed", stack_info=True)

        [line] = json_lines(stream)
        assert line["message"] == "it failed"
        assert "ValueError: broken" in line["exception"]
        assert "test_errors_and_stacks" in line["stack"]

    def test_any_text_can_be_written_to_any_stream(self) -> None:
        raw = io.BytesIO()
        configure_logging(as_json=True, stream=io.TextIOWrapper(raw, encoding="ascii"))

        ours.warning("Grüße aus \udc80")

        assert json.loads(raw.getvalue())["message"] == "Grüße aus \udc80"


class TestConfiguring:
    def test_the_level_holds(self, stream: io.StringIO) -> None:
        configure_logging("ERROR", stream=stream)

        write("quietly")
        ours.error("loudly")

        assert stream.getvalue().count("\n") == 1

    def test_a_level_that_does_not_exist_adds_no_handler(self) -> None:
        before = logging.getLogger().handlers[:]

        with pytest.raises(ValueError, match="LOUD"):
            configure_logging("LOUD")

        assert logging.getLogger().handlers == before

    def test_configuring_a_stream_again_does_not_double_its_lines(
        self, stream: io.StringIO
    ) -> None:
        other = io.StringIO()
        configure_logging(stream=stream)
        configure_logging(stream=other)
        configure_logging(as_json=True, stream=stream)

        ours.warning("hello")

        assert len(json_lines(stream)) == 1
        assert other.getvalue().count("hello") == 1

    def test_lines_go_to_standard_error_by_default(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        handler = configure_logging()

        ours.warning("hello")
        logging.getLogger().removeHandler(handler)

        assert "tests.ours: hello" in capsys.readouterr().err


def test_no_text_of_others_acts_on_a_terminal_or_looks_like_a_line_of_its_own(
    stream: io.StringIO,
):
    configure_logging(stream=stream)

    theirs.warning("it said: %s", "\x1b[2J\u202e\n2026-01-01 00:00:00,000 INFO ours: all is well")

    first, second = stream.getvalue().splitlines()
    assert first.endswith("it said: \\x1b[2J\\u202e")
    assert second.startswith("    2026-01-01")


# Secrets


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("the key is hunter2-hunter2!", "the key is (the key)!"),
        ("?key=hunter2-hunter2&x=1", "?key=(the key)&x=1"),
        ("https://me:s3cret-word@host/x", "https://(the key)@host/x"),
        ("Authorization: Bearer abcdef.123456", "Authorization: Bearer (the key)"),
        ("sk-proj-0123456789abcdefghijAB", "(the key)"),
        ("ghp_0123456789abcdefghijABCDEFGHIJ012345", "(the key)"),
        ("AKIAIOSFODNN7EXAMPLE", "(the key)"),
        ("export DB_PASSWORD=abc12345678", "export DB_PASSWORD=(the key)"),
        ("+SECRET_KEY=abc12345678", "+SECRET_KEY=(the key)"),
        ("-SECRET_KEY=abc12345678", "-SECRET_KEY=(the key)"),
        ("     2\tAPI_KEY=abc12345678", "     2\tAPI_KEY=(the key)"),
        (".env:3:API_KEY=abc12345678", ".env:3:API_KEY=(the key)"),
        ("  - DB_PASSWORD=abc12345678", "  - DB_PASSWORD=(the key)"),
        ("ENV API_KEY=abc12345678", "ENV API_KEY=(the key)"),
        ("cd x && export API_KEY=abc12345678", "cd x && export API_KEY=(the key)"),
        ("API_KEY = abc12345678", "API_KEY = (the key)"),
        ('API_KEY="two words of it"', 'API_KEY="(the key)"'),
        ("api_key = 'abcdefgh123'", "api_key = '(the key)'"),
        ('{"auth_token": "abcdefgh123"}', '{"auth_token": "(the key)"}'),
        (
            "-----BEGIN RSA PRIVATE KEY-----\nMIIB\n-----END RSA PRIVATE KEY-----\nrest",
            "-----BEGIN RSA PRIVATE KEY-----(the key)\n\n-----END RSA PRIVATE KEY-----\nrest",
        ),
    ],
)
def test_a_secret_is_replaced_and_lines_stay_where_they_are(
    monkeypatch: pytest.MonkeyPatch, text: str, shown: str
):
    monkeypatch.setenv("SHOP_API_KEY", "hunter2-hunter2")

    assert Redaction()(text) == shown


@pytest.mark.parametrize(
    "text",
    [
        "token = next_token()",
        "password: Optional[str] = None",
        "key = 'the name of a field'",
        "monkey = 'abcdefghijk'",
        "api_key=os.environ['X']",
        "SECRET_KEY=$(cat key.txt)",
        "SECRET_KEY = os.environ['SECRET_KEY']",
        "API_TOKEN = read_token(path)",
        "see https://host/a@b and me@host",
        "class sk-cube-grid",
    ],
)
def test_source_code_that_only_names_secrets_stays_as_it_is(text: str):
    assert Redaction()(text) == text


def test_in_data_the_values_of_secret_names_are_replaced():
    data = {
        "api_key": "abcdefghij",
        "tokens": 5,
        "key": "src/settings.py",
        "list": [{"secret": "x"}],
    }

    assert Redaction().value(data) == {**data, "api_key": "(the key)"}


def numbered(text: str) -> str:
    return "\n".join(f"{n:>6}\t{line}" for n, line in enumerate(text.split("\n"), 1))


SECRET = "7hJ2kQ9xW4vB8nM1cR6tY3uZ5pL0sDgFaEiOoXqKwVb"
KEYS = {
    "age": f"# public key: age1x\nAGE-SECRET-KEY-1{SECRET.upper()}Q8LQ9XGZ3S5R6",
    "WireGuard": f"[Interface]\nPrivateKey = {SECRET}=\nAddress = 10.0.0.1/24",
    "PuTTY": f"Public-Lines: 1\nAAAA\nPrivate-Lines: 2\n{SECRET}\n{SECRET[:20]}\nPrivate-MAC: 0f",
    "JSON Web Key": json.dumps({"kty": "EC", "x": "public", "d": SECRET}, indent=1),
}


@pytest.mark.parametrize("kind", KEYS)
@pytest.mark.parametrize("spelled", [str, json.dumps, numbered])
def test_private_keys_in_formats_of_their_own_are_hidden(kind: str, spelled: Callable[[str], str]):
    text = spelled(KEYS[kind])

    done = Redaction()(text)

    assert SECRET[:20] not in done
    assert SECRET.upper() not in done
    assert done.count("\n") == text.count("\n")
    assert "public" in done or "Address" in done or "Private-MAC" in done


def test_so_are_those_of_a_json_web_key_in_data():
    data = {"kty": "RSA", "n": "public", "d": SECRET, "qi": SECRET}

    assert Redaction().value(data) == {**data, "d": "(the key)", "qi": "(the key)"}
    assert Redaction().value({"d": SECRET, "n": 1}) == {"d": SECRET, "n": 1}
