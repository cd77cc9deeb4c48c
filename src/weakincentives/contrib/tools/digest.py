"""``WorkspaceDigestSection``: an overview of the workspace, for a model that has not seen it yet.

It is made without a model, and updating it costs as much as what changed. A model can add notes; a
note is marked as outdated once the files that it rests on have changed.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import tomllib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar, Unpack, cast

from pydantic import Field

from weakincentives.contrib.tools.file_values import check_positive
from weakincentives.contrib.tools.suite import suite_tool
from weakincentives.core.call import call_under_way
from weakincentives.core.text import counted, size_of
from weakincentives.errors import FilesystemError, ToolValidationError
from weakincentives.filesystem import FileStat, Filesystem
from weakincentives.filesystem.ignored import IgnoreRules, is_ignored, parse_ignore_file
from weakincentives.filesystem.paths import shown
from weakincentives.prompt.section import Section, SectionOptions, SectionVisibility
from weakincentives.prompt.tool import ToolContext
from weakincentives.session.slices import Slice
from weakincentives.tool_result import ToolResult

if TYPE_CHECKING:
    from weakincentives.session.session import Session

T = TypeVar("T")

_MAX_NOTES = 20
_MAX_ABOUT = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class DigestConfig:
    """How much of a workspace is examined and shown."""

    max_files: int = 20_000
    """Files and directories to list, nearest to the root first."""
    max_file_bytes: int = 200_000
    """Larger files are not read."""
    gitignore: bool = True
    """Leave out the files that ``.gitignore`` files exclude."""
    skip: tuple[str, ...] = (".git", ".hg", ".svn")
    """Names that are left out everywhere."""
    big_file_bytes: int = 200_000
    """Files of at least this size are listed as big files."""
    lines: int = 20
    """Lines shown of each part."""

    def __post_init__(self) -> None:
        check_positive(self)


@dataclass(frozen=True, slots=True)
class DigestNote:
    """A model's note on a part of the workspace."""

    topic: str
    text: str
    rests_on: tuple[tuple[str, str], ...]
    """Paths, each with the hash of its content when the note was made."""
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
            f"{more}{counted(self.files, 'file')} in {directories}, {size_of(self.size)}.",
            f"Tests: `{tests}`." if tests else "",
            f"{notes}." if self.notes else "",
        ]
        return "\n".join(filter(None, lines))

    def render(self, lines: int = 20) -> str:
        """Return the whole digest, with at most so many lines of each part."""
        top = ", ".join(f"`{shown(path)}`" for path in self.top_files)
        big = [f"- `{shown(file.path)}`: {size_of(file.size)}" for file in self.big_files]
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
        options["tools"] = (
            suite_tool(self._update_digest, reach="reversible"),
            *options.get("tools", ()),
        )
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
        # In a call the session belongs to the call, and a read-only call must not change it.
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

    def _update_digest(
        self, params: UpdateDigestParams, *, context: ToolContext
    ) -> ToolResult[DigestNote]:
        """Note a finding about the workspace, for later and for others."""
        fs = context.filesystem
        empty = self._survey.digest(fs)
        paths = [fs.normalize(path) for path in params.rests_on]
        rests_on = tuple((path, self._survey.fingerprint(fs, path)) for path in paths)
        missing = [path for path, fingerprint in rests_on if not fingerprint]
        if missing:
            raise ToolValidationError(f"No such file or directory: {', '.join(missing)}")
        note = DigestNote(params.topic, params.text, rests_on)

        def with_note(digests: Slice[WorkspaceDigest]) -> Slice[WorkspaceDigest]:
            digest = digests.latest() or empty
            others = [each for each in digest.notes if each.topic != note.topic]
            notes = [*others, note] if note.text else others
            return digests.replace(replace(digest, notes=tuple(notes[-_MAX_NOTES:])))

        context.session[WorkspaceDigest].update(with_note)
        return ToolResult.ok(note, "Note saved" if params.text else "Note removed")


@dataclass(frozen=True, slots=True)
class UpdateDigestParams:
    topic: Annotated[str, Field(min_length=1, max_length=80)]
    """A note replaces an earlier note on the same topic."""
    text: Annotated[str, Field(max_length=2000)]
    """Your finding; an empty text removes the note."""
    rests_on: Annotated[tuple[str, ...], Field(min_length=1, max_length=20)]
    """Files or directories it rests on: once one of them changes, the note is marked as outdated.
    Name as few as possible."""


_GUIDANCE = (
    "This overview is current; it was made from names and contents. When you find out more that "
    "will be needed again, note it with `update_digest`."
)


# Listing the workspace


