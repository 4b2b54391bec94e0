"""Where a loss or a gradient that is not finite comes from: rank, micro-batch, rows, documents, layer, parameters.

The step is run once more with hooks on the layers. All ranks do it together, as they communicate in it.
"""

import math
from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from longspan.data import PADDING
from longspan.spec.stages import Stage
from longspan.train.data_parallel import reduce_over_copies, release
from longspan.train.forward import MicroBatch, ParallelModel
from longspan.train.session import StepBatches

__all__ = ["diagnose"]

SHOWN = 3
# Layers and their branches: fine enough to tell attention from MLP, coarse enough that no input has two names.
HOOKED_DEPTH = 3


@dataclass(frozen=True)
class _Tokens:
    """Tokens of one micro-batch whose loss is not finite: rows, counted from the start of the data, and documents."""

    micro_batch: int
    rows: tuple[int, ...]
    documents: tuple[int, ...]


@dataclass
class _Findings:
    """What one rank found.

    Attributes:
        loss: the step's loss as this rank has it.
        norm: the norm of the gradients likewise.
        weights: names of its parameters that are not finite.
        gradients: names of those whose gradient is not, after the sum over ranks.
        tokens: losses that are not.
        first: place of the first value of the second run that is not, and that place's number: the same on all ranks.
        again: whether the second run's gradients were not finite either.
    """

    loss: float
    norm: float
    weights: list[str] = field(default_factory=list)
    gradients: list[str] = field(default_factory=list)
    tokens: list[_Tokens] = field(default_factory=list)
    first: tuple[int, str] | None = None
    again: bool = False


def diagnose(model: ParallelModel, batches: StepBatches, stage: Stage, loss: float, norm: float) -> str:
    """What is not finite and where it began, in the same words on every rank.

    Args:
        model: with the step's gradients, summed over ranks; they are gone afterwards.
        batches: the step.
        stage: the step's; tells which rows a micro-batch holds.
        loss: the step's loss; ranks that computed it from other parts of a weight may differ.
        norm: norm of the gradients; likewise.
    """
    release(model.decoder)
    named = [*model.decoder.named_parameters()]
    found = _Findings(
        loss,
        norm,
        weights=[name for name, parameter in named if not _finite(parameter)],
        gradients=[
            name for name, parameter in named if parameter.grad is not None and not _finite(parameter.grad)
        ],
    )
    _run_again(model, batches, stage, found)
    found.again = any(
        parameter.grad is not None and not _finite(parameter.grad) for parameter in model.parameters()
    )
    for parameter in model.parameters():
        parameter.grad = None
    return _words(_of_all_ranks(found, model.groups.layout.world), [name for name, _ in named])


def _run_again(model: ParallelModel, batches: StepBatches, stage: Stage, found: _Findings) -> None:
    for parameter in model.parameters():
        parameter.grad = None
    seen = 0

    def look(tensor: Tensor, place: str) -> None:
        nonlocal seen
        seen += 1
        if found.first is None and not _finite(tensor):
            found.first = (seen, place)

    for number, micro in enumerate(batches.micro_batches):
        reduce_over_copies(model.decoder, last=micro is batches.micro_batches[-1])
        with _looking(model.decoder, number, look):
            loss, nll_t = model.token_losses(micro, batches.num_targets)
            look(nll_t, f"a token loss in micro-batch {number}")
            loss.backward()
        mine = stage.batch.samples(0, number, model.groups.coordinate("dp"))
        rows = stage.rows(batches.step)[mine.start : mine.stop]
        if (tokens := _bad_tokens(micro, nll_t, number, rows, model.groups.coordinate("cp"))) is not None:
            found.tokens.append(tokens)


