"""The reference model's graphs, built by TensorRT-RTX for every SM that takes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from engines.audit import audits, mismatch
from engines.build import BuildLog, Cache
from engines.errors import BackendError
from engines.manifest import Shape
from engines.plan import plan_from_file
from engines.plans import BuiltPlan, built_plan, profile_of
from engines.precision import EXECUTED
from engines.targets import SMS, refusal, target_from_name
from engines.trt import BuildRequest
from exporter.export import ExportConfig, export
from exporter.folder import Export, read_export, stands_in
from exporter.typed import quantized_elements

pytest.importorskip("tensorrt_rtx_bindings", reason="pip install 'cadenza[tensorrt-rtx]'")

pytestmark = pytest.mark.slow

REFERENCE = Path(__file__).resolve().parents[2] / "calib_data" / "reference"


@pytest.fixture(scope="module")
def ahead(tmp_path_factory: pytest.TempPathFactory) -> Export:
    """Return the reference model's export for TensorRT, every precision."""
    config = ExportConfig(
        model=REFERENCE,
        out=tmp_path_factory.mktemp("ahead") / "EXPORT",
        target="rtx-sm120",
        precisions=tuple(EXECUTED),
        shape=Shape((1, 8, 64), (1, 16, 40)),
        prompts=2,
    )
    return read_export(export(config))


def build(ahead: Export, graph: str, target: str, cache: Cache) -> BuiltPlan:
    entry = ahead.graphs[graph]
    request = BuildRequest(
        graph=ahead.path(graph),
        target=target,
        profile=profile_of(ahead.shape, (24,), ahead.model.max_length, entry.scales),
    )
    digests = {path: file.sha256 for path, file in ahead.files.items()}
    return built_plan(request, cache, BuildLog(), digests)


def graphs_of(ahead: Export, name: str) -> list[str]:
    """Return the graphs of a precision that TensorRT builds, less the trace tails' variants."""
    return [
        graph
        for graph, entry in ahead.graphs.items()
        if entry.precision == name
        and not stands_in(graph)
        and (entry.tail == "serve" or graph == f"{name}.trace")
    ]


@pytest.mark.parametrize("name", EXECUTED)
def test_every_graph_builds_for_every_sm_that_takes_it_and_for_no_other(
    name: str, ahead: Export, tmp_path: Path
) -> None:
    graphs = graphs_of(ahead, name)
    assert f"{name}.serve" in graphs
    cache = Cache(tmp_path / "cache")
    taken = [sm for sm in SMS if refusal(target_from_name(f"rtx-sm{sm}"), name) is None]
    assert taken, "some SM takes it"
    for sm in SMS:
        for graph in graphs if sm in taken else graphs[:1]:
            if sm in taken:
                assert build(ahead, graph, f"rtx-sm{sm}", cache).bytes > 0
            else:
                with pytest.raises(BackendError, match=f"cannot build it for rtx-sm{sm}"):
                    build(ahead, graph, f"rtx-sm{sm}", cache)


@pytest.mark.parametrize("name", EXECUTED)
def test_a_plan_built_again_is_the_same_byte_for_byte(
    name: str, ahead: Export, tmp_path: Path
) -> None:
    # A third build where two differ: once in some dozens the compiler's threads take other turns.
    for graph in graphs_of(ahead, name)[:2]:
        found: list[str] = []
        while len(set(found)) == len(found) < 3:
            cache = Cache(tmp_path / f"{graph}-{len(found)}")
            found.append(build(ahead, graph, "rtx-sm120", cache).sha256)
        assert len(set(found)) < len(found), f"{graph}: three builds, three plans"


def test_one_plan_may_serve_several_sms_if_each_takes_it(ahead: Export, tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache")
    several = plan_from_file(build(ahead, "fp8.serve", "rtx-sm89+sm120", cache).file)
    assert several.sms == (89, 120)
    assert [program.sms for program in several.programs] == [("sm89", "sm120")]
    assert plan_from_file(build(ahead, "fp8.serve", "rtx-sm89", cache).file).sms == (89,)
    with pytest.raises(BackendError, match="fp8"):
        build(ahead, "fp8.serve", "rtx-sm86+sm89", cache)


@pytest.mark.parametrize("name", EXECUTED)
def test_what_was_built_is_what_was_asked_for(name: str, ahead: Export, tmp_path: Path) -> None:
    for graph in graphs_of(ahead, name):
        plan = build(ahead, graph, "rtx-sm120", Cache(tmp_path / "cache"))
        (audit,) = audits(plan_from_file(plan.file), name)
        assert mismatch(audit, name, quantized_elements(ahead.path(graph))) is None
        assert audit.share > 0.98  # the LM head is not quantized
        other = "fp16" if name != "fp16" else "int8"
        (wrong,) = audits(plan_from_file(plan.file), other)
        said = mismatch(wrong, other, quantized_elements(ahead.path(graph)))
        assert said is not None
        assert f"{other} was asked for on sm120" in said


def test_weights_that_are_inputs_are_not_in_the_plan(ahead: Export, tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache")
    matrices = {"fp16": 2, "int8": 1, "fp8": 1}
    for name, size in matrices.items():
        stem = f"{name}.all" if EXECUTED[name].has_static_scales else name
        whole = build(ahead, f"{stem}.serve", "rtx-sm120", cache).bytes
        bare = build(ahead, f"{stem}.bare.serve", "rtx-sm120", cache).bytes
        assert whole - bare > 0.8 * size * 0.7e6
