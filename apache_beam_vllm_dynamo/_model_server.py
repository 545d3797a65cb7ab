"""The model of Beam's contract: a running server, native or behind Dynamo, with one face.

One object lives in one SDK process of a worker; the others hold a ``MultiProcessShared``
proxy of it, through which only its public methods can be called, with values that pickle.
"""

from __future__ import annotations

import math
import threading
import time
import uuid
import weakref
from collections.abc import Mapping
from typing import Protocol

from apache_beam_vllm_dynamo._restart import ChildStatus

# To read a server's metrics takes it and the reader a millisecond or two, for each of them.
COUNTS_EVERY_S = 1.0
# The name of the metric for the requests of an engine, up to its number.
ENGINE_REQUESTS = 'requests_of_engine_'


class Runtime(Protocol):
    """What runs the server or servers."""

    @property
    def window(self) -> int:
        """How many requests are worth having in flight."""

    @property
    def kv_caches(self) -> int:
        """How many KV caches there are: one for each engine, or rank of one."""

    def start(self) -> None:
        """Starts everything; returns when it serves."""

    def endpoint(self) -> str:
        """Where requests go, without a path; raises once there is no server any more."""

    def statuses(self) -> tuple[ChildStatus, ...]:
        """What is known of each process."""

    def counts(self) -> Mapping[str, int]:
        """What the servers have counted since they started, by the name of a metric.

        What cannot be read now is left out; a server that was replaced begins at 0 again.
        """

    def close(self, reason: str = 'closed') -> None:
        """Ends all processes."""


_running: weakref.WeakSet[_VLLMModelServer] = weakref.WeakSet()


def close_all() -> None:
    """Ends every server that this process owns.

    Beam keeps a shared model until its process ends, also when the pipeline is over.
    """
    for server in tuple(_running):
        server.close()


class _VLLMModelServer:
    """A server that has started.

    It ends when the object is dropped, when the process that owns it exits, and, through the
    lifelines of its processes, when that process is killed.

    Args:
      runtime: What to start.

    Raises:
      StartError: It did not come up.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._id = uuid.uuid4().hex
        self._counted: dict[str, int] = {}
        self._counting = threading.Lock()
        self._counted_at = -math.inf
        # Registered before the start, which takes minutes in which the process may exit.
        self._finalizer = weakref.finalize(self, runtime.close, 'its model was dropped')
        try:
            runtime.start()
        except BaseException:
            self._finalizer.detach()
            raise
        _running.add(self)

    def server_id(self) -> str:
        """A name that tells this start from every other."""
        return self._id

    def window(self) -> int:
        """How many requests the server can work on at once."""
        return self._runtime.window

    def kv_caches(self) -> int:
        """How many KV caches the server has: one for each engine, or rank of one."""
        return self._runtime.kv_caches

    def endpoint(self) -> str:
        """Where requests go, without a path.

        Raises:
          RuntimeFailedError: The server is gone for good.
        """
        return self._runtime.endpoint()

    def status(self) -> tuple[ChildStatus, ...]:
        """The state, process id, devices, restarts and last error of each process."""
        return self._runtime.statuses()

    def take_events(self) -> dict[str, int]:
        """What happened since anybody asked last, by the name of a metric, each once.

        The servers' own counts are read at most once a second; what they counted in between
        comes with the next answer.
        """
        if not self._counting.acquire(blocking=False):
            return {}  # somebody else is at it
        try:
            restarts = sum(status.restarts for status in self._runtime.statuses())
            totals = {'engine_restarts': restarts}
            now = time.monotonic()
            if now - self._counted_at >= COUNTS_EVERY_S:
                self._counted_at = now
                totals |= self._runtime.counts()
            return {name: new for name, total in totals.items() if (new := self._new(name, total))}
        finally:
            self._counting.release()

    def _new(self, name: str, total: int) -> int:
        counted, self._counted[name] = self._counted.get(name, 0), total
        # A server that was replaced counts from 0.
        return total - counted if total >= counted else total

    def close(self) -> None:
        """Ends the server and everything that it started; closing twice is no error."""
        self._finalizer()
