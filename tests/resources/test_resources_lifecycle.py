"""Scopes, failures, closing, threads, and who hears of what is built."""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest

from weakincentives.errors import (
    CircularDependency,
    DeadlineExceededError,
    ProviderFailed,
    ResourceError,
    UnboundResource,
)
from weakincentives.resources import (
    Binding,
    Resolver,
    ResourceRegistry,
    Scope,
    Snapshotable,
    ToolScope,
)

LOGGER = "weakincentives.resources"


class Config:
    pass


class Client:
    def __init__(self, config: object = None) -> None:
        self.config = config


class Tracer:
    pass


@dataclass(eq=False)
class Closing:
    """Writes down its name when it is closed."""

    closed: list[str]
    name: str
    error: BaseException | None = None

    def close(self) -> None:
        self.closed.append(self.name)
        if self.error is not None:
            raise self.error


class First(Closing):
    pass


class Second(Closing):
    pass


class Third(Closing):
    pass


class Counter:
    """Takes part in transactions."""

    def __init__(self) -> None:
        self.value = 0

    def post_construct(self) -> None:
        self.value = 10

    def snapshot(self) -> int:
        return self.value

    def restore(self, token: int) -> None:
        self.value = token


class Ledger(Counter):
    pass


@dataclass  # equal to every other one that heard nothing, as snapshots may be
class Heard:
    names: list[str] = field(default_factory=list)
    tokens: list[object] = field(default_factory=list)

    def built(self, name: str, instance: Snapshotable) -> None:
        self.names.append(name)
        self.tokens.append(instance.snapshot())


def make(kind: type[Any], provider: Callable[[Resolver], Any], scope: Scope = Scope.SINGLETON):
    return Binding[Any](kind, provider, scope)


# Scopes.


def test_singleton_is_made_when_first_asked_for_and_then_shared():
    made: list[int] = []
    ctx = ResourceRegistry.of(make(Config, lambda r: made.append(1) or Config())).open()
    assert made == []

    first = ctx.get(Config)
    with ctx.tool_scope() as scope:
        assert scope.get(Config) is first
    assert ctx.get(Config) is first
    assert made == [1]


def test_singleton_first_made_in_a_tool_call_outlives_it():
    ctx = ResourceRegistry.of(make(Config, lambda r: Config())).open()
    with ctx.tool_scope() as scope:
        config = scope.get(Config)

    assert ctx.get(Config) is config


def test_two_contexts_of_one_registry_share_nothing_they_make():
    registry = ResourceRegistry.of(make(Config, lambda r: Config()))

    assert registry.open().get(Config) is not registry.open().get(Config)


def test_tool_call_resource_is_shared_within_its_call_only():
    ctx = ResourceRegistry.of(make(Tracer, lambda r: Tracer(), Scope.TOOL_CALL)).open()
    with ctx.tool_scope() as one, ctx.tool_scope() as two:
        assert one.get(Tracer) is one.get(Tracer)
        assert one.get(Tracer) is not two.get(Tracer)


def test_prototype_is_fresh_each_time():
    ctx = ResourceRegistry.of(make(Config, lambda r: Config(), Scope.PROTOTYPE)).open()
    with ctx.tool_scope() as scope:
        assert len({ctx.get(Config), ctx.get(Config), scope.get(Config), scope.get(Config)}) == 4


def test_falsy_instance_is_an_instance():
    made: list[int] = []
    ctx = ResourceRegistry.of(
        make(list, lambda r: made.append(1) or []), make(Client, lambda r: Client(r.get(list)))
    ).open()

    assert ctx.get(Client).config is ctx.get(list)
    assert made == [1]


def test_provider_resolves_in_the_scope_it_is_asked_in():
    ctx = ResourceRegistry.of(
        make(Tracer, lambda r: Tracer(), Scope.TOOL_CALL),
        make(Client, lambda r: Client(r.get(Tracer)), Scope.TOOL_CALL),
        make(Config, lambda r: Client(r.get(Tracer)), Scope.PROTOTYPE),
    ).open()
    with ctx.tool_scope() as scope:
        assert scope.get(Client).config is scope.get(Tracer)
        assert scope.get(Config).config is scope.get(Tracer)


