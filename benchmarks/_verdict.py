"""Which arm to choose, in words: by how much it is faster, or that nobody can tell."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from benchmarks._run_figures import RunFigures
from benchmarks._statistics import Estimate, mean, ratio

_LEAST_WINDOW = 2.0  # from first answer to last, in times of the shortest request


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What follows from the runs of one cohort.

    Attributes:
      choice: The arm to choose; ``None`` where the runs do not say.
      decisive: Whether it is faster than every other by more than the noise.
      level: The arms that are as fast as the fastest, as far as anybody can tell.
      text: All of it in words.
    """

    choice: str | None
    decisive: bool
    level: tuple[str, ...]
    text: str


def judge(runs: Mapping[str, Sequence[RunFigures]], stand_ins: Mapping[str, str]) -> Verdict:
    """Compares the arms of one cohort.

    Args:
      runs: The runs of each arm, the arm with the fewest moving parts first.
      stand_ins: Arms that are not what their names say, and so cannot be chosen.
    """
    remarks = [_failures(arm, found) for arm, found in runs.items() if _failed(found)]
    sound = {a: found for a, found in runs.items() if a not in stand_ins and not _failed(found)}
    short = [_shortness(arm, run) for arm in sound for run in sound[arm] if _is_too_short(run)]
    speeds = {arm: rates for arm, found in sound.items() if (rates := speeds_of(found))}
    if short or not speeds:
        return Verdict(None, False, (), ' '.join(['No arm can be chosen.', *short[:1], *remarks]))
    fastest = max(speeds, key=lambda arm: mean(speeds[arm]).mean)
    if len(speeds) == 1:
        text = f'{fastest} is the only arm that can be chosen, so nothing is compared.'
        return Verdict(fastest, False, (fastest,), ' '.join([text, *remarks]))
    if len(speeds[fastest]) == 1:
        second = _second(speeds, fastest)
        quotient = ratio(speeds[fastest], speeds[second]).mean
        text = (
            f'{fastest} was the fastest, {quotient:.2f} times as fast as {second}, but one run of '
            'each cannot be told from noise: repeat them.'
        )
        return Verdict(None, False, (), ' '.join([text, *remarks]))
    over = {arm: ratio(speeds[fastest], speeds[arm]) for arm in speeds if arm != fastest}
    level = tuple(arm for arm in speeds if arm == fastest or not _above_one(over[arm]))
    if level == (fastest,):
        return Verdict(fastest, True, level, ' '.join([_wins(fastest, speeds, over), *remarks]))
    return Verdict(level[0], False, level, ' '.join([_noise(fastest, level, over), *remarks]))


def overall(verdicts: Mapping[str, Verdict]) -> str:
    """The verdicts of all cohorts in a sentence or two."""
    chosen: dict[str, list[str]] = {}
    for cohort, verdict in verdicts.items():
        if verdict.choice is not None and verdict.decisive:
            chosen.setdefault(verdict.choice, []).append(cohort)
    sentences = [
        f'Choose {arm} for {_cohorts(cohorts)}: there it is faster by more than the noise than '
        'all others that can be chosen.'
        for arm, cohorts in chosen.items()
    ]
    within = [c for c, v in verdicts.items() if v.choice and len(v.level) > 1]
    if within:
        sentences.append(f'For {_cohorts(within)} the fastest arms differ by no more than noise.')
    alone = [c for c, v in verdicts.items() if v.level == (v.choice,) and not v.decisive]
    if alone:
        sentences.append(
            f'For {_cohorts(alone)} one arm alone can be chosen, so nothing is compared.'
        )
    unknown = [cohort for cohort, verdict in verdicts.items() if verdict.choice is None]
    if unknown:
        sentences.append(f'For {_cohorts(unknown)} these runs give no choice.')
    return ' '.join(sentences)


def speeds_of(found: Sequence[RunFigures]) -> list[float]:
    """The throughput of each run; empty where one has none."""
    rates = [run.records_per_s for run in found if run.records_per_s is not None]
    return rates if len(rates) == len(found) else []


def times(estimate: Estimate) -> str:
    """A ratio in words."""
    if estimate.low is None or estimate.high is None:
        return f'{estimate.mean:.2f} times'
    return f'{estimate.mean:.2f} times (95 % interval {estimate.low:.2f} to {estimate.high:.2f})'


def _failed(found: Sequence[RunFigures]) -> int:
    return sum(run.failed for run in found)


def _is_too_short(run: RunFigures) -> bool:
    """Whether much of its work was done before its first answer, where its window begins."""
    return bool(run.latency_ms) and run.window_s * 1000 < _LEAST_WINDOW * run.latency_ms[0]


def _shortness(arm: str, run: RunFigures) -> str:
    return (
        f'All answers of a run of {arm} came within {run.window_s:.3f} s, and no request took '
        f'less than {run.latency_ms[0] / 1000:.3f} s: too few prompts to tell a speed.'
    )


def _failures(arm: str, found: Sequence[RunFigures]) -> str:
    records = sum(run.records for run in found)
    return (
        f'{arm} left {_failed(found)} of {records} prompts without an answer, so its speed does '
        'not count.'
    )


def _second(speeds: Mapping[str, Sequence[float]], fastest: str) -> str:
    others = [arm for arm in speeds if arm != fastest]
    return max(others, key=lambda arm: mean(speeds[arm]).mean)


def _above_one(estimate: Estimate) -> bool:
    return estimate.low is not None and estimate.low > 1


def _wins(fastest: str, speeds: Mapping[str, Sequence[float]], over: Mapping[str, Estimate]) -> str:
    second = _second(speeds, fastest)
    others = [
        f'{times(estimate)} as many as {arm}' for arm, estimate in over.items() if arm != second
    ]
    text = (
        f'Choose {fastest}: it answers {times(over[second])} as many prompts a second as {second}'
    )
    return ', '.join([text, *others]) + '.'


def _noise(fastest: str, level: Sequence[str], over: Mapping[str, Estimate]) -> str:
    close = [
        f'{fastest} answers {times(over[arm])} as many prompts a second as {arm}'
        for arm in level
        if arm != fastest
    ]
    behind = [arm for arm in over if arm not in level]
    text = (
        f'The difference between {" and ".join(level)} is within noise: {", ".join(close)}. '
        f'Choose {level[0]}, which has the fewest moving parts of them.'
    )
    if behind:
        slower = ', '.join(f'{arm} ({times(over[arm])})' for arm in behind)
        text += f' {fastest} is faster than {slower}.'
    return text


def _cohorts(names: Sequence[str]) -> str:
    return f'cohort{"s" if len(names) > 1 else ""} {", ".join(names)}'
