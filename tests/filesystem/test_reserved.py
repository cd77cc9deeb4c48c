"""What no call may change: it decides what runs on the user's machine outside of calls."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import pytest
from trees import look, put

import weakincentives as wink
from installed import Installed
from weakincentives.durable import LocalObjects
from weakincentives.errors import FilesystemError, ProtectedPath
from weakincentives.filesystem import Branch, HostFilesystem, branches_of
from weakincentives.filesystem.portable import BranchUpload, unpack_branch

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")

EVIL = "[core]\n\tfsmonitor = touch /tmp/owned\n"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A workspace with a repository, one inside of it, and a bare one."""
    root = tmp_path / "work"
    modules = (".git/modules/lib", ".git/modules/logs", ".git/modules/deps/objects")
    modules += (".git/worktrees/tree/modules/lib",)
    for place in (".git", "sub/.git", "bare.git", *modules):
        put(root / place / "config", "[core]\n\tbare = false\n")
        put(root / place / "HEAD", "ref: refs/heads/main\n")
        put(root / place / "hooks/pre-commit", "#!/bin/sh\n")
        put(root / place / "info/exclude", "*.tmp\n")
        (root / place / "objects").mkdir()
        (root / place / "refs/heads").mkdir(parents=True)
    put(root / ".gitmodules", "")
    put(root / "wink.toml", "")
    put(root / "sub/wink.toml", "")
    put(root / "packages/wink.toml", "")
    put(root / "packages/foo/a.py", "a = 1\n")
    put(root / "tree/.git", "gitdir: ../.git/worktrees/tree\n")
    put(root / ".git/worktrees/tree/commondir", "../..\n")
    put(root / ".git/worktrees/tree/HEAD", "ref: refs/heads/tree\n")
    put(root / "a.txt", "a\n")
    return root


