"""`isobatch doctor`: checks the environment of the program, with a line for each check."""

import typer


def doctor() -> None:
    """Check Python, packages, GPUs, Ray, HAProxy, ports, cache and memory. The exit code is 1 if anything is wrong.

    Example: [bold]isobatch doctor[/]
    """
    from rich.console import Console

    from cluster.doctor import findings

    console, wrong = Console(soft_wrap=True, highlight=False), False
    for finding in findings():
        mark = "[bold red]wrong[/]" if finding.wrong else "[green]well[/] "
        console.print(mark, end=" ")
        console.print(f"{finding.what}: {finding.wrong or finding.result}", markup=False)
        wrong = wrong or bool(finding.wrong)
    if wrong:
        raise typer.Exit(1)
