"""`wink demo --disaster`: an accident that coding agents have caused, and its undo."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from weakincentives.cli.common import Misuse, echo
from weakincentives.core.programs import find_program, missing_program, safe_environment
from weakincentives.core.text import counted

COMMAND = "git checkout -- . && git clean -fdxq"
"""What the agent runs: to have a clean start, as it says."""
_PROMPT = "The build is broken. Start again from a clean state."
_OLD = 1_577_934_245_000_000_000
"""When the ignored files were last changed, years ago."""


class _Item(NamedTuple):
    """What is at a path, as far as a person would miss it."""

    mode: int
    time: int
    content: bytes


def play(project: Path) -> int:
    """Prepare the project, let the accident happen, and undo it; return the exit code."""
    git = find_program("git")
    if git is None:
        raise Misuse(f"{missing_program('git')}; the accident is one with git")
    _prepare(project, git)
    before = _contents(project)
    echo(
        f"{project} has a day of uncommitted work in till.py, a draft that git does not know,\n"
        "and an ignored .env with the only copy of a key, readable by nobody else.\n"
    )
    echo(f'A person to a coding agent: "{_PROMPT}"')
    echo(f"The agent runs: {COMMAND}\n")
    _let_happen(project)
    after = _contents(project)
    lost = sorted({*before} - {*after})
    changed = [name for name in before if name in after and after[name] != before[name]]
    echo(f"Gone: {', '.join(lost)}")
    echo(f"Back to the last commit: {', '.join(changed)}")
    echo("git has none of it: it was never committed. The agent was recorded by WINK, so:\n")
    code = _wink(project, "log")
    code = code or _wink(project, "undo", "1", "--yes")
    now = _contents(project)
    left = sorted(name for name in {**before, **now} if before.get(name) != now.get(name))
    if code or left:
        echo(f"\nNot as before: {', '.join(left) or 'the undo failed'}")
        return code or 1
    paths = counted(len(before), "path")
    echo(f"\nCompared: {paths} as before the accident: each byte, mode, time and link.\n")
    echo("The project is still there. The same for the agent that you use:")
    echo("  wink hook install claude    # or another: wink hook install --help")
    return 0


def _prepare(project: Path, git: str) -> None:
    """Add to the project what an undo can lose."""
    (project / ".gitignore").write_text(".env\nnode_modules/\n")
    who = ("-c", "user.name=demo", "-c", "user.email=demo@localhost")
    for words in (
        ("init", "--quiet"),
        ("add", "--all"),
        (*who, "commit", "--quiet", "--no-verify", "--message=The till"),
    ):
        command = [git, "-c", "core.hooksPath=/dev/null", *words]
        done = subprocess.run(
            command, cwd=project, capture_output=True, text=True, check=False,
            env=safe_environment(),
        )  # fmt: skip
        if done.returncode:
            raise Misuse(f"git {words[0]} failed: {done.stderr.strip()}")
    with (project / "till.py").open("a") as file:
        file.write("\n\n# Today: discounts, not committed yet\nDISCOUNTS = {'monday': 10}\n")
    (project / "draft.md").write_text("# What the till should do next\n")
    secret = project / ".env"
    secret.write_text("TILL_KEY=the-only-copy\n")
    secret.chmod(0o600)
    package = project / "node_modules" / "printer"
    package.mkdir(parents=True)
    (package / "index.js").write_text("exports.print = console.log\n")
    (project / "node_modules" / "print").symlink_to("printer/index.js")
    for path in (secret, package / "index.js"):
        os.utime(path, ns=(_OLD, _OLD))


def _let_happen(project: Path) -> None:
    """Run the command as a tool of an agent whose hooks tell WINK of it."""
    from weakincentives.cli.hooks.adapters import Adapter
    from weakincentives.cli.hooks.events import Event, Kind
    from weakincentives.cli.hooks.recording import answer

    adapter = Adapter(
        program="demo", title="A demo agent", kinds={}, editing=frozenset(), reading=frozenset()
    )

    def tell(kind: Kind, said: str = "") -> None:
        place, session = str(project), "the demo"
        event = Event(
            kind=kind, session=session, directory=place, root=place, tool="Bash", use="1",
            params={"command": COMMAND}, prompt=_PROMPT, answer=said,
        )  # fmt: skip
        reply = answer(adapter, event)
        if reply.denial or reply.messages or reply.rolled_back:
            reasons = [reply.denial, *reply.messages, reply.rolled_back]
            raise Misuse("\n".join(filter(None, reasons)))

    tell("before")
    shell = find_program("sh")
    if shell is None:
        raise Misuse(missing_program("sh"))
    done = subprocess.run(
        [shell, "-c", COMMAND], cwd=project, capture_output=True, text=True, check=False,
        env=safe_environment(),
    )  # fmt: skip
    tell("after", done.stdout + done.stderr)


def _wink(project: Path, *words: str) -> int:
    echo(f"$ wink {' '.join(words)}")
    command = [sys.executable, "-P", "-m", "weakincentives.cli", *words]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)
    echo((done.stdout + done.stderr).rstrip())
    return done.returncode


def _contents(project: Path) -> Mapping[str, _Item]:
    found: dict[str, _Item] = {}
    for path in project.rglob("*"):
        name = path.relative_to(project)
        if name.parts[0] == ".git" or (path.is_dir() and not path.is_symlink()):
            continue
        status = path.lstat()
        content = os.fsencode(os.readlink(path)) if path.is_symlink() else path.read_bytes()
        found[str(name)] = _Item(stat.S_IMODE(status.st_mode), status.st_mtime_ns, content)
    return found
