"""The report of the benchmark of faults: what it counts, what it is measured by, what it keeps."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest

from benchmarks import _fault_kills, _fault_takeover, _fault_tally, _fault_verdict, faults
from benchmarks._fault_document import Document
from benchmarks._fault_injection import CASES, FAULTS
from benchmarks._fault_pipeline import Settings
from benchmarks._fault_takeover import ATTEMPTS, PROCESSES, Bundle, Runner

REQUIRED = {
    'name', 'elements_in', 'elements_out', 'failed', 'longest_pause_s', 'recovery_s',
    'wall_ratio', 'leftover_processes', 'leftover_sockets', 'leftover_dirs',
}  # fmt: skip


def run_of(name: str, **figures: Any) -> dict[str, Any]:
    """A run in which all went well."""
    return {
        'name': name, 'base': FAULTS[name].base, 'elements_in': 10, 'elements_out': 10,
        'failed': 0, 'lost': 0, 'doubled': 0, 'foreign': 0, 'longest_pause_s': 0.5,
        'slowest_request_s': 1.0, 'recovery_s': 3.0, 'wall_s': 30.0, 'wall_ratio': 1.0,
        'start_s': [2.0], 'max_tokens': 40, 'problem': '', 'first_error': '', 'amiss': '',
        'given_up': False, 'error': '',
        'leftover_processes': 0, 'leftover_sockets': 0, 'leftover_dirs': 0,
    } | figures  # fmt: skip


def missed_by(name: str, **figures: Any) -> list[str]:
    base = {'start_s': 2.0, 'wall_s': 30.0}
    return _fault_verdict.missed(
        {
            'base_runs': [run_of('none')],
            'base': {'none': base, 'none_in_processes': base},
            'cases': [run_of(name, **figures)],
            'owner_kills': {'runs': 10, 'clean': 10},
        }
    )


def test_elements_are_compared_by_name_not_by_number() -> None:
    found = _fault_tally.compare(['a', 'b', 'c'], ['a', 'a', 'x'])
    assert (found.elements_in, found.elements_out) == (3, 3)
    assert (found.lost, found.doubled, found.foreign) == (2, 1, 1)


def test_the_longest_pause_is_between_answers_in_the_order_of_time() -> None:
    assert _fault_tally.longest_pause_s([5000, 1000, 1500]) == 3.5
    assert _fault_tally.longest_pause_s([5000]) is None


@pytest.mark.parametrize('name', [name for name in CASES if FAULTS[name].survivable])
def test_a_run_that_reaches_all_misses_none(name: str) -> None:
    assert missed_by(name) == []


@pytest.mark.parametrize(
    ('name', 'figures', 'said'),
    [
        ('engine_killed', {'lost': 1}, '1 elements lost'),
        ('engine_killed', {'doubled': 1}, '1 elements doubled'),
        ('engine_killed', {'foreign': 1}, '1 elements foreign'),
        ('engine_killed', {'failed': 1}, '1 elements failed'),
        ('engine_killed', {'problem': 'it is over'}, 'the job failed: it is over'),
        ('engine_killed', {'error': 'TimeoutExpired\nlog'}, 'did not run: TimeoutExpired'),
        ('engine_killed', {'amiss': 'engine 1 is hung'}, 'not whole again: engine 1 is hung'),
        ('engine_killed', {'longest_pause_s': 2.0}, 'a pause of 2.0 s'),
        ('engine_killed', {'wall_ratio': 1.31}, '1.31 times as long'),
        ('etcd_killed', {'restarts_of_others': 1}, 'others than the victims were started again 1'),
        ('frontend_killed', {'recovery_s': 7.1}, 'whole again after 7.1 s; to reach: 7.0 s'),
        ('owner_killed', {'most_sets_of_engines': 2}, '2 sets of engines'),
        ('engines_killed_in_turn', {'descriptors': [30, 32]}, 'descriptors of the owner grew'),
        ('engines_killed_in_turn', {'threads': [9, 10]}, 'threads of the owner grew'),
        ('etcd_killed', {'leftover_processes': 1}, '1 processes were left'),
        ('etcd_killed', {'leftover_sockets': 1}, '1 sockets were left'),
        ('etcd_killed', {'leftover_dirs': 1}, '1 dirs were left'),
        ('engine_dies_on_every_start', {}, 'the job did not fail with a reason'),
    ],
)
def test_each_target_that_is_missed_is_said_in_a_line(
    name: str, figures: dict[str, Any], said: str
) -> None:
    [line] = missed_by(name, **figures)
    assert line.startswith(f'{name}: {said}')


def test_what_loses_its_lease_while_etcd_is_away_may_be_started_again() -> None:
    assert missed_by('etcd_down_40_s', restarts_of_others=5) == []


def test_a_job_that_cannot_survive_must_fail_with_a_reason() -> None:
    name = 'engine_dies_on_every_start'
    assert missed_by(name, given_up=True, problem='engine 4 failed', lost=5) == []
    assert missed_by(name, given_up=True)
    assert missed_by(name, problem='something else')


def test_an_owner_that_leaves_something_behind_is_a_miss() -> None:
    kills = _fault_kills.add(_fault_kills.add(None, ''), 'left after 10 s: …')
    assert (kills['runs'], kills['clean']) == (2, 1)
    report = {'base_runs': [], 'base': {}, 'cases': [], 'owner_kills': kills}
    assert _fault_verdict.missed(report) == ['owner_kills: 1 of 2 left nothing behind']


def test_a_report_is_made_in_parts(tmp_path: pathlib.Path) -> None:
    """Base runs add up, and a case that is run again takes the place of its earlier run."""
    path = tmp_path / 'report.json'
    document = Document(path, {'prompts': 10}, merge=True)
    document.add(run_of('none', wall_s=20.0))
    document.add(run_of('etcd_killed', wall_s=99.0))
    again = Document(path, {'prompts': 10}, merge=True)
    again.add(run_of('engine_killed', wall_s=60.0))
    again.add(run_of('etcd_killed', wall_s=30.0))
    again.add(run_of('none', wall_s=40.0))
    again.add_kill('owner_kills', '')
    report = json.loads(path.read_text())
    assert {c['name']: c['wall_ratio'] for c in report['cases']} == {
        'engine_killed': 2.0,
        'etcd_killed': 1.0,
    }
    assert all(case.keys() >= REQUIRED for case in report['cases'])
    assert report['base']['none']['wall_s_range'] == [20.0, 40.0]
    assert report['owner_kills'] == {'runs': 1, 'clean': 1, 'unclean': []}
    with pytest.raises(ValueError, match='other sizes'):
        Document(path, {'prompts': 20}, merge=True)


def test_runs_without_a_fault_lie_around_those_with_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, 'CASES_BETWEEN', 1)
    cases = ['etcd_killed', 'engine_killed', 'owner_killed']
    assert list(faults.schedule(cases, quick=False)) == [
        'none', 'etcd_killed', 'none', 'engine_killed', 'none',
        'none_in_processes', 'owner_killed', 'none_in_processes',
    ]  # fmt: skip


def test_a_case_that_fails_is_reported_and_the_others_are_run(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(settings: Settings, *_: object) -> dict[str, Any]:
        if settings.fault == 'engine_killed':
            raise RuntimeError('it hangs')
        return run_of(settings.fault)

    monkeypatch.setattr(faults, '_run', run)
    path = tmp_path / 'report.json'
    arguments = ['--json', str(path), '--owner-kills', '0', '--cases']
    assert faults.main([*arguments, 'engine_killed', 'etcd_killed']) == 1
    assert 'missed: engine_killed: did not run' in capsys.readouterr().out
    failed, whole = json.loads(path.read_text())['cases']
    assert 'RuntimeError: it hangs' in failed['error']
    assert failed.keys() >= REQUIRED
    assert whole['name'] == 'etcd_killed'
    assert faults.main([*arguments, 'etcd_killed']) == 0


class FakeProcess:
    """An SDK process that does what its bundle says."""

    started = 0

    def __init__(self, *_: object) -> None:
        FakeProcess.started += 1

    def work_on(self, bundle: Bundle) -> dict[str, Any] | None:
        if bundle.elements == ['dies once'] and bundle.attempts == 1:
            return None
        failing = bundle.elements == ['always fails']
        return {'problem': 'no' if failing else '', 'came_out': bundle.elements}

    def end(self) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.fixture
def runner(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Runner:
    monkeypatch.setattr(_fault_takeover, 'SdkProcess', FakeProcess)
    monkeypatch.setattr(FakeProcess, 'started', 0)
    settings = Settings('owner_killed', 0, 1, 1, 1.0, str(tmp_path))
    return Runner(settings, {}, tmp_path / 'log')


def test_a_bundle_whose_process_died_is_given_to_another(runner: Runner) -> None:
    runner.add([['dies once'], ['works']])
    runner.run()
    assert sorted(said['came_out'] for said in runner.committed) == [['dies once'], ['works']]
    assert runner.repeated == ['its SDK process died']
    assert FakeProcess.started == PROCESSES + 1
    assert not runner.problem


def test_a_bundle_that_fails_too_often_ends_the_job(runner: Runner) -> None:
    runner.add([['always fails']])
    runner.run()
    assert runner.repeated == ['no'] * ATTEMPTS
    assert 'failed 4 times: no' in runner.problem
