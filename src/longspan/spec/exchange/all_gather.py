"""The all-gather: all needed rows to every rank in one collective, or in one for each group of heads.

Rows are not kept for backward (Llama 3 training, arXiv 2407.21783, section 3.3): it gathers again. Gradients go to
their owners, who add them up. With several groups of heads, one group is gathered while the one before it is
computed, so that only two are in memory at once.
"""

from longspan.spec.exchange.needs import Needs
from longspan.spec.exchange.options import Options
from longspan.spec.exchange.program import Move
from longspan.spec.exchange.steps import Program, Stage, in_stages
from longspan.spec.ranges import size


def all_gather(needs: Needs, rank: int, options: Options) -> Program:
    """Program of one rank."""
    others = [source for source in range(needs.cp) if source != rank]
    shared = [needs.rows_of_any([r for r in range(needs.cp) if r != s], s) for s in range(needs.cp)]
    padded_rows, local = max(size(rows) for rows in shared), needs.work(rank, rank, needs.everything(rank))
    if not padded_rows:
        return in_stages(local, ())
    work = [needs.work(rank, source, shared[source]) for source in others]

    def stage(part: int | None) -> Stage:
        return Stage(
            kv_out=tuple(Move("kv", rank, peer, shared[rank], part) for peer in others),
            kv_in=tuple(Move("kv", source, source, shared[source], part) for source in others),
            work=tuple(w._replace(part=part) for w in work),
            grads_out=tuple(Move("grad", source, source, shared[source], part) for source in others),
            grads_in=tuple(Move("grad", rank, peer, shared[rank], part) for peer in others),
        )

    parts = options.head_groups
    stages = [stage(None)] if parts == 1 else [stage(part) for part in range(parts)]
    return in_stages(local, stages)._replace(padded_rows=padded_rows, parts=parts)
