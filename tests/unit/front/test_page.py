"""The page consists of its files, needs no key, and loads nothing from other servers; other pages may send nothing."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from isobatch.deployments.front.page import DOCS, EXPLAINING, FILES, FLEET, files
from isobatch.deployments.named import LOADER
from isobatch.profiles.errors import UserError
from isobatch.profiles.exits import ExitProfile
from isobatch.profiles.files import Profile, save
from isobatch.profiles.latency import LatencyTable
from tests.helpers.documented import TOY, TOY_OF_TEXTS, DocumentedClient, front, served, with_document

BODY = {"inputs": [0, 3]}


@pytest.fixture(scope="module")
def client() -> Iterator[DocumentedClient]:
    with DocumentedClient(with_document(front(), "the toy"), base_url="http://localhost:8000") as client:
        yield client


def test_the_page_loads_only_its_own_files(client: TestClient) -> None:
    links = dict[str, set[str]]()
    for path in ("/", DOCS):
        page = client.get(path)
        assert page.headers["content-type"].startswith("text/html")
        links[path] = {f"/{file}" for file in re.findall(r'(?:href|src)="(page/[^"]+)"', page.text)}
        assert {client.get(file).status_code for file in links[path]} == {200}
    assert len(links["/"]) == 4
    assert links[DOCS] | {DOCS} == EXPLAINING
    of_fleet = {f"/{file}" for file in re.findall(r'(?:href|src)="(page/[^"]+)"', FLEET["/"].read_text())}
    assert of_fleet <= EXPLAINING | FLEET.keys()


def test_the_page_may_run_nothing_from_other_servers(client: TestClient) -> None:
    for path in files():
        policy = client.get(path).headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
    for name in ("index.html", "page.js", "page.css", "docs.html", "docs.js", "docs.css", "fleet.html", "fleet.js"):
        unsafe = r"//cdn|@import|innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\("
        assert not re.search(unsafe, (FILES / name).read_text())


def test_the_page_tells_the_kind_of_inputs(client: TestClient) -> None:
    answer = client.get("/page/about.json").json()
    assert answer == {"model": "toy", "blocks": 4, "slo_ms": 60_000, "takes": "other", "maps": False, "scores": False}


@pytest.mark.parametrize(("form", "takes"), [("isobatch", "texts"), ("tei", "other")])
def test_the_page_sends_inputs_only_where_it_can_read_the_answers(form: str, takes: str) -> None:
    with served(**TOY_OF_TEXTS, predict_form=form) as client:
        assert client.get("/page/about.json").json()["takes"] == takes


def test_only_the_demo_gets_digits(tmp_path: Path) -> None:
    """Virtual devices and the networks of users' own loaders name no model either."""
    table = LatencyTable("v100", (1,), ((0.001,),), ((0.0,),), 0.0, (1,), (1,), "made up")
    save(Profile("virtual", (table,), ExitProfile((1.0,))), tmp_path / "profile.json")
    virtual = {"backend": "virtual", "profile": str(tmp_path / "profile.json")}
    own = {"loader": TOY["loader"]}
    for fields, takes in (({"loader": LOADER}, "digits"), (virtual, "other"), (own, "other")):
        with served(model=None, **fields) as client:
            assert client.get("/page/about.json").json()["takes"] == takes, fields


