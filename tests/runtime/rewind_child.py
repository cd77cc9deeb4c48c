"""The program that a test kills in a rewind: rewind_child.py DIRECTORY CALL KILL_AT.

It kills itself at that file operation of the rewind; without a kill it prints how many there were.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from run_world import opened

from weakincentives.runtime.rewind import rewind_run

PLACE, CALL, KILL_AT = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
count = 0
counting = False


def on_event(event: str, _: object) -> None:
    global count
    if counting and (event == "open" or event.startswith(("os.", "fcntl."))):
        count += 1
        if count == KILL_AT:
            os.kill(os.getpid(), 9)


sys.addaudithook(on_event)
with opened(PLACE) as work:
    counting = True
    rewind_run(work.saved, work.files, CALL)
    counting = False
sys.stdout.write(str(count))
