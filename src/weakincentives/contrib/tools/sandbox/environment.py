"""What commands see of the project's environment: the workspace, its toolchains, and variables.

The workspace is not trusted: a cloned repository can have any ``pyvenv.cfg``, ``.python-version``
or link. So what these name is shown only if it is a toolchain: a directory with a real interpreter
that is not a home directory, and contains neither the workspace nor our state; in the workspace, or
where interpreters and environments usually are. Of a toolchain only its own parts are shown: a
project's directory may be an environment itself. Toolchains are always read-only.
"""

from __future__ import annotations

import os
import re
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from weakincentives.contrib.tools.sandbox.settings import WITHOUT_MOUNTS, SandboxSettings
from weakincentives.core.programs import SYSTEM_PATH, find_program, safe_path
from weakincentives.core.state import our_code, our_environment, our_secrets
from weakincentives.filesystem.paths import DEFAULT_ROOT, MAX_LINKS

PATH = SYSTEM_PATH
CLEAN = {"PATH": PATH, "HOME": "/tmp", "LANG": "C.UTF-8", "TERM": "dumb"}
"""The environment of every command; nothing of ours."""

WORKSPACE = DEFAULT_ROOT
"""Where a command sees the workspace, too; the file tools use the same prefix."""

SYSTEM = ("/usr", "/bin", "/lib", "/lib32", "/lib64", "/libx32", "/sbin")
"""The directories of programs that commands see in any case."""

_KERNEL = ("/proc", "/dev", "/sys", "/run", "/boot")
# A directory that has one of these is somebody's home.
_PERSONAL = (".ssh", ".gnupg", ".aws", ".config", ".netrc", ".bash_history", ".profile", ".bashrc")

# The parts of an environment or of an interpreter. Not conda-meta and etc: users keep tokens there.
_PARTS = re.compile(
    r"bin|include|lib|lib32|lib64|libexec|man|share|ssl|pyvenv\.cfg|[a-z0-9_]+(-[a-z0-9_]+)?-linux-gnu"
)
_BESIDE = re.compile(
    r"BUILD|LICEN[CS]E(\.\w+)?|README(\.\w+)?|CHANGELOG(\.\w+)?|CACHEDIR\.TAG|\.gitignore|\.lock"
)
"""Files beside those parts that tell nothing."""
_VERSION = re.compile(r"([a-z]*py[a-z]*|v)?[-@.]?\d+\.\d+\S*", re.IGNORECASE)
"""What people call the directory of an interpreter: ``3.12.1``, ``cpython-3.12.4-linux``."""

Mount = tuple[Literal["read", "write", "link", "scratch", "proc", "dev", "lock"], str, str]
"""Kind, source and target: a ``read``-only or ``write``-able file or directory of the host, a
symbolic ``link``, an empty ``scratch`` directory whose source is its size in bytes, ``/proc`` or
``/dev``; ``lock`` makes a directory read-only once everything in it is mounted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Toolchain:
    """A toolchain of this machine that commands find in ``PATH``."""

    name: str
    place: str
    """Its directory."""
    source: str
    """How it was found: a variable, a file of the workspace, or ``PATH``."""
    path: tuple[str, ...] = ()
    """Its directories of programs."""
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    shown: tuple[str, ...] = ()
    """What commands see of it: paths, with all links on the way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectEnvironment:
    """What commands on one workspace see besides the system's own programs."""

    places: tuple[str, ...] = (WORKSPACE,)
    """Where they see the workspace; they start at the first."""
    toolchains: tuple[Toolchain, ...] = ()
    refused: tuple[tuple[str, str], ...] = ()
    """Toolchains that are not shown, and why."""
    mounts: tuple[Mount, ...] = ()
    covered: tuple[str, ...] = ()
    """Directories below the mounts that they see empty, as far as they exist."""
    env: Mapping[str, str] = field(default_factory=lambda: CLEAN)

    @property
    def writable(self) -> tuple[str, ...]:
        """Directories outside of the workspace that they can change."""
        return tuple(target for kind, _, target in self.mounts if kind == "write")

    @property
    def exists(self) -> bool:
        """Whether everything that is mounted is still there."""
        return all(os.path.exists(source) for kind, source, _ in self.mounts if kind != "link")


