"""The program that serves a local model with llama.cpp, until the process that started it ends.

``LocalModel`` starts it, passes settings in the environment, and holds its standard input open.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from importlib import import_module
from typing import Any

SETTINGS = "WINK_LOCAL_MODEL"
"""The variable with the settings; every user of the machine could read arguments."""


def serve() -> None:
    """Load the model, print its address, and stay until standard input ends."""
    threading.Thread(target=_exit_with_the_parent, daemon=True).start()
    server = _started(json.loads(os.environ.pop(SETTINGS)))
    print(server.listening_address, flush=True)  # noqa: T201  # LocalModel reads it
    threading.Event().wait()


def _exit_with_the_parent() -> None:
    sys.stdin.read()  # ends when the parent closes it, or is killed
    os._exit(0)


def _started(settings: dict[str, Any]) -> Any:
    xllamacpp: Any = import_module("xllamacpp")  # an extra
    params = xllamacpp.CommonParams()
    params.model.path = settings["path"]
    params.model_alias = {settings["name"]}
    params.api_keys = [settings["api_key"]]
    params.n_ctx = settings["context_tokens"]
    params.cpuparams.n_threads = settings["threads"]
    params.hostnames = ["127.0.0.1"]
    params.port = 0  # any free port
    params.offline = True
    params.ui = False
    params.endpoint_slots = False  # it shows the prompts
    params.cache_ram_mib = 256
    params.verbosity = 1
    return xllamacpp.Server(params)  # returns when it accepts requests


if __name__ == "__main__":
    serve()
