"""Prices and context windows of models, from the list in the package ``litellm``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

from weakincentives.core.budget import TokenPrice
from weakincentives.core.logs import get_logger

_logger = get_logger(__name__)


def known_price(model: str) -> TokenPrice | None:
    """Return the price of a provider's model; None if it is not listed."""
    return price_in(_listed(model))


def known_window(model: str) -> int | None:
    """Return the tokens that a provider's model takes; None if it is not listed."""
    return window_in(_listed(model))


def price_in(about: Mapping[str, Any]) -> TokenPrice | None:
    """Return the price in an entry of the list."""
    names = ("input_cost_per_token", "output_cost_per_token", "cache_read_input_token_cost")
    read, written, cached = (about.get(name) for name in names)
    if not isinstance(read, int | float) or not isinstance(written, int | float):
        return None
    per_cached = cached * 1e6 if isinstance(cached, int | float) else None
    return TokenPrice(input=read * 1e6, output=written * 1e6, cached_input=per_cached)


def window_in(about: Mapping[str, Any]) -> int | None:
    """Return the window in an entry of the list."""
    found = about.get("max_input_tokens")
    return found if isinstance(found, int) and found > 0 else None


def _listed(model: str) -> Mapping[str, Any]:
    entry = _list().get(model)
    return cast("Mapping[str, Any]", entry) if isinstance(entry, dict) else {}


@lru_cache(maxsize=1)
def _list() -> Mapping[str, Any]:
    # Read as a file: to import the package takes seconds.
    package = find_spec("litellm")
    for directory in (package and package.submodule_search_locations) or ():
        path = Path(directory, "model_prices_and_context_window_backup.json")
        try:
            return json.loads(path.read_bytes())
        except (OSError, ValueError) as error:
            _logger.debug("there is no list of prices: %s", error)
    return {}
