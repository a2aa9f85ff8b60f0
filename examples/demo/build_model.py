"""Write a small random Llama with a tokenizer of its own, ready for vLLM. Nothing is downloaded.

    python -m demo.build_model tiny|demo [FOLDER]

What makes it fit for showing KV reuse:

* The weights have a much wider spread than a real initialisation. With the usual one a
  random model repeats one token whatever its context; here each greedy token depends on all
  tokens before it, so a wrong KV block shows in the text at once.
* float32, so that runs which cut the same work differently agree on the greedy tokens.
* The only tokens with a non-zero logit are whole words. An answer therefore reads as words,
  never ends early, and becomes the same tokens again when the client sends it back.
* Everything follows from a seed and the bundled texts: the same folder each time.
"""

import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from demo import text

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
SPECIAL = PAD, BOS, EOS, IM_START, IM_END = (
    *("<|pad|>", "<|bos|>", "<|eos|>"),
    *("<|im_start|>", "<|im_end|>"),
)
MAX_POSITIONS = 16384


@dataclass(frozen=True)
class Shape:
    """The sizes of a model. vLLM's CPU attention takes head_dim 32, 64, 80, 96, 112, 128."""

    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    seed: int = 20260417

    def kv_bytes_per_token(self) -> int:
        """Return the KV cache's size for one token, in float32."""
        return 2 * self.layers * self.kv_heads * self.head_dim * 4


SHAPES = {
    # For tests: 157 thousand parameters, 1 KiB of KV a token.
    "tiny": Shape(512, 64, 128, 2, 4, 2, 32),
    # For the demo: 24 million, so that prefill costs something.
    "demo": Shape(1024, 512, 1376, 8, 8, 4, 64),
}


def build(name: str, shape: Shape | None = None, folder: Path | None = None) -> Path:
    """Return the folder of that model, written if it is not there yet.

    `name` is one of SHAPES, or any name with a `shape`. Folders lie under build/models and
    carry a digest of all that they depend on.
    """
    shape = shape or SHAPES[name]
    digest = hashlib.sha256(json.dumps(asdict(shape)).encode())
    for source in sorted([*HERE.glob("*.jinja"), *text.FOLDER.iterdir(), Path(__file__)]):
        digest.update(source.read_bytes())
    target = folder or ROOT / "build" / "models" / f"{name}-{digest.hexdigest()[:12]}"
    if not (target / "config.json").is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as temporary:
            made = Path(temporary) / "model"
            made.mkdir()
            write(made, shape)
            shutil.rmtree(target, ignore_errors=True)
            try:
                os.replace(made, target)
            except OSError:  # another process was faster
                if not (target / "config.json").is_file():
                    raise
    return target


def write(folder: Path, shape: Shape) -> None:
    """Write tokenizer, chat templates, configuration and weights."""
    from safetensors.numpy import save_file

    tokenizer = train_tokenizer(shape.vocab)
    ids = {token: tokenizer.token_to_id(token) for token in SPECIAL}
    token_ids = {
        "pad_token_id": ids[PAD],
        "bos_token_id": ids[BOS],
        "eos_token_id": ids[EOS],
    }
    tokenizer.save(str(folder / "tokenizer.json"))
    for template in HERE.glob("*.jinja"):
        shutil.copy(template, folder / template.name)
    weights = make_weights(shape, tokenizer.get_vocab_size(), whole_words(tokenizer))
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})

    def dump(name: str, value: dict[str, Any]) -> None:
        (folder / name).write_text(json.dumps(value, indent=2) + "\n")

    dump(
        "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "pad_token": PAD,
            "bos_token": BOS,
            "eos_token": EOS,
            "clean_up_tokenization_spaces": False,
            "model_max_length": MAX_POSITIONS,
            "chat_template": (HERE / "chat_template.jinja").read_text(),
        },
    )
    dump("generation_config.json", dict(token_ids))
    # Last: a folder with a configuration is a whole one.
    dump(
        "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "dtype": "float32",
            "vocab_size": tokenizer.get_vocab_size(),
            "hidden_size": shape.hidden,
            "intermediate_size": shape.intermediate,
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "head_dim": shape.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": MAX_POSITIONS,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "tie_word_embeddings": False,
            "attention_bias": False,
            "mlp_bias": False,
            **token_ids,
        },
    )


def train_tokenizer(vocab: int) -> Any:
    """Return a byte-level BPE tokenizer; any text becomes tokens and the same text again."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        [text.read(name) for name in text.NAMES],
        trainers.BpeTrainer(
            vocab_size=vocab,
            special_tokens=list(SPECIAL),
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    return tokenizer


def whole_words(tokenizer: Any) -> list[int]:
    """Return the tokens that are a space and a word, and the same one token when read back."""
    known = set(re.findall(r" [a-z]+", " ".join(text.read(name) for name in text.NAMES)))
    decoded = {
        ident: tokenizer.decode([ident], skip_special_tokens=False)
        for ident in range(tokenizer.get_vocab_size())
    }
    return [
        ident
        for ident, word in decoded.items()
        if word in known and tokenizer.encode(word).ids == [ident]
    ]


def make_weights(shape: Shape, vocab: int, words: list[int]) -> dict[str, Any]:
    """Return random weights; only `words` have logits."""
    import numpy as np

    random = np.random.default_rng(shape.seed)

    def linear(outputs: int, inputs: int) -> Any:
        spread = 1.6 / inputs**0.5
        return (random.standard_normal((outputs, inputs)) * spread).astype(np.float32)

    ones = np.ones(shape.hidden, dtype=np.float32)
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    logits = linear(vocab, shape.hidden)
    logits[[ident for ident in range(vocab) if ident not in set(words)]] = 0.0
    embedding = (random.standard_normal((vocab, shape.hidden)) * 0.5).astype(np.float32)
    weights = {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": ones.copy(),
        "lm_head.weight": logits,
    }
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}."
        weights |= {
            prefix + "input_layernorm.weight": ones.copy(),
            prefix + "post_attention_layernorm.weight": ones.copy(),
            prefix + "self_attn.q_proj.weight": linear(queries, shape.hidden),
            prefix + "self_attn.k_proj.weight": linear(keys, shape.hidden),
            prefix + "self_attn.v_proj.weight": linear(keys, shape.hidden),
            prefix + "self_attn.o_proj.weight": linear(shape.hidden, queries),
            prefix + "mlp.gate_proj.weight": linear(shape.intermediate, shape.hidden),
            prefix + "mlp.up_proj.weight": linear(shape.intermediate, shape.hidden),
            prefix + "mlp.down_proj.weight": linear(shape.hidden, shape.intermediate),
        }
    return weights


def main() -> None:
    """Build one model and say where it is."""
    name = sys.argv[1] if len(sys.argv) > 1 else "tiny"
    folder = Path(sys.argv[2]) if len(sys.argv) > 2 else None
    print(build(name, folder=folder))


if __name__ == "__main__":
    main()
