"""What an agent gets on a directory: its files, tools, rules and prompt."""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache, cached_property
from pathlib import Path
from typing import Any, cast, get_args

from weakincentives.cli.common import FILE_NAME, Misuse, hint, open_workspace
from weakincentives.cli.config import Settings
from weakincentives.cli.models import has_own_tools
from weakincentives.cli.trust import file_of, trust_of
from weakincentives.contrib.tools import (
    PlanningToolsSection,
    PodmanSandboxConfig,
    PodmanSandboxSection,
    SandboxSettings,
    VfsConfig,
    VfsToolsSection,
    WorkspaceDigestSection,
    file_tools,
    planning_tools,
)
from weakincentives.contrib.tools.suite import load_types as load_own_types
from weakincentives.errors import (
    FilesystemError,
    MissingExtra,
    PromptOverrideError,
    PromptValidationError,
    SandboxUnavailable,
)
from weakincentives.filesystem import Filesystem, HostFilesystem
from weakincentives.filesystem.overlay import find_way
from weakincentives.filesystem.store import location_of
from weakincentives.prompt import (
    Approval,
    ApprovalPolicy,
    ApprovalRule,
    MarkdownSection,
    Prompt,
    PromptTemplate,
    ProtectedPathsPolicy,
    QuotaPolicy,
    RateLimitPolicy,
    ReadBeforeWritePolicy,
    Section,
    SequentialDependencyPolicy,
    Tool,
)
from weakincentives.prompt.approval import ApprovalRequest, Ask
from weakincentives.prompt.completion import TaskCompletionChecker
from weakincentives.prompt.overrides import (
    PromptOverrides,
    SectionOverride,
    TextOverride,
    describe,
)
from weakincentives.prompt.policies import AnyPolicy, AttachedPolicy, attach, names_of
from weakincentives.prompt.prompt import OfferedTool
from weakincentives.prompt.refusals import by_rule
from weakincentives.prompt.tool import Reach
from weakincentives.runtime import Session, ToolRegistry


@dataclass(frozen=True, kw_only=True)
class Workbench:
    """What an agent works with."""

    session: Session
    prompt: Prompt[Any]
    filesystem: HostFilesystem
    shell: PodmanSandboxSection | None
    """Has the sandbox; None if no commands are offered."""
    completion: TaskCompletionChecker | None

    @property
    def sandbox(self) -> str:
        """What commands run in; found by trying, which takes a moment."""
        if self.shell is None:
            return "no commands"
        try:
            return self.shell.sandbox.name
        except SandboxUnavailable:
            return "no commands: no sandbox works here"

    @cached_property
    def offers(self) -> dict[str, OfferedTool]:
        """Every tool with its policies, as if all sections were open."""
        template = self.prompt.template
        return {
            tool.name: OfferedTool.of(tool, (*attach(section.policies), *template.policies))
            for section in _with_children(template.sections)
            for tool in section.tools
        }


@contextmanager
def preview(settings: Settings, session: Session | None = None) -> Generator[Workbench]:
    """Yield what an agent would get, without a lock and without changing the directory."""
    workspace, unprotected = settings.workspace, settings.policy.unprotect
    with tempfile.TemporaryDirectory(prefix="wink-") as store:
        is_outside = not Path(store).resolve().is_relative_to(workspace)
        with (
            # A store of its own needs no lock.
            HostFilesystem(workspace, store=store)
            if is_outside
            else open_workspace(workspace, unprotected=unprotected) as files,
            open_workbench(settings, session, files=files, suspends=True) as workbench,
        ):
            yield workbench


