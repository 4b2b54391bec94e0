"""The decoder: Llama, Mistral, Qwen2 and Qwen3 in one class, on flattened tokens."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longspan.errors import UnsupportedError
from longspan.model.layers import Attend, DecoderLayer, Embedding, Linear, RMSNorm
from longspan.model.rotary import Rotary
from longspan.spec.model import ModelSpec, RopeSpec

__all__ = ["Decoder", "DecoderLayer"]

# t this rank's tokens, E hidden, V vocabulary


class Decoder(nn.Module):
    """A decoder-only transformer whose parameters are named as in Hugging Face, without the leading `model.`.

    It is built without numbers, on the meta device, so that a model larger than one host can be split first;
    `longspan.model.materialise` then fills it.

    Args:
        spec: the model.
        dtype: dtype of the parameters.
        compute_dtype: dtype of the activations, by default that of the parameters.

    Raises:
        UnsupportedError: the spec can be priced but not trained.
    """

    def __init__(
        self, spec: ModelSpec, dtype: torch.dtype = torch.float32, compute_dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        if reason := spec.refusal():
            raise UnsupportedError(reason)
        self.spec, self.compute_dtype = spec, compute_dtype or dtype
        with torch.device("meta"):
            self.embed_tokens = Embedding(spec.vocab_size, spec.hidden_size)
            self.layers = nn.ModuleList(DecoderLayer(spec, window) for window in spec.windows)
            self.norm = RMSNorm(spec.hidden_size, spec.norm_eps)
            self.lm_head = (
                None if spec.tie_embeddings else Linear(spec.hidden_size, spec.vocab_size, bias=False)
            )
        self.to(dtype)

    @property
    def rope_spec(self) -> RopeSpec:
        """How positions turn queries and keys."""
        assert self.spec.rope is not None, "learned positions are refused"
        return self.spec.rope

    @property
    def output_weight(self) -> Tensor:
        """Weight of the output projection, (V, E): the embedding's own when tied."""
        return self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def forward(self, tokens_t: Tensor, rope: Rotary, attend: Attend) -> Tensor:
        """Hidden states after the final norm, shape (t, E); the loss takes them from there.

        Args:
            tokens_t: token ids, int64, shape (t,).
            rope: the tokens' rotation, from `longspan.model.rotary`.
            attend: the attention; called once per layer with that layer's window.
        """
        x_tE = self.embed_tokens(tokens_t).to(self.compute_dtype)
        for layer in self.layers:
            x_tE = layer(x_tE, rope.cos_tP, rope.sin_tP, attend)
        return self.norm(x_tE)

    def logits(self, hidden_tE: Tensor) -> Tensor:
        """Scores of every next token, shape (t, V); for small uses, as it holds them all."""
        return F.linear(hidden_tE, self.output_weight.to(hidden_tE.dtype))
