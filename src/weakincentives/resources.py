"""Dependency injection: tools request resources by type.

A ``Binding`` says how an instance is built and how long it lives; a ``ResourceRegistry`` is a set
of bindings. An open registry is a ``ResourceContext``: it builds instances on first use and closes
them in reverse order. A ``ToolScope`` does the same for the resources of one tool call.
"""
# The classes of the second half are one mechanism:
# pyright: reportPrivateUsage=false

from __future__ import annotations

import builtins
import inspect
import logging
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from types import FunctionType, MappingProxyType
from typing import Any, Generic, Protocol, TypeAlias, TypeVar, cast
from weakref import WeakValueDictionary

from weakincentives.core.gate import Gate, ObjectGate
from weakincentives.errors import (
    CircularDependency,
    PromptEvaluationError,
    ProviderFailed,
    ResourceError,
    Suspended,
    UnboundResource,
    VisibilityExpansionRequired,
)
from weakincentives.session.participant import (
    Forkable,
    Participant,
    Snapshotable,
    misfit,
    participant_for,
)

__all__ = [
    "Binding",
    "Closeable",
    "Forkable",
    "PostConstruct",
    "Resolver",
    "ResourceContext",
    "ResourceRegistry",
    "Scope",
    "Snapshotable",
    "ToolScope",
    "Watcher",
]

T = TypeVar("T")
V = TypeVar("V")
Chain: TypeAlias = tuple[type[Any], ...]
"""The types being built, outermost first: each is needed by the one before it."""
_Participants: TypeAlias = tuple[tuple[str, Participant], ...]

_log = logging.getLogger("weakincentives.resources")


class Closeable(Protocol):
    """A resource that is closed at the end of its scope."""

    def close(self) -> None: ...


class PostConstruct(Protocol):
    """A resource with a second construction step: called once, before anything uses it."""

    def post_construct(self) -> None: ...


class Resolver(Protocol):
    """Returns instances by type: a context, a tool call's scope, or a provider's argument."""

    def get(self, kind: type[T]) -> T:
        """Return the instance for ``kind``, building it if necessary."""
        ...

    def find(self, kind: type[T]) -> T | None:
        """Return the instance for ``kind``, or None when nothing is bound for it."""
        ...


class Scope(Enum):
    """How long an instance lives."""

    SINGLETON = "singleton"
    """One per opened context."""
    TOOL_CALL = "tool_call"
    """One per tool call."""
    PROTOTYPE = "prototype"
    """A new one for each request."""


# No slots: with them, frozen and generic, `Binding[Config](...)` is a TypeError on Python 3.11.
@dataclass(frozen=True)
class Binding(Generic[T]):
    """How the instance for a type is built, and how long it lives.

    >>> Binding(list, lambda r: [1, 2], scope=Scope.PROTOTYPE).scope
    <Scope.PROTOTYPE: 'prototype'>
    """

    type: builtins.type[T]
    provider: Callable[[Resolver], T]
    """Called on the first request for the type, with a resolver for its own dependencies."""
    scope: Scope = Scope.SINGLETON

    def __post_init__(self) -> None:
        _check_key(self.type)
        name = self.type.__name__
        if not callable(self.provider):
            raise ResourceError(
                f"The provider of {name} must be callable, got {self.provider!r}; "
                "for an existing instance use Binding.instance"
            )
        if inspect.iscoroutinefunction(self.provider):
            raise ResourceError(f"The provider of {name} is async; providers are plain functions")
        if not isinstance(self.scope, Scope):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ResourceError(f"The scope of {name} must be a Scope, got {self.scope!r}")

    @staticmethod
    def instance(kind: builtins.type[V], value: V, /) -> Binding[V]:
        """Bind an existing instance. Its owner closes it."""
        _check_key(kind)
        _check_value(kind, value)
        return Binding(kind, Ready(value))


@dataclass(frozen=True, slots=True)
class Ready:
    """The provider of an existing instance."""

    value: Any

    def __call__(self, resolver: Resolver) -> Any:
        return self.value


