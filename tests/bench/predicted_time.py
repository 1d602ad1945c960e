"""Predicted against measured step time on this machine.

    predicted_time.py build/trainrt FOLDER [--seconds 140] [--models mlp,cnn,gpt]
                      [--devices cpu:1,cpu:2,nproc:2] [--rounds 4] [--report] [--attribute]

For each kind of device: `trainrt profile`, then for each layout `trainrt plan` with everything pinned, and
`trainrt run` of that plan. Layouts take turns: every round runs each of them once in a process of its own,
so that a slow minute of the machine does not meet one layout alone. A run counts with the median of its steps,
a layout with its fastest run, since other programs only ever add time. Whatever was measured is kept in FOLDER, and a call ends after --seconds, so the
table can be made in parts; --report prints it. --attribute compares traces instead (compare_traces.py).

Prints both times of each layout and their ratio, and by model and by kind of device the share of layouts
within 15 % and Kendall's tau between the orders in which prediction and measurement put the layouts: of all
pairs, and of those that the measurement puts more than 10 % apart. Beside it the same tau between the first
and the second half of the rounds: how well the measurement knows its own order.
"""

import argparse
import array
import itertools
import json
import pathlib
import random
import statistics
import subprocess
import sys
import time
import zipfile

HERE = pathlib.Path(__file__).resolve().parent
WARM_UP = 3
BATCHES = 4  # in the data set

STEPS = {"mlp": 60, "cnn": 90, "gpt": 15}  # of a run: about a second

# name: (arguments of `trainrt model`, batch size)
MODELS = {
    "mlp": (["mlp", "--layers", 4, "--hidden", 512], 256),
    "cnn": (["cnn", "--layers", 3, "--hidden", 16], 64),
    "gpt": (["gpt2", "--layers", 4, "--hidden", 128, "--heads", 4, "--vocab", 1024, "--seq", 128], 16),
}


