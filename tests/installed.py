"""A project that has us installed inside of it, and programs that run there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import rpds

import weakincentives

PROLOGUE = """
import json, os, sys
from pathlib import Path
import weakincentives
from weakincentives.errors import *
from weakincentives.filesystem import HostFilesystem
root = Path(os.environ["ROOT"])
assert Path(weakincentives.__file__).is_relative_to(root), weakincentives.__file__
place = str(Path(weakincentives.__file__).parent.relative_to(root))
launcher = f"{place}/contrib/tools/sandbox/launcher.py"
def refused(attempt):
    try:
        attempt()
    except ProtectedPath:
        return
    raise SystemExit("it was possible")
"""


class Installed:
    """A project with the environment ``tools/.venv`` that has a copy of this package."""

    def __init__(self, above: Path) -> None:
        self.root = above / "project"
        self.root.mkdir()
        self.environment = self.root / "tools" / ".venv"
        make = [sys.executable, "-m", "venv", "--without-pip", str(self.environment)]
        subprocess.run(make, check=True)
        self.packages = next(self.environment.glob("lib/python*/site-packages"))
        self.package = self.packages / "weakincentives"
        shutil.copytree(
            Path(weakincentives.__file__).parent,
            self.package,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
        # The dependencies, from where they are for these tests.
        (self.packages / "others.pth").write_text(f"{Path(rpds.__file__).parent.parent}\n")

    def run(self, script: str, **env: str) -> str:
        """Return what a script says that runs with this copy of the package."""
        done = subprocess.run(
            [str(self.environment / "bin/python"), "-c", PROLOGUE + script],
            cwd=self.root.parent,
            env={**_environment(), "ROOT": str(self.root), "PYTHONDONTWRITEBYTECODE": "1", **env},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
