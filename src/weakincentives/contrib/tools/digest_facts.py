"""What one file tells about a workspace: its language, what starts here, how to test and build."""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

from weakincentives.filesystem.protocol import shown

__all__ = ["FileFacts", "HowTo", "facts_of", "is_manifest", "is_readme", "language_of"]

_LANGUAGES = {
    "Python": "py pyi pyx", "JavaScript": "js jsx mjs cjs", "TypeScript": "ts tsx", "Rust": "rs",
    "Go": "go", "Java": "java", "Kotlin": "kt kts", "Scala": "scala", "C": "c h",
    "C++": "cc cpp cxx hpp hh", "C#": "cs", "Swift": "swift", "Objective-C": "m mm",
    "Ruby": "rb", "PHP": "php", "Perl": "pl pm", "Lua": "lua", "R": "r", "Julia": "jl",
    "Haskell": "hs", "OCaml": "ml mli", "Elixir": "ex exs", "Erlang": "erl", "Clojure": "clj",
    "Dart": "dart", "Zig": "zig", "Shell": "sh bash zsh fish", "PowerShell": "ps1", "SQL": "sql",
    "HTML": "html htm", "CSS": "css scss sass less", "Vue": "vue", "Svelte": "svelte",
    "Markdown": "md markdown", "reStructuredText": "rst", "YAML": "yml yaml", "TOML": "toml",
    "JSON": "json", "XML": "xml", "Protocol Buffers": "proto", "Terraform": "tf",
    "Jupyter": "ipynb",
}  # fmt: skip
_LANGUAGE_OF = {end: name for name, ends in _LANGUAGES.items() for end in ends.split()}
_BY_NAME = {"Makefile": "Make", "Dockerfile": "Docker", "CMakeLists.txt": "CMake"}

_MAX_ABOUT = 300

# What a file that starts something looks like, by language.
_STARTS = {
    "Python": re.compile(r"^if __name__ == ['\"]__main__['\"]", re.MULTILINE),
    "Go": re.compile(r"^func main\(", re.MULTILINE),
    "Rust": re.compile(r"^(?:pub )?(?:async )?fn main\(", re.MULTILINE),
    "Java": re.compile(r"\bstatic\s+void\s+main\s*\("),
    "C": re.compile(r"^int\s+main\s*\(", re.MULTILINE),
    "C++": re.compile(r"^int\s+main\s*\(", re.MULTILINE),
}


@dataclass(frozen=True, slots=True)
class HowTo:
    """A command, and what it is for."""

    purpose: str
    """``test``, ``build``, ``lint`` or ``run``."""
    command: str
    source: str
    """The file that tells."""


@dataclass(frozen=True, slots=True)
class FileFacts:
    """What was found in one file."""

    digest: str
    """Of its content."""
    lines: int = 0
    starts: tuple[str, ...] = ()
    """Entry points: the file itself, or what it names."""
    how_to: tuple[HowTo, ...] = ()
    about: str = ""
    """What the project says it is."""


def language_of(path: str) -> str | None:
    """Return the language of a file by its name.

    >>> language_of("src/app.py"), language_of("LICENSE")
    ('Python', None)
    """
    name = path.rpartition("/")[2]
    return _BY_NAME.get(name) or _LANGUAGE_OF.get(name.rpartition(".")[2].lower())


def is_manifest(path: str) -> bool:
    """Tell whether a file says how the project is made: these are looked at first."""
    return path.rpartition("/")[2] in _MANIFESTS or is_readme(path)


def is_readme(path: str) -> bool:
    """Tell whether a file introduces the project."""
    return path.rpartition("/")[2].lower().partition(".")[0] == "readme"


def facts_of(path: str, data: bytes) -> FileFacts:
    """Return what a file's content tells."""
    digest = hashlib.sha256(data).hexdigest()[:16]
    if b"\0" in data[:8192]:
        return FileFacts(digest)
    text = data.decode(errors="replace").removeprefix("\ufeff")
    found = _Found()
    name = path.rpartition("/")[2]
    read = _MANIFESTS.get(name)
    if read is not None:
        # One that is being worked on, or that means something else, tells less.
        with suppress(ValueError, AttributeError, TypeError, RecursionError):
            read(text, found)
    if is_readme(path):
        found.about = _first_words(text)
    if _starts_something(path, name, text):
        found.starts.append("")
    return FileFacts(
        digest,
        lines=text.count("\n") + (not text.endswith("\n") and bool(text)),
        starts=tuple(path if not each else f"{shown(each)} ({path})" for each in found.starts),
        how_to=tuple(HowTo(purpose, command, path) for purpose, command in found.how_to),
        about=" ".join(found.about.split())[:_MAX_ABOUT],
    )


