"""What a command is set to, and what is said about settings that are wrong."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from commands import Wink

from weakincentives.cli.common import Misuse
from weakincentives.cli.config import KEYS, PolicySettings, Settings, load_settings
from weakincentives.cli.workbench import Workbench, open_workbench
from weakincentives.runtime import ToolCall, execute_tool

WHOLE = """
model = "openai:gpt-5-mini"
suites = ["files", "planning"]
sandbox = "namespaces"
ask = ["irreversible"]
max_turns = 7
max_tokens = 20_000
time_limit = 1.5
sections = ["tools.py:section"]

[policy]
read_before_write = false
protect = [".env"]
deny = ["delete_*"]
quota = { write_file = 3 }
rate = { write_file = "5/minute" }
after = { write_file = ["read_file"] }
use = ["rules.py:rules"]
unprotect = [".git/config"]
"""


@pytest.fixture(autouse=True)
def _nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("WINK_") and name != "WINK_HEAVY":
            monkeypatch.delenv(name)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    project = tmp_path / "project"
    project.mkdir()
    return project


# Where settings come from


def test_without_a_file_the_defaults_hold(project: Path):
    settings = load_settings(project)

    assert settings == Settings(workspace=project.resolve())
    assert settings.suites == ("files", "shell", "planning", "digest")
    assert settings.policy == PolicySettings(read_before_write=True)


def test_every_key_can_stand_in_the_file(project: Path):
    (project / "wink.toml").write_text(WHOLE)

    assert load_settings(project) == Settings(
        workspace=project.resolve(),
        model="openai:gpt-5-mini",
        suites=("files", "planning"),
        sandbox="namespaces",
        ask=("irreversible",),
        max_turns=7,
        max_tokens=20_000,
        time_limit=1.5,
        sections=("tools.py:section",),
        policy=PolicySettings(
            read_before_write=False,
            protect=(".env",),
            deny=("delete_*",),
            quota={"write_file": 3},
            rate={"write_file": "5/minute"},
            after={"write_file": ("read_file",)},
            use=("rules.py:rules",),
            unprotect=(".git/config",),
        ),
    )


def test_every_key_can_stand_in_the_environment(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The same settings, written as variables, are the same settings."""
    (project / "wink.toml").write_text(WHOLE)
    from_file = load_settings(project)
    (project / "wink.toml").unlink()
    variables = {
        "WINK_MODEL": "openai:gpt-5-mini",
        "WINK_SUITES": "files, planning",
        "WINK_SANDBOX": "namespaces",
        "WINK_ASK": "irreversible",
        "WINK_MAX_TURNS": "7",
        "WINK_MAX_TOKENS": "20000",
        "WINK_TIME_LIMIT": "1.5",
        "WINK_SECTIONS": "tools.py:section",
        "WINK_POLICY_READ_BEFORE_WRITE": "no",
        "WINK_POLICY_PROTECT": ".env",
        "WINK_POLICY_DENY": "delete_*",
        "WINK_POLICY_QUOTA": "write_file:3",
        "WINK_POLICY_RATE": "write_file:5/minute",
        "WINK_POLICY_AFTER": "write_file:read_file",
        "WINK_POLICY_USE": "rules.py:rules",
        "WINK_POLICY_UNPROTECT": ".git/config",
    }
    assert len(variables) == len(KEYS)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    assert load_settings(project) == from_file


def test_flags_win_over_the_environment_and_that_over_the_file(
    project: Path, monkeypatch: pytest.MonkeyPatch
):
    (project / "wink.toml").write_text('model = "file"\nsandbox = "none"\nmax_turns = 1\n')
    monkeypatch.setenv("WINK_SANDBOX", "podman")
    monkeypatch.setenv("WINK_MAX_TURNS", "2")

    settings = load_settings(project, max_turns=3, time_limit=None)

    assert (settings.model, settings.sandbox, settings.max_turns) == ("file", "podman", 3)


def test_rules_given_as_flags_add_to_those_that_hold(project: Path, tmp_path: Path):
    (project / "wink.toml").write_text(
        'ask = ["edit_file"]\n[policy]\nprotect = [".env"]\nquota = { write_file = 3 }\n'
    )
    more = tmp_path / "more.toml"
    more.write_text('protect = ["docs"]\n')

    specs = ["protect=.git,*.lock", "quota=edit_file:1", "deny=move_file", "x.y:z", str(more)]
    settings = load_settings(project, policy=specs, ask=["move_file"])

    assert settings.ask == ("edit_file", "move_file")
    assert settings.policy.protect == (".env", ".git", "*.lock", "docs")
    assert settings.policy.quota == {"write_file": 3, "edit_file": 1}
    assert settings.policy.deny == ("move_file",)
    assert settings.policy.use == ("x.y:z",)


