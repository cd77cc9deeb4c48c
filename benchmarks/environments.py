"""The environments measured in: one with our package from this checkout, one for each peer.

They live in ``.bench/`` at the top of the checkout, made on first use.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parent
CHECKOUT = BENCHMARKS.parent
HOME = CHECKOUT / ".bench"


class CannotRunError(Exception):
    """A peer that cannot be measured here, and why."""


@dataclass(frozen=True, kw_only=True)
class Peer:
    """Another library, the scripts that drive it, and what its environment takes."""

    name: str
    requirements: tuple[str, ...]
    scripts: tuple[str, ...]
    start: str | None = None
    """The import a program begins with, by names: some modules load only when one is asked for.
    None when import time and size say nothing."""
    python: str | None = None
    """The Python it needs, as in ``3.13``; ours otherwise."""


def _framework(name: str, start: str, *requirements: str) -> Peer:
    scripts = (f"frameworks/b_{name.replace('-', '_')}.py",)
    return Peer(name=name, requirements=requirements, scripts=scripts, start=start)


PEERS = (
    Peer(name="floor", requirements=("pydantic",), scripts=("frameworks/b_floor.py",)),
    _framework("pydantic-ai", "from pydantic_ai import Agent", "pydantic-ai-slim==2.62.*"),
    _framework(
        "openai-agents", "from agents import Agent, Runner, function_tool", "openai-agents==0.24.*"
    ),
    _framework(
        "langgraph",
        "from langgraph.graph import StateGraph; from langgraph.prebuilt import ToolNode",
        "langgraph==1.2.*",
        "langchain==1.*",
    ),
    _framework(
        "inspect-ai",
        "from inspect_ai.model import execute_tools; from inspect_ai.tool import tool",
        "inspect-ai==0.3.285",
    ),
    _framework("mcp", "from mcp.server.mcpserver import MCPServer", "mcp==2.3.*"),
    _framework("fastmcp", "from fastmcp import FastMCP", "fastmcp==4.1.*"),
    _framework("smolagents", "from smolagents import ToolCallingAgent, tool", "smolagents==1.26.*"),
    _framework(
        "google-adk",
        "from google.adk.agents import LlmAgent; from google.adk.tools import FunctionTool",
        "google-adk==2.13.*",
    ),
    _framework("agno", "from agno.agent import Agent", "agno==3.1.*"),
    Peer(name="sandlock", requirements=("sandlock==0.9.*",), scripts=("sandlock/b_sandlock.py",)),
    Peer(
        name="predecessor",
        requirements=("weakincentives==0.27.0",),
        scripts=("predecessor/a_tool_call.py", "predecessor/e_dispatch.py"),
        start="from weakincentives.prompt import Tool; from weakincentives.runtime import Session",
        python="3.13",
    ),
    Peer(
        name="predecessor-disk",
        requirements=("weakincentives==0.27.0",),
        scripts=("predecessor/d_snapshot_host.py",),
        python="3.13",
    ),
    Peer(
        name="predecessor-parse",
        requirements=("weakincentives==0.27.0", "pydantic", "msgspec"),
        scripts=("predecessor/f_serde.py",),
        python="3.13",
    ),
    Peer(
        name="predecessor-0.16",
        requirements=("weakincentives==0.16.0",),
        scripts=("predecessor/c_snapshot_mem.py",),
        python="3.13",
    ),
)


def child_environment() -> dict[str, str]:
    """Return our environment without what would change how Python starts."""
    # PYTHONDONTWRITEBYTECODE above all: without byte code every import is slow.
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("PYTHON") and name != "VIRTUAL_ENV"
    }


def run(command: Sequence[str | Path], *, cwd: Path = BENCHMARKS, timeout: float = 3600) -> str:
    """Run a command and return what it printed; say what went wrong in one line."""
    try:
        done = subprocess.run(
            [str(part) for part in command],
            cwd=cwd,
            env=child_environment(),
            capture_output=True,
            text=True,
            timeout=timeout,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotRunError(str(error)) from error
    if done.returncode != 0:
        last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        raise CannotRunError(f"{Path(str(command[-1])).name}: {last}")
    return done.stdout


def measurements(python: Path, script: str, *options: str) -> list[dict]:
    """Run a script in an environment and return its lines of JSON."""
    printed = run([python, BENCHMARKS / script, *options])
    return [json.loads(line) for line in printed.splitlines() if line.startswith("{")]


def our_environment(extra: str = "") -> Path:
    """Return the Python of an environment with this checkout installed as a user would have it."""
    python = _environment(f"ours-{extra}" if extra else "ours", Path(sys.executable))
    # First with dependencies, which is quick once they are there; then the checkout as it is now.
    wanted = f"{CHECKOUT}[{extra}]" if extra else str(CHECKOUT)
    run([python, "-m", "pip", "install", "--quiet", wanted])
    run([python, "-m", "pip", "install", "--quiet", "--force-reinstall", "--no-deps", CHECKOUT])
    _compile(python)
    return python


def peer_environment(peer: Peer) -> Path:
    """Return the Python of a peer's environment, made when it is not there."""
    python = _environment(peer.name, find_python(peer.python))
    run([python, "-m", "pip", "install", "--quiet", *peer.requirements])
    _compile(python)
    return python


def versions(python: Path) -> dict[str, str]:
    """Return what is installed in an environment, and its Python."""
    listed = json.loads(run([python, "-m", "pip", "list", "--format", "json"]))
    found = {entry["name"].lower().replace("_", "-"): entry["version"] for entry in listed}
    found["python"] = run([python, "-c", "import platform; print(platform.python_version())"])
    return {name: found[name].strip() for name in found}


def find_python(wanted: str | None) -> Path:
    """Return an interpreter of the wanted version: ours, one on the path, or one of pyenv's."""
    if wanted is None:
        return Path(sys.executable)
    candidates = [shutil.which(f"python{wanted}")]
    pyenv = shutil.which("pyenv")
    if pyenv is not None:
        for version in (wanted, f"{wanted}.0"):
            shown = subprocess.run([pyenv, "prefix", version], capture_output=True, text=True)
            if shown.returncode == 0:
                candidates.append(f"{shown.stdout.strip()}/bin/python{wanted}")
    for candidate in candidates:
        # A shim of pyenv's is on the path also where it starts nothing.
        if candidate is not None and _starts(candidate):
            return Path(candidate)
    raise CannotRunError(f"no Python {wanted} found on the path or through pyenv")


def source_digest() -> str:
    """Return a short digest of our sources, to tell which code a figure belongs to."""
    digest = hashlib.sha256()
    for path in sorted((CHECKOUT / "src").rglob("*.py")):
        digest.update(path.relative_to(CHECKOUT).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def _environment(name: str, interpreter: Path) -> Path:
    home = HOME / name
    python = home / "bin" / "python"
    if not python.exists():
        run([interpreter, "-m", "venv", home])
    return python


def _starts(python: str) -> bool:
    return subprocess.run([python, "-c", ""], capture_output=True).returncode == 0


def _compile(python: Path) -> None:
    packages = "import sysconfig, sys; sys.stdout.write(sysconfig.get_path('purelib'))"
    # What does not compile is a template or for another Python: the exit code says nothing.
    subprocess.run(
        [str(python), "-m", "compileall", "-q", run([python, "-c", packages])],
        env=child_environment(),
        capture_output=True,
    )
