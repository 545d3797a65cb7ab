"""All arms over all cohorts, and one report that says which to choose.

Run as::

    python -m benchmarks.compare --engine simulated --num_engines 4 --cohorts 0,25,75,95 \
        --repeats 3 --out DIRECTORY

It makes the prompts of each cohort (``prefix_reuse_dataset``), or takes those of ``--input``, runs
the arms over them in alternation (``vllm_dynamo_kv_benchmark``), each run in a process of its own
with fresh engines, and writes ``report.json``, ``report.md`` and ``report.html`` with plots. The
reports appear when every run is done, or not at all; what the runs answered stays beside them.

A cohort is the reuse in per cent; with ``--input``, the name that its lines give, or all of them.
By default the KV cache of a simulated or CPU engine is so large that the documents of the families
fit into all caches together and not into one. That of a GPU is as large as its memory allows;
vLLM logs it at its start, and the report says how large the documents are.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime as dt
import functools
import json
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks import _document, _plots, _prompt_file, _report_page
from benchmarks._arms import ARMS, BLOCK_TOKENS, Settings, make_handler, stand_in
from benchmarks._compare_options import find_cohorts, make_parser, make_settings
from benchmarks._comparison import (
    ROOT,
    Conditions,
    RunFailedError,
    Runner,
    make_cohorts,
    run_arm,
    schedule,
    split_input,
)
from benchmarks._run_figures import RunFigures
from benchmarks._summary import Cohort, summarize
from benchmarks.prefix_reuse_dataset import Parameters
from benchmarks.vllm_dynamo_kv_benchmark import versions

REPORTS = ('report.json', 'report.md', 'report.html')
DATA, RUNS = 'data', 'runs'
MARK = '.of-a-comparison'  # in DATA and RUNS; whatever has none may be somebody's own
INTERRUPTED = 130  # as a shell has it for Ctrl-C


def main(arguments: Sequence[str] | None = None, runner: Runner = run_arm) -> int:
    """Measures and reports; 1 if any prompt has no answer, 2 if there is no report."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = make_parser()
    options = parser.parse_args(given)
    began = time.monotonic()
    console = Console(stderr=True)
    try:
        settings = make_settings(options)
        cohorts = find_cohorts(options, settings)
        _check_directory(options.out, options.input)
        for arm in options.arms:
            make_handler(ARMS[arm], settings)
    except ValueError as error:  # which a ConfigurationError is, too
        parser.error(str(error))
    say = functools.partial(console.print, markup=False, highlight=False, soft_wrap=True)
    try:
        with _interrupted_by_sigterm():
            made = _make_data(options, settings, cohorts)
            runs = _run_all(options, settings, made, runner, console)
    except (RunFailedError, OSError, ValueError) as error:
        say(f'compare: {error}\ncompare: no report was written')
        return 2
    except KeyboardInterrupt:
        say('compare: interrupted; no report was written')
        return INTERRUPTED
    facts = {
        'engine': options.engine,
        'repeats': options.repeats,
        'price_per_hour': options.price_per_hour,
        'command': shlex.join(['python', '-m', 'benchmarks.compare', *given]),
        'date': dt.datetime.now(dt.UTC).isoformat(timespec='seconds'),
        'took_s': round(time.monotonic() - began, 1),
        'settings': dataclasses.asdict(settings),
        'versions': versions(),
        'machine': _machine(),
    }
    names = [name for name in ARMS if name in options.arms]
    notes = {arm: note for arm in names if (note := stand_in(ARMS[arm], settings))}
    report = summarize(
        made, runs, arms={n: ARMS[n].meaning for n in names}, stand_ins=notes, facts=facts
    )
    write_reports(report, options.out)
    for cohort in report['cohorts']:
        say(f'cohort {cohort["cohort"]}: {cohort["verdict"]["text"]}')
    say(f'{report["verdict"]}\n{options.out / "report.html"}')
    return 1 if any(run.failed for run in runs) else 0


