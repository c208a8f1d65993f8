"""The table on which searches are compared: made by the script that is there, large enough."""

from __future__ import annotations

import json
from pathlib import Path

from engines.files import digest_file
from tests.bench import search_table

TABLE = json.loads((Path(__file__).parent / "search_table.json").read_text())


def test_the_table_was_made_by_the_script_that_is_there() -> None:
    assert TABLE["script"] == digest_file(Path(search_table.__file__)).sha256


def test_the_table_holds_a_space_of_a_thousand_candidates_and_more() -> None:
    size = 1
    for knob in TABLE["space"]:
        size *= len(knob["choices"])
    assert size == 9216
    assert TABLE["environment"]
    assert TABLE["seconds"] <= 90 * 60
