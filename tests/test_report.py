"""From runs to a report: intervals, verdicts, cost, and pages that show them."""

from __future__ import annotations

import json
import pathlib
import re
import shutil
import subprocess
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import _document, _plots, _report_page, _verdict
from benchmarks._reuse_ceiling import ReuseCounter
from benchmarks._run_figures import LostRecordsError, figures_of
from benchmarks._statistics import Estimate, mean, ratio
from benchmarks.compare import write_reports
from tests.support.comparisons import report, run, runs

# Intervals and ratios.


def test_the_interval_of_three_runs_is_students() -> None:
    """4.303 standard errors on each side, for two degrees of freedom."""
    found = mean([9.0, 10.0, 11.0])
    assert found.mean == 10
    assert found.high == pytest.approx(10 + 4.3027 / 3**0.5, abs=1e-3)
    assert found.low == pytest.approx(10 - 4.3027 / 3**0.5, abs=1e-3)


def test_a_single_run_has_no_interval() -> None:
    assert mean([7.0]) == Estimate(7.0, None, None, 1)


def test_a_ratio_compares_runs_of_the_same_repeat() -> None:
    """A drift that meets both arms alike does not widen it."""
    found = ratio([20.0, 30.0, 44.0], [10.0, 15.0, 22.0])
    assert found.mean == pytest.approx(2)
    assert found.low == pytest.approx(2)
    assert found.high == pytest.approx(2)
    noisy = ratio([20.0, 30.0, 44.0], [22.0, 15.0, 10.0])
    assert noisy.low is not None
    assert noisy.high is not None
    assert noisy.low < 1 < noisy.high


@given(st.lists(st.floats(0.1, 1e6), min_size=2, max_size=6))
def test_the_ratio_of_runs_to_themselves_is_one(values: list[float]) -> None:
    found = ratio(values, values)
    assert (found.mean, found.low, found.high) == (1, 1, 1)


def test_a_falling_function_turns_an_interval_around() -> None:
    found = Estimate(2.0, 1.0, 4.0, 3).map(lambda x: 1 / x)
    assert (found.mean, found.low, found.high) == (0.5, 0.25, 1.0)


# The ceiling.


@given(st.lists(st.lists(st.sampled_from('ab'), min_size=1, max_size=12), min_size=1, max_size=8))
def test_the_ceiling_is_what_an_endless_cache_of_whole_blocks_would_save(
    prompts: list[list[str]],
) -> None:
    size = 3
    cached: dict[tuple[str, ...], int] = {}
    saved = 0
    for prompt in prompts:
        for end in range(size, len(prompt), size):
            block = tuple(prompt[:end])
            saved += size if block in cached else 0
            cached[block] = cached.get(block, 0) + 1
    counter = ReuseCounter(size)
    counter.look(prompts[:2])
    counter.look(prompts[2:])
    found = counter.found()
    assert found.records == len(prompts)
    assert found.prompt_tokens == sum(map(len, prompts))
    assert found.reusable_tokens == saved
    assert found.working_set_tokens == size * sum(times > 1 for times in cached.values())
    assert found.ceiling < 1


# The figures of a run.


def manifest(**fields: Any) -> dict[str, Any]:
    return {
        'arm': 'dynamo-kv', 'input': {'records': 4}, 'answered': 3, 'failed': 1,
        'records_per_s': 5.0, 'output_tokens_per_s': 80.0, 'window_s': 0.6,
        'metrics': {'prompt_tokens': 300, 'cached_prompt_tokens': 120, 'failed_unavailable': 1},
        **fields,
    }  # fmt: skip


def row(engine: str | None, latency_ms: float, error: str | None = None) -> dict[str, Any]:
    return {
        'engine': engine, 'latency_ms': latency_ms, 'ttft_ms': None, 'error': error,
        'parses': None if error else engine == 'a',
    }  # fmt: skip


ROWS = [row('a', 10), row('a', 20), row('b', 30), row(None, 999, 'unavailable')]


