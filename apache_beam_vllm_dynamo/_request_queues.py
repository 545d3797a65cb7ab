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
# Fewer where prompts are so long that to look takes the loop's time.
_BYTES_LOOKED_AT = 2**20


# So many requests show whether they share prefixes, and whether these are few or many.
_ENOUGH_TO_JUDGE = 32
_PAIRS_LOOKED_AT = 512


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

    def gains_by_more(self) -> bool | None:
        """Whether more requests to choose from would better the order; ``None`` if unknown."""


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
    any, where neighbours have little in common. A request that was passed over by twice as many
    as ever waited beside it is taken first, and a mark goes on from there.

    To add or take one costs the comparison of about log2 of all waiting requests, over the bytes
    that they have in common.

    Args:
      marks: How many places in the order are worked on, at least 1.
    """

    def __init__(self, marks: int) -> None:
        self._entries: list[_Entry[T]] = []
        self._prefixes: list[bytes] = []  # of the above, in the same order
        # Those that were taken stay until they come to the front, without their requests.
        self._arrivals: collections.deque[_Entry[T]] = collections.deque()
        self._taken = 0
        self._most = 0  # that waited at once since nothing did
        # Indices of what each mark takes next; the length of the list stands for the first.
        self._marks = [0] * marks
        self._turn = -1
        self._look_from = 0

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, request: T) -> None:
        """Lets a request wait."""
        prefix = request.prefix
        entry = _Entry(request, self._taken)
        # Before its equals, so that the oldest of them is the last.
        index = bisect.bisect_left(self._prefixes, prefix)
        self._prefixes.insert(index, prefix)
        self._entries.insert(index, entry)
        self._arrivals.append(entry)
        self._most = max(self._most, len(self._entries))
        self._marks = [mark + (index <= mark) for mark in self._marks]

    def take(self) -> T:
        """Takes the next one; there must be one."""
        size = len(self._entries)
        self._marks = [mark % size for mark in self._marks]
        self._turn = turn = (self._turn + 1) % len(self._marks)
        overdue = self._overdue()
        if overdue is not None:
            self._marks[turn] = overdue
        elif self._marks[turn] in self._marks[:turn]:
            self._marks[turn] = self._begin_anew(self._marks[turn])
        index = self._marks[turn]
        del self._prefixes[index]
        self._marks = [mark - (index < mark) for mark in self._marks]
        self._taken += 1
        if size == 1:
            self._most = 0
        return self._entries.pop(index).let_go()

    def discard(self, unwanted: Callable[[T], bool]) -> None:
        """Forgets requests."""
        for index in range(len(self._entries) - 1, -1, -1):
            request = self._entries[index].request
            if request is not None and unwanted(request):
                self._entries.pop(index).let_go()
                del self._prefixes[index]
                self._marks = [mark - (index < mark) for mark in self._marks]

    def gains_by_more(self) -> bool | None:
        """Whether more requests to choose from would better the order; ``None`` if unknown.

        Not where those that wait have nothing in common, nor where they have no more prefixes
        than are open at once anyway. A prefix is what two neighbours share half of; of many
        neighbours some are looked at, others each time.
        """
        size = len(self._prefixes)
        if size < _ENOUGH_TO_JUDGE:
            return None
        start = self._look_from % max(1, size - _PAIRS_LOOKED_AT)
        self._look_from += _PAIRS_LOOKED_AT
        some = self._prefixes[start : start + _PAIRS_LOOKED_AT]
        alike = sum(map(_half_alike, some, some[1:])) / (len(some) - 1)
        return alike > 0 and size * (1 - alike) > len(self._marks)

    def _overdue(self) -> int | None:
        """Where the one is that waits longest, if that is too long."""
        arrivals = self._arrivals
        while arrivals[0].request is None:
            arrivals.popleft()
        oldest = arrivals[0]
        if self._taken - oldest.came_after <= 2 * self._most:
            return None
        assert oldest.request is not None
        index = bisect.bisect_right(self._prefixes, oldest.request.prefix) - 1
        while self._entries[index] is not oldest:
            index -= 1
        return index

    def _begin_anew(self, place: int) -> int:
        """Where a mark that met another goes; ``place``, where it is, if there is no better."""
        size = len(self._entries)
        starts = sorted(set(self._marks))
        ends = [*starts[1:], starts[0] + size]
        length, start = max((end - start, start) for start, end in zip(starts, ends, strict=True))
        if length == 1:
            return place
        middle = start + length // 2
        affordable = _BYTES_LOOKED_AT // (len(self._prefixes[middle % size]) + 1)
        places = min(_PLACES_LOOKED_AT, max(1, affordable))
        first = max(start + 1, middle - places // 2)
        last = min(start + length, first + places)
        return _least_alike(self._prefixes, range(first, last), middle) % size


class _Entry(Generic[T]):
    """A request in the queue, and how many had been taken when it came."""

    __slots__ = ('came_after', 'request')

    def __init__(self, request: T, came_after: int) -> None:
        self.request: T | None = request
        self.came_after = came_after

    def let_go(self) -> T:
        request, self.request = self.request, None
        assert request is not None
        return request


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
