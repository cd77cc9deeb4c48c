"""Contexts, sessions and files to call a tool with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from weakincentives.filesystem import Filesystem, MemoryFilesystem
from weakincentives.prompt.context import ToolContext
from weakincentives.session.session import Session


def make_session(**options: Any) -> Session:
    """Return an empty session; options are those of ``Session``."""
    return Session(**options)


def make_vfs(
    files: Mapping[str, str | bytes] | Iterable[str] = (), **options: Any
) -> MemoryFilesystem:
    """Return an in-memory filesystem with these files; names alone make empty files."""
    return MemoryFilesystem(files, **options)


def make_context(
    *,
    session: Session | None = None,
    fs: Filesystem | None = None,
    resources: Mapping[type, object] | None = None,
    **fields: Any,
) -> ToolContext:
    """Return a context with a session and an in-memory filesystem, yours or fresh ones.

    ``resources`` adds to the filesystem; other fields are those of ``ToolContext``.
    """
    bound: dict[type, object] = {Filesystem: fs if fs is not None else make_vfs()}
    bound.update(resources or {})
    return ToolContext(
        session=session if session is not None else make_session(), resources=bound, **fields
    )


def make_context_with_files(
    files: Mapping[str, str | bytes] | Iterable[str], **options: Any
) -> ToolContext:
    """Return a context whose filesystem holds these files; names alone make empty files."""
    return make_context(fs=make_vfs(files), **options)
