"""For all tests: a temporary directory of their own, so that what is left behind is seen."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator

import pytest

from tests.support.stacks import nothing_left_on_this_machine


@pytest.fixture(scope='session', autouse=True)
def _own_temporary_directory() -> Iterator[None]:
    """Runs side by side on one machine do not see each other's directories."""
    before = os.environ.get('TMPDIR')
    directory = tempfile.mkdtemp(prefix='tests-')
    os.environ['TMPDIR'] = tempfile.tempdir = directory
    yield
    tempfile.tempdir = None
    os.environ.pop('TMPDIR')
    if before is not None:
        os.environ['TMPDIR'] = before
    shutil.rmtree(directory)


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Ends the clients and servers of a test, and looks for what is left of them."""
    with nothing_left_on_this_machine():
        yield
