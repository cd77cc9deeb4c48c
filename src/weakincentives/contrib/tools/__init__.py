"""Tools that are ready to be offered to a model."""

from typing import TYPE_CHECKING

from weakincentives.lazy import lazy_names

if TYPE_CHECKING:
    from weakincentives.contrib.tools.asteval import (
        AstevalConfig,
        AstevalParams,
        AstevalSection,
        Evaluation,
    )
    from weakincentives.contrib.tools.browser import Browser, Page
    from weakincentives.contrib.tools.digest import (
        DigestNote,
        UpdateDigestParams,
        WorkspaceDigest,
        WorkspaceDigestSection,
    )
    from weakincentives.contrib.tools.digest_survey import DigestConfig
    from weakincentives.contrib.tools.files import (
        FileWriteParams,
        FileWritten,
        file_write_tool,
        write,
    )
    from weakincentives.contrib.tools.planning import (
        Plan,
        PlanningToolsSection,
        PlanStep,
        UpdatePlan,
        plan_done,
        planning_tools,
    )
    from weakincentives.contrib.tools.sandbox.engines import Sandbox, find_sandbox
    from weakincentives.contrib.tools.sandbox.limits import SandboxLimits
    from weakincentives.contrib.tools.sandbox.section import (
        CommandOutput,
        EvaluatePythonParams,
        PodmanSandboxConfig,
        PodmanSandboxSection,
        ShellExecuteParams,
    )
    from weakincentives.contrib.tools.vfs import VfsConfig, VfsToolsSection
    from weakincentives.contrib.tools.vfs_mounts import HostMount
    from weakincentives.contrib.tools.vfs_tools import file_tools
    from weakincentives.contrib.tools.vfs_values import FileLimits
    from weakincentives.contrib.tools.web import (
        ScrapedPage,
        ScrapeParams,
        scrape,
        web_scrape_tool,
    )

__all__ = [
    "AstevalConfig",
    "AstevalParams",
    "AstevalSection",
    "Browser",
    "CommandOutput",
    "DigestConfig",
    "DigestNote",
    "EvaluatePythonParams",
    "Evaluation",
    "FileLimits",
    "FileWriteParams",
    "FileWritten",
    "HostMount",
    "Page",
    "Plan",
    "PlanStep",
    "PlanningToolsSection",
    "PodmanSandboxConfig",
    "PodmanSandboxSection",
    "Sandbox",
    "SandboxLimits",
    "ScrapeParams",
    "ScrapedPage",
    "ShellExecuteParams",
    "UpdateDigestParams",
    "UpdatePlan",
    "VfsConfig",
    "VfsToolsSection",
    "WorkspaceDigest",
    "WorkspaceDigestSection",
    "file_tools",
    "file_write_tool",
    "find_sandbox",
    "plan_done",
    "planning_tools",
    "scrape",
    "web_scrape_tool",
    "write",
]

if not TYPE_CHECKING:  # a type checker shall still find a misspelled name
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "asteval": ["AstevalConfig", "AstevalParams", "AstevalSection", "Evaluation"],
            "browser": ["Browser", "Page"],
            "digest": [
                "DigestNote",
                "UpdateDigestParams",
                "WorkspaceDigest",
                "WorkspaceDigestSection",
            ],
            "digest_survey": ["DigestConfig"],
            "files": ["FileWriteParams", "FileWritten", "file_write_tool", "write"],
            "planning": [
                "Plan",
                "PlanStep",
                "PlanningToolsSection",
                "UpdatePlan",
                "plan_done",
                "planning_tools",
            ],
            "sandbox.limits": ["SandboxLimits"],
            "sandbox.engines": ["Sandbox", "find_sandbox"],
            "sandbox.section": [
                "CommandOutput",
                "EvaluatePythonParams",
                "PodmanSandboxConfig",
                "PodmanSandboxSection",
                "ShellExecuteParams",
            ],
            "vfs": ["VfsConfig", "VfsToolsSection"],
            "vfs_mounts": ["HostMount"],
            "vfs_tools": ["file_tools"],
            "vfs_values": ["FileLimits"],
            "web": ["ScrapeParams", "ScrapedPage", "scrape", "web_scrape_tool"],
        },
    )
