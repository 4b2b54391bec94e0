"""run_ranks: order, errors, deaths and time-outs, and that a spoilt pool is replaced."""

import functools
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist

from longspan.errors import RankError
from longspan.testing import cached_mesh, run_ranks


def total(rank: int, world: int, offset: int) -> tuple[int, int, float]:
    value = torch.tensor([float(rank + offset)])
    dist.all_reduce(value)
    return rank, world, value.item()


def fails_on(rank: int, world: int, culprit: int) -> None:
    if rank == culprit:
        raise ValueError(f"boom on {culprit}")
    dist.barrier()


def dies_on(rank: int, world: int, culprit: int) -> None:
    if rank == culprit:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def aborts(rank: int, world: int) -> None:
    os.abort()


def sleeps_on(rank: int, world: int, culprit: int) -> None:
    if rank == culprit:
        time.sleep(600)


def process_id(rank: int, world: int) -> int:
    return os.getpid()


def returns_lambda(rank: int, world: int) -> object:
    return lambda: None


def mesh_is_kept(rank: int, world: int) -> bool:
    mesh = cached_mesh((2, 2), ("cp", "tp"))
    placed = (mesh.get_local_rank("cp"), mesh.get_local_rank("tp")) == divmod(rank, 2)
    return placed and mesh is cached_mesh((2, 2), ("cp", "tp"))


def draw(rank: int, world: int) -> torch.Tensor:
    return torch.randn(3)


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_results_come_in_rank_order(world: int) -> None:
    expected = float(sum(range(world)) + 10 * world)
    assert run_ranks(total, world, 10) == [(rank, world, expected) for rank in range(world)]


def test_pool_is_reused() -> None:
    assert run_ranks(process_id, 2) == run_ranks(process_id, 2)


def test_partial_is_accepted() -> None:
    assert run_ranks(functools.partial(total, offset=1), 2) == [(0, 2, 3.0), (1, 2, 3.0)]


def test_every_call_starts_from_the_same_seed() -> None:
    first, second = run_ranks(draw, 1), run_ranks(draw, 1)
    assert torch.equal(first[0], second[0])


def test_error_names_its_rank_and_the_pool_recovers() -> None:
    before = run_ranks(process_id, 4)
    start = time.monotonic()
    with pytest.raises(RankError, match=r"rank 2 of 4 failed: ValueError: boom on 2") as caught:
        run_ranks(fails_on, 4, 2)
    # The others sit in a collective whose own time-out is 30 s.
    assert time.monotonic() - start < 15
    assert "in fails_on" in caught.value.__notes__[0]
    after = run_ranks(process_id, 4)
    assert not set(before) & set(after)


def test_killed_rank_is_named_rather_than_its_neighbours() -> None:
    with pytest.raises(RankError, match=r"rank 1 of 2 failed: the process died \(exit code -9\)"):
        run_ranks(dies_on, 2, 1)
    assert run_ranks(total, 2, 0) == [(0, 2, 1.0), (1, 2, 1.0)]


def test_aborted_rank_shows_its_stack() -> None:
    with pytest.raises(RankError, match=r"(?s)exit code -6.*in aborts"):
        run_ranks(aborts, 1)


def test_rank_that_died_between_calls_is_reported() -> None:
    os.kill(run_ranks(process_id, 2)[1], signal.SIGKILL)
    with pytest.raises(RankError, match=r"rank 1 of 2 failed: the process died"):
        run_ranks(total, 2, 0)
    assert len(run_ranks(total, 2, 0)) == 2


def test_time_out_shows_where_the_rank_was() -> None:
    with pytest.raises(RankError, match=r"(?s)ranks \[1\] of 2 did not answer within 1 s.*in sleeps_on"):
        run_ranks(sleeps_on, 2, 1, timeout_s=1)
    assert run_ranks(total, 2, 0) == [(0, 2, 1.0), (1, 2, 1.0)]


def test_result_that_cannot_be_pickled_is_an_error() -> None:
    with pytest.raises(RankError, match="pickle"):
        run_ranks(returns_lambda, 1)


def test_local_function_is_refused() -> None:
    with pytest.raises(TypeError, match="top-level function"):
        run_ranks(lambda rank, world: rank, 1)


def test_no_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 rank, got 0"):
        run_ranks(process_id, 0)


def test_meshes_are_cached() -> None:
    assert run_ranks(mesh_is_kept, 4) == [True] * 4


def test_unguarded_script_ends_with_an_error(tmp_path) -> None:
    script = tmp_path / "script.py"
    script.write_text("from longspan.testing import run_ranks\nrun_ranks(print, 2)\n")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert re.search(r"RankError: rank \d of 2 failed: the process died \(exit code 1\)", done.stderr)


def test_plain_script(tmp_path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from longspan.testing import run_ranks\n"
        "def double(rank, world):\n    return 2 * rank\n"
        "if __name__ == '__main__':\n    print(run_ranks(double, 2))\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr, done.returncode) == ("[0, 2]\n", "", 0)
