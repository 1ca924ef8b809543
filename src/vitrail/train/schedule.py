"""The learning rate over the steps, as a function of numbers: there is no state to save.

torch's schedulers count their own calls, and what they counted must be saved and restored; here a step has its rate.
"""

import math

from vitrail.config import ScheduleConfig
from vitrail.errors import UsageError


def lr_scale(schedule: ScheduleConfig, step: float, steps: int) -> float:
    """The learning rate of step `step`, from 0 to `steps` - 1, as a share of its top.

    As in the authors' code a step takes the value at its beginning. With a warm-up of w steps, step 0 gives 0 (it fills
    the optimizer's averages and moves nothing) and step w exactly 1; without one, step 0 gives 1. The curve ends at
    `steps`, which is no step any more: the last step stands one step before `final`, or before the cooldown's 0.
    """
    warmup, cooldown = schedule.warmup, schedule.cooldown
    if warmup + cooldown > steps:
        raise UsageError(
            f"a warm-up of {warmup} steps and a cooldown of {cooldown} do not fit into {steps} steps;"
            " shorten them (--warmup)"
        )
    if step < warmup:
        return step / warmup
    since, left = step - warmup, steps - step
    match schedule.decay:
        case "cosine":
            return 1 - (1 - schedule.final_lr_scale) * (1 - math.cos(math.pi * since / (since + left))) / 2
        case "linear":
            return 1 - (1 - schedule.final_lr_scale) * since / (since + left)
        case "rsqrt":
            level = (1 + since / schedule.timescale) ** -0.5
        case "constant":
            level = 1.0
        case "step":
            level = 10.0 ** -sum(step > part * steps for part in schedule.milestones or ())
    return level * left / cooldown if left < cooldown else level
