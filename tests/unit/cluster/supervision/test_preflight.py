"""A configuration that cannot work is refused before anything starts, with the value and the fix."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from cluster.cli.serve import DEMO
from cluster.config.settings import make_config
from cluster.gateway.run import max_model_len_of, warn_if_open
from cluster.supervision.preflight import check_feasible, check_files
from protos.errors import BatonError, Misconfigured

GIB = 2**30
HEADS = Path(DEMO["model"]).parent


def refused(tmp_path: Path, free_bytes: int = 8 * GIB, **settings: Any) -> str:
    """The refusal; "" when it may start. This machine has no GPU."""
    try:
        check_feasible(
            make_config({"model": DEMO["model"]} | settings), free_bytes=lambda: free_bytes, devices=tmp_path
        )
    except BatonError as error:
        return error.message
    return ""


def test_ranks_must_be_able_to_share_the_model(tmp_path: Path) -> None:
    told = refused(tmp_path, worker={"tp": 7})
    assert told.startswith("worker.tp is 7: it must divide the model's 8 heads")
    assert told.endswith("give one of 1, 2, 4, 8")
    assert refused(tmp_path, pools={"decode_tp": 3}).startswith("pools.decode_tp is 3: ")
    assert refused(tmp_path, worker={"tp": 2}, pools={"prefill_tp": 4}) == ""


def test_a_context_beyond_the_models_is_refused_early(tmp_path: Path) -> None:
    told = refused(tmp_path, worker={"max_model_len": 2049})
    assert told.startswith("worker.max_model_len is 2049: this model was made for 2048 at most")
    assert refused(tmp_path, worker={"max_model_len": 2048}) == ""


def test_gateways_allow_the_workers_length_with_rope_scaling(tmp_path: Path) -> None:
    fields = json.loads((Path(DEMO["model"]) / "config.json").read_text())
    fields["rope_scaling"] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert max_model_len_of(make_config({"model": str(tmp_path)})) == 8192
    assert max_model_len_of(make_config({"model": str(tmp_path), "worker": {"max_model_len": 4096}})) == 4096


def test_a_cluster_without_prefill_workers_gets_a_note(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert refused(tmp_path, pools={"prefill": 0, "decode": 3}) == ""
    assert "decode workers prefill their prompts themselves" in caplog.text
    assert "--workers 3" in caplog.text
    caplog.clear()
    assert refused(tmp_path, pools={"colocated": 3}) == refused(tmp_path) == ""
    assert not caplog.text


def test_weights_must_be_there_and_whole(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((Path(DEMO["model"]) / name).read_bytes())
    assert "holds neither model.safetensors" in refused(tmp_path, model=str(tmp_path))
    whole = (Path(DEMO["model"]) / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-1])
    assert "is truncated or damaged" in refused(tmp_path, model=str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(whole)
    assert refused(tmp_path, model=str(tmp_path)) == ""


def test_workers_must_fit_into_memory(tmp_path: Path) -> None:
    assert refused(tmp_path, pools={"decode": 2}) == ""
    told = refused(tmp_path, pools={"prefill": 1, "decode": 500})
    assert told.startswith("1 prefill + 500 decode workers take ")
    assert "8.0 GiB are free: ask for at most 3" in told
    assert "fewer or smaller workers" in refused(tmp_path, GIB // 8)
    assert "4.0 GiB are free" in refused(tmp_path, 4 * GIB, worker={"num_blocks": 10**6})


@pytest.mark.parametrize(
    ("speculate", "words"),
    [
        ("eagle:/nope", "worker.speculate is eagle:/nope: there is no /nope: give the folder of a"),
        ("model:/nope", "give the folder of a draft model"),
        (f"eagle:{HEADS / 'medusa'}", "has 0 layers: an EAGLE head has one"),
        (f"medusa:{HEADS}", "holds no *.safetensors: give the folder of a head's checkpoint"),
        ("mtp", "has no layers for multi-token prediction"),
        (f"model:{HEADS / 'eagle3'}", "eagle3: LlamaForCausalLMEagle3 is not served"),
    ],
)
def test_an_impossible_proposer_is_refused_early(tmp_path: Path, speculate: str, words: str) -> None:
    assert words in refused(tmp_path, worker={"speculate": speculate})


@pytest.mark.parametrize("speculate", [f"model:{DEMO['model']}", f"eagle:{HEADS / 'eagle3'}"])
def test_a_proposers_memory_is_counted(tmp_path: Path, speculate: str) -> None:
    """Its weights with each worker, its KV with each block."""
    assert refused(tmp_path, worker={"speculate": speculate}) == ""
    for sizes in ({"pools": {"decode": 500}}, {"worker": {"num_blocks": 10**6}}):
        worker = sizes.get("worker", {})
        plain = refused(tmp_path, GIB, **sizes)
        more = refused(tmp_path, GIB, **(sizes | {"worker": worker | {"speculate": speculate}}))
        assert gib_of(more) > gib_of(plain) > 1


def gib_of(message: str) -> float:
    match = re.search(r"take ([\d.]+) GiB", message)
    assert match is not None, message
    return float(match[1])


def test_memory_for_the_host_tier_must_be_there_for_every_worker(tmp_path: Path) -> None:
    assert refused(tmp_path, worker={"host_kv_gib": 2.0}) == ""
    told = refused(tmp_path, worker={"host_kv_gib": 5.0})
    assert told == ("worker.host_kv_gib is 5 for each of 2 workers, 8.0 GiB of memory are free: give at most 4.0")
    told = refused(tmp_path, int(9.96 * GIB), worker={"host_kv_gib": 6.0})
    assert told.endswith("9.9 GiB of memory are free: give at most 4.9"), "what is named would do"
    (tmp_path / "nvidia0").touch()  # a GPU's blocks are kept in the same memory
    assert refused(tmp_path, worker={"host_kv_gib": 100_000.0}).startswith("worker.host_kv_gib is 100000 ")


@pytest.mark.parametrize("device", ["nvidia0", "nvidiactl"])
def test_a_missing_gpu_is_not_awaited(tmp_path: Path, device: str) -> None:
    (tmp_path / device).touch()
    told = refused(tmp_path, worker={"device": "cuda"})
    assert told == (
        "" if device == "nvidia0" else "worker.device is cuda: this machine has no NVIDIA GPU; --device cpu needs none"
    )


def test_other_machines_are_for_their_own_ray_to_judge(tmp_path: Path) -> None:
    assert refused(tmp_path, pools={"decode": 500}, ray={"address": "head:6379"}) == ""


@pytest.mark.parametrize(
    ("host", "tenants", "is_said"),
    [("0.0.0.0", "", True), ("::", "", True), ("a.host", "", True), ("0.0.0.0", "tenants.toml", False)]
    + [(local, "", False) for local in ("127.0.0.1", "127.0.0.2", "::1", "localhost")],
)
def test_who_serves_other_machines_without_keys_is_told(
    host: str, tenants: str, is_said: bool, caplog: pytest.LogCaptureFixture
) -> None:
    warn_if_open(make_config({"model": DEMO["model"], "host": host, "router": {"tenants": tenants}}))
    assert ("no request needs a key" in caplog.text) == is_said


def test_prices_and_budgets_are_checked_before_anything_starts(tmp_path: Path) -> None:
    missing = tmp_path / "nope.toml"
    ledger = {"path": str(tmp_path / "l.db"), "prices": str(missing)}
    with pytest.raises(Misconfigured, match=r"set router\.ledger\.path, or router\.database, too"):
        make_config({"model": DEMO["model"], "router": {"ledger": {"prices": str(missing)}}})
    with pytest.raises(Misconfigured, match=r"nope\.toml"):
        check_files(make_config({"model": DEMO["model"], "router": {"ledger": ledger}}))
    tenants = tmp_path / "tenants.toml"
    tenants.write_text(
        f'admin_keys = ["sha256:{"cd" * 32}"]\n[tenants.a]\nkeys = ["sha256:{"ab" * 32}"]\nhard_budget_usd = 5\n'
    )
    with pytest.raises(Misconfigured, match="tenants have budgets, and there is no ledger with prices"):
        check_files(make_config({"model": DEMO["model"], "router": {"tenants": str(tenants)}}))
    missing.write_text("device_hour = 2\n")
    with pytest.raises(Misconfigured, match="tenants have budgets, and there is no ledger with prices"):
        check_files(make_config({"model": DEMO["model"], "router": {"tenants": str(tenants), "ledger": ledger}}))
    assert not (tmp_path / "l.db").exists()