def test_tool_call_resource_outside_a_tool_call_says_so():
    ctx = ResourceRegistry.of(
        make(Tracer, lambda r: Tracer(), Scope.TOOL_CALL),
        make(Client, lambda r: Client(r.get(Tracer)), Scope.PROTOTYPE),
    ).open()

    with pytest.raises(UnboundResource, match="outside a tool call"):
        ctx.get(Tracer)
    with pytest.raises(UnboundResource, match="outside a tool call"):
        ctx.find(Tracer)
    with pytest.raises(UnboundResource, match=r"outside a tool call \(Client -> Tracer\)"):
        ctx.get(Client)


def test_singleton_cannot_hold_on_to_a_tool_call_resource():
    ctx = ResourceRegistry.of(
        make(Tracer, lambda r: Tracer(), Scope.TOOL_CALL),
        make(Client, lambda r: Client(r.get(Tracer))),
    ).open()
    with (
        ctx.tool_scope() as scope,
        pytest.raises(UnboundResource, match=r"would outlive Tracer.*Client -> Tracer"),
    ):
        scope.get(Client)


# Asking.


def test_find_returns_none_only_for_what_is_not_bound():
    def fail(resolver: Resolver) -> Config:
        raise OSError("no such host")

    ctx = ResourceRegistry.of(make(Config, fail), make(Client, lambda r: r.find(Tracer))).open()
    with ctx.tool_scope() as scope:
        assert ctx.find(Tracer) is None
        assert scope.find(Tracer) is None
        for resolver in (ctx, scope):
            with pytest.raises(ProviderFailed):
                resolver.find(Config)


def test_find_inside_a_provider_serves_optional_dependencies():
    bindings = (make(Client, lambda r: Client(r.find(Config))),)

    assert ResourceRegistry.of(*bindings).open().get(Client).config is None
    config = Config()
    both = ResourceRegistry.of(*bindings).merge({Config: config})
    assert both.open().get(Client).config is config


def test_unbound_resource_says_what_is_bound_and_what_to_do():
    ctx = ResourceRegistry.of(
        make(Config, lambda r: Config()), make(Client, lambda r: Client(r.get(Tracer)))
    ).open()

    with pytest.raises(UnboundResource) as caught:
        ctx.get(Client)
    assert str(caught.value) == (
        "Tracer is not bound (needed by Client -> Tracer). Bound here: Client, Config. "
        "Bind it with resources={Tracer: ...} or Binding(Tracer, lambda r: ...)."
    )
    with pytest.raises(UnboundResource, match=r"^Tracer is not bound\. Bound here"):
        ctx.get(Tracer)
    with pytest.raises(LookupError, match="'Config' is not bound"):
        ctx.get("Config")  # type: ignore[arg-type]


# Failures.


@pytest.mark.parametrize("scope", list(Scope))
def test_cycle_is_refused_with_its_chain(scope: Scope):
    ctx = ResourceRegistry.of(
        make(Client, lambda r: Client(r.get(Config)), scope),
        make(Config, lambda r: Client(r.get(Client)), scope),
        make(Tracer, lambda r: r.get(Client), scope),
    ).open()
    with ctx.tool_scope() as tool:
        with pytest.raises(CircularDependency, match=r"Client -> Config -> Client$"):
            tool.get(Client)
        with pytest.raises(CircularDependency, match=r"Tracer -> Client -> Config -> Client$"):
            tool.get(Tracer)


def test_cycle_round_the_back_is_refused_too():
    """A provider that uses the context itself, not the resolver it was given."""
    ctx = ResourceRegistry.of(
        make(Client, lambda r: Client(ctx.get(Config))),
        make(Config, lambda r: Client(ctx.get(Client))),
    ).open()

    with pytest.raises(CircularDependency, match="Client"):
        ctx.get(Client)


