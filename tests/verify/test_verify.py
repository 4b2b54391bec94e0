"""`verify` passes on every layout and catches every sabotage that its run can show."""

from pathlib import Path

import pytest

from longspan.errors import ConfigError
from longspan.spec.run import RunConfig
from longspan.testing import run_ranks
from longspan.train.session import Session
from longspan.verify import SABOTAGES, verify
from tests.train.parity import groups
from tests.verify.runs import write_run

ALL_AXES = {"tp": 2, "sp": True, "cp": 2}


def verified(rank, world, run, overrides, sabotage):
    """The report as JSON values on rank 0."""
    config = RunConfig.load(run, overrides)
    try:
        report = verify(Session.open(config, groups(config.layout)), sabotage)
    except ConfigError as error:
        return str(error)
    return report.as_json() if report else None


def verdict(run: Path, layout: dict, sabotage: str | None = None, **overrides):
    changes = {f"layout.{axis}": size for axis, size in layout.items()} | overrides
    world = RunConfig.load(run, changes).layout.world
    return run_ranks(verified, world, str(run), changes, sabotage)[0]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return write_run(tmp_path_factory.mktemp("run"))


LAYOUTS = [
    {},
    {"tp": 2},
    {"cp": 2},
    {"dp": 2},
    {"tp": 2, "sp": True},
    ALL_AXES,
    {"cp_outer": 2, "cp_inner": 2},
    {"tp": 4, "sp": True, "cp": 2},
    pytest.param({"dp": 2, "tp": 2, "cp": 2}, marks=pytest.mark.grid),
    {"dp_shard": 2},
    {"cp": 2, "fsdp": True},
    {"dp_shard": 2, "tp": 2, "sp": True},
    {"dp_replicate": 2, "dp_shard": 2, "cp": 2},
]
# Enough rows for every dp rank.
FOUR_ROWS = {"batch.global_batch": 4}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_passes(run, layout):
    report = verdict(run, layout, **FOUR_ROWS)
    assert report["passed"], report["checks"]
    assert report["worst_gradient_error"] <= 1e-10
    assert report["loss_error"] <= 1e-12
    assert all(abs(row["scale"] - 1) < 1e-8 for row in report["parameters"])


TWO_LEVELS = {"cp_outer": 2, "cp_inner": 2}
TRANSPORTS = [
    ({"cp": 2}, "needed"),
    ({"tp": 2, "cp": 2}, "all_to_all"),
    (TWO_LEVELS, "all_to_all+ring"),
]


@pytest.mark.parametrize(("layout", "transport"), TRANSPORTS, ids=str)
def test_other_transports_pass_and_stale_rows_are_caught(run, layout, transport):
    overrides = {"attention.transport": transport}
    assert verdict(run, layout, **overrides)["passed"]
    assert not verdict(run, layout, "stale-kv", **overrides)["passed"]


def test_a_narrow_wire_is_held_to_twice_one_process(run):
    overrides = {"train.dtype": "bfloat16", "attention.gradient_dtype": "bfloat16"}
    assert verdict(run, {"cp": 2}, **overrides)["passed"]


# With tp 4, two ranks share each of the model's K/V heads, and sum the gradients of its weights in bfloat16.
@pytest.mark.parametrize(
    "layout", [ALL_AXES, {"dp_shard": 2, "cp": 2}, {"tp": 4, "sp": True, "cp": 2}], ids=str
)
def test_bfloat16_is_held_to_twice_one_process(run, layout):
    report = verdict(run, layout, **{"train.dtype": "bfloat16"})
    assert report["passed"], report["checks"]
    assert any("bfloat16" in check["name"] for check in report["checks"])


@pytest.mark.parametrize("layout", [ALL_AXES, {"dp_shard": 2, "tp": 2, "sp": True}], ids=str)
def test_recompute_passes(run, layout):
    assert verdict(run, layout, **{"memory.recompute": "full"})["passed"]


