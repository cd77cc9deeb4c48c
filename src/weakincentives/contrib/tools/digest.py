"""``WorkspaceDigestSection``: an overview of the workspace, for a model that has not seen it yet.

No model makes it, and it is kept current at the cost of what changed. A model can add notes; a note
is marked as outdated once the files that it rests on have changed.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import tomllib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar, Unpack, cast

from pydantic import Field

from weakincentives.call import call_under_way
from weakincentives.contrib.tools.file_values import counted
from weakincentives.contrib.tools.mounts import IgnoreRules, is_ignored, parse_ignore_file
from weakincentives.errors import FilesystemError, ToolValidationError
from weakincentives.filesystem import FileStat, Filesystem
from weakincentives.filesystem.protocol import shown
from weakincentives.prompt.section import Section, SectionOptions, SectionVisibility
from weakincentives.prompt.tool import Tool, ToolContext
from weakincentives.prompt.tool_result import ToolResult
from weakincentives.slices import Slice

if TYPE_CHECKING:
    from weakincentives.runtime.session import Session

T = TypeVar("T")

_MAX_NOTES = 20
_MAX_ABOUT = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class DigestConfig:
    """How much of a workspace is examined, and how much of it is shown."""

    max_files: int = 20_000
    """Files and directories that are listed, nearest to the root first."""
    max_file_bytes: int = 200_000
    """Larger files are not read."""
    gitignore: bool = True
    """Leave out what the ``.gitignore`` files leave out."""
    skip: tuple[str, ...] = (".git", ".hg", ".svn")
    """Names that are left out everywhere."""
    big_file_bytes: int = 200_000
    """Files of at least this size are listed as big files."""
    lines: int = 20
    """Lines shown of each part."""

    def __post_init__(self) -> None:
        for name in ("max_files", "max_file_bytes", "big_file_bytes", "lines"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class DigestNote:
    """What a model found out about a part of the workspace."""

    topic: str
    text: str
    rests_on: tuple[tuple[str, str], ...]
    """Paths, each with the digest of its content when the note was made."""
    outdated: tuple[str, ...] = ()
    """The paths whose content has changed since."""

    def render(self) -> str:
        mark = f" (outdated: {', '.join(self.outdated)} changed since)" if self.outdated else ""
        return f"**{self.topic}**{mark}: {self.text}"


@dataclass(frozen=True, slots=True)
class HowTo:
    """A command and its purpose."""

    purpose: str
    """``test``, ``build``, ``lint`` or ``run``."""
    command: str
    source: str
    """The file that names it."""


@dataclass(frozen=True, slots=True)
class Folder:
    """A directory, and how many files are below it."""

    path: str
    files: int

    __retired_fields__: ClassVar = ("language",)


@dataclass(frozen=True, slots=True)
class BigFile:
    path: str
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkspaceDigest:
    """An overview of a workspace. A STATE slice with one value: the digest as last rendered."""

    about: str = ""
    """How the project describes itself."""
    files: int = 0
    directories: int = 0
    size: int = 0
    """Bytes of all files."""
    is_cut: bool = False
    """Whether there are more files than were listed."""
    folders: tuple[Folder, ...] = ()
    """The upper two levels."""
    top_files: tuple[str, ...] = ()
    entry_points: tuple[str, ...] = ()
    how_to: tuple[HowTo, ...] = ()
    """How to test, build, lint and run."""
    big_files: tuple[BigFile, ...] = ()
    notes: tuple[DigestNote, ...] = ()

    __retired_fields__: ClassVar = ("languages", "unread")

    def summary(self) -> str:
        """Return the digest in a few lines."""
        more = "More than " if self.is_cut else ""
        directories = counted(self.directories, "directory", "directories")
        tests = next((each.command for each in self.how_to if each.purpose == "test"), "")
        outdated = sum(1 for note in self.notes if note.outdated)
        notes = f"Notes: {len(self.notes)}" + (f", {outdated} outdated" if outdated else "")
        lines = [
            self.about,
            f"{more}{counted(self.files, 'file')} in {directories}, {_bytes(self.size)}.",
            f"Tests: `{tests}`." if tests else "",
            f"{notes}." if self.notes else "",
        ]
        return "\n".join(filter(None, lines))

    def render(self, lines: int = 20) -> str:
        """Return the whole digest, with at most so many lines of each part."""
        top = ", ".join(f"`{shown(path)}`" for path in self.top_files)
        big = [f"- `{shown(file.path)}`: {_bytes(file.size)}" for file in self.big_files]
        parts = [
            self.summary(),
            _part("Layout", map(_folder_line, self.folders), lines),
            _part("Files at the top", [top], lines),
            _part("Entry points", [f"- `{shown(each)}`" for each in self.entry_points], lines),
            _part("How to", dict.fromkeys(map(_command_line, self.how_to)), lines),
            _part("Big files", big, lines),
            _part("Notes", [f"- {note.render()}" for note in self.notes], lines),
        ]
        return "\n\n".join(filter(None, parts))


class WorkspaceDigestSection(Section[None]):
    """An overview of the workspace: a summary until the model opens it, then all of it, with the
    tool ``update_digest``.

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
        self._survey = _Survey(self.config)
        options.setdefault("title", "Workspace")
        options.setdefault("summary", "What the workspace holds.")
        options.setdefault("visibility", SectionVisibility.SUMMARY)
        options["tools"] = (self._update_tool(), *options.get("tools", ()))
        super().__init__(**options)

    def digest(self, session: Session | None = None) -> WorkspaceDigest:
        """Return the current digest of the workspace, with the notes of a session."""
        fs = self._filesystem() if callable(self._filesystem) else self._filesystem
        digest = self._survey.digest(fs)
        if session is None:
            return digest
        last = session[WorkspaceDigest].latest()
        if last is not None:
            digest = replace(digest, notes=tuple(self._checked(note, fs) for note in last.notes))
        # In a call the session is the call's, and one that only reads must not change it.
        if digest != last and call_under_way() is None:
            session[WorkspaceDigest].seed(digest)
        return digest

    def summary_text(self, params: object, session: Session | None) -> str:
        return self.digest(session).summary()

    def body(self, params: None, session: Session | None) -> str:
        return f"{self.digest(session).render(self.config.lines)}\n\n{_GUIDANCE}"

    def _checked(self, note: DigestNote, fs: Filesystem) -> DigestNote:
        """Return a note with the paths that have changed since it was made."""
        changed = (path for path, was in note.rests_on if self._survey.fingerprint(fs, path) != was)
        return replace(note, outdated=tuple(changed))

    def _update_tool(self) -> Tool[UpdateDigestParams, DigestNote]:
        def update(params: UpdateDigestParams, *, context: ToolContext) -> ToolResult[DigestNote]:
            fs = context.filesystem
            empty = self._survey.digest(fs)
            paths = [fs.normalize(path) for path in params.rests_on]
            rests_on = tuple((path, self._survey.fingerprint(fs, path)) for path in paths)
            missing = [path for path, fingerprint in rests_on if not fingerprint]
            if missing:
                raise ToolValidationError(f"There is nothing at {', '.join(missing)}")
            note = DigestNote(params.topic, params.text, rests_on)
            context.session[WorkspaceDigest].update(lambda digests: _noted(digests, note, empty))
            return ToolResult.ok(note, "Noted" if params.text else "Forgotten")

        return Tool[UpdateDigestParams, DigestNote](
            name="update_digest",
            description="Note what you found out about the workspace, for later and for others.",
            handler=update,
            reach="reversible",
        )


