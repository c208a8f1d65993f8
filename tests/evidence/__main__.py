"""Run the evidence: `python -m tests.evidence [--quick]`, as `make evaluate` does.

    exports -> sensitivity -> choices, written down -> test prompts -> results.json
            -> RESULTS.md and figures

Everything measured is in a cache; killed at any point, the same command goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from engines.build import Cache, digest_json, open_cache
from engines.machine import machine
from engines.terminal import Progress
from tests.evidence import document, experiments, figures, headline
from tests.evidence.choices import (
    METHODS,
    Chosen,
    choices_json,
    chosen_for,
    default_schedule,
)
from tests.evidence.config import FULL, QUICK, ROOT, EvidenceConfig
from tests.evidence.executed import executed
from tests.evidence.statistics import pearson, spearman
from tests.evidence.study import Say, Study, exported, studies
from tuner.folder import write_json

FORMAT = "cadenza-results/1"
# Answers asked for a second on two cores, those that schedules share included; for the estimate.
RATE = 150.0


def planned(config: EvidenceConfig) -> dict[str, int]:
    """Return how many answers each part asks for, about; what schedules share is counted once.

    Sensitivities are counted as the generations that their passes amount to.
    """
    tasks, q, w = len(config.tasks), len(config.quantizers), config.windows
    methods, levels = len(METHODS), 4
    shared = 0.5 + 0.5 / w  # of an answer, where single windows change
    verdicts = config.resamples // 4  # distinct schedules among them
    headline_rows = 5 + methods * (2 + len(config.budgets))
    rest_rows = 24 + methods * config.permutations
    return {
        "sensitivity": int(
            tasks * q * config.calibration * (6 + 6 + 4 + w * (levels - 1) * shared)
        ),
        "choices": int(tasks * q * config.tuning * (20 + methods * verdicts)),
        "headline": int(0.7 * tasks * q * (headline_rows * config.test + rest_rows * config.rest)),
        "single windows": int(tasks * q * config.test * (w * shared + 1)),
        "verdicts": tasks * q * methods * config.rest * verdicts,
        "fresh prompts": tasks * q * config.test * 4,
        "further": tasks * (config.rest * (config.permutations + 40) + config.calibration * 60),
        "engines": 4 * tasks * (config.test * 3 + config.tuning * 6),
    }


def main(argv: list[str]) -> int:
    """Run the study and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.evidence", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small study that shows it works")
    parser.add_argument("--work", type=Path, default=ROOT / "evidence", help="exports and cache")
    parser.add_argument("--out", type=Path, help="folder of the results (default: the project's)")
    parser.add_argument("--model", type=Path, help="another checkpoint, as it is: nothing planted")
    parser.add_argument("--task", action="append", help="its tasks, as for --task; repeat")
    parser.add_argument("--target", default=FULL.target, help="(default: %(default)s)")
    args = parser.parse_args(argv)
    config = QUICK if args.quick else FULL
    if args.model is not None:
        config = replace(config, model=args.model, factor=1.0)
    config = replace(config, target=args.target)
    if args.task:
        config = replace(config, tasks=tuple(args.task))
    own = not args.quick and args.model is None
    out = args.out or (ROOT if own else args.work / "out")
    run(config, args.work, out, _say)
    return 0


