"""Typed state that is rolled back with a call, and the contract of everything else that is.

May know: `core`, `errors`, `retry`, `serde`, `tool_result`.
Must not go here: prompts, the pipeline, where a session is stored.
"""

__all__: list[str] = []
