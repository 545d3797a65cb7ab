"""What the documentation says of the code is so: its Python, its names, its links."""

from __future__ import annotations

import ast
import builtins
import dataclasses
import importlib.util
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import apache_beam as beam
import pytest
import yaml
from apache_beam.ml.inference.base import KeyedModelHandler, RunInference
from apache_beam.options.pipeline_options import PipelineOptions

import apache_beam_vllm_dynamo as package
from apache_beam_vllm_dynamo import (
    DynamoRuntimeConfig,
    ErrorKind,
    VLLMChatModelHandler,
    VLLMCompletionsModelHandler,
    _dynamo_runtime,
    _metrics,
    _runtime,
    beam_yaml,
    config,
    doctor,
)
from apache_beam_vllm_dynamo._config_mapping import handler_from_mapping
from tests.support import documents
from tests.support.documents import Block
from tests.support.processes import ROOT

DOCS = ROOT / 'docs'
PYTHON = documents.blocks('python')
CHOICES = ('EngineKind', 'RouterMode', 'KVEventMode', 'Discovery')


# Code -------------------------------------------------------------------------------------------


def ids(block: Block) -> str:
    return str(block)


@pytest.mark.parametrize('block', PYTHON, ids=ids)
def test_python_on_a_page_uses_names_that_exist(block: Block) -> None:
    tree = ast.parse(block.text, filename=str(block))
    bound = {name for node in ast.walk(tree) for name in bound_by(node)}
    known = set(dir(builtins)) if block.is_whole else {
        *dir(builtins), *package.__all__, *documents.FRAGMENT_NAMES,
    }  # fmt: skip
    used = {
        node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }
    assert used <= bound | known


