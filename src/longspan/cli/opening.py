"""What a run says before it starts: what it will do, and why."""

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn
from rich.table import Table

from longspan.cli.groups import headline
from longspan.cli.output import table
from longspan.data import PADDING, CorpusReport
from longspan.train.session import Session

__all__ = ["loading", "show_opening"]


@contextmanager
def loading(out: Console, show: bool) -> Generator[Callable[[int, int], None]]:
    """A progress bar over the corpus; the function it gives takes (bytes done, bytes in all)."""
    columns = (TextColumn("reading and tokenising"), BarColumn(), DownloadColumn())
    with Progress(*columns, console=out, transient=True, disable=not (show and out.is_terminal)) as bar:
        task = bar.add_task("corpus")
        yield lambda done, total: bar.update(task, completed=done, total=total)


def show_opening(session: Session, out: Console) -> None:
    """Print layout, choices, data, first batch and, if there are several, stages."""
    out.print(headline(session.groups.layout))
    rows = table("what", "chosen", "why")
    for what, chosen, why in _choices(session):
        rows.add_row(what, chosen, why)
    out.print(rows)
    if len(session.plan.stages) > 1:
        out.print("", _stages(session), sep="\n")


def _choices(session: Session) -> Iterator[tuple[str, str, str]]:
    config, spec = session.config, session.spec
    yield (
        "model",
        f"{spec.family}, {spec.num_parameters:,} parameters",
        f"{spec.num_layers} layers × {spec.hidden_size}, {spec.num_heads} query and {spec.num_kv_heads} K/V heads of "
        f"{spec.head_dim}",
    )
    if len(session.plan.stages) == 1:
        (choice,) = session.choices
        yield "sharding", _shared(session, choice.chosen.sharding), choice.reason
        yield (
            "transport",
            _shared(session, choice.chosen.transport),
            f"{choice.chosen.rounds} rounds a micro-batch",
        )
    named = "as the run file says" if config.attention.kernel != "auto" else "the fused kernel of the device"
    yield "kernel", session.kernel.name, f"{named}; {config.train.dtype} on {session.groups.device}"
    yield "recompute", config.memory.recompute, "as the run file says"
    yield "corpus", *_corpus(session.corpus.report)
    yield "first batch", *_first_batch(session)


def _shared(session: Session, how: str) -> str:
    return how if session.groups.layout.cp > 1 else "none"


def _corpus(report: CorpusReport) -> tuple[str, str]:
    entropy = "" if report.unigram_entropy is None else f", unigram entropy {report.unigram_entropy:.3f} nats"
    return (
        f"{report.documents:,} documents",
        f"{report.tokens:,} tokens by {report.tokenizer}{entropy}; a document has {report.median_length:,} (median) "
        f"to {report.max_length:,}; skipped {report.skipped_empty} empty, {report.skipped_undecodable} not UTF-8",
    )


def _stages(session: Session) -> Table:
    rows = table("stage", "rows × tokens", "steps", "sharding", "transport", "why", uncut=5)
    for stage in session.plan.stages:
        choice = session.choice(stage)
        rows.add_row(
            str(stage.number),
            f"{stage.batch.global_batch} × {stage.sequence:,}",
            f"{stage.steps:,}",
            _shared(session, choice.chosen.sharding),
            _shared(session, choice.chosen.transport),
            choice.reason,
        )
    return rows


def _first_batch(session: Session) -> tuple[str, str]:
    batches = session.training_step(0)
    wholes = [micro.whole for micro in batches.micro_batches]
    documents = sum(int((batch.sample_ids != PADDING).sum()) for batch in wholes)
    padding = sum(
        int((batch.cu_seqlens[1:] - batch.cu_seqlens[:-1])[batch.sample_ids == PADDING].sum())
        for batch in wholes
    )
    stage = session.plan.stages[0]
    return (
        f"{stage.batch.global_batch} rows of {stage.sequence:,} tokens",
        f"{batches.num_targets:,} targets; rank 0's rows hold {documents} documents or parts, {padding} padding tokens",
    )
