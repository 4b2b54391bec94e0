"""The ring: K and V pass from rank to rank in one message (Ring Attention, arXiv 2310.01889).

Rows that no later rank of the ring needs are dropped from the message, and a message without rows is not sent. In
backward K and V travel the same way; the gradient of a row starts at the first rank that used it, is passed on and
added to, and goes straight home from the last, so it makes exactly as many hops as the row did, each of them hidden
under a block computation. With direct gradients every rank's part goes straight home instead.
"""

from collections.abc import Callable
from functools import cache

from longspan.spec.exchange.needs import Needs, halves
from longspan.spec.exchange.options import Options
from longspan.spec.exchange.program import Step, Work
from longspan.spec.exchange.steps import Moves, Program, moves
from longspan.spec.ranges import Ranges, difference

Travelling = Callable[[int, int], Ranges]
"""travelling(source, hop): rows of a source that reach the rank `hop` places after it, for itself or a rank beyond."""


def ring(needs: Needs, rank: int, options: Options) -> Program:
    """Program of one rank: step h works on the rows of the source h places before it."""
    cp = needs.cp

    @cache
    def travelling(source: int, hop: int) -> Ranges:
        if hop == 0:
            return needs.everything(source)
        return needs.rows_of_any([(source + h) % cp for h in range(hop, cp)], source)

    sources = [(rank - hop) % cp for hop in range(cp)]
    work = [needs.work(rank, source, travelling(source, hop)) for hop, source in enumerate(sources)]
    kv_sends = [moves("kv", s, (rank + 1) % cp, travelling(s, hop + 1)) for hop, s in enumerate(sources)]
    kv_receives = [
        moves("kv", (s - 1) % cp, (rank - 1) % cp, travelling((s - 1) % cp, hop + 1))
        for hop, s in enumerate(sources)
    ]
    forward = tuple(
        Step(kv_sends[hop], kv_receives[hop], _unless_empty(work[hop], hop > 0)) for hop in range(cp)
    )
    first, last = halves(work[0])
    stages = [(first,), *((w,) if w.rows else () for w in work[1:]), (last,)]
    backward = []
    for hop in range(cp + 1):
        if options.direct_gradients:
            grads_out, grads_in = _straight_home(needs, rank, hop)
        else:
            grads_out, grads_in = _passed_on(rank, hop, cp, travelling)
        kv_out, kv_in = (kv_sends[hop], kv_receives[hop]) if hop < cp else ((), ())
        backward.append(Step(kv_out + grads_out, kv_in + grads_in, stages[hop]))
    return Program(forward, tuple(backward))


def _passed_on(rank: int, hop: int, cp: int, travelling: Travelling) -> tuple[Moves, Moves]:
    """Gradients that leave and reach `rank` at the start of backward step `hop`, computed in step `hop` - 1."""
    before = hop - 1
    if before < 1:
        return (), ()
    source, incoming = (rank - before) % cp, (rank - hop) % cp
    onward, next_in = travelling(source, hop), travelling(incoming, hop)
    home = difference(travelling(source, before), onward)
    returning = difference(travelling(rank, before), travelling(rank, hop))
    sends = moves("grad", source, (rank + 1) % cp, onward) + moves("grad", source, source, home)
    receives = moves("grad", incoming, (rank - 1) % cp, next_in) + moves(
        "grad", rank, (rank + before) % cp, returning
    )
    return sends, receives


def _straight_home(needs: Needs, rank: int, hop: int) -> tuple[Moves, Moves]:
    before = hop - 1
    if before < 1:
        return (), ()
    source, user = (rank - before) % needs.cp, (rank + before) % needs.cp
    return moves("grad", source, source, needs.rows(rank, source)), moves(
        "grad", rank, user, needs.rows(user, rank)
    )


def _unless_empty(work: Work, drop: bool) -> tuple[Work, ...]:
    return () if drop and not work.blocks else (work,)
