"""Find the programs that we start outside of a sandbox: never one that an agent can have written.

An agent may write to its workspace, to the environment of a project, and to the directories that
its sandbox lets it change. One of these is often in ``PATH``, as when a virtual environment is
active: a ``git`` planted there would run outside of every sandbox. So each program is found here,
at an absolute path that leads through none of these places, and gets an environment that names none
of them.
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
import stat
import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache

from weakincentives.core.clock import SYSTEM_CLOCK
from weakincentives.core.logs import get_logger
from weakincentives.core.state import (
    is_noted_writable,
    module_path,
    note_writable,
    our_code,
    our_environment,
    workspace_store,
)
from weakincentives.errors import StateUnavailable

SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""Where the system's own programs are."""

_ENVIRONMENTS = (".venv", "venv", "env", ".env")
"""What the Python environment of a project is called."""
_MAX_LINKS = 40
_LISTS = re.compile(r"PATH|PYTHONPATH|NODE_PATH|PERL5LIB|RUBYLIB|(LD|DYLD)_[A-Z_]*(PATH|LIBRARIES)")
"""Variables with a list of directories that programs load code from."""
_COMMANDS = ("BROWSER", "EDITOR", "VISUAL")
"""Variables with commands, or a list of them; they are for the programs that ask people."""
# Variables that name code to run, or options that do; a program of ours needs none of them.
_CODE = re.compile(
    r"GIT_.*|(LD|DYLD)_.*|PYTHON(STARTUP|HOME|USERBASE|INSPECT|BREAKPOINT|PLATLIBDIR|EXECUTABLE)"
    r"|NODE_(OPTIONS|REPL_EXTERNAL_MODULE)|RIPGREP_CONFIG_PATH|BASH_ENV|BASH_FUNC_.*|ENV|PERL5(OPT|DB)"
    r"|RUBYOPT|JAVA_TOOL_OPTIONS|_JAVA_OPTIONS|JDK_JAVA_OPTIONS|SSH_ASKPASS|LESS(OPEN|CLOSE)?|MANPAGER"
    r"|PAGER|GCONV_PATH|CHROMIUM_(USER_)?FLAGS|CHROME_WRAPPER"
)

_logger = get_logger(__name__)
_LASTS = 10.0
"""Seconds in which another process's new workspace may not be noticed."""
_OPENS_WITHIN = 10.0
"""Seconds; a browser that takes longer has opened the page, and stays in the foreground."""
_writable: set[str] = set()
_mounted: dict[tuple[int, int] | None, str] = {}
"""The same directories by what tells them from others, wherever they are mounted."""
_told: set[str] = set()


def agents_can_write(directory: str | os.PathLike[str], *, for_all: bool = True) -> None:
    """Note a directory that agents can change: from now on no program in it is started.

    Args:
        for_all: By no other process of this user either. A workspace with its store in the usual
            place need not be noted for them: it is recognised by that.
    """
    place = os.path.realpath(directory)
    if for_all and not is_noted_writable(place):
        note_writable(place)
    _writable.add(place)
    _mounted[_identity(place)] = place


def find_program(name: str, path: str | None = None) -> str | None:
    """Return the absolute path of a program that no agent can have written; None without one.

    A program in the reach of agents is passed over with a warning; ``missing_program`` says why.

    Args:
        name: Its name, or an absolute path.
        path: Where to look, in this order; default: ``PATH`` of this process, our own environment
            last. If that is in a workspace, it is protected, but it may have been prepared.
    """
    own: str | None = None
    for found in _candidates(name, path):
        why = _why_not(found, path)
        if why is None:
            if path is not None or _why_not(found, path, ours=False) is None:
                return found
            own = own or found
        elif found not in _told:
            _told.add(found)
            _logger.warning("%s is not used: %s", found, why)
    return own


def missing_program(name: str, path: str | None = None) -> str:
    """Return why a program was not found, and what to do."""
    for found in _candidates(name, path):
        if why := _why_not(found, path):
            return f"{found} is not used: {why}. Install {os.path.basename(name)} elsewhere"
    if os.path.dirname(name) and not os.path.isabs(name):
        return f"{name} is not used: its path depends on the current directory. Give the full path"
    return f"there is no program {name}" if os.path.dirname(name) else f"{name} is not installed"


def safe_path(path: str | None = None) -> str:
    """Return the directories of a list that no agent can write to.

    The default is ``PATH`` of this process, without our own environment if that is a project's.
    """
    if path is None:
        return _safe(os.environ.get("PATH", os.defpath), ours=False)
    return _safe(path)