def project_environment(
    settings: SandboxSettings,
    root: Path,
    *,
    store: Path | None = None,
    user: int | None = None,
    environment: Mapping[str, str] = os.environ,
) -> ProjectEnvironment:
    """Return what commands on a workspace see; raise ValueError if a setting cannot be met.

    Args:
        root: The workspace, resolved.
        store: Its store, which stays hidden.
        user: The user that commands run as, if that is not this process's.
        environment: The variables of this process.
    """
    secrets = tuple(os.path.realpath(each) for each in (*our_secrets(), store) if each)
    theirs = [os.fspath(root), *map(os.path.realpath, _paths(settings.write, root))]
    search = _Search(root, secrets, environment, user, theirs)
    if settings.detect and settings.image is None:
        search.look()
    mounts: list[Mount] = []
    if settings.engine != "none":
        shown = [each for toolchain in search.found for each in toolchain.shown]
        for path in (*shown, *_read(settings, root, secrets)):
            mounts += _shown_at(path, "read", search.is_visible)
        for path in _written(settings, root, secrets):
            mounts += _shown_at(path, "write", search.is_visible)
    mounts = _without_nested(mounts)
    binds = [source for kind, source, _ in mounts if kind != "link"]
    covered = [each for each in secrets if any(_is_below(each, bound) for bound in binds)]
    places = [*_paths(settings.path, root), *(p for each in search.found for p in each.path)]
    env = {**CLEAN, "PYTHONDONTWRITEBYTECODE": "1"}  # tests shall leave no byte code behind
    if settings.engine == "none":  # programs work as for the user
        env |= {name: environment[name] for name in ("PATH", "HOME") if environment.get(name)}
    for each in search.found:
        env |= each.env
        if settings.network == "off":
            env |= _OFFLINE.get(each.name, {})
    return ProjectEnvironment(
        places=(os.fspath(root),) if settings.engine in WITHOUT_MOUNTS else _places(root),
        toolchains=tuple(search.found),
        refused=tuple(search.refused),
        mounts=tuple(mounts),
        covered=tuple(covered),
        env=env
        | {"PATH": ":".join(dict.fromkeys([*places, env["PATH"]]))}
        | settings.variables(environment),
    )


_OFFLINE = {
    "Cargo": {"CARGO_NET_OFFLINE": "true"},
    "Go": {"GOPROXY": "off", "GOTOOLCHAIN": "local"},
}


def _places(root: Path) -> tuple[str, ...]:
    """Return where commands see the workspace: at its own path, too, if nothing else is there."""
    place = os.fspath(root)
    others = (*SYSTEM, *_KERNEL, "/etc", "/tmp", "/var/tmp")
    if any(_is_below(each, place) for each in others) or _is_in(place, _KERNEL):
        return (WORKSPACE,)
    # A directory below /workspace would have to be made in the workspace.
    return (place,) if _is_below(place, WORKSPACE) else (place, WORKSPACE)


def _paths(named: Sequence[str], root: Path) -> list[str]:
    return [os.path.normpath(root / os.path.expanduser(each)) for each in named]


def _read(settings: SandboxSettings, root: Path, secrets: Sequence[str]) -> Iterator[str]:
    for path in _existing("read", settings, root):
        real = os.path.realpath(path)
        if _is_in(real, secrets):
            raise ValueError(f"sandbox.read: {path} is WINK's own state")
        for each in ("/usr", "/tmp", *_KERNEL):
            if _is_below(each, real):
                raise ValueError(f"sandbox.read: {path} contains {each}: name what you need in it")
        yield path