@dataclass(frozen=True, slots=True)
class UpdateDigestParams:
    topic: Annotated[str, Field(min_length=1, max_length=80)]
    """What it is about. A note replaces an earlier one on the same topic."""
    text: Annotated[str, Field(max_length=2000)]
    """What you found out; an empty text removes the note."""
    rests_on: Annotated[tuple[str, ...], Field(min_length=1, max_length=20)]
    """Files or directories it rests on: once one of them changes, the note is marked as outdated.
    Name few and small ones."""


_GUIDANCE = (
    "All of this was found by looking at names and contents, and is as it is now. When you find "
    "out more that will be needed again, note it with `update_digest`."
)


def _noted(
    digests: Slice[WorkspaceDigest], note: DigestNote, empty: WorkspaceDigest
) -> Slice[WorkspaceDigest]:
    digest = digests.latest() or empty
    others = [each for each in digest.notes if each.topic != note.topic]
    notes = [*others, *([note] if note.text else [])][-_MAX_NOTES:]
    return digests.replace(replace(digest, notes=tuple(notes)))


# Listing the workspace


@dataclass(frozen=True, slots=True)
class _Listing:
    """The entries of a directory, and those of them that count."""

    entries: tuple[FileStat, ...]
    rules: tuple[IgnoreRules, ...]
    files: tuple[FileStat, ...]
    directories: tuple[str, ...]

    @property
    def size(self) -> int:
        return len(self.files) + len(self.directories)


