"""Steps computed twice: the run stays the run it is, and one flipped bit in one of the two stops it."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from tests.cli.test_cli import Capture
from tests.cli.test_cli import run as vitrail
from tests.data.image_files import write_image_folder
from tests.runtime.test_distributed import start_ranks, wait_for_ranks
from tests.training.test_resume import build_run, digest_weights, read_events, run_training
from tests.training.test_step import RECIPE, draw_batch, run_step
from vitrail.config import ScheduleConfig
from vitrail.errors import MismatchError
from vitrail.files import compute_sha256
from vitrail.runtime import distributed
from vitrail.training import checkpoint, step
from vitrail.training.step import TrainableModel
from vitrail.training.step_verification import StepVerification, find_differences
from vitrail.training.training_run import TrainingRun


def short(**changes: Any) -> TrainingRun:
    """Seven steps with all that draws or remembers."""
    whole = build_run()
    recipe = dataclasses.replace(whole.recipe, epochs=7 * whole.recipe.batch / 1439, schedule=ScheduleConfig(warmup=2))
    return build_run(recipe=recipe, **changes)


def flip_bit(tensor: Tensor, place: int, bit: int) -> Tensor:
    """A copy in which one bit of one number is another."""
    changed = tensor.detach().clone()
    numbers = changed.view(torch.int32).view(-1)
    numbers[place] ^= 1 << bit
    return changed


def corrupt(monkeypatch: pytest.MonkeyPatch, call: int, bit: int = 20, rank: int | None = None) -> None:
    """Flip a bit in what the first block's norm computes in one pass of training, counted from 1."""
    build = TrainingRun.build_model

    def with_fault(self: TrainingRun) -> TrainableModel:
        model, passes = build(self), 0

        def flip(_: Any, __: Any, output: Tensor) -> Tensor | None:
            nonlocal passes
            passes += model.training
            wrong = model.training and passes == call and rank in (None, self.group.rank)
            return output + (flip_bit(output, 11, bit) - output.detach()) if wrong else None

        model.get_submodule("blocks.0.norm1").register_forward_hook(flip)  # no dropout may hide it
        return model

    monkeypatch.setattr(TrainingRun, "build_model", with_fault)


def count_passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps whose gradients are computed, one by one."""
    found: list[int] = []
    compute = step._compute_gradients

    def counted(state: Any, *arguments: Any) -> Any:
        found.append(state.step)
        return compute(state, *arguments)

    monkeypatch.setattr(step, "_compute_gradients", counted)
    return found


def facts(path: Path) -> dict[str, Any]:
    with safe_open(path, "pt") as file:
        return {name: json.loads(value) for name, value in file.metadata().items() if name != "format"}


def tensors(path: Path) -> dict[str, Tensor]:
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


# --- the same run ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("every", "micro_batches"), [(1, 3), (3, 1)])
def test_a_verified_run_is_the_run_without_to_the_bit(
    every: int, micro_batches: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dropout, stochastic depth, mixup, augmentation and an average of weights included."""
    run = short(micro_batches=micro_batches)
    passes = count_passes(monkeypatch)
    run_training(run, tmp_path / "plain")
    assert passes == list(range(7))
    passes.clear()
    run_training(run, tmp_path / "verified", verify_every=every)
    assert passes == [number for number in range(7) for _ in range(1 + ((number + 1) % every == 0))]
    assert digest_weights(tmp_path / "verified") == digest_weights(tmp_path / "plain")
    assert read_events(tmp_path / "verified") == read_events(tmp_path / "plain")


def test_a_run_resumed_with_verification_is_the_run_without(tmp_path: Path) -> None:
    class StopError(Exception):
        pass

    def stop(moment: Any) -> None:
        if moment.step == 4:
            raise StopError

    run_training(short(), tmp_path / "plain")
    with pytest.raises(StopError):
        run_training(short(), tmp_path / "resumed", stop, verify_every=2)
    run_training(short(), tmp_path / "resumed", resume=True, verify_every=1)
    assert digest_weights(tmp_path / "resumed") == digest_weights(tmp_path / "plain")


# --- a machine that computes wrong -----------------------------------------------------------------------------------


