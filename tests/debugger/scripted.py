"""Runs to look at, made by a script instead of a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import weakincentives as wink
from weakincentives.adapters import ScriptedAdapter, Turn
from weakincentives.contrib.tools import PlanningToolsSection, VfsConfig, VfsToolsSection
from weakincentives.filesystem import HostFilesystem
from weakincentives.prompt import MarkdownSection
from weakincentives.runtime import open_run
from weakincentives.runtime.calls import Run


def scripted_run(
    workspace: Path,
    turns: Sequence[Turn | str],
    *,
    message: str = "Do it",
    tools: Sequence[wink.Tool] = (),
) -> Run:
    """Let a script work on a directory, with file tools, a plan, and tools of the test."""
    workspace.mkdir(exist_ok=True)
    with HostFilesystem(workspace) as files, open_run(files, message) as saved:
        sections = [
            VfsToolsSection(config=VfsConfig(filesystem=files)),
            PlanningToolsSection(),
            MarkdownSection(title="Own", template="Own tools.", tools=list(tools)),
        ]
        prompt = wink.Prompt(wink.PromptTemplate(sections=sections))
        with prompt.resources:
            ScriptedAdapter(list(turns)).evaluate(prompt, saved.session, message=message)
        return Run(saved.path)
