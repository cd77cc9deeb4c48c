"""What an agent gets on a directory: its files, tools, rules, and the prompt that offers them."""

from __future__ import annotations

import importlib
import inspect
import tempfile
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_args

from weakincentives.cli.common import FILE_NAME, Misuse, hint, open_workspace
from weakincentives.cli.trust import file_of, trust_of
from weakincentives.errors import (
    FilesystemError,
    MissingExtra,
    PromptValidationError,
    SandboxUnavailable,
)
from weakincentives.filesystem import Filesystem, HostFilesystem
from weakincentives.prompt import (
    Approval,
    ApprovalPolicy,
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
from weakincentives.prompt.policies import attach
from weakincentives.prompt.prompt import Offer
from weakincentives.prompt.tool import Reach
from weakincentives.runtime import Session, ToolRegistry

if TYPE_CHECKING:
    from weakincentives.cli.config import PolicySettings, Settings
    from weakincentives.contrib.tools import PlanningToolsSection, PodmanSandboxSection
    from weakincentives.prompt.completion import TaskCompletionChecker


@dataclass(frozen=True, slots=True, kw_only=True)
class Workbench:
    """An agent's place of work, open until the end of its ``with`` block."""

    settings: Settings
    session: Session
    prompt: Prompt[Any]
    """What the model is told and offered; its resources are open."""
    filesystem: HostFilesystem
    shell: PodmanSandboxSection | None
    """Has the sandbox that commands run in; None where no commands are offered."""
    completion: TaskCompletionChecker | None
    """Says whether a plan is done; None where there is none."""

    @property
    def sandbox(self) -> str:
        """What commands run in, in words; found by trying, which takes a moment."""
        if self.shell is None:
            return "no commands"
        try:
            return self.shell.sandbox.name
        except SandboxUnavailable:
            return "no commands: no sandbox works here"

    @property
    def tools(self) -> tuple[Tool[Any, Any], ...]:
        """Every tool of the prompt, those of closed sections included."""
        return tuple(tool for each in self.sections for tool in each.tools)

    @property
    def sections(self) -> tuple[Section[Any], ...]:
        return tuple(_with_children(self.prompt.template.sections))

    @property
    def offers(self) -> dict[str, Offer]:
        """Every tool with the policies that govern it, as if all sections were open."""
        template = self.prompt.template
        return {
            tool.name: Offer.of(tool, (*attach(section.policies), *template.policies))
            for section in self.sections
            for tool in section.tools
        }


@contextmanager
def preview(settings: Settings, session: Session | None = None) -> Generator[Workbench]:
    """Yield what an agent would get. The directory may be in use: nothing is changed in it."""
    workspace, unprotected = settings.workspace, settings.policy.unprotect
    with tempfile.TemporaryDirectory(prefix="wink-") as store:
        is_outside = not Path(store).resolve().is_relative_to(workspace)
        with (
            # With a store of its own it needs no lock; it is only looked at.
            HostFilesystem(workspace, store=store)
            if is_outside
            else open_workspace(workspace, unprotected=unprotected) as files,
            open_workbench(settings, session, files=files) as workbench,
        ):
            yield workbench


@contextmanager
def open_workbench(
    settings: Settings,
    session: Session | None = None,
    *,
    ask: Ask | None = None,
    files: HostFilesystem | None = None,
    policies: Sequence[object] = (),
) -> Generator[Workbench]:
    """Open the workspace and yield all that an agent needs on it.

    Args:
        ask: Asked about the calls that need approval; without it they are denied.
        files: The workspace, where it is open already; else it is opened here, and closed.
        policies: More rules for all tools.
    """
    session = Session() if session is None else session
    admit_code(settings)
    opening = open_workspace(settings.workspace, unprotected=settings.policy.unprotect)
    with opening if files is None else nullcontext(files) as files:
        sections, shell, planning = _sections(settings, session, files)
        try:
            template = PromptTemplate(
                ns="wink",
                key="workbench",
                name="Workbench",
                sections=sections,
                policies=[*policies, *_policies(settings, ask or _nobody)],
                resources={Filesystem: files},
            )
            prompt = Prompt(template)
        except PromptValidationError as error:
            raise Misuse(f"these tools and rules do not go together: {error}") from error
        workbench = Workbench(
            settings=settings,
            session=session,
            prompt=prompt,
            filesystem=files,
            shell=shell,
            completion=None if planning is None else planning.completion,
        )
        _check_names(settings, workbench.tools)
        with prompt.resources:
            yield workbench


# What is offered


def _sections(
    settings: Settings, session: Session, files: HostFilesystem
) -> tuple[list[Section[Any]], PodmanSandboxSection | None, PlanningToolsSection | None]:
    from weakincentives.contrib.tools import PlanningToolsSection, WorkspaceDigestSection

    sections: list[Section[Any]] = [MarkdownSection(title="Your work", template=_WORK)]
    planning = shell = None
    if "planning" in settings.suites:
        planning = PlanningToolsSection(session=session)
        sections.append(planning)
    if "shell" in settings.suites:
        shell = _shell(settings, files)
        sections.append(shell)
    elif "files" in settings.suites:
        sections.append(_files(settings, files))
    if "python" in settings.suites:
        sections.append(_python(beside_shell=shell is not None))
    if "digest" in settings.suites:
        sections.append(WorkspaceDigestSection(filesystem=files))
    for spec in settings.sections:
        sections += _as_sections(spec, _loaded("sections", spec, settings), session)
    return sections, shell, planning


def _shell(settings: Settings, files: HostFilesystem) -> PodmanSandboxSection:
    from weakincentives.contrib.tools import PodmanSandboxConfig, PodmanSandboxSection

    config = PodmanSandboxConfig(filesystem=files, sandbox=cast("Any", settings.sandbox))
    section = PodmanSandboxSection(config=config, policies=_section_policies(settings.policy))
    if settings.sandbox != "auto":  # one that was chosen is used, or nothing is begun
        try:
            _ = section.sandbox
        except SandboxUnavailable as error:
            raise Misuse(f"sandbox {settings.sandbox}: {error}") from error
    return section


def _files(settings: Settings, files: HostFilesystem) -> Section[Any]:
    from weakincentives.contrib.tools import VfsConfig, VfsToolsSection

    config = VfsConfig(filesystem=files)
    return VfsToolsSection(config=config, policies=_section_policies(settings.policy))


def _python(*, beside_shell: bool) -> Section[Any]:
    from weakincentives.contrib.tools import AstevalConfig, AstevalSection

    # The shell's section has a tool called evaluate_python.
    name = "evaluate_script" if beside_shell else "evaluate_python"
    try:
        return AstevalSection(config=AstevalConfig(tool_name=name))
    except MissingExtra as error:
        raise Misuse(f'the suite "python" cannot be used: {error}') from error


def _as_sections(spec: str, found: object, session: Session) -> list[Section[Any]]:
    """Return what was named in any of the forms that can be offered, as sections."""
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
        f"sections: {spec} is a {type(cast('object', found)).__name__}; it must be a section, a "
        "ToolRegistry, a tool, a list of tools, or a function that returns one of these"
    )


