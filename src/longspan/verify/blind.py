"""Why a run cannot show a sabotage: then "not caught" would say nothing, and `verify` refuses it with the reason.

Every rank looks at the rows of *all* dp and cp ranks, so that all come to the same answer without communication.
"""

from collections.abc import Iterator

import numpy as np

from longspan.data import IGNORE
from longspan.spec.blocks import Block
from longspan.spec.exchange import Exchange, build_all
from longspan.train.forward import MicroBatch
from longspan.train.session import Session

__all__ = [
    "needs_causal_blocks",
    "needs_cp",
    "needs_dp",
    "needs_dp_cp",
    "needs_late_labels",
    "needs_moves",
    "needs_packing",
    "needs_partial",
    "needs_split_documents",
    "needs_uneven_evaluation",
    "needs_uneven_targets",
    "needs_window",
]


def needs_packing(session: Session) -> str | None:
    """Bounds matter only where a row holds several documents."""
    if any(len(micro.whole.sample_ids) > micro.whole.rows for micro in _first_step(session)):
        return None
    return "every row of the first step holds one document, so its bounds are those of the row"


def needs_window(session: Session) -> str | None:
    """A window matters only in documents that are longer."""
    windows = [window for window in session.spec.windows if window is not None]
    if not windows:
        return "the model has no attention window"
    longest = max(int(np.diff(micro.whole.cu_seqlens).max()) for micro in _first_step(session))
    return (
        None if min(windows) < longest else f"no document is longer than the window of {min(windows)} tokens"
    )


def needs_causal_blocks(session: Session) -> str | None:
    """The causal border matters only in causal squares; bands of narrow windows carry their own mask."""
    if any(block.shape == "causal" and block.pairs > 1 for block in _blocks(session)):
        return None
    return "no attention block of the first step is a causal square: windows are narrow, or documents one token long"


def needs_moves(session: Session) -> str | None:
    """Something must be received before it can be stale."""
    if session.context(session.plan.stages[0]).inner > 1:
        return None
    if any(program.forward[0].sends for program in _programs(session)):
        return None
    return "no K/V row of the first step has to move between ranks"


def needs_split_documents(session: Session) -> str | None:
    """Wrong positions show only where they change a distance inside a document."""
    if session.groups.layout.cp == 1:
        return "cp is 1: positions differ by a constant in each document, which rotary embedding cannot see"
    return needs_moves(session)


def needs_late_labels(session: Session) -> str | None:
    """Shifting after sharding errs only where a rank's tokens do not follow each other inside a document."""
    for micro in _first_step(session):
        for index_t in _indices(micro):
            labels_t, tokens_t = micro.whole.labels_T[index_t], micro.whole.tokens_T[index_t]
            if (np.roll(tokens_t, -1) != labels_t)[labels_t != IGNORE].any():
                return None
    return "no label of the first step lies on another rank than its token"


def needs_dp_cp(session: Session) -> str | None:
    """There must be ranks to sum over."""
    return None if session.groups.layout.size("dp_cp") > 1 else "dp × cp is 1: there is nothing to sum over"


def needs_dp(session: Session) -> str | None:
    """There must be ranks with other rows."""
    return None if session.groups.layout.dp > 1 else "dp is 1: no rank has other rows"


def needs_cp(session: Session) -> str | None:
    """There must be ranks with other tokens of the same rows."""
    return None if session.groups.layout.cp > 1 else "cp is 1: no rank has other tokens of the same rows"


def needs_partial(session: Session) -> str | None:
    """Only weights that tp ranks share are summed over tp."""
    layout, spec = session.groups.layout, session.spec
    if layout.tp == 1:
        return "tp is 1: there is nothing to sum over"
    partial = layout.sp or spec.qk_norm or spec.num_kv_heads < layout.tp
    return None if partial else "without sp, QK-norm or shared K/V heads no gradient is summed over tp"


def needs_uneven_targets(session: Session) -> str | None:
    """A mean of means is the mean when every part of it has equally many targets."""
    counts = [count for micro in _first_step(session) for count in _targets(micro)]
    return None if len(set(counts)) > 1 else "every part of the first step has equally many targets"


def needs_uneven_evaluation(session: Session) -> str | None:
    """The same for evaluation, where each rank first adds up its rows."""
    dp, cp = session.groups.layout.dp, session.groups.layout.cp
    per_rank = [
        sum(_targets(micro)[rank] for micro in session.evaluation_step(dp_rank).micro_batches)
        for dp_rank in range(dp)
        for rank in range(cp)
    ]
    return None if len(set(per_rank)) > 1 else "every rank evaluates equally many targets"


def _first_step(session: Session) -> list[MicroBatch]:
    """Micro-batches of the first step, of all dp ranks."""
    ranks = range(session.groups.layout.dp)
    return [micro for rank in ranks for micro in session.training_step(0, rank).micro_batches]


def _indices(micro: MicroBatch) -> list[np.ndarray]:
    """Token numbers of every cp rank."""
    sharding = micro.attention.sharding
    return [sharding.index(rank) for rank in range(sharding.cp)]


def _targets(micro: MicroBatch) -> list[int]:
    """Targets of every cp rank."""
    return [int((micro.whole.labels_T[index_t] != IGNORE).sum()) for index_t in _indices(micro)]


def _programs(session: Session) -> Iterator[Exchange]:
    """Attention programs of the first step, of all ranks."""
    for micro in _first_step(session):
        for mask in micro.attention.masks.values():
            yield from build_all(mask, micro.attention.sharding)


def _blocks(session: Session) -> Iterator[Block]:
    for program in _programs(session):
        for step in program.forward:
            for work in step.work:
                yield from work.blocks
