"""Whether the installed servers take the flags that they will be given.

The flags are those of the command lines that ``_commands`` builds, so that the two cannot
disagree.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from apache_beam_vllm_dynamo import _commands
from apache_beam_vllm_dynamo._addresses import allocate
from apache_beam_vllm_dynamo._arguments import ServerArgument, render
from apache_beam_vllm_dynamo._commands import Stack
from apache_beam_vllm_dynamo._diagnosis import diagnose
from apache_beam_vllm_dynamo._doctor_packages import DYNAMO
from apache_beam_vllm_dynamo._doctor_report import Check
from apache_beam_vllm_dynamo._doctor_subject import Subject
from apache_beam_vllm_dynamo.config import (
    DynamoRuntimeConfig,
    DynamoVLLMEngineSpec,
    EngineKind,
    EnginesPerWorker,
    KVEventMode,
    RouterMode,
)

# vLLM imports PyTorch for it: 10 s on an idle machine, several times that on a cold disk.
HELP_TIMEOUT_S = 180.0

FRONTEND = 'dynamo.frontend'
VLLM_ENGINE = 'dynamo.vllm'
SIMULATED_ENGINE = 'dynamo.mocker'
NATIVE_SERVER = 'vllm.entrypoints.openai.api_server'

_NAMES = {
    FRONTEND: 'frontend flags',
    VLLM_ENGINE: 'engine flags',
    SIMULATED_ENGINE: 'simulated engine flags',
    NATIVE_SERVER: 'server flags',
}
_NO_GPU = 'too few GPUs'  # as a diagnosis names it
_FLAG = re.compile(r'(?<![\w-])--[A-Za-z][\w-]*')

# What the package itself reads or passes on by name, whatever else a user may add.
_ENGINE_FLAGS = (
    'tensor-parallel-size', 'pipeline-parallel-size', 'data-parallel-size', 'max-num-seqs',
)  # fmt: skip
_MODES: tuple[tuple[RouterMode, KVEventMode], ...] = (
    ('kv', 'zmq'), ('kv', 'approximate'), ('kv', 'disabled'), ('round-robin', 'disabled'),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Needed:
    """The flags that one program will be given.

    Attributes:
      ours: Those that the package gives.
      theirs: Those that a user's config adds.
    """

    ours: frozenset[str] = frozenset()
    theirs: frozenset[str] = frozenset()

    def __or__(self, other: Needed) -> Needed:
        return Needed(self.ours | other.ours, self.theirs | other.theirs)


@dataclasses.dataclass(frozen=True)
class Help:
    """What a program says of itself.

    Attributes:
      flags: The flags that it takes; empty where it could not be asked.
      error: The last lines of what it said instead.
    """

    flags: frozenset[str]
    error: tuple[str, ...] = ()


def needed_flags(subject: Subject) -> dict[str, Needed]:
    """The flags of each program, by its module: of one config, or without one of all modes."""
    needed: dict[str, Needed] = {}
    if subject.config is None:
        argv = _commands.native_server_command(
            'model', subject.native_kwargs, port=1, python='', base_env={},
            directory=Path('/'), chat_template=_template(subject),
        ).argv  # fmt: skip
        needed[NATIVE_SERVER] = _needed(argv, [subject.native_kwargs])
        return needed
    for config in [subject.config] if subject.given else _samples():
        frontend, *engines = _command_lines(config, _template(subject))
        theirs = [
            kwargs
            for spec in _specs(config)
            for kwargs in (spec.vllm_server_kwargs, spec.simulation_kwargs)
        ]
        for argv, kwargs in [
            (frontend, [config.frontend_kwargs]),
            *((engine, theirs if subject.given else []) for engine in engines),
        ]:
            needed[argv[2]] = needed.get(argv[2], Needed()) | _needed(argv, kwargs)
    return needed


def ask_for_help(programs: Iterable[str], env: Mapping[str, str]) -> dict[str, Help]:
    """Asks each program for its flags, all at once."""
    programs = list(programs)
    with ThreadPoolExecutor(max_workers=max(1, len(programs))) as threads:
        return dict(zip(programs, threads.map(lambda p: _ask(p, env), programs), strict=True))


def check_flags(
    needed: Mapping[str, Needed], answers: Mapping[str, Help], *, given: bool, without_gpus: bool
) -> list[Check]:
    """Whether each program takes what it will be given.

    Args:
      needed: What each will be given, by its module.
      answers: What each says of itself.
      given: Whether a config says that these will run; else one that is missing is a warning.
      without_gpus: Whether there are none here on purpose. vLLM says nothing without one.
    """
    return [
        _check(program, flags, answers[program], given=given, without_gpus=without_gpus)
        for program, flags in needed.items()
    ]


def flags_in(text: str) -> frozenset[str]:
    """The flags that a help text names."""
    return frozenset(_FLAG.findall(text))


def _check(program: str, flags: Needed, said: Help, *, given: bool, without_gpus: bool) -> Check:
    name = _NAMES[program]
    if said.error:
        diagnosis = diagnose(said.error)
        found = f'{program} does not start: {said.error[-1]}'
        mend = diagnosis.hint or 'Run it with --help to see all that it says'
        if without_gpus and diagnosis.cause == _NO_GPU:
            return Check.ok(name, f'{program} names none without a GPU; look again on a worker')
        check = Check.failed if given or program == FRONTEND else Check.warning
        return check(name, found, mend)
    missing = [
        (sorted(_unknown(group, said.flags)), mend)
        for group, mend in (
            (flags.ours, f'Install the release of {DYNAMO} that this package asks for'),
            (flags.theirs, f'Leave them out, or compare with python -m {program} --help'),
        )
    ]
    for names, mend in missing:
        if names:
            return Check.failed(name, f'{program} does not take {", ".join(names)}', mend)
    number = len(flags.ours | flags.theirs)
    return Check.ok(name, f'{program} takes all {number} that it is given')


def _unknown(flags: frozenset[str], known: frozenset[str]) -> Iterable[str]:
    for flag in flags:
        # What follows a dot is a field of a flag whose value is a JSON document.
        if flag.partition('.')[0] not in known:
            yield flag


def _needed(argv: Sequence[str], theirs: Iterable[Mapping[str, ServerArgument]]) -> Needed:
    everything = _flags_of(argv[3:])
    added = frozenset(flag for kwargs in theirs for flag in _flags_of(render(kwargs)))
    return Needed(everything - added, everything & added)


def _flags_of(arguments: Iterable[str]) -> frozenset[str]:
    return frozenset(a.partition('=')[0] for a in arguments if a.startswith('--'))


def _command_lines(config: DynamoRuntimeConfig, template: Path | None) -> list[tuple[str, ...]]:
    """Those of the frontend and of each engine; nothing is started and no port is taken."""
    listed = dataclasses.replace(config, engines=_specs(config))
    number = len(listed.listed_engines)
    stack = Stack(
        config=listed,
        model_name='model',
        addresses=allocate(Path('/'), number, ports=lambda count: list(range(1, count + 1))),
        namespace='doctor',
        python='',
        base_env={},
        chat_template=template,
    )
    return [
        _commands.frontend_command(stack).argv,
        *(_commands.engine_command(stack, index).argv for index in range(number)),
    ]


def _specs(config: DynamoRuntimeConfig) -> tuple[DynamoVLLMEngineSpec, ...]:
    engines = config.engines
    if not isinstance(engines, EnginesPerWorker):
        return engines
    devices = tuple(map(str, range(engines.devices_per_engine)))
    return (
        dataclasses.replace(
            engines.spec, gpu_devices=devices if config.engine_kind == 'gpu' else ()
        ),
    )


def _template(subject: Subject) -> Path | None:
    return Path('/template') if subject.chat_template_path or not subject.given else None


def _samples() -> Iterable[DynamoRuntimeConfig]:
    """A config of each mode, with every flag that the package knows by name."""
    kinds: tuple[EngineKind, ...] = ('gpu', 'simulated')
    for kind, (router_mode, kv_event_mode) in itertools.product(kinds, _MODES):
        flags = {*_ENGINE_FLAGS, *(_commands.SIMULATED_VLLM_FLAGS if kind == 'simulated' else ())}
        yield DynamoRuntimeConfig(
            (DynamoVLLMEngineSpec(vllm_server_kwargs=dict.fromkeys(sorted(flags), 1)),),
            router_mode,
            kv_event_mode,
            engine_kind=kind,
        )


def _ask(program: str, env: Mapping[str, str]) -> Help:
    argv = (sys.executable, '-P', '-m', program, '--help')
    try:
        done = subprocess.run(
            argv,
            # Without lines broken in a flag.
            env={**env, 'COLUMNS': '1000'},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors='replace',
            timeout=HELP_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Help(frozenset(), (str(error),))
    flags = flags_in(done.stdout)
    if done.returncode != os.EX_OK or not flags:
        lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        return Help(frozenset(), tuple(lines[-20:]) or ('it says nothing',))
    return Help(flags)
