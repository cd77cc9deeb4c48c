"""`wink hook`: what another vendor's agent does to a directory becomes our calls.

The agent starts this program before and after each of its tools. Nothing runs in between: the files
are noted in the store, and compared when the tool has ended.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args

import typer

from weakincentives.cli.common import INSIDE, Misuse, echo, examples
from weakincentives.clock import SYSTEM_CLOCK
from weakincentives.errors import WinkError

if TYPE_CHECKING:
    from weakincentives.cli.config import Settings
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
    "SubagentStop": None,
    "Stop": None,
    "SessionEnd": None,
}
"""The events to be told of, each with the tools that count."""
_ENDS = ("SubagentStop", "Stop", "SessionEnd")
_PATIENCE = 120
"""Seconds that Claude Code waits for us; we wait half as long for others on the directory."""
_FORGOTTEN = 3600.0
"""Seconds after which a tool of another session that has not ended counts as killed."""
_SAID = 20_000
"""Characters of a tool's answer that are recorded."""
_NOTED = 2_000
"""Characters of an argument that are noted until its tool has ended."""
_NO_END = (
    "It was cancelled, or denied by the person: there was no event at its end. This is all that "
    "changed in the directory until the next event."
)


@examples(
    "wink hook claude-code --print-settings > wink-hooks.json",
    "claude --settings wink-hooks.json   # beside the settings that you have",
    "wink log                            # afterwards: every tool that Claude Code has used",
    more="Claude Code starts it, with a JSON object on standard input. To have the hooks in every "
    'session, add them to the "hooks" in .claude/settings.json by hand; do not write the output '
    "over that file.",
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
        typer.Option("--print-settings", help="Print the hooks for Claude Code's settings."),
    ] = False,
) -> None:
    """Record every call of Claude Code, to undo each."""
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
    command = f"{_program()} hook claude-code"
    if workspace is not None:
        command += f" -w {shlex.quote(str(workspace.resolve()))}"
    hooks: dict[str, Any] = {}
    for event, tools in _EVENTS.items():
        # Only exit code 2 denies a tool: without us it must not run unrecorded.
        fails_closed = " || exit 2" if event == "PreToolUse" else ""
        ours = [{"type": "command", "command": command + fails_closed, "timeout": _PATIENCE}]
        hooks[event] = [{"hooks": ours} if tools is None else {"matcher": tools, "hooks": ours}]
    return {"hooks": hooks}


def _program() -> str:
    """Return how to start this `wink` from anywhere: a hook may have another PATH."""
    own = Path(sys.executable).parent / "wink"
    if own.exists():
        return shlex.quote(str(own))
    return f"{shlex.quote(sys.executable)} -P -m weakincentives.cli"


def _answer(
    event: str, session: str, told: Mapping[str, Any], root: Path
) -> Mapping[str, Any] | None:
    """Return what to tell Claude Code, if anything."""
    name = str(told.get("tool_name", ""))
    is_before = event == "PreToolUse"
    is_inside = os.environ.get(INSIDE) == str(root)
    if event not in _EVENTS or (is_inside and not is_before):
        return None
    try:
        hooked = _Hooked(event, session, told, root)
        if is_inside:  # of `wink exec`: all of it is one call already
            return hooked.denied_by_name()
        if not hooked.has_work():
            return None
        with hooked.opened():
            if is_before:
                said = hooked.before()
            elif event in _ENDS:
                said = hooked.stop()
            else:
                said = hooked.after(failed=event == "PostToolUseFailure")
        if hooked.messages:
            said = {**(said or {}), "systemMessage": "\n".join(hooked.messages)}
        return said
    except (Misuse, WinkError, OSError) as error:
        if is_before:  # what would not be recorded does not run
            return _denial(f"wink cannot record {name}: {error}")
        return {"systemMessage": f"wink has not recorded {name or event}: {error}"}


def _denial(reason: str, decision: str = "deny") -> dict[str, Any]:
    said = {"permissionDecision": decision, "permissionDecisionReason": reason}
    return {"hookSpecificOutput": {"hookEventName": "PreToolUse", **said}}


