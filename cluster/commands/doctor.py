"""`isobatch doctor`: what is wrong around the program, in a line each."""

import typer


def doctor() -> None:
    """Look at Python, packages, GPUs, Ray, HAProxy, ports, cache and memory. The exit code is 1 if anything is wrong.

    Example: [bold]isobatch doctor[/]
    """
    from rich.console import Console

    from cluster.doctor import findings

    console, wrong = Console(soft_wrap=True, highlight=False), False
    for each in findings():
        mark = "[bold red]wrong[/]" if each.wrong else "[green]well[/] "
        console.print(mark, end=" ")
        console.print(f"{each.what}: {each.wrong or each.found}", markup=False)
        wrong = wrong or bool(each.wrong)
    if wrong:
        raise typer.Exit(1)
