"""Toolsets that are ready to be offered to a model: files, planning, commands, Python, web.

May know: `core`, `errors`, `filesystem`, `prompt`, `resources`, `retry`, `serde`, `session`,
`tool_result`.
Must not go here: rules about who may call a tool; they belong in ``prompt.policies``.
"""

from typing import TYPE_CHECKING

from weakincentives.core.lazy import load_lazily

load_lazily(__name__)

if TYPE_CHECKING:
    from weakincentives.contrib.tools.asteval import AstevalConfig as AstevalConfig
    from weakincentives.contrib.tools.asteval import AstevalParams as AstevalParams
    from weakincentives.contrib.tools.asteval import AstevalSection as AstevalSection
    from weakincentives.contrib.tools.asteval import Evaluation as Evaluation
    from weakincentives.contrib.tools.digest import DigestConfig as DigestConfig
    from weakincentives.contrib.tools.digest import DigestNote as DigestNote
    from weakincentives.contrib.tools.digest import UpdateDigestParams as UpdateDigestParams
    from weakincentives.contrib.tools.digest import WorkspaceDigest as WorkspaceDigest
    from weakincentives.contrib.tools.digest import WorkspaceDigestSection as WorkspaceDigestSection
    from weakincentives.contrib.tools.file_values import FileLimits as FileLimits
    from weakincentives.contrib.tools.files import FileWriteParams as FileWriteParams
    from weakincentives.contrib.tools.files import FileWritten as FileWritten
    from weakincentives.contrib.tools.files import VfsConfig as VfsConfig
    from weakincentives.contrib.tools.files import VfsToolsSection as VfsToolsSection
    from weakincentives.contrib.tools.files import file_tools as file_tools
    from weakincentives.contrib.tools.files import file_write_tool as file_write_tool
    from weakincentives.contrib.tools.files import write as write
    from weakincentives.contrib.tools.planning import Plan as Plan
    from weakincentives.contrib.tools.planning import PlanningToolsSection as PlanningToolsSection
    from weakincentives.contrib.tools.planning import PlanStep as PlanStep
    from weakincentives.contrib.tools.planning import UpdatePlan as UpdatePlan
    from weakincentives.contrib.tools.planning import plan_done as plan_done
    from weakincentives.contrib.tools.planning import planning_tools as planning_tools
    from weakincentives.contrib.tools.sandbox.engines import Sandbox as Sandbox
    from weakincentives.contrib.tools.sandbox.engines import find_sandbox as find_sandbox
    from weakincentives.contrib.tools.sandbox.limits import SandboxLimits as SandboxLimits
    from weakincentives.contrib.tools.sandbox.section import CommandOutput as CommandOutput
    from weakincentives.contrib.tools.sandbox.section import (
        EvaluatePythonParams as EvaluatePythonParams,
    )
    from weakincentives.contrib.tools.sandbox.section import (
        PodmanSandboxConfig as PodmanSandboxConfig,
    )
    from weakincentives.contrib.tools.sandbox.section import (
        PodmanSandboxSection as PodmanSandboxSection,
    )
    from weakincentives.contrib.tools.sandbox.section import (
        ShellExecuteParams as ShellExecuteParams,
    )
    from weakincentives.contrib.tools.sandbox.settings import SandboxSettings as SandboxSettings
    from weakincentives.contrib.tools.suite import HostMount as HostMount
    from weakincentives.contrib.tools.web import Browser as Browser
    from weakincentives.contrib.tools.web import Page as Page
    from weakincentives.contrib.tools.web import ScrapedPage as ScrapedPage
    from weakincentives.contrib.tools.web import ScrapeParams as ScrapeParams
    from weakincentives.contrib.tools.web import scrape as scrape
    from weakincentives.contrib.tools.web import web_scrape_tool as web_scrape_tool
