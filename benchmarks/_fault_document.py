"""The report of all faults, on disk after each step, so that nothing that was measured is lost."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import _fault_kills
from benchmarks._fault_injection import FAULTS


class Document:
    """The report.

    Args:
      path: Where it is written.
      sizes: What was run; reports of different sizes are not put together.
      merge: Whether to add to what the file holds. A case that is run again takes the place
        of its earlier run; base runs and kills of owners add up.

    Raises:
      ValueError: The file holds runs of other sizes.
    """

    def __init__(self, path: Path, sizes: Mapping[str, Any], *, merge: bool) -> None:
        self._path = path
        self.content: dict[str, Any] = {
            'sizes': dict(sizes), 'cases': [], 'owner_kills': None, 'base_runs': [], 'base': {},
        }  # fmt: skip
        if merge and path.exists():
            self.content = json.loads(path.read_text())
            if self.content['sizes'] != dict(sizes):
                raise ValueError(f'{path} holds runs of other sizes: {self.content["sizes"]}')

    def add(self, run: dict[str, Any]) -> dict[str, Any]:
        """Adds a run with or without a fault, and gives it back with what follows from all."""
        cases = self.content['cases']
        if run['name'] == FAULTS[run['name']].base:
            self.content['base_runs'].append(run)
        else:
            cases[:] = [case for case in cases if case['name'] != run['name']] + [run]
            cases.sort(key=lambda case: list(FAULTS).index(case['name']))
        self.content['base'] = base_of(self.content['base_runs'])
        for case in cases:
            base = self.content['base'].get(case['base'])
            comparable = base is not None and case['max_tokens'] == base['max_tokens']
            # A job that fails half-way is not quick.
            comparable = comparable and FAULTS[case['name']].survivable
            if comparable and case['wall_s'] is not None:
                case['wall_ratio'] = case['wall_s'] / base['wall_s']
        self.write()
        return run

    def add_kill(self, name: str, amiss: str) -> None:
        """Adds the kill of an owner."""
        self.content[name] = _fault_kills.add(self.content.get(name), amiss)
        self.write()

    def write(self) -> None:
        """Writes it as it is now."""
        self._path.write_text(json.dumps(self.content, indent=2) + '\n')


def base_of(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """What runs without a fault take, by the median, with the spread."""
    found = {}
    for name in dict.fromkeys(run['name'] for run in runs):
        whole = [run for run in runs if run['name'] == name and not run['error']]
        walls = [run['wall_s'] for run in whole]
        if walls:
            found[name] = {
                'runs': len(walls),
                'max_tokens': whole[0]['max_tokens'],
                'wall_s': statistics.median(walls),
                'wall_s_range': [min(walls), max(walls)],
                'start_s': statistics.median(run['start_s'][0] for run in whole),
                'longest_pause_s': statistics.median(run['longest_pause_s'] for run in whole),
                'slowest_request_s': statistics.median(run['slowest_request_s'] for run in whole),
            }
    return found
