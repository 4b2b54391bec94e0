"""One training step of the same model, ours and a plain loop over transformers."""

from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from longspan.attention import Meter, choose_kernel
from longspan.data import PackedBatch
from longspan.model import InitialWeights
from longspan.spec.model import ModelSpec
from longspan.spec.run_sections import OptimizerSection, TrainSection
from longspan.train.context_parallel import ContextParallel
from longspan.train.forward import ParallelModel, prepare
from longspan.train.groups import Groups
from longspan.train.optimizer import build_optimizer
from longspan.train.parallelize import ModelOptions, build_model
from longspan.train.session import StepBatches
from longspan.train.step import gradients_of, update

# No weight decay, so that a plain loop needs no parameter groups to do the same.
ADAMW = OptimizerSection(weight_decay=0.0)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_SEED = 0

AdamWKind = Literal["fused", "foreach"]


class Loop(Protocol):
    """A model, its optimizer and one batch."""

    def step(self) -> float:
        """Take one optimizer step and give the loss before it."""
        ...


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is trained.

    Attributes:
        layers: Decoder layers.
        hidden: Hidden size.
        intermediate: MLP width.
        heads: Query heads.
        kv_heads: Key/value heads.
        tokens: Tokens of the one row, one document.
        dtype: Dtype of activations, float32 or bfloat16; weights are float32.
        threads: CPU threads of either side.
        device: auto, cpu or cuda.
    """

    layers: int = 4
    hidden: int = 256
    intermediate: int = 704
    heads: int = 8
    kv_heads: int = 4
    tokens: int = 2048
    dtype: str = "float32"
    threads: int = 2
    device: str = "auto"

    def spec(self, vocabulary: int) -> ModelSpec:
        """The model with one vocabulary, a Llama."""
        return ModelSpec(
            family="llama",
            num_layers=self.layers,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            vocab_size=vocabulary,
            max_positions=self.tokens,
        )

    def row(self, vocabulary: int) -> np.ndarray:
        """Token ids of the row."""
        return np.random.default_rng(_SEED).integers(vocabulary, size=self.tokens)


class Ours:
    """Longspan's step as its training loop takes it, in one process or on one rank of `groups`."""

    def __init__(self, case: Case, vocabulary: int, groups: Groups | None = None) -> None:
        spec = case.spec(vocabulary)
        groups, compute = groups or Groups.alone(case.device), DTYPES[case.dtype]
        decoder = build_model(spec, InitialWeights(spec, _SEED), groups, ModelOptions(compute_dtype=compute))
        kernel = choose_kernel("auto", case.device, compute)
        self.model = ParallelModel(decoder, groups, kernel, Meter(), TrainSection().loss_chunk)
        self.optimizer = build_optimizer(self.model.parameters(), ADAMW)
        batch = PackedBatch.from_documents([[case.row(vocabulary)]], case.tokens)
        context = ContextParallel(groups.layout.cp, groups.coordinate("cp"), "zigzag", "ring")
        micro = prepare(batch, tuple(spec.window_layers), context)
        self.batches = StepBatches(0, (micro,), batch.num_targets)

    def step(self) -> float:
        """Take one optimizer step and give the loss before it."""
        sums = gradients_of(self.model, self.batches)
        update(self.model, self.optimizer, ADAMW.lr, ADAMW.clip_norm)
        return sums.mean


class Transformers:
    """A plain loop over `LlamaForCausalLM`, with one of torch's ways to run AdamW."""

    def __init__(self, case: Case, vocabulary: int, adamw: AdamWKind) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        self.adamw: AdamWKind = adamw
        spec = case.spec(vocabulary)
        options: dict[str, Any] = spec.to_hf() | {"attn_implementation": "sdpa"}
        config: Any = LlamaConfig(**options)
        model: Any = LlamaForCausalLM(config)
        self.model = model.to(case.device)
        self.model.load_state_dict(_hf_names(InitialWeights(spec, _SEED)))
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=ADAMW.lr,
            betas=(ADAMW.beta1, ADAMW.beta2),
            eps=ADAMW.eps,
            weight_decay=ADAMW.weight_decay,
            fused=adamw == "fused",
            foreach=adamw == "foreach",
        )
        self.tokens = torch.from_numpy(case.row(vocabulary))[None].to(case.device)
        self.autocast = torch.autocast(case.device, DTYPES[case.dtype], enabled=case.dtype != "float32")

    def step(self) -> float:
        """Take one optimizer step and give the loss before it."""
        self.optimizer.zero_grad(set_to_none=True)
        with self.autocast:
            loss = self.model(self.tokens, labels=self.tokens, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), ADAMW.clip_norm)
        self.optimizer.step()
        return loss.item()


def _hf_names(weights: InitialWeights) -> dict[str, Tensor]:
    return {
        name if name.startswith("lm_head") else f"model.{name}": tensor for name, tensor in weights.items()
    }
