"""Which of the elements that were there when a server or an engine died are sent again, and when.

Policy alone: nothing is sent here, and nothing waits.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Generic, TypeVar

# An element that was there so often when a server or an engine died is a suspect: one poisoned
# element that kills again and again takes with it every request in flight, and if they were sent
# together each time, the innocent would run out of retries with it.
SUSPECT_AFTER = 2

T = TypeVar('T')


class SuspectLane(Generic[T]):
    """Suspects beside those that are none, few of them at once.

    One at first, and one more for each that did not die, because all are innocent where the
    server died of something else; one again after a death. One that was there at a death in here
    as well is sent while no other is.
    """

    def __init__(self) -> None:
        self._waiting: collections.deque[tuple[T, bool]] = collections.deque()
        self._in_flight: set[T] = set()
        self._alone: T | None = None
        self._width = 1

    def add(self, suspect: T, deaths: int) -> None:
        """Lets a suspect wait that was there at so many deaths."""
        self._waiting.append((suspect, deaths > SUSPECT_AFTER))

    def take(self) -> T | None:
        """Takes the next one, if there is one that may be sent now."""
        if not self._waiting or self._alone is not None or len(self._in_flight) >= self._width:
            return None
        suspect, alone = self._waiting[0]
        if alone and self._in_flight:
            return None
        self._waiting.popleft()
        self._in_flight.add(suspect)
        if alone:
            self._alone = suspect
        return suspect

    def ended(self, job: T, *, died: bool) -> None:
        """Notes that an attempt of anybody's ended, and whether by a death."""
        if job not in self._in_flight:
            return
        self._in_flight.discard(job)
        if job is self._alone:
            self._alone = None
        self._width = 1 if died or not (self._waiting or self._in_flight) else self._width + 1

    def discard(self, unwanted: Callable[[T], bool]) -> None:
        """Forgets those that wait and are unwanted."""
        kept = [item for item in self._waiting if not unwanted(item[0])]
        self._waiting = collections.deque(kept)
