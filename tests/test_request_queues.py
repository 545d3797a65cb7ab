"""The order in which waiting requests get their places in the window."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from apache_beam_vllm_dynamo._request_queues import ArrivalQueue, PrefixQueue, common_length


@dataclasses.dataclass(frozen=True)
class Request:
    prefix: bytes
    family: int = 0


def families(number: int, siblings: int, *, seed: int = 0) -> list[Request]:
    """Shuffled requests with a long beginning that those of a family share."""
    rng = random.Random(seed)
    beginnings = [rng.randbytes(200) for _ in range(number)]
    requests = [
        Request(beginning + rng.randbytes(20), family)
        for family, beginning in enumerate(beginnings)
        for _ in range(siblings)
    ]
    rng.shuffle(requests)
    return requests


def taken(queue: PrefixQueue[Request], number: int | None = None) -> list[Request]:
    return [queue.take() for _ in range(len(queue) if number is None else number)]


def filled(requests: list[Request], marks: int) -> PrefixQueue[Request]:
    queue: PrefixQueue[Request] = PrefixQueue(marks)
    for request in requests:
        queue.add(request)
    return queue


def open_at_once(order: list[int]) -> int:
    """The most families that have begun and not ended at any moment."""
    first = {family: order.index(family) for family in set(order)}
    last = {family: len(order) - 1 - order[::-1].index(family) for family in set(order)}
    return max(
        sum(first[family] <= at <= last[family] for family in first) for at in range(len(order))
    )


def test_first_come_is_first_served() -> None:
    queue: ArrivalQueue[int] = ArrivalQueue()  # type: ignore[type-var]  # it looks at no prefix
    for number in (3, 1, 2):
        queue.add(number)
    queue.discard(lambda number: number == 1)
    assert [queue.take() for _ in range(len(queue))] == [3, 2]


@pytest.mark.parametrize('marks', [1, 2, 4, 8])
def test_no_more_families_are_open_than_there_are_marks(marks: int) -> None:
    order = [request.family for request in taken(filled(families(40, 12), marks))]
    # Where a mark met another in the midst of a family, that family is open once more.
    assert open_at_once(order) <= marks + 1


def test_each_mark_has_a_family_of_its_own_while_there_are_enough() -> None:
    order = [request.family for request in taken(filled(families(40, 12), 4))]
    for start in range(0, 400, 4):
        assert len(set(order[start : start + 4])) == 4


def test_one_family_is_worked_on_by_all_marks() -> None:
    requests = families(1, 50)
    assert sorted(taken(filled(requests, 4)), key=requests.index) == requests


def test_a_long_prefix_is_kept_together_within_a_short_one() -> None:
    """A system prompt that all share does not hide the documents behind it."""
    requests = [Request(b'You are helpful. ' * 20 + r.prefix, r.family) for r in families(30, 8)]
    assert open_at_once([request.family for request in taken(filled(requests, 2))]) <= 3


def test_what_comes_in_while_others_are_taken_joins_its_family() -> None:
    requests = families(20, 30)
    queue = filled(requests[:300], 2)
    order = []
    for request in requests[300:]:
        order.append(queue.take().family)
        queue.add(request)
    order += [request.family for request in taken(queue)]
    changes = sum(one != other for one, other in itertools.pairwise(order[::2]))
    # In the order of arrival nearly every one of the 300 would be of another family.
    assert changes < 120


def test_no_request_is_passed_over_for_ever() -> None:
    """However many come in with a prefix that a mark is working on."""
    queue = filled(families(10, 3), 2)
    waiting = {request.prefix for request in families(10, 3)}
    hot = random.Random(1)
    for _ in range(3_000):
        queue.add(Request(b'\x80' * 200 + hot.randbytes(8)))
        waiting.discard(queue.take().prefix)
    assert not waiting


@pytest.mark.parametrize('marks', [1, 2, 4])
def test_nor_where_what_comes_in_grows(marks: int) -> None:
    """Prompts that begin with the time always come in ahead of a mark."""
    numbers = itertools.count()

    def growing() -> Request:
        return Request(b'%09d' % next(numbers))

    queue = filled([growing() for _ in range(200)], marks)
    queue.add(Request(b'last of all', family=1))
    for _ in range(1_000):
        queue.add(growing())
        if queue.take().family:
            return
    raise AssertionError('it was passed over')


def test_those_of_a_batch_are_never_taken_out_of_their_order() -> None:
    """However long the last of them wait."""
    requests = [Request(b'%05d' % number, number) for number in range(2_000)]
    random.Random(0).shuffle(requests)
    order = [request.family for request in taken(filled(requests, 1))]
    # It begins in the midst of them, and goes once round.
    assert sum(one > other for one, other in itertools.pairwise(order)) <= 1


def test_forgotten_requests_are_not_taken() -> None:
    queue = filled(families(6, 4), 3)
    first = taken(queue, 5)
    queue.discard(lambda request: request.family == 2)
    rest = taken(queue)
    assert all(request.family != 2 for request in rest)
    gone = 4 - sum(request.family == 2 for request in first)
    assert len(first) + len(rest) + gone == 24


@pytest.mark.parametrize(
    ('number', 'siblings', 'gains'),
    [
        (10, 2, None),
        (10, 8, True),
        (3, 20, False),
        (1, 60, False),
        (60, 1, False),
        (300, 6, True),
        (2_000, 1, False),
    ],
    ids=['too few', 'many prefixes', 'no more than marks', 'one', 'unique', 'more', 'more unique'],
)
def test_more_to_choose_from_is_worth_a_wait_where_it_betters_the_order(
    number: int,
    siblings: int,
    gains: bool | None,  # noqa: FBT001 - a parameter of the test
) -> None:
    assert filled(families(number, siblings), 4).gains_by_more() is gains


PROMPTS = st.lists(
    st.one_of(
        st.binary(max_size=6),
        st.sampled_from([b'', b'a', b'ab', b'abc', b'abc' * 50, b'abc' * 50 + b'd', b'\xff' * 9]),
    ),
    max_size=60,
)


@given(PROMPTS, st.integers(1, 5), st.lists(st.integers(0, 5), max_size=30))
def test_nothing_is_lost_or_doubled(prompts: list[bytes], marks: int, takes: list[int]) -> None:
    """Whatever the prompts are, and however adding and taking alternate."""
    queue: PrefixQueue[Request] = PrefixQueue(marks)
    out: list[Request] = []
    numbers = iter(takes)
    for number, prompt in enumerate(prompts):
        queue.add(Request(prompt, number))
        out += taken(queue, min(next(numbers, 0), len(queue)))
    out += taken(queue)
    assert sorted(request.family for request in out) == list(range(len(prompts)))


@given(st.binary(), st.binary(), st.binary())
def test_the_common_length_of_two_texts(common: bytes, one: bytes, other: bytes) -> None:
    found = common_length(common + one, common + other)
    assert found >= len(common)
    assert (common + one)[:found] == (common + other)[:found]
    assert (common + one)[found : found + 1] != (common + other)[found : found + 1] or found == min(
        len(common + one), len(common + other)
    )