def _starts_something(path: str, name: str, text: str) -> bool:
    if name.startswith("test_") or "/tests/" in f"/{path}":
        return False
    if name in ("__main__.py", "manage.py") or text.startswith("#!"):
        return True
    pattern = _STARTS.get(language_of(path) or "")
    return pattern is not None and pattern.search(text) is not None


def _first_words(text: str) -> str:
    """Return the first paragraph of prose, or else the first heading."""
    paragraphs = [part.strip() for part in re.split(r"\n\s*\n", text)]
    prose = (part for part in paragraphs if part and part[0] not in "#=<[!|`-*>")
    heading = (part.lstrip("# ").split("\n")[0] for part in paragraphs if part.startswith("#"))
    return next(prose, "") or next(heading, "")


# Manifests


class _Found:
    """What a manifest tells, collected."""

    def __init__(self) -> None:
        self.how_to: list[tuple[str, str]] = []
        self.starts: list[str] = []
        self.about = ""

    def add(self, purpose: str, command: str) -> None:
        self.how_to.append((purpose, command))


def _table(value: object, *keys: str) -> dict[str, Any]:
    """Return a table inside of tables; an empty one where there is none."""
    for key in keys:
        value = cast("dict[str, Any]", value).get(key) if isinstance(value, dict) else None
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _pyproject(text: str, found: _Found) -> None:
    content = tomllib.loads(text)
    found.about = str(_table(content, "project").get("description", ""))
    for place in (("project", "scripts"), ("tool", "poetry", "scripts")):
        found.starts += list(_table(content, *place))
    if "pytest" in text:
        found.add("test", "python -m pytest")
    if "build-system" in content:
        found.add("build", "python -m build")
    for linter, command in (("ruff", "ruff check"), ("mypy", "mypy"), ("pyright", "pyright")):
        if linter in _table(content, "tool"):
            found.add("lint", command)


def _package_json(text: str, found: _Found) -> None:
    content: object = json.loads(text)
    package = _table(content)
    found.about = str(package.get("description", ""))
    scripts = _table(content, "scripts")
    for purpose, name in (("test", "test"), ("build", "build"), ("lint", "lint"), ("run", "start")):
        if name in scripts:
            found.add(purpose, f"npm {name}" if name in ("test", "start") else f"npm run {name}")
    if isinstance(package.get("main"), str):
        found.starts.append(package["main"])
    found.starts += list(_table(content, "bin"))


def _targets(program: str) -> Callable[[str, _Found], None]:
    purposes = {"test": "test", "tests": "test", "check": "test", "build": "build", "all": "build",
                "lint": "lint", "run": "run", "start": "run", "serve": "run"}  # fmt: skip

    def read(text: str, found: _Found) -> None:
        for target in re.findall(r"^([a-z][\w-]*)[^\S\n]*:(?!=)", text, re.MULTILINE):
            if target in purposes:
                found.add(purposes[target], f"{program} {target}")

    return read


def _always(*how_to: tuple[str, str]) -> Callable[[str, _Found], None]:
    def read(text: str, found: _Found) -> None:
        found.how_to += how_to

    return read


def _cargo(text: str, found: _Found) -> None:
    content = tomllib.loads(text)
    found.about = str(_table(content, "package").get("description", ""))
    found.how_to += [("test", "cargo test"), ("build", "cargo build")]


_MANIFESTS: dict[str, Callable[[str, _Found], None]] = {
    "pyproject.toml": _pyproject,
    "package.json": _package_json,
    "Cargo.toml": _cargo,
    "Makefile": _targets("make"),
    "makefile": _targets("make"),
    "justfile": _targets("just"),
    "go.mod": _always(("test", "go test ./..."), ("build", "go build ./...")),
    "pom.xml": _always(("test", "mvn test"), ("build", "mvn package")),
    "build.gradle": _always(("test", "gradle test"), ("build", "gradle build")),
    "build.gradle.kts": _always(("test", "gradle test"), ("build", "gradle build")),
    "CMakeLists.txt": _always(("build", "cmake -B build && cmake --build build")),
    "tox.ini": _always(("test", "tox")),
    "noxfile.py": _always(("test", "nox")),
    "pytest.ini": _always(("test", "python -m pytest")),
    "setup.py": _always(("build", "python -m build")),
    "mix.exs": _always(("test", "mix test"), ("build", "mix compile")),
    "Rakefile": _always(("test", "rake test")),
    "Dockerfile": _always(("build", "docker build .")),
}
