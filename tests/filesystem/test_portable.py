"""Workspaces that move: stored trees, git bases, and branches that continue elsewhere."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import portable_child
import pytest
from forks import processes
from hypothesis import given, settings
from hypothesis import strategies as st
from trees import look, make_repository, plant, put, run_git

from chance import SEED, THOROUGH, is_time_left
from weakincentives.durable import LocalObjects
from weakincentives.errors import (
    AlreadyExists,
    ContentDamaged,
    FilesystemError,
    HistoryDamaged,
    MergeConflict,
    ObjectMissing,
    StorageUnavailable,
)
from weakincentives.filesystem import (
    Base,
    Branch,
    BranchUpload,
    HostFilesystem,
    branches_of,
    git_base,
    line_keys,
    materialize,
    store_tree,
    stored_keys,
    unpack_branch,
)
from weakincentives.filesystem.layers import walk, xattrs_at

pytestmark = pytest.mark.usefixtures("forkserver")

ON_BRANCHES = settings(max_examples=max(10, settings.default.max_examples // 5))


class CountedObjects(LocalObjects):
    """Knows what it was asked to store and to return."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.stored: list[int] = []
        self.read = 0
        self.fails = False

    def put(self, key: str, data: bytes) -> None:
        if self.fails:
            raise StorageUnavailable("the bucket is full")
        self.stored.append(len(data))
        super().put(key, data)

    def get(self, key: str) -> bytes:
        self.read += 1
        return super().get(key)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("repository") / "repo"
    make_repository(directory)
    return directory


@pytest.fixture
def workspace(tmp_path: Path, repository: Path) -> Path:
    plant(tmp_path / "origin", repository)
    return tmp_path / "origin" / "workspace"


@pytest.fixture
def objects(tmp_path: Path) -> CountedObjects:
    return CountedObjects(tmp_path / "objects")


def moved(root: Path) -> dict[str, Any]:
    """Look at a directory, but not at how many names its files have outside of it."""
    return {path: seen._replace(links=0) for path, seen in look(root).items()}


# Trees


def test_a_stored_tree_is_created_exactly_elsewhere(
    workspace: Path, tmp_path: Path, objects: CountedObjects
) -> None:
    put(workspace / "large", os.urandom(9 << 20) + b"\0" * (5 << 20))
    base = store_tree(workspace, objects)

    there = materialize(base, tmp_path / "there" / "w", objects)

    assert moved(there) == moved(workspace)
    assert os.listdir(there.parent) == ["w"]
    holes = (there / "large").stat()
    assert holes.st_blocks * 512 < holes.st_size


@pytest.mark.heavy
def test_storing_again_sends_only_what_has_changed(
    workspace: Path, objects: CountedObjects
) -> None:
    for number in range(3000):
        put(workspace / "many" / str(number), os.urandom(50))
    first = store_tree(workspace, objects)
    objects.stored.clear()

    again = store_tree(workspace, objects)
    assert (again.tree, objects.stored) == (first.tree, [])

    put(workspace / "many" / "7", "changed")
    changed = store_tree(workspace, objects)

    assert changed.tree != first.tree
    assert sum(objects.stored) < 150_000  # of 600,000: a content, a part of the manifest, the top


def test_a_tree_is_stored_again_where_an_object_is_missing(
    workspace: Path, tmp_path: Path, objects: CountedObjects
) -> None:
    store_tree(workspace, objects)

    other = LocalObjects(tmp_path / "other")
    there = materialize(store_tree(workspace, other), tmp_path / "w", other)

    assert moved(there) == moved(workspace)


def test_what_git_ignores_stays_at_home_if_asked(
    workspace: Path, tmp_path: Path, objects: CountedObjects
) -> None:
    base = store_tree(workspace, objects, gitignore=True)

    there = materialize(base, tmp_path / "w", objects)

    assert not (there / ".env").exists()
    assert not (there / "node_modules").exists()
    assert (there / "d/empty").is_dir()
    assert (there / "repo/tracked.py").exists()


