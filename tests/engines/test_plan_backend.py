"""A backend of plans on a null device: every bucket answers as the graph, memory is shared.

The null device computes with ONNX Runtime, so what is shown is which bytes go where and when; what
a GPU makes of the same calls is `test_trt_run`'s, on one.
"""

from __future__ import annotations

import logging
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper
from safetensors.numpy import save_file

from engines.backend import Backend
from engines.buckets import Buckets
from engines.errors import BackendError, BundleError
from engines.ort import OrtBackend
from engines.precision import EXECUTED
from engines.targets import target_from_name
from engines.trt_run import Device, PlanBackend
from tests.engines.null_gpu import NullCuda, null_module
from tests.engines.tiny_graph import EOS_ID, VOCAB, Weights, tiny_graph

BUCKETS = Buckets(lengths=(8, 24), batches=(1, 4), asked=(3, 12))
PASSES = list(product((1, 3, 4), (5, 8, 24), (1, 3, 12)))
SCALES = np.linspace(0.5, 1.5, 6, dtype=np.float32).reshape(3, 2)


def device_of(cuda: NullCuda, target: str = "trt") -> Device:
    return Device(target_from_name(target), cuda, null_module(cuda))  # type: ignore[arg-type]


def a_pass(rows: int, length: int, asked: int, seed: int) -> tuple[Any, Any, Any, Any]:
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, VOCAB - 1, (rows, length))
    mask = np.arange(length) < rng.integers(1, length + 1, (rows, 1))
    progress = rng.random(rows, np.float32)
    return ids, mask, rng.integers(0, length, (rows, asked)), progress


def bare(graph: Path, names: tuple[str, ...], file: Path) -> Path:
    """Make constants of a graph its inputs, their values in a safetensors file."""
    model = onnx.load(graph)
    kept = {each.name: each for each in model.graph.initializer if each.name in names}
    for name, each in kept.items():
        model.graph.initializer.remove(each)
        model.graph.input.append(helper.make_tensor_value_info(name, each.data_type, each.dims))
    save_file({name: onnx.numpy_helper.to_array(each) for name, each in kept.items()}, file)
    out = graph.with_suffix(".bare.onnx")
    out.write_bytes(model.SerializeToString())
    return out


def loaded(device: Device, serve: Path | None, trace: Path | None, **given: Any) -> PlanBackend:
    asked: dict[str, Any] = {"scales": None, "weights": (), "buckets": BUCKETS, "pad_id": EOS_ID}
    return PlanBackend.load(
        serve=serve, trace=trace, precision=EXECUTED["fp32"], device=device, **(asked | given)
    )


def agree(engine: Backend, stand_in: Backend, passes: list[tuple[int, int, int]] = PASSES) -> None:
    for seed, (rows, length, asked) in enumerate(passes):
        given = a_pass(rows, length, asked, seed)
        np.testing.assert_allclose(
            engine.logits(*given), stand_in.logits(*given), rtol=1e-4, atol=1e-4
        )
        served, wanted = engine.serve(*given), stand_in.serve(*given)
        assert (served.tokens == wanted.tokens).all()
        np.testing.assert_allclose(served.probability, wanted.probability, atol=1e-5)
        np.testing.assert_allclose(served.entropy, wanted.entropy, atol=1e-4)


@pytest.mark.parametrize("refuse", [False, True])
def test_every_pass_answers_as_the_graph_captured_or_not(
    tmp_path: Path, refuse: bool, caplog: pytest.LogCaptureFixture
) -> None:
    serve = tiny_graph(tmp_path / "s.onnx", "serve", Weights.random(), sites=2)
    trace = tiny_graph(tmp_path / "t.onnx", "trace", Weights.random(), sites=2)
    stand_in = OrtBackend.load(serve, trace, EXECUTED["fp32"], SCALES)
    cuda = NullCuda(refuse)
    with device_of(cuda) as device, caplog.at_level(logging.WARNING):
        engine = loaded(device, serve, trace, scales=SCALES)
        assert engine.built == {"unknown x unknown": 1}
        engine.warm_up()
        slots = 2 * len(BUCKETS.every())
        assert cuda.captures == (0 if refuse else slots)
        held = set(cuda.held)
        agree(engine, stand_in)
        assert set(cuda.held) == held, "what is warm takes no more memory"
        assert cuda.launched == (0 if refuse else 2 * len(PASSES))
        said = [record for record in caplog.records if "cannot be captured" in record.message]
        assert len(said) == (2 if refuse else 0), "once a plan"
        engine.close()
        assert cuda.captures == 0
    assert not cuda.held


