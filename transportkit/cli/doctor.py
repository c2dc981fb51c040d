"""`transportkit doctor`: what a sender would agree with this process."""

from __future__ import annotations

from typing import Any

from transportkit.cli import CommandError
from transportkit.cli.terminal import say


def run(address: str, keywords: dict[str, Any]) -> None:
    """Ask, and print the answer.

    Raises:
        CommandError: nothing would be agreed.
        TransportKitError: nobody answered.
    """
    from transportkit.session import inspect

    answer = inspect(address, **keywords)
    agreement = answer.agreement
    if agreement is None or not all(assignment.backend for assignment in agreement.assignments):
        raise CommandError(answer.text or "the sender would agree to nothing, and does not say why")
    say(f"a receiver here would agree with {agreement.sender}:")
    say(str(agreement))
    if answer.text:
        say(answer.text)
