"""`isobatch kubernetes`: writes the objects of Kubernetes for a Serve file, for KubeRay."""

from pathlib import Path
from typing import Annotated

import typer


def kubernetes(
    file: Annotated[Path, typer.Argument(help="A Serve file (*.yaml) with a plan, as isobatch serve --out writes it.")],
    image: Annotated[str, typer.Option(help="The image of every node, with your files in its folder /models.")],
    storage_class: Annotated[
        str, typer.Option(help="A class of volumes to which several nodes may write, for the controller's memory.")
    ],
    nodes: Annotated[
        list[str] | None,
        typer.Option(
            help="How nodes with a kind of device are labelled, if not as on GKE; again for each kind.",
            metavar="KIND=LABEL:VALUE",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write to this file instead of printing.")] = None,
) -> None:
    """Write a RayService with a group of nodes for each kind of device of the plan, and a volume.

    docs/deploy.md ("Kubernetes") has the other steps: the image, and the secret with the key.

    Example: [bold]isobatch kubernetes serve.yaml --image IMAGE --storage-class standard-rwx | kubectl apply -f -[/]
    """
    import sys

    from isobatch.cluster.serving.kubernetes import KubernetesPlace, as_yaml, files, labels, objects
    from isobatch.cluster.serving.serve_file import serve_file

    content = serve_file(file, {})
    text = as_yaml(objects(content, KubernetesPlace(image, storage_class, labels(nodes or ()))))
    if out:
        out.write_text(text)
    else:
        print(text, end="")
    for here, there in files(content).items():
        print(f"the image needs {here} as {there}", file=sys.stderr)
