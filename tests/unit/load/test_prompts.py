"""The figures of `isobatch load --prompts`, on a server that writes scripted answers."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from isobatch.cluster.load.prompts import PromptLoad, WrittenText, prompts_in, summed
from isobatch.cluster.load.report import is_failure
from isobatch.cluster.load.request_bodies import bodies_in

TOKENS, GAP_S = 4, 0.05


@asynccontextmanager
async def server(status: str = "200 OK", gap_s: float = GAP_S) -> AsyncIterator[str]:
    """Writes four tokens in two groups with a gap between them, in pieces that do not match the events."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.1 {status}\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n".encode())
        group = b"data: " + json.dumps({"choices": [{"text": "ab", "exit_blocks": [1, 5]}]}).encode() + b"\n\n"
        for piece in (group[:20], group[20:] + group[:7], group[7:], b"data: [DONE]\n\n"):
            writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
            await writer.drain()
            await asyncio.sleep(gap_s)
        writer.write(b"0\r\n\r\n")
        writer.close()

    made = await asyncio.start_server(answer, "127.0.0.1")
    async with made:
        yield f"http://127.0.0.1:{made.sockets[0].getsockname()[1]}"


async def open_loop(*due_s: float, status: str = "200 OK", gap_s: float = GAP_S, **more: float) -> list[WrittenText]:
    async with server(status, gap_s) as url:
        load = PromptLoad(url, ["1+1="], 8)
        return load.texts(await load.at(np.array(due_s), **more))


async def test_tokens_are_counted_and_timed() -> None:
    written = await open_loop(0.0, 0.01, 0.02)
    assert [each.tokens for each in written] == [TOKENS] * 3
    assert all(each.last_s - each.first_s >= 0.9 * GAP_S for each in written)
    result = summed(written, slo_ms=60_000)
    assert result.good_share == 1.0
    assert result.tokens_per_s == pytest.approx(3 * TOKENS / result.seconds)
    assert result.tpot_ms["p50"] >= 0.9 * 1e3 * GAP_S / (TOKENS - 1)
    assert not is_failure(result.outcomes)


async def test_texts_that_are_still_being_written_are_not_lost() -> None:
    """With more patience than for one gap, and less than for all four."""
    assert [each.tokens for each in await open_loop(0.0, gap_s=0.4, patience_s=1.3)] == [TOKENS]


async def test_clients_send_the_next_prompt_once_they_have_the_whole_answer() -> None:
    async with server() as url:
        load = PromptLoad(url, ["1+1="], 8)
        written = load.texts(await load.by_clients(2, 3 * GAP_S))
    assert len(written) >= 2
    assert {each.status for each in written} == {200}


async def test_refusals_are_counted_and_are_no_answers() -> None:
    result = summed(await open_loop(0.0, 0.01, 0.02, status="429 Too Many"), slo_ms=60_000)
    assert result.outcomes == {"refused": 3}
    assert is_failure(result.outcomes)


@pytest.mark.parametrize("max_tokens", [None, 5])
async def test_the_most_tokens_are_the_servers_unless_the_user_gives_them(max_tokens: int | None) -> None:
    sent = list[bytes]()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError):  # of the connections that no request needs
            sent.append(await reader.readuntil(b"}"))
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1") as made:
        url = f"http://127.0.0.1:{made.sockets[0].getsockname()[1]}"
        await PromptLoad(url, ["1+1="], max_tokens).at(np.array([0.0]))
    head, _, body = sent[0].partition(b"\r\n\r\n")
    assert b"POST /v1/completions" in head
    assert json.loads(body) == {"prompt": "1+1=", "max_tokens": max_tokens, "stream": True}


def test_a_prompt_is_a_line_whatever_program_wrote_the_file(tmp_path: Path) -> None:
    """With a byte order mark and \r\n as on Windows, and with signs at which Python would divide a line, too."""
    (tmp_path / "prompts.txt").write_bytes("\ufeffone\u2028and the same\x0c\r\n\r\ntwo".encode())
    assert prompts_in(tmp_path / "prompts.txt") == ["one\u2028and the same\x0c", "two"]
    (tmp_path / "bodies.jsonl").write_bytes('\ufeff{"inputs": "a"}\r\n\r\n{"inputs": "b"}'.encode())
    assert bodies_in(tmp_path / "bodies.jsonl") == [b'{"inputs": "a"}', b'{"inputs": "b"}']
