"""How quickly the command line answers when it does not need torch: median seconds of `vitrail --help` and of a typo.

    python bench/start.py

The bare interpreter and `import torch` stand beside them for scale.
"""

import statistics
import subprocess
import sys
import time

RUNS = 15
COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "vitrail --help": ["-m", "vitrail", "--help"],
    "vitrail ifno (typo)": ["-m", "vitrail", "ifno"],
    "python -c 'import torch'": ["-c", "import torch"],
}


def main() -> None:
    for name, arguments in COMMANDS.items():
        seconds = []
        for _ in range(RUNS):
            start = time.perf_counter()
            subprocess.run([sys.executable, *arguments], capture_output=True)
            seconds.append(time.perf_counter() - start)
        print(f"{name:26} {statistics.median(seconds):.3f} s  (n = {RUNS})")


if __name__ == "__main__":
    main()
