"""Laws of how memory and disk of commands are watched."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from exporter.denoiser import DenoiserConfig
from exporter.weights import read_header
from tests.bench import large
from tests.bench.large import Watch, disk_bytes, write_checkpoint, write_prompts
from tests.tiny_export import tiny_config

_MIB = 1 << 20


def test_a_file_with_two_names_counts_once(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(os.urandom(_MIB))
    alone = disk_bytes(tmp_path)
    (tmp_path / "folder").mkdir()
    os.link(tmp_path / "a", tmp_path / "folder" / "b")
    assert disk_bytes(tmp_path) == alone >= _MIB


def test_memory_is_that_of_a_command_and_its_children_together(tmp_path: Path) -> None:
    holds = "x = bytearray(64 << 20); import time; time.sleep(1.5)"
    parent = (
        f"import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', {holds!r}]); "
        f"{holds}; child.wait()"
    )
    watch = Watch(subprocess.Popen([sys.executable, "-c", parent]), tmp_path)
    assert watch.wait() == 0
    assert watch.memory >= 2 * 64 * _MIB


def test_a_command_that_fails_says_so(tmp_path: Path) -> None:
    watch = Watch(subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"]), tmp_path)
    assert watch.wait() == 3


def test_the_checkpoint_is_of_bfloat16_and_half_a_billion_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = large.CONFIG
    square = config.hidden**2
    block = 4 * square + 3 * config.hidden * config.ffn
    assert 0.45e9 < config.layers * block + 2 * config.vocab * config.hidden < 0.55e9
    small: DenoiserConfig = tiny_config()
    monkeypatch.setattr(large, "CONFIG", small)
    size = write_checkpoint(tmp_path / "model")
    stored = read_header(tmp_path / "model" / "model.safetensors")
    assert {each.kind for each in stored.values()} == {"BF16"}
    assert size > sum(each.size for each in stored.values())


def test_each_split_has_its_prompts(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    write_prompts(file, {"calibration": 2, "test": 3})
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["split"] for line in lines] == ["calibration"] * 2 + ["test"] * 3
    assert len({line["prompt"] for line in lines}) == len(lines)
