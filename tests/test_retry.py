from __future__ import annotations

import asyncio
import copy
import dataclasses
import errno
import fcntl
import http.client
import http.server
import math
import pickle
import socket
import sqlite3
import ssl
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weakincentives.errors import ToolTimeout, WorkspaceLocked
from weakincentives.retry import (
    LOCK,
    NETWORK,
    RATE_LIMIT,
    SERVER_ERROR,
    TIMEOUT,
    ExponentialBackoff,
    FixedBackoff,
    JitteredBackoff,
    LinearBackoff,
    NoBackoff,
    RetryPolicies,
    RetryPolicy,
    code_of,
)
from weakincentives.tool_result import ToolError

SECONDS = st.floats(0, 1e9) | st.integers(0, 10**9)
ATTEMPTS = st.integers(1, 60) | st.integers(1, 10**400)
CODES = st.sampled_from([TIMEOUT, RATE_LIMIT, NETWORK, SERVER_ERROR, LOCK, "OTHER"])
RANDOM = st.floats(0, 1, exclude_max=True)
PLAIN = (
    st.builds(NoBackoff)
    | st.builds(FixedBackoff, SECONDS)
    | st.builds(LinearBackoff, SECONDS, SECONDS)
    | st.builds(ExponentialBackoff, SECONDS, SECONDS, st.floats(1, 1e300))
)
BACKOFFS = st.recursive(
    PLAIN, lambda base: st.builds(JitteredBackoff, base, st.floats(0, 1)), max_leaves=3
)


def error(code=TIMEOUT, recoverable=True):
    return ToolError(code, "no luck", recoverable)


# How long to wait


@given(BACKOFFS, ATTEMPTS, RANDOM)
def test_a_wait_is_finite_and_never_negative(backoff, attempt, random):
    delay = backoff.delay(attempt, lambda: random)

    assert isinstance(delay, float)
    assert 0 <= delay < math.inf


@given(PLAIN, ATTEMPTS)
def test_only_jitter_asks_for_a_random_number(backoff, attempt):
    assert backoff.delay(attempt, pytest.fail) == backoff.delay(attempt)


@given(ATTEMPTS, SECONDS)
def test_fixed_and_none_do_not_depend_on_the_attempt(attempt, seconds):
    assert NoBackoff().delay(attempt) == 0
    assert FixedBackoff(seconds).delay(attempt) == seconds


@given(SECONDS, SECONDS, st.integers(1, 1000))
def test_linear_grows_by_its_increment(base, increment, attempt):
    backoff = LinearBackoff(base, increment)

    assert backoff.delay(1) == base
    assert backoff.delay(attempt) == pytest.approx(base + increment * (attempt - 1))
    assert backoff.delay(attempt + 1) >= backoff.delay(attempt)


@given(SECONDS, SECONDS, st.floats(1, 10), st.integers(1, 1000))
def test_exponential_grows_until_its_maximum(base, maximum, multiplier, attempt):
    backoff = ExponentialBackoff(base, maximum, multiplier)

    assert backoff.delay(1) == min(base, maximum)
    assert backoff.delay(attempt) <= backoff.delay(attempt + 1) <= maximum
    if attempt < 20:
        assert backoff.delay(attempt) == pytest.approx(
            min(base * multiplier ** (attempt - 1), maximum)
        )


@given(st.floats(0.001, 10), st.floats(0, 1e6), st.floats(1.1, 10))
def test_exponential_reaches_its_maximum(base, maximum, multiplier):
    assert ExponentialBackoff(base, maximum, multiplier).delay(100_000) == maximum


@given(PLAIN, st.floats(0, 1), st.integers(1, 1000), RANDOM)
def test_jitter_stays_in_its_range(base, jitter, attempt, random):
    wait = base.delay(attempt)

    jittered = JitteredBackoff(base, jitter).delay(attempt, lambda: random)

    rounding = 1e-9 * wait
    assert abs(jittered - (wait + (random * 2 - 1) * wait * jitter)) <= rounding
    assert wait * (1 - jitter) - rounding <= jittered <= wait * (1 + jitter) + rounding


def test_jitter_reaches_both_ends_of_its_range():
    backoff = JitteredBackoff(FixedBackoff(10), 0.5)

    assert backoff.delay(1, lambda: 0.0) == 5
    assert backoff.delay(1, lambda: 0.5) == 10
    assert backoff.delay(1, lambda: 1.0) == 15
    assert len({backoff.delay(1) for _ in range(50)}) > 1


def test_waits_may_be_given_as_a_timedelta():
    minute = timedelta(minutes=1)

    assert FixedBackoff(minute) == FixedBackoff(60)
    assert LinearBackoff(minute, minute).delay(2) == 120
    assert ExponentialBackoff(minute, timedelta(hours=1)).delay(99) == 3600


