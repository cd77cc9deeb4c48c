"""What was approved of a server's tools: each definition by its digest.

A description is read by the model like an instruction, and a schema decides what is sent. So a
tool whose definition changes is a new tool, and has to be approved as one.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from difflib import unified_diff
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from weakincentives.errors import ToolDefinitionError

if TYPE_CHECKING:
    from mcp import types

_MAX_KEPT = 400_000
"""Characters of a definition to show later; of a longer one there is only the digest."""
_PARTS = ("title", "description", "inputSchema", "outputSchema", "annotations")


class Pins:
    """The approved definitions, for as long as this object lives or in a file."""

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self.path = None if path is None else Path(path)
        self._approved = {} if self.path is None else _read(self.path)
        self.is_new = not self._approved
        """Whether nothing was approved yet: then what the server has first is."""

    def problem(self, tool: types.Tool) -> str:
        """Return why a tool may not be offered, or an empty text.

        Without a file a tool that is new is approved as it is first seen.
        """
        approved = self._approved.get(tool.name)
        if approved is None:
            if self.path is not None and not self.is_new:
                return f"it is not among the approved tools in {self.path}"
            self._approved[tool.name] = _pin(tool)
            return ""
        if approved["digest"] == digest_of(tool):
            return ""
        was, now = approved.get("definition", {}), definition_of(tool)
        changed = [part for part in _PARTS if was.get(part) != now.get(part)]
        return f"its definition has changed since it was approved: {', '.join(changed)}"

    def difference(self, tool: types.Tool) -> str:
        """Return what has changed in a definition, as a diff."""
        was = self._approved.get(tool.name, {}).get("definition")
        before = [] if was is None else _lines(was)
        return "\n".join(
            unified_diff(before, _lines(definition_of(tool)), "approved", "now", lineterm="")
        )

    def approve(self, tools: Iterable[types.Tool]) -> None:
        """Approve these definitions as they are now."""
        self._approved.update({tool.name: _pin(tool) for tool in tools})
        self.save()

    def save(self) -> None:
        """Write the file, if there is one."""
        self.is_new = False
        if self.path is None:
            return
        text = json.dumps({"tools": self._approved}, indent=2, sort_keys=True, ensure_ascii=False)
        made = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        made.write_text(text + "\n", encoding="utf-8")
        made.replace(self.path)


def definition_of(tool: types.Tool) -> dict[str, Any]:
    """Return everything of a tool that the model sees or that decides what is sent."""
    whole = tool.model_dump(by_alias=True, mode="json", exclude_none=True)
    return {part: whole[part] for part in ("name", *_PARTS) if part in whole}


def digest_of(tool: types.Tool) -> str:
    """Return the digest of a tool's definition."""
    text = json.dumps(definition_of(tool), sort_keys=True, separators=(",", ":"))
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def _pin(tool: types.Tool) -> dict[str, Any]:
    definition = definition_of(tool)
    is_small = len(json.dumps(definition)) <= _MAX_KEPT
    return {"digest": digest_of(tool), **({"definition": definition} if is_small else {})}


def _lines(definition: Mapping[str, Any]) -> list[str]:
    return json.dumps(definition, indent=2, sort_keys=True, ensure_ascii=False).splitlines()


def _read(path: Path) -> dict[str, dict[str, Any]]:
    try:
        tools = json.loads(path.read_text(encoding="utf-8"))["tools"]
        return {name: dict(pin, digest=pin["digest"]) for name, pin in tools.items()}
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ToolDefinitionError(
            f"{path} is not a file of approved tools: {error!r}. Delete it to approve them anew"
        ) from cast("Exception", error)
