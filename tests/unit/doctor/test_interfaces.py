"""doctor/interfaces: which variables name interfaces that a host can't use."""

from __future__ import annotations

import pytest

from launchpad.doctor.interfaces import lacking, misleading


@pytest.mark.parametrize(
    ("name", "value", "missing"),
    [
        ("GLOO_SOCKET_IFNAME", "eth0", []),
        ("GLOO_SOCKET_IFNAME", "eth0,lo", ["lo"]),
        ("NCCL_SOCKET_IFNAME", "eth", []),
        ("NCCL_SOCKET_IFNAME", "=eth", ["eth"]),
        ("NCCL_SOCKET_IFNAME", "lo,eth0", []),
        ("NCCL_SOCKET_IFNAME", "^docker,lo", []),
        ("UCX_NET_DEVICES", "mlx5_0:1", []),
        ("FI_TCP_IFACE", "lo", ["lo"]),
        ("OMPI_MCA_btl_tcp_if_include", "10.0.0.0/8", []),
        ("OMPI_MCA_btl_tcp_if_include", "lo,eth1", ["lo", "eth1"]),
        ("GLOO_DEVICE_TRANSPORT", "lo", []),
    ],
)
def test_what_a_host_lacks(name: str, value: str, missing: list[str]) -> None:
    assert lacking({name: value}, ["eth0", "ib0"]) == ({name: missing} if missing else {})


def test_each_variable_is_told_once_with_its_hosts() -> None:
    environ = {"GLOO_SOCKET_IFNAME": "eth1", "NCCL_SOCKET_IFNAME": "eth"}
    (told,) = misleading(environ, {"a": ["eth0"], "b": ["eth0", "eth1"], "c": ["eth0"]})
    assert told.startswith(
        "GLOO_SOCKET_IFNAME=eth1 is set, but from a, c no other host can be reached over that: unset"
    )
