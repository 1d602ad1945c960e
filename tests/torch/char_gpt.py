"""Trains a character GPT with trainrt and with PyTorch on the same batches, from the same weights, and
compares the loss on a novel that neither has seen.

    char_gpt.py build/trainrt austen.txt [--steps 1500] [--threads 1]

4 layers, 128 wide, 128 characters of context, 4 heads, AdamW with warm-up and a cosine. The text is
Jane Austen's novels; the last one, Sense and Sensibility, is held out. Passes when trainrt's
validation loss is at most 0.02 nats above PyTorch's.
"""

import argparse
import math
import pathlib
import re
import subprocess
import sys
import tempfile
import time

import numpy
import onnx
import onnx.numpy_helper
import torch
import torch.nn.functional as F

LAYERS, HIDDEN, HEADS, SEQ, BATCH = 4, 128, 4, 128, 32
LR, WEIGHT_DECAY, WARMUP, SEED = 2e-3, 0.01, 100, 7
HELD_OUT = "SENSE AND SENSIBILITY\n"
BOUND = 0.02
MASK = 2 ** 64 - 1


def run(command):
    result = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    if result.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}\nexited with {result.returncode}:\n{result.stderr}")
    return result.stdout


# ---- the order in which trainrt reads samples: runtime/sample_order.cc and graph/random.h ----------


def mix_keys(a, b):
    z = (a + 0x9E3779B97F4A7C15 * (b + 1)) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def shuffled_index(epoch, n, index):
    half_bits = 1
    while half_bits < 31 and 1 << (2 * half_bits) < n:
        half_bits += 1
    mask = (1 << half_bits) - 1
    key = mix_keys(mix_keys(SEED, 0x5348554646), epoch)
    x = index
    while True:
        left, right = x >> half_bits, x & mask
        for number in range(6):
            left, right = right, left ^ (mix_keys(key + number, right) & mask)
        x = left << half_bits | right
        if x < n:
            return x


def batches(num_windows, steps):
    """Window numbers of each step; the last batch of an epoch is short."""
    position = 0
    for _ in range(steps):
        epoch, first = divmod(position, num_windows)
        count = min(BATCH, num_windows - first)
        yield [shuffled_index(epoch, num_windows, first + i) for i in range(count)]
        position += count


# ---- the same network in PyTorch, on the weights of the ONNX file ----------------------------------


def forward(w, ids):
    x = w["wte.weight"][ids] + w["wpe.weight"]
    for i in range(LAYERS):
        name = f"h.{i}"
        y = F.layer_norm(x, (HIDDEN,), w[name + ".ln_1.weight"], w[name + ".ln_1.bias"])
        q, k, v = (
            (y @ w[f"{name}.attn.{part}.weight"] + w[f"{name}.attn.{part}.bias"])
            .view(len(ids), SEQ, HEADS, HIDDEN // HEADS).transpose(1, 2) for part in "qkv")
        scores = q @ k.transpose(2, 3) / math.sqrt(HIDDEN // HEADS)
        ahead = torch.ones(SEQ, SEQ, dtype=torch.bool).triu(1)
        attention = scores.masked_fill(ahead, -math.inf).softmax(-1) @ v
        y = attention.transpose(1, 2).reshape(len(ids), SEQ, HIDDEN)
        x = x + y @ w[name + ".attn.proj.weight"] + w[name + ".attn.proj.bias"]
        y = F.layer_norm(x, (HIDDEN,), w[name + ".ln_2.weight"], w[name + ".ln_2.bias"])
        y = y @ w[name + ".mlp.fc.weight"] + w[name + ".mlp.fc.bias"]
        y = 0.5 * y * (1 + torch.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y ** 3)))
        x = x + y @ w[name + ".mlp.proj.weight"] + w[name + ".mlp.proj.bias"]
    x = F.layer_norm(x, (HIDDEN,), w["ln_f.weight"], w["ln_f.bias"])
    return x @ w["wte.weight"].T


def loss_of(w, tokens, windows):
    starts = torch.tensor(windows)[:, None] * SEQ + torch.arange(SEQ)
    return F.cross_entropy(forward(w, tokens[starts]).flatten(0, 1), tokens[starts + 1].flatten())


def learning_rate(step, steps):
    if step < WARMUP:
        return LR * (step + 1) / WARMUP
    return LR * 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / (steps - WARMUP)))


def train_in_torch(model, train, held_out, steps):
    weights = {
        t.name: torch.tensor(onnx.numpy_helper.to_array(t)).requires_grad_()
        for t in onnx.load(str(model)).graph.initializer
        if t.data_type == onnx.TensorProto.FLOAT and re.match(r"(wte|wpe|h\.\d|ln_f)", t.name)}
    optimizer = torch.optim.AdamW(weights.values(), lr=LR, weight_decay=WEIGHT_DECAY)
    for step, windows in enumerate(batches((len(train) - 1) // SEQ, steps)):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps)
        optimizer.zero_grad()
        loss_of(weights, train, windows).backward()
        optimizer.step()
    count = (len(held_out) - 1) // SEQ
    with torch.no_grad():
        total = sum(float(loss_of(weights, held_out, range(i, min(i + 64, count)))) *
                    (min(i + 64, count) - i) for i in range(0, count, 64))
    return total / count


def train_in_trainrt(binary, model, folder, steps, threads):
    run([binary, "run", model, "--data", f"tokens:{folder / 'train.bin'}", "--batch-size", BATCH,
         "--steps", steps, "--lr", LR, "--weight-decay", WEIGHT_DECAY, "--lr-schedule", "cosine",
         "--warmup-steps", WARMUP, "--seed", SEED, "--threads", threads,
         "--export", folder / "trained.onnx"])
    out = run([binary, "eval", folder / "trained.onnx", "--data", f"tokens:{folder / 'held_out.bin'}",
               "--batch-size", 64, "--threads", threads])
    return float(re.search(r"^loss: (\S+)$", out, re.M).group(1))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("binary")
    parser.add_argument("text", type=pathlib.Path)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    text = args.text.read_text(encoding="utf-8", errors="replace")
    vocabulary = sorted(set(text))
    numbers = numpy.array([vocabulary.index(c) for c in text], numpy.uint16)
    cut = text.index(HELD_OUT)
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        numbers[:cut].tofile(folder / "train.bin")
        numbers[cut:].tofile(folder / "held_out.bin")
        model = folder / "gpt.onnx"
        run([args.binary, "model", "gpt2", "--layers", LAYERS, "--hidden", HIDDEN, "--heads", HEADS,
             "--ffn", 4 * HIDDEN, "--seq", SEQ, "--vocab", len(vocabulary), "-o", model])
        start = time.time()
        ours = train_in_trainrt(args.binary, model, folder, args.steps, args.threads)
        middle = time.time()
        tokens = torch.from_numpy(numbers.astype(numpy.int64))
        theirs = train_in_torch(model, tokens[:cut], tokens[cut:], args.steps)
        end = time.time()
    print(f"{args.steps} steps of {BATCH} x {SEQ} characters, {len(vocabulary)} kinds; held out: "
          f"{len(text) - cut} characters")
    print(f"validation loss: trainrt {ours:.4f} ({middle - start:.0f} s), "
          f"PyTorch {torch.__version__} {theirs:.4f} ({end - middle:.0f} s)")
    sys.exit(0 if ours <= theirs + BOUND else 1)


if __name__ == "__main__":
    main()
