"""Fresh weights depend on the seed and the name only."""

import pytest
import torch

from longspan.model import InitialWeights, initial_tensor
from longspan.spec.model import ModelSpec
from longspan.spec.parameters import parameter_shapes

SPEC = ModelSpec(
    family="qwen3",
    num_layers=3,
    hidden_size=64,
    intermediate_size=96,
    num_heads=4,
    vocab_size=300,
    qkv_bias=True,
)
NAME = "layers.1.mlp.up_proj.weight"


def test_is_a_function_of_seed_and_name() -> None:
    first = initial_tensor(SPEC, NAME, seed=5)
    torch.manual_seed(99)
    assert torch.equal(first, initial_tensor(SPEC.with_changes(num_layers=2, vocab_size=7), NAME, seed=5))
    assert torch.equal(first, InitialWeights(SPEC, seed=5)[NAME])
    others = [("layers.2.mlp.up_proj.weight", 5), ("layers.1.mlp.gate_proj.weight", 5), (NAME, 6), (NAME, -5)]
    assert not any(torch.equal(first, initial_tensor(SPEC, name, seed)) for name, seed in others)


def test_is_normal_with_the_models_spread() -> None:
    table_VE = initial_tensor(SPEC, "embed_tokens.weight", seed=0)
    assert table_VE.std().item() == pytest.approx(SPEC.initializer_range, rel=0.02)
    assert abs(table_VE.mean().item()) < 1e-3
    assert initial_tensor(SPEC, "layers.0.self_attn.q_norm.weight", 0).tolist() == [1.0] * 16
    assert initial_tensor(SPEC, "layers.0.self_attn.q_proj.bias", 0).tolist() == [0.0] * 64


def test_has_every_parameter() -> None:
    weights = InitialWeights(SPEC, seed=0)
    assert {name: tuple(tensor.shape) for name, tensor in weights.items()} == parameter_shapes(SPEC)
    assert "layers.3.input_layernorm.weight" not in weights
    with pytest.raises(KeyError):
        initial_tensor(SPEC, "layers.3.input_layernorm.weight", 0)


def test_known_value_stays() -> None:
    """A change of these numbers changes every run that starts afresh."""
    drawn = initial_tensor(SPEC, NAME, seed=0).flatten()[:3]
    assert drawn.tolist() == pytest.approx([-0.000563616, -0.006279007, 0.026861874], abs=1e-7)
