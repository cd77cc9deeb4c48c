"""Where sessions and outcomes are stored: files, SQLite or PostgreSQL.

The public names are in ``weakincentives.runtime``.

May know: `core`, `errors`, `filesystem`, `prompt`, `runtime`, `serde`, `session`.
Must not go here: what a session or an outcome means.
"""

__all__: list[str] = []
