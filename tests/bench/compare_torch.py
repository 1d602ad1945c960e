"""Step time and peak memory of trainrt and of PyTorch, on the same cores in the same minutes.

    compare_torch.py build/trainrt [--workloads mlp,cnn,resnet18,gpt] [--settings S,...] [--rounds 3]
                     [--threads N] [--processor-time] [--no-memory]

Run it with a Python that has PyTorch. Every round runs trainrt once and PyTorch once per setting
(torch_step.py lists them), each in a process of its own, so that a slow minute of the machine meets
both. What counts is the median of all timed steps; PyTorch's is that of its best setting. On a busy
machine --processor-time compares the processor seconds of a step on one thread instead, which other
programs hardly change.

Memory: `planned` is trainrt's peak_bytes (all tensors and workspaces), held against the most bytes that
PyTorch's allocator had given out at a time (not what its libraries allocate themselves). `process`
compares what the system saw: all of trainrt's peak resident size, program and data set included,
against the growth of PyTorch's process since before the network was made.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

import numpy

from workloads import WORKLOADS

HERE = pathlib.Path(__file__).resolve().parent
SETTINGS = {
    "mlp": ["eager", "compile", "autotune"],
    "cnn": ["eager", "eager+channels_last", "compile", "compile+channels_last"],
    "resnet18": ["eager", "eager+channels_last", "compile", "compile+channels_last"],
    "chargpt": ["eager", "compile", "autotune"],
    "midgpt": ["eager", "compile", "autotune"],
    "gpt": ["eager", "compile", "autotune"],
}
SAMPLES = 8  # batches in the data set


def run(command, **options):
    result = subprocess.run([str(part) for part in command], capture_output=True, text=True, **options)
    if result.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}\nexited with {result.returncode}:\n"
                 f"{result.stdout[-2000:]}{result.stderr[-4000:]}")
    return result.stdout


class Trainrt:
    """The program, a model file and data for it."""

    def __init__(self, program, name, threads, folder):
        self.program, self.work, self.threads = program, WORKLOADS[name], threads
        self.model = folder / f"{name}.onnx"
        self.metrics = folder / f"{name}.jsonl"
        run([program, "model", *self.work.model, "-o", self.model])
        self.data = self.write_data(name, folder)

    def write_data(self, name, folder):
        work = self.work
        random = numpy.random.default_rng(0)
        if name.endswith("gpt"):
            path = folder / "tokens.bin"
            count = work.batch * SAMPLES * work.input_shape[0] + 1
            random.integers(work.classes, size=count, dtype=numpy.uint16).tofile(path)
            return f"tokens:{path}"
        path = folder / f"{name}.npz"
        samples = work.batch * SAMPLES
        numpy.savez(path, input=random.integers(256, size=[samples, *work.input_shape], dtype=numpy.uint8),
                    labels=random.integers(work.classes, size=samples))
        return str(path)

    def common(self):
        return ["--batch-size", self.work.batch, "--micro-batch-size", self.work.batch]

    def flops(self):
        report = json.loads(run([self.program, "plan", self.model, *self.common(), "--cluster", "cpu:1",
                                 "--format", "json"]))
        return report["predicted"]["model_flops"]

    def run(self, steps):
        """Rows of the metrics, and the resources that the process used."""
        process = subprocess.Popen(
            [str(part) for part in
             [self.program, "run", self.model, "--data", self.data, *self.common(), "--optimizer", "adamw",
              "--lr", "1e-3", "--devices", "cpu", "--threads", self.threads, "--steps", steps,
              "--metrics", self.metrics]],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        output = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        if status != 0:
            sys.exit(f"{self.program} run {self.model} failed:\n{output[-4000:]}")
        return [json.loads(line) for line in self.metrics.read_text().splitlines()], usage

    def measure(self, processor_time):
        work = self.work
        rows, usage = self.run(work.warm_up + work.steps)
        seconds = [row["step_seconds"] for row in rows[work.warm_up:]]
        if processor_time:  # of the whole process, loading of data included
            _, short = self.run(work.warm_up)
            used = usage.ru_utime + usage.ru_stime - short.ru_utime - short.ru_stime
            seconds = [used / work.steps]
        return {"step_seconds": seconds, "tensor_bytes": max(rows[0]["peak_bytes"]),
                "resident_bytes": usage.ru_maxrss * 1024}


def torch_step(*arguments):
    output = run([sys.executable, HERE / "torch_step.py", *arguments], cwd=HERE)
    return json.loads(output.splitlines()[-1])


def compare(program, name, settings, arguments, peak, folder):
    ours = Trainrt(program, name, arguments.threads, folder)
    own_times, torch_times = [], {setting: [] for setting in settings}
    own, resident = {}, {}
    for _ in range(arguments.rounds):
        own = ours.measure(arguments.processor_time)
        own_times += own["step_seconds"]
        for setting in settings:
            result = torch_step(name, setting, arguments.threads, *arguments.clock)
            torch_times[setting] += result["step_seconds"]
            resident[setting] = result["resident_bytes"]
    medians = {setting: statistics.median(times) for setting, times in torch_times.items()}
    best = min(medians, key=medians.get)
    row = {"workload": name, "trainrt_seconds": statistics.median(own_times),
           "torch_seconds": medians[best], "setting": best,
           "trainrt_bytes": own["tensor_bytes"], "trainrt_resident": own["resident_bytes"],
           "torch_resident": resident[best]}
    if not arguments.no_memory:
        row["torch_bytes"] = torch_step(name, best, arguments.threads, "--memory")["tensor_bytes"]
    rate = ours.flops() / row["trainrt_seconds"]
    for setting, seconds in sorted(medians.items(), key=lambda item: item[1]):
        print(f"  {name} {setting}: {seconds * 1e3:.2f} ms", file=sys.stderr)
    mib = 2.0 ** 20
    memory = "-"
    if "torch_bytes" in row:
        memory = (f"{row['trainrt_bytes'] / mib:.0f} / {row['torch_bytes'] / mib:.0f} MiB = "
                  f"{row['trainrt_bytes'] / row['torch_bytes']:.2f}")
    print(f"| {name} | {row['trainrt_seconds'] * 1e3:.2f} | {row['torch_seconds'] * 1e3:.2f} ({best}) | "
          f"{row['trainrt_seconds'] / row['torch_seconds']:.2f} | "
          f"{rate / 1e9:.0f} GFLOP/s, {100 * rate / peak:.0f} % | {memory} | "
          f"{row['trainrt_resident'] / mib:.0f} / {row['torch_resident'] / mib:.0f} MiB |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("program", type=pathlib.Path)
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--settings", help="PyTorch's settings to try; default: all that apply")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--processor-time", action="store_true",
                        help="processor seconds of one thread instead of time")
    parser.add_argument("--no-memory", action="store_true", help="leave out PyTorch's traced memory")
    arguments = parser.parse_args()
    if arguments.processor_time:
        arguments.threads = 1
    arguments.clock = ["--processor-time"] if arguments.processor_time else []
    peak = torch_step("peak", "-", arguments.threads, *arguments.clock)
    print(f"torch {peak['torch']}, {arguments.threads} threads, matrix product at "
          f"{peak['flops'] / 1e9:.0f} GFLOP/s")
    print("| workload | trainrt ms | torch ms (setting) | ratio | rate, share of peak | planned peak | "
          "process |\n|---|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.workloads.split(","):
            if name not in WORKLOADS:
                sys.exit(f"unknown workload '{name}'; there are {', '.join(WORKLOADS)}")
            settings = arguments.settings.split(",") if arguments.settings else SETTINGS[name]
            compare(arguments.program.resolve(), name, settings, arguments, peak["flops"],
                    pathlib.Path(folder))


if __name__ == "__main__":
    main()
