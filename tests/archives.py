"""Unpacks archives on every Python that is supported."""

from __future__ import annotations

import tarfile
from pathlib import Path


def unpack(archive: Path, folder: Path) -> None:
    """Unpack an archive of ours into a directory."""
    with tarfile.open(archive) as files:
        if hasattr(tarfile, "data_filter"):  # since 3.11.4
            files.extractall(folder, filter="data")
        else:
            files.extractall(folder)
