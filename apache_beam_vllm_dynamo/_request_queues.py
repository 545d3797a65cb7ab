"""The order in which waiting requests get their places in the window.

Policy alone: nothing is sent here, and nothing waits.
"""

from __future__ import annotations

import bisect
import collections
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

# Of a run that is to be divided, so many places round the middle are looked at for the one where
# two neighbours have least in common.
_PLACES_LOOKED_AT = 64


# So many requests show whether they share prefixes, and whether these are few or many.
_ENOUGH_TO_JUDGE = 32


class Waiting(Protocol):
    """What a queue holds."""

    @property
    def prefix(self) -> bytes:
        """The request, from the beginning of its prompt on."""


T = TypeVar('T', bound=Waiting)


class RequestQueue(Protocol[T]):
    """Requests that wait for a place."""

    def __len__(self) -> int:
        """How many wait."""

    def add(self, request: T) -> None:
        """Lets a request wait."""

    def take(self) -> T:
        """Takes the next one; there must be one."""

    def discard(self, unwanted: Callable[[T], bool]) -> None:
        """Forgets requests."""

    def gains_by_more(self) -> bool:
        """Whether the order would be better for more requests to choose from."""


class ArrivalQueue(Generic[T]):
    """First come, first served."""

    def __init__(self) -> None:
        self._requests: collections.deque[T] = collections.deque()

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: T) -> None:
        """Lets a request wait."""
        self._requests.append(request)

    def take(self) -> T:
        """Takes the next one; there must be one."""
        return self._requests.popleft()

    def discard(self, unwanted: Callable[[T], bool]) -> None:
        """Forgets requests."""
        kept = [request for request in self._requests if not unwanted(request)]
        self._requests = collections.deque(kept)

    def gains_by_more(self) -> bool:
        """Never."""
        return False


class PrefixQueue(Generic[T]):
    """Those that begin alike one after the other, from several places at once.

    In the order of their bytes each request stands beside those with which it has most in
    common, be that a short instruction or a long document, and nobody has to say where a prefix
    ends. Marks move through that order and take turns, one for each engine: so each engine has a
    prefix to work on, and no more are open than there are engines, because each needs its room
    in a KV cache.

    A mark that reaches another one begins anew in the midst of the longest run that lies before
    any, where neighbours have little in common. What comes in behind a mark waits for the one
    that follows; so each request gets its turn, whatever comes in meanwhile.

    To add or take one costs the comparison of about log2 of all waiting requests, over the bytes
    that they have in common. The bytes themselves are not copied.

    Args:
      marks: How many places in the order are worked on, at least 1.
    """

    def __init__(self, marks: int) -> None:
        self._requests: list[T] = []
        self._prefixes: list[bytes] = []  # of the above, in the same order
        # Indices of what each mark takes next; the length of the list stands for the first.
        self._marks = [0] * marks
        self._turn = -1

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: T) -> None:
        """Lets a request wait."""
        prefix = request.prefix
        index = bisect.bisect_left(self._prefixes, prefix)
        self._prefixes.insert(index, prefix)
        self._requests.insert(index, request)
        self._marks = [mark + (index <= mark) for mark in self._marks]

    def take(self) -> T:
        """Takes the next one; there must be one."""
        size = len(self._requests)
        self._marks = [mark % size for mark in self._marks]
        self._turn = turn = (self._turn + 1) % len(self._marks)
        if self._marks[turn] in self._marks[:turn]:
            self._marks[turn] = self._begin_anew(self._marks[turn])
        index = self._marks[turn]
        del self._prefixes[index]
        self._marks = [mark - (index < mark) for mark in self._marks]
        return self._requests.pop(index)

    def discard(self, unwanted: Callable[[T], bool]) -> None:
        """Forgets requests."""
        self._requests = [request for request in self._requests if not unwanted(request)]
        self._prefixes = [request.prefix for request in self._requests]
        self._marks = [0] * len(self._marks)

    def gains_by_more(self) -> bool:
        """Whether the order would be better for more requests to choose from.

        Not where those that wait have nothing in common, nor where they have no more prefixes
        than are open at once anyway. A prefix is what two neighbours share half of.
        """
        size = len(self._prefixes)
        if size < _ENOUGH_TO_JUDGE:
            return True
        alike = sum(map(_half_alike, self._prefixes, self._prefixes[1:]))
        return alike > 0 and size - alike > len(self._marks)

    def _begin_anew(self, place: int) -> int:
        """Where a mark that met another goes; ``place``, where it is, if there is no better."""
        size = len(self._requests)
        starts = sorted(set(self._marks))
        ends = [*starts[1:], starts[0] + size]
        length, start = max((end - start, start) for start, end in zip(starts, ends, strict=True))
        if length == 1:
            return place
        middle = start + length // 2
        first = max(start + 1, middle - _PLACES_LOOKED_AT // 2)
        last = min(start + length, first + _PLACES_LOOKED_AT)
        return _least_alike(self._prefixes, range(first, last), middle) % size


def _least_alike(prefixes: Sequence[bytes], places: range, middle: int) -> int:
    """The place whose two neighbours have least in common; of equals the one next to the middle."""
    size = len(prefixes)
    best = middle
    least = common_length(prefixes[(middle - 1) % size], prefixes[middle % size])
    for place in sorted(places, key=lambda place: abs(place - middle)):
        before, after = prefixes[(place - 1) % size], prefixes[place % size]
        if before[:least] != after[:least]:
            best, least = place, common_length(before, after)
    return best


def _half_alike(one: bytes, other: bytes) -> bool:
    half = min(len(one), len(other)) // 2
    return one[:half] == other[:half]


def common_length(one: bytes, other: bytes) -> int:
    """How many bytes both begin with."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
