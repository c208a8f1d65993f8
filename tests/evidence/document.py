"""RESULTS.md from `results.json`: tables, and the answers to the questions, in plain words.

Every number comes from the results; the sentences around them are chosen by the numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.evidence.further import further
from tests.evidence.wording import (
    at_least,
    at_most,
    bits,
    direction,
    met,
    milliseconds,
    number,
    points,
    table,
    yes,
)

QUESTIONS = """\
Questions fixed before anything was run: (a) where the bits go, against the same bits elsewhere:
aim 10 points; (b) the allocation against uniform at equal bits where uniform loses 3 to 30
points; (c) the bits at which the allocation equals uniform 4 bits (aim 3.5), and the latency saved
on engines within a point of full precision; (d) Pearson's r of proxy and measured gain, aim 0.9;
(e) what the shipped choice loses (aim 0.5 points) and how often "mixed" is wrong (aim 5 %); (f)
whether a task's own schedule beats the others'."""


METHOD_NAMES = {"dp": "K x I", "rollout": "rollouts"}

TRIED = """\
## Where K x I falls short, and what was tried

- *K is in nats, and has no upper end.*  A window that is lost at 4 bits already (several nats a
  token) can be lost once more at 3: K counts it again, the answer does not.  Flips of the most
  probable token count it once.
- *K sees only what a window itself commits.*  Under teacher forcing the trace's own positions are
  committed; an engine that would commit others, or commit wrong tokens that later windows build
  on, is not seen.  `moves` counts the commits that the sampler's rule would not make.
- *Re-masking finds almost no influence* where an answer can be computed anew from the prompt: I is
  close to 1 in most windows.  The counterfactual form moves it little.
- *Not every committed token is read.*  A task whose grader reads one token is served by the
  windows that decide it; K x I on scored positions sees that where teacher forcing can.
- *Rollouts* go beyond the paper: each window alone is changed, answers are denoised to their end,
  and the tokens that the grader reads are compared with full precision's.  No labels are used.
  They see all of the above, at about (P - 1)(W + 1)/2 + 1 generations a prompt instead of P + 2;
  what they cannot see is how two changes act together.  They were added after a first look at the
  test answers of one quantizer, so the section above repeats them on prompts drawn since.
- *Refinement* by measured swaps, and *bisection*, start from measurements of whole schedules on
  tuning prompts.
