"""Draws docs/tour.svg: what `make demo` prints, as a picture of a terminal."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

HERE = Path(__file__).parent
STYLES = [
    (r"^# .*", "dim"),
    (r"^> .*", "bold"),
    (r"^  committed.*", "green"),
    (r"^  rolled back.*", "bold red"),
    (r"^  refused.*", "yellow"),
]


def main() -> None:
    """Run the tour and draw its first part, which is what there is to see."""
    tour = subprocess.run(
        [sys.executable, str(HERE.parent / "examples" / "tour.py")],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    shown = "$ make demo\n" + tour.split("\nWhat the session remembers")[0]
    console = Console(record=True, width=100, file=open("/dev/null", "w"))  # noqa: SIM115
    for line in shown.splitlines():
        text = Text(line)
        for pattern, style in STYLES:
            if re.match(pattern, line):
                text.stylize(style)
        console.print(text, overflow="fold")
    picture = console.export_svg(title="make demo", theme=MONOKAI)
    # The fonts would be fetched from a server; any monospaced one will do.
    picture = re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL)
    (HERE / "tour.svg").write_text(picture)


if __name__ == "__main__":
    main()
