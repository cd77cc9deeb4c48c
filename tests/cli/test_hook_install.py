"""`wink hook install`: our hooks beside what a person's settings have already."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from terminal import environment, wink

SETTINGS = {
    "claude": ".claude/settings.json",
    "cline": ".cline/hooks/PreToolUse",
    "codex": ".codex/hooks.json",
    "copilot": ".copilot/hooks/wink.json",
    "gemini": ".gemini/settings.json",
    "goose": ".agents/plugins/wink/hooks/hooks.json",
    "opencode": ".config/opencode/plugins/wink.js",
    "pi": ".pi/agent/extensions/wink.ts",
    "qwen": ".qwen/settings.json",
}
IN_JSON = [name for name, path in SETTINGS.items() if path.endswith("settings.json")]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "home"
    place.mkdir()
    monkeypatch.setenv("HOME", str(place))
    for name in ("XDG_CONFIG_HOME", "CODEX_HOME", "CLAUDE_CONFIG_DIR"):
        monkeypatch.delenv(name, raising=False)
    return place


def files(home: Path) -> dict[str, str]:
    return {str(p.relative_to(home)): p.read_text() for p in home.rglob("*") if p.is_file()}


@pytest.mark.parametrize("agent", SETTINGS)
def test_what_was_installed_can_be_removed_again(home: Path, agent: str):
    before = files(home)
    installed = wink("hook", "install", agent, cwd=home)
    made = files(home)
    again = wink("hook", "install", agent, cwd=home)
    removed = wink("hook", "uninstall", agent, cwd=home)

    assert (installed.returncode, again.returncode, removed.returncode) == (0, 0, 0)
    assert f"+++ {home / SETTINGS[agent]}" in installed.stdout
    assert SETTINGS[agent] in made
    assert "already" in again.stdout
    left = {name for name in files(home) if "before-wink" not in name}
    assert left == set(before)


@pytest.mark.parametrize("agent", SETTINGS)
def test_printing_changes_nothing(home: Path, agent: str):
    shown = wink("hook", "install", agent, "--print", cwd=home)

    assert "client.py" in shown.stdout
    assert files(home) == {}


@pytest.mark.parametrize("agent", IN_JSON)
def test_the_settings_of_a_person_stay(home: Path, agent: str):
    place = home / SETTINGS[agent]
    own: dict[str, Any] = {"hooks": {"Stop": [{"hooks": [{"type": "command", "command": "date"}]}]}}
    own |= {"model": "é", "permissions": {"deny": ["x"]}}
    place.parent.mkdir()
    place.write_text(json.dumps(own))
    place.chmod(0o600)
    wink("hook", "install", agent, cwd=home)
    merged = json.loads(place.read_text())
    mode = place.stat().st_mode & 0o777
    copies = [json.loads(p.read_text()) for p in place.parent.glob("*before-wink*")]
    wink("hook", "uninstall", agent, cwd=home)

    assert merged["hooks"]["Stop"][0] == own["hooks"]["Stop"][0]
    assert {**merged, "hooks": None} == {**own, "hooks": None}
    assert copies == [own]
    assert mode == 0o600
    assert json.loads(place.read_text()) == own


def test_a_script_of_a_person_for_cline_stays_beside_ours(home: Path):
    own = home / ".cline" / "hooks" / "PreToolUse"
    own.parent.mkdir(parents=True)
    own.write_text("#!/bin/sh\ndate >&2\n")
    wink("hook", "install", "cline", cwd=home)
    again = wink("hook", "install", "cline", cwd=home)
    made = files(home)
    wink("hook", "uninstall", "cline", cwd=home)

    assert "already" in again.stdout
    assert "client.py" in made[".cline/hooks/PreToolUse.sh"]
    assert files(home) == {".cline/hooks/PreToolUse": "#!/bin/sh\ndate >&2\n"}


def test_nothing_empty_is_left_of_a_directory_of_ours(home: Path):
    wink("hook", "install", "goose", cwd=home)
    wink("hook", "uninstall", "goose", cwd=home)

    assert not (home / ".agents" / "plugins" / "wink").exists()


def test_settings_that_are_a_link_stay_one(home: Path):
    kept = home / "dotfiles" / "claude.json"
    kept.parent.mkdir()
    kept.write_text("{}")
    place = home / ".claude" / "settings.json"
    place.parent.mkdir()
    place.symlink_to(kept)

    wink("hook", "install", "claude", cwd=home)

    assert place.is_symlink()
    assert "PreToolUse" in kept.read_text()


@pytest.mark.parametrize("text", ['{"a": 1, // mine\n}', "[]", '{"hooks": []}'])
def test_settings_that_cannot_be_merged_are_left_alone(home: Path, text: str):
    place = home / ".claude" / "settings.json"
    place.parent.mkdir()
    place.write_text(text)

    refused = wink("hook", "install", "claude", cwd=home)

    assert refused.returncode == 2
    assert str(place) in refused.stderr
    assert files(home) == {".claude/settings.json": text}


def test_an_earlier_installation_of_ours_is_replaced(home: Path):
    wink("hook", "install", "claude", cwd=home)
    place = home / ".claude" / "settings.json"
    wanted = place.read_text()
    place.write_text(wanted.replace(os.path.dirname(shlex.split(command(place))[0]), "/old/bin"))

    wink("hook", "install", "claude", cwd=home)

    assert place.read_text() == wanted


def command(settings: Path, event: str = "PreToolUse") -> str:
    [matcher] = json.loads(settings.read_text())["hooks"][event]
    return matcher["hooks"][0]["command"]


def test_claude_code_does_not_start_in_the_project_to_install_the_plug_in(
    home: Path, tmp_path: Path
):
    project, program = home / "project", tmp_path / "bin" / "claude"
    project.mkdir()
    program.parent.mkdir()
    program.write_text('#!/bin/sh\npwd >>"$HOME/started"\n')
    program.chmod(0o755)
    env = {**environment(), "PATH": f"{program.parent}:{os.environ['PATH']}"}

    installed = wink("hook", "install", "claude", "--plugin", cwd=project, env=env)
    wink("hook", "uninstall", "claude", cwd=project, env=env)

    assert installed.returncode == 0, installed.stderr
    places = (home / "started").read_text().splitlines()
    assert len(places) >= 4
    assert not any(Path(each).is_relative_to(project) for each in places)


def test_codex_trusts_our_hooks_and_keeps_its_settings(home: Path):
    config = home / ".codex" / "config.toml"
    config.parent.mkdir()
    own = 'model = "x"  # mine\n\n[hooks.state."/other:stop:0:0"]\ntrusted_hash = "sha256:1"\n'
    config.write_text(own)
    wink("hook", "install", "codex", cwd=home)
    wink("hook", "install", "codex", cwd=home)
    trusted = tomllib.loads(config.read_text())["hooks"]["state"]
    hooks = json.loads((home / ".codex" / "hooks.json").read_text())["hooks"]
    wink("hook", "uninstall", "codex", cwd=home)

    assert config.read_text() == own
    assert len(trusted) == len(hooks) + 1
    assert f"{home}/.codex/hooks.json:pre_tool_use:0:0" in trusted


@pytest.mark.parametrize(
    ("name", "said"),
    [("clade", "did you mean claude?"), ("aider", "wink exec -- aider"), ("xyz", "it can be")],
)
def test_an_agent_without_hooks_is_refused(home: Path, name: str, said: str):
    done = wink("hook", "install", name, cwd=home)

    assert done.returncode == 2
    assert said in done.stderr


def test_the_name_of_the_package_will_do(home: Path):
    assert wink("hook", "install", "claude-code", cwd=home).returncode == 0
    assert (home / ".claude" / "settings.json").exists()


def test_the_command_works_anywhere_and_denies_what_would_not_be_recorded(
    home: Path, tmp_path: Path
):
    project = tmp_path / "project"
    project.mkdir()
    (project / "wink.toml").write_text('[policy]\ndeny = ["*"]\n')
    wink("hook", "install", "claude", cwd=home)
    place = home / ".claude" / "settings.json"
    told = {"session_id": "s1", "cwd": str(project), "hook_event_name": "PreToolUse"}

    def run(line: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["sh", "-c", line], cwd="/", env=environment({"PATH": "/bin"}), text=True,
            input=json.dumps({**told, "tool_name": "Bash"}), capture_output=True, check=False,
        )  # fmt: skip

    before = command(place)
    assert '"deny"' in run(before).stdout
    for missing in (
        before.replace("client.py", "gone.py"),
        before.replace(sys.executable, "/gone"),
    ):
        assert run(missing).returncode == 2
    assert "exit" not in command(place, "PostToolUse")