@pytest.mark.parametrize("backoff", [NoBackoff(), FixedBackoff(1), LinearBackoff(1, 1)])
@pytest.mark.parametrize("attempt", [0, -1])
def test_the_first_retry_is_attempt_one(backoff, attempt):
    with pytest.raises(ValueError, match="the first retry is attempt 1"):
        backoff.delay(attempt)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FixedBackoff(-1), "delay must be a number from 0 up, and finite, got -1"),
        (lambda: FixedBackoff(math.nan), "delay must be a number"),
        (lambda: FixedBackoff(math.inf), "delay must be a number"),
        (lambda: FixedBackoff(10**400), "delay must be a number"),
        (lambda: FixedBackoff(True), "delay must be a number .*got True"),
        (lambda: FixedBackoff("1"), "delay must be a number .*got '1'"),
        (lambda: LinearBackoff(-1, 0), "base_delay must be a number"),
        (lambda: LinearBackoff(0, -1), "increment must be a number"),
        (lambda: LinearBackoff(timedelta(seconds=-1), 0), "base_delay must be a number"),
        (lambda: ExponentialBackoff(-1, 1, 2), "base_delay must be a number"),
        (lambda: ExponentialBackoff(1, -1, 2), "max_delay must be a number"),
        (lambda: ExponentialBackoff(1, 1, 0.5), "multiplier must be a number from 1 up"),
        (lambda: ExponentialBackoff(1, 1, math.nan), "multiplier must be a number from 1 up"),
        (lambda: ExponentialBackoff(1, 1, "2"), "multiplier must be a number"),
        (lambda: JitteredBackoff(NoBackoff(), 1.5), "jitter must be a number 0 to 1, got 1.5"),
        (lambda: JitteredBackoff(NoBackoff(), -0.1), "jitter must be a number"),
        (lambda: JitteredBackoff(3, 0.1), r"base must be a backoff such as NoBackoff\(\), got 3"),
        (lambda: RetryPolicy(-1), "max_retries must be a whole number from 0 up, got -1"),
        (lambda: RetryPolicy(1.5), "max_retries must be a whole number"),
        (lambda: RetryPolicy(True), "max_retries must be a whole number"),
        (lambda: RetryPolicy(1, NoBackoff), "backoff must be a backoff"),
        (lambda: RetryPolicy(1, retryable_errors="TIMEOUT"), "takes several error codes"),
        (lambda: RetryPolicy(1, non_retryable_errors="X"), "takes several error codes"),
        (lambda: RetryPolicy(1, retryable_errors=[1]), "takes several error codes"),
        (lambda: RetryPolicy(1, should_retry=1), "should_retry must be a function, got 1"),
    ],
)
def test_what_makes_no_sense_is_refused_on_construction(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# Whether to try again


@given(
    st.integers(0, 6),
    st.integers(0, 8),
    CODES,
    st.booleans(),
    st.none() | st.frozensets(CODES),
    st.frozensets(CODES),
    st.sampled_from([None, True, False]),
)
def test_what_is_retried(maximum, attempt, code, recoverable, listed, unlisted, custom):
    policy = RetryPolicy(
        maximum,
        retryable_errors=listed,
        non_retryable_errors=unlisted,
        should_retry=None if custom is None else lambda error, attempt: custom,
    )

    assert policy.retries(error(code, recoverable), attempt) == (
        attempt < maximum
        and custom is not False
        and (listed is None or code in listed)
        and code not in unlisted
        and recoverable
    )


@given(st.integers(0, 20))
def test_a_call_that_keeps_failing_is_tried_once_more_than_it_is_retried(maximum):
    policy = RetryPolicy(maximum)
    attempts = 1

    while policy.retries(error(), attempts - 1):
        attempts += 1

    assert attempts == maximum + 1 == len(list(policy.delays()))


def test_the_custom_condition_is_asked_with_the_error_and_the_retries_so_far():
    asked = []
    policy = RetryPolicy(2, should_retry=lambda error, attempt: asked.append((error, attempt)))

    assert not policy.retries(error(LOCK), 1)
    assert not policy.retries(error(LOCK), 2)
    assert asked == [(error(LOCK), 1)], "not asked when there is no attempt left"


def test_an_error_needs_only_a_code_and_whether_it_is_recoverable():
    class Failure:
        code = "BUSY"
        recoverable = True

    assert RetryPolicy(1).retries(Failure(), 0)


@given(BACKOFFS, st.integers(0, 8), RANDOM)
def test_the_first_attempt_does_not_wait(backoff, retries, random):
    first, *rest = RetryPolicy(retries, backoff).delays(lambda: random)

    assert first == 0
    assert rest == [backoff.delay(n, lambda: random) for n in range(1, retries + 1)]


def test_the_named_policies_have_the_numbers_of_the_protocol():
    half = lambda: 0.5  # noqa: E731  # no jitter either way

    assert list(RetryPolicies.NONE.delays()) == [0]
    assert list(RetryPolicies.QUICK.delays()) == [0, 1, 1, 1]
    assert list(RetryPolicies.STANDARD.delays()) == [0, 1, 2, 4]
    assert list(RetryPolicies.AGGRESSIVE.delays(half)) == [0, 0.5, 1, 2, 4, 8]
    assert RetryPolicies.STANDARD.backoff.delay(10) == 30
    assert RetryPolicies.AGGRESSIVE.backoff.delay(10, half) == 60
    assert RetryPolicies.AGGRESSIVE.backoff.jitter == 0.1
    assert RetryPolicies.NONE.retryable_errors is None
    assert RetryPolicies.QUICK.retryable_errors == {TIMEOUT, RATE_LIMIT, NETWORK}
    assert RetryPolicies.STANDARD.retryable_errors == {TIMEOUT, RATE_LIMIT, NETWORK, SERVER_ERROR}
    assert RetryPolicies.AGGRESSIVE.retryable_errors == {
        TIMEOUT, RATE_LIMIT, NETWORK, SERVER_ERROR, LOCK,
    }  # fmt: skip


def test_a_custom_policy_is_the_policy_given():
    policy = RetryPolicy(7)

    assert RetryPolicies.CUSTOM(policy) is policy


@pytest.mark.parametrize("codes", [["A", "B"], ("A", "B"), {"A", "B"}, iter(["A", "B"])])
def test_codes_come_from_any_iterable(codes):
    assert RetryPolicy(1, retryable_errors=codes).retryable_errors == frozenset("AB")


@given(BACKOFFS, st.integers(0, 9))
def test_policies_and_backoffs_are_frozen_values(backoff, retries):
    policy = RetryPolicy(retries, backoff)

    assert policy == copy.deepcopy(policy) == pickle.loads(pickle.dumps(policy))
    assert hash(policy) == hash(copy.deepcopy(policy))
    assert dataclasses.replace(policy, max_retries=retries + 1) != policy
    assert policy != backoff
    assert repr(policy).startswith(f"RetryPolicy(max_retries={retries}, backoff={backoff!r}")
    for change in (
        lambda: setattr(policy, "max_retries", 9),
        lambda: setattr(policy, "other", 9),
        lambda: delattr(policy, "max_retries"),
        lambda: setattr(backoff, "seconds", 9),
    ):
        with pytest.raises(dataclasses.FrozenInstanceError):
            change()


def test_a_backoff_is_shown_as_it_is_made():
    shown = "JitteredBackoff(base=FixedBackoff(delay=1.0), jitter=0.1)"

    assert repr(JitteredBackoff(FixedBackoff(1), 0.1)) == shown
    assert repr(NoBackoff()) == "NoBackoff()"


# What kind of failure it was


@pytest.fixture
def http_server():
    """A server that answers with the status its path asks for."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            if self.path == "/cut":
                self.send_response(200)
                self.send_header("content-length", "100")
                self.end_headers()
                return
            if self.path != "/drop":
                self.send_response(int(self.path[1:]))
                self.send_header("content-length", "0")
                self.end_headers()

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def failure_of(operation, *args):
    with pytest.raises(Exception) as caught:  # noqa: PT011  # which one is what is asked
        operation(*args)
    return caught.value


def fetch(url):
    with urllib.request.urlopen(url) as response:
        return response.read()


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("429", RATE_LIMIT), ("408", TIMEOUT), ("504", TIMEOUT), ("423", LOCK),
        ("500", SERVER_ERROR), ("502", SERVER_ERROR), ("503", SERVER_ERROR),
        ("400", None), ("401", None), ("404", None), ("409", None),
        ("drop", NETWORK), ("cut", NETWORK),
    ],
)  # fmt: skip
def test_answers_of_a_real_server(http_server, path, code):
    failure = failure_of(fetch, f"{http_server}/{path}")

    assert code_of(failure) == code
    getattr(failure, "close", lambda: None)()


def test_nobody_listens():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]

        assert code_of(failure_of(fetch, f"http://127.0.0.1:{port}")) == NETWORK


def test_a_url_that_makes_no_sense_is_not_worth_another_try():
    assert code_of(failure_of(fetch, "nonsense://x")) is None
    assert code_of(failure_of(fetch, "http://a b")) is None


def test_real_timeouts():
    async def wait():
        await asyncio.wait_for(asyncio.Event().wait(), 0.001)

    def listen():
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            listener.settimeout(0.001)
            listener.accept()

    def run():
        subprocess.run([sys.executable, "-c", "import time; time.sleep(600)"], timeout=0.001)

    for operation in (lambda: asyncio.run(wait()), listen, run):
        assert code_of(failure_of(operation)) == TIMEOUT


def test_a_real_file_lock(tmp_path):
    with open(tmp_path / "lock", "w") as one, open(tmp_path / "lock", "w") as two:
        fcntl.flock(one, fcntl.LOCK_EX)

        failure = failure_of(fcntl.flock, two, fcntl.LOCK_EX | fcntl.LOCK_NB)

    assert code_of(failure) == LOCK


def test_a_real_locked_database(tmp_path):
    one = sqlite3.connect(tmp_path / "db", isolation_level=None)
    two = sqlite3.connect(tmp_path / "db", isolation_level=None, timeout=0)
    one.execute("BEGIN EXCLUSIVE")

    locked = failure_of(two.execute, "CREATE TABLE t (x)")
    one.execute("ROLLBACK")
    wrong = failure_of(two.execute, "SELECT nonsense")
    one.close()
    two.close()

    assert code_of(locked) == LOCK
    assert code_of(wrong) is None
    assert code_of(sqlite3.OperationalError("database is locked")) == LOCK


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (TimeoutError(), TIMEOUT),
        (ToolTimeout("too long"), TIMEOUT),
        (OSError(errno.ETIMEDOUT, "timed out"), TIMEOUT),
        (ConnectionResetError(), NETWORK),
        (BrokenPipeError(), NETWORK),
        (OSError(errno.EHOSTUNREACH, "no route"), NETWORK),
        (OSError(errno.ENETDOWN, "down"), NETWORK),
        (socket.gaierror(socket.EAI_AGAIN, "try again"), NETWORK),
        (ssl.SSLError("handshake"), NETWORK),
        (http.client.IncompleteRead(b""), NETWORK),
        (http.client.InvalidURL("x"), None),
        (urllib.error.URLError(TimeoutError()), TIMEOUT),
        (urllib.error.URLError("no host given"), None),
        (urllib.error.ContentTooShortError("short", b""), NETWORK),
        (BlockingIOError(), LOCK),
        (OSError(errno.EDEADLK, "deadlock"), LOCK),
        (WorkspaceLocked("in use"), LOCK),
        (FileNotFoundError(errno.ENOENT, "none"), None),
        (PermissionError(errno.EACCES, "no"), None),
        (ValueError("x"), None),
        (KeyboardInterrupt(), None),
        (SystemExit(429), None),
    ],
)
def test_exceptions_of_the_standard_library(failure, code):
    assert code_of(failure) == code


class Response:
    def __init__(self, **fields):
        self.__dict__.update(fields)


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"status_code": 429}, RATE_LIMIT),
        ({"status": 503}, SERVER_ERROR),
        ({"code": 504}, TIMEOUT),
        ({"response": Response(status_code=429)}, RATE_LIMIT),
        ({"response": Response(status=500)}, SERVER_ERROR),
        ({"response": {"Error": "x"}}, None),
        ({"status_code": 404, "__cause__": ConnectionError()}, None),
        ({"status_code": "429"}, None),
        ({"code": "rate_limit_exceeded"}, None),
        ({"code": 7}, None),
        ({"status_code": True}, None),
        ({"status_code": 429.0}, None),
        ({"code": "slow_down", "status_code": 429}, RATE_LIMIT),
    ],
)
def test_any_exception_with_an_http_status(fields, code):
    failure = Exception("somebody's client")
    for name, value in fields.items():
        setattr(failure, name, value)

    assert code_of(failure) == code


def test_an_attribute_that_cannot_be_read_does_no_harm():
    class Awkward(ConnectionError):
        @property
        def response(self):
            raise RuntimeError("there is none")

    assert code_of(Awkward()) == NETWORK


def test_an_exception_counts_by_what_it_was_raised_from():
    def raised():
        try:
            try:
                raise ConnectionError("gone")
            except ConnectionError as cause:
                raise KeyError("inner") from cause
        except KeyError as cause:
            raise RuntimeError("outer") from cause

    assert code_of(failure_of(raised)) == NETWORK


def test_an_exception_raised_while_handling_another_is_its_own():
    """Only ``raise ... from`` says that one is the other's doing."""

    def raised():
        try:
            raise ConnectionError("gone")
        except ConnectionError:
            return {}["typo in the handler"]

    assert code_of(failure_of(raised)) is None


def test_causes_that_go_round_in_circles_end():
    one, two = KeyError("one"), KeyError("two")
    one.__cause__, two.__cause__ = two, one

    assert code_of(one) is None


def test_importing_loads_nothing_that_only_some_failures_need():
    program = (
        "import sys; before = set(sys.modules); import weakincentives.retry\n"
        "slow = {'random', 'socket', 'ssl', 'http.client', 'sqlite3', 'asyncio', 'subprocess'}\n"
        "print(sorted(slow & (set(sys.modules) - before)))"
    )

    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )

    assert done.stdout.strip() == "[]"
