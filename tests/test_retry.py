"""What a response means, and how long to wait after it."""

from __future__ import annotations

import datetime as dt
import json
import math
from typing import Any

import pytest

from apache_beam_vllm_dynamo._retry import (
    CROWD,
    ENGINE_LOST_AFTER_S,
    ERRING_S,
    FINAL_KIND,
    FIRST_BACKOFF_S,
    MAX_BACKOFF_S,
    RESTART_TAKES_S,
    Again,
    Refused,
    RequestLimits,
    RetryReason,
    Tries,
    backoff_s,
    classify,
    retry_after_s,
)
from apache_beam_vllm_dynamo._service import RESTART_POLICY
from apache_beam_vllm_dynamo.errors import ConfigurationError, ErrorKind
from tests.fake_server import DYNAMO_TOO_LONG, VLLM_TOO_LONG


def flat(message: str, kind: str = 'Said', code: int = 400) -> bytes:
    return json.dumps({'message': message, 'type': kind, 'code': code}).encode()


def nested(message: str, **more: Any) -> bytes:
    return json.dumps({'error': {'message': message, 'type': 'BadRequestError', **more}}).encode()


ENGINE_DEAD = 'EngineCore encountered an issue. See stack trace (above) for the root cause.'
AGAIN: list[tuple[int, bytes, RetryReason]] = [
    (429, b'', RetryReason.OVERLOADED),
    (529, flat('Service temporarily overloaded', 'Overloaded', 529), RetryReason.OVERLOADED),
    (503, flat('full', 'ResourceExhausted', 503), RetryReason.OVERLOADED),
    (503, flat('Service temporarily unavailable'), RetryReason.UNAVAILABLE),
    (503, b'<html>', RetryReason.UNAVAILABLE),
    (404, b'', RetryReason.NOT_ROUTED),
    (404, b' \n', RetryReason.NOT_ROUTED),
    (404, flat('Model not found', 'Not Found', 404), RetryReason.NOT_ROUTED),
    (408, b'', RetryReason.TIMEOUT),
    (504, flat('Request deadline exceeded'), RetryReason.TIMEOUT),
    (500, flat('Internal error'), RetryReason.SERVER_ERROR),
    (502, b'', RetryReason.SERVER_ERROR),
    (500, nested(ENGINE_DEAD), RetryReason.ENGINE_LOST),
]


@pytest.mark.parametrize(('status', 'body', 'reason'), AGAIN)
def test_what_may_pass_is_tried_again(status: int, body: bytes, reason: RetryReason) -> None:
    verdict = classify(status, {}, body)
    assert isinstance(verdict, Again)
    assert (verdict.reason, verdict.status) == (reason, status)


REFUSED: list[tuple[int, bytes, ErrorKind]] = [
    (400, flat('Unsupported parameter'), ErrorKind.INVALID_REQUEST),
    (400, b'', ErrorKind.INVALID_REQUEST),
    (400, nested(ENGINE_DEAD), ErrorKind.INVALID_REQUEST),
    (401, b'', ErrorKind.INVALID_REQUEST),
    (403, b'', ErrorKind.INVALID_REQUEST),
    (404, nested('The model `other` does not exist.'), ErrorKind.INVALID_REQUEST),
    (404, b'{"detail": "Not Found"}', ErrorKind.INVALID_REQUEST),
    (405, b'', ErrorKind.INVALID_REQUEST),
    (413, b'', ErrorKind.INVALID_REQUEST),
    (422, b'{"detail": [{"loc": ["body"], "msg": "bad"}]}', ErrorKind.INVALID_REQUEST),
    (501, b'', ErrorKind.INVALID_REQUEST),
    (302, b'', ErrorKind.MALFORMED_RESPONSE),
    (204, b'', ErrorKind.MALFORMED_RESPONSE),
]


@pytest.mark.parametrize(('status', 'body', 'kind'), REFUSED)
def test_what_cannot_pass_is_never_tried_again(status: int, body: bytes, kind: ErrorKind) -> None:
    verdict = classify(status, {}, body)
    assert isinstance(verdict, Refused)
    assert (verdict.kind, verdict.status) == (kind, status)
    assert verdict.message


