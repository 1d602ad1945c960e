"""Step time and memory of trainrt on one GPU, beside PyTorch (eager and compiled) where it is there.

Usage: gpu_bench.py TRAINRT [--seconds N]. Prints one line per row as soon as it is known:
model | engine | median step, ms | peak memory, GiB. Every row is a process of its own, so that none
holds memory that another one measures, or takes it down; what does not fit into N seconds is left
out.
"""

import argparse
import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time

STEPS, WARM_UP = 20, 5
ROW_SECONDS = 240  # torch.compile takes minutes
# Name, batch, what PyTorch's model needs.
MODELS = [
    ("gpt2-124m", 8, "transformers"),
    ("resnet50", 64, "torchvision"),
    ("bert-large", 8, "transformers"),
    ("gpt2-1.5b", 2, "transformers"),
]
ENGINES = ("torch", "torch.compile")


def row(model, engine, seconds, peak_bytes):
    print(f"{model} | {engine} | {1e3 * seconds:.2f} ms | {peak_bytes / 2**30:.2f} GiB", flush=True)


def last_line(text):
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return lines[-1].replace("|", "/")[:200] if lines else "it said nothing"


def run(command, seconds):
    """Ends a process with all that it started when the time is over."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise RuntimeError(f"ended after {seconds:.0f} s") from None
    if process.returncode != 0:
        raise RuntimeError(f"exit code {process.returncode}: {last_line(err)}")
    return out


def run_trainrt(trainrt, name, batch, seconds):
    with tempfile.TemporaryDirectory() as folder:
        model, metrics = os.path.join(folder, "m.onnx"), os.path.join(folder, "m.jsonl")
        run([trainrt, "model", name, "-o", model], seconds)
        command = [trainrt, "run", model, "--devices", "cuda:0", "--precision", "bf16"]
        command += ["--batch-size", str(batch), "--steps", str(STEPS), "--metrics", metrics]
        run(command, seconds)
        with open(metrics) as lines:
            steps = [json.loads(line) for line in lines]
    times = [step["step_seconds"] for step in steps[WARM_UP:]]
    row(name, "trainrt", statistics.median(times), steps[-1]["peak_bytes"][0])


def torch_model(name):
    import torch

    if name == "resnet50":
        import torchvision

        return torchvision.models.resnet50().cuda().to(memory_format=torch.channels_last)
    import transformers

    if name == "bert-large":
        sizes = dict(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)
        none = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        return transformers.BertForMaskedLM(transformers.BertConfig(**sizes, **none)).cuda()
    sizes = dict(n_embd=768, n_layer=12, n_head=12)
    if name == "gpt2-1.5b":
        sizes = dict(n_embd=1600, n_layer=48, n_head=25)
    none = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **none)).cuda()


def run_torch(name, batch, engine):
    import torch

    model = torch_model(name).train()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    if name == "resnet50":
        x = torch.randn(batch, 3, 224, 224, device="cuda").to(memory_format=torch.channels_last)
        y = torch.randint(0, 1000, (batch,), device="cuda")
        loss_of = lambda: torch.nn.functional.cross_entropy(model(x), y)
    else:
        ids = torch.randint(0, 30000, (batch, 512 if name == "bert-large" else 1024), device="cuda")
        loss_of = lambda: model(input_ids=ids, labels=ids).loss
    forward = torch.compile(loss_of) if engine == "torch.compile" else loss_of
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(STEPS):
        start = time.perf_counter()
        with torch.autocast("cuda", torch.bfloat16):
            loss = forward()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    row(name, engine, statistics.median(times[WARM_UP:]), torch.cuda.max_memory_allocated())


def why_no_torch():
    """Nothing, where PyTorch can use the GPU."""
    if importlib.util.find_spec("torch") is None:
        return "no PyTorch here"
    try:
        out = run([sys.executable, "-c", "import torch; print(torch.cuda.is_available())"], 120)
    except RuntimeError as error:
        return f"PyTorch: {error}"
    return None if out.strip().endswith("True") else "PyTorch sees no GPU"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("trainrt")
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--torch", nargs=3, metavar=("MODEL", "BATCH", "ENGINE"), help="that row alone")
    args = parser.parse_args()
    if args.torch:
        run_torch(args.torch[0], int(args.torch[1]), args.torch[2])
        return
    end = time.monotonic() + args.seconds - 10
    no_torch = why_no_torch()

    def attempt(name, engine, fn):
        seconds = min(ROW_SECONDS, end - time.monotonic())
        if seconds < 10:
            print(f"{name} | {engine} | left out: no time |", flush=True)
            return
        try:
            fn(seconds)
        except Exception as error:  # a row that fails must not hide the others
            print(f"{name} | {engine} | FAILED: {error} |", flush=True)

    for name, batch, _ in MODELS:
        attempt(name, "trainrt", lambda seconds: run_trainrt(args.trainrt, name, batch, seconds))
    if no_torch:
        print(f"torch | left out: {no_torch} | |", flush=True)
        return
    for engine in ENGINES:
        for name, batch, package in MODELS:
            if importlib.util.find_spec(package) is None:
                print(f"{name} | {engine} | left out: no {package} here |", flush=True)
                continue
            own = [sys.executable, __file__, args.trainrt, "--torch", name, str(batch), engine]
            attempt(name, engine, lambda seconds: print(run(own, seconds), end="", flush=True))


if __name__ == "__main__":
    main()
