"""What every other package builds on: time, ids, limits, locks, logs, text, media.

May know: the standard library and ``errors``. Must not go here: anything about tools, sessions or
files of a workspace.
"""

__all__: list[str] = []
