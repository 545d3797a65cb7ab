"""What came out of a run, element by element and moment by moment; pure."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterable, Sequence


def prompts_of(number: int) -> list[str]:
    """The elements of a run; each is its own name."""
    return [f'{i}: what does it cost?' for i in range(number)]


@dataclasses.dataclass(frozen=True)
class Elements:
    """What became of the elements of a run.

    Attributes:
      elements_in: How many there were.
      elements_out: How many results came out.
      lost: How many elements have no result.
      doubled: How many results too many elements have.
      foreign: How many results are of no element.
    """

    elements_in: int
    elements_out: int
    lost: int
    doubled: int
    foreign: int


def compare(went_in: Sequence[str], came_out: Iterable[str]) -> Elements:
    """Says what became of elements that are all different."""
    found = Counter(came_out)
    known = set(went_in)
    foreign = sum(count for element, count in found.items() if element not in known)
    return Elements(
        elements_in=len(went_in),
        elements_out=found.total(),
        lost=len(known - found.keys()),
        doubled=sum(count - 1 for element, count in found.items() if element in known),
        foreign=foreign,
    )


def longest_pause_s(answered_at_ms: Iterable[int]) -> float | None:
    """The longest time from one answer to the next, in seconds; ``None`` for fewer than two."""
    stamps = sorted(answered_at_ms)
    pauses = [(later - sooner) / 1000 for sooner, later in itertools.pairwise(stamps)]
    return max(pauses, default=None)