def _written(settings: SandboxSettings, root: Path, secrets: Sequence[str]) -> Iterator[str]:
    for path in _existing("write", settings, root):
        real = os.path.realpath(path)
        if not os.path.isdir(real):
            raise ValueError(f"sandbox.write: {path} is not a directory")
        if _is_below(real, os.fspath(root)):
            raise ValueError(f"sandbox.write: {path} is in the workspace, which is writable anyway")
        ours = [*secrets, *(os.fspath(each) for each in (*our_code(), *our_environment()))]
        for each in (*ours, os.fspath(root), os.path.realpath(tempfile.gettempdir())):
            if _is_below(each, real):
                raise ValueError(f"sandbox.write: {path} must not be writable: it contains {each}")
        for each in (*ours, *SYSTEM, *_KERNEL, "/etc"):
            if _is_below(real, each):
                raise ValueError(f"sandbox.write: {path} must not be writable: it is in {each}")
        yield path


def _existing(
    key: Literal["read", "write"], settings: SandboxSettings, root: Path
) -> Iterator[str]:
    # Commands could make a link in there lead to anything, and the next run would show that.
    theirs = [os.fspath(root), *map(os.path.realpath, _paths(settings.write, root))]
    for path in _paths(getattr(settings, key), root):
        if not os.path.exists(path):
            raise ValueError(f"sandbox.{key}: there is no {path}")
        for link, _ in _links_on(path):
            if _is_in(link, theirs):
                raise ValueError(
                    f"sandbox.{key}: {path} leads through {link}, a link that commands can change: "
                    "name the directory that it leads to"
                )
        yield path


def _without_nested(mounts: Sequence[Mount]) -> list[Mount]:
    """Return mounts without those that other mounts include.

    A command that can write to a directory could replace what is below it by a link to anything:
    nothing there may be mounted once more.
    """
    kept: dict[str, Mount] = {}
    # What contains others comes first, and at the same path what can be written.
    for mount in sorted(mounts, key=lambda mount: (mount[2].count("/"), mount[0] != "write")):
        covering = ("write",) if mount[0] == "write" else ("read", "write")
        others = [target for kind, _, target in kept.values() if kind in covering]
        if not _is_in(mount[2], others):
            kept[mount[2]] = mount
    return list(kept.values())


def _is_below(path: str, directory: str) -> bool:
    """Tell whether a path is a directory, or below it."""
    return path == directory or path.startswith(directory.rstrip("/") + "/")


def _is_in(path: str, directories: Sequence[str]) -> bool:
    return any(_is_below(path, each) for each in directories)


def _shown_at(
    path: str, kind: Literal["read", "write"], is_visible: Callable[[str], bool]
) -> Iterator[Mount]:
    """Yield the mounts that show a file or directory at its path: it, and the links on the way."""
    for link, text in _links_on(path):
        if not is_visible(link):
            yield "link", text, link
    real = os.path.realpath(path)
    if not is_visible(real):
        yield kind, real, real


def _links_on(path: str) -> Iterator[tuple[str, str]]:
    """Yield the symbolic links that lead to a path, and their texts."""
    done, todo, links = "/", [name for name in reversed(path.split("/")) if name], 0
    while todo and links < MAX_LINKS:
        name = todo.pop()
        here = os.path.dirname(done) if name == ".." else os.path.join(done, name)
        if name != ".." and os.path.islink(here):
            text = os.readlink(here)
            yield here, text
            links += 1
            todo += [each for each in reversed(text.split("/")) if each not in ("", ".")]
            done = "/" if text.startswith("/") else done
        else:
            done = here


# Detection


