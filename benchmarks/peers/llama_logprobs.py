"""Log-probabilities of given tokens on llama.cpp. Imports nothing of Baton, because it runs in an environment of its
own, which has `xllamacpp`.

    python llama_logprobs.py < '{"model": GGUF, "sequences": [[PROMPT_IDS, ANSWER_IDS]], "num_threads": 1}'

The line of JSON has its version, and for each token of an answer its log-probability and the likeliest token.
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

NUM_LIKELIEST = 200  # a token beyond them counts as the last


def main(task: dict[str, Any]) -> None:
    llama: Any = importlib.import_module("xllamacpp")
    params = llama.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.verbosity = task["model"], 4096, 1, -1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = task["num_threads"]
    server = llama.Server(params)

    def scored(prefix: list[int], token: int) -> tuple[float, int]:
        """The prefix but its last token comes from the cache."""
        body = {"prompt": prefix, "n_predict": 1, "n_probs": NUM_LIKELIEST, "temperature": 0, "cache_prompt": True}
        (content,) = server.handle_completions(body)["choices"][0]["logprobs"]["content"]
        likeliest = {each["id"]: each["logprob"] for each in content["top_logprobs"]}
        return likeliest.get(token, min(likeliest.values())), content["id"]

    answers = [
        [scored(prompt + answer[:place], token) for place, token in enumerate(answer)]
        for prompt, answer in task["sequences"]
    ]
    print(json.dumps({"version": llama.__version__, "answers": answers}), flush=True)


if __name__ == "__main__":
    sys.path.pop(0)  # a file of this folder has the package's name
    main(json.load(sys.stdin))
