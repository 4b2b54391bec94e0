"""All tokens of a corpus in one flat array, and what can be said of them without a model."""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from longspan.errors import DataError

_COUNTED_AT_ONCE = 1 << 22


@dataclass(frozen=True, eq=False)
class TokenStore:
    """Documents as token ids, one after the other; a document is known by its number here.

    Args:
        tokens: ids of all documents, uint16 or uint32, shape (tokens,).
        offsets: document starts and the end, int64, shape (documents + 1,), rising from 0 to all tokens.
        keys: hash of each document's text, uint64, shape (documents,): what it is, wherever it lies.

    Raises:
        DataError: offsets that do not rise from 0 to the end, as with an empty document or missing tokens.
    """

    tokens: np.ndarray
    offsets: np.ndarray
    keys: np.ndarray

    def __post_init__(self) -> None:
        """Refuse arrays that do not describe one set of documents."""
        total = len(self.tokens)
        if self.offsets[0] != 0 or self.offsets[-1] != total or (np.diff(self.offsets) <= 0).any():
            raise DataError(f"document offsets must rise from 0 to {total} tokens; drop empty documents")
        if len(self.keys) != self.num_documents:
            raise DataError(f"{len(self.keys)} keys for {self.num_documents} documents; give one for each")

    @classmethod
    def from_documents(
        cls, documents: Sequence[np.ndarray], keys: Sequence[int] | None = None
    ) -> "TokenStore":
        """Store of token arrays; without `keys`, their tokens' `document_key`s."""
        tokens = np.concatenate(documents) if len(documents) else np.empty(0, np.uint16)
        keys = [document_key(document.tobytes()) for document in documents] if keys is None else keys
        return cls(tokens, _offsets([len(document) for document in documents]), np.array(keys, np.uint64))

    @property
    def num_documents(self) -> int:
        """Number of documents."""
        return len(self.offsets) - 1

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all documents."""
        return len(self.tokens)

    @property
    def num_targets(self) -> int:
        """Tokens that have one before them in their document; packing cuts may leave out a few more."""
        return self.num_tokens - self.num_documents

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each document, int64, shape (documents,), each at least 1."""
        return np.diff(self.offsets)

    def document(self, number: int) -> np.ndarray:
        """Token ids of one document, a view."""
        return self.tokens[self.offsets[number] : self.offsets[number + 1]]

    def select(self, chosen: np.ndarray) -> "TokenStore":
        """Store of some documents, numbered anew in their order here; copies their tokens.

        Args:
            chosen: which documents, bool, shape (documents,).
        """
        tokens = self.tokens[np.repeat(chosen, self.lengths)]
        return TokenStore(tokens, _offsets(self.lengths[chosen]), self.keys[chosen])

    def split(self, fraction: float) -> tuple["TokenStore", "TokenStore"]:
        """Training and evaluation documents, told apart by their keys alone.

        A document stays on its side when others come or go, and copies of a document share a side. Only where
        chance leaves a side without targets, the document with the nearest key changes sides; if there is but
        one document with targets, it is for training.

        Args:
            fraction: part of the documents for evaluation, in [0, 1), met on average rather than exactly.

        Raises:
            DataError: fraction outside [0, 1).
        """
        if not 0 <= fraction < 1:
            raise DataError(
                f"eval_documents={fraction} is not a fraction of all documents; choose one in [0, 1)"
            )
        is_eval = self.keys < np.uint64(fraction * 2.0**64)
        if fraction > 0:
            with_targets = np.flatnonzero(self.lengths > 1)
            by_key = with_targets[np.argsort(self.keys[with_targets], kind="stable")]
            is_eval[by_key[:1]] = True
            is_eval[by_key[-1:]] = False
        return self.select(~is_eval), self.select(is_eval)


def document_key(content: bytes) -> int:
    """Hash of a document, spread evenly over 64 bits and the same on every machine."""
    return int.from_bytes(blake2b(content, digest_size=8).digest(), "little")


def unigram_entropy(store: TokenStore) -> float:
    """Entropy in nats of the store's target tokens: the loss of the best model that ignores all context.

    Raises:
        DataError: the store has no target.
    """
    if store.num_targets == 0:
        raise DataError("no document has two tokens, so there is nothing to predict; use longer documents")
    counts = _counts(store.tokens)
    counts -= np.bincount(store.tokens[store.offsets[:-1]], minlength=len(counts))
    p = counts[counts > 0] / store.num_targets
    return float(-(p * np.log(p)).sum())


def _counts(tokens: np.ndarray) -> np.ndarray:
    """How often each id occurs, int64; in parts, because counting makes its input eight bytes wide."""
    counts = np.zeros(int(tokens.max()) + 1, np.int64)
    for start in range(0, len(tokens), _COUNTED_AT_ONCE):
        counts += np.bincount(tokens[start : start + _COUNTED_AT_ONCE], minlength=len(counts))
    return counts


def _offsets(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
