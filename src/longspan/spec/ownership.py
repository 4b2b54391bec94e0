"""Who holds what: the shard of tokens and of weights that one rank has, and who sums its gradients.

Two different things shorten the sequence. Context parallelism (cp) deals out the input, and with it every
activation of the model; attention exchanges keys and values. Sequence parallelism (sp) deals out, inside a tp
group only, the activations that tp would copy, and gathers them again before every split weight; attention
still sees all tokens of its cp rank.
"""

from dataclasses import dataclass
from typing import Literal

from longspan.errors import UnsupportedError
from longspan.spec.layout import Layout, Link
from longspan.spec.model import ModelSpec
from longspan.spec.parameters import parameter_shapes

Split = Literal["vocabulary", "heads", "width"]

# Tokens of an activation: this cp rank's, or the residual stream's, which under sp tp ranks share out.
_CP, _STREAM = "cp", "stream"


@dataclass(frozen=True)
class ModuleShards:
    """What one rank holds of one module of the decoder.

    Args:
        module: name of the parameter without `.weight`, `*` for any layer; or of a step without weights.
        input_tokens: axes that share out the tokens of its input; empty means all tokens.
        output_tokens: the same for its output.
        split: what of the module tp shares out.
        weight_shape: full shape of the weight, (output, input); None without one.
        weight_dim: dimension of the weight that tp splits; None when every tp rank holds all of it.
        weight_axes: axes whose ranks share out that part between uses; empty when each keeps all of it.
        shared_dim: dimension along which they do; None when each keeps all of it.
        gradient_sum: axes over which the weight's gradient is summed.
    """

    module: str
    input_tokens: tuple[str, ...]
    output_tokens: tuple[str, ...]
    split: Split | None
    weight_shape: tuple[int, ...] | None
    weight_dim: int | None
    weight_axes: tuple[str, ...]
    shared_dim: int | None
    gradient_sum: tuple[str, ...]


@dataclass(frozen=True)
class _Module:
    """A module in the order of use, before a layout is known."""

    name: str
    input: str
    output: str
    split: Split | None = None
    weight_dim: int | None = None


_MODULES = (
    _Module("embed_tokens", _CP, _STREAM, "vocabulary", 0),
    _Module("layers.*.input_layernorm", _STREAM, _STREAM),
    _Module("layers.*.self_attn.q_proj", _CP, _CP, "heads", 0),
    _Module("layers.*.self_attn.k_proj", _CP, _CP, "heads", 0),
    _Module("layers.*.self_attn.v_proj", _CP, _CP, "heads", 0),
    _Module("layers.*.self_attn.q_norm", _CP, _CP, "heads"),
    _Module("layers.*.self_attn.k_norm", _CP, _CP, "heads"),
    _Module("layers.*.attention", _CP, _CP, "heads"),
    _Module("layers.*.self_attn.o_proj", _CP, _STREAM, "heads", 1),
    _Module("layers.*.self_attn.o_proj.bias", _CP, _CP),
    _Module("layers.*.residual", _STREAM, _STREAM),
    _Module("layers.*.post_attention_layernorm", _STREAM, _STREAM),
    _Module("layers.*.mlp.gate_proj", _CP, _CP, "width", 0),
    _Module("layers.*.mlp.up_proj", _CP, _CP, "width", 0),
    _Module("layers.*.mlp.down_proj", _CP, _STREAM, "width", 1),
    _Module("layers.*.mlp.down_proj.bias", _CP, _CP),
    _Module("norm", _STREAM, _STREAM),
    _Module("lm_head", _CP, _CP, "vocabulary", 0),
    _Module("loss", _CP, _CP, "vocabulary"),
)
_WITHOUT_WEIGHT = ("layers.*.attention", "layers.*.residual", "loss")


def ownership(layout: Layout, spec: ModelSpec) -> tuple[ModuleShards, ...]:
    """What each rank holds of every module, in the order of use.

    A bias lies as the rows of its weight do; those of `o_proj` and `down_proj` are whole on every rank. With
    fewer key/value heads than tp ranks, every rank holds all of `k_proj` and `v_proj` and uses one head.

    Raises:
        UnsupportedError: a model that is only described, not trained.
        ConfigError: heads that the layout cannot deal out.
    """
    if refusal := spec.refusal():
        raise UnsupportedError(refusal)
    layout.check_model(spec)
    shapes = parameter_shapes(spec)
    if spec.tie_embeddings:
        shapes["lm_head.weight"] = shapes["embed_tokens.weight"]
    found = {module.name: _shape(module.name, shapes) for module in _MODULES}
    return tuple(
        _shards(module, layout, found[module.name], shared=_is_shared(module, layout, spec))
        for module in _MODULES
        if found[module.name] or module.name in _WITHOUT_WEIGHT
    )


