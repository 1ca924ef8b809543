"""Whether `vitrail finetune --minutes` ends on time, alone and with another job on the same cores.

    python bench/deadline.py DATA --model MODEL --minutes 1 3 --cores 2

Each run has cores of its own. Another job takes half of them, by as many busy processes as there are cores: never, from
the beginning, or after half or three quarters of the minutes. A row: the seconds that the whole command took, from its
start to its exit, over those it was given; what it trained; and the accuracy that it printed.
"""

import argparse
import concurrent.futures
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

BUSY = "while True: pass"
SHARED_FROM = (None, 0.0, 0.5, 0.75)


def start_pinned(command: list[str], cores: list[int], **options: object) -> subprocess.Popen[str]:
    """A process that has these cores."""
    return subprocess.Popen(
        command,
        text=True,
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
        **options,  # type: ignore[call-overload]
    )


def time_run(options: argparse.Namespace, minutes: float, shared_from: float | None, cores: list[int]) -> str:
    """Run one case, and describe what it took."""
    busy: list[subprocess.Popen[str]] = []
    ended = threading.Event()

    def disturb() -> None:
        assert shared_from is not None
        if not ended.wait(shared_from * minutes * 60):
            busy.extend(start_pinned([sys.executable, "-c", BUSY], cores) for _ in cores)

    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "vitrail", "finetune", options.data, "--model", options.model, "--json"]
        command += ["--minutes", f"{minutes:g}", "--out", f"{folder}/run", "--device", "cpu"]
        other = threading.Thread(target=disturb)
        start = time.monotonic()
        run = start_pinned(command, cores, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        if shared_from is not None:
            other.start()
        out, err = run.communicate()
        seconds = time.monotonic() - start
        ended.set()
        if shared_from is not None:
            other.join()
        for process in busy:
            process.kill()
        if run.returncode:
            return f"{minutes:g} minutes: failed: {err.strip().splitlines()[-1]}"
        facts = json.loads(out)
        ended_at = time.time()
        events = [json.loads(line) for line in (Path(folder) / "run" / "events.jsonl").read_text().splitlines()]
    steps_end = max(event["at"] for event in events if event["event"] == "epoch")
    end = next(event["at"] for event in events if event["event"] == "end")
    plans = sum(event["event"] == "plan" for event in events)
    shared = "alone" if shared_from is None else f"shared from {shared_from:.0%}"
    return (
        f"{minutes:g} minutes, {shared:16} {seconds:6.1f} s = {seconds / minutes / 60:.2f} of the limit;"
        f" {facts['epochs']:.2f} epochs, planned again {plans} times, {facts['correct']} of {facts['images']} correct;"
        f" {end - steps_end:.0f} s measuring, {ended_at - end:.0f} s report"
    )


def main() -> None:
    """Run all of them, as many at once as there are cores for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data")
    parser.add_argument("--model", required=True)
    parser.add_argument("--minutes", type=float, nargs="+", default=[1.0, 3.0])
    parser.add_argument("--shared-from", type=float, nargs="*", help="shares of the minutes; all cases unless given")
    parser.add_argument("--cores", type=int, default=2, help="of each run")
    options = parser.parse_args()
    every = sorted(os.sched_getaffinity(0))
    free: queue.Queue[list[int]] = queue.Queue()
    for first in range(0, len(every) - options.cores + 1, options.cores):
        free.put(every[first : first + options.cores])

    def run_case(minutes: float, shared_from: float | None) -> str:
        cores = free.get()
        try:
            return time_run(options, minutes, shared_from, cores)
        finally:
            free.put(cores)

    shares = SHARED_FROM if options.shared_from is None else options.shared_from
    cases = [(minutes, shared) for minutes in sorted(options.minutes, reverse=True) for shared in shares]
    with concurrent.futures.ThreadPoolExecutor(free.qsize()) as pool:
        for line in pool.map(lambda case: run_case(*case), cases):
            print(line, flush=True)


if __name__ == "__main__":
    main()
