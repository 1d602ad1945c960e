"""Step time, memory and MFU of trainrt on one GPU, beside PyTorch (eager and compiled) where it is.

Usage: gpu_bench.py TRAINRT [--seconds N] [--dry]. Prints one line per row as soon as it is known:
model | engine | median step, ms | peak memory, GiB | MFU. A model's rows of one side are a process
of their own, so that none holds memory that the other side measures, or takes it down; what does
not fit into N seconds is left out. "plan" is what `trainrt plan` predicts for this GPU.

MFU counts the products that the model's definition needs, whatever an engine recomputes, and is of
the GPU's dense bf16 peak; both are those of `trainrt plan`.

--dry: without a GPU, tiny models on the CPU, to see that all of this works; exit code 1 when a row
of trainrt fails.
"""

import argparse
import dataclasses
import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time

STEPS, WARM_UP = 14, 4
ROW_SECONDS = 180  # torch.compile takes minutes
ENGINES = ("torch", "torch.compile")
CLASSES = 1000


@dataclasses.dataclass
class Model:
    name: str
    batch: int
    layers: int = 0
    hidden: int = 0
    heads: int = 0
    vocab: int = 0
    seq: int = 0
    image: int = 0

    def title(self):
        return f"{self.name}, batch {self.batch}"


# What the time may not suffice for stands last: it takes PyTorch over a minute to compile 48 layers.
MODELS = [
    Model("gpt2-1.5b", 8, layers=48, hidden=1600, heads=25, vocab=50257, seq=1024),
    Model("gpt2-124m", 8, layers=12, hidden=768, heads=12, vocab=50257, seq=1024),
    Model("resnet50", 64, image=224),
    Model("bert-large", 8, layers=24, hidden=1024, heads=16, vocab=30522, seq=512),
    Model("gpt2-1.5b", 16, layers=48, hidden=1600, heads=25, vocab=50257, seq=1024),
]


def tiny(model):
    if model.image > 0:
        return dataclasses.replace(model, batch=2, image=32)
    return dataclasses.replace(model, batch=2, layers=2, hidden=32, heads=2, vocab=64, seq=16)


def print_row(model, engine, seconds, peak_bytes, figures):
    mfu = f"{figures['flops'] / seconds / figures['peak']:.1%}" if figures else "?"
    time_text = f"{1e3 * seconds:.2f} ms"
    print(f"{model.title()} | {engine} | {time_text} | {peak_bytes / 2**30:.2f} GiB | {mfu}", flush=True)


def last_line(text):
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return lines[-1].replace("|", "/")[:200] if lines else "it said nothing"


def end_group(process):
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # it has ended by itself


def run(command, seconds, on_line=None):
    """Ends a process with all that it started when the time is over. `on_line` gets each line of
    stdout when it is there."""
    with tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=err, text=True, start_new_session=True
        )
        timer = threading.Timer(max(seconds, 0), end_group, [process])
        timer.start()
        lines = []
        for line in process.stdout:
            lines.append(line)
            if on_line:
                on_line(line)
        process.wait()
        late = not timer.is_alive()
        timer.cancel()
        if late:
            raise RuntimeError(f"ended after {seconds:.0f} s")
        if process.returncode != 0:
            err.seek(0)
            raise RuntimeError(f"exit code {process.returncode}: {last_line(err.read())}")
    return "".join(lines)


