"""The links of a running debugger: each opens the page once, in one browser.

A running debugger has a file in the user's state directory, which it keeps locked. A link carries a
seal that only this user's processes can make, so that another process can print one more.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Generator
from pathlib import Path
from urllib.parse import urlencode

from weakincentives.core.locks import OWN_FILE, is_taken, take
from weakincentives.core.state import SEAL_SIZE, Seals, no_links, state_directory


class Links:
    """Makes and takes the links of the debugger at an address."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._seals = Seals(f"debugger {address}")
        self._taken: set[str] = set()

    def new(self, run: str = "") -> str:
        """Return a new link, which opens the page with a run."""
        number = secrets.token_urlsafe(16)
        query = {"token": f"{number}{self._seals.seal(number.encode())}"}
        return f"{self.address}?{urlencode(query | ({'run': run} if run else {}))}"

    def take(self, token: str) -> bool:
        """Use up the token of a link; False if it is not ours, or was used before."""
        number, seal = token[:-SEAL_SIZE].encode(), token[-SEAL_SIZE:].encode()
        is_ours = secrets.compare_digest(seal, self._seals.seal(number).encode())
        if not is_ours or token in self._taken:
            return False
        self._taken.add(token)
        return True


@contextlib.contextmanager
def announced(workspace: Path, address: str) -> Generator[None]:
    """Let other processes of this user find the debugger of a directory, while it runs."""
    folder = state_directory() / _FOLDER
    folder.mkdir(mode=0o700, exist_ok=True)
    place = folder / f"{os.getpid()}-{secrets.token_hex(4)}"
    told = json.dumps({"workspace": os.fspath(workspace), "address": address})
    fd = os.open(place, OWN_FILE, 0o600)
    try:
        take(fd)
        os.write(fd, told.encode())
        yield
    finally:
        place.unlink(missing_ok=True)
        os.close(fd)


def running(workspace: Path) -> Links | None:
    """Return the links of the newest debugger that runs on a directory, if any."""
    folder = state_directory() / _FOLDER
    if not folder.is_dir():
        return None
    for place in sorted(folder.iterdir(), key=lambda each: each.stat().st_mtime, reverse=True):
        with open(place, opener=no_links) as file:
            if not is_taken(file.fileno()):  # its process was killed
                place.unlink(missing_ok=True)
                continue
            told = json.load(file)
        if told["workspace"] == os.fspath(workspace):
            return Links(told["address"])
    return None


_FOLDER = "debuggers"
