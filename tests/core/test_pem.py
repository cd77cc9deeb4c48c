"""No part of a private key is left in a text; other data in base64 is."""

from __future__ import annotations

import base64
import hashlib
import json
import random
import textwrap
import time
from urllib.parse import quote, quote_plus

import pytest

from weakincentives.core.logs import Redaction, without_secrets

DATA = random.Random(32).randbytes(1200)


def pem(kind: str, start: bytes, width: int = 64, data: bytes = DATA) -> str:
    text = base64.b64encode(start + data).decode()
    return "\n".join(
        [f"-----BEGIN {kind}-----", *textwrap.wrap(text, width), f"-----END {kind}-----"]
    )


RSA = bytes.fromhex("308204bd020100300d06092a864886f70d0101010500048204a7")
KEYS = {
    "PKCS#8": pem("PRIVATE KEY", RSA),
    "RSA": pem("RSA PRIVATE KEY", bytes.fromhex("308204a40201000282010100")),
    "EC": pem("EC PRIVATE KEY", bytes.fromhex("30770201010420"), data=DATA[:114]),
    "EC of 384 bits": pem("EC PRIVATE KEY", bytes.fromhex("3081a4020101043030"), data=DATA[:160]),
    "Ed25519": pem(
        "PRIVATE KEY", bytes.fromhex("302e020100300506032b657004220420"), data=DATA[:32]
    ),
    "OpenSSH": pem("OPENSSH PRIVATE KEY", b"openssh-key-v1\0\0\0\0\4none", 70),
    "PGP": pem("PGP PRIVATE KEY BLOCK", b"\x95\x03\x98"),
    "encrypted": pem("RSA PRIVATE KEY", b"x" * 48).replace(
        "KEY-----\n", "KEY-----\nProc-Type: 4,ENCRYPTED\nDEK-Info: AES-128-CBC,0A1B\n\n", 1
    ),
}
LONG = ("PKCS#8", "RSA", "OpenSSH", "PGP", "encrypted")
"""Those of which a part has whole lines."""


def data_lines(key: str) -> list[str]:
    return [line for line in key.split("\n") if line and "-----" not in line and ":" not in line]


def leaked(key: str, text: str) -> set[str]:
    """Return the parts of a key, of 12 characters, that are in a text."""
    data = "".join(data_lines(key))
    parts = {data[at : at + 12] for at in range(64 if len(data) > 100 else 24, len(data) - 12)}
    return {part for part in parts if part in text}


def numbered(text: str) -> str:
    return "\n".join(f"{n:>6}\t{line}" for n, line in enumerate(text.split("\n"), 1))


def as_diff(text: str) -> str:
    signs = " -+"
    return "\n".join(signs[n % 3] + line for n, line in enumerate(text.split("\n")))


SPELLED = {
    "as it is": lambda text: text,
    "numbered": numbered,
    "with other numbers": lambda text: numbered(text).replace("\t", "→"),
    "indented": lambda text: textwrap.indent(text, "        "),
    "with CRLF": lambda text: text.replace("\n", "\r\n"),
    "in a diff": as_diff,
    "in a diff, numbered": lambda text: numbered(as_diff(text)),
    "quoted in a mail": lambda text: textwrap.indent(text, "> "),
    "found by grep": lambda text: "".join(
        f"k.pem:{n}:{x}\n" for n, x in enumerate(text.split("\n"))
    ),
    "found by grep nearby": lambda text: "".join(
        f"keys/k.pem-{n}-{x}\n" for n, x in enumerate(text.split("\n"))
    ),
    "found by grep in one file": lambda text: "".join(
        f"{n}-{x}\n" for n, x in enumerate(text.split("\n"))
    ),
    "in JSON": json.dumps,
    "in JSON in JSON": lambda text: json.dumps(json.dumps({"key": text})),
    "in JSON, numbered": lambda text: json.dumps(numbered(text)),
    "in JSON, as a diff": lambda text: json.dumps(as_diff(text)),
    "as a list in JSON": lambda text: json.dumps(text.split("\n"), indent=1),
    "as strings of a program": lambda text: "".join(
        f'    "{line}\\n"\n' for line in text.split("\n")
    ),
    "in colour": lambda text: "".join(f"\x1b[32m{line}\x1b[m\n" for line in text.split("\n")),
    "in colour, in JSON": lambda text: json.dumps(
        "".join(f"\x1b[1;32m+\x1b[m\x1b[32m{line}\x1b[m\n" for line in text.split("\n"))
    ),
    "in a diff by words": lambda text: "".join(f"[-{line}-]\n" for line in text.split("\n")),
    "added, by words": lambda text: "".join(f"{{+{line}+}}\n" for line in text.split("\n")),
    "as cat -A shows it": lambda text: "".join(f"{line}$\n" for line in text.split("\n")),
    "in a table": lambda text: "".join(f"| 1 | {line} |\n" for line in text.split("\n")),
    "as a comment": lambda text: textwrap.indent(text, "# "),
}
every_spelling = pytest.mark.parametrize("spelled", SPELLED.values(), ids=SPELLED)