# What is wrong


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("modle = 'x'", "wink.toml: there is no key modle; did you mean model?"),
        ("zzz = 1", "wink.toml: there is no key zzz; there are ask, max_tokens"),
        (
            "[policy]\nprotekt = []",
            "wink.toml: there is no key policy.protekt; did you mean policy.protect?",
        ),
        ("policy = 3", "wink.toml: policy is a table, such as [policy]; got 3"),
        (
            "max_turns = 'ten'",
            "wink.toml: max_turns: expected a whole number of at least 1, got 'ten'",
        ),
        ("max_turns = true", "wink.toml: max_turns: expected a whole number"),
        ("time_limit = -1", "wink.toml: time_limit: expected a positive number of seconds, got -1"),
        ("suites = 'files'", "wink.toml: suites: expected a list of files, shell"),
        ("suites = ['fiels']", "(did you mean files?), got ['fiels']"),
        ("sandbox = 'docker'", "wink.toml: sandbox: expected one of auto, podman"),
        ("[policy]\nrate = { x = '5/hour' }", "policy.rate: expected a text such as '5/minute'"),
        ("[policy]\nquota = { x = -1 }", "policy.quota: expected a whole number for each tool"),
        ("model = ", "wink.toml is not TOML: Invalid value (at line 1, column 9)"),
        ("a = 1\nmodel", "(at line 2, column 6)"),
    ],
)
def test_what_is_wrong_in_the_file_is_named(project: Path, text: str, said: str):
    (project / "wink.toml").write_text(text)

    with pytest.raises(Misuse) as error:
        load_settings(project)

    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_that_is_no_text_is_refused(project: Path):
    (project / "wink.toml").write_bytes(b"model = '\xff'")

    with pytest.raises(Misuse, match="not UTF-8 text: byte 9 is wrong"):
        load_settings(project)


def test_a_file_that_is_none_is_refused_without_waiting_on_it(project: Path):
    os.mkfifo(project / "wink.toml")

    with pytest.raises(Misuse, match=r"wink\.toml is not a file"):
        load_settings(project)


@pytest.mark.skipif(os.geteuid() == 0, reason="root can read everything")
def test_a_file_that_cannot_be_read_is_named(project: Path):
    (project / "wink.toml").write_text("")
    (project / "wink.toml").chmod(0)

    with pytest.raises(Misuse, match="cannot be read: Permission denied"):
        load_settings(project)


def test_a_variable_that_is_nearly_one_of_ours_is_a_slip(
    project: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("WINK_MCP_TOKEN", "not a key, but not ours to complain about")
    load_settings(project)
    monkeypatch.setenv("WINK_MODELL", "x")

    with pytest.raises(Misuse, match="no variable WINK_MODELL; did you mean WINK_MODEL"):
        load_settings(project)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("protect", "--policy: 'protect' is none of NAME=VALUE"),
        ("protekt=x", "--policy: there is no key policy.protekt; did you mean policy.protect?"),
        ("quota=x", "--policy: policy.quota: expected TOOL:VALUE"),
        ("quota=x:many", "--policy: policy.quota: expected a whole number for each tool"),
        ("nosuch.toml", "--policy: there is no file nosuch.toml"),
        ("protect=", "--policy: policy.protect: expected a list of globs, got ''"),
        ("deny=,", "--policy: policy.deny: expected a list of names, got ','"),
        ("after=write_file:", "--policy: policy.after: expected TOOL:VALUE"),
    ],
)
def test_a_rule_that_makes_no_sense_is_named(project: Path, spec: str, said: str):
    with pytest.raises(Misuse) as error:
        load_settings(project, policy=[spec])

    assert said in str(error.value)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("deny=shell_exec", "policy.deny: there is no tool 'shell_exec'; did you mean shell_exec"),
        ("quota=delete_*:1", "policy.quota: there is no tool 'delete_*'"),
        ("after=write_file:reed_file", "there is no tool 'reed_file'; did you mean read_file?"),
        ("protect=../x", "policy.protect: A pattern cannot contain '..'"),
        ("nosuch_module:x", "policy.use: nosuch_module cannot be loaded: ModuleNotFoundError"),
        ("os.path:jion", "policy.use: os.path has no jion; did you mean join?"),
        ("os.path:sep", "policy.use: os.path:sep is a str; it must be a policy"),
        ("rules.py:x", "policy.use: there is no file"),
        ("program.py:x", "policy.use: program.py cannot be loaded: SystemExit: 3"),
    ],
)
def test_a_rule_that_would_hold_for_nothing_is_refused(project: Path, spec: str, said: str):
    """A rule about a misspelled tool would protect nobody, and nobody would know."""
    (project / "program.py").write_text("import sys\nsys.exit(3)\n")
    settings = load_settings(project, policy=[spec], suites=["files"])

    with pytest.raises(Misuse) as error, open_workbench(settings):
        pass

    assert said in str(error.value)


def test_a_whole_path_is_protected_as_one_from_the_directory_on(project: Path):
    settings = load_settings(project, policy=[f"protect={project}/a.txt"], suites=["files"])

    with open_workbench(settings) as workbench:
        said = _call(workbench, "write_file", path="a.txt", content="x")
        other = _call(workbench, "write_file", path="sub/a.txt", content="x")

    assert said == "Cannot change a.txt: it is protected. Leave it as it is"
    assert "protected" not in other


