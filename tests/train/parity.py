"""A tiny model run two ways: this layout's ranks, and one process with a dense mask in float64."""

from functools import cache
from typing import NamedTuple

import numpy as np
import torch

from longspan.attention import Meter, choose_kernel
from longspan.data import PackedBatch
from longspan.model import InitialWeights, whole
from longspan.spec.exchange import Options
from longspan.spec.layout import Layout
from longspan.spec.model import ModelSpec
from longspan.train.context_parallel import ContextParallel
from longspan.train.forward import ParallelModel, prepare
from longspan.train.groups import Groups
from longspan.train.parallelize import ModelOptions, build_model
from longspan.train.session import StepBatches
from longspan.train.step import gradients_of
from longspan.verify.reference import reference_losses

MODELS = {
    "llama": {"num_kv_heads": 4},
    "gqa": {"num_kv_heads": 2},
    "mqa_window": {"family": "mistral", "num_kv_heads": 1, "windows": (7, 7)},
    "qwen2": {
        "family": "qwen2",
        "num_kv_heads": 2,
        "windows": (None, 5),
        "qkv_bias": True,
        "tie_embeddings": True,
    },
    "qwen3": {"family": "qwen3", "num_kv_heads": 2, "qk_norm": True, "head_dim": 6},
    "biased": {"num_kv_heads": 2, "qkv_bias": True, "output_bias": True, "mlp_bias": True},
}
BATCHES = {
    # lengths of the documents of each row; a row is 61 tokens, divisible by neither cp, 2·cp nor tp.
    "crossing": [[[33, 17, 11]]],
    "dust": [[[1, 1, 40, 1, 2, 16]]],
    "two_rows": [[[61], [9, 30, 22]]],
    "masked": [[[3, 2]], [[61]], [[4]]],
    # Four micro-batches are accumulated; dp ranks take them in turn, so that in some only one rank has targets.
    "targetless": [[[1, 1, 1]], [[61]], [[1]], [[20, 30]]],
}
SEQUENCE = 61


class Outcome(NamedTuple):
    """Loss and gradients by name, whole and in float64."""

    loss: float
    gradients: dict[str, torch.Tensor]


def tiny_model(name: str) -> ModelSpec:
    """Two layers of a family with awkward sizes: 53 tokens of vocabulary, 24 wide."""
    sizes = {"num_layers": 2, "hidden_size": 24, "intermediate_size": 40, "num_heads": 4, "vocab_size": 53}
    return ModelSpec(**sizes | {"initializer_range": 0.3} | MODELS[name])


def batches(name: str, copies: int) -> list[PackedBatch]:
    """Micro-batches of random documents, `copies` different ones of each."""
    generator = np.random.default_rng(7)
    return [
        PackedBatch.from_documents(
            [[generator.integers(0, 53, n) for n in lengths] for lengths in rows], SEQUENCE
        )
        for _ in range(copies)
        for rows in BATCHES[name]
    ]


@cache
def groups(layout: Layout) -> Groups:
    """The groups of a layout, made once in each rank of the pool."""
    return Groups.create(layout)


def parallel_outcome(model: ParallelModel, micro_batches: list, num_targets: int) -> Outcome:
    """Loss and summed gradients of one global step."""
    sums = gradients_of(model, StepBatches(0, tuple(micro_batches), num_targets))
    return Outcome(sums.mean, {n: whole(p.grad).double() for n, p in model.decoder.named_parameters()})


def reference_outcome(spec: ModelSpec, data: list[PackedBatch], num_targets: int, seed: int) -> Outcome:
    """The same step in one process, by definition."""
    decoder = build_model(
        spec, InitialWeights(spec, seed), Groups.alone(), ModelOptions(torch.float64, torch.float64)
    )
    total = 0.0
    for batch in data:
        documents = np.repeat(np.arange(len(batch.sample_ids)), np.diff(batch.cu_seqlens))
        arrays = (batch.tokens_T, batch.positions_T, documents, batch.labels_T)
        loss = reference_losses(decoder, *map(torch.from_numpy, arrays)).sum() / num_targets
        loss.backward()
        total += float(loss.detach())
    return Outcome(total, {name: p.grad for name, p in decoder.named_parameters()})


def errors(outcome: Outcome, reference: Outcome) -> tuple[float, float]:
    """Loss error, and the worst relative gradient error by the project's error rule."""
    largest = max(float(g.abs().max()) for g in reference.gradients.values())
    worst = max(
        float((outcome.gradients[name] - g).abs().max()) / max(float(g.abs().max()), 1e-6 * largest)
        for name, g in reference.gradients.items()
    )
    return abs(outcome.loss - reference.loss) / abs(reference.loss), worst


def parity_cell(rank, world, sizes, model, batch, sharding, transport, seed=0, recompute="none"):
    """(loss error, gradient error) on rank 0: of the layout in float64 and float32, and of one process in float32."""
    spec, layout = tiny_model(model), Layout(**sizes)
    data = batches(batch, layout.dp)
    num_targets = sum(b.num_targets for b in data)

    def outcome(group: Groups, dtype: torch.dtype) -> Outcome:
        options = Options(inner=group.layout.cp_inner)
        context = ContextParallel(group.layout.cp, group.coordinate("cp"), sharding, transport, options)
        decoder = build_model(spec, InitialWeights(spec, seed), group, ModelOptions(dtype, dtype, recompute))
        parallel = ParallelModel(decoder, group, choose_kernel("auto", "cpu", dtype), Meter(), loss_chunk=16)
        own = data[group.coordinate("dp") :: group.layout.dp]
        micro_batches = [prepare(b, tuple(spec.window_layers), context) for b in own]
        return parallel_outcome(parallel, micro_batches, num_targets)

    wide, narrow = outcome(groups(layout), torch.float64), outcome(groups(layout), torch.float32)
    if rank:
        return None
    reference = reference_outcome(spec, data, num_targets, seed)
    return [errors(run, reference) for run in (wide, narrow, outcome(Groups.alone(), torch.float32))]
