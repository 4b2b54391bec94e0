import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longspan.data import ConcatenateAndCut, PackedRows, Pieces
from longspan.errors import DataError
from tests.data.examples import numbered_store, steady

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=12)
SEQUENCE = st.integers(1, 24)
SEED = st.integers(0, 2**32)


def stream(rows: PackedRows, num_tokens: int) -> np.ndarray:
    """The first tokens of all rows, one after the other."""
    count = -(-num_tokens // rows.sequence)
    return np.concatenate([rows.row(index).tokens_T for index in range(count)])[:num_tokens]


@steady
@given(LENGTHS, SEQUENCE, SEED)
def test_each_epoch_holds_every_document_once_and_whole(lengths, sequence, seed):
    store = numbered_store(lengths)
    epochs = stream(PackedRows(store, sequence, seed), 3 * store.num_tokens).reshape(3, -1)
    whole = {tuple(store.document(number).tolist()) for number in range(len(lengths))}
    for epoch in epochs:
        starts = np.flatnonzero(np.isin(epoch, store.offsets[:-1]))
        assert {tuple(document.tolist()) for document in np.split(epoch, starts)[1:]} == whole
        assert sorted(epoch.tolist()) == list(range(store.num_tokens))


@steady
@given(LENGTHS, SEQUENCE, SEED, st.integers(0, 50))
def test_pieces_are_cut_only_by_the_ends_of_rows_and_documents(lengths, sequence, seed, index):
    store = numbered_store(lengths)
    row = PackedRows(store, sequence, seed).row(index)
    assert (row.rows, row.sequence) == (1, sequence)
    for piece, number in enumerate(row.sample_ids):
        start, stop = row.cu_seqlens[piece : piece + 2]
        first, last = row.tokens_T[[start, stop - 1]]
        assert store.offsets[number] <= first <= last < store.offsets[number + 1]
        assert start == 0 or first == store.offsets[number]
        assert stop == sequence or last == store.offsets[number + 1] - 1


@steady
@given(LENGTHS, SEQUENCE, SEED, st.lists(st.integers(0, 60), min_size=1, max_size=6))
def test_a_row_does_not_depend_on_what_was_read_before(lengths, sequence, seed, indices):
    store = numbered_store(lengths)
    rows = PackedRows(store, sequence, seed)
    batch = rows.batch(indices)
    fresh = [PackedRows(store, sequence, seed).row(index) for index in indices]
    assert batch.tokens_T.tolist() == np.concatenate([row.tokens_T for row in fresh]).tolist()
    assert batch.labels_T.tolist() == np.concatenate([row.labels_T for row in fresh]).tolist()
    assert batch.sample_ids.tolist() == np.concatenate([row.sample_ids for row in fresh]).tolist()
    assert rows.num_targets(indices) == batch.num_targets


@pytest.mark.parametrize(
    ("lengths", "sequence", "num_targets"),
    [([1], 4, 0), ([4], 4, 3), ([4, 4], 4, 3), ([12], 4, 3), ([1, 1, 1, 1], 4, 0)],
    ids=["one_token", "full", "two_full", "three_rows_long", "all_one_token"],
)
def test_corner_lengths(lengths, sequence, num_targets):
    rows = PackedRows(numbered_store(lengths), sequence, 0)
    assert [rows.num_targets([index]) for index in range(6)] == [num_targets] * 6


def test_order_is_shuffled_by_seed_and_epoch():
    store = numbered_store([1] * 50)
    epochs = [stream(PackedRows(store, 10, seed), 100).tolist() for seed in (0, 1)]
    orders = [epochs[0][:50], epochs[0][50:], epochs[1][:50], list(range(50))]
    assert len({tuple(order) for order in orders}) == 4


def test_order_is_the_same_for_ever():
    # A change here makes every run read other data when it resumes. numpy 1.26 and 2.4 agree on it.
    packer = ConcatenateAndCut(np.ones(8, np.int64), 8, seed=3)
    assert packer.pieces(0).documents.tolist() == [0, 1, 2, 7, 5, 6, 4, 3]
    assert packer.pieces(1).documents.tolist() == [5, 6, 3, 7, 0, 1, 2, 4]
    assert packer.pieces(10**12).documents.tolist() == [3, 2, 6, 0, 7, 4, 5, 1]


def test_another_packer_takes_its_place():
    class Repeat:
        def __init__(self, lengths: np.ndarray, sequence: int, seed: int):
            self.sequence = sequence

        def pieces(self, row: int) -> Pieces:
            return Pieces(np.array([row]), np.array([1]), np.array([self.sequence]))

    rows = PackedRows(numbered_store([5, 5]), 3, 0, packer=Repeat)
    assert rows.batch([1, 0]).tokens_T.tolist() == [6, 7, 8, 1, 2, 3]


@pytest.mark.parametrize(
    ("lengths", "sequence", "seed", "error"),
    [
        ([], 4, 0, "no documents to pack"),
        ([3], 0, 0, "sequence=0 must be at least 1"),
        ([3], 4, -1, "seed=-1"),
    ],
)
def test_rows_that_cannot_be_are_refused(lengths, sequence, seed, error):
    with pytest.raises(DataError, match=error):
        PackedRows(numbered_store(lengths), sequence, seed)
