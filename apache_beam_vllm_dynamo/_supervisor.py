"""Watches the services of a stack for as long as it runs, and puts right what it can."""

from __future__ import annotations

import concurrent.futures
import logging
import threading
from collections.abc import Sequence

from apache_beam_vllm_dynamo._process import stop_all
from apache_beam_vllm_dynamo._restart import ChildState, ChildStatus
from apache_beam_vllm_dynamo._service import Service
from apache_beam_vllm_dynamo.errors import RuntimeFailedError

_LOGGER = logging.getLogger(__name__)

LOOK_INTERVAL_S = 0.1  # what a death costs before its replacement starts


class Supervisor:
    """One thread over all services of one stack.

    Args:
      services: In the order of their start.
      name: What the thread is called.
    """

    def __init__(self, services: Sequence[Service], name: str) -> None:
        self._services = tuple(services)
        self._ended = threading.Event()
        self._failure: RuntimeFailedError | None = None
        self._thread = threading.Thread(target=self._watch, name=name, daemon=True)

    def start(self) -> None:
        """Begins to watch."""
        self._thread.start()

    @property
    def failure(self) -> RuntimeFailedError | None:
        """Why the stack was given up, if it was."""
        return self._failure

    def statuses(self) -> tuple[ChildStatus, ...]:
        """What is known of each service."""
        return tuple(service.status for service in self._services)

    def end(self) -> None:
        """Stops watching; the services live on. Waits for a restart under way."""
        self._ended.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def _watch(self) -> None:
        # A probe that waits for a silent server holds its thread for seconds.
        with concurrent.futures.ThreadPoolExecutor(
            len(self._services), thread_name_prefix=f'{self._thread.name} probe'
        ) as probes:
            try:
                while not self._ended.wait(LOOK_INTERVAL_S):
                    for service in self._services:
                        service.tick(probes)
            except RuntimeFailedError as error:
                self._give_up(error)
            except Exception as error:
                _LOGGER.exception('the supervisor failed')
                self._give_up(RuntimeFailedError(f'The supervisor failed: {error!r}.'))

    def _give_up(self, error: RuntimeFailedError) -> None:
        _LOGGER.error('%s', error)
        self._failure = error
        # What still runs holds devices for a job that has failed.
        running = [s.process for s in self._services if s.process is not None]
        stop_all(running, 'the runtime was given up')
        for service in self._services:
            if service.status.state is not ChildState.FAILED:
                service.stopped()
