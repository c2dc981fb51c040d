"""The backend `shm`, for processes of one user on one host; the package itself holds nothing and imports nothing.

`transportkit_shm.shm` is the backend, `arena` the shared memory, `giver` and `taker` are the two sides of the
`handover` of its descriptor, `faults` turns system errors into the library's own.
"""

from __future__ import annotations

__version__ = "0.1.0"
