"""What a command may do on macOS, as a Seatbelt profile for ``sandbox-exec``.

Not run on macOS yet: its tests check the profile as data. So nothing chooses it by itself, and the
setting ``engine = "seatbelt"`` is how to try it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

PROGRAM = "/usr/bin/sandbox-exec"
READABLE = (
    "/System", "/usr", "/bin", "/sbin", "/Library/Developer", "/Library/Frameworks",
    "/opt/homebrew", "/private/etc/localtime", "/private/etc/ssl", "/private/var/db/timezone",
    "/private/var/db/dyld", "/private/var/select",
)  # fmt: skip
"""The system: its programs, and the files they need."""
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom", "/dev/dtracehelper")
_SERVICES = (
    "com.apple.system.notification_center", "com.apple.system.opendirectoryd.libinfo",
    "com.apple.system.logger", "com.apple.trustd.agent",
)  # fmt: skip
"""Without these, programs cannot look up users, or log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What a command may do; the last rule that names a path decides."""

    workspace: str
    scratch: str
    """Its temporary directory."""
    readable: Sequence[str] = ()
    writable: Sequence[str] = ()
    """More directories outside of the workspace."""
    read_only: Sequence[str] = ()
    """Paths in the workspace that it cannot change."""
    hidden: Sequence[str] = ()
    """Directories that it can neither read nor change."""
    proxy: int | None = None
    """The only port that it can reach, on loopback."""

    @property
    def parameters(self) -> Mapping[str, str]:
        """The paths by name: in a profile's text, a path could end a string and add rules."""
        return {name: path for names in self._named.values() for name, path in names}

    @property
    def _named(self) -> Mapping[str, list[tuple[str, str]]]:
        groups = {
            "READ": (*READABLE, *self.readable),
            "WRITE": (self.workspace, self.scratch, *self.writable),
            "KEEP": self.read_only,
            "HIDE": self.hidden,
        }
        return {
            group: [(f"{group}{n}", os.path.realpath(path)) for n, path in enumerate(paths)]
            for group, paths in groups.items()
        }

    def profile(self) -> str:
        """Return the text of the profile."""
        return "".join(f"{line}\n" for line in self._lines())

    def arguments(self, profile: str, command: Sequence[str]) -> list[str]:
        """Return the command that runs another one under this profile, which is in a file."""
        named = (f"-D{name}={path}" for name, path in self.parameters.items())
        return [PROGRAM, *named, "-f", profile, *command]

    def _lines(self) -> Iterator[str]:
        def paths(*groups: str) -> str:
            names = [name for group in groups for name, _ in self._named[group]]
            return " ".join(f'(subpath (param "{name}"))' for name in names)

        devices = " ".join(f'(literal "{device}")' for device in _DEVICES)
        services = " ".join(f'(global-name "{service}")' for service in _SERVICES)
        yield "(version 1)"
        yield "(deny default)"
        yield "(allow process-fork process-exec)"
        yield "(allow signal process-info* (target same-sandbox))"
        yield "(allow sysctl-read file-read-metadata)"
        yield f"(allow mach-lookup {services})"
        yield f'(allow file-read* (literal "/") {devices} {paths("READ", "WRITE")})'
        yield f"(allow file-write* {paths('WRITE')})"
        yield f"(allow file-write-data file-ioctl {devices})"
        if self.read_only:
            yield f"(deny file-write* {paths('KEEP')})"
        if self.hidden:
            yield f"(deny file-read* file-write* {paths('HIDE')})"
        if self.proxy is not None:
            yield f'(allow network-outbound (remote ip "localhost:{self.proxy}"))'
