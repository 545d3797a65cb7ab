"""Checks of single values, shared by the configs; each error says what, the value, the mend."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence

from apache_beam_vllm_dynamo._arguments import ServerArgument
from apache_beam_vllm_dynamo.errors import ConfigurationError

_GPU_ORDINAL = re.compile(r'\d+')
_GPU_NAME = re.compile(r'(GPU|MIG)-[0-9A-Za-z/-]+')
# What waits in a system call takes no more than three weeks of milliseconds.
LONGEST_SECS = 7 * 24 * 3600

_ENVIRONMENT_NAME = re.compile(r'[A-Za-z_][A-Za-z0-9_]*')


def check_choice(field: str, value: object, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ConfigurationError(
            f'{field} is {value!r}; it must be one of {", ".join(map(repr, choices))}.'
        )


def check_count(field: str, value: object) -> None:
    if type(value) is not int or value < 1:
        raise ConfigurationError(f'{field} is {value!r}; it must be a whole number, 1 or more.')


def check_seconds(field: str, value: object) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 < value <= LONGEST_SECS:  # type: ignore[operator]  # it is a number
        raise ConfigurationError(
            f'{field} is {value!r}; it must be a number of seconds above 0, {LONGEST_SECS} '
            '(a week) at most.'
        )


def check_not_negative(field: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise ConfigurationError(f'{field} is {value!r}; it must be a number, 0 or more.')


def gpu_devices(devices: object) -> tuple[str, ...]:
    if isinstance(devices, str):
        devices = devices.split(',')
    if not isinstance(devices, (list, tuple, range)):
        raise ConfigurationError(
            f"gpu_devices is {devices!r}; give a tuple such as ('0', '1') or ('GPU-8a2f…',)."
        )
    names: list[str] = []
    for device in devices:
        name = str(device).strip() if type(device) in (int, str) else ''
        if _GPU_ORDINAL.fullmatch(name):
            name = str(int(name))
        elif not _GPU_NAME.fullmatch(name):
            raise ConfigurationError(
                f'gpu_devices holds {device!r}; a GPU is named by its ordinal (0), its UUID '
                "('GPU-…') or its MIG name ('MIG-…'), as `nvidia-smi -L` prints them."
            )
        if name in names:
            raise ConfigurationError(f'gpu_devices names {name!r} twice; name each GPU once.')
        names.append(name)
    return tuple(names)


def cpu_cores(cores: object) -> tuple[int, ...]:
    if not isinstance(cores, (list, tuple, range)) or any(
        type(core) is not int or core < 0 for core in cores
    ):
        raise ConfigurationError(f'cpu_cores is {cores!r}; give a tuple of core numbers: (0, 1).')
    if len(set(cores)) != len(cores):
        raise ConfigurationError(f'cpu_cores is {cores!r}; name each core once.')
    return tuple(cores)


def environment(field: str, env: object) -> dict[str, str]:
    if not isinstance(env, Mapping):
        raise ConfigurationError(
            f'{field} is a {type(env).__name__}; it must be a mapping of variable names to strings.'
        )
    for name, value in env.items():
        if not isinstance(name, str) or not _ENVIRONMENT_NAME.fullmatch(name):
            raise ConfigurationError(
                f'{field} has the key {name!r}, which no variable can have; write it like '
                "'HF_HOME'."
            )
        if not isinstance(value, str) or not _fits_environment(value):
            raise ConfigurationError(
                f'{field}[{name!r}] is a {type(value).__name__} that is not a plain string; '
                'environment values are strings; quote numbers.'
            )
    return dict(env)


def _fits_environment(value: str) -> bool:
    try:
        return b'\0' not in os.fsencode(value)
    except UnicodeEncodeError:
        return False


def check_disjoint(what: str, of_engines: Sequence[Sequence[object]]) -> None:
    owner: dict[object, int] = {}
    for index, devices in enumerate(of_engines, 1):
        for device in devices:
            if device in owner:
                raise ConfigurationError(
                    f'{what} {device!r} is given to engine {owner[device]} and to engine {index}; '
                    f'each {what} belongs to one engine.'
                )
            owner[device] = index


def check_memory_share(arguments: Mapping[str, ServerArgument]) -> None:
    value = arguments.get('gpu-memory-utilization')
    if value is None:
        return
    try:
        share = float(value) if isinstance(value, (int, float, str)) else math.nan
    except (ValueError, OverflowError):
        share = math.nan
    if isinstance(value, bool) or not 0 < share <= 1:
        raise ConfigurationError(
            f"vllm_server_kwargs['gpu-memory-utilization'] is {value!r}; it must be a share of the "
            'memory, above 0 and at most 1.'
        )


def check_equal(flag: str, of_engines: Sequence[Mapping[str, ServerArgument]]) -> None:
    """Refuses a flag that engines are given with different values.

    One that is not given has a value that is not known here, and may be the same.
    """
    given = [
        (number, arguments[flag])
        for number, arguments in enumerate(of_engines, 1)
        if arguments.get(flag) is not None
    ]
    for number, value in given:
        first, expected = given[0]
        if str(value) != str(expected):
            raise ConfigurationError(
                f'{flag!r} of engine {number} is {value!r}, but that of engine {first} is '
                f'{expected!r}; the frontend serves engines that are alike only. Make them equal.'
            )


def positive_int_argument(
    arguments: Mapping[str, ServerArgument], flag: str, *, default: int
) -> int:
    value = arguments.get(flag)
    if value is None:
        return default
    try:
        number = int(value) if isinstance(value, (int, str)) else 0
    except ValueError:
        number = 0
    if isinstance(value, bool) or number < 1:
        raise ConfigurationError(
            f'vllm_server_kwargs[{flag!r}] is {value!r}; it must be a whole number, 1 or more.'
        )
    return number
