"""Needed rows only: every rank sends each other rank just the rows that it attends to, straight, in a few stages.

With a window that is a halo; with packed documents, the parts of those documents that two ranks share. Gradients
come straight home and are added up there, so no partial sum is ever rounded on the way.
"""

from longspan.spec.exchange.needs import Needs
from longspan.spec.exchange.options import Options
from longspan.spec.exchange.steps import Program, Stage, in_stages, moves
from longspan.spec.ranges import size


def needed(needs: Needs, rank: int, options: Options) -> Program:
    """Program of one rank."""
    local = needs.work(rank, rank, needs.everything(rank))
    return in_stages(local, [_stage(needs, rank, group) for group in _groups(needs, options.stages)])


def _groups(needs: Needs, stages: int) -> list[list[int]]:
    """Distances between ranks that exchange anything, in groups of near-equal rows; the same on every rank."""
    cp = needs.cp
    rows = [
        (hop, sum(size(needs.rows(rank, (rank - hop) % cp)) for rank in range(cp))) for hop in range(1, cp)
    ]
    rows = [(hop, count) for hop, count in rows if count]
    total, before = sum(count for _, count in rows), 0
    groups: dict[int, list[int]] = {}
    for hop, count in rows:
        # The group in which the middle of this distance's rows lies.
        groups.setdefault((2 * before + count) * stages // (2 * total), []).append(hop)
        before += count
    return [*groups.values()]


def _stage(needs: Needs, rank: int, hops: list[int]) -> Stage:
    sources = [(rank - hop) % needs.cp for hop in hops]
    peers = [(rank + hop) % needs.cp for hop in hops]
    sent = [(peer, needs.rows(peer, rank)) for peer in peers]
    seen = [(source, needs.rows(rank, source)) for source in sources]
    return Stage(
        kv_out=tuple(m for peer, rows in sent for m in moves("kv", rank, peer, rows)),
        kv_in=tuple(m for source, rows in seen for m in moves("kv", source, source, rows)),
        work=tuple(needs.work(rank, source, rows) for source, rows in seen if rows),
        grads_out=tuple(m for source, rows in seen for m in moves("grad", source, source, rows)),
        grads_in=tuple(m for peer, rows in sent for m in moves("grad", rank, peer, rows)),
    )
