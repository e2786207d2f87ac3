"""Several models of one deployment: flags and tables become one configuration each."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from cluster.config.several_models import fleet_of, make_configs, models_given
from cluster.gateway.run import addresses_by_model
from cluster.ray.machine_part import MachinePart, parts
from cluster.supervision.preflight import check_adapter_names
from protos.errors import Misconfigured

TWO: dict[str, Any] = {
    "port": 9000,
    "worker": {"tp": 2},
    "router": {"text": {"pooling": "mean"}, "tenants": "tenants.toml"},
    "models": {
        "big": {"model": "/m/big", "pools": {"decode": 3}},
        "org/Small": {"model": "/m/small", "worker": {"tp": 1}, "router": {"model_aliases": "gpt-*"}},
    },
}


def test_a_table_is_over_the_settings_at_the_top() -> None:
    big, small = make_configs(TWO)
    assert (big.router.model_name, small.router.model_name) == ("big", "org/Small")
    assert (big.fleet, small.fleet) == ("big", "org-small")
    assert (big.worker.model, small.worker.model) == ("/m/big", "/m/small")
    assert (big.worker.tp, small.worker.tp) == (2, 1)
    assert (big.pools.decode, small.pools.decode) == (3, None)
    assert (big.router.port, small.router.port) == (9000, 9000)
    assert {config.router.text.pooling for config in (big, small)} == {"mean"}
    assert {config.router.tenants for config in (big, small)} == {"tenants.toml"}
    assert (big.router.model_aliases, small.router.model_aliases) == ("", "gpt-*")


def test_flags_name_models(tmp_path: Path) -> None:
    assert models_given(["/m/big"]) == {"model": "/m/big"}
    assert models_given(["big=/m/big"]) == {"model": "/m/big", "served_name": "big"}
    both = models_given(["big=/m/big", "b/c=/m/c"])
    assert both == {"models": {"big": {"model": "/m/big"}, "b/c": {"model": "/m/c"}}}
    odd = tmp_path / "a=b"
    odd.mkdir()
    assert models_given([str(odd)]) == {"model": str(odd)}, "a folder of this name is there"
    with pytest.raises(Misconfigured, match="write --model NAME=/m/c"):
        models_given(["big=/m/big", "/m/c"])
    with pytest.raises(
        Misconfigured, match=r"'\w+' is the name of --model \w+=\S+, too: give each model a name of its own"
    ):
        models_given(["big=/m/big", "big=/m/c"])


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"model": "/m"}, "model = '/m' beside [models.big]: write it into its model's table"),
        ({"models": {}}, "models: write a table [models.NAME] for each model"),
        ({"models": {"big": "/m/big"}}, "models: write a table [models.NAME] for each model"),
        ({"models": {"big": {"fleet": "x"}}}, "[models.big] has no model: write its path there"),
        ({"models": {"big": {"model": "/m", "port": 1}}}, "[models.big] has port: a model has settings of its own in"),
        ({"models": {"big": {"model": "/m", "router": {"tenants": "t"}}}}, "[models.big] has router.tenants"),
        ({"models": {"big": {"model": "/m", "worker": {"tpp": 1}}}}, "[models.big]: there is no setting 'tpp'"),
        (
            {"models": {"a b": {"model": "/m"}, "a-b": {"model": "/n"}}},
            "two models have the fleet 'a-b': give each its own",
        ),
        ({"models": {"big": {"model": "/m", "fleet": "Big"}}}, "[models.big]: fleet = 'Big': give at most 40 of"),
    ],
)
def test_contradictions_are_named(change: dict[str, Any], told: str) -> None:
    with pytest.raises(Misconfigured) as refused:
        make_configs(TWO | change)
    assert told in refused.value.message


def test_workers_of_several_models_are_given_by_name() -> None:
    configs = make_configs(TWO)
    addresses = ["big=h:1", "org/Small=h:2", "big=h:3"]
    assert addresses_by_model(configs, addresses) == [("h:1", "h:3"), ("h:2",)]
    assert addresses_by_model(configs[:1], ["h:1"]) == [("h:1",)]
    with pytest.raises(Misconfigured, match="write NAME=HOST:PORT; the models are big, org/Small"):
        addresses_by_model(configs, ["h:1"])


def test_no_two_fleets_get_the_same_gpu() -> None:
    configs = make_configs(TWO)  # 2 * (1 + 3) and 1 + 1 ranks
    assert parts(configs, 20, [str(gpu) for gpu in range(12)]) == (
        MachinePart(num_cpus=16, gpus=(*"01234567", "10", "11")),
        MachinePart(num_cpus=4, gpus=("8", "9")),
    )
    assert parts(configs, 2, []) == (MachinePart(num_cpus=1), MachinePart(num_cpus=1))


@pytest.mark.parametrize("name", ["org/Llama-3.1:8b", "--", "Ünicode", "x" * 80])
def test_every_name_has_a_fleet(name: str) -> None:
    [config] = make_configs({"models": {name: {"model": "/m"}}})
    assert config.fleet == fleet_of(name) != ""


@pytest.mark.parametrize(
    ("big", "small", "told"),
    [
        ("x=/a, b=/b", "c=/c", ""),
        ("small=/a", "", "'small' is the name of the model small: give the adapter another one"),
        ("big=/a", "", "'big' is the name of the model big"),
        ("", "gpt=/a", "'gpt' is an alias of the model big"),
        ("sql=/a", "sql=/a", "the models big and small both have an adapter 'sql'"),
    ],
)
def test_adapters_have_names_that_no_model_of_the_gateway_has(big: str, small: str, told: str) -> None:
    configs = make_configs(
        {
            "models": {
                "big": {"model": "/m/big", "worker": {"adapters": big}, "router": {"model_aliases": "gpt, *-x"}},
                "small": {"model": "/m/small", "worker": {"adapters": small}},
            }
        }
    )
    with pytest.raises(Misconfigured, match=told) if told else nullcontext():
        check_adapter_names(configs)
