"""RunConfig: a TOML file becomes one frozen value, or one clear line that says what is wrong."""

import difflib
import re
import reprlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import tomli_w
from pydantic import ConfigDict, ValidationError, field_validator, model_validator

from longspan.errors import ConfigError, UnsupportedError
from longspan.spec.batch import BatchPlan
from longspan.spec.exchange import Options, inner_size
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
    StageSection,
    TrainSection,
)
from longspan.spec.run_tables import Table, merged, nested, read_table
from longspan.spec.stages import StagePlan

_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")
_WANTED = dict.fromkeys(("model_type", "dataclass_type", "dict_type"), "should be a table") | {
    "tuple_type": "should be a list"
}
_SEQUENCE = 4096
_STEPS = 100


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
    stages: tuple[StageSection, ...] = ()
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
    def _said_once(self) -> Self:
        given = {"data.sequence": self.data.sequence, "train.steps": self.train.steps}
        for key in (key for key, value in given.items() if self.stages and value is not None):
            raise ConfigError(
                f"{key}={given[key]} and [[stages]] both say the {key.partition('.')[2]}; leave {key} out"
            )
        return self

    @model_validator(mode="after")
    def _every_rank_has_work(self) -> Self:
        ranks = self.layout.cp * self.layout.tp
        for stage in self.stage_plan.stages:
            if stage.tokens_at_once < ranks:
                raise ConfigError(
                    f"{self._named(stage.number)}sequence={stage.sequence} leaves some of cp × tp = {ranks} "
                    f"ranks without tokens; use {ranks} or more"
                )
        if self.train.eval_every and self.eval_sequence < ranks:
            raise ConfigError(
                f"rows of {self.eval_sequence} tokens leave some of cp × tp = {ranks} ranks without tokens in "
                f"evaluation; set train.eval_sequence to {ranks} or more"
            )
        return self

    @property
    def stage_plan(self) -> StagePlan:
        """Row length, batch and clock of every step; without [[stages]], one stage for all steps.

        Raises:
            ConfigError: a batch that cannot be dealt out, with the number of its stage.
        """
        whole = StageSection(sequence=self.data.sequence or _SEQUENCE, steps=self.train.steps or _STEPS)
        return StagePlan.of(
            (stage.sequence, stage.steps, self._batch_plan(stage, number))
            for number, stage in enumerate(self.stages or (whole,), 1)
        )

    def _batch_plan(self, stage: StageSection, number: int) -> BatchPlan:
        try:
            return BatchPlan(
                stage.global_batch or self.batch.global_batch,
                stage.micro_batch or self.batch.micro_batch,
                self.layout.dp,
            )
        except ConfigError as error:
            raise ConfigError(f"{self._named(number)}{error}") from None

    def _named(self, number: int) -> str:
        return f"stage {number}: " if self.stages else ""

    @property
    def eval_sequence(self) -> int:
        """Tokens in a row of an evaluation."""
        return self.train.eval_sequence or self.stage_plan.longest.sequence

    def one_stage(self, number: int = 1, sequence: int | None = None) -> Self:
        """The run with one of its stages alone.

        Args:
            number: the stage, from 1.
            sequence: tokens of its rows, and at most of those of an evaluation; as they are when left out.

        Raises:
            ConfigError: no such stage, or rows that the layout cannot deal out.
        """
        stages = self.stage_plan.stages
        if not 1 <= number <= len(stages):
            raise ConfigError(f"stage={number} must be from 1 to the run's {len(stages)}")
        stage, table = stages[number - 1], self.model_dump(mode="json", exclude_none=True)
        del table["stages"]
        table["data"]["sequence"] = stage.sequence if sequence is None else sequence
        table["train"]["steps"] = stage.steps
        table["batch"] = {"global_batch": stage.batch.global_batch, "micro_batch": stage.batch.micro_batch}
        if sequence is not None and self.train.eval_sequence:
            table["train"]["eval_sequence"] = min(self.train.eval_sequence, sequence)
        try:
            return type(self).model_validate(table)
        except ValidationError as error:
            raise ConfigError(_explain(error, "command line", {})) from None

    def transport_options(self, layout: Layout) -> Options:
        """Settings of the attention's transport in this run's layout, or for the same run in another one."""
        attention = self.attention
        return Options(
            inner=layout.cp_inner,
            head_groups=attention.head_groups,
            stages=attention.stages,
            # Sums that are rounded at every hop would err more the more ranks there are.
            direct_gradients=attention.gradient_dtype == "bfloat16",
        )

    def model_spec(self) -> ModelSpec:
        """The model, read from where the run says and checked against the layout.

        Raises:
            UnsupportedError: an architecture or a feature that Longspan cannot honour.
            ConfigError: a model that cannot be read, or that this layout cannot deal out.
        """
        spec = self.model.read()
        self.layout.check_model(spec)
        self._check_transport(spec)
        return spec

    def _check_transport(self, spec: ModelSpec) -> None:
        """Refuse heads that the transport cannot deal out."""
        layout, attention = self.layout, self.attention
        if "+" in attention.transport and 1 in (layout.cp_outer, layout.cp_inner):
            raise ConfigError(
                f"transport={attention.transport} has two levels: set layout.cp_outer and layout.cp_inner above 1"
            )
        if attention.gradient_dtype == "bfloat16" and self.train.dtype != "bfloat16":
            raise ConfigError(
                f"gradient_dtype=bfloat16 is narrower than train.dtype={self.train.dtype}; leave it out"
            )
        auto, options = attention.transport == "auto", self.transport_options(layout)
        inner = 1 if auto else inner_size(attention.transport, layout.cp, options)
        query, kv = spec.num_heads // layout.tp, max(spec.num_kv_heads // layout.tp, 1)
        if inner > 1 and inner * attention.head_groups > query:
            raise ConfigError(
                f"transport={attention.transport} deals {query} query heads (tp={layout.tp}) over {inner} ranks in "
                f"{attention.head_groups} groups; use fewer ranks or head_groups"
            )
        if attention.transport in ("auto", "all_gather") and attention.head_groups > kv:
            raise ConfigError(
                f"head_groups={attention.head_groups} are more than {kv} K/V heads of a rank; use fewer"
            )

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
        options = (leaf, leaf.get("items", {}), *leaf.get("anyOf", ()))
        references = [option["$ref"] for option in options if "$ref" in option]
        tables = [definitions[reference.rpartition("/")[2]] for reference in references]
        if tables:
            yield from _leaves(tables[0], definitions, f"{prefix}{name}.")
        else:
            yield prefix + name, leaf


