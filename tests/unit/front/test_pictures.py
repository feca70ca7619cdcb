"""Pictures as they are: the answers are those to the same pixels, and what is no picture is refused in a sentence."""

import base64
import json
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import wait
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from isobatch.deployments.front.open_inference.tensors import JSON_BYTES_HEADER
from isobatch.deployments.models.encode import ImageEncoder
from tests.helpers.documented import TOY_OF_TEXTS, DocumentedClient, served, while_busy
from tests.helpers.grpc_client import inferred
from tests.helpers.tiny_networks import hugging_face

PIXELS = np.random.default_rng(3).integers(0, 256, (20, 30, 3), np.uint8)


def encoded(kind: str, **options: Any) -> bytes:
    content = BytesIO()
    Image.fromarray(PIXELS).save(content, kind, **options)
    return content.getvalue()


PNG = encoded("PNG")
FORMATS = {"image/png": PNG, "image/jpeg": encoded("JPEG"), "image/webp": encoded("WEBP", lossless=True)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import ViTImageProcessor

    folder = tmp_path_factory.mktemp("vit")
    hugging_face("vit").save_pretrained(folder)
    size = {"height": 8, "width": 8}
    ViTImageProcessor(size=size, image_mean=[0.5], image_std=[0.5]).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[DocumentedClient]:
    with served(model=str(folder), name="vit", max_inputs=4) as client:
        yield client


def answer_to(folder: Path, content: bytes) -> list[float]:
    """The probabilities as transformers gives them."""
    from transformers import AutoImageProcessor

    processor = AutoImageProcessor.from_pretrained(folder)
    with Image.open(BytesIO(content)) as picture:
        pixels = np.asarray(picture.convert("L"), np.float32)[:, :, None]
    arrays = processor(images=pixels, return_tensors="pt", input_data_format="channels_last")
    with torch.inference_mode():
        row: list[float] = hugging_face("vit")(**arrays).logits.softmax(dim=1)[0].tolist()
    return row


def scores(reply: Any) -> list[list[float]]:
    assert reply.status_code == 200, reply.text
    outputs = [sorted(output["scores"], key=lambda each: each["label"]) for output in reply.json()["outputs"]]
    return [[each["score"] for each in output] for output in outputs]


@pytest.mark.parametrize("kind", FORMATS)
def test_a_body_may_be_a_picture(client: DocumentedClient, folder: Path, kind: str) -> None:
    reply = client.post("/predict", content=FORMATS[kind], headers={"Content-Type": kind})
    (output,) = reply.json()["outputs"]
    expected = answer_to(folder, FORMATS[kind])
    assert (output["label"], output["score"]) == (int(np.argmax(expected)), pytest.approx(max(expected), abs=1e-5))


def test_pictures_come_in_a_form_or_as_base64(client: DocumentedClient, folder: Path) -> None:
    expected = [pytest.approx(answer_to(folder, content), abs=1e-5) for content in FORMATS.values()]
    form = [("file", (f"{index}", content, kind)) for index, (kind, content) in enumerate(FORMATS.items())]
    assert scores(client.post("/predict", files=form, data={"scores": "all"})) == expected
    texts = [base64.b64encode(content).decode() for content in FORMATS.values()]
    texts[0] = base64.encodebytes(next(iter(FORMATS.values()))).decode()  # in lines, as the program base64 writes it
    texts[1] = f"data:image/jpeg;base64,{texts[1]}"
    assert scores(client.post("/predict", json={"inputs": texts, "top_k": 3})) == expected
    assert scores(client.post("/predict", json={"inputs": texts[0], "top_k": 3})) == expected[:1]
    mixed = [texts[0], np.zeros((9, 9), int).tolist()]
    assert scores(client.post("/predict", json={"inputs": mixed, "scores": "all"}))[:1] == expected[:1]


def test_a_picture_is_turned_upright(client: DocumentedClient) -> None:
    """By its EXIF data, unless these are damaged."""
    turned, damaged = Image.Exif(), b"Exif\0\0no data"
    turned[0x0112] = 6  # its top is on the right
    upright = BytesIO()
    Image.fromarray(np.rot90(PIXELS, -1)).save(upright, "PNG")
    contents = encoded("PNG", exif=turned), upright.getvalue(), encoded("PNG", exif=damaged), PNG
    replies = [client.post("/predict", content=each, headers={"Content-Type": "image/png"}) for each in contents]
    of_turned, of_upright, of_damaged, of_whole = (reply.json()["outputs"][0]["score"] for reply in replies)
    assert (of_turned, of_damaged) == (of_upright, of_whole)
    assert of_upright != of_whole


def test_a_grey_picture_may_have_16_bits(client: DocumentedClient) -> None:
    grey = PIXELS[:, :, 0]
    contents = list[bytes]()
    for pixels in (grey, grey.astype(np.uint16) * 256 + 255):
        content = BytesIO()
        Image.fromarray(pixels).save(content, "PNG")
        contents.append(content.getvalue())
    replies = [client.post("/predict", content=each, headers={"Content-Type": "image/png"}) for each in contents]
    assert len({reply.json()["outputs"][0]["score"] for reply in replies}) == 1


def test_a_form_may_be_of_dotnet_or_name_its_file_in_unicode(client: DocumentedClient) -> None:
    """.NET sends names without quotes."""
    head = b"--x\r\nContent-Disposition: form-data; name=file; filename*=utf-8''%C3%A4.png\r\n\r\n"
    body = part("scores").replace(b'"', b"").replace(b"1\r\n", b"all\r\n") + head + PNG + b"\r\n--x--"
    reply = client.post("/predict", content=body, headers={"Content-Type": FORM})
    assert len(scores(reply)[0]) == 3


def test_the_pictures_of_a_request_have_a_limit_together(folder: Path) -> None:
    """They are refused before any of them is decoded: these cannot be."""
    large = base64.b64encode(bomb(2896)).decode()
    with served(model=str(folder)) as client:
        reasons = [client.post("/predict", json={"inputs": [large] * count}) for count in (8, 9)]
    assert [reply.status_code for reply in reasons] == [422, 422]
    first, last = (reply.json()["error"] for reply in reasons)
    assert "image 0 is given as a text (base64), but is not a complete" in first
    assert last == "the pictures have 75481344 pixels together: 67108864 are allowed"


def test_the_type_of_a_picture_may_be_in_capitals(client: DocumentedClient) -> None:
    replies = [
        client.post("/predict", content=PNG, headers={"Content-Type": kind}) for kind in ("image/png", "Image/PNG")
    ]
    assert [reply.status_code for reply in replies] == [200, 200]
    assert len({reply.json()["outputs"][0]["score"] for reply in replies}) == 1


def test_the_open_inference_protocol_takes_them_as_bytes(client: DocumentedClient, folder: Path) -> None:
    raw = b"".join(struct.pack("<I", len(content)) + content for content in FORMATS.values())
    tensor = {"name": "inputs", "datatype": "BYTES", "shape": [3], "parameters": {"binary_data_size": len(raw)}}

    text = json.dumps({"inputs": [tensor], "outputs": [{"name": "scores"}]}).encode()
    reply = client.post("/v2/models/vit/infer", content=text + raw, headers={JSON_BYTES_HEADER: str(len(text))})
    expected = np.ravel([answer_to(folder, content) for content in FORMATS.values()])
    assert reply.json()["outputs"][0]["data"] == pytest.approx(expected.tolist(), abs=1e-5)
    _, raws = inferred(folder, [3], [*FORMATS.values()], outputs=[{"name": "scores"}])
    assert np.frombuffer(raws["scores"], "<f4").tolist() == pytest.approx(expected.tolist(), abs=1e-5)


FORM = "multipart/form-data; boundary=x"


def part(name: str) -> bytes:
    return b'--x\r\nContent-Disposition: form-data; name="%s"\r\n\r\n1\r\n' % name.encode()


def bomb(side: int = 60_000) -> bytes:
    """A PNG of so many pixels in a few bytes."""
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)), (b"IDAT", zlib.compress(bytes(9)))]
    body = [
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(body)


def in_scans(count: int) -> bytes:
    """A grey JPEG of 16 x 16 pixels, over which each scan goes."""

    def part_of(kind: int, data: bytes) -> bytes:
        return struct.pack(">BBH", 0xFF, kind, len(data) + 2) + data

    frame = struct.pack(">BHHBBBB", 8, 16, 16, 1, 1, 0x11, 0)
    tables = b"".join(part_of(0xC4, bytes([kind, 1, *bytes(16)])) for kind in (0x00, 0x10))
    first, again = (part_of(0xDA, bytes([1, 1, 0, *of, 0])) + b"\0" for of in ((0, 0), (1, 63)))
    return b"\xff\xd8" + part_of(0xDB, b"\0" + b"\1" * 64) + part_of(0xC2, frame) + tables + first + again * (count - 1)


def test_a_jpeg_has_at_most_100_scans_before_its_end(client: DocumentedClient) -> None:
    for count, status in ((100, 200), (101, 422)):  # phones append films
        content = in_scans(count) + b"\xff\xd9" + b"\xff\xda\0\2" * 200
        reply = client.post("/predict", content=content, headers={"Content-Type": "image/jpeg"})
        assert reply.status_code == status, reply.text
    assert reply.json()["error"] == "image 0 has more than 100 scans"


@pytest.mark.parametrize(
    ("content", "kind", "status", "sentence"),
    [
        (bomb(5_000), "image/png", 422, "image 0 is 5000 x 5000: 1 to 8388608 pixels are allowed"),
        (bomb(), "image/png", 422, "image 0 is too large: 1 to 8388608 pixels are allowed"),
        (PNG[:200], "image/png", 422, "image 0 is given as bytes, but is not a complete JPEG, PNG, WEBP"),
        (encoded("BMP"), "image/bmp", 422, "not a complete JPEG, PNG, WEBP"),
        (b'{"inputs": "no picture"}', "application/json", 422, "image 0 is given as a text (base64), but is no"),
        (b"", "image/png", 422, "not a complete"),
        (b"--x\r\n", FORM, 400, "not a complete form"),
        (b"--x\r\n", "multipart/form-data", 400, "without a boundary"),
        (b"--x--\r\n", FORM, 422, "'inputs' is empty"),
        (part("a") + b"--x--", FORM, 400, "neither a file nor 'scores'"),
    ],
)
def test_refused_pictures(client: DocumentedClient, content: bytes, kind: str, status: int, sentence: str) -> None:
    reply = client.post("/predict", content=content, headers={"Content-Type": kind})
    assert (reply.status_code, sentence in reply.json()["error"]) == (status, True), reply.text


def test_a_bomb_is_never_decoded(client: DocumentedClient) -> None:
    began_s = time.thread_time()
    client.post("/predict", content=bomb(), headers={"Content-Type": "image/png"})
    assert time.thread_time() - began_s < 0.5


def test_a_form_of_too_many_parts_is_not_read(client: DocumentedClient) -> None:
    for count, sentence in ((8, "'inputs' is empty"), (9, "9 parts in one form: 8 are allowed")):
        form = part("top_k") * count + b"--x--"
        reply = client.post("/predict", content=form, headers={"Content-Type": FORM})
        assert sentence in reply.json()["error"]


def test_pictures_are_decoded_beside_the_event_loop(client: DocumentedClient, monkeypatch: pytest.MonkeyPatch) -> None:
    names, decode = list[str](), ImageEncoder.__call__

    def noted(encoder: ImageEncoder, inputs: Any) -> Any:
        names.append(threading.current_thread().name)
        return decode(encoder, inputs)

    monkeypatch.setattr(ImageEncoder, "__call__", noted)
    client.post("/predict", content=PNG, headers={"Content-Type": "image/png"})
    client.post("/predict", json={"inputs": np.zeros((9, 9), int).tolist()})
    assert [name.startswith("long-work") for name in names] == [True, False]


def test_pictures_that_would_be_late_are_not_decoded(folder: Path) -> None:
    with while_busy(folder, places=2) as (client, end, threads):
        headers = {"Content-Type": "image/png", "X-Deadline-Ms": "100"}
        waiting = threads.submit(client.post, "/predict", content=b"no picture", headers=headers)
        assert not wait([waiting], timeout=0.3).done
        end.set()
        assert waiting.result().status_code == 503
        assert client.post("/predict", content=b"no picture", headers=headers).status_code == 422


def test_a_network_of_texts_takes_no_pictures() -> None:
    with served(**TOY_OF_TEXTS) as client:
        reply = client.post("/predict", content=PNG, headers={"Content-Type": "image/png"})
        assert reply.status_code == 422, reply.text
