"""Data in and out of dataclasses: checked JSON, JSON schemas, and exact snapshots.

``parse``, ``dump`` and ``schema`` use plain JSON, as models and tools do. ``freeze`` and ``thaw``
keep the exact runtime types, for values that must come back equal in another process.

May know: `core`, `errors`.
Must not go here: what a value means; a schema of one provider belongs in ``adapters``.
"""

from typing import TYPE_CHECKING

from weakincentives.core.lazy import load_lazily

load_lazily(__name__)

if TYPE_CHECKING:
    from weakincentives.serde.exact import freeze as freeze
    from weakincentives.serde.exact import thaw as thaw
    from weakincentives.serde.typed import dump as dump
    from weakincentives.serde.typed import parse as parse
    from weakincentives.serde.typed import schema as schema
