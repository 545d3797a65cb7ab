"""Notices that the KV router has something to go by and no engine reuses anything.

A block size that differs between router and engines, an engine without prefix caching or a
cache too small for the prompts cost most of what the router is for, and fail nothing.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence

from apache_beam_vllm_dynamo._requests import PreparedRequest
from apache_beam_vllm_dynamo._responses import Answer, Outcome
from apache_beam_vllm_dynamo.errors import InferenceError

_LOGGER = logging.getLogger(__name__)

# Some hundred tokens in any script, so more than one KV block of 128, the largest default.
PREFIX_BYTES = 2048
# So many requests whose beginning had been answered before they were sent, and none reused it.
SURE_AFTER = 100
# A job that shows nothing in so many requests shares no prefixes to speak of.
LOOK_AT = 20_000


class ReuseWatch:
    """Watches the first requests of a process, and warns once at most; for many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._answered_at_ms: dict[int, int] = {}
        self._looked_at = 0
        self._expected = 0
        self._over = False

    def note(
        self, requests: Sequence[PreparedRequest | InferenceError], outcomes: Sequence[Outcome]
    ) -> None:
        """Looks at requests and their outcomes, one for each."""
        if self._over:
            return
        with self._lock:
            for request, outcome in zip(requests, outcomes, strict=True):
                if not isinstance(request, PreparedRequest) or not isinstance(outcome, Answer):
                    continue
                if not self._look(request, outcome):
                    self._over = True
                    self._answered_at_ms.clear()
                    return

    def _look(self, request: PreparedRequest, answer: Answer) -> bool:
        """Whether there is anything left to find out after this one."""
        usage = answer.response.usage
        details = usage.prompt_tokens_details if usage is not None else None
        if details is not None and details.cached_tokens:
            return False
        self._looked_at += 1
        if self._looked_at > LOOK_AT:
            return False
        if len(request.body) < PREFIX_BYTES:
            return True
        prefix = hash(request.body[:PREFIX_BYTES])
        first_ms = self._answered_at_ms.setdefault(prefix, answer.completed_at_ms)
        if answer.completed_at_ms - answer.latency_s * 1000 > first_ms:
            self._expected += 1
        if self._expected < SURE_AFTER:
            return True
        _LOGGER.warning(
            'The KV router is on and prompts begin alike, but of %d prompts whose beginning had '
            'been answered before no engine reused a token. Look whether prefix caching is off '
            'in the engines, whether their block size is not the one that the router was told, '
            'and whether their KV cache holds the prompts.',
            self._expected,
        )
        return False


_watches: dict[int, ReuseWatch] = {}


def watch() -> ReuseWatch:
    """The watch of this process."""
    return _watches.setdefault(os.getpid(), ReuseWatch())
