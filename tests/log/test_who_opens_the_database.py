"""Nothing but SQLite opens the files of a log: closing any other descriptor drops SQLite's locks.

`tests/filesystem/test_log_decides.py` looks for the name in the source. Here everything that reads
or copies a store is done, and each file that Python itself opens is noted.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import os, sys
from pathlib import Path

opened = []

def note(event, arguments):
    if event != "open":
        return
    path = arguments[0]
    if isinstance(path, int):
        path = os.readlink(f"/proc/self/fd/{path}")
    if os.path.basename(os.fsdecode(path)).startswith("log.db"):
        opened.append(os.fsdecode(path))

from weakincentives.cli.entry import main
from weakincentives.filesystem import Branch, HostFilesystem, Limits, WorkspaceHistory, drop_branch

root = Path(sys.argv[1])
sys.addaudithook(note)
os.chdir(root)

with HostFilesystem(root) as fs:
    for number in range(5):
        fs.write("a", f"{number}\\n" * 50_000)
    fs.run(["sh", "-c", "rm -rf d; echo x >new"])
    branch = Branch.create(root, "b")
    branch.write("on the branch", "x")
    branch.merge_into(fs)
    branch.close()
    drop_branch(root, "b")
    fs.undo(fs.history()[-1])
    fs.revert_to(fs.history()[2].call_id)
    history = WorkspaceHistory(root)
    assert history.damaged() == () and len(history.diff(history.calls())) > 0
    fs.prune(Limits(count=2, newest=0))

for words in (
    ["exec", "--", "sh", "-c", "echo by exec >a"],
    ["log"], ["log", "--json"], ["diff", "--last"], ["undo", "--yes"], ["gc", "--dry-run"], ["gc"],
    ["doctor"],
):
    try:
        main(words)
    except SystemExit as ended:
        assert ended.code in (0, 1, 2, None), (words, ended.code)

with open(os.path.join(os.environ["XDG_STATE_HOME"], "log.db"), "w"):
    pass  # the hook itself: this one is found
expected = [os.path.join(os.environ["XDG_STATE_HOME"], "log.db")]
assert opened == expected, opened
"""


def test_python_opens_no_file_of_a_log(tmp_path: Path) -> None:
    root = tmp_path / "work"
    (root / "d").mkdir(parents=True)
    (root / "d" / "b").write_text("b\n")
    environment = {"PATH": "/usr/bin:/bin", "XDG_STATE_HOME": str(tmp_path / "state")}
    (tmp_path / "state").mkdir(mode=0o700)
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT, root],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert list((tmp_path / "state").rglob("workspaces/*/log.db")), "there was a log"