def test_the_figures_of_a_run_are_those_of_its_answers_and_its_failures_are_counted() -> None:
    found = figures_of(manifest(), ROWS, cohort='95', repeat=2, engines=3)
    assert (found.records, found.failed, found.errors) == (4, 1, {'unavailable': 1})
    assert found.cached_share == 0.4
    assert (found.latency_ms[0], found.latency_ms[50], found.latency_ms[100]) == (10, 20, 30)
    assert found.engine_shares == pytest.approx((2 / 3, 1 / 3, 0.0))
    assert found.parsed_share == pytest.approx(2 / 3)
    assert found.ttft_ms is None


def test_engines_without_names_of_their_own_have_no_shares() -> None:
    assert figures_of(manifest(), ROWS, cohort='95', repeat=2, engines=None).engine_shares is None


@pytest.mark.parametrize(
    ('rows', 'fields'), [(ROWS[:3], {}), (ROWS, {'answered': 4}), (ROWS, {'answered': 2})]
)
def test_a_run_that_lost_a_record_has_no_figures(
    rows: list[dict[str, Any]], fields: dict[str, Any]
) -> None:
    with pytest.raises(LostRecordsError, match='each prompt must have one line'):
        figures_of(manifest(**fields), rows, cohort='95', repeat=1, engines=2)


# Verdicts.


def judged(speeds: dict[str, list[float]], **fields: Any) -> _verdict.Verdict:
    found = {arm: runs(arm, '95', values) for arm, values in speeds.items()}
    return _verdict.judge(found, fields.get('stand_ins', {}))


def test_an_arm_that_is_faster_than_noise_is_to_be_chosen_and_by_how_much_is_said() -> None:
    found = judged(
        {'native-dp': [95, 96, 97], 'dynamo-rr': [99, 100, 101], 'dynamo-kv': [148, 150, 152]}
    )
    assert (found.choice, found.decisive, found.level) == ('dynamo-kv', True, ('dynamo-kv',))
    assert re.match(
        r'Choose dynamo-kv: it answers 1\.50 times \(95 % interval 1\.\d\d to 1\.\d\d\) as many '
        r'prompts a second as dynamo-rr, 1\.56 times \(.*\) as many as native-dp\.$',
        found.text,
    )


def test_arms_within_noise_are_said_to_be_so_and_the_simplest_is_to_be_chosen() -> None:
    found = judged({'dynamo-rr': [99, 101, 100], 'dynamo-kv': [101, 100, 102]})
    assert (found.choice, found.decisive) == ('dynamo-rr', False)
    assert found.level == ('dynamo-rr', 'dynamo-kv')
    assert 'The difference between dynamo-rr and dynamo-kv is within noise' in found.text
    assert 'Choose dynamo-rr, which has the fewest moving parts of them.' in found.text


def test_an_arm_behind_those_within_noise_is_named() -> None:
    found = judged(
        {'native-dp': [50, 51, 52], 'dynamo-rr': [99, 101, 100], 'dynamo-kv': [101, 100, 102]}
    )
    assert found.choice == 'dynamo-rr'
    assert 'dynamo-kv is faster than native-dp (1.98 times' in found.text


def test_one_run_of_each_is_no_verdict() -> None:
    found = judged({'dynamo-rr': [100], 'dynamo-kv': [180]})
    assert found.choice is None
    assert '1.80 times as fast as dynamo-rr, but one run of each' in found.text


def test_an_arm_with_failures_cannot_win_however_fast_it_is() -> None:
    found = _verdict.judge(
        {
            'dynamo-rr': runs('dynamo-rr', '95', [100, 101, 102]),
            'dynamo-kv': runs('dynamo-kv', '95', [900, 901, 902], failed=2),
        },
        {},
    )
    assert found.choice == 'dynamo-rr'
    assert 'dynamo-kv left 6 of 300 prompts without an answer' in found.text


def test_a_stand_in_cannot_win() -> None:
    speeds = {'native-dp': [900.0, 901.0], 'dynamo-rr': [100.0, 101.0], 'dynamo-kv': [150.0, 151.0]}
    found = judged(speeds, stand_ins={'native-dp': 'it is none'})
    assert found.choice == 'dynamo-kv'
    assert 'native-dp' not in found.text


