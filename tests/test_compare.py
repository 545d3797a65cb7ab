"""The comparison: its order of runs, its prompts, what it refuses, and one that is really made."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from benchmarks import compare
from benchmarks._arms import ARMS, Settings
from benchmarks._comparison import Conditions, Run, RunFailedError, command, run_arm, schedule
from benchmarks._run_figures import RunFigures
from benchmarks._summary import Cohort
from tests.support.comparisons import cohort, run
from tests.support.processes import ProcessTree, wait_until
from tests.support.stacks import MODEL
from tools.small_model import TOKENIZER_DIRECTORY

pytestmark = pytest.mark.usefixtures('nothing_left')

SMALL = (
    '--engine', 'simulated', '--num_engines', '4', '--num_records', '40', '--num_families', '6',
    '--prefix_tokens', '320',
)  # fmt: skip
SPEEDS = {'native-dp': 90.0, 'dynamo-rr': 100.0, 'dynamo-kv': 150.0}


class Runner:
    """Makes up the figures of runs, and keeps what it was asked for."""

    def __init__(self, fail_at: int | None = None, **fields: Any) -> None:
        self.asked: list[Run] = []
        self.conditions: Conditions | None = None
        self._fail_at = fail_at
        self._fields = fields

    def __call__(self, asked: Run, conditions: Conditions) -> RunFigures:
        self.asked.append(asked)
        self.conditions = conditions
        if len(self.asked) == self._fail_at:
            raise RunFailedError('95-dynamo-kv-1 ended with exit status 1. The end of its log: …')
        speed = SPEEDS[asked.arm] + asked.repeat / 10 if asked.cohort.name != '0' else 80.0
        return run(asked.arm, asked.cohort.name, asked.repeat, speed, **self._fields)


def compared(
    out: pathlib.Path, *arguments: str, runner: Callable[..., RunFigures] | None = None
) -> dict[str, Any]:
    status = compare.main([*SMALL, '--out', str(out), *arguments], runner or Runner())
    assert status == 0
    found: dict[str, Any] = json.loads((out / 'report.json').read_text())
    return found


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    runner = Runner()
    with pytest.raises(SystemExit) as stopped:
        compare.main(arguments, runner)
    assert stopped.value.code == 2
    assert runner.asked == []
    return capsys.readouterr().err


def test_arms_take_turns_and_each_is_first_in_one_of_the_repeats() -> None:
    planned = list(schedule(['a', 'b', 'c'], [cohort('0'), cohort('95')], 3))
    assert [(r.repeat, r.cohort.name, r.arm) for r in planned] == [
        (1, '0', 'a'), (1, '0', 'b'), (1, '0', 'c'), (1, '95', 'a'), (1, '95', 'b'), (1, '95', 'c'),
        (2, '0', 'b'), (2, '0', 'c'), (2, '0', 'a'), (2, '95', 'b'), (2, '95', 'c'), (2, '95', 'a'),
        (3, '0', 'c'), (3, '0', 'a'), (3, '0', 'b'), (3, '95', 'c'), (3, '95', 'a'), (3, '95', 'b'),
    ]  # fmt: skip
    assert len({r.name for r in planned}) == len(planned)


def test_a_run_is_given_every_setting_and_an_arm() -> None:
    settings = Settings(
        engine='vllm', model='m', model_revision='r', num_gpus=4, max_tokens=8, batch_size=16,
        gpu_memory_utilization=0.8, max_num_seqs=32, max_model_len=4096, kv_cache_tokens=800,
        temperature=0.5, seed=3, simulation_speedup=2.0,
    )  # fmt: skip
    asked = Run('dynamo-kv', cohort('95'), 2)
    conditions = Conditions(settings, ('x', 'y'), pathlib.Path('d'), 10)
    assert command(asked, conditions, pathlib.Path('d/95-dynamo-kv-2')) == [
        sys.executable, '-m', 'benchmarks.vllm_dynamo_kv_benchmark', '--arm=dynamo-kv',
        '--input=95.jsonl', '--output=d/95-dynamo-kv-2', '--run_id=2', '--labels=x,y',
        '--engine=vllm', '--model=m', '--model_revision=r', '--num_gpus=4', '--max_tokens=8',
        '--batch_size=16', '--gpu_memory_utilization=0.8', '--max_num_seqs=32',
        '--max_model_len=4096', '--kv_cache_tokens=800', '--temperature=0.5', '--seed=3',
        '--simulation_speedup=2.0', '--runner=FnApiRunner',
    ]  # fmt: skip


def test_three_reports_say_which_arm_to_choose(tmp_path: pathlib.Path) -> None:
    runner = Runner()
    found = compared(tmp_path, '--cohorts', '0,95', '--repeats', '2', runner=runner)
    assert len(runner.asked) == 2 * 2 * 3
    assert {p.name for p in tmp_path.iterdir()} == {
        'report.json', 'report.md', 'report.html', 'data', 'runs',
    }  # fmt: skip
    assert [c['cohort'] for c in found['cohorts']] == ['0', '95']
    assert found['cohorts'][1]['verdict']['choice'] == 'dynamo-kv'
    assert found['cohorts'][0]['verdict']['decisive'] is False
    assert found['verdict'].startswith('Choose dynamo-kv for cohort 95')
    assert '--cohorts 0,95' in found['command']
    assert found['versions']['python']
    assert found['machine']['cores']


def test_by_default_the_documents_fit_into_all_caches_and_not_into_one(
    tmp_path: pathlib.Path,
) -> None:
    runner = Runner()
    found = compared(tmp_path, '--cohorts', '95', runner=runner)
    [of_95] = found['cohorts']
    assert of_95['working_set_tokens'] == 6 * 320
    assert of_95['working_set_in_caches'] == pytest.approx(1.5)
    assert runner.conditions is not None
    assert runner.conditions.settings.kv_cache_tokens == 6 * 320 / 1.5
    assert runner.conditions.settings.max_num_seqs == 32
    assert runner.conditions.settings.model == str(TOKENIZER_DIRECTORY)


def test_the_usual_cohorts_and_arms_are_compared_where_nothing_is_said(
    tmp_path: pathlib.Path,
) -> None:
    runner = Runner()
    compared(tmp_path, '--repeats', '1', runner=runner)
    assert [(r.cohort.name, r.arm) for r in runner.asked] == [
        (name, arm)
        for name in ('0', '25', '75', '95')
        for arm in ('native-dp', 'dynamo-rr', 'dynamo-kv')
    ]


def test_your_own_prompts_are_compared_cohort_by_cohort(tmp_path: pathlib.Path) -> None:
    own = tmp_path / 'own.jsonl'
    prompts = [
        {'prompt': f'{"a b c d " * 20}{i}', 'cohort': 'a/b' if i % 2 else 'c'} for i in range(9)
    ]
    own.write_text('\n'.join(map(json.dumps, prompts)))
    runner = Runner()
    out = tmp_path / 'out'
    status = compare.main(
        ['--engine', 'simulated', '--input', str(own), '--out', str(out), '--repeats', '1'], runner
    )
    assert status == 0
    found = json.loads((out / 'report.json').read_text())
    assert [(c['cohort'], c['records']) for c in found['cohorts']] == [('c', 5), ('a/b', 4)]
    assert all(0.5 < c['cached_share_ceiling'] < 0.9 for c in found['cohorts'])
    assert runner.conditions is not None
    assert runner.conditions.labels == ()
    assert runner.conditions.settings.kv_cache_tokens is None
    of_c = pathlib.Path(runner.asked[0].cohort.path).read_text().splitlines()
    assert [json.loads(line)['prompt'] for line in of_c] == [p['prompt'] for p in prompts[::2]]


def test_cohorts_may_have_any_names_and_each_keeps_its_runs(tmp_path: pathlib.Path) -> None:
    names = ['a/b', 'a_b', '[/bold]', '{x}', '$x_$', 'x' * 80 + '1', 'x' * 80 + '2', 'ä\nb|c']
    own = tmp_path / 'own.jsonl'
    own.write_text(''.join(json.dumps({'prompt': 'p', 'cohort': name}) + '\n' for name in names))
    runner = Runner()
    out = tmp_path / 'out'
    status = compare.main(
        ['--engine', 'simulated', '--input', str(own), '--out', str(out), '--repeats', '1'], runner
    )
    assert status == 0
    assert [c['cohort'] for c in json.loads((out / 'report.json').read_text())['cohorts']] == names
    assert len({asked.name for asked in runner.asked}) == len(names) * 3


def test_a_comparison_takes_the_place_of_an_earlier_one(tmp_path: pathlib.Path) -> None:
    compared(tmp_path, '--cohorts', '0', '--repeats', '1')
    found = compared(tmp_path, '--cohorts', '95', '--repeats', '1')
    assert [c['cohort'] for c in found['cohorts']] == ['95']
    assert {p.name for p in (tmp_path / 'data').glob('[!.]*')} == {'95.jsonl', '95.manifest.json'}


def test_prompts_without_an_answer_make_the_exit_status_1(tmp_path: pathlib.Path) -> None:
    arguments = [*SMALL, '--out', str(tmp_path), '--cohorts', '95', '--repeats', '2']
    assert compare.main(arguments, Runner(failed=3, errors={'unavailable': 3})) == 1
    assert 'No arm can be chosen.' in (tmp_path / 'report.md').read_text()


def test_a_run_that_fails_ends_it_without_a_report(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compared(tmp_path, '--cohorts', '95', '--repeats', '1')
    arguments = [*SMALL, '--out', str(tmp_path), '--cohorts', '95', '--repeats', '1']
    assert compare.main(arguments, Runner(fail_at=3)) == 2
    said = capsys.readouterr().err
    assert '95-dynamo-kv-1 ended with exit status 1' in said
    assert 'no report was written' in said
    assert {p.name for p in tmp_path.iterdir()} == {'data', 'runs'}


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_is_no_traceback_and_no_report(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], number: signal.Signals
) -> None:
    before = signal.getsignal(signal.SIGTERM)

    def interrupted(*_: object) -> RunFigures:
        assert signal.getsignal(number) is not signal.SIG_DFL  # which would end the tests
        os.kill(os.getpid(), number)
        time.sleep(30)
        raise AssertionError

    assert compare.main([*SMALL, '--out', str(tmp_path), '--cohorts', '95'], interrupted) == 130
    assert 'interrupted; no report was written' in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is before
    assert {p.name for p in tmp_path.iterdir()} == {'data', 'runs'}


@pytest.mark.parametrize(
    ('arguments', 'said'),
    [
        (('--arms', 'dynamo-kv,dynamo'), f"there is no arm 'dynamo'; there are {', '.join(ARMS)}"),
        (('--arms', 'dynamo-kv,dynamo-kv'), 'holds a name twice'),
        (('--cohorts', ''), "'' holds an empty name"),
        (('--cohorts', '0,,95'), "'0,,95' holds an empty name"),
        (('--cohorts', '0,many'), "cohort 'many' is no number"),
        (('--cohorts', '25,95,25.0'), '--cohorts names 25 twice, the second time as 25.0'),
        (('--cohorts', '120'), '--reuse_fraction is 1.2; it must be a number from 0 to 1'),
        (('--repeats', '0'), '0 is too small'),
        (('--prefix_tokens', '10'), '--prefix_tokens is 10, but the instruction alone has'),
        (('--num_families', '1'), '--num_families is 1, and a cache that is smaller'),
        (('--price_per_hour', '0'), '0 does not work; it must be above 0'),
        (('--engine', 'vllm'), '--engine vllm needs a --model'),
        (('--input', '/no/such.jsonl'), 'there is no file /no/such.jsonl'),
        (('--input', 'WRONG'), 'line 2 of'),
        (('--input', 'BLANK'), 'holds no prompts'),
        (('--input', 'GOOD', '--cohorts', 'b'), 'cohort b has no prompts in'),
        (('--input', 'GOOD', '--num_records', '5'), '--num_records is about prompts that are made'),
    ],
)
def test_what_cannot_work_is_refused_and_nothing_is_written(
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    said: str,
) -> None:
    files = {
        'GOOD': '{"prompt": "p", "cohort": "a"}\n',
        'WRONG': '{"prompt": "p"}\n{"prompt": 1}\n',
        'BLANK': '\n',
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    given = [str(tmp_path / word) if word in files else word for word in arguments]
    out = tmp_path / 'out'
    assert said in refused(capsys, '--engine', 'simulated', '--out', str(out), *given)
    assert not out.exists()


@pytest.mark.parametrize('is_file', [True, False])
def test_a_directory_with_other_things_in_it_is_left_alone(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], *, is_file: bool
) -> None:
    mine = tmp_path / 'mine'
    mine.write_text('precious')
    message = refused(capsys, *SMALL, '--out', str(mine if is_file else tmp_path))
    assert ('which is no directory' if is_file else 'where mine lies already') in message
    assert mine.read_text() == 'precious'


@pytest.mark.parametrize('name', ['data', 'runs'])
def test_a_directory_of_somebodys_own_data_is_left_alone(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    mine = tmp_path / name / 'mine.jsonl'
    mine.parent.mkdir()
    mine.write_text('precious')
    assert f'where {name} lies already' in refused(capsys, *SMALL, '--out', str(tmp_path))
    assert mine.read_text() == 'precious'


def test_prompts_in_the_directory_that_is_to_be_emptied_are_left_alone(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compared(tmp_path, '--cohorts', '95', '--repeats', '1')
    prompts = tmp_path / 'data' / '95.jsonl'
    before = prompts.read_bytes()
    message = refused(
        capsys, '--engine', 'simulated', '--input', str(prompts), '--out', str(tmp_path)
    )
    assert 'which lies in --out' in message
    assert prompts.read_bytes() == before
    assert (tmp_path / 'report.json').exists()


# Real runs.


@pytest.fixture
def tree(monkeypatch: pytest.MonkeyPatch) -> Iterator[ProcessTree]:
    """Everything that a run starts; the test fails if any of it is left."""
    with ProcessTree() as processes:
        for name, value in processes.env.items():
            monkeypatch.setenv(name, value)
        yield processes
        processes.wait_until_gone()


@pytest.mark.usefixtures('tree')
def test_one_arm_is_really_run_and_reported(tmp_path: pathlib.Path) -> None:
    found = compared(
        tmp_path, '--arms', 'dynamo-kv', '--cohorts', '95', '--repeats', '1', '--max_tokens', '4',
        '--simulation_speedup', '1000', '--price_per_hour', '2', runner=run_arm,
    )  # fmt: skip
    [of_95] = found['cohorts']
    arm = of_95['arms']['dynamo-kv']
    assert (arm['records'], arm['failed'], arm['restarts']) == (40, 0, 0)
    assert arm['records_per_s']['mean'] > 0
    assert 0 < arm['cached_share']['mean'] <= of_95['cached_share_ceiling']
    assert len(arm['engine_shares']) == 4
    assert sum(arm['engine_shares']) == pytest.approx(1)
    assert arm['ttft_ms']['p50']['mean'] < arm['latency_ms']['p50']['mean']
    assert arm['cost']['per_million_prompts']['mean'] > 0


def alone(tmp_path: pathlib.Path, timeout_s: float, **fields: Any) -> tuple[Run, Conditions]:
    prompts = tmp_path / 'p.jsonl'
    prompts.write_text('{"prompt": "p"}\n')
    settings = Settings(
        **{'engine': 'simulated', 'model': MODEL, 'num_gpus': 1, 'max_tokens': 1, **fields}
    )
    of_all = Cohort('all', str(prompts), cohort('all').reuse)
    return Run('dynamo-rr', of_all, 1), Conditions(settings, (), tmp_path, timeout_s)


@pytest.mark.usefixtures('tree')
def test_the_end_of_the_log_of_a_run_that_failed_is_shown(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where paths are those from another directory than the benchmarks'."""
    monkeypatch.chdir(tmp_path)
    asked, conditions = alone(pathlib.Path(), 60, model='/no/such/model')
    with pytest.raises(RunFailedError, match='ended with exit status 1') as failed:
        run_arm(asked, conditions)
    assert 'p-dynamo-rr-1.log' in str(failed.value)
    assert '/no/such/model' in str(failed.value)


def test_a_run_that_takes_too_long_is_ended_with_all_its_servers(
    tmp_path: pathlib.Path, tree: ProcessTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its only answer would take a minute; the time is up as soon as its engine serves."""
    asked, conditions = alone(tmp_path, 7, max_tokens=8000)
    log, wait = tmp_path / f'{asked.name}.log', subprocess.Popen.wait

    def wait_for_the_engine(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        if timeout != 7:
            return wait(process, timeout)
        wait_until('the engine is ready', lambda: 'engine 1 of 1 ready' in log.read_text())
        raise subprocess.TimeoutExpired('run', timeout)

    monkeypatch.setattr(subprocess.Popen, 'wait', wait_for_the_engine)
    with pytest.raises(RunFailedError, match='took more than 7 s; raise --run_timeout_secs'):
        run_arm(asked, conditions)
    tree.wait_until_gone()
