"""`isobatch dashboards`: writes a dashboard for Grafana, and alerts for Prometheus (the files in cluster/grafana)."""

from pathlib import Path
from shutil import copy
from typing import Annotated

import typer

FILES = Path(__file__).parents[1] / "grafana"


def dashboards(
    out: Annotated[Path, typer.Option(help="Folder for the files.")] = Path("isobatch-grafana"),
) -> None:
    """Write dashboard.json for Grafana and alerts.yaml for Prometheus. docs/watching.md explains how to use them.

    Example: [bold]isobatch dashboards --out monitoring[/]
    """
    out.mkdir(parents=True, exist_ok=True)
    for file in sorted(FILES.iterdir()):
        print(f"wrote {copy(file, out)}")
