"""For all tests: a temporary directory of their own, and a look at what is left behind."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator

import pytest

from tests.support.leaks import nothing_leaks, open_what_opens_once, processes_with
from tests.support.processes import wait_until
from tests.support.stacks import directories, nothing_left_on_this_machine


@pytest.fixture(scope='session', autouse=True)
def _own_temporary_directory() -> Iterator[None]:
    """Runs side by side on one machine do not see each other's directories.

    At the end no process that was started with it lives, and no directory of a start is in it.
    """
    before = os.environ.get('TMPDIR')
    directory = tempfile.mkdtemp(prefix='tests-', dir='/tmp')
    os.environ['TMPDIR'] = tempfile.tempdir = directory
    open_what_opens_once()
    yield
    wait_until('no process of the tests is left', lambda: not processes_with(directory))
    assert not directories()
    tempfile.tempdir = None
    os.environ.pop('TMPDIR')
    if before is not None:
        os.environ['TMPDIR'] = before
    shutil.rmtree(directory)


@pytest.fixture(autouse=True)
def _no_leak() -> Iterator[None]:
    """No process, thread or descriptor of a test outlives it, in this process."""
    with nothing_leaks():
        yield


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Ends the clients and servers of a test, and looks for what is left of them."""
    with nothing_left_on_this_machine():
        yield
