"""Compares loss and every gradient of a real exported model with PyTorch's, in float64 and float32.

    compare_torch.py build/trainrt resnet18 [--mode train|eval]

Bounds (CONTRACT section 5). float64: loss 1e-8 relative; each gradient 1e-8 of its own norm, or 1e-8
of the global gradient norm if that is larger (more where the file itself is rounded, see below).
float32: loss 1e-5; the error of each gradient against float64 at most three times PyTorch's own, floor
1e-6 of the global norm. An EVAL export renames or
merges parameters; those that kept their names are compared, and at least one must have.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

import numpy
import onnx
import onnx.numpy_helper

EXPORT = pathlib.Path(__file__).resolve().parents[2] / "models" / "export" / "export.py"


# With seed 0 a max-pooling window of squeezenet holds a near tie that float32 rounding decides.
SEED = 1

# The exporter's own float32 constants put a floor under the agreement in float64: HardSigmoid's alpha
# = 1/6 in every export, and in an EVAL export the convolutions that BatchNorm was folded into.
ROUNDED_BY_EXPORTER = {"mobilenet_v3_small": 1e-7}
ROUNDED_BY_EVAL_EXPORT = {"resnet18", "shufflenet_v2", "mobilenet_v2", "mobilenet_v3_small",
                          "densenet121"}

# Folding breaks the tie of a shared weight in an EVAL export: what is left is another model.
UNTIED_BY_EVAL_EXPORT = {"gpt": {"tok.weight"}}


def run(command):
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}\nexited with {result.returncode}:\n"
                 f"{result.stdout[-2000:]}{result.stderr[-4000:]}")
    return result.stdout


# A power of two, so that scaling by it is exact; large, so that the subtraction of the weight leaves
# the gradient's own rounding as the only one.
LEARNING_RATE = 2.0 ** 20


def read_safetensors(path):
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    dtypes = {"F32": numpy.float32, "F64": numpy.float64}
    tensors = {}
    for name, entry in json.loads(raw[8:8 + size]).items():
        if name != "__metadata__" and entry["dtype"] in dtypes:
            begin, end = (8 + size + at for at in entry["data_offsets"])
            data = numpy.frombuffer(raw[begin:end], dtypes[entry["dtype"]])
            tensors[name] = data.reshape(entry["shape"])
    return tensors


def initial_weights(model):
    graph = onnx.load(str(model)).graph
    tensors = {t.name: t for t in graph.initializer}
    # A copy that the exporter merged into another parameter is an Identity of it.
    for node in graph.node:
        if node.op_type == "Identity" and node.input[0] in tensors:
            tensors[node.output[0]] = tensors[node.input[0]]
    return {name: onnx.numpy_helper.to_array(t) for name, t in tensors.items()}


def train_step(binary, folder, precision, batch):
    """Loss and gradients of one step, read off the weights after plain gradient descent. One
    micro-batch holds the whole batch, so BatchNorm sees all of it."""
    metrics, checkpoints = folder / f"metrics.{precision}", folder / f"checkpoints.{precision}"
    run([binary, "run", folder / "model.onnx", "--data", folder / "reference.npz", "--loss",
         "softmax_cross_entropy", "--batch-size", str(batch), "--micro-batch-size", str(batch),
         "--steps", "1", "--optimizer", "sgd", "--lr", str(LEARNING_RATE), "--precision", precision,
         "--metrics", metrics, "--checkpoint-dir", checkpoints])
    loss = json.loads(metrics.read_text().splitlines()[0])["loss"]
    before, grads = initial_weights(folder / "model.onnx"), {}
    for file in sorted((checkpoints / "step-00000001").glob("*.safetensors")):
        for name, after in read_safetensors(file).items():
            if name in before and before[name].shape == after.shape:
                grads[name] = (before[name].astype(after.dtype) - after) / LEARNING_RATE
    return loss, grads


def norm(x):
    return float(numpy.linalg.norm(x.astype(numpy.float64).ravel()))


def check(binary, name, mode):
    failures = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        run([sys.executable, EXPORT, name, "-o", folder / "model.onnx", "--mode", mode,
             "--reference", folder / "reference.npz", "--seed", str(SEED)])
        reference = dict(numpy.load(folder / "reference.npz"))
        want64 = {k[7:]: v for k, v in reference.items() if k.startswith("grad64/")}
        want32 = {k[7:]: v for k, v in reference.items() if k.startswith("grad32/")}
        data = {k: v for k, v in reference.items() if "/" not in k and not k.startswith("loss")}
        numpy.savez(folder / "reference.npz", **data)
        total = float(numpy.sqrt(sum(norm(g) ** 2 for g in want64.values())))
        batch = data["labels"].shape[0]

        bound64 = ROUNDED_BY_EXPORTER.get(name, 1e-8)
        if mode == "eval" and name in ROUNDED_BY_EVAL_EXPORT:
            bound64 = 1e-6
        loss, grads = train_step(binary, folder, "fp64", batch)
        compared = [key for key in want64 if key in grads and grads[key].shape == want64[key].shape]
        if mode == "eval":
            compared = [k for k in compared if k not in UNTIED_BY_EVAL_EXPORT.get(name, ())]
        missing = sorted(set(want64) - set(compared))
        if mode == "train" and missing:
            failures.append(f"no gradient for {missing}")
        if not compared:
            failures.append(f"no parameter kept its name: {sorted(grads)[:5]} ...")
        zero = [key for key in compared if norm(want64[key]) <= 1e-12 * total]
        # In evaluation an untrained network may fade to nothing by itself.
        if mode == "train" and len(zero) > len(compared) // 4:  # some are by nature: a key's bias, a bias before BatchNorm
            failures.append(f"{len(zero)} of {len(compared)} gradients are zero, which proves nothing")
        loss_error = abs(loss - reference["loss64"]) / abs(reference["loss64"])
        if not loss_error <= bound64:
            failures.append(f"fp64 loss {loss!r}, PyTorch {float(reference['loss64'])!r}")
        worst64 = 0.0
        for key in compared:
            error = norm(grads[key] - want64[key]) / max(norm(want64[key]), total)
            worst64 = max(worst64, error)
            if not error <= bound64:
                failures.append(f"fp64 gradient of {key}: relative error {error:.2e}")

        loss, grads = train_step(binary, folder, "fp32", batch)
        if not abs(loss - reference["loss64"]) / abs(reference["loss64"]) <= 1e-5:
            failures.append(f"fp32 loss {loss!r}, PyTorch fp64 {float(reference['loss64'])!r}")
        worst32 = 0.0
        for key in compared:
            ours = norm(grads[key] - want64[key])
            bound = max(3 * norm(want32[key] - want64[key]), 1e-6 * total)
            worst32 = max(worst32, ours / bound)
            if not ours <= bound:
                failures.append(f"fp32 gradient of {key}: error {ours:.2e}, bound {bound:.2e}")
    print(f"{name} {mode}: {len(compared)} of {len(want64)} gradients, loss error {loss_error:.1e}, "
          f"worst fp64 {worst64:.1e}, worst fp32 {worst32:.2f} of its bound")
    return failures


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("binary")
    parser.add_argument("name")
    parser.add_argument("--mode", choices=["train", "eval", "both"], default="both")
    args = parser.parse_args()
    failures = []
    for mode in ["train", "eval"] if args.mode == "both" else [args.mode]:
        failures += [f"{args.name} {mode}: {f}" for f in check(args.binary, args.name, mode)]
    for failure in failures[:20]:
        print(failure)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