def test_plans_share_activations_and_each_stored_weight_is_there_once(tmp_path: Path) -> None:
    weights = Weights.random()
    graphs = [tiny_graph(tmp_path / f"{n}.onnx", n, weights) for n in ("serve", "trace")]
    file = tmp_path / "w.safetensors"
    serve, trace = (bare(graph, ("mix", "head"), file) for graph in graphs)
    stand_in = OrtBackend.load(*graphs, EXECUTED["fp32"])
    cuda = NullCuda()
    with device_of(cuda) as device:
        one = loaded(device, serve, trace, weights=[file])
        one.warm_up()
        before = device.memory_bytes()
        assert before["weights"] == 1024  # 8 x 8 and 8 x 19 floats, each at a multiple of 256
        two = loaded(device, serve, trace, weights=[file])
        assert device.memory_bytes() == before
        agree(one, stand_in)
        agree(two, stand_in)
        one.close()
        agree(two, stand_in)


def test_memory_that_grows_after_a_capture_is_bound_again(tmp_path: Path) -> None:
    serve = tiny_graph(tmp_path / "s.onnx", "serve", Weights.random())
    trace = tiny_graph(tmp_path / "t.onnx", "trace", Weights.random())
    stand_in = OrtBackend.load(serve, trace, EXECUTED["fp32"])
    with device_of(NullCuda()) as device:
        few = [(1, 5, 2), (1, 8, 3)]
        small = loaded(device, serve, trace, buckets=Buckets((8,), (1,), (3,)))
        small.warm_up()
        agree(small, stand_in, few)
        generation = device.generation
        large = loaded(device, serve, trace)
        assert device.generation > generation
        agree(small, stand_in, few)
        agree(large, stand_in)
        agree(small, stand_in, few)


def test_numbers_that_are_not_finite_are_told(tmp_path: Path) -> None:
    serve = tiny_graph(tmp_path / "s.onnx", "serve", Weights.random(), poison=True)
    with device_of(NullCuda()) as device:
        engine = loaded(device, serve, None)
        with pytest.raises(BackendError, match="not finite"):
            engine.warm_up()
        served = engine.serve(*a_pass(2, 8, 3, 0))
        assert np.isnan(served.probability).all(), "nothing is hidden"


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    graph = tiny_graph(tmp_path / "serve.onnx", "serve", Weights.random())
    file = tmp_path / "w.safetensors"
    serve = bare(graph, ("mix",), file)
    with device_of(NullCuda()) as device:
        with pytest.raises(BundleError, match="'mix', which stands 0 times"):
            loaded(device, serve, None)
        with pytest.raises(BackendError, match="outputs of a trace plan"):
            loaded(device, None, graph)
        with pytest.raises(ValueError, match="needs a plan"):
            loaded(device, None, None)
        engine = loaded(device, serve, None, weights=[file])
        with pytest.raises(BackendError, match="above the largest bucket"):
            engine.serve(*a_pass(5, 8, 3, 0))
        with pytest.raises(BackendError, match="without its trace plan"):
            engine.logits(*a_pass(1, 8, 3, 0))


def test_tensorrt_rtx_captures_itself_and_its_kernels_are_kept_outside(tmp_path: Path) -> None:
    serve = tiny_graph(tmp_path / "s.onnx", "serve", Weights.random())
    trace = tiny_graph(tmp_path / "t.onnx", "trace", Weights.random())
    stand_in = OrtBackend.load(serve, trace, EXECUTED["fp32"])
    folder = tmp_path / "kernels"
    taken: list[list[bytes]] = []
    for _ in range(2):
        cuda = NullCuda()
        with device_of(cuda, "rtx-sm89") as device:
            engine = loaded(device, serve, trace, runtime_cache=folder)
            engine.warm_up()
            agree(engine, stand_in)
            assert cuda.captures == cuda.launched == 0
            configs = [each for part in engine._parts.values() for each in part.engine.configs]
            assert len(configs) == 2 * len(BUCKETS.every()), "a context a bucket"
            assert {each.cuda_graph_strategy for each in configs} == {"WHOLE_GRAPH_CAPTURE"}
            assert {each.dynamic_shapes_kernel_specialization_strategy for each in configs} == {
                "EAGER"
            }
            (cache,) = {id(each.cache): each.cache for each in configs}.values()
            taken.append(cache.taken)
            engine.close()
    assert taken == [[], [b"kernels"]], "one cache for all, read when it is there"
    assert len(list(folder.iterdir())) == 1
