"""One micro-batch of packed rows: the contract between the data and everything that consumes tokens.

Suffix legend: T tokens of the whole micro-batch, rows times sequence, flattened. A *piece* is a document, or
the part of one that lies in one row.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain

import numpy as np

from longspan.errors import DataError

IGNORE = -100
PADDING = -1


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """Rows of packed pieces, flattened; the arrays are read-only.

    Args:
        tokens_T: token ids, int64.
        positions_T: place of each token in its piece, int64, from 0 in each.
        labels_T: next token of the same piece, int64; IGNORE at its end and where nothing is to be learned.
        weights_T: how much each label counts in the loss, float32; 0 exactly where the label is IGNORE.
        cu_seqlens: piece starts and the end, int64, shape (pieces + 1,), rising from 0 to T; every row's
            border is one of them.
        sample_ids: document that each piece is from, int64, shape (pieces,); PADDING fills up a row.
        rows: number of rows, all of the same length.

    Raises:
        DataError: the arrays contradict each other, so that training on them would go wrong without a word.
    """

    tokens_T: np.ndarray
    positions_T: np.ndarray
    labels_T: np.ndarray
    weights_T: np.ndarray
    cu_seqlens: np.ndarray
    sample_ids: np.ndarray
    rows: int

    def __post_init__(self) -> None:
        """Freeze the arrays, and refuse a batch that breaks its own contract."""
        self._freeze()
        broken = next(chain(self._broken_bounds(), self._broken_targets()), None)
        if broken:
            raise DataError(f"packed batch: {broken}; build it with from_pieces or from_documents")

    @classmethod
    def from_pieces(
        cls,
        tokens_T: np.ndarray,
        lengths: np.ndarray,
        sample_ids: np.ndarray,
        rows: int,
        *,
        weights_T: np.ndarray | None = None,
    ) -> "PackedBatch":
        """Batch of pieces that lie one after the other and fill `rows` rows.

        Args:
            tokens_T: token ids, int.
            lengths: tokens of each piece, int, shape (pieces,).
            sample_ids: document of each piece, or PADDING, int, shape (pieces,).
            rows: number of rows.
            weights_T: how much it counts to predict *this* token; shifted here, like labels. None means 1.
        """
        tokens_T = tokens_T.astype(np.int64)
        cu_seqlens = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        positions_T = np.arange(len(tokens_T)) - np.repeat(cu_seqlens[:-1], lengths)
        wanted_T = np.ones(len(tokens_T), np.float32) if weights_T is None else weights_T.astype(np.float32)
        # Nothing predicts the first token of a piece, and padding is not to be predicted.
        wanted_T[(positions_T == 0) | np.repeat(sample_ids == PADDING, lengths)] = 0
        weights_T = np.roll(wanted_T, -1)
        return cls(
            tokens_T=tokens_T,
            positions_T=positions_T,
            labels_T=np.where(weights_T == 0, IGNORE, np.roll(tokens_T, -1)),
            weights_T=weights_T,
            cu_seqlens=cu_seqlens,
            sample_ids=sample_ids.astype(np.int64),
            rows=rows,
        )

    @classmethod
    def from_documents(
        cls,
        rows: Sequence[Sequence[np.ndarray]],
        sequence: int,
        *,
        pad_id: int = 0,
        weights: Sequence[Sequence[np.ndarray]] | None = None,
    ) -> "PackedBatch":
        """Batch with exactly these documents in each row, numbered from 0, each row filled up with padding.

        Args:
            rows: for each row its documents, each a non-empty array of token ids; a row may have none.
            sequence: tokens of a row.
            pad_id: token id of the padding, which is a piece of its own at the end of a row.
            weights: for each document how much it counts to predict each of its tokens; None means 1.

        Raises:
            DataError: a row is longer than `sequence`, a document is empty, or weights do not fit theirs.
        """
        if weights is None:
            weights = [[np.ones(len(document)) for document in row] for row in rows]
        elif [[*map(len, row)] for row in weights] != [[*map(len, row)] for row in rows]:
            raise DataError("weights do not fit their documents; give one for each token")
        pieces, wanted, sample_ids, documents = [], [], [], 0
        for index, row in enumerate(rows):
            padding = sequence - sum(map(len, row))
            if padding < 0:
                raise DataError(f"row {index} has {-padding} tokens more than sequence={sequence}; move some")
            pieces += row
            wanted += weights[index]
            sample_ids += range(documents, documents + len(row))
            documents += len(row)
            if padding:
                pieces.append(np.full(padding, pad_id))
                wanted.append(np.zeros(padding))
                sample_ids.append(PADDING)
        return cls.from_pieces(
            np.concatenate(pieces),
            np.array([*map(len, pieces)]),
            np.array(sample_ids),
            len(rows),
            weights_T=np.concatenate(wanted),
        )

    @property
    def sequence(self) -> int:
        """Tokens of one row."""
        return len(self.tokens_T) // self.rows

    @property
    def num_targets(self) -> int:
        """Number of labels that are learned."""
        return int(np.count_nonzero(self.labels_T != IGNORE))

    @property
    def piece_lengths_T(self) -> np.ndarray:
        """Tokens of the piece that each token is in, int64, shape (T,)."""
        lengths = np.diff(self.cu_seqlens)
        return np.repeat(lengths, lengths)

    def without_targets(self) -> "PackedBatch":
        """The same tokens with nothing to learn, for a rank that must compute along and add nothing."""
        return replace(
            self, labels_T=np.full_like(self.labels_T, IGNORE), weights_T=np.zeros_like(self.weights_T)
        )

    def _freeze(self) -> None:
        for name in (field.name for field in fields(self) if field.type is np.ndarray):
            array = getattr(self, name)
            dtype = np.dtype(np.float32 if name == "weights_T" else np.int64)
            if array.dtype != dtype or array.ndim != 1:
                raise DataError(f"packed batch: {name} is {array.ndim}-D {array.dtype}; give 1-D {dtype}")
            # A view, so that the caller's own array stays as writable as it was.
            array = array.view()
            array.flags.writeable = False
            object.__setattr__(self, name, array)

    def _broken_bounds(self) -> Iterator[str]:
        total, bounds = len(self.tokens_T), self.cu_seqlens
        for name in ("positions_T", "labels_T", "weights_T"):
            if len(getattr(self, name)) != total:
                yield f"{name} has {len(getattr(self, name))} values for {total} tokens"
        if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != total or (np.diff(bounds) <= 0).any():
            yield f"cu_seqlens must rise from 0 to {total}, got {bounds}"
        if len(self.sample_ids) != len(bounds) - 1 or self.sample_ids.min() < PADDING:
            yield f"{len(bounds) - 1} pieces need a sample id each, {PADDING} or more, got {self.sample_ids}"
        if self.rows < 1 or total % self.rows:
            yield f"{total} tokens are not {self.rows} rows of one length"
        if not np.isin(np.arange(self.rows) * self.sequence, bounds).all():
            yield f"a piece crosses the border of a row of {self.sequence} tokens"
        if (self.positions_T != np.arange(total) - np.repeat(bounds[:-1], np.diff(bounds))).any():
            yield "positions_T must count from 0 in each piece"

    def _broken_targets(self) -> Iterator[str]:
        is_target_T = self.labels_T != IGNORE
        is_padding_T = np.repeat(self.sample_ids == PADDING, np.diff(self.cu_seqlens))
        if self.tokens_T.min() < 0:
            yield f"token id {self.tokens_T.min()} is negative"
        if is_target_T[self.cu_seqlens[1:] - 1].any():
            yield "a label crosses the end of its piece"
        if is_target_T[is_padding_T].any():
            yield "padding has a label"
        if (self.labels_T != np.roll(self.tokens_T, -1))[is_target_T].any():
            yield "a label is not the next token"
        if not np.isfinite(self.weights_T).all() or (np.sign(self.weights_T) != is_target_T).any():
            yield "weights_T must be positive where there is a label and 0 elsewhere"
