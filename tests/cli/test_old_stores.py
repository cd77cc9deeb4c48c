"""Stores that earlier versions wrote can still be opened, read, resumed and undone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from terminal import wink

from archives import unpack

STORES = sorted((Path(__file__).parent / "data").glob("store-*.tar.xz"))
"""Each holds the directory `work` and its store: one finished run, and one cut off by its limit."""


@pytest.mark.parametrize("store", STORES, ids=lambda path: path.name.partition(".")[0])
def test_a_store_of_an_earlier_version_still_serves(store: Path, tmp_path: Path):
    unpack(store, tmp_path)
    work = tmp_path / "work"

    def run(*arguments: str) -> str:
        state = {"XDG_STATE_HOME": str(tmp_path / "state"), "HOME": str(tmp_path)}
        done = wink(*arguments, "-w", str(work), cwd=tmp_path, env=state)
        assert done.returncode == 0, done.stderr
        return done.stdout

    run("doctor", "--adopt-store")
    resumed = run("resume", "-q", "-m", f"scripted:{tmp_path / 'script2.json'}")
    log = run("log")
    first = log[16:19]

    assert resumed == "Done again.\n"
    calls = re.findall(r"^\w+/\d+ +\S+ +(\w+) +(\w+)", log, re.MULTILINE)
    assert calls == [
        ("setup_plan", "ok"),
        ("read_section", "ok"),
        ("write_file", "committed"),
        ("read_file", "ok"),
        ("edit_file", "committed"),
        ("shell_execute", "committed"),
        ("shell_execute", "rolled"),
        ("update_step", "ok"),
        ("read_file", "ok"),
        ("edit_file", "committed"),
        ("write_file", "committed"),
    ]
    assert "-two\n+zwei\n" in run("diff", f"{first}/5")
    assert (work / "second.txt").read_text() == "2\n"

    run("undo", "--to", f"{first}/3", "--force")

    assert {str(path.relative_to(work)) for path in work.rglob("*") if not path.is_dir()} == {
        "README.md",
        "link",
        "old/c.txt",
        "old/deep/d.txt",
        "run.sh",
        "src/a.txt",
        "src/b.py",
    }
    assert (work / "README.md").read_text() == "# Work\n\nA directory.\n"
    assert (work / "run.sh").stat().st_mode & 0o777 == 0o755
    assert (work / "link").readlink() == Path("src/a.txt")
    assert (work / "old/deep/d.txt").read_text() == "deep\n"
