"""What a command is set to, and what is said about settings that are wrong."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
from commands import Wink
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from weakincentives.cli.common import Misuse
from weakincentives.cli.config import (
    KEYS,
    PolicySettings,
    Settings,
    Values,
    load_settings,
    save_rule,
)
from weakincentives.cli.trust import trust_of
from weakincentives.cli.workbench import Workbench, open_workbench
from weakincentives.contrib.tools import SandboxLimits, SandboxSettings
from weakincentives.prompt import ApprovalRule
from weakincentives.runtime import ToolCall, execute_tool

WHOLE = """
model = "openai:gpt-5-mini"
suites = ["files", "planning"]
ask = ["irreversible"]
temperature = 0.5
max_turns = 7
max_tokens = 20_000
max_cost = 2.5
price = "3/15.5"
context_window = 32_768
time_limit = 1.5
branches = false
sections = ["tools.py:section"]

[sandbox]
engine = "podman"
image = "localhost/tools"
detect = false
read = ["~/shared"]
write = ["~/.cache/pip"]
path = ["bin"]
env = ["CI=1", "TOKEN"]
network = ["packages.example.org"]
timeout = 60
max_timeout = 90.5
limits = { memory = "2 GiB", files = 100 }

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


def values(settings: Settings) -> Values:
    """Return the settings without where they come from."""
    return Values(**{name: getattr(settings, name) for name in Values.model_fields})


# Where settings come from


def test_without_a_file_the_defaults_hold(project: Path):
    settings = load_settings(project)

    assert values(settings) == Values()
    assert settings.suites == ("files", "shell", "planning", "digest")
    assert settings.policy == PolicySettings(read_before_write=True)


