"""torchvision's ViT-B/16 and ResNet-50 in float16: rammer's error and torch's own, both against float64, image by image.

On a GPU:  python benchmarks/half_models.py --batches 1,3,8,32 --tunes off,quick,full --seeds 20 --markdown half_models.md

Weights are random (seeded), and ResNet's normalisations have seen random images. ``worst`` is the largest relative L2 error of
any one image of any seed, ``median`` that of all images; the images of every seed are new. An image counts as wrong where
rammer's error is more than ``--most`` times the largest of torch's. NaN is never right.
"""

from __future__ import annotations

import copy
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

from entry import run
from facts import environment_of, section

import rammer
from rammer.errors import DeviceUnavailable, Mismatch
from rammer.report.table import markdown
from rammer_bench.graph import Array

MODELS = ("vit_b_16", "resnet50")
SIZE, CLASSES = 224, 1000
HEADERS = ("model", "batch", "--tune", "torch worst", "torch median", "rammer worst", "rammer median", "wrong images", "seconds")


def model_of(name: str, seed: int) -> Any:
    """The module on the GPU in float32 with random weights; DeviceUnavailable without torchvision or a GPU."""
    try:
        import torch
        import torchvision
    except ImportError as problem:
        raise DeviceUnavailable(f"{problem.name} is not installed", hint="pip install torch torchvision") from problem
    if not torch.cuda.is_available():
        raise DeviceUnavailable("torch finds no GPU")
    torch.manual_seed(seed)
    torch.backends.mha.set_fastpath_enabled(False)  # no ONNX operator is like it
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    module = getattr(torchvision.models, name)(weights=None)
    if name == "vit_b_16":
        torch.nn.init.normal_(module.heads.head.weight, std=0.02)  # it begins with zeros
    module = module.cuda()
    norms = [m for m in module.modules() if isinstance(m, torch.nn.BatchNorm2d)]
    for norm in norms:
        norm.momentum = None
    if norms:
        with torch.no_grad():
            module.train()(torch.randn(16, 3, SIZE, SIZE, device="cuda"))
    return module.eval()


def exported(module: Any, batch: int, path: Path) -> Path:
    """The module as an ONNX file for a batch."""
    import torch

    x = torch.randn(batch, 3, SIZE, SIZE, device="cuda")
    torch.onnx.export(module, (x,), str(path), dynamo=False, opset_version=17, input_names=["x"], output_names=["y"])
    return path


def errors(have: Array, want: Array) -> Array:
    """The relative L2 error of every image; infinite where anything is NaN."""
    have = have.astype(np.float64)
    found = np.linalg.norm(have - want, axis=1) / np.linalg.norm(want, axis=1)
    return np.where(np.isfinite(found), found, np.inf)


def inputs_of(batch: int, seed: int) -> Array:
    """Random images."""
    return np.random.default_rng(seed).standard_normal((batch, 3, SIZE, SIZE), np.float32)


def torch_outputs(module: Any, images: list[Array], dtype: str) -> list[Array]:
    """What torch computes on the GPU in ``dtype``."""
    import torch

    kind = getattr(torch, dtype)
    module.to(kind)
    with torch.no_grad():
        return [module(torch.from_numpy(x).cuda().to(kind)).double().cpu().numpy() for x in images]


def rammer_errors(path: Path, tune: str, images: list[Array], wanted: list[Array]) -> Array:
    """The errors of all images of all seeds, each run twice."""
    exe = rammer.compile(path, device="cuda", precision="float16", tune=tune)
    try:
        return np.stack([errors(exe.run({"x": x})["y"], want) for _ in range(2) for x, want in zip(images, wanted, strict=True)])
    finally:
        exe.close()


def rows_of(name: str, batch: int, tunes: list[str], seeds: int, most: float) -> list[list[str]]:
    """The rows of a model at one batch."""
    module, rows = model_of(name, 0), list[list[str]]()
    others = [copy.deepcopy(module) for _ in range(2)]
    images = [inputs_of(batch, 1000 * batch + seed) for seed in range(seeds)]
    wanted, halves = (torch_outputs(other, images, dtype) for other, dtype in zip(others, ("float64", "float16"), strict=True))
    own = np.stack([errors(h, w) for h, w in zip(halves, wanted, strict=True)])
    with tempfile.TemporaryDirectory() as folder:
        path = exported(module, batch, Path(folder) / f"{name}.onnx")
        for tune in tunes:
            start = time.perf_counter()
            found = rammer_errors(path, tune, images, wanted)
            wrong = int((~(found <= most * own.max())).sum())
            numbers = (own.max(), np.median(own), found.max(), np.median(found))
            rows.append(
                [
                    name,
                    str(batch),
                    tune,
                    *(f"{x:.2e}" for x in numbers),
                    f"{wrong} of {found.size}",
                    f"{time.perf_counter() - start:.0f}",
                ]
            )
            click.echo(" ".join(rows[-1]))
    return rows


@click.command()
@click.option("--models", default=",".join(MODELS), show_default=True, help="With commas.")
@click.option("--batches", default="1,3,8,32", show_default=True, help="With commas.")
@click.option("--tunes", default="off,quick,full", show_default=True, help="With commas.")
@click.option("--seeds", default=20, show_default=True, type=click.IntRange(1), help="Sets of images.")
@click.option("--most", default=1.5, show_default=True, help="Times torch's largest error that an image may have.")
@click.option("--markdown", "markdown_file", type=click.Path(path_type=Path), help="Write the table.")
def main(models: str, batches: str, tunes: str, seeds: int, most: float, markdown_file: Path | None) -> None:
    """Print and write the table; exit with 1 where an image is wrong."""
    rows = [
        row
        for name in models.split(",")
        for batch in batches.split(",")
        for row in rows_of(name, int(batch), tunes.split(","), seeds, most)
    ]
    text = markdown(rows, HEADERS)
    if markdown_file is not None:
        markdown_file.write_text(f"# float16 against torch's own\n\n{__doc__}\n{text}\n\n{section(environment_of(True))}")
    click.echo(text)
    if any(not row[7].startswith("0 ") for row in rows):
        raise Mismatch("some images are wrong")


if __name__ == "__main__":
    run(main)
