"""An agent works on projects of others, in the sandbox, with the projects' own environments.

Each is a source archive from a package registry. A script plays the model: it breaks the project,
sees its tests fail, repairs it, and runs them again.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from archives import unpack
from weakincentives.adapters import ScriptedAdapter
from weakincentives.adapters.scripted import calls
from weakincentives.cli.config import load_settings
from weakincentives.cli.workbench import open_workbench
from weakincentives.contrib.tools import find_sandbox
from weakincentives.errors import SandboxUnavailable
from weakincentives.runtime import Session
from weakincentives.session.events import ToolInvoked

pytestmark = pytest.mark.heavy

PYTHON = os.path.realpath(sys.executable)
PYTEST = "pytest==8.3.4"


@pytest.fixture(scope="module", autouse=True)
def _needed() -> None:
    try:
        find_sandbox()
    except SandboxUnavailable as error:
        pytest.skip(str(error))


def fetch(*words: str, cwd: Path) -> None:
    """Run a program that needs a package registry; CI has one."""
    if shutil.which(words[0]) is None:
        pytest.skip(f"{words[0]} is not installed")
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode and "CI" not in os.environ:
        pytest.skip(f"no package registry: {done.stderr[-300:]}")
    assert done.returncode == 0, done.stderr


@pytest.fixture
def unpacked(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., Path]:
    """Downloads an archive once, and unpacks it into a new directory."""
    cache = request.config.cache
    assert cache is not None
    archives = cache.mkdir("real-projects")

    def unpacked(archive: str, *download: str) -> Path:
        if not (archives / archive).exists():
            fetch(*download, cwd=archives)
        unpack(archives / archive, tmp_path)
        [root] = tmp_path.iterdir()
        return root.rename(tmp_path / "project")

    return unpacked


def sdist(name: str, version: str) -> tuple[str, ...]:
    # Without isolation and dependencies, only what the archive's metadata needs is built.
    download = (PYTHON, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", name)
    return (f"{name}-{version}.tar.gz", *download, f"{name}=={version}")


def uv_venv(root: Path, *packages: str) -> None:
    fetch("uv", "venv", "-q", "-p", PYTHON, ".venv", cwd=root)
    fetch("uv", "pip", "install", "-q", "-p", ".venv", *packages, cwd=root)


def plain_venv(root: Path, *packages: str) -> None:
    subprocess.run([PYTHON, "-m", "venv", ".venv"], cwd=root, check=True)
    fetch(f"{root}/.venv/bin/pip", "install", "-q", *packages, cwd=root)


def edit(path: str, old: str, new: str) -> tuple[str, dict[str, object]]:
    return "edit_file", {"path": path, "old_string": old, "new_string": new}


def shell(command: str) -> tuple[str, dict[str, object]]:
    return "shell_execute", {"command": command, "timeout": 600}


def played(root: Path, turns: Sequence[Any], engine: str = "auto") -> list[ToolInvoked]:
    """Play the turns as `wink run` does; return the calls."""
    settings = load_settings(root, sandbox=[engine, "timeout=600"])
    with open_workbench(settings, Session()) as workbench:
        adapter = ScriptedAdapter([*turns, "Done."])
        adapter.evaluate(workbench.prompt, workbench.session, message="Repair it")
        return list(workbench.session[ToolInvoked].all())


def break_and_repair(
    root: Path, path: str, old: str, new: str, test: str, engine: str = "auto"
) -> None:
    """Break a file and repair it again, and run the tests at every step."""
    before = (root / path).read_bytes()
    ran = played(
        root,
        [
            calls(shell(test)),
            calls(("read_file", {"path": f"{root}/{path}"})),
            calls(edit(path, old, new)),
            calls(shell(f"touch broken; {test}")),
            calls(edit(path, new, old)),
            calls(shell(f"{test} && touch repaired")),
        ],
        engine,
    )

    outcomes = [each.success for each in ran]
    assert outcomes == [True, True, True, False, True, True], [each.result for each in ran]
    assert (root / path).read_bytes() == before
    assert not (root / "broken").exists()
    assert (root / "repaired").exists()
    assert not list(root.glob("tests/**/__pycache__"))


@pytest.mark.parametrize("engine", ["auto", "bubblewrap", "podman"])
def test_a_python_project_with_an_environment_of_uv(unpacked: Callable[..., Path], engine: str):
    root = unpacked(*sdist("click", "8.1.8"))
    uv_venv(root, PYTEST, "-e", ".")

    break_and_repair(
        root, "src/click/utils.py", "words = help.split()", "words = []", "pytest -q", engine
    )


def test_a_python_project_with_a_compiled_extension(unpacked: Callable[..., Path]):
    """It is built again in the sandbox, with the headers of the project's interpreter."""
    if shutil.which("cc") is None or not Path(sysconfig.get_path("include"), "Python.h").exists():
        pytest.skip("no compiler, or no headers of Python")
    root = unpacked(*sdist("markupsafe", "3.0.2"))
    plain_venv(root, PYTEST, "setuptools==75.8.0")

    break_and_repair(
        root,
        "src/markupsafe/_speedups.c",
        "'l'; \\\n",
        "'L'; \\\n",
        "python setup.py -q build_ext --inplace --force && PYTHONPATH=src pytest -q",
    )
    assert list(root.glob("src/markupsafe/_speedups.*.so"))


