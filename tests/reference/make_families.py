"""Reference models of every family: tiny random checkpoints in Hugging Face layout with inputs, logits, loss and gradients.

For each model: config.json and safetensors as transformers writes them (some configurations rewritten in the layout of its version
4), and reference.safetensors holding input_ids [B, S], position_ids [B, S], labels [B, S] (not shifted; -100 = no target), logits
[B, S, V], loss (mean over targets after the usual one-token shift), grad.<parameter name> for every parameter, loss_curve [5]: the
loss before each of 5 AdamW steps on this batch (lr 1e-2, betas 0.9 0.999, eps 1e-8, no weight decay). Float32 throughout.

Usage: python make_families.py OUT_DIR   (needs torch, transformers 5, safetensors)
"""
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import (LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, Qwen2Config, Qwen2ForCausalLM,
                          Qwen3Config, Qwen3ForCausalLM)

BASE = dict(vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=8,
            num_key_value_heads=2, max_position_embeddings=4096, rms_norm_eps=1e-5, bos_token_id=0, eos_token_id=1,
            attn_implementation="eager")
D8 = {**BASE, "head_dim": 8}
H4 = {**BASE, "num_attention_heads": 4}  # for Qwen2, whose class has no head_dim: D = 8
LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]


def rope(kind="default", theta=10000.0, **more):
    return {"rope_type": kind, "rope_theta": theta, **more}


LLAMA, MISTRAL = (LlamaConfig, LlamaForCausalLM), (MistralConfig, MistralForCausalLM)
QWEN2, QWEN3 = (Qwen2Config, Qwen2ForCausalLM), (Qwen3Config, Qwen3ForCausalLM)
# name: (family, fields, layout of config.json)
MODELS = {
    "llama2": (LLAMA, dict(H4, num_key_value_heads=4, rope_parameters=rope()), "older"),
    "llama_linear": (LLAMA, dict(D8, rope_parameters=rope("linear", factor=2.5)), "older"),
    "llama_yarn": (LLAMA, dict(D8, rope_parameters=rope("yarn", factor=4.0, original_max_position_embeddings=32)), "newer"),
    "llama_biases_mqa_tied": (LLAMA, dict(D8, num_key_value_heads=1, tie_word_embeddings=True, attention_bias=True,
                                          mlp_bias=True, rope_parameters=rope(theta=500000.0)), "newer"),
    "llama_sharded": (LLAMA, dict(D8, rope_parameters=rope()), "newer"),
    "mistral_window": (MISTRAL, dict(D8, sliding_window=13, rope_parameters=rope()), "older"),
    "mistral_full": (MISTRAL, dict(D8, sliding_window=None, rope_parameters=rope(theta=1000000.0)), "newer"),
    "qwen2": (QWEN2, dict(H4, tie_word_embeddings=True, rope_parameters=rope(theta=1000000.0)), "older"),
    "qwen2_window_yarn": (QWEN2, dict(H4, use_sliding_window=True, sliding_window=17, max_window_layers=1,
                                      rope_parameters=rope("yarn", 1000.0, factor=3.0, original_max_position_embeddings=40,
                                                           beta_fast=16.0, mscale=0.8, mscale_all_dim=0.5, truncate=False)),
                          "older"),
    "qwen3": (QWEN3, dict(BASE, head_dim=12, rope_parameters=rope(theta=1000000.0)), "newer"),
    "qwen3_windows_12_heads": (QWEN3, dict(BASE, num_hidden_layers=3, num_attention_heads=12, num_key_value_heads=3,
                                           head_dim=6, hidden_size=20, use_sliding_window=True, sliding_window=20,
                                           layer_types=LAYERS, rope_parameters=rope()), "newer"),
}


def older(path):
    """Rewrites a config.json as transformers 4 had it: theta on its own, scaling with "type", no head_dim or layer_types."""
    config = json.loads(path.read_text())
    parameters = config.pop("rope_parameters")
    config["rope_theta"] = parameters.pop("rope_theta")
    kind = parameters.pop("rope_type")
    config["rope_scaling"] = None if kind == "default" else {"type": kind, **parameters}
    config["torch_dtype"] = config.pop("dtype")
    config.pop("layer_types", None)
    if config.get("head_dim") == config["hidden_size"] // config["num_attention_heads"]:
        del config["head_dim"]
    path.write_text(json.dumps(config, indent=2) + "\n")


def make(model_class, config, seed, out_dir, B=2, S=96, **save):
    torch.manual_seed(seed)
    model = model_class(config).float().train()
    with torch.no_grad():  # larger than the default initialisation, so that an error shows
        for name, p in model.named_parameters():
            p.copy_(1.0 + 0.1 * torch.randn_like(p) if "norm" in name else 0.2 * torch.randn_like(p))
    out_dir.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out_dir, **save)
    ids = torch.randint(2, config.vocab_size, (B, S))
    labels = ids.clone()
    labels[0, :17] = -100      # a prompt without targets
    labels[-1, 60:75] = -100    # and a hole
    position_ids = torch.arange(S).expand(B, S).contiguous()
    out = model(input_ids=ids, position_ids=position_ids, labels=labels)
    out.loss.backward()
    tensors = dict(input_ids=ids, position_ids=position_ids, labels=labels, logits=out.logits, loss=out.loss)
    tensors |= {f"grad.{n}": p.grad for n, p in model.named_parameters()}
    tensors = {n: t.detach().clone().contiguous() for n, t in tensors.items()}
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    curve = []
    for _ in range(5):
        optim.zero_grad()
        loss = model(input_ids=ids, position_ids=position_ids, labels=labels).loss
        loss.backward()
        optim.step()
        curve.append(loss.detach())
    tensors["loss_curve"] = torch.stack(curve)
    save_file(tensors, out_dir / "reference.safetensors")
    print(out_dir.name, "loss", tensors["loss"].item(), "curve", [round(c.item(), 4) for c in curve])


if __name__ == "__main__":
    for seed, (name, ((config_class, model_class), fields, layout)) in enumerate(MODELS.items(), start=21):
        folder = Path(sys.argv[1]) / name
        save = dict(max_shard_size="40KB") if "sharded" in name else {}
        make(model_class, config_class(**fields), seed, folder, **save)
        (folder / "generation_config.json").unlink(missing_ok=True)
        if layout == "older":
            older(folder / "config.json")
