"""The only way for a browser or a command to reach the network: a proxy that checks every address.

It speaks SOCKS5 and HTTP. Its clients pass names, not addresses, so a name is resolved here, once
for each connection, and the checked address is the one that is connected to: no redirect, no second
DNS answer and no subresource bypasses the check.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
import sys
import threading
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias
from urllib.parse import urlsplit

Resolve: TypeAlias = Callable[[str, int], Awaitable[Iterable[str]]]
"""Given a host and a port, returns the addresses to try, in order."""

_CONNECT_SECONDS = 10.0
# Networks that older Pythons count as global, and others that serve no pages.
_NOT_PUBLIC_V4 = tuple(
    # The last is Azure's own: it serves metadata of the machine.
    map(ipaddress.IPv4Network, ("192.0.0.0/24", "192.88.99.0/24", "168.63.129.16/32"))
)
_PUBLIC_V6 = ipaddress.IPv6Network("2000::/3")
_NOT_PUBLIC_V6 = tuple(
    # 2001::/23 holds Teredo and 2002::/16 is 6to4: both hide another address.
    map(ipaddress.IPv6Network, ("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20"))
)
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


def is_public(address: str) -> bool:
    """Tell whether an address belongs to one host of the public internet.

    >>> is_public("93.184.216.34"), is_public("10.0.0.1"), is_public("::ffff:127.0.0.1")
    (True, False, False)
    """
    ip = _reached(address)
    if isinstance(ip, ipaddress.IPv6Address):
        return ip in _PUBLIC_V6 and ip.is_global and not any(ip in n for n in _NOT_PUBLIC_V6)
    if ip.is_multicast or ip.is_reserved or any(ip in n for n in _NOT_PUBLIC_V4):
        return False
    return ip.is_global


def _reached(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Return the address that is reached: an IPv6 address may stand for an IPv4 one."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if ip in _NAT64:
        return ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
    return getattr(ip, "ipv4_mapped", None) or ip


async def system_resolve(host: str, port: int) -> list[str]:
    """Return the addresses that the resolver of the machine finds."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


@dataclass(frozen=True, slots=True, kw_only=True)
class OutboundRules:
    """Which hosts may be reached: public ones, and those in ``allow_hosts``."""

    allow_hosts: Collection[str] = ()
    """Hosts that may be at any address: ``name``, ``address`` or either with ``:port``."""
    allow_private: bool = False
    resolve: Resolve = system_resolve

    def __post_init__(self) -> None:
        if isinstance(self.allow_hosts, str):
            raise TypeError("allow_hosts takes a list of hosts, got a string")
        hosts = frozenset(_host_key(host) for host in self.allow_hosts)
        object.__setattr__(self, "allow_hosts", hosts)

    async def addresses(self, host: str, port: int) -> list[str]:
        """Return the allowed addresses of a host; raises Refused if there are none."""
        try:
            found = [str(ipaddress.ip_address(host.partition("%")[0]))]
        except ValueError:
            found = list(await self.resolve(host, port))
        if not found:
            raise OSError(f"{host} has no address")
        name = _host_key(host)
        named = name in self.allow_hosts or f"{name}:{port}" in self.allow_hosts
        allowed = [each for each in found if self.allow_private or named or is_public(each)]
        if not allowed:
            at = "" if found == [host] else f" is at {found[0]}, which"
            raise Refused(f"{host}:{port}{at} is not a public address and is not allowed")
        return allowed


class Refused(Exception):
    """The host is not allowed."""


class _Host(NamedTuple):
    """An entry of a list of hosts."""

    name: str
    port: int | None

    def matches(self, name: str, port: int) -> bool:
        if port not in ((80, 443) if self.port is None else (self.port,)):
            return False
        return name.endswith(self.name[1:]) if self.name[0] == "*" else name == self.name

    @property
    def is_exact(self) -> bool:
        """Whether it names one service, which may be at any address, also on this machine."""
        return self.name[0] != "*" and self.port is not None


class HostList:
    """The only hosts that may be reached.

    Args:
        hosts: Names, ``*.names`` with everything below, or addresses, each with an optional
            ``:port``; without one, 443 and 80. Only an entry with a port reaches private addresses.
    """

    def __init__(self, hosts: Sequence[str], *, resolve: Resolve = system_resolve) -> None:
        if isinstance(hosts, str):
            raise TypeError("a list of hosts is needed, got a string")
        self._entries = [_entry(host) for host in hosts]
        self._resolve = resolve

    @property
    def variables(self) -> dict[str, str]:
        """The variables through which programs find the proxy."""
        listed = {each.name for each in self._entries}
        own = [each for each in ("localhost", "127.0.0.1", "::1") if each not in listed]
        proxy = f"http://127.0.0.1:{PORT}"
        found = {"http_proxy": proxy, "https_proxy": proxy, "all_proxy": proxy}
        found["no_proxy"] = ",".join(own)
        return {**found, **{name.upper(): value for name, value in found.items()}}

    async def addresses(self, host: str, port: int) -> list[str]:
        """Return the allowed addresses of a host; raises Refused if there are none."""
        name = _host_key(host)
        entries = [each for each in self._entries if each.matches(name, port)]
        if not entries:
            raise Refused(f"{host}:{port} denied: it is not in the list of hosts")
        try:
            found = [str(ipaddress.ip_address(name))]
            is_name = False
        except ValueError:
            found, is_name = list(await self._resolve(name, port)), True
        if any(each.is_exact for each in entries):
            # Never by name: what serves the credentials of this machine.
            allowed = [each for each in found if not (is_name and _serves_credentials(each))]
        else:
            allowed = [each for each in found if is_public(each)]
        if not allowed:
            where = f"it is at {found[0]}, a private address" if found else "it has no address"
            advice = f"; list {host}:{port} to allow that" if found and not is_name else ""
            raise Refused(f"{host}:{port} denied: {where}{advice}")
        return allowed


