"""Plant outliers in a checkpoint without changing its function: `python -m exporter.plant`.

Large language models have a few channels of activations far above the others, and they are what
makes few bits hard; a small model has none.  Here some channels are multiplied by a power of two
where they are made and divided where they are read, so every product stays the same number and
every activation there has outliers:

    attn_in    gain of attn_norm x f   columns of q, k and v / f
    attn_out   rows (and bias) of v x f   the columns of attn_out that read them / f
    ff_in      gain of ff_norm x f     columns of gate and up / f
    ff_down    rows of up x f          columns of down / f

With grouped heads a channel of v is read by one column of attn_out for each query head of its
group.  Weights keep their type: a power of two moves exponents alone.
"""

from __future__ import annotations

import argparse
import math
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engines.errors import InputError
from engines.files import whole_folder
from engines.terminal import run_command
from exporter.checkpoint import read_checkpoint
from exporter.denoiser import DenoiserConfig
from exporter.names import sites_of_blocks
from exporter.weights import Item, Stored, floats, mapped, read_header, write_family

SITES = tuple(site.rpartition(".")[2] for site in sites_of_blocks(1))


@dataclass(frozen=True, kw_only=True)
class PlantConfig:
    """Which outliers are planted.

    Attributes:
        factor: What a channel is multiplied by; a power of two above 1.
        channels: How many channels of each site of each block.
        seed: Of the choice of channels.
        sites: Kinds of sites, of `SITES`.
    """

    factor: float = 8.0
    channels: int = 4
    seed: int = 0
    sites: tuple[str, ...] = SITES

    def __post_init__(self) -> None:
        if not 1 < self.factor <= 2.0**20 or math.frexp(self.factor)[0] != 0.5:
            raise ValueError(f"factor must be a power of two from 2 to 2^20, got {self.factor}")
        if self.channels < 1 or self.seed < 0:
            raise ValueError(f"channels >= 1 and seed >= 0 must hold, got {self}")
        if not self.sites or set(self.sites) - set(SITES):
            raise ValueError(f"sites are {', '.join(SITES)}, got {', '.join(self.sites)}")


