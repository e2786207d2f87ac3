"""Answers prompts one after the other on llama.cpp, with its prompt lookup decoding or without. Imports nothing of
Baton, because it runs in an environment of its own, which has `llama-cpp-python`.

    python llama_lookup.py < '{"model": GGUF, "prompts": [[1, 2]], "answer_len": 64, "max_drafts": 8, "num_threads": 1}'

One line that it prints is JSON: its version, the seconds of all answers and those of the cores, and the answers.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from itertools import islice
from typing import Any


def main(given: dict[str, Any]) -> None:
    llama: Any = importlib.import_module("llama_cpp")
    draft_model = None
    if given["max_drafts"]:
        lookup: Any = importlib.import_module("llama_cpp.llama_speculative")
        draft_model = lookup.LlamaPromptLookupDecoding(max_ngram_size=3, num_pred_tokens=given["max_drafts"])
    engine = llama.Llama(
        given["model"],
        n_ctx=max(map(len, given["prompts"])) + given["answer_len"] + 32,
        n_threads=given["num_threads"],
        n_threads_batch=given["num_threads"],
        draft_model=draft_model,
        logits_all=draft_model is not None,  # it reads the logits of drafted positions
        verbose=False,
    )

    def answer(prompt: list[int]) -> list[int]:
        engine.reset()
        return [int(token) for token in islice(engine.generate(prompt, temp=0.0), given["answer_len"])]

    answer(given["prompts"][0])
    start, cpu_start = time.perf_counter(), time.process_time()
    answers = [answer(prompt) for prompt in given["prompts"]]
    seconds, cpu_s = time.perf_counter() - start, time.process_time() - cpu_start
    print(
        json.dumps({"version": llama.__version__, "seconds": seconds, "cpu_s": cpu_s, "answers": answers}), flush=True
    )


if __name__ == "__main__":
    sys.path.pop(0)  # a file of this folder has the package's name
    main(json.load(sys.stdin))
