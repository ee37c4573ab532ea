"""Weights to and from Hugging Face layout, and a complete checkpoint folder.

Owns  the translation of names: stacked experts here, one tensor an expert there; `mtp.*` in a shard of its own.
Reads and writes safetensors, config.json and tokenizer files.
Never stores a norm that bfloat16 would round twice: zero-centred weights w are kept such that 1 + w is exact in
      bfloat16, because MLX adds the 1 in bfloat16 when it loads them.
"""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from scripts.train import chat
from scripts.train.model import Config, Model

State = dict[str, Tensor]
MAX_POSITIONS = 2048
MAIN_SHARD, MTP_SHARD = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"

ROOT = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
LAYER = {
    "input_norm.weight": "input_layernorm.weight",
    "mlp_norm.weight": "post_attention_layernorm.weight",
    "mlp.gate.weight": "mlp.gate.weight",
    "mlp.shared_expert_gate.weight": "mlp.shared_expert_gate.weight",
    "mlp.shared_down.weight": "mlp.shared_expert.down_proj.weight",
}
DELTA_NET = {
    f"mixer.{name}": f"linear_attn.{name}"
    for name in ("in_proj_qkvz.weight", "in_proj_ba.weight", "out_proj.weight", "A_log", "dt_bias")
} | {"mixer.norm_weight": "linear_attn.norm.weight"}
ATTENTION = {
    f"mixer.{name}.weight": f"self_attn.{name}.weight"
    for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
}
MTP = {
    f"mtp.{name}.weight": f"mtp.{name}.weight" for name in ("pre_fc_norm_hidden", "pre_fc_norm_embedding", "fc", "norm")
}


def _layers(c: Config) -> list[tuple[str, str, bool]]:
    """Return (prefix here, prefix there, is_linear) of every layer."""
    main = [(f"layers.{i}.", f"model.layers.{i}.", c.is_linear(i)) for i in range(c.num_hidden_layers)]
    return [*main, ("mtp.layer.", "mtp.layers.0.", False)]


def _names(c: Config) -> dict[str, str]:
    """Return the names of all tensors that are the same here and there."""
    names = ROOT | MTP
    for here, there, is_linear in _layers(c):
        same = LAYER | (DELTA_NET if is_linear else ATTENTION)
        names |= {here + ours: there + theirs for ours, theirs in same.items()}
    return names


def is_zero_centred(name: str) -> bool:
    return "linear_attn" not in name and ("norm.weight" in name or "layernorm" in name or "pre_fc_norm" in name)


def to_hugging_face(state: State, c: Config) -> State:
    """Return the bfloat16 checkpoint tensors of a Model's state."""
    out = {there: state[here] for here, there in _names(c).items()}
    for here, there, is_linear in _layers(c):
        if is_linear:
            out[there + "linear_attn.conv1d.weight"] = state[here + "mixer.conv_weight"][:, None]
        shared = state[here + "mlp.shared_gate_up.weight"].chunk(2, 0)
        out |= {
            f"{there}mlp.shared_expert.{n}_proj.weight": part for n, part in zip(("gate", "up"), shared, strict=True)
        }
        for expert in range(c.num_experts):
            gate, up = state[here + "mlp.gate_up"][expert].T.chunk(2, 0)
            down = state[here + "mlp.down"][expert].T
            parts = {"gate": gate, "up": up, "down": down}
            out |= {f"{there}mlp.experts.{expert}.{name}_proj.weight": part for name, part in parts.items()}

    def stored(name: str, value: Tensor) -> Tensor:
        value = value.detach().float()
        if is_zero_centred(name):
            return ((1 + value).to(torch.bfloat16) - 1).contiguous()
        return value.to(torch.bfloat16).contiguous()

    return {name: stored(name, value) for name, value in out.items()}


