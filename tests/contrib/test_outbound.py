from __future__ import annotations

import asyncio
import socket

import pytest
from pages import Site

from weakincentives.contrib.tools.outbound import OutboundProxy, OutboundRules, is_public


@pytest.mark.parametrize(
    "address",
    [
        "0.0.0.0", "10.1.2.3", "100.64.0.1", "127.0.0.1", "127.255.255.254", "169.254.169.254",
        "172.16.0.1", "172.31.255.255", "192.0.0.8", "192.0.2.1", "192.88.99.1", "192.168.1.1",
        "198.18.0.1", "198.51.100.1", "203.0.113.1", "224.0.0.1", "239.1.1.1", "240.0.0.1",
        "255.255.255.255", "::", "::1", "::127.0.0.1", "::ffff:10.0.0.1", "64:ff9b::7f00:1",
        "64:ff9b:1::1", "100::1", "2001::1", "2001:db8::1", "2002:7f00:1::", "2002:808:808::1",
        "168.63.129.16", "100.100.100.200", "192.0.0.192", "fd00:ec2::254", "fd20:ce::254",
        "::ffff:168.63.129.16", "64:ff9b::a83f:8110", "::ffff:169.254.169.254",
        "3fff::1", "fc00::1", "fd12::1", "fe80::1", "fe80::1%2", "fec0::1", "ff02::1",
    ],
)  # fmt: skip
def test_addresses_that_are_not_of_the_public_internet(address: str):
    assert not is_public(address)


@pytest.mark.parametrize(
    "address",
    ["1.1.1.1", "93.184.216.34", "172.32.0.1", "2606:4700::1111", "64:ff9b::808:808",
     "::ffff:8.8.8.8"],
)  # fmt: skip
def test_addresses_that_are(address: str):
    assert is_public(address)


def test_hosts_are_several():
    with pytest.raises(TypeError, match="got a string"):
        OutboundRules(allow_hosts="example.com")


async def _ask(proxy: OutboundProxy, host: str, port: int) -> tuple[int, bytes]:
    """Ask as a browser does: by name, through SOCKS5; returns the answer and what the site said."""
    proxy_port = int((await proxy.open()).rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy_port)
    name = host.encode()
    writer.write(b"\x05\x01\x00" + b"\x05\x01\x00\x03" + bytes([len(name)]) + name)
    writer.write(port.to_bytes(2, "big"))
    await reader.readexactly(2)
    verdict = (await reader.readexactly(10))[1]
    said = b""
    if verdict == 0:
        writer.write(b"GET / HTTP/1.0\r\n\r\n")
        said = await reader.read()
    writer.close()
    await proxy.close()
    return verdict, said


@pytest.mark.parametrize("allowed", [True, False])
def test_what_a_name_means_is_found_out_once_and_looked_at(allowed: bool):
    asked: list[str] = []

    async def resolve(host: str, port: int) -> list[str]:
        asked.append(host)
        return ["127.0.0.1"]

    site = Site()
    site.pages["/"] = "here"
    hosts = {"name.example"} if allowed else set[str]()
    proxy = OutboundProxy(OutboundRules(allow_hosts=hosts, resolve=resolve), max_bytes=10_000)
    try:
        verdict, said = asyncio.run(_ask(proxy, "name.example", site.port))
    finally:
        site.close()

    assert asked == ["name.example"]
    assert (verdict, said.endswith(b"here"), site.asked) == (
        (0, True, ["/"]) if allowed else (2, False, [])
    )
    assert len(proxy.refused) == (not allowed)


def test_the_system_says_where_a_name_is():
    proxy = OutboundProxy(OutboundRules(), max_bytes=10_000)

    verdict, _ = asyncio.run(_ask(proxy, "localhost", 80))

    assert verdict == 2
    assert "is not a public address" in proxy.refused[0]


def test_a_name_that_nobody_knows_is_a_failure_and_no_refusal():
    async def resolve(host: str, port: int) -> list[str]:
        raise socket.gaierror(-2, "Name or service not known")

    proxy = OutboundProxy(OutboundRules(resolve=resolve), max_bytes=10_000)

    verdict, _ = asyncio.run(_ask(proxy, "nobody.example", 80))

    assert verdict == 2
    assert not proxy.refused
    assert "nobody.example was not found" in proxy.failed[0]
