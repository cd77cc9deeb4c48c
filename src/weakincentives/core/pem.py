"""Private keys in texts: whole or in part, with numbered lines, in a diff, or escaped as in JSON.

A part of a key has no header. It is recognised by its lines, which have exactly 64 or 70 characters
of base64; by how the encoding of a private key starts, with the lines below it; or because the
whole key was seen before. Hashes in hexadecimal, the ``sha384-...`` of web pages, certificates,
public keys, and data in lines of other lengths are left alone.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator

_B64 = "[A-Za-z0-9+/]"
_NEEDLE = "PRIVATE"
_IS_KEY = re.compile(r"PRIVATE(?: |\+|%20)KEY").search
# In an address or a form, spaces are escaped, too.
_MARK = re.compile(r"-----(BEGIN|END)((?:(?: |\+|%20)[A-Z0-9]{1,16}){1,6})-----")
# In JSON a line end is escaped, and in JSON inside of JSON twice. Colours count as line ends, as do
# the brackets of a diff by words.
_LINE_END = re.compile(
    r"((?:\\{1,4}r)?\\{1,4}n|\r\n|\r|\n|(?:\x1b|\\{1,4}(?:u001b|x1b|033|e))\[[\d;]{0,20}m"
    r"|\[-|-\]|\{\+|\+\})"
)
_WIDTHS = (64, 70)
"""Characters in a line of a key: of OpenSSL, GnuPG and PuTTY, and of OpenSSH."""
_LONG = re.compile(rf"(?<!{_B64}){_B64}{{62,}}={{0,2}}")
_LAST = re.compile(rf"(?<!{_B64})(?P<run>{_B64}+={{0,2}})[\s\"',;|\\$]*$")
# What may precede the data in its line: a number, the sign of a diff, a quote, what grep prints.
_PREFIX = re.compile(r"[\s\d:|>→\"'`#*/,;\\+-]*(?:\\t|\\)?(?:[\w./-]+[:-]\d+[:-])?[\s+-]*")
_NUMBERED = re.compile(r"(?<![A-Za-z0-9])\d+-$")
"""What grep prints before a line beside a match."""
_HEADS = {"MIG": 48, "MIH": 48, "MC4": 21, "MHc": 9}
_HEAD = 64
"""Characters at the start of a key that tell only its kind: of elliptic curves, and of others."""
_LONGEST = 100
"""Characters before the data in its line."""
_SHORT = 8
_PART = 16
"""Characters of a part of a line that is recognised."""
_EMPTY = re.compile(r"[\s\"',;\\+]*")
_FIELD = re.compile(r"[\s\d:|+>-]*(?:[A-Z][\w-]+: .*)?")
"""A line without data: empty but for its number, or a field such as ``DEK-Info``."""
# How keys start in DER (PKCS#1, PKCS#8, SEC1, PKCS#12), in OpenSSH's format, and those with their
# header encoded once more, as in the secrets of Kubernetes.
_START = re.compile(
    rf"(?:(?<![A-Za-z0-9+/_-])|(?<=\d-))(?P<secret>(?:MII{_B64}{{3}}IBA|MI[GH]{_B64}AgE[AB]|M[A-Z]{_B64}CAQ[AE]"
    rf"|b3BlbnNzaC1rZXktdjE|LS0tLS1CRUdJTi(?!BDRVJU|BQVUJM)){_B64}{{24,}}={{0,2}})"
)
# The same with more lines: the header tells only the first.
_ENCODED = re.compile(
    rf"(?:(?<![A-Za-z0-9+/_-])|(?<=\\[nrt]))LS0tLS1CRUdJTi(?!BDRVJU|BQVUJM){_B64}{{46,}}"
    rf"(?:{_LINE_END.pattern}[ \t]*{_B64}{{60,}})*={{0,2}}"
    rf"(?:{_LINE_END.pattern}[ \t]*{_B64}+={{0,2}}(?=[ \t]*(?:[\r\n\"'\\]|\Z)))?"
)
_STARTS = ("IBA", "AgE", "CAQ", "b3BlbnNz", "LS0tLS1CRUdJTi")
_RUN = re.compile(
    rf"(?:(?<![A-Za-z0-9+/\\])|(?<=\\[bfnrt])|(?<=\\u[0-9a-f]{{4}})){_B64}{{{_PART},}}"
)


class PrivateKeys:
    """Hides private keys in texts, and remembers those that it has seen.

    Args:
        hide: Returns what stands for a secret; it has as many line ends.
    """

    def __init__(self, hide: Callable[[str], str]) -> None:
        self._hide = hide
        self._known: set[str] = set()
        """Every part of the keys that were seen."""

    @property
    def are_known(self) -> bool:
        return bool(self._known)

    def without(self, text: str) -> str:
        """Return a text without the keys, and parts of keys, that can be told from their looks."""
        if _NEEDLE in text:
            text = self._without_blocks(text)
        if "LS0tLS1CRUdJTi" in text:
            text = _ENCODED.sub(lambda found: self._hide(found[0]), text)
        is_start = any(each in text for each in _STARTS)
        if is_start:
            for found in _START.finditer(text):
                self._learn(found["secret"])
        if is_start or _NEEDLE in text or _LONG.search(text):
            text = self._without_lines(text)
        if is_start:
            text = _START.sub(lambda found: self._hide(found["secret"]), text)
        return text

    def without_known(self, text: str) -> str:
        """Return a text without any part of a key that was seen in another text."""
        return _RUN.sub(self._without_part, text)

    def _without_blocks(self, text: str) -> str:
        """Hide what is between the marks of a key."""
        marks = list(_MARK.finditer(text))
        done: list[str] = []
        at = 0
        for first, last in itertools.pairwise(marks):
            if (first[1], last[1]) == ("BEGIN", "END") and _IS_KEY(first[2]) and _IS_KEY(last[2]):
                key = text[first.end() : last.start()]
                self._learn("".join(_runs(key)))
                done += [text[at : first.end()], self._hide(key)]
                at = last.start()
        return "".join([*done, text[at:]])

    def _learn(self, key: str) -> None:
        # What precedes is the same for many keys, public ones included.
        key = key[_HEADS.get(key[:3], _HEAD) :]
        parts = (key[at : at + _PART] for at in range(len(key) - _PART + 1))
        self._known.update(part for part in parts if len(set(part)) > _PART // 2)

    def _without_part(self, found: re.Match[str]) -> str:
        run = found[0]
        for at in range(len(run) - _PART + 1):
            if run[at : at + _PART] in self._known:
                return self._hide(run)
        return run

    def _without_lines(self, text: str) -> str:
        """Hide the lines of a key whose header is not there."""
        pieces = _LINE_END.split(text)
        # Strings of a program have an escaped line end, and their own.
        places = [at for at in range(0, len(pieces), 2) if not _EMPTY.fullmatch(pieces[at])]
        lines = [pieces[at] for at in places]
        for number, spans in _key_lines(lines).items():
            line = lines[number]
            for start, end in sorted(spans, reverse=True):
                line = line[:start] + self._hide(line[start:end]) + line[end:]
            pieces[places[number]] = line
        return "".join(pieces)


def _runs(text: str) -> Iterator[str]:
    """Yield the base64 at the end of each line."""
    for line in _LINE_END.split(text)[::2]:
        if span := _last(line):
            yield line[slice(*span)].rstrip("=")


def _key_lines(lines: list[str]) -> dict[int, set[tuple[int, int]]]:
    """Return the numbers of lines with parts of a private key, and where in the line they are."""
    public = _marked(lines, private=False)
    found = {number: {span} for number, span in _marked(lines, private=True).items()}
    for number, line in enumerate(lines):
        for run in _LONG.finditer(line):
            start, end = _place(line, *run.span())
            is_key = end - start in _WIDTHS and _is_random(line[start:end])
            if is_key and number not in public and not _is_joined(line, start, end):
                found.setdefault(number, set()).add((start, end))
    # The last line is shorter, and the first and the last may have been cut.
    for number in (
        {near for at in found for near in (at - 1, at + 1)} - found.keys() - public.keys()
    ):
        span = _last(lines[number]) if 0 <= number < len(lines) else None
        if span is not None and _is_data(lines[number][slice(*span)]):
            found[number] = {span}
    return found


def _marked(lines: list[str], *, private: bool) -> dict[int, tuple[int, int]]:
    """Return the lines of keys and the like below a first mark, and above a last one.

    How a private key starts is as good as its first mark.
    """
    found: dict[int, tuple[int, int]] = {}
    for order, opening in ((range(len(lines)), "BEGIN"), (reversed(range(len(lines))), "END")):
        is_in, is_told, width = False, True, 0
        for number in order:
            line = lines[number]
            if marks := _MARK.findall(line):
                mark, kind = marks[-1 if opening == "BEGIN" else 0]
                is_in, width = mark == opening and (_IS_KEY(kind) is not None) is private, 0
                is_told = True
                continue
            if private and opening == "BEGIN" and not is_in:
                span = _first(line)
                if span is not None:
                    found[number] = span
                    is_in, is_told, width = True, False, span[1] - span[0]
                continue
            if not is_in or _FIELD.fullmatch(line):
                continue
            span = _last(line)
            if span is None or span[0] > _LONGEST or not _PREFIX.fullmatch(line[: span[0]]):
                is_in = False
                continue
            # All lines are of one width but the last, which is the first one above the end.
            size = span[1] - span[0]
            if size + 1 == width and line[span[0] - 1 : span[0]] == "+":  # not of a diff
                span, size = (span[0] - 1, span[1]), width
            is_end = opening == "BEGIN" and size < width
            if width in (0, size) or (is_end and (is_told or _is_data(line[slice(*span)]))):
                found[number] = span
            is_in = width in (0, size)
            width = size if opening == "BEGIN" or width or size in _WIDTHS else width
    return found


def _first(line: str) -> tuple[int, int] | None:
    """Return where the first line of a key is in a line that ends with it."""
    span, start = _last(line), _START.search(line)
    if span is None or start is None or not span[0] <= start.start("secret") < span[1]:
        return None
    return start.start("secret"), span[1]


def _last(line: str) -> tuple[int, int] | None:
    """Return where the base64 at the end of a line is."""
    found = _LAST.search(line)
    if found is None:
        return None
    start, end = _place(line, *found.span("run"))
    return None if start == end or _is_joined(line, start, end) else (start, end)


def _place(line: str, start: int, end: int) -> tuple[int, int]:
    """Return a run without what looks like its start: the t of an escaped tab, a diff's plus."""
    if line[start] in "tnr" and line[:start].endswith("\\"):
        start += 1
    before = line[:start]
    if line[start:end].startswith("+") and end - start not in _WIDTHS:
        start += not before or before[-1].isspace() or before.endswith("\\t")
    return start, end


def _is_joined(line: str, start: int, end: int) -> bool:
    """Tell whether a run is a part of something else, as in ``sha384-...``, a path or a token."""
    before, after = line[max(0, start - 3) : start], line[end : end + 1]
    if _NUMBERED.search(line[max(0, start - _LONGEST) : start]):
        return False
    if before.endswith("-"):  # of a diff
        return before != "-" and not before[:-1].endswith((" ", "\t", "\\t"))
    return before.endswith(("_", ".")) or after in ("-", "_", ".", "(")


def _is_data(run: str) -> bool:
    """Tell whether a short run beside a line of a key is a part of it."""
    return run.endswith("=") or (len(run) >= _SHORT and _is_random(run))


def _is_random(run: str) -> bool:
    """Tell whether base64 is data, not a word, a number, or a path."""
    tests = str.islower, str.isupper, str.isdigit
    return run.count("/") <= 8 and all(any(map(test, run)) for test in tests)