def test_a_503_that_took_long_is_the_death_of_the_engine_that_had_the_request() -> None:
    body = flat('Service temporarily unavailable', 'Service Unavailable', 503)
    quick = classify(503, {}, body, took_s=ENGINE_LOST_AFTER_S / 2)
    slow = classify(503, {}, body, took_s=ENGINE_LOST_AFTER_S)
    assert isinstance(quick, Again)
    assert isinstance(slow, Again)
    assert (quick.reason, slow.reason) == (RetryReason.UNAVAILABLE, RetryReason.ENGINE_LOST)


def test_an_overload_that_took_long_is_still_an_overload() -> None:
    verdict = classify(503, {}, flat('full', 'ResourceExhausted'), took_s=100)
    assert isinstance(verdict, Again)
    assert verdict.reason is RetryReason.OVERLOADED


def test_every_reason_has_a_kind_for_its_end() -> None:
    assert set(FINAL_KIND) == set(RetryReason)


TOO_LONG: list[tuple[bytes, dict[str, object]]] = [
    (json.dumps(DYNAMO_TOO_LONG).encode(), {'limit': 2048, 'actual': 2349}),
    (json.dumps(VLLM_TOO_LONG).encode(), {'limit': 2048, 'actual': 2033}),
    (
        nested(
            'The decoder prompt (length 12324) is longer than the maximum model length of 8192. '
            'Make sure that `max_model_len` is no smaller than the number of text tokens.'
        ),
        {'limit': 8192, 'actual': 12324},
    ),
    (
        nested(
            "This model's maximum context length is 4096 tokens. However, you requested 5016 "
            'tokens (5000 in the messages, 16 in the completion).'
        ),
        {'limit': 4096, 'actual': 5000},
    ),
    (
        json.dumps(
            {
                'object': 'error',
                'message': "This model's maximum context length is 4096 tokens and your request "
                'has 2778 input tokens (8000 > 4096 - 2778).',
                'code': 400,
            }
        ).encode(),
        {'limit': 4096, 'actual': 2778},
    ),
    (
        nested(
            "This model's maximum context length is 64 tokens. However, you requested 16 output "
            'tokens and your prompt contains 9000 characters (more than 480 characters, which is '
            'the upper bound for 48 input tokens).',
            param='input_text',
        ),
        {'limit': 64},
    ),
    (nested('Too long, in words of tomorrow.', param='input_tokens'), {}),
    (json.dumps({'message': '', 'details': {'type': 'context_length'}}).encode(), {}),
]


@pytest.mark.parametrize(('body', 'lengths'), TOO_LONG)
def test_a_prompt_that_is_too_long_is_told_with_its_lengths(
    body: bytes, lengths: dict[str, object]
) -> None:
    verdict = classify(400, {}, body)
    assert isinstance(verdict, Refused)
    assert verdict.kind is ErrorKind.PROMPT_TOO_LONG
    assert verdict.details == lengths
    for number in lengths.values():
        assert str(number) in verdict.message


def test_numbers_in_another_complaint_are_not_taken_for_lengths() -> None:
    body = nested('temperature must be between 0 and 2, got 2048. The context length is fine.')
    verdict = classify(400, {}, body)
    assert isinstance(verdict, Refused)
    assert (verdict.kind, verdict.details) == (ErrorKind.INVALID_REQUEST, {})


@pytest.mark.parametrize(
    'body', [flat('a' * 1000), nested('a' * 1000), b'a' * 1000, b'["a"]' * 300]
)
def test_a_servers_words_are_cut_to_an_excerpt(body: bytes) -> None:
    assert len(classify(400, {}, body, excerpt_chars=50).message) <= 53


def test_a_servers_words_can_be_dropped() -> None:
    verdict = classify(400, {}, flat('bad prompt: SECRET'), excerpt_chars=0)
    assert verdict.message == 'the server answered 400'


