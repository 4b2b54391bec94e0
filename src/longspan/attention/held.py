"""K/V rows, or their gradients, in a rank's memory, by the rank they come from and the group of heads.

# m rows, K key/value heads, D head size
"""

from typing import NamedTuple

from torch import Tensor

from longspan.spec.exchange.heads import kv_part
from longspan.spec.ranges import Ranges, locate

Key = tuple[int, int | None]
"""(source, part): part None holds all heads."""


class Held(NamedTuple):
    """Rows of one source: keys (or dK) [m, K, D] and values (or dV) [m, K, D]."""

    rows: Ranges
    k_mKD: Tensor
    v_mKD: Tensor

    def pick(self, rows: Ranges) -> list[Tensor]:
        """Views of K, then V, for a subset of the rows."""
        places = locate(rows, self.rows)
        return [t[start:stop] for t in (self.k_mKD, self.v_mKD) for start, stop in places]

    def heads(self, part: int | None, parts: int) -> "Held":
        """Views of one group of heads."""
        own = kv_part(self.k_mKD.shape[1], part, parts)
        return Held(self.rows, self.k_mKD[:, own], self.v_mKD[:, own])


def find(held: dict[Key, Held], key: Key, parts: int) -> Held:
    """What is held under a key, or the key's heads of what is held of the source with all heads."""
    exact = held.get(key)
    return exact if exact is not None else held[key[0], None].heads(key[1], parts)
