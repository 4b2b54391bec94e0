"""Data parallelism with FSDP2: weights shared out over dp_shard × cp or copied, gradients summed over dp × cp.

One mechanism for both. Along the mesh's shard axis each rank keeps a part of every weight, gradient and optimizer state
and gathers a layer's weights when it is used (ZeRO-3, arXiv:1910.02054); along the replicate axis ranks keep the same
part and sum its gradient (HSDP). With a shard axis of 1 that is plain replication, as DistributedDataParallel does it,
which cannot hold weights that tp has split.

FSDP averages gradients by default. Ours are of a loss that is already divided by the global number of targets, so
the division is switched off.
"""

from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from longspan.model import Decoder

__all__ = ["apply_data_parallel", "own_parameters", "reduce_over_copies", "release"]


def apply_data_parallel(decoder: Decoder, mesh: DeviceMesh, compute_dtype: torch.dtype) -> None:
    """Share out the weights of `decoder` along `mesh` and let backward sum their gradients, in place.

    Each layer is gathered on its own. Layers travel in `compute_dtype`; embedding, final norm and output weights in
    their own, because the gradient of an embedding adds up many tokens. Over `mesh`, gradients are summed in the
    weights' dtype; over tp, those of weights that tp ranks share are summed before, in the dtype they come in.

    Args:
        decoder: on the meta device, its weights plain or split over tp; they become DTensors.
        mesh: (replicate, shard) or (shard,); a tp mesh of the weights has the same root.
        compute_dtype: dtype in which layers compute.
    """
    stored = decoder.norm.weight.dtype
    narrow = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=stored, cast_forward_inputs=False)
    for layer in decoder.layers:
        fully_shard(layer, mesh=mesh, mp_policy=narrow, reshard_after_forward=True)
    shared = partial(fully_shard, mesh=mesh, shard_placement_fn=_shared_dim)
    if decoder.lm_head is not None:
        # A tied embedding is also the output weight, which is used once more after forward.
        shared(decoder.embed_tokens, reshard_after_forward=True)
    shared(decoder, reshard_after_forward=False)
    for module in decoder.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # Without it the division by 1 would be asked of the collective, which gloo does not know.
            module.set_force_sum_reduction_for_comms(True)


def _shared_dim(parameter: nn.Parameter) -> Shard:
    """Rows are shared out; columns where tp splits the rows unevenly.

    There DTensor would take a part of a part for other rows than FSDP does, and gather and save them in wrong places.
    """
    if isinstance(parameter, DTensor) and parameter.placements == (Shard(0),):
        return Shard(1 if parameter.shape[0] % parameter.device_mesh.size() else 0)
    return Shard(0)


def reduce_over_copies(decoder: Decoder, last: bool) -> None:
    """Say before backward whether it is the step's last: only then gradients are summed over copies of a weight.

    Parts are summed over the shard axis in every micro-batch, so that no rank holds a whole gradient for long.
    """
    if isinstance(decoder, FSDPModule):
        decoder.set_requires_all_reduce(last)


def release(decoder: Decoder) -> None:
    """Put back the weights that a forward pass gathered and kept for a backward pass that does not follow."""
    if isinstance(decoder, FSDPModule):
        decoder.reshard()


def own_parameters(decoder: Decoder) -> list[nn.Parameter]:
    """The parameters that this rank keeps between uses, in the same order on every rank.

    Raises:
        RuntimeError: asked for while whole weights are gathered, which stand in for the parameters then; an optimizer
            that took those would train copies.
    """
    parameters = list(decoder.parameters())
    if isinstance(decoder, FSDPModule) and any("shard" not in _axes(parameter) for parameter in parameters):
        raise RuntimeError("weights are gathered; call release after a forward pass without backward")
    return parameters


def _axes(parameter: nn.Parameter) -> tuple[str, ...]:
    return (parameter.device_mesh.mesh_dim_names or ()) if isinstance(parameter, DTensor) else ()
