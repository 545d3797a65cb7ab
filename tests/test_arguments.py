"""Server arguments: what a mapping may hold, and the command line that it becomes."""

from __future__ import annotations

import argparse
import copy
import enum
import json
import math
import types
from typing import Any

import numpy as np
import pytest
from hypothesis import given as for_all
from hypothesis import strategies as st

from apache_beam_vllm_dynamo._arguments import (
    ServerArgument,
    flag_name,
    given,
    normalized,
    render,
)
from apache_beam_vllm_dynamo.errors import ConfigurationError


class Word(enum.StrEnum):
    AUTO = 'auto'


class Number(enum.IntEnum):
    FOUR = 4


def rendered(arguments: Any) -> list[str]:
    return list(render(normalized('vllm_server_kwargs', arguments)))


@pytest.mark.parametrize(
    ('value', 'argv'),
    [
        (None, ['--flag']),
        (True, ['--flag']),
        (False, ['--no-flag']),
        ('text', ['--flag', 'text']),
        ('two words', ['--flag', 'two words']),
        ('', ['--flag', '']),
        ('é"\n', ['--flag', 'é"\n']),
        (0, ['--flag', '0']),
        (32, ['--flag', '32']),
        (-1, ['--flag=-1']),
        (0.9, ['--flag', '0.9']),
        (1e-05, ['--flag', '1e-05']),
        (-0.5, ['--flag=-0.5']),
        ('-x', ['--flag=-x']),
        ('--other', ['--flag=--other']),
        (['a', 1, 2.5], ['--flag', 'a', '1', '2.5']),
        (('a',), ['--flag', 'a']),
        (['-x'], ['--flag=-x']),
        ([-1, -0.5], ['--flag', '-1', '-0.5']),
        ([[1, True], {'a': None}], ['--flag', '[1, true]', '{"a": null}']),
        ({}, ['--flag', '{}']),
        ({'a': [1, {'b': None}], 'c': True}, ['--flag', '{"a": [1, {"b": null}], "c": true}']),
        (types.MappingProxyType({'a': (1, 2)}), ['--flag', '{"a": [1, 2]}']),
        (Word.AUTO, ['--flag', 'auto']),
        (Number.FOUR, ['--flag', '4']),
        (np.float64(0.5), ['--flag', '0.5']),
        ([np.float64(0.5), Number.FOUR], ['--flag', '0.5', '4']),
    ],
    ids=repr,
)
def test_each_type_of_value_is_rendered_as_command_lines_expect(
    value: ServerArgument, argv: list[str]
) -> None:
    assert rendered({'flag': value}) == argv


@pytest.mark.parametrize(
    ('key', 'flag'),
    [
        ('max-num-seqs', 'max-num-seqs'),
        ('max_num_seqs', 'max-num-seqs'),
        ('--max-num-seqs', 'max-num-seqs'),
        ('--max_num_seqs', 'max-num-seqs'),
        ('O', 'O'),
        ('tp', 'tensor-parallel-size'),
        ('-tp', 'tensor-parallel-size'),
        ('pp', 'pipeline-parallel-size'),
        ('dp', 'data-parallel-size'),
        ('compilation_config.cudagraph_mode', 'compilation-config.cudagraph_mode'),
    ],
)
def test_a_flag_may_be_spelled_as_in_python_or_as_on_a_command_line(key: str, flag: str) -> None:
    """A field of a JSON document, after the dot, keeps its underscores: vLLM looks it up so."""
    assert flag_name(key) == flag
    assert rendered({key: 'x'}) == [f'--{flag}', 'x']


def test_a_negated_flag_and_its_double_negation() -> None:
    assert rendered({'no-router-kv-events': None}) == ['--no-router-kv-events']
    assert rendered({'no_router_kv_events': True}) == ['--no-router-kv-events']
    assert rendered({'no-router-kv-events': False}) == ['--router-kv-events']


def test_flags_keep_their_order() -> None:
    assert rendered({'b': 1, 'a': None, 'c': False}) == ['--b', '1', '--a', '--no-c']


