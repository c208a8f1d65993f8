"""Figures of half a billion weights: memory and disk from `export` to `verify`, without a GPU.

A checkpoint of random weights in LLaDA's format and bfloat16 is exported to int8 and fp8 of
TensorRT, tuned for it (plans of TensorRT-RTX), and the bundle verified, each as the command that a
user would run.  Memory is that of all processes of a command at once, pages that several share
divided among them; disk is what the commands leave or write in between, each file counted once.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from exporter.checkpoint import save_checkpoint
from exporter.denoiser import Denoiser, DenoiserConfig
from exporter.plant import PlantConfig, plant_checkpoint
from exporter.train import vocabulary
from tests.bench.figure import Figure
from tests.bench.generate import BUNDLE, ROOT

CONFIG = DenoiserConfig(
    hidden=1024,
    layers=26,
    heads=16,
    kv_heads=16,
    ffn=4096,
    vocab=32_000,
    mask_id=len(vocabulary()) - 1,
    max_length=64,
    rope_theta=10000.0,
)
TARGET = "rtx-sm89"
WINDOWS, ANSWER = 8, 8

# Made up: nothing here runs a plan.
LATENCIES = {
    "format": "cadenza-latencies/1",
    "source": "predicted",
    "target": TARGET,
    "device": "no device, made up",
    "shape": {"batch": 2, "prompt": 16, "answer": ANSWER},
    "rows": [
        {"precision": name, "latency_ms": ms, "low": ms, "high": ms, "n": 1}
        for name, ms in {"fp32": 8.0, "int8-w": 3.0, "int8": 2.0, "fp8": 2.0}.items()
    ],
}

_POLL_S = 0.2


def write_checkpoint(folder: Path) -> int:
    """Write the checkpoint, unless it is there, and return its weights' bytes.

    Residuals are mostly the embedding, so that answers do not hang on each last bit as chaos does,
    and activations have outliers as large models' have, which few static levels spoil.
    """
    if not folder.is_dir():
        torch.manual_seed(0)
        with torch.device("meta"):
            shapes = Denoiser(CONFIG)
        denoiser = shapes.to(torch.bfloat16).to_empty(device="cpu")
        with torch.no_grad():
            for name, each in denoiser.named_parameters():
                if each.ndim == 1:
                    each.uniform_(0.5, 1.5)
                else:
                    each.normal_(0.0, 1.0 if name == "embed.weight" else 0.01)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            plain = Path(scratch) / "plain"
            save_checkpoint(denoiser, vocabulary(), plain, kind="BF16")
            plant_checkpoint(plain, folder, PlantConfig(factor=32.0, channels=8))
    return (folder / "model.safetensors").stat().st_size


def write_prompts(file: Path, of_split: Mapping[str, int]) -> None:
    """Write a task of prompts without answers, so many for each split."""
    letters = "abcdefgh"
    lines = [
        {"id": f"{split}{n}", "prompt": f"edit:{letters[n]}{letters[place]},abcd", "split": split}
        for place, (split, count) in enumerate(of_split.items())
        for n in range(count)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


@dataclass
class Watch:
    """What the processes of a command took at most, and the files below a folder.

    Attributes:
        process: The command's.
        folder: Where it writes.
        memory: Bytes of memory of the command and all its children, at most.
        disk: Bytes below the folder, each file once, at most.
    """

    process: subprocess.Popen[bytes]
    folder: Path
    memory: int = 0
    disk: int = 0

    def wait(self) -> int:
        """Look until the command has ended, and return its exit code."""
        while True:
            try:
                return self.process.wait(_POLL_S)
            except subprocess.TimeoutExpired:
                self.memory = max(self.memory, sum(map(_memory, _tree(self.process.pid))))
                self.disk = max(self.disk, disk_bytes(self.folder))


def disk_bytes(folder: Path) -> int:
    """Return the bytes of the files below a folder on disk, those with several names once."""
    found: dict[tuple[int, int], int] = {}
    for path, _, names in os.walk(folder):
        for name in names:
            try:
                status = os.lstat(os.path.join(path, name))
            except FileNotFoundError:  # renamed or removed meanwhile
                continue
            found[status.st_dev, status.st_ino] = status.st_blocks * 512
    return sum(found.values())


def _tree(root: int) -> Iterator[int]:
    """Yield a process and all its children."""
    yield root
    try:
        for task in Path(f"/proc/{root}/task").iterdir():
            for child in (task / "children").read_text(encoding="utf-8").split():
                yield from _tree(int(child))
    except (FileNotFoundError, ProcessLookupError):
        return


def _memory(process: int) -> int:
    """Return the bytes of a process's memory; of a page that several share, its part."""
    try:
        for line in Path(f"/proc/{process}/smaps_rollup").read_text(encoding="utf-8").splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except (FileNotFoundError, ProcessLookupError):
        pass
    return 0