class _Survey:
    """Remembers listings and contents, so that only what changed is read again."""

    def __init__(self, config: DigestConfig) -> None:
        self._config = config
        self._contents: dict[tuple[str, str], tuple[FileStat, Any]] = {}
        """What a function made of a file's content, by path and function."""
        self._listings: dict[str, _Listing] = {}
        self._digest: WorkspaceDigest | None = None
        self._lock = threading.Lock()  # several sessions may render one section

    def digest(self, fs: Filesystem) -> WorkspaceDigest:
        """Return the current digest. All directories are listed; only changed files are read."""
        with self._lock:
            before, self._listings = self._listings, dict(self._walk(fs))
            is_same = len(before) == len(self._listings) and all(
                before.get(path) is listing for path, listing in self._listings.items()
            )
            if self._digest is None or not is_same:
                self._digest = self._make(fs)
            return self._digest

    def fingerprint(self, fs: Filesystem, path: str) -> str:
        """Return a digest of a file's content, or of a directory's listing; empty if there is
        nothing at the path.
        """
        try:
            entry = fs.stat(path)
        except FilesystemError:
            return ""
        if entry.kind == "directory":
            inside = "" if path == "." else f"{path}/"
            below = (_line(file) for file in self._files() if file.path.startswith(inside))
            return _hash("\n".join(below).encode(errors="replace"))
        if entry.size > self._config.max_file_bytes:
            return _hash(_line(entry).encode(errors="replace"))
        return self._content(fs, entry, _hash)

    def _make(self, fs: Filesystem) -> WorkspaceDigest:
        config, files = self._config, self._files()
        readable = (file for file in files if file.size <= config.max_file_bytes)
        facts = [
            (file.path, self._content(fs, file, read))
            for file in readable
            if (read := _reader_of(file.path)) is not None
        ]
        told = [(path.count("/"), _is_readme(path), each.about) for path, each in facts]
        starts = [f"{shown(start)} ({path})" for path, each in facts for start in each.starts]
        starts += [file.path for file in files if file.path.rpartition("/")[2] in _ENTRY_FILES]
        big = [
            BigFile(file.path, file.size) for file in files if file.size >= config.big_file_bytes
        ]
        return WorkspaceDigest(
            about=min((each for each in told if each[2]), default=(0, False, ""))[2],
            files=len(files),
            directories=len(self._listings) - 1,
            size=sum(file.size for file in files),
            is_cut=sum(each.size for each in self._listings.values()) > config.max_files,
            folders=_folders(files),
            top_files=tuple(file.path for file in files if "/" not in file.path),
            entry_points=tuple(starts),
            how_to=tuple(HowTo(*how_to, path) for path, each in facts for how_to in each.how_to),
            big_files=tuple(sorted(big, key=lambda file: -file.size)),
        )

    def _files(self) -> list[FileStat]:
        """Return the files that were listed, nearest to the root first."""
        files = [file for listing in self._listings.values() for file in listing.files]
        return files[: self._config.max_files]

    def _walk(self, fs: Filesystem) -> Iterator[tuple[str, _Listing]]:
        """Yield each directory with its listing, nearest to the root first."""
        pending: deque[tuple[str, tuple[IgnoreRules, ...]]] = deque([(".", ())])
        count = 0
        while pending and count <= self._config.max_files:
            directory, rules = pending.popleft()
            try:
                entries = fs.list(directory)
            except FilesystemError:
                continue  # deleted meanwhile, or not readable
            rules = (*rules, *self._ignore_rules(fs, directory, entries))
            listing = self._listings.get(directory)
            if listing is None or listing.entries != entries or listing.rules != rules:
                listing = self._listing(fs, entries, rules)
            count += listing.size
            pending.extend((path, rules) for path in listing.directories)
            yield directory, listing

    def _listing(
        self, fs: Filesystem, entries: tuple[FileStat, ...], rules: tuple[IgnoreRules, ...]
    ) -> _Listing:
        files: list[FileStat] = []
        directories: list[str] = []
        for entry in entries:
            is_directory = entry.kind == "directory"
            is_skipped = entry.path.rpartition("/")[2] in self._config.skip
            if is_skipped or is_ignored(entry.path, is_directory, rules):
                continue
            if entry.kind == "file":
                files.append(entry)
            elif is_directory and not _is_link(fs, entry.path):
                directories.append(entry.path)
        return _Listing(entries, rules, tuple(files), tuple(directories))

    def _ignore_rules(
        self, fs: Filesystem, directory: str, entries: Iterable[FileStat]
    ) -> Iterator[IgnoreRules]:
        def parse(data: bytes) -> IgnoreRules:
            return parse_ignore_file(data.decode(errors="replace"), directory)

        for entry in entries if self._config.gitignore else ():
            is_rules = entry.path.rpartition("/")[2] == ".gitignore" and entry.kind == "file"
            if is_rules and entry.size <= self._config.max_file_bytes:
                yield self._content(fs, entry, parse)

    def _content(self, fs: Filesystem, entry: FileStat, read: Callable[[bytes], T]) -> T:
        """Return what a function makes of a file's content, from memory if it has not changed."""
        key = entry.path, read.__name__
        known, made = self._contents.get(key, (None, None))
        if known != entry:
            try:
                data = fs.read_bytes(entry.path)
            except FilesystemError:  # deleted meanwhile
                return read(b"")
            made = read(data)
            self._contents[key] = entry, made
        return cast("T", made)


