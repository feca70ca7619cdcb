"""The devices a plan may use, and the links between them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """One kind of device, of which a fleet holds `count`."""

    kind: str
    count: int
    memory_bytes: int
    price_per_hour: float  # US dollars for one device

    def __post_init__(self) -> None:
        if self.count < 0:
            raise ValueError(f"device {self.kind!r}: count = {self.count} must be 0 or more")
        if self.memory_bytes <= 0:
            raise ValueError(f"device {self.kind!r}: memory_bytes = {self.memory_bytes} must be positive")
        if self.price_per_hour < 0:
            raise ValueError(f"device {self.kind!r}: price_per_hour = {self.price_per_hour} must be 0 or more")


@dataclass(frozen=True)
class Link:
    """The way from one kind of device to another (the same kind too: another machine, or the same one)."""

    source: str
    target: str
    bytes_per_s: float
    latency_s: float

    def transfer_s(self, size_bytes: float) -> float:
        """
        >>> Link("v100", "k80", bytes_per_s=1e9, latency_s=0.001).transfer_s(2e6)
        0.003
        """
        return self.latency_s + size_bytes / self.bytes_per_s