def test_a_base_is_json(workspace: Path, objects: CountedObjects) -> None:
    base = store_tree(workspace, objects)

    assert Base.decode(json.loads(json.dumps(base.encode()))) == base
    for wrong in ({"kind": "zip"}, {"kind": "tree", "serial": "x"}, {"kind": "tree", "a": 1}, {}):
        with pytest.raises(ValueError, match="malformed base"):
            Base.decode(wrong)


def test_nothing_is_put_over_another_directory(
    workspace: Path, tmp_path: Path, objects: CountedObjects
) -> None:
    base = store_tree(workspace, objects)
    there = tmp_path / "there"
    put(there / "mine", "keep")

    with pytest.raises(AlreadyExists, match="exists already"):
        materialize(base, there, objects)
    assert look(there)["mine"].content == b"keep"

    (there / "mine").unlink()
    materialize(base, there, objects)
    assert moved(there) == moved(workspace)


def test_programs_get_no_privileges_by_being_moved(tmp_path: Path, objects: CountedObjects) -> None:
    put(tmp_path / "w" / "program", "#!/bin/sh\n", 0o6755)

    there = materialize(store_tree(tmp_path / "w", objects), tmp_path / "there", objects)

    assert (there / "program").stat().st_mode & 0o7777 == 0o755


def test_a_full_storage_loses_nothing(
    workspace: Path, tmp_path: Path, objects: CountedObjects
) -> None:
    objects.fails = True
    with pytest.raises(StorageUnavailable, match="full"):
        store_tree(workspace, objects)
    branch = Branch.create(workspace, "x")
    branch.write("new", "text")
    upload = BranchUpload(branch, objects)
    with pytest.raises(StorageUnavailable, match="full"):
        upload.pending()
    objects.fails = False

    there = materialize(store_tree(workspace, objects), tmp_path / "w", objects)
    lines = upload.pending()
    branch.close()

    assert moved(there) == moved(workspace)
    with contextlib.closing(unpack_branch(there, "x", lines, objects)) as other:
        assert other.read("new") == "text"


# Planted objects and manifests


def stored(objects: LocalObjects, value: object) -> str:
    """Store a value as an object, like one of ours."""
    data = b"\0" + (value if isinstance(value, bytes) else json.dumps(value).encode())
    key = hashlib.sha256(data).hexdigest()
    objects.put(key, data)
    return key


def entry(kind: str, **given: Any) -> list[Any]:
    values = {"mode": 0o755 if kind == "directory" else 0o644, "size": 0, "ino": 0} | given
    digest = hashlib.sha256(values.get("data", b"")).hexdigest() if kind == "file" else None
    return [
        kind, values["mode"], 0, -1, -1, [], values["size"], values["ino"], 1,
        values.get("target"), values.get("digest", digest), 0,
    ]  # fmt: skip


def tree_of(objects: LocalObjects, *rows: tuple[str, list[Any], list[Any]]) -> Base:
    group = stored(objects, [("", entry("directory"), []), *rows])
    return Base(kind="tree", tree=stored(objects, {"wink_tree": 1, "groups": [group]}))