class ResourceRegistry:
    """An immutable set of bindings, one per type. Open it to get instances."""

    __slots__ = ("_bindings",)

    def __init__(self, bindings: Mapping[type[Any], Binding[Any]]) -> None:
        for kind, binding in bindings.items():
            _check_key(kind)
            _check_binding(binding)
        # The key wins over the binding's own type.
        self._bindings = MappingProxyType(
            {
                kind: binding if binding.type is kind else replace(binding, type=kind)
                for kind, binding in bindings.items()
            }
        )

    @classmethod
    def of(cls, *bindings: Binding[Any]) -> ResourceRegistry:
        """Return a registry of bindings, at most one per type."""
        by_type: dict[type[Any], Binding[Any]] = {}
        for binding in bindings:
            _check_binding(binding)
            if binding.type in by_type:
                raise ResourceError(f"{binding.type.__name__} is bound twice")
            by_type[binding.type] = binding
        return cls(by_type)

    @classmethod
    def build(cls, resources: Mapping[type[Any], Any] | ResourceRegistry) -> ResourceRegistry:
        """Return a registry of ``{type: instance or Binding}``; a registry is returned as it is."""
        if isinstance(resources, ResourceRegistry):
            return resources
        if not isinstance(resources, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ResourceError(
                f"Resources come as {{type: instance or Binding}}, got {type(resources).__name__}"
            )
        bindings: dict[type[Any], Binding[Any]] = {}
        for kind, value in resources.items():
            is_binding = isinstance(value, Binding)
            bindings[kind] = value if is_binding else Binding.instance(kind, value)
        return cls(bindings)

    @property
    def bindings(self) -> Mapping[type[Any], Binding[Any]]:
        return self._bindings

    def merge(self, other: ResourceRegistry | Mapping[type[Any], Any]) -> ResourceRegistry:
        """Return the bindings of both; for a type that both bind, ``other`` wins."""
        merged = ResourceRegistry.build(other)
        return ResourceRegistry({**self._bindings, **merged.bindings})

    def open(self) -> ResourceContext:
        """Return a context. Use it in a ``with`` block, or call its ``close``."""
        return ResourceContext(self)

    def __contains__(self, kind: object) -> bool:
        return kind in self._bindings

    def __iter__(self) -> Iterator[type[Any]]:
        return iter(self._bindings)

    def __repr__(self) -> str:
        return f"ResourceRegistry({', '.join(kind.__name__ for kind in self._bindings)})"


def _check_key(kind: object) -> None:
    if not isinstance(kind, type):
        raise ResourceError(f"Resources are bound by type; {kind!r} is not a class")


def _check_binding(binding: object) -> None:
    if not isinstance(binding, Binding):
        raise ResourceError(
            f"Expected a Binding, got {binding!r}; for an instance use Binding.instance"
        )


def _check_value(kind: type, value: object) -> None:
    """Refuse a value that is probably not the intended instance."""
    name = kind.__name__
    is_class = isinstance(value, type) and kind in value.__mro__
    takes_functions = any("__call__" in vars(base) for base in kind.__mro__)
    is_function = isinstance(value, FunctionType) and not takes_functions
    if value is None or is_class or (is_function and kind is not FunctionType):
        found = (
            value if value is None else "a function" if is_function else f"the class {_name(value)}"
        )
        raise ResourceError(
            f"{name} is bound to {found}; bind an instance, or Binding({name}, provider)"
        )
    if type(value).__module__ == "builtins" and not _may_be(value, kind):
        raise ResourceError(f"{name} is bound to {value!r}, which is no {name}")
    problem = misfit(value)
    if problem is not None:
        raise ResourceError(f"{name} cannot be rolled back: {problem}")


def _may_be(value: object, kind: type) -> bool:
    try:
        return isinstance(value, kind) or getattr(kind, "_is_protocol", False)
    except TypeError:  # a protocol that cannot be checked
        return True


class Watcher(Protocol):
    """Notified of each new instance that takes part in transactions; a snapshot, for example.

    It is held weakly: with ``slots``, give it a ``__weakref__`` slot.
    """

    def built(self, name: str, instance: Snapshotable, /) -> None:
        """Called right after ``post_construct``, before the instance is used."""
        ...


class _Lifetime:
    """Instances that live and end together, in a context or in one tool call."""

    context: ResourceContext
    # Defaults on the class: most tool calls build nothing, and such a scope should cost little.
    _closed: bool = False
    instances: Mapping[type[Any], Any] = MappingProxyType({})
    """Replaced, never changed: it is read without the lock."""
    _participants: _Participants = ()
    _to_close: dict[int, Any] | None = None
    """By identity, in order of construction; None until something is about to be built."""
    _watcher: Watcher | None = None
    _watchers: WeakValueDictionary[int, Watcher] | None = None
    """By identity: two snapshots may be equal."""

    def get(self, kind: type[T]) -> T:
        """Return the instance for ``kind``, building it if necessary."""
        if not self._closed:
            instance = self._existing(kind)
            if instance is not None:
                return instance
        return self._resolve(kind, (), self._watcher)

    def find(self, kind: type[T]) -> T | None:
        """Return the instance for ``kind``, or None when nothing is bound for it.

        Raises like ``get`` when the bound instance cannot be built.
        """
        return self.get(kind) if kind in self.context.bindings else None

    def _existing(self, kind: type[T]) -> T | None:
        """Return an instance without a lock: every tool call does this."""
        instance = self.context.instances.get(kind)
        return self.instances.get(kind) if instance is None else instance

    @property
    def participants(self) -> _Participants:
        """The live instances that take part in transactions, each once, with its name.

        Prototypes are not among them: only watchers are notified of a prototype.
        """
        return self._participants

    @property
    def snapshotables(self) -> tuple[tuple[str, Snapshotable], ...]:
        """The ``participants`` as the instances that were built."""
        return tuple((name, each.exposed) for name, each in self.participants)

    def watch(self, watcher: Watcher) -> tuple[tuple[str, Snapshotable], ...]:
        """Notify ``watcher`` of each instance built from now on; return the present ones."""
        with self.context._lock:
            if self._watchers is None:
                self._watchers = WeakValueDictionary()
            self._watchers[id(watcher)] = watcher
            return self.snapshotables

    def close(self, error: BaseException | None = None) -> None:
        """Close what was built here, newest first. Closing again does nothing.

        With an ``error`` in flight, failures to close are logged and noted on it. Otherwise the
        first failure is raised, once everything has been closed.
        """
        self._closed = True
        self._watcher = None  # it usually refers back to this: leave no cycle to the collector
        # A build sets _to_close before it checks _closed, so no lock is needed here: one of the
        # two sees the other.
        if self._to_close is None:
            return
        with self.context._lock:
            to_close, self._to_close = self._to_close, {}
            self.instances = {}
            self._set_participants(())
        _close_all(reversed(to_close.values()), error)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close(error)

    # How an instance is built, in call order

    def _resolve(self, kind: type[T], chain: Chain, watcher: Watcher | None) -> T:
        context = self.context
        self._refuse_when_closed(kind)
        binding = context.bindings.get(kind)
        if binding is None:
            raise UnboundResource(_unbound(kind, chain, context.bindings))
        if kind in chain:
            raise CircularDependency(f"Providers need each other: {_arrows(*chain, kind)}")
        if binding.scope is Scope.PROTOTYPE:
            return self._build(binding, chain, watcher)
        if binding.scope is Scope.SINGLETON:
            return context._get_or_build(binding, chain, watcher)
        if self is context:
            name, needed = _name(kind), f" ({_arrows(*chain, kind)})" if chain else ""
            raise UnboundResource(
                f"{name} lives for one tool call: a singleton would outlive {name}, and there is "
                f"none outside a tool call{needed}. Request it in a handler, or bind what needs it "
                "with Scope.TOOL_CALL too."
            )
        return self._get_or_build(binding, chain, watcher)

    def _get_or_build(self, binding: Binding[T], chain: Chain, watcher: Watcher | None) -> T:
        """Return the one instance of this lifetime, built by the thread that asks first.

        The lock is not held while a provider runs: other threads can build other resources.
        """
        context, kind, me = self.context, binding.type, threading.get_ident()
        place = (self, kind)
        with context._lock:
            while kind not in self.instances:
                self._refuse_when_closed(kind)
                if place not in context._builders:
                    context._builders[place] = me
                    break
                context._refuse_deadlock(place, chain)
                context._waiting[me] = place
                try:
                    context._changed.wait()
                finally:
                    del context._waiting[me]
            else:
                return self.instances[kind]
        try:
            return self._build(binding, chain, watcher)
        finally:
            with context._lock:
                del context._builders[place]
                context._changed.notify_all()

    def _build(self, binding: Binding[T], chain: Chain, watcher: Watcher | None) -> T:
        with self.context._lock:
            if self._to_close is None:
                self._to_close = {}
            self._refuse_when_closed(binding.type)
        chain = (*chain, binding.type)
        resolver = _Resolver(self, chain, watcher)
        with _named(chain, "its provider"):
            instance = binding.provider(resolver)
        if instance is None:
            raise ProviderFailed(f"{_arrows(*chain)}: its provider returned None")
        # An alias (`lambda r: r.get(Other)`) builds nothing: the other binding sets the instance
        # up and closes it.
        is_new = not resolver.returned(instance)
        try:
            post_construct = _method(instance, "post_construct")
            if is_new and post_construct is not None:
                with _named(chain, "its post_construct"):
                    post_construct()
            self._publish(binding, instance, watcher, is_new)
        except BaseException as error:
            if is_new and _method(instance, "close") is not None:
                _close_all([instance], error)
            raise
        resolver.finish()
        return instance

    def _publish(
        self, binding: Binding[T], instance: T, watcher: Watcher | None, is_new: bool
    ) -> None:
        """Notify watchers, then let others get the instance.

        With the lock held: a watcher that is added meanwhile finds it among the present ones.
        """
        with self.context._lock:
            self._refuse_when_closed(binding.type)
            name, participant = binding.type.__name__, participant_for(instance)
            problem = None if participant is instance else misfit(instance)
            if problem is not None:
                raise ResourceError(f"{name} cannot be rolled back: {problem}")
            is_known = any(known.exposed is instance for _, known in self.participants)
            if participant is not None and not is_known:
                audience = dict(self._watchers or {}) if is_new else {}
                if is_new and watcher is not None:
                    audience[id(watcher)] = watcher
                for each in audience.values():
                    each.built(name, cast(Snapshotable, instance))
                if binding.scope is not Scope.PROTOTYPE:
                    self._set_participants((*self._participants, (name, participant)))
            if is_new and _method(instance, "close") is not None:
                assert self._to_close is not None
                self._to_close.setdefault(id(instance), instance)
            if binding.scope is not Scope.PROTOTYPE:
                self.instances = {**self.instances, binding.type: instance}

    def _set_participants(self, participants: _Participants) -> None:
        self._participants = participants

    def _refuse_when_closed(self, kind: type[Any]) -> None:
        if self.context._closed:
            raise ResourceError(
                f"The resource context is closed, so there is no {_name(kind)}; "
                "open the registry again"
            )
        if self._closed:
            raise ResourceError(f"The tool call has ended, so there is no {_name(kind)} for it")


class ResourceContext(_Lifetime):
    """An open registry: builds instances on request and closes them at the end.

    Thread-safe. Use it in one ``with`` block, or without one until ``close`` is called.
    """

    in_place: _Participants = ()
    """The ``participants`` that cannot fork, so that calls change them in place; in the order in
    which calls enter their gates."""
    object_gates: tuple[ObjectGate, ...] = ()
    """The gates of those changed in place, in their order."""
    gates: tuple[Gate, ...] = ()
    """The gates of resources that only one call at a time can use, whatever its session."""

    def __init__(self, registry: ResourceRegistry) -> None:
        self.registry = registry
        self.context = self
        self.bindings = registry.bindings
        self._entered = False
        self._to_close = {}
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        # Which thread builds what, and what a thread waits for.
        self._builders: dict[tuple[_Lifetime, type[Any]], int] = {}
        self._waiting: dict[int, tuple[_Lifetime, type[Any]]] = {}
        for binding in registry.bindings.values():
            if isinstance(binding.provider, Ready):
                self._publish(binding, binding.provider.value, None, is_new=False)

    def _set_participants(self, participants: _Participants) -> None:
        self._participants = participants
        self.in_place = in_gate_order(participants)
        self.object_gates = tuple(cast("ObjectGate", each.object_gate) for _, each in self.in_place)
        gates = (participant.gate for _, participant in participants)
        # In one order everywhere, so that no two calls wait for each other.
        found = (gate for gate in gates if gate is not None)
        self.gates = tuple(sorted(found, key=lambda gate: (gate.name, id(gate))))

    def tool_scope(self, watcher: Watcher | None = None) -> ToolScope:
        """Return the scope of one tool call; use it in a ``with`` block.

        ``watcher`` is notified of everything built through the scope, including singletons.
        """
        return ToolScope(self, watcher)

    def __enter__(self) -> ResourceContext:
        if self._closed or self._entered:
            state = "closed" if self._closed else "in use in a `with` block"
            raise ResourceError(f"This resource context is {state}; open the registry again")
        self._entered = True
        return self

    def _refuse_deadlock(self, place: tuple[_Lifetime, type[Any]], chain: Chain) -> None:
        """Raise if the thread that builds ``place`` waits for this one, directly or not."""
        me = threading.get_ident()
        path: Chain = ()
        step: tuple[_Lifetime, type[Any]] | None = place
        while step is not None:
            path = (*path, step[1])
            builder = self._builders.get(step)
            if builder == me:
                cycle = _arrows(*(chain or path[-1:]), *path)
                raise CircularDependency(f"Providers need each other: {cycle}")
            step = None if builder is None else self._waiting.get(builder)


class ToolScope(_Lifetime):
    """The resources of one tool call: the context's, and those that end with the call."""

    def __init__(self, context: ResourceContext, watcher: Watcher | None = None) -> None:
        self.context = context
        self._watcher = watcher

    @property
    def participants(self) -> _Participants:
        """The participants of the context, then those of the call."""
        return (*self.context._participants, *self._participants)

    def watch(self, watcher: Watcher) -> tuple[tuple[str, Snapshotable], ...]:
        """Like the context's ``watch``, for instances of this call and of the context."""
        with self.context._lock:
            self.context.watch(watcher)
            return super().watch(watcher)

    def __enter__(self) -> ToolScope:
        if self._closed:
            raise ResourceError("This tool scope has ended; each call gets its own")
        return self


class _Resolver:
    """A provider's argument: knows the chain, and what it has returned."""

    __slots__ = ("_chain", "_lifetime", "_returned", "_watcher")

    def __init__(self, lifetime: _Lifetime, chain: Chain, watcher: Watcher | None) -> None:
        self._lifetime = lifetime
        self._chain = chain
        self._watcher = watcher
        self._returned: list[object] = []

    def get(self, kind: type[T]) -> T:
        if not self._chain:
            return self._lifetime.get(kind)
        instance = self._lifetime._existing(kind)
        if instance is None:
            instance = self._lifetime._resolve(kind, self._chain, self._watcher)
        self._returned.append(instance)
        return instance

    def find(self, kind: type[T]) -> T | None:
        return self.get(kind) if kind in self._lifetime.context.bindings else None

    def returned(self, instance: object) -> bool:
        return any(each is instance for each in self._returned)

    def finish(self) -> None:
        """The instance is built: later requests through this resolver belong to no chain."""
        self._chain = ()
        self._returned.clear()


def in_gate_order(participants: Iterable[tuple[str, Participant]]) -> _Participants:
    """Return those that calls change in place, in the order in which calls enter their gates."""
    found = [each for each in participants if each[1].in_place]
    return tuple(sorted(found, key=lambda each: cast("ObjectGate", each[1].object_gate).serial))


_NO_BINDINGS = ResourceRegistry.of()


def as_resolver(resources: object) -> Resolver:
    """Open a ResourceRegistry or a mapping; return an open context as it is."""
    if hasattr(resources, "find"):  # first, because every call comes here
        return cast("Resolver", resources)
    if resources is None:
        return _NO_BINDINGS.open()
    if isinstance(resources, (ResourceRegistry, Mapping)):
        return ResourceRegistry.build(cast("Mapping[type[Any], Any]", resources)).open()
    raise TypeError(
        "resources must be prompt.resources, an open context, a ResourceRegistry or a mapping "
        f"of types to instances, got {type(resources).__name__}"
    )


def _method(instance: object, name: str) -> Any:
    """Return the bound method, or None; a class bound as a resource has none."""
    if isinstance(instance, type):
        return None
    method = getattr(instance, name, None)
    return method if callable(method) else None


def _close_all(instances: Iterable[Any], error: BaseException | None) -> None:
    """Close every instance, then raise the first failure unless an ``error`` is in flight."""
    failures: list[tuple[str, BaseException]] = []
    for instance in instances:
        try:
            instance.close()
        except BaseException as failure:  # the others must still be closed
            failures.append((type(instance).__name__, failure))
    if not failures:
        return

    # An interrupt outranks every error, and an earlier error a later one.
    interrupts = [failure for _, failure in failures if not isinstance(failure, Exception)]
    raised = next(iter(interrupts), error or failures[0][1])
    for name, failure in failures:
        if failure is not raised:
            _log.error("Closing %s failed", name, exc_info=failure)
            raised.add_note(f"Closing {name} failed too: {type(failure).__name__}: {failure}")
    if raised is not error:
        raise raised


@contextmanager
def _named(chain: Chain, culprit: str) -> Generator[None]:
    """Turn an exception into a ProviderFailed that prints the chain."""
    try:
        yield
    except (ResourceError, PromptEvaluationError, VisibilityExpansionRequired):
        raise  # it names the whole chain already, or the run is to stop here
    except Exception as error:
        if isinstance(error, Suspended):
            raise
        raise ProviderFailed(
            f"{_arrows(*chain)}: {culprit} raised {type(error).__name__}: {error}"
        ) from error


def _name(kind: object) -> str:
    return getattr(kind, "__name__", None) or repr(kind)


def _arrows(*chain: object) -> str:
    return " -> ".join(_name(kind) for kind in chain)


def _unbound(kind: object, chain: Chain, bindings: Mapping[type[Any], Any]) -> str:
    name = _name(kind)
    needed = f" (needed by {_arrows(*chain, kind)})" if chain else ""
    bound = ", ".join(sorted(_name(each) for each in bindings)) or "nothing"
    if isinstance(kind, type):
        near = [each for each in bindings if issubclass(each, kind) or issubclass(kind, each)]
        if near:
            return (
                f"{name} is not bound{needed}, but {_name(near[0])} is: resources are found by "
                f"exactly the type they are bound to, so bind {{{name}: ...}} or ask for "
                f"{_name(near[0])}"
            )
        if name == "Filesystem":
            return (
                f"Filesystem is not bound{needed}: give workspace=..., or "
                "resources={Filesystem: MemoryFilesystem()}"
            )
    return (
        f"{name} is not bound{needed}. Bound here: {bound}. "
        f"Bind it with resources={{{name}: ...}} or Binding({name}, lambda r: ...)."
    )
