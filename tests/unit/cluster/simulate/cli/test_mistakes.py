"""What a user of `baton simulate` gets told of flags that ask for what there is not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cluster.cli.main import make_app
from protos.errors import Misconfigured
from tests.unit.cluster.simulate.asking import SMALL, call


def test_a_trace_with_fewer_requests_than_asked_for_is_told(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    line = '{"timestamp": %d, "input_length": 600, "output_length": 3, "hash_ids": [1, 2]}\n'
    file.write_text("".join(line % timestamp for timestamp in (0, 10, 20)))
    told = [
        CliRunner().invoke(make_app(["simulate"]), ["simulate", "--trace", str(file), "--requests", num]).stderr
        for num in ("5", "3")
    ]
    assert f"--requests 5: {file} has only 3\n" in told[0]
    assert "only" not in told[1]


def test_a_mistake_in_the_file_names_it(tmp_path: Path) -> None:
    file = tmp_path / "baton.toml"
    file.write_text("worker.tp = 0\n")
    result = CliRunner().invoke(make_app(["simulate"]), ["simulate", "--config", str(file)])
    assert isinstance(result.exception, Misconfigured)
    assert result.exception.message.startswith(f"--config {file}: worker.tp = 0: ")


@pytest.mark.parametrize("value", ["0", "-1"])
@pytest.mark.parametrize("flag", ["--ttft-ms", "--tpot-ms"])
def test_an_objective_is_above_0(flag: str, value: str) -> None:
    result = CliRunner().invoke(make_app(["simulate"]), ["simulate", flag, value])
    assert isinstance(result.exception, Misconfigured)
    assert result.exception.message == f"{flag} {value}: give milliseconds, above 0"


def refused(*arguments: str) -> str:
    error = call(*SMALL, *arguments).exception
    assert isinstance(error, Misconfigured)
    return error.message


def test_a_memory_fraction_that_rules_out_the_weights_is_named() -> None:
    """It was said of --tp alone, as if the model did not fit the GPU."""
    told = refused("--set", "worker.memory_fraction=0.1")
    assert told == (
        "worker.memory_fraction = 0.1: it leaves 8.0 GB of --tp 1, and the weights alone need 16.1 GB: "
        "give 0.21 or more, or use 4 GPUs or more (--tp 4)"
    )
    assert call(*SMALL, "--set", "worker.memory_fraction=0.21", "--input-len", "50").exit_code == 0
    large = "--model", "llama-3-70b", "--set", "worker.memory_fraction=0.5"
    assert refused(*large) == "--tp 1: the weights alone need 141 GB: use 4 GPUs or more (--tp 4)", (
        "at no fraction does it fit"
    )


def test_no_more_blocks_are_simulated_than_fit_beside_the_weights() -> None:
    """They were, silently: clusters came out better than they can be, and very many blocks took for ever."""
    told = refused("--set", "worker.num_blocks=100000000")
    assert told == (
        "worker.num_blocks = 100,000,000: they need 838,861 GB, and beside the weights is room for 6,668 blocks in 0.9 "
        "(worker.memory_fraction) of the memory of --tp 1: give at most 6,668, give more GPUs, or leave it out"
    )
    assert refused("--set", "worker.num_blocks=6669").startswith("worker.num_blocks = 6,669: they need 56 GB, ")
    assert call(*SMALL, "--set", "worker.num_blocks=6668").exit_code == 0
    assert call(*SMALL, "--set", "worker.num_blocks=6669", "--tp", "2").exit_code == 0
    assert "weights alone need 141 GB" in refused("--set", "worker.num_blocks=100", "--model", "llama-3-70b")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            (),
            "131,072 tokens that a worker holds (worker.max_model_len, of llama-3-8b): FIT choose a --model that was ",
        ),
        (
            ("--set", "worker.max_model_len=135000"),
            "135,000 tokens that a worker holds (worker.max_model_len): FIT raise worker.max_model_len",
        ),
        (("--set", "worker.max_model_len=900"), "900 tokens that a worker holds (worker.max_model_len): FIT raise wor"),
        (
            ("--set", "worker.num_blocks=10"),
            "640 tokens that a worker holds (worker.num_blocks): FIT raise worker.num_",
        ),
        (
            ("--model", "llama-3-70b", "--tp", "2"),
            " tokens that a worker holds (the memory of its GPUs): FIT give work",
        ),
    ],
)
def test_what_limits_the_length_of_sessions_is_named(arguments: tuple[str, ...], told: str) -> None:
    """More GPUs were advised whatever it was."""
    fit = "lower --input-len, --output-len or --trace-scale, or"
    assert told.replace("FIT", fit) in refused("--input-len", "140000", *arguments)


def test_sessions_that_are_left_out_are_told_with_their_length_and_the_limit() -> None:
    told = call(*SMALL, "--input-len", "50:400", "--set", "worker.max_model_len=300").stderr
    left_out = r"^\d+ sessions left out: longer \(up to 3\d\d tokens\) than the 300 that a worker holds"
    assert re.search(rf"{left_out} \(worker.max_model_len\)$", told, re.MULTILINE), "on one line, also off a terminal"


def test_a_policy_that_a_flag_replaces_is_no_mistake(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text("router.policy = 'dice'\n")
    told = refused("--config", str(file))
    assert told == (
        f"--config {file}: router.policy: there is no policy 'dice': choose one of round_robin, least_loaded, "
        "power_of_two, session_affinity, longest_prefix, prefix_aware, slo"
    )
    assert call(*SMALL, "--config", str(file), "--policy", "slo").exit_code == 0