def _explain(error: ValidationError, file: str, overrides: Mapping[str, Any]) -> str:
    """The most telling of pydantic's complaints as one line."""
    # An unknown key comes first: misspelt, it also shows up as a missing one.
    first = min(error.errors(), key=lambda problem: problem["type"] not in _UNKNOWN)
    key = ".".join(map(str, _counted_from_1(first["loc"])))
    place = "command line" if any(_overlap(key, given) for given in overrides) else file
    if first["type"] == "missing":
        return f"{place}: {key} is missing"
    value = reprlib.repr(first["input"])
    if first["type"] in _UNKNOWN:
        return f"{place}: unknown key {key} = {value}; {_nearest(key)}"
    wanted = _WANTED.get(first["type"], first["msg"])
    return f"{place}: {key} = {value}: {wanted.removeprefix('Input ').removeprefix('Value error, ')}"


def _counted_from_1(location: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """Stages are numbered as on the command line."""
    if location[0] == "stages" and len(location) > 1:
        return "stages", int(location[1]) + 1, *location[2:]
    return location


def _overlap(key: str, given: str) -> bool:
    """Whether one of two dotted keys is part of the other's table."""
    return f"{given}.".startswith(f"{key}.") or f"{key}.".startswith(f"{given}.")


def _nearest(key: str) -> str:
    """What an unknown key may have meant."""
    section, _, name = key.rpartition(".")
    names: dict[str, list[str]] = {}
    for known in known_keys():
        known_section, _, known_name = known.rpartition(".")
        names.setdefault(known_section, []).append(known_name)
    siblings = names.get(re.sub(r"\.\d+$", "", section), [])
    if close := difflib.get_close_matches(name, siblings, n=1):
        return f"did you mean {section}.{close[0]}?"
    if not section and (close := difflib.get_close_matches(name, names, n=1)):
        return f"did you mean [{close[0]}]?"
    if close := difflib.get_close_matches(name, sum(names.values(), []), n=1):
        return (
            f"did you mean {any_of([f'{other}.{close[0]}' for other in names if close[0] in names[other]])}?"
        )
    return f"[{section}] knows {', '.join(siblings)}" if siblings else f"sections are {', '.join(names)}"
