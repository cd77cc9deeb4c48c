"""The Python blocks of the seed documents: where they are, and how one is run as printed.

The rules are those of the design's section on rulings: annotations are not evaluated, a bare
``return`` gets a function around it, names that a block leaves out are given to it.
"""

from __future__ import annotations
import __future__

import ast
import itertools
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

SEEDS = Path(__file__).resolve().parent / "documents"

DOCUMENTS = {"000": "Chapter", "001": "Chapter", "002": "Runtime spec", "004": "Policy spec"}
"""Which seed each number is; 001 is the Chapter again, shorter. 003 is TypeScript."""

_FENCE = re.compile(r"(`{3,})(.*)")
_HEADING = re.compile(r"#+ +(.*)")
_run_number = itertools.count(1)


@dataclass(frozen=True)
class Block:
    """A fenced block of Python in a seed."""

    document: str
    number: int
    """Counted within the document, from 1."""
    heading: str
    nth: int
    """Which of the blocks under this heading it is, from 1."""
    line: int
    """The line of the opening fence."""
    info: str
    """What stands behind the fence's backticks."""
    source: str

    @property
    def key(self) -> tuple[str, str, int]:
        """What a block has in common with its copy in the other edition of the same text."""
        return DOCUMENTS[self.document], self.heading, self.nth

    @property
    def label(self) -> str:
        words = re.sub(r"[^a-z0-9]+", "-", self.heading.lower()).strip("-")
        return f"{self.document}-{self.number:03}-{words}"

    @property
    def nocheck(self) -> bool:
        return "nocheck" in self.info.split()

    @cached_property
    def needs_python_312(self) -> bool:
        """Whether it is written in syntax that Python 3.11 does not know."""
        try:
            ast.parse(self.source, feature_version=(3, 11))
        except SyntaxError:
            return not self.nocheck
        return False


def seed_blocks() -> tuple[Block, ...]:
    """Return every Python block of every seed, in reading order."""
    return tuple(
        block
        for document in DOCUMENTS
        for block in python_blocks(document_text(document), document)
    )


def document_text(document: str) -> str:
    """Return the text of a seed, by its number."""
    (path,) = SEEDS.glob(f"{document}_*")
    return path.read_text(encoding="utf-8")


def fenced_block(document: str, heading: str, language: str) -> str:
    """Return the one block in a language under a heading."""
    (found,) = (
        source
        for title, _, info, source in _fenced(document_text(document))
        if title == heading and info.split()[:1] == [language]
    )
    return found


def python_blocks(text: str, document: str) -> Iterator[Block]:
    """Yield the Python blocks of one document."""
    seen: dict[str, int] = {}
    number = 0
    for heading, line, info, source in _fenced(text):
        if info.split()[:1] != ["python"]:
            continue
        number += 1
        seen[heading] = seen.get(heading, 0) + 1
        yield Block(document, number, heading, seen[heading], line, info, source)


def _fenced(text: str) -> Iterator[tuple[str, int, str, str]]:
    """Yield heading, line, info and content of every fenced block.

    A fence ends at the same fence: a longer one in between belongs to the content.
    """
    heading = ""
    lines = enumerate(text.splitlines(keepends=True), 1)
    for number, line in lines:
        if found := _HEADING.fullmatch(line.strip()):
            heading = found[1]
        elif opening := _FENCE.fullmatch(line.strip()):
            inside = itertools.takewhile(lambda each: each[1].strip() != opening[1], lines)
            yield heading, number, opening[2].strip(), "".join(content for _, content in inside)


def without_fences(text: str) -> str:
    """Return a document without its fenced blocks."""
    lines = text.splitlines()
    for _, line, _, source in reversed(list(_fenced(text))):
        del lines[line - 1 : line + source.count("\n") + 1]
    return "\n".join(lines)


@dataclass
class Executed:
    """What a block left behind. Its names are attributes of this."""

    module: ModuleType
    shown: list[Any] = field(default_factory=list)
    """The values of the expressions that stand on their own, such as calls, in order."""
    returned: list[Any] = field(default_factory=list)
    """The values of the bare returns, in order."""
    defined: dict[str, list[Any]] = field(default_factory=dict)
    """Every function under its name, also one that a later definition replaced."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)


def execute(
    block: Block, names: Mapping[str, object], folder: Path, elisions: Mapping[str, str]
) -> Executed:
    """Run a block in a module of its own that has ``names`` already.

    ``elisions`` says what stands for an ellipsis of the block where Python cannot take it as it is.
    """
    source = block.source
    for elided, meant in elisions.items():
        assert source.count(elided) == 1, f"{elided!r} must stand once in {block.label}"
        source = source.replace(elided, meant)

    name = f"seed_{block.document}_{block.number:03}_{next(_run_number)}"
    path = folder / f"{name}.py"
    # Blank lines above it, so that a traceback names the line of the seed; a real file, because
    # the text under a field is read from there.
    text = "\n" * block.line + source
    path.write_text(text, encoding="utf-8")

    module = ModuleType(name)
    module.__file__ = str(path)
    sys.modules[name] = module
    executed = Executed(module)
    vars(module).update(names)
    vars(module).update(
        __show__=executed.shown.append,
        __define__=lambda each: executed.defined.setdefault(each.__name__, []).append(each),
    )
    tree = ast.parse(text, str(path))
    if any(isinstance(statement, ast.Return) for statement in tree.body):
        for body in _up_to_each_return(tree.body):
            executed.returned.append(_in_function(body, module)())
    else:
        _exec(ast.Module(_noted(tree.body), []), module)
    return executed


def _noted(body: list[ast.stmt]) -> list[ast.stmt]:
    """Return the statements so that values of expressions, and functions, are noted."""
    noted: list[ast.stmt] = []
    for statement in body:
        if isinstance(statement, ast.Expr):
            statement = ast.Expr(_call("__show__", statement.value))
        noted.append(statement)
        if isinstance(statement, ast.FunctionDef):
            noted.append(ast.Expr(_call("__define__", ast.Name(statement.name, ast.Load()))))
    return noted


def _call(name: str, argument: ast.expr) -> ast.expr:
    return ast.Call(ast.Name(name, ast.Load()), [argument], [])


def _up_to_each_return(body: list[ast.stmt]) -> Iterator[list[ast.stmt]]:
    """Yield the block as printed; then, for every further return, without those before it."""
    yield body
    returns = [statement for statement in body if isinstance(statement, ast.Return)]
    for done in range(1, len(returns)):
        yield [statement for statement in body if statement not in returns[:done]]


def _in_function(body: list[ast.stmt], module: ModuleType) -> Callable[[], object]:
    (function,) = ast.parse("def block(): pass").body
    assert isinstance(function, ast.FunctionDef)
    function.body = body
    _exec(ast.Module([function], []), module)
    return module.block


def _exec(tree: ast.Module, module: ModuleType) -> None:
    code = compile(
        ast.fix_missing_locations(tree),
        str(module.__file__),
        "exec",
        flags=__future__.annotations.compiler_flag,
        dont_inherit=True,
    )
    exec(code, vars(module))