def _line(file: FileStat) -> str:
    return f"{file.path} {file.size} {file.modified}"


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _is_link(fs: Filesystem, path: str) -> bool:
    # A listing shows a link to a directory as a directory, and one may lead back to itself.
    root = getattr(fs, "root", None)
    return isinstance(root, Path) and (root / path).is_symlink()


def _folders(files: Iterable[FileStat]) -> tuple[Folder, ...]:
    counts: Counter[str] = Counter()
    for file in files:
        names = file.path.split("/")[:-1]
        counts.update("/".join(names[:depth]) for depth in range(1, min(len(names), 2) + 1))
    return tuple(Folder(*counted) for counted in sorted(counts.items()))


# What a manifest tells


@dataclass(slots=True)
class _Facts:
    """How a project describes itself, its commands by purpose, and what it starts."""

    about: str = ""
    how_to: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    starts: list[str] = field(default_factory=list[str])


_ENTRY_FILES = ("__main__.py", "manage.py")


def _reader_of(path: str) -> Callable[[bytes], _Facts] | None:
    """Return the function that reads a manifest; None for every other file."""
    name = path.rpartition("/")[2]
    tell = _read_readme if _is_readme(path) else _MANIFESTS.get(name)

    def facts(data: bytes) -> _Facts:
        found = _Facts()
        # A broken manifest, or another program's file of the same name, tells less.
        with suppress(ValueError, AttributeError, TypeError, RecursionError):
            if tell is not None and b"\0" not in data[:8192]:
                tell(data.decode(errors="replace").removeprefix("\ufeff"), found)
        found.about = " ".join(found.about.split())[:_MAX_ABOUT]
        return found

    return None if tell is None else facts


def _is_readme(path: str) -> bool:
    return path.rpartition("/")[2].lower().partition(".")[0] == "readme"


def _read_readme(text: str, found: _Facts) -> None:
    """Take the first paragraph of prose, or else the first heading."""
    paragraphs = [part.strip() for part in re.split(r"\n\s*\n", text)]
    prose = (part for part in paragraphs if part and part[0] not in "#=<[!|`-*>")
    heading = (part.lstrip("# ").split("\n")[0] for part in paragraphs if part.startswith("#"))
    found.about = next(prose, "") or next(heading, "")


