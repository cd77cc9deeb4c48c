"""Records what an agent's tools do to a directory: each becomes one of our calls.

The agent reports each of its tools before and after it runs. Nothing of ours runs in between: the
files are noted in the store, and compared when the tool has ended.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_args

from weakincentives.adapters.claude_program import started_at
from weakincentives.cli.common import FILE_NAME, INSIDE, Misuse, shortened
from weakincentives.cli.hooks.adapters import Adapter
from weakincentives.cli.hooks.events import ENDS, Event, Reply
from weakincentives.core.clock import SYSTEM_CLOCK
from weakincentives.errors import WinkError

if TYPE_CHECKING:
    from weakincentives.cli.config import Settings
    from weakincentives.filesystem import HostFilesystem
    from weakincentives.filesystem.scan import Noted
    from weakincentives.prompt import ToolContext
    from weakincentives.prompt.approval import Approval, ApprovalRequest
    from weakincentives.prompt.tool import Reach
    from weakincentives.runtime import SavedSession
    from weakincentives.tool_result import ToolResult

PATIENCE = 120
"""Seconds that an agent waits for us; we wait half as long for others on the directory."""
_FORGOTTEN = 3600.0
"""Seconds after which a tool of another session that has not ended counts as killed."""
_OLD = 30 * 24 * 3600.0
"""Seconds that a session's first prompt is kept."""
_NOTED = 2_000
"""Characters of an argument that are noted until its tool has ended."""
_TITLE = 60
"""Characters of a prompt that a run is named after."""
_NO_END = (
    "There was no event at its end: it was cancelled, denied by the person, or went on in the "
    "background. This is all that changed in the directory until the next event."
)


def answer(adapter: Adapter, event: Event) -> Reply:
    """Record one event of an agent; return what to tell it."""
    root = Path(event.root).resolve()
    reply = Reply()
    is_before = event.kind == "before"
    is_inside = os.environ.get(INSIDE) == str(root)
    is_wide = _is_too_wide(root)
    if (is_inside or is_wide) and event.kind not in ("before", "prompt"):
        return reply
    if event.prompt:
        with suppress(WinkError, OSError):  # only the title of the run is lost
            _keep_prompt(root, event)
    if event.kind == "prompt" and is_wide:
        reply.messages.append(f"{root} {_TOO_WIDE}")
    try:
        hooked = _Hooked(adapter, event, root, reply)
        if is_inside or is_wide:  # inside `wink exec`, all of it is one call already
            if is_before:
                hooked.admit_unrecorded()
        elif hooked.has_work():
            with hooked.opened():
                if is_before:
                    hooked.before()
                elif event.kind in ("after", "failed"):
                    hooked.after()
                else:
                    hooked.stop()
    except (Misuse, WinkError, OSError) as error:
        if is_before:  # what would not be recorded does not run
            reply.denial = f"wink cannot record {event.tool}: {error}"
        else:
            reply.messages.append(f"wink has not recorded {event.tool or event.kind}: {error}")
    return reply


_TOO_WIDE = (
    "is not one project: wink records nothing here. Start the agent in the directory of a project"
)


def _is_too_wide(root: Path) -> bool:
    """Tell whether a directory holds everything of a user: too much to be noted for each tool."""
    return Path.home().resolve().is_relative_to(root)


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
    process: tuple[int, int] | None = None
    """The agent's process, and when it was started; None if that cannot be told."""
    is_over: bool = False
    """Whether it seems to have been cancelled: what it had changed is in a call already."""
    rules: str = ""
    """A digest of the rules under which it began."""


