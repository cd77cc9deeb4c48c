"""The page's bundle: Node builds it, Python ships it."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

import weakincentives

DEBUGGER = Path(weakincentives.__file__).parent / "debugger"
STATIC = DEBUGGER / "static"
UI = DEBUGGER / "ui"
NAMES = ["LICENSES.txt", "app.css", "app.js", "index.html"]

needs_node = [
    pytest.mark.heavy,
    pytest.mark.skipif(shutil.which("npm") is None, reason="needs Node and npm"),
]


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source with its packages installed, away from the working tree."""
    copy = tmp_path_factory.mktemp("debugger") / "ui"
    shutil.copytree(UI, copy, ignore=shutil.ignore_patterns("node_modules"))
    npm(copy, "ci")
    return copy


def npm(where: Path, *command: str) -> None:
    done = subprocess.run(
        ["npm", "--silent", *command], cwd=where, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_bundle_has_these_files_and_no_others():
    assert sorted(path.name for path in STATIC.iterdir()) == NAMES


def test_the_page_has_neither_inline_script_nor_inline_style():
    """The content security policy forbids both."""
    page = (STATIC / "index.html").read_text()

    assert page.count("<script") == page.count("<script type=") == page.count("></script>") == 1
    assert "<style" not in page
    assert " style=" not in page


def test_the_script_can_be_put_into_a_page():
    """An export does so: nothing in it may end the element, or begin a comment."""
    script = (STATIC / "app.js").read_text().lower()

    assert "</script" not in script
    assert "<!--" not in script


def test_the_licence_of_every_bundled_package_is_there():
    text = (STATIC / "LICENSES.txt").read_text()
    wanted = json.loads((UI / "package.json").read_text())["devDependencies"]

    for name in ("preact", "@codemirror/merge", "@codemirror/state", "@codemirror/view"):
        assert f"{name} {wanted[name]} (" in text


def test_the_lock_file_fixes_every_version_and_names_no_registry():
    locked = json.loads((UI / "package-lock.json").read_text())["packages"]

    assert all("integrity" in package for path, package in locked.items() if path)
    assert not any("resolved" in package for package in locked.values())


class TestBuilt:
    pytestmark = needs_node

    def test_a_fresh_build_equals_the_bundle_byte_for_byte(self, copy: Path):
        """``make ui`` builds it again."""
        npm(copy, "run", "build")

        for name in NAMES:
            assert (copy.parent / "static" / name).read_bytes() == (STATIC / name).read_bytes()

    def test_the_types_of_the_source_check(self, copy: Path):
        npm(copy, "run", "check")

    def test_the_model_passes_its_tests(self, copy: Path):
        npm(copy, "run", "test")
