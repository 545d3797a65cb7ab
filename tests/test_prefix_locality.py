"""The benchmark of prefix locality: its loads, its arithmetic, and a small run of each arm."""

from __future__ import annotations

import json
import pathlib

import pytest

from benchmarks import prefix_locality
from benchmarks._prefix_arms import ARMS, Arm, Measured
from benchmarks._prefix_loads import LOADS, Load

pytestmark = pytest.mark.usefixtures('nothing_left')

SMALL = Load(4, 4, 256, 16, 2, 2_048, 4)


@pytest.mark.parametrize(
    ('name', 'ceiling'), [('A', 0.949), ('B', 0.667), ('C', 0.0), ('E', 0.912), ('F', 0.924)]
)
def test_the_ceiling_is_one_prefill_for_each_prefix(name: str, ceiling: float) -> None:
    assert LOADS[name].ceiling == pytest.approx(ceiling, abs=0.001)


def test_prompts_share_their_prefix_with_their_siblings_alone() -> None:
    prompts = SMALL.prompts(seed=3)
    assert len(prompts) == SMALL.requests == 16
    assert {len(prompt) for prompt in prompts} == {272}
    assert len({tuple(prompt[:256]) for prompt in prompts}) == 4
    assert len({tuple(prompt) for prompt in prompts}) == 16
    assert prompts == SMALL.prompts(seed=3) != SMALL.prompts(seed=4)


def test_fewer_requests_keep_their_prefixes() -> None:
    assert (LOADS['F'].reduced(0.5).prefixes, LOADS['F'].reduced(0.5).siblings) == (64, 8)
    assert (LOADS['C'].reduced(0.5).prefixes, LOADS['C'].reduced(0.5).siblings) == (512, 1)


def runs(*rates: float, failed: int = 0) -> list[Measured]:
    return [Measured(rate, 0.5, failed, 1.1) for rate in rates]


def test_the_medians_of_the_repeats_are_told_and_every_failure() -> None:
    summary = prefix_locality.summary(SMALL, runs(10, 30, 20, failed=1))
    assert (summary['records_per_s'], summary['failed']) == (20, 3)
    assert summary['all_records_per_s'] == [10, 30, 20]


def test_a_target_is_reached_or_missed_by_its_ratio() -> None:
    def loads(rate: float, share: float) -> dict[str, dict[Arm, dict[str, float]]]:
        row = {'cached_share': share, 'ceiling': 1.0, 'engine_share_max_over_min': 1.0}
        return {
            'A': {
                'rr_shuffled': {**row, 'records_per_s': 10},
                'ordered': {**row, 'records_per_s': rate},
            }
        }

    assert [t['reached'] for t in prefix_locality.reached(loads(40, 0.97))] == [True, True]
    assert [t['reached'] for t in prefix_locality.reached(loads(39, 0.96))] == [False, False]
    assert prefix_locality.reached({'A': {}}) == []


@pytest.mark.parametrize(
    ('arguments', 'says'),
    [
        (['--loads', 'A,Z'], "--loads has 'Z'"),
        (['--arms', 'fast'], "--arms has 'fast'"),
        (['--repeats', '0'], '--repeats must be at least 1'),
    ],
)
def test_a_wrong_argument_is_named(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        prefix_locality.main(arguments)
    assert says in capsys.readouterr().err


@pytest.mark.parametrize('workers', [1, 2])
def test_every_arm_answers_every_record(
    workers: int, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = workers > 1
    load = Load(4, 4, 256, 16, 2, 2_048, 4, workers=workers, engines=2, in_batches=batches)
    monkeypatch.setitem(LOADS, 'A', load)
    report = tmp_path / 'report.json'
    report.write_text('{"loads": {"A": {}, "E": {}}}')  # of an earlier run
    arms = ARMS if workers == 1 else ('ordered', 'transform')
    prefix_locality.main(
        ['--loads', 'A', '--arms', ','.join(arms), '--repeats', '1', '--json', str(report)]
    )
    loads = json.loads(report.read_text())['loads']
    assert loads['E'] == {}
    rows = loads['A']
    assert set(rows) == set(arms)
    assert {row['failed'] for row in rows.values()} == {0}
    assert {row['ceiling'] for row in rows.values()} == {round(0.75 * 256 / 272, 4)}
    assert rows['ordered']['cached_share'] > 0.4
