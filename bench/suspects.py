"""Precision and recall of `vitrail data suspects` on planted label errors, beside cleanlab, and what cleaning is worth.

    python bench/suspects.py FOLDER --model MODEL            # uniform noise of 5, 10 and 20 %, three seeds
    python bench/suspects.py FOLDER --model MODEL --kind confused   # a wrong label is the class most confused with it

Noise is planted in train and val; test stays clean and measures cleaning: the accuracy of a logistic regression of the
features, trained on the noisy labels, on those with every suspect relabeled or dropped, and on the true ones. No image
is looked at by a person here. Features are cached, as by the command.
"""

import argparse
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitrail.data.sources import open_dataset
from vitrail.evaluation import confident_learning as learning
from vitrail.evaluation.cross_validation import assign_folds, compute_out_of_fold_probabilities
from vitrail.evaluation.features import read_labels
from vitrail.evaluation.label_errors import rank_suspects
from vitrail.evaluation.linear_classifiers import Features, solve_logistic
from vitrail.evaluation.probe_run import ProbeSettings, extract_dataset_features
from vitrail.weights.load import load

RATES, SEEDS, FOLDS = (0.05, 0.1, 0.2), 3, 5
PENALTY = 0.01  # of the regressions that measure cleaning, the same for all labels
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("data")
    parser.add_argument("--model", required=True)
    parser.add_argument("--kind", choices=("uniform", "confused"), default="uniform")
    parser.add_argument("--rates", type=float, nargs="+", default=RATES)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    splits, num_classes = read_features(arguments.data, arguments.model)
    clean = splits["train"].concatenate(splits["val"])
    print(f"{len(clean.targets):,} images of {num_classes} classes, {len(splits['test'].targets):,} clean test images")
    partners = find_confused_classes(clean, num_classes) if arguments.kind == "confused" else None
    rows: list[Row] = []
    for rate in arguments.rates:
        for seed in range(arguments.seeds):
            noisy = plant_errors(clean.targets, num_classes, rate, seed, partners)
            rows += measure(Features(clean.values, noisy), clean.targets, splits["test"], num_classes, seed, rate)
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    print_table(rows)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


def read_features(data: str, model: str) -> tuple[dict[str, Features], int]:
    dataset, settings = open_dataset(data), ProbeSettings(device=torch.device("cpu"))
    values, _ = extract_dataset_features(load(model), dataset, data, settings)
    splits = {name: Features(values[name], read_labels(split)) for name, split in dataset.splits.items()}
    return splits, len(dataset.classes)


def predict(features: Features, num_classes: int, seed: int) -> Tensor:
    fold_index = assign_folds(features.targets.numpy(), np.arange(len(features.targets)), FOLDS, seed)
    return compute_out_of_fold_probabilities(features, num_classes, fold_index)


def find_confused_classes(clean: Features, num_classes: int) -> Tensor:
    """(L,): the class for which each is taken most often."""
    likely = learning.find_likely_labels(predict(clean, num_classes, 0), clean.targets)
    pairs = (clean.targets * num_classes + likely).bincount(minlength=num_classes**2)
    return pairs.view(num_classes, num_classes).argmax(dim=1)


def plant_errors(labels: Tensor, num_classes: int, rate: float, seed: int, partners: Tensor | None) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(len(labels), generator=generator)[: round(rate * len(labels))]
    shift = torch.randint(1, num_classes, (len(chosen),), generator=generator)
    noisy = labels.clone()
    noisy[chosen] = (labels[chosen] + shift) % num_classes if partners is None else partners[labels[chosen]]
    return noisy


# --- rankings --------------------------------------------------------------------------------------------------------


def measure(noisy: Features, truth: Tensor, test: Features, num_classes: int, seed: int, rate: float) -> list[Row]:
    start = time.process_time()
    probabilities = predict(noisy, num_classes, seed)
    seconds = time.process_time() - start
    labels, is_wrong = noisy.targets, noisy.targets != truth
    confidence = learning.compute_self_confidence(probabilities, labels)
    suspects = list(rank_suspects(probabilities, labels, torch.ones(len(labels), dtype=torch.bool)))
    rankings: dict[str, Callable[[], Tensor]] = {
        "vitrail": lambda: confidence,
        "vitrail, by margin": lambda: learning.compute_normalized_margin(probabilities, labels),
        "cleanlab, same probabilities": lambda: rank_by_cleanlab(probabilities, labels),
        "cleanlab, scikit-learn": lambda: rank_by_cleanlab(predict_by_scikit_learn(noisy, seed), labels),
    }
    rows = []
    for name, make_scores in rankings.items():
        begin = time.process_time()
        row: Row = {"rate": rate, "seed": seed, "ranking": name} | score_ranking(make_scores(), is_wrong)
        row["seconds"] = time.process_time() - begin + (0 if name.endswith("scikit-learn") else seconds)
        rows.append(row)
    rows[0] |= describe_suspects(suspects, is_wrong)
    return [rows[0] | measure_cleaning(noisy, truth, test, probabilities, suspects, num_classes), *rows[1:]]


