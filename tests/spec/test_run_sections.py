"""The learning rate's clock counts tokens."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longspan.spec.run_sections import ScheduleSection

TOTAL = 1000


@pytest.mark.parametrize(
    ("fields", "seen_tokens", "factor"),
    [
        ({"kind": "cosine"}, 0, 1.0),
        ({"kind": "cosine"}, 500, 0.55),
        ({"kind": "cosine"}, 1000, 0.1),
        ({"kind": "cosine", "warmup_tokens": 200}, 100, 0.5),
        ({"kind": "cosine", "warmup_tokens": 200}, 200, 1.0),
        ({"kind": "cosine", "warmup_tokens": 200}, 600, 0.55),
        ({"kind": "cosine", "decay_tokens": 100}, 500, 0.1),
        ({"kind": "cosine", "warmup_tokens": 2000}, 1000, 0.5),
        ({"kind": "wsd"}, 900, 1.0),
        ({"kind": "wsd", "min_ratio": 0.0}, 950, 0.5),
        ({"kind": "wsd", "decay_tokens": 500, "min_ratio": 0.0}, 750, 0.5),
        ({"kind": "wsd"}, 1000, 0.1),
        ({"kind": "constant", "warmup_tokens": 10}, 5, 0.5),
        ({"kind": "constant"}, 1000, 1.0),
    ],
    ids=str,
)
def test_factor(fields: dict[str, Any], seen_tokens: int, factor: float) -> None:
    assert ScheduleSection(**fields).factor(seen_tokens, TOTAL) == pytest.approx(factor)


@given(st.sampled_from(["cosine", "wsd", "constant"]), st.integers(0, 1500), st.integers(1, 3000))
def test_after_the_warm_up_the_rate_never_rises(kind: Any, warmup_tokens: int, seen_tokens: int) -> None:
    schedule = ScheduleSection(kind=kind, warmup_tokens=warmup_tokens)
    now, later = schedule.factor(seen_tokens, TOTAL), schedule.factor(seen_tokens + 1, TOTAL)
    assert 0.0 < now <= 1.0
    if seen_tokens >= warmup_tokens:
        assert later <= now
