"""The `baton` command from the outside: help, exit codes, messages. Nothing here starts a process or a server."""

from __future__ import annotations

import builtins
import importlib
import inspect
import json
import os
import shlex
import socket
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from cluster import entry
from cluster.cli.main import VERBS, main, make_app
from cluster.cli.serve import DEMO
from cluster.config.cluster_config import ClusterConfig
from cluster.process.ports import example, listener
from router.auth.tenants import read_roster


def run(*arguments: str) -> str:
    result = CliRunner().invoke(make_app(arguments), arguments)
    assert result.exit_code == 0, result.output
    return result.output


def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The text on stderr when settings are wrong."""
    monkeypatch.setattr(sys, "argv", ["baton", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_help_names_every_verb() -> None:
    told = run("--help")
    assert all(verb in told for verb in VERBS)


@pytest.mark.parametrize("name", VERBS)
def test_every_verb_exists_and_describes_itself(name: str) -> None:
    verb = VERBS[name]
    assert inspect.getdoc(getattr(importlib.import_module(verb.module), verb.function))
    shown = run(name, "--help")
    assert "Usage" in shown
    assert "MISSING" not in shown, "a setting without a default"


@pytest.mark.parametrize("columns", [80, 140])
@pytest.mark.parametrize("name", VERBS)
def test_help_is_whole_in_a_narrow_and_in_a_wide_terminal(
    name: str, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERMINAL_WIDTH", str(columns))
    shown = run(name, "--help")
    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= columns


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("status --url http://127.0.0.1:9", 1),  # nothing answers there
        ("nonsense", 2),
        ("status --nonsense", 2),
        ("scale prefill=x", 2),
        ("why --capacity request", 2),
        ("--version", 0),
    ],
)
def test_exit_codes_are_1_for_failures_and_2_for_usage(words: str, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["baton", *words.split()])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == code


def test_the_settings_in_force_are_printed() -> None:
    assert "prefill_chunk = 64" in run("config", "--model", "m", "--set", "worker.prefill_chunk=64")
    assert "there is no folder or file m" in run("config", "--model", "m"), (
        "said beside them: it may be another machine's"
    )
    assert "there is no" not in run("config", "--model", DEMO["model"])


def test_a_wrong_setting_is_one_line_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(monkeypatch, capsys, "config", "--model", "m", "--set", "worker.tpp=2")
    assert said == "baton: there is no setting 'tpp' in [worker]: did you mean 'tp'?\n"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("simulate --soak 0", "--soak 0: give 1 or more"),
        ("plan --attainment 7", "--attainment 7: give a number from 0 to 1"),
        ("bench --prompt-seed x", "--prompt-seed x: give a whole number"),
        ("bench --allow-failed soon", "--allow-failed soon: give a number"),
        ("serve --device gpu", "--device gpu: 'gpu' is not one of 'auto', 'cpu', 'cuda'"),
    ],
)
def test_an_invalid_option_value_is_named_with_the_allowed_ones(
    words: str, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused(monkeypatch, capsys, *words.split()) == f"baton: {told}\n"


def test_a_flag_is_named_as_it_was_given(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    told = refused(monkeypatch, capsys, "serve", "--model", DEMO["model"], "--autoscale", "8:1")
    assert told.startswith("baton: --autoscale 8:1: give the least and the most workers of a pool, as 1:8")


def test_serving_needs_a_model_that_is_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert "no model is given" in refused(monkeypatch, capsys, "serve")
    (tmp_path / "model.safetensors").touch()
    gguf = tmp_path / "gguf" / "model.Q4_K_M.gguf"
    gguf.parent.mkdir()
    gguf.touch()
    told = {
        str(tmp_path / "none"): f"there is no folder or file {tmp_path}/none: give --model a checkpoint's folder",
        str(tmp_path): "has no config.json, so it is no checkpoint's folder: give the one that holds config.json",
        str(tmp_path / "model.safetensors"): "is a file: give --model the folder that it lies in",
        str(gguf): "model.Q4_K_M.gguf is empty: download it again",
        str(gguf.parent): "model.Q4_K_M.gguf is empty: download it again",
        "meta-llama/Llama-3.1-8B": "HF_HUB_OFFLINE is set",
    }
    for model, fix in told.items():
        assert fix in refused(monkeypatch, capsys, "serve", "--model", model)


def comm() -> str:
    return Path("/proc/self/comm").read_text().strip()


def test_an_unknown_listener_is_left_out(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert listener(port) == f"{comm()} (process {os.getpid()})"
        assert listener(port, tmp_path) == "", "no /proc"
        (tmp_path / "net").mkdir()
        for name in ("tcp", "tcp6"):
            (tmp_path / "net" / name).write_text(Path(f"/proc/net/{name}").read_text())
        assert listener(port, tmp_path) == "", "another user's"


def test_a_taken_port_is_named_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        http = refused(monkeypatch, capsys, "serve", "--model", DEMO["model"], "--port", str(port))
        grpc = refused(monkeypatch, capsys, "serve", "--model", DEMO["model"], "--port", "0", "--grpc-port", str(port))
    assert f"port {port} of 127.0.0.1 is taken by {comm()} (process {os.getpid()}): stop" in http
    assert "choose another: --port N (--port 0: any free one)" in http
    assert "choose another: --grpc-port N" in grpc
    with socket.create_server(("127.0.0.1", 0)) as taken, socket.create_server(("127.0.0.1", 0)) as other:
        ports = taken.getsockname()[1], other.getsockname()[1]
        flags = ("--port", str(ports[0]), "--grpc-port", str(ports[1]))
        both = refused(monkeypatch, capsys, "serve", "--model", DEMO["model"], *flags)
    assert [f"port {port} of 127.0.0.1 is taken" in both for port in ports] == [True, True]
    assert "--port N (--port 0: any free one); port" in both
    assert "ray" not in sys.modules or not sys.modules["ray"].is_initialized()


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("router.tenants={wrong}", "tenants: there is no setting 'tenant' at the top: did you mean 'tenants'?"),
        ("router.tenants={wrong}.not", "No such file or directory: correct the path; `baton key` prints its lines"),
        ("router.tenants=.", "tenants: .: . is no plain file"),
        ("tls.cert={wrong}", "tls: key is missing"),
        ("peers.ca={wrong}", "cert is missing"),
        ("tls={{cert='{wrong}.not', key='{wrong}'}}", "toml.not: No such file or directory: correct the path"),
    ],
)
def test_files_that_are_wrong_are_named_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, setting: str, told: str
) -> None:
    monkeypatch.setattr("cluster.gateway.run.listen_for_gateway", lambda *ports: pytest.fail("it starts"))
    (tmp_path / "wrong.toml").write_text("tenant = 3")
    value = setting.format(wrong=tmp_path / "wrong.toml")
    assert told in refused(monkeypatch, capsys, "up", "--set", value)


def test_up_serves_the_demo_model_unless_another_is_given(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    told = refused(monkeypatch, capsys, "up", "--set", "model=/nope")
    fix = "without --model `baton up` serves the demo model: use `baton up --model /nope`"
    assert told == f"baton: --set model=/nope: {fix}\n"
    told = refused(monkeypatch, capsys, "up", "--set", "models.a.model=/nope")
    assert "use `baton up --model NAME=PATH`, or `baton serve`" in told
    file = tmp_path / "baton.toml"
    served: list[str] = []
    monkeypatch.setattr(
        "cluster.cli.serve._serve", lambda given, configs, log_format: served.append(configs[0].worker.model)
    )

    def said(text: str) -> str:
        file.write_text(text)
        monkeypatch.setattr(sys, "argv", ["baton", "up", "--config", str(file)])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 0
        return " ".join(capsys.readouterr().err.split())

    told = said('model = "/nope"\nserved_name = "big"\nport = 0\n')
    assert f"--config {file}: no effect here: model, served_name: `baton up` serves the demo model" in told
    assert f"`baton serve --config {file}` serves the file's" in told
    assert "no effect here: models: `baton up` serves the demo" in said('[models.a]\nmodel = "/nope"\n')
    assert "no effect" not in said(run("config")), "the demo's own file"
    assert served == [DEMO["model"]] * 3


@pytest.mark.parametrize(
    ("given", "names"),
    [
        (["--model", "/some/Qwen"], ["Qwen"]),
        (["/some/Qwen"], ["Qwen"]),
        (["--model", "a=/some/Qwen"], ["a"]),
        (["--model", "a=/some/Qwen", "--model", "b=/some/Qwen"], ["a", "b"]),
    ],
)
def test_up_serves_the_models_that_it_is_given(
    monkeypatch: pytest.MonkeyPatch, given: list[str], names: list[str]
) -> None:
    served: list[tuple[str, str, str]] = []

    def serve(given: object, configs: Sequence[ClusterConfig], log_format: object) -> None:
        served.extend((config.worker.model, config.router.model_name, config.worker.quantize) for config in configs)

    monkeypatch.setattr("cluster.cli.serve._serve", serve)
    monkeypatch.setattr(sys, "argv", ["baton", "up", *given, "--quantize", "int8"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    assert served == [("/some/Qwen", name, "int8") for name in names]


def test_a_model_must_be_called_something(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for verb in (("up",), ("serve", "--model", DEMO["model"])):
        assert "served_name = ''" in refused(monkeypatch, capsys, *verb, "--served-name", "")


def test_a_gateway_needs_a_way_to_find_workers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    said = refused(monkeypatch, capsys, "gateway", "--model", str(tmp_path), "--port", "0", "--grpc-port", "0")
    assert "give --worker HOST:PORT or --discovery URL" in said


def test_pools_need_somebody_to_find_them(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--discovery" in refused(monkeypatch, capsys, "pools", "--model", "m")


def test_a_worker_that_cannot_listen_fails_before_reading_weights(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("cluster.cli.worker_verb.LocalRank.start", lambda rank, orders: pytest.fail("it starts"))
    said = refused(monkeypatch, capsys, "worker", "--model", DEMO["model"], "--host", "192.0.2.1")
    assert "cannot listen on 192.0.2.1:0: Cannot assign requested address;" in said


def test_one_process_is_one_rank(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(monkeypatch, capsys, "worker", "--model", "m", "--set", "worker.tp=2")
    assert "one process is one rank" in said


def test_the_example_request_has_room_for_key_and_authority() -> None:
    assert example("http://h:1", "m", has_chat=False).startswith("curl http://h:1/v1/completions -H 'content-type")
    told = example("https://h:1", "m", has_chat=True, asks_for_keys=True)
    assert told.startswith("curl --cacert CA.pem https://h:1/v1/chat/completions -H 'authorization: Bearer YOUR_KEY' ")


def test_shells_pass_an_ipv6_address_and_an_apostrophe_on() -> None:
    shown = example("http://[::1]:8000", "it's", has_chat=False)
    assert "'http://[::1]:8000/v1/completions'" in shown, "zsh takes bare brackets for a pattern"
    assert json.loads(shlex.split(shown)[-1])["model"] == "it's"


def test_a_key_goes_to_stdout_and_its_hash_to_stderr(tmp_path: Path) -> None:
    made = [CliRunner().invoke(make_app(["key"]), ["key", whose]) for whose in ("--admin", "acme.eu")]
    (tmp_path / "tenants.toml").write_text("".join(done.stderr for done in made))
    roster = read_roster(tmp_path / "tenants.toml")
    admin, own = (done.stdout.removesuffix("\n") for done in made)
    assert roster.is_admin(admin)
    assert not roster.is_admin(own)
    tenant = roster.tenant_of(own)
    assert tenant is not None
    assert tenant.name == "acme.eu"


def test_ctrl_c_while_the_command_is_imported_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    imported = builtins.__import__

    def interrupted(name: str, *args: Any) -> Any:
        if name == "cluster.cli.main":
            raise KeyboardInterrupt
        return imported(name, *args)

    monkeypatch.setattr(builtins, "__import__", interrupted)
    with pytest.raises(SystemExit) as ended:
        entry.main()
    assert ended.value.code == 130


def test_every_client_command_reads_its_url_from_one_variable() -> None:
    asking: list[str] = []
    for name in VERBS:
        commands: Any = typer.main.get_command(make_app([name]))
        for option in commands.commands[name].params:
            if option.name == "url":
                asking.append(name)
                assert option.envvar == "BATON_URL", name
    assert {"status", "scale", "drain", "chat", "bench", "doctor", "batch"} <= set(asking)


def test_the_settings_of_a_model_by_name_are_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["baton", "config", "--model", "acme/tiny"])
    with pytest.raises(SystemExit) as ended:
        main()
    printed = capsys.readouterr()
    assert (ended.value.code, printed.err) == (0, "")
    assert tomllib.loads(printed.out)["model"] == "acme/tiny"
