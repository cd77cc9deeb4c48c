"""Sandboxes for commands on a workspace, and the section that offers one to a model."""

import marshal
from binascii import b2a_base64
from functools import cache

__all__: list[str] = []


@cache
def byte_code(source: str) -> str:
    """Return a program as byte code for our own interpreter: starting it compiles nothing."""
    code = b2a_base64(marshal.dumps(compile(source, "<string>", "exec")), newline=False)
    return f"import binascii, marshal; exec(marshal.loads(binascii.a2b_base64({code!r})))"
