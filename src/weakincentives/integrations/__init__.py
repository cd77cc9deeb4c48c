"""WINK's transactions inside other agent frameworks: one module for each.

May know: `adapters`, `contrib`, `core`, `errors`, `filesystem`, `prompt`, `resources`, `retry`,
`runtime`, `serde`, `session`, `tool_result`.
Must not go here: what two frameworks share; that is ``bridge``.
"""

from typing import TYPE_CHECKING

from weakincentives.core.lazy import load_lazily

load_lazily(__name__)

if TYPE_CHECKING:
    from weakincentives.integrations.bridge import Bridge as Bridge
    from weakincentives.integrations.bridge import adopt as adopt
