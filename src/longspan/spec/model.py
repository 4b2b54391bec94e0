"""What a model is: the sizes and choices of a decoder, from a Hugging Face `config.json` or given by hand.

Llama, Mistral, Qwen2 and Qwen3 blocks can be trained. GPT-2 blocks (LayerNorm, GELU, learned positions,
dropout, unfused scores) and RoPE kinds that depend on the longest sequence are only described, so that a plan
can price them; `ModelSpec.refusal` says why they are not trained.
"""

from collections import Counter
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from longspan.errors import ConfigError, UnsupportedError
from longspan.spec.hf_config import read_config, write_config
from longspan.spec.parameters import parameter_shapes

__all__ = ["ModelSpec", "RopeSpec"]

# Scaling fields that each kind of RoPE needs, and those that it reads when they are given.
_ROPE_FIELDS: dict[str, tuple[set[str], set[str]]] = {
    "default": (set(), set()),
    "linear": ({"factor"}, set()),
    "llama3": ({"factor", "original_max_positions", "low_freq_factor", "high_freq_factor"}, set()),
    "yarn": (
        {"factor", "original_max_positions"},
        {"beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"},
    ),
    "dynamic": ({"factor"}, {"original_max_positions"}),
    "longrope": (
        {"short_factors", "long_factors", "original_max_positions"},
        {"factor", "attention_factor"},
    ),
}

# What a family's name implies where a hand-written spec does not say otherwise.
_FAMILY_DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True},
    "gpt2": {
        "norm": "layernorm",
        "norm_eps": 1e-5,
        "mlp": "gelu",
        "rope": None,
        "qkv_bias": True,
        "output_bias": True,
        "mlp_bias": True,
        "tie_embeddings": True,
        "dropout": 0.1,
        "attention_dropout": 0.1,
        "fused_attention": False,
    },
}


