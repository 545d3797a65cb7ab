"""Tokens of a text, by the model's own tokenizer where it is at hand, else by an estimate."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Protocol

from huggingface_hub import try_to_load_from_cache
from tokenizers import Tokenizer

# English prose in the vocabularies of current models has four to five characters a token.
ESTIMATED_CHARACTERS_PER_TOKEN = 4
# One token in every byte-pair vocabulary; fills a text up to an exact number.
_FILLER = ' a'


class TokenCounter(Protocol):
    """Knows the tokens of texts.

    Attributes:
      counted_by: What it knows them by, for a manifest.
    """

    counted_by: str

    def tokens(self, texts: Sequence[str]) -> list[Sequence[Hashable]]:
        """The tokens of each text as the engines see them, or stand-ins that are equal alike."""

    def cut(self, texts: Sequence[str], length: int) -> list[str]:
        """The beginning of each text with so many tokens; a text that is shorter stays as it is."""


class ModelTokens:
    """By a model's tokenizer.

    Args:
      tokenizer: The tokenizer.
      model: Whose it is.
    """

    def __init__(self, tokenizer: Tokenizer, model: str) -> None:
        self.counted_by = f'the tokenizer of {model}'
        self._tokenizer = tokenizer

    def tokens(self, texts: Sequence[str]) -> list[Sequence[Hashable]]:
        return [encoding.ids for encoding in self._tokenizer.encode_batch(list(texts))]

    def cut(self, texts: Sequence[str], length: int) -> list[str]:
        encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [
            _cut(text, [end for _, end in encoding.offsets], length)
            for text, encoding in zip(texts, encodings, strict=True)
        ]


class EstimatedTokens:
    """By the number of characters."""

    counted_by = f'an estimate of {ESTIMATED_CHARACTERS_PER_TOKEN} characters a token'

    def tokens(self, texts: Sequence[str]) -> list[Sequence[Hashable]]:
        size = ESTIMATED_CHARACTERS_PER_TOKEN
        return [[text[i : i + size] for i in range(0, len(text), size)] for text in texts]

    def cut(self, texts: Sequence[str], length: int) -> list[str]:
        return [text[: length * ESTIMATED_CHARACTERS_PER_TOKEN] for text in texts]


def token_counter(model: str | None, revision: str | None = None) -> TokenCounter:
    """By the tokenizer of ``model`` if it lies on this machine; nothing is downloaded.

    Args:
      model: A directory, or a hub name whose files may be in the hub's local cache.
      revision: Of the hub's model.
    """
    path = _tokenizer_file(model, revision) if model else None
    if path is None or model is None:
        return EstimatedTokens()
    return ModelTokens(_load(path), model)


@functools.lru_cache(maxsize=1)
def _load(path: Path) -> Tokenizer:
    tokenizer: Tokenizer = Tokenizer.from_file(str(path))
    # The file may ask for both, which engines do not do.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _tokenizer_file(model: str, revision: str | None) -> Path | None:
    path = Path(model) / 'tokenizer.json'
    if path.is_file():
        return path
    if Path(model).is_dir():
        return None
    try:
        cached = try_to_load_from_cache(model, 'tokenizer.json', revision=revision)
    except ValueError:  # no name that a hub could know
        return None
    return Path(cached) if isinstance(cached, str) else None


def _cut(text: str, ends: Sequence[int], length: int) -> str:
    if len(ends) <= length:
        return text
    # Within a word the rest of it could change the tokens of its beginning.
    kept = length
    while kept and not text[ends[kept - 1] : ends[kept - 1] + 1].isspace():
        kept -= 1
    if not kept:
        return text[: ends[length - 1]]
    return text[: ends[kept - 1]] + _FILLER * (length - kept)
