"""Runs Baton's CPU workloads on llama.cpp. Imports nothing of Baton, because it runs in another environment, which has
`llama-cpp-python`, `gguf` and numpy.

    python llama_cpp.py MODEL '[{"num_requests": 8, "input_len": 128, "output_len": 32}]' THREADS TYPE
    python llama_cpp.py convert MODEL_FOLDER FILE TYPE
    python llama_cpp.py quantise FILE FILE Q4_K_M

MODEL is a GGUF file, or the folder of a Llama without a tokenizer, which is converted first. TYPE is q8_0 (weights of
8 bits, llama.cpp's fast path) or bf16 (as the other engines compute). Sequences are batched as its server does it: one
token for each that answers, filled up with prompts to 2,048 tokens a step. Prints lines of JSON, as vllm_cpu.py does.

Its buffers for AMX are left out where BATON_LLAMA_CPP_PLAIN is set: built with gcc 12, version 0.3.36 crashes in them.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

BATCH = 2048


def main(folder: str, workloads: list[dict[str, int]], num_threads: int, kind: str) -> None:
    llama: Any = importlib.import_module("llama_cpp")
    silent = llama.llama_log_callback(lambda *_: None)
    llama.llama_log_set(silent, None)
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(folder)
        if path.is_dir():
            path = Path(scratch) / "model.gguf"
            convert(Path(folder), path, kind)
        params = llama.llama_model_default_params()
        params.use_extra_bufts = "BATON_LLAMA_CPP_PLAIN" not in os.environ
        model = llama.llama_model_load_from_file(str(path).encode(), params)
        num_vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
        print(json.dumps({"version": f"{llama.__version__} {kind}"}), flush=True)
        for _ in sys.stdin:
            runs = [LlamaRun(llama, model, num_vocab, work, num_threads)() for work in workloads]
            print(json.dumps({"runs": runs}), flush=True)


def convert(folder: Path, path: Path, kind: str) -> None:
    """As llama.cpp's convert_hf_to_gguf.py does it, for a Llama whose vocabulary has no words."""
    gguf: Any = importlib.import_module("gguf")
    numpy: Any = importlib.import_module("numpy")
    config = json.loads((folder / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    types = gguf.GGMLQuantizationType
    for name, numbers in tensors(folder / "model.safetensors", numpy):
        if name.endswith(
            ("q_proj.weight", "k_proj.weight")
        ):  # its rope turns neighbours, the checkpoint's turns halves
            count = heads if "q_proj" in name else kv_heads
            halves = numbers.reshape(count, 2, -1, numbers.shape[1])
            numbers = halves.swapaxes(1, 2).reshape(numbers.shape)
        dtype = types.F32 if numbers.ndim == 1 else types.Q8_0 if kind == "q8_0" else types.BF16
        data = gguf.quants.quantize(numpy.ascontiguousarray(numbers), dtype)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), data, raw_dtype=dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quantise(source: Path, path: Path, kind: str) -> None:
    """As llama.cpp's own program llama-quantize does it. Raises RuntimeError where it fails."""
    llama: Any = importlib.import_module("llama_cpp")
    params = llama.llama_model_quantize_default_params()
    params.ftype, params.nthread = getattr(llama, f"LLAMA_FTYPE_MOSTLY_{kind}"), os.cpu_count()
    status = llama.llama_model_quantize(str(source).encode(), str(path).encode(), params)
    if status != 0:
        raise RuntimeError(f"llama.cpp did not write {path}: status {status}")


def tensors(path: Path, numpy: Any) -> Any:
    """Names and float32 numbers of a safetensors file of bfloat16."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        start = file.tell()
        for name, entry in header.items():
            if name != "__metadata__":
                assert entry["dtype"] == "BF16", f"{name} is {entry['dtype']}"
                first, last = entry["data_offsets"]
                file.seek(start + first)
                halves = numpy.frombuffer(file.read(last - first), dtype=numpy.uint16).astype(numpy.uint32)
                yield name, (halves << 16).view(numpy.float32).reshape(entry["shape"])


class LlamaRun:
    """One workload in its own context, which is made before the clock starts."""

    def __init__(self, llama: Any, model: Any, num_vocab: int, work: dict[str, int], num_threads: int) -> None:
        self._llama, self._num_vocab, self._work = llama, num_vocab, work
        params = llama.llama_context_default_params()
        params.n_seq_max = work["num_requests"]
        params.n_ctx = work["num_requests"] * (work["input_len"] + work["output_len"])
        params.n_batch, params.n_ubatch = BATCH, 512
        params.n_threads = params.n_threads_batch = num_threads
        params.kv_unified = True
        self._context = llama.llama_init_from_model(model, params)
        self._batch = llama.llama_batch_init(BATCH, 0, 1)
        chance = random.Random(0)
        self._prompts = [
            [chance.randrange(3, 4000) for _ in range(work["input_len"])] for _ in range(work["num_requests"])
        ]
        self._done = [0] * work["num_requests"]  # tokens of each prompt that are computed
        self._answers: list[list[int]] = [[] for _ in self._prompts]
        self._first_s: list[float] = [0.0] * work["num_requests"]

    def __call__(self) -> dict[str, Any]:
        start, cpu_start = time.perf_counter(), time.process_time()
        while any(len(answer) < self._work["output_len"] for answer in self._answers):
            self._step(start)
        seconds, cpu_s = time.perf_counter() - start, time.process_time() - cpu_start
        self._llama.llama_batch_free(self._batch)
        self._llama.llama_free(self._context)
        return {"seconds": seconds, "cpu_s": cpu_s, "ttft_s": self._first_s}

    def _step(self, start: float) -> None:
        self._batch.n_tokens = 0
        wanted: list[tuple[int, int]] = []  # sequence, and the place of its logits
        for index, answer in enumerate(self._answers):
            if answer and len(answer) < self._work["output_len"]:
                wanted.append((index, self._add(index, answer[-1], self._done[index] + len(answer) - 1, True)))
        for index, prompt in enumerate(self._prompts):
            while self._done[index] < len(prompt) and self._batch.n_tokens < BATCH:
                position = self._done[index]
                self._done[index] += 1
                last = self._done[index] == len(prompt)
                place = self._add(index, prompt[position], position, last)
                wanted += [(index, place)] if last else []
        assert self._llama.llama_decode(self._context, self._batch) == 0, "llama_decode failed"
        for index, place in wanted:
            self._answers[index].append(self._best(place))
            if len(self._answers[index]) == 1:
                self._first_s[index] = time.perf_counter() - start

    def _add(self, index: int, token: int, position: int, logits: bool) -> int:
        batch = self._batch
        place: int = batch.n_tokens
        batch.token[place], batch.pos[place] = token, position
        batch.n_seq_id[place], batch.seq_id[place][0] = 1, index
        batch.logits[place] = logits
        batch.n_tokens += 1
        return place

    def _best(self, place: int) -> int:
        numpy: Any = importlib.import_module("numpy")
        logits = self._llama.llama_get_logits_ith(self._context, place)
        token: int = numpy.ctypeslib.as_array(logits, shape=(self._num_vocab,)).argmax().item()
        return token


if __name__ == "__main__":
    sys.path.pop(0)  # this folder, where this file has the package's name
    if sys.argv[1] in ("convert", "quantise"):
        {"convert": convert, "quantise": quantise}[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
    else:
        main(sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
