"""Build routes are knobs of the search where plans are timed, and nowhere else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engines.build import digest_json
from engines.errors import InputError
from engines.manifest import Shape
from engines.module_routes import ModuleRoutes
from engines.routes import MOST_SEARCHED, RouteKnob
from engines.targets import target_from_name
from engines.trt import module_version
from exporter.export import export
from exporter.folder import Export, read_export
from tests.engines.test_routes import ENTRIES, KNOBS, listed
from tests.tiny_export import small_export
from tests.tuner.tuning import Tuner, bench_of
from tuner.config import TuneConfig
from tuner.plan_knobs import PlanKnobs, route_knobs
from tuner.space import Value, default_candidate, first_candidates
from tuner.workshop import Workshop

HERE = ModuleRoutes(KNOBS, "6 of tensorrt 11.1 are", None)
ELSEWHERE = replace(HERE, why_not_timed="plans of trt cannot run here: there is no GPU.")
NONE = ModuleRoutes((), "tensorrt-rtx 1.7 has none", None)

Asked = dict[str, Value | tuple[Value, ...]]


def found(module: ModuleRoutes, asked: Asked | None = None) -> PlanKnobs:
    space = tuple((asked or {}).items())
    return route_knobs(module, TuneConfig(export=Path(), output=Path(), space=space))


def test_every_route_with_listed_values_is_offered_its_default_first() -> None:
    knobs = found(HERE)
    assert knobs.choices == {
        "-conv_use_long_w": ("on", "off"),
        "-kgen:codegen:cuda_tile": ("1", "0", "2", "3"),
        "-slice_fusion": ("on", "off"),
    }
    assert knobs.says["-kgen:codegen:cuda_tile"] == "CUDA Tile"
    assert knobs.notes == ()


def test_routes_that_are_asked_for_come_first_and_open_ended_ones_with_them() -> None:
    knobs = found(HERE, {"-peep:max": ("2", "4"), "-slice_fusion": "off", "clip": (1.0, 0.9)})
    assert list(knobs.choices)[:2] == ["-peep:max", "-slice_fusion"]
    assert knobs.choices["-peep:max"] == ("1", "2", "4")
    assert knobs.choices["-slice_fusion"] == ("on", "off")
    assert "clip" not in knobs.choices


def test_no_more_routes_are_offered_than_a_search_can_turn() -> None:
    many = tuple(RouteKnob(f"-k{n}", ("0", "1"), "0") for n in range(2 * MOST_SEARCHED))
    knobs = found(replace(HERE, knobs=many), {"-k99": ("1",)})
    assert len(knobs.choices) == MOST_SEARCHED
    assert next(iter(knobs.choices)) == "-k99"


@pytest.mark.parametrize(
    ("module", "asked", "says"),
    [
        (HERE, {"-slice_fuson": ("on",)}, "did you mean '-slice_fusion'"),
        (HERE, {"-slice_fusion": ("onn",)}, "did you mean 'on'"),
        (HERE, {"-peep:max": "many"}, "-peep:max has no value 'many'; give one of int32_t"),
        (NONE, {"-slice_fusion": "off"}, "this TensorRT lists no knobs; leave the route out"),
        (ELSEWHERE, {"-slice_fusion": "off"}, "only where plans are timed, and plans of trt"),
    ],
)
def test_a_route_that_cannot_be_tried_is_refused(
    module: ModuleRoutes, asked: dict[str, Any], says: str
) -> None:
    with pytest.raises(InputError, match=says):
        found(module, asked)


def test_where_no_route_is_searched_a_note_says_why() -> None:
    assert found(NONE) == PlanKnobs(notes=("build routes: tensorrt-rtx 1.7 has none",))
    (note,) = found(ELSEWHERE).notes
    assert note.startswith("build routes: 6 of tensorrt 11.1 are not searched, for plans of trt")
    assert found(ELSEWHERE).choices == {}


@pytest.fixture(scope="module")
def ahead(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Export:
    """Return the shared checkpoint's export for TensorRT; not to be written into."""
    pytest.importorskip("tensorrt_rtx_bindings", reason="pip install 'cadenza[tensorrt-rtx]'")
    config = small_export(
        checkpoint,
        tmp_path_factory.mktemp("ahead") / "EXPORT",
        target="rtx-sm89",
        precisions=("fp32", "fp16"),
        shape=Shape((1, 4, 8), (1, 16, 40)),
    )
    return read_export(export(config))


def test_a_dry_run_says_once_that_a_module_has_no_build_routes(
    small_effort: None,
    ahead: Export,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tuner = Tuner(ahead.folder, tmp_path / "BUNDLE", tmp_path / "cache", capsys)
    asked = ("--target", "rtx-sm89", "--precision", "fp16", "--dry-run")
    said = tuner(*asked)
    assert said.code == 0, said.err
    version = module_version(target_from_name("rtx-sm89"))
    assert said.out.count(f"build routes: tensorrt-rtx {version} has none") == 1
    assert not [path for path in (tmp_path / "cache").rglob("*") if "routes" in str(path)]
    refused = tuner(*asked, "--set", "space.-slice_fusion=off")
    assert refused.code == 2
    assert "lists no knobs; leave the route out" in refused.err


def test_a_candidate_s_routes_reach_its_plans_as_one_line_less_the_defaults(
    small_effort: None, ahead: Export, tmp_path: Path
) -> None:
    (tmp_path / "work").mkdir()
    space = (("-peep:max", "2"), ("-kgen:codegen:cuda_tile", ("3",)))
    bench = bench_of(ahead, tmp_path, target="rtx-sm89", precisions=("fp16",), space=space)
    target = target_from_name("rtx-sm89")
    key = digest_json({"module": target.module, "version": module_version(target)})
    bench.cache.put("routes", key, listed(ENTRIES))  # as if the module had listed them
    shop = Workshop(replace(bench, plans_here=True, latencies=None), tmp_path / "work")
    default = default_candidate(shop.space)
    assert default == shop.default == first_candidates(shop.space)[0]
    assert shop.plan_options(default).route == "-peep:max=2"
    other = default.changed(**{"-kgen:codegen:cuda_tile": "3", "-slice_fusion": "off"})
    route = "-kgen:codegen:cuda_tile=3 -peep:max=2 -slice_fusion=off"
    assert shop.plan_options(other).route == route
    assert shop.session(other) == shop.session(default)
    assert other.setting != default.setting  # each is built and timed by itself
