"""What lies beside a workspace is never trusted for where it lies, and damage stays where it is."""

from __future__ import annotations

import json
import logging
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trees import look

from stored import damage, damage_contents
from weakincentives.core.state import SEAL_SIZE, Seals
from weakincentives.errors import (
    ContentDamaged,
    LogUnavailable,
    StoreRefused,
    WinkError,
)
from weakincentives.filesystem import HostFilesystem, Limits, WorkspaceHistory, adopt_store
from weakincentives.filesystem import history as history_module
from weakincentives.filesystem.store import location_of
from weakincentives.log import Log
from weakincentives.runtime import SavedSession, Session

ROOT = os.geteuid() == 0


@pytest.fixture
def root(tmp_path: Path) -> Path:
    place = tmp_path / "work"
    place.mkdir()
    (place / "a.txt").write_text("first\n")
    return place


def store_of(root: Path) -> Path:
    return location_of(root)


def used(root: Path) -> Path:
    """Make a few calls on a workspace; returns its store."""
    with HostFilesystem(root) as fs:
        fs.write("a.txt", "second\n")
        fs.write("dir/b.txt", "b\n")
        fs.write("a.txt", "third\n")
        fs.delete("dir", recursive=True)
    return store_of(root)


def killed(root: Path) -> None:
    """Leave a call that was killed in the middle."""
    script = """
import os, sys
from weakincentives.filesystem import HostFilesystem
view = HostFilesystem(sys.argv[1]).fork_in_place()
view.write("a.txt", "half")
view.write("new.txt", "half")
view.delete("keep", recursive=True)
os.kill(os.getpid(), 9)
"""
    (root / "keep").mkdir(exist_ok=True)
    (root / "keep" / "c.txt").write_text("the only one\n")
    done = subprocess.run([sys.executable, "-c", script, str(root)], capture_output=True, text=True)
    assert done.returncode == -9, done.stderr


KILLED = """
import os, sys
from weakincentives.filesystem import HostFilesystem
view = HostFilesystem(sys.argv[1]).fork_in_place()
view.write("a.txt", "agent\\n")
os.kill(os.getpid(), 9)
"""


@pytest.mark.heavy
@pytest.mark.parametrize("how", ["in place", "another file", "nothing"])
@pytest.mark.parametrize("names", [1, 2])
def test_what_a_person_wrote_after_a_kill_is_not_lost_whatever_its_size_and_time(
    root: Path, tmp_path: Path, how: str, names: int, caplog: pytest.LogCaptureFixture
):
    """As `cp -p`, `rsync -t` and some editors write."""
    file = root / "a.txt"
    if names == 2:
        os.link(file, tmp_path / "second name")
    done = subprocess.run([sys.executable, "-c", KILLED, str(root)], check=False)
    assert (done.returncode, file.read_text()) == (-9, "agent\n")
    status = file.stat()
    if how == "another file":
        file.unlink()
    if how != "nothing":
        file.write_text("mine!\n")
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
        assert file.stat().st_size == status.st_size

    HostFilesystem(root).close()
    left = [each.read_text() for each in store_of(root).glob("left/*")]
    if how == "nothing":
        assert (left, file.read_text(), caplog.text) == ([], "first\n", "")
    else:
        assert {file.read_text(), *left} == {"first\n", "mine!\n"}
        assert "changed by someone else since" in caplog.text


# Where it lies


@pytest.mark.parametrize(
    "name", ["tx", "lock", "left", "objects", "kept", "runs", "running", "root", "commands"]
)
def test_a_link_in_a_store_is_refused_and_not_followed(root: Path, tmp_path: Path, name: str):
    store = used(root)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    target = elsewhere / "precious"
    if name in ("lock", "root", "running"):
        target.write_text("precious")
    else:
        target.mkdir()
        (target / "n1").write_text("precious")
    place = store / name
    shutil.rmtree(place) if place.is_dir() else place.unlink(missing_ok=True)
    place.symlink_to(target)
    before = look(elsewhere)

    for look_at in (HostFilesystem, WorkspaceHistory, adopt_store):
        with pytest.raises(StoreRefused, match=r"symbolic link.*Delete the store"):
            look_at(root)

    assert look(elsewhere) == before


