"""The user's state directory and the key in it: private, made once, and never guessed."""

from __future__ import annotations

import multiprocessing
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from weakincentives.core.state import Seals, state_directory
from weakincentives.errors import StateUnavailable


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(sys.path)
    return subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
    )


def test_the_directory_and_its_key_are_for_this_user_alone(home: Path):
    Seals("test")

    assert state_directory() == home / "wink"
    assert stat.S_IMODE((home / "wink").stat().st_mode) == 0o700
    assert stat.S_IMODE((home / "wink" / "key").stat().st_mode) == 0o600
    assert os.listdir(home / "wink") == ["key"]


def test_a_directory_that_others_may_enter_is_closed_to_them(home: Path):
    (home / "wink").mkdir(parents=True, mode=0o755)

    assert stat.S_IMODE(state_directory().stat().st_mode) == 0o700


def test_a_link_or_a_file_in_its_place_is_refused(home: Path, tmp_path: Path):
    home.mkdir()
    (tmp_path / "elsewhere").mkdir()
    (home / "wink").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StateUnavailable, match="not a link"):
        Seals("test")

    (home / "wink").unlink()
    (home / "wink").touch()
    with pytest.raises(StateUnavailable, match="XDG_STATE_HOME"):
        Seals("test")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_directory_of_another_user_is_refused(home: Path):
    (home / "wink").mkdir(parents=True)
    os.chown(home / "wink", 65534, 65534)

    with pytest.raises(StateUnavailable, match="another user"):
        Seals("test")


def test_a_key_that_is_a_link_or_has_the_wrong_size_is_refused(home: Path, tmp_path: Path):
    (home / "wink").mkdir(parents=True)
    (tmp_path / "planted").write_bytes(b"k" * 32)
    (home / "wink" / "key").symlink_to(tmp_path / "planted")
    with pytest.raises(StateUnavailable, match="XDG_STATE_HOME"):
        Seals("test")

    (home / "wink" / "key").unlink()
    (home / "wink" / "key").write_bytes(b"short")
    with pytest.raises(StateUnavailable, match="damaged"):
        Seals("test")


def test_a_seal_holds_for_its_data_its_purpose_and_its_key(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    line = Seals("a journal").sealed(b'{"op": "put"}')

    assert Seals("a journal").unsealed(line) == b'{"op": "put"}'
    assert Seals("another journal").unsealed(line) is None
    for index in range(len(line)):
        flipped = line[:index] + bytes([line[index] ^ 1]) + line[index + 1 :]
        assert Seals("a journal").unsealed(flipped) is None
    for end in range(len(line)):
        assert Seals("a journal").unsealed(line[:end]) is None
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another"))
    assert Seals("a journal").unsealed(line) is None


def _seal(_: int) -> str:
    return Seals("test").seal(b"x")


@pytest.mark.heavy
def test_processes_that_start_together_agree_on_the_key(home: Path):
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        seals = set(pool.map(_seal, range(16), chunksize=1))

    assert seals == {Seals("test").seal(b"x")}
    assert os.listdir(home / "wink") == ["key"]


def test_no_home_says_what_to_set(tmp_path: Path):
    """Neither a variable nor an entry for the user: nothing is made in the working directory."""
    code = """
import os, pwd
def nobody(uid): raise KeyError(uid)
pwd.getpwuid = nobody
os.chdir({place!r})
from weakincentives.core.state import Seals
Seals("test")
"""
    place = str(tmp_path)
    for environment in ({}, {"HOME": ""}, {"XDG_STATE_HOME": "relative", "HOME": "also"}):
        done = python(code.format(place=place), **environment)
        assert "StateUnavailable" in done.stderr
        assert "Set XDG_STATE_HOME" in done.stderr
    assert os.listdir(place) == []


def test_a_home_that_cannot_be_written_says_what_to_set(tmp_path: Path):
    (tmp_path / "file").touch()
    done = python(
        "from weakincentives.core.state import Seals; Seals('test')",
        XDG_STATE_HOME=str(tmp_path / "file"),
    )

    assert "StateUnavailable" in done.stderr
    assert "Set XDG_STATE_HOME" in done.stderr
