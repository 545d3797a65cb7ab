"""The plots of a report, each a piece of SVG that needs nothing else."""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from benchmarks._run_figures import QUANTILES

Report = Mapping[str, Any]

_INCHES_WIDE, _INCHES_HIGH = 9.0, 4.2
_IN_A_ROW = 4  # cohorts of a figure
_GROUP_WIDTH = 0.8  # of a group of bars; the next group is at a distance of 1
_BAR_WIDTH = 0.9  # of a bar's place in its group
# Told apart also by those who see no red or no green.
_COLORS = ('#4477aa', '#ee6677', '#228833', '#ccbb44', '#66ccee', '#aa3377', '#bbbbbb')
_FAILED = '//'  # the hatch of a bar whose arm left prompts without an answer
_STYLE: dict[Any, Any] = {
    'svg.fonttype': 'none',  # text stays text
    'font.family': 'sans-serif',
    'text.parse_math': False,  # a name may hold dollars
    'axes.spines.top': False,
    'axes.spines.right': False,
    'axes.grid': True,
    'axes.axisbelow': True,
    'grid.alpha': 0.3,
}


def draw(report: Report) -> dict[str, str]:
    """All plots of a report, by name; one for which nothing was measured is left out."""
    drawn: dict[str, str] = {}
    for name, plot in _PLOTS.items():
        # A salt of its own, so that no two plots of a page use the same id for different things.
        with mpl.rc_context({**_STYLE, 'svg.hashsalt': name}):
            figure = plot(report)
            if figure is not None:
                drawn[name] = _svg(figure)
    return drawn


def throughput(report: Report) -> Figure | None:
    """Prompts a second of each arm in each cohort, with intervals."""
    figure, axes = _figure()
    _bars(axes, report, lambda arm: arm['records_per_s'])
    axes.set_ylabel('prompts answered a second')
    axes.set_ylim(bottom=0)
    return _finished(figure, axes, report)


def cached_share(report: Report) -> Figure | None:
    """The share of prompt tokens from a cache, and the most that there could be."""
    figure, axes = _figure()
    _bars(axes, report, lambda arm: arm['cached_share'])
    ceilings = [cohort['cached_share_ceiling'] for cohort in report['cohorts']]
    reach = _GROUP_WIDTH / 2
    begins, ends = zip(*((i - reach, i + reach) for i in range(len(ceilings))), strict=True)
    lines = axes.hlines(
        ceilings, begins, ends, colors='black', linestyles='dashed', label='ceiling'
    )
    axes.set_ylabel("share of the prompts' tokens from a cache")
    axes.set_ylim(0, 1)
    return _finished(figure, axes, report, lines)


def latency(report: Report) -> Figure | None:
    """The share of requests that took no longer than so long, for each cohort; a line a run."""
    figure, all_axes = _figures(report)
    for axes, cohort in zip(all_axes, report['cohorts'], strict=True):
        for arm, color in _colors(report).items():
            for run in cohort['arms'][arm]['runs']:
                if run['latency_ms']:
                    seconds = [ms / 1000 for ms in run['latency_ms']]
                    shares = [percent / 100 for percent in QUANTILES]
                    axes.plot(seconds, shares, color=color, linewidth=1)
        axes.set_xlabel('seconds')
        axes.set_xlim(left=0)
    all_axes[0].set_ylabel('share of requests at most so long')
    all_axes[0].legend(handles=_arms(report), frameon=False, fontsize='small')
    return figure


def engine_shares(report: Report) -> Figure | None:
    """The share of each engine in the prompts, the busiest first, for each cohort."""
    known = [
        [arm for arm in report['arms'] if cohort['arms'][arm]['engine_shares']]
        for cohort in report['cohorts']
    ]
    if not any(known):
        return None
    colors = _colors(report)
    figure, all_axes = _figures(report)
    for axes, cohort, arms in zip(all_axes, report['cohorts'], known, strict=True):
        for place, arm in enumerate(arms):
            shares = cohort['arms'][arm]['engine_shares']
            middles, width = _beside(place, len(shares))
            axes.bar(middles, shares, width, color=colors[arm])
        labels = [_label(arm, report) for arm in arms]
        axes.set_xticks(range(len(arms)), labels, rotation=30, ha='right')
        axes.grid(visible=False, axis='x')
    all_axes[0].set_ylabel('share of an engine in the prompts')
    return figure


