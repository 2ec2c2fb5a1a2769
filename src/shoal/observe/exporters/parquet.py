"""Numbers of a run as a Parquet file."""

import os

from shoal.observe.exporters.table_file import Columns, TableFile
from shoal.observe.runs import RunInfo


def open_exporter(run: RunInfo, place: str) -> TableFile:
    return TableFile(place or os.path.join(run.path, "metrics.parquet"), save_parquet)


def save_parquet(path: str, columns: Columns) -> None:
    """Missing numbers are null, and NaN is NaN."""
    import pyarrow
    from pyarrow import parquet

    names = {name.encode("utf-8", "replace").decode(): values for name, values in columns.items()}
    kinds = [pyarrow.int64() if name == "step" else pyarrow.float64() for name in names]
    arrays = [pyarrow.array(values, kind) for values, kind in zip(names.values(), kinds, strict=True)]
    parquet.write_table(pyarrow.table(arrays, names=list(names)), path)
