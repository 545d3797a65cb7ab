"""The request path: many callers, one event loop, one window of requests in flight.

A caller hands over its requests in one go and is woken once, when all of them have an
outcome; everything between happens on the loop's thread. What waits is sent as soon as the
window has room, whoever it is from, so that the engines stay full across batches and bundles:
in the order in which it came, or so that prompts which begin alike follow each other.
"""

from __future__ import annotations

import logging
import math
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from apache_beam_vllm_dynamo._dispatcher import Dispatcher, Job, JobGroup
from apache_beam_vllm_dynamo._loop import loop_thread, max_connections
from apache_beam_vllm_dynamo._request_queues import ArrivalQueue, PrefixQueue, RequestQueue
from apache_beam_vllm_dynamo._requests import PreparedRequest
from apache_beam_vllm_dynamo._responses import Failure, Outcome
from apache_beam_vllm_dynamo._retry import RequestLimits, is_whole_number
from apache_beam_vllm_dynamo.errors import ConfigurationError, InferenceError, RuntimeFailedError

# How often a waiting caller looks whether the loop still lives; a caller is normally woken.
_LIVENESS_CHECK_S = 5.0
# A caller that waits for room or outcomes is woken for a share of what it may have pending, or
# after a moment, whatever is first: late enough to cost little, soon enough that nobody waits.
_CHUNKS = 8
STREAM_PAUSE_S = 0.05

_LOGGER = logging.getLogger(__name__)

Token = TypeVar('Token')


