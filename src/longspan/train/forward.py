"""One micro-batch through this rank's part of the model, from packed rows to token losses."""

from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from longspan.attention import Kernel, Meter
from longspan.data import LocalBatch, PackedBatch, shard
from longspan.model import Decoder, rotary
from longspan.train.context_parallel import AttentionPlan, ContextParallel, bind_attention, plan_attention
from longspan.train.data_parallel import own_parameters
from longspan.train.groups import Groups
from longspan.train.loss import chunked_token_losses
from longspan.train.tensor_parallel import local_hidden

__all__ = ["MicroBatch", "ParallelModel", "prepare"]

# t tokens of this cp rank, E hidden size, v this tp rank's rows of the vocabulary


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """A micro-batch as this rank computes it.

    Attributes:
        whole: all tokens of the micro-batch.
        local: this cp rank's tokens.
        attention: token placement and exchanges.
    """

    whole: PackedBatch
    local: LocalBatch
    attention: AttentionPlan


def prepare(batch: PackedBatch, windows: tuple[int | None, ...], context: ContextParallel) -> MicroBatch:
    """Deal a micro-batch and plan its attention, on the CPU and without communication."""
    plan = plan_attention(batch, windows, context)
    return MicroBatch(batch, shard(batch, plan.sharding.index(context.rank)), plan)


@dataclass(frozen=True, eq=False)
class ParallelModel:
    """This rank's part of the model and what is needed to run it.

    Attributes:
        decoder: from `build_model`.
        groups: this rank's groups.
        kernel: attention kernel.
        meter: tally of the attention's bytes, pairs and waiting.
        loss_chunk: tokens whose logits exist at one time.
        grad_dtype: in which attention's partial gradients travel, where the compute dtype is no wider; None for
            float32 or wider.
    """

    decoder: Decoder
    groups: Groups
    kernel: Kernel
    meter: Meter
    loss_chunk: int
    grad_dtype: torch.dtype | None = None

    def token_losses(self, micro: MicroBatch, num_targets: int) -> tuple[Tensor, Tensor]:
        """This rank's summand of the global loss, and the loss of each of its tokens.

        Args:
            micro: the micro-batch.
            num_targets: targets of the whole global step: over all its micro-batches and dp ranks.

        Returns:
            A scalar whose sum over dp × cp and micro-batches is the loss of the step, and token losses [t], detached.
        """
        decoder, local, device = self.decoder, micro.local, self.groups.device
        rope = rotary(
            decoder.rope_spec, local.positions_t.to(device), decoder.spec.head_dim, decoder.compute_dtype
        )
        wire = self.grad_dtype and torch.promote_types(self.grad_dtype, decoder.compute_dtype)
        attend = bind_attention(micro.attention, self.groups, self.kernel, self.meter, wire)
        hidden_tE = local_hidden(decoder(local.tokens_t.to(device), rope, attend))
        weight_vE, vocab_start = self._output_rows()
        return chunked_token_losses(
            hidden_tE,
            weight_vE,
            local.labels_t.to(device),
            local.weights_t.to(device, torch.float64) / max(num_targets, 1),
            vocab_start=vocab_start,
            group=self.groups.tp.get_group() if self.groups.tp else None,
            chunk=self.loss_chunk,
        )

    def _output_rows(self) -> tuple[Tensor, int]:
        """This tp rank's rows of the output weight, and the first row's number."""
        weight = self.decoder.output_weight
        if not isinstance(weight, DTensor):
            return weight, 0
        vocabulary = weight.shape[0]
        start = ceil(vocabulary / weight.device_mesh.size()) * weight.device_mesh.get_local_rank()
        return weight.to_local(), min(start, vocabulary)

    def parameters(self) -> list[torch.nn.Parameter]:
        """This rank's parts of all parameters, in the same order on every rank; see `own_parameters`."""
        return own_parameters(self.decoder)