def bound_by(node: ast.AST) -> Iterator[str]:
    """The names that a piece of code gives a meaning to."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    elif isinstance(node, (ast.Import, ast.ImportFrom)):
        for alias in node.names:
            yield alias.asname or alias.name.partition('.')[0]
    elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        yield node.name
    elif isinstance(node, ast.arg):
        yield node.arg


class Built:
    """In place of the result of a run."""

    def wait_until_finish(self) -> str:
        return 'DONE'


def build(pipeline: beam.Pipeline) -> Built:
    """In place of a run, which takes engines: makes what a runner would get."""
    pipeline.to_runner_api()
    return Built()


@pytest.mark.parametrize('block', PYTHON, ids=ids)
def test_python_on_a_page_runs_up_to_the_engines(
    block: Block, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beam.Pipeline, 'run', build)
    names: dict[str, Any] = {'__name__': 'page'} if block.is_whole else fragment_names()
    exec(compile(block.text, str(block), 'exec'), names)  # the point of the test


def fragment_names() -> dict[str, Any]:
    """What a fragment finds there; its pipeline is built and not run."""
    handler = VLLMCompletionsModelHandler('model')
    prompts = beam.Pipeline() | beam.Create(['a prompt'])
    names = {name: getattr(package, name) for name in package.__all__} | {
        'KeyedModelHandler': KeyedModelHandler,
        'RunInference': RunInference,
        'beam': beam,
        'handler': handler,
        'prompts': prompts,
        'results': prompts | 'Results' >> package.LLMInference(handler),
    }
    assert set(documents.FRAGMENT_NAMES) <= set(names)
    return names


def test_settings_in_yaml_on_a_page_are_those_of_a_handler() -> None:
    found = [block for block in documents.blocks('yaml') if block.text.startswith('model_name')]
    assert {block.page.name for block in found} == {'configuration.md', 'doctor.md'}
    for block in found:
        handler_from_mapping('completions', yaml.safe_load(block.text))


def test_pages_with_python_are_found() -> None:
    pages = {block.page.name for block in PYTHON}
    assert {'README.md', 'guide.md', 'index.md', 'metrics.md', 'configuration.md'} <= pages
    assert any(block.is_whole for block in PYTHON)
    assert not all(block.is_whole for block in PYTHON)


# Links ------------------------------------------------------------------------------------------


@pytest.mark.parametrize('page', documents.PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings_that_are_there(page: Path) -> None:
    for path, anchor in documents.links(page):
        target = page if not path else (page.parent / path).resolve()
        assert target.exists(), path
        if anchor:
            assert anchor in documents.anchors(target), f'{path}#{anchor}'


# Commands and files -----------------------------------------------------------------------------

TARGETS = set(re.findall(r'^([a-z-]+):', (ROOT / 'Makefile').read_text(), re.MULTILINE))
READERS_OWN = {'quick_start.py'}
FILES_LIE_IN = (ROOT, ROOT / 'apache_beam_vllm_dynamo', ROOT / 'tests')
OURS = ('apache_beam', 'apache_beam_vllm_dynamo', 'benchmarks', 'examples', 'tools')


@pytest.mark.parametrize('page', documents.PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_and_files_that_a_page_names_are_there(page: Path) -> None:
    text = page.read_text()
    for words in re.findall(r'(?:^|`)make ([a-z-]+(?: [a-z-]+)*)', text, re.MULTILINE):
        assert set(words.split()) <= TARGETS, words
    for module in re.findall(r'python -m ([\w.]+)', text):
        if module.partition('.')[0] in OURS:
            assert importlib.util.find_spec(module), module
    for name in set(re.findall(r'`([\w/]+\.py)[` ]', text)) - READERS_OWN:
        assert any((directory / name).exists() for directory in FILES_LIE_IN), name


# Metrics ----------------------------------------------------------------------------------------


def test_the_page_of_metrics_names_those_of_the_code_and_no_others() -> None:
    page = set(documents.first_column(DOCS / 'metrics.md'))
    assert page == {
        *metric_names(_metrics),
        *metric_names(_runtime),
        *metric_names(_dynamo_runtime),
    }


def metric_names(module: ModuleType) -> Iterator[str]:
    """The names that a module gives to metrics, what varies in them as on the page."""
    assert module.__file__ is not None
    for node in ast.walk(ast.parse(Path(module.__file__).read_text())):
        if isinstance(node, ast.Subscript) and is_name(node.value, 'sums'):
            yield shown(node.slice)
        elif isinstance(node, ast.Call) and getattr(node.func, 'attr', '') in (
            'distribution', '_count',
        ):  # fmt: skip
            if isinstance(node.args[-1], ast.Constant):
                yield shown(node.args[-1])
            elif isinstance(node.args[0], ast.Constant):
                yield shown(node.args[0])
        elif isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, ast.Dict):
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            if is_name(target, 'totals') or is_name(target, 'counts'):
                yield from (shown(key) for key in dict_keys(node.value))


def is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def dict_keys(node: ast.Dict) -> Iterator[ast.expr]:
    for key, value in zip(node.keys, node.values, strict=True):
        if key is not None:
            yield key
        elif isinstance(value, ast.DictComp):
            yield value.key


def shown(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    assert isinstance(node, ast.JoinedStr)
    text = ''.join(
        str(part.value) if isinstance(part, ast.Constant) else '{}' for part in node.values
    )
    return {
        'finish_reason_{}': 'finish_reason_<reason>',
        'failed_{}': 'failed_<kind>',
        '{}{}': f'{_runtime.ENGINE_REQUESTS}<n>',
    }[text]


def test_every_kind_of_failure_is_on_the_page_of_metrics() -> None:
    text = (DOCS / 'metrics.md').read_text()
    named = set(re.findall(r'`failed_([a-z_]+)`', text)) - {'batches_counter'}
    assert named == {kind.value for kind in ErrorKind}


def test_the_page_of_metrics_reads_counters_as_it_says() -> None:
    [block] = [block for block in PYTHON if block.page.name == 'metrics.md']
    names: dict[str, Any] = {}
    exec(compile(block.text, str(block), 'exec'), names)
    with beam.Pipeline(options=PipelineOptions(['--runner=FnApiRunner'])) as pipeline:
        _ = pipeline | beam.Create([3]) | beam.Map(count_prompt_tokens)
    assert names['counters'](pipeline.result) == {'prompt_tokens': 3}


def count_prompt_tokens(number: int) -> None:
    _metrics.InferenceMetrics().count({'prompt_tokens': number})


# Settings ---------------------------------------------------------------------------------------


def explained(thing: object) -> dict[str, str]:
    """What a docstring says of each argument or attribute, by its name."""
    found: dict[str, str] = {}
    section = name = ''
    for line in (inspect.getdoc(thing) or '').splitlines():
        if heading := re.fullmatch(r'(Args|Attributes|Raises|Returns):', line):
            section = heading[1]
        elif section in ('Args', 'Attributes') and line.strip():
            entry = re.fullmatch(r'  (\*{0,2}\w+): (.*)', line)
            name = entry[1] if entry else name
            found[name] = f'{found.get(name, "")} {entry[2] if entry else line.strip()}'
    return found


def taken(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """What a function takes, as a docstring names it."""
    stars: dict[object, str] = {inspect.Parameter.VAR_KEYWORD: '**'}
    return {
        stars.get(parameter.kind, '') + name: parameter
        for name, parameter in inspect.signature(function).parameters.items()
        if name not in ('self', 'cls')
    }


RECORDS = [
    value for name in package.__all__ if dataclasses.is_dataclass(value := getattr(package, name))
]


@pytest.mark.parametrize('record', RECORDS, ids=lambda record: record.__name__)
def test_every_field_of_a_public_record_is_explained(record: Any) -> None:
    fields = [field.name for field in dataclasses.fields(record)]
    assert sorted(explained(record)) == sorted(fields)


CALLABLES = [
    VLLMCompletionsModelHandler,
    package.LLMInference,
    package.PrefixBatchElements,
    package.ChildExitedError,
    package.StartTimeoutError,
    package.RuntimeFailedError,
    package.InferenceFailedError,
    DynamoRuntimeConfig.for_devices,
]


@pytest.mark.parametrize('function', CALLABLES, ids=lambda function: function.__name__)
def test_every_argument_is_explained_in_order_with_its_default(
    function: Callable[..., Any],
) -> None:
    arguments, texts = taken(function), explained(function)
    assert list(texts) == list(arguments)
    for name, parameter in arguments.items():
        default = parameter.default
        if isinstance(default, (int, float)) and not isinstance(default, bool) and default > 1:
            assert f'{default:,.0f}' in texts[name], name


def test_the_chat_handler_explains_what_it_has_beside_the_other() -> None:
    more = taken(VLLMChatModelHandler).keys() - taken(VLLMCompletionsModelHandler).keys()
    assert list(explained(VLLMChatModelHandler)) == ['chat_template_path'] == list(more)


def test_every_kind_of_failure_and_every_choice_is_explained() -> None:
    assert list(explained(ErrorKind)) == [kind.name for kind in ErrorKind]
    source = Path(config.__file__).read_text()
    for name in CHOICES:
        [text] = re.findall(
            rf'^{name} = Literal\[.*?\]\n"""(.*?)"""', source, re.MULTILINE | re.DOTALL
        )
        for choice in get_args(getattr(config, name)):
            assert f"``'{choice}'``" in text, (name, choice)


def test_every_public_name_is_rendered_once() -> None:
    rendered = [
        directive
        for page in ('configuration.md', 'reference.md')
        for directive in re.findall(r'^::: (\S+)$', (DOCS / page).read_text(), re.MULTILINE)
    ]
    names = {f'{getattr(package, name).__module__}.{name}' for name in package.__all__}
    names |= {f'{config.__name__}.{name}' for name in CHOICES}
    names |= {
        f'{package.__name__}.errors',
        f'{beam_yaml.__name__}',
        f'{beam_yaml.__name__}.llm_inference',
        f'{beam_yaml.__name__}.AnswerRow',
        f'{doctor.__name__}',
    }
    assert sorted(rendered) == sorted(names)
