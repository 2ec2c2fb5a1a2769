"""Curves as they travel to the page: columns, each axis once, as many digits as a screen can show. Pure."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from shoal.observe.clean import clean
from shoal.observe.series import Series


def to_curves(found: Mapping[str, Series]) -> dict[str, Any]:
    """`axes` are pairs of steps and times; each of `series` names its axis by number.

    Low and high are left out where no two steps share a point: they would only repeat the mean.
    """
    axes: list[tuple[list[int], list[float]]] = []
    curves = []
    for series in found.values():
        axis = (series.steps, series.times)
        if axis not in axes:
            axes.append(axis)
        is_merged = series.low != series.mean or series.high != series.mean
        curve: dict[str, Any] = {
            "name": series.name,
            "label": clean(series.name),
            "axis": axes.index(axis),
            "mean": shorten(series.mean),
            "bad": sum(not math.isfinite(value) for value in series.mean),
        }
        if is_merged:
            curve |= {"low": shorten(series.low), "high": shorten(series.high)}
        curves.append(curve)
    return {
        "axes": [{"steps": steps, "times": [round(time, 2) for time in times]} for steps, times in axes],
        "series": curves,
    }


def shorten(values: Sequence[float]) -> list[float | None]:
    """Six digits of each; what is no number is null."""
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values]