def from_hugging_face(tensors: State, c: Config) -> State:
    """Return the float32 state of a Model, the inverse of to_hugging_face."""
    state = {here: tensors[there] for here, there in _names(c).items()}
    for here, there, is_linear in _layers(c):
        if is_linear:
            state[here + "mixer.conv_weight"] = tensors[there + "linear_attn.conv1d.weight"][:, 0]
        shared = [tensors[f"{there}mlp.shared_expert.{name}_proj.weight"] for name in ("gate", "up")]
        state[here + "mlp.shared_gate_up.weight"] = torch.cat(shared)
        expert = [f"{there}mlp.experts.{e}." for e in range(c.num_experts)]
        gate_up = [torch.cat([tensors[e + "gate_proj.weight"], tensors[e + "up_proj.weight"]]).T for e in expert]
        state[here + "mlp.gate_up"] = torch.stack(gate_up)
        state[here + "mlp.down"] = torch.stack([tensors[e + "down_proj.weight"].T for e in expert])
    return {name: value.float() for name, value in state.items()}


def load(folder: Path) -> tuple[Model, Tokenizer]:
    """Return the model of a checkpoint folder, float32 on the CPU, and its tokenizer."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    c = Config(**{field.name: config[field.name] for field in fields(Config)})
    tensors: State = {}
    for shard in sorted(folder.glob("model*.safetensors")):
        tensors |= load_file(shard)
    model = Model(c)
    model.load_state_dict(from_hugging_face(tensors, c))
    return model.eval(), Tokenizer.from_file(str(folder / "tokenizer.json"))


def _config(c: Config, tokenizer: Tokenizer) -> dict[str, Any]:
    kinds = ("full_attention", "linear_attention")
    end_of_text = tokenizer.token_to_id(chat.END_OF_TEXT)
    return asdict(c) | {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": end_of_text,
        "eos_token_id": tokenizer.token_to_id(chat.TURN_END),
        "pad_token_id": end_of_text,
        "decoder_sparse_step": 1,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "intermediate_size": 4 * c.hidden_size,  # no layer is dense; the field is required
        "layer_types": [kinds[c.is_linear(i)] for i in range(c.num_hidden_layers)],
        "max_position_embeddings": MAX_POSITIONS,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "num_nextn_predict_layers": 1,
        "output_router_logits": False,
        "rope_scaling": None,
        "router_aux_loss_coef": 0.001,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
    }


def _tokenizer_config() -> dict[str, Any]:
    # No added_tokens_decoder: tokenizer.json says which tokens are special (all of chat.SPECIAL_TOKENS are, so that
    # the same characters typed by a user can be encoded as text).
    return {
        "add_bos_token": False,
        "add_prefix_space": False,
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": chat.TURN_END,
        "errors": "replace",
        "model_max_length": MAX_POSITIONS,
        "pad_token": chat.END_OF_TEXT,
        "split_special_tokens": False,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }


def save(folder: Path, state: State, c: Config, tokenizer: Tokenizer) -> None:
    """Write a checkpoint folder of a Model's state."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = to_hugging_face(state, c)
    weight_map = {name: MTP_SHARD if name.startswith("mtp.") else MAIN_SHARD for name in sorted(tensors)}
    for shard in (MAIN_SHARD, MTP_SHARD):
        part = {name: tensors[name] for name, at in weight_map.items() if at == shard}
        save_file(part, folder / shard, metadata={"format": "pt"})
    n_parameters = sum(value.numel() for value in tensors.values())
    metadata = {"total_size": 2 * n_parameters, "total_parameters": n_parameters}
    ids = {name: tokenizer.token_to_id(name) for name in (chat.END_OF_TEXT, chat.TURN_END)}
    generation = {
        "bos_token_id": ids[chat.END_OF_TEXT],
        "eos_token_id": [ids[chat.TURN_END], ids[chat.END_OF_TEXT]],
        "pad_token_id": ids[chat.END_OF_TEXT],
    }
    files = {
        "model.safetensors.index.json": {"metadata": metadata, "weight_map": weight_map},
        "config.json": _config(c, tokenizer),
        "tokenizer_config.json": _tokenizer_config(),
        "generation_config.json": generation,
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(chat.template(), encoding="utf-8")
    tokenizer.save(str(folder / "tokenizer.json"))