def test_what_happens_in_a_step_that_is_not_verified_is_not_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step 3 is passes 3 and 4, so step 5 is pass 6 and step 6 passes 7 and 8, of which the next test is."""
    corrupt(monkeypatch, 6)
    run_training(short(), tmp_path / "run", verify_every=3)


@pytest.mark.parametrize("call", [7, 8])
def test_a_flipped_bit_in_either_pass_stops_the_run_with_both_results(
    call: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, path = short(), tmp_path / "run"
    run_training(run, tmp_path / "plain")
    seen: dict[str, str] = {}

    def look(moment: Any) -> None:
        if moment.step == 5:
            before = [*checkpoint.list_checkpoints(path / "checkpoints")]
            seen.update({str(file): compute_sha256(file) for folder in before for file in folder.iterdir()})

    with monkeypatch.context() as patch:
        corrupt(patch, call)
        with pytest.raises(MismatchError, match="step 6 was computed twice and gave two results") as caught:
            run_training(run, path, look, verify_every=3)
    assert caught.value.exit_code == 7
    written = path / "mismatch-step-00000006-rank-0.safetensors"
    assert str(written) in str(caught.value)
    found, both = facts(written), tensors(written)
    assert (found["step"], found["rank"]) == (6, 0)
    assert found["losses"] == [float(both["first/loss"]), float(both["second/loss"])]
    assert found["losses"][0] != found["losses"][1]
    assert found["tensors"] == 1 + len(list(run.build_model().parameters()))
    different = found["largest_differences"]
    assert "blocks.0.attn.qkv.weight" in different
    assert {name.partition("/")[2] for name in both} == {"loss", *different}
    for name, largest in different.items():
        assert float((both[f"first/{name}"] - both[f"second/{name}"]).abs().max()) == largest
    assert read_events(path)[-1]["event"] == "stopped"
    newest = checkpoint.read_newest_checkpoint(path / "checkpoints", lambda _: None)
    assert newest is not None
    assert newest.step == 5
    assert all(compute_sha256(Path(file)) == digest for file, digest in seen.items() if Path(file).exists())
    run_training(run, path, resume=True, verify_every=3)
    assert digest_weights(path) == digest_weights(tmp_path / "plain")


def test_a_gradient_that_went_wrong_behind_the_right_loss_is_found_and_named_alone(tmp_path: Path) -> None:
    """The least bit of one number of one gradient, in the second pass."""
    recipe = dataclasses.replace(RECIPE, optimizer=dataclasses.replace(RECIPE.optimizer, clip=None))
    state = run_step([draw_batch()], recipe)
    before = [parameter.detach().clone() for parameter in state.model.parameters()]
    weight = state.model.get_parameter("blocks.1.attn.qkv.weight")
    passes = 0

    def flip(gradient: Tensor) -> Tensor | None:
        nonlocal passes
        passes += 1
        return flip_bit(gradient, 100, 0) if passes == 2 else None

    weight.register_hook(flip)
    with pytest.raises(MismatchError, match=r"1 of 45 tensors differ, blocks\.1\.attn\.qkv\.weight by up to"):
        step.train_step(
            state, [draw_batch()], recipe, step_images=8, steps=10, seed=0, verification=StepVerification(1, tmp_path)
        )
    assert passes == 2
    found = facts(tmp_path / "mismatch-step-00000002-rank-0.safetensors")
    assert list(found["largest_differences"]) == ["blocks.1.attn.qkv.weight"]
    assert found["losses"][0] == found["losses"][1]
    assert state.step == 1
    assert all(map(torch.equal, before, state.model.parameters()))


def test_the_results_stay_where_there_is_no_checkpoint_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corrupt(monkeypatch, 2)
    with pytest.raises(MismatchError):
        run_training(short(), tmp_path / "run", verify_every=1)
    assert (tmp_path / "run" / "mismatch-step-00000001-rank-0.safetensors").is_file()


@pytest.mark.parametrize("verb", ["train", "finetune"])
def test_the_command_ends_with_a_sentence_and_its_exit_code(
    verb: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for split, start in (("train", 0), ("val", 100)):
        write_image_folder(tmp_path / "set", split, each=4, start=start)
    data = str(tmp_path / "set")
    given = ["train", "digits", "--data", "digits", "--epochs", "0.2"]
    if verb == "finetune":
        given = ["finetune", data, "--model", "ti16", "--from-scratch", "--image-size", "32", "--epochs", "2"]
    given += ["--workers", "0", "--device", "cpu", "--out", str(tmp_path / "run")]
    code, _, error = vitrail(*given, "--verify-every", "-1", capsys=capsys)
    assert (code, "--verify-every is -1; give a number of steps, 0 for never" in error) == (2, True)
    corrupt(monkeypatch, 2)
    code, _, error = vitrail(*given, "--verify-every", "1", capsys=capsys)
    assert code == 7, error
    assert "step 1 was computed twice and gave two results: the machine computes wrongly. The loss was" in error
    assert "continue with --resume" in error


# --- several processes -----------------------------------------------------------------------------------------------


def in_ranks(world: int, folder: Path, note: Callable[[int, str], None], **options: Any) -> list[int]:
    def work(group: distributed.ProcessGroup) -> None:
        run = short(group=group, shard=options.get("shard", False))
        try:
            run_training(run, folder, verify_every=options.get("every", 0))
        except MismatchError as error:
            note(group.rank, str(error))

    return wait_for_ranks(start_ranks(world, work))


@pytest.mark.parametrize(("world", "shard"), [(2, False), (3, False), (2, True)])
def test_ranks_verify_and_stay_the_run_they_are(world: int, shard: bool, tmp_path: Path) -> None:
    def fail(rank: int, text: str) -> None:
        raise AssertionError(f"{rank}: {text}")

    for name, every in (("plain", 0), ("verified", 1)):
        assert in_ranks(world, tmp_path / name, fail, every=every, shard=shard) == [0] * world
    assert digest_weights(tmp_path / "verified") == digest_weights(tmp_path / "plain")


@pytest.mark.parametrize("shard", [False, True])
def test_all_ranks_stop_together_when_one_computes_wrong(
    shard: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corrupt(monkeypatch, 5, rank=1)  # step 4 is passes 4 and 5
    note = lambda rank, text: (tmp_path / f"said-{rank}").write_text(text)  # noqa: E731
    assert in_ranks(2, tmp_path / "run", note, every=4, shard=shard) == [0, 0]
    said = [(tmp_path / f"said-{rank}").read_text() for rank in (0, 1)]
    assert all("was computed twice and gave two results in process" in text for text in said)
    found = sorted((tmp_path / "run").glob("mismatch-*"))
    own = [facts(path) for path in found if facts(path)["rank"] == 1]
    assert own[0]["losses"][0] != own[0]["losses"][1]
    for path in found:
        if facts(path)["rank"] == 0:  # its own images gave the same, and the sum of gradients did not
            assert facts(path)["losses"][0] == facts(path)["losses"][1]


# --- the comparison --------------------------------------------------------------------------------------------------


def test_every_bit_counts_and_a_nan_is_itself() -> None:
    first = {"loss": torch.tensor(2.0), "a": torch.tensor([[0.0, torch.nan], [1.0, torch.inf]])}
    assert find_differences(first, {name: tensor.clone() for name, tensor in first.items()}) == {}
    other = first | {"a": torch.tensor([[-0.0, torch.nan], [1.0, torch.inf]])}
    assert list(find_differences(first, other)) == ["a"]
    assert find_differences(first, first | {"loss": torch.tensor(2.5)}) == {"loss": 0.5}


def test_where_sums_have_no_order_a_share_of_the_whole_gradient_is_allowed() -> None:
    """The whole gradient has a norm of 5, of which a hundredth is 0.05."""
    first = {"loss": torch.tensor(1.0), "a": torch.tensor([3.0]), "b": torch.tensor([4.0]), "c": torch.zeros(1)}

    def compare(**changes: float) -> list[str]:
        second = {name: torch.full_like(first[name], value) for name, value in changes.items()}
        return list(find_differences(first, first | second, 0.01))

    assert compare(a=3.04, b=3.96, c=0.04, loss=1.009) == []
    assert compare(a=3.06) == ["a"]
    assert compare(c=-0.06, loss=1.02) == ["loss", "c"]
    assert compare(b=torch.nan) == ["b"]
    assert compare(b=torch.inf, loss=torch.nan) == ["loss", "b"]
