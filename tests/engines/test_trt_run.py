"""Plans on a GPU: names and arguments held against the real modules here, the rest on a GPU."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from engines.buckets import Buckets
from engines.build import BuildLog, Cache
from engines.cuda import checked, gpu_here, no_gpu
from engines.errors import BackendError
from engines.ort import OrtBackend
from engines.plans import built_plan
from engines.precision import EXECUTED
from engines.targets import SMS, Target, target_from_name
from engines.trt import BuildRequest
from engines.trt_device import _logger
from engines.trt_run import Device, PlanBackend, cannot_run, inspect_plan
from tests.engines.tiny_graph import EOS_ID, MODEL, VOCAB, Weights, tiny_graph

ENGINES = Path(__file__).resolve().parent.parent.parent / "engines"
RUNTIME = pytest.importorskip(
    "cuda.bindings.runtime", reason="pip install 'cadenza[tensorrt-rtx]'"
)

# What the sources call each object of the modules, and its class there; "" is the module itself.
TRT = {
    "trt": "",
    "runtime": "Runtime",
    "engine": "ICudaEngine",
    "context": "IExecutionContext",
    "config": "IRuntimeConfig",
    "cache": "IRuntimeCache",
    "inspector": "EngineInspector",
}

# What TensorRT itself lacks; used where `own_graphs` holds, for TensorRT-RTX alone.
RTX_ALONE = {
    "trt.CudaGraphStrategy.WHOLE_GRAPH_CAPTURE",
    "trt.DynamicShapesKernelSpecializationStrategy.EAGER",
    "config.cuda_graph_strategy",
    "config.dynamic_shapes_kernel_specialization_strategy",
    "config.create_runtime_cache",
    "config.set_runtime_cache",
    "cache.serialize",
    "cache.deserialize",
}


RTX_TYPES = {"CudaGraphStrategy", "DynamicShapesKernelSpecializationStrategy"}

# Looked up by hand in the strings of tensorrt-cu13-bindings 11.4.0.106, which has no stubs and
# does not load here.  Whoever uses another name looks it up there, and adds it.
IN_TENSORRT = {
    "ExecutionContextAllocationStrategy",
    "ILogger",
    "INPUT",
    "JSON",
    "LayerInformationFormat",
    "Runtime",
    "TensorIOMode",
    "USER_MANAGED",
    "__version__",
    "create_engine_inspector",
    "create_execution_context",
    "create_runtime_config",
    "deserialize_cuda_engine",
    "device_memory_size_v2",
    "engine_host_code_allowed",
    "execute_async_v3",
    "get_engine_information",
    "get_tensor_dtype",
    "get_tensor_mode",
    "get_tensor_name",
    "get_tensor_shape",
    "infer_shapes",
    "num_io_tensors",
    "set_device_memory",
    "set_execution_context_allocation_strategy",
    "set_input_shape",
    "set_tensor_address",
}


def dotted(node: ast.AST) -> str:
    """Return a.b.c of an attribute, or nothing."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return before and f"{before}.{node.attr}"
    return ""


def used(*files: str, roots: set[str]) -> Iterator[tuple[str, ast.Call | None]]:
    """Yield every dotted name on one of some roots, with the call that it is the function of."""
    for file in files:
        tree = ast.parse((ENGINES / file).read_text("utf-8"))
        calls = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
        for node in ast.walk(tree):
            name = dotted(node)
            while name.startswith(("self.", "device.", "slot.")):
                name = name.partition(".")[2].lstrip("_")
            if isinstance(node, ast.Attribute) and "." in name and name.split(".")[0] in roots:
                yield name, calls.get(id(node))


def rtx_module() -> ModuleType:
    found: ModuleType = pytest.importorskip(
        "tensorrt_rtx_bindings", reason="pip install 'cadenza[tensorrt-rtx]'"
    )
    return found


def arities(says: str) -> list[tuple[int, int]]:
    """Return (least, most) arguments besides self of each overload that a docstring spells."""
    found = []
    for spelled in re.findall(r"^(?:\d+\. )?\w+\(self: [^\n]*\) -> ", says, re.MULTILINE):
        rest = re.sub(r"\[[^\]]*\]", "", spelled)[:-5].partition("(self: ")[2]
        parts = rest.split(", ")[1:]
        found.append((sum(" = " not in part for part in parts), len(parts)))
    return found


TRT_FILES = ("trt_device.py", "trt_run.py")


