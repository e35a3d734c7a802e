"""What a result file says of the machine and the packages that it was measured with."""

from __future__ import annotations

import subprocess

from rammer.peers.to_torch import load_torch
from rammer.report.environment import environment


def environment_of(gpu: bool) -> dict[str, str]:
    """Packages and processor; with ``gpu``, the card, its driver, and the versions of CUDA and cuDNN."""
    facts = environment()
    if gpu:
        torch = load_torch()
        driver = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True, check=False
        )
        facts |= {
            "gpu": torch.cuda.get_device_name(0),
            "driver": driver.stdout.split("\n")[0].strip() or "unknown",
            "torch": torch.__version__,
            "cuda": str(torch.version.cuda),
            "cudnn": str(torch.backends.cudnn.version()),
        }
    return facts


def section(facts: dict[str, str]) -> str:
    """The last section of a Markdown file."""
    return "## Environment\n\n" + "\n".join(f"- {k}: {v}" for k, v in facts.items()) + "\n"
