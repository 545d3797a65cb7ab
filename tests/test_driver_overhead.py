"""The benchmark of the drivers: its report, and one run of each driver on a fake server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from apache_beam_vllm_dynamo import _clients
from benchmarks import driver_overhead
from benchmarks._drivers import Driver, Load, Measured, measure, measure_unbounded
from benchmarks._served import Served
from tests.fake_server import FakeServer

pytestmark = pytest.mark.usefixtures('nothing_left')

PROMPTS = [f'prompt {i}' for i in range(40)]


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as fake:
        yield fake
        _clients.close_all()


def asked(server: FakeServer) -> dict[str, int]:
    return {body['prompt']: body['max_tokens'] for body in server.bodies}


@pytest.mark.parametrize('driver', ['ours', 'transform', 'beam', 'limit'])
@pytest.mark.parametrize('lengths', [3, list(range(1, 41))], ids=['equal', 'uneven'])
def test_every_driver_asks_for_each_record_once_with_its_length(
    server: FakeServer, driver: Driver, lengths: Any
) -> None:
    load = Load('model', Served(server.url, 8), PROMPTS, lengths)
    measured = measure(driver, load, 8)
    assert (measured.records, measured.failed) == (40, 0)
    assert measured.seconds > 0
    assert measured.cpu_seconds > 0
    assert asked(server) == dict(zip(PROMPTS, load.lengths(), strict=True))
    assert len(server.bodies) == 40
    assert server.most_in_flight <= 8


def test_the_limit_of_the_uneven_scenario_has_everything_in_flight(server: FakeServer) -> None:
    server.latency_s = 0.3
    assert measure_unbounded(Load('model', Served(server.url, 8), PROMPTS, 1)).failed == 0
    assert server.most_in_flight == 40


@pytest.mark.parametrize('driver', ['ours', 'transform', 'beam', 'limit'])
def test_records_without_an_answer_are_reported(server: FakeServer, driver: Driver) -> None:
    load = Load('model', Served(server.url, 8), ['one', '[status=400] two'], 1)
    assert measure(driver, load, 1).failed >= 1


def test_a_row_holds_the_medians_of_the_repeats_and_all_failures() -> None:
    runs = [Measured(100, 1.0, 0.1, 0), Measured(100, 4.0, 0.3, 1), Measured(100, 2.0, 0.2, 2)]
    assert driver_overhead.row(('instant', 32, 'ours'), runs) == {
        'scenario': 'instant',
        'batch_size': 32,
        'driver': 'ours',
        'records_per_s': 50.0,
        'client_cpu_ms_per_request': 2.0,
        'failed': 3,
    }


def test_each_target_is_a_ratio_of_two_rows() -> None:
    rows = [
        {'scenario': scenario, 'batch_size': size, 'driver': driver, 'records_per_s': speed}
        for scenario, size, driver, speed in [
            *(('instant', size, 'limit', 100.0) for size in (1, 8, 32, 128, None)),
            *(('instant', size, 'ours', 84.0) for size in (1, 8, 32, 128)),
            *(('instant', size, 'beam', 10.0) for size in (1, 8, 32, 128)),
            ('instant', None, 'transform', 90.0),
            ('uneven', None, 'limit', 100.0),
            ('uneven', None, 'transform', 96.0),
            ('uneven', None, 'ours', 80.0),
            ('uneven', 32, 'beam', 20.0),
        ]
    ]
    found = driver_overhead.ratios(rows)
    assert [target['reached'] for target in found] == [
        False, False, True, True, True, True, True, True, True,
    ]  # fmt: skip
    assert found[0]['ratio'] == 0.84
