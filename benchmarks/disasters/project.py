"""A project with all that an undo can lose, and what differs of it afterwards."""

from __future__ import annotations

import hashlib
import os
import stat
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

OLD = 1_577_934_245_123_456_789
"""When the files were last changed, years ago."""
LATER = "NOTES.md"
"""What the agent edits after the accident: good work, which should stay."""
MANY = 2_229


@dataclass(frozen=True)
class Item:
    """What is at a path."""

    kind: str
    mode: int
    time: int
    content: str
    group: tuple[str, ...] = ()
    """The other names of the same file."""


def make(root: Path) -> None:
    """Write the project: with a history, ignored and untracked files, and uncommitted work."""
    for name in ("app", "cart", "staged", "util", "deep/tax"):
        _write(root / "src" / f"{name}.py", f"# the module {name}\nprice = 1\n" * 20)
    _write(root / LATER, "one\n")
    _write(root / "scripts" / "deploy.sh", "#!/bin/sh\necho the release\n", 0o755)
    _write(root / "dist" / "app.py", "# the bundle\n")
    _write(root / "dist" / "cart.py", "# the bundle, too\n")
    for name in ("customers", "orders", "prices"):
        _write(root / "data" / f"{name}.csv", f"{name},the,values\n" * 50)
    migration = (
        "import os\nfor name in ('customers', 'orders', 'prices'):\n"
        "    path = f'data/{name}.csv'\n    text = open(path).read()\n"
        "    os.rename(path, path + '.v1')\n    open(f'data/{name}.json', 'w').write('[')\n"
        "    if name == 'orders':\n        raise SystemExit('no such column: email')\n"
        "    os.remove(path + '.v1')\n"
    )
    _write(root / "scripts" / "migrate.py", migration)
    _write(root / ".gitignore", ".env\nnode_modules/\n*.log\n")
    _git(root, "init", "--quiet", "--initial-branch=main")
    _git(root, "add", "--all")
    _git(root, "commit", "--quiet", "--message=The project")
    # A repository in the repository, with work of its own.
    nested = root / "vendor" / "lib"
    _write(nested / "lib.py", "# the library\n")
    _git(nested, "init", "--quiet", "--initial-branch=main")
    _git(nested, "add", "--all")
    _git(nested, "commit", "--quiet", "--message=The library")
    _write(nested / "lib.py", "# the library, changed here\n")
    # Uncommitted: one staged, and changed again after that; one not staged.
    _write(root / "src" / "staged.py", "staged = 1\n")
    _git(root, "add", "src/staged.py")
    _write(root / "src" / "staged.py", "staged = 2\n")
    _write(root / "src" / "cart.py", "# a day of uncommitted work on the cart\n" * 30)
    _write(root / "draft.md", "# A draft that git does not know\n")
    # Ignored.
    _write(root / ".env", "API_KEY=the-only-copy\nDATABASE=local\n", 0o600)
    _write(root / "server.log", "the log\n" * 100)
    for number in range(40):
        _write(root / "node_modules" / f"package{number}" / "index.js", f"exports.n = {number}\n")
    (root / "node_modules" / ".bin").mkdir()
    (root / "node_modules" / ".bin" / "tool").symlink_to("../package1/index.js")
    # What git does not keep at all.
    (root / "data" / "empty").mkdir()
    (root / "data" / "private").mkdir(mode=0o700)
    (root / "src" / "current").symlink_to("app.py")
    (root / "src" / "broken").symlink_to("nowhere")
    os.link(root / "src" / "util.py", root / "src" / "same.py")
    _age(root)
    for repository in (root, nested):  # or git would write every file again
        _git(repository, "status")


def make_assets(root: Path) -> None:
    """Add a directory of many files that git does not know."""
    for number in range(MANY):
        _write(root / "assets" / f"{number % 37}" / f"{number}.svg", f"<svg id='{number}'/>\n")
    _age(root)


