"""Branches of a real directory of 50,000 files, files as of 1,000 calls ago, and rewinding a run.

Beside what other tools do for the same: ``git worktree add``, and shadow git, which is
``git add --all`` and ``git commit`` with a repository elsewhere.
"""

import itertools
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import weakincentives as wink
from disk import GIT, STORES, TARGET, body, make_directory, make_repository
from timing import Samples, emit, is_quick
from weakincentives.adapters import ScriptedAdapter
from weakincentives.adapters import calls as scripted
from weakincentives.filesystem import Branch, HostFilesystem, drop_branch
from weakincentives.prompt import MarkdownSection, Prompt, PromptTemplate
from weakincentives.runtime import SavedSession, Session, ToolInvoked, open_run, rewind_run

CALLS = 1000


def timed(operation: Callable[[], object], batches: int) -> dict[str, float]:
    """Return what one of the operations takes, in µs."""
    taken = Samples()
    for _ in range(batches):
        taken.batch(operation, 1)
    return {
        "cpu": round(median(taken.cpu), 1),
        "wall": round(median(taken.wall), 1),
        "wall_p10": round(sorted(taken.wall)[batches // 10], 1),
    }


def measure_branches(root: Path, files: int, count: int) -> None:
    """Make so many branches that are all kept; each gets its first change, and is merged."""
    store = Path(tempfile.mkdtemp(dir=STORES))
    HostFilesystem(root, store=store).close()
    names = itertools.count()
    made = partial(_make, root, store, names)
    creating = timed(made, count)
    empty = _size(store / "branches/b0")
    branches = [Branch.open(root, f"b{number}", store=store) for number in range(count)]
    rest = iter([(each, f"d{n}/f{n * 100}.txt") for n, each in enumerate(branches)])
    changing = timed(lambda: _change(*next(rest)), count)
    changed = _size(store / "branches/b0")
    with HostFilesystem(root, store=store) as fs:
        left = iter(branches)
        merging = timed(lambda: next(left).merge_into(fs), count)
    for branch in branches:
        branch.close()
    opening = timed(lambda: Branch.open(root, "b0", store=store).close(), count)
    dropped = itertools.count()
    dropping = timed(lambda: drop_branch(root, f"b{next(dropped)}", store=store), count)
    emit(
        "branches",
        files=files,
        count=count,
        bytes_empty=empty,
        bytes_changed=changed,
        create=creating,
        first_change=changing,
        merge=merging,
        open=opening,
        drop=dropping,
    )


def _make(root: Path, store: Path, names: "itertools.count[int]") -> None:
    Branch.create(root, f"b{next(names)}", store=store).close()


def _change(branch: Branch, path: str) -> None:
    branch.write(path, os.urandom(512).hex())


def _size(folder: Path) -> int:
    """Return the bytes of all files; what directories take depends on the filesystem."""
    return sum(each.stat().st_size for each in folder.rglob("*") if each.is_file())


def measure_past(root: Path, files: int, calls: int, batches: int) -> None:
    """Read a file as it was so many calls ago, each of which changed another file or this one."""
    store = Path(tempfile.mkdtemp(dir=STORES))
    with HostFilesystem(root, store=store) as fs:
        first = body()
        fs.write(TARGET, first)
        for number in range(calls):
            fs.write(TARGET if number % 100 == 50 else f"d{number % 90 + 1}/new.txt", body())
    branch = Branch.create(root, "past", at=1, store=store)
    assert branch.read(TARGET) == first
    branch.close()

    def read() -> None:
        with Branch.open(root, "past", store=store) as opened:
            opened.read(TARGET)

    reading = timed(read, batches)
    branch = Branch.open(root, "past", store=store)
    again = timed(lambda: branch.read(TARGET), batches)
    began = time.perf_counter()
    branch.list("d1")
    listing = (time.perf_counter() - began) * 1e6
    branch.close()
    emit("branches past", files=files, calls=calls, open_and_read=reading, read=again,
         first_list=round(listing, 1))  # fmt: skip


@wink.tool(reach="reversible")
def write(path: str, text: str, *, context: wink.ToolContext) -> str:
    """Write a file."""
    context.filesystem.write(path, text)
    return "Written"


def measure_rewind(root: Path, files: int, calls: int, batches: int) -> None:
    """Rewind a run of so many calls by a few of them: files, session and conversation."""
    store = Path(tempfile.mkdtemp(dir=STORES))
    with HostFilesystem(root, store=store) as fs, open_run(fs) as run:
        section = MarkdownSection(title="Write", tools=[write])
        template = PromptTemplate(sections=[section], resources={wink.Filesystem: fs})
        prompt = Prompt(template)
        with prompt.resources:
            _make_calls(prompt, run.session, calls)
            back = {by: _rewound(fs, run, prompt, by, batches) for by in (1, 10, 100)}
    emit("branches rewind", files=files, calls=calls, back=back)


def _make_calls(prompt: Prompt[Any], session: Session, count: int) -> None:
    """Let a model write so many files, one in each turn; a message for every fifty."""
    for first in range(0, count, 50):
        turns = [
            scripted(("write", {"path": f"d{n % 90 + 1}/new.txt", "text": body()}))
            for n in range(first, min(first + 50, count))
        ]
        ScriptedAdapter([*turns, "Done."]).evaluate(prompt, session, message="Go on")


def _rewound(
    fs: HostFilesystem, run: SavedSession, prompt: Prompt[Any], by: int, batches: int
) -> dict[str, float]:
    taken = Samples()
    for _ in range(batches):
        number = len(run.session[ToolInvoked])
        _make_calls(prompt, run.session, by)
        taken.batch(partial(rewind_run, run, fs, number), 1)
    return taken.figures() | {"wall_p10": round(sorted(taken.wall)[batches // 10], 1)}


def measure_git(files: int, batches: int) -> None:
    """Do the same with a worktree for each branch, and with shadow git."""
    repository = make_repository(files)
    names = itertools.count()
    trees = Path(tempfile.mkdtemp(dir=STORES))

    def add() -> None:
        where = str(trees / str(next(names)))
        _run(*GIT, "worktree", "add", "--quiet", "--detach", where, cwd=repository)

    worktree = timed(add, batches)
    size = sum(each.lstat().st_size for each in (trees / "0").rglob("*") if each.is_file())
    for number in range(next(names)):
        where = str(trees / str(number))
        _run(*GIT, "worktree", "remove", "--force", where, cwd=repository)
    root = make_directory(files)
    shadow = (*GIT, f"--git-dir={tempfile.mkdtemp(dir=STORES)}", f"--work-tree={root}")
    _run(*shadow, "init", "--quiet", cwd=root)

    def checkpoint() -> None:
        (root / TARGET).write_text(body())
        _run(*shadow, "add", "--all", cwd=root)
        _run(*shadow, "commit", "--quiet", "--message", "call", cwd=root)

    checkpoint()
    committing = timed(checkpoint, batches)
    going_back = timed(
        lambda: _run(*shadow, "checkout", "--quiet", "HEAD~1", "--", ".", cwd=root), batches
    )
    reading = timed(lambda: _run(*shadow, "show", f"HEAD~1:{TARGET}", cwd=root), batches)
    emit(
        "branches git",
        files=files,
        worktree_add=worktree,
        worktree_bytes=size,
        shadow_commit=committing,
        shadow_checkout=going_back,
        shadow_show=reading,
    )


def _run(*command: str, cwd: Path) -> None:
    subprocess.run(command, cwd=cwd, check=True, capture_output=True)


def main() -> None:
    quick = is_quick()
    STORES.mkdir(parents=True, exist_ok=True)
    files, calls = (1000, 100) if quick else (50_000, CALLS)
    root = make_directory(files)
    changed = [TARGET, *(f"d{number}/f{number * 100}.txt" for number in range(files // 100))]
    kept = {path: (root / path).read_bytes() for path in changed[:101]}
    measure_branches(root, files, 10 if quick else 100)
    measure_past(root, files, calls, 5 if quick else 50)
    measure_rewind(root, files, calls, 2 if quick else 20)
    measure_git(files, 2 if quick else 5)
    for path, content in kept.items():
        (root / path).write_bytes(content)
    for each in root.glob("d*/new.txt"):
        os.unlink(each)
    shutil.rmtree(STORES)


if __name__ == "__main__":
    main()
