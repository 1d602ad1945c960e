#!/usr/bin/env python3
"""Writes optimizers.json: ten steps of PyTorch's optimizers in float64 on fixed gradients.

Run with a Python that has torch (Debian: python3-torch): ./optimizers.py > optimizers.json
"""
import json

import torch

SHAPE = (3, 5)
STEPS = 10
LR = 0.015625  # exact in float32, in which the learning rate travels


def gradient(step):
    index = torch.arange(15, dtype=torch.float64).reshape(SHAPE)
    return torch.sin(index * 0.7 + step * 1.3) * (0.25 + 0.1 * index)


def run(make, clip):
    param = torch.linspace(-1, 1, 15, dtype=torch.float64).reshape(SHAPE).requires_grad_()
    optimizer = make([param])
    steps = []
    for step in range(STEPS):
        param.grad = gradient(step)
        norm = torch.nn.utils.clip_grad_norm_([param], clip if clip > 0 else float("inf"))
        optimizer.step()
        steps.append({"param": param.detach().flatten().tolist(), "norm": norm.item()})
    return steps


optim = torch.optim
CASES = [
    ("sgd", {}, lambda p: optim.SGD(p, LR)),
    ("sgd", {"weight_decay": 0.1}, lambda p: optim.SGD(p, LR, weight_decay=0.1)),
    ("sgd", {"clip_norm": 0.5}, lambda p: optim.SGD(p, LR)),
    ("momentum", {}, lambda p: optim.SGD(p, LR, momentum=0.9)),
    ("momentum", {"weight_decay": 0.1, "nesterov": True, "momentum": 0.8},
     lambda p: optim.SGD(p, LR, momentum=0.8, nesterov=True, weight_decay=0.1)),
    ("adam", {}, lambda p: optim.Adam(p, LR)),
    ("adam", {"weight_decay": 0.1, "beta1": 0.8, "beta2": 0.95, "eps": 1e-3},
     lambda p: optim.Adam(p, LR, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.1)),
    ("adamw", {"weight_decay": 0.01}, lambda p: optim.AdamW(p, LR, weight_decay=0.01)),
    ("adamw", {"weight_decay": 0.1, "clip_norm": 0.5},
     lambda p: optim.AdamW(p, LR, weight_decay=0.1)),
    ("adagrad", {"weight_decay": 0.1, "eps": 1e-6},
     lambda p: optim.Adagrad(p, LR, weight_decay=0.1, eps=1e-6)),
]
print(json.dumps({
    "lr": LR,
    "shape": SHAPE,
    "initial": torch.linspace(-1, 1, 15, dtype=torch.float64).tolist(),
    "gradients": [gradient(step).flatten().tolist() for step in range(STEPS)],
    "cases": [{"optimizer": name, "options": options,
               "steps": run(make, options.get("clip_norm", 0))} for name, options, make in CASES],
}, indent=None))