def _safe(path: str, *, ours: bool = True) -> str:
    places = dict.fromkeys(filter(os.path.isabs, path.split(os.pathsep)))
    return os.pathsep.join(each for each in places if reach_of_agents(each, ours=ours) is None)


@contextmanager
def loading() -> Generator[None]:
    """Load packages of others in the block: some start a program by its name, then or later."""
    import platform

    before = os.environ.get("PATH")
    os.environ["PATH"] = safe_path()
    try:
        # Clients of models tell it to their servers. Python asks a program for it, once.
        _ = platform.uname().processor
        yield
    finally:
        if before is None:
            del os.environ["PATH"]
        else:
            os.environ["PATH"] = before


def safe_environment(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables of this process without those that make a program run another one."""
    given = os.environ if environment is None else environment
    found: dict[str, str] = {}
    for name, value in given.items():
        if _LISTS.fullmatch(name):
            found[name] = _safe(value, ours=name != "PATH")
        elif name in _COMMANDS:
            if all(map(_is_safe, value.split(os.pathsep))):
                found[name] = value
        elif not _CODE.fullmatch(name) and not _leads_to_agents(value):
            found[name] = value
    return found


def _leads_to_agents(value: str) -> bool:
    """Tell whether a variable names what an agent can write: settings or plug-ins, perhaps."""
    named = filter(os.path.isabs, value.split(os.pathsep))
    return any(reach_of_agents(each) for each in named if not _is_socket(each))


def _is_socket(path: str) -> bool:
    with suppress(OSError):
        return stat.S_ISSOCK(os.stat(path).st_mode)
    return False


def _is_safe(command: str) -> bool:
    with suppress(ValueError):  # a quote is not closed
        return all(find_program(word) for word in shlex.split(command)[:1])
    return False


def open_link(link: str) -> bool:
    """Open the address of a page in the person's browser; return whether there is one.

    Another process looks for it, since the standard library would take a planted one.
    """
    import subprocess

    if not link.startswith(("https://", "http://")):  # other schemes start other programs
        return False
    program = "import sys, webbrowser; sys.exit(not webbrowser.open(sys.argv[1]))"
    argv = [sys.executable, "-I", "-c", program, link]
    opened = subprocess.Popen(argv, cwd="/", env=safe_environment(), stderr=subprocess.DEVNULL)
    try:
        return opened.wait(_OPENS_WITHIN) == 0
    except subprocess.TimeoutExpired:
        return True


def reach_of_agents(path: str, *, ours: bool = True, environments: bool = True) -> str | None:
    """Return why an agent may have written what is at an absolute path, or None if it cannot.

    Every link on the way counts with the directory that it is in, and so does where it leads to.

    Args:
        ours: Whether our own installation is out of reach, wherever it is.
        environments: Whether every environment of a project counts, no agent having worked there.
    """
    until = int(SYSTEM_CLOCK.monotonic() / _LASTS)
    state = len(_writable), _active(), ours, environments, until
    for step in _steps(path):
        if why := _why_writable(step, state):
            return why
    return None


def drop_planted_modules() -> None:
    """Look for modules only where no agent can have written any: see ``state.module_path``.

    An editable install puts a project's directory on the path, and so does ``PYTHONPATH``. A module
    there would be loaded in place of one that is not installed. The environment of a project that
    is on the path is the one that we run in.
    """
    module_path()  # as it was
    sys.path[:] = [
        each
        for each in sys.path
        if reach_of_agents(os.path.abspath(each), environments=False) is None
    ]


def script_in_reach(program: str, arguments: Sequence[str], directory: str) -> str | None:
    """Return why not to run what a program gets as arguments: a script, a program, a project.

    Args:
        directory: Where the program starts.
    """
    name = os.path.basename(program)
    if name in _RUNNERS and (why := reach_of_agents(directory)):
        return f"{name} first looks for code in {directory}, and {why}. Start it elsewhere: cwd=..."
    is_interpreter = _INTERPRETERS.fullmatch(name) is not None
    is_to_come = is_interpreter or name in _RUNNERS
    for option, argument in zip(["", *arguments], arguments, strict=False):
        is_said = is_interpreter and re.fullmatch("-[a-z]*c", option)
        for before, text in _paths_said(argument) if is_said else _paths_in(option, argument):
            path = os.path.join(directory, text)
            if os.path.isdir(path):
                is_ours = before in (_OPTIONS if is_to_come else _OF_PROJECTS)
                is_run = is_ours or (is_to_come and before == "")
            else:
                is_code = is_to_come or _CODE_FILE(path) or os.access(path, os.X_OK)
                is_run = os.path.isfile(path) and is_code
            if text and is_run and (why := reach_of_agents(path)):
                return f"{path} is not run: {why}. Move it elsewhere"
        if is_said or argument == "-m":
            is_interpreter = is_to_come = False  # what follows is for the code, or for the module
        elif not argument.startswith("-") and option not in _OPTIONS and argument != "run":
            is_to_come = False  # what follows is for the script, or for the package
    return None


_INTERPRETERS = re.compile(r"(python|pypy)[\d.]*t?|node|nodejs|bun|deno|ruby|perl|[a-z]*sh")
_RUNNERS = {
    *("bun", "bunx", "cargo", "deno", "go", "hatch", "make", "npm", "npx", "pdm", "pipx", "pnpm"),
    *("pnpx", "poetry", "rye", "uv", "uvx", "yarn"),
}
"""Programs that run what the directory they are started in has or says."""
_OF_PROJECTS = {
    *("--directory", "--project", "--from", "--with-editable", "--prefix", "-C", "cd"),
    *("--app-dir", "--chdir", "--class-path", "-classpath", "-cp"),
}
"""Options of uv, npm, Poetry and others with a project whose code they run."""
_OPTIONS = _OF_PROJECTS | {
    *("--cwd", "--dir", "--import", "--loader", "--manifest-path", "--package", "--python"),
    *("--require", "--spec", "--with", "--with-requirements", "-I", "-W", "-X", "-p", "-r"),
}
"""Options of interpreters and runners with a value, which may be code."""
_CODE_FILE = re.compile(
    r".*\.([cm]?[jt]sx?|pyw?|pyz|rb|pl|php|lua|[a-z]*sh|jar|go|rs|kts|jl|whl|dll|wasm)"
    r"|.*/(Makefile|Cargo\.toml|pyproject\.toml|package\.json|(docker-)?compose\.ya?ml)",
    re.IGNORECASE,
).fullmatch
_NAMED = re.compile(
    r"(?:(?P<option>--?[\w-]+)=|(?P<short>-\w)(?=/)|[^/]*@\s*)?(?P<rest>.*)", re.DOTALL
)
_PATH = re.compile(r"(?:file:(?://)?)?(?P<path>[^:]*)(?::[\w.]+)?", re.DOTALL)


def _paths_in(option: str, argument: str) -> Iterator[tuple[str, str]]:
    """Yield what may be a path in an argument, with the option it is for; "" without one.

    So can ``--option=path``, ``-Ipath``, ``name @ file://path`` and ``path:app`` be.
    """
    if option.startswith("-") and option in _OPTIONS:
        yield option, argument
    named = _NAMED.fullmatch(argument)
    if named is not None:
        option = named["option"] or named["short"] or (option if option in _OPTIONS else "")
        yield option, named["rest"]
        if path := _PATH.fullmatch(named["rest"]):
            yield option, path["path"]


def _paths_said(commands: str) -> Iterator[tuple[str, str]]:
    """Yield the words of a text for a shell, each with the one before it."""
    words = ["-", *re.split(r"[\s;&|()<>\"']+", commands)]
    yield from itertools.pairwise(words)


def _candidates(name: str, path: str | None) -> Iterator[str]:
    if os.path.dirname(name):
        if os.path.isabs(name) and _is_program(name):
            yield name
        return
    given = os.environ.get("PATH", os.defpath) if path is None else path
    for place in dict.fromkeys(given.split(os.pathsep)):
        # An empty or relative entry depends on the current directory, which may be the workspace.
        if os.path.isabs(place):
            names = (os.path.join(place, name + suffix) for suffix in _SUFFIXES)
            yield from filter(_is_program, names)


_SUFFIXES = os.environ.get("PATHEXT", ".EXE").split(os.pathsep) if os.name == "nt" else [""]


def _is_program(path: str) -> bool:
    return os.path.isfile(path) and os.access(path, os.X_OK)


def _why_not(program: str, path: str | None, *, ours: bool = True) -> str | None:
    """Return why a program is not used: it, or the interpreter of a script, is in reach."""
    if why := reach_of_agents(program, ours=ours):
        return why
    with suppress(OSError), open(program, "rb") as file:
        start = file.read(256).partition(b"\n")[0]
        words = os.fsdecode(start[2:]).split() if start.startswith(b"#!") else []
        if words and not os.path.isabs(words[0]):
            return "it is a script whose interpreter depends on the current directory"
        if words and os.path.basename(words[0]) == "env":
            named = [word for word in words[1:] if not word.startswith("-") and "=" not in word]
            # It searches the PATH that we give it, and takes the first.
            words += [first for n in named[:1] for first in [*_candidates(n, safe_path(path))][:1]]
        for word in filter(os.path.isabs, words):
            if why := reach_of_agents(word):
                return f"it is run by {word}, and {why}"
    return None


def _steps(path: str) -> Iterator[str]:
    """Yield what an absolute path leads through: each link, where it is, and the end."""
    if os.name == "nt":
        yield from (path, os.path.realpath(path))
        return
    done, links = "/", 0
    todo = [name for name in reversed(path.split("/")) if name not in ("", ".")]
    while todo:
        name = todo.pop()
        here = os.path.dirname(done) if name == ".." else os.path.join(done, name)
        if name != ".." and links < _MAX_LINKS and os.path.islink(here):
            links += 1
            yield here
            text = os.readlink(here)
            todo += [each for each in reversed(text.split("/")) if each not in ("", ".")]
            done = "/" if text.startswith("/") else done
        else:
            done = here
    yield done


@lru_cache(maxsize=1024)
def _why_writable(path: str, state: tuple[int, frozenset[str], bool, bool, int]) -> str | None:
    """Return why agents can write to a path; the directories on the way are no links.

    Args:
        state: What the answer depends on besides the disk, and the time until it is asked again.
    """
    _, active, ours, environments, _ = state
    if _is_open(path):
        return f"everybody can write to {path}"
    above, below = path, ""
    while True:
        if above in _writable or _is_mounted_writable(above) or _is_known(above):
            if not (ours and _is_ours(path, above)):
                return f"agents can write to {above}"
        elif (
            environments
            and (above in active or _is_environment(above))
            and not (ours and _is_ours(path, above))
        ):
            return f"{above} is the environment of a project, which agents may change"
        if below and _is_open(above, below):
            return f"everybody can write to {above}"
        below, above = above, os.path.dirname(above)
        if above == below:
            return None


def _is_mounted_writable(directory: str) -> bool:
    """Tell whether a directory that agents can write to is mounted in this place, too."""
    identity = _identity(directory)
    place = _mounted.get(identity) if identity is not None else None
    return place is not None and _identity(place) == identity  # else it is gone


def _identity(directory: str) -> tuple[int, int] | None:
    with suppress(OSError):
        status = os.stat(directory)
        return status.st_dev, status.st_ino
    return None


def _is_known(directory: str) -> bool:
    """Tell whether a run has ever worked on a directory, or its commands could write to it."""
    with suppress(StateUnavailable):
        return is_noted_writable(directory) or os.path.isdir(workspace_store(directory))
    return False


def _is_ours(path: str, above: str) -> bool:
    """Tell whether a path in a directory is a part of our own installation, which is protected."""
    for ours in map(os.fspath, (*our_code(), *our_environment())):
        if _is_in(path, ours) and _is_in(ours, above):
            return True
    # The directory is inside of our code, and so all of it is.
    return any(_is_in(above, os.fspath(each)) for each in our_code())


def _is_in(path: str, directory: str) -> bool:
    return path == directory or path.startswith(directory.rstrip(os.path.sep) + os.path.sep)


def _active() -> frozenset[str]:
    """Return the environments that are active in this process."""
    named = (os.environ.get(name, "") for name in ("VIRTUAL_ENV", "CONDA_PREFIX"))
    found = set[str]()
    for each in filter(os.path.isabs, named):
        with suppress(OSError):  # a link that cannot be read: nothing is found there either
            found.add(os.path.realpath(each))
    return frozenset(found)


def _is_environment(directory: str) -> bool:
    """Tell whether a directory is the environment of a project, by its name and its parts."""
    name = os.path.basename(directory)
    if name == "node_modules":
        return os.path.exists(os.path.join(os.path.dirname(directory), "package.json"))
    parts = ("pyvenv.cfg", "conda-meta") if name in _ENVIRONMENTS else ()
    return any(os.path.exists(os.path.join(directory, each)) for each in parts)


def _is_open(path: str, entry: str = "") -> bool:
    """Tell whether every user of this machine can replace what is at a path, or an entry of it."""
    if os.name == "nt":
        return False
    with suppress(OSError):
        status = os.lstat(path)
        if stat.S_ISLNK(status.st_mode) or not status.st_mode & stat.S_IWOTH:
            return False
        if entry and status.st_mode & stat.S_ISVTX:  # only its owner can replace an entry
            return os.lstat(entry).st_uid not in (0, os.geteuid())
        return True
    return False
