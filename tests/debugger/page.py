"""What the page derives from the views: the files and the values at any call."""

from __future__ import annotations

from typing import Any

from weakincentives.debugger import Views

Json = dict[str, Any]


def lines_of(text: str) -> list[str]:
    lines = text.split("\n")
    return [f"{line}\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])


def texts_of(versions: Json) -> list[tuple[int, str | None, Json | None]]:
    """Return each version of a file with its serial and step, by applying edits to the last one."""
    found: list[tuple[int, str | None, Json | None]] = [(-1, versions["base"], None)]
    for step in versions["steps"]:
        text = None
        if step["edits"] is not None:
            lines = lines_of(found[-1][1] or "")
            for start, removed, added in reversed(step["edits"]):
                lines[start : start + removed] = added
            text = "".join(lines)
        found.append((step["serial"], text, step))
    return found


def text_at(versions: Json, serial: int) -> str | None:
    """Return a file as it was after a commit."""
    return [text for at, text, _ in texts_of(versions) if at <= serial][-1]


def blame(versions: Json) -> list[Json | None]:
    """Return the step that wrote each line of the last version; None for lines of the base."""
    by: list[Json | None] = [None] * len(lines_of(versions["base"] or ""))
    for step in versions["steps"]:
        if step["edits"] is None:
            by = []
            continue
        for start, removed, added in reversed(step["edits"]):
            by[start : start + removed] = [step] * len(added)
    return by


def paths_at(tree: Json, commits: list[Json], serial: int) -> set[str]:
    """Return the paths of files after a commit."""
    paths = set(tree["paths"])
    for commit in commits:
        if commit["serial"] <= serial:
            for path, kind, origin in commit["files"]:
                paths -= {origin, path} if kind == "deleted" else {origin}
                paths |= {path} if kind != "deleted" else set()
    return paths


def value_at(history: Json, call: int, *, before: bool = False) -> list[Any]:
    """Return the values of a slice after a call, or before it."""
    value: list[Any] = []
    for step in history["steps"]:
        is_after = step["call"] == call and not before and not step["between"]
        if step["call"] < call or is_after:
            value = value[: step["keep"]] + step["added"]
    return value


class Page:
    """The views of one run."""

    def __init__(self, views: Views, run_id: str) -> None:
        self.views, self.id = views, run_id

    def __call__(self, path: str = "", /, **query: Any) -> Any:
        given = {name: str(value) for name, value in query.items()}
        return self.views.get(f"runs/{self.id}{path and '/'}{path}", given)

    def world(self, number: int, *, before: bool = False) -> dict[str, str | None]:
        """Return all files at a call, as the page derives them."""
        view = self()
        row = next(row for row in view["calls"] if row["n"] == number)
        serial = row["before" if before else "after"]
        paths = paths_at(self("tree"), view["commits"], serial)
        return {path: text_at(self("versions", path=path), serial) for path in paths}
