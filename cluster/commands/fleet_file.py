"""The file that `isobatch plan fleet.yaml` reads: a fleet's devices, and the applications that share them."""

from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from isobatch.cluster.controller.config import ShareTerms
from isobatch.deployments.config import checked
from isobatch.optimizer.fleets.application import FleetGoal
from isobatch.profiles.errors import UserError, read_yaml

# Fields that `args:` must not have.
OF_PLANS = ("plan", "profile", "devices", "model", "slo_ms", "rate_per_s", "max_batch", "replan")
ARBITER_NAME = "fleet"


def controller_of(name: str) -> str:
    """The name of the controller of an application with this name."""
    return f"{name}-controller"


class FleetEntry(ShareTerms):
    """An application in the file of a fleet."""

    profile: str
    slo_ms: float | None = Field(None, gt=0)
    rate_per_s: float | None = Field(None, gt=0)
    model: str | None = None
    args: dict[str, Any] = Field({})


class FleetFile(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    devices: dict[str, int | str] = Field(min_length=1)
    goal: FleetGoal = "goodput"
    standby: bool = False  # each device holds the weights of every application
    applications: tuple[FleetEntry, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _is_complete(self) -> Self:
        names = [each.name for each in self.applications]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"two applications are called {twice}: give each its own name")
        others = [*map(controller_of, names), *([ARBITER_NAME] if len(names) > 1 else [])]
        if taken := next((name for name in names if name in others), None):
            raise ValueError(f"{taken} is the name of the arbiter or of a controller: name the application otherwise")
        unrated = [each.name for each in self.applications if each.rate_per_s is None]
        if unrated and self.goal == "cost":
            raise ValueError(f"the goal cost needs rate_per_s of {unrated[0]}: how much must it sustain?")
        if self.goal == "fairness" and 0 < len(unrated) < len(names):
            raise ValueError(f"fairness compares with rate_per_s, which {unrated[0]} lacks: give it to all, or to none")
        if self.standby and (shared := next((kind for kind in self.devices if "/" in kind), None)):
            raise ValueError(f"standby: each application has a replica on a whole device, not on a {shared}")
        if len(names) == 1 and (self.standby or self.applications[0].park_after_s):
            raise ValueError("standby and park_after_s are for applications that share devices: leave them out")
        for each in self.applications:
            if wrong := next((name for name in OF_PLANS if name in each.args), None):
                raise ValueError(f"args: {wrong} of {each.name} comes from its plan or its other fields: leave it out")
        return self


def read_fleet(path: Path) -> FleetFile:
    content = read_yaml(path)
    if not isinstance(content, dict):
        raise UserError(f"{path}: a fleet's file has the fields {', '.join(FleetFile.model_fields)}")
    for entry in content["applications"] if isinstance(content.get("applications"), list) else ():
        if isinstance(entry, dict) and "import_path" in entry:
            raise UserError(f"{path} is a Serve file: 'isobatch plan' makes one from the file of a fleet")
        if isinstance(entry, dict):  # so that errors name the application
            checked(FleetEntry, entry, f"{path}: {entry.get('name', 'an application without a name')}")
    return checked(FleetFile, content, str(path))
