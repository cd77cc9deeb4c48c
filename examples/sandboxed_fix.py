"""A scripted model repairs a program with shell commands: the first try is undone, the second kept.

Run it with `.venv/bin/python examples/sandboxed_fix.py`. Needs Linux.
"""

from __future__ import annotations

import weakincentives as wink
from weakincentives.adapters import ScriptedAdapter, Turn, calls
from weakincentives.contrib.tools import PodmanSandboxConfig, PodmanSandboxSection
from weakincentives.runtime import ToolInvoked

FILES = {
    "mean.py": "def mean(prices):\n    return sum(prices) / 2\n",
    "test_mean.py": "from mean import mean\n\nassert mean([1, 2, 6]) == 3\nassert mean([]) == 0\n",
}

# What the model tries: change the program, and run its test in the same command.
FIX = "sed -i 's:/ 2:/ len(prices):' mean.py"
GUARD = "sed -i 's:    return:    if not prices\\:\\n        return 0\\n    return:' mean.py"
TEST = "python3 test_mean.py"

SCRIPT: list[Turn] = [
    calls(("shell_execute", {"command": "cat mean.py; cat /etc/shadow"})),
    calls(("shell_execute", {"command": f"{FIX} && {TEST}"})),  # an empty list still fails: undone
    calls(("read_file", {"path": "mean.py"})),
    calls(("shell_execute", {"command": f"{FIX} && {GUARD} && {TEST}"})),
    calls(("evaluate_python", {"code": "from mean import mean\nmean([2, 4, 9])"})),
    "The mean is right now, also of nothing.",
]


def main() -> None:
    session = wink.Session()
    # Bubblewrap and namespaces of our own come after podman; without any, commands are refused.
    section = PodmanSandboxSection(config=PodmanSandboxConfig(files=FILES))
    prompt = wink.Prompt(wink.PromptTemplate(sections=[section]))
    with prompt.resources as resources:
        answer = ScriptedAdapter(SCRIPT).evaluate(prompt, session)
        repaired = resources.get(wink.Filesystem).read("mean.py")
    print(f"Commands ran in: {section.sandbox.name}")
    for engine, reason in section.sandbox.passed_over:
        print(f"  not in {engine}: {reason}")
    for record in session[ToolInvoked].all():
        print(f"\n{'ok' if record.success else '--'} {record.tool_name:<16} ", end="")
        print("\n   ".join(record.result.render().splitlines()))
    print(f"\n{answer.text} mean.py:\n{repaired}")


if __name__ == "__main__":
    main()
