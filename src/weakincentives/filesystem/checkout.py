"""Commits of untrusted git repositories: checked out, and compared with a directory.

Git works in a repository of our own that borrows the objects. So the settings, hooks and filters
of the repository, and those of the user, are not in effect, whatever ``.gitattributes`` says.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

from weakincentives.core.programs import (
    find_program,
    missing_program,
    reach_of_agents,
    safe_environment,
)
from weakincentives.errors import FilesystemError
from weakincentives.filesystem.paths import shown

_SHA = re.compile("[0-9a-f]{40}|[0-9a-f]{64}")
_PATIENCE = 3600.0
"""Seconds for one git command; fetching a large repository takes long."""
_PROTOCOLS = "file:git:http:https:ssh"
_SAFE = (
    "core.hooksPath=/dev/null",
    "core.fsmonitor=false",
    "core.attributesFile=/dev/null",
    "core.excludesFile=/dev/null",
    "core.autocrlf=false",
    "core.symlinks=true",
    "core.fileMode=true",
    "core.protectNTFS=true",
    "protocol.ext.allow=never",
    "submodule.recurse=false",
    "fetch.recurseSubmodules=false",
    "gc.auto=0",
    "maintenance.auto=false",
)


def clean_commit(root: Path) -> str:
    """Return the commit that is checked out in a directory.

    Raises:
        FilesystemError: It is not the top of a checkout, or something differs from the commit.
    """
    try:
        # Reads settings of the repository, but runs nothing.
        told = _git(["rev-parse", "--show-toplevel", "HEAD", "--git-path", "objects"], at=root)
    except FilesystemError as error:
        raise FilesystemError(f"{root} is not a git checkout with a commit: {error}") from None
    top, commit, objects = told.decode(errors="surrogateescape").rstrip("\n").split("\n")
    if os.path.realpath(top) != str(root):
        raise FilesystemError(f"{root} is not the top of its git checkout, which is {top}")
    with _borrowing(root / objects, commit) as own:
        _check_plain(own, commit)
        _git(["read-tree", commit], own)
        status = ["status", "--porcelain=v1", "-z", "--untracked-files=all", "--no-renames"]
        found = _git([f"--work-tree={root}", *status], own, at=root)
    differing = [os.fsdecode(each[3:]) for each in found.split(b"\0") if each]
    if differing:
        named = ", ".join(map(shown, differing[:5]))
        more = f" and {len(differing) - 5} more" if len(differing) > 5 else ""
        raise FilesystemError(
            f"{named}{more} differ from the commit {commit[:12]}: commit or remove them, or store"
            " the directory as a tree"
        )
    return commit


def check_out(repository: str, commit: str, target: Path) -> None:
    """Put the files of a commit into an empty directory; all have the time of the commit.

    Raises:
        FilesystemError: The repository does not have the commit, or it cannot be reached.
    """
    if not _SHA.fullmatch(commit):
        raise FilesystemError(f"{commit!r} is not the full name of a commit")
    with _repository(repository, commit) as own:
        _check_plain(own, commit)
        _git(["read-tree", commit], own)
        _git([f"--work-tree={target}", "checkout-index", "--all", "--quiet"], own, at=target)
        time = int(_git(["show", "--no-patch", "--format=%ct", commit], own))
    for folder, directories, files in os.walk(target, topdown=False):
        for name in (*files, *directories):
            os.utime(os.path.join(folder, name), (time, time), follow_symlinks=False)
    os.chmod(target, 0o755)
    os.utime(target, (time, time))


def _check_plain(own: Path, commit: str) -> None:
    found = _git(["ls-tree", "-r", "-z", commit], own).split(b"\0")
    modules = [os.fsdecode(each.split(b"\t")[1]) for each in found if each.startswith(b"160000")]
    if modules:
        raise FilesystemError(
            f"the commit {commit[:12]} has submodules ({shown(modules[0])}), which are other"
            " repositories: store the directory as a tree instead"
        )


@contextmanager
def _repository(repository: str, commit: str) -> Generator[Path]:
    """Give a repository of our own with a commit of the given one."""
    if os.path.isdir(repository):
        told = _git(["rev-parse", "--git-path", "objects"], at=Path(repository))
        objects = Path(repository, os.fsdecode(told.rstrip(b"\n")))
        with _borrowing(objects, commit) as own:
            yield own
        return
    if repository.startswith("-"):
        raise FilesystemError(f"{repository!r} is not the address of a git repository")
    with _own_repository(commit) as own:
        fetch = [
            "fetch",
            "--quiet",
            "--no-tags",
            "--no-write-fetch-head",
            "--no-recurse-submodules",
        ]
        try:
            _git([*fetch, "--depth=1", repository, commit], own, is_ours=False)
        except FilesystemError:
            # Many servers give only commits that have a name.
            _git([*fetch, repository, "+refs/*:refs/fetched/*"], own, is_ours=False)
        yield own


@contextmanager
def _borrowing(objects: Path, commit: str) -> Generator[Path]:
    """Give an empty repository of our own with the objects of another."""
    with _own_repository(commit) as own:
        place = str(objects.resolve())
        if "\n" in place:
            raise FilesystemError(f"{shown(place)} has a line break in its name")
        (own / "objects" / "info").mkdir(exist_ok=True)
        (own / "objects" / "info" / "alternates").write_text(f"{place}\n", errors="surrogateescape")
        yield own


@contextmanager
def _own_repository(commit: str) -> Generator[Path]:
    form = "sha1" if len(commit) == 40 else "sha256"
    with tempfile.TemporaryDirectory(prefix="wink-git-") as folder:
        own = Path(folder, "git")
        _git(["init", "--quiet", "--bare", "--template=", f"--object-format={form}", str(own)])
        (own / "HEAD").write_text(f"{commit}\n")
        yield own


def _git(
    arguments: Sequence[str],
    own: Path | None = None,
    *,
    at: Path | None = None,
    is_ours: bool = True,
) -> bytes:
    """Return the output of a git command, which may run no other program.

    Args:
        arguments: The command and its own, after options of git itself.
        own: The repository; the one of the directory by default.
        at: The directory.
        is_ours: Without the user's settings; a fetch needs them, for proxies and credentials.
    """
    git = find_program("git")
    if git is None:
        raise FilesystemError(missing_program("git"))
    environment = safe_environment() | {
        "GIT_ALLOW_PROTOCOL": _PROTOCOLS,
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_NO_LAZY_FETCH": "1",
        "GIT_OPTIONAL_LOCKS": "0",
        "GIT_ATTR_NOSYSTEM": "1",
        "LC_ALL": "C",
    }
    if is_ours or reach_of_agents(os.path.expanduser("~")):
        environment |= {"GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull}
    options = [part for each in _SAFE for part in ("-c", each)]
    place = [] if own is None else [f"--git-dir={own}"]
    try:
        done = subprocess.run(
            [git, *options, *place, *arguments],
            cwd=at or own,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_PATIENCE,
            check=False,
            umask=0o022,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise FilesystemError(f"git failed: {error}") from error
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        command = next(each for each in arguments if not each.startswith("--"))
        raise FilesystemError(f"git {command} failed: {lines[-1] if lines else done.returncode}")
    return done.stdout