class TrainrtSide:
    """Model files are written once and stay until the end."""

    def __init__(self, trainrt, folder, dry):
        self.trainrt, self.folder, self.dry = trainrt, folder, dry
        self.figures = {}  # by title: the model's flops per step, the GPU's peak
        self.cluster = os.path.join(folder, "cluster.yaml")
        self.has_cluster = False

    def model_file(self, model, seconds):
        path = os.path.join(self.folder, f"{model.name}.onnx")
        if not os.path.exists(path):
            command = [self.trainrt, "model", model.name, "--external-weights", "-o", path]
            if self.dry:
                for size in ("layers", "hidden", "heads", "vocab", "seq", "image"):
                    value = getattr(model, size)
                    command += [f"--{size}", str(value)] if value > 0 else []
            run(command, seconds)
        return path

    def plan(self, model, seconds):
        """The row that a plan predicts, and what MFU is reckoned from."""
        if not self.has_cluster:
            gpus = json.loads(run([self.trainrt, "doctor", "--format", "json"], 60))["gpus"]
            gpu = "H100" if self.dry else gpus[0]["name"]
            with open(self.cluster, "w") as out:
                out.write(f"hosts: [{{devices: [{{type: {json.dumps(gpu)}}}]}}]\n")
            self.has_cluster = True
        command = [self.trainrt, "plan", self.model_file(model, seconds), "--format", "json"]
        command += ["--cluster", self.cluster, "--batch-size", str(model.batch), "--precision", "bf16"]
        predicted = json.loads(run(command, seconds))["predicted"]
        peak = predicted["model_flops_per_second_per_device"] / predicted["mfu"]
        figures = {"flops": predicted["model_flops"], "peak": peak}
        self.figures[model.title()] = figures
        print_row(model, "plan", predicted["step_seconds"], predicted["peak_bytes_max"], figures)

    def measure(self, model, seconds):
        path, metrics = self.model_file(model, seconds), os.path.join(self.folder, "m.jsonl")
        command = [self.trainrt, "run", path, "--batch-size", str(model.batch), "--metrics", metrics]
        command += ["--steps", str(STEPS)]
        command += ["--devices", "cpu"] if self.dry else ["--devices", "cuda:0", "--precision", "bf16"]
        run(command, seconds)
        with open(metrics) as lines:
            steps = [json.loads(line) for line in lines]
        median = statistics.median([step["step_seconds"] for step in steps[WARM_UP:]])
        print_row(model, "trainrt", median, steps[-1]["peak_bytes"][0], self.figures.get(model.title()))


# ---- PyTorch's side: in a process of its own


