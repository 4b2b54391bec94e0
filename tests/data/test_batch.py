import pickle
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longspan.data import IGNORE, PADDING, PackedBatch
from longspan.errors import DataError
from tests.data.examples import steady


def example() -> PackedBatch:
    """Two rows of 6: documents of 3 and 2 tokens and one of padding; one document of 6."""
    rows = [[np.array([11, 12, 13]), np.array([14, 15])], [np.arange(21, 27)]]
    return PackedBatch.from_documents(rows, 6, pad_id=7)


def test_from_documents_by_hand():
    batch = example()
    i = IGNORE
    assert batch.tokens_T.tolist() == [11, 12, 13, 14, 15, 7, 21, 22, 23, 24, 25, 26]
    assert batch.positions_T.tolist() == [0, 1, 2, 0, 1, 0, 0, 1, 2, 3, 4, 5]
    assert batch.labels_T.tolist() == [12, 13, i, 15, i, i, 22, 23, 24, 25, 26, i]
    assert batch.weights_T.tolist() == [1, 1, 0, 1, 0, 0, 1, 1, 1, 1, 1, 0]
    assert batch.cu_seqlens.tolist() == [0, 3, 5, 6, 12]
    assert batch.sample_ids.tolist() == [0, 1, PADDING, 2]
    assert (batch.rows, batch.sequence, batch.num_targets) == (2, 6, 8)


def test_weights_are_shifted_with_the_labels():
    rows, weights = [[np.array([1, 2, 3, 4])]], [[np.array([9, 0, 0.5, 1])]]
    batch = PackedBatch.from_documents(rows, 5, weights=weights)
    assert batch.labels_T.tolist() == [IGNORE, 3, 4, IGNORE, IGNORE]
    assert batch.weights_T.tolist() == [0, 0.5, 1, 0, 0]
    assert batch.num_targets == 2


def test_a_row_of_padding_and_one_token_documents_have_no_target():
    batch = PackedBatch.from_documents([[], [np.array([5])] * 4], 4)
    assert batch.num_targets == 0
    assert batch.cu_seqlens.tolist() == [0, 4, 5, 6, 7, 8]


ROW = st.lists(st.integers(1, 7), max_size=4)


@steady
@given(st.lists(ROW, min_size=1, max_size=4), st.integers(0, 3))
def test_labels_are_the_next_tokens_inside_each_document(rows, spare):
    sequence = max(1, max(map(sum, rows)) + spare)
    numbers = iter(range(100, 10_000))
    documents = [[np.array([next(numbers) for _ in range(length)]) for length in row] for row in rows]
    batch = PackedBatch.from_documents(documents, sequence)
    expected = []
    for row in documents:
        for document in row:
            expected += [*document[1:].tolist(), IGNORE]
        expected += [IGNORE] * (sequence - sum(map(len, row)))
    assert batch.labels_T.tolist() == expected
    assert batch.num_targets == sum(length - 1 for row in rows for length in row)


@pytest.mark.parametrize(
    ("rows", "weights", "error"),
    [
        ([[np.arange(4), np.arange(3)]], None, "row 0 has 2 tokens more than sequence=5"),
        ([[np.arange(4), np.arange(0)]], None, "cu_seqlens must rise"),
        ([[np.arange(3)]], [[np.ones(2)]], "give one for each token"),
        ([[np.arange(3)]], [], "give one for each token"),
        ([[np.arange(3)]], [[np.array([1, -1, 1])]], "weights_T must be positive"),
        ([[np.arange(3)]], [[np.array([1, np.nan, 1])]], "weights_T must be positive"),
        ([[np.array([1, -2, 3])]], None, "token id -2 is negative"),
    ],
)
def test_from_documents_refuses(rows, weights, error):
    with pytest.raises(DataError, match=error):
        PackedBatch.from_documents(rows, 5, weights=weights)


def changed(array: np.ndarray, place: int, value: float) -> np.ndarray:
    copy = array.copy()
    copy[place] = value
    return copy


@pytest.mark.parametrize(
    ("name", "change", "error"),
    [
        ("tokens_T", lambda a: a.astype(np.int32), "tokens_T is 1-D int32; give 1-D int64"),
        ("tokens_T", lambda a: a.reshape(2, 6), "tokens_T is 2-D"),
        ("tokens_T", lambda a: changed(a, 8, 99), "a label is not the next token"),
        ("positions_T", lambda a: a[:-1], "positions_T has 11 values for 12 tokens"),
        ("positions_T", lambda a: np.arange(12), "positions_T must count from 0"),
        ("labels_T", lambda a: a[1:], "labels_T has 11 values"),
        ("labels_T", lambda a: changed(a, 2, 14), "a label crosses the end of its piece"),
        ("labels_T", lambda a: changed(a, 11, 11), "a label crosses the end of its piece"),
        ("labels_T", lambda a: changed(a, 0, IGNORE), "weights_T must be positive"),
        ("weights_T", lambda a: changed(a, 2, 1), "weights_T must be positive"),
        ("weights_T", lambda a: changed(a, 1, np.inf), "weights_T must be positive"),
        ("weights_T", lambda a: a.astype(np.float64), "give 1-D float32"),
        ("cu_seqlens", lambda a: changed(a, 0, 1), "cu_seqlens must rise from 0 to 12"),
        ("cu_seqlens", lambda a: changed(a, -1, 11), "cu_seqlens must rise from 0 to 12"),
        ("cu_seqlens", lambda a: changed(a, 1, 5), "cu_seqlens must rise"),
        ("cu_seqlens", lambda a: np.zeros(1, np.int64), "cu_seqlens must rise"),
        ("cu_seqlens", lambda a: changed(a, 3, 7), "a piece crosses the border of a row of 6 tokens"),
        ("cu_seqlens", lambda a: changed(a, 1, 2), "positions_T must count from 0"),
        ("sample_ids", lambda a: a[:-1], "4 pieces need a sample id each"),
        ("sample_ids", lambda a: changed(a, 0, -2), "4 pieces need a sample id each"),
        ("sample_ids", lambda a: changed(a, 0, PADDING), "padding has a label"),
        ("rows", lambda rows: 5, "12 tokens are not 5 rows"),
        ("rows", lambda rows: 0, "12 tokens are not 0 rows"),
        ("rows", lambda rows: 3, "a piece crosses the border of a row of 4 tokens"),
    ],
)
def test_corrupted_batch_does_not_get_through(name, change, error):
    batch = example()
    with pytest.raises(DataError, match=error):
        replace(batch, **{name: change(getattr(batch, name))})


def test_arrays_cannot_be_written_and_the_callers_stay_writable():
    mine = example().weights_T.copy()
    batch = replace(example(), weights_T=mine)
    with pytest.raises(ValueError, match="read-only"):
        batch.weights_T[0] = 3
    mine[2] = 3


def test_batch_survives_the_way_to_another_process():
    batch = pickle.loads(pickle.dumps(example()))
    assert batch.labels_T.tolist() == example().labels_T.tolist()
