"""What can go wrong, as one tree.

::

    VLLMDynamoError
    ├── ConfigurationError            a setting that cannot work (also a ValueError)
    ├── StartError                    the servers did not come up (also a RuntimeError)
    │   ├── MissingDependencyError    a program or package is not installed
    │   ├── ChildExitedError          a child process ended while it was needed
    │   ├── StartTimeoutError         nothing exited, but not everything became ready
    │   └── DevicesBusyError          another runtime holds the same devices
    ├── RuntimeFailedError            the servers ran, failed, and could not be revived
    └── InferenceFailedError          elements of a batch that have no answer

Every error carries all of its state in ``args``, so it survives the pickling that a
``MultiProcessShared`` proxy does between the processes of one worker. No text holds an
environment (it may contain tokens) or more than a short excerpt of a prompt.

A failed element that is *returned* instead of raised is an :class:`InferenceError`
record: plain data with the same fields for every kind.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence


class VLLMDynamoError(Exception):
    """Base of every error that this package raises."""


class ConfigurationError(VLLMDynamoError, ValueError):
    """A setting that cannot work; the text names it, its value and the mend."""


class StartError(VLLMDynamoError, RuntimeError):
    """The servers of a worker did not come up."""


class MissingDependencyError(StartError):
    """A program or a Python package that the servers need is not installed."""


class ChildExitedError(StartError):
    """A child process ended while it was needed.

    Args:
      label: Which child, e.g. ``"engine 1 of 2"``.
      exit_status: How it ended, e.g. ``"exit status 1"`` or ``"killed by SIGKILL"``.
      log_tail: The last lines that it wrote, oldest first.
      hint: What to do about it, for the causes that are known; else empty.
    """

    def __init__(
        self, label: str, exit_status: str, log_tail: Sequence[str] = (), hint: str = ''
    ) -> None:
        self.label = label
        self.exit_status = exit_status
        self.log_tail = tuple(log_tail)
        self.hint = hint
        super().__init__(label, exit_status, self.log_tail, hint)

    def __str__(self) -> str:
        text = f'{self.label} ended: {self.exit_status}.'
        if self.hint:
            text += f' {self.hint}'
        return text + format_log_tail(self.log_tail)


class StartTimeoutError(StartError):
    """Not everything was ready in time, though no child had exited.

    Args:
      waited_s: How long the start was given, in seconds.
      expected: What was waited for.
      found: What there was instead at the last look.
      log_tail: The last log lines of the children that were not ready.
    """

    def __init__(
        self, waited_s: float, expected: str, found: str, log_tail: Sequence[str] = ()
    ) -> None:
        self.waited_s = waited_s
        self.expected = expected
        self.found = found
        self.log_tail = tuple(log_tail)
        super().__init__(waited_s, expected, found, self.log_tail)

    def __str__(self) -> str:
        return (
            f'Not ready after {self.waited_s:.0f} s: expected {self.expected}, found {self.found}. '
            'A large model may need a longer start_timeout_secs.' + format_log_tail(self.log_tail)
        )


class DevicesBusyError(StartError):
    """Another runtime on this machine holds the same devices."""


class RuntimeFailedError(VLLMDynamoError, RuntimeError):
    """The servers ran, something failed for good, and requests cannot be served.

    Args:
      reason: What failed and how often it was tried again.
      log_tail: The last log lines of the child that failed.
    """

    def __init__(self, reason: str, log_tail: Sequence[str] = ()) -> None:
        self.reason = reason
        self.log_tail = tuple(log_tail)
        super().__init__(reason, self.log_tail)

    def __str__(self) -> str:
        return self.reason + format_log_tail(self.log_tail)


class ErrorKind(enum.StrEnum):
    """Why one element has no answer.

    Attributes:
      INVALID_REQUEST: ``'invalid_request'``: the element is no request, or one that the server does
        not take. It was not tried again.
      PROMPT_TOO_LONG: ``'prompt_too_long'``: prompt and ``max_tokens`` together are longer than
        the model's context. It was not tried again.
      OVERLOADED: ``'overloaded'``: the server had no place for it for ``max_wait_secs``.
      UNAVAILABLE: ``'unavailable'``: for ``max_wait_secs`` there was no server, or no engine
        behind it.
      DEADLINE_EXCEEDED: ``'deadline_exceeded'``: its last attempt took ``request_timeout_secs``,
        or all of them ``element_timeout_secs``.
      ENGINE_DIED: ``'engine_died'``: its connection broke, or an engine failed under it, more
        than ``max_retries`` times; it may be what kills them.
      MALFORMED_RESPONSE: ``'malformed_response'``: what came is no answer of the OpenAI schema.
    """

    INVALID_REQUEST = 'invalid_request'
    PROMPT_TOO_LONG = 'prompt_too_long'
    OVERLOADED = 'overloaded'
    UNAVAILABLE = 'unavailable'
    DEADLINE_EXCEEDED = 'deadline_exceeded'
    ENGINE_DIED = 'engine_died'
    MALFORMED_RESPONSE = 'malformed_response'


@dataclasses.dataclass(frozen=True)
class InferenceError:
    """One element that has no answer, as data.

    Attributes:
      kind: Why, one of the :class:`ErrorKind` values.
      status: The last HTTP status, or ``None`` where no response came.
      message: What the server or the client said, without the prompt.
      details: More of it where there is more: for ``prompt_too_long`` the token counts
        ``limit`` and ``actual``.
      attempts: How many times the request was sent; 0 for one that no server could answer.
    """

    kind: ErrorKind
    status: int | None
    message: str
    details: Mapping[str, object] = dataclasses.field(default_factory=dict)
    attempts: int = 1

    def __str__(self) -> str:
        status = f'HTTP {self.status}, ' if self.status is not None else ''
        sent = {0: 'not sent', 1: 'sent once'}.get(self.attempts, f'sent {self.attempts} times')
        return f'{self.kind} ({status}{sent}): {self.message}'


class InferenceFailedError(VLLMDynamoError, RuntimeError):
    """Elements of one batch that have no answer; all others were tried to the end.

    Args:
      failures: ``(position in the batch, error)`` of each failed element.
      batch_size: How many elements the batch had.
    """

    SHOWN = 8  # enough to see a pattern; a batch may hold ten thousand elements

    def __init__(self, failures: Sequence[tuple[int, InferenceError]], batch_size: int) -> None:
        self.failures = tuple(failures)
        self.batch_size = batch_size
        super().__init__(self.failures, batch_size)

    def __str__(self) -> str:
        lines = [f'{len(self.failures)} of {self.batch_size} elements have no answer:']
        lines += [f'  element {index}: {error}' for index, error in self.failures[: self.SHOWN]]
        if len(self.failures) > self.SHOWN:
            lines.append(f'  and {len(self.failures) - self.SHOWN} more')
        lines.append("Pass on_error='return' to keep the answers of the others.")
        return '\n'.join(lines)


def format_log_tail(lines: Sequence[str]) -> str:
    """Renders the end of a child's log for the end of an error text."""
    if not lines:
        return ''
    return '\nThe end of its log:\n' + '\n'.join(f'  | {line}' for line in lines)
