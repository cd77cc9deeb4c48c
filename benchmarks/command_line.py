"""Commands from start to end, as a shell or an agent's hook starts them, with byte code."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from timing import Samples, emit, is_quick

WINK = Path(sys.executable).with_name("wink")
HOOK = {"session_id": "bench", "tool_name": "Read", "tool_input": {"file_path": "a.txt"}}


def main() -> None:
    batches = 5 if is_quick() else 20
    with tempfile.TemporaryDirectory() as folder:
        project = Path(folder, "project")
        project.mkdir()
        (project / "a.txt").write_text("text\n")
        environment = {**os.environ, "XDG_STATE_HOME": f"{folder}/state"}

        def wink(*arguments: str, text: str = "") -> None:
            command = [str(WINK), *arguments]
            subprocess.run(
                command, cwd=project, env=environment, input=text.encode(), capture_output=True
            ).check_returncode()

        for number in range(20):
            wink("exec", "--", "sh", "-c", f"echo {number} >>a.txt")
        numbers = iter(range(1_000_000))

        def hook() -> None:
            event = {**HOOK, "cwd": str(project), "tool_use_id": f"tool-{next(numbers)}"}
            wink("hook", "claude-code", text=json.dumps(event | {"hook_event_name": "PreToolUse"}))

        measure("wink --help", lambda: wink("--help"), batches)
        measure("wink log", lambda: wink("log"), batches)
        measure("wink exec -- true", lambda: wink("exec", "--", "true"), batches)
        measure("one hook event", hook, batches)


def measure(name: str, operation: Callable[[], None], batches: int) -> None:
    operation()
    samples = Samples()
    for _ in range(batches):
        began = time.perf_counter()
        operation()
        samples.add(0, time.perf_counter() - began)
    taken = sorted(samples.wall)
    emit(
        "command line",
        command=name,
        wall=round(taken[len(taken) // 2], 1),
        wall_p10=round(taken[len(taken) // 10], 1),
    )


if __name__ == "__main__":
    main()
