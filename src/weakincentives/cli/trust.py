"""Code of a workspace that runs in `wink` itself: only as the user has approved it.

``wink.toml`` can name code, and so can a resumed run. An agent, or a cloned repository, could put
anything there. So a file of the workspace is loaded only if the user approved its digest. The
digests are sealed in the user's state directory. Byte code is never loaded.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from weakincentives.cli.common import FILE_NAME, Misuse, echo, hint
from weakincentives.core.state import Seals, module_path, our_code, our_environment, state_directory
from weakincentives.core.text import harmless

if TYPE_CHECKING:
    from weakincentives.cli.config import Settings

APPROVE = "Do you approve these files as they are now?"


class NotApproved(ImportError):
    """Code of the workspace loads a file that the user has not approved as it is now."""


class Found(NamedTuple):
    """Something that is not approved."""

    name: str
    digest: str
    state: str
    """``new`` or ``changed``."""

    def __str__(self) -> str:
        return f"{harmless(self.name)}  ({self.state}, sha256 {self.digest[:16]})"


def is_interactive() -> bool:
    """Tell whether there is a terminal to ask at."""
    return all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stderr))


def _person_approves(found: Sequence[Found]) -> bool:
    """Show what would run in `wink` itself, and ask; without a terminal the answer is no."""
    if not is_interactive():
        return False
    echo("These files decide what runs outside the sandbox. Review them first:", err=True)
    for each in found:
        echo(f"  {each}", err=True)
    import typer

    return typer.confirm(APPROVE, err=True)


@cache
def trust_of(workspace: Path) -> Trust:
    """Return the approvals of a workspace; from now on only approved code is loaded from there."""
    trust = Trust(workspace)
    sys.meta_path.insert(0, _Finder(trust))
    return trust


class Trust:
    """The files of a workspace that may be loaded: their approved digests, by path."""

    def __init__(self, workspace: Path) -> None:
        self.workspace = workspace
        self._approves: Callable[[Sequence[Found]], bool] = lambda found: False
        """Decides about unapproved files while code is loaded."""
        self._ours = (*our_code(), *our_environment())

    def approved(self) -> dict[str, str]:
        """Return the approved digests by name."""
        try:
            line = self._record().read_bytes()
        except OSError:
            return {}
        data = self._seals().unsealed(line)
        return {} if data is None else json.loads(data)

    def approve(self, found: Iterable[Found]) -> None:
        names = self.approved() | {each.name: each.digest for each in found}
        record = self._record()
        record.parent.mkdir(mode=0o700, exist_ok=True)
        staged = record.with_name(f"{record.name}-{os.urandom(8).hex()}")
        staged.write_bytes(self._seals().sealed(json.dumps(names).encode()))
        os.replace(staged, record)

    def _seals(self) -> Seals:
        return Seals(f"approved code {os.fspath(self.workspace)}")

    def _record(self) -> Path:
        mark = hashlib.sha256(os.fsencode(self.workspace)).hexdigest()[:32]
        return state_directory() / "approved" / mark

    def missing(self, settings: Settings, more: Iterable[Path] = ()) -> list[Found]:
        """Return what the settings would load, and ``more``, as far as it is not approved.

        Code that the user has just named as a flag or variable needs no approval.
        """
        named = [each for each in settings.specs if each not in settings.given]
        loaded: list[tuple[str, bytes]] = []
        if settings.needs_file:
            loaded.append((FILE_NAME, _read(self.workspace / FILE_NAME)))
        loaded += [
            (f"--policy {each}", b"") for each in named if each not in settings.specs_of_file
        ]
        files = [file for each in named for file in self._files_of(each)]
        files += [Path(os.path.abspath(each)) for each in more]
        loaded += [(self.name(path), data) for path, data in _loaded_by(files, self)]
        found = (self._unapproved(name, data) for name, data in loaded)
        return [each for each in found if each is not None]

    def admit(self, settings: Settings) -> None:
        """Ask the user to approve what is missing; raise Misuse if they do not."""
        found = self.missing(settings)
        if not found:
            return
        if _person_approves(found):
            self.approve(found)
            return
        names = ", ".join(f"{each.name} ({each.state})" for each in found)
        raise Misuse(
            f"not approved: {names}. These files run code outside the sandbox, or lift a "
            f"protection. Review them, then run: wink policy trust -w {self.workspace}"
        )

    def _files_of(self, spec: str) -> list[Path]:
        file = file_of(spec, self.workspace)
        if file is None:
            return list(_sources(spec.rpartition(":")[0], self, None))
        if not file.is_file():
            raise Misuse(f"{spec}: there is no file {file}")
        return [file]

    def _unapproved(self, name: str, data: bytes) -> Found | None:
        digest, known = hashlib.sha256(data).hexdigest(), self.approved().get(name)
        if digest == known:
            return None
        return Found(name, digest, "new" if known is None else "changed")

    def name(self, path: Path | str) -> str:
        """Return the name that a file is approved under."""
        path = Path(os.path.abspath(path))
        inside = path.is_relative_to(self.workspace)
        return str(path.relative_to(self.workspace)) if inside else str(path)

    def source(self, path: str) -> bytes:
        """Return the approved bytes of a file; otherwise raise NotApproved."""
        data = Path(path).read_bytes()
        found = self._unapproved(self.name(path), data)
        if found is not None:
            if not self._approves([found]):
                raise NotApproved(
                    f"{found.name} is not approved ({found.state}). Review it, then run: wink "
                    f"policy trust {found.name} -w {self.workspace}"
                )
            self.approve([found])
        return data

    def covers(self, path: str) -> bool:
        """Tell whether a path is in the workspace, but not in our own installation there."""
        for each in {os.path.abspath(path), os.path.realpath(path)}:
            if Path(each).is_relative_to(self.workspace):
                return not any(Path(each).is_relative_to(ours) for ours in self._ours)
        return False

    def load(self, key: str, spec: str, settings: Settings) -> object:
        """Return the object that ``module:object`` or ``file.py:object`` names."""
        place, colon, name = spec.rpartition(":")
        if not colon or not place or not name:
            raise Misuse(f"{key}: {spec!r} is not module:object or file.py:object")
        file = file_of(spec, self.workspace)
        if file is not None and not file.is_file():
            raise Misuse(f"{key}: there is no file {file}")
        is_given = spec in settings.given
        if is_given:
            self.approve(filter(None, [self._unapproved(f"--policy {spec}", b"")]))
        before = self._approves
        self._approves = (lambda found: True) if is_given else _person_approves
        try:
            found: object = import_module(place) if file is None else self.module(file)
        except (Exception, SystemExit) as error:  # a script, not a module, may exit
            reason = f"{type(error).__name__}: {error}"
            raise Misuse(f"{key}: cannot load {place}: {reason}") from error
        finally:
            self._approves = before
        for part in name.split("."):
            try:
                found = getattr(found, part)
            except AttributeError:
                near = hint(part, [each for each in dir(found) if each[0] != "_"])
                raise Misuse(f"{key}: {place} has no {name}{near and f'; {near}'}") from None
        return found

    def module(self, file: Path) -> ModuleType:
        """Load a file once, as a module under a name of its own.

        A resumed session finds its types by that name.
        """
        mark = hashlib.sha256(os.fsencode(file)).hexdigest()[:8]
        name = f"wink_file_{mark}_{file.stem}"
        if name not in sys.modules:
            loader = _Loader(name, str(file), self)
            spec = spec_from_file_location(name, file, loader=loader)
            assert spec is not None
            module = sys.modules[name] = module_from_spec(spec)
            try:
                loader.exec_module(module)
            except BaseException:
                del sys.modules[name]
                raise
        return sys.modules[name]


def file_of(spec: str, workspace: Path) -> Path | None:
    """Return the file of ``file.py:object``, relative to the workspace; else None."""
    place = spec.rpartition(":")[0]
    return (workspace / Path(place).expanduser()).resolve() if place.endswith(".py") else None


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


class _Loader(SourceFileLoader):
    """Runs the approved source of a file, never its byte code."""

    def __init__(self, name: str, path: str, trust: Trust) -> None:
        super().__init__(name, path)
        self._trust = trust

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return self.source_to_code(self._trust.source(path), path)


class _Finder:
    """Loads modules of a workspace with ``_Loader``, and only if no installed module is found."""

    def __init__(self, trust: Trust) -> None:
        self._trust = trust

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        entries = [each or os.getcwd() for each in (sys.path if path is None else path)]
        outside = [each for each in entries if not self._trust.covers(each)]
        places = _path() if path is None else entries
        inside = [each for each in places if self._trust.covers(each)]
        for finder in sys.meta_path:
            if isinstance(finder, _Finder):
                continue
            where: Any = outside if finder is PathFinder else path
            found = finder.find_spec(name, where, target)
            if found is not None:
                return self._checked(name, found)
        found = PathFinder.find_spec(name, inside) if inside else None
        return None if found is None else self._checked(name, found)

    def _checked(self, name: str, spec: ModuleSpec) -> ModuleSpec:
        origin = spec.origin
        if origin is None or not spec.has_location or not self._trust.covers(origin):
            return spec
        if not isinstance(spec.loader, SourceFileLoader):
            raise NotApproved(f"{origin} is not loaded: only source files of a workspace are")
        loader = _Loader(name, origin, self._trust)
        checked = spec_from_file_location(
            name, origin, loader=loader, submodule_search_locations=spec.submodule_search_locations
        )
        assert checked is not None
        checked.cached = None
        return checked


def _path() -> list[str]:
    """Return where modules are looked for, and what `wink` has left out: see ``programs``."""
    return list(dict.fromkeys((*(each or os.getcwd() for each in sys.path), *module_path())))


# Imports, as far as the source shows them


def _loaded_by(files: Iterable[Path], trust: Trust) -> Iterator[tuple[Path, bytes]]:
    """Yield files and what they import from the workspace, each once, with their bytes."""
    seen: set[Path] = set()
    pending = list(files)
    while pending:
        path = pending.pop(0)
        if path in seen or not path.is_file():
            continue
        seen.add(path)
        data = _read(path)
        yield path, data
        if trust.covers(str(path)):
            pending += [each for name in _imports(data) for each in _sources(name, trust, path)]


def _imports(source: bytes) -> Iterator[str]:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return  # running it reports the error
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            yield base
            joined = base if base.endswith(".") else f"{base}."
            yield from (f"{joined}{alias.name}" for alias in node.names)


def _sources(name: str, trust: Trust, importer: Path | None) -> Iterator[Path]:
    """Yield the files of the workspace that a module and its packages may come from."""
    dots = len(name) - len(name.lstrip("."))
    parts = [part for part in name.lstrip(".").split(".") if part]
    tops = [Path(each) for each in _path() if trust.covers(each)]
    if importer is not None:
        tops.append(importer.parent)
    tops.append(trust.workspace)
    if dots and importer is not None:
        tops = [importer.parents[min(dots, len(importer.parents)) - 1]]
    for top in dict.fromkeys(tops):
        for depth in range(1, len(parts) + 1):
            place = top.joinpath(*parts[:depth])
            for file in (place.with_name(f"{place.name}.py"), place / "__init__.py"):
                if file.is_file() and trust.covers(str(file)):
                    yield file