def transformer(model):
    """GPT-2 or BERT as trainrt's `models` build them, a head tied to the embedding included."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    is_gpt, hidden, heads = model.name.startswith("gpt"), model.hidden, model.heads
    epsilon = 1e-5 if is_gpt else 1e-12

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm_1 = nn.LayerNorm(hidden, eps=epsilon)
            self.norm_2 = nn.LayerNorm(hidden, eps=epsilon)
            self.qkv = nn.Linear(hidden, 3 * hidden)
            self.proj = nn.Linear(hidden, hidden)
            self.fc = nn.Linear(hidden, 4 * hidden)
            self.out = nn.Linear(4 * hidden, hidden)

        def attention(self, x):
            batch, seq, _ = x.shape
            qkv = self.qkv(x).view(batch, seq, 3, heads, hidden // heads).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(*qkv.unbind(0), is_causal=is_gpt)
            return self.proj(y.transpose(1, 2).reshape(batch, seq, hidden))

        def feed_forward(self, x):
            return self.out(F.gelu(self.fc(x), approximate="tanh" if is_gpt else "none"))

        def forward(self, x):
            if is_gpt:
                x = x + self.attention(self.norm_1(x))
                return x + self.feed_forward(self.norm_2(x))
            x = self.norm_1(x + self.attention(x))
            return self.norm_2(x + self.feed_forward(x))

    class Transformer(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens = nn.Embedding(model.vocab, hidden)
            self.places = nn.Parameter(torch.zeros(model.seq, hidden))
            self.blocks = nn.ModuleList(Block() for _ in range(model.layers))
            self.norm = nn.LayerNorm(hidden, eps=epsilon)
            if not is_gpt:
                self.segments = nn.Embedding(2, hidden)
                self.transform = nn.Linear(hidden, hidden)
                self.transform_norm = nn.LayerNorm(hidden, eps=epsilon)
                self.bias = nn.Parameter(torch.zeros(model.vocab))
            nn.init.normal_(self.tokens.weight, std=0.02)

        def forward(self, ids):
            x = self.tokens(ids) + self.places
            if is_gpt:
                for block in self.blocks:
                    x = block(x)
                return F.linear(self.norm(x), self.tokens.weight)
            x = self.norm(x + self.segments(torch.zeros_like(ids)))
            for block in self.blocks:
                x = block(x)
            x = self.transform_norm(F.gelu(self.transform(x)))
            return F.linear(x, self.tokens.weight, self.bias)

    return Transformer()


def torch_work(model, device):
    """The model, and a function that gives its loss on a fixed batch."""
    import torch
    from torch.nn import functional as F

    with torch.device(device):
        if model.image > 0:
            import torchvision

            net = torchvision.models.resnet50(num_classes=CLASSES).to(memory_format=torch.channels_last)
            x = torch.randn(model.batch, 3, model.image, model.image)
            x = x.to(memory_format=torch.channels_last)
            y = torch.randint(0, CLASSES, (model.batch,))
            return net, lambda: F.cross_entropy(net(x), y)
        net = transformer(model)
        ids = torch.randint(0, model.vocab, (model.batch, model.seq))
        return net, lambda: F.cross_entropy(net(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def run_torch(model, figures, dry):
    import torch

    device = "cpu" if dry else "cuda"
    net, loss_of = torch_work(model, device)
    optimizer = torch.optim.AdamW(net.train().parameters(), fused=not dry)

    def measure(engine):
        forward = torch.compile(loss_of) if engine == "torch.compile" else loss_of
        times = []
        for step in range(STEPS):
            if not dry and step == WARM_UP:
                torch.cuda.reset_peak_memory_stats()
            start = time.perf_counter()
            with torch.autocast(device, torch.bfloat16):
                loss = forward()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            loss.item()  # waits
            times.append(time.perf_counter() - start)
        peak = 0 if dry else torch.cuda.max_memory_allocated()
        print_row(model, engine, statistics.median(times[WARM_UP:]), peak, figures)

    for engine in ENGINES[: 1 if dry else None]:
        try:
            measure(engine)
        except Exception as error:  # of one engine must not hide the other
            print(f"{model.title()} | {engine} | FAILED: {last_line(str(error))} |", flush=True)
            optimizer.zero_grad()
            if not dry:
                torch.cuda.empty_cache()


def why_no_torch(dry):
    """Nothing, where PyTorch can be used."""
    if importlib.util.find_spec("torch") is None:
        return "no PyTorch here"
    code = "import torch; print(torch.__version__.split('.')[0], torch.cuda.is_available())"
    try:
        words = run([sys.executable, "-c", code], 120).split()
    except RuntimeError as error:
        return f"PyTorch: {error}"
    if int(words[-2]) < 2:
        return "PyTorch is older than 2.0"
    return None if dry or words[-1] == "True" else "PyTorch sees no GPU"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("trainrt")
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--torch", nargs=2, metavar=("ROW", "FIGURES"), help="PyTorch's rows of one model")
    args = parser.parse_args()
    models = [tiny(model) for model in MODELS] if args.dry else MODELS
    if args.torch:
        run_torch(models[int(args.torch[0])], json.loads(args.torch[1]), args.dry)
        return
    end = time.monotonic() + args.seconds - 5
    no_torch = why_no_torch(args.dry)
    done = 0

    def attempt(model, engine, fn):
        seconds = min(ROW_SECONDS, end - time.monotonic())
        if seconds < 10:
            print(f"{model.title()} | {engine} | left out: no time (--seconds) |", flush=True)
            return 0
        try:
            fn(seconds)
            return 1
        except Exception as error:  # a row that fails must not hide the others
            print(f"{model.title()} | {engine} | FAILED: {error} |", flush=True)
            return 0

    with tempfile.TemporaryDirectory() as folder:
        side = TrainrtSide(args.trainrt, folder, args.dry)
        for model in models:
            done += attempt(model, "plan", lambda seconds: side.plan(model, seconds))
            done += attempt(model, "trainrt", lambda seconds: side.measure(model, seconds))
    if no_torch:
        print(f"torch | left out: {no_torch} | | |", flush=True)
    for row, model in enumerate(models):
        if no_torch:
            break
        if model.image > 0 and importlib.util.find_spec("torchvision") is None:
            print(f"{model.title()} | torch | left out: no torchvision here |", flush=True)
            continue
        figures = json.dumps(side.figures.get(model.title()))
        own = [sys.executable, __file__, args.trainrt, "--torch", str(row), figures]
        own += ["--dry"] if args.dry else []
        show = lambda line: print(line, end="", flush=True)
        attempt(model, "torch", lambda seconds: run(own, seconds, show))
    if args.dry and done < 2 * len(models):
        sys.exit(1)


if __name__ == "__main__":
    main()