def test_every_key_can_stand_in_the_file(project: Path):
    (project / "wink.toml").write_text(WHOLE)

    assert values(load_settings(project)) == Values(
        model="openai:gpt-5-mini",
        suites=("files", "planning"),
        sandbox=SandboxSettings(
            engine="podman",
            image="localhost/tools",
            detect=False,
            read=("~/shared",),
            write=("~/.cache/pip",),
            path=("bin",),
            env=("CI=1", "TOKEN"),
            network=("packages.example.org",),
            timeout=60,
            max_timeout=90.5,
            limits=SandboxLimits(memory=2 << 30, files=100),
        ),
        ask=("irreversible",),
        temperature=0.5,
        max_turns=7,
        max_tokens=20_000,
        max_cost=2.5,
        price="3/15.5",
        context_window=32_768,
        time_limit=1.5,
        branches=False,
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
        "WINK_SANDBOX": "podman",
        "WINK_SANDBOX_IMAGE": "localhost/tools",
        "WINK_SANDBOX_DETECT": "no",
        "WINK_SANDBOX_READ": "~/shared",
        "WINK_SANDBOX_WRITE": "~/.cache/pip",
        "WINK_SANDBOX_PATH": "bin",
        "WINK_SANDBOX_ENV": "CI=1, TOKEN",
        "WINK_SANDBOX_NETWORK": "packages.example.org",
        "WINK_SANDBOX_TIMEOUT": "60",
        "WINK_SANDBOX_MAX_TIMEOUT": "90.5",
        "WINK_SANDBOX_LIMITS": "memory:2G, files:100",
        "WINK_ASK": "irreversible",
        "WINK_TEMPERATURE": "0.5",
        "WINK_MAX_TURNS": "7",
        "WINK_MAX_TOKENS": "20000",
        "WINK_MAX_COST": "2.5",
        "WINK_PRICE": "3/15.5",
        "WINK_CONTEXT_WINDOW": "32768",
        "WINK_TIME_LIMIT": "1.5",
        "WINK_BRANCHES": "no",
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

    assert values(load_settings(project)) == values(from_file)


def test_flags_win_over_the_environment_and_that_over_the_file(
    project: Path, monkeypatch: pytest.MonkeyPatch
):
    (project / "wink.toml").write_text('model = "file"\nsandbox = "none"\nmax_turns = 1\n')
    monkeypatch.setenv("WINK_SANDBOX", "podman")
    monkeypatch.setenv("WINK_MAX_TURNS", "2")

    settings = load_settings(project, max_turns=3, time_limit=None)

    assert (settings.model, settings.sandbox.engine, settings.max_turns) == ("file", "podman", 3)


def test_settings_of_the_sandbox_given_as_flags_add_to_those_that_hold(project: Path):
    (project / "wink.toml").write_text(
        '[sandbox]\nread = ["~/a"]\nnetwork = ["packages.example.org"]\nlimits = { files = 9 }\n'
    )
    flags = ["none", "read=~/b,~/c", "env=LIST=a,b", "env=TOKEN", "network=off", "limits=disk:1M"]

    sandbox = load_settings(project, sandbox=flags).sandbox

    assert (sandbox.engine, sandbox.network) == ("none", "off")
    assert sandbox.read == ("~/a", "~/b", "~/c")
    assert sandbox.env == ("LIST=a,b", "TOKEN")
    assert (sandbox.limits.files, sandbox.limits.disk) == (9, 1 << 20)


def test_settings_that_contradict_each_other_are_refused(project: Path):
    (project / "wink.toml").write_text('[sandbox]\nimage = "localhost/tools"\n')

    with pytest.raises(Misuse, match="an image needs podman, but the sandbox is 'bubblewrap'"):
        load_settings(project, sandbox="bubblewrap")


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
        ("modle = 'x'", "wink.toml: unknown key modle; did you mean model?"),
        ("zzz = 1", "wink.toml: unknown key zzz; the keys are approve, ask, branches, context_"),
        (
            "[policy]\nprotekt = []",
            "wink.toml: unknown key policy.protekt; did you mean policy.protect?",
        ),
        ("policy = 3", "wink.toml: policy: Input should be an object, got 3"),
        ("max_turns = 'ten'", "max_turns: Input should be a valid integer, got 'ten'"),
        ("max_turns = true", "max_turns: Input should be a valid integer, got True"),
        ("max_turns = '7'", "max_turns: Input should be a valid integer, got '7'"),
        ("time_limit = -1", "wink.toml: time_limit: Input should be greater than 0, got -1"),
        ("suites = 'files'", "wink.toml: suites: Input should be a valid array, got 'files'"),
        ("suites = ['fiels']", "suites.0: Input should be 'files', 'shell'"),
        ("sandbox = 'docker'", "wink.toml: sandbox: Input should be 'auto', 'namespaces'"),
        ("sandbox = 3", "wink.toml: sandbox: Input should be an object, got 3"),
        ("[sandbox]\nnetwrk = 'off'", "unknown key sandbox.netwrk; did you mean sandbox.network?"),
        ("[sandbox]\nlimits = { mem = 1 }", "wink.toml: unknown key sandbox.limits.mem"),
        (
            "[sandbox]\nlimits = { memory = 'big' }",
            "sandbox.limits.memory: Input should be a valid",
        ),
        ("[sandbox]\nlimits = { memory = 0 }", "sandbox.limits: memory must be positive, got 0"),
        ("[sandbox]\nread = '~'", "wink.toml: sandbox.read: Input should be a valid array"),
        ("[sandbox]\nnetwork = 'on'", "wink.toml: sandbox.network: Input should be 'off'"),
        ("[sandbox]\nenv = ['A B']", "wink.toml: sandbox: env takes NAME or NAME=VALUE"),
        ("[policy]\nrate = { x = '5/hour' }", "policy.rate.x: String should match pattern"),
        ("[policy]\nquota = { x = -1 }", "policy.quota.x: Input should be greater than or equal"),
        ("price = '3'", "price: String should match pattern"),
        ("max_cost = 0", "max_cost: Input should be greater than 0"),
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

    with pytest.raises(Misuse, match=r"wink\.toml is not TOML: .*invalid start byte"):
        load_settings(project)


def test_a_file_that_is_none_is_refused_without_waiting_on_it(project: Path):
    os.mkfifo(project / "wink.toml")

    with pytest.raises(Misuse, match=r"wink\.toml is not a file"):
        load_settings(project)


@pytest.mark.skipif(not os.access("/proc/kmsg", os.R_OK), reason="only root can read it")
def test_nor_does_a_file_of_the_kernel_block(project: Path):
    (project / "wink.toml").symlink_to("/proc/kmsg")

    assert load_settings(project).model is None


def test_a_huge_file_is_refused(project: Path):
    with (project / "wink.toml").open("wb") as file:
        file.truncate(1 << 40)

    with pytest.raises(Misuse, match=r"wink\.toml is too large"):
        load_settings(project)


@pytest.mark.skipif(os.geteuid() == 0, reason="root can read everything")
def test_a_file_that_cannot_be_read_is_named(project: Path):
    (project / "wink.toml").write_text("")
    (project / "wink.toml").chmod(0)

    with pytest.raises(Misuse, match=r"cannot read .*: Permission denied"):
        load_settings(project)


def test_a_variable_that_is_nearly_one_of_ours_is_a_slip(
    project: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("WINK_MCP_TOKEN", "not a key, but not ours to complain about")
    load_settings(project)
    monkeypatch.setenv("WINK_MODELL", "x")

    with pytest.raises(Misuse, match="unknown variable WINK_MODELL; did you mean WINK_MODEL"):
        load_settings(project)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("protect", "--policy: expected NAME=VALUE"),
        ("protekt=x", "--policy: unknown key policy.protekt; did you mean policy.protect?"),
        ("quota=x", "--policy: policy.quota: expected TOOL:VALUE"),
        ("quota=x:many", "--policy: policy.quota.x: Input should be a valid integer"),
        ("nosuch.toml", "cannot read nosuch.toml: No such file"),
        ("protect=", "--policy: policy.protect is empty"),
        ("deny=,", "--policy: policy.deny is empty"),
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
        (
            "deny=shell_exec",
            "policy.deny: unknown tool 'shell_exec': the rule would never apply; did you",
        ),
        ("quota=delete_*:1", "policy.quota: unknown tool 'delete_*'"),
        (
            "after=write_file:reed_file",
            "unknown tool 'reed_file': the rule would never apply; did you mean read_file?",
        ),
        ("protect=../x", "policy.protect: A pattern cannot contain '..'"),
        ("nosuch_module:x", "policy.use: cannot load nosuch_module: ModuleNotFoundError"),
        ("os.path:jion", "policy.use: os.path has no jion; did you mean join?"),
        ("os.path:sep", "policy.use: os.path:sep is a str; expected a policy"),
        ("rules.py:x", "policy.use: there is no file"),
        ("program.py:x", "policy.use: cannot load program.py: SystemExit: 3"),
    ],
)
def test_a_rule_that_would_hold_for_nothing_is_refused(project: Path, spec: str, said: str):
    """A rule about a misspelled tool would protect nobody, and nobody would know."""
    (project / "program.py").write_text("import sys\nsys.exit(3)\n")
    settings = load_settings(project, policy=[spec], suites=["files"])

    with pytest.raises(Misuse) as error, open_workbench(settings):
        pass

    assert said in str(error.value)


