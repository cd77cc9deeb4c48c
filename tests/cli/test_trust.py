"""Code of a directory runs in `wink` itself only as the user has approved it."""

from __future__ import annotations

import json
import os
import py_compile
import sys
from pathlib import Path

import pytest
from terminal import WINK, Terminal, wink

TOOLS = """
import os
open(os.environ["MARK"], "a").write("tools ")
{more}
import weakincentives as wink
@wink.tool(reach="read")
def mine() -> str:
    "Say something."
    return "mine"
"""
RULES = """
import os
open(os.environ["MARK"], "a").write("rules ")
class Rules:
    name = "rules"
    def check(self, tool_name, params, context):
        return None
"""
EVIL = 'import os\nopen(os.environ["MARK"], "a").write("evil ")\nmine = Rules = helper = None\n'


class Project:
    """A directory, `wink` on it, and a mark that its code leaves when it runs."""

    def __init__(self, above: Path) -> None:
        self.root = above / "project"
        self.root.mkdir()
        self.mark = above / "mark"
        self.above = above

    def write(self, **files: str) -> None:
        for name, text in files.items():
            path = self.root / name.replace("__", "/").replace("_py", ".py").replace(
                "_toml", ".toml"
            )
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    def __call__(self, *words: str, cwd: Path | None = None, **env: str) -> tuple[int, str]:
        """Return how a command ended, and what it said."""
        more = {"MARK": str(self.mark), **env}
        done = wink(*words, "-w", str(self.root), cwd=cwd or self.above, env=more)
        return done.returncode, done.stdout + done.stderr

    def approve(self, *words: str, **env: str) -> None:
        code, said = self("policy", "trust", "--yes", *words, **env)
        assert code == 0, said

    def ran(self) -> str:
        """Return what has run since it was last asked."""
        ran = self.mark.read_text() if self.mark.exists() else ""
        self.mark.unlink(missing_ok=True)
        return ran.strip()


@pytest.fixture
def project(tmp_path: Path) -> Project:
    project = Project(tmp_path)
    project.write(wink_toml='sections = ["tools.py:mine"]\n', tools_py=TOOLS.format(more=""))
    return project


def test_code_that_nobody_approved_does_not_run(project: Project):
    for words in (["tools"], ["policy", "check"], ["doctor"], ["run", "x", "-m", "scripted:none"]):
        code, said = project(*words)

        assert code != 0
        assert "wink.toml" in said
        assert "tools.py" in said
        assert "wink policy trust" in said
        assert project.ran() == ""


def test_without_a_terminal_nothing_is_approved_unless_told_to(project: Project):
    code, said = project("policy", "trust")

    assert code == 2
    assert "there is no terminal to ask at; review these files, then add --yes" in said
    code, said = project("policy", "check")
    assert (code, "not approved: wink.toml (new), tools.py (new)" in said) == (2, True), said
    code, said = project("doctor")
    assert "not approved: wink.toml (new), tools.py (new)" in said


def test_approved_code_runs_until_it_changes(project: Project):
    project.approve()
    assert project.ran() == ""  # to approve something is not to run it

    assert project("tools")[0] == 0
    assert project.ran() == "tools"

    project.write(tools_py=EVIL)
    code, said = project("tools")
    assert code == 2
    assert "tools.py (changed)" in said
    assert project.ran() == ""


def test_so_do_settings_that_name_other_code(project: Project):
    project.approve()
    project.write(wink_toml='sections = ["os:abort"]\n')

    code, said = project("tools")

    assert code == 2
    assert "wink.toml (changed)" in said


@pytest.mark.parametrize(
    "setting",
    [
        'sandbox = "none"\n',
        '[sandbox]\nread = ["/var/log"]\n',
        '[sandbox]\nenv = ["TOKEN"]\n',
        '[sandbox]\nlimits = { memory = "64 GiB" }\n',
        '[policy]\nunprotect = [".git"]\n',
    ],
)
def test_so_do_settings_that_lift_a_protection(project: Project, setting: str):
    project.write(wink_toml=setting)
    code, said = project("tools")
    assert code == 2
    assert "wink.toml (new)" in said

    project.approve()
    assert project("tools")[0] == 0
    assert project("tools", WINK_SANDBOX="none")[0] == 0


