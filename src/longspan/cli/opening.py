"""What a run says before it starts: what it will do, and why."""

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from longspan.cli.groups import headline
from longspan.cli.output import table
from longspan.data import PADDING
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
    """Print layout, choices, data and first batch."""
    out.print(headline(session.groups.layout))
    rows = table("what", "chosen", "why")
    for what, chosen, why in _choices(session):
        rows.add_row(what, chosen, why)
    out.print(rows)


def _choices(session: Session) -> Iterator[tuple[str, str, str]]:
    config, spec, report, chosen = session.config, session.spec, session.corpus.report, session.choice.chosen
    yield (
        "model",
        f"{spec.family}, {spec.num_parameters:,} parameters",
        f"{spec.num_layers} layers × {spec.hidden_size}, {spec.num_heads} query and {spec.num_kv_heads} K/V heads of "
        f"{spec.head_dim}",
    )
    yield "sharding", chosen.sharding if session.groups.layout.cp > 1 else "none", session.choice.reason
    yield (
        "transport",
        chosen.transport if session.groups.layout.cp > 1 else "none",
        f"{chosen.rounds} rounds a micro-batch",
    )
    named = "as the run file says" if config.attention.kernel != "auto" else "the fused kernel of the device"
    yield "kernel", session.kernel.name, f"{named}; {config.train.dtype} on {session.groups.device}"
    yield "recompute", config.memory.recompute, "as the run file says"
    yield (
        "corpus",
        f"{report.documents:,} documents",
        f"{report.tokens:,} tokens by {report.tokenizer}; a document has {report.median_length:,} (median) to "
        f"{report.max_length:,}; skipped {report.skipped_empty} empty, {report.skipped_undecodable} not UTF-8",
    )
    yield "first batch", *_first_batch(session)


def _first_batch(session: Session) -> tuple[str, str]:
    batches = session.training_step(0)
    wholes = [micro.whole for micro in batches.micro_batches]
    documents = sum(int((batch.sample_ids != PADDING).sum()) for batch in wholes)
    padding = sum(
        int((batch.cu_seqlens[1:] - batch.cu_seqlens[:-1])[batch.sample_ids == PADDING].sum())
        for batch in wholes
    )
    rows = session.config.batch.global_batch
    return (
        f"{rows} rows of {session.config.data.sequence:,} tokens",
        f"{batches.num_targets:,} targets; rank 0's rows hold {documents} documents or parts, {padding} padding tokens",
    )
