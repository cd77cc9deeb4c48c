"""Which system calls a command in a sandbox is refused, as a program for the kernel's seccomp."""

from __future__ import annotations

import errno
import json
import platform
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["REFUSED", "container_profile", "filter_program"]

# Offsets in what the kernel shows of a call, and codes of the instructions.
NUMBER, ARCHITECTURE, ARGUMENTS = 0, 4, 16
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, KILL, FAIL = 0x7FFF_0000, 0x8000_0000, 0x0005_0000
CLONE_NEWUSER = 0x1000_0000
X32 = 0x4000_0000

_NUMBERS = {
    "x86_64": (0xC000_003E, 0),
    "aarch64": (0xC000_00B7, 1),
}
"""The kernel's name of each machine, and which number below is its own."""

REFUSED = {
    # Keys of whoever started us: keyrings are not a thing of namespaces.
    "add_key": (248, 217),
    "keyctl": (250, 219),
    "request_key": (249, 218),
    # New namespaces, in which it would be root and could reach much more of the kernel.
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "open_tree": (428, 428),
    "pivot_root": (155, 41),
    "setns": (308, 268),
    "umount2": (166, 39),
    "unshare": (272, 97),
    # Parts of the kernel that programs seldom need and exploits often do.
    "bpf": (321, 280),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
    "open_by_handle_at": (304, 265),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
}
"""Calls that are refused, with their numbers on each machine."""

CLONE = 56, 220
UNSEEN = {"clone3": (435, 435), "openat2": (437, 437)}
"""What they are asked for lies in memory, where a filter does not look. Programs fall back to the
older calls when these are missing."""

SOCKET = 41, 198
FAMILIES = {"unix": 1, "inet": 2, "inet6": 10, "netlink": 16}
"""What sockets can be made for. Others belong to no namespace, as the one that leads from a virtual
machine to its host (vsock), or are parts of the kernel that programs seldom need."""


class Mode(NamedTuple):
    """A call that gives a file its mode."""

    numbers: tuple[int | None, int | None]
    mode: int
    """Which of its arguments that is."""
    flags: int | None = None
    """Which says whether it makes a file at all, if it does not always."""


SET_ID = 0o6000
CREATES = 0o100 | 0o20000000  # O_CREAT, and what is special to O_TMPFILE

MODES = {
    "chmod": Mode((90, None), 1),
    "creat": Mode((85, None), 1),
    "fchmod": Mode((91, 52), 1),
    "fchmodat": Mode((268, 53), 2),
    "fchmodat2": Mode((452, 452), 2),
    "mknod": Mode((133, None), 1),
    "mknodat": Mode((259, 33), 2),
    "open": Mode((2, None), 2, flags=1),
    "openat": Mode((257, 56), 3, flags=2),
}
"""Calls that are refused if they would leave a program in the workspace which gives its owner's
rights to whoever starts it, outside."""


def filter_program(machine: str = "") -> bytes | None:
    """Return the program that refuses these calls; None for a machine that is not known here."""
    known = _NUMBERS.get(machine or platform.machine())
    if known is None:
        return None
    architecture, own = known
    program = [
        _step(LOAD, ARCHITECTURE),
        _step(EQUAL, architecture, yes=1),
        _step(RETURN, KILL),
        _step(LOAD, NUMBER),
        # Calls of the machine's other kind would have other numbers.
        _step(AT_LEAST, X32, no=1),
        _step(RETURN, KILL),
    ]
    for numbers in REFUSED.values():
        program += [_step(EQUAL, numbers[own], no=1), _step(RETURN, FAIL | errno.EPERM)]
    for numbers in UNSEEN.values():
        program += [_step(EQUAL, numbers[own], no=1), _step(RETURN, FAIL | errno.ENOSYS)]
    for call in MODES.values():
        program += _mode_steps(call, call.numbers[own])
    program += _socket_steps(SOCKET[own])
    program += [
        _step(EQUAL, CLONE[own], no=3),
        _step(LOAD, ARGUMENTS),
        _step(ANY_BIT, CLONE_NEWUSER, no=1),
        _step(RETURN, FAIL | errno.EPERM),
        _step(RETURN, ALLOW),
    ]
    return b"".join(program)


def _mode_steps(call: Mode, number: int | None) -> list[bytes]:
    if number is None:
        return []
    steps = [
        _step(LOAD, ARGUMENTS + 8 * call.mode),
        _step(ANY_BIT, SET_ID, no=1),
        _step(RETURN, FAIL | errno.EPERM),
        _step(RETURN, ALLOW),
    ]
    if call.flags is not None:
        steps = [_step(LOAD, ARGUMENTS + 8 * call.flags), _step(ANY_BIT, CREATES, no=3), *steps]
    return [_step(EQUAL, number, no=len(steps)), *steps]


def _socket_steps(number: int) -> list[bytes]:
    steps = [
        _step(LOAD, ARGUMENTS),
        *(
            _step(EQUAL, family, yes=len(FAMILIES) - place)
            for place, family in enumerate(FAMILIES.values())
        ),
        _step(RETURN, FAIL | errno.EAFNOSUPPORT),
        _step(RETURN, ALLOW),
    ]
    return [_step(EQUAL, number, no=len(steps)), *steps]


def _step(code: int, value: int, *, yes: int = 0, no: int = 0) -> bytes:
    """Return one instruction; ``yes`` and ``no`` say how many to skip then."""
    return struct.pack("=HBBI", code, yes, no, value)


PROFILES = (Path("/etc/containers/seccomp.json"), Path("/usr/share/containers/seccomp.json"))
"""What podman itself allows in a container; the first that is there."""


def container_profile(places: Sequence[Path] = PROFILES) -> str:
    """Return the same for podman: what its own profile allows, without what is refused here.

    Empty where podman's own is missing or unreadable: a list of what is allowed needs one to start
    from. An unreadable one is never replaced by the next: it may be the stricter of the two.
    """
    for place in places:
        try:
            return _narrowed(json.loads(place.read_text()))
        except FileNotFoundError:
            continue
        except (OSError, ValueError, TypeError, LookupError):
            return ""
    return ""


def _narrowed(profile: dict[str, Any]) -> str:
    ours = {*REFUSED, *UNSEEN, *MODES, "clone", "socket"}
    rules: list[dict[str, Any]] = [
        {**rule, "names": [name for name in rule["names"] if name not in ours]}
        for rule in profile["syscalls"]
    ]
    rules += [
        {"names": sorted(REFUSED), "action": "SCMP_ACT_ERRNO", "errnoRet": errno.EPERM},
        {"names": sorted(UNSEEN), "action": "SCMP_ACT_ERRNO", "errnoRet": errno.ENOSYS},
        _allowed("clone", 0, CLONE_NEWUSER),
    ]
    for name, call in MODES.items():
        rules.append(_allowed(name, call.mode, SET_ID))
        if call.flags is not None:
            rules.append(_allowed(name, call.flags, CREATES))
    rules += [_allowed("socket", 0, 0xFFFF_FFFF, family) for family in FAMILIES.values()]
    rules = [rule for rule in rules if rule["names"]]
    return json.dumps({**profile, "syscalls": rules})


def _allowed(name: str, argument: int, bits: int, value: int = 0) -> dict[str, Any]:
    """Return a rule that allows a call if these bits of one of its arguments have a value."""
    condition = {"index": argument, "value": bits, "valueTwo": value, "op": "SCMP_CMP_MASKED_EQ"}
    return {"names": [name], "action": "SCMP_ACT_ALLOW", "args": [condition]}
