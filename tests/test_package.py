from __future__ import annotations

import ast
import importlib
import pkgutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

import weakincentives

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "weakincentives"

MODULES = sorted(
    m.name for m in pkgutil.walk_packages(weakincentives.__path__, prefix="weakincentives.")
)
PACKAGES = [
    "weakincentives",
    *(m for m in MODULES if hasattr(importlib.import_module(m), "__path__")),
]

# From top to bottom: a module imports only from its own layer or those above it.
LAYERS = [
    ["errors", "interrupts", "lazy", "text"],
    ["clock"],
    ["retry"],
    ["call"],
    ["logs", "deadlines", "budget", "dbc", "regex", "slices", "state"],
    ["serde"],
    ["filesystem"],
    ["resources"],
    ["prompt"],
    ["runtime"],
    ["telemetry"],
    ["adapters"],
    ["contrib"],
    ["testing"],
    ["mcp"],
    ["cli"],
]


@pytest.mark.parametrize("name", PACKAGES)
def test_the_public_surface_is_listed_sorted_and_complete(name: str):
    module = importlib.import_module(name)
    imported = {
        alias.asname or alias.name
        for node in ast.walk(ast.parse(Path(str(module.__file__)).read_text()))
        if isinstance(node, ast.ImportFrom)
        and str(node.module).startswith("weakincentives")
        and node.module != "weakincentives.lazy"
        for alias in node.names
    }

    assert sorted(module.__all__) == list(module.__all__)
    assert imported == set(module.__all__)
    assert all(getattr(module, exported) is not None for exported in module.__all__)
    assert set(module.__all__) <= set(dir(module))


def test_a_name_that_the_root_does_not_have_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        weakincentives.no_such_name  # noqa: B018


def test_the_root_exports_about_a_dozen_names():
    assert len(weakincentives.__all__) <= 16


@pytest.mark.parametrize("name", MODULES)
def test_imports_point_upward(name: str):
    """Only inside functions and for type checkers may a module look further down."""
    module = importlib.import_module(name)
    layer_of = {part: n for n, layer in enumerate(LAYERS) for part in layer}
    own = name.split(".")[1]
    for node in ast.parse(Path(str(module.__file__)).read_text()).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("weakincentives."):
            other = str(node.module).split(".")[1]
            assert layer_of[other] <= layer_of[own], f"{name} imports {node.module}"


def test_importing_the_package_loads_nothing_heavy():
    program = (
        "import sys, weakincentives as wink; wink.Session, wink.Tool\n"
        "print([m for m in %r if m in sys.modules])"
    )
    heavy = ["pydantic", "pydantic_core", "asyncio", "jsonschema"]

    done = subprocess.run(
        [sys.executable, "-c", program % heavy], capture_output=True, text=True, check=True
    )

    assert done.stdout.strip() == "[]"


def test_the_example_of_a_turn_sells_no_more_than_there_is():
    shown = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "turn.py")],
        capture_output=True,
        text=True,
        check=True,
    ).stdout

    assert "0. sell         ok sold 8, 2 left\n" in shown
    assert "2. sell         -- only 2 left   taken 2 times: Stock had changed\n" in shown
    assert "3. sell         ok sold 2, 0 left" in shown
    assert "In stock: 0. What the checker found: None." in shown


@pytest.mark.heavy
def test_a_built_wheel_in_an_empty_environment_holds_every_package(tmp_path: Path):
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--quiet",
            "--no-deps",
            "-w",
            str(tmp_path),
            str(ROOT),
        ],
        check=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.startswith("wink_runtime-")
    names = zipfile.ZipFile(wheel).namelist()
    assert "weakincentives/cli/demo_project/script.json" in names
    assert "weakincentives/cli/demo_project/till/receipts/monday.csv" in names
    venv.create(tmp_path / "empty", with_pip=True)
    python = tmp_path / "empty" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", str(wheel)], check=True)

    extra = [name for name in MODULES if name.split(".")[1] in ("cli", "mcp")]
    core = [name for name in MODULES if name not in extra]
    program = (
        "import importlib, importlib.util\n"
        f"for name in {core!r}: importlib.import_module(name)\n"
        f"for name in {extra!r}: assert importlib.util.find_spec(name), name\n"
        "print('all there')"
    )
    done = subprocess.run(
        [python, "-c", program], capture_output=True, text=True, check=True, cwd=tmp_path
    )

    assert done.stdout.strip() == "all there"
    typed = subprocess.run(
        [python, "-c", "from importlib.resources import files;"
         "print(files('weakincentives').joinpath('py.typed').is_file())"],
        capture_output=True, text=True, check=True, cwd=tmp_path,
    )  # fmt: skip
    assert typed.stdout.strip() == "True"

    wink = tmp_path / "empty" / "bin" / "wink"
    refused = subprocess.run([wink, "demo"], capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert refused.stderr == "wink: rich is missing; run: pip install 'wink-runtime[cli]'\n"

    subprocess.run([python, "-m", "pip", "install", "--quiet", f"{wheel}[cli]"], check=True)
    shown = subprocess.run(
        [wink, "demo", "--into", tmp_path / "demo"], capture_output=True, text=True, check=False
    )
    assert shown.returncode == 0, shown.stderr
    assert "rolled back" in shown.stdout
    assert "Traceback" not in shown.stderr
