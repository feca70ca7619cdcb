"""The memory of a controller: a folder for each deployment of its application, `APPLICATION/DEPLOYMENT`.

A deployment is one application with one configuration on one Ray, for as long as that Ray runs. Ray itself remembers
the name of the deployment, so a controller that Serve restarts on any node opens the same folder. Another configuration
or another Ray begins with an empty folder. The name of a deployment is the time at which it began.
"""

import fcntl
import json
import re
from contextlib import suppress
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from shutil import rmtree
from typing import IO
from uuid import uuid4

from isobatch.cluster.controller.config import ControllerConfig
from isobatch.cluster.controller.record import Events
from isobatch.deployments import ray_facts
from isobatch.deployments.config import ServedConfig
from isobatch.deployments.folders import cache_directory
from isobatch.profiles.errors import UserError
from isobatch.profiles.windows import History

_DEPLOYED = "deployed:"  # prefix of the key under which Ray remembers the deployment of an application
_NAME = re.compile(r"\d{8}T\d{6}Z-[0-9a-f]{6}")
_BEGAN = "%Y%m%dT%H%M%SZ"
# Fields that change no decision.
_WITHOUT_EFFECT = {"application", "memory", "log_format", "api_key_variable", "allowed_hosts"}


def deployment_of(application: str, configuration: str, now_s: float) -> str:
    """The name of the deployment with this configuration; a new name where Ray remembers another configuration."""
    key = f"{_DEPLOYED}{application}"
    known = json.loads(ray_facts.recall(key) or "{}")
    if known.get("configuration") != configuration:
        name = f"{datetime.fromtimestamp(now_s, UTC):{_BEGAN}}-{uuid4().hex[:6]}"
        known = {"configuration": configuration, "deployment": name}
        ray_facts.remember(key, json.dumps(known))
    return str(known["deployment"])


def configuration_of(config: ControllerConfig, app_config: ServedConfig) -> str:
    """A hash of the configurations of application and controller, and of the files that they name.

    Weights are not read, because the profile has their hash.
    """
    configurations = [app_config.model_dump_json(), config.model_dump_json(exclude=_WITHOUT_EFFECT)]
    contents = [path.read_bytes() if path.is_file() else b"" for path in app_config.deciding_files]
    parts = [*(each.encode() for each in configurations), *contents]
    return sha256(b"".join(sha256(part).digest() for part in parts)).hexdigest()


class Memory:
    """The folder of one deployment. Only this process writes there, because it holds the lock until it is closed.

    The folders of ended deployments of the same application are deleted.
    """

    def __init__(self, root: str | None, application: str, deployment: str) -> None:
        self.folder = (Path(root).expanduser() if root else cache_directory() / "controller") / application / deployment
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = _lock(self.folder)
        except OSError as error:
            reason = f"no file can be written and locked there ({error.strerror}); name another folder"
            raise UserError(f"args: memory = {str(self.folder.parents[1])!r}: {reason}") from error
        if lock is None:
            raise UserError(f"another controller of {application!r} runs: it holds {self.folder}")
        self._lock = lock
        _delete_ended(self.folder)

    def close(self) -> None:
        self._lock.close()

    def history(self) -> History:
        return History(self.folder / "exits.jsonl")

    def events(self) -> Events:
        return Events(self.folder / "events.jsonl")


def _lock(folder: Path) -> IO[str] | None:
    """The lock of a folder, which is free again when the process ends. None where another process holds it."""
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


def _delete_ended(folder: Path) -> None:
    """Delete the ended deployments before this one. A deployment that still runs, on another Ray, is left alone."""
    for each in folder.parent.iterdir():
        if not _NAME.fullmatch(each.name) or each.name >= folder.name:
            continue
        with suppress(OSError):  # another process has just deleted the folder, or another user owns it
            if lock := _lock(each):
                with lock:
                    rmtree(each, ignore_errors=True)
