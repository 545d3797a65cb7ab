"""The pipeline that faults happen to, and what is noted while it runs.

A runner in the process fills the very objects of this module, which therefore is imported by
its own name.
"""

from __future__ import annotations

import dataclasses
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
from apache_beam_vllm_dynamo._runtime import Runtime
from benchmarks import _fault_injection
from tools.small_model import TOKENIZER_DIRECTORY

ROOT = Path(__file__).parents[1]
ENGINES = 4


@dataclasses.dataclass(frozen=True)
class Settings:
    """What one run does.

    Attributes:
      fault: A name of ``_fault_injection.FAULTS``.
      prompts: How many elements it has.
      max_tokens: How long each answer is.
      max_num_seqs: How many requests an engine runs at once.
      speedup: How much faster than a GPU the simulated engines count.
      directory: Where the run keeps its flags and its reports.
    """

    fault: str
    prompts: int
    max_tokens: int
    max_num_seqs: int
    speedup: float
    directory: str

    @classmethod
    def from_json(cls, text: str) -> Settings:
        """Those that :meth:`to_json` wrote down."""
        return cls(**json.loads(text))

    def to_json(self) -> str:
        """What another process can read."""
        return json.dumps(dataclasses.asdict(self))

    @property
    def report(self) -> Path:
        """Where the report of a run in one process is written."""
        return Path(self.directory) / 'report.json'

    @property
    def starts(self) -> Path:
        """Where each start of the engines leaves a line."""
        return Path(self.directory) / 'starts'

    @property
    def down(self) -> Path:
        """While this file is there, what depends on it does not start."""
        return Path(self.directory) / 'down'


@dataclasses.dataclass(frozen=True)
class Start:
    """One start of all engines, by the clock that all processes of a machine have in common.

    Attributes:
      pid: The process that owns them.
      began_s: When it began.
      ready_s: When all of them were routable.
    """

    pid: int
    began_s: float
    ready_s: float

    @property
    def took_s(self) -> float:
        """How long it took, in seconds."""
        return self.ready_s - self.began_s


def starts_of(settings: Settings) -> list[Start]:
    """All starts of a run so far, in the order in which they were over."""
    if not settings.starts.exists():
        return []
    return [Start(**json.loads(line)) for line in settings.starts.read_text().splitlines()]


@dataclasses.dataclass
class Progress:
    """What the process has seen so far.

    Attributes:
      model: What it has loaded, if it has.
      answered_at_ms: When each answer came, in milliseconds since 1970.
      slowest_request_s: The longest time from the first sending of a request to its outcome,
        with all that was sent again and waited for in between.
      came_out: The element of each result.
      failed: How many results are errors.
      first_error: The first one.
    """

    model: Any = None
    answered_at_ms: list[int] = dataclasses.field(default_factory=list)
    slowest_request_s: float = 0.0
    came_out: list[str] = dataclasses.field(default_factory=list)
    failed: int = 0
    first_error: str = ''

    def begin(self) -> None:
        """Forgets all but the model."""
        self.__init__(self.model)  # type: ignore[misc]  # the stages hold this very object


progress = Progress()


class RecordingHandler(VLLMCompletionsModelHandler):
    """The handler, with a note of each start and of when each answer came."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(
            os.fspath(TOKENIZER_DIRECTORY),
            use_dynamo=True,
            dynamo_runtime_config=config(settings),
            on_error='return',
        )
        self._settings = settings
        self._began_ms: float = 0.0

    def load_model(self) -> Any:
        """Shows the stack to the injector."""
        progress.model = super().load_model()
        return progress.model

    def _runtime(self) -> Runtime:
        """Notes each start, also one after the death of another process that had the engines."""
        runtime = super()._runtime()
        start = runtime.start

        def noted(hold_fds: Sequence[int] = ()) -> None:
            began_s = time.monotonic()
            start(hold_fds)
            note = dataclasses.asdict(Start(os.getpid(), began_s, time.monotonic()))
            with self._settings.starts.open('a') as file:
                file.write(json.dumps(note) + '\n')

        vars(runtime)['start'] = noted
        return runtime

    def run_inference(
        self, batch: Sequence[Any], model: Any, inference_args: dict[str, Any] | None = None
    ) -> list[PredictionResult]:
        """Notes when the batch began; one thread has one batch at a time."""
        self._began_ms = time.time() * 1000
        return super().run_inference(batch, model, inference_args)

    def record_outcomes(self, requests: Sequence[Any], outcomes: Sequence[Outcome]) -> None:
        """Notes when each answer came, and how long its request took."""
        progress.answered_at_ms += [outcome.completed_at_ms for outcome in outcomes]
        for outcome in outcomes:
            since_sent_s = (outcome.completed_at_ms - self._began_ms) / 1000 - outcome.queue_s
            progress.slowest_request_s = max(progress.slowest_request_s, since_sent_s)
        super().record_outcomes(requests, outcomes)


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


def _came_out(result: PredictionResult) -> None:
    progress.came_out.append(str(result.example))
    if isinstance(result.inference, InferenceError):
        progress.failed += 1
        progress.first_error = progress.first_error or str(result.inference)


def run(handler: RecordingHandler, prompts: Sequence[str], max_tokens: int) -> str:
    """Runs one pipeline over prompts; returns why it failed, or nothing."""
    try:
        with beam.Pipeline(options=PipelineOptions(['--runner=FnApiRunner'])) as pipeline:
            _ = (
                pipeline
                | beam.Create(prompts)
                | RunInference(
                    handler,
                    inference_args={'max_tokens': max_tokens},
                )
                | beam.Map(_came_out)
            )
    except Exception as error:  # noqa: BLE001 - faults are there to fail it
        return f'{type(error).__name__}: {error}'
    return ''


def end() -> None:
    """Ends all clients and servers of this process, which Beam keeps until it ends."""
    _clients.close_all()
    _model_server.close_all()


def start_in_background(injector: _fault_injection.Injector) -> None:
    """Lets a fault wait for its moment."""
    threading.Thread(target=injector.run, name='injector', daemon=True).start()