class RopeSpec(BaseModel):
    """Rotary position embedding; a scaling field left at None is one that the kind does not use.

    Raises:
        ConfigError: a field that the kind needs is missing, or one that it does not read is given.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    kind: Literal["default", "linear", "llama3", "yarn", "dynamic", "longrope"] = "default"
    theta: PositiveFloat = 10_000.0
    """Base of the wavelengths."""
    factor: PositiveFloat | None = None
    """How many times longer the sequences are than those of pre-training."""
    original_max_positions: PositiveInt | None = None
    """Sequence length of pre-training."""
    low_freq_factor: PositiveFloat | None = None
    high_freq_factor: PositiveFloat | None = None
    beta_fast: PositiveFloat | None = None
    beta_slow: PositiveFloat | None = None
    attention_factor: PositiveFloat | None = None
    """Multiplies cos and sin; None means the value that the YaRN paper derives from `factor`."""
    mscale: NonNegativeFloat | None = None
    mscale_all_dim: NonNegativeFloat | None = None
    truncate: bool | None = None
    short_factors: tuple[float, ...] | None = None
    long_factors: tuple[float, ...] | None = None

    @model_validator(mode="after")
    def _only_what_the_kind_reads(self) -> Self:
        required, optional = _ROPE_FIELDS[self.kind]
        given = {name for name, value in self if value is not None} - {"kind", "theta"}
        if missing := sorted(required - given):
            raise ConfigError(f"rope kind '{self.kind}' needs {', '.join(missing)}")
        if unread := sorted(given - required - optional):
            raise ConfigError(
                f"rope kind '{self.kind}' does not read {', '.join(unread)}; remove it or set the kind"
            )
        return self


class ModelSpec(BaseModel):
    """A decoder as a frozen value: enough to build it, count it and price it.

    `family` names the Hugging Face architecture and sets the defaults that go with it.

    Raises:
        ConfigError: sizes that do not fit together.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    family: Literal["llama", "mistral", "qwen2", "qwen3", "gpt2"] = "llama"
    num_layers: PositiveInt
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    """Width of the MLP."""
    num_heads: PositiveInt
    """Query heads."""
    num_kv_heads: PositiveInt = Field(default_factory=lambda data: data["num_heads"])
    """Key/value heads; as many as `num_heads` when not given."""
    head_dim: PositiveInt = Field(default_factory=lambda data: data["hidden_size"] // data["num_heads"])
    """Size of one head; `hidden_size / num_heads` when not given."""
    vocab_size: PositiveInt
    max_positions: PositiveInt = 4096
    """Longest sequence the model was made for; a limit only with learned positions."""
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    norm_eps: PositiveFloat = 1e-6
    mlp: Literal["swiglu", "gelu"] = "swiglu"
    rope: RopeSpec | None = RopeSpec()
    """None means learned positions."""
    qkv_bias: bool = False
    output_bias: bool = False
    """Bias of the attention's output projection."""
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMSNorm over each query and key head."""
    windows: tuple[PositiveInt | None, ...] = Field(default_factory=lambda data: (None,) * data["num_layers"])
    """Keys a query sees in each layer, itself included; None means all earlier ones. One number (0 for none)
    stands for all layers."""
    tie_embeddings: bool = False
    dropout: NonNegativeFloat = 0.0
    """Dropout of embeddings and of both branches before they join the residual stream."""
    attention_dropout: NonNegativeFloat = 0.0
    fused_attention: bool = True
    """False: the attention's scores are held in memory."""
    initializer_range: NonNegativeFloat = 0.02
    """Standard deviation of fresh weights."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any] | str | Path) -> Self:
        """The model that a Hugging Face configuration describes.

        Args:
            config: the configuration itself, a `config.json`, or a folder that holds one.

        Raises:
            UnsupportedError: an architecture or a feature that Longspan cannot honour, named.
            ConfigError: the file cannot be read, or lacks a size, or its sizes do not fit together.
        """
        try:
            return cls(**read_config(config))
        except ValidationError as error:
            raise _refusal_of(error) from None

    def to_hf(self) -> dict[str, Any]:
        """The `config.json` of this model, which transformers 4 and 5 both read.

        Raises:
            UnsupportedError: the family cannot express the spec (a window in a Llama, say).
        """
        config = write_config(self)
        read_back = ModelSpec.from_hf(config).with_changes(fused_attention=self.fused_attention)
        lost = [name for name, value in self if value != getattr(read_back, name)]
        if lost:
            raise UnsupportedError(f"a {self.family} config cannot express this model's {', '.join(lost)}")
        return config

    def refusal(self) -> str | None:
        """Why this model can be priced but not trained, or None if it can be trained."""
        rope_kind = self.rope.kind if self.rope else "learned"
        found = {
            "LayerNorm": self.norm == "layernorm",
            "a GELU MLP": self.mlp == "gelu",
            "learned positions": self.rope is None,
            f"{rope_kind} RoPE (its angles depend on the longest sequence)": rope_kind
            in ("dynamic", "longrope"),
            f"dropout {self.dropout}": self.dropout > 0,
            f"attention dropout {self.attention_dropout}": self.attention_dropout > 0,
            "unfused attention scores": not self.fused_attention,
        }
        if not any(found.values()):
            return None
        return f"cannot train this {self.family} model, only price it: it has " + ", ".join(
            words for words, present in found.items() if present
        )

    def with_changes(self, **changes: Any) -> Self:
        """A copy with some fields replaced, checked again.

        With another `num_layers` and no `windows`, layers keep their windows in order; where a shorter model
        would lose a window that the longer one has, its last layers take the lost ones.
        """
        if "num_layers" in changes and "windows" not in changes:
            changes["windows"] = _resize_windows(self.windows, changes["num_layers"])
        return type(self)(**(dict(self) | changes))

    @property
    def window_layers(self) -> dict[int | None, int]:
        """Number of layers for each window (None: no window)."""
        return dict(Counter(self.windows))

    @property
    def num_parameters(self) -> int:
        """Trainable numbers, a tied embedding counted once."""
        return sum(prod(shape) for shape in parameter_shapes(self).values())

    @model_validator(mode="before")
    @classmethod
    def _family_defaults(cls, given: Any) -> Any:
        return (
            _FAMILY_DEFAULTS.get(str(given.get("family")), {}) | given if isinstance(given, dict) else given
        )

    @field_validator("windows", mode="before")
    @classmethod
    def _one_window_for_all(cls, windows: Any, info: ValidationInfo) -> Any:
        return (windows or None,) * info.data.get("num_layers", 0) if isinstance(windows, int) else windows

    @model_validator(mode="after")
    def _sizes_fit(self) -> Self:
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(f"num_kv_heads={self.num_kv_heads} must divide num_heads={self.num_heads}")
        if "head_dim" not in self.model_fields_set and self.hidden_size % self.num_heads:
            raise ConfigError(
                f"num_heads={self.num_heads} does not divide hidden_size={self.hidden_size}; give head_dim"
            )
        if self.rope and self.head_dim % 2:
            raise ConfigError(f"head_dim={self.head_dim} must be even, as RoPE turns pairs of numbers")
        if len(self.windows) != self.num_layers:
            raise ConfigError(f"windows has {len(self.windows)} entries for num_layers={self.num_layers}")
        return self


def _refusal_of(error: ValidationError) -> ConfigError | UnsupportedError:
    first = error.errors()[0]
    where, value = "model config: " + ".".join(map(str, first["loc"])), first["input"]
    if first["type"] in ("extra_forbidden", "literal_error"):
        return UnsupportedError(f"{where}={value!r} cannot be honoured")
    return ConfigError(f"{where}={value!r}: {first['msg']}")


def _resize_windows(windows: tuple[int | None, ...], num_layers: int) -> tuple[int | None, ...]:
    repeats = -(-num_layers // len(windows))
    kept = (windows * repeats)[:num_layers]
    lost = [window for window in dict.fromkeys(windows) if window not in kept][: num_layers - 1]
    return kept[: num_layers - len(lost)] + tuple(lost)
