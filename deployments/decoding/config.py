"""What a user may write under `args:` of a decoder's Serve application."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from deployments.config import ServedConfig
from deployments.decoding.scheduler import DEEP_SHARE, DecodingLimits
from deployments.decoding.sequences import Splits
from deployments.folders import cache_directory, content_of
from deployments.resources import gpu_options
from optimizer.plan import DecodingTerms, Placement, Plan, Split, read_plan
from profiles.errors import UserError

FRONT = "front"  # the deployment of the front, which leads the replicas to another plan
OFF = "off"
# What is pending when a text ends never runs deep: so many hold most texts whose tokens all leave early.
PENDING, UNTOLD = 64, 16
LED = "exits", "cuts", "max_residents", "deep_share", "prompt_rows"  # what a running replica can be led to


class DecoderConfig(ServedConfig):
    """One decoder behind OpenAI's HTTP interface. Every field but the model has a default."""

    model: str = Field(description="Directory of a network that decodes, with an exits.json where it has ramps.")
    exits: Literal["recompute", "project", "verified", "off"] = Field(
        "recompute",
        description="recompute: a token is what the first ramp says that is sure. project: the same, and it makes keys "
        "and values of the blocks that it skips by projection, which changes what follows; isobatch prepare tells how "
        "often. verified: what exits say is a draft, told once the full network says the same. off: every token runs "
        "through the whole network.",
    )
    replicas: int = Field(1, ge=1, description="Replicas that hold the network, each with KV memory of its own.")
    dtype: Literal["float32", "float16", "bfloat16"] = Field("float32", description="Precision of the network.")
    plan: str | None = Field(
        None,
        description="File of `isobatch plan`: it says exits, cuts, replicas, precision, memory and all limits.",
    )
    profile: str | None = Field(
        None,
        description="File of `isobatch profile` that a simulation and a controller play by; none: what is kept of the "
        "checkpoint.",
    )
    cuts: tuple[Annotated[int, Field(ge=1)], ...] | None = Field(
        None,
        description="Blocks before which the network is cut, each behind a ramp whose threshold exits.json has; none: "
        "behind the ramps that it says are used.",
    )
    max_residents: int = Field(32, ge=1, description="Sequences that a replica decodes at once.")
    max_waiting: int = Field(256, ge=1, description="Sequences that may wait for a place at a replica (429 beyond).")
    kv_megabytes: int = Field(256, ge=1, description="Memory for keys and values, of each replica.")
    page_tokens: int = Field(16, ge=1, description="Positions in one page of that memory.")
    deep_share: float | None = Field(
        None,
        gt=0,
        le=1,
        description="Share of the residents that a deep split waits for, while others can go on; none: what exits.json "
        f"says, or {DEEP_SHARE}.",
    )
    max_pending: int | None = Field(
        None,
        ge=1,
        description="Tokens that a sequence may write before deeper splits have seen them; none: "
        f"{PENDING}, or {UNTOLD} with exits: verified, where they are told only then.",
    )
    prompt_rows: int = Field(256, ge=1, description="Tokens of prompts that run in one launch.")
    ttft_ms: float = Field(1000.0, gt=0, description="Time to the first token: who cannot have it is refused (429).")
    tpot_ms: float = Field(
        200.0, gt=0, description="Time from one token to the next: nobody is let in while it is longer than this."
    )
    max_context: int | None = Field(
        None,
        ge=2,
        description="Tokens of a prompt and its answer together, or of each where an encoder reads the prompt; none: "
        "as many as the model reads.",
    )
    max_tokens: int = Field(1024, ge=1, description="Tokens that one request may have written (400 beyond).")
    max_prompts: int = Field(32, ge=1, description="Prompts in one request (400 beyond).")
    max_body_bytes: int = Field(2**20, ge=1, description="Size that the body of one request may have (413 beyond).")

    def planned(self) -> "dict[str, DecoderConfig]":
        """The same with all that its plan says, for the replicas on each kind of device; without a plan, for "": on
        whatever there is."""
        return {"": self} if self.plan is None else self.by_kind(read_plan(Path(self.plan)))

    def by_kind(self, plan: Plan) -> "dict[str, DecoderConfig]":
        """The same by this plan, for the replicas on each kind of device. Any of them may be sent the longest text."""
        found = {each.placements[0].kind: self.following(each) for each in plan.pipelines}
        if len(found) < len(plan.pipelines):
            raise UserError(
                f"plan = {self.plan!r}: two pipelines are on one kind of device: decoders have one for each"
            )
        most = min((each.max_context for each in found.values() if each.max_context), default=None)
        return {kind: each.model_copy(update={"max_context": most}) for kind, each in found.items()}

    def following(self, plan: Plan) -> "DecoderConfig":
        """The same by this plan, which says all that it may say."""
        told = _said_by(plan, f"plan = {self.plan!r}")
        if twice := sorted(self.model_fields_set & told.keys() - {"plan"}):
            raise UserError(f"{twice[0]} cannot be set beside a plan, which says it")
        return self.model_copy(update=told)

    def led_by(self, plan: Plan) -> "DecoderConfig":
        """The same where a running decoder is led to this plan: what takes a new start stays as it is."""
        told = _said_by(plan, "the plan")
        return self.model_copy(update={name: told[name] for name in LED})

    def standing(self, cut: Splits, limits: DecodingLimits, kind: str) -> Plan:
        """The plan that this amounts to, where replicas of this kind are cut and limited so."""
        deep = max(1, round(limits.deep_share * limits.max_residents))
        splits = tuple(
            Split(start, stop, deep if start else limits.max_residents, (stop - 1,) if stop < cut.num_blocks else ())
            for start, stop in pairwise((0, *cut.ends))
        )
        terms = DecodingTerms(
            exits=self.exits if len(splits) > 1 else OFF,
            prompt_rows=self.prompt_rows,
            kv_megabytes=self.kv_megabytes,
            ttft_s=self.ttft_ms / 1e3,
            tpot_s=self.tpot_ms / 1e3,
            max_context=self.max_context,
        )
        placement = Placement(kind, self.replicas, splits, local=len(splits) > 1)
        return Plan((placement,), backend="torch", dtype=self.dtype, decoding=terms)

    @property
    def known(self) -> Path:
        """Where the profile is that plans for it are made by."""
        return Path(self.profile) if self.profile else cached_profile(Path(self.model))

    def splits(self, cuts: Sequence[int], num_blocks: int) -> Splits:
        """How the network is cut at these blocks, unless every token is to run through all of it."""
        ends = () if self.exits == OFF else tuple(cuts)
        verified = self.exits == "verified"
        pending = self.max_pending or (UNTOLD if verified else PENDING)
        return Splits((*ends, num_blocks), verified, pending, self.exits == "project")

    def pages(self, kv_bytes: int) -> int:
        """How many pages there are, where one position has so many bytes in a block."""
        return self.kv_megabytes * 2**20 // (kv_bytes * self.page_tokens)

    @property
    def most_asked(self) -> int:
        """Requests at once, beyond what all replicas refuse with a reason."""
        return 4 * self.replicas * (self.max_residents + self.max_waiting)

    def replica_options(self, kind: str = "", labelled: bool = False) -> dict[str, Any]:
        """What a replica asks Ray for, in the words of `ray_actor_options`. `kind`: the one that it must be on, where
        there are several."""
        on_gpu = self.device.startswith("cuda") and kind != "cpu"
        options: dict[str, Any] = {"num_cpus": 1 if on_gpu else self.cpus_per_replica, "num_gpus": int(on_gpu)}
        return options | gpu_options(kind, labelled) if on_gpu and kind else options

    def limits(self, deep_share: float | None = None) -> DecodingLimits:
        """The limits of a replica. `deep_share` is what the checkpoint itself says."""
        return DecodingLimits(
            max_residents=self.max_residents,
            page_tokens=self.page_tokens,
            deep_share=self.deep_share or deep_share or DEEP_SHARE,
            prompt_rows=self.prompt_rows,
            max_waiting=self.max_waiting,
            ttft_s=self.ttft_ms / 1e3,
            tpot_s=self.tpot_ms / 1e3,
        )


