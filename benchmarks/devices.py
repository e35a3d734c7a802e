"""The cross-device table: real models on every device here and on ONNX Runtime, written to benchmarks/results.

python benchmarks/devices.py                      # every working device, the cost model's tiles
python benchmarks/devices.py --tune quick --device cuda --peer torch --peer torch-graph --name devices_cuda"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import onnx

import rammer
from rammer.compile_options import TUNING_LEVELS
from rammer_testing.models import LIGHT_MODELS, fetch, light_model
from rammer_testing.weights import reseed

#: Light models have random weights (their published ones are constant); the others are trained.
MODELS = ("squeezenet", "shufflenet", "inception_v1", "resnet50", "ppocr_cls", "nudenet_320n", "silero_vad_16k")
SHAPES = {"x:1x3x48x192": "ppocr_cls", "images:1x3x320x320": "nudenet_320n"}
RESULTS = Path(__file__).parent / "results"


def write_models(folder: Path, names: list[str]) -> list[Path]:
    """Write the models as files with their names and return the paths."""
    paths = []
    for name in names:
        path = folder / f"{name}.onnx"
        if name in LIGHT_MODELS:
            onnx.save(reseed(light_model(name), 0), path)
        else:
            path.write_bytes(fetch(name).read_bytes())
        paths.append(path)
    return paths


def main() -> int:
    """Run `rammer bench` on all models and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", action="append", help="default: every device that works here")
    parser.add_argument("--peer", action="append", help="default: onnxruntime; on a GPU torch and torch-graph")
    parser.add_argument("--tune", default="off", choices=TUNING_LEVELS)
    parser.add_argument("--duration", default="2", help="least seconds of timed runs")
    parser.add_argument("--models", default=",".join(MODELS), help="comma-separated")
    parser.add_argument("--name", default="devices", help="name of the result files")
    options = parser.parse_args()
    devices = options.device or [s.name for s in rammer.devices() if s.state == "ok" and s.name != "toy"]
    with tempfile.TemporaryDirectory() as folder:
        paths = write_models(Path(folder), options.models.split(","))
        command = [sys.executable, "-P", "-m", "rammer.cli.main", "bench", *map(str, paths)]
        command += [word for d in devices for word in ("--device", d)]
        wanted = [s for s, model in SHAPES.items() if model in options.models]
        command += [word for s in wanted for word in ("--shape", s)]
        command += [word for p in options.peer or ["onnxruntime"] for word in ("--peer", p)]
        command += ["--tune", options.tune, "--iterations", "50", "--duration", options.duration]
        command += ["--markdown", str(RESULTS / f"{options.name}.md")]
        return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
