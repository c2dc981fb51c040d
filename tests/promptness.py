"""What the tests take for prompt."""

from __future__ import annotations

#: Seconds within which something ends that ends at once, on a machine that has other work besides. The limits that
#: would end it otherwise are longer, or the error tells the two apart; `python tests/benchmarks death` measures how
#: fast it really is.
PROMPT = 10.0