def test_the_real_module_has_every_name_with_as_many_arguments() -> None:
    trt, seen = rtx_module(), set()
    for name, call in used(*TRT_FILES, roots=set(TRT)):
        root, *path = name.split(".")
        found: Any = getattr(trt, TRT[root]) if TRT[root] else trt
        for part in path:
            assert hasattr(found, part), f"{name}: there is no {part}"
            found = getattr(found, part)
        seen.add(name)
        if call is not None and TRT[root]:
            known = arities(found.__doc__)
            assert known, f"{name}: {found.__doc__}"
            assert not call.keywords, f"{name}: names of arguments differ between the modules"
            if not any(isinstance(each, ast.Starred) for each in call.args):
                given = len(call.args)
                assert any(low <= given <= high for low, high in known), f"{name}: {known}"
    assert {"context.execute_async_v3", "context.set_tensor_address", "trt.Runtime"} <= seen
    assert seen >= RTX_ALONE
    assert len(seen) > 25


def test_the_real_cuda_has_every_name_with_as_many_arguments() -> None:
    seen = set()
    for name, call in used("cuda.py", roots={"cuda"}):
        found: Any = RUNTIME
        for part in name.split(".")[1:]:
            assert hasattr(found, part), f"{name}: there is no {part}"
            found = getattr(found, part)
        seen.add(name)
        if call is not None:
            given = re.match(r"\w+\((.*?)\)", found.__doc__.splitlines()[0])
            assert given is not None, found.__doc__
            count = len([part for part in given[1].split(", ") if part])
            assert len(call.args) == count, f"{name}: {given[0]}"
    assert len(seen) > 25


def test_every_other_name_was_looked_up_in_tensorrt_s_bindings_too() -> None:
    found = {name.rpartition(".")[2] for name, _ in used(*TRT_FILES, roots=set(TRT))}
    assert found - {name.rpartition(".")[2] for name in RTX_ALONE} - RTX_TYPES == IN_TENSORRT


def test_every_type_of_a_binding_is_a_type_of_tensorrt() -> None:
    from engines import bindings

    trt = rtx_module()
    names = {*bindings._STORED.values(), *bindings._INPUTS.values(), *bindings.SIZES}
    assert all(hasattr(trt.DataType, name) for name in names)


def test_a_runtime_of_the_real_module_never_takes_host_code() -> None:
    trt = rtx_module()
    logger = _logger(trt)
    runtime = trt.Runtime(logger)
    runtime.engine_host_code_allowed = False
    assert runtime.engine_host_code_allowed is False
    assert runtime.deserialize_cuda_engine(b"vtrt" * 100) is None
    assert logger.last


def test_host_code_is_never_allowed() -> None:
    for file in ENGINES.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.Assign) and any(
                dotted(each).endswith("host_code_allowed") for each in node.targets
            ):
                assert isinstance(node.value, ast.Constant)
                assert node.value.value is False


def test_an_error_of_cuda_says_what_was_done_and_the_mend() -> None:
    errors = RUNTIME.cudaError_t
    with pytest.raises(BackendError, match=r"taking memory failed: out of memory .*; lower the"):
        checked(RUNTIME, (errors.cudaErrorMemoryAllocation, 0), "taking memory")
    with pytest.raises(BackendError, match=r"cudaErrorNoDevice, 100\); use a machine with"):
        checked(RUNTIME, (errors.cudaErrorNoDevice,), "looking")
    with pytest.raises(BackendError, match=r"illegal memory access.*; load the bundle again"):
        checked(RUNTIME, (errors.cudaErrorIllegalAddress,), "a pass")
    assert checked(RUNTIME, (errors.cudaSuccess,), "x") is None
    assert checked(RUNTIME, (errors.cudaSuccess, 7), "x") == 7
    assert checked(RUNTIME, (errors.cudaSuccess, 7, 8), "x") == (7, 8)


@pytest.mark.skipif(no_gpu() is None, reason="a GPU is here")
def test_where_no_gpu_is_it_is_said_and_nothing_is_opened() -> None:
    for name in ("rtx-sm89", "trt"):
        why = cannot_run(target_from_name(name))
        assert why is not None
        assert why.startswith(f"plans of {name} cannot run here: ")
    rtx_module()
    with pytest.raises(BackendError, match="--target cpu runs what stands in"):
        Device.open(target_from_name("rtx-sm89"))


