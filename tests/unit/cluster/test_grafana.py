"""The dashboard and the alerts name only metrics and labels that exist."""

import json
import re
from pathlib import Path

import pytest
import yaml

from isobatch.cluster.commands.deploy import DASHBOARDS
from isobatch.deployments.metrics import METRICS
from isobatch.profiles.errors import UserError
from tests.helpers.commands import ran
from tests.helpers.scraping import OF_SERVE, scraped_names

ROOT = Path(__file__).parents[3]
PANELS = json.loads((DASHBOARDS / "dashboard.json").read_text())["panels"]
ALERTS = yaml.safe_load((DASHBOARDS / "alerts.yaml").read_text())["groups"][0]["rules"]
QUERIES = [(target["legendFormat"], target["expr"]) for panel in PANELS for target in panel["targets"]]
ASKED = [*(query for _, query in QUERIES), *(alert["expr"] for alert in ALERTS)]
LABELS = {name: {*family.labels, *OF_SERVE, "le"} for family in METRICS for name in scraped_names(family)}


def names_in(ask: str) -> set[str]:
    return set(re.findall(r"\bray_\w+", ask))


def labels_in(ask: str) -> set[str]:
    grouped = re.findall(r"(?:by|ignoring|on) \(([\w, ]*)\)", ask)
    matched = re.findall(r"(\w+)=~?\"", ask)
    return {label for each in grouped for label in each.split(", ") if label} | set(matched)


def test_the_command_writes_the_files(tmp_path: Path) -> None:
    ran("dashboards", "--out", tmp_path / "new")
    for file in DASHBOARDS.iterdir():
        assert (tmp_path / "new" / file.name).read_text() == file.read_text()


def test_a_changed_file_is_kept_unless_it_may_be_replaced(tmp_path: Path) -> None:
    ran("dashboards", "--out", tmp_path)
    ran("dashboards", "--out", tmp_path)
    (rules := tmp_path / "alerts.yaml").write_text("groups: []\n")
    (tmp_path / "dashboard.json").unlink()
    with pytest.raises(UserError, match=r"alerts.yaml is not as this version writes it: .*--force"):
        ran("dashboards", "--out", tmp_path)
    assert (rules.read_text(), [*tmp_path.iterdir()]) == ("groups: []\n", [rules])
    ran("dashboards", "--out", tmp_path, "--force")
    assert rules.read_text() == (DASHBOARDS / "alerts.yaml").read_text()
    with pytest.raises(UserError, match=r"alerts.yaml: it is a file: name a folder"):
        ran("dashboards", "--out", rules)


def test_every_query_can_be_read_by_prometheus() -> None:
    promql = pytest.importorskip("promql_parser")
    for ask in ASKED:
        promql.parse(ask.replace("$__rate_interval", "5m"))
    with pytest.raises(ValueError, match=r"parse error|unexpected|invalid"):
        promql.parse("sum by (rate(x[5m]))")


@pytest.mark.parametrize("ask", ASKED)
def test_a_query_names_metrics_and_labels_that_there_are(ask: str) -> None:
    names = names_in(ask)
    assert names <= LABELS.keys()
    assert labels_in(ask) <= {label for name in names for label in LABELS[name]}


def test_an_empty_group_of_a_parked_application_wakes_nobody() -> None:
    (empty,) = (alert["expr"] for alert in ALERTS if alert["alert"] == "IsobatchGroupIsEmpty")
    assert empty.endswith("unless on (application) max by (application) (ray_isobatch_parked) == 1")


def test_an_application_that_answers_nothing_in_time_is_below_its_promise() -> None:
    """A counter has no series before its first event."""
    (below,) = (alert["expr"] for alert in ALERTS if alert["alert"] == "IsobatchGoodputBelowPromise")
    rates = re.findall(r"\((sum by \(application\) \(rate\(\w+in_time\w+\[5m\]\)\)) or 0 \* max by", below)
    assert len(rates) == below.count("in_time") == 2


def test_several_applications_promise_their_sum_and_have_a_forecast_each() -> None:
    queries = "".join(ASKED)
    assert 'sum by () (max by (application) (ray_isobatch_promised_per_s{application=~"$application"}))' in queries
    assert "max by (application, block) (ray_isobatch_forecast_survival" in queries


def test_the_first_decision_of_a_kind_counts_too() -> None:
    """A counter's series begins with its first event, which `increase` does not count."""
    for ask in (ask for ask in ASKED if "decisions" in ask):
        counter = re.escape(re.findall(r"ray_[^ ]+_total(?:{[^}]*})?", ask)[0])
        assert re.search(rf"\({counter} - \({counter} offset \dh or {counter} \* 0\)\)", ask)


def test_a_legend_shows_what_its_query_tells_apart() -> None:
    for legend, ask in QUERIES:
        assert set(re.findall(r"{{(\w+)}}", legend)) == (
            set(re.findall(r"by \(([\w, ]*)\)", ask)[0].split(", ")) - {"le", ""} if " by (" in ask else set()
        ), ask


def test_every_metric_is_on_the_page_and_most_are_on_a_panel() -> None:
    page = (ROOT / "docs" / "watching.md").read_text()
    for family in METRICS:
        labels = f"{{{','.join(family.labels)}}}" if family.labels else ""
        assert f"| `{family.name}{labels}` | {family.kind.lower()} | {family.about} |" in page
    shown = {name for ask in ASKED for name in names_in(ask)}
    quiet = {family.name for family in METRICS if not shown & set(scraped_names(family))}
    assert quiet == {"isobatch_launches", "isobatch_launched_inputs", "isobatch_arrived_weight", "isobatch_audits",
                     "isobatch_canary_requests", "isobatch_controller_paused",
                     "isobatch_controller_sustains_per_s"}  # fmt: skip