def _shape(name: str, shapes: dict[str, tuple[int, ...]]) -> tuple[int, ...] | None:
    first = name.replace("*", "0")
    return shapes.get(first if first.endswith(".bias") else f"{first}.weight")


def _is_shared(module: _Module, layout: Layout, spec: ModelSpec) -> bool:
    """Whether several tp ranks use the same key/value head, so that none can hold its own part."""
    return spec.num_kv_heads < layout.tp and module.name.endswith(("k_proj", "v_proj"))


def _shards(module: _Module, layout: Layout, shape: tuple[int, ...] | None, shared: bool) -> ModuleShards:
    tokens = {_CP: ("cp",), _STREAM: ("cp", "tp") if layout.sp else ("cp",)}
    whole = shared or module.weight_dim is None
    # A weight that tp copies has a whole gradient only where every tp rank sees the same tokens and heads.
    in_parts = whole and (module.split == "heads" or (layout.sp and module.input == _STREAM))
    weight_axes = _used(layout, ("dp_shard", "cp")) if shape and layout.weight_axes else ()
    uneven = shape and module.split == "vocabulary" and shape[0] % layout.tp
    return ModuleShards(
        module=module.name,
        input_tokens=_used(layout, tokens[module.input]),
        output_tokens=_used(layout, tokens[module.output]),
        split=module.split if layout.tp > 1 else None,
        weight_shape=shape,
        weight_dim=None if whole or layout.tp == 1 else module.weight_dim,
        weight_axes=weight_axes,
        shared_dim=(1 if uneven else 0) if weight_axes else None,
        gradient_sum=_used(layout, ("dp", "cp", "tp") if in_parts else ("dp", "cp")) if shape else (),
    )


def _used(layout: Layout, axes: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(axis for axis in axes if layout.size(axis) > 1)


@dataclass(frozen=True)
class AxisRole:
    """What the ranks of one axis share out, what they all hold, and what they tell each other.

    Args:
        axis: name of the axis.
        size: ranks in one group.
        link: slowest link that a group crosses.
        splits: what they share out.
        copies: what each of them holds whole.
        gradients: what happens to weight gradients across the axis.
        traffic: what moves along it, and how often.
    """

    axis: str
    size: int
    link: Link
    splits: str
    copies: str
    gradients: str
    traffic: str


# Fastest first: the more traffic, the further in. Each entry is (splits, copies, gradients, traffic).
_ROLES = {
    "tp": (
        "heads, MLP width, vocabulary: their weights and optimizer state",
        "norm weights, all tokens",
        "each its own; q/k norms and shared K/V weights summed",
        "activations, twice in every layer",
    ),
    "cp_inner": (
        "tokens of a row, in every activation",
        "weights",
        "summed",
        "keys and values, in every layer",
    ),
    "cp_outer": (
        "tokens of a row, in every activation",
        "weights",
        "summed",
        "keys and values, in every layer",
    ),
    "dp_shard": (
        "rows of a batch; weights, gradients and optimizer state between uses",
        "nothing",
        "summed, each rank keeps its part",
        "weights, in every layer",
    ),
    "dp_replicate": ("rows of a batch", "weights, optimizer state", "summed", "gradients, once a step"),
    "pp": ("layers", "nothing", "own layers", "activations, between stages"),
}


def axis_roles(layout: Layout) -> tuple[AxisRole, ...]:
    """The axes that this layout uses, innermost first; cp or dp where only one of its halves is used."""
    roles = {axis: role for axis, role in _ROLES.items() if layout.size(axis) > 1}
    if layout.sp:
        splits, _, _, traffic = roles["tp"]
        gradients = "each its own; norms and shared K/V weights summed"
        roles["tp"] = (f"{splits}; tokens between them", "norm weights", gradients, traffic)
    for axis in ("cp_inner", "cp_outer"):
        if axis in roles and layout.weight_axes:
            splits, _, _, traffic = roles[axis]
            _, nothing, gradients, gathered = _ROLES["dp_shard"]
            shared = f"{splits}; weights, gradients and optimizer state between uses"
            roles[axis] = (shared, nothing, gradients, f"{traffic}; {gathered}")
    names = {axis: _plain_name(layout, axis) for axis in roles}
    return tuple(
        AxisRole(name, layout.size(name), layout.link(name), *roles[axis]) for axis, name in names.items()
    )


def _plain_name(layout: Layout, axis: str) -> str:
    whole = axis.partition("_")[0]
    return whole if layout.size(whole) == layout.size(axis) else axis
