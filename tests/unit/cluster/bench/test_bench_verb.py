"""`baton bench` as a person runs it: against a gateway's real HTTP face, with only the tokens scripted."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from cluster.bench.measured_on import cpu_model
from cluster.cli.main import make_app
from protos.errors import BatonError, Misconfigured, NotFound, Overloaded, Unavailable
from protos.values import WorkerRole
from tests.unit.cluster.cli.test_status_verb import info
from tests.unit.router.scripted import Crew, Script, Scripted, Worker, make_gateway, saying, serving


def changes(**workload: object) -> list[str]:
    return [word for key, value in workload.items() for word in ("--set", f"workload.{key}={value}")]


SHORT = changes(input_len="8:16", output_len=4, requests=6)


async def bench(*flags: str, script: Script | None = None, argv: pytest.MonkeyPatch | None = None) -> Result:
    fleet = Crew(Worker(info=info("decode-0", WorkerRole.DECODE)))
    gateway = make_gateway(Scripted(script or saying("abcdefghijklmnop")), fleet=fleet)
    async with serving(gateway) as url:
        arguments = ["bench", "--url", url, *flags]
        if argv is not None:
            argv.setattr("sys.argv", ["/somewhere/baton", *arguments])
        runner = CliRunner(env={"COLUMNS": "100"})
        return await asyncio.to_thread(runner.invoke, make_app(arguments), arguments)


def rows(result: Result) -> list[list[str]]:
    return [line.split() for line in result.stdout.splitlines()]


async def test_a_closed_loop_ends_in_a_table() -> None:
    result = await bench(*SHORT, "--concurrency", "2", "--set", "objectives.ttft_ms=60000")
    assert result.exit_code == 0, result.output
    shown = rows(result)
    assert ["requests", "completed", "6", "of", "6"] in shown
    assert [row[0] for row in shown[-4:]] == ["TTFT", "TPOT", "ITL", "E2E"]
    assert any(row[:1] == ["goodput"] and row[-1] == "(100.0%)" for row in shown)


async def test_an_open_loop_and_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "figures.json"
    flags = [*SHORT, *changes(rate=1000), "--json", str(file), "--api-key", "s3cret"]
    result = await bench(*flags, argv=monkeypatch)
    assert result.exit_code == 0, result.output
    told: dict[str, Any] = json.loads(file.read_text())
    assert told["figures"]["num_completed"] == 6
    assert told["figures"]["num_output_tokens"] == 24
    assert told["figures"]["late_s"]["num"] == 6
    assert told["target"]["vocab_size"] == 512
    assert told["dialect"]["prompt"] is True
    assert told["target"]["model"] == {"name": "tiny", "max_model_len": 256, "default_sampling": {"temperature": 0.7}}
    assert told["workload"]["rate"] == 1000
    assert told["client"]["hardware"]["num_cores"] >= 1
    assert told["client"]["versions"].keys() >= {"python", "baton"}
    assert told["command"].startswith("baton bench --url http://")
    assert "s3cret" not in file.read_text()


async def test_runs_are_alike_without_sharing_cached_prompts() -> None:
    asked: list[tuple[int, ...]] = []

    def noted(job: Any) -> Any:
        asked.append(job.prompt_ids)
        return saying("abcdefgh")(job)

    for flags in ([], [], ["--prompt-seed", "7"], ["--prompt-seed", "7"]):
        assert (await bench(*SHORT, "--concurrency", "1", *flags, script=noted)).exit_code == 0
    first, two, three, four = (asked[i : i + 7][1:] for i in range(0, len(asked), 7))  # the first is the probe
    assert [len(prompt) for prompt in first] == [len(prompt) for prompt in two]
    assert not set(first) & set(two)
    assert three == four


async def test_a_trace_leaves_out_requests_that_do_not_fit(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lengths = [(400, [0]), (1000, [0, 1]), (4000, list(range(8)))]
    lines = [
        {"timestamp": 10 * i, "input_length": length, "output_length": 40, "hash_ids": ids}
        for i, (length, ids) in enumerate(lengths)
    ]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = await bench(*changes(trace=trace, trace_scale=0.1, trace_speed=10))
    assert result.exit_code == 0, result.output
    assert ["requests", "completed", "2", "of", "2"] in rows(result)
    assert "1 request left out: longer than the context of 256 tokens" in result.stderr


async def test_failures_are_counted_shown_and_told_by_the_exit_code() -> None:
    def busy_after_the_probe(job: Any) -> Any:
        return [Overloaded("too much at once")] if len(job.prompt_ids) != 16 else saying("ab")(job)

    result = await bench(*changes(input_len=8, output_len=2, requests=3), script=busy_after_the_probe)
    assert result.exit_code == 1, "not one answer"
    assert ["failed", "3", "overloaded"] in rows(result)
    assert "overloaded, the first time: HTTP 429: too much at once" in result.stderr


async def test_failures_beyond_the_allowed_share_fail_the_run() -> None:
    def every_third(job: Any) -> Any:
        if len(job.prompt_ids) == 16:  # the probe
            return saying("ab")(job)
        counts.append(1)
        return [Overloaded("too much at once")] if len(counts) % 3 == 0 else saying("ab")(job)

    few = changes(input_len=8, output_len=2, requests=6)
    for allowed, code in ((), 1), (("--allow-failed", "0.3"), 1), (("--allow-failed", "0.34"), 0):
        counts: list[int] = []
        result = await bench(*few, *allowed, script=every_third)
        assert result.exit_code == code, (allowed, result.output)
        assert ["failed", "2", "overloaded"] in rows(result)
        assert "2 of 6 requests failed or were refused" in result.stderr
        assert ("exit code 1" in result.stderr) == (code == 1)


async def test_a_scenario_of_the_simulator_is_a_load(tmp_path: Path) -> None:
    scenario, file = tmp_path / "scenario.toml", tmp_path / "figures.json"
    load = "rate = 1000\nrequests = 5\ninput_len = 8\noutput_len = 4"
    scenario.write_text(f"seed = 3\n[workload]\n{load}\n[objectives]\nttft_ms = 60000\n")
    result = await bench(str(scenario), "--json", str(file))
    assert result.exit_code == 0, result.output
    measured = json.loads(file.read_text())
    assert (measured["figures"]["num_completed"], measured["figures"]["good_share"]) == (5, 1.0)
    assert (measured["workload"]["seed"], measured["workload"]["concurrency"]) == (3, None)


@pytest.mark.parametrize(
    ("flags", "error", "param"),
    [
        (changes(requests=0), Misconfigured, "workload.requests"),
        (changes(rate=0), Misconfigured, "workload.rate"),
        (changes(name="agents"), Misconfigured, "workload.name"),
        (changes(trace="none", input_len=5), Misconfigured, "workload.input_len"),
        (changes(input_len=300), Misconfigured, "workload.input_len"),
        (["--set", "objectives.tpot_ms=0"], Misconfigured, "objectives.tpot_ms"),
        (["--model", "other"], NotFound, "model"),
        (["--json", "/nowhere/at/all.json", *SHORT], Misconfigured, "json"),
    ],
)
async def test_a_mistake_names_its_key(flags: list[str], error: type[BatonError], param: str) -> None:
    result = await bench(*flags)
    assert isinstance(result.exception, error)
    assert result.exception.param == param


def test_nobody_there(unused_tcp_port: int) -> None:
    arguments = ["bench", "--url", f"http://127.0.0.1:{unused_tcp_port}"]
    result = CliRunner().invoke(make_app(arguments), arguments)
    assert isinstance(result.exception, Unavailable)
    assert "baton up" in str(result.exception)


def test_the_processor_is_named(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text(
        "processor\t: 0\nmodel name\t: Some CPU @ 2.00GHz\n\nprocessor\t: 1\nmodel name\t: Some CPU @ 2.00GHz\n"
    )
    assert cpu_model(file) == "Some CPU @ 2.00GHz"
    assert cpu_model(tmp_path / "missing"), "the architecture at least"


@pytest.mark.parametrize("sigint", [signal.SIG_DFL, signal.SIG_IGN], ids=["terminal", "background job"])
async def test_sigterm_costs_nothing_that_was_measured(tmp_path: Path, sigint: signal.Handlers) -> None:
    file = tmp_path / "figures.json"
    never, reached = asyncio.Event(), asyncio.Event()

    def four_answers_and_the_probe(job: Any) -> Any:
        if len(generate.jobs) <= 5:
            return saying("abcdefghijklmnop")(job)
        reached.set()
        return [never]

    generate = Scripted(four_answers_and_the_probe)
    async with serving(make_gateway(generate)) as url:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", "from cluster.cli.main import main; main()", "bench", "--url", url, *SHORT,
            "--concurrency", "1", "--json", str(file), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            preexec_fn=lambda: signal.signal(signal.SIGINT, sigint),
        )  # fmt: skip
        await reached.wait()
        process.send_signal(signal.SIGTERM)
        stdout, stderr = await process.communicate()
    assert process.returncode == 143, stderr.decode()
    assert "stopped early: 4 of 6 requests had ended" in stderr.decode()
    assert ["requests", "completed", "4", "of", "4"] in [line.split() for line in stdout.decode().splitlines()]
    assert json.loads(file.read_text())["figures"]["num_completed"] == 4
