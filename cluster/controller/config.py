"""The `args:` of the controller's application in a Serve file."""

from typing import Self

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, field_validator, model_validator

from isobatch.deployments.named import HostName, LogFormat
from isobatch.optimizer.fleets.application import SOMETHING, FleetGoal
from isobatch.optimizer.goals import GOALS
from isobatch.profiles.latency import MOST_BATCH

GOALS_TEXT = "; ".join(f"{name}: {goal.about}" for name, goal in GOALS.items())


class WatcherConfig(BaseModel):
    """An application that answers over HTTP beside the one that it watches."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    log_format: LogFormat = Field("text", description="The format of log lines; json: an object in each line.")
    api_key_variable: str | None = Field(
        None, description="Environment variable with the key that requests must show; none: no key is needed."
    )
    allowed_hosts: tuple[HostName, ...] = Field(
        (), description="Names by which clients reach this server, besides addresses and local names."
    )


class Patience(BaseModel):
    """When to look, when to change the plan, and when to take a change back."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    replan_every_s: float = Field(120.0, gt=0, description="The length of a window, at whose end a plan is chosen.")
    look_every_s: float = Field(
        5.0, gt=0, description="How often devices are counted and inputs compared with the forecast."
    )
    react_every_s: float = Field(
        1.0, gt=0, description="How often refusals are counted; after refusals a plan of more goodput runs at once."
    )
    enough_inputs: int = Field(
        100, ge=1, description="A change of plan needs this many answers in the last 15 windows."
    )
    least_gain: float = Field(
        0.03,
        gt=0,
        description="The share of goodput that a change must gain; from the third recent change on, each doubles it.",
    )
    notice: float = Field(
        0.1,
        gt=0,
        le=1,
        description="A plan of less goodput may run if its answers come sooner by this share of the SLO.",
    )
    hold_windows: int = Field(
        15,
        ge=1,
        description="For how many windows a plan is expected to run: the cost of a change is spread over them.",
    )
    start_s: float = Field(10.0, ge=0, description="Seconds that a replica takes to start, until a start was measured.")
    least_loss: float = Field(
        0.1, gt=0, lt=1, description="A new plan that falls this share behind the old one is rolled back."
    )
    learn: float = Field(
        0.6,
        ge=0,
        le=1,
        description="How fast measured launches correct the latency tables: the share of the difference per window.",
    )
    come_within_s: float = Field(
        600.0,
        gt=0,
        description="If requested devices of a kind do not arrive within this time, the kind is not requested for "
        "hold_windows.",
    )

    @property
    def hold_s(self) -> float:
        """For how long a plan is expected to run."""
        return self.hold_windows * self.replan_every_s


# Fields without effect for texts, whose application keeps its first devices and the TTFT and TPOT of its plan.
OF_CLASSIFIERS = frozenset(
    (
        "goal", "devices", "shared", "grow_to", "slo_ms", "slack", "max_batch", "one_machine", "gap",
        "under_load", "strict", "learn", "notice", "reserve",
    )
)  # fmt: skip