@contextmanager
def open_workbench(
    settings: Settings,
    session: Session | None = None,
    *,
    ask: Ask | None = None,
    suspends: bool = False,
    files: HostFilesystem | None = None,
    policies: Sequence[AnyPolicy] = (),
    tools: Sequence[Tool[Any, Any]] | None = None,
    texts: Mapping[str, str] | None = None,
    more: Sequence[Section[Any]] = (),
) -> Generator[Workbench]:
    """Open the workspace and yield what an agent needs on it.

    Args:
        ask: Decides about calls that need approval; without it they are denied.
        suspends: Whether a call that needs approval is suspended instead, until someone answers.
        files: The workspace, if it is open already.
        policies: More rules for all tools.
        tools: Offer these in place of what the settings select; a rule may be about any tool.
        texts: Replace the texts of the prompt's sections, by path.
        more: Sections to add.
    """
    session = Session() if session is None else session
    trust_of(settings.workspace).admit(settings)
    bare = settings.policy.unprotect
    opening = nullcontext(files) if files else open_workspace(settings.workspace, unprotected=bare)
    with opening as files:
        if tools is None:
            sections, shell, planning = _sections(settings, session, files)
        else:
            sections: list[Section[Any]] = [MarkdownSection(title="Programs", tools=tools)]
            shell = planning = None
        rules = attach([*policies, *_policies(settings, None if suspends else ask or _deny)])
        if tools is None:
            _check_names(settings, _names([*sections, *more]))
        else:
            rules = tuple(each.for_any_tool() for each in rules)
        try:
            template = PromptTemplate(
                ns="wink",
                key="workbench",
                name="Workbench",
                sections=[*sections, *more],
                policies=rules,
                resources={Filesystem: files},
            )
            prompt = Prompt(template, overrides=_overrides(template, texts or {}))
        except PromptOverrideError as error:
            raise Misuse(f"cannot change the prompt: {'; '.join(error.problems)}") from error
        except PromptValidationError as error:
            raise Misuse(f"these tools and rules do not fit together: {error}") from error
        workbench = Workbench(
            session=session,
            prompt=prompt,
            filesystem=files,
            shell=shell,
            completion=None if planning is None else planning.completion,
        )
        with prompt.resources:
            yield workbench


# Sections


def _sections(
    settings: Settings, session: Session, files: HostFilesystem
) -> tuple[list[Section[Any]], PodmanSandboxSection | None, PlanningToolsSection | None]:
    sections: list[Section[Any]] = [MarkdownSection(title="Your work", template=_WORK)]
    planning = shell = None
    rules = (ReadBeforeWritePolicy(),) if settings.policy.read_before_write else ()
    if "planning" in settings.suites:
        planning = PlanningToolsSection(session=session)
        sections.append(planning)
    if "shell" in settings.suites:
        shell = _shell(settings, files, rules)
        sections.append(shell)
    elif "files" in settings.suites:
        sections.append(VfsToolsSection(config=VfsConfig(filesystem=files), policies=rules))
    if "python" in settings.suites:
        sections.append(_python(has_shell=shell is not None))
    if "digest" in settings.suites:
        sections.append(WorkspaceDigestSection(filesystem=files))
    for spec in settings.sections:
        sections += _as_sections(spec, _loaded("sections", spec, settings), session)
    return sections, shell, planning


def _overrides(template: PromptTemplate[Any], texts: Mapping[str, str]) -> PromptOverrides | None:
    """Return what replaces the texts of sections; an unknown section is refused there."""
    if not texts:
        return None
    now = describe(template).sections
    sections: dict[str, SectionOverride] = {}
    for path, text in texts.items():
        known = now.get(path, SectionOverride()).text
        # As it stands: a dollar sign is not a placeholder.
        override = TextOverride.of("" if known is None else known.text, text.replace("$", "$$"))
        sections[path] = SectionOverride(text=override)
    return PromptOverrides(ns=template.ns, key=template.key, tag="rerun", sections=sections)


def _shell(
    settings: Settings, files: HostFilesystem, rules: Sequence[AnyPolicy]
) -> PodmanSandboxSection:
    config = PodmanSandboxConfig(filesystem=files, sandbox=settings.sandbox)
    section = PodmanSandboxSection(config=config, policies=rules)
    if settings.sandbox != SandboxSettings():  # chosen settings must work
        try:
            section.sandbox.environment(files.root, files.store)
        except SandboxUnavailable as error:
            raise Misuse(f"sandbox {settings.sandbox.engine}: {error}") from error
        except ValueError as error:
            raise Misuse(str(error)) from error
    return section


def _python(*, has_shell: bool) -> Section[Any]:
    from weakincentives.contrib.tools import AstevalConfig, AstevalSection

    # The shell's section has a tool called evaluate_python.
    name = "evaluate_script" if has_shell else "evaluate_python"
    try:
        return AstevalSection(config=AstevalConfig(tool_name=name))
    except MissingExtra as error:
        raise Misuse(f'cannot use the suite "python": {error}') from error


