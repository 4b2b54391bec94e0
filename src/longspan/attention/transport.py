"""How the rows of a step's moves travel: point to point, or in one collective.

A message is one flat buffer, all K rows and then all V rows (or their gradients), so K and V never cost two messages.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from longspan.attention.meter import Meter
from longspan.spec.exchange import Exchange, Move, Step
from longspan.spec.ranges import Ranges, locate, size


class Held(NamedTuple):
    """Rows of one source in this rank's memory: keys (or dK) [m, K, D] and values (or dV) [m, K, D]."""

    rows: Ranges
    k_mKD: Tensor
    v_mKD: Tensor

    def pick(self, rows: Ranges) -> list[Tensor]:
        """Views of K, then V, for a subset of the rows."""
        places = locate(rows, self.rows)
        return [t[start:stop] for t in (self.k_mKD, self.v_mKD) for start, stop in places]


Arrived = dict[tuple[str, int, int], Held]
"""Received rows by (what, source, peer)."""

Pending = Callable[[], Arrived]
"""Waits for posted moves and gives what arrived."""


@dataclass(frozen=True)
class Mover:
    """Carries the moves of an `Exchange` within one cp process group, given explicitly.

    Args:
        exchange: the program whose steps are carried.
        group: the cp group, its ranks ordered as the exchange counts them; None for a single process.
        meter: the tally to add to.
    """

    exchange: Exchange
    group: dist.ProcessGroup | None
    meter: Meter

    def post(self, step: Step, kv: dict[int, Held], grads: dict[int, Held]) -> Pending:
        """Start the moves of one step; the returned function waits for them.

        Args:
            step: its sends pick rows from `kv` or `grads`.
            kv: keys and values held, by source.
            grads: their gradients held, by source.
        """
        if not step.sends and not step.receives:
            return dict
        self.meter.rounds += 1
        if self.exchange.transport == "ring":
            return self._post_messages(step, kv, grads)
        if step.sends[0].what == "kv":
            return self._post_all_gather(step, kv)
        return self._post_reduce_scatter(step, grads)

    def _post_messages(self, step: Step, kv: dict[int, Held], grads: dict[int, Held]) -> Pending:
        held = {"kv": kv, "grad": grads}
        outgoing = [_flat(held[m.what][m.source].pick(m.rows)) for m in step.sends]
        like = {what: next(iter(rows.values())) for what, rows in held.items() if rows}
        incoming = [_empty_message(m.rows, like[m.what]) for m in step.receives]
        operations = [
            self._operation(dist.isend, message, move)
            for move, message in zip(step.sends, outgoing, strict=True)
        ] + [
            self._operation(dist.irecv, message, move)
            for move, message in zip(step.receives, incoming, strict=True)
        ]
        self.meter.sent_bytes += sum(message.nbytes for message in outgoing)
        works = dist.batch_isend_irecv(operations)

        def wait() -> Arrived:
            self._wait(works)
            outgoing.clear()
            pairs = zip(step.receives, incoming, strict=True)
            return {
                (m.what, m.source, m.peer): _unflat(message, m.rows, like[m.what]) for m, message in pairs
            }

        return wait

    def _operation(self, operation: Callable, message: Tensor, move: Move) -> dist.P2POp:
        tag = 2 * move.source + (move.what == "grad")
        return dist.P2POp(operation, message, group=self.group, tag=tag, group_peer=move.peer)

    def _post_all_gather(self, step: Step, kv: dict[int, Held]) -> Pending:
        own = kv[self.exchange.rank]
        padded = _padded(own.pick(step.sends[0].rows), self.exchange.padded_rows, own)
        gathered = padded.new_empty(self.exchange.cp, padded.numel())
        self.meter.sent_bytes += (self.exchange.cp - 1) * padded.nbytes
        work = dist.all_gather_single(gathered.view(-1), padded, group=self.group, async_op=True)

        def wait() -> Arrived:
            self._wait([work])
            return {
                ("kv", m.source, m.peer): _unpadded(
                    gathered[m.source], m.rows, self.exchange.padded_rows, own
                )
                for m in step.receives
            }

        return wait

    def _post_reduce_scatter(self, step: Step, grads: dict[int, Held]) -> Pending:
        exchange, rows = self.exchange, step.receives[0].rows
        like = next(iter(grads.values()))
        parts = {
            m.source: _padded(grads[m.source].pick(m.rows), exchange.padded_rows, like) for m in step.sends
        }
        nothing = torch.zeros_like(next(iter(parts.values())))
        outgoing = torch.stack([parts.get(source, nothing) for source in range(exchange.cp)])
        summed = torch.empty_like(nothing)
        self.meter.sent_bytes += (exchange.cp - 1) * nothing.nbytes
        work = dist.reduce_scatter_single(summed, outgoing.view(-1), group=self.group, async_op=True)

        def wait() -> Arrived:
            self._wait([work])
            own = exchange.rank
            return {("grad", own, own): _unpadded(summed, rows, exchange.padded_rows, like)}

        return wait

    def _wait(self, works: list[dist.Work]) -> None:
        with self.meter.waiting():
            for work in works:
                work.wait()


def _flat(rows: list[Tensor]) -> Tensor:
    return torch.cat([t.reshape(-1) for t in rows])


def _row_sizes(like: Held) -> tuple[int, int]:
    """Elements of one row of K and of V."""
    return like.k_mKD.shape[1:].numel(), like.v_mKD.shape[1:].numel()


def _empty_message(rows: Ranges, like: Held) -> Tensor:
    return like.k_mKD.new_empty(size(rows) * sum(_row_sizes(like)))


def _unflat(message: Tensor, rows: Ranges, like: Held) -> Held:
    count, (k_row, v_row) = size(rows), _row_sizes(like)
    k, v = message.split([count * k_row, count * v_row])
    return Held(rows, k.view(count, *like.k_mKD.shape[1:]), v.view(count, *like.v_mKD.shape[1:]))


def _padded(rows: list[Tensor], padded_rows: int, like: Held) -> Tensor:
    """One flat message with K and V each filled up to `padded_rows` rows."""
    message = like.k_mKD.new_zeros(padded_rows * sum(_row_sizes(like)))
    half = len(rows) // 2
    k = torch.cat(rows[:half]).reshape(-1) if half else message[:0]
    v = torch.cat(rows[half:]).reshape(-1) if half else message[:0]
    message[: k.numel()] = k
    v_start = padded_rows * _row_sizes(like)[0]
    message[v_start : v_start + v.numel()] = v
    return message


def _unpadded(message: Tensor, rows: Ranges, padded_rows: int, like: Held) -> Held:
    whole = _unflat(message, ((0, padded_rows),), like)
    return Held(rows, whole.k_mKD[: size(rows)], whole.v_mKD[: size(rows)])
