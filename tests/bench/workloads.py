"""The networks that compare_torch.py trains, at the sizes that both sides agree on."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Workload:
    model: list        # arguments of `trainrt model`
    batch: int
    input_shape: list  # of one sample
    classes: int
    warm_up: int       # steps left out
    steps: int         # steps timed, in each round
    parameters: int    # both sides must have as many
    images: bool = False


WORKLOADS = {
    "mlp": Workload(["mlp"], 256, [784], 10, 20, 80, 1863690),
    "cnn": Workload(["cnn", "--hidden", "16"], 128, [1, 28, 28], 10, 10, 50, 206970, images=True),
    "resnet18": Workload(["resnet18"], 32, [3, 224, 224], 1000, 2, 5, 11689512, images=True),
    "chargpt": Workload(["gpt2", "--layers", "4", "--hidden", "128", "--heads", "4", "--ffn", "512",
                         "--vocab", "96", "--seq", "128"], 32, [128], 96, 4, 20, 822016),
    "midgpt": Workload(["gpt2", "--layers", "6", "--hidden", "384", "--heads", "6", "--ffn", "1536",
                        "--vocab", "96", "--seq", "256"], 8, [256], 96, 2, 8, 10782720),
    "gpt": Workload(["gpt2", "--layers", "4", "--hidden", "256", "--heads", "8", "--ffn", "1024",
                     "--vocab", "1024", "--seq", "128"], 8, [128], 1024, 4, 20, 3454464),
}
