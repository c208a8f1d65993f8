from __future__ import annotations

import numpy as np

from engines.backend import FakeBackend, Floats, Ids, Mask
from engines.precision import precision_from_name
from tests.bench.profiling import Call, Recorded


def test_what_is_recorded_is_counted_and_can_be_done_again_whatever_became_of_its_inputs() -> None:
    seen: list[list[list[int]]] = []

    def logits_of(ids: Ids, mask: Mask, positions: Ids) -> Floats:
        seen.append(ids.tolist())
        return np.zeros((*positions.shape, 3), np.float32)

    calls: list[Call] = []
    engine = Recorded(FakeBackend(precision_from_name("int8"), logits_of), calls)
    for rows in (2, 3):
        ids = np.full((rows, 4), rows)
        given = ids, np.ones(ids.shape, bool), np.zeros((rows, 1), np.int64), np.zeros(rows, "f4")
        engine.logits(*given)
        ids[:] = 9
    engine.serve(*given)
    assert engine.rows == [2, 3, 3]
    before = seen.copy()
    for call in calls:
        call()
    assert seen[3:] == before
