"""What differs between other vendors' agents: their events, their tools, and how to answer them.

Most of them speak the dialect of Claude Code, with names of their own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from weakincentives.adapters.claude_program import EDITING, FORMER, NOT_CALLS, READING
from weakincentives.cli.common import Misuse, hint
from weakincentives.cli.hooks.events import Event, Kind, Reply

Told = Mapping[str, Any]

_SAID = 20_000
"""Characters of a tool's answer that are recorded."""
_CLAUDE: Mapping[str, Kind] = {
    "UserPromptSubmit": "prompt",
    "PreToolUse": "before",
    "PostToolUse": "after",
    "PostToolUseFailure": "failed",
    "SubagentStop": "subagent_end",
    "Stop": "turn_end",
    "SessionEnd": "session_end",
}


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """One agent: here as it is if it speaks the dialect of Claude Code."""

    program: str
    title: str
    kinds: Mapping[str, Kind]
    """The events to be told of, each with what it means."""
    editing: frozenset[str]
    """Tools that change only the file that they name."""
    reading: frozenset[str]
    """Tools that change no file."""
    not_calls: frozenset[str] = frozenset()
    """Tools that change nothing themselves, such as those that start a sub-agent."""
    others: frozenset[str] = frozenset()
    """More tools that a rule may name."""
    former: Mapping[str, str] = field(default_factory=dict[str, str])
    """Former names of tools that a rule may have, each with the present one."""
    places: tuple[str, ...] = ("file_path",)
    """Arguments that name the file."""
    root_variable: str = ""
    """The environment variable that names the project."""
    can_ask: bool = False
    """Whether a hook can have the person asked; if not, what needs approval is denied."""
    can_block: bool = True

    @property
    def tools(self) -> frozenset[str]:
        return self.editing | self.reading | self.not_calls | self.others

    def read(self, told: Told) -> Event | None:
        """Return the event; None if it is of no interest.

        Raises:
            KeyError, TypeError: It is not an event of this agent.
        """
        kind = self.kinds.get(str(told["hook_event_name"]))
        if kind is None:
            return None
        directory = str(told.get("cwd") or ".")
        return Event(
            kind=kind,
            session=str(told["session_id"]),
            directory=directory,
            root=os.environ.get(self.root_variable) or directory,
            agent=str(told.get("agent_id") or ""),
            turn=str(told.get("prompt_id") or told.get("turn_id") or ""),
            tool=str(told.get("tool_name") or ""),
            use=str(told.get("tool_use_id") or ""),
            params=told.get("tool_input") or {},
            answer=_said(told, failed=kind == "failed"),
            prompt=str(told.get("prompt") or ""),
            process=int(told.get("process_id") or 0),
        )

    def write(self, kind: Kind, reply: Reply) -> Mapping[str, Any] | None:
        """Return what to print, if anything."""
        said: dict[str, Any] = {}
        if reply.denial:
            said |= _decision("deny", reply.denial)
        elif reply.question:
            said |= _decision("ask", reply.question)
        if reply.rolled_back:
            said |= {"decision": "block", "reason": reply.rolled_back}
        if reply.messages:
            said["systemMessage"] = "\n".join(reply.messages)
        return said or None


class Gemini(Adapter):
    """Gemini CLI: a decision of its own, before and after a tool."""

    def write(self, kind: Kind, reply: Reply) -> Mapping[str, Any] | None:
        said: dict[str, Any] = {}
        reason = reply.denial or reply.rolled_back
        if reason:
            said |= {"decision": "deny", "reason": reason}
        if reply.messages:
            said["systemMessage"] = "\n".join(reply.messages)
        return said or None


class Plugin(Adapter):
    """An agent in which a plug-in of ours runs: it tells and takes what is simplest."""

    def write(self, kind: Kind, reply: Reply) -> Mapping[str, Any] | None:
        said = {
            "block": reply.denial,
            "rolled_back": reply.rolled_back,
            "message": "\n".join(reply.messages),
        }
        return {name: text for name, text in said.items() if text} or None


def _decision(decision: str, reason: str) -> dict[str, Any]:
    said = {"permissionDecision": decision, "permissionDecisionReason": reason}
    return {"hookSpecificOutput": {"hookEventName": "PreToolUse", **said}}


