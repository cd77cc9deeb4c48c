"""Data in and out of dataclasses: checked JSON, JSON schemas, and exact snapshots.

``parse``, ``dump`` and ``schema`` speak plain JSON, the language of models and tools. ``freeze``
and ``thaw`` keep the exact runtime types, for what must come back equal in another process.
"""

from weakincentives.serde.exact import freeze, thaw
from weakincentives.serde.typed import dump, parse, schema

__all__ = ["dump", "freeze", "parse", "schema", "thaw"]
