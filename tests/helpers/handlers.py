"""What a process of its own runs: it imports this file, and not all that a test file imports."""

import signal
from typing import Any


def send_handler(pipe: Any) -> None:
    """Send what this process does when Ctrl-C interrupts it."""
    pipe.send(signal.getsignal(signal.SIGINT))
