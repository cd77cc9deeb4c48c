"""Processes that tests kill: forked from one that has everything imported already.

There is one such process for all modules, so what any of them needs is named here.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import os
import sys

import pytest

processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["known_beforehand"])


def ensure_running() -> None:
    with pytest.MonkeyPatch.context() as patch:
        # Python 3.11 does not tell it where our modules are, and then loads them in every child.
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        multiprocessing.forkserver.ensure_running()
