"""How the rows of a step's moves travel: in messages between two ranks, or in collectives.

A message is one flat buffer, all K rows and then all V rows (or their gradients), so K and V never cost two messages.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from longspan.attention.held import Held, Key, find
from longspan.attention.meter import Meter
from longspan.spec.exchange import Exchange, Move, Step
from longspan.spec.ranges import Ranges, size

Arrived = dict[tuple[str, int, int, int | None], Held]
"""Received rows by (what, source, peer, part)."""

Pending = Callable[[], Arrived]
"""Waits for posted moves and gives what arrived."""


@dataclass(frozen=True)
class Mover:
    """Carries the moves of an `Exchange` within one process group, given explicitly.

    Args:
        exchange: the program whose steps are carried.
        group: its ranks ordered as the exchange counts them; None for a single process.
        meter: the tally to add to.
        grad_dtype: dtype in which gradients travel; None leaves them as they are.
    """

    exchange: Exchange
    group: dist.ProcessGroup | None
    meter: Meter
    grad_dtype: torch.dtype | None = None

    def post(self, step: Step, kv: dict[Key, Held], grads: dict[Key, Held]) -> Pending:
        """Start the moves of one step; the returned function waits for them.

        Args:
            step: its sends pick rows from `kv` or `grads`.
            kv: keys and values held; this rank's own among them.
            grads: their gradients held.
        """
        if not step.sends and not step.receives:
            return dict
        self.meter.rounds += 1
        if not self.exchange.padded_rows:
            return self._post_messages(step, kv, grads)
        return self._post_collectives(step, kv, grads)

    def _post_messages(self, step: Step, kv: dict[Key, Held], grads: dict[Key, Held]) -> Pending:
        held = {"kv": kv, "grad": grads}
        outgoing = [
            self._on_wire(m, _flat(find(held[m.what], (m.source, m.part), 1).pick(m.rows)))
            for m in step.sends
        ]
        like = {what: next(iter(rows.values())) for what, rows in held.items() if rows}
        incoming = [self._on_wire(m, _empty_message(m.rows, like[m.what])) for m in step.receives]
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
            return {_key(m): _unflat(message, m.rows, like[m.what]) for m, message in pairs}

        return wait

    def _operation(self, operation: Callable, message: Tensor, move: Move) -> dist.P2POp:
        tag = 2 * move.source + (move.what == "grad")
        return dist.P2POp(operation, message, group=self.group, tag=tag, group_peer=move.peer)

    def _on_wire(self, move: Move, message: Tensor) -> Tensor:
        narrow = self.grad_dtype is not None and move.what == "grad"
        return message.to(self.grad_dtype) if narrow else message

    def _post_collectives(self, step: Step, kv: dict[Key, Held], grads: dict[Key, Held]) -> Pending:
        """An all-gather of K/V, an exchange of gradients, or both, of one group of heads each."""
        waits = []
        for what, post, held in (("kv", self._post_all_gather, kv), ("grad", self._post_gradients, grads)):
            sends = [move for move in step.sends if move.what == what]
            receives = [move for move in step.receives if move.what == what]
            if sends:
                waits.append(post(sends, receives, held))
        return lambda: {key: rows for wait in waits for key, rows in wait().items()}

    def _post_all_gather(self, sends: list[Move], receives: list[Move], kv: dict[Key, Held]) -> Pending:
        own = find(kv, (self.exchange.rank, sends[0].part), self.exchange.parts)
        padded = _padded(own.pick(sends[0].rows), self.exchange.padded_rows, own)
        gathered = padded.new_empty(len(self.exchange.num_rows), padded.numel())
        self.meter.sent_bytes += len(sends) * padded.nbytes
        work = dist.all_gather_single(gathered.view(-1), padded, group=self.group, async_op=True)

        def wait() -> Arrived:
            self._wait([work])
            return {
                _key(m): _unpadded(gathered[m.source], m.rows, self.exchange.padded_rows, own)
                for m in receives
            }

        return wait

    def _post_gradients(self, sends: list[Move], receives: list[Move], grads: dict[Key, Held]) -> Pending:
        """Every rank's part to its owner, who adds them up in the dtype they were accumulated in."""
        exchange, home = self.exchange, receives[0]
        like = find(grads, (exchange.rank, sends[0].part), exchange.parts)
        outgoing = like.k_mKD.new_zeros(
            len(exchange.num_rows), exchange.padded_rows * sum(_row_sizes(like)), dtype=self.grad_dtype
        )
        for move in sends:
            held = find(grads, (move.source, move.part), exchange.parts)
            outgoing[move.source] = _padded(held.pick(move.rows), exchange.padded_rows, held)
        incoming = torch.empty_like(outgoing)
        self.meter.sent_bytes += len(sends) * outgoing[0].nbytes
        work = dist.all_to_all_single(incoming, outgoing, group=self.group, async_op=True)
        assert work is not None

        def wait() -> Arrived:
            self._wait([work])
            summed = incoming.sum(0, dtype=like.k_mKD.dtype)
            return {_key(home): _unpadded(summed, home.rows, exchange.padded_rows, like)}

        return wait

    def _wait(self, works: list[dist.Work]) -> None:
        with self.meter.waiting():
            for work in works:
                work.wait()


def _key(move: Move) -> tuple[str, int, int, int | None]:
    return move.what, move.source, move.peer, move.part


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