def score_ranking(scores: Tensor, is_wrong: Tensor) -> Row:
    """Precision at the top, where k is the number of planted errors (so precision is recall), and average precision."""
    hits = is_wrong[scores.argsort(stable=True)].double()
    precision = hits.cumsum(0) / torch.arange(1, len(hits) + 1)
    planted = int(hits.sum())
    average = float((precision * hits).sum() / planted)
    return {"at_k": float(precision[planted - 1]), "at_half_k": float(precision[planted // 2 - 1]), "ap": average}


def describe_suspects(suspects: list[int], is_wrong: Tensor) -> Row:
    hits = int(is_wrong[suspects].sum())
    return {"listed": len(suspects), "precision": hits / max(1, len(suspects)), "recall": hits / int(is_wrong.sum())}


def rank_by_cleanlab(probabilities: Tensor, labels: Tensor) -> Tensor:
    """cleanlab's default: self-confidence of its label issues first, then of the others."""
    from cleanlab.filter import find_label_issues
    from cleanlab.rank import get_label_quality_scores

    scores = get_label_quality_scores(labels.numpy(), probabilities.numpy())
    issues = find_label_issues(labels.numpy(), probabilities.numpy(), n_jobs=1)
    return torch.from_numpy(scores - issues.astype(float))


def predict_by_scikit_learn(noisy: Features, seed: int) -> Tensor:
    """Out-of-fold probabilities by scikit-learn's logistic regression of standardized features, with its defaults."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import StratifiedKFold, cross_val_predict
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    classifier = make_pipeline(StandardScaler(), LogisticRegression(max_iter=200))
    folds = StratifiedKFold(FOLDS, shuffle=True, random_state=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # classes smaller than the folds, and searches that end early
        return torch.from_numpy(
            cross_val_predict(classifier, noisy.values.numpy(), noisy.targets.numpy(), cv=folds, method="predict_proba")
        )


# --- what cleaning is worth ------------------------------------------------------------------------------------------


def measure_cleaning(
    noisy: Features, truth: Tensor, test: Features, probabilities: Tensor, suspects: list[int], num_classes: int
) -> Row:
    """The accuracy on clean test images after training on labels in several states."""
    likely = learning.find_likely_labels(probabilities, noisy.targets)
    relabeled, reviewed = noisy.targets.clone(), noisy.targets.clone()
    relabeled[suspects] = likely[suspects]
    reviewed[suspects] = truth[suspects]  # a person decides about every suspect, and is right
    kept = torch.ones(len(truth), dtype=torch.bool)
    kept[suspects] = False
    states = {
        "noisy": noisy,
        "dropped": Features(noisy.values[kept], noisy.targets[kept]),
        "relabeled": Features(noisy.values, relabeled),
        "reviewed": Features(noisy.values, reviewed),
        "true": Features(noisy.values, truth),
    }
    accuracies = {}
    for name, features in states.items():
        (head,) = solve_logistic(features, num_classes, [PENALTY], gradient_tolerance=1e-4)
        accuracies[name] = head.count_correct(test) / len(test.targets)
    return accuracies


def print_table(rows: list[Row]) -> None:
    """Means over the seeds, with standard deviations of the precision."""
    for rate in dict.fromkeys(row["rate"] for row in rows):
        print(f"\n{rate:.0%} planted")
        for name in dict.fromkeys(row["ranking"] for row in rows):
            group = [row for row in rows if (row["rate"], row["ranking"]) == (rate, name)]
            mean = {key: statistics.mean(row[key] for row in group) for key in ("at_half_k", "at_k", "ap", "seconds")}
            spread = statistics.stdev(row["at_k"] for row in group) if len(group) > 1 else 0.0
            print(
                f"  {name:30} at k/2 {mean['at_half_k']:.1%}  at k {mean['at_k']:.1%} ± {spread:.1%}"
                f"  AP {mean['ap']:.3f}  {mean['seconds']:.0f} s"
            )
        own = [row for row in rows if row["rate"] == rate and "listed" in row]
        for keys in (("listed", "precision", "recall"), ("noisy", "dropped", "relabeled", "reviewed", "true")):
            print("  " + ", ".join(f"{key} {statistics.mean(row[key] for row in own):.4g}" for key in keys))


if __name__ == "__main__":
    main()
