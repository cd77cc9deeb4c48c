"""Find the call that broke a value, in SQL: which call wrote it, and what the model was thinking.

A scripted agent works on a shop for six calls. One of them writes a wrong tax rate, along with
what it was asked for. Run it: python examples/debugger_query.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import weakincentives as wink
from weakincentives.adapters import ScriptedAdapter, Turn, calls, says
from weakincentives.contrib.tools import VfsConfig, VfsToolsSection
from weakincentives.debugger import query_run
from weakincentives.filesystem import HostFilesystem
from weakincentives.runtime import open_run

SHOP = "TAX = 0.19\nCURRENCY = 'EUR'\nSHIPPING = 5\n"


def edit(old: str, new: str, why: str) -> Turn:
    arguments = {"path": "shop.py", "old_string": old, "new_string": new}
    return calls(("edit_file", arguments), text=why)


# Any adapter will do; this one needs no key.
MODEL = ScriptedAdapter(
    [
        calls(("read_file", {"path": "shop.py"}), text="I look at the shop first."),
        edit("SHIPPING = 5", "SHIPPING = 4", "Shipping gets cheaper."),
        edit(
            "TAX = 0.19\nCURRENCY = 'EUR'",
            "TAX = 0.91\nCURRENCY = 'CHF'",
            "The currency is next; I rewrite the line above it, too.",
        ),
        edit("SHIPPING = 4", "SHIPPING = 3", "Shipping can be cheaper still."),
        calls(("write_file", {"path": "README", "content": "A shop\n"}), text="Now the README."),
        calls(("read_file", {"path": "shop.py"}), text="I read it once more."),
        says("Done."),
    ]
)

WHO_WROTE_IT = """
    select calls.name, calls.tool, events.text as thought, changes.patch
    from changes
    join calls on calls.run = changes.run and calls.n = changes.n
    join events on events.run = calls.run and events.turn = calls.turn and events.role = 'model'
    where changes.path = 'shop.py' and changes.patch like '%+TAX = 0.91%'
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder, "shop")
        root.mkdir()
        (root / "shop.py").write_text(SHOP)
        with HostFilesystem(root) as files, open_run(files, "Improve the shop") as run:
            section = VfsToolsSection(config=VfsConfig(filesystem=files))
            prompt = wink.Prompt(wink.PromptTemplate(sections=[section]))
            with prompt.resources:
                MODEL.evaluate(prompt, run.session, message="Improve the shop")

        print("Calls by outcome:")
        for outcome, count in query_run(
            root, "select outcome, count(*) from calls group by outcome order by outcome"
        ).rows:
            print(f"  {outcome}: {count}")

        ((name, tool, thought, patch),) = query_run(root, WHO_WROTE_IT).rows
        number = str(name).rpartition("/")[2]
        print(f"TAX = 0.91 was written by call {number}, {tool}.")
        print(f"The model said: {thought}")
        print(patch, end="")


if __name__ == "__main__":
    main()
