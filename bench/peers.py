"""transformers' Trainer and timm, fine-tuning as their own scripts would, for as many epochs as a budget allows.

Hyper-parameters are theirs and stated with their sources below. What does not change the mathematics is given to them:
bf16 on a GPU, as many worker processes as cores, workers that live on between epochs. Imports, loading, the first batch
and the final evaluation are not on the clock. The number of epochs is fitted to the budget by training for a tenth of
it first, which is thrown away; the schedule then spans exactly those epochs.
"""

import dataclasses
import importlib
import json
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

_declared: list[torch.library.Library] = []  # declarations live as long as the library object
_TRIAL = 0.1  # of the budget, thrown away
_MARGIN = 0.97  # of the budget is planned, so that it is not overrun
_WARM = 3  # steps before the pace is measured
_EVALUATION_BATCH = 256


def allow_torchvision() -> None:
    """Let torchvision import beside a build of torch that its compiled operators do not fit.

    transformers and timm import it for its transforms, which need none of them; but it registers shapes for two
    operators at import, which must be declared.
    """
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _declared.append(library)
        importlib.import_module("torchvision")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """One run."""

    data: Path
    """With train/CLASS/* and test/CLASS/*."""
    timm_model: Path
    """A folder as timm writes it: config.json and model.safetensors."""
    transformers_model: Path
    """The same weights as transformers reads them."""
    minutes: float
    seed: int
    device: torch.device
    workers: int

    @property
    def classes(self) -> int:
        """Outputs of the new head."""
        return len([path for path in (self.data / "train").iterdir() if path.is_dir()])

    @property
    def cuda(self) -> bool:
        """Whether bf16 is used."""
        return self.device.type == "cuda"

    def autocast(self) -> torch.autocast:
        """bf16 on a GPU."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.cuda)


@dataclasses.dataclass(frozen=True)
class Trained:
    """What training gave."""

    model: nn.Module
    epochs: float
    images: int
    seconds: float
    pace: float
    """Images a second without the first steps, in which kernels are loaded and memory is allocated."""


class Stopwatch:
    """Images and seconds from the first batch's arrival on."""

    def __init__(self, job: Job, limit: float | None) -> None:
        self.job, self.limit = job, limit
        self.images, self.steps, self.begun = 0, 0, 0.0
        self.warm = (0, 0.0)  # images and time when the first steps were done

    def now(self) -> float:
        """The time, when all is done that the GPU was given to do."""
        if self.job.cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def start_step(self) -> None:
        """A batch is there."""
        if not self.steps:
            self.begun = self.now()
            self.warm = (0, self.begun)

    def count_step(self, images: int) -> bool:
        """A step was made with so many images; true when the limit is reached."""
        self.images, self.steps = self.images + images, self.steps + 1
        if self.steps == _WARM:
            self.warm = (self.images, self.now())
        return self.limit is not None and self.steps > _WARM and time.perf_counter() - self.warm[1] > self.limit

    def summarize(self, model: nn.Module, epochs: float, images: int | None = None) -> Trained:
        """What it saw until now."""
        end = self.now()
        counted, since = self.warm
        pace = (self.images - counted) / (end - since) if self.images > counted else self.images / (end - self.begun)
        return Trained(model, epochs, self.images if images is None else images, end - self.begun, pace)


def fit_epochs(trial: Trained, minutes: float, images: int) -> int:
    """Whole epochs that fit into the minutes at the pace of a trial, and one at least."""
    return max(1, int(trial.pace * minutes * 60 * _MARGIN / images))


# --- transformers ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Arguments:
    """What is set of TrainingArguments; the rest are its defaults: AdamW, linear decay, no weight decay, clip 1."""

    lr: float
    epochs: float
    source: str


TRANSFORMERS = {
    "transformers": Arguments(5e-5, 3, "run_image_classification.py: the defaults of TrainingArguments"),
    "transformers-readme": Arguments(2e-5, 5, "the command in the README of examples/pytorch/image-classification"),
}
_TRANSFORMERS_BATCH = 8  # both


def train_with_transformers(job: Job, arguments: Arguments, epochs: float | None) -> Trained:
    """The example's model, images and Trainer; for the epochs given, or as many as fit."""
    if epochs is not None:
        return _run_trainer(job, arguments, epochs, None)
    trial = _run_trainer(job, arguments, 1000, job.minutes * 60 * _TRIAL)
    images = sum(1 for path in (job.data / "train").glob("*/*") if path.is_file())
    return _run_trainer(job, arguments, fit_epochs(trial, job.minutes, images), None)


