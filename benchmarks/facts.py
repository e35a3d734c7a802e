"""Facts about the machine and packages of a measurement, for result files."""

from __future__ import annotations

import os
import subprocess
from datetime import date
from pathlib import Path
from typing import Final

from rammer import __version__
from rammer.errors import DeviceUnavailable
from rammer.report.environment import describe_environment
from rammer_bench.to_torch import load_torch

HERE: Final = Path(__file__).resolve().parent


def environment_of(gpu: bool) -> dict[str, str]:
    """Return packages and processor; with ``gpu`` also the card, its driver and, with torch, CUDA and cuDNN versions."""
    facts = describe_environment()
    if gpu:
        command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        told = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split("\n")[0]
        name, _, driver = told.partition(",")
        facts |= {"gpu": name.strip() or "unknown", "driver": driver.strip() or "unknown"}
        try:
            torch = load_torch()
        except DeviceUnavailable:
            return facts
        facts |= {
            "gpu": torch.cuda.get_device_name(0),
            "torch": torch.__version__,
            "cuda": str(torch.version.cuda),
            "cudnn": str(torch.backends.cudnn.version()),
        }
    return facts


def stamp() -> str:
    """Return the date and the build: its commit (with ``+`` if files have changed since), or the version without a repository."""
    words = ["git", "-C", str(HERE), "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        build = subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        build = ""
    return f"{date.today().isoformat()}, {f'build {build}' if build else f'version {__version__}'}"


def meanwhile() -> str:
    """Return a sentence on other load of the machine, for pages of times."""
    busy, count, niceness = os.getloadavg()[1], os.cpu_count(), os.getpriority(os.PRIO_PROCESS, 0)
    return (
        f"Meanwhile {busy:.0f} processes wanted this machine's {count} processors; what is measured ran at priority {niceness}."
    )


def section(facts: dict[str, str]) -> str:
    """Return the last section of a Markdown file."""
    return "## Environment\n\n" + "\n".join(f"- {k}: {v}" for k, v in facts.items()) + "\n"
