"""Pure: what a response that is no answer means, and how long to wait before the next try.

Two limits, for two questions:

* *Is the server there for anybody?* Overload (429, 529, 503), a model that is not routed yet or
  not at the moment (503, or 404) and a refused connection say nothing about the element.
  They are waited out, however often they come, until the element has lost ``max_wait_s`` to
  them. ``max_retries`` does not count them: a frontend that is away for a minute would use up
  any count.
* *Is it this element?* Another answer of 5xx, a connection that broke with the request under
  way, an answer that cannot be read and an attempt that timed out happened *to this element*
  while the server was there. ``max_retries`` counts them, because the element itself may be
  what kills the engine, and it must not do so for ever: it has :data:`MAX_DEATHS` of them, for
  after a few more the supervisor gives the whole server up.

Dynamo has one answer for "no engine is there" and "the engine that had your request died": a
503 with the same body. The first comes at once, so a 503 that took longer than
:data:`ENGINE_LOST_AFTER_S` is taken for the second and is counted. But a frontend that reads
hundreds of long prompts at once is that slow for want of an engine, too, for as long as the only
one loads its model again. So while :data:`CROWD` or more are in flight, of several such answers
to one element only those are counted between which the server has answered somebody: without an
engine that could, none can die. With fewer the frontend has no cause to be slow, and an element
that kills its engine may well be the last one left.

A frontend that has lost its way to the engines answers 500 until it has found it again or is
replaced, and 500 is what an element gets that an engine fails on, too. So of all such answers to
a crowd only the first is counted until somebody has been answered again, and all of them once
that has gone on for :data:`ERRING_S`.

``element_timeout_s`` bounds both together.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import email.utils
import enum
import http
import math
from collections.abc import Callable, Mapping

from apache_beam_vllm_dynamo._error_bodies import (
    ErrorBody,
    excerpt,
    length_text,
    parse_error,
    too_long,
)
from apache_beam_vllm_dynamo.errors import ConfigurationError, ErrorKind

# As long as Beam's own handler lets one request take.
DEFAULT_REQUEST_TIMEOUT_S = 600.0
# Three attempts that each run into the default above.
DEFAULT_ELEMENT_TIMEOUT_S = 1800.0
# A large model takes minutes to load, and a replaced engine must load it again.
DEFAULT_MAX_WAIT_S = 600.0
DEFAULT_MAX_RETRIES = 6
# Long enough to see what a server complains about, short enough to hold no whole prompt.
DEFAULT_EXCERPT_CHARS = 200

# The gap after a start or a restart in which a model is not routed is about half a second.
FIRST_BACKOFF_S = 0.1
# A frontend without an engine answers within milliseconds, tens of them under load; seconds only
# where it has to read hundreds of long prompts first.
ENGINE_LOST_AFTER_S = 1.0
# A frontend reads as many prompts of 100,000 tokens in ENGINE_LOST_AFTER_S.
CROWD = 4
# A frontend that lost etcd for longer than its lease answers so for some seconds until it ends.
ERRING_S = 20.0
# For a moment vLLM's own server says of a dead engine that it died to those that come later, too;
# no engine is started again in so short a time.
RESTART_TAKES_S = 2.0
# An element should notice within seconds that the server is there again.
MAX_BACKOFF_S = 8.0
# With how many deaths of a server or an engine an element is given up: fewer than the supervisor
# answers with a restart, so that the element ends before its server does.
MAX_DEATHS = 4
# Without an end 2 ** attempts overflows a float after a thousand waits.
_MAX_DOUBLINGS = 16


@dataclasses.dataclass(frozen=True)
class RequestLimits:
    """How long and how often an element is tried; see the module's text for the two counts.

    Attributes:
      request_timeout_s: Bound of one attempt, in seconds.
      element_timeout_s: Bound of all attempts of an element and the waits between them, in
        seconds, from its first sending on; the time in the queue before is not counted.
      max_wait_s: How many seconds an element may lose to a server that is overloaded or away.
      max_retries: How many failures of its own an element is sent again after; of those in
        which a server or an engine died, at most ``MAX_DEATHS - 1``.
      excerpt_chars: How much of a server's error message is kept; 0 keeps nothing, for
        servers that repeat the prompt in it.

    Raises:
      ConfigurationError: A value is not a number, or below its least.
    """

    request_timeout_s: float = DEFAULT_REQUEST_TIMEOUT_S
    element_timeout_s: float = DEFAULT_ELEMENT_TIMEOUT_S
    max_wait_s: float = DEFAULT_MAX_WAIT_S
    max_retries: int = DEFAULT_MAX_RETRIES
    excerpt_chars: int = DEFAULT_EXCERPT_CHARS

    def __post_init__(self) -> None:
        for name in ('request_timeout_s', 'element_timeout_s', 'max_wait_s'):
            value = getattr(self, name)
            lowest = 0 if name == 'max_wait_s' else math.ulp(0)
            if not _is_number(value) or not value >= lowest:
                raise ConfigurationError(
                    f'{name} is {value!r}: it must be a number of seconds'
                    f'{"" if name == "max_wait_s" else " above 0"}.'
                )
        for name in ('max_retries', 'excerpt_chars'):
            value = getattr(self, name)
            if not is_whole_number(value) or value < 0:
                raise ConfigurationError(f'{name} is {value!r}: it must be a whole number from 0.')


class RetryReason(enum.StrEnum):
    """Why a request was sent again."""

    OVERLOADED = 'overloaded'
    UNAVAILABLE = 'unavailable'
    NOT_ROUTED = 'not_routed'
    CONNECT = 'connect'
    DISCONNECT = 'disconnect'
    ENGINE_LOST = 'engine_lost'
    SERVER_ERROR = 'server_error'
    MALFORMED = 'malformed'
    TIMEOUT = 'timeout'


_OVERLOADED = 529  # what Dynamo answers; the standard library does not know it
_BUSY = frozenset(
    {http.HTTPStatus.TOO_MANY_REQUESTS, http.HTTPStatus.SERVICE_UNAVAILABLE, _OVERLOADED}
)
_NEVER = frozenset({http.HTTPStatus.NOT_IMPLEMENTED, http.HTTPStatus.HTTP_VERSION_NOT_SUPPORTED})
_LATE = frozenset(
    {http.HTTPStatus.REQUEST_TIMEOUT, http.HTTPStatus.TOO_EARLY, http.HTTPStatus.GATEWAY_TIMEOUT}
)
_TOO_LARGE = 413  # its name changed between the versions of Python
_MAY_BE_LENGTH = frozenset(
    {http.HTTPStatus.BAD_REQUEST, http.HTTPStatus.UNPROCESSABLE_ENTITY, _TOO_LARGE}
)
# Dynamo's 404 for a model whose last engine has left it. No element names a model of its own, so
# it is never a wrong name.
_NO_MODEL = 'Model not found'
# What vLLM's own server answers with a 500 to all that its engine had when it died.
_ENGINE_DEAD = 'EngineCore encountered an issue'
# The type in the body of a 503 by which older releases of Dynamo said what 529 says now.
_OVERLOAD_TYPES = frozenset({'Overloaded', 'ResourceExhausted'})
# How it ends when the tries are used up.
FINAL_KIND: Mapping[RetryReason, ErrorKind] = {
    RetryReason.OVERLOADED: ErrorKind.OVERLOADED,
    RetryReason.UNAVAILABLE: ErrorKind.UNAVAILABLE,
    RetryReason.NOT_ROUTED: ErrorKind.UNAVAILABLE,
    RetryReason.CONNECT: ErrorKind.UNAVAILABLE,
    RetryReason.DISCONNECT: ErrorKind.ENGINE_DIED,
    RetryReason.ENGINE_LOST: ErrorKind.ENGINE_DIED,
    RetryReason.SERVER_ERROR: ErrorKind.ENGINE_DIED,
    RetryReason.MALFORMED: ErrorKind.MALFORMED_RESPONSE,
    RetryReason.TIMEOUT: ErrorKind.DEADLINE_EXCEEDED,
}
# Reasons that say nothing about the element: waited out, not counted.
WAITED_OUT = frozenset(
    {
        RetryReason.OVERLOADED,
        RetryReason.UNAVAILABLE,
        RetryReason.NOT_ROUTED,
        RetryReason.CONNECT,
    }
)
# Reasons for which the element itself may be to blame, together with all that were in flight.
DEATHS = frozenset({RetryReason.DISCONNECT, RetryReason.ENGINE_LOST})


@dataclasses.dataclass(frozen=True, slots=True)
class Again:
    """The attempt failed in a way that another one may not.

    Attributes:
      reason: What happened.
      status: The HTTP status, or ``None`` where no response came.
      message: What the server or the client said.
      retry_after_s: How long the server asked to wait, if it did.
    """

    reason: RetryReason
    status: int | None
    message: str
    retry_after_s: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Refused:
    """The server will not answer this request, however often it is sent.

    Attributes:
      kind: Why.
      status: The HTTP status.
      message: What the server said.
      details: More of it, e.g. the token counts of a prompt that is too long.
    """

    kind: ErrorKind
    status: int | None
    message: str
    details: Mapping[str, object] = dataclasses.field(default_factory=dict)


def classify(
    status: int,
    headers: Mapping[str, str],
    body: bytes,
    *,
    took_s: float = 0.0,
    excerpt_chars: int = DEFAULT_EXCERPT_CHARS,
    now: dt.datetime | None = None,
) -> Again | Refused:
    """Says what a response with a status other than 200 means.

    Args:
      status: Its HTTP status.
      headers: Its headers; looked up as ``Retry-After``.
      body: Its body, as it came.
      took_s: How long it took to come, in seconds.
      excerpt_chars: How much of the server's message to keep.
      now: The time that a ``Retry-After`` date is compared with; the present by default.
    """
    said = parse_error(body)
    message = excerpt(said.message, excerpt_chars) or f'the server answered {status}'
    reason = _passing(status, body, said, took_s)
    if reason is RetryReason.NOT_ROUTED:
        return Again(reason, status, 'the server does not route the model yet')
    if reason is not None:
        return Again(reason, status, message, retry_after_s(headers.get('Retry-After'), now))
    if status < http.HTTPStatus.BAD_REQUEST:
        text = f'the server answered {status}, which is no answer to a completion'
        return Refused(ErrorKind.MALFORMED_RESPONSE, status, text)
    if status == _TOO_LARGE and not said.message:
        message = 'the request is larger than the server takes'
    lengths = too_long(said) if status in _MAY_BE_LENGTH else None
    if lengths is not None:
        return Refused(ErrorKind.PROMPT_TOO_LONG, status, length_text(lengths, message), lengths)
    return Refused(ErrorKind.INVALID_REQUEST, status, message)


def _passing(status: int, body: bytes, said: ErrorBody, took_s: float) -> RetryReason | None:
    """Why another attempt may be answered; ``None`` if it will not."""
    if status == http.HTTPStatus.SERVICE_UNAVAILABLE and said.type not in _OVERLOAD_TYPES:
        lost = took_s >= ENGINE_LOST_AFTER_S
        return RetryReason.ENGINE_LOST if lost else RetryReason.UNAVAILABLE
    if status in _BUSY:
        return RetryReason.OVERLOADED
    if status == http.HTTPStatus.NOT_FOUND and (
        not body.strip() or said.message.startswith(_NO_MODEL)
    ):
        return RetryReason.NOT_ROUTED
    if status == http.HTTPStatus.INTERNAL_SERVER_ERROR and said.message.startswith(_ENGINE_DEAD):
        return RetryReason.ENGINE_LOST
    if status in _LATE:
        return RetryReason.TIMEOUT
    if status >= http.HTTPStatus.INTERNAL_SERVER_ERROR and status not in _NEVER:
        return RetryReason.SERVER_ERROR
    return None


def retry_after_s(value: str | None, now: dt.datetime | None = None) -> float | None:
    """Reads a ``Retry-After`` header, seconds or an HTTP date; ``None`` if it says nothing."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            date = email.utils.parsedate_to_datetime(value)
        except ValueError:
            return None
        if date.tzinfo is None:
            date = date.replace(tzinfo=dt.UTC)
        seconds = (date - (now or dt.datetime.now(dt.UTC))).total_seconds()
    return max(0.0, seconds) if math.isfinite(seconds) else None


