"""A run as one HTML file: the page of the debugger with its data embedded.

The data are blocks of compressed JSON, so that the page unpacks only what it shows. Values are
written one at a time to a temporary file, then packed into blocks: memory is bounded by the index.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import os
import re
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import IO, Any, NamedTuple, cast
from urllib.parse import quote

from weakincentives.core.logs import Redaction
from weakincentives.core.text import counted, size_of
from weakincentives.debugger.contents import to_json
from weakincentives.debugger.views import Views
from weakincentives.errors import ExportRefused
from weakincentives.filesystem.diffs import lines_of
from weakincentives.runtime.calls import Run

STATIC = Path(__file__).parent / "static"
MAX_SIZE = 20_000_000
"""Bytes of the file."""
MAX_TEXT = 100_000
"""Characters of one text, such as a result; more is cut."""
MAX_VALUE = 1_000_000
"""Bytes of what belongs to one call, or of all versions of one file."""
_BLOCK = 500_000
"""Bytes of JSON in a block: unpacked and parsed in a few milliseconds."""
_LEFT_OUT = "left out of this export"


# The page


@dataclass(frozen=True, slots=True)
class Page:
    """The page of the debugger, in two parts: what precedes the data, and what follows them."""

    start: str
    end: str

    @classmethod
    def of(cls, static: Path) -> Page:
        """Return the page of a folder with its script and style inlined; it makes no request."""
        names = ("index.html", "app.js", "app.css", "LICENSES.txt")
        html, script, style, licences = ((static / name).read_text("utf-8") for name in names)
        html, scripts = _SCRIPT.subn("", html)
        html, styles = _STYLE.subn("", html)
        if (scripts, styles) != (1, 1) or not all(tag in html for tag in _TAGS):
            raise ExportRefused(f"{static} does not have the page of the debugger")
        # In a script element, only these could be taken for its end or for a comment.
        script = _END.sub(r"<\\/\1", script).replace("<!--", "<\\!--")
        if "</style" in style.lower():
            raise ExportRefused(f"{static / 'app.css'} cannot be inlined")
        policy = (
            f"default-src 'none'; script-src '{_hash_of(script)}'; style-src '{_hash_of(style)}'; "
            "img-src data:; base-uri 'none'; form-action 'none'"
        )
        meta = f'<meta http-equiv="Content-Security-Policy" content="{policy}" />'
        html = html.replace("<head>", f"<head>\n    {meta}", 1)
        html = html.replace("</head>", f"<style>{style}</style>\n  </head>", 1)
        before, body, after = html.rpartition("</body>")
        return cls(
            start=f'{before}<script type="application/json" id="wink-data">',
            end=f'</script>\n<script type="module">{script}</script>\n'
            f'<script type="text/plain">{licences.replace("<", "&lt;")}</script>\n{body}{after}',
        )


_TAGS = ("<head>", "</head>", "</body>")
_SCRIPT = re.compile(r'<script\b[^>]*\bsrc="[^"]*app\.js"[^>]*></script>\s*')
_END = re.compile("</(script)", re.IGNORECASE)
_STYLE = re.compile(r'<link\b[^>]*\bhref="[^"]*app\.css"[^>]*>\s*')


def _hash_of(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _safe(value: object) -> str:
    """Return JSON that cannot end a script element: ASCII, without angle brackets."""
    return json.dumps(value).replace("<", "\\u003c").replace(">", "\\u003e")


# The data


class _Rank(IntEnum):
    """What is left out first if all is too much; of one rank, the largest values are."""

    NEEDED = 0
    """Never left out."""
    UNCHANGED = 1
    """Files that the run did not change."""
    FILE = 2
    """All versions of a file."""
    SLICE = 3
    CALL = 4
    PROMPTS = 5


_NAMES = {
    _Rank.UNCHANGED: ("unchanged file", ""),
    _Rank.FILE: ("changed file", ""),
    _Rank.SLICE: ("slice of the session", "slices of the session"),
    _Rank.CALL: ("call's details", "calls' details"),
    _Rank.PROMPTS: ("list of prompts", ""),
}


class _Item(NamedTuple):
    """A value in the temporary file."""

    key: str
    rank: _Rank
    size: int
    """Bytes of its JSON."""
    place: int
    length: int


def _json(value: object) -> bytes:
    return to_json(value).encode()


def _packed(texts: Iterable[bytes]) -> str:
    data = b"{" + b",".join(texts) + b"}"
    return base64.b64encode(gzip.compress(data, 9, mtime=0)).decode()


# What stands for a value that is left out

Json = dict[str, Any]


def _without_versions(value: Json) -> Json:
    steps = [each | {"edits": None, "note": _LEFT_OUT} for each in value["steps"]]
    return value | {"base": None, "note": _LEFT_OUT, "steps": steps}


def _without_details(value: Json) -> Json:
    changes = [each | {"patch": "", "note": _LEFT_OUT} for each in value["changes"]]
    kept = {"text": "", "arguments": _LEFT_OUT, "result": _LEFT_OUT, "message": "", "value": None}
    notes = [f"the details of this call are {_LEFT_OUT}"]
    return value | kept | {"changes": changes, "state": [], "problems": {}, "notes": notes}


def _without_steps(value: Json) -> Json:
    return value | {"steps": [{"call": 0, "keep": 0, "added": [_LEFT_OUT]}]}


def _without_prompts(value: Json) -> Json:
    kept = [each | {"text": _LEFT_OUT, "sections": []} for each in value["prompts"]]
    return value | {"prompts": kept}


_STUBS: dict[_Rank, Callable[[Json], Json]] = {
    _Rank.FILE: _without_versions,
    _Rank.SLICE: _without_steps,
    _Rank.CALL: _without_details,
    _Rank.PROMPTS: _without_prompts,
}


# Without secrets, and not too long


class _Cleaner:
    """Removes secrets from values, and cuts long texts."""

    def __init__(self) -> None:
        self._redaction = Redaction()
        self.cut = 0
        """How many texts were cut."""

    def __call__(self, value: Any) -> Any:
        return self._shortened(self._redaction.value(value))

    def run(self, value: Json) -> Json:
        lists = {name: [_whole_words(each) for each in value[name]] for name in ("turns", "calls")}
        return self(value | lists)

    def call(self, value: Json) -> Json:
        return self(value | _whole_words({name: value[name] for name in _CUT_IN_CALLS}))

    def without_parts(self, data: bytes) -> bytes:
        """Return JSON without parts of private keys, once all keys of the run have been seen."""
        keys = self._redaction.keys
        return keys.without_known(data.decode()).encode() if keys.are_known else data

    def versions(self, value: Json) -> Json:
        """Clean the versions of a file; every text has as many lines as before."""
        base = value["base"]
        steps = [
            each | {"edits": None if each["edits"] is None else self._edits(each["edits"])}
            for each in value["steps"]
        ]
        return self._redaction.value({**value, "base": None, "steps": []}) | {
            "base": None if base is None else self._redaction(base),
            "steps": [
                self._redaction.value(each | {"edits": None}) | {"edits": each["edits"]}
                for each in steps
            ],
        }

    def _edits(self, edits: Sequence[Any]) -> list[Any]:
        # A secret may have several lines.
        return [
            [start, removed, lines_of(self._redaction("".join(added)))]
            for start, removed, added in edits
        ]

    def _shortened(self, value: Any) -> Any:
        if isinstance(value, str) and len(value) > MAX_TEXT:
            self.cut += 1
            return f"{value[:MAX_TEXT]}\n… {len(value) - MAX_TEXT} more characters {_LEFT_OUT}"
        if isinstance(value, dict):
            pairs = cast("Json", value).items()
            return {key: self._shortened(each) for key, each in pairs}
        if isinstance(value, list):
            return [self._shortened(each) for each in cast("list[Any]", value)]
        return value


_CUT_AT = (80, 200, 400)
"""Characters at which texts in lists are cut."""
_CUT_IN_CALLS = ("summary", "error")
_CUT = ("text", "user", *_CUT_IN_CALLS)


def _whole_words(row: Json) -> Json:
    """Return a row of a list, its texts cut after a word: not in the middle of a secret."""
    return row | {name: _whole_word(row[name]) for name in _CUT if name in row}


def _whole_word(text: str) -> str:
    if text.endswith("...") or len(text) in _CUT_AT:
        return f"{text.removesuffix('...').rpartition(' ')[0]}..."
    return text


# The export


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What was written."""

    path: Path
    size: int
    """Bytes."""
    calls: int
    changed: int
    """How many changed files it has."""
    unchanged: int
    note: str
    """What was left out; empty if nothing was."""


