"""The profile for macOS, as data: nobody has run it there, so what it says is read here."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from weakincentives.contrib.tools.sandbox.engines import (
    SandboxedCommand,
    Seatbelt,
    SystemFiles,
    find_sandbox,
)
from weakincentives.contrib.tools.sandbox.environment import ProjectEnvironment
from weakincentives.contrib.tools.sandbox.limits import SandboxLimits
from weakincentives.contrib.tools.sandbox.seatbelt import Rules
from weakincentives.errors import SandboxUnavailable

RULES = Rules(
    workspace="/Users/ann/shop",
    scratch="/private/tmp/scratch",
    readable=["/Users/ann/.pyenv"],
    writable=["/Users/ann/Library/Caches/pip"],
    read_only=["/Users/ann/shop/.git/hooks"],
    hidden=["/Users/ann/shop/.wink"],
)


def parsed(text: str) -> list[Any]:
    """Read the profile as nested lists; strings keep their quotes."""
    found: list[list[Any]] = [[]]
    for token in re.findall(r'"[^"]*"|[()]|[^\s()"]+', text):
        if token == "(":
            found.append([])
        elif token == ")":
            found[-2].append(found.pop())
        else:
            found[-1].append(token)
    (top,) = found
    return top


def allows(rules: Rules, operation: str, path: str) -> bool:
    """Tell what the profile says about a path: the last rule that names it decides."""
    answer = True
    for verb, *parts in parsed(rules.profile())[1:]:
        operations = [part for part in parts if isinstance(part, str)]
        filters = [part for part in parts if isinstance(part, list)]
        named = any(re.fullmatch(each.replace("*", ".*"), operation) for each in operations)
        if operations == ["default"] or (
            named and (not filters or any(_is_at(f, path, rules) for f in filters))
        ):
            answer = verb == "allow"
    return answer


def _is_at(condition: list[Any], path: str, rules: Rules) -> bool:
    kind, value = condition
    if kind == "literal":
        return path == value.strip('"')
    if kind == "subpath":
        below = rules.parameters[value[1].strip('"')]
        return path == below or path.startswith(f"{below}/")
    return False


@pytest.mark.parametrize(
    ("path", "reads", "writes"),
    [
        ("/Users/ann/shop/src/a.py", True, True),
        ("/private/tmp/scratch/x", True, True),
        ("/Users/ann/Library/Caches/pip/x", True, True),
        ("/Users/ann/.pyenv/bin/python", True, False),
        ("/usr/bin/git", True, False),
        ("/Users/ann/shop/.git/hooks/pre-commit", True, False),
        ("/Users/ann/shop/.wink/key", False, False),
        ("/Users/ann/.ssh/id_ed25519", False, False),
        ("/Users/ann/shopping", False, False),
        ("/private/etc/passwd", False, False),
        ("/private/tmp/other", False, False),
    ],
)
def test_a_command_reads_and_writes_what_it_may_and_nothing_else(
    path: str, reads: bool, writes: bool
):
    assert allows(RULES, "file-read-data", path) is reads
    assert allows(RULES, "file-write-create", path) is writes


def test_everything_is_denied_first_and_there_is_no_network():
    version, first, *rest = parsed(RULES.profile())
    assert version == ["version", "1"]
    assert first == ["deny", "default"]
    assert "network" not in str(rest)


def test_of_the_network_only_the_proxy_can_be_reached():
    rules = Rules(workspace="/w", scratch="/s", proxy=4711)
    found = [rule for rule in parsed(rules.profile()) if "network" in str(rule)]
    assert found == [["allow", "network-outbound", ["remote", "ip", '"localhost:4711"']]]


def test_a_path_adds_no_rule_whatever_it_is_called():
    name = '/w")) (allow file* (subpath "/'
    rules = Rules(workspace=name, scratch="/s")
    assert rules.profile() == Rules(workspace="/w", scratch="/s").profile()
    used = set(re.findall(r'\(param "(\w+)"\)', rules.profile()))
    assert used == set(rules.parameters)
    assert f"-DWRITE0={name}".removesuffix("/") in rules.arguments("/profile", ["true"])


def test_a_command_is_wrapped_with_its_profile_and_its_environment(tmp_path: Path):
    (tmp_path / ".git").mkdir()
    command = SandboxedCommand(
        argv=["echo", "a b"],
        workspace=tmp_path,
        limits=SandboxLimits(),
        env={"CI": "it's 1"},
        read_only=[".git"],
        project=ProjectEnvironment(
            places=(str(tmp_path),),
            mounts=(("read", "/opt/tool", "/opt/tool"), ("write", "/cache", "/cache")),
        ),
    )
    with Seatbelt(SystemFiles()).wrapped(command) as launch:
        program, *words = launch.argv
        profile = Path(words[words.index("-f") + 1])
        script = Path(words[-3])
        parameters = dict(word[2:].split("=", 1) for word in words if word.startswith("-D"))
        assert program == "/usr/bin/sandbox-exec"
        assert words[-2:] == ["echo", "a b"]
        assert "(deny default)" in profile.read_text()
        assert "export CI='it'\"'\"'s 1'" in script.read_text()
        assert "export TMPDIR=" in script.read_text()
        assert {str(tmp_path), "/opt/tool", "/cache", f"{tmp_path}/.git"} <= set(
            parameters.values()
        )
        assert not {"CI", "TMPDIR"} & launch.env.keys()
    assert not profile.exists()


@pytest.mark.skipif(sys.platform == "darwin", reason="refused elsewhere")
def test_elsewhere_it_is_refused_with_the_reason():
    with pytest.raises(SandboxUnavailable, match="seatbelt: it needs macOS"):
        find_sandbox("seatbelt")
