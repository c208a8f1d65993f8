"""What a backend can be told besides the graph, and the choices that a search may try."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from engines.machine import usable_cores
from engines.targets import target_from_name

PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
OPTIMIZATIONS = ("all", "extended", "basic")

# How a plan is given its weights: inputs, from one allocation a family, or constants of its own.
# Inputs are what is built by default, where they fuse.
INPUT, CONSTANT = WEIGHTS = ("input", "constant")

# More would only ask the system for threads until it has none left.
MOST_THREADS = 1024


@dataclass(frozen=True, kw_only=True)
class OrtOptions:
    """How a session is made.

    Attributes:
        provider: "cpu" or "cuda".
        threads: Threads of one pass on the CPU; 0 for every core that the process may use.
        graph_optimization: "all", "extended" or "basic".
        spinning: Whether idle threads spin; several times slower where others want the core.
        arena: Whether CPU memory is pooled.
        exact: Compute in floating point whatever the graph only rounds: for graphs that stand in
            for another backend's.
    """

    provider: str = "cpu"
    threads: int = 0
    graph_optimization: str = "all"
    spinning: bool = False
    arena: bool = True
    exact: bool = False

    def __post_init__(self) -> None:
        if self.provider not in PROVIDERS:
            raise ValueError(
                f"provider must be one of {', '.join(PROVIDERS)}, got {self.provider!r}"
            )
        if not 0 <= self.threads <= MOST_THREADS:
            raise ValueError(f"0 <= threads <= {MOST_THREADS} must hold, got {self.threads}")
        if self.graph_optimization not in OPTIMIZATIONS:
            raise ValueError(
                f"graph_optimization must be one of {', '.join(OPTIMIZATIONS)}, "
                f"got {self.graph_optimization!r}"
            )


def session_options(target: str, given: Mapping[str, Any] | None = None) -> OrtOptions:
    """Return how sessions are made for a target, with some options.

    For one of TensorRT, sessions on this machine's processor stand in for its engines: they run
    the graphs that round as those do, in floating point.

    Raises:
        InputError: There is no such target.
    """
    if target_from_name(target).ahead:
        return OrtOptions(provider="cpu", exact=True, **(given or {}))
    return OrtOptions(provider=target, **(given or {}))


# What each option of a session changes.
SAYS = {
    "threads": "threads of a pass; 0 for every core",
    "graph_optimization": "how far a session rewrites its graph",
    "spinning": "whether idle threads spin; slower where others want the core",
    "arena": "whether memory is pooled",
}


def own_options(provider: str) -> dict[str, int | float | str | bool]:
    """Return the options that a target's engines have, each with its default."""
    lacks = {"provider", "exact"}
    if target_from_name(provider).ahead:
        return {}  # what runs here is not what is shipped
    if provider != "cpu":
        lacks |= {"threads", "spinning", "arena"}
    defaults = OrtOptions(provider=provider)
    return {
        each.name: getattr(defaults, each.name)
        for each in fields(OrtOptions)
        if each.name not in lacks
    }


def option_choices(provider: str) -> dict[str, tuple[int | str | bool, ...]]:
    """Return the values that a search may try of each option that a target's engines have."""
    cores = usable_cores()
    every: dict[str, tuple[int | str | bool, ...]] = {
        "threads": (0, *sorted({1, max(1, cores // 2)} - {cores})),
        "graph_optimization": OPTIMIZATIONS[:2],
        "spinning": (False, True),
        "arena": (True, False),
    }
    return {name: every[name] for name in own_options(provider)}
