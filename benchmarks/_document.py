"""A page of headings, paragraphs, tables and figures, as Markdown and as HTML that needs no net."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Mapping, Sequence
from typing import TypeAlias


@dataclasses.dataclass(frozen=True)
class Heading:
    """A heading; the first of a page is its title."""

    text: str
    level: int = 2


@dataclasses.dataclass(frozen=True)
class Paragraph:
    """A paragraph; the important ones stand out."""

    text: str
    important: bool = False


@dataclasses.dataclass(frozen=True)
class Table:
    """A table; all columns but the first hold figures, unless all hold text."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    text: bool = False


@dataclasses.dataclass(frozen=True)
class Plot:
    """A plot; HTML shows it, and Markdown names it."""

    name: str
    caption: str


@dataclasses.dataclass(frozen=True)
class Code:
    """Lines to copy."""

    text: str


Block: TypeAlias = Heading | Paragraph | Table | Plot | Code

_STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem;
  color: #222; background: #fff; }
h1, h2, h3 { line-height: 1.2; }
table { border-collapse: collapse; margin: 1rem 0; display: block; overflow-x: auto; }
th, td { padding: .3rem .7rem; border-bottom: 1px solid #ddd; text-align: right;
  white-space: nowrap; }
th:first-child, td:first-child, .text th, .text td { text-align: left; }
.text td { white-space: pre-line; overflow-wrap: anywhere; }
figure { margin: 1.5rem 0; }
figure svg { width: 100%; height: auto; }
figcaption { color: #555; }
.important { border-left: 4px solid #228833; background: #f2f8f3; padding: .6rem 1rem; }
pre { background: #f4f4f4; padding: .6rem 1rem; white-space: pre-wrap; overflow-wrap: anywhere; }
"""


def to_markdown(blocks: Sequence[Block]) -> str:
    """The page as Markdown, which names the plots."""
    return '\n\n'.join(map(_markdown, blocks)) + '\n'


def to_html(blocks: Sequence[Block], plots: Mapping[str, str]) -> str:
    """The page as HTML; ``plots`` is the SVG of each, and one that is missing is left out."""
    titles = [block.text for block in blocks if isinstance(block, Heading)]
    body = '\n'.join(filter(None, (_html(block, plots) for block in blocks)))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<title>{html.escape(titles[0])}</title>\n<style>{_STYLE}</style>\n</head>\n'
        f'<body>\n{body}\n</body>\n</html>\n'
    )


def _markdown(block: Block) -> str:
    match block:
        case Heading(text, level):
            return f'{"#" * level} {text}'
        case Paragraph(text, important):
            return f'**{text}**' if important else text
        case Table(header, rows, text):
            aligned = [':--', *[':--' if text else '--:'] * (len(header) - 1)]
            return '\n'.join(
                f'| {" | ".join(map(_cell, row))} |' for row in (header, aligned, *rows)
            )
        case Code(text):
            return f'```\n{text}\n```'
        case Plot(_, caption):
            return f'- {caption}: in `report.html`'


def _cell(text: str) -> str:
    return '<br>'.join(text.replace('|', r'\|').splitlines())


def _html(block: Block, plots: Mapping[str, str]) -> str:
    match block:
        case Heading(text, level):
            return f'<h{level}>{html.escape(text)}</h{level}>'
        case Paragraph(text, important):
            kind = ' class="important"' if important else ''
            return f'<p{kind}>{html.escape(text)}</p>'
        case Table(header, rows, text):
            kind = ' class="text"' if text else ''
            head = ''.join(f'<th>{html.escape(cell)}</th>' for cell in header)
            body = '\n'.join(
                f'<tr>{"".join(f"<td>{html.escape(cell)}</td>" for cell in row)}</tr>'
                for row in rows
            )
            top = f'<table{kind}>\n<thead><tr>{head}</tr></thead>'
            return f'{top}\n<tbody>\n{body}\n</tbody>\n</table>'
        case Code(text):
            return f'<pre>{html.escape(text)}</pre>'
        case Plot(name, caption):
            if name not in plots:
                return ''
            escaped = html.escape(caption)
            return (
                f'<figure id="plot-{name}" role="img" aria-label="{escaped}">\n{plots[name]}\n'
                f'<figcaption>{escaped}</figcaption>\n</figure>'
            )
