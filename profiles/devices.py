"""The devices that a plan may use, the links between them, and a catalogue of known kinds."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product
from math import inf
from typing import Any

from isobatch.profiles.errors import UserError

GB = 10**9
GBIT = 10**9 / 8
# Seconds of one hop of small tensors between two replicas: the cost of orders and messages, not of the wire
# (docs/profiles.md).
HOP_S = 0.0018
# Seconds until a replica that keeps its survivors gets its next order: the front sends it when a launch has ended.
TURN_S = 0.001
MOST_DEVICES = 2**20  # of one kind: far more than any cluster has


@dataclass(frozen=True)
class Device:
    """One kind of device, and its `count` in a fleet."""

    kind: str
    count: int
    memory_bytes: int
    price_per_hour: float  # US dollars for one device

    def __post_init__(self) -> None:
        if not 0 <= self.count <= MOST_DEVICES:
            raise UserError(f"device {self.kind!r}: count = {self.count} must be from 0 to {MOST_DEVICES}")
        if self.memory_bytes <= 0:
            raise UserError(f"device {self.kind!r}: memory_bytes = {self.memory_bytes} must be positive")
        if not 0 <= self.price_per_hour < inf:
            raise UserError(f"device {self.kind!r}: price_per_hour = {self.price_per_hour} must be finite, 0 or more")

    def shared_by(self, sharers: int) -> "Device":
        """The shares of these devices if `sharers` replicas share each one: the planner counts a share as a device.

        >>> Device("v100", 3, 16, 2.0).shared_by(2)
        Device(kind='v100/2', count=6, memory_bytes=8, price_per_hour=1.0)
        """
        memory_bytes, price = self.memory_bytes // sharers, self.price_per_hour / sharers
        return Device(f"{self.kind}/{sharers}", self.count * sharers, memory_bytes, price)


def as_text(counts: Mapping[str, int]) -> str:
    """The devices of each kind, without kinds of which there are none.

    >>> as_text({"v100": 2, "p100": 0, "k80": 3})
    '2 v100, 3 k80'
    """
    return ", ".join(f"{count} {kind}" for kind, count in counts.items() if count > 0)


@dataclass(frozen=True)
class Link:
    """The connection from one kind of device to another, or to the same kind (in another machine, or the same one)."""

    source: str
    target: str
    bytes_per_s: float
    latency_s: float
    turn_s: float = 0.0  # from the end of a launch until the next order is there, when nothing is transferred
    one_machine: bool = False  # where it was measured: inside one machine, or between two

    def __post_init__(self) -> None:
        name = f"link {self.source} -> {self.target}"
        if not 0 < self.bytes_per_s < inf:
            raise ValueError(f"{name}: bytes_per_s = {self.bytes_per_s} must be positive and finite")
        for field in ("latency_s", "turn_s"):
            if not 0 <= getattr(self, field) < inf:
                raise ValueError(f"{name}: {field} = {getattr(self, field)} must be finite, 0 or more")

    def transfer_s(self, size_bytes: float) -> float:
        """
        >>> Link("v100", "k80", bytes_per_s=1e9, latency_s=0.001).transfer_s(2e6)
        0.003
        """
        return self.latency_s + size_bytes / self.bytes_per_s


@dataclass(frozen=True)
class DeviceKind:
    """Figures of one device, as the maker and the clouds print them. Rates are peaks, without sparsity."""

    memory_bytes: int
    price_per_hour: float
    fp32_flops: float
    fp16_flops: float  # equals fp32_flops where half precision is no faster
    memory_bytes_per_s: float
    host_bytes_per_s: float  # between the device and its host, one way
    network_bytes_per_s: float  # its share of the machine's network
    base_clock: float = 1.0  # as a share of the boost clock, at which the rates of arithmetic are printed

    @property
    def best_dtype(self) -> str:
        return "float16" if self.fp16_flops > self.fp32_flops else "float32"

    def shared_by(self, sharers: int) -> "DeviceKind":
        """The share of one device that each of several replicas has."""
        return replace(self, memory_bytes=self.memory_bytes // sharers, price_per_hour=self.price_per_hour / sharers)


def _kind(
    memory_gb: float, price: float, fp32_tflops: float, fp16_tflops: float, memory_gb_per_s: float,
    host_gb_per_s: float, network_gbit_per_s: float, base_mhz: float = 1.0, boost_mhz: float = 1.0,
) -> DeviceKind:  # fmt: skip
    return DeviceKind(
        int(memory_gb * GB), price, fp32_tflops * 1e12, fp16_tflops * 1e12,
        memory_gb_per_s * GB, host_gb_per_s * GB, network_gbit_per_s * GBIT, base_mhz / boost_mhz,
    )  # fmt: skip


# Prices: US on-demand list prices for one device with its share of the machine, averaged over the named clouds. They
# change every month: give your own as "v100=6@2.10". Memory counts 10^9 bytes per GB, a little less than there is.
CATALOGUE: dict[str, DeviceKind] = {
    "k80": _kind(12, 0.75, 2.8, 2.8, 240, 12, 10),  # half a board: AWS p2 0.90, Azure NC6 0.90, GCP 0.45
    "p100": _kind(16, 1.77, 9.3, 18.7, 732, 12, 10, 1190, 1329),  # Azure NC6s v2 2.07, GCP 1.46
    "v100": _kind(16, 2.87, 14.0, 112, 900, 12, 10, 1245, 1380),  # AWS p3 3.06, Azure NC6s v3 3.06, GCP 2.48
    "t4": _kind(16, 0.53, 8.1, 65, 300, 12, 10, 585, 1590),  # AWS g4dn.xlarge 0.526, Azure NC4as T4 v3 0.526
    "a10g": _kind(24, 1.01, 31.5, 70, 600, 24, 10, 1320, 1710),  # AWS g5.xlarge 1.006
    "l4": _kind(24, 0.76, 30.3, 121, 300, 24, 10, 795, 2040),  # AWS g6.xlarge 0.805, GCP g2-standard-4 0.707
    "a40": _kind(48, 0.85, 37.4, 149.7, 696, 24, 10, 1305, 1740),  # as an A6000, the same chip
    "a6000": _kind(48, 0.80, 38.7, 154.8, 768, 24, 10, 1410, 1800),  # Lambda 0.80
    "l40s": _kind(48, 1.86, 91.6, 362, 864, 24, 20, 1110, 2520),  # AWS g6e.xlarge 1.861
    "a100-40g": _kind(40, 3.67, 19.5, 312, 1555, 24, 50, 1095, 1410),  # GCP a2-highgpu-1g 3.673
    "a100": _kind(80, 3.67, 19.5, 312, 2039, 24, 50, 1275, 1410),  # 80 GB: Azure NC24ads A100 v4 3.673
    "h100": _kind(80, 6.93, 67, 989, 3350, 50, 100, 1590, 1980),  # AWS p5 6.88, Azure NC40ads H100 v5 6.98
    "h200": _kind(141, 7.91, 67, 989, 4800, 50, 100, 1500, 1980),  # AWS p5en 7.91
    "cpu": _kind(16, 0.19, 0.38, 0.38, 20, 12, 10),  # 4 vCPUs with 16 GB: AWS m6i.xlarge 0.192, Azure D4s v5 0.192
}


def kind_of(device_name: str) -> str:
    """The catalogue's kind of a device, by the name that its driver or Ray reports, or a kind made from that name.

    A slice of a device (MIG or vGPU), or a device with another memory size than the catalogue's, is another kind.

    >>> kind_of("NVIDIA A100-SXM4-80GB"), kind_of("NVIDIA A100-SXM4-40GB"), kind_of("RTX-A6000"), kind_of("Radeon VII")
    ('a100', 'a100-40g', 'a6000', 'radeon-vii')
    >>> kind_of("Tesla V100-SXM2-32GB"), kind_of("NVIDIA H100 80GB HBM3 MIG 1g.10gb")
    ('tesla-v100-sxm2-32gb', 'h100-80gb-hbm3-mig-1g-10gb')
    >>> kind_of("NVIDIA A40"), kind_of("NVIDIA A40-8Q"), kind_of("GRID T4-2B4"), kind_of("GRID A100-1-5C")
    ('a40', 'a40-8q', 'grid-t4-2b4', 'grid-a100-1-5c')
    """
    words: list[str] = re.findall(r"[a-z0-9]+", device_name.lower())
    name = next((word for word in words if word in CATALOGUE), "")
    memories_gb = {int(size) for size in re.findall(r"(\d+)gb?\b", device_name.lower())}
    is_slice = "mig" in words or re.search(r"-\d+[abcq]", device_name.lower())
    for kind in (name, *(f"{name}-{size}g" for size in memories_gb)):
        if kind in CATALOGUE and not is_slice and memories_gb <= {CATALOGUE[kind].memory_bytes // GB}:
            return kind
    return "-".join(word for word in words if word != "nvidia")


def whole_kind(kind: str) -> tuple[str, int]:
    """The kind of the whole device, and how many replicas share one: `v100/2` is a `v100` that two replicas share.

    >>> whole_kind("v100/2"), whole_kind("v100")
    (('v100', 2), ('v100', 1))
    """
    whole, _, sharers = kind.partition("/")
    return (whole, int(sharers)) if sharers.isdecimal() and int(sharers) > 1 else (kind, 1)


def is_cpu(kind: str) -> bool:
    """
    >>> is_cpu("cpu"), is_cpu("cpu/2"), is_cpu("v100")
    (True, True, False)
    """
    return whole_kind(kind)[0] == "cpu"


def catalogued(kind: str) -> DeviceKind | None:
    """The catalogue's entry; None if there is none.

    >>> catalogued("v100/2").price_per_hour, catalogued("v100/0")
    (1.435, None)
    """
    whole, sharers = whole_kind(kind.lower())
    return CATALOGUE[whole].shared_by(sharers) if whole in CATALOGUE else None


def known_kind(kind: str) -> DeviceKind:
    """The catalogue's entry. Raise UserError with the known kinds if there is none."""
    entry = catalogued(kind)
    if entry is None:
        raise UserError(f"unknown device kind {kind!r}: choose among {', '.join(CATALOGUE)}")
    return entry