def _as_sections(spec: str, found: object, session: Session) -> list[Section[Any]]:
    """Return a named object as sections."""
    title = spec.rpartition(":")[2].replace("_", " ").capitalize()
    if not isinstance(found, Tool) and callable(found):
        return _as_sections(spec, _made(spec, found, session), session)
    if isinstance(found, ToolRegistry):
        return [found.as_section(title=title)]
    several = _several(cast("object", found))
    if several and all(isinstance(each, Tool) for each in several):
        return [MarkdownSection(title=title, tools=cast("Sequence[Tool[Any, Any]]", several))]
    if several and all(isinstance(each, Section) for each in several):
        return list(cast("Sequence[Section[Any]]", several))
    raise Misuse(
        f"sections: {spec} is a {type(cast('object', found)).__name__}; expected a section, a "
        "ToolRegistry, a tool, a list of these, or a function that returns one"
    )


def _several(found: object) -> Sequence[object]:
    return cast("Sequence[object]", found) if isinstance(found, (list, tuple)) else (found,)


def _made(spec: str, make: Callable[..., object], session: Session | None = None) -> object:
    """Return the result of a function that takes nothing, or a session."""
    try:
        takes_session = "session" in inspect.signature(make).parameters
        return make(session=session) if takes_session else make()
    except (Exception, SystemExit) as error:
        raise Misuse(f"{spec} failed: {type(error).__name__}: {error}") from error


def _names(sections: Iterable[Section[Any]]) -> set[str]:
    return names_of(tool for section in _with_children(sections) for tool in section.tools)


def _with_children(sections: Iterable[Section[Any]]) -> Iterable[Section[Any]]:
    for each in sections:
        yield each
        yield from _with_children(each.children)


_WORK = """
You work on the directory that your tools show you, for the user whose message follows. Do
everything they ask for, and nothing else.

- Look before you change anything: read the relevant files, and learn the project's conventions.
- Make small changes in the existing style. Run the project's tests after a change if you can run
  commands; an untested change is not finished.
- Every call is a transaction. A failed call has changed nothing: read why, and try another way.
  A denied call breaks one of the user's rules: do not look for a way around it.
- At the end, say in a few plain sentences what you did, how you tested it, and what remains.
"""


# Rules


def _policies(settings: Settings, ask: Ask | None) -> list[AttachedPolicy]:
    """Return the rules for all tools; approval comes last, for what the others allow."""
    rules = settings.policy
    try:
        policies: list[Any] = [ProtectedPathsPolicy(_protected(settings))]
    except FilesystemError as error:
        raise Misuse(f"policy.protect: {error}") from error
    if rules.deny:
        policies.append(_DenyPolicy(rules.deny))
    if rules.after:
        after = {tool: frozenset(needed) for tool, needed in rules.after.items()}
        policies.append(SequentialDependencyPolicy(dependencies=after))
    for tool, most in rules.quota.items():
        policies.append(QuotaPolicy(most, tools=_tools(tool), name=f"quota of {tool}"))
    for tool, rate in rules.rate.items():
        most = int(rate.partition("/")[0])
        policies.append(RateLimitPolicy(most, tools=_tools(tool), name=f"rate of {tool}"))
    for spec in rules.use:
        policies += _own_policies(spec, settings)
    if settings.ask:
        known = _reaches()
        reaches = frozenset[Any](known[name] for name in settings.ask if name in known)
        tools = frozenset(name for name in settings.ask if name not in known)
        # Ctrl-C ends the wait.
        try:
            approved = [ApprovalRule(**dict(each)) for each in settings.approve]
        except (FilesystemError, ValueError) as error:
            raise Misuse(f"approve: {error}") from error
        policies.append(
            ApprovalPolicy(ask=ask, tools=tools, reaches=reaches, timeout=None, approved=approved)
        )
    # A rule may be about a suite that is disabled.
    known = suite_tools()
    return [each.except_for(known) for each in attach(policies)]


def _tools(name: str) -> frozenset[str]:
    return frozenset() if name == "*" else frozenset({name})


def _protected(settings: Settings) -> tuple[str, ...]:
    """Return the protected globs, with those of the settings and the code that they name."""
    files = (*settings.files, *(file_of(spec, settings.workspace) for spec in settings.specs))
    inside = (each for each in files if each and each.is_relative_to(settings.workspace))
    own = (f"/{FILE_NAME}", *(f"/{each.relative_to(settings.workspace)}" for each in inside))
    # An absolute path, as a shell completes it, becomes a pattern relative to the workspace.
    whole = f"{settings.workspace}/"
    named = (
        f"/{each.removeprefix(whole)}" if each.startswith(whole) else each
        for each in settings.policy.protect
    )
    return (*own, *named)


