import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longspan.data import TokenStore, unigram_entropy
from longspan.errors import DataError
from tests.data.examples import numbered_store, steady


def test_store_counts_and_finds_documents():
    store = numbered_store([1, 3, 2])
    assert (store.num_documents, store.num_tokens, store.num_targets) == (3, 6, 3)
    assert [store.document(number).tolist() for number in range(3)] == [[0], [1, 2, 3], [4, 5]]


@pytest.mark.parametrize(
    ("offsets", "keys", "error"),
    [
        ([0, 2, 2, 4], 3, "drop empty documents"),
        ([0, 2, 3], 2, "rise from 0 to 4 tokens"),
        ([1, 4], 1, "rise from 0"),
        ([0, 4], 2, "2 keys for 1 documents"),
    ],
)
def test_contradictory_store_is_refused(offsets, keys, error):
    with pytest.raises(DataError, match=error):
        TokenStore(np.zeros(4, np.uint16), np.array(offsets), np.zeros(keys, np.uint64))


@steady
@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(0, 2**64 - 1)), max_size=30),
    st.floats(0, 1, exclude_max=True),
)
def test_split_deals_every_document_to_one_side(documents, fraction):
    store = TokenStore.from_documents(
        [np.full(length, number) for number, (length, _) in enumerate(documents)],
        [key for _, key in documents],
    )
    train, evaluation = store.split(fraction)
    sides = [
        {(int(side.document(number)[0]), len(side.document(number))) for number in range(side.num_documents)}
        for side in (train, evaluation)
    ]
    assert sides[0] | sides[1] == {(number, length) for number, (length, _) in enumerate(documents)}
    assert train.num_documents + evaluation.num_documents == store.num_documents
    with_targets = sum(length > 1 for length, _ in documents)
    if fraction == 0:
        assert evaluation.num_documents == 0
    elif with_targets > 1:
        assert train.num_targets > 0 and evaluation.num_targets > 0
    elif with_targets == 1:
        assert train.num_targets > 0


def test_split_meets_the_fraction_and_does_not_depend_on_other_documents():
    store = numbered_store([2] * 4000)
    whole = set(store.split(0.1)[1].keys.tolist())
    half = store.select(np.arange(4000) % 2 == 0)
    assert 340 < len(whole) < 460
    assert set(half.split(0.1)[1].keys.tolist()) == whole & set(half.keys.tolist())


def test_copies_share_a_side():
    store = TokenStore.from_documents([np.array([number % 50, 7]) for number in range(500)])
    train, evaluation = (set(side.keys.tolist()) for side in store.split(0.3))
    assert train and evaluation and not train & evaluation


@pytest.mark.parametrize("fraction", [-0.1, 1.0, float("nan")])
def test_split_refuses_what_is_no_fraction(fraction):
    with pytest.raises(DataError, match="choose one in"):
        numbered_store([2, 2]).split(fraction)


def test_unigram_entropy_counts_target_tokens_only():
    # Targets: 5 three times and 6 once. The first tokens, 9 and 8, are none.
    store = TokenStore.from_documents([np.array([9, 5, 5, 6]), np.array([8, 5])])
    assert unigram_entropy(store) == pytest.approx(-(0.75 * np.log(0.75) + 0.25 * np.log(0.25)))


def test_unigram_entropy_of_no_target_is_refused():
    with pytest.raises(DataError, match="nothing to predict"):
        unigram_entropy(numbered_store([1, 1]))