@dataclass(frozen=True, slots=True)
class _Use:
    """A tool that has begun."""

    session: str
    agent: str
    """The sub-agent that uses it; empty for the main one."""
    turn: str
    """What identifies the agent's turn, if the program tells."""
    began: float
    name: str
    params: Any
    """Its arguments, with long texts cut."""
    is_over: bool = False
    """Whether it seems to have been cancelled: what it had changed is in a call already."""


class _Hooked:
    """One event of a session of Claude Code; its methods need the workspace open."""

    files: HostFilesystem

    def __init__(self, event: str, session: str, told: Mapping[str, Any], root: Path) -> None:
        from weakincentives.adapters.claude_program import NOT_CALLS, READING
        from weakincentives.cli.config import load_settings
        from weakincentives.cli.trust import trust_of

        self._event = event
        self._session = session
        self._told = told
        self._root = root
        self._name = str(told.get("tool_name", ""))
        self._id = str(told.get("tool_use_id", ""))
        self._agent = str(told.get("agent_id") or "")
        self._turn = str(told.get("prompt_id") or told.get("turn_id") or "")
        self._is_call = self._name not in NOT_CALLS
        self._reads = self._name in READING or not self._is_call
        self._settings = _by_wire_name(load_settings(root, suites=[], sections=[]), self._name)
        trust_of(self._settings.workspace).admit(self._settings)
        self._asked: list[ApprovalRequest] = []
        """What the rules of the directory want a person to be asked."""
        self.messages: list[str] = []
        """What to tell the person."""

    def has_work(self) -> bool:
        """Tell whether the workspace must be opened for this event."""
        if self._event in _ENDS:
            from weakincentives.filesystem.store import location_of

            return bool(self._finished(_uses_in(location_of(self._root))))
        if self._event != "PreToolUse":
            return self._is_call
        rules = self._settings.policy
        restricts = (rules.deny, rules.after, rules.quota, rules.rate, rules.use)
        return not self._reads or bool(self._settings.ask) or any(restricts)

    def denied_by_name(self) -> Mapping[str, Any] | None:
        """Return the answer to a tool that the rules deny by its name, if they do."""
        from weakincentives.integrations.bridge import wire_name

        name = wire_name(self._name)
        if any(fnmatchcase(name, each) for each in self._settings.policy.deny):
            return _denial(f"{self._name} is not allowed here. Do without it")
        return None

    @contextmanager
    def opened(self) -> Generator[None]:
        """Open the workspace, after waiting for others such as another hook."""
        from weakincentives.filesystem import HostFilesystem

        rules = self._settings.policy
        with HostFilesystem(
            self._root, wait=_PATIENCE / 2, unprotected=rules.unprotect
        ) as self.files:
            yield

    def _save(self, uses: Mapping[str, _Use]) -> None:
        from weakincentives.filesystem.store import write_whole

        data = json.dumps({key: asdict(each) for key, each in uses.items()})
        write_whole(self.files.store / _USES, data.encode(), safe=False)

    # Events

    def before(self) -> Mapping[str, Any] | None:
        """Ask the rules; note the files, unless another tool is under way."""
        denial = self._admitted()
        is_denied = denial is not None and (
            denial["hookSpecificOutput"]["permissionDecision"] == "deny"
        )
        if is_denied or self._reads:
            return denial
        uses = _uses_in(self.files.store)
        finished = self._finished(uses)
        self._adopt(uses, finished)
        for key, use in finished.items():
            del uses[key]
            if use.session == self._session and not use.is_over:
                uses[key] = replace(use, is_over=True)  # in case that it does have an end
        if all(use.is_over for use in uses.values()):
            self.files.note_files()
        params = _shortened(self._params())
        now = SYSTEM_CLOCK.time()
        use = _Use(self._session, self._agent, self._turn, now, self._name, params)
        self._save({**uses, self._id: use})
        return denial

    def stop(self) -> None:
        """Record what tools without an end have changed: none of the agent's tools runs now."""
        uses = _uses_in(self.files.store)
        finished = self._finished(uses)
        self._adopt(uses, finished)
        self._let_go({key: use for key, use in uses.items() if key not in finished})

    def after(self, *, failed: bool) -> Mapping[str, Any] | None:
        """Commit what the tool has changed as one call; say so if that was refused."""
        uses = _uses_in(self.files.store)
        is_known = uses.pop(self._id, None) is not None
        noted = self._noted(self._name, self._params(), is_alone=not uses) if is_known else None
        answer = _said(self._told, failed)
        message = self._commit(self._session, self._name, self._params(), self._id, noted, answer)
        self._let_go(uses)
        return None if message is None else {"decision": "block", "reason": message}

    def _let_go(self, uses: Mapping[str, _Use]) -> None:
        """Save the tools that are still under way; they have what changes from here on."""
        self._save(uses)
        if uses:
            self.files.note_files()
        else:
            self.files.forget_note()

    def _finished(self, uses: Mapping[str, _Use]) -> dict[str, _Use]:
        """Return the tools that this event shows not to run any more, or that began long ago."""
        return {key: use for key, use in uses.items() if key != self._id and self._has_ended(use)}

    def _has_ended(self, use: _Use) -> bool:
        if use.session != self._session:
            return SYSTEM_CLOCK.time() - use.began >= _FORGOTTEN
        if self._event == "SessionEnd":
            return True
        if use.agent != self._agent:  # a sub-agent works in the background, whatever the main does
            return False
        if self._event in _ENDS or not self._turn:
            return True
        # An agent may use several tools at once; those of the main one end with its turn.
        return not use.agent and use.turn != self._turn

    def _adopt(self, uses: Mapping[str, _Use], finished: Mapping[str, _Use]) -> None:
        """Commit what tools without an end have changed."""
        for key, use in finished.items():
            noted = self._noted(use.name, use.params, is_alone=len(uses) == 1)
            if use.is_over or not self.files.is_changed_since_noted(noted):
                continue
            given = use.session, use.name, use.params, f"{key}:no-end"
            message = self._commit(*given, noted, _NO_END)
            if message is not None:
                self.messages.append(f"{use.name} has no end. {message}")

    def _admitted(self) -> dict[str, Any] | None:
        """Ask the rules of the directory; return what to tell Claude Code, if anything."""
        from weakincentives.prompt import ToolContext
        from weakincentives.runtime.hosted import admit

        given = self._name, self._params(), self._id
        with self._run(self._session) as run, self._prompt(run, *given) as (call, prompt):
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

    def _params(self) -> object:
        from weakincentives.adapters.claude_program import with_path

        directory = str(self._told.get("cwd") or self._root)
        return with_path(self._told.get("tool_input") or {}, directory, str(self.files.root))

    def _run(self, session: str) -> SavedSession:
        """Continue the run of a session, or begin it."""
        from weakincentives.prompt.approval import ApprovalAsked
        from weakincentives.runtime.calls import open_run

        key = f"claude-code {session}"
        return open_run(self.files, "Claude Code", key=key, types=[ApprovalAsked])

    def _commit(
        self,
        session: str,
        name: str,
        params: object,
        call_id: str,
        noted: Noted | None,
        answer: str,
    ) -> str | None:
        """Commit what a tool has changed as a call; return why it was rolled back, or None."""
        from weakincentives.runtime import execute_tool

        with (
            self._run(session) as run,
            self._prompt(run, name, params, call_id, noted, answer) as (call, prompt),
        ):
            result = execute_tool(call, session=run.session, prompt=prompt, once=True)
        return None if result.success else f"Rolled back: {result.message}"

    @contextmanager
    def _prompt(
        self,
        run: SavedSession,
        name: str,
        params: object,
        call_id: str,
        noted: Noted | None = None,
        answer: str = "",
    ) -> Generator[tuple[Any, Any]]:
        """Yield the call, and a prompt with its tool and the rules of the directory."""
        from weakincentives.adapters.claude_program import EDITING, NOT_CALLS, READING
        from weakincentives.call import ToolCall
        from weakincentives.cli.workbench import open_workbench
        from weakincentives.integrations.bridge import own_tool
        from weakincentives.tool_result import ToolResult

        reads = name in READING or name in NOT_CALLS

        def adopt(_: object, *, context: ToolContext) -> ToolResult[str]:
            if noted is not None and not reads:
                cast("HostFilesystem", context.filesystem).expect_external(noted)
            return ToolResult.ok(answer)

        tool = own_tool(
            name,
            f"{name}, a tool of Claude Code.",
            adopt,
            reach="read" if reads else "reversible" if name in EDITING else None,
        )
        with open_workbench(
            self._settings, run.session, files=self.files, tools=[tool], ask=self._ask
        ) as workbench:
            yield ToolCall(tool.name, params, f"{run.mark}:{call_id}"), workbench.prompt

    def _noted(self, name: str, params: object, *, is_alone: bool) -> Noted:
        """Return what a tool may have changed: of one that edits a file, only that file.

        What else has changed meanwhile is someone else's.
        """
        from weakincentives.adapters.claude_program import EDITING
        from weakincentives.filesystem.scan import Noted

        path = str(cast("Mapping[str, object]", params).get("path", ""))
        if name not in EDITING or not path or os.path.isabs(path) or not is_alone:
            return Noted()
        return Noted(Path(path).parts)


