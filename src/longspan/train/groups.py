"""This process's place in a layout and the process groups that follow from it; passed along, never global."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from longspan.errors import ConfigError
from longspan.spec.layout import Layout
from longspan.train.failure.heartbeat import Heartbeat

__all__ = ["Groups"]

TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True, eq=False)
class Groups:
    """Process groups of one rank; an axis of size 1 has none, so nothing is ever sent along it.

    Attributes:
        layout: sizes of all axes.
        rank: this process's global rank.
        device: "cpu" or "cuda".
        tp: mesh of the ranks that split this rank's weights, or None.
        cp: group of the ranks that share this rank's rows, or None.
        cp_outer: where cp has two levels, the ranks with this rank's place among its neighbours; or None.
        cp_inner: these neighbours, or None.
        dp_cp: group over which weight gradients and loss sums are added, or None.
        weights: mesh of the same ranks as (replicate, shard), or (shard,) without copies; or None. Along shard they
            share out each weight between uses, along replicate they hold the same part. Its root mesh is that of tp.
        heartbeat: how far this rank's work has come, for its watch.
    """

    layout: Layout
    rank: int
    device: str
    tp: DeviceMesh | None = None
    cp: dist.ProcessGroup | None = None
    cp_outer: dist.ProcessGroup | None = None
    cp_inner: dist.ProcessGroup | None = None
    dp_cp: dist.ProcessGroup | None = None
    weights: DeviceMesh | None = None
    heartbeat: Heartbeat = field(default_factory=Heartbeat)

    @classmethod
    def create(cls, layout: Layout, device: str = "cpu", timeout: timedelta = TIMEOUT) -> "Groups":
        """Make the groups of this process; every rank of the world calls it together.

        Args:
            layout: sizes of all axes.
            device: "cpu" or "cuda".
            timeout: how long a rank waits for another in any group; torch would not inherit the default group's.

        Raises:
            ConfigError: a layout of another size than the running world.
        """
        running = dist.get_world_size() if dist.is_initialized() else 1
        if layout.world != running:
            raise ConfigError(
                f"the layout needs {layout.world} ranks, {running} are running; start {layout.world}"
            )
        rank = dist.get_rank() if dist.is_initialized() else 0
        axes = _mesh_axes(layout)
        mesh = _mesh(layout, rank, device, axes, timeout) if axes else None
        data = tuple(axis for axis in axes if axis != "tp")
        two_level = layout.cp_outer > 1 and layout.cp_inner > 1
        return cls(
            layout,
            rank,
            device,
            tp=mesh["tp"] if mesh and "tp" in axes else None,
            cp=_group(layout.groups("cp"), timeout) if layout.cp > 1 else None,
            cp_outer=_group(layout.groups("cp_outer"), timeout) if two_level else None,
            cp_inner=_group(layout.groups("cp_inner"), timeout) if two_level else None,
            dp_cp=_group(layout.groups("dp_cp"), timeout) if layout.size("dp_cp") > 1 else None,
            weights=mesh[data] if mesh and data else None,
        )

    @classmethod
    def alone(cls, device: str = "cpu") -> "Groups":
        """Groups of a single process, whatever world it runs in; nothing is sent."""
        return cls(Layout(), 0, device)

    def coordinate(self, axis: str) -> int:
        """This rank's place on an axis."""
        return self.layout.coordinates(self.rank)[axis]

    def attention(self, inner: int) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
        """The groups in which an exchange's steps run and heads are traded.

        Args:
            inner: ranks that trade heads: 1, all of cp, or those of cp_inner.

        Raises:
            ConfigError: another number.
        """
        if inner == 1:
            return self.cp, None
        if inner == self.layout.cp:
            return None, self.cp
        if inner != self.layout.cp_inner or self.cp_inner is None:
            raise ConfigError(
                f"{inner} ranks cannot trade heads in a layout with cp_inner={self.layout.cp_inner}"
            )
        return self.cp_outer, self.cp_inner

    def add_over_dp_cp(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over all ranks that hold other tokens, in place; the tensor itself is returned."""
        if self.dp_cp is not None:
            dist.all_reduce(tensor, group=self.dp_cp)
        return tensor


def _mesh_axes(layout: Layout) -> dict[str, int]:
    """Axes of the mesh that weights live on, and their sizes; slowest first."""
    axes: dict[str, int] = {}
    if layout.weight_copies > 1:
        axes["replicate"] = layout.weight_copies
    if layout.size("dp_cp") > 1:
        # FSDP wants this axis, also where each rank keeps all.
        axes["shard"] = layout.weight_shards
    if layout.tp > 1:
        axes["tp"] = layout.tp
    return axes


def _mesh(layout: Layout, rank: int, device: str, axes: dict[str, int], timeout: timedelta) -> DeviceMesh:
    """The mesh of this rank's pipeline stage, with groups of our own: init_device_mesh takes no timeout."""
    stages = np.arange(layout.world).reshape(layout.pp, *axes.values())
    groups = [
        _group(np.moveaxis(stages, number + 1, -1).reshape(-1, size).tolist(), timeout)
        for number, size in enumerate(axes.values())
    ]
    stage = torch.from_numpy(stages[layout.coordinates(rank)["pp"]])
    return DeviceMesh.from_group(groups, device, mesh=stage, mesh_dim_names=tuple(axes))


def _group(ranks: Sequence[Sequence[int]], timeout: timedelta) -> dist.ProcessGroup:
    """This rank's group. Communicators are opened at once: a ring's first message may be one-sided."""
    group, _ = dist.new_subgroups_by_enumeration([list(members) for members in ranks], timeout=timeout)
    if not isinstance(group, dist.ProcessGroup):
        raise ConfigError(f"this rank is in none of the groups {ranks}; start exactly the layout's ranks")
    dist.barrier(group)
    return group