def test_a_node_project_with_its_packages(unpacked: Callable[..., Path], tmp_path: Path):
    root = unpacked("minimist-1.2.8.tgz", "npm", "pack", "--silent", "minimist@1.2.8")
    # Apart from its package.json, whose development tools would all be installed.
    (tmp_path / "apart").mkdir()
    options = ("--silent", "--no-save", "--no-audit", "--no-fund")
    fetch("npm", "install", *options, "tape@2", cwd=tmp_path / "apart")
    (tmp_path / "apart/node_modules").rename(root / "node_modules")

    break_and_repair(
        root, "index.js", "return key in o;", "return !(key in o);", "tape 'test/*.js'"
    )


# The first ten minutes


FAILING = {
    "calc.py": "def add(a, b):\n    return a - b\n",
    "test_calc.py": "from calc import add\n\n\ndef test_add():\n    assert add(2, 3) == 5\n",
}


@pytest.mark.parametrize("make", [uv_venv, plain_venv])
def test_make_the_failing_test_pass(tmp_path: Path, make: Callable[..., None]):
    """As in the README, from the command line, on a project whose environment is not active."""
    root = tmp_path / "my-project"
    root.mkdir()
    for name, text in FAILING.items():
        (root / name).write_text(text)
    make(root, PYTEST)
    turns = [
        {"call": [{"shell_execute": {"command": "pytest -q"}}]},
        {"call": [{"read_file": {"path": "calc.py"}}]},
        {"call": [{"edit_file": edit("calc.py", "a - b", "a + b")[1]}]},
        {"call": [{"shell_execute": {"command": ".venv/bin/pytest -q"}}]},
        {"say": "The test passes."},
    ]
    script = tmp_path / "script.json"
    script.write_text(json.dumps(turns))
    environment = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    wink = [sys.executable, "-m", "weakincentives.cli"]

    done = subprocess.run(
        [*wink, "run", "Make the failing test pass", "-m", f"scripted:{script}", "--json"],
        cwd=root, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    seen = subprocess.run(
        [*wink, "doctor"], cwd=root, env=environment, capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr
    assert "1 failed" in done.stdout
    assert "1 passed" in done.stdout
    assert (root / "calc.py").read_text() == FAILING["calc.py"].replace("-", "+")
    assert f"virtual environment: {root}/.venv, found by .venv" in seen.stdout
    assert f"in {root}/.venv" in seen.stdout
