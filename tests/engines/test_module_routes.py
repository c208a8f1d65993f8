"""A module is asked for its build routes in a child, once a version; TensorRT-RTX has none."""

from __future__ import annotations

from pathlib import Path

import pytest

from engines.build import Cache, digest_json
from engines.errors import InputError, MissingExtra
from engines.module_routes import routes_of
from engines.targets import target_from_name
from engines.trt import module_version
from tests.engines.test_routes import ENTRIES, KNOBS, listed

pytest.importorskip("tensorrt_rtx_bindings", reason="pip install 'cadenza[tensorrt-rtx]'")

RTX = target_from_name("rtx-sm89")


def entries(cache: Cache) -> list[Path]:
    return [path for path in cache.folder.rglob("*") if path.is_file() and "routes" in str(path)]


def test_tensorrt_rtx_itself_says_that_it_has_none_and_is_asked_once(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    found = routes_of(RTX, cache, 60.0, keep=False)
    assert found.knobs == ()
    assert found.says == f"tensorrt-rtx {module_version(RTX)} has none"
    assert entries(cache) == []
    assert routes_of(RTX, cache, 60.0) == found
    assert len(entries(cache)) == 1
    # No child answers within no time: it is not asked again.
    assert routes_of(RTX, cache, 1e-9) == found


def keep(cache: Cache, text: str) -> None:
    key = digest_json({"module": RTX.module, "version": module_version(RTX)})
    cache.put("routes", key, text)


def test_what_was_listed_is_read_as_data(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    keep(cache, listed(ENTRIES))
    assert routes_of(RTX, cache, 1e-9).knobs == KNOBS
    keep(cache, '{"tuner_options": 3}')
    with pytest.raises(InputError, match="build routes of tensorrt-rtx"):
        routes_of(RTX, cache, 1e-9)


def test_a_module_that_is_not_here_is_an_error_only_where_plans_are_timed(tmp_path: Path) -> None:
    trt, cache = target_from_name("trt"), Cache(tmp_path)
    try:
        module_version(trt)
    except MissingExtra:
        found = routes_of(trt, cache, 60.0, why_not_timed="there is no GPU")
        assert found.knobs == ()
        assert "not installed" in found.says
        with pytest.raises(MissingExtra, match="not installed"):
            routes_of(trt, cache, 60.0)
    else:
        pytest.skip("TensorRT itself is here")
