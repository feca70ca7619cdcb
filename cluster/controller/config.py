"""What a user may write under `args:` of the controller's application."""

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, model_validator

from deployments.config import LogFormat


class Patience(BaseModel):
    """When to look, when to move, and when to take it back."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    replan_every_s: float = Field(120.0, gt=0, description="A window: what was seen in one decides what runs next.")
    look_every_s: float = Field(
        5.0, gt=0, description="How often devices are counted and surprises looked for, inside a window."
    )
    react_every_s: float = Field(
        1.0,
        gt=0,
        description="How often refusals are looked for: a plan of more goodput on the same devices runs at once.",
    )
    enough_inputs: int = Field(100, ge=1, description="Answers of the last 15 windows without which nothing moves.")
    least_gain: float = Field(
        0.03,
        gt=0,
        description="The share of goodput a change must promise; from the third of late on, each doubles it.",
    )
    notice: float = Field(
        0.1,
        gt=0,
        le=1,
        description="The share of the SLO by which answers must come sooner for a plan to be worth less goodput than "
        "the devices can.",
    )
    hold_windows: int = Field(
        15, ge=1, description="How long a plan is expected to stay right: what moving costs is set against this."
    )
    start_s: float = Field(10.0, ge=0, description="What a replica takes to start, until it was measured.")
    least_loss: float = Field(
        0.1, gt=0, lt=1, description="A new plan that falls behind the old one by this share is rolled back."
    )
    learn: float = Field(
        0.6,
        ge=0,
        le=1,
        description="How fast launches of busy devices correct the tables: the share per window; 0: never.",
    )
    come_within_s: float = Field(
        600.0,
        gt=0,
        description="A kind of which devices were asked for and none came in this time is not counted on for "
        "hold_windows.",
    )


# What the controller of a decoder has no use for: it has the devices of the start, and TTFT and TPOT of the plan.
OF_CLASSIFIERS = frozenset(
    (
        "goal", "devices", "grow_to", "slo_ms", "slack", "max_batch", "one_machine", "side_by_side", "gap",
        "under_load", "strict", "learn", "notice", "reserve",
    )
)  # fmt: skip


class ControllerConfig(Patience):
    """The controller of one application, whose network and plan it steers. All fields have defaults.

    A key is not taken over: where the application asks for one, its controller is told the same.
    """

    application: str = Field("isobatch", description="The name of the application it controls.")
    goal: Literal["goodput", "latency", "cost"] = Field(
        "goodput",
        description="The most goodput of all devices; or latency: the quickest answers of all plans that sustain twice "
        "what is expected, which gives up goodput for bursts until inputs are refused; or cost: the fewest dollars, at "
        "the catalogue's prices, that sustain the inputs that are expected.",
    )
    reserve: float = Field(
        0.1,
        ge=0,
        description="With goal: cost, the share by which a plan must sustain more than is expected, or devices "
        "are added.",
    )
    devices: dict[str, PositiveInt] | None = Field(
        None, description="The most that plans may use, as KIND: COUNT; none: what the application began with."
    )
    grow_to: dict[str, PositiveInt] = Field(
        {},
        description="How many devices of each kind there may be, as KIND: COUNT, those that are there included: Ray's "
        "autoscaler is asked for what the cheapest plan needs of them (goal: cost). None: nobody is asked.",
    )
    slo_ms: float | None = Field(None, gt=0, description="What plans must keep; none: the application's slo_ms.")
    slack: float = Field(0.2, ge=0, lt=1, description="The share of the SLO that plans keep for bursts.")
    max_batch: int = Field(64, ge=1, description="No larger batches than this.")
    one_machine: bool = Field(False, description="Devices share a host, not a network.")
    side_by_side: bool = Field(True, description="Kinds of devices may serve in pipelines of their own.")
    gap: float = Field(0.01, ge=0, description="The planner stops when no plan can be better by more than this share.")
    memory: str | None = Field(
        None,
        description="Folder of what outlives a restart: windows seen, decisions made; none: `isobatch/controller` "
        "under XDG_CACHE_HOME, or `~/.cache`.",
    )
    under_load: float | None = Field(
        None, gt=0, lt=1, description="The agreement that is enough while inputs are refused; none: never less."
    )
    strict: bool = Field(
        False, description="Where no audit ends for ten minutes, the checkpoint's own thresholds are back."
    )
    log_format: LogFormat = Field("text", description="How lines of the log are written; json: an object in each.")
    api_key_variable: str | None = Field(
        None, description="Environment variable with the key that requests must show; none: whoever reaches the port."
    )

    @model_validator(mode="after")
    def _grows_for_dollars(self) -> Self:
        if self.grow_to and self.goal != "cost":
            raise ValueError("grow_to needs goal: cost: the most goodput would always need all devices that may come")
        return self
