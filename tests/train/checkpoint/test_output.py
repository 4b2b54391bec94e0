"""An output folder belongs to one run; what an earlier one left there is set aside whole."""

from pathlib import Path

import pytest

from longspan.errors import CheckpointError, ConfigError
from longspan.spec.run import RunConfig
from longspan.train.checkpoint.folder import step_folder
from longspan.train.checkpoint.output import output_folder, run_id
from tests.verify.runs import write_run


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return RunConfig.load(write_run(tmp_path))


def leave_a_run(config: RunConfig, words: str) -> str:
    """What a run leaves: its id, records, checkpoints and weights."""
    folder = config.output.folder
    with output_folder(config, goes_on_from=None) as output:
        (folder / "steps.jsonl").write_text(words)
        (folder / "weights").mkdir()
        (folder / "weights" / "config.json").touch()
        step_folder(folder / "checkpoints", 2).mkdir()
    return output.run_id


def test_a_new_run_sets_the_earlier_ones_aside(config: RunConfig) -> None:
    folder = config.output.folder
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    ids = [leave_a_run(config, words) for words in ("first", "second", "third")]
    assert len({*ids}) == 3
    places = [folder.with_name(name) for name in ("out.1", "out.2", "out")]
    assert [(place / "steps.jsonl").read_text() for place in places] == ["first", "second", "third"]
    assert [run_id(place) for place in places] == ids
    for place in places:
        assert step_folder(place / "checkpoints", 2).is_dir()
        assert (place / "weights" / "config.json").is_file()
    assert (folder / "notes.txt").read_text() == "mine"


def test_it_says_what_it_did_in_one_line(config: RunConfig) -> None:
    with output_folder(config, goes_on_from=None) as output:
        assert output.notes == ()
    with output_folder(config, goes_on_from=None) as output:
        (note,) = output.notes
        assert note.startswith(f"{config.output.folder} held an earlier run, which is now in ")
        assert not output.has_weights


def test_a_run_that_goes_on_finds_everything_in_place(config: RunConfig) -> None:
    folder = config.output.folder
    identity = leave_a_run(config, '{"whole": 1}\n{"cut sho')
    (folder / "checkpoints" / "step-00000004.tmp").mkdir()
    step_folder(folder / "checkpoints", 3).mkdir()
    with output_folder(config, goes_on_from=2) as output:
        assert output.run_id == identity and output.has_weights
        assert (folder / "steps.jsonl").read_text() == '{"whole": 1}\n'
        assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == [
            "step-00000002",
            "step-00000003.aside-1",
        ]
        (note,) = output.notes
        assert note.startswith("step-00000003.aside-1 lies after step 2")
    assert not folder.with_name("out.1").exists()


@pytest.mark.parametrize("goes_on_from", [None, 2])
def test_two_runs_cannot_share_a_folder(config: RunConfig, goes_on_from: int | None) -> None:
    identity = leave_a_run(config, "first")
    with output_folder(config, goes_on_from=2):
        with (
            pytest.raises(
                CheckpointError, match="another run is at work in .*; wait for its end or set output"
            ),
            output_folder(config, goes_on_from=goes_on_from),
        ):
            pass
        assert run_id(config.output.folder) == identity
    with output_folder(config, goes_on_from=2):
        pass


def test_what_the_run_reads_is_not_moved_away(config: RunConfig, tmp_path: Path) -> None:
    leave_a_run(config, "first")
    with (
        pytest.raises(
            ConfigError, match="weights is an input of this run and lies in what an earlier run left"
        ),
        output_folder(config, goes_on_from=None, inputs=[config.output.folder / "weights"]),
    ):
        pass
    source = config.data.model_copy(update={"source": (config.output.folder / "weights" / "config.json",)})
    with (
        pytest.raises(ConfigError, match=r"config.json is an input"),
        output_folder(config.model_copy(update={"data": source}), goes_on_from=None),
    ):
        pass
    assert (config.output.folder / "steps.jsonl").read_text() == "first"


def test_a_folder_that_cannot_be_made_is_an_error(config: RunConfig) -> None:
    config.output.folder.write_text("a file")
    with pytest.raises(OSError), output_folder(config, goes_on_from=None):
        pass
