"""Reading the pages of the documentation: their blocks of code, tables and links.

A block of Python either begins with its imports, and then it is run as it stands, or it is a
fragment, and then it may use the public names of the package and those of ``FRAGMENT_NAMES``.
"""

from __future__ import annotations

import dataclasses
import re
import textwrap
from pathlib import Path

from tests.support.processes import ROOT

PAGES = [
    ROOT / 'README.md',
    ROOT / 'CONTRIBUTING.md',
    *sorted((ROOT / 'docs').glob('*.md')),
    ROOT / 'containers' / 'dataflow' / 'README.md',
]

# What a fragment may use beside Python's own names and those of the package.
FRAGMENT_NAMES = ('KeyedModelHandler', 'RunInference', 'beam', 'handler', 'prompts', 'results')

_BLOCK = re.compile(r'^( *)```(\w+)\n(.*?)^\1```$', re.MULTILINE | re.DOTALL)
_LINK = re.compile(r'\]\((?![a-z]+:)([^()\s#]*)(?:#([^()\s]*))?\)')


@dataclasses.dataclass(frozen=True)
class Block:
    """A block of code on a page.

    Attributes:
      page: The page.
      line: The line of its first line of code.
      text: What it says, without its indentation.
    """

    page: Path
    line: int
    text: str

    def __str__(self) -> str:
        return f'{self.page.relative_to(ROOT)}:{self.line}'

    @property
    def is_whole(self) -> bool:
        """Whether it begins with its imports, and so needs nothing else."""
        return self.text.startswith(('import ', 'from '))


def blocks(language: str) -> list[Block]:
    """The blocks of code in a language, on all pages."""
    found = []
    for page in PAGES:
        text = page.read_text()
        for match in _BLOCK.finditer(text):
            if match[2] == language:
                line = text.count('\n', 0, match.start(3)) + 1
                found.append(Block(page, line, textwrap.dedent(match[3])))
    return found


def first_column(page: Path) -> list[str]:
    """What stands in code, alone, in the first column of the page's tables."""
    return re.findall(r'^\| `([^`]+)` \|', page.read_text(), re.MULTILINE)


def links(page: Path) -> list[tuple[str, str]]:
    """The links of a page to files and headings, each as the path and what is behind the #."""
    return [(match[1], match[2] or '') for match in _LINK.finditer(page.read_text())]


def anchors(page: Path) -> set[str]:
    """The names of the headings of a page, as links spell them."""
    headings = re.findall(r'^#+ (.+)$', page.read_text(), re.MULTILINE)
    plain = (re.sub(r'[^\w\s-]', '', heading.lower()) for heading in headings)
    return {re.sub(r'\s+', '-', heading.strip()) for heading in plain}