def test_without_an_arm_that_answers_everything_there_is_no_choice() -> None:
    found = _verdict.judge({'dynamo-kv': runs('dynamo-kv', '95', [10, 11], failed=1)}, {})
    assert found.choice is None
    assert found.text.startswith('No arm can be chosen.')


def test_the_verdicts_of_all_cohorts_are_put_together() -> None:
    decisive = _verdict.Verdict('dynamo-kv', True, ('dynamo-kv',), '')
    level = _verdict.Verdict('dynamo-rr', False, ('dynamo-rr', 'dynamo-kv'), '')
    unknown = _verdict.Verdict(None, False, (), '')
    found = {'0': level, '25': level, '75': decisive, '95': decisive, 'x': unknown}
    assert _verdict.overall(found) == (
        'Choose dynamo-kv for cohorts 75, 95: there it is faster by more than the noise than all '
        'others that can be chosen. For cohorts 0, 25 the fastest arms differ by no more than '
        'noise. For cohort x these runs give no choice.'
    )


def test_an_arm_that_nothing_is_compared_with_is_not_said_to_be_within_noise() -> None:
    found = {'95': judged({'dynamo-kv': [10, 11]})}
    assert _verdict.overall(found) == (
        'For cohort 95 one arm alone can be chosen, so nothing is compared.'
    )


@pytest.mark.parametrize(('speeds', 'window_s'), [([900, 901, 902], 0.011), ([None] * 3, 0.0)])
def test_runs_that_were_over_with_their_first_answers_are_no_verdict(
    speeds: list[Any], window_s: float
) -> None:
    """A few prompts that the engines work on all at once: the window says nothing of the work."""
    found = _verdict.judge(
        {
            'dynamo-rr': runs('dynamo-rr', '95', [100, 101, 102]),
            'dynamo-kv': runs(
                'dynamo-kv', '95', speeds, window_s=window_s, latency_ms=(1200.0,) * 101
            ),
        },
        {},
    )
    assert (found.choice, found.decisive) == (None, False)
    assert f'All answers of a run of dynamo-kv came within {window_s:.3f} s' in found.text
    assert 'no request took less than 1.200 s: too few prompts' in found.text


# The report.


def comparison() -> dict[str, Any]:
    found = [
        *runs('native-dp', '0', [98, 100, 102]),
        *runs('dynamo-rr', '0', [99, 100, 101]),
        *runs('dynamo-kv', '0', [100, 101, 99]),
        *runs('native-dp', '95', [98, 100, 102]),
        *runs('dynamo-rr', '95', [99, 100, 101], cached_share=0.45),
        *runs('dynamo-kv', '95', [149, 150, 151], cached_share=0.78),
    ]
    return report(found)


def test_cost_is_the_price_over_what_is_done_in_an_hour() -> None:
    """3.60 an hour at 100 prompts and 1,600 tokens a second."""
    found = report(runs('dynamo-rr', '95', [100, 100, 100]))
    cost = found['cohorts'][0]['arms']['dynamo-rr']['cost']
    assert cost['per_million_prompts']['mean'] == pytest.approx(10.0)
    assert cost['per_million_output_tokens']['mean'] == pytest.approx(0.625)
    dearer = report(runs('dynamo-rr', '95', [90, 100, 110]))['cohorts'][0]['arms']['dynamo-rr']
    assert dearer['cost']['per_million_prompts']['low'] < 10
    assert dearer['cost']['per_million_prompts']['high'] > 10


def test_what_is_cheap_is_not_said_to_be_free() -> None:
    found = report(runs('dynamo-rr', '95', [100, 100]), price_per_hour=0.02)
    text = _document.to_markdown(_report_page.page(found))
    assert '0.0556 (0.0556 to 0.0556) | 0.00347 (0.00347 to 0.00347)' in text


def test_without_a_price_there_is_no_cost() -> None:
    found = report(runs('dynamo-rr', '95', [100, 100]), price_per_hour=None)
    cost = found['cohorts'][0]['arms']['dynamo-rr']['cost']
    assert cost == {'per_million_prompts': None, 'per_million_output_tokens': None}
    assert '--price_per_hour adds the cost' in _document.to_markdown(_report_page.page(found))