def _planted(objects: LocalObjects) -> dict[str, Base]:
    data = stored(objects, b"planted")
    full = [(data, 0, 7)]
    file = entry("file", size=7, data=b"planted")
    link = entry("link", target="../outside")
    bomb = b"\1" + zlib.compress(b"\0" * (64 << 20))
    key = hashlib.sha256(bomb).hexdigest()
    objects.put(key, bomb)
    return {
        "up": tree_of(objects, ("../outside/x", file, full)),
        "inner up": tree_of(objects, ("d", entry("directory"), []), ("d/../../x", file, full)),
        "absolute": tree_of(objects, ("/tmp/wink-planted", file, full)),
        "null": tree_of(objects, ("a\0b", file, full)),
        "through a link": tree_of(objects, ("l", link, []), ("l/x", file, full)),
        "through a later link": tree_of(objects, ("l/x", file, full), ("l", link, [])),
        "link over a directory": tree_of(
            objects, ("l", entry("directory"), []), ("l", link, []), ("l/x", file, full)
        ),
        "twice": tree_of(objects, ("x", file, full), ("x", link, [])),
        "below a file": tree_of(objects, ("x", file, full), ("x/y", file, full)),
        "no directory": tree_of(objects, ("no/x", file, full)),
        "root is a file": tree_of(objects, ("", file, full)),
        "a device": tree_of(objects, ("x", entry("other"), [])),
        "outside of an object": tree_of(objects, ("x", file, [(data, 3, 7)])),
        "negative": tree_of(objects, ("x", file, [(data, -7, 7)])),
        "wrong size": tree_of(objects, ("x", entry("file", size=3), full)),
        "wrong content": tree_of(objects, ("x", entry("file", size=7), full)),
        "no key": tree_of(objects, ("x", file, [("../x", 0, 7)])),
        "not JSON": Base(kind="tree", tree=data),
        "not a tree": Base(kind="tree", tree=stored(objects, [1])),
        "another version": Base(kind="tree", tree=stored(objects, {"wink_tree": 9, "groups": []})),
        "no row": tree_of(objects, (1, 2)),  # type: ignore[arg-type]
        "a bomb": Base(kind="tree", tree=key),
    }


PLANTED = tuple(_planted(LocalObjects(tempfile.mkdtemp(prefix="wink-test-"))))


@pytest.mark.heavy
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_tree_is_refused(name: str, tmp_path: Path, objects: CountedObjects) -> None:
    (tmp_path / "outside").mkdir()
    base = _planted(objects)[name]
    before = sorted(os.listdir(tmp_path))

    with pytest.raises(HistoryDamaged):
        materialize(base, tmp_path / "there", objects)

    assert sorted(os.listdir(tmp_path)) == before
    assert os.listdir(tmp_path / "outside") == []
    assert not os.path.lexists("/tmp/wink-planted")


def test_whatever_storage_returns_is_checked(
    workspace: Path, tmp_path: Path, objects: CountedObjects
) -> None:
    base = store_tree(workspace, objects)
    places = [path for path in objects.directory.rglob("*") if path.is_file()]
    for number, place in enumerate(places):
        kept = place.read_bytes()
        place.write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))
        with pytest.raises(ContentDamaged):
            materialize(base, tmp_path / str(number), objects)
        place.unlink()
        with pytest.raises(ObjectMissing):
            materialize(base, tmp_path / str(number), objects)
        place.write_bytes(kept)
    assert not any((tmp_path / str(number)).exists() for number in range(len(places)))


def test_planted_lines_are_refused(tmp_path: Path, objects: CountedObjects) -> None:
    root = tmp_path / "w"
    put(root / "a", "text")
    branch = Branch.create(root, "x")
    branch.write("a", "new")
    (line,) = BranchUpload(branch, objects).pending()
    branch.close()
    values = json.loads(line)

    def planted(**given: object) -> str:
        return json.dumps({**values, **given})

    step = values["steps"][0]
    wrong = [
        "{}",
        "[]",
        "null",
        "not JSON",
        planted(contents={}),
        planted(contents={"../x": []}),
        planted(contents={key: [["x", 0, 3]] for key in values["contents"]}),
        planted(steps=[["write", "../a", *step[2:]]]),
        planted(steps=[["write", "/a", *step[2:]]]),
        planted(steps=[["__init__", *step[1:]]]),
        planted(steps=[["back", "", None, None, None, 0, 5]]),
        planted(steps=[["back", "", None, None, None, 0, -1]]),
        planted(was=[["../x", None]]),
    ]
    for each in wrong:
        with pytest.raises(HistoryDamaged, match="invalid"):
            unpack_branch(root, "planted", [each], objects)
    assert [each.name for each in branches_of(root)] == ["x"]
    with pytest.raises(HistoryDamaged):
        swapped = {key: values["contents"][min(values["contents"])] for key in values["contents"]}
        unpack_branch(root, "planted", [planted(contents=swapped)], objects)
    unpack_branch(root, "planted", [line], objects).close()


