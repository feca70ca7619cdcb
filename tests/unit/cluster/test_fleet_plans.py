"""isobatch plan fleet.yaml: several applications on one set of devices."""

import json
import re
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from experiments.planner.networks import bert_base, distilbert
from isobatch.cluster.commands.plan_search import searched
from isobatch.cluster.serving.kubernetes import KEY_VARIABLE, objects
from isobatch.cluster.serving.serve_file import arbiters, controllers, serve_file, served
from isobatch.optimizer.plan import read_plan
from isobatch.profiles.curves import DTYPES, curve_table
from isobatch.profiles.datasheet import datasheet_table
from isobatch.profiles.errors import UserError
from isobatch.profiles.exits import ExitProfile
from isobatch.profiles.files import Profile, save
from tests.helpers.commands import ran

FAST = ("--no-simulation", "--gap", "0.02", "--max-batch", "16")
VIRTUAL = {"args": {"backend": "virtual", "cpus_per_replica": 0}}


@pytest.fixture(scope="module")
def profiles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fleet")
    for name, shape in {"distilbert": distilbert(), "bert": bert_base()}.items():
        tables = tuple(datasheet_table(shape, kind) for kind in ("v100", "k80"))
        blocks = tables[0].num_blocks
        exits = ExitProfile(tuple(1 - 0.7 * block / blocks for block in range(blocks)))
        save(Profile(name, tables, exits, weights="a1b2"), folder / f"{name}.json")
    return folder


