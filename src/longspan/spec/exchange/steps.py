"""Steps in which what one stage needs arrives while the stage before it is computed."""

from collections.abc import Sequence
from typing import NamedTuple

from longspan.spec.exchange.needs import halves
from longspan.spec.exchange.program import Content, Move, Step, Work
from longspan.spec.ranges import Ranges

Moves = tuple[Move, ...]


class Program(NamedTuple):
    """What a transport writes: see the fields of `Exchange`."""

    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    padded_rows: int = 0
    parts: int = 1


class Stage(NamedTuple):
    """Rows that arrive together, the work on them, and their gradients' way home."""

    kv_out: Moves
    kv_in: Moves
    work: tuple[Work, ...]
    grads_out: Moves
    grads_in: Moves


NOTHING = Stage((), (), (), (), ())


def in_stages(local: Work, stages: Sequence[Stage]) -> Program:
    """Forward and backward steps over stages; rows are moved again for backward and never kept for it.

    Own work hides the first stage's arrival; in backward a part of it is left to hide the last gradients.
    At most two stages' rows are held at once, and in backward also two stages' gradients.

    Args:
        local: work on this rank's own rows.
        stages: in order; none if nothing is exchanged.
    """
    if not stages:
        alone = (Step((), (), (local,)),)
        return Program(alone, alone)
    first, last = halves(local)
    arriving = [*stages, NOTHING]
    works = [(local,), *(stage.work for stage in stages)]
    forward = tuple(
        Step(stage.kv_out, stage.kv_in, work) for stage, work in zip(arriving, works, strict=True)
    )
    arriving, leaving = [*stages, NOTHING, NOTHING], [NOTHING, NOTHING, *stages]
    works = [(first,), *(stage.work for stage in stages), (last,)]
    backward = tuple(
        Step(kv.kv_out + grads.grads_out, kv.kv_in + grads.grads_in, work)
        for kv, grads, work in zip(arriving, leaving, works, strict=True)
    )
    return Program(forward, backward)


def moves(what: Content, source: int, peer: int, rows: Ranges) -> Moves:
    """One move, or none where it would carry no row."""
    return (Move(what, source, peer, rows),) if rows else ()
