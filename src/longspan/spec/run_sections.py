"""The sections of a run file. A field's docstring is its help text."""

import math
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PlainSerializer,
    PlainValidator,
    PositiveFloat,
    PositiveInt,
    field_serializer,
    field_validator,
    model_validator,
)

from longspan.errors import ConfigError
from longspan.spec.exchange import Transport
from longspan.spec.model import ModelSpec, RopeSpec

STDLIB = "stdlib"
BYTES = "bytes"


def _path(value: Any) -> Path:
    """An absolute path, so that a dumped run means the same from any folder."""
    if not isinstance(value, str | Path) or not str(value):
        raise ValueError("should be a path")
    return Path(value).resolve()


def _source(value: Any) -> Any:
    if value == STDLIB:
        return STDLIB
    paths = value if isinstance(value, list | tuple) else [value]
    if not paths or not all(isinstance(path, str | Path) for path in paths):
        raise ValueError(f"should be {STDLIB!r}, a path or a list of paths")
    return tuple(_path(path) for path in paths)


def _plain_source(source: Any) -> Any:
    return source if source == STDLIB else [str(path) for path in source]


def _tokenizer(value: Any) -> Any:
    return BYTES if value == BYTES else _path(value)


FilePath = Annotated[Path, PlainValidator(_path, json_schema_input_type=str)]
Source = Annotated[
    Literal["stdlib"] | tuple[Path, ...],
    PlainValidator(_source, json_schema_input_type=str | list[str]),
    PlainSerializer(_plain_source),
]
Tokenizer = Annotated[Literal["bytes"] | Path, PlainValidator(_tokenizer, json_schema_input_type=str)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
RowLength = Annotated[int, Field(ge=2)]


class Section(BaseModel):
    """A table of the run file: frozen, strict about types, closed to unknown keys."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class RopeSection(Section):
    """Changes to the model's rotary position embedding; what is left out keeps the model's own value."""

    kind: Literal["default", "linear", "llama3", "yarn"] | None = None
    """How the angles are stretched; another kind than the model's starts from that kind's own values."""
    theta: PositiveFloat | None = None
    """Base of the wavelengths."""
    factor: PositiveFloat | None = None
    """How many times longer sequences are than in pre-training."""
    original_max_positions: PositiveInt | None = None
    """Sequence length of pre-training; the model's own when left out."""
    low_freq_factor: PositiveFloat | None = None
    """llama3: wavelengths above original_max_positions / low_freq_factor are stretched in full."""
    high_freq_factor: PositiveFloat | None = None
    """llama3: wavelengths below original_max_positions / high_freq_factor are kept."""
    beta_fast: PositiveFloat | None = None
    """yarn: dimensions that turn more often than this over the pre-training length are kept."""
    beta_slow: PositiveFloat | None = None
    """yarn: dimensions that turn less often than this are stretched in full."""
    attention_factor: PositiveFloat | None = None
    """yarn: multiplies cos and sin; derived from factor when left out."""
    mscale: NonNegativeFloat | None = None
    """yarn: weight of the logarithm in attention_factor."""
    mscale_all_dim: NonNegativeFloat | None = None
    """yarn: the same, for the divisor of attention_factor."""

    def apply(self, spec: ModelSpec) -> ModelSpec:
        """The model with these changes."""
        given = self.model_dump(exclude_none=True)
        base = spec.rope or RopeSpec()
        kept: dict[str, Any] = {"theta": base.theta}
        if self.kind in (None, base.kind):
            kept = base.model_dump(exclude_none=True)
        elif self.kind in ("llama3", "yarn"):
            kept["original_max_positions"] = base.original_max_positions or spec.max_positions
        return spec.with_changes(rope=RopeSpec(**kept | given))


class ModelSection(Section):
    """The model: exactly one of config, weights and spec."""

    config: FilePath | None = None
    """A Hugging Face config.json, or its folder: start from fresh weights."""
    weights: FilePath | None = None
    """A Hugging Face folder with config.json and safetensors: start from these weights."""
    spec: ModelSpec | None = None
    """The sizes themselves, to start from fresh weights."""
    rope: RopeSection | None = None
    """Changes to the rotary position embedding."""

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        given = [name for name in ("config", "weights", "spec") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ConfigError(
                f"[model] needs exactly one of config, weights and spec, got {' and '.join(given) or 'none'}"
            )
        return self

    @field_validator("spec", mode="before")
    @classmethod
    def _with_nulls(cls, spec: Any) -> Any:
        """TOML has no null: a layer without a window is written as 0."""
        if isinstance(spec, dict) and isinstance(spec.get("windows"), list):
            return spec | {"windows": [window or None for window in spec["windows"]]}
        return spec

    @field_serializer("spec")
    def _without_nulls(self, spec: ModelSpec | None) -> dict[str, Any] | None:
        if spec is None:
            return None
        windows = [window or 0 for window in spec.windows]
        same = len(set(windows)) == 1
        return spec.model_dump(exclude_none=True) | {"windows": windows[0] if same else windows}

    def read(self) -> ModelSpec:
        """The model that this section describes.

        Raises:
            UnsupportedError: an architecture or a feature that Longspan cannot honour.
            ConfigError: a model config that cannot be read, or sizes that do not fit together.
        """
        spec = self.spec or ModelSpec.from_hf(self.config or self.weights or "")
        return self.rope.apply(spec) if self.rope else spec


class AttentionSection(Section):
    """How attention over a shared sequence is computed."""

    transport: Literal["auto"] | Transport = "auto"
    """How keys and values reach the other context-parallel ranks. all_to_all trades tokens for heads over all of them;
    all_to_all+X does so over cp_inner ranks and uses X over cp_outer."""
    sharding: Literal["auto", "zigzag", "contiguous", "document_zigzag"] = "auto"
    """Which context-parallel rank owns which tokens."""
    head_groups: PositiveInt = 1
    """Groups of heads that all_gather and all_to_all move one after the other, each while another is computed."""
    stages: PositiveInt = 2
    """Exchanges that needed spreads its messages over, each hidden under the work of the one before."""
    gradient_dtype: Literal["bfloat16", "float32"] | None = None
    """In which partial gradients of keys and values travel; at least float32 when left out."""
    kernel: Literal["auto", "cpu_flash", "cuda_flash", "reference"] = "auto"
    """What computes a block of attention; reference is explicit softmax in the dtype of its inputs, and slow."""


class DataSection(Section):
    """Documents, and the rows they are packed into."""

    source: Source = STDLIB
    """Text, JSONL or Parquet files or folders; stdlib is the source code of Python's standard library."""
    tokenizer: Tokenizer = BYTES
    """A tokenizer.json; bytes makes every byte a token."""
    text_field: str = "text"
    """Field or column of JSONL and Parquet files that holds the text."""
    sequence: RowLength | None = None
    """Tokens in a row; 4096 when left out. With [[stages]], each of them says its own."""
    eval_documents: Fraction = 0.02
    """Share of the documents held out for evaluation."""


class BatchSection(Section):
    """Rows of one optimizer step."""

    global_batch: PositiveInt = 4
    """Rows of one step, over all ranks."""
    micro_batch: PositiveInt = 1
    """Rows that a data-parallel rank runs at once."""


class StageSection(Section):
    """A part of the run with rows of one length; the stages follow each other as they stand in the file."""

    sequence: RowLength
    """Tokens in a row."""
    steps: PositiveInt
    """Optimizer steps."""
    global_batch: PositiveInt | None = None
    """Rows of one step, over all ranks; batch.global_batch when left out."""
    micro_batch: PositiveInt | None = None
    """Rows that a data-parallel rank runs at once; batch.micro_batch when left out."""


class OptimizerSection(Section):
    """AdamW and gradient clipping."""

    lr: PositiveFloat = 1e-3
    """Learning rate at the top of the schedule."""
    beta1: Fraction = 0.9
    """Decay of the running mean of gradients."""
    beta2: Fraction = 0.95
    """Decay of the running mean of squared gradients."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the second mean."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled decay of matrices; norms and biases do not decay."""
    clip_norm: NonNegativeFloat = 1.0
    """Largest global gradient norm; 0 does not clip."""


class ScheduleSection(Section):
    """The learning rate over the run, on a clock that counts tokens."""

    kind: Literal["cosine", "wsd", "constant"] = "cosine"
    """Shape after the warm-up: a half cosine, stable then a straight fall (wsd), or constant."""
    warmup_tokens: NonNegativeInt = 0
    """Tokens over which the rate rises from zero."""
    decay_tokens: PositiveInt | None = None
    """Tokens over which it falls; when left out, all after the warm-up (cosine) or the last tenth (wsd)."""
    min_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Where the fall ends, as a share of lr."""

    def factor(self, seen_tokens: int, total_tokens: int) -> float:
        """What the learning rate is multiplied by, from 0 to 1.

        Args:
            seen_tokens: tokens consumed so far, those of this step included.
            total_tokens: tokens of the whole run.
        """
        if seen_tokens < self.warmup_tokens:
            return seen_tokens / self.warmup_tokens
        if self.kind == "constant":
            return 1.0
        if self.kind == "cosine":
            decay = self.decay_tokens or max(total_tokens - self.warmup_tokens, 1)
            fallen = min((seen_tokens - self.warmup_tokens) / decay, 1.0)
            return 1.0 - (1.0 - self.min_ratio) * (1.0 - math.cos(math.pi * fallen)) / 2
        decay = self.decay_tokens or max(total_tokens // 10, 1)
        fallen = min(max(seen_tokens - (total_tokens - decay), 0) / decay, 1.0)
        return 1.0 - (1.0 - self.min_ratio) * fallen


class MemorySection(Section):
    """What is kept between forward and backward."""

    recompute: Literal["none", "full"] = "none"
    """full keeps only each layer's input and computes the layer again in backward."""


class TrainSection(Section):
    """The loop."""

    steps: PositiveInt | None = None
    """Optimizer steps; 100 when left out. With [[stages]], each of them says its own."""
    seed: NonNegativeInt = 0
    """Seed of fresh weights and of the order of data."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Type of activations and matrix products; bfloat16 keeps weights in float32."""
    eval_every: NonNegativeInt = 50
    """Steps between evaluations, with one before the first step and one after the last; 0 never evaluates."""
    eval_rows: PositiveInt = 4
    """Held-out rows of one evaluation, the same ones throughout the run."""
    eval_sequence: RowLength | None = None
    """Tokens in such a row; when left out, the longest of the run."""
    log_every: PositiveInt = 1
    """Steps between log records."""
    threads: NonNegativeInt = 0
    """CPU threads of each process; 0 shares the machine's cores out evenly."""
    timeout_s: PositiveFloat = 600.0
    """Seconds a rank waits for another before the run fails."""
    nonfinite: Literal["stop", "skip"] = "stop"
    """What a loss or gradient that is not finite does: stop the run, or skip the update of that step."""
    nonfinite_limit: PositiveInt = 10
    """Such steps in a row after which skip stops the run as well."""
    loss_chunk: PositiveInt = 1024
    """Tokens whose logits exist at once."""


class CheckpointSection(Section):
    """Checkpoints, from which a run can go on; the last step is always saved."""

    every: NonNegativeInt = 0
    """Steps between checkpoints; 0 saves at the end alone."""
    keep: PositiveInt = 2
    """How many of them stay; older ones are deleted once a new one is complete."""
    asynchronous: bool = True
    """Copy weights and optimizer state, and write them while training goes on."""


class OutputSection(Section):
    """What the run leaves behind."""

    folder: FilePath = Field(default_factory=lambda: Path("runs").resolve())
    """Where logs and weights go; runs/NAME for a run file NAME.toml."""
    tensorboard: bool = True
    """Write TensorBoard event files as well."""