def test_so_does_an_image(project: Project):
    """Commands would see everything in it, and it may be a private one of the user."""
    project.write(wink_toml='[sandbox]\nimage = "localhost/private"\n')

    code, said = project("tools")

    assert code == 2
    assert "not approved: wink.toml (new)" in said


def test_settings_that_only_bind_the_agent_need_no_approval(project: Project):
    project.write(
        wink_toml='suites = ["files"]\n[policy]\nprotect = [".env"]\n[sandbox]\ndetect = false\n'
    )

    assert project("tools")[0] == 0


def test_byte_code_of_the_workspace_is_never_loaded(project: Project):
    """Whatever its header says about the file that it seems to come from."""
    project.write(helper_py="helper = 1\n")
    project.write(tools_py=TOOLS.format(more="import helper"))
    project.approve(PYTHONPATH=str(project.root))
    for name in ("tools", "helper"):
        source = project.root / f"{name}.py"
        evil = project.above / "evil" / f"{name}.py"
        evil.parent.mkdir(exist_ok=True)
        evil.write_text(EVIL)
        cached = project.root / "__pycache__" / f"{name}.{sys.implementation.cache_tag}.pyc"
        py_compile.compile(
            str(evil),
            str(cached),
            invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
        )
        assert source.exists()

    assert project("tools", PYTHONPATH=str(project.root))[0] == 0
    assert project.ran() == "tools"

    # Nor alone, without a source.
    for source in project.root.glob("*.py"):
        if source.name == "helper.py":
            source.unlink()
            (project.root / "__pycache__" / f"helper.{sys.implementation.cache_tag}.pyc").rename(
                project.root / "helper.pyc"
            )
    code, said = project("tools", PYTHONPATH=str(project.root))
    assert code == 2
    assert "evil" not in project.ran()
    assert "only source files" in said


def test_what_it_imports_of_the_workspace_counts_as_well(project: Project):
    project.write(
        tools_py=TOOLS.format(more="import helper\nfrom lib import deep"),
        helper_py="helper = 1\n",
        lib__deep_py="",
    )
    (project.root / "lib/__init__.py").write_text("from .other import x\n")
    (project.root / "lib/other.py").write_text("x = 1\n")
    here = str(project.root)
    code, said = project("tools", PYTHONPATH=here)
    assert code == 2
    for name in ("tools.py", "helper.py", "lib/__init__.py", "lib/deep.py", "lib/other.py"):
        assert name in said
    project.approve(PYTHONPATH=here)
    assert project("tools", PYTHONPATH=here)[0] == 0
    assert project.ran() == "tools"
    for name in ("helper.py", "lib/deep.py", "lib/other.py"):
        before = (project.root / name).read_text()
        (project.root / name).write_text(EVIL)
        code, said = project("tools", PYTHONPATH=here)
        assert (code, project.ran()) == (2, "")
        assert f"{name} (changed)" in said
        (project.root / name).write_text(before)


def test_what_it_loads_without_saying_so_is_refused_when_it_is_met(project: Project):
    more = """import sys, importlib
sys.path.insert(0, "SUB")
importlib.import_module("hid" + "den")"""
    sub = project.root / "sub"
    project.write(tools_py=TOOLS.format(more=more.replace("SUB", str(sub))), sub__hidden_py=EVIL)
    project.approve()

    code, said = project("tools")
    assert code == 2
    assert project.ran() == "tools"
    assert "sub/hidden.py is not approved" in said
    assert "wink policy trust sub/hidden.py" in said

    project.approve(str(sub / "hidden.py"))
    assert project("tools")[0] == 0
    assert project.ran() == "tools evil"


def test_a_module_of_the_workspace_is_code_of_the_workspace(project: Project):
    project.write(wink_toml='sections = ["tools:mine"]\n')
    here = str(project.root)
    code, said = project("tools", PYTHONPATH=here)
    assert code == 2
    assert "tools.py (new)" in said
    project.approve(PYTHONPATH=here)
    assert project("tools", PYTHONPATH=here)[0] == 0
    project.ran()
    project.write(tools_py=EVIL)

    assert project("tools", PYTHONPATH=here)[0] == 2
    assert project.ran() == ""


