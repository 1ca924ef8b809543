"""A run that ends on time: its number of steps is decided again as it goes, by what a step takes and the time left.

    decision (s, n)   after s steps the run is planned to take n in all

The learning rate follows the curve of the first plan, walked faster or slower after each decision. So the weights are a
function of the log of decisions, whatever the clock said: `PlannedSteps` computes, `Deadline` alone looks at the time.
"""

import dataclasses
import time
from collections.abc import Callable

_WORDS = 4.0  # seconds of drawing, writing and importing at a run's end, on an idle core
_REPORT_IMAGES = 300  # the report's figures cost about as much as this many forward passes
_RECENT = 0.05  # share of the budget over which the speed of the last steps is averaged
_RECENT_STEPS = 2  # at least
_HYSTERESIS = 0.1  # a new plan differs by this share of the steps left from the one before
_MARGIN = 1.5  # times what follows the last step is kept free: no plan can shorten it when the machine gets busy then
_RESERVE = 0.03  # of the budget: to end a little early is what was asked for, to end late is not
_FORWARD = 1 / 3  # of a training image's time is that of a forward pass, until one is timed
PRECISION = 30.0  # seconds that precisions are compared for, at most: enough for a hundred images of a ViT-B/16
PRECISION_SHARE = 0.05  # of the seconds of training, at most


@dataclasses.dataclass
class PlannedSteps:
    """How many steps a run takes: those of the first plan, until a decision changes them."""

    first: int
    decisions: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    """(step, steps): after `step` steps, `steps` in all are planned; in the order of the steps."""

    def total(self, step: int) -> int:
        """Steps in all, as planned after `step` of them."""
        return next((steps for at, steps in reversed(self.decisions) if at <= step), self.first)

    def position(self, step: int) -> float:
        """Where a step lies in the first plan, by which its learning rate goes: from 0 to `first`."""
        start, position, total = 0, 0.0, self.first
        for at, steps in self.decisions:
            if at > step:
                break
            position += (self.first - position) * (at - start) / (total - start)
            start, total = at, steps
        return position + (self.first - position) * (step - start) / (total - start)

    def change(self, step: int, steps: int) -> None:
        """Decide after `step` steps that there are `steps` in all."""
        if steps != self.total(step):
            self.decisions.append((step, steps))


@dataclasses.dataclass
class Deadline:
    """The time that a whole command may take, and how many steps fit into what is left of it."""

    seconds: float
    """From `began` until the report is written."""
    most_steps: int
    """More would not help."""
    image_seconds: float
    """Of a training image, by a trial until steps are timed."""
    batch: int
    images: int
    """Training images."""
    val: int
    test: int
    """Images that the result is measured on; 0 where it is measured on val."""
    every: int
    """Epochs from one evaluation to the next."""
    world: int = 1
    """Ranks that train together."""
    began: float = dataclasses.field(default_factory=time.monotonic)
    clock: Callable[[], float] = time.monotonic

    _steps: list[float] = dataclasses.field(default_factory=list)
    """Seconds of each step."""
    _mark: float | None = None
    """When the step that is timed began."""
    _fresh: float = _FORWARD
    """What it takes to evaluate an image that has to be decoded, in units of a training image."""
    _cached: float | None = None
    """The same of one that is in memory, as the validation images are after the first time."""

    @property
    def elapsed(self) -> float:
        """Seconds since the command began, those before an interruption included."""
        return self.clock() - self.began

    @property
    def left(self) -> float:
        """Seconds until all must be done."""
        return self.seconds * (1 - _RESERVE) - self.elapsed

    def scale(self, cost: float) -> "Deadline":
        """The same for a run whose images cost so many times as much."""
        return dataclasses.replace(self, image_seconds=self.image_seconds * cost)

    def resume(self, elapsed: float) -> None:
        """Count the seconds before an interruption too."""
        self.began -= elapsed

    def begin_step(self) -> None:
        """Time what follows as a step."""
        self._mark = self.clock()

    def end_step(self) -> None:
        """Take note of what the step took."""
        if self._mark is None:
            return
        self._steps.append(self.clock() - self._mark)
        if len(self._steps) == 1:  # it may have waited for the workers to start
            self.image_seconds = min(self.image_seconds, self._steps[0] / self.batch)
            return
        recent: list[float] = []
        for seconds in reversed(self._steps[1:]):
            recent.append(seconds)
            if len(recent) >= _RECENT_STEPS and sum(recent) >= _RECENT * self.seconds:
                break
        self.image_seconds = max(sum(recent) / len(recent) / self.batch, 1e-9)

    def end_evaluation(self, seconds: float) -> None:
        """Take note of what evaluating the validation images took; the first time they are decoded."""
        cost = seconds / max(self.val, 1) / self.image_seconds
        if self._cached is None:
            self._fresh = min(cost, 1.0)  # of few images it is mostly the start of the workers
        self._cached = cost

    def fit_steps(self, step: int) -> int:
        """How many steps in all fit after `step` of them, evaluations and all that follows the last one included."""
        evaluations = min(1.0, self.batch / (self.every * self.images))  # of a step
        seconds = self.image_seconds * (self.batch + self._val_cost * evaluations)
        after = _MARGIN * self.seconds_after(evaluated=False) + min(PRECISION, PRECISION_SHARE * self.seconds)
        return min(step + max(0, int((self.left - after) / seconds)), self.most_steps)

    def replan(self, step: int, steps: int) -> int:
        """The steps in all after `step` of them; those planned so far where they would change little.

        A run that has come to its end is not prolonged: the learning rate has come to its end too.
        """
        if step >= steps:
            return steps
        fitting = self.fit_steps(step)
        change = abs(fitting - steps)
        return fitting if change >= max(1, _HYSTERESIS * (steps - step)) or fitting == step else steps

    @property
    def _val_cost(self) -> float:
        """What an evaluation of the validation images takes, in training images."""
        return (self._fresh if self._cached is None else self._cached) * self.val

    def seconds_after(self, *, evaluated: bool) -> float:
        """Seconds after the last step: test and report, and unless `evaluated` the last evaluation and the temperature.

        All ranks evaluate together; what follows one of them does alone.
        """
        alone = self._fresh * self.test if self.test else self._val_cost
        images = self.world * alone if evaluated else self._val_cost + self.world * (self._val_cost + alone)
        return _WORDS + self.image_seconds * images + self.figure_seconds

    @property
    def figure_seconds(self) -> float:
        """Seconds that the report's figures of the model take, without which it can be written too."""
        return self.image_seconds * self.world * self._fresh * _REPORT_IMAGES

    @property
    def precision_seconds(self) -> float:
        """Seconds that are left to compare precisions in, before test and report."""
        return self.left - self.seconds_after(evaluated=True)
