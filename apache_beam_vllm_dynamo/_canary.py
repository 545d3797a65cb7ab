"""Whether vLLM's own server computes, which its health endpoint does not say.

The server answers there as long as its own process lives. The model runs in others, one for
each data-parallel rank, and these can hang; requests then wait for their deadline. So each rank
is looked at: whether its metrics move, and where they do not, whether it answers a request for
one token. A busy rank is not asked, for behind a long queue even a canary would wait for long.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from http import HTTPStatus

from apache_beam_vllm_dynamo._probes import Reply


class RankCanary:
    """Remembers when each rank was last seen to compute.

    Not thread-safe: one thread at a time asks.

    Args:
      ranks: How many data-parallel ranks there are.
      signs: Gives for each rank what changes while it computes, waiting at most so many
        seconds; ``None`` where nothing can be said.
      ask: Asks a rank for one token, waiting at most so many seconds; ``None`` once it came.
      wait_s: How long a rank may show no sign before it is asked, in seconds.
      timeout_s: How long its answer may take, in seconds.
      clock: Seconds that only ever grow.
    """

    def __init__(
        self,
        ranks: int,
        signs: Callable[[float], Sequence[object] | None],
        ask: Callable[[int, float], Reply | None],
        *,
        wait_s: float,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._signs = signs
        self._ask = ask
        self._wait_s = wait_s
        self._timeout_s = timeout_s
        self._clock = clock
        self._seen: list[object] = [None] * ranks
        self._computed_at = [clock()] * ranks

    def __call__(self, timeout_s: float) -> Reply | None:
        """``None`` while every rank computes or answers, else what is wrong with one."""
        due = [r for r, at in enumerate(self._computed_at) if self._clock() - at >= self._wait_s]
        if not due:
            return None
        signs = self._signs(timeout_s)
        for rank in due:
            if signs is not None and signs[rank] != self._seen[rank]:
                self._seen[rank] = signs[rank]
            elif (reply := self._ask(rank, self._timeout_s)) and not _is_refused(reply):
                problem = f'rank {rank} does not answer a request for one token: {reply}'
                return Reply(reply.status or HTTPStatus.SERVICE_UNAVAILABLE, problem=problem)
            self._computed_at[rank] = self._clock()
        return None


def _is_refused(reply: Reply) -> bool:
    """Whether the server does not take such a request, which says nothing about the rank."""
    return reply.status is not None and reply.status < HTTPStatus.INTERNAL_SERVER_ERROR
