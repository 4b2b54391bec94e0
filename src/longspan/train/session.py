"""From a run file to everything that a run needs: model, data, layout and choices, ready to step."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from longspan.attention import Kernel, Meter, choose_kernel
from longspan.data import Batches, Corpus, PackedRows, find_files, load_corpus
from longspan.errors import ConfigError, UnsupportedError
from longspan.model import InitialWeights, load_hf
from longspan.spec.choose import Choice, choose
from longspan.spec.layout import Layout
from longspan.spec.mask import Mask
from longspan.spec.model import ModelSpec
from longspan.spec.run import RunConfig
from longspan.spec.stages import Stage, StagePlan
from longspan.train.context_parallel import ContextParallel
from longspan.train.forward import MicroBatch, ParallelModel, prepare
from longspan.train.groups import Groups
from longspan.train.parallelize import ModelOptions, build_model, refuse_unbuilt_axes

__all__ = ["DTYPES", "Session", "StepBatches", "check_trainable"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass(frozen=True, eq=False)
class StepBatches:
    """One step's micro-batches as this rank computes them.

    Attributes:
        step: number of the step, from 0.
        micro_batches: in order.
        num_targets: targets of the whole step over all dp ranks.
    """

    step: int
    micro_batches: tuple[MicroBatch, ...]
    num_targets: int


@dataclass(frozen=True, eq=False)
class Session:
    """A run on this rank, before its first step.

    Attributes:
        config: the run file.
        spec: the model.
        groups: this rank's groups.
        corpus: tokens to train on and to evaluate on.
        choices: sharding and transport of each stage, and why.
        kernel: attention kernel.
    """

    config: RunConfig
    spec: ModelSpec
    groups: Groups
    corpus: Corpus
    choices: tuple[Choice, ...]
    kernel: Kernel

    @classmethod
    def open(
        cls,
        config: RunConfig,
        groups: Groups,
        *,
        layers: int | None = None,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> "Session":
        """Read the data and make the choices; the same on every rank, without communication.

        Args:
            config: the run file.
            groups: this rank's groups.
            layers: keep only this many layers of the model.
            on_progress: called with (bytes read, bytes in all) while the corpus loads.

        Raises:
            LongspanError: anything that the run asks for and cannot have, in one line.
        """
        spec = check_trainable(config)
        if layers is not None:
            spec = _shortened(spec, layers)
        kernel = choose_kernel(config.attention.kernel, groups.device, DTYPES[config.train.dtype])
        data = config.data
        corpus = load_corpus(
            data.source,
            tokenizer=data.tokenizer,
            text_field=data.text_field,
            eval_documents=data.eval_documents,
            model_vocab_size=spec.vocab_size,
            on_progress=on_progress,
        )
        if config.train.eval_every and not corpus.evaluation.num_documents:
            raise ConfigError(
                "there are no documents to evaluate on; raise data.eval_documents or set train.eval_every=0"
            )
        choices = tuple(_choose(config, spec, groups, corpus, stage) for stage in config.stage_plan.stages)
        return cls(config, spec, groups, corpus, choices, kernel)

    def alone(self) -> "Session":
        """The same run as a single process would do it, whatever world this one is in."""
        config = self.config.model_copy(update={"layout": Layout()})
        return replace(self, config=config, groups=Groups.alone(self.groups.device))

    @property
    def plan(self) -> StagePlan:
        """Stages of the run."""
        return self.config.stage_plan

    def choice(self, stage: Stage) -> Choice:
        """Sharding and transport of a stage, and why."""
        return self.choices[stage.number - 1]

    def context(self, stage: Stage) -> ContextParallel:
        """How attention is shared in a stage."""
        chosen, layout = self.choice(stage).chosen, self.groups.layout
        options = self.config.transport_options(layout)
        return ContextParallel(
            layout.cp, self.groups.coordinate("cp"), chosen.sharding, chosen.transport, options
        )

    def weights(self) -> Mapping[str, Tensor]:
        """Source of the weights that the run starts from."""
        folder = self.config.model.weights
        return load_hf(folder) if folder else InitialWeights(self.spec, self.config.train.seed)

    def model(self, dtype: str | None = None) -> ParallelModel:
        """This rank's part of the model; every rank calls together.

        Args:
            dtype: instead of the run's; float64 weights come with float64, float32 ones otherwise.
        """
        compute = DTYPES[dtype or self.config.train.dtype]
        options = ModelOptions(
            torch.promote_types(compute, torch.float32), compute, self.config.memory.recompute
        )
        decoder = build_model(self.spec, self.weights(), self.groups, options)
        wire = self.config.attention.gradient_dtype
        return ParallelModel(
            decoder,
            self.groups,
            self.kernel,
            Meter(),
            self.config.train.loss_chunk,
            grad_dtype=DTYPES[wire] if wire else None,
        )

    def training_batches(self, stage: Stage, dp_rank: int | None = None) -> Batches:
        """Packed rows of every step of a stage, counted inside it, of this or another dp rank."""
        rows = PackedRows(self.corpus.train, stage.sequence, self.config.train.seed)
        own = self.groups.coordinate("dp") if dp_rank is None else dp_rank
        return Batches(rows, stage.batch, own, first_row=stage.first_row)

    def training_step(self, step: int, dp_rank: int | None = None) -> StepBatches:
        """One step's micro-batches of this or another dp rank, dealt and planned.

        They follow from the run file and the step's number alone, whatever was read before.

        Args:
            step: number of the step in the whole run, from 0.
            dp_rank: whose rows; this rank's when left out.
        """
        stage = self.plan.stage_of(step)
        data = self.training_batches(stage, dp_rank).step(stage.inside(step))
        windows, context = tuple(self.spec.window_layers), self.context(stage)
        micro_batches = tuple(prepare(batch, windows, context) for batch in data.micro_batches)
        return StepBatches(step, micro_batches, data.num_targets)

    def evaluation_step(self, dp_rank: int | None = None) -> StepBatches:
        """The fixed held-out rows, one row a micro-batch, dealt to the dp ranks in turn.

        Every dp rank has equally many micro-batches, because shared weights are gathered by all together. Those for
        which no row is left have no targets. Attention is shared as in the stage with the longest rows.

        Args:
            dp_rank: whose rows; this rank's when left out.
        """
        rows = PackedRows(self.corpus.evaluation, self.config.eval_sequence, self.config.train.seed)
        indices, dp = range(self.config.train.eval_rows), self.groups.layout.dp
        first = self.groups.coordinate("dp") if dp_rank is None else dp_rank
        own = [rows.row(index) for index in indices[first::dp]]
        missing = -(-len(indices) // dp) - len(own)
        own += [rows.row(0).without_targets()] * missing
        windows, context = tuple(self.spec.window_layers), self.context(self.plan.longest)
        micro_batches = tuple(prepare(batch, windows, context) for batch in own)
        return StepBatches(0, micro_batches, rows.num_targets(indices))


def _shortened(spec: ModelSpec, layers: int) -> ModelSpec:
    if not 1 <= layers <= spec.num_layers:
        raise ConfigError(f"layers={layers} must be from 1 to the model's {spec.num_layers}")
    return spec.with_changes(num_layers=layers)


def check_trainable(config: RunConfig) -> ModelSpec:
    """The run's model, after cheap checks of everything that can be refused without starting ranks or reading data.

    Raises:
        UnsupportedError: a model or an axis that training does not carry out.
        DataError: a data source that is not there.
        ConfigError: heads or rows that the layout cannot deal out.
    """
    spec = config.model_spec()
    if reason := spec.refusal():
        raise UnsupportedError(reason)
    refuse_unbuilt_axes(config.layout)
    find_files(config.data.source)
    return spec


def _choose(config: RunConfig, spec: ModelSpec, groups: Groups, corpus: Corpus, stage: Stage) -> Choice:
    rows = PackedRows(corpus.train, stage.sequence, config.train.seed)
    first = rows.batch(range(stage.first_row, stage.first_row + stage.batch.micro_batch))
    bounds = tuple(first.cu_seqlens.tolist())
    layers = {Mask(bounds, window=window): count for window, count in spec.window_layers.items()}
    attention = config.attention
    options = config.transport_options(groups.layout)
    return choose(attention.sharding, attention.transport, layers, first.rows, groups.layout.cp, options)
