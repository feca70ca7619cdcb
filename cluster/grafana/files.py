"""Makes Grafana's dashboard and Prometheus' rules of the panels and alerts."""

import json
from typing import Any

import yaml

from cluster.grafana.panels import ALERTS, PANELS, Alert, Panel

WIDTH, HEIGHT = 12, 8  # of a panel; Grafana's rows are 24 wide
_SOURCE = {"type": "prometheus", "uid": "${source}"}


def files() -> dict[str, str]:
    """The content of each file."""
    return {
        "dashboard.json": json.dumps(dashboard(), indent=1) + "\n",
        "alerts.yaml": yaml.safe_dump(rules(), sort_keys=False, width=120),
    }


def dashboard() -> dict[str, Any]:
    """To be imported in Grafana (Dashboards, New, Import); it asks which Prometheus is meant."""
    return {
        "uid": "isobatch",
        "title": "isobatch",
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [_source(), _application()]},
        "panels": [_panel(number, panel) for number, panel in enumerate(PANELS)],
    }


def rules() -> dict[str, Any]:
    return {"groups": [{"name": "isobatch", "rules": [_rule(alert) for alert in ALERTS]}]}


def _source() -> dict[str, Any]:
    return {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"}


def _application() -> dict[str, Any]:
    return {
        "name": "application",
        "label": "Application",
        "type": "query",
        "datasource": _SOURCE,
        "query": {
            "query": 'label_values({__name__=~"ray_isobatch_(promised_per_s|residents)"}, application)',
            "refId": "application",
        },
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    row, column = divmod(number, 24 // WIDTH)
    return {
        "id": number + 1,
        "title": panel.title,
        "description": panel.about,
        "type": "timeseries",
        "datasource": _SOURCE,
        "gridPos": {"x": column * WIDTH, "y": row * HEIGHT, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + place), "datasource": _SOURCE, "expr": query.ask, "legendFormat": query.legend}
            for place, query in enumerate(panel.queries)
        ],
    }


def _rule(alert: Alert) -> dict[str, Any]:
    return {
        "alert": alert.name,
        "expr": alert.when,
        "for": alert.for_,
        "labels": {"severity": alert.severity},
        "annotations": {"summary": alert.sentence},
    }
