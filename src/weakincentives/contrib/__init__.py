"""Ready-made toolsets, sandboxes and databases. Nothing in the runtime depends on them.

May know: `core`, `errors`, `filesystem`, `prompt`, `resources`, `retry`, `runtime`, `serde`,
`session`, `tool_result`.
Must not go here: what every tool needs; it belongs in ``prompt`` or ``runtime``.
"""

__all__: list[str] = []
