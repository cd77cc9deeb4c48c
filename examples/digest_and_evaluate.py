"""A workspace that a model has not seen: its digest, and scripts that work on all of it at once.

Run it with `.venv/bin/python examples/digest_and_evaluate.py`. No key, no network.
"""

from __future__ import annotations

import weakincentives as wink
from weakincentives.contrib.tools import AstevalSection, WorkspaceDigest, WorkspaceDigestSection

FILES = {
    "README.md": "# Till\n\nAdds up what a shop has sold.\n",
    "pyproject.toml": '[project]\nname = "till"\n[tool.pytest.ini_options]\n',
    "till/__main__.py": "from till.report import main\n\nmain()\n",
    "till/report.py": "def main():\n    print('total')\n",
    "sales/monday.csv": "item,cents\nbread,250\nmilk,120\n",
    "sales/tuesday.csv": "item,cents\nbread,250\ncheese,n/a\n",
}

ADD_UP = """
total = 0
for path in glob_files("sales/*.csv"):
    rows = [line.split(",") for line in read_file(path).splitlines()[1:]]
    {skip}
    day = sum(int(cents) for item, cents in rows)
    write_file(path.replace(".csv", ".total"), str(day))
    total += day
total
"""

SCRIPTS = {
    "adds up, and meets a price that is none": ADD_UP.format(skip="pass"),
    "leaves such rows out": ADD_UP.format(skip="rows = [row for row in rows if row[1].isdigit()]"),
    "looks at what is none of its business": "open('/etc/passwd').read()",
}


def main() -> None:
    fs = wink.MemoryFilesystem(FILES)
    digest = WorkspaceDigestSection(filesystem=fs)
    template = wink.PromptTemplate(
        sections=[digest, AstevalSection()], resources={wink.Filesystem: fs}
    )
    prompt, session = wink.Prompt(template), wink.Session()

    print("What the model is told first:")
    _show(prompt.render(session).text.split("_This is a summary")[0])

    for what, code in SCRIPTS.items():
        call = wink.ToolCall("evaluate_python", {"code": code})
        result = wink.execute_tool(call, session=session)
        print(f"\nA script {what}: {'ok' if result.success else 'failed, and changed nothing'}")
        _show(result.render())
        print(f"  files: {', '.join(fs.glob('sales/*'))}")

    prompt.render(session)
    known = session[WorkspaceDigest].latest()
    assert known is not None
    print(f"\nThe digest knows {known.files} files by now.")


def _show(text: str) -> None:
    for line in text.strip().splitlines():
        print(f"  | {line}")


if __name__ == "__main__":
    main()
