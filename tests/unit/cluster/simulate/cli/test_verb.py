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
from cluster.simulate.run.progress import Look, ProgressWatch
from protos.errors import Misconfigured
from tests.unit.cluster.simulate.asking import SMALL, answer, call
from workers.kv.blocks import BlockPool


def test_a_run_can_be_kept_as_figures_page_and_event_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures, page, events = tmp_path / "run.json", tmp_path / "run.html", tmp_path / "events.log"
    monkeypatch.setattr("sys.argv", ["baton", "simulate", "--workload", "tenants"])  # its page names the command
    kept = "--json", str(figures), "--html", str(page), "--events", str(events)
    answer(*SMALL, "--ttft-ms", "50", *kept)
    (run,) = json.loads(figures.read_text())["runs"]
    assert run["cluster"]["decode"] == 1
    assert run["figures"]["report"]["num_completed"] == 30
    assert run["figures"]["report"]["itl_s"]["p99"] > 0
    assert run["figures"]["hits"].keys() == {"device", "host", "pulled"}
    assert run["figures"]["num_events"] == len(events.read_text().splitlines())
    html = page.read_text()
    assert html.count('<svg class="wide"') == html.count('<svg class="narrow"') == 11
    assert html.count("<title>objective</title>") == 2
    assert "Workers serving" in html
    assert 'name="viewport"' in html
    assert "prefers-color-scheme: dark" in html
    assert not re.search(r"\de-\d", html), "nobody waits: the axis still has round numbers"
    assert "http" not in html
    assert "ITL" in html
    assert not re.search(r"\bnan\b", html)


@pytest.mark.parametrize("more", [(), ("--sweep", "--ttft-ms", "900")])
def test_files_are_written_though_nobody_reads_the_table(more: tuple[str, ...], tmp_path: Path) -> None:
    files = [tmp_path / "run.json"] if more else [tmp_path / "run.json", tmp_path / "run.html"]
    kept = [word for file in files for word in (f"--{file.suffix[1:]}", str(file))]
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stdout, redirect_stdout(stdout), pytest.raises(SystemExit):
        make_app(["simulate"])(["simulate", *SMALL, *more, *kept], standalone_mode=False)
    assert all(file.exists() for file in files)


def test_a_run_says_how_far_it_is_on_stderr_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    quiet = answer(*SMALL)
    begin = ProgressWatch.begin

    def begin_and_show(watch: ProgressWatch, look: Look) -> None:
        begin(watch, look)
        watch.show()

    monkeypatch.setattr(ProgressWatch, "begin", begin_and_show)
    result = call(*SMALL)
    assert "0 of 30 requests have ended in 0 s of virtual time" in result.stderr
    assert result.stdout == quiet
    swept = call(*SMALL, "--sweep", "--workers", "1,2", "--ttft-ms", "900")
    assert swept.stderr.count("0 of 30 requests have ended") == 2, "each of its clusters"
    assert "" not in swept.stderr.splitlines()


def test_stepping_one_by_one_tells_the_same() -> None:
    assert answer(*SMALL) == answer(*SMALL, "--single-step")


def test_a_sweep_finds_the_cheapest_cluster_that_is_good_enough(tmp_path: Path) -> None:
    file = tmp_path / "sweep.json"
    told = answer(
        *SMALL, "--sweep", "--prefill", "0:1", "--decode", "1,2", "--ttft-ms", "300", "--json", str(file),
    )  # fmt: skip
    assert "\nthe cheapest that reaches the objective for 95% of the requests: 1 colocated" in told
    swept = json.loads(file.read_text())
    assert len(swept["runs"]) == swept["num_done"] == swept["num_possible"] == 4
    cheapest = {
        "prefill": 0, "decode": 1, "tp": 1, "policy": "slo", "gateways": 1, "gpu": "h100", "model": "llama-3-8b"
    }  # fmt: skip
    assert swept["cheapest"] == swept["front"][0] == cheapest
    assert swept["attainment"] == 0.95


@pytest.mark.parametrize(
    ("ttft_ms", "near"),
    [
        ("16", r"the closest is 2 colocated tp1 slo: \d+.\d% of its requests meet"),
        ("0.001", "none for a single request"),
    ],
)
def test_a_sweep_that_finds_no_cluster_says_which_is_closest_and_ends_with_1(ttft_ms: str, near: str) -> None:
    result = call(*SMALL, "--sweep", "--prefill", "0", "--decode", "1,2", "--ttft-ms", ttft_ms, "--attainment", "1")
    assert result.exit_code == 1
    assert "USD" in result.stdout, "the table"
    assert re.search(f"no cluster reaches the objective for 100% of the requests; {near}", result.stdout)