@pytest.mark.parametrize("inner", ["objects/ab"])
def test_a_link_deeper_in_a_store_is_refused(root: Path, tmp_path: Path, inner: str):
    store = used(root)
    (tmp_path / "elsewhere").mkdir()
    (store / inner).symlink_to(tmp_path / "elsewhere")

    with pytest.raises(StoreRefused, match="symbolic link"), HostFilesystem(root) as fs:
        fs.write("a.txt", "x")


def test_a_store_that_is_a_link_is_refused(root: Path, tmp_path: Path):
    store = used(root)
    store.rename(tmp_path / "elsewhere")
    store.symlink_to(tmp_path / "elsewhere")

    with pytest.raises(StoreRefused, match="symbolic link"):
        HostFilesystem(root)


def test_a_second_name_for_a_file_of_the_store_is_refused(root: Path, tmp_path: Path):
    """Opening it would write into what the other name shows."""
    store = used(root)
    (tmp_path / "precious").write_text("precious")
    (store / "lock").unlink()
    os.link(tmp_path / "precious", store / "lock")

    with pytest.raises(StoreRefused, match="hard-linked elsewhere"):
        HostFilesystem(root)
    assert (tmp_path / "precious").read_text() == "precious"


@pytest.mark.skipif(not ROOT, reason="only root can give a directory away")
def test_the_store_of_another_user_is_refused(root: Path):
    store = used(root)
    os.chown(store, 65534, 65534)

    for look_at in (HostFilesystem, WorkspaceHistory, adopt_store):
        with pytest.raises(StoreRefused, match="another user"):
            look_at(root)


def test_a_store_that_others_may_enter_is_closed_to_them(root: Path):
    store = used(root)
    store.chmod(0o755)
    HostFilesystem(root).close()

    assert stat.S_IMODE(store.stat().st_mode) == 0o700


def test_a_planted_store_is_refused_and_nothing_of_it_is_used(root: Path, tmp_path: Path):
    """A repository brings it along: a journal that takes a file from elsewhere."""
    store = tmp_path / "store"
    store.mkdir(mode=0o700)
    (store / "tx").mkdir()
    status = root.stat()
    (store / "root").write_text(json.dumps({"path": str(root), "ino": status.st_ino}))
    (tmp_path / "precious").write_text("precious")
    values = [3, "was", "taken.txt", None, None, None, "../../precious", None, None, [], True]
    text = json.dumps([*values, None, None, []]).encode()
    (store / "tx" / "journal").write_bytes(b"%s %s\n" % (b"0" * SEAL_SIZE, text))
    before = look(tmp_path)

    for look_at in (HostFilesystem, WorkspaceHistory):
        with pytest.raises(StoreRefused, match=r"planted.*--adopt-store"):
            look_at(root, store=store)
    assert look(tmp_path) == before

    # Even if somebody says yes: a name that leads elsewhere is none.
    assert adopt_store(root, store=store)
    with HostFilesystem(root, store=store) as fs:
        assert not fs.exists("taken.txt")
    assert (tmp_path / "precious").read_text() == "precious"
    assert (root / "a.txt").read_text() == "first\n"


