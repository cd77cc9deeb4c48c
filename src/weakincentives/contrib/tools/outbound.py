"""The one door through which a browser reaches the network: it looks at every address itself.

A SOCKS5 proxy on loopback. The browser hands over names, not addresses, so a name is resolved here,
once for each connection, and the address that was looked at is the one that is connected to: no
redirect, no second DNS answer and no subresource gets around it.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias

Resolve: TypeAlias = Callable[[str, int], Awaitable[Iterable[str]]]
"""Given a host and a port, returns the addresses to try, in order."""

_CONNECT_SECONDS = 10.0
# What older Pythons count as global, or what no page has a reason to be at.
_NOT_PUBLIC_V4 = tuple(
    # The last is Azure's own: on its machines it answers with what belongs to the machine.
    map(ipaddress.IPv4Network, ("192.0.0.0/24", "192.88.99.0/24", "168.63.129.16/32"))
)
_PUBLIC_V6 = ipaddress.IPv6Network("2000::/3")
_NOT_PUBLIC_V6 = tuple(
    # 2001::/23 holds Teredo and 2002::/16 is 6to4: both hide another address.
    map(ipaddress.IPv6Network, ("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20"))
)
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


def is_public(address: str) -> bool:
    """Tell whether an address is one of the public internet's, for one host.

    >>> is_public("93.184.216.34"), is_public("10.0.0.1"), is_public("::ffff:127.0.0.1")
    (True, False, False)
    """
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        if ip in _NAT64:
            return is_public(str(ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)))
        if ip.ipv4_mapped is not None:
            return is_public(str(ip.ipv4_mapped))
        return ip in _PUBLIC_V6 and ip.is_global and not any(ip in n for n in _NOT_PUBLIC_V6)
    if ip.is_multicast or ip.is_reserved or any(ip in n for n in _NOT_PUBLIC_V4):
        return False
    return ip.is_global


async def system_resolve(host: str, port: int) -> list[str]:
    """Return what the machine's resolver says."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


@dataclass(frozen=True, slots=True, kw_only=True)
class OutboundRules:
    """Which hosts may be reached: public ones, and those that are named."""

    allow_hosts: Collection[str] = ()
    """Hosts that may be at any address: ``name``, ``address`` or either with ``:port``."""
    allow_private: bool = False
    resolve: Resolve = system_resolve

    def __post_init__(self) -> None:
        if isinstance(self.allow_hosts, str):
            raise TypeError("allow_hosts takes several hosts, got a string")
        hosts = frozenset(_host_key(host) for host in self.allow_hosts)
        object.__setattr__(self, "allow_hosts", hosts)

    async def addresses(self, host: str, port: int) -> list[str]:
        """Return the addresses of a host that may be connected to; raises Refused if none may."""
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
    """A host that must not be reached."""


class Door:
    """A proxy for one page. ``refused`` and ``failed`` say what did not get through, and why."""

    def __init__(self, rules: OutboundRules, *, max_bytes: int) -> None:
        self.rules = rules
        self.max_bytes = max_bytes
        self.received = 0
        self.refused: list[str] = []
        self.failed: list[str] = []
        self.when_full: Callable[[], object] | None = None
        """Called when more has come than is taken; nothing more comes then."""
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    @property
    def is_full(self) -> bool:
        """Whether more came than is taken."""
        return self.received > self.max_bytes

    async def open(self) -> str:
        """Start; returns the proxy's address for the browser."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"socks5://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        """Stop, and drop every connection."""
        if self._server is not None:
            self._server.close()
        for task in self._connections:
            task.cancel()
        if self._connections:
            await asyncio.wait(self._connections)

    def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._connection(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            # Whoever goes away in the middle has nothing more to be told.
            with suppress(OSError, asyncio.IncompleteReadError, ValueError):
                host, port = await _requested(reader, writer)
                upstream = await self._connect(host, port)
                # What SOCKS5 answers: 0 is yes, 2 is "not allowed". The address is of no use.
                writer.write(bytes((5, 2 if upstream is None else 0, 0, 1, 0, 0, 0, 0, 0, 0)))
                await writer.drain()
                if upstream is not None:
                    await self._carry(reader, writer, *upstream)
        finally:
            writer.close()

    async def _connect(
        self, host: str, port: int
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        try:
            addresses = await self.rules.addresses(host, port)
        except Refused as refusal:
            self.refused.append(str(refusal))
            return None
        except OSError as error:
            self.failed.append(f"{host} was not found: {error}")
            return None
        for address in addresses:
            try:
                # An address, not the name: nobody is asked again what it means.
                return await asyncio.wait_for(
                    asyncio.open_connection(address, port), _CONNECT_SECONDS
                )
            except (OSError, TimeoutError) as error:
                self.failed.append(f"no connection to {host}:{port}: {error or 'no answer'}")
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


async def _requested(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> tuple[str, int]:
    """Shake hands as SOCKS5 does and return the host and port that are asked for."""
    version, methods = await reader.readexactly(2)
    await reader.readexactly(methods)
    if version != 5:
        raise ValueError("not SOCKS5")
    writer.write(b"\x05\x00")
    version, command, _, kind = await reader.readexactly(4)
    if (version, command) != (5, 1):
        raise ValueError("only connections are made")
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
