"""A job that a fault happens to, in a process of its own that may be killed.

:func:`main` writes what it saw to a file and leaves with everything ended, unless the process is
killed before.
"""

from __future__ import annotations

import json
import time
from typing import Any

from apache_beam_vllm_dynamo import _clients
from benchmarks import _fault_injection, _fault_pipeline, _fault_tally
from benchmarks._fault_pipeline import RecordingHandler, Settings, progress

INJECT_AT = 0.25  # of the prompts answered: the fault meets a stack in full swing


def main(settings_json: str) -> None:
    """Runs the pipeline, with the fault in its midst, and writes the report."""
    settings = Settings.from_json(settings_json)
    fault = _fault_injection.FAULTS[settings.fault]
    # What is held down for long must meet the job for as long as that.
    after = 0 if fault.held_down else INJECT_AT * settings.prompts
    injector = _fault_injection.Injector(
        settings.fault,
        settings.down,
        lambda: progress.model,
        lambda: progress.model is not None and len(progress.answered_at_ms) >= after,
    )
    _fault_pipeline.start_in_background(injector)
    prompts = _fault_tally.prompts_of(settings.prompts)
    started_s = time.monotonic()
    problem = _fault_pipeline.run(RecordingHandler(settings), prompts, settings.max_tokens)
    wall_s = time.monotonic() - started_s
    injector.finish()
    report: dict[str, Any] = {
        **vars(_fault_tally.compare(prompts, progress.came_out)),
        'failed': progress.failed,
        'first_error': progress.first_error,
        'problem': problem,
        'wall_s': wall_s,
        'start_s': [start.took_s for start in _fault_pipeline.starts_of(settings)],
        'longest_pause_s': _fault_tally.longest_pause_s(progress.answered_at_ms),
        'slowest_request_s': progress.slowest_request_s,
        'restarts_of_others': _fault_injection.restarts_of_others(progress.model, fault.victims),
        **injector.report(),
    }
    if fault.again and not report['amiss']:
        _clients.close_all()
        report |= _fault_injection.kill_in_turn(progress.model, fault.again)
    settings.report.write_text(json.dumps(report))
    _fault_pipeline.end()
