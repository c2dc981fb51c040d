"""Who may touch which memory when: slots, exports, leases and landing slots; no protocol belongs here.

`exports` is the exporter's side, `imports` the importer's, `memory` what both need of host memory, `faults` turns a
backend's native errors into the library's own. Every backend that maps memory runs on this; `transportkit.mapped` has
the ends of those whose slots lie in one piece of memory.

A slot of an exporter (`SlotPool`)::

    FREE     --acquire-->  PACKING   the core copies into it
    PACKING  --publish-->  READING   headers are out; every reader of the lane owes its word
    PACKING  --abandon-->  FREE      the update ended before the chunk was complete
    READING  --acknowledge (the last reader), drop-->  FREE

An export at its exporter, for one receiver (`Exports`)::

    unknown  --a location names it-->                        named
    named    --a chunk in it is acknowledged-->              opened
    named, opened  --a location supersedes it-->             superseded
    superseded     --every chunk that was out then, and the one that superseded it, is acknowledged-->  reclaimed
    named, opened, superseded  --the receiver is dropped, the lane closes-->  reclaimed

``reclaimed`` is `Exporter.reclaim`, once; it says whether the importer had opened it. One that was never opened (a
trial that nobody read, a receiver that was lost) is reclaimed as every other.

An export at an importer (`Imports`)::

    unknown  --first header that names it-->             attached    `Importer.attach`, once
    attached --a header supersedes it-->                 superseded  nothing new may lie in it
    unknown  --a header supersedes it-->                 gone        it may never be attached
    superseded --no chunk in it is open or held-->       gone        `Importer.detach`, once
    attached, superseded --close-->                      gone        `Importer.detach`, once

What supersedes an export is acknowledged only after that export is gone, or, where chunks lie in it, their own words
come after that. So an exporter that has every word may give the memory back.

A lease of an imported chunk::

    open  --release, nothing views it-->  released   `Importer.release`; then it may be acknowledged
    open  --retire, views still live-->   held       its slot is withheld from the sender
    held  --the last view dies-->         released

A lease's tensors all view one owner object, and Python's reference count of that owner is the truth about who still
reads.
"""

from __future__ import annotations

from transportkit.lifecycle.exports import Exports, SlotPool
from transportkit.lifecycle.faults import around, translated
from transportkit.lifecycle.imports import Imported, Imports, Landing, Watched
from transportkit.lifecycle.memory import host_slots, memory_of

__all__ = [
    "Exports",
    "Imported",
    "Imports",
    "Landing",
    "SlotPool",
    "Watched",
    "around",
    "host_slots",
    "memory_of",
    "translated",
]