def run(config: EvidenceConfig, work: Path, out: Path, say: Say) -> dict[str, Any]:
    """Run the study, write results, figures and the document to `out`, return the results."""
    plan = planned(config)
    total = sum(plan.values())
    say(f"about {total:,} answers: " + ", ".join(f"{k} {v:,}" for k, v in plan.items()))
    say(
        f"about {total / RATE / 60:.0f} minutes on two cores; whatever was answered before is not "
        f"answered again"
    )
    began = time.monotonic()
    cache = open_cache(work / "cache", os.environ)
    progress = Progress(total, "answers")
    found = studies(config, work, cache, say)
    for study in found.values():
        study.advance = progress.advance
    chosen = {name: _choices(study, work, say) for name, study in found.items()}
    results: dict[str, Any] = {
        "format": FORMAT,
        "config": {**asdict(config), "model": config.model.name},
        "environment": machine(),
        "quantizers": {},
    }
    for name, study in found.items():
        say(f"{name}: test prompts")
        results["quantizers"][name] = _quantizer(study, chosen[name], say)
    main_study = found[config.main]
    results["further"] = _further(main_study, chosen[config.main], say)
    say("engines")
    results["engines"] = _engines(config, found, work, cache)
    for name, entry in results["quantizers"].items():
        saved = results["engines"][name]
        entry["all"]["latency_saved"] = saved["latency_saved"]
        for task, each in entry["tasks"].items():
            own = saved["tasks"][task]
            each["latency_saved"] = own["latency_saved"] if own["claimed"] else None
    progress.close()
    spent = work / "seconds.json"
    before = json.loads(spent.read_text("utf-8")) if spent.exists() else []
    seconds = [*before, round(time.monotonic() - began, 1)]
    write_json(spent, seconds)
    results["seconds"] = seconds
    out.mkdir(parents=True, exist_ok=True)
    results = _plain(results)
    write_json(out / "results.json", results)
    figures.draw(results, out / "results")
    (out / "RESULTS.md").write_text(document.text(results), encoding="utf-8")
    say(f"{out / 'RESULTS.md'}: {sum(seconds):.0f} s in {len(seconds)} runs")
    return results


def _choices(study: Study, work: Path, say: Say) -> dict[str, Chosen]:
    say(f"{study.quantizer}: sensitivity and choices")
    chosen = {task: chosen_for(study, task) for task in study.prompts}
    for method, proxy in METHODS.items():
        default = default_schedule(
            study, {task: each.gains[proxy] for task, each in chosen.items()}
        )
        for each in chosen.values():
            each.schedules[f"{method} default"] = default
    content = choices_json(chosen)
    write_json(
        work / f"choices.{study.quantizer}.json", {**content, "sha256": digest_json(content)}
    )
    return chosen


def _quantizer(study: Study, chosen: Mapping[str, Chosen], say: Say) -> dict[str, Any]:
    """Return a quantizer's results: the first method's in DESIGN's places, then all methods'."""
    config = study.config
    scores = {
        task: headline.test_scores(study, task, each.schedules) for task, each in chosen.items()
    }
    tables = {task: headline.rows(study, task, chosen[task], scores[task]) for task in chosen}
    say(f"{study.quantizer}: single windows")
    single = {task: headline.singles(study, task) for task in chosen}
    found = headline.summary(headline.differences(scores), config.seed)
    proxies = {
        proxy: {
            kind: headline.pooled_correlation(
                {task: each.gains[proxy][:, -1] for task, each in chosen.items()}, single, kind
            )
            for kind in ("accuracy", "agreement")
        }
        for proxy in next(iter(chosen.values())).gains
    }
    methods = {}
    for method in METHODS:
        say(f"{study.quantizer}: {method}, verdicts and other tasks")
        methods[method] = _method(study, method, chosen, single, found, proxies)
    say(f"{study.quantizer}: fresh test prompts")
    first = next(iter(methods.values()))
    return {
        "all": first["all"],
        "tasks": {
            task: {
                **first["tasks"][task],
                "rows": tables[task],
                "correlations": headline.correlations(study, each, single[task]),
                "bisection_measured": each.bisected,
            }
            for task, each in chosen.items()
        },
        "methods": methods,
        "differences": found,
        "proxies": proxies,
        "confirmation": experiments.confirmation(
            study, {task: each.schedules for task, each in chosen.items()}
        ),
    }


