"""The windows that were seen: a journal that outlives whoever keeps it."""

from pathlib import Path

from profiles.journal import Journal
from profiles.windows import Window

KEEP = 720  # a day of two-minute windows


class History(Journal[Window]):
    """
    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     History(Path(folder) / "exits.jsonl").append(Window(0.0, 120.0, 10, (6, 4)))
    ...     History(Path(folder) / "exits.jsonl").windows
    (Window(start_s=0.0, duration_s=120.0, arrived=10, left=(6, 4)),)
    """

    def __init__(self, path: Path | None, keep: int = KEEP) -> None:
        super().__init__(path, Window.read, keep)

    @property
    def windows(self) -> tuple[Window, ...]:
        """The latest ones, oldest first."""
        return self.entries