def test_a_key_is_asked_for_everywhere_but_for_the_page_and_health_checks(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "security" not in client.app.openapi()
    with pytest.raises(UserError, match="'KEY': that environment variable is not set"):
        front(api_key_variable="KEY")
    monkeypatch.setenv("KEY", "open sesame\n")  # as secrets of Kubernetes often end
    with served(api_key_variable="KEY") as locked:
        assert set(locked.app.openapi()["components"]["securitySchemes"]) == {"bearer", "header"}
        for path in ("/stats", "/openapi.json", "/v2/models/toy", "/page/about.json"):
            assert locked.get(path).status_code == locked.get(path, headers={"X-API-Key": "open"}).status_code == 401
            assert locked.get(path, headers={"X-API-Key": "open sesame"}).status_code == 200
        for path in ("/predict", "/v2/models/toy/infer"):
            assert locked.post(path, json=BODY).status_code == 401
        for path in (*files(), "/healthz", "/readyz"):
            assert locked.get(path).status_code == 200, path
        # Who shows the key may ask from anywhere: no page knows it.
        for header in (
            {"X-API-Key": "open sesame", "Origin": "http://evil.example"},
            {"Authorization": "Bearer open sesame"},
        ):
            assert locked.post("/predict", json=BODY, headers=header).status_code == 200


@pytest.mark.parametrize("path", ["/predict", "/v2/models/toy/infer"])
@pytest.mark.parametrize("headers", [{"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "cross-site"}])
def test_a_page_of_another_server_is_refused(client: TestClient, path: str, headers: dict[str, str]) -> None:
    refused = client.post(path, json=BODY, headers=headers)
    assert refused.status_code == 403
    assert "only pages of this server" in refused.json()["error"]


@pytest.mark.parametrize("headers", [{}, {"Origin": "http://localhost:8000"}, {"Sec-Fetch-Site": "same-origin"}])
def test_our_own_page_and_programs_are_answered(client: TestClient, headers: dict[str, str]) -> None:
    assert client.post("/predict", json=BODY, headers=headers).status_code == 200


SHOP = {"Origin": "https://shop.example"}


@pytest.fixture(scope="module")
def allowing() -> Iterator[TestClient]:
    with TestClient(front(allowed_origins=["https://shop.example"]), base_url="http://localhost:8000") as client:
        yield client


def test_an_allowed_page_sends_requests_and_reads_answers(allowing: TestClient) -> None:
    wanted = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type, x-deadline-ms"}
    before = allowing.options("/predict", headers=SHOP | wanted)
    assert (before.status_code, before.headers["access-control-allow-origin"]) == (200, SHOP["Origin"])
    assert "x-deadline-ms" in before.headers["access-control-allow-headers"].lower()
    near = allowing.options("/predict", headers=SHOP | wanted | {"Access-Control-Request-Private-Network": "true"})
    assert (near.status_code, near.headers["access-control-allow-private-network"]) == (200, "true")
    for header in ("x-priority", "content-encoding", "inference-header-content-length", "x-stainless-lang"):
        before = allowing.options("/predict", headers=SHOP | wanted | {"Access-Control-Request-Headers": header})
        assert (header, before.status_code, before.headers["access-control-allow-headers"]) == (header, 200, header)
    for path in ("/predict", "/stats"):
        ask = allowing.post if path == "/predict" else allowing.get
        reply = ask(path, headers=SHOP, **({"json": BODY} if path == "/predict" else {}))
        assert (reply.status_code, reply.headers["access-control-allow-origin"]) == (200, SHOP["Origin"])


def test_no_other_page_gets_cors_headers(allowing: TestClient) -> None:
    refused = allowing.post("/predict", json=BODY, headers={"Origin": "http://evil.example"})
    assert refused.status_code == 403
    assert "access-control-allow-origin" not in refused.headers
    fields = {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}
    assert "access-control-allow-origin" not in allowing.options("/predict", headers=fields).headers
    assert allowing.post("/predict", json=BODY).status_code == 200


def test_another_host_is_refused_unless_it_is_allowed() -> None:
    """A public page whose name points to this machine would be a page of this server."""
    with served(allowed_hosts=["api.example"]) as client:
        for path in ("/stats", "/", "/docs", "/v2", "/v2/models/toy", "/v2/models/toy/ready"):
            assert client.get(path, headers={"Host": "evil.example:8000"}).status_code == 403
        refused = client.post("/predict", json=BODY, headers={"Host": "evil.example"})
        assert refused.status_code == 403
        assert "Host is 'evil.example'" in refused.json()["error"]
        for host in ("api.example", "localhost:8000", "[::1]:8000", "10.0.0.7:8000", "front.local", "front"):
            assert client.post("/predict", json=BODY, headers={"Host": host}).status_code == 200, host
        assert client.get("/healthz", headers={"Host": "balancer.example"}).status_code == 200
