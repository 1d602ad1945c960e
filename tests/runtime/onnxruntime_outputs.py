"""Runs FOLDER/model.onnx with ONNX Runtime on the inputs that FOLDER/arrays.json describes and compares
the outputs with those described there: 1e-5, absolute and relative. PYTHONPATH must hold onnxruntime."""

import json
import pathlib
import sys

import numpy
import onnxruntime


def main():
    folder = pathlib.Path(sys.argv[1])
    arrays = json.loads((folder / "arrays.json").read_text())

    def read(array):
        return numpy.fromfile(folder / array["file"], array["dtype"]).reshape(array["shape"])

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(folder / "model.onnx"), options,
                                           providers=["CPUExecutionProvider"])
    names = [array["name"] for array in arrays["outputs"]]
    outputs = session.run(names, {array["name"]: read(array) for array in arrays["inputs"]})
    failed = False
    for array, output in zip(arrays["outputs"], outputs):
        expected = read(array)
        same = output.shape == expected.shape
        worst = float(numpy.max(numpy.abs(output - expected) / (1 + numpy.abs(expected)))) if same else None
        print(f"{array['name']} {output.shape}: worst difference {worst}")
        failed = failed or not same or not worst <= 1e-5
    sys.exit(1 if failed or not names else 0)


if __name__ == "__main__":
    main()