def write_reports(report: Mapping[str, Any], directory: Path) -> None:
    """Writes all three reports, or none."""
    page = _report_page.page(report)
    texts = {
        'report.json': json.dumps(report, indent=1) + '\n',
        'report.md': _document.to_markdown(page),
        'report.html': _document.to_html(page, _plots.draw(report)),
    }
    with tempfile.TemporaryDirectory(dir=directory, prefix='.report-') as scratch:
        for name, text in texts.items():
            (Path(scratch) / name).write_text(text, encoding='utf-8')
        for name in texts:
            (Path(scratch) / name).replace(directory / name)


@contextlib.contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    """Makes SIGTERM an interruption as Ctrl-C is, so that no run outlives the comparison."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _check_directory(directory: Path, pattern: str | None) -> None:
    """Whether a directory is there for reports alone.

    Raises:
      ValueError: It is a file, has other things in it, or has the input of ``pattern`` in it.
    """
    if not directory.exists():
        return
    if not directory.is_dir():
        raise ValueError(f'--out is {directory}, which is no directory.')
    found = {path.name for path in directory.iterdir()}
    others = found - {*REPORTS, DATA, RUNS}
    others |= {name for name in (DATA, RUNS) if name in found and not _is_ours(directory / name)}
    if others:
        raise ValueError(
            f'--out is {directory}, where {min(others)} lies already; name an empty directory, or '
            'that of an earlier comparison.'
        )
    # What an earlier comparison has left will be deleted, and that is what is to be read.
    for path in [] if pattern is None else _prompt_file.find(pattern):
        if '://' not in path and Path(path).resolve().is_relative_to(directory.resolve()):
            raise ValueError(
                f'--input is {path}, which lies in --out {directory}; name another directory, '
                'for that one is emptied first.'
            )


def _is_ours(directory: Path) -> bool:
    """Whether nothing is lost with a directory: a comparison made it, or it is empty."""
    return (directory / MARK).exists() or (directory.is_dir() and not any(directory.iterdir()))


def _make_data(
    options: argparse.Namespace, settings: Settings, cohorts: Sequence[Parameters] | Sequence[str]
) -> list[Cohort]:
    """Writes the prompts, in place of whatever an earlier comparison has left."""
    for name in (*REPORTS, DATA, RUNS):
        path = options.out / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    for name in (DATA, RUNS):
        (options.out / name).mkdir(parents=True)
        (options.out / name / MARK).touch()
    names = [cohort for cohort in cohorts if isinstance(cohort, str)]
    if names:
        return split_input(options.input, names, options.out / DATA, settings)
    parameters = [cohort for cohort in cohorts if isinstance(cohort, Parameters)]
    return make_cohorts(parameters, options.out / DATA, BLOCK_TOKENS[settings.engine])


def _run_all(
    options: argparse.Namespace,
    settings: Settings,
    cohorts: Sequence[Cohort],
    runner: Runner,
    console: Console,
) -> list[RunFigures]:
    """Makes all runs, with a bar that tells how far it is."""
    conditions = Conditions(settings, options.labels, options.out / RUNS, options.run_timeout_secs)
    planned = list(schedule(options.arms, cohorts, options.repeats))
    done = []
    columns = (
        TextColumn('{task.description}', markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task('', total=len(planned))
        for run in planned:
            what = f'cohort {run.cohort.name}, {run.arm}, repeat {run.repeat}'
            progress.update(task, description=what)
            figures = runner(run, conditions)
            done.append(figures)
            speed = f'{figures.records_per_s:.1f}' if figures.records_per_s else 'no'
            failed = f', {figures.failed} FAILED' if figures.failed else ''
            progress.console.print(
                f'{what}: {speed} prompts/s, {figures.cached_share:.1%} cached{failed}',
                highlight=False,
                markup=False,
            )
            progress.advance(task)
    return done


def _machine() -> dict[str, Any]:
    """What the figures depend on beside the software, as far as it shows here."""
    return {
        'system': platform.platform(),
        'cores': os.cpu_count(),
        'GPUs': _output_of('nvidia-smi', '-L') or 'none',
        'commit': _output_of('git', '-C', str(ROOT), 'describe', '--always', '--dirty')
        or 'unknown',
    }


def _output_of(*command: str) -> str:
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ''
    return result.stdout.strip() if result.returncode == 0 else ''


if __name__ == '__main__':
    sys.exit(main())
