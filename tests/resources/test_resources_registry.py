"""Bindings and registries: what may be bound, and what a registry says about it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import FrozenInstanceError, dataclass
from typing import Any, Protocol

import pytest

import weakincentives.resources
from weakincentives.errors import ResourceError
from weakincentives.resources import Binding, ResourceRegistry, Scope


class Config:
    pass


class OtherConfig(Config):
    pass


class Client:
    def __init__(self, config: Config) -> None:
        self.config = config


def test_exports_are_complete_and_sorted():
    exported = weakincentives.resources.__all__

    assert exported == sorted(exported)
    assert all(hasattr(weakincentives.resources, name) for name in exported)


def test_binding_is_a_singleton_unless_told_otherwise():
    assert Binding(Config, lambda r: Config()).scope is Scope.SINGLETON


def test_binding_can_be_subscripted():
    assert Binding[Config](Config, lambda r: Config()).type is Config


def test_binding_is_frozen():
    binding = Binding(Config, lambda r: Config())

    with pytest.raises(FrozenInstanceError):
        binding.scope = Scope.PROTOTYPE  # type: ignore[misc]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Binding("Config", lambda r: Config()), "'Config' is not a class"),  # type: ignore[arg-type]
        (lambda: Binding(Config, Config()), "provider of Config must be callable"),  # type: ignore[arg-type]
        (lambda: Binding(Config, lambda r: Config(), "singleton"), "must be a Scope"),  # type: ignore[arg-type]
        (lambda: Binding.instance("Config", Config()), "'Config' is not a class"),  # type: ignore[arg-type]
        (lambda: Binding.instance(Config, None), "bound to None"),  # type: ignore[arg-type]
        (lambda: ResourceRegistry.of(Config()), "Expected a Binding"),  # type: ignore[arg-type]
        (lambda: ResourceRegistry({Config: Config()}), "Expected a Binding"),  # type: ignore[dict-item]
        (lambda: ResourceRegistry.build({"config": Config()}), "'config' is not a class"),  # type: ignore[dict-item]
        (lambda: ResourceRegistry.build({list[int]: []}), "is not a class"),  # type: ignore[dict-item]
        (lambda: ResourceRegistry.build([Config()]), "got list"),  # type: ignore[arg-type]
        (lambda: ResourceRegistry.build({Config: None}), "bound to None"),
        (lambda: ResourceRegistry.build({Config: OtherConfig}), "the class OtherConfig"),
        (lambda: ResourceRegistry.build({Config: lambda r: Config()}), "bound to a function"),
    ],
)
def test_what_cannot_be_meant_is_refused(make: Callable[[], object], words: str):
    with pytest.raises(ResourceError, match=words):
        make()


def test_async_provider_is_refused():
    async def provide(resolver: object) -> Config:
        return Config()

    with pytest.raises(ResourceError, match="is async"):
        Binding(Config, provide)  # type: ignore[arg-type]


def test_function_is_fine_for_a_type_that_is_called():
    class Embed(Protocol):
        def __call__(self, text: str) -> list[float]: ...

    def embed(text: str) -> list[float]:
        return [float(len(text))]

    assert ResourceRegistry.build({Embed: embed}).open().get(Embed)("abc") == [3.0]


def test_type_bound_twice_is_refused():
    binding = Binding(Config, lambda r: Config())

    with pytest.raises(ResourceError, match="Config is bound twice"):
        ResourceRegistry.of(binding, binding)


def test_registry_tells_what_it_holds():
    registry = ResourceRegistry.of(
        Binding(Config, lambda r: Config()), Binding(Client, lambda r: Client(r.get(Config)))
    )

    assert Config in registry
    assert OtherConfig not in registry
    assert list(registry) == [Config, Client]
    assert repr(registry) == "ResourceRegistry(Config, Client)"


def test_registry_cannot_be_changed():
    source: dict[type[Any], Any] = {Config: Config()}
    registry = ResourceRegistry.build(source)
    source[Client] = Client(Config())

    assert list(registry) == [Config]
    with pytest.raises(TypeError):
        registry.bindings[Client] = Binding(Client, lambda r: Client(Config()))  # type: ignore[index]
    with pytest.raises(AttributeError):
        registry.other = 1  # type: ignore[attr-defined]


def test_build_takes_instances_and_bindings():
    config = Config()
    registry = ResourceRegistry.build(
        {Config: config, Client: Binding(Client, lambda r: Client(r.get(Config)))}
    )

    assert registry.open().get(Client).config is config


def test_build_gives_a_registry_back_as_it_is():
    registry = ResourceRegistry.of()

    assert ResourceRegistry.build(registry) is registry


def test_key_wins_over_the_type_of_its_binding():
    registry = ResourceRegistry.build({Config: Binding(OtherConfig, lambda r: OtherConfig())})

    assert OtherConfig not in registry
    assert isinstance(registry.open().get(Config), OtherConfig)


def test_merge_prefers_the_other():
    first, second, extra = Config(), Config(), Client(Config())
    mine = ResourceRegistry.build({Config: first})
    merged = mine.merge(ResourceRegistry.build({Config: second, Client: extra}))

    assert merged.open().get(Config) is second
    assert merged.open().get(Client) is extra
    assert mine.open().get(Config) is first


def test_merge_takes_a_plain_mapping():
    config = Config()

    assert ResourceRegistry.of().merge({Config: config}).open().get(Config) is config


def test_dependency_injection_example_of_the_chapter_runs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("API_KEY", "secret")
    monkeypatch.setenv("BASE_URL", "https://api.example.com")
    closed: list[str] = []

    @dataclass(slots=True, frozen=True)
    class Config:
        api_key: str
        base_url: str

        @staticmethod
        def from_env() -> Config:
            return Config(api_key=os.environ["API_KEY"], base_url=os.environ["BASE_URL"])

    class HTTPClient:
        def __init__(self, config: Config):
            self.base_url = config.base_url
            self.headers = {"Authorization": f"Bearer {config.api_key}"}

        def close(self) -> None:
            closed.append("http")

    class Tracer:
        def __init__(self) -> None:
            self.spans: list[str] = []

        def record(self, operation: str) -> None:
            self.spans.append(operation)

    registry = ResourceRegistry.of(
        Binding(Config, lambda r: Config.from_env()),
        Binding(HTTPClient, lambda r: HTTPClient(r.get(Config))),
        Binding(Tracer, lambda r: Tracer(), scope=Scope.TOOL_CALL),
    )

    with registry.open() as ctx:
        http = ctx.get(HTTPClient)
        with ctx.tool_scope() as tool_resolver:
            tracer = tool_resolver.get(Tracer)
            tracer.record("search_started")
        with ctx.tool_scope() as tool_resolver:
            assert tool_resolver.get(Tracer) is not tracer
            assert tool_resolver.get(HTTPClient) is http
        assert closed == []

    assert http.headers == {"Authorization": "Bearer secret"}
    assert closed == ["http"]
