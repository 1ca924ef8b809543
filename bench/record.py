"""What the product computes, as one JSON file, so that a refactoring can be compared before and after.

    python bench/record.py before.json                       # about 4 minutes on one core
    python bench/record.py --compare before.json after.json  # what differs; exit 1 if a number does

It uses the command line and the names of `import vitrail` alone: no module that may be renamed is imported. Options and
settings are spelled as they were when it was written, so that old spellings are tried too.

The file is flat: NAME -> value. A number, a list of numbers or a digest ("sha256:...") must stay what it is. A text, as
of `--help`, may change: it is printed as a unified diff. Where a name is gone and another has come in the same section
with the same value, as when a JSON key is renamed, that is told and is no difference. Left out is what is never twice
the same: seconds, speeds, dates, paths.
"""

import argparse
import contextlib
import csv
import dataclasses
import difflib
import hashlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))  # the source beside this, whatever is installed

import numpy as np
import torch
from PIL import Image
from safetensors.numpy import load_file

import vitrail

Record = dict[str, Any]

COMMANDS = ("convert", "data", "data check", "data get", "data list", "data pack", "data remove", "demo", "evaluate",
            "figures", "finetune", "info", "list", "plan", "probe", "predict", "push", "report", "serve", "study",
            "study ablate", "study sweep", "study table", "study vtab", "train")  # fmt: skip
VOLATILE = {"seconds", "time", "at", "elapsed", "images_per_second", "speed", "folder", "report", "date", "versions",
            "path", "written", "bytes"}  # fmt: skip
CLASSES = ("circle", "cross", "plain", "stripe")
TINY = {"width": 32, "depth": 2, "mlp": 64, "heads": 2}
SMALL: dict[str, Any] = TINY | {"patch": 8, "image_size": 32, "num_classes": 7}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "erf": {"gelu": "erf"},
    "hidden-head": {"hidden_head": True},
    "headless": {"num_classes": 0},
    "norm-mean": {"pool": "norm-mean", "class_token": False},
    "mean-norm": {"pool": "mean-norm"},
    "map": {"pool": "map", "class_token": False},
    "class-mean": {"pool": "class-mean"},
    "registers": {"registers": 4, "prefix_positions": False},
    "distilled": {"distillation_token": True, "distillation_head": True},
    "layer-scale": {"layer_scale": True, "qkv_bias": False},
    "no-positions": {"positions": "none"},
    "2d": {"positions": "learned-2d", "positions_at": "every-layer"},
    "sincos": {"positions": "sincos-2d", "positions_at": "every-layer-shared"},
    "relative": {"positions": "relative"},
    "wide": {"image_size": (24, 40)},
}
FORMATS = {  # model, format, the name of what is written
    "timm": ("plain", "timm", "plain-timm"),
    "timm file": ("ti16-erf", "timm", "ti16-timm.safetensors"),
    "timm registers": ("registers", "timm", "registers-timm"),
    "timm hybrid": ("hybrid-timm", "timm", "hybrid-of-timm"),
    "timm bit": ("bit-timm", "timm", "bit-of-timm"),
    "transformers": ("plain", "transformers", "plain-hf"),
    "transformers erf": ("erf", "transformers", "erf-hf"),
    "torchvision": ("ti16-erf", "torchvision", "ti16.pth"),
    "google": ("plain", "google", "plain.npz"),
    "google map": ("map", "google", "map.npz"),
    "google hybrid": ("hybrid", "google", "hybrid.npz"),
    "google bit": ("bit", "google", "bit.npz"),
}
TRAINING = ("--seed", "0", "--device", "cpu", "--workers", "0", "--json")
SMALL_VIT = ("width=32", "depth=2", "mlp=64", "heads=2")
RUNS = {  # 30 steps each
    "supervised": "train digits --data digits --epochs 1.334 --set dropout=0.1 ema=0.99",
    "augmented": "train cifar10 --data photos --epochs 4 --batch 16 --micro-batches 2 --balanced --set optimizer=adam"
    " stochastic_depth=0.2 dropout=0.1 ema=0.9 jitter=0.3 erase=0.3 crop=inception " + " ".join(SMALL_VIT),
    "mpp": "train mpp-cifar10 --data photos --epochs 4 --batch 16 --probe 2 --set ema=0.9 " + " ".join(SMALL_VIT),
    "mae": "train mae-cifar10 --data photos --epochs 4 --batch 16 --target pixels --set " + " ".join(SMALL_VIT),
    "multi-label": "train cifar10 --data several.csv --epochs 4 --batch 16 --everything --set optimizer=sgd"
    " loss=sigmoid " + " ".join(SMALL_VIT),
    "finetune": "finetune photos --model plain.safetensors --epochs 3.9 --batch 15",
    "finetune paper": "finetune photos --model masked.safetensors --recipe paper --epochs 4 --batch 16"
    " --image-size 40 --layers 1",
    "finetune bit": "finetune photos --model bit.safetensors --recipe bit --epochs 4 --batch 16 --image-size 32",
}  # fmt: skip
INTERRUPTED = "supervised"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compare", action="store_true", help="two files that were recorded, rather than record one")
    parser.add_argument("--only", nargs="*", default=[], help="sections to record, rather than all")
    parser.add_argument("files", nargs="+", type=Path)
    arguments = parser.parse_args()
    if arguments.compare:
        before, after = (json.loads(path.read_text()) for path in arguments.files)
        return compare_records(before, after)
    (out,) = arguments.files
    torch.set_num_threads(1)
    print(f"recording {Path(vitrail.__file__).parent}", flush=True)
    with tempfile.TemporaryDirectory(prefix="vitrail-record-") as folder:
        record = record_all(Path(folder), arguments.only)
    out.write_text(json.dumps(record, indent=1, sort_keys=True, ensure_ascii=False) + "\n")
    print(f"{len(record):,} values in {out}")
    return 0


