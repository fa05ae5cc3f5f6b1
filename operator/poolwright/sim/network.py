"""Links between machines: when KV that is ready to leave has arrived. Each machine sends and receives over one link."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Network:
    """`message_seconds`: a message one way. `client_seconds`: from the end of a step to its tokens' being at their
    client. `handoff_seconds`: what a hand-off takes besides messages and bytes.

    `reads_behind_steps`: a machine reads KV behind the steps that it had submitted when it learned where the KV shall
    go, as this project's engines do.

    `serial_below_tokens`: KV of shorter prompts leaves once the step that computes it has ended; of longer ones layer
    by layer beside the computation, so that no more than a layer of it stands behind (Splitwise, ISCA 2024, section
    4.3: 512 tokens on an H100).
    """

    bytes_per_second: float
    message_seconds: float = 0.0005
    serial_below_tokens: int = 512
    layers: int = 80
    client_seconds: float = 0.0
    handoff_seconds: float = 0.0
    reads_behind_steps: bool = False


class Link:
    """One direction of a machine's network interface: free again at `free_at`, first come first served."""

    __slots__ = ("free_at",)

    def __init__(self) -> None:
        self.free_at = 0.0


def send(
    network: Network, sender: Link, receiver: Link, num_bytes: float, begun: float, ended: float, layered: bool
) -> float:
    """When KV of a step from `begun` to `ended` has arrived. The links are taken from when it can leave."""
    leaves = begun if layered else ended
    start = max(leaves, sender.free_at, receiver.free_at)
    end = start + num_bytes / network.bytes_per_second
    if layered:
        end = max(end, ended + num_bytes / (network.layers * network.bytes_per_second))
    sender.free_at = receiver.free_at = end
    return end + network.message_seconds + network.handoff_seconds
