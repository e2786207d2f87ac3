"""`baton simulate` as people use it: tables, files, sweeps, soaks, and mistakes that are named."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from cluster.cli.main import make_app
from cluster.simulate.run.clients import Clients
from cluster.simulate.run.run_progress import Look, ProgressWatch
from protos.errors import Misconfigured
from tests.unit.cluster.simulate.asking import SMALL, answer, call
from workers.kv.block_pool import BlockPool


def test_a_run_can_be_kept_as_figures_page_and_event_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures, page, events = tmp_path / "run.json", tmp_path / "run.html", tmp_path / "events.log"
    monkeypatch.setattr("sys.argv", ["baton", "simulate", "my.toml"])  # its page names the command
    outputs = "--json", str(figures), "--html", str(page), "--events", str(events)
    answer(*SMALL, "objectives.ttft_ms=50", *outputs)
    (run,) = json.loads(figures.read_text())["runs"]
    assert run["cluster"]["decode"] == 1
    assert run["figures"]["report"]["num_completed"] == 30
    assert run["figures"]["report"]["itl_s"]["p99"] > 0
    assert run["figures"]["hits"].keys() == {"device", "host", "pulled"}
    assert run["figures"]["num_events"] == len(events.read_text().splitlines())
    html = page.read_text()
    assert html.count("<svg ") == 7
    assert "Workers serving" in html
    assert 'name="viewport"' in html
    assert "prefers-color-scheme: dark" in html
    assert "baton simulate my.toml" in html
    assert "http" not in html
    assert "ITL" in html
    assert not re.search(r"\bnan\b", html)


@pytest.mark.parametrize("more", [(), ("objectives.targets=['ttft p95 < 900 ms']",)])
def test_files_are_written_though_nobody_reads_the_table(more: tuple[str, ...], tmp_path: Path) -> None:
    files = [tmp_path / "run.json", *([] if more else [tmp_path / "run.html"])]
    flags = [word for file in files for word in (f"--{file.suffix[1:]}", str(file))]
    changes = [word for change in (*SMALL, *more) for word in ("--set", change)]
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stdout, redirect_stdout(stdout), pytest.raises(SystemExit):
        make_app(["simulate"])(["simulate", *changes, *flags], standalone_mode=False)
    assert all(file.exists() for file in files)


def test_a_run_says_how_far_it_is_on_stderr_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    quiet = answer(*SMALL)
    begin = ProgressWatch.begin

    def begin_and_show(watch: ProgressWatch, look: Look) -> None:
        begin(watch, look)
        watch.show()

    monkeypatch.setattr(ProgressWatch, "begin", begin_and_show)
    result = call(*SMALL)
    assert "0 of 2 workers made" in result.stderr
    assert result.stdout == quiet
    swept = call(*SMALL, "cluster.colocated=1:2", "objectives.ttft_ms=900")
    assert swept.stderr.count("workers made") == 2, "each of its clusters"
    assert "" not in swept.stderr.splitlines()


def test_a_sweep_finds_the_cheapest_cluster_that_is_good_enough(tmp_path: Path) -> None:
    file = tmp_path / "sweep.json"
    told = answer(
        *SMALL, "cluster.prefill=0:1", "cluster.decode=[1,2]", "objectives.ttft_ms=300", "--json", str(file),
    )  # fmt: skip
    assert "\nthe cheapest that reaches the objective for 95% of the requests: 1 colocated" in told
    swept = json.loads(file.read_text())
    assert len(swept["runs"]) == swept["num_done"] == swept["num_possible"] == 4
    assert swept["cheapest"] == swept["front"][0] == {"prefill": 0, "decode": 1, "tp": 1, "policy": "slo"}
    assert swept["targets"][0]["share"] == 0.95


@pytest.mark.parametrize(
    ("ttft_ms", "near"),
    [
        ("16", r"the closest is 2 colocated tp1 slo: \d+.\d% of its requests meet"),
        ("0.001", "none for a single request"),
    ],
)
def test_a_failed_sweep_names_the_closest_cluster(ttft_ms: str, near: str) -> None:
    result = call(*SMALL, "cluster.colocated=1:2", f"objectives.ttft_ms={ttft_ms}", "objectives.attainment=1")
    assert result.exit_code == 1
    assert "USD" in result.stdout, "the table"
    assert re.search(f"no cluster reaches the objective for 100% of the requests; {near}", result.stdout)


def test_a_sweep_leaves_out_impossible_clusters_with_reasons() -> None:
    large = "hardware.model=llama-3-70b", "hardware.gpu=h200", "cluster.tp=[1,2]", "cluster.prefill=0"
    result = call(*SMALL, *large, "objectives.ttft_ms=900")
    assert result.exit_code == 0, result.output
    assert "left out: cluster.tp = 1: the weights alone need 141 GB" in result.stderr
    assert "1 colocated tp2" in result.stdout
    assert "tp1" not in result.stdout


def test_unplaceable_requests_count_as_missed(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    line = '{"timestamp": %d, "input_length": %d, "output_length": 4, "hash_ids": %s}\n'
    trace.write_text(
        "".join(line % (1000 * k, size, list(range(-(-size // 512)))) for k, size in ((0, 500), (1, 60_000)))
    )
    told = answer(
        f"workload.trace={trace}", "hardware.model=llama-3-70b", "hardware.gpu=h200", "cluster.tp=[2,4]",
        "cluster.prefill=0", "objectives.ttft_ms=90000", "settings.worker.memory_fraction=0.55",
    )  # fmt: skip
    met = {row.split()[2]: row.split()[6] for row in told.splitlines() if row.startswith("1 col")}
    assert met == {"tp2": "50.0%", "tp4": "100.0%"}


def test_a_cluster_that_holds_no_session_is_left_out() -> None:
    result = call(
        "workload.requests=2", "workload.rate=0.01", "workload.input_len=60000", "workload.output_len=5",
        "hardware.model=llama-3-70b", "hardware.gpu=h200", "cluster.tp=[2,4]", "cluster.prefill=0",
        "objectives.ttft_ms=90000", "settings.worker.memory_fraction=0.55",
    )  # fmt: skip
    assert result.exit_code == 0, result.exception
    assert "1 colocated tp4" in result.stdout
    assert "tp2" not in result.stdout
    told = " ".join(result.stderr.split())
    why = r"every session is longer .*60,005 tokens.* \(memory: cluster.tp"
    assert re.search(rf"left out: {why}.* \(1 colocated tp2 slo\)", told)


def test_a_cluster_without_a_faults_worker_is_left_out() -> None:
    fault = "faults.schedule=['0.1 kill colocated-1']"
    result = call(*SMALL, "cluster.colocated=1:2", "objectives.ttft_ms=900", fault)
    assert result.exit_code == 0, result.exception
    assert "2 colocated tp1" in result.stdout
    assert "1 colocated tp1" not in result.stdout
    assert "kill has no target colocated-1" in " ".join(result.stderr.split())


def test_faults_may_be_listed_or_drawn_and_are_reported(tmp_path: Path) -> None:
    figures, page = tmp_path / "run.json", tmp_path / "run.html"
    schedule = "faults.schedule=['0.5 kill decode-0', '900 kill decode-0']"
    faults = schedule, "faults.random=3", "faults.audit_every=50"
    told = answer(*SMALL, *faults, "--json", str(figures), "--html", str(page))
    assert re.search("5 faults, [1-4] passed over", told)
    assert re.search(r"0.50  kill decode-0 *$", told, re.MULTILINE)
    assert "900.00  kill decode-0 (passed over: it begins after the load was over)" in told
    (run,) = json.loads(figures.read_text())["runs"]
    assert len(run["figures"]["faults"]) == 5
    html = page.read_text()
    assert html.count("<title>kill decode-0, at 0.50 s</title>") == 7, "in each plot over time"
    assert html.count("<li>") == 5


def test_a_soak_reports_and_its_seeds_can_be_replayed() -> None:
    assert "3 clusters in trouble, 0 broken" in answer("--soak", "3")
    assert "event log" in answer("--replay", "1")


def test_a_broken_invariant_is_told_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    release = BlockPool.release
    monkeypatch.setattr(BlockPool, "release", lambda pool, block_ids: release(pool, block_ids[1:]))
    for arguments in ((*SMALL, "faults.audit_every=20"), ("--replay", "1")):
        result = call(*arguments)
        assert result.exit_code == 1
        assert "broken: AssertionError: " in result.stderr
    assert re.match(r"cluster: \d.* tp1 .*blocks of \d+ tokens", " ".join(result.stdout.split())), "it has no table"


def test_a_fault_of_the_simulator_is_no_broken_invariant(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: object) -> None:
        raise TypeError("a bug")

    monkeypatch.setattr(Clients, "run", fail)
    for arguments in (SMALL, ("--replay", "1")):
        result = call(*arguments)
        assert isinstance(result.exception, BaseExceptionGroup | TypeError), result.exception
        assert "broken" not in result.stderr + result.stdout


def test_a_soak_goes_on_after_a_bug_and_prints_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Clients.run

    async def fail_at_first(*_: object) -> None:
        monkeypatch.setattr(Clients, "run", run)
        raise IndexError("a bug")

    monkeypatch.setattr(Clients, "run", fail_at_first)
    result = call("--soak", "3")
    assert result.exit_code == 1
    assert "baton simulate --replay 0: IndexError: a bug" in result.stderr
    assert 'raise IndexError("a bug")' in result.stderr, "the traceback"
    assert "3 clusters in trouble, 1 broken" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "param"),
    [
        (("--soak", "3", "--json", "x"), "json"),
        (("--soak", "3", "workload.rate=9"), "set"),
        (("--replay", "3", "--html", "x"), "html"),
        (("--soak", "3", "--replay", "1"), "soak"),
        (("--html", "no/such"), "html"),
        (("--events", "no/such"), "events"),
        (("--json", "."), "json"),
        (("objectives.targets=['ttft p90 < 1 s']", "--events", "x.log"), "--events"),
        (("cluster.decode=1:2", "objectives.ttft_ms=5", "--html", "x.html"), "--html"),
        (("cluster.decode=1:2", "objectives.ttft_ms=5", "cluster.autoscale=1:2"), "cluster.autoscale"),
        (("none.toml",), "scenario"),
    ],
)
def test_flags_that_exclude_each_other_are_refused(arguments: tuple[str, ...], param: str) -> None:
    result = call(*arguments)
    assert isinstance(result.exception, Misconfigured)
    assert result.exception.param == param
    assert not result.stdout, "it has run"


def test_two_flags_do_not_write_one_file(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text("[]")
    for flags in (
        ("--json", str(file), "--html", str(tmp_path / "." / "run.json")),
        ("--html", str(file), f"workload.trace={file}"),
    ):
        error = call(*flags).exception
        assert isinstance(error, Misconfigured)
        assert error.param == "html"
    assert file.read_text() == "[]"
    answer(*SMALL, "--json", os.devnull, "--html", os.devnull)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="nothing here is always full")
def test_an_unwritable_file_is_reported_after_the_table() -> None:
    full = "/dev/full"
    for ttft_ms in ("", "900", "0.001"):
        sweep = (f"objectives.ttft_ms={ttft_ms}", "cluster.colocated=1:2") if ttft_ms else ()
        result = call(*SMALL, "--json", full, *sweep)
        assert "USD" in result.stdout
        assert isinstance(result.exception, Misconfigured)
        assert result.exception.param == "json"
    for arguments in ((*SMALL, "--html", os.devnull), ("--replay", "1")):
        result = call(*arguments, "--events", full)
        assert isinstance(result.exception, Misconfigured)
        assert result.exception.param == "events"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="nothing here is always full")
def test_a_full_stdout_is_told_in_one_line() -> None:
    with open("/dev/full", "w") as full:
        changes = [word for change in SMALL for word in ("--set", change)]
        baton = [sys.executable, "-c", "from cluster.entry import main; main()", "simulate", *changes]
        ended = subprocess.run(baton, stdout=full, stderr=subprocess.PIPE, text=True, timeout=100)
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1].endswith("baton: stdout: No space left on device: make room there")
    assert "Traceback" not in ended.stderr


def test_pools_and_ranks_default_to_the_settings(tmp_path: Path) -> None:
    file = tmp_path / "baton.toml"
    file.write_text('model = "/none"\nport = 9\n[pools]\nprefill = 2\ndecode = 1\n[worker]\ntp = 2\ndevice = "cpu"\n')
    config = f"config={file}"
    assert "of 2P+1D tp2 " in call(*SMALL, config).stderr
    assert "of 2P+3D tp1 " in call(*SMALL, config, "cluster.decode=3", "cluster.tp=1").stderr
    assert "of 1 colocated tp2 " in call(*SMALL, config, "cluster.colocated=1").stderr
    assert "of 3 colocated tp1 " in call(*SMALL, "settings.pools.colocated=3").stderr
    assert "of 1P+2D tp1 " in call(*SMALL, "settings.pools.colocated=3", "cluster.decode=2").stderr


def test_a_link_to_a_missing_file_is_written_through(tmp_path: Path) -> None:
    link, figures = tmp_path / "latest.json", tmp_path / "run.json"
    link.symlink_to(figures)
    assert isinstance(call(*SMALL, "--json", str(link), "cluster.decode=1:3").exception, Misconfigured)
    assert link.is_symlink()
    assert not figures.exists(), "it has not run"
    answer(*SMALL, "--json", str(link))
    assert link.is_symlink()
    assert json.loads(figures.read_text())["runs"]


def test_as_many_requests_are_asked_as_were_asked_for() -> None:
    told = answer(*SMALL, "workload.requests=10", "workload.name=agents")
    assert "10 of 10" in told


def test_a_run_that_never_began_leaves_no_files(tmp_path: Path) -> None:
    log, lost = tmp_path / "kept.log", tmp_path / "lost.json"
    log.write_text("what an earlier run wrote")
    wrong = tmp_path / "trace.jsonl"
    wrong.write_text('{"runs": []}')
    for change in (f"workload.trace={wrong}", "cluster.decode=1:3"):
        result = call(change, "--events", str(log), "--json", str(lost))
        assert isinstance(result.exception, Misconfigured)
        assert "KeyError" not in str(result.exception)
    assert log.read_text() == "what an earlier run wrote"
    assert not lost.exists()
