"""A start: free addresses, and waiting while everything that is needed lives."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from apache_beam_vllm_dynamo._diagnosis import diagnose
from apache_beam_vllm_dynamo._prober import Prober
from apache_beam_vllm_dynamo._service import Service
from apache_beam_vllm_dynamo.errors import ChildExitedError, StartTimeoutError

_LOGGER = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.1  # of a start, whose parts take from half a second to many minutes
PROBE_TIMEOUT_S = 2.0  # what answers at all does so within milliseconds
PROGRESS_INTERVAL_S = 30.0  # a model load of minutes must not look like a hang
ADDRESS_ATTEMPTS = 3  # starts in all, when ports found free were taken before they were bound
TAIL_LINES = 15  # of each service that is not ready, in the error of a time-out


def await_probe(
    service: Service, needed: Sequence[Service], deadline: float, total_s: float
) -> None:
    """Waits until ``service`` serves.

    Args:
      service: What to wait for.
      needed: What must not end meanwhile.
      deadline: Until when, by the monotonic clock.
      total_s: How long the whole start was given, in seconds; for the error.

    Raises:
      ChildExitedError: One of ``needed`` ended, or ``service`` says why it will never serve.
      StartTimeoutError: It does not serve in time.
    """
    # A probe may hold a whole request, in which what is needed can end and the time run out.
    prober = Prober(f'{service.spec.label} probe')
    expected, found = f'{service.spec.label} to serve', 'no answer'
    asking = prober.submit(service.spec.probe, PROBE_TIMEOUT_S)
    try:
        while True:
            for other in needed:
                other.check_alive()
            if asking.done():
                answer = asking.result()
                if answer is None:
                    service.came_up()
                    return
                found = str(answer)
                if service.is_hopeless():
                    raise _given_up(service, 'it would never serve')
                asking = prober.submit(service.spec.probe, PROBE_TIMEOUT_S)
            if time.monotonic() > deadline:
                raise StartTimeoutError(total_s, expected, found, service.log_tail(TAIL_LINES))
            time.sleep(POLL_INTERVAL_S)
    finally:
        prober.end()


def await_engines(
    engines: Sequence[Service], needed: Sequence[Service], deadline: float, total_s: float
) -> None:
    """Waits until all ``engines``, which start side by side, serve; logs the progress.

    Raises:
      ChildExitedError: One of ``needed`` ended, or an engine cannot listen on its port.
      StartTimeoutError: Not all serve in time.
    """
    started = said = time.monotonic()
    total = len(engines)
    waiting = list(engines)
    while True:
        for other in needed:
            other.check_alive()
        for engine in tuple(waiting):
            if engine.spec.probe(PROBE_TIMEOUT_S) is None:
                engine.came_up()
                waiting.remove(engine)
                waited = time.monotonic() - started
                _LOGGER.info('%s ready after %.0f s', engine.spec.label, waited)
            elif engine.lost_its_port():
                raise _given_up(engine, 'it could not listen')
        if not waiting:
            return
        now = time.monotonic()
        if now > deadline:
            tail = [line for engine in waiting for line in engine.log_tail(TAIL_LINES)]
            found = f'{total - len(waiting)} of {total} healthy'
            raise StartTimeoutError(total_s, 'every engine to serve', found, tail)
        if now - said > PROGRESS_INTERVAL_S:
            said = now
            _LOGGER.info(
                '%d of %d engines ready after %.0f s', total - len(waiting), total, now - started
            )
        time.sleep(POLL_INTERVAL_S)


def _given_up(service: Service, why: str) -> ChildExitedError:
    """The error for one that lives, and is ended with all others."""
    tail = service.log_tail()
    return ChildExitedError(service.spec.label, why, tail, diagnose(tail).hint)


def with_free_addresses(start_once: Callable[[], None]) -> None:
    """Calls ``start_once`` again, with other addresses, when one of them was taken meanwhile.

    Raises:
      StartError: What the last try raised.
    """
    for attempt in range(1, ADDRESS_ATTEMPTS + 1):
        try:
            start_once()
        except ChildExitedError as error:
            taken = diagnose(error.log_tail).retry == 'other_addresses'
            if not taken or attempt == ADDRESS_ATTEMPTS:
                raise
            _LOGGER.warning('%s ended: %s Starting again on other ports.', error.label, error.hint)
        else:
            return
