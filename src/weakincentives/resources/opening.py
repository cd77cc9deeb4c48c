"""Whatever form resources come in, as something that can be asked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from weakincentives.resources.registry import Resolver, ResourceRegistry

__all__ = ["as_resolver"]

_EMPTY = ResourceRegistry.of()


def as_resolver(resources: object) -> Resolver:
    """Open a ResourceRegistry or a plain mapping; return what is open already as it is."""
    if hasattr(resources, "find"):  # first, because it is the case on every call
        return cast("Resolver", resources)
    if resources is None:
        return _EMPTY.open()
    if isinstance(resources, (ResourceRegistry, Mapping)):
        return ResourceRegistry.build(cast("Mapping[type[Any], Any]", resources)).open()
    raise TypeError(
        "resources must be prompt.resources, an open context, a ResourceRegistry or a mapping "
        f"of types to instances, got {type(resources).__name__}"
    )