def _several(found: object) -> Sequence[object]:
    return cast("Sequence[object]", found) if isinstance(found, (list, tuple)) else (found,)


def _made(spec: str, make: Callable[..., object], session: Session | None = None) -> object:
    """Return what a function makes: without arguments, or of the session."""
    try:
        takes_session = "session" in inspect.signature(make).parameters
        return make(session=session) if takes_session else make()
    except (Exception, SystemExit) as error:
        raise Misuse(f"{spec} cannot be made: {type(error).__name__}: {error}") from error


def _with_children(sections: Iterable[Section[Any]]) -> Iterable[Section[Any]]:
    for each in sections:
        yield each
        yield from _with_children(each.children)


_WORK = """
You work on the directory that your tools show you, for the person whose words come next. Do what
they ask for: all of it, and nothing beside it.

- Look before you change anything: read the files that matter, and how the project does such things.
- Make small changes, in the style of what is there. Run the project's tests after a change where
  commands can be run; a change that is not checked is not finished.
- Every call is a transaction. One that fails has changed nothing: read why, and try another way.
  A call that is denied is denied by a rule of the person's: do not look for a way around it.
- Say in the end, in a few plain sentences, what you did, how you checked it, and what is left.
"""


# What is refused


def _section_policies(policy: PolicySettings) -> tuple[object, ...]:
    return (ReadBeforeWritePolicy(),) if policy.read_before_write else ()


