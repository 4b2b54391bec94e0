"""One optimizer step and one evaluation over a layout."""

from collections.abc import Callable

import torch

from longspan.spec.run import RunConfig
from longspan.train.data_parallel import reduce_over_copies, release
from longspan.train.forward import ParallelModel
from longspan.train.gradients import gradient, sum_over_tp
from longspan.train.optimizer import clip_gradients, set_learning_rate
from longspan.train.session import StepBatches
from longspan.train.sums import LossSums
from longspan.train.waiting import counting_waits

__all__ = ["evaluate", "gradients_of", "learning_rate", "update"]


def gradients_of(model: ParallelModel, batches: StepBatches) -> LossSums:
    """Leave in every parameter the gradient of the step's loss: Σ token loss / Σ targets over the whole step.

    Args:
        model: parameters without gradients, or gradients to be replaced.
        batches: this rank's micro-batches and the targets of all ranks.

    Returns:
        Loss sums over all ranks.
    """
    sums = LossSums.zero()
    for parameter in model.parameters():
        parameter.grad = None
    with counting_waits(model.meter):
        for micro in batches.micro_batches:
            reduce_over_copies(model.decoder, last=micro is batches.micro_batches[-1])
            loss, nll_t = model.token_losses(micro, batches.num_targets)
            loss.backward()
            sums = sums.plus(nll_t, micro.local)
        sum_over_tp(model.parameters())
    for parameter in model.parameters():
        gradient(parameter)
    return sums.over_ranks(model.groups)


def update(
    model: ParallelModel,
    optimizer: torch.optim.Optimizer,
    lr: float,
    clip_norm: float,
    allowed: Callable[[float], bool] = lambda norm: True,
) -> float:
    """Clip by the global norm and step the optimizer; the norm before clipping is returned.

    Args:
        model: with the gradients of the step.
        optimizer: over its parameters.
        lr: learning rate of the step.
        clip_norm: bound on the norm; 0 does not clip.
        allowed: asked with the norm whether to make the update; otherwise weights and optimizer stay as they are.
    """
    norm = clip_gradients(model.parameters(), clip_norm)
    if allowed(norm):
        set_learning_rate(optimizer, lr)
        optimizer.step()
    return norm


def learning_rate(config: RunConfig, step: int) -> float:
    """The rate of a step, from 0; the clock counts tokens of all stages, the step's own included."""
    plan = config.stage_plan
    return config.optimizer.lr * config.schedule.factor(plan.tokens_before(step + 1), plan.total_tokens)


@torch.no_grad()
def evaluate(model: ParallelModel, batches: StepBatches) -> LossSums:
    """Loss sums over all ranks, normalised as in training; a row without targets adds nothing.

    Args:
        model: left as it is.
        batches: this rank's evaluation rows, one a micro-batch: equally many on every rank.
    """
    sums = LossSums.zero()
    for micro in batches.micro_batches:
        _, nll_t = model.token_losses(micro, batches.num_targets)
        sums = sums.plus(nll_t, micro.local)
    release(model.decoder)
    return sums.over_ranks(model.groups)
