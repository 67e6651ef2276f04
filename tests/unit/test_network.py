"""Which addresses are private."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nbdist.base import network
from nbdist.client.start.node_arguments import nodes_wanted
from nbdist.client.start.start_settings import StartSettings
from nbdist.errors import UsageError


@pytest.mark.parametrize(
    "address",
    [
        *("10.1.2.3", "172.16.0.1", "172.31.255.255", "192.168.1.1", "169.254.7.7", "127.0.0.1", "100.64.0.1"),
        *("100.127.255.255", "fd00::1", "fe80::1%eth0", "::1", "::ffff:10.0.0.1"),
    ],
)
def test_addresses_that_never_cross_the_internet_are_private(address: str) -> None:
    assert network.is_private(address)


@pytest.mark.parametrize(
    "address",
    [
        *("8.8.8.8", "172.15.255.255", "172.32.0.0", "192.169.0.0", "100.63.255.255", "100.128.0.0", "192.0.2.1"),
        *("2001:db8::1", "fbff::1", "::ffff:8.8.8.8", "0.0.0.0"),
    ],
)
def test_all_others_are_not(address: str) -> None:
    assert not network.is_private(address)


def test_an_address_that_is_not_private_is_refused_if_it_has_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine need not have one: where it does, it says so."""
    monkeypatch.setattr(network, "is_local", lambda address: True)
    settings = StartSettings(num_processes=1, num_nodes=2, master_addr="10.0.0.1", private_network=True)
    assert nodes_wanted(settings)[1] is not None
    with pytest.raises(UsageError, match=r"8\.8\.8\.8 is not the address of a private network"):
        nodes_wanted(replace(settings, master_addr="8.8.8.8"))