def pipeline_on(plan: Plan, kind: str) -> Plan:
    """What replicas on this kind of device are to follow."""
    return next((each for each in plan.pipelines if each.placements[0].kind == kind), plan.pipelines[0])


def _said_by(plan: Plan, called: str) -> dict[str, Any]:
    """The fields that a plan says."""
    terms, placement = plan.decoding, plan.placements[0]
    if terms is None:
        raise UserError(f"{called}: it is for a network that classifies: plan this one's decoding")
    told = {
        "plan": None,
        "exits": terms.exits,
        "cuts": tuple(split.start for split in plan.splits[1:]),
        "replicas": placement.replicas,
        "max_residents": plan.splits[0].batch_size,
        "deep_share": plan.splits[-1].batch_size / plan.splits[0].batch_size,
        "kv_megabytes": terms.kv_megabytes,
        "prompt_rows": terms.prompt_rows,
        "ttft_ms": terms.ttft_s * 1e3,
        "tpot_ms": terms.tpot_s * 1e3,
        "max_context": terms.max_context,
    }
    # Memory and promise are those of this precision.
    return {**told, "dtype": plan.dtype} if plan.dtype else told


def cached_profile(source: Path) -> Path:
    """Where the profile of a checkpoint is kept."""
    folder = cache_directory() / "decoder-profiles"
    folder.mkdir(exist_ok=True)
    return folder / f"{content_of(source)}.json"
