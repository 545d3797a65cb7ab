"""The error tree: as drawn, picklable, and plain about what happened."""

from __future__ import annotations

import copy
import inspect
import pickle
import re

import pytest

from apache_beam_vllm_dynamo import errors
from apache_beam_vllm_dynamo.errors import (
    ChildExitedError,
    ConfigurationError,
    DevicesBusyError,
    ErrorKind,
    InferenceError,
    InferenceFailedError,
    MissingDependencyError,
    RuntimeFailedError,
    StartError,
    StartTimeoutError,
    VLLMDynamoError,
    format_log_tail,
)

TOO_LONG = InferenceError(
    ErrorKind.PROMPT_TOO_LONG, 400, 'too long', {'limit': 2048, 'actual': 2349}
)
EXAMPLES: list[VLLMDynamoError] = [
    VLLMDynamoError('something'),
    ConfigurationError("router_mode is 'x'; it must be one of 'kv', 'round-robin'."),
    StartError('no ports'),
    MissingDependencyError('no etcd'),
    ChildExitedError('engine 1 of 2', 'exit status 1', ['a', 'b'], 'Lower max-num-seqs.'),
    ChildExitedError('etcd', 'killed by SIGKILL'),
    StartTimeoutError(30.4, '2 engines', '1 engine', ['loading']),
    DevicesBusyError('GPU 0 is held by process 12'),
    RuntimeFailedError('engine 1 ended 5 times', ('last',)),
    InferenceFailedError([(3, TOO_LONG)], 8),
]


def drawn_tree() -> dict[str, str]:
    """Each class of the drawing with the class that it hangs from."""
    parents: dict[str, str] = {}
    path: list[str] = []
    for line in (errors.__doc__ or '').splitlines():
        match = re.match(r'    ([│├└─ ]*)([A-Z]\w+Error)\b', line)
        if match:
            depth = len(match[1]) // 4
            path[depth:] = [match[2]]
            parents[match[2]] = path[depth - 1] if depth else 'Exception'
    return parents


def test_the_tree_is_as_drawn() -> None:
    actual = {
        name: cls.__bases__[0].__name__
        for name, cls in inspect.getmembers(errors, inspect.isclass)
        if issubclass(cls, BaseException) and cls.__module__ == errors.__name__
    }
    assert drawn_tree() == actual
    assert len(actual) == 9


@pytest.mark.parametrize(
    ('error', 'builtin'),
    [
        (ConfigurationError, ValueError),
        (StartError, RuntimeError),
        (RuntimeFailedError, RuntimeError),
        (InferenceFailedError, RuntimeError),
    ],
)
def test_an_error_is_caught_as_the_builtin_that_is_noted(
    error: type[Exception], builtin: type[Exception]
) -> None:
    assert issubclass(error, builtin)


def test_every_class_has_an_example_here() -> None:
    assert {type(error).__name__ for error in EXAMPLES} == set(drawn_tree())


@pytest.mark.parametrize('through', ['pickle', 'copy'])
@pytest.mark.parametrize('error', EXAMPLES, ids=lambda e: type(e).__name__)
def test_an_error_crosses_processes_with_its_text_and_attributes(
    error: VLLMDynamoError, through: str
) -> None:
    there = pickle.loads(pickle.dumps(error)) if through == 'pickle' else copy.deepcopy(error)
    assert type(there) is type(error)
    assert str(there) == str(error) != ''
    assert there.__dict__ == error.__dict__
    assert there.args == error.args


def test_an_exited_child_is_told_with_the_mend_and_the_end_of_its_log() -> None:
    assert str(EXAMPLES[4]) == (
        'engine 1 of 2 ended: exit status 1. Lower max-num-seqs.\nThe end of its log:\n  | a\n  | b'
    )
    assert str(EXAMPLES[5]) == 'etcd ended: killed by SIGKILL.'


def test_a_timeout_says_what_was_expected_and_found_and_which_field_to_raise() -> None:
    assert str(EXAMPLES[6]) == (
        'Not ready after 30 s: expected 2 engines, found 1 engine. A large model may need a longer '
        'start_timeout_secs.\nThe end of its log:\n  | loading'
    )


def test_no_log_leaves_no_heading() -> None:
    assert format_log_tail(()) == ''


@pytest.mark.parametrize(
    ('error', 'text'),
    [
        (TOO_LONG, 'prompt_too_long (HTTP 400, sent once): too long'),
        (
            InferenceError(ErrorKind.UNAVAILABLE, None, 'gone', attempts=3),
            'unavailable (sent 3 times): gone',
        ),
        (
            InferenceError(ErrorKind.INVALID_REQUEST, None, 'no prompt', attempts=0),
            'invalid_request (not sent): no prompt',
        ),
    ],
    ids=['once', 'often', 'never'],
)
def test_a_failed_element_says_how_often_it_was_sent(error: InferenceError, text: str) -> None:
    assert str(error) == text
    assert pickle.loads(pickle.dumps(error)) == error


def test_a_failed_batch_shows_the_first_failures_and_counts_the_rest() -> None:
    failures = [(index, TOO_LONG) for index in range(20)]
    text = str(InferenceFailedError(failures, 32))
    assert text.startswith('20 of 32 elements have no answer:\n  element 0: prompt_too_long')
    assert text.count('  element ') == InferenceFailedError.SHOWN
    assert 'and 12 more' in text
    assert "on_error='return'" in text
    assert 'more' not in str(InferenceFailedError(failures[: InferenceFailedError.SHOWN], 32))


def test_kinds_are_plain_strings() -> None:
    """They are written to JSON and to schemas by their values."""
    assert f'{ErrorKind.OVERLOADED}' == 'overloaded'
    assert all(kind == kind.name.lower() for kind in ErrorKind)
