"""What MkDocs is told beside mkdocs.yml: pages from elsewhere, links out of docs/, docstrings.

The pages in docs/ are read in the repository too. There a link leads to any file, while a site
has only what is in docs/: what is linked to is copied into it, and the link follows. Docstrings
are written for ``help()`` in the dialect that Python's own are written in, of which Markdown
does not know the roles and the ``::`` before an example. A signature is shown with the values of
its defaults, not with the names that the code has for them.

MkDocs calls the functions whose names begin with ``on_``.
"""

from __future__ import annotations

import functools
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

# Files of the repository that are pages of the site.
PAGES = {
    'CONTRIBUTING.md': 'contributing.md',
    'benchmarks/RESULTS.md': 'measurements.md',
    'containers/dataflow/README.md': 'container.md',
    'README.md': 'quickstart.md',
}
COPIES = 'source'  # where all other files lie in the site

_LINK = re.compile(r'(?<=\]\()(?![a-z]+:|#)([^()\s#]+)')
_DEFAULT = re.compile(r'^(DEFAULT_\w+) = ([\d.]+)\b', re.MULTILINE)
_ROLE = re.compile(r':(?:class|data|func|meth|attr|mod):<code>(~?)([\w.]+)</code>')


def site_path(path: str) -> str:
    """Where a file of the repository lies in the site."""
    if path.startswith('docs/'):
        return path.removeprefix('docs/')
    return PAGES.get(path) or f'{COPIES}/{path}'


def repository_path(page: str) -> str:
    """The file of the repository that a page of the site is made of."""
    by_page = {site: own for own, site in PAGES.items()}
    return by_page.get(page) or f'docs/{page}'


def link_target(page: str, link: str) -> str:
    """The file of the repository that a link on the page means; of a directory its README."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(repository_path(page)), link))
    return f'{path}/README.md' if (ROOT / path).is_dir() else path


def with_site_links(page: str, markdown: str) -> str:
    """The text of a page, its links leading to where the files lie in the site."""
    here = posixpath.dirname(page)

    def moved(match: re.Match[str]) -> str:
        return posixpath.relpath(site_path(link_target(page, match[1])), here or '.')

    return _LINK.sub(moved, markdown)


def linked_files(page: str, markdown: str) -> Iterator[str]:
    """The files of the repository that a page links to and that are no pages themselves."""
    for match in _LINK.finditer(markdown):
        target = link_target(page, match[1])
        if site_path(target).startswith(f'{COPIES}/') and (ROOT / target).is_file():
            yield target


def with_references(html: str) -> str:
    """Docstrings as Markdown made them, with links for their roles and without ``::``."""
    anchors = re.findall(r'<h\d id="(apache_beam_vllm_dynamo\.[\w.]+)"', html)

    def reference(match: re.Match[str]) -> str:
        name = match[2]
        whole = next((a for a in anchors if a == name or a.endswith(f'.{name}')), name)
        shown = name.rpartition('.')[2] if match[1] else name
        return f'<autoref identifier="{whole}"><code>{shown}</code></autoref>'

    html = _ROLE.sub(reference, html).replace('<p>::</p>', '')
    return html.replace('::</p>', ':</p>')


@functools.cache
def defaults() -> dict[str, str]:
    """The numbers behind the names of defaults in signatures, as the code writes them."""
    sources = (ROOT / 'apache_beam_vllm_dynamo').glob('*.py')
    return dict(pair for path in sources for pair in _DEFAULT.findall(path.read_text()))


def with_defaults(html: str) -> str:
    """The page with numbers in place of the names of defaults."""
    return re.sub(r'\bDEFAULT_\w+', lambda match: defaults().get(match[0], match[0]), html)


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages from elsewhere, and all that pages link to."""
    from mkdocs.structure.files import File

    def add(own: str) -> None:
        file = File.generated(config, site_path(own), abs_src_path=str(ROOT / own))
        files.append(file)

    for own in PAGES:
        add(own)
    linked = {
        own
        for file in files.documentation_pages()
        for own in linked_files(file.src_uri, file.content_string)
    }
    for own in sorted(linked):
        add(own)
    return files


def on_page_markdown(markdown: str, page: Any, **_: object) -> str:
    """Mends the links of a page."""
    return with_site_links(page.file.src_uri, markdown)


def on_page_content(html: str, **_: object) -> str:
    """Mends the docstrings on a page."""
    return with_defaults(with_references(html))
