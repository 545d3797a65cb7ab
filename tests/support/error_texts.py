"""The texts by which this package tells of a failure, read from its code.

A text is a pattern: what is the same each time, with ``HOLE`` for each part that differs.
"""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

from apache_beam_vllm_dynamo import errors
from apache_beam_vllm_dynamo._diagnosis import KNOWN

PACKAGE = Path(errors.__file__).parent
HOLE = '\0'
LEAST_CHARS = 12
"""Of a text that can be searched for; a shorter one is made of other people's words."""

# Which argument of what says why. An error of Python's own tells of a mistake in this package,
# but where a handler says which argument it does not have.
_REASON = {
    'ConfigurationError': 0,
    'StartError': 0,
    'MissingDependencyError': 0,
    'DevicesBusyError': 0,
    'RuntimeFailedError': 0,
    'ChildExitedError': 1,
    '_given_up': 1,
    'UnreadableFileError': 0,
    'MalformedResponseError': 0,
    'InferenceError': 2,
    'Again': 2,
    'Refused': 2,
    'ModelFiles': 1,
    '_LOGGER.warning': 0,
    '_LOGGER.error': 0,
    '_LOGGER.exception': 0,
    '_log.warning': 0,
    '_log.error': 0,
}
_OF_A_CHILD = ('self._kill_hung', 'engine.replace', 'self._frontend.replace', 'GiveUp')
_TELL_WHY = ('find_not_json', '_find_in_container')
_CHECKS_BEFORE_A_START = ('check_model', 'check_template', 'check_disk', '_check_file')


@dataclasses.dataclass(frozen=True)
class Text:
    """One of them.

    Attributes:
      pattern: The text.
      where: The file and the line, or the cause of a diagnosis.
    """

    pattern: str
    where: str


def all_texts() -> list[Text]:
    """Each that is raised, given as a reason, logged as a warning, or says what a log means."""
    found = [
        Text(pattern, f'{path.name}:{line}')
        for path in sorted(PACKAGE.glob('*.py'))
        for pattern, line in _of_module(path)
        if len(pattern.replace(HOLE, '').strip(' .,:;()[]')) >= LEAST_CHARS
    ]
    found += [Text(first_sentence(diagnosis.hint), diagnosis.cause) for _, diagnosis in KNOWN]
    found += [Text(f'{kind} (', kind) for kind in errors.ErrorKind]
    return list(dict.fromkeys(found))


def first_sentence(text: str) -> str:
    """A text up to its first full stop."""
    return text.partition('. ')[0].rstrip('.')


def matches(entry: str, text: str) -> bool:
    """Whether an entry of a page, with ``…`` for what differs, is the text or its beginning."""
    return re.match('.*'.join(map(re.escape, entry.split('…'))), text, re.DOTALL) is not None


def _of_module(path: Path) -> Iterator[tuple[str, int]]:
    for function in ast.walk(ast.parse(path.read_text())):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for node in ast.walk(function):
                for text in _of_node(node, function, path.stem):
                    yield text, getattr(node, 'lineno', 0)


_Function = ast.FunctionDef | ast.AsyncFunctionDef


def _of_node(node: ast.AST, function: _Function, module: str) -> Iterator[str]:
    if isinstance(node, ast.Call):
        name = ast.unparse(node.func)
        argument = _REASON.get(name)
        if argument is None and (name, module) == ('TypeError', '_base_handler'):
            argument = 0
        if argument is not None and len(node.args) > argument:
            ended = f'{HOLE} ended: '
            behind = {
                'ChildExitedError': ended,
                '_given_up': ended,
                'ModelFiles': f'model: {HOLE}: ',
            }
            for text in _texts(node.args[argument], function):
                yield behind.get(name, '') + re.sub(r'%[sd]', HOLE, text)
        elif name in _OF_A_CHILD:
            yield f'{HOLE} {_pattern(node.args[0])}'
        elif name == 'Check.failed' and function.name in _CHECKS_BEFORE_A_START:
            [label], found = _texts(node.args[0], function), node.args[1]
            yield from (f'{label}: {text}' for text in _texts(found, function))
    elif isinstance(node, ast.Return) and function.name in _TELL_WHY and node.value is not None:
        yield _pattern(node.value)
    elif isinstance(node, ast.JoinedStr) and (function.name, module) == ('__str__', 'errors'):
        yield _pattern(node)


def _texts(argument: ast.expr, function: _Function) -> list[str]:
    """The text, or each that a variable of the function may hold."""
    if not isinstance(argument, ast.Name):
        return [_pattern(argument)]
    found = []
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            [target] = node.targets
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts, strict=True))
            found += [_pattern(value) for name, value in pairs if ast.unparse(name) == argument.id]
    return found


def _pattern(node: ast.expr) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return ''.join(map(_pattern, node.values))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _pattern(node.left) + _pattern(node.right)
    if isinstance(node, ast.BoolOp):
        return _pattern(node.values[-1])  # what is said where nothing else was
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return _pattern(node.func.value)  # a method of a text, such as rstrip
    return HOLE
