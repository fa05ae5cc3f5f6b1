"""The custom resource `InferencePool` as types: the one source of the CRD, and the only door for a spec from YAML.

Owns every field, bound, default, description and cross-field rule. A rule is written twice, side by side: in CEL for
the API server and in Python for local mode, with one message; one corpus of bad specs holds the two together.
Knows no client, no clock and no policy.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import combinations
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, WithJsonSchema
from pydantic.alias_generators import to_camel

from poolwright_protocol import names
from poolwright_protocol.roles import Role

API_VERSION = f"{names.GROUP}/{names.VERSION}"


class InvalidPool(Exception):
    """A spec that does not validate: every error as (field path, message), paths as the API server writes them."""

    def __init__(self, errors: Sequence[tuple[str, str]]) -> None:
        super().__init__("; ".join(f"{path}: {message}" for path, message in errors))
        self.errors: tuple[tuple[str, str], ...] = tuple(errors)


@dataclass(frozen=True, slots=True)
class Rule:
    """One cross-field rule of a model. `field` is the path of the blamed field below that model, as `.max`."""

    cel: str
    message: str
    holds: Callable[[Any], bool]
    field: str = ""


class Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, alias_generator=to_camel, populate_by_name=True)
    rules: ClassVar[tuple[Rule, ...]] = ()


Int32 = Annotated[int, Field(strict=True, json_schema_extra={"format": "int32"})]
Int64 = Annotated[int, Field(strict=True, json_schema_extra={"format": "int64"})]


def _list_map(*keys: str) -> dict[str, Any]:
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": list(keys)}


_SET: dict[str, Any] = {"x-kubernetes-list-type": "set"}
_ATOMIC: dict[str, Any] = {"x-kubernetes-list-type": "atomic"}
_PRESERVE: dict[str, Any] = {"x-kubernetes-preserve-unknown-fields": True}

# --------------------------------------------------------------------------------------------------------------- enums


class PoolRole(StrEnum):
    PROMPT = "Prompt"
    TOKEN = "Token"  # noqa: S105
    MIXED = "Mixed"

    @property
    def role(self) -> Role:
        return Role.from_title_case(self.value)


class Metric(StrEnum):
    TTFT = "TTFT"
    TBT = "TBT"


class Mode(StrEnum):
    ACTIVE = "Active"
    ADVISORY = "Advisory"
    MANUAL = "Manual"
    PAUSED = "Paused"


# --------------------------------------------------------------------------------------------------------------- model


class PersistentVolumeClaimSource(Model):
    """A claim in the namespace of the pool, mounted read-only into every engine."""

    claim_name: Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")] = (
        Field(description="Name of a PersistentVolumeClaim in the namespace of the pool. It is mounted read-only.")
    )
    path: Annotated[str, Field(min_length=1, max_length=1024, pattern=r"^[^/].*$")] = Field(
        default=".",
        description="Path of the model below the root of the volume: a folder of safetensors or a GGUF file. "
        "Default: the root itself.",
    )
    rules = (
        Rule(
            cel="!('..' in self.path.split('/'))",
            message="path must stay inside the volume: no '..'",
            holds=lambda s: ".." not in s.path.split("/"),
            field=".path",
        ),
    )


class ModelSource(Model):
    path: Annotated[str, Field(min_length=2, max_length=1024, pattern=r"^/.*$")] | None = Field(
        default=None,
        description="Absolute path of the model as the engine sees it: a folder of safetensors or a GGUF file, "
        "provided by a volume of `machines[].template` or by the engine image. In local mode, a path of this machine.",
    )
    persistent_volume_claim: PersistentVolumeClaimSource | None = Field(
        default=None, description="The model lies on a PersistentVolumeClaim, which Poolwright mounts read-only."
    )
    rules = (
        Rule(
            cel="has(self.path) != has(self.persistentVolumeClaim)",
            message="exactly one of path and persistentVolumeClaim must be set",
            holds=lambda s: (s.path is None) != (s.persistent_volume_claim is None),
        ),
    )


class ModelSpec(Model):
    name: Annotated[
        str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9]([A-Za-z0-9._:/-]*[A-Za-z0-9])?$")
    ] = Field(description="The model name that clients send and `/v1/models` lists.")
    source: ModelSource = Field(description="Where the engines find the weights. Exactly one member must be set.")


# ----------------------------------------------------------------------------------------------------------------- slo


class Objective(Model):
    name: Annotated[str, Field(min_length=1, max_length=20, pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$")] = Field(
        description="Name of this objective in status and metrics. Unique in the list."
    )
    metric: Metric = Field(
        description="What is measured. TTFT: from arrival at the router to the first token at the client, queueing "
        "included. TBT: every gap between consecutive tokens of a stream."
    )
    percentile: Annotated[Int32, Field(ge=1, le=99)] = Field(
        default=90,
        description="Percentile that must be at or under the target, over the metrics window. Default 90.",
    )
    target_milliseconds: Annotated[Int32, Field(ge=1, le=120_000)] = Field(description="The target in milliseconds.")


class SLO(Model):
    objectives: Annotated[list[Objective], Field(min_length=1, max_length=8, json_schema_extra=_list_map("name"))] = (
        Field(description="The latency objectives of the pool; at most one for each metric.")
    )
    rules = (
        Rule(
            cel="self.objectives.all(a, self.objectives.exists_one(b, a.metric == b.metric))",
            message="at most one objective for each metric",
            holds=lambda s: len({o.metric for o in s.objectives}) == len(s.objectives),
            field=".objectives",
        ),
    )


# ------------------------------------------------------------------------------------------------------------ machines

_QUANTITY_PATTERN = r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?$"


def _check_quantity(value: int | str) -> int | str:
    if isinstance(value, str) and (len(value) > 32 or not re.fullmatch(_QUANTITY_PATTERN, value)):
        raise ValueError(f"should match {_QUANTITY_PATTERN}")
    return value


Quantity = Annotated[
    Annotated[int, Field(strict=True)] | str,
    AfterValidator(_check_quantity),
    WithJsonSchema({"x-kubernetes-int-or-string": True, "maxLength": 32, "pattern": _QUANTITY_PATTERN}),
]
Quantities = Annotated[dict[str, Quantity], Field(max_length=16)]


class Resources(Model):
    limits: Quantities = Field(
        default_factory=dict,
        description="The most the engine container may use, by resource name, for example `nvidia.com/gpu: 1`. "
        "In local mode `cpu` is the cap of the engine process.",
    )
    requests: Quantities = Field(
        default_factory=dict, description="What the scheduler reserves for the engine container. Default: the limits."
    )


class TolerationOperator(StrEnum):
    EXISTS = "Exists"
    EQUAL = "Equal"


class TaintEffect(StrEnum):
    NO_SCHEDULE = "NoSchedule"
    PREFER_NO_SCHEDULE = "PreferNoSchedule"
    NO_EXECUTE = "NoExecute"


class Toleration(Model):
    key: Annotated[str, Field(max_length=317)] | None = Field(
        default=None, description="Taint key. Empty with operator Exists tolerates every taint."
    )
    operator: TolerationOperator | None = Field(default=None, description="Exists or Equal. Default Equal.")
    value: Annotated[str, Field(max_length=63)] | None = Field(default=None, description="Taint value for Equal.")
    effect: TaintEffect | None = Field(default=None, description="Taint effect. Unset tolerates all effects.")
    toleration_seconds: Int64 | None = Field(
        default=None, description="How long a NoExecute taint is tolerated. Unset: for ever."
    )


class EnvVar(Model):
    model_config = ConfigDict(json_schema_extra={"x-kubernetes-map-type": "atomic"})
    name: Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] = Field(
        description="Name of the variable. Names that begin with POOLWRIGHT_ belong to Poolwright."
    )
    value: Annotated[str, Field(max_length=4096)] | None = Field(default=None, description="Value of the variable.")
    value_from: dict[str, Any] | None = Field(
        default=None,
        description="Source of the value, as in a pod: secretKeyRef, configMapKeyRef, fieldRef or resourceFieldRef. "
        "Checked by the API server when the pod template is applied.",
        json_schema_extra=_PRESERVE,
    )
    rules = (
        Rule(
            cel="!self.name.startsWith('POOLWRIGHT_')",
            message="names that begin with POOLWRIGHT_ belong to Poolwright",
            holds=lambda s: not s.name.startswith("POOLWRIGHT_"),
            field=".name",
        ),
    )


class Volume(Model):
    model_config = ConfigDict(extra="allow", json_schema_extra=_PRESERVE)
    name: Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")] = Field(
        description="Name of the volume. Names that begin with poolwright- belong to Poolwright. The source is a field "
        "beside it, as in a pod, and is checked by the API server when the pod template is applied."
    )
    rules = (
        Rule(
            cel="!self.name.startsWith('poolwright-')",
            message="names that begin with poolwright- belong to Poolwright",
            holds=lambda s: not s.name.startswith("poolwright-"),
            field=".name",
        ),
    )


class VolumeMount(Model):
    name: Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")] = Field(
        description="Name of a volume of this template."
    )
    mount_path: Annotated[str, Field(min_length=1, max_length=1024, pattern=r"^/.*$")] = Field(
        description="Absolute path in the engine container."
    )
    sub_path: Annotated[str, Field(max_length=1024)] | None = Field(
        default=None, description="Path below the root of the volume. Default: the root."
    )
    read_only: bool | None = Field(default=None, strict=True, description="Mount read-only. Default false.")


class LocalObjectReference(Model):
    name: Annotated[str, Field(min_length=1, max_length=253)] = Field(
        description="Name of an object in the namespace of the pool."
    )


def _not_ours(keys: Mapping[str, str]) -> bool:
    return not any(k.startswith((f"{names.GROUP}/", "app.kubernetes.io/")) for k in keys)


Strings = Annotated[dict[str, Annotated[str, Field(max_length=1024)]], Field(max_length=64)]


class MachineTemplate(Model):
    """The part of the engine's pod that belongs to the user. Everything else of the pod belongs to Poolwright."""

    labels: Strings = Field(
        default_factory=dict,
        description="Labels of the pods. Keys under poolwright.dev/ and app.kubernetes.io/ belong to Poolwright.",
    )
    annotations: Strings = Field(
        default_factory=dict,
        description="Annotations of the pods. Keys under poolwright.dev/ and app.kubernetes.io/ belong to Poolwright.",
    )
    resources: Resources = Field(
        default_factory=Resources, description="Resources of the engine container; the GPUs of a machine stand here."
    )
    node_selector: Strings = Field(default_factory=dict, description="Labels that a node must carry.")
    tolerations: Annotated[list[Toleration], Field(max_length=32, json_schema_extra=_ATOMIC)] = Field(
        default_factory=list, description="Node taints that the pods tolerate."
    )
    affinity: dict[str, Any] | None = Field(
        default=None,
        description="Affinity as in a pod. Checked by the API server when the pod template is applied.",
        json_schema_extra=_PRESERVE,
    )
    priority_class_name: Annotated[str, Field(max_length=253)] | None = Field(
        default=None, description="PriorityClass of the pods."
    )
    runtime_class_name: Annotated[str, Field(max_length=253)] | None = Field(
        default=None, description="RuntimeClass of the pods, where GPUs need one."
    )
    image_pull_secrets: Annotated[
        list[LocalObjectReference], Field(max_length=16, json_schema_extra=_list_map("name"))
    ] = Field(default_factory=list, description="Secrets with which the engine image is pulled.")
    env: Annotated[list[EnvVar], Field(max_length=64, json_schema_extra=_list_map("name"))] = Field(
        default_factory=list, description="Environment variables of the engine container."
    )
    volumes: Annotated[list[Volume], Field(max_length=32, json_schema_extra=_list_map("name"))] = Field(
        default_factory=list, description="Volumes of the pods."
    )
    volume_mounts: Annotated[list[VolumeMount], Field(max_length=32, json_schema_extra=_list_map("mountPath"))] = Field(
        default_factory=list, description="Mounts of those volumes in the engine container."
    )
    rules = tuple(
        Rule(
            cel=f"!has(self.{field}) || self.{field}.all(k, "
            f"!k.startsWith('{names.GROUP}/') && !k.startsWith('app.kubernetes.io/'))",
            message=f"keys under {names.GROUP}/ and app.kubernetes.io/ belong to Poolwright",
            holds=lambda s, field=field: _not_ours(getattr(s, field)),  # type: ignore[misc]
            field=f".{field}",
        )
        for field in ("labels", "annotations")
    )


