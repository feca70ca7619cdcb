"""isobatch is one package, and each of its modules has one name, from a checkout as from a wheel."""

import sys
from importlib import import_module

import pytest

PARTS = ("profiles", "optimizer", "deployments", "cluster")


def test_a_network_is_loaded_from_the_package_itself() -> None:
    import isobatch

    assert isobatch.load is import_module("isobatch.deployments").load


@pytest.mark.parametrize("part", PARTS)
def test_a_part_has_no_second_name(part: str) -> None:
    """The folders at the top of a checkout would be packages too."""
    for name in (part, f"{part}.errors"):
        with pytest.raises(ImportError, match=f"import isobatch.{part}"):
            import_module(name)
    assert part not in sys.modules
