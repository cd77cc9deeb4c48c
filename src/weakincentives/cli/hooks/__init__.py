"""Records the tool calls of other vendors' agents, so that `wink undo` can undo them.

May know: `adapters`, `cli`, `core`, `errors`, `filesystem`, `integrations`, `prompt`, `runtime`,
`tool_result`.
Must not go here: what is true of only one agent, except in ``adapters`` and ``install``.
"""

__all__: list[str] = []