class _Survey:
    """Remembers what was read, so that only changed files are read again."""

    def __init__(self, config: DigestConfig) -> None:
        self._config = config
        self._contents: dict[tuple[str, object], tuple[FileStat, Any]] = {}
        """The result of reading a file, by path and function, for the file as it was."""
        self._is_ignored = lru_cache(2 * config.max_files)(is_ignored)
        self._files: list[FileStat] = []
        """Nearest to the root first."""
        self._digest = WorkspaceDigest()
        self._lock = threading.Lock()  # several sessions may render one section

    def digest(self, fs: Filesystem) -> WorkspaceDigest:
        """Return the current digest. All directories are listed; only changed files are read."""
        with self._lock:
            files, directories, is_cut = self._walk(fs)
            if files != self._files:
                self._files = files
                self._digest = self._describe(fs)
            return replace(self._digest, directories=directories, is_cut=is_cut)

    def _describe(self, fs: Filesystem) -> WorkspaceDigest:
        config, files = self._config, self._files
        manifests = [
            (file.path, self._content(fs, file, _manifest))
            for file in files
            if file.size <= config.max_file_bytes and _is_manifest(file.path)
        ]
        about = [(path.count("/"), _is_readme(path), each.about) for path, each in manifests]
        starts = [f"{shown(start)} ({path})" for path, each in manifests for start in each.starts]
        starts += [file.path for file in files if _name(file.path) in _ENTRY_FILES]
        how_to = [HowTo(*command, path) for path, each in manifests for command in each.commands]
        big = [(file.size, file.path) for file in files if file.size >= config.big_file_bytes]
        return WorkspaceDigest(
            about=min((each for each in about if each[2]), default=(0, False, ""))[2],
            files=len(files),
            size=sum(file.size for file in files),
            folders=_folders(files),
            top_files=tuple(file.path for file in files if "/" not in file.path),
            entry_points=tuple(starts),
            how_to=tuple(how_to),
            big_files=tuple(BigFile(path, size) for size, path in sorted(big, reverse=True)),
        )

    def fingerprint(self, fs: Filesystem, path: str) -> str:
        """Return a hash of a file's content or of a directory's listing; empty if there is none."""
        try:
            entry = fs.stat(path)
        except FilesystemError:
            return ""
        if entry.kind == "directory":
            inside = "" if path == "." else f"{path}/"
            below = (_line(file) for file in self._files if file.path.startswith(inside))
            return _hash(path, "\n".join(below).encode(errors="replace"))
        if entry.size > self._config.max_file_bytes:
            return _hash(path, _line(entry).encode(errors="replace"))
        return self._content(fs, entry, _hash)

    def _walk(self, fs: Filesystem) -> tuple[list[FileStat], int, bool]:
        """Return the files, nearest to the root first, the number of directories, and whether
        there are more.
        """
        files: list[FileStat] = []
        directories, count = -1, 0
        pending: deque[tuple[str, tuple[IgnoreRules, ...]]] = deque([(".", ())])
        while pending and count <= self._config.max_files:
            directory, rules = pending.popleft()
            try:
                entries = fs.list(directory)
            except FilesystemError:
                continue  # deleted since, or not readable
            directories += 1
            rules += tuple(self._ignore_rules(fs, entries))
            for entry in entries:
                is_directory = entry.kind == "directory"
                is_skipped = _name(entry.path) in self._config.skip
                if is_skipped or self._is_ignored(entry.path, is_directory, rules):
                    continue
                if entry.kind == "file":
                    files.append(entry)
                    count += 1
                elif is_directory and not _is_link(fs, entry.path):
                    pending.append((entry.path, rules))
                    count += 1
        return files[: self._config.max_files], directories, count > self._config.max_files

    def _ignore_rules(self, fs: Filesystem, entries: Iterable[FileStat]) -> Iterator[IgnoreRules]:
        for entry in entries if self._config.gitignore else ():
            is_rules = _name(entry.path) == ".gitignore" and entry.kind == "file"
            if is_rules and entry.size <= self._config.max_file_bytes:
                yield self._content(fs, entry, _rules)

    def _content(self, fs: Filesystem, entry: FileStat, read: Callable[[str, bytes], T]) -> T:
        """Return the result of reading a file, remembered until the file changes."""
        known, result = self._contents.get((entry.path, read), (None, None))
        if known != entry:
            try:
                data = fs.read_bytes(entry.path)
            except FilesystemError:  # deleted since
                return read(entry.path, b"")
            result = read(entry.path, data)
            self._contents[entry.path, read] = entry, result
        return cast("T", result)


def _name(path: str) -> str:
    return path.rpartition("/")[2]


def _line(file: FileStat) -> str:
    return f"{file.path} {file.size} {file.modified}"


