"""The prompts of the benchmark: what they share, what their manifest says, and what is refused."""

from __future__ import annotations

import collections
import hashlib
import itertools
import json
import pathlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from benchmarks import _document_text, prefix_reuse_dataset
from benchmarks._reuse_ceiling import ReuseCounter
from benchmarks._token_counts import EstimatedTokens, token_counter
from benchmarks.prefix_reuse_dataset import Parameters, manifest_path, rows, write
from tools.small_model import TOKENIZER_DIRECTORY

MODEL = str(TOKENIZER_DIRECTORY)
SHORT = 250  # tokens: little more than the instruction
SEPARATOR = '\n\nStatement '

small = st.builds(
    Parameters,
    num_records=st.integers(1, 60),
    reuse_fraction=st.floats(0, 1),
    num_families=st.integers(1, 9),
    prefix_tokens=st.just(SHORT),
    seed=st.integers(0, 3),
)


def records(**fields: Any) -> list[dict[str, str]]:
    parameters = {'num_families': 8, 'prefix_tokens': SHORT, **fields}
    return list(rows(Parameters(**parameters), EstimatedTokens()))


@given(small)
@settings(max_examples=60, deadline=None)
def test_the_share_asked_for_draws_evenly_from_the_families(parameters: Parameters) -> None:
    found = list(rows(parameters, EstimatedTokens()))
    assert len(found) == parameters.num_records
    drawn = collections.Counter(r['family'] for r in found if r['family'].startswith('family-'))
    assert abs(drawn.total() - parameters.num_records * parameters.reuse_fraction) <= 0.5
    assert len(drawn) == min(parameters.num_families, drawn.total())
    assert max(drawn.values(), default=0) - min(drawn.values(), default=0) <= 1
    alone = [r['family'] for r in found if not r['family'].startswith('family-')]
    assert len(set(alone)) == len(alone)


@given(small)
@settings(max_examples=60, deadline=None)
def test_prompts_begin_alike_within_a_family_and_only_there(parameters: Parameters) -> None:
    """The long beginning is the same byte for byte; others differ within the first KV block."""
    found = list(rows(parameters, EstimatedTokens()))
    prefixes: dict[str, set[str]] = {}
    for row in found:
        prefix, separator, statement = row['prompt'].rpartition(SEPARATOR)
        assert separator
        assert len(prefix) == 4 * SHORT > 4 * len(statement)
        prefixes.setdefault(row['family'], set()).add(prefix)
    assert all(len(of_family) == 1 for of_family in prefixes.values())
    beginnings = [prefix[:64] for [prefix] in prefixes.values()]
    assert len(set(beginnings)) == len(beginnings)
    assert len({row['prompt'] for row in found}) == len({row['id'] for row in found}) == len(found)


def test_families_alternate() -> None:
    """No prompt follows one of its own family, and no round of the families is like another."""
    families = [row['family'] for row in records(num_records=80, reuse_fraction=1.0)]
    assert all(one != next_ for one, next_ in itertools.pairwise(families))
    rounds = [tuple(families[i : i + 8]) for i in range(0, 80, 8)]
    assert all(set(turn) == set(rounds[0]) for turn in rounds)
    assert len(set(rounds)) == 10
    mixed = [row['family'] for row in records(num_records=80, reuse_fraction=0.5)]
    assert {name.split('-')[0] for name in mixed[:20]} == {'family', 'alone'}


def test_equal_arguments_give_equal_files_and_another_seed_gives_others(
    tmp_path: pathlib.Path,
) -> None:
    def made(name: str, seed: int) -> bytes:
        path = tmp_path / name
        write(Parameters(30, 0.5, 4, SHORT, seed=seed), path)
        return path.read_bytes()

    assert made('a.jsonl', 0) == made('b.jsonl', 0)
    one, other = made('c.jsonl', 1), made('a.jsonl', 0)
    assert not set(one.splitlines()) & set(other.splitlines())


def test_the_manifest_holds_every_parameter_and_describes_the_file(tmp_path: pathlib.Path) -> None:
    path = tmp_path / 'prompts.jsonl'
    parameters = Parameters(40, 0.75, 6, SHORT, seed=5, model=MODEL)
    manifest = write(parameters, path)
    assert json.loads(manifest_path(path).read_text()) == manifest
    assert manifest_path(path).name == 'prompts.manifest.json'
    data = path.read_bytes()
    assert manifest['parameters'] == {
        'num_records': 40,
        'reuse_fraction': 0.75,
        'num_families': 6,
        'prefix_tokens': SHORT,
        'seed': 5,
        'model': MODEL,
        'model_revision': None,
    }
    assert manifest['bytes'] == len(data)
    assert manifest['sha256'] == hashlib.sha256(data).hexdigest()
    lines = [json.loads(line) for line in data.splitlines()]
    assert all(line.keys() == {'id', 'family', 'cohort', 'prompt'} for line in lines)
    assert {line['cohort'] for line in lines} == {manifest['cohort']} == {'75'}
    assert manifest['records'] == len(lines) == 40
    assert manifest['records_of_families'] == 30
    assert manifest['records_with_a_document_of_their_own'] == 10
    assert manifest['records_whose_prefix_came_before'] == 24
    assert sorted(p.name for p in tmp_path.iterdir()) == ['prompts.jsonl', 'prompts.manifest.json']


