"""The decoder computes what transformers computes."""

import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import modeling_rope_utils

from longspan.errors import UnsupportedError
from longspan.model import Decoder, InitialWeights, Rotary, materialise
from longspan.spec.flops import gemm_flops, logits_flops
from longspan.spec.model import ModelSpec, RopeSpec
from longspan.spec.parameters import parameter_shapes
from tests.model.families import CONFIGS, hf_logits, hf_model, our_decoder, our_logits

TOKENS_T = torch.randint(61, (40,), generator=torch.Generator().manual_seed(1))
CASES = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


class Float64Torch:
    """`torch` as a module sees it, with float64 wherever it asks for float32."""

    def __getattr__(self, name: str) -> Any:
        return torch.float64 if name in ("float", "float32") else getattr(torch, name)


@pytest.fixture
def float64_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the float32 upcasts of norms, softmax and RoPE in transformers by float64."""
    monkeypatch.setattr(modeling_rope_utils, "torch", Float64Torch())
    for family in ("llama", "mistral", "qwen2", "qwen3"):
        __import__(f"transformers.models.{family}.modeling_{family}")
        module = sys.modules[f"transformers.models.{family}.modeling_{family}"]
        monkeypatch.setattr(module, "torch", Float64Torch())


@CASES
def test_logits_equal_transformers(config: dict[str, Any]) -> None:
    model = hf_model(config)
    decoder = our_decoder(ModelSpec.from_hf(config), model)
    expected_TV = hf_logits(model, TOKENS_T)
    assert expected_TV.std() > 0.1
    assert (our_logits(decoder, TOKENS_T) - expected_TV).abs().max() <= 1e-5


@CASES
@pytest.mark.usefixtures("float64_reference")
def test_logits_equal_transformers_in_float64(config: dict[str, Any]) -> None:
    model = hf_model(config, torch.float64)
    decoder = our_decoder(ModelSpec.from_hf(config), model)
    assert (our_logits(decoder, TOKENS_T) - hf_logits(model, TOKENS_T)).abs().max() <= 1e-10


@pytest.mark.parametrize("case", ["llama3", "linear", "yarn", "yarn-mscales"])
def test_rope_scaling_is_seen_in_the_logits(case: str) -> None:
    spec = ModelSpec.from_hf(CONFIGS[case])
    decoder = our_decoder(spec, hf_model(CONFIGS[case]))
    assert spec.rope is not None
    plain = spec.with_changes(rope=RopeSpec(theta=spec.rope.theta))
    assert (our_logits(decoder, TOKENS_T) - our_logits(decoder, TOKENS_T, plain)).abs().max() > 1e-2


@pytest.mark.parametrize("case", ["mistral", "qwen2", "qwen3-windows"])
@pytest.mark.parametrize("wrong", [5, 8, None])
def test_windows_are_seen_in_the_logits(case: str, wrong: int | None) -> None:
    model, spec = hf_model(CONFIGS[case]), ModelSpec.from_hf(CONFIGS[case])
    other = spec.with_changes(windows=[wrong] * spec.num_layers)
    here, there = (our_logits(our_decoder(s, model), TOKENS_T) for s in (spec, other))
    assert (here - there).abs().max() > 1e-2


@CASES
def test_parameters_are_those_of_the_spec(config: dict[str, Any]) -> None:
    spec = ModelSpec.from_hf(config)
    decoder = Decoder(spec, torch.bfloat16)
    assert {name: tuple(p.shape) for name, p in decoder.named_parameters()} == parameter_shapes(spec)
    assert all(p.is_meta and p.dtype == torch.bfloat16 for p in decoder.parameters())
    assert list(decoder.buffers()) == []


def test_computes_in_another_dtype_than_it_keeps() -> None:
    spec = ModelSpec.from_hf(CONFIGS["qwen3-windows"])
    mixed, low = Decoder(spec, torch.float32, torch.bfloat16), Decoder(spec, torch.bfloat16)
    for decoder in (mixed, low):
        materialise(decoder, InitialWeights(spec, seed=3))
    logits_TV = our_logits(mixed, TOKENS_T)
    assert logits_TV.dtype == torch.bfloat16
    assert torch.equal(logits_TV, our_logits(low, TOKENS_T))
    assert {p.dtype for p in mixed.parameters()} == {torch.float32}


def test_runs_the_matrix_products_of_the_closed_form() -> None:
    spec = ModelSpec.from_hf(CONFIGS["head-dim"])
    decoder = Decoder(spec)
    rope = Rotary(*torch.ones(2, 40, spec.head_dim // 2, device="meta"))
    with FlopCounterMode(display=False) as counter:
        hidden_TE = decoder(TOKENS_T.to("meta"), rope, lambda q, k, v, window: q)
    assert counter.get_total_flops() == gemm_flops(spec, 40)
    with FlopCounterMode(display=False) as counter:
        decoder.logits(hidden_TE)
    assert counter.get_total_flops() == logits_flops(spec, 40)


@pytest.mark.parametrize(
    "changes", [{"attention_dropout": 0.1}, {"fused_attention": False}, {"norm": "layernorm"}]
)
def test_refuses_what_it_would_ignore(changes: dict[str, Any]) -> None:
    spec = ModelSpec.from_hf(CONFIGS["llama2"]).with_changes(**changes)
    with pytest.raises(UnsupportedError, match="cannot train this llama model"):
        Decoder(spec)


def test_hooks_see_every_layer_with_an_explicit_attend() -> None:
    spec = ModelSpec.from_hf(CONFIGS["qwen3-windows"])
    seen: list[int | None] = []

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None) -> torch.Tensor:
        seen.append(window)
        assert (q.shape, k.shape, v.shape) == ((40, 4, 8), (40, 2, 8), (40, 2, 8))
        return q

    decoder: nn.Module = Decoder(spec)
    decoder(TOKENS_T.to("meta"), Rotary(*torch.ones(2, 40, 4, device="meta")), attend)
    assert seen == [6, None, 6]
