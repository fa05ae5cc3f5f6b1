"""The bed for people, behind the Makefile's cluster verbs.

python -m testbed up [--api]      start a cluster that stays until `down`; --api: without a node, needs no root
python -m testbed down            end it, and clean up after beds whose keeper was killed
python -m testbed status          what runs, where its kubeconfig is, how much memory each program takes
python -m testbed run COMMAND…    run a command where the cluster's addresses work, kubectl and helm on the PATH
python -m testbed build [STEP…]   do ahead what a first start does: control-plane, node-packages, node, helm, images
python -m testbed images [load]   build the project's images; with `load`, into the running cluster
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

from testbed import bed, binaries, images, keeper, prepare
from testbed.bed import Bed, NodeBed
from testbed.progress import Unavailable, say


def up(arguments: list[str]) -> int:
    with_node = "--api" not in arguments
    for running in _of_people():
        say("a cluster is already up")
        _describe(running)
        return 0
    prepare.need("control-plane", *(("node-packages", "node") if with_node else ()))
    started = time.monotonic()
    cluster = bed.start_with_node(detached=True) if with_node else bed.start(detached=True)
    say(f"up in {time.monotonic() - started:.0f} s; `down` ends it")
    _describe(cluster)
    return 0


def down(_: list[str]) -> int:
    for running in _of_people():
        os.kill(running.keeper_pid, signal.SIGTERM)
        deadline = time.monotonic() + bed.CLOSE_LIMIT_SECONDS
        while running.folder.path.exists():
            if time.monotonic() > deadline:
                say(f"bed {running.folder.path.name} did not end within {bed.CLOSE_LIMIT_SECONDS} s")
                return 1
            time.sleep(0.1)
        say(f"ended bed {running.folder.path.name}")
    for swept in keeper.sweep():
        say(f"removed what was left of bed {swept}")
    return 0


def status(_: list[str]) -> int:
    beds = bed.running_beds()
    for running in beds:
        _describe(running)
    if not beds:
        say("nothing is running")
    return 0


def run(command: list[str]) -> int:
    for running in _of_people():
        inside = running.inside(command) if isinstance(running, NodeBed) else command
        path = f"{binaries.control_plane_assets()}:{binaries.helm().parent}:{os.environ['PATH']}"
        environment = {**os.environ, "KUBECONFIG": str(running.kubeconfig), "PATH": path}
        return subprocess.run(inside, env=environment, check=False).returncode
    raise Unavailable("no cluster is up")


def build(steps: list[str]) -> int:
    if unknown := set(steps) - set(prepare.STEPS):
        raise Unavailable(f"no such step: {', '.join(sorted(unknown))}; there are {', '.join(prepare.STEPS)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a compiler ends with us
    prepare.need(*(steps or prepare.STEPS))
    return 0


def make_images(arguments: list[str]) -> int:
    built = images.project_images()
    for target in images.TARGETS:
        print(f"{built.name(target)}\t{built.archive(target)}")
    for running in _of_people() if arguments == ["load"] else ():
        if isinstance(running, NodeBed):
            for target in images.TARGETS:
                running.load_image(built.archive(target))
                say(f"loaded {built.name(target)}")
    print(f"helm install … --set image.repository={built.repository},image.tag={built.tag}")
    return 0


def _of_people() -> list[Bed]:
    """The beds that `up` started; those of test runs belong to the test runs."""
    return [running for running in bed.running_beds() if running.folder.commands.exists()]


def _describe(running: Bed) -> None:
    kind = "cluster with a node" if isinstance(running, NodeBed) else "control plane"
    owner = "up" if running.folder.commands.exists() else "a test run"
    say(f"bed {running.folder.path.name}, a {kind} of `{owner}`: {running.url}, kubeconfig {running.kubeconfig}")
    state = running.state()
    say(f"  running: {', '.join(state['running'])}" + (f"; exited: {state['exited']}" if state["exited"] else ""))
    say("  memory in MiB: " + ", ".join(f"{name} {size}" for name, size in running.memory_mebibytes().items()))


VERBS: dict[str, Callable[[list[str]], int]] = {
    "up": up,
    "down": down,
    "status": status,
    "run": run,
    "build": build,
    "images": make_images,
}


def main() -> int:
    if len(sys.argv) < 2 or sys.argv[1] not in VERBS:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        return VERBS[sys.argv[1]](sys.argv[2:])
    except Unavailable as reason:
        say(str(reason))
        return 1


if __name__ == "__main__":
    sys.exit(main())
