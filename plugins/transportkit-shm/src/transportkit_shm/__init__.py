"""The backends `shm` and `mpqueue`, for processes on one host; the package itself holds nothing and imports nothing.

`shm` and `mpqueue` are the backends, `mapped` is what their ends have in common, `arena` the shared memory, `faults`
turns system errors into the library's own. For `shm`, `giver` and `taker` are the two sides of the `handover` of its
descriptor. For `mpqueue`, `unnamed` is the memory's file, `descriptor_queue` what both processes inherit, `queue_ends`
who puts and who waits there.
"""

from __future__ import annotations

__version__ = "0.1.0"
