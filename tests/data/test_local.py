import numpy as np
import pytest
import torch

from longspan.data import IGNORE, PackedBatch, shard
from longspan.errors import DataError


def example() -> PackedBatch:
    return PackedBatch.from_documents([[np.array([5, 6, 7]), np.array([8, 9])]], 5)


def test_labels_come_from_the_whole_batch():
    local = shard(example(), np.array([1, 4, 0]))
    assert local.tokens_t.tolist() == [6, 9, 5]
    assert local.positions_t.tolist() == [1, 1, 0]
    assert local.labels_t.tolist() == [7, IGNORE, 6]
    assert local.weights_t.tolist() == [1, 0, 1]
    assert local.lengths_t.tolist() == [3, 2, 3]
    dtypes = [tensor.dtype for tensor in vars(local).values()]
    assert dtypes == [torch.int64, torch.int64, torch.int64, torch.float32, torch.int64]


def test_a_rank_without_tokens():
    assert shard(example(), np.empty(0, np.int64)).labels_t.shape == (0,)


def test_a_share_can_be_written_without_touching_the_batch():
    batch = example()
    shard(batch, np.arange(5)).tokens_t.zero_()
    assert batch.tokens_T.tolist() == [5, 6, 7, 8, 9]


@pytest.mark.parametrize("index", [-1, 5])
def test_index_outside_the_batch_is_refused(index):
    with pytest.raises(DataError, match="leaves a batch of 5 tokens"):
        shard(example(), np.array([0, index]))