@pytest.mark.parametrize('body', [b'\xff\xfe', b'[' * 100_000, b'null', b'3', b'{"error": null}'])
def test_no_error_body_breaks_the_client(body: bytes) -> None:
    assert isinstance(classify(400, {}, body), Refused)


NOON = dt.datetime(2026, 1, 2, 12, 0, 0, tzinfo=dt.UTC)


@pytest.mark.parametrize(
    ('header', 'seconds'),
    [
        (None, None),
        ('7', 7.0),
        ('0.5', 0.5),
        ('-3', 0.0),
        ('Fri, 02 Jan 2026 12:00:30 GMT', 30.0),
        ('Fri, 02 Jan 2026 11:00:00 GMT', 0.0),
        ('soon', None),
        ('', None),
        ('nan', None),
        ('inf', None),
    ],
)
def test_retry_after_is_read_as_seconds_or_as_a_date(
    header: str | None, seconds: float | None
) -> None:
    assert retry_after_s(header, NOON) == seconds


def test_a_servers_wish_reaches_the_verdict() -> None:
    verdict = classify(429, {'Retry-After': '3'}, b'')
    assert isinstance(verdict, Again)
    assert verdict.retry_after_s == 3


def test_waits_double_up_to_a_bound() -> None:
    waits = [backoff_s(tries) for tries in (1, 2, 3, 50, 10_000)]
    assert waits == [
        FIRST_BACKOFF_S,
        2 * FIRST_BACKOFF_S,
        4 * FIRST_BACKOFF_S,
        MAX_BACKOFF_S,
        MAX_BACKOFF_S,
    ]


def test_chance_takes_up_to_half_of_a_wait() -> None:
    assert backoff_s(1, random=lambda: 0.0) == FIRST_BACKOFF_S / 2


def test_nobody_comes_before_the_server_asked() -> None:
    assert backoff_s(1, 5.0, random=lambda: 0.0) == 5.0
    assert backoff_s(1, 5.0, random=lambda: 1.0) == 5.5
    assert backoff_s(1, 0.0) == FIRST_BACKOFF_S


@pytest.mark.parametrize(
    ('name', 'value'),
    [
        ('request_timeout_s', 0),
        ('request_timeout_s', -1),
        ('request_timeout_s', 'x'),
        ('request_timeout_s', math.nan),
        ('element_timeout_s', 0),
        ('element_timeout_s', True),
        ('max_wait_s', -1),
        ('max_retries', -1),
        ('max_retries', 2.5),
        ('max_retries', True),
        ('excerpt_chars', -1),
    ],
)
def test_a_limit_that_cannot_work_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=name):
        RequestLimits(**{name: value})


def test_limits_may_be_none_at_all() -> None:
    limits = RequestLimits(request_timeout_s=math.inf, max_wait_s=0, max_retries=0)
    assert limits.max_wait_s == 0


# What follows from one attempt after the other.


def waits(limits: RequestLimits, reasons: list[RetryReason], took_s: float = 0.0) -> list[Any]:
    tries = Tries(limits)
    return [
        tries.wait_after(Again(reason, None, 'what happened'), took_s, lambda: 1.0)
        for reason in reasons
    ]


def test_failures_of_an_elements_own_are_counted() -> None:
    own = [RetryReason.SERVER_ERROR, RetryReason.DISCONNECT, RetryReason.MALFORMED]
    assert waits(RequestLimits(max_retries=2), own) == [0.1, 0.2, None]


def test_a_server_that_is_busy_or_away_is_waited_out_by_time_not_by_count() -> None:
    away = [RetryReason.OVERLOADED, RetryReason.NOT_ROUTED, RetryReason.CONNECT]
    assert waits(RequestLimits(max_retries=0, max_wait_s=600), away) == [0.1, 0.2, 0.4]


def test_the_time_that_a_refusal_took_is_part_of_the_wait() -> None:
    away = [RetryReason.UNAVAILABLE] * 4
    assert waits(RequestLimits(max_wait_s=1.0), away, took_s=0.4) == [
        0.1,
        pytest.approx(0.1),  # what was left of the second, for one last attempt
        None,
        None,
    ]