def _said(told: Told, *, failed: bool) -> str:
    """Return a tool's answer as text, shortened."""
    if failed:
        return f"It failed: {told.get('error', '')}"[:_SAID]
    answer = told.get("tool_response", told.get("tool_result"))
    if isinstance(answer, dict):
        fields = cast("dict[str, object]", answer)
        if "stdout" in fields:
            answer = f"{fields['stdout']}\n{fields.get('stderr', '')}".strip("\n")
        for name in ("llmContent", "text_result_for_llm"):
            if isinstance(fields.get(name), str):
                answer = fields[name]
    text = answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)
    return text[:_SAID]


_GEMINI_READING = frozenset(
    {"glob", "grep_search", "list_directory", "read_file", "read_many_files", "web_fetch"}
)

ADAPTERS: Mapping[str, Adapter] = {
    each.program: each
    for each in (
        Adapter(
            program="claude",
            title="Claude Code",
            kinds=_CLAUDE,
            editing=EDITING,
            reading=READING,
            not_calls=NOT_CALLS,
            others=frozenset({"Bash", "Monitor"}),
            former=FORMER,
            places=("file_path", "notebook_path"),
            root_variable="CLAUDE_PROJECT_DIR",
            can_ask=True,
        ),
        Adapter(
            program="codex",
            title="Codex",
            kinds={**_CLAUDE, "Interrupt": "turn_end"},
            editing=frozenset(),
            reading=frozenset({"view_image", "web_search"}),
            others=frozenset({"Bash", "apply_patch"}),
        ),
        Adapter(
            program="copilot",
            title="Copilot CLI",
            kinds=_CLAUDE,
            editing=frozenset({"create", "edit"}),
            reading=frozenset({"fetch_copilot_cli_documentation", "glob", "grep", "view"}),
            not_calls=frozenset({"ask_user", "report_intent", "skill", "task", "update_todo"}),
            others=frozenset({"bash"}),
            places=("path",),
        ),
        Gemini(
            program="gemini",
            title="Gemini CLI",
            kinds={
                "BeforeAgent": "prompt",
                "BeforeTool": "before",
                "AfterTool": "after",
                "AfterAgent": "turn_end",
                "SessionEnd": "session_end",
            },
            editing=frozenset({"replace", "write_file"}),
            reading=_GEMINI_READING | {"google_web_search", "search_file_content"},
            not_calls=frozenset({"activate_skill", "ask_user", "write_todos"}),
            others=frozenset({"run_shell_command"}),
            root_variable="GEMINI_PROJECT_DIR",
        ),
        Plugin(
            program="opencode",
            title="OpenCode",
            kinds=_CLAUDE,
            editing=frozenset({"edit", "write"}),
            reading=frozenset({"glob", "grep", "list", "lsp", "read", "webfetch", "websearch"}),
            not_calls=frozenset({"question", "skill", "task", "todoread", "todowrite"}),
            others=frozenset({"bash", "patch"}),
            places=("filePath",),
        ),
        Plugin(
            program="pi",
            title="pi",
            kinds=_CLAUDE,
            editing=frozenset({"edit", "write"}),
            reading=frozenset({"find", "grep", "ls", "read"}),
            others=frozenset({"bash"}),
            places=("path",),
        ),
        Adapter(
            program="qwen",
            title="Qwen Code",
            kinds=_CLAUDE,
            editing=frozenset({"edit", "notebook_edit", "write_file"}),
            reading=_GEMINI_READING | {"lsp", "web_search"},
            not_calls=frozenset(
                {"agent", "ask_user_question", "skill", "todo_write", "tool_search"}
            ),
            others=frozenset({"run_shell_command"}),
            places=("file_path", "notebook_path"),
        ),
    )
}


def adapter_of(name: str) -> Adapter:
    """Return what is known of an agent, by the name of its program or package.

    Raises:
        Misuse: There is no such agent, or it has no hooks.
    """
    from weakincentives.cli.coding_agents import agent_named

    program = agent_named(name)
    if program is not None and program in ADAPTERS:
        return ADAPTERS[program]
    if program is not None:
        raise Misuse(f"{program} has no hooks that wink knows; run: wink exec -- {program}")
    known = ", ".join(sorted(ADAPTERS))
    raise Misuse(f"unknown agent {name!r}: {hint(name, ADAPTERS, f'it can be {known}')}")
