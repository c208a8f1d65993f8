"""Figures of half a billion weights: memory and disk from `export` to `verify`, without a GPU.

A checkpoint of random weights in LLaDA's format and bfloat16 is exported to int8 and fp8 of
TensorRT, tuned for it (plans of TensorRT-RTX), and the bundle verified, each as the command that a
user would run.  Memory is that of all processes of a command at once, pages that several share
divided among them; disk is what the commands leave or write in between, each file counted once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import torch

from engines.files import digest_file
from exporter.checkpoint import save_checkpoint
from exporter.denoiser import Denoiser, DenoiserConfig
from exporter.train import vocabulary
from tests.bench.figure import Figure
from tests.bench.generate import ROOT

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

_POLL_S = 0.2


def write_checkpoint(folder: Path) -> int:
    """Write the checkpoint of random weights, unless it is there, and return its weights' bytes."""
    if not (folder / "tokenizer_config.json").is_file():
        torch.manual_seed(0)
        with torch.device("meta"):
            shapes = Denoiser(CONFIG)
        denoiser = shapes.to(torch.bfloat16).to_empty(device="cpu")
        with torch.no_grad():
            for each in denoiser.parameters():
                if each.ndim == 2:
                    each.normal_(0.0, 0.02)
                else:
                    each.uniform_(0.5, 1.5)
        save_checkpoint(denoiser, vocabulary(), folder, kind="BF16")
    return (folder / "model.safetensors").stat().st_size


def write_prompts(file: Path, each: int = 2) -> None:
    """Write a task of prompts without answers, some for each split."""
    letters = "abcdefgh"
    lines = [
        {"id": f"{split}{n}", "prompt": f"edit:{letters[n]}{letters[s]},abcdefgh", "split": split}
        for s, split in enumerate(("calibration", "tuning", "test"))
        for n in range(each)
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
    trail: list[tuple[float, int]] = field(default_factory=list)

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
