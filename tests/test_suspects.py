"""Elements that were there when a server died are sent again a few at a time."""

from __future__ import annotations

from collections.abc import Iterable

from apache_beam_vllm_dynamo._suspects import SUSPECT_AFTER, SuspectLane


def lane_of(names: Iterable[str], deaths: int = SUSPECT_AFTER) -> SuspectLane[str]:
    lane: SuspectLane[str] = SuspectLane()
    for name in names:
        lane.add(name, deaths)
    return lane


def taken(lane: SuspectLane[str]) -> str:
    """All that may be sent now."""
    return ''.join(iter(lane.take, None))


def test_the_innocent_are_soon_all_on_their_way_again() -> None:
    lane = lane_of('abcdefg')
    rounds = []
    while sent := taken(lane):
        rounds.append(sent)
        for suspect in sent:
            lane.ended(suspect, died=False)
    assert rounds == ['a', 'bc', 'defg']


def test_after_a_death_they_go_one_by_one_again() -> None:
    lane = lane_of('abcdef')
    lane.ended(taken(lane), died=False)
    assert taken(lane) == 'bc'
    for suspect in 'bc':
        lane.ended(suspect, died=True)
    assert taken(lane) == 'd'


def test_one_that_was_there_at_a_further_death_goes_alone() -> None:
    lane = lane_of('ab')
    lane.add('c', SUSPECT_AFTER + 1)
    lane.add('d', SUSPECT_AFTER)
    lane.ended(taken(lane), died=False)
    assert taken(lane) == 'b'
    lane.ended('b', died=False)
    assert taken(lane) == 'c'
    lane.ended('c', died=True)
    assert taken(lane) == 'd'


def test_the_ends_of_others_change_nothing() -> None:
    lane = lane_of('ab')
    assert taken(lane) == 'a'
    lane.ended('x', died=False)
    assert taken(lane) == ''


def test_those_who_are_not_wanted_any_more_are_forgotten() -> None:
    lane = lane_of('abc')
    lane.discard('a'.__eq__)
    assert taken(lane) == 'b'


def test_once_nobody_is_suspected_the_next_begin_anew() -> None:
    lane = lane_of('ab')
    for suspect in 'ab':
        assert taken(lane) == suspect
        lane.ended(suspect, died=False)
    for suspect in 'cd':
        lane.add(suspect, SUSPECT_AFTER)
    assert taken(lane) == 'c'
