"""`isobatch profile`: how long a network's blocks take on this machine, and where its inputs leave."""

from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

import typer

from isobatch.cluster.commands import Dtype, check_writable
from isobatch.cluster.commands.shared_options import (
    READS,
    DeviceHere,
    LargestTimed,
    ReadingOptions,
    check_not_given,
    check_only,
    with_options,
)
from isobatch.deployments.named import known_backend
from isobatch.profiles.devices import fleet, whole_kind
from isobatch.profiles.errors import UserError


@dataclass(frozen=True, kw_only=True)
class ProfileOptions:
    """The options for any network; a decoder has no others."""

    model: Annotated[
        str, typer.Argument(help="Directory, hub id or URL of a checkpoint, prepared or not; or demo, llm-demo.")
    ]
    out: Annotated[Path, "File to write, or to add this device to."] = Path("profile.json")
    device: DeviceHere = "auto"
    dtype: Annotated[
        Dtype | None,
        "Precision of the network; int8 on CPUs only. None: float32, or on a GPU and for a decoder that of its ramps, "
        "or of its checkpoint if this device is fast in it.",
    ] = None
    timing_s: Annotated[
        float, typer.Option(min=0.1, help="Seconds of timing; the first sizes are measured whatever they cost.")
    ] = 60.0
    threads: Annotated[int, typer.Option(min=1, help="Host threads; a Ray replica has one per CPU it asks for.")] = 1
    kind: Annotated[str | None, "Name of this kind of device, if not the catalogue's."] = None
    devices: Annotated[str, "Add tables of these kinds from published times, not measured: a100,l4,t4."] = ""


@dataclass(frozen=True, kw_only=True)
class ClassifierProfileOptions(ReadingOptions, ProfileOptions):
    backend: Annotated[str, "As `backend:` of `isobatch serve`, which should be equal. auto: the fastest."] = "torch"
    data: Annotated[Path | None, f"Recorded inputs, over which exits are counted: {READS}."] = None
    max_rows: Annotated[int, typer.Option(min=1, help="The most rows of --data; more are sampled.")] = 2000
    tokens: Annotated[
        str | None, "Numbers of tokens of the texts to measure; none: as many as in those of --data, else 32,128."
    ] = None
    largest: LargestTimed = None
    together: Annotated[
        int | None,
        typer.Option(
            min=2,
            max=16,
            help="Also time launches while as many processes launch on this device at once: plans may then share it.",
        ),
    ] = None
    links: Annotated[
        bool,
        "Only measure what moving survivors costs, between processes of this machine and between nodes of a Ray that "
        "runs here, and add it to the profile at --out.",
    ] = False


LINKS_NEED = {"model", "out", "device", "kind", "links"}  # the options that --links reads


@with_options(options=ClassifierProfileOptions)
def profile(options: ClassifierProfileOptions) -> None:
    """Measure blocks, ramps and launches at batch sizes from 1 upwards. Ctrl-C keeps what is measured.

    For a decoder, launches of its engine are timed, and the cost of each part of a launch is fitted to them.

    Example: [bold]isobatch profile my-bert-ee --data reviews.csv --timing-s 60[/]

    Example: [bold]isobatch profile my-bert-ee --together 2[/]

    Example: [bold]isobatch profile my-bert-ee --links[/]
    """
    from isobatch.deployments.decoding.ramp_rules import check_if_decoder, is_decoder
    from isobatch.deployments.models import checkpoint

    known_backend(options.backend)
    _check_kind(options.kind)
    check_writable(options.out, options.data)
    source = checkpoint.locate(options.model, check_if_decoder)
    if is_decoder(source):
        from isobatch.cluster.commands.profile_texts import profile_texts

        refusal = "is for classifiers: a decoder's workload is the one that isobatch prepare has measured"
        check_only(ProfileOptions, options, refusal)
        profile_texts(options, source)
    elif options.links:
        from isobatch.cluster.commands.profile_inputs import profile_links

        others = [each.name for each in fields(options) if each.name not in LINKS_NEED]
        check_not_given(options, others, "is not read by --links, which times no launches: leave it out")
        profile_links(options, source)
    else:
        from isobatch.cluster.commands.profile_inputs import profile_inputs

        profile_inputs(options, source)


def _check_kind(kind: str | None) -> None:
    """Raise UserError for a name that no fleet could have."""
    if not kind:
        return
    if whole_kind(kind) != (kind, 1):
        raise UserError(f"--kind {kind} is a shared device: name the device, and measure it with --together")
    with suppress(UserError):
        if [each.kind for each in fleet(f"{kind}=1@1:1")] == [kind]:
            return
    unlike = "give small letters, digits and signs other than comma and ="
    raise UserError(f"--kind {kind!r}: --devices of isobatch plan could not name it: {unlike}")
