"""ONNX Runtime behind `Backend`: targets `cpu` and `cuda`.

The execution provider is named and nothing falls back: a session that would run elsewhere, and a
GEMM that did, is a `BackendError`.  What was built can be read back (`read_back=True`): a profiled
smoke pass tells the kernel, the operand type and the provider of every GEMM, so an int8 engine
that computes in floating point is found out.

The only file that imports onnxruntime, and only inside functions.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engines.backend import Floats, Ids, Mask, Served
from engines.errors import BackendError, require
from engines.machine import has_vnni, machine, usable_cores
from engines.model import (
    ENTROPY,
    IDS,
    LOGITS,
    MASK,
    POSITIONS,
    PROBABILITY,
    SCALES,
    TOKENS,
)
from engines.options import PROVIDERS, OrtOptions
from engines.ort_profile import gemms_of_profile
from engines.precision import Precision

_INPUTS = {IDS: "tensor(int64)", MASK: "tensor(bool)", POSITIONS: "tensor(int64)"}
_TAILS = {
    "serve": {TOKENS: "tensor(int64)", PROBABILITY: "tensor(float)", ENTROPY: "tensor(float)"},
    "trace": {LOGITS: "tensor(float)"},
}
_SILENT = 4  # ONNX Runtime's severity "fatal"; its errors reach us as exceptions


class OrtBackend:
    """A loaded engine: at most one session for each tail, made when first wanted.

    Attributes:
        precision: What it runs.
        options: How its sessions are made.
        built: Executed GEMMs of a pass by kernel and type of the first operand, for instance
            {"MatMulIntegerToFloat(uint8)": 14}; empty unless read back.
    """

    def __init__(
        self,
        serve: Path | None,
        trace: Path | None,
        precision: Precision,
        scales: NDArray[np.float32] | None,
        options: OrtOptions,
        light: bool = False,
    ) -> None:
        if serve is None and trace is None:
            raise ValueError("an engine needs a graph for its serve tail, its trace tail, or both")
        if scales is not None and (
            scales.ndim != 2 or not np.isfinite(scales).all() or not (scales > 0).all()
        ):
            raise ValueError(
                f"scales [windows, sites] must be positive and finite, got shape {scales.shape}"
            )
        self.precision, self.options = precision, options
        self.built: dict[str, int] = {}
        self._light = light or (options.exact and options.provider == "cpu")
        self._graphs = {"serve": serve, "trace": trace}
        self._sessions: dict[str, Any] = {}
        self._scales = None if scales is None else scales.astype(np.float32)[:, None, :]
        self._run = _run_bound if options.provider == "cuda" else _run_on_cpu
        self._failures: tuple[type[BaseException], ...] = ()

    @classmethod
    def load(
        cls,
        serve: Path | None,
        trace: Path | None,
        precision: Precision,
        scales: NDArray[np.float32] | None = None,
        options: OrtOptions | None = None,
        read_back: bool = False,
        light: bool = False,
    ) -> OrtBackend:
        """Return a loaded engine whose first session is ready.

        Args:
            serve: ONNX file with the serve tail, its weights beside it; None where not needed.
            trace: ONNX file with the trace tail, loaded when `logits` is first called, or now if
                there is no serve tail.
            precision: What the graphs hold.
            scales: Activation scales of each window [W, S], exactly where the graph has the
                input `scales`.
            options: How sessions are made; the defaults of `OrtOptions` if None.
            read_back: Run a profiled smoke pass, fill `built` and check it.
            light: Copy no weights: constants are computed anew in every pass, nothing is packed
                or pooled.  Loads quickly and takes a third of the memory where weights are not
                stored as they are multiplied; passes are slower.  For an engine that runs a few;
                those that stand in for another backend's are always light: they carry no latency.

        Raises:
            BackendError: A graph cannot be read or is not of this kind, the provider is not there
                or is not the one that ran, or an int8 engine has no integer GEMM.
            MissingExtra: onnxruntime is not installed.
        """
        engine = cls(serve, trace, precision, scales, options or OrtOptions(), light)
        engine._session("trace" if serve is None else "serve", read_back)
        return engine

    def serve(self, ids: Ids, mask: Mask, positions: Ids, progress: Floats) -> Served:
        tokens, probability, entropy = self._outputs("serve", ids, mask, positions, progress)
        return Served(tokens, probability, entropy)

    def logits(self, ids: Ids, mask: Mask, positions: Ids, progress: Floats) -> Floats:
        out: Floats = self._outputs("trace", ids, mask, positions, progress)[0]
        return out

    def _outputs(
        self, tail: str, ids: Ids, mask: Mask, positions: Ids, progress: Floats
    ) -> list[NDArray[Any]]:
        """Run a pass and return the tail's outputs; arrays of the right type are not copied."""
        session = self._sessions.get(tail)
        if session is None:
            session = self._session(tail)
        feed: dict[str, NDArray[Any]] = {
            IDS: np.ascontiguousarray(ids, np.int64),
            MASK: np.ascontiguousarray(mask, np.bool_),
            POSITIONS: np.ascontiguousarray(positions, np.int64),
        }
        if self._scales is not None:
            windows = len(self._scales)
            row = (progress * float(windows) + 1e-6).astype(np.int64).clip(0, windows - 1)
            feed[SCALES] = self._scales[row]
        try:
            return self._run(session, list(_TAILS[tail]), feed)
        except self._failures as error:
            raise BackendError(
                f"engine {self.precision.name!r} failed on a batch of {ids.shape[0]} rows of "
                f"{ids.shape[1]} tokens: {_first_line(error)}; lower the batch, or export again"
            ) from error

    def _session(self, tail: str, read_back: bool = False) -> Any:
        """Return the session of a tail, making and checking it first where it is not there."""
        path = self._graphs[tail]
        if path is None:
            raise BackendError(
                f"engine {self.precision.name!r} was loaded without its {tail} graph; "
                f"load it with the export's *.{tail}.onnx"
            )
        runtime = _onnxruntime(self.options.provider)
        self._failures = _failures(runtime)
        with tempfile.TemporaryDirectory(prefix="cadenza-") as scratch:
            session = self._open(runtime, path, Path(scratch) if read_back else None)
            self._check(session, tail, path)
            self._sessions[tail] = session
            if read_back:
                one = np.zeros((1, 1), np.int64)
                self._outputs(tail, one, np.ones((1, 1), bool), one, np.zeros(1, np.float32))
                events = Path(session.end_profiling()).read_text(encoding="utf-8")
                self.built = gemms_of_profile(events, path.name, self.precision, self.options)
        return session

    def _open(self, runtime: ModuleType, path: Path, profile: Path | None) -> Any:
        """Return a session on the provider asked for, and on no other."""
        settings = _session_options(runtime, self.precision, self.options)
        if self._light:
            settings.enable_cpu_mem_arena = False
            settings.add_session_config_entry("session.disable_prepacking", "1")
        if profile is not None:
            settings.enable_profiling = True
            settings.profile_file_prefix = str(profile / "pass")
        wanted = PROVIDERS[self.options.provider]
        # TF32 would round the inputs of fp32 GEMMs to 10 bits without a word.
        given = {"use_tf32": "0"} if self.options.provider == "cuda" else {}
        try:
            session = runtime.InferenceSession(
                os.fspath(path),
                settings,
                providers=[(wanted, given)],
                enable_fallback=False,
                disabled_optimizers=["ConstantFolding"] if self._light else None,
            )
        except self._failures as error:
            raise BackendError(
                f"{path.name} could not be loaded on {self.options.provider}: "
                f"{_first_line(error)}; export again, or rebuild the bundle"
            ) from error
        got = session.get_providers()[0]
        if got != wanted:
            raise BackendError(
                f"{path.name}: asked for {wanted}, but ONNX Runtime chose {got}; install the "
                f"CUDA and cuDNN libraries that onnxruntime-gpu {runtime.__version__} needs, or "
                f"use target cpu"
            )
        return session

    def _check(self, session: Any, tail: str, path: Path) -> None:
        """Hold the graph's inputs and outputs to `engines.model`."""
        inputs = {node.name: node for node in session.get_inputs()}
        types = {name: node.type for name, node in inputs.items()}
        expected = dict(_INPUTS)
        if self._scales is not None:
            expected[SCALES] = "tensor(float)"
        outputs = {node.name: node.type for node in session.get_outputs()}
        for what, got, want in (
            ("inputs", types, expected),
            ("outputs", outputs, _TAILS[tail]),
        ):
            if got != want:
                raise BackendError(
                    f"{path.name}: {what} of a {tail} graph are {_said(want)}, this one has "
                    f"{_said(got)}; export again with this version of Cadenza"
                )
        if self._scales is not None:
            sites = inputs[SCALES].shape[-1]
            if isinstance(sites, int) and sites != self._scales.shape[-1]:
                raise BackendError(
                    f"{path.name} takes {sites} activation scales, {self._scales.shape[-1]} were "
                    f"given; export again"
                )