class _Hooked:
    """One event of an agent's session; its methods need the workspace open."""

    files: HostFilesystem

    def __init__(self, adapter: Adapter, event: Event, root: Path, reply: Reply) -> None:
        from weakincentives.cli.config import load_settings
        from weakincentives.cli.trust import trust_of

        self._adapter = adapter
        self._event = event
        self._reply = reply
        self._root = root
        self._is_call = event.tool not in adapter.not_calls
        self._reads = event.tool in adapter.reading or not self._is_call
        self._rules = _digest_of_rules(root)
        settings = load_settings(root, suites=[], sections=[])
        self._settings = _by_wire_name(settings, event.tool, adapter)
        trust_of(settings.workspace).admit(self._settings)
        self._asked: list[ApprovalRequest] = []
        """What the rules of the directory want a person to be asked."""

    def has_work(self) -> bool:
        """Tell whether the workspace must be opened for this event."""
        kind = self._event.kind
        if kind in ("after", "failed"):
            return self._is_call
        if kind != "before":
            finished = self._finished(_uses_in(self._root)).values()
            return any(kind in ENDS or not use.is_over for use in finished)
        if self._is_under_other_rules(_uses_in(self._root)):
            return True
        rules = self._settings.policy
        restricts = (rules.deny, rules.after, rules.quota, rules.rate, rules.use)
        return not self._reads or bool(self._settings.ask) or any(restricts)

    def admit_unrecorded(self) -> None:
        """Ask the rules where nothing is recorded; deny what they can't tell without a record."""
        from weakincentives.integrations.bridge import wire_name
        from weakincentives.prompt.refusals import by_rule

        tool, rules, asked = self._event.tool, self._settings.policy, self._settings.ask
        name, reply = wire_name(tool), self._reply
        limited = {*rules.quota, *rules.rate, *rules.after}
        if any(fnmatchcase(name, each) for each in rules.deny):
            reply.denial = by_rule(tool)
        elif rules.use or not limited.isdisjoint({name, "*"}):
            reply.denial = (
                f"wink.toml has rules about {tool} that need a record, and wink records nothing"
                " here: it is denied"
            )
        elif any(fnmatchcase(name, each) for each in asked) or self._reach in asked:
            self._ask_person(f"{tool} wants to run, and wink does not record it")

    @property
    def _reach(self) -> str:
        """What rules call the reach of the tool."""
        return _reach_of(self._event.tool, self._adapter) or "unstated"

    def _ask_person(self, question: str) -> None:
        if self._adapter.can_ask:
            # The agent asks the person: only if they agree, the tool runs and has an end.
            self._reply.question = question
        else:
            self._reply.denial = (
                f"wink.toml wants a person asked about {self._event.tool}, and a hook of "
                f"{self._adapter.title} cannot ask: it is denied"
            )

    @contextmanager
    def opened(self) -> Generator[None]:
        """Open the workspace, after waiting for others such as another hook."""
        from weakincentives.filesystem import HostFilesystem

        rules = self._settings.policy
        with HostFilesystem(
            self._root, wait=PATIENCE / 2, unprotected=rules.unprotect
        ) as self.files:
            yield

    def _save(self, uses: Mapping[str, _Use]) -> None:
        data = json.dumps({key: asdict(each) for key, each in uses.items()})
        _replace(_notes_of(self._root) / _USES, data.encode())

    # Events

    def before(self) -> None:
        """Ask the rules; note the files, unless another tool is under way."""
        event, uses = self._event, _uses_in(self._root)
        if self._is_under_other_rules(uses):
            self._adopt(uses)  # what has ended may have changed them, and that is undone
            self._save(uses)
            if self._is_under_other_rules(uses) or _digest_of_rules(self._root) != self._rules:
                self._reply.denial = (
                    "wink.toml has changed while another tool was running: what holds can be told"
                    " when that has ended. Try again then"
                )
                return
        key = event.use or _fresh(event)
        self._admit(key)
        if self._reply.denial or self._reads:
            return
        self._adopt(uses)
        if all(use.is_over for use in uses.values()):
            self.files.note_files()
        params = _shortened(self._params())
        now = SYSTEM_CLOCK.time()
        process = (event.process, started_at(event.process)) if event.process else None
        own = event.session, event.agent, event.turn, now, event.tool, params
        use = _Use(*own, process, rules=self._rules)
        self._save({**uses, key: use})

    def stop(self) -> None:
        """Record what tools without an end have changed: none of the agent's tools runs now."""
        uses = _uses_in(self._root)
        self._adopt(uses)
        self._let_go(uses)

    def after(self) -> None:
        """Commit what the tool has changed as one call; say so if that was refused."""
        event, uses = self._event, _uses_in(self._root)
        key = event.use or _begun(event, uses) or _fresh(event)
        is_known = uses.pop(key, None) is not None
        noted = self._noted(event.tool, self._params(), is_alone=not uses) if is_known else None
        message = self._commit(event.session, event.tool, self._params(), key, noted, event.answer)
        self._let_go(uses)
        self._reply.rolled_back = message or ""

    def _let_go(self, uses: Mapping[str, _Use]) -> None:
        """Save the tools that are still under way; they have what changes from here on."""
        self._save(uses)
        if uses:
            self.files.note_files()
        else:
            self.files.forget_note()

    def _is_under_other_rules(self, uses: Mapping[str, _Use]) -> bool:
        """Tell whether the rules have changed since a tool began that is still running."""
        return any(not use.is_over and use.rules != self._rules for use in uses.values())

    def _finished(self, uses: Mapping[str, _Use]) -> dict[str, _Use]:
        """Return the tools that this event shows not to run any more, or that began long ago."""
        return {
            key: use for key, use in uses.items() if key != self._event.use and self._has_ended(use)
        }

    def _has_ended(self, use: _Use) -> bool:
        event = self._event
        if use.process is not None and started_at(use.process[0]) != use.process[1]:
            return True  # the agent was killed
        if use.session != event.session:
            return SYSTEM_CLOCK.time() - use.began >= _FORGOTTEN
        if event.kind == "session_end":
            return True
        if use.agent != event.agent:  # a sub-agent works in the background, whatever the main does
            return False
        if event.kind in ENDS or (event.kind == "prompt" and not event.turn):
            return True
        # An agent may use several tools at once; those of the main one end with its turn.
        return not use.agent and use.turn != event.turn

    def _adopt(self, uses: dict[str, _Use]) -> None:
        """Commit what tools without an end have changed, and remove them."""
        under_way = len(uses)
        for key, use in self._finished(uses).items():
            del uses[key]
            if use.session == self._event.session and self._event.kind not in ENDS:
                uses[key] = replace(use, is_over=True)  # in case that it does have an end
            noted = self._noted(use.name, use.params, is_alone=under_way == 1)
            if use.is_over or not self.files.is_changed_since_noted(noted):
                continue
            given = use.session, use.name, use.params, f"{key}:no-end"
            message = self._commit(*given, noted, _NO_END)
            if message is not None:
                self._reply.messages.append(f"{use.name} has no end. {message}")

    def _admit(self, key: str) -> None:
        """Ask the rules of the directory."""
        from weakincentives.prompt import ToolContext
        from weakincentives.runtime.hosted import admit

        event = self._event
        given = event.tool, self._params(), key
        with self._run(event.session) as run, self._prompt(run, *given) as (call, prompt):
            context = ToolContext(session=run.session, prompt=prompt, resources=prompt.resources)
            admission = admit(call, context)
        if admission.result is not None:
            self._reply.denial = admission.result.message
        elif self._asked:
            self._ask_person(self._asked[0].question)

    def _ask(self, request: ApprovalRequest) -> Approval:
        from weakincentives.prompt.approval import Approval

        self._asked.append(request)
        return Approval(True, by=self._adapter.title)

    # The call

    def _params(self) -> object:
        from weakincentives.adapters.claude_program import with_path

        event, root = self._event, str(self.files.root)
        return with_path(event.params, event.directory, root, self._adapter.places)

    def _run(self, session: str) -> SavedSession:
        """Continue the run of a session, or begin it."""
        from weakincentives.prompt.approval import ApprovalAsked
        from weakincentives.runtime.calls import open_run

        title, key = self._adapter.title, f"{self._adapter.program} {session}"
        prompt = _prompt_of(self._root, session)
        if prompt:
            title += f": {prompt}"
        return open_run(self.files, title, key=key, types=[ApprovalAsked])

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
        from weakincentives.cli.workbench import open_workbench
        from weakincentives.core.call import ToolCall
        from weakincentives.integrations.bridge import own_tool
        from weakincentives.tool_result import ToolResult

        adapter, reach = self._adapter, _reach_of(name, self._adapter)
        reads = reach == "read"

        def adopt(_: object, *, context: ToolContext) -> ToolResult[str]:
            if noted is not None and not reads:
                cast("HostFilesystem", context.filesystem).expect_external(noted)
            return ToolResult.ok(answer)

        tool = own_tool(
            name,
            f"{name}, a tool of {adapter.title}.",
            adopt,
            reach=reach,
        )
        with open_workbench(
            self._settings, run.session, files=self.files, tools=[tool], ask=self._ask
        ) as workbench:
            yield ToolCall(tool.name, params, f"{run.mark}:{call_id}"), workbench.prompt

    def _noted(self, name: str, params: object, *, is_alone: bool) -> Noted:
        """Return what a tool may have changed: of one that edits a file, only that file.

        What else has changed meanwhile is someone else's.
        """
        from weakincentives.filesystem.scan import Noted

        path = str(cast("Mapping[str, object]", params).get("path", ""))
        if name not in self._adapter.editing or not path or os.path.isabs(path) or not is_alone:
            return Noted()
        return Noted(Path(path).parts)


