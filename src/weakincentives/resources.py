"""Things a tool asks for by type: made when needed, shared or fresh, closed in the end.

``Binding`` says how an instance is made and how long it lives; a ``ResourceRegistry`` holds the
bindings. An opened registry is a ``ResourceContext``: it makes instances when they are first asked
for, tells those who watch, and closes them in reverse order. A ``ToolScope`` does the same for what
lives for one tool call.
"""
# The classes of the second half are one mechanism and share its parts:
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

from weakincentives.errors import (
    CircularDependency,
    PromptEvaluationError,
    ProviderFailed,
    ResourceError,
    Suspended,
    UnboundResource,
    VisibilityExpansionRequired,
)
from weakincentives.gate import Gate
from weakincentives.participant import Participant, participant_for

__all__ = [
    "Binding",
    "Closeable",
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
"""The types being made, outermost first: each is needed by the one before it."""
_Participants: TypeAlias = tuple[tuple[str, Participant], ...]

_log = logging.getLogger("weakincentives.resources")


class Closeable(Protocol):
    """A resource that needs cleaning up: closed when what it was made for ends."""

    def close(self) -> None: ...


class PostConstruct(Protocol):
    """A resource that needs a second step: called once, before anyone gets the instance."""

    def post_construct(self) -> None: ...


class Snapshotable(Protocol):
    """A resource that takes part in transactions."""

    def snapshot(self) -> object:
        """Return a token for the state as it is now."""
        ...

    def restore(self, token: Any, /) -> None:
        """Put back the state that ``token`` stands for."""
        ...


class Resolver(Protocol):
    """Gives instances by type: a context, a tool call's scope, or what a provider gets."""

    def get(self, kind: type[T]) -> T:
        """Return the instance for ``kind``, making it if need be."""
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
    """A fresh one each time it is asked for."""


# No slots: with them, frozen and generic, `Binding[Config](...)` is a TypeError on Python 3.11.
@dataclass(frozen=True)
class Binding(Generic[T]):
    """How the instance for a type is made, and how long it lives.

    >>> Binding(list, lambda r: [1, 2], scope=Scope.PROTOTYPE).scope
    <Scope.PROTOTYPE: 'prototype'>
    """

    type: builtins.type[T]
    provider: Callable[[Resolver], T]
    """Called when the type is first asked for, with a resolver for what it needs itself."""
    scope: Scope = Scope.SINGLETON

    def __post_init__(self) -> None:
        _check_key(self.type)
        name = self.type.__name__
        if not callable(self.provider):
            raise ResourceError(
                f"The provider of {name} must be callable, like `lambda r: {name}()`, "
                f"got {self.provider!r}; for a ready-made instance use Binding.instance"
            )
        if inspect.iscoroutinefunction(self.provider):
            raise ResourceError(f"The provider of {name} is async; providers are plain functions")
        if not isinstance(self.scope, Scope):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ResourceError(f"The scope of {name} must be a Scope, got {self.scope!r}")

    @staticmethod
    def instance(kind: builtins.type[V], value: V, /) -> Binding[V]:
        """Bind what was made already. Whoever made it closes it."""
        _check_key(kind)
        _check_value(kind, value)
        return Binding(kind, Ready(value))


@dataclass(frozen=True, slots=True)
class Ready:
    """The provider of an instance that was made elsewhere."""

    value: Any

    def __call__(self, resolver: Resolver) -> Any:
        return self.value


class ResourceRegistry:
    """An immutable set of bindings, one per type. Open it to get instances."""

    __slots__ = ("_bindings",)

    def __init__(self, bindings: Mapping[type[Any], Binding[Any]]) -> None:
        """Take bindings by type; ``of`` and ``build`` are the friendlier ways in."""
        for kind, binding in bindings.items():
            _check_key(kind)
            _check_binding(binding)
        # A binding under another key than its own type is the one for that key.
        self._bindings = MappingProxyType(
            {
                kind: binding if binding.type is kind else replace(binding, type=kind)
                for kind, binding in bindings.items()
            }
        )

    @classmethod
    def of(cls, *bindings: Binding[Any]) -> ResourceRegistry:
        """Make a registry of bindings; each type may come once."""
        by_type: dict[type[Any], Binding[Any]] = {}
        for binding in bindings:
            _check_binding(binding)
            if binding.type in by_type:
                raise ResourceError(f"{binding.type.__name__} is bound twice")
            by_type[binding.type] = binding
        return cls(by_type)

    @classmethod
    def build(cls, resources: Mapping[type[Any], Any] | ResourceRegistry) -> ResourceRegistry:
        """Make a registry of ``{type: instance or Binding}``; a registry comes back as it is."""
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
        """Return both together; where both bind a type, ``other`` wins."""
        merged = ResourceRegistry.build(other)
        return ResourceRegistry({**self._bindings, **merged.bindings})

    def open(self) -> ResourceContext:
        """Return a context that makes instances when they are asked for, and closes them.

        Use it in a ``with`` block, or call its ``close`` yourself.
        """
        return ResourceContext(self)

    def __contains__(self, kind: object) -> bool:
        return kind in self._bindings

    def __iter__(self) -> Iterator[type[Any]]:
        return iter(self._bindings)

    def __repr__(self) -> str:
        return f"ResourceRegistry({', '.join(kind.__name__ for kind in self._bindings)})"


def _check_key(kind: object) -> None:
    if not isinstance(kind, type):
        raise ResourceError(f"Resources are bound and found by type; {kind!r} is not a class")


def _check_binding(binding: object) -> None:
    if not isinstance(binding, Binding):
        raise ResourceError(
            f"Expected a Binding, got {binding!r}; "
            "for a ready-made instance use Binding.instance(type, value)"
        )


def _check_value(kind: type, value: object) -> None:
    """Refuse what is surely not the instance that was meant."""
    name = kind.__name__
    if value is None:
        raise ResourceError(f"{name} is bound to None; leave it out and use find(), or bind one")
    if isinstance(value, type) and kind in value.__mro__:
        raise ResourceError(
            f"{name} is bound to the class {value.__name__}; pass an instance, "
            f"or Binding({name}, lambda r: {value.__name__}(...))"
        )
    takes_functions = any("__call__" in vars(base) for base in kind.__mro__)
    if isinstance(value, FunctionType) and not takes_functions and kind is not FunctionType:
        raise ResourceError(
            f"{name} is bound to a function; if that makes the instance, "
            f"write Binding({name}, {value.__name__})"
        )


class Watcher(Protocol):
    """Hears of each new instance that takes part in transactions; a snapshot, for example.

    It is held weakly: with ``slots``, give it a ``__weakref__`` slot.
    """

    def built(self, name: str, instance: Snapshotable, /) -> None:
        """Called right after ``post_construct``, before anyone else gets the instance."""
        ...


class _Lifetime:
    """Instances that live and end together, in a context or in one tool call."""

    _context: ResourceContext
    # The rest has its defaults on the class: most tool calls build nothing, and a scope that
    # builds nothing should cost next to nothing.
    _closed: bool = False
    _instances: Mapping[type[Any], Any] = MappingProxyType({})
    """Replaced, never changed: it is read without the lock."""
    _participants: _Participants = ()
    _to_close: dict[int, Any] | None = None
    """By identity, in order of construction; None until something is about to be made."""
    _watcher: Watcher | None = None
    _watchers: WeakValueDictionary[int, Watcher] | None = None
    """By identity: two snapshots may well be equal."""

    def get(self, kind: type[T]) -> T:
        """Return the instance for ``kind``, making it if need be."""
        if not self._closed:
            instance = self._there(kind)
            if instance is not None:
                return instance
        return self._resolve(kind, (), self._watcher)

    def find(self, kind: type[T]) -> T | None:
        """Return the instance for ``kind``, or None when nothing is bound for it.

        Raises like ``get`` when something is bound but cannot be had.
        """
        return self.get(kind) if kind in self._context._bindings else None

    def _there(self, kind: type[T]) -> T | None:
        """Return what has been made, without a lock: this is asked in every tool call."""
        instance = self._context._instances.get(kind)
        return self._instances.get(kind) if instance is None else instance

    @property
    def participants(self) -> _Participants:
        """The live instances that take part in transactions, each once, with a name to show.

        Prototypes are not among them: only those who watch hear of a prototype.
        """
        return self._participants

    @property
    def snapshotables(self) -> tuple[tuple[str, Snapshotable], ...]:
        """The ``participants`` as the instances that were made."""
        return tuple((name, each.exposed) for name, each in self.participants)

    def watch(self, watcher: Watcher) -> tuple[tuple[str, Snapshotable], ...]:
        """Tell ``watcher`` of each instance built from now on; return the ``snapshotables`` of now.

        Nothing is built between the two, so nothing is missed.
        """
        with self._context._lock:
            if self._watchers is None:
                self._watchers = WeakValueDictionary()
            self._watchers[id(watcher)] = watcher
            return self.snapshotables

    def close(self, error: BaseException | None = None) -> None:
        """Close what was made here, the newest first. Closing again does nothing.

        When ``error`` is under way, closing does not hide it: what else fails is logged and noted
        on it. Otherwise the first failure is raised, once everything has been closed.
        """
        self._closed = True
        self._watcher = None  # it mostly holds this in turn: no cycle is left for the collector
        # Whoever makes something sets _to_close first and looks at _closed later, so it is safe
        # to look without the lock: one of the two sees the other.
        if self._to_close is None:
            return
        with self._context._lock:
            to_close, self._to_close = self._to_close, {}
            self._instances, self._participants = {}, ()
        _close_all(reversed(to_close.values()), error)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close(error)

    # How an instance comes about, in call order.

    def _resolve(self, kind: type[T], chain: Chain, watcher: Watcher | None) -> T:
        context = self._context
        self._refuse_when_closed(kind)
        binding = context._bindings.get(kind)
        if binding is None:
            raise UnboundResource(_unbound(kind, chain, context._bindings))
        if kind in chain:
            raise CircularDependency(f"Providers need each other: {_arrows(*chain, kind)}")
        if binding.scope is Scope.PROTOTYPE:
            return self._make(binding, chain, watcher)
        if binding.scope is Scope.SINGLETON:
            return context._get_or_make(binding, chain, watcher)
        if self is context:
            raise UnboundResource(_needs_tool_call(kind, chain, context._bindings))
        return self._get_or_make(binding, chain, watcher)

    def _get_or_make(self, binding: Binding[T], chain: Chain, watcher: Watcher | None) -> T:
        """Return the one instance of this lifetime, made by the thread that asks first.

        The lock is never held while a provider runs: others build other things meanwhile.
        """
        context, kind, me = self._context, binding.type, threading.get_ident()
        place = (self, kind)
        with context._lock:
            while kind not in self._instances:
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
                return self._instances[kind]
        try:
            return self._make(binding, chain, watcher)
        finally:
            with context._lock:
                del context._builders[place]
                context._changed.notify_all()

    def _make(self, binding: Binding[T], chain: Chain, watcher: Watcher | None) -> T:
        with self._context._lock:
            if self._to_close is None:
                self._to_close = {}
            self._refuse_when_closed(binding.type)
        chain = (*chain, binding.type)
        resolver = _Resolver(self, chain, watcher)
        with _named(chain, "its provider"):
            instance = binding.provider(resolver)
        if instance is None:
            raise ProviderFailed(f"{_arrows(*chain)}: its provider returned None")
        # A provider that hands on what it got (`lambda r: r.get(Other)`) made nothing: the
        # instance has been set up, and will be closed, where it was made.
        is_new = not resolver.gave(instance)
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
        """Tell those who watch; then, and only then, others can get the instance."""
        told: dict[int, Watcher] = {}
        while True:
            unheard: list[Watcher] = []
            with self._context._lock:
                self._refuse_when_closed(binding.type)
                if is_new and participant_for(instance) and not self._knows(instance):
                    unheard = [each for each in self._audience(watcher) if id(each) not in told]
                if not unheard:
                    self._keep(binding, instance, is_new)
                    return
            # Outside the lock, since a snapshot may take its time; so look again afterwards.
            for each in unheard:
                told[id(each)] = each
                each.built(binding.type.__name__, cast(Snapshotable, instance))

    def _audience(self, watcher: Watcher | None) -> Iterable[Watcher]:
        audience = {} if self._watchers is None else dict(self._watchers)
        if watcher is not None:
            audience[id(watcher)] = watcher
        return audience.values()

    def _knows(self, instance: object) -> bool:
        return any(known.exposed is instance for _, known in self.participants)

    def _keep(self, binding: Binding[Any], instance: object, is_new: bool) -> None:
        if is_new and _method(instance, "close") is not None:
            assert self._to_close is not None
            self._to_close.setdefault(id(instance), instance)
        if binding.scope is Scope.PROTOTYPE:
            return
        participant = participant_for(instance)
        if participant is not None and not self._knows(instance):
            self._participants = (*self._participants, (binding.type.__name__, participant))
        self._instances = {**self._instances, binding.type: instance}

    def _refuse_when_closed(self, kind: type[Any]) -> None:
        if self._context._closed:
            raise ResourceError(
                f"The resource context is closed, so there is no {_name(kind)}; "
                "open the registry again"
            )
        if self._closed:
            raise ResourceError(f"The tool call has ended, so there is no {_name(kind)} for it")


class ResourceContext(_Lifetime):
    """The opened registry: makes what is asked for, and closes it in the end.

    Safe to share between threads. It can be used in one ``with`` block, or without one until
    ``close`` is called.
    """

    def __init__(self, registry: ResourceRegistry) -> None:
        self.registry = registry
        self._context = self
        self._bindings = registry.bindings
        self._entered = False
        self._to_close = {}
        for binding in registry.bindings.values():
            if isinstance(binding.provider, Ready):
                self._keep(binding, binding.provider.value, is_new=False)

        # The participants, and what calls need to know of them: found once for many calls.
        self._sorted: tuple[_Participants, _Participants, tuple[Gate, ...]] = ((), (), ())
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        # Which thread makes what, and what a thread waits for.
        self._builders: dict[tuple[_Lifetime, type[Any]], int] = {}
        self._waiting: dict[int, tuple[_Lifetime, type[Any]]] = {}

    @property
    def in_place(self) -> _Participants:
        """Those of the ``participants`` that cannot fork, so that calls change them in place."""
        return self._by_kind()[1]

    @property
    def gates(self) -> tuple[Gate, ...]:
        """The locks of resources that one call at a time can work on, whatever its session."""
        return self._by_kind()[2]

    def _by_kind(self) -> tuple[_Participants, _Participants, tuple[Gate, ...]]:
        participants = self._participants
        if self._sorted[0] is not participants:
            in_place = tuple(each for each in participants if each[1].in_place)
            found = (participant.gate for _, participant in participants)
            # In one order everywhere, so that no two calls wait for each other.
            gates = sorted((gate for gate in found if gate is not None), key=id)
            self._sorted = (participants, in_place, tuple(gates))
        return self._sorted

    def built(self, kind: type[T]) -> T | None:
        """Return the singleton for ``kind`` if it has been made, without making anything."""
        return self._instances.get(kind)

    def tool_scope(self, watcher: Watcher | None = None) -> ToolScope:
        """Return what one tool call asks for its resources; use it in a ``with`` block.

        ``watcher`` hears of all that is built through the scope, singletons too.
        """
        return ToolScope(self, watcher)

    def __enter__(self) -> ResourceContext:
        if self._closed or self._entered:
            state = "closed" if self._closed else "in use in a `with` block"
            raise ResourceError(f"This resource context is {state}; open the registry again")
        self._entered = True
        return self

    def _refuse_deadlock(self, place: tuple[_Lifetime, type[Any]], chain: Chain) -> None:
        """Raise when ``place`` is being made by a thread that, in the end, waits for this one."""
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
        self._context = context
        self._watcher = watcher

    @property
    def participants(self) -> _Participants:
        """The context's live instances that take part in transactions, then the call's own."""
        return (*self._context._participants, *self._participants)

    def watch(self, watcher: Watcher) -> tuple[tuple[str, Snapshotable], ...]:
        """Like the context's ``watch``, for what is built in this call or in the context."""
        with self._context._lock:
            self._context.watch(watcher)
            return super().watch(watcher)

    def __enter__(self) -> ToolScope:
        if self._closed:
            raise ResourceError("This tool scope has ended; each call gets its own")
        return self


class _Resolver:
    """What a provider is called with: it knows the chain, and what it has given out."""

    __slots__ = ("_chain", "_given", "_lifetime", "_watcher")

    def __init__(self, lifetime: _Lifetime, chain: Chain, watcher: Watcher | None) -> None:
        self._lifetime = lifetime
        self._chain = chain
        self._watcher = watcher
        self._given: list[object] = []

    def get(self, kind: type[T]) -> T:
        if not self._chain:
            return self._lifetime.get(kind)
        instance = self._lifetime._there(kind)
        if instance is None:
            instance = self._lifetime._resolve(kind, self._chain, self._watcher)
        self._given.append(instance)
        return instance

    def find(self, kind: type[T]) -> T | None:
        return self.get(kind) if kind in self._lifetime._context._bindings else None

    def gave(self, instance: object) -> bool:
        return any(given is instance for given in self._given)

    def finish(self) -> None:
        """The instance is made: who kept the resolver asks in nobody's name from here on."""
        self._chain = ()
        self._given.clear()


_NO_BINDINGS = ResourceRegistry.of()


def as_resolver(resources: object) -> Resolver:
    """Open a ResourceRegistry or a plain mapping; return what is open already as it is."""
    if hasattr(resources, "find"):  # first, because it is the case on every call
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
    """Return the bound method, or None; a class bound as a resource has no methods to call."""
    if isinstance(instance, type):
        return None
    method = getattr(instance, name, None)
    return method if callable(method) else None


def _close_all(instances: Iterable[Any], error: BaseException | None) -> None:
    """Close each of them, whatever happens, and raise what went wrong unless it is ``error``."""
    failures: list[tuple[str, BaseException]] = []
    for instance in instances:
        try:
            instance.close()
        except BaseException as failure:  # the others must be closed all the same
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
    """Turn what a provider raises into a ProviderFailed that prints the chain."""
    try:
        yield
    except (ResourceError, PromptEvaluationError, VisibilityExpansionRequired):
        # A dependency failed and its error names the whole chain, or the run is to stop here.
        raise
    except Exception as error:
        if isinstance(error, Suspended):
            raise
        raise ProviderFailed(
            f"{_arrows(*chain)}: {culprit} raised {type(error).__name__}: {error}"
        ) from error


# Wording.


def _name(kind: object) -> str:
    return getattr(kind, "__name__", None) or repr(kind)


def _arrows(*chain: object) -> str:
    return " -> ".join(_name(kind) for kind in chain)


def _unbound(kind: object, chain: Chain, bindings: Mapping[type[Any], Any]) -> str:
    name = _name(kind)
    needed = f" (needed by {_arrows(*chain, kind)})" if chain else ""
    bound = ", ".join(sorted(_name(each) for each in bindings)) or "nothing"
    namesakes = [each for each in bindings if _name(each) == name]
    hint = (
        f"What is bound is another {name}: {namesakes[0].__module__}.{namesakes[0].__qualname__}"
        if namesakes
        else f"Bind it with resources={{{name}: ...}} or Binding({name}, lambda r: ...)"
    )
    return f"{name} is not bound{needed}. Bound here: {bound}. {hint}."


def _needs_tool_call(kind: type[Any], chain: Chain, bindings: Mapping[type[Any], Any]) -> str:
    name = _name(kind)
    keepers = [each for each in chain if bindings[each].scope is Scope.SINGLETON]
    if not keepers:
        asked = f" ({_arrows(*chain, kind)})" if chain else ""
        return (
            f"{name} lives for one tool call, and this is outside a tool call{asked}. "
            "Ask for it through context.resources in a handler, or inside `with ctx.tool_scope()`."
        )
    keeper = _name(keepers[-1])
    return (
        f"{keeper} is a singleton and would outlive {name}, which lives for one tool call "
        f"({_arrows(*chain, kind)}). Bind {keeper} with Scope.TOOL_CALL too, "
        f"or ask for {name} in the handler."
    )
