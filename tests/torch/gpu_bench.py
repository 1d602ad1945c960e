"""Step time and memory of trainrt on one GPU, beside PyTorch (eager and compiled) where it is there.

Usage: gpu_bench.py TRAINRT. Prints one line per row as soon as it is known:
model | engine | median step, ms | peak memory, GiB.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

STEPS, WARM_UP = 20, 5
# Name, sizes for `trainrt model`, batch, precision.
MODELS = [
    ("gpt2-124m", ["gpt2-124m"], 8, "bf16"),
    ("gpt2-1.5b", ["gpt2-1.5b"], 2, "bf16"),
    ("resnet50", ["resnet50"], 64, "bf16"),
    ("bert-large", ["bert-large"], 8, "bf16"),
]


def row(model, engine, seconds, peak_bytes):
    print(f"{model} | {engine} | {1e3 * seconds:.2f} ms | {peak_bytes / 2**30:.2f} GiB", flush=True)


def run_trainrt(trainrt, name, arguments, batch, precision, folder):
    model, metrics = os.path.join(folder, "m.onnx"), os.path.join(folder, "m.jsonl")
    subprocess.run([trainrt, "model", *arguments, "-o", model], check=True, stdout=subprocess.DEVNULL)
    command = [trainrt, "run", model, "--devices", "cuda:0", "--precision", precision]
    command += ["--batch-size", str(batch), "--steps", str(STEPS), "--metrics", metrics]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        print(f"{name} | trainrt | FAILED: {done.stderr.strip().splitlines()[-1]} |", flush=True)
        return
    with open(metrics) as lines:
        steps = [json.loads(line) for line in lines]
    seconds = [step["step_seconds"] for step in steps[WARM_UP:]]
    row(name, "trainrt", statistics.median(seconds), steps[-1]["peak_bytes"][0])


def torch_model(name):
    import torchvision
    import transformers

    if name == "resnet50":
        return torchvision.models.resnet50().cuda().to(memory_format=__import__("torch").channels_last)
    if name == "bert-large":
        sizes = dict(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)
        return transformers.BertForMaskedLM(transformers.BertConfig(**sizes)).cuda()
    sizes = dict(n_embd=768, n_layer=12, n_head=12)
    if name == "gpt2-1.5b":
        sizes = dict(n_embd=1600, n_layer=48, n_head=25)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).cuda()


def run_torch(name, batch, compiled):
    import torch

    model = torch_model(name)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    if name == "resnet50":
        x = torch.randn(batch, 3, 224, 224, device="cuda").to(memory_format=torch.channels_last)
        y = torch.randint(0, 1000, (batch,), device="cuda")
        loss_of = lambda: torch.nn.functional.cross_entropy(model(x), y)
    else:
        ids = torch.randint(0, 30000, (batch, 512 if name == "bert-large" else 1024), device="cuda")
        loss_of = lambda: model(input_ids=ids, labels=ids).loss
    forward = torch.compile(loss_of) if compiled else loss_of
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
    row(
        name,
        "torch.compile" if compiled else "torch",
        statistics.median(times[WARM_UP:]),
        torch.cuda.max_memory_allocated(),
    )


def main():
    trainrt = sys.argv[1]
    try:
        import torch

        has_torch = torch.cuda.is_available()
    except ImportError:
        has_torch = False
    for name, arguments, batch, precision in MODELS:
        with tempfile.TemporaryDirectory() as folder:
            run_trainrt(trainrt, name, arguments, batch, precision, folder)
        for compiled in (False, True) if has_torch else ():
            try:
                run_torch(name, batch, compiled)
            except Exception as error:  # a row that fails must not hide the others
                print(f"{name} | torch | FAILED: {error} |", flush=True)
    if not has_torch:
        print("torch | no PyTorch with CUDA here: its rows are left out | |", flush=True)


if __name__ == "__main__":
    main()