def _reach_of(tool: str, adapter: Adapter) -> Reach | None:
    if tool in adapter.reading or tool in adapter.not_calls:
        return "read"
    return "reversible" if tool in adapter.editing else None


# What is noted of a directory until later events, in the user's state directory.

_USES = "uses.json"
"""The tools that have begun; changed only while the workspace is open."""


def _notes_of(root: Path) -> Path:
    from weakincentives.core.state import state_directory

    place = state_directory() / "hooks" / hashlib.sha256(os.fsencode(root)).hexdigest()[:16]
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    return place


def _replace(path: Path, data: bytes) -> None:
    staged = path.with_name(f"{path.name}.{os.getpid()}")
    staged.write_bytes(data)
    os.replace(staged, path)


def _uses_in(root: Path) -> dict[str, _Use]:
    try:
        found = json.loads((_notes_of(root) / _USES).read_bytes())
        uses = {str(key): _Use(**each) for key, each in found.items()}
        return {
            key: replace(use, process=use.process and (use.process[0], use.process[1]))
            for key, use in uses.items()
        }
    except (OSError, ValueError, TypeError, AttributeError):
        return {}  # none, or damaged: then changes are attributed less exactly


def _fresh(event: Event) -> str:
    """Return an id for a use, if the agent gives none."""
    return f"{_mark(event)}.{SYSTEM_CLOCK.time()}"


