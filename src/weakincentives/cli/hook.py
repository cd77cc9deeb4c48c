"""`wink hook`: what another vendor's agent does to a directory becomes our calls.

The agent starts this program before and after each of its tools. Nothing runs in between: the files
are noted in the store, and compared when the tool has ended.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from weakincentives.cli.common import INSIDE, Misuse, echo, examples
from weakincentives.clock import SYSTEM_CLOCK
from weakincentives.errors import WinkError

if TYPE_CHECKING:
    from weakincentives.filesystem import HostFilesystem
    from weakincentives.filesystem.scan import Noted
    from weakincentives.prompt import ToolContext
    from weakincentives.prompt.approval import Approval, ApprovalRequest
    from weakincentives.runtime import SavedSession
    from weakincentives.tool_result import ToolResult

_EVENTS = {
    "PreToolUse": "*",
    "PostToolUse": "*",
    "PostToolUseFailure": "*",
    "Stop": None,
    "SessionEnd": None,
}
"""The events to be told of, each with the tools that count."""
_PATIENCE = 120
"""Seconds that Claude Code waits for us; we wait half as long for others on the directory."""
_FORGOTTEN = 3600.0
"""Seconds after which a tool of another session that has not ended counts as killed."""
_SAID = 20_000
"""Characters of a tool's answer that are recorded."""


@examples(
    "wink hook claude-code --print-settings > .claude/settings.json",
    "wink log                      # afterwards: every tool that Claude Code has used",
    more="Claude Code starts it, with a JSON object on standard input. "
    'In the documentation: "Claude Code with hooks".',
)
def claude_code(
    workspace: Annotated[
        Path | None,
        typer.Option(
            "--workspace",
            "-w",
            metavar="DIR",
            help="The directory to record; by default the project of Claude Code.",
        ),
    ] = None,
    print_settings: Annotated[
        bool,
        typer.Option("--print-settings", help="Print what to put into .claude/settings.json."),
    ] = False,
) -> None:
    """Record every tool that Claude Code uses as one call, which `wink undo` undoes."""
    if print_settings:
        echo(json.dumps(_settings(workspace), indent=2))
        return
    try:
        told = json.loads(sys.stdin.buffer.read())
        event, session = str(told["hook_event_name"]), str(told["session_id"])
    except (ValueError, KeyError, TypeError) as error:
        raise Misuse(
            f"expected a hook's JSON object on standard input ({error!r}); Claude Code starts this:"
            " see wink hook claude-code --print-settings"
        ) from error
    root = workspace or Path(os.environ.get("CLAUDE_PROJECT_DIR") or str(told.get("cwd", ".")))
    said = _answer(event, session, told, root.resolve())
    if said:
        typer.echo(json.dumps(said))


def _settings(workspace: Path | None) -> dict[str, Any]:
    program = "wink" if shutil.which("wink") else f"{sys.executable} -P -m weakincentives.cli"
    command = f"{program} hook claude-code"
    if workspace is not None:
        import shlex

        command += f" -w {shlex.quote(str(workspace.resolve()))}"
    ours = [{"type": "command", "command": command, "timeout": _PATIENCE}]
    return {
        "hooks": {
            event: [{"hooks": ours} if tools is None else {"matcher": tools, "hooks": ours}]
            for event, tools in _EVENTS.items()
        }
    }


def _answer(
    event: str, session: str, told: Mapping[str, Any], root: Path
) -> Mapping[str, Any] | None:
    """Return what to tell Claude Code, if anything."""
    from weakincentives.adapters.claude_program import NOT_CALLS, READING

    name = str(told.get("tool_name", ""))
    is_before = event == "PreToolUse"
    if event not in _EVENTS or name in NOT_CALLS or (is_before and name in READING):
        return None
    if os.environ.get(INSIDE) == str(root):
        return None  # all of it is one call already
    try:
        with _Hooked(session, told, root).opened() as hooked:
            if is_before:
                return hooked.before()
            if event in ("Stop", "SessionEnd"):
                return hooked.forget()
            return hooked.after(failed=event == "PostToolUseFailure")
    except (Misuse, WinkError, OSError) as error:
        if is_before:  # what would not be recorded does not run
            return _denial(f"wink cannot record {name}: {error}")
        return {"systemMessage": f"wink has not recorded {name}: {error}"}