def known_kinds(text: str) -> list[str]:
    """
    >>> known_kinds("V100, k80, v100"), known_kinds("")
    (['v100', 'k80'], [])
    """
    kinds = list(dict.fromkeys(part.strip().lower() for part in text.split(",") if part.strip()))
    for kind in kinds:
        known_kind(kind)
        if whole_kind(kind) != (kind, 1):
            raise UserError(f"{kind}: no times of shared devices are published: measure them with --together")
    return kinds


def fleet(text: str) -> tuple[Device, ...]:
    """Devices from "KIND=COUNT[@PRICE[:GB]],...": dollars per hour, and memory. A kind of the catalogue needs neither.

    >>> [(device.kind, device.count, device.price_per_hour) for device in fleet("v100=6@2.10,p100=8")]
    [('v100', 6, 2.1), ('p100', 8, 1.77)]
    >>> fleet("geforce-rtx-4090=2@0.5:24")
    (Device(kind='geforce-rtx-4090', count=2, memory_bytes=24000000000, price_per_hour=0.5),)
    """
    devices = tuple(_device(part.strip()) for part in text.split(",") if part.strip())
    kinds = [device.kind for device in devices]
    if not devices:
        raise UserError(f"a fleet needs at least one device, got {text!r}: write KIND=COUNT, as in v100=6,p100=8")
    if len(set(kinds)) < len(kinds):
        raise UserError(f"fleet {text!r} names a kind twice: give each kind once, with its whole count")
    return devices


