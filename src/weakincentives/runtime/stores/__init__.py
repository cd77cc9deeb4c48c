"""Where sessions, outcomes and runs are kept: files, SQLite or PostgreSQL."""
