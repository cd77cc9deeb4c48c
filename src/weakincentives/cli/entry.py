"""Where `wink` begins: says what to install where the extra is missing."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NoReturn


def main() -> None:
    """Run `wink` with the arguments of this process, and exit."""
    # Before anything is loaded: a directory that an agent works on may be on the path, too, and
    # must not take the place of what is installed.
    installed = (sys.prefix, sys.base_prefix)
    sys.path.sort(key=lambda each: not each.startswith(installed))
    try:
        wink = _load()
    except KeyboardInterrupt:  # it takes long enough for somebody to think again
        sys.stderr.write("wink: interrupted\n")
        sys.exit(130)
    wink()


def _load() -> Callable[[], NoReturn]:
    try:
        import rich  # noqa: F401  # pyright: ignore[reportUnusedImport]  # only whether it is there
        import typer  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except ModuleNotFoundError as error:
        sys.stderr.write(f"wink: {error.name} is missing; run: pip install 'wink-runtime[cli]'\n")
        sys.exit(2)
    from weakincentives.cli.main import main as wink

    return wink
