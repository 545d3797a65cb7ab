"""One of several SDK processes of a worker that share one server.

It is given bundles, one a line, on its standard input, and says what became of each on its
standard output, until there are no more.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

from benchmarks import _fault_pipeline
from benchmarks._fault_pipeline import RecordingHandler, Settings, progress

# Libraries may print too.
MARK = 'bundle: '


def main(settings_json: str) -> None:
    """Runs a pipeline over each bundle."""
    settings = Settings.from_json(settings_json)
    handler = RecordingHandler(settings)
    for line in sys.stdin:
        progress.begin()
        problem = _fault_pipeline.run(handler, json.loads(line), settings.max_tokens)
        said: dict[str, Any] = dataclasses.asdict(dataclasses.replace(progress, model=None))
        print(f'{MARK}{json.dumps(said | {"problem": problem})}', flush=True)
    _fault_pipeline.end()
