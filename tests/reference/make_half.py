"""How far PyTorch's own bf16 attention is from float64, on the reference cases: the yardstick for ours.

For each case: inputs are rounded to bfloat16; `torch.nn.functional.scaled_dot_product_attention` and its gradients in bfloat16 (a softcap
it does not have: there the same formula, operation by operation) against the same in float64 on the same rounded inputs. One JSON object:
case -> tensor -> root mean square of the difference.

Usage: python make_half.py CASES_DIR > half.json   (needs torch, safetensors)
"""
import json, math, sys
from pathlib import Path

import torch
from safetensors import safe_open


def mask(options, sq, sk):
    qp, kp = torch.arange(sq) + options["q_offset"], torch.arange(sk) + options["k_offset"]
    keep = torch.ones(sq, sk, dtype=torch.bool)
    if options["causal"]:
        keep &= kp[None, :] <= qp[:, None]
    if options["window"] is not None:
        keep &= qp[:, None] - kp[None, :] < options["window"]
    if options["cu_seqlens"] is not None:
        doc = torch.bucketize(torch.arange(sq), torch.tensor(options["cu_seqlens"][1:]), right=True)
        keep &= doc[:, None] == doc[None, :]
    return keep


def by_hand(q, k, v, keep, options):
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    s = q @ k.transpose(-1, -2) * options["scale"]
    if options["softcap"] is not None:
        s = options["softcap"] * torch.tanh(s / options["softcap"])
    return torch.softmax(s.masked_fill(~keep, -math.inf), dim=-1) @ v


def attend(q, k, v, keep, options):
    if options["softcap"] is not None:
        return by_hand(q, k, v, keep, options)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    return sdpa(q, k, v, attn_mask=keep, scale=options["scale"], enable_gqa=True)


def results(attention, dtype, tensors, options):
    q, k, v, d_out = (t.to(torch.bfloat16).to(dtype) for t in tensors)
    for t in (q, k, v):
        t.requires_grad_(True)
    keep = mask(options, q.shape[2], k.shape[2])
    rows = keep.any(dim=1)  # a row that sees nothing is NaN there, and 0 by our definition
    out = attention(q[:, :, rows], k, v, keep[rows], options)
    grads = torch.autograd.grad(out, (q, k, v), d_out[:, :, rows])
    whole = torch.zeros_like(q.detach())
    whole[:, :, rows] = out.detach()
    return dict(zip(("out", "dq", "dk", "dv"), (t.detach().double() for t in (whole, *grads))))


if __name__ == "__main__":
    found = {}
    for path in sorted(Path(sys.argv[1]).glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            options = json.loads(file.metadata()["options"])
            tensors = [file.get_tensor(name) for name in ("q", "k", "v", "d_out")]
        exact = results(by_hand, torch.float64, tensors, options)
        half = results(attend, torch.bfloat16, tensors, options)
        found[path.stem] = {name: (half[name] - exact[name]).square().mean().sqrt().item() for name in exact}
    json.dump(found, sys.stdout, indent=1, sort_keys=True)
    print()
