"""Plans: built once, in a child, equal for equal requests; refusals in words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from engines import plans
from engines.build import BuildLog, Cache
from engines.errors import BackendError, InputError, MissingExtra
from engines.files import digest_file
from engines.manifest import Shape
from engines.plans import BuiltPlan, built_plan, plan_key, profile_of
from engines.targets import target_from_name
from engines.trt import BuildRequest, Timing, TrtOptions, attach_timing, tensorrt_module
from tests.engines.precision_graphs import precision_graph

pytest.importorskip("tensorrt_rtx_bindings", reason="pip install 'cadenza[tensorrt-rtx]'")

Build = Callable[..., BuiltPlan]


@pytest.fixture
def request_(tmp_path: Path) -> BuildRequest:
    graph = tmp_path / "int8.onnx"
    graph.write_bytes(precision_graph("int8", (16, 64, 64)))
    return BuildRequest(graph=graph, target="rtx-sm89", profile={})


def test_equal_requests_are_built_once_and_give_equal_bytes(
    request_: BuildRequest, tmp_path: Path
) -> None:
    log, plans = BuildLog(), []
    for cache in ("one", "one", "two"):
        plans.append(built_plan(request_, Cache(tmp_path / cache), log))
    assert (log.built, log.reused) == (2, 1)
    first, again, other = plans
    assert first == again
    assert first.sha256 == other.sha256
    assert first.bytes == first.file.stat().st_size
    assert "[VERBOSE]" in first.log.read_text()
    left = {each.name for each in first.file.parent.iterdir()}
    assert left == {f"{first.file.stem}.{end}" for end in ("plan", "log", "json")}


def test_a_damaged_plan_is_built_again(request_: BuildRequest, tmp_path: Path) -> None:
    cache, log = Cache(tmp_path / "cache"), BuildLog()
    whole = built_plan(request_, cache, log)
    data = whole.file.read_bytes()
    whole.file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert built_plan(request_, cache, log) == whole
    assert whole.file.read_bytes() == data
    assert log.built == 2


def test_whatever_decides_a_plan_is_in_its_key(request_: BuildRequest, tmp_path: Path) -> None:
    other = tmp_path / "fp16.onnx"
    other.write_bytes(precision_graph("fp16", (16, 64, 64)))
    extents = {"x": ((1, 64), (2, 64), (4, 64))}
    requests = [
        request_,
        replace(request_, target="rtx-sm120"),
        replace(request_, graph=other),
        replace(request_, profile=extents),
        replace(request_, options=TrtOptions(optimization_level=2)),
    ]
    assert len({plan_key(each, {}) for each in requests}) == len(requests)
    moved = tmp_path / "elsewhere" / "other.onnx"
    moved.parent.mkdir()
    moved.write_bytes(request_.graph.read_bytes())
    assert plan_key(replace(request_, graph=moved), {}) == plan_key(request_, {})


def test_evicting_a_plan_removes_what_lies_with_it(request_: BuildRequest, tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache")
    plan = built_plan(request_, cache, BuildLog())
    size = sum(each.stat().st_size for each in plan.file.parent.iterdir())
    assert cache.evict(0.0, since=2e12) == (1, size)
    assert list(plan.file.parent.iterdir()) == []


def test_a_precision_that_an_sm_lacks_is_refused_in_the_builder_s_words(tmp_path: Path) -> None:
    graph = tmp_path / "fp8.onnx"
    graph.write_bytes(precision_graph("fp8", (16, 64, 64)))
    request = BuildRequest(graph=graph, target="rtx-sm86", profile={})
    with pytest.raises(BackendError, match=r"cannot build it for rtx-sm86: .*fp8.*; use another"):
        built_plan(request, Cache(tmp_path / "cache"), BuildLog())
    assert list((tmp_path / "cache" / "v1" / "plan").iterdir()) == []


def test_what_is_no_graph_is_refused(tmp_path: Path) -> None:
    graph = tmp_path / "none.onnx"
    graph.write_bytes(b"\x08\x0b not a graph")
    request = BuildRequest(graph=graph, target="rtx-sm89", profile={})
    with pytest.raises(BackendError, match="TensorRT cannot read it"):
        built_plan(request, Cache(tmp_path / "cache"), BuildLog())
    with pytest.raises(InputError, match="cannot read the graph"):
        built_plan(
            replace(request, graph=tmp_path / "nowhere.onnx"),
            Cache(tmp_path / "cache"),
            BuildLog(),
        )


def test_a_route_that_the_module_does_not_have_is_refused(
    request_: BuildRequest, tmp_path: Path
) -> None:
    routed = replace(request_, options=TrtOptions(route="-conv_use_long_w=off"))
    with pytest.raises(BackendError, match="has no build routes"):
        built_plan(routed, Cache(tmp_path / "cache"), BuildLog())


def test_extents_follow_the_declared_shape() -> None:
    found = profile_of(Shape((1, 8, 64), (2, 16, 40)), (8, 24), 60, ((1.0,) * 5,))
    assert found["ids"] == found["mask"] == ((1, 10), (8, 40), (64, 60))
    assert found["positions"] == ((1, 1), (8, 24), (64, 24))
    assert found["scales"] == ((1, 1, 5), (8, 1, 5), (64, 1, 5))


def test_a_missing_module_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"pip install 'cadenza\[tensorrt\]'"):
        tensorrt_module(target_from_name("trt"))


def test_a_module_that_measures_nothing_has_no_timing_cache(
    request_: BuildRequest, tmp_path: Path
) -> None:
    cache = Cache(tmp_path / "cache")
    with pytest.raises(InputError, match="measures nothing while it builds"):
        built_plan(request_, cache, BuildLog(), strict=True)
    plan = built_plan(request_, cache, BuildLog())
    assert plan.timing is None


def test_a_timing_cache_grows_from_build_to_build_and_a_given_one_is_only_read(
    request_: BuildRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # TensorRT-RTX takes a timing cache and leaves it empty; the way there and back is the same.
    monkeypatch.setattr(plans, "has_timing", lambda target: True)
    cache, log = Cache(tmp_path / "cache"), BuildLog()
    first = built_plan(request_, cache, log)
    assert first.timing is not None
    assert first.timing.stem == digest_file(first.timing).sha256
    assert built_plan(request_, cache, log) == first
    level = replace(request_, options=TrtOptions(optimization_level=2))
    assert built_plan(level, cache, log).timing is not None
    given = tmp_path / "given.timing"
    given.write_bytes(first.timing.read_bytes())
    followed = built_plan(request_, cache, log, timing=given, strict=True)
    assert followed.timing is not None
    assert given.read_bytes() == first.timing.read_bytes()
    assert log.built == 3  # a cache that is to be followed is part of the key
    first.timing.write_bytes(b"damaged")
    assert built_plan(request_, cache, log).timing is None


def test_a_timing_cache_of_another_gpu_is_refused(request_: BuildRequest) -> None:
    class Refusing:
        def create_timing_cache(self, before: bytes) -> bytes:
            return before

        def set_timing_cache(self, cache: bytes, ignore_mismatch: bool) -> bool:
            return ignore_mismatch

    module = tensorrt_module(target_from_name("rtx-sm89"))
    with pytest.raises(BackendError, match="another TensorRT; build without"):
        attach_timing(module, Refusing(), Timing(), "a graph")
