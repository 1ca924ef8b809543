"""A run that ends on time: its number of steps is planned again as it goes, from the time of a step and the time left.

    decision (s, n)   after s steps the run is planned to take n in all

The learning rate follows the curve of the first plan, faster or slower after each decision. So the weights are a
function of the logged decisions, whatever the clock said: `PlannedSteps` computes, and only `Deadline` reads the time.
"""

import dataclasses
import time
from collections.abc import Callable

_REPORT_WRITING_SECONDS = 4.0  # seconds of drawing, writing and importing at a run's end, on an idle core
_REPORT_FORWARD_IMAGES = 300  # the report's figures cost about as much as this many forward passes
_RECENT_SHARE = 0.05  # share of the budget over which the speed of the last steps is averaged
_MIN_RECENT_STEPS = 2  # at least
_HYSTERESIS = 0.1  # a new plan differs by this share of the steps left from the one before
_END_MARGIN = 1.5  # times the time after the last step is reserved: it cannot be shortened if the machine gets busy
_RESERVE_SHARE = 0.03  # of the budget: to end a little early is fine, to end late is not
_FORWARD_COST = 1 / 3  # of a training image's time is that of a forward pass, until one is timed
MAX_PRECISION_SECONDS = 30.0  # of comparing precisions, at most: enough for a hundred images of a ViT-B/16
_MIN_PRECISION_SECONDS = 1.0  # less shows nothing
MAX_PRECISION_SHARE = 0.05  # of the seconds of training, at most


@dataclasses.dataclass
class PlannedSteps:
    """How many steps a run takes: those of the first plan, until a decision changes them."""

    initial_steps: int
    decisions: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    """(step, steps): after `step` steps, `steps` in all are planned; in the order of the steps."""

    def get_total(self, step: int) -> int:
        """Steps in all, as planned after `step` of them."""
        return next((steps for at, steps in reversed(self.decisions) if at <= step), self.initial_steps)

    def get_schedule_position(self, step: int) -> float:
        """The position of a step in the first plan, which decides its learning rate: from 0 to `initial_steps`."""
        start, position, total = 0, 0.0, self.initial_steps
        for at, steps in self.decisions:
            if at > step:
                break
            position += (self.initial_steps - position) * (at - start) / (total - start)
            start, total = at, steps
        return position + (self.initial_steps - position) * (step - start) / (total - start)

    def set_total(self, step: int, steps: int) -> None:
        """Plan `steps` in all, after `step` steps."""
        if steps != self.get_total(step):
            self.decisions.append((step, steps))