def _table(value: object, *keys: str) -> dict[str, Any]:
    """Return a table inside of tables; an empty one where there is none."""
    for key in keys:
        value = cast("dict[str, Any]", value).get(key) if isinstance(value, dict) else None
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _read_pyproject(text: str, found: _Facts) -> None:
    content = tomllib.loads(text)
    found.about = str(_table(content, "project").get("description", ""))
    for place in (("project", "scripts"), ("tool", "poetry", "scripts")):
        found.starts += _table(content, *place)
    if "pytest" in text:
        found.how_to.append(("test", "python -m pytest"))
    if "build-system" in content:
        found.how_to.append(("build", "python -m build"))
    for linter, command in (("ruff", "ruff check"), ("mypy", "mypy"), ("pyright", "pyright")):
        if linter in _table(content, "tool"):
            found.how_to.append(("lint", command))


def _read_package_json(text: str, found: _Facts) -> None:
    package = _table(json.loads(text))
    found.about = str(package.get("description", ""))
    commands = {"test": "npm test", "build": "npm run build", "lint": "npm run lint"}
    scripts = _table(package, "scripts")
    found.how_to += [item for item in commands.items() if item[0] in scripts]
    if "start" in scripts:
        found.how_to.append(("run", "npm start"))
    if isinstance(package.get("main"), str):
        found.starts.append(package["main"])
    found.starts += _table(package, "bin")


def _read_cargo(text: str, found: _Facts) -> None:
    found.about = str(_table(tomllib.loads(text), "package").get("description", ""))
    found.how_to += [("test", "cargo test"), ("build", "cargo build")]


def _targets(program: str) -> Callable[[str, _Facts], None]:
    purposes = {"test": "test", "tests": "test", "check": "test", "build": "build", "all": "build",
                "lint": "lint", "run": "run", "start": "run", "serve": "run"}  # fmt: skip

    def read(text: str, found: _Facts) -> None:
        for target in re.findall(r"^([a-z][\w-]*)[^\S\n]*:(?!=)", text, re.MULTILINE):
            if target in purposes:
                found.how_to.append((purposes[target], f"{program} {target}"))

    return read


def _always(**commands: str) -> Callable[[str, _Facts], None]:
    def read(text: str, found: _Facts) -> None:
        found.how_to += commands.items()

    return read


_MANIFESTS: dict[str, Callable[[str, _Facts], None]] = {
    "pyproject.toml": _read_pyproject,
    "package.json": _read_package_json,
    "Cargo.toml": _read_cargo,
    "Makefile": _targets("make"),
    "makefile": _targets("make"),
    "justfile": _targets("just"),
    "go.mod": _always(test="go test ./...", build="go build ./..."),
    "pom.xml": _always(test="mvn test", build="mvn package"),
    "build.gradle": _always(test="gradle test", build="gradle build"),
    "build.gradle.kts": _always(test="gradle test", build="gradle build"),
    "CMakeLists.txt": _always(build="cmake -B build && cmake --build build"),
    "tox.ini": _always(test="tox"),
    "noxfile.py": _always(test="nox"),
    "pytest.ini": _always(test="python -m pytest"),
    "setup.py": _always(build="python -m build"),
    "mix.exs": _always(test="mix test", build="mix compile"),
    "Rakefile": _always(test="rake test"),
    "Dockerfile": _always(build="docker build ."),
}


# In words


def _part(title: str, lines: Iterable[str], limit: int) -> str:
    lines = [line for line in lines if line]
    if not lines:
        return ""
    more = [f"- and {len(lines) - limit} more"] if len(lines) > limit else []
    return "\n".join([f"**{title}**", "", *lines[:limit], *more])


def _folder_line(folder: Folder) -> str:
    indent = "  " if "/" in folder.path else ""
    return f"{indent}- `{shown(folder.path)}/`: {counted(folder.files, 'file')}"


def _command_line(how_to: HowTo) -> str:
    directory, _, name = shown(how_to.source).rpartition("/")
    where = f" in `{directory}`" if directory else ""
    return f"- {how_to.purpose}: `{how_to.command}`{where} ({name})"


def _bytes(size: float) -> str:
    for unit in ("bytes", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"
