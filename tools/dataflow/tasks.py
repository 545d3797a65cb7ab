"""What each task runs on which machine; pure."""

from __future__ import annotations

import dataclasses
import json
import sys

EXAMPLE = 'examples.vllm_text_completion'
MODEL = 'Qwen/Qwen3-0.6B'
MAX_TOKENS = 8
DISK_GB = 75  # the image takes a third of it

# The newest series of drivers that Dataflow installs: CUDA 13 needs 580.
DRIVER = 'install-nvidia-driver:5xx'
# A dry run: the runner in place of Dataflow's, and where it writes what it makes. Beam's own switch
# for one ends before there is a job; it also keeps options from being checked against Cloud
# Storage, and is set for that.
DRY_RUN_OPTIONS = ('--runner', 'tools.dataflow.dry_run.DataflowRunner', '--dry_run', 'True')
DRY_RUN_DIRECTORY = 'DATAFLOW_DRY_RUN_DIRECTORY'  # an environment variable
JOB_FILE = 'job.json'

# A job that hangs must not rent GPUs for a day. A start takes about ten minutes.
MAX_RUNTIME_SECS = 5400


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """One way to serve, on one kind of machine.

    Attributes:
      name: As tox knows it.
      machine_type: The worker's machine.
      gpu_type: Its GPUs, as Dataflow names them.
      gpus: How many.
      arguments: What the example is told beside the model.
      engines: How many engines must have answered; 0 where answers do not name theirs.
    """

    name: str
    machine_type: str
    gpu_type: str
    gpus: int
    arguments: tuple[str, ...]
    engines: int = 0

    def accelerator(self, *, machine_type: bool = False) -> str:
        """The GPUs as Dataflow takes them, with the machine where a step alone has them."""
        machine = f'machine_type:{self.machine_type};' if machine_type else ''
        return f'type:{self.gpu_type};count:{self.gpus};{machine}{DRIVER}'


TASKS = {
    task.name: task
    for task in (
        Task(
            name='vllmDynamoKvTests',
            machine_type='g2-standard-24',
            gpu_type='nvidia-l4',
            gpus=2,
            arguments=(
                '--use_dynamo', '--dynamo_engines', '2', '--dynamo_router_mode', 'kv',
                '--dynamo_kv_event_mode', 'zmq', '--dynamo_name_engine',
            ),
            engines=2,
        ),
        Task(
            name='vllmNativeTests',
            machine_type='g2-standard-24',
            gpu_type='nvidia-l4',
            gpus=2,
            arguments=('--vllm_server_kwargs', json.dumps({'data-parallel-size': 2})),
        ),
        Task(
            name='vllmTests',
            machine_type='n1-standard-8',
            gpu_type='nvidia-tesla-t4',
            gpus=1,
            # A T4 has no bfloat16, and little memory for many sequences at once.
            arguments=(
                '--chat', '--vllm_max_num_seqs', '32',
                '--vllm_server_kwargs', json.dumps({'dtype': 'half'}),
            ),
        ),
    )
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """Where a task runs.

    Attributes:
      name: The job's name on Dataflow.
      project: The cloud project.
      region: The region of the workers.
      temp_location: A directory on Cloud Storage; the job's own is made in it.
      sdk_container_image: The image of the workers.
      options: Further arguments of the example, or options of the pipeline.
      right_fitting: Whether the step that asks the model alone gets GPUs, by a resource hint.
    """

    name: str
    project: str
    region: str
    temp_location: str
    sdk_container_image: str
    options: tuple[str, ...] = ()
    right_fitting: bool = False

    @property
    def output(self) -> str:
        """How the names of the answers' files begin."""
        return f'{self.temp_location.rstrip("/")}/{self.name}/answers'


def command(task: Task, job: Job, *more: str) -> tuple[str, ...]:
    """The command line that runs the example.

    Args:
      task: What it runs.
      job: Where.
      *more: Further arguments; the last of several that say the same thing counts, and those of
        the job's user come after these.
    """
    runner = ('--runner', 'DataflowRunner')
    return (
        sys.executable, '-m', EXAMPLE, *_arguments(task, job), *runner, *more, *job.options,
    )  # fmt: skip


def _arguments(task: Task, job: Job) -> tuple[str, ...]:
    gpus: tuple[str, ...]
    if job.right_fitting:
        # The two exclude each other.
        gpus = ('--accelerator', task.accelerator(machine_type=True))
    else:
        option = f'worker_accelerator={task.accelerator()}'
        gpus = ('--machine_type', task.machine_type, '--dataflow_service_options', option)
    runtime = f'max_workflow_runtime_walltime_seconds={MAX_RUNTIME_SECS}'
    return (
        '--model', MODEL,
        '--max_tokens', str(MAX_TOKENS),
        *task.arguments,
        '--output', job.output,
        '--project', job.project,
        '--region', job.region,
        '--job_name', job.name,
        '--temp_location', job.temp_location,
        '--sdk_container_image', job.sdk_container_image,
        *gpus,
        '--dataflow_service_options', runtime,
        '--disk_size_gb', str(DISK_GB),
        '--num_workers', '1',
        '--max_num_workers', '1',
        '--autoscaling_algorithm', 'NONE',
    )  # fmt: skip
