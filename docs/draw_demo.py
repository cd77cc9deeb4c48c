"""Draws docs/demo.svg: the end of what `wink demo` prints, as a picture of a terminal."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

PICTURE = Path(__file__).with_name("demo.svg")
WIDTH = 100


def main() -> None:
    """Run the demo as on a terminal, and draw what happened in each call."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-m", "weakincentives.cli", "demo", "--into", f"{folder}/till"],
            env={**os.environ, "FORCE_COLOR": "1", "COLUMNS": str(WIDTH), "LANG": "C.UTF-8"},
            capture_output=True,
            encoding="utf-8",
            check=True,
        )
    (task,) = (line for line in done.stderr.split("\n") if line.startswith("> "))
    lines = done.stdout.split("\n")
    (first,) = (n for n, line in enumerate(lines) if "What happened in each call" in line)
    (end,) = (n for n, line in enumerate(lines) if "The project is still there" in line)

    console = Console(record=True, width=WIDTH, file=io.StringIO(), highlight=False)
    console.print(Text(f"$ wink demo\n{task}\n...\n", style="bold"))
    for line in lines[first : end - 1]:
        console.print(Text.from_ansi(line), soft_wrap=True)
    picture = console.export_svg(title="wink demo", theme=MONOKAI, unique_id="demo")
    # The fonts would be fetched from a server; any monospaced one will do.
    PICTURE.write_text(re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL))


if __name__ == "__main__":
    main()