@pytest.mark.parametrize(
    ('arguments', 'says'),
    [
        (['max-num-seqs'], "is ['max-num-seqs']; it must be a mapping"),
        ('max-num-seqs=3', "is 'max-num-seqs=3'; it must be a mapping"),
        ({1: 'x'}, "has the key 1, which is not the name of a flag; write it like 'max-num-seqs'"),
        ({'': 'x'}, "has the key ''"),
        ({'--': 'x'}, "has the key '--'"),
        ({'max num': 1}, "has the key 'max num'"),
        ({'max-num-seqs=3': None}, "has the key 'max-num-seqs=3'"),
        ({'a\x00': 1}, r"has the key 'a\x00'"),
        ({'a\n': 1}, r"has the key 'a\n'"),
        ({'a-b': 1, 'a_b': 2}, "gives --a-b twice, as 'a-b' and as 'a_b'; keep one"),
        ({'a': None, 'no-a': None}, "gives --a twice, as 'a' and as 'no-a'; keep one"),
        ({'tp': 2, 'tensor-parallel-size': 2}, 'gives --tensor-parallel-size twice'),
        ({'a': math.nan}, "['a'] is nan; a server argument must be finite"),
        ({'a': [1, math.inf]}, "['a'] is inf; a server argument must be finite"),
        ({'a': {'b': math.nan}}, "['a'] cannot be written as JSON"),
        ({'a': {'b': object}}, "['a'] cannot be written as JSON"),
        ({'a': [[object()]]}, "['a'] cannot be written as JSON"),
        ({'a': 'x\x00y'}, "['a'] holds a NUL character"),
        ({'a': ['x\x00y']}, "['a'] holds a NUL character"),
        ({'a': []}, "['a'] is an empty list; leave the key out, or give None"),
        ({'a': ()}, "['a'] is an empty list"),
        ({'a': [None]}, "['a'] holds None; a list of values may hold strings, numbers"),
        ({'a': [True]}, "['a'] holds True; a list of values may hold strings, numbers"),
        ({'a': ['x', '-y']}, "['a'] holds '-y', which a command line takes for a flag"),
        ({'a': b'x'}, "['a'] is b'x', a bytes; a server argument may be a str, int, float, bool"),
        ({'a': {1, 2}}, "['a'] is {1, 2}, a set"),
        ({'a': np.int64(3)}, "['a'] is np.int64(3), a int64"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_what_no_command_line_can_carry_is_refused_with_field_value_and_mend(
    arguments: Any, says: str
) -> None:
    with pytest.raises(ConfigurationError) as refused:
        normalized('vllm_server_kwargs', arguments)
    assert says in str(refused.value)
    assert str(refused.value).startswith('vllm_server_kwargs')


def test_the_callers_mapping_is_neither_changed_nor_kept() -> None:
    mine: dict[str, Any] = {'max_num_seqs': 3, 'a': [1, {'b': [2]}], 'c': {'d': {'e': 1}}}
    before = copy.deepcopy(mine)
    result = normalized('vllm_server_kwargs', mine)
    assert mine == before
    mine['a'][1]['b'].append(3)
    mine['c']['d']['e'] = 2
    mine['new'] = 1
    assert result == {'max-num-seqs': 3, 'a': [1, {'b': [2]}], 'c': {'d': {'e': 1}}}


def test_given_finds_a_flag_or_its_negation() -> None:
    assert given({'a': 1}, ('b', 'a')) == 'a'
    assert given({'no-a': None}, ('a',)) == 'no-a'
    assert given({'a': 1}, ('b',)) is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=['Cs'], exclude_characters='\x00')),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)  # fmt: skip


@for_all(st.dictionaries(st.text(max_size=3), JSON))
def test_every_json_document_arrives_as_it_was(document: dict[str, Any]) -> None:
    parser = argparse.ArgumentParser(exit_on_error=False)
    parser.add_argument('--flag', type=json.loads)
    assert parser.parse_args(rendered({'flag': document})).flag == document


@for_all(st.text(st.characters(exclude_categories=['Cs'], exclude_characters='\x00')))
def test_every_string_arrives_as_it_was(text: str) -> None:
    parser = argparse.ArgumentParser(exit_on_error=False)
    parser.add_argument('--flag')
    parser.add_argument('-x')
    assert parser.parse_args(rendered({'flag': text})).flag == text
