"""Documents in a shuffled order, cut into rows of one length.

The corpus is read as an endless stream: one permutation of its documents after the other, one for each epoch.
Row i is tokens [i * sequence, (i + 1) * sequence) of that stream. No token is lost or repeated in an epoch,
no row has padding, and nothing is carried over from one row to the next or saved with a checkpoint: a row is
a function of the seed and its number alone.

Known shortfalls: a document that crosses the end of a row is cut, its rest has to do without the text before
it, and each cut loses one target.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from longspan.data.batch import PackedBatch
from longspan.data.store import TokenStore
from longspan.errors import DataError


class Pieces(NamedTuple):
    """Parts of documents that fill a row, in order; three int64 arrays of shape (pieces,).

    Args:
        documents: number of the document that each piece is from.
        starts: first token of the piece, counted in its document.
        lengths: tokens of the piece, at least 1.
    """

    documents: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray


class Packer(Protocol):
    """Deals documents to rows."""

    def pieces(self, row: int) -> Pieces:
        """What lies in a row; a function of the row's number only."""
        ...


class ConcatenateAndCut:
    """The packer that the module describes.

    Keeps the orders of two epochs: 16 bytes a document each.

    Args:
        lengths: tokens of each document, int64, shape (documents,).
        sequence: tokens of a row.
        seed: chooses the order of the documents, at least 0.
    """

    def __init__(self, lengths: np.ndarray, sequence: int, seed: int):
        self._lengths = lengths
        self._sequence = sequence
        self._seed = seed
        self._epoch_tokens = int(lengths.sum())
        self._epochs: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def pieces(self, row: int) -> Pieces:
        """What lies in a row. Costs two binary searches once the epoch's order is known."""
        begin, end = row * self._sequence, (row + 1) * self._sequence
        parts = []
        while begin < end:
            epoch, start = divmod(begin, self._epoch_tokens)
            stop = min(start + end - begin, self._epoch_tokens)
            parts.append(self._cut(epoch, start, stop))
            begin += stop - start
        return Pieces(*map(np.concatenate, zip(*parts, strict=True)))

    def _cut(self, epoch: int, start: int, stop: int) -> Pieces:
        """Pieces of tokens [start, stop) of an epoch."""
        order, ends = self._order(epoch)
        first, last = np.searchsorted(ends, start, side="right"), np.searchsorted(ends, stop, side="left")
        documents, document_ends = order[first : last + 1], ends[first : last + 1]
        document_starts = document_ends - self._lengths[documents]
        piece_starts = np.maximum(document_starts, start)
        return Pieces(
            documents, piece_starts - document_starts, np.minimum(document_ends, stop) - piece_starts
        )

    def _order(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Documents of an epoch in order, and where each of them ends in it."""
        if epoch not in self._epochs:
            # A row may cross from one epoch to the next: keep two.
            self._epochs = dict(list(self._epochs.items())[-1:])
            order = _permutation(len(self._lengths), self._seed, epoch)
            self._epochs[epoch] = order, np.cumsum(self._lengths[order])
        return self._epochs[epoch]


class PackedRows:
    """Endless packed rows of a store; row i is the same whatever was read before it and on whichever rank.

    Args:
        store: the documents.
        sequence: tokens of a row.
        seed: chooses the order of the documents, at least 0.
        packer: how documents become rows, from (lengths, sequence, seed).

    Raises:
        DataError: an empty store, a row of less than 1 token or a negative seed.
    """

    def __init__(
        self,
        store: TokenStore,
        sequence: int,
        seed: int,
        *,
        packer: Callable[[np.ndarray, int, int], Packer] = ConcatenateAndCut,
    ):
        if not store.num_documents:
            raise DataError("there are no documents to pack; give more of them, or another eval_documents")
        if sequence < 1 or seed < 0:
            raise DataError(f"sequence={sequence} must be at least 1 and seed={seed} at least 0")
        self.store = store
        self.sequence = sequence
        self._packer = packer(store.lengths, sequence, seed)

    def row(self, sample_index: int) -> PackedBatch:
        """One row as a batch of its own."""
        return self.batch([sample_index])

    def batch(self, sample_indices: Sequence[int]) -> PackedBatch:
        """Micro-batch of some rows, one after the other; sample ids are document numbers in the store."""
        pieces = self._pieces(sample_indices)
        # Token j of a piece lies at first + j in the store and at begin + j in the batch.
        first = self.store.offsets[pieces.documents] + pieces.starts
        begin = np.cumsum(pieces.lengths) - pieces.lengths
        index_T = np.arange(pieces.lengths.sum()) + np.repeat(first - begin, pieces.lengths)
        tokens_T = self.store.tokens[index_T]
        return PackedBatch.from_pieces(tokens_T, pieces.lengths, pieces.documents, len(sample_indices))

    def num_targets(self, sample_indices: Sequence[int]) -> int:
        """Targets in some rows, without reading a token: every token of a piece but its first."""
        lengths = self._pieces(sample_indices).lengths
        return int(lengths.sum()) - len(lengths)

    def _pieces(self, sample_indices: Sequence[int]) -> Pieces:
        return Pieces(*map(np.concatenate, zip(*map(self._packer.pieces, sample_indices), strict=True)))


def _permutation(length: int, seed: int, epoch: int) -> np.ndarray:
    """Random order of `length` things, the same with every numpy.

    numpy promises to keep the raw stream of a bit generator, but not what `Generator.permutation` makes of
    it; so the raw numbers are sorted. Equal ones stay in order.
    """
    raw = np.random.Philox(np.random.SeedSequence([seed, epoch])).random_raw(length)
    return np.argsort(raw, kind="stable")
