"""The program that the ledger's kill test kills: calls that reach a service, each under its own id.

Run as ``ledger_child.py LEDGER URL COUNT RESOLVES``. It says ``ready`` before the first call, and
afterwards, for each call, its id, its outcome on record and the code of its failure.
"""

from __future__ import annotations

import sys
from urllib.request import Request, urlopen

from weakincentives import Session, Tool, ToolCall, ToolContext, ToolResult, execute_tool
from weakincentives.prompt import Effect, Prompt, PromptTemplate
from weakincentives.prompt.section import MarkdownSection
from weakincentives.runtime.ledger import CallOutcome, OutcomeLedger

URL = sys.argv[2] if len(sys.argv) > 2 else ""


def ask(method: str, key: str) -> int:
    """Tell the service something about a key; returns how often it has taken effect."""
    request = Request(f"{URL}/orders", method=method, headers={"Idempotency-Key": key})
    with urlopen(request) as response:
        return int(response.read())


def order(params: dict, *, context: ToolContext) -> ToolResult[str]:
    ask("POST", context.idempotency_key)
    if params["fails"]:
        raise RuntimeError("out of stock, as it turns out")
    return ToolResult.ok("ordered", "ordered")


def cancel(context: ToolContext) -> None:
    ask("DELETE", context.idempotency_key)


def found_out(call: CallOutcome) -> str:
    return "committed" if ask("GET", call.call_id) else "rolled_back"


TOOL = Tool.from_schema(
    "order",
    "Order something.",
    {
        "type": "object",
        "properties": {"fails": {"type": "boolean"}},
        "required": ["fails"],
        "additionalProperties": False,
    },
    order,
    reach="compensable",
    effects=[Effect(description="cancel the order", apply=lambda: None, rollback=cancel)],
)


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(path: str, count: int, resolves: bool) -> None:
    ledger = OutcomeLedger(path, resolve=found_out if resolves else None)
    prompt = Prompt(PromptTemplate(sections=[MarkdownSection(title="Shop", tools=[TOOL])]))
    prompt = prompt.bind(resources={OutcomeLedger: ledger})
    session = Session()
    prompt.render(session)
    say("ready")
    for number in range(count):
        call_id = f"order-{number}"
        known = ledger.find(call_id)
        # As a client does that learned of a failure: it is over.
        if known is None or known.outcome not in ("committed", "compensated"):
            call = ToolCall("order", {"fails": number % 3 == 2}, id=call_id)
            result = execute_tool(call, session=session)
            code = "" if result.failure is None else result.failure.code
        else:
            code = "on record"
        outcome = ledger.find(call_id)
        say(f"{call_id} {outcome and outcome.outcome} {code}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[3]), sys.argv[4] == "resolves")
