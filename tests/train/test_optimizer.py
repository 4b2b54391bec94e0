"""AdamW, the global norm and clipping: split over ranks against one process."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.optim import AdamW

from longspan.errors import ConfigError
from longspan.model import whole
from longspan.spec.run_sections import OptimizerSection
from longspan.testing import cached_mesh, run_ranks
from longspan.train.optimizer import build_optimizer, clip_gradients, global_norm, set_learning_rate

# Uneven rows, columns, a shard that some ranks do not hold at all, replicated, and a plain tensor.
SHAPES = [(7, 5), (6, 3), (1, 4), (5,), (3, 2)]
PLACEMENTS = [Shard(0), Shard(1), Shard(0), Replicate(), None]
SETTINGS = OptimizerSection(lr=0.01, weight_decay=0.1)


def whole_problem() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Weights and gradients, float64."""
    generator = torch.Generator().manual_seed(3)
    draws = [torch.randn(2, *shape, generator=generator, dtype=torch.float64) for shape in SHAPES]
    return [draw[0] for draw in draws], [draw[1] for draw in draws]


def parameters_with_gradients(place: Callable[[torch.Tensor, int], torch.Tensor]) -> list[nn.Parameter]:
    weights, gradients = whole_problem()
    parameters = [nn.Parameter(place(weight.clone(), i)) for i, weight in enumerate(weights)]
    for i, parameter in enumerate(parameters):
        parameter.grad = place(gradients[i].clone(), i)
    return parameters


def whole_parameters() -> list[nn.Parameter]:
    return parameters_with_gradients(lambda tensor, _: tensor)


def split_parameters(world: int) -> list[nn.Parameter]:
    mesh = cached_mesh((world,), ("tp",))

    def place(tensor: torch.Tensor, index: int) -> torch.Tensor:
        placement = PLACEMENTS[index]
        return tensor if placement is None else distribute_tensor(tensor, mesh, [placement])

    return parameters_with_gradients(place)


def clip_and_step(parameters: list[nn.Parameter], max_norm: float) -> tuple[float, list[torch.Tensor]]:
    """The norm before clipping, and the weights after three steps whose rate changes."""
    optimizer = build_optimizer(parameters, SETTINGS)
    norm = clip_gradients(parameters, max_norm)
    for step in range(3):
        set_learning_rate(optimizer, 0.01 / (step + 1))
        optimizer.step()
    return norm, [whole(parameter).detach() for parameter in parameters]


def split_run(rank: int, world: int, max_norm: float) -> tuple[float, list[torch.Tensor]]:
    return clip_and_step(split_parameters(world), max_norm)


def split_norm_on_two_axes(rank: int, world: int) -> float:
    mesh = cached_mesh((2, 2), ("fsdp", "tp"))
    weights, gradients = whole_problem()
    layouts = [[Shard(0), Shard(1)], [Replicate(), Shard(1)], [Shard(0), Replicate()], [Replicate()] * 2]
    parameters = []
    for weight, gradient, layout in zip(weights, gradients, layouts, strict=False):
        parameters.append(nn.Parameter(distribute_tensor(weight, mesh, layout)))
        parameters[-1].grad = distribute_tensor(gradient, mesh, layout)
    return global_norm(parameters)


def split_norm_with_nan_on_one_rank(rank: int, world: int) -> tuple[float, bool]:
    parameters = split_parameters(world)
    if rank == 1:
        parameters[0].grad.to_local()[0, 0] = torch.nan
    before = [parameter.grad.clone() for parameter in parameters]
    norm = clip_gradients(parameters, 0.1)
    after = [parameter.grad for parameter in parameters]
    kept = all(
        torch.equal(whole(a).nan_to_num(), whole(b).nan_to_num()) for a, b in zip(before, after, strict=True)
    )
    return norm, kept


def norm_of_partial(rank: int, world: int) -> str:
    mesh = cached_mesh((world,), ("tp",))
    parameter = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Replicate()]))
    parameter.grad = DTensor.from_local(torch.ones(4), mesh, [Partial()])
    with pytest.raises(ValueError) as caught:
        global_norm([parameter])
    return str(caught.value)