def layouts(devices, batch):
    """Name -> flags of the layouts that a kind of device can have."""
    quarter = ["--micro-batch-size", batch // 4]
    eighth = ["--micro-batch-size", batch // 8]
    if devices == "cpu:1":
        return {"whole batch": ["--micro-batch-size", batch],
                "4 micro-batches": quarter,
                "recompute": [*quarter, "--recompute", "full"]}
    split = {"dp 2": ["--dp", 2, "--micro-batch-size", batch // 2],
             "dp 2, 4 micro-batches": ["--dp", 2, *eighth],
             "dp 2, zero 2": ["--dp", 2, "--zero", 2, "--micro-batch-size", batch // 2],
             "tp 2": ["--tp", 2, "--micro-batch-size", batch]}
    for schedule in ["gpipe", "1f1b", "zb-h1", "2bw"]:
        split[f"pp 2, {schedule}"] = ["--pp", 2, "--schedule", schedule, *quarter]
    split["pp 2, interleaved"] = ["--pp", 2, "--schedule", "interleaved", "--virtual-stages", 2, *quarter]
    return split


class Failed(Exception):
    pass


def run(*words):
    result = subprocess.run([str(word) for word in words], capture_output=True, text=True)
    if result.returncode != 0:
        raise Failed(f"{' '.join(map(str, words))}\n{result.stderr[-300:]}")
    return result.stdout


def ranks_of(devices):
    return ["--nproc", 2] if devices.startswith("nproc") else ["--devices", devices]


def npy(kind, shape, values):
    """NumPy's file format, version 1."""
    header = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}"
    header = header.ljust(117) + "\n"  # with the 10 bytes before it a multiple of 64
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + values.tobytes()


class Bench:
    def __init__(self, options):
        self.options, self.program, self.folder = options, options.program, options.folder
        self.folder.mkdir(parents=True, exist_ok=True)
        self.until = time.monotonic() + options.seconds
        self.cells = [(devices, model, layout)
                      for devices in options.devices.split(",")
                      for model in options.models.split(",")
                      for layout in layouts(devices, MODELS[model][1])]

    def out_of_time(self):
        return time.monotonic() > self.until

    def model_file(self, model):
        path = self.folder / f"{model}.onnx"
        if not path.exists():
            run(self.program, "model", *MODELS[model][0], "-o", path)
        return path

    # A file, so that reading it costs next to nothing: synthetic samples are drawn while training.
    def data(self, model):
        samples = MODELS[model][1] * BATCHES
        draw = random.Random(0)
        if model == "gpt":
            path = self.folder / "tokens.bin"
            if not path.exists():
                path.write_bytes(array.array("H", draw.choices(range(1024), k=samples * 128 + 1)).tobytes())
            return f"tokens:{path}"
        path = self.folder / f"{model}.npz"
        if not path.exists():
            shape = (samples, 784) if model == "mlp" else (samples, 1, 28, 28)
            pixels = array.array("f", (draw.gauss(0, 1) for _ in range(samples * 784)))
            labels = array.array("q", draw.choices(range(10), k=samples))
            with zipfile.ZipFile(path, "w") as file:
                file.writestr("input.npy", npy("<f4", shape, pixels))
                file.writestr("labels.npy", npy("<i8", (samples,), labels))
        return path

    def flags(self, devices, model, layout):
        batch = MODELS[model][1]
        return ["--data", self.data(model), "--batch-size", batch, "--precision", "fp32",
                *layouts(devices, batch)[layout]]

    def profile(self, devices):
        path = self.folder / f"{devices.replace(':', '_')}.yaml"
        if not path.exists():
            run(self.program, "profile", *ranks_of(devices), "-o", path)
        return path

    def stem(self, cell):
        return self.folder / "-".join(cell).replace(":", "_").replace(",", "").replace(" ", "_")

    # The prediction, anew each time; the plan stays as it was first made, since runs follow it.
    def predict(self, cell, *more):
        devices, model, layout = cell
        plan = self.stem(cell).with_suffix(".plan.json")
        pins = self.flags(*cell)
        if plan.exists():
            pins = ["--plan", plan, *self.flags(*cell)[:2]]
        report = run(self.program, "plan", self.model_file(model), "--cluster", self.profile(devices),
                     "--format", "json", "--what-if", "off", *pins, *more)
        if not plan.exists():
            plan.write_text(json.dumps(json.loads(report)["plan"]))
        return json.loads(report)["predicted"]["step_seconds"]

    def measure(self, cell, *more):
        devices, model, layout = cell
        log = self.stem(cell).with_suffix(".log")
        run(self.program, "run", self.model_file(model), *ranks_of(devices), "--data", self.data(model),
            "--batch-size", MODELS[model][1], "--plan", self.stem(cell).with_suffix(".plan.json"),
            "--steps", STEPS[model], "--metrics", log, *more)
        return [json.loads(line)["step_seconds"] for line in log.read_text().splitlines()][WARM_UP:]

    def measured_file(self, cell):
        return self.stem(cell).with_suffix(".measured.json")

    def rounds(self, cell):
        path = self.measured_file(cell)
        return json.loads(path.read_text()) if path.exists() else []

    def work(self):
        for devices in self.options.devices.split(","):
            self.profile(devices)
            if self.out_of_time():
                return False
        for turn in range(self.options.rounds):
            # Another order each time: what disturbs comes and goes.
            for cell in random.Random(turn).sample(self.cells, len(self.cells)):
                known = self.rounds(cell)
                if len(known) > turn:
                    continue
                if self.out_of_time():
                    return False
                try:
                    if not self.stem(cell).with_suffix(".plan.json").exists():
                        self.predict(cell)
                    known.append(self.measure(cell))
                except Failed as failed:
                    print(failed, file=sys.stderr)
                    known.append([])
                self.measured_file(cell).write_text(json.dumps(known))
        return True

    def report(self):
        print("| model | devices | layout | predicted ms | measured ms | predicted / measured |")
        print("|---|---|---|---|---|---|")
        pairs = {}
        for cell in sorted(self.cells, key=lambda cell: cell[1]):
            steps = [statistics.median(one) for one in self.rounds(cell) if one]
            if not steps:
                print(f"| {cell[1]} | {cell[0]} | {cell[2]} | | | |")
                continue
            pair = self.predict(cell), min(steps)
            pairs[cell] = pair
            print(f"| {cell[1]} | {cell[0]} | {cell[2]} | {pair[0] * 1e3:.2f} | {pair[1] * 1e3:.2f} | "
                  f"{pair[0] / pair[1]:.2f} |", flush=True)
        print("\n| layouts | within 15 % | least | most | tau | tau, 10 % apart | of the measurement: tau "
              "| tau, 10 % apart |\n|---|---|---|---|---|---|---|---|")
        self.summarize("all", pairs, ranked=False)
        models, kinds = self.options.models.split(","), self.options.devices.split(",")
        for model in models:
            self.summarize(model, {cell: p for cell, p in pairs.items() if cell[1] == model})
        for devices in kinds:
            self.summarize(devices, {cell: p for cell, p in pairs.items() if cell[0] == devices}, ranked=False)
        for model, devices in itertools.product(models, kinds):
            self.summarize(f"{model}, {devices}",
                           {cell: p for cell, p in pairs.items() if cell[:2] == (devices, model)})

    def halves(self, cell):
        """What either half of the rounds says of the layout; nothing where there is but one."""
        steps = [statistics.median(one) for one in self.rounds(cell) if one]
        middle = (len(steps) + 1) // 2
        return (min(steps[:middle]), min(steps[middle:])) if steps[middle:] else None

    def summarize(self, name, pairs, ranked=True):
        if not pairs:
            return
        ratios = [p / m for p, m in pairs.values()]
        within = sum(0.85 <= r <= 1.15 for r in ratios)
        tau = "|||"
        if ranked:
            repeated = [halves for cell in pairs if (halves := self.halves(cell))]
            tau = " | ".join(f"{kendall(of, apart):.2f}" for of in (list(pairs.values()), repeated)
                             for apart in (1.0, 1.1))
        print(f"| {name} | {within} of {len(ratios)} | {min(ratios):.2f} | {max(ratios):.2f} | {tau} |")

    def attribute(self):
        for cell in self.cells:
            if self.out_of_time():
                return
            if self.options.only and not any(
                    all(part in ", ".join(cell) for part in one.split("+"))
                    for one in self.options.only.split(";")):
                continue
            predicted, measured = (self.stem(cell).with_suffix(f".{kind}.json")
                                   for kind in ("predicted", "trace"))
            print(f"\n{', '.join(cell)}", flush=True)
            self.predict(cell, "--trace", predicted)
            steps = self.measure(cell, "--trace", measured)
            print(f"traced step {statistics.median(steps) * 1e3:.2f} ms")
            for rank in range(1 if cell[0] == "cpu:1" else 2):
                print(run(sys.executable, HERE / "compare_traces.py", predicted, measured, "--rank", rank),
                      flush=True)


def kendall(pairs, apart=1.0):
    """Kendall's tau-b of pairs that are measured to differ by more than `apart`, relatively."""
    signs = [((a > c) - (a < c), (b > d) - (b < d)) for (a, b), (c, d) in itertools.combinations(pairs, 2)
             if max(b, d) > apart * min(b, d)]
    of_predicted = sum(p != 0 for p, _ in signs)
    of_measured = sum(m != 0 for _, m in signs)
    if not of_predicted or not of_measured:
        return float("nan")
    return sum(p * m for p, m in signs) / (of_predicted * of_measured) ** 0.5


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", type=pathlib.Path)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--models", default="mlp,cnn,gpt")
    parser.add_argument("--devices", default="cpu:1,cpu:2,nproc:2")
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--attribute", action="store_true")
    parser.add_argument("--only", default="", help="of --attribute: layouts whose name holds these parts: A+B;C")
    options = parser.parse_args()
    bench = Bench(options)
    if options.report:
        bench.report()
    elif options.attribute:
        bench.attribute()
    elif bench.work():
        bench.report()
    else:
        print("more is to be measured: call again")


if __name__ == "__main__":
    main()