def backoff_s(
    tries: int, retry_after: float | None = None, random: Callable[[], float] = lambda: 1.0
) -> float:
    """How long to wait before the next attempt, in seconds.

    Doubles from :data:`FIRST_BACKOFF_S` to :data:`MAX_BACKOFF_S` and takes a random half to
    whole of that, so that a burst which was refused together does not return together. A
    server that asked for more gets what it asked for and up to a tenth more.

    Args:
      tries: How many attempts failed for this kind of reason, 1 or more.
      retry_after: What the server asked for, in seconds.
      random: Gives a number from 0 to 1.
    """
    whole = min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** min(tries - 1, _MAX_DOUBLINGS))
    delay = whole * (0.5 + 0.5 * random())
    if retry_after is not None:
        delay = max(delay, retry_after * (1 + 0.1 * random()))
    return delay


class Tries:
    """What became of the attempts of one element, and what follows from that.

    Attributes:
      attempts: How many there were.
      deaths: In how many of them the server or the engine died.
      retried: Why each attempt but the last was not the last.
      last: How the last one failed, if it did.
    """

    __slots__ = (
        '_answered',
        '_counted',
        '_died_at',
        '_limits',
        '_waited_s',
        '_waits',
        'attempts',
        'deaths',
        'last',
        'retried',
    )

    def __init__(self, limits: RequestLimits) -> None:
        self._limits = limits
        self._answered: int | None = None  # when it was last there as an engine died
        self._counted = 0
        self._died_at = -math.inf  # by a server that says so itself
        self._waits = 0
        self._waited_s = 0.0
        self.attempts = 0
        self.deaths = 0
        self.retried: list[RetryReason] = []
        self.last: Again | None = None

    def begin(self) -> None:
        """Notes that an attempt is made."""
        if self.last is not None:
            self.retried.append(self.last.reason)
        self.attempts += 1

    def judge(
        self, again: Again, answered: int, in_flight: int, now: float, erring_s: float | None
    ) -> Again:
        """What the failure of the last attempt means beside those before it.

        Args:
          again: How it failed.
          answered: How many requests the server has answered by now, whoever sent them.
          in_flight: How many are on their way, this one among them.
          now: Seconds that only ever grow.
          erring_s: How many seconds ago the server answered with the first of the errors since
            which it has answered nobody; ``None`` where this is the first.
        """
        if again.reason is RetryReason.SERVER_ERROR:
            others = erring_s is not None and erring_s < ERRING_S and in_flight >= CROWD
            return dataclasses.replace(again, reason=RetryReason.UNAVAILABLE) if others else again
        if again.reason is not RetryReason.ENGINE_LOST:
            return again
        if again.status != http.HTTPStatus.SERVICE_UNAVAILABLE:
            if now - self._died_at < RESTART_TAKES_S:
                return dataclasses.replace(again, reason=RetryReason.UNAVAILABLE)
            self._died_at = now
            return again
        before, self._answered = self._answered, answered
        if answered == before and in_flight >= CROWD:
            return dataclasses.replace(again, reason=RetryReason.UNAVAILABLE)
        return again

    def wait_after(self, again: Again, took_s: float, random: Callable[[], float]) -> float | None:
        """How long to wait before the next attempt; ``None`` if there must be none.

        Args:
          again: How the last attempt failed.
          took_s: How long it took, in seconds.
          random: Gives a number from 0 to 1.
        """
        self.last = again
        if again.reason in WAITED_OUT:
            self._waits += 1
            self._waited_s += took_s
            left_s = self._limits.max_wait_s - self._waited_s
            if left_s <= 0:
                return None
            # The last attempt is made at the very end of the time.
            wait_s = min(left_s, backoff_s(self._waits, again.retry_after_s, random))
            self._waited_s += wait_s
            return wait_s
        self._counted += 1
        self.deaths += again.reason in DEATHS
        if self._counted > self._limits.max_retries or self.deaths >= MAX_DEATHS:
            return None
        return backoff_s(self._counted, again.retry_after_s, random)


def is_whole_number(value: object) -> bool:
    """Whether a value is an integer and no boolean."""
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
