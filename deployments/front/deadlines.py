"""How long whoever asks will wait for the answer."""

from deployments.front.answers import RefusedError

HEADER = "x-deadline-ms"


def deadline_s(told: str | None) -> float | None:
    """What the header (over gRPC: the metadata) asks for.

    >>> deadline_s("250")
    0.25
    """
    if told is None:
        return None
    try:
        deadline_ms = float(told)
    except ValueError:
        deadline_ms = 0.0
    if not 0 < deadline_ms < float("inf"):
        raise RefusedError(400, f"X-Deadline-Ms is {told!r}: it must be a number of milliseconds, more than 0")
    return deadline_ms / 1e3
