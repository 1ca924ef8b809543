"""A run folder as a Python object: its metrics, curves, weights and report."""

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vitrail.api import notebook
from vitrail.api.argument_checks import check_argument
from vitrail.api.keyword_errors import name_keywords
from vitrail.evaluation.statistics import Interval
from vitrail.report.run_facts import RunFacts, gather_facts
from vitrail.weights.load import load
from vitrail.weights.trained import Trained


@dataclasses.dataclass(frozen=True, repr=False)
class Run:
    """A run folder, of a run that has ended or not.

    Pass it wherever a model is expected; its best weights are used.

        run = vitrail.Run("runs/finetune")
        print(run.accuracy, run.interval, run.history["val/loss"])
        vitrail.evaluate(run, "photos")
    """

    folder: Path
    notes: tuple[str, ...] = ()
    """What was assumed or left out during the run, a sentence each."""

    @name_keywords
    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", Path(check_argument("folder", self.folder, str | Path)))
        _ = self.config  # refuses what is no run folder

    @functools.cached_property
    def facts(self) -> RunFacts:
        """Everything that the folder records."""
        return gather_facts(self.folder)

    @property
    def config(self) -> Mapping[str, Any]:
        """The run's config.json: recipe, data, classes, seed, machine."""
        return self.facts.config

    @property
    def metrics(self) -> dict[str, Any]:
        """The numbers of the best weights, on test or else on val; empty until the run has ended.

        Of a classifier: split, images, correct, top1, interval, top5, loss, macro_accuracy, temperature,
        calibration_error and seconds.
        """
        facts = self.facts
        if facts.pretraining is not None:
            return dataclasses.asdict(facts.pretraining)
        if facts.result is None:
            return {}
        numbers = dataclasses.asdict(facts.result)
        numbers |= {"top1": facts.result.top1, "interval": tuple(facts.result.interval)}
        if facts.macro_accuracy is not None:
            numbers["macro_accuracy"] = facts.macro_accuracy
        if facts.multi_label_metrics is not None:
            numbers |= dataclasses.asdict(facts.multi_label_metrics)
        return numbers

    @property
    def accuracy(self) -> float | None:
        """The top-1 accuracy on held-out images; None until the run has ended, and for a run without labels."""
        return None if self.facts.result is None else self.facts.result.top1

    @property
    def interval(self) -> Interval | None:
        """The 95 % confidence interval of the accuracy."""
        return None if self.facts.result is None else self.facts.result.interval

    @property
    def history(self) -> dict[str, tuple[float, ...]]:
        """The columns of results.csv: a value for each evaluation during training."""
        return dict(self.facts.epochs)

    @property
    def weights(self) -> Path:
        """The file of the best weights."""
        return self.folder / "weights" / "best.safetensors"

    @functools.cached_property
    def trained(self) -> Trained:
        """The best weights, with their preprocessing and labels."""
        return load(self.weights)

    @property
    def report(self) -> Path | None:
        """The HTML report; None where it was not written."""
        path = self.folder / "report.html"
        return path if path.is_file() else None

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r}: {notebook.summarize_run(self.facts)})"

    def _repr_html_(self) -> str:
        return notebook.render_run(self.folder, self.facts, self.notes)