def session_from_model(
    model: bytes, folder: Path, precision: Precision, options: OrtOptions, rewritten: bool = True
) -> Any:
    """Return a session of a graph in memory on the CPU, for looking into it.

    Args:
        model: The graph, serialized.
        folder: Where it would lie: its weights are found from there, wherever the process is.
        precision: What it holds.
        options: How sessions are made.
        rewritten: Whether the graph may be rewritten; otherwise each node runs as it stands.

    Raises:
        BackendError: ONNX Runtime cannot run the graph; ends with its own words.
    """
    runtime = _onnxruntime("cpu")
    settings = _session_options(runtime, precision, options)
    settings.add_session_config_entry(
        "session.model_external_initializers_file_folder_path", os.fspath(folder.resolve())
    )
    if not rewritten:
        settings.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        return runtime.InferenceSession(model, settings, providers=[PROVIDERS["cpu"]])
    except _failures(runtime) as error:
        raise BackendError(
            f"ONNX Runtime {runtime.__version__} cannot run this graph of {precision.name}: "
            f"{_first_line(error)}; leave {precision.name} out"
        ) from error


def failures() -> tuple[type[BaseException], ...]:
    """Return what a session raises when it is run."""
    return _failures(_onnxruntime("cpu"))


def environment(options: OrtOptions | None = None) -> dict[str, str]:
    """Return what a build and a latency depend on besides the graph and the options.

    Raises:
        MissingExtra: onnxruntime is not installed.
    """
    provider = (options or OrtOptions()).provider
    runtime = _imported(provider)
    return {
        "onnxruntime": runtime.__version__,
        "provider": PROVIDERS[provider],
        **machine(gpu=provider == "cuda"),
    }


