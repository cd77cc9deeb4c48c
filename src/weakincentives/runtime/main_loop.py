"""The main loop: prepare a prompt and a session for each request, open resources, run the model."""

from __future__ import annotations

import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, cast

from weakincentives.core.call import RunContext, new_id
from weakincentives.core.logs import get_logger
from weakincentives.prompt.prompt import Prompt, Resources, check_prompt
from weakincentives.runtime.run import RunConfig
from weakincentives.session.events import Dispatcher
from weakincentives.session.session import Session

if TYPE_CHECKING:
    from typing import Unpack

    from weakincentives.core.media import Content
    from weakincentives.runtime.conversation import PromptResponse
    from weakincentives.runtime.run import RunOptions

RequestT = TypeVar("RequestT")
OutT = TypeVar("OutT")

_logger = get_logger(__name__)


class Evaluator(Protocol):
    """The part of an adapter that the loop uses."""

    # With ``message``, though the loop gives none: without it, pyright takes it for one of the
    # options, and rejects every adapter.
    def evaluate(
        self,
        prompt: Prompt[OutT],
        session: Session,
        *,
        message: Content | None = None,
        **options: Unpack[RunOptions],
    ) -> PromptResponse[OutT]: ...

    async def aevaluate(
        self,
        prompt: Prompt[OutT],
        session: Session,
        *,
        message: Content | None = None,
        **options: Unpack[RunOptions],
    ) -> PromptResponse[OutT]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class MainLoopConfig(RunConfig):
    """Settings for every request: the limits of a run, and resources for tools."""

    resources: Resources | None = None
    """Override those of the prompt; resources passed with a request override these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFinished:
    """A request has ended. Published on the loop's bus."""

    request: Any
    session: Session | None
    """None if ``prepare`` failed."""
    response: PromptResponse[Any] | None = None
    error: BaseException | None = None


