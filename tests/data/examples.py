"""Small inputs that several tests of the data build."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from hypothesis import settings
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from longspan.data import TokenStore

# Without a deadline: a busy machine is no failure.
steady = settings(max_examples=60, deadline=None)


def write_tokenizer(folder: Path, vocab: dict[str, int], truncate: int | None = None) -> Path:
    """A tokenizer.json of whole words; unknown ones become the first."""
    tokenizer = Tokenizer(WordLevel(vocab, unk_token=next(iter(vocab))))
    tokenizer.pre_tokenizer = Whitespace()
    if truncate:
        tokenizer.enable_truncation(truncate)
        tokenizer.enable_padding(length=9)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def numbered_store(lengths: Sequence[int]) -> TokenStore:
    """Documents of these lengths in which every token is different: 0, 1, 2, … over the whole store."""
    stops = np.cumsum(lengths)
    starts = stops - np.array(lengths, int)
    return TokenStore.from_documents([np.arange(*bounds) for bounds in zip(starts, stops, strict=True)])
