"""A saved run on a directory, with tools that write, move, fail and nest, and a scripted model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import weakincentives as wink
from weakincentives.adapters import ModelRequest, ScriptedAdapter, calls
from weakincentives.filesystem import FilesAt, HostFilesystem
from weakincentives.prompt import MarkdownSection, Prompt, PromptTemplate
from weakincentives.runtime import SavedSession, Session, SlicePolicy, slice_policy
from weakincentives.runtime.at import StateAt
from weakincentives.runtime.calls import Call, Calls, Run, new_run
from weakincentives.runtime.conversation import Message, last_conversation


@dataclass(frozen=True)
class Note:
    text: str


@slice_policy(SlicePolicy.LOG)
@dataclass(frozen=True)
class Tried:
    text: str


@wink.tool(reach="reversible")
def write(name: str, text: str, *, context: wink.ToolContext) -> str:
    """Write a file."""
    context.session.dispatch(Tried(text))
    context.filesystem.write(name, text)
    context.session[Note].append(Note(text))
    return f"Wrote {name}"


@wink.tool(reach="reversible", concurrent=True)
def note(text: str, *, context: wink.ToolContext) -> str:
    """Note something, at the same time as others."""
    context.session[Note].append(Note(text))
    context.filesystem.write(f"notes/{text}", text)
    return f"Noted {text}"


@wink.tool(reach="reversible")
def delete(name: str, *, context: wink.ToolContext) -> str:
    """Delete a file, if there is one."""
    if context.filesystem.exists(name):
        context.filesystem.delete(name)
    return f"Deleted {name}"


@wink.tool(reach="reversible")
def move(name: str, to: str, *, context: wink.ToolContext) -> str:
    """Move a file, if there is one."""
    if context.filesystem.exists(name):
        context.filesystem.move(name, to, overwrite=True)
    return f"Moved {name}"


@wink.tool(reach="reversible")
def fail(text: str, *, context: wink.ToolContext) -> str:
    """Write, and fail."""
    context.session.dispatch(Tried(text))
    context.session[Note].append(Note(text))
    context.filesystem.write("a", text)
    raise ValueError(f"Failed {text}")


@wink.tool(reach="read")
def look(*, context: wink.ToolContext) -> str:
    """Change nothing."""
    return "Looked"


@wink.tool(reach="reversible")
def around(text: str, *, context: wink.ToolContext) -> str:
    """Write through another call."""
    context.filesystem.write("outer", text)
    write({"name": "b", "text": text}, context=context)
    return f"Around {text}"


TOOLS = [write, note, delete, move, fail, look, around]
TYPES = [Note, Tried, *(tool.params_type for tool in TOOLS)]


class Work:
    """A saved run on a directory."""

    def __init__(self, saved: SavedSession, files: HostFilesystem, prompt: Prompt[Any]) -> None:
        self.saved, self.files, self.prompt = saved, files, prompt

    def say(
        self, message: str | None, *wanted: tuple[str, dict[str, Any]], **options: Any
    ) -> list[Message]:
        """Let the model make these calls in one turn; returns the messages that it saw first."""
        seen: list[Message] = []

        def first(request: ModelRequest) -> Any:
            seen.extend(request.messages)
            return calls(*wanted) if wanted else "Done."

        turns: list[Callable[[ModelRequest], Any] | str] = [first, *["Done."] * bool(wanted)]
        model = ScriptedAdapter(turns)
        model.evaluate(self.prompt, self.saved.session, message=message, **options)
        return seen

    def write(self, *texts: str) -> None:
        """Let the model write each text to the file that its first letter names."""
        self.say("write", *(("write", {"name": text[0], "text": text}) for text in texts))

    @property
    def run(self) -> Run:
        return Run(self.saved.path)

    @property
    def calls(self) -> Calls:
        return Calls(self.files.root)

    def call(self, number: int) -> Call:
        return next(each for each in self.calls.of_run(self.run) if each.number == number)

    def at(self, number: int, *, before: bool = False) -> StateAt:
        return self.calls.at(self.call(number), before=before, types=TYPES)

    @property
    def disk(self) -> dict[str, str]:
        return tree_of(self.files.root)

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(each.text for each in self.saved.session[Note])

    @property
    def talk(self) -> list[tuple[str, str]]:
        return spoken(last_conversation(self.saved.session))


def tree_of(root: Path) -> dict[str, str]:
    found = (path for path in root.rglob("*") if path.is_file())
    return {str(path.relative_to(root)): path.read_text() for path in found}


def texts_of(files: FilesAt) -> dict[str, str]:
    return {path: files.read(path) for path in files.glob("**/*")}


def spoken(messages: Any) -> list[tuple[str, str]]:
    return [(each.role, each.text) for each in messages]


@contextmanager
def opened(
    place: Path,
    run: Run | None = None,
    *,
    new: bool = False,
    about: Mapping[str, object] | None = None,
    **options: Any,
) -> Iterator[Work]:
    """Open the workspace, and a run: the given one, a new one, or else the only one."""
    root = place / "project"
    root.mkdir(exist_ok=True)
    with HostFilesystem(root, **options) as files:
        paths = [*(files.store / "runs").glob("*.jsonl")] if run is None else [run.path]
        if paths and not new:
            (path,) = paths
            saving = SavedSession.open(path, types=TYPES)
        else:
            saving = SavedSession.create(new_run(files.store).path, Session(), about=about)
        template = PromptTemplate(
            sections=[MarkdownSection(title="Work", tools=TOOLS)],
            resources={wink.Filesystem: files},
        )
        prompt = Prompt(template)
        with saving as saved, prompt.resources:
            yield Work(saved, files, prompt)
