"""An etcd that is not this runtime's: there is only waiting for it."""

from __future__ import annotations

import http.client
import json
import ssl
import time
import urllib.parse
from collections.abc import Callable, Mapping
from http import HTTPStatus

from apache_beam_vllm_dynamo.errors import StartError

# While it is away the supervisor's thread waits for it: an answer takes milliseconds.
READ_TIMEOUT_S = 1.0
LOOK_INTERVAL_S = 2.0
START_BOUND_S = 10.0  # one that starts at the same time, or elects a leader, takes seconds
START_PAUSE_S = 0.2
ETCD_PORT = 2379

MEND = (
    'Start it, mend the address, or unset the variable to have an etcd started on this worker; '
    "DynamoRuntimeConfig(discovery='file') needs none"
)


class ExternalEtcd:
    """Whether one of its endpoints serves; for what needs it to start.

    A connection says nothing: one that is stopped or has lost its quorum still takes them. So
    it is asked for its health, for which each member reads a key that needs the quorum.

    Args:
      endpoints: As ``ETCD_ENDPOINTS`` has them.
      env: Names the certificates in ``ETCD_AUTH_…``, where there are any.
      clock: Seconds that only ever grow.
    """

    def __init__(
        self,
        endpoints: str,
        env: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._endpoints = endpoints
        self._urls = [_url(part.strip()) for part in endpoints.split(',') if part.strip()]
        self._env = env or {}
        self._clock = clock
        self._looked_at: float | None = None
        self._serves = False

    @property
    def serves(self) -> bool:
        """Whether one of them does, as of the last two seconds."""
        now = self._clock()
        if self._looked_at is None or now - self._looked_at >= LOOK_INTERVAL_S:
            self._serves = not self.problem()
            self._looked_at = self._clock()
        return self._serves

    def problem(self) -> str:
        """Why none of them serves, by endpoint; empty if one does."""
        problems = []
        for url in self._urls:
            problem = self._problem_of(url)
            if not problem:
                return ''
            problems.append(f'{url.netloc}: {problem}')
        return '; '.join(problems) or 'no endpoint is named'

    def await_serving(self, deadline: float, given_up: Callable[[], bool] = lambda: False) -> None:
        """Waits some seconds until it serves.

        Args:
          deadline: Until when at most, by the clock.
          given_up: Whether nobody waits for it any more.

        Raises:
          StartError: It does not; names the endpoints and what is wrong with each.
        """
        deadline = min(deadline, self._clock() + START_BOUND_S)
        while problem := self.problem():
            if self._clock() >= deadline or given_up():
                raise StartError(
                    f'ETCD_ENDPOINTS is {self._endpoints!r}, where no etcd serves ({problem}). '
                    f'{MEND}.'
                )
            time.sleep(START_PAUSE_S)

    def _problem_of(self, url: urllib.parse.SplitResult) -> str:
        try:
            connection = self._connection(url)
            try:
                connection.request('GET', '/health')
                response = connection.getresponse()
                return _problem_in(response.status, response.read())
            finally:
                connection.close()
        except (OSError, ValueError, http.client.HTTPException) as error:
            return f'{type(error).__name__}: {error}'.rstrip(': ')

    def _connection(self, url: urllib.parse.SplitResult) -> http.client.HTTPConnection:
        host, port = url.hostname or '', url.port or ETCD_PORT
        if url.scheme != 'https':
            return http.client.HTTPConnection(host, port, timeout=READ_TIMEOUT_S)
        context = ssl.create_default_context(cafile=self._env.get('ETCD_AUTH_CA') or None)
        if certificate := self._env.get('ETCD_AUTH_CLIENT_CERT'):
            context.load_cert_chain(certificate, self._env.get('ETCD_AUTH_CLIENT_KEY') or None)
        return http.client.HTTPSConnection(host, port, timeout=READ_TIMEOUT_S, context=context)


def _url(endpoint: str) -> urllib.parse.SplitResult:
    return urllib.parse.urlsplit(endpoint if '://' in endpoint else f'http://{endpoint}')


def _problem_in(status: int, body: bytes) -> str:
    if status == HTTPStatus.NOT_FOUND:
        return ''  # a proxy before it, which keeps the question from it
    try:
        said = json.loads(body)
    except ValueError:
        said = None
    health = said.get('health') if isinstance(said, dict) else None
    if status == HTTPStatus.OK and str(health).lower() == 'true':
        return ''
    reason = said.get('reason') if isinstance(said, dict) else None
    return f'it says that it is not healthy (HTTP {status}{f", {reason}" if reason else ""})'
