"""The engines of candidates: of the right graphs, made once, and few loaded at a time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from engines.errors import InputError
from engines.options import OrtOptions
from exporter.folder import Export, Recipe
from tests.tuner.tuning import bench_of
from tuner import workshop
from tuner.space import Value, default_candidate
from tuner.timing import time_candidate
from tuner.workshop import Workshop, engine_spec

pytestmark = pytest.mark.usefixtures("small_effort")


@pytest.fixture
def shop(exported: Export, tmp_path: Path) -> Workshop:
    (tmp_path / "work").mkdir()
    return Workshop(bench_of(exported, tmp_path, precisions=("int8",)), tmp_path / "work")


def test_the_default_is_the_export_s_own_recipe(shop: Workshop) -> None:
    engines = shop.engines(shop.default)
    assert engines.folder is shop.bench.export
    assert set(engines.fleet.engines) == {"fp32", "int8"}
    assert engines.graphs == {"fp32": "fp32.serve", "int8": "int8.all.serve"}
    assert list(shop.work.iterdir()) == []


def test_another_recipe_is_made_once_and_its_options_reach_the_sessions(shop: Workshop) -> None:
    candidate = shop.default.changed(windows=2, clip=0.8, threads=1)
    engines = shop.engines(candidate)
    assert (engines.folder.windows, engines.folder.recipe.clip) == (2, 0.8)
    assert engines.options.threads == 1
    made = list((shop.work / "recipes").iterdir())
    assert [engines.folder.folder] == made
    again = Workshop(shop.bench, shop.work)
    assert again.engines(candidate).fleet.keys == engines.fleet.keys
    assert list((shop.work / "recipes").iterdir()) == made
    assert (again.built.built, again.built.reused) == (0, 2)


def test_engines_are_counted_as_built_once_and_as_reused_ever_after(shop: Workshop) -> None:
    shop.engines(shop.default)
    assert (shop.built.built, shop.built.reused) == (2, 0)
    assert shop.engines(shop.default) is shop.engines(shop.default)
    assert (shop.built.built, shop.built.reused) == (2, 0)


def test_beside_the_default_only_the_last_two_settings_stay_loaded(shop: Workshop) -> None:
    default = shop.engines(shop.default)
    two, three = ([shop.engines(shop.default.changed(threads=threads)) for threads in (1, 2, 3)])[
        1:
    ]
    assert shop.engines(shop.default) is default
    assert shop.engines(shop.default.changed(threads=2)) is two
    assert shop.engines(shop.default.changed(threads=3)) is three
    assert len(shop._loaded) == 3


def test_candidates_that_differ_in_their_schedule_share_their_engines(shop: Workshop) -> None:
    own = shop.engines(shop.default)
    for rule in ("uniform-int8", "spend-50"):
        assert shop.engines(shop.default.changed(schedule=rule)) is own


def test_only_the_graphs_of_what_ships_are_kept(shop: Workshop) -> None:
    kept = shop.default.changed(windows=2)
    for candidate in (kept, shop.default.changed(clip=0.8)):
        shop.engines(candidate)
    assert len(list((shop.work / "recipes").iterdir())) == 2
    shop.tidy(kept)
    assert [shop.engines(kept).folder.folder] == list((shop.work / "recipes").iterdir())


def test_scales_are_one_set_in_the_graph_or_one_a_window_as_an_input(exported: Export) -> None:
    stem, shared = engine_spec(exported, "int8", "shared", OrtOptions())
    assert stem == "int8.all.serve"
    assert shared.scales is None
    stem, by_window = engine_spec(exported, "int8", "window", OrtOptions())
    assert stem == "int8.serve"
    assert by_window.scales is not None
    assert len(by_window.scales) == exported.windows
    for scales in ("shared", "window"):
        stem, spec = engine_spec(exported, "fp32", scales, OrtOptions())
        assert (stem, spec.scales) == ("fp32.serve", None)


def test_the_most_sensitive_blocks_are_kept_beside_those_that_the_export_keeps(
    shop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, ...]] = []

    def requantized(source: Path, out: Path, recipe: Recipe) -> Path:
        asked.append(recipe.keep)
        return source

    monkeypatch.setattr(workshop, "rank_blocks", lambda *_: (3, 1, 0, 2))
    monkeypatch.setattr(workshop, "requantize", requantized)
    base = shop.bench.export
    for kept in ((), (1,)):
        export = replace(base, recipe=replace(base.recipe, keep=kept))
        exports = {base.recipe.quantizer: export}
        one = Workshop(replace(shop.bench, export=export, exports=exports), shop.work)
        one.engines(one.default)
        assert one.engines(one.default).folder is export
        for keep in (1, 2):
            one.engines(one.default.changed(keep=keep))
    assert asked == [(3,), (1, 3), (1, 3), (0, 1, 3)]


@pytest.mark.parametrize("precisions", [("int8",), ("w8a8", "w4a4")])
def test_every_block_is_ranked_whatever_the_precisions(
    exported: Export, tmp_path: Path, precisions: tuple[str, ...]
) -> None:
    (tmp_path / "work").mkdir()
    shop = Workshop(bench_of(exported, tmp_path, precisions=precisions), tmp_path / "work")
    assert sorted(shop._block_ranks) == list(range(shop.blocks))


def test_traces_are_of_full_precision_and_of_every_calibration_prompt(shop: Workshop) -> None:
    for name, job in shop.bench.jobs.items():
        traces = shop.traces[name]
        assert [trace.request.prompt for trace in traces] == [i.ids for i in job.calibration]
        assert all(set(t.request.schedule.precisions) == {"fp32"} for t in traces)


@pytest.mark.usefixtures("every_knob")
def test_what_is_pinned_is_the_yardstick_s_too(exported: Export, tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    pinned = (("scales", "window"), ("keep", 1), ("windows", 3), ("threads", 1))
    bench = bench_of(exported, tmp_path, precisions=("int8",), space=pinned)
    shop = Workshop(bench, tmp_path / "work")
    assert default_candidate(shop.space) == shop.default
    engines = shop.engines(shop.default)  # blocks are ranked by traces that need no kept block
    assert (engines.folder.windows, engines.options.threads) == (3, 1)
    assert engines.graphs["int8"] == "int8.serve"
    assert len(engines.folder.recipe.keep) == 1
    sampler = next(iter(bench.jobs.values())).sampler
    timing = time_candidate(shop, shop.default, sampler)
    assert timing is not None and timing.drift == 1.0


@pytest.mark.parametrize(
    ("name", "choices", "says"),
    [
        ("windows", (3, 1000), r"windows <= \d+ must hold, the steps, got 1000"),
        ("keep", (0, 99), r"0 <= keep < \d+ must hold, got 99"),
        ("keep", (-1,), r"0 <= keep < \d+ must hold, got -1"),
        ("windows", ("3",), "knob 'windows' takes values like 3, got '3'"),
        ("keep", (True,), "knob 'keep' takes values like 0, got True"),
    ],
)
def test_a_choice_that_cannot_be_had_is_refused_with_its_value(
    name: str, choices: tuple[Value, ...], says: str, exported: Export, tmp_path: Path
) -> None:
    bench = bench_of(exported, tmp_path, space=((name, choices),))
    with pytest.raises(InputError, match=says):
        Workshop(bench, tmp_path / "work").space  # noqa: B018