_PLOTS: Mapping[str, Callable[[Report], Figure | None]] = {
    'throughput': throughput,
    'cached-share': cached_share,
    'latency': latency,
    'engine-shares': engine_shares,
}


def _figure() -> tuple[Figure, Axes]:
    figure = Figure(figsize=(_INCHES_WIDE, _INCHES_HIGH), layout='constrained')
    return figure, figure.subplots()


def _figures(report: Report) -> tuple[Figure, Sequence[Axes]]:
    """Axes for each cohort, a few in a row."""
    cohorts = report['cohorts']
    columns = min(_IN_A_ROW, len(cohorts))
    rows = math.ceil(len(cohorts) / columns)
    figure = Figure(figsize=(_INCHES_WIDE, _INCHES_HIGH * rows), layout='constrained')
    every: list[Axes] = list(figure.subplots(rows, columns, sharey=True, squeeze=False).flat)
    for axes in every[len(cohorts) :]:
        axes.set_axis_off()
    used = every[: len(cohorts)]
    for axes, cohort in zip(used, cohorts, strict=True):
        axes.set_title(_title(cohort), fontsize='medium')
    return figure, used


def _bars(axes: Axes, report: Report, value: Callable[[Report], Report | None]) -> None:
    """A group of bars for each cohort, one for each arm, with their intervals."""
    colors = _colors(report)
    for group, cohort in enumerate(report['cohorts']):
        middles, width = _beside(group, len(colors))
        for middle, (arm, color) in zip(middles, colors.items(), strict=True):
            estimate = value(cohort['arms'][arm])
            if estimate is None:
                continue
            height = estimate['mean']
            axes.bar(middle, height, width, color=color, hatch=_hatch(cohort['arms'][arm]))
            if estimate['low'] is not None:
                reach = [[height - estimate['low']], [estimate['high'] - height]]
                axes.errorbar(middle, height, reach, fmt='none', ecolor='black', capsize=3)


def _beside(group: int, number: int) -> tuple[list[float], float]:
    """The middles of so many bars around a place, and their width."""
    width = _GROUP_WIDTH / number
    left = group - _GROUP_WIDTH / 2
    return [left + width * (i + 0.5) for i in range(number)], width * _BAR_WIDTH


def _finished(figure: Figure, axes: Axes, report: Report, *more: Artist) -> Figure:
    """With the names of cohorts and arms."""
    axes.set_xticks(range(len(report['cohorts'])), [_title(c) for c in report['cohorts']])
    axes.grid(visible=False, axis='x')
    arms = _arms(report)
    if any(_hatch(arm) for cohort in report['cohorts'] for arm in cohort['arms'].values()):
        label = 'left prompts without an answer'
        arms.append(Patch(facecolor='white', edgecolor='black', hatch=_FAILED, label=label))
    figure.legend(
        handles=[*arms, *more], loc='outside upper center', ncols=len(arms) + 1, frameon=False
    )
    return figure


def _title(cohort: Report) -> str:
    return f'cohort {cohort["cohort"]}'


def _arms(report: Report) -> list[Patch]:
    """What a legend says of the arms."""
    return [Patch(color=c, label=_label(arm, report)) for arm, c in _colors(report).items()]


def _hatch(arm: Report) -> str | None:
    return _FAILED if arm['failed'] else None


def _label(arm: str, report: Report) -> str:
    return f'{arm} (stand-in)' if arm in report['stand_ins'] else arm


def _colors(report: Report) -> dict[str, str]:
    return dict(zip(report['arms'], itertools.cycle(_COLORS), strict=False))


def _svg(figure: Figure) -> str:
    written = io.StringIO()
    figure.savefig(written, format='svg', metadata={'Date': None, 'Creator': None})
    text = written.getvalue()
    return text[text.index('<svg') :]