def test_a_policy_from_code_that_names_an_unknown_tool_is_refused(project: Path):
    (project / "mine.py").write_text(
        "from weakincentives.prompt import QuotaPolicy, if_offered\n"
        "typo = QuotaPolicy(1, tools={'wirte_file'})\n"
        "fine = QuotaPolicy(1, tools={'write_file', 'shell_execute', if_offered('deploy')})\n"
    )
    typo = load_settings(project, policy=["mine.py:typo"], suites=["files"])
    fine = load_settings(project, policy=["mine.py:fine"], suites=["files"])

    with pytest.raises(Misuse, match=r"did you mean 'write_file'\?"), open_workbench(typo):
        pass
    with open_workbench(fine):
        pass


def test_an_approval_of_an_unknown_tool_is_refused(project: Path):
    (project / "wink.toml").write_text('ask = ["write_file"]\n[[approve]]\ntool = "wirte_file"\n')
    settings = load_settings(project, suites=["files"])
    trust_of(project).approve(trust_of(project).missing(settings))

    said = r"approve: unknown tool 'wirte_file'.*did you mean write_file\?"
    with pytest.raises(Misuse, match=said), open_workbench(settings):
        pass


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

    assert said == "Call to 'write_file' was not approved: there is no one to ask"
    assert not (project / "a").exists()