def true_norm(gradients: list[torch.Tensor]) -> float:
    return torch.cat([gradient.flatten() for gradient in gradients]).norm().item()


@pytest.mark.parametrize("max_norm", [0.5, 1e6, 0.0], ids=["clipped", "not reached", "off"])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_split_run_equals_one_process(world: int, max_norm: float) -> None:
    norm, weights = clip_and_step(whole_parameters(), max_norm)
    assert norm == pytest.approx(true_norm(whole_problem()[1]), rel=1e-14)
    for split_norm, split_weights in run_ranks(split_run, world, max_norm):
        assert split_norm == pytest.approx(norm, rel=1e-14)
        for split, single in zip(split_weights, weights, strict=True):
            torch.testing.assert_close(split, single, rtol=1e-13, atol=1e-14)


def test_clipping_scales_all_gradients_alike() -> None:
    parameters = whole_parameters()
    norm = clip_gradients(parameters, 0.5)
    assert global_norm(parameters) == pytest.approx(0.5, rel=1e-14)
    for parameter, gradient in zip(parameters, whole_problem()[1], strict=True):
        torch.testing.assert_close(parameter.grad, gradient * (0.5 / norm), rtol=1e-14, atol=0)


def test_norm_over_two_mesh_axes() -> None:
    expected = true_norm(whole_problem()[1][:4])
    assert run_ranks(split_norm_on_two_axes, 4) == [pytest.approx(expected, rel=1e-14)] * 4


def test_one_ranks_nan_is_reported_to_all_and_nothing_is_scaled() -> None:
    for norm, kept in run_ranks(split_norm_with_nan_on_one_rank, 2):
        assert math.isnan(norm) and kept


def test_infinite_gradient_is_reported() -> None:
    parameters = whole_parameters()
    parameters[0].grad[0, 0] = torch.inf
    assert clip_gradients(parameters, 0.5) == math.inf
    assert torch.equal(parameters[1].grad, whole_problem()[1][1])


def test_norm_of_many_small_float32_gradients_is_accumulated_in_float64() -> None:
    parameters = [nn.Parameter(torch.zeros(1000, 1000)) for _ in range(3)]
    for parameter in parameters:
        parameter.grad = torch.full((1000, 1000), 1e-25)
    assert global_norm(parameters) == pytest.approx(1e-25 * math.sqrt(3e6), rel=1e-7)


def test_partial_gradient_is_refused() -> None:
    assert all("partial sum" in message for message in run_ranks(norm_of_partial, 2))


def test_parameters_without_gradient_count_nothing() -> None:
    assert global_norm([nn.Parameter(torch.ones(3))]) == 0.0
    assert clip_gradients([], 1.0) == 0.0


def test_only_matrices_decay() -> None:
    matrix, vector = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))
    settings = OptimizerSection(lr=0.1, weight_decay=0.5)
    optimizer = build_optimizer([matrix, vector], settings)
    matrix.grad, vector.grad = torch.zeros(2, 2), torch.zeros(2)
    optimizer.step()
    assert torch.equal(vector, torch.ones(2))
    torch.testing.assert_close(matrix.detach(), torch.full((2, 2), 1 - 0.1 * 0.5))


def test_step_equals_plain_adamw() -> None:
    ours, theirs = whole_parameters(), whole_parameters()
    settings = OptimizerSection(lr=0.01, weight_decay=0.0, beta2=0.9, eps=1e-6)
    build_optimizer(ours, settings).step()
    AdamW(theirs, lr=0.01, weight_decay=0.0, betas=(0.9, 0.9), eps=1e-6).step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-14, atol=1e-15)


def test_narrow_weights_are_refused() -> None:
    with pytest.raises(ConfigError, match="bfloat16"):
        build_optimizer(nn.Linear(2, 2, dtype=torch.bfloat16).parameters(), SETTINGS)
