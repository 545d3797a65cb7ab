"""What a report says and in which order, from its data."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks._document import Block, Code, Heading, Paragraph, Plot, Table

Report = Mapping[str, Any]

_NONE = '-'
_PERCENT = 100

HOW_TO_READ = (
    'Prompts a second are the prompts answered over the time from the first answer to the last, as '
    'the metric inference_wall_clock_ms has it: no start of machines, servers or models is in it, '
    'and a prompt without an answer does not count. What is done before the first answer is not '
    'in it either, so that short runs look somewhat faster than long ones; it meets all arms. '
    'Prompts are sent as they came, but by the arms that put them in order. Behind ± is half '
    "of the 95 % interval of the mean (Student's t over the repeats); ratios compare runs of the "
    'same repeat. Each run began with empty caches.'
)
CEILING = (
    "The ceiling of the cached share is what one cache without end would save of the prompts' "
    'tokens, in whole KV blocks.'
)
NO_TTFT = (
    'TTFT and the shares of the engines are as the frontend of Dynamo tells them; an arm without '
    'it has none.'
)


def page(report: Report) -> list[Block]:
    """The page of a report."""
    blocks: list[Block] = [
        Heading(_title(report), 1),
        Paragraph(report['verdict'], important=True),
        *(Paragraph(note) for note in report['notes']),
    ]
    for cohort in report['cohorts']:
        blocks += [
            Heading(f'Cohort {cohort["cohort"]}'),
            Paragraph(cohort['verdict']['text']),
            Paragraph(_of_cohort(cohort, report)),
            _speeds(cohort, report),
            _times(cohort, report),
        ]
    return [
        *blocks,
        Heading('Plots'),
        Plot('throughput', 'Prompts answered a second, by cohort and arm, with 95 % intervals'),
        Plot('cached-share', "Share of the prompts' tokens from a cache, against its ceiling"),
        Plot('latency', 'Latency of the requests as the client saw it, a line for each run'),
        Plot('engine-shares', 'Share of each engine in the prompts, the busiest first'),
        *_cost(report),
        Heading('How to read this'),
        *(Paragraph(text) for text in (HOW_TO_READ, CEILING, NO_TTFT)),
        Table(
            ['arm', 'what it is'],
            [[name, what] for name, what in report['arms'].items()],
            text=True,
        ),
        Heading('How it was measured'),
        Code(report['command']),
        Table(
            ['setting', 'value'],
            [[name, _shown(value)] for name, value in _settings(report).items()],
            text=True,
        ),
    ]


def _title(report: Report) -> str:
    engines = report['settings']['num_gpus']
    kind = {'vllm': 'vLLM', 'cpu': 'CPU', 'simulated': 'simulated'}[report['engine']]
    repeats = report['repeats']
    times = 'once' if repeats == 1 else f'{repeats} times'
    return f'Does KV routing pay? {engines} {kind} engines, each run made {times}'


def _of_cohort(cohort: Report, report: Report) -> str:
    caches = cohort['working_set_in_caches']
    size = (
        f', {caches:.2f} times the KV cache of one engine and '
        f'{caches / report["settings"]["num_gpus"]:.2f} times all of them together'
        if caches is not None
        else ''
    )
    mean_tokens = cohort['prompt_tokens'] / cohort['records']
    return (
        f'{cohort["records"]:,} prompts of {mean_tokens:,.0f} tokens on average. What several of '
        f'them share has {cohort["working_set_tokens"]:,} tokens{size}. '
        f'At most {_percent(cohort["cached_share_ceiling"])} of the tokens can come from a cache.'
    )


def _speeds(cohort: Report, report: Report) -> Table:
    return Table(
        [
            'arm', 'prompts/s', f'over {report["baseline"]}', 'output tokens/s', 'cached',
            'of ceiling', 'failed', 'parse',
        ],
        [
            [
                _name(name, report),
                _with_reach(arm['records_per_s']),
                _interval(arm['over_baseline']),
                _with_reach(arm['output_tokens_per_s']),
                _mean(arm['cached_share'], _percent),
                _of_ceiling(arm['cached_share'], cohort['cached_share_ceiling']),
                _failed(arm),
                _mean(arm['parsed_share'], _percent),
            ]
            for name, arm in cohort['arms'].items()
        ],
    )  # fmt: skip


def _times(cohort: Report, report: Report) -> Table:
    percentiles = ('p50', 'p90', 'p99')

    def times(found: Report | None) -> list[str]:
        return [_mean((found or {}).get(p), lambda ms: f'{ms:,.0f}') for p in percentiles]

    return Table(
        ['arm', 'latency, ms: p50', 'p90', 'p99', 'TTFT, ms: p50', 'p90', 'p99', 'engines, %'],
        [
            [
                _name(name, report),
                *times(arm['latency_ms']),
                *times(arm['ttft_ms']),
                ' '.join(f'{share * _PERCENT:.1f}' for share in arm['engine_shares'] or ())
                or _NONE,
            ]
            for name, arm in cohort['arms'].items()
        ],
    )


def _cost(report: Report) -> list[Block]:
    price = report['price_per_hour']
    if price is None:
        return [
            Heading('Cost'),
            Paragraph('No price was given; --price_per_hour adds the cost of each arm.'),
        ]
    rows = [
        [
            f'{cohort["cohort"]}: {_name(name, report)}'
            + (f', failed: {_failed(arm)}' if arm['failed'] else ''),
            _price(arm['cost']['per_million_prompts']),
            _price(arm['cost']['per_million_output_tokens']),
        ]
        for cohort in report['cohorts']
        for name, arm in cohort['arms'].items()
    ]
    return [
        Heading('Cost'),
        Paragraph(
            f'At {price:g} an hour for all engines together and at the measured speed, without '
            'the time that a start takes. Prompts without an answer are not in it.'
        ),
        Table(['cohort: arm', 'per million prompts', 'per million output tokens'], rows),
    ]


def _settings(report: Report) -> dict[str, Any]:
    found = {
        'date': report['date'],
        'took': f'{report["took_s"] / 60:.1f} minutes',
        **{name: value for name, value in report['settings'].items() if value is not None},
        **{f'version of {name}': version for name, version in report['versions'].items()},
        **report['machine'],
    }
    for cohort in report['cohorts']:
        made = cohort['data']
        found[f'prompts of cohort {cohort["cohort"]}'] = (
            f'SHA-256 {made["sha256"][:16]}…, {made["bytes"]:,} bytes, tokens by '
            f'{made["tokens_counted_by"]}'
        )
    return found


def _name(arm: str, report: Report) -> str:
    return f'{arm} (stand-in)' if arm in report['stand_ins'] else arm


def _failed(arm: Report) -> str:
    if not arm['failed']:
        return '0'
    kinds = ', '.join(f'{kind} {number}' for kind, number in arm['errors'].items())
    return f'{arm["failed"]} of {arm["records"]} ({kinds})'


def _of_ceiling(share: Report | None, ceiling: float) -> str:
    if share is None or not ceiling:
        return _NONE
    return _percent(share['mean'] / ceiling)


def _percent(share: float) -> str:
    return f'{share * _PERCENT:.1f} %'


def _mean(estimate: Report | None, show: Callable[[float], str]) -> str:
    return _NONE if estimate is None else show(estimate['mean'])


def _with_reach(estimate: Report | None) -> str:
    if estimate is None:
        return _NONE
    if estimate['low'] is None:
        return f'{estimate["mean"]:,.1f}'
    return f'{estimate["mean"]:,.1f} ± {(estimate["high"] - estimate["low"]) / 2:,.1f}'


def _interval(estimate: Report | None, decimals: int = 2) -> str:
    if estimate is None:
        return _NONE
    shown = f'{estimate["mean"]:,.{decimals}f}'
    if estimate['low'] is None:
        return shown
    return f'{shown} ({estimate["low"]:,.{decimals}f} to {estimate["high"]:,.{decimals}f})'


def _price(estimate: Report | None) -> str:
    """With three digits at least, for what is cheap must not look free."""
    if estimate is None:
        return _NONE
    return _interval(estimate, max(2, 2 - math.floor(math.log10(estimate['mean']))))


def _shown(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)