class MainLoop(ABC, Generic[RequestT, OutT]):
    """Serves requests. A subclass prepares the prompt and the session of each request."""

    def __init__(
        self,
        *,
        adapter: Evaluator,
        bus: Dispatcher | None = None,
        config: MainLoopConfig | None = None,
    ) -> None:
        if isinstance(adapter, type):
            raise TypeError(
                f"a MainLoop takes an adapter, got the class {adapter.__name__}: write "
                f"{adapter.__name__}(...)"
            )
        self.adapter = adapter
        self.bus = Dispatcher() if bus is None else bus
        """Receives the events of the sessions of all requests."""
        self.config = MainLoopConfig() if config is None else config
        self.loop_id = new_id()
        self._requests: SimpleQueue[tuple[RequestT, _Future[OutT]] | None] = SimpleQueue()
        self._stopped = threading.Event()
        self._lock = threading.RLock()  # re-entrant for the signal handler

    @abstractmethod
    def prepare(self, request: RequestT) -> tuple[Prompt[OutT], Session]:
        """Return the prompt for a request, bound to its parameters, and its session."""

    def execute(
        self,
        request: RequestT,
        *,
        resources: Resources | None = None,
        **options: Unpack[RunOptions],
    ) -> tuple[PromptResponse[OutT], Session]:
        """Serve one request and return the answer with the session.

        Resources are opened and closed around it. Options are those of ``adapter.evaluate``;
        a ``config`` replaces the loop's for this request.
        """
        with self._serving(request, resources, options) as (prompt, session, finished):
            response = self.adapter.evaluate(prompt, session, **options)
            finished(response)
        return response, session

    async def aexecute(
        self,
        request: RequestT,
        *,
        resources: Resources | None = None,
        **options: Unpack[RunOptions],
    ) -> tuple[PromptResponse[OutT], Session]:
        """Serve one request on the caller's event loop."""
        with self._serving(request, resources, options) as (prompt, session, finished):
            response = await self.adapter.aevaluate(prompt, session, **options)
            finished(response)
        return response, session

    @contextmanager
    def _serving(
        self, request: RequestT, resources: Resources | None, options: RunOptions
    ) -> Generator[tuple[Prompt[OutT], Session, Callable[[PromptResponse[OutT]], None]]]:
        """Prepare a request, open its resources, and publish how it ended."""
        options.setdefault("config", self.config)
        ids = options.get("run_context") or RunContext()
        options["run_context"] = ids.filled(loop_id=self.loop_id)
        session: Session | None = None
        responses: list[PromptResponse[OutT]] = []
        error: BaseException | None = None
        try:
            prompt, session = _prepared(self.prepare(request))
            for more in (self.config.resources, resources):
                if more is not None:
                    prompt = prompt.bind(resources=more)
            with prompt.resources, _forwarded(session.dispatcher, self.bus):
                yield prompt, session, responses.append
        except BaseException as raised:
            error = raised
            raise
        finally:
            response = responses[0] if responses and error is None else None
            self.bus.publish(
                RequestFinished(request=request, session=session, response=response, error=error)
            )

    # Requests from a queue

    def submit(self, request: RequestT) -> Future[tuple[PromptResponse[OutT], Session]]:
        """Queue a request for ``run``; the future has the result of ``execute``."""
        future: _Future[OutT] = Future()
        with self._lock:
            if self._stopped.is_set():
                raise RuntimeError("the loop was stopped and takes no more requests")
            self._requests.put((request, future))
        return future

    def run(self) -> int:
        """Serve queued requests until stopped; return how many were served.

        A failing request is logged, and the next one is served. SIGTERM stops the loop: requests in
        progress are finished, others are cancelled. May run in several threads at once; only the
        main thread receives signals.
        """
        served = 0
        with sigterm_calls(self.stop):
            while (job := self._requests.get()) is not None:
                request, future = job
                if self._stopped.is_set():
                    future.cancel()
                elif future.set_running_or_notify_cancel():
                    self._settle(request, future)
                    served += 1
        self._requests.put(None)  # for other threads
        return served

    def stop(self) -> None:
        """Finish requests in progress, cancel all others, and let ``run`` return."""
        with self._lock:
            self._stopped.set()
            while not self._requests.empty():  # without a ``run``, nothing else would cancel them
                with suppress(Empty):  # a ``run`` was faster
                    job = self._requests.get_nowait()
                    if job is not None:
                        job[1].cancel()
            self._requests.put(None)

    def _settle(self, request: RequestT, future: _Future[OutT]) -> None:
        try:
            future.set_result(self.execute(request))
        except BaseException as error:
            future.set_exception(error)
            if not isinstance(error, Exception):  # an interrupt ends the loop
                raise
            _logger.exception("a request failed; the loop continues")


def _prepared(made: Any) -> tuple[Prompt[Any], Session]:
    """Check what a subclass has prepared."""
    if not isinstance(made, tuple) or len(cast("tuple[Any, ...]", made)) != 2:
        raise TypeError(f"prepare must return (prompt, session), got {made!r}")
    prompt, session = cast("tuple[Any, Any]", made)
    if isinstance(prompt, Session) and isinstance(session, Prompt):
        raise TypeError("prepare must return (prompt, session), got (session, prompt)")
    check_prompt(prompt)
    if not isinstance(session, Session):
        raise TypeError(f"prepare must return (prompt, session), got {session!r} as the session")
    return cast("Prompt[Any]", prompt), session


_Future = Future["tuple[PromptResponse[OutT], Session]"]


@contextmanager
def _forwarded(events: Dispatcher, bus: Dispatcher) -> Generator[None]:
    """Forward a session's events to the loop's bus, unless they are the same."""
    if events is bus:
        yield
        return
    stop = events.subscribe(object, bus.publish)
    try:
        yield
    finally:
        stop()


@contextmanager
def sigterm_calls(stop: Callable[[], None], *, every: bool = False) -> Generator[None]:
    """Call a function on SIGTERM, in the main thread; the next one has its previous effect.

    With ``every``, the next one calls it, too.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM) or signal.SIG_DFL

    def heard(number: int, frame: object) -> None:
        if not every:
            signal.signal(signal.SIGTERM, before)
        _logger.info("SIGTERM: finishing what is in progress")
        stop()

    signal.signal(signal.SIGTERM, heard)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
