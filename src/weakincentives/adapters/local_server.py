"""The program that serves a local model with llama.cpp, until the process that began it ends.

``LocalModel`` runs it, says in its environment what to serve, and holds its standard input open.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from importlib import import_module
from typing import Any

SETTINGS = "WINK_LOCAL_MODEL"
"""The variable with the settings; arguments could be read by everybody on the machine."""


def serve() -> None:
    """Load the model, print where it is, and stay until standard input ends."""
    threading.Thread(target=_end_with_the_other_side, daemon=True).start()
    server = _started(json.loads(os.environ.pop(SETTINGS)))
    print(server.listening_address, flush=True)  # noqa: T201  # who began this reads it
    threading.Event().wait()


def _end_with_the_other_side() -> None:
    sys.stdin.read()  # ends when it is closed there, also by a kill
    os._exit(0)  # whatever is being computed


def _started(settings: dict[str, Any]) -> Any:
    xllamacpp: Any = import_module("xllamacpp")  # not where everybody type-checks
    params = xllamacpp.CommonParams()
    params.model.path = settings["path"]
    params.model_alias = {settings["name"]}
    params.api_keys = [settings["api_key"]]
    params.n_ctx = settings["context_tokens"]
    params.cpuparams.n_threads = settings["threads"]
    params.hostnames = ["127.0.0.1"]
    params.port = 0  # any that is free
    params.offline = True
    params.ui = False
    params.endpoint_slots = False  # shows what is being asked
    params.cache_ram_mib = 256
    params.verbosity = 1
    return xllamacpp.Server(params)


if __name__ == "__main__":
    serve()