class InferenceClient:
    """Sends requests to one server from every thread of this process.

    Args:
      endpoint: Gives the server's base URL without a path, e.g. ``http://127.0.0.1:8000``.
        It is called on a thread of its own before the first request and again after a
        connection failed, because a server that was started again may have another port. It
        may block. What it raises ends all requests that wait, and their callers raise it.
      window: How many requests may be in flight at once, over all callers.
      limits: How long and how often one element is tried, unless the caller has limits of its own.
      open_prefixes: From how many prefixes at once requests are sent, one for each engine; 0
        for the order in which they came.

    Raises:
      ConfigurationError: ``window`` is no positive integer.
    """

    def __init__(
        self,
        endpoint: Callable[[], str],
        window: int,
        limits: RequestLimits | None = None,
        *,
        open_prefixes: int = 0,
    ) -> None:
        if not is_whole_number(window) or window < 1:
            raise ConfigurationError(f'window is {window!r}: it must be a whole number from 1.')
        connections = max_connections()
        if window > connections:
            _LOGGER.warning(
                'Up to %d requests should be in flight, but this process may hold only %d '
                'connections, half of the files that it may open: the engines will not be filled. '
                'Raise the limit (ulimit -n), or set max_in_flight.',
                window,
                connections,
            )
        self._endpoint = endpoint
        # A request that waited for a connection would spend its own time on that.
        self._window = min(window, connections)
        self._limits = limits or RequestLimits()
        self._open_prefixes = open_prefixes
        self._dispatchers: dict[int, Dispatcher] = {}
        self._closed = False

    def __repr__(self) -> str:
        return f'InferenceClient(window={self._window})'

    @property
    def window(self) -> int:
        """How many requests may be in flight at once."""
        return self._window

    def run(
        self,
        requests: Sequence[PreparedRequest | InferenceError],
        limits: RequestLimits | None = None,
    ) -> list[Outcome]:
        """Sends all requests and waits until each has its outcome.

        Args:
          requests: An :class:`InferenceError` among them, which a :class:`RequestBuilder` returns
            for an element that cannot be sent, becomes a :class:`Failure` in its place.
          limits: How long and how often each of them is tried; the client's own by default.

        Returns:
          The outcomes, in the order of the requests.

        Raises:
          RuntimeFailedError: The client was closed meanwhile.
          Exception: What ``endpoint`` raised, or a bug of the client's own.
        """
        batch = _Batch(len(requests))
        jobs = []
        limits = limits or self._limits
        for index, request in enumerate(requests):
            if isinstance(request, InferenceError):
                batch.outcomes[index] = _unsent(request)
            else:
                jobs.append(Job(request, batch, index, limits))
        if jobs:
            batch.remaining = len(jobs)
            dispatcher = self._dispatcher()
            try:
                dispatcher.submit(jobs)
                while not batch.done.wait(_LIVENESS_CHECK_S):
                    dispatcher.check_alive()
            except BaseException:
                dispatcher.cancel(batch)
                raise
            if batch.error is not None:
                raise batch.error
        return [outcome for outcome in batch.outcomes if outcome is not None]

    def stream(
        self,
        max_pending: int,
        max_waiting_bytes: float = math.inf,
        *,
        max_pending_to_order: int | None = None,
        limits: RequestLimits | None = None,
    ) -> RequestStream[Any]:
        """Opens a stream, for a caller whose requests come one by one.

        Args:
          max_pending: How many of its requests may be without an outcome; :meth:`put
            <RequestStream.put>` waits above that. Less than the window leaves it unfilled.
          max_waiting_bytes: How large those may be that wait for a place in the window, with
            those of all others that use this client.
          max_pending_to_order: How many it may be where the order of prefixes gains by it.
          limits: As for :meth:`run`.
        """
        if max_pending < 1:
            raise ConfigurationError(f'max_pending is {max_pending!r}: it must be at least 1.')
        most = max(max_pending, max_pending_to_order or 0)
        limits = limits or self._limits
        return RequestStream(self._dispatcher(), max_pending, most, max_waiting_bytes, limits)

    def close(self) -> None:
        """Ends the client; callers that still wait raise :class:`RuntimeFailedError`.

        The last client of a process to be closed stops the loop's thread and closes all
        connections. Takes milliseconds, at most ten seconds. May be called again.
        """
        self._closed = True
        dispatcher = self._dispatchers.pop(os.getpid(), None)
        if dispatcher is not None:
            dispatcher.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _dispatcher(self) -> Dispatcher:
        self._check_open()
        # By process, because a fork copies the parent's dispatcher but not its thread.
        pid = os.getpid()
        dispatcher = self._dispatchers.get(pid)
        if dispatcher is not None and dispatcher.is_lost():
            self._dispatchers.pop(pid, None)
            dispatcher.close()
            dispatcher = None
        if dispatcher is None:
            new = Dispatcher(loop_thread(), self._endpoint, self._window, self._queue())
            dispatcher = self._dispatchers.setdefault(pid, new)
            if dispatcher is new:
                weakref.finalize(self, _close_later, dispatcher).atexit = False
        dispatcher.start()
        try:
            self._check_open()  # closed by another thread meanwhile, which may have missed this
        except RuntimeFailedError:
            dispatcher.close()
            raise
        return dispatcher

    def _queue(self) -> RequestQueue[Job]:
        return PrefixQueue(self._open_prefixes) if self._open_prefixes else ArrivalQueue()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeFailedError('The client is closed.')