# Rules that are saved


def saved(project: Path) -> list[ApprovalRule]:
    """Return the rules of the file, once it is approved as it is."""
    settings = load_settings(project)
    assert trust_of(project).missing(settings) == []
    return [ApprovalRule(**dict(each)) for each in settings.approve]


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(min_size=1), st.lists(st.text(alphabet="ab \"'\\\\é\n=[]#", min_size=1), max_size=3))
@example("a", ["\x7f"])
@example("\ud800", [])
def test_a_saved_rule_is_added_and_nothing_else_in_the_file_changes(
    project: Path, tool: str, command: list[str]
):
    file = project / "wink.toml"
    before = '# mine\nmax_turns   = 3 # three\n[policy]\nprotect = [\n  ".env",\n]'
    file.write_text(before)
    try:
        rule = ApprovalRule(tool=tool, command=tuple(command))
        save_rule(project, rule)
    except Misuse:  # what TOML cannot hold, or an empty word
        assert file.read_text() == before
        return

    assert file.read_text().startswith(before)
    assert saved(project) == [rule]
    assert [path.name for path in project.iterdir() if path.name.startswith(".wink")] == []


def test_rules_are_saved_one_after_the_other_and_hold(project: Path):
    rules = [
        ApprovalRule(tool="write_file", path="docs/**"),
        ApprovalRule(tool="shell_execute", command=("python", "-m", "pytest")),
    ]
    for rule in rules:
        save_rule(project, rule)

    assert saved(project) == rules
    chosen = load_settings(project, ask=["reversible"], suites=["files"])
    with open_workbench(chosen) as workbench:
        assert "Wrote docs/a" in _call(workbench, "write_file", path="docs/a", content="")
        denied = _call(workbench, "write_file", path="docs/../a", content="")
        own = _call(workbench, "delete_file", path="wink.toml")

    assert denied == "Call to 'write_file' was not approved: there is no one to ask"
    assert own == "Cannot change wink.toml: it is protected. Leave it as it is"


@pytest.mark.parametrize("text", ['sandbox = "none"', '[[approve]]\ntool = "shell_execute"'])
def test_a_rule_is_not_saved_to_a_file_that_nobody_approved(
    project: Path, monkeypatch: pytest.MonkeyPatch, text: str
):
    """It would be approved with the rule; what a variable overrides today is in it tomorrow."""
    (project / "wink.toml").write_text(text)
    monkeypatch.setenv("WINK_SANDBOX", "namespaces")

    with pytest.raises(Misuse, match="was changed; review it"):
        save_rule(project, ApprovalRule(tool="write_file"))

    assert (project / "wink.toml").read_text() == text


def test_rules_that_come_with_a_directory_need_approval_first(project: Path):
    (project / "wink.toml").write_text('[[approve]]\ntool = "shell_execute"\n')

    with (
        pytest.raises(Misuse, match=r"not approved: wink\.toml"),
        open_workbench(load_settings(project)),
    ):
        pass


