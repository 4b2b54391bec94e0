"""Staged runs on a session: rows at the borders, choices, the rate, and evaluations that stay comparable."""

import json
from dataclasses import replace

import pytest

from longspan.data import PackedRows
from longspan.spec.run import RunConfig
from longspan.testing import run_ranks
from longspan.train import session as session_module
from longspan.train.groups import Groups
from longspan.train.loop import train
from longspan.train.session import Session
from longspan.train.step import evaluate, learning_rate
from tests.train.parity import groups
from tests.verify.runs import RUN, write_run

# 2 × 40 tokens a step, then 1 × 101; the second stage starts at its row 2, token 202, after token 160.
STAGES = """
[[stages]]
sequence = 40
steps = 2
[[stages]]
sequence = 101
steps = 3
global_batch = 1
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = write_run(tmp_path_factory.mktemp("run"))
    path.write_text(RUN.replace("sequence = 121\n", "").replace("steps = 4\n", "") + STAGES)
    return path


def opened(run, groups=None, **changes) -> Session:
    config = RunConfig.load(run, {"train.dtype": "float64"} | changes)
    return Session.open(config, groups or Groups.alone())


def tokens_of(session: Session, step: int) -> list[int]:
    return [token for micro in session.training_step(step).micro_batches for token in micro.whole.tokens_T]


def test_steps_read_on_across_the_border(run):
    session = opened(run)
    stream = PackedRows(session.corpus.train, 1, session.config.train.seed)
    spans = [(0, 80), (80, 160), (202, 303), (303, 404), (404, 505)]
    for step, (start, stop) in enumerate(spans):
        assert tokens_of(session, step) == stream.batch(range(start, stop)).tokens_T.tolist(), step


def test_a_step_is_the_same_whatever_was_read_before(run):
    session = opened(run)
    forward = [tokens_of(session, step) for step in range(5)]
    assert [tokens_of(opened(run), step) for step in (4, 1, 3, 0, 2)] == [forward[n] for n in (4, 1, 3, 0, 2)]
    assert [tokens_of(session, step) for step in reversed(range(5))] == forward[::-1]
    assert tokens_of(opened(run, **{"train.seed": 1}), 2) != forward[2]


def test_every_dp_rank_sees_its_rows_of_every_stage(run):
    changes = {"layout.dp": 2, "stages.2.global_batch": 2}
    layout = RunConfig.load(run, changes).layout
    ranks = [opened(run, replace(Groups.alone(), layout=layout, rank=rank), **changes) for rank in (0, 1)]
    alone = opened(run, **{"stages.2.global_batch": 2})
    for step in range(5):
        dealt = [token for rank in ranks for token in tokens_of(rank, step)]
        assert dealt == tokens_of(alone, step)
        assert tokens_of(ranks[0], step) == [
            token for micro in ranks[1].training_step(step, 0).micro_batches for token in micro.whole.tokens_T
        ]


def test_every_stage_is_chosen_on_its_own_first_micro_batch(run, monkeypatch):
    seen = []
    real = session_module.choose

    def spy(sharding, transport, layers, rows, *rest):
        seen.append((next(iter(layers)).cu_seqlens, rows))
        return real(sharding, transport, layers, rows, *rest)

    monkeypatch.setattr(session_module, "choose", spy)
    session = opened(run)
    assert len(session.choices) == 2
    for (bounds, rows), step in zip(seen, (0, 2), strict=True):
        whole = session.training_step(step).micro_batches[0].whole
        assert (bounds, rows) == (tuple(whole.cu_seqlens.tolist()), whole.rows)


def test_a_stage_uses_its_own_choice(run):
    session = opened(run)
    first, second = session.choices
    swapped = tuple(
        replace(choice, chosen=replace(choice.chosen, sharding=sharding, transport=transport))
        for choice, sharding, transport in [(first, "zigzag", "ring"), (second, "contiguous", "all_gather")]
    )
    session = replace(session, choices=swapped)
    stages = session.plan.stages
    assert [session.context(stage).sharding for stage in stages] == ["zigzag", "contiguous"]
    assert [session.context(stage).transport for stage in stages] == ["ring", "all_gather"]


def test_the_rate_counts_tokens_through_all_stages(run):
    config = opened(run, **{"schedule.warmup_tokens": 200, "schedule.kind": "wsd"}).config
    factors = [learning_rate(config, step) / config.optimizer.lr for step in range(5)]
    # 80 and 160 tokens of the warm-up's 200, then 261 and 362; the fall is the last tenth of 463 tokens.
    assert factors == pytest.approx([0.4, 0.8, 1.0, 1.0, 0.1])


def test_evaluation_rows_are_the_longest_and_the_same_in_every_stage(run):
    session = opened(run)
    assert {micro.whole.sequence for micro in session.evaluation_step().micro_batches} == {101}
    shorter = opened(run, **{"train.eval_sequence": 30})
    assert {micro.whole.sequence for micro in shorter.evaluation_step().micro_batches} == {30}


def trained(rank, world, run, changes):
    """Lines of steps.jsonl after the first, on rank 0."""
    config = RunConfig.load(run, changes)
    train(Session.open(config, groups(config.layout)), quiet=True)
    if rank:
        return None
    return [json.loads(line) for line in (config.output.folder / "steps.jsonl").read_text().splitlines()][1:]


def test_a_staged_run_is_recorded_and_alike_on_every_layout(run, tmp_path):
    layouts = [{}, {"layout.cp": 2}, {"layout.dp": 2}]
    changes = {"train.dtype": "float64", "stages.2.global_batch": 2, "train.eval_every": 3}
    alone, *others = (
        run_ranks(
            trained, max(sizes.values(), default=1), str(run), changes | sizes | {"output.folder": str(out)}
        )[0]
        for sizes, out in zip(layouts, (tmp_path / str(n) for n in range(3)), strict=True)
    )
    steps = [line for line in alone if line["kind"] == "step"]
    columns = ("step", "stage", "sequence", "rows", "tokens", "seen_tokens")
    assert [tuple(step[column] for column in columns) for step in steps] == [
        (1, 1, 40, 2, 80, 80),
        (2, 1, 40, 2, 80, 160),
        (3, 2, 101, 2, 202, 362),
        (4, 2, 101, 2, 202, 564),
        (5, 2, 101, 2, 202, 766),
    ]
    evaluations = [line for line in alone if line["kind"] == "evaluation"]
    assert [line["step"] for line in evaluations] == [0, 3, 5]
    assert len({line["targets"] for line in evaluations}) == 1
    assert evaluations[-1]["loss"] < evaluations[0]["loss"]
    for other in others:
        for line, same in zip(other, alone, strict=True):
            assert (line["kind"], line["step"], line["targets"]) == (
                same["kind"],
                same["step"],
                same["targets"],
            )
            for name in ("loss", "loss_by_position", "loss_by_document_length"):
                assert line[name] == pytest.approx(same[name], rel=1e-11)


def evaluated(rank, world, run, changes):
    """Sums of one evaluation, and how many rows of this rank have targets."""
    config = RunConfig.load(run, changes)
    session = Session.open(config, groups(config.layout))
    batches = session.evaluation_step()
    targets = [micro.whole.num_targets for micro in batches.micro_batches]
    sums = evaluate(session.model(), batches)
    return sums.table.tolist(), targets, sums.by_document_length


def test_sums_are_identical_when_a_rank_has_no_row(run):
    changes = {"train.dtype": "float64", "train.eval_rows": 3, "stages.2.global_batch": 2}
    ((alone, targets, by_length),) = run_ranks(evaluated, 1, str(run), changes)
    first, second = run_ranks(evaluated, 2, str(run), changes | {"layout.dp": 2})
    assert [len(rank[1]) for rank in (first, second)] == [2, 2]
    assert second[1] == [targets[1], 0]
    for sums, _, _ in (first, second):
        assert sums[1] == alone[1]
        assert sums[0] == pytest.approx(alone[0], rel=1e-13)
    assert set(by_length) == {"0-255"}


def test_losses_by_document_length_are_those_of_the_pieces(run, tmp_path):
    """Rows of 700 tokens hold pieces on both sides of 256 tokens; each bucket is checked against its tokens."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for number in range(12):
        (corpus / f"{number}.txt").write_text(f"line {number} " * (10 + 9 * number))
    session = opened(run, **{"data.source": str(corpus), "stages.2.sequence": 700})
    model, batches = session.model(), session.evaluation_step()
    expected: dict[str, list[float]] = {}
    for micro in batches.micro_batches:
        _, nll_t = model.token_losses(micro, batches.num_targets)
        bounds = micro.whole.cu_seqlens.tolist()
        for start, stop in zip(bounds, bounds[1:], strict=False):
            name = "0-255" if stop - start < 256 else "256-1023"
            # Alone, a rank holds all tokens in their order; the last of a piece has no target.
            expected.setdefault(name, []).extend(nll_t[start : stop - 1].tolist())
    assert len(expected) == 2
    sums = evaluate(model, batches)
    means = {name: sum(losses) / len(losses) for name, losses in expected.items()}
    assert sums.by_document_length == pytest.approx(means, rel=1e-12)
    assert sums.targets == sum(map(len, expected.values())) == batches.num_targets