def test_a_store_of_another_key_is_refused(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    store = tmp_path / "store"
    with HostFilesystem(root, store=store) as fs:
        fs.write("a.txt", "second\n")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another user's state"))
    with pytest.raises(StoreRefused, match="seal"):
        HostFilesystem(root, store=store)

    assert adopt_store(root, store=store) == ()
    with HostFilesystem(root, store=store) as fs:
        assert fs.history()[0].paths == ("a.txt",)


def test_records_of_one_store_are_none_in_another(root: Path, tmp_path: Path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "a.txt").write_text("other\n")
    theirs, ours = used(tmp_path / "other"), used(root)
    killed(tmp_path / "other")
    shutil.copy(theirs / "tx" / "journal", ours / "tx" / "journal")
    before = look(root)

    with HostFilesystem(root) as fs:
        assert len(fs.history()) == 4
        assert look(root) == before


# Where it is


def test_nothing_is_put_into_or_beside_the_workspace(root: Path):
    used(root)

    assert os.listdir(root.parent) == [root.name]
    assert store_of(root).is_relative_to(os.environ["XDG_STATE_HOME"])
    assert stat.S_IMODE(store_of(root).parent.parent.stat().st_mode) == 0o700


def test_a_directory_that_was_renamed_or_moved_keeps_its_history(root: Path, tmp_path: Path):
    used(root)
    moved = tmp_path / "another/name"
    moved.parent.mkdir()
    root.rename(moved)

    assert len(WorkspaceHistory(moved).calls()) == 4
    with HostFilesystem(moved) as fs:
        fs.undo(fs.history()[-1].call_id)
        assert fs.read("dir/b.txt") == "b\n"


def test_a_directory_made_where_another_was_moved_from_has_its_own_history(
    root: Path, tmp_path: Path
):
    used(root)
    root.rename(tmp_path / "moved")
    HostFilesystem(tmp_path / "moved").close()
    root.mkdir()

    with HostFilesystem(root) as fs:
        assert fs.history() == ()
        fs.write("a.txt", "another\n")
    assert len(WorkspaceHistory(tmp_path / "moved").calls()) == 4
    assert len(WorkspaceHistory(root).calls()) == 1


def test_a_directory_that_was_made_again_keeps_its_history(root: Path):
    used(root)
    shutil.rmtree(root)
    root.mkdir()

    with HostFilesystem(root) as fs:
        assert len(fs.history()) == 4


def test_a_copy_has_its_own_history(root: Path, tmp_path: Path):
    used(root)
    shutil.copytree(root, tmp_path / "copy")

    with HostFilesystem(tmp_path / "copy") as fs:
        assert fs.history() == ()
        assert fs.read("a.txt") == "third\n"
    with HostFilesystem(root) as fs:
        assert len(fs.history()) == 4


def test_a_store_beside_the_workspace_is_left_untouched_and_named(
    root: Path, caplog: pytest.LogCaptureFixture
):
    """Whoever wrote it: a repository or an agent may have planted it."""
    used(root)
    planted = root.parent / f".{root.name}.wink"
    store_of(root).rename(planted)
    before = look(planted)

    with HostFilesystem(root) as fs:
        assert fs.history() == ()
    assert f"{planted} is a store of an earlier version" in caplog.text
    assert look(planted) == before


def test_a_workspace_that_holds_the_state_directory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with pytest.raises(ValueError, match=r"must not be inside.*Set XDG_STATE_HOME.*or give store="):
        HostFilesystem(tmp_path)


# Other formats


def test_a_store_in_another_format_is_refused_and_left_as_it_is(root: Path):
    store = used(root)
    note = json.loads((store / "root").read_bytes()[SEAL_SIZE + 1 :])
    (store / "root").write_bytes(Seals("store").sealed(json.dumps({**note, "version": 4}).encode()))
    before = look(store)

    with pytest.raises(StoreRefused, match=r"has the format 4, and this wink reads 5 only.*Delete"):
        HostFilesystem(root)

    assert look(store) == before


# Locks


def test_the_lock_survives_whoever_opens_and_closes_its_file(root: Path, tmp_path: Path):
    with HostFilesystem(root) as fs:
        (store_of(root) / "lock").read_bytes()
        shutil.copytree(store_of(root), tmp_path / "copy")
        script = (
            "import sys; from weakincentives.filesystem import HostFilesystem as H; H(sys.argv[1])"
        )
        tried = subprocess.run(
            [sys.executable, "-c", script, str(root)], capture_output=True, text=True
        )
        assert "WorkspaceLocked" in tried.stderr
        fs.write("a.txt", "still ours")


def test_a_child_between_fork_and_exec_keeps_no_lock(root: Path, tmp_path: Path):
    """What a forked child still has open is let go of when its parent closes it."""
    reading, writing = os.pipe()
    for _ in range(3):
        fs = HostFilesystem(root)
        saved = SavedSession.create(tmp_path / f"{_}.jsonl", Session())
        path = saved.path
        # Like a child that subprocess has forked: no hook has run in it yet.
        child = subprocess.Popen(["cat"], stdin=reading, pass_fds=_descriptors_of(root, path))
        saved.close()
        fs.close()
        try:
            SavedSession.open(path).close()
            HostFilesystem(root).close()
        finally:
            child.kill()
            child.wait()
    os.close(reading)
    os.close(writing)


def _descriptors_of(root: Path, session: Path) -> list[int]:
    """Return the descriptors that this process has of a workspace's lock and a session's file."""
    found: list[int] = []
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if target in (str(store_of(root) / "lock"), str(session)):
            found.append(int(name))
    assert len(found) == 2
    return found


# Damage


def test_a_damaged_entry_costs_no_other_and_is_named(root: Path, caplog: pytest.LogCaptureFixture):
    store = used(root)
    damage(store, 2)

    with HostFilesystem(root) as fs, caplog.at_level(logging.ERROR):
        assert [each.serial for each in fs.history()] == [1, 3, 4]
        assert "change 2 is damaged" in caplog.text
        fs.write("a.txt", "goes on\n")
        last = fs.history()[-1].call_id
        assert "goes on" in fs.diff(last)
        fs.undo(last)
        assert fs.read("a.txt") == "third\n"
        told = fs.revert_to(fs.history()[0].call_id)
        assert any("damaged" in sentence for sentence in told)
        assert fs.read("a.txt") == "second\n"
    assert ["change 2 is" in each for each in WorkspaceHistory(root).damaged()] == [True]


def test_a_damaged_content_is_never_restored_or_shown(root: Path):
    damage_contents(used(root))
    before = look(root)
    with HostFilesystem(root) as fs:
        call = fs.history()[2].call_id
        with pytest.raises(ContentDamaged, match="damaged"):
            fs.undo(call)
        damaged = "a file whose saved content is damaged"
        assert fs.diff(call) == f"# a.txt: {damaged} became a file of 6 bytes\n"
        assert fs.diff(fs.history()[0].call_id) == f"# a.txt: {damaged} became {damaged}\n"
        assert look(root) == before
        fs.write("a.txt", "goes on\n")


def test_a_content_that_is_kept_again_takes_the_place_of_a_damaged_one(root: Path):
    with HostFilesystem(root) as fs:
        fs.write("a.txt", "second\n")
        (content,) = (p for p in (store_of(root) / "objects").rglob("*") if p.is_file())
        content.write_text("FIRST\n")
        fs.write("a.txt", "first\n")
        fs.write("a.txt", "third\n")
        fs.undo(fs.history()[-1].call_id)
        assert fs.read("a.txt") == "first\n"


@pytest.mark.heavy
@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.8, 0.99])
@pytest.mark.parametrize("boundary", [False, True])
def test_a_journal_that_lost_its_end_costs_no_original(root: Path, share: float, boundary: bool):
    killed(root)
    journal = store_of(root) / "tx" / "journal"
    data = journal.read_bytes()
    cut = int(len(data) * share)
    if boundary:
        cut = data.rfind(b"\n", 0, cut) + 1
    os.truncate(journal, cut)
    with HostFilesystem(root) as fs:
        fs.write("after.txt", "goes on\n")

    places = (root, store_of(root))
    kept = {path.read_bytes() for place in places for path in place.rglob("*") if path.is_file()}
    assert {b"first\n", b"the only one\n"} <= kept