def check_hidden(key: str, part: str) -> None:
    text = f"before it\n{part}\nafter it"

    done = without_secrets(text)

    assert leaked(key, done) == set()
    assert done.count("\n") == text.count("\n")
    assert done.startswith("before it\n")
    assert done.endswith("\nafter it")


@every_spelling
def test_a_whole_key_is_hidden_however_it_is_spelled(spelled):
    for key in KEYS.values():
        check_hidden(key, spelled(key))


@every_spelling
@pytest.mark.parametrize(
    "part",
    [slice(9), slice(7, 12), slice(-5, None), slice(9, 10)],
    ids=["start", "middle", "end", "one line"],
)
def test_so_is_a_part_of_it(spelled, part: slice):
    for kind in LONG:
        check_hidden(KEYS[kind], spelled("\n".join(KEYS[kind].split("\n")[part])))


@pytest.mark.parametrize("kind", LONG)
def test_lines_that_are_cut_go_with_those_beside_them(kind: str):
    data = "\n".join(data_lines(KEYS[kind]))
    text = f"{data[100:600]}\n... 300 bytes left out ...\n{data[-300:]}"

    assert leaked(KEYS[kind], without_secrets(text)) == set()


def test_a_key_without_lines_is_known_by_its_start():
    curve = "".join(data_lines(KEYS["EC of 384 bits"]))
    assert leaked(KEYS["EC of 384 bits"], without_secrets(f"key: {curve}")) == set()
    key = "".join(data_lines(KEYS["PKCS#8"]))
    inside = base64.b64encode(KEYS["RSA"].encode()).decode()

    for text in (f"key: {key}", f'{{"key": "{key[:200]}"}}', f"  tls.key: {inside}\n"):
        done = without_secrets(text)
        assert "(the key)" in done
        assert len(done) < 60


@pytest.mark.parametrize("before", ["", "> ", "    "])
@pytest.mark.parametrize("width", [48, 76, 80])
def test_the_start_of_a_key_tells_the_lines_below_it_of_whatever_width(width: int, before: str):
    for kind in ("PKCS#8", "RSA", "OpenSSH"):
        lines = textwrap.wrap("".join(data_lines(KEYS[kind])), width)
        check_hidden(KEYS[kind], textwrap.indent("\n".join(lines), before))
        check_hidden(KEYS[kind], textwrap.indent("\n".join(lines[:4]), before))


def test_a_word_below_the_start_of_a_key_stays():
    key = "".join(data_lines(KEYS["Ed25519"]))

    assert without_secrets(f"{key}\nserver\n{key}\nname: x").split("\n")[1::2] == [
        "server",
        "name: x",
    ]


@pytest.mark.parametrize("indent", ["", "    "])
@pytest.mark.parametrize("escaped", [False, True])
def test_a_key_encoded_once_more_is_hidden_with_all_its_lines(indent: str, escaped: bool):
    encoded = base64.encodebytes(KEYS["RSA"].encode()).decode()
    lines = [indent + line for line in encoded.splitlines()]
    text = "\n".join(["tls.key: |", *lines, "done = 1", ""])

    done = without_secrets(json.dumps(text) if escaped else text)

    assert not any(line[at : at + 16] in done for line in lines for at in range(len(line) - 16))
    assert "done = 1" in done
    certificate = base64.encodebytes(b"-----BEGIN CERTIFICATE-----\n" + DATA).decode()
    assert without_secrets(certificate) == certificate


@pytest.mark.parametrize("spelled", [quote, quote_plus])
def test_a_whole_key_is_hidden_in_an_address(spelled):
    for key in KEYS.values():
        done = without_secrets(f"POST /keys?key={spelled(key)}&name=mine")
        assert leaked(key, done) == set()
        assert done.endswith("&name=mine")


def test_several_parts_in_a_line_are_hidden():
    lines = data_lines(KEYS["PKCS#8"])

    for between in (" ", "<br>", "&#10;", "  |  "):
        assert leaked(KEYS["PKCS#8"], without_secrets(between.join(lines[3:9]))) == set()


def test_lines_in_a_list_are_one_text():
    lines = ["a", *KEYS["Ed25519"].split("\n"), "b"]

    done = Redaction().value({"path": "k", "lines": lines})

    assert leaked(KEYS["Ed25519"], json.dumps(done)) == set()
    assert len(done["lines"]) == len(lines)
    assert (done["lines"][0], done["lines"][-1]) == ("a", "b")


