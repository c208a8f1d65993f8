"""`cadenza bench BUNDLE`: what ships and each uniform schedule of its engines, batch by batch.

    bundle -> schedules of a task: the one that ships, each uniform one  ->  each batch:
        speed, all schedules in turns in this process  |  memory, each in a process of its own

Tasks of one schedule and one sampler are measured once.  What is finished is kept in the cache
until the whole is: an interrupted bench goes on where it was, a finished one measures anew.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from engines.backend import Backend
from engines.build import Cache, digest_json
from engines.bundle import Bundle, read_bundle
from engines.errors import InputError
from engines.footprint import engines_of, footprint
from engines.machine import busy, machine, state
from engines.manifest import BundleTask
from engines.noise import told_apart
from engines.options import session_options
from engines.ort import environment
from engines.precision import FULL_PRECISION
from engines.schedule import THRESHOLD, SamplerConfig, Schedule
from engines.targets import target_from_name
from engines.terminal import Progress, plain
from engines.throughput import Prompts, Throughput, canned_prompts, measure_throughput
from tuner.bench_config import BenchConfig
from tuner.bench_prompts import given_prompts

FORMAT = "cadenza-bench/1"
SHIPS = "ships"

_RUN, _PIECE = "bench-run", "bench"

Json = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class _Bench:
    """A bundle that is being measured.

    Attributes:
        bundle: Every byte checked.
        target: One of its targets.
        config: What is asked for.
        engines: Those that there are, by precision.
        length: Tokens of a canned prompt.
        prompts: By task; None for canned ones.
        cache: Where pieces are kept.
        run: What no other command and no finished run of this one has.
        counts: Pieces measured now, and pieces kept by an interrupted run.
        known: Keys of both: tasks may have a piece in common.
        notes: Warnings; grows.
    """

    bundle: Bundle
    target: str
    config: BenchConfig
    engines: Mapping[str, Backend]
    length: int
    prompts: Mapping[str, Prompts] | None
    cache: Cache
    run: str
    counts: dict[str, int] = field(default_factory=lambda: {"measured": 0, "resumed": 0})
    known: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)

    def kept(self, what: Json, make: Callable[[], Json]) -> Json:
        """Return a piece of this run, made unless an interrupted one has made it."""
        key = digest_json([self.run, what])
        found: Json | None = self.cache.get(_PIECE, key)
        if key not in self.known:
            self.known.add(key)
            self.counts["measured" if found is None else "resumed"] += 1
        if found is None:
            found = make()
            self.cache.put(_PIECE, key, found)
        return found

    def batches(self, task: str, rows: int) -> list[Prompts]:
        """Return the prompts of each round: all of a file in turn, or one canned batch."""
        config = self.config
        if self.prompts is None:
            model = self.bundle.manifest.model
            return [canned_prompts(rows, self.length, model, config.seed)]
        given = self.prompts[task]
        count = -(-len(given) // rows)
        return [
            [given[(turn * rows + row) % len(given)] for row in range(rows)]
            for turn in range(count)
        ]


def bench_bundle(config: BenchConfig, cache: Cache, say: Callable[[str], None]) -> Json:
    """Return what a bundle does at each batch, as `--json` prints it.

    Under `tasks`, NAME, `batches` stands for each batch: `tokens` of a round, `rounds`, and
    `lanes`, the schedules, each with `tokens_per_s` {median, low, high}, `latency_ms` {p50, p95,
    p99: {value, low, high, n, needed}} (null where n < needed), `passes`, `mean_bits`, `peak_mib`,
    `device_bytes`, and `ships_over_this` {median, low, high}, a ratio of tokens a second paired
    by round; then `best_uniform`, the label of the fastest uniform one, whatever its quality, and
    `ships_over_best_uniform`.

    Raises:
        InputError: A task, a batch, a prompt or a target is at fault, or the bundle is damaged.
        BackendError: An engine cannot be loaded or failed.
    """
    bundle = read_bundle(config.path)
    manifest = bundle.manifest
    target = _target(bundle, config.target)
    tasks = _tasks(bundle, target, config.tasks)
    rows = config.rows(manifest.shape)
    length = config.shape(manifest.shape).prompt[1]
    prompts = None if config.input is None else given_prompts(config.input, bundle, tasks)
    if prompts is None:
        _check_length(bundle, tasks, length)
    warning = busy(state())
    if warning is not None:
        say(f"warning: {warning}")
    device = _environment(target)
    command = digest_json([bundle.digest, _plain(config, prompts), target, rows, device])
    number = cache.get(_RUN, command) or 0
    executed = [n for n in manifest.serving(target) if not manifest.precisions[n].simulated]
    engines, _ = engines_of(bundle, target, config.threads, executed)
    bench = _Bench(
        bundle=bundle,
        target=target,
        config=config,
        engines=engines,
        length=length,
        prompts=prompts,
        cache=cache,
        run=digest_json([command, number]),
        notes=[] if warning is None else [warning],
    )
    for note in _doubts(bench, tasks):
        bench.notes.append(note)
        say(f"warning: {note}")
    said = len(bench.notes)
    found = _measured(bench, tasks, rows)
    cache.put(_RUN, command, number + 1)
    if bench.counts["resumed"]:
        say(f"{bench.counts['resumed']} measurements are of an interrupted run of this command")
    for note in bench.notes[said:]:
        say(f"warning: {note}")
    return {
        "format": FORMAT,
        "kind": "bundle",
        "path": str(config.path),
        "digest": bundle.digest,
        "target": target,
        "device": device["device"],
        "cores": int(device["cores"]),
        "threads": config.threads,
        "prompt": length if prompts is None else None,
        "input": None if config.input is None else str(config.input),
        "seed": config.seed,
        "warnings": bench.notes,
        **bench.counts,
        "tasks": found,
    }


def _doubts(bench: _Bench, tasks: Mapping[str, BundleTask]) -> list[str]:
    """Return what is known beforehand to be wrong with the figures."""
    found = []
    if bench.prompts is None and any(t.sampler.rule == THRESHOLD for t in tasks.values()):
        found.append(
            "passes by threshold are those of canned prompts, random tokens; give --input FILE "
            "for those of your own"
        )
    tuned = [task.targets[bench.target].measured for task in tasks.values()]
    others = {plain(str(each["stands_in_for"])): None for each in tuned if "stands_in_for" in each}
    if others:
        found.append(
            f"the engines on {bench.target} only stand in for {', '.join(others)}; their speed "
            f"and memory say nothing of it: run with --target {next(iter(others))} where it is"
        )
    return found


def _measured(bench: _Bench, tasks: Mapping[str, BundleTask], rows: Sequence[int]) -> Json:
    """Return what each task does at each batch; notes grow by what happened meanwhile."""
    groups: dict[str, list[str]] = {}
    for name, task in tasks.items():
        alike = [task.targets[bench.target].schedule.precisions, task.sampler.to_json()]
        own = None if bench.prompts is None else bench.prompts[name]
        groups.setdefault(digest_json([alike, own]), []).append(name)
    lanes = {names[0]: _lanes(bench, tasks[names[0]]) for names in groups.values()}
    found: Json = {}
    total = len(rows) * sum(1 + len(each) for each in lanes.values())
    with (
        Progress(total, "bench") as progress,
        tempfile.TemporaryDirectory(prefix="cadenza-") as scratch,
    ):
        for names in groups.values():
            first = names[0]
            task = tasks[first]
            rows_of = [
                _row(bench, first, task.sampler, lanes[first], batch, progress, Path(scratch))
                for batch in rows
            ]
            for name in names:
                found[name] = {
                    "schedule": list(task.targets[bench.target].schedule.precisions),
                    "sampler": task.sampler.to_json(),
                    "measured_with": first,
                    "batches": rows_of,
                }
    return {name: found[name] for name in tasks}


def _lanes(bench: _Bench, task: BundleTask) -> dict[str, Schedule]:
    """Return the schedules to compare by label: what ships, and each uniform one beside it."""
    ships = task.targets[bench.target].schedule
    precisions = bench.bundle.manifest.precisions
    names = sorted(bench.engines, key=lambda name: (-precisions[name].bits, name))
    every = {f"uniform {name}": Schedule.uniform(name, task.windows) for name in names}
    return {SHIPS: ships} | {label: each for label, each in every.items() if each != ships}


def _row(
    bench: _Bench,
    name: str,
    sampler: SamplerConfig,
    lanes: Mapping[str, Schedule],
    batch: int,
    progress: Progress,
    scratch: Path,
) -> Json:
    """Return what all schedules of a task do at a batch."""
    batches = bench.batches(name, batch)
    schedules = {label: list(each.precisions) for label, each in lanes.items()}
    asked = {"sampler": sampler.to_json(), "batch": batch, "prompts": digest_json(batches)}

    def speed() -> Json:
        before = state()
        found = measure_throughput(
            lanes,
            bench.engines,
            sampler,
            batches,
            bench.bundle.manifest.model,
            seconds=bench.config.seconds,
            rounds=bench.config.repeats,
            seed=bench.config.seed,
        )
        return {**_speed(found, lanes), "machine": before}

    longest = max(batches, key=lambda prompts: max(map(len, prompts)))
    row = bench.kept({"speed": schedules, **asked}, speed)
    progress.advance(note=f"{name}, batch {batch}")
    if row["drift"] is not None:
        bench.notes.append(
            f"{name}, batch {batch}: the last rounds took {row['drift']:.2f} times as long as the "
            f"first, for every schedule; ratios hold, milliseconds may not"
        )
    for lane in row["lanes"]:
        schedule = lanes[lane["label"]]

        def memory(schedule: Schedule = schedule) -> Json:
            return footprint(
                bench.bundle.folder,
                bench.target,
                bench.config.threads,
                schedule,
                sampler,
                longest,
                scratch / "log",
            )

        lane |= bench.kept({"memory": list(schedule.precisions), **asked}, memory)
        progress.advance(note=f"{name}, batch {batch}, memory of {lane['label']}")
    return row


def _speed(found: Throughput, lanes: Mapping[str, Schedule]) -> Json:
    """Return what was measured of speed as plain data."""
    uniform = [label for label, schedule in lanes.items() if schedule.is_uniform]
    best = found.fastest(uniform)
    against = found.ratio(SHIPS, best)
    slower = found.drift
    full = [label for label in uniform if lanes[label].precisions[0] == FULL_PRECISION.name]
    return {
        "batch": found.batch,
        "tokens": found.tokens,
        "rounds": len(found.lanes[SHIPS].rounds),
        "lanes": [
            {
                "label": label,
                "schedule": list(lane.schedule.precisions),
                "tokens_per_s": asdict(lane.tokens_per_s),
                "latency_ms": {name: asdict(each) for name, each in lane.latency_ms.items()},
                "passes": lane.passes,
                "mean_bits": lane.bits,
                "ships_over_this": asdict(found.ratio(SHIPS, label)),
            }
            for label, lane in found.lanes.items()
        ],
        "full_precision": full[0] if full else None,
        "best_uniform": best,
        "ships_over_best_uniform": {**asdict(against), "told_apart": told_apart(against)},
        "drift": slower.ratio if slower.found else None,
    }


def _environment(target: str) -> dict[str, str]:
    """Return the machine, and ONNX Runtime where engines are its own."""
    if target_from_name(target).ahead:
        return machine(gpu=True)
    return environment(session_options(target))


def _target(bundle: Bundle, asked: str | None) -> str:
    targets = bundle.manifest.targets
    if asked is None:
        return "cpu" if "cpu" in targets else targets[0]
    name = target_from_name(asked).name
    if name not in targets:
        raise InputError(
            f"the bundle {str(bundle.folder)!r} has no target {name!r}; it has "
            f"{', '.join(targets)}"
        )
    return name


def _tasks(bundle: Bundle, target: str, names: Sequence[str]) -> dict[str, BundleTask]:
    """Return the tasks to measure.

    Raises:
        InputError: One is unknown, or its schedule has no latency: a precision is only rounded.
    """
    tasks = bundle.manifest.tasks
    for name in names or tasks:
        if name not in tasks:
            raise InputError(f"unknown task {name!r}; this bundle has {', '.join(tasks)}")
        for each in tasks[name].targets[target].schedule.precisions:
            if bundle.manifest.precisions[each].simulated:
                raise InputError(
                    f"task {name!r} runs {each}, which is simulated: it rounds, but computes in "
                    f"floating point, so its speed says nothing; bench other tasks with --task, "
                    f"or tune with executed precisions"
                )
    return {name: tasks[name] for name in dict.fromkeys(names or tasks)}


def _check_length(bundle: Bundle, tasks: Mapping[str, BundleTask], length: int) -> None:
    longest = bundle.manifest.model.max_length
    for name, task in tasks.items():
        if length + task.sampler.gen_length > longest:
            raise InputError(
                f"task {name!r}: prompts of {length} and answers of {task.sampler.gen_length} "
                f"tokens are more than the model's {longest}; give --shape prompt=MIN:OPT:MAX "
                f"with a smaller OPT"
            )


def _plain(config: BenchConfig, prompts: Mapping[str, Prompts] | None) -> Json:
    """Return what of a command decides its measurements."""
    left_out = {"path", "target", "input", "batch", "batches"}
    kept = {key: value for key, value in asdict(config).items() if key not in left_out}
    return kept | {"prompts": None if prompts is None else dict(prompts)}
