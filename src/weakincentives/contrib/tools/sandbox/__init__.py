"""Sandboxes for commands on a workspace, and the section that offers one to a model.

May know: `contrib`, `core`, `errors`, `filesystem`, `prompt`, `retry`, `session`,
`tool_result`.
Must not go here: how changed files are committed; that is ``filesystem.overlay``.
"""

import marshal
from binascii import b2a_base64
from functools import cache

__all__: list[str] = []


@cache
def compiled(source: str) -> bytes:
    """Return a program as byte code for our own interpreter: starting it compiles nothing."""
    return marshal.dumps(compile(source, "<string>", "exec"))


@cache
def byte_code(source: str) -> str:
    """Return the byte code of a program as an argument of the interpreter."""
    code = b2a_base64(compiled(source), newline=False)
    return f"import binascii, marshal; exec(marshal.loads(binascii.a2b_base64({code!r})))"
