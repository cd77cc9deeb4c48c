"""The slot for telemetry. There is one, for the whole process, and it is empty until filled.

``telemetry.instrument`` fills it; the pipeline and the loop look into it once for each call,
turn and run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weakincentives.telemetry import Telemetry

__all__ = ["telemetry"]

telemetry: Telemetry | None = None
