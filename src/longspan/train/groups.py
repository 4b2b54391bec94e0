"""This process's place in a layout and the process groups that follow from it; passed along, never global."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from longspan.errors import ConfigError
from longspan.spec.layout import Layout

__all__ = ["Groups"]


@dataclass(frozen=True, eq=False)
class Groups:
    """Process groups of one rank; an axis of size 1 has none, so nothing is ever sent along it.

    Attributes:
        layout: sizes of all axes.
        rank: this process's global rank.
        device: "cpu" or "cuda".
        tp: mesh of the ranks that share this rank's weights, or None.
        cp: group of the ranks that share this rank's rows, or None.
        dp_cp: group over which weight gradients and loss sums are added, or None.
    """

    layout: Layout
    rank: int
    device: str
    tp: DeviceMesh | None
    cp: dist.ProcessGroup | None
    dp_cp: dist.ProcessGroup | None

    @classmethod
    def create(cls, layout: Layout, device: str = "cpu") -> "Groups":
        """Make the groups of this process; every rank of the world calls it together.

        Raises:
            ConfigError: a layout of another size than the running world.
        """
        running = dist.get_world_size() if dist.is_initialized() else 1
        if layout.world != running:
            raise ConfigError(
                f"the layout needs {layout.world} ranks, {running} are running; start {layout.world}"
            )
        rank = dist.get_rank() if dist.is_initialized() else 0
        tp = _group(layout, "tp")
        mesh = DeviceMesh.from_group(tp, device, mesh_dim_names=("tp",)) if tp else None
        return cls(layout, rank, device, mesh, _group(layout, "cp"), _group(layout, "dp_cp"))

    @classmethod
    def alone(cls, device: str = "cpu") -> "Groups":
        """Groups of a single process, whatever world it runs in; nothing is sent."""
        return cls(Layout(), 0, device, None, None, None)

    def coordinate(self, axis: str) -> int:
        """This rank's place on an axis."""
        return self.layout.coordinates(self.rank)[axis]

    def add_over_dp_cp(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over all ranks that hold other tokens, in place; the tensor itself is returned."""
        if self.dp_cp is not None:
            dist.all_reduce(tensor, group=self.dp_cp)
        return tensor


def _group(layout: Layout, axis: str) -> dist.ProcessGroup | None:
    """This rank's group on an axis. Communicators are opened at once: a ring's first message may be one-sided."""
    if layout.size(axis) == 1:
        return None
    group, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in layout.groups(axis)])
    if not isinstance(group, dist.ProcessGroup):
        raise ConfigError(f"this rank is in no group of axis {axis}; start exactly {layout.world} ranks")
    dist.barrier(group)
    return group
