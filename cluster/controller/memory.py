"""Where a controller keeps what it knows: a folder for each deployment of its application, `APPLICATION/DEPLOYMENT`.

A deployment is one application with one configuration on one Ray, for as long as that Ray runs. Ray itself remembers
which one it is, so a controller that Serve restarts, on any node, finds its folder again; another configuration and
another Ray begin with an empty one. A deployment is called by when it began.
"""

import fcntl
import json
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from itertools import groupby
from pathlib import Path
from shutil import rmtree
from typing import IO
from uuid import uuid4

from cluster.controller.config import ControllerConfig
from cluster.controller.record import Event, Events
from deployments import ray_facts
from deployments.config import AppConfig
from deployments.decoding.config import DecoderConfig
from deployments.folders import cache_directory
from profiles.errors import UserError
from profiles.evidence import EVIDENCE
from profiles.promise import RULES
from profiles.windows import History

KEEP = 5  # deployments that have ended
SHOWN = 20  # decisions of those, in all
_DEPLOYED = "deployed:"  # and the name of an application: the key of which deployment it is
_NAME = re.compile(r"(\d{8}T\d{6}Z)-[0-9a-f]{6}")
_BEGAN = "%Y%m%dT%H%M%SZ"
_WITHOUT_EFFECT = {"application", "memory", "log_format", "api_key_variable"}  # fields that change no decision


def deployment_of(application: str, configuration: str, now_s: float) -> str:
    """What the deployment of an application with this configuration is called; a new one where Ray knows another."""
    key = f"{_DEPLOYED}{application}"
    known = json.loads(ray_facts.recall(key) or "{}")
    if known.get("configuration") != configuration:
        name = f"{datetime.fromtimestamp(now_s, UTC):{_BEGAN}}-{uuid4().hex[:6]}"
        known = {"configuration": configuration, "deployment": name}
        ray_facts.remember(key, json.dumps(known))
    return str(known["deployment"])


def configuration_of(config: ControllerConfig, app_config: AppConfig | DecoderConfig) -> str:
    """A hash of all that is said of the application, and of its controller's decisions, with the contents of files.

    The profile knows the weights, so they are not read.
    """
    said = [app_config.model_dump_json(), config.model_dump_json(exclude=_WITHOUT_EFFECT)]
    contents = [path.read_bytes() if path.is_file() else b"" for path in _files(app_config)]
    parts = [*(each.encode() for each in said), *contents]
    return sha256(b"".join(sha256(part).digest() for part in parts)).hexdigest()


def _files(app_config: AppConfig | DecoderConfig) -> Iterator[Path]:
    """What the configuration names and decisions depend on."""
    if app_config.plan:
        yield Path(app_config.plan)
    if isinstance(app_config, DecoderConfig):
        yield from (app_config.profile_path, Path(app_config.model) / RULES)
        return
    if app_config.profile:
        yield Path(app_config.profile)
    if app_config.prepared_folder:
        yield from (app_config.prepared_folder / RULES, app_config.prepared_folder / EVIDENCE)


@dataclass(frozen=True)
class Earlier:
    """A deployment that has ended: `events` are its last decisions, the same one again and again told once."""

    began_s: float
    ended_s: float  # its last decision, or its beginning where it decided nothing
    events: tuple[Event, ...]


class Memory:
    """The folder of one deployment: this process alone writes there, as it holds the lock until it is closed.

    `earlier` are those of the same application that ended before, the latest first. The oldest are deleted.
    """

    def __init__(self, root: str | None, application: str, deployment: str) -> None:
        self.folder = (Path(root).expanduser() if root else cache_directory() / "controller") / application / deployment
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            lock = _lock(self.folder)
        except OSError as error:
            reason = f"no file can be locked there ({error.strerror}); name a folder on a local disk"
            raise UserError(f"args: memory = {str(self.folder.parents[1])!r}: {reason}") from error
        if lock is None:
            raise UserError(f"another controller of {application!r} runs: it holds {self.folder}")
        self._lock = lock
        self.earlier = _earlier(self.folder)

    def close(self) -> None:
        self._lock.close()

    def history(self) -> History:
        return History(self.folder / "exits.jsonl")

    def events(self) -> Events:
        return Events(self.folder / "events.jsonl")


def _lock(folder: Path) -> IO[str] | None:
    """It ends with the process, at the latest. None where another one holds it."""
    lock = (folder / "lock").open("a")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        return None
    except OSError:
        lock.close()
        raise
    return lock


def _earlier(folder: Path) -> tuple[Earlier, ...]:
    """What deployments before this one left. One that still runs, on another Ray, is none of them, and is kept."""
    before = [each for each in folder.parent.iterdir() if _NAME.fullmatch(each.name) and each.name < folder.name]
    found = list[tuple[float, list[Event]]]()
    for each in sorted(before, reverse=True):
        with suppress(OSError):  # another process has just deleted it, or it is somebody else's
            if (lock := _lock(each)) is None:
                continue
            with lock:
                if len(found) < KEEP:
                    found.append((_began_s(each), _decided(each)))
                else:
                    rmtree(each, ignore_errors=True)
    most = SHOWN // len(found) if found else 0
    return tuple(
        Earlier(began_s, events[-1].at_s if events else began_s, tuple(events[-most:])) for began_s, events in found
    )


def _began_s(folder: Path) -> float:
    return datetime.strptime(folder.name.partition("-")[0], _BEGAN).replace(tzinfo=UTC).timestamp()


def _decided(folder: Path) -> list[Event]:
    """Its decisions; the last of those that say the same again."""
    try:
        events = Events(folder / "events.jsonl").all
    except UserError:  # of another version of isobatch
        return []
    runs = groupby(events, key=lambda event: (event.what, event.why, event.before))
    return [list(run)[-1] for _, run in runs]
