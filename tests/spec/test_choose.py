"""Choosing shardings and transports by counted figures."""

from longspan.spec.choose import choose
from longspan.spec.mask import Mask


def test_one_long_document_is_dealt_in_zigzag():
    choice = choose("auto", "auto", {Mask((0, 4096)): 4}, 1, 4)
    assert choice.chosen.sharding in ("zigzag", "document_zigzag")
    assert choice.chosen.imbalance < 1.01
    contiguous = next(c for c in choice.candidates if c.sharding == "contiguous")
    assert contiguous.imbalance > 1.7


def test_documents_that_fit_ranks_stay_whole():
    choice = choose("auto", "auto", {Mask((0, 1024, 2048, 3072, 4096)): 4}, 1, 4)
    assert choice.chosen.sharding == "contiguous"
    assert choice.chosen.rows_sent == 0


def test_what_the_run_says_is_taken_and_said():
    choice = choose("contiguous", "ring", {Mask((0, 4096)): 4}, 1, 4)
    assert (choice.chosen.sharding, choice.chosen.transport) == ("contiguous", "ring")
    assert choice.reason.startswith("as the run file says")