# Branches

PATHS = ("a", "b", "new", "d/a", "d/run.sh", "d/twin", "twin", "e/shared", "e/x/y", "noted", "to_a")
DIRECTORIES = ("d", "e", "hollow", "made/here")
SCRIPTS = (
    "ln -f d/twin third; echo more >> third",
    "echo one > p; ln -f p q; echo two >> q",
    "ln -sf a sym; touch -d '2001-02-03 04:05:06' a b",
    "chmod 640 a; chmod 750 d; mkfifo fifo",
    "rm -rf d/empty; mkdir -p deep/er; cp -a d/twin deep/er/copy",
    "mv d moved; mkdir d; echo x > d/a",
)
CHANGES = st.one_of(
    st.tuples(st.just("write"), st.sampled_from(PATHS), st.sampled_from(["", "x\n", "large"])),
    st.tuples(st.just("append"), st.sampled_from(PATHS), st.just("appended\n")),
    st.tuples(st.just("delete"), st.sampled_from((*PATHS, *DIRECTORIES))),
    st.tuples(st.just("move"), st.sampled_from((*PATHS, *DIRECTORIES)), st.sampled_from(PATHS)),
    st.tuples(
        st.just("copy"), st.sampled_from((*PATHS, *DIRECTORIES)), st.sampled_from(("c", "d/c", "e"))
    ),
    st.tuples(st.just("mkdir"), st.sampled_from(DIRECTORIES)),
    st.tuples(st.just("set_readonly"), st.sampled_from(PATHS)),
    st.tuples(st.just("run"), st.sampled_from(SCRIPTS)),
    st.tuples(st.just("undo")),
)


def change(branch: Branch, what: tuple[str, ...]) -> None:
    """Make a change, if it is possible."""
    method, *arguments = what
    with contextlib.suppress(FilesystemError, OSError):
        if method == "undo":
            if branch.history():
                branch.undo(branch.history()[-1].call_id)
        elif arguments[-1] == "large":
            branch.write(arguments[0], "large\n" * 20_000)
        elif method == "delete":
            branch.delete(arguments[0], recursive=True)
        elif method == "set_readonly":
            branch.set_readonly(arguments[0], not branch.is_readonly(arguments[0]))
        else:
            getattr(branch, method)(*arguments)


def states(branch: Branch) -> list[dict[str, object]]:
    """Return everything that can be seen of the branch, before its commits and after each."""
    return [state(branch.at(number)) for number in range(len(branch.history()) + 1)]


def state(files: Any) -> dict[str, object]:
    found = dict(walk(files, [()]))
    names: dict[object, set[str]] = {}
    for parts, node in found.items():
        if node.kind == "file" and node.links > 1:
            names.setdefault(node.file, set()).add("/".join(parts))
    return {
        "/".join(parts): (
            node.kind,
            node.mode,
            node.mtime_ns,
            files.read(parts) if node.kind == "file" else None,
            files.link_target(parts) if node.kind == "link" else None,
            xattrs_at(files, parts) if node.kind in ("file", "directory") else None,
            sorted(names[node.file]) if len(names.get(node.file, ())) > 1 else None,
        )
        for parts, node in found.items()
    }


def send(branch: Branch, objects: LocalObjects, lines: list[str]) -> None:
    upload = BranchUpload(branch, objects, saved=len(lines))
    new = upload.pending()
    assert upload.pending() == new
    upload.saved(len(new))
    assert upload.pending() == []
    lines += new


