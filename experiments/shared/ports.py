"""A free port, for servers that tests and benchmarks start."""

from isobatch.cluster.serving.ports import held_ports


def free_port(host: str = "127.0.0.1") -> int:
    with held_ports(1, host) as (port,):
        return port
