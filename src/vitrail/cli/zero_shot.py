"""`vitrail zero-shot MODEL LABELS`: a classifier of any labels from a CLIP or SigLIP."""

from pathlib import Path

from vitrail.api.zero_shot import DEFAULT_TEMPLATE, zero_shot
from vitrail.cli import output
from vitrail.cli.arguments.models import ZeroShotArguments
from vitrail.weights.formats import check_destination
from vitrail.weights.load import save


def run(arguments: ZeroShotArguments) -> None:
    """Write the classifier, and list what was changed."""
    path = arguments.out or Path(arguments.labels.with_suffix(".safetensors").name)
    check_destination(path, "vitrail", overwrite=arguments.overwrite)  # before texts are computed
    trained = zero_shot(
        arguments.model,
        arguments.labels,
        templates=arguments.templates or DEFAULT_TEMPLATE,
        text=arguments.text,
        text_vectors=arguments.text_vectors,
        scale=arguments.scale,
        bias=arguments.bias,
        device=arguments.device,
        progress=output.show_progress,
        notify=output.print_note,
    )
    save(trained, path, overwrite=arguments.overwrite)
    labels, changes = trained.labels or (), trained.origin.changes
    if arguments.output.json:
        output.print_json(
            {"written": str(path), "labels": labels, "changes": changes, "multi_label": trained.multi_label}
        )
        return
    rows = [("changed", change) for change in changes]
    output.print_table([*rows, ("labels", str(len(labels))), ("written", str(path))])
