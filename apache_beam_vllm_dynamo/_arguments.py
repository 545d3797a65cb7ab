"""Pure: mappings of server arguments, as users write them, to command lines.

A key is a flag's name with or without leading dashes, with dashes or underscores. The
value decides how it is rendered:

==================  ==============================  ==========================
value               meaning                         rendered as
==================  ==============================  ==========================
``None``, ``True``  the bare flag                   ``--flag``
``False``           the flag's negation             ``--no-flag``
number, string      one value                       ``--flag value``
list, tuple         several values                  ``--flag a b``
dict                one JSON document               ``--flag {"a": 1}``
==================  ==============================  ==========================
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence

from apache_beam_vllm_dynamo.errors import ConfigurationError

ServerArgument = str | int | float | bool | Sequence[object] | Mapping[str, object] | None
"""What the value of a server argument may be."""


def flag_name(key: str) -> str:
    """The name of a flag as command lines spell it: no leading dashes, no underscores."""
    return key.lstrip('-').replace('_', '-')


def normalized(field: str, arguments: Mapping[str, ServerArgument]) -> dict[str, ServerArgument]:
    """Copies ``arguments`` with their keys as flag names, after checking each.

    Raises:
      ConfigurationError: A key is not a flag's name or is given twice, or a value is of a
        type that no command line can carry.
    """
    if not isinstance(arguments, Mapping):
        raise ConfigurationError(
            f'{field} is {arguments!r}; it must be a mapping of flag names to values, '
            "such as {'max-num-seqs': 32}."
        )
    result: dict[str, ServerArgument] = {}
    for key, value in arguments.items():
        if not isinstance(key, str) or not flag_name(key) or any(c in key for c in ' =\n\t'):
            raise ConfigurationError(
                f'{field} has the key {key!r}, which is not the name of a flag; '
                "write it like 'max-num-seqs', with its value apart."
            )
        flag = flag_name(key)
        if flag in result:
            raise ConfigurationError(
                f'{field} gives --{flag} twice (as {key!r} and in another spelling); keep one.'
            )
        _check_value(f'{field}[{key!r}]', value)
        result[flag] = value
    return result


def render(arguments: Mapping[str, ServerArgument]) -> tuple[str, ...]:
    """The command line of ``arguments``, whose keys are flag names, in their order."""
    argv: list[str] = []
    for flag, value in arguments.items():
        argv += _render_one(flag, value)
    return tuple(argv)


def given(arguments: Mapping[str, ServerArgument], flags: Iterable[str]) -> str | None:
    """The first of ``flags``, or of their negations, that ``arguments`` holds."""
    for flag in flags:
        for name in (flag, f'no-{flag}'):
            if name in arguments:
                return name
    return None


def _check_value(where: str, value: object) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigurationError(f'{where} is {value!r}; a server argument must be finite.')
    if isinstance(value, str) and '\x00' in value:
        raise ConfigurationError(f'{where} holds a NUL character, which no command line can carry.')
    if value is None or isinstance(value, (str, bool, int, float)):
        return
    if isinstance(value, (list, tuple)):
        if not value:
            raise ConfigurationError(
                f'{where} is an empty list; leave the key out, or give None for a bare flag.'
            )
        for item in value:
            if item is None or isinstance(item, bool):
                raise ConfigurationError(
                    f'{where} holds {item!r}; a list of values may hold strings, numbers, '
                    'lists and dicts.'
                )
            _check_value(where, item)
        return
    if isinstance(value, Mapping):
        try:
            _json(value)
        except (TypeError, ValueError) as error:
            raise ConfigurationError(f'{where} cannot be written as JSON: {error}.') from error
        return
    raise ConfigurationError(
        f'{where} is {value!r}, a {type(value).__name__}; a server argument may be a str, int, '
        'float, bool, list, dict or None.'
    )


def _render_one(flag: str, value: ServerArgument) -> list[str]:
    if value is None or value is True:
        return [f'--{flag}']
    if value is False:
        return [f'--no-{flag}']
    if isinstance(value, (list, tuple)):
        return [f'--{flag}', *(_text(item) for item in value)]
    text = _text(value)
    # argparse takes a separate value that starts with a dash for another flag.
    return [f'--{flag}={text}'] if text.startswith('-') else [f'--{flag}', text]


def _text(value: object) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, (Mapping, list, tuple)):
        return _json(value)
    return repr(value)


def _json(value: object) -> str:
    return json.dumps(value, default=_plain, allow_nan=False)


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f'{value!r} is a {type(value).__name__}')
