"""The same steps run two ways: as the layout runs them, and by definition in one process."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from longspan.data import PackedBatch
from longspan.model import Decoder, full_tensors, whole
from longspan.train.gradients import gradient
from longspan.train.optimizer import build_optimizer
from longspan.train.parallelize import ModelOptions, build_model
from longspan.train.session import DTYPES, Session, StepBatches
from longspan.train.step import evaluate, gradients_of, learning_rate, update
from longspan.verify.compare import Outcome
from longspan.verify.reference import reference_losses

__all__ = ["definition_run", "layout_run"]

STEPS = 3


def layout_run(session: Session, dtype: str) -> Outcome:
    """Run the first steps as training does; every rank of the session's layout calls together.

    Args:
        session: the run; its groups may be those of a single process.
        dtype: dtype of the computation.
    """
    model = session.model(dtype)
    evaluation = evaluate(model, session.evaluation_step()).mean
    optimizer = build_optimizer(model.parameters(), session.config.optimizer)
    losses, gradients = [], {}
    for step in range(STEPS):
        losses.append(gradients_of(model, session.training_step(step)).mean)
        if step == 0:
            gradients = dict(_whole_gradients(model.decoder))
        update(model, optimizer, learning_rate(session.config, step), session.config.optimizer.clip_norm)
    return Outcome(losses[0], gradients, evaluation, dict(_doubles(full_tensors(model.decoder))))


def definition_run(session: Session, dtype: str = "float64") -> Outcome:
    """Run the first steps in this process by definition: dense masks, explicit softmax, full logits.

    Args:
        session: the run with the groups of a single process, so that its steps hold all rows.
        dtype: dtype of the computation.
    """
    compute = DTYPES[dtype]
    options = ModelOptions(torch.promote_types(compute, torch.float32), compute)
    decoder = build_model(session.spec, session.weights(), session.groups, options)
    with torch.no_grad():
        evaluation = sum(float(_summed_loss(decoder, batch)) for batch in _wholes(session.evaluation_step()))
    optimizer = build_optimizer(decoder.parameters(), session.config.optimizer)
    losses, gradients = [], {}
    for step in range(STEPS):
        optimizer.zero_grad()
        losses.append(_definition_step(decoder, session.training_step(step)))
        if step == 0:
            gradients = {
                name: gradient(p).to(torch.float64, copy=True) for name, p in decoder.named_parameters()
            }
        _definition_update(
            decoder, optimizer, learning_rate(session.config, step), session.config.optimizer.clip_norm
        )
    targets = session.evaluation_step().num_targets
    return Outcome(losses[0], gradients, evaluation / targets, dict(_doubles(full_tensors(decoder))))


def _definition_step(decoder: Decoder, batches: StepBatches) -> float:
    total = 0.0
    for batch in _wholes(batches):
        loss = _summed_loss(decoder, batch) / batches.num_targets
        loss.backward()
        total += float(loss.detach())
    return total


def _definition_update(
    decoder: Decoder, optimizer: torch.optim.Optimizer, lr: float, clip_norm: float
) -> None:
    norm = float(torch.cat([gradient(p).flatten() for p in decoder.parameters()]).norm())
    if 0 < clip_norm < norm:
        for parameter in decoder.parameters():
            gradient(parameter).mul_(clip_norm / norm)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()


def _summed_loss(decoder: Decoder, batch: PackedBatch) -> Tensor:
    documents_T = np.repeat(np.arange(len(batch.sample_ids)), np.diff(batch.cu_seqlens))
    arrays = (batch.tokens_T, batch.positions_T, documents_T, batch.labels_T)
    losses_T = reference_losses(decoder, *(torch.from_numpy(array.copy()) for array in arrays))
    return (losses_T * torch.from_numpy(batch.weights_T.copy())).sum(dtype=torch.float64)


def _wholes(batches: StepBatches) -> list[PackedBatch]:
    return [micro.whole for micro in batches.micro_batches]


def _whole_gradients(decoder: Decoder) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in decoder.named_parameters():
        yield name, whole(gradient(parameter)).detach().to("cpu", torch.float64, copy=True)


def _doubles(tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    return ((name, tensor.to("cpu", torch.float64, copy=True)) for name, tensor in tensors)
