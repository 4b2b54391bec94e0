"""Ranks, groups and links, against a formula that shares nothing with the code."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longspan.errors import ConfigError
from longspan.spec.layout import AXES, COMBINED, Layout
from longspan.spec.model import ModelSpec

sizes = st.fixed_dictionaries({axis: st.sampled_from([1, 2, 3]) for axis in AXES})
names = st.sampled_from([*AXES, *COMBINED])


def places(layout: Layout) -> list[dict[str, int]]:
    """Every rank's place, written as nested loops, slowest axis outermost."""
    return [
        dict(zip(AXES, coords, strict=True))
        for coords in itertools.product(*(range(getattr(layout, axis)) for axis in AXES))
    ]


@given(sizes)
def test_coordinates_round_trip_and_count_like_an_odometer(sizes: dict[str, Any]) -> None:
    layout = Layout(**sizes)
    for rank, place in enumerate(places(layout)):
        coordinates = layout.coordinates(rank)
        assert {axis: coordinates[axis] for axis in AXES} == place
        assert layout.rank(coordinates) == rank
    assert layout.world == len(places(layout))


@given(sizes, names)
def test_groups_are_the_ranks_that_differ_only_on_their_axes(sizes: dict[str, Any], name: str) -> None:
    layout = Layout(**sizes)
    moving = set(COMBINED.get(name, (name,)))
    together: dict[tuple[int, ...], list[int]] = {}
    for rank, place in enumerate(places(layout)):
        together.setdefault(tuple(place[axis] for axis in AXES if axis not in moving), []).append(rank)
    assert layout.groups(name) == tuple(tuple(ranks) for ranks in together.values())


@given(sizes, names)
def test_groups_partition_the_world(sizes: dict[str, Any], name: str) -> None:
    layout = Layout(**sizes)
    groups = layout.groups(name)
    assert sorted(rank for group in groups for rank in group) == list(range(layout.world))
    assert {len(group) for group in groups} == {layout.size(name)}


@given(sizes)
def test_dp_cp_joins_the_dp_and_cp_groups_that_touch(sizes: dict[str, Any]) -> None:
    layout = Layout(**sizes)
    for joint in layout.groups("dp_cp"):
        rows = [group for group in layout.groups("cp") if set(group) & set(joint)]
        columns = [group for group in layout.groups("dp") if set(group) & set(joint)]
        assert set().union(*rows) == set().union(*columns) == set(joint)
        assert (len(rows), len(columns)) == (layout.dp, layout.cp)


@given(sizes)
def test_combined_coordinates_are_places_in_the_combined_groups(sizes: dict[str, Any]) -> None:
    layout = Layout(**sizes)
    for name in ("dp", "cp"):
        for group in layout.groups(name):
            assert [layout.coordinates(rank)[name] for rank in group] == list(range(layout.size(name)))


def test_eight_ranks() -> None:
    layout = Layout.from_sizes({"tp": 4, "cp": 2}, world=8)
    assert layout.groups("tp") == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert layout.groups("cp") == ((0, 4), (1, 5), (2, 6), (3, 7))


def test_four_ranks() -> None:
    layout = Layout.from_sizes({"tp": 2, "cp": 2}, world=4)
    assert layout.groups("tp") == ((0, 1), (2, 3))
    assert layout.groups("cp") == ((0, 2), (1, 3))


@given(sizes, st.integers(1, 8), st.sampled_from(["tp", "cp", "dp", "pp"]))
def test_link_is_inter_node_when_any_pair_sits_on_two_nodes(
    sizes: dict[str, Any], node: int, name: str
) -> None:
    world = Layout(**sizes).world
    ranks_per_node = node if world % node == 0 else world
    layout = Layout(**sizes, ranks_per_node=ranks_per_node)
    far = any(len({rank // ranks_per_node for rank in group}) > 1 for group in layout.groups(name))
    expected = "none" if layout.size(name) == 1 else "inter-node" if far else "intra-node"
    assert layout.link(name) == expected


def test_link_is_unknown_without_nodes() -> None:
    layout = Layout(tp=2)
    assert (layout.link("tp"), layout.link("cp")) == ("unknown", "none")


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"cp": 4}, {"cp_outer": 1, "cp_inner": 4}),
        ({"cp": 4, "cp_outer": 2}, {"cp_outer": 2, "cp_inner": 2}),
        ({"cp": 4, "cp_inner": 4}, {"cp_outer": 1, "cp_inner": 4}),
        ({"cp": 6, "cp_inner": 2, "cp_outer": 3}, {"cp_outer": 3, "cp_inner": 2}),
        ({"dp": 4}, {"dp_replicate": 4, "dp_shard": 1}),
        ({"dp": 4, "dp_shard": 2}, {"dp_replicate": 2, "dp_shard": 2}),
        ({"dp": None, "tp": None}, {"dp_replicate": 1, "tp": 1}),
    ],
    ids=str,
)
def test_combined_sizes_fill_their_halves(sizes: dict[str, Any], expected: dict[str, int]) -> None:
    layout = Layout.from_sizes(sizes)
    assert {name: getattr(layout, name) for name in expected} == expected


def test_dp_fills_the_world_unless_given() -> None:
    assert Layout.from_sizes({"tp": 2}, world=8).dp_replicate == 4
    assert Layout.from_sizes({"tp": 2, "dp": 2, "cp": 2}, world=8).dp_replicate == 2
    assert Layout.from_sizes({"tp": 3, "ranks_per_node": 2}, world=6).dp == 2


