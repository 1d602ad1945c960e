"""Exports a real PyTorch model to ONNX and, with --reference, writes what PyTorch computes for it.

    python3 models/export/export.py resnet18 -o resnet18.onnx --mode train --reference resnet18.npz

The reference holds the inputs (by graph name), "labels", the float64 loss ("loss64") and gradients
("grad64/<parameter>"), and the same in float32 ("loss32", "grad32/..."). Dropout is 0 throughout.
"""

import argparse
import copy
import inspect
import warnings

import numpy
import torch
import torch.nn.functional as F

from networks import NETWORKS


def cross_entropy(logits, labels):
    if logits.dim() == 3:  # [batch, seq, vocab]
        logits = logits.transpose(1, 2)
    return F.cross_entropy(logits, labels)


def reference(model, inputs, labels, dtype):
    model = copy.deepcopy(model).to(dtype)
    inputs = [x.to(dtype) if x.is_floating_point() else x for x in inputs]
    loss = cross_entropy(model(*inputs), labels)
    loss.backward()
    return loss.item(), {name: p.grad.numpy() for name, p in model.named_parameters()}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=sorted(NETWORKS))
    parser.add_argument("-o", "--output", required=True)
    parser.add_argument("--mode", choices=["train", "eval"], default="train")
    parser.add_argument("--reference")
    parser.add_argument("--opset", type=int, default=17)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.manual_seed(args.seed)
    model, inputs, labels = NETWORKS[args.name]()
    model.train(args.mode == "train")
    names = ["input" if x.is_floating_point() else "input_ids" for x in inputs]
    if args.reference:
        arrays = {name: x.numpy() for name, x in zip(names, inputs)}
        arrays["labels"] = labels.numpy()
        for bits, dtype in (("64", torch.float64), ("32", torch.float32)):
            loss, grads = reference(model, inputs, labels, dtype)
            arrays["loss" + bits] = numpy.asarray(loss, numpy.float64)
            for name, grad in grads.items():
                arrays[f"grad{bits}/{name}"] = grad
        numpy.savez(args.reference, **arrays)
    training = args.mode == "train"
    # Only the older of PyTorch's two exporters keeps weights as they are called and as they are.
    older = {"dynamo": False} if "dynamo" in inspect.signature(torch.onnx.export).parameters else {}
    torch.onnx.export(
        model, tuple(inputs), args.output, opset_version=args.opset, input_names=names,
        output_names=["logits"], dynamic_axes={n: {0: "batch"} for n in names + ["logits"]},
        training=torch.onnx.TrainingMode.TRAINING if training else torch.onnx.TrainingMode.EVAL,
        do_constant_folding=not training, **older)


if __name__ == "__main__":
    main()
