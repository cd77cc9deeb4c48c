"""Our transactions inside the frameworks people already use: one module for each."""

from typing import TYPE_CHECKING

from weakincentives.core.lazy import load_lazily

load_lazily(__name__)

if TYPE_CHECKING:
    from weakincentives.integrations.bridge import Bridge as Bridge
    from weakincentives.integrations.bridge import adopt as adopt
