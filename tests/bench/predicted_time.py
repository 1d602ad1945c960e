"""Predicted against measured step time on this machine.

    predicted_time.py build/trainrt [--models mlp,cnn,gpt] [--devices cpu:1,cpu:2,nproc:2]
                      [--profiles FOLDER] [--steps 12] [--busy]

For each kind of device: `trainrt profile`, then for each layout `trainrt plan` with everything pinned and
`trainrt run` with the same flags. Prints both times, their ratio, and Kendall's tau between the orders in
which prediction and measurement put the layouts of one model. --profiles keeps the profiles in a folder
and takes them from there when they are there, so that the table can be made in parts.
"""

import argparse
import itertools
import json
import pathlib
import statistics
import subprocess
import tempfile

BUSY = False  # other programs run: the least of the steps counts, which they disturb least

MODELS = {
    "mlp": (["mlp", "--hidden", 512], 256, []),
    "cnn": (["cnn"], 64, []),
    "gpt": (["gpt2", "--layers", 4, "--hidden", 128, "--heads", 4, "--vocab", 1024, "--seq", 128], 16, []),
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


def run(*words, check=True):
    result = subprocess.run([str(word) for word in words], capture_output=True, text=True)
    if check and result.returncode != 0:
        raise SystemExit(f"{' '.join(map(str, words))}\n{result.stderr[-3000:]}")
    return result


def predict(program, model, cluster, flags):
    result = run(program, "plan", model, "--cluster", cluster, "--precision", "fp32", "--format", "json",
                 *flags, check=False)
    if result.returncode != 0:
        return None, result.stderr.strip().splitlines()[-1]
    return json.loads(result.stdout)["predicted"]["step_seconds"], ""


def measure(program, model, devices, flags, steps, folder):
    log = folder / "log.jsonl"
    kind = ["--nproc", 2] if devices.startswith("nproc") else ["--devices", devices]
    result = run(program, "run", model, *kind, "--steps", steps, "--metrics", log, *flags, check=False)
    if result.returncode != 0:
        return None, result.stderr.strip().splitlines()[-1]
    seconds = [json.loads(line)["step_seconds"] for line in log.read_text().splitlines()]
    return (min if BUSY else statistics.median)(seconds[2:]), ""


def kendall(pairs):
    agreed = total = 0
    for (a, b), (c, d) in itertools.combinations(pairs, 2):
        total += 1
        agreed += 1 if (a - c) * (b - d) > 0 else -1
    return agreed / total if total else float("nan")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", type=pathlib.Path)
    parser.add_argument("--models", default="mlp,cnn,gpt")
    parser.add_argument("--devices", default="cpu:1,cpu:2,nproc:2")
    parser.add_argument("--profiles", type=pathlib.Path)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--busy", action="store_true", help="take the least of the steps, not the median")
    options = parser.parse_args()
    global BUSY
    BUSY = options.busy
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        profiles = options.profiles or folder
        profiles.mkdir(exist_ok=True)
        by_model = {}
        print("| model | devices | layout | predicted ms | measured ms | predicted / measured |")
        print("|---|---|---|---|---|---|")
        for devices in options.devices.split(","):
            cluster = profiles / f"{devices.replace(':', '_')}.yaml"
            if not cluster.exists():
                run(options.program, "profile", "--devices", devices.replace("nproc", "cpu"), "-o", cluster)
            for model_name in options.models.split(","):
                words, batch, flags = MODELS[model_name]
                model = folder / f"{model_name}.onnx"
                if not model.exists():
                    run(options.program, "model", *words, "-o", model)
                for layout, pins in layouts(devices, batch).items():
                    all_flags = ["--batch-size", batch, *flags, *pins]
                    predicted, why = predict(options.program, model, cluster, all_flags)
                    measured, why_not = measure(
                        options.program, model, devices, all_flags, options.steps, folder)
                    if predicted is None or measured is None:
                        print(f"| {model_name} | {devices} | {layout} | {why[:60]} | {why_not[:60]} | |",
                              flush=True)
                        continue
                    by_model.setdefault(model_name, []).append((predicted, measured))
                    print(f"| {model_name} | {devices} | {layout} | {predicted * 1e3:.2f} | "
                          f"{measured * 1e3:.2f} | {predicted / measured:.2f} |", flush=True)
        ratios = [p / m for pairs in by_model.values() for p, m in pairs]
        print(f"\nwithin 15 %: {sum(0.85 <= r <= 1.15 for r in ratios)} of {len(ratios)}; worst "
              f"{min(ratios):.2f} and {max(ratios):.2f}")
        for model_name, pairs in by_model.items():
            print(f"tau of {model_name}: {kendall(pairs):.2f} over {len(pairs)} layouts")


if __name__ == "__main__":
    main()