def _method(
    study: Study,
    method: str,
    chosen: Mapping[str, Chosen],
    single: Mapping[str, Mapping[str, Any]],
    found: Mapping[str, Any],
    proxies: Mapping[str, Any],
) -> dict[str, Any]:
    """Return what DESIGN asks of an allocation, over all tasks and by task."""
    config, proxy = study.config, METHODS[method]
    verdicts = experiments.resampled_verdicts(study, method)
    own = {task: each.schedules[method] for task, each in chosen.items()}
    default = next(iter(chosen.values())).schedules[f"{method} default"]
    cross = experiments.cross_tasks(study, {**own, "default": default})

    def entry(task: str | None) -> dict[str, Any]:
        def of(name: str) -> Any:
            return found[name]["all"] if task is None else found[name]["tasks"][task]

        if task is None:
            r = proxies[proxy]["accuracy"]
            verdict = {
                "verdict_regret": verdicts["verdict_regret"]["mean"],
                "false_mixed": verdicts["false_mixed"],
                "transfer_diagonal_wins": cross["transfer_diagonal_wins"],
            }
        else:
            pair = (chosen[task].gains[proxy][:, -1], single[task]["accuracy"].mean(axis=0))
            r = {"pearson_mean": pearson(*pair), "spearman_mean": spearman(*pair)}
            verdict = {
                "verdict_regret": verdicts["tasks"][task]["verdict_regret"],
                "false_mixed": verdicts["tasks"][task]["false_mixed"],
                "transfer_diagonal_wins": cross["wins"][task],
            }
        return {
            **r,
            "dp_minus_uniform": of(f"{method}_minus_uniform"),
            "dp_minus_random": of(f"{method}_minus_random"),
            "dp_minus_bisection": of(f"{method}_minus_bisection"),
            "shipped_minus_uniform": of(f"{method}_shipped_minus_uniform"),
            "uniform_loss": of("uniform_loss"),
            "default_minus_task": of(f"{method}_default_minus_task"),
            "bits_at_uniform_quality": headline.bits_at_uniform_quality(
                found, config.budgets, config.mean_bits, task, method
            ),
            **verdict,
            "n_test": config.test,
        }

    mixed = found.get(f"{method}_minus_random_mixed")
    return {
        "all": {**entry(None), "dp_minus_random_mixed": None if mixed is None else mixed["all"]},
        "tasks": {task: entry(task) for task in chosen},
        "verdicts": verdicts,
        "cross_tasks": cross,
    }


def _further(study: Study, chosen: Mapping[str, Chosen], say: Say) -> dict[str, Any]:
    config = study.config
    own = {task: each.schedules["dp"] for task, each in chosen.items()}
    threshold = {f"threshold {config.threshold:g}": experiments.by_threshold(config.threshold)}
    steps = {
        "half the steps": experiments.with_steps(0.5, config.windows),
        "the same steps": experiments.with_steps(1.0, config.windows),
        "twice the steps": experiments.with_steps(2.0, config.windows),
    }
    parts: dict[str, Callable[[], Any]] = {
        "eight_bits": lambda: experiments.eight_bits(study),
        "calibration_sizes": lambda: experiments.calibration_sizes(study),
        "windows": lambda: experiments.numbers_of_windows(study),
        "tokens_a_step": lambda: experiments.other_samplers(study, own, steps),
        "threshold": lambda: experiments.other_samplers(study, own, threshold),
        "threshold_reverse": lambda: experiments.reverse_transfer(study, threshold),
        "static_scales": lambda: experiments.static_scales(study),
    }
    found = {}
    for name, part in parts.items():
        say(f"{study.quantizer}: {name.replace('_', ' ')}")
        found[name] = part()
    return {"quantizer": study.quantizer, **found}


def _engines(
    config: EvidenceConfig, found: Mapping[str, Study], work: Path, cache: Cache
) -> dict[str, Any]:
    """Return what schedules save on engines: of every study, and of the checkpoint as it is."""
    made = {name: executed(study) for name, study in found.items()}
    if config.factor > 1:
        folder = exported(config, config.model, work / "plain", "rtn", ("fp32", "int8"))
        made["nothing planted, rtn"] = executed(Study(config, "rtn", folder, cache))
    return made


def _plain(value: Any) -> Any:
    """Return JSON data: NaN becomes null, arrays become lists."""
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not np.isfinite(value):
        return None
    return value


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
