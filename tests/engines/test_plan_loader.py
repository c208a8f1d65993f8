"""Plans are held against this machine before TensorRT sees a byte; the loader picks the target."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cadenza import main
from engines.buckets import buckets_of
from engines.bundle import Bundle, read_bundle
from engines.cuda import gpu_here, no_gpu
from engines.errors import BackendError, BundleError, CadenzaError
from engines.machine import machine
from engines.plan_fit import Here
from engines.plan_loader import best_target, buckets_in, check_engine, has_plans, why_not
from engines.runtime import Runtime
from engines.targets import SMS, target_from_name
from engines.trt import module_version
from engines.trt_run import cannot_run
from tests.engines.plan_bundle import write_plan_bundle
from tests.engines.tiny_bundle import edited, put, relist, write_tiny_bundle
from tests.engines.tiny_graph import EOS_ID

TARGET = "rtx-sm89"
pytest.importorskip("tensorrt_rtx_bindings", reason="pip install 'cadenza[tensorrt-rtx]'")
pytest.importorskip("cuda.bindings.runtime", reason="pip install 'cadenza[tensorrt-rtx]'")
without_gpu = pytest.mark.skipif(no_gpu() is None, reason="a GPU is here")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a bundle with a real plan; its copies are damaged."""
    folder = tmp_path_factory.mktemp("plans")
    return write_plan_bundle(folder / "B", folder, TARGET).folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "B"))


def here() -> Here:
    version = module_version(target_from_name(TARGET))
    return Here(version=version, sm=89, system=machine()["system"])


def check(bundle: Bundle, found: Here) -> None:
    check_engine(bundle, f"fp32.{TARGET}", bundle.manifest.engines[f"fp32.{TARGET}"], found)


def test_a_plan_that_was_built_here_for_such_a_gpu_passes(made: Path) -> None:
    check(read_bundle(made), here())


def test_a_plan_for_elsewhere_is_refused_with_the_command_that_mends_it(made: Path) -> None:
    bundle = read_bundle(made)
    for other, target in (
        (replace(here(), sm=120), "rtx-sm120"),
        (replace(here(), version="1.9.0.1"), TARGET),
        (replace(here(), system="Windows AMD64"), TARGET),
    ):
        with pytest.raises(BackendError) as caught:
            check(bundle, other)
        assert str(caught.value).endswith(f"cadenza rebuild {made} --target {target}")


def test_a_changed_plan_is_refused_though_nobody_checked_digests(folder: Path) -> None:
    bundle = read_bundle(folder, verify=False)
    plan = folder / f"engines/fp32.{TARGET}.plan"
    data = bytearray(plan.read_bytes())
    data[-1] ^= 1
    plan.write_bytes(data)
    with pytest.raises(BundleError, match="was changed"):
        check(bundle, here())


def test_a_plan_that_is_no_plan_is_refused_before_tensorrt_sees_it(folder: Path) -> None:
    path = f"engines/fp32.{TARGET}.plan"
    (folder / path).write_bytes(b"vtrt" + bytes(96))
    relist(folder, path)
    with pytest.raises(BundleError, match="is not whole"):
        check(read_bundle(folder), here())


def test_buckets_that_are_not_declared_follow_the_shape(folder: Path) -> None:
    bundle = read_bundle(folder)
    own = buckets_of(bundle.manifest.shape, [12], 64)
    assert buckets_in(bundle) == own
    declared = own.to_json() | {"asked": [12]}
    bundle = read_bundle(edited(folder, put(declared, "buckets")))
    assert buckets_in(bundle).asked == (12,)


def test_only_targets_of_tensorrt_have_plans() -> None:
    assert [has_plans(name) for name in ("trt", TARGET, "cpu", "cuda", "npu", "rtx-sm1")] == [
        True,
        True,
        False,
        False,
        False,
        False,
    ]


@without_gpu
def test_without_a_gpu_a_bundle_runs_on_cpu_and_says_why_plans_do_not(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = read_bundle(made)
    assert best_target(bundle) == "cpu"
    assert Runtime.load(made).target == "cpu"
    why = why_not(bundle, TARGET)
    assert why is not None
    assert why.startswith(f"target {TARGET} cannot run here: ")
    with pytest.raises(CadenzaError, match="--target cpu"):
        Runtime.load(made, TARGET)
    for argv in (["verify", str(made)], ["run", str(made), "abc"]):
        assert main([*argv, "--target", TARGET]) == 1
        assert "Traceback" not in capsys.readouterr().err
        assert main(argv) == 0
        capsys.readouterr()
    assert main(["verify", str(made), "--target", TARGET, "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert (said["executed"], said["ok"]) == (False, False)
    assert set(said["plans"]) == {TARGET}
    assert best_target(write_tiny_bundle(tmp_path / "T", tmp_path)) == "cpu"


def test_a_closed_runtime_is_not_ready_and_closing_twice_is_once(made: Path) -> None:
    with Runtime.load(made, "cpu") as runtime:
        assert runtime.ready
    assert not runtime.ready
    runtime.close()
    assert not Runtime.load(made, "cpu", warmup=False).ready


@pytest.mark.gpu
def test_on_a_gpu_the_plan_is_picked_warmed_and_answers_as_the_graph(tmp_path: Path) -> None:
    sm = gpu_here().sm
    target = target_from_name(f"rtx-sm{sm}" if sm in SMS else "trt")
    why = cannot_run(target)
    if why is not None:
        pytest.skip(why)
    bundle = write_plan_bundle(tmp_path / "B", tmp_path, target.name)
    assert best_target(bundle) == target.name
    cold = Runtime.load(bundle.folder, target.name, warmup=False)
    assert not cold.ready
    prompts = ["abc", "deed", "hello", "lo0", "a", "1010101"]
    cold.generate(prompts)
    assert not cold.ready, "not every bucket has run"
    cold.close()
    stand_in = Runtime.load(bundle.folder, "cpu")
    with Runtime.load(bundle.folder) as warm:
        assert warm.ready
        assert warm.target == target.name
        assert warm.device is not None
        assert warm.device.memory_bytes()["activations"] > 0
        ids = np.full((2, 20), EOS_ID)
        asked = np.tile(np.arange(8, 20), (2, 1))
        given = (ids, np.ones(ids.shape, np.bool_), asked, np.zeros(2, np.float32))
        np.testing.assert_allclose(
            warm.engines["fp32"].serve(*given).probability,
            stand_in.engines["fp32"].serve(*given).probability,
            atol=2e-3,
        )
        assert len(warm.generate(prompts)) == len(prompts)
