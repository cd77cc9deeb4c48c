"""The types that users see, as type checkers see them."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

SURFACE = Path(__file__).with_name("typing_surface.py")
APPLICATION = Path(__file__).with_name("typing_application.py")
ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", ROOT / "docs" / "tutorial.md")


@pytest.fixture
def pages(tmp_path: Path) -> list[Path]:
    """Each page's Python as one module."""
    made: list[Path] = []
    for page in PAGES:
        blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
        assert blocks
        made.append(tmp_path / f"page_{page.stem.lower()}.py")
        made[-1].write_text("# pyright: strict\n" + "\n\n".join(blocks))
    return made


@pytest.fixture
def application(tmp_path: Path) -> list[Path]:
    """The application, as users of each mode of pyright check it."""
    made: list[Path] = []
    for mode in ("basic", "strict"):
        made.append(tmp_path / f"application_{mode}.py")
        made[-1].write_text(f"# pyright: {mode}\n{APPLICATION.read_text()}")
    return made


@pytest.mark.heavy  # `make lint` checks the library and the examples
@pytest.mark.parametrize(
    ("checker", "options"),
    [
        pytest.param("pyright", ["--pythonpath", sys.executable], id="pyright"),
        pytest.param("mypy", ["--strict"], id="mypy"),
    ],
)
def test_the_typed_surface_reads_as_written_and_the_first_pages_are_clean(
    checker: str, options: list[str], pages: list[Path], application: list[Path]
):
    """Every assert_type holds, and every mistake that is marked as one is found.

    An application needs no ignore comment in pyright's basic mode, its strict mode, or mypy's.
    """
    if importlib.util.find_spec(checker) is None:
        pytest.skip(f"{checker} is not installed")
    files = map(str, (SURFACE, *pages, *application))
    command = [sys.executable, "-m", checker, *options, *files]
    checked = subprocess.run(command, capture_output=True, text=True, timeout=900, cwd=ROOT)

    assert checked.returncode == 0, checked.stdout + checked.stderr
