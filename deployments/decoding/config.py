"""The fields of `args:` of a decoder's Serve application."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from isobatch.deployments.config import MOST_INSIDE, ServedConfig, checked
from isobatch.deployments.decoding.scheduler import DEEP_SHARE, DecodingLimits
from isobatch.deployments.decoding.sequences import Splits
from isobatch.deployments.folders import cache_directory, content_of
from isobatch.deployments.resources import Resources, gpu_options
from isobatch.deployments.sources import local
from isobatch.optimizer.plan import DecodingTerms, Placement, Plan, read_plan
from isobatch.optimizer.text_plans import OFF, splits_at
from isobatch.profiles.errors import UserError
from isobatch.profiles.latency import MOST_BATCH
from isobatch.profiles.promise import RULES

# The default of `max_pending`. Positions that are pending when a text ends never run deep: this is more than most texts
# have whose tokens all leave early.
MAX_PENDING = 64
# The same with `exits: verified`, where clients wait for pending tokens.
MAX_PENDING_VERIFIED = 16
MOST_REQUESTS = 2**31 - 1  # Serve counts requests in 32 bits
SWITCHABLE = ("exits", "cuts", "max_residents", "deep_share", "prompt_rows")  # fields that a running replica can change


class DecoderConfig(ServedConfig):
    """One decoder behind OpenAI's HTTP interface. Every field but the model has a default."""

    model: str = Field(description="Directory, hub id or URL of a decoder, with an exits.json if it has ramps.")
    exits: Literal["recompute", "project", "verified", "off"] = Field(
        "recompute",
        description="How a token that leaves early gets keys and values in blocks that it skips (docs/decoding.md); "
        "off: every token runs through the whole network.",
    )
    replicas: int = Field(1, ge=1, description="Replicas that hold the network, each with KV memory of its own.")
    dtype: Literal["float32", "float16", "bfloat16"] = Field(
        "float32",
        description="Precision of the network. If not given: that of the plan; without a plan, that of the ramps, or "
        "of the checkpoint if the device is quick in it.",
    )
    plan: str | None = Field(
        None, description="File of `isobatch plan`, with exits, cuts, replicas, precision, memory and all limits."
    )
    profile: str | None = Field(
        None,
        description="File of `isobatch profile` for simulations and the controller; none: the one that isobatch "
        "profile has kept of the checkpoint.",
    )
    cuts: tuple[Annotated[int, Field(ge=1)], ...] | None = Field(
        None,
        description="Blocks before which the network is cut, each behind a ramp with a threshold in exits.json; none: "
        "behind the ramps that exits.json uses.",
    )
    max_residents: int = Field(32, ge=1, le=MOST_BATCH, description="Sequences that a replica decodes at once.")
    max_waiting: int = Field(
        256, ge=1, le=MOST_INSIDE, description="Sequences that may wait for a place at a replica (429 beyond)."
    )
    kv_megabytes: int = Field(256, ge=1, description="Memory for keys and values, of each replica.")
    page_tokens: int = Field(16, ge=1, description="Positions in one page of that memory.")
    deep_share: float | None = Field(
        None,
        gt=0,
        le=1,
        description="Share of the residents that a deep split waits for, while others can go on; none: the share in "
        f"exits.json, or {DEEP_SHARE}.",
    )
    max_pending: int | None = Field(
        None,
        ge=1,
        description="Tokens that a sequence may write before deeper splits process them; none: "
        f"{MAX_PENDING}, or {MAX_PENDING_VERIFIED} with exits: verified, which sends them only then.",
    )
    prompt_rows: int = Field(256, ge=1, le=MOST_BATCH, description="Tokens of prompts that run in one launch.")
    ttft_ms: float = Field(
        1000.0, gt=0, description="Time to the first token: a text that would wait longer is refused (429)."
    )
    tpot_ms: float = Field(
        200.0, gt=0, description="Time from one token to the next: no text is admitted while it is longer than this."
    )
    max_context: int | None = Field(
        None,
        ge=2,
        description="Tokens of a prompt and its answer together, or of each where an encoder reads the prompt; none: "
        "as many as the model reads and the memory holds.",
    )
    max_tokens: int = Field(1024, ge=1, description="Tokens that one request may have written (400 beyond).")
    max_prompts: int = Field(32, ge=1, description="Prompts in one request (400 beyond).")
    max_body_bytes: int = Field(2**20, ge=1, description="Size that the body of one request may have (413 beyond).")

    def per_kind(self) -> "dict[str, DecoderConfig]":
        """The configurations by the plan, by kind of device; without a plan, this one as "", for any device."""
        return {"": self} if self.plan is None else self.by_kind(read_plan(local(self.plan)))

    def by_kind(self, plan: Plan) -> "dict[str, DecoderConfig]":
        """The configurations by a plan, by kind of device. All have the same limit for the longest text."""
        configs = {each.placements[0].kind: self.with_plan(each) for each in plan.pipelines}
        if len(configs) < len(plan.pipelines):
            raise UserError(
                f"plan = {self.plan!r}: two pipelines are on one kind of device: decoders have one for each"
            )
        shortest = min((each.max_context for each in configs.values() if each.max_context), default=None)
        return {kind: each.model_copy(update={"max_context": shortest}) for kind, each in configs.items()}

    def with_plan(self, plan: Plan) -> "DecoderConfig":
        """This configuration with the fields of a plan. The user must not set any of these fields."""
        fields = _fields_of(plan, f"plan = {self.plan!r}")
        if twice := sorted(self.model_fields_set & fields.keys() - {"plan"}):
            raise UserError(f"{twice[0]} cannot be set beside a plan, which sets it")
        return self.model_copy(update=fields | self._resources_of(plan))

    def _resources_of(self, plan: Plan) -> dict[str, Any]:
        """The device and the processors of a plan's replicas, where they are not set beside it: with `device: cpu`, a
        plan for another device is rehearsed on processors."""
        on_cpu = plan.placements[0].kind == "cpu" or (self.model_fields_set >= {"device"} and self.device == "cpu")
        device = "cpu" if on_cpu else self.device if self.device != "cpu" else "cuda"
        threads = plan.decoding.threads if plan.decoding else 1
        cpus = self.cpus_per_replica if "cpus_per_replica" in self.model_fields_set else float(threads)
        return {"device": device, "cpus_per_replica": cpus}

    def switched_to(self, plan: Plan) -> "DecoderConfig":
        """This configuration with those fields of a plan that a running decoder can change."""
        fields = _fields_of(plan, "the plan")
        return self.model_copy(update={name: fields[name] for name in SWITCHABLE})

    def as_plan(self, cut: Splits, limits: DecodingLimits, kind: str) -> Plan:
        """The plan that is equivalent to this configuration, with these splits and limits, on this kind of device."""
        deep = max(1, round(limits.deep_share * limits.max_residents))
        splits = splits_at(cut.ends[:-1], cut.num_blocks, limits.max_residents, deep)
        terms = DecodingTerms(
            exits=self.exits,
            prompt_rows=self.prompt_rows,
            kv_megabytes=self.kv_megabytes,
            ttft_s=self.ttft_ms / 1e3,
            tpot_s=self.tpot_ms / 1e3,
            max_context=self.max_context,
        )
        placement = Placement(kind, self.replicas, splits, local=len(splits) > 1)
        return Plan((placement,), backend="torch", dtype=self.dtype, decoding=terms)

    @property
    def deciding_files(self) -> list[Path]:
        plan = [local(self.plan)] if self.plan else []
        return [*plan, self.profile_path, self.folder / RULES]

    @property
    def profile_path(self) -> Path:
        """The file of the profile that plans are made from."""
        return local(self.profile) if self.profile else cached_profile(self.folder)

    def splits(self, cuts: Sequence[int], num_blocks: int) -> Splits:
        """The splits of a network that is cut before these blocks; there are no cuts if exits are off, and without a
        cut nothing leaves early."""
        ends = () if self.exits == OFF else tuple(sorted(set(cuts)))
        verified = self.exits == "verified" and bool(ends)
        pending = self.max_pending or (MAX_PENDING_VERIFIED if verified else MAX_PENDING)
        return Splits((*ends, num_blocks), verified, pending, self.exits == "project" and bool(ends))

    def pages(self, position_bytes: int) -> int:
        """The number of pages, if the KV of one position has this many bytes."""
        return self.kv_megabytes * 2**20 // (position_bytes * self.page_tokens)

    def context(self, reads: int, position_bytes: int, has_encoder: bool) -> int:
        """The most tokens of a text that the user or the memory allows a model that reads `reads`."""
        held = self.pages(position_bytes) // (1 + has_encoder) * self.page_tokens  # an encoder's source has KV, too
        return self.max_context or min(reads, held)

    @property
    def max_requests(self) -> int:
        """The most requests at once. It is more than replicas admit, as they refuse with a reason."""
        return min(4 * self.replicas * (self.max_residents + self.max_waiting), MOST_REQUESTS)

    def replica_groups(self, plan: Plan | None = None) -> list[tuple[str, int, Resources]]:
        return [(kind, each.replicas, each.replica_needs(kind)) for kind, each in self.per_kind().items()]

    def replica_options(self, kind: str = "", labelled: bool = False) -> dict[str, Any]:
        on_gpu = self.device.startswith("cuda") and kind != "cpu"
        options: dict[str, Any] = {"num_cpus": 1 if on_gpu else self.cpus_per_replica, "num_gpus": int(on_gpu)}
        return options | gpu_options(kind, labelled) if on_gpu and kind else options

    def limits(self, deep_share: float | None = None) -> DecodingLimits:
        """The limits of a replica. `deep_share`: the one of the checkpoint."""
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
    return next((each for each in plan.pipelines if each.placements[0].kind == kind), plan.pipelines[0])


def _fields_of(plan: Plan, label: str) -> dict[str, Any]:
    """The fields that a plan has the values of; `label` names the plan in errors."""
    terms, placement = plan.decoding, plan.placements[0]
    if terms is None:
        raise UserError(f"{label}: this plan is for a classifier: make one with isobatch plan DIRECTORY")
    fields: dict[str, Any] = {
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
    # The memory and the promise of a plan are those of its precision.
    fields |= {"dtype": plan.dtype} if plan.dtype else {}
    checked(DecoderConfig, {"model": "", **fields}, label)
    if plan.thresholds:
        raise UserError(f"{label}: it has thresholds: those of a decoder's ramps are in its exits.json")
    if tuple(ramp + 1 for ramp in plan.ramps) != fields["cuts"]:
        ramps, cuts = list(plan.ramps), list(fields["cuts"])
        raise UserError(f"{label}: ramps = {ramps}, cuts = {cuts}: a decoder is cut behind each of its ramps")
    return fields


def cached_profile(source: Path) -> Path:
    """The file in which `isobatch profile` keeps the profile of a checkpoint."""
    folder = cache_directory() / "decoder-profiles"
    folder.mkdir(exist_ok=True)
    return folder / f"{content_of(source)}.json"
