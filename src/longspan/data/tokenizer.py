"""Text to token ids: bytes as they are, or any `tokenizer.json`."""

import os
from pathlib import Path
from typing import Protocol

import numpy as np
from tokenizers import Tokenizer as _HfTokenizer

from longspan.errors import DataError

BYTES = "bytes"
AUTO = "auto"
# Tokens by which published tokenizers end a text, the more specific first.
_USUAL_ENDS = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "<|eos|>", "[EOS]")


class Tokenizer(Protocol):
    """What the corpus needs from a tokenizer."""

    @property
    def name(self) -> str:
        """Shown in reports and errors."""
        ...

    @property
    def vocab_size(self) -> int:
        """Number of embedding rows that the ids need: the largest id plus one."""
        ...

    def encode_batch(self, texts: list[bytes]) -> list[np.ndarray]:
        """Token ids of each UTF-8 text, all in one unsigned integer type."""
        ...


class ByteTokenizer:
    """Every byte is a token, and one more token (id 256) ends the document."""

    name = BYTES
    vocab_size = 257
    end_id = 256

    def encode_batch(self, texts: list[bytes]) -> list[np.ndarray]:
        """Token ids of each text, uint16, one more than it has bytes."""
        return [np.append(np.frombuffer(text, np.uint8), np.uint16(self.end_id)) for text in texts]


class FileTokenizer:
    """A `tokenizer.json` as the `tokenizers` library reads it.

    The file's own template (a token that begins each text, say) is applied. Its truncation and padding are
    switched off: they would cut and fill documents without a word.

    Args:
        path: a `tokenizer.json`, or a folder that holds one.
        end: token put at the end of each document that does not have it there already. "auto" takes the first
            usual one that the tokenizer defines, and nothing if it defines none. None adds nothing.

    Raises:
        DataError: the file is missing or is no tokenizer, or it has no token `end`.
    """

    def __init__(self, path: str | os.PathLike, end: str | None = AUTO):
        path = Path(path)
        path = path / "tokenizer.json" if path.is_dir() else path
        if not path.is_file():
            raise DataError(f"tokenizer {str(path)!r} does not exist; give a tokenizer.json or {BYTES!r}")
        try:
            self._tokenizer = _HfTokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing more specific
            reason = " ".join(str(error).split())
            raise DataError(f"{path}: not a tokenizer.json ({reason}); give one, or {BYTES!r}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        if end == AUTO:
            end = next((token for token in _USUAL_ENDS if token in ids), None)
        if end is not None and end not in ids:
            raise DataError(f"{path}: no token {end!r} to end documents with; name one it has, or {AUTO!r}")
        self.name = str(path)
        self.vocab_size = max(ids.values(), default=-1) + 1
        self.end_id = None if end is None else ids[end]

    def encode_batch(self, texts: list[bytes]) -> list[np.ndarray]:
        """Token ids of each text, uint16 or uint32; empty where the tokenizer makes nothing of it."""
        dtype = np.uint16 if self.vocab_size <= 1 << 16 else np.uint32
        encodings = self._tokenizer.encode_batch_fast([text.decode() for text in texts])
        return [np.array(self._ended(encoding.ids), dtype) for encoding in encodings]

    def _ended(self, ids: list[int]) -> list[int]:
        return ids if self.end_id is None or ids[-1:] == [self.end_id] else [*ids, self.end_id]


def load_tokenizer(name: str | os.PathLike, end: str | None = AUTO) -> Tokenizer:
    """The tokenizer called "bytes", or the one in a file; see `FileTokenizer` for `end` and the errors."""
    return ByteTokenizer() if name == BYTES else FileTokenizer(name, end)
