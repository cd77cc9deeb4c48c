"""Commands reach the listed hosts through our proxy, and nothing else."""

from __future__ import annotations

import asyncio
import gc
import http.server
import json
import os
import socket
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ordinary_user import OrdinaryUser, place_for_others
from weakincentives.contrib.tools import (
    PodmanSandboxConfig,
    PodmanSandboxSection,
    Sandbox,
    find_sandbox,
)
from weakincentives.contrib.tools.outbound import HostList, OutboundProxy, Refused
from weakincentives.errors import SandboxUnavailable
from weakincentives.filesystem import CommandResult, HostFilesystem

PATIENCE = 600


class Site(http.server.ThreadingHTTPServer):
    """A server on the loopback device of the host."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Page)
        self.asked: list[tuple[str, str]] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def port(self) -> int:
        return self.server_address[1]


class Page(http.server.BaseHTTPRequestHandler):
    server: Site

    def do_GET(self) -> None:
        self.server.asked.append((self.path, self.headers["Connection"] or ""))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"here")

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(data[::-1])

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def site() -> Iterator[Site]:
    with Site() as site:
        yield site
        site.shutdown()


class Box:
    def __init__(self, files: HostFilesystem, *hosts: str) -> None:
        self.files = files
        self.sandbox: Sandbox = find_sandbox("namespaces", network=hosts)

    def python(self, code: str, *args: object, **options: object) -> CommandResult:
        words = [self.sandbox.python, "-c", textwrap.dedent(code), *map(str, args)]
        return self.sandbox.run(self.files, words, timeout=PATIENCE, **options)  # type: ignore[arg-type]


@pytest.fixture
def files(tmp_path: Path) -> Iterator[HostFilesystem]:
    try:
        find_sandbox("namespaces")
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    (tmp_path / "work").mkdir()
    with HostFilesystem(tmp_path / "work") as files:
        yield files


FETCH = """
    import sys, urllib.error, urllib.request
    for url in sys.argv[1:]:
        try:
            print(urllib.request.urlopen(url, timeout=60).read().decode())
        except urllib.error.HTTPError as error:
            print(error.code, error.read().decode().strip())
    """


def test_a_listed_host_is_reached_by_programs_that_use_the_proxy(files: HostFilesystem, site: Site):
    box = Box(files, f"127.0.0.1:{site.port}")

    done = box.python(FETCH, f"http://127.0.0.1:{site.port}/page?x=1")

    assert (done.ok, done.stdout, done.stderr) == (True, "here\n", "")
    assert site.asked == [("/page?x=1", "close")]


def test_a_tunnel_leads_to_the_host_and_carries_both_directions(files: HostFilesystem, site: Site):
    box = Box(files, f"localhost:{site.port}")
    code = """
        import http.client, os, sys
        from urllib.parse import urlsplit
        proxy = urlsplit(os.environ["HTTPS_PROXY"])
        client = http.client.HTTPConnection(proxy.hostname, proxy.port, timeout=60)
        client.set_tunnel("localhost", int(sys.argv[1]))
        client.request("POST", "/", body=b"x" * 300_000 + b"y")
        print(len(client.getresponse().read()))
        """

    done = box.python(code, site.port)

    assert (done.ok, done.stdout) == (True, "300001\n"), done.stderr


def test_the_result_names_what_was_denied(files: HostFilesystem, site: Site):
    box = Box(files, "pypi.example", f"127.0.0.1:{site.port + 1}")

    done = box.python(
        FETCH, f"http://127.0.0.1:{site.port}/", "http://evil.example/", "http://10.0.0.1/"
    )

    assert done.stdout.count("403 network:") == 3
    assert done.stderr.splitlines() == [
        f"network: 127.0.0.1:{site.port} denied: it is not in the list of hosts",
        "network: evil.example:80 denied: it is not in the list of hosts",
        "network: 10.0.0.1:80 denied: it is not in the list of hosts",
    ]
    assert site.asked == []


def test_there_is_no_way_around_the_proxy(files: HostFilesystem, site: Site):
    box = Box(files, f"127.0.0.1:{site.port}")
    code = """
        import json, socket, sys
        reached = []
        for family, kind, address in [
            (socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", int(sys.argv[1]))),
            (socket.AF_INET, socket.SOCK_STREAM, ("192.0.2.1", 80)),
            (socket.AF_INET, socket.SOCK_RAW, ("127.0.0.1", 0)),
        ]:
            try:
                with socket.socket(family, kind) as client:
                    client.settimeout(5)
                    client.connect(address)
                reached.append(address)
            except OSError:
                pass
        try:
            reached.append(socket.getaddrinfo("pypi.example", 80))
        except OSError:
            pass
        print(json.dumps([reached, [name for _, name in socket.if_nameindex()]]))
        """

    done = box.python(code, site.port)

    assert json.loads(done.stdout) == [[], ["lo"]]


def test_nothing_is_left_of_the_proxy_when_the_command_ends(files: HostFilesystem):
    """A connection that is still open is closed."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        box = Box(files, f"127.0.0.1:{port}")
        code = """
            import os, socket, sys, time
            client = socket.create_connection(("127.0.0.1", 3128))
            client.sendall(b"CONNECT 127.0.0.1:%d HTTP/1.1\\r\\n\\r\\n" % int(sys.argv[1]))
            assert client.recv(100).startswith(b"HTTP/1.1 200")
            if os.fork() == 0:
                time.sleep(1000)
            """
        done = box.python(code, port)
        assert done.ok, done.stderr
        accepted, _ = server.accept()
        with accepted:
            assert accepted.recv(1) == b""

        assert [each for each in threading.enumerate() if each.name == "wink-proxy"] == []


def test_a_command_cannot_fill_our_memory_with_denied_names():
    async def denied(*names: str) -> OutboundProxy:
        proxy = OutboundProxy(HostList(["pypi.example"]))
        address = await proxy.open()
        for name in names:
            reader, writer = await asyncio.open_connection("127.0.0.1", address.rpartition(":")[2])
            writer.write(f"CONNECT {name}:443 HTTP/1.1\r\n\r\n".encode())
            await reader.read()
            writer.close()
        await proxy.close()
        return proxy

    proxy = asyncio.run(denied("x" * 60_000, *(f"host{n}.example" for n in range(150))))

    assert len(proxy.refused) == 100
    assert proxy.refused[0] == "host0.example:443 denied: it is not in the list of hosts"


def test_requests_that_make_no_sense_are_dropped(
    files: HostFilesystem, site: Site, caplog: pytest.LogCaptureFixture
):
    box = Box(files, f"127.0.0.1:{site.port}")
    code = """
        import socket
        nonsense = [
            b"\\x00" * 100,
            b"A" * 200_000,
            b"CONNECT x\\r\\n\\r\\n",
            b"GET / HTTP/1.1\\r\\n\\r\\n",
            b"GET ftp://127.0.0.1/ HTTP/1.1\\r\\n\\r\\n",
            b"\\x05\\x01\\x00\\x05\\x02\\x00\\x01",
        ]
        for sent in nonsense:
            client = socket.create_connection(("127.0.0.1", 3128))
            try:
                client.sendall(sent)
                client.shutdown(socket.SHUT_WR)
                while client.recv(1000): pass
            except OSError:
                pass
        """

    assert box.python(code).ok
    assert box.python(FETCH, f"http://127.0.0.1:{site.port}/").stdout == "here\n"
    gc.collect()
    assert not caplog.records


def test_other_sandboxes_say_that_they_have_no_proxy():
    with pytest.raises(ValueError, match="a list of hosts needs a sandbox"):
        find_sandbox("none", network=["pypi.example"])
    with pytest.raises(ValueError, match="a host is NAME"):
        find_sandbox(network=["https://pypi.example/simple"])
    with pytest.raises(SandboxUnavailable, match=r"reach a list of hosts|not installed"):
        find_sandbox("bubblewrap", network=["pypi.example"])


CHILD = """
import sys
from weakincentives.contrib.tools.sandbox.engines import find_sandbox
from weakincentives.filesystem import HostFilesystem

sandbox = find_sandbox("namespaces", network=[sys.argv[1]])
with HostFilesystem(sys.argv[2]) as files:
    words = [sandbox.python, "-c", sys.argv[3], f"http://{sys.argv[1]}/", "http://evil.example/"]
    done = sandbox.run(files, words, timeout=600)
print(done.stdout, done.stderr)
"""


@pytest.mark.heavy
def test_an_ordinary_user_has_the_same_network(ordinary_user: OrdinaryUser, site: Site):
    with place_for_others(4321) as home:
        root = home / "work"
        root.mkdir()
        os.chown(root, 4321, 4321)
        done = ordinary_user.run(
            "-c", CHILD, f"127.0.0.1:{site.port}", str(root), textwrap.dedent(FETCH),
            home=home, cwd=home, uid=4321, env={"PATH": os.environ["PATH"]},
        )  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("here\n403 network:")
    assert "network: evil.example:80 denied" in done.stdout


def test_a_command_with_a_network_is_not_reversible():
    """What it sends cannot be undone."""
    config = PodmanSandboxConfig(network=["pypi.example"])
    section = PodmanSandboxSection(config=config)
    plain = PodmanSandboxSection()
    try:
        reaches = [
            tool.reach
            for each in (section, plain)
            for tool in each.tools
            if tool.name == "shell_execute"
        ]
    finally:
        section.close()
        plain.close()

    assert reaches[1] == "reversible"
    assert reaches[0] != "reversible"


# The list


def allowed(hosts: list[str], host: str, port: int, *found: str) -> bool:
    async def resolve(name: str, port: int) -> list[str]:
        return list(found)

    try:
        return bool(asyncio.run(HostList(hosts, resolve=resolve).addresses(host, port)))
    except Refused:
        return False


PUBLIC, PRIVATE, METADATA = "93.184.216.34", "10.1.2.3", "169.254.169.254"


@pytest.mark.parametrize(
    ("entry", "host", "port", "address", "expected"),
    [
        ("packages.example.org", "packages.example.org", 443, PUBLIC, True),
        ("packages.example.org", "Packages.Example.org.", 80, PUBLIC, True),
        ("packages.example.org", "packages.example.org", 22, PUBLIC, False),
        ("packages.example.org", "x.packages.example.org", 443, PUBLIC, False),
        ("packages.example.org", "xpackages.example.org", 443, PUBLIC, False),
        ("packages.example.org", "packages.example.org", 443, PRIVATE, False),
        ("*.packages.example.org", "files.packages.example.org", 443, PUBLIC, True),
        ("*.packages.example.org", "a.b.packages.example.org", 443, PUBLIC, True),
        ("*.packages.example.org", "packages.example.org", 443, PUBLIC, False),
        ("*.packages.example.org", "xpackages.example.org", 443, PUBLIC, False),
        ("*.packages.example.org:8443", "a.packages.example.org", 8443, PRIVATE, False),
        ("git.internal:22", "git.internal", 22, PRIVATE, True),
        ("git.internal:22", "git.internal", 443, PRIVATE, False),
        ("git.internal:80", "git.internal", 80, METADATA, False),
        ("git.internal:80", "git.internal", 80, "::ffff:169.254.169.254", False),
        ("git.internal:80", "git.internal", 80, "64:ff9b::a9fe:a9fe", False),
        ("git.internal:80", "git.internal", 80, "fd00:ec2::254", False),
        ("git.internal:80", "git.internal", 80, "::ffff:100.100.100.200", False),
        ("git.internal:80", "git.internal", 80, "fd00::1", True),
        ("169.254.169.254:80", METADATA, 80, "", True),
        ("10.1.2.3", PRIVATE, 443, "", False),
        ("10.1.2.3:443", PRIVATE, 443, "", True),
        ("[fd00::1]:80", "fd00::1", 80, "", True),
        ("[fd00::1]:80", "[FD00::1]", 80, "", True),
    ],
)  # fmt: skip
def test_what_an_entry_allows(entry: str, host: str, port: int, address: str, expected: bool):
    assert allowed([entry], host, port, address) is expected


@pytest.mark.parametrize(
    "entry",
    [
        "",
        "*",
        "*.",
        "https://a.org",
        "a.org/x",
        "a.org:0x",
        "a.org:99999",
        "me@a.org",
        "a b",
        "a.*.org",
    ],
)
def test_an_entry_that_names_no_host_is_refused(entry: str):
    with pytest.raises(ValueError, match="a host is NAME"):
        HostList([entry])


LABELS = st.text("ab", min_size=1, max_size=2)
NAMES = st.lists(LABELS, min_size=1, max_size=3).map(".".join)


@given(st.lists(st.tuples(st.booleans(), NAMES), max_size=3), NAMES)
def test_a_name_is_allowed_exactly_if_an_entry_matches_it(
    entries: list[tuple[bool, str]], name: str
):
    hosts = [f"*.{each}" if below else each for below, each in entries]
    expected = any(name.endswith(f".{each}") if below else name == each for below, each in entries)

    assert allowed(hosts, name, 443, PUBLIC) is expected
    assert not allowed(hosts, name, 443, PRIVATE)
