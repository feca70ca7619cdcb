"""The processor that a benchmark runs on, and the end of a benchmark that is told to stop."""

import platform
import signal
import sys
from contextlib import suppress
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
FLAGS = {"amx": "amx_tile", "avx512": "avx512f", "bfloat16": "avx512_bf16", "vnni": "avx512_vnni", "avx2": "avx2"}


def processor(cpuinfo: Path = CPUINFO) -> str:
    """Its model, where Linux tells; its architecture elsewhere."""
    with suppress(OSError):
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def processor_flags(cpuinfo: Path = CPUINFO) -> list[str]:
    """Those flags of the processor that make launches of many inputs cheap."""
    has = _words(cpuinfo)
    return [name for name, flag in FLAGS.items() if flag in has]


def computes_bfloat16(cpuinfo: Path = CPUINFO) -> bool:
    """Whether this processor has instructions for bfloat16: without them, it takes ten times as long as float32."""
    return not _words(cpuinfo).isdisjoint(("avx512_bf16", "amx_bf16"))


def _words(cpuinfo: Path) -> set[str]:
    with suppress(OSError):
        return set(cpuinfo.read_text().split())
    return set()


def end_as_by_ctrl_c() -> None:
    """Let this process stop what it has started when it is told to end. More of the same does not interrupt that."""
    signal.signal(signal.SIGTERM, _end)


def _end(number: int, _: object) -> None:
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)
