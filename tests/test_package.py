from __future__ import annotations

import ast
import importlib
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

import weakincentives
from archives import unpack

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "weakincentives"

_FOUND = list(pkgutil.walk_packages(weakincentives.__path__, prefix="weakincentives."))
MODULES = sorted(m.name for m in _FOUND)
PACKAGES = ["weakincentives", *sorted(m.name for m in _FOUND if m.ispkg)]


@pytest.mark.parametrize("name", PACKAGES)
def test_the_public_surface_is_listed_sorted_and_complete(name: str):
    module = importlib.import_module(name)
    imported = {
        alias.asname or alias.name
        for node in ast.walk(ast.parse(Path(str(module.__file__)).read_text()))
        if isinstance(node, ast.ImportFrom)
        and (node.level or str(node.module).startswith("weakincentives"))
        and node.module != "weakincentives.core.lazy"
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


def test_defining_a_tool_of_plain_types_loads_nothing_heavy():
    """What checks arguments is built when the first ones come, or the schema is asked for."""
    program = (
        "import sys, weakincentives as wink\n"
        "@wink.tool\n"
        "def greet(names: list[str], loudly: bool = False) -> str:\n"
        "    'Greet.'\n"
        "    return ', '.join(names)\n"
        "before = 'pydantic' in sys.modules\n"
        "print(before, greet(names=['a', 'b']).value, greet(names='a').success)"
    )

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)

    assert (done.stdout, done.stderr) == ("False a, b False\n", "")


def test_the_example_of_a_turn_sells_no_more_than_there_is():
    shown = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "turn.py")],
        capture_output=True,
        text=True,
        check=True,
    ).stdout

    assert "0. sell         ok sold 8, 2 left\n" in shown
    assert "2. sell         -- only 2 left   ran 2 times: Stock had changed\n" in shown
    assert "3. sell         ok sold 2, 0 left" in shown
    assert "In stock: 0. What the checker found: None." in shown


# What is published


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the wheel and the source distribution."""
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-d", str(folder)],
        cwd=ROOT, capture_output=True, check=True,
    )  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def unpacked(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution, as a person unpacks it."""
    folder = tmp_path_factory.mktemp("sdist")
    (archive,) = built.glob("*.tar.gz")
    unpack(archive, folder)
    return next(folder.iterdir())


def test_the_source_distribution_holds_the_whole_repository(unpacked: Path):
    asked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if asked.returncode or "Makefile" not in asked.stdout:
        pytest.skip("this is not a clone")
    files = [name for name in asked.stdout.split("\0") if name and (ROOT / name).exists()]

    assert [name for name in files if not (unpacked / name).is_file()] == []


@pytest.mark.heavy
def test_the_two_commands_of_the_readme_can_be_given_in_the_source_distribution(unpacked: Path):
    """What they would run is there, and some of it is run: tests, and the examples of a page."""
    for target in ("demo", "test", "test-all", "lint"):
        subprocess.run(["make", "-n", target], cwd=unpacked, capture_output=True, check=True)

    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist",
         "tests/core/test_clock.py", "README.md"],
        cwd=unpacked, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(unpacked / "src"), "PYTEST_ADDOPTS": ""},
    )  # fmt: skip

    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


def test_the_readme_on_an_index_has_no_link_that_leads_nowhere(built: Path):
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [each for each in archive.namelist() if each.endswith(".dist-info/METADATA")]
        text = archive.read(name).decode()
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)

    assert "Description-Content-Type: text/markdown" in text
    assert "# WINK" in text
    assert re.findall(r"\]\((?!https?:)[^)]*\)", prose) == []
    assert "source distribution" in prose


def test_the_page_of_the_debugger_is_in_the_wheel_built_and_without_its_source(built: Path):
    (wheel,) = built.glob("*.whl")
    place = "weakincentives/debugger/"
    names = [name for name in zipfile.ZipFile(wheel).namelist() if name.startswith(place)]

    page = {f"{place}static/{name}" for name in ("index.html", "app.js", "app.css", "LICENSES.txt")}
    assert {name for name in names if "/static/" in name} == page
    assert [name for name in names if name.endswith((".ts", ".tsx")) or "/ui/" in name] == []


def test_the_source_of_the_page_is_in_the_source_distribution(unpacked: Path):
    source = unpacked / "src" / "weakincentives" / "debugger" / "ui"

    assert (source / "package-lock.json").is_file()
    assert list(source.rglob("*.tsx"))
    assert not (source / "node_modules").exists()


@pytest.mark.heavy
def test_a_built_wheel_in_an_empty_environment_holds_every_package(built: Path, tmp_path: Path):
    (wheel,) = built.glob("*.whl")
    assert wheel.name.startswith("wink_runtime-")
    names = zipfile.ZipFile(wheel).namelist()
    data = [path for path in SOURCE.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    shipped = [path for path in data if not path.is_relative_to(SOURCE / "debugger" / "ui")]
    assert {str(path.relative_to(SOURCE.parent)) for path in shipped} <= set(names)
    python = tmp_path / "empty" / "bin" / "python"
    install = _new_environment(tmp_path / "empty", python)
    subprocess.run([*install, str(wheel)], check=True)

    with_extras = (
        "cli",
        "contrib.databases.sql",
        "debugger",
        "integrations",
        "mcp",
        "core.serving",
    )
    with_extras += ("durable.temporal",)
    extra = [name for name in MODULES if name.partition(".")[2].startswith(with_extras)]
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
    # With the pip of this environment, whatever is on the path.
    bin_directory = re.escape(str(python.parent))
    pip = rf"(uv pip install --python {bin_directory}/\S+|{bin_directory}/\S+ -m pip install)"
    source = re.escape(str(wheel))
    assert re.fullmatch(
        rf"wink: typer is not installed; run: {pip} '{source}\[cli\]'\n", refused.stderr
    )

    subprocess.run([*install, f"{wheel}[cli]"], check=True)
    helped = subprocess.run([wink, "--help"], capture_output=True, text=True, check=False)
    assert helped.returncode == 0, helped.stderr
    assert " demo " in helped.stdout
    shown = subprocess.run(
        [wink, "demo", "--into", tmp_path / "demo"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert shown.returncode == 0, shown.stderr
    assert "rolled back" in shown.stdout
    assert "Traceback" not in shown.stderr

    def debugged(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [wink, *arguments, "-w", tmp_path / "demo"],
            capture_output=True, text=True, check=False, cwd=tmp_path,
        )  # fmt: skip

    answer = debugged("query", "select run, count(*) from calls group by run", "--csv")
    run = answer.stdout.splitlines()[1].partition(",")[0]
    exported = debugged("export", run, "-o", "run.html")
    assert (exported.returncode, exported.stderr) == (0, "")
    assert 'id="wink-data"' in (tmp_path / "run.html").read_text()
    refused = subprocess.run(
        [wink, "worker"], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert refused.returncode == 2
    assert re.fullmatch(
        rf"wink: dbos is not installed; run: {pip} '{source}\[durable\]'\n", refused.stderr
    )


def _new_environment(place: Path, python: Path) -> list[str]:
    """Make one, and return the command that installs into it: by uv, which is quick, or by pip."""
    if uv := shutil.which("uv"):
        subprocess.run([uv, "venv", "--quiet", "-p", sys.executable, str(place)], check=True)
        return [uv, "pip", "install", "--quiet", "-p", str(python)]
    venv.create(place, with_pip=True)
    return [str(python), "-m", "pip", "install", "--quiet"]
