"""The commands of a machine that serves: `cadenza run`, `cadenza inspect`, `cadenza verify`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from engines.bundle import Bundle, read_bundle
from engines.document import document_from_text
from engines.errors import BackendError, InputError
from engines.golden import Golden, load_all, rerun_golden
from engines.manifest import MANIFEST
from engines.options import MOST_THREADS
from engines.overview import EXPORT, bundle_overview, export_from_folder, export_overview
from engines.plan_loader import BEST_TARGET, why_not
from engines.plans import check_plans
from engines.runtime import Runtime
from engines.sampler import POLICIES
from engines.targets import target_from_name
from engines.terminal import (
    Progress,
    can_show,
    command_parser,
    emit,
    emit_json,
    plain,
    run_command,
    size,
)


def main(argv: Sequence[str]) -> int:
    """Run `argv`, a command's name and its arguments, and return the exit code."""
    commands = {"run": run, "inspect": inspect, "verify": verify}
    if not argv or argv[0] not in commands:
        raise ValueError(f"the command is one of {', '.join(commands)}, got {list(argv)}")
    return commands[argv[0]](argv[1:])


def run(argv: Sequence[str]) -> int:
    """Answer prompts with a bundle: `cadenza run`."""
    parser = _parser(
        "run",
        "Answer one prompt, or every prompt of a file, with a bundle.",
        "cadenza run BUNDLE --task edit 'edit:ab,aabbccddabcd'",
        "cadenza run BUNDLE --input prompts.jsonl --json > answers.jsonl",
        "cadenza run BUNDLE -- '-a prompt that begins with a dash'",
    )
    parser.add_argument("bundle", metavar="BUNDLE", type=Path, help="what cadenza tune wrote")
    parser.add_argument("prompt", metavar="PROMPT", nargs="?", help="the prompt")
    parser.add_argument(
        "--input",
        metavar="FILE.jsonl",
        help='prompts, a line each: {"id": ..., "prompt": ..., "task": ...}; the task is '
        "optional; '-' reads stdin",
    )
    parser.add_argument("--task", help="whose schedule to follow (default: the one for any task)")
    parser.add_argument("--target", help=f"where to run (default: {BEST_TARGET})")
    parser.add_argument(
        "--policy",
        choices=POLICIES,
        default=POLICIES[0],
        help="when prompts of a batch want different engines: the most precise for all, or a "
        "pass for each engine (default: safest)",
    )
    parser.add_argument(
        "--batch", metavar="N", type=int, help="prompts that run together (default: as declared)"
    )
    parser.add_argument(
        "--threads",
        metavar="N",
        type=int,
        default=0,
        help="threads of a pass (default: as the bundle says)",
    )
    parser.add_argument(
        "--expect", metavar="DIGEST", help="refuse a bundle with other schedules or engines"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a line on stdout")
    return run_command(parser, _run, argv)


def inspect(argv: Sequence[str]) -> int:
    """Show what a bundle or an export holds: `cadenza inspect`."""
    parser = _parser(
        "inspect",
        "Show what a bundle or an export folder holds: schedules, engines, weights, files.",
        "cadenza inspect BUNDLE",
        "cadenza inspect EXPORT --json | python -m json.tool",
        "cadenza inspect EXPORT --gemms --gpu 'RTX 4090'   (see cadenza inspect --gemms --help)",
    )
    parser.add_argument("path", metavar="PATH", type=Path, help="a bundle or an export folder")
    parser.add_argument("--json", action="store_true", help="as one JSON object on stdout")
    return run_command(parser, _inspect, argv)


def verify(argv: Sequence[str]) -> int:
    """Check a bundle from its bytes to its answers: `cadenza verify`."""
    parser = _parser(
        "verify",
        "Check every file's digest, load every engine, and compare the answers to the bundle's "
        "golden prompts with those where it was made, token for token.",
        "cadenza verify BUNDLE && echo as it was made",
    )
    parser.add_argument("bundle", metavar="BUNDLE", type=Path, help="what cadenza tune wrote")
    parser.add_argument(
        "--target",
        help="where to run (default: cpu, whose answers are the golden ones, or the first; plans "
        "are checked, and run where they fit this machine)",
    )
    parser.add_argument("--json", action="store_true", help="the result as JSON on stdout")
    return run_command(parser, _verify, argv)


def _parser(name: str, says: str, *examples: str) -> argparse.ArgumentParser:
    return command_parser(name, says, "\n  ".join(("examples:", *examples)))


@dataclass(frozen=True, slots=True)
class _Line:
    id: str
    prompt: str
    task: str | None


def _run(args: argparse.Namespace) -> int:
    if (args.prompt is None) == (args.input is None):
        raise InputError("give either a PROMPT or --input FILE.jsonl")
    if not 0 <= args.threads <= MOST_THREADS:
        raise InputError(f"--threads must be from 0 to {MOST_THREADS}, got {args.threads}")
    lines = (
        [_Line("1", args.prompt, args.task)]
        if args.input is None
        else _read_lines(args.input, args.task)
    )
    runtime = Runtime.load(
        args.bundle, target=args.target, threads=args.threads, warmup=False, expect=args.expect
    )
    with runtime, Progress(len(lines), "answers", quiet=len(lines) == 1) as progress:
        answers = runtime.generate(
            [line.prompt for line in lines],
            task=[line.task for line in lines],
            policy=args.policy,
            batch=args.batch,
            on_answers=progress.advance,
        )
    for line, answer in zip(lines, answers, strict=True):
        if args.json:
            emit_json(
                {
                    "id": line.id,
                    "task": answer.task,
                    "text": answer.text,
                    "ids": answer.ids,
                    "passes": answer.passes,
                    "tokens": answer.tokens,
                    "bits": answer.bits,
                    "engine_ms": answer.engine_ms,
                }
            )
        elif args.input is None:
            emit(answer.text)
        else:
            emit(f"{plain(line.id)}\t{plain(answer.text)}")
    if args.input is None and not args.json:
        took = sum(answers[0].engine_ms)
        print(
            f"{answers[0].tokens} tokens in {answers[0].passes} passes, mean bits "
            f"{answers[0].bits:.4g}, {took:.1f} ms in engines",
            file=sys.stderr,
        )
    return 0


def _read_lines(file: str, task: str | None) -> list[_Line]:
    """Return the prompts of a file; a line's own task goes before `--task`."""
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise InputError(
            f"cannot read the prompts {file!r}: {error}; give a file of JSON lines"
        ) from error
    lines: list[_Line] = []
    ids: set[str] = set()
    for number, content in enumerate(text.split("\n"), start=1):
        if not content.strip():
            continue
        line = document_from_text(content, f"{file}, line {number}")
        own = line.get("task")
        found = _Line(line["id"].text(), line["prompt"].text(), own.text() if own else task)
        if found.id in ids:
            line["id"].fail(f"{found.id!r} is another line's already; give each its own")
        ids.add(found.id)
        lines.append(found)
    if not lines:
        raise InputError(
            f"the prompts {file!r} are empty; write a JSON object a line, for instance "
            f'{{"id": "1", "prompt": "..."}}'
        )
    return lines


def _inspect(args: argparse.Namespace) -> int:
    folder: Path = args.path
    if folder.name in (MANIFEST, EXPORT) and folder.is_file():
        folder = folder.parent
    ascii_ = not can_show(sys.stdout, "▁█")
    if (folder / EXPORT).exists() and not (folder / MANIFEST).exists():
        top = export_from_folder(folder)
        if args.json:
            emit_json({"kind": "export", "path": str(folder), "export": top.mapping()})
        else:
            emit(export_overview(top, folder))
        return 0
    if not (folder / MANIFEST).exists():
        raise InputError(
            f"{str(folder)!r} is neither a bundle (no {MANIFEST}) nor an export (no {EXPORT}); "
            f"give what cadenza tune or cadenza export wrote"
        )
    bundle = read_bundle(folder, verify=False)
    if args.json:
        emit_json(
            {
                "kind": "bundle",
                "path": str(folder),
                "digest": bundle.digest,
                "manifest": dict(bundle.manifest.raw),
            }
        )
    else:
        emit(bundle_overview(bundle, ascii_))
    return 0


def _verify(args: argparse.Namespace) -> int:
    bundle = read_bundle(args.bundle)
    targets = bundle.manifest.targets
    target = args.target or ("cpu" if "cpu" in targets else targets[0])
    if target not in targets:
        raise InputError(f"the bundle has no target {target!r}; it has {', '.join(targets)}")
    files = bundle.manifest.files
    plans = {
        other: check_plans(bundle, other) for other in targets if target_from_name(other).ahead
    }
    result: dict[str, object] = {
        "bundle": str(bundle.folder),
        "digest": bundle.digest,
        "files": len(files),
        "bytes": sum(entry.bytes for entry in files.values()),
        "target": target,
        "targets_not_checked": [each for each in targets if each != target and each not in plans],
        "plans": plans,
    }
    why = why_not(bundle, target) if target in plans else None
    if why is not None:
        _plans_alone(bundle, target, result, args.json)
        raise BackendError(why)
    checked, runtime = load_all(bundle, target)
    result["engines"] = checked
    with runtime:
        golden = rerun_golden(runtime)
    result |= {"golden": golden.counts, "tolerance": 0, "ok": not golden.differences}
    if args.json:
        emit_json(result)
    else:
        emit(_verdict(bundle, target, checked, golden, plans))
    if golden.differences:
        raise BackendError(
            f"{len(golden.differences)} of {golden.checked} golden answers differ on {target}; "
            f"{golden.differences[0]}; tune again on this machine, or serve where it was tuned"
        )
    return 0


def _plans_alone(bundle: Bundle, target: str, result: dict[str, object], as_json: bool) -> None:
    """Tell what is known of a target whose plans cannot run here."""
    plans = result["plans"]
    assert isinstance(plans, dict)
    result |= {"engines": list(plans[target]), "executed": False, "ok": False}
    if as_json:
        emit_json(result)
        return
    lines = [f"digests   all {len(bundle.manifest.files)} files are as listed"]
    lines += [f"plan      {name}: {says}" for name, says in plans[target].items()]
    lines.append(
        f"not run   no answer was made on {target}; --target cpu runs what stands in for it"
    )
    lines.append(f"digest    {bundle.digest}")
    emit("\n".join(lines))


def _verdict(
    bundle: Bundle,
    target: str,
    checked: list[str],
    golden: Golden,
    plans: Mapping[str, Mapping[str, str]],
) -> str:
    files = bundle.manifest.files
    total = size(sum(entry.bytes for entry in files.values()))
    lines = [
        f"digests   all {len(files)} files are as listed, {total}",
        f"engines   {len(checked)} on {target} loaded and gave finite numbers: "
        f"{', '.join(checked)}",
        f"golden    {golden.checked - len(golden.differences)} of {golden.checked} answers equal, "
        f"token for token (tolerance: none)"
        if golden.checked
        else "golden    there is no answer to compare, so answers were not checked",
    ]
    if golden.stale:
        lines.append(
            f"          {golden.stale} were made by other schedules or for another target and "
            f"were not compared"
        )
    for found in plans.values():
        lines += [f"plan      {name}: {says}, not run" for name, says in found.items()]
    others = [each for each in bundle.manifest.targets if each != target and each not in plans]
    if others:
        lines.append(f"not checked: {', '.join(others)}; check with --target")
    lines.append(f"digest    {bundle.digest}")
    return "\n".join(lines)