@pytest.mark.parametrize('length', [SHORT, 2048])
def test_the_models_own_tokenizer_measures_the_prefixes(
    tmp_path: pathlib.Path, length: int
) -> None:
    manifest = write(Parameters(20, 0.5, 4, length, model=MODEL), tmp_path / 'p.jsonl')
    assert manifest['tokens_counted_by'] == f'the tokenizer of {MODEL}'
    assert manifest['tokens']['prefix'] == {'least': length, 'mean': length, 'most': length}
    assert 10 < manifest['tokens']['suffix']['least'] < manifest['tokens']['suffix']['most'] < 40
    # And in the midst of whole prompts too, where engines see them.
    lines = [json.loads(line) for line in (tmp_path / 'p.jsonl').read_text().splitlines()]
    tokens = token_counter(MODEL).tokens([line['prompt'] for line in lines])
    by_family: dict[str, list[Any]] = {}
    for line, found in zip(lines, tokens, strict=True):
        by_family.setdefault(line['family'], []).append(found)
    for several in by_family.values():
        assert len({tuple(found[:length]) for found in several}) == 1


def test_what_a_tokenizers_file_cuts_off_is_counted_as_engines_see_it(
    tmp_path: pathlib.Path,
) -> None:
    tokenizer = Tokenizer.from_file(f'{MODEL}/tokenizer.json')
    text = 'a harbor map ' * 20
    whole = tokenizer.encode(text).ids
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding()
    tokenizer.save(str(tmp_path / 'tokenizer.json'))
    found = token_counter(str(tmp_path)).tokens([text, 'a'])
    assert found[0] == whole
    assert len(found[1]) == 1


@pytest.mark.parametrize('model', [None, 'nobody/has-this-model', '/no/such/directory', 'a b'])
def test_without_a_tokenizer_at_hand_the_manifest_says_that_lengths_are_estimated(
    tmp_path: pathlib.Path, model: str | None
) -> None:
    manifest = write(Parameters(3, 0, 4, SHORT, model=model), tmp_path / 'p.jsonl')
    assert manifest['tokens_counted_by'] == 'an estimate of 4 characters a token'


@pytest.mark.parametrize(
    ('fraction', 'cohort', 'ceiling'),
    [(0, '0', 0.0), (0.25, '25', 0.2), (0.75, '75', 0.7), (0.95, '95', 0.9)],
)
def test_the_usual_cohorts_offer_as_much_reuse_as_they_are_named_for(
    fraction: float, cohort: str, ceiling: float
) -> None:
    """Less the first record of each family, and the part of a prompt that is its own."""
    found = records(num_records=200, reuse_fraction=fraction, num_families=10, prefix_tokens=2048)
    assert {row['cohort'] for row in found} == {cohort}
    reuse = ReuseCounter(16)
    reuse.look(EstimatedTokens().tokens([row['prompt'] for row in found]))
    assert reuse.found().ceiling == pytest.approx(ceiling, abs=0.02)


@pytest.mark.parametrize(
    ('arguments', 'said'),
    [
        (('--reuse_fraction', '1.5'), '--reuse_fraction is 1.5; it must be a number from 0 to 1'),
        (('--reuse_fraction', 'nan'), '--reuse_fraction is nan'),
        (('--reuse_fraction', '0', '--num_records', '0'), '--num_records is 0; it must be 1'),
        (('--reuse_fraction', '0', '--num_families', '-1'), '--num_families is -1'),
        (('--reuse_fraction', '0', '--prefix_tokens', '20'), 'the instruction alone has'),
    ],
)
def test_what_cannot_be_made_is_said_and_nothing_is_left(
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    said: str,
) -> None:
    with pytest.raises(SystemExit) as stopped:
        prefix_reuse_dataset.main([*arguments, '--output', str(tmp_path / 'p.jsonl')])
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_an_output_in_no_directory_is_an_error_and_not_a_traceback(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = tmp_path / 'nowhere' / 'p.jsonl'
    with pytest.raises(SystemExit):
        prefix_reuse_dataset.main(['--reuse_fraction', '0', '--output', str(missing)])
    assert 'nowhere' in capsys.readouterr().err


def test_a_run_that_is_interrupted_leaves_the_earlier_file_whole(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / 'p.jsonl'
    write(Parameters(3, 0, 4, SHORT), path)
    before = path.read_bytes()

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(_document_text, 'suffix', interrupted)
    with pytest.raises(KeyboardInterrupt):
        write(Parameters(3, 0, 4, SHORT, seed=1), path)
    assert path.read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ['p.jsonl', 'p.manifest.json']
