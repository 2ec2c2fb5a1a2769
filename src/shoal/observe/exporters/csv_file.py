"""Numbers of a run as a CSV file."""

import csv
import os

from shoal.observe.exporters.table_file import Columns, TableFile
from shoal.observe.runs import RunInfo


def open_exporter(run: RunInfo, place: str) -> TableFile:
    return TableFile(place or os.path.join(run.path, "metrics.csv"), save_csv)


def save_csv(path: str, columns: Columns) -> None:
    """Missing numbers are empty; those that are not finite are `nan`, `inf` and `-inf`."""
    with open(path, "w", newline="", encoding="utf-8", errors="replace") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))