_BATCHED = Annotated[Int32, Field(ge=16, le=1_048_576)]
_SEQS = Annotated[Int32, Field(ge=1, le=4096)]
_KV_MEBIBYTES = Annotated[Int32, Field(ge=1, le=16_777_216)]


class EngineOverrides(Model):
    max_num_batched_tokens: _BATCHED | None = Field(
        default=None, description="Token budget of one step on this hardware. Default: `spec.engine`'s."
    )
    max_num_seqs: _SEQS | None = Field(
        default=None, description="Most sequences in one step on this hardware. Default: `spec.engine`'s."
    )
    kv_cache_mebibytes: _KV_MEBIBYTES | None = Field(
        default=None, description="Size of the KV cache on this hardware, in MiB. Default: `spec.engine`'s."
    )


class MachineClass(Model):
    name: Annotated[str, Field(min_length=1, max_length=20, pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$")] = Field(
        description="Name of the hardware class, at most 20 characters. Unique in the list."
    )
    replicas: Annotated[Int32, Field(ge=1, le=1000)] = Field(
        description="Machines of this class: a fixed budget. A machine is one pod and its GPUs; moves between pools "
        "never change this number."
    )
    roles: Annotated[list[PoolRole], Field(min_length=1, max_length=3, json_schema_extra=_SET)] = Field(
        default_factory=lambda: list(PoolRole),
        description="The roles a machine of this class may take. Default: all three.",
    )
    engine: EngineOverrides = Field(
        default_factory=EngineOverrides, description="Engine settings that differ on this hardware."
    )
    template: MachineTemplate = Field(
        default_factory=MachineTemplate,
        description="The part of the engine's pod that belongs to you. An edit rolls the pods of this class.",
    )


# --------------------------------------------------------------------------------------------------------------- pools

_COUNT = Annotated[Int32, Field(ge=0, le=8000)]


class PoolBounds(Model):
    min: _COUNT = Field(default=0, description="Machines this pool keeps at all times. Default 0. No move goes below.")
    max: _COUNT | None = Field(default=None, description="Most machines this pool may have. Default: no bound.")
    replicas: _COUNT | None = Field(
        default=None,
        description="Machines in this pool: the count to hold in mode Manual, the starting split in the others. "
        "Default: Poolwright chooses the start.",
    )
    max_prefill_tokens_per_step: Annotated[Int32, Field(ge=1, le=1_048_576)] | None = Field(
        default=None,
        description="Most prompt tokens in one step of a machine of this pool. A small bound keeps gaps between tokens "
        "short where a machine does both phases; a large one makes prompts cheap. Default: the engine's own budget. An "
        "edit takes effect at the next step, without a restart.",
    )
    rules = (
        Rule(
            cel="!has(self.max) || self.min <= self.max",
            message="max must be at least min",
            holds=lambda s: s.max is None or s.min <= s.max,
            field=".max",
        ),
        Rule(
            cel="!has(self.replicas) || self.min <= self.replicas",
            message="replicas must be at least min",
            holds=lambda s: s.replicas is None or s.min <= s.replicas,
            field=".replicas",
        ),
        Rule(
            cel="!has(self.replicas) || !has(self.max) || self.replicas <= self.max",
            message="replicas must be at most max",
            holds=lambda s: s.replicas is None or s.max is None or s.replicas <= s.max,
            field=".replicas",
        ),
    )

    @property
    def asked(self) -> int:
        """Machines this pool asks for at the start: its count, else its minimum."""
        return self.min if self.replicas is None else self.replicas


class Pools(Model):
    prompt: PoolBounds = Field(default_factory=PoolBounds, description="Machines that compute prompts (prefill).")
    token: PoolBounds = Field(default_factory=PoolBounds, description="Machines that generate tokens (decode).")
    mixed: PoolBounds = Field(
        default_factory=PoolBounds, description="Machines that do both, prompts in chunks between token steps."
    )

    def of(self, role: Role) -> PoolBounds:
        bounds: PoolBounds = getattr(self, role.value)
        return bounds


class Basis(StrEnum):
    WORK = "Work"
    LATENCY = "Latency"


class Rebalance(Model):
    mode: Mode = Field(
        default=Mode.ACTIVE,
        description="Who chooses moves. Active: the policy. Advisory: the policy, recorded and not done. Manual: the "
        "counts in `pools`. Paused: nobody. In all four, new machines get a role, minimums are repaired and moves "
        "already begun are finished. Default Active.",
    )
    basis: Basis = Field(
        default=Basis.LATENCY,
        description="What moves and routing go by. Latency: what is measured, alone. Work: the price of the work that "
        "is offered, as soon as engines of every class have said what their steps take, and measured latency until "
        "then and where targets are plainly missed. Default Latency.",
    )
    interval_seconds: Annotated[Int32, Field(ge=1, le=3600)] = Field(
        default=60, description="How often a move is considered. Default 60."
    )
    metrics_window_seconds: Annotated[Int32, Field(ge=4, le=3600)] = Field(
        default=120,
        description="Window over which percentiles are computed; at least four scrape intervals. Default 120.",
    )
    dwell_seconds: Annotated[Int32, Field(ge=0, le=86_400)] = Field(
        default=60,
        description="A machine keeps a role at least this long, and no move follows a rolled-back one sooner. "
        "Default 60. Repair of a minimum does not wait.",
    )
    max_moves_per_window: Annotated[Int32, Field(ge=1, le=16)] = Field(
        default=2, description="Most moves in any `windowSeconds`. Default 2. Repair of a minimum is not counted."
    )
    window_seconds: Annotated[Int32, Field(ge=10, le=86_400)] = Field(
        default=300, description="Length of the window that `maxMovesPerWindow` bounds. Default 300."
    )


class EngineSpec(Model):
    max_num_batched_tokens: _BATCHED = Field(default=2048, description="Token budget of one step. Default 2048.")
    max_num_seqs: _SEQS = Field(default=256, description="Most sequences in one step. Default 256.")
    block_size: Annotated[Int32, Field(ge=1, le=256)] = Field(
        default=16, description="Tokens in one block of KV cache, the same on every machine. Default 16."
    )
    kv_cache_mebibytes: _KV_MEBIBYTES = Field(default=512, description="Size of the KV cache in MiB. Default 512.")
    max_model_len: Annotated[Int32, Field(ge=16, le=16_777_216)] | None = Field(
        default=None, description="Most tokens of prompt and output together. Default: what the model was made for."
    )


class Relegation(StrEnum):
    LATE = "Late"
    NEVER = "Never"


class Refusal(StrEnum):
    LATE = "Late"
    NEVER = "Never"


class RouterSpec(Model):
    replicas: Annotated[Int32, Field(ge=1, le=32)] = Field(default=2, description="Router pods. Default 2.")
    relegation: Relegation = Field(
        default=Relegation.LATE,
        description="Who is served behind all others, for 30 s at most, and never refused. Late: requests whose first "
        "token is predicted to be late in any case; that takes `rebalance.basis: Work`, objectives for TTFT and TBT, "
        "and predictions that could be checked of late: without them, nobody. Never: nobody. Default Late. An edit "
        "takes effect in seconds, without a restart.",
    )
    refusal: Refusal = Field(
        default=Refusal.NEVER,
        description="Who is refused, with the time after which to come back. Never: nobody. Late: requests whose first "
        "token or whose gaps between tokens are predicted over their targets, where one in twenty may still be served "
        "behind all others; that takes what `relegation: Late` takes. Refused requests are in no measured latency. "
        "Default Never. An edit takes effect in seconds, without a restart.",
    )


# ---------------------------------------------------------------------------------------------------------- cross-field


def _and(words: Sequence[str], last: str = "and") -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {last} {words[-1]}"


def _asked_rule(roles: tuple[PoolRole, ...]) -> Rule:
    """Hall's condition: what these pools ask for must be there among the machines that may take one of the roles."""
    pools = [r.role.value for r in roles]
    asked = " + ".join(f"(has(self.pools.{p}.replicas) ? self.pools.{p}.replicas : self.pools.{p}.min)" for p in pools)
    able = ", ".join(f"'{r}'" for r in roles)
    return Rule(
        cel=f"{asked} <= self.machines.map(m, m.roles.exists(r, r in [{able}]), m.replicas).sum()",
        message=f"{_and(pools)} (replicas, else min) ask for more machines than may be {_and(roles, 'or')}",
        holds=lambda s: (
            sum(s.pools.of(r.role).asked for r in roles)
            <= sum(m.replicas for m in s.machines if any(r in roles for r in m.roles))
        ),
        field=f".pools.{pools[0]}" if len(pools) == 1 else ".pools",
    )


def _room_rule(roles: tuple[PoolRole, ...]) -> Rule:
    """The same from the other side: machines confined to these roles must find room under the maximums."""
    pools = [r.role.value for r in roles]
    bounded = " && ".join(f"has(self.pools.{p}.max)" for p in pools)
    room = " + ".join(f"self.pools.{p}.max" for p in pools)
    only = ", ".join(f"'{r}'" for r in roles)

    def holds(s: "InferencePoolSpec") -> bool:
        bounds = [s.pools.of(r.role).max for r in roles]
        confined = sum(m.replicas for m in s.machines if all(r in roles for r in m.roles))
        return any(b is None for b in bounds) or confined <= sum(b for b in bounds if b is not None)

    return Rule(
        cel=f"!({bounded}) || self.machines.map(m, m.roles.all(r, r in [{only}]), m.replicas).sum() <= {room}",
        message=f"more machines can only be {_and(roles, 'or')} than max of {_and(pools)} leaves room for",
        holds=holds,
        field=f".pools.{pools[0]}.max" if len(pools) == 1 else ".pools",
    )


def _role_subsets() -> Iterator[tuple[PoolRole, ...]]:
    for size in (1, 2, 3):
        yield from combinations(PoolRole, size)


def _phase_rule(roles: tuple[PoolRole, ...], work: str) -> Rule:
    able = ", ".join(f"'{r}'" for r in roles)
    return Rule(
        cel=f"self.machines.exists(m, m.roles.exists(r, r in [{able}]))",
        message=f"no machine may be {_and(roles, 'or')}: nothing would {work}",
        holds=lambda s: any(r in roles for m in s.machines for r in m.roles),
        field=".machines",
    )


def _class_setting(field: str) -> str:
    return f"(has(m.engine) && has(m.engine.{field}) ? m.engine.{field} : self.engine.{field})"


_MANUAL = "self.rebalance.mode != 'Manual'"
_ALL_COUNTS = " && ".join(f"has(self.pools.{r.value}.replicas)" for r in Role)


def _all_counts(spec: "InferencePoolSpec") -> bool:
    return all(spec.pools.of(r).replicas is not None for r in Role)


class InferencePoolSpec(Model):
    model: ModelSpec = Field(description="The model that every machine of the pool serves. An edit rolls the pods.")
    slo: SLO = Field(description="The latency targets that moves between the pools serve.")
    machines: Annotated[list[MachineClass], Field(min_length=1, max_length=8, json_schema_extra=_list_map("name"))] = (
        Field(description="The hardware: one entry for each class of machine. Their replicas together are the budget.")
    )
    pools: Pools = Field(
        default_factory=Pools, description="Bounds and counts of the three pools that share the machines."
    )
    rebalance: Rebalance = Field(default_factory=Rebalance, description="When and by whom machines are moved.")
    engine: EngineSpec = Field(
        default_factory=EngineSpec, description="Settings of the engines. An edit rolls the pods."
    )
    router: RouterSpec = Field(default_factory=RouterSpec, description="The routers that clients talk to.")

    rules = (
        *(_asked_rule(roles) for roles in _role_subsets()),
        *(_room_rule(roles) for roles in _role_subsets()),
        Rule(
            cel=f"self.machines.all(m, {_class_setting('maxNumBatchedTokens')} >= {_class_setting('maxNumSeqs')})",
            message="maxNumBatchedTokens must be at least maxNumSeqs: a step holds one token of every running sequence",
            holds=lambda s: all(
                engine.max_num_batched_tokens >= engine.max_num_seqs for m in s.machines for engine in [s.engine_for(m)]
            ),
            field=".machines",
        ),
        _phase_rule((PoolRole.PROMPT, PoolRole.MIXED), "compute prompts"),
        _phase_rule((PoolRole.TOKEN, PoolRole.MIXED), "generate tokens"),
        Rule(
            cel=f"{_MANUAL} || ({_ALL_COUNTS})",
            message="mode Manual needs replicas on prompt, token and mixed",
            holds=lambda s: s.rebalance.mode is not Mode.MANUAL or _all_counts(s),
            field=".pools",
        ),
        Rule(
            cel=f"{_MANUAL} || !({_ALL_COUNTS}) || "
            + " + ".join(f"self.pools.{r.value}.replicas" for r in Role)
            + " == self.machines.map(m, m.replicas).sum()",
            message="mode Manual needs counts that add up: replicas of prompt, token and mixed must equal the machines",
            holds=lambda s: (
                s.rebalance.mode is not Mode.MANUAL
                or not _all_counts(s)
                or sum(s.pools.of(r).asked for r in Role) == s.budget
            ),
            field=".pools",
        ),
    )

    @property
    def budget(self) -> int:
        """Machines of all classes: the number that moves never change."""
        return sum(m.replicas for m in self.machines)

    def engine_for(self, machine_class: MachineClass) -> EngineSpec:
        """The engine settings of one class: `engine`, with the class's overrides."""
        return self.engine.model_copy(update=machine_class.engine.model_dump(exclude_none=True))


# -------------------------------------------------------------------------------------------------------------- status

Message = Annotated[str, Field(max_length=1024)]
ShortText = Annotated[str, Field(max_length=253)]
Time = Annotated[str, Field(json_schema_extra={"format": "date-time"})]  # RFC 3339, as Kubernetes writes it


class PoolCount(Model):
    ready: Annotated[Int32, Field(ge=0)] = Field(description="Ready machines in this pool now.")
    desired: Annotated[Int32, Field(ge=0)] = Field(description="Machines this pool is to have.")


class PoolCounts(Model):
    prompt: PoolCount = Field(description="The prompt pool.")
    token: PoolCount = Field(description="The token pool.")
    mixed: PoolCount = Field(description="The mixed pool.")


class ObjectiveState(StrEnum):
    MET = "Met"
    MISSED = "Missed"
    IDLE = "Idle"
    INSUFFICIENT = "Insufficient"
    UNKNOWN = "Unknown"


class ObjectiveStatus(Model):
    name: ShortText = Field(description="Name of the objective.")
    metric: Metric = Field(description="What is measured.")
    target_milliseconds: Int32 = Field(description="The target when this was observed.")
    observed_milliseconds: Int32 | None = Field(
        default=None, description="The percentile over the metrics window, or the age of the oldest waiting request."
    )
    share_under_target_percent: Annotated[Int32, Field(ge=0, le=100)] | None = Field(
        default=None, description="Share of the samples in the window that were at or under the target."
    )
    state: ObjectiveState = Field(
        description="Met or Missed; Idle: no arrivals and nothing in flight; Insufficient: fewer than 20 samples in "
        "the window; Unknown: no fresh metrics."
    )


class MetricsCompleteness(StrEnum):
    COMPLETE = "Complete"
    PARTIAL = "Partial"
    STALE = "Stale"
    MISSING = "Missing"


class MoveOutcome(StrEnum):
    COMPLETED = "Completed"
    ROLLED_BACK = "RolledBack"
    LOST = "Lost"


class LastMove(Model):
    time: Time = Field(description="When it ended.")
    summary: ShortText = Field(description="One line: machine, from, to, outcome.")


class RecentMove(Model):
    machine: ShortText = Field(description="Name of the machine.")
    uid: ShortText = Field(description="UID of the machine.")
    from_: PoolRole | None = Field(
        default=None,
        validation_alias="from",
        serialization_alias="from",
        description="The role it had; absent where not known.",
    )
    to: PoolRole = Field(description="The role it was to take.")
    reason: ShortText = Field(description="Why it was moved.")
    repair: bool = Field(
        default=False, strict=True, description="It repaired a minimum, so it is outside `maxMovesPerWindow`."
    )
    started_at: Time = Field(description="When it began.")
    duration_milliseconds: Annotated[Int64, Field(ge=0)] | None = Field(
        default=None, description="From begin to finish; absent while it runs."
    )
    drained_seconds: Annotated[Int32, Field(ge=0)] | None = Field(
        default=None, description="How long the last request begun under the old role took to leave."
    )
    outcome: MoveOutcome | None = Field(default=None, description="How it ended; absent while it runs.")


class Evidence(Model):
    name: ShortText = Field(description="What was looked at.")
    value: ShortText = Field(description="Its value, with the unit.")


class ProposedMove(Model):
    machine: ShortText = Field(description="Name of the machine.")
    from_: PoolRole | None = Field(
        default=None, validation_alias="from", serialization_alias="from", description="The role it has."
    )
    to: PoolRole = Field(description="The role it is to take.")


class DecisionStatus(Model):
    time: Time = Field(description="When it was first made; a repeat does not change it.")
    mode: Mode = Field(description="The mode it was made in.")
    reason: ShortText = Field(description="One word from a closed list: why something, or nothing, was done.")
    message: Message = Field(description="The same in a sentence.")
    moves: Annotated[list[ProposedMove], Field(max_length=16, json_schema_extra=_ATOMIC)] = Field(
        default_factory=list, description="The moves it began, or in mode Advisory would have begun."
    )
    evidence: Annotated[list[Evidence], Field(max_length=32, json_schema_extra=_list_map("name"))] = Field(
        default_factory=list, description="The numbers it used."
    )


class ConditionStatus(StrEnum):
    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class Condition(Model):
    type: Annotated[str, Field(max_length=316)] = Field(description="Type of the condition, in CamelCase.")
    status: ConditionStatus = Field(description="True, False or Unknown.")
    reason: Annotated[str, Field(min_length=1, max_length=128)] = Field(
        description="One word from a closed list, in CamelCase."
    )
    message: Annotated[str, Field(max_length=2048)] = Field(default="", description="The same in a sentence.")
    observed_generation: Annotated[Int64, Field(ge=0)] | None = Field(
        default=None, description="The generation of the spec it was set for."
    )
    last_transition_time: Time = Field(description="When the status last changed.")


MAX_RECENT_MOVES = 32  # at least twice the largest maxMovesPerWindow: repairs are kept beside the counted moves
MAX_DECISIONS = 8


class InferencePoolStatus(Model):
    observed_generation: Annotated[Int64, Field(ge=0)] | None = Field(
        default=None, description="The generation of the spec that this status is about."
    )
    pools: PoolCounts | None = Field(default=None, description="Machines in each pool, ready and desired.")
    objectives: Annotated[list[ObjectiveStatus], Field(max_length=8, json_schema_extra=_list_map("name"))] = Field(
        default_factory=list, description="Each objective as last observed."
    )
    metrics: MetricsCompleteness | None = Field(
        default=None,
        description="Complete: every live router was seen. Partial: some were missing. Stale: none was fresh. "
        "Missing: no answer.",
    )
    last_move: LastMove | None = Field(default=None, description="The last move that ended.")
    recent_moves: Annotated[list[RecentMove], Field(max_length=MAX_RECENT_MOVES, json_schema_extra=_ATOMIC)] = Field(
        default_factory=list, description="The last moves, oldest first. Births are none."
    )
    moves_held_until: Time | None = Field(
        default=None,
        description="No move by policy before this time, because the last moves could not be read. Absent: no hold.",
    )
    decisions: Annotated[list[DecisionStatus], Field(max_length=MAX_DECISIONS, json_schema_extra=_ATOMIC)] = Field(
        default_factory=list, description="The last decisions, oldest first; a repeat is not recorded again."
    )
    conditions: Annotated[list[Condition], Field(max_length=16, json_schema_extra=_list_map("type"))] = Field(
        default_factory=list, description="The state of the pool by Kubernetes conventions."
    )

    def to_json(self) -> dict[str, Any]:
        """As it is applied: absent rather than null."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


# -------------------------------------------------------------------------------------------------------------- object


class ObjectMeta(Model):
    model_config = ConfigDict(extra="ignore")
    name: Annotated[str, Field(min_length=1, max_length=30, pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$")] = Field(
        description="Name of the pool: at most 30 characters of a-z, 0-9 and '-', beginning with a letter. The names "
        "of all children begin with it."
    )
    namespace: str = "default"
    uid: str = ""
    generation: int = 0
    resource_version: str = ""
    deletion_timestamp: str | None = None
    creation_timestamp: str | None = None
    labels: dict[str, str] = Field(default_factory=dict)
    annotations: dict[str, str] = Field(default_factory=dict)


class InferencePool(Model):
    """One pool of machines that serves one model: prompt, token and mixed machines under latency targets."""

    api_version: str
    kind: str
    metadata: ObjectMeta
    spec: InferencePoolSpec = Field(description="What the pool is to be.")
    status: dict[str, Any] = Field(default_factory=dict)  # raw: a status that does not parse must not stop the pool

    @classmethod
    def parse(cls, raw: object) -> "InferencePool":
        """The only door: schema, then unique keys and cross-field rules, as the API server does. Raises InvalidPool."""
        if not isinstance(raw, Mapping):
            raise InvalidPool([("", "expected an object")])
        if raw.get("kind") != names.KIND or raw.get("apiVersion") != API_VERSION:
            raise InvalidPool([("kind", f"expected {names.KIND} of {API_VERSION}")])
        status = raw.get("status") or {}
        try:
            pool = cls.model_validate({**_without_nulls({k: v for k, v in raw.items() if k != "status"})})
        except ValidationError as error:
            raise InvalidPool([(_path(e["loc"]), e["msg"]) for e in error.errors(include_url=False)]) from None
        if errors := list(_broken_rules(pool.spec, "spec")):
            raise InvalidPool(errors)
        return pool.model_copy(update={"status": dict(status) if isinstance(status, Mapping) else {}})


def _without_nulls(value: Any) -> Any:
    """The API server drops null members of objects before it validates."""
    if isinstance(value, Mapping):
        return {k: _without_nulls(v) for k, v in value.items() if v is not None}
    if isinstance(value, list):
        return [_without_nulls(v) for v in value]
    return value


def _path(location: tuple[int | str, ...]) -> str:
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path


def _broken_rules(model: Model, path: str) -> Iterator[tuple[str, str]]:
    """Rules and unique keys, over the whole tree."""
    for rule in model.rules:
        if not rule.holds(model):
            yield path + rule.field, rule.message
    for name, info in type(model).model_fields.items():
        value, field = getattr(model, name), f"{path}.{info.alias}"
        if isinstance(value, Model):
            yield from _broken_rules(value, field)
        elif isinstance(value, list):
            extra = info.json_schema_extra if isinstance(info.json_schema_extra, dict) else {}
            yield from _duplicates(extra, value, field)
            for index, item in enumerate(value):
                if isinstance(item, Model):
                    yield from _broken_rules(item, f"{field}[{index}]")


def _duplicates(extra: Mapping[str, Any], items: Sequence[Any], path: str) -> Iterator[tuple[str, str]]:
    seen: set[Any] = set()
    for index, item in enumerate(items):
        match extra.get("x-kubernetes-list-type"):
            case "map":
                members = item.model_dump(by_alias=True)
                key: Any = tuple(members[k] for k in extra["x-kubernetes-list-map-keys"])
            case "set":
                key = item
            case _:
                return
        if key in seen:
            yield f"{path}[{index}]", "duplicate"
        seen.add(key)
