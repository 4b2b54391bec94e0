import numpy as np
import torch

from longspan.data import POSITION_EDGES, bucket_names, position_buckets


def test_buckets_begin_at_their_edges():
    positions = np.array([0, 255, 256, 1023, 1024, 10**9])
    assert position_buckets(positions).tolist() == [0, 0, 1, 1, 2, len(POSITION_EDGES)]
    assert position_buckets(positions, edges=(1,)).tolist() == [0, 1, 1, 1, 1, 1]


def test_tensors_give_the_same_as_arrays():
    positions = np.arange(0, 300_000, 64).reshape(-1, 8)
    buckets = position_buckets(torch.from_numpy(positions))
    assert buckets.dtype == torch.int64
    assert buckets.tolist() == position_buckets(positions).tolist()


def test_every_bucket_has_a_name():
    assert bucket_names((256, 1024)) == ("0-255", "256-1023", "1024+")
    assert len(bucket_names()) == len(POSITION_EDGES) + 1
