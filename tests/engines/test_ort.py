"""Laws of the ONNX Runtime backend, on tiny graphs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from engines import ort
from engines.backend import served_from_logits
from engines.errors import BackendError
from engines.options import OrtOptions
from engines.ort import OrtBackend
from engines.precision import precision_from_name
from engines.sampler import Request, generate
from engines.schedule import SamplerConfig, Schedule
from tests.engines.tiny_graph import MODEL, VOCAB, Weights, tiny_graph

onnxruntime = pytest.importorskip("onnxruntime", reason="install with: pip install cadenza[ort]")

FP32, INT8 = precision_from_name("fp32"), precision_from_name("int8")
HAS_CUDA = "CUDAExecutionProvider" in onnxruntime.get_available_providers()
WEIGHTS = Weights.random()
ONE_THREAD = OrtOptions(threads=1)


def canvas(seed: int, batch: int, length: int, asked: int) -> tuple[np.ndarray, ...]:
    """Return ids, mask, positions and progress of a random batch with ragged rows."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, length + 1, batch)
    lengths[0] = length
    return (
        rng.integers(0, VOCAB, (batch, length)),
        np.arange(length) < lengths[:, None],
        rng.integers(0, lengths[:, None], (batch, asked)),
        rng.random(batch).astype(np.float32),
    )


@pytest.mark.parametrize(("batch", "length", "asked"), [(1, 1, 1), (2, 9, 4), (5, 30, 24)])
def test_both_tails_equal_numpy_at_every_shape(
    tmp_path: Path, batch: int, length: int, asked: int
) -> None:
    engine = OrtBackend.load(
        tiny_graph(tmp_path / "serve.onnx", "serve", WEIGHTS),
        tiny_graph(tmp_path / "trace.onnx", "trace", WEIGHTS),
        FP32,
        options=ONE_THREAD,
    )
    ids, mask, positions, progress = canvas(batch, batch, length, asked)
    expected = WEIGHTS.logits(ids, mask, positions)
    assert np.allclose(engine.logits(ids, mask, positions, progress), expected, atol=1e-4)
    served, wanted = engine.serve(ids, mask, positions, progress), served_from_logits(expected)
    assert np.array_equal(served.tokens, wanted.tokens) and served.tokens.dtype == np.int64
    assert np.allclose(served.probability, wanted.probability, atol=1e-5)
    assert np.allclose(served.entropy, wanted.entropy, atol=1e-4)


def test_each_row_gets_the_scales_of_its_window(tmp_path: Path) -> None:
    scales = np.array([[1, 9], [2, 9], [4, 9], [8, 9], [16, 9], [32, 9]], np.float32)
    path = tiny_graph(tmp_path / "trace.onnx", "trace", WEIGHTS, sites=2)
    engine = OrtBackend.load(None, path, INT8, scales, ONE_THREAD)
    ids, mask, positions, _ = canvas(1, 24, 7, 3)
    progress = (np.arange(24) / 24).astype(np.float32)
    out = engine.logits(ids, mask, positions, progress)
    plain = WEIGHTS.logits(ids, mask, positions)
    windows = np.arange(24) * 6 // 24
    assert np.allclose(out, plain * 2.0 ** windows[:, None, None], rtol=1e-4, atol=1e-3)


def test_foreign_types_and_strides_are_taken_and_right_ones_are_not_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = OrtBackend.load(
        None, tiny_graph(tmp_path / "t.onnx", "trace", WEIGHTS), FP32, options=ONE_THREAD
    )
    ids, mask, positions, progress = canvas(2, 4, 8, 3)
    expected = engine.logits(ids, mask, positions, progress)
    strided = np.asfortranarray(ids.astype(np.int32))
    assert np.array_equal(engine.logits(strided, mask * 1, positions, progress), expected)

    fed: dict[str, np.ndarray] = {}

    def spy(session: object, outputs: list[str], feed: dict[str, np.ndarray]) -> list[np.ndarray]:
        fed.update(feed)
        return [expected]

    monkeypatch.setattr(engine, "_run", spy)
    engine.logits(ids, mask, positions, progress)
    assert fed["ids"] is ids and fed["mask"] is mask and fed["positions"] is positions


def test_the_bound_path_gives_the_same_answers_and_follows_the_shapes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = OrtBackend.load(
        tiny_graph(tmp_path / "s.onnx", "serve", WEIGHTS), None, FP32, options=ONE_THREAD
    )
    for seed, (batch, length, asked) in enumerate(((3, 9, 4), (1, 5, 2), (4, 12, 6))):
        inputs = canvas(seed, batch, length, asked)
        plain = engine.serve(*inputs)
        with monkeypatch.context() as patch:
            patch.setattr(engine, "_run", ort._run_bound)
            bound = engine.serve(*inputs)
        assert np.array_equal(bound.tokens, plain.tokens)
        assert np.array_equal(bound.probability, plain.probability)