def export_run(
    workspace: str | os.PathLike[str],
    run: Run,
    target: str | os.PathLike[str],
    *,
    max_size: int = MAX_SIZE,
    changed_only: bool = False,
    force: bool = False,
    static: Path = STATIC,
) -> Exported:
    """Write the page of a run with all its data to one file, which opens from disk.

    Secrets are replaced by the rules of ``weakincentives.core.logs``. The file appears complete, or
    not at all. Takes no lock: an agent may be running.

    Args:
        max_size: Bytes of the file. Beyond it, unchanged files are left out first, then versions
            of changed files, then details of calls; of each the largest first.
        changed_only: Leave out files that the run did not change.
        force: Replace an existing file.
        static: The folder with the page.

    Raises:
        ExportRefused: The file exists, or not even a list of the calls fits.
        SnapshotError: The run cannot be read.
    """
    target, page = Path(target), Page.of(static)
    views = Views(Path(workspace), writable=False)
    with tempfile.TemporaryFile() as file, _appearing(target, force) as out:
        data = _Data(file, max_size)
        data.collect(views, run.id, changed_only=changed_only)
        for size in data.written(out, page, run.id):
            if size <= max_size:
                break
        else:
            raise ExportRefused(
                f"not even a list of the calls of {run.id} fits into {size_of(max_size)}; "
                "use a larger --max-size"
            )
    left = Counter(item.rank for item in data.items if item.key not in data.left_out)
    return Exported(
        path=target,
        size=size,
        calls=left[_Rank.CALL],
        changed=left[_Rank.FILE],
        unchanged=left[_Rank.UNCHANGED],
        note=data.note,
    )


