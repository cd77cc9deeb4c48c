"""Makes the README that a package index shows: one without links into the repository.

An index shows the README alone, and a link to a file leads nowhere there. Its words stay.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

README = Path(__file__).parents[1] / "README.md"
READ_ON = "## Documentation\n"
WHERE = """
The pages named here are in the source distribution, in `docs/`:
`pip download --no-deps --no-binary :all: wink-runtime`
"""
FENCED = re.compile(r"(^```.*?^```[^\n]*$)", re.MULTILINE | re.DOTALL)
PICTURE = re.compile(r"!\[[^\]]*\]\((?!https?:)[^)\s]+\)\n*")
LINK = re.compile(r"\[([^\]]*)\]\((?!https?:)[^)\s]+\)")


class CustomMetadataHook(MetadataHookInterface):
    """What the build calls."""

    def update(self, metadata: dict[str, Any]) -> None:
        metadata["readme"] = {"content-type": "text/markdown", "text": without_links()}


def without_links() -> str:
    """Return the README with links and pictures only where they lead out of the repository."""
    parts = FENCED.split(README.read_text("utf-8"))
    parts[::2] = [LINK.sub(r"\1", PICTURE.sub("", part)) for part in parts[::2]]
    return "".join(parts).replace(READ_ON, READ_ON + WHERE)