# The tools that have begun, in the store; changed only while the workspace is open.

_USES = "claude-code.json"


def _uses_in(store: Path) -> dict[str, _Use]:
    try:
        found = json.loads((store / _USES).read_bytes())
        return {str(key): _Use(**each) for key, each in found.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}  # none, or damaged: then changes are attributed less exactly


def _shortened(value: Any) -> Any:
    """Return arguments with long texts cut."""
    if isinstance(value, str):
        return value[:_NOTED]
    if isinstance(value, dict):
        return {str(key): _shortened(each) for key, each in cast("dict[Any, Any]", value).items()}
    if isinstance(value, list):
        return [_shortened(each) for each in cast("list[Any]", value)]
    return value


def _by_wire_name(settings: Settings, tool: str) -> Settings:
    """Return settings whose rules name tools as our calls do, however the file spells them.

    Args:
        tool: The tool that is used, as Claude Code names it.

    Raises:
        Misuse: A rule names almost a tool of Claude Code: it would silently never apply.
    """
    from weakincentives.adapters.claude_program import EDITING, NOT_CALLS, READING
    from weakincentives.cli.common import hint
    from weakincentives.integrations.bridge import wire_name

    full, own = _folded(tool), wire_name(tool)
    native = {_folded(each): each for each in (*EDITING, *NOT_CALLS, *READING, "Bash")}

    def wire(name: str) -> str:
        text = _folded(name)
        if text == full:
            return own  # which is cut if it is long
        near = "" if text in native or _GLOB.search(text) else hint(text, native, cutoff=0.75)
        if near and text not in _of_ours():
            raise Misuse(f"wink.toml: unknown tool {name!r}: the rule would never apply; {near}")
        return text

    def denied(name: str) -> str:
        return own if fnmatchcase(full, _folded(name)) else wire(name)

    rules = settings.policy
    policy = rules.model_copy(
        update={
            "deny": tuple(map(denied, rules.deny)),
            "quota": {wire(name): most for name, most in rules.quota.items()},
            "rate": {wire(name): most for name, most in rules.rate.items()},
            "after": {wire(name): tuple(map(wire, each)) for name, each in rules.after.items()},
        }
    )
    approve = tuple(each.model_copy(update={"tool": wire(each.tool)}) for each in settings.approve)
    ask = tuple(map(wire, settings.ask))
    return settings.model_copy(update={"policy": policy, "ask": ask, "approve": approve})


_GLOB = re.compile(r"[*?\[]")


def _folded(name: str) -> str:
    return re.sub(r"[^a-z0-9_*?\[\]!-]", "_", name.lower())


def _of_ours() -> set[str]:
    """Return the names that rules about our own calls have: the file may serve both."""
    from weakincentives.cli.workbench import suite_tools
    from weakincentives.prompt.tool import Reach

    return suite_tools() | {*get_args(Reach), "unstated"}


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