@dataclass(frozen=True, slots=True)
class _DenyPolicy:
    """Denies calls of the named tools."""

    tools: tuple[str, ...]
    name: str = "deny"

    def applies_to(self, tool: Tool[Any, Any]) -> bool:
        return any(fnmatchcase(tool.name, pattern) for pattern in self.tools)

    def check(self, tool_name: str, params: object, context: object) -> str | None:
        return by_rule(tool_name)


def _own_policies(spec: str, settings: Settings) -> Sequence[AnyPolicy]:
    found = _loaded("policy.use", spec, settings)
    if callable(found) and (isinstance(found, type) or not hasattr(found, "check")):
        found = _made(spec, found)
    several = _several(found)
    for each in several:
        if not callable(getattr(each, "check", None)):
            raise Misuse(
                f"policy.use: {spec} is a {type(each).__name__}; expected a policy (with a method "
                "check), a list of policies, or a function that returns one"
            )
    return cast("Sequence[AnyPolicy]", several)


def _deny(request: ApprovalRequest) -> Approval:
    return Approval(False, reason="there is no one to ask")


def _reaches() -> Mapping[str, Reach | None]:
    """Return the reaches by name; a tool that states none is ``unstated``."""
    stated: tuple[Reach, ...] = get_args(Reach)
    return {**{str(reach): reach for reach in stated}, "unstated": None}


def _check_names(settings: Settings, offered: Iterable[str]) -> None:
    """Refuse a rule about an unknown tool: it would silently never apply."""
    rules = settings.policy
    known = suite_tools() | set(offered)
    named = {
        "ask": [name for name in settings.ask if name not in _reaches()],
        "approve": [rule.tool for rule in settings.approve],
        "policy.deny": list(rules.deny),
        "policy.quota": list(rules.quota),
        "policy.rate": list(rules.rate),
        "policy.after": [*rules.after, *(tool for each in rules.after.values() for tool in each)],
    }
    for key, names in named.items():
        for name in names:
            if name in known or (name == "*" and key in ("policy.quota", "policy.rate")):
                continue
            if key == "policy.deny" and any(fnmatchcase(tool, name) for tool in known):
                continue
            near = hint(name, known, f"the tools are {', '.join(sorted(known))}", cutoff=0.5)
            raise Misuse(f"{key}: unknown tool {name!r}: the rule would never apply; {near}")


@cache
def suite_tools() -> frozenset[str]:
    """Return the tools of all suites: a rule may be about one that is disabled."""
    tools = {tool.name for tool in (*file_tools(), *planning_tools())}
    commands = {"shell_execute", "evaluate_python", "evaluate_script"}
    return frozenset({*tools, *commands, "update_digest", "open_sections", "read_section"})


# Code that the settings name


def load_types(settings: Settings) -> None:
    """Import the types that a saved session may hold."""
    trust_of(settings.workspace).admit(settings)
    load_own_types()
    for spec in settings.sections:
        _loaded("sections", spec, settings)
    for spec in settings.policy.use:
        _loaded("policy.use", spec, settings)


def _loaded(key: str, spec: str, settings: Settings) -> object:
    return trust_of(settings.workspace).load(key, spec, settings)


# On a branch


def prefers_branch(settings: Settings) -> bool:
    """Whether a run works on a branch while others have the directory open.

    Not one with tools of the user's own, or of a vendor's program: they may reach the directory.
    """
    own = settings.sections or has_own_tools(settings.model)
    if not settings.branches or own:
        return False
    store = location_of(settings.workspace)
    has_store = "shell" in settings.suites and store.exists()
    return not (has_store and isinstance(find_way(settings.workspace, store), str))


def check_fits_branch(workbench: Workbench) -> None:
    """Raise Misuse if a tool can only work on the directory itself."""
    external = [name for name, each in workbench.offers.items() if each.tool.writes == "external"]
    if external:
        raise Misuse(
            f"{', '.join(external)} starts programs that change the directory itself, so it cannot"
            " work on a branch; use --in-place"
        )
    files = workbench.filesystem
    way = "" if workbench.shell is None else find_way(files.root, files.store)
    if isinstance(way, str) and way:
        raise Misuse(
            f"commands on a branch need an overlay: {way}; use --in-place, or leave out the suite"
            ' "shell"'
        )
