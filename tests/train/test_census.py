"""The census against sizes known in advance."""

import torch
import torch.nn.functional as F
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from longspan.testing import cached_mesh, run_ranks
from longspan.train.census import StorageCensus, measure_peak, peak_rss_bytes

KIB = 1024


def floats(kib: int) -> torch.Tensor:
    return torch.ones(kib * KIB // 4)


def test_storages_count_until_they_die() -> None:
    with StorageCensus() as census:
        first = floats(8)
        second = first + 1
        assert census.live_bytes == 16 * KIB
        del first
        assert census.live_bytes == 8 * KIB
        third = second * 2
        assert census.live_bytes == 16 * KIB
        del second, third
    assert census.live_bytes == 0
    assert census.peak_bytes == 16 * KIB


def test_views_and_in_place_results_count_once() -> None:
    with StorageCensus() as census:
        whole = floats(8)
        halves = whole.view(2, -1)
        halves[0].add_(1)
        assert census.live_bytes == 8 * KIB
        del whole
        assert census.live_bytes == 8 * KIB


def test_known_and_touched_tensors_count() -> None:
    known, touched = floats(4), floats(2)
    with StorageCensus([known, known.view(2, -1)]) as census:
        assert census.live_bytes == 4 * KIB
        touched.sum()
        assert census.peak_bytes == 6 * KIB + 4


def test_meta_tensors_do_not_count() -> None:
    with StorageCensus() as census:
        torch.ones(10, device="meta") + 1
    assert census.peak_bytes == 0


def test_tensors_kept_for_backward_count_and_then_go() -> None:
    weight = floats(4).requires_grad_()
    with StorageCensus([weight]) as census:
        activation = weight.exp()
        loss = (activation * activation).sum()
        del activation
        held = census.live_bytes
        loss.backward()
        del loss
    assert held == 8 * KIB + 4
    # Left: the weight and its gradient.
    assert census.live_bytes == 8 * KIB


def test_measure_peak_takes_the_census_on_the_cpu() -> None:
    with measure_peak(torch.device("cpu")) as peak:
        floats(8)
    assert (peak.source, peak.num_bytes) == ("census", 8 * KIB)


def test_resident_memory_is_counted_apart() -> None:
    assert peak_rss_bytes() > 50 * KIB * KIB


def shard_bytes(rank: int, world: int) -> tuple[int, int]:
    mesh = cached_mesh((world,), ("tp",))
    sharded = distribute_tensor(torch.ones(64, 64), mesh, [Shard(0)])
    copied = distribute_tensor(torch.ones(8, 64), mesh, [Replicate()])
    with StorageCensus([sharded]) as census:
        known = census.live_bytes
        F.linear(copied, sharded)
        return known, census.peak_bytes


def test_of_a_dtensor_only_the_local_part_counts() -> None:
    weight, inputs, outputs = 32 * 64 * 4, 8 * 64 * 4, 8 * 32 * 4
    for known, peak in run_ranks(shard_bytes, 2):
        assert known == weight
        assert peak == weight + inputs + outputs