@dataclass(frozen=True)
class Multiples:
    """What the commands took, in bytes.

    Attributes:
        weights: Of the checkpoint.
        memory: At most, by command.
        disk: At most below the working folder, the checkpoint left out, by command.
        bundle: Of the bundle of int8 and int8-w on disk.
        family: Of its file of weights.
        plans: Of the plans in it, how many.
    """

    weights: int
    memory: dict[str, int]
    disk: dict[str, int]
    bundle: int
    family: int
    plans: int


@cache
def multiples() -> Multiples:
    """Run every command once and return what they took.

    One tune lets a task lose everything, so it ships the fastest, int8, with scales of its own in
    each window; another nothing, so it ships int8-w: both are plans over one file of weights.
    Latencies are made up: only memory and disk are measured here.
    """
    with tempfile.TemporaryDirectory(dir=BUNDLE.parent) as scratch:
        work = Path(scratch)
        model, export, eight, fp8 = (work / each for each in ("model", "E", "int8", "fp8"))
        weights = write_checkpoint(model)
        prompts, latencies = work / "prompts.jsonl", work / "latencies.json"
        write_prompts(prompts, {"calibration": 1, "tuning": 2, "test": 1})
        latencies.write_text(json.dumps(LATENCIES), encoding="utf-8")
        usual = f"--target {TARGET} --latencies {latencies} --mode quick --trials 1 "
        usual += f"--cache {work / 'cache'} --task fast={prompts} --task fine={prompts}"
        steps = f"--steps {ANSWER} --gen-length {ANSWER} --block-length {ANSWER}"
        commands = {
            "export": f"export {model} -o {export} --target {TARGET} --precision int8,int8-w,fp8 "
            f"--windows {WINDOWS} {steps} --shape batch=1:2:4,prompt=1:16:40 "
            f"--task small={prompts} --prompts-per-task 1",
            "tune": f"tune {export} -o {eight} {usual} --precision int8 --precision int8-w "
            f"--set space.scales=window --max-loss 10 --max-loss fast=100",
            "verify": f"verify {eight}",
            "tune fp8": f"tune {export} -o {fp8} {usual} --precision fp8 --max-loss 100",
            "verify fp8": f"verify {fp8}",
        }
        memory, disk = {}, {}
        for name, line in commands.items():
            print(f"cadenza {line}", file=sys.stderr, flush=True)
            command = [sys.executable, "-m", "cadenza", *shlex.split(line)]
            watch = Watch(subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL), work)
            if watch.wait():
                raise RuntimeError(f"cadenza {line} failed")
            memory[name], disk[name] = watch.memory, watch.disk - weights
            print(
                f"  {watch.memory / weights:.2f} times the weights of memory, "
                f"{disk[name] / weights:.2f} of disk",
                file=sys.stderr,
            )
        files = json.loads((eight / "manifest.json").read_text("utf-8"))["files"]
        return Multiples(
            weights=weights,
            memory=memory,
            disk=disk,
            bundle=disk_bytes(eight),
            family=sum(entry["bytes"] for path, entry in files.items() if "weights/" in path),
            plans=sum(path.endswith(".plan") for path in files),
        )


def plan_rss_multiple() -> Figure:
    """Return the most memory of any command over the checkpoint's bytes."""
    found = multiples()
    each = ", ".join(f"{name} {size / found.weights:.2f}" for name, size in found.memory.items())
    return _figure("plan_rss_multiple", max(found.memory.values()) / found.weights, each)


def plan_disk_multiple() -> Figure:
    """Return the most disk beside the checkpoint, over its bytes."""
    found = multiples()
    each = ", ".join(f"{name} {size / found.weights:.2f}" for name, size in found.disk.items())
    return _figure("plan_disk_multiple", max(found.disk.values()) / found.weights, each)


def bundle_disk_multiple() -> Figure:
    """Return the bytes of a bundle of two plans over those of its one file of weights."""
    found = multiples()
    return Figure(
        name="bundle_disk_multiple",
        value=found.bundle / found.family,
        unit="times the weights of int8",
        against=f"1.15, with {found.plans} plans over one file of {WINDOWS} windows",
        reference=1.15,
        spread=(found.bundle / found.family,) * 2,
        n=1,
    )


def _figure(name: str, value: float, each: str) -> Figure:
    return Figure(
        name=name,
        value=value,
        unit="times the checkpoint's bytes",
        against=f"the weights' bytes; by command: {each}",
        reference=1.0,
        spread=(value, value),
        n=1,
    )
