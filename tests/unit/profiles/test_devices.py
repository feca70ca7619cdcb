from math import inf, nan

import pytest

from isobatch.deployments.planning import device
from isobatch.profiles.devices import CATALOGUE, GB, Device, DeviceKind, Link, fleet, links_between
from isobatch.profiles.errors import UserError


def test_a_price_of_ones_own_beats_the_catalogue() -> None:
    (device,) = fleet(" V100 = 2@1.50 ")
    assert (device.kind, device.count, device.price_per_hour) == ("v100", 2, 1.5)


def test_a_kind_that_the_catalogue_lacks_needs_its_price_and_memory() -> None:
    assert fleet("rtx-4090=2@0.5:24") == (Device("rtx-4090", 2, memory_bytes=24 * GB, price_per_hour=0.5),)
    assert fleet("v100=1@:32") == (Device("v100", 1, 32 * GB, CATALOGUE["v100"].price_per_hour),)


def test_a_kind_of_ones_own_needs_no_more_than_a_name_and_a_line_in_the_catalogue_gives_it_a_price(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = device("toy", 3)
    assert (own.kind, own.count, own.memory_bytes > 0) == ("toy", 3, True)
    monkeypatch.setitem(CATALOGUE, "toy", DeviceKind(2 * GB, 0.25, 1e12, 2e12, 100 * GB, 12 * GB, GB))
    assert fleet("toy=3") == (Device("toy", 3, memory_bytes=2 * GB, price_per_hour=0.25),)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("v1000=6", "unknown device kind 'v1000': choose among k80, p100"),
        ("v1000=6@2", "or give price and memory, as in v1000=6@0.50:24 (dollars per hour, GB)"),
        ("v1000=6@2:inf", "cannot read 'v1000=6@2:inf'"),
        ("v1000=6@2:0", "device 'v1000': memory_bytes = 0 must be positive"),
        ("v100=six", "cannot read 'v100=six': write KIND=COUNT"),
        ("v100", "write KIND=COUNT"),
        ("v100=-1", "count = -1 must be from 0 to 1048576"),
        ("v100=1000000000000", "count = 1000000000000 must be from 0 to 1048576"),
        ("v100=1@free", "cannot read 'v100=1@free': write KIND=COUNT"),
        ("v100=1@nan", "price_per_hour = nan must be finite"),
        ("v100=1,v100=2", "names a kind twice"),
        (" , ", "at least one device"),
    ],
)
def test_a_fleet_that_cannot_be_read_says_why_in_one_line(text: str, says: str) -> None:
    with pytest.raises(UserError) as caught:
        fleet(text)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_link_is_as_fast_as_its_slower_end() -> None:
    links = {(link.source, link.target): link for link in links_between(fleet("h100=1,k80=1"))}
    assert len(links) == 4
    assert links["h100", "k80"].bytes_per_s == CATALOGUE["k80"].network_bytes_per_s
    assert links["h100", "h100"].bytes_per_s == CATALOGUE["h100"].network_bytes_per_s


def test_inside_one_machine_the_host_bus_carries() -> None:
    (link,) = links_between(fleet("a100=2"), one_machine=True)
    assert link.bytes_per_s == CATALOGUE["a100"].host_bytes_per_s


@pytest.mark.parametrize(
    ("rate", "latency_s", "says"),
    [(0, 0, "bytes_per_s = 0"), (nan, 0, "bytes_per_s = nan"), (inf, 0, "bytes_per_s = inf"), (1, nan, "_s = nan")],
)
def test_a_link_that_cannot_be_is_refused_with_its_value(rate: float, latency_s: float, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Link("a", "b", rate, latency_s)
