"""The process in which a script is evaluated: a program that imports nothing of the library.

It loads the modules that scripts may use, drops its rights, and only then reads the script. Even a
script that controls the interpreter can only compute, and ask the parent for files.
"""

# pyright: basic
# Scripts pass any value to these functions, and asteval has no types.

from __future__ import annotations

import ast
import builtins
import codecs
import contextlib
import functools
import io
import json
import os
import sys
import types
import warnings

TYPE_CHECKING = False  # importing typing is slow
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

INNER = {"numpy": ("fft", "linalg", "random")}
"""Submodules that are offered."""

LAZY = {"datetime": "_strptime", "time": "_strptime"}
"""Modules that others load on first use, when nothing can be loaded any more."""

ENCODINGS = ("ascii", "latin-1", "cp1252", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be")

WORDS = {
    "ClassDef": "a class",
    "Global": "global",
    "Nonlocal": "nonlocal",
    "Yield": "yield",
    "YieldFrom": "yield",
    "Starred": "* before a value",
    "NamedExpr": ":=",
    "Match": "match",
}
"""Names of the syntax that is not supported."""

CHANNEL = 0
"""The descriptor of the socket to the parent, the only open one."""

MAX_RECURSION = 5_000
"""The interpreter uses a dozen frames for each frame of a script."""


def main() -> None:
    options = json.loads(sys.argv[1])
    sys.path += options["path"]
    try:
        limit_resources(options["memory"], options["cpu"], optional=options["seccomp"] is None)
        evaluate = prepare(options["modules"], options["numpy"], options["output"])
    except Exception as error:  # too little memory, or a broken package
        return send({"failed": f"{type(error).__name__}: {error}"})
    try:
        drop_rights(options["seccomp"])
    except OSError as error:
        return send({"refused": str(error)})
    send({"ready": True})
    send(evaluate(receive()["code"]))
    os._exit(0)  # a regular exit takes longer than most scripts


# Dropping rights


def limit_resources(memory: int, cpu: int, optional: bool) -> None:
    import resource

    # Not every system has all of them; with seccomp they are required.
    missing = (ValueError, OSError) if optional else ()
    for kind, limit in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CPU, cpu),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NPROC, 0),
    ):
        with contextlib.suppress(*missing):
            set_limit(kind, limit)


def set_limit(kind: int, limit: int) -> None:
    import resource

    most = resource.getrlimit(kind)[1]
    limit = limit if most == resource.RLIM_INFINITY else min(limit, most)
    resource.setrlimit(kind, (limit, limit))


def drop_rights(seccomp: list | None) -> None:
    """Close everything but the channel to the parent, and set the filter of system calls."""
    import resource

    os.closerange(CHANNEL + 1, 4096)
    set_limit(resource.RLIMIT_NOFILE, CHANNEL + 1)
    if seccomp is not None:
        filter_syscalls(seccomp[0], bytes.fromhex(seccomp[1]))


PR_SET_NO_NEW_PRIVS = 38
SET_MODE_FILTER, ALL_THREADS = 1, 1


