"""Exit codes: each class of problem has its own, and the command line ends with it."""

import inspect
import re
import signal

import pytest

import vitrail.cli
from vitrail import errors
from vitrail.errors import CellsError, StoppedError, UsageError, VitrailError

EXIT_CODES = {
    "VitrailError": 1, "UsageError": 2, "ArgumentError": 2, "LockedError": 2, "DataError": 3, "ChangedDataError": 3,
    "FetchError": 3, "NoImageError": 3, "RemoteError": 3, "ModelError": 4, "DiskFullError": 5, "WorkerKilledError": 5,
    "DivergedError": 6, "MismatchError": 7, "StoppedError": 75, "CellsError": 1,
}  # fmt: skip


def test_every_error_has_its_exit_code_and_the_module_lists_them_all() -> None:
    classes = [each for _, each in inspect.getmembers(errors, inspect.isclass)]
    assert {each.__name__: each.exit_code for each in classes if issubclass(each, VitrailError)} == EXIT_CODES
    assert len(classes) == len(EXIT_CODES)
    listed = {int(number) for number in re.findall(r"(?:^|\s)(\d+) [a-z]", errors.__doc__ or "")}
    assert listed == {0, *EXIT_CODES.values(), errors.INTERRUPTED_EXIT_CODE}


def test_a_usage_error_is_a_value_error_and_a_study_has_the_code_of_its_cells() -> None:
    assert issubclass(UsageError, ValueError)
    assert CellsError("1 of 2 cells failed", 6).exit_code == 6
    assert CellsError.exit_code == 1


def test_only_sigterm_lets_torchrun_restart_a_stopped_run() -> None:
    assert not StoppedError("stopped").is_final
    assert not StoppedError("stopped", signal.SIGTERM).is_final
    assert StoppedError("stopped", signal.SIGINT).is_final


@pytest.mark.parametrize(
    ("error", "code"),
    [(errors.DataError("no images"), 3), (errors.ModelError("damaged"), 4), (KeyboardInterrupt(), 130)],
)
def test_the_command_line_ends_with_the_code(
    error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("vitrail.cli.list.run", fail)
    assert vitrail.cli.main(["list"]) == code
    assert "Traceback" not in capsys.readouterr().err
