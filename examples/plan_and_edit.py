"""A scripted model plans a repair, edits real files, goes wrong, and is sent back to finish.

Run it with `.venv/bin/python examples/plan_and_edit.py`.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import weakincentives as wink
from weakincentives.adapters import RunConfig, ScriptedAdapter, Turn, calls
from weakincentives.contrib.tools import Plan, PlanningToolsSection, VfsConfig, VfsToolsSection
from weakincentives.runtime import ToolInvoked

FILES = {
    "shop.py": "def total(prices):\n    return sum(prices) - prices[0]\n",
    "check.py": "from shop import total\n\nassert total([1, 2, 3]) == 6\n",
}


@wink.tool(reach="read")
def run_check(*, context: wink.ToolContext) -> str:
    """Run check.py and say whether it passes."""
    files = context.filesystem
    source = files.read("shop.py") + files.read("check.py").replace("from shop import total", "")
    command = [sys.executable, "-c", source]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"The check fails: {done.stderr.splitlines()[-1]}")
    return "The check passes"


@wink.tool(reach="reversible")
def fix_and_check(old: str, new: str, *, context: wink.ToolContext) -> str:
    """Replace a text in shop.py and run the check; if it fails, nothing is changed."""
    edit = {"path": "shop.py", "old_string": old, "new_string": new}
    for call in (wink.ToolCall("edit_file", edit), wink.ToolCall("run_check")):
        result = wink.execute_tool(call, context=context)
        if not result.success:
            raise ValueError(result.message)
    return "Fixed, and the check passes"


SCRIPT: list[Turn] = [
    calls(
        ("setup_plan", {"objective": "Fix the total", "steps": ["Find it", "Fix it", "Check it"]}),
        ("grep_files", {"pattern": r"def total\("}),
        ("fix_and_check", {"old": "- prices[0]", "new": ""}),  # refused: not read yet
    ),
    calls(("read_file", {"path": "shop.py"}), ("update_step", {"step": 1, "status": "done"})),
    calls(("fix_and_check", {"old": "prices[0]", "new": "prices[1]"})),  # still wrong: undone
    calls(("fix_and_check", {"old": " - prices[0]", "new": ""})),
    calls(("update_step", {"step": 2, "status": "done"})),
    "The total is fixed.",  # the plan says otherwise
    calls("run_check", ("update_step", {"step": 3, "status": "done"})),
    "The total is fixed and checked.",
]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        workspace = Path(folder) / "shop"
        workspace.mkdir()
        for name, text in FILES.items():
            (workspace / name).write_text(text)

        session = wink.Session()
        planning = PlanningToolsSection(session=session)
        files = VfsToolsSection(session=session, config=VfsConfig(workspace=workspace))
        checks = wink.MarkdownSection(title="Checks", tools=[run_check, fix_and_check])
        prompt = wink.Prompt(wink.PromptTemplate(sections=[planning, files, checks]))
        adapter = ScriptedAdapter(SCRIPT)
        config = RunConfig(completion=planning.completion)
        with prompt.resources:
            answer = adapter.evaluate(prompt, session, config=config)

        for record in session[ToolInvoked].all():
            said = record.result.render().splitlines()[0]
            print(f"{'ok' if record.success else '--'} {record.tool_name:<13} {said}")
        plan, last = session[Plan].latest(), adapter.last_request
        assert plan is not None
        assert last is not None
        asked = [each.text for each in last.messages if each.role == "user"]
        print(f"\nSent back once: {asked[-1]}")
        print(f"\n{plan.render()}\n\n{answer.text}")
        print(f"shop.py is now: {(workspace / 'shop.py').read_text()!r}")


if __name__ == "__main__":
    main()
