"""`longspan groups`: which ranks work together, on what, over which link."""

from dataclasses import asdict, dataclass
from typing import Any

from cyclopts import Parameter
from rich.console import Console
from rich.table import Table

from longspan.cli.output import Flag, Json, console, print_json, table
from longspan.spec.layout import Layout
from longspan.spec.ownership import AxisRole, axis_roles

NAMES = ("tp", "cp", "dp", "pp", "dp_cp")
MOST_GROUPS_SHOWN = 64
MOST_RANKS_SHOWN = 64


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of the parallel axes; what is left out is 1.

    Attributes:
        tp: Tensor-parallel ranks.
        cp: Context-parallel ranks in all; alone it sets cp-inner.
        cp_outer: Outer context-parallel groups.
        cp_inner: Context-parallel ranks inside an outer group.
        dp: Data-parallel ranks in all; alone it sets dp-replicate, and left out it fills the world.
        dp_replicate: Data-parallel replicas.
        dp_shard: Data-parallel ranks that share out weights and optimizer state.
        pp: Pipeline stages.
        vpp: Chunks of layers on each stage.
        sp: Sequence parallelism inside tp groups.
        fsdp: Share out weights over dp_shard × cp also where dp-shard is 1.
        ranks_per_node: Ranks on one machine.
    """

    tp: int | None = None
    cp: int | None = None
    cp_outer: int | None = None
    cp_inner: int | None = None
    dp: int | None = None
    dp_replicate: int | None = None
    dp_shard: int | None = None
    pp: int | None = None
    vpp: int | None = None
    sp: Flag = False
    fsdp: Flag | None = None
    ranks_per_node: int | None = None


def groups(*, world: int | None = None, sizes: Sizes = Sizes(), json: Json = False) -> None:
    """Show which ranks form which group, where each rank sits, and what every axis shares out.

    Args:
        world: Number of ranks; the product of the sizes when left out.
        sizes: Sizes of the axes.
        json: As for every verb.
    """
    layout = Layout.from_sizes(asdict(sizes), world=world)
    if json:
        print_json(as_json(layout))
    else:
        show(layout, console())


def as_json(layout: Layout) -> dict[str, Any]:
    """Groups by name, coordinates by rank, links by name."""
    return {name: layout.groups(name) for name in NAMES} | {
        "coordinates": [layout.coordinates(rank) for rank in range(layout.world)],
        "links": {name: layout.link(name) for name in NAMES},
        "layout": asdict(layout),
    }


def show(layout: Layout, out: Console) -> None:
    """The same for people."""
    roles = axis_roles(layout)
    out.print(headline(layout), end="\n\n")
    for name in NAMES:
        out.print(f"[bold]{name.upper().replace('_', '×')}[/] {_group_text(layout, name)}", soft_wrap=True)
    if roles:
        out.print("", _role_table(roles), "", _rank_table(layout, [role.axis for role in roles]), sep="\n")
        out.print("", _traffic_text(layout), sep="\n")


def headline(layout: Layout) -> str:
    """The sizes in one line."""
    sizes = " × ".join(f"{name} {layout.size(name)}" for name in ("pp", "dp", "cp", "tp"))
    shared = f"; weights shared out over {layout.weight_shards} ranks" if layout.weight_shards > 1 else ""
    return f"[bold]{_ranks(layout.world)}[/] = {sizes}; sequence parallelism {'on' if layout.sp else 'off'}{shared}"


def _ranks(number: int) -> str:
    return "1 rank" if number == 1 else f"{number} ranks"


def _group_text(layout: Layout, name: str) -> str:
    if layout.size(name) == 1:
        return "each rank alone"
    words = [f"({','.join(map(str, ranks))})" for ranks in layout.groups(name)]
    more = f" … {len(words) - MOST_GROUPS_SHOWN} more" if len(words) > MOST_GROUPS_SHOWN else ""
    return " ".join(words[:MOST_GROUPS_SHOWN]) + more


def _role_table(roles: tuple[AxisRole, ...]) -> Table:
    columns = table("", *(role.axis for role in roles))
    for fact in ("size", "link", "splits", "copies", "gradients", "traffic"):
        columns.add_row(f"[bold]{fact}[/]", *(str(getattr(role, fact)) for role in roles))
    return columns


def _rank_table(layout: Layout, axes: list[str]) -> Table:
    columns = table("rank", *(["node"] if layout.ranks_per_node else []), *axes)
    for rank in range(min(layout.world, MOST_RANKS_SHOWN)):
        node = [rank // layout.ranks_per_node] if layout.ranks_per_node else []
        place = layout.coordinates(rank)
        columns.add_row(*map(str, [rank, *node, *(place[axis] for axis in axes)]))
    if layout.world > MOST_RANKS_SHOWN:
        columns.add_row(f"… {layout.world - MOST_RANKS_SHOWN} more; --json lists all")
    return columns


def _traffic_text(layout: Layout) -> str:
    words = "Axes with the most traffic sit innermost (tp, then cp, dp, pp): their ranks are neighbours."
    if layout.ranks_per_node is None:
        return words + " Which links they cross is unknown without --ranks-per-node."
    if layout.link("tp") == "inter-node":
        words += (
            f" Here tp crosses nodes in every layer; keep it within a node's {layout.ranks_per_node} ranks."
        )
    return words