def test_failed_provider_names_the_chain_and_the_cause():
    def fail(resolver: Resolver) -> Config:
        raise KeyError("API_KEY")

    ctx = ResourceRegistry.of(
        make(Config, fail), make(Client, lambda r: Client(r.get(Config)))
    ).open()

    with pytest.raises(ProviderFailed, match="Client -> Config: its provider raised KeyError") as e:
        ctx.get(Client)
    assert isinstance(e.value.__cause__, KeyError)


def test_provider_that_returns_nothing_fails():
    with pytest.raises(ProviderFailed, match="Config: its provider returned None"):
        ResourceRegistry.of(make(Config, lambda r: None)).open().get(Config)


def test_failed_singleton_is_tried_again():
    answers = iter([OSError("down"), Config()])

    def provide(resolver: Resolver) -> object:
        answer = next(answers)
        if isinstance(answer, OSError):
            raise answer
        return answer

    ctx = ResourceRegistry.of(make(Config, provide)).open()
    with pytest.raises(ProviderFailed):
        ctx.get(Config)
    assert isinstance(ctx.get(Config), Config)


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), SystemExit(), DeadlineExceededError("too late")]
)
def test_what_must_stop_the_run_passes_through(error: BaseException):
    def fail(resolver: Resolver) -> Config:
        raise error

    ctx = ResourceRegistry.of(
        make(Config, fail), make(Client, lambda r: Client(r.get(Config)))
    ).open()

    with pytest.raises(type(error)) as caught:
        ctx.get(Client)
    assert caught.value is error


def test_failed_post_construct_closes_the_half_made_instance():
    closed: list[str] = []

    class Half(Closing):
        def post_construct(self) -> None:
            raise OSError("no route")

    ctx = ResourceRegistry.of(make(Half, lambda r: Half(closed, "half"))).open()
    with pytest.raises(ProviderFailed, match="Half: its post_construct raised OSError") as caught:
        ctx.get(Half)
    ctx.close()

    assert isinstance(caught.value.__cause__, OSError)
    assert closed == ["half"]


def test_failing_close_of_a_half_made_instance_is_noted(caplog: pytest.LogCaptureFixture):
    class Half(Closing):
        def post_construct(self) -> None:
            raise OSError("no route")

    ctx = ResourceRegistry.of(make(Half, lambda r: Half([], "half", ValueError("jammed")))).open()
    with pytest.raises(ProviderFailed) as caught:
        ctx.get(Half)

    assert caught.value.__notes__ == ["Closing Half failed too: ValueError: jammed"]
    assert "Closing Half failed" in caplog.text


# Closing.


def test_post_construct_runs_once_before_anyone_gets_the_instance():
    ctx = ResourceRegistry.of(
        make(Counter, lambda r: Counter()), make(Client, lambda r: Client(r.get(Counter).value))
    ).open()

    assert ctx.get(Client).config == 10
    ctx.get(Counter).value = 11
    assert ctx.get(Counter).value == 11


def test_resources_are_closed_in_reverse_order_of_construction():
    closed: list[str] = []

    def second(resolver: Resolver) -> Second:
        resolver.get(Third)
        return Second(closed, "second")

    registry = ResourceRegistry.of(
        make(First, lambda r: First(closed, "first")),
        make(Second, second),
        make(Third, lambda r: Third(closed, "third")),
    )
    with registry.open() as ctx:
        ctx.get(Second)
        ctx.get(First)

    assert closed == ["first", "second", "third"]


def test_each_lifetime_closes_its_own():
    closed: list[str] = []
    registry = ResourceRegistry.of(
        make(First, lambda r: First(closed, "singleton")),
        make(Second, lambda r: Second(closed, "tool call"), Scope.TOOL_CALL),
        make(Third, lambda r: Third(closed, "prototype"), Scope.PROTOTYPE),
    )
    with registry.open() as ctx:
        ctx.get(Third)
        with ctx.tool_scope() as scope:
            scope.get(First)
            scope.get(Second)
            scope.get(Third)
        assert closed == ["prototype", "tool call"]

    assert closed == ["prototype", "tool call", "singleton", "prototype"]


def test_what_was_never_asked_for_is_never_made_nor_closed():
    closed: list[str] = []
    with ResourceRegistry.of(make(First, lambda r: First(closed, "first"))).open():
        pass

    assert closed == []


