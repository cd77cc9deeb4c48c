"""Records the tools of other vendors' agents: each is a call, which `wink undo` undoes."""

__all__: list[str] = []