def test_a_mean_over_some_of_the_runs_is_none_at_all() -> None:
    found = [run('dynamo-kv', '95', 1, 100.0), run('dynamo-kv', '95', 2, None, failed=100)]
    arm = report(found)['cohorts'][0]['arms']['dynamo-kv']
    assert arm['records_per_s'] is arm['over_baseline'] is None
    assert (arm['failed'], arm['records']) == (100, 200)


def test_the_report_compares_with_the_baseline_and_keeps_every_run() -> None:
    found = json.loads(json.dumps(comparison()))
    assert found['baseline'] == 'dynamo-rr'
    cohort = found['cohorts'][1]
    assert cohort['cohort'] == '95'
    assert cohort['working_set_in_caches'] == 1.5
    arm = cohort['arms']['dynamo-kv']
    assert arm['over_baseline']['mean'] == pytest.approx(1.5, abs=1e-3)
    assert arm['cached_share']['mean'] == pytest.approx(0.78)
    assert arm['engine_shares'] == pytest.approx([0.4, 0.3, 0.2, 0.1])
    assert arm['latency_ms']['p50']['mean'] == pytest.approx(500 / 150, rel=0.01)
    assert [r['records_per_s'] for r in arm['runs']] == [149, 150, 151]
    assert cohort['arms']['native-dp']['ttft_ms'] is None
    assert cohort['verdict']['choice'] == 'dynamo-kv'


def test_every_page_says_what_is_simulated_and_what_stands_in_for_what(
    tmp_path: pathlib.Path,
) -> None:
    write_reports(comparison(), tmp_path)
    for name in ('report.json', 'report.md', 'report.html'):
        text = (tmp_path / name).read_text()
        assert 'Nothing here was measured on GPUs.' in text
        assert 'native-dp is stood in for here by one simulated engine' in text
    for name in ('report.md', 'report.html'):
        text = (tmp_path / name).read_text()
        assert 'native-dp (stand-in)' in text
        assert 'Choose dynamo-kv for cohort 95' in text
        assert 'is within noise' in text
        assert 'inference_wall_clock_ms' in text
        assert 'short runs look somewhat faster than long ones' in text


def test_failures_stand_beside_the_speed() -> None:
    found = report([
        *runs('dynamo-rr', '95', [100, 101]),
        *runs('dynamo-kv', '95', [150, 151], failed=3, errors={'unavailable': 3}),
    ])  # fmt: skip
    text = _document.to_markdown(_report_page.page(found))
    assert '6 of 200 (unavailable 6)' in text
    assert 'so its speed does not count' in text
    assert '95: dynamo-kv, failed: 6 of 200 (unavailable 6)' in text
    assert '95: dynamo-rr |' in text
    drawn = _plots.draw(found)
    assert 'left prompts without an answer' in drawn['throughput']
    assert 'without an answer' not in _plots.draw(comparison())['throughput']


def test_cells_of_several_lines_stay_in_their_row() -> None:
    found = report(runs('dynamo-rr', '95', [100]), machine={'GPUs': 'GPU 0: H200\nGPU 1: H200'})
    text = _document.to_markdown(_report_page.page(found))
    assert '| GPUs | GPU 0: H200<br>GPU 1: H200 |' in text