def test_links_do_not_help(project: Project):
    """Neither that of the file nor that of a directory above it."""
    project.write(real__tools_py=TOOLS.format(more=""), evil__tools_py=EVIL)
    (project.root / "tools.py").unlink()
    (project.root / "linked").symlink_to("real")
    project.write(wink_toml='sections = ["linked/tools.py:mine"]\n')
    project.approve()
    assert project("tools")[0] == 0
    project.ran()
    (project.root / "linked").unlink()
    (project.root / "linked").symlink_to("evil")

    assert project("tools")[0] == 2
    assert project.ran() == ""


def test_no_file_of_the_workspace_takes_the_place_of_a_module(project: Project):
    """A module that is loaded late, such as a model's library, comes from where it is installed."""
    project.write(wink_toml="")
    for name in ("sqlite3", "jsonschema", "gettext", "typer", "litellm", "rpds"):
        (project.root / f"{name}.py").write_text(EVIL)
    script = project.above / "script.json"
    script.write_text(json.dumps([{"call": ["list_directory"]}, "Done."]))
    where = str(project.root)
    code, said = project(
        "run",
        "x",
        "-m",
        f"scripted:{script}",
        "--sandbox",
        "none",
        cwd=project.root,
        PYTHONPATH=where,
    )

    assert code == 0, said
    assert project.ran() == ""


def test_what_a_person_names_runs_and_is_approved_by_that(project: Project):
    """A run that is resumed has it as it was then, or not at all."""
    project.write(wink_toml="", rules_py=RULES)
    script = project.above / "script.json"
    script.write_text(json.dumps(["Done."]))
    rule = f"{project.root}/rules.py:Rules"
    words = ["-m", f"scripted:{script}", "--sandbox", "none"]
    code, said = project("run", "x", *words, "--policy", rule)
    assert code == 0, said
    assert project.ran() == "rules"

    script.write_text(json.dumps(["Done.", "Again.", "And again."]))
    code, said = project("resume", "go on please", *words[:2])
    assert code == 0, said
    assert project.ran() == "rules"

    project.write(rules_py=EVIL)
    code, said = project("resume", "go on please", *words[:2])
    assert code == 2
    assert "rules.py (changed)" in said
    assert project.ran() == ""

    # Naming it again is another decision.
    project.write(rules_py=RULES + "# looked at\n")
    code, said = project("resume", "go on please", *words[:2], "--policy", rule)
    assert code == 0, said


def test_the_record_of_what_is_approved_cannot_be_forged(project: Project, state: Path):
    project.approve()
    [record] = (state / "wink/approved").iterdir()
    seal, data = record.read_bytes().split(b" ", 1)
    project.write(tools_py=EVIL)
    import hashlib

    digest = hashlib.sha256(EVIL.encode()).hexdigest()
    record.write_bytes(seal + b" " + json.dumps({**json.loads(data), "tools.py": digest}).encode())

    assert project("tools")[0] == 2
    assert project.ran() == ""


def test_somebody_at_a_terminal_is_asked(project: Project):
    words = [*WINK, "tools", "-w", str(project.root)]
    env = {**os.environ, "MARK": str(project.mark)}
    with Terminal(words, cwd=project.above, env=env) as terminal:
        terminal.wait_for("Do you approve these files")
        assert "tools.py" in terminal.text
        assert project.ran() == ""
        terminal.send("n\r")
        assert terminal.end() == 2
    assert project.ran() == ""
    with Terminal(words, cwd=project.above, env=env) as terminal:
        terminal.wait_for("Do you approve these files")
        terminal.send("y\r")
        assert terminal.end() == 0
    assert project.ran() == "tools"
    assert project("tools")[0] == 0


def test_an_agent_changes_neither_the_settings_nor_what_they_name(project: Project):
    (project.root / "sub").mkdir()
    project.approve()
    script = project.above / "script.json"
    calls = [
        ("write_file", {"path": path, "content": "x", "overwrite": True})
        for path in ("wink.toml", "tools.py", "sub/wink.toml")
    ]
    script.write_text(
        json.dumps([*({"call": [{name: params}]} for name, params in calls), "Done."])
    )
    words = ["run", "x", "-m", f"scripted:{script}", "--sandbox", "none", "--policy"]
    code, said = project(*words, "read_before_write=no")

    assert code == 0, said
    assert said.count("it is protected") >= 3 or said.count("denied") >= 3
    assert (project.root / "tools.py").read_text() == TOOLS.format(more="")
    assert not (project.root / "sub/wink.toml").exists()
