"""The machine of a benchmark: processor, ports, public data, and an end by a signal."""

import os
import platform
import signal
import sys
from contextlib import suppress
from pathlib import Path

from isobatch.cluster.serving.ports import held_ports
from isobatch.profiles.errors import UserError

ROOT = Path(__file__).parents[2]

CPUINFO = Path("/proc/cpuinfo")
FLAGS = {"amx": "amx_tile", "avx512": "avx512f", "bfloat16": "avx512_bf16", "vnni": "avx512_vnni", "avx2": "avx2"}


def processor() -> str:
    """The processor's model on Linux, with the numbers that tell generations of one name apart; elsewhere its
    architecture.
    """
    with suppress(OSError):
        parts = (line.partition(":") for line in CPUINFO.read_text().splitlines())
        facts = {name.strip(): value.strip() for name, _, value in parts}
        if "model name" in facts:
            return f"{facts['model name']}, family {facts.get('cpu family')}, model {facts.get('model')}"
    return platform.machine()


def processor_flags() -> list[str]:
    """The processor's flags that make large launches cheap."""
    has = _words()
    return [name for name, flag in FLAGS.items() if flag in has]


def computes_bfloat16() -> bool:
    """Whether this processor has instructions for bfloat16, which otherwise takes ten times as long as float32."""
    return not _words().isdisjoint(("avx512_bf16", "amx_bf16"))


def _words() -> set[str]:
    with suppress(OSError):
        return set(CPUINFO.read_text().split())
    return set()


def free_port(host: str = "127.0.0.1") -> int:
    with held_ports(1, host) as (port,):
        return port


def data(name: str) -> Path:
    """The path of a file of public data, under ISOBATCH_DATA or beside the checkout. The project contains no data."""
    folder = Path(os.environ.get("ISOBATCH_DATA", ROOT.parent / "shared" / "data"))
    if not (folder / name).exists():
        raise UserError(f"{folder / name} is not there: set ISOBATCH_DATA to the folder that holds {name}")
    return folder / name


def end_as_by_ctrl_c() -> None:
    """Let SIGTERM end this process as Ctrl-C does, so that it ends its servers; a second SIGTERM is ignored."""
    signal.signal(signal.SIGTERM, _end)


def _end(number: int, _: object) -> None:
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)
