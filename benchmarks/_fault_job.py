"""The pipeline that a fault happens to, for a process of its own, so that it can be killed.

:func:`main` writes what it saw to a file and leaves with everything ended, unless the process is
killed before. It is called by this module's own name, so that a runner in the process fills the
very objects that the injector looks at.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import apache_beam as beam
from apache_beam.ml.inference.base import PredictionResult, RunInference
from apache_beam.options.pipeline_options import PipelineOptions

from apache_beam_vllm_dynamo import (
    DynamoRuntimeConfig,
    InferenceError,
    VLLMCompletionsModelHandler,
    _clients,
    _model_server,
)
from apache_beam_vllm_dynamo._responses import Outcome
from benchmarks import _fault_injection
from tools.small_model import TOKENIZER_DIRECTORY

ENGINES = 4
INJECT_AT = 0.25  # of the prompts answered: the fault meets a stack in full swing


@dataclasses.dataclass(frozen=True)
class Settings:
    """What one run does.

    Attributes:
      fault: A name of ``_fault_injection.FAULTS``, or ``'none'``.
      prompts: How many elements the pipeline has.
      max_tokens: How long each answer is.
      max_num_seqs: How many requests an engine runs at once.
      speedup: How much faster than a GPU the simulated engines count.
      directory: Where the run keeps its flags and its report.
      seed: Keeps the prompts of runs apart.
    """

    fault: str
    prompts: int
    max_tokens: int
    max_num_seqs: int
    speedup: float
    directory: str
    seed: int = 0

    @property
    def report(self) -> Path:
        """Where the report is written."""
        return Path(self.directory) / 'report.json'

    @property
    def progress(self) -> Path:
        """Where it says how many prompts are answered."""
        return Path(self.directory) / 'progress'

    @property
    def down(self) -> Path:
        """While this file is there, what depends on it does not start."""
        return Path(self.directory) / 'down'


class Progress:
    """What the run has seen so far; a runner in this process fills this very object."""

    def __init__(self) -> None:
        self.settings: Settings | None = None
        self.model: Any = None
        self.ready_at_s = 0.0
        self.answered_at_ms: list[int] = []
        self.results = 0
        self.failed = 0
        self.first_error = ''


progress = Progress()


class RecordingHandler(VLLMCompletionsModelHandler):
    """The handler, with a note of when each answer came."""

    def load_model(self) -> Any:
        """Starts the stack and shows it to the injector."""
        progress.model = super().load_model()
        progress.ready_at_s = time.monotonic()
        return progress.model

    def record_outcomes(self, requests: Sequence[Any], outcomes: Sequence[Outcome]) -> None:
        """Notes when each answer came."""
        progress.answered_at_ms += [outcome.completed_at_ms for outcome in outcomes]
        assert progress.settings is not None
        progress.settings.progress.write_text(str(len(progress.answered_at_ms)))
        super().record_outcomes(requests, outcomes)


def count(result: PredictionResult) -> None:
    """Counts what came out."""
    progress.results += 1
    if isinstance(result.inference, InferenceError):
        progress.failed += 1
        progress.first_error = progress.first_error or str(result.inference)


def config(settings: Settings) -> DynamoRuntimeConfig:
    """Four simulated engines, with whatever the fault needs in place."""
    return DynamoRuntimeConfig.for_devices(
        num_engines=ENGINES,
        engine_kind='simulated',
        vllm_server_kwargs={'max-num-seqs': settings.max_num_seqs},
        simulation_kwargs={'speedup-ratio': settings.speedup},
        start_timeout_secs=120,
        **_fault_injection.config_fields(settings.fault, settings.down),
    )


def main(settings_json: str) -> None:
    """Runs the pipeline, with the fault in its midst, and writes the report."""
    settings = progress.settings = Settings(**json.loads(settings_json))
    handler = RecordingHandler(
        os.fspath(TOKENIZER_DIRECTORY),
        use_dynamo=True,
        dynamo_runtime_config=config(settings),
        on_error='return',
    )
    injector = _fault_injection.Injector(
        settings.fault,
        settings.down,
        lambda: progress.model,
        lambda: len(progress.answered_at_ms) >= INJECT_AT * settings.prompts,
    )
    threading.Thread(target=injector.run, name='injector', daemon=True).start()
    prompts = [f'{settings.seed} {i}: what does it cost?' for i in range(settings.prompts)]
    problem = ''
    started = time.monotonic()
    try:
        with beam.Pipeline(options=PipelineOptions(['--runner=FnApiRunner'])) as pipeline:
            _ = (
                pipeline
                | beam.Create(prompts)
                | RunInference(handler, inference_args={'max_tokens': settings.max_tokens})
                | beam.Map(count)
            )
    except Exception as error:  # noqa: BLE001 - one of the faults is there to fail the job
        problem = str(error)
    ended = time.monotonic()
    injector.finish()
    stamps = sorted(progress.answered_at_ms)
    pauses = [(later - sooner) / 1000 for sooner, later in itertools.pairwise(stamps)]
    report = {
        'elements_in': settings.prompts,
        'elements_out': progress.results,
        'failed': progress.failed,
        'first_error': progress.first_error,
        'problem': problem,
        'wall_s': ended - started,
        'ready_at_s': progress.ready_at_s,
        'serving_s': (stamps[-1] - stamps[0]) / 1000 if stamps else None,
        'longest_pause_s': max(pauses, default=None),
        **injector.report(),
    }
    settings.report.write_text(json.dumps(report))
    _clients.close_all()
    _model_server.close_all()
