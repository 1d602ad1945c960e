"""What uneven shares are worth, in two tables.

    balance.py build/trainrt [--steps 12]

Devices: three CPU ranks of one machine, one of them with half the speed or with 60 % of the memory that
an even split needs. The even split (--shares 1,1,1) against the shares that the planner gives. A device
of half the speed sleeps as long as it works, so the ranks' own times are real even where cores are
fewer than ranks; `slowest` is the slowest rank's computing time in a step, which is what a step takes
when each rank has a core of its own.

Tokens: a corpus whose lengths have a long tail (log-normal, as of documents), cut at the model's
longest. --max-tokens against batches of equally many samples for each rank, padded to the longest
sample that a rank runs at once. `padding` counts tokens that are none; `slowest` the tokens, with
padding, of the rank that has the most, over all steps.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import tempfile

import numpy

RANKS = 3


def start(*words):
    return subprocess.run([str(word) for word in words], capture_output=True, text=True)


def run(*words):
    result = start(*words)
    if result.returncode != 0:
        raise SystemExit(f"{' '.join(map(str, words))}\n{result.stderr[-3000:]}")
    return result


def metrics(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def rank_seconds(trace):
    """Seconds of computing of each rank in each step but the first two, from a --trace file."""
    events = [e for e in json.loads(trace.read_text()) if e.get("ph") == "X" and e["cat"] == "compute"]
    steps = sorted({e["args"]["step"] for e in events})[2:]
    return [[sum(e["dur"] for e in events if e["pid"] == rank and e["args"]["step"] == step) * 1e-6
             for rank in range(RANKS)] for step in steps]


def devices_table(program, folder, steps):
    model = folder / "cnn.onnx"  # whose activations outweigh its parameters
    run(program, "model", "cnn", "-o", model)
    common = ["run", model, "--dp", RANKS, "--batch-size", 192, "--threads", 1, "--steps", steps]

    def measured(cluster, *words):
        trace = folder / "trace.json"
        result = start(program, *common, "--cluster", cluster, "--trace", trace, *words)
        if result.returncode != 0:
            return result, None
        seconds = rank_seconds(trace)
        return result, min(max(step) for step in seconds)  # noise only adds

    print("| devices | even split | planned | even / planned |\n|---|---|---|---|", flush=True)
    half = folder / "half.yaml"
    half.write_text("hosts:\n  - count: 1\n    devices: [{count: 2, type: cpu}, "
                    "{count: 1, type: cpu, speed: 0.5}]\n")
    _, even = measured(half, "--shares", "1,1,1", "--micro-batch-size", 8)
    _, planned = measured(half, "--micro-batch-size", 8)
    print(f"| one of half the speed | {even * 1e3:.1f} ms | {planned * 1e3:.1f} ms | {even / planned:.2f} |")

    # What the even split needs, and a device with 60 % of it.
    log = folder / "even.jsonl"
    run(program, *common, "--devices", f"cpu:{RANKS}", "--shares", "1,1,1", "--micro-batch-size", 64,
        "--metrics", log)
    peak = max(metrics(log)[0]["peak_bytes"])
    small = folder / "small.yaml"
    small.write_text(f"hosts:\n  - count: 1\n    devices: [{{count: 2, type: cpu, memory: {2 * peak}}}, "
                     f"{{count: 1, type: cpu, memory: {int(0.6 * peak)}}}]\n")
    even, _ = measured(small, "--shares", "1,1,1", "--micro-batch-size", 64)
    result, planned = measured(small)
    print(f"| one of 60 % of the memory | exit {even.returncode} | "
          f"{'exit %d' % result.returncode if planned is None else '%.1f ms' % (planned * 1e3)} | |")
    print("\n  even split:", next(line for line in even.stderr.splitlines() if line.startswith("error")))


def tokens_table(program, folder):
    longest, budget, batch, samples = 256, 2048, 96, 1152
    random = numpy.random.RandomState(1)
    lengths = numpy.clip(random.lognormal(numpy.log(48), 0.8, samples).astype(int), 4, longest)
    tokens = random.randint(0, 512, (samples, longest))
    labels = numpy.full((samples, longest), -100)
    for i, length in enumerate(lengths):
        labels[i, :length - 1] = tokens[i, 1:length]
    data, model, log = folder / "corpus.npz", folder / "gpt.onnx", folder / "tokens.jsonl"
    numpy.savez(data, tokens=tokens, labels=labels, lengths=lengths)
    run(program, "model", "gpt2", "--symbolic-seq", "--layers", 2, "--hidden", 64, "--heads", 4, "--vocab",
        512, "--seq", longest, "-o", model)
    common = ["run", model, "--data", data, "--input", "input_ids=tokens", "--bind", f"sequence={longest}",
              "--devices", f"cpu:{RANKS}", "--dp", RANKS, "--batch-size", batch, "--threads", 1,
              "--metrics", log]
    run(program, *common, "--max-tokens", budget)
    by_tokens = metrics(log)
    padded = [step["padded_tokens"] for step in by_tokens]
    real = sum(step["tokens"] for step in by_tokens)
    assert real == lengths.sum()

    # The same samples in equal numbers, as many at once as the budget holds of the longest, padded to the
    # longest of those.
    at_once = budget // longest
    order = random.permutation(samples)
    equal, whole = [], []
    for first in range(0, samples, batch):
        step = lengths[order[first:first + batch]]
        equal.append([sum(part.max() * len(part) for part in numpy.split(own, range(at_once, len(own), at_once)))
                      for own in numpy.array_split(step, RANKS)])
        whole.append([longest * len(own) for own in numpy.array_split(step, RANKS)])

    def row(name, counts):
        total, slowest = numpy.sum(counts), sum(max(step) for step in counts)
        print(f"| {name} | {total} | {(total - real) / real:.0%} | {slowest} |")
        return total - real, slowest

    print(f"\n{samples} samples of {real} tokens, at most {longest} each, batch {batch}, {RANKS} ranks\n")
    print("| batches | tokens run | padding | slowest |\n|---|---|---|---|")
    row("equal samples, padded to the model's longest", whole)
    sample_padding, sample_slowest = row("equal samples, padded to their own longest", equal)
    padding, slowest = row(f"--max-tokens {budget}", padded)
    print(f"\npadding {1 - padding / sample_padding:.0%} less, the slowest rank's work "
          f"{1 - slowest / sample_slowest:.0%} less than by samples")
    run(program, *common, "--micro-batch-size", at_once)
    seconds = [statistics.median(step["step_seconds"] for step in steps[2:])
               for steps in (metrics(log), by_tokens)]
    print(f"step on this machine: {seconds[0] * 1e3:.0f} ms padded to the longest, "
          f"{seconds[1] * 1e3:.0f} ms with --max-tokens")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", type=pathlib.Path)
    parser.add_argument("--steps", type=int, default=12)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        devices_table(arguments.program, pathlib.Path(name), arguments.steps)
        tokens_table(arguments.program, pathlib.Path(name))