class ShareTerms(BaseModel):
    """An application of a fleet, as `isobatch plan` and the arbiter know it."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    name: str = Field(pattern=r"^[\w.-]+$", description="The name of the application.")
    weight: float = Field(1.0, gt=0, description="Multiplies its goodput; for the goal fairness divides it.")
    least_per_s: float = Field(
        SOMETHING, ge=0, description="Its least goodput, by default any above 0; 0: it may get no device."
    )
    priority: int = Field(0, description="Where devices are missing, applications of lower priority go without first.")
    park_after_s: float | None = Field(
        None,
        gt=0,
        description="Seconds without inputs after which other applications get its devices until its next input; none: "
        "never.",
    )


class MemberTerms(ShareTerms):
    """An application that runs in a fleet."""

    devices: dict[str, NonNegativeInt] = Field(description="Its own devices: those of its plan, as KIND: COUNT.")
    controller: str = Field(description="The name of the application that is its controller.")


class ArbiterConfig(WatcherConfig):
    """The arbiter of a fleet. `isobatch plan fleet.yaml --out FILE` writes these fields."""

    devices: dict[str, PositiveInt] = Field(min_length=1, description="The devices of the fleet, as KIND: COUNT.")
    goal: FleetGoal = Field("goodput", description="What the division of the devices is best for.")
    applications: tuple[MemberTerms, ...] = Field(min_length=2, description="The applications that share them.")
    replan_every_s: float = Field(120.0, gt=0, description="How often the devices are divided again.")
    look_every_s: float = Field(5.0, gt=0, description="How often refusals and lost devices are looked for.")
    least_gain: float = Field(0.03, gt=0, description="The share of the goal's value that other budgets must gain.")

    @model_validator(mode="after")
    def _devices_suffice(self) -> Self:
        names = [each.name for each in self.applications]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"two applications are called {twice}: give each its own name")
        for kind in dict.fromkeys(kind for each in self.applications for kind in each.devices):
            own, there = sum(each.devices.get(kind, 0) for each in self.applications), self.devices.get(kind, 0)
            if own > there:
                fix = "plan the fleet anew, with the devices that are there"
                raise ValueError(f"the applications have {own} {kind} of their own, the fleet has {there}: {fix}")
        return self

    @property
    def nothing(self) -> dict[str, int]:
        return dict.fromkeys(self.devices, 0)


class ControllerConfig(WatcherConfig, Patience):
    """The controller of one application. All fields have defaults.

    The API key of the application is not taken over: `api_key_variable` must be set here as well.
    """

    application: str = Field("isobatch", description="The name of the application it controls.")
    goal: str = Field(
        "goodput",
        description=f"{GOALS_TEXT}. With latency, plans sustain twice the expected rate, with cost and "
        "goodput-per-dollar that rate and `reserve`.",
    )
    reserve: float = Field(
        0.1,
        ge=0,
        description="With other goals than goodput and latency: plans sustain the expected rate and this share more.",
    )
    devices: dict[str, PositiveInt] | None = Field(
        None, description="The most devices that plans may use, as KIND: COUNT; none: the devices of the first plan."
    )
    grow_to: dict[str, PositiveInt] = Field(
        {},
        description="How many devices of each kind there may be, present ones included, as KIND: COUNT; devices that "
        "the first plan shares have their names there, and count as many: v100/2: 8 are 4 devices. The controller "
        "requests those that the cheapest plan needs from Ray's autoscaler (goal: cost). None: no requests.",
    )
    shared: dict[str, PositiveInt] = Field(
        {},
        description="The devices of a fleet whose arbiter says how many of them plans may use, as KIND: COUNT; at "
        "first those of the plan that runs. None: there is no arbiter.",
    )
    slo_ms: float | None = Field(None, gt=0, description="The SLO of plans; none: the application's slo_ms.")
    slack: float = Field(0.2, ge=0, lt=1, description="The share of the SLO that plans keep for bursts.")
    max_batch: int | None = Field(
        None,
        ge=1,
        le=MOST_BATCH,
        description="The largest batch of a plan; none: that of the application if given, else the largest timed one.",
    )
    one_machine: bool = Field(False, description="Devices share a host, not a network.")
    gap: float = Field(0.01, ge=0, description="The planner stops when no plan can be better by more than this share.")
    memory: str | None = Field(
        None,
        description="The folder of windows and decisions, which outlive a restart; none: `isobatch/controller` "
        "under XDG_CACHE_HOME, or `~/.cache`.",
    )
    under_load: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="The agreement that is enough while many inputs are late or refused; none: never less.",
    )
    strict: bool = Field(False, description="If no audit ends for ten minutes, the checkpoint's own thresholds return.")

    @field_validator("goal")
    @classmethod
    def _is_registered(cls, goal: str) -> str:
        if goal not in GOALS:
            raise ValueError(f"it must be one of {', '.join(GOALS)}")
        return goal

    @model_validator(mode="after")
    def _grows_for_dollars(self) -> Self:
        if self.grow_to and not GOALS[self.goal].at_given_goodput:
            raise ValueError("grow_to needs goal: cost: the most goodput would always need all devices that may come")
        if self.shared and (self.grow_to or self.devices):
            raise ValueError("shared says which devices plans may use: leave out devices and grow_to")
        return self