class _Search:
    """Finds the toolchains of a workspace."""

    def __init__(
        self,
        root: Path,
        secrets: Sequence[str],
        environment: Mapping[str, str],
        user: int | None,
        theirs: Sequence[str],
    ) -> None:
        self.root = os.fspath(root)
        self._theirs = theirs
        """Directories that commands can write to: what is there does not decide what they see."""
        self.found: list[Toolchain] = []
        self.refused: list[tuple[str, str]] = []
        self._environment = environment
        self._home = environment.get("HOME") or os.path.expanduser("~")
        self._apart = {self.root, os.path.realpath(self._home), *secrets}
        self._secrets = secrets
        self._user = user

    def look(self) -> None:
        """Find all toolchains; one that cannot be read is not found."""
        for find in (self._python, self._node, self._cargo, self._go):
            with suppress(OSError):
                find()

    def is_visible(self, path: str) -> bool:
        """Tell whether commands see a path without a mount of its own."""
        return _is_in(path, (*SYSTEM, "/etc/alternatives", self.root))

    def _add(
        self,
        name: str,
        place: str,
        source: str,
        *problems: str | None,
        path: str = "",
        env: Mapping[str, str] | None = None,
        shown: Sequence[str] | None = None,
    ) -> bool:
        """Add a toolchain and return True, unless there is a problem with it.

        By default its programs are in ``bin``, and its own parts are shown.
        """
        for problem in filter(None, problems):
            self.refused.append((place, problem))
            return False
        found = Toolchain(
            name=name,
            place=place,
            source=source,
            path=(path or f"{place}/bin",),
            env=env or {},
            shown=tuple(_parts(place) if shown is None else shown),
        )
        self.found.append(found)
        return True

    def _variable(self, name: str, default: str) -> str:
        return self._environment.get(name) or os.path.join(self._home, default)

    def _which(self, program: str) -> str | None:
        """Return a program that the user has, and no project."""
        return find_program(program, safe_path(self._environment.get("PATH", PATH)))

    # What may be shown

    def _problem(self, directory: str) -> str | None:
        """Return why a directory that is said to be a toolchain is not shown, if it is not."""
        real = os.path.realpath(directory)
        if self.is_visible(real):
            return None
        for each in self._apart:
            if _is_below(each, real):
                return f"it contains {each}"
        if _is_in(real, (*self._secrets, *_KERNEL, "/etc")):
            return "it is not a directory of programs"
        if any(os.path.lexists(os.path.join(real, name)) for name in _PERSONAL):
            return "it looks like a home directory"
        if self._user is not None and not _is_open_to(real, self._user):
            return "the owner of the workspace cannot read it"
        return None

    def _python_problem(self, prefix: str) -> str | None:
        """Return why the directory of an interpreter is not shown, if it is not."""
        if self.is_visible(os.path.realpath(prefix)):
            return None
        if not _has_python(prefix):
            return "it has no Python interpreter with its library"
        return self._problem(prefix)

    # What a project names

    def _is_theirs(self, path: str) -> bool:
        """Tell whether a path is where commands can write, or leads through a link there."""
        links = [link for link, _ in _links_on(path)]
        return any(_is_in(each, self._theirs) for each in (path, os.path.realpath(path), *links))

    def _link_problem(self, place: str) -> str | None:
        """Return why an environment that is not where it seems to be is not shown."""
        real = os.path.realpath(place)
        if self.is_visible(real) or _is_in(real, self._theirs) or not self._is_theirs(place):
            return None
        if _is_in(os.path.dirname(real), self._usual_places()):
            return None
        return f"it leads to {real}, which is not in the workspace: add that to `read` and `path`"

    def _is_usual_interpreter(self, prefix: str) -> bool:
        """Tell whether a directory is where interpreters are, or is nothing but an interpreter."""
        if self.is_visible(prefix) or _is_in(os.path.dirname(prefix), self._usual_places()):
            return True
        ours = map(os.fspath, our_environment())
        return prefix in ours or bool(
            _VERSION.fullmatch(os.path.basename(prefix)) and _is_pure(prefix)
        )

    def _usual_places(self) -> list[str]:
        """Return where interpreters and environments are kept for all projects of a user."""
        data = self._variable("XDG_DATA_HOME", ".local/share")
        cache = self._variable("XDG_CACHE_HOME", ".cache")
        conda = [self._environment.get(name, "") for name in ("CONDA_EXE", "MAMBA_ROOT_PREFIX")]
        places = [
            f"{self._variable('PYENV_ROOT', '.pyenv')}/versions",
            self._variable("UV_PYTHON_INSTALL_DIR", f"{data}/uv/python"),
            f"{self._variable('ASDF_DATA_DIR', '.asdf')}/installs/python",
            *(f"{data}/{each}" for each in ("mise/installs/python", "virtualenvs", "pdm/venvs")),
            f"{data}/hatch/env/virtual",
            f"{self._home}/.rye/py",
            self._variable("WORKON_HOME", ".virtualenvs"),
            f"{cache}/pypoetry/virtualenvs",
            *(f"{os.path.dirname(os.path.dirname(conda[0]))}/envs" for _ in conda[:1] if conda[0]),
            *(f"{conda[1]}/envs" for _ in conda[1:] if conda[1]),
            *(f"{self._home}/{each}/envs" for each in _CONDA),
            "/opt",
            "/nix/store",
            "/home/linuxbrew/.linuxbrew",
        ]
        return [os.path.realpath(each) for each in places]

    # Python

    def _python(self) -> None:
        for source, place in self._environments():
            if _is_conda(place):
                problem = self._python_problem(place)
                env = {"CONDA_PREFIX": place, "CONDA_DEFAULT_ENV": os.path.basename(place)}
                name, shown = "conda", _parts(place)
            else:
                name, env = "virtual environment", {"VIRTUAL_ENV": place}
                problem, shown = self._venv(place)
            problem = problem or self._link_problem(place)
            if self._add(name, place, source, problem, env=env, shown=shown):
                return
        for source, prefix in self._interpreters():
            if self._add("Python", prefix, source, self._python_problem(prefix)):
                return

    def _environments(self) -> Iterator[tuple[str, str]]:
        """Yield the active environment, unless it is ours, and those in the workspace."""
        variables = ("VIRTUAL_ENV", "CONDA_PREFIX")
        active = [(name, self._environment.get(name, "").rstrip("/")) for name in variables]
        active = [(name, place) for name, place in active if os.path.isabs(place)]
        own = [each for each in active if Path(os.path.realpath(each[1])) in our_environment()]
        yield from (each for each in active if each not in own)
        local = [(name, os.path.join(self.root, name)) for name in (".venv", "venv", "env")]
        for source, place in (*local, *self._pyenv()):
            if os.path.lexists(f"{place}/pyvenv.cfg") or _is_conda(place):
                yield source, place
        yield from own  # the project may be installed beside us

    def _venv(self, place: str) -> tuple[str | None, list[str]]:
        """Return why a virtual environment is not shown, or what to show of it."""
        if not os.path.isdir(place):
            return "it does not exist: is it still active?", []
        program = os.path.join(place, "bin", "python")
        home = _home_of(f"{place}/pyvenv.cfg")
        if home is None or not os.path.lexists(program):
            return "it is not a virtual environment", []
        problem = self._problem(place)
        bases = {os.path.dirname(os.path.realpath(program)), os.path.realpath(home)}
        bases -= {f"{os.path.realpath(place)}/bin"}  # a copy of the interpreter
        by_project = self._is_theirs(f"{place}/pyvenv.cfg") or self._is_theirs(program)
        shown = _parts(place)
        for base in sorted(bases):
            prefix = os.path.dirname(base)
            if problem is None and not os.path.isdir(base):
                problem = f"its interpreter is gone from {base}: make the environment again"
            if problem is None and (why := self._python_problem(prefix)):
                problem = f"its interpreter is in {prefix}: {why}"
            if problem is None and os.path.basename(base) != "bin":
                problem = f"its interpreter is in {base}, which is not a directory of programs"
            if problem is None and by_project and not self._is_usual_interpreter(prefix):
                problem = f"its interpreter is in {prefix}, {_UNUSUAL}"
            shown += _parts(prefix)
        return problem, [*shown, program, home]

    def _interpreters(self) -> Iterator[tuple[str, str]]:
        """Yield the prefixes of interpreters outside of environments, and how they were found."""
        yield from self._pyenv()
        program = self._which("python3")
        prefix = os.path.dirname(os.path.dirname(os.path.realpath(program or "/")))
        if _has_python(prefix) and not self.is_visible(prefix):
            yield "PATH", prefix

    def _pyenv(self) -> Iterator[tuple[str, str]]:
        """Yield the versions of pyenv that are chosen."""
        pyenv = self._variable("PYENV_ROOT", ".pyenv")
        for source, text in (
            ("PYENV_VERSION", self._environment.get("PYENV_VERSION", "")),
            (".python-version", _small_text(f"{self.root}/.python-version")),
            ("pyenv", _small_text(f"{pyenv}/version")),
        ):
            for version in re.findall(r"^[\w.+-]+", text, re.MULTILINE)[:1]:
                if found := _newest(f"{pyenv}/versions", version):
                    yield source, found

    # Others

    def _node(self) -> None:
        packages = f"{self.root}/node_modules"
        if os.path.isdir(f"{packages}/.bin"):
            self._add("Node packages", packages, "PATH", path=f"{packages}/.bin", shown=())
        program = self._which("node")
        volta = self._variable("VOLTA_HOME", ".volta")
        nvm = self._variable("NVM_DIR", ".nvm")
        source, prefix = "PATH", None
        if program is not None and os.path.basename(os.path.realpath(program)) == "volta-shim":
            chosen = _small_text(f"{volta}/tools/user/platform.json")
            version = re.search(r'"runtime"\s*:\s*"([\d.]+)"', chosen)
            images = f"{volta}/tools/image/node"
            source, prefix = "volta", _newest(images, version[1] if version else "")
        elif program is not None:
            prefix = os.path.dirname(os.path.dirname(os.path.realpath(program)))
        elif os.path.isdir(f"{nvm}/versions/node"):
            version = _small_text(f"{self.root}/.nvmrc").strip().removeprefix("v")
            versions = f"{nvm}/versions/node"
            source, prefix = "nvm", _newest(versions, f"v{version}") or _newest(versions, "v")
        if prefix is None or self.is_visible(prefix):
            return
        problem = self._problem(prefix)
        if not _is_program(f"{prefix}/bin/node") or not os.path.isdir(f"{prefix}/lib/node_modules"):
            problem = "it is not an installation of Node: add it to `read` and `path`"
        self._add("Node", prefix, source, problem)

    def _cargo(self) -> None:
        cargo = self._variable("CARGO_HOME", ".cargo")
        rustup = self._variable("RUSTUP_HOME", ".rustup")
        if not os.path.exists(f"{cargo}/bin/cargo") and self._which("cargo") is None:
            return
        # Not credentials.toml and config.toml, which have the user's tokens.
        shown = [f"{cargo}/{each}" for each in ("bin", "registry", "git")]
        shown = [each for each in (*shown, rustup) if os.path.isdir(each)]
        env = {"CARGO_HOME": cargo, "RUSTUP_HOME": rustup}
        self._add("Cargo", cargo, "CARGO_HOME", *map(self._problem, shown), env=env, shown=shown)

    def _go(self) -> None:
        program = self._which("go")
        if program is None:
            return
        prefix = os.path.dirname(os.path.dirname(os.path.realpath(program)))
        problem = None
        if not self.is_visible(prefix) and not os.path.isfile(f"{prefix}/VERSION"):
            problem = "it is not an installation of Go: add it to `read` and `path`"
        path = self._variable("GOPATH", "go").partition(os.pathsep)[0]
        modules = self._environment.get("GOMODCACHE") or f"{path}/pkg/mod"
        shown = [each for each in (prefix, modules) if os.path.isdir(each)]
        env = {"GOMODCACHE": modules} if modules in shown else {}
        problems = (problem, *map(self._problem, shown))
        self._add("Go", prefix, "PATH", *problems, env=env, shown=shown)