_NAME = re.compile(r"(\*\.)?[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?")


def _entry(host: str) -> _Host:
    try:
        url = urlsplit(f"//{host.strip().lower()}")
        name, port = _host_key(url.hostname or ""), url.port
        if ":" in name:
            return _Host(str(ipaddress.ip_address(name)), port)
    except ValueError:
        url, name, port = None, "", None
    if url is None or url.path or url.query or "@" in url.netloc or not _NAME.fullmatch(name):
        raise ValueError(
            f"a host is NAME, *.NAME or an address, with or without :PORT, got {host!r}"
        )
    return _Host(name, port)


# Azure, Alibaba, Amazon, Google.
_METADATA = {
    *map(ipaddress.IPv4Address, ("168.63.129.16", "100.100.100.200")),
    *map(ipaddress.IPv6Address, ("fd00:ec2::254", "fd20:ce::254")),
}


def _serves_credentials(address: str) -> bool:
    """Tell whether clouds serve the credentials of a machine at an address."""
    ip = _reached(address)
    return ip.is_link_local or ip in _METADATA


MOST_CONNECTIONS = 128
"""At the same time."""

MOST_REASONS = 100
"""How many different failures are remembered."""

LONGEST_NAME = 255
"""Characters of a host's name, as DNS has it."""


