"""The loads of the benchmark of prefix locality: prompts of token ids that share beginnings."""

from __future__ import annotations

import array
import dataclasses
import random
from typing import Literal, TypeAlias

from benchmarks._arms import BLOCK_TOKENS

# Ids that every tokenizer of the small models knows, away from those with a meaning of their own.
_TOKEN_IDS = range(1_000, 40_000)
# Beam writes and reads an array at once, and a list id by id, which would be measured with it.
Prompt: TypeAlias = 'array.array[int]'


@dataclasses.dataclass(frozen=True)
class Load:
    """Requests of equal shape, by how they share their beginnings.

    Attributes:
      prefixes: How many beginnings there are.
      siblings: How many requests share each.
      prefix_tokens: How long a beginning is.
      suffix_tokens: How long the rest of a prompt is, which no other has.
      output_tokens: How long an answer is.
      cache_blocks: How many blocks of 16 tokens the KV cache of each engine holds.
      in_flight: How many requests are under way at once.
      workers: How many Beam workers share the work, each with engines of its own.
      engines: How many engines there are, all workers together.
      engine_kind: What they are; those on CPU cores are real ones, with a cache of 1 GiB each.
      in_batches: Whether ``RunInference`` asks, batch by batch, not ``LLMInference``.
    """

    prefixes: int
    siblings: int
    prefix_tokens: int
    suffix_tokens: int
    output_tokens: int
    cache_blocks: int
    in_flight: int
    workers: int = 1
    engines: int = 4
    engine_kind: Literal['simulated', 'cpu'] = 'simulated'
    in_batches: bool = False

    @property
    def requests(self) -> int:
        """How many there are."""
        return self.prefixes * self.siblings

    @property
    def ceiling(self) -> float:
        """The share of prompt tokens that is cached if each prefix is computed once."""
        # Blocks are shared whole; the last one of a prefix may hold tokens of a suffix.
        block = BLOCK_TOKENS[self.engine_kind]
        shared = self.prefix_tokens // block * block
        prompt = self.prefix_tokens + self.suffix_tokens
        return (self.siblings - 1) / self.siblings * shared / prompt

    def reduced(self, share: float) -> Load:
        """The same with a share of the requests, and as many prefixes if any are shared."""
        if self.siblings == 1:
            return dataclasses.replace(self, prefixes=max(2, round(self.prefixes * share)))
        return dataclasses.replace(self, siblings=max(2, round(self.siblings * share)))

    def prompts(self, seed: int) -> list[Prompt]:
        """The prompts, as token ids, in no order."""
        chance = random.Random(seed)

        def tokens(number: int) -> Prompt:
            return array.array('i', chance.choices(_TOKEN_IDS, k=number))

        prompts = []
        for _ in range(self.prefixes):
            prefix = tokens(self.prefix_tokens)
            prompts += [prefix + tokens(self.suffix_tokens) for _ in range(self.siblings)]
        chance.shuffle(prompts)
        return prompts


LOADS = {
    # A burst of siblings.
    'A': Load(32, 32, 3_072, 64, 8, 2_048, 128),
    # Long documents, of which all together fill three quarters of the caches.
    'B': Load(150, 5, 6_000, 1_200, 100, 19_265, 128),
    # Nothing is shared.
    'C': Load(1_024, 1, 1_024, 64, 8, 2_048, 128),
    # Everything is shared.
    'D': Load(1, 1_024, 3_072, 64, 8, 2_048, 128),
    # More of the work is to generate.
    'E': Load(32, 32, 1_024, 64, 32, 1_024, 64),
    # All engines together hold a quarter of the prefixes.
    'F': Load(64, 16, 2_048, 30, 16, 512, 128),
    # What arrives at a worker has half of its siblings elsewhere, and most of the rest in
    # other batches.
    'G': Load(128, 8, 3_072, 64, 8, 2_048, 64, workers=2, in_batches=True),
    # The same where a worker puts all that it gets in order: the shuffle alone.
    'H': Load(128, 8, 3_072, 64, 8, 2_048, 64, workers=2),
    # Real engines: vLLM on two CPU cores.
    'real': Load(24, 6, 1_408, 32, 4, 0, 16, engines=2, engine_kind='cpu'),
}