def record_all(work: Path, only: list[str]) -> Record:
    """Every section, in an order in which later ones use what earlier ones have written to the folder."""
    begun = time.monotonic()
    write_data(work)
    write_models(work)
    record: Record = {}
    for section in SECTIONS:
        name = section.__name__.removeprefix("record_")
        if only and name not in only:
            continue
        for key, value in section(work):
            if key in record:
                raise ValueError(f"{key} is recorded twice")
            record[key] = _without_paths(value, work)
        print(f"{time.monotonic() - begun:6.0f} s  {name}, {len(record):,} values", flush=True)
    return record


# --- what is computed with -------------------------------------------------------------------------------------------


def write_data(work: Path) -> None:
    """Small pictures of four classes in three splits; the same with several labels; and one folder with faults."""
    generator = np.random.default_rng(0)
    rows = ["path,labels,split"]
    for split, count in (("train", 30), ("val", 10), ("test", 10)):
        for index, name in enumerate(CLASSES):
            folder = work / "photos" / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                suffix = "jpg" if number % 3 == 0 else "png"
                path = folder / f"{number:02d}.{suffix}"
                draw_image(generator, index).save(path, quality=90)
                other = CLASSES[(index + number) % len(CLASSES)]
                rows.append(f"{path.relative_to(work)},{';'.join(sorted({name, other}))},{split}")
    (work / "several.csv").write_text("\n".join(rows) + "\n")
    faulty = work / "faulty"
    for split, name in (("train", "circle"), ("train", "cross"), ("val", "circle"), ("val", "cross")):
        (faulty / split / name).mkdir(parents=True)
        for number in range(4):
            draw_image(generator, number).save(faulty / split / name / f"{number}.png")
    same = (faulty / "train" / "circle" / "0.png").read_bytes()
    (faulty / "val" / "circle" / "copy.png").write_bytes(same)
    (faulty / "train" / "cross" / "cut.png").write_bytes(same[: len(same) // 2])
    (faulty / "train" / "cross" / "grey.gif").write_bytes(b"GIF89a, and nothing more")


def draw_image(generator: np.random.Generator, kind: int) -> Image.Image:
    """40 x 36 pixels of noise around a shape that tells the class."""
    rows, columns = np.mgrid[:36, :40]
    shapes = (
        (rows - 18) ** 2 + (columns - 20) ** 2 < 120,
        (abs(rows - 18) < 4) | (abs(columns - 20) < 4),
        rows < 0,
        (rows // 4) % 2 == 0,
    )
    pixels = generator.integers(0, 120, (36, 40, 3)) + 100 * shapes[kind][..., None] * generator.random(3)
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def write_models(work: Path) -> None:
    """A native file for each variant, a hybrid and a BiT ResNet of one unit a stage, no weight of them zero."""
    labels = tuple(f"kind {index}" for index in range(SMALL["num_classes"]))
    for name, changes in VARIANTS.items():
        settings = SMALL | changes
        write_model(vitrail.create("ti8", **settings), work / f"{name}.safetensors", labels[: settings["num_classes"]])
    published = vitrail.create("ti16", image_size=32, num_classes=7, gelu="erf")
    write_model(published, work / "ti16-erf.safetensors", labels)
    stem: Any = vitrail.create("r50-b16", **TINY, image_size=32).config
    small = dataclasses.replace(stem.stem, units=(1, 1, 1))
    timm = like_timm(dataclasses.replace(stem.stem, units=(2, 2, 2, 2)))
    for name, conv, side in (("hybrid", small, 32), ("hybrid-timm", timm, 64)):
        settings = TINY | {"image_size": side, "num_classes": 7, "stem": conv}
        write_model(vitrail.create("r50-b16", **settings), work / f"{name}.safetensors", labels)
    bit: Any = vitrail.create("bit-r50x1", num_classes=7, image_size=32).config
    small, timm = dataclasses.replace(bit.conv, units=(1, 1)), like_timm(bit.conv)
    for name, conv in (("bit", small), ("bit-timm", timm)):
        model = vitrail.create("bit-r50x1", num_classes=7, image_size=32, conv=conv)
        write_model(model, work / f"{name}.safetensors", labels)


def like_timm(conv: Any) -> Any:
    """The same convolutions with the numerics that timm computes them with: they are the last three fields."""
    names = [field.name for field in dataclasses.fields(conv)][-3:]
    return dataclasses.replace(conv, **dict(zip(names, (1e-5, "sqrt(var + eps)", 1e-8), strict=True)))


def write_model(model: Any, path: Path, labels: tuple[str, ...]) -> None:
    """Save a model, its parameters drawn anew: heads begin with zeros, which would hide differences."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name and name.endswith("weight") else 0.0, 0.2, generator=generator)
    config = model.config
    size = tuple(config.image_size)
    preprocess = vitrail.PreprocessConfig(size=size, resize=size, mean=(0.4, 0.45, 0.5), std=(0.3, 0.25, 0.2))
    vitrail.save(vitrail.Trained(model.eval(), preprocess, labels or None), path)


# --- sections --------------------------------------------------------------------------------------------------------


def record_help(work: Path) -> Iterator[tuple[str, Any]]:
    yield "help/vitrail", run_command(work, "--help").stdout
    for command in COMMANDS:
        yield f"help/{command}", run_command(work, f"{command} --help").stdout


def record_tables(work: Path) -> Iterator[tuple[str, Any]]:
    """What is answered without images: presets, recipes, costs."""
    for arguments in ("list --json", "list recipes --json", "info b16 --json", "info hybrid.safetensors --json",
                      "info bit.safetensors --json", "plan vit-b16-imagenet --gpus 8 --json",
                      "plan mae-cifar10 --shard --recompute --gpus 2 --json"):  # fmt: skip
        yield from flatten(f"tables/{arguments}", run_json(work, arguments))


def record_logits(work: Path) -> Iterator[tuple[str, Any]]:
    """Logits, features, tokens and attention of native files, in this process."""
    for name in (*VARIANTS, "hybrid", "bit"):
        path = work / f"{name}.safetensors"
        yield from load_outputs(f"logits/native {name}", path)
        yield f"logits/native {name}/tensors", digest_file(path)
    trained = vitrail.load(work / "plain.safetensors")
    model: Any = trained.model
    with torch.no_grad():
        maps = vitrail.attention_maps(model, normalize(trained, draw_batch(trained)))
        yield "logits/attention maps", digest_arrays({str(layer): each.numpy() for layer, each in enumerate(maps)})
        wide = torch.randn(1, 3, 24, 48, generator=torch.Generator().manual_seed(0))
        yield "logits/other size", digest_arrays({"": model(wide).numpy()})
    fitted: Any = vitrail.adapt(trained, classes=5, image_size=48)
    yield "logits/adapted", digest_arrays({key: value.numpy() for key, value in fitted.model.state_dict().items()})
    answers = vitrail.Classifier(trained, device="cpu")(sorted((work / "photos" / "test").rglob("*.png")), top=3)
    yield "logits/classifier", digest_json([[(label, float(value)) for label, value in answer] for answer in answers])


def record_formats(work: Path) -> Iterator[tuple[str, Any]]:
    """Each format written by `convert` from a native file and read again, and a preset fitted to another task."""
    run_json(work, "convert ti16 ti16.safetensors --classes 10 --image-size 32 --json")
    yield "formats/ti16/tensors", digest_file(work / "ti16.safetensors")
    for name, (model, form, target) in FORMATS.items():
        answer = run_json(work, f"convert {model}.safetensors {target} --to {form} --json")
        yield from flatten(f"formats/{name}/json", answer)
        yield from load_outputs(f"formats/{name}", work / target)
        yield f"formats/{name}/tensors", digest_file(work / target)
    run_json(work, "convert ti16.safetensors other.safetensors --patch 8 --image-size 48 40 --channels 1 --json")
    yield "formats/ti16 fitted/tensors", digest_file(work / "other.safetensors")
    yield from load_outputs("formats/ti16 fitted", work / "other.safetensors")


def record_export(work: Path) -> Iterator[tuple[str, Any]]:
    import onnxruntime

    yield from flatten("export/json", run_json(work, "convert plain.safetensors plain.onnx --to onnx --json"))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(work / "plain.onnx"), options, providers=["CPUExecutionProvider"])
    batch = draw_batch(vitrail.load(work / "plain.safetensors")).numpy()
    (given,) = session.get_inputs()
    batch = batch if given.type == "tensor(uint8)" else batch.astype(np.float32) / 255
    for output, values in zip(session.get_outputs(), session.run(None, {given.name: batch}), strict=True):
        yield f"export/onnx/{output.name}", digest_arrays({"": values})
    yield from read_csv("export/predict", run_command(work, "predict plain.onnx photos/test --format csv").stdout)


def record_train(work: Path) -> Iterator[tuple[str, Any]]:
    """Weights, averages and optimizers after 30 steps, and what else a run writes."""
    for name, arguments in RUNS.items():
        folder = f"run {name}".replace(" ", "-")
        found = run_json(work, f"{arguments} --out {folder}", *TRAINING)
        yield from flatten(f"train/{name}/json", found)
        yield from read_run(f"train/{name}", work / folder)
        if name == "mpp":
            (work / "masked.safetensors").write_bytes((work / folder / "weights" / "last.safetensors").read_bytes())
    before = dict(read_weights("", work / f"run-{INTERRUPTED}"))
    command = f"{RUNS[INTERRUPTED]} --out resumed --save-every 0.0005"
    yield "train/interrupted/exit code", interrupt(work, command)
    run_json(work, f"{command} --resume", *TRAINING)
    after = dict(read_weights("", work / "resumed"))
    yield "train/interrupted/equal", all(after[key] == before[key] for key in before)


def record_data(work: Path) -> Iterator[tuple[str, Any]]:
    for name in ("photos", "faulty", "several.csv"):
        found = run_json(work, f"data check {name} --out {name}.report.json --skip-bad --json")
        yield from flatten(f"data/check {name}", found)
    found = run_json(work, "data check photos --against faulty --out against.json --json")
    yield from flatten("data/check against", found)
    for name, more in (("photos", ""), ("faulty", " --leave-out faulty.report.json"), ("digits", "")):
        run_command(work, f"data pack {name} packed-{name}{more} --json")
        for path in sorted((work / f"packed-{name}").rglob("*")):
            if path.is_file():
                key = f"data/pack {name}/{path.relative_to(work)}"
                if path.suffix == ".json":
                    yield from flatten(key, json.loads(path.read_text()))
                else:
                    yield key, f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"
    found = run_json(work, "data check packed-photos --out packed.json --json")
    yield from flatten("data/check packed", found)


def record_predict(work: Path) -> Iterator[tuple[str, Any]]:
    images = "photos/test packed-photos faulty/train/cross"
    for name, arguments in {
        "csv": f"predict run-supervised {images} --format csv --top 3 --batch 7",
        "finetuned": f"predict run-finetune {images} --format csv",
        "bfloat16": "predict plain.safetensors photos/test --format csv --precision bfloat16",
        "int8": "predict plain.safetensors photos/test --format csv --precision int8",
        "list": "predict run-multi-label several.csv --format csv --top 2",
    }.items():
        yield from read_csv(f"predict/{name}", run_command(work, arguments, codes=(0, 3)).stdout)
    lines = run_command(work, f"predict run-finetune {images} --json --top 2", codes=(0, 3)).stdout.splitlines()
    rows = [json.loads(line) for line in lines]
    yield "predict/jsonl/rows", len(rows)
    for key in sorted({key for row in rows for key in row}):
        yield f"predict/jsonl/{key}", digest_json([row.get(key) for row in rows])
    run_command(work, "predict run-mae photos/test --embed --out embedded.npy")
    yield "predict/embed", digest_arrays({"": np.load(work / "embedded.npy")})
    yield from read_csv("predict/embed names", (work / "embedded.csv").read_text())


def record_evaluate(work: Path) -> Iterator[tuple[str, Any]]:
    weights = work / "run-finetune" / "weights" / "best.safetensors"
    (work / "unsure.safetensors").write_bytes(weights.read_bytes())
    for name, arguments in {
        "digits": "evaluate run-supervised digits --tta",
        "two": "evaluate run-finetune photos --against run-augmented",
        "multi-label": "evaluate run-multi-label several.csv",
        "abstain": "evaluate unsure.safetensors photos --abstain 0.5",
    }.items():
        folder = work / f"evaluate-{name}"
        found = run_json(work, f"{arguments} --out {folder.name} --workers 0 --device cpu --json")
        yield from flatten(f"evaluate/{name}/json", found)
        yield from read_tables(f"evaluate/{name}", folder)
    yield from flatten("evaluate/threshold", read_header(work / "unsure.safetensors"))


def record_probe(work: Path) -> Iterator[tuple[str, Any]]:
    command = "probe run-mpp photos --shots 1 5 --lambda auto --save probed.safetensors --workers 0 --device cpu --json"
    yield from flatten("probe/json", run_json(work, command))
    yield "probe/saved", digest_file(work / "probed.safetensors")
    yield from flatten("probe/header", read_header(work / "probed.safetensors"))


def record_figures(work: Path) -> Iterator[tuple[str, Any]]:
    images = "photos/test/circle/00.jpg photos/test/cross/01.png photos/test/stripe/02.png"
    for name, arguments in {
        "plain": f"figures plain.safetensors {images} --faithfulness",
        "two": f"figures run-finetune erf.safetensors {images} --image-size 48",
        "hybrid": f"figures hybrid.safetensors {images}",
    }.items():
        folder = work / f"figures-{name}"
        yield from flatten(
            f"figures/{name}/json", run_json(work, f"{arguments} --out {folder.name} --device cpu --json")
        )
        for path in sorted(folder.rglob("*.npz")):
            with np.load(path) as arrays:
                for key, values in arrays.items():
                    yield f"figures/{name}/{path.relative_to(folder)}/{key}", digest_arrays({"": values})


def record_study(work: Path) -> Iterator[tuple[str, Any]]:
    command = "study sweep photos --model plain.safetensors --rates 0.01 --steps 5 --batch 16 --image-size 32 --runs 1"
    found = run_json(work, f"{command} --out study --device cpu --workers 0 --json")
    yield from flatten("study/sweep", found)
    for path in sorted((work / "study").rglob("*.safetensors")):
        yield f"study/{path.relative_to(work)}", digest_file(path)
    yield from flatten("study/table", run_json(work, "study table study --json"))


def record_serve(work: Path) -> Iterator[tuple[str, Any]]:
    """The schema, and what the routes answer to an image."""
    image = (work / "photos" / "test" / "circle" / "00.jpg").read_bytes()
    with serve(work, "run-finetune --device cpu --port 0 --deadline 60") as url:
        schema = json.loads(ask(f"{url}/openapi.json"))
        yield "serve/openapi", json.dumps(schema, indent=1, sort_keys=True)
        for route in ("predict?top=3", "embed", "attention?layer=2"):
            yield from flatten(f"serve/{route}", json.loads(ask(f"{url}/v1/{route}", image)))
        for route in ("models", "classes"):
            yield from flatten(f"serve/{route}", json.loads(ask(f"{url}/v1/{route}")))


SECTIONS = (
    record_help,
    record_tables,
    record_logits,
    record_formats,
    record_export,
    record_train,
    record_data,
    record_predict,
    record_evaluate,
    record_probe,
    record_figures,
    record_study,
    record_serve,
)


# --- commands --------------------------------------------------------------------------------------------------------


def run_command(
    work: Path, arguments: str, *more: str, codes: tuple[int, ...] = (0,)
) -> subprocess.CompletedProcess[str]:
    """What `vitrail ARGUMENTS` printed; an exit code other than these is an error."""
    command = [sys.executable, "-m", "vitrail", *arguments.split(), *more]
    done = subprocess.run(command, cwd=work, env=environment(work), capture_output=True, text=True)
    if done.returncode not in codes:
        raise RuntimeError(f"vitrail {arguments} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return done


def run_json(work: Path, arguments: str, *more: str) -> Any:
    return json.loads(run_command(work, arguments, *more).stdout)


def environment(work: Path) -> dict[str, str]:
    """One thread, caches of its own, and texts of one width and without colors."""
    homes = {f"XDG_{name}_HOME": str(work / "homes" / name.lower()) for name in ("DATA", "CACHE", "CONFIG")}
    return os.environ | homes | {"PYTHONPATH": sys.path[0], "COLUMNS": "80", "TERM": "dumb", "NO_COLOR": "1"}


def interrupt(work: Path, arguments: str) -> int:
    """The exit code of a run that gets SIGTERM once its first checkpoint is there."""
    command = [sys.executable, "-m", "vitrail", *arguments.split(), *TRAINING]
    with subprocess.Popen(command, cwd=work, env=environment(work), stdout=-3, stderr=-3) as running:
        while running.poll() is None and not any(work.glob("resumed/checkpoints/step-*/manifest.json")):
            time.sleep(0.002)
        running.send_signal(signal.SIGTERM)
        return running.wait(timeout=60)


@contextlib.contextmanager
def serve(work: Path, arguments: str) -> Iterator[str]:
    """The address of a server for as long as the block lasts."""
    command = [sys.executable, "-m", "vitrail", "serve", *arguments.split()]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=work, env=environment(work), stdout=pipe, stderr=-3, text=True) as running:
        assert running.stdout is not None
        try:
            yield running.stdout.readline().strip()
        finally:
            running.send_signal(signal.SIGTERM)
            running.wait(timeout=60)


def ask(url: str, image: bytes | None = None) -> bytes:
    request = urllib.request.Request(url, image, {} if image is None else {"content-type": "image/jpeg"})  # noqa: S310
    with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310
        content: bytes = answer.read()
    return content


# --- values ----------------------------------------------------------------------------------------------------------


def draw_batch(trained: Any, count: int = 3) -> torch.Tensor:
    """uint8 (B, C, H, W), the same every time."""
    shape = (count, trained.model.config.channels, *trained.model.config.image_size)
    return torch.from_numpy(np.random.default_rng(1).integers(0, 256, shape, dtype=np.uint8))


def normalize(trained: Any, batch: torch.Tensor) -> torch.Tensor:
    """The batch as its model takes it; of weights that do not say how, with a mean and a std of a half."""
    stated = trained.preprocess
    mean, std = (
        (torch.tensor([0.5]), torch.tensor([0.5])) if stated is None else map(torch.tensor, (stated.mean, stated.std))
    )
    return (batch / 255 - mean.view(1, -1, 1, 1)) / std.view(1, -1, 1, 1)


def load_outputs(name: str, path: Path) -> Iterator[tuple[str, Any]]:
    trained = vitrail.load(path)
    model: Any = trained.model
    with torch.no_grad():
        images = normalize(trained, draw_batch(trained))
        yield f"{name}/logits", digest_arrays({"": model(images).numpy()})
        yield f"{name}/features", digest_arrays({"": model.compute_features(images).numpy()})


def read_run(name: str, folder: Path) -> Iterator[tuple[str, Any]]:
    """What a run's folder holds."""
    yield from read_weights(name, folder)
    yield from flatten(f"{name}/config", json.loads((folder / "config.json").read_text()))
    yield from flatten(f"{name}/data_report", json.loads((folder / "data_report.json").read_text()))
    yield from read_tables(name, folder)
    yield from flatten(f"{name}/header", read_header(folder / "weights" / "best.safetensors"))
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    for number, event in enumerate(events):
        yield from flatten(f"{name}/events/{number:02d}", event)
    yield f"{name}/files", "\n".join(sorted(str(path.relative_to(folder)) for path in folder.rglob("*")))


def read_weights(name: str, folder: Path) -> Iterator[tuple[str, Any]]:
    """Of a run's folder the weights, and the last checkpoint with its optimizer and average."""
    last = max((folder / "checkpoints").iterdir())
    for path in sorted([*(folder / "weights").glob("*.safetensors"), *last.glob("*.safetensors")]):
        yield f"{name}/{path.relative_to(folder)}", digest_file(path)


def read_tables(name: str, folder: Path) -> Iterator[tuple[str, Any]]:
    for path in sorted(folder.rglob("*.csv")):
        yield from read_csv(f"{name}/{path.relative_to(folder)}", path.read_text())


def read_csv(name: str, text: str) -> Iterator[tuple[str, Any]]:
    """A digest of each column, by its name, less those of times."""
    rows = list(csv.DictReader(io.StringIO(text)))
    yield f"{name}/rows", len(rows)
    for key in rows[0] if rows else ():
        if key not in VOLATILE:
            yield f"{name}/{key}", digest_json([row[key] for row in rows])


def read_header(path: Path) -> Any:
    """The JSON in the header of a native file, and nothing of its tensors."""
    content = path.read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return {key: json.loads(value) for key, value in header["__metadata__"].items() if value.startswith("{")}


def digest_file(path: Path) -> str:
    """Of the tensors in a file or folder of any format: what else it holds may be named otherwise one day."""
    if path.is_dir():
        (path,) = path.glob("*.safetensors")
    if path.suffix == ".npz":
        with np.load(path) as arrays:
            return digest_arrays(dict(arrays))
    if path.suffix == ".pth":
        tensors = torch.load(path, weights_only=True)
        return digest_arrays({name: tensor.numpy() for name, tensor in tensors.items()})
    return digest_arrays(load_file(path))


def digest_arrays(arrays: dict[str, Any]) -> str:
    found = hashlib.sha256()
    for name in sorted(arrays):
        values = np.ascontiguousarray(arrays[name])
        found.update(f"{name} {values.dtype} {values.shape} ".encode())
        found.update(values.tobytes())
    return f"sha256:{found.hexdigest()}"


def digest_json(value: Any) -> str:
    return f"sha256:{hashlib.sha256(json.dumps(value).encode()).hexdigest()}"


def flatten(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The leaves of a JSON value by their path, less what is never twice the same; a list of numbers is one leaf."""
    if isinstance(value, dict):
        for key, each in value.items():
            if key not in VOLATILE:
                yield from flatten(f"{name}/{key}", each)
    elif isinstance(value, list) and not all(isinstance(each, int | float | None) for each in _leaves(value)):
        for index, each in enumerate(value):
            yield from flatten(f"{name}/{index}", each)
    else:
        numbers = isinstance(value, list) or (isinstance(value, str) and " " not in value)  # such as base64
        yield name, digest_json(value) if numbers and len(str(value)) > 200 else value


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, list):
        for each in value:
            yield from _leaves(each)
    else:
        yield value


def _without_paths(value: Any, work: Path) -> Any:
    """The same with the folder's name taken out of texts, and digests of files that hold names and times."""
    if isinstance(value, str):
        value = value.replace(str(work), "WORK")
        return re.sub(r"(?<![:0-9a-f])[0-9a-f]{12,64}(?![0-9a-f])", "DIGEST", value)
    return value


# --- comparison ------------------------------------------------------------------------------------------------------


def compare_records(before: Record, after: Record) -> int:
    """Print what differs; 1 if it is more than texts and names."""
    gone, come = ([key for key in a if key not in b] for a, b in ((before, after), (after, before)))
    differ = [key for key in before if key in after and not _equal(before[key], after[key])]
    texts = [key for key in differ if _is_text(before[key]) and _is_text(after[key])]
    numbers = [key for key in differ if key not in texts]
    renamed = pair_renamed(before, after, gone, come)
    for key in texts:
        one, other = str(before[key]).splitlines(), str(after[key]).splitlines()
        print("\n".join(difflib.unified_diff(one, other, f"before {key}", f"after {key}", lineterm="")))
    for old, new in renamed.items():
        print(f"renamed  {old} -> {new}")
    lost = [key for key in gone if key not in renamed and not _is_text(before[key])]
    for key in gone:
        if key not in renamed:
            print(f"gone     {key}: {str(before[key])[:100]}")
    for key in come:
        if key not in renamed.values():
            print(f"new      {key}: {str(after[key])[:100]}")
    for key in numbers:
        print(f"differs  {key}: {str(before[key])[:100]} -> {str(after[key])[:100]}")
    failed = len(numbers) + len(lost)
    equal = len(before) - len(differ) - len(gone)
    print(f"{equal:,} equal, {len(texts)} texts differ, {len(renamed)} renamed, {len(numbers)} numbers differ, "
          f"{len(lost)} gone, {len(come) - len(renamed)} new")  # fmt: skip
    return 1 if failed else 0


def pair_renamed(before: Record, after: Record, gone: list[str], come: list[str]) -> dict[str, str]:
    """For each name that is gone the first new one of the same section, command or run, and the same value."""
    free, renamed = list(come), dict[str, str]()
    for old in gone:
        section = old.split("/")[:2]
        same = (new for new in free if new.split("/")[:2] == section and _equal(before[old], after[new]))
        if new := next(same, None):
            renamed[old] = new
            free.remove(new)
    return renamed


def _equal(one: Any, other: Any) -> bool:
    return type(one) is type(other) and bool(one == other or (one != one and other != other))


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and not value.startswith("sha256:")


if __name__ == "__main__":
    sys.exit(main())
