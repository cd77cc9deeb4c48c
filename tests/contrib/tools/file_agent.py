"""A model's side of the file tools: a section, rendered for a session, and calls by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from weakincentives import Filesystem, Prompt, PromptTemplate, Session, Tool, ToolCall, ToolResult
from weakincentives.contrib.tools import FileLimits, VfsConfig, VfsToolsSection
from weakincentives.prompt import MarkdownSection
from weakincentives.runtime import execute_tool, execute_tools
from weakincentives.testing import make_session

Where = Literal["memory", "disk"]
Files = Mapping[str, str | bytes]


class Agent:
    """Calls tools as a model does: by name, through the whole pipeline."""

    def __init__(self, prompt: Prompt[Any], session: Session) -> None:
        self.prompt = prompt
        self.session = session
        self.rendered = prompt.render(session)

    @property
    def files(self) -> Any:
        """The filesystem the tools work on."""
        return self.prompt.resources.get(Filesystem)

    def call(self, tool: str, /, **arguments: object) -> ToolResult[Any]:
        return execute_tool(ToolCall(tool, arguments), session=self.session)

    def turn(self, *calls: tuple[str, Mapping[str, object]]) -> list[ToolResult[Any]]:
        """Make calls together, as one turn of a model."""
        return list(execute_tools([ToolCall(*call) for call in calls], session=self.session))


@contextmanager
def agent_on(
    where: Where,
    folder: Path,
    files: Files,
    *,
    limits: FileLimits | None = None,
    tools: tuple[Tool[Any, Any], ...] = (),
    **options: Any,
) -> Iterator[Agent]:
    """Open an agent whose workspace has these files, in memory or in a directory of ``folder``."""
    config: dict[str, Any] = {"limits": limits or FileLimits()}
    if where == "memory":
        config["files"] = files
    else:
        config["workspace"] = put(folder / "work", files)
    session = make_session()
    section = VfsToolsSection(session=session, config=VfsConfig(**config), **options)
    more = MarkdownSection(title="More", template="", tools=tools)
    prompt = Prompt(PromptTemplate(sections=[section, more]))
    with prompt.resources:
        yield Agent(prompt, session)


def put(root: Path, files: Files) -> Path:
    """Write files below a directory, and return it."""
    root.mkdir(exist_ok=True)
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return root
