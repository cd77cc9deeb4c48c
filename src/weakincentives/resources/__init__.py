"""Things a tool asks for by type: made when needed, shared or fresh, closed in the end."""

from __future__ import annotations

from weakincentives.resources.context import ResourceContext, ToolScope, Watcher
from weakincentives.resources.registry import (
    Binding,
    Closeable,
    PostConstruct,
    Resolver,
    ResourceRegistry,
    Scope,
    Snapshotable,
)

__all__ = [
    "Binding",
    "Closeable",
    "PostConstruct",
    "Resolver",
    "ResourceContext",
    "ResourceRegistry",
    "Scope",
    "Snapshotable",
    "ToolScope",
    "Watcher",
]
