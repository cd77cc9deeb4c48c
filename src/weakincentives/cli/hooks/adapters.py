"""What differs between other vendors' agents: their events, their tools, and how to answer them.

Most of them speak the dialect of Claude Code, with names of their own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
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


class Cline(Adapter):
    """Cline: an agent has an id of its own, and what is said of a tool is in one field."""

    def read(self, told: Told) -> Event | None:
        kind = self.kinds.get(_CLINE.get(str(told["hookName"]), ""))
        if kind is None:
            return None
        is_sub = bool(told.get("parent_agent_id"))
        if is_sub and kind == "turn_end":
            kind = "subagent_end"
        tool: Told = told.get("tool_call") or told.get("tool_result") or {}
        if kind == "after" and tool.get("error"):
            kind = "failed"
        context: Told = told.get("sessionContext") or {}
        submitted: Told = told.get("userPromptSubmit") or {}
        roots: Sequence[str] = told.get("workspaceRoots") or ["."]
        session = str(context.get("rootSessionId") or told["taskId"])
        end = {"tool_response": tool.get("output"), "error": tool.get("error")}
        return Event(
            kind=kind,
            session=session,
            directory=roots[0],
            root=roots[0],
            agent=str(told["agent_id"]) if is_sub else "",
            tool=str(tool.get("name") or ""),
            use=str(tool.get("id") or ""),
            params=tool.get("input") or {},
            answer=_said(end, failed=kind == "failed"),
            prompt=str(submitted.get("prompt") or (_cline_prompt(session) if not is_sub else "")),
        )

    def write(self, kind: Kind, reply: Reply) -> Mapping[str, Any] | None:
        if reply.denial:
            return {"cancel": True, "errorMessage": reply.denial}
        said = "\n".join([*reply.messages, reply.rolled_back]).strip("\n")
        return {"context": said} if said else None


def _cline_prompt(session: str) -> str:
    """Return a session's first prompt, which Cline notes and does not always tell."""
    home = os.environ.get("CLINE_DIR") or Path.home() / ".cline"
    data = os.environ.get("CLINE_DATA_DIR") or Path(home) / "data"
    sessions = os.environ.get("CLINE_SESSION_DATA_DIR") or Path(data) / "sessions"
    name = Path(session).name
    with suppress(OSError, ValueError, KeyError, TypeError):
        return str(json.loads((Path(sessions) / name / f"{name}.json").read_bytes())["prompt"])
    return ""


_CLINE = {
    "prompt_submit": "UserPromptSubmit",
    "tool_call": "PreToolUse",
    "tool_result": "PostToolUse",
    "agent_end": "TaskComplete",
    "agent_abort": "TaskCancel",
    "agent_error": "TaskError",
    "session_shutdown": "SessionShutdown",
}
"""The file that an event's hook is in, by what the event is called when it is told."""


class Copilot(Adapter):
    """Copilot CLI: a sub-agent has a session of its own, whose parent is the agent's session."""

    def read(self, told: Told) -> Event | None:
        parent = told.get("parent_agent_id")
        if not parent or told.get("agent_id") != told.get("session_id"):
            return super().read(told)
        event = super().read({**told, "session_id": parent})
        if event is None or event.kind == "prompt":  # the agent wrote it, not the person
            return None
        return replace(event, kind="subagent_end") if event.kind == "turn_end" else event


class Goose(Adapter):
    """goose: Claude's events in other words; only the hook before a tool is listened to."""

    def read(self, told: Told) -> Event | None:
        names = {"hook_event_name": "event", "cwd": "working_dir", "tool_use_id": "tool_call_id"}
        names |= {"tool_response": "tool_output", "prompt": "message", "error": "tool_output"}
        own = {ours: told.get(theirs) for ours, theirs in names.items()}
        # Only events of tools tell the directory; hooks are started in it.
        event = super().read({**told, **own})
        if event is None or event.tool != "delegate" or event.kind != "after":
            return event
        # No hook is told of a sub-agent's tools. One in the background works until the turn ends.
        return None if event.params.get("async") else event

    def write(self, kind: Kind, reply: Reply) -> Mapping[str, Any] | None:
        return {"decision": "block", "reason": reply.denial} if reply.denial else None


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
        Cline(
            program="cline",
            title="Cline",
            kinds={
                "UserPromptSubmit": "prompt",
                "PreToolUse": "before",
                "PostToolUse": "after",
                "TaskComplete": "turn_end",
                "TaskCancel": "turn_end",
                "TaskError": "turn_end",
                "SessionShutdown": "session_end",
            },
            editing=frozenset({"editor"}),
            reading=frozenset({"fetch_web_content", "read_files", "search_codebase"}),
            not_calls=frozenset({"ask_question", "skills", "spawn_agent", "submit_and_exit"}),
            others=frozenset({"apply_patch", "run_commands"}),
            places=("path",),
        ),
        Adapter(
            program="codex",
            title="Codex",
            kinds={**_CLAUDE, "Interrupt": "turn_end"},
            editing=frozenset(),
            reading=frozenset({"view_image", "web_search"}),
            others=frozenset({"Bash", "apply_patch"}),
        ),
        Copilot(
            program="copilot",
            title="Copilot CLI",
            kinds=_CLAUDE,
            editing=frozenset({"create", "edit"}),
            reading=frozenset({"fetch_copilot_cli_documentation", "glob", "grep", "view"}),
            not_calls=frozenset(
                {"Agent", "ask_user", "report_intent", "skill", "task", "update_todo"}
            ),
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
        Goose(
            program="goose",
            title="goose",
            kinds={
                "UserPromptSubmit": "prompt",
                "PreToolUse": "before",
                "PostToolUse": "after",
                "PostToolUseFailure": "failed",
                "Stop": "turn_end",
                "SessionEnd": "session_end",
            },
            editing=frozenset({"edit", "write"}),
            reading=frozenset({"analyze", "load", "read_image", "tree"}),
            not_calls=frozenset({"load_skill", "todo__todo_write"}),
            others=frozenset({"shell"}),
            places=("path",),
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
