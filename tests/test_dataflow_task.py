"""The tasks on Dataflow: the job that each would run there, and what its results must show.

Nothing here needs a cloud project. The jobs are made by Beam's own runner for Dataflow, up to the
request that would start them; the check of the results is tried on a job that ran on simulated
engines.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from apache_beam.internal import cloudpickle_pickler
from apache_beam.portability import common_urns
from apache_beam.portability.api import beam_runner_api_pb2

from apache_beam_vllm_dynamo import ConfigurationError
from examples import vllm_text_completion
from examples.vllm_text_completion import PROMPTS
from tests.support.processes import ROOT, ProcessTree
from tests.support.stacks import MODEL
from tools.dataflow.tasks import TASKS
from tools.dataflow.verify import engine_shares, find_problems

IMAGE = 'us-docker.pkg.dev/project/images/worker:1'
CLOUD = (
    '--project', 'my-project', '--region', 'us-central1', '--temp_location', 'gs://bucket/temp',
    '--sdk_container_image', IMAGE, '--job_name', 'the-job',
)  # fmt: skip
RUN_TIMEOUT_S = 90.0  # five seconds each on an idle machine

TWO_L4 = 'type:nvidia-l4;count:2;install-nvidia-driver:5xx'
ONE_T4 = 'type:nvidia-tesla-t4;count:1;install-nvidia-driver:5xx'


def run(*argv: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        (sys.executable, '-m', 'tools.dataflow', *argv),
        cwd=ROOT,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_S,
        check=False,
    )


def made_by(directory: Path, *argv: str) -> tuple[dict[str, Any], beam_runner_api_pb2.Pipeline]:
    """The job and the pipeline of a dry run."""
    done = run(*argv, *CLOUD, '--dry_run', str(directory))
    assert done.returncode == 0, done.stderr
    job: dict[str, Any] = json.loads((directory / 'job.json').read_text())
    pipeline = beam_runner_api_pb2.Pipeline.FromString((directory / 'pipeline.pb').read_bytes())
    return job, pipeline


def handler_in(pipeline: beam_runner_api_pb2.Pipeline) -> Any:
    """The model handler, as a worker gets it."""
    [payload] = [
        beam_runner_api_pb2.ParDoPayload.FromString(transform.spec.payload)
        for transform in pipeline.components.transforms.values()
        if transform.unique_name == 'Ask/BeamML_RunInference'
    ]
    function = cloudpickle_pickler.loads(payload.do_fn.payload)[0]
    return function._model_handler._unkeyed


def accelerators(pipeline: beam_runner_api_pb2.Pipeline) -> dict[str, str]:
    """What each environment asks for, by its id."""
    urn = common_urns.resource_hints.ACCELERATOR.urn
    return {
        name: environment.resource_hints[urn].decode()
        for name, environment in pipeline.components.environments.items()
        if urn in environment.resource_hints
    }


@pytest.mark.parametrize(
    ('task', 'machine', 'gpus', 'handler'),
    [
        (
            'vllmDynamoKvTests', 'g2-standard-24', TWO_L4,
            "VLLMCompletionsModelHandler('Qwen/Qwen3-0.6B', Dynamo, 2 engines, kv)",
        ),
        (
            'vllmNativeTests', 'g2-standard-24', TWO_L4,
            "VLLMCompletionsModelHandler('Qwen/Qwen3-0.6B', native vLLM)",
        ),
        (
            'vllmTests', 'n1-standard-8', ONE_T4,
            "VLLMChatModelHandler('Qwen/Qwen3-0.6B', native vLLM)",
        ),
    ],
)  # fmt: skip
def test_a_dry_run_makes_the_whole_job(
    tmp_path: Path, task: str, machine: str, gpus: str, handler: str
) -> None:
    """One worker of that machine with those GPUs, that image, and that handler in the pipeline."""
    job, pipeline = made_by(tmp_path, task)
    assert (job['name'], job['type']) == ('the-job', 'JOB_TYPE_BATCH')
    environment = job['environment']
    [pool] = environment['workerPools']
    sdk = pool.pop('sdkHarnessContainerImages')
    assert [image['containerImage'] for image in sdk] == [IMAGE]
    packages = pool.pop('packages')
    for package in packages:
        assert package['location'].startswith('storage.googleapis.com/bucket/temp/the-job.')
        assert (tmp_path / package['name']).exists()
    assert pool == {
        'kind': 'harness',
        'numWorkers': 1,
        'autoscalingSettings': {'algorithm': 'AUTOSCALING_ALGORITHM_NONE', 'maxNumWorkers': 1},
        'machineType': machine,
        'diskSizeGb': 75,
        'workerHarnessContainerImage': IMAGE,
        'taskrunnerSettings': {
            'parallelWorkerSettings': {
                'baseUrl': 'https://dataflow.googleapis.com',
                'servicePath': 'https://dataflow.googleapis.com',
            }
        },
    }
    assert environment['serviceOptions'] == [
        f'worker_accelerator={gpus}',
        'max_workflow_runtime_walltime_seconds=5400',
    ]
    assert 'use_runner_v2' in environment['experiments']
    options = environment['sdkPipelineOptions']['options']
    assert options['runner'] == 'DataflowRunner'
    assert (options['project'], options['region']) == ('my-project', 'us-central1')
    assert options['pipelineUrl'].startswith('gs://bucket/temp/the-job.')
    assert not options['no_auth']
    assert not options['dry_run']

    assert repr(handler_in(pipeline)) == handler
    assert accelerators(pipeline) == {}
    names = {transform.unique_name for transform in pipeline.components.transforms.values()}
    assert {'Read', 'SkipBlank', 'Prompt', 'Ask', 'Record', 'Encode', 'Write'} <= names


def test_with_right_fitting_the_step_that_asks_alone_gets_gpus(tmp_path: Path) -> None:
    """Its accelerator is a hint of that step; the whole worker pool has neither GPU nor machine."""
    job, pipeline = made_by(tmp_path, 'vllmDynamoKvTests', '--right_fitting')
    [pool] = job['environment']['workerPools']
    assert 'machineType' not in pool
    assert not [o for o in job['environment']['serviceOptions'] if 'accelerator' in o]
    [(environment, hint)] = accelerators(pipeline).items()
    assert hint == ('type:nvidia-l4;count:2;machine_type:g2-standard-24;install-nvidia-driver:5xx')
    with_gpus = {
        transform.unique_name
        for transform in pipeline.components.transforms.values()
        if transform.environment_id == environment
    }
    assert with_gpus
    assert all(name.startswith('Ask') for name in with_gpus)


def test_each_task_serves_in_a_way_of_its_own() -> None:
    """The handler's config, as the example makes it of the task's arguments."""
    parser = vllm_text_completion.make_parser()
    common = ['--model', 'Qwen/Qwen3-0.6B', '--output', 'o']
    args = parser.parse_args([*common, *TASKS['vllmDynamoKvTests'].arguments])
    config = vllm_text_completion.make_config(args, {})
    assert [spec.gpu_devices for spec in config.listed_engines] == [('0',), ('1',)]
    assert (config.router_mode, config.kv_event_mode) == ('kv', 'zmq')
    native = parser.parse_args([*common, *TASKS['vllmNativeTests'].arguments])
    handler = vllm_text_completion.make_handler(native)
    assert handler._native_server.vllm_server_kwargs == {'data-parallel-size': 2}
    t4 = parser.parse_args([*common, *TASKS['vllmTests'].arguments])
    handler = vllm_text_completion.make_handler(t4)
    kwargs = handler._native_server.vllm_server_kwargs
    assert kwargs == {'max-num-seqs': 32, 'dtype': 'half'}


def test_a_task_without_its_cloud_says_what_is_missing() -> None:
    done = run('vllmDynamoKvTests', '--project', 'p')
    assert done.returncode == 2
    assert '--temp_location' in done.stderr
    assert '--sdk_container_image' in done.stderr


def test_a_directory_that_is_in_no_bucket_is_refused_at_once() -> None:
    """Beam would make a bucket in its place, or wait minutes for one."""
    done = run('vllmDynamoKvTests', *CLOUD, '--temp_location', 'gs://bucket')
    assert done.returncode == 2
    assert "--temp_location is 'gs://bucket'" in done.stderr


@pytest.fixture
def tree() -> Iterator[ProcessTree]:
    with ProcessTree() as processes:
        yield processes
        processes.wait_until_gone()


def on_simulated_engines(
    tree: ProcessTree, directory: Path, *more: str
) -> subprocess.CompletedProcess[str]:
    """A whole task, its job being run here in place of Dataflow."""
    here = ('--temp_location', str(directory), '--runner', 'FnApiRunner', '--model', MODEL)
    return run(
        'vllmDynamoKvTests', *CLOUD, *here, '--engine_kind', 'simulated', *more, env=tree.env
    )


def test_a_task_passes_when_both_engines_answered(tree: ProcessTree, tmp_path: Path) -> None:
    """It reads the job's metrics and its output, and says what each engine did."""
    done = on_simulated_engines(tree, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f'vllmDynamoKvTests: {len(PROMPTS)} lines, 0 problems' in done.stdout
    shares = [int(line.split()[2]) for line in done.stdout.splitlines() if ' answers' in line]
    assert len(shares) == 2
    assert sum(shares) == len(PROMPTS)
    assert f'"num_inferences": {len(PROMPTS)}' in done.stdout


def test_a_task_fails_when_one_engine_did_all_the_work(tree: ProcessTree, tmp_path: Path) -> None:
    done = on_simulated_engines(tree, tmp_path, '--dynamo_engines', '1')
    assert done.returncode == 1, done.stdout + done.stderr
    assert 'FAILED: 1 of 2 engines answered' in done.stdout


def test_a_task_fails_when_its_job_fails(tree: ProcessTree, tmp_path: Path) -> None:
    done = on_simulated_engines(tree, tmp_path, '--dynamo_engines', '0')
    assert done.returncode == 1
    assert 'FAILED: the job the-job of vllmDynamoKvTests ended with 2' in done.stdout


def good_rows() -> list[dict[str, Any]]:
    return [
        {'prompt': prompt, 'completion': 'x', 'completion_tokens': 8, 'error': None, 'engine': e}
        for prompt, e in zip('abcd', '1122', strict=True)
    ]


def test_results_without_a_fault_have_no_problem() -> None:
    rows = good_rows()
    assert find_problems(rows, {'num_inferences': 4}, 'abcd', 2) == []
    assert engine_shares(rows) == {'1': 2, '2': 2}
    nameless = [{k: v for k, v in row.items() if k != 'engine'} for row in rows]
    assert find_problems(nameless, {'num_inferences': 4}, 'abcd', 0) == []


@pytest.mark.parametrize(
    ('change', 'metrics', 'problem'),
    [
        (lambda rows: rows.pop(), {}, "no line for the prompt 'd'"),
        (lambda rows: rows.append(rows[0]), {}, "a line too many for 'a'"),
        (lambda rows: rows[0].update(error='overloaded'), {}, "'a' failed: overloaded"),
        (lambda rows: rows[0].update(completion=''), {}, "'a' has an empty answer"),
        (lambda rows: rows[0].update(completion_tokens=0), {}, "'a' has an empty answer"),
        (lambda _: None, {'failed_overloaded': 1}, 'the job counted 1 failed_overloaded'),
        (lambda _: None, {'num_inferences': 3}, 'the job counted 3 inferences, not 4'),
        (
            lambda rows: [row.update(engine='1') for row in rows],
            {},
            "1 of 2 engines answered: {'1': 4}",
        ),
    ],
)
def test_each_fault_of_the_results_is_a_problem(
    change: Any, metrics: dict[str, int], problem: str
) -> None:
    rows = good_rows()
    change(rows)
    assert find_problems(rows, {'num_inferences': 4} | metrics, 'abcd', 2) == [problem]


def test_tox_runs_each_task_when_it_is_asked_for_and_never_else() -> None:
    def tox(*argv: str) -> str:
        command = (sys.executable, '-m', 'tox', *argv, '-c', str(ROOT / 'tox.ini'))
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    by_default = tox('list', '-d', '--no-desc').split()
    assert set(by_default) >= {'lint', 'type', 'test'}
    assert not set(TASKS) & set(by_default)
    for task in TASKS:
        shown = tox('config', '-e', task, '-k', 'commands', 'deps')
        assert f'python -m tools.dataflow {task}' in shown
        assert 'apache-beam[gcp]==2.77.0' in shown


def test_further_flags_of_the_server_are_a_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    parser = vllm_text_completion.make_parser()
    common = ['--model', 'm', '--output', 'o']
    for wrong in ('[1]', '{'):
        with pytest.raises(SystemExit):
            parser.parse_args([*common, '--vllm_server_kwargs', wrong])
        assert '--vllm_server_kwargs' in capsys.readouterr().err
    args = parser.parse_args([*common, '--dynamo_name_engine'])
    with pytest.raises(ConfigurationError, match='--dynamo_name_engine needs --use_dynamo'):
        vllm_text_completion.make_handler(args)
