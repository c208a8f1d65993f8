"""The graph against the module, for every shape and kind of checkpoint; and its two tails."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from engines.backend import served_from_logits
from engines.model import ModelInfo
from engines.ort import OrtBackend
from engines.precision import FULL_PRECISION
from exporter.checkpoint import load_denoiser, read_checkpoint, save_checkpoint
from exporter.denoiser import MASKED_SCORE
from exporter.export import place_checkpoint
from exporter.folder import Export
from exporter.framework import TorchBackend
from exporter.graph import linears, with_tail
from exporter.train import vocabulary
from exporter.weights import bind
from tests.exporter.test_checkpoint import dream_folder
from tests.tiny_export import random_denoiser, tiny_config


def states(batch: int, length: int, asked: int, seed: int = 0) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, length + 1, batch)
    lengths[0] = length
    positions = rng.integers(0, lengths[:, None], (batch, asked))
    mask = np.arange(length) < lengths[:, None]
    return rng.integers(0, 64, (batch, length)), mask, positions, np.zeros(batch, np.float32)


def engines_of(folder: Path, out: Path) -> tuple[TorchBackend, OrtBackend]:
    """Return the framework and the graph of a checkpoint, without calibration."""
    found = read_checkpoint(folder)
    core = place_checkpoint(found, out, copy=False, say=lambda text: None)
    for tail in ("serve", "trace"):
        graph = with_tail(core.graph, tail)
        bind(graph, core.tensors)
        (out / f"{tail}.onnx").write_bytes(graph.SerializeToString())
    engine = OrtBackend.load(out / "serve.onnx", out / "trace.onnx", FULL_PRECISION)
    return TorchBackend(load_denoiser(found)), engine


@pytest.fixture(scope="module", params=["llada", "tied", "dream", "dream bf16"])
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[TorchBackend, OrtBackend]:
    folder, out = (tmp_path_factory.mktemp("graph") / name for name in ("model", "out"))
    if request.param.startswith("dream"):
        kind = torch.bfloat16 if "bf16" in request.param else torch.float32
        dream_folder(random_denoiser(tiny_config(qkv_bias=True, shifted=True)), folder, kind)
        (folder / "tokenizer.json").write_text("{}")
    else:
        tied = request.param == "tied"
        save_checkpoint(random_denoiser(tiny_config(tied=tied)), vocabulary(), folder)
    return engines_of(folder, out)


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 9, 3), (3, 17, 5), (2, 5, 9), (7, 64, 64)])
def test_the_graph_computes_what_the_module_does(
    shape: tuple[int, int, int], pair: tuple[TorchBackend, OrtBackend]
) -> None:
    framework, engine = pair
    given = states(*shape)
    np.testing.assert_allclose(engine.logits(*given), framework.logits(*given), atol=5e-5)


def test_padding_and_batch_mates_do_not_change_a_row(
    pair: tuple[TorchBackend, OrtBackend],
) -> None:
    engine = pair[1]
    ids, mask, positions, progress = states(3, 12, 4)
    together = engine.logits(ids, mask, positions, progress)
    padded = np.where(mask, ids, 17)
    np.testing.assert_allclose(
        engine.logits(padded, mask, positions, progress), together, atol=1e-5
    )
    for row in range(3):
        n = int(mask[row].sum())
        alone = engine.logits(
            ids[row : row + 1, :n], mask[row : row + 1, :n], positions[row : row + 1], progress[:1]
        )
        np.testing.assert_allclose(alone[0], together[row], atol=1e-5)


def test_a_row_without_any_key_gives_no_nan(pair: tuple[TorchBackend, OrtBackend]) -> None:
    ids, mask, positions, progress = states(2, 6, 3)
    mask[1] = False
    assert np.isfinite(pair[1].logits(ids, mask, positions, progress)).all()


def test_the_serve_tail_is_what_the_logits_say(pair: tuple[TorchBackend, OrtBackend]) -> None:
    given = states(4, 11, 6)
    served = pair[1].serve(*given)
    wanted = served_from_logits(pair[1].logits(*given))
    np.testing.assert_array_equal(served.tokens, wanted.tokens)
    np.testing.assert_allclose(served.probability, wanted.probability, rtol=1e-5)
    np.testing.assert_allclose(served.entropy, wanted.entropy, rtol=1e-4, atol=1e-5)


def test_the_mask_token_is_never_predicted_and_its_logit_is_finite(exported: Export) -> None:
    engine = OrtBackend.load(
        exported.path("fp32.serve"), exported.path("fp32.trace"), FULL_PRECISION
    )
    model: ModelInfo = exported.model
    given = states(8, 20, 20)
    logits = engine.logits(*given)[..., model.mask_id]
    assert (logits < MASKED_SCORE / 2).all()
    assert np.isfinite(engine.serve(*given).entropy).all()
    assert (engine.serve(*given).tokens != model.mask_id).all()


def test_ties_go_to_the_lowest_id() -> None:
    info = onnx.helper.make_tensor_value_info
    logits = info("logits", onnx.TensorProto.FLOAT, ["batch", "asked", 4])
    core = onnx.helper.make_model(onnx.helper.make_graph([], "core", [logits], [logits]))
    served = with_tail(core, "serve")
    del served.opset_import[:]
    served.opset_import.append(onnx.helper.make_opsetid("", 23))
    runner = onnx.reference.ReferenceEvaluator(served)
    tied = np.array([[[1.0, 3.0, 3.0, 2.0], [0.0, 0.0, 0.0, 0.0]]], np.float32)
    tokens, probability, entropy = runner.run(None, {"logits": tied})
    assert tokens.tolist() == [[1, 0]]
    assert probability[0, 1] == pytest.approx(0.25)
    assert entropy[0, 1] == pytest.approx(np.log(4))


def test_dimensions_are_dynamic_and_named_and_graphs_are_small(exported: Export) -> None:
    for name in exported.graphs:
        graph = onnx.load(str(exported.path(name)), load_external_data=False).graph
        dims = {
            value.name: [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim]
            for value in (*graph.input, *graph.output)
        }
        assert dims["ids"] == dims["mask"] == ["batch", "length"]
        assert dims["positions"] == ["batch", "asked"]
        assert dims.get("tokens", ["batch", "asked"]) == ["batch", "asked"]
        assert dims.get("logits", ["batch", "asked", 64]) == ["batch", "asked", 64]
        assert dims.get("scales", ["batch", 1, 8]) == ["batch", 1, 8]
        assert exported.path(name).stat().st_size < 64_000
        assert all(len(i.raw_data) <= 1024 for i in graph.initializer)
        assert len({node.name for node in graph.node}) == len(graph.node)


def test_the_operators_are_whole(exported: Export) -> None:
    graph = onnx.load(str(exported.path("fp32.trace")), load_external_data=False).graph
    kinds = [node.op_type for node in graph.node]
    assert kinds.count("RMSNormalization") == 5
    assert kinds.count("Attention") == 2
    assert kinds.count("RotaryEmbedding") == 4
    assert "Pow" not in kinds


def test_every_linear_layer_is_found_by_the_name_of_its_weight(exported: Export) -> None:
    graph = onnx.load(str(exported.path("fp32.trace")), load_external_data=False)
    found = [linear.weight for linear in linears(graph)]
    assert len(found) == len(set(found)) == 2 * 7 + 1
    assert "model.transformer.ff_out.weight" in found


def test_an_unknown_tail_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(ValueError, match="tail must be one of"):
        with_tail(onnx.ModelProto(), "tokens")
