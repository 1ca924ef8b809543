"""One real run for all tests that only look at it."""

from pathlib import Path

import pytest

from tests.report.run_folders import finetune_run


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of a small model, with its report."""
    return finetune_run(tmp_path_factory.mktemp("finetuned"))
