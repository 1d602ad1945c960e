"""Where predicted and measured time differ: `plan --trace` against `run --trace` of the same plan.

    compare_traces.py predicted.json measured.json [--rank N]

Prints, for every operator and kind of communication of a rank, how often it runs in a step, and what
that takes in the prediction and in the run: there the median over the steps, the first two left out.
"""

import argparse
import collections
import json
import statistics

WARM_UP = 2


def totals(path, rank):
    """Name -> (count, milliseconds) of a step."""
    seconds = collections.defaultdict(lambda: collections.defaultdict(float))
    counts = collections.defaultdict(lambda: collections.defaultdict(int))
    begin, end = {}, {}
    for event in json.load(open(path)):
        if event.get("ph") != "X" or event["pid"] != rank:
            continue
        step = event["args"]["step"]
        begin[step] = min(begin.get(step, 1e30), event["ts"])
        end[step] = max(end.get(step, 0), event["ts"] + event["dur"])
        if event["cat"] == "compute":
            name = "(cells)"
        elif event["cat"] == "operator":
            name = event["args"]["op"]
        else:
            name = f"{event['cat']}: {event['name'].split('/')[-1].rstrip('0123456789')}"
        seconds[name][step] += event["dur"] / 1e3
        counts[name][step] += 1
    steps = sorted(begin)
    steps = steps[WARM_UP:] or steps
    found = {"(step)": (1, statistics.median((end[s] - begin[s]) / 1e3 for s in steps))}
    for name in seconds:
        found[name] = (counts[name][steps[0]], statistics.median(seconds[name][s] for s in steps))
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("predicted")
    parser.add_argument("measured")
    parser.add_argument("--rank", type=int, default=0)
    options = parser.parse_args()
    predicted = totals(options.predicted, options.rank)
    measured = totals(options.measured, options.rank)
    print(f"{'':42} {'count':>7} {'predicted':>10} {'measured':>10} {'ratio':>6}  ms a step")
    names = sorted(set(predicted) | set(measured), key=lambda n: -measured.get(n, predicted.get(n))[1])
    for name in names:
        count, p = predicted.get(name, (0, 0.0))
        own_count, m = measured.get(name, (0, 0.0))
        counted = str(own_count) if own_count == count else f"{count}/{own_count}"
        print(f"{name[:42]:42} {counted:>7} {p:10.3f} {m:10.3f} {p / m if m else 0:6.2f}")


if __name__ == "__main__":
    main()