_EXTRA = {"cpu": ("ort", "target cpu"), "cuda": ("ort-gpu", "target cuda")}


def _imported(provider: str) -> ModuleType:
    """Return the module, silenced.

    Its import looks for GPUs and warns on the file descriptor itself where there is none.
    """
    if "onnxruntime" not in sys.modules:
        kept = os.dup(2)
        try:
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), 2)
                require("onnxruntime", *_EXTRA[provider])
        finally:
            os.dup2(kept, 2)
            os.close(kept)
    runtime = require("onnxruntime", *_EXTRA[provider])
    runtime.set_default_logger_severity(_SILENT)
    return runtime


def _onnxruntime(provider: str) -> ModuleType:
    """Return the module; refuses one that lacks the provider."""
    runtime = _imported(provider)
    if PROVIDERS[provider] not in runtime.get_available_providers():
        raise BackendError(
            f"target {provider} needs {PROVIDERS[provider]}, but the installed onnxruntime "
            f"{runtime.__version__} has only {', '.join(runtime.get_available_providers())}; "
            f"install it with: pip install 'cadenza[{_EXTRA[provider][0]}]'"
        )
    return runtime


def _failures(runtime: ModuleType) -> tuple[type[BaseException], ...]:
    """Return what onnxruntime raises: classes of its own, which share no base but Exception."""
    raised = vars(runtime.capi.onnxruntime_pybind11_state).values()
    own = [c for c in raised if isinstance(c, type) and issubclass(c, Exception)]
    return (*own, RuntimeError, ValueError)


def _session_options(runtime: ModuleType, precision: Precision, options: OrtOptions) -> Any:
    """Return onnxruntime's SessionOptions for a precision."""
    settings = runtime.SessionOptions()
    settings.log_severity_level = _SILENT
    settings.intra_op_num_threads = options.threads or usable_cores()
    settings.inter_op_num_threads = 1
    settings.enable_cpu_mem_arena = options.arena
    settings.graph_optimization_level = getattr(
        runtime.GraphOptimizationLevel, f"ORT_ENABLE_{options.graph_optimization.upper()}"
    )
    entries = {
        "session.intra_op.allow_spinning": "1" if options.spinning else "0",
        # Without VNNI 8-bit products would saturate: take the exact way there.  Elsewhere it only
        # costs, more than half of an int8 engine's speed.
        "session.x64quantprecision": "0" if has_vnni() else "1",
    }
    if precision.simulated or options.exact:  # what is only rounded is not computed in integers
        entries |= {
            "session.disable_quant_qdq": "1",
            "session.qdq_matmulnbits_accuracy_level": "1",
        }
    for key, value in entries.items():
        settings.add_session_config_entry(key, value)
    return settings


def _run_on_cpu(session: Any, outputs: list[str], feed: dict[str, Any]) -> list[NDArray[Any]]:
    """Run on arrays in this process's memory, without copying them."""
    result: list[NDArray[Any]] = session.run(outputs, feed)
    return result


def _run_bound(session: Any, outputs: list[str], feed: dict[str, Any]) -> list[NDArray[Any]]:
    """Run with inputs copied to the device once and outputs straight to host memory."""
    binding = session.io_binding()
    for name, value in feed.items():
        binding.bind_cpu_input(name, value)
    for name in outputs:
        binding.bind_output(name)
    session.run_with_iobinding(binding)
    result: list[NDArray[Any]] = binding.copy_outputs_to_cpu()
    return result


def _said(counts: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in counts.items())


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
