"""An agent repairs a real project: its tests are protected, and a wrong fix leaves no trace.

Run it with `.venv/bin/python examples/code_fixer.py`. To let a model of yours do it, put an adapter
of its kind in place of the scripted one, and your own directory in place of the one made here.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import weakincentives as wink
from weakincentives.adapters import Adapter, RunConfig, ScriptedAdapter, Turn, calls
from weakincentives.contrib.tools import PodmanSandboxConfig, PodmanSandboxSection, find_sandbox
from weakincentives.errors import SandboxUnavailable
from weakincentives.filesystem import HostFilesystem
from weakincentives.prompt import ProtectedPathsPolicy
from weakincentives.runtime import ToolInvoked

PROJECT = {
    "mean.py": "def mean(values):\n    return sum(values) / 2\n",
    "test_mean.py": """\
import unittest
from mean import mean


class MeanTest(unittest.TestCase):
    def test_three_values(self):
        self.assertEqual(mean([1, 2, 6]), 3)

    def test_no_values(self):
        self.assertEqual(mean([]), 0)
""",
}
TASK = "The tests fail. Repair the program, and leave the tests as they are."

# What the scripted model does, as a model might. The tests decide: a command that fails has
# changed nothing.
TEST = "python3 -B -m unittest"
SCRIPT: list[Turn] = [
    calls(("shell_execute", {"command": TEST})),
    calls(("read_file", {"path": "mean.py"}), ("read_file", {"path": "test_mean.py"})),
    calls(("write_file", {"path": "test_mean.py", "content": "", "overwrite": True})),  # denied
    calls(("shell_execute", {"command": f"sed -i 's:/ 2:/ len(values):' mean.py && {TEST}"})),
    calls(
        (
            "edit_file",
            {"path": "mean.py", "old_string": "/ 2", "new_string": "/ (len(values) or 1)"},
        )
    ),
    calls(("shell_execute", {"command": TEST})),
    "The mean is right now, also of no values. All tests pass.",
]


def fix(directory: Path, model: Adapter) -> None:
    session = wink.Session()
    with HostFilesystem(directory) as files:
        # Leave "none" out for a real model: where no sandbox works, its commands are refused then.
        config = PodmanSandboxConfig(filesystem=files, sandbox="auto" if has_sandbox() else "none")
        template = wink.PromptTemplate(
            sections=[
                wink.MarkdownSection(title="Task", template=TASK),
                PodmanSandboxSection(config=config),  # file tools, and a shell in the sandbox
            ],
            policies=[ProtectedPathsPolicy(["test_*.py"])],
        )
        limits = RunConfig(max_turns=40, time_limit=600)
        answer = model.evaluate(wink.Prompt(template), session, config=limits)

        for record in session[ToolInvoked].all():
            said = record.result.render().splitlines()[0]
            print(f"{'ok' if record.success else '--'} {record.tool_name:<13} {said}")
        print(f"\n{answer.text}")
        for change in files.history():
            print(f"\n{files.diff(change.call_id)}")


def has_sandbox() -> bool:
    try:
        print(f"Commands run in: {find_sandbox().name}\n")
    except SandboxUnavailable as error:
        print(f"Commands run without a sandbox, and can do what you can ({error})\n")
        return False
    return True


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "project"
        directory.mkdir()
        for name, text in PROJECT.items():
            (directory / name).write_text(text)
        fix(directory, ScriptedAdapter(SCRIPT))


if __name__ == "__main__":
    main()
