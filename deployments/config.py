"""The fields under `args:` in a Serve file: those of every network, and those of one that classifies."""

from collections.abc import Mapping
from contextlib import suppress
from math import ceil
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from isobatch.deployments import named
from isobatch.deployments.dispatch.messages import EARLY_S, Limits
from isobatch.deployments.dispatch.queue_orders import DEADLINE, queue_order_named, queue_order_path
from isobatch.deployments.resources import Resources, gpu_options, needs_of, of_declared, requested_amounts, shared_by
from isobatch.deployments.sources import local
from isobatch.optimizer.plan import Plan, read_plan
from isobatch.profiles.devices import is_cpu, whole_kind
from isobatch.profiles.errors import UserError, check_numbers, first_wrong
from isobatch.profiles.latency import MOST_BATCH
from isobatch.profiles.promise import RULES, tolerance_in

VIRTUAL_CPUS = 0.01  # of a replica on a virtual device, which sleeps nearly all the time
MOST_INSIDE = 2**20  # inputs: Serve counts requests in 32 bits
INSIDE_A_FRONT = 4096  # inputs that may be inside each front, if max_inside is not given
A_FRONT_PER_S = 2_500  # requests that a front on a core of its own passes on, about, by `make bench-serve`


def _known_backend_or_virtual(name: str) -> str:
    try:
        return name if name == named.VIRTUAL else named.known_backend(name)
    except UserError as error:
        raise ValueError(f"{error}; or virtual") from None


def _known_order(name: str) -> str:
    queue_order_path(name)
    return name


class ServedConfig(BaseModel):
    """The fields that every served network has."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    model: str | None = Field(
        None,
        description="Directory of a checkpoint made by `isobatch prepare`, a hub id, or a URL (hf://, s3://, gs://, "
        "file://); none: the demo model.",
    )
    name: str | None = Field(
        None, pattern=r"^[\w.-]+$", description="The model's name in answers and paths; none: its directory's name."
    )
    plan: str | None = Field(
        None,
        description="File of `isobatch plan`: each of its splits runs on its own replicas. With neither a plan nor "
        "devices, everything runs in one process.",
    )
    replan: bool = Field(
        False,
        description="Whether a controller may replace the plan of `plan:`; otherwise only while devices of that plan "
        "are gone. A plan made at the start may always be replaced.",
    )
    profile: str | None = Field(None, description="File of `isobatch profile` from which the plan was made.")
    device: named.DeviceName = Field("cpu", description="The device that computes the network: cpu or cuda.")
    ports: named.Ports | None = Field(
        None,
        description="Ports on which fronts and replicas listen for each other on each node, as in 24000-24099; none: "
        "any free ports.",
    )
    cpus_per_replica: float = Field(
        1.0, ge=0, description="CPUs that Ray reserves for a replica on the CPU (for a virtual device: almost none)."
    )
    api_key_variable: str | None = Field(
        None, description="Environment variable with the key that requests must send; none: no key is needed."
    )
    allowed_origins: tuple[named.WebOrigin, ...] = Field(
        (),
        description="Origins of other web pages that may send requests from a browser, as in https://shop.example; "
        "none: only this server's own pages.",
    )
    allowed_hosts: tuple[named.HostName, ...] = Field(
        (),
        description="Names by which clients reach this server, as in api.example, besides addresses and local names; "
        "with a key, any name.",
    )
    grpc_port: int | None = Field(
        None, ge=1, le=65535, description="Port of the Open Inference Protocol over gRPC; none: only HTTP."
    )
    grpc_host: str = Field("127.0.0.1", description="Address for gRPC, on the node of each front replica.")
    max_body_bytes: int = Field(16 * 2**20, ge=1, description="The largest body of a request (413 beyond).")
    drain_s: float = Field(30.0, gt=0, description="How long a stop waits for the requests that were admitted.")
    log_format: named.LogFormat = Field("text", description="The format of log lines; json: an object in each line.")

    @property
    def deciding_files(self) -> list[Path]:
        """The files that a controller's decisions depend on."""
        return [local(path) for path in (self.plan, self.profile) if path]

    def replica_options(self, kind: str = "", labelled: bool = False) -> dict[str, Any]:
        """The resources of a replica on this kind of device, as `ray_actor_options`; "": there is only one kind."""
        raise NotImplementedError

    def replica_needs(self, kind: str) -> dict[str, float]:
        return needs_of(self.replica_options(kind), kind)

    @property
    def front_cpus(self) -> int:
        return 0

    def replica_groups(self, plan: Plan | None = None) -> list[tuple[str, int, Resources]]:
        """The kind, number and needs of replicas, by the plan of the file or by this one; empty: there are none."""
        raise NotImplementedError

    @property
    def folder(self) -> Path:
        """The network's directory on this node, where it is fetched first if it lies elsewhere."""
        return local(self.model) if self.model else named.demo_folder()


