"""The backend `cuda-ipc`, for processes that share a GPU; the package itself holds nothing and imports nothing.

`cuda_ipc` is the backend, `ends` its exporter and importer. `survey` is what a probe reads, through `nvml` and a few
files; `matching` decides with it which GPU two sides meet on. `devices` is what the ends ask of a GPU, and `cuda` alone
touches one. `tether` tells an exporter when nobody has its memory mapped any more.
"""

from __future__ import annotations

__version__ = "0.1.0"

#: The name of the backend.
NAME = "cuda-ipc"
