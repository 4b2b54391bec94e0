"""The chunked, split loss against F.cross_entropy on full logits in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from longspan.data import IGNORE
from longspan.testing import cached_mesh, run_ranks
from longspan.train.census import StorageCensus
from longspan.train.loss import chunked_token_losses, default_chunk

TOKENS, HIDDEN, VOCABULARY = 173, 24, 2003
UPSTREAM = 0.37


def problem(dtype: torch.dtype = torch.float64, spread: float = 1.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, whole output weight, labels (a third of them IGNORE) and scales."""
    generator = torch.Generator().manual_seed(1)
    hidden_tE = spread * torch.randn(TOKENS, HIDDEN, generator=generator, dtype=torch.float64)
    weight_VE = torch.randn(VOCABULARY, HIDDEN, generator=generator, dtype=torch.float64)
    labels_t = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    labels_t[::3] = IGNORE
    scale_t = torch.rand(TOKENS, generator=generator) / TOKENS
    return hidden_tE.to(dtype), weight_VE.to(dtype), labels_t, scale_t


def full_logits(hidden_tE: Tensor, weight_VE: Tensor, labels_t: Tensor, scale_t: Tensor) -> list[Tensor]:
    """Loss, token losses and gradients in the dtype of the inputs, with the softmax in at least float32."""
    hidden_tE = hidden_tE.detach().clone().requires_grad_()
    weight_VE = weight_VE.detach().clone().requires_grad_()
    logits_tV = hidden_tE @ weight_VE.t()
    logits_tV = logits_tV.to(torch.promote_types(logits_tV.dtype, torch.float32))
    nll_t = F.cross_entropy(logits_tV, labels_t, reduction="none", ignore_index=IGNORE)
    loss = (scale_t * nll_t).sum()
    (loss * UPSTREAM).backward()
    return [loss.detach(), nll_t.detach(), hidden_tE.grad, weight_VE.grad]


def reference(hidden_tE: Tensor, weight_VE: Tensor, labels_t: Tensor, scale_t: Tensor) -> list[Tensor]:
    return full_logits(hidden_tE.double(), weight_VE.double(), labels_t, scale_t.double())


def ours(
    hidden_tE: Tensor, weight_vE: Tensor, labels_t: Tensor, scale_t: Tensor, chunk: int = 64, **shard
) -> list[Tensor]:
    hidden_tE = hidden_tE.detach().requires_grad_()
    weight_vE = weight_vE.detach().requires_grad_()
    loss, nll_t = chunked_token_losses(hidden_tE, weight_vE, labels_t, scale_t, chunk=chunk, **shard)
    (loss * UPSTREAM).backward()
    return [loss.detach(), nll_t, hidden_tE.grad, weight_vE.grad]


def relative_errors(got: list[Tensor], wanted: list[Tensor]) -> list[float]:
    return [((a.double() - b).abs().max() / b.abs().max()).item() for a, b in zip(got, wanted, strict=True)]


def assert_no_worse_than_full_logits(got: list[Tensor], *arguments: Tensor) -> None:
    wanted = reference(*arguments)
    theirs = relative_errors(full_logits(*arguments), wanted)
    for error, their_error in zip(relative_errors(got, wanted), theirs, strict=True):
        assert error <= 2 * their_error