def test_ready_made_instance_is_left_to_its_maker():
    class Ready(Closing):
        def post_construct(self) -> None:
            raise AssertionError("it was constructed long ago")

    closed: list[str] = []
    ready = Ready(closed, "ready")
    registry = ResourceRegistry.of(
        Binding.instance(Ready, ready), make(First, lambda r: r.get(Ready))
    )
    with registry.open() as ctx:
        assert ctx.get(Ready) is ready
        assert ctx.get(First) is ready

    assert closed == []


@pytest.mark.parametrize("scope", list(Scope))
def test_alias_is_set_up_and_closed_once_where_it_was_made(scope: Scope):
    """``Binding(Interface, lambda r: r.get(Implementation))`` makes nothing."""

    class Implementation(Closing):
        def post_construct(self) -> None:
            closed.append("set up")

    closed: list[str] = []
    with ResourceRegistry.of(
        make(Implementation, lambda r: Implementation(closed, "closed")),
        make(First, lambda r: r.get(Implementation), scope),
    ).open() as ctx:
        with ctx.tool_scope() as tool:
            assert tool.get(First) is tool.get(Implementation)
        assert closed == ["set up"]

    assert closed == ["set up", "closed"]


def test_alias_of_a_prototype_is_set_up_once():
    ups: list[int] = []

    class Fresh:
        def post_construct(self) -> None:
            ups.append(1)

    ctx = ResourceRegistry.of(
        make(Fresh, lambda r: Fresh(), Scope.PROTOTYPE), make(Client, lambda r: r.get(Fresh))
    ).open()
    ctx.get(Client)

    assert ups == [1]


def test_object_shared_by_two_providers_is_closed_once():
    closed: list[str] = []
    shared = First(closed, "shared")
    with ResourceRegistry.of(
        make(First, lambda r: shared), make(Second, lambda r: shared)
    ).open() as c:
        c.get(First)
        c.get(Second)

    assert closed == ["shared"]


def test_class_bound_as_a_resource_is_not_closed():
    with ResourceRegistry.of(make(type, lambda r: First)).open() as ctx:
        assert ctx.get(type) is First


def test_first_close_error_is_raised_after_all_were_closed(caplog: pytest.LogCaptureFixture):
    closed: list[str] = []
    registry = ResourceRegistry.of(
        make(First, lambda r: First(closed, "first", ValueError("one"))),
        make(Second, lambda r: Second(closed, "second", ValueError("two"))),
        make(Third, lambda r: Third(closed, "third")),
    )
    ctx = registry.open()
    for kind in (First, Second, Third):
        ctx.get(kind)
    with caplog.at_level(logging.ERROR, LOGGER), pytest.raises(ValueError, match="two") as caught:
        ctx.close()

    assert closed == ["third", "second", "first"]
    assert caught.value.__notes__ == ["Closing First failed too: ValueError: one"]
    assert [record.message for record in caplog.records] == ["Closing First failed"]


@pytest.mark.parametrize("lifetime", ["context", "tool call"])
def test_close_error_never_hides_an_earlier_one(lifetime: str, caplog: pytest.LogCaptureFixture):
    scope = Scope.SINGLETON if lifetime == "context" else Scope.TOOL_CALL
    registry = ResourceRegistry.of(
        make(First, lambda r: First([], "first", ValueError("jammed")), scope)
    )

    def body() -> None:
        with registry.open() as ctx, ctx.tool_scope() as tool:
            tool.get(First)
            raise KeyError("the body")

    with pytest.raises(KeyError, match="the body") as caught:
        body()
    assert caught.value.__notes__ == ["Closing First failed too: ValueError: jammed"]
    assert "jammed" in caplog.text


def test_interrupt_while_closing_is_raised_when_the_rest_is_closed():
    closed: list[str] = []
    registry = ResourceRegistry.of(
        make(First, lambda r: First(closed, "first")),
        make(Second, lambda r: Second(closed, "second", KeyboardInterrupt())),
    )

    def body() -> None:
        with registry.open() as ctx:
            ctx.get(First)
            ctx.get(Second)
            raise ValueError("the body")

    with pytest.raises(KeyboardInterrupt):
        body()
    assert closed == ["second", "first"]