def test_generation_through_onnxruntime_equals_generation_through_numpy(tmp_path: Path) -> None:
    class Twin:
        precision = FP32

        def logits(self, ids, mask, positions, progress):  # type: ignore[no-untyped-def]
            return WEIGHTS.logits(ids, mask, positions)

        def serve(self, ids, mask, positions, progress):  # type: ignore[no-untyped-def]
            return served_from_logits(self.logits(ids, mask, positions, progress))

    engine = OrtBackend.load(
        tiny_graph(tmp_path / "s.onnx", "serve", WEIGHTS), None, FP32, options=ONE_THREAD
    )
    config = SamplerConfig(steps=6, gen_length=12, block_length=6)
    requests = [
        Request(prompt=tuple(range(n)), sampler=config, schedule=Schedule(("fp32",)))
        for n in (0, 3, 11)
    ]
    ours = generate(requests, {"fp32": engine}, MODEL)
    twins = generate(requests, {"fp32": Twin()}, MODEL)
    assert [one.ids for one in ours] == [one.ids for one in twins]


def test_the_trace_session_is_made_only_when_wanted(tmp_path: Path) -> None:
    trace = tmp_path / "trace.onnx"
    serve = tiny_graph(tmp_path / "serve.onnx", "serve", WEIGHTS)
    engine = OrtBackend.load(serve, trace, FP32, options=ONE_THREAD)  # trace is not there yet
    tiny_graph(trace, "trace", WEIGHTS)
    inputs = canvas(0, 2, 5, 2)
    engine.logits(*inputs)
    trace.unlink()
    engine.logits(*inputs)
    with pytest.raises(BackendError, match=r"without its trace graph.*\.trace\.onnx"):
        OrtBackend.load(serve, None, FP32).logits(*inputs)


def test_an_int8_graph_is_read_back_as_integer_gemms(tmp_path: Path) -> None:
    path = tiny_graph(tmp_path / "s.onnx", "serve", WEIGHTS, kind="qdq")
    engine = OrtBackend.load(path, None, INT8, options=ONE_THREAD, read_back=True)
    assert engine.built == {"MatMul(float)": 1, "MatMulIntegerToFloat(uint8)": 1}
    ids, mask, positions, progress = canvas(4, 3, 8, 3)
    assert engine.serve(ids, mask, positions, progress).tokens.shape == (3, 3)


def test_an_int8_graph_that_would_compute_in_floating_point_is_refused(tmp_path: Path) -> None:
    plain = tiny_graph(tmp_path / "plain.onnx", "serve", WEIGHTS)
    with pytest.raises(BackendError, match=r"asked for int8, but no GEMM .* MatMul\(float\) 2"):
        OrtBackend.load(plain, None, INT8, options=ONE_THREAD, read_back=True)
    quantized = tiny_graph(tmp_path / "q.onnx", "serve", WEIGHTS, kind="qdq")
    basic = OrtOptions(threads=1, graph_optimization="basic")
    with pytest.raises(BackendError, match="no GEMM was built in integers"):
        OrtBackend.load(quantized, None, INT8, options=basic, read_back=True)


def test_a_simulated_precision_never_computes_in_integers(tmp_path: Path) -> None:
    path = tiny_graph(tmp_path / "s.onnx", "serve", WEIGHTS, kind="qdq")
    simulated = precision_from_name("w8a8")
    engine = OrtBackend.load(path, None, simulated, options=ONE_THREAD, read_back=True)
    assert engine.built == {"MatMul(float)": 2}


def test_nothing_of_a_read_back_stays_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    path = tiny_graph(tmp_path / "s.onnx", "serve", WEIGHTS)
    OrtBackend.load(path, None, FP32, options=ONE_THREAD, read_back=True)
    assert list(scratch.iterdir()) == []
    assert {p.name for p in tmp_path.iterdir()} == {"scratch", "s.onnx"}