def test_a_sweep_leaves_out_what_cannot_be_and_says_why() -> None:
    result = call(
        *SMALL,
        "--sweep",
        "--model",
        "llama-3-70b",
        "--gpu",
        "h200",
        "--tp",
        "1,2",
        "--prefill",
        "0",
        "--ttft-ms",
        "900",
    )
    assert result.exit_code == 0, result.output
    assert "left out: --tp 1: the weights alone need 141 GB" in result.stderr
    assert "1 colocated tp2" in result.stdout
    assert "tp1" not in result.stdout


def test_what_a_cluster_cannot_hold_it_has_missed(tmp_path: Path) -> None:
    """Longer than its memory, not longer than the other's: else the smaller one would be tried with less."""
    trace = tmp_path / "trace.jsonl"
    line = '{"timestamp": %d, "input_length": %d, "output_length": 4, "hash_ids": %s}\n'
    trace.write_text(
        "".join(line % (1000 * k, size, list(range(-(-size // 512)))) for k, size in ((0, 500), (1, 60_000)))
    )
    told = answer(
        "--trace", str(trace), "--model", "llama-3-70b", "--gpu", "h200", "--tp", "2,4", "--prefill", "0",
        "--sweep", "--ttft-ms", "90000", "--set", "worker.memory_fraction=0.55",
    )  # fmt: skip
    met = {row.split()[2]: row.split()[6] for row in told.splitlines() if row.startswith("1 col")}
    assert met == {"tp2": "50.0%", "tp4": "100.0%"}


def test_a_cluster_that_holds_none_of_the_sessions_is_left_out_of_a_sweep() -> None:
    result = call(
        "--requests", "2", "--rate", "0.01", "--input-len", "60000", "--output-len", "5", "--model", "llama-3-70b",
        "--gpu", "h200", "--tp", "2,4", "--prefill", "0", "--sweep", "--ttft-ms", "90000",
        "--set", "worker.memory_fraction=0.55",
    )  # fmt: skip
    assert result.exit_code == 0, result.exception
    assert "1 colocated tp4" in result.stdout
    assert "tp2" not in result.stdout
    told = " ".join(result.stderr.split())
    why = r"every session is longer .*60,005 tokens.* \(the memory of its GPUs\): .*--tp"
    assert re.search(rf"left out: {why}.* \(1 colocated tp2 slo\)", told)


def test_a_cluster_without_the_worker_that_a_fault_names_is_left_out_of_a_sweep() -> None:
    result = call(
        *SMALL, "--sweep", "--prefill", "0", "--decode", "1,2", "--ttft-ms", "900", "--fault", "0.1 kill colocated-1"
    )
    assert result.exit_code == 0, result.exception
    assert "2 colocated tp1" in result.stdout
    assert "1 colocated tp1" not in result.stdout
    assert "kill takes a worker, and colocated-1 is none. There is only the worker colocated-0 " in " ".join(
        result.stderr.split()
    )


def test_faults_can_be_written_down_and_drawn_and_are_in_the_report(tmp_path: Path) -> None:
    figures, page = tmp_path / "run.json", tmp_path / "run.html"
    faults = "--fault", "0.5 kill decode-0", "--fault", "900 kill decode-0", "--faults", "3", "--audit-every", "50"
    told = answer(*SMALL, *faults, "--json", str(figures), "--html", str(page))
    assert re.search("5 faults, [1-4] passed over", told)
    assert re.search(r"0.50  kill decode-0 *$", told, re.MULTILINE)
    assert "900.00  kill decode-0 (passed over: it begins after the load was over)" in told
    (run,) = json.loads(figures.read_text())["runs"]
    assert len(run["figures"]["faults"]) == 5
    html = page.read_text()
    assert html.count("<title>kill decode-0</title>") >= 3, "in each plot over time"
    assert "<li>kill decode-0, at 0.50 s</li>" in html
    assert "<li>kill decode-0, at 900.00 s: it begins after the load was over</li>" in html


def test_a_soak_says_how_it_went_and_one_of_its_seeds_can_be_seen_again() -> None:
    assert "3 clusters in trouble, 0 broken" in answer("--soak", "3")
    assert "event log" in answer("--replay", "1")


def test_a_broken_invariant_is_told_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    release = BlockPool.release
    monkeypatch.setattr(BlockPool, "release", lambda pool, block_ids: release(pool, block_ids[1:]))
    for arguments in ((*SMALL, "--audit-every", "20"), ("--replay", "1")):
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
    ("arguments", "named"),
    [
        (("--gpu", "h900"), "--gpu h900"),
        (("--model", "llama-9"), "--model llama-9"),
        (("--model", "llama-3-70b"), "--tp 1"),
        (("--decode", "1:3"), "--decode 1:3: 3 clusters: give one of each, or --sweep"),
        (("--tp", "1,2", "--policy", "slo,prefix_aware"), "--tp 1,2, --policy slo,prefix_aware: 4 clusters"),
        (("--sweep", "--prefill", "1:999", "--decode", "1:999"), "--sweep would try 998,001 clusters: give at most"),
        (("--decode", "99999999999"), "--decode 99999999999: give numbers from 0 to 4096"),
        (("--tp", "1:1000000000000"), "--tp 1:1000000000000: give numbers from 1 to 4096"),
        (("--decode", "-1000000000000:1"), "--decode -1000000000000:1: give numbers from 0 to 4096"),
        (("--prefill", "4:1"), "--prefill 4:1: it ends before it begins: give 1:4"),
        (("--prefill", "9999:1"), "--prefill 9999:1: give numbers from 0 to 4096"),
        (("--workers", "0"), "--workers 0: give numbers from 1 to 4096"),
        (("--workers", ""), "--workers '': give numbers"),
        (
            ("--workers", "2", "--decode", "3"),
            "--workers N asks for colocated workers, instead of two pools: leave --decode",
        ),
        (
            ("--colocated", "--prefill", "1"),
            "--colocated asks for colocated workers, instead of two pools: leave --prefill out",
        ),
        (("--prefill-tp", "2", "--workers", "2"), "--workers N asks for colocated workers"),
        (("--decode-tp", "1,2"), "--decode-tp 1,2: 2 clusters: give"),
        (("--set", "pools.decode_tp=3"), "--decode-tp 3: it must divide the 32 heads of llama-3-8b"),
        (("--lane-gbps", "0"), "--lane-gbps 0: give the gigabits a second"),
        (("--dtype", "int3"), "--weights int3: choose one of bfloat16, fp8, fp8_block, int8, int4"),
        (("--gpu", "a100", "--dtype", "fp8"), "no FP8: give one of h100, h200, b200"),
        (("--set", "worker.dtype=float32"), "worker.dtype = 'float32': simulated KV is bfloat16"),
        (("--set", "model=/none"), "--set model=/none: no checkpoint is read: give --model one of llama-3-8b, "),
        (("--set", "worker.num_blocks=1"), "or --trace-scale, or raise worker.num_blocks"),
        (("--host-kv-gib", "-1"), "--host-kv-gib -1: give 0 or more"),
        (("--soak", "3", "--json", "x"), "--soak N writes no files; --replay SEED has --events: leave --json out"),
        (("--soak", "3", "--audit-every", "9"), "--soak N looks at all invariants every few events: leave --audit-"),
        (("--replay", "3", "--html", "x"), "--replay SEED writes an event log alone: leave --html out"),
        (("--attainment", "nan"), "--attainment nan: give a number from 0 to 1"),
        (("--requests", "0"), "--requests 0: give a number from 1 to 10,000,000"),
        (("--requests", "99999999999"), "--requests 99999999999: give a number from 1 to 10,000,000"),
        (("--requests", "1.5"), "--requests 1.5: give a whole number"),
        (("--requests", ""), "--requests '': give a whole number"),
        (("--rate", "often"), "--rate often: give a number"),
        (("--rate", "1e-9"), "--rate 1e-09: the last of 30 requests comes after 347,222 days of virtual time"),
        (("--ttft-ms", "nan"), "--ttft-ms nan: give milliseconds, above 0"),
        (("--faults", "999999999"), "--faults 999999999: give a number from 0 to 100,000"),
        (("--gateways", "999999999"), "--gateways 999999999: give a number from 1 to 1,000"),
        (("--usd-per-gpu-hour", "inf"), "--usd-per-gpu-hour inf: give a price"),
        (("--host-kv-gib", "1e300"), "--host-kv-gib 1e+300 (worker.host_kv_gib): give at most 16,384"),
        (
            ("--input-len", "999999"),
            "than the 131,072 tokens that a worker holds (worker.max_model_len, of llama-3-8b): ",
        ),
        (("--workload", ""), "--workload '': choose one of poisson"),
        (("--config", "none"), "--config none: No such file or directory: correct the path"),
        (("--host-kv-gib", "1e-6"), "--host-kv-gib 1e-06"),
        (("--decode", "some"), "--decode some"),
        (("--sweep",), "--ttft-ms"),
        (("--tp", "3"), "--tp 3: it must divide the 32 heads of llama-3-8b"),
        (("--rate", "inf"), "--rate inf"),
        (("--ttft-ms", "0"), "--ttft-ms 0"),
        (("--fault", "now"), "--fault"),
        (("--policy", "dice"), "--policy dice: there is no policy 'dice': choose of round_robin, "),
        (("--policy", ""), "--policy '': there is no policy ''"),
        (("--set", "router.policy=dice"), "router.policy: there is no policy 'dice'"),
        (("--set", "router.policy=slo,round_robin"), "router.policy slo,round_robin: 2 clusters: give"),
        (
            ("--tp", "1,2", "--set", "router.policy=slo,round_robin"),
            "--tp 1,2, router.policy slo,round_robin: 4 clusters",
        ),
        (("--set", "worker.tp=5000"), "worker.tp 5000: give numbers from 1 to 4096"),
        (("--policy", "slo,"), "--policy slo,: there is no policy ''"),
        (
            ("--prefill", "3", "--decode", "0"),
            "give at least 1, as prefill workers write no answers; --workers N is N colocated",
        ),
        (("--input-len", "5:"), "--input-len 5:"),
        (("--trace", "none"), "leave --rate, --input-len, --output-len out"),
        (("--workload", "assistant"), "has its own lengths: leave --input-len, --output-len out"),
        (("--attainment", "0.9"), "without --sweep: leave --attainment out"),
        (("--trace-speed", "2"), "without --trace FILE: leave --trace-speed out"),
        (("--soak", "3", "--replay", "1"), "leave --requests, --rate, --input-len, --output-len, --soak out"),
        (("--sweep", "--ttft-ms", "5", "--events", "x.log"), "leave --events out"),
        (("--sweep", "--gpus", "2", "--decode", "2"), "--gpus N tries every number of workers: leave --decode out"),
        (("--gpus", "2"), "without --sweep: leave --gpus out"),
        (("--html", "no/such"), "--html no/such: No such file or directory: make its folder first, or give another"),
        (
            ("--events", "no/such"),
            "--events no/such: No such file or directory: make its folder first, or give another",
        ),
        (("--json", "."), "--json .: Is a directory: give a file's path"),
    ],
)
def test_mistakes_are_named_with_their_flag(arguments: tuple[str, ...], named: str) -> None:
    result = call(*SMALL, *arguments)
    assert isinstance(result.exception, Misconfigured)
    assert named in str(result.exception)
    assert not result.stdout, "it has run"


@pytest.mark.parametrize("flags", [("--seed", "-1"), ("--replay", "-1"), ("--soak", "2", "--seed", "-5")])
def test_a_seed_is_not_negative(flags: tuple[str, ...]) -> None:
    assert str(call(*flags).exception) == f"{flags[-2]} {flags[-1]}: give 0 or more"


def test_two_flags_do_not_write_one_file(tmp_path: Path) -> None:
    """Nor one that another reads."""
    file = tmp_path / "run.json"
    file.write_text("[]")
    said = str(call(*SMALL, "--json", str(file), "--html", str(tmp_path / "." / "run.json")).exception)
    assert said == f"--html {file}: --json writes that file: give another path"
    said = str(call("--events", str(file), "--trace", str(file)).exception)
    assert said == f"--events {file}: --trace reads that file: give another path"
    assert file.read_text() == "[]"
    answer(*SMALL, "--json", os.devnull, "--html", os.devnull)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="nothing here is always full")
def test_what_cannot_be_written_at_the_end_is_told_after_the_table() -> None:
    full = "/dev/full"
    for flags in ((), ("--sweep", "--ttft-ms", "900"), ("--sweep", "--ttft-ms", "0.001")):
        result = call(*SMALL, "--json", full, *flags)
        assert "USD" in result.stdout
        assert isinstance(result.exception, Misconfigured)
        assert str(result.exception) == f"--json {full}: No space left on device: {ROOM}"
    result = call(*SMALL, "--events", full, "--html", full)
    assert "event log" in result.stdout
    assert str(result.exception) == "; ".join(f"{flag} {full}: No space left on device: {ROOM}" for flag in LOST)
    result = call("--replay", "1", "--events", full)
    assert "event log" in result.stdout
    assert isinstance(result.exception, Misconfigured)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="nothing here is always full")
def test_a_full_stdout_is_told_in_one_line() -> None:
    with open("/dev/full", "w") as full:
        baton = [sys.executable, "-c", "from cluster.entry import main; main()", "simulate", *SMALL]
        ended = subprocess.run(baton, stdout=full, stderr=subprocess.PIPE, text=True, timeout=100)
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1].endswith("baton: stdout: No space left on device: make room there")
    assert "Traceback" not in ended.stderr


ROOM = "make room, or give a path on another disk"
LOST = ("--events", "--html")


def test_colocated_workers_are_asked_for_as_of_the_other_verbs() -> None:
    plain = answer(*SMALL, "--prefill", "0", "--decode", "2")
    assert answer(*SMALL, "--workers", "2") == answer(*SMALL, "--colocated", "--workers", "2") == plain
    assert answer(*SMALL, "--colocated") == answer(*SMALL, "--prefill", "0")
    swept = answer(*SMALL, "--workers", "1:2", "--sweep", "--ttft-ms", "900")
    assert "2 colocated" in swept
    assert "1P" not in swept


def test_pools_and_ranks_are_those_of_the_settings_unless_flags_say_more(tmp_path: Path) -> None:
    file = tmp_path / "baton.toml"
    file.write_text("[pools]\nprefill = 2\ndecode = 1\n[worker]\ntp = 2\n")
    assert "of 2P+1D tp2 " in call(*SMALL, "--config", str(file)).stderr
    assert "of 2P+3D tp1 " in call(*SMALL, "--config", str(file), "--decode", "3", "--tp", "1").stderr
    assert "of 1 colocated tp2 " in call(*SMALL, "--config", str(file), "--colocated").stderr
    assert "of 3 colocated tp1 " in call(*SMALL, "--set", "pools.colocated=3").stderr
    assert "of 1P+2D tp1 " in call(*SMALL, "--set", "pools.colocated=3", "--decode", "2").stderr


def test_processes_of_the_settings_are_gateways_that_know_of_one_another(tmp_path: Path) -> None:
    log = tmp_path / "events.log"
    faults = "--fault", "1 gateway-restart 1", "--events", str(log)
    answer(*SMALL, "--set", "processes=2", *faults)
    assert "gateway=gateway-2" in log.read_text()
    assert "There is only 0" in str(call(*SMALL, "--set", "processes=2", "--gateways", "1", *faults).exception)


def test_a_link_to_a_file_that_is_not_there_yet_is_written_through(tmp_path: Path) -> None:
    link, figures = tmp_path / "latest.json", tmp_path / "run.json"
    link.symlink_to(figures)
    assert isinstance(call(*SMALL, "--json", str(link), "--decode", "1:3").exception, Misconfigured)
    assert link.is_symlink()
    assert not figures.exists(), "it has not run"
    answer(*SMALL, "--json", str(link))
    assert link.is_symlink()
    assert json.loads(figures.read_text())["runs"]


def test_paths_that_cannot_be_are_told_with_their_flag(tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for flag, path in (("--json", "a" * 300), ("--json", str(loop)), ("--trace", str(loop))):
        error = call(flag, path).exception
        assert isinstance(error, Misconfigured)
        assert str(error).startswith(f"{flag} {path}: ")


def test_a_file_of_a_real_cluster_can_be_given_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "baton.toml"
    file.write_text('model = "/none"\nport = 9\n[worker]\ndevice = "cpu"\ndtype = "bfloat16"\n')
    assert answer(*SMALL, "--config", str(file)) == answer(*SMALL)


def test_as_many_requests_are_asked_as_were_asked_for() -> None:
    told = answer(*SMALL, "--requests", "10", "--workload", "agents")
    assert "10 of 10" in told


def test_a_run_that_never_began_leaves_no_files_and_no_empty_ones(tmp_path: Path) -> None:
    kept, lost = tmp_path / "kept.log", tmp_path / "lost.json"
    kept.write_text("what an earlier run wrote")
    wrong = tmp_path / "trace.jsonl"
    wrong.write_text('{"runs": []}')
    for flags in (("--trace", str(wrong)), ("--decode", "1:3")):
        result = call(*flags, "--events", str(kept), "--json", str(lost))
        assert isinstance(result.exception, Misconfigured)
        assert "KeyError" not in str(result.exception)
    assert kept.read_text() == "what an earlier run wrote"
    assert not lost.exists()