# Weights copied over dp × cp, shared out over it, and both.
MIXES = [
    {"dp_replicate": 2, "tp": 2, "sp": True, "cp": 2},
    {"dp_shard": 2, "tp": 2, "sp": True, "cp": 2},
    {"dp_replicate": 2, "dp_shard": 2, "cp": 2},
]
GRADIENT_SUMS = ["skip-cp-sum", "forget-dp", "forget-cp", "average-gradients", "fsdp-division"]
CAUGHT = [
    *((ALL_AXES, name) for name in SABOTAGES if name != "forget-dp"),
    *(({"dp_shard": 2, "cp": 2}, name) for name in GRADIENT_SUMS),
    *(({"dp_replicate": 2, "tp": 2}, name) for name in ("forget-dp", "skip-tp-sum")),
    *(
        pytest.param(mix, name, marks=pytest.mark.grid)
        for mix in MIXES
        for name in (*GRADIENT_SUMS, "skip-tp-sum")
        if "tp" in mix or name in GRADIENT_SUMS
    ),
]


@pytest.mark.parametrize(("layout", "sabotage"), CAUGHT, ids=str)
def test_every_sabotage_is_caught(run, layout, sabotage):
    report = verdict(run, layout, sabotage, **FOUR_ROWS)
    assert not report["passed"], f"{sabotage} was not caught: {report['checks']}"
    assert report["sabotage"] == sabotage


@pytest.mark.parametrize("sabotage", ["average-gradients", "fsdp-division"])
@pytest.mark.parametrize("layout", [{"cp": 2}, {"dp_shard": 2}], ids=str)
def test_wrong_sums_show_in_the_scale(run, layout, sabotage):
    report = verdict(run, layout, sabotage)
    assert all(row["scale"] == pytest.approx(0.5) for row in report["parameters"])


# Every document fills a row.
EQUAL_DOCUMENTS = object()
EQUAL = {
    "data.source": EQUAL_DOCUMENTS,
    "data.sequence": 9,
    "data.eval_documents": 0.5,
    "train.eval_rows": 2,
}
BLIND = [
    ("causal-offset", {}, {"model.spec.windows": [4, 4]}),
    ("mean-of-means", {"dp": 2}, EQUAL),
    ("evaluation-per-rank", {"dp": 2}, EQUAL),
    ("drop-bounds", {}, {"data.sequence": 8, "batch.global_batch": 1, "train.seed": 1}),
    ("drop-window", ALL_AXES, {"model.spec.windows": [0, 0]}),
    ("drop-window", ALL_AXES, {"model.spec.windows": [0, 4096]}),
    ("wrong-positions", {"tp": 2}, {}),
    ("late-label-shift", {"tp": 2}, {}),
    ("stale-kv", {"tp": 2}, {}),
    ("skip-cp-sum", {"tp": 2}, {}),
    ("forget-dp", {"cp": 2}, {}),
    ("forget-cp", {"dp": 2}, {}),
    ("fsdp-division", {"tp": 2}, {}),
    ("skip-tp-sum", {"cp": 2}, {}),
    ("average-gradients", {"tp": 2}, {}),
    ("mean-of-means", {}, {"batch.global_batch": 1}),
    ("evaluation-per-rank", {}, {}),
]


def equal_documents(run: Path) -> str:
    """A folder of documents of eight bytes each, nine tokens with their end."""
    folder = run.parent / "equal"
    folder.mkdir(exist_ok=True)
    for number in range(16):
        (folder / f"{number}.txt").write_text(f"{number:02} equal")
    return str(folder)


@pytest.mark.parametrize(("sabotage", "layout", "overrides"), BLIND)
def test_a_sabotage_that_cannot_show_is_refused(run, sabotage, layout, overrides):
    changes = {
        key: equal_documents(run) if value is EQUAL_DOCUMENTS else value for key, value in overrides.items()
    }
    assert f"cannot show '{sabotage}'" in verdict(run, layout, sabotage, **changes)


def test_an_unknown_sabotage_is_refused_by_name(run):
    assert "unknown sabotage 'gremlins'" in verdict(run, {}, "gremlins")
