"""An etcd that is not this runtime's: there is only waiting for it."""

from __future__ import annotations

import socket
import time
import urllib.parse
from collections.abc import Callable

LOOK_INTERVAL_S = 1.0
CONNECT_TIMEOUT_S = 0.5  # on the supervisor's thread, so short
ETCD_PORT = 2379


class ExternalEtcd:
    """Whether one of its endpoints can be reached; for what needs it to start.

    Args:
      endpoints: As ``ETCD_ENDPOINTS`` has them.
      clock: Seconds that only ever grow.
    """

    def __init__(self, endpoints: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._addresses = [_address(part) for part in endpoints.split(',') if part.strip()]
        self._clock = clock
        self._looked_at: float | None = None
        self._serves = False

    @property
    def serves(self) -> bool:
        """Whether one of them takes connections, as of the last second."""
        now = self._clock()
        if self._looked_at is None or now - self._looked_at >= LOOK_INTERVAL_S:
            self._serves = any(map(_takes_connections, self._addresses))
            self._looked_at = self._clock()
        return self._serves


def _address(endpoint: str) -> tuple[str, int]:
    endpoint = endpoint.strip()
    parts = urllib.parse.urlsplit(endpoint if '://' in endpoint else f'http://{endpoint}')
    return parts.hostname or '', parts.port or ETCD_PORT


def _takes_connections(address: tuple[str, int]) -> bool:
    try:
        with socket.create_connection(address, CONNECT_TIMEOUT_S):
            return True
    except OSError:
        return False