@pytest.mark.heavy
@ON_BRANCHES
@given(
    st.lists(CHANGES, min_size=1, max_size=8),
    st.lists(CHANGES, max_size=4),
    st.booleans(),
)
def test_a_branch_continues_elsewhere_and_comes_back(
    repository: Path, first: list[tuple[str, ...]], second: list[tuple[str, ...]], at_home: bool
) -> None:
    with tempfile.TemporaryDirectory(prefix="wink-test-") as folder:
        place = Path(folder)
        plant(place / "origin", repository)
        root, objects = place / "origin" / "workspace", LocalObjects(place / "objects")
        base, lines = store_tree(root, objects), list[str]()
        begun = root if at_home else materialize(base, place / "one" / "w", objects)
        branch = Branch.create(begun, "one")
        for each in first:
            change(branch, each)
        send(branch, objects, lines)
        expected = states(branch)
        branch.close()
        branch = Branch.open(begun, "one")
        assert states(branch) == expected
        branch.close()

        there = materialize(base, place / "two" / "w", objects)
        branch = unpack_branch(there, "two", lines, objects)
        assert states(branch) == expected
        for each in second:
            change(branch, each)
        send(branch, objects, lines)
        expected = states(branch)
        branch.close()
        branch = Branch.open(there, "two")
        assert states(branch) == expected
        branch.close()

        branch = unpack_branch(root, "back", lines, objects, serial=base.serial, moment=base.moment)
        # Of a file with names outside of the workspace, more can be told at home.
        assert states(branch)[-1].keys() == expected[-1].keys()
        assert _contents(states(branch)) == _contents(expected)
        with HostFilesystem(root) as fs:
            branch.merge_into(fs)
        branch.close()
        now = {path: seen for path, seen in look(root).items() if seen.kind == "file"}
        assert {path: seen.content for path, seen in now.items()} == {
            path: seen[3]
            for path, seen in expected[-1].items()
            if seen[0] == "file"  # type: ignore[index]
        }


def _contents(found: list[dict[str, object]]) -> object:
    return [{path: seen[:2] + seen[3:6] for path, seen in each.items()} for each in found]  # type: ignore[index]


def test_what_others_changed_meanwhile_is_a_conflict(
    workspace: Path, tmp_path: Path, objects: CountedObjects
) -> None:
    base = store_tree(workspace, objects)
    there = materialize(base, tmp_path / "there", objects)
    branch = Branch.create(there, "x")
    branch.write("a", "by the branch")
    branch.write("d/a", "by the branch, too")
    lines = BranchUpload(branch, objects).pending()
    branch.close()
    with HostFilesystem(workspace) as fs:
        fs.write("d/a", "by another call")

    back = unpack_branch(workspace, "x", lines, objects, serial=base.serial, moment=base.moment)
    with HostFilesystem(workspace) as fs:
        with pytest.raises(MergeConflict) as refused:
            back.merge_into(fs)
        assert refused.value.paths == ("d/a",) or list(refused.value.paths) == ["d/a"]
        back.merge_into(fs, prefer="workspace")
        assert (fs.read("a"), fs.read("d/a")) == ("by the branch", "by another call")
    back.close()


def test_a_run_continues_on_its_own_machine_from_what_was_saved(
    workspace: Path, objects: CountedObjects
) -> None:
    """The workspace has moved on, and the local branch is gone."""
    branch = Branch.create(workspace, "first")
    branch.write("a", "on the branch")
    upload = BranchUpload(branch, objects)
    lines = upload.pending()
    upload.saved(len(lines))
    branch.write("b", "not saved")
    point = branch.info
    branch.close()
    with HostFilesystem(workspace) as fs:
        fs.write("d/a", "by another call")

    again = unpack_branch(workspace, "2", lines, objects, serial=point.base, moment=point.moment)

    assert (again.read("a"), again.read("b"), again.read("d/a")) == ("on the branch", "", "in d\n")
    with HostFilesystem(workspace) as fs:
        again.merge_into(fs)
        assert (fs.read("a"), fs.read("d/a")) == ("on the branch", "by another call")
    again.close()


