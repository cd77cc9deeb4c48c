"""Tools and what they need, ready to be used. Nothing in the runtime depends on them."""

__all__: list[str] = []
