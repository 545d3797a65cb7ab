"""How much of the prompts a perfect prefix cache would have held.

An engine says which tokens of a prompt it had in its cache; whether that is much depends on how
much the prompts have in common, which is counted here, from their bytes.
"""

from __future__ import annotations

import os
import threading

# Prompts are compared in pieces of so many bytes, from their beginning; a last, shorter piece is
# not looked at. Some fifty tokens of text.
PIECE_BYTES = 256
# So many pieces are remembered, and as many again of older ones: 50 MiB of prompts that share
# nothing, far more than a KV cache holds, in some 25 MiB of memory.
REMEMBERED_PIECES = 200_000
# A prompt of which less than this was seen before begins a prefix of its own.
NEW_BELOW = 0.5


class PrefixCensus:
    """Remembers how prompts began; for many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._recent: set[int] = set()
        self._older: set[int] = set()

    def seen_share(self, prompt: bytes) -> float:
        """Which share of a prompt one before began with, from 0 to 1, and remembers it."""
        pieces = len(prompt) // PIECE_BYTES
        seen = path = 0
        with self._lock:
            for piece in range(pieces):
                # Of the whole way from the beginning, for a piece counts only behind the others.
                start = piece * PIECE_BYTES
                path = hash((path, prompt[start : start + PIECE_BYTES]))
                if seen == piece and (path in self._recent or path in self._older):
                    seen += 1
                self._recent.add(path)
            if len(self._recent) >= REMEMBERED_PIECES:
                self._older, self._recent = self._recent, set()
        return seen * PIECE_BYTES / len(prompt) if prompt else 0.0


_censuses: dict[int, PrefixCensus] = {}


def census() -> PrefixCensus:
    """The census of this process."""
    return _censuses.setdefault(os.getpid(), PrefixCensus())
