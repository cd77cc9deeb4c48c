"""An agent that draws a chart, looks at it, and corrects it until it can be read.

    export OPENAI_API_KEY=sk-...
    python examples/draw_and_look.py "Compare 3, 5 and 40" [sketch.png]

A picture as second argument goes with the task. OPENAI_MODEL names another model that can see;
OPENAI_BASE_URL another server that speaks the same format. The chart is written to chart.png, and a
call that fails leaves no trace of it.
"""

from __future__ import annotations

import os
import struct
import sys
import zlib
from dataclasses import dataclass

import weakincentives as wink
from weakincentives.adapters import OpenAIAdapter, RunConfig
from weakincentives.filesystem import HostFilesystem

TASK = """\
Draw what the user asks for with `draw_bars`. You then see the picture: if a bar cannot be seen or
is cut off, draw it again with another scale. Then say in one sentence what it shows."""
HEIGHT = 100


@dataclass(frozen=True)
class Chart:
    bars: int
    picture: wink.Media

    def render(self) -> str:
        return f"{self.bars} bars, saved as chart.png: {self.picture.render()}"


@wink.tool(reach="reversible")
def draw_bars(heights: list[int], scale: float = 1.0, *, context: wink.ToolContext) -> Chart:
    """Draw bars next to each other, 100 pixels high at most."""
    tall = [round(height * scale) for height in heights]
    if not tall or min(tall) < 0:
        raise ValueError("Give at least one height, and none below zero.")
    rows = [
        b"".join(b"\0" * 10 if HEIGHT - row <= bar else b"\xff" * 10 for bar in tall)
        for row in range(HEIGHT)
    ]
    picture = wink.Media(png(rows), name="chart.png")
    context.filesystem.write_bytes("chart.png", picture.data)
    return Chart(len(tall), picture)


def png(rows: list[bytes]) -> bytes:
    """Return a grey picture."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        checksum = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + checksum

    head = struct.pack(">IIBBBBB", len(rows[0]), len(rows), 8, 0, 0, 0, 0)
    pixels = zlib.compress(b"".join(b"\0" + row for row in rows))
    parts = chunk(b"IHDR", head), chunk(b"IDAT", pixels), chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def main(task: str, *pictures: str) -> None:
    section = wink.MarkdownSection(title="Charts", template=TASK, tools=[draw_bars])
    model = OpenAIAdapter(os.environ.get("OPENAI_MODEL", "gpt-5-mini"))
    with HostFilesystem(".") as files:
        template = wink.PromptTemplate(sections=[section], resources={wink.Filesystem: files})
        response = model.evaluate(
            wink.Prompt(template),
            wink.Session(),
            message=[task, *map(wink.Media.from_file, pictures)],
            config=RunConfig(max_turns=10, time_limit=300),
        )
    print(response.text)


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["Compare 3, 5 and 40"]))