def read(root: Path) -> dict[str, Item]:
    """Return all that there is, but what git notes about files in its own directories."""
    names: dict[tuple[int, int], list[str]] = {}
    found: dict[str, tuple[os.stat_result, Item]] = {}
    for place, directories, files in os.walk(root):
        if ".git" in directories:
            directories.remove(".git")
        for name in (*directories, *files):
            path = Path(place, name)
            status, shown = path.lstat(), str(path.relative_to(root))
            kind, content = "file", ""
            if path.is_symlink():
                kind, content = "link", os.readlink(path)
            elif path.is_dir():
                kind = "directory"
            else:
                content = hashlib.sha256(path.read_bytes()).hexdigest()
                names.setdefault((status.st_dev, status.st_ino), []).append(shown)
            mode = stat.S_IMODE(status.st_mode)
            found[shown] = status, Item(kind, mode, status.st_mtime_ns, content)
    items: dict[str, Item] = {}
    for name, (status, item) in found.items():
        others = names.get((status.st_dev, status.st_ino), ()) if item.kind == "file" else ()
        group = tuple(sorted(others)) if len(others) > 1 else ()
        items[name] = Item(item.kind, item.mode, item.time, item.content, group)
    for repository in (root, root / "vendor" / "lib"):
        for about, words in (("index", ("ls-files", "--stage")), ("HEAD", ("rev-parse", "HEAD"))):
            shown = f"{repository.relative_to(root)}: {about} of git"
            items[shown] = Item("git", 0, 0, _asked(repository, *words))
    return items


def differences(before: Mapping[str, Item], after: Mapping[str, Item]) -> dict[str, list[str]]:
    """Return what is not as it was: the paths, by what differs there."""
    found: dict[str, list[str]] = {}

    def differs(how: str, path: str) -> None:
        found.setdefault(how, []).append(path)

    for path in sorted({*before, *after}):
        old, new = before.get(path), after.get(path)
        if new is None:
            differs("lost", path)
        elif old is None:
            differs("left behind", path)
        elif (old.kind, old.content) != (new.kind, new.content):
            differs("index of git" if old.kind == "git" else "content", path)
        else:
            if old.mode != new.mode:
                differs("mode", path)
            if old.time != new.time and old.kind != "link":
                differs("time of a directory" if old.kind == "directory" else "time", path)
            if old.group != new.group:
                differs("hard link", path)
    return found


_WORDS = {
    "lost": ("lost", "lost"),
    "left behind": ("left behind", "left behind"),
    "content": ("content", "contents"),
    "mode": ("mode", "modes"),
    "time": ("time", "times"),
    "time of a directory": ("directory time", "directory times"),
    "hard link": ("hard link", "hard links"),
    "index of git": ("git index", "git indexes"),
}


def counted(differing: Mapping[str, list[str]]) -> str:
    """Return differences in a few words; empty if there are none."""
    counts = ((how, len(differing[how])) for how in _WORDS if how in differing)
    return ", ".join(f"{count:,} {_WORDS[how][count > 1]}" for how, count in counts)


def _write(path: Path, text: str, mode: int = 0o644) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)


def _age(root: Path) -> None:
    for place, directories, files in os.walk(root, topdown=False):
        if ".git" in Path(place).relative_to(root).parts:
            continue
        for name in (*files, *directories):
            if name != ".git":
                os.utime(Path(place, name), ns=(OLD, OLD), follow_symlinks=False)


def _git(root: Path, *words: str) -> None:
    who = ("-c", "user.name=A person", "-c", "user.email=person@localhost")
    subprocess.run(["git", *who, *words], cwd=root, check=True, capture_output=True)


def _asked(root: Path, *words: str) -> str:
    if not (root / ".git").exists():
        return "no repository"
    done = subprocess.run(["git", *words], cwd=root, check=False, capture_output=True, text=True)
    return done.stdout or f"git ended with code {done.returncode}"
