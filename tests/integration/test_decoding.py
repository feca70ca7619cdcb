"""A decoder on Serve, asked by OpenAI's own client: whole, streamed, left alone, and over the death of its replica."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.shared.machine import free_port
from isobatch.cluster.controller.application import RunningApplication
from isobatch.deployments.demo import llm_demo_directory
from isobatch.deployments.demo.sums import answer_to, prompt_of, sums
from isobatch.deployments.deployer.steps import FRONT, Moved
from isobatch.deployments.metrics import TEXT_FRONT, TEXT_REPLICA
from isobatch.optimizer.plan import DecodingTerms, Placement, Plan, Split
from isobatch.profiles.text_profile import (
    DecoderProfile,
    DecodingTable,
    DecodingWorkload,
    LaunchSize,
    save_text_profile,
)
from tests.helpers.asking import ask, eventually
from tests.helpers.scraping import check_family, scraped

PAIRS = sums(held_out=True)[:40]
PROMPTS = [prompt_of(*pair) for pair in PAIRS]


@pytest.fixture(scope="module")
def grpc_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the demo's decoder, as if launches cost hardly anything but themselves: then many residents are better. Its
    tokens are known after block 1 or the last. Of the two kinds of devices one is half as fast, on paper."""
    path = tmp_path_factory.mktemp("profile") / "profile.json"
    tables = tuple(
        DecodingTable(kind, LaunchSize(launches=s, blocks=s / 10, rows=s / 1000), "made up", 512, 10**6, error=0.1,
                      residents=64)
        for kind, s in (("cpu", 1e-3), ("t4", 2e-3))
    )  # fmt: skip
    workload = DecodingWorkload(((1, 0.03),), (6,) * 20, (18,) * 20)
    save_text_profile(DecoderProfile("llm-demo", 8, 64, tables, workload), path)
    return path