def test_context_works_without_a_with_block():
    closed: list[str] = []
    ctx = ResourceRegistry.of(make(First, lambda r: First(closed, "first"))).open()
    ctx.get(First)
    ctx.close()
    ctx.close()

    assert closed == ["first"]


def test_closed_context_gives_nothing():
    ctx = ResourceRegistry.of(
        make(Config, lambda r: Config()), make(Tracer, lambda r: Tracer())
    ).open()
    ctx.get(Config)
    scope = ctx.tool_scope()
    ctx.close()

    for resolver in (ctx, scope):
        for kind in (Config, Tracer):
            with pytest.raises(ResourceError, match="open the registry again"):
                resolver.get(kind)
    assert ctx.snapshotables == ()


def test_context_is_entered_once():
    ctx = ResourceRegistry.of().open()
    with ctx, pytest.raises(ResourceError, match=r"in use .* open the registry again"), ctx:
        pass
    with pytest.raises(ResourceError, match=r"closed; open the registry again"), ctx:
        pass


def test_ended_tool_call_gives_nothing():
    closed: list[str] = []
    ctx = ResourceRegistry.of(
        make(Config, lambda r: Config()),
        make(First, lambda r: First(closed, "first"), Scope.TOOL_CALL),
        make(Client, lambda r: Client(), Scope.PROTOTYPE),
    ).open()
    ctx.get(Config)
    for use in (Config, First, Client):
        with ctx.tool_scope() as scope:
            if use is First:
                scope.get(First)
        for kind in (Config, First, Client):
            with pytest.raises(ResourceError, match="tool call has ended"):
                scope.get(kind)
    with pytest.raises(ResourceError, match="each call gets its own"), scope:
        pass

    assert closed == ["first"]


def test_resolver_that_was_kept_goes_on_working():
    """A factory may keep it; it asks in its own scope, and sees no cycle where there is none."""

    class Factory:
        def __init__(self, resolver: Resolver) -> None:
            self.resolver = resolver

    ctx = ResourceRegistry.of(
        make(Factory, lambda r: Factory(r), Scope.PROTOTYPE),
        make(Tracer, lambda r: Tracer(), Scope.TOOL_CALL),
        make(Client, lambda r: Factory(r)),
    ).open()
    with ctx.tool_scope() as scope:
        factory = scope.get(Factory)
        assert isinstance(factory.resolver.get(Factory), Factory)
        assert factory.resolver.get(Tracer) is scope.get(Tracer)
        keeper = scope.get(Client)
        with pytest.raises(UnboundResource, match="outside a tool call"):
            keeper.resolver.get(Tracer)
    with pytest.raises(ResourceError, match="has ended"):
        factory.resolver.get(Tracer)


# Threads.


def in_threads(*jobs: Callable[[], object]) -> list[object]:
    """Run all at once; return what each returned or raised."""

    def run(job: Callable[[], object]) -> object:
        barrier.wait(120)
        try:
            return job()
        except Exception as error:
            return error

    barrier = threading.Barrier(len(jobs))
    with ThreadPoolExecutor(len(jobs)) as pool:
        return [each.result(120) for each in [pool.submit(run, job) for job in jobs]]


@pytest.mark.parametrize("scope", [Scope.SINGLETON, Scope.TOOL_CALL])
def test_four_threads_get_one_instance(scope: Scope):
    made: list[int] = []

    def provide(resolver: Resolver) -> Config:
        made.append(1)
        time.sleep(0.02)
        return Config()

    with ResourceRegistry.of(make(Config, provide, scope)).open().tool_scope() as tool:
        got = in_threads(*[lambda: tool.get(Config)] * 4)

    assert made == [1]
    assert len(set(got)) == 1


