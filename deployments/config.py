"""What a user may write under `args:` of the Serve application."""

import re
from contextlib import suppress
from math import ceil
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PositiveFloat, ValidationError, model_validator

from deployments.dispatch.messages import EARLY_S, Limits
from deployments.named import BACKENDS, DEMO, LOADER, VIRTUAL, function_at, known_backend, well_formed
from optimizer.plan import read_plan
from profiles.errors import UserError, first_wrong

INSIDE_A_FRONT = 4096  # inputs, unless the user says otherwise


def _known_device(device: str) -> str:
    kind, colon, number = device.partition(":")
    if device != "cpu" and (kind != "cuda" or (colon and not number.isdecimal())):
        raise ValueError(f"{device!r} must be 'cpu', 'cuda' or 'cuda:NUMBER'")
    return device


def _counted(devices: dict[str, int] | str) -> dict[str, int] | str:
    counts = devices.values() if isinstance(devices, dict) else ()
    if devices != "auto" and (not counts or min(counts) < 1):
        raise ValueError("devices must be auto, or counts of at least one, as in {v100: 2, p100: 2}")
    return devices


def _known_backend_or_virtual(name: str) -> str:
    try:
        return name if name == VIRTUAL else known_backend(name)
    except UserError as error:
        raise ValueError(f"{error}; or virtual") from None


def _port_range(told: str) -> str:
    """
    >>> ports_in(_port_range("24000-24002"))
    range(24000, 24003)
    """
    first, dash, last = told.partition("-")
    if not (dash and first.isdecimal() and last.isdecimal() and 1024 <= int(first) <= int(last) <= 65535):
        raise ValueError(f"{told!r} must be FIRST-LAST, from 1024 to 65535, as in 24000-24099")
    return told


def ports_in(told: str) -> range:
    first, _, last = told.partition("-")
    return range(int(first), int(last) + 1)


def _origin(told: str) -> str:
    """
    >>> _origin("https://shop.example")
    'https://shop.example'
    """
    if not re.fullmatch(r"https?://[\w.-]+(:\d{1,5})?", told):
        raise ValueError(f"{told!r} must be as browsers say it: https://NAME or http://NAME:PORT, without a path")
    return told.lower()


def _link(told: str) -> str:
    """
    >>> _link("v100>k80")
    'v100>k80'
    """
    if not re.fullmatch(r"[^>\s]+>[^>\s]+", told):
        raise ValueError(f"{told!r} must name two kinds of devices: KIND>KIND, as in v100>k80")
    return told


LinkName = Annotated[str, AfterValidator(_link)]
WebOrigin = Annotated[str, AfterValidator(_origin)]
Ports = Annotated[str, AfterValidator(_port_range)]
ImportPath = Annotated[str, AfterValidator(well_formed)]
LogFormat = Literal["text", "json"]
DeviceName = Annotated[str, AfterValidator(_known_device)]
DeclaredDevices = Annotated[dict[str, int] | str, AfterValidator(_counted)]


