"""From a model and a layout to this rank's part of the model: one short function for each technique, in a fixed order.

1. tensor parallelism splits weights (and, under sequence parallelism, the residual stream): `tensor_parallel`;
2. context parallelism splits tokens: nothing to do to the weights, the attention of each micro-batch is bound in
   `context_parallel`;
3. recompute wraps whole layers;
4. data parallelism shares weights out between uses, or copies them, and sums gradients: `data_parallel`;
5. only then the weights get their numbers, each rank its own part.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from longspan.errors import UnsupportedError
from longspan.model import Decoder, materialise
from longspan.spec.layout import Layout
from longspan.spec.model import ModelSpec
from longspan.train.data_parallel import apply_data_parallel
from longspan.train.groups import Groups
from longspan.train.tensor_parallel import apply_tensor_parallel

__all__ = ["ModelOptions", "build_model", "refuse_unbuilt_axes"]


@dataclass(frozen=True)
class ModelOptions:
    """How the model is held and computed.

    Attributes:
        dtype: dtype of weights, gradients and optimizer state.
        compute_dtype: dtype of activations; weights are cast where they are used.
        recompute: "none", or "full" to keep only each layer's input and run the layer again in backward.
    """

    dtype: torch.dtype = torch.float32
    compute_dtype: torch.dtype = torch.float32
    recompute: str = "none"


def build_model(
    spec: ModelSpec, weights: Mapping[str, Tensor], groups: Groups, options: ModelOptions
) -> Decoder:
    """This rank's part of a model, with its weights.

    Args:
        spec: the model.
        weights: source of whole tensors by name; each rank reads them and keeps its part.
        groups: this rank's groups; every rank calls together.
        options: dtypes and recompute.

    Raises:
        UnsupportedError: an axis that training does not carry out.
        ConfigError: heads that the layout cannot split.
    """
    refuse_unbuilt_axes(groups.layout)
    groups.layout.check_model(spec)
    decoder = Decoder(spec, options.dtype, options.compute_dtype)
    if groups.tp is not None:
        apply_tensor_parallel(decoder, groups.tp, groups.layout.sp)
    if options.recompute == "full":
        apply_recompute(decoder)
    if groups.weights is not None:
        apply_data_parallel(decoder, groups.weights, options.compute_dtype)
    materialise(decoder, weights, device=groups.device)
    return decoder


def apply_recompute(decoder: Decoder) -> None:
    """Keep only the input of every layer between forward and backward, and run the layer again in backward."""
    for layer in decoder.layers:
        # There is no dropout, so there is no random state to restore.
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)


def refuse_unbuilt_axes(layout: Layout) -> None:
    """Raise UnsupportedError for axes that a run would otherwise ignore."""
    for axis in ("pp", "vpp"):
        if getattr(layout, axis) > 1:
            raise UnsupportedError(
                f"training with {axis}={getattr(layout, axis)} is not supported; use {axis}=1"
            )