def test_threads_that_waited_for_a_failed_provider_try_themselves():
    tries: list[int] = []

    def provide(resolver: Resolver) -> Config:
        tries.append(1)
        first = len(tries) == 1
        time.sleep(0.02)
        if first:
            raise OSError("down")
        return Config()

    ctx = ResourceRegistry.of(make(Config, provide)).open()
    got = in_threads(*[lambda: ctx.get(Config)] * 4)

    assert len(tries) == 2
    assert sum(isinstance(each, ProviderFailed) for each in got) == 1
    assert len({each for each in got if isinstance(each, Config)}) == 1


def test_slow_provider_does_not_hold_up_others():
    started, release = threading.Event(), threading.Event()

    def slow(resolver: Resolver) -> Config:
        started.set()
        assert release.wait(120)
        return Config()

    ctx = ResourceRegistry.of(make(Config, slow), make(Tracer, lambda r: Tracer())).open()
    thread = threading.Thread(target=lambda: ctx.get(Config))
    thread.start()
    assert started.wait(120)
    assert isinstance(ctx.get(Tracer), Tracer)
    release.set()
    thread.join(120)
    assert not thread.is_alive()


def test_provider_may_resolve_in_a_thread_of_its_own():
    def provide(resolver: Resolver) -> Client:
        with ThreadPoolExecutor(1) as pool:
            return Client(pool.submit(resolver.get, Config).result(120))

    ctx = ResourceRegistry.of(make(Client, provide), make(Config, lambda r: Config())).open()

    assert ctx.get(Client).config is ctx.get(Config)


def test_cycle_across_two_threads_is_an_error_not_a_deadlock():
    both = threading.Barrier(2)

    def meet(resolver: Resolver, other: type[Any]) -> Client:
        if not both.broken:
            try:
                both.wait(120)
            finally:
                both.abort()
        return Client(resolver.get(other))

    ctx = ResourceRegistry.of(
        make(Config, lambda r: meet(r, Tracer)), make(Tracer, lambda r: meet(r, Config))
    ).open()
    got = in_threads(lambda: ctx.get(Config), lambda: ctx.get(Tracer))

    assert all(isinstance(each, (CircularDependency, ProviderFailed)) for each in got)
    assert any(isinstance(each, CircularDependency) for each in got)


@pytest.mark.parametrize("ends", ["context", "tool call"])
def test_instance_finished_after_its_lifetime_ended_is_closed(ends: str):
    closed: list[str] = []
    started, release = threading.Event(), threading.Event()

    def slow(resolver: Resolver) -> First:
        started.set()
        assert release.wait(120)
        return First(closed, "late")

    ctx = ResourceRegistry.of(
        make(First, slow, Scope.SINGLETON if ends == "context" else Scope.TOOL_CALL)
    ).open()
    scope = ctx.tool_scope()
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(scope.get, First)
        assert started.wait(120)
        (ctx if ends == "context" else scope).close()
        release.set()
        with pytest.raises(ResourceError, match=r"closed|has ended"):
            late.result(120)

    assert closed == ["late"]


# Taking part in transactions.


def test_ready_made_participants_are_known_from_the_start():
    counter = Counter()
    ctx = ResourceRegistry.of(
        Binding.instance(Counter, counter),
        Binding.instance(Config, Config()),
        make(Ledger, lambda r: Ledger()),
    ).open()
    assert ctx.snapshotables == (("Counter", counter),)

    ledger = ctx.get(Ledger)
    assert ctx.snapshotables == (("Counter", counter), ("Ledger", ledger))


def test_participant_under_two_types_is_listed_once():
    shared = Ledger()
    ctx = ResourceRegistry.build(
        {Ledger: shared, Counter: shared, Config: Binding(Ledger, lambda r: r.get(Ledger))}
    ).open()
    ctx.get(Config)

    assert ctx.snapshotables == (("Ledger", shared),)


def test_alias_of_a_prototype_takes_part():
    ctx = ResourceRegistry.of(
        make(Counter, lambda r: Counter(), Scope.PROTOTYPE), make(Ledger, lambda r: r.get(Counter))
    ).open()
    ledger = ctx.get(Ledger)

    assert ctx.snapshotables == (("Ledger", ledger),)


def test_attributes_that_cannot_be_called_do_not_count():
    class Photo:
        snapshot = "photo.png"
        restore = None

    assert ResourceRegistry.build({Photo: Photo()}).open().snapshotables == ()


