"""Trains one workload with PyTorch under one setting and prints what it measured as JSON.

    torch_step.py WORKLOAD SETTING THREADS [--processor-time | --memory]

SETTING is `eager`, `compile` or `autotune` (torch.compile, mode max-autotune), with `+channels_last`
for that memory format. A step is what `trainrt run` does in one: forward, loss, backward, AdamW, the
loss read back. With --memory, allocations are traced instead of time.
"""

import json
import re
import sys
import time

import torch
from torch import nn
from torch.nn import functional

from workloads import WORKLOADS


def mlp():
    return nn.Sequential(nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(),
                         nn.Linear(1024, 10))


def cnn():
    def block(inputs, outputs):
        return [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs),
                nn.ReLU(), nn.MaxPool2d(2)]

    return nn.Sequential(*block(1, 16), *block(16, 32), nn.Flatten(), nn.Linear(32 * 49, 128),
                         nn.ReLU(), nn.Dropout(0.25), nn.Linear(128, 10))


class Block(nn.Module):
    """A basic block of a residual network."""

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False),
                                          nn.BatchNorm2d(outputs))

    def forward(self, x):
        y = functional.relu(self.bn1(self.conv1(x)), inplace=True)
        y = self.bn2(self.conv2(y))
        y += self.shortcut(x)
        return functional.relu(y, inplace=True)


def resnet18():
    layers = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True),
              nn.MaxPool2d(3, 2, 1)]
    inputs = 64
    for stage, outputs in enumerate((64, 128, 256, 512)):
        layers += [Block(inputs, outputs, 2 if stage > 0 else 1), Block(outputs, outputs, 1)]
        inputs = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000))


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        batch, length, width = x.shape
        parts = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class DecoderBlock(nn.Module):
    def __init__(self, width, heads, ffn):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.up, self.down = nn.Linear(width, ffn), nn.Linear(ffn, width)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(functional.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Gpt(nn.Module):
    def __init__(self, layers=4, width=256, heads=8, ffn=1024, vocab=1024, length=128):
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.positions = nn.Parameter(torch.randn(length, width) * 0.02)
        self.blocks = nn.Sequential(*[DecoderBlock(width, heads, ffn) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)

    def forward(self, ids):
        x = self.norm(self.blocks(self.tokens(ids) + self.positions))
        return functional.linear(x, self.tokens.weight)


NETWORKS = {
    "mlp": mlp,
    "cnn": cnn,
    "resnet18": resnet18,
    "gpt": Gpt,
    "chargpt": lambda: Gpt(width=128, heads=4, ffn=512, vocab=96),
    "midgpt": lambda: Gpt(layers=6, width=384, heads=6, ffn=1536, vocab=96, length=256),
}


class Step:
    """A network, its optimizer and one batch."""

    def __init__(self, name, setting):
        work = WORKLOADS[name]
        mode, *rest = setting.split("+")
        channels_last = rest == ["channels_last"]
        if mode not in ("eager", "compile", "autotune") or (rest and not channels_last):
            sys.exit(f"unknown setting '{setting}'")
        torch.manual_seed(0)
        self.network = NETWORKS[name]()
        found = sum(p.numel() for p in self.network.parameters())
        if found != work.parameters:
            sys.exit(f"{name}: PyTorch's network has {found} parameters, wanted {work.parameters}")
        if name.endswith("gpt"):
            self.x = torch.randint(work.classes, [work.batch, *work.input_shape])
            self.labels = torch.randint(work.classes, [work.batch, *work.input_shape]).flatten()
        else:
            self.x = torch.rand([work.batch, *work.input_shape])
            self.labels = torch.randint(work.classes, [work.batch])
        if channels_last:
            self.network = self.network.to(memory_format=torch.channels_last)
            self.x = self.x.to(memory_format=torch.channels_last)
        self.optimizer = torch.optim.AdamW(self.network.parameters(), lr=1e-3, fused=True)
        self.loss = self.compute_loss
        if mode != "eager":
            self.loss = torch.compile(self.compute_loss,
                                      mode="max-autotune" if mode == "autotune" else "default")

    def compute_loss(self, x, labels):
        scores = self.network(x)
        return functional.cross_entropy(scores.reshape(-1, scores.shape[-1]), labels)

    def __call__(self):
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss(self.x, self.labels)
        loss.backward()
        self.optimizer.step()
        return loss.item()


def resident_bytes(field):
    status = open("/proc/self/status").read()
    return int(re.search(rf"{field}:\s+(\d+) kB", status).group(1)) * 1024


def measure_time(name, setting, clock):
    work = WORKLOADS[name]
    before = resident_bytes("VmRSS")
    step = Step(name, setting)
    for _ in range(work.warm_up):
        step()
    with open("/proc/self/clear_refs", "w") as refs:
        refs.write("5")  # the peak starts anew: compiling is over
    seconds = []
    for _ in range(work.steps):
        start = clock()
        step()
        seconds.append(clock() - start)
    return {"step_seconds": seconds, "resident_bytes": resident_bytes("VmHWM") - before}


def measure_memory(name, setting):
    """The most bytes that PyTorch's CPU allocator had given out at a time."""
    if not setting.startswith("eager"):  # compiled once before, so that only steps are traced
        Step(name, setting)()
    with torch.profiler.profile(profile_memory=True) as profiler:
        step = Step(name, setting)
        for _ in range(2):
            step()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return {"tensor_bytes": peak}


def measure_peak(clock):
    """The matrix product of this machine, FLOP/s: what a perfect step would run at."""
    a, b = torch.rand(1536, 1536), torch.rand(1536, 1536)
    best = 1e9
    for _ in range(30):
        start = clock()
        torch.mm(a, b)
        best = min(best, clock() - start)
    return {"flops": 2 * 1536 ** 3 / best}


def main():
    name, setting, threads = sys.argv[1:4]
    torch.set_num_threads(int(threads))
    clock = time.process_time if sys.argv[4:] == ["--processor-time"] else time.perf_counter
    if name == "peak":
        result = measure_peak(clock)
    elif sys.argv[4:] == ["--memory"]:
        result = measure_memory(name, setting)
    else:
        result = measure_time(name, setting, clock)
    result["torch"] = torch.__version__
    print(json.dumps(result))


if __name__ == "__main__":
    main()