def test_a_rule_about_a_tool_that_is_switched_off_is_fine(project: Path):
    settings = load_settings(project, ask=["shell_execute", "unstated"], suites=["files"])

    with open_workbench(settings) as workbench:
        assert workbench.sandbox == "no commands"


# What is offered


def test_own_tools_and_rules_come_from_files_which_are_protected_then(project: Path):
    (project / "mine.py").write_text(
        "import weakincentives as wink\n"
        "@wink.tool(reach='read')\n"
        "def hello() -> str:\n"
        "    '''Say hello.'''\n"
        "    return 'hello'\n"
        "def tools(session):\n"
        "    assert session is not None\n"
        "    return [hello]\n"
        "class Rule:\n"
        "    def check(self, tool_name, params, context):\n"
        "        return 'not today' if tool_name == 'hello' else None\n"
    )
    settings = load_settings(
        project, sections=["mine.py:tools"], policy=["mine.py:Rule"], suites=["files"]
    )

    with open_workbench(settings) as workbench:
        said = _call(workbench, "hello")
        _call(workbench, "read_file", path="mine.py")
        refused = _call(workbench, "write_file", path="mine.py", content="x")
        config = _call(workbench, "write_file", path="wink.toml", content="x")

    assert said == "not today"
    assert refused == "Cannot change mine.py: it is protected. Leave it as it is"
    assert config == "Cannot change wink.toml: it is protected. Leave it as it is"


def test_quota_rate_and_order_hold(project: Path):
    specs = ["quota=glob_files:1", "rate=list_directory:1/minute", "after=write_file:read_file"]
    settings = load_settings(project, policy=specs, suites=["files"])

    with open_workbench(settings) as workbench:
        for name in ("glob_files", "list_directory"):
            _call(workbench, name, **({"pattern": "*"} if name == "glob_files" else {}))
        assert "Quota exceeded: 1/1" in _call(workbench, "glob_files", pattern="*")
        assert "Rate limit exceeded" in _call(workbench, "list_directory")
        assert "missing required tools: read_file" in _call(
            workbench, "write_file", path="a", content=""
        )


def test_what_needs_approval_is_denied_where_nobody_can_be_asked(project: Path):
    settings = load_settings(project, ask=["reversible"], suites=["files"])

    with open_workbench(settings) as workbench:
        said = _call(workbench, "write_file", path="a", content="")

    assert said == "Call to 'write_file' was not approved: nobody is here to be asked"
    assert not (project / "a").exists()


def _call(workbench: Workbench, name: str, **arguments: object) -> str:
    call = ToolCall(name, arguments)
    return execute_tool(call, session=workbench.session, prompt=workbench.prompt).message


# Wrong use, as a person sees it


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "x", "-w", "nosuch"], "there is no directory nosuch; make it, or name another"),
        (["run", "x", "-w", "file.txt"], "file.txt is a file; --workspace takes the directory"),
        (["run", "x"], "which model? Give --model, set WINK_MODEL, or put model = ... into"),
        (["run", "x", "-m", "gpt"], "there is no model 'gpt'; there are openai:NAME"),
        (["run", "x", "-m", "openia:x"], "no model 'openia:x'; did you mean openai:NAME?"),
        (["run", "x", "-m", "openai"], "the model 'openai' lacks a part; write openai:NAME"),
        (["run", "x", "-m", "openai:x"], "There is no key for OpenAI: set OPENAI_API_KEY"),
        (["run", "x", "-m", "scripted:nosuch.json"], "there is no script"),
        (["run", "x", "-m", "scripted:file.txt"], "file.txt is wrong: file.txt: "),
        (["run", "x", "-m", "scripted:."], "cannot be read: Is a directory"),
        (["run", "x", "--nosuch"], "No such option: --nosuch"),
        (["run"], "Missing argument"),
        (["run", " "], "what is to be done? The task is empty"),
        (["run", "x", "--max-turns", "0"], "--max-turns: expected a whole number of at least 1"),
        (["run", "x", "--max-turns", "ten"], "'--max-turns': Input should be a valid integer"),
        (["run", "x", "--sandbox", "docker"], "--sandbox: expected one of auto, podman"),
        (["resume"], "there is no run in"),
        (["resume", "20261116"], "there is no run '20261116' in"),
        (["resume", "go on"], "there is no run in"),
    ],
)
def test_wrong_use_is_one_line_and_exit_code_2(
    capfd: pytest.CaptureFixture[str],
    project: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    said: str,
):
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    (project / "file.txt").write_text("no: [script")
    monkeypatch.chdir(project)

    done = Wink(capfd, project)(*arguments)

    assert done.code == 2
    assert done.out == ""
    assert said in done.err
    assert done.err.startswith("wink: ")
    assert done.err.count("\n") == 1