@pytest.fixture(params=["overlay", "scan"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How what a command changes is known."""
    if request.param == "scan":
        monkeypatch.setattr("weakincentives.filesystem.commands.find_way", lambda *_: "none here")
    return request.param


@pytest.fixture
def fs(root: Path) -> Iterator[HostFilesystem]:
    with HostFilesystem(root) as fs:
        yield fs


PROTECTED = [
    *(".git/config", ".git/hooks/pre-commit", ".git/hooks/new", ".git/info/exclude"),
    *(".git/info/attributes", ".git/config.worktree", ".git/commondir", ".GIT/config"),
    *("sub/.git/config", "sub/.git/hooks/post-checkout", "new/.git/config", "tree/.git"),
    *(".git/modules/lib/config", ".git/modules/lib/hooks/x", ".git/worktrees/tree/commondir"),
    *(".git/worktrees/tree/config.worktree", "bare.git/config", "bare.git/hooks/update"),
    *(".gitmodules", "sub/.gitmodules", "new/.git", "wink.toml", "sub/wink.toml", "Wink.toml"),
    *(".git/modules/logs/config", ".git/modules/logs/hooks/x", ".git/modules/refs/config"),
    *(".git/modules/deps/objects/config", ".git/modules/deps/objects/commondir"),
    *(".git/worktrees/tree/modules/lib/config", ".git/worktrees/tree/modules/new/hooks/x"),
]

OPEN = [
    *("a.txt", ".git/HEAD", ".git/index", ".git/refs/heads/config", ".git/refs/heads/hooks/x"),
    *(".git/info/refs", ".git/objects/info/packs", ".git/logs/refs/heads/info", "config"),
    *("hooks/pre-commit", "info", "src/config", ".gitignore", ".github/config", "x.wink", "HEAD"),
    *(
        "bare.git/refs/heads/main",
        "objects/a",
        "bare.git/HEAD",
        ".git/modules/lib/refs/heads/config",
        ".git/modules/logs/refs/heads/config",
        ".git/modules/lib/logs/refs/heads/info",
        ".git/worktrees/tree/modules/lib/refs/heads/hooks/x",
    ),
]


@pytest.mark.parametrize("path", PROTECTED)
def test_file_tools_do_not_change_it(root: Path, fs: HostFilesystem, path: str):
    put(root / "evil", EVIL)
    before = look(root)
    attempts: list[Callable[[], object]] = [
        lambda: fs.write(path, EVIL),
        lambda: fs.write_bytes(path, b"x"),
        lambda: fs.append(path, "x"),
        lambda: fs.copy("evil", path, overwrite=True),
        lambda: fs.move("evil", path, overwrite=True),
    ]
    if (root / path).exists():
        attempts += [
            lambda: fs.delete(path),
            lambda: fs.move(path, "elsewhere"),
            lambda: fs.set_readonly(path),
        ]
    for attempt in attempts:
        with pytest.raises(ProtectedPath, match="is protected"):
            attempt()

    assert look(root) == before


@pytest.mark.parametrize("path", OPEN)
def test_all_else_can_be_changed(fs: HostFilesystem, engine: str, path: str):
    fs.write(path, "one\n")
    done = fs.run(["sh", "-c", 'echo two >> "$1"', "sh", path], check=True)

    assert done.engine == engine
    assert fs.read(path) == "one\ntwo\n"


@pytest.mark.parametrize("path", PROTECTED)
def test_a_command_that_changes_it_has_changed_nothing(
    root: Path, fs: HostFilesystem, engine: str, path: str
):
    before = look(root)
    script = 'mkdir -p "$(dirname "$1")"; echo x > other.txt; printf evil >> "$1"'

    with pytest.raises(ProtectedPath, match="is protected"):
        fs.run(["sh", "-c", script, "sh", path])

    assert look(root) == before


@pytest.mark.parametrize(
    "script",
    [
        "rm -rf .git",
        "rm -rf sub",
        "mv sub elsewhere",
        "mv packages elsewhere",
        "rm -rf packages",
        "rm -rf bare.git",
        "rm wink.toml",
        "mkdir x && ln -s /tmp x/.git",
        "mkdir y && printf evil > y/config && mkdir y/objects y/refs && echo 'ref: x' > y/HEAD",
        "cd .git && mkdir y y/objects y/refs && printf evil > y/config && echo 'ref: x' > y/HEAD",
        "rm .gitmodules && ln -s a.txt .gitmodules",
        "chmod 777 .git/hooks/pre-commit",
        "rm -rf .git/hooks && ln -s ../packages .git/hooks",
    ],
)
def test_nor_by_what_is_around_it(root: Path, fs: HostFilesystem, engine: str, script: str):
    before = look(root)

    with pytest.raises(ProtectedPath, match="is protected"):
        fs.run(script)

    assert look(root) == before


def test_a_directory_with_something_protected_in_it_stays(root: Path, fs: HostFilesystem):
    before = look(root)
    for path in ("packages", "sub", "bare.git", ".git"):
        with pytest.raises(ProtectedPath):
            fs.move(path, "elsewhere")
        with pytest.raises(ProtectedPath):
            fs.delete(path, recursive=True)

    assert look(root) == before


def test_a_directory_does_not_become_what_git_runs(root: Path, fs: HostFilesystem):
    put(root / "evil/config", EVIL)
    put(root / "evil/hooks/pre-commit", EVIL)
    put(root / "half/HEAD", "ref: refs/heads/main\n")
    put(root / "half/config", EVIL)
    (root / "half/refs").mkdir()
    (root / "objects").mkdir()
    with pytest.raises(ProtectedPath):
        fs.move("evil", "new/.git")
    with pytest.raises(ProtectedPath):
        fs.copy("evil", "new/.git")
    with pytest.raises(ProtectedPath):
        fs.copy("evil", "bare.git/hooks", overwrite=True)
    with pytest.raises(ProtectedPath):
        fs.move("objects", "half/objects")
    with pytest.raises(ProtectedPath):
        fs.mkdir("half/objects")
    with pytest.raises(ProtectedPath):
        fs.write("half/objects/aa/bb", "x")


def test_a_link_does_not_lead_to_it(root: Path, fs: HostFilesystem):
    (root / "settings").symlink_to(".git/config")
    (root / "gitdir").symlink_to(".git")
    os.link(root / ".git/config", root / "twin")
    before = look(root)
    for path in ("settings", "gitdir/config", "twin"):
        with pytest.raises(ProtectedPath):
            fs.write(path, EVIL)
        with pytest.raises(ProtectedPath):
            fs.append(path, EVIL)

    assert look(root) == before


def test_nor_for_a_command(root: Path, fs: HostFilesystem, engine: str):
    (root / "settings").symlink_to(".git/config")
    os.link(root / ".git/config", root / "twin")
    before = look(root)
    for script in (
        "printf evil >> settings",
        "printf evil >> twin",
        "cd .git; printf x >> ../twin",
    ):
        try:
            fs.run(script)
        except ProtectedPath:
            assert look(root) == before
        else:
            # Without root, an overlay parts the names of a file: then only the other one changed.
            assert os.geteuid() != 0
            assert (root / ".git/config").read_text() == "[core]\n\tbare = false\n"


def test_a_link_made_by_one_call_is_of_no_use_to_the_next(
    root: Path, fs: HostFilesystem, engine: str
):
    config = (root / ".git/config").read_bytes()
    try:
        fs.run("ln .git/config twin; ln -s .git gitdir", check=True)
    except ProtectedPath:
        return
    for path in ("twin", "gitdir/config"):
        try:
            fs.write(path, EVIL)
        except ProtectedPath:
            continue
        assert (root / ".git/config").read_bytes() == config

    assert (root / ".git/config").read_bytes() == config


def test_what_wink_toml_leads_to_is_protected_as_well(root: Path):
    (root / "wink.toml").unlink()
    put(root / "conf/settings.toml", "")
    (root / "wink.toml").symlink_to("conf/settings.toml")
    with HostFilesystem(root) as fs, pytest.raises(ProtectedPath):
        fs.write("conf/settings.toml", 'sandbox = "none"\n')


def test_private_views_hold_to_it(root: Path, fs: HostFilesystem):
    view = fs.fork()
    with pytest.raises(ProtectedPath):
        view.write(".git/config", EVIL)
    with pytest.raises(FilesystemError):
        view.run("printf evil >> .git/config")
    fs.merge(view)

    assert (root / ".git/config").read_text() == "[core]\n\tbare = false\n"


def test_a_call_of_another_program_that_changes_it_is_undone(root: Path):
    """What a tool does past our API is found, and taken back as a whole."""

    @wink.tool(writes="external")
    def meddle() -> str:
        """Change files as any program does."""
        (root / "a.txt").write_text("changed\n")
        with (root / ".git/config").open("a") as file:
            file.write(EVIL)
        return "done"

    before = look(root)
    with wink.ToolRegistry([meddle], workspace=root) as tools:
        result = tools.execute("meddle", {})

    assert not result.success
    assert "Cannot change .git/config: it is protected" in result.message
    assert look(root) == before


def test_the_user_can_allow_it(root: Path, engine: str):
    with HostFilesystem(root, unprotected=[".git/config", "wink.toml"]) as fs:
        fs.write(".git/config", "[core]\n")
        fs.write("sub/wink.toml", "x = 1\n")
        fs.run("echo '[user]' >> .git/config", check=True)
        with pytest.raises(ProtectedPath):
            fs.write("sub/.git/config", EVIL)
        with pytest.raises(ProtectedPath):
            fs.write(".git/hooks/pre-commit", EVIL)

    assert (root / ".git/config").read_text() == "[core]\n[user]\n"


@needs_git
def test_git_itself_works(tmp_path: Path, engine: str):
    """Committing, branching, merging, stashing and collecting garbage change no settings."""
    root = tmp_path / "repo"
    root.mkdir()
    env = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        **{
            f"GIT_{who}_{what}": "x@example.org"
            for who in ("AUTHOR", "COMMITTER")
            for what in ("NAME", "EMAIL")
        },
    }
    for words in (["init", "-q", "-b", "main"], ["commit", "-q", "--allow-empty", "-m", "first"]):
        subprocess.run(["git", *words], cwd=root, env=env, check=True)
    script = """set -e
    echo one > a; git add a; git commit -qm one
    git checkout -qb config; echo two > a; git commit -qam two
    git checkout -q main; git merge -q config; git branch -d config
    echo three > a; git stash -q; git stash pop -q; git commit -qam three
    git tag -a v1 -m v1; git gc -q; git reset -q --hard HEAD~1; git status"""
    with HostFilesystem(root) as fs:
        done = fs.run(["sh", "-c", script], env=env, check=True)

        assert done.kept
        with pytest.raises(ProtectedPath):
            fs.run(["git", "config", "core.fsmonitor", "evil"], env=env)
        with pytest.raises(ProtectedPath):
            fs.run(["git", "init", "-q", "new"], env=env)
        with pytest.raises(ProtectedPath):
            fs.run(["git", "init", "-q", "--bare", "new"], env=env)


# A repository out of parts, each of which is harmless without the others

HALVES = {
    "sub/config": EVIL,
    "sub/HEAD": "ref: refs/heads/main\n",
    "sub/objects/a": "x",
    "sub/refs/a": "x",
}


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """A workspace without any repository."""
    root = tmp_path / "plain"
    put(root / "a.txt", "a\n")
    return root


def write_some(fs: HostFilesystem, *names: str) -> None:
    for name in names:
        fs.write(f"sub/{name}", HALVES[f"sub/{name}"])


def is_repository(root: Path) -> bool:
    return all((root / "sub" / name).exists() for name in ("HEAD", "objects", "refs"))


SPLITS = [
    (("config",), ("HEAD", "objects/a", "refs/a")),
    (("HEAD", "objects/a"), ("refs/a", "config")),
    (("objects/a", "refs/a"), ("config", "HEAD")),
]


@pytest.mark.parametrize("prefer", [None, "branch"])
@pytest.mark.parametrize(("one", "other"), SPLITS[1:])
def test_a_merge_does_not_assemble_a_repository(
    plain: Path, one: tuple[str, ...], other: tuple[str, ...], prefer: Literal["branch"] | None
):
    with HostFilesystem(plain) as fs, fs.branch("half") as branch:
        write_some(branch, *one)
        branch.write("b.txt", "harmless\n")
        write_some(fs, *other)
        before = look(plain)
        with pytest.raises(ProtectedPath, match="is protected"):
            branch.merge_into(fs, prefer=prefer)
        assert look(plain) == before
        # Not for good: without these parts it is merged.
        branch.delete("sub", recursive=True)
        assert branch.merge_into(fs, prefer=prefer) == ("b.txt",)
    assert not is_repository(plain)


def test_nor_do_two_branches(plain: Path):
    with HostFilesystem(plain) as fs, fs.branch("one") as one, fs.branch("other") as other:
        write_some(one, "config", "HEAD", "objects/a")
        write_some(other, "refs/a")
        one.merge_into(fs)
        with pytest.raises(ProtectedPath):
            other.merge_into(fs)
    assert not is_repository(plain)


def test_nor_does_a_branch_that_is_moved_onto_the_workspace(plain: Path):
    with HostFilesystem(plain) as fs, fs.branch("half") as branch:
        write_some(branch, "HEAD", "objects/a")
        write_some(fs, "refs/a", "config")
        with pytest.raises(ProtectedPath):
            branch.rebase()
        assert not branch.exists("sub/refs")


@pytest.mark.parametrize(("one", "other"), SPLITS)
@pytest.mark.parametrize("on_branch", [False, True], ids=["workspace", "branch"])
def test_nor_do_concurrent_calls(
    plain: Path, one: tuple[str, ...], other: tuple[str, ...], on_branch: bool
):
    """Each sees the files as they were before both."""
    refused = 0
    with (
        HostFilesystem(plain) as fs,
        fs.branch("line") if on_branch else contextlib.nullcontext(fs) as files,
        files.gate,
    ):
        views = files.fork(), files.fork()
        for view, names in zip(views, (one, other), strict=True):
            try:
                write_some(view, *names)
                files.merge(view)
            except ProtectedPath:
                refused += 1
        assert refused == 1
        assert not all(files.exists(name) for name in HALVES)


def test_the_result_of_a_call_that_would_do_so_says_it(plain: Path):
    @wink.tool(reach="reversible", concurrent=True)
    def add(path: str, content: str, *, context: wink.ToolContext) -> str:
        """Write a file."""
        context.filesystem.write(path, content)
        return "written"

    with wink.ToolRegistry([add], workspace=plain) as tools:
        made = [{"path": path, "content": content} for path, content in HALVES.items()]
        results = [tools.execute("add", each) for each in made]

    assert [each.success for each in results] == [True, True, True, False]
    assert "Cannot change sub/refs: it is protected" in results[-1].message
    assert not is_repository(plain)


@pytest.mark.parametrize("way", ["undo", "rewind"])
def test_nor_does_an_undo(plain: Path, way: str):
    with HostFilesystem(plain) as fs:
        write_some(fs, "HEAD")
        last = fs.history()[-1].call_id
        fs.delete("sub/HEAD")
        gone = fs.history()[-1].call_id
        write_some(fs, "objects/a", "refs/a", "config")
        before = look(plain)
        with pytest.raises(ProtectedPath, match="is protected"):
            fs.undo(gone)
        assert look(plain) == before
        if way == "rewind":  # undoes what came later as well
            assert fs.revert_to(last) == ()
            assert os.listdir(plain / "sub") == ["HEAD"]


def test_nor_an_undo_after_the_user_has_made_one(plain: Path):
    with HostFilesystem(plain) as fs:
        fs.write("sub/hooks/pre-commit", EVIL)
        fs.delete("sub/hooks/pre-commit")
        for name in ("HEAD", "objects/a", "refs/a"):
            put(plain / "sub" / name, HALVES[f"sub/{name}"])
        with pytest.raises(ProtectedPath):
            fs.undo(fs.history()[-1].call_id)
    assert not (plain / "sub/hooks/pre-commit").exists()


@pytest.mark.parametrize("name", ["HEAD", "refs", "objects"])
def test_an_undo_restores_a_part_of_the_users_own_repository(
    root: Path, fs: HostFilesystem, name: str
):
    before = look(root)
    fs.delete(f"bare.git/{name}", recursive=True)
    assert fs.undo(fs.history()[-1].call_id) == ()
    assert {p: s.content for p, s in look(root).items()} == {
        p: s.content for p, s in before.items()
    }


def test_an_undo_does_not_restore_it_around_other_settings(plain: Path):
    for name in ("HEAD", "objects/a", "refs/a"):
        put(plain / "sub" / name, HALVES[f"sub/{name}"])
    with HostFilesystem(plain) as fs:
        fs.delete("sub/HEAD")
        gone = fs.history()[-1].call_id
        write_some(fs, "config")
        with pytest.raises(ProtectedPath):
            fs.undo(gone)
        fs.undo(fs.history()[-1].call_id, gone)
    assert is_repository(plain)
    assert not (plain / "sub/config").exists()


def test_a_fetched_branch_does_not_assemble_a_repository(plain: Path, tmp_path: Path):
    objects = LocalObjects(tmp_path / "objects")
    with HostFilesystem(plain) as fs:
        with fs.branch("half") as branch:
            write_some(branch, "HEAD", "objects/a")
            lines = BranchUpload(branch, objects).pending()
        write_some(fs, "refs/a", "config")
    with pytest.raises(ProtectedPath):
        unpack_branch(plain, "fetched", lines, objects).close()
    assert "fetched" not in [each.name for each in branches_of(plain)]


def test_a_merge_holds_to_the_protection_of_the_workspace(plain: Path):
    """Not only to that of the branch, which may have been made under other rules."""
    with HostFilesystem(plain) as fs, fs.branch("free", unprotected=["**"]) as branch:
        branch.write(".git/hooks/pre-commit", EVIL)
        with pytest.raises(ProtectedPath):
            branch.merge_into(fs)
    assert not (plain / ".git").exists()
    with (
        HostFilesystem(plain, unprotected=["**"]) as fs,
        Branch.open(plain, "free", unprotected=["**"]) as branch,
    ):
        branch.merge_into(fs)
    assert (plain / ".git/hooks/pre-commit").exists()


# Our own code


@pytest.fixture
def ours(tmp_path: Path) -> Installed:
    return Installed(tmp_path)


def test_our_own_code_in_the_workspace_is_out_of_reach_of_file_tools(ours: Installed):
    before = look(ours.root)
    ours.run("""
with HostFilesystem(root) as fs:
    launcher = f"{place}/contrib/tools/sandbox/launcher.py"
    refused(lambda: fs.write(launcher, "evil"))
    refused(lambda: fs.write(f"{place}/contrib/tools/__pycache__/asteval.cpython-311.pyc", "evil"))
    refused(lambda: fs.write(f"{place}/../sitecustomize.py", "evil"))
    refused(lambda: fs.write(f"{place}/../evil.pth", "import evil"))
    refused(lambda: fs.write("tools/.venv/pyvenv.cfg", "home = /tmp"))
    refused(lambda: fs.delete("tools/.venv/bin/python"))
    refused(lambda: fs.delete("tools", recursive=True))
    refused(lambda: fs.move("tools", "elsewhere"))
    refused(lambda: fs.move("tools/.venv", "elsewhere"))
    refused(lambda: fs.copy(launcher, f"{place}/new.py"))
    (root / "link").symlink_to("tools/.venv")
    refused(lambda: fs.write(launcher.replace("tools/.venv", "link"), "evil"))
    os.link(root / launcher, root / "twin")
    refused(lambda: fs.write("twin", "evil"))
    (root / "link").unlink(); (root / "twin").unlink()
    fs.write("tools/mine.py", "mine")
    fs.delete("tools/mine.py")
""")
    after = look(ours.root)
    assert {path: seen.content for path, seen in before.items()} == {
        path: seen.content for path, seen in after.items()
    }


@pytest.mark.parametrize("overlay", [True, False])
def test_nor_do_commands_without_a_sandbox_change_it(ours: Installed, overlay: bool):
    ours.run(f"""
import weakincentives.filesystem.commands as commands
if not {overlay}:
    commands.find_way = lambda *_: "none here"
with HostFilesystem(root) as fs:
    launcher = f"{{place}}/contrib/tools/sandbox/launcher.py"
    for script in (f"echo evil >> {{launcher}}", "mv tools elsewhere", "rm -rf tools",
                   f"echo evil > {{place}}/../evil.pth", f"ln {{launcher}} x; echo evil >> x",
                   "rm tools/.venv/bin/python; cp /bin/sh tools/.venv/bin/python"):
        refused(lambda: fs.run(script))
    assert "evil" not in (root / launcher).read_text()
    assert fs.run("echo fine > tools/mine.py", check=True).kept
""")
    assert (ours.root / "tools/mine.py").read_text() == "fine\n"


@pytest.mark.parametrize("target", ["tools/.venv", "tools", "tools/.venv/bin"])
def test_a_link_to_our_environment_cannot_be_replaced(ours: Installed, target: str):
    """The user starts us through it: who puts a directory in its place decides what is run."""
    (ours.root / ".venv").symlink_to(target)
    (ours.root / "data").symlink_to("/usr/share")
    ours.run("""
with HostFilesystem(root) as fs:
    refused(lambda: fs.delete(".venv"))
    refused(lambda: fs.move(".venv", "elsewhere"))
    refused(lambda: fs.run("rm .venv && mkdir -p .venv/bin && echo evil > .venv/bin/wink"))
    refused(lambda: fs.run("ln -sfn own .venv"))
    fs.delete("data")
""")
    assert os.readlink(ours.root / ".venv") == target


@pytest.mark.parametrize("overlay", [True, False])
def test_a_project_installed_beside_us_does_not_decide_what_we_start_with(
    ours: Installed, overlay: bool
):
    """Its sources are where Python looks for ``sitecustomize``, before any code of ours."""
    (ours.packages / "project.pth").write_text(f"{ours.root}/src\n")
    put(ours.root / "src/a.py", "a = 1\n")
    put(ours.root / "evil/sitecustomize.py", "print('planted')\n")

    said = ours.run(f"""
import weakincentives.filesystem.commands as commands
if not {overlay}:
    commands.find_way = lambda *_: "none here"
with HostFilesystem(root) as fs:
    for name in ("sitecustomize.py", "sitecustomize.pyc", "usercustomize/__init__.py"):
        refused(lambda: fs.write(f"src/{{name}}", "evil"))
    refused(lambda: fs.copy("evil/sitecustomize.py", "src/sitecustomize.py"))
    for script in ("cp evil/* src", "mv src old; mv evil src", "mv src old; ln -s evil src"):
        refused(lambda: fs.run(script))
    assert fs.run("rm -r src; mkdir -m 700 src; echo 'a = 2' > src/a.py", check=True).kept
    fs.write("src/site.py", "x")
    fs.write("elsewhere/sitecustomize.py", "x")
with HostFilesystem(root, unprotected=["src/sitecustomize.py"]) as fs:
    fs.write("src/sitecustomize.py", "print('mine')\\n")
""")

    assert said == ""
    own = Path(sysconfig.get_path("stdlib"), "sitecustomize.py")  # as Debian's: it comes first
    assert ours.run("") == ("" if own.exists() else "mine\n")


def test_a_refusal_says_who_could_allow_it(ours: Installed):
    (ours.root / "wink.toml").write_text("")
    said = ours.run("""
with HostFilesystem(root, unprotected=["tools/**"]) as fs:
    for path in ("tools/.venv/pyvenv.cfg", "wink.toml"):
        try:
            fs.write(path, "evil")
        except ProtectedPath as error:
            print(error)
""")
    assert said.splitlines() == [
        "Cannot change tools/.venv: it is protected. Leave it as it is; it belongs to wink, and no"
        " setting allows it",
        "Cannot change wink.toml: it is protected. Leave it as it is; only the user can allow it",
    ]


def test_nor_a_link_to_one_that_lies_elsewhere(tmp_path: Path):
    (tmp_path / "work").mkdir()
    (tmp_path / "work/.venv").symlink_to(sys.prefix)
    with HostFilesystem(tmp_path / "work") as fs, pytest.raises(ProtectedPath):
        fs.run("rm .venv && mkdir -p .venv/bin && echo evil > .venv/bin/wink")

    assert os.readlink(tmp_path / "work/.venv") == sys.prefix


def test_the_state_directory_is_neither_changed_nor_read(ours: Installed):
    state = ours.root / "home/.state"
    ours.run(
        """
from weakincentives.core.state import Seals
Seals("test")
with HostFilesystem(root, store=root.parent / "store") as fs:
    assert not fs.exists("home/.state/wink/key")
    assert [each.path for each in fs.list("home/.state")] == []
    assert fs.glob("**/key") == ()
    assert not any(".state" in str(each) for each in fs.search("key"))
    key = "home/.state/wink/key"
    for attempt in (lambda: fs.read(key), lambda: fs.list("home/.state/wink"),
                    lambda: fs.read_bytes(key), lambda: fs.stat("home/.state/wink"),
                    lambda: fs.copy(key, "copied")):
        try:
            attempt()
        except NoSuchFile:
            continue
        raise SystemExit("it can be read")
    (root / "link").symlink_to("home/.state/wink/key")
    try:
        fs.read("link")
        raise SystemExit("it can be read through a link")
    except NoSuchFile:
        pass
    refused(lambda: fs.copy("home", "copied"))
    refused(lambda: fs.write("home/.state/wink/key", "mine"))
    refused(lambda: fs.delete("home", recursive=True))
    refused(lambda: fs.move("home/.state", "elsewhere"))
""",
        XDG_STATE_HOME=str(state),
    )
    assert (state / "wink/key").stat().st_size == 32