def test_once_a_key_was_seen_any_part_of_it_is_hidden():
    redaction = Redaction()
    redaction(numbered(KEYS["PKCS#8"]))
    data = "".join(data_lines(KEYS["PKCS#8"]))

    for text in (data[200:230], f"x {data[301:325]}...", f"AAAA{data[400:430]}", data[128:208]):
        escaped = json.dumps(f"a\n{text}\n\u2028{text}\t{text}")
        json.loads(redaction.keys.without_known(escaped))  # it is still JSON
        for spelled in (text, escaped, f"+{text}"):
            assert leaked(KEYS["PKCS#8"], redaction.keys.without_known(spelled)) == set()
    for kind, start in (("EC", 12), ("Ed25519", 24)):
        redaction(KEYS[kind])
        part = "".join(data_lines(KEYS[kind]))[start : start + 20]
        assert part not in redaction.keys.without_known(f"a {part} b")
    assert redaction.keys.without_known("class PrivateKeyRedaction") == "class PrivateKeyRedaction"


# What is not a private key

IMAGE = random.Random(1).randbytes(5000)
HASHES = [hashlib.sha512(bytes([n])) for n in range(40)]


@pytest.mark.parametrize(
    "text",
    [
        pem("CERTIFICATE", bytes.fromhex("308203c930820331a003020102")),
        pem("PUBLIC KEY", bytes.fromhex("30820122300d06092a864886f70d01010105000382010f00")),
        pem("PGP SIGNATURE", b"x"),
        numbered(pem("CERTIFICATE", b"x")),
        pem("CERTIFICATE", b"x").rpartition("\n")[0],
        pem("CERTIFICATE", b"x").partition("\n")[2],
        "\n".join(f"{hashlib.sha256(each.digest()).hexdigest()}  file" for each in HASHES),
        "\n".join(hashlib.sha256(each.digest()).hexdigest() for each in HASHES),
        "\n".join(hashlib.sha256(each.digest()).hexdigest().upper() for each in HASHES),
        "\n".join(each.hexdigest() for each in HASHES),
        "\n".join(f'"integrity": "sha512-{base64.b64encode(x.digest()).decode()}"' for x in HASHES),
        'integrity="sha384-oqVuAfXRKap7fdgcCY5uykM6+R9GqQ8K/uxy9rx7HNQlGYl1kPzQho1wx4JwY8wC"',
        "github.com/x/y v1.0.0 h1:" + base64.b64encode(HASHES[0].digest()[:32]).decode(),
        "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAI"
        + base64.b64encode(DATA[:32]).decode()
        + " you@host",
        f"data:image/png;base64,{base64.b64encode(IMAGE).decode()}",
        base64.encodebytes(IMAGE).decode(),
        '"AAECAwQFBgcICQ", "name": "x" * 64',
        "x" * 64,
        "-" * 64,
        "0123456789" * 7,
        "/usr/lib/python3/dist/packages/Some/Library2/with/a/long/Path/in/i",
        'BEGIN = "-----BEGIN PRIVATE KEY-----"\n\ndef is_key(line):\n    return line == BEGIN\n',
        "if '-----BEGIN RSA PRIVATE KEY-----' in text:\n    raise Refused()\nreturn text\n",
        "getValueFromConfigurationProvider(AbstractSingletonFactoryBeanBuilder1)",
    ],
)
def test_other_data_is_left_alone(text: str):
    for spelled in (text, json.dumps(text), textwrap.indent(text, "+")):
        assert without_secrets(spelled) == spelled
    lines = text.split("\n")
    assert Redaction().value(lines) == lines


def test_it_takes_linear_time():
    """Texts are cut only afterwards, and a model may have written them."""
    line = "".join(data_lines(KEYS["PKCS#8"]))[:64]
    texts = [
        f"{line}\n" * 4000,
        "\\" * 200_000,
        "-----BEGIN PRIVATE KEY-----\n" * 8000,
        "-----END PRIVATE KEY-----\n" * 8000,
        f"-----BEGIN CERTIFICATE-----\n{line}\n" * 4000,
        "MIIEvQIBA" * 30_000,
        "a+" * 150_000,
        "a " * 150_000,
        " " * 300_000,
        "-----BEGIN PRIVATE KEY-----\n" + f"{'1-' * 5000}x a\n" * 20,
    ]
    short, whole = 0.0, 0.0
    for text in texts:
        for size in (len(text) // 8, len(text)):
            start = time.process_time()
            without_secrets(text[:size])
            took = time.process_time() - start
            short, whole = (short + took, whole) if size < len(text) else (short, whole + took)

    assert whole < 64 * short + 1, "more than eight times as long for eight times as much"
