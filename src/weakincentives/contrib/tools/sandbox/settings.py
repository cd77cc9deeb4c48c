"""``SandboxSettings``: what commands run in, what they see, and what they may use."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, get_args

from weakincentives.contrib.tools.file_values import check_positive
from weakincentives.contrib.tools.sandbox.limits import SandboxLimits
from weakincentives.core.state import WITHHELD

EngineName = Literal["namespaces", "bubblewrap", "podman", "seatbelt", "none"]
"""The engines, the fastest first; ``"none"`` runs commands without any."""
WITHOUT_MOUNTS: tuple[EngineName, ...] = ("seatbelt", "none")
"""Those that make no mounts, and so do not need Linux: commands see the workspace in its place."""
SandboxChoice = Literal["auto", EngineName]


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSettings:
    """What commands run in, what they see, and what they may use.

    The same settings in the library, in ``[sandbox]`` of ``wink.toml``, as ``--sandbox KEY=VALUE``
    and as ``WINK_SANDBOX_KEY``. Relative paths start at the workspace, and ``~`` is your home
    directory.
    """

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    engine: SandboxChoice = "auto"
    """``"auto"`` is the fastest that works: namespaces of our own, bubblewrap, podman.
    ``"seatbelt"`` is for macOS, where nobody has run it yet: nothing chooses it by itself.
    ``"none"`` runs commands without any: they can do what this process can."""
    image: str | None = None
    """A podman image to run commands in; else they see the programs of the host, read-only."""
    detect: bool = True
    """Whether commands see the toolchains of the project: its virtual environment and interpreter,
    Node, Cargo, Go. Read-only, as present on this machine."""
    read: tuple[str, ...] = ()
    """More files and directories of the host that commands can read, at the same path."""
    write: tuple[str, ...] = ()
    """Directories outside of the workspace that commands can change, such as caches. Changes there
    persist and are not undone, also if the command fails."""
    path: tuple[str, ...] = ()
    """Directories to search for programs first."""
    env: tuple[str, ...] = ()
    """``NAME=VALUE`` sets a variable, ``NAME`` passes one of this process on. No other variable of
    this process reaches a command."""
    network: Literal["off"] | tuple[str, ...] = "off"
    """Or the hosts that commands can reach through a filtering proxy: ``name``, ``*.name`` or an
    address, each with an optional ``:port``."""
    timeout: float = 120.0
    """Seconds that a command may take by default, at most ``max_timeout``."""
    max_timeout: float = 600.0
    """Seconds that the model may ask for."""
    limits: SandboxLimits = field(default_factory=SandboxLimits)

    def __post_init__(self) -> None:
        if self.engine not in get_args(SandboxChoice):
            raise ValueError(
                f"sandbox must be one of {get_args(SandboxChoice)}, got {self.engine!r}"
            )
        if self.image is not None and self.engine not in ("auto", "podman"):
            raise ValueError(f"an image needs podman, but the sandbox is {self.engine!r}")
        for name in ("read", "write", "path", "env", "network"):
            value: Sequence[str] = getattr(self, name)
            if isinstance(value, str) and (name, value) != ("network", "off"):
                raise ValueError(f"{name} takes several values, got a string: [{value!r}]")
            if not isinstance(value, str):
                object.__setattr__(self, name, tuple(os.fspath(each) for each in value))
        if self.network == ():
            object.__setattr__(self, "network", "off")
        if self.network != "off":
            from weakincentives.contrib.tools.outbound import HostList

            HostList(self.network)  # raises for what is not a host
            if self.engine == "none":
                raise ValueError(
                    "a list of hosts needs a sandbox: without one, commands reach all hosts"
                )
        for each in self.env:
            name = each.partition("=")[0]
            if not (name.isascii() and name.isidentifier()) or "\0" in each:
                raise ValueError(f"env takes NAME or NAME=VALUE, got {name!r}")
            if name in WITHHELD:
                raise ValueError(f"env: {name} is for WINK alone; commands never get it")
        check_positive(self)

    def variables(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Return the variables to set; a named one that this process lacks is left out."""
        found: dict[str, str] = {}
        for each in self.env:
            name, equals, value = each.partition("=")
            if equals:
                found[name] = value
            elif name in environment:
                found[name] = environment[name]
        return found
