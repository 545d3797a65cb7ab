"""Pure: mappings of server arguments, as users write them, to command lines.

A key is a flag's name with or without leading dashes, with dashes or underscores; vLLM's
short ``tp``, ``pp`` and ``dp`` stand for the long names. The value decides how it is rendered:

==================  ==============================  =====================================
value               meaning                         rendered as
==================  ==============================  =====================================
``None``, ``True``  the bare flag                   ``--flag``
``False``           the flag's negation             ``--no-flag`` (``no-flag``: ``--flag``)
number, string      one value                       ``--flag value``
list, tuple         several values                  ``--flag a b``
dict                one JSON document               ``--flag {"a": 1}``
==================  ==============================  =====================================
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence

from apache_beam_vllm_dynamo.errors import ConfigurationError

ServerArgument = str | int | float | bool | Sequence[object] | Mapping[str, object] | None
"""What the value of a server argument may be."""

_KEY = re.compile(r'-{0,2}[A-Za-z][A-Za-z0-9._-]*')
# vLLM has these with a single dash only.
_LONG_NAMES: Mapping[str, str] = {
    'tp': 'tensor-parallel-size',
    'pp': 'pipeline-parallel-size',
    'dp': 'data-parallel-size',
}
# What argparse takes for a value although it begins with a dash.
_NEGATIVE_NUMBER = re.compile(r'-\d+|-\d*\.\d+')


def flag_name(key: str) -> str:
    """The name of a flag as command lines spell it: no leading dashes, no underscores.

    After a dot it names a field of a JSON document, which keeps its underscores.
    """
    name, dot, field = key.lstrip('-').partition('.')
    name = name.replace('_', '-')
    return _LONG_NAMES.get(name, name) + dot + field


def normalized(field: str, arguments: Mapping[str, ServerArgument]) -> dict[str, ServerArgument]:
    """Copies ``arguments`` in depth, with their keys as flag names, after checking each.

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
    spelled: dict[str, str] = {}
    for key, value in arguments.items():
        if not _is_flag_name(key):
            raise ConfigurationError(
                f'{field} has the key {key!r}, which is not the name of a flag; '
                "write it like 'max-num-seqs', with its value apart."
            )
        flag = flag_name(key)
        positive = flag.removeprefix('no-')
        if positive in spelled:
            raise ConfigurationError(
                f'{field} gives --{positive} twice, as {spelled[positive]!r} and as {key!r}; '
                'keep one.'
            )
        spelled[positive] = key
        _check_value(f'{field}[{key!r}]', value)
        if flag != positive and value is False:
            flag, value = positive, True  # noqa: PLW2901 - not to be no flag is to be one
        result[flag] = _copied(value)
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


def _is_flag_name(key: object) -> bool:
    return isinstance(key, str) and _KEY.fullmatch(key) is not None


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
            _check_item(where, item)
        if len(value) > 1:
            _check_no_dash(where, value)
        return
    if isinstance(value, Mapping):
        _check_json(where, value)
        return
    raise ConfigurationError(
        f'{where} is {value!r}, a {type(value).__name__}; a server argument may be a str, int, '
        'float, bool, list, dict or None.'
    )


def _check_item(where: str, item: object) -> None:
    if item is None or isinstance(item, bool):
        raise ConfigurationError(
            f'{where} holds {item!r}; a list of values may hold strings, numbers, lists and dicts.'
        )
    if isinstance(item, (list, tuple)):
        _check_json(where, item)
    else:
        _check_value(where, item)


def _check_no_dash(where: str, items: Sequence[object]) -> None:
    for text in map(_text, items):
        if text.startswith('-') and not _NEGATIVE_NUMBER.fullmatch(text):
            raise ConfigurationError(
                f'{where} holds {text!r}, which a command line takes for a flag among several '
                'values; give it alone, or without the leading dash.'
            )


def _check_json(where: str, value: object) -> None:
    try:
        _json(value)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f'{where} cannot be written as JSON: {error}.') from error


def _copied(value: ServerArgument) -> ServerArgument:
    """A plain copy: of subclasses, such as NumPy's floats, the base is what is rendered."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, (int, float)):
        return int(value) if isinstance(value, int) else float(value)
    copied: ServerArgument = json.loads(_json(value))
    return copied


def _render_one(flag: str, value: ServerArgument) -> list[str]:
    if value is None or value is True:
        return [f'--{flag}']
    if value is False:
        return [f'--no-{flag}']
    if isinstance(value, (list, tuple)) and len(value) > 1:
        return [f'--{flag}', *(_text(item) for item in value)]
    text = _text(value[0] if isinstance(value, (list, tuple)) else value)
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
