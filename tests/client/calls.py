"""Calls of the client and what they gave, for its tests."""

from __future__ import annotations

import contextlib
import pathlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

from openai.types import Completion

from apache_beam_vllm_dynamo._requests import Endpoint, PreparedRequest, RequestBuilder
from apache_beam_vllm_dynamo._responses import Failure, Outcome
from apache_beam_vllm_dynamo._retry import RequestLimits
from apache_beam_vllm_dynamo.errors import (
    ErrorKind,
    InferenceError,
)

WINDOW = 8
# Short, so that the tests need not wait for what ends by a limit.
QUICK = RequestLimits(
    request_timeout_s=10.0, element_timeout_s=20.0, max_wait_s=10.0, max_retries=2
)
BUILDER = RequestBuilder('model', Endpoint.COMPLETIONS)


def sockets() -> list[str]:
    found = []
    for descriptor in pathlib.Path('/proc/self/fd').iterdir():
        with contextlib.suppress(OSError):
            target = str(descriptor.readlink())
            if target.startswith(('socket:', 'anon_inode:[eventpoll]')):
                found.append(target)
    return found


def loops() -> int:
    """How many event loop threads of clients there are."""
    return [thread.name for thread in threading.enumerate()].count('vllm-dynamo-client')


def build(*elements: object) -> list[PreparedRequest | InferenceError]:
    return [BUILDER.build(element) for element in elements]


def texts(outcomes: Sequence[Outcome]) -> list[str | ErrorKind]:
    """The text of each answer, or the kind of error where there is none."""
    return [text_of(outcome) for outcome in outcomes]


def text_of(outcome: Outcome) -> str | ErrorKind:
    if isinstance(outcome, Failure):
        return outcome.error.kind
    assert isinstance(outcome.response, Completion)
    return outcome.response.choices[0].text


def failure(outcome: Outcome) -> InferenceError:
    assert isinstance(outcome, Failure), outcome
    assert outcome.error.attempts == outcome.attempts
    return outcome.error


class InThread(threading.Thread):
    """Calls a function in a thread and keeps what it returned or raised."""

    def __init__(self, function: Callable[[], Any]) -> None:
        super().__init__()
        self._function = function
        self.result: Any = None
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.result = self._function()
        except BaseException as error:  # noqa: BLE001  # the test looks at it
            self.error = error

    def wait(self) -> Any:
        self.join(20)
        assert not self.is_alive(), 'the call hangs'
        if self.error is not None:
            raise self.error
        return self.result
