"""The backends `gloo` and `nccl`: broadcasts by torch.distributed; the package itself holds and imports nothing.

`gloo` and `nccl` say what each can do, and with whom; `matching` has what they share of that. `planes` is all that
differs between the two once they run. The rest is shared: `exporter` and `importer` are the contract's ends, each a
`member` of a group; `meeting` and `store` are how a group forms over the links; `head` goes along with each chunk;
`runner` is the thread on which the group's calls wait; `severing` ends them.
"""

from __future__ import annotations

__version__ = "0.1.0"
