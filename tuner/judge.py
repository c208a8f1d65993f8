"""The final judgement: what ships, measured once on test prompts that nothing was tuned on.

Beside each shipped schedule stand full precision, every uniform schedule, the best uniform one
within the budgets, baselines written by hand, and the same bits in other orders: first, last,
backward, and permuted; all on the same prompts and timed in the same rounds.  Bits and
milliseconds are of the passes that these prompts took.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engines.manifest import DEFAULT_TASK
from engines.precision import FULL_PRECISION, Precision
from engines.schedule import Schedule, weighted_mean
from engines.terminal import Progress
from tuner.baselines import back_loaded, backward, front_loaded, permuted
from tuner.choice import Choice
from tuner.closing_table import Measured, Verdict
from tuner.contest import Contest
from tuner.evaluate import graded, same_answers
from tuner.objective import wilson_interval
from tuner.settle import time_schedules
from tuner.space import Candidate
from tuner.workbench import Job
from tuner.workshop import Engines


@dataclass(frozen=True)
class Entry:
    """A schedule to be judged."""

    label: str
    schedule: Schedule


def entries(
    choice: Choice,
    precisions: Sequence[Precision],
    permutations: int,
    seed: int,
    baselines: Mapping[str, Schedule],
    passes: Sequence[float] | None = None,
    budgeted: bool = True,
) -> list[Entry]:
    """Return what ships, then what it is compared with, each schedule once.

    Args:
        choice: What ships.
        precisions: The candidates.
        permutations: Shuffles of a mixed schedule.
        seed: Of the shuffles.
        baselines: Written by hand, by label.
        passes: Expected in each window; orders of the same bits keep them.  None: all alike.
        budgeted: Whether there is a budget that a uniform schedule is the best within.
    """
    own, windows = choice.schedule, choice.schedule.windows
    found = [Entry("ships", own)]
    for name in dict.fromkeys((FULL_PRECISION.name, *(each.name for each in precisions))):
        found.append(Entry(f"uniform {name}", Schedule.uniform(name, windows)))
    if choice.reference is not None and budgeted:
        found = [
            Entry(f"{each.label}, best within budget", each.schedule)
            if each.schedule == choice.reference and each.label != "ships"
            else each
            for each in found
        ]
    found += [Entry(f"baseline {label}", each) for label, each in baselines.items()]
    if not own.is_uniform:
        bits = {each.name: each.bits for each in (*precisions, FULL_PRECISION)}
        found.append(Entry("same bits, most first", front_loaded(own, bits, passes)))
        found.append(Entry("same bits, most last", back_loaded(own, bits, passes)))
        found.append(Entry("same bits backward", backward(own, passes)))
        for number, shuffled in enumerate(permuted(own, permutations, seed, passes), 1):
            found.append(Entry(f"same bits permuted {number}", shuffled))
    kept, seen = found[:1], {own}
    for each in found[1:]:
        if each.schedule not in seen or each.label.startswith(("uniform", "baseline")):
            seen.add(each.schedule)
            kept.append(each)
    return kept


def judge(contest: Contest, candidate: Candidate, choices: Mapping[str, Choice]) -> list[Verdict]:
    """Return the verdict on each task and on `default`, on test prompts."""
    bench, engines = contest.bench, contest.shop.engines(candidate)
    groups: dict[str, list[Job]] = {name: [job] for name, job in bench.jobs.items()}
    groups[DEFAULT_TASK] = list(bench.jobs.values())
    lists = {
        name: entries(
            choice,
            bench.precisions,
            bench.effort.permutations,
            bench.config.seed,
            bench.baselines_of(name),
            contest.passes(name, choice.schedule.windows).tolist(),
            bench.config.budgeted,
        )
        for name, choice in choices.items()
    }
    answers = sum(len(lists[name]) * len(job.test) for name in choices for job in groups[name])
    progress = Progress(answers, "judging on test prompts, answers")
    passes = {
        f"{name}/{each.label}": contest.passes_as_run(engines, name, "test", each.schedule)
        for name, found in lists.items()
        for each in found
    }
    timed = time_schedules(
        contest,
        candidate,
        {
            f"{name}/{each.label}": (each.schedule, bench.sampler(name))
            for name, found in lists.items()
            for each in found
        },
        passes,
    )
    verdicts = []
    for name, choice in choices.items():
        jobs = groups[name]
        rows = []
        for each in lists[name]:
            right, same = _pooled(contest, engines, jobs, each.schedule)
            progress.advance(len(same), f"{name}: {each.label}")
            took = None if timed is None else timed[f"{name}/{each.label}"]
            bits = [engines.folder.precisions[p].bits for p in each.schedule.precisions]
            rows.append(
                Measured(
                    label=each.label,
                    schedule=each.schedule,
                    mean_bits=weighted_mean(bits, passes[f"{name}/{each.label}"].tolist()),
                    ms=None if took is None else (took.median, took.low, took.high),
                    accuracy=None if right is None else _share(right),
                    agreement=_share(same),
                    n=len(same),
                )
            )
        losses = [contest.loss(engines, job, job.test, choice.schedule) for job in jobs]
        worst = max(losses, key=lambda loss: loss.high)
        full = Schedule.uniform(FULL_PRECISION.name, choice.schedule.windows)
        took_full = next(row.ms for row in rows if row.schedule == full)
        verdicts.append(
            Verdict(
                task=name,
                budget_ms=None if took_full is None else bench.config.latency_bound(took_full[0]),
                shipped=rows[0],
                others=tuple(rows[1:]),
                reason=choice.reason,
                loss=(worst.mean, worst.low, worst.high),
            )
        )
    progress.close()
    return verdicts


def _pooled(
    contest: Contest, engines: Engines, jobs: Sequence[Job], schedule: Schedule
) -> tuple[NDArray[np.bool_] | None, NDArray[np.bool_]]:
    """Return (right, same as full precision) of all jobs' test prompts; right None if ungraded."""
    right, same = [], []
    for job in jobs:
        own = contest.answers(engines, job, job.test, schedule)
        full = contest.full_answers(job, job.test)
        right.append(graded(job.workload, job.test, own.ids, contest.bench.tokenizer.decode))
        same.append(same_answers(own.ids, full.ids))
    known = [each for each in right if each is not None]
    return (np.concatenate(known) if len(known) == len(jobs) else None), np.concatenate(same)


def _share(hits: NDArray[np.bool_]) -> tuple[float, float, float]:
    found = wilson_interval(int(hits.sum()), len(hits))
    return (found.mean, found.low, found.high)
