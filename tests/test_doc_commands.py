"""The commands of the documentation: each is run, made into a job, or looked at word by word."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
from apache_beam.options.pipeline_options import PipelineOptions, _BeamArgumentParser
from packaging.requirements import Requirement

from tests.support.doc_commands import MODES, Block, blocks, commands, recorded, run
from tests.support.processes import ROOT, ProcessTree
from tools.dataflow.tasks import DRY_RUN_DIRECTORY, DRY_RUN_OPTIONS, JOB_FILE, TASKS

BLOCKS = list(blocks())
OURS = ('apache_beam_vllm_dynamo', 'examples', 'benchmarks', 'tools')
DRY_RUN_TIMEOUT_S = 90.0  # five seconds each on an idle machine
REGISTRY = r'[\w-]+-docker\.pkg\.dev'

# What a reader puts in their place.
PLACEHOLDERS = {
    'gs://BUCKET/prompts.jsonl': 'prompts.jsonl',  # looked at before the job is made
    'BUCKET': 'bucket', 'PROJECT': 'my-project', 'REGION': 'us-central1',
    'PRICE': '1.5', 'REPOSITORY': 'images', 'IMAGE:TAG': 'worker:1', 'IMAGE': 'worker',
}  # fmt: skip


def of(mode: str) -> list[Block]:
    return [block for block in BLOCKS if block.mode == mode]


def test_each_block_says_what_is_done_with_it() -> None:
    """By a comment before it, as tests/support/doc_commands.py describes."""
    assert {str(block): block.mode for block in BLOCKS if block.mode not in MODES} == {}
    assert all(of(mode) for mode in MODES)


@pytest.mark.parametrize('block', of('run'), ids=str)
def test_a_block_that_is_run_succeeds(block: Block, tmp_path: Path) -> None:
    """What it prints as JSON has an answer in each line."""
    with ProcessTree() as tree:
        printed = run(block, tmp_path, tree.env)
        tree.wait_until_gone()
    rows = [json.loads(line) for line in printed.splitlines() if line.startswith('{')]
    assert all(row['completion'] and row['error'] is None for row in rows)
    assert rows or 'cat answers' not in block.text
    for argv in recorded(tmp_path):
        CHECKS[argv[0]](argv)


def test_a_block_for_dataflow_makes_its_job(tmp_path: Path) -> None:
    """Each by itself, two at a time: what it asks for is in the job."""
    found: list[tuple[Block, Path, list[str]]] = []
    for block in of('dry run'):
        directory = tmp_path / f'{len(found)}'
        directory.mkdir()
        found += [(block, directory, argv) for argv in commands(block, directory)]
    assert len(found) == len(of('dry run')), 'one command in each'
    with ThreadPoolExecutor(2) as threads:
        jobs = list(threads.map(lambda each: dry_run(*each[1:]), found))
    for (block, _, argv), job in zip(found, jobs, strict=True):
        wanted = ['us-central1', 'gs://bucket/temp', '/my-project/images/']
        wanted += ['nvidia-l4', 'g2-standard-24'] if 'tox' not in argv else []
        assert [text for text in wanted if text not in job] == [], str(block)


@pytest.mark.parametrize('block', of('check'), ids=str)
def test_a_block_that_is_checked_names_what_there_is(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    found = commands(block, tmp_path)
    assert found
    for argv in found:
        CHECKS[argv[0]](argv)


def dry_run(directory: Path, argv: list[str]) -> str:
    """The job that a command line makes."""
    job = directory / 'job'
    job.mkdir()
    (directory / 'prompts.jsonl').write_text('{"prompt": "What do bees make?"}\n')
    argv = [filled_in(word) for word in argv]
    env = {**os.environ, DRY_RUN_DIRECTORY: str(job), 'PYTHONPATH': str(ROOT)}
    if argv[0] == 'tox':
        task = argv[argv.index('-e') + 1]
        options = argv[argv.index('--') + 1 :]
        argv = ['python', '-m', 'tools.dataflow', task, *options, '--dry_run', str(job)]
    else:
        argv = [*argv, '--job_name', 'answers', *DRY_RUN_OPTIONS]
    done = subprocess.run(
        (sys.executable, *argv[1:]),
        cwd=directory,
        env=env,
        capture_output=True,
        text=True,
        timeout=DRY_RUN_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return (job / JOB_FILE).read_text()


def filled_in(word: str) -> str:
    for placeholder, value in PLACEHOLDERS.items():
        word = word.replace(placeholder, value)
    return word


def check_python(argv: Sequence[str]) -> None:
    """A module with arguments that it takes, or a file."""
    if argv[1] != '-m':
        assert argv[1:] == ['quick_start.py'] or (ROOT / argv[1]).is_file(), argv[1]
        return
    module, arguments = argv[2], list(map(filled_in, argv[3:]))
    if module.partition('.')[0] in OURS:
        check_arguments(module, arguments)
    else:
        check_flags_of_others(module, arguments)


class Parsed(Exception):  # noqa: N818 - it ends a program after it has read its arguments
    """The arguments that a parser did not know."""


def check_arguments(module: str, arguments: list[str]) -> None:
    """A program of ours takes all of them, with these values; or Beam's pipeline options do."""
    parse = argparse.ArgumentParser.parse_known_args

    def parse_and_end(
        self: argparse.ArgumentParser, args: Any = None, namespace: Any = None
    ) -> Any:
        raise Parsed(parse(self, args, namespace)[1])

    main = importlib.import_module(program(module).name).main
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, 'parse_known_args', parse_and_end)
        with pytest.raises(Parsed) as ended:
            main(arguments)
    [unknown] = ended.value.args
    options = _BeamArgumentParser(allow_abbrev=False)
    for kind in PipelineOptions.__subclasses__():
        kind._add_argparse_args(options)
    assert options.parse_known_args(unknown)[1] == [], module


