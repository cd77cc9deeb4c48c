"""What you need to test your own tools and adapters: contexts, files, a clock, and checkers.

>>> from weakincentives.testing import make_context_with_files
>>> context = make_context_with_files({"a.txt": "hello"})
>>> context.filesystem.read("a.txt")
'hello'

Call a handler directly with such a context to test its logic. Call the ``Tool`` to test what a
model would see: validation, rollback and the record in the session are then part of it. Let its
handler tell a ``History`` what it reads and writes to test that calls which run at the same time
come out as if they had run one after the other. Run ``adapter_cases`` over an adapter of your own
to test that it keeps an agent's promises whatever its provider does.
"""

from typing import TYPE_CHECKING

from weakincentives.clock import FakeClock
from weakincentives.lazy import lazy_names
from weakincentives.testing.contexts import (
    make_context,
    make_context_with_files,
    make_session,
    make_vfs,
)

if TYPE_CHECKING:
    from weakincentives.testing.conformance import (
        AdapterCase,
        Asked,
        MakeAdapter,
        Played,
        Served,
        adapter_cases,
    )
    from weakincentives.testing.history import Anomaly, History

__all__ = [
    "AdapterCase",
    "Anomaly",
    "Asked",
    "FakeClock",
    "History",
    "MakeAdapter",
    "Played",
    "Served",
    "adapter_cases",
    "make_context",
    "make_context_with_files",
    "make_session",
    "make_vfs",
]

if not TYPE_CHECKING:  # a type checker shall still find a misspelled name
    _CASES = ["AdapterCase", "Asked", "MakeAdapter", "Played", "Served", "adapter_cases"]
    __getattr__, __dir__ = lazy_names(
        __name__, {"conformance": _CASES, "history": ["Anomaly", "History"]}
    )
