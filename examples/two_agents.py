"""Two agents work on one directory at the same time, each on a branch, and merge when done.

Both change the same file. The second to merge is told what the first has changed, and finishes on
top of it. Run it with `.venv/bin/python examples/two_agents.py`.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import weakincentives as wink
from weakincentives.adapters import ScriptedAdapter, Turn, calls
from weakincentives.contrib.tools import VfsConfig, VfsToolsSection
from weakincentives.filesystem import Branch, HostFilesystem
from weakincentives.runtime.merge import merge_branch, rebased

READ = calls(("read_file", {"path": "settings.ini"}))


def edit(old: str, new: str) -> Turn:
    return calls(("edit_file", {"path": "settings.ini", "old_string": old, "new_string": new}))


def work(branch: Branch, session: wink.Session, message: str, turns: list[Turn]) -> None:
    """Let a model work on a branch; this one plays a script."""
    files = VfsToolsSection(config=VfsConfig(filesystem=branch))
    prompt = wink.Prompt(wink.PromptTemplate(sections=[files]))
    with prompt.resources:
        ScriptedAdapter(turns).evaluate(prompt, session, message=message)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder, "project")
        root.mkdir()
        (root / "settings.ini").write_text("port = 80\n")
        HostFilesystem(root).close()

        one, two = wink.Session(), wink.Session()
        with Branch.create(root, "one") as first, Branch.create(root, "two") as second:
            work(first, one, "Use port 8080", [READ, edit("80", "8080"), "Done."])
            work(second, two, "Use port 443", [READ, edit("80", "443"), "Done."])
            print("Before:", (root / "settings.ini").read_text().strip())

            with HostFilesystem(root) as workspace:
                print("one:", merge_branch(first, workspace, one).message)
                conflict = merge_branch(second, workspace, two)
                print("two:", conflict.message)

            told = rebased(second)
            work(second, two, told, [READ, edit("port = 8080", "ports = 8080, 443"), "Done."])
            with HostFilesystem(root) as workspace:
                print("two:", merge_branch(second, workspace, two).message)
                print("After:", (root / "settings.ini").read_text().strip())
                workspace.undo(workspace.history()[-1].call_id)
                print("Undone:", (root / "settings.ini").read_text().strip())


if __name__ == "__main__":
    main()
