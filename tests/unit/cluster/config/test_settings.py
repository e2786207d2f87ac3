"""Errors in a settings file or flags name the value and the fix."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.cli.options import GivenSettings, pools
from cluster.config.cluster_config import ClusterConfig
from cluster.config.settings import make_config, merge, read_file, setting, to_toml
from cluster.config.settings_page import page
from protos.errors import BadCheckpoint, Misconfigured
from protos.values import WorkerRole


def config_of(**tables: Any) -> ClusterConfig:
    return make_config({"model": "models/tiny"} | tables)


def settings(file: Path, flags: dict[str, Any], further: list[str]) -> ClusterConfig:
    return GivenSettings(file=file, further=further, flags=flags).config()


def test_a_model_is_all_it_takes() -> None:
    config = config_of()
    assert config.pools.counts() == {WorkerRole.PREFILL: 1, WorkerRole.DECODE: 1}
    assert (config.router.host, config.router.port, config.router.grpc_port) == ("127.0.0.1", 8000, 8001)
    assert config.worker.model == "models/tiny"


def test_any_free_port_is_any_two() -> None:
    assert config_of(port=0).router.grpc_port == 0
    assert config_of(port=0, grpc_port=9001).router.grpc_port == 9001


@pytest.mark.parametrize(("port", "grpc_port"), [(9000, 9001), (8001, 8002), (65535, 0)])
def test_grpc_follows_the_port(port: int, grpc_port: int) -> None:
    assert config_of(port=port).router.grpc_port == grpc_port


def test_workers_get_the_settings_of_lanes() -> None:
    config = config_of(lanes={"transport": "collective", "stall_s": 8})
    assert (config.worker.lanes.transport, config.worker.lanes.stall_s) == ("collective", 8.0)


def test_gateway_and_workers_call_the_model_alike(tmp_path: Path) -> None:
    folder = tmp_path / "llama"
    assert make_config({"model": f"{folder}/"}).router.model_name == "llama"
    named = make_config({"model": str(folder), "served_name": "l3"})
    assert (named.router.model_name, named.worker.served_name) == ("l3", "l3")


def test_no_model_is_refused() -> None:
    with pytest.raises(Misconfigured, match="no model is given"):
        make_config({})


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ({"served_name": ""}, "served_name = '': give"),
        ({"port": 99999}, "^port = 99999: give a number"),
        ({"worker": {"tpp": 2}}, r"no setting 'tpp' in \[worker\]: did you mean 'tp'\?"),
        ({"workers": {}}, r"no setting 'workers' at the top: did you mean 'worker'\?"),
        ({"prefill_chunk": 5}, r"no setting 'prefill_chunk' at the top: it belongs into \[worker\]"),
        ({"router": {"port": 1}}, r"no setting 'port' in \[router\]: it belongs to the top"),
        ({"worker": {"zzz": 2}}, r"no setting 'zzz' in \[worker\]: there are .*block_size, "),
        ({"worker": {"tp": "two"}}, "worker.tp = 'two': give a whole number"),
        ({"worker": {"tp": True}}, "worker.tp = True: give a whole number"),
        ({"supervision": {"grace_s": 10**400}}, "supervision.grace_s = a number beyond all ranges: give a number"),
        ({"worker": {"tp": 0}}, "^worker.tp = 0: give 1 or more"),
        ({"worker": {"max_num_seqs": 9999}}, "^worker.max_num_seqs = 9999: "),
        ({"router": {"admission": {"max_queued": -1}}}, "^router.admission.max_queued = -1: give a number from 0"),
        ({"lanes": {"transport": "smh"}}, r"lanes.transport = 'smh': did you mean 'shm'\?"),
        ({"lanes": {"stall_s": 0.1}}, "^lanes.stall_s = 0.1: give at least 1"),
        ({"worker": {"device": "cdua"}}, r"worker.device = 'cdua': did you mean 'cuda'\?"),
        ({"worker": {"device": "nvidia"}}, "worker.device = 'nvidia': choose one of auto, cpu, cuda"),
        ({"worker": 3}, r"worker = 3: it is a table, write \[worker\]"),
        ({"port": 70000}, "port = 70000: give a number from 0 to 65535"),
        ({"port": 8001, "grpc_port": 8001}, "port and grpc_port are both 8001"),
        ({"pools": {"prefill": -1}}, "^pools.prefill = -1: give a number from 0 to"),
        ({"pools": {"prefill_tp": 0}}, "^pools.prefill_tp = 0: give 1 or more"),
        ({"router": {"text": {"tool_parser": "x"}}}, "^router.text.tool_parser = 'x': choose one of"),
        ({"pools": {"decode": 0}}, "^pools.decode = 0: give at least 1"),
        (
            {"pools": {"colocated": 2, "decode": 1}},
            "^pools: 2 colocated workers .* give either the former or the latter",
        ),
        ({"index": "rodis://localhost"}, "'rodis' is not a Redis URL"),
        ({"index": "disk"}, "'disk' is no index: use memory"),
        ({"discovery": "localhost:6379"}, "give redis://host:port"),
        (
            {"supervision": {"initial_backoff_s": 31}},
            "^supervision.initial_backoff_s = 31.0: give a number from 0 to 30",
        ),
    ],
)
def test_mistakes_are_named(tables: dict[str, Any], said: str) -> None:
    with pytest.raises(Misconfigured, match=said):
        config_of(**tables)


def test_a_whole_number_is_a_number() -> None:
    assert config_of(supervision={"grace_s": 5}).supervision.grace_s == 5.0


def test_flags_override_the_file(tmp_path: Path) -> None:
    file = tmp_path / "baton.toml"
    file.write_text('model = "a"\nport = 1\n[worker]\ntp = 2\nblock_size = 32\n')
    config = settings(file, {"model": "b", "worker": {"tp": 4}}, ["worker.prefill_chunk=128"])
    assert (config.worker.model, config.router.port) == ("b", 1)
    assert (config.worker.tp, config.worker.block_size, config.worker.prefill_chunk) == (4, 32, 128)


@pytest.mark.parametrize("table", ["worker", "lanes", "tls", "pools"])
def test_flags_do_not_hide_a_value_where_a_table_belongs(tmp_path: Path, table: str) -> None:
    file = tmp_path / "baton.toml"
    file.write_text(f"{table} = 3\n")
    with pytest.raises(Misconfigured, match=f"{table} = 3: it is a table"):
        settings(file, {"model": "b", table: {"anything": None}}, [])


@pytest.mark.parametrize(
    "line", ["worker.tp = 0", "worker.tp = 'two'", "worker.tpp = 2", "worker = 3", "tls.cert = 'c'", "index = 'disk'"]
)
def test_a_mistake_in_the_file_names_it(tmp_path: Path, line: str) -> None:
    file = tmp_path / "baton.toml"
    file.write_text(line)
    with pytest.raises(Misconfigured, match=rf"^--config .*baton\.toml: .*{re.split('[. ]', line)[0]}"):
        settings(file, {"model": "m"}, [])


def test_a_mistake_above_the_file_does_not_name_it(tmp_path: Path) -> None:
    file = tmp_path / "baton.toml"
    file.write_text("[worker]\ntp = 2\n")
    for flags, further in (({"worker": {"tp": 0}}, []), ({}, ["worker.tp=0"])):
        with pytest.raises(Misconfigured, match=r"^worker\.tp = 0: "):
            settings(file, {"model": "m", **flags}, further)


@pytest.mark.parametrize(
    ("lines", "over", "told"),
    [
        ("worker = 3", "worker.tp=2", "{file}: worker = 3: it is a table"),
        ("worker.max_num_batched_tokens = 8", "worker.tp=2", "{file}: worker.max_num_seqs = "),
        ("tls.cert = 'c'", "worker.tp=2", "{file}: tls: key is missing"),
        ("port = 80\ngrpc_port = 80", "worker.tp=2", "{file}: port and grpc_port are both 80"),
        ("worker.tp = 0", "worker.tp=-1", "worker.tp = -1: "),
        (
            "router.policy = 'slow'",
            "worker.tp=2",
            "{file}: router.policy: there is no policy 'slow': did you mean slo?",
        ),
        ("router.shadow_policy = 'slo,x'", "worker.tp=2", "{file}: router.shadow_policy: there is no policy 'x': "),
        ("worker.tp = 2", "router.policy=x", "router.policy: there is no policy 'x': choose one of "),
        ("worker.block_size = 32", "worker.max_num_batched_tokens=8", "worker.max_num_seqs = "),
        ("grpc_port = 81", "port=81", "{file} with the flags above it: port and grpc_port are both 81"),
        (
            "worker.max_num_seqs = 300",
            "worker.max_num_batched_tokens=100",
            "{file} with the flags above it: worker.max_num_seqs = 300: ",
        ),
        ("port = 7", "grpc_port=7", "{file} with the flags above it: port and grpc_port are both 7"),
    ],
)
def test_errors_name_the_source_of_the_setting(tmp_path: Path, lines: str, over: str, told: str) -> None:
    """The file, the flags above it, which are not named, or both."""
    file = tmp_path / "baton.toml"
    file.write_text(lines)
    with pytest.raises(Misconfigured) as refused:
        settings(file, {"model": "m"}, [over])
    assert refused.value.message.startswith(told.format(file=f"--config {file}"))


def test_a_model_that_nobody_gives_is_not_the_file_s_mistake(tmp_path: Path) -> None:
    file = tmp_path / "baton.toml"
    file.write_text("worker.tp = 2")
    with pytest.raises(Misconfigured, match=r"^no model is given"):
        settings(file, {}, [])


def test_pools_of_the_command_line_replace_those_of_the_file() -> None:
    file = {"model": "m", "pools": {"prefill": 4, "decode": 4}}
    colocated = make_config(merge(file, {"pools": pools({}, colocated=True, workers=3)}))
    assert colocated.pools.counts() == {WorkerRole.COLOCATED: 3}
    apart = make_config(
        merge(
            {"model": "m", "pools": {"colocated": 2}}, {"pools": pools({"prefill": 2}, colocated=False, workers=None)}
        )
    )
    assert apart.pools.counts() == {WorkerRole.PREFILL: 2, WorkerRole.DECODE: 1}


@pytest.mark.parametrize(
    ("text", "value"),
    [("worker.tp=2", 2), ("worker.tp=x y", "x y"), ("worker.tp=0.5", 0.5), ("worker.tp=true", True)],
)
def test_a_setting_is_read_as_in_toml_or_as_a_word(text: str, value: object) -> None:
    assert setting(text) == {"worker": {"tp": value}}


def test_a_number_of_more_digits_than_python_reads_is_no_number(tmp_path: Path) -> None:
    with pytest.raises(Misconfigured, match=r"^worker.prefill_chunk = '1{70,}\.\.\.: give a whole number"):
        make_config(setting(f"worker.prefill_chunk={'1' * 4301}") | {"model": str(tmp_path)})


@pytest.mark.parametrize("text", ["worker.tp", "=3"])
def test_a_setting_without_name_or_value_is_refused(text: str) -> None:
    with pytest.raises(Misconfigured, match="NAME=VALUE"):
        setting(text)


def test_a_broken_file_is_named_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "baton.toml"
    file.write_text("model = 'x'\nport = = 3\n")
    with pytest.raises(Misconfigured, match=r"baton.toml is not TOML: .*line 2"):
        read_file(file)
    with pytest.raises(Misconfigured, match="No such file"):
        read_file(tmp_path / "absent.toml")


def test_printed_settings_are_read_back_equal(tmp_path: Path) -> None:
    config = config_of(
        served_name='a "b" \\ c\n\x7f\u00e9',
        worker={"tp": 2, "num_blocks": 7},
        pools={"prefill": 3},
        router={"dispatch": {"successor_timeout_s": 1}},
    )
    file = tmp_path / "baton.toml"
    file.write_text(to_toml(config))
    again = make_config(read_file(file))
    assert replace(again, pools=config.pools) == config
    assert again.pools.counts() == config.pools.counts()


def test_a_missing_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match="there is no folder"):
        config_of(model=str(tmp_path / "absent")).check_model()
    with pytest.raises(BadCheckpoint, match="has no config"):
        config_of(model=str(tmp_path)).check_model()


def test_the_page_of_settings_is_current() -> None:
    shown = (Path(__file__).resolve().parents[4] / "docs" / "settings.md").read_text()
    assert shown == page(), "run: python -m cluster.config.settings_page > docs/settings.md"