"""


def text(results: Mapping[str, Any]) -> str:
    """Return the document."""
    config = results["config"]
    quantizers = results["quantizers"]
    seconds = results["seconds"]
    parts = [
        "# Results\n",
        "Written by `make evaluate` from `results.json`; not edited by hand.\n",
        _setting(results),
        QUESTIONS + "\n",
        "## Answers\n",
        _answers(results),
        "## On fresh test prompts\n",
        _confirmation(quantizers),
        TRIED + "\n",
        "## Every schedule at 4.00 bits or fewer (simulated activations, one family of weights)\n",
        "Accuracy in points on test prompts, in brackets 95 % intervals; `d` is the paired "
        f"difference from uniform 4 bits.  Headline rows: {config['test']} prompts a task, the "
        f"others the first {config['rest']} of them.\n",
    ]
    for name, entry in quantizers.items():
        parts += [f"### {name}\n", _schedules(entry), _all_rows(entry)]
    parts += ["## Proxies against measured gains of single windows (4 to 8 bits)\n"]
    for name, entry in quantizers.items():
        parts += [f"### {name}\n", _proxies(entry)]
    parts += [
        "![](results/sensitivity." + name + ".svg)\n![](results/proxies." + name + ".svg)\n"
        for name in quantizers
    ]
    parts += ["## Cross-task matrix\n"]
    for name, entry in quantizers.items():
        for method, found in entry["methods"].items():
            parts += [f"### {name}, {METHOD_NAMES[method]}\n", _cross(found["cross_tasks"])]
    parts += ["## Verdicts over calibrations drawn again\n", _verdicts(quantizers)]
    parts += [further(results["further"])]
    parts += ["## On engines\n", _engines(results["engines"])]
    parts += [
        f"\nComputed in {sum(seconds):.0f} s over {len(seconds)} run(s) of the command; answers "
        f"that an earlier run had made were not made again.\n"
    ]
    return "\n".join(parts).replace("\n\n\n", "\n\n")


def _setting(results: Mapping[str, Any]) -> str:
    config, environment = results["config"], results["environment"]
    planted = (
        f"with outliers planted: {config['channels']} channels of every site x "
        f"{config['factor']:g}, which leaves its function as it is"
        if config["factor"] > 1
        else "as it is"
    )
    return (
        f"Checkpoint `{config['model']}`, {planted}; tasks {', '.join(config['tasks'])}; "
        f"{config['windows']} windows; {config['calibration']} calibration, {config['tuning']} "
        f"tuning and {config['test']} test prompts a task, disjoint.  Schedules were chosen and "
        f"written down before a test prompt was drawn.  One checkpoint, one seed: an example, not "
        f"a law.  Machine: {', '.join(f'{k} {v}' for k, v in environment.items())}.\n\n"
        f"Activation bits here are *simulated*: graphs round activations for each token and "
        f"compute in floating point, so these rows carry no latency.  The section on engines "
        f"stands apart.\n"
    )


def _answers(results: Mapping[str, Any]) -> str:
    rows = []
    for name, entry in results["quantizers"].items():
        for method, found in entry["methods"].items():
            whole = found["all"]
            mixed = whole["dp_minus_random_mixed"]
            rows.append(
                [
                    name,
                    METHOD_NAMES[method],
                    points(whole["uniform_loss"]),
                    points(whole["dp_minus_random"]),
                    "all uniform" if mixed is None else points(mixed),
                    points(whole["dp_minus_uniform"]),
                    points(whole["shipped_minus_uniform"]),
                    bits(whole["bits_at_uniform_quality"]),
                    f"{number(whole['pearson_mean'])} ({number(whole['spearman_mean'])})",
                    f"{whole['verdict_regret']:.2f}",
                    f"{100 * whole['false_mixed']:.0f} %",
                    f"{100 * whole['transfer_diagonal_wins']:.0f} %",
                ]
            )
    header = [
        "quantizer",
        "gains",
        "uniform 4 bits loses",
        "(a) minus permuted",
        "over mixed tasks alone",
        "(b) minus uniform",
        "what ships minus uniform",
        "(c) bits at uniform's quality",
        "(d) r (rank)",
        "(e) regret",
        "false mixed",
        "(f) diagonal wins",
    ]
    return "\n".join([table(header, rows), _sentences(results)])


def _sentences(results: Mapping[str, Any]) -> str:
    lines = []
    for name, entry in results["quantizers"].items():
        for method, found in entry["methods"].items():
            lines += _sentences_of(name, method, found)
    for name, entry in results["engines"].items():
        saved = entry["latency_saved"]
        lines.append(
            f"- **engines, {name}**: "
            + (
                "no saving is claimed: no task on which uniform int8 loses three points and what "
                "ships at most one"
                if saved is None
                else f"{100 * saved:.1f} % of full precision's latency saved within a point on "
                f"{', '.join(entry['claimed_tasks'])}"
            )
            + "."
        )
    return "\n".join(lines) + "\n"


def _sentences_of(name: str, method: str, found: Mapping[str, Any]) -> list[str]:
    whole = found["all"]
    random, uniform = whole["dp_minus_random"], whole["dp_minus_uniform"]
    own = ", ".join(
        f"{task} {points(each['dp_minus_uniform'])}"
        for task, each in found["tasks"].items()
        if 3.0 <= each["uniform_loss"]["mean"] <= 30.0
    )
    return [
        f"- **{name}, {METHOD_NAMES[method]}** (a) {met(random['mean'] >= 10.0)}: "
        f"{points(random)}; shown to be above 0: {yes(random['low'] > 0)}.",
        f"  (b) where uniform loses 3 to 30 points: {own or 'no task'}; over all tasks "
        f"{points(uniform)}: {direction(uniform)}.",
        f"  (c) {met(at_most(whole['bits_at_uniform_quality'], 3.5))}: "
        f"{bits(whole['bits_at_uniform_quality'])} mean bits.  "
        f"(d) {met(at_least(whole['pearson_mean'], 0.9))}: r = {number(whole['pearson_mean'])}.  "
        f"(e) regret {met(whole['verdict_regret'] <= 0.5)}, false mixed "
        f"{met(whole['false_mixed'] <= 0.05)}.  "
        f"(f) {100 * whole['transfer_diagonal_wins']:.0f} % of tasks do best with their own "
        f"schedule.",
    ]


def _confirmation(quantizers: Mapping[str, Any]) -> str:
    names = {
        "dp_minus_uniform": "K x I",
        "dp_shipped_minus_uniform": "what ships by K x I",
        "rollout_minus_uniform": "rollouts",
        "rollout_shipped_minus_uniform": "what ships by rollouts",
        "rollout_minus_dp": "rollouts minus K x I",
    }
    rows = [
        [name, *(points(found[key]) if key in found else "-" for key in names)]
        for name, entry in quantizers.items()
        for found in (entry["confirmation"],)
    ]
    count = min(entry["confirmation"]["n"] for entry in quantizers.values())
    return (
        f"{count} test prompts a task that no other row has seen, drawn after rollouts had been "
        f"added; points against uniform 4 bits, mean over the tasks.\n\n"
        + table(["quantizer", *names.values()], rows)
    )


def _schedules(entry: Mapping[str, Any]) -> str:
    tasks = list(entry["tasks"])
    labels = list(
        dict.fromkeys(
            label
            for each in entry["tasks"].values()
            for label in each["rows"]
            if " permuted " not in label
        )
    )
    body = []
    for label in labels:
        row = [label]
        for task in tasks:
            found = entry["tasks"][task]["rows"].get(label)
            row.append("-" if found is None else _cell(found))
        body.append(row)
    for method in entry["methods"]:
        rows = [_permuted(entry["tasks"][task]["rows"], method) for task in tasks]
        body.append([f"{method} permuted, mean", *rows])
    return table(["schedule", *tasks], body)


def _cell(row: Mapping[str, Any]) -> str:
    strip = "".join(name.rpartition("a")[2] for name in row["schedule"])
    own = strip if len(row["schedule"]) > 1 else "-"
    gap = row["minus_uniform"]
    ends = f"[{gap['low']:+.1f}, {gap['high']:+.1f}]"
    return f"{own} {points(row['accuracy'])} d {gap['mean']:+.1f} {ends}"


def _permuted(rows: Mapping[str, Any], method: str) -> str:
    found = [
        row["accuracy"]["mean"]
        for label, row in rows.items()
        if label.startswith(f"{method} permuted ")
    ]
    if not found:
        return "none: uniform"
    return f"{sum(found) / len(found):.1f} ({min(found):.1f} to {max(found):.1f}, {len(found)})"


def _all_rows(entry: Mapping[str, Any]) -> str:
    rows = [[name, points(each["all"])] for name, each in entry["differences"].items()]
    return table(["paired difference, mean over tasks", "points"], rows)


def _proxies(entry: Mapping[str, Any]) -> str:
    tasks = list(entry["tasks"])
    first = entry["tasks"][tasks[0]]["correlations"]["proxies"]
    rows = []
    for proxy in first:
        row = [proxy]
        for task in tasks:
            found = entry["tasks"][task]["correlations"]["proxies"][proxy]
            row.append(f"{_r(found['accuracy']['pearson'])}; {_r(found['agreement']['pearson'])}")
        whole = entry["proxies"].get(proxy)
        row.append(
            "-"
            if whole is None
            else f"{number(whole['accuracy']['pearson_mean'])}; "
            f"{number(whole['agreement']['pearson_mean'])} "
            f"(rank {number(whole['accuracy']['spearman_mean'])})"
        )
        rows.append(row)
    ceiling = ["reliability of the measured gains"]
    for task in tasks:
        found = entry["tasks"][task]["correlations"]["reliability"]
        ceiling.append(f"{number(found['accuracy'])}; {number(found['agreement'])}")
    additivity = ["sum of single gains / joint gain, points"]
    for task in tasks:
        found = entry["tasks"][task]["correlations"]["additivity"]["accuracy"]
        additivity.append(f"{found['sum']:.1f} / {found['joint']:.1f}")
    body = [*rows, [*ceiling, ""], [*additivity, ""]]
    return "Pearson's r with gains of accuracy; of agreement with full precision.\n\n" + table(
        ["proxy", *tasks, "mean"], body
    )


def _r(interval: Mapping[str, Any]) -> str:
    if interval["mean"] is None:
        return "n/a"
    return f"{interval['mean']:.2f} [{interval['low']:.2f}, {interval['high']:.2f}]"


def _cross(found: Mapping[str, Any]) -> str:
    names = list(found["schedules"])
    rows = [
        [task, *(f"{accuracy[name]:.1f}" for name in names)]
        for task, accuracy in found["accuracy"].items()
    ]
    return (
        f"Accuracy of the schedule of each column on the task of each row, first {found['n']} "
        "test prompts.\n\n" + table(["task", *names], rows)
    )


def _verdicts(quantizers: Mapping[str, Any]) -> str:
    rows = [
        [
            name,
            METHOD_NAMES[method],
            found["verdicts"],
            found["mixed"],
            points(found["verdict_regret"]),
            f"{found['largest_regret']:.1f}",
            f"{100 * found['false_mixed']:.1f} %",
            _share(found["false_mixed"] * found["verdicts"], found["mixed"]),
            f"{100 * found['false_mixed_shown']:.1f} %",
        ]
        for name, entry in quantizers.items()
        for method, of in entry["methods"].items()
        for found in (of["verdicts"],)
    ]
    header = [
        "quantizer",
        "gains",
        "verdicts",
        "mixed",
        "regret, points",
        "largest",
        "mixed where uniform was better, of all verdicts",
        "of the mixed ones",
        "shown to be, of all",
    ]
    return table(header, rows)


def _share(count: float, of: int) -> str:
    return f"{100 * count / of:.1f} %" if of else "none is mixed"


def _engines(found: Mapping[str, Any]) -> str:
    parts = [
        "fp32 and int8 engines of ONNX Runtime, whole sequences at the export's shape, timed in "
        "one run.  These schedules change the weights too.  A saving is claimed only where "
        "uniform int8 loses three points or more and what ships at most one.\n"
    ]
    for name, entry in found.items():
        rows = []
        for task, each in entry["tasks"].items():
            strip = "".join("█" if p == "fp32" else "▁" for p in each["schedule"])
            rows.append(
                [
                    task,
                    strip,
                    milliseconds(each["ms"]["shipped"]),
                    milliseconds(each["ms"]["fp32"]),
                    milliseconds(each["ms"]["int8"]),
                    points(each["loss_shipped"]),
                    points(each["loss_int8"]),
                    f"{100 * each['latency_saved']:.1f} %"
                    + ("" if each["claimed"] else " (not claimed)"),
                ]
            )
        header = [
            "task",
            "ships (█ fp32, ▁ int8)",
            "ms",
            "ms fp32",
            "ms int8",
            "loses",
            "int8 loses",
            "saved against fp32",
        ]
        parts += [f"### {name}\n", table(header, rows)]
    return "\n".join(parts)