class RequestStream(Generic[Token]):
    """Requests of one caller that come one by one, with outcomes in the order of completion.

    For use by one thread. As a context manager it cancels at the end what has no outcome yet.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        max_pending: int,
        max_pending_to_order: int,
        max_waiting_bytes: float,
        limits: RequestLimits,
    ) -> None:
        self._limits = limits
        self._dispatcher = dispatcher
        self._group = _StreamGroup()
        self._max_pending = max_pending
        self._max_pending_to_order = max_pending_to_order
        self._max_waiting_bytes = max_waiting_bytes
        self._chunk = max(1, max_pending // _CHUNKS)
        self._sent = 0
        self._untaken = 0

    @property
    def pending(self) -> int:
        """How many requests were put and not taken again."""
        return self._untaken

    def put(self, request: PreparedRequest | InferenceError, token: Token) -> None:
        """Sends a request; waits first if too many have no outcome.

        Args:
          request: The request, or why there cannot be one.
          token: Comes back with the outcome, to tell which element it is of.

        Raises:
          Exception: As :meth:`InferenceClient.run`.
        """
        if isinstance(request, InferenceError):
            self._untaken += 1
            self._group.outcomes.put((token, _unsent(request)))
            return
        self._raise_error()
        while self._is_full():
            # Woken for every outcome, the caller would run for a single request each time.
            self._await(min(self._sent, self._group.finished + self._chunk))
        self._sent += 1
        self._untaken += 1
        self._group.more_follow = True
        self._dispatcher.submit([Job(request, self._group, token, self._limits)])

    def ready(self) -> Iterator[tuple[Token, Outcome]]:
        """Takes the outcomes that are there, without waiting."""
        while self._untaken:
            try:
                item = self._group.outcomes.get_nowait()
            except queue.Empty:
                self._raise_error()
                return
            self._untaken -= 1
            yield item

    def drain(self) -> Iterator[tuple[Token, Outcome]]:
        """Takes all outcomes, waiting for those that are not there yet."""
        while self._untaken:
            yield from self.ready()
            if self._untaken:
                self._await(min(self._sent, self._group.finished + self._chunk))

    def close(self) -> None:
        """Cancels what has no outcome yet."""
        if self._untaken:
            self._dispatcher.cancel(self._group)
            self._untaken = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _is_full(self) -> bool:
        pending = self._sent - self._group.finished
        most = self._max_pending_to_order if self._dispatcher.wants_more else self._max_pending
        too_large = self._dispatcher.waiting_bytes > self._max_waiting_bytes
        return pending >= most or (pending > 0 and too_large)

    def _await(self, finished: int) -> None:
        """Waits until so many requests have finished, but not longer than a moment."""
        self._dispatcher.no_more(self._group)
        if not self._group.wait(finished, STREAM_PAUSE_S):
            self._dispatcher.check_alive()
        self._raise_error()

    def _raise_error(self) -> None:
        if self._group.error is not None:
            self._untaken = 0
            raise self._group.error


class _Batch(JobGroup):
    """The requests of one call of :meth:`InferenceClient.run`."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.outcomes: list[Outcome | None] = [None] * size
        self.remaining = 0
        self.done = threading.Event()

    def finish(self, job: Job, outcome: Outcome) -> None:
        assert isinstance(job.key, int)
        self.outcomes[job.key] = outcome
        self.remaining -= 1
        if not self.remaining:
            self.done.set()

    def fail(self, error: BaseException) -> None:
        self.error = error
        self.done.set()


class _StreamGroup(JobGroup):
    """The requests of one stream.

    Attributes:
      outcomes: Those that the caller has not taken.
      finished: How many requests have an outcome; only the loop's thread writes it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.outcomes: queue.SimpleQueue[tuple[Any, Outcome]] = queue.SimpleQueue()
        self.finished = 0
        self._wake_at = 0
        self._wake = threading.Event()

    def wait(self, finished: int, timeout_s: float) -> bool:
        """Waits until so many have finished or the stream has failed; whether that is so."""
        self._wake.clear()
        self._wake_at = finished
        # Each side writes its own number before it reads the other's, so none is missed.
        if self.finished >= finished or self.error is not None:
            return True
        return self._wake.wait(timeout_s)

    def finish(self, job: Job, outcome: Outcome) -> None:
        self.outcomes.put((job.key, outcome))
        self.finished += 1
        if self.finished == self._wake_at:
            self._wake.set()

    def fail(self, error: BaseException) -> None:
        self.error = error
        self._wake.set()


def _close_later(dispatcher: Dispatcher) -> None:
    # The collector may run in any thread at any moment, also in one that holds a lock which
    # the closing needs.
    threading.Thread(target=dispatcher.close, name='vllm-dynamo-close', daemon=True).start()


def _unsent(error: InferenceError) -> Failure:
    return Failure(error, 0.0, 0.0, 0, (), time.time_ns() // 1_000_000)