@pytest.fixture(scope="module")
def side_by_side(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan of two pipelines, each of one replica; the second is on the same processors here. Texts may wait for their
    first token for longer than a replica takes to start again, on a slow machine too: late ones are refused."""
    path, splits = tmp_path_factory.mktemp("plan") / "plan.json", (Split(0, 2, 32, ramps=(1,)), Split(2, 8, 16))
    first, other = (
        Plan(
            (Placement(kind, 1, splits, local=True),),
            decoding=DecodingTerms("recompute", 256, 256, ttft_s=60.0, tpot_s=0.2, tokens_per_s=share),
        )
        for kind, share in (("cpu", 200.0), ("t4", 100.0))
    )
    path.write_text(replace(first, beside=(other,)).to_json())
    return path


@pytest.fixture(scope="module")
def decoder(
    local: Any, deployed: Any, grpc_port: int, profile: Path, side_by_side: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> str:  # fmt: skip
    memory = str(tmp_path_factory.mktemp("memory"))
    # It decides only when a test asks it.
    watching = {"application": "decoder", "memory": memory, "replan_every_s": 3600.0, "look_every_s": 0.5}
    controller = {
        "name": "controller",
        "import_path": "isobatch.cluster.controller.app:build",
        "route_prefix": "/controller",
    }
    fields = {
        "model": str(llm_demo_directory()),
        "name": "llm-demo",
        "cpus_per_replica": 0.25,
        "max_prompts": 64,
        "device": "cpu",
    }
    fields |= {"plan": str(side_by_side), "replan": True, "grpc_port": grpc_port, "profile": str(profile)}
    path = "isobatch.deployments.decoding.app:build"
    address: str = deployed(
        {"name": "decoder", "import_path": path, "route_prefix": "/", "args": fields}, {**controller, "args": watching}
    )
    return address


@pytest.fixture(scope="module")
def client(decoder: str) -> Any:
    openai = pytest.importorskip("openai")
    return openai.OpenAI(base_url=f"{decoder}/v1", api_key="none", max_retries=0, timeout=120)


@pytest.fixture(scope="module")
def written(client: Any) -> list[str]:
    reply = client.completions.create(model="llm-demo", prompt=PROMPTS, max_tokens=24)
    return [choice.text for choice in reply.choices]


def test_openais_client_gets_sums_in_words(client: Any, written: list[str]) -> None:
    assert client.models.list().data[0].id == "llm-demo"
    right = [text == answer_to(*pair) for text, pair in zip(written, PAIRS, strict=True)]
    assert sum(right) >= 0.9 * len(right)
    reply = client.completions.create(model="llm-demo", prompt=PROMPTS[0], max_tokens=24)
    assert reply.usage.completion_tokens == len(written[0]) + 1
    assert len(reply.choices[0].exit_blocks) == reply.usage.completion_tokens
    assert reply.choices[0].finish_reason == "stop"


def test_stats_are_the_sum_over_all_replicas(written: list[str], decoder: str) -> None:
    """Prompts of one request go to both pipelines."""
    counts = ask(decoder, "GET", "/stats")[1]
    assert counts["replicas"] == 2
    assert counts["splits"][0]["launches"] > 0
    assert sum(counts["exits"].values()) >= sum(len(text) + 1 for text in written)


def test_tritons_client_gets_the_same_text(written: list[str], grpc_port: int) -> None:
    triton = pytest.importorskip("tritonclient.grpc")
    body = triton.InferInput("text_input", [1], "BYTES")
    body.set_data_from_numpy(np.array([PROMPTS[0]], dtype=object))
    with triton.InferenceServerClient(f"127.0.0.1:{grpc_port}") as client:
        result = client.infer("llm-demo", [body], parameters={"max_tokens": 24})
    assert result.as_numpy("text_output")[0].decode() == written[0]


def test_openais_client_streams_chats(client: Any, written: list[str]) -> None:
    question = [{"role": "user", "content": PROMPTS[1].removesuffix("=")}]
    stream = client.chat.completions.create(
        model="llm-demo", messages=question, stream=True, stream_options={"include_usage": True}
    )
    parts = list(stream)
    assert "".join(each.choices[0].delta.content or "" for each in parts if each.choices) == written[1]
    assert parts[-1].usage.completion_tokens == len(written[1]) + 1


def test_prometheus_is_told_of_tokens_and_residents(written: list[str]) -> None:
    families = [family for family in TEXT_FRONT + TEXT_REPLICA if family.name != "isobatch_preempted"]  # nobody was
    assert eventually(lambda: {family.name for family in families} <= scraped().keys())
    result = scraped()
    for family in families:
        check_family(family, result[family.name])


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_pages(client: Any, decoder: str, stream: bool) -> None:
    openai = pytest.importorskip("openai")
    body = {"model": "llm-demo", "prompt": PROMPTS, "max_tokens": 50, "extra_body": {"ignore_eos": True}}

    def stats() -> dict[str, Any]:
        return dict(ask(decoder, "GET", "/stats")[1])

    def cancelled_once_another_has_gone() -> int:
        if stream:
            news = client.completions.create(**body, stream=True)
            next(iter(news))
            news.close()
        else:
            with suppress(openai.APITimeoutError):
                client.with_options(timeout=0.05).completions.create(**body)
        return int(stats()["requests"]["cancelled"])

    def has_no_texts() -> bool:
        counts = stats()
        return counts["residents"] == counts["waiting"] == 0 and counts["pages"]["free"] == counts["pages"]["of"]

    before = stats()["requests"]["cancelled"]
    assert eventually(lambda: cancelled_once_another_has_gone() > before)
    assert eventually(has_no_texts)


@contextmanager
def writing(client: Any, threads: int = 1) -> Iterator[list[Any]]:
    """What is written while the block runs, and until its last request is answered: all prompts, again and again."""
    result: list[Any] = []
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            result.extend(client.completions.create(model="llm-demo", prompt=PROMPTS, max_tokens=24).choices)

    writers = [threading.Thread(target=write) for _ in range(threads)]
    for writer in writers:
        writer.start()
    try:
        yield result
    finally:
        stop.set()
        for writer in writers:
            writer.join()


def texts_of(result: list[Any]) -> list[str]:
    return [choice.text for choice in result]


def test_a_plan_change_while_texts_are_written_changes_no_token(client: Any, decoder: str, written: list[str]) -> None:
    """Texts of what is served here have other lengths, and go on as often as they do."""

    def controlled() -> Any:
        status, counts = ask(decoder, "GET", "/controller/status")[:2]
        return counts if status == 200 else None

    def seen_tokens() -> float:
        window = controlled()["window"]
        return float(window["arrivals_per_s"] * window["seconds"])

    tokens = sum(len(text) + 1 for text in written)
    before = eventually(controlled)["plan"]["summary"]
    with writing(client) as result:
        assert eventually(lambda: seen_tokens() >= 2 * tokens)
        status, event = ask(decoder, "POST", "/controller/force")[:2]
        assert (status, event["what"]) == (200, "rolled out"), event
        after = len(result)
        assert eventually(lambda: len(result) >= after + 2 * len(written))
    assert event["before"] == before != event["after"] == controlled()["plan"]["summary"]
    assert texts_of(result) == len(result) // len(written) * written
    counts = controlled()
    assert counts["forecast"]["tokens_per_text"] == pytest.approx(tokens / len(written), rel=0.1)
    assert counts["survival"][2] < 0.3


def cut_behind(block: int, plan: Plan) -> Plan:
    first, *others = (pipeline_cut_behind(block, each) for each in plan.pipelines)
    return replace(first, beside=tuple(others))


def pipeline_cut_behind(block: int, pipeline: Plan) -> Plan:
    residents, (placement,) = pipeline.splits[0].batch_size, pipeline.placements
    splits = (Split(0, block + 1, residents, ramps=(block,)), Split(block + 1, 8, max(1, residents // 4)))
    terms = replace(pipeline.decoding, exits="recompute")  # the controller may have found that none pay
    return replace(pipeline, placements=(replace(placement, splits=splits, local=True),), decoding=terms)


def test_a_cut_moves_while_texts_are_written_and_all_are_right(client: Any, decoder: str, written: list[str]) -> None:
    """Residents begin again from what they have written; the ramp behind block 3 says of these sums what the other
    says."""
    pause_controller(decoder)
    with asyncio.Runner() as loop, writing(client, threads=2) as result:
        leader = RunningApplication("decoder", leader=FRONT)
        before = loop.run(leader.plan())
        assert eventually(lambda: ask(decoder, "GET", "/stats")[1]["residents"])
        for block in 10 * (3, 1):
            assert isinstance(loop.run(leader.roll_out(cut_behind(block, before))), Moved)
            assert ask(decoder, "GET", "/stats")[1]["ramps"] == [block]
            so_far = len(result)
            assert eventually(lambda so_far=so_far: len(result) > so_far)
            if met_half_written(result):
                break
        assert isinstance(loop.run(leader.roll_out(before)), Moved)
    assert met_half_written(result), "no cut has moved in the middle of a text"
    assert texts_of(result) == len(result) // len(written) * written


def pause_controller(decoder: str) -> None:
    """After this the controller changes no plan, also not to end a look with all ramps open."""

    def explores() -> bool:
        return bool(ask(decoder, "GET", "/controller/status")[1]["events"][-1]["what"] == "looking")

    assert ask(decoder, "POST", "/controller/pause") == (200, {"paused": True})
    assert eventually(lambda: not explores())
    assert ask(decoder, "GET", "/controller/would")[0] == 200  # after a change that is being made


def met_half_written(result: list[Any]) -> bool:
    """Whether there is a text that was written under both cuts."""
    return any({1, 3} <= set(choice.exit_blocks) for choice in list(result))


def test_the_death_of_a_replica_changes_no_token(client: Any, decoder: str, written: list[str]) -> None:
    import ray

    result: list[str] = []

    def write() -> None:
        for _ in range(3):
            reply = client.completions.create(model="llm-demo", prompt=PROMPTS, max_tokens=24)
            result.extend(choice.text for choice in reply.choices)

    thread = threading.Thread(target=write)
    thread.start()
    assert eventually(lambda: ask(decoder, "GET", "/stats")[1]["residents"])
    names = [
        each["name"] for each in ray.util.list_named_actors(all_namespaces=True) if "decoder#decoder-" in each["name"]
    ]
    for name in names:
        ray.kill(ray.get_actor(name, namespace="serve"), no_restart=True)
    thread.join()
    assert names
    assert result == 3 * written
