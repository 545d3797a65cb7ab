"""Whether each rank of vLLM's own server computes, with a clock that only the test moves."""

from __future__ import annotations

from apache_beam_vllm_dynamo._canary import RankCanary
from apache_beam_vllm_dynamo._probes import Reply

WAIT_S = 3.0
SILENT = Reply(None, problem='timed out')


class World:
    """Two ranks, of which each computes or does not, and answers or does not."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.tokens: list[int] | None = [0, 0]
        self.replies: list[Reply | None] = [None, None]
        self.asked: list[tuple[int, float]] = []
        self.canary = RankCanary(
            2, lambda _: self.tokens, self.ask, wait_s=WAIT_S, timeout_s=5, clock=lambda: self.now
        )

    def ask(self, rank: int, timeout_s: float) -> Reply | None:
        self.asked.append((rank, timeout_s))
        return self.replies[rank]

    def look(self, seconds: float, *busy: int) -> list[Reply | None]:
        """Looks once a second while the busy ranks compute."""
        found = []
        for _ in range(int(seconds)):
            self.now += 1
            if self.tokens is not None:
                self.tokens = [n + (rank in busy) for rank, n in enumerate(self.tokens)]
            found.append(self.canary(2.0))
        return found


def test_busy_ranks_are_not_asked() -> None:
    world = World()
    world.replies = [SILENT, SILENT]
    assert set(world.look(100, 0, 1)) == {None}
    assert world.asked == []


def test_idle_ranks_are_asked_now_and_then() -> None:
    world = World()
    assert set(world.look(31)) == {None}
    assert world.asked == [(0, 5), (1, 5)] * 9


def test_a_rank_that_neither_computes_nor_answers_is_named_until_it_does() -> None:
    world = World()
    world.look(20, 0, 1)
    world.replies[1] = SILENT
    found = world.look(20, 0)
    assert found[: int(WAIT_S) - 1] == [None, None]
    said = {(reply.status, str(reply)) for reply in found[2 * int(WAIT_S) :] if reply}
    assert said == {(503, 'rank 1 does not answer a request for one token: timed out')}
    assert None not in found[2 * int(WAIT_S) :]
    world.replies[1] = None
    assert set(world.look(20, 0)) == {None}


def test_a_server_that_takes_no_such_request_is_left_alone() -> None:
    world = World()
    world.replies = [Reply(400), Reply(404)]
    assert set(world.look(20)) == {None}
    world.replies = [Reply(400), Reply(500)]
    assert world.look(10)[-1] is not None


def test_metrics_that_cannot_be_read_leave_it_to_the_answers() -> None:
    world = World()
    world.tokens = None
    assert set(world.look(10)) == {None}
    world.replies[0] = SILENT
    assert world.look(10)[-1] is not None
