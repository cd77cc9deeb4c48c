"""The command `wink`."""

__all__: list[str] = []