def filter_syscalls(number: int, program: bytes) -> None:
    """Set the filter for all threads, with the system call of that number."""
    import ctypes
    import struct

    code = ctypes.create_string_buffer(program, len(program))
    filters = struct.pack("@HP", len(program) // 8, ctypes.addressof(code))
    libc, long = ctypes.CDLL(None, use_errno=True), ctypes.c_long
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.syscall(
        long(number), long(SET_MODE_FILTER), long(ALL_THREADS), filters
    ):
        reason = os.strerror(ctypes.get_errno())
        raise OSError(f"the kernel refuses the seccomp filter ({reason})")


# The channel; the parent uses the same class


class Channel:
    """One end of a socket: chunks after their length, JSON or the content of a file."""

    def __init__(self, read: Callable[[int], bytes], write: Callable[[memoryview], int]) -> None:
        self._read = read
        self._write = write

    def send(self, message: dict[str, object]) -> None:
        self.send_bytes(json.dumps(message).encode())

    def send_bytes(self, data: bytes) -> None:
        rest = memoryview(len(data).to_bytes(4, "big") + data)
        while rest:
            rest = rest[self._write(rest) :]

    def receive(self) -> dict[str, Any]:
        return json.loads(self.receive_bytes())

    def receive_bytes(self, most: int = 1 << 32) -> bytes:
        """Return the next chunk; raise OverflowError if it is larger than this."""
        size = int.from_bytes(self._take(4), "big")
        if size > most:
            raise OverflowError
        return self._take(size)

    def _take(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            piece = self._read(min(size - len(data), 1 << 20))
            if not piece:
                raise ConnectionError
            data += piece
        return bytes(data)


def read(size: int) -> bytes:
    data = os.read(CHANNEL, size)
    if not data:
        os._exit(1)  # the parent is gone
    return data


PARENT = Channel(read, lambda data: os.write(CHANNEL, data))
send, receive = PARENT.send, PARENT.receive


def ask(operation: str, argument: str, content: bytes | None = None) -> Any:
    """Return the answer of the parent; raise its error."""
    send({"operation": operation, "argument": argument})
    if content is not None:
        PARENT.send_bytes(content)
    answer = receive()
    if "error" in answer:
        raise getattr(builtins, answer["kind"])(answer["error"])
    return PARENT.receive_bytes() if operation == "read" else answer["value"]


# The workspace


UNCLOSED: list[io.IOBase] = []
"""Files opened for writing: those that a script leaves open are closed at its end."""


class Writing(io.BytesIO):
    """A file opened for writing; closing it writes it to the workspace."""

    def __init__(self, path: str, start: bytes) -> None:
        super().__init__()
        self.write(start)
        self._path = path

    def close(self) -> None:
        if self.closed:
            return
        content = self.getvalue()
        super().close()  # first: a refused write is not retried
        ask("write", self._path, content)


def open_file(path, mode="r", encoding="utf-8", errors="strict", newline=None):
    """Open a file of the workspace, as ``open`` does."""
    kind = mode.replace("b", "").replace("t", "")
    if kind == "r":
        raw = io.BytesIO(ask("read", path))
    elif kind in ("w", "x", "a"):
        if kind == "x" and file_exists(path):
            raise FileExistsError(f"{path} exists")
        raw = Writing(path, ask("read", path) if kind == "a" and file_exists(path) else b"")
    else:
        raise ValueError(f"mode must be r, w, a or x, with b for bytes, got {mode!r}")
    if "b" in mode:
        opened = raw
    elif kind == "r":
        opened = io.StringIO(_text(raw.getvalue(), path, encoding, errors), newline)
    else:
        opened = io.TextIOWrapper(raw, encoding=encoding, errors=errors, newline=newline)
    if kind != "r":
        UNCLOSED.append(opened)
    return opened


def read_file(path):
    return _text(ask("read", path), path, "utf-8", "strict")


def write_file(path, content):
    ask("write", path, content.encode() if isinstance(content, str) else bytes(content))


def list_directory(path="."):
    """Return the entries of a directory as (path, kind, size)."""
    return [tuple(entry) for entry in ask("list", path)]


def glob_files(pattern):
    return ask("glob", pattern)


def file_exists(path):
    return ask("exists", path)


def delete_file(path):
    ask("delete", path)


def _text(data: bytes, path, encoding: str, errors: str) -> str:
    try:
        return data.decode(encoding, errors)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not {encoding} text: use open(path, 'rb')") from error


WORKSPACE = {
    "open": open_file,
    "read_file": read_file,
    "write_file": write_file,
    "list_directory": list_directory,
    "glob_files": glob_files,
    "file_exists": file_exists,
    "delete_file": delete_file,
}


# Evaluating


class Printed(io.TextIOBase):
    """Output of print, up to a limit."""

    def __init__(self, limit: int) -> None:
        self.parts: list[str] = []
        self.room = limit
        self.length = 0

    def write(self, text: str) -> int:
        self.length += len(text)
        if self.room > 0:
            self.parts.append(text[: self.room])
            self.room -= len(self.parts[-1])
        return len(text)


def prepare(modules: list[str], numpy: bool, output: int):
    """Return the function that evaluates a script; load everything it may need."""
    for encoding in ENCODINGS:
        codecs.lookup(encoding)
    for name in ("unicodedata", *(LAZY[each] for each in modules if each in LAZY)):
        __import__(name)
    warnings.simplefilter("ignore")
    if not numpy:
        sys.modules["numpy"] = None  # type: ignore[assignment]  # makes its import fail
    import asteval

    # It tokenizes each assigned name, every time.
    inner = sys.modules["asteval.asteval"]
    inner.valid_symbol_name = functools.cache(inner.valid_symbol_name)  # type: ignore[attr-defined]
    sys.setrecursionlimit(MAX_RECURSION)
    printed = Printed(output)
    interpreter = asteval.Interpreter(  # pyright: ignore[reportAttributeAccessIssue]  # not ours
        writer=printed, err_writer=printed, use_numpy=numpy, user_symbols=WORKSPACE
    )
    # With numpy, it would replace sum, any, round and others.
    interpreter.symtable.update(sys.modules["asteval.astutils"].BUILTINS_TABLE)
    offered = {name: public(__import__(name), *INNER.get(name, ())) for name in modules}
    Syntax(interpreter, offered)

    def show(*values, sep=" ", end="\n", file=None, flush=False):
        print(*values, sep=sep, end=end, file=file or printed)

    interpreter.symtable["print"] = show
    return lambda code: evaluated(interpreter, code, printed, output)


def public(module, *inner: str):
    """Return a module's public names without the modules that it imports, such as os."""
    names = getattr(module, "__all__", None) or [n for n in dir(module) if n[0] != "_"]
    found = {name: getattr(module, name, None) for name in names}
    kept = {n: each for n, each in found.items() if not isinstance(each, types.ModuleType)}
    return types.SimpleNamespace(**kept, **{n: public(getattr(module, n)) for n in inner})


class Syntax:
    """Syntax that the interpreter lacks or gets wrong: it loses errors in ``try``, does not exit
    ``with``, and cannot ``raise`` a class.
    """

    def __init__(self, interpreter, offered: dict[str, types.SimpleNamespace]) -> None:
        self.interpreter = interpreter
        self.run = interpreter.run
        self.offered = offered
        interpreter.node_handlers.update(
            {
                "import": self.on_import,
                "importfrom": self.on_import_from,
                "annassign": self.on_annotated,
                "generatorexp": interpreter.on_listcomp,  # not lazily
                "assert": self.on_assert,
                "raise": self.on_raise,
                "try": self.on_try,
                "with": self.on_with,
            }
        )

    def on_import(self, node):
        for name in node.names:
            self.interpreter.symtable[name.asname or name.name] = self._module(name.name)

    def on_import_from(self, node):
        found = self._module(node.module)
        for name in node.names:
            if not hasattr(found, name.name):
                raise ImportError(f"cannot import {name.name!r} from {node.module!r}")
            self.interpreter.symtable[name.asname or name.name] = getattr(found, name.name)

    def _module(self, name):
        if name not in self.offered:
            raise ImportError(f"{name!r} cannot be imported here")
        return self.offered[name]

    def on_annotated(self, node):
        if node.value is not None:
            self.interpreter.node_assign(node.target, self.run(node.value))

    def on_assert(self, node):
        if not self.run(node.test):
            raise AssertionError("" if node.msg is None else self.run(node.msg))

    def on_raise(self, node):
        error = self.run(node.exc)
        error = error() if isinstance(error, type) else error
        if not isinstance(error, Exception):
            raise TypeError("exceptions must derive from Exception")
        raise error

    def on_with(self, node):
        with contextlib.ExitStack() as stack:
            for item in node.items:
                entered = stack.enter_context(self.run(item.context_expr))
                if item.optional_vars is not None:
                    self.interpreter.node_assign(item.optional_vars, entered)
            self._block(node.body)

    def on_try(self, node):
        try:
            try:
                self._block(node.body)
            except Exception as raised:
                error = self._cause(raised)
                clause = next((c for c in node.handlers if catches(c, error)), None)
                if clause is None:
                    raise
                self._state = NOTHING_HAPPENED
                if clause.name is not None:
                    self.interpreter.symtable[clause.name] = error
                self._block(clause.body)
            else:
                self._block(node.orelse)
        finally:
            # After an error or a return the interpreter runs no more statements.
            state, self._state = self._state, NOTHING_HAPPENED
            self._block(node.finalbody)
            if self._state == NOTHING_HAPPENED:
                self._state = state

    def _block(self, statements):
        for statement in statements:
            self.run(statement)

    def _cause(self, raised):
        """Return the original exception; the interpreter raises another one."""
        first = self.interpreter.error[0] if self.interpreter.error else None
        cause = None if first is None else first.exc_info[1]
        return raised if cause is None else cause

    @property
    def _state(self):
        inner = self.interpreter
        return inner.error, inner.error_msg, inner.retval, inner._interrupt

    @_state.setter
    def _state(self, state):
        inner = self.interpreter
        error, inner.error_msg, inner.retval, inner._interrupt = state
        inner.error = list(error)


NOTHING_HAPPENED = [], None, None, None


def catches(clause: ast.ExceptHandler, error: Exception) -> bool:
    return clause.type is None or isinstance(error, tuple(caught(clause)))


def caught(clause: ast.ExceptHandler) -> list:
    """Return the built-in exceptions that a clause names; None for an unknown name."""
    if clause.type is None:
        return []
    named = clause.type.elts if isinstance(clause.type, ast.Tuple) else [clause.type]
    return [getattr(builtins, getattr(each, "id", ""), None) for each in named]


def evaluated(interpreter, code: str, printed: Printed, output: int) -> dict:
    """Return value, output and error of a script, as a message to the parent."""
    text, error = "", None
    try:
        value = interpreter.eval(parsed(code, interpreter.node_handlers), show_errors=False)
        error = failure(interpreter.error)
        if error is None:
            for file in UNCLOSED:
                file.close()
            text = "" if value is None else repr(value)
    except SyntaxError as raised:
        error = {"type": "SyntaxError", "message": raised.msg, "line": raised.lineno}
    except BaseException as raised:  # SystemExit included: the parent waits for an answer
        error = {"type": type(raised).__name__, "message": str(raised), "line": None}
    if error is not None:
        error["message"] = error["message"][:output]
    return {
        "value": text[:output],
        "value_chars": len(text),
        "stdout": "".join(printed.parts),
        "stdout_chars": printed.length,
        "error": error,
    }


def parsed(code: str, handlers: dict) -> ast.AST:
    """Return the syntax tree of a script; refuse unsupported syntax."""
    tree = ast.parse(code)
    for node in ast.walk(tree):
        what = unsupported(node, handlers)
        if what:
            place = ("script", getattr(node, "lineno", None), None, None)
            raise SyntaxError(f"{what} is not supported here", place)
    return tree


def unsupported(node: ast.AST, handlers: dict) -> str:
    """Return the name of the unsupported syntax of a node; empty if it is supported."""
    kind = type(node).__name__
    if isinstance(node, (ast.stmt, ast.expr)) and kind.lower() not in handlers:
        return WORDS.get(kind, kind)
    if isinstance(node, ast.Dict) and None in node.keys:
        return "** in a dict"
    if isinstance(node, ast.FunctionDef) and node.decorator_list:
        return "a decorator"
    if isinstance(node, ast.arguments) and (node.kwonlyargs or node.posonlyargs):
        return "* or / among parameters"
    if isinstance(node, ast.Raise) and node.exc is None:
        return "raise without an exception"
    if isinstance(node, ast.ExceptHandler) and not all(
        isinstance(each, type) and issubclass(each, BaseException) for each in caught(node)
    ):
        return "except with an exception that is not built in"
    return ""


def failure(errors: list) -> dict | None:
    """Return the first of the interpreter's errors, the original one."""
    if not errors:
        return None
    first = errors[0]
    cause = first.exc_info[1]
    # The innermost statement with a line number.
    line = next((each.lineno for each in errors if each.lineno), None)
    message = str(cause) if cause is not None and type(cause) is first.exc else first.msg
    return {"type": first.exc.__name__, "message": message, "line": line}


if __name__ == "__main__":
    main()
