"""The types that users see, as a type checker sees them."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

SURFACE = Path(__file__).with_name("typing_surface.py")


@pytest.mark.skipif(importlib.util.find_spec("pyright") is None, reason="pyright is not installed")
def test_the_typed_surface_reads_as_written():
    """Every assert_type holds, and every mistake that is marked as one is found."""
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, str(SURFACE)]
    checked = subprocess.run(command, capture_output=True, text=True, timeout=900)

    assert checked.returncode == 0, checked.stdout + checked.stderr
