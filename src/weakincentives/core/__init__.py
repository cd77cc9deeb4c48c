"""What every other package builds on: time, ids, limits, locks, logs, text, media.

May know: `errors`.
Must not go here: anything about tools, sessions or files of a workspace.
"""

__all__: list[str] = []