def test_tool_scope_lists_its_own_participants_too():
    counter = Counter()
    ctx = ResourceRegistry.of(
        Binding.instance(Counter, counter), make(Ledger, lambda r: Ledger(), Scope.TOOL_CALL)
    ).open()
    with ctx.tool_scope() as scope:
        ledger = scope.get(Ledger)
        assert scope.snapshotables == (("Counter", counter), ("Ledger", ledger))
    assert ctx.snapshotables == (("Counter", counter),)


@pytest.mark.parametrize("scope", list(Scope))
def test_watcher_of_a_tool_scope_hears_of_all_that_is_built_through_it(scope: Scope):
    heard = Heard()
    ctx = ResourceRegistry.of(
        make(Config, lambda r: Config()),
        make(Counter, lambda r: Counter(), scope),
        # A dependency of a singleton is built through the scope as well.
        make(Client, lambda r: Client(r.get(Ledger))),
        make(Ledger, lambda r: Ledger()),
    ).open()
    with ToolScope(ctx, heard) as tool:
        tool.get(Config)
        tool.get(Counter)
        tool.get(Client)

    assert heard.names == ["Counter", "Ledger"]
    assert heard.tokens == [10, 10]  # after post_construct


def test_watcher_of_a_tool_scope_hears_nothing_of_other_calls():
    heard = Heard()
    ctx = ResourceRegistry.of(
        make(Counter, lambda r: Counter()), make(Ledger, lambda r: Ledger(), Scope.TOOL_CALL)
    ).open()
    with ctx.tool_scope(heard), ctx.tool_scope() as other:
        other.get(Counter)
        other.get(Ledger)

    assert heard.names == []


def test_watcher_hears_before_anyone_else_gets_the_instance():
    class Changing(Counter):
        def snapshot(self) -> int:
            time.sleep(0.02)
            return super().snapshot()

    def take() -> None:
        changing = ctx.get(Changing)
        changing.value += 1

    heard = Heard()
    ctx = ResourceRegistry.of(make(Changing, lambda r: Changing())).open()
    ctx.watch(heard)
    in_threads(take, take, take, take)

    assert heard.tokens == [10]


def test_watchers_of_a_context_hear_of_singletons_from_any_call():
    one, two = Heard(), Heard()
    ctx = ResourceRegistry.of(
        make(Counter, lambda r: Counter()), make(Ledger, lambda r: Ledger(), Scope.TOOL_CALL)
    ).open()
    assert ctx.watch(one) == ()
    ctx.watch(two)
    with ctx.tool_scope(one) as scope:  # told once, not twice
        scope.get(Counter)

    assert one.names == two.names == ["Counter"]
    assert ctx.watch(Heard()) == (("Counter", ctx.get(Counter)),)


def test_watcher_of_a_call_from_within_hears_of_the_call_and_the_context():
    heard = Heard()
    ctx = ResourceRegistry.of(
        make(Counter, lambda r: Counter()), make(Ledger, lambda r: Ledger(), Scope.TOOL_CALL)
    ).open()
    with ctx.tool_scope() as scope:
        assert scope.watch(heard) == ()
        scope.get(Ledger)
        ctx.get(Counter)

    assert heard.names == ["Ledger", "Counter"]


def test_forgotten_watchers_are_let_go():
    names: list[str] = []
    ctx = ResourceRegistry.of(make(Counter, lambda r: Counter())).open()
    ctx.watch(Heard(names))
    gc.collect()
    ctx.get(Counter)

    assert names == []


def test_watcher_that_cannot_take_its_snapshot_stops_the_construction():
    class Broken(Closing, Counter):
        def snapshot(self) -> int:
            raise OSError("disk full")

    closed: list[str] = []
    heard = Heard()
    ctx = ResourceRegistry.of(make(Broken, lambda r: Broken(closed, "broken"))).open()
    ctx.watch(heard)
    with pytest.raises(OSError, match="disk full"):
        ctx.get(Broken)

    assert closed == ["broken"]
    assert ctx.snapshotables == ()
