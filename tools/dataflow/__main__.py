"""Run one task on Dataflow, and check what came out: ``python -m tools.dataflow TASK …``.

    python -m tools.dataflow vllmDynamoKvTests --project P --region R \
        --temp_location gs://BUCKET/temp --sdk_container_image IMAGE

It rents a machine with GPUs for about a quarter of an hour. The exit status is 0 where every
prompt has an answer, no request failed and, where answers name their engine, every engine
answered. Other arguments go to the example, and so to the pipeline, such as ``--subnetwork``.

With ``--dry_run DIRECTORY`` nothing leaves this machine: the job is written into the directory.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.dataflow.tasks import (
    DRY_RUN_DIRECTORY,
    DRY_RUN_OPTIONS,
    JOB_FILE,
    TASKS,
    Job,
    Task,
    command,
)
from tools.dataflow.verify import engine_shares, find_problems

GCS_DIRECTORY = re.compile(r'gs://[a-z0-9][-_.a-z0-9]+[a-z0-9]/.+')


def main(argv: Sequence[str] | None = None) -> int:
    """Run the task that ``argv``, the arguments without the program's name, names."""
    parser = make_parser()
    args, options = parser.parse_known_args(argv)
    if '--runner' not in options and not GCS_DIRECTORY.fullmatch(args.temp_location):
        # Beam would make a bucket in its place.
        parser.error(
            f'--temp_location is {args.temp_location!r}; it must be a directory in a bucket, such '
            'as gs://BUCKET/temp'
        )
    task = TASKS[args.task]
    job = Job(
        name=args.job_name or f'{task.name.lower()}-{time.strftime("%Y%m%d-%H%M%S")}',
        project=args.project,
        region=args.region,
        temp_location=args.temp_location,
        sdk_container_image=args.sdk_container_image,
        options=tuple(options),
        right_fitting=args.right_fitting,
    )
    if args.dry_run is not None:
        return make_job(task, job, args.dry_run)
    return run(task, job)


def make_job(task: Task, job: Job, directory: Path) -> int:
    """Make the job and write it into ``directory``."""
    directory.mkdir(parents=True, exist_ok=True)
    env = {**os.environ, DRY_RUN_DIRECTORY: str(directory)}
    done = subprocess.run(command(task, job, *DRY_RUN_OPTIONS), env=env, check=False)
    if done.returncode == 0:
        print(f'{task.name}: the job is in {directory / JOB_FILE}')
    return done.returncode


def run(task: Task, job: Job) -> int:
    """Run the job to its end, and look at what it did."""
    with tempfile.TemporaryDirectory(prefix='dataflow-') as scratch:
        metrics_file = Path(scratch) / 'metrics.json'
        done = subprocess.run(
            command(task, job, '--metrics_output', str(metrics_file)), check=False
        )
        if done.returncode != 0:
            print(f'FAILED: the job {job.name} of {task.name} ended with {done.returncode}')
            return 1
        metrics = json.loads(metrics_file.read_text())
    return report(task, read_rows(job.output), metrics)


def report(task: Task, rows: Sequence[dict[str, Any]], metrics: dict[str, Any]) -> int:
    """Print what a job did and what is wrong with it; the exit status."""
    from examples.vllm_text_completion import PROMPTS

    print(json.dumps(metrics, indent=2, sort_keys=True))
    for engine, answers in sorted(engine_shares(rows).items()):
        print(f'engine {engine}: {answers} answers')
    problems = find_problems(rows, metrics, PROMPTS, task.engines)
    for problem in problems:
        print(f'FAILED: {problem}')
    print(f'{task.name}: {len(rows)} lines, {len(problems)} problems')
    return 1 if problems else 0


def read_rows(output: str) -> list[dict[str, Any]]:
    """The lines of all files whose names begin with ``output``, wherever Beam reads."""
    from apache_beam.io.filesystems import FileSystems

    [match] = FileSystems.match([f'{output}-*.jsonl'])
    rows = []
    for metadata in match.metadata_list:
        with FileSystems.open(metadata.path) as file:
            rows += [json.loads(line) for line in file.read().splitlines()]
    return rows


def make_parser() -> argparse.ArgumentParser:
    """The arguments of a task."""
    parser = argparse.ArgumentParser(
        prog='python -m tools.dataflow',
        description='Run the example on Dataflow, and check what came out.',
        epilog='All other arguments go to the example and its pipeline, such as --subnetwork.',
        allow_abbrev=False,
    )
    add = parser.add_argument
    add('task', choices=TASKS)
    for name in ('project', 'region', 'temp_location', 'sdk_container_image'):
        add(f'--{name}', required=True)
    add('--job_name', help='default: the task and the time')
    add('--right_fitting', action='store_true', help='GPUs for the step that asks alone')
    add('--dry_run', type=Path, metavar='DIRECTORY', help='make the job, and run it nowhere')
    return parser


if __name__ == '__main__':
    sys.exit(main())
