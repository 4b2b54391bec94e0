"""RunConfig: a TOML file becomes one frozen value, or one clear line that says what is wrong."""

import difflib
import reprlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import tomli_w
from pydantic import ConfigDict, ValidationError, field_validator, model_validator

from longspan.errors import ConfigError, UnsupportedError
from longspan.spec.batch import BatchPlan
from longspan.spec.layout import SHORTHANDS, Layout, any_of, expand
from longspan.spec.model import ModelSpec
from longspan.spec.run_sections import (
    AttentionSection,
    BatchSection,
    CheckpointSection,
    DataSection,
    MemorySection,
    ModelSection,
    OptimizerSection,
    OutputSection,
    ScheduleSection,
    Section,
    TrainSection,
)
from longspan.spec.run_tables import Table, merged, nested, read_table

_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")
_NOT_A_TABLE = ("model_type", "dataclass_type", "dict_type")


class RunConfig(Section):
    """A run: model, layout, data and loop.

    Raises:
        ConfigError: values that cannot go together. A value of the wrong type is pydantic's ValidationError,
            which `load` turns into a ConfigError.
    """

    # The sections are strict; here a table may become a Layout.
    model_config = ConfigDict(strict=False)

    model: ModelSection
    layout: Layout = Layout()
    attention: AttentionSection = AttentionSection()
    data: DataSection = DataSection()
    batch: BatchSection = BatchSection()
    optimizer: OptimizerSection = OptimizerSection()
    schedule: ScheduleSection = ScheduleSection()
    memory: MemorySection = MemorySection()
    train: TrainSection = TrainSection()
    checkpoint: CheckpointSection = CheckpointSection()
    output: OutputSection = OutputSection()

    @field_validator("layout", mode="before")
    @classmethod
    def _with_shorthands(cls, layout: Any) -> Any:
        return expand(layout) if isinstance(layout, dict) else layout

    @model_validator(mode="after")
    def _every_rank_has_work(self) -> Self:
        tokens, ranks = self.batch_plan.micro_batch * self.data.sequence, self.layout.cp * self.layout.tp
        if tokens < ranks:
            raise ConfigError(
                f"sequence={self.data.sequence} leaves some of cp × tp = {ranks} ranks without tokens; "
                f"use {ranks} or more"
            )
        return self

    @property
    def batch_plan(self) -> BatchPlan:
        """How the rows of a step are dealt out."""
        return BatchPlan(self.batch.global_batch, self.batch.micro_batch, self.layout.dp)

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one optimizer step consumes, over all ranks."""
        return self.batch.global_batch * self.data.sequence

    @property
    def total_tokens(self) -> int:
        """Tokens of the whole run."""
        return self.train.steps * self.tokens_per_step

    def model_spec(self) -> ModelSpec:
        """The model, read from where the run says and checked against the layout.

        Raises:
            UnsupportedError: an architecture or a feature that Longspan cannot honour.
            ConfigError: a model that cannot be read, or that this layout cannot deal out.
        """
        spec = self.model.read()
        self.layout.check_model(spec)
        return spec

    @classmethod
    def load(cls, path: str | Path, overrides: Mapping[str, Any] | None = None) -> Self:
        """The run that a TOML file describes, checked together with its model.

        Paths in the file are relative to its folder, those in overrides to the current one.

        Args:
            path: the run file.
            overrides: values by dotted key ("layout.tp") that replace those of the file.

        Raises:
            ConfigError: one line with the file, the key, its value and, for an unknown key, the nearest right
                one; also for a model that cannot be read or that the layout cannot deal out.
            UnsupportedError: an architecture or a feature of the model that Longspan cannot honour.
        """
        file, overrides = Path(path), overrides or {}
        try:
            default: Table = {"output": {"folder": f"runs/{file.stem}"}}
            config = cls.model_validate(merged(default, read_table(file), nested(overrides)))
            config.model_spec()
            return config
        except ValidationError as error:
            raise ConfigError(_explain(error, str(file), overrides)) from None
        except (ConfigError, UnsupportedError) as error:
            raise type(error)(f"{file}: {error}") from None

    def dump(self) -> str:
        """The run as TOML text, defaults written out; `load` reads the same value back."""
        return tomli_w.dumps(self.model_dump(mode="json", exclude_none=True))


def known_keys() -> dict[str, dict[str, Any]]:
    """Every key of a run file ("layout.tp") with its JSON schema: description, type or choices, default."""
    schema = RunConfig.model_json_schema()
    schema["$defs"]["Layout"]["properties"] |= {
        name: {"description": words, "type": "integer"} for name, words in SHORTHANDS.items()
    }
    return dict(_leaves(schema, schema["$defs"], ""))


def _leaves(node: Table, definitions: Table, prefix: str) -> Iterator[tuple[str, Table]]:
    for name, leaf in node["properties"].items():
        references = [option["$ref"] for option in (leaf, *leaf.get("anyOf", ())) if "$ref" in option]
        tables = [definitions[reference.rpartition("/")[2]] for reference in references]
        if tables:
            yield from _leaves(tables[0], definitions, f"{prefix}{name}.")
        else:
            yield prefix + name, leaf


def _explain(error: ValidationError, file: str, overrides: Mapping[str, Any]) -> str:
    """The most telling of pydantic's complaints as one line."""
    # An unknown key comes first: misspelt, it also shows up as a missing one.
    first = min(error.errors(), key=lambda problem: problem["type"] not in _UNKNOWN)
    key = ".".join(map(str, first["loc"]))
    place = "command line" if any(f"{given}.".startswith(f"{key}.") for given in overrides) else file
    if first["type"] == "missing":
        return f"{place}: {key} is missing"
    value = reprlib.repr(first["input"])
    if first["type"] in _UNKNOWN:
        return f"{place}: unknown key {key} = {value}; {_nearest(key)}"
    wanted = "should be a table" if first["type"] in _NOT_A_TABLE else first["msg"]
    return f"{place}: {key} = {value}: {wanted.removeprefix('Input ').removeprefix('Value error, ')}"


def _nearest(key: str) -> str:
    """What an unknown key may have meant."""
    section, _, name = key.rpartition(".")
    names: dict[str, list[str]] = {}
    for known in known_keys():
        known_section, _, known_name = known.rpartition(".")
        names.setdefault(known_section, []).append(known_name)
    siblings = names.get(section, [])
    if close := difflib.get_close_matches(name, siblings, n=1):
        return f"did you mean {section}.{close[0]}?"
    if not section and (close := difflib.get_close_matches(name, names, n=1)):
        return f"did you mean [{close[0]}]?"
    if close := difflib.get_close_matches(name, sum(names.values(), []), n=1):
        return (
            f"did you mean {any_of([f'{other}.{close[0]}' for other in names if close[0] in names[other]])}?"
        )
    return f"[{section}] knows {', '.join(siblings)}" if siblings else f"sections are {', '.join(names)}"
