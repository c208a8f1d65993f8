"""Train the reference checkpoint: `python -m exporter.train -o calib_data/reference`.

A LLaDA-format masked diffusion model over the tasks of `calib_data.tasks`, on CPU, from a seed,
resumable at any moment (state is written under a temporary name, then renamed).

The objective is LLaDA's: mask k of the G answer tokens and predict them all.  k is drawn uniformly
from 1..G and the loss is the mean over the masked tokens, which has the same expectation as
masking each token with probability t and weighting by 1/t, with less variance.  Prompts come from
the `train` split alone.  Matrices are trained with Muon, the rest with AdamW; the checkpoint holds
an exponential moving average of the weights.

The recipe that made the shipped checkpoint is `TrainConfig`'s defaults.  Never run in tests at
this length; `tests/exporter/test_train.py` runs a few steps of it.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from calib_data.prompts import split_of
from calib_data.tasks import (
    BRACKETS,
    DIGITS,
    GEN_LENGTH,
    LETTERS,
    PLACEHOLDERS,
    TASKS,
)
from exporter.checkpoint import save_checkpoint
from exporter.denoiser import Denoiser, DenoiserConfig

END, MASK = "<eos>", "<mask>"
PROMPT_LENGTH = 24
# The chatter of `most` is a random walk: its loss cannot fall, its gradient is noise.
CHATTER_WEIGHT = 0.05
# Between two writes of the state.
SAVE_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything that decides the trained weights.

    Attributes:
        seed: Of the weights, the prompts and the masks.
        steps: Of the learning rate's course, which falls linearly over the last `decay` of it.
        stop: Optimizer steps taken.  At the end of the course three of the five tasks are solved
            to 98 % and more; a reference for what quantization costs needs something to lose.
        batch: Sequences a step.
        mixture: Relative share of each task at first.
        late: Step from which `late_mixture` holds: the easy tasks are learnt by then.
        late_mixture: Relative share of each task from there on.
    """

    seed: int = 7
    steps: int = 10000
    stop: int = 7562
    batch: int = 128
    muon_lr: float = 0.01
    adam_lr: float = 3e-3
    warmup: int = 200
    decay: float = 0.4
    ema: float = 0.998
    mixture: tuple[tuple[str, float], ...] = (
        ("edit", 0.10),
        ("rename", 0.25),
        ("chain", 0.25),
        ("most", 0.15),
        ("close", 0.25),
    )
    late: int = 4400
    late_mixture: tuple[tuple[str, float], ...] = (
        ("edit", 0.05),
        ("rename", 0.25),
        ("chain", 0.40),
        ("most", 0.05),
        ("close", 0.25),
    )


def vocabulary() -> list[str]:
    """Return the tokens of the reference model in the order of their ids: 64 at most."""
    words = [f"{name}:" for name in sorted(TASKS)]
    marks = [*BRACKETS.keys(), *BRACKETS.values(), ","]
    tokens = [END, *words, *LETTERS, *DIGITS, *PLACEHOLDERS, *marks]
    return [*tokens, MASK]


def reference_config() -> DenoiserConfig:
    """Return the sizes of the reference model."""
    return DenoiserConfig(
        hidden=128,
        layers=4,
        heads=4,
        kv_heads=4,
        ffn=320,
        vocab=64,
        mask_id=len(vocabulary()) - 1,
        max_length=64,
        rope_theta=10000.0,
    )


@dataclass(frozen=True, slots=True)
class Batch:
    """What one step trains on.

    Attributes:
        ids: Prompt and partly masked answer [B, L].
        mask: True where a token is to be attended to [B, L].
        positions: The answer's tokens [B, G].
        targets: The right tokens, -100 where the token was shown [B, G].
        weights: How much each token counts [B, G].
        tasks: Name of each row's task [B].
    """

    ids: Tensor
    mask: Tensor
    positions: Tensor
    targets: Tensor
    weights: Tensor
    tasks: list[str]


