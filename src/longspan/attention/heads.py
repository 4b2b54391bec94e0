"""The trade of tokens for heads inside a group of ranks, and back: Q, K and V in one message to each member.

# t own tokens, T all tokens of the group, h/k heads of one slice, H/K all heads
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from longspan.attention.meter import Meter
from longspan.attention.steps import Gradients, Inputs
from longspan.spec.exchange import HeadSlice, Reshard

Pending = Callable[[], list[list[Tensor]]]


@dataclass(frozen=True)
class HeadMover:
    """Carries a `Reshard` within one group of ranks.

    Args:
        reshard: the trade.
        chunks: for each chunk the heads of every rank.
        group: its ranks in their order.
        meter: the tally to add to.
    """

    reshard: Reshard
    chunks: tuple[tuple[HeadSlice, ...], ...]
    group: dist.ProcessGroup
    meter: Meter

    def inputs_to_heads(self, chunk: int, inputs: Inputs) -> Callable[[], Inputs]:
        """Start the trade of one chunk's q, k and v; the returned function waits for own heads of all tokens."""
        q_tHD, k_tKD, v_tKD, sinks_H = inputs
        outgoing = [
            [q_tHD[:, part.start : part.stop], k_tKD[:, list(part.kv)], v_tKD[:, list(part.kv)]]
            for part in self.chunks[chunk]
        ]
        own = self.chunks[chunk][self.reshard.rank]
        widths = [
            (own.query, q_tHD.shape[-1]),
            (len(own.kv), k_tKD.shape[-1]),
            (len(own.kv), v_tKD.shape[-1]),
        ]
        pending = self._trade(outgoing, self._there(widths), q_tHD.dtype)

        def wait() -> Inputs:
            q_ThD, k_TkD, v_TkD = (torch.cat(parts) for parts in zip(*pending(), strict=True))
            sinks_h = None if sinks_H is None else sinks_H[own.start : own.stop]
            return Inputs(q_ThD, k_TkD, v_TkD, sinks_h)

        return wait

    def gradient_to_heads(self, chunk: int, grad_tHD: Tensor) -> Callable[[], Tensor]:
        """The same for the gradient of the output."""
        outgoing = [[grad_tHD[:, part.start : part.stop]] for part in self.chunks[chunk]]
        own = self.chunks[chunk][self.reshard.rank]
        pending = self._trade(outgoing, self._there([(own.query, grad_tHD.shape[-1])]), grad_tHD.dtype)
        return lambda: torch.cat([part for (part,) in pending()])

    def output_to_tokens(self, chunk: int, out_ThD: Tensor, out_tHD: Tensor) -> Callable[[], None]:
        """Start the way back of one chunk's output; the returned function writes its heads of own tokens."""
        pending = self._trade(
            [[part] for part in self._by_rank(out_ThD)], self._back_outputs(chunk, out_ThD), out_ThD.dtype
        )

        def wait() -> None:
            for part, (rows,) in zip(self.chunks[chunk], pending(), strict=True):
                out_tHD[:, part.start : part.stop] = rows

        return wait

    def gradients_to_tokens(
        self, chunk: int, grads: Gradients, total: Gradients, dtype: torch.dtype
    ) -> Callable[[], None]:
        """Start the way back of one chunk's gradients; the returned function adds them to those of own tokens.

        Args:
            chunk: number of the chunk.
            grads: of this rank's heads of all tokens.
            total: of all heads of own tokens; sinks are added at once.
            dtype: in which they travel.
        """
        own = self.chunks[chunk][self.reshard.rank]
        if grads.sinks_H is not None and total.sinks_H is not None:
            total.sinks_H[own.start : own.stop] += grads.sinks_H
        by_rank = zip(*(self._by_rank(t) for t in grads[:3]), strict=True)
        d_q, d_k, d_v = (t.shape[-1] for t in grads[:3])
        shapes = [
            [(part.query, d_q), (len(part.kv), d_k), (len(part.kv), d_v)] for part in self.chunks[chunk]
        ]
        pending = self._trade([list(parts) for parts in by_rank], [self._own_rows(s) for s in shapes], dtype)

        def wait() -> None:
            for part, (dq_thD, dk_tkD, dv_tkD) in zip(self.chunks[chunk], pending(), strict=True):
                total.q_tHD[:, part.start : part.stop] += dq_thD
                # One at a time: a slice may hold a head twice.
                for place, head in enumerate(part.kv):
                    total.k_tKD[:, head] += dk_tkD[:, place]
                    total.v_tKD[:, head] += dv_tkD[:, place]

        return wait

    def _there(self, widths: list[tuple[int, int]]) -> list[list[tuple[int, int, int]]]:
        """Shapes that arrive from each member: its tokens, this rank's heads."""
        return [[(rows, *width) for width in widths] for rows in self.reshard.num_rows]

    def _own_rows(self, widths: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
        return [(self.reshard.num_rows[self.reshard.rank], *width) for width in widths]

    def _back_outputs(self, chunk: int, out_ThD: Tensor) -> list[list[tuple[int, int, int]]]:
        return [self._own_rows([(part.query, out_ThD.shape[-1])]) for part in self.chunks[chunk]]

    def _by_rank(self, tensor_T: Tensor) -> tuple[Tensor, ...]:
        return tensor_T.split(self.reshard.num_rows)

    def _trade(
        self, outgoing: list[list[Tensor]], incoming: list[list[tuple[int, int, int]]], dtype: torch.dtype
    ) -> Pending:
        """One message to each member and one from each.

        Args:
            outgoing: tensors for each member.
            incoming: shapes of the tensors from each member.
            dtype: in which they travel.
        """
        sent = [sum(t.numel() for t in tensors) for tensors in outgoing]
        flat = _flat([t for tensors in outgoing for t in tensors], dtype)
        sizes = [[a * b * c for a, b, c in shapes] for shapes in incoming]
        buffer = flat.new_empty(sum(map(sum, sizes)))
        self.meter.rounds += 1
        self.meter.sent_bytes += (sum(sent) - sent[self.reshard.rank]) * flat.itemsize
        work = dist.all_to_all_single(
            buffer, flat, [sum(s) for s in sizes], sent, group=self.group, async_op=True
        )
        assert work is not None
        # What is sent must live until it has left.
        leaving = [flat]

        def wait() -> list[list[Tensor]]:
            with self.meter.waiting():
                work.wait()
            leaving.clear()
            arrived = buffer.split([n for s in sizes for n in s])
            shapes = [shape for member in incoming for shape in member]
            tensors = iter([t.view(shape) for t, shape in zip(arrived, shapes, strict=True)])
            return [[next(tensors) for _ in member] for member in incoming]

        return wait


def _flat(tensors: list[Tensor], dtype: torch.dtype) -> Tensor:
    """One flat message, every element copied once."""
    message = tensors[0].new_empty(sum(t.numel() for t in tensors), dtype=dtype)
    for part, tensor in zip(message.split([t.numel() for t in tensors]), tensors, strict=True):
        part.view(tensor.shape).copy_(tensor)
    return message