@pytest.fixture
def folder(profiles: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for file in profiles.iterdir():
        (tmp_path / file.name).symlink_to(file)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def entry(name: str, profile: str = "distilbert.json", **fields: Any) -> dict[str, Any]:
    return {"name": name, "profile": profile, "slo_ms": 100} | fields


def plan(*options: str, **content: Any) -> str:
    fleet = {"devices": {"v100": 2, "k80": 3}} | content
    Path("fleet.yaml").write_text(yaml.safe_dump(fleet))
    return ran("plan", "fleet.yaml", *options)


@pytest.fixture(scope="module")
def planned(profiles: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the plans of two applications, their Serve file, and what the command prints."""
    folder = tmp_path_factory.mktemp("planned")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for file in profiles.iterdir():
            Path(file.name).symlink_to(file)
        printed = plan(*FAST, "--out", "serve.yaml", applications=[each | VIRTUAL for each in TWO])
        Path("printed.txt").write_text(printed)
    return folder


TWO = [entry("reviews", "bert.json", least_per_s=3000, weight=2), entry("queries", rate_per_s=2000)]


def test_each_application_gets_a_plan_on_devices_of_its_own(planned: Path, folder: Path) -> None:
    output = " ".join((planned / "printed.txt").read_text().split())
    plans = [read_plan(planned / f"{name}-plan.json") for name in ("reviews", "queries")]
    assert [(each.model, each.slo_s) for each in plans] == [("bert", 0.1), ("distilbert", 0.1)]
    for kind, count in {"v100": 2, "k80": 3}.items():
        assert sum(each.devices().get(kind, 0) for each in plans) <= count
    assert all(each.promise is not None for each in plans)
    assert plans[0].promise.goodput_per_s >= 3000
    assert f"{plans[0].promise.goodput_per_s:,.0f}" in output
    for words in ("equal share", "all devices", "weighted goodput", "no division is better"):
        assert words in output
    printed = json.loads(plan(*FAST, "--json", applications=TWO))
    assert [each["name"] for each in printed["applications"]] == ["reviews", "queries"]
    assert (printed["goal"], printed["gap"], printed["exact"]) == ("goodput", 0.0, True)
    assert printed["applications"][0]["alone_per_s"] >= printed["applications"][0]["estimated_per_s"]


@pytest.mark.parametrize("cost", [False, True])
def test_one_application_alone_gets_the_plan_that_it_has_without_a_file(folder: Path, cost: bool) -> None:
    arguments = ("--rate", "13000", "--goal", "cost") if cost else ()
    options = ("--profile", "distilbert.json", "--devices", "v100=2,k80=3", "--slo-ms", "100", "--out", "plan.json")
    ran("plan", *options, *arguments, "--no-simulation")
    plan("--no-simulation", applications=[entry("one", rate_per_s=13000)], goal="cost" if cost else "goodput")
    assert Path("one-plan.json").read_text() == Path("plan.json").read_text()


def test_each_application_is_planned_by_times_of_the_backend_and_precision_that_its_args_name(folder: Path) -> None:
    ways = [(backend, dtype) for backend in ("torch", "onnx") for dtype in DTYPES]
    tables = tuple(curve_table(distilbert(), "v100", backend=backend, dtype=dtype) for backend, dtype in ways)
    save(Profile("distilbert", tables, ExitProfile((1.0,) * 6)), folder / "ways.json")
    args = ({"backend": "onnx", "dtype": "float16"}, {"dtype": "float16"}, {"backend": "auto"})
    named = [entry(f"a{number}", "ways.json", args=each) for number, each in enumerate(args)]
    plan(*FAST, devices={"v100": 3}, applications=named)
    made = [read_plan(folder / f"{each['name']}-plan.json") for each in named]
    assert [(each.backend, each.dtype) for each in made] == [
        ("onnx", "float16"), ("torch", "float16"), ("torch", "float32"),
    ]  # fmt: skip


def test_the_file_serves_every_application_with_its_controller(planned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(planned)
    content = serve_file("serve.yaml", {})
    assert [each["route_prefix"] for each in served(content)] == ["/reviews", "/queries"]
    assert [each["args"]["application"] for each in controllers(content)] == ["reviews", "queries"]
    (arbiter,) = arbiters(content)
    own = {each["name"]: each["devices"] for each in arbiter["args"]["applications"]}
    assert own == {name: read_plan(planned / f"{name}-plan.json").devices() for name in ("reviews", "queries")}
    assert arbiter["args"]["applications"][0] | {"devices": 0} == {
        "name": "reviews", "weight": 2.0, "least_per_s": 3000.0, "devices": 0, "controller": "reviews-controller",
    }  # fmt: skip
    shared = [each["args"]["shared"] for each in controllers(content)]
    assert shared == [arbiter["args"]["devices"]] * 2 == [{"v100": 2, "k80": 3}] * 2
    assert [each["args"]["max_batch"] for each in controllers(content)] == [16, 16]
    for each in served(content):
        assert each["args"]["plan"] == str(planned / f"{each['name']}-plan.json")
        assert each["args"]["backend"] == "virtual"
    _, service = objects(content, "image:1", "rwx", {})
    (inside,) = arbiters(yaml.safe_load(service["spec"]["serveConfigV2"]))
    assert inside["args"] == arbiter["args"] | {"api_key_variable": KEY_VARIABLE}
    options = ("simulate", "--config", "serve.yaml", "--rate", "100", "--hours", "0.001", "--application")
    ran(*options, "queries", "--replan")
    with pytest.raises(UserError, match="--application other: the file has reviews, queries"):
        ran(*options, "other")


def test_where_replicas_stand_by_each_application_has_one_on_every_device(folder: Path) -> None:
    applications = [TWO[0] | {"park_after_s": 600} | VIRTUAL, TWO[1] | VIRTUAL]
    plan(*FAST, "--out", "serve.yaml", standby=True, applications=applications)
    content = serve_file(folder / "serve.yaml", {})
    for each in served(content):
        assert (each["args"]["standby"], each["args"]["sharers"]) == ({"v100": 2, "k80": 3}, 2)
    assert [each["args"]["start_s"] for each in controllers(content)] == [1.0, 1.0]
    (arbiter,) = arbiters(content)
    assert [each.get("park_after_s") for each in arbiter["args"]["applications"]] == [600.0, None]
    many = [entry(f"number-{number}", "bert.json") for number in range(30)]
    with pytest.raises(UserError, match=r"standby: .* 30 applications need 1\d\.\d GB, a k80 has 12\.0 GB: leave st"):
        plan(*FAST, standby=True, devices={"k80": 2}, applications=many)


def test_an_application_that_no_single_device_sustains_cannot_be_parked_where_replicas_stand_by(folder: Path) -> None:
    """Two of them do: their launches take turns, so that an input waits for the next one half as long."""
    tight = entry("queries", slo_ms=1.65)
    fleet = {"devices": {"v100": 4}, "standby": True}
    applications = [entry("reviews", "bert.json") | VIRTUAL, tight | {"park_after_s": 600} | VIRTUAL]
    plan(*FAST, "--out", "serve.yaml", **fleet | {"standby": False}, applications=applications)
    content = serve_file(folder / "serve.yaml", {})
    looks_s = [each["args"].get("look_every_s") for each in (*controllers(content), *arbiters(content))]
    assert looks_s == [None, 1.0, 1.0], "its next input is soon seen"
    with pytest.raises(UserError, match=r"queries: park_after_s = 600: no single device sustains its network within"):
        plan(*FAST, **fleet, applications=applications)


def test_controllers_and_the_arbiter_need_the_key_of_the_applications(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEY", "secret")
    with_key = {"args": VIRTUAL["args"] | {"api_key_variable": "KEY"}}
    plan(*FAST, "--out", "serve.yaml", applications=[TWO[0] | VIRTUAL, TWO[1] | with_key])
    content = serve_file(folder / "serve.yaml", {})
    keys = [each["args"].get("api_key_variable") for each in (*controllers(content), *arbiters(content))]
    assert keys == [None, "KEY", "KEY"]


def test_an_application_alone_has_no_arbiter(folder: Path) -> None:
    Path("serve.yaml").write_text("old")
    Path("kept").hardlink_to("serve.yaml")
    plan(*FAST, "--out", "serve.yaml", applications=[TWO[1] | VIRTUAL])
    content = serve_file(folder / "serve.yaml", {})
    limits = {"one_machine": False, "slack": 0.2, "max_batch": 16}
    assert [each["args"] for each in controllers(content)] == [{"application": "queries", **limits}]
    assert not arbiters(content)
    assert Path("kept").read_text() == "old", "the file is replaced whole"


@pytest.fixture
def content(planned: Path, folder: Path) -> Any:
    """The Serve file of two applications, their controllers and the arbiter, in this order."""
    (folder / "serve.yaml").write_text(written := (planned / "serve.yaml").read_text())
    return yaml.safe_load(written)


def refused(content: dict[str, Any], sentence: str) -> None:
    """As any command refuses the file, before anything starts."""
    Path("serve.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(UserError, match=sentence) as error:
        serve_file("serve.yaml", {})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"applications": []}, "args: applications = .*: Tuple should have at least 2 items"),
        ({"devices": {"v100": 1, "k80": 3}}, r"the applications have 2 v100 of their own, the fleet has 1: plan the"),
        ({"devices": {"v100": 9, "k80": 3}}, "reviews-controller shares 2 v100, and the fleet has 9: give both the"),
        ({"api_key_variable": "NO_SUCH_KEY"}, "NO_SUCH_KEY"),
    ],
)
def test_a_wrong_arbiter_is_refused_in_a_sentence(content: Any, changed: dict[str, Any], sentence: str) -> None:
    content["applications"][-1]["args"] |= changed
    refused(content, sentence)


def test_an_arbiter_leads_only_applications_that_are_there_and_fit(content: dict[str, Any]) -> None:
    _, controller, *_, arbiter = content["applications"]
    first, second = arbiter["args"]["applications"]
    own, name = dict(first["devices"]), first["name"]
    second["name"] = name
    refused(content, "two applications are called reviews: give each its own name")
    second["name"] = "other"
    refused(content, "there is no application other that classifies, only reviews, queries")
    second["name"] = "queries"
    first["devices"] = own | {"v100": own["v100"] - 1}
    refused(content, rf"the plan of reviews uses {own['v100']} v100, of which {own['v100'] - 1} are its own: plan the")
    first["devices"] = own
    del controller["args"]["shared"]
    refused(content, r"fleet: .* reviews-controller is no controller of reviews with shared: ")


def test_a_fleet_is_simulated_side_by_side(content: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    Path("bursts.csv").write_text("second,count\n0,10\n1,30\n")
    arguments = ("simulate", "--config", "serve.yaml", "--hours", "0.001", "--load")
    for options in ((), ("--replan",)):
        loads = "queries=200@bursts.csv", "--rate", "100"
        output = ran(*arguments, *loads, *options)
        rows = re.findall(r"│ (\w+) .*?│ ([\d,]+) +│ [\d,]+ +│ [\d.]+%", output)
        arrived = {name: int(count.replace(",", "")) for name, count in rows}
        assert arrived["all"] == arrived["reviews"] + arrived["queries"] == pytest.approx(1080, rel=0.2)
        assert ("no device was moved" in output) == bool(options)
    assert Path("simulation-queries.png").exists()


def test_an_application_without_inputs_has_no_latency_and_a_fleet_without_any_is_refused(content: Any) -> None:
    options = ("simulate", "--config", "serve.yaml", "--hours", "0.001", "--rate", "0.0001")
    assert "nan" not in ran(*options, "--load", "reviews=100")
    with pytest.raises(UserError, match="nothing comes in so short a time"):
        ran(*options)


ALL_NAMED = ("--load", "reviews=5", "--load", "queries=6")
ALL_TRACED = ("--load", "reviews=5@t.csv", "--load", "queries=6@t.csv")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--load", "other=5"), "--load other=5: other is none of this fleet: reviews, queries"),
        (("--load", "reviews=5", "--load", "reviews=6"), "--load reviews=6: reviews is given twice"),
        (("--load", "reviews"), "'reviews' must look like NAME=RATE or NAME=RATE@TRACE"),
        (("--load", "reviews=5"), "queries has no load: add --load queries=RATE, or --rate for all"),
        ((*ALL_NAMED, "--rate", "7"), "--rate is for applications without --load"),
        (("--rate", "5", "--cv", "2"), "--cv is for --arrivals gamma"),
        ((*ALL_NAMED, "--cv", "2"), "--cv is for --arrivals gamma"),
        ((*ALL_NAMED, "--trace-each-s", "2"), "--trace-each-s is for --trace: name the trace"),
        ((*ALL_TRACED, "--arrivals", "uniform"), "--arrivals is not for --trace, which has its own arrivals"),
        (("--load", "reviews=5@t.csv", "--rate", "5", "--cv", "2"), "--cv is for --arrivals gamma"),
        (("--rate", "5", "--lengths", "l.txt"), "--lengths is for one application: give its name with --application"),
        (("--rate", "5", "--load", "queries=5", "--application", "reviews"), "--load is for the applications of a fle"),
    ],
)
def test_a_wrong_load_of_a_fleet_is_refused(content: dict[str, Any], options: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        ran("simulate", "--config", "serve.yaml", *options)


def test_one_application_of_a_fleet_is_simulated_with_another_plan(content: dict[str, Any]) -> None:
    plan = content["applications"][2]["args"]["plan"]
    options = ("simulate", "--config", "serve.yaml", "--rate", "5", "--hours", "0.001", "--plan", plan)
    assert "goodput" in ran(*options, "--application", "queries")
    with pytest.raises(
        UserError, match=r"serve\.yaml has 2 applications, and --plan is for one: write it into the file"
    ):
        ran(*options)
    with pytest.raises(UserError, match="has 2 applications, and --profile is for one: write it into the file"):
        ran("serve", "serve.yaml", "--profile", "bert.json", "--out", "again.yaml")


def test_each_goal_is_reported_in_its_own_words(folder: Path) -> None:
    rated = [entry("reviews", "bert.json", rate_per_s=100), entry("queries", rate_per_s=50)]
    few = {"v100": 1, "k80": 2}
    assert "not used: " in plan(*FAST, devices=few, goal="cost", applications=rated)
    assert "the smallest share is" in plan(*FAST, devices=few, goal="fairness", applications=rated)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ({"applications": []}, r"fleet.yaml: applications = \[\]: Tuple should have at least 1 item"),
        ({"applications": TWO, "goals": "cost"}, "no field 'goals'; there are: devices, goal, standby, applications"),
        ({"applications": [entry("a", slo=5)]}, "a: there is no field 'slo'; there are: name, weight, "),
        ({"applications": [entry("a"), entry("a")]}, "two applications are called a"),
        ({"applications": [entry("a"), entry("fleet")]}, "fleet is the name of the arbiter or of a controller"),
        ({"applications": [entry("a"), entry("a-controller")]}, "a-controller is the name of the arbiter or of"),
        ({"applications": [entry("a")], "standby": True}, "standby and park_after_s are for applications that share"),
        ({"applications": [entry("a", park_after_s=60)]}, "standby and park_after_s are for applications that share"),
        ({"applications": TWO, "goal": "cost"}, "the goal cost needs rate_per_s of reviews"),
        ({"applications": TWO, "goal": "fairness"}, "rate_per_s, which reviews lacks: give it to all, or to none"),
        ({"applications": TWO, "devices": {"v1000": 2}}, "unknown device kind 'v1000': choose among k80"),
        ({"applications": TWO, "devices": {"v100": 1, "t4": 2}}, "t4: no application's profile has times of this kind"),
        ({"applications": TWO, "devices": {"t4": 2}}, "reviews: bert.json has times of v100, k80, the fleet has t4"),
        ({"applications": [entry("a", "none.json")]}, "cannot read none.json: No such file"),
        ({"applications": [entry("a", args={"plan": "p"})]}, "args: plan of a comes from its plan"),
        ({"applications": [entry("a", args={"max_batch": 8})]}, "args: max_batch of a comes from its plan"),
        ({"applications": [entry("a", args={"replan": False})]}, "args: replan of a comes from its plan"),
        ({"applications": [entry("a", args={"backend": [1]})]}, r"a: args: backend = \[1\]"),
        ({"applications": [entry("a", args={"backnd": "onnx"})]}, "a: args: there is no field 'backnd'"),
        ({"applications": [{"name": "a"}]}, "fleet.yaml: a: profile is missing"),
        (
            {"applications": [{"name": "a", "import_path": "b:c", "args": {}}]},
            "fleet.yaml is a Serve file: 'isobatch plan' makes one",
        ),
        ({"applications": [TWO[0] | {"least_per_s": 90000}, TWO[1]]}, "reviews needs 90000 per second, these devices"),
    ],
)
def test_what_cannot_be_planned_is_said_in_a_sentence(folder: Path, content: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence) as error:
        plan(*FAST, **content)
    assert "\n" not in str(error.value)
    assert not list(folder.glob("*-plan.json"))


@pytest.mark.parametrize(
    ("options", "fields", "sentence"),
    [
        (("--rate", "5"), {}, "--rate is for one application"),
        (("--devices", "v100=1"), {}, "--devices is for one application"),
        (("--in-time", "0.9"), {"slo_ms": None}, "--in-time is for plans that are simulated: only the most goodput"),
        (("--ttft-ms", "5"), {}, "--ttft-ms is for decoders, and fleets are of classifiers"),
        (("--out", "nowhere/serve.yaml"), {}, "cannot write nowhere/serve.yaml"),
        (("--out", "fleet.yaml"), {}, "cannot write fleet.yaml: this command uses that file"),
        (("--out", "a-plan.json"), {}, "cannot write a-plan.json: this command uses that file"),
        (("--out", "bert.json"), {"profile": "bert.json"}, "cannot write bert.json: this command uses that file"),
        (("--out", "serve.yaml"), {}, "--out: a needs model: the directory to serve"),
        (("--out", "serve.yaml"), {"model": "nothing"}, "a: model = 'nothing': no such directory"),
        (("--out", "serve.yaml"), {"args": VIRTUAL["args"] | {"api_key_variable": "NO_KEY"}}, "NO_KEY.* is not set"),
        (("--out", "serve.yaml"), {"args": {"backend": "virtual", "x": 1}}, "a: args: there is no field 'x'"),
    ],
)
def test_what_cannot_be_written_is_said_before_any_plan_is_made(
    folder: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], fields: dict[str, Any], sentence: str
) -> None:
    monkeypatch.setattr("isobatch.cluster.commands.plan_fleet.divide", lambda *_: pytest.fail("it divides"))
    with pytest.raises(UserError, match=sentence):
        plan(*options, applications=[entry("a", **fields)])


def test_plans_below_their_estimate_divide_devices_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulations confirm half of what is estimated: the share that suffices by estimate does not suffice."""

    def halved(*asked: Any) -> Any:
        result = searched(*asked)
        promise = replace(result.plan.promise, goodput_per_s=result.plan.promise.goodput_per_s / 2)
        return replace(result, plan=replace(result.plan, promise=promise))

    needs = [entry("reviews", "bert.json", least_per_s=2000), entry("queries", weight=9)]
    few = {"v100": 2, "k80": 1}
    plan(*FAST, devices=few, applications=needs)
    before = read_plan(folder / "reviews-plan.json").devices()
    monkeypatch.setattr("isobatch.cluster.commands.plan_fleet.searched", halved)
    plan(*FAST, devices=few, applications=needs)
    after = read_plan(folder / "reviews-plan.json")
    assert (before["v100"], after.devices()["v100"]) == (1, 2)
    with pytest.raises(UserError, match=r"^queries needs 6500 per second, its plan sustains \d+.* as simulated: "):
        plan(*FAST, devices=few, applications=[needs[1] | {"least_per_s": 6500}])


def test_a_plan_on_the_same_devices_is_not_searched_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = list[tuple[Any, ...]]()

    def nothing_kept(*asked: Any) -> Any:
        parts.append(tuple(asked[1]))
        result = searched(*asked)
        return replace(result, plan=replace(result.plan, promise=replace(result.plan.promise, goodput_per_s=1.0)))

    monkeypatch.setattr("isobatch.cluster.commands.plan_fleet.searched", nothing_kept)
    few = {"devices": {"v100": 2}, "applications": [entry("a", least_per_s=5), entry("b", least_per_s=5)]}
    with pytest.raises(UserError, match="a needs 5 per second, its plan sustains 1, as simulated"):
        plan(*FAST, **few)
    assert len(parts) == 2


def test_ctrl_c_in_one_search_ends_all_and_keeps_the_best_plans(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left_s = list[float | None]()

    def interrupted(*asked: Any) -> Any:
        left_s.append(asked[-1].left_s)
        if len(left_s) == 1:
            signal.raise_signal(signal.SIGINT)
        return searched(*asked)

    monkeypatch.setattr("isobatch.cluster.commands.plan_fleet.searched", interrupted)
    plan(*FAST, applications=TWO)
    assert left_s == [None, 0.0]
    assert read_plan(folder / "reviews-plan.json").devices() != read_plan(folder / "queries-plan.json").devices()