def _run_trainer(job: Job, given: Arguments, epochs: float, limit: float | None) -> Trained:
    import transformers
    from transformers import AutoModelForImageClassification, PrinterCallback, Trainer, TrainerCallback

    transformers.logging.set_verbosity_error()  # it reports the new head as a mismatch
    transformers.logging.disable_progress_bar()
    watch = Stopwatch(job, limit)

    class Watch(TrainerCallback):  # type: ignore[misc]  # mypy does not see into transformers
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            watch.start_step()

        def on_step_end(self, _: Any, __: Any, control: Any, **___: Any) -> None:
            control.should_training_stop = watch.count_step(_TRANSFORMERS_BATCH)

    transformers.set_seed(job.seed)
    model = AutoModelForImageClassification.from_pretrained(
        job.transformers_model, num_labels=job.classes, ignore_mismatched_sizes=True
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            learning_rate=given.lr,
            num_train_epochs=epochs,
            per_device_train_batch_size=_TRANSFORMERS_BATCH,
            seed=job.seed,
            bf16=job.cuda,
            use_cpu=not job.cuda,
            dataloader_num_workers=job.workers,
            dataloader_persistent_workers=job.workers > 0,
            remove_unused_columns=False,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        images = _open_example_images(job, "train")
        trainer = Trainer(
            model=model, args=arguments, train_dataset=images, data_collator=_collate, callbacks=[Watch()]
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return watch.summarize(_Logits(model), trainer.state.epoch, round(trainer.state.epoch * len(images)))


def _open_example_images(job: Job, split: str) -> Any:
    """The split through the example's transforms: a random crop and a flip, or the processor's resize and crop."""
    from torchvision import transforms
    from torchvision.datasets import ImageFolder

    view = json.loads((job.transformers_model / "preprocessor_config.json").read_text())
    crop = view["crop_size"]["height"]
    finish = [transforms.ToTensor(), transforms.Normalize(view["image_mean"], view["image_std"])]
    if split == "train":
        begin = [transforms.RandomResizedCrop(crop), transforms.RandomHorizontalFlip()]
    else:
        begin = [transforms.Resize(view["size"]["shortest_edge"]), transforms.CenterCrop(crop)]
    return ImageFolder(str(job.data / split), transforms.Compose([*begin, *finish]))


def _collate(items: list[tuple[Tensor, int]]) -> dict[str, Tensor]:
    pixels, labels = zip(*items, strict=True)
    return {"pixel_values": torch.stack(pixels), "labels": torch.tensor(labels)}


class _Logits(nn.Module):
    """A transformers model that answers with logits alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixels: Tensor) -> Tensor:
        return self.model(pixel_values=pixels).logits


def test_with_transformers(job: Job, trained: Trained) -> tuple[int, int]:
    """Images of the test split that are classified correctly, and all of them."""
    from torch.utils.data import DataLoader

    images = _open_example_images(job, "test")
    return _count_correct(job, trained.model, DataLoader(images, batch_size=_EVALUATION_BATCH, num_workers=job.workers))


# --- timm ------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Options of timm's train.py; the defaults are its own."""

    source: str
    opt: str = "adamw"
    lr: float
    """Taken as published, whatever the batch, as train.py takes --lr; scaled down it would learn slower still."""
    eps: float | None = None
    weight_decay: float = 2e-5
    layer_decay: float | None = None
    clip: float | None = None
    epochs: int = 300
    warmup_epochs: int = 5
    warmup_lr: float = 1e-5
    min_lr: float = 0.0
    cooldown_epochs: int = 0
    color_jitter: float = 0.4
    augment: str | None = None
    interpolation: str = "random"
    erase: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0
    smoothing: float = 0.1
    drop_path: float = 0.0

    @property
    def total(self) -> int:
        """Epochs with the cooldown, which train.py adds."""
        return self.epochs + self.cooldown_epochs


TIMM = {
    "timm": Settings(
        source="fine-tune hparams on the model cards of timm's ViTs fine-tuned on iNaturalist 2021",
        lr=5e-5,
        eps=1e-6,
        weight_decay=0.01,
        layer_decay=0.8,
        clip=1.0,
        warmup_lr=0.0,
    ),
    "timm-augreg2": Settings(
        source="timm's author on vit_base_patch16_224.augreg2_in21k_ft_in1k, its discussion 1, as far as quoted:"
        " its weight decay and warm-up are not, train.py's defaults stand there",
        lr=2e-4,
        layer_decay=0.7,
        clip=2.0,
        epochs=50,
        cooldown_epochs=10,
        augment="rand-m8-inc1-mstd101",
        cutmix=1.0,
        drop_path=0.1,
    ),
    "timm-deit": Settings(
        source="DeiT's authors for CIFAR-10, issue 45 of facebookresearch/deit, whose code is made of timm's parts",
        opt="sgd",
        lr=0.01,
        weight_decay=1e-4,
        epochs=1000,
        warmup_lr=1e-6,
        min_lr=1e-5,
        cooldown_epochs=10,
        augment="rand-m9-mstd0.5-inc1",
        interpolation="bicubic",
        mixup=0.8,
        cutmix=1.0,
    ),
}
_TIMM_BATCH = 128  # train.py's default; the published ones, 768 and more, are larger than some of the sets


def train_with_timm(job: Job, settings: Settings, epochs: float | None) -> Trained:
    """What train.py does with these settings; for the epochs given, or as many as fit."""
    if epochs is not None:
        return _run_timm_training(job, settings, round(epochs), None)
    trial = _run_timm_training(job, settings, 1000, job.minutes * 60 * _TRIAL)
    images = _open_timm_images(job, "train")
    return _run_timm_training(job, settings, fit_epochs(trial, job.minutes, len(images)), None)


def _run_timm_training(job: Job, settings: Settings, epochs: int, limit: float | None) -> Trained:
    from timm.optim import create_optimizer_v2
    from timm.scheduler import create_scheduler_v2
    from timm.utils import random_seed

    random_seed(job.seed)
    model = _build_timm_model(job, settings).to(job.device).train()
    batches, loss = _build_training_loader(job, settings, model)
    named = {} if settings.eps is None else {"eps": settings.eps}
    optimizer = create_optimizer_v2(
        model,
        opt=settings.opt,
        lr=settings.lr,
        weight_decay=settings.weight_decay,
        layer_decay=settings.layer_decay,
        **named,
    )
    scheduler, _ = create_scheduler_v2(
        optimizer,
        num_epochs=epochs - min(settings.cooldown_epochs, epochs // 2),
        cooldown_epochs=settings.cooldown_epochs,
        warmup_epochs=settings.warmup_epochs,
        warmup_lr=settings.warmup_lr,
        min_lr=settings.min_lr,
        step_on_epochs=False,
        updates_per_epoch=len(batches),
    )
    watch, step = Stopwatch(job, limit), 0
    for _ in range(epochs):
        for pixels, targets in batches:
            watch.start_step()
            with job.autocast():
                logits = model(pixels)
            loss(logits.float(), targets).backward()
            if settings.clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            scheduler.step_update(step)
            if watch.count_step(len(pixels)):
                return watch.summarize(model, step / len(batches))
    return watch.summarize(model, epochs)


def _build_timm_model(job: Job, settings: Settings) -> Any:
    """timm's network with the weights of the file and timm's new head."""
    import timm

    name = json.loads((job.timm_model / "config.json").read_text())["architecture"]
    file = {"file": str(job.timm_model / "model.safetensors")}
    return timm.create_model(
        name,
        pretrained=True,
        pretrained_cfg_overlay=file,
        num_classes=job.classes,
        drop_path_rate=settings.drop_path,
    )


def _open_timm_images(job: Job, split: str) -> Any:
    from timm.data import create_dataset

    return create_dataset("", root=str(job.data / split), is_training=split == "train")


def _build_training_loader(job: Job, settings: Settings, model: nn.Module) -> tuple[Any, nn.Module]:
    """Batches, mixed where the settings mix, and their loss, as train.py chooses them."""
    from timm.data import FastCollateMixup, create_loader, resolve_data_config
    from timm.loss import LabelSmoothingCrossEntropy, SoftTargetCrossEntropy

    view = resolve_data_config({}, model=model)
    images = _open_timm_images(job, "train")
    mixes = bool(settings.mixup or settings.cutmix)
    options = {
        "mixup_alpha": settings.mixup,
        "cutmix_alpha": settings.cutmix,
        "label_smoothing": settings.smoothing,
        "num_classes": job.classes,
    }
    batches = create_loader(
        images,
        input_size=view["input_size"],
        batch_size=min(_TIMM_BATCH, len(images) // 2 * 2),  # the rest of an epoch is dropped, and mixup wants pairs
        is_training=True,
        re_prob=settings.erase,
        re_mode="pixel",
        scale=(0.08, 1.0),
        ratio=(3 / 4, 4 / 3),
        color_jitter=settings.color_jitter,
        auto_augment=settings.augment,
        interpolation=settings.interpolation,
        mean=view["mean"],
        std=view["std"],
        num_workers=job.workers,
        collate_fn=FastCollateMixup(**options) if mixes else None,
        device=job.device,
        persistent_workers=job.workers > 0,
    )
    loss = SoftTargetCrossEntropy() if mixes else LabelSmoothingCrossEntropy(settings.smoothing)
    return batches, loss


def test_with_timm(job: Job, trained: Trained) -> tuple[int, int]:
    """Images of the test split that are classified correctly, and all of them."""
    from timm.data import create_loader, resolve_data_config

    view = resolve_data_config({}, model=trained.model)
    batches = create_loader(
        _open_timm_images(job, "test"),
        input_size=view["input_size"],
        batch_size=_EVALUATION_BATCH,
        interpolation=view["interpolation"],
        mean=view["mean"],
        std=view["std"],
        crop_pct=view["crop_pct"],
        num_workers=job.workers,
        device=job.device,
        persistent_workers=False,
    )
    return _count_correct(job, trained.model, batches)


@torch.inference_mode()
def _count_correct(job: Job, model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> tuple[int, int]:
    model.eval()
    correct, images = 0, 0
    for pixels, targets in batches:
        logits = model(pixels.to(job.device))
        correct += int((logits.argmax(dim=1) == targets.to(job.device)).sum())
        images += len(targets)
    return correct, images