class ServedConfig(BaseModel):
    """The fields that every served network has: classifiers and decoders."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str | None = Field(
        None, description="Directory of a checkpoint made by `isobatch prepare`; none: the demo model."
    )
    name: str | None = Field(
        None,
        pattern=r"^[\w.-]+$",
        description="What the model is called in requests and answers; none: as its directory.",
    )
    plan: str | None = Field(
        None,
        description="File of `isobatch plan`: its splits run on replicas of their own; none, and no devices: all "
        "in one process.",
    )
    replan: bool = Field(
        False,
        description="Whether a controller may replace the plan of `plan:`; if not, only while its devices are gone. "
        "A plan that is in no file may always be replaced.",
    )
    profile: str | None = Field(None, description="File of `isobatch profile`: what the plan was made from.")
    device: DeviceName = Field("cpu", description="Where the network computes: cpu or cuda.")
    cpus_per_replica: float = Field(
        1.0, ge=0, description="CPUs that a replica on the CPU asks Ray for (those of virtual devices ask for none)."
    )
    api_key_variable: str | None = Field(
        None, description="Environment variable with the key that requests must show; none: no key is needed."
    )
    allowed_origins: tuple[WebOrigin, ...] = Field(
        (),
        description="Web pages of other servers that may ask from a browser, as in https://shop.example; none: no "
        "others.",
    )
    grpc_port: int | None = Field(
        None, ge=1, le=65535, description="Port of the Open Inference Protocol over gRPC; none: only HTTP."
    )
    grpc_host: str = Field("127.0.0.1", description="Address that gRPC listens on, on the node of each front replica.")
    drain_s: float = Field(30.0, gt=0, description="How long a stop waits for the requests that were admitted.")
    log_format: LogFormat = Field("text", description="How lines of the log are written; json: an object in each.")


class AppConfig(ServedConfig):
    """One early-exit network behind HTTP. Every field has a default: with none given, the built-in demo is served."""

    loader: ImportPath = Field(LOADER, description="Function (directory, device=, dtype=) that returns a SplitModel.")
    devices: DeclaredDevices | None = Field(
        None,
        description="What plans may use, as KIND: COUNT, or auto: what Ray's nodes have. Without a plan's file, the "
        "best plan for them is made at the start, within slo_ms.",
    )
    links: dict[LinkName, PositiveFloat] = Field(
        {},
        description="Gbit/s from one kind of device to another, as KIND>KIND: 0.1, where it is not what the catalogue "
        "says: plans avoid what is slow.",
    )
    rate_per_s: float | None = Field(
        None,
        gt=0,
        description="Inputs per second that a plan made at the start must sustain; none: all it can do.",
    )
    backend: Annotated[str, AfterValidator(_known_backend_or_virtual)] = Field(
        "torch",
        description="What computes: torch, onnx, or an object of your own by its import path. auto: the fastest here, "
        "measured at the first start. graphs, onnx-graphs: torch or ONNX Runtime, replayed as CUDA graphs. virtual: "
        "devices take the profile's time instead of computing (a rehearsal). Not told: what the plan of a file was "
        "made for.",
    )
    front_replicas: int = Field(
        1,
        ge=1,
        description="Replicas of the front, one CPU each; each counts on a share of every device that follows its "
        "load.",
    )
    slo_ms: float = Field(
        1000.0,
        gt=0,
        description="An answer's deadline, unless the request says otherwise (X-Deadline-Ms); not told: what the "
        "plan of a file was made for.",
    )
    dtype: Literal["float32", "float16", "bfloat16", "int8"] = Field(
        "float32",
        description="Precision of the network; int8: of its dense layers, on CPUs, by ONNX Runtime. Not told: what the "
        "plan of a file was made for.",
    )
    answers: Literal["leaving", "early"] = Field(
        "leaving",
        description="early: an input runs on to the end after its answer at a ramp, so that batches never shrink, "
        "nothing but time until the answer is gained, and answers are audited; under load it gives way to those who "
        "wait. leaving: it leaves there.",
    )
    ramp_budget: float = Field(
        0.02,
        ge=0,
        le=1,
        description="Where answers are early: the most by which ramps may delay who is answered at the end, as a share "
        "of what the network takes.",
    )
    exits: bool = Field(True, description="Whether inputs may leave at ramps; if not, all run to the last block.")
    max_batch: int = Field(32, ge=1, description="The most inputs that are computed together.")
    max_waiting: int | None = Field(
        None,
        ge=1,
        description="Inputs that may be inside, all fronts together; beyond them a request is refused (503). None: "
        f"{INSIDE_A_FRONT:,} for each front.",
    )
    too_long: Literal["truncate", "refuse"] = Field(
        "truncate",
        description="What becomes of a text that is longer than the network reads: its end is cut off, and the answer "
        'says "truncated": true, or it is refused (422).',
    )
    on_deadline: Literal["refuse", "best"] = Field(
        "refuse",
        description="What becomes of an input of a cascade for whose next level there is no time left: it is refused "
        '(504), or answered with what the levels before say, marked "degraded": true.',
    )
    max_inputs: int = Field(256, ge=1, description="Inputs that one request may carry (422 beyond).")
    max_body_bytes: int = Field(
        16 * 2**20, ge=1, description="Size that the body of one request may have (413 beyond)."
    )
    by_value_bytes: int = Field(
        320 * 2**10, ge=0, description="Survivors of a launch that weigh more wait where they were computed."
    )
    audit_share: float = Field(
        0.02,
        ge=0,
        le=1,
        description="The share of inputs that run on to the end after their answer, to show how often it is the full "
        "network's.",
    )
    audit_cost: float = Field(
        0.01, ge=0, lt=1, description="The most that this may cost, as a share of what replicas compute."
    )
    agreement: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="The share of answers that should be the full network's; none: what `isobatch prepare` found.",
    )
    ports: Ports | None = Field(
        None,
        description="Ports on which fronts and replicas listen for each other on each node, as in 24000-24099; none: "
        "any that are free.",
    )

    @model_validator(mode="before")
    @classmethod
    def _with_what_its_plan_says(cls, told: Any) -> Any:
        """A plan's file that cannot be read is refused where it is needed."""
        if not (isinstance(told, dict) and isinstance(told.get("plan"), str)):
            return told
        with suppress(UserError):
            plan = read_plan(Path(told["plan"]))
            slo_ms = {"slo_ms": 1e3 * plan.slo_s} if plan.slo_s else {}
            computed = {"backend": plan.backend, "dtype": plan.dtype} if plan.backend in BACKENDS else {}
            return slo_ms | {name: value for name, value in computed.items() if value} | told
        return told

    @model_validator(mode="after")
    def _is_complete(self) -> Self:
        if self.profile is None and (self.planned or self.backend == VIRTUAL):
            which = "a plan" if self.planned else "backend: virtual"
            raise ValueError(f"{which} needs its profile too: profile: FILE, as `isobatch profile` wrote it")
        decided = {"device", "exits"} | ({"max_batch"} if self.plan else set())
        if self.planned and (told := sorted(self.model_fields_set & decided)):
            raise ValueError(f"{told[0]} cannot be set beside a plan, which says it for each split")
        if self.answers == "early" and not self.exits:
            raise ValueError("answers: early needs exits: without, no answer is known before the end")
        if "ramp_budget" in self.model_fields_set and not (self.answers == "early" and self.devices):
            raise ValueError("ramp_budget is for answers: early where the plan is made at the start, for devices")
        if self.front_replicas > 1 and not self.planned:
            raise ValueError("front_replicas needs a plan, or devices: without, each would hold a whole network")
        if self.rate_per_s and not self.devices:
            raise ValueError("rate_per_s needs devices: it is for the plan that is made for them")
        return self

    def limits(self, share: float) -> Limits:
        """The limits of a front's dispatcher that may count on this share of every replica."""
        return Limits(
            backlog=ceil(self.most_inside * share),
            share=share,
            early_s=EARLY_S,
            audit_share=self.audit_share,
            audit_cost=self.audit_cost,
            degrades=self.on_deadline == "best",
            answers_early=self.answers == "early",
        )

    @property
    def most_inside(self) -> int:
        """Inputs that may be inside, all fronts together."""
        return self.max_waiting or INSIDE_A_FRONT * self.front_replicas

    @property
    def most_inputs(self) -> int:
        """Inputs that one request may carry: never more than a front may have inside, or it would never be let in."""
        return min(self.max_inputs, ceil(self.most_inside / self.front_replicas))

    @property
    def early_budget(self) -> float | None:
        """What ramps may take where answers are early; None: they are not."""
        return self.ramp_budget if self.answers == "early" else None

    @property
    def promising(self) -> Path | None:
        """The directory of the network whose exits promise something; None: whoever computes is no network of ours."""
        if self.backend == VIRTUAL or (self.model is None and self.loader != LOADER):
            return None
        return Path(self.model or str(function_at(DEMO)()))

    @property
    def planned(self) -> bool:
        """Splits run on replicas of their own."""
        return bool(self.plan or self.devices)

    @property
    def pinned(self) -> bool:
        """The plan is the user's own, and stays."""
        return bool(self.plan) and not self.replan


Model = TypeVar("Model", bound=BaseModel)


def parse(arguments: dict[str, Any]) -> AppConfig:
    """The configuration, or one line about the first field that is wrong.

    >>> parse({"max_batch": 8}).max_batch
    8
    """
    return checked(AppConfig, arguments)


def checked(model: type[Model], arguments: dict[str, Any], where: str = "args") -> Model:
    """Any configuration, or one line about the first field that is wrong."""
    try:
        return model.model_validate(arguments)
    except ValidationError as error:
        wrong = first_wrong(error)
        if wrong.kind == "extra_forbidden":
            known = ", ".join(model.model_fields)
            raise UserError(f"{where}: there is no field {wrong.place!r}; there are: {known}") from error
        place = f"{wrong.place} = {wrong.value!r}: " if wrong.place else ""
        raise UserError(f"{where}: {place}{wrong.reason}") from error
