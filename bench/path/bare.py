"""The bare runtimes, without anything of Forebay around them: what the whole path is measured against.

    python bench/path/bare.py chat MODEL.gguf OUTPUT_TOKENS < LINES
    python bench/path/bare.py embed FOLDER TEXTS.json BATCH

Prints JSON lines: tokens (or texts), seconds. `chat` answers each line that it reads, `{"concurrency": N, "prompts":
[…]}`, and takes no CPU in between, so that others can be measured in turn with it.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

THREADS = len(os.sched_getaffinity(0))


def chat(model: str, output_tokens: int) -> None:
    """A closed loop straight on OpenVINO's step loop: as many sequences at once as asked, new ones as others end.

    Prompts are tokenized beforehand and answers are never turned into text, which favours this side.
    """
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.num_kv_blocks = 1024
    scheduler.enable_prefix_caching = True
    scheduler.dynamic_split_fuse = True
    scheduler.max_num_seqs = 32
    pipe = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", {"INFERENCE_NUM_THREADS": THREADS})
    tokenizer = pipe.get_tokenizer()
    config = genai.GenerationConfig()
    config.max_new_tokens = output_tokens
    config.ignore_eos = True
    config.do_sample = False
    config.apply_chat_template = False

    def run(todo: list[Any], concurrency: int) -> float:
        todo, running, number = list(reversed(todo)), {}, 0
        begun = time.perf_counter()
        while todo or running:
            while todo and len(running) < concurrency:
                number += 1
                running[number] = pipe.add_request(number, todo.pop(), config)
            pipe.step()
            for key, handle in list(running.items()):
                if handle.can_read():
                    handle.read()
                if handle.get_status() != genai.GenerationStatus.RUNNING:
                    del running[key]
        return time.perf_counter() - begun

    for line in sys.stdin:
        asked = json.loads(line)
        ready = [tokenizer.encode(text, add_special_tokens=False).input_ids for text in asked["prompts"]]
        seconds = run(ready, asked["concurrency"])
        print(json.dumps({"tokens": output_tokens * len(ready), "seconds": seconds}), flush=True)


def embed(folder: str, texts: list[str], batch: int) -> dict[str, float]:
    """Texts sorted by length, tokenized together, in full batches of the largest size: the ideal order of work."""
    import numpy as np
    import onnxruntime as ort
    from tokenizers import Tokenizer

    options = ort.SessionOptions()
    options.intra_op_num_threads = THREADS
    options.add_session_config_entry("session.x64quantprecision", "1")  # as ours: the same numbers everywhere
    session = ort.InferenceSession(str(Path(folder) / "model.onnx"), options, providers=["CPUExecutionProvider"])
    names = {i.name for i in session.get_inputs()}
    tokenizer = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.enable_padding()

    def run(todo: list[str]) -> float:
        begun = time.perf_counter()
        todo = sorted(todo, key=len)
        for at in range(0, len(todo), batch):
            rows = tokenizer.encode_batch(todo[at : at + batch])
            feed = {
                "input_ids": np.array([r.ids for r in rows], dtype=np.int64),
                "attention_mask": np.array([r.attention_mask for r in rows], dtype=np.int64),
                "token_type_ids": np.array([r.type_ids for r in rows], dtype=np.int64),
            }
            out = session.run(None, {k: v for k, v in feed.items() if k in names})[0][:, 0]
            out / np.linalg.norm(out, axis=1, keepdims=True)
        return time.perf_counter() - begun

    run(texts[: batch * 2])
    return {"texts": float(len(texts)), "seconds": run(texts)}


if __name__ == "__main__":
    if sys.argv[1] == "chat":
        chat(sys.argv[2], int(sys.argv[3]))
    else:
        print(json.dumps(embed(sys.argv[2], json.loads(Path(sys.argv[3]).read_text()), int(sys.argv[4]))))
