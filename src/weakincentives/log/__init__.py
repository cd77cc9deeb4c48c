"""The log: what each call changed, stored once, as an operation.

It knows values, pure functions over them and their storage; it knows nothing of tools, prompts or
how files are changed. Code that captures or restores files belongs in ``filesystem``.
"""

from typing import TYPE_CHECKING

from weakincentives.core.lazy import load_lazily

load_lazily(__name__)

if TYPE_CHECKING:
    from weakincentives.log.algebra import Known as Known
    from weakincentives.log.algebra import Manifests as Manifests
    from weakincentives.log.algebra import Merged as Merged
    from weakincentives.log.algebra import State as State
    from weakincentives.log.algebra import compose as compose
    from weakincentives.log.algebra import conflicts as conflicts
    from weakincentives.log.algebra import invert as invert
    from weakincentives.log.algebra import inverted as inverted
    from weakincentives.log.algebra import merge as merge
    from weakincentives.log.algebra import state_at as state_at
    from weakincentives.log.database import Garbage as Garbage
    from weakincentives.log.database import Log as Log
    from weakincentives.log.database import Summary as Summary
    from weakincentives.log.database import read_manifest as read_manifest
    from weakincentives.log.database import write_manifest as write_manifest
    from weakincentives.log.operation import CallRecord as CallRecord
    from weakincentives.log.operation import Change as Change
    from weakincentives.log.operation import Entry as Entry
    from weakincentives.log.operation import Operation as Operation
    from weakincentives.log.operation import Parts as Parts
    from weakincentives.log.operation import SessionDelta as SessionDelta
    from weakincentives.log.operation import SliceChange as SliceChange
    from weakincentives.log.operation import Stat as Stat
    from weakincentives.log.operation import new_id as new_id
