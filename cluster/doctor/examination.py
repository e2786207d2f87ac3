"""The facts and findings of `baton doctor`. Values only: the rules are tested without a cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from protos.model_files.hub_name import HubName

View = Mapping[str, Any]


class Severity(StrEnum):
    """WARNING: slower, or less safe, than it could be. FAULT: requests fail, or will."""

    WARNING = "warning"
    FAULT = "fault"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the report. `name` is stable; `subject`: the worker, lane or host."""

    name: str
    severity: Severity
    subject: str
    text: str
    fix: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """The host on which the doctor runs. `max_open_files`: the hard limit, to which Baton raises its own."""

    num_cores: int
    shm_bytes: int
    shm_free_bytes: int
    max_open_files: int
    addresses: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisFacts:
    """`error`: why it could not be examined. `round_trip_s`: the shortest of several."""

    url: str
    error: str = ""
    version: str = ""
    eviction: str = ""
    round_trip_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneSpeed:
    """KV of `num_tokens` tokens as it moved over a lane.

    - `seconds`: until the receiver had answered from it; `lane_s`: of that, the lane was busy, 0 if not known
    - `computed_s`: how long the sender took to compute the KV and to answer
    - `same`: whether both answers agree
    """

    num_tokens: int
    num_bytes: int
    seconds: float
    computed_s: float
    same: bool
    lane_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneProbe:
    """A lane's transfers of several sizes. `error`: why a transfer failed."""

    source: str
    destination: str
    transport: str = ""
    speeds: Sequence[LaneSpeed] = ()
    error: str = ""

    @property
    def name(self) -> str:
        return f"{self.source} to {self.destination}"

    @property
    def break_even_tokens(self) -> float | None:
        """The number of tokens from which moving KV is faster than computing it, by the lines through the smallest and
        the largest size. 0: always; None: never, or unknown."""
        if len(self.speeds) < 2:
            return None
        low, high = self.speeds[0], self.speeds[-1]
        tokens = high.num_tokens - low.num_tokens
        move_s, compute_s = (high.seconds - low.seconds) / tokens, (high.computed_s - low.computed_s) / tokens
        start_s = (low.seconds - move_s * low.num_tokens) - (low.computed_s - compute_s * low.num_tokens)
        if compute_s <= move_s:
            return None
        return max(0.0, start_s / (compute_s - move_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedPort:
    """`what` listens at `address`, or should."""

    what: str
    address: str
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """Everything that was gathered about one model. `status` is /admin/status, empty where it could not be read.

    - `no_answer`: why the gateway could not be examined, and `fix` what helps, if more is known than that it must be
      started; `lacks_key`: it wants another API key
    - `tls_error`: why its certificate is not accepted
    - `clock_ahead_s`: the gateway's clock less this host's; None if it sent none
    - `certificates`: when each certificate ends, in seconds since 1970
    - `hub_commits`: the commit that main has now of each served repository of the Hugging Face hub, if the hub answers
    - `unprobed`, `untried`: lanes and ports for which there was no time; `unseen`: other models behind the address
    """

    url: str
    now_s: float
    no_answer: str = ""
    fix: str = ""
    lacks_key: bool = False
    tls_error: str = ""
    clock_ahead_s: float | None = None
    status: View = field(default_factory=dict)
    certificates: Mapping[str, float] = field(default_factory=dict)
    closed: Sequence[ClosedPort] = ()
    host: HostFacts | None = None
    redis: RedisFacts | None = None
    probes: Sequence[LaneProbe] = ()
    hub_commits: Mapping[str, str] = field(default_factory=dict)
    unprobed: int = 0
    untried: int = 0
    unseen: int = 0

    @property
    def workers(self) -> Sequence[View]:
        return tuple(self.status.get("workers", ()))

    @property
    def hub_names(self) -> Sequence[HubName]:
        """The repositories and commits that workers serve."""
        infos = [worker["info"] for worker in self.workers if worker["info"]]
        names = dict.fromkeys(HubName.of_cached(info.get("model_path", "")) for info in infos)
        return [name for name in names if name is not None]

    @property
    def lanes(self) -> Sequence[tuple[str, View]]:
        """Lanes, each with the worker that reports it."""
        held = self.status.get("kv", {})
        return [(name, lane) for name, one in held.items() if one is not None for lane in one["lanes"]]
