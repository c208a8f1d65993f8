"""Ranges of activations along full-precision traces, for each site and each point of progress.

Kept is one number a site and point of progress, whatever the number of prompts; so the scales of
any number of windows, with any clip, can be made from it later without running the model again.
Padding is never counted.  Where a recipe rotates activations, the ranges are those of the rotated
ones, and the file says so.

Only `calibrate` needs torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from engines.backend import Floats
from engines.document import Document, document_from_text
from engines.errors import InputError
from engines.model import ModelInfo

if TYPE_CHECKING:
    from engines.sampler import Pass, Request
    from exporter.denoiser import Denoiser

INT8_LARGEST = 127.0

# What a float can hold, and a scale of it too.
_LARGEST = 1e30


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What calibration saw.

    Attributes:
        sites: Names of the S sites in the order of a pass.
        progress: Fractions of the answer decided before a pass, ascending [P].
        absmax: Largest magnitude at each of them [P, S].
        n_prompts: Prompts that were run.
        tasks: Names of the tasks they came from.
        rotated: Whether the magnitudes are those of rotated activations.
    """

    sites: tuple[str, ...]
    progress: tuple[float, ...]
    absmax: NDArray[np.float32]
    n_prompts: int
    tasks: tuple[str, ...]
    rotated: bool = False

    def __post_init__(self) -> None:
        if self.absmax.shape != (len(self.progress), len(self.sites)):
            raise ValueError(
                f"absmax must be [progress, sites] = {len(self.progress), len(self.sites)}, got "
                f"{self.absmax.shape}"
            )
        if not np.isfinite(self.absmax).all() or (self.absmax < 0).any():
            raise ValueError("absmax must be finite and not negative")
        if len(set(self.sites)) != len(self.sites) or not self.progress:
            raise ValueError("sites must differ from each other, and a point of progress be there")

    @property
    def blocks(self) -> int:
        """Blocks of the denoiser; each has sites."""
        return len({site.rpartition(".")[0] for site in self.sites})

    def to_json(self) -> dict[str, object]:
        """Return plain data; `calibration_from_document` is its inverse."""
        return {
            "sites": list(self.sites),
            "progress": list(self.progress),
            "absmax": self.absmax.tolist(),
            "n_prompts": self.n_prompts,
            "tasks": list(self.tasks),
            "rotated": self.rotated,
        }


def calibrate(
    denoiser: Denoiser,
    requests: Sequence[Request],
    model: ModelInfo,
    batch: int = 32,
    on_batch: Callable[[int], None] | None = None,
    on_pass: Callable[[Pass], None] | None = None,
    rotate: bool = False,
) -> Calibration:
    """Run the requests in full precision and return the ranges seen.

    Args:
        denoiser: The model.
        requests: Prompts with their sampler settings; ragged lengths and mixed tasks are fine.
        model: Its identity.
        batch: Rows at once; changes nothing but speed and memory.
        on_batch: Called with the number of requests done.
        on_pass: Called before each pass; requests are counted within the batch.
        rotate: Note the magnitudes of rotated activations.

    Raises:
        InputError: There is no request, or a site never saw anything but zeros.
        BackendError: The model gives something that is not finite.
    """
    from dataclasses import replace

    from engines.sampler import generate
    from engines.schedule import Schedule
    from exporter.framework import TorchBackend
    from exporter.names import sites_of_blocks

    if not requests:
        raise InputError("there are no calibration prompts; name a task that has some")
    seen: dict[float, Floats] = {}

    def observe(largest: Floats, progress: Floats) -> None:
        for row, at in zip(largest, progress.tolist(), strict=True):
            point = round(at, 6)
            seen[point] = np.maximum(seen[point], row) if point in seen else row

    backend = TorchBackend(denoiser, observe, rotate)
    full = Schedule.uniform(backend.precision.name, 1)
    for start in range(0, len(requests), batch):
        part = [replace(request, schedule=full) for request in requests[start : start + batch]]
        generate(part, {backend.precision.name: backend}, model, on_pass=on_pass)
        if on_batch is not None:
            on_batch(start + len(part))
    sites, points = sites_of_blocks(denoiser.config.layers), tuple(sorted(seen))
    absmax = np.stack([seen[point] for point in points]).astype(np.float32)
    dead = [site for site, largest in zip(sites, absmax.max(0), strict=True) if largest == 0]
    if dead:
        raise InputError(
            f"the site {dead[0]} saw nothing but zeros in calibration ({len(dead)} of "
            f"{len(sites)} sites); the weights before it are zero, or so small or "
            f"large that nothing is left; check the checkpoint"
        )
    return Calibration(
        sites=sites,
        progress=points,
        absmax=absmax,
        n_prompts=len(requests),
        tasks=tuple(dict.fromkeys(request.task for request in requests)),
        rotated=rotate,
    )


def window_scales(
    calibration: Calibration, windows: int, clip: float, most: float = INT8_LARGEST
) -> NDArray[np.float32]:
    """Return the scale of a step at each site [W, S]: clip * largest magnitude / most.

    A site that saw only zeros in a window gets the scale of the whole answer.

    Args:
        calibration: The largest magnitudes.
        windows: W.
        clip: Share of them that still fits.
        most: The largest number of the format: 127 for int8.

    Raises:
        InputError: No point of progress lies in some window.
        ValueError: clip is not in (0, 1].
    """
    if not 0.0 < clip <= 1.0:
        raise ValueError(f"0 < clip <= 1 must hold, got {clip}")
    points = np.array(calibration.progress)
    # Points are kept to six decimals, so one at an edge may lie a little before it.
    window = np.clip(np.floor((points + 1e-6) * windows).astype(int), 0, windows - 1)
    empty = sorted(set(range(windows)) - set(window.tolist()))
    if empty:
        raise InputError(
            f"window {empty[0]} of {windows} is never reached: calibration saw the points of "
            f"progress {', '.join(f'{p:.3g}' for p in points)}; use fewer windows, or calibrate "
            f"with more steps"
        )
    largest = np.stack([calibration.absmax[window == w].max(0) for w in range(windows)])
    largest = np.where(largest > 0, largest, calibration.absmax.max(0))
    scales: NDArray[np.float32] = (largest * (clip / most)).astype(np.float32)
    return scales


def read_calibration(file: Path) -> Calibration:
    """Return the calibration of an export.

    Raises:
        InputError: The file is missing or at fault.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise InputError(f"cannot read {str(file)!r}: {error}; export again") from error
    return calibration_from_document(document_from_text(text, str(file)))


def calibration_from_document(top: Document) -> Calibration:
    """Return the calibration that plain data holds.

    Raises:
        InputError: It is at fault.
    """
    rows = [[value.number() for value in row.entries()] for row in top["absmax"].entries()]
    rotated = top.get("rotated")  # absent in files of before there were rotations
    if any(abs(value) > _LARGEST for row in rows for value in row):
        top.fail(f"absmax holds a number above {_LARGEST:g}; export again")
    try:
        return Calibration(
            sites=tuple(site.name() for site in top["sites"].entries()),
            progress=tuple(point.number() for point in top["progress"].entries()),
            absmax=np.array(rows, np.float32),
            n_prompts=top["n_prompts"].integer(),
            tasks=tuple(task.name() for task in top["tasks"].entries()),
            rotated=rotated is not None and rotated.flag(),
        )
    except ValueError as error:
        top.fail(f"{error}; export again")
