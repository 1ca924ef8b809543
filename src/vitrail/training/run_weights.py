"""The weights that a run leaves for others.

    weights/  last.safetensors  best.safetensors  adapter/

They are whole, ordinary models; LoRA's updates are merged. The adapter holds what such a run trained for the best.
"""

import shutil
from pathlib import Path

from vitrail import files
from vitrail.training import fsdp
from vitrail.training.checkpoint import collect_changing_tensors
from vitrail.training.loop import StepEnd
from vitrail.training.step import TrainableModel
from vitrail.training.training_run import TrainingRun, build_trained
from vitrail.weights import peft_export
from vitrail.weights.load import save

ADAPTER_FOLDER = "adapter"


def save_weights(run: TrainingRun, model: TrainableModel, folder: Path, step_end: StepEnd, *, is_best: bool) -> None:
    """Write the last weights, and the best if they are, into a run's folder; of a sharded model all ranks call this."""
    if not (run.group.is_rank0 or run.is_sharded):
        return
    full_model = fsdp.copy_full_model(model)
    trained_tensors = None
    if run.recipe.lora is not None and is_best:
        trained_tensors = fsdp.copy_full_tensors(collect_changing_tensors(model))
    if full_model is None:
        return
    last = folder / "weights" / "last.safetensors"
    trained = build_trained(run, full_model, step_end.step, step_end.steps)
    save(trained, last, overwrite=True)
    if is_best:
        with files.write_atomically(last.with_name("best.safetensors"), overwrite=True) as fresh:
            shutil.copyfile(last, fresh)
    if trained_tensors is not None and run.recipe.lora is not None and run.initial_model is not None:
        adapter = peft_export.build_adapter(trained_tensors, run.recipe.lora, trained, run.initial_model.origin)
        names = peft_export.choose_format(run.initial_model)
        peft_export.write_adapter(adapter, last.with_name(ADAPTER_FOLDER), names, overwrite=True)
