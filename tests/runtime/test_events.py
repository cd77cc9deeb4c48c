"""The bus carries what the runtime records to whoever subscribed."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from weakincentives import Tool, ToolContext, ToolResult
from weakincentives.runtime import Dispatcher, Session, ToolInvoked


class Animal: ...


class Dog(Animal): ...


@pytest.fixture
def bus() -> Dispatcher:
    return Dispatcher()


class TestPublishing:
    def test_subscribers_get_events_of_their_type_and_its_subtypes(self, bus: Dispatcher) -> None:
        animals: list[Animal] = []
        dogs: list[Dog] = []
        bus.subscribe(Animal, animals.append)
        bus.subscribe(Dog, dogs.append)
        animal, dog = Animal(), Dog()

        for event in (animal, dog, "neither"):
            bus.publish(event)

        assert animals == [animal, dog]
        assert dogs == [dog]

    def test_the_most_specific_type_hears_first_then_in_order_of_subscription(
        self, bus: Dispatcher
    ) -> None:
        heard: list[str] = []
        bus.subscribe(Animal, lambda _: heard.append("animal 1"))
        bus.subscribe(Dog, lambda _: heard.append("dog 1"))
        bus.subscribe(Dog, lambda _: heard.append("dog 2"))
        bus.subscribe(Animal, lambda _: heard.append("animal 2"))

        bus.publish(Dog())

        assert heard == ["dog 1", "dog 2", "animal 1", "animal 2"]

    def test_a_subscriber_that_fails_is_logged_and_the_others_hear_all_the_same(
        self, bus: Dispatcher, caplog: pytest.LogCaptureFixture
    ) -> None:
        heard: list[Animal] = []

        def fails(_: Animal) -> None:
            raise ValueError("cannot listen")

        bus.subscribe(Animal, fails)
        bus.subscribe(Animal, heard.append)

        bus.publish(Dog())

        assert len(heard) == 1
        assert "fails" in caplog.text
        assert "failed on Dog" in caplog.text
        assert "cannot listen" in caplog.text

    def test_an_interrupt_in_a_subscriber_passes(self, bus: Dispatcher) -> None:
        def interrupt(_: str) -> None:
            raise KeyboardInterrupt

        bus.subscribe(str, interrupt)

        with pytest.raises(KeyboardInterrupt):
            bus.publish("hello")

    def test_publishing_without_subscribers_does_nothing(self, bus: Dispatcher) -> None:
        bus.publish("hello")


class TestSubscribing:
    def test_unsubscribing_ends_it_and_may_be_done_again(self, bus: Dispatcher) -> None:
        heard: list[str] = []
        unsubscribe = bus.subscribe(str, heard.append)
        bus.publish("a")

        unsubscribe()
        unsubscribe()
        bus.publish("b")

        assert heard == ["a"]

    def test_one_function_may_subscribe_twice_and_stop_once(self, bus: Dispatcher) -> None:
        heard: list[str] = []
        listen = heard.append
        first = bus.subscribe(str, listen)
        bus.subscribe(str, listen)
        bus.publish("a")

        first()
        first()
        bus.publish("b")

        assert heard == ["a", "a", "b"]

    def test_subscribing_while_events_are_published_counts_from_the_next_one(
        self, bus: Dispatcher
    ) -> None:
        heard: list[str] = []

        def listen(event: str) -> None:
            stop()
            bus.subscribe(str, heard.append)

        stop = bus.subscribe(str, listen)
        bus.publish("a")
        bus.publish("b")

        assert heard == ["b"]

    def test_an_async_subscriber_is_refused(self, bus: Dispatcher) -> None:
        async def listen(event: str) -> None: ...

        with pytest.raises(TypeError, match="must not be async"):
            bus.subscribe(str, listen)

    def test_subscribers_from_many_threads_are_all_there(self, bus: Dispatcher) -> None:
        heard: list[str] = []
        with ThreadPoolExecutor(8) as pool:
            stops = list(pool.map(lambda _: bus.subscribe(str, heard.append), range(100)))
        bus.publish("a")
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda stop: stop(), stops))
        bus.publish("b")

        assert heard == ["a"] * 100


@dataclass(frozen=True)
class Params:
    fail: bool = False


def handler(params: Params, *, context: ToolContext) -> ToolResult[None]:
    context.session.dispatcher.publish("from a handler")
    return ToolResult.error("no") if params.fail else ToolResult.ok()


TOOL = Tool[Params, None](name="work", description="Work.", handler=handler)


class TestOfCalls:
    def test_every_call_is_published_once_however_it_ended(self) -> None:
        session = Session()
        heard: list[ToolInvoked] = []
        session.dispatcher.subscribe(ToolInvoked, heard.append)

        for params in ({}, {"fail": True}, {"wrong": 1}):
            TOOL(params, context=ToolContext(session=session))

        assert [event.success for event in heard] == [True, False, False]
        assert tuple(heard) == session[ToolInvoked].all()

    def test_a_handler_may_publish(self) -> None:
        session = Session()
        heard: list[str] = []
        session.dispatcher.subscribe(str, heard.append)

        TOOL(Params(), context=ToolContext(session=session))

        assert heard == ["from a handler"]

    def test_a_failing_subscriber_does_not_fail_the_call_and_its_log_line_names_the_call(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        def fails(_: ToolInvoked) -> None:
            raise ValueError("cannot listen")

        session = Session()
        session.dispatcher.subscribe(ToolInvoked, fails)

        with caplog.at_level(logging.ERROR):
            result = TOOL(Params(), context=ToolContext(session=session))

        assert result.success
        [record] = [r for r in caplog.records if "failed on ToolInvoked" in r.getMessage()]
        assert record.__dict__["call_id"] == result.call_id
        assert record.__dict__["tool"] == "work"