def _denial(reason: str, decision: str = "deny") -> dict[str, Any]:
    said = {"permissionDecision": decision, "permissionDecisionReason": reason}
    return {"hookSpecificOutput": {"hookEventName": "PreToolUse", **said}}


@dataclass(frozen=True, slots=True)
class _Use:
    """A tool that has begun."""

    session: str
    agent: str
    """The sub-agent that uses it; empty for the main one. Each uses one such tool at a time."""
    began: float


class _Hooked:
    """One event of a session of Claude Code, with the workspace open."""

    files: HostFilesystem

    def __init__(self, session: str, told: Mapping[str, Any], root: Path) -> None:
        self._session = session
        self._told = told
        self._root = root
        self._name = str(told.get("tool_name", ""))
        self._id = str(told.get("tool_use_id", ""))
        self._asked: list[ApprovalRequest] = []
        """What the rules of the directory want a person to be asked."""

    @contextmanager
    def opened(self) -> Generator[_Hooked]:
        """Open the workspace, after waiting for others such as another hook."""
        from weakincentives.cli.config import load_settings
        from weakincentives.cli.trust import trust_of
        from weakincentives.filesystem import HostFilesystem

        self._settings = load_settings(self._root, suites=[], sections=[])
        trust_of(self._settings.workspace).admit(self._settings)
        rules = self._settings.policy
        with HostFilesystem(
            self._root, wait=_PATIENCE / 2, unprotected=rules.unprotect
        ) as self.files:
            yield self

    # The tools that have begun, in the store; changed only while the workspace is open.

    @property
    def _place(self) -> Path:
        return self.files.store / "claude-code.json"

    def _uses(self) -> dict[str, _Use]:
        try:
            found = json.loads(self._place.read_bytes())
            return {
                str(key): _Use(str(each["session"]), str(each["agent"]), float(each["began"]))
                for key, each in found.items()
            }
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}  # none, or damaged: then changes are attributed less exactly

    def _save(self, uses: Mapping[str, _Use]) -> None:
        from weakincentives.filesystem.store import write_whole

        data = json.dumps({key: asdict(each) for key, each in uses.items()})
        write_whole(self._place, data.encode(), safe=False)

    # Events

    def before(self) -> Mapping[str, Any] | None:
        """Note the files, unless another agent's tool is under way; say why it must not run."""
        denial = self._admitted()
        if denial is not None and denial["hookSpecificOutput"]["permissionDecision"] == "deny":
            return denial
        agent, now = str(self._told.get("agent_id") or ""), SYSTEM_CLOCK.time()
        # One of the same agent was denied or killed: it has no end.
        uses = {
            key: each
            for key, each in self._uses().items()
            if (each.session, each.agent) != (self._session, agent)
            and now - each.began < _FORGOTTEN
        }
        if not uses:
            self.files.note_files()
        self._save({**uses, self._id: _Use(self._session, agent, now)})
        return denial

    def forget(self) -> None:
        """Forget the tools of a session that has finished: no event comes for those any more."""
        uses = self._uses()
        left = {key: each for key, each in uses.items() if each.session != self._session}
        if left != uses:
            self._save(left)

    def after(self, *, failed: bool) -> Mapping[str, Any] | None:
        """Commit what the tool has changed as one call; say so if that was refused."""
        from weakincentives.runtime import execute_tool

        uses = self._uses()
        is_known = uses.pop(self._id, None) is not None
        with self._run() as run, self._prompt(run, uses, is_known, failed) as (call, prompt):
            result = execute_tool(call, session=run.session, prompt=prompt, once=True)
        self._save(uses)
        if uses:
            self.files.note_files()  # the tools under way have what changes from here on
        if result.success:
            return None
        return {"decision": "block", "reason": f"Rolled back: {result.message}"}

    def _admitted(self) -> dict[str, Any] | None:
        """Ask the rules of the directory; return what to tell Claude Code, if anything."""
        from weakincentives.prompt import ToolContext
        from weakincentives.runtime.hosted import admit

        with self._run() as run, self._prompt(run, {}, False, False) as (call, prompt):
            context = ToolContext(session=run.session, prompt=prompt, resources=prompt.resources)
            admission = admit(call, context)
        if admission.result is not None:
            return _denial(admission.result.message)
        # Claude Code asks the person: only if they agree, the tool runs and has an end.
        return _denial(self._asked[0].question, "ask") if self._asked else None

    def _ask(self, request: ApprovalRequest) -> Approval:
        from weakincentives.prompt.approval import Approval

        self._asked.append(request)
        return Approval(True, by="Claude Code")

    # The call

    def _run(self) -> SavedSession:
        """Continue the run of the session, or begin it."""
        from weakincentives.prompt.approval import ApprovalAsked
        from weakincentives.runtime.calls import open_run

        key = f"claude-code {self._session}"
        return open_run(self.files, "Claude Code", key=key, types=[ApprovalAsked])

    @contextmanager
    def _prompt(
        self, run: SavedSession, others: Mapping[str, _Use], is_known: bool, failed: bool
    ) -> Generator[tuple[Any, Any]]:
        """Yield the call, and a prompt with its tool and the rules of the directory."""
        from weakincentives.adapters.claude_program import EDITING, READING, with_path
        from weakincentives.call import ToolCall
        from weakincentives.cli.workbench import open_workbench
        from weakincentives.integrations.bridge import own_tool
        from weakincentives.tool_result import ToolResult

        root, directory = str(self.files.root), str(self._told.get("cwd") or self._root)
        params = with_path(self._told.get("tool_input") or {}, directory, root)
        reads = self._name in READING

        def adopt(_: object, *, context: ToolContext) -> ToolResult[str]:
            if is_known and not reads:
                files = cast("HostFilesystem", context.filesystem)
                files.expect_external(self._noted(params, is_alone=not others))
            return ToolResult.ok(_said(self._told, failed))

        tool = own_tool(
            self._name,
            f"{self._name}, a tool of Claude Code.",
            adopt,
            reach="read" if reads else "reversible" if self._name in EDITING else None,
        )
        with open_workbench(
            self._settings, run.session, files=self.files, tools=[tool], ask=self._ask
        ) as workbench:
            yield ToolCall(tool.name, params, f"{run.mark}:{self._id}"), workbench.prompt

    def _noted(self, params: object, *, is_alone: bool) -> Noted:
        """Return what the tool may have changed: of one that edits a file, only that file.

        What else has changed meanwhile is someone else's.
        """
        from weakincentives.adapters.claude_program import EDITING
        from weakincentives.filesystem.scan import Noted

        path = str(cast("Mapping[str, object]", params).get("path", ""))
        if self._name not in EDITING or not path or os.path.isabs(path) or not is_alone:
            return Noted()
        return Noted(Path(path).parts)


def _said(told: Mapping[str, Any], failed: bool) -> str:
    """Return a tool's answer as text, shortened."""
    if failed:
        return f"It failed: {told.get('error', '')}"[:_SAID]
    answer = told.get("tool_response")
    if isinstance(answer, dict):
        streams = cast("dict[str, object]", answer)
        if "stdout" in streams:
            answer = f"{streams['stdout']}\n{streams.get('stderr', '')}".strip("\n")
    text = answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)
    return text[:_SAID]