_CONDA = (".conda", "anaconda3", "mambaforge", "micromamba", "miniconda3", "miniforge3")
_UNUSUAL = "where no interpreters are kept: add that to `read`, and its programs to `path`"


def _parts(place: str) -> list[str]:
    """Return what commands see of an environment or interpreter: its own parts."""
    if _is_pure(place):
        return [place]
    real = os.path.realpath(place)
    with suppress(OSError):
        names = sorted(filter(_PARTS.fullmatch, os.listdir(real)))
        # A part that is a link leads nowhere else.
        within = [n for n in names if _is_below(os.path.realpath(f"{real}/{n}"), real)]
        return [os.path.join(place, name) for name in within]
    return []


def _is_pure(place: str) -> bool:
    """Tell whether an environment or interpreter has its directory for itself."""
    try:
        with os.scandir(place) as entries:
            return all(
                _BESIDE.fullmatch(each.name)
                if not _PARTS.fullmatch(each.name)
                else _is_below(os.path.realpath(each.path), os.path.realpath(place))
                for each in entries
            )
    except OSError:
        return False


def _is_conda(place: str) -> bool:
    return os.path.isdir(f"{place}/conda-meta")


def _has_python(prefix: str) -> bool:
    """Tell whether a directory has an interpreter and the library of the same version."""
    with suppress(OSError):
        for name in os.listdir(f"{prefix}/lib"):
            if re.fullmatch(r"(python|pypy)\d\.\d+t?", name):
                has_library = os.path.isfile(f"{prefix}/lib/{name}/os.py")
                if has_library and _is_program(f"{prefix}/bin/{name.rstrip('t')}"):
                    return True
    return False


