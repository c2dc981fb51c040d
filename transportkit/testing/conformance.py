"""`TransportConformance`: all tests that a backend must pass, as one class to be subclassed; they are in `suite`."""

from __future__ import annotations

from transportkit.testing.suite.bookkeeping import Bookkeeping
from transportkit.testing.suite.contract import Contract
from transportkit.testing.suite.deaths import Deaths
from transportkit.testing.suite.declaration import Declaration
from transportkit.testing.suite.endings import Endings
from transportkit.testing.suite.failures import Failures
from transportkit.testing.suite.hostility import Hostility
from transportkit.testing.suite.sharing import Sharing
from transportkit.testing.suite.values import Values


class TransportConformance(Declaration, Contract, Endings, Values, Failures, Sharing, Bookkeeping, Hostility, Deaths):
    """The conformance suite; see `transportkit.testing` for how to run it.

    Set ``backend`` to the name of an installed backend, or ``transport`` to a class that is not installed. The other
    attributes of `transportkit.testing.suite.subject.Subject` say what the backend cannot do, and skip what needs it.
    """