class _Data:
    """The values of a run, in a temporary file, and which of them are left out."""

    def __init__(self, file: IO[bytes], max_size: int) -> None:
        self.items: list[_Item] = []
        self.left_out: set[str] = set()
        """Their keys."""
        self._file = file
        self._max_size = max_size
        self._cleaner = _Cleaner()
        self._notes: list[str] = []

    def collect(self, views: Views, run: str, *, changed_only: bool) -> None:
        """Read everything, one value at a time."""
        start = f"runs/{quote_key(run)}"
        view, tree = views.run(run), views.tree(run)
        changed = {path for each in view["commits"] for file in each["files"] for path in file[::2]}
        keys = [each["key"] for each in view["slices"]]
        unchanged = [] if changed_only else [path for path in tree["paths"] if path not in changed]
        summary = self._cleaner(view["run"])
        workspace = {"name": views.path.name, "path": "", "writable": False, "runs": [summary]}
        self._add(_Rank.NEEDED, "workspace", workspace | {"branches": [], "approvals": []})
        self._add(_Rank.NEEDED, start, self._cleaner.run(view))
        self._add(_Rank.NEEDED, f"{start}/tree", self._cleaner(tree))
        self._add(_Rank.PROMPTS, f"{start}/prompts", self._cleaner(views.prompts(run)))
        for key in keys:
            value = self._cleaner(views.slices(run, key))
            self._add(_Rank.SLICE, f"{start}/slices?key={quote_key(key)}", value)
        for number in [each["n"] for each in view["calls"]]:
            value = self._cleaner.call(views.call(run, number))
            self._add(_Rank.CALL, f"{start}/calls/{value['n']}", value)
        for path in sorted(changed - {""}):
            value = self._cleaner.versions(views.versions(run, path))
            key = f"{start}/versions?path={quote_key(value['path'])}"
            self._add(_Rank.FILE, key, value)
        versions = (views.versions(run, path) for path in unchanged)
        self._add_unchanged(start, map(self._cleaner.versions, versions))
        if view.get("note"):
            self._notes.append(view["note"])
        if self._cleaner.cut:
            cut = counted(self._cleaner.cut, "text")
            self._notes.append(f"{cut} of more than {MAX_TEXT:,} characters: only their beginning")

    def _add(self, rank: _Rank, key: str, value: object) -> int:
        """Write a value to the temporary file; returns the size of its JSON."""
        data = _json(value)
        packed = zlib.compress(data, 1)
        place = self._file.seek(0, os.SEEK_END)
        self._file.write(packed)
        self.items.append(_Item(key, rank, len(data), place, len(packed)))
        if len(data) > MAX_VALUE and rank in _STUBS:
            self.left_out.add(key)
        return len(data)

    def _add_unchanged(self, start: str, values: Iterable[Json]) -> None:
        room = _READ * self._max_size
        for value in values:
            text = value["base"]
            if text is not None and len(text) > MAX_VALUE:
                value |= {"base": None, "note": _LEFT_OUT}
            key = f"{start}/versions?path={quote_key(value['path'])}"
            room -= self._add(_Rank.UNCHANGED, key, value)
            if room < 0:
                self._notes.append(f"unchanged files after {value['path']}")
                return

    def written(self, out: IO[str], page: Page, run: str) -> Iterator[int]:
        """Write the page and yield its size; then again with less, until little is left."""
        order = sorted(
            (each for each in self.items if each.rank and each.key not in self.left_out),
            key=lambda each: (-each.rank, each.size, each.key),
        )  # what goes first is last
        while True:
            out.seek(0)
            out.truncate()
            raw = self._write(out, page, run)
            yield (size := out.tell())
            if not order:
                return
            # What is left out is compressed about as well as everything.
            over = 1.1 * (size - self._max_size) * raw / size
            while order and over > 0:
                item = order.pop()
                self.left_out.add(item.key)
                over -= item.size

    def _write(self, out: IO[str], page: Page, run: str) -> int:
        """Write the page; returns the size of the JSON in it."""
        index: dict[str, int] = {}
        out.write(f'{page.start}{{"version":1,"run":{_safe(run)},"blocks":[')
        for n, (keys, block) in enumerate(self._blocks()):
            index |= dict.fromkeys(keys, n)
            out.write(f'{"," if n else ""}"{block}"')
        out.write(f'],"index":{_safe(index)},"note":{_safe(self.note)}}}{page.end}')
        return sum(each.size for each in self.items if each.key not in self.left_out)

    def _blocks(self) -> Iterator[tuple[list[str], str]]:
        """Yield the keys in each block, and the block as base64."""
        keys, texts, size = list[str](), list[bytes](), 0
        rank = _Rank.NEEDED
        for item in self.items:
            if item.rank is _Rank.UNCHANGED and item.key in self.left_out:
                continue
            self._file.seek(item.place)
            text = zlib.decompress(self._file.read(item.length))
            if item.key in self.left_out:
                text = _json(_STUBS[item.rank](json.loads(text)))
            text = self._cleaner.without_parts(text)
            if keys and (size + len(text) > _BLOCK or item.rank is not rank):
                yield keys, _packed(texts)
                keys, texts, size = [], [], 0
            rank = item.rank
            keys.append(item.key)
            texts.append(_json(item.key) + b":" + text)
            size += len(text)
        if keys:
            yield keys, _packed(texts)

    @property
    def note(self) -> str:
        """What is left out, in words; empty if nothing is."""
        ranks = Counter(each.rank for each in self.items if each.key in self.left_out)
        left_out = [counted(ranks[rank], *_NAMES[rank]) for rank in sorted(ranks)]
        return "; ".join([*left_out, *self._notes])


_READ = 20
"""Unchanged files are read up to this many times the size of the export."""


def quote_key(text: str) -> str:
    """Return what ``encodeURIComponent`` of the page returns."""
    return quote(text, safe="!~*'()")


# The file


@contextmanager
def _appearing(target: Path, force: bool) -> Generator[IO[str]]:
    """Yield a temporary file, which only its owner can read; it is the target after the block."""
    if target.is_dir():
        raise ExportRefused(f"{target} is a directory; name a file")
    exists = f"{target} exists; name another file, or use --force"
    if os.path.lexists(target) and not force:
        raise ExportRefused(exists)
    with tempfile.NamedTemporaryFile(
        "w", dir=target.parent, prefix=f".{target.name}.", encoding="utf-8", delete=False
    ) as out:
        try:
            yield out
            out.flush()
            try:
                if not force:
                    os.link(out.name, target)
            except FileExistsError as error:  # since we looked
                raise ExportRefused(exists) from error
            except OSError:  # there are no hard links here
                force = True
            if force:
                os.replace(out.name, target)
        finally:
            with suppress(FileNotFoundError):
                os.unlink(out.name)