def _is_program(path: str) -> bool:
    """Tell whether a path is a program for this machine, not a script."""
    with suppress(OSError):
        if stat.S_ISREG(os.stat(path).st_mode) and os.access(path, os.X_OK):
            with open(path, "rb") as file:
                return file.read(4) == b"\x7fELF"
    return False


def _home_of(config: str) -> str | None:
    """Return the directory of the interpreter that a ``pyvenv.cfg`` names."""
    for line in _small_text(config).splitlines():
        key, equals, value = line.partition("=")
        if equals and key.strip().lower() == "home" and os.path.isabs(value.strip()):
            return os.path.normpath(value.strip())
    return None


def _small_text(path: str) -> str:
    """Return the text of a file; of nothing else, such as a pipe, and not of a large one."""
    with suppress(OSError):
        status = os.stat(path)
        # The kernel's own files, which a link may lead to, have no size; reading some never ends.
        if stat.S_ISREG(status.st_mode) and 0 < status.st_size < 1 << 16:
            return Path(path).read_text(errors="replace")
    return ""


def _newest(directory: str, version: str) -> str | None:
    """Return the newest of the versions in a directory that begin with the named one."""
    start = f"{version}." if version[-1:].isdigit() else version
    with suppress(OSError):
        found = [name for name in os.listdir(directory) if f"{name}.".startswith(start)]
        if found:
            newest = max(found, key=lambda name: [int(n) for n in re.findall(r"\d+", name)])
            return os.path.join(directory, newest)
    return None


def _is_open_to(path: str, user: int) -> bool:
    """Tell whether a user can reach a directory and list it."""
    for each, needed in ((path, 0o5), *((str(above), 0o1) for above in Path(path).parents)):
        status = os.stat(each)
        mode = status.st_mode >> 6 if status.st_uid == user else status.st_mode
        if mode & needed != needed:
            return False
    return True
