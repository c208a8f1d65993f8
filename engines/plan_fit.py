"""Whether a plan fits this machine, from what it says of itself, before TensorRT sees a byte.

A plan is code for the SMs, the operating system and the very version of TensorRT that it was built
for.  Digests say that it is the plan that was shipped, this says that it is one for here; neither
says who made it.  Pure: both sides come in as values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engines.plan import Plan
from engines.targets import SMS, Target


@dataclass(frozen=True, slots=True)
class Here:
    """What would run a plan.

    Attributes:
        version: Of the module, for instance "1.7.1.116".
        sm: Of the GPU: its compute capability times ten.
        system: Operating system and processor, as `engines.machine` calls them.
    """

    version: str
    sm: int
    system: str


def misfit(
    engine: str,
    target: Target,
    plan: Plan,
    built: Mapping[str, object],
    here: Here,
    bundle: str,
) -> str | None:
    """Return why a plan cannot run here, both sides and the mend, or None.

    Args:
        engine: Its name, for the message.
        target: What it was built for.
        plan: What its header says.
        built: What the manifest records of its build: `system`, and for TensorRT's own plans,
            whose header does not say it, `sm`; what is not recorded is not compared.
        here: What would run it.
        bundle: Its folder, for the command.
    """
    version, system = ".".join(map(str, plan.version)), built.get("system")
    sms = tuple(sm for sm in target.sms if sm in plan.sms)
    recorded = built.get("sm")
    if not target.sms and isinstance(recorded, int):
        sms = (recorded,)
    elsewhere = bool(sms or target.sms) and here.sm not in sms
    if not (
        elsewhere or version != here.version or (isinstance(system, str) and system != here.system)
    ):
        return None
    name = _target_here(target, here) if elsewhere else target.name
    there = _side(sms, version, system if isinstance(system, str) else "a system not recorded")
    return (
        f"engine {engine!r} was built for {there}; here is "
        f"{_side((here.sm,), here.version, here.system)}; run: cadenza rebuild {bundle} "
        f"--target {name}"
    )


def _target_here(target: Target, here: Here) -> str:
    if target.module == "tensorrt-rtx" and here.sm in SMS:
        return f"rtx-sm{here.sm}"
    return "trt"


def _side(sms: tuple[int, ...], version: str, system: str) -> str:
    named = "+".join(f"sm{sm}" for sm in sms) or "an SM not recorded"
    return f"{named}, TensorRT {version}, {system}"
