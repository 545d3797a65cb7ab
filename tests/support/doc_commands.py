"""The commands in the documentation: where they are, and what a shell makes of them.

Each block of commands has a comment before it that says what the tests do with it::

    <!-- commands: run -->       it is run, in a copy of this repository
    <!-- commands: dry run -->   it makes its job for Dataflow, with names for the placeholders
    <!-- commands: check -->     its programs, their arguments and files are looked at

The commands in the first lines of a program are looked at as well, without a comment.

In each case bash itself reads the block. Programs that install, build or reach out are replaced
by one that writes its arguments down.
"""

from __future__ import annotations

import ast
import dataclasses
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from tests.support.processes import ROOT

PAGES = [
    path
    for path in (
        ROOT / 'README.md',
        ROOT / 'CONTRIBUTING.md',
        *sorted((ROOT / 'docs').glob('*.md')),
        *sorted((ROOT / 'containers').glob('*/README.md')),
    )
    if path.exists()
]
_PROGRAMS = (
    'examples/*.py',
    'benchmarks/*.py',
    'tools/**/*.py',
    'apache_beam_vllm_dynamo/[a-z]*.py',
)
MODES = ('run', 'dry run', 'check')

_FENCE = re.compile(
    r'^(?P<comment><!-- commands: (?P<mode>[a-z ]+) -->\n)?(?P<indent> *)```(?P<language>\w*)\n'
    r'(?P<text>.*?)^(?P=indent)```$',
    re.MULTILINE | re.DOTALL,
)
_OF_SHELLS = ('sh', 'bash', 'console', 'shell')
# What installs, builds or reaches out is never run by a test, but for ``make -n``.
_NEVER_RUN = ('make', 'pip', 'docker', 'gcloud', 'git', 'tox')
# What is known to the check; a shell does not find any other.
_KNOWN = (
    *_NEVER_RUN, 'python', 'cat', '.venv/bin/python', '.venv/bin/ruff', '.venv/bin/mypy',
)  # fmt: skip
_WRITE_DOWN = """#!/bin/bash
printf '%s\\0' "${0#"$PROGRAMS/"}" "$@" >> "$COMMANDS"
printf '\\n\\0' >> "$COMMANDS"
"""
BLOCK_TIMEOUT_S = 90.0  # the longest takes five seconds on an idle machine


@dataclasses.dataclass(frozen=True)
class Block:
    """One block of commands.

    Attributes:
      page: Where it is, from the root of the repository.
      line: The number of its first line.
      mode: What is done with it; empty where nobody said.
      text: What a shell is given.
    """

    page: str
    line: int
    mode: str
    text: str

    def __str__(self) -> str:
        return f'{self.page}:{self.line}'


def blocks() -> Iterator[Block]:
    """Those of all pages, and of the first lines of programs."""
    yield from _of_programs()
    for path in PAGES:
        page = path.read_text()
        for found in _FENCE.finditer(page):
            if found['language'] in _OF_SHELLS:
                line = page.count('\n', 0, found.start('text')) + 1
                text = re.sub(f'^{found["indent"]}', '', found['text'], flags=re.MULTILINE)
                yield Block(str(path.relative_to(ROOT)), line, found['mode'] or '', text)


def _of_programs() -> Iterator[Block]:
    for path in sorted(path for name in _PROGRAMS for path in ROOT.glob(name)):
        docstring = ast.get_docstring(ast.parse(path.read_text())) or ''
        for found in re.finditer(r'^ {4}(python .*(?:\\\n.*)*)', docstring, re.MULTILINE):
            line = docstring.count('\n', 0, found.start()) + 1
            yield Block(str(path.relative_to(ROOT)), line, 'check', found[1])


def run(block: Block, directory: Path, env: Mapping[str, str]) -> str:
    """Runs a block in a copy of the repository, and returns what it printed."""
    for path in ROOT.iterdir():
        if not path.name.startswith('.'):
            (directory / path.name).symlink_to(path)
    (directory / '.cache').symlink_to(ROOT / '.cache')
    (directory / '.venv').symlink_to(sys.prefix)
    programs = _programs(directory, _NEVER_RUN)
    return _bash(block.text, directory, (str(programs), f'{sys.prefix}/bin', os.defpath), env)


def commands(block: Block, directory: Path) -> list[list[str]]:
    """The command lines of a block, as a shell gives them to programs; none of them is run."""
    programs = _programs(directory, _KNOWN)
    (directory / '.venv').symlink_to(programs / '.venv')
    (programs / '.venv' / 'bin' / 'activate').touch()
    for clone in re.findall(r'&& cd ([\w-]+)$', block.text, re.MULTILINE):
        (directory / clone).mkdir()
    _bash(block.text, directory, (str(programs),), {})
    return recorded(directory)


def recorded(directory: Path) -> list[list[str]]:
    """What was written down in place of being run."""
    path = directory / 'commands'
    text = path.read_text() if path.exists() else ''
    return [line.split('\0')[:-1] for line in text.split('\n\0')[:-1]]


def _programs(directory: Path, names: Iterable[str]) -> Path:
    programs = directory / 'programs'
    for name in names:
        program = programs / name
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(_WRITE_DOWN)
        program.chmod(0o755)
    return programs


def _bash(text: str, directory: Path, path: Sequence[str], env: Mapping[str, str]) -> str:
    done = subprocess.run(
        ('/bin/bash', '-euo', 'pipefail', '-c', text),
        cwd=directory,
        env={
            **os.environ,
            **env,
            'PATH': ':'.join(path),
            'PROGRAMS': str(directory / 'programs'),
            'COMMANDS': str(directory / 'commands'),
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=BLOCK_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
