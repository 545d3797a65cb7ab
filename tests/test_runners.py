"""One runtime for all SDK processes of a machine, under the runners that start several.

The worker pool is what Flink and Spark ask for workers beside the GPUs; here it is asked by
Beam's own runner and job service, which need no cluster.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import pathlib
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import apache_beam as beam
import pytest
from apache_beam.ml.inference.base import PredictionResult, RunInference
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.portability.api import beam_fn_api_pb2, beam_fn_api_pb2_grpc
from apache_beam.runners.portability.fn_api_runner import FnApiRunner
from apache_beam.runners.worker.channel_factory import GRPCChannelFactory
from apache_beam.testing.test_stream import TestStream
from apache_beam.transforms.environments import ExternalEnvironment

from apache_beam_vllm_dynamo import VLLMCompletionsModelHandler
from apache_beam_vllm_dynamo._marker import MARKER
from examples import vllm_text_completion
from tests.fake_server import FakeServer
from tests.support.processes import ROOT, ProcessTree, wait_until
from tests.support.stacks import MODEL, simulated
from tests.test_inference import on_server

pytestmark = pytest.mark.usefixtures('nothing_left')

PROMPTS = [f'prompt number {i}' for i in range(40)]
TWO_PROCESSES = PipelineOptions(['--direct_num_workers=2'])


def completions(**arguments: Any) -> VLLMCompletionsModelHandler:
    return VLLMCompletionsModelHandler(
        MODEL, use_dynamo=True, dynamo_runtime_config=simulated(2), **arguments
    )


class Pool:
    """A worker pool as it runs beside GPUs, on a port of its own."""

    def __init__(self, tree: ProcessTree, log: pathlib.Path) -> None:
        self._tree = tree
        self._log = log
        # The pool starts its workers as `python`.
        path = f'{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ["PATH"]}'
        with log.open('w') as file:
            self._process = subprocess.Popen(
                (
                    sys.executable, '-m', 'apache_beam.runners.worker.worker_pool_main',
                    '--service_port=0',
                ),
                cwd=ROOT, env={**os.environ, **tree.env, 'PATH': path}, stdout=file,
                stderr=subprocess.STDOUT,
                # What a shell has started in the background ignores it, and so would the pool.
                preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509 - it takes no lock
            )  # fmt: skip

    def address(self) -> str:
        """Where it listens, as soon as it does."""
        found: list[str] = wait_until(
            'the pool listens',
            lambda: re.findall(r'at port: (\S+) with', self._log.read_text()),
        )
        return found[0]

    def workers(self) -> list[str]:
        """The ids of the workers that it has started."""
        return re.findall(r'worker_id="(\w+)"', self._log.read_text())

    @property
    def tree(self) -> str:
        """The token of all that it starts."""
        return self._tree.env['TEST_PROCESS_TREE']

    def stop_workers(self) -> None:
        """Ends them as Flink does when a job is over, or is cancelled."""
        with GRPCChannelFactory.insecure_channel(self.address()) as channel:
            stub = beam_fn_api_pb2_grpc.BeamFnExternalWorkerPoolStub(channel)
            for worker in self.workers():
                stub.StopWorker(beam_fn_api_pb2.StopWorkerRequest(worker_id=worker), timeout=30)

    def wait_until_alone(self) -> None:
        """Of all that it has started nothing is left."""
        alone = {self._process.pid}
        wait_until('nothing but the pool is left', lambda: self._tree.pids() == alone)

    def close(self) -> None:
        self._process.send_signal(signal.SIGINT)
        self._process.wait(20)


@pytest.fixture(scope='module')
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    with ProcessTree() as tree:
        pool = Pool(tree, tmp_path_factory.mktemp('pool') / 'log')
        try:
            yield pool
        finally:
            pool.close()


@pytest.fixture
def multi_processing(monkeypatch: pytest.MonkeyPatch) -> Iterator[ProcessTree]:
    with ProcessTree() as tree:
        for name, value in tree.env.items():
            monkeypatch.setenv(name, value)
        yield tree
        monkeypatch.undo()
        wait_until('no worker is left', lambda: tree.pids() <= {os.getpid()})


def ask(runner: Any, options: PipelineOptions, directory: pathlib.Path) -> list[dict[str, Any]]:
    """What each answer says of the processes that had to do with it."""
    inference_args = {'max_tokens': 1, 'extra_body': {'nvext': {'extra_fields': ['worker_id']}}}
    with beam.Pipeline(runner=runner, options=options) as pipeline:
        _ = (
            pipeline
            | beam.Create(PROMPTS)
            | beam.Reshuffle()
            # Beam loads the model of each step for itself, in whichever process comes first.
            | 'first' >> RunInference(completions(max_batch_size=4), inference_args=inference_args)
            | 'prompts' >> beam.Map(lambda result: result.example)
            | 'second' >> RunInference(completions(max_batch_size=4), inference_args=inference_args)
            | beam.Map(witness)
            | beam.io.WriteToText(str(directory / 'answers'))
        )
    shards = directory.glob('answers-*')
    return [json.loads(line) for path in shards for line in path.read_text().splitlines()]


def witness(result: PredictionResult) -> str:
    """Called in the SDK process that asked, while the engines run."""
    response: Any = result.inference
    return json.dumps(
        {
            'prompt': result.example,
            'sdk_process': os.getpid(),
            'engine': json.dumps(response.nvext['worker_id'], sort_keys=True),
            'owners': sorted(owners(os.environ['TEST_PROCESS_TREE'])),
        }
    )


def owners(tree: str) -> set[int]:
    """The processes that own a server among those of a tree."""
    found = set()
    for path in pathlib.Path('/proc').glob('[0-9]*/environ'):
        with contextlib.suppress(OSError):
            environment = path.read_bytes()
            if f'TEST_PROCESS_TREE={tree}\0'.encode() in environment:
                found |= {
                    int(pid) for pid in re.findall(rf'{MARKER}=(\d+)\.'.encode(), environment)
                }
    return found


def check_one_runtime_for_two_processes(answers: list[dict[str, Any]]) -> None:
    assert sorted(answer['prompt'] for answer in answers) == sorted(PROMPTS)
    processes = {answer['sdk_process'] for answer in answers}
    assert len(processes) == 2
    assert os.getpid() not in processes
    # Whichever process asked and whenever, all servers belonged to the same one of the two.
    [[owner]] = {tuple(answer['owners']) for answer in answers}
    assert owner in processes
    assert len({answer['engine'] for answer in answers}) == 2
    for process in processes:
        assert {a['engine'] for a in answers if a['sdk_process'] == process}


def test_two_sdk_processes_of_the_direct_runner_are_served_by_one_runtime(
    multi_processing: ProcessTree, tmp_path: pathlib.Path
) -> None:
    """They end with the pipeline, and so do the servers."""
    options = PipelineOptions(['--direct_num_workers=2', '--direct_running_mode=multi_processing'])
    check_one_runtime_for_two_processes(ask(FnApiRunner(), options, tmp_path))


def test_two_workers_of_a_pool_are_served_by_one_runtime(
    pool: Pool, tmp_path: pathlib.Path
) -> None:
    """The pool lives on when the pipeline ends, and nothing else does."""
    runner = FnApiRunner(default_environment=ExternalEnvironment(pool.address()))
    check_one_runtime_for_two_processes(ask(runner, TWO_PROCESSES, tmp_path))
    pool.wait_until_alone()


def test_the_portable_runner_runs_the_example_on_a_worker_pool(
    pool: Pool, tmp_path: pathlib.Path
) -> None:
    """By a job service and a pool that are processes of their own, as with Flink and Spark."""
    with job_service(tmp_path / 'port') as endpoint:
        vllm_text_completion.main(
            [
                '--model', MODEL, '--use_dynamo', '--engine_kind', 'simulated',
                '--dynamo_engines', '2', '--max_tokens', '4', '--output', f'{tmp_path}/answers',
                '--runner=PortableRunner', f'--job_endpoint={endpoint}',
                '--environment_type=EXTERNAL', f'--environment_config={pool.address()}',
            ]
        )  # fmt: skip
    [path] = tmp_path.glob('answers-*')
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert sorted(row['prompt'] for row in rows) == sorted(vllm_text_completion.PROMPTS)
    assert [row['error'] for row in rows] == [None] * len(rows)
    pool.wait_until_alone()


def test_servers_end_when_a_pool_stops_its_workers_in_the_middle_of_a_job(
    pool: Pool, tmp_path: pathlib.Path
) -> None:
    """As Flink does: a signal ends the worker, which has no chance to end its servers itself."""
    with job_service(tmp_path / 'port') as endpoint, ProcessTree() as tree:
        launcher = subprocess.Popen(
            (
                sys.executable, '-m', 'examples.vllm_text_completion', '--model', MODEL,
                '--use_dynamo', '--engine_kind', 'simulated', '--dynamo_engines', '1',
                '--max_tokens', '6000',  # takes a minute
                '--output', f'{tmp_path}/answers',
                '--runner=PortableRunner', f'--job_endpoint={endpoint}',
                '--environment_type=EXTERNAL', f'--environment_config={pool.address()}',
            ),
            cwd=ROOT, env={**os.environ, **tree.env}, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            wait_until('the servers run', lambda: owners(pool.tree), timeout_s=60)
            pool.stop_workers()
            pool.wait_until_alone()
        finally:
            launcher.kill()
            launcher.wait()


@contextlib.contextmanager
def job_service(port_file: pathlib.Path) -> Iterator[str]:
    """The job service that comes with Beam, for pipelines of the portable runner."""
    with ProcessTree() as tree:
        service = subprocess.Popen(
            (
                sys.executable, '-m', 'apache_beam.runners.portability.local_job_service_main',
                f'--port_file={port_file}',
            ),
            cwd=ROOT, env={**os.environ, **tree.env}, stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            wait_until('the job service listens', port_file.exists)
            yield f'localhost:{port_file.read_text()}'
        finally:
            service.terminate()
            service.wait(20)


def test_a_batch_of_a_stream_waits_for_others_no_longer_than_it_may() -> None:
    """``max_batch_duration_secs`` collects elements over bundles, up to that time."""
    stream = (
        TestStream()
        # The timer that ends a batch is set by the clock on the wall.
        .advance_processing_time(int(time.time()))
        .add_elements(['a'])
        .add_elements(['b'])
        .advance_processing_time(1)
        .add_elements(['c'])
        .advance_processing_time(3600)
        .add_elements(['d', 'e'])
        .advance_watermark_to_infinity()
    )
    with FakeServer(latency_s=0.1) as server:
        handler = on_server(server, max_batch_duration_secs=60)
        options = PipelineOptions(['--runner=BundleBasedDirectRunner'])
        with beam.Pipeline(options=options) as pipeline:
            _ = pipeline | stream | RunInference(handler)
    assert sorted(server.prompts[:3]) == ['a', 'b', 'c']
    assert sorted(server.prompts[3:]) == ['d', 'e']
    # The elements of a batch are asked about at once, and batches one after the other.
    assert server.most_in_flight == 3


def test_every_flag_of_the_commands_on_the_page_exists(caplog: pytest.LogCaptureFixture) -> None:
    """Of the examples and of Beam, also for the runners that no test can run."""
    page = (ROOT / 'docs' / 'runners.md').read_text()
    blocks = re.findall(r'```sh\n(.*?)```', page, re.DOTALL)
    blocks = [block.replace('\\\n', ' ') for block in blocks]
    commands = [shlex.split(block) for block in blocks if 'python -m examples.' in block]
    assert len(commands) >= 7
    for python, option, module, *argv in commands:
        assert (python, option) == ('python', '-m')
        example = importlib.import_module(module)
        _, rest = example.make_parser().parse_known_args(argv)
        PipelineOptions(rest).get_all_options()
        assert 'unparseable' not in caplog.text