def draw_batch(config: TrainConfig, step: int) -> Batch:
    """Return the batch of a step.  The batch depends on (seed, step) alone, so a
    resumed run draws what an uninterrupted one would.
    """
    rng = random.Random(f"{config.seed}/{step}")
    ids_of = {token: index for index, token in enumerate(vocabulary())}
    mixture = config.mixture if step < config.late else config.late_mixture
    names, weights = zip(*mixture, strict=True)
    length = PROMPT_LENGTH + GEN_LENGTH
    ids = torch.full((config.batch, length), ids_of[END])
    mask = torch.zeros((config.batch, length), dtype=torch.bool)
    positions = torch.empty((config.batch, GEN_LENGTH), dtype=torch.long)
    targets = torch.full((config.batch, GEN_LENGTH), -100)
    shares = torch.ones((config.batch, GEN_LENGTH))
    tasks = rng.choices(names, weights, k=config.batch)
    for row, name in enumerate(tasks):
        draw = TASKS[name].practice or TASKS[name].draw
        prompt, answer = draw(rng)
        while split_of(prompt) != "train":
            prompt, answer = draw(rng)
        word = f"{name}:"
        start = [ids_of[word], *(ids_of[symbol] for symbol in prompt.removeprefix(word))]
        wanted = [ids_of[symbol] for symbol in answer]
        wanted += [ids_of[END]] * (GEN_LENGTH - len(wanted))
        at = len(start)
        ids[row, :at] = torch.tensor(start)
        ids[row, at : at + GEN_LENGTH] = torch.tensor(wanted)
        mask[row, : at + GEN_LENGTH] = True
        positions[row] = torch.arange(at, at + GEN_LENGTH)
        if TASKS[name].scored == "start":
            shares[row, 1:] = CHATTER_WEIGHT
        hidden = rng.sample(range(GEN_LENGTH), rng.randint(1, GEN_LENGTH))
        for place in hidden:
            targets[row, place] = wanted[place]
            ids[row, at + place] = ids_of[MASK]
    used = int(mask.any(0).sum())
    shares = shares * (targets >= 0)
    return Batch(ids[:, :used], mask[:, :used], positions, targets, shares, tasks)


def learning_rate(config: TrainConfig, step: int) -> float:
    """Return the factor in (0, 1] on the peak learning rates at a step: up, flat, down."""
    left = (config.steps - step) / (config.decay * config.steps)
    return min(1.0, (step + 1) / config.warmup, max(left, 1e-3))


def train(config: TrainConfig, work: Path, threads: int) -> Denoiser:
    """Train, resuming from `work/state.pt` where there is one, and return the averaged model."""
    work.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(config.seed)
    torch.set_num_threads(threads)
    model = Denoiser(reference_config())
    for parameter in model.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.02 if parameter.shape[0] == 64 else 0.06)
    matrices = [p for block in model.blocks for p in block.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if not any(p is m for m in matrices)]
    muon = torch.optim.Muon(matrices, lr=config.muon_lr, momentum=0.95, weight_decay=0.01)
    adam = torch.optim.AdamW(others, lr=config.adam_lr, betas=(0.9, 0.98), weight_decay=0.0)
    average = {name: value.detach().clone() for name, value in model.state_dict().items()}
    first = 0
    state_file = work / "state.pt"
    if state_file.exists():
        state = torch.load(state_file, weights_only=True)
        model.load_state_dict(state["model"])
        muon.load_state_dict(state["muon"])
        adam.load_state_dict(state["adam"])
        average, first = state["average"], state["step"]
        print(f"resuming at step {first}", file=sys.stderr)
    saved = said = time.monotonic()
    for step in range(first, config.stop):
        factor = learning_rate(config, step)
        for optimizer, peak in ((muon, config.muon_lr), (adam, config.adam_lr)):
            for group in optimizer.param_groups:
                group["lr"] = peak * factor
        batch = draw_batch(config, step)
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(batch.ids, batch.mask, batch.positions)
        losses = F.cross_entropy(logits.float().transpose(1, 2), batch.targets, reduction="none")
        each = (losses * batch.weights).sum(1) / batch.weights.sum(1)
        each.mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        muon.step()
        adam.step()
        model.zero_grad(set_to_none=True)
        keep = min(config.ema, (step + 1) / (step + 10))
        with torch.no_grad():
            for name, value in model.state_dict().items():
                average[name].lerp_(value, 1.0 - keep)
        now = time.monotonic()
        if step % 200 == 199 or step + 1 == config.stop:
            by_task = {
                name: each.detach()[[task == name for task in batch.tasks]].mean().item()
                for name in sorted(set(batch.tasks))
            }
            words = " ".join(f"{name} {loss:.3f}" for name, loss in by_task.items())
            pace = (now - said) / 200
            said = now
            print(f"step {step + 1}/{config.stop}  {words}  {pace:.2f} s/step", file=sys.stderr)
        if now - saved > SAVE_SECONDS or step + 1 == config.stop:
            saved = now
            state = {
                "model": model.state_dict(),
                "muon": muon.state_dict(),
                "adam": adam.state_dict(),
                "average": average,
                "step": step + 1,
            }
            torch.save(state, work / "state.tmp")
            os.replace(work / "state.tmp", state_file)
    model.load_state_dict(average)
    return model


def main(argv: list[str] | None = None) -> int:
    """Train the reference checkpoint and write it; returns the exit code."""
    defaults = TrainConfig()
    parser = argparse.ArgumentParser(prog="python -m exporter.train", description=__doc__)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument(
        "--work", type=Path, default=Path("train.work"), help="where state is kept"
    )
    parser.add_argument("--stop", type=int, default=defaults.stop, help="steps to take")
    parser.add_argument("--seed", type=int, default=defaults.seed)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args(argv)
    model = train(TrainConfig(seed=args.seed, stop=args.stop), args.work, args.threads)
    save_checkpoint(model, vocabulary(), args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
