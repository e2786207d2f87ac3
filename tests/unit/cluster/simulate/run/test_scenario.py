"""Scenario files: the examples run, every key is described, and mistakes name their key."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import msgspec
import pytest

from cluster.config.declared import declared_settings, tables
from cluster.config.scenario import Scenario, read_scenario
from cluster.config.settings import paths_of
from cluster.simulate.cli.simulate import KEYS
from cluster.simulate.run.simulation_config import WITHOUT_EFFECT
from protos.errors import Misconfigured
from tests.unit.cluster.simulate.asking import SMALL, answer, call

EXAMPLES = Path(__file__).parents[5] / "demo" / "scenarios"


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.toml")), ids=lambda file: file.stem)
def test_an_example_runs(file: Path) -> None:
    result = call(str(file), "workload.requests=12")
    assert result.exit_code in (0, 1), result.exception  # 1: of so few requests too many are late
    assert "TTFT" in result.stdout


def test_the_description_has_every_key_with_its_default() -> None:
    described = tomllib.loads(KEYS.read_text(encoding="utf-8"))
    assert msgspec.convert(described, Scenario) == Scenario()
    commented = re.findall(r"^# (\w+) = ", KEYS.read_text(encoding="utf-8"), re.MULTILINE)
    keys = [path.rpartition(".")[2] for path, _ in paths_of(described)] + commented
    for table in (Scenario(), *(getattr(Scenario(), name) for name in Scenario.__struct_fields__)):
        names = getattr(table, "__struct_fields__", ())
        assert {name for name in names if not msgspec.inspect.is_struct(getattr(table, name))} - {*keys} <= {"settings"}
    assert read_scenario(Path(str(KEYS))) == Scenario()
    assert answer("--keys") == KEYS.read_text(encoding="utf-8")


def test_a_key_on_the_command_line_wins_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "scenario.toml"
    file.write_text("[workload]\nrate = 3\nrequests = 9\n[settings.worker]\nblock_size = 16\n")
    scenario = read_scenario(file, ["workload.rate=5", "settings.worker.max_num_seqs=7"])
    assert (scenario.workload.rate, scenario.workload.requests) == (5.0, 9)
    assert scenario.settings == {"worker": {"block_size": 16, "max_num_seqs": 7}}


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ("seed=-1", "seed"),
        ("clusters.tp=1", "clusters"),
        ("cluster=7", "cluster"),
        ("cluster.decodes=1", "cluster.decodes"),
        ("cluster.decode=99999999999", "cluster.decode"),
        ("cluster.tp=1:1000000000000", "cluster.tp"),
        ("cluster.decode=-1000000000000:1", "cluster.decode"),
        ("cluster.prefill=4:1", "cluster.prefill"),
        ("cluster.decode=0", "cluster.decode"),
        ("cluster.decode=some", "cluster.decode"),
        ("cluster.colocated=0", "cluster.colocated"),
        ("cluster.colocated=[]", "cluster.colocated"),
        ("cluster={colocated=1,decode=2}", "cluster.decode"),
        ("cluster={max_gpus=8,prefill=2}", "cluster.prefill"),
        ("cluster={max_gpus=1,tp=2}", "cluster.max_gpus"),
        ("cluster={prefill='1:999',decode='1:999'}", "cluster"),
        ("cluster.tp=3", "cluster.tp"),
        ("cluster.decode_tp=3", "cluster.decode_tp"),
        ("cluster.policy=dice", "cluster.policy"),
        ("cluster.policy=[]", "cluster.policy"),
        ("cluster.gateways=999999999", "cluster.gateways"),
        ("cluster.autoscale='8'", "autoscale"),
        ("hardware.gpu=h900", "hardware.gpu"),
        ("hardware.model=llama-9", "hardware.model"),
        ("hardware.model=llama-3-70b", "cluster.tp"),
        ("hardware.dtype=int3", "hardware.dtype"),
        ("hardware={gpu='a100',dtype='fp8'}", "hardware.gpu"),
        ("hardware.lane_gbps=0", "hardware.lane_gbps"),
        ("hardware.usd_per_gpu_hour=inf", "hardware.usd_per_gpu_hour"),
        ("hardware.acceptance=[2]", "hardware.acceptance[0]"),
        ("hardware.acceptance=[0.5]", "hardware.acceptance"),
        ("workload.name=''", "workload.name"),
        ("workload.requests=0", "workload.requests"),
        ("workload.requests=99999999999", "workload.requests"),
        ("workload.requests=1.5", "workload.requests"),
        ("workload.rate=often", "workload.rate"),
        ("workload.rate=inf", "workload.rate"),
        ("workload.rate=1e-9", "workload.rate"),
        ("workload.input_len='5:'", "workload.input_len"),
        ("workload.input_len=999999", "workload.input_len"),
        ("workload.trace=none", "workload.rate"),
        ("workload.trace_speed=2", "workload.trace_speed"),
        ("workload.name=assistant", "workload.input_len"),
        ("faults.schedule=['now']", "faults.schedule"),
        ("faults.schedule=['1 kill decode-9']", "faults.schedule"),
        ("faults.random=999999999", "faults.random"),
        ("objectives.ttft_ms=0", "objectives.ttft_ms"),
        ("objectives.ttft_ms=nan", "objectives.ttft_ms"),
        ("objectives.attainment=nan", "objectives.attainment"),
        ("objectives.targets=['ttft']", "objectives.targets"),
        ("cluster.decode=1:2", "objectives.targets"),
        ("config=none", "config"),
        ("settings.worker.tp=5000", "cluster.tp"),
        ("settings.worker.dtype=float32", "worker.dtype"),
        ("settings.worker.num_blocks=1", "workload.input_len"),
        ("settings.worker.num_blocks=6669", "worker.num_blocks"),
        ("settings.worker.host_kv_gib=-1", "worker.host_kv_gib"),
        ("settings.worker.host_kv_gib=1e300", "worker.host_kv_gib"),
        ("settings.worker.host_kv_gib=1e-6", "worker.host_kv_gib"),
        ("settings.worker.memory_fraction=0.1", "worker.memory_fraction"),
        ("settings.router.policy=dice", "router.policy"),
    ],
)
def test_a_mistake_names_its_key(change: str, param: str) -> None:
    result = call(*SMALL, change)
    assert isinstance(result.exception, Misconfigured)
    assert result.exception.param == param
    assert not result.stdout, "it has run"


def test_the_range_of_a_number_and_a_near_name_are_told() -> None:
    for change, words in (
        ("workload.requests=0", ("workload.requests = 0", "whole number >= 1")),
        ("workload.request=4", ("workload.request", "'requests'")),
        ("cluster.tp=3", ("1, 2, 4, 8, 16, 32",)),
        ("settings.worker.num_blocks=6669", ("6,668",)),
        ("settings.worker.memory_fraction=0.1", ("0.21",)),
    ):
        message = str(call(*SMALL, change).exception)
        assert all(word in message for word in words), message


def test_a_named_fix_is_valid() -> None:
    short = "workload.input_len=50"
    assert call(*SMALL, short, "settings.worker.memory_fraction=0.21").exit_code == 0
    assert call(*SMALL, "settings.worker.num_blocks=6668").exit_code == 0
    assert call(*SMALL, "settings.worker.num_blocks=6669", "cluster.tp=2").exit_code == 0


@pytest.mark.parametrize(
    ("changes", "limit"),
    [
        ((), "worker.max_model_len, of llama-3-8b"),
        (("settings.worker.max_model_len=135000",), "(worker.max_model_len)"),
        (("settings.worker.num_blocks=10",), "(worker.num_blocks)"),
        (("hardware.model=llama-3-70b", "cluster.tp=2"), "(memory: cluster.tp, "),
    ],
)
def test_the_limit_of_sessions_is_named(changes: tuple[str, ...], limit: str) -> None:
    assert limit in str(call(*SMALL, "workload.input_len=140000", *changes).exception)


def test_sessions_that_are_left_out_are_reported_with_the_limit() -> None:
    errors = call(*SMALL, "settings.worker.max_model_len=300").stderr
    assert re.search(r"^\d+ sessions left out: .*\(worker.max_model_len\)$", errors, re.MULTILINE), "on one line"


def test_a_trace_with_fewer_requests_than_asked_for_is_reported(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    line = '{"timestamp": %d, "input_length": 600, "output_length": 3, "hash_ids": [1, 2]}\n'
    file.write_text("".join(line % timestamp for timestamp in (0, 10, 20)))
    errors = [call(f"workload.trace={file}", f"workload.requests={num}").stderr for num in (5, 3)]
    assert "only 3" in errors[0]
    assert "only" not in errors[1]


def test_settings_without_effect_are_named_in_one_line() -> None:
    settings = "port=9", "worker.device=cpu", "worker.max_num_seqs=8", "lanes={stall_s=9,idle_timeout_s=9}"
    errors = call(*SMALL, *(f"settings.{name}" for name in settings)).stderr
    (line,) = [line for line in errors.splitlines() if "no effect" in line]
    assert all(name in line for name in ("port", "worker.device", "lanes.stall_s", "lanes.idle_timeout_s"))
    assert "max_num_seqs" not in line
    assert {*declared_settings(), *tables()} >= WITHOUT_EFFECT
