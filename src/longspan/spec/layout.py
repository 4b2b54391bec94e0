"""How ranks are arranged: the size of every axis, each rank's place, and the groups that communicate.

Rank order puts the axis with the most traffic innermost, where links are shortest: tp varies fastest, then
cp_inner, cp_outer, dp_shard, dp_replicate, and pp slowest.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from pydantic import ConfigDict, StrictBool, StrictInt

from longspan.errors import ConfigError

if TYPE_CHECKING:
    from longspan.spec.model import ModelSpec

AXES = ("pp", "dp_replicate", "dp_shard", "cp_outer", "cp_inner", "tp")
COMBINED = {
    "dp": ("dp_replicate", "dp_shard"),
    "cp": ("cp_outer", "cp_inner"),
    "dp_shard_cp": ("dp_shard", "cp_outer", "cp_inner"),
    "dp_cp": ("dp_replicate", "dp_shard", "cp_outer", "cp_inner"),
}
# What a run file and the command line may say for two axes at once.
SHORTHANDS = {
    "dp": "Data-parallel ranks in all; alone it sets dp_replicate.",
    "cp": "Context-parallel ranks in all; alone it sets cp_inner.",
}
# The first half takes the whole of a shorthand when neither is given.
_HALVES = {"dp": ("dp_replicate", "dp_shard"), "cp": ("cp_inner", "cp_outer")}

Link = Literal["none", "intra-node", "inter-node", "unknown"]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Sizes of the parallel axes, and the ranks, groups and links that follow from them.

    Raises:
        ConfigError: a size below one, or sizes that cannot go together.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    pp: StrictInt = 1
    """Pipeline stages: each holds a run of consecutive layers."""
    vpp: StrictInt = 1
    """Chunks of layers on each pipeline stage."""
    dp_replicate: StrictInt = 1
    """Data-parallel replicas, each with all the weights of its stage."""
    dp_shard: StrictInt = 1
    """Data-parallel ranks that share out weights, gradients and optimizer state between uses."""
    cp_outer: StrictInt = 1
    """Outer context-parallel groups: the level that may cross nodes."""
    cp_inner: StrictInt = 1
    """Context-parallel ranks inside an outer group."""
    tp: StrictInt = 1
    """Tensor-parallel ranks: each holds part of the heads, the MLP width and the vocabulary."""
    sp: StrictBool = False
    """Sequence parallelism: tp ranks also share out the tokens of everything outside the split weights."""
    fsdp: StrictBool | None = None
    """Share out weights, gradients and optimizer state over dp_shard × cp; left out, when dp_shard is above 1."""
    ranks_per_node: StrictInt | None = None
    """Ranks on one machine; without it, which links an axis crosses is unknown."""

    def __post_init__(self) -> None:
        """Refuse sizes that cannot go together."""
        for name in (*AXES, "vpp", "ranks_per_node"):
            size = getattr(self, name)
            if size is not None and size < 1:
                raise ConfigError(f"{name} must be at least 1, got {size}")
        if self.sp and self.tp == 1:
            raise ConfigError("sp shares tokens out over tp, but tp=1; set tp to 2 or more, or sp=false")
        if self.vpp > 1 and self.pp == 1:
            raise ConfigError(
                f"vpp={self.vpp} cuts pipeline stages into chunks, but pp=1; set pp to 2 or more, or vpp=1"
            )
        if self.fsdp and self.size("dp_shard_cp") == 1:
            raise ConfigError(
                "fsdp shares weights out over dp_shard × cp, but both are 1; set dp_shard or cp"
            )
        if self.fsdp is False and self.dp_shard > 1:
            raise ConfigError(
                f"dp_shard={self.dp_shard} shares weights out, but fsdp=false; use dp_replicate={self.dp_shard}"
            )
        node = self.ranks_per_node
        if node and self.world > node and self.world % node:
            fits = [size for size in divisors(self.world) if size <= node]
            raise ConfigError(
                f"ranks_per_node={node} does not divide the world of {self.world}; {any_of(fits)} would"
            )

    @classmethod
    def from_sizes(cls, sizes: Mapping[str, Any], world: int | None = None) -> "Layout":
        """The layout of given sizes, where `cp` and `dp` may stand for their halves.

        Args:
            sizes: fields of Layout, and `cp` and `dp`; None counts as not given.
            world: number of ranks to fill. Data parallelism takes what is left when no dp size is given.

        Raises:
            ConfigError: sizes that contradict each other or do not multiply to the world.
        """
        given = expand({name: size for name, size in sizes.items() if size is not None})
        if world is None:
            return cls(**given)
        if world < 1:
            raise ConfigError(f"world must be at least 1, got {world}")
        if not given.keys() & set(COMBINED["dp"]):
            # Nodes are checked once dp has its size.
            given["dp_replicate"] = cls(**given | {"ranks_per_node": None})._replicas(world)
        layout = cls(**given)
        layout.check_world(world)
        return layout

    @property
    def world(self) -> int:
        """Number of ranks."""
        return math.prod(self._shape)

    @property
    def dp(self) -> int:
        """Number of ranks that see different rows."""
        return self.size("dp")

    @property
    def cp(self) -> int:
        """Number of ranks that share one row."""
        return self.size("cp")

    @property
    def weight_axes(self) -> tuple[str, ...]:
        """Axes over which weights are shared out between uses; none if each of their ranks keeps them whole."""
        return COMBINED["dp_shard_cp"] if self.fsdp or self.dp_shard > 1 else ()

    @property
    def weight_shards(self) -> int:
        """Parts that a tp rank's weights are shared out in between uses."""
        return math.prod(getattr(self, axis) for axis in self.weight_axes)

    @property
    def weight_copies(self) -> int:
        """Ranks that hold the same part of the same weights."""
        return self.size("dp_cp") // self.weight_shards

    @property
    def _shape(self) -> tuple[int, ...]:
        return tuple(getattr(self, axis) for axis in AXES)

    def size(self, name: str) -> int:
        """Ranks in one group of an axis ("pp", "tp", "cp_inner"…) or of "dp", "cp", "dp_cp"."""
        return math.prod(getattr(self, axis) for axis in _members(name))

    def coordinates(self, rank: int) -> dict[str, int]:
        """Place of a rank on every axis, slowest first, and on the combined axes dp and cp."""
        if not 0 <= rank < self.world:
            raise ConfigError(
                f"rank {rank} is not in the world of {self.world}; ranks are 0 to {self.world - 1}"
            )
        place = dict(zip(AXES, map(int, np.unravel_index(rank, self._shape)), strict=True))
        place["dp"] = place["dp_replicate"] * self.dp_shard + place["dp_shard"]
        place["cp"] = place["cp_outer"] * self.cp_inner + place["cp_inner"]
        return place

    def rank(self, coordinates: Mapping[str, int]) -> int:
        """The rank at a place; the inverse of `coordinates`."""
        return int(np.ravel_multi_index(tuple(coordinates[axis] for axis in AXES), self._shape))

    def groups(self, name: str) -> tuple[tuple[int, ...], ...]:
        """The groups of an axis or a combined axis: ranks that differ only there, in rank order."""
        moved = [AXES.index(axis) for axis in _members(name)]
        ranks = np.arange(self.world).reshape(self._shape)
        rows = np.moveaxis(ranks, moved, range(-len(moved), 0)).reshape(-1, self.size(name))
        return tuple(tuple(row) for row in rows.tolist())

    def link(self, name: str) -> Link:
        """The slowest link that a group of this axis crosses."""
        if self.size(name) == 1:
            return "none"
        if self.ranks_per_node is None:
            return "unknown"
        node = self.ranks_per_node
        crosses = any(ranks[0] // node != ranks[-1] // node for ranks in self.groups(name))
        return "inter-node" if crosses else "intra-node"

    def check_world(self, world: int) -> None:
        """Raise ConfigError, with the sizes that would fit, unless the layout makes exactly `world` ranks."""
        if self.world == world:
            return
        sizes = {name: self.size(name) for name in ("pp", "dp", "cp", "tp")}
        fits = [
            f"{name}={size * world // self.world}"
            for name, size in sizes.items()
            if size * world % self.world == 0
        ]
        raise ConfigError(
            f"{_product(sizes)} makes {self.world} ranks, not the world of {world}; "
            f"{any_of(fits or [f'a world of {self.world}'])} would fit"
        )

    def _replicas(self, world: int) -> int:
        """How many copies of this layout fill `world` ranks."""
        if world % self.world == 0:
            return world // self.world
        sizes = {name: size for name in ("pp", "cp", "tp") if (size := self.size(name)) > 1}
        rests = {name: self.world // size for name, size in sizes.items()}
        fits = [
            f"{name}={any_of(divisors(world // rest))}" for name, rest in rests.items() if world % rest == 0
        ]
        raise ConfigError(
            f"{_product(sizes)} needs a multiple of {self.world} ranks, not a world of {world}; "
            f"{any_of(fits or [f'a world of {self.world}'])} would fit"
        )

    def check_model(self, spec: "ModelSpec") -> None:
        """Raise ConfigError unless heads, widths and layers of the model can be dealt out to this layout.

        With fewer key/value heads than tp ranks, tp / num_kv_heads ranks hold a copy of the same head.
        """
        query, kv = spec.num_heads, spec.num_kv_heads
        fits = [tp for tp in divisors(query) if kv % tp == 0 or tp % kv == 0]
        if self.tp not in fits:
            raise ConfigError(
                f"tp={self.tp} cannot deal out {query} query heads and {kv} key/value heads: it must divide "
                f"the first, and divide or be a multiple of the second; use tp={any_of(fits)}"
            )
        if spec.intermediate_size % self.tp:
            raise ConfigError(
                f"tp={self.tp} cannot deal out intermediate_size={spec.intermediate_size}; "
                f"use tp={any_of([tp for tp in fits if spec.intermediate_size % tp == 0])}"
            )
        if math.ceil(spec.vocab_size / self.tp) * (self.tp - 1) >= spec.vocab_size:
            raise ConfigError(
                f"vocab_size={spec.vocab_size} leaves a rank of tp={self.tp} without a row; use a larger vocabulary"
            )
        if self.tp > 1 and spec.vocab_size % self.tp and spec.hidden_size % self.weight_shards:
            raise ConfigError(
                f"neither can tp={self.tp} deal out vocab_size={spec.vocab_size} evenly, nor can {self.weight_shards} "
                f"ranks share out hidden_size={spec.hidden_size}; use a vocabulary of {self.tp} × a whole number"
            )
        chunks = self.pp * self.vpp
        if spec.num_layers < chunks:
            raise ConfigError(
                f"pp={self.pp} × vpp={self.vpp} needs {chunks} layers; the model has {spec.num_layers}"
            )


def expand(sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes with `cp` and `dp` written as their halves.

    A combined size fills the half that is left out; alone it is all cp_inner or all dp_replicate.

    Raises:
        ConfigError: a combined size that is not the product of its halves.
    """
    expanded = dict(sizes)
    for name, halves in _HALVES.items():
        if name not in expanded:
            continue
        total = expanded.pop(name)
        given = {half: expanded[half] for half in halves if half in expanded}
        for key, size in {name: total, **given}.items():
            if type(size) is not int or size < 1:
                raise ConfigError(f"{key} must be a whole number from 1, got {size!r}")
        filled, kept = reversed(halves) if halves[0] in given else halves
        rest = expanded.setdefault(kept, 1)
        if expanded.setdefault(filled, total // rest) * rest != total:
            raise ConfigError(
                f"{name}={total} cannot be made with {_product(given)}; leave {name} or one of its parts out"
            )
    return expanded


def _members(name: str) -> tuple[str, ...]:
    members = COMBINED.get(name, (name,))
    if not set(members) <= set(AXES):
        raise ConfigError(f"unknown axis {name!r}; use one of {', '.join((*AXES, *COMBINED))}")
    return members


def _product(sizes: Mapping[str, int]) -> str:
    return " × ".join(f"{name}={size}" for name, size in sizes.items())


def divisors(number: int) -> list[int]:
    """All divisors, rising."""
    return [size for size in range(1, number + 1) if number % size == 0]


def any_of(choices: Sequence[object]) -> str:
    """Choices as words: "1, 2 or 4"."""
    *rest, last = map(str, choices)
    return f"{', '.join(rest)} or {last}" if rest else last
