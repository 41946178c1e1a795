"""All rows by their names, in the order of the table. No library is imported before a row of it is built."""

from __future__ import annotations

from benchmarks.zoo.libraries import others, own, timm_files, torchvision_files, transformers_files, ultralytics_files
from benchmarks.zoo.networks import Network

_PARTS = (timm_files, transformers_files, torchvision_files, ultralytics_files, own, others)

NETWORKS: dict[str, Network] = {row.name: row for part in _PARTS for row in part.ROWS}
