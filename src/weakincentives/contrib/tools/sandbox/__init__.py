"""Sandboxes for commands on a workspace, and the section that offers one to a model."""

import marshal
from binascii import b2a_base64

__all__: list[str] = []


def byte_code(source: str) -> str:
    """Return the same program as byte code: it is not compiled again whenever it is started.

    It is for our own interpreter, which is the one that starts it.
    """
    code = b2a_base64(marshal.dumps(compile(source, "<string>", "exec")), newline=False)
    return f"import binascii, marshal; exec(marshal.loads(binascii.a2b_base64({code!r})))"
