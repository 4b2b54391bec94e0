"""All ranks start from the same checkpoint, and weights of an earlier end are not taken for this run's."""

from pathlib import Path

import pytest

from longspan.errors import CheckpointError
from longspan.testing import run_ranks
from longspan.train.checkpoint.keeping import keeping
from longspan.train.checkpoint.manifest import Progress
from longspan.train.checkpoint.resume import find_start
from longspan.train.loop import train
from tests.train.checkpoint.runs import Run, checkpoint, found
from tests.verify.runs import write_run

TWO = {"layout.cp": 2}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_run(tmp_path_factory.mktemp("run")))


def saves(rank: int, world: int, file: str, output: str) -> None:
    run = Run.open(file, TWO | {"output.folder": output})
    with run.keeping() as keeper:
        keeper.begin(run.model.decoder.named_parameters(), run.optimizer)
        for step in (1, 2):
            keeper.save(Progress(step))
        keeper.finish(Progress(2))


def starts(rank: int, world: int, file: str, output: str, steps: list[int | None]) -> str:
    """What each rank is told when rank R goes on from the checkpoint of steps[R]."""
    run = Run.open(file, TWO | {"output.folder": output + "-next"})
    step = steps[rank]
    try:
        with keeping(run.session, None if step is None else found(checkpoint(Path(output), step))):
            return "started"
    except CheckpointError as error:
        return str(error)


def test_ranks_that_see_different_checkpoints_do_not_start(file: str, tmp_path: Path) -> None:
    output = str(tmp_path / "out")
    run_ranks(saves, 2, file, output)
    assert run_ranks(starts, 2, file, output, [2, 2]) == ["started"] * 2
    for steps in ([1, 2], [None, 2]):
        told = run_ranks(starts, 2, file, output, steps)
        assert told[0] == told[1]
        assert told[0].startswith("ranks would start from ") and "step-00000002 of run" in told[0]


class Killed(Exception):
    pass


def test_weights_of_an_earlier_end_are_not_taken_for_those_of_a_longer_run(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run.open(file, {"output.folder": str(tmp_path / "out")})
    train(run.session, quiet=True)
    last = tmp_path / "out" / "weights" / "config.json"
    assert last.is_file()

    def killed(*_: object) -> None:
        raise Killed

    longer = Run.open(file, {"output.folder": str(tmp_path / "out"), "train.steps": 6})
    start = find_start(longer.session.config, True, allow_changes=True)
    monkeypatch.setattr("longspan.train.loop._save", killed)
    with pytest.raises(Killed):
        train(longer.session, quiet=True, found=start.found)
    assert not last.exists()
