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
from typing import Protocol

from apache_beam_vllm_dynamo._restart import ChildStatus

# Reading the frontend's metrics takes it and the reader a millisecond each.
MIGRATIONS_EVERY_S = 0.25


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

    def migrations(self) -> int | None:
        """How many requests have moved to another engine; ``None`` where that is not known now."""

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
        self._lock = threading.Lock()
        self._counted_restarts = 0
        self._counted_migrations = 0
        self._asked_migrations_at = -math.inf
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

    def take_restarts(self) -> int:
        """How many restarts there were since anybody asked last, for counting each once."""
        with self._lock:
            restarts = sum(status.restarts for status in self._runtime.statuses())
            new, self._counted_restarts = restarts - self._counted_restarts, restarts
        return new

    def take_migrations(self) -> int:
        """How many requests moved to another engine since anybody asked last.

        The frontend is asked at most every quarter of a second; those in between are counted
        with the next answer.
        """
        with self._lock:
            now = time.monotonic()
            if now - self._asked_migrations_at < MIGRATIONS_EVERY_S:
                return 0
            self._asked_migrations_at = now
        total = self._runtime.migrations()
        if total is None:
            return 0
        with self._lock:
            counted, self._counted_migrations = self._counted_migrations, total
        # A frontend that was replaced counts from 0.
        return total - counted if total >= counted else total

    def take_events(self) -> tuple[int, int]:
        """Both of the above in one call, for each costs a trip between processes."""
        return self.take_restarts(), self.take_migrations()

    def close(self) -> None:
        """Ends the server and everything that it started; closing twice is no error."""
        self._finalizer()
