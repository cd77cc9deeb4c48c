"""Runs Python as a user with no special rights, wherever the tests were cloned.

Others cannot enter root's home, nor read a clone made under `umask 077`. The user then gets a copy
of the package, of what it depends on, and of the tests.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import weakincentives

NOBODY = 65534
ROOT = Path(__file__).parents[1]
NEEDED = ("wink-runtime[asteval,cli,files]", "hypothesis", "pyte", "pytest", "sybil")
"""What tests that run as another user import."""


@dataclass(frozen=True)
class OrdinaryUser:
    """A user who may do nothing special, and a Python that this user can run."""

    python: str
    path: str
    """The PYTHONPATH with this package and what it needs."""
    clone: Path
    """A directory with `tests/` that the user can enter."""

    def run(
        self,
        *arguments: str,
        home: Path,
        cwd: str | Path = "/",
        stdin: str = "",
        within: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        uid: int = NOBODY,
    ) -> subprocess.CompletedProcess[str]:
        """Run Python and return what it printed; ``within`` is a command of root's around it."""
        become = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--"]
        # What setpriv itself starts may lie where only root can go; what a shell starts may not.
        become += ["sh", "-c", 'exec "$@"', "sh"]
        return subprocess.run(
            [*within, *become, self.python, *arguments],
            input=stdin,
            capture_output=True,
            encoding="utf-8",
            cwd=cwd,
            env={
                "PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
                "HOME": str(home),
                "LANG": "C.UTF-8",
                "PYTHONPATH": self.path,
                **(env or {}),
            },
            check=False,
        )


@contextmanager
def place_for_others(uid: int = NOBODY) -> Iterator[Path]:
    """Yield a new directory that is the user's, below directories that everybody can enter."""
    for parent in (tempfile.gettempdir(), "/tmp", "/var/tmp"):
        if all(each.stat().st_mode & 0o001 for each in [Path(parent), *Path(parent).parents]):
            break
    else:
        pytest.skip("no temporary directory that another user can enter")
    place = Path(tempfile.mkdtemp(prefix="wink-test-", dir=parent))
    try:
        os.chmod(place, 0o755)
        os.chown(place, uid, uid)
        yield place
    finally:
        subprocess.run(["rm", "-rf", str(place)], check=True)


@contextmanager
def found_ordinary_user() -> Iterator[OrdinaryUser]:
    """Yield a user who can run this package; skips the test where that cannot be."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("needs root, to become another user, and setpriv")
    with place_for_others() as place:
        source = Path(weakincentives.__file__).parents[1]
        installed = Path(str(metadata.distribution("pytest").locate_file("")))
        here = f"{source}{os.pathsep}{installed}"
        users = [OrdinaryUser(python, here, ROOT) for python in _pythons()]
        user = next((each for each in users if not _problem(each, place)), None)
        if user is None:
            _copy_for_others(source, place)
            users = [OrdinaryUser(p, str(place / "packages"), place / "clone") for p in _pythons()]
            user = next((each for each in users if not _problem(each, place)), None)
        if user is None:
            problem = _problem(users[-1], place)
            pytest.skip(f"no Python here that another user can run: {problem}")
        yield user


def _pythons() -> Iterator[str]:
    """Yield what may be this version of Python: packages with compiled parts need the same."""
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    places = [sys.executable, os.path.realpath(sys.executable)]
    places += [f"/usr/local/bin/{name}", f"/usr/bin/{name}"]
    yield from dict.fromkeys(each for each in places if os.path.exists(each))


def _problem(user: OrdinaryUser, home: Path) -> str:
    """Return why the user cannot use the package from that place; empty if they can."""
    program = (
        "import sys, asteval, pytest, rpds, sybil; from weakincentives.cli.entry import make_app"
    )
    program += "; make_app()"
    program += f"; open({str(user.clone / 'conftest.py')!r})"
    try:
        done = user.run("-B", "-c", program, home=home)
    except OSError as error:
        return str(error)
    return done.stderr.strip()[-300:] if done.returncode else ""


def _copy_for_others(source: Path, place: Path) -> None:
    packages, clone = place / "packages", place / "clone"
    shutil.copytree(source, packages, ignore=shutil.ignore_patterns("__pycache__"))
    for name in _closure(NEEDED):
        distribution = metadata.distribution(name)
        for file in distribution.files or ():
            there = packages / file
            # Programs lie outside of the packages, and nothing imports them.
            if ".." not in file.parts and (copied := Path(distribution.locate_file(file))).exists():
                there.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(copied, there)
    shutil.copytree(ROOT / "tests", clone / "tests")
    for name in ("conftest.py", "pyproject.toml"):
        shutil.copyfile(ROOT / name, clone / name)
    subprocess.run(["chmod", "-R", "a+rX", str(place)], check=True)


def _closure(wanted: Sequence[str]) -> set[str]:
    """Return the names of installed distributions that these need, directly or not."""
    waiting = [Requirement(each) for each in wanted]
    seen: set[tuple[str, str]] = set()
    while waiting:
        each = waiting.pop()
        for extra in ("", *sorted(each.extras)):
            if (each.name, extra) in seen:
                continue
            seen.add((each.name, extra))
            try:
                needs = metadata.requires(each.name) or []
            except metadata.PackageNotFoundError:
                continue
            found = map(Requirement, needs)
            waiting += [r for r in found if not r.marker or r.marker.evaluate({"extra": extra})]
    names = {name for name, _ in seen if name != "wink-runtime"}
    return {name for name in names if _is_installed(name)}


def _is_installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True
