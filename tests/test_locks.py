"""Lock files: held by one process, named, and free again when it ends in any way; with record locks and without."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from vitrail import locks
from vitrail.errors import LockedError
from vitrail.locks import check_lock, hold_inheritable_lock, hold_lock, wait_for_lock

HOLD = """
import sys, time
from pathlib import Path
from vitrail import locks
if sys.argv[2] == "without":
    locks.fcntl = None
with locks.hold_lock(Path(sys.argv[1]), "the folder"):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture(params=["with", "without"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With the system's record locks, and as where there are none."""
    if request.param == "without":
        monkeypatch.setattr(locks, "fcntl", None)
    return str(request.param)


def holder(path: Path, kind: str) -> "subprocess.Popen[str]":
    process = subprocess.Popen([sys.executable, "-c", HOLD, path, kind], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_another_process_is_refused_and_told_who_holds_it(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "lock"
    with holder(path, kind) as process:
        told = rf"the folder is in use by process {process.pid} on \S+ since .*: wait for it, stop it"
        with pytest.raises(LockedError, match=told), hold_lock(path, "the folder"):
            pass
        with pytest.raises(LockedError, match=told):
            check_lock(path, "the folder")
        process.send_signal(signal.SIGKILL)
    assert path.exists(), "it was killed"
    check_lock(path, "the folder")
    with hold_lock(path, "the folder"):
        assert json.loads(path.read_text())["pid"] == os.getpid()
    assert not path.exists()


def test_its_thread_may_enter_again_and_no_other(tmp_path: Path, kind: str) -> None:
    path, refused = tmp_path / "lock", []

    def enter() -> None:
        try:
            with hold_lock(path, "the folder"):
                pass
        except LockedError:
            refused.append(True)

    with hold_lock(path, "the folder"):
        with hold_lock(path, "the folder"):
            check_lock(path, "the folder")
        assert path.exists()
        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
    assert refused == [True]
    enter()
    assert refused == [True]


def test_a_fork_neither_holds_nor_ends_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with hold_lock(path, "the folder"):
        child = os.fork()
        if not child:
            try:
                check_lock(path, "the folder")
            except LockedError:
                os._exit(0)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        with pytest.raises(LockedError):
            locks._acquire_lock(path, "the folder")


@pytest.mark.parametrize("content", ["", "{", "[]", '{"pid": "x"}', '{"pid": -1}', '{"pid": 4194305, "host": "HOST"}'])
def test_a_file_that_names_nobody_who_runs_is_taken_over(tmp_path: Path, kind: str, content: str) -> None:
    path = tmp_path / "lock"
    path.write_text(content.replace("HOST", socket.gethostname()))
    with hold_lock(path, "the folder"):
        assert json.loads(path.read_text())["pid"] == os.getpid()


def test_without_record_locks_a_process_of_another_machine_is_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "fcntl", None)
    path = tmp_path / "lock"
    path.write_text('{"pid": 1, "host": "another"}')
    with pytest.raises(LockedError, match=rf"process 1 on another .* If that process no longer exists, remove {path}"):
        check_lock(path, "the folder")


def test_one_may_wait_for_a_lock(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "lock"
    with holder(path, kind) as process:

        def end() -> None:
            process.kill()
            process.wait()  # not reaped, it would seem to run

        threading.Timer(0.5, end).start()
        with wait_for_lock(path, "the folder"):
            assert process.wait(timeout=10) == -signal.SIGKILL
            assert json.loads(path.read_text())["pid"] == os.getpid()


def test_a_child_that_got_the_descriptor_keeps_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with hold_inheritable_lock(path, "the folder") as descriptors:
        command = [sys.executable, "-c", "import time; time.sleep(60)"]
        child = subprocess.Popen(command, pass_fds=descriptors)
    with child:
        with pytest.raises(LockedError, match="the folder is in use by another process"):
            hold_inheritable_lock(path, "the folder").__enter__()
        child.kill()
    with hold_inheritable_lock(path, "the folder"):
        pass


def test_where_no_child_can_keep_a_lock_it_is_an_ordinary_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "fcntl", None)
    with hold_inheritable_lock(tmp_path / "lock", "the folder") as descriptors:
        assert descriptors == ()
        assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()
