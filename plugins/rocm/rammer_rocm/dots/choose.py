"""The ``dots`` family: its form, and the tiles and costs of panels."""

from __future__ import annotations

from dataclasses import replace

from rammer.codegen import Forms
from rammer.device.manifest import Binding
from rammer.ir.device import VDevice
from rammer.ir.operator import ROperator

from rammer_rocm.dots.kernel import bytes_product, check_bytes, write_dots_task
from rammer_rocm.kernels.task import Family
from rammer_rocm.panel.choose import CONFIGS, PanelForm, enumerate_tilings, predict_seconds, sort_choices


def dots_form(operator: ROperator, binding: Binding) -> PanelForm:
    """Return the form of an operator on bytes, tiled or not. Raises Unsuited."""
    check_bytes(operator, binding)
    return PanelForm(operator, binding, bytes_product(operator, binding) if operator.tile else None, bytes_product)


def make_dots_family(device: VDevice) -> Family:
    """Return the ``dots`` family of CPU cores."""
    forms = Forms(
        dots_form,
        enumerate_tilings,
        predict_seconds,
        lambda form, binding: write_dots_task(form.tiled, binding, device),
        sort_choices,
    )
    return replace(forms.family("dots", CONFIGS), supported_by=lambda unit: unit.threads == 1, product=True)