DAMAGES = st.tuples(
    st.booleans(), st.integers(0, 1 << 30), st.integers(0, 1 << 20), st.integers(0, 7)
)


@pytest.mark.heavy
@given(damage=DAMAGES, unfinished=st.booleans())
def test_one_damaged_file_changes_nothing_in_the_workspace_and_later_calls_work(
    tmp_path_factory: pytest.TempPathFactory,
    damage: tuple[bool, int, int, int],
    unfinished: bool,
):
    """Any bit of any file, or the end of any: nothing unknown is raised, nothing is lost."""
    flip, which, place, bit = damage
    root = tmp_path_factory.mktemp("damaged") / "work"
    root.mkdir()
    (root / "a.txt").write_text("first\n")
    store = used(root)
    committed = look(root)
    originals = [b"third\n"]
    if unfinished:
        killed(root)
        originals.append(b"the only one\n")
    files = sorted(p for p in store.rglob("*") if p.is_file() and p.stat().st_size)
    file = files[which % len(files)]
    content = bytearray(file.read_bytes())
    place %= len(content)
    if flip:
        content[place] ^= 1 << bit
    else:
        del content[place:]
    with file.open("rb+") as opened:
        opened.write(content)
        opened.truncate()

    try:
        fs = HostFilesystem(root)
    except StoreRefused:
        assert file.name == "root"
        adopt_store(root)
        fs = HostFilesystem(root)
    with fs:
        if not unfinished:
            assert look(root) == committed
        for call in reversed(fs.history()):
            try:
                fs.diff(call.call_id)
                fs.undo(call.call_id)
                fs.undo(fs.history()[-1].call_id)
            except WinkError:
                pass
        fs.write("after.txt", "goes on\n")
        assert fs.read("after.txt") == "goes on\n"
    WorkspaceHistory(root).calls()
    kept = {p.read_bytes() for where in (root, store) for p in where.rglob("*") if p.is_file()}
    if file.parent == store / "tx" and file.name == "journal":
        assert set(originals) <= kept


