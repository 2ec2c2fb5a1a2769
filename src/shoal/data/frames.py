"""Collections of Spark, Ray Data and Dask as training data: `Trainer(..., dataset=from_spark(df), ...)`.

The executors write the rows as Arrow files, one for each partition and all at the same time. What comes back is
`Shards`, a small description of these files that any worker can be given, also when the session that wrote them is
gone. Workers map the files into memory. The order of the rows is that of the partitions, then that within each.
"""

from shoal.data.frames_dask import from_dask
from shoal.data.frames_ray import from_ray
from shoal.data.frames_shards import Shard, Shards, open_shards
from shoal.data.frames_spark import from_spark

__all__ = ["Shard", "Shards", "from_dask", "from_ray", "from_spark", "open_shards"]
