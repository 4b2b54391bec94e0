"""Names of checkpoints, and what a killed run may leave between them."""

from pathlib import Path

import pytest

from longspan.train.checkpoint.folder import (
    complete,
    keep_last,
    publish,
    remove_leftovers,
    set_later_aside,
    step_folder,
    steps_in,
    unfinished,
)


def fill(root: Path, *steps: int) -> None:
    for step in steps:
        folder = step_folder(root, step)
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text(str(step))


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_the_newest_is_found_by_number(tmp_path: Path) -> None:
    fill(tmp_path, 99_999_999, 100_000_000, 9, 10)
    assert list(steps_in(tmp_path)) == [9, 10, 99_999_999, 100_000_000]
    assert steps_in(tmp_path / "nowhere") == {}


def test_what_is_unfinished_or_incomplete_is_no_checkpoint(tmp_path: Path) -> None:
    fill(tmp_path, 1, 2)
    unfinished(step_folder(tmp_path, 3)).mkdir()
    (tmp_path / "step-4").mkdir()
    (step_folder(tmp_path, 2) / "manifest.json").unlink()
    assert list(complete(tmp_path)) == [1]
    # It is there, so that a resumed run names it rather than passing over it.
    assert list(steps_in(tmp_path)) == [1, 2]


def test_publishing_is_one_rename(tmp_path: Path) -> None:
    folder = step_folder(tmp_path, 7)
    unfinished(folder).mkdir()
    (unfinished(folder) / "manifest.json").touch()
    publish(folder)
    assert names(tmp_path) == ["step-00000007"]


@pytest.mark.parametrize(("count", "left"), [(1, [30]), (2, [20, 30]), (5, [10, 20, 30])])
def test_the_last_few_are_kept(tmp_path: Path, count: int, left: list[int]) -> None:
    fill(tmp_path, 10, 20, 30)
    # A leftover of an earlier deletion is in the way.
    unfinished(step_folder(tmp_path, 10)).mkdir()
    keep_last(tmp_path, count)
    assert list(complete(tmp_path)) == left


def test_leftovers_go_and_checkpoints_stay(tmp_path: Path) -> None:
    fill(tmp_path, 1)
    unfinished(step_folder(tmp_path, 2)).mkdir()
    (unfinished(step_folder(tmp_path, 2)) / "__0_0.distcp").touch()
    remove_leftovers(tmp_path)
    assert names(tmp_path) == ["step-00000001"]


def test_later_checkpoints_keep_their_content_under_another_name(tmp_path: Path) -> None:
    for _ in range(2):
        fill(tmp_path, 3)
        assert set_later_aside(tmp_path, 2)
    fill(tmp_path, 2)
    assert names(tmp_path) == ["step-00000002", "step-00000003.aside-1", "step-00000003.aside-2"]
    assert list(steps_in(tmp_path)) == [2]