@dataclasses.dataclass
class Deadline:
    """The time that a whole command may take, and how many steps fit into what is left of it."""

    budget_seconds: float
    """From `start_time` until the report is written."""
    max_steps: int
    """More would not help."""
    seconds_per_image: float
    """Of a training image; from a trial until steps are timed."""
    batch_size: int
    train_images: int
    val_images: int
    test_images: int
    """Images that the result is measured on; 0 where it is measured on val."""
    eval_every_epochs: int
    """Epochs from one evaluation to the next."""
    world_size: int = 1
    """Ranks that train together."""
    start_time: float = dataclasses.field(default_factory=time.monotonic)
    clock: Callable[[], float] = time.monotonic

    _step_seconds: list[float] = dataclasses.field(default_factory=list)
    """Seconds of each step."""
    _step_start: float | None = None
    """When the step that is timed began."""
    _uncached_eval_cost: float = _FORWARD_COST
    """The cost of evaluating an image that must be decoded, in training images."""
    _cached_eval_cost: float | None = None
    """The same for an image in memory, as the validation images are after the first time."""

    @property
    def elapsed(self) -> float:
        """Seconds since the command started, the time before an interruption included."""
        return self.clock() - self.start_time

    @property
    def seconds_left(self) -> float:
        """Seconds until everything must be done."""
        return self.budget_seconds * (1 - _RESERVE_SHARE) - self.elapsed

    def scale_image_cost(self, cost: float) -> "Deadline":
        """The deadline of a run whose images cost `cost` times as much."""
        return dataclasses.replace(self, seconds_per_image=self.seconds_per_image * cost)

    def resume(self, elapsed: float) -> None:
        """Count the seconds before an interruption, too."""
        self.start_time -= elapsed

    def begin_step(self) -> None:
        """Start timing a step."""
        self._step_start = self.clock()

    def end_step(self) -> None:
        """Record the time of the step."""
        if self._step_start is None:
            return
        self._step_seconds.append(self.clock() - self._step_start)
        if len(self._step_seconds) == 1:  # it may have waited for the workers to start
            self.seconds_per_image = min(self.seconds_per_image, self._step_seconds[0] / self.batch_size)
            return
        recent: list[float] = []
        for seconds in reversed(self._step_seconds[1:]):
            recent.append(seconds)
            if len(recent) >= _MIN_RECENT_STEPS and sum(recent) >= _RECENT_SHARE * self.budget_seconds:
                break
        self.seconds_per_image = max(sum(recent) / len(recent) / self.batch_size, 1e-9)

    def end_evaluation(self, seconds: float) -> None:
        """Record the time of evaluating the validation images; the first time includes decoding."""
        cost = seconds / max(self.val_images, 1) / self.seconds_per_image
        if self._cached_eval_cost is None:
            self._uncached_eval_cost = min(cost, 1.0)  # of few images it is mostly the start of the workers
        self._cached_eval_cost = cost

    def fit_steps(self, step: int) -> int:
        """The steps in all that fit, after `step` of them, with evaluations and everything after the last step."""
        evaluations = min(1.0, self.batch_size / (self.eval_every_epochs * self.train_images))  # of a step
        seconds = self.seconds_per_image * (self.batch_size + self._val_cost * evaluations)
        after = _END_MARGIN * self.estimate_seconds_after(is_evaluated=False) + min(
            MAX_PRECISION_SECONDS, MAX_PRECISION_SHARE * self.budget_seconds
        )
        return min(step + max(0, int((self.seconds_left - after) / seconds)), self.max_steps)

    def replan(self, step: int, steps: int) -> int:
        """The steps in all, after `step` of them; those planned before where they would change little.

        A run at its last step is not prolonged: its learning rate has reached its end, too.
        """
        if step >= steps:
            return steps
        fitting = self.fit_steps(step)
        change = abs(fitting - steps)
        return fitting if change >= max(1, _HYSTERESIS * (steps - step)) or fitting == step else steps

    @property
    def _val_cost(self) -> float:
        """The cost of evaluating the validation images, in training images."""
        return (
            self._uncached_eval_cost if self._cached_eval_cost is None else self._cached_eval_cost
        ) * self.val_images

    def estimate_seconds_after(self, *, is_evaluated: bool) -> float:
        """Seconds after the last step: test, report, and unless `is_evaluated` the last evaluation and temperature.

        All ranks evaluate together; rank 0 does the rest alone.
        """
        alone = self._uncached_eval_cost * self.test_images if self.test_images else self._val_cost
        images = (
            self.world_size * alone if is_evaluated else self._val_cost + self.world_size * (self._val_cost + alone)
        )
        return _REPORT_WRITING_SECONDS + self.seconds_per_image * images + self.figure_seconds

    @property
    def figure_seconds(self) -> float:
        """Seconds of the report's figures of the model; the report can be written without them."""
        return self.seconds_per_image * self.world_size * self._uncached_eval_cost * _REPORT_FORWARD_IMAGES

    @property
    def precision_seconds(self) -> float:
        """Seconds left to compare precisions, before test and report."""
        return self.seconds_left - self.estimate_seconds_after(is_evaluated=True)


def limit_precision_seconds(training_seconds: float, deadline: Deadline | None) -> float | None:
    """Seconds to compare precisions for, after training; None when the time limit leaves none."""
    seconds = min(MAX_PRECISION_SECONDS, MAX_PRECISION_SHARE * training_seconds)
    if deadline is None:
        return seconds
    seconds = min(seconds, deadline.precision_seconds)
    return seconds if seconds >= _MIN_PRECISION_SECONDS else None
