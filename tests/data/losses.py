#!/usr/bin/env python3
"""Writes losses.json: PyTorch's losses (reduction=sum) and their gradients in float64.

Run with a Python that has torch (Debian: python3-torch): ./losses.py > losses.json
"""
import json

import torch
import torch.nn.functional as F

torch.manual_seed(3)
CASES = []


def flat(tensor):
    return tensor.detach().flatten().tolist()


def classes(kind, shape, weighted=False, ignore=None, scale=3.0):
    scores = (scale * torch.randn(shape, dtype=torch.float64)).requires_grad_()
    items = shape[:1] + shape[2:]
    labels = torch.randint(0, shape[1], items)
    if ignore is not None:
        labels.flatten()[::3] = ignore
    weights = torch.rand(shape[1], dtype=torch.float64) + 0.5 if weighted else None
    options = {"weight": weights, "ignore_index": -100 if ignore is None else ignore}
    x = F.log_softmax(scores, 1) if kind == "nll" else scores
    x.retain_grad()
    function = F.nll_loss if kind == "nll" else F.cross_entropy
    loss = function(x, labels, reduction="sum", **options)
    mean = function(x, labels, reduction="mean", **options)
    loss.backward()
    CASES.append({"kind": kind, "shape": shape, "scores": flat(x), "labels": flat(labels),
                  "weights": None if weights is None else flat(weights), "ignore": ignore,
                  "sum": loss.item(), "mean": mean.item(), "grad": flat(x.grad)})


def elements(kind, function, targets):
    x = (4 * torch.randn(4, 5, dtype=torch.float64)).requires_grad_()
    t = targets((4, 5))
    loss = function(x, t, reduction="sum")
    mean = function(x, t, reduction="mean")
    loss.backward()
    CASES.append({"kind": kind, "shape": [4, 5], "scores": flat(x), "labels": flat(t),
                  "sum": loss.item(), "mean": mean.item(), "grad": flat(x.grad)})


for kind in ("softmax_cross_entropy", "nll"):
    classes(kind, [6, 5])
    classes(kind, [2, 5, 3])
    classes(kind, [6, 5], weighted=True)
    classes(kind, [2, 4, 3, 2], weighted=True, ignore=1)
    classes(kind, [7, 3], ignore=-100)
classes("softmax_cross_entropy", [4, 50], scale=300.0)  # large logits: no overflow
normal = lambda shape: torch.randn(shape, dtype=torch.float64)
elements("mse", F.mse_loss, normal)
elements("l1", F.l1_loss, normal)
elements("bce_with_logits", F.binary_cross_entropy_with_logits,
         lambda shape: torch.rand(shape, dtype=torch.float64))
print(json.dumps(CASES))
