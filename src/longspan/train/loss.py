"""Cross-entropy over a split vocabulary that never holds more than one chunk of logits.

The gradient of softmax cross-entropy needs nothing from upstream but one number, so it is computed in the
forward pass, while a chunk's logits exist: three matrix products for each chunk, none of them repeated, and
no logits kept. Over tp each rank holds some rows of the output weight (Megatron-LM, arXiv:1909.08053,
section 3); ranks tell each other two numbers a token, in one message a chunk.

Known shortfalls: the gradients are held from forward to backward (the weight's in float32); no second
derivative; no label smoothing and no soft-capping of logits.

    t tokens of this rank, n of them that count, c of one chunk; E hidden size; v vocabulary rows of this
    rank; p ranks of the group
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from longspan.data import IGNORE

__all__ = ["chunked_token_losses", "default_chunk"]

_CHUNK_BYTES = 64 * 2**20


def chunked_token_losses(
    hidden_tE: Tensor,
    weight_vE: Tensor,
    labels_t: Tensor,
    scale_t: Tensor,
    *,
    vocab_start: int = 0,
    group: dist.ProcessGroup | None = None,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """The sum of scaled token losses, and the loss of each token.

    Logits, their log-sum-exp and the sum of the weight's gradient are float32, or float64 for float64 inputs;
    on the CPU, inputs of lower precision are widened first (one float32 copy of the weight). Tokens that do
    not count take part in no product. Backward only multiplies by the upstream number, in place, so it runs
    once.

    Args:
        hidden_tE: plain tensor of final hidden states, the same on every rank of `group`. Its gradient comes
            out as this rank's *partial* sum: the caller adds it up over `group`.
        weight_vE: plain tensor with rows [vocab_start, vocab_start + v) of the output weight.
        labels_t: target tokens, int64, numbered over the whole vocabulary; IGNORE where there is none. One
            that no rank holds makes the loss infinite.
        scale_t: factor of each token's loss, such as weight / target count of the global step.
        vocab_start: number of this rank's first vocabulary row.
        group: ranks that hold the other rows; None if this rank holds all.
        chunk: tokens whose logits exist at one time, the same on all ranks of `group`; see `default_chunk`.

    Returns:
        loss: Σ scale · token loss, a scalar to differentiate.
        nll_t: token losses, detached, at least float32; 0 where the label is IGNORE or the scale is 0.
    """
    wide = torch.promote_types(hidden_tE.dtype, torch.float32)
    # Only CUDA multiplies low-precision matrices into a wider result.
    operand = wide if hidden_tE.device.type == "cpu" else hidden_tE.dtype
    logits_cv = weight_vE.new_empty(min(chunk, max(len(hidden_tE), 1)), len(weight_vE), dtype=wide)
    head = _Head(weight_vE.detach().to(operand), vocab_start, group, logits_cv)
    learning = torch.is_grad_enabled()
    return _ChunkedTokenLosses.apply(hidden_tE, weight_vE, labels_t, scale_t.to(wide), head, learning)


def default_chunk(vocab_rows: int) -> int:
    """Tokens whose float32 logits take about 64 MiB, from 128 to 1,024.

    >>> default_chunk(256), default_chunk(32_000), default_chunk(256_000)
    (1024, 524, 128)

    Args:
        vocab_rows: most vocabulary rows that any rank holds, so that all ranks come to the same answer.
    """
    return min(max(_CHUNK_BYTES // (4 * vocab_rows), 128), 1024)


@dataclass(frozen=True, eq=False)
class _Head:
    """This rank's rows of the output weight, with room for one chunk of logits."""

    weight_vE: Tensor
    vocab_start: int
    group: dist.ProcessGroup | None
    logits_cv: Tensor

    def losses(self, hidden_cE: Tensor, labels_c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Token losses of a chunk, and the factors exp_cv and share_c1 of its softmax.

        exp_cv lives in `self.logits_cv` until the next chunk.
        """
        logits_cv = _multiply(hidden_cE, self.weight_vE.t(), self.logits_cv[: len(hidden_cE)], beta=0)
        column_c1, held_c1 = self._columns(labels_c)
        target_c1 = logits_cv.gather(1, column_c1).masked_fill(~held_c1, -torch.inf)
        top_c1 = logits_cv.amax(1, keepdim=True)
        exp_cv = logits_cv.sub_(top_c1).exp_()
        lse_c1, target_c1 = self._over_ranks(exp_cv.sum(1, keepdim=True).log() + top_c1, target_c1)
        return (lse_c1 - target_c1).squeeze(1), exp_cv, (top_c1 - lse_c1).exp()

    def logit_gradient(self, exp_cv: Tensor, share_c1: Tensor, labels_c: Tensor, scale_c: Tensor) -> Tensor:
        """Gradient of Σ scale · loss by this rank's logits of a chunk, made in place of exp_cv."""
        column_c1, held_c1 = self._columns(labels_c)
        scale_c1 = scale_c.unsqueeze(1)
        gradient_cv = exp_cv.mul_(share_c1 * scale_c1).scatter_add_(1, column_c1, -scale_c1 * held_c1)
        return gradient_cv.to(self.weight_vE.dtype)

    def _columns(self, labels_c: Tensor) -> tuple[Tensor, Tensor]:
        """Where each label is among this rank's rows, and whether it is there at all."""
        column_c1 = labels_c.unsqueeze(1) - self.vocab_start
        inside_c1 = column_c1.clamp(0, len(self.weight_vE) - 1)
        return inside_c1, inside_c1 == column_c1

    def _over_ranks(self, lse_c1: Tensor, target_c1: Tensor) -> tuple[Tensor, Tensor]:
        """Log-sum-exp over the whole vocabulary, and the target's logit from the rank that holds it."""
        if self.group is None:
            return lse_c1, target_c1
        mine_c2 = torch.cat((lse_c1, target_c1), dim=1)
        all_pc2 = mine_c2.new_empty(self.group.size(), *mine_c2.shape)
        dist.all_gather_single(all_pc2.flatten(0, 1), mine_c2, group=self.group)
        lse_pc1, target_pc1 = all_pc2.split(1, dim=2)
        return lse_pc1.logsumexp(0), target_pc1.amax(0)


class _ChunkedTokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_tE: Tensor,
        weight_vE: Tensor,
        labels_t: Tensor,
        scale_t: Tensor,
        head: _Head,
        learning: bool,
    ) -> tuple[Tensor, Tensor]:
        for_hidden, for_weight = (learning and needed for needed in ctx.needs_input_grad[:2])
        grad_tE = torch.zeros_like(hidden_tE) if for_hidden else None
        grad_vE = torch.zeros_like(weight_vE, dtype=scale_t.dtype) if for_weight else None
        nll_t = torch.zeros_like(scale_t)
        counting_n = ((labels_t != IGNORE) & (scale_t != 0)).nonzero().squeeze(1)
        for start in range(0, len(counting_n), len(head.logits_cv)):
            at_c = counting_n[start : start + len(head.logits_cv)]
            hidden_cE = hidden_tE[at_c].to(head.weight_vE.dtype)
            nll_t[at_c], exp_cv, share_c1 = head.losses(hidden_cE, labels_t[at_c])
            if not (for_hidden or for_weight):
                continue
            grad_cv = head.logit_gradient(exp_cv, share_c1, labels_t[at_c], scale_t[at_c])
            if grad_tE is not None:
                grad_tE[at_c] = (grad_cv @ head.weight_vE).to(grad_tE.dtype)
            if grad_vE is not None:
                _multiply(grad_cv.t(), hidden_cE, grad_vE, beta=1)
        ctx.save_for_backward(grad_tE, grad_vE)
        ctx.weight_dtype = weight_vE.dtype
        ctx.mark_non_differentiable(nll_t)
        return (scale_t[counting_n] * nll_t[counting_n]).sum(), nll_t

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        grad_loss = grad_outputs[0]
        grad_tE, grad_vE = ctx.saved_tensors
        if grad_tE is not None:
            grad_tE.mul_(grad_loss)
        if grad_vE is not None:
            grad_vE = grad_vE.mul_(grad_loss).to(ctx.weight_dtype)
        return grad_tE, grad_vE, None, None, None, None


def _multiply(left: Tensor, right: Tensor, out: Tensor, beta: int) -> Tensor:
    """`out = beta · out + left @ right` in the dtype of `out`."""
    if left.dtype == out.dtype:
        return torch.addmm(out, left, right, beta=beta, out=out)
    return torch.addmm(out, left, right, out_dtype=out.dtype, beta=beta, out=out)