def test_nothing_is_written_if_a_report_cannot_be_made(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: object) -> Any:
        raise RuntimeError

    monkeypatch.setattr(_plots, 'draw', fails)
    with pytest.raises(RuntimeError):
        write_reports(comparison(), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_markup_in_names_stays_text(tmp_path: pathlib.Path) -> None:
    found = runs('dynamo-rr', '<b>a|b</b>', [100, 101])
    write_reports(report(found), tmp_path)
    assert '<b>' not in (tmp_path / 'report.html').read_text()


def test_an_arm_without_answers_in_the_first_cohort_is_in_the_legend_of_latencies() -> None:
    found = report([
        *runs('dynamo-rr', '0', [100]),
        run('dynamo-kv', '0', 1, None, failed=100, latency_ms=()),
        *runs('dynamo-rr', '95', [100]),
        *runs('dynamo-kv', '95', [100]),
    ])  # fmt: skip
    assert 'dynamo-kv' in _plots.draw(found)['latency']


# What a browser makes of it.

CHROMIUM_FLAGS = (
    '--headless', '--no-sandbox', '--disable-gpu', '--disable-quic', '--no-first-run',
    '--disable-background-networking', '--disable-component-update', '--disable-sync',
)  # fmt: skip

# What is drawn is known to the browser alone: how large each plot is, and how many shapes with an
# area and how many words are in it.
LOOK = """
<script>
const found = {};
for (const figure of document.querySelectorAll('figure')) {
  const svg = figure.querySelector('svg');
  const box = svg.getBoundingClientRect();
  const drawn = [...svg.querySelectorAll('path')].filter(path => {
    const size = path.getBBox(); return size.width > 5 && size.height > 5; });
  found[figure.id] = {
    width: box.width, height: box.height, shapes: drawn.length,
    words: [...svg.querySelectorAll('text')].map(text => text.textContent.trim()),
  };
}
found.loaded = performance.getEntriesByType('resource').map(entry => entry.name);
document.body.innerHTML = '<pre id="found"></pre>';
document.getElementById('found').textContent = JSON.stringify(found);
</script>
</body>
"""


def chromium() -> str:
    path = shutil.which('chromium') or shutil.which('chromium-browser')
    if path is None:
        pytest.fail(
            'The plots are looked at in a browser, and there is no chromium here: install it with '
            '`apt-get install --no-install-recommends chromium`.'
        )
    return path


def looked_at(page: pathlib.Path, profile: pathlib.Path) -> dict[str, Any]:
    """What a browser finds in the page's figures."""
    observed = page.with_name('observed.html')
    observed.write_text(page.read_text().replace('</body>', LOOK))
    result = subprocess.run(
        [chromium(), *CHROMIUM_FLAGS, f'--user-data-dir={profile}', '--dump-dom',
         observed.as_uri()],
        capture_output=True, text=True, timeout=90, check=False,
    )  # fmt: skip
    match = re.search(r'<pre id="found">(.*?)</pre>', result.stdout, re.DOTALL)
    assert match, f'no answer of the browser\n{result.stdout[:2000]}\n{result.stderr[-2000:]}'
    found: dict[str, Any] = json.loads(match.group(1))
    return found


def test_the_plots_are_there_in_a_browser_and_nothing_is_loaded_for_them(
    tmp_path: pathlib.Path,
) -> None:
    write_reports(comparison(), tmp_path)
    found = looked_at(tmp_path / 'report.html', tmp_path / 'profile')
    assert found.pop('loaded') == []
    assert found.keys() == {
        'plot-throughput', 'plot-cached-share', 'plot-latency', 'plot-engine-shares',
    }  # fmt: skip
    for plot in found.values():
        assert plot['width'] > 500
        assert plot['height'] > 200
        assert 'cohort 0' in plot['words']
        assert 'cohort 95' in plot['words']
        assert 'dynamo-kv' in plot['words']
    # A bar for each of three arms in two cohorts, a line for each run, a bar for each engine.
    assert found['plot-throughput']['shapes'] >= 6
    assert found['plot-cached-share']['shapes'] >= 6
    assert found['plot-latency']['shapes'] >= 18
    assert found['plot-engine-shares']['shapes'] >= 16
    assert 'native-dp (stand-in)' in found['plot-throughput']['words']
    assert 'ceiling' in found['plot-cached-share']['words']


def test_a_page_without_engine_shares_has_the_other_plots(tmp_path: pathlib.Path) -> None:
    """As vLLM's own server tells of none."""
    plots = _plots.draw(report(runs('native-dp', '95', [100, 101])))
    assert plots.keys() == {'throughput', 'cached-share', 'latency'}


@pytest.mark.parametrize('cohorts', [1, 9])
def test_plots_can_be_drawn_of_any_number_of_cohorts(cohorts: int) -> None:
    found = [r for i in range(cohorts) for r in runs('dynamo-kv', str(i), [10.0 + i])]
    plots = _plots.draw(report(found))
    assert len(plots) == 4
    assert all(f'cohort {i}' in svg for svg in plots.values() for i in range(cohorts))
