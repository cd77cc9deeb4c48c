"""Sessions copied from one store to another, without decoding their values."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing, suppress

from weakincentives.errors import SnapshotError
from weakincentives.runtime.stores.logs import LeasedLog, SessionLog, SessionStore
from weakincentives.runtime.stores.media import digests_in


def copy_session(
    source: SessionStore, name: str, target: SessionStore, target_name: str = ""
) -> int:
    """Copy a session with its media to another store; returns how many saves were written.

    The source may be in use. If the target has an earlier copy, only what is new is added, so that
    a viewer can follow; if the source was compacted since, the copy is replaced.

    Raises:
        FileExistsError: The target has another session of that name.
        SessionInUse: The copy is in use.
    """
    log, target_name = source.log(name), target_name or name
    try:
        copy = target.open(target_name)
    except FileNotFoundError:
        copy = target.create(target_name, log.head)
    with closing(copy):
        if copy.head != log.head:
            raise FileExistsError(f"{copy.shown} is another session")
        known = copy.load().texts
        place = log.place_after(known)
        texts = log.read(log.begin if place is None else place).checked().texts
        _copy_media(log, copy, texts)
        if place is None:
            copy.replace(texts)
        elif texts:
            copy.append(texts)
        return len(texts)


def _copy_media(log: SessionLog, copy: LeasedLog, texts: Sequence[bytes]) -> None:
    for digest in digests_in(texts):
        with suppress(SnapshotError):  # another value may look like the digest of media
            copy.store(log.media(digest).read())
