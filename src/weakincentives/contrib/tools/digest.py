"""``WorkspaceDigestSection``: what a workspace holds, for a model that has not seen it yet.

It is found without a model, and kept up to date at the cost of what changed. A model can add what
it found out; that stays until the files it rests on change, and is then marked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Unpack

from pydantic import Field

from weakincentives.call import call_under_way
from weakincentives.contrib.tools.digest_facts import HowTo, is_readme, language_of
from weakincentives.contrib.tools.digest_survey import DigestConfig, Found, Survey
from weakincentives.errors import ToolValidationError
from weakincentives.filesystem import FileStat, Filesystem
from weakincentives.filesystem.protocol import shown
from weakincentives.prompt.section import Section, SectionOptions, SectionVisibility
from weakincentives.prompt.tool import Tool, ToolContext
from weakincentives.prompt.tool_result import ToolResult
from weakincentives.slices import Slice

if TYPE_CHECKING:
    from weakincentives.runtime.session import Session

__all__ = ["DigestNote", "UpdateDigestParams", "WorkspaceDigest", "WorkspaceDigestSection"]

_MAX_NOTES = 20


@dataclass(frozen=True, slots=True)
class DigestNote:
    """What a model found out about a part of the workspace."""

    topic: str
    text: str
    rests_on: tuple[tuple[str, str], ...]
    """Paths, each with what its content was when the note was made."""
    outdated: tuple[str, ...] = ()
    """Those of the paths whose content is another one by now."""

    def render(self) -> str:
        mark = f" (outdated: {', '.join(self.outdated)} changed since)" if self.outdated else ""
        return f"**{self.topic}**{mark}: {self.text}"


@dataclass(frozen=True, slots=True)
class Share:
    """How much of the workspace is in one language."""

    language: str
    files: int
    lines: int
    """Of the files that have been read so far."""


@dataclass(frozen=True, slots=True)
class Folder:
    """A directory with all that is below it."""

    path: str
    files: int
    language: str
    """The one that most of its files are in; empty when none is known."""


@dataclass(frozen=True, slots=True)
class BigFile:
    path: str
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkspaceDigest:
    """What a workspace holds. A STATE slice with one value: the digest as last rendered."""

    about: str = ""
    """What the project says it is."""
    files: int = 0
    directories: int = 0
    size: int = 0
    """Bytes of all files."""
    is_cut: bool = False
    """Whether there are more files than were looked at."""
    unread: int = 0
    """Files that are still to be read; later renderings go on with them."""
    folders: tuple[Folder, ...] = ()
    """The upper two levels."""
    top_files: tuple[str, ...] = ()
    languages: tuple[Share, ...] = ()
    """The most used first."""
    entry_points: tuple[str, ...] = ()
    how_to: tuple[HowTo, ...] = ()
    """How to test, build, lint and run."""
    big_files: tuple[BigFile, ...] = ()
    notes: tuple[DigestNote, ...] = ()

    def summary(self) -> str:
        """Return the digest in a few lines."""
        more = "More than " if self.is_cut else ""
        directories = _count(self.directories, "directory", "directories")
        size = f"{more}{_count(self.files, 'file')} in {directories}, {_bytes(self.size)}"
        many = [each.language for each in self.languages if each.files * 20 >= self.files]
        languages = ", ".join(many[:3])
        tests = next((each.command for each in self.how_to if each.purpose == "test"), "")
        outdated = sum(1 for note in self.notes if note.outdated)
        notes = f"Notes: {len(self.notes)}" + (f", {outdated} outdated" if outdated else "")
        return "\n".join(
            filter(
                None,
                [
                    self.about,
                    f"{size}{f'; mostly {languages}' if languages else ''}.",
                    f"Tests: `{tests}`." if tests else "",
                    f"{notes}." if self.notes else "",
                ],
            )
        )

    def render(self, lines: int = 20) -> str:
        """Return the digest in full, with so many lines of each part."""
        commands = dict.fromkeys(_command_line(each) for each in self.how_to)
        parts = [
            self.summary(),
            _part("Layout", [_folder_line(each) for each in self.folders], lines),
            _part(
                "Files at the top",
                [", ".join(f"`{shown(path)}`" for path in self.top_files)],
                lines,
            ),
            _part("Languages", [_share_line(each) for each in self.languages], lines),
            _part("Entry points", [f"- `{shown(each)}`" for each in self.entry_points], lines),
            _part("How to", list(commands), lines),
            _part("Big files", [_file_line(each) for each in self.big_files], lines),
            _part("Notes", [f"- {note.render()}" for note in self.notes], lines),
        ]
        if self.unread:
            parts.append(f"_{self.unread} files have not been read yet; more will be known soon._")
        return "\n\n".join(part for part in parts if part)


class WorkspaceDigestSection(Section[None]):
    """A digest of the workspace: a summary until the model opens it, then all of it, and the tool
    ``update_digest``.

    Args:
        filesystem: The workspace, or a function that returns it, for one that is opened later:
            ``lambda: prompt.resources.get(Filesystem)``.
    """

    def __init__(
        self,
        *,
        filesystem: Filesystem | Callable[[], Filesystem],
        config: DigestConfig | None = None,
        **options: Unpack[SectionOptions[None]],
    ) -> None:
        self.config = config or DigestConfig()
        self._filesystem = filesystem
        self._survey = Survey(self.config)
        self._made: tuple[Found, WorkspaceDigest] | None = None
        options.setdefault("title", "Workspace")
        options.setdefault("summary", "What the workspace holds.")
        options.setdefault("visibility", SectionVisibility.SUMMARY)
        options["tools"] = (self._update_tool(), *options.get("tools", ()))
        super().__init__(**options)

    def digest(self, session: Session | None = None) -> WorkspaceDigest:
        """Return the digest of the workspace as it is now, with the notes of a session."""
        fs = self._filesystem() if callable(self._filesystem) else self._filesystem
        found = self._survey.look(fs)
        made = self._made
        if made is None or made[0] is not found:
            made = self._made = found, _digest(found, self.config)
        last = None if session is None else session[WorkspaceDigest].latest()
        notes = () if last is None else self._checked(last.notes, fs, found)
        digest = replace(made[1], notes=notes)
        # In a call the session is the call's, and one that only reads must not change it.
        if session is not None and digest != last and call_under_way() is None:
            session[WorkspaceDigest].seed(digest)
        return digest

    def summary_text(self, params: object, session: Session | None) -> str:
        return self.digest(session).summary()

    def body(self, params: None, session: Session | None) -> str:
        digest = self.digest(session).render(self.config.lines)
        return f"{digest}\n\n{_GUIDANCE}"

    def _checked(
        self, notes: tuple[DigestNote, ...], fs: Filesystem, found: Found
    ) -> tuple[DigestNote, ...]:
        """Return the notes, those marked that rest on something that has changed."""
        return tuple(
            replace(
                note,
                outdated=tuple(
                    path
                    for path, fingerprint in note.rests_on
                    if self._survey.fingerprint(fs, path, found) != fingerprint
                ),
            )
            for note in notes
        )

    def _update_tool(self) -> Tool[UpdateDigestParams, DigestNote]:
        def update(params: UpdateDigestParams, *, context: ToolContext) -> ToolResult[DigestNote]:
            fs = context.filesystem
            found = self._survey.look(fs)
            rests_on = tuple(
                (fs.normalize(path), self._survey.fingerprint(fs, path, found))
                for path in params.rests_on
            )
            missing = [path for path, fingerprint in rests_on if not fingerprint]
            if missing:
                raise ToolValidationError(f"There is nothing at {', '.join(missing)}")
            note = DigestNote(params.topic, params.text, rests_on)
            empty = _digest(found, self.config)
            context.session[WorkspaceDigest].update(lambda digests: _noted(digests, note, empty))
            return ToolResult.ok(note, "Forgotten" if not params.text else "Noted")

        return Tool[UpdateDigestParams, DigestNote](
            name="update_digest",
            description="Note what you found out about the workspace, for later and for others.",
            handler=update,
            reach="reversible",
        )


@dataclass(frozen=True, slots=True)
class UpdateDigestParams:
    topic: Annotated[str, Field(min_length=1, max_length=80)]
    """What it is about. A note on the same topic takes the place of the earlier one."""
    text: Annotated[str, Field(max_length=2000)]
    """What you found out; an empty text takes the note away."""
    rests_on: Annotated[tuple[str, ...], Field(min_length=1, max_length=20)]
    """Files or directories it rests on: once one of them changes, the note is marked as outdated.
    Name few and small ones."""


_GUIDANCE = (
    "All of this was found by looking at names and contents, and is as it is now. When you find "
    "out more that will be needed again, note it with `update_digest`."
)


# From what was found to the digest


def _digest(found: Found, config: DigestConfig) -> WorkspaceDigest:
    entries = [entry for entry, _ in found.files]
    facts = [each for _, each in found.files if each is not None]
    big = sorted((e for e in entries if e.size >= config.big_file_bytes), key=lambda e: -e.size)
    return WorkspaceDigest(
        about=_about(found),
        files=len(entries),
        directories=found.directories,
        size=sum(entry.size for entry in entries),
        is_cut=found.is_cut,
        unread=found.unread,
        folders=_folders(entries),
        top_files=tuple(entry.path for entry in entries if "/" not in entry.path),
        languages=_shares(found),
        entry_points=tuple(start for each in facts for start in each.starts),
        how_to=tuple(how_to for each in facts for how_to in each.how_to),
        big_files=tuple(BigFile(entry.path, entry.size) for entry in big),
    )


def _about(found: Found) -> str:
    """Return what the project says it is: nearest to the root, and rather in one line."""
    told = [
        (entry.path.count("/"), is_readme(entry.path), facts.about)
        for entry, facts in found.files
        if facts is not None and facts.about
    ]
    return min(told)[2] if told else ""


def _folders(entries: Iterable[FileStat]) -> tuple[Folder, ...]:
    languages: dict[str, Counter[str]] = {}
    for entry in entries:
        names = entry.path.split("/")[:-1]
        for depth in range(1, min(len(names), 2) + 1):
            counted = languages.setdefault("/".join(names[:depth]), Counter())
            counted[language_of(entry.path) or ""] += 1
    return tuple(
        Folder(path, counted.total(), counted.most_common(1)[0][0])
        for path, counted in sorted(languages.items())
    )


def _shares(found: Found) -> tuple[Share, ...]:
    files: Counter[str] = Counter()
    lines: Counter[str] = Counter()
    for entry, facts in found.files:
        language = language_of(entry.path)
        if language is not None:
            files[language] += 1
            lines[language] += 0 if facts is None else facts.lines
    return tuple(Share(name, count, lines[name]) for name, count in files.most_common())


def _noted(
    digests: Slice[WorkspaceDigest], note: DigestNote, empty: WorkspaceDigest
) -> Slice[WorkspaceDigest]:
    digest = digests.latest() or empty
    others = [each for each in digest.notes if each.topic != note.topic]
    notes = [*others, *([note] if note.text else [])][-_MAX_NOTES:]
    return digests.replace(replace(digest, notes=tuple(notes)))


# In words


def _part(title: str, lines: Sequence[str], limit: int) -> str:
    lines = [line for line in lines if line]
    if not lines:
        return ""
    more = [f"- and {len(lines) - limit} more"] if len(lines) > limit else []
    return "\n".join([f"**{title}**", "", *lines[:limit], *more])


def _folder_line(folder: Folder) -> str:
    indent = "  " if "/" in folder.path else ""
    language = f", {folder.language}" if folder.language else ""
    return f"{indent}- `{shown(folder.path)}/`: {_count(folder.files, 'file')}{language}"


def _file_line(file: BigFile) -> str:
    return f"- `{shown(file.path)}`: {_bytes(file.size)}"


def _share_line(share: Share) -> str:
    lines = f", {_count(share.lines, 'line')}" if share.lines else ""
    return f"- {share.language}: {_count(share.files, 'file')}{lines}"


def _command_line(how_to: HowTo) -> str:
    directory, _, name = shown(how_to.source).rpartition("/")
    where = f" in `{directory}`" if directory else ""
    return f"- {how_to.purpose}: `{how_to.command}`{where} ({name})"


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"


def _bytes(size: float) -> str:
    for unit in ("bytes", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"
