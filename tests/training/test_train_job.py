"""The TrainJob of `vitrail plan --kubernetes`: valid by Kubeflow's published schema, and its command is vitrail's."""

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import peer
from tests.training.test_plan import Capture, expect_refusal, plan_facts
from vitrail import recipes
from vitrail.cli import main, parsing
from vitrail.cli.arguments.training import TrainArguments

OPTIONS = ("--nodes", "4", "--gpus", "8", "--micro-batches", "2", "--shard", "--epochs", "3")


def read_job(*arguments: str, capsys: Capture) -> Any:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed: transformers brings it")
    assert main([*arguments, "--kubernetes"]) == 0
    return yaml.safe_load(capsys.readouterr().out)


def find_unknown_fields(value: Any, parsed: Any, place: str = "") -> list[str]:
    """The keys of the YAML that the schema's models did not take."""
    if isinstance(value, list):
        pairs = zip(value, parsed, strict=True)
        return [name for each, other in pairs for name in find_unknown_fields(each, other, f"{place}[]")]
    if not isinstance(value, dict) or isinstance(parsed, dict):
        return []
    fields = {field.alias or name: name for name, field in type(parsed).model_fields.items()}
    unknown = [f"{place}.{key}" for key in value if key not in fields]
    known = [key for key in value if key in fields]
    return unknown + [
        name
        for key in known
        for name in find_unknown_fields(value[key], getattr(parsed, fields[key]), f"{place}.{key}")
    ]


def check_schema(job: Any) -> Any:
    """The job as Kubeflow's models read it, which must know all of it."""
    peer("kubeflow_trainer_api")
    models = importlib.import_module("kubeflow_trainer_api.models")
    parsed = models.TrainerV1alpha1TrainJob.from_dict(job)
    assert find_unknown_fields(job, parsed) == []
    return parsed


@pytest.mark.parametrize("name", recipes.RECIPES)
def test_the_job_of_every_recipe_fits_kubeflows_schema(name: str, capsys: Capture) -> None:
    job = read_job("plan", name, "--gpus", "2", capsys=capsys)
    parsed = check_schema(job)
    assert find_unknown_fields(job | {"spek": 1}, parsed) == [".spek"]
    assert parsed.to_dict()["spec"]["trainer"]["numProcPerNode"] == 2


def test_the_job_runs_the_planned_command_on_the_planned_machine(capsys: Capture) -> None:
    job = read_job("plan", "vit-h14-jft", *OPTIONS, capsys=capsys)
    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    trainer = job["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (4, 8)
    assert trainer["resourcesPerNode"]["limits"] == {"nvidia.com/gpu": "8"}
    assert trainer["command"] == ["torchrun", "-m", "vitrail"]
    verb, *words = trainer["args"]
    assert verb == "train"
    arguments: Any = parsing.parse_arguments("train", TrainArguments, words)
    assert (arguments.recipe, arguments.data, str(arguments.run.out)) == (
        "vit-h14-jft", "/data/jft", "/work/runs/vit-h14-jft",
    )  # fmt: skip
    assert arguments.run.resume
    assert (arguments.compute.micro_batches, arguments.compute.shard, arguments.overrides.epochs) == (2, True, 3)


def test_volumes_are_mounted_where_the_command_looks(capsys: Capture) -> None:
    job = read_job("plan", "vit-b16-imagenet", capsys=capsys)
    [patch] = job["spec"]["runtimePatches"]
    [node] = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = node["template"]["spec"]["template"]["spec"]
    [container] = pod["containers"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts == {"data": "/data", "runs": "/work/runs", "shared-memory": "/dev/shm"}
    assert {volume["name"] for volume in pod["volumes"]} == set(mounts)
    assert (node["name"], container["name"]) == ("node", "node")


@pytest.mark.parametrize("name", recipes.RECIPES)
def test_a_recipes_name_may_name_an_object_of_kubernetes(name: str) -> None:
    assert re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", name)


def test_what_is_no_job_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    assert "--kubernetes is for a recipe, and b16 is a preset" in expect_refusal("b16", "--kubernetes", capsys=capsys)
    refused = expect_refusal("vit-h14-jft", "--gpu", "tpuv3", "--kubernetes", capsys=capsys)
    assert "--kubernetes is for GPUs" in refused
    advice = "`vitrail train my.toml --data DATA --kubernetes` prints its job"
    path = tmp_path / "my.toml"
    path.write_text(recipes.format_recipe(recipes.get_recipe("vit-b16-imagenet"), "my"), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert advice in expect_refusal("my.toml", "--kubernetes", capsys=capsys)
    assert "give one of them" in expect_refusal("vit-b16-jft", "--sbatch", "--kubernetes", capsys=capsys)
    assert plan_facts("vit-b16-jft", "--kubernetes", capsys=capsys)["kubernetes"].startswith("# kubectl create")
