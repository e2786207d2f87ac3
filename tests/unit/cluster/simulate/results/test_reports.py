"""The report of `baton simulate` on a terminal, on its page and in its figures."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from protos.hints import usd_figure
from tests.unit.cluster.simulate.asking import SMALL, answer, call


def test_it_says_how_fast_how_full_and_how_dear() -> None:
    told = answer(*SMALL, "objectives.ttft_ms=500")
    for words in ("30 of 30", "TTFT", "goodput", "GPUs busy", "USD a million tokens", "event log"):
        assert words in told


def test_turns_after_a_failed_one_are_reported_as_missed(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    load = "workload.name=agents", "workload.requests=24", "workload.rate=40", "workload.output_len=5:40"
    failing = *load, "cluster.prefill=0", "faults.schedule=['1 aborts clients']", "objectives.ttft_ms=90000"
    flags = "--json", str(file)
    told = answer(*failing, *flags)
    figures = json.loads(file.read_text())["runs"][0]["figures"]
    report, num_not_asked = figures["report"], figures["num_not_asked"]
    assert num_not_asked > 0
    assert report["num_requests"] + num_not_asked == 24
    assert f"{num_not_asked}: their conversation had failed before" in told
    swept = answer(*failing, "objectives.targets=['e2e p1 < 9 s']", "objectives.attainment=0.01")
    assert f" {report['num_completed'] / 24:.1%} " in swept


def test_a_left_out_load_is_reported_and_missed(tmp_path: Path) -> None:
    figures, page = tmp_path / "run.json", tmp_path / "run.html"
    limit = "settings.worker.max_model_len=900"
    load = "workload.name=conversations", *SMALL, "workload.input_len=50:900", limit
    told = answer(*load, "--json", str(figures), "--html", str(page))
    run = json.loads(figures.read_text())["runs"][0]["figures"]
    num_requests = run["num_left_out_requests"]
    assert num_requests > run["num_left_out"] > 0, "a conversation asks more than once"
    assert run["report"]["num_requests"] + num_requests == 30
    for report in (told, page.read_text()):
        assert f"{run['num_left_out']} sessions ({num_requests} requests): no worker holds them" in " ".join(
            report.split()
        )
    met = 100 * (1 - num_requests / 30)
    swept = call(*load, "cluster.colocated=1:2", "objectives.ttft_ms=90000")
    assert swept.exit_code == 1, "a load that is mostly not tried is not met"
    left_out = (
        f"{run['num_left_out']} sessions left out: longer \\(up to [0-9,]+ tokens\\) than the 900 that a worker holds"
    )
    assert re.search(rf"{left_out} \(worker.max_model_len\): all", " ".join(swept.stdout.split()))
    assert [row.split()[6] for row in swept.stdout.splitlines() if " colocated tp1 " in row[:20]] == [f"{met:.1f}%"] * 2


def test_clusters_that_a_sweep_leaves_out_are_in_its_report(tmp_path: Path) -> None:
    """They were told on stderr alone."""
    file = tmp_path / "swept.json"
    sweep = *SMALL, "cluster.colocated=1:4", "objectives.ttft_ms=90000", "--json", str(file)
    told = answer(*sweep, "faults.schedule=['0.1 kill colocated-2']")
    assert "2 of 4 clusters left out: the reasons are on stderr and in --json\n" in told
    report = json.loads(file.read_text())
    assert [row["cluster"]["decode"] for row in report["left_out"]] == [1, 2]
    assert [run["cluster"]["decode"] for run in report["runs"]] == [3, 4]
    assert report["left_out"][0]["cluster"].keys() == report["runs"][0]["cluster"].keys()
    assert "kill has no target colocated-2" in report["left_out"][0]["reason"]
    assert "left out" not in answer(*sweep)
    assert json.loads(file.read_text())["left_out"] == []


def test_every_report_has_its_scenario(tmp_path: Path) -> None:
    """Pools and policy stood on stderr alone, GPU and model nowhere."""
    figures, page, swept = tmp_path / "run.json", tmp_path / "run.html", tmp_path / "swept.json"
    choice = *SMALL, "hardware.gpu=h200", "hardware.model=qwen3-32b", "cluster.policy=least_loaded", "cluster.tp=2"
    told = answer(*choice, "cluster.decode=2", "--json", str(figures), "--html", str(page))
    for report in (told, page.read_text()):
        assert re.search("cluster +1P[+]2D tp2 least_loaded, GPU h200, model qwen3-32b", report)
    cluster = {"prefill": 1, "decode": 2, "tp": 2, "policy": "least_loaded"}
    document = json.loads(figures.read_text())
    assert document["runs"][0]["cluster"] == cluster
    assert document["scenario"]["hardware"]["gpu"] == "h200"
    told = answer(*choice, "cluster.decode=1:2", "objectives.ttft_ms=90000", "--json", str(swept))
    assert "GPU h200, model qwen3-32b" in told
    found = json.loads(swept.read_text())
    assert found["cheapest"] in [run["cluster"] for run in found["runs"]]
    assert cluster in [run["cluster"] for run in found["runs"]]


def test_figures_have_the_scenario_that_made_them(tmp_path: Path) -> None:
    file, figures = tmp_path / "scenario.toml", tmp_path / "run.json"
    file.write_text("cluster.gateways = 3\n[settings.router]\nlocal_prefill_tokens = 7\n")
    answer(str(file), *SMALL, "settings.worker.max_num_seqs=9", "--json", str(figures))
    document = json.loads(figures.read_text())
    assert document["scenario"]["settings"] == {"router": {"local_prefill_tokens": 7}, "worker": {"max_num_seqs": 9}}
    assert (document["scenario"]["cluster"]["gateways"], document["scenario"]["workload"]["requests"]) == (3, 30)
    assert document["runs"][0]["figures"]["cluster"].endswith("model llama-3-8b, 3 gateways")


@pytest.mark.parametrize(
    ("usd", "told"),
    [
        (0.0664, "0.0664"),
        (0.0668, "0.0668"),
        (0.1, "0.100"),
        (0.00000312, "0.00000312"),
        (0.99999, "1.00"),
        (0.0, "0.00"),
        (12.3456, "12.35"),
        (1234.5, "1,234.50"),
        (math.inf, "inf"),
    ],
)
def test_usd_have_cents_and_three_digits(usd: float, told: str) -> None:
    assert usd_figure(usd) == told


def test_costs_below_a_cent_are_told_apart(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    told = answer(*SMALL, "cluster.colocated=1", "--json", str(file))
    usd = json.loads(file.read_text())["runs"][0]["figures"]["costs"]["usd"]
    assert usd < 0.1
    assert f"(USD {usd:.3g})" in told


def test_a_soaks_cluster_reports_its_description_and_cost() -> None:
    shapes = set()
    for seed in range(1, 9):
        told = " ".join(answer("--replay", str(seed)).split())
        shape, said = re.search(r"cluster: .* cluster (.*?) tp1 (.*?tokens) ", told).groups()  # type: ignore[union-attr]
        extras = r"(, latents|, windows [\d and]+( in all layers)?)?(, drafts)?"
        gateways = "(, 2 gateways)?"
        assert re.fullmatch(
            rf"[a-z_]+, GPU h100, model llama-3-8b{extras}{gateways}, [\d,]+ blocks of (4|16) tokens", said
        )
        assert not re.search(r"output 0\.000", told)
        for pool, number in re.findall(r"(colocated|decode|prefill) (\d) ", told):
            assert f"{number} colocated" == shape if pool == "colocated" else f"{number}{pool[0].upper()}" in shape
        shapes.add(shape)
    assert len(shapes) > 2


def test_times_in_figures_are_whole_microseconds(tmp_path: Path) -> None:
    """A fault at 0.3 was one at 0.2999999999999998."""
    file = tmp_path / "run.json"
    answer(*SMALL, "faults.schedule=['0.3 kill decode-0']", "--json", str(file))
    told = json.loads(file.read_text())["runs"][0]["figures"]
    assert [fault["at_s"] for fault in told["faults"]] == [0.3]
    report = told["report"]
    for seconds in (report["duration_s"], *(value for name in TIMES for value in report[name].values())):
        assert seconds == round(seconds, 6) > 0
    assert told["costs"]["usd"] != round(told["costs"]["usd"], 6), "no time"


TIMES = ("ttft_s", "tpot_s", "itl_s", "e2e_s")
