"""The work of a comparison: the prompts of each cohort, and the runs of all arms over them."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import _prompt_file, prefix_reuse_dataset
from benchmarks._arms import ARMS, BLOCK_TOKENS, Settings
from benchmarks._reuse_ceiling import Reuse, ReuseCounter
from benchmarks._run_figures import LostRecordsError, RunFigures, figures_of
from benchmarks._summary import Cohort
from benchmarks._token_counts import TokenCounter, token_counter
from benchmarks.prefix_reuse_dataset import Parameters

ROOT = Path(__file__).resolve().parent.parent
_LOG_LINES = 20  # of a run that failed
_STOP_S = 30.0  # for a run that is given up to end
_TOGETHER = 64  # prompts whose tokens are in memory at a time


class RunFailedError(Exception):
    """A run ended without its figures; the text holds the end of its log."""


@dataclasses.dataclass(frozen=True)
class Run:
    """One run to be made.

    Attributes:
      arm: The name of the arm.
      cohort: The prompts.
      repeat: Which repeat, counted from 1.
    """

    arm: str
    cohort: Cohort
    repeat: int

    @property
    def name(self) -> str:
        """Its name in the names of files."""
        # That of the file of prompts, since two cohorts may differ in what no name of a file has.
        return f'{Path(self.cohort.path).stem}-{self.arm}-{self.repeat}'


@dataclasses.dataclass(frozen=True)
class Conditions:
    """What is equal in all runs.

    Attributes:
      settings: Of the engines and requests.
      labels: The words that an answer may be; empty if anything.
      directory: Where the runs keep their files.
      timeout_s: How long one run may take, in seconds.
    """

    settings: Settings
    labels: Sequence[str]
    directory: Path
    timeout_s: float


Runner = Callable[[Run, Conditions], RunFigures]


def schedule(arms: Sequence[str], cohorts: Sequence[Cohort], repeats: int) -> Iterator[Run]:
    """All runs in their order: the arms in alternation, another one first in each repeat.

    What drifts while they run, such as the temperature of a machine, then meets all arms alike.
    """
    for repeat in range(repeats):
        first = repeat % len(arms)
        for cohort in cohorts:
            for arm in (*arms[first:], *arms[:first]):
                yield Run(arm, cohort, repeat + 1)


def make_cohorts(
    parameters: Iterable[Parameters], directory: Path, block_tokens: int
) -> list[Cohort]:
    """Writes the prompts of each cohort."""
    cohorts = []
    for made in parameters:
        path = directory / f'{file_name(made.cohort)}.jsonl'
        manifest = prefix_reuse_dataset.write(made, path)
        counter = token_counter(made.model, made.model_revision)
        reuse = measure_reuse(path, counter, block_tokens)
        cohorts.append(Cohort(made.cohort, str(path), reuse, manifest))
    return cohorts


def split_input(
    pattern: str, names: Sequence[str], directory: Path, settings: Settings
) -> list[Cohort]:
    """Writes the user's own prompts, a file for each of the cohorts named.

    Raises:
      ValueError: The input cannot be used.
    """
    counter = token_counter(settings.model, settings.model_revision)
    paths = {name: directory / f'{i}-{file_name(name)}.jsonl' for i, name in enumerate(names)}
    with contextlib.ExitStack() as files:
        opened = {name: files.enter_context(path.open('w')) for name, path in paths.items()}
        for row in _prompt_file.prompts(pattern):
            if row['cohort'] in opened:
                opened[row['cohort']].write(json.dumps(row) + '\n')
    return [
        Cohort(
            name,
            str(path),
            measure_reuse(path, counter, BLOCK_TOKENS[settings.engine]),
            {
                'file': pattern,
                'bytes': path.stat().st_size,
                'sha256': hashlib.sha256(path.read_bytes()).hexdigest(),
                'tokens_counted_by': counter.counted_by,
            },
        )
        for name, path in paths.items()
    ]


def measure_reuse(path: Path, counter: TokenCounter, block_tokens: int) -> Reuse:
    """What the prompts of a file share."""
    reuse = ReuseCounter(block_tokens)
    texts = (row['prompt'] for row in _prompt_file.prompts(str(path)))
    while together := list(itertools.islice(texts, _TOGETHER)):
        reuse.look(counter.tokens(together))
    return reuse.found()


def run_arm(run: Run, conditions: Conditions) -> RunFigures:
    """Makes one run, in a process of its own that leaves no server behind.

    Raises:
      RunFailedError: It failed, took too long or lost records.
    """
    output = conditions.directory / run.name
    log = output.with_name(f'{run.name}.log')
    with log.open('wb') as file:
        process = subprocess.Popen(
            command(run, conditions, output),
            env=_environment(),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
        try:
            status = process.wait(conditions.timeout_s)
        except subprocess.TimeoutExpired:
            raise RunFailedError(
                f'{run.name} took more than {conditions.timeout_s:g} s; raise '
                f'--run_timeout_secs, or look what it waits for.{_tail(log)}'
            ) from None
        finally:
            _end(process)
    if status != 0:
        raise RunFailedError(f'{run.name} ended with exit status {status}.{_tail(log)}')
    manifest, rows = read_output(output)
    try:
        return figures_of(
            manifest,
            rows,
            cohort=run.cohort.name,
            repeat=run.repeat,
            # The stand-in is one engine by name, whatever the number of its ranks.
            engines=None if ARMS[run.arm].native else conditions.settings.num_gpus,
        )
    except LostRecordsError as error:
        raise RunFailedError(f'{error} See {log}.') from error


def command(run: Run, conditions: Conditions, output: Path) -> list[str]:
    """The command line of a run."""
    flags: Mapping[str, Any] = {
        'arm': run.arm,
        'input': run.cohort.path,
        'output': output,
        'run_id': run.repeat,
        'labels': ','.join(conditions.labels),
        **dataclasses.asdict(conditions.settings),
    }
    return [
        sys.executable,
        '-m',
        'benchmarks.vllm_dynamo_kv_benchmark',
        *(f'--{name}={value}' for name, value in flags.items() if value is not None),
        '--runner=FnApiRunner',
    ]


def read_output(output: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The manifest and the lines of a run."""
    manifest = json.loads(Path(f'{output}-manifest.json').read_text())
    shards = sorted(output.parent.glob(f'{output.name}-?????-of-?????.jsonl'))
    rows = [json.loads(line) for shard in shards for line in shard.read_text().splitlines()]
    return manifest, rows


def file_name(name: str) -> str:
    """A name of a cohort, fit for the name of a file."""
    return re.sub(r'[^\w.+-]', '_', name)[:60]


def _environment() -> dict[str, str]:
    """That of this process, with the benchmarks to be found from any directory."""
    paths = [str(ROOT), os.environ.get('PYTHONPATH')]
    return {**os.environ, 'PYTHONPATH': os.pathsep.join(filter(None, paths))}


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()  # what it started ends with it
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _tail(log: Path) -> str:
    lines = log.read_text(errors='replace').splitlines()[-_LOG_LINES:]
    return '\n'.join([f' The end of {log}:', *(f'  | {line}' for line in lines)])
