"""Who holds which tokens and weights, against a table written by hand."""

from typing import Any

import pytest

from longspan.errors import ConfigError, UnsupportedError
from longspan.spec.layout import Layout
from longspan.spec.model import ModelSpec
from longspan.spec.ownership import ModuleShards, axis_roles, ownership
from longspan.spec.parameters import parameter_shapes

SIZES: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 8,
    "num_kv_heads": 2,
    "vocab_size": 257,
}
COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")
ROWS = ("o_proj", "down_proj")


def shards(layout: Layout, **changes: Any) -> dict[str, ModuleShards]:
    modules = ownership(layout, ModelSpec(**SIZES | changes))
    return {module.module.rpartition(".")[2]: module for module in modules}


def test_every_parameter_is_owned_and_nothing_else_has_a_shape() -> None:
    spec = ModelSpec(**SIZES, output_bias=True, mlp_bias=True, qk_norm=True)
    owned = {
        module.module.replace("*", "0"): module.weight_shape
        for module in ownership(Layout(), spec)
        if module.weight_shape
    }
    shapes = {name: shape for name, shape in parameter_shapes(spec).items() if "layers.1" not in name}
    weights = {name.removesuffix(".weight"): shape for name, shape in shapes.items() if "bias" not in name}
    biases = {
        name: shape for name, shape in shapes.items() if name.endswith(("o_proj.bias", "down_proj.bias"))
    }
    assert owned == weights | biases


@pytest.mark.parametrize("sp", [False, True])
def test_tp_splits_weights_by_rows_or_columns(sp: bool) -> None:
    modules = shards(Layout(tp=2, sp=sp), qk_norm=True)
    assert {name for name, module in modules.items() if module.weight_dim == 0} == set(COLUMNS)
    assert {name for name, module in modules.items() if module.weight_dim == 1} == set(ROWS)


def test_one_rank_holds_everything() -> None:
    for module in shards(Layout()).values():
        assert (module.input_tokens, module.output_tokens) == ((), ())
        assert (module.weight_dim, module.split, module.gradient_sum) == (None, None, ())


def test_cp_deals_out_every_activation_and_no_weight() -> None:
    for module in shards(Layout(cp_outer=2, cp_inner=2)).values():
        assert (module.input_tokens, module.output_tokens) == (("cp",), ("cp",))
        assert module.weight_dim is None
        assert module.gradient_sum == (("cp",) if module.weight_shape else ())


def test_sp_deals_out_only_what_lies_between_split_weights() -> None:
    modules = shards(Layout(cp_inner=2, tp=2, sp=True))
    stream = {"input_layernorm", "residual", "post_attention_layernorm", "norm"}
    assert {name for name, module in modules.items() if "tp" in module.input_tokens} == stream
    leave = {name for name, module in modules.items() if "tp" in module.output_tokens}
    assert leave == stream | {"embed_tokens", "o_proj", "down_proj"}
    assert modules["attention"].input_tokens == ("cp",)


@pytest.mark.parametrize(
    ("tp", "sp", "summed_over_tp"),
    [
        (1, False, set()),
        (2, False, {"q_norm", "k_norm"}),
        (2, True, {"q_norm", "k_norm", "input_layernorm", "post_attention_layernorm", "norm"}),
        (4, False, {"q_norm", "k_norm", "k_proj", "v_proj"}),
    ],
)
def test_gradients_are_summed_over_tp_where_a_whole_weight_is_used_in_parts(
    tp: int, sp: bool, summed_over_tp: set[str]
) -> None:
    layout = Layout(dp_replicate=2, cp_inner=2, tp=tp, sp=sp)
    modules = shards(layout, qk_norm=True, output_bias=True)
    assert {name for name, module in modules.items() if "tp" in module.gradient_sum} == summed_over_tp
    for module in modules.values():
        assert module.gradient_sum[:2] == (("dp", "cp") if module.weight_shape else ())


def test_shared_key_value_heads_are_whole_on_every_rank() -> None:
    modules = shards(Layout(tp=4))
    assert (modules["k_proj"].weight_dim, modules["k_proj"].split) == (None, "heads")
    assert modules["q_proj"].weight_dim == 0


def test_a_tied_output_projection_lies_as_its_embedding() -> None:
    modules = shards(Layout(tp=2), tie_embeddings=True)
    tied, table = modules["lm_head"], modules["embed_tokens"]
    assert (tied.weight_shape, tied.weight_dim) == (table.weight_shape, table.weight_dim)


def test_models_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match="tp=3"):
        shards(Layout(tp=3))
    with pytest.raises(UnsupportedError, match="dropout"):
        shards(Layout(), dropout=0.1)


def test_axes_in_use_are_named_as_simply_as_can_be() -> None:
    layout = Layout(pp=2, dp_shard=2, cp_outer=2, cp_inner=2, tp=2, sp=True, ranks_per_node=4)
    roles = axis_roles(layout)
    assert [role.axis for role in roles] == ["tp", "cp_inner", "cp_outer", "dp", "pp"]
    assert [role.link for role in roles] == ["intra-node"] * 2 + ["inter-node"] * 3
    assert [role.axis for role in axis_roles(Layout(cp_inner=2))] == ["cp"]
    assert axis_roles(Layout()) == ()
    assert "tokens" in axis_roles(Layout(tp=2, sp=True))[0].splits
    assert "tokens" in axis_roles(Layout(tp=2))[0].copies
