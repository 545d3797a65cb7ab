"""What the results of a task must show; pure."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]


def find_problems(
    rows: Sequence[Row], metrics: Mapping[str, Any], prompts: Iterable[str], engines: int
) -> list[str]:
    """What is wrong with a job's output and metrics, a line each; empty where nothing is.

    Args:
      rows: The lines of its output.
      metrics: What it counted, by name.
      prompts: What it was asked.
      engines: How many engines must have answered; 0 where answers do not name theirs.
    """
    problems = []
    asked, answered = collections.Counter(prompts), collections.Counter(map(_prompt, rows))
    problems += [f'no line for the prompt {prompt!r}' for prompt in asked - answered]
    problems += [f'a line too many for {prompt!r}' for prompt in answered - asked]
    for row in rows:
        if row.get('error') is not None:
            problems.append(f'{_prompt(row)!r} failed: {row["error"]}')
        elif not row.get('completion') or not row.get('completion_tokens'):
            problems.append(f'{_prompt(row)!r} has an empty answer')
    problems += [
        f'the job counted {number} {name}'
        for name, number in metrics.items()
        if name.startswith('failed_') and number
    ]
    counted = metrics.get('num_inferences', 0)
    if counted != asked.total():
        problems.append(f'the job counted {counted} inferences, not {asked.total()}')
    shares = engine_shares(rows)
    if len(shares) < engines:
        problems.append(f'{len(shares)} of {engines} engines answered: {dict(shares)}')
    return problems


def engine_shares(rows: Iterable[Row]) -> collections.Counter[str]:
    """How many answers each engine wrote, by the number that Dynamo gave it."""
    return collections.Counter(row['engine'] for row in rows if row.get('engine'))


def _prompt(row: Row) -> str:
    return str(row.get('prompt', row.get('line')))