def gpu_target() -> Target:
    """Return the target of this machine's GPU, or skip and say what is missing."""
    why = no_gpu()
    if why is not None:
        pytest.skip(why)
    sm = gpu_here().sm
    target = target_from_name(f"rtx-sm{sm}" if sm in SMS else "trt")
    why = cannot_run(target)
    if why is not None:
        pytest.skip(why)
    return target


SMALL = Buckets(lengths=(8, 24), batches=(1, 4), asked=(3, 12))


def tiny_plans(folder: Path, target: Target) -> dict[str, tuple[Path, Path]]:
    """Return graph and plan of each tail of the tiny denoiser; its mixing product in fp32."""
    made = {}
    for tail in ("serve", "trace"):
        graph = tiny_graph(folder / f"{tail}.onnx", tail, Weights.random())
        canvas = ((1, 1), (2, 8), (4, 24))
        request = BuildRequest(
            graph=graph,
            target=target.name,
            profile={"ids": canvas, "mask": canvas, "positions": ((1, 1), (2, 3), (4, 12))},
        )
        plan = built_plan(request, Cache(folder / "cache"), BuildLog())
        made[tail] = (graph, plan.file)
    return made


@pytest.mark.gpu
def test_a_plan_gives_the_numbers_of_the_graph_that_stands_in_at_every_bucket(
    tmp_path: Path,
) -> None:
    target = gpu_target()
    made = tiny_plans(tmp_path, target)
    fp32 = EXECUTED["fp32"]
    stand_in = OrtBackend.load(made["serve"][0], made["trace"][0], fp32)
    rng = np.random.default_rng(0)
    with Device.open(target) as device:
        engine = PlanBackend.load(
            serve=made["serve"][1],
            trace=made["trace"][1],
            precision=fp32,
            scales=None,
            weights=(),
            device=device,
            buckets=SMALL,
            runtime_cache=tmp_path / "kernels",
            pad_id=EOS_ID,
        )
        engine.warm_up()
        held = device.memory_bytes()
        assert held["activations"] > 0
        for again, rows, length, asked in product(range(2), (1, 3, 4), (5, 8, 24), (1, 3, 12)):
            ids = rng.integers(0, VOCAB - 1, (rows, length))
            mask = np.arange(length) < rng.integers(1, length + 1, (rows, 1))
            positions = rng.integers(0, length, (rows, asked))
            given = (ids, mask, positions, np.zeros(rows, np.float32))
            logits, expected = engine.logits(*given), stand_in.logits(*given)
            np.testing.assert_allclose(logits, expected, rtol=2e-3, atol=2e-3)
            served, wanted = engine.serve(*given), stand_in.serve(*given)
            np.testing.assert_allclose(served.probability, wanted.probability, atol=2e-3)
            clear = np.sort(expected, -1)
            clear = clear[..., -1] - clear[..., -2] > 0.01
            assert (served.tokens == wanted.tokens)[clear].all(), again
        assert device.memory_bytes() == held, "what is warm takes no more memory"
        with pytest.raises(BackendError, match="above the largest bucket"):
            engine.logits(*(np.zeros((5, 8), np.int64),) * 3, np.zeros(5, np.float32))
        engine.close()


@pytest.mark.gpu
def test_a_not_finite_number_is_not_hidden(tmp_path: Path) -> None:
    target = gpu_target()
    graph = tiny_graph(tmp_path / "g.onnx", "serve", Weights.random(), poison=True)
    canvas = ((1, 1), (2, 8), (4, 24))
    request = BuildRequest(
        graph=graph,
        target=target.name,
        profile={"ids": canvas, "mask": canvas, "positions": ((1, 1), (2, 3), (4, 12))},
    )
    plan = built_plan(request, Cache(tmp_path / "cache"), BuildLog())
    with Device.open(target) as device:
        engine = PlanBackend.load(
            serve=plan.file,
            trace=None,
            precision=EXECUTED["fp32"],
            scales=None,
            weights=(),
            device=device,
            buckets=SMALL,
            pad_id=MODEL.eos_id,
        )
        with pytest.raises(BackendError, match="not finite"):
            engine.warm_up()
        engine.close()


@pytest.mark.gpu
def test_the_inspector_tells_what_a_plan_multiplies(tmp_path: Path) -> None:
    target = gpu_target()
    plan = tiny_plans(tmp_path, target)["trace"][1]
    with Device.open(target) as device:
        for audit in inspect_plan(device, plan, "fp32"):
            assert audit.source == "inspector"
