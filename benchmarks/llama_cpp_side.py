"""llama.cpp's side of bench_language: a Llama of random weights as a GGUF file, and its steps.

It needs gguf and llama-cpp-python, which builds llama.cpp for the processor that installs it.
Version 0.3.36 crashes by AMX with more than one text; CMAKE_ARGS="-DGGML_NATIVE=OFF
-DGGML_AVX512=ON -DGGML_AVX512_VNNI=ON ..." builds it without.
"""

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

FORMATS = ("Q8_0", "Q4_0", "Q2_K", "TQ2_0")
"""Of weights: 8.5, 4.5, 2.6 and 2.06 bits with their scales; words in more."""


def tensors(layers: int, hidden: int, feed_forward: int, words: int) -> Iterator[tuple]:
    """(name, shape) of a Llama's weights; the table of words is the projection, too."""
    yield "token_embd.weight", (words, hidden)
    yield "output_norm.weight", (hidden,)
    for layer in range(layers):
        prefix = f"blk.{layer}."
        for name in ("attn_norm", "ffn_norm"):
            yield f"{prefix}{name}.weight", (hidden,)
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            yield f"{prefix}{name}.weight", (hidden, hidden)
        for name in ("ffn_gate", "ffn_up"):
            yield f"{prefix}{name}.weight", (feed_forward, hidden)
        yield f"{prefix}ffn_down.weight", (hidden, feed_forward)


def write_floats(path: Path, layers: int, hidden: int, feed_forward: int, words: int) -> None:
    """Write random weights in float32; heads are 64 wide."""
    import gguf

    writer, heads = gguf.GGUFWriter(path, "llama"), hidden // 64
    writer.add_context_length(1024)
    writer.add_embedding_length(hidden)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(feed_forward)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(words)
    writer.add_tokenizer_model("none")
    random = np.random.default_rng(1)
    for name, shape in tensors(layers, hidden, feed_forward, words):
        weight = random.standard_normal(shape, np.float32) / np.sqrt(shape[-1], dtype=np.float32)
        writer.add_tensor(name, np.ones(shape, np.float32) if len(shape) == 1 else weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write(path: Path, weight_format: str, size: tuple[int, int, int, int]) -> None:
    """Write a model of `size` (see `write_floats`) as llama.cpp rounds it.

    Raises:
        ImportError: a package is missing.
        RuntimeError: llama.cpp refuses the model.
    """
    import llama_cpp

    floats = path.with_suffix(".float32")
    write_floats(floats, *size)
    chosen = llama_cpp.llama_model_quantize_default_params()
    chosen.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{weight_format}")
    failed = llama_cpp.llama_model_quantize(bytes(floats), bytes(path), ctypes.byref(chosen))
    floats.unlink()
    if failed:
        raise RuntimeError(f"llama.cpp makes no {weight_format} of the model")


def writer_of(path: Path, threads: int, texts: int, words: int) -> Callable[[int, int], int]:
    """(texts, words of each) -> words that were written, the likeliest; at most those given here.

    Raises:
        RuntimeError: llama.cpp refuses the model.
    """
    import llama_cpp

    model = llama_cpp.llama_model_load_from_file(
        bytes(path), llama_cpp.llama_model_default_params()
    )
    chosen = llama_cpp.llama_context_default_params()
    chosen.n_ctx, chosen.n_seq_max, chosen.kv_unified = texts * words, texts, True
    chosen.n_threads = chosen.n_threads_batch = threads
    context = model and llama_cpp.llama_init_from_model(model, chosen)
    if not context:
        raise RuntimeError(f"llama.cpp cannot load {path}")
    vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    batch = llama_cpp.llama_batch_init(texts, 0, 1)

    def decode(texts: int, words: int) -> int:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        batch.n_tokens, last = texts, [2] * texts
        for position in range(words):
            for text, word in enumerate(last):
                batch.token[text], batch.pos[text] = word, position
                batch.n_seq_id[text], batch.seq_id[text][0], batch.logits[text] = 1, text, 1
            if llama_cpp.llama_decode(context, batch):
                raise RuntimeError("llama.cpp failed in a step")
            for text in range(texts):
                logits = llama_cpp.llama_get_logits_ith(context, text)
                last[text] = int(np.ctypeslib.as_array(logits, (vocabulary,)).argmax())
        return texts * words

    return decode
