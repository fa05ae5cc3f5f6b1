"""What a router says of a request beside its body, in headers of its own. A client that sets them itself gains nothing:
where its prompt is computed is signed, and to be relegated is to wait."""

from collections.abc import Mapping
from dataclasses import dataclass

from poolwright_protocol import names


@dataclass(frozen=True, slots=True)
class Routed:
    """`prompt_machine`: the signed ticket as it came, checked by the hand-off; None: prefill here. `relegated`: behind
    all that are not."""

    prompt_machine: str | None = None
    relegated: bool = False


UNROUTED = Routed()


def routed_by(headers: Mapping[str, str]) -> Routed:
    return Routed(headers.get(names.HEADER_PROMPT_MACHINE), headers.get(names.HEADER_RELEGATED) == "1")
