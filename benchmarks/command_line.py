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
from weakincentives.cli.hooks import client as hook_client

WINK = Path(sys.executable).with_name("wink")
HOOK = {
    "session_id": "bench",
    "prompt_id": "bench",
    "tool_name": "Bash",
    "tool_input": {"command": "make"},
    "tool_response": "ok",
}


def main() -> None:
    batches = 5 if is_quick() else 20
    with tempfile.TemporaryDirectory() as folder:
        project = Path(folder, "project")
        project.mkdir()
        (project / "a.txt").write_text("text\n")
        environment = {**os.environ, "XDG_STATE_HOME": f"{folder}/state"}
        environment["WINK_HOOK_IDLE"] = "60"

        def wink(*arguments: str, text: str = "") -> None:
            command = [str(WINK), *arguments]
            subprocess.run(
                command, cwd=project, env=environment, input=text.encode(), capture_output=True
            ).check_returncode()

        for number in range(20):
            wink("exec", "--", "sh", "-c", f"echo {number} >>a.txt")
        numbers = iter(range(1_000_000))

        client = [sys.executable, "-I", "-S", hook_client.__file__, "claude"]

        def event(name: str, use: int) -> None:
            told = {**HOOK, "cwd": str(project), "tool_use_id": f"t{use}", "hook_event_name": name}
            text = json.dumps(told).encode()
            subprocess.run(client, input=text, env=environment, check=True, capture_output=True)

        def tool() -> None:
            number = next(numbers)
            event("PreToolUse", number)
            (project / "a.txt").write_text(f"{number}\n")
            event("PostToolUse", number)

        measure("wink --help", lambda: wink("--help"), batches)
        measure("wink log", lambda: wink("log"), batches)
        measure("wink exec -- true", lambda: wink("exec", "--", "true"), batches)
        tool()
        time.sleep(3)  # the process that takes the next events gets ready
        measure("one hook event", tool, batches, operations=2)
        measure("one hook event, nothing recorded", lambda: event("Stop", 0), batches)


def measure(name: str, operation: Callable[[], None], batches: int, *, operations: int = 1) -> None:
    operation()
    samples = Samples()
    for _ in range(batches):
        began = time.perf_counter()
        operation()
        samples.add(0, (time.perf_counter() - began) / operations)
    taken = sorted(samples.wall)
    emit(
        "command line",
        command=name,
        wall=round(taken[len(taken) // 2], 1),
        wall_p10=round(taken[len(taken) // 10], 1),
    )


if __name__ == "__main__":
    main()
