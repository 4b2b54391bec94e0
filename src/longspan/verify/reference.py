"""What one process computes by definition: a dense mask, explicit softmax, full logits.

The proof of everything that is split or fused. It shares no code with the masks, shardings and exchanges that
it judges: a query sees a key if both are in one document and the key is not later, nor `window` or more
places earlier. Use it in float64; nothing here changes the dtype it is given.
"""

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from longspan.model import Attend, Decoder, rotary

__all__ = ["dense_attend", "reference_losses"]

# T tokens of one flattened batch, c queries of one chunk, H query heads, K key/value heads, D head size


def dense_attend(document_ids_T: Tensor, positions_T: Tensor, chunk: int = 512) -> Attend:
    """Attention for `Decoder` through a dense mask, one chunk of queries at a time.

    Holds scores of one chunk, heads * chunk * T numbers, also in the backward, which computes them again.

    Args:
        document_ids_T: tokens see each other only where these agree, int, shape (T,).
        positions_T: order of the tokens inside their document, int, shape (T,).
        chunk: queries at a time.
    """

    def attend(q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, window: int | None) -> Tensor:
        group = q_THD.shape[1] // k_TKD.shape[1]
        k_THD, v_THD = k_TKD.repeat_interleave(group, dim=1), v_TKD.repeat_interleave(group, dim=1)
        outputs = []
        for q_cHD, ids_c, positions_c in zip(
            *(x.split(chunk) for x in (q_THD, document_ids_T, positions_T)), strict=True
        ):
            distance_cT = positions_c[:, None] - positions_T
            seen_cT = (ids_c[:, None] == document_ids_T) & (distance_cT >= 0)
            if window is not None:
                seen_cT = seen_cT & (distance_cT < window)
            outputs.append(checkpoint(_attend_densely, q_cHD, k_THD, v_THD, seen_cT, use_reentrant=False))
        return torch.cat(outputs)

    return attend


def _attend_densely(q_cHD: Tensor, k_THD: Tensor, v_THD: Tensor, seen_cT: Tensor) -> Tensor:
    scores_HcT = torch.einsum("chd,thd->hct", q_cHD, k_THD) * q_cHD.shape[-1] ** -0.5
    weights_HcT = torch.softmax(scores_HcT.masked_fill(~seen_cT, float("-inf")), dim=-1)
    return torch.einsum("hct,thd->chd", weights_HcT, v_THD)


def reference_losses(
    decoder: Decoder, tokens_T: Tensor, positions_T: Tensor, document_ids_T: Tensor, labels_T: Tensor
) -> Tensor:
    """Cross-entropy of every token, differentiable, shape (T,); 0 where the label is negative.

    Args:
        decoder: a whole one, best in float64.
        tokens_T: token ids, int64, shape (T,).
        positions_T: place of each token inside its document, int, shape (T,).
        document_ids_T: which document each token is in, int, shape (T,).
        labels_T: the token to predict from each place, already shifted; negative for none; int64, shape (T,).
    """
    spec = decoder.spec
    rope = rotary(decoder.rope_spec, positions_T, spec.head_dim, decoder.compute_dtype)
    logits_TV = decoder.logits(decoder(tokens_T, rope, dense_attend(document_ids_T, positions_T)))
    chosen_T = logits_TV.gather(1, labels_T.clamp(min=0)[:, None]).squeeze(1)
    return torch.where(labels_T < 0, 0.0, logits_TV.logsumexp(dim=1) - chosen_T)
