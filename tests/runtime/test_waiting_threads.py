"""From Python, threads sleep while they wait beside other jobs; tests/cli/test_finetune.py has the command."""

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("load", "own", "policy"), [(0.1, None, None), (0.9, None, "PASSIVE"), (0.9, "ACTIVE", "ACTIVE")]
)
def test_the_first_name_of_vitrail_decides_before_torch_is_imported(
    load: float, own: str | None, policy: str | None
) -> None:
    """`load` is of each core."""
    code = f"""
import os, sys
os.getloadavg = lambda: ({load} * os.cpu_count(), 0, 0)
class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print(os.environ.get("OMP_WAIT_POLICY"))
            raise SystemExit
sys.meta_path.insert(0, Watch())
import vitrail
vitrail.finetune
"""
    assert run_python(code, own) == f"{policy}\n"


def test_where_torch_is_imported_already_nothing_is_set() -> None:
    code = """
import os, sys, types
os.getloadavg = lambda: (os.cpu_count(), 0, 0)
sys.modules["torch"] = types.ModuleType("torch")
import vitrail
vitrail.Recipe
print(os.environ.get("OMP_WAIT_POLICY"))
"""
    assert run_python(code, None) == "None\n"


def run_python(code: str, own_policy: str | None) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    environment |= {} if own_policy is None else {"OMP_WAIT_POLICY": own_policy}
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60)
    assert ended.stderr == ""
    return ended.stdout