@pytest.mark.skipif(HAS_CUDA, reason="this onnxruntime has CUDA")
def test_a_provider_that_is_not_there_is_an_error_and_not_another_provider(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tiny_graph(tmp_path / "s.onnx", "serve", WEIGHTS)
    with pytest.raises(BackendError, match=r"needs CUDAExecutionProvider.*cadenza\[ort-gpu\]"):
        OrtBackend.load(path, None, FP32, options=OrtOptions(provider="cuda"))
    assert capfd.readouterr() == ("", "")


def test_a_session_on_another_provider_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_graph(tmp_path / "s.onnx", "serve", WEIGHTS)

    class Elsewhere(onnxruntime.InferenceSession):  # type: ignore[misc, name-defined]
        def get_providers(self) -> list[str]:
            return ["AzureExecutionProvider", "CPUExecutionProvider"]

    monkeypatch.setattr(onnxruntime, "InferenceSession", Elsewhere)
    with pytest.raises(BackendError, match=r"asked for CPU.*chose AzureExecutionProvider"):
        OrtBackend.load(path, None, FP32, options=ONE_THREAD)


@pytest.mark.parametrize("damage", ["empty", "cut", "text", "absent", "folder"])
def test_a_file_that_is_no_graph_is_a_clear_error_without_noise(
    tmp_path: Path, damage: str, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tiny_graph(tmp_path / "s.onnx", "serve", WEIGHTS)
    data = path.read_bytes()
    if damage in ("absent", "folder"):
        path.unlink()
        if damage == "folder":
            path.mkdir()
    else:
        path.write_bytes({"empty": b"", "cut": data[: len(data) // 2], "text": b"hello"}[damage])
    with pytest.raises(BackendError, match=r"s\.onnx") as caught:
        OrtBackend.load(path, None, FP32, options=ONE_THREAD)
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


def test_a_graph_of_another_kind_is_refused_by_its_names(tmp_path: Path) -> None:
    serve = tiny_graph(tmp_path / "s.onnx", "serve", WEIGHTS)
    scaled = tiny_graph(tmp_path / "c.onnx", "serve", WEIGHTS, sites=3)
    with pytest.raises(BackendError, match="outputs of a trace graph are logits"):
        OrtBackend.load(None, serve, FP32, options=ONE_THREAD)
    with pytest.raises(BackendError, match=r"this one has .*scales"):
        OrtBackend.load(scaled, None, FP32, options=ONE_THREAD)
    with pytest.raises(BackendError, match=r"inputs of a serve graph are .*scales"):
        OrtBackend.load(serve, None, INT8, np.ones((2, 3), np.float32), ONE_THREAD)
    with pytest.raises(BackendError, match="takes 3 activation scales, 2 were given"):
        OrtBackend.load(scaled, None, INT8, np.ones((2, 2), np.float32), ONE_THREAD)


@pytest.mark.parametrize("value", [0.0, -1.0, np.nan, np.inf])
def test_scales_that_cannot_be_scales_are_refused(tmp_path: Path, value: float) -> None:
    scaled = tiny_graph(tmp_path / "c.onnx", "serve", WEIGHTS, sites=2)
    with pytest.raises(ValueError, match="positive and finite"):
        OrtBackend.load(scaled, None, INT8, np.array([[1, value]], np.float32), ONE_THREAD)


def test_a_failure_inside_a_pass_is_a_backend_error(tmp_path: Path) -> None:
    engine = OrtBackend.load(
        tiny_graph(tmp_path / "s.onnx", "serve", WEIGHTS), None, FP32, options=ONE_THREAD
    )
    ids, mask, positions, progress = canvas(4, 2, 8, 3)
    with pytest.raises(BackendError, match="'fp32' failed on a batch of 2 rows of 8 tokens"):
        engine.serve(ids, mask, positions + 100, progress)


@pytest.mark.parametrize(
    "wrong", [{"provider": "gpu"}, {"threads": -1}, {"graph_optimization": "none"}]
)
def test_options_are_checked(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        OrtOptions(**wrong)  # type: ignore[arg-type]


def test_the_environment_names_what_a_build_depends_on() -> None:
    said = ort.environment()
    assert said["onnxruntime"] == onnxruntime.__version__
    assert said["provider"] == "CPUExecutionProvider"
    assert said["device"] and int(said["cores"]) >= 1


def test_the_engines_import_with_numpy_alone() -> None:
    absent = ("onnxruntime", "onnx", "torch", "optuna", "safetensors", "tokenizers")
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({absent}))\n"
        "import engines.build, engines.measure, engines.ort, engines.sampler, engines.trace\n"
        "from engines.errors import MissingExtra\n"
        "try:\n"
        "    engines.ort.environment()\n"
        "except MissingExtra as error:\n"
        "    assert 'cadenza[ort]' in str(error), error\n"
        "else:\n"
        "    raise AssertionError('onnxruntime was blocked')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.gpu
@pytest.mark.skipif(
    not HAS_CUDA, reason="no CUDA provider; install with: pip install cadenza[ort-gpu]"
)
def test_cuda_runs_every_gemm_on_the_gpu_and_agrees_with_the_cpu(tmp_path: Path) -> None:
    serve = tiny_graph(tmp_path / "s.onnx", "serve", WEIGHTS)
    trace = tiny_graph(tmp_path / "t.onnx", "trace", WEIGHTS)
    cuda = OrtBackend.load(serve, trace, FP32, options=OrtOptions(provider="cuda"), read_back=True)
    cpu = OrtBackend.load(serve, trace, FP32, options=ONE_THREAD)
    assert sum(cuda.built.values()) == 2
    for seed, (batch, length, asked) in enumerate(((3, 9, 4), (1, 5, 2), (4, 12, 6))):
        inputs = canvas(seed, batch, length, asked)
        assert np.allclose(cuda.logits(*inputs), cpu.logits(*inputs), atol=1e-4)
        assert np.array_equal(cuda.serve(*inputs).tokens, cpu.serve(*inputs).tokens)
    assert ort.environment(OrtOptions(provider="cuda"))["device"]