@contextmanager
def _looking(decoder: nn.Module, number: int, look: Callable[[Tensor, str], None]) -> Generator[None]:
    """Show every layer's output, and later the gradient of its input, to `look`."""

    def watch(module: nn.Module, name: str) -> None:
        def before(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            if isinstance(inputs[0], Tensor) and inputs[0].requires_grad:
                place = f"the gradient of the input of {name} in micro-batch {number}"
                inputs[0].register_hook(lambda gradient: look(gradient, place))

        def after(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
            look(output.detach(), f"the output of {name} in micro-batch {number}")

        hooks.callback(module.register_forward_pre_hook(before).remove)
        hooks.callback(module.register_forward_hook(after).remove)

    with ExitStack() as hooks:
        for name, module in decoder.named_modules():
            if name and name.count(".") < HOOKED_DEPTH and not isinstance(module, nn.ModuleList):
                watch(module, name)
        yield


def _bad_tokens(micro: MicroBatch, nll_t: Tensor, number: int, rows: range, cp_rank: int) -> _Tokens | None:
    bad_n = (~nll_t.isfinite()).nonzero().squeeze(1).cpu().numpy()
    if not len(bad_n):
        return None
    whole, place_n = micro.whole, micro.attention.sharding.index(cp_rank)[bad_n]
    pieces = np.unique(np.searchsorted(whole.cu_seqlens, place_n, side="right") - 1)
    documents = {int(document) for document in whole.sample_ids[pieces]} - {PADDING}
    inside = np.unique(place_n // whole.sequence)
    return _Tokens(number, tuple(rows[int(row)] for row in inside), tuple(sorted(documents)))


def _finite(tensor: Tensor) -> bool:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return bool(local.detach().isfinite().all())


def _of_all_ranks(found: _Findings, world: int) -> list[_Findings]:
    if world == 1:
        return [found]
    everything: list[Any] = [None] * world
    dist.all_gather_object(everything, found)
    return everything


def _words(ranks: list[_Findings], names: list[str]) -> str:
    loss, norm = (_worst([found.loss for found in ranks]), _worst([found.norm for found in ranks]))
    parts = [f"loss {loss} and gradient norm {norm} must be finite", *_token_words(ranks)]
    firsts = [(found.first, rank) for rank, found in enumerate(ranks) if found.first is not None]
    if firsts:
        (number, place), _ = min(firsts)
        where = [rank for first, rank in firsts if first[0] == number]
        parts.append(f"first of all came {place} on {_ranks(where)}")
    if weights := [name for name in names if any(name in found.weights for found in ranks)]:
        where = [rank for rank, found in enumerate(ranks) if found.weights]
        parts.append(f"weights that are not finite: {_some(weights)} on {_ranks(where)}")
    if gradients := [name for name in names if any(name in found.gradients for found in ranks)]:
        parts.append(f"gradients that are not finite: {_some(gradients)}, {len(gradients)} of {len(names)}")
    if not firsts and not any(found.again for found in ranks):
        parts.append("the same step run again was finite, so suspect a machine")
    elif not firsts:
        parts.append("every layer's output and input gradient was finite: a sum overflowed")
    return "; ".join(parts)


def _worst(numbers: list[float]) -> float:
    """The first one that is not finite, if any."""
    return next((number for number in numbers if not math.isfinite(number)), numbers[0])


def _token_words(ranks: list[_Findings]) -> Iterable[str]:
    """One part for each set of tokens; ranks may share rows, and tp ranks have the same tokens."""
    where: dict[_Tokens, list[int]] = {}
    for rank, found in enumerate(ranks):
        for tokens in found.tokens:
            where.setdefault(tokens, []).append(rank)
    for tokens, on in where.items():
        yield (
            f"token losses are not finite on {_ranks(on)} in micro-batch {tokens.micro_batch}: "
            f"rows {_some(tokens.rows)}, documents {_some(tokens.documents)}"
        )


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _some(items: Iterable[Any]) -> str:
    items = [*items]
    more = f" and {len(items) - SHOWN} more" if len(items) > SHOWN else ""
    return ", ".join(map(str, items[:SHOWN])) + more
