"""A session with calls of decorated tools goes on in another process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

MODULE = """
import weakincentives as wink

@wink.tool
def greet(name: str) -> str:
    \"\"\"Greet somebody.\"\"\"
    return f"Hello {name}"
"""

FIRST = """
import weakincentives as wink, carried
session = wink.Session()
carried.greet(name="you", context=wink.ToolContext(session=session))
print(session.snapshot().to_json())
"""

SECOND = """
import sys, weakincentives as wink, carried
from weakincentives.runtime import Snapshot, ToolInvoked
session = wink.Session.from_snapshot(Snapshot.from_json(sys.stdin.read()))
(record,) = session[ToolInvoked].all()
assert type(record.params) is carried.greet.params_type
carried.greet(name="me", context=wink.ToolContext(session=session))
print([r.params.name for r in session[ToolInvoked].all()])
"""


def run(program: str, where: Path, text: str = "") -> str:
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=text,
        capture_output=True,
        text=True,
        cwd=where,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_records_of_decorated_tools_are_read_in_a_fresh_process(tmp_path: Path):
    (tmp_path / "carried.py").write_text(MODULE)

    text = run(FIRST, tmp_path)

    assert run(SECOND, tmp_path, text).strip() == "['you', 'me']"
