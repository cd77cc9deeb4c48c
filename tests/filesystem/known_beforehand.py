"""What each process to kill would load or look up anew: see ``forks.py``."""

from __future__ import annotations

import os
import sqlite3  # noqa: F401

import branch_child  # noqa: F401
import deeds_child  # noqa: F401
import injected_child  # noqa: F401
import killed_child  # noqa: F401

import weakincentives.cli.entry
import weakincentives.filesystem.branches
import weakincentives.filesystem.disk  # noqa: F401
from weakincentives.core.state import is_our_code

is_our_code(os.stat(__file__))