def _device(part: str) -> Device:
    name, _, amount = part.partition("=")
    count, _, facts = amount.partition("@")
    price, _, memory_gb = facts.partition(":")
    kind, own = name.strip().lower(), dict[str, Any]()
    try:
        number = int(count)
        if price:
            own["price_per_hour"] = float(price)
        if memory_gb:
            own["memory_bytes"] = round(float(memory_gb) * GB)
    except (ValueError, OverflowError):
        raise UserError(f"cannot read {part!r}: write KIND=COUNT or KIND=COUNT@PRICE, as in v100=6") from None
    if len(own) == 2:
        return Device(kind, number, **own)
    if not (known := catalogued(kind)):
        others = f"or give price and memory, as in {name.strip()}={count}@0.50:24 (dollars per hour, GB)"
        raise UserError(f"unknown device kind {name.strip()!r}: choose among {', '.join(CATALOGUE)}, {others}")
    return Device(kind, number, **{"memory_bytes": known.memory_bytes, "price_per_hour": known.price_per_hour} | own)


def links_between(
    devices: Iterable[Device],
    *,
    one_machine: bool = False,
    turn_s: float = TURN_S,
    gbit_per_s: Mapping[str, float] | None = None,
    measured: Iterable[Link] = (),
) -> tuple[Link, ...]:
    """A link for every ordered pair of kinds, the same kind included: over the network, or inside one machine.

    Links that were `measured` there replace the catalogue's. A kind that is not in the catalogue is connected as the
    slowest kind in it. `gbit_per_s` overrides the rates of links, by the names in the example.

    >>> links = links_between(fleet("v100=1,k80=1"), gbit_per_s={"v100>k80": 0.08})
    >>> [(f"{link.source}>{link.target}", link.bytes_per_s / 1e6) for link in links]
    [('v100>v100', 1250.0), ('v100>k80', 10.0), ('k80>v100', 1250.0), ('k80>k80', 1250.0)]
    """
    given = gbit_per_s or {}
    slowest = min(CATALOGUE.values(), key=lambda kind: _rate(kind, one_machine))
    rates = {device.kind: _rate(catalogued(device.kind) or slowest, one_machine) for device in devices}
    known = {(link.source, link.target): link for link in measured if link.one_machine == one_machine}

    def between(source: str, target: str) -> Link:
        """The link between the whole devices."""
        ends = whole_kind(source)[0], whole_kind(target)[0]
        link = known.get(ends) or Link(*ends, min(rates[source], rates[target]), HOP_S, turn_s)
        bytes_per_s = given[name] * GBIT if (name := ">".join(ends)) in given else link.bytes_per_s
        return replace(link, source=source, target=target, bytes_per_s=bytes_per_s)

    return tuple(between(source, target) for source in rates for target in rates)


MOST_CHOICES = 64  # choices of kinds that are shared; further ones are not planned


def sharing_choices(devices: Sequence[Device], kinds: Collection[str]) -> list[tuple[Device, ...]]:
    """The whole devices, then the same devices with some kinds shared by replicas, as far as `kinds` has these shares.

    >>> choices = sharing_choices(fleet("cpu=2,v100=1"), {"cpu", "v100", "cpu/2", "v100/3"})
    >>> [as_text({device.kind: device.count for device in choice}) for choice in choices]
    ['2 cpu, 1 v100', '2 cpu, 3 v100/3', '4 cpu/2, 1 v100', '4 cpu/2, 3 v100/3']
    """
    shared = [whole_kind(kind) for kind in sorted(kinds) if kind not in {device.kind for device in devices}]
    choices = [
        [device, *(device.shared_by(sharers) for whole, sharers in shared if whole == device.kind)]
        for device in devices
    ]
    return list(islice(product(*choices), MOST_CHOICES))


def _rate(kind: DeviceKind, one_machine: bool) -> float:
    return kind.host_bytes_per_s if one_machine else kind.network_bytes_per_s