def test_an_upload_costs_what_is_new(workspace: Path, objects: CountedObjects) -> None:
    branch = Branch.create(workspace, "x")
    upload = BranchUpload(branch, objects)
    branch.write_bytes("large", os.urandom(1 << 20))
    upload.saved(len(upload.pending()))
    objects.stored.clear()

    branch.write("small", "text")
    branch.move("large", "elsewhere")
    lines = upload.pending()

    assert len(lines) == 2
    assert sum(objects.stored) < 1000
    assert upload.pending() == lines
    branch.close()


def test_a_rebased_branch_needs_another_base(workspace: Path, objects: CountedObjects) -> None:
    branch = Branch.create(workspace, "x")
    upload = BranchUpload(branch, objects)
    branch.write("a", "text")
    branch.rebase()

    with pytest.raises(FilesystemError, match="rebased"):
        upload.pending()
    branch.close()


def test_the_keys_of_bases_and_branches_are_all_that_is_stored(
    workspace: Path, objects: CountedObjects
) -> None:
    base = store_tree(workspace, objects)
    branch = Branch.create(workspace, "x")
    branch.write("a", "text")
    lines = BranchUpload(branch, objects).pending()
    branch.close()

    needed = stored_keys(objects, base) | line_keys(lines)

    assert needed == portable_child.keys(objects.ages())
    assert stored_keys(objects, Base(kind="git", commit="0" * 40)) == set()


# Kills


def _killed_until_done(tmp_path: Path, seed: int) -> int:
    root = tmp_path / "workspace"
    for number in range(30):
        put(root / "d" / str(number), os.urandom(100 + number))
    put(root / "large", os.urandom(1 << 20))
    expected = look(root)
    kills = 0
    while True:
        seed += 1
        child = processes.Process(target=portable_child.move_and_die, args=(tmp_path, seed))
        child.start()
        child.join()
        code = child.exitcode
        child.close()
        assert code in (0, -signal.SIGKILL)
        for place in ("there", "last"):
            if (tmp_path / place / "workspace").exists():
                assert look(tmp_path / place / "workspace") == expected
        if code == 0:
            break
        kills += 1
    for place in ("there", "last"):
        assert os.listdir(tmp_path / place) == ["workspace"]
    branch = Branch.open(tmp_path / "last" / "workspace", "moved")
    assert [branch.read(f"made/{n}") for n in range(6)] == [f"text {n}\n" * 1000 for n in range(6)]
    assert len(branch.history()) == 6
    branch.close()
    return kills


@pytest.mark.parametrize("seed", [1000, 2000])
def test_a_move_that_is_killed_at_any_instant_is_exact_in_the_end(
    tmp_path: Path, seed: int
) -> None:
    assert _killed_until_done(tmp_path, seed) > 0


@pytest.mark.heavy
def test_moves_that_are_killed_again_and_again_are_exact(tmp_path: Path) -> None:
    """A thousand times in `make torture`."""
    kills, turn = 0, 0
    while kills < (1000 if THOROUGH else 60) and is_time_left():
        turn += 1
        kills += _killed_until_done(tmp_path / str(turn), SEED + turn * 10_000)
        shutil.rmtree(tmp_path / str(turn))


# Two machines


MACHINE = """
set -e
mount -t tmpfs tmpfs "$HOME_OF_MACHINE"
for hidden in $HIDDEN; do mount -t tmpfs tmpfs "$hidden"; done
exec "$@"
"""
BEGIN = """
import json, sys
from pathlib import Path
from weakincentives.durable import LocalObjects
from weakincentives.filesystem import Base, Branch, BranchUpload, materialize, unpack_branch
shared, here = Path(sys.argv[1]), Path(sys.argv[2])
assert not list(here.iterdir()), "nothing of the other machine"
assert Path("/proc/net/dev").read_text().count(":") == 1, "no network but loopback"
objects = LocalObjects(shared / "objects")
base = Base.decode(json.loads((shared / "base").read_text()))
root = materialize(base, here / "w", objects)
lines = (shared / "lines").read_text().splitlines()
branch = unpack_branch(root, "moved", lines, objects)
upload = BranchUpload(branch, objects, saved=len(lines))
branch.write(f"by-{sys.argv[3]}", branch.read("a") + sys.argv[3])
branch.run("ln d/twin other; echo " + sys.argv[3] + " >> other")
with open(shared / "lines", "a") as file:
    file.writelines(line + "\\n" for line in upload.pending())
branch.close()
"""


