"""Roles, and the two admin messages that set and verify one.

A role is a preference of the router, never a permission of the engine. The wire, labels, environment and metrics write
`prompt|token|mixed`; the custom resource writes `Prompt|Token|Mixed`.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from poolwright_protocol.machine_profile import MachineProfile


class Role(StrEnum):
    PROMPT = "prompt"
    TOKEN = "token"  # noqa: S105
    MIXED = "mixed"

    @property
    def title_case(self) -> str:
        """The spelling of the custom resource: Prompt, Token, Mixed."""
        return self.value.capitalize()

    @classmethod
    def from_title_case(cls, text: str) -> "Role":
        for role in cls:
            if role.title_case == text:
                return role
        raise ValueError(f"unknown role {text!r}; expected one of Prompt, Token, Mixed")


@dataclass(frozen=True, slots=True)
class RolePut:
    """Body of `PUT /admin/role`. 421 for another podUid, 409 for an older epoch or another role at the same epoch."""

    pod_uid: str
    role: Role
    epoch: int
    max_prefill_tokens_per_step: int | None = None

    def to_json(self) -> dict[str, Any]:
        body: dict[str, Any] = {"podUid": self.pod_uid, "role": self.role.value, "epoch": self.epoch}
        if self.max_prefill_tokens_per_step is not None:
            body["maxPrefillTokensPerStep"] = self.max_prefill_tokens_per_step
        return body

    @classmethod
    def from_json(cls, body: object) -> "RolePut":
        """Raises ValueError that names the offending field."""
        if not isinstance(body, dict):
            raise ValueError("body: expected a JSON object")
        pod_uid, role, epoch, bound = (body.get(k) for k in ("podUid", "role", "epoch", "maxPrefillTokensPerStep"))
        if not isinstance(pod_uid, str) or not pod_uid:
            raise ValueError("podUid: expected a non-empty string")
        if role not in [r.value for r in Role]:
            raise ValueError(f"role: expected one of prompt, token, mixed, not {role!r}")
        if not isinstance(epoch, int) or isinstance(epoch, bool) or epoch < 0:
            raise ValueError(f"epoch: expected a non-negative integer, not {epoch!r}")
        if bound is not None and (not isinstance(bound, int) or isinstance(bound, bool) or bound < 1):
            raise ValueError(f"maxPrefillTokensPerStep: expected a positive integer, not {bound!r}")
        return cls(pod_uid, Role(role), epoch, bound)


@dataclass(frozen=True, slots=True)
class RoleState:
    """Body of `GET /admin/role`: what the engine does now.

    `steps_since_switch` counts step boundaries passed since the last accepted role change; a move is verified once it
    is at least 1. `foreign_requests` are those begun under an earlier role and still running. `drained_seconds` is how
    long the last foreign request took to leave after the switch; None while some still run. `step_profile`: what its
    machine's work takes; None where the engine does not say, as older ones do not, or says what cannot be, and then
    `step_profile_problem` says what; that is the reader's, and never sent.
    """

    pod_uid: str
    boot_id: str
    role: Role
    epoch: int
    steps_since_switch: int
    foreign_requests: int = 0
    drained_seconds: float | None = None
    max_prefill_tokens_per_step: int | None = None
    step_profile: MachineProfile | None = None
    step_profile_problem: str = ""

    def to_json(self) -> dict[str, Any]:
        body = {_camel(name): getattr(self, name) for name in _PLAIN_FIELDS}
        body["role"] = self.role.value
        if self.step_profile is not None:
            body["stepProfile"] = self.step_profile.to_json()
        return body

    @classmethod
    def from_json(cls, body: dict[str, Any]) -> "RoleState":
        """Unknown keys are ignored, so a newer engine may say more. A profile that cannot be takes nothing from the
        rest: a move goes by the role."""
        fields = {name: body[_camel(name)] for name in _PLAIN_FIELDS if _camel(name) in body}
        fields["role"] = Role(fields["role"])
        profile, problem = None, ""
        if body.get("stepProfile") is not None:
            try:
                profile = MachineProfile.from_json(body["stepProfile"])
            except ValueError as error:
                problem = f"stepProfile: {error}"
        return cls(**fields, step_profile=profile, step_profile_problem=problem)


_PLAIN_FIELDS = tuple(
    name for name in RoleState.__dataclass_fields__ if name not in ("step_profile", "step_profile_problem")
)


def _camel(name: str) -> str:
    head, *rest = name.split("_")
    return head + "".join(word.capitalize() for word in rest)
