"""The data of the local harness tasks: edits of letters, drawn by the built-in task."""

from __future__ import annotations

import random
from typing import Any

import datasets

from calib_data.tasks import TASKS

TRAIN, TEST, REPEATED = 60, 40, 7


def draw(count: int, seed: str) -> list[dict[str, str]]:
    """Return `count` questions with their answers; the same every time."""
    rng = random.Random(seed)
    pairs = [TASKS["edit"].draw(rng) for _ in range(count)]
    return [{"question": question, "answer": answer} for question, answer in pairs]


def with_training_split(**settings: Any) -> Any:
    """Return a training and a test split; some test questions are in the training split too."""
    test = draw(TEST, "test")
    train = draw(TRAIN - REPEATED, "train") + test[:REPEATED]
    return _dataset({"train": train, "test": test})


def with_one_split(**settings: Any) -> Any:
    """Return a test split alone, which holds some questions twice."""
    test = draw(TEST - REPEATED, "test")
    return _dataset({"test": test + test[:REPEATED]})


def length(doc: dict[str, str], results: list[str]) -> dict[str, int]:
    """Return a metric that is no verdict, and one that is."""
    return {"length": len(results[0]) + 2, "verdict": int(results[0] == doc["answer"])}


def _dataset(parts: dict[str, list[dict[str, str]]]) -> Any:
    return datasets.DatasetDict(
        {name: datasets.Dataset.from_list(docs) for name, docs in parts.items()}
    )