# Space


def test_leftovers_of_killed_processes_are_removed_when_the_workspace_is_opened(root: Path):
    store = used(root)
    (store / "objects" / "new-0123456789abcdef").write_text("half")
    probe = store / "probe-0123456789abcdef"
    (probe / "upper").mkdir(parents=True)
    os.utime(probe, (0, 0))
    left = store / "open" / "0123456789abcdef" / "commands" / "one"
    left.mkdir(parents=True)
    (store / "root.new").write_text("half")
    (store / "rooms.new").write_text("half")
    HostFilesystem(root).close()

    names = {path.name for path in store.rglob("*")}
    assert not {name for name in names if name.startswith(("new-", "probe-")) or ".new" in name}
    assert list((store / "open").iterdir()) == []


def test_a_trial_of_an_overlay_by_another_process_stays(root: Path):
    store = used(root)
    (store / "probe-0123456789abcdef").mkdir()
    HostFilesystem(root).close()

    assert (store / "probe-0123456789abcdef").exists()


def test_an_error_while_trimming_costs_no_call_anything(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    remove = Log.remove

    def refuse(self: Log, *args: object, **options: object) -> None:
        raise LogUnavailable("disk I/O error")

    with HostFilesystem(root, history_limit=100) as fs:
        monkeypatch.setattr(Log, "remove", refuse)
        for number in range(10):
            fs.write("a.txt", f"{number}" * 40)
        assert "could not be trimmed" in caplog.text
        assert len(fs.history()) == 10
        monkeypatch.setattr(Log, "remove", remove)
        fs.write("a.txt", "x")
        assert len(fs.history()) < 5


def test_trimming_removes_no_more_than_a_few_calls_at_once(
    root: Path, monkeypatch: pytest.MonkeyPatch
):
    """However many there are; and in the end there are no more than allowed, nor their contents."""
    monkeypatch.setattr(history_module, "TRIMMED_AT_ONCE", 8)
    most = 0
    with HostFilesystem(root, history_limit=Limits(count=1000)) as fs:
        for number in range(200):
            fs.write("a.txt", f"{number}\n")
    with HostFilesystem(root, history_limit=Limits(count=100)) as fs:
        left = len(fs.history())
        while left > 100:
            fs.write("a.txt", f"{left}\n")
            most, left = max(most, left + 1 - len(fs.history())), len(fs.history())
        assert most == 8
        for number in range(200):
            fs.write("a.txt", f"{number}\n")
        assert len(fs.history()) == 100
        oldest = fs.history()[0]
        objects = [p for p in (store_of(root) / "objects").rglob("*") if p.is_file()]
        assert len(objects) <= 101
        fs.revert_to(oldest.call_id)
        assert fs.read("a.txt") == "100\n"