@dataclass(frozen=True, slots=True)
class Scaling:
    """What a parameter is multiplied by: its rows [out], and a matrix's columns [in] too."""

    rows: NDArray[np.float32]
    columns: NDArray[np.float32] | None

    def __call__(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the scaled values of a parameter [out, in] or [out]."""
        if self.columns is None:
            return values * self.rows
        return values * self.rows[:, None] * self.columns


def plant(config: DenoiserConfig, wanted: PlantConfig) -> dict[str, Scaling]:
    """Return the scaling of each parameter that planting changes, by the denoiser's names.

    Pure.  The denoiser with scaled parameters has the same logits; products stay equal to the bit
    as long as no number leaves the range of its type.

    Raises:
        ValueError: There are fewer channels than are asked for.
    """
    width, hidden = config.head_width, config.hidden
    values = config.kv_heads * width
    sizes = {"attn_in": hidden, "attn_out": values, "ff_in": hidden, "ff_down": config.ffn}
    for site in wanted.sites:
        if wanted.channels > sizes[site]:
            raise ValueError(f"{site} has {sizes[site]} channels, got {wanted.channels=}")
    rng = np.random.default_rng(wanted.seed)
    found: dict[str, Scaling] = {}
    for block in range(config.layers):
        up: dict[str, NDArray[np.float32]] = {}
        for site, size in sizes.items():  # drawn for all, so that a choice of sites moves none
            up[site] = np.ones(size, np.float32)
            chosen = rng.choice(size, min(wanted.channels, size), replace=False)
            if site in wanted.sites:
                up[site][chosen] = wanted.factor
        # Query head h reads the keys and values of head h // group.
        group = config.heads // config.kv_heads
        mixed = np.repeat(up["attn_out"].reshape(config.kv_heads, width), group, axis=0).ravel()
        layers: dict[str, tuple[NDArray[np.float32], NDArray[np.float32] | None]] = {
            "attn_norm": (up["attn_in"], None),
            "q_proj": (_ones(hidden), up["attn_in"]),
            "k_proj": (_ones(values), up["attn_in"]),
            "v_proj": (up["attn_out"], up["attn_in"]),
            "attn_out": (_ones(hidden), mixed),
            "ff_norm": (up["ff_in"], None),
            "ff_gate": (_ones(config.ffn), up["ff_in"]),
            "ff_up": (up["ff_down"], up["ff_in"]),
            "ff_down": (_ones(hidden), up["ff_down"]),
        }
        for layer, (rows, read) in layers.items():
            columns = None if read is None else 1.0 / read
            found[f"blocks.{block}.{layer}.weight"] = Scaling(rows, columns)
        if config.qkv_bias:
            found[f"blocks.{block}.v_proj.bias"] = Scaling(up["attn_out"], None)
    return found


def _ones(size: int) -> NDArray[np.float32]:
    return np.ones(size, np.float32)


def plant_checkpoint(model: Path, out: Path, wanted: PlantConfig) -> Path:
    """Write a checkpoint with planted outliers, in the format of its source; return its folder.

    Raises:
        InputError: The source is at fault, too narrow, `out` is there already, or a weight would
            leave the range of its type.
    """
    checkpoint = read_checkpoint(model)
    if out.resolve().is_relative_to(model.resolve()):
        raise InputError(
            f"{str(out)!r} lies in the checkpoint's folder, which is only read; choose another "
            f"place"
        )
    try:
        scalings = plant(checkpoint.config, wanted)
    except ValueError as error:
        raise InputError(f"{error}; plant fewer channels") from error
    by_key = {checkpoint.keys[name]: scaling for name, scaling in scalings.items()}
    with whole_folder(out, force=False, is_ours=lambda _: False, kind="checkpoint") as folder:
        for file in checkpoint.files:
            write_family(folder / file.name, _items(read_header(file), by_key))
        for file in sorted(model.glob("*.json")):  # config, index of shards, tokenizer
            if file.is_file():
                shutil.copyfile(file, folder / file.name)
        read_checkpoint(folder)
    return out


def _items(tensors: Mapping[str, Stored], scalings: Mapping[str, Scaling]) -> list[Item]:
    """Return the tensors of a file in their order; bytes are made when they are written."""
    return [
        Item(
            name,
            stored.kind,
            stored.shape,
            partial(_scaled, name, stored, scalings[name])
            if name in scalings
            else partial(mapped, stored),
        )
        for name, stored in tensors.items()
    ]


def _scaled(name: str, stored: Stored, scaling: Scaling) -> NDArray[np.generic]:
    """Return the scaled tensor in its own type.

    Raises:
        InputError: A number does not fit the type any more.
    """
    before = floats(stored)
    with np.errstate(over="ignore", under="ignore"):
        values = scaling(before)
        made: NDArray[np.generic]
        if stored.kind == "F16":
            made = values.astype("<f2")
            again = made.astype(np.float32)
        elif stored.kind == "BF16":
            made = (values.view(np.uint32) >> 16).astype("<u2")
            again = (made.astype(np.uint32) << 16).view(np.float32)
        else:
            made = again = values.astype("<f4")
        undone = Scaling(
            1.0 / scaling.rows, None if scaling.columns is None else 1.0 / scaling.columns
        )
        exact = np.array_equal(undone(again), before, equal_nan=True)
    if not exact:
        raise InputError(
            f"{stored.file}: {name} cannot be scaled exactly in {stored.kind}; use a smaller "
            f"factor, or a checkpoint in F32"
        )
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Plant outliers and return the exit code."""
    defaults = PlantConfig()
    parser = argparse.ArgumentParser(
        prog="python -m exporter.plant",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("model", metavar="MODEL", type=Path, help="the checkpoint's folder; it is only read")
    add("-o", "--output", metavar="OUT", type=Path, required=True, help="the folder to write")
    add(
        "--factor",
        type=float,
        default=defaults.factor,
        help=f"a power of two (default: {defaults.factor:g})",
    )
    add(
        "--channels",
        type=int,
        default=defaults.channels,
        help=f"of each site of each block (default: {defaults.channels})",
    )
    add("--seed", type=int, default=defaults.seed, help=f"(default: {defaults.seed})")
    add(
        "--sites",
        default=",".join(defaults.sites),
        help=f"kinds of sites, separated by commas (default: {','.join(defaults.sites)})",
    )

    def body(args: argparse.Namespace) -> int:
        try:
            wanted = replace(
                defaults,
                factor=args.factor,
                channels=args.channels,
                seed=args.seed,
                sites=tuple(args.sites.split(",")),
            )
        except ValueError as error:
            raise InputError(f"{error}; see --help") from error
        print(plant_checkpoint(args.model, args.output, wanted))
        return 0

    return run_command(parser, body, sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    sys.exit(main())