class AppConfig(ServedConfig):
    """An early-exit network behind HTTP. Every field has a default: without any, the built-in demo is served."""

    loader: named.ImportPath = Field(
        named.LOADER, description="Function (directory, device=, dtype=) that returns a SplitModel."
    )
    devices: named.DeclaredDevices | None = Field(
        None,
        description="The devices that plans may use, as KIND: COUNT, or auto: those of Ray's nodes. Without a plan's "
        "file, the best plan for them within slo_ms is made at the start.",
    )
    links: dict[named.LinkName, PositiveFloat] = Field(
        {},
        description="Gbit/s from one kind of device to another, as KIND>KIND: 0.1, where it differs from the "
        "catalogue. Plans avoid slow links.",
    )
    rate_per_s: float | None = Field(
        None,
        gt=0,
        description="Inputs per second that a plan made at the start must sustain; none: as many as possible.",
    )
    backend: Annotated[str, AfterValidator(_known_backend_or_virtual)] = Field(
        "torch",
        description="What computes the network: torch, onnx, graphs, onnx-graphs, auto (the fastest here), virtual (a "
        "rehearsal), or an object of your own by its import path. If not given: the backend of the plan's file.",
    )
    front_replicas: int = Field(
        1, ge=1, description="Replicas of the front, one CPU each. Each uses a share of every device, by its load."
    )
    replicas: int = Field(
        1,
        ge=1,
        description="Without a plan: the processes that answer requests, each with a whole network on a CPU or a GPU.",
    )
    standby: dict[named.WholeKind, PositiveInt] = Field(
        {},
        description="The devices of a fleet on which replicas stand by with their weights, as KIND: COUNT: the fleet's "
        "arbiter says which of them are used. None: there are replicas on the devices of the plan only.",
    )
    sharers: int = Field(1, ge=1, description="How many applications have a replica on each device of `standby`.")
    slo_ms: float = Field(
        1000.0,
        gt=0,
        description="An answer's deadline, unless the request has another (X-Deadline-Ms). If not given: the SLO of "
        "the plan's file.",
    )
    dtype: named.Dtype = Field(
        "float32",
        description="Precision of the network; int8: of its dense layers, on CPUs, by ONNX Runtime. If not given: that "
        "of the plan's file, or of the profile's times for a plan that is made at the start; without a plan, that of "
        "the ramps, or on a GPU of the checkpoint.",
    )
    answers: Literal["leaving", "early"] = Field(
        "leaving",
        description="leaving: an input that is answered at a ramp leaves its batch there. early: it runs on to the "
        "last block, so batches never shrink and every answer is audited, and only the time until the answer is "
        "saved; under load, answered inputs give way to waiting ones.",
    )
    ramp_budget: float = Field(
        0.02,
        ge=0,
        le=1,
        description="With answers: early, the most that ramps may delay an input that is answered at the end, as a "
        "share of the network's time.",
    )
    exits: bool = Field(True, description="Whether inputs may leave at ramps; if not, all run to the last block.")
    max_batch: int = Field(32, ge=1, le=MOST_BATCH, description="The largest batch.")
    max_inside: int | None = Field(
        None,
        ge=1,
        le=MOST_INSIDE,
        strict=True,
        validation_alias=AliasChoices("max_inside", "max_waiting"),
        description="Inputs that may be inside at once, in all fronts together; further ones are refused (503). "
        f"None: {INSIDE_A_FRONT:,} for each front. Older files call it max_waiting.",
    )
    too_long: Literal["truncate", "refuse"] = Field(
        "truncate",
        description="For a text that is longer than the network reads. truncate: its end is cut off, and the answer "
        'has "truncated": true. refuse: the request is refused (422).',
    )
    order: Annotated[str, AfterValidator(_known_order)] = Field(
        DEADLINE,
        description="Which of the waiting inputs a launch takes first: deadline, priority (X-Priority), das or "
        "slotted_das (TCB's, short texts first), or your own as package.module:function.",
    )
    max_inputs: int = Field(256, ge=1, le=MOST_INSIDE, description="The most inputs in one request (422 beyond).")
    scores: Literal["winner", "all"] | Annotated[int, Field(ge=1)] = Field(
        "winner",
        description="The labels that each answer lists with their probabilities. winner: only the answer itself. all: "
        "every label. A number: this many, the most probable first. A request may ask for others.",
    )
    predict_form: Literal["isobatch", "tei"] = Field(
        "isobatch",
        description="The form of POST /predict. tei: requests and answers are those of text-embeddings-inference.",
    )
    relevant_label: str | None = Field(
        None,
        description="The label whose probability is the score of a document, for /rerank and /score; none: these paths "
        "are refused, unless the network has one output.",
    )
    by_value_bytes: int = Field(
        320 * 2**10, ge=0, description="Survivors of a launch that are larger wait where they were computed."
    )
    audit_share: float = Field(
        0.02,
        ge=0,
        le=1,
        description="The share of inputs that run on to the last block after their answer, to measure how often the "
        "answer is the full network's.",
    )
    audit_cost: float = Field(
        0.01, ge=0, lt=1, description="The most that such audits may cost, as a share of the replicas' computing time."
    )
    agreement: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="The share of answers that must equal the full network's; none: as `isobatch prepare` promised.",
    )
    canary: named.CanaryTerms | None = Field(
        None, description="Another application that computes a share of requests too."
    )

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_its_plan(cls, fields: Any) -> Any:
        """Add the SLO, backend and precision of the plan's file. A file that cannot be read is refused later."""
        if not (isinstance(fields, dict) and isinstance(fields.get("plan"), str)):
            return fields
        with suppress(UserError):
            plan = read_plan(local(fields["plan"]))
            slo_ms = {} if plan.slo_s is None else {"slo_ms": 1e3 * plan.slo_s}
            computed = {"backend": plan.backend, "dtype": plan.dtype} if plan.backend in named.BACKENDS else {}
            return slo_ms | {name: value for name, value in computed.items() if value} | fields
        return fields

    @model_validator(mode="after")
    def _is_complete(self) -> Self:
        if self.profile is None and (self.planned or self.backend == named.VIRTUAL):
            which = "a plan" if self.planned else "backend: virtual"
            raise ValueError(f"{which} needs its profile too: profile: FILE, as `isobatch profile` wrote it")
        of_plan = {"device", "exits"} | ({"max_batch"} if self.plan else set())
        if self.planned and (fields := sorted(self.model_fields_set & of_plan)):
            raise ValueError(f"{fields[0]} cannot be set beside a plan, which has it for each split")
        if self.answers == "early" and not self.exits:
            raise ValueError("answers: early needs exits: without them, no answer is known before the end")
        if "ramp_budget" in self.model_fields_set and not (self.answers == "early" and self.devices):
            raise ValueError("ramp_budget is for answers: early with devices:, where the plan is made at the start")
        if self.front_replicas > 1 and not self.planned:
            raise ValueError("front_replicas needs a plan or devices: without them, write replicas")
        if self.replicas > 1 and self.planned:
            raise ValueError("replicas is for serving without a plan: a plan has its own number of them")
        if self.rate_per_s and not self.devices:
            raise ValueError("rate_per_s needs devices: it is a goal for the plan that is made for them")
        return self

    def limits(self, share: float) -> Limits:
        """The limits for the dispatcher of a front that has this share of every replica."""
        return Limits(
            max_inside=ceil(self.max_inside_all * share),
            share=share,
            early_s=EARLY_S,
            audit_share=self.audit_share,
            audit_cost=self.audit_cost,
            tolerance=tolerance_in(self.prepared_folder) if self.prepared_folder else 0.0,
            answers_early=self.answers == "early",
            queue_order=queue_order_named(self.order),
        )

    @property
    def max_inside_all(self) -> int:
        """Inputs that may be inside, all fronts together: `max_inside`, or its default."""
        return self.max_inside or INSIDE_A_FRONT * self.fronts

    @property
    def most_inputs(self) -> int:
        """The most inputs in one request. A request with more than may be inside a front could never be admitted."""
        return min(self.max_inputs, ceil(self.max_inside_all / self.fronts))

    @property
    def early_budget(self) -> float | None:
        """The share of time that ramps may take if answers are early; None: answers are not early."""
        return self.ramp_budget if self.answers == "early" else None

    @property
    def prepared_folder(self) -> Path | None:
        """The directory of the network with the promise of its exits; None: isobatch prepares no such network."""
        if self.backend == named.VIRTUAL or (self.model is None and self.loader != named.LOADER):
            return None
        return self.folder

    @property
    def deciding_files(self) -> list[Path]:
        from isobatch.profiles.evidence import EVIDENCE  # imports scipy

        prepared = [self.prepared_folder / name for name in (RULES, EVIDENCE)] if self.prepared_folder else []
        return [*super().deciding_files, *prepared]

    def replica_options(self, kind: str = "", labelled: bool = False) -> dict[str, Any]:
        """
        >>> AppConfig(standby={"t4": 8}, sharers=3).replica_options("t4")
        {'num_gpus': 0.3333, 'accelerator_type': 'T4', 'num_cpus': 0.3333}
        """
        whole, sharers = whole_kind(kind)
        if is_cpu(kind) or self.backend == named.VIRTUAL:
            computes = self.backend != named.VIRTUAL or "cpus_per_replica" in self.model_fields_set
            options = {"num_cpus": self.cpus_per_replica if computes else VIRTUAL_CPUS}
        else:
            options = gpu_options(whole, labelled)
        return shared_by(self.sharers * sharers, options)

    def room_for(self, kind: str) -> tuple[Resources, Mapping[str, str]]:
        """The resources and node labels that Ray's autoscaler must provide for one more replica on this kind of device.

        A virtual device is requested as a resource that only its nodes declare; without it, any node would do.

        >>> AppConfig().room_for("a100-80g")
        ({'CPU': 1.0, 'GPU': 1}, {'isobatch.io/kind': 'a100-80g'})
        """
        options = self.replica_options(kind, labelled=True)
        needs = {**requested_amounts(options), **(of_declared(kind) if self.backend == named.VIRTUAL else {})}
        return {name: amount for name, amount in needs.items() if amount}, options.get("label_selector", {})

    @property
    def fronts(self) -> int:
        """The number of fronts. Without a plan, each of them is a replica of the network, too."""
        return self.front_replicas if self.planned else self.replicas

    @property
    def front_cpus(self) -> int:
        return self.fronts

    def replica_groups(self, plan: Plan | None = None) -> list[tuple[str, int, Resources]]:
        plan = read_plan(local(self.plan)) if self.plan and not plan else plan
        devices = dict(plan.devices()) if plan else {}
        for kind, count in self.standby.items() if devices else ():
            devices[kind] = max(count, devices.get(kind, 0))
        return [(kind, count, self.replica_needs(kind)) for kind, count in devices.items()]

    @property
    def planned(self) -> bool:
        """Whether splits run on their own replicas."""
        return bool(self.plan or self.devices)

    @property
    def pinned(self) -> bool:
        """Whether the plan is the user's own and must stay."""
        return bool(self.plan) and not self.replan


Model = TypeVar("Model", bound=BaseModel)


def checked(model: type[Model], arguments: dict[str, Any], where: str = "args") -> Model:
    """The configuration; raises UserError with one line about the first wrong field of the section `where`.

    >>> checked(AppConfig, {"max_batch": 8}).max_batch
    8
    """
    try:
        config = model.model_validate(arguments)
    except ValidationError as error:
        wrong = first_wrong(error)
        if wrong.kind == "extra_forbidden":
            known = ", ".join(model.model_fields)
            raise UserError(f"{where}: there is no field {wrong.place!r}; there are: {known}") from error
        if wrong.kind == "missing":
            raise UserError(f"{where}: {wrong.place} is missing") from error
        place = f"{wrong.place} = {wrong.value!r}: " if wrong.place else ""
        raise UserError(f"{where}: {place}{wrong.reason}") from error
    check_numbers(arguments, config, where)
    return config