class OutboundProxy:
    """A proxy for one page, or one command.

    ``refused`` and ``failed`` list failed connections with the reason.
    """

    def __init__(self, rules: OutboundRules | HostList, *, max_bytes: int = sys.maxsize) -> None:
        self.rules = rules
        self.max_bytes = max_bytes
        self.received = 0
        self.refused: list[str] = []
        self.failed: list[str] = []
        self.when_full: Callable[[], object] | None = None
        """Called once when the page has loaded more than ``max_bytes``; the rest is dropped."""
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    @property
    def is_full(self) -> bool:
        """Whether the page has loaded more than ``max_bytes``."""
        return self.received > self.max_bytes

    async def open(self) -> str:
        """Start, and return the address of the proxy."""
        listening = socket.create_server(("127.0.0.1", 0))
        await self.open_on(listening)
        return f"socks5://127.0.0.1:{listening.getsockname()[1]}"

    async def open_on(self, listening: socket.socket) -> None:
        """Start on a socket that is listening already."""
        self._server = await asyncio.start_server(self._serve, sock=listening)

    async def close(self) -> None:
        """Stop, and drop every connection."""
        if self._server is not None:
            self._server.close()
        for task in self._connections:
            task.cancel()
        if self._connections:
            await asyncio.wait(self._connections)

    def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._connections) >= MOST_CONNECTIONS:
            writer.close()
            return
        task = asyncio.get_running_loop().create_task(self._connection(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            # A client that disconnects needs no answer.
            with suppress(
                OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError
            ):
                wanted = await _requested(reader, writer)
                upstream = await self._connect(wanted.host, wanted.port)
                writer.write(wanted.no if upstream is None else wanted.yes)
                await writer.drain()
                if upstream is not None:
                    upstream[1].write(wanted.head)
                    await self._carry(reader, writer, *upstream)
        finally:
            writer.close()

    async def _connect(
        self, host: str, port: int
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        try:
            addresses = await self.rules.addresses(host, port)
        except Refused as refusal:
            _note(self.refused, str(refusal))
            return None
        except OSError as error:
            _note(self.failed, f"{host} was not found: {error}")
            return None
        for address in addresses:
            try:
                # The address, not the name: it is not resolved again.
                return await asyncio.wait_for(
                    asyncio.open_connection(address, port), _CONNECT_SECONDS
                )
            except (OSError, TimeoutError) as error:
                _note(self.failed, f"no connection to {host}:{port}: {error or 'no answer'}")
        return None

    async def _carry(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        from_host: asyncio.StreamReader,
        to_host: asyncio.StreamWriter,
    ) -> None:
        sending = asyncio.create_task(_pipe(reader, to_host))
        try:
            while not self.is_full and (data := await from_host.read(65536)):
                was_full = self.is_full
                self.received += len(data)
                writer.write(data)
                await writer.drain()
                if self.is_full and not was_full and self.when_full is not None:
                    self.when_full()
        finally:
            sending.cancel()
            to_host.close()


def _note(reasons: list[str], reason: str) -> None:
    """Add a reason once; only so many, since a client may go on for ever with other names."""
    if len(reasons) < MOST_REASONS and reason not in reasons:
        reasons.append(reason)


class _Wanted(NamedTuple):
    """The host that a client wants to reach, and what to answer."""

    host: str
    port: int
    yes: bytes
    no: bytes
    head: bytes = b""
    """What to send to the host first."""


async def _requested(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> _Wanted:
    first = await reader.readexactly(1)
    if first != b"\x05":
        return _http_request(first + await reader.readuntil(b"\r\n\r\n"))
    host, port = await _socks_request(reader, writer)
    # 0 is success, 2 is "not allowed". The address is unused.
    yes, no = (bytes((5, code, 0, 1, 0, 0, 0, 0, 0, 0)) for code in (0, 2))
    return _Wanted(host, port, yes, no)


_HOP = re.compile(rb"(?:proxy-)?connection:|proxy-authorization:|keep-alive:", re.IGNORECASE)


def _http_request(data: bytes) -> _Wanted:
    """Return what a request to an HTTP proxy asks for: a tunnel, or one request to forward."""
    line, *headers = data.removesuffix(b"\r\n\r\n").split(b"\r\n")
    method, target, version = line.decode("ascii").split(" ")
    url = urlsplit(f"//{target}" if method == "CONNECT" else target)
    if url.hostname is None or (method != "CONNECT" and url.scheme != "http"):
        raise ValueError("not a request to a proxy")
    if len(url.hostname) > LONGEST_NAME:
        raise ValueError("there is no such name")
    said = f"network: {url.hostname} cannot be reached from the sandbox\n".encode()
    no = b"HTTP/1.1 403 Forbidden\r\nConnection: close\r\nContent-Type: text/plain\r\n"
    no += b"Content-Length: %d\r\n\r\n%s" % (len(said), said)
    if method == "CONNECT":
        yes = b"HTTP/1.1 200 Connection established\r\n\r\n"
        return _Wanted(url.hostname, url.port or 443, yes, no)
    path = url._replace(scheme="", netloc="", fragment="").geturl() or "/"
    # One request for each connection: the next may be for another host.
    kept = [header for header in headers if not _HOP.match(header)]
    head = [f"{method} {path} {version}".encode(), *kept, b"Connection: close", b"", b""]
    return _Wanted(url.hostname, url.port or 80, b"", no, b"\r\n".join(head))


async def _socks_request(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> tuple[str, int]:
    """Do the SOCKS5 handshake after its first byte; return the requested host and port."""
    [methods] = await reader.readexactly(1)
    await reader.readexactly(methods)
    writer.write(b"\x05\x00")
    version, command, _, kind = await reader.readexactly(4)
    if (version, command) != (5, 1):
        raise ValueError("only CONNECT is supported")
    if kind == 1:
        host = socket.inet_ntop(socket.AF_INET, await reader.readexactly(4))
    elif kind == 4:
        host = socket.inet_ntop(socket.AF_INET6, await reader.readexactly(16))
    else:
        [length] = await reader.readexactly(1)
        host = (await reader.readexactly(length)).decode("ascii")
    return host, int.from_bytes(await reader.readexactly(2), "big")


async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        writer.write_eof()


def _host_key(host: str) -> str:
    return host.lower().replace("[", "").replace("]", "").rstrip(".")


# For a command in a sandbox

PORT = 3128
"""Where a command finds the proxy; the network of a sandbox has nothing else."""


class CommandProxy:
    """A proxy for one command, in a thread of its own.

    The network of the sandbox has only a loopback device. The listening socket is made in there,
    and passed to us through ``channel``.
    """

    port = PORT

    def __init__(self, hosts: HostList) -> None:
        self._proxy = OutboundProxy(hosts)
        self._ours, self.channel = socket.socketpair()
        self._thread = threading.Thread(target=self._serve, name="wink-proxy", daemon=True)

    def __enter__(self) -> CommandProxy:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop, and drop every connection."""
        with suppress(OSError):
            self._ours.shutdown(socket.SHUT_RDWR)
        self._thread.join(timeout=5)  # not for a resolver that does not answer
        self._ours.close()
        self.channel.close()

    @property
    def refused(self) -> list[str]:
        """The reasons for connections that were not made."""
        return [*self._proxy.refused, *self._proxy.failed]

    def _serve(self) -> None:
        with suppress(OSError):
            _, descriptors, _, _ = socket.recv_fds(self._ours, 1, 1)
            if descriptors:
                with socket.socket(fileno=descriptors[0]) as listening:
                    asyncio.run(self._until_closed(listening))

    async def _until_closed(self, listening: socket.socket) -> None:
        closed = asyncio.Event()
        asyncio.get_running_loop().add_reader(self._ours, closed.set)
        await self._proxy.open_on(listening)
        await closed.wait()
        await self._proxy.close()