@pytest.mark.parametrize(
    ("sizes", "world", "words"),
    [
        ({"tp": 3}, 8, ["tp=3", "world of 8", "tp=1, 2, 4 or 8 would fit"]),
        ({"tp": 2, "dp": 2}, 8, ["makes 4 ranks", "pp=2, dp=4, cp=2 or tp=4 would fit"]),
        ({"tp": 3, "cp": 5}, 8, ["cp=5 × tp=3", "a world of 15 would fit"]),
        ({}, 0, ["world must be at least 1, got 0"]),
        ({"tp": 0}, None, ["tp must be at least 1, got 0"]),
        ({"tp": -2}, 8, ["tp must be at least 1, got -2"]),
        ({"cp": "two"}, None, ["cp must be a whole number from 1, got 'two'"]),
        ({"cp": True}, None, ["cp must be a whole number from 1, got True"]),
        ({"cp": 4, "cp_inner": 3}, None, ["cp=4", "cp_inner=3"]),
        ({"cp": 4, "cp_inner": 2, "cp_outer": 4}, None, ["cp=4", "cp_inner=2 × cp_outer=4"]),
        ({"sp": True}, None, ["sp", "tp=1"]),
        ({"vpp": 2}, None, ["vpp=2", "pp=1"]),
        ({"tp": 2, "ranks_per_node": 3}, 8, ["ranks_per_node=3", "world of 8", "1 or 2"]),
    ],
    ids=str,
)
def test_refusals_name_the_values_and_the_fix(
    sizes: dict[str, Any], world: int | None, words: list[str]
) -> None:
    with pytest.raises(ConfigError) as raised:
        Layout.from_sizes(sizes, world=world)
    assert all(word in str(raised.value) for word in words)


def test_unknown_axes_and_ranks_are_refused() -> None:
    with pytest.raises(ConfigError, match="unknown axis 'ep'"):
        Layout().groups("ep")
    with pytest.raises(ConfigError, match="rank 2 is not in the world of 2"):
        Layout(tp=2).coordinates(2)


# Every tp below divides them.
WIDTHS = {"intermediate_size": 48, "vocab_size": 48}


@pytest.mark.parametrize("heads", [1, 6, 8])
@pytest.mark.parametrize("kv_heads", [1, 2, 3, 4])
@pytest.mark.parametrize("tp", [1, 2, 3, 4, 8])
def test_heads_are_accepted_exactly_when_every_rank_gets_whole_ones(
    heads: int, kv_heads: int, tp: int
) -> None:
    spec: Any = SimpleNamespace(num_heads=heads, num_kv_heads=kv_heads, num_layers=1, **WIDTHS)
    fits = heads % tp == 0 and (kv_heads % tp == 0 or tp % kv_heads == 0)
    if fits:
        Layout(tp=tp).check_model(spec)
    else:
        with pytest.raises(ConfigError, match=f"tp={tp} cannot deal out {heads} query heads"):
            Layout(tp=tp).check_model(spec)


def test_every_stage_needs_a_layer() -> None:
    spec: Any = SimpleNamespace(num_heads=1, num_kv_heads=1, num_layers=3, **WIDTHS)
    with pytest.raises(ConfigError, match="needs 4 layers; the model has 3"):
        Layout(pp=2, vpp=2).check_model(spec)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"intermediate_size": 50}, "intermediate_size=50; use tp=1 or 2"),
        ({"vocab_size": 9}, "vocab_size=9 leaves a rank of tp=4 without a row"),
    ],
)
def test_widths_that_tp_cannot_deal_out_are_refused(sizes, words):
    small = {"num_layers": 1, "hidden_size": 8, "intermediate_size": 16, "num_heads": 4, "vocab_size": 64}
    with pytest.raises(ConfigError, match=words):
        Layout(tp=4).check_model(ModelSpec(**small | sizes))


@pytest.mark.parametrize(
    ("sizes", "shards", "copies"),
    [
        ({"dp_replicate": 4, "cp_inner": 2, "tp": 2}, 1, 8),
        ({"dp_shard": 4, "cp_inner": 2}, 8, 1),
        ({"dp_replicate": 3, "dp_shard": 2, "cp_outer": 2, "cp_inner": 2, "tp": 2}, 8, 3),
        ({"cp_inner": 4, "fsdp": True}, 4, 1),
        ({"dp_replicate": 2, "cp_inner": 4, "fsdp": True}, 4, 2),
        ({}, 1, 1),
    ],
)
def test_weights_are_shared_over_dp_shard_and_cp(sizes, shards, copies):
    layout = Layout(**sizes)
    assert (layout.weight_shards, layout.weight_copies) == (shards, copies)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"fsdp": True, "dp_replicate": 2}, "dp_shard × cp, but both are 1"),
        ({"fsdp": False, "dp_shard": 2}, "dp_shard=2 shares weights out, but fsdp=false; use dp_replicate=2"),
    ],
)
def test_contradictions_about_shared_weights_are_refused(sizes, words):
    with pytest.raises(ConfigError, match=words):
        Layout(**sizes)


def test_a_vocabulary_that_neither_axis_can_deal_out_is_refused():
    spec = ModelSpec(num_layers=1, hidden_size=24, intermediate_size=40, num_heads=4, vocab_size=53)
    Layout(tp=2, dp_shard=4).check_model(spec)
    Layout(dp_shard=5).check_model(spec)
    with pytest.raises(ConfigError, match="neither can tp=2 deal out vocab_size=53 evenly, nor can 5 ranks"):
        Layout(tp=2, dp_shard=5).check_model(spec)