def test_a_branch_moves_between_machines(workspace: Path, tmp_path: Path) -> None:
    """Each has mounts, a network and directories of its own; only the storage is shared."""
    if subprocess.run(["unshare", "--mount", "--net", "true"], capture_output=True).returncode:
        pytest.skip("this user cannot make mount and network namespaces")
    shared, home = tmp_path / "shared", tmp_path / "home"
    home.mkdir()
    objects = LocalObjects(shared / "objects")
    base = store_tree(workspace, objects)
    (shared / "base").write_text(json.dumps(base.encode()))
    (shared / "lines").touch()
    for name in ("one", "two"):
        done = subprocess.run(
            [
                *("unshare", "--mount", "--net", "--propagation", "private"),
                *("sh", "-c", MACHINE, "sh"),
                *(sys.executable, "-c", BEGIN, str(shared), str(home), name),
            ],
            env=os.environ
            | {
                "HOME_OF_MACHINE": str(home),
                "HIDDEN": str(workspace.parent),
                "XDG_STATE_HOME": str(home / "state"),
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            },
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
    assert os.listdir(home) == []

    lines = (shared / "lines").read_text().splitlines()
    branch = unpack_branch(workspace, "b", lines, objects, serial=base.serial, moment=base.moment)
    with HostFilesystem(workspace) as fs:
        branch.merge_into(fs)
        assert (fs.read("by-one"), fs.read("by-two")) == ("a\none", "a\ntwo")
        assert fs.read("twin") == fs.read("other") == "one file, two names\none\ntwo\n"
    branch.close()
    assert len({(workspace / name).stat().st_ino for name in ("twin", "other", "d/twin")}) == 1


# Git


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    root = tmp_path / "clone"
    make_repository(root)
    put(root / "bin/run", "#!/bin/sh\n", 0o755)
    (root / "link").symlink_to("tracked.py")
    run_git(root, "add", ".")
    run_git(root, "commit", "--quiet", "--message=second")
    return root


def files_of(root: Path) -> dict[str, object]:
    return {
        path: (seen.kind, seen.mode, seen.content)
        for path, seen in look(root).items()
        if seen.kind != "directory" and not path.startswith(".git/")
    }


def test_a_commit_is_a_base(clone: Path, tmp_path: Path, objects: CountedObjects) -> None:
    put(clone / ".env", "ignored")
    base = git_base(clone)
    (clone / ".env").unlink()

    there = materialize(base, tmp_path / "there", objects)

    assert files_of(there) == files_of(clone)
    assert not (there / ".git").exists()
    time = int(run_git(clone, "show", "--no-patch", "--format=%ct"))
    assert {int(seen.modified) for seen in look(there).values()} == {time * 10**9}
    assert objects.stored == []


def test_a_branch_of_a_commit_comes_back(
    clone: Path, tmp_path: Path, objects: CountedObjects
) -> None:
    base = Base.decode(git_base(clone).encode())
    there = materialize(base, tmp_path / "there", objects)
    branch = Branch.create(there, "x")
    branch.write("tracked.py", "print('elsewhere')\n")
    branch.write("new.py", "new\n")
    lines = BranchUpload(branch, objects).pending()
    branch.close()

    back = unpack_branch(clone, "x", lines, objects, serial=base.serial, moment=base.moment)
    with HostFilesystem(clone) as fs:
        assert back.merge_into(fs) == ("new.py", "tracked.py")
        assert fs.read("tracked.py") == "print('elsewhere')\n"
    back.close()


@pytest.mark.parametrize("by_url", [False, True])
def test_a_commit_comes_from_a_path_or_a_url(
    by_url: bool, clone: Path, tmp_path: Path, objects: CountedObjects
) -> None:
    first = run_git(clone, "rev-parse", "HEAD~1").strip()
    where = clone.as_uri() if by_url else str(clone)

    there = materialize(
        Base(kind="git", repository=where, commit=first), tmp_path / "there", objects
    )

    assert sorted(files_of(there)) == [".gitignore", "tracked.py"]


@pytest.mark.parametrize(
    ("differ", "message"),
    [
        (lambda root: put(root / "tracked.py", "changed"), "tracked.py differ"),
        (lambda root: put(root / "untracked", "x"), "untracked differ"),
        (lambda root: (root / "bin/run").chmod(0o644), "bin/run differ"),
        (lambda root: (root / "link").unlink(), "link differ"),
        (lambda root: shutil.rmtree(root / ".git"), "not a git checkout"),
        (
            lambda root: (
                run_git(root, "update-index", "--add", "--cacheinfo", f"160000,{'1' * 40},module")
                + run_git(root, "commit", "--quiet", "--message=module")
            ),
            "submodules",
        ),
    ],
)
def test_what_differs_from_the_commit_is_named(
    differ: Callable[[Path], object], message: str, clone: Path
) -> None:
    differ(clone)

    with pytest.raises(FilesystemError, match=message):
        git_base(clone)


def test_a_part_of_a_checkout_is_no_base(clone: Path) -> None:
    with pytest.raises(FilesystemError, match="not the top"):
        git_base(clone / "bin")


@pytest.mark.parametrize(
    ("repository", "commit", "message"),
    [
        ("", "HEAD", "not the full name"),
        ("", "1" * 40, "failed"),
        ("ext::touch /tmp/wink-planted", "1" * 40, "failed"),
        ("--upload-pack=touch /tmp/wink-planted", "1" * 40, "not the address"),
    ],
)
def test_a_commit_that_cannot_be_had_is_an_error(
    repository: str, commit: str, message: str, clone: Path, tmp_path: Path, objects: LocalObjects
) -> None:
    base = Base(kind="git", repository=repository or str(clone), commit=commit)

    with pytest.raises(FilesystemError, match=message):
        materialize(base, tmp_path / "there", objects)

    assert not (tmp_path / "there").exists()
    assert not os.path.lexists("/tmp/wink-planted")


@pytest.mark.parametrize("by_url", [False, True])
def test_nothing_of_a_hostile_repository_runs(
    by_url: bool, clone: Path, tmp_path: Path, objects: CountedObjects
) -> None:
    ran = tmp_path / "ran"
    put(clone / ".gitattributes", "* filter=evil diff=evil merge=evil\n*.py text working-tree-x\n")
    put(clone / ".gitmodules", f'[submodule "x"]\n\tpath = x\n\turl = {clone}\n\tupdate = !sh\n')
    run_git(clone, "add", ".")
    run_git(clone, "commit", "--quiet", "--message=hostile")
    evil = f"touch {ran}; cat"
    for name in (
        *("filter.evil.clean", "filter.evil.smudge", "filter.evil.process", "diff.evil.textconv"),
        *("core.fsmonitor", "core.sshCommand", "core.pager", "core.gitProxy", "core.askPass"),
        *("diff.external", "uploadpack.packObjectsHook", "credential.helper", "gpg.program"),
        *("core.alternateRefsCommand", "core.editor", "alias.status", "alias.read-tree"),
    ):
        run_git(clone, "config", name, f"!{evil}" if name.startswith("alias") else evil)
    run_git(clone, "config", "filter.evil.required", "true")
    (clone / ".git/hooks").mkdir(exist_ok=True)
    for hook in ("post-checkout", "post-index-change", "reference-transaction", "pre-auto-gc"):
        put(clone / ".git/hooks" / hook, f"#!/bin/sh\ntouch {ran}\n", 0o755)
    ran.unlink(missing_ok=True)

    base = git_base(clone, repository=clone.as_uri() if by_url else "")
    there = materialize(base, tmp_path / "there", objects)

    assert not ran.exists()
    assert files_of(there) == files_of(clone)
