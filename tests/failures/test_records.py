"""The files by which ranks tell each other how they are."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from longspan.train.failure.records import FailureFolder, failure_of, frame_place, process_state


@pytest.fixture
def folder(tmp_path: Path) -> FailureFolder:
    return FailureFolder(tmp_path / "failures", world=3)


def test_the_first_word_of_a_rank_stays(folder: FailureFolder) -> None:
    folder.join(1)
    assert folder.write(failure_of(ValueError("first\nof two lines"), 1, 3))
    assert not folder.write(failure_of(ValueError("second"), 1, 3))
    assert [(rank, failure.message) for rank, failure in folder.read().items()] == [(1, "first of two lines")]
    assert sorted(path.name for path in folder.path.iterdir()) == ["rank1.json", "rank1.pid"]


def test_a_new_run_forgets_the_last_one_and_leaves_nothing_when_it_ends_well(folder: FailureFolder) -> None:
    folder.join(0)
    folder.note_step(0, 12)
    folder.write(failure_of(ValueError("old"), 0, 12))
    folder.join(0)
    assert folder.read() == {}
    assert folder.step(0) is None
    folder.note_step(0, 2)
    assert folder.step(0) == 2
    folder.leave(0)
    assert not folder.path.exists()


def test_a_folder_that_cannot_be_written_hides_no_failure(folder: FailureFolder) -> None:
    assert folder.write(failure_of(ValueError("first"), 1, 3))
    assert folder.read() == {}


def test_a_rank_that_is_gone_without_a_word_is_dead(folder: FailureFolder) -> None:
    folder.join(0)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        member = json.loads((folder.path / "rank0.pid").read_text())
        started = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19]
        (folder.path / "rank1.pid").write_text(json.dumps(member | {"pid": process.pid, "started": started}))
        assert folder.dead() == []
        os.kill(process.pid, signal.SIGSTOP)
        while process_state(process.pid) != "T":
            pass
        assert folder.dead() == []
        process.kill()
        while process_state(process.pid) != "Z":
            pass
        assert folder.dead() == [1]
    assert process_state(process.pid) == "gone"
    assert folder.dead() == [1]
    folder.write(failure_of(ValueError("told"), 1, 3))
    assert folder.dead() == []


def test_a_number_that_another_process_has_now_does_not_count(folder: FailureFolder) -> None:
    folder.join(2)
    assert folder.dead() == []
    member = json.loads((folder.path / "rank2.pid").read_text())
    (folder.path / "rank2.pid").write_text(json.dumps(member | {"started": "1"}))
    assert folder.dead() == [2]
    # Another machine's processes cannot be seen from here.
    (folder.path / "rank2.pid").write_text(json.dumps(member | {"started": "1", "host": "elsewhere"}))
    assert folder.dead() == []


def test_places_leave_libraries_out() -> None:
    assert frame_place(sys._getframe()).endswith("in test_places_leave_libraries_out")
    try:
        json.loads("{")
    except ValueError as error:
        failure = failure_of(error, 0, None)
    assert failure.place.endswith("in test_places_leave_libraries_out")
    assert "json" in failure.trace
