"""`longspan groups` for people and for programs."""

import json

import pytest

from longspan.cli import main


def printed(capsys: pytest.CaptureFixture[str], words: str) -> str:
    assert main(["groups", *words.split()]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def test_groups_of_eight_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "--world 8 --tp 4 --cp 2")
    assert "TP (0,1,2,3) (4,5,6,7)\n" in text
    assert "CP (0,4) (1,5) (2,6) (3,7)\n" in text
    assert "DP each rank alone\n" in text
    assert "unknown without --ranks-per-node" in " ".join(text.split())


def test_an_axis_that_crosses_nodes_is_pointed_out(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "--world 8 --tp 4 --dp 2 --ranks-per-node 2")
    assert "tp crosses nodes" in " ".join(text.split())
    assert "crosses" not in printed(capsys, "--world 8 --tp 4 --dp 2 --ranks-per-node 4")


def test_a_large_world_is_cut_short_for_people_only(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "--world 256 --tp 2")
    assert "(126,127) … 64 more\n" in text
    assert "… 192 more; --json lists all" in text
    assert len(json.loads(printed(capsys, "--world 256 --tp 2 --json"))["tp"]) == 128


def test_one_rank_has_nothing_to_share(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, "").startswith("1 rank = pp 1 × dp 1 × cp 1 × tp 1")


def test_json_is_the_only_thing_printed(capsys: pytest.CaptureFixture[str]) -> None:
    value = json.loads(printed(capsys, "--world 8 --tp 2 --cp 2 --ranks-per-node 4 --json"))
    assert value["tp"] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert value["cp"] == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert value["dp"] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert value["pp"] == [[rank] for rank in range(8)]
    assert value["dp_cp"] == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert value["coordinates"][5] | {"tp": 1, "cp": 0, "dp": 1, "pp": 0} == value["coordinates"][5]
    assert value["links"] == {
        "tp": "intra-node",
        "cp": "intra-node",
        "dp": "inter-node",
        "pp": "none",
        "dp_cp": "inter-node",
    }
    assert value["layout"]["dp_replicate"] == 2


def test_weights_that_are_shared_out_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert "weights shared out over 4 ranks\n" in printed(capsys, "--world 8 --dp-shard 2 --cp 2 --tp 2")
    assert "weights shared out over 2 ranks\n" in printed(capsys, "--world 4 --cp 2 --tp 2 --fsdp")
    assert "shared out over" not in printed(capsys, "--world 4 --cp 2 --tp 2").splitlines()[0]
