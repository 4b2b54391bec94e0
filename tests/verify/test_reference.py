"""The reference against transformers, document by document."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from longspan.spec.model import ModelSpec
from longspan.verify.reference import dense_attend, reference_losses
from tests.model.families import CONFIGS, hf_logits, hf_model, our_decoder

LENGTHS = [13, 1, 22, 4]
TOKENS_T = torch.randint(61, (sum(LENGTHS),), generator=torch.Generator().manual_seed(2))
POSITIONS_T = torch.cat([torch.arange(length) for length in LENGTHS])
DOCUMENTS_T = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
LABELS_T = torch.cat([F.pad(document[1:], (0, 1), value=-100) for document in TOKENS_T.split(LENGTHS)])


@pytest.mark.parametrize("case", ["llama3", "mistral", "qwen3-windows"])
def test_packed_documents_are_documents_alone(case: str) -> None:
    model = hf_model(CONFIGS[case])
    decoder = our_decoder(ModelSpec.from_hf(CONFIGS[case]), model)
    losses_T = reference_losses(decoder, TOKENS_T, POSITIONS_T, DOCUMENTS_T, LABELS_T)
    logits_TV = torch.cat([hf_logits(model, document) for document in TOKENS_T.split(LENGTHS)])
    expected_T = F.cross_entropy(logits_TV, LABELS_T, reduction="none", ignore_index=-100)
    assert (losses_T - expected_T).abs().max() <= 1e-5
    assert losses_T[LABELS_T < 0].abs().max() == 0.0


@pytest.mark.parametrize("case", ["llama3", "mistral"])
def test_bounds_and_positions_are_seen_in_the_losses(case: str) -> None:
    decoder = our_decoder(ModelSpec.from_hf(CONFIGS[case]), hf_model(CONFIGS[case]))
    right_T = reference_losses(decoder, TOKENS_T, POSITIONS_T, DOCUMENTS_T, LABELS_T)
    one_document_T = reference_losses(
        decoder, TOKENS_T, torch.arange(len(TOKENS_T)), torch.zeros_like(DOCUMENTS_T), LABELS_T
    )
    assert torch.equal(one_document_T[: LENGTHS[0]], right_T[: LENGTHS[0]])
    assert (one_document_T - right_T).abs().max() > 1e-2


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attention_is_torchs_with_the_same_mask(window: int | None, kv_heads: int) -> None:
    T, H, D = len(TOKENS_T), 4, 6
    q, k, v = (
        torch.randn(T, heads, D, dtype=torch.float64, requires_grad=True) for heads in (H, kv_heads, kv_heads)
    )
    seen_TT = torch.zeros(T, T, dtype=torch.bool)
    for i in range(T):
        for j in range(max(0, i + 1 - (window or T)), i + 1):
            seen_TT[i, j] = DOCUMENTS_T[i] == DOCUMENTS_T[j]
    expected = F.scaled_dot_product_attention(
        *(x.transpose(0, 1) for x in (q, k, v)), attn_mask=seen_TT, enable_gqa=True
    )
    upstream = torch.randn(T, H, D, dtype=torch.float64)

    def outputs_and_gradients(out_THD: Tensor) -> list[Tensor]:
        return [out_THD, *torch.autograd.grad(out_THD, (q, k, v), upstream)]

    theirs = outputs_and_gradients(expected.transpose(0, 1))
    for chunk in (7, T, 512):
        ours = outputs_and_gradients(dense_attend(DOCUMENTS_T, POSITIONS_T, chunk)(q, k, v, window))
        for a, b in zip(ours, theirs, strict=True):
            assert (a - b).abs().max() <= 1e-12