def _hash(path: str, data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _rules(path: str, data: bytes) -> IgnoreRules:
    return parse_ignore_file(data.decode(errors="replace"), path.rpartition("/")[0] or ".")


def _is_link(fs: Filesystem, path: str) -> bool:
    # A listing shows a link to a directory as a directory, and it may lead back to itself.
    root = getattr(fs, "root", None)
    return isinstance(root, Path) and (root / path).is_symlink()


def _folders(files: Iterable[FileStat]) -> tuple[Folder, ...]:
    counts: Counter[str] = Counter()
    for file in files:
        names = file.path.split("/")[:-1]
        counts.update("/".join(names[:depth]) for depth in range(1, min(len(names), 2) + 1))
    return tuple(Folder(*each) for each in sorted(counts.items()))


# Manifests


@dataclass(frozen=True, slots=True)
class _Manifest:
    """A project's description of itself, its commands by purpose, and the programs it starts."""

    about: str = ""
    commands: Sequence[tuple[str, str]] = ()
    starts: Sequence[str] = ()


_ENTRY_FILES = ("__main__.py", "manage.py")
_COMMANDS: dict[str, dict[str, str]] = {
    "go.mod": {"test": "go test ./...", "build": "go build ./..."},
    "pom.xml": {"test": "mvn test", "build": "mvn package"},
    "build.gradle": {"test": "gradle test", "build": "gradle build"},
    "build.gradle.kts": {"test": "gradle test", "build": "gradle build"},
    "CMakeLists.txt": {"build": "cmake -B build && cmake --build build"},
    "tox.ini": {"test": "tox"},
    "noxfile.py": {"test": "nox"},
    "pytest.ini": {"test": "python -m pytest"},
    "setup.py": {"build": "python -m build"},
    "mix.exs": {"test": "mix test", "build": "mix compile"},
    "Rakefile": {"test": "rake test"},
    "Dockerfile": {"build": "docker build ."},
}
"""The usual commands of projects that have these files."""


def _is_manifest(path: str) -> bool:
    return _name(path) in _COMMANDS or _name(path) in _READERS or _is_readme(path)


def _is_readme(path: str) -> bool:
    return _name(path).lower().partition(".")[0] == "readme"


def _manifest(path: str, data: bytes) -> _Manifest:
    name = _name(path)
    if name in _COMMANDS:
        return _Manifest(commands=tuple(_COMMANDS[name].items()))
    read = _READERS.get(name, _read_readme)
    try:
        return read(data.decode(errors="replace").removeprefix("\ufeff"))
    except (ValueError, AttributeError, TypeError, RecursionError):
        return _Manifest()  # broken, or another program's file of the same name


def _read_readme(text: str) -> _Manifest:
    """Take the first paragraph of prose, or else the first heading."""
    paragraphs = [part.strip() for part in re.split(r"\n\s*\n", text)]
    prose = (part for part in paragraphs if part and part[0] not in "\0#=<[!|`-*>")
    heading = (part.lstrip("# ").split("\n")[0] for part in paragraphs if part.startswith("#"))
    return _Manifest(_short(next(prose, "") or next(heading, "")))


def _read_pyproject(text: str) -> _Manifest:
    content = tomllib.loads(text)
    tools = _table(content, "tool")
    commands = [("test", "python -m pytest")] if "pytest" in text else []
    commands += [("build", "python -m build")] if "build-system" in content else []
    linters = {"ruff": "ruff check", "mypy": "mypy", "pyright": "pyright"}
    commands += [("lint", command) for name, command in linters.items() if name in tools]
    about = _table(content, "project").get("description", "")
    starts = [*_table(content, "project", "scripts"), *_table(tools, "poetry", "scripts")]
    return _Manifest(_short(about), commands, starts)


def _read_package_json(text: str) -> _Manifest:
    package = _table(json.loads(text))
    scripts = _table(package, "scripts")
    npm = {"test": "npm test", "build": "npm run build", "lint": "npm run lint"}
    commands = [item for item in npm.items() if item[0] in scripts]
    commands += [("run", "npm start")] if "start" in scripts else []
    main = package.get("main")
    starts = [*([main] if isinstance(main, str) else []), *_table(package, "bin")]
    return _Manifest(_short(package.get("description", "")), commands, starts)


def _read_cargo(text: str) -> _Manifest:
    about = _table(tomllib.loads(text), "package").get("description", "")
    return _Manifest(_short(about), [("test", "cargo test"), ("build", "cargo build")])


def _targets(program: str) -> Callable[[str], _Manifest]:
    purposes = {"test": "test", "tests": "test", "check": "test", "build": "build", "all": "build",
                "lint": "lint", "run": "run", "start": "run", "serve": "run"}  # fmt: skip

    def read(text: str) -> _Manifest:
        targets = re.findall(r"^([a-z][\w-]*)[^\S\n]*:(?!=)", text, re.MULTILINE)
        named = [(purposes[each], f"{program} {each}") for each in targets if each in purposes]
        return _Manifest(commands=named)

    return read


def _table(value: object, *keys: str) -> dict[str, Any]:
    """Return a table inside of tables; an empty one where there is none."""
    for key in keys:
        value = cast("dict[str, Any]", value).get(key) if isinstance(value, dict) else None
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _short(text: object) -> str:
    return " ".join(str(text).split())[:_MAX_ABOUT]


_READERS: dict[str, Callable[[str], _Manifest]] = {
    "pyproject.toml": _read_pyproject,
    "package.json": _read_package_json,
    "Cargo.toml": _read_cargo,
    "Makefile": _targets("make"),
    "makefile": _targets("make"),
    "justfile": _targets("just"),
}


# Rendering


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