def _begun(event: Event, uses: Mapping[str, _Use]) -> str | None:
    """Return the id that the begin of a use was given, if the agent gives none."""
    same = [
        key
        for key, use in uses.items()
        if use.session == event.session and key.startswith(f"{_mark(event)}.")
    ]
    return min(same, key=lambda key: (uses[key].is_over, uses[key].began), default=None)


def _mark(event: Event) -> str:
    given = json.dumps([event.agent, event.tool, event.params], sort_keys=True)
    return hashlib.sha256(given.encode()).hexdigest()[:16]


def _keep_prompt(root: Path, event: Event) -> None:
    """Keep the first prompt of a session: its run is named after it once there is one."""
    text = shortened(" ".join(event.prompt.split()), _TITLE)
    place = _prompt_file(root, event.session)
    if not text or place.exists():
        return
    for other in place.parent.glob("*.prompt"):
        if SYSTEM_CLOCK.time() - other.stat().st_mtime > _OLD:
            other.unlink()
    _replace(place, text.encode(errors="replace"))


def _prompt_of(root: Path, session: str) -> str:
    try:
        return _prompt_file(root, session).read_text()
    except OSError:
        return ""


def _prompt_file(root: Path, session: str) -> Path:
    name = hashlib.sha256(session.encode(errors="replace")).hexdigest()[:16]
    return _notes_of(root) / f"{name}.prompt"


def _shortened(value: Any) -> Any:
    """Return arguments with long texts cut."""
    if isinstance(value, str):
        return value[:_NOTED]
    if isinstance(value, dict):
        return {str(key): _shortened(each) for key, each in cast("dict[Any, Any]", value).items()}
    if isinstance(value, list):
        return [_shortened(each) for each in cast("list[Any]", value)]
    return value


def _by_wire_name(settings: Settings, tool: str, adapter: Adapter) -> Settings:
    """Return settings whose rules name tools as our calls do, however the file spells them.

    Args:
        tool: The tool that is used, as the agent names it.

    Raises:
        Misuse: A rule names almost a tool of the agent: it would silently never apply.
    """
    from weakincentives.cli.common import hint
    from weakincentives.integrations.bridge import wire_name

    former = {_folded(old): _folded(new) for old, new in adapter.former.items()}

    def now(name: str) -> str:
        return former.get(_folded(name), _folded(name))

    full, own = now(tool), wire_name(tool)
    native = {_folded(each): each for each in adapter.tools}

    def wire(name: str) -> str:
        text = now(name)
        if text == full:
            return own  # which is cut if it is long
        near = "" if text in native or _GLOB.search(text) else hint(text, native, cutoff=0.75)
        if near and text not in _of_ours():
            raise Misuse(f"wink.toml: unknown tool {name!r}: the rule would never apply; {near}")
        return text

    def denied(name: str) -> str:
        spelled = {full, _folded(tool)}
        return own if any(fnmatchcase(each, now(name)) for each in spelled) else wire(name)

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


def _digest_of_rules(root: Path) -> str:
    try:
        return hashlib.sha256((root / FILE_NAME).read_bytes()).hexdigest()
    except OSError:
        return "none"


_GLOB = re.compile(r"[*?\[]")


def _folded(name: str) -> str:
    return re.sub(r"[^a-z0-9_*?\[\]!-]", "_", name.lower())


def _of_ours() -> frozenset[str]:
    """Return the names that rules about our own calls have: the file may serve both."""
    from weakincentives.cli.workbench import suite_tools
    from weakincentives.prompt.tool import Reach

    return suite_tools() | {*get_args(Reach), "unstated"}
