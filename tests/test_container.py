"""The worker image: it cannot be built here, but what it pins and copies can be compared."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.support.processes import ROOT

CONTAINER = ROOT / 'containers' / 'dataflow'
DOCKERFILE = (CONTAINER / 'Dockerfile').read_text()
PYPROJECT = tomllib.loads((ROOT / 'pyproject.toml').read_text())
PAGES = [
    *sorted(ROOT.glob('*.md')),
    *sorted((ROOT / 'docs').glob('**/*.md')),
    CONTAINER / 'README.md',
    ROOT / 'tox.ini',
    # What an error says is to be installed, and what the tests run on.
    ROOT / 'apache_beam_vllm_dynamo' / '_diagnosis.py',
    ROOT / 'tools' / 'environment.py',
]


def argument(name: str) -> str:
    """The default of a build argument."""
    [value] = re.findall(rf'^ARG {name}=(\S+)$', DOCKERFILE, re.MULTILINE)
    return str(value)


def constraints(path: Path) -> dict[str, str]:
    """The versions in a file of constraints, by name."""
    lines = [line for line in path.read_text().splitlines() if '==' in line and line[0] != '#']
    return {line.partition('==')[0]: line.partition('==')[2] for line in lines}


def instructions() -> list[str]:
    """The instructions of the last stage, each on a line."""
    joined = re.sub(r'\\\n', ' ', re.sub(r'^\s*#.*\n', '', DOCKERFILE, flags=re.MULTILINE))
    stages = re.split(r'^(?=FROM )', joined, flags=re.MULTILINE)
    return [' '.join(line.split()) for line in stages[-1].splitlines() if line.strip()]


def test_hadolint_has_nothing_to_say() -> None:
    program = Path(sysconfig.get_path('scripts')) / 'hadolint'
    done = subprocess.run(
        (program, '--no-color', CONTAINER / 'Dockerfile'),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, '')


def test_beam_is_the_one_that_the_package_takes_and_is_tested_with() -> None:
    """The same in the image, its boot program, its constraints and the tests here."""
    version = argument('BEAM_VERSION')
    declared = [Requirement(text) for text in PYPROJECT['project']['dependencies']]
    [beam] = [requirement for requirement in declared if requirement.name == 'apache-beam']
    assert beam.specifier.contains(version)
    assert metadata.version('apache-beam') == version
    assert constraints(CONTAINER / 'constraints.txt')['apache-beam'] == version
    assert constraints(ROOT / 'tools' / 'constraints.txt')['apache-beam'] == version
    assert 'FROM apache/beam_python${PYTHON_VERSION}_sdk:${BEAM_VERSION} AS beam' in DOCKERFILE
    assert '"apache-beam[gcp]==${BEAM_VERSION}"' in DOCKERFILE


def test_dynamo_and_vllm_are_those_that_pyproject_names() -> None:
    extra = [Requirement(text) for text in PYPROJECT['project']['optional-dependencies']['dynamo']]
    [dynamo] = [requirement for requirement in extra if requirement.name == 'ai-dynamo']
    version = argument('DYNAMO_VERSION')
    assert str(dynamo.specifier) == f'=={version}'
    assert '"ai-dynamo[vllm]==${DYNAMO_VERSION}"' in DOCKERFILE
    pins = constraints(CONTAINER / 'constraints.txt')
    assert pins['ai-dynamo'] == pins['ai-dynamo-runtime'] == version
    asked = [Requirement(text) for text in metadata.requires('ai-dynamo') or ()]
    [vllm] = [r for r in asked if r.name == 'vllm' and r.marker and 'vllm' in str(r.marker)]
    assert vllm.specifier.contains(pins['vllm'])
    for requirement in map(Requirement, PYPROJECT['project']['dependencies']):
        assert requirement.specifier.contains(pins[requirement.name]), requirement


def test_the_requirements_say_the_same_as_the_dockerfile() -> None:
    lines = (CONTAINER / 'requirements.txt').read_text().splitlines()
    assert f'apache-beam[gcp]=={argument("BEAM_VERSION")}' in lines
    assert f'ai-dynamo[vllm]=={argument("DYNAMO_VERSION")}' in lines


def test_cuda_is_that_of_the_wheels() -> None:
    pins = constraints(CONTAINER / 'constraints.txt')
    [cuda] = re.findall(
        r'^FROM nvidia/cuda:(\d+\.\d+)\.\d+-base-ubuntu24\.04$', DOCKERFILE, re.MULTILINE
    )
    assert pins['cuda-toolkit'].startswith(f'{cuda}.')
    for package in ('cuda-nvcc', 'cuda-cudart-dev', 'libcurand-dev'):
        assert f'{package}-{cuda.replace(".", "-")} ' in DOCKERFILE


def test_the_launcher_of_tox_has_the_python_of_the_image() -> None:
    tox = (ROOT / 'tox.ini').read_text()
    assert f'base_python = python{argument("PYTHON_VERSION")}' in tox
    assert f'apache-beam[gcp]=={argument("BEAM_VERSION")}' in tox
    assert Requirement(f'python{PYPROJECT["project"]["requires-python"]}').specifier.contains(
        argument('PYTHON_VERSION')
    )


@pytest.mark.parametrize('page', PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_page_names_another_version(page: Path) -> None:
    text = page.read_text()
    beam, python = argument('BEAM_VERSION'), argument('PYTHON_VERSION')
    found = {
        r'apache-beam(?:\[\w+\])?==([\d.]*\d)': {beam},
        r'beam_python([\d.]+)_sdk': {python},
        r'beam_python[\d.]+_sdk:([\d.]*\d)': {beam},
        r'ai-dynamo(?:-runtime)?(?:\[\w+\])?==([\d.]*\d)': {argument('DYNAMO_VERSION')},
        r'nvidia/cuda:(\S+?)[`\s]': set(
            re.findall(r'^FROM nvidia/cuda:(\S+)$', DOCKERFILE, re.MULTILINE)
        ),
    }
    for pattern, right in found.items():
        assert set(re.findall(pattern, text)) <= right, pattern


def test_the_page_of_the_image_names_what_is_in_it() -> None:
    text = (CONTAINER / 'README.md').read_text()
    pins = constraints(CONTAINER / 'constraints.txt')
    for name in (
        f'apache-beam[gcp]=={argument("BEAM_VERSION")}',
        f'ai-dynamo[vllm]=={argument("DYNAMO_VERSION")}',
        f'vLLM {pins["vllm"]}',
        f'Python {argument("PYTHON_VERSION")}',
        f'| etcd | {argument("ETCD_VERSION")},',
    ):
        assert name in text, name


def test_etcd_is_checked_before_it_is_unpacked() -> None:
    assert re.fullmatch(r'[0-9a-f]{64}', argument('ETCD_SHA256'))
    assert 'ADD --checksum=sha256:${ETCD_SHA256} ' in DOCKERFILE
    assert 'COPY --from=etcd /usr/local/bin/etcd /usr/local/bin/etcd' in DOCKERFILE


def test_a_worker_starts_beams_boot_in_the_environment_of_the_image() -> None:
    """And the build ends with the doctor, behind ``pip check``."""
    steps = instructions()
    assert 'ENTRYPOINT ["/opt/apache/beam/boot"]' in steps
    assert 'COPY --from=beam /opt/apache/beam /opt/apache/beam' in steps
    [environment] = [step for step in steps if step.startswith('ENV ')]
    assert 'RUN_PYTHON_SDK_IN_DEFAULT_ENVIRONMENT=1' in environment
    assert environment.startswith('ENV PATH=/opt/venv/bin:/usr/local/nvidia/bin:')
    assert steps[-1] == 'RUN pip check && python -m apache_beam_vllm_dynamo.doctor --build'
    assert not [step for step in steps if step.startswith('USER')]


def test_the_build_context_holds_all_that_the_package_is_made_of(tmp_path: Path) -> None:
    """A wheel made of nothing but what is not ignored has every module."""
    for line in (CONTAINER / 'Dockerfile.dockerignore').read_text().splitlines():
        if line.startswith('!'):
            source, target = ROOT / line[1:], tmp_path / 'context' / line[1:]
            target.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns('__pycache__'))
            else:
                shutil.copy(source, target)
    subprocess.run(
        (
            sys.executable, '-m', 'pip', 'wheel', '--no-deps', '--no-build-isolation',
            '--wheel-dir', tmp_path, tmp_path / 'context',
        ),
        capture_output=True,
        check=True,
    )  # fmt: skip
    [wheel] = tmp_path.glob('*.whl')
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if name.endswith('.py')}
    here = {str(p.relative_to(ROOT)) for p in (ROOT / 'apache_beam_vllm_dynamo').rglob('*.py')}
    assert inside == here
