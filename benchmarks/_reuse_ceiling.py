"""How much of some prompts could come from a cache: the ceiling of every cached share."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable, Sequence


@dataclasses.dataclass(frozen=True)
class Reuse:
    """What prompts share.

    Attributes:
      records: How many prompts.
      prompt_tokens: Tokens of all prompts.
      reusable_tokens: Those of them that an earlier prompt had in the same place, in whole blocks:
        what a single cache without end would save.
      working_set_tokens: Tokens of the blocks that several prompts have: what a cache must hold
        to save that in any order.
    """

    records: int
    prompt_tokens: int
    reusable_tokens: int
    working_set_tokens: int

    @property
    def ceiling(self) -> float:
        """The largest share of the prompts' tokens that can come from a cache."""
        return self.reusable_tokens / self.prompt_tokens


class ReuseCounter:
    """Looks at prompts one after the other, as a prefix cache would.

    Args:
      block_tokens: How many tokens are kept and found together.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._seen: dict[int, bool] = {}  # whether it came again
        self._records = self._prompt_tokens = self._reusable_blocks = 0

    def look(self, prompts: Iterable[Sequence[Hashable]]) -> None:
        """Looks at the tokens of further prompts."""
        size = self._block_tokens
        for tokens in prompts:
            self._records += 1
            self._prompt_tokens += len(tokens)
            block = 0
            # At least one token is always computed: the answer begins with what follows it.
            for start in range(0, len(tokens) - size, size):
                block = hash((block, *tokens[start : start + size]))
                known = block in self._seen
                self._reusable_blocks += known
                self._seen[block] = known

    def found(self) -> Reuse:
        """What was seen so far."""
        size = self._block_tokens
        return Reuse(
            self._records,
            self._prompt_tokens,
            self._reusable_blocks * size,
            sum(self._seen.values()) * size,
        )