def _policies(settings: Settings, ask: Ask) -> list[object]:
    """Return the rules for all tools; a person is asked last, about what the others allow."""
    rules = settings.policy
    try:
        policies: list[object] = [ProtectedPathsPolicy(_protected(settings))]
    except FilesystemError as error:
        raise Misuse(f"policy.protect: {error}") from error
    if rules.deny:
        policies.append(_DenyPolicy(rules.deny))
    if rules.after:
        after = {tool: frozenset(needed) for tool, needed in rules.after.items()}
        policies.append(SequentialDependencyPolicy(dependencies=after))
    for tool, most in rules.quota.items():
        tools = frozenset[str]() if tool == "*" else frozenset({tool})
        policies.append(QuotaPolicy(most, tools=tools, name=f"quota of {tool}"))
    for tool, rate in rules.rate.items():
        tools = frozenset[str]() if tool == "*" else frozenset({tool})
        most = int(rate.partition("/")[0])
        policies.append(RateLimitPolicy(most, tools=tools, name=f"rate of {tool}"))
    for spec in rules.use:
        policies += _own_policies(spec, settings)
    if settings.ask:
        known = _reaches()
        reaches = frozenset[Any](known[name] for name in settings.ask if name in known)
        tools = frozenset(name for name in settings.ask if name not in known)
        # A person may be away for a while, and Ctrl-C ends the wait.
        policies.append(ApprovalPolicy(ask=ask, tools=tools, reaches=reaches, timeout=None))
    return policies


def _protected(settings: Settings) -> tuple[str, ...]:
    """Return what must stay as it is: also what says so, and code that runs outside of calls."""
    files = (*settings.files, *(file_of(spec, settings.workspace) for spec in settings.specs))
    inside = (each for each in files if each and each.is_relative_to(settings.workspace))
    own = (f"/{FILE_NAME}", *(f"/{each.relative_to(settings.workspace)}" for each in inside))
    # A pattern is one from the workspace on; so is a whole path, as a shell completes it.
    whole = f"{settings.workspace}/"
    named = (
        f"/{each.removeprefix(whole)}" if each.startswith(whole) else each
        for each in settings.policy.protect
    )
    return (*own, *named)


@dataclass(frozen=True, slots=True)
class _DenyPolicy:
    """Refuses calls of the named tools."""

    tools: tuple[str, ...]
    name: str = "deny"

    def applies_to(self, tool: Tool[Any, Any]) -> bool:
        return any(fnmatchcase(tool.name, pattern) for pattern in self.tools)

    def check(self, tool_name: str, params: object, context: object) -> str | None:
        return f"'{tool_name}' is not allowed here. Do without it, or say why you need it"


def _own_policies(spec: str, settings: Settings) -> Sequence[object]:
    found = _loaded("policy.use", spec, settings)
    if callable(found) and (isinstance(found, type) or not hasattr(found, "check")):
        found = _made(spec, found)
    several = _several(found)
    for each in several:
        if not callable(getattr(each, "check", None)):
            raise Misuse(
                f"policy.use: {spec} is a {type(each).__name__}; it must be a policy (it has a "
                "method check), a list of policies, or a function that returns one of these"
            )
    return several


def _nobody(request: ApprovalRequest) -> Approval:
    return Approval(False, reason="nobody is here to be asked")


def _reaches() -> Mapping[str, Reach | None]:
    """Return the reaches by how they are written; None is that of tools which state none."""
    stated: tuple[Reach, ...] = get_args(Reach)
    return {**{str(reach): reach for reach in stated}, "unstated": None}


def _check_names(settings: Settings, offered: Iterable[Tool[Any, Any]]) -> None:
    """Refuse a rule about an unknown tool: it would silently never apply."""
    rules = settings.policy
    known = suite_tools() | {tool.name for tool in offered}
    named = {
        "ask": [name for name in settings.ask if name not in _reaches()],
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
            near = hint(name, known, f"there are {', '.join(sorted(known))}", cutoff=0.5)
            raise Misuse(f"{key}: there is no tool {name!r}; {near}")


def suite_tools() -> set[str]:
    """Return the tools of all suites: a rule may be about one that is switched off."""
    from weakincentives.contrib.tools import file_tools, planning_tools

    tools = {tool.name for tool in (*file_tools(), *planning_tools())}
    commands = {"shell_execute", "evaluate_python", "evaluate_script"}
    return tools | commands | {"update_digest", "open_sections", "read_section"}


# Code of the user's


def admit_code(settings: Settings) -> None:
    """Have the user approve the code of the workspace that the settings name.

    Raises Misuse where it is not approved as it is now, and nobody is here to be asked.
    """
    trust_of(settings.workspace).admit(settings)


def load_types(settings: Settings) -> None:
    """Load what defines the values that a session may hold: one that is resumed needs them."""
    admit_code(settings)
    for name in ("asteval", "digest", "planning", "sandbox.section", "file_values", "files"):
        importlib.import_module(f"weakincentives.contrib.tools.{name}")
    for spec in settings.sections:
        _loaded("sections", spec, settings)
    for spec in settings.policy.use:
        _loaded("policy.use", spec, settings)


def _loaded(key: str, spec: str, settings: Settings) -> object:
    return trust_of(settings.workspace).load(key, spec, settings)
