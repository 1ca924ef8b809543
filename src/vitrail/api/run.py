"""A run folder as a Python object: its metrics, curves, weights and report."""

import dataclasses
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
    _final: dict[str, Any] = dataclasses.field(default_factory=dict, init=False, compare=False)
    """The facts and weights of a run that has ended, which no longer change."""

    @name_keywords
    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", Path(check_argument("folder", self.folder, str | Path)))
        _ = self.config  # refuses what is no run folder

    @property
    def _facts(self) -> RunFacts:
        """Everything that the folder records; it is read again until the run has ended."""
        facts = self._final.get("facts") or gather_facts(self.folder)
        if facts.has_result:
            self._final["facts"] = facts
        return facts

    @property
    def config(self) -> Mapping[str, Any]:
        """The run's config.json: recipe, data, classes, seed, machine."""
        return self._facts.config

    @property
    def metrics(self) -> dict[str, Any]:
        """The numbers of the best weights, on test or else on val; empty until the run has ended.

        Of a classifier: split, images, correct, top1, interval, top5, loss, macro_accuracy, temperature,
        calibration_error and seconds.
        """
        facts = self._facts
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
            del numbers["bins"]  # what the report's chart is drawn from
        return numbers

    @property
    def accuracy(self) -> float | None:
        """The top-1 accuracy on held-out images; None until the run has ended, and for a run without labels."""
        result = self._facts.result
        return None if result is None else result.top1

    @property
    def interval(self) -> Interval | None:
        """The 95 % confidence interval of the accuracy."""
        result = self._facts.result
        return None if result is None else result.interval

    @property
    def history(self) -> dict[str, tuple[float, ...]]:
        """The columns of results.csv: a value for each evaluation during training."""
        return dict(self._facts.epochs)

    @property
    def weights(self) -> Path:
        """The file of the best weights."""
        return self.folder / "weights" / "best.safetensors"

    @property
    def trained(self) -> Trained:
        """The best weights, with their preprocessing and labels; those so far until the run has ended."""
        has_ended = self._facts.has_result
        trained = self._final.get("trained") or load(self.weights)
        if has_ended:
            self._final["trained"] = trained
        return trained

    @property
    def report(self) -> Path | None:
        """The HTML report; None where it was not written."""
        path = self.folder / "report.html"
        return path if path.is_file() else None

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r}: {notebook.summarize_run(self._facts)})"

    def _repr_html_(self) -> str:
        return notebook.render_run(self.folder, self._facts, self.notes)
