"""Graphs written into an EXPORT folder: bound to their weights, checked, and remembered."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from engines.manifest import Graph
from engines.precision import Precision
from exporter.graph import TAILS, with_tail
from exporter.weights import Stored, bind, check_graph, external_ranges

if TYPE_CHECKING:
    import onnx


class GraphWriter:
    """Binds, checks and writes graphs, and remembers what they are.

    Attributes:
        folder: The EXPORT folder.
        graphs: What was written, by id.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.graphs: dict[str, Graph] = {}
        self._ranges: dict[str, set[tuple[str, int, int]]] = {}

    def both_tails(
        self,
        graph: onnx.ModelProto,
        stored: Mapping[str, Stored],
        precision: Precision,
        windows: int,
        name: str = "",
        scales: tuple[tuple[float, ...], ...] | None = None,
    ) -> None:
        """Write a graph with each tail, as `NAME.TAIL`; see `write`."""
        for tail in TAILS:
            self.write(
                f"{name or precision.name}.{tail}",
                with_tail(graph, tail),
                stored,
                precision,
                tuple(range(windows)),
                scales,
            )

    def write(
        self,
        name: str,
        graph: onnx.ModelProto,
        stored: Mapping[str, Stored],
        precision: Precision,
        windows: tuple[int, ...],
        scales: tuple[tuple[float, ...], ...] | None = None,
    ) -> None:
        """Write a graph.

        Args:
            name: Its id, which ends with its tail.
            graph: Its weights without data; bound in place.
            stored: Where the weights lie, by name; those that are inputs of the graph are what
                its engine is given.
            precision: What it computes in.
            windows: The windows that it serves.
            scales: Of each window, where they are an input.
        """
        bind(graph, stored)
        check_graph(graph, self.folder)
        ranges = external_ranges(graph)
        given = {
            f"weights/{stored[each.name].file.name}"
            for each in graph.graph.input
            if each.name in stored
        }
        self._ranges.setdefault(precision.family, set()).update(ranges)
        (self.folder / f"{name}.onnx").write_bytes(graph.SerializeToString(deterministic=True))
        self.graphs[name] = Graph(
            file=f"{name}.onnx",
            tail=name.rpartition(".")[2],
            precision=precision.name,
            windows=windows,
            weights=tuple(sorted({location for location, _, _ in ranges} | given)),
            scales=scales,
        )

    def family_bytes(self) -> dict[str, int]:
        """Return the bytes of distinct weights that each family's graphs read."""
        return {
            family: sum(length for _, _, length in ranges)
            for family, ranges in self._ranges.items()
        }
