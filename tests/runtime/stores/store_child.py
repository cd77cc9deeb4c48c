"""A process that works on a session and does as it is told: ``store_child.py WHERE LEASE``."""

from __future__ import annotations

import sys

from store_world import KINDS, NAME, Note, Place

from weakincentives.errors import WinkError
from weakincentives.runtime import SavedSession
from weakincentives.runtime.ledger import CallOutcome


def say(text: object) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


where, lease = sys.argv[1:]
store = Place(where).store(lease=float(lease))
saved: SavedSession | None = None
for line in sys.stdin:
    command, _, rest = line.strip().partition(" ")
    try:
        if command == "open":
            saved = SavedSession.open(NAME, store=store, types=KINDS, wait=float(rest or 0))
            say(saved.token)
            continue
        assert saved is not None
        if command == "note":
            saved.session.dispatch(Note(rest))
            saved.save()
        elif command == "notes":  # until someone kills it
            number = len(saved.session[Note].all())
            while True:
                saved.session.dispatch(Note(str(number)))
                saved.save()
                say(number)
                number += 1
        elif command in ("begin", "end"):
            assert saved.ledger is not None
            if command == "begin":
                saved.ledger.begin(rest, "send", 1.0)
            else:
                saved.ledger.end(CallOutcome(rest, "send", "committed", 1.0, "sent it"))
        elif command == "close":
            saved.close()
        say("done")
    except WinkError as error:
        say(type(error).__name__)
