"""Seccomp filters: which system calls the kernel refuses to commands and to scripts."""

from __future__ import annotations

import errno
import json
import platform
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

# Offsets in the kernel's description of a call, and instruction codes.
NUMBER, ARCHITECTURE, ARGUMENTS = 0, 4, 16
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, KILL, FAIL = 0x7FFF_0000, 0x8000_0000, 0x0005_0000
CLONE_NEWUSER = 0x1000_0000
X32 = 0x4000_0000

MACHINES = {"x86_64": (0xC000_003E, 0), "aarch64": (0xC000_00B7, 1)}
"""The kernel's number for each machine, and which of the numbers below are its own."""

SECCOMP = 317, 277

Numbers = tuple[int | None, int | None]

REFUSED: dict[str, Numbers] = {
    # Keys of the user who started us: keyrings are not namespaced.
    "add_key": (248, 217),
    "keyctl": (250, 219),
    "request_key": (249, 218),
    # New namespaces, in which a command would be root and could reach much more of the kernel.
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
"""Calls that commands are refused, with their numbers on each machine."""

CLONE: Numbers = (56, 220)
UNSEEN: dict[str, Numbers] = {"clone3": (435, 435), "openat2": (437, 437)}
"""Their arguments lie in memory, where a filter cannot look. Programs fall back to the older calls
when these are missing."""

SOCKET: Numbers = (41, 198)
FAMILIES = {"unix": 1, "inet": 2, "inet6": 10, "netlink": 16}
"""The address families of sockets that can be made. Others are not namespaced, such as the one
from a virtual machine to its host (vsock), or belong to code that programs seldom need."""


class Mode(NamedTuple):
    """A call that sets a file's mode."""

    numbers: Numbers
    mode: int
    """The index of the argument with the mode."""
    flags: int | None = None
    """The index of the argument that says whether a file is made, if one is not always."""


SET_ID = 0o6000
CREATES = 0o100 | 0o20000000  # O_CREAT, and the bit special to O_TMPFILE

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
"""Calls that are refused when they set a set-user-id or set-group-id bit: the file could be
started outside of the sandbox."""

COMPUTING: dict[str, Numbers] = {
    "read": (0, 63),
    "write": (1, 64),
    "mmap": (9, 222),
    "mprotect": (10, 226),
    "munmap": (11, 215),
    "mremap": (25, 216),
    "brk": (12, 214),
    "madvise": (28, 233),
    "futex": (202, 98),
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "sigaltstack": (131, 132),
    "sched_yield": (24, 124),
    "clock_gettime": (228, 113),
    "clock_nanosleep": (230, 115),
    "gettimeofday": (96, 169),
    "getrandom": (318, 278),
    "restart_syscall": (219, 128),
    "exit": (60, 93),
    "exit_group": (231, 94),
}
"""All that a computation needs. None of them names a file, an address or a process: nothing can be
opened, connected, started or killed."""


def filter_program(machine: str = "") -> bytes | None:
    """Return the filter of commands in a sandbox; None for an unknown machine."""
    new_process = [_step(LOAD, ARGUMENTS), _step(ANY_BIT, CLONE_NEWUSER, no=1), *_EPERM_OR_ALLOW]
    return _program(
        machine,
        [
            *((numbers, [_refuse(errno.EPERM)]) for numbers in REFUSED.values()),
            *((numbers, [_refuse(errno.ENOSYS)]) for numbers in UNSEEN.values()),
            *((call.numbers, _mode_steps(call)) for call in MODES.values()),
            (SOCKET, _socket_steps()),
            (CLONE, new_process),
        ],
        otherwise=ALLOW,
    )


def computing_program(machine: str = "") -> bytes | None:
    """Return the filter of scripts, which only compute; None for an unknown machine."""
    allowed = ((numbers, [_step(RETURN, ALLOW)]) for numbers in COMPUTING.values())
    return _program(machine, allowed, otherwise=FAIL | errno.EPERM)


def seccomp_number() -> int:
    """Return the number of the system call that sets a filter, on a known machine."""
    return SECCOMP[MACHINES[platform.machine()][1]]


def _program(
    machine: str, rules: Iterable[tuple[Numbers, list[bytes]]], *, otherwise: int
) -> bytes | None:
    """Return the program that takes the steps of the rule for a call, each ending with a RETURN."""
    known = MACHINES.get(machine or platform.machine())
    if known is None:
        return None
    architecture, own = known
    program = [
        _step(LOAD, ARCHITECTURE),
        _step(EQUAL, architecture, yes=1),
        _step(RETURN, KILL),
        _step(LOAD, NUMBER),
        # Calls of the machine's other kind have other numbers.
        _step(AT_LEAST, X32, no=1),
        _step(RETURN, KILL),
    ]
    for numbers, steps in rules:
        number = numbers[own]
        if number is not None:
            program += [_step(EQUAL, number, no=len(steps)), *steps]
    return b"".join([*program, _step(RETURN, otherwise)])


def _mode_steps(call: Mode) -> list[bytes]:
    steps = [_step(LOAD, ARGUMENTS + 8 * call.mode), _step(ANY_BIT, SET_ID, no=1), *_EPERM_OR_ALLOW]
    if call.flags is None:
        return steps
    return [_step(LOAD, ARGUMENTS + 8 * call.flags), _step(ANY_BIT, CREATES, no=3), *steps]


def _socket_steps() -> list[bytes]:
    families = enumerate(FAMILIES.values())
    return [
        _step(LOAD, ARGUMENTS),
        *(_step(EQUAL, family, yes=len(FAMILIES) - place) for place, family in families),
        _refuse(errno.EAFNOSUPPORT),
        _step(RETURN, ALLOW),
    ]


def _step(code: int, value: int, *, yes: int = 0, no: int = 0) -> bytes:
    """Return one instruction; ``yes`` and ``no`` say how many to skip then."""
    return struct.pack("=HBBI", code, yes, no, value)


def _refuse(error: int) -> bytes:
    return _step(RETURN, FAIL | error)


_EPERM_OR_ALLOW = (_refuse(errno.EPERM), _step(RETURN, ALLOW))


PROFILES = (Path("/etc/containers/seccomp.json"), Path("/usr/share/containers/seccomp.json"))
"""Podman's own profile: the first that exists."""


def container_profile(places: Sequence[Path] = PROFILES) -> str:
    """Return the filter of commands for podman: its own profile without what is refused here.

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
