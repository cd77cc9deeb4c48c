"""The command `wink`: options, settings, terminal output.

May know: `adapters`, `contrib`, `core`, `debugger`, `durable`, `errors`, `filesystem`,
`integrations`, `mcp`, `prompt`, `runtime`, `serde`, `session`, `tool_result`.
Must not go here: anything that a program would want to call without a terminal.
"""

__all__: list[str] = []
