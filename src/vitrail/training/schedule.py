"""The learning-rate schedule as a function of the step: there is no state to save.

torch's schedulers count their own calls, and that count must be saved and restored; here a step determines its rate.
"""

import math

from vitrail.config import ScheduleConfig
from vitrail.errors import UsageError


def lr_scale(schedule: ScheduleConfig, step: float, steps: int) -> float:
    """The factor of the learning rate at step `step`, from 0 to `steps` - 1.

    As in the authors' code a step takes the value at its beginning. With a warm-up of w steps, step 0 gives 0 (it fills
    the optimizer's averages and moves nothing) and step w exactly 1; without one, step 0 gives 1. The curve ends at
    `steps`, after the last step: that is one step before `final_lr_scale`, or before the cooldown's 0.
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