def test_an_attempt_that_lasted_long_and_failed_by_itself_is_no_wait() -> None:
    mixed = [RetryReason.TIMEOUT, RetryReason.OVERLOADED]
    tries = Tries(RequestLimits(max_wait_s=10))
    assert tries.wait_after(Again(mixed[0], None, ''), 600.0, lambda: 1.0) == 0.1
    assert tries.wait_after(Again(mixed[1], None, ''), 0.1, lambda: 1.0) == 0.1


def test_a_server_may_ask_for_no_more_than_the_total_time() -> None:
    tries = Tries(RequestLimits(max_wait_s=5))
    again = Again(RetryReason.OVERLOADED, 429, '', retry_after_s=3600)
    assert tries.wait_after(again, 0.0, lambda: 1.0) == 5
    assert tries.wait_after(again, 0.0, lambda: 1.0) is None


def test_an_element_that_kills_its_server_ends_before_the_server_is_given_up() -> None:
    deaths = [RetryReason.DISCONNECT, RetryReason.ENGINE_LOST] * 2
    assert waits(RequestLimits(max_retries=100), deaths)[2:] == [0.4, None]
    assert len(deaths) < RESTART_POLICY.max_consecutive_failures


def test_only_the_death_of_a_server_or_an_engine_makes_a_suspect() -> None:
    tries = Tries(RequestLimits())
    for reason in RetryReason:
        tries.wait_after(Again(reason, None, ''), 0.0, lambda: 1.0)
    assert tries.deaths == 2


def test_an_engine_that_died_can_die_again_only_once_it_has_answered_somebody() -> None:
    """Until then a late refusal comes of a frontend that is slow, and is waited out."""
    tries = Tries(RequestLimits(max_retries=1))
    lost = Again(RetryReason.ENGINE_LOST, 503, '')
    judged = [tries.judge(lost, answered, CROWD, 0.0, None).reason for answered in (7, 7, 7, 8, 8)]
    died, away = RetryReason.ENGINE_LOST, RetryReason.UNAVAILABLE
    assert judged == [died, away, away, died, away]


def test_an_element_that_is_nearly_alone_is_to_blame_for_each_death() -> None:
    """No crowd makes the frontend slow, and all others may have been answered."""
    tries = Tries(RequestLimits())
    lost = Again(RetryReason.ENGINE_LOST, 503, '')
    assert [tries.judge(lost, 7, CROWD - 1, 0.0, None) for _ in range(3)] == [lost] * 3


def test_an_engine_that_is_said_to_be_dead_has_died_once_until_it_can_be_back() -> None:
    tries = Tries(RequestLimits())
    dead = Again(RetryReason.ENGINE_LOST, 500, '')
    times = (10.0, 10.1, 11.9, 10.0 + RESTART_TAKES_S, 13.0)
    judged = [tries.judge(dead, 7, CROWD, now, None).reason for now in times]
    died, away = RetryReason.ENGINE_LOST, RetryReason.UNAVAILABLE
    assert judged == [died, away, away, died, away]


def test_an_error_of_a_server_that_answers_nobody_is_waited_out_for_a_while() -> None:
    """A frontend that has lost its engines gives it to all; some prompts get it from an engine."""
    error = Again(RetryReason.SERVER_ERROR, 500, '')
    own, away = RetryReason.SERVER_ERROR, RetryReason.UNAVAILABLE

    def judged(in_flight: int, erring_s: float | None) -> RetryReason:
        return Tries(RequestLimits()).judge(error, 7, in_flight, 0.0, erring_s).reason

    assert [judged(CROWD, since) for since in (None, 0.0, 5.0)] == [own, away, away]
    assert judged(CROWD, ERRING_S) is own
    assert judged(CROWD - 1, 5.0) is own


def test_no_other_failure_is_judged_by_what_others_got() -> None:
    tries = Tries(RequestLimits())
    for reason in set(RetryReason) - {RetryReason.ENGINE_LOST, RetryReason.SERVER_ERROR}:
        again = Again(reason, None, '')
        assert [tries.judge(again, 0, CROWD, 0.0, None) for _ in range(3)] == [again] * 3