@pytest.mark.parametrize(
    "text", ['approve = [{tool = "a"}]\n', "approve = []\n", 'policy.protect = ["a"]\n\0']
)
def test_a_rule_that_cannot_be_added_leaves_the_file_alone(project: Path, text: str):
    file = project / "wink.toml"
    file.write_text(text)
    trust = trust_of(project)
    if "\0" not in text:
        trust.approve(trust.missing(load_settings(project)))

    with pytest.raises(Misuse):
        save_rule(project, ApprovalRule(tool="write_file"))
    file.rename(project / "other")
    file.symlink_to("other")
    with pytest.raises(Misuse, match="is not a regular file"):
        save_rule(project, ApprovalRule(tool="write_file"))

    assert file.read_text() == text


def test_a_file_that_changes_while_a_rule_is_saved_is_not_approved(
    project: Path, monkeypatch: pytest.MonkeyPatch
):
    file = project / "wink.toml"
    file.write_text("max_turns = 3\n")

    def changed(*args: Any, **flags: Any) -> Settings:
        found = load_settings(*args, **flags)
        file.write_text('sandbox = "none"\n')
        return found

    monkeypatch.setattr("weakincentives.cli.config.load_settings", changed)
    with pytest.raises(Misuse, match="being changed by somebody else"):
        save_rule(project, ApprovalRule(tool="write_file"))

    assert file.read_text() == 'sandbox = "none"\n'
    assert trust_of(project).approved() == {}


def test_a_full_disk_leaves_the_file_and_its_approval_as_they_were(
    project: Path, monkeypatch: pytest.MonkeyPatch
):
    file = project / "wink.toml"
    file.write_text("max_turns = 3\n")
    file.chmod(0o600)
    rule = ApprovalRule(tool="write_file")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(OSError, match="No space left"):
            save_rule(project, rule)
        assert [path.name for path in project.iterdir()] == ["wink.toml"]
    assert file.read_text() == "max_turns = 3\n"

    save_rule(project, rule)
    assert saved(project) == [rule]
    assert file.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[[approve]]\npath = "a"\n', "wink.toml: approve.0.tool: Field required"),
        ('[[approve]]\ntool = "a"\nx = 1\n', "unknown key approve.0.x"),
    ],
)
def test_a_wrong_rule_is_named(project: Path, text: str, said: str):
    (project / "wink.toml").write_text(text)

    with pytest.raises(Misuse, match=re.escape(said)):
        load_settings(project)


def _call(workbench: Workbench, name: str, **arguments: object) -> str:
    call = ToolCall(name, arguments)
    return execute_tool(call, session=workbench.session, prompt=workbench.prompt).message


# Wrong use, as a person sees it


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "x", "-w", "nosuch"], "cannot open the directory nosuch: No such file"),
        (["run", "x", "-w", "file.txt"], "cannot open the directory file.txt: Not a directory"),
        (["run", "x"], "no model: give --model, set WINK_MODEL, or put model = ... into"),
        (["run", "x", "-m", "gpt"], "unknown model 'gpt'; use one of openai:NAME"),
        (["run", "x", "-m", "openia:x"], "unknown model 'openia:x'; did you mean openai?"),
        (["run", "x", "-m", "openai"], "incomplete model name 'openai'; write openai:NAME"),
        (["run", "x", "-m", "openai:x"], "There is no key for OpenAI: set OPENAI_API_KEY"),
        (["run", "x", "-m", "scripted:nosuch.json"], "cannot read the script"),
        (["run", "x", "-m", "scripted:file.txt"], "file.txt is invalid: file.txt: "),
        (["run", "x", "-m", "scripted:."], "cannot read the script"),
        (["run", "x", "--nosuch"], "No such option: --nosuch"),
        (["run"], "Missing argument"),
        (["run", " "], "the task is empty"),
        (
            ["run", "x", "--max-turns", "0"],
            "--max-turns: Input should be greater than or equal to 1",
        ),
        (["run", "x", "--max-turns", "ten"], "'--max-turns': Input should be a valid integer"),
        (["run", "x", "--sandbox", "docker"], "--sandbox: Input should be 'auto', 'namespaces'"),
        (["resume"], "there is no run to resume in"),
        (["resume", "20261116"], "no run '20261116' in"),
        (["resume", "go on"], "there is no run to resume in"),
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
