"""The suite itself: its processes, and what happens to it when a test takes its process with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

CONFTEST = """
import pytest
from tests.forked_runner import ForkedRunner

def pytest_addoption(parser):
    parser.addoption("--processes", type=int)

@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session):
    ForkedRunner(session, lambda file: file).run(session.config.option.processes)
    return True
"""


def ran(tmp_path: Path, *options: str, **files: str) -> subprocess.CompletedProcess[str]:
    """The tests in `files`, run by two processes."""
    for name, text in {"conftest": CONFTEST, **files}.items():
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
    plugins = "-p no:asyncio -p no:hypothesispytest -p no:anyio -p no:cacheprovider -p no:xdist".split()
    return subprocess.run(
        [sys.executable, "-m", "pytest", "--processes=2", *plugins, *options, str(tmp_path)],
        cwd=tmp_path, env={"PYTHONPATH": str(ROOT), "PATH": "", "COLUMNS": "200"}, capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip


def test_a_dead_process_costs_one_test(tmp_path: Path) -> None:
    """One dies in the middle of its file, one in the last test of its file, by a signal."""
    fine = "def test_{0}(): pass\n"
    files = {f"test_{name}": "".join(fine.format(number) for number in range(4)) for name in "abcdef"}
    files["test_d"] = "import os\ndef test_0(): os._exit(7)\n" + "".join(fine.format(number) for number in range(1, 4))
    files["test_f"] = files["test_f"].replace("def test_3(): pass", "def test_3(): os.kill(os.getpid(), 9)\nimport os")
    done = ran(tmp_path, **files)
    assert "2 failed, 22 passed" in done.stdout
    assert "the process of this test has ended with exit code 7" in done.stdout
    assert "the process of this test has ended by SIGKILL" in done.stdout
    assert done.returncode == pytest.ExitCode.TESTS_FAILED


def test_a_crash_after_the_last_test_fails_none(tmp_path: Path) -> None:
    """It is shown: a library may end badly with its process."""
    done = ran(tmp_path, test_a="import atexit, os\ndef test_0(): atexit.register(os._exit, 3)\n")
    assert "1 passed" in done.stdout
    assert "after its last test a process has ended with exit code 3" in done.stdout
    assert done.returncode == pytest.ExitCode.OK


def test_both_of_two_processes_may_die_at_once(tmp_path: Path) -> None:
    together = """
        import os, pathlib, time

        def test_0():
            pathlib.Path(__file__).with_suffix(".here").touch()
            while len(list(pathlib.Path(__file__).parent.glob("*.here"))) < 2:
                time.sleep(0.01)
            os._exit(1)

        def test_1():
            pass
    """
    fine = "def test_0(): pass"
    done = ran(tmp_path, test_a=together, test_b=together, test_c=fine, test_d=fine, test_e=fine)
    assert "2 failed, 5 passed" in done.stdout


def test_a_tests_output_and_its_failure_are_shown(tmp_path: Path) -> None:
    """Also of a process that a timeout has ended."""
    late = "import time\ndef test_late():\n    print('as far as this')\n    while True: time.sleep(0.01)\n"
    wrong = "def test_wrong():\n    print('before it')\n    assert 1 == 2\n"
    done = ran(tmp_path, "--timeout=1", "--timeout-method=thread", test_late=late, test_wrong=wrong)
    assert "2 failed" in done.stdout
    for shown in ("before it", "assert 1 == 2", "as far as this", "while True", "test_late.py::test_late"):
        assert shown in done.stdout + done.stderr, shown


def test_fixtures_end_where_the_next_test_does_not_use_them(tmp_path: Path) -> None:
    """A file's own with the file; those of the session when their process has no more tests, also after a failure."""
    fixtures = CONFTEST + textwrap.dedent("""
        import os
        from pathlib import Path

        def noted(what):
            with open("notes", "a") as notes:
                notes.write(f"{os.getpid()} {what}\\n")

        @pytest.fixture(scope="session")
        def of_session(tmp_path_factory):
            noted(f"made {tmp_path_factory.mktemp('made')}")
            yield
            noted("unmade")

        @pytest.fixture(scope="module")
        def of_file(of_session):
            yield
            noted("file ends")
    """)
    files = {f"test_{name}": "def test_0(of_file): pass\ndef test_1(of_file): assert 0\n" for name in "abcd"}
    done = ran(tmp_path, conftest=fixtures, **files)
    assert "4 failed, 4 passed" in done.stdout
    notes: dict[str, list[str]] = {}
    for line in (tmp_path / "notes").read_text().splitlines():
        process, what = line.split(maxsplit=1)
        notes.setdefault(process, []).append(what)
    folders = {what.pop(0) for what in notes.values()}
    assert len(folders) == len(notes), "processes share no folder"
    assert all(what[-1] == "unmade" and what.count("unmade") == 1 for what in notes.values())
    assert sum(what.count("file ends") for what in notes.values()) == 4


def test_enough_failures_stop_the_run(tmp_path: Path) -> None:
    """The running tests are stopped, and clean up."""
    waits = """
        import time
        from pathlib import Path
        import pytest

        @pytest.fixture
        def cleaned():
            yield
            Path("cleaned").touch()

        def test_0(cleaned):
            Path("waits").touch()
            while not Path("failed").exists(): time.sleep(0.01)

        def test_1(): Path("too far").touch()
    """
    fails = """
        import time
        from pathlib import Path

        def test_0():
            while not Path("waits").exists(): time.sleep(0.01)
            assert 0

        def test_1(): Path("too far").touch()
    """
    then = CONFTEST + "\ndef pytest_runtest_logreport(report):\n    if report.failed: open('failed', 'w').close()\n"
    done = ran(tmp_path, "-x", conftest=then, test_a=waits, test_b=fails)
    assert "1 failed" in done.stdout
    assert "stopping after 1 failures" in done.stdout
    assert (tmp_path / "cleaned").exists()
    assert not (tmp_path / "too far").exists()


def test_ctrl_c_ends_all_processes(tmp_path: Path) -> None:
    interrupts = """
        import os, signal, time

        def test_0():
            os.killpg(os.getpgid(0), signal.SIGINT)
            time.sleep(60)
    """
    waits = "import time\ndef test_0(): time.sleep(60)"
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        for name, text in {"conftest": CONFTEST, "test_a": interrupts, "test_b": waits}.items():
            (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
        with subprocess.Popen(
            [sys.executable, "-m", "pytest", "--processes=2", "-p", "no:cacheprovider", str(tmp_path)],
            cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True,
            start_new_session=True,
        ) as running:  # fmt: skip
            shown, _ = running.communicate(timeout=50)
    finally:
        signal.signal(signal.SIGINT, before)
    assert running.returncode == pytest.ExitCode.INTERRUPTED
    assert "KeyboardInterrupt" in shown