def on_a_rank(rank: int, world: int, spread: float, chunk: int) -> list[Tensor]:
    group = cached_mesh((world,), ("tp",)).get_group()
    hidden_tE, weight_VE, labels_t, scale_t = problem(spread=spread)
    rows = -(-VOCABULARY // world)
    start = rank * rows
    shard = {"vocab_start": start, "group": group}
    return ours(hidden_tE, weight_VE[start : start + rows], labels_t, scale_t, chunk, **shard)


def gathered(results: list[list[Tensor]]) -> list[Tensor]:
    """The ranks' results as one process would have them: hidden gradients added, weight gradients joined."""
    losses, token_losses, hidden_grads, weight_grads = zip(*results, strict=True)
    for loss, nll_t in zip(losses, token_losses, strict=True):
        assert torch.equal(loss, losses[0]) and torch.equal(nll_t, token_losses[0])
    return [losses[0], token_losses[0], torch.stack(hidden_grads).sum(0), torch.cat(weight_grads)]


@pytest.mark.parametrize("chunk", [1, 64, TOKENS, 500])
def test_one_rank_equals_full_logits(chunk: int) -> None:
    assert max(relative_errors(ours(*problem(), chunk=chunk), reference(*problem()))) <= 1e-12


@pytest.mark.parametrize("spread", [1.0, 300.0])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_split_vocabulary_equals_full_logits(world: int, spread: float) -> None:
    results = run_ranks(on_a_rank, world, spread, 64)
    assert max(relative_errors(gathered(results), reference(*problem(spread=spread)))) <= 1e-12


def test_dropping_a_rank_is_seen() -> None:
    """Negative control: the comparison above would notice a hidden gradient that was not summed over tp."""
    results = run_ranks(on_a_rank, 2, 1.0, 64)
    results[1][2].zero_()
    assert relative_errors(gathered(results), reference(*problem()))[2] > 1e-3


def test_huge_logits_stay_finite() -> None:
    hidden_tE, weight_VE, labels_t, scale_t = problem(torch.float32, spread=1e4)
    got = ours(hidden_tE, weight_VE, labels_t, scale_t)
    assert all(tensor.isfinite().all() for tensor in got)
    assert got[1].max() > 1e5
    assert_no_worse_than_full_logits(got, hidden_tE, weight_VE, labels_t, scale_t)


@pytest.mark.parametrize("how", ["labels", "scales", "no tokens"])
def test_nothing_to_learn_is_zero_not_nan(how: str) -> None:
    hidden_tE, weight_VE, labels_t, scale_t = problem()
    if how == "labels":
        labels_t = torch.full_like(labels_t, IGNORE)
    elif how == "scales":
        scale_t = torch.zeros_like(scale_t)
    else:
        hidden_tE, labels_t, scale_t = hidden_tE[:0], labels_t[:0], scale_t[:0]
    assert all((tensor == 0).all() for tensor in ours(hidden_tE, weight_VE, labels_t, scale_t))


def empty_rank(rank: int, world: int) -> bool:
    hidden_tE, weight_VE, labels_t, scale_t = problem()
    group = cached_mesh((world,), ("tp",)).get_group()
    got = ours(hidden_tE, weight_VE, torch.full_like(labels_t, IGNORE), scale_t, group=group)
    return all((tensor == 0).all() for tensor in got)


def test_nothing_to_learn_on_any_rank_of_a_group() -> None:
    assert run_ranks(empty_rank, 2) == [True, True]


def test_tokens_that_do_not_count_cannot_spoil_the_rest() -> None:
    hidden_tE, weight_VE, labels_t, scale_t = problem()
    scale_t[1] = 0
    wanted = reference(hidden_tE, weight_VE, labels_t, scale_t)
    spoilt_tE = hidden_tE.clone()
    spoilt_tE[:2] = torch.nan
    loss, nll_t, grad_tE, grad_VE = ours(spoilt_tE, weight_VE, labels_t, scale_t)
    assert nll_t[1] == 0
    nll_t[1] = wanted[1][1]
    assert max(relative_errors([loss, nll_t, grad_tE, grad_VE], wanted)) <= 1e-12


def test_label_that_no_rank_holds_is_not_silent() -> None:
    hidden_tE, weight_VE, labels_t, scale_t = problem()
    labels_t[4] = VOCABULARY
    assert ours(hidden_tE, weight_VE, labels_t, scale_t)[0] == torch.inf


def test_bfloat16_error_is_near_that_of_full_logits() -> None:
    hidden_tE, weight_VE, labels_t, scale_t = problem(torch.bfloat16)
    got = ours(hidden_tE, weight_VE, labels_t, scale_t)
    assert [tensor.dtype for tensor in got] == [torch.float32] * 2 + [torch.bfloat16] * 2
    assert_no_worse_than_full_logits(got, hidden_tE, weight_VE, labels_t, scale_t)


def test_float32_weights_with_bfloat16_hidden_states() -> None:
    hidden_tE, weight_VE, labels_t, scale_t = problem(torch.bfloat16)
    got = ours(hidden_tE, weight_VE.float(), labels_t, scale_t)
    assert [tensor.dtype for tensor in got[2:]] == [torch.bfloat16, torch.float32]
    errors = relative_errors(got, reference(hidden_tE, weight_VE, labels_t, scale_t))
    assert max(errors[0], errors[1], errors[3]) <= 1e-5


class Operations(TorchDispatchMode):
    """Counts matrix products and the largest tensor made."""

    products = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.products += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("needing, products", [((True, True), 3), ((True, False), 2), ((False, False), 1)])
def test_only_the_products_that_are_needed_run(needing: tuple[bool, bool], products: int) -> None:
    hidden_tE, weight_VE, labels_t, scale_t = problem()
    labels_t.clamp_(min=0)
    hidden_tE.requires_grad_(needing[0])
    weight_VE.requires_grad_(needing[1])
    with Operations() as operations:
        loss, _ = chunked_token_losses(hidden_tE, weight_VE, labels_t, scale_t, chunk=64)
        if loss.requires_grad:
            loss.backward()
    assert operations.products == products * -(-TOKENS // 64)


def test_no_gradient_is_computed_without_grad_mode() -> None:
    hidden_tE, weight_VE, labels_t, scale_t = problem()
    weight_VE.requires_grad_()
    with torch.no_grad(), Operations() as operations:
        loss, nll_t = chunked_token_losses(hidden_tE, weight_VE, labels_t, scale_t, chunk=TOKENS)
    assert operations.products == 1
    assert not loss.requires_grad and not nll_t.requires_grad


def test_second_backward_raises_rather_than_scaling_twice() -> None:
    hidden_tE, weight_VE, labels_t, scale_t = problem()
    loss, _ = chunked_token_losses(hidden_tE.requires_grad_(), weight_VE, labels_t, scale_t, chunk=64)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError):
        loss.backward()


def test_never_holds_more_than_a_chunk_of_logits() -> None:
    tokens, hidden, vocabulary, chunk = 2048, 16, 4000, 64
    hidden_tE = torch.randn(tokens, hidden, requires_grad=True)
    weight_VE = torch.randn(vocabulary, hidden, requires_grad=True)
    labels_t, scale_t = torch.randint(vocabulary, (tokens,)), torch.rand(tokens)
    inputs = [hidden_tE, weight_VE, labels_t, scale_t]
    with StorageCensus(inputs) as census:
        before = census.live_bytes
        loss, _ = chunked_token_losses(hidden_tE, weight_VE, labels_t, scale_t, chunk=chunk)
        loss.backward()
    gradients = hidden_tE.nbytes + weight_VE.nbytes
    chunk_bytes, logits_bytes = chunk * vocabulary * 4, tokens * vocabulary * 4
    assert census.peak_bytes - before <= gradients + 1.1 * chunk_bytes
    assert chunk_bytes < logits_bytes / 20


def test_default_chunk_bounds_the_logits() -> None:
    assert default_chunk(256) == 1024
    assert default_chunk(32_000) == 524
    assert default_chunk(256_000) == 128


@pytest.mark.gpu
def test_bfloat16_on_cuda_multiplies_into_float32() -> None:
    arguments = [tensor.cuda() for tensor in problem(torch.bfloat16)]
    wanted = reference(*arguments)
    errors = relative_errors(ours(*arguments), wanted)
    assert max(errors[:2]) <= 1e-5
    assert max(errors[2:]) <= 2e-2
