"""Where sessions and outcomes are kept: files, SQLite or PostgreSQL.

The public names are in ``weakincentives.runtime``.
"""

__all__: list[str] = []
