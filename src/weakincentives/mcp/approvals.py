"""A tool with which the user of an MCP client answers what durable runs ask.

The model can only bring up the question. The answer comes from a form that the client shows to its
user; without one, nothing is answered.
"""

from __future__ import annotations

import asyncio

from weakincentives.durable.runs import Runs, WaitingApproval
from weakincentives.errors import AnswerRefused, ToolValidationError
from weakincentives.mcp.elicitation import answer_of_client
from weakincentives.prompt import MarkdownSection, Section, Tool, ToolContext
from weakincentives.prompt.approval import Approval
from weakincentives.tool_result import ToolResult

_WORK = """
Runs elsewhere may wait for the approval of the user. `ask_about_waiting_run` shows the user what
the oldest of them asks, in a form of their client; only the user can answer it.
"""


def approvals_section(runs: Runs) -> Section[None]:
    """Return a section with the tool, for the prompt of an ``McpServer``."""

    async def ask_about_waiting_run(params: None, *, context: ToolContext) -> ToolResult[None]:
        waiting = await asyncio.to_thread(runs.pending)
        if not waiting:
            return ToolResult.ok(None, "No run waits for an approval.")
        asked = waiting[0]
        # From the form alone: without an answer of a person, the request stays open.
        answer = await answer_of_client(asked.request)
        await asyncio.to_thread(_answer, runs, asked, answer)
        done = "approved" if answer.approved else "denied"
        left = len(waiting) - 1
        more = f" {left} more wait." if left else ""
        message = f"{answer.by} {done} {asked.request.tool_name} of {asked.run}.{more}"
        return ToolResult.ok(None, message)

    tool: Tool[None, None] = Tool(
        name="ask_about_waiting_run",
        description="Ask the user about the oldest call of another run that waits for approval.",
        handler=ask_about_waiting_run,
        reach="read",
    )
    return MarkdownSection(title="Runs that wait", template=_WORK, tools=[tool])


def _answer(runs: Runs, asked: WaitingApproval, answer: Approval) -> None:
    try:
        runs.answer(
            asked.id,
            approved=answer.approved,
            digest=asked.digest,
            reason=answer.reason,
            arguments=answer.arguments,
            by=answer.by,
        )
    except AnswerRefused as error:
        raise ToolValidationError(str(error)) from error
