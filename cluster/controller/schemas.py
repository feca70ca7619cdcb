"""The OpenAPI schemas of the controller's answers, which `status.py` makes; tests compare the two."""

from typing import Literal

from pydantic import Field

from isobatch.cluster.controller.record import What
from isobatch.deployments.front.schemas import Schema

STATUS_VERSION = 1  # grows when a field of `/status` changes its meaning or is removed; new fields leave it


class PlanStatus(Schema):
    """The plan that runs."""

    summary: str
    devices: dict[str, int]
    ramps: list[int] = Field(description="The open ramps, by their blocks.")
    promised_per_s: float | None = Field(description="Goodput.")
    promised_ms: float | None = Field(
        description="Of an input that stays to the last block while every launch is full; of texts: the first token."
    )
    played_p50_ms: float | None = Field(description="By the simulator, at the promised rate; null: not simulated.")
    played_p99_ms: float | None
    played_in_time: float | None = Field(description="The share of all inputs.")
    sustains_per_s: float = Field(description="Estimated goodput, by measured launches and by the answers under load.")
    shortfall: str | None = Field(description="Why that is less than was promised, as text.")
    kept: float = Field(description="The share of the estimated goodput that plans reach under load.")


class WindowStatus(Schema):
    """The counts of the window that has not ended."""

    seconds: float
    ends_in_s: float
    arrivals_per_s: float
    length: int | None = Field(description="Tokens of an input, where the plan counts tokens.")
    tokens_per_text: float | None
    goodput_per_s: float
    p50_ms: float | None
    p99_ms: float | None


class ForecastStatus(Schema):
    """The forecast of the next window, with its bounds `low` and `high`."""

    survival: list[float]
    low: list[float]
    high: list[float]
    arrivals_per_s: float
    arrivals_low_per_s: float
    arrivals_high_per_s: float
    tokens_per_text: float | None = Field(description="How long texts will be, where the plan counts tokens.")
    method: str


class EventStatus(Schema):
    """One decision, with its plans as text."""

    number: int
    at_s: float = Field(description="Seconds since 1970.")
    what: What
    why: str
    before: str
    after: str | None = Field(description="None where the plan stayed.")
    forced: bool = Field(description="The plan before had lost devices.")
    gain_promised: float | None
    gain_seen: float | None = Field(description="Measured against the estimate for the plan before.")
    took_s: float | None
    starts: int = Field(description="Replicas that had to start.")
    arrivals_per_s: float | None
    achieved_per_s: float | None = Field(description="Goodput in the window that led to it.")
    expected_per_s: float | None = Field(description="The goodput that the plan promised for these arrivals.")
    p99_ms: float | None
    worse: float = Field(description="How many times as many answers disagree as `isobatch prepare` measured.")


class EffortStatus(Schema):
    """The time that the controller itself takes."""

    windows: int
    ms_per_window: float | None
    looks: int
    ms_per_look: float | None


class ControllerStatus(Schema):
    schema_version: Literal[1]
    application: str
    promise: str = Field(description="The most that exits may lose, as text.")
    now_s: float = Field(description="Seconds since 1970.")
    paused: bool
    plan: PlanStatus
    window: WindowStatus
    agreement: str | None = Field(description="The share of answers that agree with the full network, as text.")
    devices: dict[str, int] = Field(description="The devices that plans may use now.")
    asked: str | None = Field(description="Devices requested from Ray's autoscaler that have not arrived, as text.")
    forecast: ForecastStatus | None = Field(description="None until a window has ended.")
    survival: list[float] = Field(description="The share that enters each block, of inputs that may leave at any ramp.")
    full_share: float = Field(description="The share of all inputs that ask for the whole network (`X-Full`).")
    corrections: dict[str, dict[str, float]] = Field(
        description="By kind and blocks: measured time over the table's time."
    )
    events: list[EventStatus] = Field(description="The latest 20 of this deployment, oldest first.")
    effort: EffortStatus
    trouble: str | None = Field(description="Why the last look failed.")


class FleetDecisionStatus(Schema):
    at_s: float = Field(description="Seconds since 1970.")
    why: str
    budgets: dict[str, dict[str, int]] | None = Field(description="By application; null: devices stay where they are.")


class MemberStatus(Schema):
    """An application of a fleet, as its controller answered last."""

    devices: dict[str, int] = Field(description="Those that it may use, by kind.")
    arrivals_per_s: float = Field(description="In its controller's present window.")
    goodput_per_s: float
    expected_per_s: float = Field(description="The rate for which it is given devices.")
    state: str = Field(description="What is unusual, as text; often empty.")


class FleetStatus(Schema):
    """The arbiter of a fleet."""

    applications: dict[str, MemberStatus] = Field(description="Those whose controllers have answered.")
    budgets: dict[str, dict[str, int]] = Field(description="The devices that each application may use, by kind.")
    silent: list[str] = Field(description="Applications whose controllers do not answer, and which keep their devices.")
    decisions: list[FleetDecisionStatus] = Field(description="The latest 20, oldest first.")


class PausedStatus(Schema):
    paused: bool