def check_flags_of_others(module: str, arguments: list[str]) -> None:
    """Their source has each flag."""
    path = program(module).origin
    assert path is not None
    source = Path(path).read_text()
    for argument in arguments:
        if argument.startswith('--'):
            flag = argument.partition('=')[0]
            assert f"'{flag}'" in source or f'"{flag}"' in source, f'{module} {flag}'
        else:
            assert '::' in argument or (ROOT / argument.partition('::')[0]).exists(), argument


def program(module: str) -> ModuleSpec:
    """What ``python -m`` runs."""
    spec = importlib.util.find_spec(module)
    if spec is not None and spec.submodule_search_locations:
        spec = importlib.util.find_spec(f'{module}.__main__')
    assert spec is not None, module
    return spec


def check_make(argv: Sequence[str]) -> None:
    """Make knows the target, and makes something of it."""
    done = subprocess.run(
        ('/usr/bin/make', '-n', *argv[1:]), cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


def check_pip(argv: Sequence[str]) -> None:
    """Requirements, or extras that the package has."""
    assert argv[1] == 'install'
    project = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']
    for word in argv[2:]:
        if word.startswith('.'):
            extras = set(re.findall(r'\w+', word))
            assert extras <= project['optional-dependencies'].keys(), word
        else:
            assert Requirement(word).name


def check_docker(argv: Sequence[str]) -> None:
    """Files exist; what runs inside an image is a command of ours or of Beam's boot."""
    action, words = argv[1], list(argv[2:])
    if action == 'build':
        assert (ROOT / words[words.index('--file') + 1]).is_file()
        assert (ROOT / words[-1]).is_dir()
        assert re.fullmatch(rf'{REGISTRY}/[\w/-]+:\w+', words[words.index('--tag') + 1])
    elif action == 'push':
        assert re.fullmatch(rf'{REGISTRY}/[\w/-]+:\w+', words[0])
    else:
        assert action == 'run'
        [image] = [
            word for word in words if re.search(r'^IMAGE$|docker\.pkg\.dev|_job_server:', word)
        ]
        inside = words[words.index(image) + 1 :]
        if '--entrypoint' in words:
            check_python([words[words.index('--entrypoint') + 1], *inside])
        else:
            assert inside[0].startswith(('--worker_pool', '--spark-master-url='))


def check_gcloud(argv: Sequence[str]) -> None:
    assert argv[1:3] == ['auth', 'configure-docker']
    assert re.fullmatch(REGISTRY, argv[3])


def check_tox(argv: Sequence[str]) -> None:
    """An environment of tox.ini."""
    name = argv[argv.index('-e') + 1]
    text = (ROOT / 'tox.ini').read_text()
    assert name in TASKS or re.search(rf'^ +{re.escape(name)}: ', text, re.MULTILINE), name


def check_tool(argv: Sequence[str]) -> None:
    """One of the tools of the environment, on what there is."""
    assert argv[1:] in (['check', '.'], ['format', '--check', '.'], []), argv


CHECKS: dict[str, Callable[[Sequence[str]], None]] = {
    'python': check_python,
    '.venv/bin/python': check_python,
    '.venv/bin/ruff': check_tool,
    '.venv/bin/mypy': check_tool,
    'make': check_make,
    'pip': check_pip,
    'docker': check_docker,
    'gcloud': check_gcloud,
    'tox': check_tox,
    'git': print,
    'cat': print,
}  # fmt: skip
