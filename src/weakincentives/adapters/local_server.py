"""The process that serves a local model: llama.cpp on loopback, until the process that began it ends.

Run as a program by ``LocalModel``, which says on standard input what to serve, and keeps it open.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from typing import Any

__all__ = ["serve"]


def serve() -> None:
    """Load the model, say on standard output where it is, and stay until told, or left alone."""
    settings = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_the_other_side, daemon=True).start()
    server = _started(settings)
    print(server.listening_address, flush=True)  # noqa: T201  # who began this reads it
    threading.Event().wait()


def _end_with_the_other_side() -> None:
    sys.stdin.read()  # ends when it is closed there, also by a kill
    os._exit(0)  # whatever is being computed


def _started(settings: dict[str, Any]) -> Any:
    import xllamacpp

    params: Any = xllamacpp.CommonParams()
    params.model.path = settings["path"]
    params.model_alias = {settings["name"]}
    params.api_keys = [settings["api_key"]]
    params.n_ctx = settings["context_tokens"]
    params.cpuparams.n_threads = settings["threads"]
    params.hostnames = ["127.0.0.1"]
    params.port = 0  # any that is free
    params.offline = True
    params.ui = False
    params.endpoint_slots = False  # would show what others ask
    params.cache_ram_mib = 256
    params.verbosity = 1
    return xllamacpp.Server(params)


if __name__ == "__main__":
    serve()
