"""What happens on the loop's thread: the window, the attempts, the waits between them."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import functools
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from apache_beam_vllm_dynamo._loop import LoopThread
from apache_beam_vllm_dynamo._request_queues import RequestQueue
from apache_beam_vllm_dynamo._requests import PreparedRequest
from apache_beam_vllm_dynamo._responses import Answer, Failure, Outcome, Response
from apache_beam_vllm_dynamo._retry import (
    DEATHS,
    FINAL_KIND,
    WAITED_OUT,
    Again,
    Refused,
    RequestLimits,
    RetryReason,
    Tries,
)
from apache_beam_vllm_dynamo._sender import Sender
from apache_beam_vllm_dynamo._suspects import SUSPECT_AFTER, SuspectLane
from apache_beam_vllm_dynamo.errors import ErrorKind, InferenceError, RuntimeFailedError

_LOGGER = logging.getLogger(__name__)

# A job that stands still says why, but not once for every element.
_WARN_EVERY_S = 60.0
# At the beginning of a bundle nothing is in flight and few requests are there to choose from; sent
# as they come, the first windowful would open every prefix at once. So they are gathered: until
# no more came for a moment, more would not better the order, or for so long.
GATHER_S = 1.0
GATHER_PAUSE_S = 0.1
# To look at those that wait takes up to some milliseconds.
LOOK_EVERY_S = 0.25
# A request without a prefix worth the wait: some hundred tokens of text.
GATHER_FROM_BYTES = 1024
# To tell the callers takes a turn of the loop.
_END_TIMEOUT_S = 5.0


class JobGroup:
    """The jobs that one caller waits for; the methods are called on the loop's thread.

    Attributes:
      jobs: Those without an outcome. The loop's thread owns it.
      ended: Whether no outcome is wanted any more.
      more_follow: Whether the caller is about to hand over more.
      error: What all of them failed for, if they did.
    """

    def __init__(self) -> None:
        self.jobs: set[Job] = set()
        self.ended = False
        self.more_follow = False
        self.error: BaseException | None = None

    def finish(self, job: Job, outcome: Outcome) -> None:
        """Takes the outcome of a job."""
        raise NotImplementedError

    def fail(self, error: BaseException) -> None:
        """Takes the error that ended all of its jobs; nothing follows."""
        raise NotImplementedError


class Job:
    """One request on its way to an outcome."""

    __slots__ = (
        'first_sent_at',
        'group',
        'handle',
        'key',
        'limits',
        'queued_at',
        'request',
        'tries',
    )

    def __init__(
        self, request: PreparedRequest, group: JobGroup, key: object, limits: RequestLimits
    ) -> None:
        self.request = request
        self.group = group
        self.key = key
        self.queued_at = time.monotonic()
        self.first_sent_at: float | None = None
        self.limits = limits
        self.tries = Tries(limits)
        self.handle: asyncio.Task[Outcome | float] | asyncio.TimerHandle | None = None

    @property
    def prefix(self) -> bytes:
        """The request from the beginning of its prompt on, behind what all have in common."""
        return self.request.body


class Dispatcher:
    """The window of one client in one process.

    ``submit``, ``no_more``, ``cancel``, ``start``, ``close`` and ``check_alive`` may be called
    from any thread; everything else runs on the loop's thread.

    Args:
      thread: The loop.
      endpoint: Gives the base URL of the server.
      window: How many requests may be in flight at once.
      queue: The order in which they are sent.
    """

    def __init__(
        self,
        thread: LoopThread,
        endpoint: Callable[[], str],
        window: int,
        queue: RequestQueue[Job],
    ) -> None:
        self._pid = os.getpid()
        self._thread = thread
        self._window = window
        self._sender = Sender(thread, endpoint, self._fail_all)
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self._inbox: collections.deque[Job] = collections.deque()
        self._woken = False
        # From here on: the loop's thread only.
        self._queue = queue
        self._gathering_until: float | None = None
        self._looked_at = 0.0
        #: Whether the order would be better for more requests to choose from.
        self.wants_more = queue.gains_by_more() is not False
        #: How large the requests are that wait for a place, whoever they are from.
        self.waiting_bytes = 0
        self._last_came_at = 0.0
        self._again: collections.deque[Job] = collections.deque()
        self._suspects: SuspectLane[Job] = SuspectLane()
        self._in_flight = 0
        self._answered = 0
        self._erring_since: float | None = None  # the first error since the last answer
        self._groups: set[JobGroup] = set()
        self._warned_at = -_WARN_EVERY_S

    def start(self) -> None:
        """Takes hold of the process's loop, if it has not yet."""
        with self._lock:
            if self._loop is None and not self._closed:
                self._loop = self._thread.acquire()

    def submit(self, jobs: Iterable[Job]) -> None:
        """Lets jobs wait for a place."""
        self._inbox.extend(jobs)
        # The flag is cleared before the inbox is emptied, so a job that finds it set is seen.
        if not self._woken:
            self._woken = True
            self._call(self._take_in)

    def no_more(self, group: JobGroup) -> None:
        """Says that a group's caller hands nothing over for now, but waits."""
        group.more_follow = False
        # Where the loop has looked at the flag just before, its own look at the pause ends it.
        if self._gathering_until is not None:
            self._call(self._end_gathering)

    def cancel(self, group: JobGroup) -> None:
        """Drops a group's jobs wherever they are; nobody is told."""
        # Without a loop there are no jobs either.
        with contextlib.suppress(RuntimeFailedError):
            self._call(self._drop, group)

    def check_alive(self) -> None:
        """Raises RuntimeFailedError if nobody works on the jobs any more."""
        if self._closed or self.is_lost():
            raise RuntimeFailedError('The client ended while requests were waiting.')

    def is_lost(self) -> bool:
        """Whether the loop has died, which nothing but a bug makes it do."""
        return self._loop is not None and not self._thread.serves(self._loop)

    def close(self) -> None:
        """Fails all jobs and lets go of the loop."""
        if self._pid != os.getpid():
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._loop is None:
                return
        if self._thread.serves(self._loop):
            ended = threading.Event()
            # The interpreter's exit may have closed the loop in between.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._end, ended)
                ended.wait(_END_TIMEOUT_S)
        self._thread.release(self._loop)

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        loop = self._loop
        if loop is None or self._closed:
            raise RuntimeFailedError('The client is closed.')
        try:
            loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError as error:
            raise RuntimeFailedError('The client is closed.') from error

    # The window.

    def _take_in(self) -> None:
        self._woken = False
        while self._inbox:
            job = self._inbox.popleft()
            if not job.group.ended:
                self._groups.add(job.group)
                job.group.jobs.add(job)
                self._gather(job)
                self._queue.add(job)
                self.waiting_bytes += len(job.request.body)
        self._look()
        self._fill()

    def _gather(self, job: Job) -> None:
        # Where they had nothing in common so far, a slow source would be waited for in vain.
        if not self.wants_more or not job.group.more_follow or self._in_flight:
            return
        assert self._loop is not None
        self._last_came_at = now = self._loop.time()
        if not self._queue and len(job.prefix) >= GATHER_FROM_BYTES:
            self._gathering_until = now + GATHER_S
            self._loop.call_later(GATHER_PAUSE_S, self._look_at_gathered, self._gathering_until)

    def _look(self) -> None:
        """Looks now and then whether more requests are worth reading ahead."""
        assert self._loop is not None
        if self._loop.time() - self._looked_at >= LOOK_EVERY_S:
            self._looked_at = self._loop.time()
            self._judge()

    def _judge(self) -> None:
        gains = self._queue.gains_by_more()
        if gains is not None:
            self.wants_more = gains

    def _look_at_gathered(self, until: float) -> None:
        if self._gathering_until != until:
            return
        assert self._loop is not None
        now = self._loop.time()
        self._judge()
        over = now >= until or now - self._last_came_at >= GATHER_PAUSE_S
        if over or not self.wants_more:
            self._end_gathering()
        else:
            self._loop.call_later(GATHER_PAUSE_S, self._look_at_gathered, until)

    def _end_gathering(self) -> None:
        self._gathering_until = None
        self._fill()

    def _fill(self) -> None:
        if self._gathering_until is not None:
            return
        while self._in_flight < self._window:
            suspect = self._suspects.take()
            if suspect is not None:
                job = suspect
            elif self._again:
                job = self._again.popleft()
            elif self._queue:
                job = self._queue.take()
                self.waiting_bytes -= len(job.request.body)
            else:
                return
            if job.group.ended:
                self._suspects.ended(job, died=False)
                continue
            if job.handle is not None:
                job.handle.cancel()  # its look at the time
            if job.first_sent_at is None:
                job.first_sent_at = time.monotonic()
            self._in_flight += 1
            assert self._loop is not None
            task = self._loop.create_task(self._serve(job))
            job.handle = task
            task.add_done_callback(functools.partial(self._served, job))

    def _served(self, job: Job, task: asyncio.Task[Outcome | float]) -> None:
        self._in_flight -= 1
        self._suspects.ended(job, died=_ended_by_death(job, task))
        group = job.group
        error = None if task.cancelled() else task.exception()
        if not group.ended:
            if task.cancelled():
                self._fail([group], RuntimeFailedError('The client ended during a request.'))
            elif error is not None:
                self._fail([group], error)
            elif isinstance(result := task.result(), float):
                assert self._loop is not None
                job.handle = self._loop.call_later(result, self._send_again, job)
            else:
                self._forget(job)
                group.finish(job, result)
        self._fill()

    def _send_again(self, job: Job) -> None:
        if not job.group.ended:
            assert self._loop is not None
            assert job.first_sent_at is not None
            left_s = job.first_sent_at + job.limits.element_timeout_s - time.monotonic()
            job.handle = self._loop.call_later(max(0.0, left_s), self._give_up_waiting, job)
            if job.tries.deaths >= SUSPECT_AFTER:
                self._suspects.add(job, job.tries.deaths)
            else:
                self._again.append(job)
            self._fill()

    def _give_up_waiting(self, job: Job) -> None:
        """Ends a job whose time was over before it had a place again."""
        self._again = collections.deque(other for other in self._again if other is not job)
        self._suspects.discard(lambda other: other is job)
        self._forget(job)
        assert job.tries.last is not None
        outcome = self._give_up(job, job.tries.last, ErrorKind.DEADLINE_EXCEEDED, 0.0)
        job.group.finish(job, outcome)

    def _forget(self, job: Job) -> None:
        job.handle = None
        job.group.jobs.discard(job)
        if not job.group.jobs:
            self._groups.discard(job.group)

    def _drop(self, group: JobGroup) -> None:
        group.ended = True
        self._groups.discard(group)
        for job in group.jobs:
            if job.handle is not None:
                job.handle.cancel()
        group.jobs.clear()
        self._queue.discard(functools.partial(self._is_dropped, group))
        self._again = collections.deque(job for job in self._again if job.group is not group)
        self._suspects.discard(lambda job: job.group is group)

    def _is_dropped(self, group: JobGroup, job: Job) -> bool:
        if job.group is not group:
            return False
        self.waiting_bytes -= len(job.request.body)
        return True

    def _fail(self, groups: Sequence[JobGroup], error: BaseException) -> None:
        for group in groups:
            self._drop(group)
            group.fail(error)

    def _end(self, ended: threading.Event) -> None:
        self._take_in()
        self._fail_all(RuntimeFailedError('The client was closed.'))
        ended.set()

    def _fail_all(self, error: BaseException) -> None:
        self._fail(list(self._groups), error)

    # One job.

    async def _serve(self, job: Job) -> Outcome | float:
        """Sends a job until it has an outcome, or until its place should go to others.

        While the server is overloaded or away a job keeps its place in the window: to send
        other elements into an overload only makes more of it. After a failure of its own a
        job gives its place up.

        Returns:
          The outcome, or in how many seconds the job wants its place again.
        """
        now = time.monotonic
        limits = job.limits
        assert job.first_sent_at is not None
        deadline = job.first_sent_at + limits.element_timeout_s
        tries = job.tries
        timeout_s = job.request.timeout_s
        if timeout_s is None:
            timeout_s = limits.request_timeout_s
        while True:
            began = now()
            if tries.last is not None and began >= deadline:
                return self._give_up(job, tries.last, ErrorKind.DEADLINE_EXCEEDED, 0.0)
            tries.begin()
            result = await self._sender.send(
                job.request, min(timeout_s, deadline - began), limits.excerpt_chars
            )
            took_s = now() - began
            if job.group.ended:
                return 0.0  # a cancellation that came together with a timeout was lost to it
            if not isinstance(result, (Again, Refused)):
                return self._answer(job, result, took_s)
            if isinstance(result, Refused):
                return self._failure(job, result, took_s)
            result = self._weigh(tries, result)
            wait_s = tries.wait_after(result, took_s, random.random)
            if wait_s is None:
                return self._give_up(job, result, FINAL_KIND[result.reason], took_s)
            if now() + wait_s >= deadline:
                return self._give_up(job, result, ErrorKind.DEADLINE_EXCEEDED, took_s)
            self._note(result)
            if result.reason not in WAITED_OUT:
                return wait_s
            await asyncio.sleep(wait_s)

    def _weigh(self, tries: Tries, again: Again) -> Again:
        now, erring_s = time.monotonic(), None
        if again.reason is RetryReason.SERVER_ERROR:
            if self._erring_since is None:
                self._erring_since = now
            else:
                erring_s = now - self._erring_since
        return tries.judge(again, self._answered, self._in_flight, now, erring_s)

    def _answer(self, job: Job, response: Response, took_s: float) -> Answer:
        assert job.first_sent_at is not None
        self._answered += 1
        self._erring_since = None
        return Answer(
            response,
            took_s,
            job.first_sent_at - job.queued_at,
            job.tries.attempts,
            tuple(job.tries.retried),
            time.time_ns() // 1_000_000,
        )

    def _failure(self, job: Job, refused: Refused, took_s: float) -> Failure:
        assert job.first_sent_at is not None
        error = InferenceError(
            refused.kind, refused.status, refused.message, refused.details, job.tries.attempts
        )
        return Failure(
            error,
            took_s,
            job.first_sent_at - job.queued_at,
            job.tries.attempts,
            tuple(job.tries.retried),
            time.time_ns() // 1_000_000,
        )

    def _give_up(self, job: Job, last: Again, kind: ErrorKind, took_s: float) -> Failure:
        assert job.first_sent_at is not None
        tried_s = time.monotonic() - job.first_sent_at
        message = f'given up after {tried_s:.1f} s; at last: {last.message}'
        return self._failure(job, Refused(kind, last.status, message), took_s)

    def _note(self, again: Again) -> None:
        _LOGGER.debug('A request is sent again: %s (status %s).', again.reason, again.status)
        now = time.monotonic()
        if again.reason in WAITED_OUT and now - self._warned_at >= _WARN_EVERY_S:
            self._warned_at = now
            _LOGGER.warning(
                'Requests wait for the server: %s (status %s).', again.reason, again.status
            )


def _ended_by_death(job: Job, task: asyncio.Task[Outcome | float]) -> bool:
    if task.cancelled() or task.exception() is not None or isinstance(task.result(), Answer):
        return False
    return job.tries.last is not None and job.tries.last.reason in DEATHS
