"""`isobatch dashboards`: writes a dashboard for Grafana, and alerts for Prometheus."""

from pathlib import Path
from typing import Annotated

import typer


def dashboards(
    out: Annotated[Path, typer.Option(help="Folder for the files.")] = Path("isobatch-grafana"),
) -> None:
    """Write dashboard.json for Grafana and alerts.yaml for Prometheus. docs/watching.md explains how to use them.

    Example: [bold]isobatch dashboards --out monitoring[/]
    """
    from cluster.grafana import files

    out.mkdir(parents=True, exist_ok=True)
    for name, content in files().items():
        (out / name).write_text(content)
        print(f"wrote {out / name}")
