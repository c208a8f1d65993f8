"""Prompts of a file for `cadenza bench --input`, as token ids by the task that answers them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from engines.bundle import Bundle
from engines.document import document_from_text, text_from_file
from engines.errors import InputError
from engines.manifest import TOKENIZER, BundleTask
from engines.text import tokenizer_from_file
from engines.throughput import Prompts


def given_prompts(
    file: Path, bundle: Bundle, tasks: Mapping[str, BundleTask]
) -> dict[str, Prompts]:
    """Return the prompts of a file by task; a line without a task is for every one.

    Raises:
        InputError: A line is damaged, names no task of the bundle, does not fit it, or a task has
            none.
    """
    manifest = bundle.manifest
    tokenizer = tokenizer_from_file(bundle.path(TOKENIZER), manifest.model)
    found: dict[str, list[tuple[int, ...]]] = {name: [] for name in tasks}
    text = text_from_file(file, str(file), "a file of prompts, a JSON object a line")
    for number, content in enumerate(text.split("\n"), start=1):
        if not content.strip():
            continue
        line = document_from_text(content, f"{file}, line {number}")
        own = line.get("task")
        if own is not None and own.text() not in manifest.tasks:
            own.fail(f"{own.text()!r} is no task; this bundle has {', '.join(manifest.tasks)}")
        try:
            ids = tokenizer.encode(line["prompt"].text())
        except InputError as error:
            raise InputError(f"{file}, line {number}: {error}") from error
        for name in tasks if own is None else {own.text()} & set(tasks):
            longest = manifest.model.max_length - tasks[name].sampler.gen_length
            longest = min(manifest.shape.prompt[2], longest)
            if len(ids) > longest:
                line["prompt"].fail(
                    f"has {len(ids)} tokens, task {name!r} takes {longest} at most; shorten it"
                )
            found[name].append(ids)
    empty = [name for name, each in found.items() if not each]
    if empty:
        raise InputError(
            f"{str(file)!r} has no prompt for {', '.join(empty)}; leave a line's task out to use "
            f"it for every task, or name tasks with --task"
        )
    return dict(found)
