"""A workspace's note of a database that its calls changed; ``known`` reads it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

FOLDER = "databases"
"""One file for each database, so that processes that note two at the same time lose neither."""


def remember(store: Path, address: Mapping[str, str]) -> str:
    """Note in the state of a workspace that its calls changed a database; returns its identity."""
    data = json.dumps(dict(address), sort_keys=True).encode()
    place = store / FOLDER / hashlib.sha256(data).hexdigest()[:32]
    if not place.exists():
        place.parent.mkdir(mode=0o700, exist_ok=True)
        staged = place.with_name(f"new-{os.urandom(8).hex()}")
        staged.write_bytes(data)
        os.replace(staged, place)
    return identity_of(store)


def identity_of(store: Path) -> str:
    """Return what tells a workspace from all others that use a database, on any machine."""
    place = store / FOLDER / "identity"
    with contextlib.suppress(FileNotFoundError):
        return place.read_text()
    staged = place.with_name(f"new-{os.urandom(8).hex()}")
    staged.write_text(os.urandom(16).hex())
    with contextlib.suppress(FileExistsError):
        os.link(staged, place)
    staged.unlink()
    return place.read_text()
