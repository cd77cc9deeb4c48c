"""The main loop: a request becomes a prompt and a session, resources are opened, a model runs."""

from __future__ import annotations

import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from weakincentives.call import RunContext, new_id
from weakincentives.logs import get_logger
from weakincentives.prompt.prompt import Resources
from weakincentives.runtime.evaluation import RunConfig
from weakincentives.runtime.events import Dispatcher

if TYPE_CHECKING:
    from typing import Unpack

    from weakincentives.prompt.prompt import Prompt
    from weakincentives.runtime.conversation import PromptResponse
    from weakincentives.runtime.evaluation import RunOptions
    from weakincentives.runtime.session import Session

RequestT = TypeVar("RequestT")
OutT = TypeVar("OutT")

_logger = get_logger(__name__)


class Evaluator(Protocol):
    """What the loop needs of an adapter."""

    def evaluate(
        self, prompt: Prompt[OutT], session: Session, **options: Unpack[RunOptions]
    ) -> PromptResponse[OutT]: ...

    async def aevaluate(
        self, prompt: Prompt[OutT], session: Session, **options: Unpack[RunOptions]
    ) -> PromptResponse[OutT]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class MainLoopConfig(RunConfig):
    """What holds for every request: the limits of a run, and what tools can ask for."""

    resources: Resources | None = None
    """Win over those of the prompt; those given with a request win over these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFinished:
    """A request came to its end. Published on the loop's bus."""

    request: Any
    session: Session | None
    """None when it could not even be prepared."""
    response: PromptResponse[Any] | None = None
    error: BaseException | None = None


class MainLoop(ABC, Generic[RequestT, OutT]):
    """Serves requests. A subclass says which prompt and session a request gets."""

    def __init__(
        self,
        *,
        adapter: Evaluator,
        bus: Dispatcher | None = None,
        config: MainLoopConfig | None = None,
    ) -> None:
        self.adapter = adapter
        self.bus = Dispatcher() if bus is None else bus
        """Hears what happens in the sessions of all requests."""
        self.config = MainLoopConfig() if config is None else config
        self.loop_id = new_id()
        """What tools find in ``context.loop_id``."""
        self._requests: SimpleQueue[tuple[RequestT, _Future[OutT]] | None] = SimpleQueue()
        self._stopped = threading.Event()
        self._lock = threading.RLock()  # a signal may come while this thread holds it

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
        ``config`` among them replaces the loop's for this request.
        """
        with self._served(request, resources) as served:
            self._complete(options)
            served.response = self.adapter.evaluate(served.prompt, served.session, **options)
        return served.response, served.session

    async def aexecute(
        self,
        request: RequestT,
        *,
        resources: Resources | None = None,
        **options: Unpack[RunOptions],
    ) -> tuple[PromptResponse[OutT], Session]:
        """Serve one request on the caller's event loop."""
        with self._served(request, resources) as served:
            self._complete(options)
            served.response = await self.adapter.aevaluate(served.prompt, served.session, **options)
        return served.response, served.session

    def _complete(self, options: RunOptions) -> None:
        options.setdefault("config", self.config)
        ids = options.get("run_context") or RunContext()
        options["run_context"] = ids.filled(loop_id=self.loop_id)

    # Requests from a queue

    def submit(self, request: RequestT) -> Future[tuple[PromptResponse[OutT], Session]]:
        """Put a request into the queue of ``run``; the future has what ``execute`` returns."""
        future: _Future[OutT] = Future()
        with self._lock:
            if self._stopped.is_set():
                raise RuntimeError("the loop was stopped and takes no more requests")
            self._requests.put((request, future))
        return future

    def run(self) -> int:
        """Serve requests from the queue until stopped; return how many were served.

        A request that fails is logged and the next one is served. SIGTERM stops the loop: what is
        under way is finished, what was not begun is cancelled. May run in several threads at once;
        only the main thread hears signals.
        """
        served = 0
        with _sigterm_calls(self.stop):
            while (job := self._requests.get()) is not None:
                request, future = job
                if self._stopped.is_set():
                    future.cancel()
                elif future.set_running_or_notify_cancel():
                    self._settle(request, future)
                    served += 1
        self._requests.put(None)  # for those who run in other threads
        return served

    def stop(self) -> None:
        """Finish what is under way, cancel what was not begun, and let ``run`` return."""
        with self._lock:
            self._stopped.set()
            while not self._requests.empty():  # maybe nobody runs: whoever waits must not hang
                with suppress(Empty):  # somebody does, and was faster
                    job = self._requests.get_nowait()
                    if job is not None:
                        job[1].cancel()
            self._requests.put(None)

    def _settle(self, request: RequestT, future: _Future[OutT]) -> None:
        try:
            future.set_result(self.execute(request))
        except BaseException as error:
            future.set_exception(error)
            if not isinstance(error, Exception):  # an interrupt is for whoever runs the loop
                raise
            _logger.exception("a request failed; the loop goes on")

    # What surrounds a run

    @contextmanager
    def _served(self, request: RequestT, resources: Resources | None) -> Generator[_Served[OutT]]:
        served: _Served[OutT] | None = None
        error: BaseException | None = None
        try:
            prompt, session = self.prepare(request)
            for more in (self.config.resources, resources):
                if more is not None:
                    prompt = prompt.bind(resources=more)
            served = _Served(prompt, session)
            with prompt.resources, _passed_on(session.dispatcher, self.bus):
                yield served
        except BaseException as raised:
            error = raised
            raise
        finally:
            self.bus.publish(
                RequestFinished(
                    request=request,
                    session=None if served is None else served.session,
                    response=None if served is None or error is not None else served.response,
                    error=error,
                )
            )


_Future = Future["tuple[PromptResponse[OutT], Session]"]


class _Served(Generic[OutT]):
    """A request on its way."""

    response: PromptResponse[OutT]

    def __init__(self, prompt: Prompt[OutT], session: Session) -> None:
        self.prompt = prompt
        self.session = session


@contextmanager
def _passed_on(events: Dispatcher, bus: Dispatcher) -> Generator[None]:
    """Let the loop's bus hear what a session's does; they may be the same."""
    if events is bus:
        yield
        return
    stop = events.subscribe(object, bus.publish)
    try:
        yield
    finally:
        stop()


@contextmanager
def _sigterm_calls(stop: Callable[[], None]) -> Generator[None]:
    """Let the first SIGTERM call a function; the next one does what it did before."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM) or signal.SIG_DFL

    def heard(number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, before)
        _logger.info("SIGTERM: finishing what is under way")
        stop()

    signal.signal(signal.SIGTERM, heard)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
