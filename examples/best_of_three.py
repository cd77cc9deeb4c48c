"""Three scripted models try to repair a function; the tests decide which repair is merged.

Run it with `.venv/bin/python examples/best_of_three.py`.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import weakincentives as wink
from weakincentives.adapters import PromptResponse, ScriptedAdapter, calls
from weakincentives.contrib.tools import VfsConfig, VfsToolsSection
from weakincentives.filesystem import Branch, branches_of
from weakincentives.prompt import ProtectedPathsPolicy
from weakincentives.runtime import best_of

FILES = {
    "shop.py": "def total(prices):\n    return sum(prices) - prices[0]\n",
    "check.py": "from shop import total\n\nassert total([1, 2]) == 3\nassert total([]) == 0\n",
}
REPAIRS = ["sum(prices) - 0 * prices[0]", "sum(prices)", "prices[0] + prices[1]"]


def repair(code: str) -> Callable[[Branch], PromptResponse]:
    """Return an attempt: a model of its own that works on the branch it gets."""

    def attempt(branch: Branch) -> PromptResponse:
        edit = {
            "path": "shop.py",
            "old_string": "sum(prices) - prices[0]",
            "new_string": code,
        }
        model = ScriptedAdapter(
            [calls(("read_file", {"path": "shop.py"})), calls(("edit_file", edit)), "Repaired."]
        )
        files = VfsToolsSection(config=VfsConfig(filesystem=branch))
        # The check decides, so no attempt may change it.
        rules = [ProtectedPathsPolicy(["check.py"])]
        prompt = wink.Prompt(wink.PromptTemplate(sections=[files], policies=rules))
        with prompt.resources:
            return model.evaluate(prompt, wink.Session())

    return attempt


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        workspace = Path(folder) / "shop"
        workspace.mkdir()
        for name, text in FILES.items():
            (workspace / name).write_text(text)

        found = best_of(
            workspace, list(map(repair, REPAIRS)), [sys.executable, "check.py"], name="repair"
        )

        for each in found.attempts:
            assert each.verdict is not None
            print(f"{each.branch} {'passed' if each.passed else 'failed'}: {each.verdict.reason}")
        print(f"Merged: {found.merged}")
        print(f"Left: {[each.name for each in branches_of(workspace)]}")
        print((workspace / "shop.py").read_text())


if __name__ == "__main__":
    main()
